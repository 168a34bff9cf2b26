"""From the findings of an audit to its summaries, comparisons and thresholds."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from fedaudit.evaluation.finding_types import FINDING_TYPES, Judgement, metric
from fedaudit.evaluation.statistics import interval, paired_interval, pooled
from fedaudit.results import (
    LEAKS,
    VERDICTS,
    AttackSummary,
    Comparison,
    FindingResult,
    ImageResult,
    Interval,
    MetricSummary,
    Timing,
)

Over = Callable[[Sequence[float]], Interval | None]


def verdict_rules(findings: Sequence[FindingResult]) -> list[str]:
    """Return what the verdicts mean and the rules by which ``findings`` were evaluated, in words."""
    kinds = dict.fromkeys(f.kind for f in findings if f.kind) or {"images": None}
    common = [f"'{verdict}': {text}" for verdict, text in VERDICTS.items()]
    return [*common, *(rule for kind in kinds for rule in FINDING_TYPES[kind].rules)]


def summarise(
    findings: Sequence[FindingResult], *, resamples: int, seed: int, who: str = "The adversary", things: str = "images"
) -> list[AttackSummary]:
    """Return one summary for each attack on each federation, in the order of the findings.

    A summary that is "not demonstrated" has no control yet: see :func:`fedaudit.pipeline.controls.with_controls`.

    Args:
        findings: of the audit.
        resamples: of the bootstrap.
        seed: of that.
        who: the adversary, as a sentence begins with it.
        things: the examples, in the plural.
    """
    rows = []
    for (federation, attack), group in grouped(findings).items():
        images = [image for finding in group for image in finding.images]
        done = [f for f in group if f.status == "done"]
        kind = next((f.kind for f in done if f.kind), "images")
        common: dict[str, Any] = {
            "attack": attack,
            "federation": federation,
            "update_kind": group[0].update_kind,
            "updates": len(group),
            "images": len(images),
        }
        if not done:
            text = f"{attack} could not be run: {group[0].reason}"
            rows.append(AttackSummary(verdict="not applicable", verdict_text=text, **common))
            continue
        found = Judgement(*FINDING_TYPES[kind].verdict(done))
        words = {"{who}": who, "{things}": things, "{question}": FINDING_TYPES[kind].question}

        def over(values: Sequence[float]) -> Interval | None:
            return interval(values, resamples=resamples, seed=seed) if values else None

        rows.append(
            AttackSummary(
                verdict=found.verdict,
                verdict_text=found.text,
                headline=_filled(found.headline, words),
                evidence=found.evidence,
                advice=[found.advice] if found.advice else [],
                kind=kind,
                metrics=_metric_summaries(done, over),
                timing=Timing(seconds=sum(f.timing.seconds for f in done if f.timing)),
                **common,
                **(_over_images(images, done, over) if images else {}),
            )
        )
    return rows


def _filled(text: str, words: dict[str, str]) -> str:
    for _ in range(2):  # a question has words to fill in, too
        for key, value in words.items():
            text = text.replace(key, value)
    return text


def _over_images(images: Sequence[ImageResult], done: Sequence[FindingResult], over: Over) -> dict[str, Any]:
    labels = [f.label_accuracy for f in done if f.label_accuracy is not None]
    moved = [i.registered for i in images if i.registered is not None]
    same_class = [i.psnr_same_class for i in images if i.psnr_same_class is not None]
    return {
        "psnr": over([i.psnr for i in images]),
        "mse": over([i.mse for i in images]),
        "ssim": over([i.ssim for i in images]),
        "lpips": over([i.lpips for i in images if i.lpips is not None]),
        "psnr_registered": over([m.psnr for m in moved]),
        "ssim_registered": over([m.ssim for m in moved]),
        "psnr_mean_image_registered": float(np.mean([m.psnr_mean_image for m in moved])) if moved else None,
        "identification_rate": sum(i.rank == 1 for i in images) / len(images),
        "label_accuracy": sum(labels) / len(labels) if labels else None,
        "psnr_mean_image": float(np.mean([i.psnr_mean_image for i in images])),
        "psnr_same_class": float(np.mean(same_class)) if same_class else None,
    }


def _metric_summaries(done: Sequence[FindingResult], over: Over) -> list[MetricSummary]:
    """Return one summary for every metric that these findings have, in their order."""
    rows = []
    for name in dict.fromkeys(m.name for f in done for m in f.metrics):
        found = [m for f in done for m in f.metrics if m.name == name]
        known = metric(name)
        mean = pooled(found) or over([m.value for m in found])
        assert mean is not None  # there is one value at least
        rows.append(
            MetricSummary(
                name=name,
                summary=known.summary if known else name,
                unit=found[0].unit,
                higher_is_better=found[0].higher_is_better,
                value=mean,
                baseline=over([m.baseline for m in found if m.baseline is not None]),
            )
        )
    return rows


def compare(findings: Sequence[FindingResult], summaries: Sequence[AttackSummary]) -> list[Comparison]:
    """Return the paired comparisons of all pairs of attacks that ran on the same images, updates or clients.

    By PSNR for images, by the first metric of their kind for other findings. Undecided where the 95 % interval of the
    mean difference holds zero, or where there are fewer than two pairs; meaningless where neither attack found
    anything: then the difference is one between two ways to fail.
    """
    verdicts = {(s.federation, s.attack): s.verdict for s in summaries}
    rows = []
    for federation in dict.fromkeys(f.federation for f in findings):
        scores: dict[str, dict[str, dict[Any, float]]] = {}
        scales = {"psnr": (True, "dB")}  # metric to whether higher is better, and its unit
        for f in findings:
            if f.federation == federation and f.images:
                own = scores.setdefault("psnr", {}).setdefault(f.attack, {})
                own.update({(f.round, f.client, i): image.psnr for i, image in enumerate(f.images)})
            elif f.federation == federation and f.metrics:
                first = f.metrics[0]
                scales[first.name] = (first.higher_is_better, first.unit)
                scores.setdefault(first.name, {}).setdefault(f.attack, {})[f.round, f.client] = first.value
        for name, by_attack in scores.items():
            higher, unit = scales[name]
            for b, a in itertools.combinations(by_attack, 2):
                shared = [key for key in by_attack[a] if key in by_attack[b]]
                if not shared:
                    continue
                difference = paired_interval([by_attack[a][k] - by_attack[b][k] for k in shared])
                decided = difference.n >= 2 and not difference.low <= 0 <= difference.high
                a_wins = (difference.mean > 0) == higher
                reason = None
                winner = a if a_wins else b
                if not {verdicts[federation, a], verdicts[federation, b]} & set(LEAKS):
                    reason = "neither attack found anything"
                elif not _above_baseline(summaries, federation, winner, name):
                    reason = "even the better one is no better than no attack at all"
                rows.append(
                    Comparison(
                        federation=federation,
                        metric=name,
                        a=a,
                        b=b,
                        difference=difference,
                        unit=unit,
                        outcome="meaningless here"
                        if reason
                        else "undecided"
                        if not decided
                        else "a is better"
                        if a_wins
                        else "b is better",
                        reason=reason,
                    )
                )
    return rows


def _above_baseline(summaries: Sequence[AttackSummary], federation: str, attack: str, name: str) -> bool:
    """Return whether an attack's mean is better than what one has without it; True where that isn't known."""
    summary = next(s for s in summaries if (s.federation, s.attack) == (federation, attack))
    if name == "psnr":
        return summary.psnr is None or summary.psnr_mean_image is None or summary.psnr.mean > summary.psnr_mean_image
    found = next(m for m in summary.metrics if m.name == name)
    if found.baseline is None:
        return True
    return (found.value.mean > found.baseline.mean) == found.higher_is_better


def grouped(findings: Sequence[FindingResult]) -> dict[tuple[str, str], list[FindingResult]]:
    """Return the findings by federation and attack."""
    groups: dict[tuple[str, str], list[FindingResult]] = {}
    for finding in findings:
        groups.setdefault((finding.federation, finding.attack), []).append(finding)
    return groups
