"""Whom or what reconstructions name: a pale or shifted copy by its pattern, a person by other pictures, luck seldom."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from scipy.stats import binom
from torch import Tensor

from fedaudit.attacks import ImageFinding
from fedaudit.evaluation import evaluate, summarise
from fedaudit.evaluation.images.embedding import embedded, embedding, taught
from fedaudit.results import AttackSummary, FindingResult, NamedResult
from fedaudit.task.info import TaskInfo
from fedaudit.transcript.observation import Message, Observation
from fedaudit.transcript.threat import ThreatModel
from fedaudit.transcript.truth import Truth
from fedaudit.transcript.update import Update
from fedaudit.utils.seeds import generator

SIDE = 16


def smooth(count: int, seed: int, size: int = SIDE) -> Tensor:
    """Return (count, 1, size, size) cloudy pictures in [0, 1]."""
    coarse = torch.rand((count, 1, size // 4, size // 4), generator=generator(seed, "clouds"))
    return torch.nn.functional.interpolate(coarse, (size, size), mode="bicubic").clamp(0, 1)


def evaluated(
    found: Tensor, true: Tensor, others: Tensor, *, persons: Tensor | None = None, **more: Tensor
) -> FindingResult:
    """Evaluate what was found of one update over ``true``; candidates are ``before``, these and ``others``."""
    before = more.get("before", true[:0])
    k, n, shape = len(before), len(true), tuple(true.shape[1:])
    info = TaskInfo("linear", None, "eval", "cross-entropy", "image", shape, 4, (0.0,), (1.0,))
    message = Message(0, 0, {}, Update(0, "gradient", {}, n, None))
    seen = Observation(
        "f", ThreatModel(), info, torch.nn.Identity(), torch.nn.functional.cross_entropy, "gradient", (), (message,)
    )
    candidates = torch.cat([before, true, others])
    labels = more.get("labels", torch.zeros(len(candidates), dtype=torch.int64))
    whose = torch.zeros(0, dtype=torch.int64) if persons is None else persons
    truth = Truth({(0, 0): true}, {(0, 0): labels[k : k + n]}, candidates, labels, {}, candidate_persons=whose)
    finding = ImageFinding(
        attack="invg", images=found, labels=labels[k : k + n], label_source="given", objective=0.0, iterations=10
    )
    return evaluate(finding, seen, truth, seed=0).result


def named(found: Tensor, true: Tensor, others: Tensor, **more: Tensor) -> list[NamedResult]:
    return [image.named for image in evaluated(found, true, others, **more).images if image.named]


def together(results: list[FindingResult]) -> AttackSummary:
    return summarise(results, resamples=100, seed=0)[0]


@pytest.mark.parametrize(
    "spoil",
    [
        lambda picture: 0.45 + 0.1 * picture,  # hardly any contrast
        lambda picture: 0.3 * picture,  # dark
        lambda picture: (0.3 * picture + 0.6).roll(1, dims=-1),  # bright, and a pixel off
    ],
)
def test_a_copy_in_another_tone_or_a_pixel_off_is_named_by_pattern_and_not_by_pixel(spoil: Callable[[Tensor], Tensor]):
    pictures = smooth(61, seed=3)
    true, even = pictures[:1], pictures[1:]
    even = torch.cat([even, spoil(true).mean() + 0.05 * (even[:5] - even[:5].mean(dim=(-2, -1), keepdim=True))])
    (one,) = named(spoil(true), true, even)
    assert one.of == "image"
    assert one.candidates == 66
    assert one.pattern == 1
    assert one.pixel > 1
    assert one.embedding is None


def test_a_copy_is_named_and_chance_is_one_of_so_many_of_its_class():
    pictures = smooth(60, seed=4)
    labels = torch.arange(60) % 3
    (one,) = named(pictures[:1], pictures[:1], pictures[1:], labels=labels)
    assert (one.candidates, one.pixel, one.pattern) == (20, 1, 1)
    assert one.chance_level == pytest.approx(1 / 20)
    for n in (1, 7, 20):
        assert one.among("pixel", n) == 1
    assert one.among("pixel", 21) is None


@pytest.mark.parametrize("images", [1, 3])
@pytest.mark.slow
def test_luck_names_as_often_as_chance_says_and_excludes_itself_once_in_a_hundred(images):
    """What is found of other pictures of the class: the shares are binomial, and so is how often 1 % is called sure."""
    trials, sure, leaks, hits, expected = 200, 0, 0, 0, 0.0
    for seed in range(trials):
        pictures = smooth(110 + images, seed, size=8)
        result = evaluated(smooth(images, seed + 10_000, size=8), pictures[:images], pictures[images:])
        row = together([result])
        pattern = next(one for one in row.named if one.by == "pattern")
        sure += pattern.p_value <= 0.01
        hits, expected = hits + pattern.named, expected + pattern.by_luck
        leaks += row.verdict in {"recovered", "identifiable"}
    assert leaks <= binom.ppf(1 - 1e-4, trials, 0.01)
    assert hits <= expected + 3 * math.sqrt(expected)
    assert sure <= binom.ppf(1 - 1e-4, trials, 0.01)


@pytest.mark.slow
def test_luck_is_named_by_an_embedding_as_seldom():
    others, trials, hits = smooth(150, seed=0, size=8), 200, 0
    with embedding(True):  # which is taught once, for the pictures that teach it are the same
        for seed in range(trials):
            pictures = smooth(2, seed + 20_000, size=8)
            (one,) = named(pictures[:1], pictures[1:], others)
            assert one.candidates == 76
            hits += one.embedding == 1
    assert hits <= binom.ppf(1 - 1e-4, trials, 1 / 76)


def people(count: int, shots: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return drawn pictures of people, each a pattern of its own in another place, light and expression, and whose."""
    faces = smooth(count, seed, size=32).repeat_interleave(shots, dim=0)
    rng = generator(seed, "shots")
    moved = torch.stack([face.roll(torch.randint(-2, 3, (2,), generator=rng).tolist(), (1, 2)) for face in faces])
    light = torch.linspace(-1, 1, 32) * (torch.rand((len(moved), 1, 1, 1), generator=rng) - 0.5)
    tone = 0.3 + 0.4 * torch.rand((len(moved), 1, 1, 1), generator=rng)
    noise = 0.05 * torch.randn(moved.shape, generator=rng)
    return (tone * moved + 0.5 * light + noise + 0.2).clamp(0, 1), torch.arange(count).repeat_interleave(shots)


