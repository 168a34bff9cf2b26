"""The ordered record of what travelled: a folder of safetensors files and one JSON index; never a pickle."""

from __future__ import annotations

import dataclasses
import hashlib
import reprlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
)
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from fedaudit.epsilon.canaries import Canaries
from fedaudit.models import build_model
from fedaudit.models.front import with_front
from fedaudit.task.info import TaskInfo
from fedaudit.task.training import Loss, loss_function
from fedaudit.transcript import files as recorded
from fedaudit.transcript.canary_files import CANARIES, CanariesEntry
from fedaudit.transcript.queries import Records
from fedaudit.transcript.recorded_canaries import load_canaries
from fedaudit.transcript.round_files import RoundEntry, read_round, save_round
from fedaudit.transcript.rounds import (
    REMEDY,
    Digest,
    Files,
    Round,
    check_examples,
    check_labels,
    check_new,
    check_order,
    check_tensors,
    check_update,
    expected,
    read_file,
)
from fedaudit.transcript.update import UpdateKind
from fedaudit.transcript.vertical import VERTICAL, VerticalEntry, VerticalRecord
from fedaudit.utils.bounds import JSON, read_bytes
from fedaudit.utils.errors import BadInput, CorruptTranscript
from fedaudit.utils.fingerprint import fingerprint, tensor_bytes
from fedaudit.utils.integrity import blank, check, file_sha256, sealed
from fedaudit.utils.validation import Name, explain

