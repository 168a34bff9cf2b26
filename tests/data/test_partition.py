"""Partitions: every row to one client at most, everything given out where the scheme says so, the promised counts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedaudit.data.partition import PARTITIONS, draw_owners, partition
from fedaudit.utils.errors import BadInput

SCHEMES: list[tuple[str, dict[str, Any]]] = [
    ("iid", {}),
    ("dirichlet", {"alpha": 0.05}),
    ("dirichlet", {"alpha": 100.0}),
    ("classes-per-client", {"k": 2}),
    ("shards", {"shards_per_client": 2}),
    ("label-to-clients", {"m": 2}),
]


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def labels(per_class: list[int], seed: int) -> torch.Tensor:
    y = torch.cat([torch.full((count,), 3 * i, dtype=torch.int64) for i, count in enumerate(per_class)])  # with gaps
    return y[torch.randperm(len(y), generator=seeded(seed))]


targets_strategy = st.builds(labels, st.lists(st.integers(12, 30), min_size=3, max_size=6), st.integers(0, 2**31))


@pytest.mark.parametrize(("scheme", "options"), SCHEMES)
@given(targets=targets_strategy, clients=st.integers(2, 6), seed=st.integers(0, 2**31))
@settings(max_examples=25, deadline=None)
def test_no_row_is_given_twice_and_no_client_is_empty(
    scheme: str, options: dict[str, Any], targets: torch.Tensor, clients: int, seed: int
) -> None:
    parts = partition(scheme, targets, clients, seeded(seed), **options)
    assert len(parts) == clients
    assert all(len(part) > 0 and part.dtype == torch.int64 for part in parts)
    given_out = [row for part in parts for row in part.tolist()]
    assert len(given_out) == len(set(given_out))
    assert set(given_out) <= set(range(len(targets)))
    # classes-per-client covers everything only where the clients' hands suffice for all classes
    if scheme != "classes-per-client" or clients * options["k"] >= len(targets.unique()):
        assert set(given_out) == set(range(len(targets)))
    again = partition(scheme, targets, clients, seeded(seed), **options)
    assert all(torch.equal(a, b) for a, b in zip(parts, again, strict=True))


@given(n=st.integers(1, 200), clients=st.integers(1, 40), seed=st.integers(0, 2**31))
@settings(max_examples=30, deadline=None)
def test_iid_sizes_differ_by_one_at_most(n: int, clients: int, seed: int) -> None:
    targets = torch.randn(n, 1, generator=seeded(seed))  # regression targets are welcome here
    if clients > n:
        with pytest.raises(BadInput, match="clients"):
            partition("iid", targets, clients, seeded(seed))
        return
    sizes = [len(part) for part in partition("iid", targets, clients, seeded(seed))]
    assert sum(sizes) == n
    assert max(sizes) - min(sizes) <= 1


@given(targets=targets_strategy, clients=st.integers(2, 6), k=st.integers(1, 3), seed=st.integers(0, 2**31))
@settings(max_examples=30, deadline=None)
def test_classes_per_client_gives_exactly_k(targets: torch.Tensor, clients: int, k: int, seed: int) -> None:
    parts = partition("classes-per-client", targets, clients, seeded(seed), k=k)
    held = [set(targets[part].tolist()) for part in parts]
    assert all(len(classes) == k for classes in held)
    holders = [sum(label in classes for classes in held) for label in targets.unique().tolist()]
    assert max(holders) - min(holders) <= 1


def test_classes_per_client_are_random_classes_not_a_few_sets_that_many_share():
    """Five of ten classes for 40 clients: 252 sets, of which turns through one list would use two."""
    targets = torch.arange(10).repeat(200)
    parts = partition("classes-per-client", targets, 40, seeded(0), k=5)
    held = [frozenset(targets[part].tolist()) for part in parts]
    assert len(set(held)) > 25
    shared = [len(one & other) for i, one in enumerate(held) for other in held[:i]]
    assert sum(shared) / len(shared) == pytest.approx(25 / 10, abs=0.15)  # of two random sets
    assert sorted(map(len, parts)) == [50] * 40


@given(targets=targets_strategy, clients=st.integers(2, 6), data=st.data(), seed=st.integers(0, 2**31))
@settings(max_examples=30, deadline=None)
def test_every_label_lives_on_m_clients(targets: torch.Tensor, clients: int, data: st.DataObject, seed: int) -> None:
    fewest = -(-clients // len(targets.unique()))
    m = data.draw(st.integers(fewest, clients))
    parts = partition("label-to-clients", targets, clients, seeded(seed), m=m)
    for label in targets.unique():
        counts = [int((targets[part] == label).sum()) for part in parts]
        split = [count for count in counts if count]
        assert len(split) == m
        assert sum(split) == int((targets == label).sum())
        assert max(split) - min(split) <= 1


def hands(owners: dict[int, list[int]], clients: int) -> list[set[int]]:
    return [{label for label, own in owners.items() if client in own} for client in range(clients)]


def reached(owners: dict[int, list[int]], clients: int) -> int:
    """How many clients a rumour reaches that client 0 tells all with whom it shares a label, and these go on."""
    held, told = hands(owners, clients), {0}
    for _ in range(clients):
        told |= {c for c in range(clients) if any(held[c] & held[other] for other in told)}
    return len(told)


@given(labels=st.integers(1, 12), clients=st.integers(1, 12), data=st.data(), seed=st.integers(0, 2**31))
@settings(max_examples=40, deadline=None)
def test_owners_are_m_and_distinct_balanced_and_hang_together(
    labels: int, clients: int, data: st.DataObject, seed: int
) -> None:
    m = data.draw(st.integers(-(-clients // labels), clients))
    owners = draw_owners(labels, clients, m, seeded(seed))
    assert sorted(owners) == list(range(labels))
    assert all(len(set(own)) == len(own) == m and set(own) <= set(range(clients)) for own in owners.values())
    sizes = [len(hand) for hand in hands(owners, clients)]
    assert max(sizes) - min(sizes) <= 1
    if labels * m >= labels + clients - 1:  # a tree over labels and clients has so many edges, fewer join nothing
        assert reached(owners, clients) == clients
    assert owners == draw_owners(labels, clients, m, seeded(seed))


def test_the_papers_ten_clients_have_ten_different_hands_and_every_choice_of_owners_is_as_likely() -> None:
    """Ten labels on five of ten clients: 252 choices of owners; two labels share 5·5/10 = 2.5 owners on average."""
    draws = [draw_owners(10, 10, 5, seeded(seed)) for seed in range(400)]
    assert all(len(set(map(frozenset, hands(owners, 10)))) == 10 for owners in draws)
    assert len({tuple(map(tuple, owners.values())) for owners in draws}) == 400
    first = [tuple(owners[0]) for owners in draws]
    assert len(set(first)) > 180  # of 252 equally likely ones, 400 draws are expected to hit 200
    owns = torch.tensor([[client in own for client in range(10)] for own in first]).double().mean(dim=0)
    assert float((owns - 0.5).abs().max()) < 0.1  # four standard errors
    shared = [len(set(owners[a]) & set(owners[b])) for owners in draws for a in range(10) for b in range(a)]
    # Σ over clients of C(5, 2) pairs of labels in one hand, over the 45 pairs: 10·10/45
    assert sum(shared) / len(shared) == pytest.approx(100 / 45)
    counts = torch.bincount(torch.tensor(shared), minlength=6) / len(shared)
    assert counts[0] + counts[5] < 0.03, "no two labels have the same owners, or none in common"


def test_a_label_that_a_client_must_not_have_goes_to_others() -> None:
    targets = torch.arange(10).repeat_interleave(20)
    for seed in range(20):
        parts = partition("label-to-clients", targets, 10, seeded(seed), m=5, lacking={9: [3]})
        held = [set(targets[part].tolist()) for part in parts]
        assert 3 not in held[9]
        assert sum(3 in labels for labels in held) == 5
        assert {len(labels) for labels in held} == {5}
    everybody = partition("label-to-clients", targets, 10, seeded(), m=10, lacking={9: [3]})
    assert all(len(targets[part].unique()) == 10 for part in everybody), "where all must have it, so must that client"


@given(targets=targets_strategy, clients=st.integers(2, 6), each=st.integers(1, 3), seed=st.integers(0, 2**31))
@settings(max_examples=30, deadline=None)
def test_shards_hold_few_labels(targets: torch.Tensor, clients: int, each: int, seed: int) -> None:
    parts = partition("shards", targets, clients, seeded(seed), shards_per_client=each)
    # a run of s sorted examples, all classes being at least 12 long, spans at most s // 12 + 2 labels
    longest = -(-len(targets) // (clients * each))
    for part in parts:
        assert len(targets[part].unique()) <= each * (longest // 12 + 2)
        assert abs(len(part) - len(targets) / clients) <= each


def test_shards_of_one_label_each_are_pure() -> None:
    targets = torch.arange(10).repeat_interleave(20)[torch.randperm(200, generator=seeded(1))]
    parts = partition("shards", targets, 5, seeded(2), shards_per_client=2)
    assert [len(part) for part in parts] == [40] * 5
    assert all(len(targets[part].unique()) == 2 for part in parts)


def test_dirichlet_concentrates_with_small_alpha_and_evens_out_with_large() -> None:
    targets = torch.arange(10).repeat_interleave(200)

    def largest_share(alpha: float) -> float:
        parts = partition("dirichlet", targets, 10, seeded(3), alpha=alpha)
        counts = torch.stack([targets[part].bincount(minlength=10) for part in parts]).float()
        return float((counts.max(dim=0).values / 200).mean())

    # E[max share] is near 1 as alpha -> 0 and near 1/10 as alpha -> infinity
    assert largest_share(0.01) > 0.85
    assert largest_share(1e4) < 0.13
    assert largest_share(0.01) > largest_share(0.5) > largest_share(1e4)


@pytest.mark.parametrize("alpha", [0.1, 0.5, 3.0])
def test_dirichlet_s_proportions_have_the_distribution_s_second_moment(alpha: float) -> None:
    """E[Σ pᵢ²] = (α + 1)/(Kα + 1) for K clients, here the mean over 400 classes."""
    targets = torch.arange(400).repeat_interleave(200)
    parts = partition("dirichlet", targets, 4, seeded(5), alpha=alpha)
    shares = torch.stack([targets[part].bincount(minlength=400) for part in parts]).double() / 200
    assert float(shares.square().sum(dim=0).mean()) == pytest.approx((alpha + 1) / (4 * alpha + 1), rel=0.05)


def test_dirichlet_leaves_nobody_empty_even_with_as_many_clients_as_examples() -> None:
    parts = partition("dirichlet", torch.arange(3).repeat(4), 12, seeded(4), alpha=0.01)
    assert [len(part) for part in parts] == [1] * 12


def test_another_seed_shares_out_otherwise() -> None:
    targets = torch.arange(4).repeat_interleave(30)
    for scheme, options in SCHEMES:
        a, b = (partition(scheme, targets, 3, seeded(seed), **options) for seed in (0, 1))
        assert any(x.tolist() != y.tolist() for x, y in zip(a, b, strict=True)), scheme


Y = torch.arange(3).repeat(4)


@pytest.mark.parametrize(
    ("scheme", "targets", "clients", "options", "message"),
    [
        ("iid", Y, 13, {}, "clients=13; give a whole number from 1 to 12"),
        ("iid", Y, 0, {}, "clients=0"),
        ("iid", Y, 2, {"alpha": 1.0}, "has no option 'alpha'"),
        ("dirichlett", Y, 2, {}, "did you mean 'dirichlet'"),
        ("dirichlet", Y, 2, {"alfa": 1.0}, "did you mean 'alpha'"),
        ("dirichlet", Y, 2, {"alpha": 0.0}, "alpha=0.0; give a number above 0"),
        ("dirichlet", Y, 2, {"alpha": -1}, "alpha=-1"),
        ("dirichlet", Y, 2, {"alpha": float("nan")}, "alpha=nan"),
        ("dirichlet", Y, 2, {"alpha": float("inf")}, "alpha=inf"),
        ("dirichlet", torch.randn(12, 1), 2, {}, "regression"),
        ("classes-per-client", Y, 2, {"k": 4}, "k=4; give a whole number from 1 to 3"),
        ("classes-per-client", Y, 2, {"k": 1.5}, "k=1.5"),
        ("classes-per-client", Y, 12, {"k": 3}, "has 4 examples for 12 clients"),
        ("shards", Y, 4, {"shards_per_client": 4}, "from 1 to 3"),
        ("label-to-clients", Y, 2, {"m": 3}, "m=3; give a whole number from 1 to 2"),
        ("label-to-clients", Y, 10, {"m": 2}, "give m of at least 4"),
        ("label-to-clients", Y, 6, {"m": 5}, "has 4 examples for 5 clients"),
    ],
)
def test_what_is_impossible_is_one_line(
    scheme: str, targets: torch.Tensor, clients: int, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(BadInput) as caught:
        partition(scheme, targets, clients, seeded(), **options)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@given(
    named=st.integers(0, 4), others=st.integers(0, 4), each=st.integers(1, 6), free=st.integers(0, 40),
    seed=st.integers(0, 2**31),
)  # fmt: skip
@settings(max_examples=40, deadline=None)
def test_the_natural_partition_keeps_what_is_somebody_s_and_deals_the_rest(named, others, each, free, seed):
    groups = torch.cat([torch.arange(named).repeat(each), torch.full((free,), -1)])
    groups = groups[torch.randperm(len(groups), generator=seeded(seed))]
    clients = named + others
    if clients == 0 or free < others or (free and not others):
        return
    parts = partition("natural", torch.zeros(len(groups)), clients, seeded(seed), groups=groups)
    assert torch.cat(parts).sort().values.tolist() == list(range(len(groups)))
    for client, part in enumerate(parts[:named]):
        assert set(groups[part].tolist()) == {client}
    sizes = [len(part) for part in parts[named:]]
    assert not sizes or max(sizes) - min(sizes) <= 1


def test_every_partition_is_listed_with_its_options() -> None:
    named = ["iid", "dirichlet", "classes-per-client", "shards", "label-to-clients", "natural", "attribute"]
    assert PARTITIONS.names() == named
    marks = torch.arange(len(Y)) % 2 == 0
    for entry in PARTITIONS:
        assert entry.summary
        options = {name: value for name, value in entry.info["options"].items() if name != "attribute"}
        parts = partition(entry.name, Y, 2, seeded(), groups=torch.full((12,), -1), marks=marks, **options)
        assert len(parts) == 2
