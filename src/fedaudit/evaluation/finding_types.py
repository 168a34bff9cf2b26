"""The finding types: how each is evaluated, and the words and metrics that belong to it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import singledispatch
from typing import Any, NamedTuple

from torch import Tensor

from fedaudit.attacks import Finding
from fedaudit.evaluation.statistics import DOUBT, SURE, combined, pooled, proportion
from fedaudit.results import AttackSummary, Evidence, FindingResult, Interval, MetricResult, Timing, Verdict
from fedaudit.transcript.observation import Observation
from fedaudit.transcript.truth import Truth

Over = Callable[[Sequence[float]], Interval | None]


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


class Judgement(NamedTuple):
    """What the findings of one attack on one federation show together, before any positive control.

    Attributes:
        verdict: "not demonstrated" where nothing was found; only a control that is won lets it stand.
        text: what it rests on, in a sentence.
        evidence: the number behind it.
        headline: where something was found: the answer in a sentence, with ``{who}`` and ``{things}`` to fill in.
        advice: what to change, where it is inconclusive.
    """

    verdict: Verdict
    text: str
    evidence: Evidence | None = None
    headline: str = ""
    advice: str = ""


class Scores(NamedTuple):
    """What one finding is compared by with another attack's on the same update, client or federation.

    Attributes:
        metric: its name.
        unit: of it.
        higher_is_better: whether a higher value means that the attack did better.
        values: what is compared with what; the same keys are the same thing.
    """

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
class FindingType:
    """How the findings of one type are evaluated together.

    Attributes:
        verdict: judges all findings of one attack on one federation.
        rules: how that verdict is reached, in words.
        metrics: the first is the one by which attacks are compared.
        question: what the attack is after: "tell whether a record was used"; ``{things}`` stands for the examples.
        control: the case that an attack of this type must win: ``example``, one known example, undefended, one step;
            ``records``, a model that has learnt the members by heart; ``sources``, clients' models, each of which has
            learnt its own members by heart; ``property``, known clients with nothing but it and with nothing of it;
            ``client``, a known client's updates of very different models; ``canaries``, as many in a round without
            noise; ``vertical``, known examples of a vertical federation. None: there is none but the same federation
            without its defences.
        trained: whether a federation that was hardly trained says nothing of it (``evaluation.least_accuracy``).
        worst: the worst verdict that it can end in.
        scores: of one finding, by which attacks are compared.
        columns: fields of the summary that are this type's own, from its findings that were done.
        limits: what else a user may set a limit for, beside ``metrics``: the values of one attack on one federation.
        untold: why the findings of one federation can't tell whether a limit (metric, value) is kept; empty where they
            can; None leaves it to the verdicts.
    """

    verdict: Callable[[Sequence[FindingResult]], Judgement]
    rules: tuple[str, ...]
    metrics: tuple[Metric, ...] = ()
    question: str = "learn what it was after"
    control: str | None = None
    trained: bool = False
    worst: Verdict = "inferred"
    scores: Callable[[FindingResult], Scores | None] = by_first_metric
    columns: Callable[[Sequence[FindingResult], Over], dict[str, Any]] = lambda findings, over: {}  # noqa: ARG005
    limits: Mapping[str, Callable[[Sequence[FindingResult]], list[float]]] = field(default_factory=dict)
    untold: Callable[[Sequence[FindingResult], str, float], str | None] = lambda findings, name, limit: None  # noqa: ARG005


# By the finding's ``kind``; filled by the modules of this package.
FINDING_TYPES: dict[str, FindingType] = {}


def type_of(finding: FindingResult | AttackSummary) -> FindingType:
    """Return the type of a finding that was done, or of a summary of such.

    Raises:
        ValueError: it says no kind, or one that nothing is registered for.
    """
    if finding.kind not in FINDING_TYPES:
        raise ValueError(f"no finding type is registered for the kind {finding.kind!r} of {finding.attack}")
    return FINDING_TYPES[finding.kind]


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


def leaks(better: bool, p_value: float) -> bool:
    """Return whether a finding is a leak by itself: ``better`` than without the attack, and luck is excluded."""
    return better and p_value <= SURE


def by_leaks(
    what: str,
    headline: str = "{who} can {question}: {text}.",
    of: str = "runs of the attack",
    counts: Callable[[FindingResult], bool] = lambda finding: bool(finding.leak),
) -> Callable[[Sequence[FindingResult]], Judgement]:
    """Return a verdict that counts findings, those with ``leak`` unless told otherwise, and weighs their p-values.

    With p-values (combined by Fisher's method): "inferred" where guessing does as well with a probability of 1 % at
    most, "inconclusive" up to 5 %, or where there is so little that even perfect answers could be luck.

    Args:
        what: says how many: "{} of {} … were …".
        headline: of a leak; see :class:`Judgement`; ``{text}`` stands for what ``what`` says.
        of: what is counted, in the plural.
        counts: whether a finding does, be luck excluded or not.
    """

    def verdict(findings: Sequence[FindingResult]) -> Judgement:
        counted = sum(counts(f) for f in findings)
        text = what.format(counted, len(findings))
        ps = [f.p_value for f in findings if f.p_value is not None]
        p = combined(ps) if len(ps) == len(findings) else None
        evidence = share_of(text, counted, len(findings), of, p_value=p)
        best = by_fisher(findings)[1]
        judged = decide(counted > 0, p, best, text, evidence, headline.replace("{text}", text))
        if counted and judged.verdict == "not demonstrated":
            why = f"test more {of}: luck does as well with a probability of {p:.2g}"
            return judged._replace(verdict="inconclusive", advice=why)
        return judged

    return verdict


def share_of(what: str, count: int, n: int, of: str, *, test: str = "", **rest: Any) -> Evidence:
    """Return as evidence the share of ``count`` in ``n`` of what ``of`` says; ``test``: that the verdict rests on."""
    low, high = proportion(count, n)
    method = f"exact binomial interval (Clopper-Pearson){f'; {test}' if test else ''}"
    return Evidence(what=what, value=count / n, low=low, high=high, n=n, of=of, method=method, **rest)


def by_fisher(findings: Sequence[FindingResult]) -> tuple[float, float | None]:
    """Return the findings' p-values together (Fisher's method), and those that they would have if all were right."""
    best = [f.p_value_at_best for f in findings if f.p_value_at_best is not None]
    p = combined([1.0 if f.p_value is None else f.p_value for f in findings])
    return p, combined(best) if len(best) == len(findings) else None


def by_test(
    name: str,
    of: str,
    method: str,
    headline: str | Callable[[Sequence[FindingResult], Evidence], str],
    together: Callable[[Sequence[FindingResult]], tuple[float, float | None]] = by_fisher,
    least: float = 0.0,
) -> Callable[[Sequence[FindingResult]], Judgement]:
    """Return a verdict that rests on the findings' p-values together and on one metric over all that was tested.

    The effect is there where the metric's mean, each finding weighted by its n, is above what there is without the
    attack. It also is where one finding is a leak by itself: a client's leak isn't undone by the others'.

    Args:
        name: of the metric, whose results have intervals.
        of: what its n counts, in the plural.
        method: of the interval and the test, in words.
        headline: of a leak; see :class:`Judgement`; ``{value}``, ``{share}`` and ``{guess}`` (in percent), ``{n}`` and
            ``{updates}`` are filled in from the evidence.
        together: the p-value of all findings, and the one that they would have if all were right.
        least: the metric's mean must be as high, too.
    """

    def verdict(findings: Sequence[FindingResult]) -> Judgement:
        found = [m for f in findings for m in f.metrics if m.name == name]
        over = pooled(found)
        p, best = together(findings)
        baselines = [m.baseline for m in found if m.baseline is not None]
        guess = sum(baselines) / len(baselines) if baselines else None
        mean = sum(m.value for m in found) / len(found)
        words = name.replace("_", " ")
        evidence = Evidence(
            what=words,
            value=mean,
            low=over.low if over else None,
            high=over.high if over else None,
            n=over.n if over else len(found),
            of=of,
            by_guessing=guess,
            p_value=p,
            method=method,
        )
        span = f" [{over.low:.3g}, {over.high:.3g}]" if over else ""
        without = f", {guess:.3g} without the attack" if guess is not None else ""
        text = f"{words} {mean:.3g}{span}{without}; n = {evidence.n} {of}, p = {p:.2g}"
        there = _gain(found, least) or any(f.leak for f in findings)
        said = _filled(headline, evidence, len(findings)) if isinstance(headline, str) else headline(findings, evidence)
        return decide(there, p, best, text, evidence, said)

    return verdict


def _filled(headline: str, evidence: Evidence, updates: int) -> str:
    words = {
        "{value}": f"{evidence.value:.2f}",
        "{share}": f"{100 * evidence.value:.0f}",
        "{guess}": f"{100 * (evidence.by_guessing or 0):.0f}",
        "{n}": str(evidence.n),
        "{updates}": f"{updates} {'update' if updates == 1 else 'updates'}",
    }
    for key, value in words.items():
        headline = headline.replace(key, value)
    return headline


def _gain(metrics: Sequence[MetricResult], least: float) -> bool:
    """Return whether the metric over all findings is above its baseline, and at least ``least``."""
    counts = [m.n or 1 for m in metrics]
    gain = sum(n * (m.value - (m.baseline or 0.0)) for n, m in zip(counts, metrics, strict=True))
    return gain > 0 and sum(n * m.value for n, m in zip(counts, metrics, strict=True)) >= least * sum(counts)


def decide(leak: bool, p: float | None, best: float | None, text: str, evidence: Evidence, headline: str) -> Judgement:
    """Return the judgement on an effect that is there (``leak``) or not, and whose test gave ``p``.

    ``best`` is what the test would give if everything had been told rightly.
    """
    if leak and (p is None or p <= SURE):
        return Judgement("inferred", text, evidence, headline)
    too_few = f"{evidence.n} are too few to exclude luck" if best is not None and best > SURE else ""
    if p is None or (p > DOUBT and not too_few):
        return Judgement("not demonstrated", text, evidence)
    why = too_few or f"with {evidence.n}, luck does as well with a probability of {p:.2g}"
    return Judgement("inconclusive", text, evidence, advice=f"test more {evidence.of}: {why}")


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


def refused(finding: Finding, observation: Observation, reason: str) -> Evaluation:
    """Return the evaluation of a run that the truth has no answer to."""
    return Evaluation(entry(finding.attack, observation, status="not applicable", reason=reason))


def done(finding: Finding, observation: Observation, notes: Sequence[str] = (), **rest: Any) -> FindingResult:
    """Return the result of a run that was done; ``rest`` is its evaluation, ``notes`` come after the finding's own."""
    return entry(
        finding.attack,
        observation,
        status="done",
        kind=finding.kind,
        objective=finding.objective,
        iterations=finding.iterations,
        notes=[*finding.notes, *notes],
        timing=Timing(seconds=finding.seconds),
        **rest,
    )
