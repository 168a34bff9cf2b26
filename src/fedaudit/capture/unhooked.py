"""Tells captures of what torch has no hook for: calls of modules compiled in place, labels that a Trainer smooths."""

from __future__ import annotations

import functools
import gc
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True, eq=False)
class Listener:
    """Whom to tell: before and after a module's call, as torch's hooks are; of what smoothed labels of an output."""

    enters: Callable[[nn.Module, tuple[Any, ...]], None]
    leaves: Callable[..., None]
    smoothed: Callable[..., None]


_listeners: list[Listener] = []
_replaced: list[tuple[Any, str, Any]] = []  # of what, which attribute, and what it was
_lock = threading.RLock()


def listen(listener: Listener) -> None:
    """Tell it, until :func:`forget`; what is called stays as it is."""
    with _lock:
        if not _listeners:
            in_place = nn.Module.compile

            @functools.wraps(in_place)
            def compiles(module: nn.Module, *args: Any, **kwargs: Any) -> None:
                in_place(module, *args, **kwargs)
                _tell(module)

            _replace(nn.Module, "compile", compiles)
        _listeners.append(listener)
        if _anything_compiled():
            for thing in gc.get_objects():
                if issubclass(type(thing), nn.Module) and thing.__dict__.get("_compiled_call_impl") is not None:
                    _tell(thing)


def _anything_compiled() -> bool:
    """Return whether torch compiled anything, as far as it says: to look among all objects takes a second."""
    frames = sys.modules.get("torch._dynamo.eval_frame")
    backends = getattr(frames, "cached_backends", {None: ...}) if frames is not None else {}
    return any(backend is not None for backend in backends.values())


def forget(listener: Listener) -> None:
    """Tell it no more; what was replaced for the last one is put back."""
    with _lock:
        _listeners.remove(listener)
        while _replaced and not _listeners:
            owner, name, before = _replaced.pop()
            setattr(owner, name, before)


def listen_to_trainer() -> None:
    """Tell of labels that the Trainer of transformers smooths, which it does with no loss of torch's."""
    smoother = getattr(sys.modules.get("transformers.trainer_pt_utils"), "LabelSmoother", None)
    with _lock:
        if smoother is None or any(owner is smoother for owner, *_ in _replaced):
            return
        smooths = smoother.__call__

        @functools.wraps(smooths)
        def told(self: Any, output: Any, labels: Any, *args: Any, **kwargs: Any) -> Any:
            loss = smooths(self, output, labels, *args, **kwargs)
            for listener in [*_listeners]:
                listener.smoothed(self.epsilon, output, labels, loss)
            return loss

        _replace(smoother, "__call__", told)


def _replace(owner: Any, name: str, value: Any) -> None:
    _replaced.append((owner, name, owner.__dict__[name]))
    setattr(owner, name, value)


def _tell(module: nn.Module) -> None:
    """Let a module that is compiled in place, whose call skips all hooks, tell of it."""
    compiled: Any = module._compiled_call_impl
    with _lock:
        if compiled is None or isinstance(compiled, _Told) or not _listeners:
            return
        _replace(module, "_compiled_call_impl", _Told(module, compiled))


@dataclass(frozen=True, eq=False)
class _Told:
    module: nn.Module
    compiled: Callable[..., Any]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return self.compiled(*args, **kwargs)
        told, result = [*_listeners], None
        for listener in told:
            listener.enters(self.module, args)
        try:
            result = self.compiled(*args, **kwargs)
        finally:
            for listener in told:
                listener.leaves(self.module, args, kwargs, result)
        return result
