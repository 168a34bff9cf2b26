"""Power: what an attack recovers of known examples under the audited conditions.

"Found nothing" is an answer only where the attack would have found something: so it is run on updates of known
examples, made under the very same conditions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedaudit.attacks import Attack, Finding
from fedaudit.attacks.base import own_failures
from fedaudit.attacks.inversion.calibration import check_repeatable, distinct, own_client
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
_MARGINAL = 0.1  # of an iteration's time on one example, for each further one: 16 cost 1.5 to 2.7 times as much as one
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


def power_of(
    runs: Sequence[tuple[Attack, Observation]],
    truth: Truth,
    means: Means,
    *,
    seed: int,
    device: str,
    name: str,
) -> Power:
    """Return what attacks recover of known examples in updates that were made as the observed ones were.

    The examples are held out: candidates that are no victims, or photographs that no calibration has seen. Clients are
    attacked three by three, until it is plain whether there is power. An attack that needs calibration gets it on the
    first.

    Args:
        runs: the attack, and what it was run on; taken in turn.
        name: of the condition, for the names of images.

    Raises:
        NotApplicable: nobody can repeat such training; there are too few examples.
        Refused: the attack refuses such updates.
        OutOfTime: the time that was given is spent.
    """
    for _, observation in runs:
        for single in observation.split():
            check_repeatable(single)
    size = max(distinct(observation) for _, observation in runs)
    inputs, labels, source = _known(truth, *runs[0], size)
    rng = generator(seed, "power", name)
    work, recovered, results, done, files = 0.0, 0, list[ImageResult](), list[FindingResult](), dict[str, Tensor]()
    clients, attacks = min(-(-_IMAGES // size), len(inputs) // size), [attack for attack, _ in runs]
    for first in range(0, clients, _WAVE):
        trials, truths = [], []
        for number in range(first, min(first + _WAVE, clients)):
            attack, observation = attacks[number % len(attacks)], runs[number % len(runs)][1]
            rows = slice(number * size, (number + 1) * size)  # of other examples than all clients before
            with own_failures(attack.name, observation):
                own = own_client(observation, (inputs[rows], labels[rows]), rng)
            messages = tuple(replace(m, client=number) for m in own.observation.messages)
            seen = replace(own.observation, federation=name, messages=messages)
            try:
                with own_failures(attack.name, seen):
                    attack.check(seen)
            except NotApplicable as error:
                raise Refused(str(error)) from error
            trials.append(Trial(attack, seen, seed, device))
            places = [(m.round, number) for m in messages]
            held = {place: own.inputs[order] for place, order in zip(places, own.orders, strict=True)}
            told = {place: own.labels[order] for place, order in zip(places, own.orders, strict=True)}
            truths.append(replace(truth, inputs=held, labels=told, rows={}, candidates=inputs, candidate_labels=labels))
        title = f"known examples under the same conditions: {name}"
        if first == 0 and attacks[0].calibration(runs[0][1]) is not None:
            fitted = calibrated(trials[:1], means)[0]
            work += work_of(fitted.attack, size)
            attacks = [fitted.attack]
            trials = [replace(trial, attack=fitted.attack, calibration=fitted.calibration) for trial in trials]
        work += sum(work_of(t.attack, sum(m.update.num_examples for m in t.observation.messages)) for t in trials)
        for trial, known in zip(run_trials(trials, means, title), truths, strict=True):
            if not isinstance(trial.outcome, Finding):
                raise trial.outcome if isinstance(trial.outcome, OutOfTime) else Refused(str(trial.outcome))
            evaluated = evaluate(trial.outcome, trial.observation, known, seed=seed)
            done.append(evaluated.result)
            results += evaluated.result.images
            files |= evaluated.image_files
        recovered = sum(_came_out(image) for image in results)
        if powerful(recovered, len(results)) or not powerful(max(0, recovered + _IMAGES - len(results)), _IMAGES):
            break
    return Power(recovered, len(results), results, done, files, source, work)


def known_updates(
    runs: Sequence[tuple[Attack, Observation]],
    truth: Truth,
    clients: int,
    *,
    seed: int,
    device: str,
    name: str,
) -> tuple[list[Trial], Truth, str]:
    """Return trials of attacks on known clients whose updates were made as the observed ones were, and their truth.

    Each client holds other draws of the same known examples. The third is whose examples these are, in the plural. The
    rest is as of :func:`power_of`. NotApplicable: nobody can repeat such training, the attack refuses it, or there are
    too few held-out examples.
    """
    for _, observation in runs:
        for single in observation.split():
            check_repeatable(single)
    size = max(distinct(observation) for _, observation in runs)
    inputs, labels, source = _known(truth, *runs[0], size)
    if source != HELD_OUT:
        raise NotApplicable("there are too few held-out examples, and others have no labels")
    rng = generator(seed, "power", name)
    trials, held, told, rows = [], {}, {}, {}
    for number in range(clients):
        attack, observation = runs[number % len(runs)]
        own = torch.randperm(len(inputs), generator=rng)[:size]
        with own_failures(attack.name, observation):
            made = own_client(observation, (inputs[own], labels[own]), rng)
        messages = tuple(replace(m, client=number) for m in made.observation.messages)
        seen = replace(made.observation, federation=name, messages=messages)
        with own_failures(attack.name, seen):
            attack.check(seen)
        trials.append(Trial(attack, seen, seed, device))
        for message, order in zip(messages, made.orders, strict=True):
            place = message.round, number
            held[place], told[place], rows[place] = made.inputs[order], made.labels[order], order
    known = replace(truth, inputs=held, labels=told, rows=rows, candidates=inputs, candidate_labels=labels)
    return trials, known, source


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


def _known(truth: Truth, attack: Attack, observation: Observation, needed: int) -> tuple[Tensor, Tensor, str]:
    """Return known examples with labels: held-out ones of the same data, where there are enough, else photographs.

    What the attack may have been fitted to isn't among them: the adversary's public examples, and what its files were
    made from. NotApplicable: there are too few of either.
    """
    victims = {tensor_digest(example) for batch in truth.inputs.values() for example in batch}
    if observation.records is not None:
        victims |= {tensor_digest(example) for example in observation.records.public_inputs}
    rows = [i for i, example in enumerate(truth.candidates) if tensor_digest(example) not in victims]
    public = attack.public_examples()
    if public is not None and rows:
        prints = observation.task_info.example_kind.fingerprints(truth.candidates[rows])
        rows = [row for row, fitted in zip(rows, torch.isin(prints, public).tolist(), strict=True) if not fitted]
    if len(rows) >= max(needed, _IMAGES):
        order = torch.randperm(len(rows), generator=generator(0, "known examples"))
        chosen = torch.tensor(rows)[order]
        return truth.candidates[chosen], truth.candidate_labels[chosen], HELD_OUT
    own = own_images(observation, held_out=True)
    if len(own.inputs) < needed:
        raise NotApplicable(f"an update like theirs is over {needed} examples, and there are {len(own.inputs)} others")
    labels = own.labels_for(observation.split()[0])
    return own.inputs, labels, own.source
