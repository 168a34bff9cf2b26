"""The truth of a recording: what captured local training really used, in files apart from what travelled."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from fedaudit.modalities.columns import check_cells
from fedaudit.task.info import TaskInfo
from fedaudit.transcript.canary_files import CANARIES
from fedaudit.transcript.recorded_canaries import load_coins
from fedaudit.transcript.rounds import check_examples
from fedaudit.transcript.transcript import Transcript
from fedaudit.transcript.truth import Truth
from fedaudit.utils.bounds import TENSORS, check_file
from fedaudit.utils.errors import BadInput, CorruptTranscript
from fedaudit.utils.integrity import load_sealed, save_sealed

FOLDER = "truth"
CANDIDATES = "candidates.safetensors"
_MOST_CANDIDATES = 5000  # from which no more files are read
_FILE = re.compile(r"round-(\d{5})-client-(\d{5})\.safetensors")


def truth_file(index: int, client: int) -> str:
    """Return the name of the file with what ``client`` used in round ``index``."""
    return f"round-{index:05d}-client-{client:05d}.safetensors"


def save_examples(path: Path, recording: str, tensors: Mapping[str, Tensor]) -> None:
    """Write examples of the recording with that identifier, sealed.

    Raises:
        OSError: the file can't be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    save_sealed(path, tensors, {"recording": recording}, path.name)


def has_truth(folder: Path) -> bool:
    """Whether the recording in ``folder`` has the truth of an update, or of canaries, beside it."""
    files = [p.name for p in (folder / FOLDER).iterdir()] if (folder / FOLDER).is_dir() else []
    return any(name == CANARIES or _FILE.fullmatch(name) for name in files)


def load_recorded_truth(folder: Path, transcript: Transcript, about: Mapping[str, Any]) -> Truth:
    """Read the truth of those of the transcript's updates whose local training was captured.

    Candidates for identification are the ones that were given to the recorder and the examples of the recording, other
    rounds' too; of a large one some thousands.

    Args:
        folder: ``truth`` in the recording's.
        transcript: of the recording.
        about: data, model and scenario in words.

    Raises:
        CorruptTranscript: a file is damaged, or another recording's.
        BadInput: there is none.
    """
    task_info = transcript.task_info
    inputs, labels, seen, randomness = {}, {}, {}, {}
    notes: dict[str, None] = {}
    for record in transcript.rounds:
        for update in record.updates:
            path = folder / truth_file(record.index, update.client)
            if not path.is_file():
                continue
            key, tensors = (record.index, update.client), _read(path, transcript.recording, notes)
            seen[key] = tensors["inputs"], tensors["targets"]
            inputs[key], labels[key] = _examples(tensors["inputs"], task_info), _targets(tensors["targets"], task_info)
            check_examples(inputs[key], labels[key], task_info, update.num_examples, str(path))
            check_cells(inputs[key], task_info.columns, str(path))
            if "randomness" in tensors:
                randomness[key] = tensors["randomness"]
    about = {**about, "transcript": transcript.fingerprint()}
    coins = load_coins(folder, transcript.recording, len(transcript.canaries or ()))
    if not inputs and len(coins):
        nothing = torch.zeros(0, *task_info.input_shape, dtype=task_info.example_kind.dtype)
        return Truth({}, {}, nothing, torch.zeros(0, dtype=torch.int64), dict(about), coins=coins)
    if not inputs:
        raise BadInput(
            f"'{folder}' has the truth of no update: none was captured while clients trained, so nothing can be checked"
        )
    pool, classes = torch.cat(list(inputs.values())), torch.cat(list(labels.values()))
    for path in _others(folder, inputs):
        if len(pool) > _MOST_CANDIDATES:
            break
        tensors = _read(path, transcript.recording, notes)
        others, theirs = _examples(tensors["inputs"], task_info), _targets(tensors["targets"], task_info)
        check_examples(others, theirs, task_info, len(others), str(path))
        pool, classes = torch.cat([pool, others]), torch.cat([classes, theirs])
    first = _first_of_each(task_info.example_kind.fingerprints(pool))
    return Truth(
        inputs,
        labels,
        pool[first],
        classes[first],
        dict(about),
        coins=coins,
        seen=seen,
        randomness=randomness,
        notes=tuple(notes),
    )


def _others(folder: Path, used: Mapping[tuple[int, int], Tensor]) -> list[Path]:
    """Return the files of examples beside those of the updates in ``used``: what was given first."""
    given = [folder / CANDIDATES] if (folder / CANDIDATES).is_file() else []
    own = {truth_file(*key) for key in used}
    return given + sorted(p for p in folder.iterdir() if _FILE.fullmatch(p.name) and p.name not in own)


def _first_of_each(hashes: Tensor) -> Tensor:
    """Return the positions at which each of (n,) hashes stands first."""
    known: dict[int, int] = {}
    for place, value in enumerate(hashes.tolist()):
        known.setdefault(value, place)
    return torch.tensor(list(known.values()))


def _read(path: Path, recording: str | None, notes: dict[str, None]) -> dict[str, Tensor]:
    try:
        check_file(path, TENSORS)
        about, tensors, note = load_sealed(path, path.name, own=["recording"], remedy="delete it, or take a copy")
    except (SafetensorError, OSError, TypeError, KeyError, ValueError) as error:
        raise CorruptTranscript(f"{path} is truncated or not a ground truth file ({error})") from None
    if about.get("recording") != recording:
        raise CorruptTranscript(f"{path} is the truth of another recording")
    if not {"inputs", "targets"} <= set(tensors):
        raise CorruptTranscript(f"{path} has no inputs or no targets")
    if note:
        notes["the ground truth carries no digest, as an earlier fedaudit wrote it: nothing tells a change"] = None
    return tensors


def _examples(seen: Tensor, task_info: TaskInfo) -> Tensor:
    """Return examples as a data set holds them, of inputs as the model saw them."""
    examples = task_info.denormalise(seen.to(task_info.example_kind.dtype))
    low, high = task_info.example_kind.bounds or (None, None)
    return examples if low is None else examples.clamp(low, high)


def _targets(targets: Tensor, task_info: TaskInfo) -> Tensor:
    """Return targets as the transcript has labels: int64 (n,), or (n, 1) real values."""
    if task_info.num_classes is None:
        return targets.float().view(len(targets), -1)
    if task_info.causal:
        return targets.long()
    if targets.is_floating_point() and targets.ndim == 2 and targets.shape[1] > 1:
        return targets.argmax(dim=1)  # probabilities, as of mixed or one-hot labels
    return targets.flatten().long()
