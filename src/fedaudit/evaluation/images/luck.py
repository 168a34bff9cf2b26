"""What somebody would have who hasn't seen the update: baselines, and how often naming candidates is right by luck."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedaudit.evaluation.images.space import Case
from fedaudit.evaluation.shift import SHIFTED, comparable
from fedaudit.transcript.truth import Truth
from fedaudit.utils.fingerprint import tensor_digest
from fedaudit.utils.seeds import derive_seed, generator

_GROUPED_DB = 3.0  # gap between those that a candidate is like and all others, from which on they are taken for a group
_POOL = 1000  # candidates whose own margins are taken, at random


class Luck(NamedTuple):
    """What luck does about the k true examples of a case.

    Attributes:
        shift_p: p-value of held-out examples being like the clients' own; :mod:`fedaudit.evaluation.shift`.
        different: how many candidates differ from each other.
        mean_images: (k, ...) what is guessed where nothing is known.
        same_class: for each distinct true example, by its position, a random other candidate of its class; None: none.
        named: for each true example, how often naming candidates at random names it.
        margins: by how many dB candidates are nearer to one other than to any further one.
        group: how many pictures each group of candidates has; 1: they are in no groups.
    """

    shift_p: float
    different: int
    mean_images: Tensor
    same_class: dict[int, Tensor | None]
    named: list[float]
    margins: Tensor
    group: int

    def as_far(self, nearest_other: float | None, found: float) -> float:
        """Return the share of candidates that are as far ahead with their own nearest one."""
        if nearest_other is None:
            return 1.0
        return float((1 + (self.margins >= found - nearest_other).sum()) / (1 + len(self.margins)))


def luck_of(case: Case, seed: int) -> Luck:
    """Return it."""
    true, truth = case.true, case.truth
    alike, shift_p = comparable(truth, [part.key for part in case.parts], seed=seed)
    different = _different(truth.candidates)
    mean_images = truth.candidates.mean(dim=0, keepdim=True).expand_as(true)
    if shift_p <= SHIFTED and len(alike.candidates) > 1:  # what the clients' other examples have in common
        mean_images = (alike.candidates.sum(dim=0) - true) / (len(alike.candidates) - 1)
    if different == 1:
        mean_images = true.mean(dim=tuple(range(2, true.ndim)), keepdim=True).expand_as(true)
    rngs, chances = {}, {}
    for part in case.parts:
        rngs[part.key] = np.random.default_rng(derive_seed(seed, "same-class", case.federation, *part.key))
        labels = truth.labels[part.key]
        chances[part.key] = chance_level(len(part.rows), _different(alike.candidates), labels, alike)
    keys, classes = [key for key, _ in case.places], case.labels.tolist()
    margins, group = margins_of(case.kind.vectors(truth.candidates), seed)
    return Luck(
        shift_p,
        different,
        mean_images,
        {i: _same_class(true[i], int(classes[i]), truth, rngs[keys[i]]) for i in case.uses},
        [chances[key][int(label)] for key, label in zip(keys, classes, strict=True)],
        margins,
        group,
    )


def margins_of(candidates: Tensor, seed: int) -> tuple[Tensor, int]:
    """Return by how many dB each of (n, d) candidates, 1,000 at most, is nearer to one other than to any further one.

    Where there are several pictures of each person, that is how far ahead another one of the same person is. With it
    comes how many pictures a person has, up to ten: the median candidate is much nearer to that many than to any other.
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


def chance_level(paired: int, different: int, labels: Tensor, truth: Truth) -> dict[int, float]:
    """Return, for each class, the probability that naming candidates at random identifies an image of an update.

    As many candidates are named as images are paired with true ones, and of the right classes: what labels alone give
    away isn't identification. ``labels`` are the true ones; of the candidates ``different`` ones differ, and equal ones
    count once.
    """
    chances = {}
    for label in labels.unique().tolist():
        own = max(1, _different(truth.candidates[truth.candidate_labels == label]))
        share = int((labels == label).sum()) / own
        chances[int(label)] = min(1.0, max(share, paired / different))
    return chances


def _different(images: Tensor) -> int:
    """Return how many of the images differ from each other."""
    return len({tensor_digest(image) for image in images})


def _same_class(true: Tensor, label: int, truth: Truth, rng: np.random.Generator) -> Tensor | None:
    """Return a random other candidate of the class, or None if there is none."""
    rows = torch.nonzero(truth.candidate_labels == label).flatten().tolist()
    rows = [row for row in rows if not truth.candidates[row].equal(true)]
    return truth.candidates[int(rng.choice(rows))] if rows else None
