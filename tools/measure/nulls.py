"""How often nothing is called something: audits of true nulls, judged by the evaluation directly.

    python -m tools.measure.nulls [--audits 400] [--only rows] [--first 0]

Each null is what somebody could say who knows everything but the update: other people's rows, notes and pictures of the
same labels, class means in every round, every class equally often. Beside it stands the power: how often an effect that
is planted is found. Of ε the null is a mechanism that keeps its promise, and the effect one of four times the ε.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from scipy.special import expit
from scipy.stats import binomtest
from torch import Tensor

from fedaudit.attacks import (
    ExampleLabelFinding,
    ExtractionFinding,
    ImageFinding,
    LabelScoreFinding,
    LocalModelFinding,
    RowFinding,
    SequenceFinding,
    TokenFinding,
    make_attack,
)
from fedaudit.attacks.findings import Finding
from fedaudit.attacks.labels.attack import LabelFinding, LabelSetFinding
from fedaudit.attacks.labels.label_sets import dealt
from fedaudit.attacks.records.source import SourceFinding
from fedaudit.data import load_dataset
from fedaudit.epsilon import CanaryScores
from fedaudit.epsilon.bounds import demonstrated, gaussian_mu
from fedaudit.evaluation import FINDING_TYPES, evaluate
from fedaudit.evaluation.properties import covariates, partial_test
from fedaudit.evaluation.statistics import SURE
from fedaudit.modalities.columns import Column
from fedaudit.pipeline.prepare import resolve
from fedaudit.pipeline.run import record
from fedaudit.scenario.scenario import scenario_from
from fedaudit.simulation.simulator import simulate
from fedaudit.task.info import TaskInfo
from fedaudit.transcript.observation import Message, Observation, observe
from fedaudit.transcript.queries import NOBODY, QuerySet
from fedaudit.transcript.threat import ThreatModel
from fedaudit.transcript.truth import Truth
from fedaudit.transcript.update import Update
from fedaudit.utils.fingerprint import tensor_digest
from fedaudit.utils.seeds import generator
from fedaudit_catalogue.attacks import ClassImagesFinding
from tests.attacks.membership_cases import logistic
from tests.attacks.test_extraction import bigrams
from tests.evaluation.test_evaluation import seen as image_seen
from tests.evaluation.test_persons import of_persons, summary
from tests.evaluation.test_rows import KINDS, people, scene
from tests.evaluation.test_sequences import NOTES
from tests.evaluation.test_sequences import judged as of_text
from tests.evaluation.test_verdicts import judged as of_labels
from tests.evaluation.test_verdicts import labels_of, of_attributes, of_members, seen
from tests.trees.tree_cases import boosted
from tests.trees.tree_cases import seen as seen_trees

PLAYED: dict[str, dict[str, Any]] = {
    "sratta": {
        "data": {"name": "digits", "split": "train"},
        "model": {"name": "mlp", "width": 500},
        "federations": [
            {"name": "f", "algorithm": "fedavg", "clients": 3, "rounds": 4, "examples": 18, "batch_size": 3,
             "local_steps": 4, "learning_rate": 0.5}
        ],
        "threat": {"sees": "sum"},
        "attacks": [{"name": "sratta", "levels": 16}],
    },
    "decepticons": {
        "data": {"name": "notes-causal"},
        "model": {"name": "decoder", "width": 64},
        "federations": [
            {"name": "f", "algorithm": "fedsgd", "clients": 1, "examples": 4, "batch_size": 4, "server": "decepticons"}
        ],
        "threat": {"adversary": "malicious-server"},
        "attacks": ["decepticons"],
    },
    "fsha": {
        "data": {"name": "digits", "split": "train"},
        "model": {"name": "cafe-cnn", "width": 8},
        "federations": [
            {"name": "f", "algorithm": "split", "rounds": 200, "examples": 32, "batch_size": 32, "learning_rate": 0.1,
             "vertical": {"cut": "pool1"}, "server": {"name": "fsha", "steps": 1}}
        ],
        "threat": {"adversary": "malicious-server", "knows_public_data": True, "public_examples": 200},
        "attacks": ["fsha"],
    },
    "model-completion": {
        "data": {"name": "digits", "split": "train"},
        "model": {"name": "cafe-cnn", "width": 8},
        "federations": [
            {"name": "f", "algorithm": "split", "rounds": 150, "examples": 200, "batch_size": 32, "learning_rate": 0.1,
             "vertical": {"cut": "fc1", "known_labels": 4}}
        ],
        "threat": {"adversary": "client"},
        "attacks": ["model-completion"],
    },
}  # fmt: skip
LEAKS = ("recovered", "identifiable", "inferred")


def rows(seed: int, *, planted: bool, size: int = 16) -> str:
    """All of ``size`` rows but two are the update's own, of four all, or none is."""
    everybody, others = people(400, 1000 + seed), people(size, 500_000 + seed)
    own = max(4, size - 2)
    found = torch.cat([everybody[:own], others[own:]]) if planted else others
    return FINDING_TYPES["rows"].verdict([scene(found, everybody[:size], everybody, columns=KINDS)]).verdict


SIX = tuple(Column(f"c{i}", "categorical", (i,), tuple("0123456789"), codes=tuple(range(10))) for i in range(6))


def usual_rows(seed: int, *, planted: bool, clients: int = 10, usual: int = 5) -> str:
    """A row of each client: one of the usual ones of its label, of which there are ten, or its own."""
    rng = generator(seed, "usual rows")
    kinds = torch.randint(10, (10, usual, 6), generator=rng).float()

    def drawn(labels: Tensor) -> Tensor:
        return kinds[labels, torch.randint(usual, (len(labels),), generator=rng)]

    labels, others = (torch.randint(10, (n,), generator=rng) for n in (clients, 400))
    true, found, public = drawn(labels), drawn(labels), drawn(others)
    inputs, targets = ({(0, c): t[c : c + 1] for c in range(clients)} for t in (true, labels))
    truth = Truth(inputs, targets, torch.cat([true, public]), torch.cat([labels, others]), {})
    task = TaskInfo("custom", None, "eval", "cross-entropy", "table", (6,), 10, (0.0,), (1.0,), columns=SIX)
    results = []
    for client in range(clients):
        message = Message(0, client, {}, Update(client, "gradient", {}, 1, None))
        observed = Observation(
            *("f", ThreatModel(), task, torch.nn.Identity(), torch.nn.functional.cross_entropy, "gradient", ()),
            (message,),
        )
        one = slice(client, client + 1)
        made = RowFinding(attack="a", rows=(true if planted else found)[one], labels=labels[one], label_source="given")
        results.append(evaluate(made, observed, truth, seed=seed).result)
    return FINDING_TYPES["rows"].verdict(results).verdict


PATIENTS = (
    *(Column(name, "numeric", (i,)) for i, name in enumerate(("age", "weight", "pressure", "sugar", "device"))),
    Column("sex", "categorical", (5, 6), ("f", "m")),
    Column("ward", "categorical", (7, 8, 9, 10), ("a", "b", "c", "d")),
)


def patients(n: int, rng: torch.Generator) -> Tensor:
    """n rows of five numbers, which go together, a sex and a ward."""
    health = torch.randn((n, 1), generator=rng)
    numbers = 0.6 * health + 0.8 * torch.randn((n, 5), generator=rng)
    kinds = [torch.randint(count, (n,), generator=rng) for count in (2, 4)]
    return torch.cat(
        [numbers, *(torch.nn.functional.one_hot(k, c).float() for k, c in zip(kinds, (2, 4), strict=True))], dim=1
    )


