"""Aggregators that weigh whole updates: FedAvg, the plain mean, AFA, FLTrust."""

from __future__ import annotations

from typing import Annotated

import torch
from pydantic import Field
from scipy.stats import beta as beta_distribution
from torch import Tensor

from fedaudit.defences.aggregation import AGGREGATORS, Aggregate, Cohort, check_matrix, uniform
from fedaudit.defences.vectors import gram, inner_products, weighted_sum
from fedaudit.utils.errors import BadInput
from fedaudit.utils.validation import Count, Number, Positive

_SMALL = 10_000_000  # numbers of the matrix


@AGGREGATORS.register(
    "mean", "plain mean of the updates: no defence", side="server", paper="McMahan et al. 2017, unweighted"
)
def mean(updates: Tensor, cohort: Cohort | None = None) -> Aggregate:  # noqa: ARG001
    """Return the plain mean of (n, d) ``updates``.

    FedAvg (McMahan et al. 2017, Algorithm 1) weighs clients by their examples; this rule doesn't.

    Raises:
        BadInput: there is no update.
    """
    check_matrix(updates, "mean")
    weights = uniform(updates)
    small = updates.numel() <= _SMALL  # where torch's own is as quick as a matrix product, or quicker
    return Aggregate(updates.mean(dim=0) if small else weighted_sum(updates, weights), weights)


@AGGREGATORS.register(
    "fedavg", "mean weighted by the clients' examples: no defence", side="server", paper="McMahan et al. 2017"
)
def fedavg(updates: Tensor, cohort: Cohort | None = None) -> Aggregate:
    """Return Σ nₖ·updateₖ / Σ nₖ (McMahan et al. 2017, Algorithm 1).

    nₖ is the number of examples that the update was made from, which is the client's own number where clients pass over
    all of their data.

    Raises:
        BadInput: there is no update, or the numbers of examples aren't known.
    """
    n = check_matrix(updates, "fedavg")
    weights = _examples(n, cohort, "fedavg").to(updates.dtype)
    weights /= weights.sum()
    return Aggregate(weighted_sum(updates, weights), weights)


@AGGREGATORS.register(
    "afa",
    "adaptive federated averaging: drops updates of unusual direction, blocks clients of bad reputation",
    side="server",
    paper="Muñoz-González et al. 2019",
)
def afa(
    updates: Tensor,
    cohort: Cohort | None = None,
    *,
    xi: Positive = 2.0,
    step: Positive = 0.5,
    alpha: Positive = 3.0,
    beta: Positive = 3.0,
    block: Annotated[Number, Field(gt=0, lt=1)] = 0.95,
) -> Aggregate:
    """Return the mean weighted by examples and reputation over the clients whose direction isn't unusual.

    Muñoz-González et al. 2019, Algorithm 1. Again and again: cosine of every remaining update to their aggregate; if
    the cosines' mean lies below their median, those below median − ξσ are dropped, otherwise those above median + ξσ;
    ξ grows by ``step``; until nothing is dropped. A client's reputation is Beta(α + rounds kept, β + rounds dropped);
    its mean weighs the client in the next round, and it is blocked for good once P(reputation < 1/2) exceeds ``block``.

    Departure: the cosines are those of updates, not of whole models, all of which point the same way. What the paper
    leaves open: σ is the population's.

    Args:
        updates: (n, d).
        cohort: clients and examples; in ``state`` the reputations of the rounds before.
        xi: width of the accepted band at first, in standard deviations.
        step: by which it grows.
        alpha: of the prior reputation.
        beta: of the prior reputation.
        block: certainty at which a client is blocked.

    Raises:
        BadInput: there is no update, or the numbers of examples aren't known.
    """
    n = check_matrix(updates, "afa")
    examples = _examples(n, cohort, "afa")
    assert cohort is not None  # _examples saw to it
    clients = cohort.clients or tuple(range(n))
    kept, dropped = dict(cohort.state.get("kept", {})), dict(cohort.state.get("dropped", {}))

    def posterior(client: int) -> tuple[float, float]:
        return alpha + kept.get(client, 0), beta + dropped.get(client, 0)

    blocked = {i for i, c in enumerate(clients) if beta_distribution.cdf(0.5, *posterior(c)) > block}
    rejected = dict.fromkeys(sorted(blocked), f"blocked: P(reputation < 1/2) > {block:g}")
    good = [i for i in range(n) if i not in blocked]
    if not good:
        return Aggregate(
            torch.zeros_like(updates[0]), torch.zeros(n), rejected, "all clients are blocked", dict(cohort.state)
        )
    reputation = torch.tensor([a / (a + b) for a, b in map(posterior, clients)], dtype=torch.float64)
    products = gram(updates)
    shares = examples * reputation
    while True:
        cosines = _cosines_to_aggregate(products, shares, good)
        middle, spread = _median(cosines), float(cosines.std(correction=0))
        below = float(cosines.mean()) < middle
        unusual = cosines < middle - xi * spread if below else cosines > middle + xi * spread
        for position in torch.nonzero(unusual).flatten().tolist():
            side = "below" if below else "above"
            rejected[good[position]] = (
                f"cosine to the aggregate {cosines[position]:.3f}, {side} the median {middle:.3f} by more than {xi:g}σ"
            )
        if not unusual.any():
            break
        good = [i for i, bad in zip(good, unusual.tolist(), strict=True) if not bad]
        xi += step
    for i, client in enumerate(clients):
        if i in good:
            kept[client] = kept.get(client, 0) + 1
        elif i not in blocked:
            dropped[client] = dropped.get(client, 0) + 1
    weights = torch.zeros(n, dtype=torch.float64)
    weights[good] = shares[good] / shares[good].sum()
    weights = weights.to(updates.dtype)
    state = {"kept": kept, "dropped": dropped}
    return Aggregate(weighted_sum(updates, weights), weights, rejected, state=state)


@AGGREGATORS.register(
    "fltrust",
    "trusts an update as far as it points where the server's own update on root data points",
    side="server",
    paper="Cao et al. 2021 (FLTrust), Eq. 2-4",
    root=True,
)
def fltrust(updates: Tensor, cohort: Cohort | None = None, *, root_examples: Count = 100) -> Aggregate:  # noqa: ARG001
    """Return Σ tᵢ·‖g₀‖/‖gᵢ‖·gᵢ / Σ tᵢ with tᵢ = ReLU(cos(gᵢ, g₀)) (Cao et al. 2021, Eq. 2 to 4).

    g₀ is the update that the server makes itself from its root data, as a client would. The paper leaves open what
    happens where nobody is trusted: here the model stays as it is.

    Args:
        updates: (n, d).
        cohort: ``root`` is g₀.
        root_examples: so many examples, drawn from the clients' data, are the root data that the simulator trains on
            (the paper: 100).

    Raises:
        BadInput: there is no update, or no root update.
    """
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


def _cosines_to_aggregate(products: Tensor, shares: Tensor, rows: list[int]) -> Tensor:
    """Return the cosine of each of ``rows`` to their weighted mean, from all rows' inner products."""
    inside = products[rows][:, rows]
    weights = shares[rows] / shares[rows].sum()
    inner, square = inside @ weights, weights @ inside @ weights
    lengths = inside.diagonal().sqrt() * square.clamp(min=0).sqrt()
    return torch.where(lengths > 0, inner / lengths, 0.0)


def _median(values: Tensor) -> float:
    return float(values.quantile(0.5))
