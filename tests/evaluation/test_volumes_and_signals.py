"""Recovered volumes and signals against the true ones: metrics against other libraries, moves against a search."""

from __future__ import annotations

import dataclasses
import itertools
import math

import numpy as np
import pytest
import torch
from skimage.metrics import peak_signal_noise_ratio, structural_similarity
from torch import Tensor

from fedaudit.attacks import ImageFinding
from fedaudit.evaluation import evaluate
from fedaudit.evaluation.finding_types import FINDING_TYPES, Judgement
from fedaudit.evaluation.image_metrics import correlation, lpips, ssim
from fedaudit.evaluation.images import VISIBLE_CORRELATION, visible
from fedaudit.evaluation.images.registration import (
    LEAST_GAIN_DB,
    STAY,
    Move,
    correlations,
    overlapping,
    registered,
    turned,
)
from fedaudit.results import FindingResult
from fedaudit.task.info import TaskInfo
from fedaudit.transcript.truth import Truth
from fedaudit.utils.seeds import generator
from tests.evaluation.test_evaluation import seen
from tools.measure.nulls import ecgs, scans


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.rand(shape, generator=generator(seed, "noise"))


def judged(kind: str, found: Tensor, true: Tensor, others: Tensor) -> tuple[FindingResult, Judgement]:
    count, channels = len(true), true.shape[1]
    labels, candidates = torch.zeros(count).long(), torch.cat([true, others])
    truth = Truth({(0, 0): true}, {(0, 0): labels}, candidates, torch.zeros(len(candidates)).long(), {})
    made = ImageFinding(attack="invg", images=found, labels=labels, label_source="given")
    info = TaskInfo(
        "custom", None, "eval", "cross-entropy", kind, tuple(true.shape[1:]), 2, (0.0,) * channels, (1.0,) * channels
    )
    result = evaluate(made, dataclasses.replace(seen([0], examples=count), task_info=info), truth, seed=0).result
    return result, FINDING_TYPES["images"].verdict([result])


# Metrics --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("channels", [1, 2])
def test_ssim_of_volumes_agrees_with_scikit_image_inside_of_the_border(channels: int):
    a, b = noise(2, channels, 16, 18, 21), noise(2, channels, 16, 18, 21, seed=1)
    b = (0.7 * a + 0.3 * b).clamp(0, 1)
    for i in range(2):
        _, likeness = structural_similarity(
            a[i].double().numpy(), b[i].double().numpy(), channel_axis=0, gaussian_weights=True, sigma=1.5,
            use_sample_covariance=False, data_range=1.0, full=True,
        )  # fmt: skip
        assert ssim(a, b)[i].item() == pytest.approx(likeness[:, 5:-5, 5:-5, 5:-5].mean(), abs=1e-5)


