"""3×3 convolutions by Winograd's minimal filtering, in place of torch's own (Lavin & Gray 2016).

In a traced pass (:func:`substitute`), or as a layer is run, with autograd (:func:`conv2d`).

F(4×4, 3×3) takes a quarter of the multiplications. Its rounding error, some five times that of a direct one, is far
below the length of the passes' finite difference (docs/evidence/performance.md). The kernels are C++
(``winograd.cpp``), built by ``fedaudit doctor --build`` (``native.py``); where they weren't, torch's convolutions stay.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.fx import Graph, GraphModule, Node

from fedaudit.utils.native import kernels

_ATEN = torch.ops.aten
_PANEL = 32  # channels that the kernels take at a time
_TILE = 4
# Fewer tiles don't repay the transformation of the filters.
_LEAST_TILES = 4


def convolve(x: Tensor, w: Tensor, padding: int) -> Tensor:
    """Return the convolution of stride 1, channels last, with ``padding`` zeros on each side.

    Args:
        x: (n, c, height, width) float32 images on the CPU; c and k multiples of 32.
        w: (k, c, 3, 3) filters.
    """
    x, w = _channels_last(x), _channels_last(w)
    y = _like_output(x, w, padding)
    kernels().convolve(_at(x), _at(w), _at(y), *_sizes(x, w), padding)
    return y


def convolve_backward(
    dy: Tensor, x: Tensor, w: Tensor, padding: int, wants_images: bool, wants_filters: bool
) -> tuple[Tensor, Tensor]:
    """Return :func:`convolve`'s gradients on the images and on the filters, empty where they aren't wanted."""
    dy, x, w = _channels_last(dy), _channels_last(x), _channels_last(w)
    dx, dw = _like_gradients(dy, x, w, padding, wants_images, wants_filters)
    kernels().convolve_backward(
        *(_at(dy), _at(x), _at(w), _at(dx) if wants_images else None, _at(dw) if wants_filters else None),
        *(*_sizes(x, w), padding),
    )
    return dx, dw


def _channels_last(tensor: Tensor) -> Tensor:
    return tensor.contiguous(memory_format=torch.channels_last)


def _at(tensor: Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())


def _sizes(x: Tensor, w: Tensor) -> tuple[int, ...]:
    n, c, height, width = x.shape
    return n, height, width, c, w.shape[0]


def _like_output(x: Tensor, w: Tensor, padding: int) -> Tensor:
    n, _, height, width = x.shape
    shape = (n, w.shape[0], height + 2 * padding - 2, width + 2 * padding - 2)
    return torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=torch.channels_last)


def _like_gradients(
    _dy: Tensor, x: Tensor, w: Tensor, _padding: int, wants_images: bool, wants_filters: bool
) -> tuple[Tensor, Tensor]:
    dx, dw = (
        torch.empty_like(t, memory_format=torch.channels_last) if wanted else t.new_empty(0)
        for t, wanted in ((x, wants_images), (w, wants_filters))
    )
    return dx, dw


_registered: list[torch.library.Library] = []  # torch forgets a declaration with its object


def register() -> None:
    """Make operators of the kernels for torch's compiler and counters alone; a traced pass calls the functions."""
    if _registered:
        return
    library = torch.library.Library("fedaudit", "DEF")
    library.define("convolve(Tensor x, Tensor w, int padding) -> Tensor")
    library.define(
        "convolve_backward(Tensor dy, Tensor x, Tensor w, int padding, bool images, bool filters) -> (Tensor, Tensor)"
    )
    for name, kernel, fake in (
        ("convolve", convolve, _like_output),
        ("convolve_backward", convolve_backward, _like_gradients),
    ):
        library.impl(name, kernel, "CPU")
        library.impl(name, fake, "Meta")
    _registered.append(library)


def _targets() -> tuple[Callable[..., Any], Callable[..., Any]]:
    if not _registered:
        return convolve, convolve_backward
    return torch.ops.fedaudit.convolve.default, torch.ops.fedaudit.convolve_backward.default


