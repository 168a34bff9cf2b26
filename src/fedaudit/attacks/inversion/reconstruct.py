"""The one optimiser loop of all optimisation-based attacks, and moves that it can't make."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

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
    """Minimise ``objective`` from ``initial``, of which the first are normalised dummy images (n, C, H, W).

    The last iterate is returned, or the mean of the last ones: the one of least objective isn't the better image, and
    choosing by anything else would need the truth.

    Args:
        iterations: steps of the optimiser; one of L-BFGS evaluates the objective up to 25 times.
        average: share of the iterations, the last ones, whose mean iterate is the result (Polyak and Juditsky 1992).
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
    before: int = 0,
    after: int = 0,
) -> Callable[[], Tensor]:
    """Return a function that takes one step down from ``variables``, in place, and returns the objective before it.

    Args:
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
        before, after: iterations of the same schedule that are taken elsewhere.
    """
    torch_optimiser: torch.optim.Optimizer
    if optimiser == "adam":
        torch_optimiser = torch.optim.Adam(variables, lr=learning_rate)
    else:
        torch_optimiser = torch.optim.LBFGS(variables, lr=learning_rate, line_search_fn="strong_wolfe")
    total = before + iterations + after
    rates = torch.optim.lr_scheduler.LambdaLR(torch_optimiser, lambda i: relative_rate(schedule, before + i, total))
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

    ``steps``: ×0.1 after 3/8, 5/8 and 7/8 of the iterations (Geiping et al. 2020); ``linear``: to zero; ``cosine``: to
    zero after a short linear start (Yin et al. 2021).
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
    """Return the distance plus the images' weighted priors; those of weight 0 aren't computed."""
    wanted = [(weight, prior) for weight, prior in priors if weight]

    def total(images: Tensor, *targets: Tensor) -> tuple[Tensor, ...]:
        value, gradient, *rest = distance(images, *targets)
        for weight, prior in wanted:
            own, slope = prior(images)
            value, gradient = value + weight * own, torch.add(gradient, slope, alpha=weight)
        return value, gradient, *rest

    return total


_REACH = {1: 3, 2: 3, 3: 1}  # steps of the grid of shifts, each way, by the number of axes
_STEPS_A_SIDE = 8  # of that grid: from one to the next, descent finds the way by itself
_STRETCH = 60  # iterations of a descent after a move
_RACED = 3  # moved copies that go on from their shift, beside the image where it is
_LEAST_RATE = 0.1  # of the learning rate: where halving it ends

Start = Callable[[], Tensor]


