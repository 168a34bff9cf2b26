"""Recovered images, volumes or signals against the ones that were trained on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment
from scipy.stats import binom, poisson_binom
from sklearn.metrics import adjusted_rand_score
from torch import Tensor

from fedaudit.attacks import ImageFinding
from fedaudit.evaluation.finding_types import (
    FINDING_TYPES,
    Evaluation,
    FindingType,
    Metric,
    Over,
    Scores,
    done,
    evaluate,
    refused,
)
from fedaudit.evaluation.image_metrics import PSNR_CAP, correlation, lpips, mse, psnr_from_mse, ssim
from fedaudit.evaluation.labels import label_accuracy
from fedaudit.evaluation.registration import STAY, channel_means, correlations, overlapping, registered, turned, ways
from fedaudit.evaluation.shift import REMEDY, SHIFTED, comparable, told_apart
from fedaudit.evaluation.statistics import DOUBT, SURE, combined
from fedaudit.evaluation.verdicts import Judgement, share_of
from fedaudit.modalities.packed import Packing, draw_parts
from fedaudit.results import Curve, FindingResult, ImageResult, MetricResult, RegisteredResult
from fedaudit.transcript.observation import Message, Observation
from fedaudit.transcript.truth import Truth
from fedaudit.transcript.update import Update
from fedaudit.utils.fingerprint import tensor_digest
from fedaudit.utils.seeds import derive_seed, generator

VISIBLE_SSIM = 0.5
VISIBLE_CORRELATION = 0.8  # of signals: two thirds of the variance are explained
NEARER_DB = 6.0  # by which one image alone is nearer than to any other candidate, at least, for it to be no luck
# Of other pictures that are nearest to a victim, one in e at most is nearer than to any other candidate by as many dB
# more. Of 400 portraits of 40 people (AT&T), whose margins were the widest that were measured, 10 % are ahead by 4.5 dB
# and 1 % by 8.8, where this says 5.8 and 11.5; of digits and clothes by half as much, of CIFAR-10 by a fifth.
NEARER_BY_LUCK_DB = 2.5
GROUPED_MSE = (1 / 255) ** 2  # one grey level: what an image may be off by whose client is asked for
_GROUPINGS = 999  # at random: the least p-value is 1 in 1,000
CERTIFIED_MSE = (0.5 / 255) ** 2  # half a grey level: what a certified image may be off by
_ROUNDING = 1e-5  # of a number's size: what float32 leaves of one, and by how much a channel that varies does
# Scores of single images that a user may set a limit for; for each, higher means more leakage.
SCORES = ("psnr", "ssim", "correlation", "psnr_registered", "ssim_registered", "correlation_registered")
_RANGES: dict[str, tuple[float, ...]] = {
    "psnr": (0.0, PSNR_CAP),
    "mse": (0.0,),
    "ssim": (-1.0, 1.0),
    "correlation": (-1.0, 1.0),
    "lpips": (0.0,),
    "psnr_registered": (0.0, PSNR_CAP),
    "ssim_registered": (-1.0, 1.0),
}
ALONE_DB = 10.0  # above an even image, where there is no other candidate, or above the mean one, where there are few
_FROM_SUMS = 1e-9  # probabilities below are added up, for one minus the others' sum has too few digits
AS_OFTEN = 0.1  # luck names a victim at least so often where its margin is no more than others': candidates may show it
_GROUPED_DB = 3.0  # gap between those that a candidate is like and all others, from which on they are taken for a group
_POOL = 1000  # candidates whose own margins are taken, at random
ENOUGH = 40  # different candidates, of which to be the nearest one by far is no luck; of fewer see ALONE_DB
# Shares of the level of 1 %, for images as they are and for what is tried after that.
ADJUSTED_RAND = Metric(
    "adjusted_rand",
    "agreement of groups of images with the clients that they are of, chance taken off (Hubert and Arabie 1985)",
    ends=(-1.0, 1.0),
)
SAME_CLIENT = Metric(
    "same_client_pairs",
    "share of the pairs of images in one group that are one client's; without the attack: in groups at random",
    ends=(0.0, 1.0),
)
_LEVELS = {"": 0.8, " after the best shift and flip": 0.1, " after the best turn, contrast and brightness": 0.1}
_INCLUDED = dict(
    zip(_LEVELS, ("", ", shifted or mirrored ones included", ", dark, turned or negative ones included"), strict=True)
)


@evaluate.register
def evaluate_images(finding: ImageFinding, observation: Observation, truth: Truth, *, seed: int) -> Evaluation:
    """Compare recovered images with what the clients really trained on.

    In every round that images were recovered of, recovered and true ones are paired by the assignment of least total
    squared error; where no rounds are said, over all that were received. An example that was used several times (local
    epochs, rounds) is evaluated once, by the first of its recoveries. Where the clients' examples can be told from all
    others by themselves (:func:`fedaudit.evaluation.shift.comparable`), those that the same clients used alone tell
    what luck does, and the mean of the others among these is the baseline: a picture of the same site would be nearer
    to any victim than all others. A victim that the candidates hold several times, such as an empty form, is named as
    often as it occurs, and is its own nearest other.

    Signals have no bounds: each channel is measured in units of its range over the candidates, victims included, so
    that 0 and 1 are its least and its largest value; a PSNR is that of the range. What is compared for images by SSIM
    is compared for signals by correlation.

    Of examples of several inputs each channel of an input, or each of its single numbers, is in units of its range in
    the same way. They are compared by the correlation of what sets them apart from the candidates' mean, in these units
    and over all inputs, as they are: nothing is moved.

    Where an example has no class (several labels, numbers, a mask), all are of one: what is drawn of the same class,
    and luck that goes by class, is over all candidates.
    """
    things = observation.task_info.example_kind.plural
    if not bool(finding.images.isfinite().all()):
        return refused(finding, observation)
    by_example, received = observation.sent.by_example(), observation
    targets = None
    if observation.task_info.num_classes is None and by_example is None:
        targets, (finding, truth) = (finding, truth), _of_one_class(finding, truth)
    if by_example is not None:
        finding, observation = _by_example(finding, observation, by_example)
    elif not finding.rounds and len(observation.messages) > 1:
        observation, truth = _as_one(observation, truth)
        held = sum(map(len, truth.inputs.values()))
        if len(finding.images) < held:
            return refused(
                finding,
                received,
                f"{len(finding.images)} {things} for {held} different examples: how many the client holds wasn't "
                "known; grant the training (threat.knows_training)",
            )
    federation, kind = observation.federation, observation.task_info.example_kind
    packing = observation.task_info.packed_inputs
    covered = [(m, _rows(finding, m, len(observation.messages))) for m in observation.messages]
    covered = [(m, rows) for m, rows in covered if len(rows)]
    given = finding, truth
    given_images, given_truth = finding.images, torch.cat([truth.inputs[m.round, m.client] for m, _ in covered])
    if kind.bounds is None:
        finding, truth = _in_units_of_range(finding, truth, packing)
    true = torch.cat([truth.inputs[m.round, m.client] for m, _ in covered])
    true_labels = torch.cat([truth.labels[m.round, m.client] for m, _ in covered])
    places = [(m, i) for m, _ in covered for i in range(len(truth.inputs[m.round, m.client]))]
    pictures = true.ndim > 2
    alike, shift_p = comparable(truth, [(m.round, m.client) for m, _ in covered], seed=seed)

    def paired(images: Tensor) -> Tensor:
        parts = [(kind.vectors(truth.inputs[m.round, m.client]), rows) for m, rows in covered]
        return torch.cat([rows[assign(own, kind.vectors(images[rows]))] for own, rows in parts])

    order = paired(finding.images)
    images, labels = finding.images[order], finding.labels[order]
    errors = mse(images, true)
    values = psnr_from_mse(errors)
    seen = observation.task_info.normalise
    normalised = mse(seen(given_images[order]), seen(given_truth))
    structure, linear = _likeness(images, true, truth.candidates.mean(dim=0))
    perceptual = lpips(images, true)
    different = _different(truth.candidates)
    mean_image = truth.candidates.mean(dim=0, keepdim=True).expand_as(true)
    if shift_p <= SHIFTED and len(alike.candidates) > 1:  # what the clients' other examples have in common
        mean_image = (alike.candidates.sum(dim=0) - true) / (len(alike.candidates) - 1)
    if different == 1:
        mean_image = channel_means(true, true.ndim - 2).expand_as(true)
    rngs, lucky = {}, {}
    for m, rows in covered:
        rngs[id(m)] = np.random.default_rng(derive_seed(seed, "same-class", federation, m.round, m.client))
        lucky[id(m)] = by_luck(len(rows), _different(alike.candidates), truth.labels[m.round, m.client], alike)
    results: list[ImageResult] = []
    image_files: dict[str, Tensor] = {}
    first, uses = _distinct(true)
    moved = _paired_by(_after_moves, finding.images, covered, truth) if pictures else None
    toned = _paired_by(_in_tone, finding.images, covered, truth) if pictures else None
    victims = _among(truth.candidates, true)  # an image of another victim is no image of somebody else
    candidates, recovered, wanted = (kind.vectors(part) for part in (truth.candidates, images, true))
    usual, group = margins_of(candidates, seed)

    def as_far(nearest_other: float | None, found: float) -> float:
        """Return the share of candidates that are as far ahead with their own nearest one."""
        return 1.0 if nearest_other is None else float((1 + (usual >= found - nearest_other).sum()) / (1 + len(usual)))

    for i in first:
        message, position = places[i]
        other = _same_class(true[i], int(true_labels[i]), truth, rngs[id(message)])
        stands = standing(recovered[i], wanted[i], candidates)
        nearest = stands.nearest
        apart = None if nearest is None else float(psnr_from_mse(mse(truth.candidates[nearest, None], images[i, None])))
        stem = f"images/{federation}-{message.round}-{message.client}-{position}"
        results.append(
            ImageResult(
                true_image=f"{stem}-true.png",
                reconstruction=f"{stem}-{finding.attack}.png",
                true_label=None if targets else int(true_labels[i]),
                label=None if targets else int(labels[i]),
                mse=float(errors[i]),
                psnr=float(values[i]),
                ssim=None if structure is None else float(structure[i]),
                correlation=None if linear is None else float(linear[i]),
                mse_normalised=float(normalised[i]),
                psnr_normalised=float(psnr_from_mse(normalised[i])),
                lpips=None if perceptual is None else float(perceptual[i]),
                victim=tensor_digest(true[i]).hex()[:12],
                rank=stands.rank,
                rank_pattern=_rank_of_pattern(images[i], true[i], truth.candidates) if pictures else None,
                candidates=len(truth.candidates),
                different_candidates=different,
                by_luck=min(1.0, stands.equal * lucky[id(message)][int(true_labels[i])]),
                psnr_nearest_other=apart,
                as_far_by_luck=as_far(apart, float(values[i])),
                alike_candidates=group,
                nearer_to_other=0.0 if nearest is None or victims[nearest] else stands.nearer_to_other,
                uses=uses[i],
                rounds=list(finding.rounds[int(order[i])]) if finding.rounds else [],
                certified=None if finding.certified is None else bool(finding.certified[order[i]]),
                psnr_mean_image=float(psnr_from_mse(mse(mean_image[i : i + 1], true[i : i + 1]))),
                psnr_same_class=None if other is None else float(psnr_from_mse(mse(other[None], true[i : i + 1]))),
                registered=None
                if moved is None
                else _with_luck(_after_move(moved[i], true[i], mean_image[i], truth), as_far),
                toned=None
                if toned is None
                else _with_luck(_after_tone(toned[i], true[i], mean_image[i], truth), as_far),
            )
        )
        own, other = given_truth[i], given_images[order[i]]
        image_files[results[-1].true_image] = draw_parts(own, own, packing) if packing else kind.draw(own[None])
        image_files[results[-1].reconstruction] = (
            draw_parts(other, own, packing) if packing else kind.draw_over(other, own)
        )
    trace = finding.trace
    curve = trace and Curve(
        iterations=trace.iterations,
        objective=trace.objective,
        psnr=[float(psnr_from_mse(mse(s[paired(s)], true)).mean()) for s in trace.snapshots],
    )
    metrics, luck = _grouped(finding, covered, given[1], seed)
    result = done(
        finding,
        received if by_example is None else observation,
        [
            *([_by_part(images, true, packing)] if packing else []),
            *([told_apart(shift_p)] if shift_p <= SHIFTED else []),
            *luck,
        ],
        images=results,
        certified=None if finding.certified is None else int(finding.certified.sum()),
        certified_wrong=None if finding.certified is None else _wrongly(given[0], covered, given[1], observation),
        blind_p_value=shift_p,
        things=things,
        label_source=finding.label_source,
        label_accuracy=None if targets else label_accuracy(labels, true_labels),
        matching=matching(finding, covered, truth, kind.vectors),
        curve=curve,
        metrics=metrics,
    )
    if by_example is not None:  # what stood for examples were no rounds
        images_alone = [image.model_copy(update={"rounds": []}) for image in results]
        result = result.model_copy(update={"round": None, "client": None, "rounds": [], "images": images_alone})
    return Evaluation(result, image_files)


def _with_luck(found: RegisteredResult, as_far: Callable[[float | None, float], float]) -> RegisteredResult:
    return found.model_copy(update={"as_far_by_luck": as_far(found.psnr_nearest_other, found.psnr)})


def margins_of(candidates: Tensor, seed: int) -> tuple[Tensor, int]:
    """Return by how many dB each of (n, d) candidates is nearer to one other than to any further one, of 1,000 at most.

    Where there are several pictures of a person, that is how far ahead another one of these is. Beside it stands how
    many these are, up to ten: the median candidate is much nearer to so many, itself among them, than to any other.
    """
    rows = torch.randperm(len(candidates), generator=generator(seed, "margins"))[:_POOL]
    drawn = candidates[rows].double()
    apart = torch.cdist(drawn, drawn)  # of equal ones it is rounding
    least = (
        apart.masked_fill(apart < 1e-5 * drawn.norm(dim=1).max().clamp(min=0.1), torch.inf).sort(dim=1).values[:, :10]
    )
    least = least[least[:, :2].isfinite().all(dim=1)]
    if len(rows) <= 2 or not len(least):
        return torch.zeros(0), 1
    gaps = 20 * torch.log10(least[:, 1:] / least[:, :-1])
    usual = gaps.nan_to_num(0.0, posinf=0.0).median(dim=0).values
    return gaps[:, 0], int(usual.argmax()) + 2 if usual.max() >= _GROUPED_DB else 1


def _grouped(
    finding: ImageFinding, covered: Sequence[tuple[Message, Tensor]], truth: Truth, seed: int
) -> tuple[list[MetricResult], list[str]]:
    """Return how well images were grouped by client, and what luck would do, in a sentence; nothing where they weren't.

    An image is its nearest example's, and one that is nobody's, a grey level and more off, counts as a client of its
    own. Without the attack is the mean over groupings of the same sizes at random, which the test is against, too.
    """
    if finding.groups is None or not truth.members:
        return [], []
    held: dict[bytes, int] = {}
    for message, _ in covered:
        key = message.round, message.client
        held |= {tensor_digest(x): int(c) for x, c in zip(truth.inputs[key], truth.members.get(key, []), strict=False)}
    kept = torch.nonzero(finding.groups >= 0)[:, 0]
    true = torch.cat([truth.inputs[m.round, m.client] for m, _ in covered])
    far = torch.cdist(finding.images[kept].flatten(1).double(), true.flatten(1).double())
    nearest, near = far.argmin(dim=1), far.amin(dim=1).square() / true[0].numel() <= GROUPED_MSE
    owners = np.array(
        [held[tensor_digest(true[i])] if ok else -1 - n for n, (i, ok) in enumerate(zip(nearest, near, strict=True))]
    )
    groups = finding.groups[kept].numpy()
    if len(groups) < 2 or len(np.unique(owners)) == 1:
        return [], [f"{len(groups)} images, of which grouping by client is no question"]
    rng = np.random.default_rng(derive_seed(seed, "groups"))
    own = _pairs(groups, owners)
    lucky = np.array([_pairs(groups, rng.permutation(owners)) for _ in range(_GROUPINGS)])
    index, by_luck = adjusted_rand_score(owners, groups), lucky.mean()
    p = (1 + int((lucky >= own).sum())) / (1 + _GROUPINGS)
    together = _pairs(groups, groups)
    metrics = [ADJUSTED_RAND.of(float(index), 0.0, n=len(groups), of="images")]
    if together:
        metrics.append(SAME_CLIENT.of(own / together, by_luck / together, n=together, of="pairs of images"))
    told = f"{own} of {together} pairs that it put into one group are one client's"
    return metrics, [f"{told}; of groups of the same sizes at random {by_luck:.1f}, and as many with p = {p:.2g}"]


def _pairs(groups: np.ndarray, owners: np.ndarray) -> int:
    """Return how many pairs are in one group and one owner's."""
    return int(np.triu((groups[:, None] == groups) & (owners[:, None] == owners), 1).sum())


