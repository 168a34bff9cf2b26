"""Initialisation: the schemes against PyTorch's own layers, their repeatability, and what they refuse."""

from __future__ import annotations

import math

import pytest
import torch
from scipy import stats
from torch import nn

from fedaudit.models import INITIALISATIONS, initialise
from fedaudit.utils.errors import BadInput
from tests.models.model_cases import generator, one_line


def mixed_model() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(8, 48, 3),
        nn.BatchNorm2d(48),
        nn.ConvTranspose2d(48, 24, 4),
        nn.GroupNorm(2, 24),
        nn.Conv2d(24, 48, 3, groups=2, bias=False),
        nn.BatchNorm2d(48, affine=False),
        nn.LayerNorm(5),
        nn.LSTM(7, 40),
        nn.GRU(7, 40),
        nn.Linear(300, 90),
    )


@pytest.mark.parametrize("scheme", ["default", "he", "uniform", "given"])
def test_the_same_seed_gives_the_same_tensors_and_nothing_global_moves(scheme: str) -> None:
    models = [mixed_model() for _ in range(3)]
    models[1].load_state_dict(models[0].state_dict())
    before = torch.get_rng_state()
    for model, seed in zip(models, (4, 4, 5), strict=True):
        initialise(model, scheme, generator(seed))
    assert torch.equal(before, torch.get_rng_state())
    a, b, c = (torch.cat([p.flatten() for p in model.parameters()]) for model in models)
    assert torch.equal(a, b)
    assert not torch.equal(a, c)


def test_default_has_the_distribution_of_pytorchs_own_layers() -> None:
    ours, theirs = mixed_model(), mixed_model()
    initialise(ours, "default", generator(1))
    with torch.random.fork_rng():
        torch.manual_seed(2)
        for module in theirs:
            reset = getattr(module, "reset_parameters", None)
            if reset is not None:
                reset()
    for (name, a), b in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        if a.std() == 0 or b.std() == 0:  # normalisation layers
            assert torch.equal(a, b), name
            continue
        bound = max(b.abs().max().item(), a.abs().max().item())
        assert stats.ks_2samp(a.detach().flatten(), b.detach().flatten()).pvalue > 1e-3, name
        assert stats.kstest(a.detach().flatten(), "uniform", args=(-bound, 2 * bound)).pvalue > 1e-3, name
    conv = ours[0]
    assert isinstance(conv, nn.Conv2d)
    assert 0.999 / math.sqrt(72) < conv.weight.abs().max() <= 1 / math.sqrt(72)
    assert conv.bias is not None
    assert conv.bias.abs().max() <= 1 / math.sqrt(72)


def test_he_is_normal_by_fan_out_for_convolutions_and_default_for_linear() -> None:
    model = mixed_model()
    initialise(model, "he", generator(3))
    conv, linear = model[0], model[-1]
    assert isinstance(conv, nn.Conv2d)
    assert isinstance(linear, nn.Linear)
    sigma = math.sqrt(2 / (48 * 9))
    assert stats.kstest(conv.weight.detach().flatten(), "norm", args=(0, sigma)).pvalue > 1e-3
    assert conv.bias is not None
    assert torch.equal(conv.bias, torch.zeros(48))
    bound = 1 / math.sqrt(300)
    assert stats.kstest(linear.weight.detach().flatten(), "uniform", args=(-bound, 2 * bound)).pvalue > 1e-3


def test_uniform_fills_everything_between_minus_and_plus_one_half() -> None:
    model = nn.Sequential(mixed_model(), nn.PReLU(), nn.MultiheadAttention(8, 2))
    initialise(model, "uniform", generator(3))
    for parameter in model.parameters():
        assert parameter.abs().max() <= 0.5
    everything = torch.cat([p.detach().flatten() for p in model.parameters()])
    assert stats.kstest(everything, "uniform", args=(-0.5, 1)).pvalue > 1e-3


@pytest.mark.parametrize("scheme", ["default", "he", "uniform"])
def test_running_statistics_start_afresh(scheme: str) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.BatchNorm2d(4, affine=False))
    model(torch.randn(5, 3, 8, 8, generator=generator()) + 3)
    initialise(model, scheme, generator())
    for norm in list(model)[1:]:
        assert isinstance(norm, nn.BatchNorm2d)
        assert norm.running_mean is not None
        assert norm.running_var is not None
        assert norm.num_batches_tracked is not None
        assert torch.equal(norm.running_mean, torch.zeros(4))
        assert torch.equal(norm.running_var, torch.ones(4))
        assert norm.num_batches_tracked == 0


def test_given_changes_nothing_even_of_unknown_layers() -> None:
    model = nn.MultiheadAttention(4, 2)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    initialise(model, "given", generator())
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize(
    "layer",
    [
        nn.MultiheadAttention(4, 2),
        nn.EmbeddingBag(3, 4),
        nn.utils.parametrizations.weight_norm(nn.Linear(2, 2)),
    ],
)
def test_an_unknown_layer_is_refused_before_anything_changes(layer: nn.Module) -> None:
    first = nn.Linear(3, 4)
    model = nn.Sequential(first, layer)
    before = first.weight.clone()
    with pytest.raises(BadInput, match="use 'given'") as error:
        initialise(model, "default", generator())
    assert "'1" in one_line(error)
    assert torch.equal(before, first.weight)


def test_an_unknown_scheme_is_refused() -> None:
    with pytest.raises(BadInput, match="did you mean 'uniform'"):
        initialise(nn.Linear(2, 2), "unifrom", generator())
    assert INITIALISATIONS.names() == ["default", "he", "uniform", "given"]
