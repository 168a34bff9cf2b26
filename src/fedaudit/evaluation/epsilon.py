"""Which ε the canaries demonstrate, for every observer, beside the one that is claimed."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence

import numpy as np
import torch
from scipy.special import expit
from torch import Tensor

from fedaudit.attacks.dp_canaries import EpsilonFinding
from fedaudit.epsilon.bounds import CanaryScores, demonstrated, gaussian_epsilon, gaussian_mu, words
from fedaudit.epsilon.canaries import OBSERVERS, Canaries
from fedaudit.evaluation.finding_types import FINDING_TYPES, Evaluation, FindingType, Metric, done, evaluate, refused
from fedaudit.evaluation.statistics import SURE
from fedaudit.evaluation.verdicts import Judgement
from fedaudit.results import EpsilonBound, EpsilonResult, Evidence, FindingResult, MetricResult, ObserverEpsilon
from fedaudit.results.epsilon import EpsilonDetail
from fedaudit.transcript.observation import Observation
from fedaudit.transcript.truth import Truth
from fedaudit.utils.seeds import derive_seed

EPSILON = Metric("epsilon", "demonstrated ε: a lower bound, with the confidence that the audit asks for")
ESTIMATE = Metric("epsilon_estimate", "estimated ε: it may be too high, and counts for nothing")
EXPOSURE = Metric(
    "exposure",
    "exposure of the planted texts, mean, in bits: log₂ of the absent ones and one, minus log₂ of the rank among them; "
    "without the attack: of the absent ones themselves",
    ends=(0, math.inf),
)
MOST_EXPOSED = Metric(
    "exposure_most",
    "likewise of the most exposed one; without the attack: what luck gives the most exposed of as many, on average",
    ends=(0, math.inf),
)
_SHARES = (0.9, 0.75, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1)  # of the noise that is promised, or of ε in a broken one
_TRIES, _POWER = 20, 0.9
_NOT_GAUSSIAN = (
    "It isn't known that the promised noise is Gaussian (recordings of versions before 0.3 never say so), so the "
    "sharper bounds for such noise are left out; where it is, record the canaries anew with gaussian=True"
)
CLAIMED = Metric("epsilon_claimed", "claimed ε", higher_is_better=False)


@evaluate.register
def evaluate_epsilon(finding: EpsilonFinding, observation: Observation, truth: Truth, *, seed: int) -> Evaluation:
    """Turn the canaries' scores into bounds on ε, now that it is known which of them were in.

    Every observer against whom the promise is made gets a bound of its own. Together they hold with the confidence that
    was asked for: each is of 1 − (1 − confidence) / their number (Bonferroni).
    """
    canaries, coins = observation.canaries, truth.coins
    if canaries is None or len(coins) != finding.scores.shape[1]:
        reason = "it isn't known which canaries were in: the truth is another federation's"
        return refused(finding, observation, reason)
    if not 0 < int(coins.sum()) < len(coins):
        reason = f"{int(coins.sum())} of {len(coins)} canaries were in: too few to tell anything; use more canaries"
        return refused(finding, observation, reason)
    covered = [name for name in finding.observers if name in canaries.covered]
    counted = covered or list(finding.observers)
    claimed = canaries.claimed if covered else None
    each = 1 - (1 - finding.confidence) / len(counted)
    seen = [
        _observer(canaries, name, scores, coins, each)
        for name, scores in zip(finding.observers, finding.scores, strict=True)
    ]
    found = [one.demonstrated for one in seen if one.observer in counted and one.demonstrated is not None]
    shown = max(found, default=None)
    perfect = coins + torch.arange(len(coins), dtype=torch.float64) / (2 * len(coins))  # all right, and all different
    best = max(
        (b.epsilon for n in counted if (b := demonstrated(_bounds(canaries, n, perfect, coins, each)))), default=0.0
    )
    result = EpsilonResult(
        claimed=claimed,
        claimed_in_words="" if claimed is None else words(claimed, canaries.delta),
        delta=canaries.delta,
        unit=canaries.unit,
        adjacency=canaries.adjacency,
        canaries=len(coins),
        canaries_in=int(coins.sum()),
        confidence=finding.confidence,
        correction=f"Bonferroni over {len(counted)} observers" if len(counted) > 1 else "one observer: none needed",
        demonstrated=shown,
        demonstrated_in_words="" if not shown else words(shown, canaries.delta, demonstrated=True),
        attainable=best,
        detectable=None
        if claimed is None
        else _detectable(canaries, counted[0], len(coins), claimed, len(counted), seed),
        joint_noise=canaries.joint,
        observers=seen,
    )
    sure = shown is not None and shown > (claimed or 0.0) and _sure(canaries, finding, coins, counted, claimed or 0.0)
    fitted = [e.epsilon for one in seen if one.observer in counted for e in one.estimates]
    exposures = _exposure(finding.scores[finding.observers.index("final")], coins) if canaries.texts else []
    told = ((EPSILON, shown), (ESTIMATE, max(fitted, default=None)), (CLAIMED, claimed))
    metrics = [metric.of(value, n=len(coins), of="canaries") for metric, value in told if value is not None]
    metrics += exposures
    unsaid = [] if claimed is None or canaries.gaussian else [_NOT_GAUSSIAN]
    return Evaluation(done(finding, observation, unsaid, EpsilonDetail(epsilon=result), metrics=metrics, is_leak=sure))


def _exposure(scores: Tensor, coins: Tensor) -> list[MetricResult]:
    """Return the planted texts' mean and highest exposure, beside those of absent ones among the others."""
    absent = scores[~coins]
    above = (absent[None] >= scores[:, None]).sum(dim=1).double()  # an absent one counts itself
    others = torch.where(coins, len(absent) + 1, len(absent))
    exposure = others.double().log2() - (above + coins).log2()
    own, others = exposure[coins], exposure[~coins]
    n = len(own)
    return [
        EXPOSURE.of(float(own.mean()), n=n, of="texts", baseline=float(others.mean())),
        MOST_EXPOSED.of(float(own.max()), n=n, of="texts", baseline=luckiest(n, len(absent))),
    ]


