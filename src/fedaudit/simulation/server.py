"""What the server does with the updates of a round: aggregate them into the global model."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedaudit.defences.aggregation import Aggregate, Aggregator, Cohort
from fedaudit.simulation.checkpoint import State
from fedaudit.transcript.update import Update
from fedaudit.utils.errors import BadInput
from fedaudit.utils.finite import all_finite


@dataclass(frozen=True)
class CanaryUpdates:
    """What canary clients send in a round: see :mod:`fedaudit.simulation.canary_play`.

    Attributes:
        total: the sum of their updates, by parameter name.
        count: among how many more the mean is taken.
        rows: their updates one by one, where the rule looks at them so; else empty.
    """

    total: dict[str, Tensor]
    count: int
    rows: list[Update]


class Server:
    """Applies an aggregator round after round.

    Args:
        step: times the aggregate, before it is added: 1 for ΔW, −μ for gradients.
        noise: standard deviation of the Gaussian noise that the server adds to the aggregate (central privacy).
        generator: of that noise, and of what the aggregator draws.
    """

    def __init__(
        self, aggregator: Aggregator, step: float, noise: float = 0.0, generator: torch.Generator | None = None
    ) -> None:
        self.aggregator = aggregator
        self.step = step
        self.noise = noise
        self.generator = generator

    def state_dict(self) -> State:
        """Return what changes from round to round, for a checkpoint."""
        noise = self.generator.get_state() if self.generator else None
        return {"aggregator": self.aggregator.state_dict(), "noise": noise}

    def load_state_dict(self, state: State) -> None:
        """Go on from what :meth:`state_dict` returned."""
        self.aggregator.load_state_dict(state["aggregator"])
        if self.generator:
            self.generator.set_state(state["noise"])

    def apply(
        self,
        weights: dict[str, Tensor],
        updates: list[Update],
        root: dict[str, Tensor] | None = None,
        canary_updates: CanaryUpdates | None = None,
    ) -> tuple[dict[str, Tensor], Aggregate]:
        """Return the global model's state after the round, and what the aggregator said.

        Trainable parameters go through the aggregator. Where some clients hold tensors back, those that the same
        clients sent are aggregated together, over these clients; where they are too few for the rule, the tensors stay
        as they are. The aggregate is then that of the tensors that most clients sent.

        Where the rule takes the whole state, BatchNorm's running statistics go through it, too. Else they are averaged
        with the weights that it gives the clients (where some held tensors back: the mean of those that it gives them
        among the senders of one tensor and another, each times how many these are), or by the rule itself where it
        treats every coordinate on its own; counters are the largest of those who weren't left out.

        Args:
            root: the server's own update, where the aggregator wants one.
            canary_updates: of canaries; their rows in the aggregate come after those of ``updates``.
        """
        updates = [*updates, *canary_updates.rows] if canary_updates else updates
        statistics: set[str] = set()
        if self.aggregator.whole:
            sent = {name for update in updates for name in update.tensors}
            statistics = {name for name, value in weights.items() if value.is_floating_point() and name not in sent}
            updates = [_whole(update, weights, statistics) for update in updates]
        groups: dict[tuple[int, ...], list[str]] = {}
        for name in weights:
            if senders := tuple(row for row, update in enumerate(updates) if name in update.tensors):
                groups.setdefault(senders, []).append(name)
        if self.aggregator.whole and len(groups) > 1:
            raise BadInput(
                f"the aggregator '{self.aggregator.name}' clips whole updates, and clients held different layers back; "
                "use a client-side defence that sends all layers"
            )
        state, parts, too_few = dict(weights), {}, []
        for senders, names in sorted(groups.items(), key=lambda group: (-len(group[0]), group)):
            try:
                parts[senders] = self._part(names, [updates[row] for row in senders], root)
            except BadInput as error:
                if len(groups) == 1:
                    raise
                too_few.append(str(error))
                continue
            vector = parts[senders].vector
            if canary_updates and not canary_updates.rows:
                n = len(senders)
                vector = (n * vector + _flat([canary_updates.total], names)[0]) / (n + canary_updates.count)
            if self.noise:
                noise = torch.randn(vector.shape, generator=self.generator, dtype=vector.dtype)
                vector = vector + self.noise * noise.to(vector.device)
            for name, piece in _split(vector, names, weights).items():
                state[name] = weights[name] + (1.0 if name in statistics else self.step) * piece
        if not parts:
            nobody = torch.zeros(len(updates))
            whole = Aggregate(torch.zeros(0), nobody, {}, too_few[0])
        else:
            senders, whole = next(iter(parts.items()))
            of_all = torch.zeros(len(updates), dtype=whole.weights.dtype)
            of_all[list(senders)] = whole.weights.cpu()
            rejected = {senders[row]: reason for row, reason in whole.rejected.items()}
            fallback = whole.fallback or (f"some layers stayed as they were: {too_few[0]}" if too_few else None)
            whole = replace(whole, weights=of_all, rejected=rejected, fallback=fallback)
        state |= self._statistics(weights, updates, whole, _shares(len(updates), parts))
        return state, whole

    def _part(self, names: list[str], updates: list[Update], root: dict[str, Tensor] | None) -> Aggregate:
        cohort = Cohort(
            clients=tuple(u.client for u in updates),
            examples=tuple((u.training.data_size if u.training else None) or u.num_examples for u in updates),
            root=None if root is None else _flat([root], names)[0],
            generator=self.generator,
        )
        matrix = _flat([u.tensors for u in updates], names)
        for update, row in zip(updates, matrix, strict=True):
            if not all_finite([row]):
                raise BadInput(f"client {update.client} sent NaN or infinite values")
        return self.aggregator(matrix, cohort)

    def _statistics(
        self, weights: dict[str, Tensor], updates: list[Update], aggregate: Aggregate, shares: Tensor
    ) -> dict[str, Tensor]:
        """Return the buffers that local training has changed."""
        state = {}
        for name in dict.fromkeys(name for update in updates for name in update.buffers):
            rows = [r for r, u in enumerate(updates) if name in u.buffers and r not in aggregate.rejected]
            if not rows:
                continue
            stack = torch.stack([updates[row].buffers[name] for row in rows])
            if not stack.is_floating_point():
                state[name] = stack.amax(dim=0)
                continue
            matrix = stack.flatten(1)
            given = shares[rows].to(matrix)
            if self.aggregator.coordinatewise:
                try:
                    vector = self.aggregator.anew()(matrix).vector
                except BadInput:  # too few sent this layer
                    continue
            else:
                equal = torch.full_like(given, 1 / len(rows))
                vector = (given / given.sum() if bool(given.sum() > 0) else equal) @ matrix
            state[name] = vector.view_as(weights[name])
        return state


def _whole(update: Update, weights: dict[str, Tensor], statistics: set[str]) -> Update:
    """Return the update with the changes of BatchNorm's statistics among its tensors."""
    changes = {name: update.buffers.get(name, weights[name]) - weights[name] for name in weights if name in statistics}
    counters = {name: value for name, value in update.buffers.items() if name not in statistics}
    return replace(update, tensors=update.tensors | changes, buffers=counters)


