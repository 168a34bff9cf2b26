"""Plain tensors of what libraries make of them: MONAI's, for one, know whose image they are, and refuse to be cut."""

from __future__ import annotations

from torch import Tensor
from torch._C import DisableTorchFunctionSubclass


def plain(tensor: Tensor) -> Tensor:
    """Return a tensor on the same memory, without gradient and of torch's own class."""
    with DisableTorchFunctionSubclass():
        return tensor.detach().as_subclass(Tensor)


def plain_copy(tensor: Tensor) -> Tensor:
    """Return a copy of that on the CPU."""
    return plain(tensor).to("cpu", copy=True)
