"""All restarts of an attack in one batch: the same step for each of them, computed together.

The work of a restart on a table's batch is small, so one after another most of the time goes into calling functions.
Side by side the restarts share the model's weights, and every product of matrices is one of R·n rows.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.func import grad, grad_and_value, vmap

from fedaudit.attacks.inversion.engines.optimisers import SOFTNESS
from fedaudit.attacks.inversion.engines.reference import unrolled
from fedaudit.attacks.inversion.objectives import Distance, Objective, flatten
from fedaudit.attacks.victim import Victim
from fedaudit.task.training import TrainingConfig

_MOST = 16_000_000  # numbers of gradients that are held side by side; restarts beyond that come in further groups

# Variables (…, n, v) -> examples (…, n, d), as the model sees them, and their labels (n,) or targets (…, n, 1).
Decode = Callable[[Tensor], tuple[Tensor, Tensor]]


def one_by_one(victim: Victim, training: TrainingConfig, distance: Distance, decode: Decode) -> Objective:
    """Return the step of R restarts, one after another, by double backward.

    Args:
        victim: the model.
        training: the local training that is replayed.
        distance: of its pseudo-gradient to the observed one.
        decode: from what is optimised to examples and labels.

    Returns:
        A function of (R, n, v) variables: the sum of the restarts' distances, and its gradient.
    """
    start = {name: p.detach().requires_grad_() for name, p in victim.parameters.items()}
    sizes = list(training.batch_sizes)

    def step(variables: Tensor) -> tuple[Tensor, Tensor]:
        values, gradients = [], []
        for one in variables:
            leaf = one.detach().requires_grad_()
            x, y = decode(leaf)
            pseudo = unrolled(victim, start, x.split(sizes), y.split(sizes), training, SOFTNESS)
            value = distance.value(flatten(pseudo))
            gradients.append(torch.autograd.grad(value, leaf)[0])
            values.append(value.detach())
        return torch.stack(values).sum(), torch.stack(gradients)

    return step


def side_by_side(victim: Victim, training: TrainingConfig, distance: Distance, decode: Decode) -> Objective:
    """Return the same step with all restarts in one batch (``torch.func.vmap`` over double backward).

    Arguments and result as of :func:`one_by_one`. A model that can't be run so raises a RuntimeError in the first step.
    """
    start = {name: p.detach() for name, p in victim.parameters.items()}
    sizes = list(training.batch_sizes)
    width = sum(p.numel() for p in start.values())

    def gradient(victim: Victim, weights: dict[str, Tensor], x: Tensor, y: Tensor) -> list[Tensor]:
        return list(grad(victim.value)(weights, x, y).values())

    def objective(one: Tensor) -> Tensor:
        x, y = decode(one)
        return distance.value(
            flatten(unrolled(victim, start, x.split(sizes), y.split(sizes), training, SOFTNESS, gradient))
        )

    together = vmap(grad_and_value(objective), chunk_size=max(1, _MOST // width))

    def step(variables: Tensor) -> tuple[Tensor, Tensor]:
        gradients, values = together(variables.detach())
        return values.detach().sum(), gradients.detach()

    return step


def restarts(
    victim: Victim,
    training: TrainingConfig,
    distance: Distance,
    decode: Decode,
    first: Tensor,
    notes: list[str],
    faster: Objective | None = None,
) -> Objective:
    """Return the fastest of these steps that this model takes, tried on the ``first`` variables.

    Arguments and result as of :func:`one_by_one`; ``faster`` is one for models like this one, if there is any. Why
    restarts have to be run one after another is added to ``notes``.
    """
    exact = one_by_one(victim, training, distance, decode)
    reason = ""
    for fast in (faster, side_by_side(victim, training, distance, decode)):
        if fast is None:
            continue
        try:
            if _agree(fast, exact, first[:2]):
                return fast
            reason = "it doesn't do the same to all at once"
        except (RuntimeError, NotImplementedError, ValueError) as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0][:200]
    notes.append(f"restarts one after another, because this model can't be run on all at once: {reason}")
    return exact


def _agree(fast: Objective, exact: Objective, variables: Tensor) -> bool:
    """Return whether both steps give the same; the model may mix up the restarts, or count on a batch's axes."""
    (_, own), (_, wanted) = fast(variables), exact(variables)
    return bool(torch.allclose(own, wanted, rtol=1e-2, atol=1e-3 * float(wanted.abs().max() + 1e-12)))
