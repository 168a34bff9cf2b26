"""A transcript's folder: what lies in it, how it is written round by round, and its indices read; never a pickle.

``index.json`` says what is known of the federation; ``round-NNNNN.json`` says of every closed round what travelled, in
safetensors files beside it. What there is of the whole federation (:data:`PARTS`) lies in a sealed file each, the truth
apart (:mod:`fedaudit.transcript.truth`). A round's index lists the digests of its files and of the round before; all
are sealed (:mod:`fedaudit.utils.integrity`) with the transcript's identifier. :mod:`fedaudit.transcript.reading` makes
updates of it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_serializer,
)
from safetensors import SafetensorError
from torch import Tensor

from fedaudit.epsilon import Adjacency, Unit
from fedaudit.epsilon.canaries import OBSERVERS, Canaries, TextCanaries
from fedaudit.modalities import Packing, TokenInfo
from fedaudit.modalities.columns import Column
from fedaudit.task.info import TaskInfo
from fedaudit.task.targets import TaskName
from fedaudit.task.training import TrainingConfig
from fedaudit.transcript.rounds import REMEDY, Digest, Files
from fedaudit.transcript.sent import SENT, entries_by_kind
from fedaudit.transcript.update import CONTRADICTED, ClientDefenceInfo, Replay
from fedaudit.utils.bounds import JSON, TENSORS, check_file, read_bytes
from fedaudit.utils.distributions import lacking
from fedaudit.utils.errors import BadInput, CorruptTranscript
from fedaudit.utils.integrity import (
    blank,
    check,
    digest_in,
    file_sha256,
    load_sealed,
    save_sealed,
    sealed,
    write_whole,
)
from fedaudit.utils.tensor_files import pieces, write
from fedaudit.utils.validation import Number, explain, safe_name

FORMAT = "fedaudit-transcript"
VERSION = 3
INDEX = "index.json"
REPLAY = "replay.json"

# What a client sends: its weights after training, their difference to what it was sent, or a gradient.
Form = Literal["weights", "difference", "gradient"]
# Of the whole federation, in files of these names; what its protocol sent is in one of the protocol's name.
PARTS = ("queries", "adversary-log", "canaries")

_Natural = Annotated[int, Field(ge=0, lt=2**31)]
_Examples = Annotated[int, Field(ge=1, le=10_000_000)]
_Text = Annotated[str, Field(max_length=500)]
_Noise = Annotated[float, Field(ge=0, allow_inf_nan=False)]
_Share = Annotated[float, Field(gt=0, le=1)]
_OURS = ConfigDict(extra="forbid", allow_inf_nan=False)


class ObservedTask(BaseModel):
    """What was observed of the task; fields as of :class:`~fedaudit.task.info.TaskInfo`, None if it wasn't seen.

    ``outputs`` is how many the model has, ``least`` and ``most`` the range of each channel's values as the model saw
    them, from which mean and standard deviation are estimated where nobody gave them. ``order`` and ``flat`` are of
    :func:`fedaudit.models.of_one_tensor`.
    """

    model_config = _OURS

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
    task: TaskName | None = None
    packed_inputs: Packing | None = None
    heads: Packing | None = None
    packed_targets: Packing | None = None
    order: tuple[tuple[str, tuple[int, ...]], ...] | None = None
    flat: bool | None = None


class SentEntry(BaseModel):
    """A file with what was sent; the form ``update`` is ΔW, and buffers as they were after training."""

    model_config = _OURS

    form: Form | Literal["update"]
    file: str
    num_examples: _Examples | None = None
    training: TrainingConfig | None = None


class MessageEntry(SentEntry):
    """One client's message."""

    client: _Natural
    name: _Text | None = None
    seconds: Annotated[float, Field(ge=0)] | None = None
    labels: list[_Natural] | list[Number] | None = None
    sanitised: ClientDefenceInfo | None = None
    members: tuple[_Natural, ...] = ()
    notes: list[_Text] = []


class TotalEntry(SentEntry):
    """What several clients, of whom nothing else is known, sent together."""

    clients: Annotated[int, Field(ge=1, le=1_000_000)]


class RoundEntry(BaseModel):
    """The index of one closed round."""

    model_config = _OURS

    index: _Natural
    time: str | None = None
    weights: str
    client_weights: dict[_Natural, str] = Field(default={}, description="of clients who were sent other weights")
    messages: list[MessageEntry] = []
    total: TotalEntry | None = None
    rejected: dict[int, str] = {}
    fallback: str | None = None
    files: Files = {}
    before: Digest | None = Field(default=None, description="digest of the round before; null of the first")
    digest: Digest


