"""How far a dummy gradient is from the observed one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Distance = Callable[[Sequence[Tensor]], Tensor]

_TINY = 1e-30  # keeps a gradient of zero from dividing by zero; far below any float32 square that matters


def squared_l2(target: Sequence[Tensor], weights: Sequence[float]) -> Distance:
    """Return the weighted squared Euclidean distance to ``target``: Σ_i w_i ‖g_i − t_i‖² (DLG, Zhu et al. 2019).

    Args:
        target: the observed gradient, one tensor per parameter.
        weights: one per tensor; 0 leaves a tensor out.
    """
    pairs = [(i, t, w) for i, (t, w) in enumerate(zip(target, weights, strict=True)) if w]

    def distance(gradient: Sequence[Tensor]) -> Tensor:
        terms = [w * (gradient[i] - t).square().sum() for i, t, w in pairs]
        return torch.stack(terms).sum()

    return distance


def weighted_cosine(target: Sequence[Tensor], weights: Sequence[float]) -> Distance:
    """Return one minus the layer-weighted cosine to ``target`` (AGIC, Xu et al. 2022, Eq. 6).

    The weight of a tensor enters the dot product and both norms. With equal weights this is the plain cosine over
    the whole gradient (InvG, Geiping et al. 2020, Eq. 4).

    Args:
        target: the observed gradient, one tensor per parameter.
        weights: one per tensor; 0 leaves a tensor out.
    """
    pairs = [(i, w * t, w) for i, (t, w) in enumerate(zip(target, weights, strict=True)) if w]
    squares = [w * t.double().square().sum() for t, w in zip(target, weights, strict=True) if w]
    target_norm = torch.stack(squares).sum().sqrt().to(target[0].dtype)

    def distance(gradient: Sequence[Tensor]) -> Tensor:
        dots = torch.stack([(gradient[i] * scaled).sum() for i, scaled, _ in pairs]).sum()
        norms = torch.stack([w * gradient[i].square().sum() for i, _, w in pairs]).sum()
        return 1 - dots / (torch.sqrt(norms + _TINY) * target_norm + _TINY)

    return distance


DISTANCES: dict[str, Callable[[Sequence[Tensor], Sequence[float]], Distance]] = {
    "squared-l2": squared_l2,
    "cosine": weighted_cosine,
}
