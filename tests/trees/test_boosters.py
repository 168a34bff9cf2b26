"""Boosters as they travelled in a real federation, read from a folder: the same findings as of the trees themselves."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.optimize import linear_sum_assignment

import fedaudit
from fedaudit.attacks.findings import RowFinding
from fedaudit.pipeline.recordings import check_replay
from fedaudit.transcript.observation import observe
from fedaudit.transcript.threat import ThreatModel
from fedaudit.transcript.transcript import Transcript
from fedaudit.utils import plain_yaml
from fedaudit.utils.errors import BadInput
from fedaudit.utils.progress import Quiet
from fedaudit_trees.boosters import convert_boosters, read_boosters
from fedaudit_trees.boosting import BoosterCapture, BoosterRecorder
from fedaudit_trees.model import read_booster
from tests.data.data_cases import one_line
from tests.trees.test_timberstrike import attacked
from tests.trees.tree_cases import ETA, boosted, model, noise, seen, stump

X = noise(40, 3).astype(np.float32)
Y = (X[:, 0] + noise(40, 1, seed=1)[:, 0] > 0).astype(float)


def folder(path: Path, files: dict[str, bytes], facts: str = "", rows: dict[str, Any] | None = None) -> Path:
    path.mkdir(exist_ok=True)
    (path / "trees.yaml").write_text(f"learning_rate: {ETA}\n{facts}")
    for name, data in files.items():
        (path / name).write_bytes(data)
    for name, (x, y) in (rows or {}).items():
        np.savez(path / f"rows-{name}.npz", inputs=x, labels=y)
    return path


def sliced(data: bytes, start: int, stop: int) -> bytes:
    whole = json.loads(data)
    trees = whole["learner"]["gradient_booster"]["model"]["trees"]
    return model(*trees[start:stop], features=3)


WHOLE = boosted(X.astype(np.float64), Y, rounds=3, depth=3)[0]
PARTS = [sliced(WHOLE, i, i + 1) for i in range(3)]
SCALED = "columns: [{name: a, mean: 1, std: 2}, {name: b, mean: 1, std: 2}, {name: c, mean: 1, std: 2}]\n"


def moved(data: bytes) -> bytes:
    """Return the same trees, grown on rows of twice the size, one further."""
    whole = json.loads(data)
    for tree in whole["learner"]["gradient_booster"]["model"]["trees"]:
        inner = np.array(tree["left_children"]) >= 0
        splits = np.float32(2 * np.float32(tree["split_conditions"]) + 1)
        tree["split_conditions"] = np.where(inner, splits, tree["split_conditions"]).tolist()
    return json.dumps(whole).encode()


@pytest.mark.parametrize("protocol", ["bagging", "cyclic"])
def test_a_folder_gives_the_findings_of_the_trees_themselves(tmp_path: Path, protocol: str) -> None:
    sent = PARTS if protocol == "bagging" else [sliced(WHOLE, 0, i + 1) for i in range(3)]
    files = {f"round-{i}-client-north.json": moved(data) for i, data in enumerate(sent)}
    read, truth = read_boosters(folder(tmp_path, files, f"trees: {{protocol: {protocol}}}\n{SCALED}"))
    assert truth is None
    found = attacked(observe(read, ThreatModel()).split("client")[0])
    expected = attacked(seen(*((i, 0, part, 40) for i, part in enumerate(PARTS)), features=3))
    torch.testing.assert_close(found.rows, expected.rows, atol=1e-5, rtol=0)
    assert found.labels.equal(expected.labels)
    assert read.clients == {0: "north"}
    assert read.trees is not None
    assert read.trees.messages[0].num_examples == 40  # as the cover of the first root tells


def test_a_converted_folder_is_attacked_and_measured_and_its_facts_are_verified(tmp_path: Path) -> None:
    files = {f"round-{i}-client-north.json": moved(data) for i, data in enumerate(PARTS)}
    files["round-0-client-south.json"] = moved(PARTS[0])
    given = folder(tmp_path / "sent", files, f"name: clinics\n{SCALED}", {"north": (2 * X + 1, Y)})
    notes = convert_boosters(given, tmp_path / "transcript")
    assert notes == ()
    audit = fedaudit.audit_transcript(tmp_path / "transcript", controls=False, out=tmp_path / "out", progress=False)
    (federation,), (summary,) = audit.result.federations, audit.result.summaries
    assert federation.name == "clinics"
    assert federation.recording is not None
    assert federation.recording.clients == ["north", "south"]
    assert {f.client for f in audit.result.findings} == {0}  # of the other no rows are known
    assert summary.evidence is not None
    assert summary.evidence.n == 40


@pytest.mark.slow
def test_a_report_says_how_many_trees_a_client_sends(tmp_path: Path) -> None:
    sent = {1: PARTS[:2], 2: [sliced(WHOLE, 0, 2), PARTS[2]], 3: [WHOLE]}
    for most, words in ((1, "each grows 1 tree on"), (2, "each grows 1 or 2 trees on"), (3, "each grows 3 trees on")):
        files = {f"round-{i}-client-north.json": data for i, data in enumerate(sent[most])}
        given = folder(tmp_path / f"sent-{most}", files, SCALED, {"north": (X, Y)})
        convert_boosters(given, tmp_path / str(most))
        audit = fedaudit.audit_transcript(tmp_path / str(most), controls=False, progress=False)
        (federation,) = audit.result.federations
        assert words in federation.description
        trees = Transcript.load(tmp_path / str(most)).trees
        assert trees is not None
        assert trees.spec.per_round == most  # which known clients grow, too


def test_rows_that_trees_were_not_grown_on_contradict_the_recording(tmp_path: Path) -> None:
    files = {f"round-{i}-client-north.json": data for i, data in enumerate(PARTS)}
    facts = "columns: [{name: a, mean: 0, std: 1}, {name: b, mean: 0, std: 1}, {name: c, mean: 0, std: 1}]\n"
    own, other = {"north": (X, Y)}, {"north": (X, 1 - Y)}
    for rows, right in ((own, True), (other, False)):
        read, truth = read_boosters(folder(tmp_path, files, facts, rows))
        assert truth is not None
        replays = check_replay(read, truth, None, Quiet()).replays
        assert [replay.verifies for replay in replays.values()] == [right] * 3


def test_a_masked_cover_follows_from_gains_and_weights() -> None:
    """Two splits: 3 of 5 rows, 2 of 4, 1 of 6 in the leaves at p = 1/2, by hand."""
    g = np.array([2.5 - 3, 2.0 - 2, 3.0 - 1])
    h = np.array([5.0, 4.0, 6.0]) / 4
    below, all_ = (g[0] + g[1], h[0] + h[1]), (g.sum(), h.sum())

    def score(of: tuple[float, float]) -> float:
        return of[0] ** 2 / (of[1] + 1)

    leaf = [(g[i], h[i]) for i in range(3)]
    weights = [-all_[0] / (all_[1] + 1), -below[0] / (below[1] + 1), *(-ETA * a / (b + 1) for a, b in leaf[::-1])]
    gains = [
        score(below) + score(leaf[2]) - score(all_), score(leaf[0]) + score(leaf[1]) - score(below), 0.0, 0.0, 0.0
    ]  # fmt: skip
    tree = {
        "left_children": [1, 4, -1, -1, -1], "right_children": [2, 3, -1, -1, -1], "split_indices": [0, 1, 0, 0, 0],
        "split_conditions": [0.0, 0.0, *weights[2:]], "base_weights": weights, "loss_changes": gains,
        "sum_hessian": [1.0] * 5,
    }  # fmt: skip
    (read,) = read_booster(model(tree), "test").trees
    assert read.cover is None
    found = read.with_cover(ETA, 1.0).cover
    assert found is not None
    np.testing.assert_allclose(found, [all_[1], below[1], h[2], h[1], h[0]], rtol=1e-6)
    assert attacked(seen((0, 0, model(tree), 15))).labels.sum() == 6


def grown_with(data: bytes, **roots: float) -> bytes:
    """Return a model whose first tree has other numbers at its root."""
    whole = json.loads(data)
    tree = whole["learner"]["gradient_booster"]["model"]["trees"][0]
    for name, value in roots.items():
        tree[name][0] = value
    return json.dumps(whole).encode()


def test_one_row_is_read_as_many_are(tmp_path: Path) -> None:
    given = folder(tmp_path, {"round-0-client-a.json": PARTS[0]})
    (given / "rows-a.csv").write_text("a,b,c,y\n1,2,3,1\n")
    convert_boosters(given, tmp_path / "out")


BAD = [
    ({}, "", "holds no message"),
    ({"round-0-client-a.json": b"{}"}, "", "not a model of xgboost"),
    ({"round-0-client-a.json": PARTS[0]}, "trees: {observer: 1}\n", "observer"),
    ({"round-0-client-a.json": PARTS[0]}, "trees: {protocol: histogram}\n", "bagging or cyclic"),
    ({"round-0-client-a.json": PARTS[0]}, "columns: [{name: a}]\n", "3 features"),
    ({"round-0-client-a.json": PARTS[0]}, "colums: []\n", "colums"),
    ({"round-0-client-a.json": PARTS[0], "rows-b.npz": b""}, "", "no client that sent"),
    ({"round-0-client-a.json": PARTS[0], "rows-a.npz": b"", "rows-a.csv": b""}, "", "here are several"),
    ({"round-0-client-a.ubj": b""}, "", "neither JSON nor UBJSON"),
    ({"round-0-client-a.json": grown_with(PARTS[0], sum_hessian=1e308)}, "", "cover for more than"),
    ({"round-0-client-a.json": grown_with(PARTS[0], base_weights=1e308)}, "", "too large for a tree"),
    ({"round-0-client-a.json": PARTS[0], "round-00-client-a.json": PARTS[0]}, "", "two messages"),
    ({"round-0-client-a.json": PARTS[0], "round-1-client-a.json": model(stump(0, 0, (1, 1), (1, 1)))}, "", "differ"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("files", "facts", "fragment"), BAD)
def test_what_contradicts_itself_is_refused_in_a_line(
    tmp_path: Path, files: dict[str, bytes], facts: str, fragment: str
) -> None:
    with pytest.raises(BadInput, match=fragment) as error:
        read_boosters(folder(tmp_path, files, facts))
    one_line(error, fragment)


def test_a_learning_rate_that_the_trees_contradict_is_refused(tmp_path: Path) -> None:
    tree = stump(0, 0.0, (-1.0, 1.5), (1.0, 1.0))
    tree["base_weights"][0] = 0.0 / 3.5
    skew = stump(0, 0.0, (-1.0, 1.5), (-2.0, 1.0))
    skew["base_weights"][0] = 3.0 / 3.5  # G = -3, H = 2.5
    given = folder(tmp_path, {"round-0-client-a.json": model(tree, skew)})
    read_boosters(given)
    (given / "trees.yaml").write_text(f"learning_rate: {ETA / 3}\n")
    with pytest.raises(BadInput, match="contradicts the trees") as error:
        read_boosters(given)
    one_line(error, f"{ETA:.3g}")


@pytest.mark.peers
def test_ubjson_is_read_as_json_is(tmp_path: Path) -> None:
    pytest.importorskip("xgboost")
    import xgboost

    known = {"objective": "binary:logistic", "eta": ETA, "max_depth": 3}
    grown = xgboost.train(known, xgboost.DMatrix(X, Y), 3)
    facts = "trees: {per_round: 3}\n"
    found = []
    for form in ("json", "ubj"):
        files = {f"round-0-client-a.{form}": bytes(grown.save_raw(form))}
        read, _ = read_boosters(folder(tmp_path / form, files, facts))
        found.append(read.fingerprint())
    assert found[0] == found[1]
    with pytest.raises(BadInput, match="neither JSON nor UBJSON"):
        read_boosters(folder(tmp_path / "bad", {"round-0-client-a.ubj": b"{L\x00\x00"}))
    deep = b"{" + b"L\0\0\0\0\0\0\0\x01a{" * 100_000
    with pytest.raises(BadInput, match="ends while it tries"):
        read_boosters(folder(tmp_path / "deep", {"round-0-client-a.ubj": deep}))


def test_numbers_are_judged_by_the_rows_own_deviations_where_the_columns_arent_given(tmp_path: Path) -> None:
    rows = X * np.array([1.0, 5.0, 0.1], dtype=np.float32)
    whole = boosted(rows.astype(np.float64), Y, rounds=3, depth=3)[0]
    convert_boosters(
        folder(tmp_path / "sent", {"round-0-client-a.json": whole}, rows={"a": (rows, Y)}), tmp_path / "out"
    )
    (finding,) = fedaudit.attack(tmp_path / "out", progress=False)
    assert isinstance(finding, RowFinding)
    columns = Transcript.load(tmp_path / "out").task_info.columns
    assert max(abs(c.std / own - 1) for c, own in zip(columns, rows.std(axis=0), strict=True)) > 0.3, "by the splits"
    found = finding.rows.numpy() * np.array([c.std for c in columns]) + np.array([c.mean for c in columns])
    wrong = (np.abs(rows[:, None] - found) > 0.319 * rows.std(axis=0)).sum(axis=2)
    audit = fedaudit.audit_transcript(tmp_path / "out", controls=False, progress=False)
    (metric,) = (m for m in audit.result.findings[0].metrics if m.name == "cell_accuracy")
    assert metric.value == pytest.approx(1 - wrong[linear_sum_assignment(wrong)].sum() / rows.size)


def test_whole_models_of_several_clients_in_a_round_are_no_cyclic_federation(tmp_path: Path) -> None:
    files = {f"round-00000-client-{name}.json": WHOLE for name in ("north", "south")}
    with pytest.raises(BadInput, match="several clients send the whole model in a round") as refused:
        read_boosters(folder(tmp_path, files, "trees: {protocol: cyclic}\n"))
    one_line(refused)


@pytest.mark.peers
def test_rows_are_those_that_bins_were_made_of_and_bins_alone_are_none(tmp_path: Path) -> None:
    """A QuantileDMatrix gives the bins' bounds back, whose trees are the same: they'd pass for the client's rows."""
    pytest.importorskip("xgboost")
    import xgboost

    before, own = xgboost.QuantileDMatrix(X, Y, max_bin=4), xgboost.QuantileDMatrix.__init__
    known = {"objective": "binary:logistic", "max_bin": 4, "nthread": 1}
    recorder = BoosterRecorder(tmp_path / "sent", name="clinics")
    with BoosterCapture() as seen:
        grown = xgboost.XGBClassifier(n_estimators=1, max_depth=3, max_bin=4, n_jobs=1).fit(X, Y).get_booster()
    recorder.message(0, "north", bytes(grown.save_raw("json")), b"", seen)
    with BoosterCapture() as seen:
        grown = xgboost.train(known, before, 1)
    recorder.message(0, "south", bytes(grown.save_raw("json")), b"", seen)
    recorder.close()
    assert xgboost.QuantileDMatrix.__init__ is own
    assert not np.array_equal(before.get_data().toarray(), X)
    with np.load(tmp_path / "sent" / "rows-north.npz") as rows:
        assert np.array_equal(rows["inputs"], X)
        assert np.array_equal(rows["labels"], Y)
    assert not (tmp_path / "sent" / "rows-south.npz").exists()
    (note,) = recorder.notes
    assert note.startswith("client south's rows can't be had of its QuantileDMatrix: it holds bins")


