"""Scores and verdicts against independent implementations and hand-made cases."""

from __future__ import annotations

import dataclasses
import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from skimage.metrics import mean_squared_error, peak_signal_noise_ratio, structural_similarity

from fedaudit.attacks import ImageFinding, Trace
from fedaudit.attacks.labels.attack import LabelFinding
from fedaudit.evaluation import (
    FINDING_TYPES,
    Limits,
    check_limits,
    compare,
    evaluate,
    interval,
    paired_interval,
    summarise,
)
from fedaudit.evaluation.image_metrics import _lpips_network, lpips, lpips_missing, mse, psnr, psnr_from_mse, ssim
from fedaudit.evaluation.images import assign, standing, verdict_of
from fedaudit.evaluation.labels import label_accuracy
from fedaudit.evaluation.scores import in_groups
from fedaudit.results import AttackSummary, FindingResult, GroupWorst, ImageResult, MetricResult
from fedaudit.task.info import TaskInfo
from fedaudit.transcript.observation import Message, Observation
from fedaudit.transcript.threat import ThreatModel
from fedaudit.transcript.truth import Truth
from fedaudit.transcript.update import Update
from fedaudit.utils.errors import BadInput
from fedaudit.utils.machine import own_process
from fedaudit.utils.seeds import generator


def image_files(count: int, channels: int = 3, size: int = 16, seed: int = 0) -> torch.Tensor:
    return torch.rand((count, channels, size, size), generator=generator(seed, "pictures"))


def image(
    psnr_value: float = 20.0, ssim_value: float = 0.6, position: int = 1, different: int | None = None
) -> ImageResult:
    return ImageResult(
        true_image="t.png", reconstruction="r.png", true_label=0, label=0, mse=0.01, psnr=psnr_value, ssim=ssim_value,
        rank=position, candidates=100, different_candidates=different, psnr_mean_image=12.0, psnr_same_class=11.0,
    )  # fmt: skip


def finding(attack: str, images: list[ImageResult], client: int = 0, labels: float = 1.0) -> FindingResult:
    return FindingResult(
        attack=attack, federation="f", update_kind="gradient", round=0, client=client, num_examples=len(images),
        status="done", kind="images", images=images, label_accuracy=labels,
    )  # fmt: skip


def seen(rounds: list[int], client: int = 0, examples: int = 2) -> Observation:
    """What an adversary sees of one client; no evaluation of images looks at weights."""
    task_info = TaskInfo("linear", None, "eval", "cross-entropy", "image", (3, 16, 16), 2, (0.0,) * 3, (1.0,) * 3)
    update = Update(client, "gradient", {}, examples, None)
    messages = tuple(Message(r, client, {}, update) for r in rounds)
    module = torch.nn.Identity()
    return Observation(
        "f", ThreatModel(), task_info, module, torch.nn.functional.cross_entropy, "gradient", (), messages
    )


# Metrics ------------------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=20)
@given(seed=st.integers(0, 1000), noise=st.floats(0.01, 1.0), channels=st.sampled_from([1, 3]))
def test_mse_psnr_and_ssim_agree_with_scikit_image(seed, noise, channels):
    a = image_files(2, channels, 96, seed)
    b = (a + noise * torch.randn(a.shape, generator=generator(seed, "noise"))).clamp(0, 1)
    errors, structure = mse(a, b), ssim(a, b)
    for i in range(2):
        x, y = a[i].double().numpy(), b[i].double().numpy()
        assert errors[i].item() == pytest.approx(mean_squared_error(x, y), rel=1e-5)
        ratio = pytest.approx(peak_signal_noise_ratio(x, y, data_range=1.0), rel=1e-5)
        assert psnr_from_mse(errors)[i].item() == ratio
        assert psnr(a[i], b[i]).item() == psnr(x, y).item() == ratio
        assert psnr(a[i, 0], b[i, 0]).item() == pytest.approx(peak_signal_noise_ratio(x[0], y[0], data_range=1.0))
        other = structural_similarity(
            x, y, channel_axis=0, gaussian_weights=True, sigma=1.5, use_sample_covariance=False, data_range=1.0
        )
        assert structure[i].item() == pytest.approx(other, abs=1e-5)


