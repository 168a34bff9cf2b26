"""Models: the published counts, initialisation against PyTorch's own, layers in forward order, checkpoints."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from scipy import stats
from torch import Tensor, nn

from fedaudit.errors import BadInput, MissingData
from fedaudit.models import (
    INITIALISATIONS,
    MODELS,
    Layer,
    build_model,
    has_batch_norm,
    initialise,
    layer_groups,
    load_checkpoint,
    save_checkpoint,
    set_training_mode,
)

IMAGE_MODELS = [entry.name for entry in MODELS if entry.info["input"] == "image"]
NARROW = {"resnet20-4": 8, "resnet18": 8, "resnet50": 8, "convnet": 8, "resnet56": 8}


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def one_line(error: pytest.ExceptionInfo[BadInput]) -> str:
    message = str(error.value)
    assert "\n" not in message
    return message


# --- architectures ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "shape", "outputs", "parameters"),
    [
        ("resnet20", (3, 32, 32), 10, 272_474),  # widely used CIFAR count with 1x1 shortcuts
        ("resnet20-4", (3, 32, 32), 10, 4_327_754),
        ("resnet18", (3, 32, 32), 10, 11_173_962),
        ("resnet18", (3, 224, 224), 1000, 11_689_512),  # torchvision's documented counts
        ("resnet50", (3, 224, 224), 1000, 25_557_032),
        ("convnet", (3, 32, 32), 10, 3_495_562),  # the FFL paper's Table 2: 3.49M
        ("leaky-cnn", (3, 32, 32), 10, 12 * 48 + 36 * 108 + 2 * 36 * 324 + 64 * 324 + 128 * 576 + 3200 * 10),
        ("lenet", (3, 32, 32), 100, 12 * 75 + 12 + 2 * (12 * 300 + 12) + 768 * 100 + 100),
        ("mlp", (30,), 2, 30 * 256 + 256 + 256 * 2 + 2),
        ("logistic", (1, 8, 8), 10, 650),
        ("linear", (10,), 1, 11),
    ],
)
def test_parameter_counts(name: str, shape: tuple[int, ...], outputs: int, parameters: int) -> None:
    assert count(build_model(name, input_shape=shape, outputs=outputs)) == parameters


def test_resnet20_4_is_resnet20_four_times_as_wide_with_its_parameters_in_order() -> None:
    model = build_model("resnet20-4", input_shape=(3, 32, 32), outputs=10)
    wide = build_model("resnet20", input_shape=(3, 32, 32), outputs=10, width=64)
    assert [(n, p.shape) for n, p in model.named_parameters()] == [(n, p.shape) for n, p in wide.named_parameters()]
    shapes = [tuple(p.shape) for p in model.parameters()]
    assert shapes[:4] == [(64, 3, 3, 3), (64,), (64,), (64, 64, 3, 3)]
    assert shapes[-2:] == [(10, 256), (10,)]
    convolutions = [m for m in model.modules() if isinstance(m, nn.Conv2d)]
    assert len(convolutions) == 21
    assert sum(m.kernel_size == (1, 1) for m in convolutions) == 2
    assert all(m.bias is None for m in convolutions)


def test_convnet_plan() -> None:
    model = build_model("convnet", input_shape=(3, 32, 32), outputs=10)
    convolutions = [m for m in model.modules() if isinstance(m, nn.Conv2d)]
    assert [m.out_channels for m in convolutions] == [64, 128, 128] + [256] * 6
    assert all(m.bias is not None for m in convolutions)
    small = build_model("convnet-small", input_shape=(3, 32, 32), outputs=10)
    assert [m.out_channels for m in small.modules() if isinstance(m, nn.Conv2d)] == [16, 16, 32, 32, 64, 64]


@pytest.mark.parametrize("name", IMAGE_MODELS)
@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 32, 32), (3, 33, 47), (1, 112, 92)])
def test_image_models_map_images_to_logits(name: str, shape: tuple[int, int, int]) -> None:
    model = build_model(name, input_shape=shape, outputs=7, width=NARROW.get(name))
    set_training_mode(model, "eval")
    x = torch.randn(2, *shape, generator=generator())
    logits = model(x)
    assert logits.shape == (2, 7)
    assert logits.isfinite().all()
    torch.testing.assert_close(logits[:1], model(x[:1]), rtol=1e-4, atol=1e-4)  # eval BN: no example sees another


@pytest.mark.parametrize("name", IMAGE_MODELS)
def test_the_smallest_image_works_and_one_pixel_less_is_refused(name: str) -> None:
    size = MODELS[name].info["min_size"]
    model = build_model(name, input_shape=(3, size, size), outputs=2, width=4).eval()
    assert model(torch.zeros(1, 3, size, size)).shape == (1, 2)
    with pytest.raises(BadInput, match=f"at least {size}x{size}") as error:
        build_model(name, input_shape=(3, size, size - 1), outputs=2)
    assert name in one_line(error)


@settings(max_examples=20, deadline=None)
@given(
    name=st.sampled_from([entry.name for entry in MODELS if entry.info["input"] == "any"]),
    shape=st.lists(st.integers(1, 6), min_size=1, max_size=3).map(tuple),
    outputs=st.integers(1, 4),
)
def test_other_models_take_any_shape(name: str, shape: tuple[int, ...], outputs: int) -> None:
    assert build_model(name, input_shape=shape, outputs=outputs)(torch.zeros(3, *shape)).shape == (3, outputs)


def test_resnet_keeps_the_resolution_of_small_images_only() -> None:
    sizes = {}
    for size in (64, 65):
        model = build_model("resnet18", input_shape=(3, size, size), outputs=2, width=4)
        stem = next(m for m in model.modules() if isinstance(m, nn.Conv2d))
        sizes[size] = (stem.kernel_size, stem.stride)
    assert sizes == {64: ((3, 3), (1, 1)), 65: ((7, 7), (2, 2))}


def test_every_model_says_what_it_is() -> None:
    names = {"resnet20", "resnet20-4", "resnet18", "resnet50", "convnet", "convnet-small", "lenet", "mlp", "logistic"}
    assert names | {"linear"} <= set(MODELS.names())
    for entry in MODELS:
        assert entry.summary
        assert entry.info["paper"]
        assert entry.info["input"] in ("image", "any")


@pytest.mark.parametrize(
    ("name", "arguments", "words"),
    [
        ("resnet20_4", {}, "did you mean 'resnet20-4'"),
        ("resnet20", {"input_shape": (30,)}, "takes images"),
        ("lenet", {"input_shape": (28, 28)}, "takes images"),
        ("resnet20", {"width": 0}, "width is 0"),
        ("mlp", {"width": -3}, "width is -3"),
        ("logistic", {"width": 5}, "no width"),
        ("mlp", {"outputs": 0}, "outputs is 0"),
        ("mlp", {"input_shape": ()}, "input shape"),
        ("mlp", {"input_shape": (0,)}, "input shape"),
    ],
)
def test_what_cannot_be_built_is_refused_in_one_line(name: str, arguments: dict[str, object], words: str) -> None:
    given: dict[str, object] = {"input_shape": (3, 32, 32), "outputs": 10}
    with pytest.raises(BadInput, match=words) as error:
        build_model(name, **(given | arguments))  # type: ignore[arg-type]
    one_line(error)


def test_building_is_repeatable_and_leaves_the_global_generator_alone() -> None:
    before = torch.get_rng_state()
    a = build_model("resnet20", input_shape=(3, 32, 32), outputs=10)
    assert torch.equal(before, torch.get_rng_state())
    torch.rand(3)
    b = build_model("resnet20", input_shape=(3, 32, 32), outputs=10)
    torch.set_rng_state(before)
    for (name, x), y in zip(a.state_dict().items(), b.state_dict().values(), strict=True):
        assert torch.equal(x, y), name
    assert all(tensor.device.type == "cpu" and tensor.isfinite().all() for tensor in a.state_dict().values())


# --- initialisation --------------------------------------------------------------------------------------------------


def mixed_model() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(8, 48, 3),
        nn.BatchNorm2d(48),
        nn.ConvTranspose2d(48, 24, 4),
        nn.GroupNorm(2, 24),
        nn.Conv2d(24, 48, 3, groups=2, bias=False),
        nn.BatchNorm2d(48, affine=False),
        nn.LayerNorm(5),
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
        nn.Embedding(3, 4),
        nn.LSTM(3, 4),
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


# --- BatchNorm mode --------------------------------------------------------------------------------------------------


def test_batch_norm_mode_decides_whether_running_statistics_move() -> None:
    model = build_model("resnet20", input_shape=(3, 8, 8), outputs=2, width=2)
    assert has_batch_norm(model)
    x = torch.randn(4, 3, 8, 8, generator=generator())
    start = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    set_training_mode(model, "eval")
    assert model.training
    model(x)
    assert all(torch.equal(tensor, start[name]) for name, tensor in model.state_dict().items())
    set_training_mode(model, "train")
    model(x)
    moved = [name for name, tensor in model.state_dict().items() if not torch.equal(tensor, start[name])]
    assert "bn.running_mean" in moved
    with pytest.raises(BadInput, match="'eval' or 'train'"):
        set_training_mode(model, "off")  # type: ignore[arg-type]


def test_only_batch_normalisation_counts_as_batch_norm() -> None:
    assert not has_batch_norm(build_model("lenet", input_shape=(1, 28, 28), outputs=2))
    assert not has_batch_norm(nn.Sequential(nn.LayerNorm(3), nn.GroupNorm(1, 3), nn.InstanceNorm2d(3)))
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Dropout())
    set_training_mode(model, "eval")
    assert [module.training for module in model] == [False, True]


# --- layers ----------------------------------------------------------------------------------------------------------


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


class Tokens(nn.Module):
    """A parameter of the model itself, attention that never calls its own projection, tied and unused weights."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.token = nn.Parameter(torch.zeros(1, 1, 8))
        self.out = nn.Linear(8, 11, bias=False)
        self.out.weight = self.embed.weight
        self.unused = nn.Linear(2, 2)

    def forward(self, ids: Tensor) -> dict[str, Tensor]:
        x = self.embed(ids) + self.token
        x, _ = self.attention(x, x, x)
        return {"logits": self.out(x)}


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


