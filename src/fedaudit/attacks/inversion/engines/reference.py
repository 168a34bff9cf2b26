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

from fedaudit.attacks.inversion.objectives import Distance, Objective, flatten
from fedaudit.attacks.victim import Victim
from fedaudit.training import TrainingConfig


def one_gradient(num_examples: int) -> TrainingConfig:
    """Return the local training whose pseudo-gradient *is* one batch's gradient: a single step of learning rate 1."""
    return TrainingConfig(1.0, 1, (num_examples,))


def reference(victim: Victim, labels: Tensor, training: TrainingConfig, distance: Distance) -> Objective:
    """Return the exact engine: double backward through the client's local steps.

    With :func:`one_gradient` it matches the gradient of one batch; with a FedAvg client's local training the images are
    cut into its mini-batches in order and its SGD steps are replayed (InvG, Geiping et al. 2020, Section 6).

    Args:
        victim: the model.
        labels: (n,) of the images, in the order of use.
        training: the local training.
        distance: of the pseudo-gradient W − W_T to the observed one.
    """
    start = {name: p.detach().requires_grad_() for name, p in victim.parameters.items()}
    sizes = list(training.batch_sizes)

    def step(images: Tensor) -> tuple[Tensor, Tensor]:
        images = images.detach().requires_grad_()
        pseudo_gradient = unrolled(victim, start, images.split(sizes), labels.split(sizes), training)
        value = distance.value(flatten(pseudo_gradient))
        (grad,) = torch.autograd.grad(value, images)
        return value.detach(), grad

    return step


def with_soft_labels(victim: Victim, distance: Distance) -> Callable[[Tensor, Tensor], tuple[Tensor, ...]]:
    """Return the exact step of one batch whose labels are optimised, too (DLG, Zhu et al. 2019, Algorithm 1).

    Args:
        victim: the model; its loss must take class probabilities as targets.
        distance: of the gradient to the observed one.

    Returns:
        A function of (n, C, H, W) images and (n, classes) label logits: the distance and its gradients on both.
    """
    start = {name: p.detach().requires_grad_() for name, p in victim.parameters.items()}

    def step(images: Tensor, logits: Tensor) -> tuple[Tensor, ...]:
        leaves = [images.detach().requires_grad_(), logits.detach().requires_grad_()]
        value = victim.value(start, leaves[0], leaves[1].softmax(dim=1))
        own = torch.autograd.grad(value, list(start.values()), create_graph=True, materialize_grads=True)
        result = distance.value(flatten(own))
        return result.detach(), *torch.autograd.grad(result, leaves)

    return step


def unrolled(
    victim: Victim,
    start: dict[str, Tensor],
    images: Sequence[Tensor],
    labels: Sequence[Tensor],
    training: TrainingConfig,
) -> list[Tensor]:
    """Return the pseudo-gradient W − W_T of local SGD from ``start``, one step a batch, as a differentiable function.

    Follows ``torch.optim.SGD``: weight decay is added to the gradient, then momentum without dampening. FedProx's
    term pulls towards ``start``.
    """
    origin = list(start.values())
    pseudo_gradient: list[Tensor] = []
    velocity: list[Tensor] = []
    for x, y in zip(images, labels, strict=True):
        current = [w - d for w, d in zip(origin, pseudo_gradient, strict=True)] if pseudo_gradient else origin
        value = victim.value(dict(zip(start, current, strict=True)), x, y)
        grads = list(torch.autograd.grad(value, current, create_graph=True, materialize_grads=True))
        if training.proximal_mu and pseudo_gradient:
            grads = [g - training.proximal_mu * d for g, d in zip(grads, pseudo_gradient, strict=True)]
        if training.weight_decay:
            grads = [g + training.weight_decay * w for g, w in zip(grads, current, strict=True)]
        if training.momentum and velocity:
            grads = [training.momentum * v + g for v, g in zip(velocity, grads, strict=True)]
        velocity = grads
        steps = [training.learning_rate * g for g in grads]
        pseudo_gradient = [d + s for d, s in zip(pseudo_gradient, steps, strict=True)] if pseudo_gradient else steps
    return pseudo_gradient
