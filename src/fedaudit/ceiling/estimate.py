"""The ceiling of one update: what the best local estimate of its examples could reach, over precisions."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedaudit.ceiling.derivative import Derivative
from fedaudit.ceiling.message import Message
from fedaudit.ceiling.spectrum import Bracket, Spectrum, by_probes, exact
from fedaudit.modalities.prior import Prior

PRECISIONS = (1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1)  # to which an update is matched, beside its length
WHOLE = 4000  # numbers of the examples, above which J is never taken column by column
BUDGET = 60.0  # seconds, by counting, that this may take
_CUBE = 3e-10  # seconds that an eigendecomposition takes, beside the cube of its size
PROBES, STEPS, MOST = 2, 40, 160
FEW, LONG = 20, 300.0  # steps of one probe alone, where the usual ones would take more than so many seconds
MANY = 5000  # numbers, from which one probe tells as closely
HALF = 0.5  # of what a guess leaves open: where more is left, little is determined


def by_columns(size: int, seconds: float, budget: float) -> bool:
    """Return whether J is taken column by column, of so many unknown numbers: probes don't tell as closely.

    Args:
        seconds: that a product takes, see :class:`Message`.
        budget: seconds that all of it may take. Where it takes no more than probes it is done anyway.
    """
    return size <= _by_probes(size) or (size <= WHOLE and size * seconds + _CUBE * size**3 <= budget)


def products(size: int, seconds: float, budget: float) -> int:
    """Return how many products with J and Jᵀ a ceiling takes, where it settles soon; as :func:`by_columns`."""
    return size if by_columns(size, seconds, budget) else _by_probes(size, seconds)


def _by_probes(size: int, seconds: float = 0.0) -> int:
    if 2 * STEPS * seconds > LONG:
        return FEW
    return (2 if size >= MANY else PROBES + 1) * STEPS


@dataclass(frozen=True)
class Ceiling:
    """What an update determines of its examples, near the truth. Errors are mean squared, of a number.

    Attributes:
        message: what was sent.
        prior: what is known without it.
        spectrum: relative to the message's own noise.
        exact: whether by all columns, not by probes.
    """

    message: Message
    prior: Prior
    spectrum: Spectrum
    exact: bool

    def error(self, precision: float | None = None) -> Bracket:
        """Return the error where the update is matched to this precision; None: to the message's own noise."""
        low, high = self._factors(precision)
        return self.spectrum.error.at(low)._replace(high=self.spectrum.error.at(high).high)

    def beside_noise(self, length: float) -> Bracket:
        """Return the error where even noise is added, of this length beside the update's."""
        return self.spectrum.error.at(max(1.0, length / self.message.relative))

    def open(self) -> Bracket:
        """Return the share of directions of which the update says less than was known before."""
        found = self.spectrum.open.at(1.0)
        low = max(found.low, self.lost)
        return Bracket(low, max(found.high, low))

    def each(self, precision: float | None = None) -> Tensor:
        """Return the error of every number, as the examples."""
        found = self.spectrum.each(self._factors(precision)[0]).clamp(min=0)
        return found.view_as(self.message.examples)

    def other(self, precision: float | None = None) -> Tensor:
        """Return other examples whose update is as far from the true one as the precision, beside its length."""
        found = self.spectrum.other(self._factors(precision)[0])
        return self.message.examples + found.view_as(self.message.examples)

    @property
    def lost(self) -> float:
        """The least share of directions that are lost whatever the attack: there are more unknowns than numbers."""
        return max(0.0, 1 - self.message.numbers / self.message.examples.numel())

    @property
    def matched(self) -> float:
        """To which precision whoever knows no more than the message's own noise allows matches the update."""
        return self._reached(1.0, self.spectrum.open.at(1.0).low)

    def _reached(self, factor: float, left_open: float) -> float:
        """Return how far from the update that of the best estimate is: noise that looks like other examples.

        That is of as many directions as are determined, not of all numbers that are sent.
        """
        determined = self.message.examples.numel() * max(0.0, 1 - left_open)
        return factor * self.message.relative * math.sqrt(determined / max(1, self.message.numbers))

    def _factors(self, precision: float | None) -> tuple[float, float]:
        """Return by how much more noise than the message's this precision comes, at least and at most."""
        if precision is None:
            return 1.0, 1.0

        def factor(side: str) -> float:
            low, high = 1.0, 1e12
            for _ in range(60):
                middle = math.sqrt(low * high)
                reached = self._reached(middle, getattr(self.spectrum.open.at(middle), side))
                low, high = (middle, high) if reached < precision else (low, middle)
            return high

        return factor("low"), factor("high")


def decibels(error: float) -> float:
    """Return a mean squared error of numbers between 0 and 1 as a PSNR, 100 dB at most."""
    return min(100.0, -10 * math.log10(max(error, 1e-300)))


def ceiling_of(
    message: Message,
    prior: Prior,
    *,
    seed: int = 0,
    probes: int | None = None,
    steps: int = STEPS,
    most: int = MOST,
    budget: float = BUDGET,
    draw: bool = True,
    keep: Sequence[bool] | None = None,
    limit: float | None = None,
    report: Callable[[int], None] = lambda _: None,
) -> Ceiling:
    """Return the ceiling of one update.

    Args:
        probes, steps, most, draw: where it isn't by columns, see :func:`.by_probes`; two probes, or of many numbers
            one, unless told otherwise.
        budget: see :func:`by_columns`.
        keep: of every tensor that is sent, whether it still is; None: all are.
        limit: mean squared error of an example, of which it is asked whether it is above: probes go on until that is
            settled, of each example apart where the budget pays for it.
        report: is told of every product with J and Jᵀ, see :func:`products`.
    """
    weights = 1 / message.noise
    examples, draws = message.examples, torch.Generator().manual_seed(seed)
    if keep is not None:
        parts = message.sent(examples)
        weights = torch.cat([w * k for w, k in zip(weights.split([p.numel() for p in parts]), keep, strict=True)])
    derivative = Derivative(message.sent, examples, weights)
    if by_columns(examples.numel(), message.seconds, budget):
        one = prior.root(torch.eye(examples[0].numel(), dtype=torch.float64))
        spectrum = exact(derivative.gram(report), torch.block_diag(*[one] * len(examples)), draws)
        return Ceiling(message, prior, spectrum, exact=True)
    if _by_probes(examples.numel(), message.seconds) == FEW:
        probes, steps, most, draw = 1, FEW, FEW, False
    half = HALF * prior.variance

    def settled(error: Bracket) -> bool:
        return not error.low <= half < error.high and (limit is None or not error.low < limit <= error.high)

    spectrum = by_probes(
        derivative.normal,
        prior.root,
        tuple(examples.shape),
        probes=probes or (1 if examples.numel() >= MANY else PROBES),
        steps=steps,
        generator=draws,
        draw=draw,
        most=most,
        settled=settled,
        apart=limit is not None and len(examples) * steps * message.seconds <= budget,
        report=report,
    )
    return Ceiling(message, prior, spectrum, exact=False)
