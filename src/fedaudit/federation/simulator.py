"""A deterministic federation in this process: a server, its clients, and the transcript of what travelled."""

from __future__ import annotations

import copy
import dataclasses
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from fedaudit.data import Dataset
from fedaudit.data.dataset import Split
from fedaudit.data.partition import partition
from fedaudit.defences.aggregation import BoundAggregator, make_aggregator
from fedaudit.defences.privacy import Account, DifferentialPrivacy, account, central_noise
from fedaudit.defences.sanitising import SANITISERS, Received, make_sanitiser
from fedaudit.defences.settings import check_settings
from fedaudit.errors import BadInput
from fedaudit.federation.client import Gradients, gradient, local_randomness, train, trainable
from fedaudit.federation.course import Course
from fedaudit.federation.encoding import decode, encode
from fedaudit.federation.server import Server
from fedaudit.federation.spec import DefencesSpec, FederationSpec
from fedaudit.federation.transcript import Round, Transcript
from fedaudit.federation.truth import Truth
from fedaudit.models import layer_groups, set_training_mode
from fedaudit.seeds import derive_seed, generator
from fedaudit.update import Loss, Setup, Tensors, TrainingFacts, Update
from fedaudit.validation import check_memory

Report = Callable[[float], None]

Layers = tuple[tuple[str, ...], ...]

_SERVER = -1  # its number where it trains itself: clients count from 0


@dataclass(frozen=True)
class Federation:
    """What a simulation needs beside its spec.

    Attributes:
        dataset: whose ``split`` the clients hold.
        split: ``train`` or ``test``.
        setup: what everybody knows.
        model: with the weights of round 0; it isn't changed.
        loss: mean over a batch.
        reveal_labels: whether updates carry their labels, for threat models that grant them.
    """

    dataset: Dataset
    split: str
    setup: Setup
    model: nn.Module
    loss: Loss
    reveal_labels: bool


def simulate(
    federation: Federation,
    spec: FederationSpec,
    defences: DefencesSpec,
    *,
    seed: int,
    report: Report | None = None,
    course: Course | None = None,
) -> tuple[Transcript, Truth]:
    """Run ``spec.rounds`` rounds and return what travelled, and, apart from it, what the clients trained on.

    Where a privacy budget is spent earlier, fewer. With ``spec.record`` only those rounds are returned.

    Args:
        federation: data, model, loss.
        spec: of the federation.
        defences: in place.
        seed: of the scenario.
        report: called with the updates made so far.
        course: is told how it goes.

    Raises:
        BadInput: the spec asks for more examples, clients or batches than there are.
    """
    _check_size(federation, spec)
    shares = spread(federation.dataset, federation.split, spec, seed=seed)
    model = copy.deepcopy(federation.model)
    layers = _layers(federation)
    clients = [_Client(i, share, federation, spec, defences, seed, layers) for i, share in enumerate(shares)]
    aggregator = make_aggregator(defences.aggregator.name, defences.aggregator.settings())
    root = _root(aggregator, shares, federation, spec, seed)
    course = course or Course()
    per_round = spec.clients_per_round or spec.clients
    budget = _Budget(spec, defences, shares, course)
    step = -spec.learning_rate if spec.algorithm == "fedsgd" else 1.0
    server = Server(aggregator, step, budget.central_noise, generator(seed, spec.name, "central noise"))
    held_out = federation.dataset.test if federation.split == "train" else federation.dataset.train
    sampler = generator(seed, spec.name, "sampling")
    rounds: list[Round] = []
    inputs: dict[tuple[int, int], Tensor] = {}
    labels: dict[tuple[int, int], Tensor] = {}
    rows: dict[tuple[int, int], Tensor] = {}
    for index in range(spec.rounds):
        weights = {name: value.detach().clone() for name, value in model.state_dict().items()}
        chosen = sorted(torch.randperm(spec.clients, generator=sampler)[:per_round].tolist())
        chosen = budget.admit(chosen)
        if not chosen:
            course.stopped = index
            break
        kept = spec.record is None or index in spec.record
        updates = []
        for position, number in enumerate(chosen):
            model.load_state_dict(weights)
            update, used = clients[number].participate(model, index, weights, course)
            updates.append(update)
            if kept:
                examples = clients[number].data[used]
                inputs[index, number], labels[index, number] = examples.inputs, examples.targets
                rows[index, number] = used
            if report:
                report(index * per_round + position + 1)
        model.load_state_dict(weights)
        own = root.train(model, index)[0] if root else None
        state, aggregate = server.apply(weights, updates, own)
        model.load_state_dict(state)
        rejected = {updates[row].client: reason for row, reason in aggregate.rejected.items()}
        if kept:
            rounds.append(Round(index, weights, updates, rejected, aggregate.fallback))
        budget.close(index)
        last = index + 1 == spec.rounds
        course.measure(model, federation.setup, held_out, shares, index + 1, last)
    if course.stopped is not None and course.rounds[-1:] != [course.stopped]:
        course.measure(model, federation.setup, held_out, shares, course.stopped, True)
    budget.end()
    if not rounds:
        raise BadInput(
            f"federation '{spec.name}': the privacy budget was spent before any recorded round; raise epsilon or noise"
        )
    transcript = Transcript(spec.name, federation.setup, copy.deepcopy(federation.model), federation.loss, rounds)
    candidates = _candidates(federation, inputs, labels, rows)
    return transcript, Truth(inputs, labels, candidates.inputs, candidates.targets, {}, rows)


