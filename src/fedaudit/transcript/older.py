"""Folders that earlier versions wrote, made into today's. Only ``fedaudit convert`` reads them.

Version 1 was a simulation's: one index with every round, tensors by ``parameters/NAME`` and ``buffers/NAME``, and the
truth in a file that knew its transcript by a hash of what it holds. Version 2 was a recorder's: an index a round, and
the truth in a file an update, marked with the recording's identifier. The first of either carried no digests.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError
from safetensors import SafetensorError
from torch import Tensor, nn

from fedaudit.epsilon.canaries import Canaries
from fedaudit.task.info import TaskInfo
from fedaudit.transcript.files import (
    FORMAT,
    INDEX,
    REPLAY,
    CanariesEntry,
    Header,
    MessageEntry,
    ObservedTask,
    RoundEntry,
    TotalEntry,
    Writer,
    round_file,
)
from fedaudit.transcript.queries import QuerySet
from fedaudit.transcript.rounds import REMEDY, Round, check_new, labels_of, read_file
from fedaudit.transcript.sent import UPDATES
from fedaudit.transcript.transcript import Transcript
from fedaudit.transcript.truth import ABOUT, CANDIDATES, COINS, FILE, FOLDER, save_part, save_recording, truth_from
from fedaudit.transcript.update import Update
from fedaudit.transcript.vertical import VerticalEntry, VerticalRecord, VerticalSpec
from fedaudit.utils.bounds import TENSORS, check_file, read_json
from fedaudit.utils.errors import BadInput, CorruptTranscript
from fedaudit.utils.fingerprint import fingerprint, tensor_bytes
from fedaudit.utils.folders import temporary_folder
from fedaudit.utils.integrity import blank, check, load_sealed

# Where classes lay when their names went into a transcript's hash.
_LAY_IN = {
    Canaries: "fedaudit.federation.canaries",
    VerticalRecord: "fedaudit.federation.vertical_record",
    VerticalSpec: "fedaudit.federation.vertical_spec",
}
# Fields of the task that had other names.
_TASK = {"spare_outputs": "extra_classes", "front": "inserted"}


def convert_folder(old: Path, new: Path) -> list[str]:
    """Write the transcript of version 1 or 2 in ``old``, and its truth, to ``new``; return what ``old`` couldn't tell.

    What was sealed is checked, and sealed again; with a key, if it was done with one. ``new`` appears at once. The
    module isn't needed: what doesn't fit it shows when the new folder is read.
    """
    check_new(new)
    path = old / INDEX
    if not path.is_file():
        raise BadInput(f"no transcript in '{old}': it has no {INDEX}")
    try:
        index = read_json(path)
        if not isinstance(index, dict) or index.get("format") != FORMAT:
            raise CorruptTranscript(f"{path} is no transcript's index")
        if index.get("version") not in (1, 2):
            raise BadInput(f"the transcript in '{old}' is of version {index.get('version')!r}: nothing is to be done")
        new.parent.mkdir(parents=True, exist_ok=True)
        with temporary_folder(new.parent, f".{new.name}-temporary-") as draft:
            convert = _convert_simulated if index["version"] == 1 else _convert_captured
            notes = convert(old, index, draft / "whole")
            (draft / "whole").replace(new)
        return notes
    except ValidationError as error:
        raise CorruptTranscript(f"the transcript in '{old}' is damaged: {error.errors()[0]['msg']!s}") from None
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, RecursionError, SafetensorError) as error:
        raise CorruptTranscript(f"the transcript in '{old}' is damaged ({type(error).__name__}: {error})") from None
    except OSError as error:
        raise BadInput(f"can't convert '{old}' to '{new}': {error.strerror or error}") from None


# --- version 1: simulations -----------------------------------------------------------------------------------------


def _convert_simulated(old: Path, index: dict[str, Any], new: Path) -> list[str]:
    notes = [note] if (note := check(old / INDEX, remedy=REMEDY)) else []
    task_info = TypeAdapter(TaskInfo).validate_python(
        {_TASK.get(name, name): value for name, value in index["setup"].items()}
    )
    files = index.get("files", {})

    def tensors(file: str) -> dict[str, Tensor]:
        return read_file(old, file, files)

    others = ("journal.safetensors", "records.safetensors")
    there = {name for name in others if name in files or (old / name).is_file()}
    transcript = Transcript(
        index["name"],
        task_info,
        nn.Identity(),  # nothing is computed
        lambda outputs, targets: outputs.sum() + targets.sum(),
        [_round(old, entry, files, task_info) for entry in index["rounds"]],
        tensors("journal.safetensors") if "journal.safetensors" in there else {},
        QuerySet(**tensors("records.safetensors")) if "records.safetensors" in there else None,
        notes=tuple(notes),
    )
    if index.get("canaries"):
        entry = CanariesEntry.model_validate_json(json.dumps(index["canaries"]))
        transcript.canaries = entry.canaries(tensors("canaries.safetensors"), old / "canaries.safetensors")
    if index.get("vertical"):
        transcript.sent = _vertical(index["vertical"], tensors("vertical.safetensors"))
    if not (old / FILE).is_file():
        transcript.save(new)
        return notes
    check_file(old / FILE, TENSORS)
    about, found, note = load_sealed(old / FILE, own=ABOUT, remedy=REMEDY)
    if about.get("transcript") != _first_fingerprint(transcript):
        raise CorruptTranscript(f"{old / FILE} is the ground truth of another transcript than '{transcript.name}'")
    notes += [note] if note else []
    transcript.notes = tuple(notes)
    renamed = {"matched" if name == "twins" else name: value for name, value in found.items()}
    save_recording(transcript, truth_from(about, renamed, old / FILE), new)
    return notes


def _round(old: Path, entry: dict[str, Any], files: dict[str, str], task_info: TaskInfo) -> Round:
    weights = read_file(old, entry["weights"], files)
    updates = []
    for known in entry["updates"]:
        tensors = read_file(old, known["file"], files)
        parts: dict[str, dict[str, Tensor]] = {"parameters": {}, "buffers": {}}
        for name, value in tensors.items():
            part, _, own = name.partition("/")
            parts[part][own] = value
        # Checked as today's: of the same fields, under the names that they had.
        sent = MessageEntry.model_validate_json(
            json.dumps(
                {
                    **{key: known[key] for key in ("client", "file", "num_examples")},
                    **{key: known[key] for key in ("labels", "sanitised", "members") if known.get(key)},
                    "form": "gradient" if known["kind"] == "gradient" else "update",
                    "training": known["facts"],
                }
            )
        )
        assert sent.num_examples is not None
        updates.append(
            Update(
                client=sent.client,
                kind="gradient" if sent.form == "gradient" else "weights",
                tensors=parts["parameters"],
                num_examples=sent.num_examples,
                training=sent.training,
                buffers=parts["buffers"],
                labels=None if sent.labels is None else labels_of(sent.labels, task_info),
                sanitised=sent.sanitised,
                members=sent.members,
            )
        )
    sent_alone = entry.get("own_weights", {}).items()
    client_weights = {int(client): weights | read_file(old, file, files) for client, file in sent_alone}
    rejected = {int(client): str(why) for client, why in entry.get("rejected", {}).items()}
    return Round(entry["index"], weights, updates, rejected, entry.get("fallback"), client_weights)


def _vertical(values: dict[str, Any], tensors: dict[str, Tensor]) -> VerticalRecord:
    entry = VerticalEntry.model_validate(values)
    known: dict[str, Any] = {name: value for name, value in tensors.items() if "/" not in name}
    parts = {
        part: {name.removeprefix(f"{part}/"): value for name, value in tensors.items() if name.startswith(f"{part}/")}
        for part in ("weights", "updates")
    }
    return VerticalRecord(**dict(entry), weights=parts["weights"], updates=parts["updates"], **known)


def _first_fingerprint(transcript: Transcript) -> str:
    """Return the hash by which a truth of version 1 knows its transcript."""
    digest = hashlib.sha256()
    for one in transcript.rounds:
        for update in one.updates:
            digest.update(f"{one.index}/{update.client}/{update.kind}/{update.num_examples}".encode())
            for name in sorted(update.tensors):
                digest.update(name.encode())
                digest.update(tensor_bytes(update.tensors[name]))
    for tensor in transcript.records.stored().values() if transcript.records is not None else ():
        digest.update(tensor_bytes(tensor))
    for known in (transcript.canaries, transcript.sent):
        if known and known is not UPDATES:
            digest.update(fingerprint(_as_it_lay(known)).encode())
    return digest.hexdigest()


_NEW = {"gaussian", "cut", "known_labels", "held", "known"}  # fields that these classes have got since


def _as_it_lay(thing: Any) -> Any:
    """Return an object of a class of the same name, in the module in which the class once lay."""
    if type(thing) not in _LAY_IN:
        return thing
    meta = type(type(type(thing)).__name__, (type,), {})  # its name is in the hash, too
    stand_in = meta(type(thing).__name__, (), {"__module__": _LAY_IN[type(thing)]})()
    own = {name: value for name, value in vars(thing).items() if name not in _NEW}
    vars(stand_in).update({name: _as_it_lay(value) for name, value in own.items()})
    return stand_in


# --- version 2: recorders -------------------------------------------------------------------------------------------


def _convert_captured(old: Path, index: dict[str, Any], new: Path) -> list[str]:
    notes = [note] if (note := check(old / INDEX, remedy=REMEDY)) else []
    header = Header(
        source="captured",
        name=index["name"],
        id=index["id"],
        observed=ObservedTask.model_validate(index.get("task", {})),
        notes=notes,
        digest=blank(),
    )
    writer = Writer(new, header)
    before = None
    digests = set()
    for path in sorted(old.glob("round-*.json")):
        values = read_json(path)
        if not notes:  # else it was written before there were digests
            check(path, f"{header.id}/{path.name}", remedy=REMEDY)
            if "digest" not in values or values.get("before") != before:
                raise CorruptTranscript(f"{path} doesn't go on from the round before: one is missing or was put there")
        before = values.get("digest")
        digests.add(before)
        if path.name != round_file(values["index"]):
            raise CorruptTranscript(f"{path} is the index of round {values['index']}")
        writer.close_round(_captured_round(old, values, writer))
    if index.get("last") and index["last"] not in digests:
        raise CorruptTranscript(f"'{old}' lacks rounds that were closed: somebody or something deleted them")
    found = _part(old / COINS, header.id, ["recording", "canaries"], COINS)
    if found is not None:
        entry = CanariesEntry.model_validate_json(found[0]["canaries"])
        writer.write_part("canaries", entry.canaries(found[1], old / COINS).readings, entry)
    writer.write_header()
    if (old / REPLAY).is_file() and not check(old / REPLAY, f"{header.id}/{REPLAY}", remedy="delete it"):
        shutil.copyfile(old / REPLAY, new / REPLAY)
    for path in sorted((old / FOLDER).glob("*.safetensors")) if (old / FOLDER).is_dir() else []:
        found = _part(path, header.id, ["recording"], path.name)
        assert found is not None
        save_part(new / FOLDER / path.name, header.id, _captured_truth(path, found[1]))
    return notes


def _captured_round(old: Path, values: dict[str, Any], writer: Writer) -> RoundEntry:
    files = values.get("files", {})
    known = values.get("messages", [])
    client_weights = {message["client"]: file for message in known if (file := message.pop("sent", None))}
    messages = [MessageEntry.model_validate_json(json.dumps(message)) for message in known]
    total = values.get("total")
    entry = RoundEntry(
        index=values["index"],
        time=values.get("time"),
        weights=values["weights"],
        client_weights=client_weights,
        messages=messages,
        total=None if total is None else TotalEntry.model_validate_json(json.dumps(total)),
        digest=blank(),
    )
    sent = [*(message.file for message in messages), *client_weights.values()]
    for name in (entry.weights, *sent, *([entry.total.file] if entry.total else [])):
        writer.write_tensors(name, read_file(old, name, files))
    return entry


def _captured_truth(path: Path, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return a file of a recorder's truth by today's names."""
    if path.name == COINS:
        return {"coins": tensors["coins"]}
    if path.name == CANDIDATES:
        return {f"seen/candidates/{name}": value for name, value in tensors.items()}
    _, index, _, client = path.stem.split("-")
    return {f"seen/{int(index)}/{int(client)}/{name}": value for name, value in tensors.items()}


def _part(path: Path, identifier: str, own: list[str], about: str) -> tuple[dict[str, Any], dict[str, Tensor]] | None:
    """Return a sealed file of a recording, if it is there; the first ones had no digest."""
    if not path.is_file():
        return None
    check_file(path, TENSORS)
    values, tensors, _ = load_sealed(path, about, own=own, remedy=REMEDY)
    if values.get("recording") != identifier:
        raise CorruptTranscript(f"{path} belongs to another recording")
    return values, tensors
