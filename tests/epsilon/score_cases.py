"""Scores whose distribution is known."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq
from scipy.special import log_ndtr

Scores = NDArray[np.float64]
Drawn = tuple[Scores, Scores]


def gaussian_mu(epsilon: float, delta: float) -> float:
    """Return the largest μ with which μ-GDP is (ε, δ)-DP: δ = Φ(μ/2 − ε/μ) − e^ε·Φ(−μ/2 − ε/μ)."""

    def above(mu: float) -> float:
        first = float(log_ndtr(mu / 2 - epsilon / mu))
        second = epsilon + float(log_ndtr(-mu / 2 - epsilon / mu))
        excess = first + math.log1p(-math.exp(second - first)) if second < first else -1e4  # rounded to nothing
        return max(excess, -1e4) - math.log(delta)

    return float(brentq(above, 1e-2, 100.0, xtol=1e-13))


def gaussian(mu: float, canaries: int, seed: int) -> Drawn:
    """Return the scores of fair coins under a Gaussian mechanism."""
    rng = np.random.default_rng(seed)
    taken = rng.integers(0, 2, canaries) == 1
    scores = rng.standard_normal(canaries) + mu * taken
    return scores[taken], scores[~taken]