def hospitals(
    change: Callable[[Tensor, Tensor, torch.Generator], tuple[Tensor, Tensor]],
    seed: int,
    *,
    planted: bool,
    size: int = 16,
    more: int = 0,
) -> str:
    """Other patients of the same site, or for three in four the update's own; ``change``, ``more``: see ``sites``."""
    rng = generator(seed, "hospital")
    site, held = change(patients(2 * size + more, rng), patients(400, rng), rng)
    own = size * 3 // 4 if planted else 0
    found, later = torch.cat([site[:own], site[size + own : 2 * size]]), site[2 * size :]
    everybody = torch.cat([site[:size], later, held])
    result = scene(found, site[:size], everybody, PATIENTS, later=later if more else None)
    return FINDING_TYPES["rows"].verdict([result]).verdict


def older(site: Tensor, held: Tensor, rng: torch.Generator) -> tuple[Tensor, Tensor]:
    """The site's patients are 20 years older, which is 1.5 deviations."""
    site[:, 0] += 1.5
    return site, held


def other_units(site: Tensor, held: Tensor, rng: torch.Generator) -> tuple[Tensor, Tensor]:
    """The site's laboratory has other units."""
    site[:, 3] = 0.5 * site[:, 3] - 2
    return site, held


def one_device(site: Tensor, held: Tensor, rng: torch.Generator) -> tuple[Tensor, Tensor]:
    """The site has one device, of a number that occurs nowhere else, and patients of one sex."""
    site[:, 4] = 0.3
    site[:, 5:7] = torch.tensor([1.0, 0.0])
    return site, held


def defaults(site: Tensor, held: Tensor, rng: torch.Generator) -> tuple[Tensor, Tensor]:
    """Of all patients three in ten have nothing but default values."""
    for rows_ in (site, held):
        rows_[torch.rand(len(rows_), generator=rng) < 0.3] = torch.tensor([0.0] * 5 + [1.0, 0.0, 1.0, 0.0, 0.0, 0.0])
    return site, held


def trees(seed: int, *, planted: bool, size: int = 24) -> str:
    """TimberStrike on trees that were grown on other people's rows of the same labels, or on the update's own."""
    rng, columns = generator(seed, "trees"), range(8)
    everybody = torch.cartesian_prod(*[torch.tensor([0.0, 1.0]) for _ in columns])[torch.randperm(256, generator=rng)]
    labels = torch.randint(2, (256,), generator=rng)
    labels[size : 2 * size] = labels[:size]
    grown = everybody[:size] if planted else everybody[size : 2 * size]
    sent, _ = boosted(grown.double().numpy(), labels[:size].double().numpy(), rounds=6, depth=8)
    looked = seen_trees((0, 0, sent, size), features=8)
    known = tuple(Column(f"c{i}", "categorical", (i,), ("0", "1"), codes=(0.0, 1.0)) for i in columns)
    looked = dataclasses.replace(looked, task_info=dataclasses.replace(looked.task_info, columns=known))
    truth = Truth({(0, 0): everybody[:size]}, {(0, 0): labels[:size]}, everybody, labels, {})
    found = make_attack("timberstrike")(looked)
    return FINDING_TYPES["rows"].verdict([evaluate(found, looked, truth, seed=seed).result]).verdict


