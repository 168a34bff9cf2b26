"""Power: what an attack recovers of known examples under the audited conditions.

"Found nothing" is an answer only where the attack would have found something: so it is run on updates of known
examples, made under the very same conditions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from fedaudit.attacks import Attack, Finding
from fedaudit.attacks.base import own_failures
from fedaudit.attacks.inversion.own_updates import check_repeatable, distinct, own_client
from fedaudit.evaluation import evaluate
from fedaudit.evaluation.images import visible
from fedaudit.evaluation.statistics import proportion
from fedaudit.pipeline.calibrations import calibrated, own_images
from fedaudit.pipeline.trials import Means, Trial, run_trials
from fedaudit.results import FindingResult, ImageResult
from fedaudit.transcript.observation import Observation
from fedaudit.transcript.truth import Truth
from fedaudit.utils.errors import NotApplicable, OutOfTime
from fedaudit.utils.fingerprint import tensor_digest
from fedaudit.utils.seeds import generator

LEAST = 0.8  # share of known examples that an attack with power recovers
SURELY = 0.5  # what the interval's lower end must reach, too: six of six, eight of nine
_IMAGES = 10  # known ones that decide, about
HELD_OUT = "held-out examples"
MIXED = "examples of all clients, dealt out anew,"
_MARGINAL = 0.1  # of an iteration's time on one example, for each further one: 16 cost 1.5 to 2.7 times as much as one
_PART = 20  # an attack's iterations are divided by, where it is only looked whether it has a chance
_FEWEST = 200  # iterations, that this leaves
_WAVE = 3  # clients that are attacked before it is looked whether more are needed


class Refused(NotApplicable):
    """The attack refuses updates that were made under these conditions."""


@dataclass(frozen=True)
class Power:
    """What an attack recovered of known examples.

    Attributes:
        recovered: how many came out visibly.
        images: how many were attacked.
        results: of each.
        done: the attack's runs, evaluated.
        files: images of the results, by name.
        source: whose examples these are, in the plural.
        work: that it took, calibration included, see :func:`work_of`.
    """

    recovered: int
    images: int
    results: list[ImageResult]
    done: list[FindingResult]
    files: dict[str, Tensor]
    source: str
    work: float = 0.0

    @property
    def things(self) -> str:
        """What the examples are called, in the plural."""
        return self.done[0].example_noun if self.done else "images"

    @property
    def enough(self) -> bool:
        """Whether the attack has power: it recovers nearly all, and luck is no reason for it."""
        return powerful(self.recovered, self.images)

    @property
    def psnr(self) -> float | None:
        """Mean in dB; None where nothing was attacked."""
        return sum(image.psnr for image in self.results) / len(self.results) if self.results else None


def powerful(recovered: int, images: int) -> bool:
    """Return whether so many of so many recovered mean power: 80 %, and at least 50 % by the 95 % interval."""
    return images > 0 and recovered / images >= LEAST and proportion(recovered, images)[0] >= SURELY


def work_of(attack: Attack, examples: int, runs: int = 1) -> float:
    """Return what runs on updates over so many examples cost, in iterations on one example."""
    return runs * attack.effort() * (1 + _MARGINAL * max(0, examples - 1))


def least_work(attack: Attack, observation: Observation) -> float:
    """Return what :func:`power_of` costs at least, in iterations on one example."""
    runs = min(_WAVE, -(-_IMAGES // distinct(observation))) + (attack.calibration(observation) is not None)
    return work_of(attack, observation.single().update.num_examples, runs)


class KnownClients:
    """Clients of known examples, whose updates are made as those that attacks ran on.

    The examples are held out: candidates that are no victims, or photographs that no calibration has seen.

    Args:
        runs: the attack, and what it was run on; taken in turn.
        name: of the condition, for the names of images.
        mixed: whether, where too few are held out, the clients' own will do, drawn anew from all of them together: for
            what is told of an update as a whole.

    Raises:
        NotApplicable: nobody can repeat such training; there are too few examples.
    """

    def __init__(
        self,
        runs: Sequence[tuple[Attack, Observation]],
        truth: Truth,
        *,
        seed: int,
        device: str,
        name: str,
        mixed: bool = False,
    ) -> None:
        for _, observation in runs:
            for single in observation.split():
                check_repeatable(single)
        self.runs, self.seed, self.device, self.name = runs, seed, device, name
        self.size = max(distinct(observation) for _, observation in runs)
        self.inputs, self.labels, self.source = _known(truth, *runs[0], self.size, mixed)
        self.rng = generator(seed, "power", name)
        self._truth = replace(truth, candidates=self.inputs, candidate_labels=self.labels)

    def trial(self, attack: Attack, number: int, rows: Tensor) -> tuple[Trial, Truth]:
        """Return a trial on the client of that number, which holds the examples ``rows``, and its truth.

        Refused: the attack refuses such updates.
        """
        observation = self.runs[number % len(self.runs)][1]
        with own_failures(attack.name, observation):
            own = own_client(observation, (self.inputs[rows], self.labels[rows]), self.rng)
        messages = tuple(replace(m, client=number) for m in own.observation.messages)
        seen = replace(own.observation, federation=self.name, messages=messages)
        try:
            with own_failures(attack.name, seen):
                attack.check(seen)
        except NotApplicable as error:
            raise Refused(str(error)) from error
        orders = {(m.round, number): order for m, order in zip(messages, own.orders, strict=True)}
        inputs, labels = ({place: part[order] for place, order in orders.items()} for part in (own.inputs, own.labels))
        truth = replace(self._truth, inputs=inputs, labels=labels, rows=orders)
        return Trial(attack, seen, self.seed, self.device), truth

    def drawn(self, clients: int) -> tuple[list[Trial], Truth]:
        """Return trials on so many clients, each with other draws of the same examples, and the truth of all.

        NotApplicable: there are too few held-out examples; the attack refuses such updates.
        """
        if self.source not in (HELD_OUT, MIXED):
            raise NotApplicable("there are too few held-out examples, and others have no labels")
        trials, truths = [], []
        for number in range(clients):
            rows = torch.randperm(len(self.inputs), generator=self.rng)[: self.size]
            trial, truth = self.trial(self.runs[number % len(self.runs)][0], number, rows)
            trials.append(trial)
            truths.append(truth)
        inputs, labels, rows_of = (
            {place: own for truth in truths for place, own in getattr(truth, name).items()}
            for name in ("inputs", "labels", "rows")
        )
        return trials, replace(self._truth, inputs=inputs, labels=labels, rows=rows_of)


def at_small_effort(attack: Attack, observation: Observation) -> Attack | None:
    """Return the attack with a small part of its iterations and its own settings; None: it has none to spare."""
    names = {field.name for field in fields(attack)}  # type: ignore[arg-type]
    if "iterations" not in names:
        return None
    base: Any = attack.with_settings({}) if attack.calibration(observation) is not None else attack
    few = max(_FEWEST, base.iterations // _PART)
    return (
        replace(base, iterations=few, **({"restarts": 1} if "restarts" in names else {}))
        if few < base.iterations
        else None
    )


def power_of(known: KnownClients, means: Means, most: int | None = None) -> Power:
    """Return what attacks recover of known examples in updates that were made as the observed ones were.

    Clients are attacked three by three, until it is plain whether there is power; ``most``: so many at most. An attack
    that needs calibration gets it on the first.

    Raises:
        Refused: the attack refuses such updates.
        OutOfTime: the time that was given is spent.
    """
    size, attacks = known.size, [attack for attack, _ in known.runs]
    work, recovered, results, done, files = 0.0, 0, list[ImageResult](), list[FindingResult](), dict[str, Tensor]()
    smallest = min(distinct(observation) for _, observation in known.runs)
    clients = min(-(-_IMAGES // smallest), len(known.inputs) // size, *([most] if most else []))
    for first in range(0, clients, _WAVE):
        trials, truths = [], []
        for number in range(first, min(first + _WAVE, clients)):
            means.check()
            rows = torch.arange(number * size, (number + 1) * size)  # of other examples than all clients before
            trial, truth = known.trial(attacks[number % len(attacks)], number, rows)
            trials.append(trial)
            truths.append(truth)
        if first == 0 and attacks[0].calibration(known.runs[0][1]) is not None:
            fitted = calibrated(trials[:1], means)[0]
            work += work_of(fitted.attack, size)
            attacks = [fitted.attack]
            trials = [replace(trial, attack=fitted.attack, calibration=fitted.calibration) for trial in trials]
        work += sum(work_of(t.attack, sum(m.update.num_examples for m in t.observation.messages)) for t in trials)
        title = f"known examples under the same conditions: {known.name}"
        for trial, truth in zip(run_trials(trials, means, title), truths, strict=True):
            if not isinstance(trial.outcome, Finding):
                raise trial.outcome if isinstance(trial.outcome, OutOfTime) else Refused(str(trial.outcome))
            evaluated = evaluate(trial.outcome, trial.observation, truth, seed=known.seed)
            done.append(evaluated.result)
            results += evaluated.result.images
            files |= evaluated.image_files
        recovered = sum(_came_out(image) for image in results)
        if powerful(recovered, len(results)) or not powerful(max(0, recovered + _IMAGES - len(results)), _IMAGES):
            break
    return Power(recovered, len(results), results, done, files, known.source, work)


def undefended(observation: Observation) -> Observation:
    """Return the observation of one client with updates that no defence has changed; their numbers mean nothing."""
    names = [name for name, p in observation.module.named_parameters() if p.requires_grad]
    messages = []
    for message in observation.messages:
        whole = {name: torch.zeros_like(message.weights[name]) for name in names}
        messages.append(replace(message, update=replace(message.update, tensors=whole, sanitised=None)))
    return replace(observation, messages=tuple(messages))


def _came_out(image: ImageResult) -> bool:
    """Return whether an image came out visibly, by the rule of verdicts: as it is, moved or mirrored."""
    moved = image.registered if image.registered and image.registered.rank else None
    return visible(image) or (moved is not None and visible(moved))


def _known(
    truth: Truth, attack: Attack, observation: Observation, needed: int, mixed: bool = False
) -> tuple[Tensor, Tensor, str]:
    """Return known examples with labels: held-out ones of the same data, where there are enough, else photographs.

    ``mixed``: all of the clients' and the held-out ones, before photographs.

    What the attack may have been fitted to isn't among them: the adversary's public examples, and what its files were
    made from. NotApplicable: there are too few of either.
    """
    rows = truth.held_out()
    if observation.records is not None:
        known = {tensor_digest(example) for example in observation.records.public_inputs}
        rows = [row for row in rows if tensor_digest(truth.candidates[row]) not in known]
    public = attack.public_examples()
    if public is not None and rows:
        prints = observation.task_info.example_kind.fingerprints(truth.candidates[rows])
        rows = [row for row, fitted in zip(rows, torch.isin(prints, public).tolist(), strict=True) if not fitted]
    if len(rows) >= max(needed, _IMAGES):
        order = torch.randperm(len(rows), generator=generator(0, "known examples"))
        chosen = torch.tensor(rows)[order]
        return truth.candidates[chosen], truth.candidate_labels[chosen], HELD_OUT
    if mixed and len(truth.candidates) >= max(needed, _IMAGES):
        return truth.candidates, truth.candidate_labels, MIXED
    own = own_images(observation, held_out=True)
    if len(own.inputs) < needed:
        raise NotApplicable(f"an update like theirs is over {needed} examples, and there are {len(own.inputs)} others")
    labels = own.labels_for(observation.split()[0])
    return own.inputs, labels, own.source
