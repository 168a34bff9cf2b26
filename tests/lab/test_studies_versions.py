"""A study that holds trials of another version says so, and mixes them with new ones only where it is told to."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from fedaudit.utils import fingerprint
from fedaudit_lab.studies.running import trial_computation
from fedaudit_lab.studies.spec import expand
from fedaudit_lab.studies.store import FILE, Row, Store
from tests.conftest import Command, Outcome, refused
from tests.lab.test_studies import as_file, tiny

LEVELS = {"axes": {"iterations": {"1": {"attacks.0.iterations": 1}, "2": {"attacks.0.iterations": 2}}}}
SMALL = {
    **LEVELS, "columns": "iterations", "published": [], "claims": [],
    "scales": {"smoke": {"states": "tiny.", "repetitions": 1}},
}  # fmt: skip


@pytest.fixture
def study(command: Command, tmp_path: Path, trials_here: None) -> Callable[..., Outcome]:
    """Return a function that runs the small study in ``tmp_path / "out"`` with further words."""
    path = as_file(tmp_path, **SMALL)
    return lambda *words: command("study", "run", path, "--out", tmp_path / "out", "--workers", 1, *words)


def rows(folder: Path) -> list[Row]:
    store = Store(folder / "out")
    try:
        return store.rows()
    finally:
        store.close()


def another_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fingerprint, "code_version", lambda: "another")


def attempts(folder: Path) -> list[int]:
    return [row.attempts for row in rows(folder)]


def test_the_same_version_goes_on_without_a_word(study: Callable[..., Outcome], tmp_path: Path) -> None:
    for _ in range(2):
        assert study().code == 0
    assert attempts(tmp_path) == [1, 1]
    assert "version" not in (tmp_path / "out/result.md").read_text()


def test_another_version_is_refused_and_the_rows_stay(
    study: Callable[..., Outcome], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert study().code == 0
    another_version(monkeypatch)
    refused(study(), "2 of the 2 finished trials")
    refused(study("--only", "iterations=1"), "--again runs them anew, --keep-old keeps them")
    refused(study("--again", "--keep-old"), "give one of them")
    assert [(row.status, row.attempts) for row in rows(tmp_path)] == [("done", 1)] * 2


@pytest.mark.slow
def test_again_runs_the_old_ones_anew(
    study: Callable[..., Outcome], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert study().code == 0
    another_version(monkeypatch)
    assert study("--again").code == 0
    assert attempts(tmp_path) == [2, 2]
    assert not any(row.old for row in rows(tmp_path))
    assert "version" not in (tmp_path / "out/result.md").read_text()
    assert study().code == 0
    assert study("--again").code == 0  # there are no old ones left
    assert attempts(tmp_path) == [2, 2]


@pytest.mark.slow
def test_keep_old_keeps_them_and_the_result_says_which(
    study: Callable[..., Outcome], command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert study("--only", "iterations=1").code == 0
    another_version(monkeypatch)
    refused(study(), "1 of the 1 finished trials")
    done = study("--keep-old")
    assert done.code == 0
    said = "1 of the 2 trials are of another or an unknown version of fedaudit, torch, data or device: iterations 1 #0."
    assert said in " ".join(done.out.split())
    for file in ("result.md", "result.html"):
        assert said in (tmp_path / "out" / file).read_text()
    assert [(row.point["iterations"], row.old, row.attempts) for row in rows(tmp_path)] == [
        ("1", True, 1),
        ("2", False, 1),
    ]
    assert "done, old" in command("study", "log", tmp_path / "out").out
    (tmp_path / "out/result.md").unlink()
    assert command("study", "report", tmp_path / "out").code == 0
    assert said in (tmp_path / "out/result.md").read_text()


def test_other_levels_of_another_version_are_noticed(
    study: Callable[..., Outcome], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert study("--only", "iterations=1").code == 0
    another_version(monkeypatch)
    refused(study("--only", "iterations=2"), "1 of the 1 finished trials")
    assert study("--only", "iterations=2", "--again").code == 0
    assert {(row.point["iterations"], row.old, row.attempts) for row in rows(tmp_path)} == {
        ("1", True, 1),
        ("2", False, 1),
    }
    assert "1 of the 2 trials are of another" in (tmp_path / "out/result.md").read_text()


@pytest.mark.slow
def test_other_settings_of_the_same_cells_are_refused_and_never_mixed(
    study: Callable[..., Outcome], tmp_path: Path
) -> None:
    assert study().code == 0
    before = {row.key for row in rows(tmp_path)}
    refused(study("--set", "seed=7"), "2 finished trials")
    refused(study("--set", "seed=7", "--keep-old"), "the same cells with other settings")
    assert {row.key for row in rows(tmp_path)} == before
    assert study("--set", "seed=7", "--again").code == 0
    assert len(rows(tmp_path)) == 2
    assert not before & {row.key for row in rows(tmp_path)}
    page = (tmp_path / "out/result.md").read_text()
    assert "2 trials done, 0 failed, 0 to do" in page


def test_a_store_of_before_is_of_an_unknown_version(study: Callable[..., Outcome], tmp_path: Path) -> None:
    assert study().code == 0
    db = sqlite3.connect(tmp_path / "out" / FILE)
    for column in ("computation", "expected", "files", "digest"):
        db.execute(f"alter table trials drop column {column}")
    db.execute("pragma user_version=1")
    db.commit()
    db.close()
    assert [(row.status, row.old) for row in rows(tmp_path)] == [("done", True)] * 2
    refused(study(), "2 of the 2 finished trials")
    assert study("--again").code == 0
    assert [(row.attempts, row.old) for row in rows(tmp_path)] == [(2, False)] * 2
    db = sqlite3.connect(tmp_path / "out" / FILE)
    assert db.execute("pragma user_version").fetchone() == (3,)
    db.close()


def test_a_trial_s_computation_is_of_its_scenario_data_and_files(tmp_path: Path) -> None:
    (one, other) = (trial.scenario for trial in expand(tiny(**SMALL), "smoke"))
    before = trial_computation(one, None)
    assert before == trial_computation(one.model_copy(update={"name": "another"}), None)
    assert before != trial_computation(other, None)
    weights = tmp_path / "w.safetensors"
    changed = one.model_copy(update={"model": one.model.model_copy(update={"checkpoint": weights})})
    found = set()
    for content in (b"1", b"2"):
        weights.write_bytes(content)
        found.add(trial_computation(changed, None))
    assert len(found | {before}) == 3
    folders = one.model_copy(update={"data": one.data.model_copy(update={"name": "mnist"})})
    seen = {trial_computation(folders, None)}
    for name, content in (("a", b"1"), ("b", b"2"), ("c", b"1")):
        folder = tmp_path / name
        folder.mkdir()
        for file in ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1"):
            (folder / f"{file}-ubyte").write_bytes(content)
        seen.add(trial_computation(folders, folder))
    assert len(seen) == 3  # none there, and two of three that differ
