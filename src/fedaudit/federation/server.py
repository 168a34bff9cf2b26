"""What the server does with the updates of a round: aggregate them into the global model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fedaudit.defences.aggregation import Aggregate, BoundAggregator, Cohort
from fedaudit.errors import BadInput
from fedaudit.update import Tensors, Update


class Server:
    """Applies an aggregator round after round and keeps its state.

    Args:
        aggregator: with its settings.
        step: by which the aggregate is multiplied before it is added: 1 for ΔW, −μ for gradients.
    """

    def __init__(self, aggregator: BoundAggregator, step: float) -> None:
        self.aggregator = aggregator
        self.step = step
        self.state: Mapping[str, Any] = {}

    def apply(self, weights: Tensors, updates: list[Update], root: Tensors | None = None) -> tuple[Tensors, Aggregate]:
        """Return the global model's state after the round, and what the aggregator said.

        Trainable parameters go through the aggregator. BatchNorm's running statistics are averaged with the weights
        that it gives the clients, or by the rule itself where it looks at every coordinate on its own; counters are the
        largest of those who weren't left out.

        Args:
            weights: the global model's state that the clients started from.
            updates: of the round.
            root: the server's own update, where the aggregator wants one.

        Raises:
            BadInput: the rule can't work with these updates, or one of them isn't finite.
        """
        names = list(updates[0].tensors)
        cohort = Cohort(
            clients=tuple(u.client for u in updates),
            examples=tuple(u.num_examples for u in updates),
            root=None if root is None else _flat([root], names)[0],
            state=self.state,
        )
        matrix = _flat([u.tensors for u in updates], names)
        for update, row in zip(updates, matrix, strict=True):
            # the sum of squares costs a tenth of isfinite(), but may overflow
            if not bool(row.dot(row).isfinite()) and not bool(row.isfinite().all()):
                raise BadInput(f"client {update.client} sent NaN or infinite values")
        aggregate = self.aggregator(matrix, cohort)
        self.state = aggregate.state
        state = dict(weights)
        for name, piece in _split(aggregate.vector, names, weights).items():
            state[name] = weights[name] + self.step * piece
        state |= self._statistics(weights, updates, aggregate)
        return state, replace(aggregate, state={})

    def _statistics(self, weights: Tensors, updates: list[Update], aggregate: Aggregate) -> Tensors:
        """Return the buffers that local training has changed."""
        heard = [row for row in range(len(updates)) if row not in aggregate.rejected]
        names = [name for name in updates[0].buffers if all(name in u.buffers for u in updates)]
        real = [name for name in names if updates[0].buffers[name].is_floating_point()]
        state = {}
        for name in names if heard else []:
            if name not in real:
                state[name] = torch.stack([updates[row].buffers[name] for row in heard]).amax(dim=0)
        if real and heard:
            matrix = _flat([u.buffers for u in updates], real)
            if self.aggregator.info.get("coordinatewise"):
                vector = self.aggregator(matrix).vector
            else:
                vector = aggregate.weights.to(matrix.dtype) @ matrix
            state |= _split(vector, real, weights)
        return state


def _flat(rows: list[Tensors], names: list[str]) -> Tensor:
    """Return the (n, d) matrix of the tensors of ``names``, without a second copy of any row."""
    sizes = [rows[0][name].numel() for name in names]
    first = rows[0][names[0]]
    matrix = torch.empty(len(rows), sum(sizes), dtype=first.dtype, device=first.device)
    for row, tensors in zip(matrix, rows, strict=True):
        for piece, name in zip(row.split(sizes), names, strict=True):
            piece.copy_(tensors[name].reshape(-1))
    return matrix


def _split(vector: Tensor, names: list[str], like: Tensors) -> Tensors:
    pieces = vector.split([like[name].numel() for name in names])
    return {name: piece.view_as(like[name]) for name, piece in zip(names, pieces, strict=True)}
