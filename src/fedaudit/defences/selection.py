"""Aggregators that choose: among whole updates by their distances, or value by value in each coordinate."""

from __future__ import annotations

import torch
from torch import Tensor

from fedaudit.defences.aggregation import Aggregate, Aggregator, Cohort, check_matrix, uniform
from fedaudit.defences.vectors import distances_to, middle, sorted_columns, squared_distances, weighted_sum
from fedaudit.utils.errors import BadInput
from fedaudit.utils.registry import register
from fedaudit.utils.validation import Count, Positive, Whole


@register
class Median(Aggregator):
    """The coordinate-wise median (Yin et al. 2018, Definition 1); of an even number the mean of the middle two.

    The weights are equal: every client decides some coordinate.
    """

    name = "median"
    summary = "coordinate-wise median"
    paper = "Yin et al. 2018, Definition 1"
    coordinatewise = True

    def __call__(self, updates: Tensor, cohort: Cohort | None = None) -> Aggregate:  # noqa: ARG002
        check_matrix(updates, "median")
        return Aggregate(middle(updates), uniform(updates))


@register
class TrimmedMean(Aggregator):
    """The coordinate-wise mean of what is left without the ``f`` largest and smallest values (Yin et al. 2018).

    The paper trims a share β of the clients at each end; here their number, f = β·n. It needs n > 2f.

    Args:
        f: how many values are left out at each end.
    """

    name = "trimmed-mean"
    summary = "coordinate-wise mean without the f largest and the f smallest values"
    paper = "Yin et al. 2018, Definition 2"
    coordinatewise = True

    f: Whole = 1

    def __call__(self, updates: Tensor, cohort: Cohort | None = None) -> Aggregate:  # noqa: ARG002
        f = self.f
        n = check_matrix(updates, "trimmed-mean", 2 * f + 1, f"n > 2f = {2 * f}")

        def average(values: list[Tensor]) -> Tensor:
            total = values[0].clone()
            for value in values[1:]:
                total += value
            return total.div_(len(values))

        return Aggregate(sorted_columns(updates, range(f, n - f), average), uniform(updates))


@register
class Krum(Aggregator):
    """The update whose squared distances to its n − f − 2 nearest sum to the least (Blanchard et al. 2017, §3).

    It needs n >= 2f + 3.

    Args:
        f: how many clients may be Byzantine.
    """

    name = "krum"
    summary = "the one update that is nearest to its neighbours"
    paper = "Blanchard et al. 2017"

    f: Whole = 1

    def __call__(self, updates: Tensor, cohort: Cohort | None = None) -> Aggregate:  # noqa: ARG002
        n = check_matrix(updates, "krum", 2 * self.f + 3, f"n >= 2f + 3 with f = {self.f}")
        scores = _scores(squared_distances(updates), n - self.f - 2)
        return _mean_of(updates, _best(scores)[:1], scores, f"sum of squared distances to {n - self.f - 2} neighbours")


@register
class MultiKrum(Aggregator):
    """The plain mean of the ``m`` updates of least Krum score (Blanchard et al. 2017, §4).

    All scores are taken once, among all n updates. It needs n >= 2f + 3 and n >= m.

    Args:
        f: how many clients may be Byzantine.
        m: how many updates to average; n − f if None.
    """

    name = "multi-krum"
    summary = "mean of the m updates nearest to their neighbours"
    paper = "Blanchard et al. 2017"

    f: Whole = 1
    m: Count | None = None

    def __call__(self, updates: Tensor, cohort: Cohort | None = None) -> Aggregate:  # noqa: ARG002
        n = check_matrix(updates, "multi-krum", 2 * self.f + 3, f"n >= 2f + 3 with f = {self.f}")
        chosen = n - self.f if self.m is None else self.m
        if chosen > n:
            raise BadInput(f"the aggregator 'multi-krum' can't average m = {self.m} of {n} updates; lower m")
        scores = _scores(squared_distances(updates), n - self.f - 2)
        return _mean_of(
            updates, sorted(_best(scores)[:chosen]), scores, f"sum of squared distances to {n - self.f - 2} neighbours"
        )


