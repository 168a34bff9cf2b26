"""Lower bounds of ε from the scores of canaries, and what an ε means in words.

A canary takes part or not by a fair coin of its own; whoever sees the outcome gives it a score, higher where it seems
to have taken part. The scores must not depend on the coins but through the outcome. docs/explanation/epsilon.md has
every formula.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import brentq
from scipy.special import betainc, betaincinv, expit, log_ndtr, ndtr, ndtri

from fedaudit.results.epsilon import EpsilonBound, EpsilonMethod
from fedaudit.results.record import Adjacency, Unit
from fedaudit.utils.errors import BadInput

# What share of the canaries is guessed at, and what share of the error each may use. A quarter serves Gaussian scores
# from ε = 2 to 16; the others cost little, and are for what is less or far more certain.
FRACTIONS = {1 / 4: 0.8, 1 / 32: 0.04, 1 / 16: 0.04, 1 / 8: 0.04, 1 / 2: 0.04, 1.0: 0.04}
# The same where one side only is guessed: the few that are most certain.
FEW = {1 / 32: 0.8, 1 / 128: 0.04, 1 / 64: 0.04, 1 / 16: 0.04, 1 / 8: 0.04, 1 / 4: 0.04}
# The same of many runs: what share of the out scores is taken for in.
_PASSED = {1 / 4: 0.8, 0.0: 0.04, 1 / 32: 0.04, 1 / 8: 0.04, 1 / 2: 0.08}
GAUSSIAN = "a Gaussian mechanism (μ-GDP)"
_INDEPENDENT = "the runs are independent"
_DEMONSTRATED: tuple[EpsilonMethod, ...] = ("clopper_pearson_fdp", "one_run_fdp", "one_run", "clopper_pearson")
_STEPS = 64  # values of μ at once
_LARGEST = 1e4  # ε, or μ, from which on anything is refuted by rounding alone

Scores = NDArray[np.float64]


class CanaryScores:
    """The scores of canaries, and which ε they demonstrate.

    >>> scores = CanaryScores(inside=[3.1, 2.2, 2.9, 4.0, 2.7] * 20, outside=[0.3, -1.0, 0.2, 1.1, 0.4] * 20)
    >>> round(scores.one_run(1e-5).epsilon, 2)
    3.42

    m canaries are in or out, each by a fair coin of its own, and the scores know of the coins through the outcome
    only. The bounds read the order of the scores, and nothing else; equal scores are guessed alike, or not at all.

    Args:
        inside: (n,) scores of the canaries that took part; higher means more likely in.
        outside: (m,) of those that did not.
        confidence: of each bound: the probability that it isn't above the true ε.
        unit: what a canary is.
        adjacency: what an out canary is replaced by: nothing, or something else.

    Raises:
        BadInput: scores missing or not finite, or a confidence that isn't between 0 and 1.
    """

    def __init__(
        self,
        inside: ArrayLike,
        outside: ArrayLike,
        confidence: float = 0.95,
        *,
        unit: Unit = "client",
        adjacency: Adjacency = "add-remove",
    ) -> None:
        if not 0 < confidence < 1:
            raise BadInput(f"confidence is {confidence}: give a number between 0 and 1, such as 0.95")
        self.inside, self.outside = _sorted(inside, "in"), _sorted(outside, "out")
        self.confidence, self.unit, self.adjacency = confidence, unit, adjacency

    def __repr__(self) -> str:
        return f"CanaryScores({len(self.inside)} in, {len(self.outside)} out)"

    def __len__(self) -> int:
        return len(self.inside) + len(self.outside)

    def one_run(
        self,
        delta: float,
        *,
        fractions: Mapping[float, float] | None = None,
        thresholds: Sequence[float] | None = None,
        one_sided: bool = False,
    ) -> EpsilonBound:
        """Return the bound from one run, of whatever mechanism (Steinke, Nasr and Jagielski 2023, Theorem 5.2).

        The highest scores are guessed in, as many of the lowest out, and nothing is said of the others. How many is
        settled by ``fractions``, each tried at its share of the error, so that all together err as seldom as one (a
        weighted Bonferroni correction). Of r guesses v or more are right with probability at most
        P[B ≥ v] + 2mδ · max_i (P[B ≥ v − i] − P[B ≥ v]) / i, B binomial with r draws of e^ε / (1 + e^ε).

        Args:
            delta: δ, in [0, 1).
            fractions: of the canaries that are guessed at, each with its share of the error; the shares add up to 1.
                None: :data:`FRACTIONS`, or :data:`FEW` for one side. Ties may change how many.
            thresholds: instead of fractions: whatever scores at least this is guessed in, and nothing out; each of
                them has the same share of the error. Chosen without these scores.
            one_sided: guess "in" only, where being in is seen by chance, as by whoever doesn't know who was drawn.

        Raises:
            BadInput: a setting out of its range.
        """
        _check(delta)
        tried, correction = self._one_run(fractions, thresholds, one_sided)
        epsilon, by = refuted_epsilon(len(self), tried, delta)
        return self._bound("one_run", epsilon, delta, by, correction, "")

    def one_run_fdp(
        self,
        delta: float,
        *,
        fractions: Mapping[float, float] | None = None,
        thresholds: Sequence[float] | None = None,
        one_sided: bool = False,
    ) -> EpsilonBound:
        """Return the bound from one run of a Gaussian mechanism (Mahloujifar, Melis and Chaudhuri 2024).

        Refuted is that the mechanism is μ-GDP; the largest such μ is told as its exact ε at ``delta``. So the bound is
        one of a mechanism whose noise is Gaussian; another, as randomised response, may have that ε at another δ only.

        Args:
            delta: δ, in (0, 1).
            fractions, thresholds, one_sided: as of :meth:`one_run`.

        Raises:
            BadInput: a setting out of its range.
        """
        _check(delta, positive="one_run_fdp")
        tried, correction = self._one_run(fractions, thresholds, one_sided)
        mu, by = refuted_mu(len(self), tried)
        return self._bound("one_run_fdp", gaussian_epsilon(mu, delta), delta, by, correction, GAUSSIAN)

    def clopper_pearson(
        self, delta: float, *, thresholds: Sequence[float] | None = None, one_sided: bool = False
    ) -> EpsilonBound:
        """Return the bound from independent runs: exact one-sided binomial intervals of both error rates.

        ε ≥ ln((TPR − δ) / FPR) for guessing "in", and the same with the roles changed for guessing "out"
        (Jagielski, Ullman and Oprea 2020; Nasr et al. 2021). A threshold is an order statistic of the *out* scores, of
        a rank that is fixed beforehand (0, 1, 2, 4, …), so that the interval of the false positives is exact in spite
        of the choice and that of the true positives knows nothing of it; guessing "out" is the mirror image. Bonferroni
        corrects for the number of ranks and directions.

        Args:
            delta: δ, in [0, 1).
            thresholds: these instead, chosen without these scores; "in" is a score from there on.
            one_sided: guess "in" only.

        Raises:
            BadInput: a setting out of its range.
        """
        _check(delta)
        if thresholds is not None:
            highs = lows = [float(threshold) for threshold in thresholds]
            number, what = len(highs), "thresholds"  # both directions read the same two intervals
        else:
            highs = [_above(float(self.outside[-1 - rank])) for rank in _ranks(len(self.outside))]
            lows = [float(self.inside[rank]) for rank in _ranks(len(self.inside))]
            number = len(highs) + (0 if one_sided else len(lows))
            what = "thresholds, order statistics of fixed ranks"
        correction, each = _bonferroni(number, what), (1 - self.confidence) / number
        tried = [self._guess(None, high, each) for high in highs]
        tried += [] if one_sided else [self._guess(float(np.nextafter(low, -np.inf)), None, each) for low in lows]

        def epsilon(missed: float, false: float) -> float:
            return math.log((1 - missed - delta) / false) if missed < 1 - delta else 0.0

        best, by = self._intervals(tried, epsilon)
        return self._bound("clopper_pearson", best, delta, by, correction, _INDEPENDENT)

    def clopper_pearson_fdp(self, delta: float, *, thresholds: Sequence[float] | None = None) -> EpsilonBound:
        """Return the bound from independent runs of a Gaussian mechanism (Nasr et al. 2023).

        Both intervals of :meth:`clopper_pearson` refute every μ below Φ⁻¹(1 − FPR) − Φ⁻¹(FNR); the largest is told as
        its exact ε at ``delta``. A threshold lets a fixed share of the out scores through; the error is split over the
        shares.

        Args:
            delta: δ, in (0, 1).
            thresholds: these instead, chosen without these scores, with equal shares of the error.

        Raises:
            BadInput: a setting out of its range.
        """
        _check(delta, positive="clopper_pearson_fdp")
        if thresholds is not None:
            tried, correction = self._at(thresholds)
        else:
            outs, error = self.outside, 1 - self.confidence
            tried = [
                self._guess(None, _above(float(outs[-1 - int(passed * len(outs))])), error * share)
                for passed, share in _PASSED.items()
            ]
            correction = _weighted(_PASSED, "thresholds, order statistics of fixed ranks", "passed out canaries")

        def epsilon(missed: float, false: float) -> float:
            return gaussian_epsilon(float(-ndtri(false) - ndtri(missed)), delta)

        best, by = self._intervals(tried, epsilon)
        return self._bound("clopper_pearson_fdp", best, delta, by, correction, f"{GAUSSIAN}; {_INDEPENDENT}")

    def gaussian_estimate(self, delta: float) -> EpsilonBound:
        """Return an estimate, never a bound: ε of two normal distributions fitted to the scores (Andrew et al. 2023).

        Departures: the out scores are fitted, too, where the paper takes the N(0, 1/d) of a cosine in d dimensions; and
        both have one variance, so that on nothing the estimate stays small.

        Args:
            delta: δ, in (0, 1).

        Raises:
            BadInput: a setting out of its range, or fewer than three scores.
        """
        _check(delta, positive="gaussian_estimate")
        ins, outs, degrees = self.inside, self.outside, len(self) - 2
        if degrees < 1:
            raise BadInput("gaussian_estimate needs three scores at least")
        variance = (len(ins) * float(ins.var()) + len(outs) * float(outs.var())) / degrees
        apart = float(ins.mean() - outs.mean())
        mu = apart / math.sqrt(variance) if variance > 0 else math.copysign(math.inf, apart) if apart else 0.0
        epsilon = gaussian_epsilon(mu, delta) if mu < math.inf else math.inf
        correction, assumes = "none: no threshold is chosen", "normal scores of one variance"
        made = self._bound("gaussian_estimate", epsilon, delta, None, correction, assumes)
        return made.model_copy(update={"kind": "estimate", "confidence": None})

    def bounds(
        self, delta: float, *, independent: bool = False, gaussian: bool = False, one_sided: bool = False
    ) -> list[EpsilonBound]:
        """Return what every method that applies says; :func:`demonstrated` picks one.

        Args:
            delta: δ, claimed or assumed; above 0.
            independent: the scores are of independent runs of the mechanism: local noise, where every update has its
                own. Also what isotropic Gaussian noise on a sum makes of orthogonal canaries, if that is what is
                claimed.
            gaussian: the mechanism that is claimed is known to add Gaussian noise; False leaves out what takes that
                for granted.
            one_sided: of one run: as of :meth:`one_run`.

        Raises:
            BadInput: a setting out of its range.
        """
        made = [self.one_run(delta, one_sided=one_sided)]
        if independent:
            made.append(self.clopper_pearson(delta))
        if gaussian:
            if independent:
                made.append(self.clopper_pearson_fdp(delta))
            made.append(self.one_run_fdp(delta, one_sided=one_sided))
            made.append(self.gaussian_estimate(delta))
        return made

    def refute(
        self,
        epsilon: float,
        delta: float,
        *,
        independent: bool = False,
        gaussian: bool = False,
        one_sided: bool = False,
    ) -> bool:
        """Return whether the bound that counts (:func:`demonstrated` of :meth:`bounds`) is above ``epsilon``.

        That is one test at ``epsilon``, where the bound is a search for the ε that is refuted no more.

        Args:
            epsilon: ε, above 0.
            delta, independent, gaussian, one_sided: as of :meth:`bounds`.

        Raises:
            BadInput: a setting out of its range.
        """
        if gaussian and independent:
            return self.clopper_pearson_fdp(delta).epsilon > epsilon
        _check(delta)
        tried, _ = self._one_run(None, None, one_sided)
        if not gaussian:
            return any(p_value(len(self), guesses, epsilon, delta) < guesses.error for guesses in tried)
        started = [guesses for guesses in tried if guesses.correct > 0]
        mu = np.full((len(started), 1), gaussian_mu(epsilon, delta))
        return bool((_margins(len(self), started, mu) > 0).any())

    def _one_run(
        self, fractions: Mapping[float, float] | None, thresholds: Sequence[float] | None, one_sided: bool
    ) -> tuple[list[Guesses], str]:
        """Return the ways to guess, and how the choice among them is corrected for."""
        if thresholds is not None:
            return self._at(thresholds)
        fractions = fractions or (FEW if one_sided else FRACTIONS)
        shares = fractions.values()
        if not all(0 < f <= 1 for f in fractions) or min(shares, default=0) <= 0 or not math.isclose(sum(shares), 1):
            raise BadInput(
                "fractions: give numbers above 0 and up to 1, with positive shares of the error that sum to 1"
            )
        pooled = np.sort(np.concatenate([self.inside, self.outside]))
        tried = []
        for fraction, share in fractions.items():
            k = math.ceil(fraction * len(self) / (1 if one_sided else 2))
            low = None if one_sided else float(pooled[k - 1])
            tried.append(self._guess(low, float(pooled[-k]), (1 - self.confidence) * share))
        return tried, _weighted(fractions, "numbers of guesses", "guesses at canaries")

    def _at(self, thresholds: Sequence[float]) -> tuple[list[Guesses], str]:
        """Return a way to guess "in" from each threshold on, each with the same share of the error."""
        error = (1 - self.confidence) / len(thresholds)
        tried = [self._guess(None, float(threshold), error) for threshold in thresholds]
        return tried, _bonferroni(len(tried), "thresholds")

    def _guess(self, low: float | None, high: float | None, error: float) -> Guesses:
        """Guess out up to ``low`` and in from ``high`` on; what is both, because scores are equal, isn't guessed at."""
        made, right = 0, []
        for scores, taken in ((self.outside, 0), (self.inside, 1)):
            up_to = 0 if low is None else int(np.searchsorted(scores, low, side="right"))
            below = len(scores) if high is None else int(np.searchsorted(scores, high, side="left"))
            guessed = min(up_to, below), len(scores) - max(up_to, below)  # out, in
            made += sum(guessed)
            right.append(guessed[taken])
        return Guesses(low, high, made, sum(right), error)

    def _intervals(
        self, tried: Sequence[Guesses], epsilon: Callable[[float, float], float]
    ) -> tuple[float, Guesses | None]:
        """Return the largest ``epsilon(missed, false)`` of the upper ends of both error rates, and which way has it."""
        best, by = 0.0, None
        for guesses in tried:
            true, other = (self.inside, self.outside) if guesses.low is None else (self.outside, self.inside)
            missed = _most(len(true) - guesses.correct, len(true), guesses.error / 2)  # half for each interval
            false = _most(guesses.made - guesses.correct, len(other), guesses.error / 2)
            if (found := epsilon(missed, false)) > best:
                best, by = found, guesses
        return best, by

    def _bound(
        self, method: EpsilonMethod, epsilon: float, delta: float, by: Guesses | None, correction: str, assumes: str
    ) -> EpsilonBound:
        return EpsilonBound(
            method=method,
            kind="bound",
            epsilon=epsilon,
            delta=delta,
            confidence=self.confidence,
            unit=self.unit,
            adjacency=self.adjacency,
            canaries=len(self),
            guesses=by.made if by else 0,
            correct=by.correct if by else 0,
            low=by.low if by else None,
            high=by.high if by else None,
            correction=correction,
            assumes=assumes,
        )


