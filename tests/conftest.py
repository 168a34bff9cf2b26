"""What several test files need: the command line in this process, and a small recorded federation."""

from __future__ import annotations

import gc
import os
import random
import shutil
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import typer.main
from hypothesis import HealthCheck, settings

from fedaudit.cli import main
from fedaudit.data import DATASETS, Dataset, Request
from fedaudit.data.catalogue import Reader
from fedaudit.simulation import checkpoint
from fedaudit.utils import processes
from tests.no_network import forbidden

# Where a helper asserts, pytest tells as much as where a test does.
pytest.register_assert_rewrite("tests.data.data_cases", "tests.attacks.membership_cases", "tests.models.model_cases")

# Shared machines stall now and then: no deadlines. In CI the same examples every time, elsewhere new ones.
# How fast examples are drawn is the machine's matter.
QUIET: dict[str, Any] = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("steady", derandomize=bool(os.environ.get("CI")), max_examples=25, **QUIET)
settings.register_profile("thorough", max_examples=200, **QUIET)  # of `make test-all`
settings.load_profile("steady")

SCENARIO = """\
version: 1
name: small
data: {name: digits}
model: {name: lenet, initialisation: uniform}
federations:
  - {name: sgd, algorithm: fedsgd, clients: 2, examples: 2, batch_size: 1}
attacks:
  - {name: invg, iterations: 2}
"""


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Chance goes by the test's name, not by what ran before it in the same process: what fails, fails again alone."""
    seed = zlib.crc32(item.nodeid.encode())
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002 — what third parties draw by it
    torch.manual_seed(seed)


@pytest.fixture
def no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is signed, whatever the environment says."""
    monkeypatch.delenv("FEDAUDIT_KEY", raising=False)


@pytest.fixture
def checkpoint_every_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulations are kept after every round, however short they are."""
    monkeypatch.setattr(checkpoint, "EVERY", 0.0)


@dataclass(frozen=True)
class Outcome:
    """What a command left behind."""

    code: object
    out: str
    err: str

    @property
    def error(self) -> str:
        """Standard error without the line that says what will run."""
        return "".join(line for line in self.err.splitlines(keepends=True) if not line.endswith("…\n"))


Command = Callable[..., Outcome]


def core(names: Iterable[Any], *quick: Any) -> list[Any]:
    """Return parameters: those that are quick belong to the core, the others are slow."""
    return [name if name in quick else pytest.param(name, marks=pytest.mark.slow) for name in names]


def refused(outcome: Outcome, fragment: str) -> None:
    assert outcome.code == 2, outcome
    assert outcome.out == ""
    *before, error = outcome.err.splitlines()
    assert error.startswith("fedaudit: error: ")
    assert fragment in error
    assert outcome.err.endswith("\n")
    for line in before:  # what was going to run, and on a slow machine how far it was
        assert line.endswith(" …") or "% done" in line or line.endswith("under way"), outcome


@pytest.fixture(autouse=True)
def _no_network(request: pytest.FixtureRequest) -> Iterator[None]:
    """Let no test reach the network, but those of other people's libraries, which look for the machine's address."""
    with nullcontext() if request.node.get_closest_marker("peers") else forbidden():
        yield


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True, scope="session")
def _frozen() -> None:
    """Spare Python's garbage collector all that the modules hold."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def _one_command_tree() -> Iterator[None]:
    """Build the command line once, not for every command that a test runs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(typer.main, "get_command", cache(typer.main.get_command))
        yield


@pytest.fixture(autouse=True, scope="session")
def _data_read_once() -> Iterator[None]:
    """Decode the photographs once for all tests of a process, which may not change them: that takes a second."""
    kept: dict[Request, tuple[Dataset, float]] = {}

    def once(read: Reader) -> Reader:
        def again(paths: list[Path], request: Request) -> Dataset:
            if request not in kept:
                found = read(paths, request)
                kept[request] = found, _sum(found)
            return kept[request][0]

        return again

    layouts = DATASETS["photos"].value.layouts
    readers = [layout.read for layout in layouts]
    for layout in layouts:
        object.__setattr__(layout, "read", once(layout.read))
    yield
    for layout, read in zip(layouts, readers, strict=True):
        object.__setattr__(layout, "read", read)
    assert all(_sum(found) == before for found, before in kept.values()), "a test changed a data set"


def _sum(found: Dataset) -> float:
    """Return what changes if an example does."""
    return sum(float(part.inputs.double().sum() + part.targets.double().sum()) for part in (found.train, found.test))


@pytest.fixture(scope="session")
def _idle_workers() -> Iterator[list[Any]]:
    idle: list[Any] = []
    yield idle
    for worker in idle:
        worker.end()


@pytest.fixture
def kept_workers(_idle_workers: list[Any]) -> Iterator[None]:
    """Let this test share worker processes with others: each takes seconds to start."""
    token = processes._kept.set(_idle_workers)
    yield
    processes._kept.reset(token)


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Command:
    """Return a function that runs ``fedaudit`` with the given words in this process."""
    monkeypatch.delenv("FEDAUDIT_DATA", raising=False)

    def run(*words: str | Path) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["fedaudit", *map(str, words)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as stopped:
            main()
        captured = capsys.readouterr()
        return Outcome(stopped.value.code, captured.out, captured.err)

    return run


@pytest.fixture
def scenario_file(tmp_path: Path) -> Path:
    path = tmp_path / "scenario.yaml"
    path.write_text(SCENARIO)
    return path


@pytest.fixture(scope="session")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the transcript and the truth of ``SCENARIO``; copy it before changing anything."""
    from fedaudit.pipeline.prepare import resolve
    from fedaudit.pipeline.run import record
    from fedaudit.scenario.scenario import load_scenario
    from fedaudit.transcript.truth import save_recording

    folder = tmp_path_factory.mktemp("recorded")
    (folder / "scenario.yaml").write_text(SCENARIO)
    (recording,) = record(resolve(load_scenario(folder / "scenario.yaml")))
    save_recording(recording.transcript, recording.truth, folder / "transcript")
    return folder / "transcript"


@pytest.fixture(scope="session")
def _compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from fedaudit.utils import native

    cache = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(cache))
        if shutil.which("c++"):
            native.build()
    return cache


@pytest.fixture(scope="module")
def native_code(_compiled: Path) -> Iterator[None]:
    """Use native code that was built in a cache of the tests' own."""
    from fedaudit.utils import native

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(_compiled))
        native.kernels.cache_clear()
        yield
    native.kernels.cache_clear()
