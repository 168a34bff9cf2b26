"""Verdicts: the statistics behind them, their borders, and how often data without a leak get one."""

from __future__ import annotations

import itertools
import math
import re
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from torch import nn

from fedaudit.attacks import ImageFinding, MembershipFinding
from fedaudit.attacks.labels.attack import LabelFinding
from fedaudit.attacks.records.attribute import AttributeFinding
from fedaudit.evaluation import FINDING_TYPES, evaluate, summarise
from fedaudit.evaluation import labels as of_labels
from fedaudit.evaluation.images import chance_level, verdict_of
from fedaudit.evaluation.local_models import as_good_by_luck, as_near_by_luck
from fedaudit.evaluation.statistics import auc_interval, combined, pooled, proportion, sign_test
from fedaudit.results import AttackSummary, FindingResult, ImageResult, MetricResult
from fedaudit.task.info import TaskInfo
from fedaudit.transcript.observation import Message, Observation
from fedaudit.transcript.queries import NOBODY, QuerySet
from fedaudit.transcript.threat import ThreatModel
from fedaudit.transcript.truth import Truth
from fedaudit.transcript.update import Update
from fedaudit.utils.seeds import generator

AUDITS = 50
BY_CHANCE = int(stats.binom.ppf(0.999, AUDITS, 0.01))  # leaks among as many audits of a rate of 1 %


def seen(client: int = 0, examples: int = 1, kind: str = "image", records: QuerySet | None = None) -> Observation:
    """What an adversary sees of one client; no evaluation here looks at weights."""
    shape = (1, 8, 8) if kind == "image" else (1,)
    info = TaskInfo("linear", None, "eval", "cross-entropy", kind, shape, 10, (0.0,), (1.0,))
    message = Message(0, client, {}, Update(client, "gradient", {}, examples, None))
    threat = ThreatModel(target_records=len(records) if records else None)
    loss = nn.functional.cross_entropy
    return Observation("f", threat, info, nn.Identity(), loss, "gradient", (), (message,), {}, records)


def judged(findings: list[FindingResult]) -> AttackSummary:
    (summary,) = summarise(findings, resamples=100, seed=0)
    return summary


def image(ssim: float = 0.6, rank: int = 1, psnr: float = 20.0, **rest: Any) -> ImageResult:
    values = {"true_label": 0, "label": 0, "mse": 0.01, "candidates": 1000, "psnr_mean_image": 12.0}
    names = {"true_image": "t.png", "reconstruction": "r.png", "psnr_same_class": None}
    return ImageResult.model_validate({**values, **names, "ssim": ssim, "rank": rank, "psnr": psnr, **rest})


# Statistics ---------------------------------------------------------------------------------------------------------


@given(n=st.integers(1, 400), share=st.floats(0, 1))
def test_proportions_have_clopper_and_pearson_s_interval(n, share):
    count = round(share * n)
    low, high = proportion(count, n)
    assert low == pytest.approx(stats.beta.ppf(0.025, count, n - count + 1) if count else 0.0, abs=1e-9)
    assert high == pytest.approx(stats.beta.ppf(0.975, count + 1, n - count) if count < n else 1.0, abs=1e-9)
    assert low <= count / n <= high
    wide = proportion(2 * count, 2 * n)
    assert wide[1] - wide[0] < high - low  # more of the same say more


@given(st.lists(st.floats(1e-12, 1.0), min_size=2, max_size=8))
def test_independent_tests_are_combined_by_fisher_s_method(ps):
    expected = stats.chi2.sf(-2 * sum(map(math.log, ps)), 2 * len(ps))
    assert combined(ps) == pytest.approx(expected, rel=1e-9)
    assert combined(ps[:1]) == ps[0]


def test_a_p_value_of_nothing_is_combined_too():
    assert 0 <= combined([0.0, 0.5]) < 1e-100


@given(better=st.integers(0, 60), worse=st.integers(0, 60))
def test_the_sign_test_counts_tosses(better, worse):
    n = better + worse
    tosses = sum(math.comb(n, k) for k in range(better, n + 1)) / 2**n
    assert sign_test(better, worse) == pytest.approx(tosses, rel=1e-9)


