"""GradInversion: its priors, the registration of a group, and how its seeds agree."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedaudit.attacks import make_attack
from fedaudit.attacks.victim import Victim
from fedaudit.models import build_model
from fedaudit.pipeline.prepare import resolve
from fedaudit.pipeline.run import record
from fedaudit.scenario.scenario import scenario_from
from fedaudit.transcript.observation import Observation, observe
from fedaudit.utils.seeds import generator
from fedaudit_catalogue.attacks.gradinversion import (
    batch_norm_statistics,
    has_running_statistics,
    image_l2,
    registered_mean,
)
from tests.attacks.test_priors import SHAPE, noise, victim


@pytest.mark.parametrize("prior", [image_l2, batch_norm_statistics(victim("resnet20"))])
def test_the_gradient_of_a_prior_is_its_slope(prior):
    images, direction = noise(2), noise(2, 1)
    _, gradient = prior(images)
    length = 1e-6
    slope = (prior(images + length * direction)[0] - prior(images - length * direction)[0]) / (2 * length)
    assert slope.item() == pytest.approx((gradient * direction).sum().item(), rel=1e-4)


def test_the_image_norm_is_the_mean_over_images():
    images = torch.zeros(2, 1, 2, 2)
    images[0, 0, 0], images[1] = torch.tensor([3.0, 4.0]), 1.0
    assert image_l2(images)[0].item() == pytest.approx((5 + 2) / 2)


def test_batch_norm_statistics_are_zero_where_the_images_have_them():
    v, images = victim("resnet20"), noise(4)
    seen: dict[str, Tensor] = {}
    hooks = [
        part.register_forward_pre_hook(lambda _, x, name=name: seen.__setitem__(name, x[0].detach()))
        for name, part in v.module.named_modules()
        if isinstance(part, nn.BatchNorm2d)
    ]
    v.outputs(images)
    for hook in hooks:
        hook.remove()
    first = next(iter(seen))
    # the statistics of deeper layers depend on those before, so only the first layer's can be set at once
    v.constants[f"{first}.running_mean"] = seen[first].mean(dim=(0, 2, 3))
    v.constants[f"{first}.running_var"] = seen[first].var(dim=(0, 2, 3), correction=0)
    expected = sum(
        (x.mean(dim=(0, 2, 3)) - v.constants[f"{n}.running_mean"]).norm()
        + (x.var(dim=(0, 2, 3), correction=0) - v.constants[f"{n}.running_var"]).norm()
        for n, x in _inputs(v, images).items()
    )
    assert batch_norm_statistics(v)(images)[0].item() == pytest.approx(float(expected), rel=1e-9)


def _inputs(v: Victim, images: Tensor) -> dict[str, Tensor]:
    seen: dict[str, Tensor] = {}
    parts = {n: p for n, p in v.module.named_modules() if isinstance(p, nn.BatchNorm2d)}
    hooks = [
        p.register_forward_pre_hook(lambda _, x, n=n: seen.__setitem__(n, x[0].detach())) for n, p in parts.items()
    ]
    v.outputs(images)
    for hook in hooks:
        hook.remove()
    return seen


def test_untrained_networks_have_no_running_statistics_worth_the_name():
    model = build_model("resnet20", input_shape=SHAPE, outputs=5)
    fresh = Victim(model, nn.functional.cross_entropy, dict(model.named_parameters()), dict(model.named_buffers()))
    assert not has_running_statistics(fresh)
    assert has_running_statistics(victim("resnet20"))
    assert not has_running_statistics(victim("lenet"))


# Distances ----------------------------------------------------------------------------------------------------------


def _blob(row: float, column: float) -> Tensor:
    y, x = torch.meshgrid(torch.arange(32.0), torch.arange(32.0), indexing="ij")
    spot = torch.exp(-((y - row) ** 2 + (x - column) ** 2) / 12) + 0.5 * torch.exp(
        -((y - row - 6) ** 2 + (x - column) ** 2) / 4
    )
    return spot.expand(3, 32, 32)


@pytest.mark.parametrize("how", ["translation", "flow"])
def test_registration_sharpens_the_mean_of_shifted_images(how):
    centre = _blob(14, 16)
    group = torch.stack([_blob(14 + dy, 16 + dx) for dy, dx in [(-2, 0), (2, 0), (0, 2), (0, -2), (0, 0)]])
    blurred = (registered_mean(group, "none") - centre).square().mean()
    aligned = (registered_mean(group, how) - centre).square().mean()
    assert aligned < 0.5 * blurred


@pytest.mark.parametrize("how", ["none", "translation", "flow"])
def test_a_group_of_one_image_is_its_own_mean(how):
    image = _blob(14, 16)
    assert registered_mean(image[None], how).equal(image)
    assert torch.allclose(registered_mean(torch.stack([image, image]), how), image, atol=1e-5)


# The group ----------------------------------------------------------------------------------------------------------

ALONE = {"total_variation": 0.0, "image_norm": 0.0, "batch_norm": 0.0, "noise": 0.0, "registration": "none"}


@pytest.fixture(scope="module")
def seen() -> Observation:
    values = {"data": {"name": "digits"}, "model": {"name": "lenet", "initialisation": "uniform"}}
    federation = {"name": "f", "clients": 1, "examples": 2, "batch_size": 2}
    made = resolve(scenario_from({**values, "federations": [federation], "attacks": ["gradinversion"]}))
    (only,) = record(made)
    return observe(only.transcript, made.scenario.threat).split()[0]


def group(seen: Observation, start: torch.Generator, **settings: Any) -> Any:
    return make_attack("gradinversion", {**ALONE, **settings})(seen, generator=start)


def layer_distance(seen: Observation, found: Any) -> float:
    """Yin et al. 2021, Eq. 3, by autograd: Σ over tensors of ‖∇L(image) − update‖."""
    model, (message,) = copy.deepcopy(seen.module), seen.messages
    model.load_state_dict(message.weights)
    loss = nn.functional.cross_entropy(model(seen.task_info.normalise(found.images)), found.labels)
    grads = torch.autograd.grad(loss, list(model.parameters()))
    pairs = zip(model.named_parameters(), grads, strict=True)
    return sum(float((g - message.update.tensors[name]).norm()) for (name, _), g in pairs)


@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2))])
def test_the_seed_of_least_distance_is_kept(seed, seen):
    start = generator(seed, "group")
    singles = [group(seen, start, iterations=30, group=1, consistency=0.0) for _ in range(3)]
    found = group(seen, generator(seed, "group"), iterations=30, group=3, consistency=0.0)
    distances = [layer_distance(seen, one) for one in singles]
    assert len(set(distances)) == 3
    assert found.images.equal(singles[distances.index(min(distances))].images)


@pytest.mark.slow
def test_seeds_are_pulled_to_their_mean(seen):
    """With next to nothing but the pull, two seeds meet half way between their first images."""
    settings = {"iterations": 200, "group": 2, "consistency": 1e6, "register_every": 1, "clamp": False}
    found = group(seen, generator(0, "pull"), **settings)
    start = generator(0, "pull")
    first, second = (torch.randn((2, 1, 8, 8), generator=start) for _ in range(2))
    expected = seen.task_info.denormalise((first + second) / 2).clamp(0, 1)
    torch.testing.assert_close(found.images, expected, atol=0.05, rtol=0)
    apart = (first - second).abs() > 1
    assert ((seen.task_info.denormalise(first).clamp(0, 1) - expected).abs() > 0.1)[apart].any()
