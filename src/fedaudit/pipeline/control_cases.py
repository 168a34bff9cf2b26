"""The cases that an attack must win: what positive controls attack."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fedaudit.attacks.records.property import stock
from fedaudit.capture.answers import Answers
from fedaudit.data import load_dataset
from fedaudit.epsilon.canaries import Directions
from fedaudit.models import build_model, initialise, set_training_mode
from fedaudit.simulation.local_training import gradient, local_randomness, train
from fedaudit.simulation.simulator import Recording
from fedaudit.task.info import TaskInfo
from fedaudit.task.training import TrainingConfig
from fedaudit.transcript.queries import NOBODY, UNUSED, QuerySet
from fedaudit.transcript.rounds import Round
from fedaudit.transcript.transcript import Transcript
from fedaudit.transcript.truth import Truth, typical
from fedaudit.transcript.update import Update, UpdateKind
from fedaudit.utils.errors import NotApplicable
from fedaudit.utils.seeds import generator

_STEPS = 500  # at most, to learn the members by heart
_MORE_STEPS = 5000  # where an attribute is hidden, whose value changes the loss less, and where labels are wrong
_BY_HEART = 0.01  # mean loss at which they are
_NEARLY = 0.1  # likewise, where there is little time
_BATCH = 32
FEW = 48  # members that are learnt by heart where there is little time: fewer are learnt in fewer steps
_HELD = 64  # examples of the known client
_PAIRS = 12  # of known clients, one with a property and one without
_OWNERS = 5  # clients that learn their own members by heart, at most: each costs a training


@dataclass(frozen=True)
class Case:
    """What a control attacks.

    Attributes:
        recording: what the adversary sees of it, and the truth.
        model: ``same``, the audited one, or ``reference``.
        text: the case in words.
        seconds: that it took to make.
        size: examples that each of its updates is over, where these are of a single step; None: of another case.
        alike: its updates were made under the audited conditions.
    """

    recording: Recording
    model: Literal["same", "reference"]
    text: str
    seconds: float = 0.0
    size: int | None = None
    alike: bool = False


def one_example(
    recording: Recording,
    kind: UpdateKind,
    count: int = 1,
    label: int | None = None,
    model: Literal["same", "reference"] = "same",
) -> Case:
    """Return updates over one known example each: undefended, one step, from the audited model as clients run it.

    The model is that of the first recorded round, or the ``reference`` network. The examples are typical: the
    candidates, of the class ``label`` if one is given, that are most like their mean, apart from the victims. Where
    BatchNorm can't take a single example, an update is over two. BadInput: the model can't be trained on so few.
    """
    transcript = recording.transcript
    inputs, labels = typical(recording.truth, count + 1, label)
    first = transcript.rounds[0]
    known = _training([first])
    size = 1 if _takes_one(transcript, inputs) else 2
    few = "one known example" if size == 1 else "two known examples"
    updates, held = [], {}
    for client in range(count):
        rows = slice(client, client + size)
        held[0, client] = inputs[rows], labels[rows]
        updates.append(_update(transcript, first.weights, client, *held[0, client], kind, known))
    text = f"{few if count == 1 else f'{count} known examples, one an update'}, undefended, one step"
    case = _recorded(recording, [Round(0, first.weights, updates)], held, text, model=model)
    return replace(case, size=size)


def reference(kind: UpdateKind) -> Case:
    """Return the same on fedaudit's reference network: convnet-small, untrained, and one of its own photographs."""
    data = load_dataset("photos")
    task_info = TaskInfo(
        model="convnet-small",
        width=32,
        batch_norm="eval",
        loss="cross-entropy",
        kind=data.kind,
        input_shape=data.input_shape,
        num_classes=data.num_classes,
        mean=data.mean,
        std=data.std,
    )
    module = build_model("convnet-small", input_shape=data.input_shape, outputs=task_info.outputs, width=32)
    initialise(module, "default", generator(0, "reference network"))
    weights = {name: value.detach().clone() for name, value in module.state_dict().items()}
    transcript = Transcript("reference", task_info, module, nn.functional.cross_entropy, [Round(0, weights, [])])
    truth = Truth({}, {}, data.test.inputs, data.test.targets, {})
    case = one_example(Recording(transcript, truth), kind, model="reference")
    text = "one of fedaudit's own photographs, on its reference network, undefended, one step"
    return replace(case, text=text)


