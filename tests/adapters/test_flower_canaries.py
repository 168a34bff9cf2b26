"""Canary clients in Flower, with Flower's own differential privacy on the server."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.peers
pytest.importorskip("flwr", reason="Flower isn't installed")

import numpy as np  # noqa: E402
from flwr.app import ArrayRecord, ConfigRecord, Context, Error, Message, RecordDict  # noqa: E402
from flwr.clientapp import ClientApp  # noqa: E402
from flwr.serverapp.strategy import DifferentialPrivacyServerSideFixedClipping, FedAvg  # noqa: E402

import fedaudit  # noqa: E402
from fedaudit import CanaryClients, Recorder  # noqa: E402
from fedaudit.adapters.flower import AuditStrategy, CanaryMod  # noqa: E402
from tests.adapters.test_flower_defences import Grid, _in_a_task, answer, received  # noqa: E402, F401
from tests.capture.recording_cases import Net, held, train  # noqa: E402

COUNT, ROUNDS, NOISE, CLIP = 200, 4, 4.0, 0.5
CLAIMED = 2.0  # ε of four rounds at δ = 1e-5, to be sure: 1.97


def client(canaries: CanaryClients) -> Any:
    app = ClientApp(mods=[CanaryMod(canaries, lambda context: number(context))])

    @app.train()
    def fit(message: Message, context: Context) -> Message:
        model = Net()
        model.load_state_dict(received(message))
        train(model, held(int(context.node_config["partition-id"])))
        return answer(message, model.state_dict(), 1)

    return app


def number(context: Context) -> int | None:
    place = int(context.node_config["partition-id"])
    return place - 2 if place > 1 else None


@pytest.mark.parametrize("noise", [NOISE, 0.01])
def test_flowers_own_privacy_is_audited(tmp_path: Path, noise: float) -> None:
    torch.manual_seed(0)
    np.random.seed(0)  # noqa: NPY002
    model = Net()
    canaries = CanaryClients(model, COUNT, clip=CLIP, claimed=CLAIMED, gaussian=True, seed=5)
    app = client(CanaryClients(model, COUNT, clip=CLIP, seed=5))
    inner = FedAvg(fraction_evaluate=0.0, min_available_nodes=2)
    dp = DifferentialPrivacyServerSideFixedClipping(inner, noise, CLIP, 2 + COUNT)
    strategy = AuditStrategy(dp, Recorder(tmp_path / "r", module=model, canaries=canaries))
    grid: Any = Grid(app, 2 + COUNT)
    strategy.start(grid, ArrayRecord(model.state_dict()), num_rounds=ROUNDS, train_config=ConfigRecord())
    task = {"input_shape": (1, 8, 8), "mean": (0.5,), "std": (0.25,), "loss": "cross-entropy", "batch_norm": "eval"}
    made: Any = fedaudit.audit_transcript(tmp_path / "r", attacks=["dp-canaries"], module=Net(), task=task, seed=0)
    found = made.result.findings[0].epsilon
    models = next(one for one in found.observers if one.observer == "models")
    assert models.covered
    if noise < NOISE:
        assert made.result.summaries[0].verdict == "inferred"
    else:
        assert found.demonstrated < CLAIMED
        seen = fedaudit.Transcript.load(tmp_path / "r", Net(), task=task).canaries
        assert seen is not None
        readings = (2 + COUNT) * seen.readings["models"]
        sd = NOISE * math.sqrt(1 / readings.numel())
        assert float(readings[:, canaries.coins].mean() - readings[:, ~canaries.coins].mean()) == pytest.approx(
            1, abs=10 * sd
        )
        assert float(readings.std()) == pytest.approx(NOISE, rel=0.1)


def test_a_canary_sends_the_metrics_that_clients_send() -> None:
    mod = CanaryMod(CanaryClients(Net(), 3, clip=1.0), examples=7, metrics=["train_loss"])
    content = RecordDict({"arrays": ArrayRecord(Net().state_dict())})
    message = Message(content, dst_node_id=4, message_type="train")
    reply = mod(message, Context(1, 4, {"canary": 2}, RecordDict(), {}), lambda message, _: message)
    assert dict(reply.content["metrics"]) == {"train_loss": 0.0, "num-examples": 7}


def test_a_canary_answers_training_alone() -> None:
    mod = CanaryMod(CanaryClients(Net(), 3, clip=1.0))
    message = Message(RecordDict({"arrays": ArrayRecord(Net().state_dict())}), dst_node_id=4, message_type="evaluate")
    for config, expected in (({"canary": 2}, "training messages only"), ({}, "its own")):
        context = Context(1, 4, config, RecordDict(), {})
        reply = mod(message, context, lambda message, _: Message(Error(2, "its own"), reply_to=message))
        assert expected in reply.error.reason