def test_ssim_leaves_out_the_border_where_its_window_does_not_fit():
    """As the authors' code does: what a padded border adds is none of the image."""
    a, b = image_files(2, 3, 24), image_files(2, 3, 24, seed=1)
    for i in range(2):
        _, likeness = structural_similarity(
            a[i].double().numpy(), b[i].double().numpy(), channel_axis=0, gaussian_weights=True, sigma=1.5,
            use_sample_covariance=False, data_range=1.0, full=True,
        )  # fmt: skip
        assert ssim(a, b)[i].item() == pytest.approx(likeness[:, 5:-5, 5:-5].mean(), abs=1e-5)


def test_ssim_of_two_shades_is_the_closed_form():
    """Without variance SSIM is (2ab + C)/(a² + b² + C), C being (0.01 of the range)², here of the range [0, 1]."""
    a, b = 0.01, 0.03
    found = ssim(torch.full((1, 1, 16, 16), a), torch.full((1, 1, 16, 16), b))
    assert found.item() == pytest.approx((2 * a * b + 1e-4) / (a * a + b * b + 1e-4), abs=1e-3)


def test_equal_pictures_reach_the_cap_and_not_infinity():
    a = image_files(1)
    assert psnr_from_mse(mse(a, a)).item() == 100
    assert psnr(a[0], a[0]).item() == 100
    assert ssim(a, a).item() == pytest.approx(1)


def test_psnr_refuses_images_of_two_shapes():
    with pytest.raises(BadInput, match=r"one shape; these are \(3, 8, 8\) and \(8, 8\)"):
        psnr(torch.zeros(3, 8, 8), torch.zeros(8, 8))


@pytest.mark.parametrize("size", [3, 7, 8, 11])
def test_ssim_works_on_images_smaller_than_its_window(size):
    a = image_files(2, 1, size)
    assert ssim(a, a).tolist() == pytest.approx([1, 1])
    assert (ssim(a, 1 - a) < 0.5).all()


def test_lpips_is_a_number_or_says_why_not(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
    assert lpips(image_files(1), image_files(1)) is None
    reason = lpips_missing()
    assert reason is not None
    assert "LPIPS" in reason


@pytest.mark.peers
def test_lpips_is_that_of_its_authors_package(monkeypatch, tmp_path):
    own_process()
    package = pytest.importorskip("lpips")
    torchvision = pytest.importorskip("torchvision")
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))  # where both look for AlexNet's weights: random ones do
    (tmp_path / "hub" / "checkpoints").mkdir(parents=True)
    trunk = tmp_path / "hub" / "checkpoints" / "alexnet-owt-7be5be79.pth"
    torch.save(torchvision.models.alexnet(weights=None).state_dict(), trunk)
    assert lpips_missing() is None
    a, b = image_files(2, 3, 64), image_files(2, 3, 64, seed=1)
    with torch.no_grad():
        expected = package.LPIPS(net="alex", verbose=False).eval()(2 * a - 1, 2 * b - 1).flatten()
    _lpips_network.cache_clear()
    found = lpips(a, b)
    _lpips_network.cache_clear()
    assert found is not None
    torch.testing.assert_close(found.float(), expected, rtol=1e-4, atol=1e-6)


# Pairing and identification -----------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=30)
@given(count=st.integers(1, 5), seed=st.integers(0, 1000))
def test_pairing_is_the_best_of_all_permutations(count, seed):
    true, found = image_files(count, 1, 3, seed), image_files(count, 1, 3, seed + 1)
    order = assign(true, found)
    assert sorted(order.tolist()) == list(range(count))

    def cost(permutation: tuple[int, ...]) -> float:
        return sum(mse(true[i : i + 1], found[j : j + 1]).item() for i, j in enumerate(permutation))

    best = min(cost(p) for p in itertools.permutations(range(count)))
    assert cost(tuple(order.tolist())) == pytest.approx(best)


def test_rank_counts_the_candidates_that_are_nearer():
    candidates = torch.tensor([0.0, 0.25, 0.5, 0.75]).view(4, 1, 1, 1)
    assert standing(torch.full((1, 1, 1), 0.51), candidates[2], candidates)[0] == 1
    assert standing(torch.full((1, 1, 1), 0.51), candidates[1], candidates)[0] == 3  # 0.5 and 0.75 are nearer
    assert standing(torch.full((1, 1, 1), 0.375), candidates[1], candidates)[0] == 2  # a tie counts against
    assert standing(torch.full((1, 1, 1), 0.0), torch.full((1, 1, 1), 0.9), candidates)[0] == 5  # truth from elsewhere


