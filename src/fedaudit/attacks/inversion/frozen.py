"""The fast engine: first-order passes only, with every kink held where the first pass found it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedaudit.attacks.inversion.freezing import Kept
from fedaudit.attacks.inversion.matching import Engine, Victim
from fedaudit.attacks.inversion.objectives import Distance, flatten, unflatten
from fedaudit.attacks.inversion.passes import Passes
from fedaudit.update import TrainingFacts

# Length of the finite difference relative to the parameters' norm: long enough for float32, short enough for curves.
_RELATIVE_STEP = 1e-4


@dataclass(frozen=True)
class _Done:
    """A local step as the forward sweep left it: where it was, its two gradients, the ways of its kinks."""

    parameters: Tensor
    gradient: Tensor
    image_gradient: Tensor
    kept: list[Kept]


def frozen(victim: Victim, labels: Tensor, facts: TrainingFacts, distance: Distance, passes: Passes) -> Engine:
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
        distance: of the descent W − W_T to the observed one.
        passes: the two passes of a local step.
    """
    shapes = [p.shape for p in victim.parameters.values()]
    batches = list(facts.batch_sizes)
    pull = facts.weight_decay + facts.proximal_mu

    origin = flatten([p.detach() for p in victim.parameters.values()])
    length = _RELATIVE_STEP * origin.norm()
    perturbed = torch.empty_like(origin)  # one memory for all passes: new pages are dear
    origin_views, perturbed_views = unflatten(origin, shapes), unflatten(perturbed, shapes)

    def step(images: Tensor) -> tuple[Tensor, Tensor]:
        cut = list(zip(images.split(batches), labels.split(batches), strict=True))
        done: list[_Done] = []
        descent = velocity = None
        for x, y in cut:
            parameters = origin if descent is None else origin - descent
            own, image_gradient, kept = passes.first(
                origin_views if descent is None else unflatten(parameters, shapes), x, y
            )
            gradient = flatten(own)
            done.append(_Done(parameters, gradient, image_gradient, kept))
            total = gradient
            if facts.proximal_mu and descent is not None:
                total = total - facts.proximal_mu * descent
            if facts.weight_decay:
                total = total + facts.weight_decay * parameters
            velocity = total if velocity is None else facts.momentum * velocity + total
            moved = velocity if facts.learning_rate == 1 else facts.learning_rate * velocity
            descent = moved if descent is None else descent + moved
        assert descent is not None
        value, on_descent = distance.derivative(descent)

        results: list[Tensor] = []
        on_velocity = None
        for index in reversed(range(len(done))):
            at, (x, y) = done[index], cut[index]
            direction = on_descent if facts.learning_rate == 1 else facts.learning_rate * on_descent
            if on_velocity is not None and facts.momentum:
                direction = direction + facts.momentum * on_velocity
            scale = length / direction.norm().clamp_min(1e-30)
            torch.addcmul(at.parameters, direction, scale, out=perturbed)
            if index == 0:
                _, image_gradient = passes.again(perturbed_views, x, y, at.kept)
            else:
                own, image_gradient = passes.again_with_weights(perturbed_views, x, y, at.kept)
                on_descent = on_descent - (flatten(own) - at.gradient) / scale
                if pull:
                    on_descent = on_descent - pull * direction
            results.append((image_gradient - at.image_gradient) / scale)
            on_velocity = direction
        return value, torch.cat(results[::-1]).contiguous()

    return step
