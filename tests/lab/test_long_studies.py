"""A study of many trials is still quick to look at, and small."""

from __future__ import annotations

import json
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fedaudit.utils.progress import Quiet, Report
from fedaudit_lab.cli import study_log
from fedaudit_lab.studies.backends import processes
from fedaudit_lab.studies.running import run_study
from fedaudit_lab.studies.spec import expand
from fedaudit_lab.studies.store import FILE, Store
from tests.conftest import Command
from tests.lab.test_studies import tiny

TRIALS = 20_000

COPIES = """
with recursive n(i) as (select 1 union all select i + 1 from n where i < ?)
insert into trials
select printf('%032x', i), i, point, i, scenario, 'done', 1, ?, 1.0, '{}', null, '2026-01-01', 'c', 'c', '{}', null
from trials, n where position = 0
"""


def many(folder: Path, trials: int) -> Path:
    """Return a folder with a study of so many trials, of which one isn't done."""
    study = tiny()
    planned = {"name": study.name, "scale": "smoke", "study": study.model_dump(mode="json")}, expand(study, "smoke")[:1]
    store = Store(folder)
    store.plan(*planned)
    store.close()
    db = sqlite3.connect(folder / FILE)
    db.execute(COPIES, (trials - 1, json.dumps({"updates": [], "more": "x" * 2000})))
    db.commit()
    db.close()
    store = Store(folder)
    store.plan(*planned)  # seals the copies
    store.close()
    return folder


@pytest.mark.slow
def test_the_log_of_20_000_trials(tmp_path: Path) -> None:
    folder = many(tmp_path, TRIALS)
    line = [sys.executable, "-m", "fedaudit", "study", "log", str(folder)]
    done = subprocess.run(line, capture_output=True, text=True, check=True)
    head, *rows, last = done.stdout.splitlines()
    assert head.split() == ["trial", "what", "state", "attempts", "seconds", "error"]
    assert len(rows) == TRIALS
    assert last == f"{TRIALS} trials: 1 pending, {TRIALS - 1} done"


def test_the_log_says_nothing_that_a_terminal_would_obey(tmp_path: Path, command: Command) -> None:
    store = Store(many(tmp_path, 2))
    store.fail(store.rows()[1].key, "red \x1b[31m and [bold]", "2026-01-01")
    store.close()
    told = command("study", "log", tmp_path).out
    assert "red ?[31m and [bold]" in told
    assert "\x1b" not in told


def test_an_error_that_no_disk_takes_is_kept_nevertheless(tmp_path: Path) -> None:
    trials = expand(tiny(), "smoke")[:1]
    store = Store(tmp_path)
    store.plan({"name": "tiny", "scale": "smoke"}, trials)
    failed = run_study(
        tiny(),
        trials,
        store,
        backend=lambda _, tasks, _beat=None: iter([(tasks[0], OSError("no file \udcff"))]),
        data_dir=None,
        display=Quiet(),
    )
    assert failed == 1
    assert store.rows()[0].error == "OSError: no file \\udcff"


@pytest.mark.parametrize("module", ["torch", "matplotlib", "rich.table"])
def test_the_log_waits_for_no_library_that_it_does_not_need(module: str) -> None:
    code = f"import sys; import {study_log.__name__}; sys.exit({module!r} in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


class Watched(Quiet):
    """Remembers what stages report."""

    def __init__(self) -> None:
        self.reports: list[float] = []

    def stage(self, _title: str, _total: float) -> Report:
        return self.reports.append


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize(
    ("part", "changes"),
    [("attack", {"attacks.0.iterations": 1500}), ("federation", {"federations.f.rounds": 300})],
)
def test_progress_is_told_while_a_trial_runs(part: str, changes: dict[str, Any], tmp_path: Path) -> None:
    spec = tiny(axes={"attack": {"invg": changes}}, published=[], claims=[])
    trials = expand(spec, "smoke")[:1]
    store, watched = Store(tmp_path), Watched()
    store.plan({"name": "tiny", "scale": "smoke"}, trials)
    assert run_study(spec, trials, store, backend=processes(1), data_dir=None, display=watched) == 0
    assert watched.reports == sorted(watched.reports), part
    assert watched.reports[-1] == 1
    assert len({report for report in watched.reports if 0.05 < report < 0.95}) >= 2, part