FORMAT = "fedaudit-transcript"
VERSION = 1
INDEX = "index.json"
ADVERSARY_LOG = "journal.safetensors"
RECORDS = "records.safetensors"


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
        canaries: what observers read of an audit's canaries, if there were any.
        vertical: of a vertical federation all that travelled; it has no ``rounds``. None of a horizontal one.
        clients: number to the name that the framework has for it; empty where clients are only numbered.
        partial: whether updates may hold only some of the model's parameters (adapters, some layers).
        replay_errors: (round, client) to the relative error with which local training, repeated on the truth, gives
            the update; of those that were checked.
        notes: what readers should know of the recording.
        recording: identifier of what :class:`fedaudit.Recorder` wrote; None of a simulation.
    """

    name: str
    task_info: TaskInfo
    module: nn.Module
    loss: Loss
    rounds: list[Round]
    adversary_log: dict[str, Tensor] = field(default_factory=dict)
    records: Records | None = None
    clients: dict[int, str] = field(default_factory=dict)
    partial: bool = False
    replay_errors: dict[tuple[int, int], float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    recording: str | None = None
    canaries: Canaries | None = None
    vertical: VerticalRecord | None = None
    _checked: bool = field(default=False, init=False)

    def __repr__(self) -> str:
        what = f"{self.task_info.model} on {'x'.join(map(str, self.task_info.input_shape))}"
        return f"Transcript({reprlib.repr(self.name)}: {self.updates} updates in {len(self.rounds)} rounds, {what})"

    @property
    def updates(self) -> int:
        """Number of updates in all rounds."""
        return sum(len(r.updates) for r in self.rounds)

    @property
    def update_kind(self) -> UpdateKind:
        """What clients send; ``weights`` where no single update can be read."""
        if self.vertical is not None:
            return "gradient"
        return next((u.kind for r in self.rounds for u in r.updates), "weights")

    def check(self) -> None:
        """Refuse, once, what :meth:`load` refuses: one that was made in Python may hold anything.

        Raises:
            CorruptTranscript: something is missing, misshapen, not finite, or contradicts something else.
        """
        if self._checked:
            return
        where = f"transcript '{self.name}'"
        if self.vertical is not None:
            self.vertical.check(self.module, self.task_info, where)
            self._checked = True
            return
        if not self.rounds or not all(r.updates or self.recording for r in self.rounds):
            raise CorruptTranscript(f"{where}: there must be a round, and an update in every one")
        check_order(where, self.rounds)
        state, parameters, buffers = expected(self.module)
        for record in self.rounds:
            place = f"{where}, round {record.index}"
            check_tensors(record.weights, state, f"{place}, global weights")
            for client, own_weights in record.own_weights.items():
                check_tensors(own_weights, state, f"{place}, weights sent to client {client}")
            for update in record.updates:
                own = f"{place}, client {update.client}"
                whole = update.sanitised is None and not self.partial
                check_update(update.tensors, update.buffers, parameters, buffers, own, whole=whole)
                if update.labels is not None:
                    check_labels(update.labels, self.task_info, own)
        self._checked = True

    def fingerprint(self) -> str:
        """Return a hash of all updates and records, by which a ground truth knows the transcript it belongs to.

        Of a recording it is made from the recording's identifier, and which updates there are.
        Its value stands in files: it stays as it was in version 1.
        """
        digest = hashlib.sha256()
        if self.recording:
            updates = [(r.index, u.client) for r in self.rounds for u in r.updates]
            return hashlib.sha256(f"{self.recording}/{updates}".encode()).hexdigest()
        for record in self.rounds:
            for update in record.updates:
                digest.update(f"{record.index}/{update.client}/{update.kind}/{update.num_examples}".encode())
                for name in sorted(update.tensors):
                    digest.update(name.encode())
                    digest.update(tensor_bytes(update.tensors[name]))
        for tensor in self.records.stored().values() if self.records is not None else ():
            digest.update(tensor_bytes(tensor))
        for known in (self.canaries, self.vertical):
            if known:
                digest.update(fingerprint(known).encode())
        return digest.hexdigest()

    def digest(self) -> str:
        """Return a digest, 64 hexadecimal digits, of all that travelled and was recorded, by which results name it.

        The architecture isn't in it (``task_info`` names it), nor what was added later: replay errors and notes.
        """
        parts = (self.rounds, self.adversary_log, self.records, self.clients, self.partial, self.recording)
        added = [known for known in (self.canaries, self.vertical) if known]
        return fingerprint(self.name, self.task_info, *parts, *added)

    def save(self, folder: Path | str) -> None:
        """Write the transcript to ``folder``, which must be empty or new, sealed (see :mod:`fedaudit.utils.integrity`).

        Raises:
            BadInput: the folder is in use or can't be written.
        """
        folder = Path(folder)
        try:
            check_new(folder)
            folder.mkdir(parents=True, exist_ok=True)
            rounds = [save_round(folder, r) for r in self.rounds]
            if self.adversary_log:
                save_file(
                    {k: v.detach().cpu().contiguous() for k, v in self.adversary_log.items()}, folder / ADVERSARY_LOG
                )
            if self.records is not None:
                save_file({k: v.contiguous() for k, v in self.records.stored().items()}, folder / RECORDS)
            if self.canaries:
                save_file({k: v.contiguous() for k, v in self.canaries.readings.items()}, folder / CANARIES)
            if self.vertical:
                save_file({k: v.contiguous() for k, v in self.vertical.tensors().items()}, folder / VERTICAL)
            task_info = TypeAdapter(TaskInfo).dump_python(self.task_info, mode="json")
            for later in ("columns", "front"):  # earlier versions read it, too
                if not getattr(self.task_info, later):
                    del task_info[later]
            files = {path.name: file_sha256(path) for path in sorted(folder.iterdir())}
            index = _Index(
                format=FORMAT,
                version=VERSION,
                name=self.name,
                setup=task_info,
                rounds=rounds,
                files=files,
                canaries=CanariesEntry.of(self.canaries) if self.canaries else None,
                vertical=VerticalEntry.of(self.vertical) if self.vertical else None,
                digest=blank(),
            )
            without = {name for name in ("canaries", "vertical") if not getattr(self, name)}
            (folder / INDEX).write_bytes(sealed(index.model_dump_json(indent=2, by_alias=True, exclude=without) + "\n"))
        except (OSError, SafetensorError) as error:
            raise BadInput(f"can't write the transcript to '{folder}': {error}") from None

    @classmethod
    def load(
        cls,
        folder: Path | str,
        module: nn.Module | None = None,
        loss: Loss | None = None,
        *,
        task: Mapping[str, Any] | None = None,
        rounds: Collection[int] | None = None,
    ) -> Transcript:
        """Read a transcript and check all of it against the architecture.

        Args:
            folder: as written by :meth:`save`, or by :class:`fedaudit.Recorder`.
            module: the architecture, needed where the federation trained a user's own module.
            loss: likewise.
            task: of a recording: what wasn't recorded of the task, or counts in place of it: ``mean``, ``std``,
                ``input_shape``, ``loss``, ``batch_norm``, ``dropout``, a table's ``columns``, ``tokens`` of text.
            rounds: of a recording: only these; default: all.

        Raises:
            BadInput: there is no transcript there, or it needs ``module`` or ``loss``.
            CorruptTranscript: something is missing, misshapen, not finite, truncated, or contradicts something else.
            BadInput: a file's digest doesn't fit, or can't be checked with the key that there is.
        """
        folder = Path(folder)
        if _version(folder) == recorded.VERSION:
            read = recorded.read_recording(folder, INDEX, module, loss, task or {}, rounds)
            assert module is not None
            made = cls(
                read.name,
                read.task_info,
                module,
                read.loss,
                read.rounds,
                clients=read.clients,
                partial=read.partial,
                replay_errors=read.replay_errors,
                notes=tuple(read.notes),
                recording=read.id,
                canaries=load_canaries(folder, read.id),
            )
            made.check()
            return made
        index, note = _read_index(folder)
        task_info = _read_setup(folder / INDEX, index.task_info)
        if (module is None and task_info.model == "custom") or (loss is None and task_info.loss == "custom"):
            own = "model" if task_info.model == "custom" else "loss"
            raise BadInput(f"the transcript in '{folder}' is of a user's own {own}; load it from Python and pass that")
        try:
            loss = loss or loss_function(task_info.loss, task_info.label_smoothing, task_info.class_weights)
            if module is None and index.vertical is not None:
                module = index.vertical.module(task_info)
            if module is None:
                module = build_model(
                    task_info.model,
                    input_shape=task_info.input_shape,
                    outputs=task_info.outputs,
                    width=task_info.width,
                    tokens=task_info.tokens,
                )
            module = with_front(module, task_info)
        except BadInput as error:
            raise CorruptTranscript(f"{folder / INDEX}: {error}") from None
        filed = [read_round(folder, entry, index.files, expected(module), task_info) for entry in index.rounds]
        there = {name for name in (ADVERSARY_LOG, RECORDS) if name in index.files or (folder / name).is_file()}
        adversary_log = read_file(folder, ADVERSARY_LOG, index.files) if ADVERSARY_LOG in there else {}
        records = _read_records(folder, index.files, task_info) if RECORDS in there else None
        canaries: Canaries | None = None
        if index.canaries is not None:
            canaries = index.canaries.canaries(read_file(folder, CANARIES, index.files), folder / CANARIES)
        vertical: VerticalRecord | None = None
        if index.vertical is not None:
            sent = read_file(folder, VERTICAL, index.files)
            vertical = index.vertical.record(sent, module, task_info, folder / VERTICAL)
        known: dict[str, Any] = {"notes": (note,) if note else (), "canaries": canaries, "vertical": vertical}
        loaded = cls(index.name, task_info, module, loss, filed, adversary_log, records, **known)
        loaded._checked = True
        return loaded


class _Index(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    format: str
    version: int
    name: Name
    task_info: dict[str, Any] = Field(alias="setup")  # its name in version 1
    rounds: list[RoundEntry]
    files: Files = {}
    canaries: CanariesEntry | None = None
    vertical: VerticalEntry | None = None
    digest: Digest | None = None


def _version(folder: Path) -> int | None:
    """Return the version of the transcript in ``folder``; None where that can't be told."""
    try:
        return _Header.model_validate_json(read_bytes(folder / INDEX, JSON)).version
    except (OSError, ValidationError, BadInput):
        return None


