"""An attack that fits its victim: settings chosen on updates of one's own examples, made under the very same facts.

What works on an untrained network fails on a trained one, in batches, under noise. An adversary can check that: it has
the model, the facts of the training and images of its own, so it can attack updates of its *own* images first. It
knows their truth, so it may choose by what comes out. The victim's truth has no part in it.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from fedaudit.attacks.base import Attack, Progress, silent
from fedaudit.attacks.findings import Finding, ImageFinding
from fedaudit.attacks.inversion.inverter import Inverter, learnt
from fedaudit.attacks.inversion.own_updates import check_repeatable, distinct, likely_labels, own_updates
from fedaudit.attacks.local_training import image_way, nothing_between, whole_epochs
from fedaudit.task.info import TaskInfo
from fedaudit.transcript.observation import Message, Observation
from fedaudit.utils.errors import BadInput, NotApplicable, OutOfTime
from fedaudit.utils.fingerprint import tensor_digest
from fedaudit.utils.seeds import generator as seeded

CAP = 60.0  # dB: above, images are equal to the eye, and one of them would decide a mean
MOST = 6  # runs' iterations that a calibration has, at most, however many updates it serves
_FEWEST = 60  # iterations below which settings can't be told apart
_OWN_IMAGES = 4  # of own updates together, about
_MANY = 6  # settings, beyond which longer runs and more updates come first
LEARNED = "learned"  # a start: the answer of an inverter

# What is tried, the attack's own settings first, then in the order in which a small budget takes them: each line is one
# candidate. A strong denoiser with more or less total variation, from noise or from what an inverter answers, with and
# without subspaces, values or signs of the gradient. What an attack doesn't have is left out of a line, and a line that
# then says nothing new is left out.
SPACE: tuple[Mapping[str, Any], ...] = (
    {},
    {"start": "learned", "total_variation": 1e-2, "denoising": 3.0},
    {"interpolation": 0.5, "start": "learned", "total_variation": 1e-2, "denoising": 3.0},
    {"interpolation": 0.5, "total_variation": 1e-2, "denoising": 3.0},
    {"total_variation": 1e-2, "denoising": 3.0},
    {"total_variation": 1e-2, "denoising": 3.0, "subspace": 0.0},
    {"start": "learned", "total_variation": 1e-2, "denoising": 3.0, "learning_rate": 0.05},
    {"total_variation": 1e-2, "signed": False},
    {"total_variation": 1e-3, "denoising": 10.0, "subspace": 0.0},
    {"total_variation": 1e-2, "denoising": 10.0},
    {"total_variation": 1e-3},
    {"total_variation": 5e-2, "denoising": 3.0},
    {"total_variation": 1e-2, "denoising": 10.0, "subspace": 0.0},
    {"total_variation": 1e-3, "denoising": 3.0, "signed": False},
    {"total_variation": 1e-2, "moving": 0.0, "denoising": 10.0},
    {"total_variation": 0.2, "denoising": 3.0, "subspace": 0.0},
)


@dataclass(frozen=True)
class Rung:
    """What came of settings in one rung of successive halving.

    Attributes:
        settings: what differs from the attack's own.
        psnr: dB, the mean over own images, each capped at 60; None where the attack diverged.
    """

    settings: dict[str, Any]
    iterations: int
    updates: int
    psnr: float | None


@dataclass(frozen=True, kw_only=True)
class CalibrationFinding(Finding, kind="calibration"):
    """What an attack found out about itself.

    Attributes:
        settings: that it chose, as far as they differ from its own.
        source: whose images these were, in the plural: ``fedaudit's photographs``.
        failed: why it chose nothing; else empty.
        learnt: own updates that an inverter was learnt from, of others of these examples; 0: none was.
        inverter: that one, where the attack begins with its answer.
    """

    settings: dict[str, Any]
    rungs: tuple[Rung, ...]
    images: int
    source: str
    failed: str = ""
    learnt: int = 0
    inverter: Inverter | None = None

    @property
    def best(self) -> Rung:
        """What was chosen, in the longest runs."""
        return self.rungs[-1]

    @property
    def own(self) -> Rung:
        """The attack's own settings, in the longest runs that they had."""
        return next(rung for rung in reversed(self.rungs) if not rung.settings)

    def __str__(self) -> str:
        """Return in a sentence what was chosen, and on what."""
        if self.failed:
            return f"not calibrated, its own settings are kept: {self.failed}"
        if self.inverter is not None and not self.settings:
            own = self.inverter
            return (
                f"an inverter was learnt from {own.updates:,} updates of {own.examples:,} of {self.source}, made under "
                "the same conditions"
            )
        chosen = ", ".join(f"{name}: {str(value).lower()}" for name, value in self.settings.items())
        images = f"{self.images} of {self.source}"
        tried = f"{len({str(rung.settings) for rung in self.rungs})} settings, {self.iterations:,} iterations in all"
        if self.learnt:
            tried += f"; an inverter was learnt from {self.learnt:,} updates of others of these"
            tried += "" if self.inverter is not None else ", and no search from its answer was chosen"
        if not self.settings:
            return f"calibrated on {images} under the same conditions ({tried}): its own settings are kept"
        against = "" if self.own.psnr is None else f", its own {self.own.psnr:.1f}"
        return (
            f"calibrated on {images} under the same conditions ({tried}): {chosen} "
            f"({self.best.psnr:.1f} dB there after {self.best.iterations:,} iterations{against})"
        )


