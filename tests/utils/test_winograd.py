"""Winograd's convolutions against torch's in float64, and which ones of a model they take the place of."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

from fedaudit.attacks.inversion.engines.first_order import first_order, traced
from fedaudit.attacks.inversion.engines.guarded import AGREEMENT
from fedaudit.attacks.inversion.engines.reference import one_gradient, reference
from fedaudit.attacks.inversion.objectives import weighted_cosine
from fedaudit.attacks.victim import Victim
from fedaudit.models import initialise
from fedaudit.utils import native, winograd
from fedaudit.utils.seeds import generator
from tests.conftest import core, refused

pytestmark = pytest.mark.usefixtures("native_code")
needs_compiler = pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler")


@pytest.fixture
def fresh_kernels(monkeypatch, tmp_path):
    """Give the test an empty cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    native.kernels.cache_clear()
    yield tmp_path / "fedaudit"
    native.kernels.cache_clear()


def random(shape: tuple[int, ...], seed: int) -> Tensor:
    return torch.randn(shape, generator=generator(seed, "winograd"))


def assert_exact(n: int, c: int, k: int, height: int, width: int, padding: int) -> None:
    """Compare the convolution and both gradients with torch's direct ones in float64."""
    x, w = random((n, c, height, width), 1), random((k, c, 3, 3), 2)
    leaves = (x.double().requires_grad_(), w.double().requires_grad_())
    expected = F.conv2d(leaves[0], leaves[1], padding=padding)
    dy = random(tuple(expected.shape), 3)
    dx, dw = winograd.convolve_backward(dy, x, w, padding, True, True)
    wanted = [expected.detach(), *torch.autograd.grad(expected, leaves, dy.double())]
    for ours, exact in zip([winograd.convolve(x, w, padding), dx, dw], wanted, strict=True):
        assert ours.shape == exact.shape
        # float32's rounding, times what the transforms' constants add to it
        assert (ours.double() - exact).norm() <= 1e-5 * exact.norm()
    only_dx, nothing = winograd.convolve_backward(dy, x, w, padding, True, False)
    assert only_dx.equal(dx)
    assert nothing.numel() == 0
    nothing, only_dw = winograd.convolve_backward(dy, x, w, padding, False, True)
    assert only_dw.equal(dw)
    assert nothing.numel() == 0


@needs_compiler
@settings(max_examples=30, deadline=None)
@given(
    n=st.integers(1, 3),
    c=st.sampled_from([32, 64, 96]),
    k=st.sampled_from([32, 64, 128]),
    height=st.integers(3, 19),
    width=st.integers(3, 19),
    padding=st.integers(0, 2),
)
def test_convolution_and_gradients_are_torch_s(n, c, k, height, width, padding):
    assert_exact(n, c, k, height, width, padding)


def test_the_count_of_operations_is_a_quarter_of_a_direct_convolution_s():
    assert winograd.flops((2, 32, 16, 8), (64, 32, 3, 3), 1) * 4 == 2 * 9 * 32 * 64 * 2 * 16 * 8
    assert winograd.flops((1, 32, 5, 5), (32, 32, 3, 3), 1) == 2 * 36 * 4 * 32 * 32  # the last tiles are cut off


@needs_compiler
def test_an_image_of_one_pixel():
    assert_exact(2, 32, 32, 1, 1, 1)


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("capability", core(["AVX512", "AVX2", "DEFAULT"], "AVX512"))
def test_every_width_of_vectors(capability, monkeypatch, fresh_kernels):
    own = torch.backends.cpu.get_cpu_capability()
    if capability != "DEFAULT" and own not in {"AVX512", capability}:
        pytest.skip(f"this processor has {own}")
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    native.build()
    assert_exact(2, 64, 32, 9, 14, 1)
    assert len(list(fresh_kernels.iterdir())) == 1
    assert native.native_code().startswith(f"winograd {capability} ")


@needs_compiler
def test_other_memory_orders_give_the_same_bits():
    x, w = random((2, 32, 8, 8), 1), random((32, 32, 3, 3), 2)
    last_x, last_w = (t.contiguous(memory_format=torch.channels_last) for t in (x, w))
    assert winograd.convolve(x, w, 1).equal(winograd.convolve(last_x, last_w, 1))


def operators(module: nn.Module, images: Tensor) -> list[object]:
    """Return the operators of the module's traced loss and gradients after the substitution."""
    parameters = dict(module.named_parameters())

    def gradients(x: Tensor, *leaves: Tensor) -> tuple[Tensor, ...]:
        result = torch.func.functional_call(module, dict(zip(parameters, leaves, strict=True)), (x,))
        return torch.autograd.grad(result.square().sum(), [x, *leaves])

    arguments = [t.detach().requires_grad_() for t in (images, *parameters.values())]
    graph = make_fx(gradients, tracing_mode="fake", _allow_non_fake_inputs=True)(*arguments)
    winograd.substitute(graph)
    with torch.no_grad():
        ours = graph(*arguments)
    for mine, theirs in zip(ours, gradients(*arguments), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4 * theirs.abs().max().item())
    return [node.target for node in graph.graph.nodes]


def is_ours(target: object) -> bool:
    return "convolve" in str(target)


@needs_compiler
@pytest.mark.parametrize("bias", [False, True])
def test_a_convolution_that_qualifies_is_replaced(bias):
    found = operators(nn.Conv2d(32, 64, 3, padding=1, bias=bias), random((1, 32, 16, 16), 1))
    assert any("convolve" in str(target) and "backward" not in str(target) for target in found)
    assert any("convolve_backward" in str(target) for target in found)
    assert torch.ops.aten.convolution.default not in found
    assert torch.ops.aten.convolution_backward.default not in found