def test_auc_intervals_hold_the_truth_as_often_as_they_say():
    truth = stats.norm.cdf(1 / math.sqrt(2))  # of two normal distributions one apart
    held = 0
    for seed in range(200):
        rng = generator(seed, "binormal")
        members, others = torch.randn(60, generator=rng) + 1, torch.randn(60, generator=rng)
        low, high = auc_interval(members, others, resamples=400, seed=seed)
        held += low <= truth <= high
    assert 180 <= held <= 198  # of 95 %, between 90 and 99


@pytest.mark.parametrize(("shift", "value"), [(5.0, 1.0), (-5.0, 0.0)])
def test_a_perfect_auc_has_an_open_end(shift, value):
    members, others = torch.arange(20) / 20 + shift, torch.arange(20) / 20
    low, high = auc_interval(members, others, resamples=100, seed=0)
    ends = proportion(20 if value else 0, 20)
    assert (low, high) == pytest.approx((ends[0], 1.0) if value else (0.0, ends[1]))


def measured(value: float, half: float, n: int = 10) -> MetricResult:
    return MetricResult(name="m", value=value, higher_is_better=True, low=value - half, high=value + half, n=n)


@given(value=st.floats(0, 1), half=st.floats(0.01, 0.5), runs=st.integers(1, 9))
def test_runs_are_pooled_into_one_interval(value, half, runs):
    found = pooled([measured(value, half)] * runs)
    assert found is not None
    assert found.mean == pytest.approx(value)
    assert found.n == 10 * runs
    assert found.high - found.low == pytest.approx(2 * half / math.sqrt(runs))
    assert found.low <= found.mean <= found.high


def test_a_share_of_few_runs_stays_within_0_and_1():
    found = pooled([measured(0.05, 0.2), measured(0.95, 0.2), measured(1.0, 0.1)], 0, 1)
    assert found is not None
    assert [found.low, found.high] == pytest.approx([2 / 3 - 0.1, 2 / 3 + 0.1])
    ends = pooled([measured(0.99, 0.2)] * 2, 0, 1)
    assert ends is not None
    assert ends.high == 1
    assert all(FINDING_TYPES[kind].metrics[0].ends == (0, 1) for kind in ("rows", "sequences", "labels"))


def test_runs_without_an_interval_are_not_pooled():
    assert pooled([]) is None
    assert pooled([measured(0.5, 0.1), MetricResult(name="m", value=1.0, higher_is_better=True)]) is None


def labels_of(
    true: list[int],
    found: list[int],
    classes: int,
    client: int = 0,
    candidates: list[int] | None = None,
    rows: list[int] | None = None,
) -> FindingResult:
    labels = torch.arange(classes) if candidates is None else torch.tensor(candidates)
    examples = torch.tensor(range(len(true)) if rows is None else rows)
    inputs, pool = examples.float()[:, None, None, None], torch.zeros(len(labels), 1, 8, 8)
    truth = Truth({(0, client): inputs}, {(0, client): torch.tensor(true)}, pool, labels, {})
    finding = LabelFinding(attack="labels", labels=torch.tensor(found), method="geng", num_classes=classes)
    return evaluate(finding, seen(client, len(true)), truth, seed=0).result


def overlap(a: tuple[int, ...], b: list[int]) -> int:
    return sum(min(a.count(c), b.count(c)) for c in set(b))


@pytest.mark.parametrize(("true", "found"), [([0, 1, 2], [0, 1, 1]), ([1, 1, 1, 0], [1, 1, 1, 0]), ([2], [2])])
def test_labels_by_luck_are_what_enumeration_counts(true, found):
    draws = [overlap(drawn, true) for drawn in itertools.product(range(3), repeat=len(true))]
    right = overlap(tuple(found), true)
    expected = sum(d >= right for d in draws) / len(draws)
    result = labels_of(true, found, 3)
    assert result.p_value == pytest.approx(expected, abs=4 * math.sqrt(expected / 20_000) + 1e-4)
    assert result.chance_level == pytest.approx(np.bincount(draws) / len(draws), abs=0.02)


