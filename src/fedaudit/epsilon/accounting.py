"""The account of differential privacy: which ε a federation's rounds cost."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

from fedaudit.results.findings import Adjacency

_MOST_ROUNDS = 10**6
# The privacy loss distribution's step, and how many steps at most it is spread over, roughly.
_FINE, _LOSSES = 1e-4, 10**5
# Rényi orders; whole ones only, for which sampled Gaussians have a closed form
_ORDERS = [*range(2, 65), 80, 96, 128, 192, 256, 512]


@dataclass(frozen=True)
class Account:
    """What a federation's rounds cost in privacy.

    *Adjacency*: neighbours differ by one client or example that is there, or sends nothing in its place
    (``add-remove``: sensitivity is the clip, of which σ is a multiple); or sends anything else (``replace``: twice the
    clip, so σ counts half), as a server faces that sees who took part.

    Attributes:
        noise: σ, in units of the clip.
        delta: δ.
        rate: the probability that the protected one takes part in a step that is counted.
        steps: noisy steps in a round that is counted.
        every: the protected one takes part in one of so many steps, whichever it is: a pass over shuffled examples.
            Batches of a pass are disjoint, so it costs what that one step costs.
        of: (k, n), if k of n clients are drawn without replacement; else the drawing is Poisson's. Who is drawn takes
            another's place, by either adjacency, so that the sum moves by up to twice the clip (Wang, Balle and
            Kasiviswanathan 2019); where that hides less than no drawing at all, it is reckoned without.
        adjacency: see above.
    """

    noise: float
    delta: float
    rate: float
    steps: int
    every: int = 1
    of: tuple[int, int] | None = None
    adjacency: Adjacency = "add-remove"

    def spent(self, rounds: int, how: Literal["rdp", "pld"] = "rdp") -> float:
        """Return ε after ``rounds``, by Rényi accounting or the tighter privacy loss distribution."""
        if not rounds:
            return 0.0
        noise = self.noise / (1 if self.adjacency == "add-remove" else 2)
        times = math.ceil(self.steps * rounds / self.every)
        if self.of is None:
            return _spent(noise, self.delta, self.rate, times, how)
        return min(
            _spent(noise, self.delta, 1.0, times, how), _without_replacement(self.noise / 2, self.delta, self.of, times)
        )

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


@cache
def _spent(noise: float, delta: float, rate: float, steps: int, how: str) -> float:
    import dp_accounting  # heavy, and only where there is an account to keep
    from dp_accounting import pld, rdp

    event: Any = dp_accounting.GaussianDpEvent(noise)
    if rate < 1:
        event = dp_accounting.PoissonSampledDpEvent(rate, event)
    if how == "rdp":
        accountant: Any = rdp.RdpAccountant(_ORDERS)
        accountant.compose(event, steps)
        return float(accountant.get_epsilon(delta))
    bound = _spent(noise, delta, rate, steps, "rdp")
    # little noise spreads the losses widely: coarser steps keep their number, and so the memory, bounded
    accountant = pld.PLDAccountant(value_discretization_interval=max(_FINE, bound / _LOSSES))
    try:
        accountant.compose(event, steps)
        return float(accountant.get_epsilon(delta))
    except OverflowError:  # next to no noise: losses whose exponential no float holds; Rényi's is a bound, too
        return bound


@cache
def _without_replacement(noise: float, delta: float, of: tuple[int, int], steps: int) -> float:
    import dp_accounting
    from dp_accounting import rdp

    accountant = rdp.RdpAccountant(_ORDERS, dp_accounting.NeighboringRelation.REPLACE_ONE)
    event = dp_accounting.SampledWithoutReplacementDpEvent(of[1], of[0], dp_accounting.GaussianDpEvent(noise))
    accountant.compose(event, steps)
    return float(accountant.get_epsilon(delta))
