"""Recovered images against the ones that were trained on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment
from scipy.stats import binomtest
from torch import Tensor

from fedaudit.attacks import ImageFinding
from fedaudit.evaluation.finding_types import FINDING_TYPES, Evaluation, FindingType, Over, Scores, done, evaluate
from fedaudit.evaluation.image_metrics import lpips, mse, psnr, ssim
from fedaudit.evaluation.labels import label_accuracy
from fedaudit.evaluation.registration import STAY, overlapping, registered
from fedaudit.evaluation.statistics import DOUBT, SURE
from fedaudit.evaluation.verdicts import Judgement, share_of
from fedaudit.results import Curve, FindingResult, ImageResult, RegisteredResult
from fedaudit.transcript.observation import Message, Observation
from fedaudit.transcript.truth import Truth
from fedaudit.transcript.update import Update
from fedaudit.utils.fingerprint import tensor_digest
from fedaudit.utils.seeds import derive_seed

VISIBLE_SSIM = 0.5
NEARER_DB = 6.0  # by which an image is nearer than to any other candidate: a quarter of the error is no luck
CERTIFIED_MSE = (0.5 / 255) ** 2  # half a grey level: what a certified image may be off by
# Scores of single images that a user may set a limit for; for each, higher means more leakage.
SCORES = ("psnr", "ssim", "psnr_registered", "ssim_registered")
ALONE_DB = 10.0  # the same above an even image, where there is no other candidate


@evaluate.register
def evaluate_images(finding: ImageFinding, observation: Observation, truth: Truth, *, seed: int) -> Evaluation:
    """Compare recovered images with what the clients really trained on.

    In every round that images were recovered of, recovered and true ones are paired by the assignment of least total
    squared error. An example that was used several times (local epochs, rounds) is evaluated once, by the first of its
    recoveries.
    """
    vertical = observation.vertical is not None
    if vertical:
        finding, observation = _by_example(finding, observation)
    federation, kind = observation.federation, observation.task_info.example_kind
    covered = [(m, _rows(finding, m, len(observation.messages))) for m in observation.messages]
    covered = [(m, rows) for m, rows in covered if len(rows)]
    true = torch.cat([truth.inputs[m.round, m.client] for m, _ in covered])
    true_labels = torch.cat([truth.labels[m.round, m.client] for m, _ in covered])
    places = [(m, i) for m, _ in covered for i in range(len(truth.inputs[m.round, m.client]))]

    def paired(images: Tensor) -> Tensor:
        parts = [(kind.vectors(truth.inputs[m.round, m.client]), rows) for m, rows in covered]
        return torch.cat([rows[assign(own, kind.vectors(images[rows]))] for own, rows in parts])

    order = paired(finding.images)
    images, labels = finding.images[order], finding.labels[order]
    errors = mse(images, true)
    values = psnr(errors)
    seen = observation.task_info.normalise
    normalised = mse(seen(images), seen(true))
    structure = ssim(images, true)
    perceptual = lpips(images, true)
    different = _different(truth.candidates)
    mean_image = truth.candidates.mean(dim=0, keepdim=True).expand_as(true)
    if different == 1:  # that would be the victim itself
        mean_image = true.mean(dim=(-2, -1), keepdim=True).expand_as(true)
    rngs, lucky = {}, {}
    for m, rows in covered:
        rngs[id(m)] = np.random.default_rng(derive_seed(seed, "same-class", federation, m.round, m.client))
        lucky[id(m)] = by_luck(len(rows), different, truth.labels[m.round, m.client], truth)
    results: list[ImageResult] = []
    image_files: dict[str, Tensor] = {}
    first, uses = _distinct(true)
    moved = _paired_after_moves(finding.images, covered, truth) if true.ndim == 4 else None
    candidates, recovered, wanted = (kind.vectors(part) for part in (truth.candidates, images, true))
    for i in first:
        message, position = places[i]
        other = _same_class(true[i], int(true_labels[i]), truth, rngs[id(message)])
        place, nearest = standing(recovered[i], wanted[i], candidates)
        apart = None if nearest is None else float(psnr(mse(truth.candidates[nearest, None], images[i, None])))
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
                mse_normalised=float(normalised[i]),
                psnr_normalised=float(psnr(normalised[i])),
                lpips=None if perceptual is None else float(perceptual[i]),
                rank=place,
                candidates=len(truth.candidates),
                different_candidates=different,
                by_luck=lucky[id(message)][int(true_labels[i])],
                psnr_nearest_other=apart,
                uses=uses[i],
                rounds=list(finding.rounds[int(order[i])]) if finding.rounds else [],
                certified=None if finding.certified is None else bool(finding.certified[order[i]]),
                psnr_mean_image=float(psnr(mse(mean_image[i : i + 1], true[i : i + 1]))),
                psnr_same_class=None if other is None else float(psnr(mse(other[None], true[i : i + 1]))),
                registered=None if moved is None else _after_move(moved[i], true[i], mean_image[i], truth),
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
        certified=None if finding.certified is None else int(finding.certified.sum()),
        certified_wrong=None if finding.certified is None else _wrongly(finding, covered, truth),
        label_source=finding.label_source,
        label_accuracy=label_accuracy(labels, true_labels),
        matching=matching(finding, covered, truth, kind.vectors),
        curve=curve,
    )
    if vertical:  # what stood for examples were no rounds
        images_alone = [image.model_copy(update={"rounds": []}) for image in results]
        result = result.model_copy(update={"round": None, "client": None, "rounds": [], "images": images_alone})
    return Evaluation(result, image_files)


def _by_example(finding: ImageFinding, observation: Observation) -> tuple[ImageFinding, Observation]:
    """Return both with a message an example of a vertical federation: which is which everybody there knows."""
    assert observation.vertical is not None
    numbers = observation.vertical.used.tolist()
    messages = tuple(Message(i, 0, {}, Update(0, "gradient", {}, 1, None)) for i in numbers)
    return replace(finding, rounds=tuple((i,) for i in numbers)), replace(observation, messages=messages)


def _wrongly(finding: ImageFinding, covered: Sequence[tuple[Message, Tensor]], truth: Truth) -> int:
    """Return how many certified images are none of their client's, up to half a grey level (root mean square)."""
    wrong = 0
    for message, rows in covered:
        assert finding.certified is not None
        own = finding.images[rows[finding.certified[rows]]].flatten(1).double()
        true = truth.inputs[message.round, message.client].flatten(1).double()
        if len(own):
            nearest = torch.cdist(own, true).square().min(dim=1).values / own.shape[1]
            wrong += int((nearest > CERTIFIED_MSE).sum())
    return wrong


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


