"""Where trials run: processes of this machine, or Ray's. The one seam; both give results back as they finish."""

from __future__ import annotations

import concurrent.futures
import importlib
import multiprocessing
import socket
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from pebble import ProcessExpired, ProcessPool

from fedaudit.utils.errors import BadInput

Argument = TypeVar("Argument")
Result = TypeVar("Result")

# An argument with its result, or with what went wrong
Finished = tuple[Argument, Result | BaseException]
Backend = Callable[[Callable[[Any], Any], Sequence[Any]], Iterator[tuple[Any, Any]]]

_LIVES = 2  # a worker that dies costs its trial one retry


def processes(workers: int) -> Backend:
    """Return the backend of ``workers`` processes here; a worker that dies takes only its own trial with it.

    Args:
        workers: at least one.
    """

    def run(
        function: Callable[[Argument], Result], arguments: Sequence[Argument]
    ) -> Iterator[Finished[Argument, Result]]:
        pool = ProcessPool(max_workers=min(workers, len(arguments)) or 1, context=multiprocessing.get_context("spawn"))
        waiting: dict[Any, tuple[Argument, int]] = {}
        try:
            for argument in arguments:
                waiting[pool.schedule(function, args=[argument])] = (argument, 1)
            while waiting:
                ready, _ = concurrent.futures.wait(waiting, return_when=concurrent.futures.FIRST_COMPLETED)
                for future in ready:
                    argument, life = waiting.pop(future)
                    error = future.exception()
                    if isinstance(error, ProcessExpired) and life < _LIVES:
                        waiting[pool.schedule(function, args=[argument])] = (argument, life + 1)
                    elif error is not None:
                        yield argument, error
                    else:
                        yield argument, future.result()
            pool.close()
        finally:
            pool.stop()
            pool.join()

    return run


def ray(address: str, *, cpus: float = 1, gpus: float = 0) -> Backend:
    """Return the backend of a Ray cluster.

    Args:
        address: of the cluster, as ``ray.init`` takes it: ``auto``, or host:port.
        cpus: cores that a trial takes.
        gpus: GPUs that a trial takes; may be a fraction.

    Raises:
        BadInput: Ray isn't installed, or the cluster can't be reached.
    """
    try:
        engine: Any = importlib.import_module("ray")
    except ImportError as error:
        raise BadInput(f"--ray needs Ray ({error}): pip install 'fedaudit[ray]'") from None
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    try:
        if colon:  # Ray itself tries for minutes
            socket.create_connection((host, int(port)), timeout=10).close()
        engine.init(address=address, log_to_driver=False, ignore_reinit_error=True)
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise BadInput(f"--ray {address}: no cluster there ({reason})") from None

    def run(
        function: Callable[[Argument], Result], arguments: Sequence[Argument]
    ) -> Iterator[Finished[Argument, Result]]:
        remote = engine.remote(num_cpus=cpus, num_gpus=gpus, max_retries=_LIVES - 1)(function)
        waiting = {remote.remote(argument): argument for argument in arguments}
        while waiting:
            ready, _ = engine.wait(list(waiting), num_returns=1)
            for reference in ready:
                argument = waiting.pop(reference)
                try:
                    yield argument, engine.get(reference)
                except engine.exceptions.RayError as error:
                    yield argument, getattr(error, "cause", None) or error

    return run
