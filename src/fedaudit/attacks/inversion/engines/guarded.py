"""Which engine computes the step, and the check that a fast one may be used."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from fedaudit.attacks.inversion.engines.first_order import eager, first_order, is_recurrent, on_gpu, traced
from fedaudit.attacks.inversion.engines.reference import SOFTNESS, reference
from fedaudit.attacks.inversion.objectives import Distance, Objective
from fedaudit.attacks.victim import Victim
from fedaudit.task.training import TrainingConfig

AGREEMENT = 0.999  # least cosine between the fast and the exact gradient
CHECK_EVERY = 500
TRACE_FROM = 20  # steps; below, tracing costs more than it saves
COMPILE_FROM = 5_000  # steps; below, compiling does


def make_engine(
    name: str,
    victim: Victim,
    labels: Tensor,
    training: TrainingConfig,
    distance: Distance,
    steps: int,
    notes: list[str],
) -> Objective:
    """Return the engine ``name``.

    ``auto`` is the first-order one under guard: as the model is written for a handful of steps, traced for more,
    compiled for many. ``first-order`` is the traced one, ``compiled`` the compiled one, both without guard. On a GPU
    the traced one is recorded as a CUDA graph, and ``auto`` doesn't compile it: that takes longer than it saves. A
    recurrent network is run as it is written, by torch's own kernels: traced it is as long as the sequence, and no
    faster. Where the training isn't plain SGD all are the reference.

    Args:
        name: ``auto``, ``reference``, ``first-order`` or ``compiled``.
        labels: (n,) of the images.
        distance: of the pseudo-gradient W − W_T to the observed one.
        steps: how many will be taken.
        notes: what the user should know is added here while the engine runs.
    """
    exact = _without_fused_attention(reference(victim, labels, training, distance, SOFTNESS))
    if name == "reference" or not training.plain_sgd:
        if name not in ("auto", "reference"):
            notes.append(f"engine: reference, because {name} is for clients that train by plain SGD")
        return exact
    if name == "auto" and (steps < TRACE_FROM or is_recurrent(victim)):
        fast = first_order(victim, labels, training, distance, eager(victim))
    else:
        compiled = name == "compiled" or (name == "auto" and steps >= COMPILE_FROM and not on_gpu(victim))
        fast = first_order(victim, labels, training, distance, traced(victim, notes, compiled=compiled))
        fast = recorded(fast, notes) if on_gpu(victim) else fast
    return guarded(fast, exact, notes) if name == "auto" else fast


def guarded(fast: Objective, exact: Objective, notes: list[str]) -> Objective:
    """Return ``fast`` under guard: compared with ``exact`` at times, and given up, with a note, where they differ."""
    calls, fallen_back = 0, False

    def step(images: Tensor) -> tuple[Tensor, ...]:
        nonlocal calls, fallen_back
        if fallen_back:
            return exact(images)
        value, grad = fast(images)
        if calls % CHECK_EVERY == 0 and (compared := _if_twice_differentiable(exact, images, notes)) is not None:
            exact_value, exact_grad = compared
            a, b = grad.flatten().double(), exact_grad.flatten().double()
            agreement = (torch.dot(a, b) / (a.norm() * b.norm())).item()
            if not agreement >= AGREEMENT:  # also where it isn't a number
                fallen_back = True
                notes.append(
                    f"engine: reference from iteration {calls} on, because the first-order one's gradient had "
                    f"cosine {agreement:.4f} to the exact one"
                )
                value, grad = exact_value, exact_grad
        calls += 1
        return value, grad

    return step


def _if_twice_differentiable(exact: Objective, images: Tensor, notes: list[str]) -> tuple[Tensor, ...] | None:
    """Return the exact step, or None (with a note) where torch has no second derivative of the model."""
    try:
        return exact(images)
    except RuntimeError as error:
        if "is not implemented" not in str(error):
            raise
        note = f"engine: unchecked, because torch has no second derivative of this model ({error})"
        notes.extend([note] if note not in notes else [])
        return None


def _without_fused_attention(engine: Objective) -> Objective:
    """Let ``engine`` compute attention by its definition: torch's fused kernels have no second derivative."""

    def step(images: Tensor) -> tuple[Tensor, ...]:
        with sdpa_kernel(SDPBackend.MATH):
            return engine(images)

    return step


_EAGER = 3  # steps before it is recorded: the first ones trace, compile, and choose algorithms


def recorded(step: Objective, notes: list[str]) -> Objective:
    """Return ``step`` on a GPU, replayed from a recording (a CUDA graph) after a few calls.

    It takes longer to launch the kernels of a small network one by one than to run them; so all are launched at once.
    They must be the same whatever the values are, and the CPU mustn't wait for any.
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
