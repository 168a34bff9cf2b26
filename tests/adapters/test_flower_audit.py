"""A Flower app audited as it is: recorded with its truth, replayed without error, attacked, reported."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from fedaudit import ThreatModel, make_attack
from fedaudit.transcript.transcript import Transcript
from fedaudit.utils.errors import BadInput
from tests.adapters.flower_cases import (
    CLIENT,
    EXAMPLE,
    OLD_CLIENT,
    OLD_SERVER,
    SERVER,
    TASK,
    audited,
    quickstart,
    replaced,
    write_app,
)

pytest.importorskip("flwr")
pytestmark = pytest.mark.peers

from fedaudit.adapters.flower import audit_flower  # noqa: E402 (it needs Flower)
from fedaudit.adapters.flower.in_process import loaded  # noqa: E402

QUICK: Any = {"attacks": ["labels"], "controls": False, "progress": False}


def errors(out):
    """Return the replay errors of an audit, by round and client."""
    return {
        (u["round"], u["client"]): u["error"]
        for u in json.loads((out / "recording/replay.json").read_text())["updates"]
    }


def test_the_example_is_audited_by_one_call(tmp_path):
    config = {"final-model": str(tmp_path / "final.pt"), "num-server-rounds": 2}
    asked = {**QUICK, "attacks": make_attack("labels"), "threat": ThreatModel()}  # objects, as names and mappings
    finished = audit_flower(EXAMPLE, nodes=3, config=config, attacked=None, out=tmp_path / "out", **asked)
    assert errors(tmp_path / "out") == {(r, c): 0.0 for r in (0, 1) for c in (0, 1, 2)}
    (row,) = finished.result.summaries
    assert (row.attack, row.verdict) == ("labels", "inferred")
    assert finished.result.model.name == "Net"
    assert (tmp_path / "out" / "report.html").is_file()

    with loaded(EXAMPLE) as app:
        net = sys.modules["digits_app.task"].Net()
        transcript = Transcript.load(tmp_path / "out/recording", net)
        assert app.name == transcript.name == "digits-app"
    info = transcript.task_info
    assert (info.mean, info.std) == ((0.5,), (0.5,)), "estimated from the range of the inputs, -1 to 1"
    sums = torch.load(tmp_path / "final.pt")
    last = transcript.rounds[-1]
    for name in last.updates[0].tensors:
        mean = torch.stack([u.tensors[name] for u in last.updates]).mean(0)
        torch.testing.assert_close(sums[name], last.weights[name] + mean, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("threat", "runs"),
    [
        ({"adversary": "aggregating-client", "clients": [1]}, [(1, 0), (1, 2)]),
        ({"adversary": "client", "clients": [0, 2]}, [(0, 1)]),  # of the last round's model nothing is recorded
    ],
)
def test_who_sees_a_part_gets_all_of_that_part(threat, runs, tmp_path):
    config = {"final-model": str(tmp_path / "final.pt"), "num-server-rounds": 2}
    finished = audit_flower(EXAMPLE, nodes=3, config=config, threat=threat, out=tmp_path / "out", **QUICK)
    assert [(f.round, f.client) for f in finished.result.findings] == runs
    assert all(f.status == "done" for f in finished.result.findings)


def test_who_was_in_is_asked_beside_without_a_further_line(tmp_path):
    config = {"final-model": str(tmp_path / "final.pt"), "num-server-rounds": 2, "examples": 120}
    asked = {**QUICK, "attacks": ["loss-threshold"]}
    finished = audit_flower(EXAMPLE, nodes=3, config=config, out=tmp_path / "out", **asked)
    with loaded(EXAMPLE) as app:
        task = sys.modules["digits_app.task"]
        tested = torch.cat([x for node in range(3) for x, _ in task.load_data(node, 3, 120, 8, 0)[1]])
        assert app.name == "digits-app"
    (path,) = (tmp_path / "out/recording/truth").glob("candidates*")
    kept = load_file(path)["seen/candidates/inputs"]
    assert {x.numpy().tobytes() for x in kept} == {x.numpy().tobytes() for x in tested}
    (result,) = finished.result.findings
    assert result.status == "done"
    assert {m.of for m in result.metrics} >= {"records"}


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("missing.npz", None, "missing.npz"),
        ("missing.csv", None, "missing.csv"),
        ("others.txt", b"1,2", "give .npz or .safetensors with inputs and labels"),
        ("others.csv", b"a,b,label\n1,x,0\n", "rows of numbers of one length"),
        ("others.csv", b"label\n1\n", "at least two numbers"),
    ],
)
def test_records_that_cant_be_read_are_refused_before_the_app_runs(tmp_path, name, content, says):
    ran = tmp_path / "ran"
    app = write_app(tmp_path / "app", task=f"{TASK}\nopen({str(ran)!r}, 'w').close()\n")
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(BadInput, match=says):
        audit_flower(app, nodes=2, rounds=1, records=tmp_path / name, out=tmp_path / "out", **QUICK)
    assert not ran.exists()
    assert not (tmp_path / "out" / "recording").exists()


TESTED = """
def tested(*_):
    x, y = data(99)
    with torch.no_grad():
        nn.functional.cross_entropy(net()(x), y)