def spread(dataset: Dataset, split: str, spec: FederationSpec, *, seed: int) -> list[Split]:
    """Return what each client of ``spec`` holds; quick, so that what doesn't fit is found before any training.

    Args:
        dataset: whose ``split`` (train or test) the clients hold.
        split: train or test.
        spec: of the federation.
        seed: of the scenario.

    Raises:
        BadInput: there are too few examples, or the partition can't be made.
    """
    pool = dataset.train if split == "train" else dataset.test
    try:
        held = pool[_held_examples(pool, spec.examples)]
        if len(held) < spec.clients:
            raise BadInput(f"{len(held)} examples can't be spread over {spec.clients} clients")
        chance = generator(seed, spec.name, "partition")
        options = spec.partition.options()
        rows = partition(spec.partition.scheme, held.targets, spec.clients, chance, groups=held.groups, **options)
    except BadInput as error:
        raise BadInput(f"federation '{spec.name}': {error}") from None
    return [held[share] for share in rows]


def _check_size(federation: Federation, spec: FederationSpec) -> None:
    """Refuse a transcript that can't fit into memory, and training that would take for ever, before it begins."""
    rounds = spec.rounds if spec.record is None else len(spec.record)
    sent = rounds * (spec.clients_per_round or spec.clients)
    tensors = (sent + rounds) * sum(t.numel() for t in federation.model.state_dict().values())
    pixels = sent * (spec.local_steps or 1) * spec.batch_size * math.prod(federation.setup.input_shape)
    check_memory(4 * (tensors + pixels), f"federation '{spec.name}' ({sent:,} updates)")


def _root(
    aggregator: BoundAggregator, shares: list[Split], federation: Federation, spec: FederationSpec, seed: int
) -> _Client | None:
    """Return a trainer on the server's own root data, a random part of what the clients hold, if the rule wants one."""
    if not aggregator.info.get("root"):
        return None
    wanted = aggregator.settings["root_examples"]
    owned = Split(torch.cat([s.inputs for s in shares]), torch.cat([s.targets for s in shares]))
    if wanted > len(owned):
        raise BadInput(
            f"federation '{spec.name}': root_examples is {wanted}, but the clients hold {len(owned)} examples "
            "together; lower defences.aggregator.root_examples"
        )
    rows = torch.randperm(len(owned), generator=generator(seed, spec.name, "root"))[:wanted]
    return _Client(_SERVER, owned[rows], federation, spec, DefencesSpec(), seed, ())