def luckiest(planted: int, absent: int) -> float:
    """Return the expected highest exposure of so many planted texts, in bits, where luck alone ranks them all.

    The best one's rank R among the absent ones is above r where the first r of all are absent: P(R > r) is the product
    of (absent − i) / (absent + planted − i) over i < r. So E[log₂(absent + 1) − log₂ R] is Σ_r P(R = r) times that.
    """
    places = np.arange(absent)
    beyond = np.concatenate([[1.0], np.cumprod((absent - places) / (absent + planted - places)), [0.0]])
    return float(-np.diff(beyond) @ (math.log2(absent + 1) - np.log2(np.arange(1, absent + 2))))


def _observer(canaries: Canaries, name: str, scores: Tensor, coins: Tensor, confidence: float) -> ObserverEpsilon:
    bounds = _bounds(canaries, name, scores, coins, confidence)
    counting = demonstrated(bounds)
    return ObserverEpsilon(
        observer=name,
        who=OBSERVERS[name],
        covered=name in canaries.covered,
        demonstrated=counting.epsilon if counting else None,
        bounds=[bound for bound in bounds if bound.kind == "bound"],
        estimates=[b for b in bounds if b.kind == "estimate" and math.isfinite(b.epsilon)],  # infinite where all differ
    )


def _bounds(canaries: Canaries, name: str, scores: Tensor, coins: Tensor, confidence: float) -> list[EpsilonBound]:
    made, known = _scores(canaries, name, scores, coins, confidence)
    return made.bounds(canaries.delta, **known)


def _scores(
    canaries: Canaries, name: str, scores: Tensor, coins: Tensor, confidence: float
) -> tuple[CanaryScores, dict[str, bool]]:
    """Return what an observer's scores are, and what is known of the noise in them."""
    made = CanaryScores(
        scores[coins].numpy(),
        scores[~coins].numpy(),
        confidence,
        unit=canaries.unit,
        adjacency=canaries.adjacency,
    )
    always = canaries.rates.get(name, 1.0) >= 1
    return made, {
        "independent": name == "updates" and canaries.unit == "client",  # each canary's update has noise of its own
        "gaussian": always and canaries.gaussian,  # who takes part by chance makes a mixture of the noise
        "one_sided": not always,  # who isn't drawn is as if it were out
    }


def _sure(canaries: Canaries, finding: EpsilonFinding, coins: Tensor, counted: Sequence[str], claimed: float) -> bool:
    """Return whether an observer refutes the claim at the level of a leak, too, corrected for how many count."""
    for name, scores in zip(finding.observers, finding.scores, strict=True):
        if name in counted:
            bound = demonstrated(_bounds(canaries, name, scores, coins, 1 - SURE / len(counted)))
            if bound is not None and bound.epsilon > claimed:
                return True
    return False


