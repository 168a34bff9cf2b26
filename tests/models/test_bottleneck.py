"""PRECODE's variational bottleneck: what it computes and adds to gradients; an attacker who leaves it out."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Normal, kl_divergence
from torch.nn.functional import cross_entropy, softplus

from fedaudit.models import MODELS, VariationalBottleneck, build_model, from_bottleneck_on, with_bottleneck
from fedaudit.utils.errors import BadInput


def test_training_adds_the_divergence_to_the_loss_s_gradient() -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layer, head = VariationalBottleneck(6, 4), nn.Linear(6, 3)
        x, y = torch.randn(5, 6), torch.tensor([0, 1, 2, 0, 1])
        parameters = [*layer.parameters(), *head.parameters()]
        torch.manual_seed(1)
        found = torch.autograd.grad(cross_entropy(head(layer(x)), y), parameters)
        torch.manual_seed(1)
        mean, spread = layer.encoder(x).chunk(2, dim=1)
        code = Normal(mean, softplus(spread - 5))
        divergence = kl_divergence(code, Normal(torch.zeros(4), torch.ones(4))).sum(1).mean()
        value = cross_entropy(head(layer.decoder(mean + code.scale * torch.randn(5, 4))), y) + 1e-3 * divergence
        for one, other in zip(found, torch.autograd.grad(value, parameters), strict=True):
            torch.testing.assert_close(one, other)
        layer.eval()
        torch.testing.assert_close(layer(x), layer.decoder(layer.encoder(x)[:, :4]))


@pytest.mark.parametrize("name", [n for n in MODELS.names() if n.endswith("-precode")])
def test_it_stands_before_the_last_layer(name: str) -> None:
    shape = (3, 16, 16)
    plain, model = (build_model(n, input_shape=shape, outputs=7) for n in (name.removesuffix("-precode"), name))
    last = [part for part in plain.modules() if isinstance(part, nn.Linear)][-1]
    added = 512 * last.in_features + 512 + 256 * last.in_features + last.in_features
    assert sum(p.numel() for p in model.parameters()) == added + sum(p.numel() for p in plain.parameters())
    behind = from_bottleneck_on(model)
    assert len(behind) == 6
    assert len([*model.parameters()]) == 6 + len([*plain.parameters()]) - 2
    x = torch.rand(2, *shape)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        assert not model(x).equal(model(x))
    assert model.eval()(x).equal(model(x))
    assert not from_bottleneck_on(plain)


def test_a_network_without_a_layer_to_stand_before_is_refused() -> None:
    with pytest.raises(BadInput, match="this model has none"):
        with_bottleneck(nn.Sequential(nn.Conv2d(1, 1, 3)))


def test_code_and_features_are_of_the_chosen_size() -> None:
    model = with_bottleneck(nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 2)), 3)
    assert from_bottleneck_on(model) == {n for n, _ in model.named_parameters() if n.startswith("2.")}
    sizes = {n: tuple(p.shape) for n, p in model.named_parameters()}
    assert sizes["2.bottleneck.encoder.weight"] == (6, 5)
    assert sizes["2.bottleneck.decoder.weight"] == (5, 3)
    grads: tuple[Tensor, ...] = torch.autograd.grad(model(torch.ones(1, 4)).sum(), list(model.parameters()))
    assert all(g.isfinite().all() for g in grads)
