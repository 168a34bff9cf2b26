"""Aggregators: against slow, obvious loops, against other libraries, and what holds for any matrix."""

from __future__ import annotations

import contextlib
import functools
import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binom
from torch import Tensor

from fedaudit.defences import vectors
from fedaudit.defences.aggregation import AGGREGATORS, Aggregate, Cohort
from fedaudit.utils.errors import BadInput
from fedaudit.utils.machine import import_torchvision, own_process
from fedaudit.utils.registry import make

Array = np.ndarray[Any, Any]


def matrix(n: int, d: int, seed: int = 0) -> Tensor:
    return torch.randn(n, d, generator=torch.Generator().manual_seed(seed))


def cohort(n: int, d: int) -> Cohort:
    return Cohort(tuple(range(n)), tuple(1 + 3 * i % 7 for i in range(n)), 0.5 + matrix(1, d, seed=99)[0])


# --- slow, obvious loops -------------------------------------------------------------------------------------------


def slow_mean(x: Array, c: Cohort) -> Array:
    return np.asarray(np.sum(x, axis=0) / len(x))


def slow_fedavg(x: Array, c: Cohort) -> Array:
    total: Array = np.sum([k * row for k, row in zip(c.examples, x, strict=True)], axis=0)
    return total / sum(c.examples)


