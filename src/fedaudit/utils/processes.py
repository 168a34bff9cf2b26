"""Worker processes for trials, studies and simulated clients: one pool, robust to a worker that dies at any moment.

A worker is a fresh interpreter that doesn't run the user's program again. Each has a link of its own: one that dies,
even within a message, leaves the others no half of it, and no lock.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any, Literal, TypeVar

import cloudpickle

from fedaudit.utils.errors import BadInput, FedAuditError
from fedaudit.utils.machine import import_torchvision, own_process, torchvision_was_fitted

Argument = TypeVar("Argument")
Result = TypeVar("Result")
Beat = Callable[[int, float], None]

_LIVES = 2  # a worker that dies costs its task one retry
_STARTS = 4  # workers that die one after the other before they are ready: more would, too
_EVERY = 0.3  # seconds between two beats of a worker
_PR_SET_PDEATHSIG = 1  # prctl(2): a signal for this process when its parent ends
_ENVIRONMENT = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")


class WorkerDied(FedAuditError):
    """A task's worker died, and the one that tried it again."""


@dataclass(eq=False)
class _Worker:
    process: subprocess.Popen[bytes]
    link: Connection[Any, Any]
    ready: bool = False
    task: int | None = None  # its index

    def end(self) -> None:
        self.link.close()
        self.process.kill()
        self.process.wait()


_kept: ContextVar[list[_Worker] | None] = ContextVar("kept", default=None)  # idle ones; None: nobody keeps any


@contextmanager
def keep_workers() -> Iterator[None]:
    """Let the calls of :func:`run_tasks` in this block share workers: each takes seconds to start."""
    if _kept.get() is not None:
        yield
        return
    idle: list[_Worker] = []
    token = _kept.set(idle)
    try:
        yield
    finally:
        _kept.reset(token)
        for worker in idle:
            worker.end()


def run_tasks(
    function: Callable[[Argument], Result],
    arguments: Sequence[Argument],
    *,
    workers: int,
    beat: Beat | None = None,
) -> Iterator[tuple[int, Result | BaseException]]:
    """Begin to call ``function`` with every argument in worker processes, and return the results as they arrive.

    A worker that dies costs its own task one retry and the others nothing. Workers end when the caller is interrupted,
    closes the iterator, or ends in any way.

    Args:
        function: what a fresh interpreter can be sent; anything that cloudpickle takes.
        arguments: of one task each.
        workers: processes at most, at least one.
        beat: called with a task's index and what it told by :func:`tell`.

    Yields:
        The index of a task with its result, or with what was raised: :class:`WorkerDied` where two workers died of it.

    Raises:
        FedAuditError: worker processes can't be started.
    """
    results = _run(function, arguments, workers, beat)
    next(results)  # what follows happens beside the caller's own work; and a generator that has begun cleans up
    return results


def _run(
    function: Callable[[Any], Any], arguments: Sequence[Any], most: int, beat: Beat | None
) -> Iterator[tuple[int, Any]]:
    if sys.platform == "win32":  # no file descriptors for children: one after the other, here
        yield -1, None
        for index, argument in enumerate(arguments):
            yield index, _call(function, argument)[1]
        return
    todo, deaths = deque(range(len(arguments))), Counter[int]()
    kept = _kept.get()
    pool = [kept.pop() for _ in range(min(len(kept), most))] if kept else []
    stillborn = 0

    def feed() -> Iterator[tuple[int, BaseException]]:
        """Start as many workers as there is work for, and give each idle one its next task."""
        while len(pool) < min(most, len(todo) + sum(worker.task is not None for worker in pool)):
            pool.append(_start())
        for worker in pool:
            if worker.ready and worker.task is None and todo:
                worker.task = todo.popleft()
                try:
                    message = cloudpickle.dumps((function, arguments[worker.task]))
                except Exception as error:
                    index, worker.task = worker.task, None
                    reason = " ".join(str(error).split())
                    yield index, BadInput(f"it can't be sent to a worker process ({reason}); run with one worker")
                else:
                    with suppress(OSError):  # it died: found out below
                        worker.link.send_bytes(message)

    def bury(worker: _Worker) -> Iterator[tuple[int, BaseException]]:
        nonlocal most, stillborn
        pool.remove(worker)
        worker.end()
        if worker.task is not None:
            deaths[worker.task] += 1
            if deaths[worker.task] < _LIVES:
                todo.append(worker.task)
            else:
                code = worker.process.returncode
                yield worker.task, WorkerDied(f"its worker process died twice (exit code {code})")
        elif not worker.ready:
            stillborn += 1
            if stillborn >= _STARTS and any(
                other.ready for other in pool
            ):  # for want of memory, perhaps: go on with them
                most, stillborn = len(pool), 0
            elif stillborn >= _STARTS:
                code = worker.process.returncode
                raise FedAuditError(f"worker processes die while they start (exit code {code}); run with one worker")

    try:
        finished: list[tuple[int, Any]] = list(feed())
        yield -1, None
        while True:
            yield from finished
            if not todo and all(worker.task is None for worker in pool):
                return
            finished = []
            ready = wait([worker.link for worker in pool])
            for worker in [w for w in pool if w.link in ready]:
                try:
                    kind, value = pickle.loads(worker.link.recv_bytes())
                except (EOFError, OSError):
                    finished += bury(worker)
                    continue
                except Exception as error:  # what it returned can't be read here
                    kind, value = "done", error
                if kind == "ready":
                    worker.ready, stillborn = True, 0
                elif worker.task is not None and kind == "beat":
                    if beat:
                        beat(worker.task, value)
                elif worker.task is not None:
                    finished.append((worker.task, value))
                    worker.task = None
            finished += feed()  # before the caller sees what is finished
    finally:
        for worker in pool:
            if kept is not None and worker.ready and worker.task is None:
                kept.append(worker)
            else:
                worker.end()