def _detectable(canaries: Canaries, name: str, count: int, claimed: float, observers: int, seed: int) -> float | None:
    """Return the least of some ε above the claimed one that observer ``name`` would show as broken 9 times in 10.

    Scores are drawn from a Gaussian mechanism with a share of the promised noise, where noise is promised; else from
    randomised response, whose scores tell as much as any mechanism's of that ε.
    """
    if not math.isfinite(claimed) or not claimed > 0:
        return None
    coins = torch.arange(count) % 2 == 0

    def power(true: float) -> float:
        rng, found = np.random.default_rng(derive_seed(seed, "breaks")), 0
        for _ in range(_TRIES):
            noise = torch.from_numpy(rng.normal(size=count))
            if canaries.gaussian:
                scores = gaussian_mu(true, canaries.delta) * coins + noise
            else:
                kept = torch.from_numpy(rng.random(count) < expit(true))
                scores = (coins == kept).double() + 1e-6 * noise  # ties aren't guessed at
            made, known = _scores(canaries, name, scores, coins, 1 - SURE / observers)
            found += made.refute(claimed, canaries.delta, **known)
        return found / _TRIES

    breaks = [claimed / share for share in _SHARES]
    if canaries.gaussian:
        mu = gaussian_mu(claimed, canaries.delta)
        breaks = [gaussian_epsilon(mu / share, canaries.delta) for share in _SHARES]
    place = bisect_left(breaks, True, key=lambda true: power(true) >= _POWER)
    return breaks[place] if place < len(breaks) else None


def _verdict(findings: Sequence[FindingResult]) -> Judgement:
    """Judge by the finding that comes nearest to refuting its claim, or goes farthest beyond it."""
    results = [(f, f.epsilon) for f in findings if f.epsilon is not None]
    finding, found = max(results, key=lambda pair: (pair[1].demonstrated or 0.0) - (pair[1].claimed or 0.0))
    if found.demonstrated is None:
        return Judgement("inconclusive", "no bound applies", advice="use more canaries")
    of, level = f"{found.canaries} canaries", f"{100 * found.confidence:g} % confidence"
    claim = "nothing is claimed" if found.claimed is None else f"ε = {found.claimed:.3g} is claimed"
    text = f"an ε of at least {found.demonstrated:.3g} is demonstrated at {level}, δ = {found.delta:g}; {claim}; {of}"
    if beyond := [one for one in found.observers if not one.covered and one.demonstrated and found.claimed is not None]:
        most = max(beyond, key=lambda one: one.demonstrated or 0.0)
        text += f"; the claim doesn't cover {most.who}, to whom {most.demonstrated:.3g} or more is demonstrated"
    if found.joint_noise:
        text += "; the canaries' noise was drawn as it is declared: the code that adds it wasn't audited"
    methods = {b.method for o in found.observers for b in o.bounds}
    evidence = Evidence(
        what="demonstrated ε",
        value=found.demonstrated,
        n=found.canaries,
        of="canaries",
        method=f"{', '.join(sorted(methods))}; {found.correction}",
    )
    if finding.is_leak and found.claimed is None:
        told = "which records were trained on" if found.unit == "record" else "who took part"
        headline = f"{{who}} can tell {told}: an ε of at least {found.demonstrated:.3g} is demonstrated."
        return Judgement("inferred", text, evidence, headline)
    if finding.is_leak:
        headline = (
            f"The promise is broken: an ε of at least {found.demonstrated:.3g} is demonstrated, "
            f"and {found.claimed:.3g} is claimed."
        )
        return Judgement("inferred", text, evidence, headline)
    if found.demonstrated > (found.claimed or 0.0):
        advice = "use more canaries: the demonstrated ε is above the claimed one, but not surely enough"
        return Judgement("inconclusive", text, evidence, advice=advice)
    if found.attainable <= (found.claimed or 0.0):
        against = "" if found.claimed is None else f", and {found.claimed:.3g} is claimed"
        advice = f"use more canaries: {of} could show an ε of {found.attainable:.3g} at most{against}"
        return Judgement("inconclusive", text, evidence, advice=advice)
    if found.claimed is not None:
        if found.detectable is None:
            text += "; these canaries would show hardly any break"
        else:
            text += f"; a break to ε = {found.detectable:.3g} would be shown 9 times in 10, a smaller one less often"
    return Judgement("not demonstrated", text, evidence)


def _untold(findings: Sequence[FindingResult], name: str, limit: float) -> str | None:
    """Return why these canaries can't tell whether a limit of ε is kept; empty where they could have shown more."""
    shown = [f.epsilon for f in findings if f.epsilon]
    if name != "epsilon" or not shown:
        return None
    best = max(shown, key=lambda result: result.attainable)
    if best.attainable > limit:
        return ""
    return f"use more canaries: {best.canaries} could show an ε of {best.attainable:.3g} at most"


FINDING_TYPES["epsilon"] = FindingType(
    _verdict,
    rules=(
        "ε: 'inferred' where the canaries demonstrate a larger ε than is claimed with a confidence of 99 % over all "
        "observers against whom the claim is made (or any at all where nothing is claimed); 'inconclusive' where they "
        "do so with less, or are so few that they could never show the claimed one.",
    ),
    metrics=(EPSILON, ESTIMATE, CLAIMED, EXPOSURE, MOST_EXPOSED),
    question="show an ε above the claimed one",
    control="canaries",
    untold=_untold,
)
