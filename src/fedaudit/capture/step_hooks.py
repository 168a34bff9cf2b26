"""Torch's hooks on the steps of all optimisers, registered once for whoever listens.

Torch goes through its table of these hooks while it calls them, so that a hook which one thread adds or takes away in
the meantime stops the training of another. The table changes when the first listener comes, and when the last leaves
while no other thread is alive. (Of the hooks of modules torch makes a copy first.)
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch.optim import Optimizer
from torch.optim import optimizer as hooks

_Told = Callable[[Optimizer, tuple[Any, ...], dict[str, Any]], None]


@dataclass(frozen=True, eq=False)
class Listener:
    """Whom to tell before and after an optimiser's step, in any thread."""

    stepping: _Told
    stepped: _Told


_listeners: tuple[Listener, ...] = ()  # never changed in place: other threads go through it
_handles: list[Any] = []
_lock = threading.Lock()


def listen(listener: Listener) -> None:
    """Tell it, until :func:`forget`."""
    global _listeners
    with _lock:
        _listeners = (*_listeners, listener)
        if not _handles:
            _handles.append(hooks.register_optimizer_step_pre_hook(_stepping))
            _handles.append(hooks.register_optimizer_step_post_hook(_stepped))


def forget(listener: Listener) -> None:
    """Tell it no more."""
    global _listeners
    with _lock:
        _listeners = tuple(other for other in _listeners if other is not listener)
        while _handles and not _listeners and threading.active_count() == 1:
            _handles.pop().remove()


def _stepping(optimiser: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    for listener in _listeners:
        listener.stepping(optimiser, args, kwargs)


def _stepped(optimiser: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    for listener in _listeners:
        listener.stepped(optimiser, args, kwargs)
