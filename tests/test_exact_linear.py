"""Closed forms behind a first fully connected layer, a one-layer model, and a ViT's patches."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedaudit.attacks import make_attack
from fedaudit.attacks.analytic.patches import patch_embedding
from fedaudit.threat import Observation
from fedaudit.training import TrainingConfig
from fedaudit.update import SanitiserInfo
from fedaudit.utils.errors import NotApplicable
from fedaudit.utils.seeds import generator
from tests.test_spear import CLASSES, deep, errors, images_of, make, seen


def found_by(observation: Observation) -> Any:
    return make_attack("exact-linear")(observation, generator=generator(0))


def tanh() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(36, 9), nn.Tanh(), nn.Linear(9, CLASSES))


def one_layer() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(36, CLASSES))


class Attentive(nn.Module):
    """A small ViT as Dosovitskiy et al. build it: a class token, and LayerNorm before attention."""

    def __init__(self, width: int = 16, positions: bool = True) -> None:
        super().__init__()
        self.cut = nn.Conv2d(1, width, 2, stride=2)
        self.token = nn.Parameter(torch.randn(1, 1, width))
        self.places = nn.Parameter(torch.randn(1, 10, width)) if positions else None
        self.block = nn.TransformerEncoderLayer(width, 2, 32, dropout=0.0, batch_first=True, norm_first=True)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        z = self.cut(x).flatten(2).transpose(1, 2)
        z = torch.cat([self.token.expand(len(z), -1, -1), z], dim=1)
        z = z if self.places is None else z + self.places
        return self.head(self.block(z)[:, 0])  # type: ignore[no-any-return]


@pytest.mark.parametrize("build", [tanh, deep, one_layer, Attentive])
@pytest.mark.parametrize("seed", range(3))
def test_one_image_comes_out_exactly_with_its_label(build: Callable[[], nn.Module], seed: int) -> None:
    images, labels = images_of(seed, 1)
    found = found_by(seen(make(build, seed), images, labels))
    assert bool(found.certified.all())
    assert float(errors(found, images).max()) < 1e-10
    assert torch.equal(found.labels, labels)


@pytest.mark.parametrize("count", [2, 3, 4])
def test_a_batch_of_different_labels_comes_out_of_a_one_layer_model(count: int) -> None:
    images, _ = images_of(count, count)
    labels = torch.randperm(CLASSES, generator=generator(count))[:count]
    found = found_by(seen(make(one_layer), images, labels))
    assert bool(found.certified.all())
    assert float(errors(found, images).max()) < 1e-10
    assert sorted(found.labels.tolist()) == sorted(labels.tolist())


def test_equal_labels_in_a_one_layer_model_are_never_certified_wrongly() -> None:
    for seed in range(6):
        images, labels = images_of(seed, 4)
        found = found_by(seen(make(one_layer, seed), images, labels))
        assert bool((errors(found, images)[found.certified] < 1e-6).all())


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_steps_over_the_same_example_are_the_same_form(decay: float) -> None:
    images, labels = images_of(1, 1)
    training = TrainingConfig(0.05, 3, (1,) * 3, momentum=0.5, weight_decay=decay, data_size=1)
    found = found_by(seen(make(tanh).double(), images.double(), labels, training))
    assert bool(found.certified[0])
    assert float(errors(found, images).max()) < 1e-10


def test_what_it_refuses() -> None:
    images, labels = images_of(0, 3)
    for build, match in (
        (deep, "run spear where a ReLU follows"),
        (Attentive, "one image at a time"),
        (lambda: nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(32, 5)), "doesn't begin with"),
    ):
        with pytest.raises(NotApplicable, match=match) as caught:
            make_attack("exact-linear").check(seen(make(build), images, labels))
        assert "\n" not in str(caught.value)
    with pytest.raises(NotApplicable, match="fewer patches than the embedding has channels"):
        make_attack("exact-linear").check(seen(make(lambda: Attentive(8)), images[:1], labels[:1]))
    with pytest.raises(NotApplicable, match="fewer examples in a batch than classes"):
        make_attack("exact-linear").check(seen(make(one_layer), *images_of(0, 5)))


def test_patches_are_found_by_what_they_do_and_not_without_positions() -> None:
    observation = seen(make(Attentive), *images_of(0, 1))
    found = patch_embedding(make(Attentive).double(), observation.task_info)
    assert found is not None
    assert (found.position, found.first, found.weight) == ("places", 1, "cut.weight")
    bare = make(lambda: Attentive(positions=False)).double()
    assert patch_embedding(bare, observation.task_info) is None


@pytest.mark.parametrize("build", [tanh, Attentive])
def test_noise_is_not_certified(build: Callable[[], nn.Module]) -> None:
    images, labels = images_of(2, 1)
    observation = seen(make(build), images, labels)
    message = observation.messages[0]
    rng = generator(0)
    noised = {n: t + 0.05 * torch.randn(t.shape, generator=rng) for n, t in message.update.tensors.items()}
    update = dataclasses.replace(message.update, tensors=noised, sanitised=SanitiserInfo("dp", noise=0.05))
    found = found_by(dataclasses.replace(observation, messages=(dataclasses.replace(message, update=update),)))
    assert not bool(found.certified.any())
