"""Flower's SecAgg+ and differential privacy: who sees what, by the one call, in apps of the forms that Flower has."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import dp_accounting
import pytest
import torch
from dp_accounting import pld
from typer.testing import CliRunner

from fedaudit.cli import app as commands
from fedaudit.utils.errors import BadInput
from tests.adapters.flower_cases import CLIENT, OLD_CLIENT, OLD_SERVER, SERVER, replaced, write_app

pytest.importorskip("flwr")
pytestmark = pytest.mark.peers

from fedaudit.adapters.flower import audit_flower  # noqa: E402
from fedaudit.pipeline.ledger import Question, of_recording, server_noise  # noqa: E402
from fedaudit.transcript.secure_sum import summed  # noqa: E402
from fedaudit.transcript.transcript import Transcript  # noqa: E402

QUICK: dict[str, Any] = {"attacks": ["labels"], "controls": False, "progress": False}


def net() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))


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
    first, second = Transcript.load(tmp_path / "out/recording", net()).rounds
    assert len(first.updates) == len(members)
    mean = summed(first.updates, weighted=True)
    for name, value in mean.tensors.items():
        assert torch.allclose(first.weights[name] + value, second.weights[name], atol=1e-6)
    assert any("the sum of a round's clients alone" in note for note in federation.recording.notes)
    assert time.monotonic() - began < 25  # nobody waited for who sleeps


def test_an_app_of_the_older_api_that_waits_for_nodes_says_for_how_many(tmp_path):
    with pytest.raises(BadInput, match="it waits for 3 nodes, but there are 2"):
        audit_flower(secure(tmp_path / "app"), nodes=2, out=tmp_path / "out", **QUICK)


CLIP = {"fixed": "clipping_norm=0.01", "adaptive": "initial_clipping_norm=0.01"}


def private(folder: Path, side: str, kind: str, *, older: bool) -> Path:
    """Write an app whose server clips to 0.01 and adds noise of 0.1 times that, with the mods that this takes."""
    server, client = (OLD_SERVER, OLD_CLIENT) if older else (SERVER, CLIENT)
    wrapper = f"DifferentialPrivacy{side.title()}Side{kind.title()}Clipping"
    inner = f"FedAvg(fraction_evaluate=0.0{', initial_parameters=first' * older})"
    server = replaced(server, "import FedAvg", f"import FedAvg, {wrapper}")
    settings = f"noise_multiplier=0.1, num_sampled_clients=2, {CLIP[kind]}"
    server = replaced(server, f"strategy = {inner}", f"strategy = {wrapper}({inner}, {settings})")
    if side == "client":
        mod = f"{kind}clipping_mod"
        client = f"from flwr.{'client' if older else 'clientapp'}.mod import {mod}\n" + client
        end = ".to_client())" if older else "app = ClientApp()"
        client = replaced(client, end, f"{end[:-1]}{', ' * older}mods=[{mod}])")
    return write_app(folder, client=client, server=server)


def spent(noise: float, rounds: int) -> float:
    accountant = pld.PLDAccountant(value_discretization_interval=1e-2)
    accountant.compose(dp_accounting.GaussianDpEvent(noise), rounds)
    return float(accountant.get_epsilon(1e-5))


@pytest.mark.parametrize(
    ("side", "kind", "older"),
    [
        ("server", "fixed", False),
        ("client", "fixed", True),
        ("client", "adaptive", False),
        ("server", "adaptive", True),
    ],
)
def test_noise_at_the_server_is_named_and_counted_and_what_it_reads_is_attacked(side, kind, older, tmp_path):
    app = private(tmp_path / "app", side, kind, older=older)
    done = audit_flower(app, nodes=2, attacked=None, out=tmp_path / "out", **QUICK)
    (federation,) = done.result.federations
    assert federation.recording is not None
    assert federation.recording.facts == "verified"
    clipped = [one for one in federation.recording.replays if "clipped to a norm of" in one.explanation]
    assert len(clipped) == (4 if side == "client" else 0)
    reads = "updates whole" if side == "server" else "updates clipped"
    assert any(reads in note and "0.1 times that norm over 2 clients" in note for note in federation.recording.notes)
    assert any(note.startswith("towards those who see global models alone") for note in federation.recording.notes)
    first, second = Transcript.load(tmp_path / "out/recording", net()).rounds
    lengths = [float(torch.cat([t.flatten() for t in u.tensors.values()]).norm()) for u in first.updates]
    assert all(length == pytest.approx(0.01, rel=1e-3) if side == "client" else length > 0.02 for length in lengths)
    mean = summed(first.updates, weighted=True)
    rest = torch.cat([(second.weights[n] - first.weights[n] - t).flatten() for n, t in mean.tensors.items()])
    if side == "client" and kind == "fixed":
        assert float(rest.std()) == pytest.approx(0.1 * 0.01 / 2, rel=0.2)
    ledger = of_recording(tmp_path / "out/recording", Question())
    assert [one.rounds for one in ledger.clients] == [2, 2]
    assert ledger.adjacency == "add-remove"
    assert ledger.epsilon is not None
    if kind == "fixed":
        assert ledger.epsilon == pytest.approx(spent(0.1, 2), rel=0.02)
    else:
        assert ledger.epsilon > spent(0.1, 2)  # Flower's adaptive noise follows the next norm
    told = CliRunner().invoke(commands, ["ledger", str(folder_of_two(app)), "--rounds", "2", "--json"])
    assert json.loads(told.stdout)[0]["epsilon"] == pytest.approx(ledger.epsilon)


def folder_of_two(app: Path) -> Path:
    """Return the app, of which its project now says that it has two nodes."""
    project = app / "pyproject.toml"
    federations = 'default = "local"\n[tool.flwr.federations.local]\noptions.num-supernodes = 2\n'
    project.write_text(f"{project.read_text()}\n[tool.flwr.federations]\n{federations}")
    return app


def test_local_noise_is_known_to_the_replay_and_counted(tmp_path):
    mod = "LocalDpMod(clipping_norm=10.0, sensitivity=0.01, epsilon=10.0, delta=1e-5)"
    client = "from flwr.clientapp.mod import LocalDpMod\n" + replaced(CLIENT, "ClientApp()", f"ClientApp(mods=[{mod}])")
    done = audit_flower(write_app(tmp_path / "app", client=client), nodes=2, out=tmp_path / "out", **QUICK)
    (federation,) = done.result.federations
    assert federation.recording is not None
    assert all("noise of the size that local-dp declares" in one.explanation for one in federation.recording.replays)
    assert federation.recording.facts == "verified"
    assert any(note.startswith("the noise on record promises a client") for note in federation.recording.notes)


def test_a_mean_of_another_rule_has_no_epsilon():
    settings = {"noise_multiplier": 1.0, "clipping_norm": 1.0, "num_sampled_clients": 4.0}
    found = server_noise([("DifferentialPrivacyServerSideFixedClipping", settings), ("FedMedian", {})])
    assert found is not None
    assert not found[1]
    assert server_noise([("FedAvg", {})]) is None
