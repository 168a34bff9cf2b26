"""Gaussian differential privacy: μ, and the (ε, δ) that belong to it (Dong, Roth and Su 2019, Corollary 2.13).

μ is the distance of the two outcomes' normal distributions in standard deviations: sensitivity over noise, and over n
rounds √n times that.
"""

from __future__ import annotations

import math

import numpy as np
from scipy.optimize import brentq
from scipy.special import log_ndtr, ndtri


def gaussian_log_delta(epsilon: float, mu: float) -> float:
    """Return the logarithm of the least δ with which μ-GDP is (ε, δ)-DP, exactly."""
    first = float(log_ndtr(mu / 2 - epsilon / mu))
    second = epsilon + float(log_ndtr(-mu / 2 - epsilon / mu))
    return first + math.log1p(-math.exp(second - first)) if second < first else -math.inf


def gaussian_epsilon(mu: float, delta: float) -> float:
    """Return the least ε with which μ-GDP is (ε, δ)-DP, exactly.

    Args:
        mu: μ, at least 0.
        delta: δ, in (0, 1).
    """
    target = math.log(delta)
    if mu <= 0 or gaussian_log_delta(0.0, mu) <= target:
        return 0.0
    # at this ε the first term alone is δ
    highest = mu**2 / 2 + mu * max(0.0, -float(ndtri(delta)))
    while gaussian_log_delta(highest, mu) > target:  # a δ above one half
        highest = 2 * highest
    return float(brentq(lambda e: max(gaussian_log_delta(e, mu), -1e4) - target, 0.0, highest, xtol=1e-10))


def gaussian_mu(epsilon: float, delta: float) -> float:
    """Return the largest μ with which μ-GDP is (ε, δ)-DP, exactly.

    Args:
        epsilon: ε, at least 0.
        delta: δ, in (0, 1).
    """
    target, highest = math.log(delta), 1.0
    while gaussian_log_delta(epsilon, highest) < target:
        highest *= 2
    return float(
        brentq(
            lambda m: max(gaussian_log_delta(epsilon, m), -1e4) - target,
            np.finfo(float).tiny ** 0.25,
            highest,
            xtol=1e-13,
        )
    )
