"""A client in the simulator: what it holds, what it sends, and what it remembers from round to round."""

from __future__ import annotations

import copy
import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from fedaudit.data import Dataset
from fedaudit.data.dataset import Split
from fedaudit.defences.aggregation import Aggregator
from fedaudit.defences.client_defences import ClientContext, OwnExamples
from fedaudit.defences.privacy import DifferentialPrivacy
from fedaudit.defences.spec import DefencesSpec
from fedaudit.epsilon.canaries import CanaryRecords, CanarySpec
from fedaudit.models import set_training_mode
from fedaudit.simulation.arithmetic import fast_arithmetic
from fedaudit.simulation.behaviour import Behaviour, ClientStep
from fedaudit.simulation.checkpoint import State
from fedaudit.simulation.encoding import decode, encode
from fedaudit.simulation.history import History
from fedaudit.simulation.local_training import gradient, local_randomness, on_device, train, trainable
from fedaudit.simulation.record_draw import RecordDraw
from fedaudit.simulation.spec import FederationSpec
from fedaudit.task.info import TaskInfo
from fedaudit.task.training import Loss, TrainingConfig
from fedaudit.transcript.update import Update
from fedaudit.utils.errors import BadInput
from fedaudit.utils.finite import all_finite
from fedaudit.utils.seeds import derive_seed, generator

_CACHED = 400_000  # bytes


@dataclass(frozen=True)
class Federation:
    """One federation under one set of defences, with every part that was made for it: all that a simulation needs.

    A simulation changes none of its parts.

    Attributes:
        name: of the transcript.
        spec: of the federation.
        defences: in place.
        seed: of the scenario.
        dataset: whose ``split`` the clients hold.
        split: ``train`` or ``test``.
        task_info: what everybody knows.
        model: with the weights of round 0.
        loss: mean over a batch.
        reveal_labels: whether updates carry their labels, for threat models that grant them.
        client_data: what each client holds; the malicious ones are the last.
        drawn: the adversary's records, and on what accuracy is measured.
        during_training: whether malicious clients have these records while the federation runs.
        accuracy_every: accuracy is measured every so many rounds and after the last; None: never.
        accuracy_examples: on so many examples, at most.
        canaries: that an audit of ε puts in; None: none.
        planted: of canaries that are texts all of them, (m, length), and (m,) which clients hold.
        group_size: of how many clients' updates the transcript has the sum only, as secure aggregation yields it.
        device: on which models are trained and their accuracy is measured; what travels lies on the CPU.
    """

    name: str
    spec: FederationSpec
    defences: DefencesSpec
    seed: int
    dataset: Dataset
    split: str
    task_info: TaskInfo
    model: nn.Module
    loss: Loss
    reveal_labels: bool
    client_data: list[Split]
    drawn: RecordDraw
    during_training: bool
    accuracy_every: int | None = None
    accuracy_examples: int = 1000
    canaries: CanarySpec | None = None
    planted: tuple[Tensor, Tensor] | None = None
    group_size: int = 1
    device: str = "cpu"

    @property
    def aggregator(self) -> Aggregator:
        """Of the server."""
        return self.defences.aggregator

    @property
    def behaviour(self) -> Behaviour | None:
        """Of the malicious clients; None where there are none."""
        return self.spec.malicious.behaviour if self.spec.malicious else None


