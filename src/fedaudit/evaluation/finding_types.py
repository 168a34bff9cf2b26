"""The finding types: how each is evaluated, and the words and metrics that belong to it."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import singledispatch
from typing import Any, Literal, NamedTuple

from torch import Tensor

from fedaudit.attacks import Finding
from fedaudit.evaluation.statistics import proportion
from fedaudit.evaluation.verdicts import Judgement as Judgement
from fedaudit.evaluation.verdicts import by_leaks as by_leaks
from fedaudit.evaluation.verdicts import by_test as by_test
from fedaudit.evaluation.verdicts import leaks as leaks
from fedaudit.results import AttackSummary, Evidence, FindingResult, Interval, MetricResult, Timing, Verdict
from fedaudit.results.record import Record
from fedaudit.transcript.observation import Observation
from fedaudit.transcript.truth import Truth
from fedaudit.utils.fingerprint import tensor_digest

Remedy = Literal["larger batches", "fewer rounds", "more records", "other attacks"]
Over = Callable[..., Interval | None]  # of values, and what they are from (``least``) to (``most``)


@dataclass(frozen=True)
class Metric:
    """A number by which findings are evaluated.

    Attributes:
        name: as in ``results.json`` and ``--fail-above``.
        summary: what it measures, in words.
        unit: empty for shares and ratios.
        higher_is_better: whether a higher value means that the attack did better.
        ends: the least and the largest value that it can have; the interval of a mean over runs ends there.
        title: as sentences call it; empty: by its name.
    """

    name: str
    summary: str
    unit: str = ""
    higher_is_better: bool = True
    ends: tuple[float, float] = (-math.inf, math.inf)
    title: str = ""

    @property
    def words(self) -> str:
        """What it is called in sentences."""
        return self.title or self.name.replace("_", " ")

    @property
    def is_share(self) -> bool:
        """Whether it lies between 0 and 1."""
        return self.ends == (0, 1)

    def of(self, value: float, baseline: float | None = None, **counted: Any) -> MetricResult:
        """Return ``value`` as it goes into the result, with what there is without the attack.

        Args:
            value: of this run.
            baseline: without the attack.
            counted: ``low`` and ``high``, the 95 % interval over ``n`` of what ``of`` says.
        """
        return MetricResult(
            name=self.name,
            value=value,
            unit=self.unit,
            higher_is_better=self.higher_is_better,
            baseline=baseline,
            **counted,
        )

    def over(self, found: Interval, of: str, baseline: float | None = None) -> MetricResult:
        """Return a mean over what ``of`` says, with its interval."""
        return self.of(found.mean, baseline, low=found.low, high=found.high, n=found.n, of=of)

    def share(self, count: int, n: int, of: str, baseline: float | None = None) -> MetricResult:
        """Return the share of ``count`` in ``n`` of what ``of`` says, with its exact 95 % interval."""
        low, high = proportion(count, n)
        return self.of(count / n, baseline, low=low, high=high, n=n, of=of)


class Scores(NamedTuple):
    """A metric of one finding, to compare with another attack's; values of equal keys are of the same thing."""

    metric: str
    unit: str
    higher_is_better: bool
    values: dict[Any, float]


def by_first_metric(finding: FindingResult) -> Scores | None:
    """Return the value of the finding's first metric; None where it has none."""
    if not finding.metrics:
        return None
    first = finding.metrics[0]
    return Scores(first.name, first.unit, first.higher_is_better, {(finding.round, finding.client): first.value})


@dataclass(frozen=True)
class KnownExamples:
    """What findings say of known examples, in updates that are made as the clients' were.

    Attributes:
        found: what was found of them, by the evidence and whose they are, in words.
        of_clients: what was found of the clients'.
        each: whether they come out one by one.
        clients: that are attacked at most, where they are judged together, as findings are; 0: none are.
    """

    found: Callable[[Evidence, str], str] = lambda known, case: (
        f"of {known.n} {case} it recovered {round(known.value * known.n)}"
    )
    of_clients: Callable[[Evidence], str] = lambda own: f"of the clients' {own.n}, none"
    each: bool = False
    clients: int = 0


