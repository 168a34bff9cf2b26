"""The one optimiser loop of all optimisation-based attacks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fedaudit.attacks.base import Progress
from fedaudit.attacks.findings import Trace
from fedaudit.attacks.inversion.matching import Engine
from fedaudit.attacks.inversion.priors import total_variation, total_variation_gradient

_SNAPSHOTS = 20
_REPORT_EVERY = 10


@dataclass(frozen=True)
class Optimisation:
    """How the dummy images are optimised.

    Attributes:
        iterations: steps of Adam.
        learning_rate: of Adam, in normalised pixels.
        signed: give Adam only the sign of the gradient (Geiping et al. 2020).
        decay: multiply the learning rate by 0.1 after 3/8, 5/8 and 7/8 of the iterations (Geiping et al. 2020).
        total_variation: weight of the TV prior.
        clamp: keep pixels in their valid range after every step.
    """

    iterations: int
    learning_rate: float
    signed: bool
    decay: bool
    total_variation: float
    clamp: bool


@dataclass(frozen=True)
class Reconstruction:
    """The last iterate (normalised), the objective there, and the trace (snapshots normalised, too)."""

    images: Tensor
    objective: float
    trace: Trace


def reconstruct(
    engine: Engine,
    initial: Tensor,
    settings: Optimisation,
    pixel_range: tuple[Tensor, Tensor],
    progress: Progress | None = None,
) -> Reconstruction:
    """Minimise distance plus prior over images, from ``initial``.

    The last iterate is returned: the one of least objective isn't the better picture, and choosing by anything else
    would need the truth.

    Args:
        engine: distance and its gradient.
        initial: (n, C, H, W) normalised.
        settings: of the optimiser.
        pixel_range: normalised black and white, (1, C, H, W) each.
        progress: called with (done, total).
    """
    images = initial.clone()
    objective = with_prior(engine, settings.total_variation)
    descend = descent(objective, images, settings, pixel_range)
    keep = {round(settings.iterations * k / _SNAPSHOTS) for k in range(_SNAPSHOTS)}
    kept: list[int] = []
    values: list[Tensor] = []
    snapshots: list[Tensor] = []
    for iteration in range(settings.iterations):
        before = images.clone() if iteration in keep else None
        value = descend()
        if before is not None:
            kept.append(iteration)
            values.append(value)
            snapshots.append(before)
        if progress and (iteration + 1) % _REPORT_EVERY == 0:
            progress(iteration + 1, settings.iterations)
    value, _ = objective(images)
    kept.append(settings.iterations)
    values.append(value)
    snapshots.append(images.clone())
    trace = Trace(kept, torch.stack(values).tolist(), torch.stack(snapshots))
    return Reconstruction(images, trace.objective[-1], trace)


def descent(
    objective: Callable[[Tensor], tuple[Tensor, Tensor]],
    images: Tensor,
    settings: Optimisation,
    pixel_range: tuple[Tensor, Tensor],
) -> Callable[[], Tensor]:
    """Return a function that takes one step down from ``images``, in place, and returns the objective before it.

    Args:
        objective: with its gradient.
        images: (n, C, H, W) normalised.
        settings: of the optimiser.
        pixel_range: normalised black and white, (1, C, H, W) each.
    """
    optimiser = torch.optim.Adam([images], lr=settings.learning_rate)
    schedule = torch.optim.lr_scheduler.MultiStepLR(
        optimiser, [settings.iterations * k // 8 for k in (3, 5, 7)] if settings.decay else [], gamma=0.1
    )

    def step() -> Tensor:
        value, grad = objective(images)
        images.grad = grad.sign() if settings.signed else grad
        optimiser.step()
        schedule.step()
        if settings.clamp:
            torch.clamp(images, *pixel_range, out=images)
        return value

    return step


def with_prior(engine: Engine, weight: float) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """Return ``engine`` plus ``weight`` times total variation."""
    if not weight:
        return engine

    def objective(images: Tensor) -> tuple[Tensor, Tensor]:
        distance, grad = engine(images)
        prior = total_variation(images)
        return distance + weight * prior, torch.add(grad, total_variation_gradient(images), alpha=weight)

    return objective