def _paired_after_moves(images: Tensor, covered: Sequence[tuple[Message, Tensor]], truth: Truth) -> Tensor:
    """Return, for every true image of every round, the one of (n, C, H, W) ``images`` that is paired with it.

    Each is compared after its own best move.
    """
    pairs = []
    for message, rows in covered:
        true = truth.inputs[message.round, message.client]
        errors = torch.stack([registered(image, true)[0] for image in images[rows]]) if len(rows) > 1 else None
        columns = [0] if errors is None else linear_sum_assignment(errors.T.numpy())[1]
        pairs.append(rows[torch.as_tensor(columns, dtype=torch.int64)])
    return images[torch.cat(pairs)]


def _after_move(image: Tensor, true: Tensor, mean_image: Tensor, truth: Truth) -> RegisteredResult:
    """Return the scores of a recovered image after its best shift and flip.

    Where that helps, every other candidate is compared after its own best one, so that the choice is no advantage.
    """
    error, (move,) = registered(image, true[None])
    on_image, on_true = overlapping(image, true, move)
    place = nearest = None
    if move != STAY:
        errors, _ = registered(image, truth.candidates)
        same = (truth.candidates == true).flatten(1).all(dim=1)
        place = 1 + int(((errors <= error) & ~same).sum())
        nearest = None if bool(same.all()) else float(psnr(errors[~same].min()))
    return RegisteredResult(
        psnr=float(psnr(error)),
        ssim=float(ssim(on_image[None].contiguous(), on_true[None].contiguous())),
        flipped=move.flipped,
        down=move.down,
        right=move.right,
        rank=place,
        psnr_nearest_other=nearest,
        psnr_mean_image=float(psnr(registered(mean_image, true[None])[0])),
    )


