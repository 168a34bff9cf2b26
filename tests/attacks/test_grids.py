"""Attacks on signals, images and volumes: what is summed over one, two and three axes, and what is recovered there."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from scipy.linalg import subspace_angles
from torch import Tensor, nn

from fedaudit.attacks import make_attack
from fedaudit.attacks.inversion.engines.first_order import eager, first_order
from fedaudit.attacks.inversion.engines.reference import one_gradient, reference
from fedaudit.attacks.inversion.objectives import weighted_cosine
from fedaudit.attacks.inversion.priors import (
    in_subspaces,
    looks_like_photographs,
    patches_seen,
    subspaces,
    total_variation,
    total_variation_gradient,
    trained_denoiser,
)
from fedaudit.attacks.inversion.reconstruct import affordable, moves, with_move
from fedaudit.attacks.victim import Victim
from fedaudit.data import Dataset
from fedaudit.models import build_model, layer_groups, set_training_mode
from fedaudit.pipeline.prepare import resolve
from fedaudit.pipeline.run import record
from fedaudit.scenario.scenario import scenario_from
from fedaudit.transcript.observation import Observation, observe
from fedaudit.utils.errors import NotApplicable
from fedaudit.utils.seeds import generator
from fedaudit_catalogue.attacks.classics import off_scale, outside_range
from fedaudit_catalogue.attacks.gradinversion import image_l2

GRIDS = {"signal": (3, 11), "image": (2, 5, 7), "volume": (2, 4, 5, 6)}
CONVOLUTIONS: dict[int, Any] = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}


def drawn(count: int, shape: tuple[int, ...], seed: int = 0) -> Tensor:
    return torch.randn((count, *shape), generator=generator(seed, "grids"), dtype=torch.float64)


# --- priors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [*GRIDS.values(), (1, 1, 6), (1, 4, 1, 3), (2, 1, 1, 1)])
def test_total_variation_is_the_mean_over_neighbours_summed_over_axes(shape: tuple[int, ...]) -> None:
    """By a loop in NumPy over pairs of neighbours; the gradient by autograd of the value."""
    x = drawn(2, shape).requires_grad_()
    array, wanted = x.detach().numpy(), 0.0
    for axis in range(2, array.ndim):
        pairs = [
            abs(array[place] - array[(*place[:axis], place[axis] - 1, *place[axis + 1 :])])
            for place in itertools.product(*map(range, array.shape))
            if place[axis]
        ]
        wanted += float(np.mean(pairs)) if pairs else 0.0
    value = total_variation(x)
    assert value.item() == pytest.approx(wanted, rel=1e-12)
    if value.requires_grad:
        torch.testing.assert_close(total_variation_gradient(x.detach()), torch.autograd.grad(value, x)[0])
    else:
        assert not total_variation_gradient(x.detach()).any()


def test_total_variation_of_images_has_the_bits_that_it_always_had() -> None:
    images = drawn(3, (3, 17, 13), 5).float()
    down, right = images[..., 1:, :] - images[..., :-1, :], images[..., 1:] - images[..., :-1]
    assert total_variation(images).equal(down.abs().mean() + right.abs().mean())
    slope = torch.zeros_like(images)
    slope[..., 1:, :] += down.sign() / down.numel()
    slope[..., :-1, :] -= down.sign() / down.numel()
    slope[..., 1:] += right.sign() / right.numel()
    slope[..., :-1] -= right.sign() / right.numel()
    assert total_variation_gradient(images).equal(slope)


@pytest.mark.parametrize("shape", GRIDS.values())
def test_norm_and_range_have_the_gradients_of_their_values(shape: tuple[int, ...]) -> None:
    bounds = [torch.full((1, shape[0], *[1] * (len(shape) - 1)), edge, dtype=torch.float64) for edge in (-0.4, 0.9)]
    black, white = bounds
    x = drawn(2, shape, 1).requires_grad_()
    norms = torch.stack([torch.linalg.vector_norm(one) for one in x])
    beyond = (x - white).relu().square().sum() + (black - x).relu().square().sum()
    for prior, value in ((image_l2, norms.mean()), (outside_range((black, white)), beyond)):
        found, slope = prior(x.detach())
        assert found.item() == pytest.approx(value.item())
        torch.testing.assert_close(slope, torch.autograd.grad(value, x)[0])
    _, slope = off_scale((black, white))(x.detach())  # towards each example stretched from black to white
    filled = (x.detach() - slope / 2).flatten(1)
    torch.testing.assert_close(filled.amin(1), torch.full((2,), -0.4, dtype=torch.float64))
    torch.testing.assert_close(filled.amax(1), torch.full((2,), 0.9, dtype=torch.float64))


def test_volumes_are_denoised_slice_by_slice() -> None:
    volumes = drawn(2, (1, 3, 8, 8), 2).float().clamp(0, 1)
    bounds = torch.zeros(1, 1, 1, 1, 1), torch.ones(1, 1, 1, 1, 1)
    _, pull = looks_like_photographs(bounds, 10)(volumes)
    for volume, one in zip(volumes, pull, strict=True):
        for depth in range(3):
            grey = volume[None, 0, depth].repeat(3, 1, 1)[None]
            clean = trained_denoiser()(grey, torch.tensor([0.08]))[0].mean(dim=0)
            torch.testing.assert_close(one[0, depth] * volumes.numel(), volume[0, depth] - clean, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(("size", "count"), [((24,), 2 * 7 - 1), ((8, 16, 32), 2 * 27 - 1)])
def test_moves_of_signals_and_volumes(size: tuple[int, ...], count: int) -> None:
    every = moves(size, 0)
    assert len(every) == len(set(every)) == count
    reach = 3 if len(size) == 1 else 1
    assert {shift for _, *_, shift in every} == {k * size[-1] // 8 for k in range(-reach, reach + 1)}
    examples = drawn(2, (2, *size))
    moved = with_move(examples, 1, False, *[1] * len(size))
    assert moved[0].equal(examples[0])
    inner = (slice(None), *[slice(1, None)] * len(size))
    outer = (slice(None), *[slice(None, -1)] * len(size))
    assert moved[1][inner].equal(examples[1][outer])
    assert moved[1].flatten(1)[:, 0].equal(examples[1].flatten(1)[:, 0]), "the edge is repeated"
    assert with_move(examples, 0, True, *[0] * len(size))[0].equal(examples[0].flip(-1))
    a_round = count + 4 * 61
    assert affordable(61 + a_round - 1, 1, 60, len(size)) == (0, 0)
    assert affordable(61 + a_round, 1, 60, len(size)) == (1, 1)


# --- patches and subspaces --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("axes", [1, 2, 3])
@pytest.mark.parametrize(("stride", "padding", "dilation"), [(1, 1, 1), (2, 0, 1), (2, 2, 2)])
def test_patches_are_what_the_filters_see(axes: int, stride: int, padding: int, dilation: int) -> None:
    """A filter's product with them is torch's own convolution, for random filters: so all of its numbers are."""
    size = (3, 2, 3)[:axes]
    made = CONVOLUTIONS[axes](2, 40, size, stride=stride, padding=padding, dilation=dilation, dtype=torch.float64)
    x = drawn(2, (2, *(7, 8, 9)[:axes]), 3)
    with torch.no_grad():
        wanted = made(x)
        patches = patches_seen(made, x)
        found = patches @ made.weight.flatten(1).T + made.bias
    torch.testing.assert_close(found.transpose(1, 2).reshape(wanted.shape), wanted)


def _opened(axes: int, count: int) -> tuple[Victim, Any, dict[str, Tensor], Tensor]:
    """Return a network of which the second convolution sees a few patches an example, and the gradient of examples."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(
            CONVOLUTIONS[axes](1, 8, 3, padding=1, stride=2), nn.ReLU(),
            CONVOLUTIONS[axes](8, 32, 3, padding=1, stride=2), nn.ReLU(),
            nn.Flatten(), nn.LazyLinear(5),
        )  # fmt: skip
        examples = drawn(count, (1, *[8] * axes)).float()
        model(examples)
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    victim = Victim(model, nn.functional.cross_entropy, parameters, {})
    found = torch.autograd.grad(victim.loss(model(examples), torch.arange(count) % 5), list(model.parameters()))
    return victim, layer_groups(model, examples), dict(zip(parameters, found, strict=True)), examples


