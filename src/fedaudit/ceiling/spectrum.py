"""How much of a batch is left open, over all precisions at once: exactly by eigenvalues, or by Lanczos' quadrature."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

_ZERO = 1e-13  # of a step, beside the first: the space is exhausted
_AGAIN = 20  # further steps, before it is asked whether they are enough


class Bracket(NamedTuple):
    """A mean squared error, or a share: between two quadratures, and its standard error over probes."""

    low: float
    high: float
    spread: float = 0.0


@dataclass(frozen=True)
class Rule:
    """Nodes λ and weights (p, k) of a probe's quadrature of vᵀ(1 + A/σ²)⁻¹v, and of one that errs above.

    Gauss's rule tells too little, for all even derivatives of 1/(1 + λ/σ²) are positive; Radau's, with a node at 0,
    too much (Golub and Meurant 1994). Without ``above`` it is exact. ``apart``: every probe is of one example alone.
    """

    values: Tensor
    weights: Tensor
    above: tuple[Tensor, Tensor] | None = None
    apart: bool = False

    def at(self, sigma: float) -> Bracket:
        """Return the mean over probes."""
        each = self.each(sigma)
        low, high = (sum(one[side] for one in each) / len(each) for side in (0, 1))
        highs = torch.tensor([one.high for one in each], dtype=torch.float64)
        spread = float(highs.std() / len(each) ** 0.5) if len(each) > 1 and not self.apart else 0.0
        return Bracket(low, max(high, low), spread)

    def each(self, sigma: float) -> list[Bracket]:
        """Return the same of every probe."""
        low = _left(self.values, self.weights, sigma)
        high = low if self.above is None else _left(*self.above, sigma)
        return [Bracket(*both) for both in zip(low.tolist(), high.tolist(), strict=True)]


@dataclass(frozen=True)
class Spectrum:
    """What is left of a prior C at noise σ: M(σ) = C^½(1 + A/σ²)⁻¹C^½, where A = C^½JᵀJC^½.

    Attributes:
        error: of M's mean diagonal: the mean squared error of a number.
        open: of (1 + A/σ²)⁻¹'s: the share of directions that stay open.
        each: of σ, (D,) M's diagonal; by probes an estimate, best summed over many numbers.
        other: of σ, (D,) a draw from what is left, by which the batch may differ and nobody could tell.
        most: the largest eigenvalue of A; ``least``: the smallest, or None: not known.
    """

    error: Rule
    open: Rule
    each: Callable[[float], Tensor]
    other: Callable[[float], Tensor]
    most: float
    least: float | None = None


def _left(values: Tensor, weights: Tensor, sigma: float) -> Tensor:
    if sigma == 0:
        return (weights * (values <= 0)).sum(dim=1)
    return (weights / (1 + values.clamp(min=0) / sigma**2)).sum(dim=1)


def exact(gram: Tensor, root: Tensor, generator: torch.Generator) -> Spectrum:
    """Return the spectrum of (D, D) JᵀJ and the prior's root C^½."""
    values, vectors = torch.linalg.eigh(root @ gram @ root)
    values = values.clamp(min=0)
    basis, size = (root @ vectors).T, len(root)
    normal = torch.randn(size, generator=generator, dtype=torch.float64)
    even = torch.full((1, size), 1 / size, dtype=torch.float64)

    def each(sigma: float) -> Tensor:
        kept: Tensor = basis.square() / (1 + values[:, None] / sigma**2)
        return kept.sum(dim=0)

    def other(sigma: float) -> Tensor:
        drawn: Tensor = basis.T @ (normal / (1 + values / sigma**2).sqrt())
        return drawn

    return Spectrum(
        Rule(values[None], basis.square().sum(dim=1)[None] / size),
        Rule(values[None], even),
        each,
        other,
        float(values[-1]),
        float(values[0]),
    )


class _Krylov(NamedTuple):
    """Lanczos' tridiagonal of A from a start: its eigenvalues and vectors, those with a node at 0, and C^½·basis."""

    norm: float
    values: Tensor
    vectors: Tensor
    above: tuple[Tensor, Tensor]
    basis: Tensor

    def applied(self, keep: Callable[[Tensor], Tensor]) -> Tensor:
        """Return C^½·f(A)·start."""
        return self.norm * self.basis.T @ (self.vectors @ (keep(self.values) * self.vectors[0]))


