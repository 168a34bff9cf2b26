"""Canaries of a recording: what was read of them, beside the rounds; which were in, with the truth."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from pydantic import ValidationError
from safetensors import SafetensorError
from torch import Tensor

from fedaudit.epsilon.canaries import Canaries
from fedaudit.transcript.canary_files import CANARIES, CanariesEntry
from fedaudit.utils.bounds import TENSORS, check_file
from fedaudit.utils.errors import CorruptTranscript
from fedaudit.utils.integrity import load_sealed, save_sealed

TRUTH = "truth"
_REMEDY = "take it from where it was made"


def save_canaries(folder: Path, recording: str, canaries: Canaries) -> None:
    """Write what was read, sealed.

    Raises:
        OSError: the file can't be written.
    """
    entry = CanariesEntry.of(canaries).model_dump_json()
    save_sealed(folder / CANARIES, canaries.readings, {"recording": recording, "canaries": entry}, CANARIES)


def save_coins(folder: Path, recording: str, coins: Tensor) -> None:
    """Write which were in, sealed.

    Raises:
        OSError: the file can't be written.
    """
    (folder / TRUTH).mkdir(parents=True, exist_ok=True)
    save_sealed(folder / TRUTH / CANARIES, {"coins": coins}, {"recording": recording}, CANARIES)


def load_canaries(folder: Path, recording: str) -> Canaries | None:
    """Return what was read of the canaries of the recording in ``folder``; None where it has none.

    Raises:
        CorruptTranscript: the file is damaged, was changed, or is another recording's.
        BadInput: its digest can't be checked with the key that there is.
    """
    path = folder / CANARIES
    if not path.is_file():
        return None
    try:
        check_file(path, TENSORS)
        about, tensors, _ = load_sealed(path, CANARIES, own=["recording", "canaries"], remedy=_REMEDY)
        entry = CanariesEntry.model_validate_json(about["canaries"])
    except (SafetensorError, OSError, KeyError, TypeError, ValidationError, ValueError) as error:
        raise CorruptTranscript(f"{path} is damaged or no canaries' readings ({str(error)[:80]!r})") from None
    _same(path, about.get("recording"), recording)
    return entry.canaries(tensors, path)


def load_coins(folder: Path, recording: str | None, count: int) -> Tensor:
    """Return which canaries were in, (m,) bool, from ``truth`` in the recording's folder; empty where it isn't known.

    Raises:
        CorruptTranscript: the file is damaged, was changed, or is another recording's.
        BadInput: its digest can't be checked with the key that there is.
    """
    path = folder / CANARIES
    if not path.is_file():
        return torch.zeros(0, dtype=torch.bool)
    try:
        check_file(path, TENSORS)
        about, tensors, _ = load_sealed(path, CANARIES, own=["recording"], remedy=_REMEDY)
        coins = tensors["coins"]
    except (SafetensorError, OSError, KeyError, TypeError, ValueError, json.JSONDecodeError) as error:
        raise CorruptTranscript(f"{path} is damaged or says nothing of canaries ({str(error)[:80]!r})") from None
    _same(path, about.get("recording"), recording)
    if coins.shape != (count,) or coins.dtype != torch.bool:
        raise CorruptTranscript(f"{path}: what it says of the {count} canaries are none of theirs")
    return coins


def _same(path: Path, found: object, recording: str | None) -> None:
    if found != recording:
        raise CorruptTranscript(f"{path} belongs to another recording")
