"""What layers' gradients say of their inputs' span, and the prior that agic-plus makes of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.linalg import subspace_angles
from torch import Tensor, nn

from fedaudit.attacks import make_attack
from fedaudit.attacks.inversion import methods
from fedaudit.attacks.inversion.objectives import Objective
from fedaudit.attacks.inversion.priors import Subspace, in_subspaces, subspaces, telling
from fedaudit.attacks.inversion.template import prepare
from fedaudit.attacks.victim import Victim
from fedaudit.evaluation.image_metrics import mse, psnr_from_mse
from fedaudit.models import layer_groups
from fedaudit.pipeline.prepare import resolve
from fedaudit.pipeline.run import record
from fedaudit.scenario.scenario import scenario_from
from fedaudit.transcript.observation import Observation, observe
from fedaudit.transcript.update import ClientDefenceInfo
from fedaudit.utils.seeds import generator


def network(padding: str | int = 1, groups: int = 1) -> nn.Sequential:
    """Return a network whose second convolution has 4 patches an image of 72 numbers, and 32 filters."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1, stride=2), nn.ReLU(),
            nn.Conv2d(8, 32, 3, padding=padding, stride=1 if padding == "same" else 2, groups=groups), nn.ReLU(),
            nn.Flatten(), nn.LazyLinear(5),
        )  # fmt: skip


def opened(model: nn.Sequential, images: Tensor, noise: float = 0.0) -> tuple[Victim, Any, dict[str, Tensor]]:
    """Return the victim, its layers, and the gradient of the images."""
    model(images)
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    victim = Victim(model, nn.functional.cross_entropy, parameters, {})
    value = victim.loss(model(images), torch.arange(len(images)) % 5)
    found = torch.autograd.grad(value, list(model.parameters()))
    gradient = dict(zip(parameters, found, strict=True))
    for tensor in gradient.values():
        tensor.add_(noise * torch.randn(tensor.shape, generator=generator(1, "noise")))
    return victim, layer_groups(model, images), gradient


def pictures(count: int) -> Tensor:
    return torch.randn((count, 3, 8, 8), generator=generator(count, "pictures"))


@pytest.mark.parametrize("count", [1, 3, 6])
def test_the_patches_span_the_gradient_and_the_gradient_the_patches(count):
    """SciPy's principal angles between the two spans, from the patches that a loop cuts out, are zero."""
    model, images = network(), pictures(count)
    victim, layers, gradient = opened(model, images)
    known = subspaces(victim, layers, gradient, torch.zeros_like(images))
    inside = nn.functional.pad(model[1](model[0](images)), (1, 1, 1, 1)).detach()
    patches = [one[:, y : y + 3, x : x + 3].flatten() for one in inside for y in (0, 2) for x in (0, 2)]
    assert known["2"].basis is not None
    assert len(known["2"].basis) == 4 * count
    angles = subspace_angles(torch.stack(patches).numpy().T, known["2"].basis.numpy().T)
    assert np.abs(angles).max() < 2e-3
    assert known["2"].rows.square().sum().item() == pytest.approx(1)


def test_the_true_images_are_at_zero_and_others_are_not():
    images = pictures(2)
    victim, layers, gradient = opened(network(), images)
    prior = in_subspaces(victim, subspaces(victim, layers, gradient, images))
    at_truth, other = prior(images)[0].item(), prior(images + 0.3 * pictures(3)[:2])[0].item()
    assert at_truth < 1e-3
    assert other > 30 * at_truth
    constant = prior(torch.zeros_like(images))[0].item()  # all in the span of one patch is no way out
    assert constant > 0.5


