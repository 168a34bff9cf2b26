"""Arithmetic on (n, d) matrices of updates, column block by column block: what is held besides the matrix is bounded.

A block fits into a core's cache, so that each rule reads the matrix from memory once. Sums within a block are taken in
the updates' own precision, sums over blocks in float64.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache

import torch
from torch import Tensor

_BLOCK = 2**21  # elements in a block, over all rows
_NARROWEST = 4096  # columns
# Of ‖a − b‖² = ‖a‖² + ‖b‖² − 2·a·b no more than this factor may be lost to cancellation.
_CANCELLATION = 64.0


def blocks(updates: Tensor) -> Iterator[slice]:
    """Yield column ranges of (n, d) ``updates`` that together are all of it."""
    n, d = updates.shape
    width = max(_NARROWEST, _BLOCK // n)
    for start in range(0, d, width):
        yield slice(start, min(d, start + width))


def weighted_sum(updates: Tensor, weights: Tensor) -> Tensor:
    """Return (d,) Σ wᵢ·updatesᵢ over the rows whose weight isn't zero: NaN times zero doesn't count."""
    if bool(weights.all()):
        return weights.to(updates.dtype) @ updates
    rows = torch.nonzero(weights).flatten()
    if not len(rows):
        return torch.zeros_like(updates[0])
    chosen = weights[rows].to(updates.dtype)
    if len(rows) == 1:
        return chosen[0] * updates[rows[0]]
    result = torch.zeros_like(updates[0])
    for row, weight in zip(rows.tolist(), chosen.tolist(), strict=True):
        result.add_(updates[row], alpha=weight)
    return result


def gram(updates: Tensor) -> Tensor:
    """Return the (n, n) inner products of the rows, computed in float64."""
    result = torch.zeros(len(updates), len(updates), dtype=torch.float64, device=updates.device)
    for block in blocks(updates):
        part = updates[:, block].double()
        result += part @ part.T
    return result


def inner_products(updates: Tensor, vector: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the (n,) inner products of the rows with the (d,) ``vector``, their lengths, and its own, in float64."""
    n = len(updates)
    inner = torch.zeros(n, dtype=torch.float64, device=updates.device)
    squares, own = torch.zeros_like(inner), torch.zeros_like(inner[0])
    for block in blocks(updates):
        part, other = updates[:, block].double(), vector[block].double()
        inner += part @ other
        squares += part.square().sum(dim=1)
        own += other @ other
    return inner, squares.sqrt(), own.sqrt()


def squared_distances(updates: Tensor) -> Tensor:
    """Return the (n, n) squared distances of the rows in float64, none of them lost to cancellation.

    One matrix product a block gives ‖a‖² + ‖b‖² − 2·a·b of the rows minus one of them, so that what all share doesn't
    drown the differences: the first row, or the most central where that one lies far off. Pairs that still lose too
    much, the near ones among far ones, are taken again, difference first.
    """
    result, doubtful = _from_products(updates, 0)
    if doubtful.any():
        result, doubtful = _from_products(updates, int(result.median(dim=1).values.argmin()))
    for i in torch.nonzero(doubtful.any(dim=1)).flatten().tolist():
        others = torch.nonzero(doubtful[i, i + 1 :]).flatten() + i + 1
        if len(others):
            result[i, others] = result[others, i] = distances_to(updates, updates[i], others.tolist())
    return result


def _from_products(updates: Tensor, reference: int) -> tuple[Tensor, Tensor]:
    """Return the squared distances, and which of them are doubtful."""
    n = len(updates)
    products = torch.zeros(n, n, dtype=torch.float64, device=updates.device)
    for block in blocks(updates):
        part = updates[:, block] - updates[reference, block]
        products += part @ part.T
    products = (products + products.T) / 2  # some processors' matrix products aren't symmetric, and ties would break
    squares = products.diagonal()
    sums = squares[:, None] + squares[None, :]
    result = (sums - 2 * products).clamp_(min=0)
    doubtful = result * _CANCELLATION < sums
    doubtful[reference] = doubtful[:, reference] = False  # differences already
    doubtful |= ~torch.isfinite(sums)  # a product has overflowed where the difference might not
    return result.fill_diagonal_(0), doubtful.fill_diagonal_(False)


def distances_to(updates: Tensor, vector: Tensor, rows: list[int] | None = None) -> Tensor:
    """Return the squared distances of ``rows`` (all if None) from the (d,) ``vector``, difference first, float64."""
    rows = list(range(len(updates))) if rows is None else rows
    result = torch.zeros(len(rows), dtype=torch.float64, device=updates.device)
    for block in blocks(updates):
        for position, row in enumerate(rows):
            difference = updates[row, block] - vector[block]
            result[position] += difference.dot(difference)
    return result


def sorted_columns(
    updates: Tensor, ranks: range, use: Callable[[list[Tensor]], Tensor], rows: list[int] | None = None
) -> Tensor:
    """Return (d,) ``use`` of every coordinate's sorted values of ``ranks``; it takes and returns vectors (width,).

    Columns of ``updates`` (n, d) are sorted by a network of comparisons of whole rows, which is vectorised over columns
    as sorting each isn't. Comparisons that don't reach a wanted rank are left out.
    """
    network = _network(len(updates) if rows is None else len(rows), ranks.start, ranks.stop)
    result = torch.empty_like(updates[0])
    for block in blocks(updates):
        values = list(updates[:, block].clone() if rows is None else updates[rows, block])
        spare = torch.empty_like(values[0])
        for low, high, which in network:
            a, b = values[low], values[high]
            if which == _BOTH:
                torch.minimum(a, b, out=spare)
                torch.maximum(a, b, out=b)
                values[low], spare = spare, a
            elif which == _LOW:
                torch.minimum(a, b, out=a)
            else:
                torch.maximum(a, b, out=b)
        result[block] = use([values[rank] for rank in ranks])
    return result


_BOTH, _LOW, _HIGH = 0, 1, 2


@cache
def _network(n: int, start: int, stop: int) -> list[tuple[int, int, int]]:
    """Return Batcher's odd-even merge sort of n rows (Batcher 1968), pruned to the ranks from ``start`` to ``stop``."""
    pairs = []
    p = 1
    while p < n:
        k = p
        while k >= 1:
            for j in range(k % p, n - k, 2 * k):
                pairs += [
                    (i + j, i + j + k) for i in range(min(k, n - j - k)) if (i + j) // (2 * p) == (i + j + k) // (2 * p)
                ]
            k //= 2
        p *= 2
    wanted = set(range(start, stop))
    kept = []
    for low, high in reversed(pairs):
        if low in wanted or high in wanted:
            kept.append((low, high, _BOTH if {low, high} <= wanted else _LOW if low in wanted else _HIGH))
            wanted |= {low, high}
    return kept[::-1]


def middle(updates: Tensor) -> Tensor:
    """Return the (d,) coordinate-wise median of (n, d) ``updates``; of an even number the mean of the middle two."""
    n = len(updates)
    return sorted_columns(
        updates, range((n - 1) // 2, n // 2 + 1), lambda v: v[0] if len(v) == 1 else (v[0] + v[1]) / 2
    )