def _of_one_class(finding: ImageFinding, truth: Truth) -> tuple[ImageFinding, Truth]:
    """Return both with class 0 in place of all targets."""

    def alike(targets: Tensor) -> Tensor:
        return torch.zeros(len(targets), dtype=torch.int64)

    separate = tuple((images, alike(labels)) for images, labels in finding.separate)
    labels = {key: alike(own) for key, own in truth.labels.items()}
    return (
        replace(finding, labels=alike(finding.labels), separate=separate),
        replace(truth, labels=labels, candidate_labels=alike(truth.candidate_labels)),
    )


def _in_units_of_range(finding: ImageFinding, truth: Truth, packing: Packing | None) -> tuple[ImageFinding, Truth]:
    """Return both with each channel's least and largest value over the candidates at 0 and 1, where these differ."""
    if packing is None:
        shape = (-1, *(1,) * (truth.candidates.ndim - 2))
        values = truth.candidates.transpose(0, 1).flatten(1)
        low, high = values.min(dim=1).values.view(shape), values.max(dim=1).values.view(shape)
    else:
        groups, least, most = packing.groups(), truth.candidates.amin(dim=0), truth.candidates.amax(dim=0)
        none = torch.zeros(int(groups.max()) + 1)
        low = none.scatter_reduce(0, groups, least, "amin", include_self=False)[groups]
        high = none.scatter_reduce(0, groups, most, "amax", include_self=False)[groups]
    width, size = high - low, torch.maximum(high.abs(), low.abs())
    vary = width > _ROUNDING * size
    # a channel that doesn't vary has no range: its own size stands for it, or the usual range of the others
    usual = width[vary].median() if bool(vary.any()) else torch.ones(())
    width = torch.where(vary, width, torch.where(size > 0, size.maximum(usual), usual))

    def scaled(examples: Tensor) -> Tensor:
        return (examples - low) / width

    trace = finding.trace and replace(finding.trace, snapshots=scaled(finding.trace.snapshots))
    separate = tuple((scaled(images), labels) for images, labels in finding.separate)
    inputs = {key: scaled(examples) for key, examples in truth.inputs.items()}
    return (
        replace(finding, images=scaled(finding.images), trace=trace, separate=separate),
        replace(truth, inputs=inputs, candidates=scaled(truth.candidates)),
    )