@given(
    count=st.integers(1, 6),
    size=st.integers(7, 12),
    rank=st.integers(1, 5),
    based=st.booleans(),
    seed=st.integers(0, 99),
)
def test_value_and_gradient_are_those_of_the_formula(count, size, rank, based, seed):
    """Of a linear layer, whose patches are its inputs: the formula as it stands, by autograd in float64."""
    draw = generator(seed, "formula")
    a = torch.randn((count, size), dtype=torch.float64, generator=draw, requires_grad=True)
    rows = torch.randn((rank, size), dtype=torch.float64, generator=draw) / 9
    basis = torch.linalg.qr(torch.randn((size, rank), dtype=torch.float64, generator=draw))[0].T if based else None
    model = nn.Sequential(nn.Linear(size, 2, dtype=torch.float64))
    victim = Victim(model, nn.functional.cross_entropy, dict(model.state_dict()), {})
    value, slope = in_subspaces(victim, {"0": Subspace(model[0], rows, basis)})(a)
    ridge = 1e-4 * a.square().sum() / count
    inverse = torch.linalg.inv(a @ a.T + ridge * torch.eye(count, dtype=a.dtype))
    wanted = 1 - torch.trace(rows @ a.T @ inverse @ a @ rows.T)
    if basis is not None:
        wanted = wanted + 1 - (a @ basis.T).square().sum() / a.square().sum()
    assert value.item() == pytest.approx(wanted.item(), abs=1e-9)
    torch.testing.assert_close(slope, torch.autograd.grad(wanted, a)[0], rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("number", [0.0, float("nan")])
def test_patches_that_explain_nothing_end_no_attack(number):
    images = pictures(1).flatten(1)
    model = nn.Sequential(nn.Linear(images.shape[1], 4))
    victim = Victim(model, nn.functional.cross_entropy, dict(model.state_dict()), {})
    basis = torch.eye(images.shape[1])[:2]
    value, slope = in_subspaces(victim, {"0": Subspace(model[0], basis / 2**0.5, basis)})(
        torch.full_like(images, number)
    )
    assert value.item() == 2
    assert not slope.any()


def test_layers_that_say_nothing_are_left_out():
    images = pictures(1)
    victim, layers, gradient = opened(network(), images)
    assert set(subspaces(victim, layers, gradient, images)) == {"2", "5"}  # the first has 16 patches of 27 numbers
    del gradient["2.weight"]
    assert set(subspaces(victim, layers, gradient, images)) == {"5"}  # not sent
    gradient["5.weight"].zero_()
    assert not subspaces(victim, layers, gradient, images)
    for model in (network(padding="same"), network(groups=2)):
        victim, layers, gradient = opened(model, images)
        assert "2" not in subspaces(victim, layers, gradient, images)


def test_a_gradient_that_is_no_product_of_so_many_patches_says_nothing():
    images = pictures(1)
    for noise, said in ((1e-6, {"2", "5"}), (1.0, set())):
        victim, layers, gradient = opened(network(), images, noise)
        assert set(subspaces(victim, layers, gradient, images)) == said


def test_a_layer_that_is_called_twice_has_the_patches_of_both_calls():
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.last = nn.Linear(24, 24), nn.Linear(24, 5)

        def forward(self, x: Tensor) -> Tensor:
            found: Tensor = self.last(self.layer(self.layer(x.flatten(1)).tanh()).tanh())
            return found

    with torch.random.fork_rng():
        torch.manual_seed(0)
        model: Any = Twice()
    images = torch.randn((2, 3, 2, 4), generator=generator(0, "twice"))
    victim, layers, gradient = opened(model, images)
    known = subspaces(victim, layers, gradient, images)
    assert known["layer"].basis is not None
    assert len(known["layer"].basis) == 4
    assert in_subspaces(victim, known)(images)[0] < 1e-3


@pytest.mark.parametrize(
    ("based", "count", "names", "share"),
    [
        ("abc", 1, "abc", 1.0),
        ("ab", 1, "ab", 1.0),
        ("a", 1, "abc", 0.03),
        ("", 1, "abc", 0.03),
        ("abc", 2, "abc", 0.03),
    ],
)
def test_of_one_image_gradients_that_span_all_patches_count_fully_and_alone(based, count, names, share):
    layer, rows = nn.Linear(3, 2), torch.eye(3)
    known = {name: Subspace(layer, rows, rows if name in based else None) for name in "abc"}
    assert telling(known, count) == ({name: known[name] for name in names}, share)


def update_of(data: str, width: int, client_defence: dict[str, Any] | None = None) -> tuple[Tensor, Observation]:
    """Return an image and what an eavesdropper sees of its gradient, of a residual network."""
    settings = {
        "version": 1, "name": "s", "seed": 3, "data": {"name": data},
        "model": {"name": "resnet20", "width": width, "initialisation": "default", "batch_norm": "eval"},
        "federations": [{"name": "f", "algorithm": "fedsgd", "clients": 1, "examples": 1, "batch_size": 1}],
        "threat": {"knows_labels": True}, "attacks": [{"name": "agic-plus"}],
    } | ({"defences": {"client_defence": client_defence}} if client_defence else {})  # fmt: skip
    scenario = scenario_from(settings)
    (recorded,) = record(resolve(scenario))
    (observed,) = observe(recorded.transcript, scenario.threat).split("update")
    true: Tensor = next(iter(recorded.truth.inputs.values()))
    return true, observed


def attacked(observed: Observation, iterations: int, weight: float, start: int = 0) -> Tensor:
    attack = make_attack("agic-plus", {"iterations": iterations, "subspace": weight})
    finding: Any = attack(observed, generator=generator(start, "attack"))
    images: Tensor = finding.images
    return images


@pytest.mark.slow
@pytest.mark.parametrize("start", [0, 1])
def test_the_attack_comes_closer_with_as_many_iterations(start):
    true, observed = update_of("digits", 16)
    with_it, without = (
        psnr_from_mse(mse(attacked(observed, 100, weight, start), true)).item() for weight in (1.0, 0.0)
    )
    assert with_it > without + 3


DEFENCES: dict[str, dict[str, Any]] = {
    "top-k": {"ratio": 0.1},
    "sign": {},
    "dp": {"clip": 1.0, "noise": 1.0, "epsilon": None},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", [None, *DEFENCES])
def test_a_defence_that_leaves_no_subspace_leaves_the_rest_of_the_attack(name):
    """Numbers that weren't sent, only signs, or noise: the prior isn't there, as with a weight of zero."""
    _, observed = update_of("digits", 4, {"name": name, **DEFENCES[name]} if name else None)
    assert attacked(observed, 2, 1.0).equal(attacked(observed, 2, 0.0)) == bool(name)


def test_clipping_scales_an_update_and_takes_nothing_from_its_spans():
    _, observed = update_of("digits", 4)
    message, attack = observed.single(), methods.AGICPlus()
    held = {}
    for name, defence in (
        ("none", None),
        ("clipped", ClientDefenceInfo("c", clip=1.0)),
        ("odd", ClientDefenceInfo("odd")),
    ):
        update = replace(message.update, sanitised=defence)
        prepared = prepare(replace(observed, messages=(replace(message, update=update),)), "granted", "cpu")
        held[name] = attack.subspaces(prepared).keys()
    assert held["clipped"] == held["none"] > held["odd"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "plain"),
    [
        pytest.param({"iterations": 60}, 18, marks=pytest.mark.slow),  # two starts of 18
        pytest.param({"iterations": 60, "moving": 0.0}, 0, marks=pytest.mark.slow),  # one descent
        ({"iterations": 60, "starts": 1}, 18),  # whoever wants one start has one
        pytest.param(
            {"iterations": 60, "starts": 3, "start_iterations": 10}, 2 * 10, marks=pytest.mark.slow
        ),  # the first and the third
    ],
)
def test_where_it_may_lead_astray_every_other_start_goes_without_it(monkeypatch, settings, plain):
    """So narrow a network's gradients span few layers' patches; all evaluations but those of these starts have it."""
    calls = 0

    def counted(*told: Any) -> Objective:
        prior = in_subspaces(*told)

        def one_more(images: Tensor) -> tuple[Tensor, Tensor]:
            nonlocal calls
            calls += 1
            value, gradient = prior(images)
            return value, gradient

        return one_more

    monkeypatch.setattr(methods, "in_subspaces", counted)
    _, observed = update_of("digits", 1)
    found: Any = make_attack("agic-plus", settings)(observed, generator=generator(0, "attack"))
    assert found.iterations == found.trace.iterations[-1] == 60
    assert calls == 60 - plain + 1  # and the last images'
