"""Where trials run: processes of this machine, or Ray's. The one seam; both give results back as they finish."""

from __future__ import annotations

import importlib
import socket
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from fedaudit import BadInput
from fedaudit.utils import run_tasks

Beat = Callable[[Any, float], None]


class Backend(Protocol):
    """Calls a function with every argument, somewhere, and returns each with its result, or with what went wrong."""

    def __call__(
        self, function: Callable[[Any], Any], arguments: Sequence[Any], beat: Beat | None = None, /
    ) -> Iterator[tuple[Any, Any]]:
        """Return what arrives, as it does; ``beat`` is told how much of an argument's work is done, where known."""
        ...


_RETRIES = 1  # of a trial whose worker died, as here


def processes(workers: int) -> Backend:
    """Return the backend of ``workers`` processes here, one or more; one that dies takes only its own trial with it."""

    def run(
        function: Callable[[Any], Any], arguments: Sequence[Any], beat: Beat | None = None
    ) -> Iterator[tuple[Any, Any]]:
        told = (lambda index, share: beat(arguments[index], share)) if beat else None
        for index, result in run_tasks(function, arguments, workers=workers, beat=told):
            yield arguments[index], result

    return run


def ray(address: str, *, cpus: float = 1, gpus: float = 0) -> Backend:
    """Return the backend of a Ray cluster at ``auto`` or host:port, whose tasks don't tell how far they are."""
    try:
        engine: Any = importlib.import_module("ray")
    except ImportError as error:
        raise BadInput(f"--ray needs Ray ({error}): pip install 'PATH_OF_THE_CLONE[ray]'") from None
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    try:
        if colon:  # Ray itself tries for minutes
            socket.create_connection((host, int(port)), timeout=10).close()
        engine.init(address=address, log_to_driver=False, ignore_reinit_error=True)
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise BadInput(f"--ray {address}: no cluster there ({reason})") from None

    def run(
        function: Callable[[Any], Any],
        arguments: Sequence[Any],
        beat: Beat | None = None,  # noqa: ARG001
    ) -> Iterator[tuple[Any, Any]]:
        remote = engine.remote(num_cpus=cpus, num_gpus=gpus, max_retries=_RETRIES)(function)
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