def _shares(clients: int, parts: dict[tuple[int, ...], Aggregate]) -> Tensor:
    """Return the (clients,) weights of whole clients, of those in each part: equal in all parts, equal here."""
    if len(parts) == 1:
        ((senders, part),) = parts.items()
        shares = torch.zeros(clients, dtype=part.weights.dtype)
        shares[list(senders)] = part.weights.cpu()
        return shares
    given, times = torch.zeros(clients, dtype=torch.float64), torch.zeros(clients, dtype=torch.float64)
    for senders, part in parts.items():
        given[list(senders)] += len(senders) * part.weights.double().cpu()
        times[list(senders)] += 1
    return given / times.clamp(min=1)


def _flat(rows: list[dict[str, Tensor]], names: list[str]) -> Tensor:
    """Return the (n, d) matrix of the tensors of ``names``, without a second copy of any row."""
    sizes = [rows[0][name].numel() for name in names]
    first = rows[0][names[0]]
    matrix = torch.empty(len(rows), sum(sizes), dtype=first.dtype, device=first.device)
    for row, tensors in zip(matrix, rows, strict=True):
        for piece, name in zip(row.split(sizes), names, strict=True):
            piece.copy_(tensors[name].reshape(-1))
    return matrix


def _split(vector: Tensor, names: list[str], like: dict[str, Tensor]) -> dict[str, Tensor]:
    pieces = vector.split([like[name].numel() for name in names])
    return {name: piece.view_as(like[name]) for name, piece in zip(names, pieces, strict=True)}