@pytest.mark.parametrize("axes", [1, 3])
def test_gradients_of_convolutions_span_their_patches(axes: int) -> None:
    """The patches that a loop cuts out of the padded inputs, and the basis that the gradient gives: SciPy's angles."""
    victim, layers, gradient, examples = _opened(axes, 2)
    known = subspaces(victim, layers, gradient, torch.zeros_like(examples))
    model: Any = victim.module
    with torch.no_grad():
        inside = nn.functional.pad(model[1](model[0](examples)), [1] * 2 * axes)
    cuts = [
        one[(slice(None), *(slice(n, n + 3) for n in place))].flatten()
        for one in inside
        for place in itertools.product((0, 2), repeat=axes)
    ]
    basis = known["2"].basis
    assert basis is not None
    assert len(basis) == len(cuts) == 2 * 2**axes
    assert np.abs(subspace_angles(torch.stack(cuts).numpy().T, basis.numpy().T)).max() < 5e-3
    prior = in_subspaces(victim, known)
    at_truth, elsewhere = prior(examples)[0].item(), prior(drawn(2, (1, *[8] * axes), 7).float())[0].item()
    assert at_truth < 2e-3
    assert elsewhere > 100 * at_truth


# --- engines ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "shape"),
    [("cnn-1d", (2, 24)), ("cnn-3d", (1, 8, 8, 10)), ("lstm", (3, 12)), ("gru", (3, 12)), ("unet", (1, 16, 16))],
)
def test_first_order_passes_agree_with_double_backward(name: str, shape: tuple[int, ...]) -> None:
    """And both with a difference of the distance itself, in float64. Of a U-Net the targets are masks."""
    model = build_model(name, input_shape=shape, outputs=3, width=4).double()
    set_training_mode(model, "eval")
    parameters = {n: p.detach().clone() for n, p in model.named_parameters()}
    victim = Victim(model, nn.functional.cross_entropy, parameters, dict(model.named_buffers()))
    targets = torch.randint(3, (2, *(shape[1:] if name == "unet" else ())), generator=generator(1, "targets"))
    true, x = drawn(2, shape, 4), drawn(2, shape, 5)
    leaves = {n: p.clone().requires_grad_() for n, p in parameters.items()}
    observed = torch.autograd.grad(victim.value(leaves, true, targets), list(leaves.values()))
    distance = weighted_cosine(observed, [1.0] * len(observed))
    value, slope = reference(victim, targets, one_gradient(2), distance)(x)
    fast, near = first_order(victim, targets, one_gradient(2), distance, eager(victim))(x)
    assert fast.item() == pytest.approx(value.item(), rel=1e-9)
    assert nn.functional.cosine_similarity(near.flatten(), slope.flatten(), dim=0) > 0.9999
    along = drawn(2, shape, 6) * 1e-6
    exact = reference(victim, targets, one_gradient(2), distance)
    difference = (exact(x + along)[0] - exact(x - along)[0]).item() / 2
    assert difference == pytest.approx((slope * along).sum().item(), rel=1e-3)


