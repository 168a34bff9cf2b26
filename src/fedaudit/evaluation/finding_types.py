"""The finding types: how each is evaluated, and the words and metrics that belong to it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import singledispatch
from typing import Any

from torch import Tensor

from fedaudit.attacks import Finding
from fedaudit.federation.truth import Truth
from fedaudit.results import FindingResult, MetricResult, Timing, Verdict
from fedaudit.threat import Observation


@dataclass(frozen=True)
class Metric:
    """A number by which findings that aren't images are evaluated.

    Attributes:
        name: as in ``results.json`` and ``--fail-above``.
        summary: what it measures, in words.
        unit: empty for shares and ratios.
        higher_is_better: whether a higher value means that the attack did better.
    """

    name: str
    summary: str
    unit: str = ""
    higher_is_better: bool = True

    def of(self, value: float, baseline: float | None = None) -> MetricResult:
        """Return ``value`` as it goes into the result, with what there is without the attack."""
        return MetricResult(
            name=self.name,
            value=value,
            unit=self.unit,
            higher_is_better=self.higher_is_better,
            baseline=baseline,
        )


@dataclass(frozen=True)
class FindingType:
    """How the findings of one type are evaluated together.

    Attributes:
        verdict: of all findings of one attack on one federation, and a sentence that says it.
        rules: how that verdict is reached, in words.
        metrics: the first is the one by which attacks are compared.
    """

    verdict: Callable[[Sequence[FindingResult]], tuple[Verdict, str]]
    rules: tuple[str, ...]
    metrics: tuple[Metric, ...] = ()


# By the finding's ``kind``; filled by the modules of this package.
FINDING_TYPES: dict[str, FindingType] = {}


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


def by_leaks(what: str) -> Callable[[Sequence[FindingResult]], tuple[Verdict, str]]:
    """Return a verdict that counts the findings with ``leak``; ``what`` says of how many: "{} of {} … were …"."""

    def verdict(findings: Sequence[FindingResult]) -> tuple[Verdict, str]:
        leaks = sum(bool(f.leak) for f in findings)
        text = what.format(leaks, len(findings))
        if 2 * leaks >= len(findings):
            return "demonstrated", text
        return ("partly demonstrated" if leaks else "not demonstrated"), text

    return verdict


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
        num_examples=sum(m.update.num_examples for m in messages),
        **rest,
    )


def done(finding: Finding, observation: Observation, **rest: Any) -> FindingResult:
    """Return the result of a run that was done; ``rest`` is its evaluation."""
    return entry(
        finding.attack,
        observation,
        status="done",
        kind=finding.kind,
        objective=finding.objective,
        iterations=finding.iterations,
        notes=list(finding.notes),
        timing=Timing(seconds=finding.seconds),
        **rest,
    )
