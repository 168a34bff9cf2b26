"""What is counted of membership: few false positives, a baseline that knows no model, and exposure by class."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy.stats import binom, binomtest, mannwhitneyu
from sklearn.datasets import load_digits
from sklearn.metrics import roc_auc_score, roc_curve
from torch import Tensor

from fedaudit.attacks import MembershipFinding
from fedaudit.epsilon.bounds import CanaryScores, gaussian_epsilon
from fedaudit.evaluation import evaluate, summarise
from fedaudit.evaluation.blind import blind_scores, features
from fedaudit.evaluation.limits import Limits, check_limits
from fedaudit.evaluation.record_epsilon import LEVELS, record_epsilon
from fedaudit.modalities.columns import Column
from fedaudit.results import AttackSummary, AuditResult, FindingResult
from fedaudit.scenario.scenario import scenario_from
from fedaudit.transcript.queries import NOBODY, QuerySet
from fedaudit.transcript.truth import Truth
from fedaudit.utils.seeds import generator
from tests.attacks.membership_cases import logistic, scenario
from tests.build import sent
from tests.conftest import Command


def judged_by(
    scores: Tensor,
    inputs: Tensor,
    labels: Tensor,
    first: Tensor,
    promise: dict[str, Any] | None = None,
    *,
    again: Tensor | None = None,
    **others: Any,
) -> FindingResult:
    """Return the result of scores (2k,), where record i and i + k are a pair, and ``first`` (k,) says which is in."""
    k = len(first)
    seen = dataclasses.replace(logistic(), records=QuerySet(inputs, labels, inputs[:0], labels[:0]), **others)
    owners = torch.where(torch.cat([first, ~first]), 4, NOBODY)
    matched = torch.arange(2 * k).roll(k)
    about = {"promise": promise} if promise else {}
    truth = Truth({}, {}, inputs[:1], labels[:1], about, owners=owners, matched=matched)
    found = MembershipFinding(attack="m", scores=scores.double(), members=scores > 0.5)
    found = found if again is None else dataclasses.replace(found, again=again)
    return evaluate(found, seen, truth, seed=0).result


def verdict(result: FindingResult) -> AttackSummary:
    return summarise([result], resamples=100, seed=0)[0]


def noise(k: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    rng = generator(seed, "noise")
    return torch.randn(2 * k, 5, generator=rng), (torch.arange(k) % 2).repeat(2)


@pytest.mark.slow
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
    assert "the records alone" in told.verdict_text
    assert "before any training" in told.advice[0]
    assert not confounded.is_leak
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


def test_a_draw_that_gives_members_away_counts_for_each_client_however_few_its_pairs():
    k = 45
    inputs, labels = noise(k)
    owners = torch.cat([torch.arange(k) // 9, torch.full((k,), NOBODY)])
    truth = Truth({}, {}, inputs[:1], labels[:1], {}, owners=owners, matched=torch.arange(2 * k).roll(k))
    scores = (torch.arange(2 * k) < k).double()
    records = QuerySet(inputs + 5 * scores[:, None], labels, inputs[:0], labels[:0])
    results = []
    for client in range(5):
        (message,) = logistic().messages
        seen = dataclasses.replace(logistic(), records=records, messages=(dataclasses.replace(message, client=client),))
        found = MembershipFinding(attack="m", scores=scores, members=scores > 0.5)
        results.append(evaluate(found, seen, truth, seed=0).result)
    assert [r.metrics[0].n for r in results] == [18] * 5
    assert summarise(results, resamples=100, seed=0)[0].verdict == "inconclusive"


def test_scores_that_are_no_numbers_are_refused_in_a_line():
    inputs, labels = noise(20)
    scores = torch.zeros(40)
    scores[3] = torch.nan
    result = judged_by(scores, inputs, labels, torch.ones(20).bool())
    assert "not finite: the model diverged" in (result.reason or "")


def test_a_limit_on_more_epsilon_than_the_records_can_show_is_not_tested():
    inputs, labels = noise(60)
    result = judged_by(torch.rand(120, generator=generator(1, "scores")), inputs, labels, torch.ones(60).bool())
    (high,) = check_limits(Limits({"membership_epsilon": 8.0}), [result], [verdict(result)])
    (low,) = check_limits(Limits({"membership_epsilon": 0.5}), [result], [verdict(result)])
    assert high.outcome == "not tested"
    assert "60 pairs of records could show an ε of" in (high.reason or "")
    assert low.outcome == "pass"


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


def test_exposure_by_category_is_within_it_and_corrected_for_all_groups():
    """The ward's records all score higher, members or not, which is no exposure; the old ones' members alone do."""
    k = 60
    rng = generator(5, "table")
    inputs, labels = noise(k)
    ward, old = (torch.rand(2 * k, generator=rng) < 0.5 for _ in range(2))
    inputs[:, 3], inputs[:, 4], inputs[:, 2] = old.float(), (~old).float(), 1 + 6.0 * ward
    columns = (
        *(Column(f"n{i}", "numeric", (i,)) for i in range(2)),
        Column("ward", "categorical", (2,), ("a", "b"), codes=(1.0, 7.0)),
        Column("age", "categorical", (3, 4), ("old", "young")),
    )
    member = torch.arange(2 * k) < k
    scores = torch.randn(2 * k, generator=rng) + 5.0 * ward + 4.0 * (member & old)
    info = dataclasses.replace(logistic().task_info, columns=columns)
    result = judged_by(scores, inputs, labels, torch.ones(k).bool(), task_info=info)
    groups = {(one.column, one.value or one.label): one for one in result.exposure}
    assert set(groups) == {("", 0), ("", 1), ("ward", "a"), ("ward", "b"), ("age", "old"), ("age", "young")}
    plain = {}
    for key, mask in {("ward", "a"): ~ward, ("ward", "b"): ward, ("age", "old"): old, ("age", "young"): ~old}.items():
        a, b = scores[mask & member].numpy(), scores[mask & ~member].numpy()
        plain[key] = float(mannwhitneyu(a, b, alternative="greater").pvalue)
        assert groups[key].auc == pytest.approx(roc_auc_score([1] * len(a) + [0] * len(b), [*a, *b]))
        assert groups[key].low < groups[key].auc < groups[key].high
        assert groups[key].members == len(a)
    assert groups["age", "old"].p_value == pytest.approx(6 * plain["age", "old"])
    assert groups["age", "young"].p_value > 0.01
    assert groups["age", "old"].p_value < 0.01
    assert [chart.title for chart in result.charts][1:] == ["exposure by class, client 4"]


def test_the_most_exposed_are_those_with_whom_the_fewest_others_would_be_accused():
    k = 70
    inputs, labels = noise(k)
    rng = generator(6, "exposed")
    first = torch.rand(k, generator=rng) < 0.5
    member = torch.cat([first, ~first])
    scores, again = (torch.randn(*shape, 2 * k, generator=rng).double() + member for shape in ((), (10,)))
    shown = judged_by(scores, inputs, labels, first, again=again).most_exposed

    def nonmembers_above(scores: Tensor, record: int) -> int:
        return sum(bool(other >= scores[record]) for other in scores[~member])

    assert len(shown) == 50
    assert all(member[one.record] and one.client == 4 and one.label == labels[one.record] for one in shown)
    assert [one.nonmembers_above for one in shown] == sorted(
        nonmembers_above(scores, int(i)) for i in torch.nonzero(member)
    )[:50]
    assert [one.nonmembers_above for one in shown] == [nonmembers_above(scores, one.record) for one in shown]
    over = [[nonmembers_above(part, one.record) for part in again] for one in shown]
    assert [(one.nonmembers_above_min, one.nonmembers_above_max) for one in shown] == [
        (min(of), max(of)) for of in over
    ]
    assert judged_by(torch.rand(2 * k, generator=rng), inputs, labels, first).most_exposed == []
    assert judged_by(scores, inputs, labels, first).most_exposed[0].nonmembers_above_min is None


@pytest.mark.slow
def test_the_most_exposed_stand_in_the_report_unless_they_are_left_out(command: Command, tmp_path: Path):
    path = tmp_path / "s.yaml"
    overfitted = scenario(
        {"target_records": 80}, ["loss-threshold", "gradient-norm"], rounds=40, examples=80, local_epochs=3
    )
    path.write_text(overfitted.to_yaml())
    for most in (20, 0):
        out = tmp_path / str(most)
        setting = ["--set", f"evaluation.most_exposed={most}", "--no-controls"]
        assert command("audit", path, "--out", out, "--workers", "1", *setting).code == 0
        result = AuditResult.load(out / "results.json")
        assert [len(f.most_exposed) for f in result.findings] == [most, most]
        page = (out / "report.html").read_text()
        assert ("the records that it is surest of" in page) == (most > 0)
        if most:
            assert 'data-label="Also among the surest of">gradient-norm</td>' in page


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
    wanted = (
        "f: membership_tpr needs 100 records that nobody trained on beside as many members; raise threat.target_records"
    )
    assert row.reason == wanted


def of_gaussian(k: int, mu: float, seed: int) -> tuple[Tensor, Tensor]:
    """Return scores (2k,) to which being in adds ``mu``, and who is in of each pair."""
    rng = generator(seed, "gaussian")
    first = torch.rand(k, generator=rng) < 0.5
    return torch.randn(2 * k, generator=rng).double() + mu * torch.cat([first, ~first]), first


def promised(epsilon: float, **others: Any) -> dict[str, Any]:
    return {"epsilon": epsilon, "delta": 1e-5, "central": False, "gaussian": True, **others}


@pytest.mark.slow
def test_an_epsilon_is_demonstrated_beside_the_claimed_one():
    k, mu = 300, 0.8
    true = gaussian_epsilon(math.sqrt(2) * mu, 1e-5)  # one record leaves, another comes: both their scores move by mu
    inputs, labels = noise(k)
    scores, first = of_gaussian(k, mu, 0)
    kept = judged_by(scores, inputs, labels, first, promised(true))
    shown = kept.record_epsilon
    assert shown is not None
    assert 0.2 * true < shown.bound.epsilon < true < shown.attainable
    assert (shown.bound.method, shown.bound.unit, shown.bound.adjacency) == ("one_run_fdp", "record", "replace")
    assert shown.p_value == 1
    (metric,) = (m for m in kept.metrics if m.name == "membership_epsilon")
    assert (metric.value, metric.n) == (shown.bound.epsilon, k)
    told = verdict(kept)
    assert f"an ε of at least {shown.bound.epsilon:.3g} is demonstrated at 95 % confidence" in told.verdict_text
    assert f"ε = {true:.3g} is claimed" in told.verdict_text
    assert "promise" not in told.headline
    broken = judged_by(scores, inputs, labels, first, promised(0.5))
    told = verdict(broken)
    assert told.headline.startswith(f"The promise is broken: an ε of at least {shown.bound.epsilon:.3g} is demonstr")
    assert told.headline.endswith("and 0.5 is claimed.")
    assert told.verdict == "inferred"
    least = broken.record_epsilon.p_value if broken.record_epsilon else None
    inside, outside = (scores[:k] - scores[k:])[first], (scores[:k] - scores[k:])[~first]
    at = [level for level in LEVELS if CanaryScores(inside, outside, 1 - level).refute(0.5, 1e-5, gaussian=True)]
    assert least is not None
    assert 0.25 < least / min(at) < 4  # which record of a pair comes first is drawn anew
    unclaimed = judged_by(scores, inputs, labels, first)
    assert unclaimed.record_epsilon is not None
    assert unclaimed.record_epsilon.bound.method == "one_run"
    assert "is claimed" not in verdict(unclaimed).verdict_text


def test_a_claim_isnt_made_against_whoever_sees_more_and_confounded_records_show_no_epsilon():
    inputs, labels = noise(60)
    scores, first = of_gaussian(60, 4.0, 1)
    seen = judged_by(scores, inputs, labels, first, promised(1.0, central=True)).record_epsilon
    assert seen is not None
    assert seen.claimed is None
    endless = scores.where(~torch.cat([first, ~first]), torch.inf)
    always = judged_by(endless, inputs, labels, first, promised(50.0))
    assert always.record_epsilon is not None
    assert always.record_epsilon.attainable < 50
    assert "60 pairs of records could show an ε of" in verdict(always).verdict_text
    member = torch.cat([first, ~first])
    confounded = judged_by(scores, inputs + member[:, None], labels, first, promised(0.1))
    assert confounded.record_epsilon is None
    assert "is claimed" not in verdict(confounded).verdict_text


@pytest.mark.slow
def test_no_more_epsilon_is_demonstrated_than_there_is():
    """Of a Gaussian mechanism, of randomised response, and of scores that know nothing, 300 times each."""
    k, mu, response = 100, 1.5, 2.0
    true = gaussian_epsilon(math.sqrt(2) * mu, 1e-5)
    found: dict[str, list[float]] = {"gaussian": [], "response": [], "nothing": []}
    for seed in range(300):
        rng = generator(seed, "scores")
        members, others, size = (torch.randn(k, generator=rng).double() for _ in range(3))
        kept = torch.rand(k, generator=rng) < 1 / (1 + math.exp(-response))
        told = torch.where(kept, 1.0, -1.0) * (1 + size.abs() / 1e3)
        for name, pair, promise in (
            ("gaussian", (members + mu, others), promised(true)),
            ("response", (told, torch.zeros(k).double()), promised(response, gaussian=False)),
            ("nothing", (members, others), promised(1e-9, gaussian=False)),
        ):
            truth = Truth({}, {}, members, others, {"promise": promise})
            shown = record_epsilon(*pair, logistic(), truth, seed)
            assert shown is not None
            found[name].append(shown.bound.epsilon)
    most = binom.ppf(1 - 1e-4, 300, 0.05)
    for name, limit in (("gaussian", true), ("response", response), ("nothing", 0.0)):
        assert sum(epsilon > limit for epsilon in found[name]) <= most
    assert sum(found["gaussian"]) / 300 > 0.2 * true
    assert sum(found["response"]) / 300 > 0.4 * response


def test_what_is_promised_of_a_record_goes_with_the_truth(tmp_path):
    """By the Gaussian mechanism's closed form: one record's replacement moves a clipped update by twice the clip."""
    dp = {"name": "dp", "noise": 4.0, "clip": 1.0, "epsilon": None}
    made = scenario()
    protected = scenario_from({**made.model_dump(mode="json"), "defences": {"client_defence": dp}})
    _, truth = sent(protected)
    told = truth.about["promise"]
    assert told["epsilon"] == pytest.approx(gaussian_epsilon(2 / 4.0 * math.sqrt(2), 1e-5), rel=0.01)
    assert (told["delta"], told["central"], told["gaussian"]) == (1e-5, False, True)
    truth.save(tmp_path / "truth.safetensors")
    assert Truth.load(tmp_path / "truth.safetensors").about["promise"] == told
    assert "promise" not in sent(made)[1].about


@pytest.mark.parametrize(("above", "luck"), [(0, 1.0), (3, 0.125), (7, 2**-7), (12, 2**-12)])
def test_the_worst_of_membership_is_who_stands_above_all_others(above: int, luck: float):
    inputs, labels = noise(40)
    scores = torch.rand(80, generator=generator(2, "scores"))
    member = torch.arange(80) < 40
    scores[40:][:1] = 1.5  # one other is above all members
    scores[:above] = 2.0 + torch.arange(above)
    worst = verdict(judged_by(scores, inputs, labels, torch.ones(40).bool())).worst
    assert worst is not None
    assert int((scores[member] > scores[~member].max()).sum()) == above
    assert (worst.value, worst.n, worst.p_value) == (above, 40, luck)
    assert ("more than luck" in worst.text) is (luck <= 0.01)


def test_who_stands_above_all_others_is_told_by_class():
    inputs, labels = noise(40)
    scores = torch.rand(80, generator=generator(2, "scores"))
    above = torch.arange(80) < 9
    scores[above] = 2.0
    found = judged_by(scores, inputs, labels, torch.ones(40).bool())
    worst = verdict(found).worst
    assert worst is not None
    groups = {g.label: g for g in worst.by_group}
    assert len(groups) > 1
    for label, group in groups.items():
        own = labels[:40] == label
        assert (group.n, group.value) == (int(own.sum()), int((above[:40] & own).sum()))
        assert group.mean == next(g.auc for g in found.exposure if g.label == label)


@pytest.mark.slow
def test_by_luck_members_stand_out_no_oftener_than_is_said():
    inputs, labels = noise(12)
    rng = generator(3, "null")
    told = []
    for _ in range(300):
        first = torch.rand(12, generator=rng) < 0.5
        scores = torch.randn(24, generator=rng) + 3 * torch.randn(12, generator=rng).repeat(2)  # pairs are alike
        worst = verdict(judged_by(scores, inputs, labels, first)).worst
        told.append(1.0 if worst is None or worst.p_value is None else worst.p_value)  # None: the blind test's 1 %
    for level in (0.5, 0.25, 0.0625):
        seen = sum(p <= level for p in told)
        assert binomtest(seen, len(told), level, alternative="greater").pvalue > 0.001, (level, seen)
    assert sum(p <= 0.5 for p in told) > 75  # and not far too seldom


def test_where_the_records_alone_tell_nobody_is_said_to_stand_out():
    inputs, labels = noise(60)
    shifted = inputs + 4.0 * (torch.arange(120) < 60)[:, None]
    worst = verdict(judged_by(torch.linspace(1, 0, 120), shifted, labels, torch.ones(60).bool())).worst
    assert worst is None