def _likeness(images: Tensor, true: Tensor, usual: Tensor | None = None) -> tuple[Tensor | None, Tensor | None]:
    """Return the (n,) SSIM of images or volumes, and the correlation of signals; None for what they aren't.

    Of examples of several inputs (n, p) it is the correlation after the ``usual`` one (p,) is taken off.
    """
    if true.ndim == 2:
        assert usual is not None
        away, apart = (images - usual).double(), (true - usual).double()
        return None, torch.nn.functional.cosine_similarity(away, apart, dim=1, eps=1e-12)
    return (None, correlation(images, true)) if true.ndim == 3 else (ssim(images, true), None)


def _by_part(images: Tensor, true: Tensor, packing: Packing) -> str:
    """Return in words how near each input came, by the mean PSNR of its range."""
    sizes = [part.size for part in packing.parts]
    each = zip(packing.parts, images.split(sizes, dim=1), true.split(sizes, dim=1), strict=True)
    told = ", ".join(f"{part.label} {float(psnr_from_mse(mse(a, b)).mean()):.1f} dB" for part, a, b in each)
    return f"each input by itself, mean PSNR: {told}"


def _by_example(
    finding: ImageFinding, observation: Observation, numbers: list[int]
) -> tuple[ImageFinding, Observation]:
    """Return both with a message for each of the examples: which is which everybody there knows."""
    messages = tuple(Message(i, 0, {}, Update(0, "gradient", {}, 1, None)) for i in numbers)
    return replace(finding, rounds=tuple((i,) for i in numbers)), replace(observation, messages=messages)