def test_a_copy_of_the_victim_among_the_candidates_does_not_count_against_it():
    victim = torch.full((1, 1, 1), 0.5)
    candidates = torch.cat([victim[None], victim[None], torch.zeros(1, 1, 1, 1)])
    assert standing(torch.full((1, 1, 1), 0.5), victim, candidates)[0] == 1


@pytest.mark.parametrize(
    ("inferred", "true", "share"),
    [([1, 2], [2, 1], 1.0), ([1, 1], [1, 2], 0.5), ([3], [0], 0.0), ([0, 0, 1, 5], [0, 0, 0, 5], 0.75)],
)
def test_labels_are_compared_as_multisets(inferred, true, share):
    assert label_accuracy(torch.tensor(inferred), torch.tensor(true)) == share


def test_errors_of_normalised_pixels_are_weighted_by_the_channels_deviations():
    """An error of eₖ in channel k is (eₖ/σₖ)² there; the PSNR of a peak of 1 is negative where the mean exceeds 1."""
    std, shift = (0.5, 0.25, 0.2), (0.1, 0.25, 0.4)
    true = image_files(1) * 0.5
    recovered = true + torch.tensor(shift).view(1, 3, 1, 1)
    observation = seen([0], examples=1)
    task_info = dataclasses.replace(observation.task_info, mean=(0.4, 0.5, 0.6), std=std)
    truth = Truth({(0, 0): true}, {(0, 0): torch.tensor([0])}, true, torch.tensor([0]), {})
    found = ImageFinding(
        attack="invg", images=recovered, labels=torch.tensor([0]), label_source="given", objective=0.0, iterations=1
    )
    (recovery,) = evaluate(found, dataclasses.replace(observation, task_info=task_info), truth, seed=0).result.images
    error = (0.2**2 + 1.0**2 + 2.0**2) / 3
    assert recovery.mse_normalised == pytest.approx(error, rel=1e-5)
    assert recovery.psnr_normalised == pytest.approx(-10 * math.log10(error), rel=1e-5)
    assert recovery.psnr_normalised == pytest.approx(-2.253, abs=0.001)
    assert recovery.mse == pytest.approx((0.1**2 + 0.25**2 + 0.4**2) / 3, rel=1e-5)


def test_evaluation_pairs_scores_and_takes_the_psnr_of_snapshots():
    true = image_files(2)
    truth = Truth({(0, 7): true}, {(0, 7): torch.tensor([0, 1])}, image_files(10, seed=5), torch.zeros(10).long(), {})
    swapped = true.flip(0)
    trace = Trace([0, 5], [1.0, 0.1], torch.stack([torch.zeros_like(true), swapped]))
    found = ImageFinding(
        attack="invg", images=swapped, labels=torch.tensor([1, 0]), label_source="yin", objective=0.1, iterations=5,
        trace=trace,
    )  # fmt: skip
    evaluated = evaluate(found, seen([0], client=7), truth, seed=0)
    assert [i.psnr for i in evaluated.result.images] == [100, 100]
    assert [(i.true_label, i.label) for i in evaluated.result.images] == [(0, 0), (1, 1)]
    assert [i.rank for i in evaluated.result.images] == [1, 1]
    assert evaluated.image_files["images/f-0-7-1-invg.png"].equal(true[1])
    assert evaluated.result.curve is not None
    assert evaluated.result.curve.psnr[1] == 100
    assert evaluated.result.curve.psnr[0] < 10
    assert evaluated.result.label_accuracy == 1


@pytest.mark.parametrize(
    ("noise", "verdict"), [(0.0, "recovered"), (0.03, "recovered"), (0.25, "not recovered"), (None, "not recovered")]
)
def test_where_the_victim_is_the_only_candidate_an_even_image_is_the_baseline(noise, verdict):
    """As in front of a site that trains on one example: nothing is singled out, yet a picture is a picture."""
    true = image_files(1)
    flat = true.mean(dim=(-2, -1), keepdim=True).expand_as(true)
    found = flat if noise is None else (true + noise * torch.randn(true.shape, generator=generator(0, "n"))).clamp(0, 1)
    truth = Truth({(0, 0): true}, {(0, 0): torch.tensor([3])}, true, torch.tensor([3]), {})
    recovered = ImageFinding(
        attack="invg", images=found, labels=torch.tensor([3]), label_source="given", objective=0.0, iterations=1
    )
    result = evaluate(recovered, seen([0], examples=1), truth, seed=0).result
    assert result.images[0].psnr_mean_image == pytest.approx(psnr_from_mse(mse(flat, true)).item())
    assert (verdict_of(result.images).verdict == "recovered") is (verdict == "recovered")


