"""Which records count, and what tells members from others by the records alone: whether the draw is confounded."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from scipy.stats import rankdata
from torch import Tensor
from torch.nn.functional import one_hot

from fedaudit.evaluation.finding_types import Metric
from fedaudit.evaluation.statistics import auc, auc_interval
from fedaudit.results import MetricResult
from fedaudit.transcript.observation import Observation
from fedaudit.transcript.queries import NOBODY, UNUSED
from fedaudit.transcript.truth import Truth
from fedaudit.utils import seeds
from fedaudit.utils.fingerprint import fingerprint

_FOLDS = 5
_RIDGE = 0.1  # of a kernel whose diagonal is 1
_SWAPS = 999
_VALUES = 2000  # distinct tokens that are counted, the most frequent ones
_RESAMPLES = 2000
FEWEST, MOST = 10, 1000  # pairs: of fewer no test could exclude luck; of more a random choice is taken

BLIND_AUC = Metric(
    "membership_blind_auc",
    "the same probability by a classifier of the records alone, without any model: what to hold it against",
    higher_is_better=False,
    ends=(0, 1),
)
CONFOUNDED = (
    "members differ from the other records before any training, which would pass for what training gave away; draw "
    "both from the same source (let the clients hold a random part of one split)"
)
_LARGEST = 1e100  # scores may be infinite, and a mean of two infinities is none
_told_blindly: dict[str, tuple[Tensor, Tensor, float]] = {}  # by the records and their pairs, the last ones


def blind_scores(members: Tensor, others: Tensor, seed: int) -> tuple[Tensor, Tensor, float]:
    """Return the scores (k,) of members and others by a classifier of the data alone, and the p-value of their AUC.

    Both are (k, d), see :func:`features`, and row i of ``others`` is matched to row i of ``members``. The classifier is
    ridge regression with the mean of two Gaussian kernels, each as wide as its median distance: one on the features,
    one on what the inputs' values are like (:func:`summary`), which augmentation and another normalisation change. It
    is cross-validated over five folds that keep pairs together. Its scores are linear in the labels, so the permutation
    test, which swaps member and other within pairs 999 times at random and learns anew each time, costs one matrix
    product. The test is exact: where member and other are exchangeable, it gives 1 % or less with a probability of at
    most 1 %, whatever the data are.
    """
    k = len(members)
    rng = seeds.generator(seed, "blind")
    both = torch.cat([members, others]).double()
    kernel = (_kernel(both) + _kernel(summary(both))) / 2
    fold = (torch.randperm(k, generator=rng) % _FOLDS).repeat(2)
    of_pairs = torch.zeros(2 * k, k, dtype=torch.float64)  # scores = of_pairs @ signs
    for f in range(_FOLDS):
        inside, outside = torch.nonzero(fold == f)[:, 0], torch.nonzero(fold != f)[:, 0]
        known = kernel[outside][:, outside] + _RIDGE * torch.eye(len(outside), dtype=torch.float64)
        weights = torch.linalg.solve(known, kernel[outside][:, inside]).T
        half = len(outside) // 2  # members first, and the others of the same pairs in the same order
        of_pairs[inside[:, None], outside[:half]] = weights[:, :half] - weights[:, half:]
    signs = torch.ones(k, 1 + _SWAPS, dtype=torch.float64)
    signs[:, 1:] -= 2.0 * torch.randint(2, (k, _SWAPS), generator=rng)
    scores = of_pairs @ signs
    # Rounded, so that scores which are equal but for the order of sums are equal.
    ranks = torch.from_numpy(rankdata(np.round(scores.numpy(), 10), axis=0))
    sums = ((ranks[:k] - ranks[k:]) * signs).sum(dim=0)
    p_value = float((sums >= sums[0]).double().mean())
    return scores[:k, 0], scores[k:, 0], p_value


def summary(rows: Tensor) -> Tensor:
    """Return (n, 4): mean, deviation, least and largest value of each of (n, d) rows."""
    return torch.stack([rows.mean(1), rows.std(1, correction=0), rows.amin(1), rows.amax(1)], dim=1)


def _kernel(rows: Tensor) -> Tensor:
    spread = rows.std(dim=0)
    rows = (rows - rows.mean(dim=0)) / torch.where(spread > 0, spread, torch.ones_like(spread))
    squares = torch.cdist(rows, rows).square()
    return torch.exp(-squares / squares.median().clamp(min=1e-9))


def features(inputs: Tensor, labels: Tensor) -> Tensor:
    """Return (n, d) float64: inputs (n, ...) flattened, of tokens how often each occurs, then labels (n,) or (n, 1).

    Where the labels are a text's own words, they say nothing more.
    """
    flat = inputs.flatten(1)
    if not flat.is_floating_point():
        values, place, number = flat.unique(return_inverse=True, return_counts=True)
        counts = torch.zeros(len(flat), len(values), dtype=torch.float64)
        counts.scatter_add_(1, place.reshape(flat.shape), torch.ones(flat.shape, dtype=torch.float64))
        flat = counts[:, number.argsort(descending=True)[:_VALUES]]
        if labels.shape == inputs.shape:
            return flat
    own = labels.reshape(len(flat), -1)
    told = own if own.is_floating_point() else one_hot(own.unique(return_inverse=True)[1].reshape(own.shape)).flatten(1)
    return torch.cat([flat.double(), told.double()], dim=1)


def evaluated(truth: Truth, client: int | None) -> Tensor:
    """Return the records (k,) that count: used members, of ``client`` if given, and their matched non-members."""
    counts = truth.owners > UNUSED
    counts &= truth.owners != NOBODY
    if client is not None:
        counts &= truth.owners == client
    return torch.nonzero(counts | counts[truth.matched])[:, 0]


def client_of(observation: Observation) -> int | None:
    """Return the client whose messages were received; None where there are several, or a sum of several."""
    clients = {client for m in observation.messages for client in m.update.members or (m.client,)}
    return clients.pop() if len(clients) == 1 else None


def none_used(truth: Truth, own: int | None) -> str:
    whose = "a client that updates used" if own is None else f"client {own}"
    return f"none of the {len(truth.owners)} records is an example of {whose}; raise threat.target_records"


class Units(NamedTuple):
    """What is counted: records, or where several are of one person, persons.

    Attributes:
        of: ``records`` or ``persons``.
        rows: (k,) the records.
        place: (k,) which unit each of them is of, from 0 to u - 1.
        first: (u,) a record of each unit.
        pairs: (2, p) units that were trained on, and those that are matched to them.
    """

    of: str
    rows: Tensor
    place: Tensor
    first: Tensor
    pairs: Tensor

    def mean(self, values: Tensor) -> Tensor:
        """Return the means (u, ...) over each unit's records of their ``values`` (k, ...), float64."""
        if self.of == "records":
            return values.double()
        count = torch.bincount(self.place).view(-1, *[1] * (values.ndim - 1))
        whole = torch.zeros(len(self.first), *values.shape[1:], dtype=torch.float64)
        return whole.index_add_(0, self.place, values.double().clamp(-_LARGEST, _LARGEST)) / count


