"""Lower bounds of ε from the scores of canaries, and what an ε means in words.

A canary takes part or not by a fair coin of its own; whoever sees the outcome gives it a score, higher where it seems
to have taken part. The scores must not depend on the coins but through the outcome. docs/explanation/epsilon.md has
every formula.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import betaincinv, expit, ndtri

from fedaudit.epsilon.gaussian_dp import gaussian_epsilon
from fedaudit.epsilon.one_run import Guesses, refuted_epsilon, refuted_gaussian_epsilon
from fedaudit.results.epsilon import Adjacency, EpsilonBound, EpsilonMethod, Unit
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

Sides = Literal["both", "in"]
Scores = NDArray[np.float64]


def demonstrated_epsilon(
    scores_in: ArrayLike,
    scores_out: ArrayLike,
    *,
    delta: float,
    confidence: float = 0.95,
    unit: Unit = "client",
    adjacency: Adjacency = "add-remove",
    independent: bool = False,
    gaussian: bool = True,
    sides: Sides = "both",
) -> list[EpsilonBound]:
    """Return what every method that applies says; :func:`demonstrated` picks one.

    Args:
        scores_in: (n,) of the canaries that took part; higher means more likely in.
        scores_out: (m,) of those that did not.
        delta: δ, claimed or assumed; above 0.
        confidence: of each bound.
        unit: what a canary is.
        adjacency: what an out canary is.
        independent: the scores are of independent runs of the mechanism: local noise, where every update has its own.
            Also what isotropic Gaussian noise on a sum makes of orthogonal canaries, if that is what is claimed.
        gaussian: the mechanism that is claimed adds Gaussian noise; False leaves out what takes that for granted.
        sides: of one run: as of :func:`one_run`.

    Raises:
        BadInput: scores missing or not finite, or a setting out of its range.
    """
    settings = _Settings(delta, confidence, unit, adjacency)
    made = [_one_run("one_run", scores_in, scores_out, settings, None, None, sides)]
    if independent:
        made.append(_clopper_pearson("clopper_pearson", scores_in, scores_out, settings, None, one_sided=False))
    if gaussian:
        if independent:
            made.append(_clopper_pearson("clopper_pearson_fdp", scores_in, scores_out, settings, None, one_sided=True))
        made.append(_one_run("one_run_fdp", scores_in, scores_out, settings, None, None, sides))
        made.append(_gaussian_estimate(scores_in, scores_out, settings))
    return made


def demonstrated(bounds: Sequence[EpsilonBound]) -> EpsilonBound | None:
    """Return the bound that counts as demonstrated; None where there is none.

    Chosen by method, before any value is seen: the largest of several would hold with less confidence than each.
    """
    by_method = {bound.method: bound for bound in bounds}
    return next((by_method[method] for method in _DEMONSTRATED if method in by_method), None)


def clopper_pearson(
    scores_in: ArrayLike,
    scores_out: ArrayLike,
    *,
    delta: float,
    confidence: float = 0.95,
    unit: Unit = "client",
    adjacency: Adjacency = "add-remove",
    thresholds: Sequence[float] | None = None,
    one_sided: bool = False,
) -> EpsilonBound:
    """Return the bound from independent runs: exact one-sided binomial intervals of both error rates.

    ε ≥ ln((TPR − δ) / FPR) for guessing "in", and the same with the roles changed for guessing "out"
    (Jagielski, Ullman and Oprea 2020; Nasr et al. 2021). A threshold is an order statistic of the *out* scores, of a
    rank that is fixed beforehand (0, 1, 2, 4, …), so that the interval of the false positives is exact in spite of the
    choice and that of the true positives knows nothing of it; guessing "out" is the mirror image. Bonferroni corrects
    for the number of ranks and directions.

    Args:
        scores_in: (n,) one of each run with the canary.
        scores_out: (m,) one of each run without.
        delta: δ, in [0, 1).
        confidence: of the bound.
        unit: what a canary is.
        adjacency: what an out canary is.
        thresholds: these instead, chosen without these scores; "in" is a score from there on.
        one_sided: guess "in" only.

    Raises:
        BadInput: scores missing or not finite, or a setting out of its range.
    """
    settings = _Settings(delta, confidence, unit, adjacency)
    return _clopper_pearson("clopper_pearson", scores_in, scores_out, settings, thresholds, one_sided=one_sided)


def clopper_pearson_fdp(
    scores_in: ArrayLike,
    scores_out: ArrayLike,
    *,
    delta: float,
    confidence: float = 0.95,
    unit: Unit = "client",
    adjacency: Adjacency = "add-remove",
    thresholds: Sequence[float] | None = None,
) -> EpsilonBound:
    """Return the bound from independent runs of a Gaussian mechanism (Nasr et al. 2023).

    Both intervals of :func:`clopper_pearson` refute every μ below Φ⁻¹(1 − FPR) − Φ⁻¹(FNR); the largest is told as
    its exact ε at ``delta``. A threshold lets a fixed share of the out scores through; the error is split over the
    shares.

    Args:
        scores_in: (n,) one of each run with the canary.
        scores_out: (m,) one of each run without.
        delta: δ, in (0, 1).
        confidence: of the bound.
        unit: what a canary is.
        adjacency: what an out canary is.
        thresholds: these instead, chosen without these scores, with equal shares of the error.

    Raises:
        BadInput: scores missing or not finite, or a setting out of its range.
    """
    settings = _Settings(delta, confidence, unit, adjacency)
    return _clopper_pearson("clopper_pearson_fdp", scores_in, scores_out, settings, thresholds, one_sided=True)


def one_run(
    scores_in: ArrayLike,
    scores_out: ArrayLike,
    *,
    delta: float,
    confidence: float = 0.95,
    unit: Unit = "client",
    adjacency: Adjacency = "add-remove",
    fractions: Mapping[float, float] | None = None,
    thresholds: Sequence[float] | None = None,
    sides: Sides = "both",
) -> EpsilonBound:
    """Return the bound from one run, of whatever mechanism (Steinke, Nasr and Jagielski 2023, Theorem 5.2).

    The highest scores are guessed in, as many of the lowest out, and nothing is said of the others. How many is settled
    by ``fractions``, each tried at its share of the error, so that all together err as seldom as one (a weighted
    Bonferroni correction).

    Args:
        scores_in: (n,) of the canaries that took part.
        scores_out: (m,) of those that did not.
        delta: δ, in [0, 1).
        confidence: of the bound.
        unit: what a canary is.
        adjacency: what an out canary is.
        fractions: of the canaries that are guessed at, each with its share of the error; the shares add up to 1. None:
            :data:`FRACTIONS`, or :data:`FEW` for one side. Equal scores are guessed alike, so ties may change how many.
        thresholds: instead of fractions: whatever scores at least this is guessed in, and nothing out; each of them has
            the same share of the error. Chosen without these scores.
        sides: guess ``in`` only, where being in is seen by chance, as by whoever doesn't know who was drawn.

    Raises:
        BadInput: scores missing or not finite, or a setting out of its range.
    """
    settings = _Settings(delta, confidence, unit, adjacency)
    return _one_run("one_run", scores_in, scores_out, settings, fractions, thresholds, sides)


def one_run_fdp(
    scores_in: ArrayLike,
    scores_out: ArrayLike,
    *,
    delta: float,
    confidence: float = 0.95,
    unit: Unit = "client",
    adjacency: Adjacency = "add-remove",
    fractions: Mapping[float, float] | None = None,
    thresholds: Sequence[float] | None = None,
    sides: Sides = "both",
) -> EpsilonBound:
    """Return the bound from one run of a Gaussian mechanism (Mahloujifar, Melis and Chaudhuri 2024).

    Refuted is that the mechanism is μ-GDP; the largest such μ is told as its exact ε at ``delta``. So the bound is one
    of a mechanism whose noise is Gaussian; another, as randomised response, may have that ε at another δ only.

    Args:
        scores_in: (n,) of the canaries that took part.
        scores_out: (m,) of those that did not.
        delta: δ, in (0, 1).
        confidence: of the bound.
        unit: what a canary is.
        adjacency: what an out canary is.
        fractions: as of :func:`one_run`.
        thresholds: as of :func:`one_run`.
        sides: as of :func:`one_run`.

    Raises:
        BadInput: scores missing or not finite, or a setting out of its range.
    """
    settings = _Settings(delta, confidence, unit, adjacency)
    return _one_run("one_run_fdp", scores_in, scores_out, settings, fractions, thresholds, sides)


def gaussian_estimate(
    scores_in: ArrayLike,
    scores_out: ArrayLike,
    *,
    delta: float,
    unit: Unit = "client",
    adjacency: Adjacency = "add-remove",
) -> EpsilonBound:
    """Return an estimate, never a bound: ε of two normal distributions fitted to the scores (Andrew et al. 2023).

    Departures: the out scores are fitted, too, where the paper takes the N(0, 1/d) of a cosine in d dimensions; and
    both have one variance, so that on nothing the estimate stays small.

    Args:
        scores_in: (n,) of the canaries that took part.
        scores_out: (m,) of those that did not.
        delta: δ, in (0, 1).
        unit: what a canary is.
        adjacency: what an out canary is.

    Raises:
        BadInput: scores missing or not finite, or a setting out of its range.
    """
    return _gaussian_estimate(scores_in, scores_out, _Settings(delta, 0.95, unit, adjacency))


def words(epsilon: float, delta: float, *, demonstrated: bool = False) -> str:
    """Return what an ε promises, or what a demonstrated one refutes, as a sentence without its full stop.

    Of a mechanism that is (ε, δ)-DP the guess whether one took part, both being as likely, is right with probability at
    most (e^ε + δ) / (e^ε + 1). A demonstrated ε says that no smaller promise holds.

    Args:
        epsilon: ε, at least 0.
        delta: δ.
        demonstrated: ε is a lower bound.
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


