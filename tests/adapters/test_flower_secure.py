"""Flower's SecAgg+ and differential privacy: who sees what, by the one call, in apps of the forms that Flower has."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch

from fedaudit.utils.errors import BadInput
from tests.adapters.flower_cases import OLD_CLIENT, replaced, write_app

pytest.importorskip("flwr")
pytestmark = pytest.mark.peers

from fedaudit.adapters.flower import audit_flower  # noqa: E402
from fedaudit.transcript.secure_sum import summed  # noqa: E402
from fedaudit.transcript.transcript import Transcript  # noqa: E402

QUICK: dict[str, Any] = {"attacks": ["labels"], "controls": False, "progress": False}

SECURE_CLIENT = replaced(
    replaced(
        OLD_CLIENT, "import NumPyClient", "import NumPyClient\nfrom flwr.client.mod import secaggplus_mod\nimport time"
    ),
    ".to_client())",
    ".to_client(), mods=[secaggplus_mod])",
)
SECURE_SERVER = """
from flwr.common import ndarrays_to_parameters
from flwr.server import LegacyContext, ServerApp, ServerConfig
from flwr.server.strategy import FedAvg
from flwr.server.workflow import DefaultWorkflow, SecAggPlusWorkflow
from tiny_app.task import net

app = ServerApp()


@app.main()
def main(grid, context):
    first = ndarrays_to_parameters([v.numpy() for v in net().state_dict().values()])
    strategy = FedAvg(fraction_evaluate=0.0, initial_parameters=first, min_available_clients=3)
    config = ServerConfig(num_rounds=context.run_config["rounds"])
    legacy = LegacyContext(context=context, config=config, strategy=strategy)
    fit = SecAggPlusWorkflow(num_shares=3, reconstruction_threshold=2, max_weight=10, timeout=30.0)
    DefaultWorkflow(fit_workflow=fit)(grid, legacy)
"""
SLEEPS = replaced(
    SECURE_CLIENT,
    "        return [v.numpy()",
    "        if self.me == 1:\n            time.sleep(30.0)\n        return [v.numpy()",
)


def secure(folder: Path, client: str = SECURE_CLIENT) -> Path:
    return write_app(folder, client=client, server=SECURE_SERVER)


@pytest.mark.parametrize(("client", "members"), [(SECURE_CLIENT, (0, 1, 2, 3)), (SLEEPS, (0, 1, 2))])
def test_the_sum_that_the_server_reads_is_attacked(client, members, tmp_path):
    """What clients sent below their masks, averaged, is the model of the next round."""
    began = time.monotonic()
    done = audit_flower(secure(tmp_path / "app", client), nodes=4, attacked=None, out=tmp_path / "out", **QUICK)
    assert done.result.adversary is not None
    assert any("the sum of the updates of all clients" in line for line in done.result.adversary.knows)
    (federation,) = done.result.federations
    assert federation.recording is not None
    assert federation.recording.facts == "verified"
    assert {f.round for f in done.result.findings} == {0, 1}
    net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
    first, second = Transcript.load(tmp_path / "out/recording", net).rounds
    assert len(first.updates) == len(members)
    mean = summed(first.updates, weighted=True)
    for name, value in mean.tensors.items():
        assert torch.allclose(first.weights[name] + value, second.weights[name], atol=1e-6)
    assert any("the sum of a round's clients alone" in note for note in federation.recording.notes)
    assert time.monotonic() - began < 25  # nobody waited for who sleeps


def test_an_app_of_the_older_api_that_waits_for_nodes_says_for_how_many(tmp_path):
    with pytest.raises(BadInput, match="it waits for 3 nodes, but there are 2"):
        audit_flower(secure(tmp_path / "app"), nodes=2, out=tmp_path / "out", **QUICK)