# --- checkpoints -----------------------------------------------------------------------------------------------------


def small(seed: int) -> nn.Module:
    model = build_model("convnet-small", input_shape=(1, 8, 8), outputs=3, width=2)
    initialise(model, "default", generator(seed))
    return model


def same(a: nn.Module, b: nn.Module) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a.state_dict().values(), b.state_dict().values(), strict=True))


def test_a_checkpoint_comes_back_bit_for_bit(tmp_path: Path) -> None:
    a, b = small(1), small(2)
    a(torch.randn(4, 1, 8, 8, generator=generator()))  # running statistics are part of it
    path = tmp_path / "folder" / "model.safetensors"
    save_checkpoint(a, path)
    assert not same(a, b)
    load_checkpoint(b, path)
    assert same(a, b)


def test_tied_and_strided_tensors_survive(tmp_path: Path) -> None:
    a, b = Tokens(), Tokens()
    a.attention.in_proj_weight.data = torch.randn(8, 24, generator=generator()).t()
    save_checkpoint(a, tmp_path / "m.safetensors")
    load_checkpoint(b, tmp_path / "m.safetensors")
    assert same(a, b)
    assert b.out.weight is b.embed.weight


@pytest.mark.parametrize(
    "wrap", [lambda s: s, lambda s: {"state_dict": s, "epoch": 3}, lambda s: {"model_state_dict": s}]
)
@pytest.mark.parametrize("suffix", [".pt", ".pth"])
def test_a_pickle_of_tensors_is_read(tmp_path: Path, suffix: str, wrap: Callable[..., object]) -> None:
    a, b = small(1), small(2)
    path = tmp_path / f"model{suffix}"
    torch.save(wrap(a.state_dict()), path)
    load_checkpoint(b, path)
    assert same(a, b)


