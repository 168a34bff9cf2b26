"""A column of L and its example, found in turn: the model tells which neurons an example doesn't activate.

In G = L·X (:mod:`.sparse_columns`) a column of L is zero where its example doesn't activate the neuron. So an example
gives the zeros of its column, and these its direction; a direction gives the zeros, and these the example, as the one
whose activations are negative there. From random mixtures of the examples a few turns lead to examples.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fedaudit.attacks.analytic.first_layer import FirstLayer
from fedaudit.attacks.analytic.sparse_columns import Directions, LowRank, certify, doubtful, none_yet, refine

_TURNS = 5
_WIDTH = 0.3  # of what counts as nearly zero, in mean sizes
_NOTHING = 1e-10  # relative singular value that is none
_MISFIT = 0.1  # of the neurons that an example activates: how many may contradict the model
_DOUBTFUL = 0.05  # of them: how many may be near what noise hides, so that few others are hidden
_NEWTON, _RIDGE = 12, 1e-3  # steps and penalty of the logistic regression that tells activations


def alternate(
    parts: LowRank, layer: FirstLayer, known: Directions, starts: int, generator: torch.Generator
) -> Directions:
    """Return certain directions to which random mixtures of the examples lead that aren't ``known``.

    Rows orthogonal to the known columns of P are mixtures of the other examples alone, so what is known makes the rest
    easier. An example is fitted to its zeros by least squares of its activations on signs, as in Fisher's discriminant.

    Args:
        parts: of the product.
        layer: whose gradient it is.
        known: independent directions, fewer than the rank.
        starts: how many mixtures.
        generator: of the mixtures.
    """
    if len(known) >= parts.rank:
        return none_yet(parts)
    rows = torch.linalg.svd(known.values.T)[2][len(known) :] @ parts.right
    activations = _weight(parts, layer) @ rows.T  # of each row
    left, sizes, right = torch.linalg.svd(activations, full_matrices=False)
    there = sizes > _NOTHING * sizes[0]
    left, inverse = left[:, there], right[there].T / sizes[there]
    scores = parts.scores / parts.singular
    mixture = torch.randn(len(rows), starts, dtype=rows.dtype, generator=generator)
    silent = _silent(activations, rows, mixture)
    directions = _least(scores, silent)
    for _ in range(_TURNS):
        share = (scores @ directions).square()
        nearly_zero = 1 / (1 + share / (_WIDTH**2 * share.mean(dim=0)))
        mixture = inverse @ (left.T @ (1 - 2 * nearly_zero))
        directions = _least(scores, _silent(activations, rows, mixture))
    return refine(parts, directions / parts.singular[:, None])


def on_a_line(parts: LowRank, layer: FirstLayer, known: Directions) -> Directions:
    """Return certain directions of the last two examples, where all others are ``known``.

    Rows orthogonal to the known columns of P are mixtures of the two, and those whose last number is positive are, but
    for their size, the points of a line. On it each neuron changes sides once, so the zeros that an example may have
    are few, and all are tried.
    """
    rows = torch.linalg.svd(known.values.T)[2][-2:] @ parts.right
    ends = rows[:, -1]
    if float(ends.norm()) < _NOTHING:
        return none_yet(parts)
    start, along = ends @ rows, ends[1] * rows[0] - ends[0] * rows[1]
    weight = _weight(parts, layer)
    before, change = weight @ start, weight @ along
    turns = (-before / change)[change != 0].sort().values
    if not len(turns):
        return none_yet(parts)
    between = torch.cat([turns[:1] - 1, (turns[1:] + turns[:-1]) / 2, turns[-1:] + 1])
    scores = parts.scores / parts.singular
    directions = _least(scores, ((before[:, None] + change[:, None] * between) < 0).to(scores.dtype))
    found = certify(parts, directions / parts.singular[:, None])
    return none_yet(parts).and_(possible(parts, layer, found.of(found.certain)))


def possible(parts: LowRank, layer: FirstLayer, found: Directions) -> Directions:
    """Return which of ``found`` may be columns: some mixture of the examples activates just the others of their zeros.

    Where a model has two outputs and one hidden layer, the columns of all examples are equal but for their zeros and
    their size. So differences of two columns have even more zeros, and a search finds them; no example has these zeros.
    The mixture is a logistic regression of a direction's zeros on the neurons' activations. Where noise makes zeros,
    too, they tell nothing of this.
    """
    if not len(found):
        return found
    mixed = (
        torch.cat([_weight(parts, layer), torch.eye(parts.right.shape[1], dtype=torch.float64)[-1:]]) @ parts.right.T
    )
    left, sizes, _ = torch.linalg.svd(mixed, full_matrices=False)
    rows = left[:, sizes > _NOTHING * sizes[0]]
    rows /= rows.norm(dim=1, keepdim=True).clamp(min=_NOTHING)
    signs = torch.cat([1 - 2 * found.zeros.to(rows.dtype), rows.new_ones(1, len(found))])  # the last number is one
    mixture = rows.new_zeros(rows.shape[1], len(found))
    ridge = _RIDGE * torch.eye(rows.shape[1], dtype=rows.dtype)
    for _ in range(_NEWTON):
        off = torch.sigmoid(-signs * (rows @ mixture))
        slope = ridge @ mixture - rows.T @ (signs * off)
        curves = torch.stack([(rows * w[:, None]).T @ rows for w in (off * (1 - off)).T]) + ridge
        mixture = mixture - torch.linalg.solve(curves, slope.T[..., None])[..., 0].T
    misfits = (signs * (rows @ mixture) < 0).sum(dim=0)
    active = (~found.zeros).sum(dim=0)
    return found.of((misfits <= _MISFIT * active) | (doubtful(parts, found) > _DOUBTFUL * active))


def _weight(parts: LowRank, layer: FirstLayer) -> Tensor:
    """Return (m, numbers + 1) the live neurons' weights and biases."""
    assert layer.module.bias is not None
    whole = torch.cat([layer.module.weight.detach(), layer.module.bias.detach()[:, None]], dim=1)
    live: Tensor = whole[parts.live]
    return live


def _silent(activations: Tensor, rows: Tensor, mixture: Tensor) -> Tensor:
    """Return (m, k) how surely mixtures of ``rows``, their last number one, don't activate a neuron: 0 if they do."""
    before: Tensor = activations @ mixture * (rows[:, -1] @ mixture).sign()
    return before.clamp(max=0).square()


def _least(scores: Tensor, zero: Tensor) -> Tensor:
    """Return (r, k) directions, each that in which scores are least, weighted as one column of ``zero`` (m, k) says."""
    grams = torch.stack([(scores * one[:, None]).T @ scores for one in zero.T])
    least: Tensor = torch.linalg.eigh(grams)[1][:, :, 0].T
    return least
