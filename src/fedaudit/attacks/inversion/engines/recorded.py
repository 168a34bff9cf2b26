"""On a GPU: an engine's step recorded once, and replayed as a whole.

The kernels of a small network are shorter than it takes to launch them one by one. A CUDA graph launches them all at
once (torch.cuda.CUDAGraph).
"""

from __future__ import annotations

import torch
from torch import Tensor

from fedaudit.attacks.inversion.objectives import Objective

_EAGER = 3  # steps before it is recorded: the first ones trace, compile, and choose algorithms


def recorded(step: Objective, notes: list[str]) -> Objective:
    """Return ``step``, replayed from a recording after a few calls.

    Args:
        step: of images on a GPU, of one shape; its kernels are the same whatever the values are, and the CPU waits for
            none of them.
        notes: that it can't be recorded, which is slower, is added here.
    """
    calls = 0
    replayed: Objective | None = None

    def run(images: Tensor) -> tuple[Tensor, ...]:
        nonlocal calls, replayed
        calls += 1
        if calls <= _EAGER:
            return step(images)
        if replayed is None:
            try:
                replayed = _record(step, images)
            except RuntimeError as error:
                lines = str(error).splitlines() or [type(error).__name__]
                notes.append(f"engine: not recorded as a CUDA graph, which is slower ({lines[0]})")
                replayed = step
        return replayed(images)

    return run


def _record(step: Objective, images: Tensor) -> Objective:
    held = images.detach().clone()
    torch.cuda.synchronize()
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
    try:
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            results = step(held)
    except RuntimeError:
        torch.cuda.set_stream(stream)  # a recording that fails doesn't give it back
        raise

    def replay(images: Tensor) -> tuple[Tensor, ...]:
        held.copy_(images)
        graph.replay()
        return tuple(result.clone() for result in results)

    return replay