def _tiles(x: Sequence[int], padding: int) -> int:
    n, _, height, width = x
    return n * -(-(height + 2 * padding - 2) // _TILE) * -(-(width + 2 * padding - 2) // _TILE)


def flops(x: Sequence[int], w: Sequence[int], padding: int) -> int:
    """Return the floating-point operations of a convolution's matrix products, or of one of its gradients'."""
    return 2 * (_TILE + 2) ** 2 * _tiles(x, padding) * w[0] * w[1]


def flop_counters() -> dict[Any, Any]:
    """Return the ``custom_mapping`` with which ``torch.utils.flop_counter.FlopCounterMode`` counts our operators."""
    register()

    def gradients(_dy: Any, x: Any, w: Any, padding: int, images: bool, filters: bool, **_: Any) -> int:
        return (images + filters) * flops(x, w, padding)

    return {
        torch.ops.fedaudit.convolve: lambda x, w, padding, **_: flops(x, w, padding),
        torch.ops.fedaudit.convolve_backward: gradients,
    }


def substitute(module: GraphModule) -> None:
    """Let a module traced to ATen operators take its convolutions from here where that is faster.

    That depends on their shapes alone, so that the same scenario gives the same bits. Unavailable, if there is no
    native code for them, leaves the module as it was.
    """
    forward, backward = _ATEN.convolution.default, _ATEN.convolution_backward.default
    nodes = [node for node in module.graph.nodes if node.target in (forward, backward) and _pays(node)]
    if nodes:
        kernels()
    for node in nodes:
        (_substitute_forward if node.target is forward else _substitute_backward)(module.graph, node)
    module.graph.eliminate_dead_code()
    module.recompile()


def _pays(node: Node) -> bool:
    arguments: list[Any] = list(node.args)
    # without the gradient and the biases both operators' arguments are the same
    images, filters, stride, padding, dilation, transposed, _, groups = (
        [*arguments[:2], *arguments[3:9]]
        if node.target is _ATEN.convolution.default
        else [*arguments[1:3], *arguments[4:10]]
    )
    if transposed or images.meta["val"].ndim != 4:
        return False
    return _is_faster(images.meta["val"], filters.meta["val"], stride, padding, dilation, groups)


def _is_faster(
    x: Tensor, w: Tensor, stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int], groups: int
) -> bool:
    """Return whether a two-dimensional convolution is one of those that are faster here."""
    if tuple(w.shape[2:]) != (3, 3) or {x.dtype, w.dtype} != {torch.float32} or x.device.type != "cpu":
        return False
    if groups != 1 or {*stride, *dilation} != {1} or len({*padding}) != 1:
        return False
    channels_fit = x.shape[1] % _PANEL == 0 and w.shape[0] % _PANEL == 0
    return channels_fit and _tiles(x.shape, padding[0]) >= _LEAST_TILES


def conv2d(layer: nn.Conv2d, x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
    """Return what ``layer`` makes of images with filters (k, c / groups, height, width), with autograd.

    It is computed here where that is faster, which depends on shapes alone, else as torch does.
    """
    padding = layer.padding
    shapes_fit = x.ndim == 4 and x.shape[1] == w.shape[1]
    if (
        shapes_fit
        and not isinstance(padding, str)
        and _is_faster(x, w, layer.stride, padding, layer.dilation, layer.groups)
    ):
        return cast("Tensor", _Convolution.apply(x, w, bias, padding[0]))
    return nn.functional.conv2d(x, w, bias, layer.stride, padding, layer.dilation, layer.groups)


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, bias: Tensor | None, padding: int) -> Tensor:
        ctx.save_for_backward(x, w)
        ctx.padding = padding
        y = convolve(x, w, padding)
        return y if bias is None else y.add_(bias.view(-1, 1, 1))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        x, w = ctx.saved_tensors
        wants_x, wants_w, wants_bias, _ = ctx.needs_input_grad
        dx, dw = convolve_backward(dy, x, w, ctx.padding, wants_x, wants_w) if wants_x or wants_w else (None, None)
        return dx if wants_x else None, dw if wants_w else None, dy.sum((0, 2, 3)) if wants_bias else None, None


def _substitute_forward(graph: Graph, node: Node) -> None:
    arguments: list[Any] = list(node.args)
    x, w, bias, _, (padding, _), *_ = arguments
    with graph.inserting_before(node):
        result = graph.call_function(_targets()[0], (x, w, padding))
        if bias is not None:
            column = graph.call_function(_ATEN.view.default, (bias, [-1, 1, 1]))
            result = graph.call_function(_ATEN.add.Tensor, (result, column))
    node.replace_all_uses_with(result)


def _substitute_backward(graph: Graph, node: Node) -> None:
    arguments: list[Any] = list(node.args)
    dy, x, w, _, _, (padding, _), _, _, _, _, (images, filters, _) = arguments
    with graph.inserting_before(node):
        result = graph.call_function(_targets()[1], (dy, x, w, padding, images, filters))
    parts: list[Any] = list(node.users)
    for part in parts:
        if part.args[1] < 2:
            part.replace_input_with(node, result)
            continue
        with graph.inserting_before(part):
            total = graph.call_function(_ATEN.sum.dim_IntList, (dy, [0, 2, 3]))
        part.replace_all_uses_with(total)
