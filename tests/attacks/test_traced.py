"""Passes that are traced once: victims share them where, and only where, these are the same function of parameters."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

from fedaudit.attacks.inversion.engines import first_order as passes
from fedaudit.attacks.inversion.engines.first_order import eager, traced
from fedaudit.attacks.inversion.engines.reference import one_gradient, reference
from fedaudit.attacks.inversion.objectives import Distance
from fedaudit.attacks.victim import Victim
from fedaudit.utils.channels_last import is_miscomputed
from fedaudit.utils.seeds import generator


class Net(nn.Module):
    """A network with whatever may tell two of them apart."""

    def __init__(self, slope: float = 0.1, seed: int = 0) -> None:
        super().__init__()
        self.first, self.normal, self.last = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Linear(144, 3)
        self.slope = slope
        self.eval()
        for p in self.parameters():
            p.data = torch.randn(p.shape, generator=generator(seed, "p", *p.shape)) / 4

    def forward(self, x: Tensor) -> Tensor:
        return torch.as_tensor(self.last(F.leaky_relu(self.normal(self.first(x)), self.slope).flatten(1)))


def victim_of(module: nn.Module, frozen: str = "") -> Victim:
    parameters = {n: p.detach() for n, p in module.named_parameters() if n != frozen}
    others = {n: t.detach() for n, t in module.state_dict().items() if n not in parameters}
    return Victim(module, F.cross_entropy, parameters, others)


def in_training(module: Net) -> Net:
    module.normal.train()
    return module


def with_statistics(module: Net, mean: float) -> Net:
    module.normal.running_mean = torch.full((4,), mean)
    return module


def results(
    run_pass: Callable[..., tuple[list[Tensor], Tensor, object]], victim: Victim, labels: Tensor
) -> list[Tensor]:
    images = torch.randn((2, 1, 8, 8), generator=generator(0, "images"))
    own, on_images, pattern = run_pass(list(victim.parameters.values()), images, labels)
    _, held, _ = run_pass([p + 1e-3 for p in victim.parameters.values()], images, labels, pattern, weights=False)
    return [*own, on_images, held]


@pytest.fixture
def tracings(monkeypatch: pytest.MonkeyPatch) -> Mock:
    monkeypatch.setattr(passes, "_TRACED", OrderedDict())
    monkeypatch.setattr(passes, "make_fx", found := Mock(wraps=make_fx))
    return found


HARD, SOFT = torch.tensor([0, 2]), torch.tensor([[0.2, 0.3, 0.5], [1.0, 0.0, 0.0]])
SAME = {
    "the same": victim_of(Net()),
    "other parameters": victim_of(Net(seed=1)),
}
OTHER = {
    "another slope": (victim_of(Net(slope=0.3)), HARD),
    "BatchNorm in training mode": (victim_of(in_training(Net())), HARD),
    "other running statistics": (victim_of(with_statistics(Net(), 0.7)), HARD),
    "a frozen bias": (victim_of(Net(), "last.bias"), HARD),
    "another loss": (replace(victim_of(Net()), loss=lambda outputs, y: 2 * F.cross_entropy(outputs, y)), HARD),
    "soft labels": (victim_of(Net()), SOFT),
}


@pytest.mark.parametrize("name", SAME)
def test_victims_share_what_was_traced_whatever_their_parameters(tracings, name):
    results(traced(victim_of(Net()), []), victim_of(Net()), HARD)
    before = tracings.call_count
    assert before == 2  # the pass that records the pattern, and the one that holds it
    found = results(traced(SAME[name], []), SAME[name], HARD)
    assert tracings.call_count == before
    torch.testing.assert_close(found, results(eager(SAME[name]), SAME[name], HARD))


@pytest.mark.parametrize("name", OTHER)
def test_what_makes_another_function_is_traced_anew(tracings, name):
    victim, labels = OTHER[name]
    results(traced(victim_of(Net()), []), victim_of(Net()), HARD)
    found = results(traced(victim, []), victim, labels)
    assert tracings.call_count == 4
    torch.testing.assert_close(found, results(eager(victim), victim, labels))


def test_what_is_frozen_is_part_of_the_function(tracings):
    for seed in (0, 1):
        victim = victim_of(Net(seed=seed), "last.bias")
        torch.testing.assert_close(results(traced(victim, []), victim, HARD), results(eager(victim), victim, HARD))
    assert tracings.call_count == 4


def test_notes_on_what_was_traced_come_with_every_use_of_it(tracings):
    tracings.side_effect = RuntimeError("not this one")
    said: list[list[str]] = [[], []]
    for notes in said:
        results(traced(victim_of(Net()), notes), victim_of(Net()), HARD)
    assert said[0] == said[1]
    assert "run as written" in said[0][0]
    assert len(said[0]) == 1


def test_only_the_last_victims_are_kept(tracings):
    for slope in range(passes._MOST_VICTIMS + 3):
        traced(victim_of(Net(slope=float(slope))), [])
    assert len(passes._TRACED) == passes._MOST_VICTIMS


class Strided(nn.Module):
    """Two of a narrow ResNet's layers: a 1x1 convolution that strides over few channels, after one of 3x3."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.narrow = nn.Conv2d(1, 2, 3, padding=1), nn.Conv2d(2, 8, 1, stride=2)
        self.last = nn.Linear(8 * 16, 3)
        for p in self.parameters():
            p.data = torch.randn(p.shape, generator=generator(0, "p", *p.shape)) / 4

    def forward(self, x: Tensor) -> Tensor:
        return torch.as_tensor(self.last(self.narrow(self.first(x).relu()).flatten(1)))


@pytest.mark.parametrize("order", [torch.contiguous_format, torch.channels_last])
def test_a_convolution_that_onednn_miscomputes_channels_last_is_right(order):
    # where it isn't avoided its gradient is wrong, or the process ends
    victim = victim_of(Strided())
    parameters = list(victim.parameters.values())
    expected = victim_of(Strided().double())
    run_pass = traced(victim, [])
    for seed in range(20):
        images = torch.randn((8, 1, 8, 8), generator=generator(seed, "images")).to(memory_format=order)
        labels = torch.arange(8) % 3
        own, on_images, _ = run_pass(parameters, images, labels)
        exact = eager(expected)(list(expected.parameters.values()), images.double(), labels)
        torch.testing.assert_close([*own, on_images], [*exact[0], exact[1]], check_dtype=False)


@pytest.mark.parametrize("order", [torch.contiguous_format, torch.channels_last])
def test_double_backward_is_right_for_it_too(order):
    victim, exact = victim_of(Strided()), victim_of(Strided().double())
    labels = torch.arange(8) % 3
    distance = Distance(lambda vector: (vector - 1).square().mean(), Mock())
    steps = [reference(v, labels, one_gradient(8), distance) for v in (victim, exact)]
    for seed in range(20):
        images = torch.randn((8, 1, 8, 8), generator=generator(seed, "images")).to(memory_format=order)
        found, expected = steps[0](images), steps[1](images.double())
        torch.testing.assert_close(found, expected, check_dtype=False, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(
    ("filters", "stride", "wrong"),
    [
        ((8, 4, 1, 1), (2, 2), True),
        ((32, 15, 1, 1), (1, 2), True),
        ((32, 16, 1, 1), (2, 2), False),
        ((8, 4, 1, 1), (1, 1), False),
        ((8, 4, 3, 3), (2, 2), False),
        ((8, 4, 1, 3), (2, 2), False),
    ],
)
def test_which_convolutions_must_not_run_channels_last(filters, stride, wrong):
    assert is_miscomputed(filters, stride) is wrong
