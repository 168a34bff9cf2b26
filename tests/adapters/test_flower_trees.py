"""A Flower app whose clients grow trees by xgboost (FedXgbBagging, FedXgbCyclic): what travels is read and attacked."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedaudit.data import load_dataset
from fedaudit.data.dataset import Split
from fedaudit.pipeline.recordings import check_replay
from fedaudit.transcript.observation import observe
from fedaudit.transcript.threat import ThreatModel
from fedaudit.utils.errors import BadInput
from fedaudit.utils.progress import Quiet
from fedaudit.utils.seeds import generator
from fedaudit_trees.boosters import read_boosters
from fedaudit_trees.growing import grow
from fedaudit_trees.record import TreeSpec, tree_record
from tests.adapters.flower_cases import quickstart, replaced
from tests.trees.test_timberstrike import attacked

pytestmark = pytest.mark.peers
pytest.importorskip("flwr", reason="Flower isn't installed: pip install 'PATH_OF_THE_CLONE[flower]'")
pytest.importorskip("xgboost", reason="xgboost isn't installed: pip install 'PATH_OF_THE_CLONE[trees]'")

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
form = "json"
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
    arrays = ArrayRecord([np.frombuffer(booster.save_raw(config["form"]), dtype=np.uint8)])
    content = RecordDict({"arrays": arrays, "metrics": MetricRecord({"num-examples": len(rows["labels"])})})
    return Message(content, reply_to=msg)


@app.evaluate()
def evaluate(msg, context):
    return Message(RecordDict({"metrics": MetricRecord({"num-examples": 1})}), reply_to=msg)
"""
FACTS = "learning_rate: 0.3\ntrees: {{protocol: {}}}\ncolumns:\n" + "".join(
    f"- {{{{name: column {i}, mean: 0, std: 1}}}}\n" for i in range(30)
)


def written(folder: Path, client: str = CLIENT) -> tuple[Path, Path, list[Split]]:
    """Write the app, and three clients of 30 rows; return both folders, the second for what is sent, and the rows."""
    pytest.importorskip("xgboost")
    app, sent = folder / "app", folder / "sent"
    for place in (app / "clinics_app", sent):
        place.mkdir(parents=True)
    (app / "pyproject.toml").write_text(PYPROJECT)
    for name, text in {"__init__": "", "server": SERVER, "client": client}.items():
        (app / "clinics_app" / f"{name}.py").write_text(text)
    train = load_dataset("breast-cancer").train
    held = [Split(train.inputs[i : i + 30], train.targets[i : i + 30]) for i in (0, 30, 60)]
    for number, own in enumerate(held):
        np.savez(sent / f"rows-{1000 + number}.npz", inputs=own.inputs.numpy(), labels=own.targets.numpy())
    return app, sent, held


def ran(folder: Path, strategy: str, base: float = 0.5) -> tuple[Path, list[Split]]:
    """Run the app; return what was sent, with the rows, and these."""
    from fedaudit.adapters.flower import run_app

    app, sent, held = written(folder)
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
    seen = [observe(one, ThreatModel()).split("client")[0] for one in (read, replace(read, sent=simulated))]
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


def messages(folder: Path) -> dict[tuple[int, int], bytes]:
    return {(int(p.stem.split("-")[1]), int(p.stem.split("-")[3])): p.read_bytes() for p in folder.glob("round-*")}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "form", "adversary", "attacked"),
    [("FedXgbBagging", "json", "server", {0, 1, 2}), ("FedXgbCyclic", "ubj", "client", {1, 2})],
)
def test_an_app_is_audited_as_it_is(
    tmp_path: Path, strategy: str, form: str, adversary: str, attacked: set[int]
) -> None:
    from fedaudit.adapters.flower import audit_flower

    app, sent, held = written(tmp_path)
    config, out = {"sent": str(sent), "strategy": strategy, "form": form}, tmp_path / "out"
    asked: dict[str, Any] = {"threat": {"adversary": adversary}, "controls": False, "progress": False}
    audit = audit_flower(app, nodes=3, config=config, out=out, **asked)
    assert messages(out / "boosters") == messages(sent)
    assert {p.suffix for p in (out / "boosters").glob("round-*")} == {f".{form}"}
    for number, own in enumerate(held):
        with np.load(out / "boosters" / f"rows-{1000 + number}.npz") as rows:
            assert np.array_equal(rows["inputs"], own.inputs.numpy())
            assert np.array_equal(rows["labels"], own.targets.numpy())
    (federation,), (summary,) = audit.result.federations, audit.result.summaries
    assert federation.name == "clinics"
    assert federation.learning_rate == pytest.approx(0.3)
    assert federation.recording is not None
    assert federation.recording.facts == "verified"
    assert {f.client for f in audit.result.findings} == attacked
    assert summary.attack == "timberstrike"
    assert summary.evidence is not None
    assert summary.evidence.n == 30 * len(attacked)
    assert audit.result.adversary.adversary == adversary
    assert "one a round" in federation.description or strategy == "FedXgbBagging"
    assert (out / "report.html").is_file()
    with pytest.raises(BadInput, match="is there already"):
        audit_flower(app, nodes=3, config=config, out=out, **asked)
    audit_flower(app, nodes=3, config=config, out=out, overwrite=True, **asked)


