"""Property inference: which clients hold examples with a property that has nothing to do with the task."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from fedaudit.attacks.base import Attack, Case, Progress, register
from fedaudit.attacks.findings import Finding
from fedaudit.attacks.victim import distinct_examples
from fedaudit.models import set_training_mode
from fedaudit.simulation.local_training import gradient, local_randomness, train, trainable
from fedaudit.task.info import TaskInfo
from fedaudit.transcript.observation import Message, Observation
from fedaudit.transcript.queries import QuerySet
from fedaudit.utils.errors import BadInput, NotApplicable
from fedaudit.utils.validation import Count, Share

_COORDINATES = 65_536  # of an update that a classifier sees; longer ones are sketched
_PLANS = 3  # ways of training (numbers of steps and examples) that are told apart in a round
_FLOOR = 0.1  # of the median spread: coordinates that move less than that are scaled as if they moved so much
_TREES = 100


@dataclass(frozen=True, kw_only=True)
class PropertyFinding(Finding, kind="property"):
    """Of each client, how much its updates look like those of clients with the property.

    Attributes:
        clients: (k,) int64, their numbers, ascending.
        scores: (k,) float64; the higher, the more likely the property, above 0 rather than not.
    """

    clients: Tensor
    scores: Tensor


@register
class PropertyInference(Attack):
    """A classifier of updates, learnt on those of stand-ins with the property and without (Melis et al. 2019).

    As in the paper's passive attack (Algorithm 3) the adversary takes each round's global model, makes updates of
    batches of its own examples with the property and without it, and trains a binary classifier on them, which scores
    what the clients sent. A client's score is the mean over its updates. Departures: (1) a classifier for each round
    and number of examples, centred and scaled by what it says of its own stand-ins, where the paper has one for all
    rounds. (2) A stand-in with the property has as many examples of every class as one without: else labels alone would
    tell them apart, and a client's labels would pass for the property. (3) The classifier is a ridge-regularised
    logistic regression: what labels do to its score is linear, too, so that the evaluation can take it out. ``forest``
    is a random forest; the authors' code has both, on absolute values of updates of unit length, which isn't linear.
    Of several labels as many are matched as leave half of the examples, those that go with the property most first;
    numbers and masks aren't matched. (4) Updates of more than 65,536 elements are sketched: each element is added to
    one of so many sums, with a random sign. (5) Stand-ins train as the client did, in as many steps.

    Args:
        updates: stand-ins with the property, and as many without, for each round and number of examples.
        share: of a stand-in's examples that have the property, where it has it.
        otherwise: the same, where it lacks it.
        classifier: ``logistic`` or ``forest``.
        rounds: ``all``; ``first``, each client's first update alone; ``last``, its last one.
    """

    name = "property-inference"
    summary = "tells which clients' data have a property, by a classifier of updates"
    paper = "Melis et al. 2019 (Exploiting unintended feature leakage in collaborative learning)"
    threat_model = "server or eavesdropper, passive"
    needs = (
        "examples of which the property is known (threat.client_property, threat.public_examples)",
        "updates of two clients or more, each by itself, and how they train",
    )
    default_scope = "federation"
    recovers = "properties of clients"
    finds = PropertyFinding
    on_sums = "refused: a sum is no client's own"

    updates: Annotated[Count, Field(ge=10, le=10_000)] = 100
    share: Share = 1.0
    otherwise: Share = 0.0
    classifier: Literal["logistic", "forest"] = "logistic"
    rounds: Literal["all", "first", "last"] = "all"

    @classmethod
    def fits(cls, case: Case) -> bool:
        return (
            case.threat.client_property is not None
            and case.threat.public_examples is not None
            and case.reads_clients
            and case.knows_scale
        )

    def __post_init__(self) -> None:
        if self.share <= self.otherwise:
            raise BadInput(f"attack '{self.name}': share {self.share:g} must be above otherwise, {self.otherwise:g}")

    def check(self, observation: Observation) -> None:
        """Raise unless there are examples with the property and without, and updates whose training can be repeated."""
        messages = observation.messages
        if any(message.update.members for message in messages):
            raise NotApplicable(
                f"{self.name} asks what single clients hold, and only sums of several clients' updates are known "
                "(secure aggregation); audit with threat.sees=updates"
            )
        super().check(observation)
        observation.need_messages()
        stock(observation.records, observation.task_info)
        if len({message.client for message in messages}) < 2:
            raise NotApplicable(f"{self.name} compares clients, and updates of one only are known")
        for training in (message.update.training for message in messages if message.update.kind == "weights"):
            if training is None:
                raise NotApplicable("how the clients train isn't known, and stand-ins do as they do; set "
                                    "threat.knows_training: true")  # fmt: skip
            if not training.plain_sgd:
                raise NotApplicable("clients don't train by plain SGD, and stand-ins can't do as they do: see "
                                    "docs/reference/methods.md")  # fmt: skip

    def _run(
        self, observation: Observation, generator: torch.Generator, _device: str, progress: Progress
    ) -> PropertyFinding:
        held = stock(observation.records, observation.task_info)
        groups = _grouped(self._chosen(observation.messages))
        total, done = 2 * self.updates * len(groups), 0
        scores: dict[int, list[float]] = {}
        for model, messages in groups:
            sketch = _sketch(len(flat(model.update.tensors, model)), generator)
            made: list[list[Tensor]] = [[], []]
            for _ in range(self.updates):
                pair = held.pair(distinct_examples(model), self.share, self.otherwise, generator)
                for kind, rows in enumerate(reversed(pair)):
                    made[kind].append(sketch(send(observation, model, held, rows, generator)))
                done += 2
                progress(done, total)
            seen = torch.stack([sketch(flat(message.update.tensors, message)) for message in messages])
            own = self._scores(torch.stack([*made[0], *made[1]]), seen, generator)
            for message, score in zip(messages, own.tolist(), strict=True):
                scores.setdefault(message.client, []).append(score)
        clients = sorted(scores)
        return PropertyFinding(
            clients=torch.tensor(clients, dtype=torch.int64),
            scores=torch.tensor([sum(scores[c]) / len(scores[c]) for c in clients], dtype=torch.float64),
            notes=_notes(held, self.updates),
        )

    def _chosen(self, messages: Sequence[Message]) -> list[Message]:
        if self.rounds == "all":
            return list(messages)
        order = messages if self.rounds == "last" else tuple(reversed(messages))
        return sorted({message.client: message for message in order}.values(), key=lambda m: (m.round, m.client))

    def _scores(self, made: Tensor, seen: Tensor, generator: torch.Generator) -> Tensor:
        """Return (k,) scores of what was seen (k, d), in spreads of the stand-ins' own (2·updates, d).

        The first half of the stand-ins is without the property.
        """
        centre, spread = made.mean(dim=0), made.std(dim=0)
        floor = _FLOOR * float(spread[spread > 0].median()) if bool((spread > 0).any()) else 1.0
        scale = spread.clamp_min(floor) * len(spread) ** 0.5
        known, others = ((part - centre) / scale for part in (made, seen))
        others = others.nan_to_num(nan=0.0, posinf=1e6, neginf=-1e6)
        half = len(made) // 2
        classes = (torch.arange(len(made)) >= half).numpy()
        own, found = (_forest if self.classifier == "forest" else _logistic)(known, classes, others, generator)
        middle = float((own[:half].mean() + own[half:].mean()) / 2)
        return torch.as_tensor((found - middle) / max(float(own.std()), 1e-12))


def _sketch(size: int, generator: torch.Generator) -> Callable[[Tensor], Tensor]:
    """Return what makes (size,) tensors shorter and keeps inner products on average (count sketch), if long."""
    if size <= _COORDINATES:
        return lambda values: values.detach().double()
    place = torch.randint(_COORDINATES, (size,), generator=generator)
    sign = torch.randint(2, (size,), generator=generator) * 2.0 - 1
    zeros = torch.zeros(_COORDINATES, dtype=torch.float64)
    return lambda values: zeros.index_add(0, place, values.detach().double() * sign)


def _logistic(known: Tensor, classes: Any, others: Tensor, _: torch.Generator) -> tuple[Any, Any]:
    """Return log-odds of stand-ins and of others, by a logistic regression with a ridge penalty.

    Inner products alone suffice: the weights lie in the span of the stand-ins.
    """
    from sklearn.linear_model import LogisticRegression

    values, vectors = torch.linalg.eigh(known @ known.T)
    keep = values > 1e-10 * values.max().clamp_min(1e-300)
    basis = vectors[:, keep] / values[keep].sqrt()
    made, found = (known @ known.T) @ basis, (others @ known.T) @ basis
    if not made.shape[1]:
        return np.zeros(len(known)), np.zeros(len(others))
    classifier = LogisticRegression(C=1.0, max_iter=2000).fit(made.numpy(), classes)
    return classifier.decision_function(made.numpy()), classifier.decision_function(found.numpy())


def _forest(known: Tensor, classes: Any, others: Tensor, generator: torch.Generator) -> tuple[Any, Any]:
    """Return the share of trees that vote for the property, of stand-ins by the trees that didn't learn from them."""
    from sklearn.ensemble import RandomForestClassifier

    seed = int(torch.randint(2**31, (1,), generator=generator))
    forest = RandomForestClassifier(_TREES, oob_score=True, random_state=seed, n_jobs=1).fit(known.numpy(), classes)
    own = np.nan_to_num(forest.oob_decision_function_[:, 1], nan=0.5)
    return own, forest.predict_proba(others.numpy())[:, 1]