"""
NEW_TEST = replaced(SERVER, 'num_rounds=context.run_config["rounds"]', "num_rounds=2, evaluate_fn=tested")
OLD_TEST = replaced(OLD_SERVER, "fraction_evaluate=0.0", "fraction_evaluate=0.0, evaluate_fn=tested")


@pytest.mark.parametrize(("server", "client"), [(NEW_TEST, CLIENT), (OLD_TEST, OLD_CLIENT)])
def test_what_the_server_evaluates_on_is_known_where_no_client_evaluates(tmp_path, server, client):
    server = server.replace("task import net", "task import net, tested")
    app = write_app(tmp_path / "app", server=server, client=client, task=TASK + TESTED)
    audit_flower(app, nodes=2, out=tmp_path / "out", **QUICK)
    kept = load_file(tmp_path / "out/recording/truth/candidates.safetensors")
    own = torch.rand(2, 1, 8, 8, generator=torch.Generator().manual_seed(99)) * 2 - 1
    assert kept["seen/candidates/inputs"].unique(dim=0).equal(own.unique(dim=0))
    assert set(kept["seen/candidates/targets"].tolist()) == {9, 7}


def test_it_is_the_same_again(tmp_path):
    config = {"final-model": str(tmp_path / "final.pt"), "num-server-rounds": 1}
    for name in "ab":
        audit_flower(EXAMPLE, nodes=3, config=config, seed=3, out=tmp_path / name, **QUICK)
    one, other = (sorted((tmp_path / name / "recording").glob("*.safetensors")) for name in "ab")
    assert [f.name for f in one] == [f.name for f in other]
    assert all(a.read_bytes() == b.read_bytes() for a, b in zip(one, other, strict=True))


def test_what_is_there_is_kept(tmp_path):
    app = write_app(tmp_path / "app")
    audit_flower(app, nodes=2, rounds=1, out=tmp_path / "out", **QUICK)
    before = (tmp_path / "out/recording/index.json").read_bytes()
    with pytest.raises(BadInput, match=r"is there already: attack it with .* or overwrite=True"):
        audit_flower(app, nodes=2, rounds=1, out=tmp_path / "out", **QUICK)
    assert (tmp_path / "out/recording/index.json").read_bytes() == before
    audit_flower(app, nodes=2, rounds=1, out=tmp_path / "out", overwrite=True, **QUICK)
    assert (tmp_path / "out/recording/index.json").read_bytes() != before
    (tmp_path / "mine" / "recording").mkdir(parents=True)
    (tmp_path / "mine" / "recording" / "diary.txt").touch()
    with pytest.raises(BadInput, match="is there already"):
        audit_flower(app, nodes=2, rounds=1, out=tmp_path / "mine", overwrite=True, **QUICK)
    assert (tmp_path / "mine" / "recording" / "diary.txt").exists()


def test_what_caused_a_client_s_error_is_said(tmp_path):
    first = '    try:\n        int("a")\n    except ValueError as e:\n        raise RuntimeError("cut") from e\n'
    app = write_app(tmp_path / "app", client=replaced(CLIENT, "    fit(model", f"{first}    fit(model"))
    with pytest.raises(BadInput, match=r"RuntimeError: cut by ValueError: invalid literal .*client\.py:\d+"):
        audit_flower(app, nodes=2, rounds=1, out=tmp_path / "out", **QUICK)


def test_a_failing_client_is_left_out(tmp_path, capsys):
    audit_flower(
        write_app(tmp_path / "app"), nodes=3, config={"trouble": "1:1"}, attacked=[0], out=tmp_path / "out", **QUICK
    )
    assert len(errors(tmp_path / "out")) == 2
    assert "client 1001 failed in round 1: RuntimeError: the disk is full" in capsys.readouterr().err


ADAMW = replaced(TASK, "torch.optim.SGD(model.parameters(), lr=rate)", "torch.optim.AdamW(model.parameters(), lr=0.01)")
DROPOUT = replaced(ADAMW, "nn.Flatten(), ", "nn.Flatten(), nn.Dropout(0.5), ")


def test_an_app_written_for_the_older_api(tmp_path):
    """Its arrays travel without names."""
    app = write_app(tmp_path / "app", client=OLD_CLIENT, server=OLD_SERVER)
    audit_flower(app, nodes=2, attacked=None, out=tmp_path / "out", **QUICK)
    assert errors(tmp_path / "out") == pytest.approx({(r, c): 0.0 for r in (0, 1) for c in (0, 1)}, abs=1e-6)


SEVERAL = replaced(
    TASK,
    "return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))",
    """
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.image, self.last = nn.Linear(64, 12), nn.Linear(13, 10)

        def forward(self, GIVEN):
            image, age = PARTS
            return self.last(torch.cat([self.image(image.flatten(1)).relu(), age], dim=1))

    return Net()""",
)
FORMS = {
    "by position": ("image, age", "image, age", "x, x[:, 0, :1, 0]"),
    "by name": ("image, age", "image, age", "age=x[:, 0, :1, 0], image=x"),
    "a tuple": ("both", "both", "(x, x[:, 0, :1, 0])"),
    "a dictionary": ("both", "both['image'], both['age']", "{'image': x, 'age': x[:, 0, :1, 0]}"),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_model_of_several_inputs_is_recorded_replayed_and_reported(tmp_path, form):
    given, parts, called = FORMS[form]
    task = SEVERAL.replace("GIVEN", given).replace("PARTS", parts)
    app = write_app(tmp_path / "app", task=replaced(task, "model(x)", f"model({called})"))
    attacks: list[Any] = ["labels", {"name": "invg", "iterations": 10}]
    finished = audit_flower(app, nodes=2, rounds=1, out=tmp_path / "out", **{**QUICK, "attacks": attacks})
    assert errors(tmp_path / "out") == {(0, 0): 0.0, (0, 1): 0.0}
    assert [f.status for f in finished.result.findings] == ["done"] * 4
    by_name = form in ("by name", "a dictionary")
    named = "inputs age 1 number, image 1 x 8 x 8" if by_name else "inputs [0] 1 x 8 x 8, [1] 1 number"
    assert named in (tmp_path / "out/report.html").read_text()


@pytest.mark.parametrize("task", [ADAMW, DROPOUT], ids=["adamw", "dropout"])
def test_other_training_is_replayed_too(tmp_path, task):
    audit_flower(write_app(tmp_path / "app", task=task), nodes=2, out=tmp_path / "out", **QUICK)
    assert errors(tmp_path / "out") == pytest.approx({(1, 0): 0.0, (1, 1): 0.0}, abs=1e-6)


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ('    fit(model', '    raise OSError("no camera")\n    fit(model', "no client sent an update: client 100"),
        ('    fit(model, x, y, context.run_config["nested.rate"])\n', "", "no client's training was seen"),
        ("ArrayRecord(model.state_dict())", "ArrayRecord({'x': model.state_dict()['1.bias']})", "no update could be"),
    ],
)  # fmt: skip
def test_what_cant_be_audited_is_one_line(tmp_path, old, new, says):
    app = write_app(tmp_path / "app", client=replaced(CLIENT, old, new))
    server = app / "tiny_app" / "server.py"
    server.write_text(
        server.read_text().replace("RESULT = {}", "RESULT = {}\nFedAvg.aggregate_train = lambda *a: (None, None)")
    )
    import flwr.serverapp.strategy

    kept = flwr.serverapp.strategy.FedAvg.aggregate_train
    try:
        with pytest.raises(BadInput, match=says) as refused:
            audit_flower(app, nodes=2, out=tmp_path / "out", **QUICK)
    finally:
        flwr.serverapp.strategy.FedAvg.aggregate_train = kept
    assert "\n" not in str(refused.value)


def test_sampled_clients_and_the_recording_at_the_server_agree(tmp_path, monkeypatch):
    """The strategy at the server and the watched clients record the same, round by round."""
    monkeypatch.chdir(tmp_path)
    half = {"fraction_train=config": "min_train_nodes=2, fraction_train=config"}
    app = audited(tmp_path / "app", server_app=half, client_app={'Guard(on_fail="refuse")': ""})
    config = {"fraction-train": 0.5, "fraction-evaluate": 0.0, "final-model": "final.pt"}
    audit_flower(app, nodes=4, config=config, attacked=None, out=tmp_path / "out", **QUICK)
    with loaded(app):
        net = sys.modules["digits_app.task"].Net
        watched = Transcript.load(tmp_path / "out/recording", net())
        task = {"input_shape": (1, 8, 8), "mean": (0.5,), "std": (0.5,)}
        at_server = Transcript.load(tmp_path / "recording-1", net(), task=task)
    assert [len(r.updates) for r in at_server.rounds] == [2, 2, 2]
    for one, other in zip(watched.rounds, at_server.rounds, strict=True):
        assert all(torch.equal(one.weights[name], other.weights[name]) for name in one.weights)
        for ours, theirs in zip(one.updates, other.updates, strict=True):
            assert ours.training is not None
            assert theirs.training is not None
            assert ours.training.batch_sizes == theirs.training.batch_sizes
            assert ours.training.learning_rate == theirs.training.learning_rate
            assert all(torch.equal(ours.tensors[name], theirs.tensors[name]) for name in ours.tensors)


def test_a_trained_round_is_attacked_and_bounds_are_kept(tmp_path):
    app = write_app(tmp_path / "app")
    found = audit_flower(app, nodes=3, clients=2, out=tmp_path / "a", **QUICK).result
    assert {f.round for f in found.findings} == {1}  # the last of two
    assert [f.status for f in found.findings] == ["done", "done", "not applicable"]
    assert "beyond the first 2 clients" in (found.findings[2].reason or "")
    assert any(line.startswith("1 of 3 runs of attacks: it is beyond") for line in found.not_asked)
    audit_flower(app, nodes=2, attacked=[0], out=tmp_path / "b", **QUICK)
    assert len(list((tmp_path / "b/recording").glob("round-*.json"))) == 1  # the app wasn't run on


@pytest.mark.slow
def test_its_numbers_follow_from_the_findings_in_its_folder(tmp_path, monkeypatch, command):
    """Nobody says again which round was attacked, and of how many clients."""
    out = tmp_path / "out"
    attacks: list[Any] = ["labels", {"name": "invg", "iterations": 2}, "loss-threshold"]
    config = {"final-model": str(tmp_path / "final.pt"), "num-server-rounds": 2, "examples": 120}
    audit_flower(EXAMPLE, nodes=3, config=config, attacks=attacks, clients=2, out=out, progress=False)
    monkeypatch.syspath_prepend(str(EXAMPLE))
    try:
        done = command("verify", out, "--model", "digits_app.task:Net")
        assert done.code == 0, done
        assert re.search(r"match \d+ saved findings", done.out)
    finally:
        for name in [name for name in sys.modules if name.split(".")[0] == "digits_app"]:
            del sys.modules[name]


def test_an_app_is_stopped_when_half_of_the_time_is_over(tmp_path):
    slow = replaced(CLIENT, "    x, y = data(me)\n", "    x, y = data(me)\n    import time; time.sleep(0.3)\n")
    app = write_app(tmp_path / "app", client=slow)
    found = audit_flower(app, nodes=5, max_minutes=0.01, out=tmp_path / "out", **QUICK).result
    assert 1 <= len(found.findings) < 5
    assert (tmp_path / "out/report.html").is_file()
    assert found.federations[0].rounds == 1


def test_a_mistyped_attack_is_noticed_before_the_app_runs(tmp_path):
    with pytest.raises(BadInput, match="did you mean 'invg'"):
        audit_flower(write_app(tmp_path / "app"), nodes=2, attacks=["invgg"], out=tmp_path / "out")
    assert not (tmp_path / "out" / "recording").exists()


@pytest.mark.parametrize(
    "given",
    [
        {"threat": {"adversary": "sever"}},
        {"threat": "server"},
        {"attacks": [3]},
        {"attacked": "first"},
        {"attacked": 3},
        {"attacked": []},
        {"clients": 0},
        {"fail_above": {"pnsr": 2}},
    ],
)
def test_so_is_whatever_else_can_t_be_asked_for(given, tmp_path):
    with pytest.raises(BadInput, match=r"did you mean '(server|psnr)'|attacks has 3|^(threat|attacked|clients) is "):
        audit_flower(write_app(tmp_path / "app"), nodes=2, out=tmp_path / "out", **given)
    assert not (tmp_path / "out" / "recording").exists()


@pytest.mark.slow
def test_a_script_in_the_app_s_folder_audits_it(tmp_path):
    app = write_app(tmp_path / "app")
    (app / "script.py").write_text(
        "from fedaudit.adapters.flower import audit_flower\n"
        "audit_flower('.', nodes=2, attacks=['labels'], controls=False, progress=False)\n"
    )
    done = subprocess.run([sys.executable, "script.py"], cwd=app, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (app / "audit/report.html").is_file()


def test_from_the_command_line(tmp_path, command):
    app = write_app(tmp_path / "app")
    done = command("audit", "--flower", app, "--nodes", "2", "--run-config", "rounds=1 nested.rate=0.25",
                   "--attack", "labels", "--no-controls", "--fail-above", "label_accuracy=0.1",
                   "--out", tmp_path / "out")  # fmt: skip
    assert done.code == 1, done
    assert (tmp_path / "out/results.json").is_file()
    entry = json.loads((tmp_path / "out/recording/round-00000.json").read_text())
    assert entry["messages"][0]["training"]["learning_rate"] == 0.25
    for wrong, says in (
        (["--flower", app, "--run-config", "rounds"], "give key=value"),
        (["--flower", app, "--run-config", "round=1"], "known: rounds"),
        (["--flower", tmp_path], "no pyproject.toml"),
        (["--flower", app, "--compare-defences"], "--compare-defences: not with --flower"),
        (["--nodes", "3"], "--nodes needs --flower"),
        (["--max-minutes", "3"], "--max-minutes needs --flower"),
        (["--flower", app, "--max-minutes", "-1"], "give minutes above 0"),
    ):
        done = command("audit", *wrong, "--out", tmp_path / "out3")
        assert done.code == 2
        assert says in done.error


def test_the_lines_to_add_are_eight():
    lines = (EXAMPLE / "audit.patch").read_text().splitlines()
    added = [line[1:] for line in lines if line.startswith("+") and not line.startswith("+++")]
    assert len(added) <= 8
    shown = (EXAMPLE.parents[1] / "docs" / "how-to" / "flower.md").read_text()
    assert all(line.strip() in shown for line in added)


DATASETS = """
import numpy as np
from PIL import Image
from sklearn.datasets import load_digits


