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


BREAKING = [
    ("attacks/base.py", "import fedaudit.transcript.truth", "An attack never sees the truth"),
    ("attacks/labels/inference.py", "import fedaudit.data", "An attack never sees the truth"),
    ("defences/aggregation.py", "import fedaudit.transcript.observation", "Defences don't know attacks"),
    ("models/small.py", "import fedaudit.cli", "Layers, from the command line"),
]


def test_broken_rules_are_caught(tmp_path: Path) -> None:
    """That they hold as they are is `make lint`'s."""
    copied = [str(ROOT / name) for name in (*(place.partition("/")[0] for place in SOURCES), "pyproject.toml")]
    subprocess.run(["cp", "-r", *copied, str(tmp_path)], check=True)
    for module, line, _ in BREAKING:
        path = tmp_path / "src" / "fedaudit" / module
        path.write_text(path.read_text() + f"\n{line}\n")
    command = [str(LINTER), "--no-cache", "--config", str(tmp_path / "pyproject.toml")]
    paths = ":".join(str(tmp_path / name) for name in SOURCES)
    environment = {"PYTHONPATH": paths, "PATH": "/usr/bin:/bin"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path, env=environment)
    assert done.returncode != 0
    broken = [row for row in done.stdout.splitlines() if "BROKEN" in row]
    for module, line, contract in BREAKING:
        assert any(contract in row for row in broken), done.stdout
        name = f"fedaudit.{module.removesuffix('.py').replace('/', '.')}"
        assert f"{name} -> {line.split()[1]}" in done.stdout, done.stdout
