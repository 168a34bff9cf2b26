"""A Flower app whose clients train by DP-SGD with Opacus: audited as it is, described, its ε in the ledger."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from fedaudit.cli import app as commands
from tests.adapters.flower_cases import SERVER, write_app

pytest.importorskip("flwr")
pytest.importorskip("opacus")
pytestmark = pytest.mark.peers

from flwr.app import ArrayRecord, RecordDict  # noqa: E402 (it needs Flower)

from fedaudit.adapters.flower.messages import state_in  # noqa: E402

TASK = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import fedaudit


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 4, 3, stride=2), nn.GroupNorm(2, 4), nn.Flatten(), nn.Linear(36, 10))


def data(node):
    held = fedaudit.load_dataset("digits").train
    rows = slice(24 * node, 24 * node + 24)
    return DataLoader(TensorDataset((held.inputs[rows] - 0.5) / 0.5, held.targets[rows]), 8, shuffle=True)
"""

CLIENT = """
import torch
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from opacus import PrivacyEngine
from opacus.validators import ModuleValidator
from torch import nn
from tiny_app.task import net, data

app = ClientApp()


@app.train()
def train(message, context):
    model = ModuleValidator.fix(net())
    sent = message.content["arrays"].to_torch_state_dict()
    model.load_state_dict({name.removeprefix("_module."): value for name, value in sent.items()})
    engine = PrivacyEngine(accountant="rdp", secure_mode=False)
    model, optimizer, loader = engine.make_private_with_epsilon(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
        data_loader=data(context.node_config["partition-id"]),
        target_epsilon=float(context.run_config["target-epsilon"]),
        target_delta=1e-5,
        epochs=1,
        max_grad_norm=1.0,
    )
    model.train()
    criterion = nn.CrossEntropyLoss()
    for images, labels in loader:
        optimizer.zero_grad()
        criterion(model(images), labels).backward()
        optimizer.step()
    told = MetricRecord({"num-examples": 24, "epsilon": engine.get_epsilon(1e-5)})
    return Message(RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": told}), reply_to=message)
"""


def test_the_names_of_a_wrapped_module_are_the_modules_own() -> None:
    state = {"_module.0.weight": torch.ones(2), "_module.0.bias": torch.zeros(2)}
    for sent in (state, {name.removeprefix("_module."): value for name, value in state.items()}):
        content = RecordDict({"arrays": ArrayRecord(sent)})
        assert set(state_in(content, ["0.weight", "0.bias"])) == {"0.weight", "0.bias"}
    other = RecordDict({"arrays": ArrayRecord({"_module.1.weight": torch.ones(2)})})
    assert set(state_in(other, ["0.weight"])) == {"_module.1.weight"}


@pytest.mark.slow
def test_an_app_with_opacus_is_audited_by_the_one_command(tmp_path: Any) -> None:
    folder = write_app(tmp_path / "app", server=SERVER, client=CLIENT, task=TASK)
    project = folder / "pyproject.toml"
    project.write_text(project.read_text().replace('trouble = ""', 'trouble = ""\ntarget-epsilon = 8.0'))
    out = tmp_path / "out"
    words = ["audit", "--flower", str(folder), "--nodes", "2", "--attack", "labels", "--no-controls", "--out", str(out)]
    done = CliRunner().invoke(commands, words)
    assert done.exit_code == 0, done.output
    (federation,) = json.loads((out / "results.json").read_text())["federations"]
    record = federation["recording"]
    assert record["facts"] == "verified"
    assert federation["replay_error"] < 1e-4
    assert all(
        "momentum 0.9, DP-SGD: each example's gradient clipped to 1, noise of" in way for way in record["training"]
    )
    assert any("Poisson sampling with probability 0.333 a step, as it was seen" in note for note in record["notes"])

    found = CliRunner().invoke(commands, ["ledger", str(out / "recording"), "--json"])
    assert found.exit_code == 0, found.output
    (ledger,) = json.loads(found.stdout)
    curves = [client["curve"] for client in ledger["clients"]]
    assert [[round_ for round_, _ in curve] for curve in curves] == [[1, 2], [1, 2]]
    assert all(4 < curve[0][1] <= 8.4 for curve in curves)  # for one round, by the same accountant
    assert all(curve[0][1] < curve[1][1] for curve in curves)
    assert any(f"an example ε = {ledger['epsilon']:.3g} " in note for note in record["notes"])

    before = CliRunner().invoke(commands, ["ledger", str(folder), "--rounds", "2", "--json"])
    assert "the app uses Opacus" in json.loads(before.stdout)[0]["notes"][-1]
