"""How near every recovered image came: what a result says of one victim."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fedaudit.evaluation.image_metrics import likeness, lpips, mse, psnr_from_mse
from fedaudit.evaluation.images.luck import Luck
from fedaudit.evaluation.images.moved import after_moves, in_tones, rank_of_pattern
from fedaudit.evaluation.images.space import Case
from fedaudit.results import ImageResult
from fedaudit.utils.fingerprint import tensor_digest


class Standing(NamedTuple):
    """Where the true image stands among the candidates for a recovered one.

    Attributes:
        rank: how many candidates are at least as near to the recovered image as the true one, which counts as one.
        nearest: the position of the other candidate that is nearest to the recovered image.
        distractor_margin_db: by how many dB that is nearer than any further one, the true one included; else 0.
        equal: how many candidates are equal to the true image, at least 1.
    """

    rank: int
    nearest: int | None
    distractor_margin_db: float
    equal: int = 1


def standing(image: Tensor, true: Tensor, candidates: Tensor) -> Standing:
    """Return where ``true`` stands among ``candidates`` for ``image``."""
    distances = squared_distances(image, candidates)
    own = squared_distances(image, true[None])
    same = squared_distances(true, candidates) == 0
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


def squared_distances(image: Tensor, others: Tensor) -> Tensor:
    """Return (n,) squared distances of ``image`` to each of (n, ...) others, in float64."""
    parts = [(part - image).flatten(1).square().sum(dim=1, dtype=torch.float64) for part in others.split(256)]
    return torch.cat(parts)


def scored(case: Case, rows: Tensor, luck: Luck) -> list[ImageResult]:
    """Return the scores of each distinct true example; ``rows``, (k,), are the images that stand for them."""
    finding, true, truth = case.finding, case.true, case.truth
    images, labels = finding.images[rows], finding.labels[rows]
    errors, structure, linear = mse(images, true), *likeness(images, true, truth.candidates.mean(dim=0))
    normalised = mse(*(case.info.normalise(x) for x in (case.given[0].images[rows], case.given_true)))
    perceptual, values = lpips(images, true), psnr_from_mse(errors)
    victims = {tensor_digest(one) for one in true}
    candidates, recovered, wanted = (case.kind.vectors(part) for part in (truth.candidates, images, true))
    moved, tone_aligned = (
        scores_of(case, luck) if case.pictures else [None] * len(case.uses) for scores_of in (after_moves, in_tones)
    )
    results = []
    for (i, uses), registered, in_tone in zip(case.uses.items(), moved, tone_aligned, strict=True):
        key, position = case.places[i]
        stands, row = standing(recovered[i], wanted[i], candidates), int(rows[i])
        nearest, other, mean_image = stands.nearest, luck.same_class[i], luck.mean_images[i : i + 1]
        apart = None if nearest is None else float(psnr_from_mse(mse(truth.candidates[nearest, None], images[i, None])))
        # an image of another victim is no image of somebody else
        nobodys = nearest is not None and tensor_digest(truth.candidates[nearest]) not in victims
        stem = f"images/{case.federation}-{key[0]}-{key[1]}-{position}"
        results.append(
            ImageResult(
                true_image=f"{stem}-true.png",
                reconstruction=f"{stem}-{finding.attack}.png",
                true_label=int(case.labels[i]) if case.classes else None,
                label=int(labels[i]) if case.classes else None,
                mse=float(errors[i]),
                psnr=float(values[i]),
                ssim=None if structure is None else float(structure[i]),
                correlation=None if linear is None else float(linear[i]),
                mse_normalised=float(normalised[i]),
                psnr_normalised=float(psnr_from_mse(normalised[i])),
                lpips=None if perceptual is None else float(perceptual[i]),
                victim=tensor_digest(true[i]).hex()[:12],
                rank=stands.rank,
                rank_pattern=rank_of_pattern(images[i], true[i], truth.candidates) if case.pictures else None,
                candidates=len(truth.candidates),
                different_candidates=luck.different,
                chance_level=min(1.0, stands.equal * luck.named[i]),
                psnr_nearest_other=apart,
                as_far_by_luck=luck.as_far(apart, float(values[i])),
                alike_candidates=luck.group,
                distractor_margin_db=stands.distractor_margin_db if nobodys else 0.0,
                uses=uses,
                rounds=list(finding.rounds[row]) if finding.rounds else [],
                certified=None if finding.certified is None else bool(finding.certified[row]),
                psnr_mean_image=float(psnr_from_mse(mse(mean_image, true[i : i + 1]))),
                psnr_same_class=None if other is None else float(psnr_from_mse(mse(other[None], true[i : i + 1]))),
                registered=registered,
                tone_aligned=in_tone,
            )
        )
    return results
