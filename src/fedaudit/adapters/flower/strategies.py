"""fedaudit's aggregators as a Flower strategy, with the same arithmetic as in the simulator."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg
from torch import Tensor, nn

from fedaudit.adapters.flower.tensors import Parameters, names_of, parameters_in, torch_state
from fedaudit.defences import AGGREGATORS
from fedaudit.simulation.local_training import train
from fedaudit.simulation.server import Server
from fedaudit.task.training import LOSSES, Loss
from fedaudit.transcript.update import Update
from fedaudit.utils.errors import BadInput
from fedaudit.utils.registry import make
from fedaudit.utils.seeds import generator

log = logging.getLogger("flwr")

# Of the global model's state and the round (from 1): the state after the server's own training on its root data.
RootUpdate = Callable[[dict[str, Tensor], int], Mapping[str, Tensor]]


class RobustStrategy(FedAvg):  # type: ignore[misc]
    """Flower's ``FedAvg`` with another rule: any of a server's in ``fedaudit list defences``.

    >>> RobustStrategy("krum", {"f": 1}, fraction_train=0.5)  # doctest: +SKIP

    Aggregated are the differences between the parameters that came back and those that were sent. ``mean`` and
    ``fedavg`` so give what Flower's ``FedAvg`` gives (the first where all clients have as many examples), but for
    float rounding. BatchNorm's running statistics are averaged by the weights that the rule gives the clients, without
    the rejected ones; of integers, such as BatchNorm's counters, the largest is taken.

    One client can't stop a round: a reply that doesn't fit the model, or has NaN or infinite values, is rejected, and
    where too few are left for the rule, the model stays as it was. A warning says so. Metrics are averaged over all
    replies that fit, those of rejected clients included.

    Attributes:
        aggregator: with what it remembers from round to round, by node id.
        rejected: by round, by node id, why the client had no part in it.

    Args:
        aggregator: its registered name.
        settings: of the aggregator.
        parameters: the module, or the names of its parameters; everything else counts as statistics. None: every
            floating-point tensor but BatchNorm's running statistics.
        root: the server's own training, for rules that need it (``fltrust``): :class:`RootTraining`, or a function of
            (global state, round) that returns the state after training on the root data.
        fedavg: whatever Flower's ``FedAvg`` takes.

    Raises:
        BadInput: no such aggregator or setting, one that is Flower's own, or ``root`` is missing or not needed.
    """

    def __init__(
        self,
        aggregator: str = "fedavg",
        settings: Mapping[str, Any] | None = None,
        *,
        parameters: Parameters = None,
        root: RootUpdate | None = None,
        **fedavg: Any,
    ) -> None:
        super().__init__(**fedavg)
        made = make(AGGREGATORS, aggregator, settings)
        if made.root and root is None:
            raise BadInput(
                f"the aggregator '{made.name}' needs the server's own update on root data: give root=RootTraining(…), "
                "or a function of (global state, round) that returns the state after training"
            )
        if root is not None and not made.root:
            raise BadInput(f"the aggregator '{made.name}' has no use for root; leave it out")
        if made.whole:
            raise BadInput(
                f"the aggregator '{made.name}' is Flower's own: wrap your strategy in its DifferentialPrivacy…Clipping"
            )
        self.aggregator = made
        self.root = root
        self.rejected: dict[int, dict[int, str]] = {}
        self._given = names_of(parameters)
        self._sent: dict[str, Tensor] = {}

    def summary(self) -> None:
        """Log the rule and its settings."""
        settings = ", ".join(f"{name}={value}" for name, value in self.aggregator.settings().items())
        log.info("\t├──> fedaudit aggregator: %s(%s)", self.aggregator.name, settings)
        super().summary()

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Sample clients as ``FedAvg`` does, and keep what they are sent.

        Raises:
            BadInput: in the first round, before anybody trains: the rule can't work with so many clients, or the model
                lacks one of ``parameters``.
        """
        messages = list(super().configure_train(server_round, arrays, config, grid))
        first = not self._sent
        self._sent = torch_state(arrays)
        if first and messages:
            parameters_in(self._sent, self._given)
            self.aggregator.dry_run(len(messages))
        return messages

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Return the new global model and the averaged metrics."""
        replies = sorted(replies, key=lambda reply: reply.metadata.src_node_id)  # they come in any order
        rejected = self.rejected[server_round] = {}
        updates, contents = [], []
        for reply in replies:
            node = reply.metadata.src_node_id
            if reply.has_error():
                rejected[node] = f"error: {reply.error.reason}"
                continue
            try:
                updates.append(self._update(node, reply))
            except BadInput as error:
                rejected[node] = str(error)
            else:
                contents.append(reply.content)
        if not updates:
            self._tell(server_round, len(replies))
            return None, None
        names = list(updates[0].tensors)
        moved = {n for u in updates for n, tensor in u.buffers.items() if not tensor.equal(self._sent[n])}
        updates = [replace(u, buffers={n: t for n, t in u.buffers.items() if n in moved}) for u in updates]
        try:
            state, aggregate = Server(self.aggregator, step=1.0).apply(
                self._sent, updates, self._root_update(server_round, names)
            )
        except BadInput as error:
            log.warning("fedaudit: round %d: the model stays as it was: %s", server_round, error)
            state = self._sent
        else:
            rejected |= {updates[row].client: reason for row, reason in aggregate.rejected.items()}
            if aggregate.fallback:
                log.warning("fedaudit: round %d: %s", server_round, aggregate.fallback)
        self._tell(server_round, len(replies))
        like = self._sent
        return ArrayRecord({name: state[name].to(like[name].dtype) for name in like}), self._metrics(contents)

    def _tell(self, server_round: int, replies: int) -> None:
        rejected = self.rejected[server_round]
        log.info("aggregate_train: %d of %d replies rejected", len(rejected), replies)
        for node, reason in rejected.items():
            log.info("\t> node %d: %s", node, reason)

    def _update(self, node: int, reply: Message) -> Update:
        """Return what a client changed; BadInput where the reply doesn't fit the model that was sent."""
        arrays, metrics = list(reply.content.array_records.values()), list(reply.content.metric_records.values())
        if len(arrays) != 1 or len(metrics) != 1:
            raise BadInput("the reply must have one ArrayRecord and one MetricRecord")
        examples = metrics[0].get(self.weighted_by_key)
        if not isinstance(examples, int | float) or not float(examples).is_integer() or examples < 1:
            raise BadInput(f"'{self.weighted_by_key}' is {examples}; it must be a whole number from 1")
        state = torch_state(arrays[0])
        if state.keys() != self._sent.keys():
            odd = sorted(state.keys() ^ self._sent.keys())[0]
            raise BadInput(f"the reply's tensors aren't the model's: '{odd}' is in one of them only")
        for name, tensor in state.items():
            if tensor.shape != self._sent[name].shape:
                raise BadInput(f"'{name}' has shape {tuple(tensor.shape)}, not {tuple(self._sent[name].shape)}")
            if not bool(torch.isfinite(tensor).all()):
                raise BadInput(f"'{name}' has NaN or infinite values")
        names = parameters_in(self._sent, self._given)
        return Update(
            client=node,
            kind="weights",
            tensors={name: _minus(state[name], self._sent[name]) for name in names},
            num_examples=int(examples),
            training=None,
            buffers={name: tensor for name, tensor in state.items() if name not in names},
        )

    def _root_update(self, server_round: int, names: Sequence[str]) -> dict[str, Tensor] | None:
        if self.root is None:
            return None
        state = self.root({name: tensor.clone() for name, tensor in self._sent.items()}, server_round)
        if missing := [name for name in names if name not in state]:
            raise BadInput(f"root: the state after the server's own training lacks '{missing[0]}'")
        return {name: _minus(state[name].detach().cpu(), self._sent[name]) for name in names}

    def _metrics(self, contents: list[Any]) -> MetricRecord | None:
        try:
            averaged: MetricRecord = self.train_metrics_aggr_fn(contents, self.weighted_by_key)
        except Exception as error:  # clients' metrics may be of any shape; they mustn't stop the training
            log.warning("fedaudit: the clients' metrics can't be averaged: %s: %s", type(error).__name__, error)
            return None
        return averaged


