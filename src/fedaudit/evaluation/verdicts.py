"""From findings to a verdict: what several show together, and the number behind it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from fedaudit.evaluation.statistics import DOUBT, SURE, combined, pooled, proportion
from fedaudit.results import Evidence, FindingResult, MetricResult, Verdict


class Judgement(NamedTuple):
    """What the findings of one attack on one federation show together, before any positive control.

    Attributes:
        verdict: "not demonstrated" where nothing was found; only a control that is won lets it stand.
        text: what it rests on, in a sentence.
        evidence: the number behind it.
        headline: the answer in a sentence, where something was found, with ``{who}`` and ``{things}`` to fill in.
        advice: what to change, where it is inconclusive.
    """

    verdict: Verdict
    text: str
    evidence: Evidence | None = None
    headline: str = ""
    advice: str = ""


def leaks(better: bool, p_value: float) -> bool:
    """Return whether a finding is a leak by itself: ``better`` than without the attack, and luck is excluded."""
    return better and p_value <= SURE


def by_leaks(
    what: str,
    headline: str = "{who} can {question}: {text}.",
    of: str = "runs of the attack",
    counts: Callable[[FindingResult], bool] = lambda finding: bool(finding.is_leak),
) -> Callable[[Sequence[FindingResult]], Judgement]:
    """Return a verdict that counts findings, those with ``leak`` unless told otherwise, and weighs their p-values.

    With p-values (combined by Fisher's method): "inferred" where guessing does as well with a probability of 1 % at
    most, "inconclusive" up to 5 %, or where there is so little that even perfect answers could be luck.

    Args:
        what: says how many: "{} of {} … were …".
        headline: of a leak; see :class:`Judgement`; ``{text}`` stands for what ``what`` says.
        of: what is counted, in the plural.
        counts: whether a finding does, even where luck isn't excluded.
    """

    def verdict(findings: Sequence[FindingResult]) -> Judgement:
        counted = sum(counts(f) for f in findings)
        text = what.format(counted, len(findings))
        p, best = by_fisher(findings) if all(f.p_value is not None for f in findings) else (None, None)
        evidence = share_of(text, counted, len(findings), of, p_value=p)
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
    """Return the findings' p-values together, and what they would be if all were right.

    Findings on the same victims, such as those of several rounds, are one test (:func:`repeated`); others are
    independent (Fisher's method).
    """
    groups = by_victims(findings)
    found = [repeated([1.0 if f.p_value is None else f.p_value for f in of]) for of in groups]
    best = [[f.p_value_at_best for f in of if f.p_value_at_best is not None] for of in groups]
    known = all(len(ps) == len(of) for ps, of in zip(best, groups, strict=True))
    return combined(found), combined([repeated(ps) for ps in best]) if known else None


def repeated(p_values: Sequence[float]) -> float:
    """Return the p-value of several tests of the same, however they depend on each other.

    Twice the smaller one of two valid p-values: the least times their number (Bonferroni), which finds what one of them
    shows, and twice their mean (Rüschendorf 1982), which finds what all show.
    """
    if len(p_values) == 1:
        return p_values[0]
    return min(1.0, 2 * min(len(p_values) * min(p_values), 2 * sum(p_values) / len(p_values)))


def by_victims(findings: Sequence[FindingResult]) -> list[list[FindingResult]]:
    """Return the findings on the same examples of the same client, or clients, together."""
    groups: dict[tuple[object, ...], list[FindingResult]] = {}
    for finding in findings:
        groups.setdefault((finding.victims, finding.client, *finding.clients), []).append(finding)
    return list(groups.values())


def by_test(
    name: str,
    of: str,
    method: str,
    headline: str | Callable[[Sequence[FindingResult], Evidence], str],
    together: Callable[[Sequence[FindingResult]], tuple[float, float | None]] = by_fisher,
    least: float = 0.0,
) -> Callable[[Sequence[FindingResult]], Judgement]:
    """Return a verdict that rests on the findings' p-values together and on one metric over all that was tested.

    The effect is there where the metric's mean, with each finding weighted by its n, is above what there is without the
    attack. It is also there where one finding is a leak by itself: the others don't undo one client's leak.

    Args:
        name: of the metric, whose results have intervals.
        of: what its n counts, in the plural.
        method: of the interval and the test, in words.
        headline: of a leak; see :class:`Judgement`; ``{value}``, ``{share}`` and ``{guess}`` (in percent), ``{n}`` and
            ``{updates}`` are filled in from the evidence.
        together: the p-value of all findings, and the one that they would have if all were right.
        least: the metric's mean must be at least that, too.
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
            baseline=guess,
            p_value=p,
            method=method,
        )
        span = f" [{over.low:.3g}, {over.high:.3g}]" if over else ""
        without = f", {guess:.3g} without the attack" if guess is not None else ""
        text = f"{words} {mean:.3g}{span}{without}; n = {evidence.n} {of}, p = {p:.2g}"
        there = _gain(found, least) or any(f.is_leak for f in findings)
        said = _filled(headline, evidence, len(findings)) if isinstance(headline, str) else headline(findings, evidence)
        return decide(there, p, best, text, evidence, said)

    return verdict


def _filled(headline: str, evidence: Evidence, updates: int) -> str:
    words = {
        "{value}": f"{evidence.value:.2f}",
        "{share}": f"{100 * evidence.value:.0f}",
        "{guess}": f"{100 * (evidence.baseline or 0):.0f}",
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
    """Return the judgement on an effect, there (``leak``) or not; ``best`` is ``p`` if all had been told rightly."""
    if leak and (p is None or p <= SURE):
        return Judgement("inferred", text, evidence, headline)
    too_few = f"{evidence.n} are too few to exclude luck" if best is not None and best > SURE else ""
    if evidence.baseline == 1:
        advice = f"attack clients whose {evidence.of} can't all be guessed: here guessing gets them all"
        return Judgement("inconclusive", text, evidence, advice=advice)
    if p is None or (not too_few and (p > DOUBT or not leak)):
        return Judgement("not demonstrated", text, evidence)
    why = too_few or f"with {evidence.n}, luck does as well with a probability of {p:.2g}"
    return Judgement("inconclusive", text, evidence, advice=f"test more {evidence.of}: {why}")
