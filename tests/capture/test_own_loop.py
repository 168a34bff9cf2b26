"""The example of a loop of one's own, and its page: every snippet runs, and recording changes nothing."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import Command

ROOT = Path(__file__).parents[2]
LOOP, PAGE = ROOT / "examples" / "loop", ROOT / "docs" / "how-to" / "your-own-loop.md"


def lines(name: str) -> list[str]:
    """The program's lines after its docstring and imports of names, without indentation."""
    text = (LOOP / name).read_text()
    return [line.strip() for line in text.splitlines()[1:] if line.strip() and not line.startswith("from task")]


def test_at_most_eight_lines_are_added() -> None:
    added = [line for line in lines("recorded.py") if line.endswith("# added")]
    assert 0 < len(added) <= 8
    assert [line for line in lines("recorded.py") if line not in added] == lines("plain.py")
    page = [line.strip() for line in PAGE.read_text().splitlines()]
    assert [line for line in page if line.endswith("# added")] == added


@pytest.fixture
def app(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    for file in LOOP.glob("*.py"):
        (tmp_path / file.name).write_text(file.read_text())
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    sys.modules.pop("task", None)


def facts(out: Path) -> dict[str, Any]:
    (federation,) = json.loads((out / "results.json").read_text())["federations"]
    found: dict[str, Any] = federation["recording"]
    return found


@pytest.mark.slow
def test_recording_changes_nothing_and_its_facts_are_verified(app: Path, command: Command) -> None:
    models = []
    for program in ("plain.py", "recorded.py"):
        env = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
        ran = subprocess.run([sys.executable, program], capture_output=True, text=True, env=env, check=True)
        assert float(ran.stdout.split()[-1]) > 0.6  # it learns
        models.append(torch.load("model.pt"))
    assert all(torch.equal(value, models[1][key]) for key, value in models[0].items())
    words = "attack recording --model task:Net --attack agic --set iterations=2 --no-controls --out out"
    outcome = command(*words.split())
    assert outcome.code in (0, None), outcome
    recorded = facts(app / "out")
    assert recorded["facts"] == "verified"
    assert [r["error"] for r in recorded["replays"]] == [0.0] * 9
    assert recorded["clients"] == ["north", "south", "west"]
    assert "AdamW" in recorded["training"][0]
    assert "dropout" in (app / "out" / "report.html").read_text()


@pytest.mark.slow
def test_every_snippet_of_the_page_runs(app: Path, command: Command, capsys: pytest.CaptureFixture[str]) -> None:
    known: dict[str, Any] = {}
    for language, code in re.findall(r"```(\w+)\n(.*?)```", PAGE.read_text(), re.S):
        quick = code.replace("iterations=300", "iterations=2").replace('"iterations": 300', '"iterations": 2')
        if language == "sh":
            outcome = command(*quick.split()[1:])
            assert outcome.code in (0, None), outcome
        else:
            exec(compile(quick, str(PAGE), "exec"), known)
    assert facts(app / "audit")["facts"] == facts(app / "audit-2")["facts"] == "verified"
    told = json.loads((app / "told" / "round-00000.json").read_text())["messages"][0]["training"]
    assert told["optimiser"] == "adamw"
    proximal = json.loads((app / "proximal" / "round-00000.json").read_text())["messages"][0]["training"]
    assert (proximal["proximal_mu"], proximal["optimiser"]) == (0.01, "adamw")
    assert "AdamW" in (app / "audit" / "report.html").read_text()