def _as_one(observation: Observation, truth: Truth) -> tuple[Observation, Truth]:
    """Return both with one message over the distinct examples of all, for images of which no round is said."""
    first = observation.messages[0]
    keys = [(message.round, message.client) for message in observation.messages]
    inputs, labels = (torch.cat([of[key] for key in keys]) for of in (truth.inputs, truth.labels))
    rows, _ = _distinct(inputs)
    members = {}
    if all(key in truth.members for key in keys):
        members = {keys[0]: torch.cat([truth.members[key] for key in keys])[rows]}
    one = replace(truth, inputs={keys[0]: inputs[rows]}, labels={keys[0]: labels[rows]}, members=members)
    return replace(observation, messages=(first,)), one


def _wrongly(
    finding: ImageFinding, covered: Sequence[tuple[Message, Tensor]], truth: Truth, observation: Observation
) -> int:
    """Return how many certified images are none of their client's, up to half a grey level (root mean square).

    Without a range that is half a 255th of a standard deviation, or of the example's own size where that is less, as
    the model sees it, and the rounding of what was found.
    """
    wrong, info = 0, observation.task_info
    free = info.example_kind.bounds is None
    seen = info.normalise if free else torch.clone
    for message, rows in covered:
        assert finding.certified is not None
        inputs = truth.inputs[message.round, message.client].double()
        true, own = (seen(x).flatten(1) for x in (inputs, finding.images[rows[finding.certified[rows]]].double()))
        least = CERTIFIED_MSE * (true.square().mean(dim=1).clamp(max=1.0) if free else torch.ones(len(true)))
        rounded = (seen(inputs * (1 + _ROUNDING)).flatten(1) - true).abs()
        for image in own:
            off = ((true - image).abs() - rounded).clamp(min=0)
            wrong += int((off.square().mean(dim=1) > least).all())
    return wrong


