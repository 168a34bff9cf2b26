"""Models: the published counts, which inputs they take, what is refused, and BatchNorm's mode."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fedaudit.models import MODELS, build_model, has_batch_norm, set_training_mode
from fedaudit.utils.errors import BadInput
from tests.models.model_cases import generator, one_line

IMAGE_MODELS = [entry.name for entry in MODELS if entry.info["input"] == "image"]
NARROW = {"resnet20-4": 8, "resnet18": 8, "resnet50": 8, "convnet": 8, "resnet56": 8}


def count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


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
        assert entry.info["input"] in ("image", "tokens", "any")


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