def counted(truth: Truth, rows: Tensor) -> Units:
    """Return what is counted of the records ``rows``, ascending, which hold both of every matched pair."""
    whose = truth.persons if len(truth.persons) else torch.arange(len(truth.owners))
    known, place = whose[rows].unique(return_inverse=True)
    first = rows[torch.full((len(known),), len(rows)).scatter_reduce(0, place, torch.arange(len(rows)), "amin")]
    member = torch.nonzero(truth.owners[first] != NOBODY)[:, 0]
    other = torch.searchsorted(known, whose[truth.matched[first[member]]])
    of = "persons" if len(truth.persons) else "records"
    return Units(of, rows, place, first, torch.stack([member, other]))


def told_blindly(observation: Observation, truth: Truth) -> tuple[list[MetricResult], float | None]:
    """Return a records-only classifier's AUC over all pairs, and its p-value: the same for all clients and attacks.

    Where persons are counted, it is told the mean of a person's records.
    """
    records = observation.records
    units = counted(truth, evaluated(truth, None))
    pairs = units.pairs
    if records is None or pairs.shape[1] < FEWEST:
        return [], None
    if pairs.shape[1] > MOST:
        chosen = torch.randperm(pairs.shape[1], generator=seeds.generator(0, "blind", "pairs"))[:MOST]
        pairs = pairs[:, chosen.sort().values]
    key = fingerprint(records.inputs, records.labels, units.rows, units.place, pairs, truth.values)
    if key not in _told_blindly:  # the same for every attack on them
        told = features(records.inputs, records.labels)
        told = torch.cat([told, one_hot(truth.values).double()], dim=1) if len(truth.values) else told
        told = units.mean(told[units.rows])
        _told_blindly.clear()
        _told_blindly[key] = blind_scores(told[pairs[0]], told[pairs[1]], 0)
    scores, others, p_value = _told_blindly[key]
    low, high = auc_interval(scores, others, resamples=_RESAMPLES, seed=0)
    return [BLIND_AUC.of(auc(scores, others), 0.5, low=low, high=high, n=pairs.numel(), of=units.of)], p_value
