"""Plain tensors of what libraries make of them: MONAI's, for one, know whose image they are, and refuse to be cut."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch._C import DisableTorchFunctionSubclass, _disabled_torch_function_impl


def of_plain_class(tensor: Tensor) -> Tensor:
    """Return the tensor, with its gradient; one of a library's class, as one of torch's own."""
    if _functions_of(type(tensor)) in (_functions_of(Tensor), _disabled_torch_function_impl):
        return tensor  # torch's own subclasses, as of a trace, stay
    with DisableTorchFunctionSubclass():
        return tensor.as_subclass(Tensor)


def _functions_of(kind: Any) -> Any:
    """Return what a class of tensors makes of torch's functions."""
    return getattr(kind.__torch_function__, "__func__", kind.__torch_function__)


def plain(tensor: Tensor) -> Tensor:
    """Return a tensor on the same memory, without gradient and of torch's own class."""
    with DisableTorchFunctionSubclass():
        return tensor.detach().as_subclass(Tensor)


def plain_copy(tensor: Tensor) -> Tensor:
    """Return a copy of that on the CPU."""
    return plain(tensor).to("cpu", copy=True)
