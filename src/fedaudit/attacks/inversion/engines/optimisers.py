"""Clients' optimisers as differentiable functions: ``torch.optim``'s steps, and clipping."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fedaudit.attacks.local_training import treatments
from fedaudit.task.training import ParameterGroup, TrainingConfig

# The step's number from 0, the gradients and the weights, one tensor a parameter -> by what the weights fall in it.
OptimiserStep = Callable[[int, Sequence[Tensor], Sequence[Tensor]], list[Tensor]]

# Of each tensor's root mean square, by which attacks smooth Adam's steps.
SOFTNESS = 0.1
_BESIDE_NORM = 1e-6  # torch.nn.utils.clip_grad_norm_ adds it to the norm


def optimiser_step(training: TrainingConfig, names: Sequence[str], softness: float = 0.0) -> OptimiserStep:
    """Return the optimiser's step from fresh state; it remembers what an optimiser does, so it serves one training.

    Args:
        training: whose optimiser: that of Adam and AdamW where it says so, else SGD.
        names: of the parameters, in the order of the tensors.
        softness: of Adam: of each tensor's root mean square so much is added to what its step is divided by, so that
            the step is smooth where a gradient changes its sign; 0 for the client's own step, which isn't.
    """
    treated = treatments(training, names)
    if training.optimiser in ("adam", "adamw"):
        return _adam(training, treated, softness)
    return _sgd(training, treated)


def _sgd(training: TrainingConfig, treated: Sequence[ParameterGroup]) -> OptimiserStep:
    """Return ``torch.optim.SGD``: weight decay is added to the gradient, then momentum."""
    velocity: list[Tensor] = []

    def step(number: int, gradients: Sequence[Tensor], weights: Sequence[Tensor]) -> list[Tensor]:
        falls = []
        for i, (g, w, group) in enumerate(zip(gradients, weights, treated, strict=True)):
            if group.weight_decay:
                g = g + group.weight_decay * w
            if number == 0:
                velocity.append(g)
            elif group.momentum:
                velocity[i] = group.momentum * velocity[i] + (1 - training.dampening) * g
            if group.momentum:
                g = g + group.momentum * velocity[i] if training.nesterov else velocity[i]
            falls.append(training.rates[number] * group.learning_rate * g)
        return falls

    return step


def _adam(training: TrainingConfig, treated: Sequence[ParameterGroup], softness: float) -> OptimiserStep:
    """Return ``torch.optim.Adam`` or ``AdamW``, whose decay isn't part of the gradient."""
    mean: list[Tensor] = []
    square: list[Tensor] = []
    largest: list[Tensor] = []
    (b1, b2), decoupled = training.betas, training.optimiser == "adamw"

    def step(number: int, gradients: Sequence[Tensor], weights: Sequence[Tensor]) -> list[Tensor]:
        corrected, corrected_square = 1 - b1 ** (number + 1), 1 - b2 ** (number + 1)
        falls = []
        for i, (g, w, group) in enumerate(zip(gradients, weights, treated, strict=True)):
            rate = training.rates[number] * group.learning_rate
            if group.weight_decay and not decoupled:
                g = g + group.weight_decay * w
            if number == 0:
                mean.append((1 - b1) * g)
                square.append((1 - b2) * g.square())
                largest.append(square[i])
            else:
                mean[i] = b1 * mean[i] + (1 - b1) * g
                square[i] = b2 * square[i] + (1 - b2) * g.square()
                largest[i] = torch.maximum(largest[i], square[i]) if training.amsgrad else square[i]
            own = largest[i] / corrected_square
            if softness:
                own = own + softness**2 * own.mean()
            size = _root(own) + training.epsilon
            fall = rate / corrected * mean[i] / size
            falls.append(fall + rate * group.weight_decay * w if decoupled and group.weight_decay else fall)
        return falls

    return step


def _root(square: Tensor) -> Tensor:
    """Return the square root, whose derivative at 0 is taken for 0: there no gradient has any part in it."""
    positive = square > 0
    return torch.where(positive, torch.where(positive, square, 1).sqrt(), 0)


def clipped(training: TrainingConfig, gradients: Sequence[Tensor]) -> list[Tensor]:
    """Return ``gradients`` as ``torch.nn.utils.clip_grad_norm_``, then ``clip_grad_value_`` leave them."""
    own = list(gradients)
    if training.clip_norm is not None:
        norm = torch.stack([torch.linalg.vector_norm(g) for g in own]).norm()
        factor = (training.clip_norm / (norm + _BESIDE_NORM)).clamp(max=1.0)
        own = [g * factor for g in own]
    if training.clip_value is not None:
        own = [g.clamp(-training.clip_value, training.clip_value) for g in own]
    return own
