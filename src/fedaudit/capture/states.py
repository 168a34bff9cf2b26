"""States as frameworks hand them over: tensors or arrays by name."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fedaudit.utils.errors import BadInput

State = Mapping[str, Any]  # name to a tensor, or to an array that torch takes


def tensors_of(state: State) -> dict[str, Tensor]:
    """Return a state as tensors on the CPU that share no memory with each other.

    Raises:
        BadInput: something in it is no array.
    """
    found: dict[str, Tensor] = {}
    for name, value in state.items():
        try:
            tensor = value.detach() if isinstance(value, Tensor) else _from_array(value)
        except (TypeError, ValueError, RuntimeError) as error:
            raise BadInput(f"the state's '{name}' is no tensor or array of numbers: {error}") from None
        found[name] = tensor.cpu().contiguous()
    shared: set[int] = set()
    for name, tensor in found.items():  # tied weights: safetensors takes each memory once
        place = tensor.untyped_storage().data_ptr()
        if place in shared and tensor.numel():
            found[name] = tensor.clone()
        shared.add(place)
    return found


def _from_array(value: Any) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # arrays that can't be written to: nobody does
        return torch.as_tensor(value)
