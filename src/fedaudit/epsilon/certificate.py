"""What noise rules out for every attack: how often, at most, anybody names the right one of some candidates.

*Reconstruction robustness* (Balle, Cherubin and Hayes 2022): an attacker who would be right with probability κ without
any message is right with at most γ after seeing them. Let P be what is seen if a candidate was used, and Q the same
with nothing in its place. What is named from Q is right with at most κ, whoever names it; so γ is the largest
probability under P of an event that has κ under Q (Hayes, Mahloujifar and Balle 2023, their blow-up function), which is
1 − f(κ), f being the trade-off function of Q and P (Kaissis et al. 2023). f is convex, so it holds on average, too.

Q needn't be possible, only be the same for all candidates. So it is *nothing* in the candidate's place (add/remove
adjacency) that counts, one clip away, even where a server sees who took part and ε is by replacement, two clips apart:
``prior`` and :func:`success_of` take those by add/remove; what a replacement hides gives a valid but larger γ.

There is no bound here for attackers "without a prior", as the normal estimates of variance σ²‖x‖² would have it: these
are without bias, and whoever always answers zeros has a smaller squared error than they where σ > 1/√(numbers in x).
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr, ndtri


def gaussian_success(prior: float, mu: float) -> float:
    """Return γ = Φ(Φ⁻¹(κ) + μ), of Gaussian mechanisms (1 − G_μ of Dong, Roth and Su 2019).

    Args:
        prior: κ, the probability of being right without any message: 1/N of N equally likely candidates.
        mu: how many standard deviations P and Q are apart: √T/σ after T steps with noise of σ clips; of candidates
            that take each other's place, 2√T/σ.
    """
    return float(ndtr(ndtri(prior) + mu))


def success_of(prior: float, epsilons: NDArray[np.float64], deltas: NDArray[np.float64]) -> float:
    """Return γ from pairs of ε and δ(ε) that hold in both directions of neighbouring, not below ``prior``.

    P[E] ≤ e^ε·Q[E] + δ of the event that the right one is named, and Q[not E] ≤ e^ε·P[not E] + δ of its contrary:
    γ ≤ e^ε·κ + δ, and γ ≤ 1 − e^(−ε)·(1 − δ − κ). Each pair gives a bound that holds (Wasserman and Zhou 2010), and the
    least counts: over all ε it is 1 − f(κ) itself (Dong, Roth and Su 2019, of which δ(ε) is the dual).

    Args:
        prior: κ, as of :func:`gaussian_success`.
        epsilons: (n,), each at least 0 and at most 700, whose exponentials floats hold.
        deltas: (n,).
    """
    named = np.exp(epsilons) * prior + deltas
    missed = 1 - np.exp(-epsilons) * (1 - deltas - prior)
    return max(prior, min(1.0, float(named.min()), float(missed.min())))


def in_words(candidates: int, share: float | None, who: str = "nobody against whom ε holds") -> str:
    """Return in a line what ``share``, a γ of so many candidates, says of ``who``; None: no noise bounds it."""
    if share is None:
        return "no noise that counts, and so no certificate: no attack is ruled out"
    among = f"of {candidates:,} candidates that seem equally likely without the messages"
    scale = 10.0 ** max(1, 1 - math.floor(math.log10(100 * share)))
    percent = math.ceil(100 * share * scale) / scale  # never rounded down
    if percent >= 99:
        return f"{among} some attack may pick the right one almost always: this noise doesn't rule it out"
    return f"{among} {who} can pick the right one with more than {percent:g} % (by luck {100 / candidates:.2g} %)"
