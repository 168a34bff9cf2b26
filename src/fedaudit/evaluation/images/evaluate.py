"""Recovered images, volumes or signals against the ones that were trained on."""

from __future__ import annotations

from torch import Tensor

from fedaudit.attacks import ImageFinding
from fedaudit.evaluation.finding_types import Evaluation, done, evaluate, refused
from fedaudit.evaluation.image_metrics import mse, psnr_from_mse
from fedaudit.evaluation.images.claims import grouped, wrongly_certified
from fedaudit.evaluation.images.luck import luck_of
from fedaudit.evaluation.images.naming import with_names
from fedaudit.evaluation.images.pairing import matching, pair
from fedaudit.evaluation.images.scores import scored
from fedaudit.evaluation.images.space import Case, in_one_space
from fedaudit.evaluation.labels import label_accuracy
from fedaudit.evaluation.shift import SHIFTED, told_apart
from fedaudit.modalities.packed import Packing, draw_parts
from fedaudit.results import Curve, ImageResult
from fedaudit.results.images import ImageDetail
from fedaudit.transcript.observation import Observation
from fedaudit.transcript.truth import Truth


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

    Beside, each reconstruction names a person, or a picture (:mod:`fedaudit.evaluation.images.naming`).

    Where an example has no class (several labels, numbers, a mask), all are of one: what is drawn of the same class,
    and luck that goes by class, is over all candidates.
    """
    case = in_one_space(finding, observation, truth)
    if isinstance(case, str):
        return refused(finding, observation, case)
    rows = pair(case, case.finding.images)
    luck = luck_of(case, seed)
    scores = with_names(case, rows, scored(case, rows, luck), truth.held_out(), seed)
    metrics, by_client = grouped(case, seed)
    images = case.finding.images[rows]
    trace, packing = case.finding.trace, case.info.packed_inputs
    curve = trace and Curve(
        iterations=trace.iterations,
        objective=trace.objective,
        psnr=[float(psnr_from_mse(mse(kept[pair(case, kept)], case.true)).mean()) for kept in trace.snapshots],
    )
    result = done(
        finding,
        observation,
        [
            *([_by_part(images, case.true, packing)] if packing else []),
            *([told_apart(luck.shift_p)] if luck.shift_p <= SHIFTED else []),
            *by_client,
        ],
        ImageDetail(
            example_noun=case.kind.plural,
            images=scores,
            certified=None if finding.certified is None else int(finding.certified.sum()),
            certified_wrong=wrongly_certified(case),
            matching=matching(case),
            curve=curve,
        ),
        metrics=metrics,
        blind_p_value=luck.shift_p,
        label_source=finding.label_source,
        label_accuracy=label_accuracy(case.finding.labels[rows], case.labels) if case.classes else None,
    )
    if not observation.messages:  # of a vertical federation: no update travels, and each example is by itself
        result = result.model_copy(update={"num_examples": len(case.parts)})
    return Evaluation(result, _drawn(case, rows, scores))


def _by_part(images: Tensor, true: Tensor, packing: Packing) -> str:
    """Return in words how near each input came, by the mean PSNR of its range."""
    sizes = [part.size for part in packing.parts]
    each = zip(packing.parts, images.split(sizes, dim=1), true.split(sizes, dim=1), strict=True)
    told = ", ".join(f"{part.label} {float(psnr_from_mse(mse(a, b)).mean()):.1f} dB" for part, a, b in each)
    return f"each input by itself, mean PSNR: {told}"


def _drawn(case: Case, rows: Tensor, scores: list[ImageResult]) -> dict[str, Tensor]:
    """Return true and recovered examples as they are drawn, by the paths that their scores name."""
    packing, files = case.info.packed_inputs, {}
    for i, score in zip(case.uses, scores, strict=True):
        own, other = case.given_true[i], case.given[0].images[rows[i]]
        files[score.true_image] = draw_parts(own, own, packing) if packing else case.kind.draw(own[None])
        files[score.reconstruction] = draw_parts(other, own, packing) if packing else case.kind.draw_over(other, own)
    return files