@pytest.mark.parametrize(("depth", "window"), [(8, 7), (3, 3)])
def test_ssim_of_flat_volumes_has_the_largest_uniform_window_that_fits(depth: int, window: int):
    a, b = noise(1, 1, depth, 12, 14), noise(1, 1, depth, 12, 14, seed=1)
    _, likeness = structural_similarity(
        a[0].double().numpy(), b[0].double().numpy(), channel_axis=0, win_size=window, use_sample_covariance=False,
        data_range=1.0, full=True,
    )  # fmt: skip
    edge = slice(window // 2, -(window // 2))
    assert ssim(a, b).item() == pytest.approx(likeness[:, edge, edge, edge].mean(), abs=1e-5)


def test_the_correlation_of_signals_is_pearson_s_of_centred_channels():
    a, b = noise(3, 2, 40), noise(3, 2, 40, seed=1)
    b[:, 1] += 100  # an offset of one channel is no difference of shape
    b[0] += 2 * a[0]
    for i, found in enumerate(correlation(a, b)):
        x, y = ((z[i] - z[i].mean(dim=-1, keepdim=True)).flatten().double().numpy() for z in (a, b))
        assert found.item() == pytest.approx(np.corrcoef(x, y)[0, 1], abs=1e-6)
    assert correlation(a[:1, :1], b[:1, :1]).item() == pytest.approx(np.corrcoef(a[0, 0], b[0, 0])[0, 1], abs=1e-5)
    assert correlation(torch.ones(1, 2, 9), noise(1, 2, 9)).item() == 0


def test_there_is_no_lpips_of_volumes_and_signals():
    assert lpips(noise(1, 1, 4, 4, 4), noise(1, 1, 4, 4, 4)) is None
    assert lpips(noise(1, 1, 40), noise(1, 1, 40)) is None


# Moves ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sides", [(11,), (4, 5, 6), (8, 3, 4)])
def test_registration_is_the_search_over_all_moves(sides: tuple[int, ...]):
    """Written out: every shift along every axis, with the flip or not; what an even one would gain is taken off."""
    image, others = noise(2, *sides).double(), noise(4, 2, *sides, seed=1).double()
    others[0] = torch.roll(image, sides[-1] // 4, -1).flip(-1)
    others[1] = torch.roll(image, sides[0] // 4, 1)
    errors, moves = registered(image, others)
    axes = tuple(range(1, image.ndim))
    shifts = [range(-(side // 4), side // 4 + 1) for side in sides]
    counted = 0
    for other, error, move in zip(others, errors, moves, strict=True):
        plain = float(((image - other) ** 2).mean())
        best = plain
        whole = float(((other - image.mean(dim=axes, keepdim=True)) ** 2).mean())
        for flipped, *shift in itertools.product((False, True), *shifts):
            own = image.flip(-1) if flipped else image
            a = own[(slice(None), *(slice(max(0, -s), n - max(0, s)) for s, n in zip(shift, sides, strict=True)))]
            b = other[(slice(None), *(slice(max(0, s), n + min(0, s)) for s, n in zip(shift, sides, strict=True)))]
            even = float(((b - image.mean(dim=axes, keepdim=True)) ** 2).mean())
            best = min(best, float(((a - b) ** 2).mean()) * max(1.0, whole / even))
        counts = best <= plain * 10 ** (-LEAST_GAIN_DB / 10)
        counted += counts
        assert error.item() == pytest.approx(best if counts else plain, rel=1e-6, abs=1e-12)
        assert (move == STAY) == (not counts)
        on_image, on_other = overlapping(image, other, move)
        if counts and best < 1e-12:
            torch.testing.assert_close(on_image, on_other)
    assert counted >= 2


def test_a_shift_in_depth_or_time_is_named():
    volume = noise(1, 8, 6, 6).double()
    _, (move,) = registered(volume, torch.roll(volume, 2, 1)[None])
    assert move == Move(deep=2)
    signal = noise(3, 40).double()
    _, (move,) = registered(signal, torch.roll(signal, -7, -1)[None])
    assert move == Move(right=-7)
    _, (move,) = registered(signal, signal.flip(-1)[None])
    assert move == Move(flipped=True)


def test_turns_and_tones_of_volumes_and_signals():
    volume, signal = noise(2, 4, 6, 6).double(), noise(2, 30).double()
    found = correlations(volume, (0.9 - 0.5 * turned(volume, 3))[None])
    assert found.shape == (8, 1)
    assert int(found[:, 0].abs().argmax()) == 3
    assert float(found[3, 0]) == pytest.approx(-1)
    offsets = torch.tensor([[5.0], [-2.0]], dtype=torch.float64)
    found = correlations(signal, (3 * signal.flip(-1) + offsets)[None])
    assert found.shape == (2, 1)
    assert float(found[1, 0]) == pytest.approx(1)
    assert float(found[0, 0]) < 0.7


# Verdicts -------------------------------------------------------------------------------------------------------------


def test_signals_are_measured_in_units_of_each_channel_s_range():
    inputs, _ = ecgs(60, generator(0, "ecgs"))
    inputs[:, 2] *= 1e6  # microvolts beside volts
    true, others = inputs[:4], inputs[4:]
    found = true + 0.02 * inputs.std(dim=(0, 2)).view(-1, 1) * torch.randn(true.shape, generator=generator(0, "n"))
    result, verdict = judged("signal", found[[2, 0, 3, 1]], true, others)
    low, high = (f(inputs.double().numpy(), axis=(0, 2))[:, None] for f in (np.min, np.max))
    for i, image in enumerate(result.images):
        x, y = ((z[i].double().numpy() - low) / (high - low) for z in (true, found))
        assert image.psnr == pytest.approx(peak_signal_noise_ratio(x, y, data_range=1.0), abs=1e-3)
        centred = [(z - z.mean(axis=1, keepdims=True)).ravel() for z in (x, y)]
        assert image.correlation == pytest.approx(np.corrcoef(*centred)[0, 1], abs=1e-5)
        assert (image.rank, image.ssim, image.lpips) == (1, None, None)
        assert image.mse_normalised == pytest.approx(float(((true[i] - found[i]).double() ** 2).mean()), rel=1e-4)
    assert verdict.verdict == "recovered"
    assert verdict.text.startswith("4 of 4 signals came out visibly")
    assert verdict.evidence is not None
    assert (verdict.evidence.what, verdict.evidence.of) == ("signals came out visibly", "signals")


def test_a_signal_counts_as_visible_from_its_correlation_on():
    inputs, _ = ecgs(60, generator(0, "ecgs"))
    true, others = inputs[:1], inputs[1:]
    result, _ = judged("signal", true, true, others)
    (image,) = result.images
    assert visible(image)
    assert not visible(image.model_copy(update={"correlation": math.nextafter(VISIBLE_CORRELATION, 0)}))
    assert visible(image.model_copy(update={"correlation": VISIBLE_CORRELATION}))
    assert not visible(image.model_copy(update={"rank": 2}))
    assert not visible(image.model_copy(update={"psnr": image.psnr_mean_image}))


def test_shifted_and_inverted_signals_are_leaks_and_other_people_s_are_none():
    inputs, _ = ecgs(80, generator(0, "ecgs"))
    true, others = inputs[:6], inputs[6:]
    for found, words in ((true.roll(9, -1), "shift and flip"), (0.001 - true, "turn, contrast and brightness")):
        result, verdict = judged("signal", found, true, others)
        assert not any(visible(image) for image in result.images)
        assert verdict.verdict == "recovered"
        assert words in verdict.text
    assert judged("signal", others[:6], true, others)[1].verdict == "not demonstrated"


def test_shifted_volumes_are_leaks_and_other_people_s_are_none():
    inputs, _ = scans(80, generator(0, "scans"))
    true, others = inputs[:6], inputs[6:]
    result, verdict = judged("volume", true.roll((1, 2), (2, 4)), true, others)
    assert verdict.verdict == "recovered"
    assert "best shift and flip" in verdict.text
    moves = {(i.registered.deep, i.registered.right) for i in result.images if i.registered}
    assert moves == {(-1, -2)}
    assert judged("volume", others[:6], true, others)[1].verdict == "not demonstrated"