@pytest.mark.slow
def test_a_person_is_named_by_other_pictures_and_best_by_the_embedding():
    pictures, persons = people(30, 5, seed=1)
    first = torch.arange(0, len(pictures), 5)
    rest = torch.tensor([i for i in range(len(pictures)) if i % 5])
    found = pictures[first] + 0.15 * torch.randn(pictures[first].shape, generator=generator(1, "noise"))
    whose = torch.cat([persons[first], persons[rest]])
    with embedding(True):
        result = evaluated(found.clamp(0, 1), pictures[first], pictures[rest], persons=whose)
        again = evaluated(found.clamp(0, 1), pictures[first], pictures[rest], persons=whose)
    assert result.images == again.images
    each = [image.named for image in result.images if image.named]
    assert {(one.of, one.candidates) for one in each} == {("person", 30)}
    hits = {look: sum(getattr(one, look) == 1 for one in each) for look in ("pixel", "pattern", "embedding")}
    assert hits["embedding"] >= max(20, hits["pixel"] + 5), hits


def test_what_the_label_names_is_no_identification():
    pictures, persons = people(4, 5, seed=2)
    order = torch.tensor([0, *range(1, 20)])
    result = evaluated(pictures[:1], pictures[:1], pictures[1:], persons=persons[order], labels=persons[order])
    (image,) = result.images
    assert image.named
    assert (image.named.candidates, image.named.chance_level) == (4, 1.0)
    assert all(one.p_value == 1 for one in together([result]).named)