def _read_index(folder: Path) -> tuple[_Index, str | None]:
    """Return the index, and a note where it carries no digest."""
    path = folder / INDEX
    if not path.is_file():
        raise BadInput(f"no transcript in '{folder}': it has no {INDEX}; make one with 'fedaudit simulate'")
    try:
        data = read_bytes(path, JSON)
        text = data.decode()
        _check_version(path, text)
    except UnicodeDecodeError:
        raise CorruptTranscript(f"{path} is not UTF-8 text") from None
    except OSError as error:
        raise BadInput(f"can't read {path}: {error.strerror or error}") from None
    except ValidationError as error:
        raise CorruptTranscript(f"{path} is not a transcript's index: {explain(error, _Index)}") from None
    note = check(path, remedy=REMEDY, data=data)
    try:
        index = _Index.model_validate_json(text)
    except ValidationError as error:
        raise CorruptTranscript(f"{path} is not a transcript's index: {explain(error, _Index)}") from None
    except BadInput as error:  # from how an update was trained
        raise CorruptTranscript(f"{path}: {error}") from None
    if bool(index.rounds) == bool(index.vertical):
        why = "a vertical federation has none" if index.rounds else "at least one is needed"
        raise CorruptTranscript(f"{path} is not a transcript's index: rounds: {why}")
    check_order(path, index.rounds)
    return index, note


