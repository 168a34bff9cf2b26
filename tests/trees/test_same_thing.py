"""What is kept of an audit of trees is found again by another process: nothing in a fingerprint is a process's own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fedaudit.attacks import make_attack
from fedaudit.utils import fingerprint_of
from tests.trees.tree_cases import model, seen, stump, transcript

STUMP = model(stump(0, 0.0, (1.0, 1.5), (-2.0, 1.0)))


def told() -> str:
    recorded = transcript((0, 0, STUMP, 10))
    before = recorded.digest()
    recorded.check()  # reads the trees
    assert recorded.digest() == before
    return f"{fingerprint_of(seen((0, 0, STUMP, 10)), make_attack('timberstrike'))} {before}"


@pytest.mark.slow
def test_fingerprints_are_the_same_in_another_process() -> None:
    line = [sys.executable, "-c", "from tests.trees.test_same_thing import told; print(told())"]
    environment = {**os.environ, "PYTHONHASHSEED": "7"}
    root = Path(__file__).parents[2]
    done = subprocess.run(line, capture_output=True, text=True, check=True, env=environment, cwd=root)
    assert done.stdout.strip() == told()


def test_settings_of_trees_count() -> None:
    bare = seen((0, 0, STUMP, 10), cover=False)
    assert fingerprint_of(bare) != fingerprint_of(seen((0, 0, STUMP, 10)))