class Client:
    """One client: its data, its place in the current pass over them, its client-side defence's state.

    Args:
        number: from 0; the server's own trainer has another.
        layers: names of the parameters and buffers of each of the model's layers, in forward order.
        canaries: those among its records, if any.
        behaviour: of the federation's malicious clients, which share one.
    """

    def __init__(
        self,
        number: int,
        data: Split,
        federation: Federation,
        layers: tuple[tuple[str, ...], ...] = (),
        canaries: CanaryRecords | None = None,
        behaviour: Behaviour | None = None,
    ) -> None:
        self.number = number
        self.data = data
        self.device = federation.device
        self.inputs, self.targets = data.inputs.to(self.device), data.targets.to(self.device)
        self.task_info, self.loss = federation.task_info, on_device(federation.loss, self.device)
        self.reveal_labels = federation.reveal_labels
        self.spec, self.seed = spec, seed = federation.spec, federation.seed
        self.order = generator(seed, spec.name, "order", number)
        self.noise = generator(seed, spec.name, "sanitiser", number)
        self.client_defence = federation.defences.client_defence.anew()
        self.layers = layers
        self.own: dict[str, Tensor] = {}  # layers that stay here
        malicious = number >= spec.honest
        self.behaviour = behaviour if malicious else None
        self.records = federation.drawn.records if malicious and federation.during_training else None
        self.used = torch.zeros(len(data), dtype=torch.bool)  # which of its examples an update was made from
        self.behaviour_rng = generator(seed, spec.name, "behaviour", number)
        self.gradients: Callable[..., list[Tensor]] | None = None
        if isinstance(self.client_defence, DifferentialPrivacy) and self.client_defence.level == "sample":
            self.gradients = partial(self._clipped, self.client_defence)
        self.fast = spec.arithmetic == "fast" and self.gradients is None  # gradients of single examples are vmap's
        self.pending: list[Tensor] = []
        self.canaries = canaries
        self.riding: list[list[int]] = []  # which canaries ride along in each pending batch
        self.due: list[list[int]] = []  # in each batch of this round

    def state_dict(self) -> State:
        """Return what changes from round to round, for a checkpoint."""
        return {
            "order": self.order.get_state(),
            "noise": self.noise.get_state(),
            "draws": self.behaviour_rng.get_state(),
            "pending": self.pending,
            "riding": [self.riding, self.canaries.generator.get_state()] if self.canaries else None,
            "used": self.used,
            "client_defence": self.client_defence.state_dict(),
            "own": self.own,
        }

    def load_state_dict(self, state: State) -> None:
        """Go on from what :meth:`state_dict` returned."""
        self.order.set_state(state["order"])
        self.noise.set_state(state["noise"])
        self.behaviour_rng.set_state(state["draws"])
        self.pending = list(state["pending"])
        if self.canaries:
            self.riding, places = state["riding"]
            self.canaries.generator.set_state(places)
        self.used = state["used"]
        self.client_defence.load_state_dict(state["client_defence"])
        self.own = state.get("own", {})

    def _next(self) -> Tensor:
        """Return the row numbers of the next mini-batch: pass after pass, each shuffled anew.

        A pass's last batch may be short; a client with fewer examples than ``batch_size`` has one batch, of them all.
        """
        if not self.pending:
            order = torch.randperm(len(self.data), generator=self.order)
            self.pending = list(order.split(min(self.spec.batch_size, len(self.data))))
            if self.canaries:
                self.riding = self.canaries.places(list(map(len, self.pending)))
        if self.canaries:
            self.due.append(self.riding.pop(0))
        return self.pending.pop(0)

    def _clipped(
        self, dp: DifferentialPrivacy, model: nn.Module, loss: Loss, batch: tuple[Tensor, Tensor]
    ) -> list[Tensor]:
        """Return the gradient of a batch, with each example's clipped, also the canaries' that ride along."""
        canaries = self.canaries
        if canaries is None:
            return dp.gradients(model, loss, batch, self.noise)
        parameters = [p for p in model.parameters() if p.requires_grad]
        return dp.gradients(
            model, loss, batch, self.noise, canaries.gradients(self.due.pop(0) if self.due else [], parameters)
        )

    def _batches(self) -> list[Tensor]:
        if self.spec.algorithm == "fedsgd":
            return [self._next()]
        if self.spec.local_steps is not None:
            return [self._next() for _ in range(self.spec.local_steps)]
        per_epoch = math.ceil(len(self.data) / self.spec.batch_size)
        return [self._next() for _ in range((self.spec.local_epochs or 1) * per_epoch)]

    def train(self, model: nn.Module, index: int, start: dict[str, Tensor]) -> tuple[dict[str, Tensor], list[Tensor]]:
        """Train ``model`` in place for round ``index``; return gradient or ΔW, on the CPU, and each batch's rows."""
        self.due = []
        rows = self._batches()
        self.used[torch.cat(rows)] = True
        task_info, loss, device = self.task_info, self.loss, self.device
        batches = self._examples(rows)
        if self.client_defence.augments:
            batches = self.client_defence.augment(OwnExamples(model, loss, batches), task_info, self.noise)
        begun = {name: value.to(device) for name, value in start.items()}
        honest = partial(self._honest, model, begun)
        set_training_mode(model, task_info.batch_norm, dropout=task_info.dropout)
        with local_randomness(derive_seed(self.seed, self.spec.name, "dropout", self.number, index)):
            if self.behaviour is None:
                tensors = honest(batches)
            else:
                records, held = self.records, None
                if records is not None:
                    held = task_info.normalise(records.inputs).to(device), records.labels.to(device)
                own = {name: value.clone() for name, value in begun.items()}  # whoever wrote it may change them
                step = ClientStep(
                    index, self.number, model, own, batches, honest, task_info, loss, self.behaviour_rng, held
                )
                tensors = self.behaviour(step)
        return {name: value.cpu() for name, value in tensors.items()}, rows

    def _examples(self, rows: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
        """Return each batch's inputs, as the model sees them, and its targets.

        On the CPU a few batches are drawn at a time: as many as the cache holds from one step of this to the next.
        """
        few = max(1, _CACHED // (len(rows[0]) * self.data.inputs[0].nbytes)) if self.device == "cpu" else len(rows)
        batches: list[tuple[Tensor, Tensor]] = []
        for first in range(0, len(rows), few):
            some = rows[first : first + few]
            drawn, sizes = torch.cat(list(some)).to(self.device), [len(r) for r in some]
            inputs = self.task_info.normalise(self.inputs.index_select(0, drawn)).split(sizes)
            batches.extend(zip(inputs, self.targets.index_select(0, drawn).split(sizes), strict=True))
        return batches

    def _honest(
        self,
        model: nn.Module,
        start: dict[str, Tensor],
        batches: Sequence[tuple[Tensor, Tensor]],
        limit: float | None = None,
    ) -> dict[str, Tensor]:
        """Return the gradient of the first batch, or ΔW after training ``model`` in place on all of them."""
        spec, loss = self.spec, self.loss
        with fast_arithmetic(model) if self.fast else nullcontext():
            if spec.algorithm == "fedsgd":
                own = gradient(model, loss, batches[0], self.gradients)
                return {name: value.contiguous() for name, value in own.items()}
            train(
                model,
                loss,
                batches,
                learning_rate=spec.learning_rate,
                momentum=spec.momentum,
                weight_decay=spec.weight_decay,
                proximal_mu=spec.proximal_mu,
                gradients=self.gradients,
                limit=limit,
            )
        return {name: p.detach() - start[name] for name, p in trainable(model).items()}

    def run_round(
        self, model: nn.Module, index: int, start: dict[str, Tensor], history: History
    ) -> tuple[Update, Tensor]:
        """Return the update of round ``index`` as it arrives, and the rows of the examples it was made of, in order."""
        spec = self.spec
        began = time.perf_counter()
        if self.own:
            model.load_state_dict(start | self.own)
        tensors, rows = self.train(model, index, start)
        history.training_seconds += time.perf_counter() - began
        home = self.client_defence.at_home(list(start))
        self.own = {name: value.to("cpu", copy=True) for name, value in model.state_dict().items() if name in home}
        buffers = {name for name, _ in model.named_buffers()}
        end = {name: value.to("cpu", copy=True) for name, value in model.state_dict().items() if name in buffers}
        moved = {name: value for name, value in end.items() if not value.equal(start[name])}
        if not all_finite(moved.values()):
            raise BadInput(
                f"BatchNorm's statistics are not finite after client {self.number}'s training; lower learning_rate"
            )
        used = torch.cat(rows)
        update = Update(
            client=self.number,
            kind="gradient" if spec.algorithm == "fedsgd" else "weights",
            tensors=tensors,
            num_examples=len(used),
            training=TrainingConfig(
                learning_rate=spec.learning_rate,
                local_steps=len(rows),
                batch_sizes=tuple(len(r) for r in rows),
                momentum=spec.momentum if spec.algorithm != "fedsgd" else 0.0,
                weight_decay=spec.weight_decay if spec.algorithm != "fedsgd" else 0.0,
                proximal_mu=spec.proximal_mu,
                data_size=len(self.data),
            ),
            buffers=moved,
            labels=self.data.targets[used] if self.reveal_labels else None,
        )
        began = time.perf_counter()
        own = self._own(model, start, rows) if self.client_defence.needs_examples else None
        context = ClientContext(start, self.layers, spec.clients_per_round or spec.clients, own)
        update = self.client_defence(update, context, self.noise)
        history.client_defence_seconds += time.perf_counter() - began
        return self._send(update, start, history), used

    def _own(self, model: nn.Module, start: dict[str, Tensor], rows: Sequence[Tensor]) -> OwnExamples:
        """Return what a client-side defence is given that looks at the examples."""
        received = copy.deepcopy(model)
        received.load_state_dict(start)
        return OwnExamples(received, self.loss, self._examples(rows))

    def _send(self, update: Update, start: dict[str, Tensor], history: History) -> Update:
        """Return the update as it is read from the bytes that travel."""
        message = encode({**update.tensors, **update.buffers}, list(start))
        arrived = decode(message, start)
        sparse = update.sanitised is not None and update.sanitised.sparse
        count = torch.count_nonzero if sparse else torch.numel
        history.bytes.append(len(message))
        history.parameters.append(sum(int(count(tensor)) for tensor in update.tensors.values()))
        return dataclasses.replace(
            update,
            tensors={name: arrived[name] for name in update.tensors},
            buffers={name: arrived[name] for name in update.buffers},
        )
