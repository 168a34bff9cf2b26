"""The fast engine against the exact one: on every kind of activation, on users' own modules, through local training."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fedaudit.attacks import make_attack
from fedaudit.attacks.inversion.engines import first_order as passes
from fedaudit.attacks.inversion.engines.first_order import eager, first_order, traced
from fedaudit.attacks.inversion.engines.guarded import AGREEMENT, CHECK_EVERY, make_engine
from fedaudit.attacks.inversion.engines.reference import one_gradient, reference, unrolled
from fedaudit.attacks.inversion.objectives import DISTANCES, Distance, Objective, squared_l2, weighted_cosine
from fedaudit.attacks.inversion.priors import total_variation, total_variation_gradient
from fedaudit.attacks.victim import Victim
from fedaudit.models import build_model, initialise, set_training_mode
from fedaudit.task.training import TrainingConfig
from fedaudit.utils.errors import BadInput
from fedaudit.utils.seeds import generator
from tests.conftest import core

SHAPE = (3, 12, 12)


def victim_of(module: nn.Module, batch_norm: str = "eval") -> Victim:
    initialise(module, "default", generator(0, "model"))
    set_training_mode(module, batch_norm)  # type: ignore[arg-type]
    parameters = {n: p.detach().clone() for n, p in module.named_parameters()}
    return Victim(module, F.cross_entropy, parameters, {n: b.clone() for n, b in module.named_buffers()})


def images(count: int, seed: int = 0) -> Tensor:
    return torch.randn((count, *SHAPE), generator=generator(seed, "images"))


def target_of(victim: Victim, training: TrainingConfig) -> list[Tensor]:
    count = sum(training.batch_sizes)
    start = {n: p.clone().requires_grad_() for n, p in victim.parameters.items()}
    sizes = list(training.batch_sizes)
    delta = unrolled(victim, start, images(count, 7).split(sizes), (torch.arange(count) % 5).split(sizes), training)
    return [d.detach() for d in delta]


class Refusing(list[str]):
    """Notes of a model that must be traceable: any would be an error."""

    def append(self, note: str) -> None:
        pytest.fail(note)


PASSES: dict[str, Callable[[Victim], Callable[..., Any]]] = {
    "eager": eager,
    "traced": lambda victim: traced(victim, Refusing()),
}


def engine_and_notes(
    name: str, victim: Victim, training: TrainingConfig, distance: Distance, steps: int = 100
) -> tuple[Objective, list[str]]:
    """Return the engine for labels 0, 1, …, and the notes that it will fill."""
    notes: list[str] = []
    labels = torch.arange(sum(training.batch_sizes), device=next(iter(victim.parameters.values())).device)
    return make_engine(name, victim, labels, training, distance, steps, notes), notes


def agreement(victim: Victim, training: TrainingConfig, distance: Distance, way: str = "traced") -> tuple[float, float]:
    """Return the cosine of the two engines' gradients and the difference of their values, relative."""
    count = sum(training.batch_sizes)
    labels = torch.arange(count) % 5
    engine = first_order(victim, labels, training, distance, PASSES[way](victim))
    value, grad = engine(images(count))
    again_value, again_grad = engine(images(count))
    assert again_value.equal(value), "the second run of a traced pass differs from the first"
    assert again_grad.equal(grad)
    exact_value, exact = reference(victim, labels, training, distance)(images(count))
    assert exact.abs().max() > 0
    return F.cosine_similarity(grad.flatten(), exact.flatten(), dim=0).item(), (
        (value - exact_value) / exact_value
    ).item()


