"""Runs in forks of this process, and what happens to them at which moment."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime
from multiprocessing.connection import Pipe
from pathlib import Path
from typing import Any, NoReturn

from fedaudit.simulation import checkpoint
from fedaudit.utils import processes
from tools.faults.cases import Case, Wrong

EVENTS = {"open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate", "os.listdir", "os.scandir"}


@dataclass
class Plan:
    """What happens to a run.

    Attributes:
        root: only what is done to files below counts as an event.
        event: at which event of this process ``act`` is called; None: at none.
        act: what happens then.
        by_worker: the events are a worker's; the first that gets there.
        clock: seeds the jumps of the clock; None: it runs as it should.
        told: a file to which the number of events and the imported modules are written in the end.
    """

    root: Path
    event: int | None = None
    act: Callable[[], None] = lambda: os.kill(os.getpid(), signal.SIGKILL)
    by_worker: bool = False
    clock: int | None = None
    told: Path | None = None
    _seen: int = field(default=0, init=False)
    _process: int = field(default=0, init=False)

    def watch(self) -> None:
        """Count events in this process from now on, and those in its workers."""
        self._process, root = os.getpid(), str(self.root)

        def hook(event: str, arguments: tuple[Any, ...]) -> None:
            if event not in EVENTS or not str(arguments[0] if arguments else "").startswith(root):
                return
            if (os.getpid() != self._process) is not self.by_worker:
                return
            self._seen += 1
            if self._seen == self.event and not (self.by_worker and (self.root / "died").exists()):
                if self.by_worker:
                    (self.root / "died").touch()
                self.act()

        sys.addaudithook(hook)


class _Fork:
    """A forked worker, with what the pool wants of a process."""

    def __init__(self, pid: int) -> None:
        self.pid, self.returncode = pid, None

    def kill(self) -> None:
        if self.returncode is None:
            os.kill(self.pid, signal.SIGKILL)

    def wait(self) -> None:
        if self.returncode is None:
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])  # type: ignore[assignment]


def _forked_worker() -> Any:
    ours, its = Pipe()
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        ours.close()
        try:
            processes._serve(its.fileno(), parent, torchvision=False)
        finally:
            os._exit(0)
    its.close()
    return processes._Worker(_Fork(pid), ours)  # type: ignore[arg-type]


def begin(case: Case, folder: Path, plan: Plan, log: Path) -> int:
    """Start the case in a fork of this process and return its id."""
    pid = os.fork()
    if pid == 0:
        _in_child(case, folder, plan, log)
    return pid


def _in_child(case: Case, folder: Path, plan: Plan, log: Path) -> NoReturn:
    code: Any = 1
    try:
        handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(handle, 1)
        os.dup2(handle, 2)
        os.setsid()
        as_in_a_shell()
        processes._start = _forked_worker
        checkpoint.EVERY = 0.0
        tempfile.tempdir = str(plan.root / "temporary")
        if plan.clock is not None:
            _break_clock(random.Random(plan.clock))
        plan.watch()
        case.run(folder)
        code = 0
    except SystemExit as ended:
        code = ended.code or 0
        if isinstance(code, str):
            print(code)
            code = 2
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        if plan.told:
            plan.told.write_text("\n".join([str(plan._seen), *sys.modules]))
        os._exit(code if isinstance(code, int) else 1)


def _break_clock(rng: random.Random) -> None:
    """Let the clock jump at every look, years back and far ahead."""

    def now() -> float:
        return rng.choice([0.0, 86400.0 * 365, 1.7e9, 4e9, 2.5e11]) + rng.random()  # 1970 to 9892

    class Clock(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> Any:
            return datetime.fromtimestamp(now(), tz)

    time.time = now
    for module in list(sys.modules.values()):
        if module and module.__name__.startswith("fedaudit") and getattr(module, "datetime", None) is datetime:
            module.datetime = Clock  # type: ignore[attr-defined]


def as_in_a_shell() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # background jobs ignore some
        signal.signal(number, signal.SIG_DFL)


def end(pid: int, seconds: float = 120) -> int:
    """Return the exit code of a child (minus the signal's number) that ends within ``seconds``."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    raise Wrong(f"it was still running after {seconds:g} s")


def processes_of(session: int) -> list[int]:
    """Return the living processes of a session."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            values = path.read_text().rpartition(")")[2].split()
            if int(values[3]) == session and values[0] != "Z":
                found.append(int(path.parent.name))
    return found


def all_end(session: int) -> None:
    until = time.monotonic() + 5
    while processes_of(session):
        if time.monotonic() > until:
            raise Wrong("workers live on 5 s after their command")
        time.sleep(0.01)
