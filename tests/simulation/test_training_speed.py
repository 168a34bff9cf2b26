"""The simulator's local training: SGD has the bits of torch's, and the fast arithmetic the same numbers to rounding."""

from __future__ import annotations

import shutil
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedaudit.models import MODELS, build_model, set_training_mode
from fedaudit.models.families import inputs_of
from fedaudit.simulation.arithmetic import fast_arithmetic
from fedaudit.simulation.local_training import train
from fedaudit.utils import native, winograd
from fedaudit.utils.seeds import generator
from tests.simulation.federation_cases import run

pytestmark = pytest.mark.usefixtures("native_code")
needs_compiler = pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler")


@pytest.fixture
def convolved(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Note the filters' shapes of every convolution that the native code takes."""
    seen: list[tuple[int, ...]] = []
    convolve = winograd.convolve

    def noting(x: Tensor, w: Tensor, padding: int) -> Tensor:
        seen.append(tuple(w.shape))
        return convolve(x, w, padding)

    monkeypatch.setattr(winograd, "convolve", noting)
    return seen


def examples(shape: tuple[int, ...], count: int) -> list[tuple[Tensor, Tensor]]:
    rng = generator(0, "speed")
    return [(torch.randn(4, *shape, generator=rng), torch.randint(3, (4,), generator=rng)) for _ in range(count)]


@pytest.mark.parametrize("settings", [{}, {"momentum": 0.5}, {"momentum": 0.9, "weight_decay": 0.01}])
def test_a_step_has_the_bits_of_torchs_sgd(settings: dict[str, Any]) -> None:
    ours, theirs = (build_model("lenet", input_shape=(1, 8, 8), outputs=3) for _ in range(2))
    unused = nn.Parameter(torch.ones(2))  # has no gradient: neither moves it, whatever the decay
    ours.register_parameter("unused", unused)
    batches = examples((1, 8, 8), 5)
    train(ours, nn.functional.cross_entropy, batches, learning_rate=0.1, **settings)
    optimiser = torch.optim.SGD(theirs.parameters(), lr=0.1, **settings)
    for inputs, targets in batches:
        optimiser.zero_grad()
        nn.functional.cross_entropy(theirs(inputs), targets).backward()
        optimiser.step()
    assert all(parameter.equal(ours.get_parameter(name)) for name, parameter in theirs.named_parameters())
    assert unused.equal(torch.ones(2))


def trained(model: nn.Module, batches: list[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    train(model, nn.functional.cross_entropy, batches, learning_rate=1e-3, momentum=0.5)
    return {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize(
    "name",
    [
        n
        for n in MODELS.names()
        if n not in ("linear", "resnet50", "resnet56", "densenet-121", "unet")
        and "coder" not in n
        and "dropout" not in n
        and "precode" not in n  # it draws noise
    ],
)
@pytest.mark.parametrize("mode", ["train", "eval"])
def test_fast_arithmetic_gives_the_same_numbers_to_rounding(name: str, mode: Any, convolved: list[Any]) -> None:
    width = 32 if name.startswith(("convnet", "resnet")) else None  # Winograd's takes multiples of 32 channels
    kinds = inputs_of(MODELS[name])
    shape = {"signal": (3, 64), "volume": (1, 8, 16, 16)}.get(kinds[0] if kinds else "", (3, 16, 16))
    plain, fast = (build_model(name, input_shape=shape, outputs=3, width=width) for _ in range(2))
    batches = examples(shape, 2)
    start = {n: v.clone() for n, v in plain.state_dict().items()}
    for model in (plain, fast):
        set_training_mode(model, mode)
    expected = trained(plain, batches)
    assert not convolved
    with fast_arithmetic(fast):
        got = trained(fast, batches)
    assert bool(convolved) == (width == 32 or name == "leaky-cnn")  # which has 64 and 128 channels
    assert all(p.is_contiguous() for p in fast.parameters())
    assert not any("_conv_forward" in vars(module) for module in fast.modules())
    moved = torch.cat([(expected[n] - start[n]).flatten() for n in expected if expected[n].is_floating_point()])
    apart = torch.cat([(expected[n] - got[n]).flatten() for n in expected if expected[n].is_floating_point()])
    assert apart.norm() < 2e-3 * moved.norm()


SPEC = {"algorithm": "fedavg", "clients": 2, "batch_size": 8, "local_steps": 2, "learning_rate": 0.01, "examples": 32}
MODEL = {"name": "convnet-small", "width": 32, "batch_norm": "train"}


def updates(spec: dict[str, Any], **rest: Any) -> Tensor:
    _, transcript, _ = run(SPEC | spec, **{"model": MODEL, **rest})
    sent = [update.tensors for update in transcript.rounds[0].updates]
    assert all(tensor.is_contiguous() for tensors in sent for tensor in tensors.values())
    return torch.cat([tensor.flatten() for tensors in sent for tensor in tensors.values()])


@needs_compiler
@pytest.mark.parametrize("more", [{}, {"algorithm": "fedsgd", "local_steps": None}, {"momentum": 0.5}])
def test_a_federation_sends_the_same_updates_to_rounding(more: dict[str, Any], convolved: list[Any]) -> None:
    plain = updates(more)
    assert not convolved
    fast = updates({**more, "arithmetic": "fast"})
    assert convolved
    assert not fast.equal(plain)
    assert (fast - plain).norm() < 2e-3 * plain.norm()


@needs_compiler
def test_where_a_defence_changes_the_training_it_is_torchs() -> None:
    private = {"client_defence": {"name": "dp", "level": "sample", "clip": 1.0, "noise": 0.1, "epsilon": None}}
    rest = {"model": MODEL | {"batch_norm": "eval"}, "defences": private}
    assert updates({"arithmetic": "fast"}, **rest).equal(updates({}, **rest))


class Viewed(nn.Module):
    """A model with a part that takes nothing but the usual memory order."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 32, 3, padding=1)
        self.fc = nn.Linear(32 * 64, 10)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        logits: Tensor = self.fc(y.view(len(y), -1))
        return logits


class Strided(nn.Module):
    """A model with a convolution whose gradient oneDNN computes wrongly channels last."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 32, 3, padding=1)
        self.narrow = nn.Sequential(nn.Conv2d(32, 4, 1), nn.Conv2d(4, 8, 1, stride=2))
        self.fc = nn.Linear(8 * 16, 10)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.fc(self.narrow(self.conv(x)).flatten(1))
        return logits


@pytest.mark.parametrize("kind", [Viewed, Strided])
def test_a_model_that_needs_the_usual_order_is_trained_as_it_is(kind: type[nn.Module]) -> None:
    rest = {"own": {"model": kind()}}
    assert updates({"arithmetic": "fast"}, **rest).equal(updates({}, **rest))


def test_without_native_code_there_are_torchs_convolutions(monkeypatch, tmp_path, convolved: list[Any]) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    native.kernels.cache_clear()
    try:
        plain, fast = updates({}), updates({"arithmetic": "fast"})
    finally:
        native.kernels.cache_clear()
    assert not convolved
    assert (fast - plain).norm() < 2e-3 * plain.norm()
