"""A product of a sparse and a full matrix, taken apart: G = L·X, where many entries of L are exactly zero.

The gradient of a fully connected layer before a ReLU is such a product: L = ∂ℓ/∂z has a column an example, which is
zero wherever the example doesn't activate the neuron, and X has the inputs. With V the right singular vectors of G, G·V
has the column space of L, so L = G·V·P and X = P⁻¹·Vᵀ; a column of P is a direction in which G·V has many zeros.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedaudit.attacks.analytic.first_layer import FirstLayer

_OVERSAMPLE = 12  # further random vectors of the range finder
_POWERS = 2
_GAP = 4.0  # times the largest singular value of the noise: what counts for the rank
_SIGMA = 8.0  # standard deviations of noise within which a number counts as zero
_STEPS = 150  # of the subgradient on the sphere
_FIRST, _DECAY = 0.2, 0.96
_SAME = 0.995  # |cosine| from which two directions are polished as one
_EQUAL = 1e-4  # 1 − |cosine| up to which two polished directions are one
_WIDTHS = (0.3, 0.1, 0.03, 0.01, 1e-3, 1e-4, 1e-5, 1e-6)  # of what counts as nearly zero while polishing
_NOTHING = 1e-14  # relative size of a squared length that is none
_WINDOW = 0.15  # share of the other rows that must become zero by the right multiple
_LOOSE = (1e-4, 1e-8, 0.0, 0.0)  # of the mean size: what counts as zero at first, before noise alone does
_TINY = 1e-5  # of the mean size: zero, too, since equal pixels are rounded alike, which their spread doesn't show
_ROUNDING = 1e-3  # of the mean size: what rounding hides is less
_LEVERAGE = 0.95  # most by which a zero set's rank may hang on one of its rows
_MARGIN = 10.0  # standard deviations of noise by which a zero set's rank must stand out
_SPARE = 3  # rows that a zero set must have beyond those that define a direction
_REFINEMENTS = 2
_INDEPENDENT = 1e-3  # least part of a direction that must lie outside of the others' span
_UNKNOWN_LEFT = 2.0  # times the error of X where L is known: what not knowing L adds, measured


@dataclass(frozen=True)
class LowRank:
    """G ≈ A·Vᵀ, without G's rows that are zero.

    Attributes:
        live: (rows of G,) which rows aren't zero.
        product: (m, columns of G) those rows.
        scores: (m, r) A = G·V.
        right: (r, columns of G) Vᵀ, orthonormal rows.
        singular: (r,) singular values, falling.
        noise: (m,) standard deviation of the noise in the numbers of each live row.
    """

    live: Tensor
    product: Tensor
    scores: Tensor
    right: Tensor
    singular: Tensor
    noise: Tensor

    @property
    def rank(self) -> int:
        """How many examples can be told apart."""
        return len(self.singular)


def low_rank(product: Tensor, most: int, generator: torch.Generator) -> LowRank:
    """Return ``product``, float64, as one of rank ``most`` at most, and the noise that is left over.

    The rank is where singular values no longer stand out of what comes after ``most``; a row's noise is what it has
    outside of the others' span. Randomised subspace iteration (Halko, Martinsson & Tropp 2011, Algorithm 4.4) costs a
    few products instead of a full SVD.
    """
    live = product.abs().amax(dim=1) > 0
    rows = product[live]
    size = min(most + _OVERSAMPLE, *rows.shape)
    basis = torch.randn(rows.shape[1], size, dtype=rows.dtype, generator=generator)
    for _ in range(_POWERS):
        basis, _ = torch.linalg.qr(rows @ basis)
        basis, _ = torch.linalg.qr(rows.T @ basis)
    left, _ = torch.linalg.qr(rows @ basis)
    _, singular, vh = torch.linalg.svd(left.T @ rows, full_matrices=False)
    noise = float(singular[most]) if size > most else 0.0
    least = torch.finfo(rows.dtype).eps * max(rows.shape)
    kept = singular[:most] > max(_GAP * noise, least * float(singular[:1].sum()))
    rank = int(kept.sum())
    singular, right = singular[:rank], vh[:rank]
    scores = rows @ right.T
    free = max(1, rows.shape[1] - rank)
    spread = ((rows - scores @ right).square().sum(dim=1) / free).sqrt()
    spread = torch.maximum(spread, torch.finfo(rows.dtype).eps * rows.norm(dim=1))
    return LowRank(live, rows, scores, right, singular, spread)


# Directions ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Directions:
    """Directions, (r, k) of length one, in which many of the scores are zero: ``zeros`` (m, k), as far as noise shows.

    ``certain`` (k,): the zero set has rank r − 1 by a margin, so that no other direction has it.
    """

    values: Tensor
    zeros: Tensor
    certain: Tensor

    def __len__(self) -> int:
        return self.values.shape[1]

    def of(self, chosen: Tensor) -> Directions:
        """Return some of them."""
        return Directions(self.values[:, chosen], self.zeros[:, chosen], self.certain[chosen])

    def and_(self, more: Directions) -> Directions:
        """Return these and ``more`` that are new among themselves and beside these."""
        return _distinct(
            Directions(
                torch.cat([self.values, more.values], dim=1),
                torch.cat([self.zeros, more.zeros], dim=1),
                torch.cat([self.certain, more.certain]),
            ),
            len(self),
        )


def none_yet(parts: LowRank) -> Directions:
    """Return no direction."""
    m, r = parts.scores.shape
    return Directions(
        parts.scores.new_zeros(r, 0), torch.zeros(m, 0, dtype=torch.bool), torch.zeros(0, dtype=torch.bool)
    )


def search(parts: LowRank, known: Directions, starts: int, generator: torch.Generator) -> Directions:
    """Return certain directions found from random starts, among all rows.

    A subgradient of ‖U·q‖₁ on the sphere (Bai, Jiang & Sun 2019), U the scores with orthonormal columns, all starts in
    one matrix; then reweighted least squares, which narrows what counts as nearly zero; last the zero set's null
    vector.
    """
    if parts.rank == 1:  # the only one
        return certify(parts, parts.scores.new_ones(1, 1))
    return _certain(parts, known, _descended(parts.scores, starts, generator))


def search_beside(parts: LowRank, known: Directions, one: int, starts: int, generator: torch.Generator) -> Directions:
    """Return certain directions found where the known direction ``one`` has its zeros.

    Among all rows, nearly parallel columns of L (examples of a class) hide each other: a search ends at the sparser
    one. Among the rows in which that one is zero it can't; what it finds there is known up to a multiple of the one,
    and the right multiple has the most zeros in the other rows.
    """
    basis = torch.linalg.svd(known.values[:, one : one + 1].T)[2][1:].T
    there = known.zeros[:, one]
    if basis.shape[1] < 1 or int(there.sum()) < 2 * parts.rank:
        return none_yet(parts)
    found = basis @ _descended(parts.scores[there] @ basis, starts, generator)
    rest, own = parts.scores[~there] @ found, parts.scores[~there] @ known.values[:, one]
    ratios = (-rest / own[:, None]).sort(dim=0).values
    window = max(2, int(_WINDOW * len(ratios)))
    if len(ratios) <= window:
        return none_yet(parts)
    least = (ratios[window:] - ratios[:-window]).argmin(dim=0)
    multiple = ratios.gather(0, least[None] + window // 2)[0]
    return _certain(parts, known, found + known.values[:, one, None] * multiple)


def refine(parts: LowRank, directions: Tensor) -> Directions:
    """Return the certain directions near ``directions`` (r, k)."""
    if not directions.shape[1]:
        return none_yet(parts)
    white = _narrowed(_directed(parts.scores / parts.singular), directions * parts.singular[:, None], _WIDTHS)
    return _certain(parts, none_yet(parts), white / parts.singular[:, None])


def _descended(scores: Tensor, starts: int, generator: torch.Generator) -> Tensor:
    """Return different directions (r, k) in which ``scores`` (m, r) have small sums of sizes, k up to ``starts``."""
    spectrum, vectors = torch.linalg.eigh(scores.T @ scores)
    whiten: Tensor = vectors / spectrum.clamp(min=max(_NOTHING * float(spectrum[-1]), 1e-300)).sqrt()
    white = scores @ whiten
    rows = white.float()
    q = torch.randn(scores.shape[1], starts, generator=generator)
    q /= q.norm(dim=0)
    step = _FIRST
    for _ in range(_STEPS):
        slope = rows.T @ (rows @ q).sign_()
        slope -= q * (slope * q).sum(dim=0)
        q = q - step * slope / (slope.norm(dim=0) + 1e-12)
        q /= q.norm(dim=0)
        step *= _DECAY
    q = q[:, (rows @ q).abs_().sum(dim=0).argsort()].double()
    q = q[:, ~((q.T @ q).abs() > _SAME).tril(-1).any(dim=1)]
    return whiten @ _narrowed(_directed(white), q, _WIDTHS)


def _directed(rows: Tensor) -> Tensor:
    """Return the rows (m, r) that aren't zero, each of length 1."""
    lengths = rows.norm(dim=1, keepdim=True)
    there = lengths[:, 0] > _NOTHING**0.5 * lengths.max()
    directed: Tensor = rows[there] / lengths[there]
    return directed