def test_luck_at_labels_is_the_likelier_of_two_not_the_one_that_finds_more_on_average():
    """Draws by the candidates' classes find more on average (6.7, 6.2), and never so many; the oracle enumerates."""
    true, found = [0] * 2 + [1] + [2] * 7, [0] * 3 + [1] + [2] * 6
    counts = [(a, b, 10 - a - b) for a in range(11) for b in range(11 - a)]
    ways = [math.comb(10, a) * math.comb(10 - a, b) for a, b, _ in counts]
    right = [min(a, 2) + min(b, 1) + min(c, 7) >= 9 for a, b, c in counts]
    expected = sum(itertools.compress(ways, right)) / 3**10
    assert labels_of(true, found, 3, candidates=[1] + 8 * [2]).p_value == pytest.approx(expected, abs=0.006)


def test_other_batches_are_different_candidates_each_as_often_as_the_batch_uses_one():
    """Of five candidates two are used, one of them three times; the oracle enumerates what else there could be."""
    candidates, found = [0, 0, 0, 1, 2], [0, 0, 0, 1]
    others = [overlap((a, a, a, b), found) for a, b in itertools.permutations(candidates, 2)]
    expected = sum(one >= 3 for one in others) / len(others)
    guesses = [overlap((a, a, a, b), [0, 0, 0, 2]) for a, b in itertools.product(range(3), repeat=2)]
    assert expected > sum(one >= 3 for one in guesses) / len(guesses)
    result = labels_of([0, 0, 2, 0], found, 3, candidates=candidates, rows=[7, 7, 9, 7])
    assert result.p_value == pytest.approx(expected, abs=4 * math.sqrt(expected / 20_000))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "uses", "found"),
    [
        ([60, 50, 40, 30], [10] * 3 + [1] * 10, [0] * 40),  # a few examples make most of the labels
        ([5] * 10, [1] * 36, [i % 10 for i in range(36)]),  # the client has most of the candidates
    ],
    ids=["unequal uses", "few candidates"],
)
def test_what_is_known_of_the_candidates_is_a_leak_as_seldom_as_the_level_says(monkeypatch, sizes, uses, found):
    monkeypatch.setattr(of_labels, "_DRAWS", 1000)
    candidates, rows = np.repeat(np.arange(len(sizes)), sizes), np.repeat(np.arange(len(uses)), uses).tolist()
    rng, audits = np.random.default_rng(5), 400

    def called(batch: list[int], named: list[int]) -> bool:
        p = labels_of(batch, named, len(sizes), candidates=candidates.tolist(), rows=rows).p_value
        return p is not None and p <= 0.01

    batches = [rng.choice(candidates, len(uses), replace=False)[rows].tolist() for _ in range(audits)]
    assert sum(called(batch, found) for batch in batches) <= stats.binom.ppf(1 - 1e-4, audits, 0.01)
    assert all(called(batch, batch) for batch in batches[:3])


@pytest.mark.slow
def test_labels_that_fit_any_batch_are_no_leak():
    """Every class as often as any other: nearer to most batches than random labels are, and no word of this one."""
    verdicts = []
    for seed in range(AUDITS):
        rng = generator(seed, "batches")
        batches = torch.randint(10, (10, 16), generator=rng)
        equally = (torch.arange(16) % 10).tolist()
        findings = [labels_of(true.tolist(), equally, 10, client=c) for c, true in enumerate(batches)]
        verdicts.append(judged(findings).verdict)
    assert sum(v == "inferred" for v in verdicts) <= BY_CHANCE


@pytest.mark.parametrize(("right", "runs", "verdict"), [(4, 4, "inferred"), (6, 8, "inferred"), (2, 8, "inconclusive")])
def test_labels_of_several_updates_are_tested_together(right, runs, verdict):
    """One label an update may be luck; of four it isn't. The oracle is the binomial tail: every update is one toss."""
    findings = [labels_of([3], [3 if i < right else 4], 7, client=i) for i in range(runs)]
    summary = judged(findings)
    assert summary.evidence is not None
    assert summary.evidence.p_value == pytest.approx(stats.binom.sf(right - 1, runs, 1 / 7), rel=0.2, abs=1e-4)
    wanted = "not demonstrated" if stats.binom.sf(right - 1, runs, 1 / 7) > 0.05 else verdict
    assert summary.verdict == wanted