def demonstrated(bounds: Sequence[EpsilonBound]) -> EpsilonBound | None:
    """Return the bound that counts as demonstrated; None where there is none.

    Chosen by method, before any value is seen: the largest of several would hold with less confidence than each.
    """
    by_method = {bound.method: bound for bound in bounds}
    return next((by_method[method] for method in _DEMONSTRATED if method in by_method), None)


def words(epsilon: float, delta: float, *, demonstrated: bool = False) -> str:
    """Return in words what an ε promises, or what a demonstrated one refutes, without the full stop.

    Both being equally likely, a guess whether one took part is right with probability (e^ε + δ) / (e^ε + 1) at most, if
    the mechanism is (ε, δ)-DP. A demonstrated ε says that no smaller promise holds.
    """
    share = min(1.0, float(expit(epsilon) + delta * expit(-epsilon)))
    guess = "whoever guesses from the outcome whether you took part"
    # 75 of 100; from 99.5 % on, finer
    of = next((of for of in (100, 1000, 10_000, 100_000, 1_000_000) if share <= 1 - 0.5 / of), None)
    if of is None:
        return f"{guess} may always be right" if not demonstrated else f"nothing keeps {guess} from always being right"
    right = max(of // 2, math.ceil(share * of - 0.05))  # δ alone, of 1e-5, is no further case
    if demonstrated:
        right = math.floor(share * of + 0.05)
        return f"no promise holds that {guess} is right less than {right:,} of {of:,} times"
    return f"{guess} is right at most {right:,} of {of:,} times"


# --- what many guesses in one run refute -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Guesses:
    """One way to guess, settled by the scores without the coins, and how it went.

    Attributes:
        low: guessed out up to this score; None: never.
        high: guessed in from this score on; None: never.
        error: the probability that this way may err with: its share of one less the confidence.
    """

    low: float | None
    high: float | None
    made: int
    correct: int
    error: float


def p_value(canaries: int, guesses: Guesses, epsilon: float, delta: float) -> float:
    """Return the largest probability of so many correct guesses under (ε, δ)-DP.

    Steinke, Nasr and Jagielski 2023, Theorem 5.2: see :meth:`CanaryScores.one_run`.
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


# --- Gaussian differential privacy -----------------------------------------------------------------------------------


def gaussian_log_delta(epsilon: float, mu: float) -> float:
    """Return the logarithm of the least δ with which μ-GDP is (ε, δ)-DP, exactly.

    μ is the distance of both outcomes' normal distributions in standard deviations: sensitivity over noise, times √n
    for n rounds (Dong, Roth and Su 2019, Corollary 2.13).
    """
    first = float(log_ndtr(mu / 2 - epsilon / mu))
    second = epsilon + float(log_ndtr(-mu / 2 - epsilon / mu))
    return first + math.log1p(-math.exp(second - first)) if second < first else -math.inf


def gaussian_epsilon(mu: float, delta: float) -> float:
    """Return the least ε with which μ-GDP is (ε, δ)-DP, exactly, of μ ≥ 0 and δ in (0, 1)."""
    target = math.log(delta)
    if mu <= 0 or gaussian_log_delta(0.0, mu) <= target:
        return 0.0
    # at this ε the first term alone is δ
    highest = mu**2 / 2 + mu * max(0.0, -float(ndtri(delta)))
    while gaussian_log_delta(highest, mu) > target:  # a δ above one half
        highest = 2 * highest
    return float(brentq(lambda e: max(gaussian_log_delta(e, mu), -1e4) - target, 0.0, highest, xtol=1e-10))


def gaussian_mu(epsilon: float, delta: float) -> float:
    """Return the largest μ whose Gaussian mechanism is (ε, δ)-DP: the inverse of :func:`gaussian_epsilon`."""
    high = 1.0
    while gaussian_epsilon(high, delta) < epsilon:
        high *= 2
    return float(brentq(lambda mu: gaussian_epsilon(mu, delta) - epsilon, 0.0, high, xtol=1e-9))


# --- checks and words ------------------------------------------------------------------------------------------------


def _check(delta: float, positive: EpsilonMethod | None = None) -> None:
    if not 0 <= delta < 1:
        raise BadInput(f"delta is {delta}: give a number from 0 to below 1")
    if positive and not delta:
        raise BadInput(f"{positive} needs a delta above 0: the noise is Gaussian, and no epsilon holds at delta 0")


def _ranks(n: int) -> list[int]:
    return [0, *(2**k for k in range(n.bit_length()) if 2**k <= n // 2)]


def _most(count: int, n: int, error: float) -> float:
    """Return the share that is exceeded with a probability of ``error`` at most (Clopper and Pearson 1934)."""
    return float(betaincinv(count + 1, n - count, 1 - error)) if count < n else 1.0


def _sorted(scores: ArrayLike, which: str) -> Scores:
    values = np.sort(np.asarray(scores, dtype=np.float64), axis=None)
    if np.ndim(scores) != 1 or not len(values):
        raise BadInput(f"the scores of the canaries that were {which}: give a list of at least one number")
    if odd := int((~np.isfinite(values)).sum()):
        raise BadInput(f"the scores of the canaries that were {which}: {odd} are no numbers or infinite")
    return values


def _above(score: float) -> float:
    return float(np.nextafter(score, np.inf))


def _weighted(shares: Mapping[float, float], what: str, of: str) -> str:
    correction, (first, share) = _bonferroni(len(shares), what), max(shares.items(), key=lambda item: item[1])
    return (
        correction if len(set(shares.values())) == 1 else f"{correction}, {share:.0%} of the error for {first:.0%} {of}"
    )


def _bonferroni(tried: int, what: str) -> str:
    return f"Bonferroni over {tried} {what}" if tried > 1 else "none: settled beforehand"