def _narrowed(rows: Tensor, directions: Tensor, widths: Sequence[float]) -> Tensor:
    """Return (r, k) ``directions``, each moved to where more of the ``rows`` (m, r) have no share in it at all."""
    q: Tensor = directions
    for width in widths:
        shares = (rows @ q).square_()
        weights = 1 / (shares + width * width * shares.mean(dim=0) + _NOTHING**2)
        grams = torch.stack([(rows * w[:, None]).T @ rows for w in weights.T])
        q = torch.linalg.eigh(grams)[1][:, :, 0].T
    return q


def _certain(parts: LowRank, known: Directions, directions: Tensor) -> Directions:
    """Return which of ``directions`` (r, k) lead to certain ones that aren't known."""
    q = directions / directions.norm(dim=0)
    both = torch.cat([known.values, q], dim=1)
    new = ~((both.T @ both).abs() > 1 - _EQUAL).tril(-1).any(dim=1)
    q = q[:, new[len(known) :]]
    if not q.shape[1]:
        return none_yet(parts)
    white = parts.scores / parts.singular
    q = _narrowed(_directed(white), q * parts.singular[:, None], _WIDTHS[-4:])
    found = certify(parts, q / parts.singular[:, None])
    return _distinct(found.of(found.certain))


def certify(parts: LowRank, directions: Tensor) -> Directions:
    """Return ``directions`` (r, k) as the null vectors of their zero sets, and which of these are certain.

    In these coordinates a row's noise is the same in every direction, so the null vector is the total least squares'.
    The certificate: the zero set's rows have rank r − 1, by a margin over their noise, and not because of any single
    row. Otherwise further directions would vanish on it, and this one's zeros were a choice.
    """
    rows = parts.scores / parts.noise[:, None]
    q = directions / directions.norm(dim=0)
    r = parts.rank
    values, zero_sets, certain = [], [], []
    for direction in q.T:
        one, sure = direction, r == 1
        for loose in _LOOSE if r > 1 else ():
            sizes = (rows @ one).abs()
            zero = sizes <= max(_SIGMA, loose * float(sizes.mean()))
            own = rows[zero]
            if len(own) < r - 1 + _SPARE:
                break
            spectrum, vectors = torch.linalg.eigh(own.T @ own)
            one = vectors[:, 0]
            # squares of rows hold half the digits: below this an eigenvalue is rounding
            rounded = 64 * r * torch.finfo(spectrum.dtype).eps * float(spectrum[-1])
            stands = float(spectrum[1]) > max(_MARGIN**2 * len(own), rounded)
            leverage = (own @ (vectors[:, 1:] / spectrum[1:].clamp(min=1e-300).sqrt())).square().sum(dim=1)
            sure = stands and float(leverage.max()) <= _LEVERAGE
        values.append(one)
        sizes = (rows @ one).abs()
        zero = sizes <= max(_SIGMA, _TINY * float(sizes.mean()))
        zero_sets.append(zero)
        enough = r == 1 or int(zero.sum()) >= r - 1 + _SPARE
        certain.append(sure and enough and not bool(zero.all()))
    return Directions(torch.stack(values, dim=1), torch.stack(zero_sets, dim=1), torch.tensor(certain))