@dataclass(frozen=True, kw_only=True)
class Calibration(Attack):
    """The calibration of an attack on one update, as a unit of work that is kept and reused like any other.

    Args:
        inputs: (m, C, H, W) own examples in [0, 1].
        labels: (m,) of theirs; empty: drawn from what the model takes them for.
        updates: how many the result will attack: the effort is theirs together, at most.
        source: whose examples these are, in the plural.
        learn: whether an inverter is learnt, which takes as many own updates as ``effort`` has iterations, at most.
    """

    name: ClassVar[str] = "calibration"
    threat_model: ClassVar[str] = "that of the attack"
    needs: ClassVar[tuple[str, ...]] = ()
    finds: ClassVar[type[Finding]] = CalibrationFinding

    attack: Attack
    inputs: Tensor
    labels: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))
    updates: int = 1
    source: str = "own images"
    learn: bool = True

    def check(self, observation: Observation) -> None:
        """Refuse what the attack refuses, or what nobody can repeat."""
        self.attack.check(observation)
        check_repeatable(observation)

    def settings(self) -> dict[str, Any]:
        """Return what the finding depends on beside the observation."""
        digests = [tensor_digest(tensor).hex() for tensor in (self.inputs, self.labels)]
        return {
            "attack": {"name": self.attack.name, **self.attack.settings()},
            "own": digests,
            "effort": self.effort(),
            "learn": self.learn,
        }

    def effort(self) -> int:
        """Return the iterations of all runs together, about."""
        return self.attack.effort() * min(self.updates, MOST)

    def _run(
        self, observation: Observation, generator: torch.Generator, device: str, progress: Progress
    ) -> CalibrationFinding:
        inputs, labels = self.inputs, self.labels
        if not len(labels):
            labels = likely_labels(observation, inputs, generator)
        try:
            inverter, taken = self._inverter(observation, inputs, labels, progress)
            if inverter is not None and len(candidates(self.attack, observation.single())) == 1:  # nothing to choose
                own = Rung({}, 0, inverter.updates, inverter.psnr)
                return CalibrationFinding(
                    settings={},
                    rungs=(own,),
                    images=inverter.examples,
                    source=self.source,
                    learnt=inverter.updates,
                    inverter=inverter,
                )
            inputs, labels = inputs[taken:], labels[taken:]
            rungs, images = halving(
                self.attack,
                observation,
                (inputs, labels),
                generator=generator,
                device=device,
                iterations=self.effort(),
                progress=progress,
                inverter=inverter,
            )
        except OutOfTime:
            raise
        except NotApplicable as error:  # that, too, is kept
            return CalibrationFinding(settings={}, rungs=(), images=0, source=self.source, failed=str(error))
        return CalibrationFinding(
            settings=rungs[-1].settings,
            rungs=tuple(rungs),
            images=images,
            source=self.source,
            iterations=sum(rung.iterations * rung.updates for rung in rungs),
            learnt=0 if inverter is None else inverter.updates,
            inverter=inverter if {**self.attack.settings(), **rungs[-1].settings}.get("start") == LEARNED else None,
        )

    def _inverter(
        self, observation: Observation, inputs: Tensor, labels: Tensor, progress: Progress
    ) -> tuple[Inverter | None, int]:
        """Return an inverter, where one can be learnt, and of how many of the first examples it is.

        NotApplicable: none can be, and the attack is nothing without.
        """
        begins = _may_begin(self.attack, observation.single())
        if not begins and self.attack.settings().get("start") == LEARNED:
            raise NotApplicable(
                "no search begins with an inverter's answer where each simulated epoch has images of its own; set "
                "start: noise, or take agic-plus"
            )
        if not (self.learn and begins):
            return None, 0
        taken = len(inputs) - max(_OWN_IMAGES, 2 * distinct(observation))
        try:
            own = seeded(0, "an inverter")
            return learnt(observation, (inputs[:taken], labels[:taken]), own, progress, most=self.effort()), taken
        except OutOfTime:
            raise
        except NotApplicable:
            if self.attack.settings().get("start") == LEARNED:
                raise
            return None, 0