@pytest.mark.parametrize(("off", "wrong"), [(0.0, 0), (0.4 / 255, 0), (0.6 / 255, 1), (0.5, 1)])
def test_a_certified_image_that_the_truth_contradicts_is_said_so(off, wrong):
    true = image_files(2) * 0.4
    found = true.clone()
    found[1] += off
    labels = torch.tensor([0, 1])
    truth = Truth({(0, 0): true}, {(0, 0): labels}, image_files(40, seed=1), torch.zeros(40).long(), {})
    vouched = ImageFinding(
        attack="a", images=found, labels=labels, label_source="given", certified=torch.tensor([True, True])
    )
    result = evaluate(vouched, seen([0]), truth, seed=0).result
    assert (result.certified, result.certified_wrong) == (2, wrong)
    judged = FINDING_TYPES["images"].verdict([result])
    assert "2 of 2 certified as exact" in judged.text
    assert ("1 ARE WRONG: the certificate failed" in judged.text) == bool(wrong)
    assert judged.headline.endswith("1 certified images are WRONG.") == bool(wrong)


def test_images_recovered_over_several_rounds_are_paired_in_each_and_judged_once():
    a, b, c = image_files(3)
    truth = Truth(
        {(0, 0): torch.stack([a, b]), (2, 0): torch.stack([b, c])},
        {(0, 0): torch.tensor([0, 1]), (2, 0): torch.tensor([1, 0])},
        image_files(10, seed=5), torch.zeros(10).long(), {},
    )  # fmt: skip
    found = ImageFinding(
        attack="joint", images=torch.stack([c, b, a]), labels=torch.tensor([0, 1, 0]), label_source="given",
        rounds=((2,), (0, 2), (0,)),
    )  # fmt: skip
    evaluated = evaluate(found, seen([0, 1, 2]), truth, seed=0)  # round 1 wasn't covered: not judged
    assert [i.true_image for i in evaluated.result.images] == [
        "images/f-0-0-0-true.png", "images/f-0-0-1-true.png", "images/f-2-0-1-true.png",
    ]  # fmt: skip
    assert [i.psnr for i in evaluated.result.images] == [100] * 3
    assert [i.rounds for i in evaluated.result.images] == [[0], [0, 2], [2]]
    assert [i.uses for i in evaluated.result.images] == [1, 2, 1]
    assert evaluated.result.label_accuracy == 1
    assert (evaluated.result.round, evaluated.result.client, evaluated.result.rounds) == (None, 0, [0, 1, 2])
    assert evaluated.result.curve is None
    with pytest.raises(ValueError, match="1 images for the 2 examples of round 0"):
        evaluate(dataclasses.replace(found, rounds=((2,), (0, 2), ())), seen([0, 2]), truth, seed=0)


# Intervals, verdicts, comparisons, thresholds -----------------------------------------------------------------------


def test_bootstrap_interval_agrees_with_the_normal_one_on_many_values():
    values = torch.randn(400, generator=generator(0, "values")).tolist()
    found = interval(values, resamples=4000, seed=0)
    spread = 1.96 * np.std(values) / 20
    assert found.mean == pytest.approx(np.mean(values))
    assert found.median == pytest.approx(np.median(values))
    assert found.low == pytest.approx(found.mean - spread, abs=0.008)  # of 90 % it would be 0.016 narrower
    assert found.high == pytest.approx(found.mean + spread, abs=0.008)


def test_intervals_of_one_value_or_equal_values_have_no_width():
    for values in ([3.0], [2.0, 2.0, 2.0]):
        for found in (interval(values, resamples=200, seed=0), paired_interval(values)):
            assert (found.low, found.mean, found.high, found.n) == (values[0], values[0], values[0], len(values))


