"""Recovered images against the ones that were trained on."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment
from scipy.stats import binomtest
from torch import Tensor

from fedaudit.attacks import ImageFinding
from fedaudit.evaluation.finding_types import FINDING_TYPES, Evaluation, FindingType, Judgement, done, evaluate
from fedaudit.evaluation.image_metrics import lpips, mse, psnr, ssim
from fedaudit.evaluation.labels import label_accuracy
from fedaudit.evaluation.statistics import DOUBT, SURE, proportion
from fedaudit.federation.truth import Truth
from fedaudit.results import Curve, Evidence, ImageResult
from fedaudit.threat import Message, Observation
from fedaudit.utils.fingerprint import tensor_digest
from fedaudit.utils.seeds import derive_seed

VISIBLE_SSIM = 0.5


@evaluate.register
def evaluate_images(finding: ImageFinding, observation: Observation, truth: Truth, *, seed: int) -> Evaluation:
    """Compare recovered images with what the clients really trained on.

    In every round that images were recovered of, recovered and true ones are paired by the assignment of least total
    squared error. An example that was used several times (local epochs, rounds) is evaluated once, by the first of its
    recoveries.
    """
    federation, kind = observation.federation, observation.task_info.example_kind
    covered = [(m, _rows(finding, m, len(observation.messages))) for m in observation.messages]
    messages = [m for m, rows in covered if len(rows)]
    parts = [rows for _, rows in covered if len(rows)]
    true = torch.cat([truth.inputs[m.round, m.client] for m in messages])
    true_labels = torch.cat([truth.labels[m.round, m.client] for m in messages])
    places = [(m, i) for m in messages for i in range(len(truth.inputs[m.round, m.client]))]

    def paired(images: Tensor) -> Tensor:
        return torch.cat(
            [
                rows[assign(kind.vectors(truth.inputs[m.round, m.client]), kind.vectors(images[rows]))]
                for m, rows in zip(messages, parts, strict=True)
            ]
        )

    order = paired(finding.images)
    images, labels = finding.images[order], finding.labels[order]
    errors = mse(images, true)
    values = psnr(errors)
    structure = ssim(images, true)
    perceptual = lpips(images, true)
    mean_image = truth.candidates.mean(dim=0, keepdim=True)
    rngs = {
        id(m): np.random.default_rng(derive_seed(seed, "same-class", federation, m.round, m.client)) for m in messages
    }
    results: list[ImageResult] = []
    image_files: dict[str, Tensor] = {}
    first, uses = _distinct(true)
    different = _different(truth.candidates)
    candidates, recovered, wanted = (kind.vectors(part) for part in (truth.candidates, images, true))
    for i in first:
        message, position = places[i]
        other = _same_class(true[i], int(true_labels[i]), truth, rngs[id(message)])
        stem = f"images/{federation}-{message.round}-{message.client}-{position}"
        results.append(
            ImageResult(
                true_image=f"{stem}-true.png",
                reconstruction=f"{stem}-{finding.attack}.png",
                true_label=int(true_labels[i]),
                label=int(labels[i]),
                mse=float(errors[i]),
                psnr=float(values[i]),
                ssim=float(structure[i]),
                lpips=None if perceptual is None else float(perceptual[i]),
                rank=rank(recovered[i], wanted[i], candidates),
                candidates=len(truth.candidates),
                different_candidates=different,
                uses=uses[i],
                rounds=list(finding.rounds[int(order[i])]) if finding.rounds else [],
                psnr_mean_image=float(psnr(mse(mean_image, true[i : i + 1]))),
                psnr_same_class=None if other is None else float(psnr(mse(other[None], true[i : i + 1]))),
            )
        )
        image_files[results[-1].true_image] = kind.draw(true[i, None])
        image_files[results[-1].reconstruction] = kind.draw(images[i, None])
    trace = finding.trace
    curve = trace and Curve(
        iterations=trace.iterations,
        objective=trace.objective,
        psnr=[float(psnr(mse(s[paired(s)], true)).mean()) for s in trace.snapshots],
    )
    result = done(
        finding,
        observation,
        images=results,
        label_source=finding.label_source,
        label_accuracy=label_accuracy(labels, true_labels),
        matching=matching(order, true),
        curve=curve,
    )
    return Evaluation(result, image_files)


def _rows(finding: ImageFinding, message: Message, received: int) -> Tensor:
    """Return which of the finding's images belong to ``message``, one of ``received``.

    Raises:
        ValueError: some, but not as many as the update has examples.
    """
    if received == 1:
        return torch.arange(len(finding.images))
    rows = [i for i, rounds in enumerate(finding.rounds) if message.round in rounds]
    if rows and len(rows) != message.update.num_examples:
        raise ValueError(f"{len(rows)} images for the {message.update.num_examples} examples of round {message.round}")
    return torch.tensor(rows, dtype=torch.int64)


def matching(order: Tensor, true: Tensor) -> float | None:
    """Return the share of images that were rightly tied to several rounds; None where each is of one round only.

    Args:
        order: (m,) for every true example of every round, the image that is paired with it.
        true: (m, C, H, W) those examples.
    """
    partners: dict[int, list[Tensor]] = {}
    for image, example in zip(order.tolist(), true, strict=True):
        partners.setdefault(image, []).append(example)
    tied = [examples for examples in partners.values() if len(examples) > 1]
    right = sum(all(e.equal(examples[0]) for e in examples) for examples in tied)
    return right / len(tied) if tied else None


def _distinct(true: Tensor) -> tuple[list[int], dict[int, int]]:
    """Return the first position of every distinct image, and how often it occurs."""
    uses: dict[int, int] = {}
    seen: dict[bytes, int] = {}
    for i, image in enumerate(true):
        first = seen.setdefault(tensor_digest(image), i)
        uses[first] = uses.get(first, 0) + 1
    return list(uses), uses


def _different(images: Tensor) -> int:
    """Return how many of the images differ from each other."""
    return len({tensor_digest(image) for image in images})


def assign(true: Tensor, images: Tensor) -> Tensor:
    """Return, for each of n ``true`` images, the index of the one of n ``images`` that is paired with it.

    The one-to-one pairing of least total squared error (Hungarian method); both are (n, C, H, W), or their vectors.
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