@pytest.mark.peers
def test_a_root_of_less_cover_than_a_leaf_may_have_weighs_nothing_and_agrees_with_the_rows(tmp_path: Path) -> None:
    """So it is of a client of few rows, or once they are learnt: three rows have a cover of 3/4."""
    pytest.importorskip("xgboost")
    import xgboost

    x, y = X[:3], np.array([1.0, 1.0, 0.0])
    for least, weighs in ((1.0, False), (0.5, True)):
        known = {"objective": "binary:logistic", "base_score": 0.5, "eta": ETA, "min_child_weight": least}
        sent = bytes(xgboost.train(known, xgboost.DMatrix(x, y), 1).save_raw("json"))
        assert bool(read_booster(sent, "sent").trees[0].value.any()) is weighs
        files = {"round-00000-client-north.json": sent}
        facts = f"trees: {{min_child_weight: {least}}}\n{SCALED}"
        read, truth = read_boosters(folder(tmp_path / str(least), files, facts, {"north": (x, y)}))
        assert truth is not None
        assert all(r.verifies for r in check_replay(read, truth, None, Quiet()).replays.values())


LATE = """
import sys
from fedaudit_trees.boosting import BoosterCapture
assert "xgboost" not in sys.modules
before = list(sys.meta_path)
with BoosterCapture() as unused:
    pass
with BoosterCapture() as seen:
    import numpy, xgboost
    grown = xgboost.train({"nthread": 1}, xgboost.DMatrix(numpy.eye(3), numpy.ones(3)), 1)
assert seen.booster is grown
assert [finder for finder in sys.meta_path if isinstance(finder, BoosterCapture)] == []
assert not hasattr(xgboost.Booster.update, "__wrapped__")
with BoosterCapture() as seen:
    xgboost.train({"nthread": 1}, xgboost.DMatrix(numpy.eye(3), numpy.ones(3)), 1)
assert seen.booster is not None
"""