def _grouped(messages: Sequence[Message]) -> list[tuple[Message, list[Message]]]:
    """Return the messages that one classifier is for, with the one after which its stand-ins are modelled.

    They answer the same weights, after the same training. Of more than three ways to train in a round, the one on
    fewest examples, the middle one and the one on most are kept, and each message goes to the nearest.
    """
    rounds: dict[tuple[int, int, tuple[str, ...]], dict[Any, list[Message]]] = {}
    for message in messages:
        update = message.update
        ways = rounds.setdefault((message.round, id(message.weights), tuple(sorted(update.tensors))), {})
        ways.setdefault((distinct_examples(message), update.num_examples, update.training), []).append(message)
    groups = []
    for ways in rounds.values():
        order = sorted(ways, key=lambda way: way[:2])
        picked = [order[round(i * (len(order) - 1) / (_PLANS - 1))] for i in range(_PLANS)]
        kept = order if len(order) <= _PLANS else picked
        nearest: dict[Any, list[Message]] = {way: [] for way in kept}
        for way, own in ways.items():
            nearest[way if way in nearest else min(kept, key=lambda k, w=way: abs(k[1] - w[1]))] += own  # type: ignore[misc]
        groups += [(ways[way][0], own) for way, own in nearest.items()]
    return groups


def _notes(held: Stock, updates: int) -> tuple[str, ...]:
    least = min(len(rows) for cell in held.cells for rows in cell)
    alike = held.matched is None
    unmatched = f"{held.matched} differ between stand-ins, too: what tells clients apart may be these"
    many = f"{updates} stand-ins with the property and as many without, for each round and number of examples"
    said = f"{many}, of {len(held.labels)} public examples; of the rarest sort of a class there are {least}"
    return (said,) if alike else (said, unmatched)