# Borders ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("images", "verdict"),
    [
        ([image()], "recovered"),
        ([image(ssim=0.5)], "recovered"),  # exactly what is asked for
        ([image(ssim=0.49)], "identifiable"),
        ([image(psnr=12.0)], "identifiable"),  # no nearer than the mean image
        ([image(psnr=12.01)], "recovered"),
        ([image(rank=2)], "not demonstrated"),
        ([image(rank=2, ssim=0.9, psnr=30.0)] * 5, "not demonstrated"),
        ([image(), *[image(rank=9)] * 6], "recovered"),
        ([image(ssim=0.1), *[image(ssim=0.1, rank=9)] * 6], "identifiable"),
        # one of 125 candidates is named with a chance of 0.8 %; the rest of the level is for moved images
        ([image(ssim=0.1, different_candidates=126)], "identifiable"),
        ([image(ssim=0.1, different_candidates=124)], "inconclusive"),
        ([image(different_candidates=99)], "inconclusive"),
        ([image(different_candidates=1)] * 20, "inconclusive"),
        # luck may name it, but not as near as this
        ([image(different_candidates=40, psnr_nearest_other=14.0)], "recovered"),
        ([image(different_candidates=40, psnr_nearest_other=14.1)], "inconclusive"),
        # of few candidates one may be far from the others by chance
        ([image(different_candidates=39, psnr_nearest_other=2.0)], "inconclusive"),
        ([image(different_candidates=39, psnr_nearest_other=2.0, psnr=22.0)], "recovered"),
        (
            [image(different_candidates=40, psnr_nearest_other=14.0), image(rank=2, distractor_margin_db=6.0)],
            "inconclusive",
        ),
        # that all came out visibly is no evidence where luck does it, too
        ([image(different_candidates=8, chance_level=0.5)] * 4, "inconclusive"),
        ([image(different_candidates=8, chance_level=0.5)] * 7, "recovered"),
        # where luck names it anyway, it must be nearer by 2.5·ln 100 = 11.51 dB
        ([image(chance_level=1.0, psnr_nearest_other=8.4)], "recovered"),
        ([image(chance_level=1.0, psnr_nearest_other=8.6)], "inconclusive"),
        ([image(chance_level=1.0, psnr_nearest_other=8.4), image(chance_level=1.0, rank=2)], "inconclusive"),
        ([image(chance_level=1.0, psnr_nearest_other=9.0)] * 4, "recovered"),  # several show what one doesn't
        # no further ahead than half of the candidates are of each other: one of them may be of the same person
        ([image(as_far_by_luck=0.5)], "inconclusive"),
        ([image(as_far_by_luck=0.008)], "recovered"),
        ([image(as_far_by_luck=0.5)] * 3, "recovered"),
        ([image(as_far_by_luck=0.5), image(as_far_by_luck=1.0, rank=2)], "inconclusive"),
        # what the chance is, chance_level knows better than the number of candidates
        ([image(chance_level=0.2)], "inconclusive"),
        ([image(chance_level=0.2)] * 3, "recovered"),
        ([image(chance_level=0.2, ssim=0.1)] * 3, "identifiable"),
        ([image(chance_level=0.2, ssim=0.1), *[image(chance_level=0.2, rank=4)] * 4], "not demonstrated"),
    ],
)
def test_images_are_judged_by_their_definitions(images, verdict):
    found = verdict_of(images)
    assert found.verdict == verdict
    assert (found.headline != "") == (verdict in ("recovered", "identifiable"))
    assert (found.advice != "") == (verdict == "inconclusive")
    assert found.evidence is not None
    assert (found.evidence.low or 0) <= found.evidence.value <= (found.evidence.high or 0)
    assert "{who} can reconstruct" not in found.headline or verdict == "recovered"


@pytest.mark.parametrize("named", [3, 12, 18])
def test_small_chances_are_no_zero(named):
    """Of equal chances the oracle is the binomial tail."""
    images = [image(chance_level=0.05, ssim=0.1, rank=1 if i < named else 9) for i in range(18)]
    evidence = verdict_of(images).evidence
    assert evidence is not None
    assert evidence.p_value == pytest.approx(stats.binom.sf(named - 1, 18, 0.05) / 0.8, rel=1e-9, abs=0)