@pytest.mark.parametrize(
    ("convolution", "size"),
    [
        (nn.Conv2d(32, 32, 3, padding=1, stride=2), 32),
        (nn.Conv2d(32, 32, 3, padding=1, dilation=2), 32),
        (nn.Conv2d(32, 32, 3, padding=1, groups=2), 32),
        (nn.Conv2d(32, 32, 3, padding=(1, 0)), 32),
        (nn.ConvTranspose2d(32, 32, 3, padding=1), 32),
        (nn.Conv2d(32, 32, 5, padding=2), 32),
        (nn.Conv2d(32, 48, 3, padding=1), 32),
        (nn.Conv2d(32, 32, 3, padding=1), 4),  # one tile: too few
    ],
    ids=["stride", "dilation", "groups", "uneven-padding", "transposed", "kernel", "channels", "small"],
)
def test_others_stay(convolution, size):
    assert not any(map(is_ours, operators(convolution, random((1, 32, size, size), 1))))


def small_victim() -> Victim:
    module = nn.Sequential(
        *(nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32)),
        *(nn.ReLU(), nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(64 * 144, 5)),
    )
    initialise(module, "default", generator(0, "model"))
    module.eval()
    parameters = {n: p.detach().clone() for n, p in module.named_parameters()}
    return Victim(module, F.cross_entropy, parameters, dict(module.named_buffers()))


def engine_agrees(victim: Victim, run_pass: Callable[..., Any]) -> None:
    images, labels = random((2, 3, 12, 12), 4), torch.tensor([1, 3])
    leaves = {n: p.clone().requires_grad_() for n, p in victim.parameters.items()}
    target = torch.autograd.grad(victim.value(leaves, random((2, 3, 12, 12), 5), labels), list(leaves.values()))
    distance = weighted_cosine(target, [1.0] * len(target))
    engine = first_order(victim, labels, one_gradient(2), distance, run_pass)
    value, gradient = engine(images)
    again_value, again = engine(images)
    assert again_value.equal(value)
    assert again.equal(gradient)
    exact_value, exact = reference(victim, labels, one_gradient(2), distance)(images)
    torch.testing.assert_close(value, exact_value)
    assert F.cosine_similarity(gradient.flatten(), exact.flatten(), dim=0) > AGREEMENT


@needs_compiler
@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_first_order_engine_agrees_with_double_backward(compiled, monkeypatch):
    kernels = Mock(wraps=native.kernels)
    monkeypatch.setattr(winograd, "kernels", kernels)
    victim, notes = small_victim(), list[str]()
    engine_agrees(victim, traced(victim, notes, compiled=compiled))
    assert notes == []
    assert kernels.call_count > 2  # one for each traced pass, the others for convolutions


def test_nothing_is_compiled_at_run_time_and_the_finding_says_that_torch_s_convolutions_stayed(fresh_kernels):
    victim, notes = small_victim(), list[str]()
    engine_agrees(victim, traced(victim, notes))
    (note,) = notes
    assert "torch's own convolutions" in note
    assert "not built: fedaudit doctor --build" in note
    assert not fresh_kernels.exists()
    assert native.native_code() == "none"


@pytest.mark.slow
@needs_compiler
def test_what_was_built_for_another_processor_or_version_is_not_loaded(fresh_kernels, monkeypatch, tmp_path):
    native.build()
    assert native.native_code() != "none"
    native.kernels.cache_clear()
    source = tmp_path / "winograd.cpp"
    source.write_text(native._SOURCE.read_text() + "// another version")
    for change in (
        lambda patch: patch.setattr(native, "_SOURCE", source),
        lambda patch: patch.setattr("platform.machine", lambda: "another"),
        lambda patch: patch.setattr(native, "_options", lambda: ["-O0"]),
    ):
        with monkeypatch.context() as patch:
            change(patch)
            with pytest.raises(native.Unavailable, match="fedaudit doctor --build"):
                native.kernels()
            assert native.native_code() == "none"


def test_damaged_native_code_is_not_loaded(fresh_kernels):
    fresh_kernels.mkdir()
    native.path().write_bytes(b"damaged")
    with pytest.raises(native.Unavailable, match="delete"):
        native.kernels()


@needs_compiler
def test_a_compiler_that_refuses_is_no_compiler(monkeypatch, fresh_kernels):
    monkeypatch.setenv("CXX", "false")
    with pytest.raises(native.Unavailable):
        native.build()
    assert list(fresh_kernels.iterdir()) == []


@pytest.mark.slow
@needs_compiler
def test_doctor_builds_and_says_what_is_used(command, fresh_kernels, monkeypatch):
    before = command("doctor")
    assert before.code == 0
    assert "not built: fedaudit doctor --build" in " ".join(before.out.split())
    built = command("doctor", "--build")
    assert (built.code, built.err) == (0, "")
    assert f"native code: {native.native_code()}, {native.path()}\n" == built.out
    assert native.native_code() in command("doctor").out
    made = native.path().stat().st_mtime_ns
    assert command("doctor", "--build").code == 0
    assert native.path().stat().st_mtime_ns == made  # it was there


def test_without_a_compiler_doctor_says_that_all_works(command, fresh_kernels, monkeypatch, tmp_path):
    monkeypatch.setenv("CXX", str(tmp_path / "nothing"))
    refused(command("doctor", "--build"), "everything works without it")
