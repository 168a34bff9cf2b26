"""Aggregators that weigh whole updates: FedAvg, the plain mean, AFA, FLTrust."""

from __future__ import annotations

from dataclasses import field
from typing import Annotated

import torch
from pydantic import Field
from scipy.stats import beta as beta_distribution
from torch import Tensor

from fedaudit.defences.aggregation import Aggregate, Aggregator, Cohort, check_matrix, uniform
from fedaudit.defences.vectors import gram, inner_products, weighted_sum
from fedaudit.utils.errors import BadInput
from fedaudit.utils.registry import register
from fedaudit.utils.validation import Count, Number, Positive

_SMALL = 10_000_000  # elements of the matrix


@register
class Mean(Aggregator):
    """The plain mean.

    FedAvg (McMahan et al. 2017, Algorithm 1) weighs clients by their examples; this rule doesn't.
    """

    name = "mean"
    summary = "plain mean of the updates: no defence"
    paper = "McMahan et al. 2017, unweighted"
    averages = "equally"

    def __call__(self, updates: Tensor, cohort: Cohort | None = None) -> Aggregate:  # noqa: ARG002
        check_matrix(updates, "mean")
        weights = uniform(updates)
        small = updates.numel() <= _SMALL  # where torch's own is as quick as a matrix product, or quicker
        return Aggregate(updates.mean(dim=0) if small else weighted_sum(updates, weights), weights)


@register
class FedAvg(Aggregator):
    """Σ nₖ·updateₖ / Σ nₖ (McMahan et al. 2017, Algorithm 1).

    nₖ is the number of examples that the client holds, which it tells the server; where it isn't told, that of those
    that the update was made from.
    """

    name = "fedavg"
    summary = "mean weighted by the clients' examples: no defence"
    paper = "McMahan et al. 2017"
    averages = "by examples"

    def __call__(self, updates: Tensor, cohort: Cohort | None = None) -> Aggregate:
        n = check_matrix(updates, "fedavg")
        weights = _examples(n, cohort, "fedavg").to(updates.dtype)
        weights /= weights.sum()
        return Aggregate(weighted_sum(updates, weights), weights)


@register(frozen=False)
class AFA(Aggregator):
    """The mean weighted by examples and reputation over the clients whose direction isn't unusual.

    Muñoz-González et al. 2019, Algorithm 1. Again and again: cosine of every remaining update to their aggregate; if
    the cosines' mean lies below their median, those below median − ξσ are dropped, otherwise those above median + ξσ;
    ξ grows by ``step``; until nothing is dropped. A client's reputation is Beta(α + rounds kept, β + rounds dropped);
    its mean weighs the client in the next round, and it is blocked for good once P(reputation < 1/2) exceeds ``block``.

    Departure: the cosines are those of updates, not of whole models, all of which point the same way. What the paper
    leaves open: σ is the population's.

    Args:
        xi: width of the accepted band at first, in standard deviations.
        step: by which it grows.
        alpha: of the prior reputation.
        beta: of the prior reputation.
        block: certainty at which a client is blocked.
    """

    name = "afa"
    summary = "adaptive federated averaging: drops updates of unusual direction, blocks clients of bad reputation"
    paper = "Muñoz-González et al. 2019"

    xi: Positive = 2.0
    step: Positive = 0.5
    alpha: Positive = 3.0
    beta: Positive = 3.0
    block: Annotated[Number, Field(gt=0, lt=1)] = 0.95

    kept: dict[int, int] = field(default_factory=dict, init=False)  # in how many rounds, by client
    dropped: dict[int, int] = field(default_factory=dict, init=False)

    def __call__(self, updates: Tensor, cohort: Cohort | None = None) -> Aggregate:
        n = check_matrix(updates, "afa")
        examples = _examples(n, cohort, "afa")
        assert cohort is not None  # _examples saw to it
        clients = cohort.clients or tuple(range(n))

        def posterior(client: int) -> tuple[float, float]:
            return self.alpha + self.kept.get(client, 0), self.beta + self.dropped.get(client, 0)

        blocked = {i for i, c in enumerate(clients) if beta_distribution.cdf(0.5, *posterior(c)) > self.block}
        rejected = dict.fromkeys(sorted(blocked), f"blocked: P(reputation < 1/2) > {self.block:g}")
        good = [i for i in range(n) if i not in blocked]
        if not good:
            return Aggregate(torch.zeros_like(updates[0]), torch.zeros(n), rejected, "all clients are blocked")
        reputation = torch.tensor([a / (a + b) for a, b in map(posterior, clients)], dtype=torch.float64)
        products = gram(updates)
        trust = examples * reputation
        xi = self.xi
        while True:
            cosines = _cosines_to_aggregate(products, trust, good)
            middle = float(cosines.quantile(0.5))
            spread = max(float(cosines.std(correction=0)), 1e-12)  # alike but for rounding
            below = float(cosines.mean()) < middle
            unusual = cosines < middle - xi * spread if below else cosines > middle + xi * spread
            for position in torch.nonzero(unusual).flatten().tolist():
                side = "below" if below else "above"
                rejected[good[position]] = (
                    f"cosine to the aggregate {cosines[position]:.3f}, {side} the median {middle:.3f} "
                    f"by more than {xi:g}σ"
                )
            if not unusual.any():
                break
            good = [i for i, bad in zip(good, unusual.tolist(), strict=True) if not bad]
            xi += self.step
        for i, client in enumerate(clients):
            if i in good:
                self.kept[client] = self.kept.get(client, 0) + 1
            elif i not in blocked:
                self.dropped[client] = self.dropped.get(client, 0) + 1
        weights = torch.zeros(n, dtype=torch.float64)
        weights[good] = trust[good] / trust[good].sum()
        weights = weights.to(updates.dtype)
        return Aggregate(weighted_sum(updates, weights), weights, rejected)