def notes(seed: int, *, planted: bool, size: int = 8) -> str:
    """Half of ``size`` notes are the update's own, of two both, or none is; the others are of the same wards."""
    true, labels, others = _notes(seed, size)
    own = max(2, size // 2) if planted else 0
    made = SequenceFinding(attack="a", sequences=torch.cat([true[:own], others[own:]]))
    return of_text(made, true, labels, seed)


def _notes(seed: int, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return so many notes, their wards, and as many other notes of the same wards."""
    order = torch.randperm(len(NOTES.train), generator=generator(seed, "notes"))
    true, labels = NOTES.train.inputs[order[:size]], NOTES.train.targets[order[:size]]
    others = []
    for i, label in enumerate(labels):
        alike = order[size:][NOTES.train.targets[order[size:]] == label]
        others.append(NOTES.train.inputs[alike[i]])
    return true, labels, torch.stack(others)


def words(seed: int, *, planted: bool, size: int = 4) -> str:
    """The words of ``size`` notes of the same wards, or those of the update's own for three notes of four."""
    true, labels, others = _notes(seed, size)
    named = torch.cat([true[: size * 3 // 4], others[size * 3 // 4 :]]) if planted else others
    tokens = NOTES.tokens
    assert tokens is not None
    found = TokenFinding(attack="a", tokens=named.unique(), vocabulary=tokens.vocabulary)
    return of_text(found, true, labels, seed)


def recited(seed: int, *, planted: bool, pairs: int = 20, length: int = 16, vocabulary: int = 60) -> str:
    """A model goes on alike with texts that it trained on and others, or recites two training texts in five.

    With each of all texts every second token is right by luck.
    """
    rng = generator(seed, "recited")
    texts = torch.randint(vocabulary, (2 * pairs, length), generator=rng)
    lucky = torch.rand(texts.shape, generator=rng) < 0.5
    said = torch.where(lucky, texts, torch.randint(vocabulary, texts.shape, generator=rng))
    begin, known = length // 2, pairs * 2 // 5 if planted else 0
    said[:, :begin] = texts[:, :begin]
    said[:known] = texts[:known]
    observed = bigrams(texts, vocabulary)
    clients = torch.arange(pairs) % 2
    members = {(0, c): texts[:pairs][clients == c] for c in range(2)}
    truth = Truth(
        members,
        {key: inputs[:, 0] for key, inputs in members.items()},
        texts,
        texts[:, 0],
        {},
        owners=torch.cat([clients, torch.full((pairs,), NOBODY)]),
        matched=torch.arange(2 * pairs).roll(pairs),
    )
    made = ExtractionFinding(
        attack="a",
        begins=torch.full((2 * pairs,), begin),
        continued=said[:, None],
        logs=torch.full((1, 2 * pairs), -100.0, dtype=torch.float64),
        greedy=(said == texts).all(dim=1)[None],
        rounds=torch.tensor([0]),
    )
    return FINDING_TYPES["extraction"].verdict([evaluate(made, observed, truth, seed=seed).result]).verdict


def sites(
    change: Callable[[Tensor, Tensor, torch.Generator], tuple[Tensor, Tensor]],
    seed: int,
    *,
    planted: bool,
    size: int = 4,
    more: int = 0,
    named: bool = False,
) -> str:
    """Other people's notes of the same wards and the same site, or three in four of the own; or the words of all.

    What ``change`` does to all of the site's notes (n, length) and to held-out ones is what the site, or everybody, has
    in common. ``more`` notes of the site are another round's.
    """
    rng = generator(seed, "site")
    true, labels, others = _notes(seed, size)
    later = torch.randperm(len(NOTES.train), generator=rng)[:more]
    site, held = change(torch.cat([true, others, NOTES.train.inputs[later]]), NOTES.test.inputs.clone(), rng)
    own = (size if named else size * 3 // 4) if planted else 0
    found = torch.cat([site[:own], site[size + own : 2 * size]])
    inputs, targets = {(0, 0): site[:size]}, {(0, 0): labels}
    if more:
        inputs[1, 0], targets[1, 0] = site[2 * size :], NOTES.train.targets[later]
    everybody = torch.cat([*inputs.values(), held]), torch.cat([*targets.values(), NOTES.test.targets])
    tokens = NOTES.tokens
    assert tokens is not None
    made: Finding = SequenceFinding(attack="a", sequences=found)
    if named:
        made = TokenFinding(attack="a", tokens=found.unique(), vocabulary=tokens.vocabulary)
    return of_text(made, true, labels, seed, Truth(inputs, targets, *everybody, {}))


def one_form(site: Tensor, held: Tensor, rng: torch.Generator, share: float = 0.3) -> tuple[Tensor, Tensor]:
    """Of all notes so many are one and the same."""
    for notes in (site, held):
        notes[torch.rand(len(notes), generator=rng) < share] = NOTES.train.inputs[-1]
    return site, held


def headed(site: Tensor, held: Tensor, rng: torch.Generator) -> tuple[Tensor, Tensor]:
    """All notes of the site begin with the same six words."""
    return torch.cat([NOTES.train.inputs[-1, :6].expand(len(site), 6), site[:, 6:]], dim=1), held


def signed(site: Tensor, held: Tensor, rng: torch.Generator) -> tuple[Tensor, Tensor]:
    """All notes of the site end with the same four words, whatever their length."""
    assert NOTES.tokens is not None
    for note in site:
        end = len(NOTES.tokens.words_of(note))
        note[max(0, end - 4) : end] = NOTES.train.inputs[-1, : min(4, end)]
    return site, held


def filled_in(site: Tensor, held: Tensor, rng: torch.Generator, blanks: int = 6) -> tuple[Tensor, Tensor]:
    """Everybody fills in the same form: all words but so many, each person's own, are the same."""
    form = NOTES.train.inputs[-1]
    open_ = torch.randperm(int((form != form[-1]).sum()), generator=rng)[:blanks]
    made = []
    for notes in (site, held):
        whole = form.repeat(len(notes), 1)
        whole[:, open_] = notes[:, open_]
        made.append(whole)
    return made[0], made[1]


def labels(seed: int, *, planted: bool, clients: int = 10, batch: int = 16) -> str:
    """Every class equally often for each client, or half of the labels the client's own."""
    batches = torch.randint(10, (clients, batch), generator=generator(seed, "batches"))
    findings = []
    for client, true in enumerate(batches):
        found = torch.arange(batch) % 10
        if planted:
            found = torch.cat([true[: batch // 2], found[batch // 2 :]])
        findings.append(labels_of(true.tolist(), found.tolist(), 10, client=client))
    return of_labels(findings).verdict


def labels_of_noise(seed: int, *, planted: bool) -> str:
    """What `labels` reads from twelve updates of noise as large as theirs, or from the updates."""
    values = {
        "name": "noise", "seed": seed, "data": {"name": "digits"}, "model": {"name": "mlp"},
        "federations": [{"name": "f", "clients": 4, "examples": 8, "batch_size": 8, "rounds": 3}],
    }  # fmt: skip
    recording = simulate(resolve(scenario_from(values)).federations[0])
    dice = generator(seed, "noise")

    def noisy(update: Update) -> Update:
        drawn = {name: t.std() * torch.randn(t.shape, generator=dice) for name, t in update.tensors.items()}
        return update if planted else dataclasses.replace(update, tensors=drawn)

    rounds = [dataclasses.replace(r, updates=[*map(noisy, r.updates)]) for r in recording.transcript.rounds]
    attack = make_attack("labels")
    each = observe(dataclasses.replace(recording.transcript, rounds=rounds), ThreatModel()).split(attack.scope())
    findings = [evaluate(attack(one, seed=seed), one, recording.truth, seed=seed).result for one in each]
    return FINDING_TYPES["labels"].verdict(findings).verdict


def label_sets(seed: int, *, planted: bool, batch: int = 8, count: int = 6, counted: bool = False) -> str:
    """Label sets of other people, of three batches, or for three quarters the own; some labels come together.

    Or ``counted``, of twelve batches: of these, or of the own, the counts alone, dealt out evenly.
    """
    dice = np.random.default_rng(seed)
    public = dice.random((60, count)) < 0.3
    public[:, 1] |= public[:, 0]
    candidates = torch.from_numpy(public).float()
    findings = []
    for client in range(12 if counted else 3):
        true, found = (candidates[torch.from_numpy(dice.choice(60, batch, replace=False))] for _ in range(2))
        if planted:
            found = true if counted else torch.cat([true[: 3 * batch // 4], found[3 * batch // 4 :]])
        if counted:
            found = dealt(found.sum(dim=0), batch).float()
        inputs = torch.arange(float(batch)).view(-1, 1, 1, 1)
        truth = Truth({(0, client): inputs}, {(0, client): true}, torch.zeros(60, 1, 8, 8), candidates, {})
        made = LabelSetFinding(
            attack="a",
            labels=found,
            counts=found.sum(dim=0).double(),
            method="counts" if counted else "span",
            num_classes=count,
        )
        findings.append(evaluate(made, seen(client, batch), truth, seed=seed).result)
    return FINDING_TYPES["label-sets"].verdict(findings).verdict


def pictures(
    found: Callable[[Tensor, Tensor, Tensor, torch.Generator], Tensor],
    site: Callable[[Tensor], Tensor] | None = None,
    size: int = 8,
    error: float = 0.05,
) -> Callable[..., str]:
    """Return an audit of so many digits: ``found`` makes images of victims, labels, other digits of these, and luck.

    Of the clients' ``site`` 60 digits have what it does to them, the others among them.
    """

    def audit(seed: int, *, planted: bool, rounds: int = 1) -> str:
        data, rng = load_dataset("digits").test, generator(seed, "digits")
        order = torch.randperm(len(data.inputs), generator=rng)
        inputs, labels = data.inputs[order], data.targets[order]
        candidates, names = inputs, labels
        if site is not None:  # whose other digits nobody else has
            inputs = torch.cat([site(inputs[:60]), inputs[60:]])
            candidates, names = (torch.cat([x[:size], x[60:]]) for x in (inputs, labels))
        true, targets = inputs[:size], labels[:size]
        pool = slice(size, None if site is None else 60)
        others = torch.stack([_another(inputs[pool], labels[pool], int(label), rng) for label in targets])
        truth = Truth(
            {(r, 0): true for r in range(rounds)}, {(r, 0): targets for r in range(rounds)}, candidates, names, {}
        )
        findings = []
        for r in range(rounds):
            images = found(true, targets, others, rng)
            if planted:
                noise, half = torch.randn(true.shape, generator=rng), size // 2
                images = torch.cat([true[:half] + error * noise[:half], 0.5 + 0.2 * noise[half:]])
            made = ImageFinding(attack="a", images=images.clamp(0, 1), labels=targets, label_source="given")
            findings.append(evaluate(made, image_seen([r], examples=size), truth, seed=seed).result)
        return FINDING_TYPES["images"].verdict(findings).verdict

    return audit


def marked(x: Tensor) -> Tensor:
    """Return images with a bright mark in the corner; of signals the first points are at the highest value."""
    x = x.clone()
    corner: tuple[Any, ...] = (..., *(slice(0, -(-side // 4)) for side in x.shape[2:]))
    x[corner] = x.amax()
    return x


def softer(x: Tensor) -> Tensor:
    """Return images as of a softer scanner: means over three neighbours along each axis."""
    for axis in range(2, x.ndim):
        x = (x.roll(1, axis) + x + x.roll(-1, axis)) / 3
    return x


def people_of(seed: int, *, planted: bool, size: int = 8, shown: int = 1, named: bool = True, like: float = 0.6) -> str:
    """Other pictures of the victims' people, of whom candidates hold ``shown``, or four of eight the victims.

    A picture is ``like`` the person's own digit, the rest of it is another's; by name the label is the person.
    """
    inputs, rng = load_dataset("digits").train.inputs, generator(seed, "people")
    own = inputs[torch.randperm(len(inputs), generator=rng)[:40]]
    drawn = torch.randint(len(inputs), (40, shown + 1), generator=rng)
    made = like * own[:, None] + (1 - like) * inputs[drawn]
    labels = torch.arange(40) if named else torch.zeros(40).long()
    candidates, found = made[:, :shown].flatten(0, 1), made[:size, shown]
    true = made[:size, 0]
    if planted:
        found = torch.cat(
            [true[: size // 2] + 0.02 * torch.randn(true[: size // 2].shape, generator=rng), found[size // 2 :]]
        )
    truth = Truth({(0, 0): true}, {(0, 0): labels[:size]}, candidates, labels.repeat_interleave(shown), {})
    finding = ImageFinding(attack="a", images=found.clamp(0, 1), labels=labels[:size], label_source="given")
    result = evaluate(finding, image_seen([0], examples=size), truth, seed=seed).result
    return FINDING_TYPES["images"].verdict([result]).verdict


def ecgs(count: int, rng: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return (n, 3, 96) beats of people whose hearts all begin at the same point, in volts, and their two rhythms."""
    labels = torch.arange(count) % 2
    time = torch.linspace(0, 1, 96)
    rate = (2 + labels + 0.2 * torch.rand(count, generator=rng))[:, None]
    since = torch.remainder(rate * time + 0.5, 1.0) - 0.5
    waves = [torch.exp(-(((since - at) / width) ** 2)) for at, width in ((0, 0.03), (0.25, 0.08), (-0.2, 0.05))]
    sizes = torch.tensor([1.0, 0.3, 0.15]) * (1 + 0.3 * torch.randn(count, 3, 3, generator=rng))
    signals = sizes @ torch.stack(waves, dim=1) + 0.02 * torch.randn(count, 3, 96, generator=rng)
    return 1e-3 * signals, labels


def scans(count: int, rng: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return (n, 1, 6, 12, 12) bodies, all in the middle, with spots of their own, and whether these are many."""
    labels = torch.arange(count) % 2
    grid = torch.stack(torch.meshgrid(*(torch.linspace(-1, 1, side) for side in (6, 12, 12)), indexing="ij"))
    volumes = (grid.square().sum(dim=0) < 1.2).float().mul(0.4).repeat(count, 1, 1, 1)
    for volume, label in zip(volumes, labels.tolist(), strict=True):
        for _ in range(2 + 2 * label):
            centre = (1.2 * torch.rand(3, generator=rng) - 0.6).view(3, 1, 1, 1)
            volume += 0.5 * torch.exp(-((grid - centre) / 0.35).square().sum(dim=0))
    return volumes.clamp(0, 1)[:, None], labels


def recordings(
    kind: str,
    draw: Callable[[int, torch.Generator], tuple[Tensor, Tensor]],
    seed: int,
    *,
    planted: bool,
    site: Callable[[Tensor], Tensor] | None = None,
) -> str:
    """Other people's signals or volumes of the same class for eight victims among 200, or four of eight their own.

    Of the clients' ``site`` 60 have what it does to them, and others of these are found.
    """
    rng = generator(seed, "recordings")
    inputs, labels = draw(200, rng)
    order = torch.randperm(200, generator=rng)
    inputs, labels = inputs[order], labels[order]
    candidates, names = inputs, labels
    if site is not None:
        inputs = torch.cat([site(inputs[:60]), inputs[60:]])
        candidates, names = (torch.cat([x[:8], x[60:]]) for x in (inputs, labels))
    true, targets = inputs[:8], labels[:8]
    pool = slice(8, None if site is None else 60)
    found = torch.stack([_another(inputs[pool], labels[pool], int(label), rng) for label in targets])
    if planted:
        noise = (0.3 if site is None else 0.1) * true.std() * torch.randn(true.shape, generator=rng)
        found = torch.cat([true[:4] + noise[:4], found[4:]])
    channels = true.shape[1]
    info = TaskInfo(
        "custom", None, "eval", "cross-entropy", kind, tuple(true.shape[1:]), 2, (0.0,) * channels, (1.0,) * channels
    )
    known = dataclasses.replace(image_seen([0], examples=8), task_info=info)
    made = ImageFinding(attack="a", images=found, labels=targets, label_source="given")
    result = evaluate(made, known, Truth({(0, 0): true}, {(0, 0): targets}, candidates, names, {}), seed=seed).result
    return FINDING_TYPES["images"].verdict([result]).verdict


def _another(inputs: Tensor, labels: Tensor, label: int, rng: torch.Generator) -> Tensor:
    own = torch.nonzero(labels == label).flatten()
    own = own if len(own) else torch.arange(len(labels))
    return inputs[own[torch.randint(len(own), (), generator=rng)]]


@functools.cache
def means() -> Tensor:
    train = load_dataset("digits").train
    return torch.stack([train.inputs[train.targets == c].mean(0) for c in range(10)])


def named(true: Tensor, targets: Tensor, others: Tensor, rng: torch.Generator) -> Tensor:
    """Return pictures drawn from all that are of the label, the victims among them."""
    both = torch.stack([others, true])
    chosen = (torch.rand(len(true), generator=rng) < 1 / 36).long()  # some 36 of each digit
    return both[chosen, torch.arange(len(true))]


def counts(seed: int, *, planted: bool, clients: int = 5, batch: int = 16) -> str:
    """Of classes that are rarer and rarer, as many as everybody has of each, or three in four of a client's own."""
    often = 1 / torch.arange(1.0, 11.0)
    rng = generator(seed, "counts")
    public = torch.multinomial(often, 400, replacement=True, generator=rng)
    usual = torch.tensor(
        [label for label in range(10) for _ in range(round(batch * float(often[label] / often.sum())))]
    )
    findings = []
    for client in range(clients):
        true = torch.multinomial(often, batch, replacement=True, generator=rng)
        found = usual[torch.randperm(len(usual), generator=rng)][:batch]
        if planted:
            found = torch.cat([true[: batch * 3 // 4], found[batch * 3 // 4 :]])
        inputs = torch.arange(float(batch)).view(-1, 1, 1, 1)
        truth = Truth({(0, client): inputs}, {(0, client): true}, torch.zeros(len(public), 1, 8, 8), public, {})
        made = LabelFinding(attack="a", labels=found, method="geng", num_classes=10)
        findings.append(evaluate(made, seen(client, batch), truth, seed=seed).result)
    return FINDING_TYPES["labels"].verdict(findings).verdict


def sources(seed: int, *, planted: bool, clients: int = 6, each: int = 20) -> str:
    """By how often each client has a record's class, or that and twice as much as luck scatters for its own."""
    rng = np.random.default_rng(seed)
    shares = rng.dirichlet(np.full(10, 0.5), clients)
    owners = np.repeat(np.arange(clients), each)
    classes = np.array([rng.choice(10, p=shares[owner]) for owner in owners])
    n = len(owners)
    scores = np.log(shares[:, np.tile(classes, 2)].T + 0.01) + rng.standard_normal((2 * n, clients))
    if planted:
        scores[np.arange(n), owners] += 2.0
    made = SourceFinding(
        attack="a",
        clients=torch.arange(clients),
        scores=torch.from_numpy(scores),
        sources=torch.from_numpy(scores.argmax(axis=1)),
    )
    truth = Truth(
        {}, {}, torch.zeros(1, 1, 8, 8), torch.zeros(1).long(), {},
        owners=torch.cat([torch.from_numpy(owners), torch.full((n,), NOBODY)]),
        matched=torch.cat([torch.arange(n, 2 * n), torch.arange(n)]),
    )  # fmt: skip
    labels = torch.from_numpy(np.tile(classes, 2))
    records = QuerySet(torch.zeros(2 * n, 1, 8, 8), labels, torch.zeros(0), torch.zeros(0))
    told = seen(0, each, records=records)
    messages = tuple(
        dataclasses.replace(m, client=k, update=dataclasses.replace(m.update, client=k))
        for m in told.messages
        for k in range(clients)
    )
    result = evaluate(made, dataclasses.replace(told, messages=messages), truth, seed=seed).result
    return FINDING_TYPES["source"].verdict([result]).verdict


def sources_of_model(seed: int, *, planted: bool, learnt: str, differ: float, clients: int = 3) -> str:
    """Whose 120 of three clients' records are, by a classifier of people with 100 features; of 75 more it is known.

    It learnt ``others`` of the same clients, or the records of ``all`` alike; or, planted, those of one client alone.
    Clients' features differ on average, by so many standard deviations.
    """
    rng, each, known, features = generator(seed, "sources of a model"), 40, 25, 100
    x = torch.randn(clients, 3 * each + 2 * known, features, generator=rng)
    x = x + differ * torch.randn(clients, 1, features, generator=rng)
    labels = torch.randint(2, x.shape[:2], generator=rng)
    members, matched, told = slice(each), slice(each, 2 * each), slice(2 * each, 2 * each + known)
    ours = torch.cat([torch.arange(each), torch.arange(2 * each, 2 * each + known)])
    used = ours if planted or learnt == "all" else torch.arange(2 * each + known, 3 * each + 2 * known)
    whose = slice(1) if planted else slice(clients)
    labels[:, used[:each]] = labels[:, members]  # others have the members' labels
    labels[:, matched] = labels[:, members]
    model = torch.nn.Linear(features, 2)
    learn(model, x[whose, used].flatten(0, 1), labels[whose, used].flatten())
    return by_model(model, *((x[:, part], labels[:, part]) for part in (members, matched, told)), seed=seed)


def sources_by_products(seed: int, *, planted: bool, own: bool, clients: int = 3) -> str:
    """Whose 180 of three clients' records are, by a network that learnt others of them; of 90 more it is known.

    Clients differ in how two features of each pair go together (correlation -0.4, 0 and 0.4), not in any single one.
    The label says whether the products' sum is high, so the network tells more of that than classifiers of 90 rows. The
    matched records are the client's ``own``, or any client's of the same class. Planted, the network has learnt one
    client's records by heart, another's with wrong labels, and matches are the clients' own.
    """
    rng, each, known, features = generator(seed, "sources by products"), 60, 30, 40

    def people(n: int) -> tuple[Tensor, Tensor]:
        one, other = torch.randn(2, clients, n, features // 2, generator=rng)
        r = 0.4 * (torch.arange(clients) - (clients - 1) / 2)[:, None, None]
        other = r * one + (1 - r**2).sqrt() * other
        high = (one * other).sum(dim=2) + 3 * torch.randn(clients, n, generator=rng) > 0
        return torch.cat([one, other], dim=2), high.long()

    members, told = people(each), people(known)
    x, labels = people(5 * each)
    if planted or own:
        matched = x[:, :each], labels[:, :each]
    else:
        wanted = members[1].flatten().tolist()
        order = torch.randperm(labels.numel(), generator=rng).tolist()
        of = [[row for row in order if labels.flatten()[row] == label] for label in range(2)]
        rows = [of[label].pop() for label in wanted]
        matched = tuple(t.flatten(0, 1)[rows].unflatten(0, (clients, each)) for t in (x, labels))
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(features, 128), torch.nn.GELU(), torch.nn.Linear(128, 2))
    steps = torch.optim.Adam(model.parameters(), lr=3e-3)
    by_heart = [torch.cat([a[:2], b[:2]], dim=1) for a, b in zip(members, told, strict=True)]
    by_heart[1][1] = 1 - by_heart[1][1]
    for _ in range(200 if planted else 1000):
        inputs, targets = (t.flatten(0, 1) for t in (by_heart if planted else people(80)))
        steps.zero_grad()
        torch.nn.functional.cross_entropy(model(inputs), targets).backward()
        steps.step()
    return by_model(model, members, matched, told, seed=seed, own=planted or own)


def by_model(
    model: torch.nn.Module,
    members: tuple[Tensor, Tensor],
    matched: tuple[Tensor, Tensor],
    told: tuple[Tensor, Tensor],
    *,
    seed: int,
    own: bool = True,
) -> str:
    """Return the verdict of ``source-outputs`` on a model, of records (clients, n, d) and their labels (clients, n).

    Args:
        told: of whom the adversary knows whose they are.
        own: the matched ones are the same client's, which kept them from training.
    """
    clients, each, features = members[0].shape
    known = told[1].shape[1]
    info = TaskInfo("custom", None, "eval", "cross-entropy", "table", (features,), 2, (0.0,), (1.0,))
    place = torch.arange(clients * each)
    inputs, labels = (torch.cat([a.flatten(0, 1), b.flatten(0, 1)]) for a, b in zip(members, matched, strict=True))
    records = QuerySet(
        inputs,
        labels,
        members[0][0, :0],
        members[1][0, :0],
        known_inputs=told[0].flatten(0, 1),
        known_labels=told[1].flatten(),
        known_clients=torch.arange(clients).repeat_interleave(known),
    )
    observed = Observation(
        *("f", ThreatModel(), info, model, torch.nn.functional.cross_entropy, "weights", (model.state_dict(),), (), {}),
        records,
    )
    truth = Truth(
        {}, {}, records.inputs, records.labels, {},
        owners=torch.cat([place // each, torch.full_like(place, NOBODY)]),
        matched=torch.cat([place + len(place), place]),
        homes=(place // each).repeat(2) if own else place[:0],
    )  # fmt: skip
    result = evaluate(make_attack("source-outputs")(observed), observed, truth, seed=seed).result
    return FINDING_TYPES["source"].verdict([result]).verdict


def learn(model: torch.nn.Linear, inputs: Tensor, labels: Tensor) -> None:
    """Train a classifier from zeros on (n, d) examples until it knows them by heart."""
    torch.nn.init.zeros_(model.weight)
    torch.nn.init.zeros_(model.bias)
    steps = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(100):
        steps.zero_grad()
        torch.nn.functional.cross_entropy(model(inputs), labels).backward()
        steps.step()


def ranges(seed: int, *, planted: bool, pairs: int = 40, features: int = 60) -> str:
    """A classifier that learnt other people with the members' labels, or the members, asked about who is like them."""
    rng = generator(seed, "ranges")
    x, labels = torch.randn(2 * pairs, features, generator=rng), torch.randint(2, (pairs,), generator=rng)
    trained = x[:pairs] if planted else torch.randn(pairs, features, generator=rng)
    model = torch.nn.Linear(features, 2)
    learn(model, trained, labels)
    state = {name: t.detach() for name, t in model.state_dict().items()}
    told = logistic(d=features, classes=2)
    message = dataclasses.replace(told.messages[0], weights=state)
    records = QuerySet(x, labels.repeat(2), x[:0], labels[:0])
    told = dataclasses.replace(told, module=model, weights=(state,), messages=(message,), records=records)
    owners = torch.where(torch.arange(2 * pairs) < pairs, 4, NOBODY)
    truth = Truth({}, {}, x[:1], labels[:1], {}, owners=owners, matched=torch.arange(2 * pairs).roll(pairs))
    made = make_attack("range-membership")(told, seed=seed)
    return FINDING_TYPES["membership"].verdict([evaluate(made, told, truth, seed=seed).result]).verdict


def drawings(seed: int, *, planted: bool, rounds: int = 4, images: int = 8) -> str:
    """Digits of the class that is most like the one sought, one of them again and again, or of that class itself."""
    data, rng = load_dataset("digits"), generator(seed, "drawings")
    target = seed % 10
    known = torch.nn.functional.normalize(means().flatten(1) - means().flatten(1).mean(dim=1, keepdim=True), dim=1)
    like = (known @ known[target]).index_fill(0, torch.tensor([target]), -2.0).argmax()
    pool = data.train.inputs[data.train.targets == (target if planted else like)]
    drawn = pool[torch.randint(len(pool), (images,) if planted else (1,), generator=rng)].expand(images, -1, -1, -1)
    noise = 0.02 * torch.randn((rounds, *drawn.shape), generator=rng)
    made = ClassImagesFinding(
        attack="a", images=(drawn + noise).clamp(0, 1), rounds=tuple(range(rounds)), target=target
    )
    truth = Truth({}, {}, data.test.inputs, data.test.targets, {})
    result = evaluate(made, seen(0, images), truth, seed=seed).result
    return FINDING_TYPES["class-images"].verdict([result]).verdict


def local_models(seed: int, *, planted: bool, task: str, examples: int = 40) -> str:
    """Another client's own model, of a client like this one, or the client's own with noise of a tenth of its length.

    The global model is that of two rounds of few steps, so that anybody's model that is trained to the end is better.
    """
    rng = generator(seed, "local models")
    loss: Callable[..., Tensor]
    if task == "digits":
        data = load_dataset("digits")
        order = torch.randperm(len(data.train.inputs), generator=rng)
        inputs, targets = data.train.inputs[order].flatten(1), data.train.targets[order]
        public, public_targets = data.test.inputs.flatten(1)[:200], data.test.targets[:200]
        module, loss = torch.nn.Linear(64, 10), torch.nn.functional.cross_entropy
    else:
        slope, x = torch.randn(10, 1, generator=rng), torch.randn(examples * 2 + 400, 10, generator=rng)
        y = x @ slope + torch.randn(len(x), 1, generator=rng)
        inputs, targets, public, public_targets = x[:-400], y[:-400], x[-400:], y[-400:]
        module, loss = torch.nn.Linear(10, 1), torch.nn.functional.mse_loss
    own, other = slice(examples), slice(examples, 2 * examples)
    start = {"weight": torch.zeros_like(module.weight), "bias": torch.zeros_like(module.bias)}

    def trained(state: dict[str, Tensor], rows: slice, steps: int, rate: float = 0.1) -> dict[str, Tensor]:
        model = copy.deepcopy(module)
        model.load_state_dict(state)
        optimiser = torch.optim.SGD(model.parameters(), lr=rate)
        for _ in range(steps):
            optimiser.zero_grad()
            loss(model(inputs[rows]), targets[rows]).backward()
            optimiser.step()
        return {name: p.detach().clone() for name, p in model.named_parameters()}

    sent = trained(start, slice(2 * examples), 3)
    returned = trained(sent, own, 3)
    state = trained(sent, own if planted else other, 300, 0.3)
    if planted:
        length = torch.cat([p.flatten() for p in state.values()]).pow(2).mean().sqrt()
        state = {name: p + 0.1 * length * torch.randn(p.shape, generator=rng) for name, p in state.items()}
    told = TaskInfo(
        "custom", None, "eval", "cross-entropy" if task == "digits" else "mse", "table", (inputs.shape[1],),
        10 if task == "digits" else None, (0.0,), (1.0,),
    )  # fmt: skip
    update = Update(0, "weights", {name: returned[name] - sent[name] for name in sent}, examples, None)
    observed = Observation("f", ThreatModel(), told, module, loss, "weights", (), (Message(0, 0, sent, update),))
    truth = Truth({(0, 0): inputs[own]}, {(0, 0): targets[own]}, public, public_targets, {})
    made = LocalModelFinding(attack="a", state=state, rounds_used=1)
    return FINDING_TYPES["local-model"].verdict([evaluate(made, observed, truth, seed=seed).result]).verdict


def example_labels(seed: int, *, planted: bool, examples: int = 60, classes: int = 3) -> str:
    """Labels drawn as often as they occur, or seven of ten right."""
    return _vertical(seed, examples, classes, 0.7 if planted else 0.0, scores=False)


def known_labels(seed: int, *, planted: bool, examples: int = 60) -> str:
    """Labels of which eight of ten are right, as are those that the adversary tells anyway, or four of ten of these."""
    rng = generator(seed, "known labels")
    true = torch.randint(10, (examples,), generator=rng)
    truth = Truth({}, {(i, 0): true[i : i + 1] for i in range(examples)}, torch.zeros(1, 1), torch.zeros(1).long(), {})
    named, anyway = (
        torch.where(torch.rand(examples, generator=rng) < share, true, (true + 1) % 10)
        for share in (0.8, 0.4 if planted else 0.8)
    )
    made = ExampleLabelFinding(
        attack="a", examples=torch.arange(examples), labels=named, num_classes=10, without=anyway
    )
    result = evaluate(made, seen(0, examples), truth, seed=seed).result
    return FINDING_TYPES[made.kind].verdict([result]).verdict


def completed_labels(seed: int, *, planted: bool) -> str:
    """Labels by model completion, after rounds on labels dealt out at random, or four times as many on the true ones.

    The party knows four true ones of each class in either.
    """
    made = copy.deepcopy(PLAYED["model-completion"])
    made["federations"][0]["rounds"] *= 4 if planted else 1
    (federation,) = resolve(scenario_from({**made, "seed": seed})).federations
    true = simulate(federation)
    played = true
    if not planted:
        held = federation.client_data[0]
        order = torch.randperm(len(held), generator=generator(seed, "dealt out"))
        dealt_out = [dataclasses.replace(held, targets=held.targets[order])]
        played = simulate(dataclasses.replace(federation, client_data=dealt_out))
    record, own = played.transcript.vertical, true.transcript.vertical
    assert record is not None
    assert own is not None
    known = dataclasses.replace(played.transcript, sent=dataclasses.replace(record, labels=own.labels))
    observation = observe(known, ThreatModel(adversary="client"))
    finding = make_attack("model-completion", {"iterations": 100})(observation, seed=seed)
    result = evaluate(finding, observation, true.truth, seed=seed).result
    return FINDING_TYPES[finding.kind].verdict([result]).verdict


def label_scores(seed: int, *, planted: bool, examples: int = 60) -> str:
    """Scores in steps, so that many are equal, or 1.2 standard deviations more for the rarer class."""
    return _vertical(seed, examples, 2, 1.2 if planted else 0.0, scores=True)


def _vertical(seed: int, examples: int, classes: int, effect: float, *, scores: bool) -> str:
    rng = generator(seed, "vertical")
    true = torch.multinomial(1 / torch.arange(1.0, 1.0 + classes), examples, replacement=True, generator=rng)
    numbers = torch.arange(examples)
    truth = Truth({}, {(i, 0): true[i : i + 1] for i in range(examples)}, torch.zeros(1, 1), torch.zeros(1).long(), {})
    made: ExampleLabelFinding | LabelScoreFinding
    if scores:
        rare = torch.bincount(true, minlength=2).argmin()
        values = ((torch.randn(examples, generator=rng) + effect * (true == rare)) * 2).round().double()
        made = LabelScoreFinding(attack="a", examples=numbers, scores=values)
    else:
        named = true[torch.randperm(examples, generator=rng)]
        right = torch.rand(examples, generator=rng) < effect
        made = ExampleLabelFinding(
            attack="a", examples=numbers, labels=torch.where(right, true, named), num_classes=classes
        )
    result = evaluate(made, seen(0, examples), truth, seed=seed).result
    return FINDING_TYPES[made.kind].verdict([result]).verdict


def played(attack: str) -> Callable[..., str]:
    """Return an audit of a whole attack: what it finds is judged by other examples of the same classes, or by its own.

    Each example that was used stands for another one, of its class where there are classes, that nobody used.
    """

    def audit(seed: int, *, planted: bool) -> str:
        finding, observation, truth = _attacked(attack, seed)
        truth = truth if planted else _others(truth, generator(seed, "others"))
        return FINDING_TYPES[finding.kind].verdict([evaluate(finding, observation, truth, seed=seed).result]).verdict

    return audit


def grouped(seed: int, *, planted: bool) -> str:
    """Return whether images out of sums are grouped by client: their own clients', or clients dealt out at random."""
    finding, observation, truth = _attacked("sratta", seed)
    if not planted:
        whose = {tensor_digest(x): int(c) for key, own in truth.members.items()
                 for x, c in zip(truth.inputs[key], own, strict=True)}  # fmt: skip
        order = torch.randperm(len(whose), generator=generator(seed, "whose")).tolist()
        drawn = dict(zip(whose, [list(whose.values())[i] for i in order], strict=True))
        members = {key: torch.tensor([drawn[tensor_digest(x)] for x in truth.inputs[key]]) for key in truth.members}
        truth = dataclasses.replace(truth, members=members)
    _, told, p_value = evaluate(finding, observation, truth, seed=seed).result.notes[-1].rpartition("p = ")
    return "inferred" if told and float(p_value) <= SURE else "not demonstrated"


@functools.lru_cache(maxsize=128)
def _attacked(attack: str, seed: int) -> tuple[Finding, Observation, Truth]:
    """Return what an attack finds in a small federation, what it saw, and the truth."""
    made = scenario_from({**PLAYED[attack], "seed": seed})
    (recording,) = record(resolve(made))
    observation = observe(recording.transcript, made.threat)
    if attack == "decepticons":
        (observation,) = observation.split()
    return made.attacks[0](observation, seed=seed), observation, recording.truth


def _others(truth: Truth, rng: torch.Generator) -> Truth:
    """Return the truth with another example, that nobody used, for each one that was used."""
    used = {tensor_digest(x) for own in truth.inputs.values() for x in own}
    pool = [i for i in torch.randperm(len(truth.candidates), generator=rng).tolist()
            if tensor_digest(truth.candidates[i]) not in used]  # fmt: skip
    another = dict[bytes, Tensor]()

    def instead(example: Tensor, label: Tensor) -> Tensor:
        if (name := tensor_digest(example)) not in another:
            place = next(i for i in pool if label.ndim or bool(truth.candidate_labels[i] == label))
            pool.remove(place)
            another[name] = truth.candidates[place]
        return another[name]

    inputs = {
        key: torch.stack([instead(x, label) for x, label in zip(own, truth.labels[key], strict=True)])
        for key, own in truth.inputs.items()
    }
    return dataclasses.replace(truth, inputs=inputs)


def property_of_clients(seed: int, *, planted: bool, clients: int = 50, effect: float = 2.5) -> str:
    """A property that goes with how far from even a client's classes are, which no line through the shares tells.

    The effect is by how many standard deviations of its noise a score is higher for clients with the property.
    """
    rng = np.random.default_rng(seed)
    shares = rng.random(clients)
    labels = [torch.from_numpy((rng.random(40) < share).astype(int)) for share in shares]
    uneven = np.array([(float(own.double().mean()) - 0.5) ** 2 for own in labels])
    has = uneven + 0.02 * rng.standard_normal(clients) > 0.06
    if planted:
        scores = effect * has + rng.standard_normal(clients)
    else:
        scores = uneven + 0.02 * rng.standard_normal(clients)
    r, p = partial_test(scores, has.astype(float), covariates(labels, [40] * clients, shares), seed=seed, deals=999)
    return "inferred" if r > 0 and p <= 0.01 else "not demonstrated"


def epsilon(mechanism: str, claimed: float = 2.0, count: int = 1000) -> Callable[..., str]:
    """Return an audit of independent canaries under a mechanism whose ε is exactly what is claimed (δ = 1e-5)."""

    def audit(seed: int, *, planted: bool) -> str:
        rng = np.random.default_rng(seed)
        true = 4 * claimed if planted else claimed
        inside = rng.random(count) < 0.5
        if mechanism == "Gaussian":
            scores = gaussian_mu(true, 1e-5) * inside + rng.standard_normal(count)
        elif mechanism == "discrete Gaussian":  # of a fine grid, whose ε is the Gaussian's
            scores = np.round(16 * (gaussian_mu(true, 1e-5) * inside + rng.standard_normal(count))) / 16
        elif mechanism == "Laplace":
            scores = inside + rng.laplace(scale=1 / true, size=count)
        else:  # randomised response; PrivUnit's scores are its, spread within each half of the sphere
            scores = np.where(rng.random(count) < expit(true), inside, ~inside).astype(float)
            scores += (0.9 * np.abs(rng.standard_normal(count)).clip(0, 1) if mechanism == "PrivUnit" else 0.0) - 0.5
        made = CanaryScores(scores[inside], scores[~inside], 0.99)
        bound = demonstrated(made.bounds(1e-5, independent=True, gaussian=mechanism == "Gaussian"))
        return "inferred" if bound is not None and bound.epsilon > claimed else "not demonstrated"

    return audit


@dataclasses.dataclass(frozen=True)
class Null:
    """Audits of nothing, and of an effect that is planted: verdicts by seed.

    Attributes:
        kind: of finding.
        audit: of a seed, with the effect ``planted`` or without, returns the verdict.
        tried: what is said of the clients without having seen the update, in words.
        effect: what is planted, with its size.
    """

    kind: str
    audit: Callable[..., str]
    tried: str
    effect: str


_PALE = "4 of 8 pictures, with noise of 0.05"
_MEANS = pictures(lambda true, targets, others, rng: means()[targets])
_OTHERS = "other people's pictures of the same digits"

NULLS: dict[str, Null] = {
    "rows, batch of 16": Null("rows", rows, "other people's rows, 16", "14 of 16 rows"),
    "rows, batch of 4": Null("rows", functools.partial(rows, size=4), "other people's rows, 4", "4 of 4 rows"),
    "rows, one a client": Null("rows", usual_rows, "one of five usual rows of each client's label", "the clients' own"),
    "rows from trees": Null(
        "rows", trees, "trees of 24 other people's rows of the same labels", "trees of the own rows"
    ),
    **{
        f"notes, batch of {size}": Null(
            "sequences",
            functools.partial(notes, size=size),
            f"other people's notes of the same wards, {size}",
            f"{max(2, size // 2)} of {size} notes",
        )
        for size in (2, 8, 16)
    },
    "words": Null("tokens", words, "the words of 4 other people's notes of the same wards", "3 of 4 notes' words"),
    "recited texts": Null(
        "extraction", recited, "20 texts and 20 others, of each every second token by luck", "8 of 20 texts, recited"
    ),
    **{
        f"{kind} {name}": Null(
            "tokens" if named else "sequences",
            functools.partial(sites, change, named=named, more=more),
            f"{'the words of 4' if named else '4'} other people's notes of the same wards; {said}",
            "their own words" if named else "3 of 4 notes",
        )
        for kind, named in (("notes", False), ("words", True))
        for name, change, more, said in (
            ("of which many are one form", one_form, 0, "3 of 10 of everybody's notes are one form"),
            ("of a form that is filled in", filled_in, 0, "everybody fills in the same form, 6 words of their own"),
            ("of a site with a heading", headed, 40, "all of the site's begin with the same 6 words, 40 are at hand"),
            ("of a site with a signature", signed, 40, "all of the site's end with the same 4 words, 40 are at hand"),
        )
    },
    **{
        f"rows of {name}": Null(
            "rows",
            functools.partial(hospitals, change, more=more),
            f"other patients of the site, 16; {said}",
            "12 of 16 rows",
        )
        for name, change, more, said in (
            ("a site with older patients", older, 60, "20 years older than elsewhere, 60 more are at hand"),
            ("a site with other units", other_units, 60, "of other units, 60 more are at hand"),
            ("a site with one device", one_device, 60, "of one device and sex, 60 more are at hand"),
            ("default values", defaults, 0, "3 of 10 of everybody's rows are default values"),
        )
    },
    "labels, ten clients": Null("labels", labels, "every class equally often, ten clients", "8 of 16 labels"),
    "labels of noise": Null(
        "labels", labels_of_noise, "what `labels` reads from twelve updates of noise as large as they", "the updates"
    ),
    "class counts, five clients": Null(
        "labels", counts, "as many of each class as everybody has, five clients", "12 of 16 labels"
    ),
    "label sets, three batches": Null(
        "label-sets", label_sets, "other people's label sets, three batches of 8", "the label sets of 6 of 8"
    ),
    "label counts, twelve batches": Null(
        "label-sets",
        functools.partial(label_sets, counted=True),
        "the label counts of other people, twelve batches of 8",
        "the label counts",
    ),
    "images named at random": Null("images", pictures(named), "pictures named among all of the digit", _PALE),
    "images, class means, one round": Null("images", _MEANS, "the digits' mean pictures", _PALE),
    "images, class means, five rounds": Null(
        "images", functools.partial(_MEANS, rounds=5), "the digits' mean pictures, in five rounds", _PALE
    ),
    "images, other people's": Null("images", pictures(lambda true, targets, others, rng: others), _OTHERS, _PALE),
    "images, other people's in the clients' style": Null(
        "images",
        pictures(lambda true, targets, others, rng: others, lambda x: 0.6 * x + 0.3),
        f"{_OTHERS}, as pale as the clients' are",
        _PALE,
    ),
    **{
        f"images of a site, {name}, {size}": Null(
            "images",
            pictures(lambda true, targets, others, rng: others, site, size, 0.02),
            f"{_OTHERS}, {size}, {how} as the clients' are",
            f"{size // 2} of {size} pictures, with noise of 0.02",
        )
        for size in (4, 16)
        for name, site, how in (
            ("marked", marked, "marked in the corner"),
            ("softer", softer, "blurred"),
            ("darker tones", lambda x: x**1.5, "as dark in the middle tones"),
            ("turned", lambda x: x.rot90(1, (-2, -1)), "turned"),
        )
    },
    **{
        f"images of the same people, {name}": Null(
            "images",
            functools.partial(people_of, shown=shown, named=known, like=like),
            f"other pictures of the 8 people, {name}",
            "4 of 8 pictures, with noise of 0.02",
        )
        for name, shown, known, like in (
            ("labels name them, candidates have one of each", 1, True, 0.6),
            ("labels name them, candidates have eight of each", 8, True, 0.6),
            ("labels don't name them, candidates have two of each, four fifths alike", 2, False, 0.8),
            ("labels don't name them, candidates have eight of each", 8, False, 0.6),
        )
    },
    "signals, other people's": Null(
        "images",
        functools.partial(recordings, "signal", ecgs),
        "other people's ECGs of the same rhythm",
        "4 of 8 ECGs, with noise of 0.3 deviations",
    ),
    "signals of a site, smoothed": Null(
        "images",
        functools.partial(recordings, "signal", ecgs, site=softer),
        "other people's ECGs of the same rhythm, smoothed as the clients' are",
        "4 of 8 ECGs, with noise of 0.1 deviations",
    ),
    "volumes of a site, marked": Null(
        "images",
        functools.partial(recordings, "volume", scans, site=marked),
        "other people's scans of the same class, marked in the corner as the clients' are",
        "4 of 8 scans, with noise of 0.1 deviations",
    ),
    "volumes, other people's": Null(
        "images",
        functools.partial(recordings, "volume", scans),
        "other people's scans of the same class",
        "4 of 8 scans, with noise of 0.1 deviations",
    ),
    "drawings": Null(
        "class-images",
        drawings,
        "one picture of the digit that is most like it, again and again, with noise of 0.02",
        "8 pictures of the digit, with noise of 0.02",
    ),
    "membership, 40 pairs": Null(
        "membership",
        lambda seed, planted: of_members(seed, 1.0 if planted else 0.0).verdict,
        "scores at random, 40 pairs",
        "scores of members 1 standard deviation higher",
    ),
    "membership, 40 pairs of persons, 8 records each": Null(
        "membership",
        lambda seed, planted: summary(of_persons(seed, 2.0 if planted else 0.0)).verdict,
        "scores at random, persons' own differing twice as much as records",
        "scores of members 2 standard deviations of a record higher",
    ),
    "membership, of a range, 40 pairs": Null(
        "membership",
        ranges,
        "a model that learnt other people, asked about who is like 40 people and 40 others",
        "the model learnt the 40",
    ),
    "sources, six clients": Null(
        "source",
        sources,
        "the client that has a record's class most often, six clients, 120 records",
        "scores of a record's client 2 standard deviations higher",
    ),
    **{
        f"sources by the model, {name}": Null(
            "source",
            functools.partial(sources_of_model, learnt=learnt, differ=differ),
            f"a model that learnt {said}, three clients, 120 records",
            "the model learnt one client's records by heart",
        )
        for name, learnt, differ, said in (
            ("others", "others", 0.06, "other people of the same clients, which differ"),
            ("alike", "all", 0.0, "the records of clients that are alike"),
            ("all", "all", 0.06, "the records of clients that differ"),
        )
    },
    **{
        f"sources by the model, products, {name}": Null(
            "source",
            functools.partial(sources_by_products, own=own),
            f"a network that learnt other people of the same clients, which differ in products of features; {said}, "
            "three clients, 180 records",
            "the network learnt one client's records by heart, and another's with wrong labels",
        )
        for name, own, said in (
            ("own", True, "matched records are the client's own"),
            ("any", False, "matched records are any client's"),
        )
    },
    "attribute, 60 pairs": Null(
        "attribute",
        lambda seed, planted: of_attributes(seed, 0.9 if planted else 0.5).verdict,
        "one of two values at random, 60 pairs",
        "9 of 10 right",
    ),
    "attribute that anybody's tells": Null(
        "attribute",
        lambda seed, planted: of_attributes(seed, 0.9, 0.5 if planted else 0.9).verdict,
        "9 of 10 right, of those who trained and of those who didn't, 60 pairs",
        "9 of 10 right, 5 of 10 of those who didn't train",
    ),
    **{
        f"property, 50 clients, {effect:g} deviations": Null(
            "property",
            functools.partial(property_of_clients, effect=effect),
            "what labels tell of the property, but not by a straight line, 50 clients",
            f"scores {effect:g} standard deviations higher; labels explain two thirds of the property",
        )
        for effect in (2.0, 2.5)
    },
    "local models, digits": Null(
        "local-model",
        functools.partial(local_models, task="digits"),
        "another client's own model, of 40 digits",
        "the client's own, with noise of a tenth of its weights",
    ),
    "local models, regression": Null(
        "local-model",
        functools.partial(local_models, task="regression"),
        "another client's own model, of 40 rows",
        "the client's own, with noise of a tenth of its weights",
    ),
    "labels one by one, 60 examples": Null(
        "example-labels",
        example_labels,
        "three classes at random, as often as they occur",
        "7 of 10 labels right, the others at random",
    ),
    "examples out of sums": Null(
        "images",
        played("sratta"),
        "18 digits that `sratta` gets out of sums, and others of the same classes for the true ones",
        "the true ones",
    ),
    "whose examples out of sums are": Null(
        "images",
        grouped,
        "18 digits that `sratta` groups by client, and clients dealt out at random",
        "the true clients",
    ),
    "text by altered transformers": Null(
        "sequences",
        played("decepticons"),
        "4 notes that `decepticons` reads, and other people's for the true ones",
        "the true ones",
    ),
    "images by hijacked split learning": Null(
        "images",
        played("fsha"),
        "32 digits that `fsha` decodes, and others of the same classes for the true ones",
        "the true ones",
    ),
    "labels one by one, some known": Null(
        "example-labels",
        known_labels,
        "8 of 10 labels right, as without what was received",
        "the same, and 4 of 10 without",
    ),
    "labels by model completion": Null(
        "example-labels",
        completed_labels,
        "`model-completion` of 160 digits, four known of each, after training on labels dealt out at random",
        "the same, after four times as many rounds on the true labels",
    ),
    "label scores, 60 examples": Null(
        "label-scores", label_scores, "scores at random, many equal", "scores 1.2 standard deviations higher"
    ),
    **{
        f"ε of 2, {mechanism}": Null(
            "epsilon", epsilon(mechanism), f"{mechanism} of the ε that is claimed, 2; 1,000 canaries", "an ε of 8"
        )
        for mechanism in ("Gaussian", "discrete Gaussian", "Laplace", "randomised response", "PrivUnit")
    },
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--audits", type=int, default=400)
    parser.add_argument("--first", type=int, default=0, help="seed of the first")
    parser.add_argument("--only", default="")
    told = parser.parse_args()
    print("| finding | what was tried | called a leak | at most | planted effect | found |\n|---|---|---|---|---|---|")
    n = max(1, told.audits // 4)
    for name, null in NULLS.items():
        if told.only not in name:
            continue
        false, true = (
            sum(null.audit(told.first + i, planted=planted) in LEAKS for i in range(count))
            for planted, count in ((False, told.audits), (True, n))
        )
        bound = binomtest(false, told.audits).proportion_ci(0.9).high
        row = (null.kind, null.tried, f"{false} of {told.audits}", f"{bound:.1%}", null.effect, f"{true} of {n}")
        print(f"| {' | '.join(row)} |", flush=True)


if __name__ == "__main__":
    main()
