"""The one optimiser loop of all optimisation-based attacks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from fedaudit.attacks.base import Progress
from fedaudit.attacks.findings import Trace
from fedaudit.attacks.inversion.engines.reference import Engine
from fedaudit.attacks.inversion.priors import Prior

_SNAPSHOTS = 20
_REPORT_EVERY = 10
_WARM_UP = 50  # iterations of a cosine schedule's linear start (Yin et al. 2021, Section 4)

OptimiserName = Literal["adam", "l-bfgs"]
Schedule = Literal["constant", "steps", "linear", "cosine"]
# variables, the dummy images first -> (what is minimised, its gradient on each of them)
Objective = Callable[[list[Tensor]], tuple[Tensor, list[Tensor]]]


@dataclass(frozen=True)
class Optimisation:
    """How the dummy images are optimised.

    Attributes:
        iterations: steps of the optimiser; one of L-BFGS evaluates the objective up to 25 times.
        learning_rate: in normalised pixels.
        optimiser: ``adam``, or ``l-bfgs`` with a strong Wolfe line search, without which it now and then runs away.
        signed: give the optimiser only the sign of the images' gradient (Geiping et al. 2020).
        schedule: of the learning rate: ``constant``; ``steps``, ×0.1 after 3/8, 5/8 and 7/8 of the iterations (Geiping
            et al. 2020); ``linear``, to zero; ``cosine``, to zero after a short linear start (Yin et al. 2021).
        clamp: keep pixels in their valid range after every step.
        noise: standard deviation of the Gaussian noise added to the images in each step, in learning rates (Yin et al.
            2021, Eq. 13).
        average: share of the iterations, the last ones, whose mean iterate is the result (Polyak and Juditsky 1992);
            0 for the last iterate.
    """

    iterations: int
    learning_rate: float
    optimiser: OptimiserName = "adam"
    signed: bool = False
    schedule: Schedule = "constant"
    clamp: bool = False
    noise: float = 0.0
    average: float = 0.0

    def rate(self, iteration: int) -> float:
        """Return the learning rate of ``iteration``, relative to the first one's."""
        if self.schedule == "steps":
            return float(0.1 ** sum(iteration >= self.iterations * k // 8 for k in (3, 5, 7)))
        if self.schedule == "linear":
            return 1 - iteration / self.iterations
        if self.schedule == "cosine":
            start = min(1.0, (iteration + 1) / min(_WARM_UP, self.iterations))
            return start * 0.5 * (1 + math.cos(math.pi * iteration / self.iterations))
        return 1.0


@dataclass(frozen=True)
class Reconstruction:
    """Where the optimiser ended.

    Attributes:
        images: the last iterate, or the mean of the last ones, normalised.
        others: what was optimised beside the images.
        objective: at the last iterate.
        trace: with normalised snapshots.
    """

    images: Tensor
    others: list[Tensor]
    objective: float
    trace: Trace


def reconstruct(
    objective: Objective,
    initial: Sequence[Tensor],
    settings: Optimisation,
    pixel_range: tuple[Tensor, Tensor],
    generator: torch.Generator,
    progress: Progress | None = None,
) -> Reconstruction:
    """Minimise ``objective`` from ``initial``.

    The last iterate is returned, or the mean of the last ones: the one of least objective isn't the better picture, and
    choosing by anything else would need the truth.

    Args:
        objective: with its gradients.
        initial: variables; the first are the dummy images, (n, C, H, W) normalised.
        settings: of the optimiser.
        pixel_range: normalised black and white, (1, C, H, W) each.
        generator: of the noise that is added in each step, if any.
        progress: called with (done, total).
    """
    variables = [v.clone() for v in initial]
    images = variables[0]
    descend = pseudo_gradient(objective, variables, settings, pixel_range, generator)
    keep = {round(settings.iterations * k / _SNAPSHOTS) for k in range(_SNAPSHOTS)}
    kept: list[int] = []
    values: list[Tensor] = []
    snapshots: list[Tensor] = []
    first = settings.iterations - round(settings.average * settings.iterations)
    sums = [torch.zeros_like(v) for v in variables]
    for iteration in range(settings.iterations):
        before = images.clone() if iteration in keep else None
        value = descend()
        if before is not None:
            kept.append(iteration)
            values.append(value)
            snapshots.append(before)
        if iteration >= first:
            torch._foreach_add_(sums, variables)
        if progress and (iteration + 1) % _REPORT_EVERY == 0:
            progress(iteration + 1, settings.iterations)
    if first < settings.iterations:
        for variable, total in zip(variables, sums, strict=True):
            variable.copy_(total / (settings.iterations - first))
    value, _ = objective(variables)
    kept.append(settings.iterations)
    values.append(value)
    snapshots.append(images.clone())
    trace = Trace(kept, torch.stack(values).tolist(), torch.stack(snapshots))
    return Reconstruction(images, variables[1:], trace.objective[-1], trace)


def pseudo_gradient(
    objective: Objective,
    variables: list[Tensor],
    settings: Optimisation,
    pixel_range: tuple[Tensor, Tensor],
    generator: torch.Generator,
) -> Callable[[], Tensor]:
    """Return a function that takes one step down from ``variables``, in place, and returns the objective before it.

    Args:
        objective: with its gradients.
        variables: the first are the images, (n, C, H, W) normalised.
        settings: of the optimiser.
        pixel_range: normalised black and white, (1, C, H, W) each.
        generator: of the noise, if any.
    """
    optimiser: torch.optim.Optimizer
    if settings.optimiser == "adam":
        optimiser = torch.optim.Adam(variables, lr=settings.learning_rate)
    else:
        optimiser = torch.optim.LBFGS(variables, lr=settings.learning_rate, line_search_fn="strong_wolfe")
    schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, settings.rate)
    images = variables[0]

    def evaluate() -> Any:  # torch's types ask for a float
        value, gradients = objective(variables)
        for variable, gradient in zip(variables, gradients, strict=True):
            variable.grad = gradient.contiguous()
        if settings.signed:
            images.grad = gradients[0].sign()
        return value

    def step() -> Tensor:
        if settings.optimiser == "adam":
            value: Tensor = evaluate()
            optimiser.step(None)
        else:
            value = torch.as_tensor(optimiser.step(evaluate))  # the first of its evaluations
        if settings.noise:
            rate = settings.noise * float(schedule.get_last_lr()[0])
            noise = torch.randn(images.shape, generator=generator, dtype=images.dtype)
            images.add_(noise.to(images.device), alpha=rate)
        schedule.step()
        if settings.clamp:
            torch.clamp(images, *pixel_range, out=images)
        return value

    return step


def with_priors(engine: Engine, priors: Sequence[tuple[float, Prior]]) -> Objective:
    """Return the distance plus the weighted priors, as the optimiser loop takes it."""
    wanted = [(weight, prior) for weight, prior in priors if weight]

    def objective(variables: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        (images,) = variables
        value, gradient = engine(images)
        for weight, prior in wanted:
            own, slope = prior(images)
            value, gradient = value + weight * own, torch.add(gradient, slope, alpha=weight)
        return value, [gradient]

    return objective
