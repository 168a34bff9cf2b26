"""The ordered record of what travelled, in memory and as it is written and read."""

from __future__ import annotations

import hashlib
import json
import reprlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from torch import Tensor, nn

from fedaudit.epsilon.canaries import Canaries
from fedaudit.models import build_model, keep_modes, of_one_tensor, own_copy, packings_in
from fedaudit.models.inserted_module import with_inserted_module
from fedaudit.task.info import TaskInfo
from fedaudit.task.losses import LossOptions, as_called, recognise
from fedaudit.task.training import Loss, loss_function
from fedaudit.transcript import vertical  # noqa: F401 (it adds what is read of its protocol)
from fedaudit.transcript.files import (
    INDEX,
    PARTS,
    CanariesEntry,
    Header,
    MessageEntry,
    RoundEntry,
    Writer,
    read_header,
    read_part,
    read_replay,
    read_rounds,
    write_replay,
)
from fedaudit.transcript.queries import QuerySet, read_queries
from fedaudit.transcript.reading import Reader, complete_task
from fedaudit.transcript.rounds import (
    Round,
    check_labels,
    check_new,
    check_order,
    check_tensors,
    check_update,
    expected,
)
from fedaudit.transcript.sent import SENT, UPDATES, HasSent, Sent, SentEntry, entries_by_kind
from fedaudit.transcript.update import Replay, UpdateKind
from fedaudit.utils.errors import BadInput, CorruptTranscript
from fedaudit.utils.fingerprint import fingerprint, tensor_bytes
from fedaudit.utils.folders import temporary_folder
from fedaudit.utils.integrity import blank
from fedaudit.utils.validation import explain

SERVER_LOG = "server/"  # before the names of what a malicious server records

Entry = TypeVar("Entry", bound=BaseModel)