class _Header(BaseModel):
    format: str
    version: int


def _check_version(path: Path, text: str) -> None:
    """Read format and version first: what another version's index holds isn't known here."""
    header = _Header.model_validate_json(text)
    if header.format != FORMAT:
        raise CorruptTranscript(f"{path}: format is '{header.format}', not '{FORMAT}'")
    if header.version != VERSION:
        raise CorruptTranscript(
            f"{path}: version {header.version} can't be read by this fedaudit, only {VERSION} and {recorded.VERSION}"
        )


def _read_setup(path: Path, values: dict[str, Any]) -> TaskInfo:
    try:
        return TypeAdapter(TaskInfo).validate_python(values)
    except ValidationError as error:
        raise CorruptTranscript(f"{path}: 'setup' is broken: {explain(error)}") from None
    except BadInput as error:
        raise CorruptTranscript(f"{path}: 'setup' is broken: {error}") from None


def _read_records(folder: Path, files: Files, task_info: TaskInfo) -> Records:
    tensors = read_file(folder, RECORDS, files)
    path = folder / RECORDS
    if set(tensors) | {"public_property"} != {field.name for field in dataclasses.fields(Records)}:
        raise CorruptTranscript(f"{path}: {', '.join(sorted(tensors))[:80]} are no records")
    for part in ("", "public_"):
        inputs, labels = tensors[f"{part}inputs"], tensors[f"{part}labels"]
        if not inputs.ndim:
            raise CorruptTranscript(f"{path}: {part}records: the inputs are one number")
        check_examples(inputs, labels, task_info, len(inputs), f"{path}: {part}records")
    records = Records(**tensors)
    k, c = records.codes.shape if records.codes.ndim == 2 else (-1, -1)
    columns, values = records.columns, records.public_values
    wrong = columns.shape != (c,) or columns.dtype != torch.int64 or not torch.isfinite(records.codes).all()
    wrong |= bool(((columns < 0) | (columns >= task_info.input_shape[0])).any())
    wrong |= values.shape != (len(records.public_inputs) if k else 0,) or values.dtype != torch.int64
    if wrong or bool(((values < 0) | (values >= k)).any()):
        raise CorruptTranscript(f"{path}: what it says of the hidden attribute is broken")
    marks = records.public_property
    if marks.dtype != torch.bool or marks.shape not in ((0,), (len(records.public_inputs),)):
        raise CorruptTranscript(f"{path}: what it says of the property is broken")
    return records