@pytest.mark.peers
def test_a_client_that_imports_xgboost_as_it_trains_is_seen() -> None:
    pytest.importorskip("xgboost")
    done = subprocess.run([sys.executable, "-c", LATE], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr


@pytest.mark.peers
def test_what_is_seen_of_xgboosts_training_is_written_as_it_is_read(tmp_path: Path) -> None:
    """Names and types of columns, settings and rows as xgboost was given them; no rows of who has others each round."""
    pytest.importorskip("xgboost")
    import xgboost

    rows = np.column_stack([X[:, 0] * 20 + 50, X[:, 1] > 0]).astype(np.float32)
    known = {"objective": "binary:logistic", "eta": 0.2, "lambda": 2.0, "max_depth": 3}
    recorder = BoosterRecorder(tmp_path / "sent", name="clinics", mean=[50.0, 0.5], std=[20.0, 0.5])
    own = xgboost.Booster.update
    for client, start in (("north", 0), ("south", 20)):
        sent = b""
        for index in range(2):
            part = slice(start + (index if client == "south" else 0), start + 20)
            matrix = xgboost.DMatrix(rows[part], Y[part], feature_names=["age", "smokes"], feature_types=["float", "i"])
            with BoosterCapture() as seen:
                grown = xgboost.train(known, matrix, 1, xgb_model=bytearray(sent) if sent else None)
            recorder.message(index, client, bytes(grown.save_raw("json")), sent, seen)
            sent = bytes(grown.save_raw("json"))
    assert xgboost.Booster.update is own
    recorder.close((rows[:5], Y[:5]))
    assert recorder.notes == ["client south trains on other rows in another round, so these aren't evaluated"]
    facts = plain_yaml.read(tmp_path / "sent" / "trees.yaml", "trees.yaml")
    assert facts["learning_rate"] == pytest.approx(0.2)
    assert (facts["trees"]["protocol"], facts["trees"]["reg_lambda"], facts["trees"]["max_depth"]) == ("cyclic", 2, 3)
    (tmp_path / "sent" / "round-00000-client-south.json").unlink()  # of one client a round
    (tmp_path / "sent" / "round-00001-client-south.json").unlink()
    read, truth = read_boosters(tmp_path / "sent")
    assert [(c.name, c.mean, c.std, c.codes) for c in read.task_info.columns] == [
        ("age", 50.0, 20.0, ()), ("smokes", 0.0, 1.0, (0.0, 1.0))
    ]  # fmt: skip
    assert truth is not None
    assert len(truth.candidates) == 25
    np.testing.assert_allclose(truth.inputs[0, 0][:, 0].numpy() * 20 + 50, rows[:20, 0], rtol=1e-5)
    assert all(r.verifies for r in check_replay(read, truth, None, Quiet()).replays.values())
