"""What tells members from non-members by the records alone, without any model: whether the draw is confounded."""

from __future__ import annotations

import numpy as np
import torch
from scipy.stats import rankdata
from torch import Tensor
from torch.nn.functional import one_hot

from fedaudit.utils import seeds

_FOLDS = 5
_RIDGE = 0.1  # of a kernel whose diagonal is 1
_SWAPS = 999
_VALUES = 2000  # distinct tokens that are counted, the most frequent ones
FEWEST, MOST = 10, 1000  # pairs: of fewer no test could exclude luck; of more a random choice is taken


def blind_scores(members: Tensor, others: Tensor, seed: int) -> tuple[Tensor, Tensor, float]:
    """Return the scores (k,) of members and others by a classifier of the data alone, and the p-value of their AUC.

    The classifier is ridge regression with the mean of two Gaussian kernels, each as wide as its median distance:
    on the features, and on what the inputs' values are like (:func:`summary`), which augmentation and another
    normalisation change. It is cross-validated over five folds that keep pairs together. Its scores are linear in
    the labels, so the permutation test, which swaps member and other within pairs 999 times at random and learns
    anew each time, costs one matrix product. It is exact: whatever the data are, it gives 1 % or less with a
    probability of at most 1 % where member and other are exchangeable.

    Args:
        members: (k, d) features; see :func:`features`.
        others: (k, d) of the matched non-members.
    """
    k = len(members)
    rng = seeds.generator(seed, "blind")
    both = torch.cat([members, others]).double()
    kernel = (_kernel(both) + _kernel(summary(both))) / 2
    fold = (torch.randperm(k, generator=rng) % _FOLDS).repeat(2)
    of_pairs = torch.zeros(2 * k, k, dtype=torch.float64)  # scores = of_pairs @ signs
    for f in range(_FOLDS):
        inside, outside = torch.nonzero(fold == f)[:, 0], torch.nonzero(fold != f)[:, 0]
        known = kernel[outside][:, outside] + _RIDGE * torch.eye(len(outside), dtype=torch.float64)
        weights = torch.linalg.solve(known, kernel[outside][:, inside]).T
        half = len(outside) // 2  # members first, and the others of the same pairs in the same order
        of_pairs[inside[:, None], outside[:half]] = weights[:, :half] - weights[:, half:]
    signs = torch.ones(k, 1 + _SWAPS, dtype=torch.float64)
    signs[:, 1:] -= 2.0 * torch.randint(2, (k, _SWAPS), generator=rng)
    scores = of_pairs @ signs
    # Rounded, so that scores which are equal but for the order of sums are equal.
    ranks = torch.from_numpy(rankdata(np.round(scores.numpy(), 10), axis=0))
    sums = ((ranks[:k] - ranks[k:]) * signs).sum(dim=0)
    p_value = float((sums >= sums[0]).double().mean())
    return scores[:k, 0], scores[k:, 0], p_value


def summary(rows: Tensor) -> Tensor:
    """Return (n, 4): mean, deviation, least and largest value of each of (n, d) rows."""
    return torch.stack([rows.mean(1), rows.std(1, correction=0), rows.amin(1), rows.amax(1)], dim=1)


def _kernel(rows: Tensor) -> Tensor:
    spread = rows.std(dim=0)
    rows = (rows - rows.mean(dim=0)) / torch.where(spread > 0, spread, torch.ones_like(spread))
    squares = torch.cdist(rows, rows).square()
    return torch.exp(-squares / squares.median().clamp(min=1e-9))


def features(inputs: Tensor, labels: Tensor) -> Tensor:
    """Return (n, d) float64: inputs (n, ...) flattened, of tokens how often each occurs, then labels (n,) or (n, 1)."""
    flat = inputs.flatten(1)
    if not flat.is_floating_point():
        values, place, number = flat.unique(return_inverse=True, return_counts=True)
        counts = torch.zeros(len(flat), len(values), dtype=torch.float64)
        counts.scatter_add_(1, place.reshape(flat.shape), torch.ones(flat.shape, dtype=torch.float64))
        flat = counts[:, number.argsort(descending=True)[:_VALUES]]
    own = labels.reshape(len(flat), -1)
    told = own if own.is_floating_point() else one_hot(own.unique(return_inverse=True)[1].reshape(own.shape)).flatten(1)
    return torch.cat([flat.double(), told.double()], dim=1)
