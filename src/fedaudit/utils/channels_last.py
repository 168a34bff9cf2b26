"""Channels last: the memory order in which convolutions are fastest, and the ones that must not run in it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

# oneDNN takes this many input channels at a time with AVX-512; with AVX2 half as many.
_BLOCK = 16


def channels_last(tensor: Tensor) -> Tensor:
    """Return ``tensor`` channels last, contiguous where it isn't of images or filters (n, channels, height, width)."""
    return tensor.contiguous(memory_format=torch.channels_last) if tensor.ndim == 4 else tensor.contiguous()


def usual_order(tensor: Tensor) -> Tensor:
    """Return ``tensor`` in the usual order, a copy of images or filters.

    With one channel both orders have the same memory, but convolutions go by the strides, which ``contiguous()``
    leaves.
    """
    return tensor.clone(memory_format=torch.contiguous_format) if tensor.ndim == 4 else tensor.contiguous()


def is_miscomputed(filters: Sequence[int], stride: Sequence[int]) -> bool:
    """Return whether oneDNN may get a convolution's gradient on its filters wrong where the images are channels last.

    It writes past the end of its memory, which gives wrong numbers or ends the process
    (https://github.com/uxlfoundation/oneDNN/issues/6035, still open; seen with torch 2.13). ``filters``: the shape
    (outputs, channels of a group, height, width).
    """
    return {*filters[2:]} == {1} and max(stride) > 1 and filters[1] < _BLOCK
