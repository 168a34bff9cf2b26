"""Where a long simulation stands, on disk, so that one that was killed goes on from there."""

from __future__ import annotations

import dataclasses
import hashlib
import time
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch import Tensor

from fedaudit.federation.transcript import Round
from fedaudit.update import Sanitised, TrainingFacts, Update
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
            saved = torch.load(self.path, weights_only=True)
        except (OSError, RuntimeError, EOFError, ValueError, UnpicklingError):
            return None  # none yet, or half of one: then from the beginning
        return saved["state"] if isinstance(saved, dict) and saved.get("key") == _key(facts()) else None

    def save(self, facts: Callable[[], list[Any]], state: Callable[[], State], last: bool) -> None:
        """Write the state if it is time, or the last one of several; a kill meanwhile leaves the file before."""
        if time.monotonic() - self.written < self.every and not (last and self.path.exists()):
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        partial = self.path.with_name(self.path.name + ".part")
        torch.save({"key": _key(facts()), "state": state()}, partial)
        partial.replace(self.path)
        self.written = time.monotonic()

    def remove(self) -> None:
        """Delete the file; what it was for is finished."""
        self.path.unlink(missing_ok=True)


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
    return {"facts": update.facts, "sanitised": update.sanitised}


def unpack(rounds: Sequence[State]) -> list[Round]:
    """Return the rounds that :func:`pack` was given."""
    return [Round(**{**r, "updates": [_unpacked(u) for u in r["updates"]]}) for r in rounds]


def _unpacked(update: State) -> Update:
    facts, sanitised = update["facts"], update["sanitised"]
    return Update(
        **{
            **update,
            "facts": TrainingFacts(**facts) if facts else None,
            "sanitised": Sanitised(**sanitised) if sanitised else None,
        }
    )