INPUTS = 'rows["inputs"]'
MATRIX = f'xgboost.DMatrix({INPUTS}, rows["labels"])'
UNSEEN = replaced(
    replaced(CLIENT, "app = ClientApp()", "app, update = ClientApp(), xgboost.Booster.update"),
    "booster = xgboost.train(known, data, 1)",
    "booster = xgboost.Booster(known, [data])\n        update(booster, data, 0)",
)
PICKLED = replaced(CLIENT, 'booster.save_raw(config["form"])', '__import__("pickle").dumps(booster)')
UNSEEN = replaced(UNSEEN, "booster.update(data, ", "update(booster, data, ")


@pytest.mark.parametrize(
    ("client", "says"),
    [
        (
            replaced(CLIENT, MATRIX, MATRIX.replace(INPUTS, f"np.where({INPUTS} > 2, np.nan, {INPUTS})")),
            r"client \d+ trains on rows with missing values, which aren't evaluated \(3 such notes\).*what was",
        ),
        (UNSEEN, "training wasn't seen.*write learning_rate and trees into .*trees.yaml, then: fedaudit convert"),
        (
            replaced(CLIENT, '"binary:logistic"', '"count:poisson"'),
            "no update could be recorded: .*objective count:poisson; gbtree of binary:logistic or reg:squarederror",
        ),
        (
            replaced(CLIENT, '"nthread": 1', '"nthread": 1, "alpha": 1.0'),
            r"no update could be recorded: .*reg_alpha is 1, and leaves tell no sums of gradients \(3 such notes\)$",
        ),
        (
            replaced(CLIENT, '"binary:logistic"', '"multi:softprob", "num_class": 2'),
            "no update could be recorded: .*a gbtree of objective multi:softprob; gbtree of binary:logistic or",
        ),
        (PICKLED, "no update could be recorded: .*it trains xgboost, and sends no model as save_raw"),
    ],
    ids=["missing values", "not seen", "another objective", "alpha", "several classes", "pickled"],
)  # fmt: skip
def test_what_isnt_known_of_an_app_is_said_in_a_line(tmp_path: Path, client: str, says: str) -> None:
    from fedaudit.adapters.flower import audit_flower

    app, sent, _ = written(tmp_path, client)
    strategy = "FedXgbCyclic" if client is PICKLED else "FedXgbBagging"  # which reads no message
    config, out = {"sent": str(sent), "strategy": strategy}, tmp_path / "out"
    rounds = 1 if client is PICKLED else None  # the next couldn't load it
    with pytest.raises(BadInput, match=says) as refused:
        audit_flower(app, nodes=3, config=config, rounds=rounds, out=out, controls=False, progress=False)
    assert "\n" not in str(refused.value)
    if client is UNSEEN:
        (out / "boosters" / "trees.yaml").write_text("learning_rate: 0.3\n")
        assert read_boosters(out / "boosters")[0].trees is not None
    elif "missing values" in says:
        assert len(json.loads((out / "findings.json").read_text())) == 3


def test_means_of_other_columns_end_the_app_at_the_first_message(tmp_path: Path) -> None:
    from fedaudit.adapters.flower import audit_flower

    app, sent, _ = written(tmp_path)
    config, out = {"sent": str(sent)}, tmp_path / "out"
    with pytest.raises(BadInput, match=r"^mean: 2 values, and rows have 30 columns; give one for each$"):
        audit_flower(app, nodes=3, config=config, out=out, mean=[0.0, 1.0], std=[1.0, 1.0], progress=False)
    assert messages(sent) == {}
    assert not any(out.iterdir())  # so that the same words, mended, are taken


@pytest.mark.parametrize("std", [[1.0], [1.0, 0.0]])
def test_deviations_that_are_none_are_refused_before_the_app_runs(tmp_path: Path, std: list[float]) -> None:
    from fedaudit.adapters.flower import audit_flower

    with pytest.raises(BadInput, match=r"2 means and std 1.0.*: as many are needed, each std above 0"):
        audit_flower(tmp_path / "none", out=tmp_path / "out", mean=[0.0, 1.0], std=std, progress=False)


DATASETS = """
from sklearn.datasets import load_breast_cancer


class Part(dict):
    def __len__(self):
        return len(self["label"])

    def set_format(self, name):
        assert name == "numpy"

    def train_test_split(self, test_size, seed):
        n = int(len(self) * test_size)
        return {"train": self.rows(slice(n, None)), "test": self.rows(slice(n))}

    def rows(self, chosen):
        return Part({name: values[chosen] for name, values in self.items()})


class FederatedDataset:
    def __init__(self, dataset, partitioners):
        self.parts = partitioners["train"].num_partitions

    def load_partition(self, i, split):
        inputs, labels = load_breast_cancer(return_X_y=True)
        return Part(inputs=inputs, label=labels).rows(slice(i, 40 * self.parts, self.parts))
"""


@pytest.mark.slow
def test_flowers_own_quickstart_of_xgboost_is_audited_unchanged(tmp_path: Path) -> None:
    """Only its data set is local."""
    pytest.importorskip("xgboost")
    app, environment = quickstart(tmp_path, "XGBoost", DATASETS)
    words = [sys.executable, "-m", "fedaudit", "audit", "--flower", str(app), "--nodes", "2", "--run-config",
             "num-server-rounds=2 fraction-train=1.0", "--no-controls", "--out", str(tmp_path / "out")]  # fmt: skip
    done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "out/results.json").read_text())
    assert result["federations"][0]["recording"]["facts"] == "verified"
    assert "depth 8 at most" in result["federations"][0]["description"]
    assert [(f["client"], f["num_examples"]) for f in result["findings"]] == [(0, 32), (1, 32)]
