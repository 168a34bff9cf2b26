"""Rounds of a simulated federation on disk: an entry in the index and safetensors files, written and read."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, SerializerFunctionWrapHandler, model_serializer
from safetensors.torch import save_file
from torch import Tensor

from fedaudit.task.info import TaskInfo
from fedaudit.task.training import TrainingConfig
from fedaudit.transcript.rounds import Files, Round, check_tensors, check_update, labels_of, read_file, read_tensors
from fedaudit.transcript.update import SanitiserInfo, Update, UpdateKind
from fedaudit.utils.errors import BadInput, CorruptTranscript
from fedaudit.utils.validation import Number

_Natural = Annotated[int, Field(ge=0, lt=2**31)]
_STRICT = ConfigDict(extra="forbid", strict=True)


class UpdateEntry(BaseModel):
    """What an index says of an update."""

    model_config = _STRICT
    client: _Natural
    kind: UpdateKind
    file: str
    num_examples: Annotated[int, Field(ge=1, le=10_000_000)]
    training: TrainingConfig | None = Field(alias="facts")  # its name in version 1
    labels: list[_Natural] | list[Number] | None = None
    sanitised: SanitiserInfo | None = None
    members: tuple[_Natural, ...] = ()

    @model_serializer(mode="wrap")
    def _without_default(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out what version 1 knew nothing of, where it says nothing."""
        return {name: value for name, value in dump(self).items() if name != "members" or value}


class RoundEntry(BaseModel):
    """What an index says of a round, with the names of its files."""

    model_config = _STRICT
    index: _Natural
    weights: str
    updates: Annotated[list[UpdateEntry], Field(min_length=1)]
    rejected: dict[int, str] = {}
    fallback: str | None = None
    own_weights: dict[_Natural, str] = {}

    @model_serializer(mode="wrap")
    def _without_default(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out what version 1 knew nothing of, where it says nothing."""
        return {name: value for name, value in dump(self).items() if name != "own_weights" or value}


def save_round(folder: Path, record: Round) -> RoundEntry:
    """Write a round's files; of weights that a client was sent in place of everybody's, those tensors that differ."""
    weights = f"round-{record.index:05d}-global.safetensors"
    save_file({k: v.detach().cpu().contiguous() for k, v in record.weights.items()}, folder / weights)
    entries = []
    for update in record.updates:
        file = f"round-{record.index:05d}-client-{update.client:05d}.safetensors"
        tensors = {f"parameters/{k}": v for k, v in update.tensors.items()}
        tensors |= {f"buffers/{k}": v for k, v in update.buffers.items()}
        save_file({k: v.detach().cpu().contiguous() for k, v in tensors.items()}, folder / file)
        labels = None if update.labels is None else update.labels.flatten().tolist()
        entries.append(
            UpdateEntry(
                client=update.client,
                kind=update.kind,
                file=file,
                num_examples=update.num_examples,
                facts=update.training,
                labels=labels,
                sanitised=update.sanitised,
                members=update.members,
            )
        )
    own = {}
    for client, tensors in record.own_weights.items():
        own[client] = f"round-{record.index:05d}-client-{client:05d}-sent.safetensors"
        differ = {k: v for k, v in tensors.items() if not v.equal(record.weights[k])}
        save_file({k: v.detach().cpu().contiguous() for k, v in differ.items()}, folder / own[client])
    return RoundEntry(
        index=record.index,
        weights=weights,
        updates=entries,
        rejected=record.rejected,
        fallback=record.fallback,
        own_weights=own,
    )


def read_round(
    folder: Path,
    entry: RoundEntry,
    files: Files,
    expected: tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]],
    task_info: TaskInfo,
) -> Round:
    """Return a round, checked.

    Args:
        folder: of the transcript.
        entry: of the round.
        files: SHA-256 of every file that the index lists.
        expected: the module's state, its parameters and its buffers, by name.
        task_info: for labels.

    Raises:
        CorruptTranscript: a file is missing or damaged, or isn't of the model.
    """
    state, parameters, buffers = expected
    weights = read_tensors(folder, entry.weights, files, state)
    updates = [_read_update(folder, update, files, parameters, buffers, task_info) for update in entry.updates]
    own_weights = {}
    for client, file in entry.own_weights.items():
        own = read_file(folder, file, files)
        check_tensors(own, {name: tensor for name, tensor in state.items() if name in own}, folder / file)
        own_weights[client] = weights | own
    return Round(entry.index, weights, updates, entry.rejected, entry.fallback, own_weights)


def _read_update(
    folder: Path,
    entry: UpdateEntry,
    files: Files,
    parameters: dict[str, Tensor],
    buffers: dict[str, Tensor],
    task_info: TaskInfo,
) -> Update:
    tensors = read_file(folder, entry.file, files)
    path = folder / entry.file
    moved = {k.removeprefix("buffers/"): v for k, v in tensors.items() if k.startswith("buffers/")}
    own = {k: v for k, v in tensors.items() if not k.startswith("buffers/")}
    filed = {f"parameters/{k}": v for k, v in parameters.items()}
    sent = check_update(own, moved, filed, buffers, path, whole=entry.sanitised is None)
    try:
        return Update(
            client=entry.client,
            kind=entry.kind,
            tensors={name.removeprefix("parameters/"): own[name] for name in sent},  # in the model's order
            num_examples=entry.num_examples,
            training=entry.training,
            buffers=moved,
            labels=None if entry.labels is None else labels_of(entry.labels, task_info.num_classes),
            sanitised=entry.sanitised,
            members=entry.members,
        )
    except BadInput as error:
        raise CorruptTranscript(f"{path}: {error}") from None