class Part:
    def __init__(self, rows, change=None):
        self.rows, self.change = rows, change

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        image, label = self.rows[i]
        return {key: value[0] for key, value in self.change({"img": [image], "label": [label]}).items()}


class Parts(dict):
    def with_transform(self, change):
        return {name: Part(part.rows, change) for name, part in self.items()}


class FederatedDataset:
    def __init__(self, dataset, partitioners):
        self.parts = partitioners["train"].num_partitions

    def load_partition(self, i):
        digits = load_digits()
        images = [Image.fromarray((p * 15).astype(np.uint8)).convert("RGB").resize((32, 32)) for p in digits.images]
        return Own(list(zip(images, digits.target.tolist()))[i :: self.parts][:40])


class Own(Part):
    def train_test_split(self, test_size, seed):
        n = int(len(self.rows) * test_size)
        return Parts(train=Part(self.rows[n:]), test=Part(self.rows[:n]))
"""


@pytest.mark.slow
def test_flowers_own_quickstart_is_audited_unchanged(tmp_path):
    """Of PyTorch; only its data set is local."""
    app, environment = quickstart(tmp_path, "PyTorch", DATASETS)
    words = [sys.executable, "-m", "fedaudit", "audit", "--flower", str(app), "--nodes", "2", "--run-config",
             "num-server-rounds=1", "--attack", "labels", "--no-controls", "--out", str(tmp_path / "out")]  # fmt: skip
    done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    assert errors(tmp_path / "out") == {(0, 0): 0.0, (0, 1): 0.0}
    entry = json.loads((tmp_path / "out/recording/round-00000.json").read_text())
    assert entry["messages"][0]["training"]["optimiser"] == "adam"


PERSONAL = replaced(
    replaced(
        CLIENT,
        'model.load_state_dict(msg.content["arrays"].to_torch_state_dict())',
        'model.load_state_dict(msg.content["arrays"].to_torch_state_dict(), strict=False)\n'
        '    if "head" in context.state:\n'
        '        model[-1].load_state_dict(context.state["head"].to_torch_state_dict())',
    ),
    'return Message(RecordDict({"arrays": ArrayRecord(model.state_dict())',
    'context.state["head"] = ArrayRecord(model[-1].state_dict())\n'
    '    return Message(RecordDict({"arrays": ArrayRecord(body(model))',
).replace("import net, data, fit", "import net, data, fit, body")
BODY = """

def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 24), nn.Tanh(), nn.Linear(24, 10))


def body(model):
    return {k: v.half() for k, v in model.state_dict().items() if k.startswith("1")}
"""


def test_heads_that_stay_with_their_nodes_are_known_to_the_replay_alone(tmp_path):
    server = replaced(SERVER, "ArrayRecord(net().state_dict())", "ArrayRecord(body(net()))").replace(
        "import net", "import net, body"
    )
    app = write_app(tmp_path / "app", server=server, client=PERSONAL, task=TASK + BODY)
    config = {"nested.rate": 0.02}
    done = audit_flower(app, nodes=2, config=config, out=tmp_path / "out", **{**QUICK, "attacks": ["exact-linear"]})
    (federation,) = done.result.federations
    assert federation.recording is not None
    assert federation.recording.facts == "verified"
    assert "3.weight, 3.bias stay with each client" in federation.recording.facts_text
    truth = load_file(tmp_path / "out/recording/truth/round-00001-client-00000.safetensors")
    assert truth["seen/1/0/start/3.weight"].shape == (10, 24)
    travelled = [load_file(file) for file in (tmp_path / "out/recording").glob("*.safetensors")]
    assert {name for one in travelled for name in one} == {"1.weight", "1.bias"}