@dataclass(eq=False)
class Transcript(HasSent):
    """What travelled in one federation.

    Attributes:
        name: of the federation.
        task_info: what everybody knows.
        module: the architecture (its own weights mean nothing; every round has the ones that travelled).
        loss: mean over a batch, (outputs, targets) to a scalar.
        rounds: in order.
        adversary_log: what malicious clients recorded, by name, and a malicious server, under names that begin with
            :data:`SERVER_LOG`; only they have it.
        records: the examples that the adversary holds, if any.
        canaries: what observers read of an audit's canaries, if there were any.
        sent: what the protocol sent beside updates: of a vertical federation, or of one of boosted trees, all that
            travelled, and there are no ``rounds``.
        clients: number to the name that the framework has for it; empty where clients are only numbered.
        partial: whether updates may hold only some of the model's parameters (adapters, some layers).
        replays: (round, client) to how close local training, repeated on the truth, comes to the update; of those
            that were checked.
        notes: what readers should know of the recording.
        recording: identifier of what :class:`fedaudit.Recorder` wrote; None of a simulation.
    """

    name: str
    task_info: TaskInfo
    module: nn.Module
    loss: Loss
    rounds: list[Round]
    adversary_log: dict[str, Tensor] = field(default_factory=dict)
    records: QuerySet | None = None
    clients: dict[int, str] = field(default_factory=dict)
    partial: bool = False
    replays: dict[tuple[int, int], Replay] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    recording: str | None = None
    canaries: Canaries | None = None
    sent: Sent = UPDATES
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
        return next((u.kind for r in self.rounds for u in r.updates), self.sent.update_kind)

    def check(self) -> None:
        """Refuse, once, what :meth:`load` refuses: one that was made in Python may hold anything.

        Raises:
            CorruptTranscript: something is missing, misshapen, not finite, or contradicts something else.
        """
        if self._checked:
            return
        where = f"transcript '{self.name}'"
        if self.sent.no_updates:
            if self.rounds:
                raise CorruptTranscript(f"{where}: {self.sent.federations} have no rounds of updates")
            self.sent.check(self.module, self.task_info, where)
            self._checked = True
            return
        if not self.rounds or not all(r.updates or self.recording for r in self.rounds):
            raise CorruptTranscript(f"{where}: there must be a round, and an update in every one")
        check_order(where, self.rounds)
        state, parameters, buffers = expected(self.module)
        for record in self.rounds:
            place = f"{where}, round {record.index}"
            check_tensors(record.weights, state, f"{place}, global weights")
            for client, client_weights in record.client_weights.items():
                check_tensors(client_weights, state, f"{place}, weights sent to client {client}")
            for update in record.updates:
                own = f"{place}, client {update.client}"
                whole = update.sanitised is None and not self.partial
                check_update(update.tensors, update.buffers, parameters, buffers, own, whole=whole)
                if update.labels is not None:
                    check_labels(update.labels, self.task_info, own)
        self._checked = True

    @property
    def id(self) -> str:
        """Identifier by which its files and its truth know it: of a recording a random one, else made of all of it."""
        return self.recording or self.fingerprint()

    def fingerprint(self) -> str:
        """Return a hash of all updates and of what there is of the whole federation.

        Of a recording it is made from the recording's identifier, and which updates there are.
        """
        digest, told = hashlib.sha256(), list[tuple[str, dict[str, Tensor]]]()
        if self.recording:
            updates = [(r.index, u.client) for r in self.rounds for u in r.updates]
            return hashlib.sha256(f"{self.recording}/{updates}".encode()).hexdigest()
        for record in self.rounds:
            for update in record.updates:
                what = f"{record.index}/{update.client}/{update.kind}/{update.num_examples}"
                told.append((what, update.tensors))
        for part, (tensors, entry) in self._parts().items():
            told.append((f"{part} {entry.model_dump_json() if entry else ''}", tensors))
        for what, tensors in told:
            digest.update(what.encode())
            for name in sorted(tensors):
                digest.update(name.encode())
                digest.update(tensor_bytes(tensors[name]))
        return digest.hexdigest()

    def digest(self) -> str:
        """Return a digest, 64 hexadecimal digits, of all that travelled and was recorded, by which results name it.

        The architecture isn't in it (``task_info`` names it), nor what was added later: replays and notes.
        """
        parts = (self.rounds, self.adversary_log, self.records, self.clients, self.partial, self.recording)
        added = [*([self.canaries] if self.canaries else []), *([self.sent.content()] if self.sent.no_updates else [])]
        return fingerprint(self.name, self.task_info, *parts, *added)

    def save(self, folder: Path | str) -> None:
        """Write the transcript to ``folder``, which must be empty or new, sealed (see :mod:`fedaudit.utils.integrity`).

        All of it appears at once.

        Raises:
            BadInput: the folder is in use or can't be written.
        """
        folder = Path(folder)
        header = Header(
            source="captured" if self.recording else "simulated",
            name=self.name,
            id=self.id,
            task=self.task_info,
            partial=self.partial,
            clients=list(self.clients.values()) if self.sent.no_updates else [],
            notes=list(self.notes),
            digest=blank(),
        )
        try:
            check_new(folder)
            folder.parent.mkdir(parents=True, exist_ok=True)
            with temporary_folder(folder.parent, f".{folder.name}-temporary-") as draft:
                writer = Writer(draft / "whole", header)
                for part, (tensors, entry) in self._parts().items():
                    writer.write_part(part, tensors, entry)
                for one in self.rounds:
                    self._write_round(writer, one)
                writer.close_round(None)
                writer.write_header()
                if self.replays:
                    write_replay(writer.folder, header.id, self.replays)
                writer.folder.replace(folder)
        except (OSError, ValueError) as error:
            raise BadInput(f"can't write the transcript to '{folder}': {error}") from None

    def _write_round(self, writer: Writer, one: Round) -> None:
        """Write a round; for a client that was sent other weights, only the tensors that differ from everybody's."""
        stem = f"round-{one.index:05d}"
        entry = RoundEntry(
            index=one.index,
            time=one.time,
            weights=f"{stem}-global.safetensors",
            client_weights={},
            rejected=one.rejected,
            fallback=one.fallback,
            digest=blank(),
        )
        writer.write_tensors(entry.weights, one.weights)
        for update in one.updates:
            message = MessageEntry(
                client=update.client,
                name=self.clients.get(update.client),
                form="gradient" if update.kind == "gradient" else "update",
                file=f"{stem}-client-{update.client:05d}.safetensors",
                num_examples=update.num_examples,
                training=update.training,
                seconds=update.seconds,
                labels=None if update.labels is None else update.labels.flatten().tolist(),
                sanitised=update.sanitised,
                members=update.members,
            )
            writer.write_tensors(message.file, {**update.tensors, **update.buffers})
            entry.messages.append(message)
        for client, sent in one.client_weights.items():
            file = entry.client_weights[client] = f"{stem}-client-{client:05d}-sent.safetensors"
            writer.write_tensors(file, {k: v for k, v in sent.items() if not v.equal(one.weights[k])})
        writer.close_round(entry)

    def _parts(self) -> dict[str, tuple[dict[str, Tensor], BaseModel | None]]:
        """Return what there is of the whole federation, as it is written."""
        parts: dict[str, tuple[dict[str, Tensor], BaseModel | None]] = {}
        if self.records is not None:
            parts["queries"] = self.records.stored(), None
        if self.adversary_log:
            parts["adversary-log"] = self.adversary_log, None
        if self.canaries:
            parts["canaries"] = self.canaries.readings, CanariesEntry.model_validate(self.canaries)
        return {**parts, **self.sent.parts()}

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
        header = read_header(folder)

        def place(part: str) -> Path:
            return folder / f"{part}.safetensors"

        captured = header.source == "captured"
        entries = [e for e in read_rounds(folder, header) if rounds is None or not captured or e.index in rounds]
        own = [SENT[part] for part in header.parts if part not in PARTS]  # BadInput where a package is lacking
        if captured and not entries and not own:
            chosen = "" if rounds is None else " among those asked for"
            raise CorruptTranscript(f"'{folder}' has no closed round{chosen}: the recording ended before one was over")
        kinds = entries_by_kind()
        parts = {part: found for part in (*PARTS, *kinds) if (found := read_part(folder, header, part)) is not None}
        notes = list(header.notes)
        protocol = next((part for part in kinds if part in parts), None)
        sent = _entry(kinds[protocol], parts[protocol][0], place(protocol)) if protocol else None
        if module is None and (header.task is None or header.task.model == "custom"):
            raise BadInput(f"the transcript in '{folder}' is of a user's own model; name it: module=…")
        if module is not None:
            module = own_copy(module).float()
            keep_modes(module)
            known, maps = header.task or header.observed, header.task is None and header.observed
            if packings_in(module) == (None, None) != (known.packed_inputs, known.heads):
                module = of_one_tensor(module, known.packed_inputs, known.heads).float()
            elif maps and (maps.order or maps.flat):
                module = of_one_tensor(module, None, None, maps.order, flat=bool(maps.flat))
        if header.task is not None:
            module, loss = _architecture(folder, header.task, module, loss, sent)
        assert module is not None
        if header.task is None:
            said = [note for entry in entries for m in entry.messages for note in m.notes if "isn't recorded" in note]
            task_info, loss = complete_task(header.observed, task or {}, module, loss, notes, *said[:1])
        else:
            task_info = header.task
        assert loss is not None
        reader = Reader(folder, module, task_info, notes, exact=header.task is not None, partial=header.partial)
        made = cls(
            header.name,
            task_info,
            module,
            loss,
            [reader.round(entry) for entry in entries],
            parts["adversary-log"][1] if "adversary-log" in parts else {},
            clients={m.client: m.name for entry in entries for m in entry.messages if m.name is not None}
            | dict(enumerate(header.clients)),
            partial=reader.partial,
            replays=read_replay(folder, header.id),
            recording=header.id if captured else None,
        )
        if captured and not made.updates and sent is None:
            raise CorruptTranscript(
                f"'{folder}' holds no update that can be read: {'; '.join(notes) or 'none was sent'}"
            )
        notes += dict.fromkeys(note for entry in entries for m in entry.messages for note in m.notes)
        made.notes = tuple(notes)
        if "queries" in parts:
            made.records = read_queries(parts["queries"][1], task_info, str(place("queries")))
        if "canaries" in parts:
            values, readings = parts["canaries"]
            made.canaries = _entry(CanariesEntry, values, place("canaries")).canaries(readings, place("canaries"))
        if protocol and sent is not None:
            made.sent = sent.record(parts[protocol][1], module, task_info, place(protocol))
        made.check()
        return made


