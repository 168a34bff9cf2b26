"""Vertical federations in an audit: how they are described, which attacks fit, and what a control attacks."""

from __future__ import annotations

from dataclasses import replace

import torch

from fedaudit.data.dataset import Split
from fedaudit.models import VerticalModel
from fedaudit.pipeline.control_cases import Case, typical
from fedaudit.results import AdversaryRecord, FederationRecord, HistoryRecord, HistoryTiming
from fedaudit.simulation.history import History
from fedaudit.simulation.simulator import Recording
from fedaudit.simulation.spec import FederationSpec
from fedaudit.simulation.vertical import exchange
from fedaudit.transcript.threat import ThreatModel
from fedaudit.transcript.transcript import Transcript
from fedaudit.transcript.vertical_spec import VerticalSpec
from fedaudit.utils.seeds import generator

_SPLITS = {"strips": "columns that stand side by side", "quadrants": "a quarter of an image each"}
_TOPS = {
    "sum": "adds the embeddings up",
    "linear": "has a linear layer on the embeddings",
    "mlp": "has two layers on the embeddings",
}
_PROTOCOLS = {
    "split": "embeddings go up, their gradients come down",
    "aggregated-gradients": "the server reads the model and every batch's gradient",
}
_WHO = {
    "server": "an honest-but-curious server of a vertical federation: holds the labels and follows the protocol",
    "client": "a party of a vertical federation: holds features, no labels, and follows the protocol",
    "eavesdropper": "an eavesdropper who reads the messages between the parties and the server",
}


def adversary_record(threat: ThreatModel, spec: VerticalSpec) -> AdversaryRecord:
    """Return who the adversary of a vertical federation is and what it knows, in words."""
    server, whole = threat.adversary == "server", spec.protocol == "aggregated-gradients"
    known = {
        "the model's architecture, the loss, and how examples are normalised": True,
        "which examples are in every batch, by their numbers": True,
        "the labels of all examples": server,
        "every party's network, and the gradient of every batch for all of its parameters": server and whole,
        "the embeddings of all parties": not whole and threat.adversary != "client",
        f"the embeddings of party {spec.observer} and their gradients": not whole and threat.adversary == "client",
        "the features of the parties": False,
    }
    return AdversaryRecord(
        adversary="party" if threat.adversary == "client" else threat.adversary,
        summary=_WHO[threat.adversary],
        knows=[text for text, yes in known.items() if yes],
        does_not_know=[text for text, yes in known.items() if not yes],
        acts=False,
    )


def federation_record(transcript: Transcript, history: History | None, spec: FederationSpec) -> FederationRecord:
    """Return the settings of a vertical federation, as the report describes it."""
    record = transcript.vertical
    assert record is not None
    rounds, size = record.batches.shape
    vertical = record.spec
    description = (
        f"{rounds} {'round' if rounds == 1 else 'rounds'}, {record.parties} parties who hold "
        f"{_SPLITS[vertical.features]} of the same {record.examples} examples; {size} of them in a batch; "
        f"{_PROTOCOLS[vertical.protocol]}; the server {_TOPS[vertical.top]} and holds the labels "
        f"(learning rate {record.learning_rate:g})"
    )
    return FederationRecord(
        name=transcript.name,
        algorithm="vertical",
        update_kind="gradient",
        clients=record.parties,
        rounds=spec.rounds,
        batch_size=size,
        local_steps=None,
        local_epochs=None,
        learning_rate=record.learning_rate,
        updates_observed=rounds,
        description=description,
        course=None if history is None else _course(history),
    )


def _course(history: History) -> HistoryRecord:
    sent = max(1, len(history.bytes))
    return HistoryRecord(
        rounds=history.rounds,
        accuracy=history.accuracy,
        per_client=history.per_client,
        examples=history.measured_on,
        bytes=sum(history.bytes) / sent,
        parameters=sum(history.parameters) / sent,
        timing=HistoryTiming(training=0.0, sanitising=0.0),
    )


def easy_case(recording: Recording) -> Case:
    """Return what a control of an attack on a vertical federation attacks: known examples, the same model.

    Where gradients are aggregated: 8 typical candidates in batches of 2, from a model that doesn't move. Else a server
    who trains on up to 64 of them, of which every eighth is of the rarest class, for 100 rounds of 16.

    Args:
        recording: of the vertical federation.
    """
    transcript, truth = recording.transcript, recording.truth
    record, module, info = transcript.vertical, transcript.module, transcript.task_info
    assert record is not None
    assert isinstance(module, VerticalModel)
    module.load_state_dict(record.weights)
    whole = record.spec.protocol == "aggregated-gradients"
    if whole:
        rounds, size, rate = 16, 2, 1e-20
        inputs, labels = typical(truth, 8)
    else:
        rounds, size, rate = 100, 16, 0.1
        inputs, labels = typical(truth, min(512, len(truth.candidates)))
        rows = _unbalanced(labels)
        inputs, labels = inputs[rows], labels[rows]
    size = min(size, len(inputs))
    spec = FederationSpec(
        name="control",
        algorithm="vertical",
        clients=record.parties,
        rounds=rounds,
        batch_size=size,
        learning_rate=rate,
        vertical=record.spec,
    )
    draw = generator(0, "control", "vertical")
    played = exchange(module, info, transcript.loss, Split(inputs, labels), spec, draw)
    own = Transcript("control-same", info, module, transcript.loss, [], vertical=played)
    keys = [(i, 0) for i in played.used.tolist()]
    known = replace(
        truth,
        inputs={key: inputs[key[0], None] for key in keys},
        labels={key: labels[key[0], None] for key in keys},
        rows={key: torch.zeros(1, dtype=torch.int64) for key in keys},
    )
    text = f"{len(inputs)} known examples in batches of {size}" + (", a model that doesn't move" if whole else "")
    return Case(Recording(own, known), "same", text)


def _unbalanced(labels: torch.Tensor) -> torch.Tensor:
    """Return the rows of up to 64 examples, of which every eighth is of the rarest class."""
    counts = torch.bincount(labels)
    rare = int(torch.where(counts > 0, counts, counts.max() + 1).argmin())
    few = torch.nonzero(labels == rare)[:8, 0]
    return torch.cat([few, torch.nonzero(labels != rare)[: 7 * len(few), 0]])
