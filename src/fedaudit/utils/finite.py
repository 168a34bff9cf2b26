"""Whether tensors hold numbers only."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor


def all_finite(tensors: Iterable[Tensor]) -> bool:
    """Return whether no element of ``tensors`` is NaN or infinite.

    A finite sum has finite terms only, and takes a fraction of the time of ``isfinite()``; it may overflow, so where it
    isn't finite they are looked at one by one.
    """
    return all(bool(tensor.sum().isfinite()) or bool(tensor.isfinite().all()) for tensor in tensors)
