"""The exact engine: double backward.

An engine is the term of the objective that the optimiser's hot loop computes: the distance between the dummy and the
observed update, and its gradient on the dummy images. How one gets its gradient is the affair of this module (exactly)
and of ``first_order`` (by first-order passes only). A local training is known by its pseudo-gradient, W − W_T = −ΔW:
for one step of learning rate 1 that is the gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fedaudit.attacks.inversion.engines.optimisers import clipped, optimiser_step
from fedaudit.attacks.inversion.objectives import Distance, Objective, flatten
from fedaudit.attacks.victim import Victim
from fedaudit.task.training import Pass, TrainingConfig
from fedaudit.utils.channels_last import usual_order

# Of one pass: the model, its weights by name, inputs and labels -> a tensor a parameter.
Gradient = Callable[[Victim, dict[str, Tensor], Tensor, Tensor], list[Tensor]]


def one_gradient(num_examples: int) -> TrainingConfig:
    """Return the local training whose pseudo-gradient *is* one batch's gradient: a single step of learning rate 1."""
    return TrainingConfig(1.0, 1, (num_examples,))


def reference(
    victim: Victim, labels: Tensor, training: TrainingConfig, distance: Distance, softness: float = 0.0
) -> Objective:
    """Return the exact engine: double backward through the client's local steps.

    With :func:`one_gradient` it matches the gradient of one batch; with a FedAvg client's local training the images are
    cut into its mini-batches in order and its local steps are replayed (InvG, Geiping et al. 2020, Section 6).

    Args:
        victim: the model.
        labels: (n,) of the images, in the order of use.
        training: the local training.
        distance: of the pseudo-gradient W − W_T to the observed one.
        softness: of Adam's step, see :func:`.optimisers.optimiser_step`.
    """
    start = {name: p.detach().requires_grad_() for name, p in victim.parameters.items()}
    sizes = list(training.batch_sizes)

    def step(images: Tensor) -> tuple[Tensor, Tensor]:
        images = usual_order(images.detach()).requires_grad_()
        pseudo_gradient = unrolled(victim, start, images.split(sizes), labels.split(sizes), training, softness)
        value = distance.value(flatten(pseudo_gradient))
        (grad,) = torch.autograd.grad(value, images)
        return value.detach(), grad

    return step


def with_soft_labels(
    victim: Victim, distance: Distance, training: TrainingConfig
) -> Callable[[Tensor, Tensor], tuple[Tensor, ...]]:
    """Return the exact step of one batch whose labels are optimised, too (DLG, Zhu et al. 2019, Algorithm 1).

    Args:
        victim: the model; its loss must take class probabilities as targets.
        distance: of the pseudo-gradient to the observed one.
        training: one local step.

    Returns:
        A function of (n, C, H, W) images and (n, classes) label logits: the distance and its gradients on both.
    """
    start = {name: p.detach().requires_grad_() for name, p in victim.parameters.items()}

    def step(images: Tensor, logits: Tensor) -> tuple[Tensor, ...]:
        leaves = [usual_order(images.detach()).requires_grad_(), logits.detach().requires_grad_()]
        own = unrolled(victim, start, leaves[:1], [leaves[1].softmax(dim=1)], training)
        result = distance.value(flatten(own))
        return result.detach(), *torch.autograd.grad(result, leaves)

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

    Args:
        victim: the model.
        start: where the training begins.
        images, labels: of each step.
        training: the local training.
        softness: of Adam's step, see :func:`.optimisers.optimiser_step`.
        gradient: how that of one pass is taken; by torch.autograd, unless told otherwise.
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