@dataclass(frozen=True)
class Stock:
    """The adversary's examples, sorted by class and by whether they have the property.

    Attributes:
        inputs: (m, ...) as the model sees them.
        labels: (m,) or (m, 1).
        cells: for each class that has both sorts, the rows without the property and those with it.
        matched: what of the targets isn't alike with the property and without; None: nothing.
    """

    inputs: Tensor
    labels: Tensor
    cells: tuple[tuple[Tensor, Tensor], ...]
    frequencies: Tensor
    matched: str | None = None

    def pair(self, size: int, share: float, otherwise: float, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Return rows (size,) of a stand-in with the property and of one without: the same classes, as often.

        Nothing is drawn twice while there are enough examples of a class and sort. ``share`` and ``otherwise``: how
        many of them have the property, with and without.
        """
        counts = torch.bincount(
            torch.multinomial(self.frequencies, size, replacement=True, generator=generator), minlength=len(self.cells)
        )
        chosen: list[list[Tensor]] = [[], []]
        for cell, count in zip(self.cells, counts.tolist(), strict=True):
            for rows, part in zip(chosen, (otherwise, share), strict=True):
                marked = round(part * count)
                rows += [_draw(cell[0], count - marked, generator), _draw(cell[1], marked, generator)]
        return torch.cat(chosen[1]), torch.cat(chosen[0])


def stock(records: QuerySet | None, info: TaskInfo) -> Stock:
    """Return the adversary's examples whose property it knows, sorted by class, or by labels as far as it goes."""
    if records is None or not len(records.public_property):
        raise NotApplicable(
            "the adversary knows no examples with and without a property; set threat.client_property, to 'sex=Female' "
            "for example, threat.knows_public_data: true and threat.public_examples"
        )
    labels, marks = records.public_labels, records.public_property
    differ = None
    if info.task_kind.label_sets:
        classes, free = _by_labels(labels, marks)
        differ = f"{free} of {labels.shape[1]} labels, which aren't matched," if free else None
    elif labels.ndim == 1 and not labels.is_floating_point():
        classes = labels
    else:
        classes, differ = torch.zeros(len(labels)), "targets aren't classes, and"
    cells = []
    for label in classes.unique():
        own = classes == label
        pair = torch.nonzero(own & ~marks)[:, 0], torch.nonzero(own & marks)[:, 0]
        if all(map(len, pair)):
            cells.append(pair)
    if not cells:
        raise NotApplicable(
            f"of the {len(marks)} public examples no class has some with the property and some without; raise "
            "threat.public_examples"
        )
    frequencies = torch.tensor([float(len(without) + len(with_it)) for without, with_it in cells])
    inputs = info.normalise(records.public_inputs)
    return Stock(inputs, labels, tuple(cells), frequencies / frequencies.sum(), differ)


def _by_labels(labels: Tensor, marks: Tensor) -> tuple[Tensor, int]:
    """Return the strata (n,) that several labels make, and how many labels are left out of them.

    Coarsened exact matching: the labels that correlate most with the property are joined to the strata one after the
    other, unless strata with both sorts then hold less than half of the examples.
    """
    property_, own = marks.double() - marks.double().mean(), labels.double() - labels.double().mean(dim=0)
    lengths = own.square().sum(dim=0).sqrt().clamp_min(1e-12)
    order = (own.T @ property_).abs().div(lengths).argsort(descending=True, stable=True).tolist()
    strata, used = torch.zeros(len(labels), dtype=torch.int64), 0
    for label in order:
        finer = (2 * strata + labels[:, label].long()).unique(return_inverse=True)[1]
        both = torch.isin(finer, finer[marks]) & torch.isin(finer, finer[~marks])
        if int(both.sum()) < len(labels) / 2:
            continue
        strata, used = finer, used + 1
    return strata, labels.shape[1] - used


def send(observation: Observation, message: Message, held: Stock, rows: Tensor, generator: torch.Generator) -> Tensor:
    """Return what a stand-in sends in place of ``message``'s client, (d,), as :func:`flat`, after the same training."""
    info, update = observation.task_info, message.update
    module = copy.deepcopy(observation.module)
    module.load_state_dict(message.weights)
    set_training_mode(module, info.batch_norm, dropout=info.dropout)
    training = update.training
    sizes = training.batch_sizes if training else (update.num_examples,)
    order = rows[torch.randperm(len(rows), generator=generator)]
    seed = int(torch.randint(2**31, (1,), generator=generator))
    batches = [(held.inputs[own], held.labels[own]) for own in _batches(order, sizes, generator)]
    try:
        with local_randomness(seed):
            if update.kind == "gradient":
                return flat(gradient(module, observation.loss, batches[0]), message)
            assert training is not None  # the attack saw to it
            train(
                module,
                observation.loss,
                batches,
                learning_rate=training.learning_rate,
                momentum=training.momentum,
                weight_decay=training.weight_decay,
                proximal_mu=training.proximal_mu,
            )
    except BadInput as error:
        raise NotApplicable(f"a stand-in's training fails: {error}") from None
    return flat({name: p.detach() - message.weights[name] for name, p in trainable(module).items()}, message)


def flat(tensors: dict[str, Tensor], message: Message) -> Tensor:
    """Return (d,) what of an update was sent in ``message``, tensor after tensor, sorted by name."""
    return torch.cat([tensors[name].flatten() for name in sorted(message.update.tensors)])


def _batches(order: Tensor, sizes: tuple[int, ...], generator: torch.Generator) -> Iterator[Tensor]:
    """Yield batches of the given sizes, pass after pass, each pass after the first in an order of its own."""
    pending = order
    for size in sizes:
        while len(pending) < size:
            pending = torch.cat([pending, order[torch.randperm(len(order), generator=generator)]])
        yield pending[:size]
        pending = pending[size:]


def _draw(rows: Tensor, count: int, generator: torch.Generator) -> Tensor:
    whole = [torch.randperm(len(rows), generator=generator) for _ in range(-(-count // len(rows)))]
    return rows[torch.cat(whole)[:count]] if whole else rows[:0]
