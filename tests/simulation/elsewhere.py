"""A device that isn't there: tensors on it compute with the CPU's bits, and refuse what a GPU's would refuse."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

DEVICE = "meta"  # the one name, beside the CPU's, under which torch needs no driver
_ATEN = torch.ops.aten
_MOVES = (_ATEN._to_copy.default, _ATEN.copy_.default)
_BY_POSITION = (_ATEN.index.Tensor, _ATEN.index_put_.default)  # a GPU takes positions that lie on the CPU


class Elsewhere(Tensor):
    """A tensor on the device.

    Attributes:
        held: one on the CPU, with its elements.
    """

    held: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> Elsewhere:
        made = Tensor._make_wrapper_subclass(
            cls,
            inner.shape,
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=torch.device(DEVICE),
        )
        made.held = inner
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return _computed(func, args, kwargs or {})


class _Dispatch(TorchDispatchMode):
    """Sees what no tensor tells to be on the device: factories, and moves to it.

    Attributes:
        moved: the shapes of what was moved there.
    """

    def __init__(self) -> None:
        super().__init__()
        self.moved: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = _computed(func, args, kwargs or {})
        if isinstance(made, Elsewhere) and func is _ATEN._to_copy.default and not isinstance(args[0], Elsewhere):
            self.moved.append(tuple(made.shape))
        return made


class _Literals(TorchFunctionMode):
    """Sees ``torch.tensor``, which asks nobody."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        device = kwargs.pop("device", None) if func is torch.tensor else None
        made = func(*args, **kwargs)
        return made if device is None else made.to(device)


def _computed(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    tensors = [thing for thing in tree_leaves((args, kwargs)) if isinstance(thing, Tensor)]
    there = {id(thing.held): thing for thing in tensors if isinstance(thing, Elsewhere)}
    here = [thing for thing in tensors if not isinstance(thing, Elsewhere) and thing.ndim]
    if func in _BY_POSITION:
        here = [thing for thing in here if thing.is_floating_point()]
    if there and here and func not in _MOVES:
        raise RuntimeError(f"Expected all tensors to be on the same device, and {func} has some on the CPU")
    asked = kwargs.get("device")
    inner, options = tree_map(lambda x: x.held if isinstance(x, Elsewhere) else x, (args, kwargs))
    if asked is not None:
        options["device"] = "cpu"
    made = func(*inner, **options)
    if func is _ATEN.copy_.default:
        return args[0]
    if torch.device(asked).type != DEVICE if asked is not None else not there:
        return made
    return tree_map(lambda x: there.get(id(x), Elsewhere(x)) if type(x) is Tensor else x, made)


@contextmanager
def elsewhere() -> Iterator[list[tuple[int, ...]]]:
    """Let the device be there, and yield the shapes of what is moved to it."""
    with warnings.catch_warnings(), _Literals(), _Dispatch() as seen:
        warnings.filterwarnings("ignore", "for .*: copying from a non-meta parameter")
        yield seen.moved
