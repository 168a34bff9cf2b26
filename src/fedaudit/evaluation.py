"""Findings against ground truth: the only room that knows both."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment
from scipy.stats import bootstrap, ttest_1samp
from torch import Tensor

from fedaudit.attacks import Finding
from fedaudit.errors import BadInput
from fedaudit.federation.truth import Truth
from fedaudit.metrics import lpips, mse, psnr, ssim
from fedaudit.results import (
    AttackSummary,
    Comparison,
    Curve,
    FindingResult,
    ImageResult,
    Interval,
    Threshold,
    Timing,
    Verdict,
)
from fedaudit.seeds import derive_seed
from fedaudit.threat import Message

RECOGNISABLE_SSIM = 0.5

VERDICT_RULES = [
    "An image counts as recognisable when its reconstruction is nearer (mean squared error) to it than to any other "
    f"candidate, and its SSIM is at least {RECOGNISABLE_SSIM}. The candidates are the victims and every held-out "
    "example of the data set.",
    "'recognisable': this holds for at least half of the images.",
    "'partly recognisable': it holds for at least one image, or at least half of the images are identified among the "
    "candidates.",
    "'not demonstrated': otherwise. This attack, with these settings, did not show a leak; another might.",
    "'not applicable': the attack could not be played under this threat model; the reason is given.",
]

# Metrics that a user may set a limit for; for each, higher means more leakage.
THRESHOLD_METRICS = {
    "psnr": "highest PSNR of any reconstructed image, in dB",
    "ssim": "highest SSIM of any reconstructed image",
    "identification_rate": "highest share of images identified by an attack",
    "label_accuracy": "highest share of labels recovered by an attack",
}


@dataclass(frozen=True)
class Judged:
    """A finding with its scores, and the pictures that belong to them."""

    result: FindingResult
    true_images: Tensor
    images: Tensor


def evaluate(finding: Finding, message: Message, truth: Truth, federation: str, *, seed: int) -> Judged:
    """Compare a finding with what the client really trained on.

    Recovered and true images of the batch are paired by the assignment of least total squared error. An example that
    the update used several times (local epochs) is judged once, by the first of its recoveries.

    Args:
        finding: of one attack on one message.
        message: the exchange that was attacked.
        truth: of the federation.
        federation: its name.
        seed: for the random other image of the class.
    """
    true = truth.inputs[message.round, message.client]
    true_labels = truth.labels[message.round, message.client]
    order = assign(true, finding.images)
    images, labels = finding.images[order], finding.labels[order]
    errors = mse(images, true)
    values = psnr(errors)
    structure = ssim(images, true)
    perceptual = lpips(images, true)
    mean_image = truth.candidates.mean(dim=0, keepdim=True)
    rng = np.random.default_rng(derive_seed(seed, "same-class", federation, message.round, message.client))
    results = []
    first, uses = _distinct(true)
    for i in first:
        other = _same_class(true[i], int(true_labels[i]), truth, rng)
        results.append(
            ImageResult(
                true_image=f"images/{federation}-{message.round}-{message.client}-{i}-true.png",
                reconstruction=f"images/{federation}-{message.round}-{message.client}-{i}-{finding.attack}.png",
                true_label=int(true_labels[i]),
                label=int(labels[i]),
                mse=float(errors[i]),
                psnr=float(values[i]),
                ssim=float(structure[i]),
                lpips=None if perceptual is None else float(perceptual[i]),
                rank=rank(images[i], true[i], truth.candidates),
                candidates=len(truth.candidates),
                uses=uses[i],
                psnr_mean_image=float(psnr(mse(mean_image, true[i : i + 1]))),
                psnr_same_class=None if other is None else float(psnr(mse(other[None], true[i : i + 1]))),
            )
        )
    trace = finding.trace
    curve = Curve(
        iterations=trace.iterations,
        objective=trace.objective,
        psnr=[float(psnr(mse(s[assign(true, s)], true)).mean()) for s in trace.snapshots],
    )
    result = FindingResult(
        attack=finding.attack,
        federation=federation,
        update_kind=message.update.kind,
        round=message.round,
        client=message.client,
        num_examples=message.update.num_examples,
        status="done",
        images=results,
        label_source=finding.label_source,
        label_accuracy=label_accuracy(finding.labels, true_labels),
        objective=finding.objective,
        iterations=finding.iterations,
        curve=curve,
        notes=list(finding.notes),
        timing=Timing(seconds=finding.seconds),
    )
    return Judged(result, true[first], images[first])


def _distinct(true: Tensor) -> tuple[list[int], dict[int, int]]:
    """Return the first position of every distinct image, and how often it occurs."""
    uses: dict[int, int] = {}
    seen: dict[bytes, int] = {}
    for i, image in enumerate(true):
        first = seen.setdefault(image.numpy().tobytes(), i)
        uses[first] = uses.get(first, 0) + 1
    return list(uses), uses


def assign(true: Tensor, images: Tensor) -> Tensor:
    """Return, for each of n ``true`` images, the index of the one of n ``images`` that is paired with it.

    The one-to-one pairing of least total squared error (Hungarian method); both are (n, C, H, W).
    """
    cost = torch.cdist(true.flatten(1).double(), images.flatten(1).double()).square()
    _, columns = linear_sum_assignment(cost.numpy())
    return torch.as_tensor(columns, dtype=torch.int64)


def rank(image: Tensor, true: Tensor, candidates: Tensor) -> int:
    """Return how many candidates are at least as near to ``image`` as ``true``, which counts as one itself."""
    distances = _squared_distances(image, candidates)
    own = _squared_distances(image, true[None])
    same = _squared_distances(true, candidates) == 0
    return 1 + int(((distances <= own) & ~same).sum())


def _squared_distances(image: Tensor, others: Tensor) -> Tensor:
    parts = [(part - image).flatten(1).square().sum(dim=1, dtype=torch.float64) for part in others.split(256)]
    return torch.cat(parts)


def _same_class(true: Tensor, label: int, truth: Truth, rng: np.random.Generator) -> Tensor | None:
    """Return a random other candidate of the class, or None if there is none."""
    rows = torch.nonzero(truth.candidate_labels == label).flatten().tolist()
    rows = [row for row in rows if not truth.candidates[row].equal(true)]
    return truth.candidates[int(rng.choice(rows))] if rows else None


def label_accuracy(inferred: Tensor, true: Tensor) -> float:
    """Return the share of the (n,) true labels that were recovered, both taken as multisets."""
    length = int(max(inferred.max(), true.max())) + 1
    overlap = torch.minimum(torch.bincount(inferred, minlength=length), torch.bincount(true, minlength=length))
    return float(overlap.sum()) / len(true)


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
        common: dict[str, Any] = {
            "attack": attack,
            "federation": federation,
            "update_kind": group[0].update_kind,
            "updates": len(group),
            "images": len(images),
        }
        if not images:
            text = f"{attack} could not be played: {group[0].reason}"
            rows.append(AttackSummary(verdict="not applicable", verdict_text=text, **common))
            continue
        verdict, text = judge(images)
        done = [f for f in group if f.status == "done"]
        labels = [f.label_accuracy for f in done if f.label_accuracy is not None]
        same_class = [i.psnr_same_class for i in images if i.psnr_same_class is not None]
        perceptual = [i.lpips for i in images if i.lpips is not None]

        def over(values: list[float]) -> Interval | None:
            return interval(values, resamples=resamples, seed=seed) if values else None

        rows.append(
            AttackSummary(
                verdict=verdict,
                verdict_text=text,
                psnr=over([i.psnr for i in images]),
                mse=over([i.mse for i in images]),
                ssim=over([i.ssim for i in images]),
                lpips=over(perceptual),
                identification_rate=sum(i.rank == 1 for i in images) / len(images),
                label_accuracy=sum(labels) / len(labels) if labels else None,
                psnr_mean_image=float(np.mean([i.psnr_mean_image for i in images])),
                psnr_same_class=float(np.mean(same_class)) if same_class else None,
                timing=Timing(seconds=sum(f.timing.seconds for f in done if f.timing)),
                **common,
            )
        )
    return rows


def judge(images: Sequence[ImageResult]) -> tuple[Verdict, str]:
    """Return the verdict on an attack's images and a sentence that says it, by ``VERDICT_RULES``."""
    n = len(images)
    recognisable = sum(i.rank == 1 and i.ssim >= RECOGNISABLE_SSIM for i in images)
    identified = sum(i.rank == 1 for i in images)
    chosen = "images were" if n > 1 else "image was"
    if 2 * recognisable >= n:
        return "recognisable", f"{recognisable} of {n} {chosen} recovered recognisably"
    if recognisable or 2 * identified >= n:
        text = f"{recognisable} of {n} {chosen} recovered recognisably; {identified} of {n} could be told apart"
        return "partly recognisable", text
    return "not demonstrated", f"none of {n} {chosen} recovered recognisably under this threat model"


