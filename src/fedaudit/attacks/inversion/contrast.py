"""What BatchNorm hides of a batch, and its buffers give away: brightness and contrast."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fedaudit.attacks.victim import Victim
from fedaudit.models.initialise import BATCH_NORM
from fedaudit.transcript.observation import Message
from fedaudit.transcript.update import Update

_ROUNDING = 1e-3  # share of the largest variance below zero that float32 may leave of none


@dataclass(frozen=True)
class Returned:
    """What came back of a BatchNorm layer: mean and variance by channel, (C,), over the batches that it was given."""

    mean: Tensor
    variance: Tensor


class _Reached(Exception):
    """The layer has been given its input: the rest of the network needn't run."""


def returned_of(module: nn.Module, name: str, message: Message) -> Returned | None:
    """Return the statistics of the batches behind an update at a layer; None where its buffers weren't sent back.

    A running statistic after T batches at momentum m is r' = (1 − m)ᵀ·r + Σₖ m·(1 − m)ᵀ⁻ᵏ·bₖ. So the mean of the
    batches' own, the last ones weighing most, is (r' − (1 − m)ᵀ·r) / (1 − (1 − m)ᵀ). Nothing is known where a statistic
    didn't move, or where a defence clipped it or added noise to it.
    """
    kinds, sanitised = (f"{name}.running_mean", f"{name}.running_var"), message.update.sanitised
    if not set(kinds) <= message.update.buffers.keys() & message.weights.keys():
        return None
    if all(message.update.buffers[kind].equal(message.weights[kind]) for kind in kinds):
        return None
    if sanitised is not None and (sanitised.noise or sanitised.clip or sanitised.bound):
        return None
    layer: Any = module.get_submodule(name)
    batches = _batches(message.update)
    if layer.momentum is None:  # a plain mean of all batches so far
        counted = message.weights.get(f"{name}.num_batches_tracked")
        kept = 1.0 if counted is None else float(counted) / (float(counted) + batches)
    else:
        kept = (1 - layer.momentum) ** batches
    if kept == 1:
        return None
    device = layer.running_mean.device
    mean, variance = (
        (message.update.buffers[kind].to(device) - kept * message.weights[kind].to(device)) / (1 - kept)
        for kind in kinds
    )
    told = bool(mean.isfinite().all()) and float(variance.max()) > 0
    if not told or float(variance.min()) < -_ROUNDING * float(variance.max()):  # e.g. of more batches than were told
        return None
    return Returned(mean, variance)


def _batches(update: Update) -> int:
    """Return how many batches moved the buffers: one a pass, of which an accumulated step has several."""
    training = update.training
    if training is None:
        return 1
    if training.passes:
        return sum(map(len, training.passes))
    return 1 if update.kind == "gradient" else training.local_steps


def pinned(images: Tensor, victim: Victim, message: Message) -> Tensor:
    """Return (n, C, ...) normalised images with the brightness and contrast that BatchNorm's returned buffers tell.

    Behind a first convolution that is followed by BatchNorm in train mode the gradient is the same whatever the
    contrast of the whole batch, and nearly so whatever its brightness. So all images together are stretched about
    their mean, and each channel is shifted, until the first BatchNorm layer is given what the client's was given: the
    same means and standard deviations by channel, in the least squares (Valadi
    et al. 2025 install those of every layer instead, which here loses even images that are nearly right). Nothing is
    changed where they didn't come back, where BatchNorm kept to its running ones, and where nothing brings them nearer.
    """
    found = _first_norm(images, victim) if images.ndim > 2 else None
    known = found and returned_of(victim.module, found[0], message)
    if not found or not known:
        return images
    seen = found[1]
    middle = images.mean([axis for axis in range(images.ndim) if axis != 1], keepdim=True)
    stretch = torch.ones(1, dtype=images.dtype, device=images.device, requires_grad=True)
    shift = torch.zeros_like(middle, requires_grad=True)
    deviation = known.variance.clamp(min=0).sqrt()

    def moved() -> Tensor:
        return (images - middle) * stretch + middle + shift

    def apart() -> Tensor:
        inner = seen(moved()).transpose(0, 1).flatten(1)
        off = (inner.mean(1) - known.mean).square() + (inner.var(1).clamp(min=1e-12).sqrt() - deviation).square()
        return off.sum() / known.variance.clamp(min=0).sum()

    optimiser = torch.optim.LBFGS([stretch, shift], max_iter=50, line_search_fn="strong_wolfe")

    def step() -> Tensor:
        optimiser.zero_grad()
        value = apart()
        value.backward()
        return value.detach()

    with torch.enable_grad():
        before = step()
        optimiser.step(step)
        nearer = bool(apart() < before)
    after = moved().detach()
    return after if nearer and bool(stretch > 0) and bool(after.isfinite().all()) else images


def _first_norm(images: Tensor, victim: Victim) -> tuple[str, Callable[[Tensor], Tensor]] | None:
    """Return the BatchNorm layer that comes first, where it takes its batch's statistics, and what gives its input."""
    names = [name for name, part in victim.module.named_modules() if isinstance(part, BATCH_NORM)]
    reached: list[tuple[str, Tensor]] = []

    def seen(batch: Tensor) -> Tensor:
        del reached[:]
        hooks = [
            victim.module.get_submodule(name).register_forward_pre_hook(
                lambda _, inputs, name=name: _stop(reached, name, inputs[0])
            )
            for name in names
        ]
        try:
            victim.outputs(batch)
        except _Reached:
            pass
        finally:
            for hook in hooks:
                hook.remove()
        return reached[0][1]

    with torch.no_grad():
        try:
            seen(images)
        except IndexError:  # there is none, or none that is run
            return None
    return reached[0][0], seen


def _stop(reached: list[tuple[str, Tensor]], name: str, batch: Tensor) -> None:
    reached.append((name, batch))
    raise _Reached