@dataclass(frozen=True)
class _Settings:
    delta: float
    confidence: float
    unit: Unit
    adjacency: Adjacency

    def __post_init__(self) -> None:
        if not 0 <= self.delta < 1:
            raise BadInput(f"delta is {self.delta}: give a number from 0 to below 1")
        if not 0 < self.confidence < 1:
            raise BadInput(f"confidence is {self.confidence}: give a number between 0 and 1, such as 0.95")

    def positive_delta(self, method: EpsilonMethod) -> float:
        if not self.delta:
            raise BadInput(f"{method} needs a delta above 0: the noise is Gaussian, and no epsilon holds at delta 0")
        return self.delta

    def bound(
        self,
        method: EpsilonMethod,
        epsilon: float,
        canaries: int,
        by: Guesses | None,
        correction: str,
        assumes: str = "",
    ) -> EpsilonBound:
        return EpsilonBound(
            method=method,
            kind="bound",
            epsilon=epsilon,
            delta=self.delta,
            confidence=self.confidence,
            unit=self.unit,
            adjacency=self.adjacency,
            canaries=canaries,
            guesses=by.made if by else 0,
            correct=by.correct if by else 0,
            low=by.low if by else None,
            high=by.high if by else None,
            correction=correction,
            assumes=assumes,
        )