def by_probes(
    normal: Callable[[Tensor], Tensor],
    root: Callable[[Tensor], Tensor],
    shape: tuple[int, ...],
    *,
    probes: int,
    steps: int,
    generator: torch.Generator,
    draw: bool = True,
    most: int = 0,
    settled: Callable[[Bracket], bool] = lambda _: True,
    apart: bool = False,
    report: Callable[[int], None] = lambda _: None,
) -> Spectrum:
    """Return the same by stochastic Lanczos quadrature (Ubaru, Chen and Saad 2017), reorthogonalised.

    Args:
        normal: JᵀJ·v of v, in the examples' shape.
        root: C^½·v.
        shape: of the examples.
        probes: random signs; the standard error falls with the root of their number.
        steps: of Lanczos, each a product with J and Jᵀ: for every probe, and for the draw.
        draw: whether directions are counted and other examples drawn; without it these are made of the first probe.
        most, settled: as many steps more as the first probe's bracket of the error isn't settled, up to ``most``.
        apart: one probe an example instead, of it alone, each of which goes on until it is settled.
        report: is told of every product.
    """
    size = torch.Size(shape).numel()
    signs = torch.randint(2, (1 if apart else probes, size), generator=generator).double() * 2 - 1
    if apart:
        signs = torch.block_diag(*signs.view(shape[0], 1, -1))
    share = size / shape[0] if apart else size  # numbers that a probe is of
    going_on = shape[0] if apart else 1
    start = torch.randn(size, generator=generator, dtype=torch.float64)

    def enough(one: _Krylov) -> bool:
        return settled(_rule([one], share).at(1.0))

    found = [
        _lanczos(normal, root, root(sign.view(shape)), steps, report, max(most, steps), enough)
        for sign in signs[:going_on]
    ]
    steps = max(len(one.values) for one in found)
    found += [_lanczos(normal, root, root(sign.view(shape)), steps, report) for sign in signs[going_on:]]
    of_draw = _lanczos(normal, root, start.view(shape), steps, report) if draw else found[0]

    def each(sigma: float) -> Tensor:
        told = torch.stack(
            [sign * one.applied(lambda v: 1 / (1 + v / sigma**2)) for sign, one in zip(signs, found, strict=True)]
        )
        return told.sum(dim=0) if apart else told.mean(dim=0)

    def other(sigma: float) -> Tensor:
        return of_draw.applied(lambda v: 1 / (1 + v / sigma**2).sqrt())

    left_open = _rule([of_draw], of_draw.norm**2)
    error = _rule(found, share, apart=apart)
    return Spectrum(error, left_open, each, other, float(max(one.values[-1] for one in found)))


def _rule(found: list[_Krylov], size: float, *, apart: bool = False) -> Rule:
    most = max(len(one.values) for one in found)

    def padded(part: Callable[[_Krylov], Tensor]) -> Tensor:
        rows = torch.zeros(len(found), most, dtype=torch.float64)
        for row, one in zip(rows, found, strict=True):
            row[: len(one.values)] = part(one)
        return rows

    return Rule(
        padded(lambda one: one.values),
        padded(lambda one: one.norm**2 / size * one.vectors[0].square()),
        (padded(lambda one: one.above[0]), padded(lambda one: one.norm**2 / size * one.above[1].square())),
        apart,
    )


def _lanczos(
    normal: Callable[[Tensor], Tensor],
    root: Callable[[Tensor], Tensor],
    start: Tensor,
    steps: int,
    report: Callable[[int], None],
    most: int = 0,
    enough: Callable[[_Krylov], bool] = lambda _: True,
) -> _Krylov:
    shape, norm, size = start.shape, float(start.norm()), start.numel()
    basis = [start.flatten() / norm]
    diagonal, beside, exhausted = list[float](), list[float](), False

    def made() -> _Krylov:
        values, vectors = torch.linalg.eigh(_tridiagonal(diagonal, beside))
        ends, their = values, vectors
        if not exhausted:
            ends, their = torch.linalg.eigh(_tridiagonal(_with_zero(diagonal, beside), beside))
        wide = torch.stack([root(one.view(shape)).flatten() for one in basis[: len(diagonal)]])
        return _Krylov(norm, values.clamp(min=0), vectors, (ends.clamp(min=0), their[0]), wide)

    while not exhausted:
        last = basis[-1]
        product = root(normal(root(last.view(shape)))).flatten()
        report(1)
        diagonal.append(float(product @ last))
        space = torch.stack(basis)
        for _ in range(2):  # once leaves what rounding puts back
            product = product - (space @ product) @ space
        length = float(product.norm())
        exhausted = len(diagonal) == size or length <= _ZERO * max(diagonal[0], 1e-300)
        done = len(diagonal)
        if not exhausted and done >= steps and (done - steps) % _AGAIN == 0 and (done >= most or enough(made())):
            break
        beside.append(length)
        basis.append(product / length if length else product)
    return made()


def _tridiagonal(diagonal: list[float], beside: list[float]) -> Tensor:
    off = torch.tensor(beside[: len(diagonal) - 1], dtype=torch.float64)
    return torch.diag(torch.tensor(diagonal, dtype=torch.float64)) + torch.diag(off, 1) + torch.diag(off, -1)


def _with_zero(diagonal: list[float], beside: list[float]) -> list[float]:
    """Return the diagonal with its last number such that 0 is an eigenvalue (the pivots of LDLᵀ end in 0)."""
    pivot, last = diagonal[0], 0.0
    for one, off in zip(diagonal[1:], beside, strict=False):
        last = off**2 / max(pivot, 1e-300)
        pivot = one - last
    return [*diagonal[:-1], last]
