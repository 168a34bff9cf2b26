"""The truth of a recording: what captured local training really used, in files apart from what travelled."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from fedaudit.federation.rounds import check_examples
from fedaudit.federation.transcript import Transcript
from fedaudit.federation.truth import Truth
from fedaudit.update import TaskInfo
from fedaudit.utils.errors import BadInput, CorruptTranscript

FOLDER = "truth"
CANDIDATES = "candidates.safetensors"
_MOST_CANDIDATES = 5000  # from which no more files are read
_FILE = re.compile(r"round-(\d{5})-client-(\d{5})\.safetensors")


def truth_file(index: int, client: int) -> str:
    """Return the name of the file with what ``client`` used in round ``index``."""
    return f"round-{index:05d}-client-{client:05d}.safetensors"


def save_examples(path: Path, recording: str, tensors: Mapping[str, Tensor]) -> None:
    """Write examples of the recording with that identifier.

    Raises:
        OSError: the file can't be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # Not save_file: killed, it leaves a file whose name nobody knows.
    path.write_bytes(save({k: v.cpu().contiguous() for k, v in tensors.items()}, metadata={"recording": recording}))


def has_truth(folder: Path) -> bool:
    """Whether the recording in ``folder`` has the truth of an update beside it."""
    return (folder / FOLDER).is_dir() and any(_FILE.fullmatch(p.name) for p in (folder / FOLDER).iterdir())


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
    for record in transcript.rounds:
        for update in record.updates:
            path = folder / truth_file(record.index, update.client)
            if not path.is_file():
                continue
            key, tensors = (record.index, update.client), _read(path, transcript.recording)
            seen[key] = tensors["inputs"], tensors["targets"]
            inputs[key], labels[key] = _examples(tensors["inputs"], task_info), _targets(tensors["targets"], task_info)
            check_examples(inputs[key], labels[key], task_info, update.num_examples, str(path))
            if "randomness" in tensors:
                randomness[key] = tensors["randomness"]
    if not inputs:
        raise BadInput(
            f"'{folder}' has the truth of no update: none was captured while clients trained, so nothing can be checked"
        )
    pool, classes = torch.cat(list(inputs.values())), torch.cat(list(labels.values()))
    for path in _others(folder, inputs):
        if len(pool) > _MOST_CANDIDATES:
            break
        tensors = _read(path, transcript.recording)
        others, theirs = _examples(tensors["inputs"], task_info), _targets(tensors["targets"], task_info)
        check_examples(others, theirs, task_info, len(others), str(path))
        pool, classes = torch.cat([pool, others]), torch.cat([classes, theirs])
    first = _first_of_each(task_info.example_kind.fingerprints(pool))
    return Truth(
        inputs,
        labels,
        pool[first],
        classes[first],
        {**about, "transcript": transcript.fingerprint()},
        seen=seen,
        randomness=randomness,
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


def _read(path: Path, recording: str | None) -> dict[str, Tensor]:
    try:
        with safe_open(path, framework="pt") as file:
            if (file.metadata() or {}).get("recording") != recording:
                raise CorruptTranscript(f"{path} is the truth of another recording")
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    except (SafetensorError, OSError) as error:
        raise CorruptTranscript(f"{path} is truncated or not a ground truth file ({error})") from None
    if not {"inputs", "targets"} <= set(tensors):
        raise CorruptTranscript(f"{path} has no inputs or no targets")
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
    if targets.is_floating_point() and targets.ndim == 2 and targets.shape[1] > 1:
        return targets.argmax(dim=1)  # probabilities, as of mixed or one-hot labels
    return targets.flatten().long()