def _one_run(
    method: EpsilonMethod,
    scores_in: ArrayLike,
    scores_out: ArrayLike,
    settings: _Settings,
    fractions: Mapping[float, float] | None,
    thresholds: Sequence[float] | None,
    sides: Sides,
) -> EpsilonBound:
    ins, outs = _sorted(scores_in, "in"), _sorted(scores_out, "out")
    canaries = len(ins) + len(outs)
    error = 1 - settings.confidence
    if thresholds is not None:
        tried = [_guess(ins, outs, None, float(threshold), error / len(thresholds)) for threshold in thresholds]
        correction = _bonferroni(len(tried), "thresholds")
    else:
        fractions = fractions or (FRACTIONS if sides == "both" else FEW)
        shares = fractions.values()
        if not all(0 < f <= 1 for f in fractions) or min(shares, default=0) <= 0 or not math.isclose(sum(shares), 1):
            raise BadInput(
                "fractions: give numbers above 0 and up to 1, with positive shares of the error that sum to 1"
            )
        pooled = np.sort(np.concatenate([ins, outs]))
        tried = []
        for fraction, share in fractions.items():
            k = math.ceil(fraction * canaries / (2 if sides == "both" else 1))
            low = float(pooled[k - 1]) if sides == "both" else None
            tried.append(_guess(ins, outs, low, float(pooled[-k]), error * share))
        correction = _weighted(fractions, "numbers of guesses", "guesses at canaries")
    if method == "one_run":
        epsilon, by = refuted_epsilon(canaries, tried, settings.delta)
        return settings.bound(method, epsilon, canaries, by, correction)
    delta = settings.positive_delta(method)
    epsilon, by = refuted_gaussian_epsilon(canaries, tried, delta)
    return settings.bound(method, epsilon, canaries, by, correction, GAUSSIAN)


def _guess(ins: Scores, outs: Scores, low: float | None, high: float, error: float) -> Guesses:
    """Guess out up to ``low`` and in from ``high`` on; what is both, because scores are equal, isn't guessed at."""
    in_right, in_wrong = (_from(scores, high, low) for scores in (ins, outs))
    if low is None:
        return Guesses(None, high, in_right + in_wrong, in_right, error)
    out_right, out_wrong = (_up_to(scores, low, high) for scores in (outs, ins))
    return Guesses(low, high, in_right + in_wrong + out_right + out_wrong, in_right + out_right, error)


def _from(scores: Scores, high: float, low: float | None) -> int:
    below = int(np.searchsorted(scores, high, side="left"))
    if low is not None:
        below = max(below, int(np.searchsorted(scores, low, side="right")))
    return len(scores) - below


