"""Studies and their stores as anybody may write them: refused, or shown as what they are, before any work and after."""

from __future__ import annotations

import csv
import json
import re
import sqlite3
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from markdown_it import MarkdownIt
from rich.markup import render

from fedaudit.utils.errors import BadInput
from fedaudit_lab.studies.analysis import analyse
from fedaudit_lab.studies.drawing import claims_csv, figure, markdown, page, table_csv, values_csv, write
from fedaudit_lab.studies.spec import expand
from fedaudit_lab.studies.store import FILE, Row, Store
from tests.conftest import Command, refused
from tests.lab.test_studies import TINY, as_file, rows_of, tiny

CPU = TINY["scales"]["cpu"]


def with_level(level: str) -> dict[str, Any]:
    axes = {**TINY["axes"], "iterations": {level: {"attacks.0.iterations": 1}}}
    return {"axes": axes, "scales": {"smoke": CPU, "cpu": CPU}}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"name": "a\ud800"}, "name: give 1 to 200 characters"),
        ({"name": "a\u202e\x1b[2J"}, "name: give 1 to 200 characters"),
        ({"title": ""}, "title: give 1 to 2,000 characters"),
        ({"title": "x\x00"}, "title: give 1 to 2,000 characters"),
        (with_level("x\ud800"), "axes.iterations"),
        (with_level("x" * 300), "axes.iterations"),
        ({"axes": {"attack": {}}, "published": [], "claims": []}, "axes.attack: at least one is needed"),
        ({"scales": {"smoke": {**CPU, "leave_out": [{"attack": ["invg", "agic"]}]}}}, "has no trial at scale smoke"),
        ({"scales": {"smoke": {**CPU, "repetitions": 100_000}}}, "is of 400,000 trials, and 20,000 are the most"),
    ],
)
def test_a_study_that_is_refused(changes: dict[str, Any], reason: str, command: Command, tmp_path: Path) -> None:
    path = tmp_path / "tiny.yaml"
    path.write_text(json.dumps({**TINY, **changes}))  # JSON is YAML, and can write any of these
    began = time.process_time()
    refused(command("study", "run", path, "--out", tmp_path / "out"), reason)
    assert time.process_time() - began < 10
    assert not (tmp_path / "out" / FILE).exists()


def test_dates_as_levels_are_texts() -> None:
    study = tiny(**with_level("2024-01-01"))
    assert {trial.point["iterations"] for trial in expand(study, "smoke")} == {"2024-01-01"}


@pytest.mark.slow
def test_a_large_grid_is_made_soon() -> None:
    study = tiny(scales={"smoke": {**CPU, "repetitions": 2000}})
    began = time.process_time()
    assert len(expand(study, "smoke")) == 8000
    assert time.process_time() - began < 10


MARKUP = ["$\\frac$", "[/x]", "<script>alert(1)</script>", "[red]x", "a|b", "![x](http://x.test/y.png)", "{{ 7*7 }}"]


@pytest.mark.parametrize("words", MARKUP)
def test_words_that_look_like_markup_are_shown_as_they_are(words: str, tmp_path: Path, command: Command) -> None:
    changes = {**with_level(words), "name": f"n {words}", "title": f"t {words}", "paper": f"p {words}"}
    study = tiny(**changes, claims=[{**TINY["claims"][0], "text": f"c {words}"}])
    rows = [
        Row(r.key, {**r.point, "iterations": words}, r.repetition, r.status, 1, r.outcome, 1.0, None)
        for r in rows_of([20, 21, 22], [10, 11, 13])
    ]
    analysis = analyse(study, "cpu", rows)
    paths = write(analysis, tmp_path)
    assert {path.suffix for path in paths} == {".md", ".csv", ".html", ".png"}
    told = markdown(analysis)
    html = MarkdownIt("commonmark").enable("table").render(told)
    assert not re.findall("<(?:script|img|a) ?", html)
    table = html.partition("</table>")[0]
    assert len(re.findall("<t[hd]>", table)) == 2 * 3  # the heading and a row: a level, and two results
    shown = page(analysis, None)
    assert "<script>alert" not in shown
    as_file(tmp_path, **changes)
    assert command("study", "show", tmp_path / "tiny.yaml").code == 0
    store = Store(tmp_path / "out")
    about = {"name": study.name, "scale": "smoke", "study": study.model_dump(mode="json"), "overrides": []}
    store.plan(about, expand(study, "smoke"))
    store.close()
    for line in ("log", "report"):
        done = command("study", line, tmp_path / "out")
        assert done.code == 0, done
        assert words in done.out.replace("\n", "") or line == "log" or len(words) > 20