def matching(
    finding: ImageFinding,
    covered: Sequence[tuple[Message, Tensor]],
    truth: Truth,
    vectors: Callable[[Tensor], Tensor],
) -> float | None:
    """Return the share of images that were rightly tied to several rounds; None where each is of one round only.

    Which example of a round an image stands for is told by what that round alone gave (:attr:`ImageFinding.separate`),
    where the attack kept it: what is made of a wrong tie is like neither. Equal labels before all others.

    Args:
        finding: the images.
        covered: the message of every round that images were recovered of, and which images are its examples.
        truth: what they are paired with.
        vectors: what images are compared by.
    """
    if all(len(rounds) < 2 for rounds in finding.rounds):
        return None
    partners: dict[int, list[Tensor]] = {}
    for message, rows in covered:
        images, labels = finding.images[rows], finding.labels[rows]
        if finding.separate:
            epoch = finding.rounds[int(rows[0])].index(message.round)
            images, labels = (of[rows] for of in finding.separate[epoch])
        true, true_labels = (of[message.round, message.client] for of in (truth.inputs, truth.labels))
        columns = assign(vectors(true), vectors(images), true_labels[:, None] == labels)
        for example, row in zip(true, rows[columns].tolist(), strict=True):
            partners.setdefault(row, []).append(example)
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


def assign(true: Tensor, images: Tensor, alike: Tensor | None = None) -> Tensor:
    """Return, for each of n ``true`` images, the index of the one of n ``images`` that is paired with it.

    The one-to-one pairing of least total squared error (Hungarian method).

    Args:
        true: (n, C, H, W), or (n, d) vectors.
        images: as ``true``.
        alike: (n, n) bool, which pairs come before all others; None: no matter.
    """
    cost = torch.cdist(true.flatten(1).double(), images.flatten(1).double()).square()
    if alike is not None:
        cost += ~alike * (1 + cost.sum())
    _, columns = linear_sum_assignment(cost.numpy())
    return torch.as_tensor(columns, dtype=torch.int64)


def standing(image: Tensor, true: Tensor, candidates: Tensor) -> tuple[int, int | None]:
    """Return a rank, and the position of the candidate other than ``true`` that is nearest to ``image``, if any.

    The rank is how many candidates are at least as near to ``image`` as ``true``, which counts as one itself.
    """
    distances = _squared_distances(image, candidates)
    own = _squared_distances(image, true[None])
    same = _squared_distances(true, candidates) == 0
    nearest = None if bool(same.all()) else int(distances.masked_fill(same, torch.inf).argmin())
    return 1 + int(((distances <= own) & ~same).sum()), nearest


def by_luck(paired: int, different: int, labels: Tensor, truth: Truth) -> dict[int, float]:
    """Return, for each class, the probability that naming candidates at random identifies an image of an update.

    As many candidates are named as images are paired with the true ones, and of the right classes: what labels alone
    give away isn't identification.

    Args:
        paired: images that are paired with the update's true ones.
        different: candidates that differ from each other.
        labels: (n,) of these.
        truth: its candidates; equal ones count once.
    """
    chances = {}
    for label in labels.unique().tolist():
        own = max(1, _different(truth.candidates[truth.candidate_labels == label]))
        share = int((labels == label).sum()) / own
        chances[int(label)] = min(1.0, max(share, paired / different))
    return chances


def _squared_distances(image: Tensor, others: Tensor) -> Tensor:
    parts = [(part - image).flatten(1).square().sum(dim=1, dtype=torch.float64) for part in others.split(256)]
    return torch.cat(parts)


def _same_class(true: Tensor, label: int, truth: Truth, rng: np.random.Generator) -> Tensor | None:
    """Return a random other candidate of the class, or None if there is none."""
    rows = torch.nonzero(truth.candidate_labels == label).flatten().tolist()
    rows = [row for row in rows if not truth.candidates[row].equal(true)]
    return truth.candidates[int(rng.choice(rows))] if rows else None


def visible(image: ImageResult | RegisteredResult) -> bool:
    """Return whether an image came out visibly, as it is or after its best move: see the rules of its finding type."""
    return image.rank == 1 and image.ssim >= VISIBLE_SSIM and image.psnr > image.psnr_mean_image


