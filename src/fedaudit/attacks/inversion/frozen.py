"""The fast engine: first-order passes only, with every kink held where the first pass found it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedaudit.attacks.inversion.freezing import Kept, Recording, Replaying
from fedaudit.attacks.inversion.matching import Engine, Victim
from fedaudit.attacks.inversion.objectives import Distance, flatten
from fedaudit.update import TrainingFacts

# Length of the finite difference relative to the parameters' norm: long enough for float32, short enough for curves.
_RELATIVE_STEP = 1e-4


@dataclass(frozen=True)
class _Pass:
    """A local step as the forward sweep left it: where it was, its two gradients, the ways of its kinks."""

    parameters: Tensor
    gradient: Tensor
    image_gradient: Tensor
    kept: list[Kept]


def frozen(victim: Victim, labels: Tensor, facts: TrainingFacts, distance: Distance) -> Engine:
    """Return an engine of the same meaning as :func:`matching.reference` without any second-order graph.

    Our own method, see docs/performance.md.

    The wanted image gradient is ∂⟨∇_W L, λ⟩/∂x for a direction λ on the parameters (λ = ∂Dist/∂g for one batch; for
    several local steps the adjoint of the SGD recursion). It is taken as (∇_x L(W + ελ) − ∇_x L(W))/ε with the
    activation pattern of the first pass held in the second; the same pair of passes gives the Hessian-vector product
    that carries λ back to the step before. Memory: the parameters and one activation pattern per local step.

    Args:
        victim: the model.
        labels: (n,) of the images, in the order of use.
        facts: the local training; :func:`matching.one_gradient` for gradient updates.
        distance: of ΔW to the observed one.
    """
    names = list(victim.parameters)
    shapes = [p.shape for p in victim.parameters.values()]
    sizes = [p.numel() for p in victim.parameters.values()]
    origin = flatten([p.detach() for p in victim.parameters.values()])
    length = _RELATIVE_STEP * origin.norm()
    batches = list(facts.batch_sizes)
    pull = facts.weight_decay + facts.proximal_mu

    def gradients(
        parameters: Tensor, images: Tensor, targets: Tensor, mode: Recording | Replaying, *, weights: bool
    ) -> tuple[Tensor | None, Tensor]:
        """Return the gradient on the parameters (if wanted) and on the images."""
        leaves = [p.view(s).detach() for p, s in zip(parameters.split(sizes), shapes, strict=True)]
        leaves = [leaf.requires_grad_(weights) for leaf in leaves]
        images = images.detach().requires_grad_()
        with mode:
            value = victim.value(dict(zip(names, leaves, strict=True)), images, targets)
        if not weights:
            return None, torch.autograd.grad(value, images)[0]
        *own, image_gradient = torch.autograd.grad(value, [*leaves, images], materialize_grads=True)
        return flatten(own), image_gradient

    def step(images: Tensor) -> tuple[Tensor, Tensor]:
        cut = list(zip(images.split(batches), labels.split(batches), strict=True))
        passes: list[_Pass] = []
        delta = velocity = None
        for x, y in cut:
            parameters = origin if delta is None else origin + delta
            mode = Recording()
            own, image_gradient = gradients(parameters, x, y, mode, weights=True)
            assert own is not None
            passes.append(_Pass(parameters, own, image_gradient, mode.kept))
            total = own
            if facts.proximal_mu and delta is not None:
                total = total + facts.proximal_mu * delta
            if facts.weight_decay:
                total = total + facts.weight_decay * parameters
            velocity = total if velocity is None else facts.momentum * velocity + total
            moved = -facts.learning_rate * velocity
            delta = moved if delta is None else delta + moved
        assert delta is not None
        value, on_weights = distance.derivative(delta)

        results: list[Tensor] = []
        on_velocity = None
        for index in reversed(range(len(passes))):
            done, (x, y) = passes[index], cut[index]
            direction = -facts.learning_rate * on_weights
            if on_velocity is not None and facts.momentum:
                direction = direction + facts.momentum * on_velocity
            scale = length / direction.norm().clamp_min(1e-30)
            perturbed = done.parameters + direction * scale
            own, image_gradient = gradients(perturbed, x, y, Replaying(done.kept), weights=index > 0)
            results.append((image_gradient - done.image_gradient) / scale)
            if own is not None:
                on_weights = on_weights + (own - done.gradient) / scale
                if pull:
                    on_weights = on_weights + pull * direction
            on_velocity = direction
        return value, torch.cat(results[::-1])

    return step
