"""Whether held-out examples may stand for a client's own, and what does where they may not.

An attack's findings are judged by what somebody could say who hasn't seen the update. Held-out examples tell that only
where they are like the clients': a mark in the corner, a softer scanner, a site's own words or older patients bring any
other example of the same site nearer to a victim than all of them. So a test that knows nothing but the examples comes
first (:func:`shift_test`); where it tells the two apart, only what the same clients used stands for others of theirs
(:func:`comparable`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection
from dataclasses import replace

import torch
from scipy.stats import rankdata
from torch import Tensor

from fedaudit.transcript.truth import Truth
from fedaudit.utils import seeds
from fedaudit.utils.fingerprint import tensor_digest

SHIFTED = 0.01  # at most this p-value: held-out examples may not serve
REMEDY = (
    "give held-out examples from the clients' own sites (a data set whose test split is theirs; Recorder.candidates "
    "while it records), or record more updates of the same clients"
)
_DEALS = 999
_MOST = 1000  # others that are compared, at random
_FINE, _COARSE = 256, 16  # cells of a channel's grid, on which values and roughness are compared
_WORDS = 1000  # words, and words at their places, that are compared: the most frequent ones


def comparable(truth: Truth, keys: Collection[tuple[int, int]], *, seed: int) -> tuple[Truth, float]:
    """Return the truth with the candidates that may stand for the clients' own examples, and the p-value of the test.

    The truth stays as it is, unless :func:`shift_test` tells the clients' examples from all other candidates: then only
    what these clients alone used is left. What occurs more than once, such as a form that nobody filled in, isn't
    compared.

    ``keys`` are rounds and clients of the attacked updates.
    """
    own, labels = of_clients(truth, keys)
    names, known = [tensor_digest(example) for example in truth.candidates], [tensor_digest(one) for one in own]
    often = Counter(names)
    mine = torch.tensor([often[name] < 2 for name in known], dtype=torch.bool)
    often.update(known)
    rest = torch.tensor([often[name] == 1 for name in names], dtype=torch.bool)
    p_value = shift_test(own[mine], labels[mine], truth.candidates[rest], truth.candidate_labels[rest], seed=seed)
    return (replace(truth, candidates=own, candidate_labels=labels) if p_value <= SHIFTED else truth), p_value


def told_apart(p_value: float) -> str:
    """Return in words that the held-out examples may not serve."""
    return (
        "the clients' examples can be told from the held-out ones by what they are like, without any update "
        f"(p = {p_value:.2g}): what luck does is told by those that the same clients used"
    )


def of_clients(truth: Truth, keys: Collection[tuple[int, int]]) -> tuple[Tensor, Tensor]:
    """Return (n, ...) the different examples that these updates' clients ever used, attacked ones first, and labels."""
    clients = {client for _, client in keys}
    order = [*keys, *sorted(key for key in truth.inputs if key[1] in clients and key not in keys)]
    inputs, labels = (torch.cat([of[key] for key in order]) for of in (truth.inputs, truth.labels))
    first: dict[bytes, int] = {}
    for place, example in enumerate(inputs):
        first.setdefault(tensor_digest(example), place)
    rows = list(first.values())
    return inputs[rows], labels[rows]


