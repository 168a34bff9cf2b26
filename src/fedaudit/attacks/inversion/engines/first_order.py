"""The fast engine: first-order passes only, with the activation pattern of the first pass held fixed in the second."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fedaudit.attacks.inversion.objectives import Distance, Objective, flatten, unflatten
from fedaudit.attacks.victim import Victim
from fedaudit.task.training import TrainingConfig

# Length of the finite difference relative to the parameters' norm: long enough for float32, short enough for curves.
_RELATIVE_STEP = 1e-4


def first_order(
    victim: Victim,
    labels: Tensor,
    training: TrainingConfig,
    distance: Distance,
    run_pass: Callable[..., tuple[list[Tensor], Tensor, list[Any]]],
) -> Objective:
    """Return an engine of the same meaning as :func:`reference.reference` without any second-order graph.

    Our own method, see docs/evidence/performance.md.

    The wanted image gradient is ∂⟨∇_W L, λ⟩/∂x for a direction λ on the parameters (λ = ∂Dist/∂g for one batch; for
    several local steps the adjoint of the SGD recursion). It is taken as (∇_x L(W + ελ) − ∇_x L(W))/ε with the
    activation pattern of the first pass held fixed in the second; the same pair of passes gives the Hessian-vector
    product that carries λ back to the step before. Memory: one gradient and one activation pattern per local step;
    where a step began is worked out backwards from where it ended.

    Args:
        victim: the model.
        labels: (n,) of the images, in the order of use.
        training: the local training; :func:`reference.one_gradient` for gradient updates.
        distance: of the pseudo-gradient W − W_T to the observed one.
        run_pass: a first-order pass of a local step, from :mod:`.passes`.
    """
    shapes = [p.shape for p in victim.parameters.values()]
    batches = list(training.batch_sizes)
    pull = training.weight_decay + training.proximal_mu

    origin = flatten([p.detach() for p in victim.parameters.values()])
    length = _RELATIVE_STEP * origin.norm()
    elsewhere = torch.empty_like(origin)  # where passes are taken: one memory for all, as new pages are dear
    origin_views, elsewhere_views = unflatten(origin, shapes), unflatten(elsewhere, shapes)
    rate = training.learning_rate
    # a single step's gradient isn't needed any more when the second pass needs the memory
    gradient_memory = elsewhere if len(batches) == 1 else None

    def step(images: Tensor) -> tuple[Tensor, Tensor]:
        cut = list(zip(images.split(batches), labels.split(batches), strict=True))
        # what the forward sweep leaves of each local step: gradient, velocity (without momentum, decay and pull it *is*
        # the gradient), gradient on the images, activation pattern
        done: list[tuple[Tensor, Tensor, Tensor, list[Any]]] = []
        pseudo_gradient = velocity = None
        for x, y in cut:
            if pseudo_gradient is not None:
                torch.sub(origin, pseudo_gradient, out=elsewhere)
            own, image_gradient, pattern = run_pass(origin_views if pseudo_gradient is None else elsewhere_views, x, y)
            gradient = flatten(own, out=gradient_memory)
            del own
            total = gradient
            if training.proximal_mu and pseudo_gradient is not None:
                total = torch.sub(total, pseudo_gradient, alpha=training.proximal_mu)
            if training.weight_decay:
                total = torch.add(total, origin if pseudo_gradient is None else elsewhere, alpha=training.weight_decay)
            if velocity is not None and training.momentum:
                total = torch.add(total, velocity, alpha=training.momentum)
            velocity = total
            done.append((gradient, velocity, image_gradient, pattern))
            if pseudo_gradient is not None:
                pseudo_gradient.add_(velocity, alpha=rate)
            else:
                pseudo_gradient = velocity if rate == 1 and len(cut) == 1 else rate * velocity
        assert pseudo_gradient is not None
        del total, gradient, velocity  # what lingers here is as large as the model
        value, pseudo_gradient_grad = distance.derivative(pseudo_gradient)
        if rate != 1:
            pseudo_gradient_grad.mul_(rate)  # times the rate it stays, back to the first step

        results: list[Tensor] = []
        on_velocity = None
        while done:
            gradient, velocity, first_image_gradient, pattern = done.pop()
            x, y = cut[len(done)]
            direction = pseudo_gradient_grad
            if on_velocity is not None and training.momentum:
                direction = torch.add(pseudo_gradient_grad, on_velocity, alpha=training.momentum)
            on_velocity = direction
            scale = length / direction.norm().clamp_min(1e-30)
            if not done:
                torch.addcmul(origin, direction, scale, out=elsewhere)
                del pseudo_gradient, pseudo_gradient_grad, on_velocity, direction, gradient, velocity
                _, image_gradient, _ = run_pass(elsewhere_views, x, y, pattern, weights=False)
            else:
                torch.sub(origin, pseudo_gradient.sub_(velocity, alpha=rate), out=elsewhere)
                elsewhere.addcmul_(direction, scale)
                own, image_gradient, _ = run_pass(elsewhere_views, x, y, pattern)
                change = gradient  # where that was: what it is less after the step along the direction
                torch._foreach_sub_(unflatten(change, shapes), own)
                del own
                change.div_(scale)
                if pull:
                    change.sub_(direction, alpha=pull)
                pseudo_gradient_grad = torch.add(pseudo_gradient_grad, change, alpha=rate, out=change)
            results.append((image_gradient - first_image_gradient) / scale)
        return value, torch.cat(results[::-1]).contiguous()

    return step
