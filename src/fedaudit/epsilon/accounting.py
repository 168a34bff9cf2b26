"""The account of differential privacy: which ε a federation's rounds cost."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import Counter
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal, Self, cast

from fedaudit.results.record import Adjacency

How = Literal["rdp", "pld"]

_MOST_ROUNDS = 10**6
# The privacy loss distribution's step, and how many steps at most it is spread over, roughly.
_FINE, _LOSSES = 1e-4, 10**5
# Rényi orders; whole ones only, for which sampled Gaussians have a closed form
_ORDERS = [*range(2, 65), 80, 96, 128, 192, 256, 512]
# Those of Laplace noise, which has a closed form for every order: many small losses are tightest just above one.
_ORDERS_OF_LAPLACE = [1 + 10 ** (k / 8) for k in range(-40, 25)]


@dataclass(frozen=True)
class TakingPart:
    """Who takes part in a federation, and how often: what an account is made from.

    Attributes:
        epoch: steps that are reckoned for a pass over the examples, where rounds consist of whole passes; None where
            they don't, and a pass goes on in the next round.
        elements: of the model's whole state, statistics included.
    """

    examples: tuple[int, ...]
    per_round: int
    steps: int
    batch: int
    epoch: int | None
    elements: int


class PrivacyAccount(ABC):
    """What a federation's rounds cost in privacy, a subclass a mechanism; ``adjacency`` as of :class:`Account`."""

    delta: float
    adjacency: Adjacency

    @property
    def gaussian(self) -> bool:
        """Whether it is of one Gaussian mechanism, whose losses are known exactly."""
        return False

    def by(self, adjacency: Adjacency) -> Self:
        """Return the account of the same rounds by another adjacency."""
        other: Self = replace(cast(Any, self), adjacency=adjacency)
        return other

    @abstractmethod
    def spent(self, rounds: int, how: How = "rdp") -> float:
        """Return ε after ``rounds``, by Rényi accounting or the tighter privacy loss distribution."""

    def rounds(self, budget: float | None) -> int:
        """Return how many rounds the budget allows."""
        if budget is None:
            return _MOST_ROUNDS
        low, high = 0, 1
        while high < _MOST_ROUNDS and self.spent(high) <= budget:
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.spent(middle) <= budget else (low, middle)
        return low


@dataclass(frozen=True)
class Account(PrivacyAccount):
    """What a federation's rounds cost under Gaussian noise.

    *Adjacency*: neighbours differ by one client or example that is there, or sends nothing in its place
    (``add-remove``: sensitivity is the clip, of which σ is a multiple); or sends anything else (``replace``: twice the
    clip, so σ counts half), as a server faces that sees who took part.

    Attributes:
        noise: σ, in units of the clip.
        rate: the probability that the protected one takes part in a step that is counted.
        steps: noisy steps in a round that is counted.
        every: the protected one takes part in one of so many steps, whichever it is: a pass over shuffled examples.
            Batches of a pass are disjoint, so it costs what that one step costs.
        of: (k, n), if k of n clients are drawn without replacement; else the drawing is Poisson's. Who is drawn takes
            another's place, by either adjacency, so that the sum moves by up to twice the clip (Wang, Balle and
            Kasiviswanathan 2019); where that hides less than no drawing at all, it is reckoned without.
    """

    noise: float
    delta: float
    rate: float
    steps: int
    every: int = 1
    of: tuple[int, int] | None = None
    adjacency: Adjacency = "add-remove"

    @property
    def gaussian(self) -> bool:
        """Whether it is of one Gaussian mechanism: drawing makes a mixture."""
        return self.rate >= 1

    def spent(self, rounds: int, how: How = "rdp") -> float:
        """Return ε after ``rounds``, by Rényi accounting or the tighter privacy loss distribution."""
        if not rounds:
            return 0.0
        noise = self.noise / (1 if self.adjacency == "add-remove" else 2)
        times = math.ceil(self.steps * rounds / self.every)
        if self.of is None:
            return _spent(((noise, self.rate, times),), self.delta, how)
        return min(
            _spent(((noise, 1.0, times),), self.delta, how),
            _without_replacement(self.noise / 2, self.delta, self.of, times),
        )


