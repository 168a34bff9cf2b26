"""The registry that the architecture families fill."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from fedaudit.utils.registry import Registry

ModelBuilder = Callable[[tuple[int, ...], int, int | None], nn.Module]

MODELS: Registry[ModelBuilder] = Registry("model", "fedaudit.models")
"""Functions ``(input_shape, outputs, width) -> nn.Module``; shapes without the batch; ``width=None``: the default.

``info`` holds ``input`` ("image": (channels, height, width), or "any"), ``paper``, ``min_size`` (pixels; images only)
and ``width`` (the default; None where the architecture has none).
"""