def shift_test(own: Tensor, labels: Tensor, others: Tensor, other_labels: Tensor, *, seed: int) -> float:
    """Return the p-value of own examples and others being exchangeable: small where the others may not serve.

    A permutation test of the data alone, given the classes: which examples of a class are the own ones is dealt anew
    999 times, or, where there are fewer deals than that, which examples of all classes are. It compares the rank of
    every trait (:func:`traits`) among both, with each class's mean taken off: by the trait that differs most, which
    finds a mark of a few pixels in four examples, and by the sum of squares over all, which finds a small difference
    everywhere. The smaller of the two p-values is tested against what dealing makes of it, so that its level is exact.

    Args:
        own: (n, ...) different examples of the clients.
        labels: (n,) classes; other targets don't matter.
        others: (m, ...) held-out ones, none of them among the own ones.
        other_labels: (m,).

    Returns:
        1 where there is nothing to compare.
    """
    rng = seeds.generator(seed, "shift")
    if labels.ndim != 1 or labels.is_floating_point():
        labels, other_labels = (torch.zeros(len(x), dtype=torch.int64) for x in (own, others))
    mine = torch.nonzero(torch.isin(labels, other_labels)).flatten()
    kept = torch.nonzero(torch.isin(other_labels, labels)).flatten()
    kept = kept[torch.randperm(len(kept), generator=rng)[:_MOST]]
    n = len(mine)
    if not n or not len(kept):
        return 1.0
    told = torch.from_numpy(rankdata(traits(torch.cat([own[mine], others[kept].to(own)])).numpy(), axis=0))
    classes = torch.cat([labels[mine], other_labels[kept]]).unique(return_inverse=True)[1]
    told = told - _by_class(told, classes)[classes]
    told = told[:, told.abs().amax(dim=0) > 1e-9]
    if not told.shape[1]:
        return 1.0
    told = told / told.square().mean(dim=0).sqrt()
    sizes, of = (torch.bincount(c, minlength=len(classes)) for c in (classes, classes[:n]))
    deals = torch.lgamma(sizes + 1.0) - torch.lgamma(of + 1.0) - torch.lgamma(sizes - of + 1.0)
    if float(deals.sum()) < math.log(_DEALS):
        classes = torch.zeros_like(classes)
    dealt = torch.zeros(1 + _DEALS, len(told), dtype=told.dtype)
    dealt[0, :n] = 1
    for c in classes.unique().tolist():
        members = torch.nonzero(classes == c).flatten()
        drawn = torch.rand(_DEALS, len(members), generator=rng).argsort(dim=1)[:, : int((members < n).sum())]
        dealt[1:].scatter_(1, members[drawn], 1.0)
    apart = dealt @ told
    ways = torch.stack([apart.abs().amax(dim=1), apart.square().sum(dim=1)])
    # Rounded, so that sums which are equal but for their order are equal.
    least = rankdata(-ways.numpy().round(8), method="max", axis=1).min(axis=0)
    return float((least <= least[0]).mean())


def traits(inputs: Tensor) -> Tensor:
    """Return (n, d) float64: what examples of any kind are compared by.

    Of images, volumes and signals (n, C, ...): values on a grid, how rough they are between neighbours on a coarser
    one, and along each axis in parts of their own variance; least and largest value and variance of each channel. Of
    rows (n, d): the values, and how far each is from its median. Of tokens (n, length), whole numbers: which words
    occur, and which at which place.
    """
    if not inputs.is_floating_point():
        places = inputs + (1 + inputs.max()) * torch.arange(inputs.shape[1])
        return torch.cat([_frequent(inputs), _frequent(places)], dim=1)
    values = inputs.double()
    if values.ndim == 2:
        return torch.cat([values, (values - values.median(dim=0).values).abs()], dim=1)
    flat = values.flatten(2)
    spread = flat.var(dim=2, correction=0)
    parts = [_pooled(values, _FINE), flat.amin(dim=2), flat.amax(dim=2), spread]
    for axis in (a for a in range(2, values.ndim) if values.shape[a] > 1):
        rough = values.diff(dim=axis).square()
        parts += [_pooled(rough, _COARSE), rough.flatten(2).mean(dim=2) / spread.clamp_min(1e-12)]
    return torch.cat([part.flatten(1) for part in parts], dim=1)


def _by_class(values: Tensor, classes: Tensor) -> Tensor:
    """Return (k, d): the mean of (n, d) values of each class."""
    count = torch.bincount(classes)
    sums = torch.zeros(len(count), values.shape[1], dtype=values.dtype).index_add_(0, classes, values)
    return sums / count[:, None]


def _pooled(values: Tensor, cells: int) -> Tensor:
    """Return means of (n, C, ...) over a grid of so many cells at most, as many along each axis."""
    axes = values.ndim - 2
    pool = getattr(torch.nn.functional, f"adaptive_avg_pool{axes}d")
    pooled: Tensor = pool(values, [min(round(cells ** (1 / axes)), length) for length in values.shape[2:]])
    return pooled


def _frequent(tokens: Tensor) -> Tensor:
    """Return (n, d): whether each of the most frequent tokens occurs in each of (n, length)."""
    words, place = tokens.unique(return_inverse=True)
    there = torch.zeros(len(tokens), len(words), dtype=torch.float64).scatter_(1, place, 1.0)
    return there[:, there.sum(dim=0).argsort(descending=True, stable=True)[:_WORDS]]
