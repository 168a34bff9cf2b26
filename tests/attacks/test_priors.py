"""Priors and distances: values by closed forms, gradients against autograd, registration against known shifts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fedaudit.attacks import make_attack
from fedaudit.attacks.inversion.engines.reference import one_gradient, reference
from fedaudit.attacks.inversion.objectives import Objective, flatten, layer_l2
from fedaudit.attacks.inversion.priors import (
    FADING,
    fading_smoothness,
    smoothness,
)
from fedaudit.attacks.inversion.reconstruct import make_step, reconstruct, relative_rate
from fedaudit.attacks.victim import Victim
from fedaudit.models import build_model, initialise, set_training_mode
from fedaudit.pipeline.prepare import resolve
from fedaudit.pipeline.run import record
from fedaudit.scenario.scenario import scenario_from
from fedaudit.transcript.observation import Observation, observe
from fedaudit.utils.seeds import generator
from fedaudit_catalogue.attacks.classics import label_regulariser, off_scale, outside_range

SHAPE = (3, 12, 12)
RANGE = (torch.full((1, 3, 1, 1), -1.0, dtype=torch.float64), torch.full((1, 3, 1, 1), 2.0, dtype=torch.float64))


def noise(count: int, seed: int = 0) -> Tensor:
    return torch.randn((count, *SHAPE), generator=generator(seed, "noise"), dtype=torch.float64)


def victim(name: str) -> Victim:
    model = build_model(name, input_shape=SHAPE, outputs=5)
    initialise(model, "default", generator(1, "model"))
    model.double()
    set_training_mode(model, "eval")
    constants = {n: b.clone() for n, b in model.named_buffers()}
    for n, b in constants.items():
        if n.endswith("running_mean"):
            b += torch.randn(b.shape, generator=generator(2, n), dtype=b.dtype)
    return Victim(
        model, nn.functional.cross_entropy, {n: p.detach().clone() for n, p in model.named_parameters()}, constants
    )


PRIORS: dict[str, Callable[[], Objective]] = {
    "total variation": lambda: smoothness,
    "clipping": lambda: outside_range(RANGE),
    "labels": lambda: label_regulariser(victim("lenet"), torch.tensor([1, 4])),
}


@pytest.mark.parametrize("name", PRIORS)
def test_the_gradient_of_a_prior_is_its_slope(name):
    prior, images = PRIORS[name](), noise(2)
    _, gradient = prior(images)
    direction = noise(2, 1)
    length = 1e-6
    slope = (prior(images + length * direction)[0] - prior(images - length * direction)[0]) / (2 * length)
    assert slope.item() == pytest.approx((gradient * direction).sum().item(), rel=1e-4)


def test_total_variation_fades_to_a_tenth():
    images, prior = noise(2), fading_smoothness(evaluations=4)
    value, slope = smoothness(images)
    found = [prior(images) for _ in range(6)]
    assert [float(own / value) for own, _ in found] == pytest.approx([FADING] * 6)
    strengths = [float(own.norm() / slope.norm()) for _, own in found]
    assert strengths == pytest.approx([FADING ** min(1, k / 4) for k in range(6)])


def test_clipping_is_zero_inside_and_scaling_where_the_range_is_filled():
    inside = noise(2).clamp(-1, 2)
    assert outside_range(RANGE)(inside)[0] == 0
    assert outside_range(RANGE)(inside + 4)[0] > 0
    filled = inside.clone()
    filled[:, 0, 0, 0], filled[:, 0, 0, 1] = -1.0, 2.0
    assert off_scale(RANGE)(filled)[0].item() == pytest.approx(0, abs=1e-20)
    flat, pull = off_scale(RANGE)(0.5 * filled)
    assert flat > 0
    assert (pull * (0.5 * filled - filled)).sum() > 0  # against the gradient towards the filled range


@settings(deadline=None, max_examples=20)
@given(seed=st.integers(0, 1000), weight=st.floats(0.1, 10))
def test_layer_l2_is_the_weighted_sum_of_the_tensors_distances(seed, weight):
    start = generator(seed, "layers")
    shapes = [(4, 3, 2, 2), (4,), (5, 4)]
    target = [torch.randn(s, generator=start, dtype=torch.float64) for s in shapes]
    tensors = [torch.randn(s, generator=start, dtype=torch.float64) for s in shapes]
    weights = [1.0, weight, 0.0]
    distance = layer_l2(target, weights)
    vector = flatten(tensors).requires_grad_()
    value, slope = distance.derivative(vector.detach())
    expected = sum(w * (a - b).norm() for w, a, b in zip(weights, tensors, target, strict=True))
    assert value.item() == pytest.approx(float(expected))
    (exact,) = torch.autograd.grad(distance.value(vector), vector)
    assert torch.allclose(slope, exact)


def test_soft_labels_give_the_gradient_on_images_and_logits():
    v, images = victim("lenet"), noise(2)
    logits = torch.randn(2, 5, generator=generator(3, "logits"), dtype=torch.float64)
    target = [torch.zeros_like(p) for p in v.parameters.values()]
    step = reference(v, None, one_gradient(2), layer_l2(target, [1.0] * len(target)))
    _, on_images, on_logits = step(images, logits)
    length = 1e-6
    for place, gradient in enumerate((on_images, on_logits)):
        direction = torch.randn(gradient.shape, generator=generator(place, "d"), dtype=torch.float64)
        values = []
        for sign in (1, -1):
            moved = [images, logits]
            moved[place] = moved[place] + sign * length * direction
            values.append(step(*moved)[0])
        slope = (values[0] - values[1]) / (2 * length)
        assert slope.item() == pytest.approx((gradient * direction).sum().item(), rel=1e-4)


# Registration -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def seen() -> Observation:
    values = {"data": {"name": "digits"}, "model": {"name": "lenet", "initialisation": "uniform"}}
    federation = {"name": "f", "clients": 1, "examples": 2, "batch_size": 2}
    made = resolve(scenario_from({**values, "federations": [federation], "attacks": ["invg"]}))
    (only,) = record(made)
    return observe(only.transcript, made.scenario.threat).split()[0]


@pytest.mark.parametrize(("name", "settings"), [("invg", {}), ("invg-epochs", {"epochs": 1})])
def test_a_prior_is_minimised_beside_the_distance(name, settings, seen):
    attack = make_attack(name, {"iterations": 100, "total_variation": 1e3, **settings})
    found: Any = attack(seen, generator=generator(0, "smooth"))
    before, after = (np.abs(np.diff(x.numpy(), axis=-1)).mean() for x in found.trace.snapshots[[0, -1]])
    assert after < 0.2 * before


# Schedules ----------------------------------------------------------------------------------------------------------


def test_schedules_of_the_learning_rate():
    assert [relative_rate("steps", i, 80) for i in (0, 29, 30, 50, 70, 79)] == pytest.approx(
        [1, 1, 0.1, 0.01, 1e-3, 1e-3]
    )
    rates = [relative_rate("cosine", i, 1000) for i in range(1000)]
    assert rates[0] < 0.1 < max(rates) <= 1
    assert rates[60:] == sorted(rates[60:], reverse=True)
    assert rates[-1] < 1e-4
    assert [relative_rate("linear", i, 4) for i in range(4)] == [1, 0.75, 0.5, 0.25]
    assert {relative_rate("constant", i, 9) for i in range(9)} == {1.0}


@pytest.mark.parametrize("share", [0.25, 0.6])
def test_the_mean_of_the_last_iterates_is_the_mean_of_what_descent_walks_through(share):
    def objective(*variables: Tensor) -> tuple[Tensor, ...]:
        return torch.stack([v.square().sum() for v in variables]).sum() / 2, *(v.clone() for v in variables)

    start = [noise(2), noise(1, 1)]
    walked = [v.clone() for v in start]
    step, iterates = make_step(objective, walked, RANGE, generator(0, "none"), iterations=10, learning_rate=0.3), []
    for _ in range(10):
        step()
        iterates.append([v.clone() for v in walked])
    last = iterates[-round(share * 10) :]
    ended, trace = reconstruct(
        objective, start, RANGE, generator(0, "none"), iterations=10, learning_rate=0.3, average=share
    )
    for found, several in zip(ended, zip(*last, strict=True), strict=True):
        torch.testing.assert_close(found, torch.stack(several).mean(dim=0))
    assert trace.snapshots[-1].equal(ended[0])
    assert trace.objective[-1] == pytest.approx(float(objective(*ended)[0]))
