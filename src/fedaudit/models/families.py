"""The registry that the architecture families fill."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from fedaudit.utils.registry import Entry, Registry

ModelBuilder = Callable[..., nn.Module]

ANY = "any"  # input of a model that takes examples of any kind

MODELS: Registry[ModelBuilder] = Registry("model", "fedaudit.models")
"""Functions ``(input_shape, outputs, width) -> nn.Module``; shapes without the batch.

Those that take tokens have a fourth argument, the ``TokenInfo``.

``info`` holds ``input`` (the kind of its examples, several kinds, or "any"), ``paper``, ``min_size`` (of each axis but
the channels') and ``width`` (the default; None where the architecture has none).
"""


def inputs_of(entry: Entry[ModelBuilder]) -> tuple[str, ...]:
    """Return the kinds of examples that a model takes; none for one that takes any."""
    given = entry.info["input"]
    if given == ANY:
        return ()
    return (given,) if isinstance(given, str) else tuple(given)
