"""How far a dummy update is from the observed one: distances of flat vectors, with their derivatives in closed form."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

_TINY = 1e-30  # keeps a gradient of zero from dividing by zero; far below any float32 square that matters


class Distance(Protocol):
    """A distance to a fixed target vector of length d."""

    def __call__(self, vector: Tensor) -> Tensor:
        """Return the distance of (d,) ``vector`` as a differentiable scalar."""
        ...

    def derivative(self, vector: Tensor) -> tuple[Tensor, Tensor]:
        """Return the distance and its (d,) derivative at ``vector``, which is the caller's to change."""
        ...


def flatten(tensors: Sequence[Tensor], out: Tensor | None = None) -> Tensor:
    """Return all numbers of ``tensors`` as one vector, written to ``out`` if there is one.

    Channels last, the order in which convolutions are fastest.
    """
    return torch.cat([(t.permute(0, 2, 3, 1) if t.ndim == 4 else t).reshape(-1) for t in tensors], out=out)


def unflatten(vector: Tensor, shapes: Sequence[torch.Size]) -> list[Tensor]:
    """Return the views of ``vector`` as tensors of ``shapes``; the inverse of :func:`flatten`."""
    parts = vector.split([shape.numel() for shape in shapes])
    return [
        part.view(shape[0], *shape[2:], shape[1]).permute(0, 3, 1, 2) if len(shape) == 4 else part.view(shape)
        for part, shape in zip(parts, shapes, strict=True)
    ]


# One weight for all numbers of a tensor, or one for each of them.
Weight = float | Tensor


def _weight_vector(target: Sequence[Tensor], weights: Sequence[Weight]) -> Tensor | None:
    """Return each number's weight, or None where all are one."""
    if all(not isinstance(w, Tensor) and w == 1 for w in weights):
        return None
    whole = [w if isinstance(w, Tensor) else torch.full_like(t, w) for t, w in zip(target, weights, strict=True)]
    return flatten(whole)


class SquaredL2:
    """Weighted squared Euclidean distance to ``target``: Σ_i w_i ‖g_i − t_i‖² (DLG, Zhu et al. 2019).

    Args:
        target: the observed gradient, one tensor per parameter.
        weights: one per tensor, or one per number; 0 leaves it out.
    """

    def __init__(self, target: Sequence[Tensor], weights: Sequence[Weight]) -> None:
        self._target = flatten(target)
        self._weights = _weight_vector(target, weights)

    def __call__(self, vector: Tensor) -> Tensor:
        """Return the distance of (d,) ``vector``."""
        difference = vector - self._target
        scaled = difference if self._weights is None else self._weights * difference
        return torch.dot(scaled, difference)

    def derivative(self, vector: Tensor) -> tuple[Tensor, Tensor]:
        """Return the distance and 2·w·(g − t)."""
        difference = vector - self._target
        scaled = difference if self._weights is None else self._weights * difference
        return torch.dot(scaled, difference), 2 * scaled


class LayerL2:
    """Sum of the tensors' weighted Euclidean distances to ``target``: Σ_i ‖w_i·(g_i − t_i)‖ (Yin et al. 2021, Eq. 3).

    Args:
        target: the observed gradient, one tensor per parameter.
        weights: one per tensor, or one per number; 0 leaves it out.
    """

    def __init__(self, target: Sequence[Tensor], weights: Sequence[Weight]) -> None:
        self._target = flatten(target)
        self._sizes = [t.numel() for t in target]
        self._weights = _weight_vector(target, weights)

    def __call__(self, vector: Tensor) -> Tensor:
        """Return the distance of (d,) ``vector``."""
        return self._norms(self._scaled(vector - self._target)).sum()

    def derivative(self, vector: Tensor) -> tuple[Tensor, Tensor]:
        """Return the distance and w²·(g − t)/‖w·(g − t)‖ by tensor."""
        scaled = self._scaled(vector - self._target)
        norms = self._norms(scaled)
        for part, norm in zip(scaled.split(self._sizes), norms, strict=True):
            part.div_(norm + _TINY)
        return norms.sum(), self._scaled(scaled)

    def _scaled(self, difference: Tensor) -> Tensor:
        return difference if self._weights is None else self._weights * difference

    def _norms(self, difference: Tensor) -> Tensor:
        return torch.stack([part.norm() for part in difference.split(self._sizes)])


class WeightedCosine:
    """One minus the layer-weighted cosine to ``target`` (AGIC, Xu et al. 2022, Eq. 6).

    The weight of a tensor enters the dot product and both norms. With equal weights this is the plain cosine over
    the whole gradient (InvG, Geiping et al. 2020, Eq. 4).

    Args:
        target: the observed gradient, one tensor per parameter.
        weights: one per tensor, or one per number; 0 leaves it out.
    """

    def __init__(self, target: Sequence[Tensor], weights: Sequence[Weight]) -> None:
        flat = flatten(target)
        self._weights = _weight_vector(target, weights)
        scaled = flat if self._weights is None else self._weights * flat
        norm = torch.dot(scaled.double(), flat.double()).sqrt().to(flat.dtype)
        self._direction = scaled / (norm + _TINY)

    def __call__(self, vector: Tensor) -> Tensor:
        """Return the distance of (d,) ``vector``."""
        scaled = vector if self._weights is None else self._weights * vector
        return 1 - torch.dot(self._direction, vector) / (torch.dot(scaled, vector) + _TINY).sqrt()

    def derivative(self, vector: Tensor) -> tuple[Tensor, Tensor]:
        """Return the distance and (cos/‖g‖_w²)·w·g − direction/‖g‖_w, direction being w·t/‖t‖_w."""
        scaled = vector if self._weights is None else self._weights * vector
        square = torch.dot(scaled, vector) + _TINY
        norm = square.sqrt()
        dot = torch.dot(self._direction, vector)
        factor = dot / (square * norm)
        scaled = vector * factor if self._weights is None else scaled.mul_(factor)
        return 1 - dot / norm, scaled.addcmul_(self._direction, -1 / norm)


DISTANCES: dict[str, Callable[[Sequence[Tensor], Sequence[Weight]], Distance]] = {
    "squared-l2": SquaredL2,
    "layer-l2": LayerL2,
    "cosine": WeightedCosine,
}