def _up_to(scores: Scores, low: float, high: float) -> int:
    return min(int(np.searchsorted(scores, low, side="right")), int(np.searchsorted(scores, high, side="left")))


def _clopper_pearson(
    method: EpsilonMethod,
    scores_in: ArrayLike,
    scores_out: ArrayLike,
    settings: _Settings,
    thresholds: Sequence[float] | None,
    *,
    one_sided: bool,
) -> EpsilonBound:
    ins, outs = _sorted(scores_in, "in"), _sorted(scores_out, "out")
    error, gaussian = 1 - settings.confidence, method == "clopper_pearson_fdp"
    delta = settings.positive_delta(method) if gaussian else settings.delta
    if thresholds is not None:
        each = error / len(thresholds)  # both directions read the same two intervals
        tried = [_guess(ins, outs, None, float(threshold), each) for threshold in thresholds]
        tried += [] if one_sided else [_guess_out(ins, outs, float(threshold), each) for threshold in thresholds]
        correction = _bonferroni(len(thresholds), "thresholds")
    elif gaussian:
        tried = []
        for passed, share in _PASSED.items():
            threshold = _above(float(outs[-1 - int(passed * len(outs))]))
            tried.append(_guess(ins, outs, None, threshold, error * share))
        correction = _weighted(_PASSED, "thresholds, order statistics of fixed ranks", "passed out canaries")
    else:
        each = error / (len(_ranks(len(outs))) + (0 if one_sided else len(_ranks(len(ins)))))
        tried = [_guess(ins, outs, None, _above(float(outs[-1 - rank])), each) for rank in _ranks(len(outs))]
        tried += [] if one_sided else [_guess_out(ins, outs, float(ins[rank]), each) for rank in _ranks(len(ins))]
        correction = _bonferroni(len(tried), "thresholds, order statistics of fixed ranks")
    best, by = 0.0, None
    for guesses in tried:
        true, other = (len(ins), len(outs)) if guesses.low is None else (len(outs), len(ins))
        missed = _most(true - guesses.correct, true, guesses.error / 2)  # half for each interval
        false = _most(guesses.made - guesses.correct, other, guesses.error / 2)
        if gaussian:
            epsilon = gaussian_epsilon(float(-ndtri(false) - ndtri(missed)), delta)
        else:
            epsilon = math.log((1 - missed - delta) / false) if missed < 1 - delta else 0.0
        if epsilon > best:
            best, by = epsilon, guesses
    assumes = f"{GAUSSIAN}; {_INDEPENDENT}" if gaussian else _INDEPENDENT
    return settings.bound(method, best, len(ins) + len(outs), by, correction, assumes)


def _guess_out(ins: Scores, outs: Scores, threshold: float, error: float) -> Guesses:
    """Guess out below ``threshold``, and nothing in."""
    right, wrong = (int(np.searchsorted(scores, threshold, side="left")) for scores in (outs, ins))
    return Guesses(float(np.nextafter(threshold, -np.inf)), None, right + wrong, right, error)


def _ranks(n: int) -> list[int]:
    return [0, *(2**k for k in range(n.bit_length()) if 2**k <= n // 2)]


def _most(count: int, n: int, error: float) -> float:
    """Return the share that is exceeded with a probability of ``error`` at most (Clopper and Pearson 1934)."""
    return float(betaincinv(count + 1, n - count, 1 - error)) if count < n else 1.0


def _least(count: int, n: int, error: float) -> float:
    return 1 - _most(n - count, n, error)


def _gaussian_estimate(scores_in: ArrayLike, scores_out: ArrayLike, settings: _Settings) -> EpsilonBound:
    ins, outs = _sorted(scores_in, "in"), _sorted(scores_out, "out")
    delta, degrees = settings.positive_delta("gaussian_estimate"), len(ins) + len(outs) - 2
    if degrees < 1:
        raise BadInput("gaussian_estimate needs three scores at least")
    variance = (len(ins) * float(ins.var()) + len(outs) * float(outs.var())) / degrees
    apart = float(ins.mean() - outs.mean())
    mu = apart / math.sqrt(variance) if variance > 0 else math.copysign(math.inf, apart) if apart else 0.0
    return EpsilonBound(
        method="gaussian_estimate",
        kind="estimate",
        epsilon=gaussian_epsilon(mu, delta) if mu < math.inf else math.inf,
        delta=delta,
        confidence=None,
        unit=settings.unit,
        adjacency=settings.adjacency,
        canaries=len(ins) + len(outs),
        guesses=0,
        correct=0,
        correction="none: no threshold is chosen",
        assumes="normal scores of one variance",
    )


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