def _rows(finding: ImageFinding, message: Message, received: int) -> Tensor:
    """Return which of the finding's images belong to ``message``, one of ``received``.

    ValueError: some do, but not as many as the update has examples.
    """
    if received == 1:
        return torch.arange(len(finding.images))
    rows = [i for i, rounds in enumerate(finding.rounds) if message.round in rounds]
    if rows and len(rows) != message.update.num_examples:
        raise ValueError(f"{len(rows)} images for the {message.update.num_examples} examples of round {message.round}")
    return torch.tensor(rows, dtype=torch.int64)


def _among(images: Tensor, others: Tensor) -> Tensor:
    """Return (n,) bool: which of n images are equal to one of the others."""
    known = {tensor_digest(other) for other in others}
    return torch.tensor([tensor_digest(image) in known for image in images], dtype=torch.bool)


def _after_moves(image: Tensor, others: Tensor) -> Tensor:
    return registered(image, others)[0]


def _in_tone(image: Tensor, others: Tensor) -> Tensor:
    return 1 - correlations(image, others).square().amax(dim=0)


def _paired_by(
    errors_of: Callable[[Tensor, Tensor], Tensor],
    images: Tensor,
    covered: Sequence[tuple[Message, Tensor]],
    truth: Truth,
) -> Tensor:
    """Return, for every true image of every round, the one of (n, C, H, W) ``images`` that is paired with it.

    By the errors (n,) of an image against others, each after its own best move.
    """
    pairs = []
    for message, rows in covered:
        true = truth.inputs[message.round, message.client]
        errors = torch.stack([errors_of(image, true) for image in images[rows]]) if len(rows) > 1 else None
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
        nearest = None if bool(same.all()) else float(psnr_from_mse(errors[~same].min()))
    structure, alike = _likeness(on_image[None].contiguous(), on_true[None].contiguous())
    return RegisteredResult(
        psnr=float(psnr_from_mse(error)),
        ssim=None if structure is None else float(structure),
        correlation=None if alike is None else float(alike),
        flipped=move.flipped,
        down=move.down,
        right=move.right,
        deep=move.deep,
        rank=place,
        psnr_nearest_other=nearest,
        psnr_mean_image=float(psnr_from_mse(registered(mean_image, true[None])[0])),
    )


