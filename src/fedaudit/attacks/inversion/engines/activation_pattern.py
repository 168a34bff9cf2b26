"""Record the activation pattern of a network in one forward pass, and hold it fixed in another.

The pattern says on which linear piece every activation was: which ReLUs were active, which input a pooling window took.
With it held fixed a network of piecewise linear activations is smooth in its parameters, so a finite difference of two
first-order gradients is their mixed second derivative (docs/evidence/performance.md). It works on any module: torch
functions are intercepted, models aren't rewritten.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode


class ActivationPattern(TorchFunctionMode):
    """Runs a module as usual and records the pattern of calls in :data:`RULES`; or holds the one given as ``fixed``."""

    def __init__(self, fixed: Sequence[Any] | None = None) -> None:
        super().__init__()
        self.recorded: list[Any] = []
        self._fixed = None if fixed is None else iter(fixed)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Intercept ``func`` if it is piecewise."""
        rule = RULES.get(func)
        if rule is None:
            return func(*args, **(kwargs or {}))
        record, replay = rule
        if self._fixed is not None:
            return replay(next(self._fixed), func, *args, **(kwargs or {}))
        result, entry = record(func, *args, **(kwargs or {}))
        self.recorded.append(entry)
        return result


# ReLU: active where the first output was positive. (threshold_backward is that, in one kernel, without a mask.)


def _record_relu(func: Any, x: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    result = func(x, *args, **kwargs)
    return result, result.detach()


def _replay_relu(first: Tensor, _func: Any, x: Tensor, *_args: Any, **_kwargs: Any) -> Tensor:
    return torch.as_tensor(torch.ops.aten.threshold_backward(x, first, 0))


# Piecewise linear functions of one tensor: y = offset + slope·x on the piece where x was.


def _record_affine(func: Any, x: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    with torch.enable_grad():
        leaf = x.detach().clone().requires_grad_()
        value = func(leaf * 1, *args, **kwargs)  # not the leaf itself: the function may work in place
        (slope,) = torch.autograd.grad(value.sum(), leaf)
    offset = value.detach() - slope * x.detach()
    return func(x, *args, **kwargs), (slope, offset)


def _replay_affine(kept: tuple[Tensor, Tensor], _func: Any, x: Tensor, *_args: Any, **_kwargs: Any) -> Tensor:
    slope, offset = kept
    return torch.addcmul(offset, x, slope)


# PReLU: the slope below zero is a parameter itself.


def _record_prelu(func: Any, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    return func(x, weight), (x > 0).detach()


def _replay_prelu(positive: Tensor, _func: Any, x: Tensor, weight: Tensor) -> Tensor:
    shape = (1, -1, *[1] * (x.ndim - 2)) if x.ndim > 1 else (-1,)
    return torch.where(positive, x, weight.view(shape) * x)


# Dropout: the mask.


def _record_dropout(func: Any, x: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    mask = func(torch.ones_like(x), *args, **kwargs).detach()
    return x * mask, mask


def _replay_dropout(mask: Tensor, _func: Any, x: Tensor, *_args: Any, **_kwargs: Any) -> Tensor:
    return x * mask


# Which of several: two tensors, a dimension, a pooling window.


def _record_larger(func: Any, a: Tensor, b: Tensor, **kwargs: Any) -> tuple[Tensor, Tensor]:
    result = func(a, b, **kwargs)
    return result, (result == a).detach()


def _replay_larger(first: Tensor, _func: Any, a: Tensor, b: Tensor, **_kwargs: Any) -> Tensor:
    return torch.where(first, a, b)


def _pooling(
    with_indices: Callable[..., tuple[Tensor, Tensor]], dims: int
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    def record(_func: Any, x: Tensor, *args: Any, **kwargs: Any) -> tuple[Any, Tensor]:
        wanted = kwargs.pop("return_indices", False)
        values, indices = with_indices(x, *args, **kwargs, return_indices=True)
        return ((values, indices) if wanted else values), indices

    def replay(indices: Tensor, _func: Any, x: Tensor, *_args: Any, **kwargs: Any) -> Any:
        flat = x.flatten(-dims).gather(-1, indices.flatten(-dims)).view_as(indices)
        return (flat, indices) if kwargs.get("return_indices", False) else flat

    return record, replay


_THRESHOLD = getattr(F, "_threshold")  # noqa: B009 (what nn.Threshold calls; not in the type stubs)
_RELU = (_record_relu, _replay_relu)
_AFFINE = (_record_affine, _replay_affine)
_LARGER = (_record_larger, _replay_larger)
_DROPOUT = (_record_dropout, _replay_dropout)

# function -> how it is recorded, how it is replayed
RULES: dict[Any, tuple[Callable[..., Any], Callable[..., Any]]] = {
    **dict.fromkeys([F.relu, torch.relu, torch.relu_, Tensor.relu, Tensor.relu_], _RELU),
    **dict.fromkeys(
        [
            *(F.leaky_relu, F.leaky_relu_, F.relu6, F.hardtanh, F.hardtanh_, F.threshold, _THRESHOLD),
            *(F.hardsigmoid, F.hardshrink, F.softshrink, torch.threshold, torch.hardshrink, Tensor.hardshrink),
            *(torch.abs, torch.abs_, Tensor.abs, Tensor.abs_, Tensor.__abs__, torch.absolute, Tensor.absolute),
            *(torch.clamp, torch.clamp_, Tensor.clamp, Tensor.clamp_, torch.clip, Tensor.clip, Tensor.clip_),
            *(torch.clamp_min, torch.clamp_max, Tensor.clamp_min, Tensor.clamp_max),
            *(Tensor.clamp_min_, Tensor.clamp_max_),
        ],
        _AFFINE,
    ),
    **dict.fromkeys([F.prelu, torch.prelu, Tensor.prelu], (_record_prelu, _replay_prelu)),
    **dict.fromkeys([torch.maximum, torch.minimum, Tensor.maximum, Tensor.minimum], _LARGER),
    **dict.fromkeys([F.dropout, F.dropout1d, F.dropout2d, F.dropout3d], _DROPOUT),
    **dict.fromkeys([F.max_pool1d, F.max_pool1d_with_indices], _pooling(F.max_pool1d_with_indices, 1)),
    **dict.fromkeys([F.max_pool2d, F.max_pool2d_with_indices], _pooling(F.max_pool2d_with_indices, 2)),
    **dict.fromkeys([F.max_pool3d, F.max_pool3d_with_indices], _pooling(F.max_pool3d_with_indices, 3)),
    F.adaptive_max_pool1d: _pooling(F.adaptive_max_pool1d_with_indices, 1),
    F.adaptive_max_pool2d: _pooling(F.adaptive_max_pool2d_with_indices, 2),
    F.adaptive_max_pool3d: _pooling(F.adaptive_max_pool3d_with_indices, 3),
}