def unmistakable(image: ImageResult | RegisteredResult) -> bool:
    """Return whether an image came out visibly and so near that no luck explains it."""
    other = image.psnr_nearest_other
    needed = image.psnr_mean_image + ALONE_DB if other is None else other + NEARER_DB
    return visible(image) and image.psnr >= needed


def verdict_of(images: Sequence[ImageResult]) -> Judgement:
    """Return the judgement on an attack's images, by the rules of its finding type."""
    plain = _judged(images, after_moves=False)
    if plain.verdict == "recovered" or not any(i.registered and i.registered.rank for i in images):
        return plain
    moved = _judged(images, after_moves=True)
    order = ("recovered", "identifiable", "inconclusive", "not demonstrated")
    return moved if order.index(moved.verdict) < order.index(plain.verdict) else plain


def _judged(images: Sequence[ImageResult], *, after_moves: bool) -> Judgement:
    """Return the judgement on the images as they are, or where a shift or flip helps one, on what it then is.

    An image has two ways to be identified then, so chance has, too; and it is the second test on the same images, so
    its probability is doubled.
    """
    n = len(images)
    best = [_ways(image) if after_moves else [image] for image in images]
    seen, identified = (sum(any(test(w) for w in ways) for ways in best) for test in (visible, lambda w: w.rank == 1))
    chances = [min(1.0, (1 + after_moves) * _chance(image)) for image in images]
    p = min(1.0, (1 + after_moves) * _at_least(identified, chances))
    recovered = seen > 0 and (p <= SURE or any(unmistakable(w) for ways in best for w in ways))
    moves = " after the best shift and flip" if after_moves else ""
    counted, what = (seen, "came out visibly") if recovered else (identified, "identified among the candidates")
    against = "one-sided exact binomial test against naming candidates of the class at random"
    luck: dict[str, Any] = {} if recovered else {"by_guessing": sum(chances) / n, "p_value": p, "test": against}
    evidence = share_of(f"images {what}{moves}", counted, n, "images", **luck)
    candidates = fewest_candidates(images)
    which = f"{identified} of {n} identified among {candidates} candidates (by luck with p = {p:.2g})"
    text = f"{seen} of {n} {'image' if n == 1 else 'images'} came out visibly{moves}; {which}"
    if recovered:
        moved = ", shifted or mirrored ones included" if after_moves else ""
        headline = f"{{who}} can reconstruct training {{things}}: {seen} of {n} came out visibly{moved}."
        return Judgement("recovered", text, evidence, headline)
    if identified and p <= SURE:
        headline = (
            f"{{who}} can tell which {{things}} a client trained on, out of {candidates} candidates, though none came "
            f"out visibly: {identified} of {n} were singled out{moves}."
        )
        return Judgement("identifiable", text, evidence, headline)
    if seen or (identified and (p <= DOUBT or identified == n)):
        more = "attack more images" if candidates > 2 * n else "attack more images, or give more candidates"
        advice = f"{more}: {n} among {candidates} candidates are too few to exclude luck"
        return Judgement("inconclusive", text, evidence, advice=advice)
    return Judgement("not demonstrated", text, evidence)


def _ways(image: ImageResult) -> list[ImageResult | RegisteredResult]:
    """Return the image as it is and, where a move helps, as it then is."""
    return [image, image.registered] if image.registered and image.registered.rank else [image]


def fewest_candidates(images: Sequence[ImageResult]) -> int:
    """Return among how many different candidates an image was sought, at least; equal ones count once."""
    return max(1, min(i.candidates if i.different_candidates is None else i.different_candidates for i in images))


def _at_least(identified: int, chances: Sequence[float]) -> float:
    """Return the probability that at least as many images are identified by naming candidates at random (binomial).

    Candidates that are equal are one: an image among 20 equal ones is identified by anything. Where chances differ,
    their mean stands for all, which makes the tail no smaller (Hoeffding 1956).
    """
    return float(binomtest(identified, len(chances), sum(chances) / len(chances), alternative="greater").pvalue)


def _chance(image: ImageResult) -> float:
    return 1 / fewest_candidates([image]) if image.by_luck is None else image.by_luck


