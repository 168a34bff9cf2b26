"""What is counted of membership: few false positives, a baseline that knows no model, and exposure by class."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from scipy.stats import binom, binomtest, mannwhitneyu
from sklearn.datasets import load_digits
from sklearn.metrics import roc_auc_score, roc_curve
from torch import Tensor

from fedaudit.attacks import MembershipFinding
from fedaudit.evaluation import evaluate, summarise
from fedaudit.evaluation.blind import blind_scores, features
from fedaudit.evaluation.limits import Limits, check_limits
from fedaudit.results import AttackSummary, FindingResult
from fedaudit.transcript.queries import NOBODY, QuerySet
from fedaudit.transcript.truth import Truth
from fedaudit.utils.seeds import generator
from tests.attacks.membership_cases import logistic


def judged_by(scores: Tensor, inputs: Tensor, labels: Tensor, first: Tensor) -> FindingResult:
    """Return the result of scores (2k,), where record i and i + k are a pair, and ``first`` (k,) says which is in."""
    k = len(first)
    seen = dataclasses.replace(logistic(), records=QuerySet(inputs, labels, inputs[:0], labels[:0]))
    owners = torch.where(torch.cat([first, ~first]), 4, NOBODY)
    matched = torch.arange(2 * k).roll(k)
    truth = Truth({}, {}, inputs[:1], labels[:1], {}, owners=owners, matched=matched)
    found = MembershipFinding(attack="m", scores=scores.double(), members=scores > 0.5)
    return evaluate(found, seen, truth, seed=0).result


def verdict(result: FindingResult) -> AttackSummary:
    return summarise([result], resamples=100, seed=0)[0]


def noise(k: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    rng = generator(seed, "noise")
    return torch.randn(2 * k, 5, generator=rng), (torch.arange(k) % 2).repeat(2)


@pytest.mark.parametrize(("pairs", "told"), [(99, []), (100, [0.01]), (999, [0.01]), (1000, [0.01, 0.001])])
def test_rates_are_told_where_there_are_others_enough(pairs, told):
    inputs, labels = noise(pairs)
    member = torch.arange(2 * pairs) < pairs
    scores = torch.randn(2 * pairs, generator=generator(1, "scores")) + 2.0 * member
    result = judged_by(scores, inputs, labels, torch.ones(pairs).bool())
    found = [m for m in result.metrics if m.name.startswith("membership_tpr")]
    assert [m.baseline for m in found] == told
    false, true, _ = roc_curve(member.numpy(), scores.numpy(), drop_intermediate=False)
    for metric in found:
        wanted = max(true[false <= metric.baseline])
        ends = binomtest(round(wanted * pairs), pairs).proportion_ci(0.95, method="exact")
        assert (metric.value, metric.low, metric.high) == pytest.approx((wanted, ends.low, ends.high))
    assert [f"at {100 * rate:g} % false" in verdict(result).verdict_text for rate in (0.01, 0.001)] == [
        rate in told for rate in (0.01, 0.001)
    ]


def test_what_the_records_alone_tell_is_no_membership():
    inputs, labels = noise(60)
    first = torch.ones(60).bool()
    scores = torch.cat([torch.ones(60), torch.zeros(60)])
    clean = judged_by(scores, inputs, labels, first)
    assert verdict(clean).verdict == "inferred"
    member = torch.cat([first, ~first])
    confounded = judged_by(scores, inputs + member[:, None], labels, first)
    told = verdict(confounded)
    assert told.verdict == "inconclusive"
    assert not told.headline
    assert "the records alone, without any model, tell members from others" in told.verdict_text
    assert "before any training" in told.advice[0]
    assert not confounded.leak
    area = next(m for m in confounded.metrics if m.name == "membership_blind_auc")
    assert (area.low or 0) > 0.5
    few = [*range(9), *range(60, 69)]
    assert judged_by(scores[few], inputs[few], labels[few], first[:9]).blind_p_value is None


def test_the_blind_classifier_is_cross_validated_kernel_ridge():
    rng = generator(0, "blind")
    members, others = torch.randn(40, 3, generator=rng) * 3, torch.randn(40, 3, generator=rng)
    a, b, p = blind_scores(members, others, 0)
    area = roc_auc_score([1] * 40 + [0] * 40, torch.cat([a, b]).numpy())
    assert area > 0.75  # a difference in spread, which no straight line sees
    assert p == 0.001
    swapped = blind_scores(others, members, 0)
    assert torch.allclose(swapped[0], -b)
    assert torch.allclose(swapped[1], -a)


def test_tokens_are_counted_and_labels_told():
    tokens, labels = torch.tensor([[5, 5, 7], [7, 9, 7]]), torch.tensor([3, 4])
    assert sorted(features(tokens, labels).T.tolist()) == sorted(
        [[2.0, 0.0], [1.0, 2.0], [0.0, 1.0], [1.0, 0.0], [0.0, 1.0]]
    )
    rows, values = torch.rand(4, 2), torch.rand(4, 1)
    assert torch.equal(features(rows, values), torch.cat([rows, values], dim=1).double())


def test_exposure_by_class_is_corrected_for_the_classes():
    k = 40
    inputs, labels = noise(k)
    member = torch.arange(2 * k) < k
    scores = torch.randn(2 * k, generator=generator(3, "scores")) + 1.5 * (member & (labels == 1))
    result = judged_by(scores, inputs, labels, torch.ones(k).bool())
    plain = []
    for one in result.exposure:
        a, b = (scores[(labels == one.label) & of].numpy() for of in (member, ~member))
        plain.append(float(mannwhitneyu(a, b, alternative="greater").pvalue))
        assert one.auc == pytest.approx(roc_auc_score([1] * 20 + [0] * 20, [*a, *b]))
        assert one.low < one.auc < one.high
        assert one.members == 20
    least, most = sorted(plain)
    assert sorted(one.p_value for one in result.exposure) == pytest.approx([2 * least, max(2 * least, most)])
    assert [one.p_value <= 0.01 for one in result.exposure] == [False, True]
    assert [chart.title for chart in result.charts] == ["members found, client 4", "exposure by class, client 4"]


@pytest.mark.slow
def test_exchangeable_splits_are_seldom_inferred_and_seldom_confounded():
    pictures, digits = (torch.from_numpy(x) for x in load_digits(return_X_y=True))
    k = 100
    chosen = torch.cat([torch.nonzero(digits == d)[:20, 0].reshape(2, 10) for d in range(10)], dim=1).reshape(-1)
    inputs, labels = pictures[chosen].float() / 16, digits[chosen]
    scores = -inputs.flatten(1).norm(dim=1)  # the same for every split, and of the records
    inferred = confounded = 0
    for seed in range(300):
        first = torch.rand(k, generator=generator(seed, "split")) < 0.5
        result = judged_by(scores, inputs, labels, first)
        inferred += verdict(result).verdict == "inferred"
        confounded += (result.blind_p_value or 0.0) <= 0.01
    most = binom.ppf(1 - 1e-4, 300, 0.01)
    assert inferred <= most
    assert confounded <= most


def test_a_limit_on_a_rate_that_the_others_are_too_few_for_is_not_tested():
    inputs, labels = noise(60)
    scores = torch.rand(120, generator=generator(1, "scores"))
    result = judged_by(scores, inputs, labels, torch.ones(60).bool())
    (row,) = check_limits(Limits({"membership_tpr": 0.2}), [result], [verdict(result)])
    assert row.outcome == "not tested"
    wanted = "f: membership_tpr needs 100 records that nobody trained on beside as many members; raise threat.records"
    assert row.reason == wanted
