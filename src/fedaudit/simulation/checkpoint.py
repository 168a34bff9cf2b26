"""Where a long simulation or training stands, on disk, so that one that was killed goes on from there."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from pickle import PicklingError, UnpicklingError
from typing import Any

import torch

from fedaudit.models.checkpoint import read_torch_file
from fedaudit.task.training import TrainingConfig
from fedaudit.transcript.rounds import Round
from fedaudit.transcript.update import ClientDefenceInfo, Update
from fedaudit.utils.errors import BadInput
from fedaudit.utils.fingerprint import fingerprint
from fedaudit.utils.integrity import check_text, digest_text

# Tensors, numbers, strings and None in dicts, lists and tuples: what torch reads without running any code.
State = dict[str, Any]

EVERY = 30.0  # seconds between two checkpoints; what is over sooner has none


class Checkpoint:
    """One file, written now and then; it is used again for the same computation by the same code only.

    Args:
        path: of the file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.written = time.monotonic()

    def load(self, key: Callable[[], str]) -> State | None:
        """Return the state that was saved of the computation of that fingerprint, if any; none whose digest differs."""
        try:
            saved = read_torch_file(self.path, whole=True)
        except (OSError, ValueError, UnpicklingError, BadInput):
            return None  # none yet, or half of one: then from the beginning
        if not isinstance(saved, dict) or not isinstance(saved.get("state"), dict) or saved.get("key") != key():
            return None
        content, where = fingerprint(saved["state"]), str(self.path)
        try:
            check_text(content, saved.get("digest", ""), saved["key"], where=where, remedy="delete it")
        except BadInput:
            return None  # somebody changed it, or has another key: likewise
        return dict(saved["state"])

    def save(self, key: Callable[[], str], state: Callable[[], State], last: bool) -> None:
        """Write the state if it is time, or the last one of several; a kill meanwhile leaves the file before."""
        if time.monotonic() - self.written < EVERY and not (last and self.path.exists()):
            return
        draft = self.path.with_name(self.path.name + ".part")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            name, values = key(), state()
            torch.save({"key": name, "state": values, "digest": digest_text(fingerprint(values), name)}, draft)
            draft.replace(self.path)
        except (OSError, RuntimeError) as error:  # torch's own, on a full disk
            raise BadInput(f"can't write the checkpoint '{self.path}': {error}") from None
        except (PicklingError, AttributeError, TypeError) as error:
            raise BadInput(
                f"a part of the simulation remembers what a checkpoint can't hold ({error}): "
                "keep tensors and plain values only, in dicts, lists and tuples"
            ) from error
        self.written = time.monotonic()


def pack(rounds: Sequence[Round]) -> list[State]:
    """Return rounds as plain values."""

    def plain(thing: Any) -> Any:
        return None if thing is None else dataclasses.asdict(thing)

    def packed(update: Update) -> State:
        return {**vars(update), "training": plain(update.training), "sanitised": plain(update.sanitised)}

    return [{**vars(r), "updates": list(map(packed, r.updates))} for r in rounds]


def unpack(rounds: Sequence[State]) -> list[Round]:
    """Return the rounds that :func:`pack` was given."""

    def unpacked(update: State) -> Update:
        training, sanitised = update["training"], update["sanitised"]
        made = training and TrainingConfig(**training), sanitised and ClientDefenceInfo(**sanitised)
        return Update(**{**update, "training": made[0], "sanitised": made[1]})

    return [Round(**{**r, "updates": list(map(unpacked, r["updates"]))}) for r in rounds]
