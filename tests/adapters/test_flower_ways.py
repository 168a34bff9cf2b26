"""Flower apps that train in other ways than the tutorial, or that can't be audited: what comes, and what is said."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from fedaudit.utils.errors import BadInput
from tests.adapters.flower_cases import CLIENT, OLD_CLIENT, OLD_SERVER, TASK, replaced, write_app

pytest.importorskip("flwr")
pytestmark = pytest.mark.peers

from fedaudit.adapters.flower import audit_flower  # noqa: E402 (it needs Flower)

QUICK: Any = {"nodes": 2, "rounds": 1, "attacks": ["labels"], "controls": False, "progress": False}

AUTO = """
import torch
from torch import nn


class Auto(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(64, 12), nn.Tanh(), nn.Linear(12, 3))
        self.decoder = nn.Sequential(nn.Linear(3, 12), nn.Tanh(), nn.Linear(12, 64))

    def forward(self, x):
        return self.encoder(x)

    def training_step(self, x):
        x = x.view(x.size(0), -1)
        return nn.functional.mse_loss(self.decoder(self.encoder(x)), x)


def net():
    torch.manual_seed(0)
    return Auto()


def data(me):
    return torch.rand(4, 1, 8, 8, generator=torch.Generator().manual_seed(me)), None


def fit(model, x, y, rate):
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

    def closure():
        loss = model.training_step(x)
        optimizer.zero_grad()
        loss.backward()
        return loss

    optimizer.step(closure)
    optimizer.step(closure)
"""

BY_HAND = replaced(
    replaced(TASK, "    optimizer = torch.optim.SGD(model.parameters(), lr=rate)\n    optimizer.zero_grad()\n", ""),
    "    optimizer.step()\n",
    "    for p in model.parameters():\n        p.data -= rate * p.grad\n",
)
HUBER = (
    replaced(TASK, "nn.functional.cross_entropy(model(x), y)", "huber(model(x), y)")
    + """

def huber(outputs, targets):
    wanted = nn.functional.one_hot(targets, 10).float()
    return (outputs - wanted).abs().where((outputs - wanted).abs() > 1, (outputs - wanted) ** 2).mean()
"""
)


@pytest.mark.parametrize("task", [AUTO, BY_HAND], ids=["parts of a model", "steps by hand"])
@pytest.mark.parametrize("old", [False, True])
def test_ways_of_training_that_are_recorded_and_repeated(task, old, tmp_path):
    halves = {"client": replaced(OLD_CLIENT, "], 2, {}", "], 4, {}"), "server": OLD_SERVER} if old else {}
    app = write_app(tmp_path / "app", task=task, **halves)
    done = audit_flower(app, out=tmp_path / "out", **QUICK)
    (record,) = done.result.federations
    assert record.recording is not None
    assert record.recording.facts == "verified"
    replays = json.loads((tmp_path / "out/recording/replay.json").read_text())["updates"]
    assert [u["error"] for u in replays] == pytest.approx([0, 0], abs=1e-6)


def huber(outputs, targets):
    """The same as the app's."""
    from torch.nn.functional import one_hot

    apart = outputs - one_hot(targets, 10).float()
    return apart.abs().where(apart.abs() > 1, apart**2).mean()


def test_a_loss_that_isnt_recognised_can_be_given(tmp_path):
    app = write_app(tmp_path / "app", task=HUBER)
    with pytest.raises(BadInput, match="targets"):
        audit_flower(app, out=tmp_path / "without", **QUICK)
    marked = replaced(HUBER, "huber(model(x), y).backward()", "Own()(model(x), y).backward()")
    marked += "\n\nclass Own(nn.Module):\n    def forward(self, z, y):\n        return huber(z, y)\n"
    app = write_app(tmp_path / "marked", task=marked)
    done = audit_flower(app, out=tmp_path / "out", loss=huber, **QUICK)
    (record,) = done.result.federations
    assert record.recording is not None
    assert record.recording.facts == "verified"
    with pytest.raises(BadInput, match="loss is 'hubber'"):
        audit_flower(app, out=tmp_path / "other", loss="hubber", **QUICK)


NUMPY = """
import numpy as np
from flwr.client import NumPyClient
from flwr.clientapp import ClientApp


class Client(NumPyClient):
    def fit(self, parameters, config):
        return [np.asarray(p) + 1 for p in parameters], 4, {}


app = ClientApp(client_fn=lambda context: Client().to_client())
"""
MASKED = replaced(
    CLIENT,
    'Message(RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics}), reply_to=msg)',
    'Message(RecordDict({"secaggplus": ConfigRecord({"masked": b"share"})}), reply_to=msg)',
)
MASKED = replaced(MASKED, "import ArrayRecord,", "import ArrayRecord, ConfigRecord,")
WAITS = """
import time
from flwr.serverapp import ServerApp

app = ServerApp()


@app.main()
def main(grid, context):
    while True:
        time.sleep(0.05)
"""
SLOW = replaced(TASK, "    model.train()\n", "    import time\n    for _ in range(2000):\n        time.sleep(0.05)\n")


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ({"client": NUMPY, "server": OLD_SERVER}, "trains nothing that fedaudit can watch"),
        ({"client": MASKED}, r"masked shares of a secure aggregation.*threat={'sees': 'sum'}"),
    ],
)
def test_what_cant_be_audited_says_why_and_what_can(parts, words, tmp_path):
    with pytest.raises(BadInput, match=words):
        audit_flower(write_app(tmp_path / "app", **parts), out=tmp_path / "out", **QUICK)


@pytest.mark.parametrize(
    ("parts", "words"),
    [({"server": WAITS}, "what does its ServerApp wait for"), ({"task": SLOW}, "before the time was over")],
)
def test_an_app_that_stands_still_ends_with_the_time(parts, words, tmp_path):
    app, began = write_app(tmp_path / "app", **parts), time.monotonic()
    with pytest.raises(BadInput, match=words):
        audit_flower(app, out=tmp_path / "out", max_minutes=0.05, **QUICK)
    assert time.monotonic() - began < 60