# --- attacks ----------------------------------------------------------------------------------------------------------


def _things(kind: str, count: int, shape: tuple[int, ...]) -> Tensor:
    """Return blurred noise: of an image, volume or signal the neighbours are alike."""
    noise = torch.randn((count, *shape), generator=generator(0, kind))
    pool: Any = (nn.functional.avg_pool1d, nn.functional.avg_pool2d, nn.functional.avg_pool3d)[len(shape) - 2]
    smooth: Tensor = pool(noise, 3, 1, 1)
    if kind == "signal":
        return 1000 * smooth  # in units of its own
    return ((smooth - smooth.min()) / (smooth.max() - smooth.min())).contiguous()


def _update(
    kind: str, shape: tuple[int, ...], model: str, examples: int = 1, width: int = 8
) -> tuple[Tensor, Observation]:
    """Return a client's examples and what an eavesdropper who knows the labels sees of their gradient."""
    inputs = _things(kind, 24, shape)
    data = Dataset.from_tensors(inputs, torch.arange(24) % 4, kind=kind, name="made")
    scenario = scenario_from({
        "version": 1, "name": "g", "seed": 2, "data": {"name": "custom", "split": "train"},
        "model": {"name": model, "width": width, "batch_norm": "eval", "initialisation": "default"},
        "federations": [
            {"name": "f", "algorithm": "fedsgd", "clients": 1, "examples": examples, "batch_size": examples}
        ],
        "threat": {"knows_labels": True}, "attacks": ["invg"],
    })  # fmt: skip
    (recorded,) = record(resolve(scenario, dataset=data))
    (observed,) = observe(recorded.transcript, scenario.threat).split("update")
    true: Tensor = next(iter(recorded.truth.inputs.values()))
    return true, observed


def _error(found: Tensor, true: Tensor) -> float:
    """Return the root mean square error, of the deviation of the true values: 1 for their mean."""
    return float((found - true).square().mean().sqrt() / true.std())


ONE_DESCENT = {"moving": 0.0}