class Functional(nn.Module):
    """A network whose activations are function calls, in place and not."""

    def __init__(self, activation: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.second = nn.Conv2d(8, 8, 3, padding=1)
        self.head = nn.LazyLinear(5)
        self.activation = activation
        self(torch.zeros(1, *SHAPE))

    def forward(self, x: Tensor) -> Tensor:
        x = self.activation(self.first(x))
        return torch.as_tensor(self.head(self.activation(self.second(x)).flatten(1)))


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "relu in place": lambda x: F.relu(x, inplace=True),
    "relu_": torch.relu_,
    "method": lambda x: x.relu(),
    "leaky": lambda x: F.leaky_relu(x, 0.2),
    "leaky in place": lambda x: F.leaky_relu(x, 0.2, inplace=True),
    "relu6": lambda x: F.relu6(x * 20),
    "hardtanh": lambda x: F.hardtanh(x, -0.1, 0.1),
    "hardtanh in place": lambda x: nn.Hardtanh(-0.1, 0.1, inplace=True)(x),
    "clamp": lambda x: x.clamp(min=0.05),
    "clamp_": lambda x: x.clamp_(-0.1, 0.1),
    "abs": lambda x: x.abs(),
    "builtin abs": abs,
    "threshold": nn.Threshold(0.05, -0.3),
    "softshrink": nn.Softshrink(0.05),
    "hardshrink": nn.Hardshrink(0.05),
    "maximum": lambda x: torch.maximum(x, 0.3 * x.flip(1)),
    "minimum": lambda x: torch.minimum(x, x.flip(1)),
    "max of two": lambda x: torch.max(x, x.flip(1)),
    "max pool": lambda x: F.max_pool2d(x, 2, padding=1),
    "max pool module": nn.MaxPool2d(3, stride=2, ceil_mode=True),
    "adaptive max pool": nn.AdaptiveMaxPool2d(4),
    "max over channels": lambda x: x.max(dim=1, keepdim=True).values.expand(-1, 8, -1, -1),
    "amax": lambda x: x.amax(dim=1, keepdim=True).expand(-1, 8, -1, -1),
    "dropout off": lambda x: F.relu(F.dropout(x, 0.5, training=False)),
    "gelu": F.gelu,
    "sigmoid": torch.sigmoid,
    "silu": F.silu,
    "elu": F.elu,
}


@pytest.mark.slow
@pytest.mark.parametrize("way", PASSES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_first_order_agrees_with_double_backward_whatever_the_activation(activation, way):
    victim = victim_of(Functional(ACTIVATIONS[activation]))
    training = one_gradient(2)
    cosine, error = agreement(victim, training, weighted_cosine(target_of(victim, training), [1.0] * 6), way)
    assert cosine >= AGREEMENT
    assert abs(error) < 1e-3


class PReLU(Functional):
    def __init__(self) -> None:
        super().__init__(nn.Identity())
        self.activation = nn.PReLU(8)


def test_prelu_s_slope_is_a_parameter():
    victim = victim_of(Functional(nn.ReLU()))
    victim.module.activation = nn.PReLU(8)
    victim = Victim(
        victim.module, victim.loss, {n: p.detach().clone() for n, p in victim.module.named_parameters()}, {}
    )
    training = one_gradient(2)
    target = target_of(victim, training)
    assert agreement(victim, training, weighted_cosine(target, [1.0] * len(target)))[0] >= AGREEMENT


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", core(["lenet", "convnet-small", "convnet", "resnet20", "mlp", "resnet18"], "lenet", "convnet-small", "mlp")
)
@pytest.mark.parametrize("distance", DISTANCES)
def test_first_order_agrees_on_our_models(name, distance):
    width = {"convnet": 8, "resnet18": 8}.get(name)
    victim = victim_of(build_model(name, input_shape=SHAPE, outputs=5, width=width))
    training = one_gradient(2)
    target = target_of(victim, training)
    weights = [1.0 + i % 3 for i in range(len(target))]
    cosine, error = agreement(victim, training, DISTANCES[distance](target, weights))
    assert cosine >= AGREEMENT
    assert abs(error) < 1e-2


def test_first_order_agrees_with_batch_statistics():
    victim = victim_of(build_model("convnet-small", input_shape=SHAPE, outputs=5), "train")
    training = one_gradient(3)
    target = target_of(victim, training)
    before = {n: t.clone() for n, t in victim.constants.items()}
    assert agreement(victim, training, weighted_cosine(target, [1.0] * len(target)))[0] >= AGREEMENT
    assert all(t.equal(before[n]) for n, t in victim.constants.items())


@settings(deadline=None, max_examples=10)
@given(
    steps=st.integers(1, 4),
    batch=st.integers(1, 2),
    momentum=st.sampled_from([0.0, 0.9]),
    decay=st.sampled_from([0.0, 0.1]),
    proximal=st.sampled_from([0.0, 0.5]),
    rate=st.sampled_from([0.1, 1.0]),
)
@pytest.mark.slow
def test_first_order_agrees_through_local_training(steps, batch, momentum, decay, proximal, rate):
    victim = victim_of(build_model("convnet-small", input_shape=SHAPE, outputs=5, width=6))
    training = TrainingConfig(rate, steps, (batch,) * steps, momentum, decay, proximal)
    target = target_of(victim, training)
    cosine, error = agreement(victim, training, weighted_cosine(target, [1.0] * len(target)))
    assert cosine >= AGREEMENT
    assert abs(error) < 1e-3


