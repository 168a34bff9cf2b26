"""Intervals and tests behind verdicts: closed forms and resampling from scipy."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from scipy.stats import binomtest, bootstrap, combine_pvalues, mannwhitneyu, rankdata, ttest_1samp
from torch import Tensor

from fedaudit.results import Interval, MetricResult
from fedaudit.utils.seeds import derive_seed

SURE = 0.01  # a leak is claimed where guessing does as well with at most this probability
DOUBT = 0.05  # between the two, more data are needed to decide

_FEW = 20  # values, up to which an interval is Student's
_FEW_RANKED = 8  # scores on one side, up to which tied ranks are counted through
_LEAST = 1e-300  # a p-value that underflowed has a logarithm, too


def interval(
    values: Sequence[float], *, resamples: int, seed: int, least: float = -math.inf, most: float = math.inf
) -> Interval:
    """Return mean, median and a 95 % interval of the mean; with one value it has no width.

    Of up to 20 values Student's: the percentile bootstrap, which is taken of more, is too narrow for so few. It ends at
    what a value can be, from ``least`` to ``most``.
    """
    data = np.asarray(values, dtype=float)
    if len(data) <= _FEW:
        found = paired_interval(values)
        return found.model_copy(update={"low": max(found.low, least), "high": min(found.high, most)})
    low = high = float(data.mean())
    if np.ptp(data) > 0:
        rng = np.random.default_rng(derive_seed(seed, "bootstrap"))
        ends = bootstrap((data,), np.mean, n_resamples=resamples, method="percentile", rng=rng).confidence_interval
        low, high = float(ends.low), float(ends.high)
    return Interval(mean=float(data.mean()), median=float(np.median(data)), low=low, high=high, n=len(data))


def paired_interval(differences: Sequence[float]) -> Interval:
    """Return mean, median and the 95 % Student interval of the mean of paired differences."""
    data = np.asarray(differences, dtype=float)
    low = high = float(data.mean())
    if len(data) > 1 and np.ptp(data) > 1e-12 * np.abs(data).max():  # less is rounding
        ends = ttest_1samp(data, 0.0).confidence_interval(0.95)
        low, high = float(ends.low), float(ends.high)
    return Interval(mean=float(data.mean()), median=float(np.median(data)), low=low, high=high, n=len(data))


def proportion(count: int, n: int) -> tuple[float, float]:
    """Return the exact 95 % interval of a share of ``count`` in ``n`` (Clopper and Pearson 1934)."""
    ends = binomtest(count, n).proportion_ci(0.95, method="exact")
    return float(ends.low), float(ends.high)


def combined(p_values: Sequence[float]) -> float:
    """Return the p-value of several independent tests together (Fisher's method); a single one stays as it is."""
    if len(p_values) == 1:
        return p_values[0]
    return float(combine_pvalues([max(p, _LEAST) for p in p_values], method="fisher").pvalue)


def holm(p_values: Sequence[float]) -> list[float]:
    """Return the p-values corrected for their number, so that one level holds for all together (Holm 1979)."""
    corrected, largest = [0.0] * len(p_values), 0.0
    for done, i in enumerate(sorted(range(len(p_values)), key=lambda i: p_values[i])):
        largest = max(largest, min(1.0, (len(p_values) - done) * p_values[i]))
        corrected[i] = largest
    return corrected


def difference_test(differences: Sequence[float]) -> float:
    """Return the two-sided p-value of Student's test of the mean of paired differences; 1 of fewer than two.

    Equal differences tell nothing of their spread: for them it is the sign test's.
    """
    data = np.asarray(differences, dtype=float)
    if len(data) < 2 or not data.any():
        return 1.0
    if np.ptp(data) <= 1e-9 * np.abs(data).max():
        return float(2.0 ** (1 - len(data)))
    return float(ttest_1samp(data, 0.0).pvalue)


def sign_test(better: int, worse: int) -> float:
    """Return the one-sided p-value of ``better`` against ``worse`` of paired outcomes that differ (exact McNemar)."""
    return float(binomtest(better, better + worse, 0.5, alternative="greater").pvalue) if better + worse else 1.0


def rank_test(members: Tensor, others: Tensor) -> tuple[float, float]:
    """Return the AUC of members' (n,) against others' (m,) scores, and the one-sided Mann-Whitney test's p-value."""
    found = mannwhitneyu(members, others, alternative="greater")
    p_value = float(found.pvalue)
    both = torch.cat([members, others])
    if min(len(members), len(others)) <= _FEW_RANKED and len(both.unique()) < len(both):
        p_value = _of_tied_ranks(rankdata(both), len(members))
    return float(found.statistic) / (len(members) * len(others)), p_value


def _of_tied_ranks(ranks: np.ndarray, n: int) -> float:
    """Return the exact probability that n of the ranks, drawn at random, have at least the sum of the first n.

    scipy takes the normal approximation for ties, which is much too sure where either side is few.
    """
    few = min(n, len(ranks) - n)
    own = np.rint(2 * ranks).astype(int)  # midranks are halves
    own = own if few == n else own.max() - own[::-1]  # the others, from the other end
    ways = np.zeros((few + 1, int(np.sort(own)[-few:].sum()) + 1))  # how many draws of so many have such a sum
    ways[0, 0] = 1
    for rank in own:
        ways[1:, rank:] += ways[:-1, : ways.shape[1] - rank]
    return float(ways[few, own[:few].sum() :].sum() / ways[few].sum())


def auc_interval(
    members: Tensor, others: Tensor, *, resamples: int, seed: int, paired: bool = True
) -> tuple[float, float]:
    """Return the 95 % percentile bootstrap interval of the AUC over matched pairs of records.

    Where the AUC is 0 or 1 resampling shows no spread: then the open end is that of the exact interval of as many coin
    tosses as there are pairs. ``members`` are (n,) scores, ``others`` (n,) those of the matched non-members; unless
    they are ``paired``, ``others`` are (m,), and each side is drawn by itself.
    """
    n, m = len(members), len(others)
    rng = np.random.default_rng(derive_seed(seed, "bootstrap"))
    # infinite scores have a rank, too
    ranks = torch.cat([members, others]).unique(return_inverse=True)[1].numpy()
    drawn = rng.integers(0, n, size=(resamples, n))
    areas = []
    free = drawn if paired else rng.integers(0, m, size=(resamples, m))
    parts = max(1, resamples * n // 1_000_000)
    for rows, theirs in zip(np.array_split(drawn, parts), np.array_split(free, parts), strict=True):
        both = rankdata(np.concatenate([ranks[:n][rows], ranks[n:][theirs]], axis=1), axis=1)
        areas.append((both[:, :n].sum(axis=1) - n * (n + 1) / 2) / (n * m))
    low, high = np.percentile(np.concatenate(areas), [2.5, 97.5])
    if low == high:
        fewer = min(n, m)
        ends = proportion(round(float(low) * fewer), fewer)
        return min(float(low), ends[0]), max(float(high), ends[1])
    return float(low), float(high)


def pooled(metrics: Sequence[MetricResult], least: float = -math.inf, most: float = math.inf) -> Interval | None:
    """Return the mean of a metric over several runs, with the interval that each run's own interval gives it.

    ``n`` is the sum over the runs. The interval ends at what a value can be, from ``least`` to ``most``. None unless
    every run has an interval.
    """
    values = [m.value for m in metrics]
    ends = [(m.low, m.high, m.n) for m in metrics]
    if not ends or any(low is None or high is None or not n for low, high, n in ends):
        return None
    n = sum(n or 0 for _, _, n in ends)
    mean = float(np.mean(values))
    if len(metrics) == 1:
        low, high = ends[0][0] or 0.0, ends[0][1] or 0.0
    else:
        below = math.sqrt(sum((v - (low or 0.0)) ** 2 for v, (low, _, _) in zip(values, ends, strict=True)))
        above = math.sqrt(sum(((high or 0.0) - v) ** 2 for v, (_, high, _) in zip(values, ends, strict=True)))
        low, high = max(mean - below / len(metrics), least), min(mean + above / len(metrics), most)
    return Interval(mean=mean, median=float(np.median(values)), low=low, high=high, n=n)


def roc(members: Tensor, others: Tensor) -> tuple[Tensor, Tensor]:
    """Return the ROC curve of scores: shares (k,) of (m,) ``others``, (n,) ``members`` that pass, from none to all."""
    from sklearn.metrics import roc_curve  # takes a second

    ranks = torch.cat([members, others]).unique(return_inverse=True)[1]  # infinite scores have a rank, too
    truth = torch.arange(len(ranks)) < len(members)
    false, true, _ = roc_curve(truth.numpy(), ranks.numpy(), drop_intermediate=False)
    return torch.from_numpy(false), torch.from_numpy(true)


def auc(members: Tensor, others: Tensor) -> float:
    """Return the area under the ROC curve: the probability that a member's score is higher, ties counted half."""
    false, true = roc(members, others)
    return float(torch.trapezoid(true, false))


def tpr_at(members: Tensor, others: Tensor, share: float) -> float:
    """Return the largest share of ``members`` that pass a threshold which at most ``share`` of ``others`` pass."""
    false, true = roc(members, others)
    return float(true[false <= share].max())