def _after_tone(image: Tensor, true: Tensor, mean_image: Tensor, truth: Truth) -> RegisteredResult:
    """Return the scores of a recovered image after its best turn and flip, contrast and brightness.

    Candidates are compared by what is left of their own variance: an even one would win else.
    """
    found = correlations(image, true[None])[:, 0]
    way = int(found.abs().argmax())
    r = float(found[way])
    turn, axes = ways(image)[way], image.ndim - 1
    own, theirs = (x - channel_means(x, axes) for x in (turned(image, turn).double(), true.double()))
    contrast = float((own * theirs).sum() / own.square().sum().clamp_min(1e-12))
    fitted = (contrast * own + channel_means(true.double(), axes)).clamp(0, 1)
    structure, alike = _likeness(fitted[None].to(true.dtype), true[None])
    others = correlations(image, truth.candidates).square().amax(dim=0)
    same = (truth.candidates == true).flatten(1).all(dim=1)
    error = mse(fitted[None], true[None].double())
    nearest = None
    if not bool(same.all()):
        apart = 10 * np.log10(max(1 - float(others[~same].max()), 1e-10) / max(1 - r * r, 1e-10))
        nearest = float(psnr_from_mse(error)) - float(apart)
    mean = float(_in_tone(mean_image, true[None]))
    return RegisteredResult(
        psnr=float(psnr_from_mse(error)),
        ssim=None if structure is None else float(structure),
        correlation=None if alike is None else float(alike),
        flipped=bool(turn % 2),
        down=0,
        right=0,
        turns=turn // 2,
        contrast=contrast,
        rank=1 + int(((others >= r * r) & ~same).sum()),
        psnr_nearest_other=nearest,
        psnr_mean_image=float(psnr_from_mse(mean * theirs.square().mean())),
    )


