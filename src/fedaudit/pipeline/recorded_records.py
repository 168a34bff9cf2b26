"""Records of a recording: drawn from what its clients trained on, and from examples that none of them used."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedaudit.data.dataset import Attribute, Split
from fedaudit.data.own import pairs_of
from fedaudit.simulation.record_draw import draw
from fedaudit.task.info import TaskInfo
from fedaudit.transcript.queries import NOBODY
from fedaudit.transcript.threat import ThreatModel
from fedaudit.transcript.transcript import Transcript
from fedaudit.transcript.truth import Truth, examples_of, unused_candidates
from fedaudit.utils import seeds
from fedaudit.utils.errors import BadInput

OF_RECORDS = ("membership", "attribute", "source")  # kinds of findings that are answers about given records
_MOST = 300  # records, unasked
_FEWEST = 20

Examples = tuple[Tensor, Tensor]  # inputs as in a data set, and labels


def with_records(
    transcript: Transcript, truth: Truth, path: Path | None, given: Any, threat: ThreatModel, seed: int
) -> tuple[Transcript, Truth]:
    """Return a recording and its truth with records, half of them clients' examples, matched as in a simulation.

    Args:
        transcript: of a recording.
        truth: with what its clients trained on.
        path: folder of that, where the recorder's candidates lie; None: there is none.
        given: examples that nobody trained on, as the model sees them (:func:`fedaudit.data.own.pairs_of`); None: the
            recorder's candidates that no update used.
        threat: says how many records and public examples; by default 300 records, or as many as can be matched.
        seed: of the draws.

    Raises:
        BadInput: they can't be drawn; the message says what is missing.
        CorruptTranscript: a file is damaged, or these examples aren't of this task.
    """
    info = transcript.task_info
    if info.causal:
        raise BadInput("no records: the model predicts the next token, and the attacks on records need labels")
    if not truth.inputs:
        raise BadInput("no records: half of them are what clients trained on, and that wasn't captured")
    others = _others(transcript, path, given)
    clients = sorted({client for _, client in truth.inputs})
    held = [_joined(truth, client) for client in clients]
    members = torch.cat([x for x, _ in held]), torch.cat([y for _, y in held])
    marks = info.example_kind.fingerprints
    used = set(marks(members[0]).tolist())  # of examples that were given, too
    free = torch.tensor([mark not in used for mark in marks(others[0]).tolist()], dtype=torch.bool)
    others = others[0][free], others[1][free]
    public = threat.public_examples or 0
    differ = len(set(marks(others[0]).tolist()))
    most = 2 * max(0, min(_pairs(info, members, others), differ - public - 1))  # draw() keeps one, to measure accuracy
    number = threat.records or min(_MOST, most)
    if number > most or number < _FEWEST:
        raise BadInput(
            f"no records: {most} can be drawn in pairs of one class, of {len(members[0])} examples that clients used "
            f"and {len(others[0])} that nobody did, and it takes {max(threat.records or 0, _FEWEST)}; "
            + (f"set threat.records={most}, or " if threat.records and most >= _FEWEST else "")
            + "give more examples that nobody trained on: --records FILE"
        )
    hidden = None if threat.hidden_attribute is None else _attribute(info, threat.hidden_attribute)
    splits = [_split(examples, hidden) for examples in (*held, others)]
    drawn = draw(
        number,
        public,
        splits[:-1],
        len(held),
        splits[-1][:0],
        splits[-1],
        generator=seeds.generator(seed, transcript.name, "records"),
        hidden=hidden,
    )
    assert drawn.records is not None
    whose = torch.tensor([*clients, NOBODY])[drawn.owners]  # the last for nobody, who is -1
    return (
        replace(transcript, records=drawn.records),
        replace(truth, owners=whose, matched=drawn.matched, values=drawn.values),
    )


def _others(transcript: Transcript, path: Path | None, given: Any) -> Examples:
    """Return the examples that are known and that nobody trained on.

    Raises:
        BadInput: there are none, or they are of another shape than the clients'.
    """
    info = transcript.task_info
    if given is None:
        found = None if path is None else unused_candidates(path, transcript)
        if found is None:
            raise BadInput(
                "no records: no examples are known that nobody trained on; give some: --records FILE, records=…, or "
                "Recorder.candidates while it records"
            )
        return found
    inputs, labels = pairs_of(given)
    if inputs.shape[1:] != info.input_shape:
        raise BadInput(f"records of shape {tuple(inputs.shape[1:])}: the model takes {info.input_shape}")
    return examples_of(inputs, labels, info, "records")


def _joined(truth: Truth, client: int) -> Examples:
    """Return all that the updates of a client used, in their order; what was used twice is in it twice."""
    keys = sorted(key for key in truth.inputs if key[1] == client)
    return torch.cat([truth.inputs[key] for key in keys]), torch.cat([truth.labels[key] for key in keys])


def _split(examples: Examples, hidden: tuple[str, Attribute] | None) -> Split:
    inputs, labels = examples
    if hidden is None:
        return Split(inputs, labels)
    name, attribute = hidden
    codes = (inputs[:, None, list(attribute.columns)] - attribute.codes).abs().sum(dim=2)
    return Split(inputs, labels, attributes={name: codes.argmin(dim=1)})


def _attribute(info: TaskInfo, name: str) -> tuple[str, Attribute]:
    """Return the categorical column of that name as an attribute of the examples."""
    for column in info.columns:
        if column.name == name and column.kind == "categorical":
            kinds, many = len(column.categories), len(column.positions)
            codes = torch.eye(kinds) if many > 1 else torch.tensor(column.codes or range(kinds))[:, None]
            return name, Attribute(column.categories, column.positions, codes.float())
    known = ", ".join(c.name for c in info.columns if c.kind == "categorical") or "none: name them, Recorder(columns=…)"
    raise BadInput(f"no records: threat.hidden_attribute is '{name}'; categorical columns of the recording: {known}")


def _pairs(info: TaskInfo, members: Examples, others: Examples) -> int:
    """Return how many members have another of their class each, equal examples counted once."""
    counts = []
    for inputs, labels in (members, others):
        marks = info.example_kind.fingerprints(inputs).tolist()
        classes = labels.tolist() if info.num_classes is not None else [0] * len(labels)
        counts.append(Counter(dict(zip(marks, classes, strict=True)).values()))
    return (counts[0] & counts[1]).total()
