"""Images as a kind of finding: its rules in words, its columns of a summary, and what limits may be set for."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import numpy as np

from fedaudit.evaluation.finding_types import FINDING_TYPES, FindingType, KnownExamples, Metric, Over, Scores
from fedaudit.evaluation.image_metrics import PSNR_CAP
from fedaudit.evaluation.images.claims import ADJUSTED_RAND, SAME_CLIENT
from fedaudit.evaluation.images.verdict import (
    ALONE_DB,
    AS_OFTEN,
    ENOUGH,
    LOOKS,
    NEARER_BY_LUCK_DB,
    NEARER_DB,
    VISIBLE_CORRELATION,
    VISIBLE_SSIM,
    best_tries,
    names,
    names_in_words,
    with_certified,
)
from fedaudit.evaluation.shift import SHIFTED
from fedaudit.evaluation.statistics import SURE
from fedaudit.results import FindingResult
from fedaudit.results.images import ImageSummary, Look

# Scores of single images that a user may set a limit for; for each, higher means more leakage.
SCORES = ("psnr", "ssim", "correlation", "psnr_registered", "ssim_registered", "correlation_registered")
# Of the summary's columns: the first is the one by which attacks are compared.
_METRICS = (
    Metric("psnr", "of the images, in dB", "dB", ends=(0.0, PSNR_CAP), title="PSNR"),
    Metric("mse", "mean squared error of pixels in [0, 1]", higher_is_better=False, ends=(0.0, math.inf)),
    Metric("ssim", "structural similarity of images or volumes", ends=(-1.0, 1.0), title="SSIM"),
    Metric("correlation", "of signals (Pearson), each channel's mean taken off", ends=(-1.0, 1.0)),
    Metric("lpips", "perceptual distance of images", higher_is_better=False, ends=(0.0, math.inf)),
    Metric("psnr_registered", "PSNR after the best shift and flip", "dB", ends=(0.0, PSNR_CAP)),
    Metric("ssim_registered", "SSIM after it", ends=(-1.0, 1.0)),
)


def _columns(done: Sequence[FindingResult], over: Over) -> ImageSummary | None:
    images = [image for finding in done for image in finding.images]
    victims = best_tries(images)
    if not victims:
        return None
    labels = [f.label_accuracy for f in done if f.label_accuracy is not None]
    named = [one for look in LOOKS if (one := names(images, look))]

    def of_each(name: str) -> list[float]:
        return [score for image in victims if (score := image.score(name)) is not None]

    def mean(name: str) -> float | None:
        return float(np.mean(found)) if (found := of_each(name)) else None

    return ImageSummary(
        **{metric.name: over(of_each(metric.name), *metric.ends) for metric in _METRICS},
        psnr_mean_image=mean("psnr_mean_image"),
        psnr_same_class=mean("psnr_same_class"),
        psnr_mean_image_registered=mean("psnr_mean_image_registered"),
        psnr_of_tries=float(np.mean([image.psnr for image in images])) if len(images) > len(victims) else None,
        identification_rate=_identified(done)[0],
        named=named,
        named_text=names_in_words(named),
        label_accuracy=sum(labels) / len(labels) if labels else None,
    )


def _identified(findings: Sequence[FindingResult]) -> list[float]:
    victims = best_tries([image for finding in findings for image in finding.images])
    return [sum(image.rank == 1 for image in victims) / len(victims)] if victims else []


def _named(look: Look, findings: Sequence[FindingResult]) -> list[float]:
    found = names([image for finding in findings for image in finding.images], look)
    return [found.named / found.victims] if found else []


def _labels_right(findings: Sequence[FindingResult]) -> list[float]:
    """Return the share of labels that came out; labels that the adversary was given weren't recovered by anything."""
    told = [f for f in findings if f.images and f.label_source != "given"]
    right = [f.label_accuracy for f in told if f.label_accuracy is not None]
    return [sum(right) / len(right)] if right else []


def _of_each(name: str, findings: Sequence[FindingResult]) -> list[float]:
    return [score for f in findings for i in f.images if (score := i.score(name)) is not None]


def _scores(finding: FindingResult) -> Scores | None:
    values = {image.victim or (finding.round, finding.client, i): image.psnr for i, image in enumerate(finding.images)}
    return Scores("psnr", "dB", True, values) if values else None