def test_paired_interval_is_the_one_of_the_t_test():
    a, b = [20.0, 22.0, 25.0, 19.0], [18.0, 21.0, 21.0, 18.5]
    expected = stats.ttest_rel(a, b).confidence_interval(0.95)
    found = paired_interval([x - y for x, y in zip(a, b, strict=True)])
    assert (found.low, found.high) == pytest.approx((expected.low, expected.high))


def test_equal_candidates_are_no_choice():
    black = torch.zeros((20, 1, 8, 8))
    truth = Truth({(0, 0): black[:1]}, {(0, 0): torch.zeros(1).long()}, black, torch.zeros(20).long(), {})
    noise = ImageFinding(attack="invg", images=image_files(1, 1, 8), labels=torch.zeros(1).long(), label_source="given")
    result = evaluate(noise, seen([0], examples=1), truth, seed=0).result
    assert [(i.rank, i.candidates, i.different_candidates) for i in result.images] == [(1, 20, 1)]
    assert verdict_of(result.images).verdict == "inconclusive"


@pytest.mark.parametrize(
    ("true", "found", "leak"),
    [
        ([3], [3], False),  # one label may be luck
        ([0], [0], False),
        ([1, 0], [0, 1], False),
        ([1, 1, 1], [1, 1, 1], True),
        ([1, 1], [1, 0], False),
        ([*range(10)], [*range(10)], False),  # luck would hardly name them all, but whoever names every class does
    ],
)
def test_labels_that_guessing_finds_are_no_leak(true, found, leak):
    inputs = torch.rand(len(true), 1, 8, 8)
    truth = Truth({(0, 0): inputs}, {(0, 0): torch.tensor(true)}, image_files(10), torch.arange(10), {})
    labels = LabelFinding(attack="labels", labels=torch.tensor(found), method="geng", num_classes=10)
    result = evaluate(labels, seen([0], examples=len(true)), truth, seed=0).result
    assert result.is_leak is leak
    (summary,) = summarise([result], resamples=200, seed=0)
    assert summary.verdict == ("inferred" if leak else "inconclusive")


def test_summaries_hold_the_means_of_their_attack_only():
    findings = [
        finding("a", [image(20), image(30)], 0),
        finding("a", [image(40, position=3)], 1, labels=0.0),
        finding("b", [image(10)], 0),
    ]
    a, b = summarise(findings, resamples=200, seed=0)
    assert a.psnr is not None
    assert (a.psnr.mean, a.images, a.updates, a.label_accuracy) == (30, 3, 2, 0.5)
    assert a.identification_rate == pytest.approx(2 / 3)
    assert b.images == 1
    assert a.worst is not None
    assert (a.worst.value, a.worst.mean, a.worst.n) == (40, 30, 3)


def test_the_worst_stands_beside_the_mean_class_by_class():
    images = [
        image(psnr, position=i).model_copy(update={"true_label": i % 2}) for i, psnr in enumerate([20, 31, 24, 33])
    ]
    (told,) = summarise([finding("a", images, 0)], resamples=200, seed=0)
    assert told.worst is not None
    assert [(g.label, g.value, g.mean, g.n) for g in told.worst.by_group] == [(0, 24, 22, 2), (1, 33, 32, 2)]
    assert told.worst.text.endswith(
        "; by class (2, of 2 each) the most exposed 24.0 to 33.0 dB, the means 22.0 to 32.0 dB"
    )
    alone = image(50.0, position=4).model_copy(update={"true_label": 2})
    (more,) = summarise([finding("a", [*images, alone], 0)], resamples=200, seed=0)
    assert more.worst is not None
    assert more.worst.value == 50
    assert more.worst.by_group == told.worst.by_group  # a class's only image is no class's worst
    images = [one.model_copy(update={"true_label": i}) for i, one in enumerate(images)]
    (told,) = summarise([finding("a", images, 0)], resamples=200, seed=0)
    assert told.worst is not None
    assert told.worst.by_group == []
    assert "by class" not in told.worst.text