def halving(
    attack: Attack,
    observation: Observation,
    examples: tuple[Tensor, Tensor],
    *,
    generator: torch.Generator,
    device: str = "cpu",
    iterations: int,
    progress: Progress = silent,
    inverter: Inverter | None = None,
) -> tuple[list[Rung], int]:
    """Return what came of settings on own updates, and the number of own images; the chosen settings come last.

    By successive halving (Jamieson and Talwalkar 2016) and a duel. All candidates run for few iterations on the same
    own updates from the same starts; the better half goes on with twice the effort, until one is left. One image may
    like any settings: so, while there are others, twice the effort is twice as many updates, and then runs twice as
    long. Short runs prefer strong priors, which long ones may not need: so the last one meets the attack's own settings
    once more, in runs as long as the attack's, where three fifths of the effort pay for these, and else in runs that
    take as much: on two updates from five times the attack's effort on, else on one. A candidate that diverges is out.
    ``examples``: (m, C, H, W) in [0, 1] and (m,) labels; ``iterations``: of all runs together, about.
    """
    each, whole, info = distinct(observation), attack.effort(), observation.task_info
    most = max(1, min(_OWN_IMAGES // each, len(examples[0]) // each))
    duels = min(2, most) if iterations >= 5 * whole else 1
    last = min(whole, max(1, 3 * iterations // (10 * duels)))
    left = iterations - 2 * duels * last
    space = candidates(attack, observation.single(), learned=inverter is not None)

    def length_of(count: int, updates: int) -> int:
        return left // (_rungs(count) * count * updates)

    def affordable(updates: int) -> int:
        enough = (c for c in range(len(space), 2, -1) if length_of(c, updates) >= _FEWEST * (1 if c <= _MANY else 2))
        return next(enough, min(2, len(space)))

    few = (u for u in (most, most // 2) if u > 1 and affordable(u) >= min(_MANY, len(space)))
    updates = next(few, 1)
    count = affordable(updates)
    first = min(whole, max(1, length_of(count, updates)))
    own = own_updates(observation, examples, most, generator)
    states = [torch.Generator().manual_seed(generator.initial_seed() + 1 + i).get_state() for i in range(len(own))]
    done = 0

    def tried(settings: Mapping[str, Any], length: int, count: int) -> Rung:
        nonlocal done
        short = attack.with_settings({**settings, "iterations": length, "restarts": 1}, **inverted(inverter))
        values: list[float] | None = []
        for one, state in zip(own[:count], states, strict=False):
            start = torch.Generator()
            start.set_state(state)
            try:
                found = short(
                    one.observation,
                    generator=start,
                    device=device,
                    progress=lambda so_far, of, before=done: progress(  # type: ignore[misc]
                        min(before + length * so_far // of, iterations), iterations
                    ),
                )
                values = None if values is None else values + _psnr(found, one.used, info)
            except OutOfTime:
                raise
            except NotApplicable:
                values = None
            done += length
        return Rung(dict(settings), length, count, sum(values) / len(values) if values else None)

    found, length = list[Rung](), first
    standing = space[:count]
    while len(standing) > 1:
        scored = sorted((tried(settings, length, updates) for settings in standing), key=_quality)
        found += scored
        standing = [rung.settings for rung in scored[::-1] if rung.psnr is not None][: len(standing) // 2]
        updates, length = (2 * updates, length) if updates < most else (updates, min(whole, 2 * length))
    finalists = [*(settings for settings in standing if settings), {}]  # where both recover as much, its own are kept
    if len(finalists) == 1 and len(found) > 1:  # its own settings won already; the best of the others tries once more
        finalists.insert(0, next(rung.settings for rung in found[::-1] if rung.settings))
    alike = {str(rung.settings): rung for rung in found if (rung.iterations, rung.updates) == (last, duels)}
    met = [alike.get(str(settings)) or tried(settings, last, duels) for settings in finalists]
    found = [*(rung for rung in found if rung not in met), *sorted(met, key=_quality)]
    if found[-1].psnr is None:
        raise NotApplicable(f"{attack.name} diverges on updates of one's own, whatever its settings")
    return found, max(rung.updates for rung in found) * each


def _may_begin(attack: Attack, message: Message) -> bool:
    """Return whether a search may begin with an inverter's answer: not where each simulated epoch has its images."""
    update = message.update
    epochs = whole_epochs(update.num_examples, update.training, update.labels)[1]
    simulated = epochs > 1 and image_way(getattr(attack, "fedavg", ""), message) == "simulation"
    takes = "inverter" in inspect.signature(attack.with_settings).parameters  # others' attacks may not
    return attack.inverts and takes and not simulated


def inverted(inverter: Inverter | None) -> dict[str, Inverter]:
    """Return what ``with_settings`` is given beside settings: nothing without an inverter, of which not all know."""
    return {} if inverter is None else {"inverter": inverter}


def _quality(rung: Rung) -> float:
    return -math.inf if rung.psnr is None else rung.psnr


def candidates(attack: Attack, message: Message, *, learned: bool = False) -> list[dict[str, Any]]:
    """Return the lines of :data:`SPACE` as far as the attack has such settings, each once, its own settings first.

    Between models is only where several local steps are taken for one batch; ``learned``: whether there is an
    inverter to begin with.
    """
    known, found = attack.settings(), list[dict[str, Any]]()
    between = not nothing_between(getattr(attack, "fedavg", ""), message)
    for line in SPACE:
        if (line.get("start") == LEARNED and not learned) or ("interpolation" in line and not between):
            continue
        own = {name: value for name, value in line.items() if name in known and known[name] != value}
        if own not in found:
            found.append(own)
    return found


def _rungs(count: int) -> int:
    return max(1, count.bit_length() - 1)


def _psnr(finding: Finding, true: Tensor, task_info: TaskInfo) -> list[float]:
    """Return :func:`psnr_of` what was found; where examples have no bounds, of them as the model sees them."""
    pair = _images(finding), true
    return psnr_of(*(pair if task_info.example_kind.bounds is not None else map(task_info.normalise, pair)))


def _images(finding: Finding) -> Tensor:
    if not isinstance(finding, ImageFinding):
        raise BadInput(f"{finding.attack} finds no images: there is nothing to calibrate it by")
    return finding.images


def psnr_of(images: Tensor, true: Tensor) -> list[float]:
    """Return the PSNR in dB of n true images in [0, 1], matched to k ≥ n so that squared errors are least."""
    errors = torch.cdist(true.flatten(1).double(), images.flatten(1).double()).square() / true[0].numel()
    rows, columns = linear_sum_assignment(errors.numpy())
    return [min(CAP, -10 * math.log10(max(float(errors[r, c]), 1e-12))) for r, c in zip(rows, columns, strict=True)]
