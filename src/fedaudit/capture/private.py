"""Opacus, read while it runs: what its optimiser makes of a step, and whether its batches are Poisson samples.

It is never imported here; where nobody else has, there is nothing to read.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

from torch import nn
from torch.optim import Optimizer

from fedaudit.transcript.update import PrivateSteps

_MODELLED = {"DPOptimizer": "flat", "DPOptimizerFastGradientClipping": "ghost", "DPPerLayerOptimizer": "layers"}


class PrivateStep(NamedTuple):
    """How one step was made private; ``summed``: the loss is the sum over a batch, as far as Opacus knows."""

    made: PrivateSteps
    how: Literal["flat", "ghost", "layers", "other"]  # ghost: by a second backward pass; other: in no way known here
    summed: bool


def private_step(optimiser: Optimizer) -> PrivateStep | None:
    """Return how the step that ``optimiser`` is about to take was made private; None: it wasn't.

    Opacus' optimiser is looked for among the callers: one that is called directly adds no noise.
    """
    wrapper = next((own for own in _callers("opacus.optimizers") if own.original_optimizer is optimiser), None)
    if wrapper is None:
        return None
    how: Any = _MODELLED.get(type(wrapper).__name__, "other")
    mean = wrapper.loss_reduction == "mean"
    divisor = float(wrapper.expected_batch_size * wrapper.accumulated_iterations) if mean else 1.0
    layers = tuple(map(float, wrapper.max_grad_norms)) if how == "layers" else ()
    made = PrivateSteps(float(wrapper.max_grad_norm), float(wrapper.noise_multiplier), divisor, 1, layers=layers)
    return PrivateStep(made, how, not mean)


def poisson_rate() -> float | None:
    """Return the rate with which one of Opacus' samplers, which is calling, draws each example; None: none is."""
    return next((float(own.sample_rate) for own in _callers("opacus.utils.uniform_sampler")), None)


def goes_on(parameters: list[nn.Parameter]) -> bool:
    """Whether clipped gradients of passes before are kept for a later step, whatever became of the gradients."""
    return any(getattr(p, "summed_grad", None) is not None for p in parameters)


def _callers(module: str) -> Iterator[Any]:
    """Yield the objects whose methods are running in this thread and whose class is of a module of Opacus'."""
    frame = sys._getframe(1) if module in sys.modules else None
    while frame is not None:
        own = frame.f_locals.get("self")
        if any(kind.__module__.startswith(module) for kind in type(own).__mro__):
            yield own
        frame = frame.f_back
