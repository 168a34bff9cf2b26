"""Faster arithmetic for local training: the same numbers to rounding, so a setting of the federation's."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from fedaudit.models import set_training_mode
from fedaudit.utils.channels_last import is_miscomputed
from fedaudit.utils.native import Unavailable, kernels
from fedaudit.utils.winograd import conv2d


@contextmanager
def fast_arithmetic(model: nn.Module) -> Iterator[None]:
    """Let ``model`` run channels last, and its 3×3 convolutions by Winograd's filtering where that is faster.

    Which convolutions those are depends on shapes alone; without the native code it is none. The filters are in the
    usual memory order afterwards, whatever happens.
    """
    filters = [p for p in model.parameters() if p.ndim == 4]  # torch carries their order on to what they give
    layers = [m for m in model.modules() if type(m) is nn.Conv2d and m.padding_mode == "zeros"] if _native() else []

    def arrange(order: torch.memory_format) -> None:
        for parameter in filters:
            parameter.data = parameter.data.to(memory_format=order)  # contiguous() leaves one channel's as it is

    arrange(torch.channels_last)
    try:
        for layer in layers:
            vars(layer)["_conv_forward"] = partial(conv2d, layer)
        yield
    finally:
        for layer in layers:
            vars(layer).pop("_conv_forward", None)
        arrange(torch.contiguous_format)


def _native() -> bool:
    try:
        kernels()
    except Unavailable:
        return False
    return True


def runs_fast(model: nn.Module, inputs: Tensor) -> bool:
    """Return whether ``model`` can be trained so: it is on the CPU, and no part of it needs the usual order."""
    if any(p.device.type != "cpu" for p in model.parameters()):
        return False
    if any(isinstance(m, nn.Conv2d) and is_miscomputed(m.weight.shape, m.stride) for m in model.modules()):
        return False
    tried = copy.deepcopy(model)
    set_training_mode(tried, "eval", dropout=False)
    try:
        with fast_arithmetic(tried):
            tried(inputs).sum().backward()
    except Exception:
        return False
    return True