@register
class Bulyan(Aggregator):
    """Per coordinate, the mean of the β values nearest to the median of the θ updates that Krum selects.

    El Mhamdi et al. 2018, Algorithm 2: Krum is repeated without replacement, with all scores taken anew among those
    that are left, until θ = n − 2f are selected; β = θ − 2f. The median is one of the values, of an even number the
    lower one in the middle; of two values equally far from it the lower one is taken.

    Where so few are left that Krum has no neighbour to count (n − f − 2 < 1), it counts one, which the paper leaves
    open. The weights are equal over the selected. It needs n >= 4f + 3.

    Args:
        f: how many clients may be Byzantine.
    """

    name = "bulyan"
    summary = "Krum again and again, then a mean of the values around the median"
    paper = "El Mhamdi et al. 2018"

    f: Whole = 1

    def __call__(self, updates: Tensor, cohort: Cohort | None = None) -> Aggregate:  # noqa: ARG002
        n = check_matrix(updates, "bulyan", 4 * self.f + 3, f"n >= 4f + 3 with f = {self.f}")
        theta, beta = n - 2 * self.f, n - 4 * self.f
        distances = squared_distances(updates)
        left, selected = list(range(n)), []
        for _ in range(theta):
            among = distances[left][:, left]
            selected.append(left.pop(_best(_scores(among, max(1, len(left) - self.f - 2)))[0]))
        selected.sort()
        rejected = dict.fromkeys(left, f"not among the {theta} that Krum selected one after the other")
        vector = sorted_columns(updates, range(theta), lambda v: _around_median(v, beta), selected)
        return Aggregate(vector, uniform(updates, selected), rejected)


@register
class InferGuard(Aggregator):
    """The plain mean of the updates with ‖gᵢ − median‖₂ ≤ λ·‖median‖₂ (Xu et al. 2024, Eq. 1 and 2).

    Where there is none, the update nearest to the median is taken, and ``fallback`` says so. On updates, as in the
    paper: on whole weights the rule would reject next to nothing.

    Args:
        lambda_: in scenarios ``lambda``. The paper's: MNIST 2.0, Fashion-MNIST 1.8, AT&T 2.8, SVHN 3.0, GTSRB 1.2.
    """

    name = "inferguard"
    summary = "mean of the updates that are near to the coordinate-wise median"
    paper = "Xu et al. 2024 (InferGuard), Eq. 1-2"

    lambda_: Positive = 2.0

    def __call__(self, updates: Tensor, cohort: Cohort | None = None) -> Aggregate:  # noqa: ARG002
        n = check_matrix(updates, "inferguard")
        centre = middle(updates)
        distances = distances_to(updates, centre).sqrt()
        limit = self.lambda_ * float(torch.linalg.vector_norm(centre, dtype=torch.float64))
        benign = [i for i in range(n) if float(distances[i]) <= limit]
        fallback = None
        if not benign:
            benign = [int(distances.argmin())]
            fallback = "no update was near enough to the median; the nearest one was taken"
        rejected = {
            i: f"{float(distances[i]):.3g} from the median, more than λ times its norm = {limit:.3g}"
            for i in range(n)
            if i not in benign
        }
        weights = uniform(updates, benign)
        return Aggregate(weighted_sum(updates, weights), weights, rejected, fallback)


def _scores(distances: Tensor, neighbours: int) -> Tensor:
    """Return (n, 2) sums of the squared distances to the nearest others, and to all, which decides between equals."""
    others = distances.sort(dim=1).values[:, 1:]  # without the update itself, at distance 0
    return torch.stack([others[:, :neighbours].sum(dim=1), others.sum(dim=1)], dim=1)


def _best(scores: Tensor) -> list[int]:
    """Return the rows in ascending order of their scores."""
    return sorted(range(len(scores)), key=lambda row: scores[row].tolist())


def _mean_of(updates: Tensor, chosen: list[int], scores: Tensor, what: str) -> Aggregate:
    weights = uniform(updates, chosen)
    worst = float(scores[chosen, 0].max())
    rejected = {
        i: f"{what} {float(scores[i, 0]):.3g}, the best have {worst:.3g} or less"
        for i in range(len(updates))
        if i not in chosen
    }
    return Aggregate(weighted_sum(updates, weights), weights, rejected)


def _around_median(values: list[Tensor], beta: int) -> Tensor:
    """Return the mean of the ``beta`` values nearest to the median, of ascending ``values``, coordinate by coordinate.

    These are neighbours: the window moves up while its lowest value is farther from the median than the next above it.
    """
    theta = len(values)
    centre = values[(theta - 1) // 2]
    moves = [centre - values[i] > values[i + beta] - centre for i in range(theta - beta)]
    total = values[0].new_zeros(values[0].shape)
    for k, value in enumerate(values):
        inside = ~moves[k] if k < theta - beta else None
        if k >= beta:
            inside = moves[k - beta] if inside is None else inside & moves[k - beta]
        total += value if inside is None else value.where(inside, 0.0)
    return total.div_(beta)