def _with_certified(findings: Sequence[FindingResult]) -> Judgement:
    """Return the judgement on all images, with what the attack vouched for and whether the truth agrees."""
    judged = verdict_of([image for finding in findings for image in finding.images])
    vouched = [finding for finding in findings if finding.certified is not None]
    if not vouched:
        return judged
    count = sum(finding.certified or 0 for finding in vouched)
    wrong = sum(finding.certified_wrong or 0 for finding in vouched)
    told = f"{count} of {sum(len(f.images) for f in vouched)} certified as exact without the truth"
    if wrong:
        text = f"{judged.text}; {told}, of which {wrong} ARE WRONG: the certificate failed, please report this"
        return judged._replace(text=text, headline=f"{judged.headline} {wrong} certified images are WRONG.".strip())
    text = f"{judged.text}; {told}" + (", and the truth agrees" if count else "")
    known = f" It can prove {count} of them exact." if count else ""
    return judged._replace(text=text, headline=judged.headline + known if judged.headline else "")


def _columns(done: Sequence[FindingResult], over: Over) -> dict[str, Any]:
    images = [image for finding in done for image in finding.images]
    if not images:
        return {}
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
        "identification_rate": _identified(done)[0],
        "label_accuracy": sum(labels) / len(labels) if labels else None,
        "psnr_mean_image": float(np.mean([i.psnr_mean_image for i in images])),
        "psnr_same_class": float(np.mean(same_class)) if same_class else None,
    }


def _identified(findings: Sequence[FindingResult]) -> list[float]:
    images = [image for finding in findings for image in finding.images]
    return [sum(i.rank == 1 for i in images) / len(images)] if images else []


def _labels_right(findings: Sequence[FindingResult]) -> list[float]:
    """Return the share of labels that came out; labels that the adversary was given weren't recovered by anything."""
    told = [f for f in findings if f.images and f.label_source != "given"]
    right = [f.label_accuracy for f in told if f.label_accuracy is not None]
    return [sum(right) / len(right)] if right else []


def _of_each(name: str, findings: Sequence[FindingResult]) -> list[float]:
    return [score for f in findings for i in f.images if (score := i.score(name)) is not None]


def _scores(finding: FindingResult) -> Scores | None:
    values = {(finding.round, finding.client, i): image.psnr for i, image in enumerate(finding.images)}
    return Scores("psnr", "dB", True, values) if values else None


FINDING_TYPES["images"] = FindingType(
    verdict=_with_certified,
    rules=(
        "An image came out visibly when its reconstruction is nearer (mean squared error) to it than to any other "
        f"candidate and nearer than the mean image of all candidates, and its SSIM is at least {VISIBLE_SSIM}. The "
        "candidates are the victims and every held-out example of the data set.",
        "A network hardly tells where in an image a thing stands, so a picture may come out in another place or "
        "mirrored, and is a leak all the same: images are judged once more after the shift (by up to a quarter of the "
        "side) and flip that bring them nearest, every other candidate and the mean image after their own best ones. "
        "What an even image would gain by the shift is taken off. The second judgement counts where it is the worse "
        "one; the chance of each image and the probability are doubled in it, because it is a second try.",
        "Images are 'recovered' when at least one came out visibly and luck doesn't explain it: so many are nearest to "
        "their own reconstruction that naming candidates at random would do as well with a probability of at most "
        f"{100 * SURE:g} % (one-sided exact binomial test), or one is nearer than any other candidate by {NEARER_DB:g} "
        "dB. The share has an exact 95 % interval. Where the only candidate is the victim, its reconstruction must be "
        f"nearer than an even image of the victim's mean colour, by {ALONE_DB:g} dB.",
        "An attack may certify images: it vouches, without the truth, that they are the client's own up to half a grey "
        "level. With the truth this is checked, and a certified image that is wrong is said in the verdict.",
        "Images are 'identifiable' when none came out visibly, and the same test excludes luck. As many candidates are "
        "named at random as images are paired with an update's true ones, each of the right class; candidates that are "
        "equal count once.",
    ),
    question="reconstruct training {things}",
    control="example",
    worst="recovered",
    scores=_scores,
    columns=_columns,
    limits={name: partial(_of_each, name) for name in SCORES}
    | {"identification_rate": _identified, "label_accuracy": _labels_right},
)
