"""Calls of torch's functions, told as they are made."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

# not in torch's documentation; where it isn't there, nothing is paused
_current_mode: Callable[[], Any] = getattr(torch.overrides, "_get_current_function_mode", lambda: None)


class Functions(TorchFunctionMode):
    """Tells a capture of calls of the functions that it asks for; every call goes on unchanged.

    Every call of torch takes some microseconds more meanwhile, so it is paused where none is asked for: within the
    model's forward pass and the optimiser's step.
    """

    def __init__(self, told: dict[Any, Callable[..., None]]) -> None:
        super().__init__()
        self._told = told
        self._paused = False

    def pause(self) -> None:
        """Tell of nothing, until :meth:`resume`, unless another mode was entered meanwhile."""
        if not self._paused and _current_mode() is self:
            self.__exit__(None, None, None)
            self._paused = True

    def resume(self) -> None:
        """Tell again."""
        if self._paused:
            self._paused = False
            self.__enter__()

    def stop(self) -> None:
        """Tell of nothing from now on, and forget whom."""
        if not self._paused:
            self.__exit__(None, None, None)
        self._told = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        told = self._told.get(func)
        if told is None or torch.compiler.is_compiling():
            return func(*args, **(kwargs or {}))
        if func is torch.Tensor.backward:  # its graph is gone afterwards
            told(func, args, kwargs or {}, None)
            return func(*args, **(kwargs or {}))
        result = func(*args, **(kwargs or {}))
        told(func, args, kwargs or {}, result)
        return result
