"""Scores after the best shift and flip: against a search over all of them, and what may and may not gain by it."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import avg_pool2d

from fedaudit.attacks import ImageFinding
from fedaudit.evaluation import evaluate
from fedaudit.evaluation.finding_types import FINDING_TYPES, Judgement
from fedaudit.evaluation.images import verdict_of, visible
from fedaudit.evaluation.images.registration import LEAST_GAIN_DB, Move, correlations, registered
from fedaudit.results import FindingResult
from fedaudit.transcript.truth import Truth
from fedaudit.utils.seeds import generator
from tests.evaluation.test_evaluation import seen

SIZE = 16


def pictures(count: int, size: int = SIZE, seed: int = 0) -> Tensor:
    """Return smooth images over the whole range."""
    smooth = avg_pool2d(torch.rand((count, 3, size + 4, size + 4), generator=generator(seed, "pictures")), 5, 1)
    low, high = smooth.amin(dim=(1, 2, 3), keepdim=True), smooth.amax(dim=(1, 2, 3), keepdim=True)
    return (smooth - low) / (high - low)


def elsewhere(images: Tensor, down: int = 3, right: int = -2, *, flipped: bool = True) -> Tensor:
    """Return the images shifted, with noise where nothing is left of them, and then mirrored."""
    moved = torch.roll(images, (down, right), (-2, -1))
    noise = torch.rand(images.shape, generator=generator(1, "edges"))
    rows, columns = torch.arange(SIZE)[:, None] - down, torch.arange(SIZE) - right
    inside = (rows >= 0) & (rows < SIZE) & (columns >= 0) & (columns < SIZE)
    moved = torch.where(inside, moved, noise)
    return moved.flip(-1) if flipped else moved


def judged(images: Tensor, true: Tensor, others: Tensor) -> tuple[FindingResult, Judgement]:
    count = len(true)
    candidates = torch.cat([true, others])
    truth = Truth(
        {(0, 0): true}, {(0, 0): torch.zeros(count).long()}, candidates, torch.zeros(len(candidates)).long(), {}
    )
    found = ImageFinding(attack="invg", images=images, labels=torch.zeros(count).long(), label_source="given")
    result = evaluate(found, seen([0], examples=count), truth, seed=0).result
    return result, FINDING_TYPES["images"].verdict([result])


@pytest.mark.parametrize("size", [3, 8, pytest.param(13, marks=pytest.mark.slow)])
def test_registration_is_the_search_over_all_moves(size):
    """Written out: every shift and flip, the part's error, and what an even image would gain taken off."""
    image, others = pictures(1, size)[0].double(), pictures(6, size, seed=1).double()
    others[0] = torch.roll(image, (size // 4, 0), (-2, -1)).flip(-1)
    reach = size // 4
    errors, moves = registered(image, others)
    colour = image.mean(dim=(1, 2), keepdim=True)
    for other, error, move in zip(others, errors, moves, strict=True):
        plain = ((image - other) ** 2).mean().item()
        best = plain
        for flipped, down, right in itertools.product((0, 1), range(-reach, reach + 1), range(-reach, reach + 1)):
            own = image.flip(-1) if flipped else image
            pairs = [
                (own[:, y - down, x - right], other[:, y, x])
                for y in range(size)
                for x in range(size)
                if 0 <= y - down < size and 0 <= x - right < size
            ]
            a, b = (torch.stack(part, dim=1) for part in zip(*pairs, strict=True))
            easier = ((other - colour) ** 2).mean() / ((b - colour[..., 0]) ** 2).mean()
            best = min(best, float(((a - b) ** 2).mean() * max(1.0, float(easier))))
        counts = best <= plain * 10 ** (-LEAST_GAIN_DB / 10)
        assert error.item() == pytest.approx(best if counts else plain, rel=1e-6, abs=1e-12)
        assert (move == Move()) == (not counts)


@pytest.mark.parametrize(("down", "right", "flipped"), [(3, -2, True), (-4, 4, False), (0, 1, False), (0, 0, True)])
def test_a_shifted_or_flipped_copy_has_its_full_score(down, right, flipped):
    true = pictures(1)
    result, _ = judged(elsewhere(true, down, right, flipped=flipped), true, pictures(20, seed=2))
    (image,) = result.images
    assert image.psnr < 20
    assert image.registered is not None
    assert image.registered.psnr == 100
    assert image.registered.ssim == pytest.approx(1, abs=1e-6)
    assert image.registered.rank == 1
    assert image.registered.flipped == flipped
    assert (image.registered.down, image.registered.right) == (-down, -right)


def test_a_shift_beyond_a_quarter_of_the_side_does_not_count():
    true = pictures(1)
    result, _ = judged(elsewhere(true, SIZE // 4 + 1, 0, flipped=False), true, pictures(20, seed=2))
    assert result.images[0].registered is not None
    assert result.images[0].registered.psnr < 25


@pytest.mark.parametrize("shade", [0.0, 0.3, 0.5, 1.0])
def test_an_even_image_gains_nothing(shade):
    true = pictures(8)
    errors, moves = registered(torch.full((3, SIZE, SIZE), shade), true)
    torch.testing.assert_close(errors, (shade - true.double()).square().flatten(1).mean(dim=1))
    assert set(moves) == {Move()}


def test_an_even_image_gains_nothing_where_all_that_is_hard_stands_at_the_edge():
    """Cut off by a shift, a dark edge would make the bright rest easy."""
    true = torch.ones((1, 3, SIZE, SIZE))
    true[..., :3] = 0
    error, moves = registered(torch.full((3, SIZE, SIZE), 0.99), true)
    assert error.item() == pytest.approx((0.99 - true).square().mean().item())
    assert moves == [Move()]


def test_noise_gains_next_to_nothing():
    true, noise = pictures(50), torch.rand((3, SIZE, SIZE), generator=generator(0, "noise"))
    errors, _ = registered(noise, true)
    plain = (noise - true).double().square().flatten(1).mean(dim=1)
    assert (10 * torch.log10(plain / errors)).mean() < 0.2


def test_shifted_images_are_recovered_and_noise_is_not():
    true, others = pictures(4), pictures(60, seed=3)
    result, verdict = judged(elsewhere(true), true, others)
    assert verdict.verdict == "recovered"
    assert "4 of 4 came out visibly" in verdict.headline
    assert all(image.rank > 1 or not visible(image) for image in result.images)  # as they stand, none did
    noise = torch.rand(true.shape, generator=generator(0, "noise"))
    assert judged(noise, true, others)[1].verdict == "not demonstrated"


@pytest.mark.parametrize(
    "hide",
    [
        lambda x: 1 - x,
        lambda x: 0.3 * x,
        lambda x: x.rot90(1, (-2, -1)),
        lambda x: 0.2 + 0.5 * (1 - x).flip(-1).rot90(2, (-2, -1)),
    ],
    ids=["negative", "dark", "turned", "all of it"],
)
def test_copies_in_another_tone_are_recovered(hide):
    true, others = pictures(4), pictures(60, seed=3)
    result, verdict = judged(hide(true).flip(0), true, others)
    assert verdict.verdict == "recovered"
    assert all(
        image.tone_aligned.psnr > 60 and image.tone_aligned.rank == 1 for image in result.images if image.tone_aligned
    )
    noise = torch.rand(true.shape, generator=generator(0, "noise"))
    assert judged(noise, true, others)[1].verdict == "not demonstrated"


def test_correlations_are_numpy_s():
    image, others = pictures(1)[0], pictures(5, seed=1)
    found = correlations(image, others)
    for way in range(8):
        own = np.rot90(image.numpy()[..., ::-1] if way % 2 else image.numpy(), way // 2, (-2, -1))
        for i, other in enumerate(others.numpy()):
            x, y = (a - a.mean(axis=(-2, -1), keepdims=True) for a in (own, other))
            assert found[way, i].item() == pytest.approx((x * y).sum() / np.sqrt((x**2).sum() * (y**2).sum()), abs=1e-5)


def test_a_victim_of_several_rounds_counts_once():
    """Two victims, each shown by three rounds: two, with the chances of three tries."""
    true, others = pictures(2), pictures(60, seed=3)
    images = [image for _ in range(3) for image in judged(true, true, others)[0].images]
    hidden = {"ssim": 0.1, "registered": None, "tone_aligned": None}
    verdict = verdict_of([image.model_copy(update=hidden) for image in images])
    assert verdict.evidence is not None
    assert verdict.evidence.n == 2
    assert verdict.evidence.baseline == pytest.approx(3 * 2 / 62)


def test_pictures_in_the_clients_style_are_no_leak():
    """Everybody else's pictures are darker: any pale one is nearest to a victim."""
    true, pale, dark = pictures(8), pictures(8, seed=4), pictures(60, seed=3)
    result, verdict = judged(0.3 + 0.6 * pale, 0.3 + 0.6 * true, 0.4 * dark)
    assert verdict.verdict in ("inconclusive", "not demonstrated")
    assert any("told from the held-out ones" in note for note in result.notes)
    assert "the clients' own sites" in verdict.advice or verdict.verdict == "not demonstrated"


def test_images_of_a_batch_are_paired_after_their_moves():
    true = pictures(4)
    result, _ = judged(elsewhere(true).flip(0), true, pictures(60, seed=3))
    assert [image.registered.psnr for image in result.images if image.registered] == [100] * 4


def test_other_candidates_are_moved_alike():
    """What came out is as near to another candidate, moved, as to the true image: nobody is identified by it."""
    true = pictures(1)
    found = elsewhere(true, 2, 0, flipped=False)
    alone, _ = judged(found, true, pictures(20, seed=2))
    beside, verdict = judged(found, true, torch.cat([pictures(20, seed=2), found.roll(1, -1)]))
    assert alone.images[0].registered is not None
    assert beside.images[0].registered is not None
    assert alone.images[0].registered.rank == 1
    assert beside.images[0].registered.rank == 2
    assert verdict.verdict == "not demonstrated"


def test_chance_is_doubled_in_the_second_judgement():
    """Of one class among 40, at a tenth of the level: five by luck with 10·(2·5/40)⁵ = 0.0098, four with 0.016."""
    found: dict[int, tuple[str, float | None]] = {}
    for count in (4, 5):
        true = pictures(count)
        noise = torch.randn(true.shape, generator=generator(0, "noise"))
        hidden = elsewhere(true) + 0.2 * noise  # no longer visible
        result, verdict = judged(hidden, true, pictures(40 - count, seed=3))
        assert [image.registered.rank for image in result.images if image.registered] == [1] * count
        assert verdict.evidence is not None
        found[count] = verdict.verdict, verdict.evidence.p_value
    assert found[5][0] == "identifiable"
    assert found[5][1] == pytest.approx(10 * 0.25**5)
    assert found[4][0] == "inconclusive"
