"""The core of the fuzzing: a few cases of every target; `make fuzz` runs an hour of them, in worker processes."""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from tools.fuzz.__main__ import run_block
from tools.fuzz.names import NAMES
from tools.fuzz.targets import Target, targets

FEW = {"resolve": 5, "scenario": 10, "flags": 10, "study": 10}  # of what takes long; 20 of the rest
OPTIONAL = {"parquet", "nifti", "nifti.gz", "dicom"}  # read by packages that may be absent


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Target]:
    return targets(tmp_path_factory.mktemp("fuzz"))


def test_every_target_has_its_turn(known: dict[str, Target]) -> None:
    assert set(known) | OPTIONAL == set(NAMES)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_nothing_but_a_refusal(name: str, known: dict[str, Target]) -> None:
    if name not in known:
        pytest.skip("needs the package that reads it")
    target = known[name]

    @settings(
        max_examples=FEW.get(name, 20), database=None, deadline=None, derandomize=True, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(target.inputs)
    def case(drawn: Any) -> None:
        with contextlib.suppress(*target.refusals):
            target.run(drawn)

    case()


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("name", ["pickle", "picture"])
def test_a_worker_s_limits_hold(name: str) -> None:
    assert run_block(name, 10**6, 50) == (50, [])


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(1800)  # minutes of CPU, on a busy machine more
def test_20_000_mutated_batches() -> None:
    ran, findings = run_block("pickle", 10**7, 20_000)
    assert findings == []
    assert ran > 18_000  # the strategy may draw a seed twice


def test_a_case_that_ends_its_worker_is_a_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that says what it is about to do, and is gone: that case was it."""
    stand_in = tmp_path / "python"
    told = json.dumps({"case": "0"}), json.dumps({"found": None}), json.dumps({"case": "1"})
    stand_in.write_text(
        f"#!/bin/sh\n{chr(10).join(f'echo {chr(39)}{line}{chr(39)}' for line in told)}\nkill -SEGV $$\n"
    )
    stand_in.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(stand_in))
    ran, (finding,) = run_block("pickle", 0, 2)
    assert (ran, finding["case"]) == (1, "1")
    assert finding["found"].startswith("ended by -11")
