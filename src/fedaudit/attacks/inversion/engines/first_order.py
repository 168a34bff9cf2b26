"""The fast engine: first-order passes only, with every kink held where the first pass found it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedaudit.attacks.inversion.engines.activation_pattern import Kept
from fedaudit.attacks.inversion.engines.passes import Passes
from fedaudit.attacks.inversion.engines.reference import Engine
from fedaudit.attacks.inversion.objectives import Distance, flatten, unflatten
from fedaudit.attacks.victim import Victim
from fedaudit.update import TrainingFacts

# Length of the finite difference relative to the parameters' norm: long enough for float32, short enough for curves.
_RELATIVE_STEP = 1e-4


@dataclass(frozen=True)
class _Done:
    """A local step as the forward sweep left it; without momentum, decay and pull, velocity *is* the gradient."""

    gradient: Tensor
    velocity: Tensor
    image_gradient: Tensor
    kept: list[Kept]


def frozen(victim: Victim, labels: Tensor, facts: TrainingFacts, distance: Distance, passes: Passes) -> Engine:
    """Return an engine of the same meaning as :func:`matching.reference` without any second-order graph.

    Our own method, see docs/performance.md.

    The wanted image gradient is ∂⟨∇_W L, λ⟩/∂x for a direction λ on the parameters (λ = ∂Dist/∂g for one batch; for
    several local steps the adjoint of the SGD recursion). It is taken as (∇_x L(W + ελ) − ∇_x L(W))/ε with the
    activation pattern of the first pass held in the second; the same pair of passes gives the Hessian-vector product
    that carries λ back to the step before. Memory: one gradient and one activation pattern per local step; where a step
    began is worked out backwards from where it ended.

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
    elsewhere = torch.empty_like(origin)  # where passes are taken: one memory for all, as new pages are dear
    origin_views, elsewhere_views = unflatten(origin, shapes), unflatten(elsewhere, shapes)
    rate = facts.learning_rate
    # a single step's gradient isn't needed any more when the second pass needs the memory
    gradient_memory = elsewhere if len(batches) == 1 else None

    def step(images: Tensor) -> tuple[Tensor, Tensor]:
        cut = list(zip(images.split(batches), labels.split(batches), strict=True))
        done: list[_Done] = []
        descent = velocity = None
        for x, y in cut:
            if descent is not None:
                torch.sub(origin, descent, out=elsewhere)
            own, image_gradient, kept = passes.first(origin_views if descent is None else elsewhere_views, x, y)
            gradient = flatten(own, out=gradient_memory)
            del own
            total = gradient
            if facts.proximal_mu and descent is not None:
                total = torch.sub(total, descent, alpha=facts.proximal_mu)
            if facts.weight_decay:
                total = torch.add(total, origin if descent is None else elsewhere, alpha=facts.weight_decay)
            if velocity is not None and facts.momentum:
                total = torch.add(total, velocity, alpha=facts.momentum)
            velocity = total
            done.append(_Done(gradient, velocity, image_gradient, kept))
            if descent is not None:
                descent.add_(velocity, alpha=rate)
            else:
                descent = velocity if rate == 1 and len(cut) == 1 else rate * velocity
        assert descent is not None
        del total, gradient, velocity  # what lingers here is as large as the model
        value, on_descent = distance.derivative(descent)
        if rate != 1:
            on_descent.mul_(rate)  # times the rate it stays, all the way back

        results: list[Tensor] = []
        on_velocity = None
        while done:
            last = done.pop()
            x, y = cut[len(done)]
            direction = on_descent
            if on_velocity is not None and facts.momentum:
                direction = torch.add(on_descent, on_velocity, alpha=facts.momentum)
            on_velocity = direction
            scale = length / direction.norm().clamp_min(1e-30)
            if not done:
                torch.addcmul(origin, direction, scale, out=elsewhere)
                del descent, on_descent, on_velocity, direction
                _, image_gradient = passes.again(elsewhere_views, x, y, last.kept)
            else:
                torch.sub(origin, descent.sub_(last.velocity, alpha=rate), out=elsewhere)
                elsewhere.addcmul_(direction, scale)
                own, image_gradient = passes.again_with_weights(elsewhere_views, x, y, last.kept)
                change = last.gradient  # where that was: what it is less after the step along the direction
                torch._foreach_sub_(unflatten(change, shapes), own)
                del own
                change.div_(scale)
                if pull:
                    change.sub_(direction, alpha=pull)
                on_descent = torch.add(on_descent, change, alpha=rate, out=change)
            results.append((image_gradient - last.image_gradient) / scale)
        return value, torch.cat(results[::-1]).contiguous()

    return step
