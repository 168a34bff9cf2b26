"""The cocktail party attack: sources told apart, made exact where a ReLU allows it, and never vouched for wrongly."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fedaudit
from fedaudit.attacks import ImageFinding, make_attack
from fedaudit.attacks.analytic.cocktail import unmix
from fedaudit.task.info import TaskInfo
from fedaudit.transcript.observation import Message, Observation
from fedaudit.transcript.threat import ThreatModel
from fedaudit.transcript.update import Update
from fedaudit.utils.errors import NotApplicable
from fedaudit.utils.seeds import generator


@functools.cache
def photos() -> tuple[Tensor, Tensor]:
    split = fedaudit.load_dataset("photos").test
    return split.inputs, split.targets


def gradient(count: int, width: int, activation: nn.Module, noise: float = 0.0) -> tuple[Observation, Tensor]:
    """Return what a server sees of a gradient of ``count`` photographs, and these."""
    images, labels = photos()[0][:count], photos()[1][:count]
    classes = int(photos()[1].max()) + 1
    info = TaskInfo(
        "custom", None, "eval", "cross-entropy", "image", images.shape[1:], classes, (0.5,) * 3, (0.25,) * 3
    )
    torch.manual_seed(0)
    module = nn.Sequential(nn.Flatten(), nn.Linear(images[0].numel(), width), activation, nn.Linear(width, classes))
    value = nn.functional.cross_entropy(module(info.normalise(images)), labels)
    grads = torch.autograd.grad(value, list(module.parameters()))
    named = {name: g for (name, _), g in zip(module.named_parameters(), grads, strict=True)}
    sent = {name: g + noise * g.std() * torch.randn(g.shape, generator=generator(1)) for name, g in named.items()}
    start = module.state_dict()
    message = Message(0, 0, start, Update(0, "gradient", sent, count, None))
    seen = Observation("f", ThreatModel(), info, module, nn.functional.cross_entropy, "gradient", (start,), (message,))
    return seen, images


def cocktail(observation: Observation, **given: Any) -> ImageFinding:
    found = make_attack("cocktail", given)(observation, generator=generator(0))
    assert isinstance(found, ImageFinding)
    return found


def nearest(found: ImageFinding, true: Tensor) -> Tensor:
    """Return the PSNR of each true image with whatever is most like it."""
    return -10 * ((true[:, None] - found.images[None]).square().flatten(2).mean(2).min(1).values + 1e-10).log10()


def rectangles(count: int, seed: int) -> Tensor:
    """Return images (count, 1, 24, 24) of a few rectangles each, on top of each other."""
    rng = generator(seed)
    images = torch.zeros(count, 1, 24, 24, dtype=torch.float64)
    for image in images:
        for _ in range(4):
            top, left, tall, wide = (int(i) for i in torch.randint(2, 18, (4,), generator=rng))
            image[0, top : top + tall, left : left + wide] = float(torch.rand((), generator=rng))
    return images


def told_apart(count: int, seed: int) -> float:
    """Return how alike images and sources are: the mean cosine of each with its nearest, whichever way is lower."""
    images = rectangles(count, seed)
    mixture = torch.randn(count, count, dtype=torch.float64, generator=generator(seed + 1)) + torch.eye(count)
    mixed = (mixture @ images.flatten(1)).view_as(images)
    found = nn.functional.normalize(unmix(mixed, generator(0)) @ mixed.flatten(1), dim=1)
    alike = (nn.functional.normalize(images.flatten(1), dim=1) @ found.T).abs()
    # of the sources, too: none twice, none of nothing
    return min(float(alike.max(dim=dim).values.mean()) for dim in (0, 1))


@pytest.mark.slow
def test_mixed_images_are_told_apart_whatever_the_mixture():
    """All but a few: images that happen to depend on each other have no independent components."""
    found = torch.tensor([told_apart(count, seed) for count in range(1, 9) for seed in range(6)])
    assert float((found > 0.9).double().mean()) > 0.9
    assert float(found.mean()) > 0.97


@pytest.mark.slow
def test_where_a_relu_follows_the_batch_is_exact_and_certified():
    seen, images = gradient(24, 256, nn.ReLU())
    found = cocktail(seen)
    assert found.certified is not None
    assert bool(found.certified.all())
    assert float(nearest(found, images).min()) > 90
    assert sorted(found.labels.tolist()) == sorted(photos()[1][:24].tolist())


@pytest.mark.slow
def test_sources_that_are_left_are_told_apart_again_among_themselves():
    found = cocktail(gradient(64, 265, nn.ReLU())[0], rounds=1)
    assert found.certified is not None
    assert bool(found.certified.all())


@pytest.mark.slow
def test_batches_that_spear_does_not_find_come_out():
    seen, images = gradient(48, 160, nn.ReLU())
    spear = make_attack("spear", {"rounds": 10})(seen, generator=generator(0))
    assert isinstance(spear, ImageFinding)
    assert spear.certified is not None
    assert not bool(spear.certified.any())
    assert float(nearest(cocktail(seen, rounds=1), images).median()) > 25 > 15 > float(nearest(spear, images).median())


@pytest.mark.slow
@pytest.mark.parametrize("activation", [nn.Tanh(), nn.GELU(), nn.Sigmoid()], ids=lambda a: type(a).__name__)
def test_without_a_relu_images_are_likely_and_never_certified(activation: nn.Module):
    seen, images = gradient(16, 128, activation)
    found = cocktail(seen)
    quality = nearest(found, images)
    assert float(quality.median()) > 22
    assert found.certified is None or not bool(found.certified.any())
    assert "likely images, not exact ones" in found.notes[0]


def test_noise_is_never_certified_away():
    seen, images = gradient(16, 256, nn.ReLU(), noise=0.3)
    found = cocktail(seen)
    assert found.certified is not None
    wrong = (found.images[:, None] - images[None]).abs().flatten(2).amax(2).min(1).values > 0.5 / 255
    assert not bool((found.certified & wrong).any())


@pytest.mark.slow
def test_a_single_example_and_a_whole_audit():
    result = fedaudit.audit(
        {
            "data": {"name": "photos"},
            "model": {"name": "mlp", "width": 64},
            "federations": [{"name": "f", "clients": 2, "examples": 2}],
            "attacks": ["cocktail"],
            "evaluation": {"controls": False},
        },
        progress=False,
    )
    assert [finding.status for finding in result.result.findings] == ["done", "done"]
    assert result.result.summaries[0].verdict == "recovered"


@pytest.mark.parametrize(
    ("count", "width", "bias", "reason"),
    [(40, 32, True, "needs fewer examples"), (4, 32, False, "has no bias")],
)
def test_what_it_cannot_take_is_refused(count: int, width: int, bias: bool, reason: str):
    seen, _ = gradient(count, width, nn.Tanh())
    if not bias:
        module = nn.Sequential(nn.Flatten(), nn.Linear(photos()[0][0].numel(), width, bias=False), nn.Tanh())
        start = module.state_dict()
        message = Message(
            0, 0, start, Update(0, "gradient", {"1.weight": seen.single().update.tensors["1.weight"]}, 4, None)
        )
        seen = Observation("f", ThreatModel(), seen.task_info, module, seen.loss, "gradient", (start,), (message,))
    with pytest.raises(NotApplicable, match=reason):
        cocktail(seen)