@register
class FLTrust(Aggregator):
    """Σ tᵢ·‖g₀‖/‖gᵢ‖·gᵢ / Σ tᵢ with tᵢ = ReLU(cos(gᵢ, g₀)) (Cao et al. 2021, Eq. 2 to 4).

    g₀ is the update that the server makes itself from its root data, as a client would. The paper leaves open what
    happens where nobody is trusted: here the model stays as it is.

    Args:
        root_examples: so many examples, drawn from the clients' data, are the root data that the simulator trains on
            (the paper: 100).
    """

    name = "fltrust"
    summary = "trusts an update as far as it points where the server's own update on root data points"
    paper = "Cao et al. 2021 (FLTrust), Eq. 2-4"
    root = True

    root_examples: Count = 100

    def __call__(self, updates: Tensor, cohort: Cohort | None = None) -> Aggregate:
        n = check_matrix(updates, "fltrust")
        if cohort is None or cohort.root is None:
            raise BadInput("the aggregator 'fltrust' needs the server's own update on root data: Cohort(root=…)")
        inner, lengths, target = inner_products(updates, cohort.root)
        cosines = torch.where((lengths > 0) & (target > 0), inner / (lengths * target), 0.0)
        trust = cosines.clamp(min=0)
        rejected = {
            i: f"points away from the root update: cosine {cosines[i]:.3f}"
            for i in torch.nonzero(trust == 0)[:, 0].tolist()
        }
        if not bool(trust.any()):
            nothing = torch.zeros_like(updates[0])
            return Aggregate(nothing, torch.zeros(n), rejected, "no update was trusted; the model stayed as it was")
        weights = trust / trust.sum()
        scaled = torch.where(weights > 0, weights * target / lengths, 0.0)
        return Aggregate(weighted_sum(updates, scaled.to(updates.dtype)), weights.to(updates.dtype), rejected)


def _examples(n: int, cohort: Cohort | None, name: str) -> Tensor:
    if cohort is None or len(cohort.examples) != n:
        raise BadInput(f"the aggregator '{name}' needs the number of examples of each of the {n} updates")
    return torch.tensor(cohort.examples, dtype=torch.float64)


def _cosines_to_aggregate(products: Tensor, trust: Tensor, rows: list[int]) -> Tensor:
    """Return the cosine of each of ``rows`` to their weighted mean, from all rows' inner products."""
    inside = products[rows][:, rows]
    weights = trust[rows] / trust[rows].sum()
    inner, square = inside @ weights, weights @ inside @ weights
    lengths = inside.diagonal().sqrt() * square.clamp(min=0).sqrt()
    return torch.where(lengths > 0, inner / lengths, 0.0)