def compare(findings: Sequence[FindingResult]) -> list[Comparison]:
    """Return the paired comparisons (PSNR) of all pairs of attacks that were played on the same images.

    Undecided where the 95 % interval of the mean difference holds zero, or where there are fewer than two images.
    """
    rows = []
    federations = list(dict.fromkeys(f.federation for f in findings))
    for federation in federations:
        scores: dict[str, dict[tuple[int, int, int], float]] = {}
        for f in findings:
            if f.federation == federation and f.images:
                own = scores.setdefault(f.attack, {})
                own.update({(f.round, f.client, i): image.psnr for i, image in enumerate(f.images)})
        for b, a in itertools.combinations(scores, 2):
            shared = [key for key in scores[a] if key in scores[b]]
            if not shared:
                continue
            difference = paired_interval([scores[a][k] - scores[b][k] for k in shared])
            better = None if difference.n < 2 or difference.low <= 0 <= difference.high else difference.mean > 0
            rows.append(
                Comparison(
                    federation=federation,
                    metric="psnr",
                    a=a,
                    b=b,
                    difference=difference,
                    outcome="undecided" if better is None else "a is better" if better else "b is better",
                )
            )
    return rows


def check_limits(limits: dict[str, float]) -> None:
    """Refuse limits for metrics that don't exist.

    Raises:
        BadInput: naming the ones that do.
    """
    for metric, limit in limits.items():
        if metric not in THRESHOLD_METRICS:
            raise BadInput(f"there is no limit for '{metric}'; known: {', '.join(THRESHOLD_METRICS)}")
        if not math.isfinite(limit):
            raise BadInput(f"the limit for '{metric}' is {limit}; give a number")


def check_thresholds(
    limits: dict[str, float], findings: Sequence[FindingResult], summaries: Sequence[AttackSummary]
) -> list[Threshold]:
    """Compare the worst value of every limited metric with its limit; see ``THRESHOLD_METRICS``."""
    rows = []
    for metric, limit in limits.items():
        if metric in ("psnr", "ssim"):
            values = [(getattr(i, metric), f"{f.attack} on {f.federation}") for f in findings for i in f.images]
        else:
            found = [(getattr(s, metric), f"{s.attack} on {s.federation}") for s in summaries]
            values = [(value, where) for value, where in found if value is not None]
        worst, where = max(values, default=(None, None))
        exceeded = worst is not None and worst > limit
        rows.append(Threshold(metric=metric, limit=limit, worst=worst, where=where, exceeded=exceeded))
    return rows


def _grouped(findings: Sequence[FindingResult]) -> dict[tuple[str, str], list[FindingResult]]:
    groups: dict[tuple[str, str], list[FindingResult]] = {}
    for finding in findings:
        groups.setdefault((finding.federation, finding.attack), []).append(finding)
    return groups
