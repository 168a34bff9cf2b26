"""How well scores tell which share of a set of records was used: counted, with errors that are known.

As Tong et al. 2025 (How much of my dataset did you use?), with two departures. Their rates of error are from reference
models; a federation's model is another one than whoever holds a few public examples can train, so here the adversary is
taken to know of half of the records whether they were used, and counts in the other half, and the other way round. And
the estimate is drawn to one half where counting says little, so that scores of no worth are nearly as good as saying
half.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from fedaudit.evaluation.finding_types import Metric
from fedaudit.results import MetricResult
from fedaudit.utils.seeds import generator

USAGE_ERROR = Metric(
    "usage_error",
    "how far off the share is that is told of sets, with a record of each matched pair, of which none, a quarter, "
    "half, three quarters or all were used, by who knows that of as many others; without the attack: by saying half",
    higher_is_better=False,
    ends=(0, 1),
)
_SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
_VARIANCE = 0.125  # of these
_SETS = 20  # of each share, in each half
LEAST = 20  # pairs, of which half are few enough
_MARGIN = 1.96


class Counting(NamedTuple):
    """From which score on records are called members, and which share of members and of others is."""

    threshold: float
    true: float
    false: float
    pairs: int

    def share(self, scores: Tensor) -> tuple[float, float, float]:
        """Return which share of a set with these scores (n,) was used, and the ends of its 95 % interval.

        The best linear estimate of a share that is taken to be about one half, with the variance of ``_SHARES``; the
        errors are those of a count of n, and of rates that were counted over so many pairs.
        """
        seen = float((scores >= self.threshold).double().mean())
        reach, usual = self.true - self.false, (self.true + self.false) / 2
        spread = (self.true * (1 - self.true) + self.false * (1 - self.false)) / 2
        noise = spread * (1 / len(scores) + 2 / self.pairs)  # twice, for the threshold is chosen by the rates
        weight = reach * _VARIANCE / (reach**2 * _VARIANCE + noise)
        told = min(1.0, max(0.0, 0.5 + weight * (seen - usual)))
        deviation = math.sqrt(_VARIANCE * noise / (reach**2 * _VARIANCE + noise))
        return told, max(0.0, told - _MARGIN * deviation), min(1.0, told + _MARGIN * deviation)


def counting(members: Tensor, others: Tensor) -> Counting:
    """Return the threshold at which members and others (k,) are called members most differently, and both rates."""
    ends = torch.cat([members, others]).unique()
    true, false = ((one[None] >= ends[:, None]).double().mean(dim=1) for one in (members, others))
    best, k = int((true - false).argmax()), len(members)
    smooth = [(float(rate[best]) * k + 1) / (k + 2) for rate in (true, false)]  # none is 0 or 1
    return Counting(float(ends[best]), smooth[0], smooth[1], k)


def told(members: Tensor, others: Tensor, seed: int) -> list[tuple[float, float, float, float]]:
    """Return of each set the true share, the one that is told, and the ends of its interval.

    ``members`` and ``others`` are the (k,) scores of matched pairs. A set has one record of each pair of a half.
    """
    rng, found = generator(seed, "sets of records"), []
    halves = torch.randperm(len(members), generator=rng).tensor_split(2)
    for known, asked in (halves, halves[::-1]):
        rule = counting(members[known], others[known])
        for share in _SHARES:
            used = round(share * len(asked))
            for _ in range(_SETS):
                is_used = torch.randperm(len(asked), generator=rng) < used
                found.append((used / len(asked), *rule.share(torch.where(is_used, members[asked], others[asked]))))
    return found


def usage(members: Tensor, others: Tensor, seed: int, of: str = "records") -> list[MetricResult]:
    """Return how far off what is told is on average; nothing of few pairs."""
    if len(members) < LEAST:
        return []
    sets = told(members, others, seed)
    n = len(sets)
    error = math.fsum(abs(true - said) for true, said, _, _ in sets) / n
    of = f"sets of {len(members) // 2:,} {of}"
    return [USAGE_ERROR.of(error, math.fsum(abs(true - 0.5) for true, *_ in sets) / n, n=n, of=of)]
