"""Worker processes may die at any moment, and so may whoever started them."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from fedaudit.attacks import make_attack
from fedaudit.attacks.findings import Finding
from fedaudit.pipeline.trials import Means, run_trials
from fedaudit.utils import processes
from fedaudit.utils.errors import BadInput, FedAuditError
from fedaudit.utils.processes import WorkerDied, keep_workers, run_tasks, tell
from fedaudit.utils.progress import Quiet, Report


def outcomes(function: Callable[[Any], Any], arguments: list[Any], workers: int = 2) -> list[Any]:
    found = dict(run_tasks(function, arguments, workers=workers))
    return [found[i] for i in range(len(arguments))]


def pid(_: object) -> int:
    time.sleep(0.05)
    return os.getpid()


def lived(folder: Path, name: str) -> bool:
    """Return False the first time that it is asked by that name."""
    try:
        (folder / name).touch(exist_ok=False)
    except FileExistsError:
        return True
    return False


def gone(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return True
    return "Z" in Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]


def wait_until(holds: Callable[[], bool], seconds: float) -> bool:
    began = time.monotonic()
    while time.monotonic() - began < seconds:
        if holds():
            return True
        time.sleep(0.05)
    return holds()


@pytest.mark.slow
@pytest.mark.usefixtures("kept_workers")
def test_tensors_travel_whole_and_errors_say_where_they_arose():
    x = torch.randn(3, 4, 5, 6, generator=torch.Generator().manual_seed(0)).contiguous(
        memory_format=torch.channels_last
    )

    def double(tensor: torch.Tensor) -> torch.Tensor:
        assert torch.get_num_threads() == 1
        if tensor.ndim != 4:
            raise BadInput("four dimensions are wanted")
        return tensor * 2

    doubled, error = outcomes(double, [x, x[0]])
    assert doubled.equal(x * 2)
    assert doubled.stride() == x.stride()
    assert isinstance(error, BadInput)
    assert str(error) == "four dimensions are wanted"
    assert "in double" in error.__notes__[0]


@pytest.mark.slow
def test_workers_are_kept_within_the_block_and_end_with_it():
    with keep_workers():
        first = set(outcomes(pid, [0] * 8))
        second = set(outcomes(pid, [0] * 8))
        kept = {worker.process.pid for worker in processes._kept.get() or ()}
        assert first & second
        assert first | second <= kept
        assert len(kept) == 2
    assert all(map(gone, kept))


@pytest.mark.usefixtures("kept_workers")
def test_what_can_t_travel_is_told_for_its_task_alone():
    lock, fine = outcomes(str, [threading.Lock(), 1])
    assert isinstance(lock, BadInput)
    assert "worker process" in str(lock)
    assert fine == "1"
    (returned,) = outcomes(lambda _: threading.Lock(), [0])
    assert isinstance(returned, TypeError)


@pytest.mark.usefixtures("kept_workers")
@pytest.mark.slow
def test_a_worker_killed_within_a_message_costs_its_task_one_retry_and_nothing_else(tmp_path):
    def answers(what: str) -> bytes:
        if what == "half" and not lived(tmp_path, what):
            link = processes._link
            assert link is not None
            os.write(link.fileno(), (100_000_000).to_bytes(4, "big") + b"x" * 1000)  # a length, and a part of it
            os.kill(os.getpid(), signal.SIGKILL)
        if what == "always":
            os._exit(3)
        return what.encode()

    *others, died = outcomes(answers, ["a", "half", "b", "c", "d", "always"])
    assert others == [b"a", b"half", b"b", b"c", b"d"]
    assert isinstance(died, WorkerDied)
    assert "exit code 3" in str(died)


ENDS = """
import os, signal, sys
def end():
    for i in range(TIMES):
        try:
            os.close(os.open(f"FOLDER/{i}", os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            continue
        HOW
class Ending:
    def find_spec(self, name, path=None, target=None):
        if name == WHEN:
            end()
sys.meta_path.insert(0, Ending())
if WHEN is None:
    end()
"""


def ending_at_start(
    folder: Path, monkeypatch: pytest.MonkeyPatch, times: int, *, when: str | None = None, how: str = "os._exit(7)"
) -> None:
    """Let the next ``times`` interpreters end before they run anything, or ``when`` they import that module."""
    text = ENDS.replace("FOLDER", str(folder)).replace("TIMES", str(times)).replace("HOW", how)
    (folder / "sitecustomize.py").write_text(text.replace("WHEN", repr(when)))
    monkeypatch.setenv("PYTHONPATH", f"{folder}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("when", [None, "fedaudit", "torch", "torch.nn"])
def test_a_worker_that_dies_while_it_starts_costs_no_task_anything(tmp_path, monkeypatch, when):
    ending_at_start(tmp_path, monkeypatch, 2, when=when, how="os.kill(os.getpid(), signal.SIGKILL)")
    runs = tmp_path / "runs"
    runs.mkdir()

    def counted(name: str) -> str:
        assert not lived(runs, name), "it was run twice"
        return name

    assert outcomes(counted, ["a", "b", "c", "d"]) == ["a", "b", "c", "d"]
    assert (tmp_path / "1").exists()


@pytest.mark.slow
def test_where_memory_suffices_for_one_worker_only_it_does_all(tmp_path, monkeypatch):
    with keep_workers():
        (lonely,) = set(outcomes(pid, [0], workers=1))
        ending_at_start(tmp_path, monkeypatch, 100)
        assert set(outcomes(pid, list(range(12)), workers=3)) == {lonely}


def test_workers_that_never_start_are_given_up(tmp_path, monkeypatch):
    ending_at_start(tmp_path, monkeypatch, 100)
    with pytest.raises(FedAuditError, match=r"die while they start \(exit code 7\)"):
        outcomes(pid, [1, 2])


@pytest.mark.slow
def test_an_idle_worker_that_dies_is_replaced():
    with keep_workers():
        (worker,) = set(outcomes(pid, [0], workers=1))
        os.kill(worker, signal.SIGKILL)
        assert wait_until(lambda: gone(worker), 5)
        (other,) = set(outcomes(pid, [0], workers=1))
    assert other != worker


@pytest.mark.usefixtures("kept_workers")
def test_progress_arrives_in_order():
    def slow(_: object) -> None:
        for done in range(4):
            tell(done)
            time.sleep(0.35)

    beats: list[tuple[int, float]] = []
    list(run_tasks(slow, [0], workers=1, beat=lambda *beat: beats.append(beat)))
    assert beats == [(0, 0), (0, 1), (0, 2), (0, 3)]


class Named(Finding, kind="named in a test"):
    """A finding without anything."""


@pytest.mark.usefixtures("kept_workers")
@pytest.mark.slow
def test_a_trial_whose_workers_die_costs_the_others_nothing(tmp_path):
    @dataclasses.dataclass(frozen=True)
    class Fatal:
        name: str
        outcome: Named | None = None
        attack: ClassVar[Any] = make_attack("labels", {})  # asks for nothing beforehand
        observation: ClassVar[None] = None
        work: ClassVar[float] = 1.0

        def key(self) -> str:
            return self.name

        def run(self, report: Callable[[float], None]) -> Named:
            if self.name == "b":
                os._exit(1)
            report(0.5)
            return Named(attack=self.name)

        def kept(self, path: Path) -> Named:
            return Named(attack=path.stem + " kept")

    trials: Any = [Fatal(name) for name in "abcd"]
    told: list[float] = []

    class Told(Quiet):
        def stage(self, title: str, total: float) -> Report:
            return told.append

    with pytest.raises(FedAuditError, match=f"died twice .*fewer workers; what was finished is kept in {tmp_path}"):
        run_trials(trials, Means(2, tmp_path, display=Told()))
    assert sorted(path.stem for path in tmp_path.iterdir()) == ["a", "c", "d"]
    assert told[0] == 0
    assert told[-1] == 3
    del trials[1]
    (tmp_path / "c.safetensors").unlink()
    (tmp_path / "d.safetensors").unlink()
    found = run_trials(trials, Means(2, tmp_path, display=Told()))
    assert [isinstance(t.outcome, Named) and t.outcome.attack for t in found] == ["a kept", "c", "d"]
    assert told[-1] == 3


PARENT = """\
import signal, sys, time, tempfile
from pathlib import Path
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores it for what it runs in the background
from fedaudit.utils.processes import run_tasks
def busy(path):
    import os
    Path(path).write_text(str(os.getpid()))
    while True: pass
list(run_tasks(busy, [sys.argv[1] + "/0", sys.argv[1] + "/1"], workers=2))
"""


@pytest.mark.slow
@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_workers_end_with_their_parent_whatever_ends_it(sent, tmp_path):
    script, pids, temporary = tmp_path / "own.py", tmp_path / "pids", tmp_path / "temporary"
    pids.mkdir()
    temporary.mkdir()
    script.write_text(PARENT)  # no `if __name__ == "__main__"`: workers must not run it again
    environment = {**os.environ, "TMPDIR": str(temporary)}
    parent = subprocess.Popen([sys.executable, script, pids], env=environment, stderr=subprocess.PIPE)
    assert wait_until(lambda: len(list(pids.iterdir())) == 2 and all(p.read_text() for p in pids.iterdir()), 90)
    workers = [int(path.read_text()) for path in pids.iterdir()]
    parent.send_signal(sent)
    parent.wait(10)
    assert wait_until(lambda: all(map(gone, workers)), 5)
    assert list(temporary.iterdir()) == []
    assert parent.stderr is not None
    parent.stderr.close()


def test_a_worker_that_is_still_starting_ends_with_its_parent(tmp_path):
    script = (
        "import os; from fedaudit.utils.processes import _start; print(_start().process.pid, flush=True); os._exit(0)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert wait_until(lambda: gone(int(done.stdout)), 10)
