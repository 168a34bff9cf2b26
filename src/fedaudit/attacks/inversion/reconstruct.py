"""The one optimiser loop of all optimisation-based attacks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fedaudit.attacks.base import Progress, silent
from fedaudit.attacks.findings import Trace
from fedaudit.attacks.inversion.objectives import Objective

_SNAPSHOTS = 20
_REPORT_EVERY = 10
_WARM_UP = 50  # iterations of a cosine schedule's linear start (Yin et al. 2021, Section 4)


def reconstruct(
    objective: Objective,
    initial: Sequence[Tensor],
    pixel_range: tuple[Tensor, Tensor],
    generator: torch.Generator,
    progress: Progress = silent,
    *,
    iterations: int,
    average: float = 0.0,
    **settings: Any,
) -> tuple[list[Tensor], Trace]:
    """Minimise ``objective`` from ``initial``.

    The last iterate is returned, or the mean of the last ones: the one of least objective isn't the better image, and
    choosing by anything else would need the truth.

    Args:
        objective: with its gradients.
        initial: variables; the first are the dummy images, (n, C, H, W) normalised.
        pixel_range: normalised black and white, (1, C, H, W) each.
        generator: of the noise that is added in each step, if any.
        progress: called with (done, total).
        iterations: steps of the optimiser; one of L-BFGS evaluates the objective up to 25 times.
        average: share of the iterations, the last ones, whose mean iterate is the result (Polyak and Juditsky 1992);
            0 for the last iterate.
        settings: of the optimiser, see :func:`make_step`.

    Returns:
        The variables, and the trace with normalised snapshots, whose last ones are of the variables returned.
    """
    variables = [v.clone() for v in initial]
    images = variables[0]
    step = make_step(objective, variables, pixel_range, generator, iterations=iterations, **settings)
    keep = {round(iterations * k / _SNAPSHOTS) for k in range(_SNAPSHOTS)}
    kept: list[int] = []
    values: list[Tensor] = []
    snapshots: list[Tensor] = []
    first = iterations - round(average * iterations)
    sums = [torch.zeros_like(v) for v in variables]
    for iteration in range(iterations):
        before = images.clone() if iteration in keep else None
        value = step()
        if before is not None:
            kept.append(iteration)
            values.append(value)
            snapshots.append(before)
        if iteration >= first:
            torch._foreach_add_(sums, variables)
        if (iteration + 1) % _REPORT_EVERY == 0:
            progress(iteration + 1, iterations)
    if first < iterations:
        for variable, total in zip(variables, sums, strict=True):
            variable.copy_(total / (iterations - first))
    kept.append(iterations)
    values.append(objective(*variables)[0])
    snapshots.append(images.clone())
    return variables, Trace(kept, torch.stack(values).tolist(), torch.stack(snapshots))


def make_step(
    objective: Objective,
    variables: list[Tensor],
    pixel_range: tuple[Tensor, Tensor],
    generator: torch.Generator,
    *,
    iterations: int,
    learning_rate: float,
    optimiser: str = "adam",
    signed: bool = False,
    schedule: str = "constant",
    clamp: bool = False,
    noise: float = 0.0,
) -> Callable[[], Tensor]:
    """Return a function that takes one step down from ``variables``, in place, and returns the objective before it.

    Args:
        objective: with its gradients.
        variables: the first are the images, (n, C, H, W) normalised.
        pixel_range: normalised black and white, (1, C, H, W) each.
        generator: of the noise, if any.
        iterations: how many steps there will be.
        learning_rate: in normalised pixels.
        optimiser: ``adam``, or ``l-bfgs`` with a strong Wolfe line search, without which it now and then runs away.
        signed: give the optimiser only the sign of the images' gradient (Geiping et al. 2020).
        schedule: of the learning rate, see :func:`relative_rate`.
        clamp: keep pixels in their valid range after every step.
        noise: standard deviation of the Gaussian noise added to the images in each step, in learning rates (Yin et al.
            2021, Eq. 13).
    """
    torch_optimiser: torch.optim.Optimizer
    if optimiser == "adam":
        torch_optimiser = torch.optim.Adam(variables, lr=learning_rate)
    else:
        torch_optimiser = torch.optim.LBFGS(variables, lr=learning_rate, line_search_fn="strong_wolfe")
    rates = torch.optim.lr_scheduler.LambdaLR(torch_optimiser, lambda i: relative_rate(schedule, i, iterations))
    images = variables[0]

    def evaluate() -> Any:  # torch's types ask for a float
        value, *gradients = objective(*variables)
        for variable, gradient in zip(variables, gradients, strict=True):
            variable.grad = gradient.contiguous()
        if signed:
            images.grad = gradients[0].sign()
        return value

    def step() -> Tensor:
        if optimiser == "adam":
            value: Tensor = evaluate()
            torch_optimiser.step(None)
        else:
            value = torch.as_tensor(torch_optimiser.step(evaluate))  # the first of its evaluations
        if noise:
            rate = noise * float(rates.get_last_lr()[0])
            drawn = torch.randn(images.shape, generator=generator, dtype=images.dtype)
            images.add_(drawn.to(images.device), alpha=rate)
        rates.step()
        if clamp:
            torch.clamp(images, *pixel_range, out=images)
        return value

    return step


def relative_rate(schedule: str, iteration: int, iterations: int) -> float:
    """Return the learning rate of ``iteration``, relative to the one that was set.

    ``constant``; ``steps``: ×0.1 after 3/8, 5/8 and 7/8 of the iterations (Geiping et al. 2020); ``linear``: to zero;
    ``cosine``: to zero after a short linear start (Yin et al. 2021).
    """
    if schedule == "steps":
        return float(0.1 ** sum(iteration >= iterations * k // 8 for k in (3, 5, 7)))
    if schedule == "linear":
        return 1 - iteration / iterations
    if schedule == "cosine":
        start = min(1.0, (iteration + 1) / min(_WARM_UP, iterations))
        return start * 0.5 * (1 + math.cos(math.pi * iteration / iterations))
    return 1.0


def with_priors(distance: Objective, priors: Sequence[tuple[float, Objective]]) -> Objective:
    """Return the distance plus the weighted priors; those of weight 0 aren't computed."""
    wanted = [(weight, prior) for weight, prior in priors if weight]

    def total(images: Tensor) -> tuple[Tensor, Tensor]:
        value, gradient = distance(images)
        for weight, prior in wanted:
            own, slope = prior(images)
            value, gradient = value + weight * own, torch.add(gradient, slope, alpha=weight)
        return value, gradient

    return total