def memorised(recording: Recording, most: int | None = None) -> Case | None:
    """Return a federation whose model has learnt the adversary's members by heart; None where it has no records.

    One client holds them all, or ``most`` of them, and trains the audited model on them until it fits them (Adam, 500
    steps at most, or 5,000 where an attribute is hidden).
    """
    transcript, truth = recording.transcript, recording.truth
    member = (truth.owners != NOBODY) & (truth.owners != UNUSED)
    if transcript.records is None or not bool(member.any()):
        return None
    first, whole = transcript.rounds[0].weights, int(member.sum())
    member = _some(member, most)
    update, inputs, labels, learnt = _learnt_by(transcript, truth, 0, member, _loss_of(most))
    still = Update(0, "weights", {name: torch.zeros_like(t) for name, t in update.tensors.items()}, len(inputs), None)
    rounds = [Round(0, first, [update]), Round(1, learnt, [still])]
    owners = torch.where(member, 0, torch.where(truth.owners == NOBODY, NOBODY, UNUSED))
    held = {(0, 0): (inputs, labels), (1, 0): (inputs, labels)}
    which = f"{len(inputs)} of the members" if len(inputs) < whole else "the members"
    text = f"the same model, which has learnt {which} by heart, undefended"
    return _recorded(recording, rounds, held, text, records=transcript.records, owners=owners)