def test_chances_count_what_is_paired_and_what_labels_tell():
    candidates = torch.arange(40.0).view(40, 1, 1, 1).expand(40, 1, 2, 2)
    labels = torch.tensor([0] * 10 + [1] * 30)
    truth = Truth({}, {}, candidates, labels, {})
    assert chance_level(1, 40, torch.tensor([0]), truth) == {0: 1 / 10}
    assert chance_level(4, 40, torch.tensor([0, 1, 1, 1]), truth) == {0: 1 / 10, 1: 3 / 30}
    assert chance_level(30, 40, torch.tensor([1]), truth) == {1: 30 / 40}


# Data without a leak, and with one ----------------------------------------------------------------------------------


def of_images(seed: int, updates: int, size: int, how: str) -> AttackSummary:
    rng = generator(seed, "null")
    candidates, labels = torch.rand((100, 1, 8, 8), generator=rng), torch.arange(100) % 2
    rows = torch.randperm(100, generator=rng)[: updates * size].view(updates, size)
    truth = Truth(
        {(0, c): candidates[rows[c]] for c in range(updates)},
        {(0, c): labels[rows[c]] for c in range(updates)},
        candidates,
        labels,
        {},
    )
    findings = []
    for c in range(updates):
        true = candidates[rows[c]]
        noise = torch.rand(true.shape, generator=rng)
        images = {"noise": noise, "leak": 0.7 * true + 0.3 * noise, "faint": 0.3 * true + 0.7 * noise}[how]
        found = ImageFinding(attack="a", images=images, labels=labels[rows[c]], label_source="given")
        findings.append(evaluate(found, seen(c, size), truth, seed=0).result)
    return judged(findings)


@pytest.mark.slow
@pytest.mark.parametrize(("updates", "size"), [(4, 1), (2, 8), (1, 32)], ids=["single", "batches", "a large batch"])
def test_noise_is_no_image(updates, size):
    verdicts = [of_images(seed, updates, size, "noise").verdict for seed in range(AUDITS)]
    assert sum(v in ("identifiable", "recovered") for v in verdicts) <= BY_CHANCE
    assert of_images(0, updates, size, "leak").verdict == "recovered"
    faint = of_images(0, 4, 4, "faint")
    assert faint.verdict == "identifiable"
    assert "none came out visibly" in faint.headline


def class_means(seed: int) -> AttackSummary:
    """Digits of the right classes, averaged: an attack that knows no more than the labels."""
    from fedaudit.data import load_dataset

    data = load_dataset("digits")
    inputs, labels = data.test.inputs, data.test.targets
    means = torch.stack([data.train.inputs[data.train.targets == c].mean(0) for c in range(10)])
    rows = torch.randperm(len(inputs), generator=generator(seed, "victims"))[:8]
    truth = Truth({(0, 0): inputs[rows]}, {(0, 0): labels[rows]}, inputs, labels, {})
    found = ImageFinding(attack="a", images=means[labels[rows]], labels=labels[rows], label_source="given")
    return judged([evaluate(found, seen(0, 8), truth, seed=0).result])


@pytest.mark.slow
def test_the_mean_of_a_class_is_no_recovered_image():
    """One in four of such audits has an image that would count as visible: luck explains it."""
    found = [class_means(seed) for seed in range(AUDITS)]
    assert sum(s.verdict in ("identifiable", "recovered") for s in found) <= BY_CHANCE
    assert any("0 of 8" not in s.verdict_text.partition("came out visibly")[0] for s in found)


def members_of(seed: int, shift: float, n: int = 40, client: int | None = None) -> FindingResult:
    rng = generator(seed, "members")
    member = torch.arange(2 * n) < n
    owners = torch.where(member, 0, NOBODY)
    matched = torch.cat([torch.arange(n, 2 * n), torch.arange(n)])
    truth = Truth({}, {}, torch.zeros(1, 1, 8, 8), torch.zeros(1).long(), {}, owners=owners, matched=matched)
    scores = torch.randn(2 * n, generator=rng) + shift * member
    found = MembershipFinding(attack="m", scores=scores, members=scores > shift / 2)
    return evaluate(found, seen(), truth, seed=0).result.model_copy(update={"client": client})


