"""What an update by Adam or AdamW tells of the gradient: its size where epsilon shows, else its sign."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fedaudit.attacks.local_training import treatments
from fedaudit.transcript.update import Update

_TRUST = 0.5  # relative error up to which a recovered gradient counts as known
_ARITHMETIC = 4  # roundings between a gradient and the step that Adam makes of it
_WITH_DECAY = 3  # roundings of the weights: of 1 − μλ, of what it is multiplied by, and of the difference
_ZERO = 2  # roundings below which a step is none


@dataclass(frozen=True)
class AdaptiveGradient:
    """What an update by Adam tells of the gradient, by parameter name.

    Attributes:
        values: the gradient where it is known; elsewhere its sign times the least size that it may have.
        known: where it is.
    """

    values: dict[str, Tensor]
    known: dict[str, Tensor]


def is_adaptive(update: Update) -> bool:
    """Return whether it is known that ``update`` is the work of Adam or AdamW."""
    training = update.training
    return update.kind == "weights" and training is not None and training.optimiser in ("adam", "adamw")


def mean_steps(update: Update, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return Adam's steps m̂/(√v̂ + ε) by name, weighted by their rates: between −1 and 1, for one step g/(|g| + ε).

    AdamW's decay is taken off: exactly for one step.

    Args:
        update: of Adam or AdamW.
        weights: that the client was sent.
    """
    training = update.training
    assert training is not None  # is_adaptive() saw to it
    total = sum(training.rates)
    steps = {}
    for (name, delta), group in zip(update.tensors.items(), treatments(training, update.tensors), strict=True):
        own = -delta.double() / max(total * group.learning_rate, 1e-300)
        if training.optimiser == "adamw":
            own = own - group.weight_decay * weights[name].double()
        steps[name] = own if group.learning_rate else torch.zeros_like(own)
    return steps


def invert(update: Update, weights: Mapping[str, Tensor]) -> AdaptiveGradient:
    """Return what one step of Adam from fresh state tells of the gradient (for Adam, with its weight decay in it).

    The step is r = g/(|g| + ε), so g = ε·r/(1 − |r|). How well r is known follows from how W + ΔW and ΔW were rounded,
    to half precision perhaps, and from a defence's noise; where that would make g uncertain by more than half, it is
    known only that |g| isn't smaller than such a value. Where r is rounding alone, g is 0.

    Args:
        update: of one local step.
        weights: that the client was sent.
    """
    training = update.training
    assert training is not None  # is_adaptive() saw to it
    values, known = {}, {}
    steps = mean_steps(update, weights)
    for (name, r), group in zip(steps.items(), treatments(training, steps), strict=True):
        sent = update.tensors[name]
        rate = max(training.rates[0] * group.learning_rate, 1e-300)
        times = _WITH_DECAY if training.optimiser == "adamw" and group.weight_decay else 1
        error = times * _rounding(weights[name] + sent) * (weights[name].double().abs() + sent.double().abs()) / rate
        error = error + _rounding(sent) + _ARITHMETIC * torch.finfo(sent.dtype).eps
        error = error + (update.sanitised.noise / rate if update.sanitised else 0.0)
        error = error.clamp(min=float((r.abs() - 1).max().clamp(min=0)))  # a step of more than 1 is error alone
        most = _TRUST * training.epsilon / error
        size = training.epsilon * r.abs() / (1 - r.abs()).clamp(min=1e-300)
        certain = (r.abs() < 1) & (size < most)
        size = torch.where(r.abs() <= _ZERO * error, 0, torch.where(certain, size, most))
        values[name] = (r.sign() * size).to(sent.dtype)
        known[name] = certain
    return AdaptiveGradient(values, known)


def _rounding(tensor: Tensor) -> float:
    """Return the largest relative error of rounding to the precision that ``tensor`` shows, whatever it is held in."""
    own = torch.finfo(tensor.dtype).eps
    for shorter in (torch.bfloat16, torch.float16):
        gap = (tensor.to(shorter).to(tensor.dtype) - tensor).abs()
        if bool((gap <= 2 * own * tensor.abs()).all()):
            return torch.finfo(shorter).eps / 2
    return own / 2
