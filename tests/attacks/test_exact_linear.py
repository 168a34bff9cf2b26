"""Closed forms behind a first fully connected layer, a one-layer model, a ViT's patches and its attention."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedaudit.attacks import make_attack
from fedaudit.attacks.analytic.patches import patch_embedding
from fedaudit.models import build_model
from fedaudit.task.training import TrainingConfig
from fedaudit.transcript.observation import Observation
from fedaudit.transcript.update import ClientDefenceInfo
from fedaudit.utils.errors import NotApplicable
from fedaudit.utils.seeds import generator
from tests.attacks.test_spear import CLASSES, deep, errors, images_of, make, seen


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


class Plain(nn.Module):
    """APRIL's design (A): attention first, on patches and positions as they are; no shortcut, no bias, no convolution.

    The attention is one of torch's own, or three layers as people write it themselves.
    """

    def __init__(self, width: int = 16, own: bool = False, flaw: str = "") -> None:
        super().__init__()
        self.flaw, self.width = flaw, width
        self.embed: nn.Module = nn.Linear(4, width, bias=False)
        self.places = nn.Parameter(torch.randn(9, width), requires_grad=flaw != "no positions")
        self.before = nn.LayerNorm(width) if flaw == "norm" else nn.Identity()
        self.attention = None if own else nn.MultiheadAttention(width, 4, batch_first=True)
        self.qkv = nn.ModuleList(nn.Linear(width, width) for _ in range(3 * own))
        self.after = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 40), nn.GELU(), nn.Linear(40, width))
        self.head = nn.Linear(9 * width, CLASSES)

    def embedded(self, x: Tensor) -> Tensor:
        return self.embed(nn.functional.unfold(x, 2, stride=2).transpose(1, 2))  # type: ignore[no-any-return]

    def forward(self, x: Tensor) -> Tensor:
        z = self.embedded(x)
        z = (z.relu() if self.flaw == "bent" else z) + self.places
        given = self.before(z)
        if self.attention is None:
            q, k, v = (layer(given) for layer in self.qkv)
            mixed = (q @ k.transpose(1, 2) / self.width**0.5).softmax(dim=2) @ v
        else:
            mixed = self.attention(given, given, given, need_weights=False)[0]
        mixed = mixed + z if self.flaw == "shortcut" else mixed
        return self.head(self.after(mixed).flatten(1))  # type: ignore[no-any-return]


class Frozen(Plain):
    """The same behind a convolution that isn't trained."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Conv2d(1, 16, 2, stride=2).requires_grad_(False)

    def embedded(self, x: Tensor) -> Tensor:
        return self.embed(x).flatten(2).transpose(1, 2)  # type: ignore[no-any-return]


class Lossy(Plain):
    """The same with an embedding that doesn't look at a patch's last pixel."""

    def __init__(self) -> None:
        super().__init__()
        with torch.no_grad():
            self.get_parameter("embed.weight")[:, 3] = 0


def plain_own() -> nn.Module:
    return Plain(own=True)


@pytest.mark.parametrize("build", [tanh, deep, one_layer, Attentive, Plain, plain_own])
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
    with pytest.raises(NotApplicable, match="fewer patches"):
        make_attack("exact-linear").check(seen(make(lambda: Attentive(8)), images[:1], labels[:1]))
    with pytest.raises(NotApplicable, match="fewer examples in a batch"):
        make_attack("exact-linear").check(seen(make(one_layer), *images_of(0, 5)))


@pytest.mark.parametrize("name", ["vit", "vit-plain"])
@pytest.mark.parametrize("shape", [(1, 28, 28), pytest.param((3, 32, 32), marks=pytest.mark.slow)])
def test_one_image_comes_out_of_a_vision_transformer(name: str, shape: tuple[int, ...]) -> None:
    image = torch.rand(1, *shape, generator=generator(1))
    model = build_model(name, input_shape=shape, outputs=CLASSES)
    observation = seen(model, image, torch.tensor([2]))
    of_shape = dataclasses.replace(
        observation.task_info, input_shape=shape, mean=(0.5,) * shape[0], std=(0.25,) * shape[0]
    )
    observation = dataclasses.replace(observation, task_info=of_shape)
    found = found_by(observation)
    assert bool(found.certified.all())
    assert found.labels.tolist() == [2]
    assert float((found.images - image).square().mean()) < 1e-6  # 60 dB


def test_an_embedding_that_is_not_trained_leaves_the_attention() -> None:
    images, labels = images_of(0, 1)
    found = found_by(seen(make(Frozen), images, labels))
    assert "attention's gradients" in found.notes[0]
    assert bool(found.certified.all())
    assert float(errors(found, images).max()) < 1e-10


def test_one_step_of_local_training_is_the_same_form_and_two_are_refused() -> None:
    images, labels = images_of(1, 1)
    once = TrainingConfig(0.05, 1, (1,), momentum=0.5, weight_decay=0.1, data_size=1)
    found = found_by(seen(make(Plain).double(), images.double(), labels, once))
    assert bool(found.certified[0])
    assert float(errors(found, images).max()) < 1e-10
    twice = TrainingConfig(0.05, 2, (1, 1), data_size=1)
    with pytest.raises(NotApplicable, match="one known local step"):
        make_attack("exact-linear").check(seen(make(Plain), images, labels, twice))


@pytest.mark.parametrize(
    ("build", "count", "match"),
    [
        (lambda: Plain(flaw="norm"), 1, "no LayerNorm before it"),
        (lambda: Plain(flaw="shortcut"), 1, "no shortcut around it"),
        (lambda: Plain(flaw="no positions"), 1, "learnable position embedding"),
        (lambda: Plain(flaw="bent"), 1, "that is linear"),
        (Lossy, 1, "keeps all pixels"),
        (lambda: Plain(8), 1, "fewer tokens than the attention is wide: 9 of 8"),
        (Plain, 2, "one image at a time"),
    ],
)
def test_what_it_refuses_before_an_attention(build: Callable[[], nn.Module], count: int, match: str) -> None:
    with pytest.raises(NotApplicable, match=match) as caught:
        make_attack("exact-linear").check(seen(make(build), *images_of(0, count)))
    assert "\n" not in str(caught.value)


def test_patches_are_found_by_what_they_do_and_not_without_positions() -> None:
    observation = seen(make(Attentive), *images_of(0, 1))
    found = patch_embedding(make(Attentive).double(), observation.task_info)
    assert found is not None
    assert (found.position, found.first, found.weight) == ("places", 1, "cut.weight")
    bare = make(lambda: Attentive(positions=False)).double()
    assert patch_embedding(bare, observation.task_info) is None


@pytest.mark.parametrize("build", [tanh, Attentive, Plain])
def test_noise_is_not_certified(build: Callable[[], nn.Module]) -> None:
    images, labels = images_of(2, 1)
    observation = seen(make(build), images, labels)
    message = observation.messages[0]
    rng = generator(0)
    noised = {n: t + 0.05 * torch.randn(t.shape, generator=rng) for n, t in message.update.tensors.items()}
    update = dataclasses.replace(message.update, tensors=noised, sanitised=ClientDefenceInfo("dp", noise=0.05))
    found = found_by(dataclasses.replace(observation, messages=(dataclasses.replace(message, update=update),)))
    assert not bool(found.certified.any())