def _architecture(
    folder: Path, task_info: TaskInfo, module: nn.Module | None, loss: Loss | None, sent: SentEntry | None
) -> tuple[nn.Module, Loss]:
    """Return the module and the loss that ``task_info`` names, or those given."""
    if loss is None and task_info.loss == "custom":
        raise BadInput(f"the transcript in '{folder}' is of a user's own loss; give it: loss=…")
    options = LossOptions(task_info.loss, task_info.label_smoothing, task_info.class_weights, task_info.summed)
    if loss is not None and task_info.loss != "custom" and not task_info.causal:
        read = recognise(loss, task_info.outputs, task_info.num_classes, task_info.task, len(task_info.input_shape) - 1)
        if read != options:
            than = "another loss" if read is None or read.name == task_info.loss else read.name
            raise BadInput(
                f"the loss that was given is {than}, and clients of the transcript in '{folder}' minimise "
                f"{_in_words(options)}; leave it out, for the transcript names it"
            )
    try:
        if task_info.loss != "custom":
            loss = loss_function(*options)
        elif loss is not None:
            loss = as_called(loss, task_info)
        if module is None and sent is not None:
            module = sent.module(task_info)
        if module is None:
            module = build_model(
                task_info.model,
                input_shape=task_info.input_shape,
                outputs=task_info.outputs,
                width=task_info.width,
                tokens=task_info.tokens,
            )
        assert loss is not None
        return with_inserted_module(module, task_info), loss
    except BadInput as error:
        raise CorruptTranscript(f"{folder / INDEX}: {error}") from None


def _in_words(loss: LossOptions) -> str:
    more = [f"label smoothing {loss.label_smoothing:g}"] if loss.label_smoothing else []
    more += ["class weights"] if loss.class_weights else []
    return f"{loss.name}{', summed' * loss.summed}{' with ' * bool(more)}{' and '.join(more)}"


def _entry(kind: type[Entry], values: Any, path: Path) -> Entry:
    """Return what a part's file says beside its tensors."""
    try:
        return kind.model_validate_json(json.dumps(values))
    except ValidationError as error:
        raise CorruptTranscript(f"{path}: {explain(error, kind)}") from None
