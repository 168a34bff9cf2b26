"""Torch's hooks of all modules and optimisers, registered once for whoever listens.

Torch walks through its table of hooks while it calls them: a hook that one thread adds or takes away in the meantime
is an error in the training of another. So a table changes when the first comes, and when the last leaves while no
other thread is alive.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.modules import module as module_hooks
from torch.optim import optimizer as optimiser_hooks


def _nothing(*_: Any) -> None:
    pass


@dataclass(frozen=True, eq=False)
class Listener:
    """Whom to tell of what any thread does, but for torch's tracing; the arguments are those of torch's hooks.

    Attributes:
        enters: told before a module's call.
        leaves: told after it, with keyword arguments; the result is None where the call failed.
        stepping, stepped: told before and after an optimiser's step.
    """

    enters: Callable[..., None] = _nothing
    leaves: Callable[..., None] = _nothing
    stepping: Callable[..., None] = _nothing
    stepped: Callable[..., None] = _nothing


_listeners: tuple[Listener, ...] = ()  # never changed in place: other threads go through it
_handles: list[Any] = []
_lock = threading.Lock()


def listen(listener: Listener) -> None:
    """Tell it, until :func:`forget`."""
    global _listeners
    with _lock:
        _listeners = (*_listeners, listener)
        if not _handles:
            _handles.extend(
                (
                    module_hooks.register_module_forward_pre_hook(_enters),
                    module_hooks.register_module_forward_hook(_leaves, with_kwargs=True, always_call=True),
                    optimiser_hooks.register_optimizer_step_pre_hook(_stepping),
                    optimiser_hooks.register_optimizer_step_post_hook(_stepped),
                )
            )


def forget(listener: Listener) -> None:
    """Tell it no more."""
    global _listeners
    with _lock:
        _listeners = tuple(other for other in _listeners if other is not listener)
        while _handles and not _listeners and threading.active_count() == 1:
            _handles.pop().remove()


def _enters(*told: Any) -> None:
    if torch.compiler.is_compiling():
        return
    for listener in _listeners:
        listener.enters(*told)


def _leaves(*told: Any) -> None:
    if torch.compiler.is_compiling():
        return
    for listener in _listeners:
        listener.leaves(*told)


def _stepping(*told: Any) -> None:
    for listener in _listeners:
        listener.stepping(*told)


def _stepped(*told: Any) -> None:
    for listener in _listeners:
        listener.stepped(*told)
