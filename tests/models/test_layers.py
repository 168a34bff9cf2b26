"""Layers in forward order: their parameters, and after which of them a ReLU follows."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedaudit.models import Layer, build_model, layer_groups
from tests.models.model_cases import Tokens, generator


def relu_names(layers: list[Layer]) -> set[str]:
    return {layer.name for layer in layers if layer.relu_follows}


def test_resnet20_4_has_21_convolutions_in_forward_order() -> None:
    model = build_model("resnet20-4", input_shape=(3, 32, 32), outputs=10, width=4)
    layers = layer_groups(model, torch.zeros(1, 3, 32, 32))
    convolutions = [layer for layer in layers if layer.kind == "conv"]
    assert len(convolutions) == 21
    assert [i for i, layer in enumerate(convolutions) if "shortcut" in layer.name] == [9, 16]
    assert [layer.name for layer in layers if layer.kind == "linear"] == ["fc"]
    assert all(layer.relu_follows == (layer.kind != "linear") for layer in layers)
    names = [name for layer in layers for name in layer.parameters]
    assert sorted(names) == sorted(name for name, _ in model.named_parameters())
    assert layers[-1].parameters == ("fc.weight", "fc.bias")
    kinds = [layer.kind for layer in layers]
    assert kinds == ["conv", "norm"] * 21 + ["linear"]


def test_sigmoid_lenet_has_no_relu() -> None:
    layers = layer_groups(build_model("lenet", input_shape=(3, 32, 32), outputs=10), torch.zeros(1, 3, 32, 32))
    assert [layer.kind for layer in layers] == ["conv", "conv", "conv", "linear"]
    assert relu_names(layers) == set()


class Backwards(nn.Module):
    """Layers defined in another order than they run, every ReLU a function, a residual addition, a tanh, a gate."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 2)
        self.gate = nn.Conv2d(4, 4, 1)
        self.smooth = nn.Conv2d(4, 4, 1)
        self.residual = nn.Conv2d(4, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.pooled = nn.Conv2d(4, 4, 1)
        self.first = nn.Conv2d(3, 4, 3, padding=1)
        self.drop = nn.Dropout(0.5)
        self.calls: Tensor = nn.Buffer(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        x = F.relu_(self.first(x))
        x = F.relu(self.norm(self.residual(x)) + x)
        x = F.relu6(F.max_pool2d(self.drop(self.pooled(x)), 2))
        x = self.smooth(x).tanh()
        x = torch.clamp(x * self.gate(x).sigmoid(), min=0)
        return self.fc(x.mean((2, 3)))  # type: ignore[no-any-return]


def test_layers_of_a_users_module_come_from_the_forward_pass() -> None:
    model = Backwards()
    layers = layer_groups(model, torch.randn(2, 3, 8, 8, generator=generator()))
    assert [layer.name for layer in layers] == ["first", "residual", "norm", "pooled", "smooth", "gate", "fc"]
    assert relu_names(layers) == {"first", "residual", "norm", "pooled"}


def test_looking_at_layers_changes_nothing() -> None:
    model = Backwards()
    model.gate.requires_grad_(False)
    model.norm.eval()
    modes = {name: module.training for name, module in model.named_modules()}
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    rng = torch.get_rng_state()
    x = torch.ones(2, 3, 8, 8)
    layers = layer_groups(model, x)
    assert torch.equal(rng, torch.get_rng_state())
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    assert modes == {name: module.training for name, module in model.named_modules()}
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    with torch.no_grad():  # and it does not depend on the caller's gradient mode or on frozen layers
        assert layer_groups(model.requires_grad_(False), x) == layers


def test_a_failing_forward_pass_leaves_no_hooks_and_no_modes() -> None:
    model = Backwards()
    with pytest.raises(RuntimeError):
        layer_groups(model, torch.zeros(2, 5, 8, 8))
    assert all(module.training for module in model.modules())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize(
    ("activation", "follows"),
    [
        (nn.ReLU(), True),
        (nn.ReLU(inplace=True), True),
        (nn.ReLU6(), True),
        (nn.Threshold(0.0, 0.0), True),
        (nn.LeakyReLU(), False),
        (nn.GELU(), False),
        (nn.Hardtanh(-1, 1), False),
        (nn.Threshold(0.5, 0.0), False),
        (nn.Identity(), False),
        (nn.Sequential(nn.Flatten(), nn.Unflatten(1, (4, 6, 6)), nn.AvgPool2d(2), nn.ReLU()), True),
        (nn.Sequential(nn.GroupNorm(2, 4), nn.ReLU()), True),
        (nn.Sequential(nn.InstanceNorm2d(4), nn.ReLU()), True),
        (nn.Sequential(nn.LayerNorm(6), nn.ReLU()), True),
        (nn.Sequential(nn.Tanh(), nn.ReLU()), False),
        (nn.Sequential(nn.Conv2d(4, 4, 1), nn.ReLU()), False),
    ],
)
def test_what_counts_as_a_relu_that_follows(activation: nn.Module, follows: bool) -> None:
    layers = layer_groups(nn.Sequential(nn.Conv2d(3, 4, 3), activation), torch.zeros(1, 3, 8, 8))
    assert layers[0] == Layer("0", "conv", ("0.weight", "0.bias"), follows)


@pytest.mark.parametrize("name", ["mlp", "convnet-small", "resnet20"])
def test_relu_follows_agrees_with_zeros_in_the_gradient(name: str) -> None:
    """Independent oracle: where every unit is far below zero, a ReLU leaves exact zeros in the gradient before it."""
    model = build_model(name, input_shape=(3, 16, 16), outputs=4, width=6).eval()
    layers = layer_groups(model, torch.zeros(1, 3, 16, 16))
    x = torch.randn(1, 3, 16, 16, generator=generator())
    for layer in layers:
        model.zero_grad()
        biases = [model.get_parameter(p) for p in layer.parameters if p.endswith("bias")]
        kept = [bias.detach().clone() for bias in biases]
        with torch.no_grad():
            for bias in biases:
                bias.fill_(-1e6)
        F.cross_entropy(model(x), torch.tensor([1])).backward()
        for bias, old in zip(biases, kept, strict=True):
            assert bias.grad is not None
            assert layer.relu_follows == (not bias.grad.any()), layer.name
            with torch.no_grad():
                bias.copy_(old)


def test_every_parameter_has_one_layer_whatever_the_module() -> None:
    model = Tokens()
    layers = layer_groups(model, torch.zeros(2, 5, dtype=torch.long))
    groups = {layer.name: layer for layer in layers}
    assert list(groups) == ["", "embed", "attention"]
    assert groups[""].parameters == ("token", "unused.weight", "unused.bias")
    assert groups["embed"].parameters == ("embed.weight",)
    assert "attention.out_proj.weight" in groups["attention"].parameters
    assert {layer.kind for layer in layers} == {"other"}
    names = [name for layer in layers for name in layer.parameters]
    assert sorted(names) == sorted(name for name, _ in model.named_parameters())


def test_a_model_that_is_one_layer() -> None:
    assert layer_groups(nn.Linear(3, 2), torch.zeros(1, 3)) == [Layer("", "linear", ("weight", "bias"), False)]
    assert layer_groups(nn.ReLU(), torch.zeros(1, 3)) == []
