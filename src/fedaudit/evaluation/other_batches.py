"""Other batches that a finding on an update is held against: what it would tell of examples that weren't attacked.

What somebody says who hasn't seen the update fits its examples no better than others of the same kind. So the finding
stays as it is, and the batch is dealt anew, of its own examples and of others that may stand for them, label by label:
whatever was said, and however it was made, it fits the true batch best of 100 with a probability of 1 %.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from fedaudit.evaluation.shift import REMEDY, SHIFTED
from fedaudit.evaluation.statistics import SURE
from fedaudit.evaluation.verdicts import Judgement, by_fisher
from fedaudit.results import FindingResult
from fedaudit.transcript.truth import Truth
from fedaudit.utils.fingerprint import tensor_digest
from fedaudit.utils.seeds import generator

DEALS = 999  # beside the true batch: the least p-value is 1 in 1,000


class Batches(NamedTuple):
    """An update's batch and others.

    Attributes:
        inputs: (n + m, ...) the update's different examples, then others that may stand for them.
        dealt: (1 + 999, n) which of these are in each batch; the update's own is the first.
        counted: (k,) bool, which of the update's k different examples these n are: those that nobody else has as well.
    """

    inputs: Tensor
    dealt: Tensor
    counted: Tensor

    @property
    def best(self) -> float:
        """The p-value of a finding that fits its own batch alone."""
        own = self.dealt.sort(dim=1).values
        return float((own == own[0]).all(dim=1).double().mean())


def paired(cost: Tensor, batches: Batches) -> Tensor:
    """Return (1 + d, p) costs of each batch's pairs with what was found, one to one, with as little as can be.

    ``cost`` is (n + m, k), of each example with each of k that were found; p is the smaller one of n and k.
    """
    costs = cost.numpy()
    parts = [costs[batch] for batch in batches.dealt.numpy()]
    return torch.from_numpy(np.stack([part[linear_sum_assignment(part)] for part in parts]))


def p_value(fits: Sequence[float] | Tensor) -> float:
    """Return the p-value of the first of (1 + d,) fits: how many of all are as good."""
    values = torch.as_tensor(fits, dtype=torch.float64)
    return float((values >= values[0] - 1e-9).double().mean())


def other_batches(truth: Truth, kept: Truth, key: tuple[int, int], *, seed: int, once: bool = False) -> Batches:
    """Return the batch of an update and others, of candidates of the same labels where those are classes.

    Args:
        kept: the truth with the candidates that may stand for the client's, see
            :func:`fedaudit.evaluation.shift.comparable`.
        key: the update's round and client.
        once: examples that anybody else has, too, count for nothing, such as a form that nobody filled in.
    """
    places = truth.different(key)[0]
    own, labels = truth.inputs[key][places], truth.labels[key][places]
    mine = [tensor_digest(example) for example in own]
    left = Counter(mine)  # each of them is a candidate itself
    rest = []
    for i, example in enumerate(kept.candidates):
        if left[name := tensor_digest(example)] > 0:
            left[name] -= 1
        else:
            rest.append(i)
    others, names = kept.candidates[rest].to(own), kept.candidate_labels[rest]
    counted = torch.ones(len(own), dtype=torch.bool)
    if once:
        often = _often(truth)
        counted = torch.tensor([often[name] < 2 for name in mine], dtype=torch.bool)
        single = torch.tensor([often[tensor_digest(one)] < 2 for one in others], dtype=torch.bool)
        others, names = others[single], names[single]
    chosen = dealt(labels[counted], names, generator(seed, "other batches"))
    return Batches(torch.cat([own[counted], others]), chosen, counted)


def dealt(own: Tensor, others: Tensor, rng: torch.Generator) -> Tensor:
    """Return (1 + 999, n) places of batches among examples of (n,) own and (m,) other labels, the own batch first.

    Each has the own one's labels; any, where they aren't classes or leave fewer batches than are dealt.
    """
    if own.ndim != 1 or own.is_floating_point():
        own, others = (torch.zeros(len(x), dtype=torch.int64) for x in (own, others))
    sizes = [[int((x == label).sum()) for x in (own, others)] for label in own.unique().tolist()]
    if math.prod(math.comb(n + m, n) for n, m in sizes) <= DEALS:
        own, others = torch.zeros_like(own), torch.zeros_like(others)
    batches = torch.arange(len(own)).repeat(1 + DEALS, 1)
    for label in own.unique().tolist():
        places = torch.nonzero(own == label).flatten()
        pool = torch.cat([places, len(own) + torch.nonzero(others == label).flatten()])
        drawn = torch.rand(DEALS, len(pool), generator=rng).topk(len(places), dim=1).indices
        batches[1:, places] = pool[drawn]
    return batches


def _often(truth: Truth) -> Counter[bytes]:
    """Return how many different examples have each content: used ones, by client and place, and held-out ones."""
    used = set[tuple[int, int | None, bytes]]()
    for key, batch in truth.inputs.items():
        rows = truth.rows[key].tolist() if key in truth.rows else [None] * len(batch)
        used |= {(key[1], row, tensor_digest(example)) for row, example in zip(rows, batch, strict=True)}
    often = Counter(tensor_digest(example) for example in truth.candidates)
    often.subtract({name for *_, name in used} & often.keys())  # the used one itself, which is a candidate, too
    often.update(name for *_, name in used)
    return often


def with_remedy(
    verdict: Callable[[Sequence[FindingResult]], Judgement],
) -> Callable[[Sequence[FindingResult]], Judgement]:
    """Return the verdict that, where there are too few other batches to exclude luck, says why and what to do."""

    def judged(findings: Sequence[FindingResult]) -> Judgement:
        found, best = verdict(findings), by_fisher(findings)[1]
        if found.verdict != "inconclusive" or best is None or best <= SURE or found.evidence is None:
            return found
        shift = min((f.blind_p_value for f in findings if f.blind_p_value is not None), default=1.0)
        if shift <= SHIFTED:
            told = f"without any update, the clients' examples can be told from held-out ones, p = {shift:.2g}"
            return found._replace(text=f"{found.text}; {told}", advice=REMEDY)
        if found.evidence.baseline == 1:  # others have the same
            return found
        return found._replace(advice=f"there are too few other examples to hold what was found against; {REMEDY}")

    return judged