@pytest.mark.parametrize(
    ("kind", "shape", "model", "width", "attack", "settings"),
    [
        pytest.param(
            *("signal", (1, 64), "cnn-1d", 16, "agic-plus", {**ONE_DESCENT, "iterations": 300, "subspace": 0.0}),
            marks=pytest.mark.slow,
        ),
        ("signal", (3, 8), "gru", 32, "idlg", {"iterations": 60}),
        pytest.param(
            *("volume", (1, 8, 8, 8), "cnn-3d", 8, "agic-plus", {**ONE_DESCENT, "iterations": 250}),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_examples_of_one_and_three_axes_are_recovered(
    kind: str, shape: tuple[int, ...], model: str, width: int, attack: str, settings: dict[str, Any]
) -> None:
    true, observed = _update(kind, shape, model, width=width)
    found: Any = make_attack(attack, settings)(observed, seed=1)
    assert found.images.shape == true.shape
    assert _error(found.images, true) < 0.35
    assert not any("unchecked" in note or "reference from" in note for note in found.notes), found.notes


def test_an_untrained_lstm_gives_away_the_last_steps_of_a_signal() -> None:
    """Its forget gates halve what it remembers at each step, so the gradient hardly depends on the first ones."""
    true, observed = _update("signal", (3, 32), "lstm", width=32)
    found: Any = make_attack("idlg", {"iterations": 60})(observed, seed=1)
    assert _error(found.images[..., -2:], true[..., -2:]) < 0.1
    assert _error(found.images[..., :8], true[..., :8]) > 0.5


@pytest.mark.parametrize(
    "name", ["dlg", "dlg-adam", "idlg", "cpl", "invg", "geng", "agic", "agic-plus", "gradinversion"]
)
@pytest.mark.parametrize("kind", ["signal", pytest.param("volume", marks=pytest.mark.slow)])
def test_every_method_runs_on_signals_and_volumes(name: str, kind: str) -> None:
    """And comes nearer to the update than where it began; what is for images alone is said to be left out."""
    shape, model = {"signal": ((2, 16), "cnn-1d"), "volume": ((1, 8, 8, 8), "cnn-3d")}[kind]
    _, observed = _update(kind, shape, model, width=4)
    by_newton = name in ("dlg", "idlg", "cpl", "geng")  # L-BFGS, with up to 25 evaluations an iteration
    found: Any = make_attack(name, {"iterations": 3 if by_newton else 20})(observed, seed=0)
    assert found.images.isfinite().all()
    first, last = found.trace.objective[0], found.trace.objective[-1]
    assert last < first or (by_newton and last == first)  # torch's L-BFGS ends where each voxel's slope is below 1e-7
    if kind == "volume":
        assert found.images.min() >= 0
        assert found.images.max() <= 1
    said = {"agic-plus": "denoiser", "gradinversion": "registration"}
    said |= {"geng": "clipping"} if kind == "signal" else {}
    assert name not in said or any(said[name] in note for note in found.notes)


@pytest.mark.slow
def test_the_search_with_moves_takes_volumes_and_counts_its_evaluations() -> None:
    _, observed = _update("volume", (1, 8, 8, 8), "cnn-3d", width=2)
    found: Any = make_attack("agic-plus", {"iterations": 600, "starts": 1, "start_iterations": 60})(observed, seed=0)
    assert found.trace.iterations[-1] == 600
    assert found.objective < 0.1 * found.trace.objective[0] or found.objective < 0.1


@pytest.mark.parametrize(("kind", "shape"), [("signal", (3, 40)), ("volume", (1, 4, 6, 8))])
@pytest.mark.parametrize(("attack", "examples"), [("exact-linear", 1), ("spear", 6), ("cocktail", 6)])
def test_closed_forms_behind_a_flattening_layer(kind: str, shape: tuple[int, ...], attack: str, examples: int) -> None:
    """Of signals and volumes as of images: exact, in their own units, and certified without the truth."""
    true, observed = _update(kind, shape, "mlp", examples, width=64)
    found: Any = make_attack(attack)(observed, seed=0)
    assert found.images.shape == true.shape
    assert found.certified.all()
    far = torch.cdist(found.images.flatten(1).double(), true.flatten(1).double(), p=float("inf"))
    assert far.min(dim=1).values.max() < 1e-4 * float(true.abs().max())
    assert len(far.argmin(dim=1).unique()) == examples


def test_what_is_for_images_alone_refuses_volumes() -> None:
    _, observed = _update("volume", (1, 8, 8, 8), "cnn-3d", width=2)
    for name in ("r-gap", "gias", "exact-linear-rows"):
        with pytest.raises(NotApplicable):
            make_attack(name).check(observed)
