"""Which ε an attack's membership scores demonstrate, beside the one that the federation's defence claims."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fedaudit.epsilon.bounds import CanaryScores, demonstrated
from fedaudit.evaluation.statistics import SURE
from fedaudit.results import EpsilonBound, RecordEpsilon
from fedaudit.transcript.observation import Observation
from fedaudit.transcript.truth import Truth
from fedaudit.utils.seeds import generator

CONFIDENCE = 0.95
_DELTA = 1e-5  # where nothing is claimed
_LARGEST = 1e100  # scores may be infinite, and their differences' squares must not be
LEVELS = (0.05, *(SURE / 2**i for i in range(11)))  # at which a claim is tested: for up to 1,024 findings together


def record_epsilon(
    members: Tensor, others: Tensor, observation: Observation, truth: Truth, seed: int
) -> RecordEpsilon | None:
    """Return the lower bound of ε that the scores (k,) of members and of their matched others give; None: no bound.

    A pair is a canary in the game of one run (Steinke, Nasr and Jagielski 2023), and the neighbours are federations in
    which one of its records stands in the other's place: its coin is which of the two took part, and its score is the
    difference of the two scores, the first less the second. Which one is first is drawn here. Where members and others
    were drawn alike, the coins are fair and independent given the pairs. The bound is corrected for the choice of how
    many pairs to guess at, as for canaries, so that no scores are spent on a threshold.

    What is claimed is the ε of ``dp`` for replacement, which is larger than that for adding or removing.
    """
    k = len(members)
    first = torch.rand(k, generator=generator(seed, "record epsilon")) < 0.5
    if not 0 < int(first.sum()) < k:
        return None
    promise = truth.about.get("promise")
    if promise is not None and promise["central"] and observation.messages:
        promise = None  # the server adds the noise after this adversary has read the updates
    claimed = promise["epsilon"] if promise else None
    delta = promise["delta"] if promise else _DELTA
    gaussian = bool(promise and promise["gaussian"])
    apart = members.clamp(-_LARGEST, _LARGEST) - others.clamp(-_LARGEST, _LARGEST)

    def scores(apart: Tensor, confidence: float = CONFIDENCE) -> CanaryScores:
        inside, outside = apart[first].numpy(), -apart[~first].numpy()
        return CanaryScores(inside, outside, confidence, unit="record", adjacency="replace")

    def bound(apart: Tensor) -> EpsilonBound:
        found = demonstrated(scores(apart).bounds(delta, gaussian=gaussian))
        assert found is not None  # one_run always applies
        return found

    shown, p_value = bound(apart), None
    if claimed is not None:
        p_value = 1.0
        for level in LEVELS if shown.epsilon > claimed else ():
            if not scores(apart, 1 - level).refute(claimed, delta, gaussian=gaussian):
                break
            p_value = level
    perfect = 1 + torch.arange(k, dtype=torch.float64) / k  # all right, and all different
    return RecordEpsilon(bound=shown, claimed=claimed, p_value=p_value, attainable=bound(perfect).epsilon)


def broken(found: Sequence[RecordEpsilon]) -> bool:
    """Return whether the claim is refuted at the level of a leak, over all findings together (Bonferroni)."""
    return any(one.p_value is not None and len(found) * one.p_value <= SURE for one in found)


def in_words(found: Sequence[RecordEpsilon]) -> str:
    """Return the largest bound beside the claim; empty where nothing is claimed."""
    most = max(found, key=lambda one: one.bound.epsilon, default=None)
    if most is None or most.claimed is None:
        return ""
    of = f"the largest of {len(found)} bounds, each by itself; " if len(found) > 1 else ""
    text = (
        f"an ε of at least {most.bound.epsilon:.3g} is demonstrated at {100 * CONFIDENCE:g} % confidence, "
        f"δ = {most.bound.delta:g}, for one record in another's place; {of}ε = {most.claimed:.3g} is claimed for that"
    )
    if most.attainable <= most.claimed:
        text += f"; {most.bound.canaries} pairs of records could show an ε of {most.attainable:.3g} at most"
    return text
