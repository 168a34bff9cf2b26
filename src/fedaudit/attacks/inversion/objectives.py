"""How far a dummy update is from the observed one: distances of flat vectors, with their derivatives in closed form."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_TINY = 1e-30  # keeps a gradient of zero from dividing by zero; far below any float32 square that matters

# What is minimised, or a term of it: all variables, the (n, C, H, W) normalised dummy images first -> (value, its
# gradient on each of them). The distance is a term, and who computes it an engine; the others are priors.
Objective = Callable[..., tuple[Tensor, ...]]


@dataclass(frozen=True)
class Distance:
    """How far a vector is from a fixed one, in the two forms that the engines need.

    Attributes:
        value: (d,) vector -> the distance as a differentiable scalar.
        derivative: (d,) vector -> the distance and its (d,) derivative, which is the caller's to change.
        direction: (d,) of length one, where the distance is one minus the plain cosine to it.
    """

    value: Callable[[Tensor], Tensor]
    derivative: Callable[[Tensor], tuple[Tensor, Tensor]]
    direction: Tensor | None = None


def flatten(tensors: Sequence[Tensor], out: Tensor | None = None) -> Tensor:
    """Return all elements of ``tensors`` as one vector, written to ``out`` if there is one.

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


def squared_l2(target: Sequence[Tensor], weights: Sequence[float | Tensor]) -> Distance:
    """Return the weighted squared Euclidean distance to ``target``: Σ_i w_i ‖g_i − t_i‖² (DLG, Zhu et al. 2019).

    Its derivative is 2·w·(g − t).

    Args:
        target: the observed gradient, one tensor per parameter.
        weights: one per tensor, or one per element; 0 leaves it out.
    """
    flat, scale = flatten(target), _scaling(target, weights)

    def value(vector: Tensor) -> Tensor:
        difference = vector - flat
        return torch.dot(scale(difference), difference)

    def derivative(vector: Tensor) -> tuple[Tensor, Tensor]:
        difference = vector - flat
        scaled = scale(difference)
        return torch.dot(scaled, difference), 2 * scaled

    return Distance(value, derivative)


def layer_l2(target: Sequence[Tensor], weights: Sequence[float | Tensor]) -> Distance:
    """Return the sum of the tensors' weighted Euclidean distances: Σ_i ‖w_i·(g_i − t_i)‖ (Yin et al. 2021, Eq. 3).

    Its derivative is w²·(g − t)/‖w·(g − t)‖ by tensor.

    Args:
        target: the observed gradient, one tensor per parameter.
        weights: one per tensor, or one per element; 0 leaves it out.
    """
    flat, scale = flatten(target), _scaling(target, weights)
    sizes = [t.numel() for t in target]

    def norms(difference: Tensor) -> Tensor:
        return torch.stack([part.norm() for part in difference.split(sizes)])

    def derivative(vector: Tensor) -> tuple[Tensor, Tensor]:
        scaled = scale(vector - flat)
        lengths = norms(scaled)
        for part, length in zip(scaled.split(sizes), lengths, strict=True):
            part.div_(length + _TINY)
        return lengths.sum(), scale(scaled)

    return Distance(lambda vector: norms(scale(vector - flat)).sum(), derivative)


def weighted_cosine(target: Sequence[Tensor], weights: Sequence[float | Tensor]) -> Distance:
    """Return one minus the layer-weighted cosine to ``target`` (AGIC, Xu et al. 2022, Eq. 6).

    The weight of a tensor enters the dot product and both norms. With equal weights this is the plain cosine over
    the whole gradient (InvG, Geiping et al. 2020, Eq. 4). Its derivative is (cos/‖g‖_w²)·w·g − direction/‖g‖_w,
    direction being w·t/‖t‖_w.

    Args:
        target: the observed gradient, one tensor per parameter.
        weights: one per tensor, or one per element; 0 leaves it out.
    """
    flat, scale = flatten(target), _scaling(target, weights)
    scaled_target = scale(flat)
    norm_of_target = torch.dot(scaled_target.double(), flat.double()).sqrt().to(flat.dtype)
    direction = scaled_target / (norm_of_target + _TINY)
    del flat, scaled_target  # each as large as the model

    def value(vector: Tensor) -> Tensor:
        return 1 - torch.dot(direction, vector) / (torch.dot(scale(vector), vector) + _TINY).sqrt()

    def derivative(vector: Tensor) -> tuple[Tensor, Tensor]:
        scaled = scale(vector)
        square = torch.dot(scaled, vector) + _TINY
        norm = square.sqrt()
        dot = torch.dot(direction, vector)
        factor = dot / (square * norm)
        scaled = vector * factor if scaled is vector else scaled.mul_(factor)
        return 1 - dot / norm, scaled.addcmul_(direction, -1 / norm)

    return Distance(value, derivative, direction if all(_is_one(w) for w in weights) else None)


def _scaling(target: Sequence[Tensor], weights: Sequence[float | Tensor]) -> Callable[[Tensor], Tensor]:
    """Return what multiplies a (d,) vector by each element's weight; the vector itself where all are one."""
    if all(_is_one(w) for w in weights):
        return lambda vector: vector
    whole = [w if isinstance(w, Tensor) else torch.full_like(t, w) for t, w in zip(target, weights, strict=True)]
    flat = flatten(whole)
    return lambda vector: flat * vector


def _is_one(weight: float | Tensor) -> bool:
    return not isinstance(weight, Tensor) and weight == 1


DISTANCES: dict[str, Callable[[Sequence[Tensor], Sequence[float | Tensor]], Distance]] = {
    "squared-l2": squared_l2,
    "layer-l2": layer_l2,
    "cosine": weighted_cosine,
}