def of_members(seed: int, shift: float, n: int = 40) -> AttackSummary:
    return judged([members_of(seed, shift, n)])


@pytest.mark.slow
def test_guessed_members_are_not_inferred():
    assert sum(of_members(seed, 0.0).verdict == "inferred" for seed in range(AUDITS)) <= BY_CHANCE
    leak = of_members(0, 1.0)
    assert leak.verdict == "inferred"
    assert leak.evidence is not None
    assert leak.evidence.n == 80
    assert (leak.evidence.low or 0) > 0.5
    assert of_members(0, 5.0, n=3).verdict == "inconclusive"  # even all right may be luck


def test_a_leak_is_what_luck_does_not_explain_by_itself_or_in_several_findings_together():
    faint = [members_of(seed, 0.5, n=30, client=seed) for seed in range(8)]
    areas, ps = ([getattr(f, name) for f in faint] for name in ("metrics", "p_value"))
    assert [f.is_leak for f in faint] == [m[0].value > 0.5 and p <= 0.01 for m, p in zip(areas, ps, strict=True)]
    weak = [f for f in faint if not f.is_leak and f.metrics[0].value > 0.5]
    assert len(weak) >= 3
    assert {judged([f]).verdict for f in weak} <= {"not demonstrated", "inconclusive"}
    assert judged(weak).verdict == "inferred"  # though none is a leak by itself
    assert judged([members_of(seed, -0.5, n=30) for seed in range(8)]).verdict == "not demonstrated"
    again = [f.model_copy(update={"client": 0}) for f in weak]
    assert judged(again).verdict != "inferred"  # one client's records, attacked again, are no more of them


def test_a_headline_says_of_how_many_and_membership_what_few_false_positives_find():
    labels = judged([labels_of([1, 1, 1, 2], [1, 1, 1, 2], 10)])
    assert "100 % of 4 labels" in labels.headline
    scored = members_of(1, 1.0, n=100)
    found = next(m.value for m in scored.metrics if m.name == "membership_tpr")
    leak, none = judged([scored]), judged([members_of(1, 0.0, n=100)])
    assert " % of 200 records, where guessing gets 50 %. It finds " in leak.headline
    assert f"It finds {100 * found:.3g} % of members at 1 % false positives." in leak.headline
    assert "of members at 1 % false positives" in none.verdict_text
    assert {(m.name, m.of, m.value.n) for m in leak.metrics} == {
        ("membership_auc", "records", 200), ("membership_accuracy", "records", 200), ("membership_tpr", "members", 100),
        ("usage_error", "runs", 1),
    }  # fmt: skip


def test_one_client_s_leak_is_not_undone_by_others_of_few_records():
    strong = members_of(0, 5.0, n=8)
    others = sorted((members_of(seed, 0.0, n=12) for seed in range(60)), key=lambda f: f.metrics[0].value)[:2]
    gains = [(f.metrics[0].n or 0) * (f.metrics[0].value - 0.5) for f in (strong, *others)]
    assert strong.is_leak
    assert sum(gains) < 0
    assert judged([strong, *others]).verdict == "inferred"


def of_attributes(seed: int, right: float, of_others: float = 0.5, n: int = 60, usual: float = 0.5) -> AttackSummary:
    """``usual``: how often members have the second value, where others have it every other time."""
    rng = generator(seed, "attributes")
    member = torch.arange(2 * n) < n
    values = (torch.rand(2 * n, generator=rng) < torch.where(member, usual, 0.5)).long()
    matched = torch.cat([torch.arange(n, 2 * n), torch.arange(n)])
    truth = Truth(
        {}, {}, torch.zeros(1, 1, 8, 8), torch.zeros(1).long(), {},
        owners=torch.where(member, 0, NOBODY), matched=matched, values=values,
    )  # fmt: skip
    rate = torch.where(member, right, of_others)
    named = torch.where(torch.rand(2 * n, generator=rng) < rate, values, 1 - values)
    records = QuerySet(torch.zeros(2 * n, 1), torch.zeros(2 * n).long(), torch.zeros(0, 1), torch.zeros(0).long())
    found = AttributeFinding(attack="a", values=named, scores=torch.zeros(2 * n, 2))
    return judged([evaluate(found, seen(kind="table", records=records), truth, seed=0).result])


