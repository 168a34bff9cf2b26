"""Which share of a set was used: estimates by known errors, whose intervals hold, and which luck doesn't better."""

from __future__ import annotations

import pytest
import torch

from fedaudit.evaluation.usage import Counting, counting, told, usage
from fedaudit.utils.seeds import generator
from tests.evaluation.test_membership_numbers import judged_by, noise


def pairs(effect: float, k: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    rng = generator(seed, "pairs")
    return torch.randn(k, generator=rng) + effect, torch.randn(k, generator=rng)


def test_a_count_is_corrected_by_its_errors():
    """Of 1,000 records 34 % are called members, by rates of 0.6 and 0.2: 35 % were used."""
    scores = (torch.arange(1000) < 340).float()
    share, low, high = Counting(0.5, 0.6, 0.2, 10**6).share(scores)
    assert share == pytest.approx(0.35, abs=0.003)
    deviation = (0.34 * 0.66 / 1000) ** 0.5 / 0.4
    assert (high - low) / 2 == pytest.approx(1.96 * deviation, rel=0.1)
    assert Counting(0.5, 0.3, 0.3, 10**6).share(scores)[0] == 0.5  # what tells nothing


def test_the_threshold_is_where_members_and_others_differ_most():
    rule = counting(torch.tensor([3.0, 4.0, 5.0, 0.0]), torch.tensor([0.0, 1.0, 2.0, 6.0]))
    assert (rule.threshold, rule.pairs) == (3.0, 4)
    assert (rule.true, rule.false) == pytest.approx((4 / 6, 2 / 6))


@pytest.mark.parametrize("k", [20, 50, 150])
@pytest.mark.parametrize("effect", [0.0, 0.5, 1.0, 3.0])
def test_intervals_hold_the_true_share_and_more_effect_is_less_error(effect: float, k: int):
    found = [one for seed in range(25) for one in told(*pairs(effect, k, seed), seed)]
    assert sum(low <= true <= high for true, _, low, high in found) / len(found) > 0.92
    error = sum(abs(true - said) for true, said, _, _ in found) / len(found)
    plain = sum(abs(true - 0.5) for true, *_ in found) / len(found)
    assert error < plain * {0.0: 1.15, 0.5: 1.0, 1.0: 0.9, 3.0: 0.4}[effect]


def test_by_luck_nobody_tells_the_share_much_better_than_by_half():
    """In 1 of 100 nulls at most the error is a fifth below that of who says half."""
    better = 0
    for seed in range(100):
        (metric,) = usage(*pairs(0.0, 60, 1000 + seed), seed)
        assert metric.baseline is not None
        better += metric.value < 0.8 * metric.baseline
    assert better <= 1


def test_few_pairs_tell_nothing():
    assert usage(*pairs(2.0, 19, 0), 0) == []
    assert usage(*pairs(2.0, 20, 0), 0)


def test_it_stands_beside_membership_unless_the_records_alone_tell_members():
    inputs, labels = noise(60)
    member = torch.arange(120) < 60
    scores = torch.rand(120, generator=generator(0, "scores")) + member
    for shift, names in ((0.0, ["usage_error"]), (3.0, [])):
        found = judged_by(scores, inputs + shift * member[:, None], labels, torch.ones(60).bool())
        assert [m.name for m in found.metrics if m.name.startswith("usage")] == names
        assert all(m.value < 0.1 < 0.29 < (m.baseline or 0) for m in found.metrics if m.name.startswith("usage"))
