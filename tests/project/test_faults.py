"""A little of `make faults`: what is killed, loses its folder or fills its disk goes on, and nothing is different."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="asks /proc for processes")
def test_nothing_is_lost_doubled_or_different() -> None:
    few = ["--kills", "6", "--fresh", "0", "--others", "1", "--only", "simulation", "recorder"]
    line = [sys.executable, "-m", "tools.faults", *few]
    done = subprocess.run(line, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("nothing lost, doubled or different\n")