def doubtful(parts: LowRank, found: Directions) -> Tensor:
    """Return (k,) how many numbers of each direction are within twice what counts as zero, 0 if noise is rounding."""
    sizes = (parts.scores @ found.values).abs() / parts.noise[:, None]
    near = (~found.zeros & (sizes <= 2 * _SIGMA)).sum(dim=0)
    return near.masked_fill(_ROUNDING * sizes.mean(dim=0) > _SIGMA, 0)


def _distinct(found: Directions, first: int = 0) -> Directions:
    """Return each direction once; the ``first`` are known to differ."""
    cosines = (found.values.T @ found.values).abs()
    keep = ~(cosines > 1 - _EQUAL).tril(-1).any(dim=1)
    keep[:first] = True
    return found.of(keep)


# The whole -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Factors:
    """A product's factors L, (m, r) of the live rows, and X, (r, columns of G), whose last column is scaled to one.

    ``error`` (r,): estimated standard deviation of the numbers in each row of X.
    """

    left: Tensor
    right: Tensor
    error: Tensor


def chosen(parts: LowRank, found: Directions) -> Directions:
    """Return up to r independent ones of the certain directions ``found``, those with the most zeros first."""
    white = found.values * parts.singular[:, None]
    white = white / white.norm(dim=0)
    order = found.zeros.sum(dim=0).argsort(descending=True, stable=True)
    taken: list[int] = []
    span = white.new_zeros(parts.rank, 0)
    for i in order.tolist():
        rest = white[:, i] - span @ (span.T @ white[:, i])
        if float(rest.norm()) > _INDEPENDENT and len(taken) < parts.rank:
            taken.append(i)
            span = torch.cat([span, (rest / rest.norm())[:, None]], dim=1)
    return found.of(torch.tensor(taken, dtype=torch.int64))