def _rank_of_pattern(image: Tensor, true: Tensor, candidates: Tensor) -> int:
    """Return how many candidates correlate with ``image`` at least as much as ``true``, which counts as one itself."""
    own, others = (correlations(image, x)[0] for x in (true[None], candidates))
    same = (candidates == true).flatten(1).all(dim=1)
    return 1 + int(((others >= own) & ~same).sum())


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
        covered: the message of every round that images were recovered of, and which images are its examples.
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

    Both are (n, C, H, W), or (n, d) vectors. ``alike``, (n, n) bool: which pairs come before all others; None: no
    matter.
    """
    cost = torch.cdist(true.flatten(1).double(), images.flatten(1).double()).square()
    if alike is not None:
        cost += ~alike * (1 + cost.sum())
    _, columns = linear_sum_assignment(cost.numpy())
    return torch.as_tensor(columns, dtype=torch.int64)


class Standing(NamedTuple):
    """Where the true image stands among the candidates for a recovered one.

    Attributes:
        rank: how many candidates are at least as near to the recovered image as the true one, which counts as one.
        nearest: the position of the other candidate that is nearest to the recovered image, if there is one.
        nearer_to_other: by how many dB that is nearer than any further one, the true one included; else 0.
        equal: how many candidates are equal to the true image, at least 1.
    """

    rank: int
    nearest: int | None
    nearer_to_other: float
    equal: int = 1


def standing(image: Tensor, true: Tensor, candidates: Tensor) -> Standing:
    """Return where ``true`` stands among ``candidates`` for ``image``."""
    distances = _squared_distances(image, candidates)
    own = _squared_distances(image, true[None])
    same = _squared_distances(true, candidates) == 0
    rank, equal = 1 + int(((distances <= own) & ~same).sum()), max(1, int(same.sum()))
    if bool(same.all()):
        return Standing(rank, None, 0.0, equal)
    if equal > 1:
        return Standing(rank, int(same.nonzero()[1]), 0.0, equal)
    nearest = int(distances.masked_fill(same, torch.inf).argmin())
    further = torch.cat([own, distances[distances > distances[nearest]]]).min()
    return Standing(
        rank,
        nearest,
        max(0.0, float(psnr_from_mse(distances[nearest] / image.numel()) - psnr_from_mse(further / image.numel()))),
        equal,
    )


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
    likeness, least = (image.ssim, VISIBLE_SSIM) if image.ssim is not None else (image.correlation, VISIBLE_CORRELATION)
    return image.rank == 1 and likeness is not None and likeness >= least and image.psnr > image.psnr_mean_image


def margin(image: ImageResult | RegisteredResult) -> float:
    """Return by how many dB an image that came out visibly is nearer to its victim than to any other candidate, or 0.

    Where there is none, than an even or the mean image is, less what that must be worse by anyway.
    """
    other = image.psnr_nearest_other
    least = image.psnr_mean_image + ALONE_DB - NEARER_DB if other is None else other
    return max(0.0, image.psnr - least) if visible(image) else 0.0


def _by_margins(ahead: Sequence[float], chances: Sequence[float]) -> float:
    """Return the probability that other pictures come as much nearer to their victims than to any other candidate.

    Each victim's is its chance of being named times that of such a margin. Half of the level is the nearest one's, if
    that is ahead by 6 dB; the other half is the smallest's of the binomial tests whether as many as two, three, … are.
    """
    each = sorted(c * float(np.exp(-a / NEARER_BY_LUCK_DB)) if a else 1.0 for a, c in zip(ahead, chances, strict=True))
    n = len(each)
    tails = binom.sf(np.arange(n), n, np.minimum(each, 1.0))  # that so many are as far ahead as the last of them
    alone = float(tails[0]) if max(ahead) >= NEARER_DB else 1.0
    return alone if n == 1 else min(1.0, 2 * min(alone, (n - 1) * float(tails[1:].min())))


def elsewhere(image: ImageResult) -> bool:
    """Return whether an image is as plainly one other candidate as an unmistakable one is its own victim."""
    return image.rank > 1 and image.nearer_to_other >= NEARER_DB


def verdict_of(images: Sequence[ImageResult], things: str = "images", shifted: bool = False) -> Judgement:
    """Return the judgement on an attack's images, by the rules of its finding type.

    ``things`` are what the images are called; ``shifted``: whether held-out examples of some update couldn't serve.
    """
    tried: list[Callable[[ImageResult], RegisteredResult | None]] = [lambda _: None, _moved, _in_another_tone]
    judged = [
        _judged(images, moved, how, level, things, shifted)
        for moved, (how, level) in zip(tried, _LEVELS.items(), strict=True)
        if not how or any(moved(image) for image in images)
    ]
    order = ("recovered", "identifiable", "inconclusive", "not demonstrated")
    return min(judged, key=lambda judgement: order.index(judgement.verdict))  # of equal ones the first


def _moved(image: ImageResult) -> RegisteredResult | None:
    return image.registered if image.registered and image.registered.rank else None


def _in_another_tone(image: ImageResult) -> RegisteredResult | None:
    return image.toned


def _judged(
    images: Sequence[ImageResult],
    moved: Callable[[ImageResult], RegisteredResult | None],
    how: str,
    level: float,
    things: str,
    shifted: bool,
) -> Judgement:
    """Return the judgement on the victims by their images as they are, or by what these are once they are moved, too.

    A victim is counted once, and came out where one of its images did: of several updates or rounds each is another
    try, so their chances are added up. With moves an image has two ways to be identified, so chance has, too.
    """
    victims = _by_victim(images)
    best = [[way for i in of for way in (i, moved(i)) if way is not None] for of in victims]
    n, twice, candidates = len(victims), 2 if how else 1, fewest_candidates(images)
    seen, identified = (sum(any(test(w) for w in ways) for ways in best) for test in (visible, lambda w: w.rank == 1))
    chances = [min(1.0, twice * sum(_chance(image) for image in of)) for of in victims]
    grouped = max((image.alike_candidates or 1 for of in victims for image in of), default=1)
    often = max(AS_OFTEN, 1 / grouped if grouped > 1 else 0.0)
    again = [max(chance, min(1.0, twice * often)) for chance in chances]
    usual = [w.as_far_by_luck for ways in best for w in ways if w.rank == 1 and w.as_far_by_luck is not None]
    far_ahead = 1.0
    if usual:
        lone = [min((w.as_far_by_luck or 1.0 for w in ways if w.rank == 1), default=1.0) for ways in best]
        far_ahead = combined([min(1.0, twice * luck) for luck in lone])

    def by_luck_of(count: int) -> float:
        """Return the p-value of naming as many; where margins say no more, as if candidates were like the victims."""
        alike = min(_at_least(count, again), far_ahead) if usual else 0.0
        return min(1.0, max(_at_least(count, chances), alike) / level)

    p, p_seen = by_luck_of(identified), by_luck_of(seen)
    far = 0.0 if candidates >= ENOUGH else ALONE_DB  # of few candidates one may be far from the others by chance
    ahead = [max((margin(w) for w in ways if w.psnr >= w.psnr_mean_image + far), default=0.0) for ways in best]
    p_ahead = _by_margins(ahead, again if usual else chances)
    plain = p_ahead <= SURE and not any(elsewhere(image) for image in images)
    recovered = seen > 0 and (p_seen <= SURE or plain)
    counted, what = (seen, "came out visibly") if recovered else (identified, "identified among the candidates")
    against = "one-sided exact test (Poisson binomial) against naming candidates of the class at random"
    luck: dict[str, Any] = {} if recovered else {"by_guessing": sum(chances) / n, "p_value": p, "test": against}
    evidence = share_of(f"{things} {what}{how}", counted, n, things, **luck)
    which = f"{identified} of {n} identified among {candidates} candidates (by luck with p = {p:.2g})"
    if recovered and p_seen > SURE:
        which += f", nearer than any other by up to {max(ahead):.3g} dB (by luck with p = {p_ahead:.2g})"
    visibly = sum(any(visible(w) for w in (i, moved(i)) if w) for i in images)
    tries = f" (in {visibly} of {len(images)} tries)" if len(images) > n else ""
    text = f"{seen} of {n} {things.removesuffix('s') if n == 1 else things} came out visibly{how}{tries}; {which}"
    if recovered:
        headline = f"{{who}} can reconstruct training {{things}}: {seen} of {n} came out visibly{_INCLUDED[how]}."
        return Judgement("recovered", text, evidence, headline)
    if identified and p <= SURE:
        by_pattern = sum(any(i.rank_pattern in (None, 1) for i in of) for of in victims)
        alone = (
            ""
            if how or _at_least(by_pattern, chances) / level <= SURE
            else ", by colours, brightness and contrast alone"
        )
        headline = (
            f"{{who}} can tell which {{things}} a client trained on, out of {candidates} candidates, though none came "
            f"out visibly: {identified} of {n} were singled out{how}{alone}."
        )
        return Judgement("identifiable", text + alone, evidence, headline)
    if shifted and identified:
        return Judgement("inconclusive", text, evidence, advice=REMEDY)
    if seen or (identified and (p <= DOUBT or identified == n)):
        more = f"attack more {things}" if candidates > 2 * n else f"attack more {things}, or give more candidates"
        advice = f"{more}: {n} among {candidates} candidates are too few to exclude luck"
        return Judgement("inconclusive", text, evidence, advice=advice)
    return Judgement("not demonstrated", text, evidence)


def _by_victim(images: Sequence[ImageResult]) -> list[list[ImageResult]]:
    """Return the images of each victim; of results that don't say which that is, each is one."""
    groups: dict[str | int, list[ImageResult]] = {}
    for i, image in enumerate(images):
        groups.setdefault(image.victim or i, []).append(image)
    return list(groups.values())


