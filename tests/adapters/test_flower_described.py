"""Flower apps of which nothing is watched: a file says what the model answers, and who was in is asked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fedaudit.utils.errors import BadInput
from tests.adapters.flower_cases import replaced, write_app

pytest.importorskip("flwr")
pytestmark = pytest.mark.peers

from fedaudit.adapters.flower import audit_flower  # noqa: E402 (it needs Flower)

QUICK: Any = {"nodes": 3, "rounds": 1, "controls": False, "progress": False}

TASK = """
import numpy as np
from sklearn.datasets import load_digits

def data(me, of=3):
    x, y = load_digits(return_X_y=True)
    rows = np.random.default_rng(0).permutation(len(y))[me::10][:120]
    return (x[rows[:60]] / 16, y[rows[:60]]), (x[rows[60:]] / 16, y[rows[60:]])

def first():
    return [np.random.default_rng(0).normal(0, 0.1, (64, 10)), np.zeros(10)]

def predict(arrays, x):
    each = np.exp(x @ arrays[0] + arrays[1])
    return each / each.sum(1, keepdims=True)

def losses(arrays, x, y):
    return -np.log(predict(arrays, x)[np.arange(len(y)), y])

def train(arrays, x, y, steps=3):
    w, b = (array.copy() for array in arrays)
    for _ in range(steps):
        slope = predict([w, b], x)
        slope[np.arange(len(y)), y] -= 1
        w -= 0.5 * x.T @ slope / len(y)
        b -= 0.5 * slope.mean(0)
    return [w, b]
"""
CLIENT = """
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from tiny_app import task

app = ClientApp()

@app.train()
def train(msg, context):
    (x, y), _ = task.data(context.node_config["partition-id"])
    arrays = task.train(msg.content["arrays"].to_numpy_ndarrays(), x, y)
    content = {"arrays": ArrayRecord(arrays), "metrics": MetricRecord({"num-examples": len(x)})}
    return Message(RecordDict(content), reply_to=msg)
"""
SERVER = """
from flwr.app import ArrayRecord
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg
from tiny_app.task import first

app = ServerApp()

@app.main()
def main(grid, context):
    FedAvg(fraction_evaluate=0.0).start(grid, ArrayRecord(first()), num_rounds=context.run_config["rounds"])
"""
TORCH = """
from torch import nn
from tiny_app.task import data as examples

def model():
    return nn.Linear(64, 10)

def state(arrays):
    return {"weight": arrays[0].T, "bias": arrays[1]}
"""


@pytest.fixture
def app(tmp_path: Path) -> Path:
    return write_app(tmp_path / "app", task=TASK, client=CLIENT, server=SERVER)


def said(app: Path, text: str) -> Path:
    (app / "model.py").write_text(text)
    return app / "model.py"


@pytest.mark.parametrize("how", ["predict", "losses"])
def test_who_was_in_is_asked_by_the_app_s_own_evaluation(tmp_path, app, how):
    file = said(app, f"from tiny_app.task import data as examples, {how}, train")
    asked = {**QUICK, "controls": True, "attacks": ["loss-threshold", "gradient-norm", "tableak"]}
    done = audit_flower(app, model=file, out=tmp_path / "out", **asked).result
    assert done.model.name == "the app's own model"
    found = {f.attack: f for f in done.findings}
    assert {name: f.status for name, f in found.items()} == {
        "loss-threshold": "done", "gradient-norm": "not applicable", "tableak": "not applicable"
    }  # fmt: skip
    for name in ("gradient-norm", "tableak"):
        assert "known by its answers alone, without a gradient" in (found[name].reason or "")
    (row,) = (row for row in done.summaries if row.attack == "loss-threshold")
    control = next((c for c in done.controls if c.attack == "loss-threshold"), None)
    assert row.verdict == "inferred" or (control is not None and control.won)
    if how == "losses":
        return
    # the same as by a torch module of the same outputs
    again = audit_flower(app, model=said(app, TORCH), out=tmp_path / "torch", **asked).result
    (torch_s,) = (f for f in again.findings if f.attack == "loss-threshold")
    assert [m.value for m in torch_s.metrics] == pytest.approx([m.value for m in found["loss-threshold"].metrics])


def test_a_module_beside_it_is_attacked_with_gradients(tmp_path, app):
    one = replaced(TASK, "steps=3", "steps=1")
    (app / "tiny_app/task.py").write_text(one)
    asked = {**QUICK, "attacks": ["labels", {"name": "tableak", "iterations": 2}]}
    done = audit_flower(app, model=said(app, TORCH), out=tmp_path / "out", **asked).result
    assert {f.status for f in done.findings} == {"done"}
    recorded = done.federations[0].recording
    assert recorded is not None
    assert recorded.facts == "verified"
    assert "0.5" in " ".join(recorded.training)


def test_training_that_is_told_is_checked(tmp_path, app):
    for epochs, facts in ((3, "verified"), (2, "contradicted")):
        told = f"{TORCH}\ntraining = {{'learning_rate': 0.5, 'epochs': {epochs}}}\n"
        out = tmp_path / str(epochs)
        done = audit_flower(app, model=said(app, told), out=out, **{**QUICK, "attacks": ["labels"]}).result
        recorded = done.federations[0].recording
        assert recorded is not None
        assert recorded.facts == facts


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", r"model\.py: it has no examples\(partition, partitions\)"),
        ("from tiny_app.task import data as examples", "one of predict.*, losses.* and model"),
        ("from tiny_app.task import data as examples, predict\nlosses = predict", "one of predict"),
        ("from tiny_app.task import data as examples\npredict = 3", "predict is 3; give a function"),
        ("from tiny_app.task import data as examples, predict\nloss = 'hinge'", "loss is 'hinge'; give one of"),
        ("from tiny_app.task import data as examples, predict\ntraining = {'rate': 1}", "training is of a model"),
        ("import no_such_thing", "can't be run: .*no_such_thing"),
        ("examples = lambda i, n: ([1], [1, 2])\nfrom tiny_app.task import predict", "returns .inputs, labels."),
        (TORCH.replace("def state", "def other"), r"arrays \(64, 10\), \(10,\) travel, which .* say state\(arrays\)"),
    ],
)
def test_what_is_wrong_with_a_file_is_one_line(tmp_path, app, text, says):
    with pytest.raises(BadInput, match=says) as refused:
        audit_flower(app, model=said(app, text), out=tmp_path / "out", **{**QUICK, "attacks": ["loss-threshold"]})
    assert "\n" not in str(refused.value)


def test_a_file_that_fails_while_the_app_runs_is_one_line(tmp_path, app):
    text = "from tiny_app.task import predict\n\n\ndef examples(partition, partitions):\n    return [][partition]\n"
    with pytest.raises(BadInput, match=r"model='FILE': IndexError"):
        audit_flower(app, model=said(app, text), out=tmp_path / "out", **QUICK)


def test_without_a_file_the_line_says_so(tmp_path, app, command):
    done = command("audit", "--flower", app, "--nodes", "2", "--out", tmp_path / "out")
    assert done.code == 2
    assert "say in a Python file what its model answers (--model FILE)" in done.error
    file = said(app, "from tiny_app.task import data as examples, predict, train")
    done = command("audit", "--flower", app, "--nodes", "3", "--model", file, "--attack", "loss-threshold",
                   "--no-controls", "--out", tmp_path / "out")  # fmt: skip
    assert done.code == 0, done
