"""The account of differential privacy: which ε a federation's rounds cost."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import Counter
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from typing import Any, Literal, Self, cast

import numpy as np

from fedaudit.epsilon.certificate import gaussian_success, success_of
from fedaudit.results.record import Adjacency

How = Literal["rdp", "pld"]
# Of each Gaussian mechanism σ, the probability of taking part in it, and how often it is used.
Mechanisms = tuple[tuple[float, float, int], ...]

_MOST_ROUNDS = 10**6
# The privacy loss distribution's step, and how many steps at most it is spread over, roughly.
_FINE, _LOSSES = 1e-4, 10**5
_TRIED, _MOST_EPSILON = 2001, 700.0  # ε, of which each gives a certificate; beyond that no float holds e^ε
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

    def mechanisms(self, rounds: int) -> Mechanisms:  # noqa: ARG002
        """Return the Gaussian mechanisms of ``rounds``, by its adjacency; empty where it isn't of such."""
        return ()

    def success(self, rounds: int, prior: float) -> float:
        """Return how often, at most, anybody names the right candidate after ``rounds``.

        By add/remove, whatever the account's own adjacency is; see :mod:`fedaudit.epsilon.certificate`.

        Args:
            prior: how often without any message: 1/N of N equally likely candidates.
        """
        if not rounds:
            return prior
        alone = self.by("add-remove")
        if gaussians := alone.mechanisms(rounds):
            return _success(gaussians, self.delta, prior)
        epsilon = min(alone.spent(rounds), alone.spent(rounds, "pld"), _MOST_EPSILON)
        return success_of(prior, np.array([epsilon]), np.array([self.delta]))

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
        gaussians = self.mechanisms(rounds)
        spent = _spent(gaussians, self.delta, how)
        if self.of is None:
            return spent
        return min(spent, _without_replacement(self.noise / 2, self.delta, self.of, gaussians[0][2]))

    def mechanisms(self, rounds: int) -> Mechanisms:
        """Return that of all rounds; drawing without replacement isn't counted, as if everybody knew of it."""
        noise = self.noise / (1 if self.adjacency == "add-remove" else 2)
        rate = self.rate if self.of is None else 1.0
        return ((noise, rate, math.ceil(self.steps * rounds / self.every)),)


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
        return _spent(self.mechanisms(rounds), self.delta, how) if rounds else 0.0

    def mechanisms(self, rounds: int) -> Mechanisms:
        """Return those of the first ``rounds``, as one where nobody was drawn."""
        half = 1 if self.adjacency == "add-remove" else 2
        if self.drawn:
            each = list(zip(self.noises, self.drawn, strict=True))
            steps: Counter[tuple[float, float]] = Counter()
            for noise, (taken, rate) in each[:rounds] + each[-1:] * (rounds - len(each)):
                steps[noise / half, rate] += taken
            return tuple((*one, taken) for one, taken in sorted(steps.items()))
        more = max(0, rounds - len(self.noises))
        inverse = [1 / noise for noise in self.noises[:rounds]]
        precision = sum(one * one for one in inverse) + more * (1 / self.noises[-1]) * (1 / self.noises[-1])
        return ((precision**-0.5 / half, 1.0, 1),)  # 0 where there is next to no noise, and no float holds this


@cache
def _spent(noises: Mechanisms, delta: float, how: str) -> float:
    """Return ε of Gaussian mechanisms."""
    from dp_accounting import rdp  # heavy, and only where there is an account to keep

    bound = math.inf if how == "rdp" else _spent(noises, delta, "rdp")
    if how == "pld" and math.isinf(bound):
        return bound
    try:
        accountant = _losses(noises, bound) if how == "pld" else _composed(rdp.RdpAccountant(_ORDERS), noises)
        return float(accountant.get_epsilon(delta))
    except (OverflowError, ZeroDivisionError):  # next to no noise: losses no float holds; Rényi's is a bound, too
        return bound


@cache
def _success(noises: Mechanisms, delta: float, prior: float) -> float:
    """Return how often the right candidate is named of Gaussian mechanisms by add/remove; δ is of their account."""
    if all(rate >= 1 for _, rate, _ in noises):
        return gaussian_success(prior, math.hypot(*(math.sqrt(n) / one if one else math.inf for one, _, n in noises)))
    bound = _spent(noises, delta, "rdp")
    if math.isinf(bound):
        return 1.0
    try:
        losses = _losses(noises, bound)
        most = max(-math.log(prior), min(losses.get_epsilon(delta), _MOST_EPSILON))
        epsilons = np.linspace(0, most, _TRIED)
        return success_of(prior, epsilons, np.asarray(losses.get_delta(epsilons)))
    except (OverflowError, ZeroDivisionError):
        return 1.0


@lru_cache(maxsize=1)  # it is large
def _losses(noises: Mechanisms, bound: float) -> Any:
    """Return the accountant that has the mechanisms' privacy loss distribution, given a bound of their ε."""
    from dp_accounting import pld

    # little noise spreads the losses widely: coarser steps keep their number, and so the memory, bounded
    return _composed(pld.PLDAccountant(value_discretization_interval=max(_FINE, bound / _LOSSES)), noises)


def _composed(accountant: Any, noises: Mechanisms) -> Any:
    import dp_accounting

    for noise, rate, steps in noises:
        event: Any = dp_accounting.GaussianDpEvent(noise)
        accountant.compose(event if rate >= 1 else dp_accounting.PoissonSampledDpEvent(rate, event), steps)
    return accountant


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