@dataclass(frozen=True)
class FindingType:
    """How the findings of one type are evaluated together.

    Attributes:
        verdict: judges all findings of one attack on one federation.
        rules: how that verdict is reached, in words.
        metrics: the first is the one by which attacks are compared.
        question: what the attack is after: "tell whether a record was used"; ``{things}`` stands for the examples.
        control: the case that an attack of this type must win: ``example``, one known example, undefended, one step;
            ``records``, a model that has learnt the members by heart; ``sources``, clients' models, each of which has
            learnt its own members by heart; ``one source``, a model that knows one client's by heart
            and another's wrongly; ``property``, known clients with nothing but it and with nothing of it; ``client``, a
            known client's updates of very different models; ``canaries``, as many in a round without noise;
            ``vertical``, known examples of a vertical federation. None: there is none but the same federation without
            its defences.
        easy_updates: of one known example each, that make the easy case where one could be luck.
        known: how findings tell of known examples under the audited conditions, if they do.
        averaged: the attack on the same that takes a client's updates over rounds together, if there is one.
        ranks: whether its evidence is an AUC: below 0.5 where scores tell the wrong way round.
        trained: whether a federation that was hardly trained says nothing of it (``evaluation.min_accuracy``).
        learns: whether only a leak can be shown there: what a model hasn't learnt yet it can't give away.
        worst: the worst verdict that it can end in.
        counts: whether a verdict's evidence is the share of victims that came out, and tries are counted beside it.
        margin: whether easier conditions are sought in which such an attack has power.
        ceiling: whether such a verdict asks how much the update determines, whoever attacks.
        remedies: what else a reader is advised to do of a leak, or where it is open.
        scores: of one finding, by which attacks are compared.
        columns: this type's own part of the summary (a base of :class:`AttackSummary`), of its findings that were done.
        limits: what else a user may set a limit for, beside ``metrics``: the values of one attack on one federation.
        untold: why the findings of one federation can't tell whether a limit (metric, value) is kept; empty where they
            can; None leaves it to the verdicts.
    """

    verdict: Callable[[Sequence[FindingResult]], Judgement]
    rules: tuple[str, ...]
    metrics: tuple[Metric, ...] = ()
    question: str = "learn what it was after"
    control: str | None = None
    easy_updates: int = 1
    known: KnownExamples = KnownExamples()
    averaged: str | None = None
    ranks: bool = False
    trained: bool = False
    learns: bool = False
    worst: Verdict = "inferred"
    counts: bool = False
    margin: bool = False
    ceiling: bool = False
    remedies: tuple[Remedy, ...] = ()
    scores: Callable[[FindingResult], Scores | None] = by_first_metric
    columns: Callable[[Sequence[FindingResult], Over], Record | None] = lambda findings, over: None  # noqa: ARG005
    limits: Mapping[str, Callable[[Sequence[FindingResult]], list[float]]] = field(default_factory=dict)
    untold: Callable[[Sequence[FindingResult], str, float], str | None] = lambda findings, name, limit: None  # noqa: ARG005


# By the finding's ``kind``; filled by the modules of this package.
FINDING_TYPES: dict[str, FindingType] = {}
_UNKNOWN = FindingType(verdict=lambda findings: Judgement("inconclusive", ""), rules=())  # noqa: ARG005


def type_of(finding: FindingResult | AttackSummary) -> FindingType:
    """Return the type of a finding that was done, or of a summary of such; ValueError where no such is registered."""
    if finding.kind not in FINDING_TYPES:
        raise ValueError(f"no finding type is registered for the kind {finding.kind!r} of {finding.attack}")
    return FINDING_TYPES[finding.kind]


def known_type(kind: str | None) -> FindingType:
    """Return the type of that kind; for none, or one whose package isn't installed, a type that knows nothing of it."""
    return FINDING_TYPES.get(kind or "", _UNKNOWN)


@dataclass(frozen=True)
class Evaluation:
    """A finding with its scores, and the images that belong to them.

    Attributes:
        result: the scores.
        image_files: relative path to (C, H, W) pixels in [0, 1].
    """

    result: FindingResult
    image_files: dict[str, Tensor] = field(default_factory=dict)


@singledispatch
def evaluate(finding: Finding, observation: Observation, truth: Truth, *, seed: int) -> Evaluation:  # noqa: ARG001
    """Compare a finding with the truth. Each finding type registers its own: ``@evaluate.register``.

    Args:
        finding: of one run of an attack.
        observation: that the attack was given.
        truth: of the federation.
        seed: for random baselines.

    Raises:
        TypeError: nothing is registered for this type.
    """
    raise TypeError(f"no evaluation is registered for {type(finding).__name__}")


def metric(name: str) -> Metric | None:
    """Return the metric ``name`` of whichever kind has it."""
    return next((m for kind in FINDING_TYPES.values() for m in kind.metrics if m.name == name), None)


def entry(attack: str, observation: Observation, **rest: Any) -> FindingResult:
    """Return the result of one run: what it received is filled in, ``rest`` is what came of it."""
    messages = observation.messages
    rounds = list(dict.fromkeys(m.round for m in messages))
    clients = {m.client for m in messages}
    return FindingResult(
        attack=attack,
        federation=observation.federation,
        update_kind=observation.update_kind,
        round=rounds[0] if len(rounds) == 1 else None,
        client=clients.pop() if len(clients) == 1 else None,
        rounds=rounds,
        clients=list(dict.fromkeys(c for m in messages for c in m.update.members)),
        num_examples=sum(m.update.num_examples for m in messages),
        **rest,
    )


def victims_of(*examples: Tensor) -> str:
    """Return a name that equal victims have in whatever round or update they are found."""
    return hashlib.sha256(b"".join(tensor_digest(part) for part in examples)).hexdigest()[:12]


NOT_FINITE = "some of what it returned is not finite: the model diverged, or it is a fault of the attack"


def refused(finding: Finding, observation: Observation, reason: str = NOT_FINITE) -> Evaluation:
    """Return the evaluation of a run that the truth has no answer to."""
    return Evaluation(entry(finding.attack, observation, status="not applicable", reason=reason))


def done(
    finding: Finding, observation: Observation, notes: Sequence[str] = (), detail: Record | None = None, **rest: Any
) -> FindingResult:
    """Return a completed run's result: ``detail`` are its kind's own columns, ``rest`` what every kind has."""
    return entry(
        finding.attack,
        observation,
        status="done",
        kind=finding.kind,
        objective=finding.objective,
        iterations=finding.iterations,
        notes=[*finding.notes, *notes],
        timing=Timing(seconds=finding.seconds),
        **dict(detail or ()),
        **rest,
    )