class Header(BaseModel):
    """``index.json``; ``last`` is the digest of a round up to which, at least, all were closed.

    Of a federation that really ran the task is only ``observed``, as far as it was seen, until it is read with the
    module that clients trained. ``clients``: of recorded boosted trees their names, by number; messages have others'.
    """

    model_config = _OURS

    format: str = FORMAT
    version: int = VERSION
    source: Literal["simulated", "captured"]
    name: str
    id: Annotated[str, Field(pattern=r"^[0-9a-f]{8,64}$")]
    task: TaskInfo | None = None
    observed: ObservedTask = ObservedTask()
    partial: bool = False
    parts: list[str] = []
    clients: list[str] = []
    notes: list[str] = []
    central: dict[str, str | int | float | None] | None = Field(
        default=None, description="of a server that adds noise to a mean: its aggregator, as a scenario has it"
    )
    last: Digest | None = None
    digest: Digest

    @model_serializer(mode="wrap")
    def _written(self, plain: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out what versions before don't know, where there is nothing to say."""
        return {key: value for key, value in plain(self).items() if key != "central" or value is not None}

    @field_validator("parts")
    @classmethod
    def _known(cls, parts: list[str]) -> list[str]:
        known = [*PARTS, *entries_by_kind()]
        if unknown := [part for part in parts if part not in known and not lacking(SENT.group, part)]:
            raise ValueError(f"'{unknown[0][:40]}' is none of {', '.join(known)}")
        return parts

    @field_validator("name")
    @classmethod
    def _safe(cls, name: str, info: ValidationInfo) -> str:
        return safe_name(name) if info.data.get("source") == "simulated" else name


class _Start(BaseModel):
    """What every version's index begins with; what else another version's holds isn't known here."""

    format: str
    version: int


def round_file(index: int) -> str:
    """Return the name of the index of round ``index``."""
    return f"round-{index:05d}.json"


def travelled(folder: Path) -> str | None:
    """Return the protocol whose messages lie in ``folder`` as they travelled, with their facts in ``PROTOCOL.yaml``."""
    kinds = (path.stem for path in sorted(folder.glob("*.yaml")) if not (folder / INDEX).exists())
    return next((kind for kind in kinds if kind in SENT or lacking(SENT.group, kind)), None)


# --- writing --------------------------------------------------------------------------------------------------------


class Writer:
    """The only writer of transcripts: tensors first, then their round's index, then the folder's.

    A round is readable as soon as it is closed, whatever happens later. What changes in ``header`` is written with the
    next round; ``before`` is the digest of the last closed round, where a transcript goes on.
    """

    def __init__(self, folder: Path, header: Header, before: str | None = None) -> None:
        self.folder, self.header, self._before = folder, header, before
        self._digests: dict[str, Future[str]] = {}  # of the open round's files
        self._beside: ThreadPoolExecutor | None = None  # computes digests, which takes longer than writing
        folder.mkdir(parents=True, exist_ok=True)
        self.write_header()

    def write_tensors(self, file: str, tensors: Mapping[str, Tensor]) -> None:
        """Write a file of the open round; nothing stays of one that can't be written (OSError, ValueError)."""
        try:
            with (self.folder / file).open("wb") as opened:
                write(opened, pieces({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}))
        except OSError:
            self._remove(file)
            raise
        self._beside = self._beside or ThreadPoolExecutor(1)
        self._digests[file] = self._beside.submit(file_sha256, self.folder / file)

    def close_round(self, entry: RoundEntry | None) -> None:
        """Write the index of the round whose files were written; nothing stays of a round without one (None)."""
        digests, self._digests = self._digests, {}
        if self._beside is not None:
            self._beside.shutdown()
            self._beside = None
        if entry is None:
            self._remove(*digests)
            return
        entry.files = {file: digest.result() for file, digest in digests.items()}
        entry.before = self._before
        file = round_file(entry.index)
        try:
            self.write_header()  # what was learnt of the task
            self._before = self.header.last = self._write(file, entry, f"{self.header.id}/{file}")
        except OSError:
            self._remove(file, *digests)
            raise
        self.write_header()

    def write_part(self, part: str, tensors: Mapping[str, Tensor], entry: BaseModel | None = None) -> None:
        """Write what there is of the whole federation, or write it anew; the header names it from its next writing."""
        file = f"{part}.safetensors"
        values = {} if entry is None else {"entry": entry.model_dump(mode="json")}
        save_sealed(self.folder / file, tensors, values, f"{self.header.id}/{file}")
        if part not in self.header.parts:
            self.header.parts.append(part)

    def write_header(self) -> None:
        """Write ``index.json``."""
        self._write(INDEX, self.header)

    def _remove(self, *files: str) -> None:
        for file in files:
            with suppress(OSError):
                (self.folder / file).unlink()

    def _write(self, file: str, what: Header | RoundEntry, about: str = "") -> str | None:
        what.digest = blank()
        data = sealed(what.model_dump_json(indent=2) + "\n", about)
        write_whole(self.folder / file, data)
        return digest_in(data)


# --- reading --------------------------------------------------------------------------------------------------------


def read_header(folder: Path) -> Header:
    """Return what ``index.json`` says; BadInput: there is none, an earlier version wrote it, or the key doesn't fit."""
    path = folder / INDEX
    if not path.is_file():
        command = "convert" if travelled(folder) else "simulate"
        raise BadInput(f"no transcript in '{folder}': it has no {INDEX}; make one with 'fedaudit {command}'")
    try:
        data = read_bytes(path, JSON)
        start = _Start.model_validate_json(data)
        if start.format != FORMAT:
            raise CorruptTranscript(f"{path}: format is '{start.format}', not '{FORMAT}'")
        if 0 < start.version < VERSION:
            raise BadInput(
                f"an earlier fedaudit wrote the transcript in '{folder}': convert it with 'fedaudit convert OLD NEW'"
            )
        if start.version != VERSION:
            raise CorruptTranscript(f"{path}: version {start.version} can't be read by this fedaudit, only {VERSION}")
        check(path, remedy=REMEDY, data=data, needed="part of a transcript")
        return _header(path, data)
    except ValidationError as error:
        raise CorruptTranscript(f"{path} is not a transcript's index: {explain(error, Header)}") from None
    except OSError as error:
        raise BadInput(f"can't read {path}: {error.strerror or error}") from None


def _header(path: Path, data: bytes) -> Header:
    try:
        return Header.model_validate_json(data, strict=True)
    except BadInput as error:  # from what the task is
        raise CorruptTranscript(f"{path}: {error}") from None


def read_rounds(folder: Path, header: Header) -> list[RoundEntry]:
    """Return the indices of all closed rounds, in order; CorruptTranscript where some are missing or misplaced."""
    entries: list[RoundEntry] = []
    for path in sorted(folder.glob("round-*.json")):
        try:
            data = read_bytes(path, JSON)
            check(path, f"{header.id}/{path.name}", remedy=REMEDY, data=data, needed="part of a transcript")
            entry = RoundEntry.model_validate_json(data, strict=True)
        except ValidationError as error:
            raise CorruptTranscript(f"{path} is not a round's index: {explain(error, RoundEntry)}") from None
        except OSError as error:
            raise BadInput(f"can't read {path}: {error.strerror or error}") from None
        if entry.before != (entries[-1].digest if entries else None):
            raise CorruptTranscript(f"{path} doesn't go on from the round before: one is missing or was put there")
        if path.name != round_file(entry.index):
            raise CorruptTranscript(f"{path} is the index of round {entry.index}")
        if len({m.client for m in entry.messages}) < len(entry.messages):
            raise CorruptTranscript(f"{path}: a client sent two updates in round {entry.index}; it sends one")
        entries.append(entry)
    if header.last and header.last not in {entry.digest for entry in entries}:
        raise CorruptTranscript(f"'{folder}' lacks rounds that were closed: somebody or something deleted them")
    return entries


def read_part(folder: Path, header: Header, part: str) -> tuple[Any, dict[str, Tensor]] | None:
    """Return what there is of the whole federation, an entry in plain values and tensors; None where nothing is."""
    path = folder / f"{part}.safetensors"
    if not path.is_file() or path.is_symlink():
        if part in header.parts or path.is_symlink():
            raise CorruptTranscript(f"{path} is missing; the transcript is incomplete")
        return None
    try:
        check_file(path, TENSORS)
        about = f"{header.id}/{path.name}"
        values, tensors, _ = load_sealed(path, about, own=["entry"], remedy=REMEDY, needed="part of a transcript")
        return values.get("entry"), tensors
    except (SafetensorError, OSError, TypeError, KeyError, ValueError, RecursionError) as error:
        raise CorruptTranscript(f"{path} is truncated or not a transcript's ({str(error)[:80]!r})") from None


# --- canaries -------------------------------------------------------------------------------------------------------


class CanariesEntry(BaseModel):
    """All of :class:`~fedaudit.epsilon.canaries.Canaries` but its readings."""

    model_config = ConfigDict(extra="forbid", strict=True, from_attributes=True)

    unit: Unit
    adjacency: Adjacency
    noise: dict[str, _Noise]
    rates: dict[str, _Share]
    steps: Annotated[int, Field(ge=1)]
    covered: tuple[str, ...]
    claimed: Annotated[float, Field(ge=0)] | None
    delta: Annotated[float, Field(gt=0, lt=1)]
    joint: bool = False
    gaussian: bool = False
    texts: bool = False

    def canaries(self, readings: dict[str, Tensor], path: Path) -> Canaries:
        """Return the canaries with ``readings``, read from ``path``, of which there must be as many."""
        for name, values in readings.items():
            whole = values.ndim == 2 and values.dtype == torch.float64 and not bool(values.isinf().any())
            if name not in OBSERVERS or not whole or not values.numel():
                raise CorruptTranscript(f"{path}: '{name[:40]}' are no readings of canaries")
        if len({values.shape[1] for values in readings.values()}) != 1:
            raise CorruptTranscript(f"{path}: the readings aren't of the same canaries")
        if not {*self.noise, *self.rates, *self.covered} <= OBSERVERS.keys():
            raise CorruptTranscript(f"{path}: an observer of the canaries isn't known")
        told = dict(self)
        return (TextCanaries if told.pop("texts") else Canaries)(readings=readings, **told)

    @model_serializer(mode="wrap")
    def _as_before(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Return what is written: of canaries that aren't texts what was before there were such."""
        told: dict[str, Any] = write(self)
        if not self.texts:
            del told["texts"]
        return told


# --- replay ---------------------------------------------------------------------------------------------------------


class _ReplayEntry(BaseModel):
    model_config = _OURS
    round: _Natural
    client: _Natural
    error: Annotated[float, Field(ge=0)] | None = Field(description="null: the replayed training diverged")
    rounding: Annotated[float, Field(ge=0)] | None = 0.0  # null: so moved it diverged
    home: _Text = ""
    explanation: _Text = ""
    left: Annotated[float, Field(ge=0)] | None = 0.0  # null: it can't be repeated

    def replay(self) -> Replay:
        error, rounding, left = (math.inf if v is None else v for v in (self.error, self.rounding, self.left))
        return Replay(error, rounding, self.home, self.explanation, left)


class _Replays(BaseModel):
    model_config = _OURS
    updates: list[_ReplayEntry]
    digest: Digest


def read_replay(folder: Path, identifier: str) -> dict[tuple[int, int], Replay]:
    """Return what an earlier replay check of the transcript found: (round, client) to how close it came.

    An earlier version kept no explanation, so what it took for a contradiction may be none: that is left out as never
    checked, and checked again where the truth is there.
    """
    path = folder / REPLAY
    if not path.is_file():
        return {}
    try:
        data = read_bytes(path, JSON)
        found = _Replays.model_validate_json(data)
        check(path, f"{identifier}/{REPLAY}", remedy="delete it, and it is made again", data=data)
    except ValidationError as error:
        raise CorruptTranscript(f"{path} is damaged: {explain(error)}; delete it, and it is made again") from None
    except OSError as error:
        raise BadInput(f"can't read {path}: {error.strerror or error}") from None
    return {
        (e.round, e.client): e.replay()
        for e in found.updates
        if "explanation" in e.model_fields_set or (e.error is not None and e.error <= CONTRADICTED)
    }


def write_replay(folder: Path, identifier: str, replays: Mapping[tuple[int, int], Replay]) -> None:
    """Keep what a replay check found beside the transcript; a folder that can't be written to stays as it is."""
    entries = [
        _ReplayEntry(round=r, client=c, **{k: None if v == math.inf else v for k, v in one._asdict().items()})
        for (r, c), one in sorted(replays.items())
    ]
    try:
        text = _Replays(updates=entries, digest=blank()).model_dump_json(indent=2) + "\n"
        write_whole(folder / REPLAY, sealed(text, f"{identifier}/{REPLAY}"))
    except OSError:
        return
