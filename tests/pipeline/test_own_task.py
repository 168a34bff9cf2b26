"""A task of another package: found by an entry point, read, simulated, recorded, attacked and judged as ours are."""

from __future__ import annotations

import importlib
import json
import pickle
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import fedaudit
from fedaudit import BadInput, Dataset
from fedaudit.task import LOSSES, TASKS
from fedaudit.transcript.transcript import Transcript
from tests.capture.test_recorded_tasks import recorded
from tests.pipeline.test_plugins import install, python
from tests.questions import compared

SOURCE = Path(fedaudit.__file__).parent

TASK = '''
"""Ordinal regression: levels in an order, by a logit for each threshold between two of them."""

import torch
from torch.nn.functional import binary_cross_entropy_with_logits

from fedaudit.task import LOSSES, Categorical, register


def thresholds(outputs, targets, reduction="mean"):
    """The mean cross-entropy of lying above each threshold (Cheng et al. 2008)."""
    if not targets.is_floating_point():
        targets = targets[:, None] > torch.arange(outputs.shape[1])
    return binary_cross_entropy_with_logits(outputs, targets.to(outputs.dtype), reduction=reduction)


LOSSES["thresholds"] = thresholds


class Ordinal(Categorical):
    name = "ordinal"
    targets = "levels"
    said = "{} levels"
    losses = ("thresholds",)
    fewer_outputs = 1

    def soft(self, logits):
        return logits.sigmoid()

    def hard(self, logits):
        return (logits > 0).sum(dim=1)


register(Ordinal())
'''
POINTS = "[fedaudit.tasks]\nordinal = levels.task\n"

AUDIT = """
import sys
import torch
import fedaudit

rows = torch.randn(120, 6, generator=torch.Generator().manual_seed(0))
levels = torch.bucketize(rows.sum(dim=1), torch.tensor([-2.0, 0.0, 2.0]))
scenario = {
    "model": {"name": "mlp", "width": 8},
    "threat": {"target_records": 20, "knows_labels": False},
    "federations": [{"name": "f", "clients": 2, "examples": 30, "batch_size": 1}],
    "attacks": ["exact-linear-rows", "loss-threshold", "labels", {"name": "tableak", "iterations": 5, "restarts": 2}],
    "evaluation": {"accuracy_every": 1, "controls": False},
}
if __name__ == "__main__":
    data = fedaudit.Dataset.from_tensors(rows, levels, task="ordinal")
    fedaudit.audit(scenario, data=data, out=sys.argv[1], workers=2, progress=False)
"""


@pytest.mark.slow
def test_an_audit_of_it_ends_in_verdicts(tmp_path: Path) -> None:
    install(tmp_path / "site", "levels", POINTS, task=TASK)
    (tmp_path / "audit.py").write_text(AUDIT)
    told = python(tmp_path / "site", tmp_path / "audit.py", tmp_path / "out")
    assert told.returncode == 0, told.stderr
    result = json.loads((tmp_path / "out/results.json").read_text())
    verdicts = {summary["attack"]: summary["verdict"] for summary in result["summaries"]}
    assert verdicts["exact-linear-rows"] == "recovered"  # of one example, whatever the loss
    assert verdicts["labels"] == "not applicable"
    done = {finding["attack"] for finding in result["findings"] if finding["status"] == "done"}
    assert done == {"exact-linear-rows", "loss-threshold", "tableak"}
    assert 0 < result["federations"][0]["history"]["accuracy"][0] < 1
    assert "4 levels" in (tmp_path / "out/report.html").read_text()