class _Client:
    """One client: its data, its place in the current pass over them, its sanitiser's state."""

    def __init__(
        self,
        number: int,
        data: Split,
        federation: Federation,
        spec: FederationSpec,
        defences: DefencesSpec,
        seed: int,
        layers: Layers,
    ) -> None:
        self.number = number
        self.data = data
        self.federation = federation
        self.spec = spec
        self.seed = seed
        self.order = generator(seed, spec.name, "order", number)
        self.noise = generator(seed, spec.name, "sanitiser", number)
        self.sanitiser = make_sanitiser(defences.sanitiser.name, defences.sanitiser.settings())
        self.layers = layers
        self.gradients: Gradients | None = None
        if isinstance(self.sanitiser, DifferentialPrivacy) and self.sanitiser.level == "sample":
            self.gradients = partial(self.sanitiser.gradients, generator=self.noise)
        self.stream = self._passes()

    def _passes(self) -> Iterator[Tensor]:
        """Yield mini-batches of row numbers, pass after pass, each shuffled anew; a pass's last batch may be short.

        A client with fewer than ``batch_size`` examples has one batch, of all that it has.
        """
        while True:
            yield from torch.randperm(len(self.data), generator=self.order).split(
                min(self.spec.batch_size, len(self.data))
            )

    def _batches(self) -> list[Tensor]:
        if self.spec.algorithm == "fedsgd":
            return [next(self.stream)]
        if self.spec.local_steps is not None:
            return [next(self.stream) for _ in range(self.spec.local_steps)]
        per_epoch = math.ceil(len(self.data) / self.spec.batch_size)
        return [next(self.stream) for _ in range((self.spec.local_epochs or 1) * per_epoch)]

    def train(self, model: nn.Module, index: int) -> tuple[Tensors, list[Tensor]]:
        """Train ``model`` in place for round ``index``; return gradient or ΔW, and the rows of each batch."""
        rows = self._batches()
        setup, spec = self.federation.setup, self.spec
        batches = [(setup.normalise(self.data.inputs[r]), self.data.targets[r]) for r in rows]
        start = {name: value.detach().clone() for name, value in model.state_dict().items()}
        set_training_mode(model, setup.batch_norm)
        with local_randomness(derive_seed(self.seed, spec.name, "dropout", self.number, index)):
            if spec.algorithm == "fedsgd":
                tensors = gradient(model, self.federation.loss, batches[0], self.gradients)
            else:
                train(
                    model,
                    self.federation.loss,
                    batches,
                    learning_rate=spec.learning_rate,
                    momentum=spec.momentum,
                    weight_decay=spec.weight_decay,
                    proximal_mu=spec.proximal_mu,
                    gradients=self.gradients,
                )
                tensors = {name: p.detach() - start[name] for name, p in trainable(model).items()}
        return tensors, rows

    def participate(self, model: nn.Module, index: int, start: Tensors, course: Course) -> tuple[Update, Tensor]:
        """Return the update of round ``index`` as it arrives, and the rows of the examples it was made from, in order.

        Args:
            model: with the weights of the round.
            index: of the round.
            start: these weights.
            course: is told what it cost.
        """
        spec = self.spec
        began = time.perf_counter()
        tensors, rows = self.train(model, index)
        course.training_seconds += time.perf_counter() - began
        end = model.state_dict()
        moved = {
            n: end[n].detach().clone() for n, _ in model.named_buffers() if n in end and not end[n].equal(start[n])
        }
        if not all(torch.isfinite(value).all() for value in moved.values()):
            raise BadInput(
                f"BatchNorm's statistics are not finite after client {self.number}'s training; lower learning_rate"
            )
        used = torch.cat(rows)
        update = Update(
            client=self.number,
            kind="gradient" if spec.algorithm == "fedsgd" else "weights",
            tensors=tensors,
            num_examples=len(used),
            facts=TrainingFacts(
                learning_rate=spec.learning_rate,
                local_steps=len(rows),
                batch_sizes=tuple(len(r) for r in rows),
                momentum=spec.momentum if spec.algorithm != "fedsgd" else 0.0,
                weight_decay=spec.weight_decay if spec.algorithm != "fedsgd" else 0.0,
                proximal_mu=spec.proximal_mu,
                data_size=len(self.data),
            ),
            buffers=moved,
            labels=self.data.targets[used] if self.federation.reveal_labels else None,
        )
        began = time.perf_counter()
        received = Received(start, self.layers, spec.clients_per_round or spec.clients)
        update = self.sanitiser(update, received, self.noise)
        course.sanitising_seconds += time.perf_counter() - began
        return self._send(update, start, course), used

    def _send(self, update: Update, start: Tensors, course: Course) -> Update:
        """Return the update as it is read from the bytes that travel."""
        message = encode({**update.tensors, **update.buffers}, list(start))
        arrived = decode(message, start)
        sparse = update.sanitised is not None and update.sanitised.sparse
        count = torch.count_nonzero if sparse else torch.numel
        course.bytes.append(len(message))
        course.parameters.append(sum(int(count(tensor)) for tensor in update.tensors.values()))
        return dataclasses.replace(
            update,
            tensors={name: arrived[name] for name in update.tensors},
            buffers={name: arrived[name] for name in update.buffers},
        )


