"""Records of a recording: drawn from what its clients trained on, and from examples that none of them used."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedaudit.data.dataset import Attribute, Split
from fedaudit.data.own import with_persons
from fedaudit.simulation.record_draw import RecordDraw, draw, most_of_persons
from fedaudit.task.info import TaskInfo
from fedaudit.transcript.threat import ThreatModel
from fedaudit.transcript.transcript import Transcript
from fedaudit.transcript.truth import Truth, examples_of, unused_candidates, used_in
from fedaudit.utils import seeds
from fedaudit.utils.errors import BadInput, unknown_name

OF_RECORDS = (
    "membership",
    "attribute",
    "source",
    "extraction",
)  # kinds of findings that are answers about given records
_MOST = 300  # records, unasked
_FEWEST = 20
_PUBLIC = 500  # examples of which stand-ins with a property are made, unasked

Examples = tuple[Tensor, Tensor]  # inputs as in a data set, and labels


def with_records(
    transcript: Transcript,
    truth: Truth,
    path: Path | None,
    given: Any,
    threat: ThreatModel,
    seed: int,
    *,
    members: bool = True,
) -> tuple[Transcript, Truth]:
    """Return a recording and its truth with records, half of them clients' examples, matched as in a simulation.

    Where the adversary is after a property of clients, it also gets public examples of which it is known, and the truth
    the share of each client's examples that have it, each counted once.

    Args:
        path: folder of the truth, where the recorder's candidates lie; None: there is none.
        given: examples that nobody trained on, as the model sees them (:func:`fedaudit.data.own.with_persons`); None:
            the recorder's candidates that no update used. Where they say of which person each is, so do those among
            them that clients did use: members are drawn of these alone.
        threat: says how many records and public examples; by default 300 records, or as many as can be matched, and for
            a property 500 public examples, or as many as there are; half of them where records are drawn, too.
        members: records are wanted, beside public examples for a property.
    """
    info = transcript.task_info
    if not truth.inputs:
        raise BadInput("no records: half of them are what clients trained on, and that wasn't captured")
    others, persons = _others(transcript, path, given)
    clients = sorted({client for _, client in truth.inputs} - set(threat.clients or ()))
    if not clients:
        raise BadInput("no records: half of them are what other clients trained on, and that wasn't captured")
    held = [_joined(truth, client) for client in clients]
    theirs = torch.cat([x for x, _ in held]), torch.cat([y for _, y in held])
    marks = info.example_kind.fingerprints
    used = {mark for inputs in truth.inputs.values() for mark in marks(inputs).tolist()}  # of given examples, too
    if given is not None and path is not None:
        used |= used_in(path, info)
    known = marks(others[0]).tolist()
    whose = {} if persons is None else dict(zip(known, persons.tolist(), strict=True))
    free = torch.tensor([mark not in used for mark in known], dtype=torch.bool)
    others = others[0][free], others[1][free]
    asked = None if threat.client_property is None else _property(info, threat)
    free_ones = len(set(marks(others[0]).tolist())) - 1  # draw() keeps one, to measure accuracy
    unasked = 0 if asked is None else max(0, min(_PUBLIC, free_ones // 2 if members else free_ones))
    public = threat.public_examples or unasked
    if asked is not None and not 0 < public <= free_ones:
        raise BadInput(
            f"no public examples for threat.client_property: {max(1, public)} are asked for, and {max(0, free_ones)} "
            "are known that nobody trained on; give more: records=…"
        )
    hidden = None
    if threat.hidden_attribute is not None:
        hidden = threat.hidden_attribute, _attribute(info, threat.hidden_attribute, "hidden_attribute")
    named = dict([hidden] if hidden else []) | ({} if asked is None else {asked[0]: asked[1]})
    splits = [_split(examples, named) for examples in (*held, others)]
    *drawn_from, strangers = splits if persons is None else [_of_persons(split, whose, marks) for split in splits]
    most = 2 * max(0, min(_pairs(info, theirs, others), free_ones - public))
    if persons is not None:
        most = most_of_persons(drawn_from, strangers, min(most, threat.target_records or _MOST))
    number = threat.target_records or min(_MOST, most)
    if asked is not None and threat.target_records is None and (not members or number < _FEWEST):
        number = 0
    elif number > most or number < _FEWEST:
        if persons is not None and not any(map(len, drawn_from)):
            raise BadInput(
                "no records: the file names persons of none of the examples that clients used: put these in, too, each "
                "with its person"
            )
        of_persons = "" if persons is None else " and of persons who are named"
        raise BadInput(
            f"no records: {most} can be drawn in pairs of one class{of_persons}, of {len(theirs[0])} examples that "
            f"clients used and {len(others[0])} that nobody did, and it takes "
            f"{max(threat.target_records or 0, _FEWEST)}; "
            + (f"set threat.target_records={most}, or " if threat.target_records and most >= _FEWEST else "")
            + "give more examples that nobody trained on: records=…"
        )
    drawn = draw(
        number,
        public,
        drawn_from,
        len(held),
        strangers[:0],
        strangers,
        generator=seeds.generator(seed, transcript.name, "records"),
        hidden=hidden,
        asked=None if asked is None else (asked[0], asked[2]),
        known=threat.known_records or 0,
    ).numbered(clients)
    assert drawn.records is not None
    return (
        replace(transcript, records=drawn.records),
        replace(
            truth,
            owners=drawn.owners,
            matched=drawn.matched,
            values=drawn.values,
            persons=drawn.persons,
            shares=_shares(drawn, dict(zip(clients, splits, strict=False)), info),
        ),
    )


def _shares(drawn: RecordDraw, held: dict[int, Split], info: TaskInfo) -> Tensor:
    """Return (k,) the share with the property of what each client used, each example counted once; -1 where unknown."""
    found = torch.zeros(0, dtype=torch.float64)
    if drawn.asked is not None:
        found = torch.full((1 + max(held),), -1.0, dtype=torch.float64)
        for client, own in held.items():
            places = {mark: row for row, mark in enumerate(info.example_kind.fingerprints(own.inputs).tolist())}
            once = torch.zeros(len(own), dtype=torch.bool)
            once[list(places.values())] = True
            found[client] = drawn.shares([own], [once])
    return found


def _others(transcript: Transcript, path: Path | None, given: Any) -> tuple[Examples, Tensor | None]:
    """Return the examples that are known and nobody trained on, and their persons if these are told.

    BadInput: there are none, or of another shape.
    """
    info = transcript.task_info
    if given is None:
        found = None if path is None else unused_candidates(path, transcript)
        if found is None:
            raise BadInput(
                "no records: no examples are known that nobody trained on; give some: records=…, or "
                "Recorder.candidates while it records"
            )
        return found, None
    inputs, labels, persons = with_persons(given)
    shorter = info.tokens is not None and inputs.ndim == 2 and inputs.shape[1] <= info.input_shape[0]
    if inputs.shape[1:] != info.input_shape and not shorter:
        raise BadInput(f"records of shape {tuple(inputs.shape[1:])}: the model takes {info.input_shape}")
    return examples_of(inputs, labels, info, "records"), persons


def _of_persons(split: Split, whose: Mapping[int, int], marks: Callable[[Tensor], Tensor]) -> Split:
    """Return the examples of which it is known of which person they are, by what they are."""
    of = [whose.get(mark) for mark in marks(split.inputs).tolist()]
    rows = [row for row, person in enumerate(of) if person is not None]
    return replace(split[rows], persons=torch.tensor([of[row] for row in rows], dtype=torch.int64))


def _joined(truth: Truth, client: int) -> Examples:
    """Return all that the updates of a client used, in their order; what was used twice is in it twice."""
    keys = sorted(key for key in truth.inputs if key[1] == client)
    return torch.cat([truth.inputs[key] for key in keys]), torch.cat([truth.labels[key] for key in keys])


def _split(examples: Examples, named: Mapping[str, Attribute]) -> Split:
    inputs, labels = examples
    distances = {
        name: (inputs[:, None, list(attribute.columns)] - attribute.codes).abs().sum(dim=2)
        for name, attribute in named.items()
    }
    return Split(inputs, labels, attributes={name: far.argmin(dim=1) for name, far in distances.items()})


def _property(info: TaskInfo, threat: ThreatModel) -> tuple[str, Attribute, int]:
    """Return the column of the property that the adversary is after, and the number of its value."""
    assert threat.client_property is not None
    if not threat.knows_public_data:
        raise BadInput(
            "threat.client_property needs examples of which the adversary knows it; set threat.knows_public_data: true"
        )
    name, _, value = threat.client_property.partition("=")
    attribute = _attribute(info, name, "client_property")
    if value not in attribute.values:
        raise BadInput(f"threat.client_property: '{name}': {unknown_name('value', value, attribute.values)}")
    return name, attribute, attribute.values.index(value)


def _attribute(info: TaskInfo, name: str, field: str) -> Attribute:
    """Return the categorical column of that name as an attribute of the examples."""
    for column in info.columns:
        if column.name == name and column.kind == "categorical":
            kinds, many = len(column.categories), len(column.positions)
            codes = torch.eye(kinds) if many > 1 else torch.tensor(column.codes or range(kinds))[:, None]
            return Attribute(column.categories, column.positions, codes.float())
    known = ", ".join(c.name for c in info.columns if c.kind == "categorical") or "none: name them, Recorder(columns=…)"
    raise BadInput(f"no records: threat.{field} is of '{name}'; categorical columns of the recording: {known}")


def _pairs(info: TaskInfo, members: Examples, others: Examples) -> int:
    """Return how many members have another of their class each, equal examples counted once."""
    counts = []
    for inputs, labels in (members, others):
        marks = info.example_kind.fingerprints(inputs).tolist()
        classes = labels.tolist() if labels.ndim == 1 and info.num_classes is not None else [0] * len(labels)
        counts.append(Counter(dict(zip(marks, classes, strict=True)).values()))
    return (counts[0] & counts[1]).total()
