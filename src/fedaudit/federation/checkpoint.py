"""Where a long simulation stands, on disk, so that one that was killed goes on from there."""

from __future__ import annotations

import dataclasses
import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from pathlib import Path
from pickle import PicklingError, UnpicklingError
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedaudit.federation.transcript import Round
from fedaudit.models.torch_files import read_torch_file
from fedaudit.update import SanitiserInfo, TrainingConfig, Update
from fedaudit.utils.errors import BadInput
from fedaudit.version import __version__

# Tensors, numbers, strings and None in dicts, lists and tuples: what torch reads without running any code.
State = dict[str, Any]

EVERY = 30.0  # seconds between two checkpoints; a simulation that is over sooner has none


class Checkpoint:
    """One file, written now and then; it is used again for the same simulation by the same code only.

    Args:
        path: of the file.
        every: seconds from one checkpoint to the next.
    """

    def __init__(self, path: Path, every: float = EVERY) -> None:
        self.path = path
        self.every = every
        self.written = time.monotonic()

    def load(self, facts: Callable[[], list[Any]]) -> State | None:
        """Return the state that was saved of the simulation that ``facts`` tell, if any."""
        try:
            saved = read_torch_file(self.path)
        except (OSError, ValueError, UnpicklingError):
            return None  # none yet, or half of one: then from the beginning
        return saved["state"] if isinstance(saved, dict) and saved.get("key") == _key(facts()) else None

    def save(self, facts: Callable[[], list[Any]], state: Callable[[], State], last: bool) -> None:
        """Write the state if it is time, or the last one of several; a kill meanwhile leaves the file before.

        Raises:
            BadInput: it can't be written.
        """
        if time.monotonic() - self.written < self.every and not (last and self.path.exists()):
            return
        draft = self.path.with_name(self.path.name + ".part")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            torch.save({"key": _key(facts()), "state": state()}, draft)
            draft.replace(self.path)
        except (OSError, RuntimeError) as error:  # torch's own, on a full disk
            raise BadInput(f"can't write the checkpoint '{self.path}': {error}") from None
        except (PicklingError, AttributeError, TypeError) as error:
            raise BadInput(
                f"a part of the simulation remembers what a checkpoint can't hold ({error}): "
                "keep tensors and plain values only, in dicts, lists and tuples"
            ) from error
        self.written = time.monotonic()

    def remove(self) -> None:
        """Delete the file; what it was for is finished."""
        self.path.unlink(missing_ok=True)


def identity(thing: Any, seen: dict[int, Any] | None = None) -> Iterator[Tensor | str]:
    """Yield what tells a user's own loss or module from another: names, code, constants, state.

    Functions are told by their code and by what it refers to, objects by their class and attributes; what is torch's or
    ours by its name. Whatever else there is counts as another in every process, so that no state outlives a change.
    """
    seen = {} if seen is None else seen  # with the things themselves: the id of one that is gone is used again
    if isinstance(thing, BuiltinFunctionType):
        yield f"builtin {thing.__module__}.{thing.__qualname__}"
        return
    plain = isinstance(thing, str | bytes | int | float | complex | None)
    if plain or isinstance(thing, Tensor | torch.dtype | torch.device | torch.Size | ModuleType):
        yield type(thing).__name__
        yield thing if isinstance(thing, Tensor) else repr(thing)
        return
    if id(thing) in seen:
        return
    seen[id(thing)] = thing
    kind = type(thing)
    named = thing if isinstance(thing, type | FunctionType) else kind
    yield f"{kind.__qualname__} {named.__module__}.{named.__qualname__}"
    parts: list[Any] = []
    if isinstance(thing, dict):
        parts = [part for item in thing.items() for part in item]
    elif isinstance(thing, list | tuple):
        parts = list(thing)
    elif isinstance(thing, set | frozenset):
        parts = sorted(map(repr, thing))
    elif isinstance(thing, CodeType):
        parts = [thing.co_code, thing.co_names, thing.co_consts]
    elif isinstance(thing, np.ndarray):
        parts = [str(thing.dtype), thing.shape, thing.tobytes()]
    elif isinstance(thing, partial | MethodType):
        parts = (
            [thing.func, thing.args, thing.keywords] if isinstance(thing, partial) else [thing.__func__, thing.__self__]
        )
    elif str(named.__module__).partition(".")[0] in ("torch", "fedaudit", "builtins") and named is thing:
        parts = []
    elif isinstance(thing, FunctionType):
        around = [thing.__globals__[name] for name in _names(thing.__code__) if name in thing.__globals__]
        cells = [cell.cell_contents for cell in thing.__closure__ or ()]
        parts = [thing.__code__, thing.__defaults__, thing.__kwdefaults__, cells, around]
    elif isinstance(thing, type):
        parts = [thing.__bases__, [value for name, value in vars(thing).items() if name not in _OF_A_PROCESS]]
    elif isinstance(thing, property | staticmethod | classmethod):
        parts = [thing.fget, thing.fset] if isinstance(thing, property) else [thing.__func__]
    elif hasattr(thing, "__dict__"):
        parts = [kind, {name: value for name, value in vars(thing).items() if name != "training"}]
    else:
        yield repr(thing)  # where that holds an address, it is another in every process
    for part in parts:
        yield from identity(part, seen)


# What a class has beside what its author wrote.
_OF_A_PROCESS = ("__dict__", "__weakref__", "__doc__", "__module__", "__annotations__", "__firstlineno__", "_abc_impl")


def _names(code: CodeType) -> list[str]:
    """Return the names that ``code``, and what is defined in it, refers to."""
    inner = [name for part in code.co_consts if isinstance(part, CodeType) for name in _names(part)]
    return [*code.co_names, *inner]


def _key(facts: list[Any]) -> str:
    digest = hashlib.sha256(f"{__version__} {_code()} {torch.__version__}".encode())
    for fact in facts:
        if isinstance(fact, Tensor):
            digest.update(fact.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
        else:
            digest.update(str(fact).encode())
    return digest.hexdigest()


@cache
def _code() -> str:
    """Return a hash of the package's source, so that no state outlives a change of what made it."""
    paths = sorted(Path(__file__).parents[1].rglob("*.py"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in paths)).hexdigest()


def pack(rounds: Sequence[Round]) -> list[State]:
    """Return rounds as plain values."""
    return [{**vars(r), "updates": [_packed(update) for update in r.updates]} for r in rounds]


def _packed(update: Update) -> State:
    parts = {name: dataclasses.asdict(value) if value else None for name, value in _nested(update).items()}
    return {**vars(update), **parts}


def _nested(update: Update) -> dict[str, Any]:
    return {"training": update.training, "sanitised": update.sanitised}


def unpack(rounds: Sequence[State]) -> list[Round]:
    """Return the rounds that :func:`pack` was given."""
    return [Round(**{**r, "updates": [_unpacked(u) for u in r["updates"]]}) for r in rounds]


def _unpacked(update: State) -> Update:
    training, sanitised = update["training"], update["sanitised"]
    return Update(
        **{
            **update,
            "training": TrainingConfig(**training) if training else None,
            "sanitised": SanitiserInfo(**sanitised) if sanitised else None,
        }
    )