class _Budget:
    """Who may still send, where the updates have differential privacy."""

    def __init__(self, spec: FederationSpec, defences: DefencesSpec, shares: list[Split], course: Course) -> None:
        self.course = course
        self.account: Account | None = None
        self.central_noise = 0.0
        self.sent = [0] * spec.clients
        self.finished = 0
        if defences.sanitiser.name != "dp":
            return
        settings = check_settings(SANITISERS, "dp", defences.sanitiser.settings())
        fewest = min(map(len, shares))
        batch = min(spec.batch_size, fewest)
        epoch = math.ceil(max(map(len, shares)) / batch)
        steps = spec.local_steps or (spec.local_epochs or 0) * epoch or 1
        per_round = spec.clients_per_round or spec.clients
        self.central = settings["where"] == "central"
        self.central_noise = central_noise(settings, per_round, batch)
        self.account = account(
            settings, clients=spec.clients, per_round=per_round, steps=steps, batch=batch, fewest=fewest
        )
        self.allowed = self.account.rounds(settings["epsilon"])

    def admit(self, chosen: list[int]) -> list[int]:
        """Return who of ``chosen`` may send."""
        if self.account is None:
            return chosen
        if self.central:
            return chosen if self.finished < self.allowed else []
        admitted = [number for number in chosen if self.sent[number] < self.allowed]
        for number in admitted:
            self.sent[number] += 1
        return admitted

    def close(self, index: int) -> None:
        """Note what has been spent when round ``index`` is over: locally, by the client that sent most often."""
        self.finished = index + 1
        if self.account is not None:
            self.course.epsilon.append(self.account.spent(self._counted()))

    def end(self) -> None:
        """Note what was spent in all, by the tighter account."""
        if self.account is not None:
            self.course.epsilon_pld = self.account.spent(self._counted(), "pld")

    def _counted(self) -> int:
        return self.finished if self.central else max(self.sent)


def _layers(federation: Federation) -> Layers:
    """Return the names of each layer's parameters and statistics, in forward order."""
    sample = federation.setup.normalise(torch.zeros(2, *federation.setup.input_shape))
    groups = {layer.name: list(layer.parameters) for layer in layer_groups(federation.model, sample)}
    for name, _ in federation.model.named_buffers():
        owner = name.rpartition(".")[0]
        if owner in groups:
            groups[owner].append(name)
    return tuple(map(tuple, groups.values()))


def _held_examples(pool: Split, examples: int | None) -> Tensor:
    """Return the rows of ``pool`` that clients hold: all, or the first ones of every class in turn."""
    if examples is None:
        return torch.arange(len(pool))
    if examples > len(pool):
        raise BadInput(f"{examples} examples are asked for, but the split has {len(pool)}; lower 'examples'")
    if pool.targets.is_floating_point():
        return torch.arange(examples)
    seen: dict[int, int] = {}
    turns = []
    for row, label in enumerate(pool.targets.tolist()):
        seen[label] = seen.get(label, 0) + 1
        turns.append((seen[label], label, row))
    return torch.tensor([row for _, _, row in sorted(turns)[:examples]])


def _candidates(
    federation: Federation,
    inputs: dict[tuple[int, int], Tensor],
    labels: dict[tuple[int, int], Tensor],
    rows: dict[tuple[int, int], Tensor],
) -> Split:
    """Return the held-out examples, with the victims (each once) in front where these come from elsewhere."""
    test = federation.dataset.test
    if federation.split == "test":
        return test
    seen: dict[bytes, tuple[Tensor, Tensor]] = {}
    used: set[tuple[int, int]] = set()  # (client, row): looking at numbers is quicker than at examples
    for key, batch in inputs.items():
        for i, row in enumerate(rows[key].tolist()):
            if (key[1], row) not in used:
                used.add((key[1], row))
                seen.setdefault(batch[i].numpy().tobytes(), (batch[i], labels[key][i]))
    victims, targets = zip(*seen.values(), strict=True)
    return Split(torch.cat([torch.stack(victims), test.inputs]), torch.cat([torch.stack(targets), test.targets]))