def test_of_several_columns_the_one_that_is_furthest_apart_is_told_and_no_category():
    def row(column: str, label: int, mean: float) -> GroupWorst:
        return GroupWorst(label=label, column=column, group=f"{column} {label}", n=9, value=mean + 0.1, mean=mean)

    means = {"ward": (0.3, 0.4), "sex": (0.2, 0.7)}
    groups = [row(column, i, mean) for column, own in means.items() for i, mean in enumerate(own)]
    (by, told) = in_groups(groups, "%").split(" the most exposed ")
    assert by == "; by the column of 2 whose categories are furthest apart (2, of 9 each)"
    assert told == "30 to 80 %, the means 20 to 70 %"
    assert in_groups([], "dB") == ""
    both = [row(column, i, 0.5 + i / 10) for column in ("", "class") for i in range(2)]  # a column may be called so
    told = in_groups(both, "%")
    assert told.count("; by class (2, of 9 each) ") == told.count("; by a column's categories (2, of 9 each) ") == 1
    members = [row("", label, 0.5 + 0.1 * label).model_copy(update={"value": label}) for label in range(3)]
    assert in_groups(members) == "; by class (3, of 9 each) at most 2 members, AUC 0.50 to 0.70"
    assert "at most 1 member, AUC" in in_groups(members[:2])


def test_an_attack_that_could_not_be_played_has_its_reason_in_the_summary():
    row = FindingResult(
        attack="a", federation="f", update_kind="gradient", round=0, client=0, num_examples=1,
        status="not applicable", reason="no labels",
    )  # fmt: skip
    (summary,) = summarise([row], resamples=200, seed=0)
    assert summary.verdict == "not applicable"
    assert "no labels" in summary.verdict_text


@pytest.mark.parametrize(
    ("gains", "outcome"),
    [
        ([3, 3.5, 2.5, 3], "b is better"),
        ([-3, -3.5, -2.5], "a is better"),
        ([5, -4, 3], "undecided"),
        ([9], "undecided"),
    ],
)
def test_comparisons_are_paired(gains, outcome):
    first = [finding("x", [image(20 + i, different=1000)], i) for i in range(len(gains))]
    second = [finding("y", [image(20 + i - gain, different=1000)], i) for i, gain in enumerate(gains)]
    (row,) = compare(first + second, summarise(first + second, resamples=100, seed=0))
    assert (row.a, row.b) == ("y", "x")
    assert row.difference.mean == pytest.approx(-np.mean(gains))
    assert row.outcome == outcome


def leaking(*attacks: str) -> list[AttackSummary]:
    told = {"federation": "f", "update_kind": "gradient", "updates": 1, "images": 0, "verdict_text": "t"}
    measured = {
        "name": "error",
        "summary": "s",
        "higher_is_better": False,
        "value": interval([1.0], resamples=100, seed=0),
    }
    return [
        AttackSummary.model_validate({**told, "attack": name, "verdict": "inferred", "metrics": [measured]})
        for name in attacks
    ]


def test_where_less_is_more_leakage_the_lower_attack_is_better():
    def measured(attack: str, client: int, value: float) -> FindingResult:
        row = MetricResult(name="error", value=value, higher_is_better=False)
        return finding(attack, [], client).model_copy(update={"metrics": [row], "kind": "labels"})

    rows = [measured("x", i, 1.0 + 0.1 * i) for i in range(3)] + [measured("y", i, 0.5 + 0.12 * i) for i in range(3)]
    (row,) = compare(rows, leaking("x", "y"))
    assert (row.a, row.b, row.metric, row.outcome) == ("y", "x", "error", "a is better")


def test_limits_look_at_the_worst_image():
    findings = [finding("a", [image(12), image(31)]), finding("b", [image(15)], labels=0.25)]
    summaries = summarise(findings, resamples=200, seed=0)
    limits = Limits({"psnr": 30.0, "ssim": 0.99, "label_accuracy": 0.5, "identification_rate": 1.0})
    by_metric = {t.metric: t for t in check_limits(limits, findings, summaries)}
    assert by_metric["psnr"].exceeded
    assert by_metric["psnr"].worst == 31
    assert by_metric["psnr"].where == "a on f"
    assert not by_metric["ssim"].exceeded
    assert by_metric["label_accuracy"].exceeded
    assert not by_metric["identification_rate"].exceeded
    (open_one,) = check_limits(Limits({"psnr": 1.0}), [], [])
    assert (open_one.worst, open_one.outcome) == (None, "not tested")
    (kept,) = check_limits(Limits({"psnr": 31.0}), findings, summaries)
    assert (kept.worst, kept.exceeded) == (31, False)  # a limit is exceeded above it, not at it
