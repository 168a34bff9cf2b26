"""What many guesses in one run refute: the two tests, as functions of counts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq
from scipy.special import betainc, expit, ndtr, ndtri

from fedaudit.epsilon.gaussian_dp import gaussian_epsilon

_STEPS = 64  # values of μ at once
_LARGEST = 1e4  # ε, or μ, from which on anything is refuted by rounding alone


@dataclass(frozen=True)
class Guesses:
    """One way to guess, settled by the scores without the coins, and how it went.

    Attributes:
        low: guessed out up to this score; None: never.
        high: guessed in from this score on; None: never.
        made: canaries that were guessed at.
        correct: of these.
        error: the probability that this way may err with: its share of one less the confidence.
    """

    low: float | None
    high: float | None
    made: int
    correct: int
    error: float


def p_value(canaries: int, guesses: Guesses, epsilon: float, delta: float) -> float:
    """Return how probable so many correct guesses are at most, if the mechanism is (ε, δ)-DP.

    Steinke, Nasr and Jagielski 2023, Theorem 5.2: of r guesses v or more are right with probability at most
    P[B ≥ v] + 2mδ · max_i (P[B ≥ v − i] − P[B ≥ v]) / i, where B is binomial with r draws of e^ε / (1 + e^ε).
    """
    made, right = guesses.made, guesses.correct
    if right <= 0:
        return 1.0
    chance = expit(epsilon)
    fewer = np.arange(right - 1, 0, -1)
    tails = np.concatenate([betainc(fewer, made - fewer + 1, chance), [1.0]])  # P[B ≥ v − i], i = 1 … v
    tail = float(betainc(right, made - right + 1, chance))
    excess = float(np.max((tails - tail) / np.arange(1, right + 1)))
    return min(1.0, tail + 2 * canaries * delta * max(0.0, excess))


def refuted_epsilon(canaries: int, tried: Sequence[Guesses], delta: float) -> tuple[float, Guesses | None]:
    """Return the largest ε that any of ``tried`` refutes, and which; 0 and None if none does."""
    best, by = 0.0, None
    for guesses in tried:

        def refutes(epsilon: float, guesses: Guesses = guesses) -> float:
            return guesses.error - p_value(canaries, guesses, epsilon, delta)

        if refutes(best) <= 0:
            continue
        low, high = best, max(1.0, 2 * best)
        while refutes(high) > 0 and high < _LARGEST:
            low, high = high, 2 * high
        best, by = float(brentq(refutes, low, high, xtol=1e-10)), guesses
    return best, by


def refuted_mu(canaries: int, tried: Sequence[Guesses]) -> tuple[float, Guesses | None]:
    """Return the largest μ for which any of ``tried`` refutes μ-GDP, and which; 0 and None if none does.

    Mahloujifar, Melis and Chaudhuri 2024, the recursion for guesses with abstentions (``audit_rh_with_cap``).
    """
    started = [guesses for guesses in tried if guesses.correct > 0]
    at_zero = _margins(canaries, started, np.zeros((len(started), 1)))[:, 0]
    alive = [guesses for guesses, margin in zip(started, at_zero, strict=True) if margin > 0]
    if not alive:
        return 0.0, None
    low, high = 0.0, 8.0
    while True:
        values = np.linspace(low, high, _STEPS)
        margins = _margins(canaries, alive, np.tile(values, (len(alive), 1)))
        last = (margins > 0).sum(axis=1)  # refuted up to there: the margin falls with μ
        most = int(last.max())
        alive = [guesses for guesses, count in zip(alive, last, strict=True) if count == most]
        if most == _STEPS and high < _LARGEST:
            low, high = high, 2 * high
        elif len(alive) > 1 and high - low > 1e-9:
            low, high = values[most - 1], values[min(most, _STEPS - 1)]
        else:
            break
    (by, *_) = alive

    def margin(mu: float) -> float:
        return float(_margins(canaries, [by], np.array([[mu]]))[0, 0])

    left, right = values[most - 1], values[min(most, _STEPS - 1)]
    return (float(brentq(margin, left, right, xtol=1e-10)) if margin(right) <= 0 else float(right)), by


def refuted_gaussian_epsilon(canaries: int, tried: Sequence[Guesses], delta: float) -> tuple[float, Guesses | None]:
    """Return :func:`refuted_mu` as ε at ``delta``."""
    mu, by = refuted_mu(canaries, tried)
    return gaussian_epsilon(mu, delta), by


def _margins(canaries: int, tried: Sequence[Guesses], mu: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return for every way of guessing (rows) and μ (columns) a number that is positive if μ-GDP is refuted."""
    if not tried:
        return np.zeros_like(mu)
    made = np.array([[guesses.made] for guesses in tried])
    right = np.array([[guesses.correct] for guesses in tried])
    error = np.array([[guesses.error] for guesses in tried])
    share = np.broadcast_to(error * right / canaries, mu.shape).copy()
    wrong = np.broadcast_to(error * (made - right) / canaries, mu.shape).copy()
    for i in range(int(right.max()) - 1, -1, -1):
        grown = np.maximum(wrong, ndtr(ndtri(share) - mu))
        grown = np.where(i < right, grown, wrong)
        if i < right.min() and np.array_equal(grown, wrong):
            break  # nothing changes any more
        share = np.minimum(share + i / np.maximum(made - i, 1) * (grown - wrong), 1.0)
        wrong = grown
    return np.asarray(share + wrong - made / canaries)
