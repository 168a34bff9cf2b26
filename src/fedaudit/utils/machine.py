"""How we use the machine: one thread a process; in processes of our own memory that is kept, torchvision made to fit.

A process of our own is a command's or a worker's. What changes a process for good is done there only, never in the
process of somebody who calls us as a library.
"""

from __future__ import annotations

import importlib
import platform
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from fedaudit.utils.errors import BadInput

# mallopt(3)'s names for its parameters, and the greatest values that it takes
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_NEVER, _LARGEST = 2**31 - 1, 32 * 2**20

# The two operators that torchvision's Python looks for when it is imported; we never call them.
_OPERATORS = ("nms", "qnms")
_declared: list[Any] = []  # torch forgets a declaration with its object
_own = False


@contextmanager
def interrupted(at: float | None, kind: type[BaseException]) -> Iterator[None]:
    """Raise an exception in this block, even if it waits or computes, at a time in seconds since 1970; None: never.

    What waits for a lock ends in the main thread alone, by a signal.
    """
    if at is None:
        yield
        return
    import ctypes
    import signal

    thread, lock, over = threading.get_ident(), threading.Lock(), False
    number = getattr(signal, "SIGUSR1", None) if threading.current_thread() is threading.main_thread() else None

    def stop() -> None:
        with lock:
            if over:
                return
            if number is not None:
                signal.pthread_kill(thread, number)
            else:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(kind))

    def ended(*_: object) -> None:
        raise kind

    timer = threading.Timer(max(0.0, at - time.time()), stop)
    timer.daemon = True
    before = None if number is None else signal.signal(number, ended)
    try:
        timer.start()
        yield
    finally:
        with lock:
            over = True
        timer.cancel()
        if number is not None:
            signal.signal(number, before)


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute with one thread: the same bits for any number of workers or cores, and no fights over cores."""
    import torch  # not above: commands that need no torch shall be quick

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def full_precision(device: str) -> Iterator[None]:
    """Compute on a GPU as exactly as on the CPU, and alike every time.

    Torch lets a GPU round what convolutions multiply to TF32, 10 bits of mantissa, unless told otherwise. That is
    coarser than the finite differences of attacks, and changes what they find. Recurrent layers run without cuDNN,
    whose own have no gradient in evaluation mode, and none of a gradient.

    Args:
        device: ``cuda``, or ``cpu``, where nothing is to be done.
    """
    if device == "cpu":
        yield
        return
    import torch

    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        with (
            torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True, allow_tf32=False),
            _recurrent_without_cudnn(),
        ):
            yield
    finally:
        torch.set_float32_matmul_precision(before)


@contextmanager
def _recurrent_without_cudnn() -> Iterator[None]:
    """Switch cuDNN off while a recurrent layer is called, of whatever model, in this thread and others."""
    import torch
    from torch.nn.modules import module as module_hooks

    off: list[ExitStack] = []

    def before(module: torch.nn.Module, _: object) -> None:
        if isinstance(module, torch.nn.RNNBase):
            stack = ExitStack()
            stack.enter_context(torch.backends.cudnn.flags(enabled=False, deterministic=True, allow_tf32=False))
            off.append(stack)

    def after(module: torch.nn.Module, *_: object) -> None:
        if off and isinstance(module, torch.nn.RNNBase):
            off.pop().close()

    hooks = (
        module_hooks.register_module_forward_pre_hook(before),
        module_hooks.register_module_forward_hook(after, always_call=True),
    )
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def computing_on(device: str) -> Iterator[None]:
    """Compute as exactly as :func:`full_precision` says; BadInput names in one line a GPU that is too small."""
    import torch

    try:
        with full_precision(device):
            yield
    except torch.OutOfMemoryError:
        raise BadInput(
            "the GPU's memory isn't enough for this training; lower batch sizes, or use device: cpu"
        ) from None


def own_process() -> None:
    """Declare that this process is a command's or a worker's, and let glibc keep what it frees, for its next tensors.

    Every iteration frees and allocates the same tensors of megabytes. By default glibc gives such memory back at once,
    and fetching each page anew costs more than the arithmetic on it (docs/evidence/performance.md).
    Other C libraries: no-op.
    """
    global _own
    _own = True
    if sys.platform != "linux":
        return
    try:
        import ctypes

        mallopt = ctypes.CDLL("libc.so.6").mallopt
    except (OSError, AttributeError):
        return
    mallopt(_MMAP_THRESHOLD, _LARGEST)
    mallopt(_TRIM_THRESHOLD, _NEVER)


def processor() -> str:
    """Return the name of this machine's processor, whose arithmetic decides the last bits."""
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, "") or platform.processor() or platform.machine()


def start_measuring_memory() -> int | None:
    """Forget this process's peak of memory and return how many KiB it holds now; None where the system can't.

    What was freed is given back beforehand, so that the last trial's memory doesn't count as this one's.
    """
    try:
        import ctypes

        ctypes.CDLL("libc.so.6").malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")
        return proc_field("VmRSS")
    except (OSError, AttributeError):
        return None


def peak_memory(before: int | None) -> float | None:
    """Return by how many MiB memory rose at most since :func:`start_measuring_memory` returned ``before``."""
    return None if before is None else max(0, proc_field("VmHWM") - before) / 1024


def proc_field(field: str, file: str = "/proc/self/status") -> int:
    """Return a field in KiB of a file that Linux keeps: VmRSS (memory now) or VmHWM (its peak) of this process's.

    Raises:
        OSError: there is no such file on this system.
    """
    lines = Path(file).read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))


def torchvision_was_fitted() -> bool:
    """Return whether :func:`import_torchvision` had to declare operators for it in this process."""
    return bool(_declared)


def import_torchvision() -> Any:
    """Return torchvision; in a process of our own, also beside a torch that its compiled operators don't fit.

    PyPI's torchvision beside a CPU build of torch fails on import, and takes what needs it with it. There the operators
    that it looks for, which we never call, are declared for it.

    Raises:
        ImportError: there is none.
        Exception: whatever a torchvision that doesn't fit torch raises.
    """
    try:
        return importlib.import_module("torchvision")
    except RuntimeError:
        if not _own or _declared:
            raise
    import torch

    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in _OPERATORS:
        if not hasattr(torch.ops.torchvision, name):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _declared.append(library)
    for name in [m for m in sys.modules if m.split(".")[0] == "torchvision"]:
        del sys.modules[name]
    return importlib.import_module("torchvision")