def test_half_precision_and_a_missing_batch_counter_are_accepted(tmp_path: Path) -> None:
    a, b = small(1), small(2)
    tensors = {n: t.half() for n, t in a.state_dict().items() if not n.endswith("num_batches_tracked")}
    save_file(tensors, tmp_path / "m.safetensors")
    load_checkpoint(b, tmp_path / "m.safetensors")
    assert next(b.parameters()).dtype == torch.float32
    torch.testing.assert_close(b.state_dict(), a.state_dict(), rtol=1e-3, atol=1e-4)


class Evil:
    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return (Path.touch, (Path("evil-was-here"),))


def _drop(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return dict(list(state.items())[6:])


BAD: dict[str, tuple[Callable[[dict[str, Tensor]], dict[str, Tensor]], str]] = {
    "missing": (_drop, r"lacks 'features.layer1.conv.weight', .*more"),
    "unexpected": (lambda s: s | {"head.weight": torch.zeros(2)}, "also has 'head.weight';"),
    "both": (lambda s: _drop(s) | {"head.weight": torch.zeros(2)}, "lacks .* and also has"),
    "shape": (lambda s: s | {"fc.bias": torch.zeros(4)}, r"'fc.bias' has the shape \(4,\), the model's \(3,\)"),
    "transposed": (lambda s: s | {"fc.weight": torch.zeros(8, 3)}, "'fc.weight' has the shape"),
    "nan": (lambda s: s | {"fc.bias": torch.tensor([0, math.nan, 0])}, "'fc.bias' holds NaN"),
    "infinite": (lambda s: s | {"fc.bias": torch.tensor([0, math.inf, 0])}, "'fc.bias' holds NaN or inf"),
    "empty": (lambda _: {}, "lacks"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_checkpoint_that_does_not_fit_is_refused_and_changes_nothing(tmp_path: Path, case: str) -> None:
    change, words = BAD[case]
    model, before = small(2), small(2)
    path = tmp_path / "m.safetensors"
    save_file(change(small(1).state_dict()), path)
    with pytest.raises(BadInput, match=words) as error:
        load_checkpoint(model, path)
    one_line(error)
    assert same(model, before)


@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
@pytest.mark.parametrize("keep", [0, 5, 0.5, 0.999])
def test_a_truncated_file_is_refused(tmp_path: Path, suffix: str, keep: float) -> None:
    path = tmp_path / f"m{suffix}"
    save_checkpoint(small(1), path) if suffix == ".safetensors" else torch.save(small(1).state_dict(), path)
    data = path.read_bytes()
    path.write_bytes(data[: keep if isinstance(keep, int) else int(len(data) * keep)])
    with pytest.raises(BadInput) as error:
        load_checkpoint(small(2), path)
    assert str(path) in one_line(error)


def test_a_pickle_with_code_is_refused_and_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"fc.weight": Evil()}, "m.pt")
    with pytest.raises(BadInput, match=r"refused; save model.state_dict\(\) as .safetensors") as error:
        load_checkpoint(small(1), Path("m.pt"))
    one_line(error)
    assert not Path("evil-was-here").exists()


def test_other_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(MissingData, match="no checkpoint at"):
        load_checkpoint(small(1), tmp_path / "nothing.pt")
    (tmp_path / "m.h5").write_bytes(b"x")
    with pytest.raises(BadInput, match=r"must be a \.safetensors"):
        load_checkpoint(small(1), tmp_path / "m.h5")
    (tmp_path / "m.pt").write_bytes(b"not a pickle")
    with pytest.raises(BadInput):
        load_checkpoint(small(1), tmp_path / "m.pt")
    torch.save([torch.zeros(2)], tmp_path / "list.pt")
    with pytest.raises(BadInput, match="not a state dict"):
        load_checkpoint(small(1), tmp_path / "list.pt")
    with pytest.raises(BadInput, match=r"written as \.safetensors"):
        save_checkpoint(small(1), tmp_path / "m.pt")
