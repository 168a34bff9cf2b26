"""Vertical federations, whose parties hold different features of the same examples; and split learning, one party."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from fedaudit.data.dataset import Split
from fedaudit.models import VerticalModel
from fedaudit.results import AdversaryRecord, FederationRecord
from fedaudit.simulation.client import Federation
from fedaudit.simulation.protocols.base import Change, EasyCase, Protocol, SimulationOptions, register
from fedaudit.simulation.recording import Recording
from fedaudit.simulation.spec import FederationSpec
from fedaudit.simulation.vertical import check_vertical, exchange, malicious_server, play
from fedaudit.task.info import TaskInfo
from fedaudit.transcript.threat import ThreatModel
from fedaudit.transcript.transcript import Transcript
from fedaudit.transcript.truth import typical
from fedaudit.transcript.vertical import VerticalRecord, VerticalSpec, vertical_module
from fedaudit.utils.seeds import generator
from fedaudit.utils.words import many

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
_WHO_SPLIT = {
    "server": "an honest-but-curious server of split learning: has the other layers and the labels",
    "malicious-server": "a malicious server of split learning: sends gradients of its own in order to learn more",
    "client": "the client of split learning: holds examples, no labels but those it is given, and follows the protocol",
    "eavesdropper": "an eavesdropper who reads the messages between the client and the server",
}


@register
class Vertical(Protocol):
    """Embeddings go up, and their gradients come down."""

    sent = VerticalRecord
    described = "a vertical federation"
    own_model = "a vertical federation is made of fedaudit's models, a party's network each; name one of them"
    instead = "its protocol or top"
    deployment = (
        "this was a diagnostic; there is no ready command for a deployment of a vertical federation: train its network "
        "first, and set the parties' batches as yours are"
    )

    def model(self, spec: FederationSpec, name: str, width: int | None, task_info: TaskInfo) -> nn.Module:  # noqa: ARG002
        """Return the parties' networks and the server's, which are made of the task's model."""
        return vertical_module(_settings(spec), spec.clients, task_info)

    def check(self, federation: Federation) -> None:
        """Refuse what a vertical federation can't have."""
        check_vertical(federation)

    def simulate(self, federation: Federation, options: SimulationOptions) -> Recording:
        """Run the rounds."""
        return Recording(*play(federation, options.report))

    def adversary(self, threat: ThreatModel, spec: FederationSpec) -> AdversaryRecord:
        """Return what the server knows, a party or an eavesdropper."""
        settings = _settings(spec)
        return (_vertical_adversary if settings.cut is None else _split_adversary)(threat, settings)

    def federation(self, transcript: Transcript, spec: FederationSpec) -> FederationRecord:
        """Return how it was."""
        record = _record(transcript)
        rounds, size = record.batches.shape
        vertical = record.spec
        who = (
            f"{record.parties} parties who hold {_SPLITS[vertical.features]} of the same {record.examples} examples; "
            f"{size} of them in a batch; {_PROTOCOLS[vertical.protocol]}; the server {_TOPS[vertical.top]} and holds "
            "the labels"
        )
        if vertical.cut is not None:
            answers = f"the gradients of '{spec.server.name}', a malicious server," if spec.server else "its gradients"
            who = (
                f"one client who holds {record.examples} examples and the layers up to {vertical.cut}; {size} examples "
                f"in a batch; what these layers put out goes up, {answers} come down; the server has the other layers "
                "and the labels"
            )
        description = f"{many(rounds, 'round')}, {who} (learning rate {record.learning_rate:g}); examples: {spec.drawn}"
        return FederationRecord(
            name=transcript.name,
            algorithm="vertical" if vertical.cut is None else "split",
            update_kind="gradient",
            clients=record.parties,
            rounds=spec.rounds,
            batch_size=size,
            local_steps=None,
            local_epochs=None,
            learning_rate=record.learning_rate,
            updates_observed=rounds,
            description=description,
        )

    def changes(self, spec: Mapping[str, Any]) -> Sequence[Change]:
        """Return its protocol, or the server's network."""
        place = f"federations.{spec['name']}.vertical"
        if spec["vertical"]["protocol"] != "split":
            text = (
                "Where embeddings travel and nobody reads the gradients of a party's network, this attack has no hold."
            )
            return [Change("Keep the gradients at the parties.", text, (f"{place}.protocol=split",))]
        if spec["vertical"]["top"] == "sum":
            text = "Then a party no longer receives the gradient of the outputs, which is the label. Others may tell."
            return [Change("Give the server a network of its own.", text, (f"{place}.top=mlp",))]
        return []

    def easy_case(self, recording: Recording, spec: FederationSpec | None, images: bool) -> EasyCase | str:
        """Return known examples, under the same model.

        A server trains on up to 64 typical candidates, of which every eighth is of the rarest class, for 100 rounds of
        16. For attacks on images it has 8 candidates in batches of 2, and the model doesn't move. Split learning with a
        malicious server is played again with 64 candidates, which are the server's public examples, too.
        """
        transcript, truth = recording.transcript, recording.truth
        record, module, info = _record(transcript), transcript.module, transcript.task_info
        hijacked = spec if spec is not None and spec.server else None
        if transcript.adversary_log and hijacked is None:
            return "what a malicious server did isn't known: simulate it again from its scenario"
        assert isinstance(module, VerticalModel)
        module.load_state_dict(record.weights)
        if hijacked is not None:
            rounds, size, rate = hijacked.rounds, hijacked.batch_size, hijacked.learning_rate
            inputs, labels = typical(truth, min(64, len(truth.candidates)))
        elif images:
            rounds, size, rate = 16, 2, 1e-20
            inputs, labels = typical(truth, 8)
        else:
            rounds, size, rate = 100, 16, 0.1
            inputs, labels = typical(truth, min(512, len(truth.candidates)))
            rows = _unbalanced(labels)
            inputs, labels = inputs[rows], labels[rows]
        size = min(size, len(inputs))
        own = FederationSpec(
            name="control",
            algorithm="vertical" if record.spec.cut is None else "split",
            clients=record.parties,
            rounds=rounds,
            batch_size=size,
            learning_rate=rate,
            vertical=record.spec,
        )
        draw = generator(0, "control", "vertical")
        held = Split(inputs, labels)
        server = None if hijacked is None else malicious_server(hijacked, info, 0, held)
        played = exchange(module, info, transcript.loss, held, own, draw, server=server)
        log = server.behaviour.adversary_log() if server else {}
        made = Transcript("control-same", info, module, transcript.loss, [], log, sent=played)
        keys = [(i, 0) for i in played.used.tolist()]
        known = replace(
            truth,
            inputs={key: inputs[key[0], None] for key in keys},
            labels={key: labels[key[0], None] for key in keys},
            rows={key: torch.zeros(1, dtype=torch.int64) for key in keys},
        )
        text = f"{len(inputs)} known examples in batches of {size}" + (", a model that doesn't move" if images else "")
        return EasyCase(Recording(made, known), text)


