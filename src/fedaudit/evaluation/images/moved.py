"""How near pictures come after the best shift and flip, or in the best turn and tone, and everything else alike."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from fedaudit.evaluation.image_metrics import likeness, mse, psnr_from_mse
from fedaudit.evaluation.images.luck import Luck
from fedaudit.evaluation.images.registration import (
    STAY,
    channel_means,
    correlations,
    overlapping,
    registered,
    turned,
    ways,
)
from fedaudit.evaluation.images.space import Case
from fedaudit.results import RegisteredResult


def after_moves(case: Case, luck: Luck) -> list[RegisteredResult]:
    """Return the scores of what is paired with each of the k true pictures after the best shift and flip."""
    images, candidates = _paired_by(lambda image, others: registered(image, others)[0], case), case.truth.candidates
    return [_after_move(images[i], case.true[i], luck.mean_images[i], candidates, luck) for i in case.uses]


def in_tones(case: Case, luck: Luck) -> list[RegisteredResult]:
    """Return the scores of what is paired with each of the k true pictures after the best turn, contrast and so on."""
    images, candidates = _paired_by(_in_tone, case), case.truth.candidates
    return [_after_tone(images[i], case.true[i], luck.mean_images[i], candidates, luck) for i in case.uses]


def rank_of_pattern(image: Tensor, true: Tensor, candidates: Tensor) -> int:
    """Return how many candidates correlate with ``image`` at least as much as ``true``, which counts as one itself."""
    own, others = (correlations(image, x)[0] for x in (true[None], candidates))
    same = (candidates == true).flatten(1).all(dim=1)
    return 1 + int(((others >= own) & ~same).sum())


def _in_tone(image: Tensor, others: Tensor) -> Tensor:
    return 1 - correlations(image, others).square().amax(dim=0)


def _paired_by(errors_of: Callable[[Tensor, Tensor], Tensor], case: Case) -> Tensor:
    """Return the (k, ...) images that are paired with the true ones in each part, by errors of one against several."""
    chosen = []
    for part in case.parts:
        true = case.truth.inputs[part.key]
        errors = [errors_of(image, true) for image in case.finding.images[part.rows]] if len(part.rows) > 1 else []
        columns = linear_sum_assignment(torch.stack(errors).T.numpy())[1] if errors else [0]
        chosen.append(part.rows[torch.as_tensor(columns, dtype=torch.int64)])
    return case.finding.images[torch.cat(chosen)]


def _after_move(image: Tensor, true: Tensor, mean_image: Tensor, candidates: Tensor, luck: Luck) -> RegisteredResult:
    """Return the scores of a recovered image after its best shift and flip.

    Where that helps, every other candidate is compared after its own best one, so that the choice is no advantage.
    """
    error, (move,) = registered(image, true[None])
    on_image, on_true = overlapping(image, true, move)
    rank = nearest = None
    if move != STAY:
        errors, same = registered(image, candidates)[0], (candidates == true).flatten(1).all(dim=1)
        rank = 1 + int(((errors <= error) & ~same).sum())
        nearest = None if bool(same.all()) else float(psnr_from_mse(errors[~same].min()))
    structure, alike = likeness(on_image[None].contiguous(), on_true[None].contiguous())
    psnr = float(psnr_from_mse(error))
    return RegisteredResult(
        psnr=psnr,
        ssim=None if structure is None else float(structure),
        correlation=None if alike is None else float(alike),
        flipped=move.flipped,
        down=move.down,
        right=move.right,
        deep=move.deep,
        rank=rank,
        psnr_nearest_other=nearest,
        as_far_by_luck=luck.as_far(nearest, psnr),
        psnr_mean_image=float(psnr_from_mse(registered(mean_image, true[None])[0])),
    )


def _after_tone(image: Tensor, true: Tensor, mean_image: Tensor, candidates: Tensor, luck: Luck) -> RegisteredResult:
    """Return the scores of a recovered image after its best turn and flip, contrast and brightness.

    Candidates are compared by what is left of their own variance: else an even one would win.
    """
    found = correlations(image, true[None])[:, 0]
    way = int(found.abs().argmax())
    r, turn, axes = float(found[way]), ways(image)[way], image.ndim - 1
    own, theirs = (x - channel_means(x, axes) for x in (turned(image, turn).double(), true.double()))
    contrast = float((own * theirs).sum() / own.square().sum().clamp_min(1e-12))
    fitted = (contrast * own + channel_means(true.double(), axes)).clamp(0, 1)
    structure, alike = likeness(fitted[None].to(true.dtype), true[None])
    others, same = correlations(image, candidates).square().amax(dim=0), (candidates == true).flatten(1).all(dim=1)
    psnr, nearest = float(psnr_from_mse(mse(fitted[None], true[None].double()))), None
    if not bool(same.all()):
        apart = 10 * np.log10(max(1 - float(others[~same].max()), 1e-10) / max(1 - r * r, 1e-10))
        nearest = psnr - float(apart)
    mean = float(_in_tone(mean_image, true[None]))
    return RegisteredResult(
        psnr=psnr,
        ssim=None if structure is None else float(structure),
        correlation=None if alike is None else float(alike),
        flipped=bool(turn % 2),
        down=0,
        right=0,
        turns=turn // 2,
        contrast=contrast,
        rank=1 + int(((others >= r * r) & ~same).sum()),
        psnr_nearest_other=nearest,
        as_far_by_luck=luck.as_far(nearest, psnr),
        psnr_mean_image=float(psnr_from_mse(mean * theirs.square().mean())),
    )