def memorised_by_client(recording: Recording, most: int | None = None) -> Case | None:
    """Return a round in which every client's model has learnt its own members by heart; None with fewer than two.

    The five clients with most members hold these alone, or ``most`` of all; each trains the audited model on its own.
    """
    transcript, truth = recording.transcript, recording.truth
    owners, counts = truth.owners[truth.owners >= 0].unique(return_counts=True)
    chosen = owners[counts.argsort(descending=True, stable=True)[:_OWNERS]].sort().values.tolist()
    if transcript.records is None or len(chosen) < 2:
        return None
    updates, held, known = [], {}, truth.owners == NOBODY
    for client in chosen:
        own = _some(truth.owners == client, None if most is None else most // len(chosen))
        update, inputs, labels, _ = _learnt_by(transcript, truth, client, own, _loss_of(most))
        updates.append(update)
        held[0, client] = inputs, labels
        known = known | own
    rounds = [Round(0, transcript.rounds[0].weights, updates)]
    text = f"the same model, trained by {len(chosen)} clients, each on its own members by heart, undefended"
    owners = torch.where(known, truth.owners, UNUSED)
    return _recorded(recording, rounds, held, text, records=transcript.records, owners=owners)


def memorised_by_one(recording: Recording, most: int | None = None) -> Case | None:
    """Return a model that knows one client's records by heart, and another's wrongly; None: there are no two clients.

    They are the two with most members. The audited model is trained on their members and on those of their records that
    the adversary knows, or on four times ``most`` of all, of the second client with labels dealt out among
    them.
    """
    transcript, truth, records = recording.transcript, recording.truth, recording.transcript.records
    owners, counts = truth.owners[truth.owners >= 0].unique(return_counts=True)
    if records is None or len(owners) < 2:
        return None
    pair = owners[counts.argsort(descending=True, stable=True)[:2]]
    whose = torch.cat([truth.owners, records.known_clients])
    learnt_by = _some(torch.isin(whose, pair), None if most is None else 4 * most)
    inputs, labels = (
        torch.cat([getattr(records, name), getattr(records, f"known_{name}").to(getattr(records, name))])
        for name in ("inputs", "labels")
    )
    wrong = learnt_by & (whose == pair[1])
    labels[wrong] = labels[wrong].roll(1, 0)
    taught = replace(transcript, records=replace(records, inputs=inputs, labels=labels))
    update, *held, learnt = _learnt_by(taught, truth, int(pair[0]), learnt_by, _loss_of(most), _MORE_STEPS)
    still = replace(update, tensors={name: torch.zeros_like(t) for name, t in update.tensors.items()}, buffers={})
    member, known = learnt_by[: len(records)], learnt_by[len(records) :]
    told = {f"known_{name}": getattr(records, f"known_{name}")[known] for name in ("inputs", "labels", "clients")}
    return _recorded(
        recording,
        [Round(0, learnt, [still])],
        {(0, int(pair[0])): (held[0], held[1])},
        "the same model, which knows one client's records by heart and another's with wrong labels, undefended",
        records=replace(records, **told),
        owners=torch.where(member | (truth.owners == NOBODY), truth.owners, UNUSED),
        homes=torch.where(truth.owners == NOBODY, truth.owners[truth.matched], truth.owners),  # power is in question
    )


def _some(chosen: Tensor, most: int | None) -> Tensor:
    """Return the mask with ``most`` of what it has, drawn at random; None: all."""
    places = chosen.nonzero().flatten()
    if most is None or len(places) <= most:
        return chosen
    rows = torch.randperm(len(places), generator=generator(0, "control", "some"))[:most]
    return torch.zeros_like(chosen).index_fill(0, places[rows], True)


def _loss_of(most: int | None) -> float:
    """Return at which mean loss records are learnt: of ``most`` alone there is little time."""
    return _BY_HEART if most is None else _NEARLY


def _learnt_by(
    transcript: Transcript, truth: Truth, client: int, member: Tensor, enough: float, steps: int = _STEPS
) -> tuple[Update, Tensor, Tensor, dict[str, Tensor]]:
    """Return a client's update after learning its records by heart, these with their labels, and its model."""
    records, first = transcript.records, transcript.rounds[0].weights
    assert records is not None
    inputs = records.inputs.clone()
    if len(records.columns):
        inputs[:, records.columns] = records.codes[truth.values]
    inputs, labels = inputs[member], records.labels[member]
    module = _client(transcript, first)
    _learn(
        module,
        transcript,
        transcript.task_info.normalise(inputs),
        labels,
        _MORE_STEPS if len(records.codes) else steps,
        enough,
    )
    learnt = {name: value.detach().clone() for name, value in module.state_dict().items()}
    names = [name for name, p in module.named_parameters() if p.requires_grad]
    moved = {name: learnt[name] - first[name] for name in names}
    buffers = {n: learnt[n] for n, _ in module.named_buffers() if n in learnt and not learnt[n].equal(first[n])}
    return Update(client, "weights", moved, len(inputs), None, buffers=buffers), inputs, labels, learnt


def with_and_without(recording: Recording) -> Case | None:
    """Return a round of known clients; half have nothing but the property, and half nothing of it.

    They are made of half of the adversary's public examples, class for class alike, and send one gradient; the
    adversary has the other half. None where it knows too few.
    """
    transcript = recording.transcript
    records = transcript.records
    if records is None or not len(records.public_property):
        return None
    rng = generator(0, "control", "with and without")
    known, own = torch.randperm(len(records.public_property), generator=rng).chunk(2)
    parts = [records.with_public(rows) for rows in (known, own)]
    try:
        stocked, _ = (stock(part, transcript.task_info) for part in parts)
    except NotApplicable:
        return None
    training, first = _training(transcript.rounds), transcript.rounds[0].weights
    updates: list[Update] = []
    held = {}
    for _ in range(_PAIRS):
        for rows in stocked.pair(max(2, min(_HELD, len(known) // 4)), 1.0, 0.0, rng):
            client = len(updates)
            held[0, client] = parts[0].public_inputs[rows], parts[0].public_labels[rows]
            updates.append(_update(transcript, first, client, *held[0, client], "gradient", training))
    shares = torch.tensor([1.0, 0.0] * _PAIRS, dtype=torch.float64)
    text = f"{2 * _PAIRS} known clients, half with nothing but the property, undefended, one step"
    return _recorded(recording, [Round(0, first, updates)], held, text, records=parts[1], shares=shares)


def one_client(recording: Recording) -> Case:
    """Return the messages of one known client: undefended, one step of all its examples, and models that differ much.

    The client holds typical candidates. It is sent as many models as the adversary saw rounds: the audited one, with
    every parameter moved at random by half its tensor's spread, so that its answers tell most about its data.
    """
    transcript, truth = recording.transcript, recording.truth
    known = _training(transcript.rounds)
    inputs, labels = typical(truth, min(_HELD, len(truth.candidates) // 2 or 1))
    rng = generator(0, "control", "one client")
    rounds = []
    first = transcript.rounds[0].weights
    moved = {name for name, p in transcript.module.named_parameters() if p.requires_grad}
    for index in range(len(transcript.rounds)):
        weights = {
            name: t + 0.5 * _spread(t) * torch.randn(t.shape, generator=rng) if name in moved else t
            for name, t in first.items()
        }
        update = _update(transcript, weights, 0, inputs, labels, "weights", known)
        rounds.append(Round(index, weights, [update]))
    held = {(one.index, 0): (inputs, labels) for one in rounds}
    rows = {key: torch.arange(len(inputs)) for key in held}
    text = f"one known client of {len(inputs)} examples, undefended, one step, {len(rounds)} models that differ much"
    return _recorded(recording, rounds, held, text, rows=rows)


def without_noise(recording: Recording) -> Case | None:
    """Return as many canaries of one round without noise, beside one client's update; None: there are no canaries."""
    transcript, canaries = recording.transcript, recording.transcript.canaries
    if canaries is None or not transcript.rounds:
        return None
    first = transcript.rounds[0]
    names = [name for name, p in transcript.module.named_parameters() if p.requires_grad]
    beside = torch.zeros(sum(first.weights[name].numel() for name in names))
    if first.updates:
        sent = first.updates[0].tensors
        beside = torch.cat([(sent[n] if n in sent else torch.zeros_like(first.weights[n])).reshape(-1) for n in names])
    length = float(beside.norm()) or 1.0
    directions = Directions(0, len(canaries), len(beside))
    coins = torch.rand(len(canaries), generator=generator(0, "control", "canaries")) < 0.5
    absent = 0.0 if canaries.adjacency == "add-remove" else -1.0
    total = length * directions.combine(torch.where(coins, 1.0, absent)) + beside
    own = replace(
        canaries,
        readings={name: directions.project(total)[None] / length for name in canaries.readings},
        rates={},
        covered=tuple(canaries.readings),
    )
    known = replace(recording.truth, coins=coins)
    text = f"{len(canaries)} known canaries in one round, without noise"
    return Case(Recording(replace(transcript, name="control-same", canaries=own), known), "same", text)


def _spread(tensor: Tensor) -> float:
    """Return the standard deviation of a tensor's elements, or 1 where they don't differ."""
    spread = float(tensor.double().std()) if tensor.numel() > 1 else 0.0
    return spread or 1.0


def _training(rounds: Sequence[Round]) -> TrainingConfig | None:
    """Return how a client of these rounds trained, where that is known of any."""
    return next((u.training for r in rounds for u in r.updates if u.training), None)


def _recorded(
    recording: Recording,
    rounds: list[Round],
    held: Mapping[tuple[int, int], tuple[Tensor, Tensor]],
    text: str,
    *,
    model: Literal["same", "reference"] = "same",
    records: QuerySet | None = None,
    **told: Any,
) -> Case:
    """Return the case of these rounds, whose truth is what clients ``held``, and else what is ``told``."""
    own = recording.transcript
    made = Transcript(f"control-{model}", own.task_info, own.module, own.loss, rounds, records=records)
    inputs, labels = ({key: pair[i] for key, pair in held.items()} for i in range(2))
    about = {key: value for key, value in recording.truth.about.items() if key != "promise"}  # the case is undefended
    known = replace(recording.truth, inputs=inputs, labels=labels, about=about, **{"rows": {}, **told})
    return Case(Recording(made, known), model, text)


def _update(
    transcript: Transcript,
    weights: dict[str, Tensor],
    client: int,
    inputs: Tensor,
    labels: Tensor,
    kind: UpdateKind,
    known: TrainingConfig | None,
) -> Update:
    """Return an undefended update of one step, at the learning rate of the audited clients where that is known."""
    module = _client(transcript, weights)
    rate = known.learning_rate if known else 0.01
    batch = (transcript.task_info.normalise(inputs), labels)
    with local_randomness(0):
        if kind == "gradient":
            tensors = gradient(module, transcript.loss, batch)
        else:
            train(module, transcript.loss, [batch], learning_rate=rate)
            tensors = {n: p.detach() - weights[n] for n, p in module.named_parameters() if p.requires_grad}
    training = TrainingConfig(rate, 1, (len(inputs),), data_size=len(inputs))
    return Update(client, kind, tensors, len(inputs), training)


def _client(transcript: Transcript, weights: dict[str, Tensor]) -> nn.Module:
    """Return the model as a client runs it, without dropout."""
    module = copy.deepcopy(transcript.module)
    module.load_state_dict(weights)
    set_training_mode(module, transcript.task_info.batch_norm, dropout=False)
    return module


def _takes_one(transcript: Transcript, inputs: Tensor) -> bool:
    """Return whether the model, as clients run it, takes a single example."""
    try:
        with torch.no_grad():
            _client(transcript, transcript.rounds[0].weights)(transcript.task_info.normalise(inputs[:1]))
    except (ValueError, RuntimeError):
        return False
    return True


def _learn(
    module: nn.Module, transcript: Transcript, inputs: Tensor, labels: Tensor, steps: int, enough: float
) -> None:
    """Train ``module`` in place on the members until their mean loss is ``enough``, for ``steps`` steps at most."""
    if isinstance(module, Answers) and module.by_answers:
        module.learn(inputs, labels)
        return
    optimiser = torch.optim.Adam([p for p in module.parameters() if p.requires_grad], lr=1e-3)
    rng = generator(0, "control", "by heart")
    losses: list[float] = []
    with local_randomness(0):
        while len(losses) < steps:
            for rows in torch.randperm(len(inputs), generator=rng).split(_BATCH):
                if len(rows) < 2 <= len(inputs):
                    continue  # BatchNorm can't normalise a single example
                optimiser.zero_grad()
                value = transcript.loss(module(inputs[rows]), labels[rows])
                value.backward()
                optimiser.step()
                losses.append(float(value.detach()))
            per_pass = max(1, len(inputs) // _BATCH)
            if sum(losses[-per_pass:]) / len(losses[-per_pass:]) < enough:
                break