def slow_median(x: Array, c: Cohort) -> Array:
    out = []
    for j in range(x.shape[1]):
        column = sorted(x[:, j])
        n = len(column)
        out.append(column[n // 2] if n % 2 else (column[n // 2 - 1] + column[n // 2]) / 2)
    return np.array(out)


def slow_trimmed(f: int) -> Callable[[Array, Cohort], Array]:
    def rule(x: Array, c: Cohort) -> Array:
        columns = [sorted(x[:, j])[f : len(x) - f] for j in range(x.shape[1])]
        return np.array([sum(column) / len(column) for column in columns])

    return rule


def krum_scores(x: Array, neighbours: int) -> list[float]:
    scores = []
    for i in range(len(x)):
        distances = sorted(sum((a - b) ** 2 for a, b in zip(x[i], x[j], strict=True)) for j in range(len(x)) if j != i)
        scores.append(sum(distances[:neighbours]))
    return scores


def slow_krum(f: int) -> Callable[[Array, Cohort], Array]:
    return lambda x, c: x[int(np.argmin(krum_scores(x, len(x) - f - 2)))]


def slow_multi_krum(f: int, m: int) -> Callable[[Array, Cohort], Array]:
    return lambda x, c: x[np.argsort(krum_scores(x, len(x) - f - 2))[:m]].mean(axis=0)


def slow_bulyan(f: int) -> Callable[[Array, Cohort], Array]:
    def rule(x: Array, c: Cohort) -> Array:
        theta, left = len(x) - 2 * f, list(range(len(x)))
        chosen: list[int] = []
        while len(chosen) < theta:
            scores = krum_scores(x[left], max(1, len(left) - f - 2))
            whole = krum_scores(x[left], len(left) - 1)  # two that are each other's only neighbour tie
            chosen.append(left.pop(min(range(len(left)), key=lambda i: (scores[i], whole[i]))))
        out = []
        for j in range(x.shape[1]):
            column = sorted(x[chosen, j])
            middle = column[(theta - 1) // 2]
            out.append(np.mean(sorted(column, key=lambda v: abs(v - middle))[: theta - 2 * f]))
        return np.array(out)

    return rule


def slow_inferguard(factor: float) -> Callable[[Array, Cohort], Array]:
    def rule(x: Array, c: Cohort) -> Array:
        median = np.median(x, axis=0)
        far = [math.dist(row, median) for row in x]
        benign = [i for i in range(len(x)) if far[i] <= factor * math.hypot(*median)] or [int(np.argmin(far))]
        return np.asarray(x[benign].mean(axis=0))

    return rule


def slow_fltrust(x: Array, c: Cohort) -> Array:
    assert c.root is not None
    root = c.root.double().numpy()
    total, trust = np.zeros(x.shape[1]), 0.0
    for row in x:
        t = max(0.0, float(row @ root) / (math.hypot(*row) * math.hypot(*root)))
        total += t * math.hypot(*root) / math.hypot(*row) * row
        trust += t
    return total / trust


def slow_afa(x: Array, c: Cohort) -> Array:
    good, xi = list(range(len(x))), 2.0
    shares = [0.5 * k for k in c.examples]  # everybody's reputation is 3 / (3 + 3)
    while True:
        aggregate: Array = np.sum([shares[i] * x[i] for i in good], axis=0) / sum(shares[i] for i in good)
        cos = {i: float(x[i] @ aggregate) / (math.hypot(*x[i]) * math.hypot(*aggregate)) for i in good}
        mean, median, spread = np.mean([*cos.values()]), np.median([*cos.values()]), np.std([*cos.values()])
        bad = [i for i in good if (cos[i] < median - xi * spread if mean < median else cos[i] > median + xi * spread)]
        if not bad:
            return aggregate
        good, xi = [i for i in good if i not in bad], xi + 0.5


def slow_clipping(norm: float, weighted: bool) -> Callable[[Array, Cohort], Array]:
    def rule(x: Array, c: Cohort) -> Array:
        shares = [k / sum(c.examples) if weighted else 1 / len(x) for k in c.examples]
        rows = [row * min(1.0, norm / math.hypot(*row)) for row in x]
        return np.asarray(np.sum([share * row for share, row in zip(shares, rows, strict=True)], axis=0))

    return rule


# One row a rule: its settings, and the same thing slowly.
RULES: list[tuple[str, dict[str, Any], Callable[[Array, Cohort], Array]]] = [
    ("mean", {}, slow_mean),
    ("fedavg", {}, slow_fedavg),
    ("median", {}, slow_median),
    ("trimmed-mean", {}, slow_trimmed(1)),
    ("trimmed-mean", {"f": 3}, slow_trimmed(3)),
    ("krum", {}, slow_krum(1)),
    ("krum", {"f": 3}, slow_krum(3)),
    ("multi-krum", {"f": 2, "m": 4}, slow_multi_krum(2, 4)),
    ("multi-krum", {"f": 2}, lambda x, c: slow_multi_krum(2, len(x) - 2)(x, c)),
    ("bulyan", {}, slow_bulyan(1)),
    ("bulyan", {"f": 2}, slow_bulyan(2)),
    ("afa", {}, slow_afa),
    ("fltrust", {}, slow_fltrust),
    ("inferguard", {}, slow_inferguard(2.0)),
    ("inferguard", {"lambda": 3.3}, slow_inferguard(3.3)),
    ("fixed-clipping", {"noise_multiplier": 0, "clipping_norm": 6.5}, slow_clipping(6.5, weighted=True)),
    (
        "adaptive-clipping",
        {"noise_multiplier": 0, "initial_clipping_norm": 7, "average": "mean"},
        slow_clipping(7, weighted=False),
    ),
]


def test_every_aggregator_has_an_oracle():
    assert {name for name, _, _ in RULES} == set(AGGREGATORS.names())


@pytest.mark.parametrize(("name", "settings", "slow"), RULES)
@pytest.mark.parametrize("n", [11, 12])
def test_a_rule_is_what_its_paper_says(name, settings, slow, n, monkeypatch):
    monkeypatch.setattr(vectors, "_BLOCK", 64)
    monkeypatch.setattr(vectors, "_NARROWEST", 7)  # several blocks, the last of them short
    for seed in range(5):
        x = matrix(n, 40, seed)
        x[: 2 + seed] += 3  # neither too alike nor all alone
        found = make(AGGREGATORS, name, settings)(x, cohort(n, 40))
        expected = slow(x.double().numpy(), cohort(n, 40))
        np.testing.assert_allclose(found.vector.numpy(), expected, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize(("name", "settings", "slow"), RULES)
def test_who_sent_which_row_does_not_matter(name, settings, slow):
    x, whole = matrix(12, 30), cohort(12, 30)
    order = torch.randperm(12, generator=torch.Generator().manual_seed(3))
    shuffled = Cohort(tuple(order.tolist()), tuple(whole.examples[i] for i in order), whole.root)
    one, other = (make(AGGREGATORS, name, settings)(*args) for args in ((x, whole), (x[order], shuffled)))
    torch.testing.assert_close(one.vector, other.vector)
    torch.testing.assert_close(one.weights[order], other.weights)
    assert {int(order[row]) for row in other.rejected} == set(one.rejected)


@pytest.mark.parametrize(("name", "settings", "slow"), [rule for rule in RULES if not rule[0].endswith("-clipping")])
@given(factor=st.floats(1e-3, 1e3))
def test_twice_the_updates_give_twice_the_aggregate(name, settings, slow, factor):
    x, whole = matrix(12, 30), cohort(12, 30)
    rule, again = make(AGGREGATORS, name, settings), make(AGGREGATORS, name, settings)
    assert whole.root is not None
    scaled = Cohort(whole.clients, whole.examples, factor * whole.root)
    torch.testing.assert_close(rule(factor * x, scaled).vector, factor * again(x, whole).vector, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("name", "settings", "slow"), RULES)
def test_the_weights_are_shares_of_those_who_were_not_rejected(name, settings, slow):
    found = make(AGGREGATORS, name, settings)(matrix(12, 30), cohort(12, 30))
    assert float(found.weights.sum()) == pytest.approx(1)
    assert not found.weights[[*found.rejected]].any()
    assert (found.weights >= 0).all()
    assert all(found.rejected.values())


ROBUST = ["median", "trimmed-mean", "krum", "multi-krum", "bulyan", "inferguard"]


@pytest.mark.parametrize("name", ROBUST)
@given(size=st.floats(10, 1e6), seed=st.integers(0, 50), f=st.integers(1, 2))
def test_f_outliers_do_not_move_a_robust_rule(name, size, seed, f):
    n = 4 * f + 3
    honest = 1 + 0.1 * matrix(n - f, 20, seed)
    outliers = size * torch.sign(matrix(f, 20, seed + 1))
    found = make(AGGREGATORS, name, {"f": f} if name not in ("median", "inferguard") else {})(
        torch.cat([honest, outliers])
    )
    assert (found.vector >= honest.amin(dim=0) - 1e-5).all()
    assert (found.vector <= honest.amax(dim=0) + 1e-5).all()
    if name not in ("median", "trimmed-mean"):
        assert set(range(n - f, n)) <= set(found.rejected)


# --- what the rules need, say and remember -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "settings", "n", "words"),
    [
        ("bulyan", {"f": 2}, 10, "n >= 4f + 3 with f = 2: 11 updates a round or more, and there are 10"),
        ("krum", {}, 4, "n >= 2f + 3 with f = 1: 5"),
        ("multi-krum", {}, 4, "n >= 2f + 3 with f = 1: 5"),
        ("multi-krum", {"m": 9}, 8, "can't average m = 9 of 8"),
        ("trimmed-mean", {"f": 4}, 8, "n > 2f = 8: 9"),
    ],
)
def test_too_few_updates_are_refused_with_the_reason(name, settings, n, words):
    with pytest.raises(BadInput, match=re.escape(words)):
        make(AGGREGATORS, name, settings)(matrix(n, 3))


@pytest.mark.parametrize(
    ("name", "settings", "words"),
    [
        ("krum", {"g": 1}, "unknown key 'g'; known: f"),
        ("krum", {"f": -1}, "f: -1 isn't allowed|greater than or equal to 0"),
        ("inferguard", {"lamda": 1}, "did you mean 'lambda'"),
        ("inferguard", {"lambda": 0}, "greater than 0"),
        ("mean", {"f": 1}, "'mean' has no settings; leave 'f' out"),
        ("kurm", {}, "did you mean 'krum'"),
    ],
)
def test_wrong_settings_are_refused(name, settings, words):
    with pytest.raises(BadInput, match=words):
        make(AGGREGATORS, name, settings)


def test_what_a_rule_needs_is_asked_for():
    with pytest.raises(BadInput, match="n >= 1"):
        make(AGGREGATORS, "mean")(torch.empty(0, 4))
    for name in ("fedavg", "afa"):
        with pytest.raises(BadInput, match="number of examples"):
            make(AGGREGATORS, name)(matrix(5, 4))
    with pytest.raises(BadInput, match="root data"):
        make(AGGREGATORS, "fltrust")(matrix(5, 4))


def test_inferguard_says_when_nobody_is_near_enough():
    x = torch.eye(6) + 1e-3 * matrix(6, 6)  # the median is almost zero, all are far from it
    found = make(AGGREGATORS, "inferguard")(x)
    assert found.fallback is not None
    assert len(found.rejected) == 5
    (chosen,) = set(range(6)) - set(found.rejected)
    assert found.vector.equal(x[chosen])


def test_inferguard_takes_who_is_just_near_enough():
    x = torch.tensor([[1.0, 0.0], [1.0, 0.0], [3.0, 0.0]])  # the third is 2 = λ·‖median‖ from the median, exactly
    found = make(AGGREGATORS, "inferguard", {"lambda": 2.0})(x)
    assert found.weights.tolist() == pytest.approx([1 / 3] * 3)
    assert not found.rejected
    assert make(AGGREGATORS, "inferguard", {"lambda": 1.99})(x).weights.tolist() == [0.5, 0.5, 0.0]


def test_fltrust_trusts_nobody_who_points_away():
    root = torch.ones(4)
    found = make(AGGREGATORS, "fltrust")(-matrix(5, 4).abs() - 0.1, Cohort(root=root))
    assert not found.vector.any()
    assert found.fallback is not None
    assert len(found.rejected) == 5


def test_afa_drops_nobody_for_rounding():
    """Updates along one direction have cosines of 1 with the aggregate, but for the last digits."""
    updates = (0.1 + torch.arange(40.0))[:, None] * matrix(1, 50)
    assert make(AGGREGATORS, "afa")(updates, cohort(40, 50)).rejected == {}


def test_afa_blocks_a_client_that_is_dropped_again_and_again():
    rule = make(AGGREGATORS, "afa")
    direction = matrix(1, 50, 7)[0]
    rounds: list[Aggregate] = []
    for index in range(8):
        x = direction + 0.3 * matrix(10, 50, index)
        x[4] = -x[4]
        later = make(AGGREGATORS, "afa")  # what it remembers is all in its state
        later.load_state_dict(rule.state_dict())
        rule = later
        found = rule(x, Cohort(tuple(range(10)), (5,) * 10))
        assert 4 in found.rejected
        assert found.weights[4] == 0
        rounds.append(found)
    # P(Beta(3, 3 + k) < 1/2) = P(Binomial(5 + k, 1/2) >= 3) first exceeds 0.95 after k = 6 rounds
    needed = next(k for k in range(20) if binom.sf(2, 5 + k, 0.5) > 0.95)
    assert [r.rejected[4].startswith("blocked") for r in rounds] == [i >= needed for i in range(8)]
    assert rule.state_dict()["dropped"][4] == needed


# --- accuracy ------------------------------------------------------------------------------------------------------


@given(shift=st.sampled_from([0.0, 1e3]), outlier=st.sampled_from([0.0, 1e4]), first=st.booleans())
def test_distances_survive_a_common_offset_and_far_outliers(shift, outlier, first):
    x = 1e-2 * matrix(8, 5000)
    x[0 if first else 5] += outlier
    x = shift + x  # rounded here; what counts is the distance of the numbers as they are
    exact = torch.cdist(x.double(), x.double(), compute_mode="donot_use_mm_for_euclid_dist").square()
    torch.testing.assert_close(vectors.squared_distances(x), exact, rtol=1e-4, atol=0)


def test_distances_of_huge_numbers_do_not_overflow_silently():
    x = torch.tensor([[1e19, 0.0], [1e19, 1.0], [0.0, 0.0]])
    assert vectors.squared_distances(x)[0, 1] == pytest.approx(1)


@given(n=st.integers(1, 33), data=st.data())
def test_the_network_sorts(n, data):
    start = data.draw(st.integers(0, n - 1))
    stop = data.draw(st.integers(start + 1, n))
    x = matrix(n, 50, n).round(decimals=1)  # with ties
    expected = x.sort(dim=0).values[start:stop]
    seen: list[Tensor] = []

    def look(values: list[Tensor]) -> Tensor:
        seen.extend(value.clone() for value in values)
        return values[0]

    vectors.sorted_columns(x, range(start, stop), look)
    assert torch.stack(seen).equal(expected)
    assert x.equal(matrix(n, 50, n).round(decimals=1))


# --- other libraries, where they mean the same ---------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.peers
@pytest.mark.parametrize("n", [11, 24])
def test_byzfl_agrees(n):
    own_process()
    with contextlib.suppress(ImportError):
        import_torchvision()
    byzfl = pytest.importorskip("byzfl")
    x = matrix(n, 3000)
    x[0] += 3
    close = functools.partial(torch.testing.assert_close, rtol=1e-4, atol=1e-5)
    close(make(AGGREGATORS, "mean")(x).vector, byzfl.Average()(x))
    close(make(AGGREGATORS, "trimmed-mean", {"f": 2})(x).vector, byzfl.TrMean(f=2)(x))
    if n % 2:  # of an even number it takes the lower of the middle two
        close(make(AGGREGATORS, "median")(x).vector, byzfl.Median()(x))
    # its (Multi-)Krum looks at one neighbour more, n − f − 1 (and counts the update itself): f there is f − 1 here


@pytest.mark.slow
@pytest.mark.peers
@pytest.mark.parametrize("n", [15, 24])
def test_flower_agrees(n):
    flower = pytest.importorskip("flwr.server.strategy.aggregate")
    x = matrix(n, 3000)
    x[0] += 3
    replies = [([row.numpy()], 1) for row in x]

    def same(ours: Tensor, theirs: Any) -> None:
        np.testing.assert_allclose(ours.numpy(), np.asarray(theirs).ravel(), rtol=1e-4, atol=1e-5)

    if n % 2:  # its median of an even number lies between two values
        # with f = 2 the last choice is by one neighbour, and of two updates with the same score it takes the first
        bulyan = flower.aggregate_bulyan(list(replies), 3, flower.aggregate_krum, to_keep=0)
        same(make(AGGREGATORS, "bulyan", {"f": 3})(x).vector, bulyan)
    same(make(AGGREGATORS, "median")(x).vector, flower.aggregate_median(replies))
    same(make(AGGREGATORS, "trimmed-mean", {"f": 2})(x).vector, flower.aggregate_trimmed_avg(replies, 2 / n + 1e-9))
    same(make(AGGREGATORS, "krum", {"f": 2})(x).vector, flower.aggregate_krum(replies, 2, 0))
    same(make(AGGREGATORS, "multi-krum", {"f": 2, "m": 5})(x).vector, flower.aggregate_krum(replies, 2, 5))
    weighted = [(arrays, 1 + i % 4) for i, (arrays, _) in enumerate(replies)]
    shares = Cohort(examples=tuple(k for _, k in weighted))
    same(make(AGGREGATORS, "fedavg")(x, shares).vector, flower.aggregate(weighted))