FINDING_TYPES["images"] = FindingType(
    verdict=with_certified,
    rules=(
        "An image came out visibly when its reconstruction is nearer (mean squared error) to it than to any other "
        f"candidate and nearer than the mean image of all candidates, and its SSIM is at least {VISIBLE_SSIM}. The "
        "candidates are the victims and every held-out example of the data set.",
        "Whether held-out examples may stand for others of the same clients is asked of the examples alone: a "
        "permutation test, given the classes, by values, roughness and range. Where it tells the two apart, at "
        f"{100 * SHIFTED:g} %, what luck does is told by what the same clients used, and the mean image is theirs; "
        "where these are the victims alone, nothing but a copy is a leak, and what is no copy is 'inconclusive'.",
        "A network hardly tells where in an image a thing stands, so a picture may come out in another place or "
        "mirrored, and is a leak all the same: images are judged once more after the shift (by up to a quarter of "
        "the side) and flip that bring them nearest, every other candidate and the mean image after their own best "
        "ones. What an even image would gain by the shift is taken off. A dark picture, a turned one and a negative"
        " are leaks, too: images are judged a third time after the quarter turns, flip, contrast and brightness "
        "that fit best. The worst judgement counts. They share one level: images as they are have 80 % of it, "
        "those after a shift 10 %, those in another tone and those by names 5 %; a moved image's chance is doubled.",
        "Each reconstruction also names a candidate of its class, or a person where persons are known, by other "
        "pictures: by pixels, by pattern (correlation, a pixel's shift allowed) and by an embedding that held-out ones "
        "taught. The last two can make images 'identifiable', where luck that names one in ten is excluded.",
        "Volumes are judged as images are: their SSIM has a window of three axes, and they are shifted along their "
        "depth, too. Signals are judged by correlation where images are by SSIM: one came out visibly when that of its "
        f"reconstruction with it is at least {VISIBLE_CORRELATION}, each channel's mean taken off, and it is nearer to "
        "it than to any other candidate and than the mean signal; a PSNR is that of each channel's range. They are "
        "judged once more after the best shift in time, reversed or not, and after another amplitude and offset. "
        "Examples of several inputs are judged as they are, by the same correlation with the mean of all candidates "
        "taken off, each channel and each single number in units of its range.",
        "Victims are counted, not images: one that several rounds or updates show came out where one of its images "
        "did, and their chances are added up.",
        "Images are 'recovered' when at least one came out visibly and luck doesn't explain it: so many came out "
        f"visibly that naming candidates at random would do as well with a probability of at most {100 * SURE:g} % "
        "(one-sided exact test, Poisson binomial). That takes a victim to be named by luck in one case of "
        f"{1 / AS_OFTEN:g} at least (in more where candidates come in smaller groups of much the same), unless "
        "margins over the nearest other candidate are beyond those of candidates "
        "over each other (Fisher's method): these may be of one person. Or the margins are so wide that luck would "
        "name the victims and come as near as seldom: "
        "another picture that is nearest to a victim is so by x dB with a probability of at most "
        f"exp(-x/{NEARER_BY_LUCK_DB:g}), as portraits of one person are. The one that is furthest ahead is tested, by "
        f"{NEARER_DB:g} dB at least, and whether two or more are ahead (binomial tests), half of the level each. Of "
        f"fewer than {ENOUGH} candidates they must also be nearer than their mean image by {ALONE_DB:g} dB, and none "
        "may be as near to somebody else's. The share has an exact 95 % interval. Where the only candidate is the "
        "victim, its reconstruction is compared with an even image of the victim's mean colour and "
        f"{ALONE_DB - NEARER_DB:g} dB.",
        "An attack may certify images: it vouches, without the truth, that they are the client's own up to half a "
        "grey level. With the truth this is checked, and a certified image that is wrong is said in the verdict.",
        "Where an attack groups images by client, how many pairs it groups rightly is said in its notes, and with what "
        "probability groups of the same sizes at random do as well.",
        "Images are 'identifiable' when too few came out visibly, and the same test of those that are nearest to "
        "their own reconstruction excludes luck. The text says where colours, brightness and contrast alone tell "
        "them. As many candidates are named at random as images are paired with an update's true ones, each of the "
        "right class; candidates that are equal count once. A victim that is equal to several is named as often as "
        "they occur, and is never nearer than any other.",
    ),
    metrics=(*_METRICS, ADJUSTED_RAND, SAME_CLIENT),
    question="reconstruct training {things}",
    control="example",
    known=KnownExamples(each=True),
    averaged="averaged",
    worst="recovered",
    counts=True,
    margin=True,
    ceiling=True,
    remedies=("larger batches", "other attacks"),
    scores=_scores,
    columns=_columns,
    limits={name: partial(_of_each, name) for name in SCORES}
    | {f"named_by_{look}": partial(_named, look) for look in LOOKS}
    | {"identification_rate": _identified, "label_accuracy": _labels_right},
)