@pytest.mark.slow
def test_guessed_attributes_are_not_inferred():
    assert sum(of_attributes(seed, 0.5).verdict == "inferred" for seed in range(AUDITS)) <= BY_CHANCE
    leak = of_attributes(0, 0.9)
    assert leak.verdict == "inferred"
    found = re.search(
        r"right for (\d+) % of \d+ records, where the same attack gets (\d+) % .* value (\d+) %\.", leak.headline
    )
    assert found is not None
    assert [int(share) for share in found.groups()] == pytest.approx([90, 50, 60], abs=12)


@pytest.mark.slow
@pytest.mark.parametrize(("right", "of_others"), [(0.9, 0.9), (0.5, 0.1)], ids=["imputed", "less than the frequencies"])
def test_what_is_told_of_anybody_is_no_leak_of_training(right, of_others):
    verdicts = [of_attributes(seed, right, of_others).verdict for seed in range(AUDITS)]
    assert sum(v == "inferred" for v in verdicts) <= BY_CHANCE


def test_where_members_differ_by_themselves_an_attribute_is_not_said_to_be_given_away_by_training():
    told = of_attributes(0, 0.95, 0.5, n=200, usual=0.75)
    assert told.verdict == "inconclusive"
    assert "same source" in " ".join(told.advice)


@pytest.mark.slow
def test_guessed_labels_are_not_inferred():
    def verdict(seed: int) -> str:
        rng = generator(seed, "labels")
        true, found = (torch.randint(10, (4, 8), generator=rng).tolist() for _ in range(2))
        return judged([labels_of(t, f, 10, client=i) for i, (t, f) in enumerate(zip(true, found, strict=True))]).verdict

    assert sum(verdict(seed) == "inferred" for seed in range(AUDITS)) <= BY_CHANCE


def test_every_verdict_says_on_how_much_it_rests():
    for summary in (of_images(0, 2, 8, "leak"), of_members(0, 1.0), of_attributes(0, 0.9)):
        assert summary.evidence is not None
        assert summary.evidence.n > 1
        assert 0 < (summary.evidence.low or 0) < summary.evidence.value <= (summary.evidence.high or 0)
        assert not {"{who}", "{things}", "{question}"} & set(summary.headline.split())


@given(ratio=st.floats(0.01, 0.99), dimensions=st.integers(2, 40))
def test_near_by_luck_is_the_share_of_the_sphere(ratio, dimensions):
    """The oracle is the density of the angle, sin(t) to the power d - 2, summed up to asin(ratio)."""
    angles = np.linspace(0, np.pi, 20_001)
    density = np.sin(angles) ** (dimensions - 2)
    share = density[angles <= math.asin(ratio)].sum() / density.sum()
    assert as_near_by_luck(ratio, dimensions) == pytest.approx(share, abs=2e-3)
    assert as_near_by_luck(1.0, dimensions) == 1.0


def test_one_more_of_the_same_is_as_good_by_luck_as_often_as_is_said():
    """The oracle is the p-values' uniform distribution, and scipy's test where the one is a sample of one."""
    rng = np.random.default_rng(0)
    values = np.exp(rng.standard_normal((400, 11)))
    ps = [as_good_by_luck(row[0], row[1:].tolist()) for row in values]
    assert stats.kstest(ps, "uniform").pvalue > 0.01
    row = np.log(values[0])
    spread = row[1:].std(ddof=1) * math.sqrt(1.1)
    assert ps[0] == pytest.approx(stats.t.cdf((row[0] - row[1:].mean()) / spread, 9))
    assert as_good_by_luck(1e-6, values[0, 1:].tolist()) < 1e-3
    assert as_good_by_luck(math.nan, [1.0, 2.0]) == as_good_by_luck(2.0, [2.0, 2.0]) == 1.0
    assert as_good_by_luck(1.0, [2.0, 2.0]) == 0.0
