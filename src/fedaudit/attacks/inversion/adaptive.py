"""Distances for updates by Adam and AdamW, which tell the signs of the gradient better than its size."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from fedaudit.attacks.adaptive import invert
from fedaudit.attacks.inversion.objectives import Distance, flatten, weighted_cosine
from fedaudit.attacks.local_training import Way
from fedaudit.transcript.observation import Message

_TINY = 1e-30


def adaptive_distance(
    name: str,
    way: Way,
    message: Message,
    names: Sequence[str],
    target: Mapping[str, Tensor],
    weights: Mapping[str, float],
) -> Distance:
    """Return the distance to an update by Adam or AdamW, as an attack that optimises images uses it.

    - ``one step``: :func:`one_sided`, of the gradient that Adam was given.
    - ``one batch``: :func:`soft_signs`, of one batch's gradient.
    - ``simulation``: one minus the weighted cosine, of the replayed pseudo-gradient.

    Elements that a sparse defence didn't send are left out. A method whose own distance is ``layer-l2`` weighs its
    priors against a sum of lengths: for it the cosine is multiplied by √d, the length of d softened elements.

    Args:
        name: of the method's own distance.
        way: how the attack uses the update.
        message: the update, and the weights that it was made from.
        names: of the tensors to be matched, in order.
        target: the mean steps (``one batch``) or the pseudo-gradient (``simulation``).
        weights: of each tensor.
    """
    update = message.update
    sparse = update.sanitised is not None and update.sanitised.sparse
    targets = [target[n] for n in names]
    scale: list[float | Tensor] = [
        weights[n] * torch.where(t != 0, 1, 0) if sparse else weights[n] for n, t in zip(names, targets, strict=True)
    ]
    if way == "one step":
        found = invert(update, message.weights)
        device = targets[0].device
        values = [found.values[n].to(device) for n in names]
        own = one_sided(values, [found.known[n].to(device) for n in names], scale)
    else:
        own = weighted_cosine(targets, scale) if way == "simulation" else soft_signs(targets, scale)
    return _times(sum(t.numel() for t in targets) ** 0.5, own) if name == "layer-l2" else own


def _times(factor: float, distance: Distance) -> Distance:
    def derivative(vector: Tensor) -> tuple[Tensor, Tensor]:
        value, slope = distance.derivative(vector)
        return factor * value, factor * slope

    return Distance(lambda vector: factor * distance.value(vector), derivative)


def one_sided(values: Sequence[Tensor], known: Sequence[Tensor], weights: Sequence[float | Tensor]) -> Distance:
    """Return one minus the cosine of the softened dummy gradient to what one step of Adam tells of the observed one.

    Both are softened to g/(|g| + s), s being the mean size of the dummy gradient's tensor, so that few large elements
    don't outweigh the many that are known. Where the gradient is known it is matched; elsewhere only its sign is known
    and a bound: the dummy's own element is matched where it is as large or larger and has that sign, else the bound. s
    and what is matched are held fixed when the derivative is taken.

    Args:
        values: the gradient, or its sign times a lower bound of its size, one tensor per parameter.
        known: where it is the gradient.
        weights: one per tensor, or one per element; 0 leaves it out.
    """
    flat, certain = flatten(values), flatten(known)
    sign, bound = flat.sign(), flat.abs()

    def target(vector: Tensor, spread: Tensor) -> Tensor:
        wanted = torch.where(certain, flat, sign * torch.maximum(bound, sign * vector))
        return wanted / (wanted.abs() + spread)

    return _softened(values, weights, target)


def soft_signs(values: Sequence[Tensor], weights: Sequence[float | Tensor]) -> Distance:
    """Return one minus the cosine of the dummy gradient, softened as by :func:`one_sided`, to mean steps.

    Args:
        values: the mean steps, between −1 and 1, one tensor per parameter.
        weights: one per tensor, or one per element; 0 leaves it out.
    """
    flat = flatten(values)
    return _softened(values, weights, lambda _vector, _spread: flat)


def _softened(
    values: Sequence[Tensor],
    weights: Sequence[float | Tensor],
    target: Callable[[Tensor, Tensor], Tensor],
) -> Distance:
    sizes = [t.numel() for t in values]
    whole = [w if isinstance(w, Tensor) else torch.full_like(t, w) for t, w in zip(values, weights, strict=True)]
    weight = flatten(whole)

    def fixed(vector: Tensor) -> tuple[Tensor, Tensor]:
        """Return s and the weighted direction of the target, of length one."""
        means = [part.abs().mean().clamp(min=_TINY).expand(len(part)) for part in vector.split(sizes)]
        spread = torch.cat(means)
        wanted = target(vector, spread)
        return spread, weight * wanted / (torch.dot(weight * wanted, wanted) + _TINY).sqrt()

    def value(vector: Tensor) -> Tensor:
        spread, direction = fixed(vector.detach())
        soft = vector / (vector.abs() + spread)
        return 1 - torch.dot(direction, soft) / (torch.dot(weight * soft, soft) + _TINY).sqrt()

    def derivative(vector: Tensor) -> tuple[Tensor, Tensor]:
        spread, direction = fixed(vector)
        size = vector.abs() + spread
        soft = vector / size
        scaled = weight * soft
        square = torch.dot(scaled, soft) + _TINY
        norm, dot = square.sqrt(), torch.dot(direction, soft)
        slope = (scaled * (dot / square) - direction) / norm
        return 1 - dot / norm, slope * spread / size.square()

    return Distance(value, derivative)