def test_few_pictures_teach_no_network():
    pictures = smooth(40, seed=5)
    with embedding(True):
        (one,) = named(pictures[:1], pictures[:1], pictures[1:])
    assert one.embedding is None
    assert one.candidates == 40


@pytest.mark.slow
def test_pictures_that_teach_are_no_candidates_and_a_network_names_a_copy():
    pictures = smooth(200, seed=6)
    with embedding(True):
        (one,) = named(pictures[:1] * 0.5 + 0.2, pictures[:1], pictures[1:])
    assert one.candidates == 1 + 100
    assert one.embedding == 1


def test_names_beyond_luck_are_identifiable_though_nothing_came_out_visibly():
    pictures = smooth(72, seed=7)
    pale = 0.5 + 0.05 * (pictures[:12].roll(1, dims=-1) - pictures[:12].mean(dim=(-2, -1), keepdim=True))
    results = [
        evaluated(pale[i : i + 1], pictures[i : i + 1], torch.cat([pictures[:i], pictures[i + 1 :]])) for i in range(12)
    ]
    row = together(results)
    assert next(one for one in row.named if one.by == "pattern").named == 12
    assert row.verdict in {"identifiable", "recovered"}


def test_among_fewer_candidates_the_true_one_is_named_as_drawing_says():
    one = NamedResult(of="image", candidates=50, chance_level=0.02, pixel=3, pattern=1, embedding=None)
    lots = torch.stack([torch.randperm(49, generator=generator(i, "lots"))[:9] for i in range(4000)])
    drawn = float((lots >= 2).all(dim=1).double().mean())  # the two nearer ones are 0 and 1
    assert one.among("pixel", 10) == pytest.approx(drawn, abs=0.03)
    assert one.among("pattern", 10) == 1
    assert one.among("embedding", 10) is None


def test_a_truth_keeps_whose_candidates_are(tmp_path):
    pictures, persons = people(3, 2, seed=3)
    truth = Truth({(0, 0): pictures[:1]}, {(0, 0): torch.tensor([0])}, pictures, persons, {}, candidate_persons=persons)
    truth.save(tmp_path / "truth.safetensors")
    assert Truth.load(tmp_path / "truth.safetensors").candidate_persons.equal(persons)


@pytest.mark.slow
def test_one_persons_pictures_are_no_independent_tries():
    """An attack that shows one and the same face names all or none of a person's pictures, by luck one time in ten."""
    leaks = 0
    for seed in range(100):
        pictures, persons = people(10, 8, seed)
        own = torch.arange(4)
        rest = torch.tensor([i for i in range(len(pictures)) if i % 8 > 3])
        shown = smooth(1, seed + 30_000, size=32).expand(4, -1, -1, -1)
        whose = torch.cat([persons[own], persons[rest]])
        row = together([evaluated(shown, pictures[own], pictures[rest], persons=whose)])
        leaks += row.verdict in {"recovered", "identifiable"}
    assert leaks <= binom.ppf(1 - 1e-4, 100, 0.01)


def test_one_picture_under_two_labels_is_evaluated():
    """Blank scans are filed under several classes: whose label counts is the first candidate's."""
    pictures = smooth(40, seed=6)
    labels = torch.tensor([0, 1, *[0] * 39])
    result = evaluated(pictures[:1], pictures[:1], pictures[1:], before=pictures[:1], labels=labels)
    assert [image.named.candidates for image in result.images if image.named] == [40]


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(1, 1), (2, 8, 8), (1, 1, 1), (3,)])
def test_tiny_examples_teach_without_an_error(shape: tuple[int, ...]):
    pictures = torch.rand((80, 1, *shape), generator=generator(0, "tiny"))
    network = taught(pictures, torch.arange(80), 0)
    assert bool(embedded(network, pictures).isfinite().all())
