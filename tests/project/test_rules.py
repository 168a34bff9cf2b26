"""The rules of the code that no other test holds."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SOURCES = ("src", "catalogue/src", "lab/src", "trees/src")
ROOT = Path(__file__).parents[2]
LINTER = Path(sys.executable).parent / "lint-imports"
pytestmark = pytest.mark.skipif(not LINTER.exists(), reason="import-linter isn't installed here")


def lint(folder: Path) -> subprocess.CompletedProcess[str]:
    command = [str(LINTER), "--no-cache", "--config", str(folder / "pyproject.toml")]
    environment = {"PYTHONPATH": ":".join(str(folder / place) for place in SOURCES), "PATH": "/usr/bin:/bin"}
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder, env=environment)


def test_import_rules_hold():
    done = lint(ROOT)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("module", "line", "contract"),
    [
        ("attacks/base.py", "import fedaudit.transcript.truth", "An attack never sees the truth"),
        ("attacks/labels/inference.py", "import fedaudit.data", "An attack never sees the truth"),
        ("defences/aggregation.py", "import fedaudit.transcript.observation", "Defences don't know attacks"),
        ("models/small.py", "import fedaudit.cli", "Layers, from the command line"),
    ],
)
def test_a_broken_rule_is_caught(tmp_path, module, line, contract):
    copied = [ROOT / "pyproject.toml", *(ROOT / place.partition("/")[0] for place in SOURCES)]
    subprocess.run(["cp", "-r", *copied, tmp_path], check=True)
    path = tmp_path / "src" / "fedaudit" / module
    path.write_text(path.read_text() + f"\n{line}\n")
    done = lint(tmp_path)
    assert done.returncode != 0
    assert any(contract in row and "BROKEN" in row for row in done.stdout.splitlines()), done.stdout