@dataclass(frozen=True)
class SparseVectorAccount(PrivacyAccount):
    """What a client's rounds cost where a noisy threshold chooses numbers, which are sent with Laplace noise.

    The choice is of pure ε, and so is each number that is sent. Composed are choices by adding up, numbers by adding up
    or, where that is less, at δ by Rényi accounting (Laplace noise, all orders) or the privacy loss distribution.

    Attributes:
        choice: ε of all choices of a round.
        each: ε of each number that is sent, where neighbours are as of :class:`Account`'s ``replace``; half of it where
            one sends nothing, i.e. zeros.
    """

    choice: float
    each: float
    numbers: int
    delta: float
    adjacency: Adjacency = "replace"

    def spent(self, rounds: int, how: How = "rdp") -> float:
        """Return ε after ``rounds``."""
        if not rounds:
            return 0.0
        each = self.each / (1 if self.adjacency == "replace" else 2)
        times = rounds * self.numbers
        return rounds * self.choice + min(times * each, _of_laplace(each, self.delta, times, how))


@dataclass(frozen=True)
class RecordedGaussians(PrivacyAccount):
    """What a client's messages cost that each had Gaussian noise, of any size.

    Gaussian mechanisms compose into one: of the noises σᵢ into 1/√Σσᵢ⁻².

    Attributes:
        noises: σ of each round, in units of the clip.
        drawn: of each round in how many steps there was that noise, and the probability with which each step drew the
            protected one (Poisson sampling); empty: every round has one step, and everybody is in it.
    """

    noises: tuple[float, ...]
    delta: float
    adjacency: Adjacency = "replace"
    drawn: tuple[tuple[int, float], ...] = ()

    def spent(self, rounds: int, how: How = "rdp") -> float:
        """Return ε after the first ``rounds``; more than are recorded go on like the last."""
        if not rounds:
            return 0.0
        half = 1 if self.adjacency == "add-remove" else 2
        if self.drawn:
            each = list(zip(self.noises, self.drawn, strict=True))
            steps: Counter[tuple[float, float]] = Counter()
            for noise, (taken, rate) in each[:rounds] + each[-1:] * (rounds - len(each)):
                steps[noise / half, rate] += taken
            return _spent(tuple((*one, taken) for one, taken in sorted(steps.items())), self.delta, how)
        more = max(0, rounds - len(self.noises))
        inverse = [1 / noise for noise in self.noises[:rounds]]
        precision = sum(one * one for one in inverse) + more * (1 / self.noises[-1]) * (1 / self.noises[-1])
        if not math.isfinite(precision):  # next to no noise
            return math.inf
        noise = precision**-0.5 / half
        return _spent(((noise, 1.0, 1),), self.delta, how)


@cache
def _spent(noises: tuple[tuple[float, float, int], ...], delta: float, how: str) -> float:
    """Return ε of Gaussian mechanisms: of each σ, the probability of taking part in it, and how often it is used."""
    import dp_accounting  # heavy, and only where there is an account to keep
    from dp_accounting import pld, rdp

    bound = math.inf if how == "rdp" else _spent(noises, delta, "rdp")
    accountant: Any = rdp.RdpAccountant(_ORDERS)
    if how == "pld" and math.isinf(bound):
        return bound
    if how == "pld":
        # little noise spreads the losses widely: coarser steps keep their number, and so the memory, bounded
        accountant = pld.PLDAccountant(value_discretization_interval=max(_FINE, bound / _LOSSES))
    try:
        for noise, rate, steps in noises:
            event: Any = dp_accounting.GaussianDpEvent(noise)
            accountant.compose(event if rate >= 1 else dp_accounting.PoissonSampledDpEvent(rate, event), steps)
        return float(accountant.get_epsilon(delta))
    except (OverflowError, ZeroDivisionError):  # next to no noise: losses no float holds; Rényi's is a bound, too
        return bound


@cache
def _without_replacement(noise: float, delta: float, of: tuple[int, int], steps: int) -> float:
    import dp_accounting
    from dp_accounting import rdp

    accountant = rdp.RdpAccountant(_ORDERS, dp_accounting.NeighboringRelation.REPLACE_ONE)
    event = dp_accounting.SampledWithoutReplacementDpEvent(of[1], of[0], dp_accounting.GaussianDpEvent(noise))
    accountant.compose(event, steps)
    return float(accountant.get_epsilon(delta))


@cache
def _of_laplace(each: float, delta: float, times: int, how: str) -> float:
    import dp_accounting
    from dp_accounting import pld, rdp

    event = dp_accounting.LaplaceDpEvent(1 / each)
    renyi: Any = rdp.RdpAccountant(_ORDERS_OF_LAPLACE)
    renyi.compose(event, times)
    bound = float(renyi.get_epsilon(delta))
    if how == "rdp":
        return bound
    accountant = pld.PLDAccountant(value_discretization_interval=max(_FINE, min(bound, times * each) / _LOSSES))
    try:
        accountant.compose(event, times)
        return min(bound, float(accountant.get_epsilon(delta)))
    except (OverflowError, ValueError, MemoryError):
        return bound