@pytest.fixture
def thresholds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The same package in this process."""
    install(tmp_path / "site", "levels", POINTS, task=TASK)
    monkeypatch.syspath_prepend(tmp_path / "site")
    importlib.import_module("levels.task")
    yield
    del TASKS._entries["ordinal"], LOSSES["thresholds"], sys.modules["levels.task"], sys.modules["levels"]


ROWS = torch.randn(60, 6, generator=torch.Generator().manual_seed(0))
LEVELS = torch.bucketize(ROWS.sum(dim=1), torch.tensor([-2.0, 0.0, 2.0]))


def oracle(outputs: Tensor, levels: Tensor) -> Tensor:
    """-log σ(±z) by hand, over examples and thresholds."""
    each = [
        -torch.log(torch.sigmoid(z if level > k else -z))
        for row, level in zip(outputs, levels.tolist(), strict=True)
        for k, z in enumerate(row)
    ]
    return torch.stack(each).mean()


def net() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))


@pytest.mark.usefixtures("thresholds")
def test_clients_minimise_its_usual_loss_and_accuracy_is_its_own(tmp_path: Path) -> None:
    data = Dataset.from_tensors(ROWS, LEVELS, task="ordinal")
    assert (data.num_classes, data.num_targets, data.train.targets.dtype) == (None, 4, torch.int64)
    spec = {"name": "f", "algorithm": "fedsgd", "clients": 1, "examples": 4, "batch_size": 4}
    made = fedaudit.simulate(
        {"federations": [spec], "evaluation": {"accuracy_every": 1}}, data=data, model=net(), progress=False
    )
    info = made.transcript.task_info
    assert (info.task, info.loss, info.outputs, info.target_values, info.target_shape) == (
        "ordinal", "thresholds", 3, 4, (),
    )  # fmt: skip
    assert pickle.loads(pickle.dumps(info)) == info
    model = net()
    value = oracle(model(made.truth.inputs[0, 0]), made.truth.labels[0, 0])
    sent = made.transcript.rounds[0].updates[0].tensors.values()
    for one, other in zip(sent, torch.autograd.grad(value, list(model.parameters())), strict=True):
        torch.testing.assert_close(one, other)
    after = {name: p - 0.01 * g for (name, p), g in zip(model.named_parameters(), sent, strict=True)}
    with torch.no_grad():
        levels = (torch.func.functional_call(model, after, (data.test.inputs,)) > 0).sum(dim=1)
    assert made.history is not None
    assert made.history.accuracy == [pytest.approx(float((levels == data.test.targets).double().mean()))]
    fedaudit.simulate({"federations": [spec]}, data=data, model=net(), out=tmp_path / "kept", progress=False)
    (index,) = (tmp_path / "kept").rglob("index.json")
    assert Transcript.load(index.parent, net()).task_info == info


@pytest.mark.usefixtures("thresholds")
def test_a_recording_that_says_it_is_read_and_its_loss_is_known(tmp_path: Path) -> None:
    loss = LOSSES["thresholds"]
    own = [LEVELS[:4], LEVELS[4:8]]
    folder = tmp_path / "recording"
    assert not [note for note in recorded(folder, net(), ROWS, own, loss, task="ordinal") if "recorded" in note]
    info = Transcript.load(folder, net(), loss=loss).task_info
    assert (info.task, info.loss, info.num_targets) == ("ordinal", "thresholds", 4)


@pytest.mark.usefixtures("thresholds")
@pytest.mark.parametrize(
    ("targets", "words"),
    [
        (LEVELS + 0.5, r"give whole numbers of shape \(n,\)"),
        (LEVELS[:, None].expand(60, 2), r"shape \(60, 2\) for examples of \(6,\)"),
        (LEVELS - 1, "class target -1 is negative"),
    ],
)
def test_targets_that_are_none_of_its_are_refused(targets: Tensor, words: str) -> None:
    with pytest.raises(BadInput, match=words):
        Dataset.from_tensors(ROWS, targets, task="ordinal")


@pytest.mark.usefixtures("thresholds")
def test_a_loss_of_another_task_is_refused() -> None:
    data = Dataset.from_tensors(ROWS, LEVELS, task="ordinal")
    scenario = {"model": {"name": "mlp", "loss": "mse"}, "federations": [{"name": "f", "clients": 1}]}
    with pytest.raises(BadInput, match="use thresholds"):
        fedaudit.simulate(scenario, data=data, progress=False)


def test_nobody_else_knows_the_name() -> None:
    with pytest.raises(BadInput, match="'ordinal'; known: classification"):
        Dataset.from_tensors(ROWS, LEVELS, task="ordinal")


# No task has a name outside of its room -------------------------------------------------------------------------------

NAMES = {"classification", "multi-label", "regression", "segmentation", "causal"}
OBJECTS = {name.upper().replace("-", "_") for name in NAMES} | {"NEXT_TOKEN"}


def comparisons(code: str) -> list[int]:
    """Return the lines on which something is compared with a task."""
    return compared(code, NAMES, OBJECTS)


@pytest.mark.slow
def test_nothing_outside_of_the_tasks_asks_which_one_it_is() -> None:
    modules = [path for path in SOURCE.rglob("*.py") if path.parent != SOURCE / "task"]
    assert len(modules) > 300
    assert {str(path): lines for path in modules if (lines := comparisons(path.read_text()))} == {}
    for code in ('if a.task == "segmentation": x', 'task in (None, "regression")', "task is not REGRESSION",
                 'match task:\n case "multi-label": x'):  # fmt: skip
        assert comparisons(code), code
    assert not comparisons('task="regression"')