def visible(image: ImageResult) -> bool:
    """Return whether an image came out visibly: see the rules of its finding type."""
    return image.rank == 1 and image.ssim >= VISIBLE_SSIM and image.psnr > image.psnr_mean_image


def verdict_of(images: Sequence[ImageResult]) -> Judgement:
    """Return the judgement on an attack's images, by the rules of its finding type."""
    n = len(images)
    seen, identified = sum(map(visible, images)), sum(i.rank == 1 for i in images)
    candidates = fewest_candidates(images)
    p = guessing(images)
    counted, what = (seen, "came out visibly") if seen else (identified, "identified among the candidates")
    low, high = proportion(counted, n)
    evidence = Evidence(
        what=f"images {what}",
        value=counted / n,
        low=low,
        high=high,
        n=n,
        of="images",
        by_guessing=None if seen else 1 / candidates,
        p_value=None if seen else p,
        method="exact binomial interval (Clopper-Pearson)"
        + ("" if seen else "; one-sided exact binomial test against naming candidates at random"),
    )
    which = f"{identified} of {n} identified among {candidates} candidates (by luck with p = {p:.2g})"
    text = f"{seen} of {n} {'image' if n == 1 else 'images'} came out visibly; {which}"
    if seen:
        headline = f"{{who}} can reconstruct training {{things}}: {seen} of {n} came out visibly."
        return Judgement("recovered", text, evidence, headline)
    if identified and p <= SURE:
        headline = (
            f"{{who}} can tell which {{things}} a client trained on, out of {candidates} candidates, though none came "
            f"out visibly: {identified} of {n} were singled out."
        )
        return Judgement("identifiable", text, evidence, headline)
    if identified and (p <= DOUBT or identified == n):
        advice = f"attack more images: {n} among {candidates} candidates are too few to exclude luck"
        return Judgement("inconclusive", text, evidence, advice=advice)
    return Judgement("not demonstrated", text, evidence)


def fewest_candidates(images: Sequence[ImageResult]) -> int:
    """Return among how many different candidates an image was sought, at least; equal ones count once."""
    return max(1, min(i.candidates if i.different_candidates is None else i.different_candidates for i in images))


def guessing(images: Sequence[ImageResult]) -> float:
    """Return the probability that at least as many images are identified by naming candidates at random (binomial).

    Candidates that are equal are one: an image among 20 equal ones is identified by anything.
    """
    identified = sum(i.rank == 1 for i in images)
    return float(binomtest(identified, len(images), 1 / fewest_candidates(images), alternative="greater").pvalue)


FINDING_TYPES["images"] = FindingType(
    verdict=lambda findings: verdict_of([image for finding in findings for image in finding.images]),
    rules=(
        "An image came out visibly when its reconstruction is nearer (mean squared error) to it than to any other "
        f"candidate and nearer than the mean image of all candidates, and its SSIM is at least {VISIBLE_SSIM}. The "
        "candidates are the victims and every held-out example of the data set.",
        "Images are 'recovered' when at least one came out visibly; the share has an exact 95 % interval.",
        "Images are 'identifiable' when none came out visibly, but so many are nearest to their own reconstruction "
        f"that naming candidates at random would do as well with a probability of at most {100 * SURE:g} % (one-sided "
        "exact binomial test; candidates that are equal count once).",
    ),
    question="reconstruct training {things}",
    control="example",
)