def _settings(spec: FederationSpec) -> VerticalSpec:
    assert isinstance(spec.settings, VerticalSpec)
    return spec.settings


def _record(transcript: Transcript) -> VerticalRecord:
    assert isinstance(transcript.sent, VerticalRecord)
    return transcript.sent


def _vertical_adversary(threat: ThreatModel, spec: VerticalSpec) -> AdversaryRecord:
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
    if spec.known_labels and threat.adversary == "client":
        known |= {f"its own features, and the labels of {spec.known_labels} examples of each class": True}
    return AdversaryRecord(
        adversary="party" if threat.adversary == "client" else threat.adversary,
        summary=_WHO[threat.adversary],
        knows=[text for text, yes in known.items() if yes],
        does_not_know=[text for text, yes in known.items() if not yes],
        acts=False,
    )


def _split_adversary(threat: ThreatModel, spec: VerticalSpec) -> AdversaryRecord:
    server, client = threat.adversary in ("server", "malicious-server"), threat.adversary == "client"
    public = f"{threat.public_examples or 'some'} public examples of the same kind"
    known = {
        "the model's architecture, the loss, and how examples are normalised": True,
        "which examples are in every batch, by their numbers": True,
        "what the client's layers put out, and the gradients that come back": True,
        "the client's examples and its layers": client,
        "the labels of all examples": server,
        f"the labels of {spec.known_labels} examples of each class": client and spec.known_labels > 0,
        public: threat.knows_public_data,
    }
    return AdversaryRecord(
        adversary="party" if client else threat.adversary,
        summary=_WHO_SPLIT[threat.adversary],
        knows=[text for text, yes in known.items() if yes],
        does_not_know=[text for text, yes in known.items() if not yes],
        acts=threat.adversary == "malicious-server",
    )


def _unbalanced(labels: Tensor) -> Tensor:
    """Return the rows of up to 64 examples, every eighth of them of the rarest class."""
    counts = torch.bincount(labels)
    rare = int(torch.where(counts > 0, counts, counts.max() + 1).argmin())
    few = torch.nonzero(labels == rare)[:8, 0]
    return torch.cat([few, torch.nonzero(labels != rare)[: 7 * len(few), 0]])