def factors(parts: LowRank, found: Directions) -> Factors:
    """Return the factors that r independent directions give, refined by least squares.

    L's zeros are set, then L and X are solved for in turn, which uses all rows of G for every number. Each number of X
    is a sum of G's, weighted by a row of L's pseudo-inverse, so its error follows from the noise.
    """
    inputs = torch.linalg.solve(found.values, parts.right)
    active = (~found.zeros).to(inputs.dtype)
    left = (parts.scores @ found.values) * active
    weights = 1 / parts.noise[:, None]
    product = parts.product
    for _ in range(_REFINEMENTS):
        scaled = left * weights
        inputs = torch.linalg.lstsq(scaled, product * weights).solution
        gram, seen = inputs @ inputs.T, product @ inputs.T
        grams = gram * active[:, :, None] * active[:, None, :] + torch.diag_embed(1 - active)
        left = torch.linalg.solve(grams, seen * active)
    inverse = torch.linalg.pinv(left * weights)
    inputs = inverse @ (product * weights)
    scale = inputs[:, -1:]
    error = inverse.norm(dim=1) / scale.abs()[:, 0] * (1 + (inputs / scale).square().mean(dim=1)).sqrt()
    return Factors(left * scale.T, inputs / scale, _UNKNOWN_LEFT * error)


_TURNS = 5
_WIDTH = 0.3  # of what counts as nearly zero, in mean sizes
_NONE = 1e-10  # relative singular value that is none
_MISFIT = 0.1  # of the neurons that an example activates: how many may contradict the model
_DOUBTFUL = 0.05  # of them: how many may be near what noise hides, so that few others are hidden
_NEWTON, _RIDGE = 12, 1e-3  # steps and penalty of the logistic regression that tells activations


def alternate(
    parts: LowRank, layer: FirstLayer, known: Directions, starts: int, generator: torch.Generator
) -> Directions:
    """Return certain, independent directions that aren't ``known``, to which random mixtures of the examples lead.

    A column of L is zero where its example doesn't activate the neuron. So an example gives the zeros of its column,
    and these its direction; a direction gives the zeros, and these the example, as the one whose activations are
    negative there. From random mixtures of the examples a few turns lead to examples.

    Rows orthogonal to the known columns of P are mixtures of the other examples alone, so what is known makes the rest
    easier. An example is fitted to its zeros by least squares of its activations on signs, as in Fisher's discriminant.
    """
    if len(known) >= parts.rank:
        return none_yet(parts)
    rows = torch.linalg.svd(known.values.T)[2][len(known) :] @ parts.right
    activations = _weight(parts, layer) @ rows.T  # of each row
    left, sizes, right = torch.linalg.svd(activations, full_matrices=False)
    there = sizes > _NONE * sizes[0]
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

    Rows orthogonal to the known columns of P are mixtures of the two; those with a positive last number are, but for
    their size, the points of a line. On it each neuron changes sides once, so few zeros are possible, and all are
    tried.
    """
    rows = torch.linalg.svd(known.values.T)[2][-2:] @ parts.right
    ends = rows[:, -1]
    if float(ends.norm()) < _NONE:
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

    Where a model has two outputs and one hidden layer, all examples' columns are equal but for their zeros and their
    size. So differences of two have even more zeros, and a search finds them; no example has these zeros. The mixture
    is a logistic regression of a direction's zeros on the neurons' activations. Zeros that noise makes say nothing of
    it.
    """
    if not len(found):
        return found
    mixed = (
        torch.cat([_weight(parts, layer), torch.eye(parts.right.shape[1], dtype=torch.float64)[-1:]]) @ parts.right.T
    )
    left, sizes, _ = torch.linalg.svd(mixed, full_matrices=False)
    rows = left[:, sizes > _NONE * sizes[0]]
    rows /= rows.norm(dim=1, keepdim=True).clamp(min=_NONE)
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
