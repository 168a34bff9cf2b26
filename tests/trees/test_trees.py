"""Federations of boosted trees: what is refused, how they lie on disk; and, with xgboost, what travels."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedaudit.attacks import RowFinding, make_attack
from fedaudit.pipeline.prepare import resolve
from fedaudit.pipeline.run import record
from fedaudit.scenario.scenario import Scenario, scenario_from
from fedaudit.simulation.simulator import Recording
from fedaudit.transcript.observation import observe
from fedaudit.transcript.threat import ThreatModel
from fedaudit.transcript.transcript import Transcript
from fedaudit.utils.errors import BadInput, CorruptTranscript
from fedaudit_trees.model import Booster, TreeEnsemble, read_booster, write_booster
from fedaudit_trees.record import TreeRecord
from tests.data.data_cases import one_line
from tests.trees.tree_cases import boosted, model, noise, stump, transcript

STUMP = stump(0, 0.0, (1.0, 1.5), (-2.0, 1.0))


def scenario(trees: dict[str, Any] | None = None, **parts: Any) -> Scenario:
    federation: dict[str, Any] = {
        "name": "f", "algorithm": "trees", "clients": 3, "examples": 60, "rounds": 3, "learning_rate": 0.3,
        "trees": trees or {}, **parts.pop("federation", {}),
    }  # fmt: skip
    known = {"data": {"name": "breast-cancer"}, "federations": [federation], "attacks": ["timberstrike"]}
    return scenario_from({**known, **parts})


def played(trees: dict[str, Any] | None = None, **parts: Any) -> tuple[Recording, TreeRecord]:
    (recording,) = record(resolve(scenario(trees, **parts)))
    assert recording.transcript.trees is not None
    return recording, recording.transcript.trees


# --- without xgboost ------------------------------------------------------------------------------------------------


def test_a_recording_of_before_the_package_is_read_and_attacked_bit_for_bit(tmp_path: Path) -> None:
    """Written by fedaudit when trees were a part of it; its identifier is a hash of all that travelled."""
    folder = Path(__file__).parents[1] / "data/recorded-trees"
    read = Transcript.load(folder)
    assert read.fingerprint() == json.loads((folder / "index.json").read_text())["id"]
    read.save(tmp_path / "again")
    for file in folder.iterdir():
        assert (tmp_path / "again" / file.name).read_bytes() == file.read_bytes()
    (seen,) = observe(read, ThreatModel(adversary="client")).split("client")
    found = make_attack("timberstrike")(seen)
    assert isinstance(found, RowFinding)
    assert len(found.rows) == 20


def test_without_xgboost_a_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "xgboost", None)
    with pytest.raises(BadInput) as error:
        resolve(scenario())
    one_line(error, "xgboost", "fedaudit[trees]")


@pytest.mark.parametrize(
    ("parts", "fragment"),
    [
        ({"federation": {"batch_size": 4}}, "batch_size isn't for a federation of trees"),
        ({"federation": {"algorithm": "fedsgd"}}, "trees is for algorithm: trees"),
        ({"model": {"name": "mlp"}}, "leave model out"),
        ({"trees": {"observer": 3}}, "observer is 3"),
    ],
)
def test_what_does_not_fit_is_refused_where_it_is_read(parts: dict[str, Any], fragment: str) -> None:
    with pytest.raises(BadInput, match=fragment):
        scenario(parts.pop("trees", None), **parts)


@pytest.mark.parametrize(
    ("parts", "fragment"),
    [
        ({"threat": {"sees": "sum"}}, "can't add trees"),
        ({"threat": {"rounds": [1]}}, "aren't for a federation of trees"),
        ({"threat": {"adversary": "client", "clients": [0]}}, "aren't for a federation of trees"),
        ({"trees": {"protocol": "histogram", "noise": 1.0}}, "leave noise, cover and per_round out"),
        ({"defences": {"client_defence": "sign"}}, "no updates that client-side defences"),
        ({"data": {"name": "digits"}}, "rows of a table"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_grows(parts: dict[str, Any], fragment: str) -> None:
    made = scenario(parts.pop("trees", None), **parts)
    with pytest.raises(BadInput, match=fragment):
        resolve(made)


def test_a_scenario_of_trees_survives_yaml() -> None:
    made = scenario({"protocol": "cyclic"})
    assert made.model.name == "xgboost"
    assert scenario_from(made.model_dump(mode="json")) == made


def test_an_ensemble_adds_its_trees_up_as_scikit_learns_do() -> None:
    x = noise(30, 4)
    made, margin = boosted(x, (x[:, 0] > 0).astype(float), rounds=3, depth=3)
    booster = read_booster(made, "test")
    outputs = TreeEnsemble(2, booster.base, booster.trees)(torch.from_numpy(x).float())
    torch.testing.assert_close(outputs[:, 1], torch.from_numpy(margin).float(), rtol=1e-5, atol=1e-6)
    assert not outputs[:, 0].any()


def _altered(**changes: Any) -> bytes:
    return model({**STUMP, **changes})


FOREIGN = [
    (b"", "not a model of xgboost"),
    (b"{L\x00\x00", "not a model of xgboost"),
    (b'{"learner": 3}', "not a model of xgboost"),
    (model(STUMP).replace(b'"num_feature": "2"', b'"num_feature": 1e999'), "not a model of xgboost"),
    (model(STUMP, objective="multi:softprob"), "multi:softprob"),
    (model(STUMP, features=0), "features are read"),
    (_altered(left_children=[0, -1, -1]), "make no tree"),
    (_altered(right_children=[1, -1, -1]), "make no tree"),
    (_altered(split_indices=[2, 0, 0]), "make no tree"),
    (_altered(split_conditions=[1e400, 0.0, 0.0]), "not finite"),
    (_altered(sum_hessian=[1.0]), "one each"),
    (_altered(sum_hessian=[1.0, -1.0, 2.0]), "negative"),
    (_altered(split_type=[1, 0, 0]), "categories"),
    (_altered(left_children=[]), "one each|make no tree"),
]


@pytest.mark.parametrize(("data", "fragment"), FOREIGN)
def test_foreign_models_are_refused_in_a_line(data: bytes, fragment: str) -> None:
    with pytest.raises(BadInput, match=fragment) as error:
        read_booster(data, "message")
    one_line(error, "message")


def test_a_chain_that_is_too_deep_is_refused() -> None:
    m = 81
    left, right = [-1] * m, [-1] * m
    for node in range(0, m - 1, 2):
        left[node], right[node] = node + 1, node + 2
    deep = {"left_children": left, "right_children": right, "split_indices": [0] * m, "split_conditions": [0.0] * m}
    with pytest.raises(BadInput, match="deeper"):
        read_booster(model(deep), "message")


def test_a_model_is_written_as_it_was_read() -> None:
    booster = read_booster(model(STUMP), "test")
    again = read_booster(write_booster(booster), "test")
    assert (again.objective, again.base, again.features) == (booster.objective, booster.base, booster.features)
    for name in ("left", "right", "feature", "value", "weights", "cover"):
        assert np.array_equal(getattr(again.trees[0], name), getattr(booster.trees[0], name))


def test_transcripts_survive_the_disk_and_damaged_ones_are_refused(tmp_path: Path) -> None:
    made = transcript((0, 0, model(STUMP), 10), (0, 1, model(STUMP), 7), clients=2)
    made.save(tmp_path / "whole")
    read = Transcript.load(tmp_path / "whole")
    assert read.trees is not None
    assert [(m.round, m.client, m.model, m.num_examples) for m in read.trees.messages] == [
        (0, 0, model(STUMP), 10),
        (0, 1, model(STUMP), 7),
    ]
    assert read.fingerprint() == made.fingerprint()
    assert made.trees is not None
    first, second = made.trees.messages
    for messages in (
        (second, first),
        (first, first),
        (first, replace(second, client=5)),
        (replace(first, model=b"{}"),),
    ):
        with pytest.raises(CorruptTranscript):
            replace(made, sent=replace(made.trees, messages=messages)).check()


# --- with xgboost ---------------------------------------------------------------------------------------------------


def margins_of(model: bytes, rows: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    booster = read_booster(model, "test")
    return sum((t.margin(rows) for t in booster.trees), np.zeros(len(rows), dtype=np.float32))


@pytest.mark.peers
@pytest.mark.parametrize("data", ["breast-cancer", "diabetes"])
def test_bagging_sends_the_trees_that_xgboost_grows_on_the_model_so_far(data: str) -> None:
    pytest.importorskip("xgboost")
    import xgboost

    recording, sent = played(data={"name": data})
    rows = recording.truth.inputs[0, 1].numpy()
    labels = recording.truth.labels[0, 1].flatten().numpy()
    objective = "binary:logistic" if data == "breast-cancer" else "reg:squarederror"
    base = 0.5 if data == "breast-cancer" else 0.0
    known = {"objective": objective, "eta": 0.3, "max_depth": 6, "base_score": base, "tree_method": "hist"}
    alone = xgboost.train(known, xgboost.DMatrix(rows, labels), 1)
    by_round = {(m.round, m.client): m for m in sent.messages}
    assert list(by_round) == [(r, c) for r in range(3) for c in range(3)]
    expected = alone.predict(xgboost.DMatrix(rows), output_margin=True)
    np.testing.assert_allclose(margins_of(by_round[0, 1].model, rows), expected, atol=1e-6)
    # Its second tree continues the model of all three first ones.
    so_far = sum(margins_of(by_round[0, c].model, rows) for c in range(3))
    more = xgboost.train(known, xgboost.DMatrix(rows, labels, base_margin=so_far), 1)
    expected = more.predict(xgboost.DMatrix(rows, base_margin=so_far), output_margin=True) - so_far
    np.testing.assert_allclose(margins_of(by_round[1, 1].model, rows), expected, atol=1e-6)


@pytest.mark.peers
def test_what_xgboost_saves_is_read_as_it_predicts() -> None:
    pytest.importorskip("xgboost")
    import xgboost

    x = noise(80, 3).astype(np.float32)
    grown = xgboost.train({"objective": "reg:squarederror", "max_depth": 5}, xgboost.DMatrix(x, x[:, 0] * x[:, 1]), 5)
    booster = read_booster(bytes(grown.save_raw("json")), "test")
    outputs = TreeEnsemble(1, booster.base, booster.trees)(torch.from_numpy(x))[:, 0]
    np.testing.assert_allclose(outputs.detach().numpy(), grown.predict(xgboost.DMatrix(x)), atol=1e-5)
    with pytest.raises(BadInput, match="UBJSON"):
        read_booster(bytes(grown.save_raw("ubj")), "test")


@pytest.mark.peers
def test_cyclic_takes_turns() -> None:
    pytest.importorskip("xgboost")
    _, sent = played({"protocol": "cyclic"})
    assert [(m.round, m.client) for m in sent.messages] == [(0, 0), (1, 1), (2, 2)]


@pytest.mark.peers
def test_the_clients_histograms_add_up_to_the_tree_of_all_rows() -> None:
    pytest.importorskip("xgboost")
    import xgboost

    recording, sent = played({"protocol": "histogram"})
    rows = torch.cat([recording.truth.inputs[0, c] for c in range(3)]).numpy()
    labels = torch.cat([recording.truth.labels[0, c] for c in range(3)]).numpy()
    known = {"objective": "binary:logistic", "eta": 0.3, "max_depth": 6, "base_score": 0.5, "tree_method": "hist"}
    grown = xgboost.train(known, xgboost.DMatrix(rows, labels), 1)
    (whole,) = read_booster(bytes(grown.save_raw("json")), "test").trees
    parts = [m.booster.trees[0] for m in sent.messages if m.round == 0]
    covers = [part.cover for part in parts if part.cover is not None]
    assert whole.cover is not None
    np.testing.assert_allclose(sum(covers), whole.cover, rtol=1e-5)
    assert all(np.array_equal(part.value, whole.value) for part in parts)
    summed, one = played({"protocol": "histogram"}, threat={"sees": "sum"})
    assert [m.client for m in one.messages] == [0, 0, 0]
    assert len(summed.truth.inputs[0, 0]) == 60


@pytest.mark.peers
def test_a_client_takes_its_own_rows_off_the_sum_of_histograms() -> None:
    pytest.importorskip("xgboost")
    (each,) = [played({"protocol": "histogram"})]
    recording, sent = played({"protocol": "histogram"}, threat={"adversary": "client"})
    others = torch.cat([each[0].truth.inputs[0, c] for c in (1, 2)])
    assert recording.truth.inputs[0, 0].equal(others)
    assert recording.transcript.adversary_log["held/inputs"].equal(each[0].truth.inputs[0, 0])
    covers = [m.booster.trees[0].cover for m in each[1].messages if m.round == 2 and m.client > 0]
    found = sent.messages[2].booster.trees[0].cover
    assert found is not None
    np.testing.assert_allclose(found, sum(c for c in covers if c is not None), rtol=1e-6)


@pytest.mark.peers
def test_noise_and_missing_cover_are_what_is_sent() -> None:
    pytest.importorskip("xgboost")

    def first(**trees: Any) -> Booster:
        return played(trees)[1].messages[0].booster

    plain, noisy, bare = first(), first(noise=3.0), first(cover=False)
    assert plain.trees[0].cover is not None
    assert noisy.trees[0].cover is not None
    assert noisy.trees[0].weights is not None
    leaves = noisy.trees[0].leaves
    assert not np.allclose(plain.trees[0].cover, noisy.trees[0].cover)
    np.testing.assert_allclose(noisy.trees[0].value[leaves], noisy.trees[0].weights[leaves], rtol=1e-6)
    assert bare.trees[0].cover is None
    assert np.array_equal(bare.trees[0].value, plain.trees[0].value)
    assert b"sum_hessian" not in played({"cover": False})[1].messages[0].model


@pytest.mark.peers
def test_the_same_scenario_gives_the_same_bits() -> None:
    pytest.importorskip("xgboost")
    one, other = (played({"noise": 1.0, "columns": 0.5})[0].transcript.fingerprint() for _ in range(2))
    assert one == other