@dataclass(frozen=True)
class RootTraining:
    """The server's own training on its root data, as a client would train: by SGD from the global model.

    Args:
        module: of the same architecture; its state is overwritten.
        inputs: (n, …) as the model sees them.
        targets: (n,) or (n, …).
        learning_rate: as the clients'.
        momentum, weight_decay: as the clients'.
        batch_size: as the clients'.
        epochs: passes over the root data, as the clients'.
        loss: a registered name, or a function of (outputs, targets).
        seed: of the order of the examples.
    """

    module: nn.Module
    inputs: Tensor
    targets: Tensor
    learning_rate: float
    momentum: float = 0.0
    weight_decay: float = 0.0
    batch_size: int = 32
    epochs: int = 1
    loss: str | Loss = "cross-entropy"
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 < len(self.inputs) == len(self.targets):
            raise BadInput(f"root data: {len(self.inputs)} inputs and {len(self.targets)} targets")
        if isinstance(self.loss, str) and self.loss not in LOSSES:
            raise BadInput(f"root data: unknown loss '{self.loss}'; known: {', '.join(LOSSES)}")

    def __call__(self, state: dict[str, Tensor], server_round: int) -> dict[str, Tensor]:
        """Return the state after training from ``state``."""
        self.module.load_state_dict(state)
        self.module.train()
        batches = []
        for epoch in range(self.epochs):
            order = torch.randperm(len(self.inputs), generator=generator(self.seed, "root", server_round, epoch))
            batches += [(self.inputs[rows], self.targets[rows]) for rows in order.split(self.batch_size)]
        train(
            self.module,
            LOSSES[self.loss] if isinstance(self.loss, str) else self.loss,
            batches,
            learning_rate=self.learning_rate,
            momentum=self.momentum,
            weight_decay=self.weight_decay,
        )
        return {name: tensor.detach().clone() for name, tensor in self.module.state_dict().items()}


def _minus(after: Tensor, before: Tensor) -> Tensor:
    """Return the difference, in float32 where the model is in half precision: sums of its squares overflow there."""
    wide = torch.promote_types(before.dtype, torch.float32)
    return after.to(wide) - before.to(wide)
