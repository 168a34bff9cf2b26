"""Personal and partial federations as Flower apps: what stays at home, who gets it, and which rounds are recorded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr")
pytestmark = pytest.mark.peers

from fedaudit.adapters.flower import audit_flower  # noqa: E402
from fedaudit.transcript.truth import truth_beside  # noqa: E402
from fedaudit.utils.errors import BadInput  # noqa: E402
from tests.adapters.flower_cases import CLIENT, PYPROJECT, SERVER, replaced, write_app  # noqa: E402

TASK = """
import copy
import re
import torch
from torch import nn

AT_HOME = {"fedper": "head", "fedrep": "head", "reversed": "head", "fedbn": "norm", "pattern": "^1[.]|head.bias"}
AT_HOME["adapters"] = "^((?!adapter).)*$"  # all else


class Net(nn.Module):
    def __init__(self, form):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(64, 16)
        self.norm = nn.BatchNorm1d(16) if form == "fedbn" else nn.Identity()
        self.adapter = nn.Linear(16, 16) if form == "adapters" else nn.Identity()
        self.head = nn.Linear(16, 10)
        if form == "adapters":
            self.body.requires_grad_(False)
            self.head.requires_grad_(False)

    def forward(self, x):
        return self.head(self.adapter(self.norm(self.body(x.flatten(1)))).relu())


def data(me):
    g = torch.Generator().manual_seed(me)
    return torch.rand(8, 1, 8, 8, generator=g) * 2 - 1, torch.randint(0, 10, (8,), generator=g)


def descend(model, x, y, to=None):
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        if to is not None:
            loss = loss + 0.1 * sum(((p - q) ** 2).sum() for p, q in zip(model.parameters(), to.parameters()))
        loss.backward()
        optimizer.step()


def fit(model, x, y, form, own):
    start = copy.deepcopy(model).requires_grad_(False)
    if form == "ditto":  # the personal model first
        personal = copy.deepcopy(model)
        personal.load_state_dict(own or model.state_dict())
        descend(personal, x, y, start)
        descend(model, x, y)
        return personal.state_dict()
    for head in {"fedrep": (True, False), "reversed": (False, True)}.get(form, (None,)):
        for name, p in model.named_parameters():
            if head is not None:
                p.requires_grad = name.startswith("head") == head
        descend(model, x, y)
    return {name: value for name, value in model.state_dict().items() if home(form, name)}


def home(form, name):
    return form in AT_HOME and re.search(AT_HOME[form], name) is not None
"""
PERSONAL = replaced(
    replaced(CLIENT, "from tiny_app.task import net, data, fit", "from tiny_app.task import Net, data, fit, home"),
    CLIENT[CLIENT.index("    model = net()") : CLIENT.index("    context.state.setdefault")],
    """    form = context.run_config["form"]
    model, sent = Net(form), msg.content["arrays"].to_torch_state_dict()
    own = context.state["own"].to_torch_state_dict() if "own" in context.state else {}
    model.load_state_dict({**own, **sent} if form != "ditto" else sent, strict=False)
    x, y = data(context.node_config["partition-id"])
    context.state["own"] = ArrayRecord(fit(model, x, y, form, own))
""",
).replace(
    "ArrayRecord(model.state_dict())", "ArrayRecord({k: v for k, v in model.state_dict().items() if not home(form, k)})"
)
STARTED = replaced(
    replaced(SERVER, "import net", "import Net, home"),
    "ArrayRecord(net().state_dict())",
    "ArrayRecord({k: v for k, v in Net(form).state_dict().items() if not home(form, k)})",
).replace("    strategy =", '    form = context.run_config["form"]\n    strategy =')
CONFIG = replaced(PYPROJECT, "rounds = 2", 'rounds = 2\nform = "fedper"')


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_app(
        tmp_path_factory.mktemp("personal") / "app", server=STARTED, client=PERSONAL, task=TASK, pyproject=CONFIG
    )


def audited(app: Path, out: Path, form: str = "fedper", **options: Any) -> Any:
    known: dict[str, Any] = {"attacks": ["loss-threshold"], "controls": False, "progress": False, "nodes": 2}
    return audit_flower(
        app, config={"form": form, "rounds": options.get("rounds", 2)}, out=out, **known, **options
    ).result.federations[0]


@pytest.mark.parametrize(
    ("form", "said"),
    [
        ("fedper", "sends its weights, 2 of 4 trained tensors; head.weight, head.bias stay with each client"),
        ("fedrep", "sends its weights, 2 of 4 trained tensors; head.weight, head.bias stay with each client"),
        ("reversed", "sends its weights, 2 of 4 trained tensors; head.weight, head.bias stay with each client"),
        ("fedbn", "sends its weights, 4 of 6 trained tensors; norm.weight, norm.bias, norm.running_mean"),
        ("pattern", "sends its weights, 3 of 4 trained tensors; head.bias stays with each client"),
        ("adapters", "sends its weights; 4 more are frozen, and everybody has them"),
        ("ditto", "sends its weights"),
    ],
)
def test_the_facts_hold_and_the_report_says_what_stays_at_home(form: str, said: str, app: Path, tmp_path: Path) -> None:
    federation = audited(app, tmp_path, form)
    assert federation.recording.facts == "verified", federation.recording.facts_text
    assert federation.replay_error < 1e-6
    assert said in federation.description
    assert any("another such model" in note for note in federation.recording.notes) == (form == "ditto")
    truth = truth_beside(tmp_path / "recording")
    assert truth is not None
    kept = len(list(truth.glob("round-*")))
    assert kept == 4


@pytest.mark.parametrize(
    ("options", "rounds", "files"),
    [
        ({"keep_rounds": [0]}, 1, 2),
        ({"keep_rounds": [1]}, 1, 2),
        ({"keep_rounds": [0], "attacked": [1]}, 2, 4),
        ({"keep_clients": 1}, 2, 2),
        ({"keep_rounds": "all", "keep_clients": 1}, 2, 2),
    ],
)
def test_rounds_and_clients_to_keep_are_chosen(
    options: dict[str, Any], rounds: int, files: int, app: Path, tmp_path: Path
) -> None:
    audited(app, tmp_path, **options)
    recording = tmp_path / "recording"
    assert len(list(recording.glob("round-*.json"))) == rounds
    assert len(list((recording / "truth").glob("round-*"))) == files


def test_of_many_updates_the_first_round_and_the_last_are_kept(app: Path, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("fedaudit.adapters.flower.audit._ALL", 5)
    federation = audited(app, tmp_path, rounds=4)
    assert sorted(p.stem for p in (tmp_path / "recording").glob("round-*.json")) == ["round-00000", "round-00003"]
    assert federation.recording.facts == "verified"


@pytest.mark.parametrize(
    "options", [{"keep_rounds": "0"}, {"keep_rounds": 3}, {"keep_clients": 0}, {"keep_rounds": [9]}]
)
def test_what_cant_be_kept_is_said(options: dict[str, Any], app: Path, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="keep_"):
        audited(app, tmp_path, **options)
