"""The ordered record of what travelled: a folder of safetensors files and one JSON index; never a pickle."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import re
import reprlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from fedaudit.federation.records import Records
from fedaudit.models import build_model
from fedaudit.training import Loss, TrainingConfig, loss_function
from fedaudit.update import SanitiserInfo, TaskInfo, Update, UpdateKind
from fedaudit.utils.errors import BadInput, CorruptTranscript
from fedaudit.utils.fingerprint import tensor_bytes
from fedaudit.utils.validation import Name, Number, explain

FORMAT = "fedaudit-transcript"
VERSION = 1
INDEX = "index.json"
ADVERSARY_LOG = "journal.safetensors"
RECORDS = "records.safetensors"


@dataclass(frozen=True)
class Round:
    """One round: the weights that the server sent, the updates that came back, and whom the server left out.

    Attributes:
        index: from 0.
        weights: the global model's whole state (parameters and buffers), by name.
        updates: in the order of the clients.
        rejected: client to reason.
        fallback: why the aggregator couldn't do what it is meant to do, if so.
    """

    index: int
    weights: dict[str, Tensor]
    updates: list[Update]
    rejected: dict[int, str] = field(default_factory=dict)
    fallback: str | None = None

    def __repr__(self) -> str:
        return f"Round({self.index}: {len(self.updates)} updates, {len(self.rejected)} rejected)"


@dataclass(eq=False)
class Transcript:
    """What travelled in one federation.

    Attributes:
        name: of the federation.
        task_info: what everybody knows.
        module: the architecture (its own weights mean nothing; every round has the ones that travelled).
        loss: mean over a batch, (outputs, targets) to a scalar.
        rounds: in order.
        adversary_log: what malicious clients recorded, by name; only they have it.
        records: the examples that the adversary holds, if any.
    """

    name: str
    task_info: TaskInfo
    module: nn.Module
    loss: Loss
    rounds: list[Round]
    adversary_log: dict[str, Tensor] = field(default_factory=dict)
    records: Records | None = None
    _checked: bool = field(default=False, init=False)

    def __repr__(self) -> str:
        what = f"{self.task_info.model} on {'x'.join(map(str, self.task_info.input_shape))}"
        return f"Transcript({reprlib.repr(self.name)}: {self.updates} updates in {len(self.rounds)} rounds, {what})"

    @property
    def updates(self) -> int:
        """Number of updates in all rounds."""
        return sum(len(r.updates) for r in self.rounds)

    def check(self) -> None:
        """Refuse, once, what :meth:`load` refuses: one that was made in Python may hold anything.

        Raises:
            CorruptTranscript: something is missing, misshapen, not finite, or contradicts something else.
        """
        if self._checked:
            return
        where = f"transcript '{self.name}'"
        if not self.rounds or not all(r.updates for r in self.rounds):
            raise CorruptTranscript(f"{where}: there must be a round, and an update in every one")
        _check_order(where, self.rounds)
        state, parameters, buffers = _expected(self.module)
        for record in self.rounds:
            place = f"{where}, round {record.index}"
            _check(record.weights, state, f"{place}, global weights")
            for update in record.updates:
                own = f"{place}, client {update.client}"
                _check_update(update.tensors, update.buffers, parameters, buffers, own, whole=update.sanitised is None)
                if update.labels is not None:
                    _check_labels(update.labels, self.task_info, own)
        self._checked = True

    def fingerprint(self) -> str:
        """Return a hash of all updates and records, by which a ground truth knows the transcript it belongs to.

        Its value stands in files: it stays as it was in version 1.
        """
        digest = hashlib.sha256()
        for record in self.rounds:
            for update in record.updates:
                digest.update(f"{record.index}/{update.client}/{update.kind}/{update.num_examples}".encode())
                for name in sorted(update.tensors):
                    digest.update(name.encode())
                    digest.update(tensor_bytes(update.tensors[name]))
        for tensor in vars(self.records).values() if self.records else ():
            digest.update(tensor_bytes(tensor))
        return digest.hexdigest()

    def save(self, folder: Path | str) -> None:
        """Write the transcript to ``folder``, which must be empty or new.

        Raises:
            BadInput: the folder is in use or can't be written.
        """
        folder = Path(folder)
        try:
            check_new(folder)
            folder.mkdir(parents=True, exist_ok=True)
            rounds = [_save_round(folder, r) for r in self.rounds]
            if self.adversary_log:
                save_file(
                    {k: v.detach().cpu().contiguous() for k, v in self.adversary_log.items()}, folder / ADVERSARY_LOG
                )
            if self.records:
                save_file({k: v.contiguous() for k, v in vars(self.records).items()}, folder / RECORDS)
            task_info = TypeAdapter(TaskInfo).dump_python(self.task_info, mode="json")
            index = _Index(format=FORMAT, version=VERSION, name=self.name, setup=task_info, rounds=rounds)
            (folder / INDEX).write_text(index.model_dump_json(indent=2, by_alias=True) + "\n", encoding="utf-8")
        except (OSError, SafetensorError) as error:
            raise BadInput(f"can't write the transcript to '{folder}': {error}") from None

    @classmethod
    def load(cls, folder: Path | str, module: nn.Module | None = None, loss: Loss | None = None) -> Transcript:
        """Read a transcript and check all of it against the architecture.

        Args:
            folder: as written by :meth:`save`.
            module: the architecture, needed where the federation trained a user's own module.
            loss: likewise.

        Raises:
            BadInput: there is no transcript there, or it needs ``module`` or ``loss``.
            CorruptTranscript: something is missing, misshapen, not finite, truncated, or contradicts something else.
        """
        folder = Path(folder)
        index = _read_index(folder)
        task_info = _read_setup(folder / INDEX, index.task_info)
        if (module is None and task_info.model == "custom") or (loss is None and task_info.loss == "custom"):
            own = "model" if task_info.model == "custom" else "loss"
            raise BadInput(f"the transcript in '{folder}' is of a user's own {own}; load it from Python and pass that")
        try:
            loss = loss or loss_function(task_info.loss)
            if module is None:
                module = build_model(
                    task_info.model, input_shape=task_info.input_shape, outputs=task_info.outputs, width=task_info.width
                )
        except BadInput as error:
            raise CorruptTranscript(f"{folder / INDEX}: {error}") from None
        state, parameters, buffers = _expected(module)
        rounds = []
        for entry in index.rounds:
            weights = _read_tensors(folder, entry.weights, state)
            updates = [_read_update(folder, u, parameters, buffers, task_info) for u in entry.updates]
            rounds.append(Round(entry.index, weights, updates, entry.rejected, entry.fallback))
        adversary_log = _read_file(folder, ADVERSARY_LOG) if (folder / ADVERSARY_LOG).is_file() else {}
        records = _read_records(folder, task_info) if (folder / RECORDS).is_file() else None
        loaded = cls(index.name, task_info, module, loss, rounds, adversary_log, records)
        loaded._checked = True
        return loaded


_Natural = Annotated[int, Field(ge=0, lt=2**31)]
_STRICT = ConfigDict(extra="forbid", strict=True)


def check_new(folder: Path) -> None:
    """Refuse a folder that something is in.

    Raises:
        BadInput: it isn't new or empty, or can't be read.
    """
    try:
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise BadInput(f"'{folder}' exists and isn't an empty folder; choose a new one for the transcript")
    except OSError as error:
        raise BadInput(f"can't read '{folder}': {error.strerror or error}") from None


class _UpdateEntry(BaseModel):
    model_config = _STRICT
    client: _Natural
    kind: UpdateKind
    file: str
    num_examples: Annotated[int, Field(ge=1, le=10_000_000)]
    training: TrainingConfig | None = Field(alias="facts")  # its name in version 1
    labels: list[_Natural] | list[Number] | None = None
    sanitised: SanitiserInfo | None = None


class _RoundEntry(BaseModel):
    model_config = _STRICT
    index: _Natural
    weights: str
    updates: Annotated[list[_UpdateEntry], Field(min_length=1)]
    rejected: dict[int, str] = {}
    fallback: str | None = None


class _Index(BaseModel):
    model_config = _STRICT
    format: str
    version: int
    name: Name
    task_info: dict[str, Any] = Field(alias="setup")  # its name in version 1
    rounds: Annotated[list[_RoundEntry], Field(min_length=1)]


def _save_round(folder: Path, record: Round) -> _RoundEntry:
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
            _UpdateEntry(
                client=update.client,
                kind=update.kind,
                file=file,
                num_examples=update.num_examples,
                facts=update.training,
                labels=labels,
                sanitised=update.sanitised,
            )
        )
    return _RoundEntry(
        index=record.index, weights=weights, updates=entries, rejected=record.rejected, fallback=record.fallback
    )


def _read_index(folder: Path) -> _Index:
    path = folder / INDEX
    if not path.is_file():
        raise BadInput(f"no transcript in '{folder}': it has no {INDEX}; make one with 'fedaudit simulate'")
    try:
        text = path.read_text(encoding="utf-8")
        _check_version(path, text)
        index = _Index.model_validate_json(text)
    except UnicodeDecodeError:
        raise CorruptTranscript(f"{path} is not UTF-8 text") from None
    except OSError as error:
        raise BadInput(f"can't read {path}: {error.strerror or error}") from None
    except ValidationError as error:
        raise CorruptTranscript(f"{path} is not a transcript's index: {explain(error, _Index)}") from None
    except CorruptTranscript:
        raise
    except BadInput as error:  # from how an update was trained
        raise CorruptTranscript(f"{path}: {error}") from None
    _check_order(path, index.rounds)
    return index


class _Header(BaseModel):
    format: str
    version: int


def _check_version(path: Path, text: str) -> None:
    """Read format and version first: what another version's index holds isn't known here."""
    header = _Header.model_validate_json(text)
    if header.format != FORMAT:
        raise CorruptTranscript(f"{path}: format is '{header.format}', not '{FORMAT}'")
    if header.version != VERSION:
        raise CorruptTranscript(f"{path}: version {header.version} can't be read by this fedaudit, only {VERSION}")


def _check_order(path: Path | str, rounds: Sequence[_RoundEntry | Round]) -> None:
    numbers = [r.index for r in rounds]
    if any(b <= a for a, b in itertools.pairwise(numbers)):
        raise CorruptTranscript(f"{path}: rounds {numbers} are not in order, each once")
    if len({u.kind for r in rounds for u in r.updates}) > 1:
        raise CorruptTranscript(f"{path}: some updates are gradients and some are weights; a federation has one kind")
    for entry in rounds:
        clients = [u.client for u in entry.updates]
        if len(set(clients)) < len(clients):
            raise CorruptTranscript(f"{path}: a client sent two updates in round {entry.index}; it sends one")
        absent = set(entry.rejected) - set(clients)
        if absent:
            raise CorruptTranscript(f"{path}: round {entry.index} rejects client {min(absent)}, who sent nothing")


def _read_setup(path: Path, values: dict[str, Any]) -> TaskInfo:
    try:
        return TypeAdapter(TaskInfo).validate_python(values)
    except ValidationError as error:
        raise CorruptTranscript(f"{path}: 'setup' is broken: {explain(error)}") from None
    except BadInput as error:
        raise CorruptTranscript(f"{path}: 'setup' is broken: {error}") from None


def _read_file(folder: Path, file: str) -> dict[str, Tensor]:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}", file) or (folder / file).is_symlink():
        raise CorruptTranscript(f"the index of '{folder}' names a file that isn't a plain one beside it: {file[:80]!r}")
    path = folder / file
    if not path.is_file():
        raise CorruptTranscript(f"{path} is missing; the transcript is incomplete")
    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        raise CorruptTranscript(f"{path} is truncated or not a safetensors file ({error})") from None


def _expected(module: nn.Module) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
    """Return the whole state of ``module``, its trainable parameters, and the buffers that travel."""
    state = module.state_dict()
    parameters = {name: p.detach() for name, p in module.named_parameters() if p.requires_grad}
    return state, parameters, {name: b for name, b in module.named_buffers() if name in state}


def _check(tensors: dict[str, Tensor], wanted: dict[str, Tensor], path: Path | str) -> None:
    for name, own in wanted.items():
        if name not in tensors:
            raise CorruptTranscript(f"{path}: tensor '{name}' is missing")
        given = tensors[name]
        if given.shape != own.shape:
            shapes = f"shape {tuple(given.shape)}, the model needs {tuple(own.shape)}"
            raise CorruptTranscript(f"{path}: tensor '{name}' has {shapes}")
        if given.dtype != own.dtype:
            raise CorruptTranscript(f"{path}: tensor '{name}' is {given.dtype}, the model needs {own.dtype}")
    for name, tensor in tensors.items():
        if name not in wanted:
            raise CorruptTranscript(f"{path}: the model has no tensor '{name}'")
        if not torch.isfinite(tensor).all():
            raise CorruptTranscript(f"{path}: tensor '{name}' has NaN or infinite values")


def _read_tensors(folder: Path, file: str, wanted: dict[str, Tensor]) -> dict[str, Tensor]:
    tensors = _read_file(folder, file)
    _check(tensors, wanted, folder / file)
    return tensors


def _read_update(
    folder: Path, entry: _UpdateEntry, parameters: dict[str, Tensor], buffers: dict[str, Tensor], task_info: TaskInfo
) -> Update:
    tensors = _read_file(folder, entry.file)
    path = folder / entry.file
    moved = {k.removeprefix("buffers/"): v for k, v in tensors.items() if k.startswith("buffers/")}
    own = {k: v for k, v in tensors.items() if not k.startswith("buffers/")}
    filed = {f"parameters/{k}": v for k, v in parameters.items()}
    sent = _check_update(own, moved, filed, buffers, path, whole=entry.sanitised is None)
    try:
        return Update(
            client=entry.client,
            kind=entry.kind,
            tensors={name.removeprefix("parameters/"): own[name] for name in sent},  # in the model's order
            num_examples=entry.num_examples,
            training=entry.training,
            buffers=moved,
            labels=None if entry.labels is None else _labels(entry.labels, task_info.num_classes),
            sanitised=entry.sanitised,
        )
    except BadInput as error:
        raise CorruptTranscript(f"{path}: {error}") from None


def _check_update(
    own: dict[str, Tensor],
    moved: dict[str, Tensor],
    parameters: dict[str, Tensor],
    buffers: dict[str, Tensor],
    path: Path | str,
    *,
    whole: bool,
) -> dict[str, Tensor]:
    """Return those of ``parameters`` that were sent in ``own``, and refuse what isn't as the model has it.

    A sanitiser may hold tensors back, but then says that it was there; without one the update must be ``whole``.
    """
    sent = {k: v for k, v in parameters.items() if whole or k in own}
    if not sent:
        raise CorruptTranscript(f"{path}: there is no parameter of the model in it")
    _check(own, sent, path)
    _check(moved, {k: v for k, v in buffers.items() if k in moved}, path)
    return sent


def _read_records(folder: Path, task_info: TaskInfo) -> Records:
    tensors = _read_file(folder, RECORDS)
    path = folder / RECORDS
    if set(tensors) != {field.name for field in dataclasses.fields(Records)}:
        raise CorruptTranscript(f"{path}: {', '.join(sorted(tensors))[:80]} are no records")
    for part in ("", "public_"):
        inputs, labels = tensors[f"{part}inputs"], tensors[f"{part}labels"]
        check_examples(inputs, labels, task_info, len(inputs), f"{path}: {part}records")
    records = Records(**tensors)
    k, c = records.codes.shape if records.codes.ndim == 2 else (-1, -1)
    columns, values = records.columns, records.public_values
    wrong = columns.shape != (c,) or columns.dtype != torch.int64 or not torch.isfinite(records.codes).all()
    wrong |= bool(((columns < 0) | (columns >= task_info.input_shape[0])).any())
    wrong |= values.shape != (len(records.public_inputs) if k else 0,) or values.dtype != torch.int64
    if wrong or bool(((values < 0) | (values >= k)).any()):
        raise CorruptTranscript(f"{path}: what it says of the hidden attribute is broken")
    return records


def check_examples(inputs: Tensor, labels: Tensor, task_info: TaskInfo, count: int, what: str) -> None:
    """Check that ``inputs`` and ``labels``, read from a file, are ``count`` examples of the kind in ``task_info``.

    Raises:
        CorruptTranscript: they aren't; ``what`` names them.
    """
    if inputs.shape != (count, *task_info.input_shape) or len(labels) != count:
        shapes = f"{tuple(inputs.shape)} inputs, {tuple(labels.shape)} labels"
        raise CorruptTranscript(f"{what}: {shapes}; expected {count} of shape {task_info.input_shape}")
    if fault := task_info.example_kind.fault(inputs):
        raise CorruptTranscript(f"{what}: {fault}")
    _check_labels(labels, task_info, what)


def _check_labels(labels: Tensor, task_info: TaskInfo, where: str) -> None:
    classes = task_info.num_classes
    if classes is None:
        wrong = labels.ndim != 2 or labels.shape[1] != 1 or not bool(torch.isfinite(labels).all())
    else:
        wrong = labels.dtype != torch.int64 or labels.ndim != 1 or bool(((labels < 0) | (labels >= classes)).any())
    if wrong:
        raise CorruptTranscript(f"{where}: the labels are none of this model's")


def _labels(values: list[int] | list[float], classes: int | None) -> Tensor:
    if classes is None:
        return torch.tensor(values, dtype=torch.float32).view(-1, 1)
    labels = torch.tensor(values)
    if labels.is_floating_point() or bool((labels >= classes).any()):
        raise BadInput(f"a label is outside of 0..{classes - 1}")
    return labels