def _start() -> _Worker:
    """Return a new worker; it is ready when it says so."""
    ours, its = Pipe()
    code = (
        f"import sys; sys.path[:] = {sys.path!r}; from fedaudit.utils.processes import _serve; "
        f"_serve({its.fileno()}, {os.getpid()}, torchvision={torchvision_was_fitted()})"
    )
    # Ctrl-C reaches the whole terminal; this process alone deals with it. Its children inherit what is blocked.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        process = subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.DEVNULL,
            env={**os.environ, **_ENVIRONMENT},
            pass_fds=[its.fileno()],
        )
    except OSError as error:
        ours.close()
        raise FedAuditError(f"a worker process can't be started ({error.strerror}); run with one worker") from None
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        its.close()  # else the end of the worker would not be the end of the link
    return _Worker(process, ours)


# In a worker --------------------------------------------------------------------------------------------------------

_link: Connection[Any, Any] | None = None
_told = 0.0  # when the last beat was sent


def tell(value: float) -> None:
    """Tell whoever waits for this task how far it is; not more often than it can be seen, and only in a worker."""
    global _told
    if _link is not None and time.monotonic() - _told >= _EVERY:
        _told = time.monotonic()
        _link.send_bytes(pickle.dumps(("beat", value)))


def _serve(handle: int, parent: int, *, torchvision: bool) -> None:
    """Take tasks from the link until it ends; what a task unpickles may need torchvision, made to fit as there."""
    global _link
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with(parent)
    own_process()
    import torch  # noqa: F401  # every task needs it; and if memory doesn't suffice for it, no task is to blame

    if torchvision:
        import_torchvision()

    _link = Connection(handle)
    try:
        _link.send_bytes(pickle.dumps(("ready", None)))
        while True:
            _link.send_bytes(_answer(_link.recv_bytes()))
    except (EOFError, OSError):
        return


def _answer(message: bytes) -> bytes:
    try:
        function, argument = pickle.loads(message)
    except Exception as error:
        answer: tuple[str, Any] = "done", _with_traceback(error)
    else:
        answer = _call(function, argument)
    try:
        return bytes(cloudpickle.dumps(answer))
    except Exception as error:  # an exception of somebody's that can't travel, or such a result
        what = f"{answer[1]!r:.200}" if isinstance(answer[1], BaseException) else type(answer[1]).__name__
        return bytes(cloudpickle.dumps(("done", TypeError(f"{what} can't be sent from a worker process: {error}"))))


def _call(function: Callable[[Any], Any], argument: Any) -> tuple[Literal["done"], Any]:
    try:
        return "done", function(argument)
    except Exception as error:
        return "done", _with_traceback(error)


def _with_traceback(error: BaseException) -> BaseException:
    """Return the error with a note that says where in the worker it arose: its own traceback can't travel."""
    error.add_note("".join(traceback.format_exception(error)))
    return error.with_traceback(None)


def end_with(parent: int) -> None:
    """Let this process end soon after its parent, whatever ends that.

    Args:
        parent: its process id.
    """
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)

    def watch() -> None:  # other systems; a parent that ended before prctl
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
