"""The exact engine: double backward.

An engine is the term of the objective that the optimiser's hot loop computes: the distance between the dummy and the
observed update, and its gradient on the dummy images. This module computes the gradient exactly, ``first_order`` by
first-order passes only. A local training is known by its pseudo-gradient, W − W_T = −ΔW: for one step of learning
rate 1 that is the gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fedaudit.attacks.inversion.objectives import Distance, Objective, flatten
from fedaudit.attacks.local_training import treatments
from fedaudit.attacks.victim import Victim
from fedaudit.task.base import Task
from fedaudit.task.targets import CLASSIFICATION
from fedaudit.task.training import ParameterGroup, Pass, TrainingConfig
from fedaudit.utils.channels_last import usual_order

# Of one pass: the model, its weights by name, inputs and labels -> a tensor a parameter.
Gradient = Callable[[Victim, dict[str, Tensor], Tensor, Tensor], list[Tensor]]


def one_gradient(num_examples: int) -> TrainingConfig:
    """Return the local training whose pseudo-gradient *is* one batch's gradient: a single step of learning rate 1."""
    return TrainingConfig(1.0, 1, (num_examples,))


def reference(
    victim: Victim,
    labels: Tensor | None,
    training: TrainingConfig,
    distance: Distance,
    softness: float = 0.0,
    task: Task = CLASSIFICATION,
) -> Objective:
    """Return the exact engine: double backward through the client's local steps, for labels (n,) in the order of use.

    With :func:`one_gradient` it matches the gradient of one batch; with a FedAvg client's local training the images are
    cut into its mini-batches in order and its local steps are replayed (InvG, Geiping et al. 2020, Section 6).

    Without ``labels`` it optimises them, too (DLG, Zhu et al. 2019, Algorithm 1): the step takes (n, classes) logits
    beside the images, of another task :meth:`.Task.soft`, and returns both gradients; the loss takes class
    probabilities.
    """
    start = {name: p.detach().requires_grad_() for name, p in victim.parameters.items()}
    sizes = list(training.batch_sizes)

    def step(images: Tensor, *logits: Tensor) -> tuple[Tensor, ...]:
        leaves = [usual_order(images.detach()).requires_grad_(), *(one.detach().requires_grad_() for one in logits)]
        targets = task.soft(leaves[1]) if labels is None else labels
        own = unrolled(victim, start, leaves[0].split(sizes), targets.split(sizes), training, softness)
        value = distance.value(flatten(own))
        return value.detach(), *torch.autograd.grad(value, leaves)

    return step


def unrolled(
    victim: Victim,
    start: dict[str, Tensor],
    images: Sequence[Tensor],
    labels: Sequence[Tensor],
    training: TrainingConfig,
    softness: float = 0.0,
    gradient: Gradient | None = None,
) -> list[Tensor]:
    """Return the pseudo-gradient W − W_T of local training from ``start``, one step a batch, differentiable.

    A step's gradient is the weighted sum of its passes', each of the mean loss over its own examples; FedProx's term,
    which pulls towards ``start``, is added to it; then it is clipped, and the optimiser takes its step.
    """
    origin = list(start.values())
    fall = optimiser_step(training, list(start), softness)
    pseudo_gradient: list[Tensor] = []
    for number, (x, y) in enumerate(zip(images, labels, strict=True)):
        current = [w - d for w, d in zip(origin, pseudo_gradient, strict=True)] if pseudo_gradient else origin
        passes = training.passes[number] if training.passes else (Pass(len(x), 1.0),)
        grads = _gradient(victim, dict(zip(start, current, strict=True)), x, y, passes, gradient or by_autograd)
        if training.proximal_mu and pseudo_gradient:
            grads = [g - training.proximal_mu * d for g, d in zip(grads, pseudo_gradient, strict=True)]
        steps = fall(number, clipped(training, grads), current)
        pseudo_gradient = [d + s for d, s in zip(pseudo_gradient, steps, strict=True)] if pseudo_gradient else steps
    return pseudo_gradient


def by_autograd(victim: Victim, weights: dict[str, Tensor], images: Tensor, labels: Tensor) -> list[Tensor]:
    """Return the gradient of a batch's loss, by parameter, which is differentiable itself."""
    value = victim.value(weights, images, labels)
    return list(torch.autograd.grad(value, list(weights.values()), create_graph=True, materialize_grads=True))


def _gradient(
    victim: Victim,
    weights: dict[str, Tensor],
    images: Tensor,
    labels: Tensor,
    passes: Sequence[Pass],
    gradient: Gradient,
) -> list[Tensor]:
    """Return the gradient that ``passes`` over a step's examples accumulate."""
    total: list[Tensor] = []
    sizes = [one.examples for one in passes]
    for one, x, y in zip(passes, images.split(sizes), labels.split(sizes), strict=True):
        grads = gradient(victim, weights, x, y)
        grads = grads if one.weight == 1 else [one.weight * g for g in grads]
        total = [a + b for a, b in zip(total, grads, strict=True)] if total else grads
    return total


# The step's number from 0, the gradients and the weights, one tensor a parameter -> by what the weights fall in it.
OptimiserStep = Callable[[int, Sequence[Tensor], Sequence[Tensor]], list[Tensor]]

# Of each tensor's root mean square, by which attacks smooth Adam's steps.
SOFTNESS = 0.1
_BESIDE_NORM = 1e-6  # torch.nn.utils.clip_grad_norm_ adds it to the norm


def optimiser_step(training: TrainingConfig, names: Sequence[str], softness: float = 0.0) -> OptimiserStep:
    """Return the optimiser's step from fresh state; it remembers what an optimiser does, so it serves one training.

    ``softness``: share of each tensor's root mean square that is added to the divisor of Adam's step, so that it is
    smooth where a gradient changes its sign; 0 for the client's own step, which isn't.
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