def affordable(budget: int, starts: int, start_iterations: int, axes: int = 2) -> tuple[int, int]:
    """Return how many of the wanted starts, and rounds of moves, :func:`explore` has with ``budget`` evaluations.

    None where it pays neither for two starts nor for one and a round of moves: one descent is better then.
    """
    found = max(1, min(starts, budget // (start_iterations + 1)))
    rounds = max(0, budget - found * (start_iterations + 1)) // _round(axes)
    return (found, rounds) if found > 1 or rounds else (0, 0)


def _round(axes: int) -> int:
    """Return the evaluations of a round of moves, at most."""
    return 2 * int((2 * _REACH[axes] + 1) ** axes) - 1 + (_RACED + 1) * (_STRETCH + 1)


def explore(
    objective: Objective,
    start: Start,
    pixel_range: tuple[Tensor, Tensor],
    generator: torch.Generator,
    progress: Progress,
    *,
    at_first: Sequence[Objective] = (),
    starts: int,
    start_iterations: int,
    rounds: int,
    learning_rate: float,
    **settings: object,
) -> tuple[Tensor, Trace]:
    """Race descents from several starts, then move images about, one of them a round.

    A convolutional network with global pooling hardly knows where a thing stands: the objective of a picture in the
    wrong place is low, with a barrier between it and the right place, so descent from there ends early. A moved copy
    that is right falls below within a few steps.

    A round evaluates copies of the batch in which one image is shifted by up to 3/8 of the side, and mirrored (see
    :func:`moves`); goes on for a short stretch from the best of them and from where the images are; and keeps what then
    has the least objective, which so never rises. Where nothing is lower than before, the next round's learning rate is
    halved.

    Args:
        progress: called with (done, total) evaluations of the objective.
        at_first: what descents from the starts minimise in turn, if not ``objective``, which chooses among them.
        learning_rate: of the first round; in a stretch it falls linearly to zero.
    """
    spent, total = 0, starts * (start_iterations + 1)

    def value_of(images: Tensor) -> Tensor:
        nonlocal spent
        spent += 1
        return objective(images)[0]

    def descended(
        images: Tensor, rate: float, iterations: int = _STRETCH, down: Objective = objective
    ) -> tuple[float, Tensor]:
        nonlocal spent
        images = images.clone()
        step = make_step(
            down,
            [images],
            pixel_range,
            generator,
            **{**settings, "iterations": iterations, "learning_rate": rate, "schedule": "linear"},  # type: ignore[arg-type]
        )
        for _ in range(iterations):
            step()
            spent += 1
            if spent % _REPORT_EVERY == 0:
                progress(spent, total)
        found = float(value_of(images))
        progress(spent, total)
        return found, images

    value, images = _least(
        [
            descended(start(), learning_rate, start_iterations, down)
            for down in itertools.islice(itertools.cycle(at_first or [objective]), starts)
        ]
    )
    total += rounds * _round(images.ndim - 2)  # or somewhat less
    trace = Trace([spent], [value], images[None])
    rate = learning_rate
    for turn in range(rounds):
        place = turn % len(images)
        moved = [with_move(images, place, *move) for move in moves(images.shape[2:], turn // len(images))]
        scored = sorted((float(value_of(batch)), i) for i, batch in enumerate(moved))
        raced = [descended(images, rate)] + [descended(moved[i], rate) for _, i in scored[:_RACED]]
        best = _least(raced)
        if best[0] < value:
            value, images = best
        else:
            rate = max(rate / 2, _LEAST_RATE * learning_rate)
        trace = Trace([*trace.iterations, spent], [*trace.objective, value], torch.cat([trace.snapshots, images[None]]))
    return images, trace


def moves(size: tuple[int, ...], turn: int) -> list[tuple[int, ...]]:
    """Return the moves of an image's ``turn`` (from 0): whether to mirror it, and pixels to shift it along each axis.

    Shifts lie on a grid of 1/8 of the side, and in every other turn between its points: of images and signals up to 3/8
    each way, of volumes, which have an axis more, up to 1/8. Staying isn't among them. ``size`` is without channels.
    """
    half, reach = turn % 2 / 2, _REACH[len(size)]
    steps = [k + half for k in range(-reach, reach + 1 - turn % 2)]
    shifts = [dict.fromkeys(round(k * side / _STEPS_A_SIDE) for k in steps) for side in size]
    every = [(flipped, *shift) for flipped in (False, True) for shift in itertools.product(*shifts)]
    return [move for move in every if any(move)]


def with_move(images: Tensor, place: int, flipped: int, *shift: int) -> Tensor:
    """Return (n, C, ...) images, the one at ``place`` mirrored along its last axis and shifted, its edge repeated."""
    image = images[place : place + 1]
    if flipped:
        image = image.flip(-1)
    wide = pad(image, [abs(n) for n in reversed(shift) for _ in range(2)], mode="replicate")
    for axis, n in enumerate(shift, start=2):
        wide = wide.narrow(axis, abs(n) - n, image.shape[axis])
    moved = images.clone()
    moved[place] = wide[0]
    return moved


def _least(found: list[tuple[float, Tensor]]) -> tuple[float, Tensor]:
    """Return what has the least objective, the first of equals; what isn't a number comes last."""
    return min(found, key=lambda one: (one[0] != one[0], one[0]))