@pytest.mark.parametrize("distance", [squared_l2, weighted_cosine])
@settings(deadline=None, max_examples=25)
@given(seed=st.integers(0, 1000), size=st.integers(1, 20))
def test_closed_form_derivatives_are_those_of_autograd(distance, seed, size):
    start = generator(seed, "derivative")
    target, vector = (torch.randn(size, generator=start, dtype=torch.float64) for _ in range(2))
    measure = distance([target[: size // 2], target[size // 2 :]], [0.5, 3.0])
    leaf = vector.clone().requires_grad_()
    value = measure.value(leaf)
    (expected,) = torch.autograd.grad(value, leaf)
    found, derivative = measure.derivative(vector)
    torch.testing.assert_close(found, value.detach())
    torch.testing.assert_close(derivative, expected, atol=1e-9, rtol=1e-6)


class Attention(nn.Module):
    """Fused attention has no second derivative at all: only first-order passes can attack it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(12, 16)
        self.qkv = nn.Linear(16, 48)
        self.head = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.embed(x.flatten(1, 2))).chunk(3, dim=-1)
        mixed = F.scaled_dot_product_attention(q.unsqueeze(1), k.unsqueeze(1), v.unsqueeze(1))
        return torch.as_tensor(self.head(mixed.squeeze(1).mean(dim=1)))


def test_a_transformer_is_attacked_and_checked():
    victim = victim_of(Attention())
    training = one_gradient(2)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        target = target_of(victim, training)
    distance = weighted_cosine(target, [1.0] * len(target))
    engine, notes = engine_and_notes("auto", victim, training, distance)
    value, grad = engine(images(2))
    assert torch.isfinite(grad).all()
    assert value > 0
    assert notes == []
    exact_value, exact_grad = engine_and_notes("reference", victim, training, distance)[0](images(2))
    assert exact_value.item() == pytest.approx(value.item(), rel=1e-3)
    assert F.cosine_similarity(exact_grad.flatten(), grad.flatten(), dim=0) >= AGREEMENT


@pytest.mark.parametrize("scale", [1e-12, 1e12])
def test_the_guard_compares_directions_at_any_scale(scale):
    victim = victim_of(build_model("convnet-small", input_shape=SHAPE, outputs=5))
    training = one_gradient(1)
    target = target_of(victim, training)
    engine, notes = engine_and_notes("auto", victim, training, squared_l2(target, [scale] * len(target)))
    engine(images(1))
    assert notes == []


def test_a_model_without_second_derivatives_is_attacked_unchecked():
    victim = victim_of(Functional(lambda x: F.hardsigmoid(x * 10)))
    distance = squared_l2([torch.zeros_like(p) for p in victim.parameters.values()], [1.0] * 6)
    engine, notes = engine_and_notes("auto", victim, one_gradient(1), distance)
    x = images(1)
    value, grad = engine(x)
    assert "unchecked" in notes[0]
    smaller, _ = engine(x - 0.05 * grad / grad.norm())
    assert smaller < value


class Rounding(nn.Module):
    """An activation that nobody can know: which way it goes depends on the parameters by a hash of their bits."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3 * 144, 5)

    def forward(self, x: Tensor) -> Tensor:
        return torch.as_tensor(self.fc(x.flatten(1)) * (1 + 10 * torch.frac(self.fc.weight.sum().detach() * 1e6)))


def test_a_module_that_the_fast_engine_gets_wrong_falls_back_and_says_so():
    victim = victim_of(Rounding())
    training = one_gradient(1)
    distance = squared_l2(target_of(victim, training), [1.0, 1.0])
    exact, _ = engine_and_notes("reference", victim, training, distance)
    engine, notes = engine_and_notes("auto", victim, training, distance)
    value, grad = engine(images(1))
    assert grad.equal(exact(images(1))[1])
    assert value.equal(exact(images(1))[0])
    assert "reference from iteration 0" in notes[0]
    assert engine(images(1))[1].equal(grad)


class RoundingLate(Rounding):
    """The same, but for bright images only."""

    def forward(self, x: Tensor) -> Tensor:
        factor = 10 * torch.frac(self.fc.weight.sum().detach() * 1e6) * (x.detach().mean() > 0.5)
        return torch.as_tensor(self.fc(x.flatten(1)) * (1 + factor))


def test_the_fast_engine_is_caught_where_it_goes_wrong_later():
    victim = victim_of(RoundingLate())
    training = one_gradient(1)
    distance = squared_l2(target_of(victim, training), [1.0, 1.0])
    exact, _ = engine_and_notes("reference", victim, training, distance)
    engine, notes = engine_and_notes("auto", victim, training, distance)
    for _ in range(CHECK_EVERY):
        engine(images(1))
    assert notes == []
    value, grad = engine(images(1) + 1)
    assert f"reference from iteration {CHECK_EVERY} on" in notes[0]
    exact_value, exact_grad = exact(images(1) + 1)
    assert value.equal(exact_value)
    assert grad.equal(exact_grad)


class Reshaping(nn.Module):
    """Needs the usual memory order, as most hand-written models do: view() refuses channels last."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.fc = nn.Linear(400, 5)

    def forward(self, x: Tensor) -> Tensor:
        penalty = self.conv.weight.view(-1).square().sum()
        return torch.as_tensor(self.fc(F.relu(self.conv(x)).view(len(x), -1)) * (1 + penalty))


@pytest.mark.parametrize("way", PASSES)
def test_a_model_that_needs_the_usual_memory_order_gets_it(way):
    victim = victim_of(Reshaping())
    training = one_gradient(2)
    assert agreement(victim, training, weighted_cosine(target_of(victim, training), [1.0] * 4), way)[0] >= AGREEMENT


class Deciding(Functional):
    """Decides by a value: no list of operations stands for it."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x if x.mean() > 0 else -x)


def test_a_model_that_cannot_be_traced_is_run_as_written_and_says_so():
    victim = victim_of(Deciding(F.relu))
    training = one_gradient(2)
    distance = weighted_cosine(target_of(victim, training), [1.0] * 6)
    engine, notes = engine_and_notes("auto", victim, training, distance)
    exact, _ = engine_and_notes("reference", victim, training, distance)
    for x in (images(2), -images(2)):
        assert F.cosine_similarity(engine(x)[1].flatten(), exact(x)[1].flatten(), dim=0) >= AGREEMENT
    assert len(notes) == 1
    assert "run as written" in notes[0]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["first-order", "compiled"])
def test_batches_of_different_sizes_are_each_traced(name, monkeypatch):
    monkeypatch.setattr(passes, "_TRACED", OrderedDict())
    monkeypatch.setattr("torch._inductor.compile", lambda graph, _inputs, options: graph)
    victim = victim_of(build_model("convnet-small", input_shape=SHAPE, outputs=5))
    training = TrainingConfig(0.1, 3, (2, 2, 1))
    distance = weighted_cosine(target_of(victim, training), [1.0] * len(victim.parameters))
    (engine, notes), (exact, _) = (engine_and_notes(n, victim, training, distance) for n in (name, "reference"))
    assert F.cosine_similarity(engine(images(5))[1].flatten(), exact(images(5))[1].flatten(), dim=0) >= AGREEMENT
    assert notes == []


def test_without_a_compiler_the_compiled_engine_is_the_traced_one_and_says_so(monkeypatch):
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("No working C++ compiler found\nmore")

    monkeypatch.setattr(passes, "_TRACED", OrderedDict())
    monkeypatch.setattr("torch._inductor.compile", broken)
    victim = victim_of(build_model("lenet", input_shape=SHAPE, outputs=5))
    training = one_gradient(1)
    distance = squared_l2(target_of(victim, training), [1.0] * len(victim.parameters))
    engine, notes = engine_and_notes("auto", victim, training, distance, 10_000)
    uncompiled, _ = engine_and_notes("first-order", victim, training, distance, 10_000)
    assert engine(images(1))[1].equal(uncompiled(images(1))[1])
    assert notes == ["engine: not compiled, which is slower (RuntimeError: No working C++ compiler found)"]


@pytest.mark.slow
@pytest.mark.parametrize("batches", [(2,), pytest.param((1, 1), marks=pytest.mark.long)])
def test_the_compiled_engine_agrees(batches):
    victim = victim_of(build_model("convnet-small", input_shape=SHAPE, outputs=5))
    training = TrainingConfig(0.1, len(batches), batches)
    distance = weighted_cosine(target_of(victim, training), [1.0] * len(victim.parameters))
    engine, notes = engine_and_notes("compiled", victim, training, distance)
    exact, _ = engine_and_notes("reference", victim, training, distance)
    for _ in range(2):
        cosine = F.cosine_similarity(engine(images(2))[1].flatten(), exact(images(2))[1].flatten(), dim=0)
        assert cosine >= AGREEMENT
    assert notes == []


def test_the_name_of_old_is_accepted():
    attack = make_attack("invg", {"engine": "frozen"})
    assert attack.settings()["engine"] == "first-order"
    with pytest.raises(BadInput, match="engine"):
        make_attack("invg", {"engine": "melted"})


def test_total_variation_s_gradient_is_that_of_autograd():
    x = images(2).requires_grad_()
    (expected,) = torch.autograd.grad(total_variation(x), x)
    torch.testing.assert_close(total_variation_gradient(x.detach()), expected)
