"""Recordings of real federations on disk: written round by round, readable whatever happens later; never a pickle.

A folder holds ``index.json`` (what is known of the task), of every closed round ``round-NNNNN.json`` with safetensors
files of exactly what travelled, and apart from these the truth (:mod:`fedaudit.transcript.truth`). Updates ΔW are
computed when the recording is read, with the module that says what is a parameter and what a buffer.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor, nn

from fedaudit.modalities import TokenInfo, example_kind
from fedaudit.modalities.columns import Column
from fedaudit.task.info import TaskInfo
from fedaudit.task.training import BCE, Loss, TrainingConfig, loss_function
from fedaudit.transcript.recorded_task import outputs_of, preprocessing
from fedaudit.transcript.rounds import REMEDY, Digest, Files, Round, expected, read_file
from fedaudit.transcript.update import Update
from fedaudit.utils.bounds import JSON, read_bytes
from fedaudit.utils.errors import BadInput, CorruptTranscript
from fedaudit.utils.finite import all_finite
from fedaudit.utils.integrity import blank, check, sealed, write_whole
from fedaudit.utils.validation import explain

VERSION = 2
REPLAY = "replay.json"

# What a client sends: its weights after training, their difference to what it was sent, or a gradient.
Form = Literal["weights", "difference", "gradient"]

_PREFIXES = ("module.", "_orig_mod.", "model.")  # of wrappers: data parallelism, torch.compile, Lightning
_Natural = Annotated[int, Field(ge=0, lt=2**31)]
_Text = Annotated[str, Field(max_length=500)]
_STRICT = ConfigDict(extra="forbid", allow_inf_nan=False)


class RecordedTask(BaseModel):
    """What a recording knows of the task; fields as of :class:`~fedaudit.task.info.TaskInfo`, None if not recorded.

    ``outputs`` is how many the model has, ``least`` and ``most`` the range of each channel's values as the model saw
    them, from which mean and standard deviation are estimated where nobody gave them.
    """

    model_config = _STRICT

    kind: str | None = None
    input_shape: tuple[Annotated[int, Field(ge=1)], ...] | None = None
    outputs: Annotated[int, Field(ge=1)] | None = None
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    loss: str | None = None
    batch_norm: Literal["eval", "train"] | None = None
    dropout: bool | None = None
    label_smoothing: float = 0.0
    class_weights: tuple[float, ...] | None = None
    least: tuple[float, ...] | None = None
    most: tuple[float, ...] | None = None
    columns: tuple[Column, ...] | None = None
    tokens: TokenInfo | None = None


class MessageEntry(BaseModel):
    """One client's message in a round's index."""

    model_config = _STRICT

    client: _Natural
    name: _Text
    form: Form
    file: str
    num_examples: Annotated[int, Field(ge=1, le=10_000_000)] | None = None
    training: TrainingConfig | None = None
    seconds: Annotated[float, Field(ge=0)] | None = None
    sent: str | None = None
    notes: list[_Text] = []


class TotalEntry(BaseModel):
    """What several clients sent together."""

    model_config = _STRICT

    clients: Annotated[int, Field(ge=1, le=1_000_000)]
    form: Form
    file: str
    num_examples: Annotated[int, Field(ge=1, le=10_000_000)] | None = None
    training: TrainingConfig | None = None


class RoundEntry(BaseModel):
    """The index of one closed round."""

    model_config = _STRICT

    index: _Natural
    time: str | None = None
    weights: str
    messages: list[MessageEntry] = []
    total: TotalEntry | None = None
    files: Files = {}
    before: Digest | None = Field(default=None, description="digest of the round before; null of the first")
    digest: Digest | None = None


class Header(BaseModel):
    """``index.json`` of a recording; ``last`` is the digest of a round up to which, at least, all were closed."""

    model_config = _STRICT

    format: str
    version: int
    name: str
    id: Annotated[str, Field(pattern=r"^[0-9a-f]{8,64}$")]
    task: RecordedTask = RecordedTask()
    last: Digest | None = None
    digest: Digest | None = None


@dataclass
class Reading:
    """What is read of a recording: the parts of a transcript, and what its reader should know."""

    name: str
    id: str
    task_info: TaskInfo
    loss: Loss
    rounds: list[Round]
    clients: dict[int, str]
    partial: bool
    replay_errors: dict[tuple[int, int], float]
    notes: list[str] = field(default_factory=list)


def round_file(index: int) -> str:
    """Return the name of the index of round ``index``."""
    return f"round-{index:05d}.json"


def read_header(folder: Path, index: str, notes: list[str]) -> Header:
    """Return what ``index.json`` says; where it carries no digest, that goes to ``notes``.

    Raises:
        CorruptTranscript: it is damaged or was changed.
        BadInput: its digest can't be checked with the key that there is.
    """
    path = folder / index
    try:
        data = read_bytes(path, JSON)
        header = Header.model_validate_json(data)
    except ValidationError as error:
        raise CorruptTranscript(f"{path} is not a recording's index: {explain(error, Header)}") from None
    except OSError as error:
        raise BadInput(f"can't read {path}: {error.strerror or error}") from None
    if note := check(path, remedy=REMEDY, data=data):
        notes.append(note)
    return header


def read_rounds(folder: Path, header: Header) -> list[RoundEntry]:
    """Return the indices of all closed rounds, in order.

    Raises:
        CorruptTranscript: one is damaged, was changed or is in the wrong file, or some are missing.
        BadInput: a digest can't be checked with the key that there is.
    """
    entries: list[RoundEntry] = []
    for path in sorted(folder.glob("round-*.json")):
        try:
            data = read_bytes(path, JSON)
            entry = RoundEntry.model_validate_json(data)
        except ValidationError as error:
            raise CorruptTranscript(f"{path} is not a round's index: {explain(error, RoundEntry)}") from None
        except OSError as error:
            raise BadInput(f"can't read {path}: {error.strerror or error}") from None
        except BadInput as error:  # from how a client trained
            raise CorruptTranscript(f"{path}: {error}") from None
        if header.digest:  # an earlier version wrote none
            check(path, f"{header.id}/{path.name}", remedy=REMEDY, data=data)
            if entry.digest is None or entry.before != (entries[-1].digest if entries else None):
                raise CorruptTranscript(f"{path} doesn't go on from the round before: one is missing or was put there")
        if path.name != round_file(entry.index):
            raise CorruptTranscript(f"{path} is the index of round {entry.index}")
        if len({m.client for m in entry.messages}) < len(entry.messages):
            raise CorruptTranscript(f"{path}: a client sent two updates in round {entry.index}; it sends one")
        entries.append(entry)
    if header.last and header.last not in {entry.digest for entry in entries}:
        raise CorruptTranscript(f"'{folder}' lacks rounds that were closed: somebody or something deleted them")
    return entries


def read_recording(
    folder: Path,
    index: str,
    module: nn.Module | None,
    loss: Loss | None,
    given: Mapping[str, Any],
    rounds: Collection[int] | None,
) -> Reading:
    """Read what :class:`fedaudit.Recorder` wrote.

    Args:
        folder: of the recording.
        index: name of its index.
        module: that the clients trained; what doesn't travel (a frozen part) is its own.
        loss: theirs, where it isn't one of fedaudit's.
        given: fields of :class:`RecordedTask` that count in place of what was recorded.
        rounds: only these; None: all.

    Raises:
        BadInput: something is needed that was neither recorded nor given; the message says how to give it.
        CorruptTranscript: a file is damaged, or something doesn't fit the module.
    """
    notes: list[str] = []
    header = read_header(folder, index, notes)
    entries = [e for e in read_rounds(folder, header) if rounds is None or e.index in rounds]
    if not entries:
        chosen = "" if rounds is None else " among those asked for"
        raise CorruptTranscript(f"'{folder}' has no closed round{chosen}: the recording ended before one was over")
    if module is None:
        raise BadInput(
            f"the recording in '{folder}' is of a model that fedaudit doesn't have; name it: "
            "--model package.module:factory, or module=… from Python"
        )
    try:
        known = header.task.model_dump() | {key: value for key, value in given.items() if value is not None}
        task = RecordedTask.model_validate(known)
    except ValidationError as error:
        raise BadInput(f"the task that was given: {explain(error, RecordedTask)}") from None
    task_info, loss = _task(task, module, loss, notes)
    reader = _Reader(folder, module, notes)
    read = [reader.round(entry) for entry in entries]
    if not any(r.updates for r in read):
        raise CorruptTranscript(f"'{folder}' holds no update that can be read: {'; '.join(notes) or 'none was sent'}")
    names = {m.client: m.name for entry in entries for m in entry.messages}
    notes += dict.fromkeys(note for entry in entries for m in entry.messages for note in m.notes)
    return Reading(
        header.name, header.id, task_info, loss, read, names, reader.partial, read_replay(folder, header.id), notes
    )


def _task(task: RecordedTask, module: nn.Module, loss: Loss | None, notes: list[str]) -> tuple[TaskInfo, Loss]:
    """Return what everybody knows, and the loss; what was assumed goes to ``notes``."""
    if task.input_shape is None:
        raise BadInput(
            "the recording doesn't say what an input looks like (no local training was captured); give --input-shape, "
            "for example 3,32,32"
        )
    shape = tuple(task.input_shape)
    kind = "tokens" if task.tokens else task.kind
    kind = kind or ("image" if len(shape) == 3 else "table" if len(shape) == 1 else None)
    if kind is None:
        raise BadInput(
            f"the inputs have the shape {shape}: neither images (C, H, W), rows of a table (d,) nor tokens (length,); "
            "attacks on other inputs aren't there"
        )
    if not example_kind(kind).fits(shape):
        raise BadInput(f"the inputs have the shape {shape}, which {example_kind(kind).plural} don't have")
    if task.columns and (task.tokens or len(shape) != 1):
        raise BadInput(f"only tables have columns; these examples are of the kind '{kind}'")
    if task.tokens and task.kind not in (None, "tokens"):
        raise BadInput(f"a vocabulary belongs to tokens; these examples are of the kind '{task.kind}'")
    name = task.loss
    if loss is not None:
        name = "custom"
    elif name is None:
        name = "cross-entropy"
        notes.append("the loss was not recorded: it is taken for cross-entropy")
    elif name == "custom":
        raise BadInput("clients minimise a loss of their own; give it: --loss package.module:function, or loss=…")
    outputs = task.outputs or outputs_of(module, shape, task.tokens)
    classes = None if name == "mse" or (name == "custom" and outputs == 1) else 2 if name == BCE else max(outputs, 2)
    classes = task.tokens.vocabulary if task.tokens and task.tokens.causal else classes
    channels = example_kind(kind).channels(shape)
    mean, std = task.mean, task.std
    if mean is None or std is None:
        mean, std = preprocessing(task.least, task.most, kind, channels, notes)
    info = TaskInfo(
        model="custom",
        width=None,
        batch_norm=task.batch_norm or "train",
        loss=name,
        kind=kind,
        input_shape=shape,
        num_classes=classes,
        mean=tuple(mean),
        std=tuple(std),
        dropout=True if task.dropout is None else task.dropout,
        label_smoothing=task.label_smoothing if name == "cross-entropy" else 0.0,
        class_weights=task.class_weights if name == "cross-entropy" else None,
        columns=task.columns or (),
        tokens=task.tokens,
    )
    return info, loss or loss_function(name, info.label_smoothing, info.class_weights)


class _Reader:
    """Reads messages of one recording and names what doesn't fit."""

    def __init__(self, folder: Path, module: nn.Module, notes: list[str]) -> None:
        self.folder, self.notes = folder, notes
        self.state, self.parameters, self.buffers = expected(module)
        self.partial = False
        self.files: Files = {}

    def round(self, entry: RoundEntry) -> Round:
        self.files = entry.files
        weights = self._whole(entry.weights)
        updates, own = [], {}
        for message in entry.messages:
            start = weights
            if message.sent is not None:
                start = own[message.client] = self._whole(message.sent)
            tensors, moved = self._update(message.file, message.form, start)
            what = f"round {entry.index}, client {message.name}"
            if not all_finite((*tensors.values(), *moved.values())):
                self.notes.append(f"{what}: the update has NaN or infinite values and is left out")
                own.pop(message.client, None)
                continue
            number = message.num_examples or (sum(message.training.batch_sizes) if message.training else None)
            if number is None:
                self.notes.append(f"{what}: over how many examples the update was made isn't recorded; taken for 1")
            try:
                update = Update(
                    client=message.client,
                    kind="gradient" if message.form == "gradient" else "weights",
                    tensors=tensors,
                    num_examples=number or 1,
                    training=message.training,
                    buffers=moved,
                    seconds=message.seconds,
                )
            except BadInput as error:
                raise CorruptTranscript(f"{self.folder / round_file(entry.index)}: {error}") from None
            updates.append(update)
        if entry.total is not None and updates:
            self.notes.append(f"round {entry.index}: the sum is left aside, single updates are known")
        elif entry.total is not None:
            updates += self._sum(entry.total, weights, f"round {entry.index}")
        updates.sort(key=lambda update: update.client)
        return Round(entry.index, weights, updates, own_weights=own, time=entry.time)

    def _sum(self, total: TotalEntry, weights: dict[str, Tensor], what: str) -> list[Update]:
        """Return what several clients sent together as one update, if it can be read; who they are isn't told."""
        tensors, moved = self._update(total.file, total.form, weights)
        if not all_finite((*tensors.values(), *moved.values())):
            self.notes.append(f"{what}: the sum has NaN or infinite values and is left out")
            return []
        number = total.num_examples or (sum(total.training.batch_sizes) if total.training else None)
        if number is None:
            self.notes.append(f"{what}: over how many examples the sum was made isn't recorded; taken for one a client")
        try:
            update = Update(
                client=0,
                kind="gradient" if total.form == "gradient" else "weights",
                tensors=tensors,
                num_examples=number or total.clients,
                training=total.training,
                buffers=moved,
                members=tuple(range(total.clients)) if total.clients > 1 else (),
            )
        except BadInput as error:
            raise CorruptTranscript(f"{self.folder}: {what}: {error}") from None
        return [update]

    def _read(self, file: str) -> dict[str, Tensor]:
        """Return tensors by the module's own names; refuse what isn't the module's."""
        tensors = read_file(self.folder, file, self.files)
        for prefix in _PREFIXES:
            if tensors and all(name.startswith(prefix) for name in tensors) and not set(tensors) & set(self.state):
                tensors = {name.removeprefix(prefix): value for name, value in tensors.items()}
        for name, value in tensors.items():
            if name not in self.state:
                raise BadInput(
                    f"the recording has '{name}', the model given has no such tensor; give the module that the clients "
                    "trained"
                )
            if value.shape != self.state[name].shape:
                shapes = f"{tuple(value.shape)}, in the model given {tuple(self.state[name].shape)}"
                raise BadInput(
                    f"'{name}' has the shape {shapes}; give the module that the clients trained, in the same size"
                )
        return {name: value.to(self.state[name].dtype) for name, value in tensors.items()}

    def _whole(self, file: str) -> dict[str, Tensor]:
        """Return a whole state: what didn't travel is the module's own."""
        sent = self._read(file)
        if not all_finite(sent.values()):
            raise CorruptTranscript(f"{self.folder / file}: the global weights have NaN or infinite values")
        return {name: sent.get(name, value.detach().clone()) for name, value in self.state.items()}

    def _update(self, file: str, form: Form, start: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return ΔW or the gradient of the parameters that were sent, and the buffers that changed."""
        sent = self._read(file)
        own = {name: sent[name] for name in self.parameters if name in sent}
        if not own:
            raise BadInput(
                f"{self.folder / file} holds none of the model's trainable parameters: which module did clients train?"
            )
        if len(own) < len(self.parameters):
            if not self.partial:
                self.notes.append(f"updates hold {len(own)} of the model's {len(self.parameters)} trainable tensors")
            self.partial = True
        if form == "weights":
            own = {name: value - start[name] for name, value in own.items()}
        moved = {name: sent[name] for name in self.buffers if name in sent}
        if form == "difference":
            moved = {name: start[name] + value for name, value in moved.items()}
        return own, {name: value for name, value in moved.items() if not value.equal(start[name])}


def read_replay(folder: Path, recording: str) -> dict[tuple[int, int], float]:
    """Return what an earlier replay check of the recording found: (round, client) to the relative error.

    Raises:
        CorruptTranscript: the file is damaged or was changed.
        BadInput: its digest can't be checked with the key that there is.
    """
    path = folder / REPLAY
    if not path.is_file():
        return {}
    remedy = "delete it, and it is made again"
    try:
        data = read_bytes(path, JSON)
        found = _Replay.model_validate_json(data)
    except ValidationError as error:
        raise CorruptTranscript(f"{path} is damaged: {explain(error)}; {remedy}") from None
    except OSError as error:
        raise BadInput(f"can't read {path}: {error.strerror or error}") from None
    if check(path, f"{recording}/{REPLAY}", remedy=remedy, data=data):
        return {}  # an earlier version's: it is made again
    return {(e.round, e.client): math.inf if e.error is None else e.error for e in found.updates}


class _ReplayEntry(BaseModel):
    model_config = _STRICT
    round: _Natural
    client: _Natural
    error: Annotated[float, Field(ge=0)] | None = Field(description="null: the replayed training diverged")


class _Replay(BaseModel):
    model_config = _STRICT
    updates: list[_ReplayEntry]
    digest: Digest | None = None


def write_replay(folder: Path, recording: str, errors: Mapping[tuple[int, int], float]) -> None:
    """Keep what a replay check found beside the recording; a folder that can't be written to stays as it is."""
    entries = [
        _ReplayEntry(round=r, client=c, error=error if math.isfinite(error) else None)
        for (r, c), error in sorted(errors.items())
    ]
    try:
        text = _Replay(updates=entries, digest=blank()).model_dump_json(indent=2) + "\n"
        write_whole(folder / REPLAY, sealed(text, f"{recording}/{REPLAY}"))
    except OSError:
        return
