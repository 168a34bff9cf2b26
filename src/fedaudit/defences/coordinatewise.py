"""Aggregators that treat every coordinate on its own: the median and the trimmed mean."""

from __future__ import annotations

from torch import Tensor

from fedaudit.defences.aggregation import Aggregate, Aggregator, Cohort, check_matrix, uniform
from fedaudit.defences.vectors import middle, sorted_columns
from fedaudit.utils.registry import register
from fedaudit.utils.validation import Whole


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
