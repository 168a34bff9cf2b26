"""From the findings of an audit to its summaries, comparisons and thresholds."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from scipy.stats import bootstrap, ttest_1samp

from fedaudit.attacks import ATTACKS
from fedaudit.evaluation.finding_types import FINDING_TYPES, metric
from fedaudit.results import (
    AttackSummary,
    Comparison,
    FindingResult,
    ImageResult,
    Interval,
    MetricSummary,
    Threshold,
    Timing,
)
from fedaudit.utils.errors import BadInput
from fedaudit.utils.seeds import derive_seed

Over = Callable[[Sequence[float]], Interval | None]

_COMMON_RULES = (
    "'not demonstrated': otherwise. This attack, with these settings, did not show a leak; another might.",
    "'not applicable': the attack could not be run under this threat model; the reason is given.",
)

# Scores of images that a user may set a limit for; for each, higher means more leakage.
_IMAGE_LIMITS = ("psnr", "ssim", "identification_rate", "label_accuracy")


def limitable() -> list[str]:
    """Return the metrics that a user may set a limit for: those of which more is more leakage."""
    ATTACKS.names()  # other packages' kinds of findings come with their attacks
    metrics = (m.name for kind in FINDING_TYPES.values() for m in kind.metrics if m.higher_is_better)
    return list(dict.fromkeys([*_IMAGE_LIMITS, *metrics]))


def verdict_rules(findings: Sequence[FindingResult]) -> list[str]:
    """Return the rules by which ``findings`` were evaluated, in words."""
    kinds = dict.fromkeys(f.kind for f in findings if f.kind) or {"images": None}
    return [*(rule for kind in kinds for rule in FINDING_TYPES[kind].rules), *_COMMON_RULES]


def interval(values: Sequence[float], *, resamples: int, seed: int) -> Interval:
    """Return mean, median and the 95 % percentile bootstrap interval of the mean; with one value it has no width."""
    data = np.asarray(values, dtype=float)
    low = high = float(data.mean())
    if len(data) > 1 and np.ptp(data) > 0:
        rng = np.random.default_rng(derive_seed(seed, "bootstrap"))
        ends = bootstrap((data,), np.mean, n_resamples=resamples, method="percentile", rng=rng).confidence_interval
        low, high = float(ends.low), float(ends.high)
    return Interval(mean=float(data.mean()), median=float(np.median(data)), low=low, high=high, n=len(data))


def paired_interval(differences: Sequence[float]) -> Interval:
    """Return mean, median and the 95 % Student interval of the mean of paired differences.

    Not the bootstrap's, which is too narrow for the handful of images that an audit often has.
    """
    data = np.asarray(differences, dtype=float)
    low = high = float(data.mean())
    if len(data) > 1 and np.ptp(data) > 0:
        ends = ttest_1samp(data, 0.0).confidence_interval(0.95)
        low, high = float(ends.low), float(ends.high)
    return Interval(mean=float(data.mean()), median=float(np.median(data)), low=low, high=high, n=len(data))


def summarise(findings: Sequence[FindingResult], *, resamples: int, seed: int) -> list[AttackSummary]:
    """Return one summary for each attack on each federation, in the order of the findings."""
    rows = []
    for (federation, attack), group in _grouped(findings).items():
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
        verdict, text = FINDING_TYPES[kind].verdict(done)

        def over(values: Sequence[float]) -> Interval | None:
            return interval(values, resamples=resamples, seed=seed) if values else None

        rows.append(
            AttackSummary(
                verdict=verdict,
                verdict_text=text,
                kind=kind,
                metrics=_metric_summaries(done, over),
                timing=Timing(seconds=sum(f.timing.seconds for f in done if f.timing)),
                **common,
                **(_over_images(images, done, over) if images else {}),
            )
        )
    return rows


def _over_images(images: Sequence[ImageResult], done: Sequence[FindingResult], over: Over) -> dict[str, Any]:
    labels = [f.label_accuracy for f in done if f.label_accuracy is not None]
    same_class = [i.psnr_same_class for i in images if i.psnr_same_class is not None]
    return {
        "psnr": over([i.psnr for i in images]),
        "mse": over([i.mse for i in images]),
        "ssim": over([i.ssim for i in images]),
        "lpips": over([i.lpips for i in images if i.lpips is not None]),
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
        mean = over([m.value for m in found])
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


def compare(findings: Sequence[FindingResult]) -> list[Comparison]:
    """Return the paired comparisons of all pairs of attacks that ran on the same images, updates or clients.

    By PSNR for images, by the first metric of their kind for other findings. Undecided where the 95 % interval of the
    mean difference holds zero, or where there are fewer than two pairs.
    """
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
                rows.append(
                    Comparison(
                        federation=federation,
                        metric=name,
                        a=a,
                        b=b,
                        difference=difference,
                        unit=unit,
                        outcome="undecided" if not decided else "a is better" if a_wins else "b is better",
                    )
                )
    return rows


def check_limits(limits: dict[str, float]) -> None:
    """Refuse limits for metrics that don't exist, or of which less is more leakage.

    Raises:
        BadInput: naming the ones that do.
    """
    if not isinstance(limits, dict):
        raise BadInput(f"limits are a mapping of metrics to numbers, such as {{'psnr': 20}}, not {limits!r}")
    for name, limit in limits.items():
        if name not in limitable():
            known = metric(name)
            why = f"there is no limit for '{name}'" if known is None else f"of '{name}' less is more leakage"
            raise BadInput(f"{why}; known: {', '.join(limitable())}")
        if isinstance(limit, bool) or not isinstance(limit, int | float) or not math.isfinite(limit):
            raise BadInput(f"the limit for '{name}' is {limit!r}; give a number")


def check_thresholds(
    limits: dict[str, float], findings: Sequence[FindingResult], summaries: Sequence[AttackSummary]
) -> list[Threshold]:
    """Compare the highest value of every limited metric with its limit; see :func:`limitable`."""
    rows = []
    for name, limit in limits.items():
        worst, where = max(_limited(name, findings, summaries), default=(None, None))
        exceeded = worst is not None and worst > limit
        rows.append(Threshold(metric=name, limit=limit, worst=worst, where=where, exceeded=exceeded))
    return rows


def _limited(
    name: str, findings: Sequence[FindingResult], summaries: Sequence[AttackSummary]
) -> list[tuple[float, str]]:
    """Return every value of the metric ``name`` with where it was met: of images, and of whatever else has it.

    Labels that the adversary was given weren't recovered by anything.
    """
    values = [(m.value, f"{f.attack} on {f.federation}") for f in findings for m in f.metrics if m.name == name]
    if name in ("psnr", "ssim"):
        values += [(getattr(i, name), f"{f.attack} on {f.federation}") for f in findings for i in f.images]
    elif name == "identification_rate":
        rates = [(s.identification_rate, f"{s.attack} on {s.federation}") for s in summaries]
        values += [(rate, where) for rate, where in rates if rate is not None]
    elif name == "label_accuracy":
        with_images = [f for f in findings if f.images and f.label_source != "given"]
        for (federation, attack), group in _grouped(with_images).items():
            right = [f.label_accuracy for f in group if f.label_accuracy is not None]
            values += [(sum(right) / len(right), f"{attack} on {federation}")] if right else []
    return values


def _grouped(findings: Sequence[FindingResult]) -> dict[tuple[str, str], list[FindingResult]]:
    groups: dict[tuple[str, str], list[FindingResult]] = {}
    for finding in findings:
        groups.setdefault((finding.federation, finding.attack), []).append(finding)
    return groups
