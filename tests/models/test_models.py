"""Models: the published counts, which inputs they take, what is refused, and BatchNorm's mode."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fedaudit.modalities import EXAMPLE_KINDS
from fedaudit.models import MODELS, build_model, has_batch_norm, set_training_mode
from fedaudit.models.families import inputs_of
from fedaudit.utils.errors import BadInput
from tests.models.model_cases import generator, one_line

CLASSIFIERS = [entry.name for entry in MODELS if entry.name != "unet"]
IMAGE_MODELS = [name for name in CLASSIFIERS if "image" in inputs_of(MODELS[name])]
NARROW = {"resnet20-4": 8, "resnet18": 8, "resnet50": 8, "convnet": 8, "resnet56": 8, "densenet-121": 8}


def count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


# --- architectures ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
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
        ("strided-cnn", (1, 28, 28), 10, 272 + 8_224 + 32 * 49 * 64 + 64 + 650),
        ("lenet", (3, 32, 32), 100, 12 * 75 + 12 + 2 * (12 * 300 + 12) + 768 * 100 + 100),
        ("lenet-5", (3, 32, 32), 100, 456 + 2_416 + 400 * 120 + 120 + 120 * 84 + 84 + 85 * 100),
        ("cafe-cnn", (1, 14, 14), 10, 64 * 26 + 128 * 1_601 + 256 * 2_049 + 64 * 257 + 650),
        ("fcn-3", (1, 28, 28), 10, 785 * 300 + 301 * 300 + 301 * 10),
        ("fcn-3-dropout", (1, 28, 28), 10, 785 * 300 + 301 * 300 + 301 * 10),
        ("mlp", (30,), 2, 30 * 256 + 256 + 256 * 2 + 2),
        ("logistic", (1, 8, 8), 10, 650),
        ("linear", (10,), 1, 11),
        (
            "vit",  # patches of 4x4 and a class token; a block as the decoder's in test_text.py
            (3, 32, 32),
            10,
            49 * 128 + 66 * 128 + 2 * (4 * 128 + 4 * 129 * 128 + 129 * 512 + 513 * 128) + 256 + 1290,
        ),
        (
            "vit-adapters",  # patches of 8x8; LayerNorms, attention, the hidden layer and adapters of half the width
            (3, 32, 32),
            10,
            193 * 256
            + 18 * 256
            + 4 * (4 * 256 + 4 * 257 * 256 + 257 * 1024 + 1025 * 256 + 257 * 128 + 129 * 256)
            + 512
            + 2570,
        ),
        (
            "vit-adapters-12",  # adapters of a quarter of the width
            (3, 32, 32),
            10,
            193 * 256
            + 18 * 256
            + 12 * (4 * 256 + 4 * 257 * 256 + 257 * 1024 + 1025 * 256 + 257 * 64 + 65 * 256)
            + 512
            + 2570,
        ),
        # Huang et al. 2017: 7.98M; torchvision's documented count, and CheXNet's with 14 findings: 6.95M and the head
        ("densenet-121", (3, 224, 224), 1000, 7_978_856),
        ("densenet-121", (3, 224, 224), 14, 6_953_856 + 1025 * 14),
        ("cnn-1d", (12, 1000), 5, 16 * 37 + 16 * 49 + 32 * 49 + 32 * 97 + 64 * 97 + 64 * 193 + 448 + 64 * 125 * 5 + 5),
        (
            "cnn-3d",
            (1, 16, 32, 32),
            5,
            16 * 28 + 16 * 433 + 32 * 433 + 32 * 865 + 64 * 865 + 64 * 1729 + 448 + 64 * 2 * 4 * 4 * 5 + 5,
        ),
        ("lstm", (12, 100), 5, 4 * 64 * (12 + 64 + 2) + 65 * 5),
        ("gru", (12, 100), 5, 3 * 64 * (12 + 64 + 2) + 65 * 5),
        ("vit-plain", (1, 28, 28), 10, 16 * 128 + 51 * 128 + 2 * (256 + 4 * 129 * 128 + 129 * 256 + 257 * 128) + 1546),
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


@pytest.mark.slow
@pytest.mark.parametrize("name", IMAGE_MODELS)
@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 32, 32), (3, 33, 47), (1, 112, 92)])
def test_image_models_map_images_to_logits(name: str, shape: tuple[int, int, int]) -> None:
    if min(shape[1:]) < MODELS[name].info["min_size"]:
        pytest.skip("too small for it, which another test sees refused")
    model = build_model(name, input_shape=shape, outputs=7, width=NARROW.get(name))
    set_training_mode(model, "eval", dropout=False)  # nor anything else that draws
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


OF_GRIDS = [
    ("cnn-1d", (12, 100), 8),
    ("cnn-1d", (1, 33), 8),
    ("cnn-3d", (1, 8, 17, 9), 8),
    ("cnn-3d", (3, 16, 16, 16), 8),
    ("lstm", (2, 1), 1),
    ("gru", (12, 30), 1),
    ("unet", (1, 16, 16), 16),
    ("unet", (3, 33, 47), 16),
    ("unet", (1, 16, 17, 28), 16),
]


@pytest.mark.parametrize(("name", "shape", "least"), OF_GRIDS)
def test_models_of_signals_volumes_and_maps(name: str, shape: tuple[int, ...], least: int) -> None:
    """Logits of each example, or of each of its pixels, twice differentiable; what is too small is refused."""
    model = build_model(name, input_shape=shape, outputs=3, width=4)
    set_training_mode(model, "eval")
    x = torch.randn(2, *shape, generator=generator()).requires_grad_()
    logits = model(x)
    assert logits.shape == (2, 3, *(shape[1:] if name == "unet" else ()))
    torch.testing.assert_close(logits[:1], model(x[:1]), rtol=1e-4, atol=1e-4)
    first = torch.autograd.grad(logits.square().sum(), list(model.parameters()), create_graph=True)
    (second,) = torch.autograd.grad(torch.stack([g.square().sum() for g in first]).sum(), x)
    assert second.isfinite().all()
    assert second.any()
    if least > 1:
        with pytest.raises(BadInput, match=f"at least {least}") as error:
            build_model(name, input_shape=(shape[0], *[least] * (len(shape) - 2), least - 1), outputs=3)
        assert name in one_line(error)


@pytest.mark.parametrize("shape", [(1, 32, 32), (1, 16, 16, 16)])
def test_unet_is_the_papers_network(shape: tuple[int, ...]) -> None:
    """Of 64 channels it is Ronneberger's, of 31,030,658 parameters, and BatchNorm's; each level halves the sides."""
    model = build_model("unet", input_shape=shape, outputs=2, width=64 if len(shape) == 3 else 4)
    norms = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    assert len(norms) == 18
    if len(shape) == 3:
        assert count(model) - sum(2 * m.num_features for m in norms) == 31_030_658
    seen: list[tuple[int, ...]] = []
    for module in model.modules():
        if isinstance(module, nn.Conv2d | nn.Conv3d):
            module.register_forward_hook(lambda _module, _inputs, output: seen.append(tuple(output.shape[2:])))
    model.eval()(torch.zeros(1, *shape))
    sides = [side for level in (0, 1, 2, 3, 4, 3, 2, 1, 0) for side in [tuple(n >> level for n in shape[1:])] * 2]
    assert seen == [*sides, shape[1:]]


def test_unet_hands_what_it_saw_across() -> None:
    """A pixel of the map depends on its own pixel, whose resolution is lost on the way down, and on distant ones."""
    model = build_model("unet", input_shape=(1, 32, 32), outputs=1, width=8).eval()
    x = torch.rand(1, 1, 32, 32, generator=generator()).requires_grad_()
    (slope,) = torch.autograd.grad(model(x)[0, 0, 5, 5], x)
    assert slope[0, 0, 5, 5] != 0
    assert slope[0, 0, 20:, 20:].any()


@pytest.mark.parametrize("name", ["lstm", "gru"])
def test_recurrent_networks_read_a_signal_in_time(name: str) -> None:
    """Step by step through torch's own cell, from the first to the last: the same logits."""
    model = build_model(name, input_shape=(3, 7), outputs=4, width=5).eval()
    layer = model.get_submodule("recurrent")
    cell = (nn.LSTMCell if name == "lstm" else nn.GRUCell)(3, 5)
    cell.load_state_dict({key.removesuffix("_l0"): value for key, value in layer.state_dict().items()})
    x = torch.randn(2, 3, 7, generator=generator())
    state: Any = None
    for t in range(7):
        state = cell(x[:, :, t], state)
    hidden = state[0] if name == "lstm" else state
    head = model.get_submodule("fc")
    torch.testing.assert_close(model(x), head(hidden))


