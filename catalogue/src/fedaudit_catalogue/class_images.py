"""Images that a malicious client generated of a class, against real images of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from scipy import stats
from torch import Tensor

from fedaudit.attacks import Observation
from fedaudit.evaluation import (
    FINDING_TYPES,
    SURE,
    Evaluation,
    FindingType,
    Judgement,
    Metric,
    by_test,
    done,
    evaluate,
    leaks,
    lpips,
    mse,
    proportion,
    psnr_from_mse,
    refused,
    ssim,
)
from fedaudit.results import Chart, FindingResult, Line, MetricResult, Sheet
from fedaudit.transcript import Truth
from fedaudit.utils import BadInput
from fedaudit_catalogue.attacks.gan import ClassImagesFinding

RECOGNISED = Metric(
    "recognised",
    "share of the generated images that an independent classifier takes for the class; without the attack: of real "
    "images of the other classes",
    ends=(0, 1),
)
CLOSEST = Metric(
    "closest_class",
    "share of the generated images that are closer to the class than to any other: that correlate more with the mean "
    "of its held-out images than with any other class's, whatever their brightness and contrast; without the attack: "
    "of real images of the other classes",
)
CORRELATION = Metric(
    "class_correlation",
    "correlation of a generated image's pixels with the mean of the class's held-out images, mean over the generated "
    "ones; without the attack: of real images of the other classes",
)
CORRELATION_REAL = Metric(
    "class_correlation_real",
    "what to hold class_correlation against: that of real images of the class, some of which the mean is made of",
)
PSNR_NEAREST = Metric(
    "nearest_pair_psnr",
    "PSNR of a generated image to the real image of the class that it is nearest to, mean over the generated ones; "
    "without the attack: of real images of the other classes",
    unit="dB",
)
PSNR_MEAN = Metric(
    "class_psnr",
    "PSNR of generated to real images of the class, mean over all pairs; without the attack: of real images of the "
    "other classes",
    unit="dB",
)
SSIM_NEAREST = Metric("nearest_pair_ssim", "as nearest_pair_psnr, SSIM of the same pairs")
SSIM_REAL = Metric(
    "nearest_pair_ssim_real",
    "what to hold nearest_pair_ssim against: real images of the class, each with the nearest other real one",
)
SSIM_OTHERS = Metric(
    "nearest_pair_ssim_others",
    "what to hold nearest_pair_ssim against: real images of other classes, each with the nearest real one of the class",
)
SSIM_MEAN = Metric("class_ssim", "SSIM of generated to real images of the class, mean over all pairs")
LPIPS_NEAREST = Metric("nearest_pair_lpips", "as nearest_pair_psnr, LPIPS of the same pairs", higher_is_better=False)

_HALF = 0.5  # of the generated images, at least, must be taken for the class
_REAL = 100  # real images of the class, at most
_REFERENCES = 50  # real images that are compared with them in place of generated ones, at most
_TRAINED_ON = 5000  # held-out examples that the independent classifier learns from, at most
_CAPTION = (
    "What the malicious client generated of the class, by round, and what an independent classifier, which was "
    "trained on held-out examples and never saw the federation, makes of it. Closest: of all classes' mean images this "
    "one's correlates most with it."
)


@evaluate.register
def evaluate_class_images(
    finding: ClassImagesFinding, observation: Observation, truth: Truth, *, seed: int
) -> Evaluation:
    """Compare generated images with real held-out ones of the class; those of the second half of the attack count.

    Held out is what no update of a recorded round was made from; where the clients' data are of another split, all of
    the test split.

    Pairs are formed twice: every generated image with the real one of the class that it is nearest to (mean squared
    error), and every generated with every real image. The baseline is what real images of the other classes reach; real
    ones of the class, each with the nearest other one, are the second reference. The classifier is a support vector
    machine on pixels, trained on four fifths of the held-out examples, or 5,000, to tell the class from all others. It
    takes a figure for none where strokes are thick or the background is grey, which an eye reads all the same: so the
    class is also sought whose mean image, of the same examples, a generated one correlates with most.

    Raises:
        BadInput: there are too few held-out images of the class, or of others.
    """
    if not bool(finding.images.isfinite().all()):
        return refused(finding, observation)
    kind = observation.task_info.example_kind
    rows = truth.held_out()
    inputs, labels = truth.candidates[rows], truth.candidate_labels[rows]
    target, count = finding.target, finding.images.shape[1]
    own = inputs[labels == target][:_REAL]
    learn, rest = _divided(labels == target, seed)
    known = labels[learn] == target
    if not bool(known.any()) or bool(known.all()) or not bool((labels[rest] != target).any()):
        raise BadInput(
            f"class {target} has too few held-out images to compare generated ones with; load more (data.limit)"
        )
    foreign = inputs[rest[labels[rest] != target]]
    others = foreign[:count]
    recognised = _classifier(kind.vectors(inputs[learn]), labels[learn], target)
    recognised_shares = [recognised(kind.vectors(images)) for images in finding.images]
    correlations = _correlations(kind.vectors(inputs[learn]), labels[learn], target)
    means = [correlations(kind.vectors(images)) for images in finding.images]
    of_others = correlations(kind.vectors(others))
    likenesses = [likeness(images, own) for images in finding.images]
    middle = (finding.rounds[0] + finding.rounds[-1]) / 2
    late = [i for i, number in enumerate(finding.rounds) if number >= middle]
    now = {key: sum(likenesses[i][key] for i in late) / len(late) for key in likenesses[0]}
    without = likeness(foreign[:_REFERENCES], own)
    real = nearest_ssim(own[:_REFERENCES], own, apart=True)
    share = sum(recognised_shares[i] for i in late) / len(late)
    by_others = recognised(kind.vectors(others))
    judged = len(late) * count
    taken, passed = round(share * judged), round(by_others * len(others))
    low, high = proportion(taken, judged)
    p_value = float(stats.fisher_exact([[taken, judged - taken], [passed, len(others) - passed]], "greater").pvalue)
    metrics: list[MetricResult] = [
        RECOGNISED.of(share, by_others, low=low, high=high, n=judged, of="generated images"),
        CLOSEST.of(sum(means[i].closest for i in late) / len(late), of_others.closest),
        CORRELATION.of(sum(means[i].own for i in late) / len(late), of_others.own),
        CORRELATION_REAL.of(correlations(kind.vectors(own[:_REFERENCES])).own),
    ]
    for metric, key in (
        (PSNR_NEAREST, "psnr nearest"),
        (PSNR_MEAN, "psnr"),
        (SSIM_NEAREST, "ssim nearest"),
        (SSIM_MEAN, "ssim"),
        (LPIPS_NEAREST, "lpips nearest"),
    ):
        if key in now:
            metrics.append(metric.of(now[key], without.get(key)))
    metrics.append(SSIM_OTHERS.of(without["ssim nearest"]))
    if real is not None:
        metrics.append(SSIM_REAL.of(real))
    rounds = [float(r) for r in finding.rounds]
    chart = Chart(
        title=f"class {finding.target}",
        caption=_CAPTION,
        x_label="round",
        y_label="share taken for it",
        lines=[
            Line(name="generated", x=rounds, y=recognised_shares),
            Line(name="generated, closest to it", x=rounds, y=[m.closest for m in means]),
            Line(name="real, other classes", x=[0.0], y=[by_others]),
        ],
    )
    drawn = [("real", own[: finding.images.shape[1]])]
    drawn += [
        (f"round {r}: {passed:.0%} recognised, {mean.closest:.0%} closest, {like['psnr nearest']:.1f} dB", images)
        for r, passed, mean, like, images in zip(
            finding.rounds, recognised_shares, means, likenesses, finding.images, strict=True
        )
    ]
    names = [f"images/{observation.federation}-{finding.attack}-{i:03d}.png" for i in range(len(drawn))]
    result = done(
        finding,
        observation,
        metrics=metrics,
        charts=[chart],
        image_rows=[Sheet(title=title, path=name) for name, (title, _) in zip(names, drawn, strict=True)],
        is_leak=leaks(share >= _HALF and share > by_others, p_value),
        p_value=p_value,
    )
    return Evaluation(result, {name: kind.draw(images) for name, (_, images) in zip(names, drawn, strict=True)})


def _divided(own: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    """Return the rows to learn from and the rest, in random order; one of the class, ``own``, is among the former."""
    order = torch.randperm(len(own), generator=torch.Generator().manual_seed(seed))
    many = min(_TRAINED_ON, len(order) * 4 // 5)
    if own.any() and not own[order[:many]].any():
        first = int(own[order].nonzero()[0])
        order[[0, first]] = order[[first, 0]]
    return order[:many], order[many:]


def _classifier(vectors: Tensor, labels: Tensor, target: int) -> Callable[[Tensor], float]:
    """Return a function: the share of image vectors taken for class ``target``, which is told from all others together.

    A classifier that chooses among the classes names one whatever it sees, and so calls meaningless patterns a three.
    """
    from sklearn.svm import SVC  # which takes as long to import as the rest

    machine = SVC(C=10.0).fit(vectors.numpy(), (labels == target).numpy())
    return lambda vectors: float(machine.predict(vectors.numpy()).mean())


class _ToMeans(NamedTuple):
    """The share of some images that are closest to the class, and their mean correlation with its mean image."""

    closest: float
    own: float


def _correlations(vectors: Tensor, labels: Tensor, target: int) -> Callable[[Tensor], _ToMeans]:
    """Return a function of images' vectors: how they correlate with the classes' mean images."""
    classes = labels.unique()
    means = _centred(torch.stack([vectors[labels == c].mean(dim=0) for c in classes]))
    at = int((classes == target).nonzero())

    def correlate(vectors: Tensor) -> _ToMeans:
        found = _centred(vectors) @ means.T
        closest = (found.argmax(dim=1) == at) & (found[:, at] > 0)  # a constant image is close to none
        return _ToMeans(float(closest.float().mean()), float(found[:, at].mean()))

    return correlate


def _centred(vectors: Tensor) -> Tensor:
    """Return vectors (n, d) of mean 0 and length 1, whose products are correlations; a constant one stays 0."""
    return torch.nn.functional.normalize(vectors - vectors.mean(dim=1, keepdim=True), dim=1)


def likeness(generated: Tensor, real: Tensor) -> dict[str, float]:
    """Return how like (r, C, H, W) real images (k, C, H, W) generated ones are, over best and over all pairs."""
    pairs = [(generated[i].expand_as(real), real) for i in range(len(generated))]
    errors = torch.stack([mse(a, b) for a, b in pairs])
    structure = torch.stack([ssim(a, b) for a, b in pairs])
    nearest = errors.argmin(dim=1)
    rows = torch.arange(len(generated))
    found = {
        "psnr nearest": float(psnr_from_mse(errors[rows, nearest]).mean()),
        "psnr": float(psnr_from_mse(errors).mean()),
        "ssim nearest": float(structure[rows, nearest].mean()),
        "ssim": float(structure.mean()),
    }
    perceived = lpips(generated, real[nearest])
    return found if perceived is None else {**found, "lpips nearest": float(perceived.mean())}


def nearest_ssim(images: Tensor, real: Tensor, *, apart: bool) -> float | None:
    """Return the mean SSIM of (r, C, H, W) images to the nearest of (k, C, H, W) real ones; None where none is left.

    ``apart``: ``images`` are the first of ``real``, and none is compared with itself.
    """
    if len(real) <= apart:
        return None
    errors = torch.stack([mse(image.expand_as(real), real) for image in images])
    if apart:
        errors.fill_diagonal_(torch.inf)
    return float(ssim(images, real[errors.argmin(dim=1)]).mean())


_BY_TEST = by_test(
    RECOGNISED.name,
    "generated images",
    "exact binomial interval (Clopper-Pearson), over the images of one generator; Fisher's exact test",
    "{who} can draw what a class looks like that it has no example of: an independent classifier takes {share} % of "
    "its {n} {things} for the class, and {guess} % of real ones of other classes.",
    least=_HALF,
)


def _verdict(findings: Sequence[FindingResult]) -> Judgement:
    found = _BY_TEST(findings)
    if found.verdict == "inferred":
        return found._replace(verdict="recovered")
    closest = [m.value for f in findings for m in f.metrics if m.name == CLOSEST.name]
    share = sum(closest) / len(closest) if closest else 0.0
    if found.verdict == "not demonstrated" and share >= _HALF:
        return found._replace(
            verdict="inconclusive",
            text=f"{found.text}; but {share:.0%} of them are closer to the class than to any other",
            advice="look at the images: the classifier takes few of them for the class, but most are closer to it than "
            "to any other, as thick or grey figures are",
        )
    return found


FINDING_TYPES["class-images"] = FindingType(
    verdict=_verdict,
    rules=(
        "A class is 'recovered' when an independent classifier takes at least half of the images of the attack's "
        "second half for it, and more of them than of other classes' real images (Fisher's exact test, "
        f"{100 * SURE:g} %). The images of a run come from one generator: n counts images, not attacks.",
        "It is inconclusive where the classifier takes fewer for it, but at least half of the images are closer to the "
        "class than to any other: where, of all classes' mean images, its own correlates most with them. The "
        "classifier misses thick and grey figures that an eye reads.",
        "It is inconclusive, whatever was generated, where the federation was hardly trained: where its global model "
        "classifies fewer of the held-out examples correctly at the end than evaluation.min_accuracy says.",
    ),
    metrics=(
        *(RECOGNISED, CLOSEST, CORRELATION, CORRELATION_REAL),
        *(PSNR_NEAREST, PSNR_MEAN, SSIM_NEAREST, SSIM_MEAN, LPIPS_NEAREST, SSIM_REAL, SSIM_OTHERS),
    ),
    question="draw what a class looks like",
    trained=True,
    worst="recovered",
)
