"""Aggregators: pure functions of an (n, d) matrix of updates."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fedaudit.errors import BadInput
from fedaudit.registry import Registry


@dataclass(frozen=True)
class Aggregate:
    """What an aggregator returns.

    Attributes:
        vector: (d,) the aggregated update.
        weights: (n,) each client's share in it.
        rejected: row index of every client that was left out, with the reason.
    """

    vector: Tensor
    weights: Tensor
    rejected: dict[int, str] = field(default_factory=dict)


Aggregator = Callable[[Tensor], Aggregate]

AGGREGATORS: Registry[Aggregator] = Registry("aggregator")


@AGGREGATORS.register(
    "mean", "plain mean of the updates: no defence", side="server", paper="McMahan et al. 2017, unweighted"
)
def mean(updates: Tensor) -> Aggregate:
    """Return the plain mean of (n, d) ``updates``.

    FedAvg (McMahan et al. 2017, Algorithm 1) weighs clients by their examples; this rule doesn't.

    Raises:
        BadInput: there is no update.
    """
    if updates.ndim != 2 or not len(updates):
        raise BadInput(f"an aggregator needs an (n, d) matrix with n >= 1, not {tuple(updates.shape)}")
    weights = torch.full((len(updates),), 1 / len(updates), dtype=updates.dtype, device=updates.device)
    return Aggregate(updates.mean(dim=0), weights)
