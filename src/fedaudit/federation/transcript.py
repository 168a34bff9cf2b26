"""The ordered record of what travelled: a folder of safetensors files and one JSON index; never a pickle."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from fedaudit.errors import BadInput, CorruptTranscript
from fedaudit.federation.update import Loss, Setup, Tensors, TrainingFacts, Update, UpdateKind, loss_function
from fedaudit.models import build_model

FORMAT = "fedaudit-transcript"
VERSION = 1
INDEX = "index.json"


@dataclass(frozen=True)
class Round:
    """One round: the weights that the server sent, the updates that came back, and whom the server left out.

    Attributes:
        index: from 0.
        weights: the global model's whole state (parameters and buffers), by name.
        updates: in the order of the clients.
        rejected: client to reason.
    """

    index: int
    weights: Tensors
    updates: list[Update]
    rejected: dict[int, str] = field(default_factory=dict)


class Transcript:
    """What travelled in one federation.

    Attributes:
        name: of the federation.
        setup: what everybody knows.
        module: the architecture (its own weights mean nothing; every round has the ones that travelled).
        loss: mean over a batch, (outputs, targets) to a scalar.
        rounds: in order.
    """

    def __init__(self, name: str, setup: Setup, module: nn.Module, loss: Loss, rounds: list[Round]) -> None:
        self.name = name
        self.setup = setup
        self.module = module
        self.loss = loss
        self.rounds = rounds

    @property
    def updates(self) -> int:
        """Number of updates in all rounds."""
        return sum(len(r.updates) for r in self.rounds)

    def save(self, folder: Path) -> None:
        """Write the transcript to ``folder``, which must be empty or new.

        Raises:
            BadInput: the folder is in use or can't be written.
        """
        try:
            if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
                raise BadInput(f"'{folder}' exists and isn't an empty folder; choose a new one for the transcript")
            folder.mkdir(parents=True, exist_ok=True)
            rounds = [_save_round(folder, r) for r in self.rounds]
            setup = TypeAdapter(Setup).dump_python(self.setup, mode="json")
            index = _Index(format=FORMAT, version=VERSION, name=self.name, setup=setup, rounds=rounds)
            (folder / INDEX).write_text(index.model_dump_json(indent=2) + "\n", encoding="utf-8")
        except OSError as error:
            raise BadInput(f"can't write the transcript to '{folder}': {error.strerror or error}") from None

    @classmethod
    def load(cls, folder: Path, module: nn.Module | None = None, loss: Loss | None = None) -> Transcript:
        """Read a transcript and check all of it against the architecture.

        Args:
            folder: as written by :meth:`save`.
            module: the architecture, needed where the federation trained a user's own module.
            loss: likewise.

        Raises:
            BadInput: there is no transcript there, or it needs ``module`` or ``loss``.
            CorruptTranscript: something is missing, misshapen, not finite or truncated.
        """
        index = _read_index(folder)
        try:
            setup = TypeAdapter(Setup).validate_python(index.setup)
        except ValidationError as error:
            raise CorruptTranscript(f"{folder / INDEX}: 'setup' is broken: {_first(error)}") from None
        if (module is None and setup.model == "custom") or (loss is None and setup.loss == "custom"):
            own = "model" if setup.model == "custom" else "loss"
            raise BadInput(f"the transcript in '{folder}' is of a user's own {own}; load it from Python and pass that")
        if module is None:
            module = build_model(setup.model, input_shape=setup.input_shape, outputs=setup.outputs, width=setup.width)
        state = {name: t.shape for name, t in module.state_dict().items()}
        parameters = {name: p.shape for name, p in module.named_parameters() if p.requires_grad}
        buffers = {name: b.shape for name, b in module.named_buffers() if name in state}
        rounds = []
        for entry in index.rounds:
            weights = _read_tensors(folder, entry.weights, state)
            updates = [_read_update(folder, u, parameters, buffers, setup) for u in entry.updates]
            rounds.append(Round(index=entry.index, weights=weights, updates=updates, rejected=entry.rejected))
        return cls(index.name, setup, module, loss or loss_function(setup.loss), rounds)


class _UpdateEntry(BaseModel):
    model_config = ConfigDict(extra="forbid")
    client: int
    kind: UpdateKind
    file: str
    num_examples: int
    facts: TrainingFacts | None
    labels: list[int] | None = None


class _RoundEntry(BaseModel):
    model_config = ConfigDict(extra="forbid")
    index: int
    weights: str
    updates: list[_UpdateEntry]
    rejected: dict[int, str] = {}


class _Index(BaseModel):
    model_config = ConfigDict(extra="forbid")
    format: str
    version: int
    name: str
    setup: dict[str, Any]
    rounds: list[_RoundEntry]


def _first(error: ValidationError) -> str:
    detail = error.errors()[0]
    where = ".".join(map(str, detail["loc"]))
    return f"{where}: {detail['msg']}" if where else detail["msg"]


def _save_round(folder: Path, record: Round) -> _RoundEntry:
    weights = f"round-{record.index:05d}-global.safetensors"
    save_file({k: v.detach().cpu().contiguous() for k, v in record.weights.items()}, folder / weights)
    entries = []
    for update in record.updates:
        file = f"round-{record.index:05d}-client-{update.client:05d}.safetensors"
        tensors = {f"parameters/{k}": v for k, v in update.tensors.items()}
        tensors |= {f"buffers/{k}": v for k, v in update.buffers.items()}
        save_file({k: v.detach().cpu().contiguous() for k, v in tensors.items()}, folder / file)
        labels = None if update.labels is None else update.labels.tolist()
        entries.append(
            _UpdateEntry(
                client=update.client,
                kind=update.kind,
                file=file,
                num_examples=update.num_examples,
                facts=update.facts,
                labels=labels,
            )
        )
    return _RoundEntry(index=record.index, weights=weights, updates=entries, rejected=record.rejected)


def _read_index(folder: Path) -> _Index:
    path = folder / INDEX
    if not path.is_file():
        raise BadInput(f"no transcript in '{folder}': it has no {INDEX}; make one with 'fedaudit simulate'")
    try:
        index = _Index.model_validate_json(path.read_text(encoding="utf-8"))
    except UnicodeDecodeError:
        raise CorruptTranscript(f"{path} is not UTF-8 text") from None
    except OSError as error:
        raise BadInput(f"can't read {path}: {error.strerror or error}") from None
    except ValidationError as error:
        raise CorruptTranscript(f"{path} is not a transcript's index: {_first(error)}") from None
    if index.format != FORMAT:
        raise CorruptTranscript(f"{path}: format is '{index.format}', not '{FORMAT}'")
    if index.version != VERSION:
        raise CorruptTranscript(f"{path}: version {index.version} can't be read by this fedaudit, only {VERSION}")
    return index


def _read_file(folder: Path, file: str) -> Tensors:
    path = folder / file
    if path.resolve().parent != folder.resolve():
        raise CorruptTranscript(f"the index of '{folder}' names a file outside of it: {file}")
    if not path.is_file():
        raise CorruptTranscript(f"{path} is missing; the transcript is incomplete")
    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        raise CorruptTranscript(f"{path} is truncated or not a safetensors file ({error})") from None


def _check(tensors: Tensors, shapes: dict[str, torch.Size], path: Path) -> None:
    for name, shape in shapes.items():
        if name not in tensors:
            raise CorruptTranscript(f"{path}: tensor '{name}' is missing")
        if tensors[name].shape != shape:
            raise CorruptTranscript(
                f"{path}: tensor '{name}' has shape {tuple(tensors[name].shape)}, the model needs {tuple(shape)}"
            )
    for name, tensor in tensors.items():
        if name not in shapes:
            raise CorruptTranscript(f"{path}: the model has no tensor '{name}'")
        if not torch.isfinite(tensor).all():
            raise CorruptTranscript(f"{path}: tensor '{name}' has NaN or infinite values")


def _read_tensors(folder: Path, file: str, shapes: dict[str, torch.Size]) -> Tensors:
    tensors = _read_file(folder, file)
    _check(tensors, shapes, folder / file)
    return tensors


def _read_update(
    folder: Path, entry: _UpdateEntry, parameters: dict[str, torch.Size], buffers: dict[str, torch.Size], setup: Setup
) -> Update:
    tensors = _read_file(folder, entry.file)
    path = folder / entry.file
    own = {k.removeprefix("parameters/"): v for k, v in tensors.items() if not k.startswith("buffers/")}
    moved = {k.removeprefix("buffers/"): v for k, v in tensors.items() if k.startswith("buffers/")}
    _check(own, parameters, path)
    _check(moved, {k: v for k, v in buffers.items() if k in moved}, path)
    if entry.num_examples < 1:
        raise CorruptTranscript(f"{path}: an update over {entry.num_examples} examples")
    labels = None
    if entry.labels is not None:
        labels = torch.tensor(entry.labels, dtype=torch.int64)
        if len(labels) != entry.num_examples:
            raise CorruptTranscript(f"{path}: {len(labels)} labels for {entry.num_examples} examples")
        if setup.num_classes is None or bool(((labels < 0) | (labels >= setup.num_classes)).any()):
            raise CorruptTranscript(f"{path}: a label is outside of 0..{(setup.num_classes or 1) - 1}")
    return Update(
        client=entry.client,
        kind=entry.kind,
        tensors=own,
        num_examples=entry.num_examples,
        facts=entry.facts,
        buffers=moved,
        labels=labels,
    )