def best_tries(images: Sequence[ImageResult]) -> list[ImageResult]:
    """Return each victim's image, by which it is counted and scored: of several tries the best by the verdicts' rules.

    The one that came out visibly, else that was identified, else that came out visibly after a move or in another tone;
    of equals the nearest.
    """
    return [max(of, key=_how_well) for of in _by_victim(images)]


def _how_well(image: ImageResult) -> tuple[bool, bool, bool, float]:
    changed = [way for way in (_moved(image), _in_another_tone(image)) if way is not None]
    return visible(image), image.rank == 1, any(map(visible, changed)), image.psnr


def fewest_candidates(images: Sequence[ImageResult]) -> int:
    """Return among how many different candidates an image was sought, at least; equal ones count once."""
    return max(1, min(i.candidates if i.different_candidates is None else i.different_candidates for i in images))


def _at_least(identified: int, chances: Sequence[float]) -> float:
    """Return the probability that at least as many victims are identified by naming candidates at random.

    Exact, whatever each one's own chance (Poisson binomial). Candidates that are equal are one: an image among 20 equal
    ones is identified by anything.
    """
    if not identified:
        return 1.0
    luck = poisson_binom(np.asarray(chances))
    p = luck.sf(identified - 1)
    if p < _FROM_SUMS:
        p = luck.pmf(np.arange(identified, len(chances) + 1)).sum()
    return float(np.clip(p, 0.0, 1.0))


def _chance(image: ImageResult) -> float:
    return 1 / fewest_candidates([image]) if image.by_luck is None else image.by_luck


def _with_certified(findings: Sequence[FindingResult]) -> Judgement:
    """Return the judgement on all images, with what the attack vouched for and whether the truth agrees."""
    things = findings[0].things if findings else "images"
    shifted = any((finding.blind_p_value or 1.0) <= SHIFTED for finding in findings)
    judged = verdict_of([image for finding in findings for image in finding.images], things, shifted)
    vouched = [finding for finding in findings if finding.certified is not None]
    if not vouched:
        return judged
    count = sum(finding.certified or 0 for finding in vouched)
    wrong = sum(finding.certified_wrong or 0 for finding in vouched)
    told = f"{count} of {sum(len(f.images) for f in vouched)} certified as exact without the truth"
    if wrong:
        text = f"{judged.text}; {told}, of which {wrong} ARE WRONG: the certificate failed, please report this"
        return judged._replace(text=text, headline=f"{judged.headline} {wrong} certified {things} are WRONG.".strip())
    text = f"{judged.text}; {told}" + (", and the truth agrees" if count else "")
    known = f" It can prove {count} of them exact." if count else ""
    return judged._replace(text=text, headline=judged.headline + known if judged.headline else "")


def _columns(done: Sequence[FindingResult], over: Over) -> dict[str, Any]:
    images = [image for finding in done for image in finding.images]
    victims = best_tries(images)
    if not victims:
        return {}
    labels = [f.label_accuracy for f in done if f.label_accuracy is not None]

    def of_each(name: str) -> list[float]:
        return [score for image in victims if (score := image.score(name)) is not None]

    baselines = {
        name: float(np.mean(found)) if (found := of_each(name)) else None
        for name in ("psnr_mean_image", "psnr_same_class", "psnr_mean_image_registered")
    }
    return {
        **{name: over(of_each(name), *ends) for name, ends in _RANGES.items()},
        **baselines,
        "psnr_of_tries": float(np.mean([image.psnr for image in images])) if len(images) > len(victims) else None,
        "identification_rate": _identified(done)[0],
        "label_accuracy": sum(labels) / len(labels) if labels else None,
    }


def _identified(findings: Sequence[FindingResult]) -> list[float]:
    victims = best_tries([image for finding in findings for image in finding.images])
    return [sum(image.rank == 1 for image in victims) / len(victims)] if victims else []


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
    verdict=_with_certified,
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
        "that fit best. The worst judgement counts. The three share one level: images as they are have 80 % of it, "
        "either other judgement 10 %, with the chance of each image doubled.",
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
    metrics=(ADJUSTED_RAND, SAME_CLIENT),
    question="reconstruct training {things}",
    control="example",
    worst="recovered",
    scores=_scores,
    columns=_columns,
    limits={name: partial(_of_each, name) for name in SCORES}
    | {"identification_rate": _identified, "label_accuracy": _labels_right},
)
