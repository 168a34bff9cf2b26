"""A study's store that somebody changed: every column of every row, what the study is, and the files of trials."""

from __future__ import annotations

import contextlib
import hashlib
import json
import sqlite3
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedaudit.utils.errors import BadInput, CorruptTranscript
from fedaudit_lab.studies.pictures import _sheets
from fedaudit_lab.studies.spec import expand
from fedaudit_lab.studies.store import FILE, Store
from tests.conftest import Command, refused
from tests.data.data_cases import one_line
from tests.lab.test_studies import tiny

pytestmark = pytest.mark.usefixtures("no_secret")

ABOUT = {"name": "tiny", "scale": "smoke", "study": {}, "overrides": []}


def planned(folder: Path) -> Path:
    """Write a store with one trial done, one failed and others pending, and return its file."""
    trials = expand(tiny(), "smoke")
    store = Store(folder)
    store.plan(ABOUT, trials)
    store.expect({trial.key: "computation" for trial in trials})
    one, two, *_ = trials
    store.finish(one.key, {"images": [{"psnr": 12.5}]}, 3.25, {"torch": "2"}, "now", {"results.json": b"{}"})
    store.fail(two.key, "why", "now")
    store.close()
    return folder / FILE


def read(folder: Path) -> Store:
    store = Store(folder)
    try:
        store.about()
        store.rows()
        store.scenarios()
    finally:
        store.close()
    return store


def execute(path: Path, command: str, *values: Any) -> None:
    db = sqlite3.connect(path)
    with db:
        db.execute(command, values)
    db.close()


def columns(path: Path) -> list[str]:
    db = sqlite3.connect(path)
    found = [row[1] for row in db.execute("pragma table_info(trials)")]
    db.close()
    return found


def test_every_column_of_every_row_is_sealed(tmp_path: Path) -> None:
    path = planned(tmp_path)
    read(tmp_path)
    whole = path.read_bytes()
    for position in range(3):
        for column in columns(path):
            execute(path, f"update trials set {column} = '7' where position = ?", position)
            with pytest.raises(BadInput) as error:
                read(tmp_path)
            one_line(error, "was changed or damaged after it was written" if column != "digest" else "")
            path.write_bytes(whole)
    for key in ("name", "scale", "study", "overrides"):
        execute(path, "update about set value = '7' where key = ?", key)
        with pytest.raises(CorruptTranscript, match="what the study is in"):
            read(tmp_path)
        path.write_bytes(whole)
    read(tmp_path)


def test_two_rows_can_not_be_swapped(tmp_path: Path) -> None:
    path = planned(tmp_path)
    execute(path, "update trials set key = 'x' where position = 0")
    execute(path, "update trials set key = (select key from trials where position = 2) || '!' where position = 1")
    with pytest.raises(CorruptTranscript):
        read(tmp_path)


def test_no_flipped_byte_of_the_file_changes_what_is_read(tmp_path: Path) -> None:
    """SQLite's own pages have no check, so a flip there is refused or changes nothing that is read."""
    path = planned(tmp_path)
    store = Store(tmp_path)
    before = store.rows()
    store.close()
    whole = path.read_bytes()

    @settings(max_examples=150)
    @given(st.integers(0, len(whole) - 1), st.integers(1, 255))
    def check(place: int, change: int) -> None:
        path.write_bytes(whole[:place] + bytes([whole[place] ^ change]) + whole[place + 1 :])
        for other in tmp_path.glob(f"{FILE}-*"):
            other.unlink(missing_ok=True)  # a store that was refused lets go of its files when it is collected
        with contextlib.suppress(BadInput):
            opened = Store(tmp_path)
            try:
                found = opened.rows()
                assert found == before or len(found) < len(before)  # a page that is lost is run again
            finally:
                opened.close()

    check()


def test_what_is_planned_again_was_checked_before(tmp_path: Path) -> None:
    path = planned(tmp_path)
    execute(path, "update trials set outcome = '{}' where position = 0")
    store = Store(tmp_path)
    with pytest.raises(CorruptTranscript):
        store.plan(ABOUT, expand(tiny(), "smoke"))
    store.close()


def test_a_store_of_before_is_read_with_a_note_and_sealed_when_it_runs_again(tmp_path: Path) -> None:
    path = planned(tmp_path)
    execute(path, "update trials set digest = null, files = null")
    execute(path, "delete from about where key = 'digest'")
    execute(path, "pragma user_version=2")
    note = read(tmp_path).note
    assert note is not None
    assert "carries no digest" in note
    store = Store(tmp_path)
    store.plan(ABOUT, expand(tiny(), "smoke"))
    store.close()
    assert read(tmp_path).note is None


def test_a_key_must_be_the_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Command) -> None:
    monkeypatch.setenv("FEDAUDIT_KEY", "the secret")
    planned(tmp_path)
    read(tmp_path)
    monkeypatch.setenv("FEDAUDIT_KEY", "another")
    with pytest.raises(CorruptTranscript, match="another FEDAUDIT_KEY"):
        read(tmp_path)
    monkeypatch.delenv("FEDAUDIT_KEY")
    refused(command("study", "log", tmp_path), "was sealed with a key, and FEDAUDIT_KEY isn't set")


def test_files_of_a_trial_are_those_that_the_store_knows(tmp_path: Path) -> None:
    (tmp_path / "results.json").write_text('{"findings": []}')
    digest = hashlib.sha256((tmp_path / "results.json").read_bytes()).hexdigest()
    assert _sheets(tmp_path, {"results.json": digest}) is None
    (tmp_path / "results.json").write_text(json.dumps({"findings": [], "x": 1}))
    with pytest.raises(CorruptTranscript, match="the one in the index"):
        _sheets(tmp_path, {"results.json": digest})
