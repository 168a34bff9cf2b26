"""The formulas of gradient inversion against closed forms, slow loops and independent implementations."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fedaudit.attacks.inversion.engines.reference import one_gradient, reference, unrolled
from fedaudit.attacks.inversion.objectives import (
    flatten,
    layer_weights,
    shape_values,
    squared_l2,
    weighted_cosine,
    zero_modifier,
)
from fedaudit.attacks.inversion.priors import total_variation
from fedaudit.attacks.victim import Victim, one_batch_gradient
from fedaudit.models import build_model, initialise, layer_groups, set_training_mode
from fedaudit.simulation.local_training import gradient, train
from fedaudit.task.training import TrainingConfig
from fedaudit.transcript.update import Update
from fedaudit.utils.seeds import generator

SHAPE = (3, 12, 12)
SHAPES: list[str] = ["linear", "logarithmic", "exponential"]


def victim(name: str = "convnet-small", batch_norm: str = "eval", width: int | None = None) -> Victim:
    model = build_model(name, input_shape=SHAPE, outputs=5, width=width).double()
    initialise(model, "default", generator(1, "model"))
    model.double()
    set_training_mode(model, batch_norm)  # type: ignore[arg-type]
    parameters = {n: p.detach().clone() for n, p in model.named_parameters()}
    constants = {n: b.clone() for n, b in model.named_buffers()}
    return Victim(model, nn.functional.cross_entropy, parameters, constants)


def examples(count: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    start = generator(seed, "examples")
    images = torch.randn((count, *SHAPE), generator=start, dtype=torch.float64)
    return images, torch.randint(5, (count,), generator=start)


# Layer weights ------------------------------------------------------------------------------------------------------


@given(shape=st.sampled_from(SHAPES), end=st.floats(0.01, 1000), count=st.integers(2, 1000))
def test_every_shape_passes_through_both_ends_and_is_monotonic(shape, end, count):
    values = shape_values(shape, end, count)
    assert values[0] == pytest.approx(1)
    assert values[-1] == pytest.approx(end)
    assert values == sorted(values, reverse=end < 1)


@given(end=st.floats(0.01, 1000), count=st.integers(2, 100), data=st.data())
def test_the_linear_shape_is_equation_7(end, count, data):
    i = data.draw(st.integers(1, count))
    assert shape_values("linear", end, count)[i - 1] == pytest.approx(1 + (end - 1) / (count - 1) * (i - 1))


@pytest.mark.parametrize("count", [3, 21, 50])
def test_logarithmic_is_concave_and_exponential_convex(count):
    signs: dict[str, int] = {"logarithmic": -1, "exponential": 1}
    for shape, sign in signs.items():
        values = torch.tensor(shape_values(shape, 2.0, count))
        assert (sign * values.diff().diff() >= -1e-6).all(), shape


@given(zeros=st.integers(0, 50), others=st.integers(1, 50))
def test_the_relu_modifier_is_one_over_the_share_that_is_not_zero(zeros, others):
    tensor = torch.cat([torch.zeros(zeros), torch.ones(others)])
    assert zero_modifier(tensor) == pytest.approx((zeros + others) / others)


def test_a_gradient_of_nothing_but_zeros_has_a_finite_modifier():
    assert zero_modifier(torch.zeros(3)) == 1


def test_weights_of_resnet20_4_are_equation_8():
    model = build_model("resnet20-4", input_shape=(3, 32, 32), outputs=10)
    layers = layer_groups(model, torch.zeros(1, 3, 32, 32))
    grads = {n: torch.ones_like(p) for n, p in model.named_parameters()}
    convolutions = [layer for layer in layers if layer.kind == "conv"]
    grads[convolutions[4].parameters[0]].flatten()[: grads[convolutions[4].parameters[0]].numel() // 4] = 0
    weights = layer_weights(layers, grads, end=50)
    line = [1 + 49 / 20 * i for i in range(21)]
    expected = [value * (4 / 3 if i == 4 else 1) for i, value in enumerate(line)]
    assert [weights[c.parameters[0]] for c in convolutions] == pytest.approx(expected)
    assert weights["fc.weight"] == weights["fc.bias"] == pytest.approx(sum(line) / 21)
    first_norm = next(layer for layer in layers if layer.kind == "norm")
    assert {weights[p] for p in first_norm.parameters} == {expected[0]}
    assert layer_weights(layers, grads, end=50, others="zero")[first_norm.parameters[0]] == 0
    assert set(layer_weights(layers, grads, end=1, relu_modifier=False).values()) == {1.0}


# Distances ----------------------------------------------------------------------------------------------------------

sizes = st.lists(st.integers(1, 6), min_size=1, max_size=5)


@given(sizes=sizes, seed=st.integers(0, 10_000))
def test_the_weighted_cosine_is_equation_6_written_as_a_loop(sizes, seed):
    start = generator(seed, "cosine")
    a, b = ([torch.randn(n, generator=start, dtype=torch.float64) for n in sizes] for _ in range(2))
    alphas = (torch.rand(len(sizes), generator=start) + 0.1).tolist()
    dot = norm_a = norm_b = 0.0
    for i, alpha in enumerate(alphas):
        for x, y in zip(a[i].tolist(), b[i].tolist(), strict=True):
            dot += alpha * x * y
            norm_a += alpha * x * x
            norm_b += alpha * y * y
    expected = 1 - dot / math.sqrt(norm_a) / math.sqrt(norm_b)
    assert weighted_cosine(b, alphas).value(flatten(a)).item() == pytest.approx(expected, abs=1e-9)


@given(sizes=sizes, seed=st.integers(0, 10_000), scale=st.floats(1e-3, 1e3))
def test_the_cosine_ignores_scale_and_the_squared_distance_does_not(sizes, seed, scale):
    start = generator(seed, "scale")
    a = [torch.randn(n, generator=start, dtype=torch.float64) for n in sizes]
    ones = [1.0] * len(sizes)
    assert weighted_cosine(a, ones).value(scale * flatten(a)).item() == pytest.approx(0, abs=1e-9)
    squares = sum(t.square().sum().item() for t in a)
    expected = (scale - 1) ** 2 * squares
    assert squared_l2(a, ones).value(scale * flatten(a)).item() == pytest.approx(expected, rel=1e-6, abs=1e-12)


def test_a_weight_of_zero_leaves_a_tensor_out():
    target = [torch.ones(3), torch.ones(2)]
    dummy = [torch.ones(3), torch.full((2,), 1e6)]
    assert weighted_cosine(target, [1.0, 0.0]).value(flatten(dummy)).item() == pytest.approx(0, abs=1e-6)
    assert squared_l2(target, [1.0, 0.0]).value(flatten(dummy)).item() == 0


def test_total_variation_is_the_mean_absolute_difference_of_neighbours():
    image = torch.tensor([[[[0.0, 1.0], [3.0, 7.0]]]])
    assert total_variation(image).item() == pytest.approx((3 + 6) / 2 + (1 + 4) / 2)


# Steps --------------------------------------------------------------------------------------------------------------


def test_the_reference_step_is_the_derivative_of_the_objective():
    v = victim("lenet")
    images, labels = examples(2)
    other, _ = examples(2, seed=5)
    target = gradient(v.module, v.loss, (images, labels))
    distance = weighted_cosine(list(target.values()), [1.0] * len(target))
    step = reference(v, labels, one_gradient(2), distance)
    value, grad = step(other)
    direction = torch.randn(other.shape, generator=generator(0, "direction"), dtype=torch.float64)
    eps = 1e-5
    numeric = (step(other + eps * direction)[0] - step(other - eps * direction)[0]) / (2 * eps)
    assert value > 1e-6
    assert (grad * direction).sum().item() == pytest.approx(numeric.item(), rel=1e-4)
    assert step(images)[0].item() == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("batch_norm", ["eval", "train"])
def test_a_step_leaves_the_model_alone(batch_norm):
    v = victim(batch_norm=batch_norm)
    images, labels = examples(2)
    before = {n: t.clone() for n, t in v.module.state_dict().items()}
    constants = {n: t.clone() for n, t in v.constants.items()}
    target = list(gradient(v.module, v.loss, (images, labels)).values())
    v.module.load_state_dict(before)
    reference(v, labels, one_gradient(2), weighted_cosine(target, [1.0] * len(target)))(images)
    assert all(t.equal(before[n]) for n, t in v.module.state_dict().items())
    assert all(t.equal(constants[n]) for n, t in v.constants.items())


@settings(deadline=None, max_examples=12)
@given(
    steps=st.integers(1, 3),
    batch=st.integers(1, 2),
    momentum=st.sampled_from([0.0, 0.9]),
    decay=st.sampled_from([0.0, 1e-2]),
    proximal=st.sampled_from([0.0, 0.5]),
    name=st.sampled_from(["lenet", "convnet-small"]),
)
def test_unrolled_simulation_is_the_real_local_training(steps, batch, momentum, decay, proximal, name):
    v = victim(name, width=4)
    images, labels = examples(steps * batch)
    batches = list(zip(images.split(batch), labels.split(batch), strict=True))
    training = TrainingConfig(0.05, steps, (batch,) * steps, momentum, decay, proximal)
    start = {n: p.clone().requires_grad_() for n, p in v.parameters.items()}
    end = unrolled(v, start, images.split(batch), labels.split(batch), training)
    train(v.module, v.loss, batches, learning_rate=0.05, momentum=momentum, weight_decay=decay, proximal_mu=proximal)
    for d, (n, p) in zip(end, v.module.named_parameters(), strict=True):
        torch.testing.assert_close(v.parameters[n] - d.detach(), p.detach(), msg=n)


def test_simulation_of_the_true_images_has_distance_zero_and_a_true_gradient():
    v = victim("lenet")
    images, labels = examples(4)
    training = TrainingConfig(0.1, 2, (2, 2))
    start = {n: p.clone().requires_grad_() for n, p in v.parameters.items()}
    delta = [d.detach() for d in unrolled(v, start, images.split(2), labels.split(2), training)]
    step = reference(v, labels, training, weighted_cosine(delta, [1.0] * len(delta)))
    assert step(images)[0].item() == pytest.approx(0, abs=1e-12)
    other, _ = examples(4, seed=9)
    direction = torch.randn(other.shape, generator=generator(0, "direction"), dtype=torch.float64)
    numeric = (step(other + 1e-5 * direction)[0] - step(other - 1e-5 * direction)[0]) / 2e-5
    assert (step(other)[1] * direction).sum().item() == pytest.approx(numeric.item(), rel=1e-4)


def test_one_batch_equals_the_true_gradient_at_one_local_step():
    v = victim()
    images, labels = examples(3)
    true = gradient(v.module, v.loss, (images, labels))
    start = {n: p.detach().clone() for n, p in v.module.named_parameters()}
    train(v.module, v.loss, [(images, labels)], learning_rate=0.25)
    delta = {n: p.detach() - start[n] for n, p in v.module.named_parameters()}
    update = Update(0, "weights", delta, 3, TrainingConfig(0.25, 1, (3,)))
    for n, g in one_batch_gradient(update).items():
        torch.testing.assert_close(g, true[n], msg=n)


def test_one_batch_approaches_the_gradient_of_all_batches_as_the_learning_rate_falls():
    images, labels = examples(4)
    errors = []
    for rate in (1e-1, 1e-3, 1e-5):
        v = victim()
        whole = gradient(v.module, v.loss, (images, labels))
        start = {n: p.detach().clone() for n, p in v.module.named_parameters()}
        train(v.module, v.loss, list(zip(images.split(1), labels.split(1), strict=True)), learning_rate=rate)
        delta = {n: p.detach() - start[n] for n, p in v.module.named_parameters()}
        g = one_batch_gradient(Update(0, "weights", delta, 4, TrainingConfig(rate, 4, (1,) * 4)))
        difference = sum((g[n] - whole[n]).square().sum().item() for n in g)
        errors.append(math.sqrt(difference / sum(t.square().sum().item() for t in whole.values())))
    assert errors[0] > 10 * errors[1] > 100 * errors[2]
    assert errors[2] < 1e-3


def test_without_training_facts_the_direction_is_kept():
    update = Update(0, "weights", {"w": torch.tensor([1.0, -2.0])}, 2, None)
    assert one_batch_gradient(update)["w"].tolist() == [-1.0, 2.0]