def test_densenet_joins_what_went_in() -> None:
    """Huang et al. 2017, Table 1: channels and resolution after each block of a 224x224 image."""
    model = build_model("densenet-121", input_shape=(3, 224, 224), outputs=2).eval()
    seen: dict[str, tuple[int, ...]] = {}
    for name, module in model.get_submodule("features").named_children():
        module.register_forward_hook(lambda _m, _i, out, name=name: seen.__setitem__(name, tuple(out.shape[1:])))
    with torch.no_grad():
        model(torch.zeros(1, 3, 224, 224))
    blocks = {name: shape for name, shape in seen.items() if name.startswith(("block", "transition"))}
    assert blocks == {
        "block1": (256, 56, 56), "transition1": (128, 28, 28), "block2": (512, 28, 28), "transition2": (256, 14, 14),
        "block3": (1024, 14, 14), "transition3": (512, 7, 7), "block4": (1024, 7, 7),
    }  # fmt: skip
    assert sum(isinstance(m, nn.Conv2d | nn.Linear) for m in model.modules()) == 121


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
        assert set(inputs_of(entry)) <= set(EXAMPLE_KINDS.names())


@pytest.mark.parametrize(
    ("name", "arguments", "words"),
    [
        ("resnet20_4", {}, "did you mean 'resnet20-4'"),
        ("resnet20", {"input_shape": (30,)}, "takes images"),
        ("lenet", {"input_shape": (28, 28)}, "takes images"),
        ("resnet20", {"width": 0}, "width is 0"),
        ("unet", {"input_shape": (12, 100)}, r"images \(channels, height, width\) or volumes"),
        ("cnn-3d", {}, "takes volumes"),
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
