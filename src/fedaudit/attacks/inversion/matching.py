"""The hot loop's step: the distance between dummy and observed update, and its gradient on the dummy images.

The optimiser loop knows engines only as :data:`Engine`; how one gets its gradient is this module's affair.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedaudit.attacks.inversion.objectives import Distance
from fedaudit.federation.update import Loss, Tensors, TrainingFacts

# (n, C, H, W) normalised images -> (distance, its gradient on the images)
Engine = Callable[[Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Victim:
    """The client's model as the attacker runs it: a function of the parameters.

    Attributes:
        module: architecture, already in the mode (BatchNorm) of the client's local training.
        loss: mean over the batch, as the client's.
        parameters: the global model's trainable parameters, by name.
        constants: all other tensors of the state (buffers, frozen parameters).
    """

    module: nn.Module
    loss: Loss
    parameters: Tensors
    constants: Tensors

    def value(self, parameters: Tensors, images: Tensor, labels: Tensor) -> Tensor:
        """Return the loss at ``parameters``; BatchNorm's running statistics stay as they are."""
        constants = {name: t.clone() for name, t in self.constants.items()} if self.module.training else self.constants
        return self.loss(functional_call(self.module, {**parameters, **constants}, (images,)), labels)


def reference(victim: Victim, labels: Tensor, distance: Distance) -> Engine:
    """Return the exact engine for gradient updates: double backward through one batch."""
    parameters = {name: p.detach().requires_grad_() for name, p in victim.parameters.items()}
    leaves = list(parameters.values())

    def step(images: Tensor) -> tuple[Tensor, Tensor]:
        images = images.detach().requires_grad_()
        value = victim.value(parameters, images, labels)
        dummy = torch.autograd.grad(value, leaves, create_graph=True, materialize_grads=True)
        return _differentiate(distance(dummy), images)

    return step


def simulation(victim: Victim, labels: Tensor, facts: TrainingFacts, distance: Distance) -> Engine:
    """Return the engine for FedAvg updates that replays local training (InvG, Geiping et al. 2020, Section 6).

    The images are cut into the client's mini-batches in order; the SGD steps are unrolled differentiably, and
    ΔW = W_T − W is what ``distance`` receives.
    """
    start = {name: p.detach().requires_grad_() for name, p in victim.parameters.items()}
    sizes = list(facts.batch_sizes)

    def step(images: Tensor) -> tuple[Tensor, Tensor]:
        images = images.detach().requires_grad_()
        end = unrolled(victim, start, images.split(sizes), labels.split(sizes), facts)
        delta = [end[name] - start[name] for name in start]
        return _differentiate(distance(delta), images)

    return step


def unrolled(
    victim: Victim, start: Tensors, images: Sequence[Tensor], labels: Sequence[Tensor], facts: TrainingFacts
) -> Tensors:
    """Return the parameters after local SGD from ``start``, one step a batch, as a differentiable function.

    Follows ``torch.optim.SGD``: weight decay is added to the gradient, then momentum without dampening. FedProx's
    term pulls towards ``start``.
    """
    names = list(start)
    current = dict(start)
    velocity: list[Tensor] | None = None
    for x, y in zip(images, labels, strict=True):
        value = victim.value(current, x, y)
        grads = list(torch.autograd.grad(value, [current[n] for n in names], create_graph=True, materialize_grads=True))
        if facts.proximal_mu:
            grads = [g + facts.proximal_mu * (current[n] - start[n]) for g, n in zip(grads, names, strict=True)]
        if facts.weight_decay:
            grads = [g + facts.weight_decay * current[n] for g, n in zip(grads, names, strict=True)]
        if facts.momentum:
            velocity = (
                grads if velocity is None else [facts.momentum * v + g for v, g in zip(velocity, grads, strict=True)]
            )
            grads = velocity
        current = {n: current[n] - facts.learning_rate * g for n, g in zip(names, grads, strict=True)}
    return current


def _differentiate(value: Tensor, images: Tensor) -> tuple[Tensor, Tensor]:
    (grad,) = torch.autograd.grad(value, images)
    return value.detach(), grad
