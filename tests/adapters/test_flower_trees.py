"""A Flower app whose clients grow trees by xgboost (FedXgbBagging, FedXgbCyclic): what travels is read and attacked."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fedaudit.capture.boosters import read_boosters
from fedaudit.data import load_dataset
from fedaudit.data.dataset import Split
from fedaudit.pipeline.recordings import check_replay
from fedaudit.simulation.trees import grow
from fedaudit.transcript.observation import observe
from fedaudit.transcript.threat import ThreatModel
from fedaudit.transcript.trees import TreeSpec, tree_record
from fedaudit.utils.progress import Quiet
from fedaudit.utils.seeds import generator
from tests.attacks.test_timberstrike import attacked

pytestmark = pytest.mark.peers

PYPROJECT = """
[project]
name = "clinics"
version = "1.0.0"
[tool.flwr.app]
publisher = "me"
[tool.flwr.app.components]
serverapp = "clinics_app.server:app"
clientapp = "clinics_app.client:app"
[tool.flwr.app.config]
sent = ""
strategy = "FedXgbBagging"
base-score = 0.5
"""
SERVER = """
from pathlib import Path

import numpy as np
from flwr.app import ArrayRecord
from flwr.serverapp import ServerApp, strategy

app = ServerApp()


@app.main()
def main(grid, context):
    class Recorded(getattr(strategy, context.run_config["strategy"])):
        def aggregate_train(self, server_round, replies):
            replies = list(replies)
            for reply in replies:
                file = f"round-{server_round - 1}-client-{reply.metadata.src_node_id}.json"
                sent = reply.content["arrays"]["0"].numpy().tobytes()
                (Path(context.run_config["sent"]) / file).write_bytes(sent)
            return super().aggregate_train(server_round, replies)

    Recorded(fraction_evaluate=0.0).start(grid, ArrayRecord([np.zeros(0, dtype=np.uint8)]), num_rounds=3)
"""
CLIENT = """
from pathlib import Path

import numpy as np
import xgboost
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()


@app.train()
def train(msg, context):
    config = context.run_config
    rows = np.load(Path(config["sent"]) / f"rows-{1000 + context.node_config['partition-id']}.npz")
    data = xgboost.DMatrix(rows["inputs"], rows["labels"])
    known = {"objective": "binary:logistic", "eta": 0.3, "tree_method": "hist", "nthread": 1}
    if config["base-score"] > 0:
        known["base_score"] = config["base-score"]
    received = msg.content["arrays"]["0"].numpy().tobytes()
    if received:
        booster = xgboost.Booster(known, model_file=bytearray(received))
        booster.update(data, booster.num_boosted_rounds())
    else:
        booster = xgboost.train(known, data, 1)
    if config["strategy"] == "FedXgbBagging":
        booster = booster[booster.num_boosted_rounds() - 1 :]
    arrays = ArrayRecord([np.frombuffer(booster.save_raw("json"), dtype=np.uint8)])
    content = RecordDict({"arrays": arrays, "metrics": MetricRecord({"num-examples": len(rows["labels"])})})
    return Message(content, reply_to=msg)


@app.evaluate()
def evaluate(msg, context):
    return Message(RecordDict({"metrics": MetricRecord({"num-examples": 1})}), reply_to=msg)
"""
FACTS = "learning_rate: 0.3\ntrees: {{protocol: {}}}\ncolumns:\n" + "".join(
    f"- {{{{name: column {i}, mean: 0, std: 1}}}}\n" for i in range(30)
)


def ran(folder: Path, strategy: str, base: float = 0.5) -> tuple[Path, list[Split]]:
    """Run the app with three clients of 30 rows; return what was sent, with the rows, and these."""
    pytest.importorskip("xgboost")
    from fedaudit.adapters.flower import run_app

    app, sent = folder / "app", folder / "sent"
    for place in (app / "clinics_app", sent):
        place.mkdir(parents=True)
    (app / "pyproject.toml").write_text(PYPROJECT)
    for name, text in {"__init__": "", "server": SERVER, "client": CLIENT}.items():
        (app / "clinics_app" / f"{name}.py").write_text(text)
    train = load_dataset("breast-cancer").train
    held = [Split(train.inputs[i : i + 30], train.targets[i : i + 30]) for i in (0, 30, 60)]
    for client, own in enumerate(held):
        np.savez(sent / f"rows-{1000 + client}.npz", inputs=own.inputs.numpy(), labels=own.targets.numpy())
    (sent / "trees.yaml").write_text(FACTS.format(strategy.removeprefix("FedXgb").lower()))
    run = run_app(app, nodes=3, config={"sent": str(sent), "strategy": strategy, "base-score": base})
    assert run.failures == []
    return sent, held


@pytest.mark.parametrize("strategy", ["FedXgbBagging", "FedXgbCyclic"])
def test_what_travels_in_flower_is_what_the_simulation_sends(tmp_path: Path, strategy: str) -> None:
    sent, held = ran(tmp_path, strategy)
    read, truth = read_boosters(sent)
    assert read.trees is not None
    spec = TreeSpec.model_validate({"protocol": strategy.removeprefix("FedXgb").lower()})
    order = [m.client for m in read.trees.messages[:3]]  # FedXgbCyclic draws it
    made = grow([held[client] for client in order], spec, 0.3, 3, 2, generator(0, "trees"))
    simulated = tree_record(spec, 0.3, 3, [replace(m, client=order[m.client]) for m in made.messages])
    assert len(read.trees.messages) == len(simulated.messages) == (9 if spec.protocol == "bagging" else 3)
    for real, sent_there in zip(read.trees.messages, simulated.messages, strict=True):
        assert (real.round, real.client, real.num_examples) == (sent_there.round, sent_there.client, 30)
        for one, other in zip(real.booster.trees, sent_there.booster.trees, strict=True):
            assert np.array_equal(one.feature[one.left >= 0], other.feature[other.left >= 0])
            np.testing.assert_allclose(one.value, other.value, rtol=1e-4, atol=1e-6)
    assert truth is not None
    assert all(r.verifies for r in check_replay(read, truth, None, Quiet()).replays.values())
    seen = [observe(one, ThreatModel()).split("client")[0] for one in (read, replace(read, trees=simulated))]
    found, expected = (attacked(one) for one in seen)
    assert found.labels.equal(expected.labels)
    np.testing.assert_allclose(found.rows.numpy(), expected.rows.numpy(), atol=1e-4)


def test_base_scores_that_xgboost_estimates_itself_are_taken_as_they_are(tmp_path: Path) -> None:
    sent, _ = ran(tmp_path, "FedXgbBagging", base=-1)
    read, truth = read_boosters(sent)
    assert truth is not None
    assert read.trees is not None
    assert len({m.booster.base for m in read.trees.messages if m.round == 0}) == 3
    assert all(r.verifies for r in check_replay(read, truth, None, Quiet()).replays.values())
