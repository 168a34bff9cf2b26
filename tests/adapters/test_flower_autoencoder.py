"""A Flower app in the form of Lightning's first example, an autoencoder: its parts are called, and x is the target."""

from __future__ import annotations

from typing import Any

import pytest

from tests.adapters.flower_cases import CLIENT, SERVER, TASK, replaced, write_app

pytest.importorskip("flwr")
pytestmark = pytest.mark.peers

from fedaudit.adapters.flower import audit_flower  # noqa: E402 (it needs Flower)

NET = """
class Autoencoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 3))
        self.decoder = nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 64))

    def forward(self, x):
        return self.encoder(x)

    def loss(self, batch):
        x, _ = batch
        x = x.view(x.size(0), -1)
        return nn.functional.mse_loss(self.decoder(self.encoder(x)), x)


def net():
    torch.manual_seed(0)
    return Autoencoder()


def data(me, many=40):
    return torch.rand(many, 1, 8, 8, generator=torch.Generator().manual_seed(me)), torch.zeros(many)


def fit(model, x, y, rate):
    model.train()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for batch in zip(x.split(20), y.split(20)):
        optimizer.zero_grad()
        model.loss(batch).backward()
        optimizer.step()
"""
TESTS = """

@app.evaluate()
def evaluate(msg, context):
    model = net()
    model.load_state_dict(msg.content["arrays"].to_torch_state_dict())
    model.eval()
    with torch.no_grad():
        loss = model.loss(data(100 + context.node_config["partition-id"]))
    return Message(RecordDict({"metrics": MetricRecord({"num-examples": 40, "loss": float(loss)})}), reply_to=msg)
"""


def test_rows_and_members_of_an_autoencoder_are_asked(tmp_path):
    task = TASK[: TASK.index("def net")] + NET
    server = replaced(SERVER, "fraction_evaluate=0.0", "fraction_evaluate=1.0")
    app = write_app(tmp_path / "app", task=task, client=CLIENT + TESTS, server=server)
    attacks: list[Any] = ["loss-threshold", {"name": "tableak", "iterations": 2}]
    done = audit_flower(
        app, nodes=2, rounds=2, attacks=attacks, controls=False, progress=False, out=tmp_path / "out"
    ).result
    assert {(f.attack, f.status) for f in done.findings} == {("loss-threshold", "done"), ("tableak", "done")}
    recorded = done.federations[0].recording
    assert recorded is not None
    assert recorded.facts == "verified"
    assert done.model.name == "Autoencoder"