def test_formulas_are_no_formulas_in_csv() -> None:
    study = tiny(**with_level("=1+1"), claims=[{**TINY["claims"][0], "text": "@SUM(A1)"}])
    rows = [
        Row(r.key, {**r.point, "iterations": "=1+1"}, r.repetition, r.status, 1, r.outcome, 1.0, "-2+3")
        for r in rows_of([20, 21, 22], [10, 11, 13])
    ]
    analysis = analyse(study, "cpu", rows)
    for text in (table_csv(analysis), values_csv(analysis), claims_csv(analysis)):
        cells = [cell for row in csv.reader(text.splitlines()) for cell in row]
        assert any(cell.startswith("'") for cell in cells)
        assert not [c for c in cells if c[:1] in ("=", "@") or (c[:1] in ("+", "-") and not _number(c))]
    assert figure(analysis)


def _number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


# --- stores --------------------------------------------------------------------------------------------------------


def planned(folder: Path) -> Path:
    store = Store(folder)
    study = tiny()
    about = {"name": study.name, "scale": "smoke", "study": study.model_dump(mode="json"), "overrides": []}
    store.plan(about, expand(study, "smoke"))
    store.close()
    path = folder / FILE
    statement("update trials set digest = null")(path)  # as an earlier version left it: all is to be checked
    statement("delete from about where key = 'digest'")(path)
    return path


def statement(sql: str, *values: Any) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        database = sqlite3.connect(path)
        database.execute(sql, values)
        database.commit()
        database.close()

    return change


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 3 : len(content) // 3 + 3000] = bytes(3000)
    path.write_bytes(bytes(content))


DONE = "update trials set status = 'done', outcome = ?"
STORES = [
    ("no JSON", statement("update trials set point = '{'"), "is damaged"),
    ("deep JSON", statement("update trials set point = ?", "[" * 100_000), "is damaged"),
    ("a point of numbers", statement("update trials set point = '[1]'"), "is damaged"),
    ("another study's point", statement("""update trials set point = '{"x": "y"}'"""), "are none of the study"),
    ("no status", statement("update trials set status = 'x'"), "is damaged"),
    ("bytes for text", statement("update trials set point = x'ff'"), "is damaged"),
    ("an outcome of nothing", statement(DONE, "[]"), "is damaged"),
    ("an outcome of other things", statement(DONE, '{"updates": [{"images": 3}]}'), "is damaged"),
    ("no column", statement("alter table trials drop column outcome"), "is damaged"),
    ("no table", statement("drop table trials"), None),
    ("about without a name", statement("delete from about where key = 'name'"), "is damaged"),
    ("about that isn't JSON", statement("update about set value = 'x'"), "is damaged"),
    ("a study that is none", statement("update about set value = '[]' where key = 'study'"), "expected a mapping"),
    ("a scale that is none", statement("""update about set value = '"x"' where key = 'scale'"""), None),
    ("a view", statement("create view x as select 1"), "has more than tables"),
    ("flipped bytes", flip, None),
    ("cut short", lambda path: path.write_bytes(path.read_bytes()[:5000]), None),
    ("empty", lambda path: path.write_bytes(b""), None),
    ("text", lambda path: path.write_text("hello" * 1000), "can't use"),
]


@pytest.mark.parametrize(("change", "reason"), [pytest.param(*row[1:], id=row[0]) for row in STORES])
def test_damaged_stores(change: Callable[[Path], None], reason: str | None, tmp_path: Path, command: Command) -> None:
    change(planned(tmp_path / "out"))
    path = as_file(tmp_path)
    for words in (["log"], ["report"]):
        done = command("study", *words, tmp_path / "out")
        assert done.code in (0, 2), done
        assert "Traceback" not in done.err
        if reason and not (words == ["log"] and done.code == 0):
            refused(done, reason)
    assert reason is None or done.code == 2
    del path


@pytest.mark.skipif(sys.platform != "linux", reason="handles are counted in /proc")
def test_a_store_that_is_refused_stays_closed(tmp_path: Path) -> None:
    path = planned(tmp_path / "out")
    statement("create view x as select 1")(path)
    with pytest.raises(BadInput, match="has more than tables"):
        Store(tmp_path / "out")
    assert path not in [handle.resolve() for handle in Path("/proc/self/fd").iterdir()]


def test_a_lock_that_is_a_folder(tmp_path: Path) -> None:
    planned(tmp_path / "out")
    (tmp_path / "out/running.lock").mkdir()
    with pytest.raises(BadInput, match=r"running.lock.*Is a directory"):
        Store(tmp_path / "out")


@pytest.mark.parametrize(
    ("code", "said"), [(sqlite3.SQLITE_FULL, "is the disk full"), (sqlite3.SQLITE_BUSY, "another")]
)
def test_a_full_disk_isn_t_another_run(code: int, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    planned(tmp_path / "out")
    store = Store(tmp_path / "out")

    class Full:
        def execute(self, _: str) -> None:
            error = sqlite3.OperationalError("database or disk is full")
            error.sqlite_errorcode = code
            raise error

        def close(self) -> None:
            pass

    monkeypatch.setattr(sqlite3, "connect", lambda *_, **__: Full())
    with pytest.raises(BadInput, match=said), store.exclusively():
        pass
    store.close()


def test_rich_reads_our_markup() -> None:
    with pytest.raises(Exception, match="closing tag"):  # what an unescaped name would do
        render("[/x]")
