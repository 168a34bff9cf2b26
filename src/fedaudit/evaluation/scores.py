"""From the findings of an audit to its summaries, comparisons and thresholds."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from fedaudit.evaluation.finding_types import FINDING_TYPES, Over, Scores, metric, type_of
from fedaudit.evaluation.images import best_tries
from fedaudit.evaluation.statistics import DOUBT, SURE, difference_test, holm, interval, paired_interval, pooled
from fedaudit.evaluation.verdicts import Judgement
from fedaudit.results import (
    LEAKS,
    VERDICTS,
    AttackSummary,
    Comparison,
    FindingResult,
    GroupWorst,
    Interval,
    MetricSummary,
    Timing,
    Worst,
)


def verdict_rules(findings: Sequence[FindingResult]) -> list[str]:
    """Return what the verdicts mean and the rules by which ``findings`` were evaluated, in words."""
    kinds = dict.fromkeys(f.kind for f in findings if f.kind)
    common = [f"'{verdict}': {text}" for verdict, text in VERDICTS.items()]
    return [*common, *(rule for kind in kinds for rule in FINDING_TYPES[kind].rules)]


def summarise(
    findings: Sequence[FindingResult], *, resamples: int, seed: int, who: str = "The adversary", things: str = "images"
) -> list[AttackSummary]:
    """Return one summary for each attack on each federation, in the order of the findings.

    A summary that is "not demonstrated" has no control yet: see :func:`fedaudit.pipeline.controls.judged_by_control`.

    Args:
        findings: of the audit.
        resamples: of the bootstrap.
        seed: of that.
        who: the adversary, as a sentence begins with it.
        things: the examples, in the plural.
    """
    rows = []
    for (federation, attack), group in grouped(findings).items():
        done = [f for f in group if f.status == "done"]
        common: dict[str, Any] = {
            "attack": attack,
            "federation": federation,
            "update_kind": group[0].update_kind,
            "updates": len(group),
            "images": sum(len(f.images) for f in group),
        }
        if not done:
            text = f"{attack} could not be run: {(group[0].reason or 'no reason given').removeprefix('not run: ')}"
            rows.append(AttackSummary(verdict="not applicable", verdict_text=text, **common))
            continue
        kind = type_of(done[0])
        found = Judgement(*kind.verdict(done))
        words = {"{who}": who, "{things}": things, "{question}": kind.question}

        def over(values: Sequence[float], least: float = -math.inf, most: float = math.inf) -> Interval | None:
            return interval(values, resamples=resamples, seed=seed, least=least, most=most) if values else None

        rows.append(
            AttackSummary(
                verdict=found.verdict,
                verdict_text=found.text,
                headline=_filled(found.headline, words),
                evidence=found.evidence,
                worst=_worst(done, things),
                advice=[found.advice] if found.advice else [],
                kind=done[0].kind,
                metrics=_metric_summaries(done, over),
                timing=Timing(seconds=sum(f.timing.seconds for f in done if f.timing)),
                **common,
                **dict(kind.columns(done, over) or ()),
            )
        )
    return rows


def _worst(done: Sequence[FindingResult], things: str) -> Worst | None:
    """Return the worst record of an attack's findings: the best image or row, or how many members stand out.

    A member and its matched record have their scores by luck in either order, so k members above all others are there
    with at most 1/2 to the power of k; where an attack was run several times, with at most so many times that.
    """
    if images := best_tries([i for f in done for i in f.images]):
        values = [i.psnr for i in images]
        best, mean = max(values), float(np.mean(values))
        groups = by_class([(i.true_label, i.psnr) for i in images])
        text = f"the most exposed of {len(values):,} {things} came out at {best:.1f} dB, the mean is {mean:.1f} dB"
        text += in_groups(groups, "dB")
        return Worst(value=best, mean=mean, n=len(values), text=text, by_group=groups)
    if rows := [(row.true_label, row.right / row.cells) for f in done for row in f.rows if row.cells]:
        shares = [share for _, share in rows]
        best, mean = max(shares), float(np.mean(shares))
        text = f"of the most exposed of {len(shares):,} rows {best:.0%} of cells came out, the mean is {mean:.0%}"
        groups = [*by_class(rows), *by_category([g for f in done for g in f.row_groups])]
        text = text.replace("%", " %") + in_groups(groups, "%")
        return Worst(value=best, mean=mean, n=len(shares), text=text, by_group=groups)
    counted = [(f.standing_out, m.n // 2, f) for f in done for m in f.metrics if m.name == "membership_auc" and m.n]
    known = [(k, n, f) for k, n, f in counted if k is not None]
    if not known:
        return None
    most, n, chief = max(known, key=lambda one: one[:2])
    p = min(1.0, len(known) * 0.5**most)
    luck = "as luck may have it" if p > SURE else "more than luck"
    text = f"{most:,} of {n:,} members score above all others, {luck} (p = {p:.2g})"
    groups = [
        GroupWorst(label=g.label, column=g.column, group=g.value, n=g.members, value=g.standing_out, mean=g.auc)
        for g in chief.exposure
        if g.standing_out is not None
    ]
    if len(groups) < 2:
        return Worst(value=most, n=n, p_value=p, text=text)
    p_group = min(g.p_value for g in chief.exposure)  # corrected for all of them
    luck = "as luck may have it" if p_group > SURE else "more than luck"
    text += f"{in_groups(groups)}, the group told best {luck} (p = {p_group:.2g})"
    return Worst(value=most, n=n, p_value=p, text=text, by_group=groups)


def in_groups(groups: Sequence[GroupWorst], unit: Literal["dB", "%", ""] = "") -> str:
    """Return in words how far classes, and a column's categories, are apart: their most exposed and their means.

    No class, column or category is named. Of several columns it is the one whose means are furthest apart.

    Args:
        groups: of classes and columns.
        unit: dB, or % of shares; none of membership: how many members stand out, and AUCs.
    """
    columns: dict[str, list[GroupWorst]] = {}
    classes = [group for group in groups if not group.column]
    for group in groups:
        columns.setdefault(group.column, []).append(group)
    columns.pop("", None)
    told = [("class", classes)] if classes else []
    if columns:
        own = max(columns.values(), key=lambda own: max(g.mean for g in own) - min(g.mean for g in own))
        several = f"the column of {len(columns)} whose categories are furthest apart"
        told.append((several if len(columns) > 1 else "a column's categories", own))
    text = ""
    for by, own in told:
        text += f"; by {by} ({len(own)}, of {_ends([g.n for g in own], '')} each) "
        if unit:
            text += f"the most exposed {_ends([g.value for g in own], unit)}, "
            text += f"the means {_ends([g.mean for g in own], unit)}"
        else:
            most = int(max(g.value for g in own))
            text += f"at most {most:,} member{'s' * (most != 1)}, AUC {_ends([g.mean for g in own], 'AUC')}"
    return text


def _ends(values: Sequence[float], unit: str) -> str:
    say = {"dB": "{:.1f}", "%": "{:.0%}", "AUC": "{:.2f}"}.get(unit, "{:,.0f}")
    low, high = (say.format(one).rstrip("%") for one in (min(values), max(values)))
    return (low if low == high else f"{low} to {high}") + (f" {unit}" if unit in {"dB", "%"} else "")


def by_class(values: Sequence[tuple[float | None, float]]) -> list[GroupWorst]:
    """Return the largest value of each class, beside its mean, of two or more classes of two values each.

    One value alone is none: it would be one record's. Of numbers there are none, nor of a value for each.
    """
    classes: dict[int, list[float]] = {}
    for label, value in values:
        if label is None or not float(label).is_integer():
            return []
        classes.setdefault(int(label), []).append(value)
    several = [
        GroupWorst(label=label, n=len(own), value=max(own), mean=float(np.mean(own)))
        for label, own in sorted(classes.items())
        if len(own) > 1
    ]
    return several if len(several) > 1 else []


def by_category(told: Sequence[GroupWorst]) -> list[GroupWorst]:
    """Return what several findings tell of categories, of all their rows; of columns with two or more of two rows each.

    One row alone is none: its category's worst would be that person's.
    """
    columns: dict[str, dict[int, list[GroupWorst]]] = {}
    for group in told:
        columns.setdefault(group.column, {}).setdefault(group.label, []).append(group)
    found = []
    for categories in columns.values():
        together = [
            own[0].model_copy(
                update={
                    "n": (n := sum(g.n for g in own)),
                    "value": max(g.value for g in own),
                    "mean": sum(g.n * g.mean for g in own) / n,
                }
            )
            for _, own in sorted(categories.items())
        ]
        several = [group for group in together if group.n > 1]
        found += several if len(several) > 1 else []
    return found


def _filled(text: str, words: dict[str, str]) -> str:
    for _ in range(2):  # a question has words to fill in, too
        for key, value in words.items():
            text = text.replace(key, value)
    return text


def _metric_summaries(done: Sequence[FindingResult], over: Over) -> list[MetricSummary]:
    """Return one summary for every metric that these findings have, in their order."""
    rows = []
    for name in dict.fromkeys(m.name for f in done for m in f.metrics):
        found = [m for f in done for m in f.metrics if m.name == name]
        known = metric(name)
        ends = known.ends if known else ()
        together = pooled(found, *ends)
        mean = together or over([m.value for m in found], *ends)
        assert mean is not None  # there is one value at least
        rows.append(
            MetricSummary(
                name=name,
                summary=known.summary if known else name,
                unit=found[0].unit,
                higher_is_better=found[0].higher_is_better,
                value=mean,
                of=(together and found[0].of) or "runs",
                baseline=over([m.baseline for m in found if m.baseline is not None], *ends),
            )
        )
    return rows


def compare(findings: Sequence[FindingResult], summaries: Sequence[AttackSummary]) -> list[Comparison]:
    """Return the paired comparisons of all pairs of attacks that ran on the same images, updates or clients.

    By what their kind is compared by: PSNR for images, else the first metric. Undecided where Student's test of the
    mean difference doesn't exclude zero at 5 %, all comparisons together (Holm's correction), or where there are fewer
    than two pairs; meaningless where neither attack found anything: then the difference is one between two ways to
    fail.
    """
    pairs = []
    by_place = {(s.federation, s.attack): s for s in summaries}
    for federation in dict.fromkeys(f.federation for f in findings):
        measured: dict[str, dict[str, dict[Any, list[float]]]] = {}
        scales: dict[str, Scores] = {}
        for finding in _counted([f for f in findings if f.federation == federation and f.status == "done"]):
            if scores := type_of(finding).scores(finding):
                scales[scores.metric] = scores
                own = measured.setdefault(scores.metric, {}).setdefault(finding.attack, {})
                for key, value in scores.values.items():
                    own.setdefault(key, []).append(value)
        for name, by_attack in measured.items():
            for b, a in itertools.combinations(by_attack, 2):
                first, second = by_attack[a], by_attack[b]
                apart = [float(np.mean(first[k]) - np.mean(second[k])) for k in first if k in second]
                if apart:
                    sides = by_place[federation, a], by_place[federation, b]
                    pairs.append((*sides, scales[name], paired_interval(apart), difference_test(apart)))
    told = [i for i, (a, b, *_) in enumerate(pairs) if {a.verdict, b.verdict} & set(LEAKS)]
    corrected = dict(zip(told, holm([pairs[i][-1] for i in told]), strict=True))
    return [_comparison(a, b, scale, over, corrected.get(i, 1.0)) for i, (a, b, scale, over, _) in enumerate(pairs)]


def _counted(findings: Sequence[FindingResult]) -> list[FindingResult]:
    """Return the findings with the images by which each victim of an attack is counted: of several tries the best."""
    best = {id(i) for of in grouped(findings).values() for i in best_tries([i for f in of for i in f.images])}
    return [f.model_copy(update={"images": [i for i in f.images if id(i) in best]}) for f in findings]


def _comparison(a: AttackSummary, b: AttackSummary, scale: Scores, difference: Interval, p: float) -> Comparison:
    a_wins = (difference.mean > 0) == scale.higher_is_better
    outcome: Literal["a is better", "b is better", "undecided", "meaningless here"]
    outcome, reason = "a is better" if a_wins else "b is better", None
    if p > DOUBT:
        outcome = "undecided"
    if not {a.verdict, b.verdict} & set(LEAKS):
        outcome, reason = "meaningless here", "neither attack found anything"
    elif not _above_baseline(a if a_wins else b, scale.metric):
        outcome, reason = "meaningless here", "even the better one is no better than no attack at all"
    return Comparison(
        federation=a.federation,
        metric=scale.metric,
        a=a.attack,
        b=b.attack,
        difference=difference,
        p_value=p,
        unit=scale.unit,
        outcome=outcome,
        reason=reason,
    )


def _above_baseline(summary: AttackSummary, name: str) -> bool:
    """Return whether an attack's mean is better than what one has without it; True where that isn't known."""
    found = next((m for m in summary.measured if m.name == name), None)
    if found is None or found.baseline is None:
        return True
    return (found.value.mean > found.baseline.mean) == found.higher_is_better


def grouped(findings: Sequence[FindingResult]) -> dict[tuple[str, str], list[FindingResult]]:
    """Return the findings by federation and attack."""
    groups: dict[tuple[str, str], list[FindingResult]] = {}
    for finding in findings:
        groups.setdefault((finding.federation, finding.attack), []).append(finding)
    return groups
