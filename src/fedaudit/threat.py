"""Threat models and observations: who the adversary is, what it knows, and so what an attack receives."""

from __future__ import annotations

import dataclasses
import reprlib
import sys
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch import Tensor, nn

from fedaudit.federation.canaries import Canaries
from fedaudit.federation.records import Records
from fedaudit.federation.transcript import Transcript
from fedaudit.federation.vertical_record import VerticalRecord
from fedaudit.training import Loss
from fedaudit.update import TaskInfo, Update, UpdateKind
from fedaudit.utils.errors import NotApplicable
from fedaudit.utils.validation import Count, Share, Title

Adversary = Literal["server", "malicious-server", "eavesdropper", "client"]
# What one run of an attack receives: one update, all messages of one client, or all that the adversary sees.
Scope = Literal["update", "client", "federation"]

ADVERSARIES: dict[Adversary, str] = {
    "server": "an honest-but-curious server: follows the protocol and reads every update that it receives",
    "malicious-server": "a malicious server: alters the model that it sends in order to learn more, and reads every "
    "update that it receives",
    "eavesdropper": "an eavesdropper who reads the messages between the clients and the server",
    "client": "a client: sees the global model of every round and nothing of what the others send",
}


class ThreatModel(BaseModel):
    """Who the adversary is and what it knows. It only looks, unless the server or clients are malicious."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    adversary: Adversary = Field(default="server", description="server, malicious-server, eavesdropper or client")
    sees: str = Field(
        default="updates",
        pattern=r"^(updates|sum|aggregate of [1-9][0-9]{0,8})$",
        description="updates, each client's; sum, of all clients of a round, or aggregate of 10, of so many clients "
        "together, as secure aggregation yields it",
    )
    knows_labels: bool = Field(default=False, description="the labels of the examples, in their order of use")
    knows_public_data: bool = Field(
        default=False, description="public data of the clients' kind, none of it theirs, or a generator of them"
    )
    knows_training: bool = Field(
        default=True, description="learning rate, local steps, batch sizes, momentum, weight decay"
    )
    records: Count | None = Field(
        default=None,
        description="examples that it holds and asks something of: half are honest clients', half nobody's",
    )
    public_examples: Count | None = Field(
        default=None,
        description="further examples that it holds, none of them a client's or a record",
    )
    hidden_attribute: str | None = Field(
        default=None, description="attribute of the data set that the records lack, and that the adversary is after"
    )
    client_property: Title | None = Field(
        default=None,
        description="property of clients that the adversary is after: an attribute of the data set and its value, as "
        "sex=Female; of its public examples it knows it",
    )
    property_share: Share = Field(
        default=0.5, description="a client has that property where at least this share of its examples does"
    )

    @model_validator(mode="after")
    def _fits_together(self) -> ThreatModel:
        if self.records is not None and self.records % 2:
            raise ValueError(f"records is {self.records}; half of them are clients' examples: give an even number")
        used = self.records or self.client_property or self.adversary == "malicious-server"
        if self.public_examples is not None and not (self.knows_public_data and used):
            raise ValueError(
                "public_examples needs knows_public_data: true, and records or a client_property to use them on"
            )
        if self.hidden_attribute is not None and not self.records:
            raise ValueError("hidden_attribute needs records that lack it; set records to 300, for example")
        return self

    @property
    def summary(self) -> str:
        """One line about the adversary."""
        return ADVERSARIES[self.adversary]

    @property
    def together(self) -> int:
        """Of how many clients' updates it reads the sum only: 1, where it reads each by itself."""
        return {"updates": 1, "sum": sys.maxsize}.get(self.sees) or int(self.sees.rpartition(" ")[2])

    def knowledge(self) -> tuple[list[str], list[str]]:
        """Return what the adversary knows and what it doesn't, in words."""
        reads = self.adversary != "client"
        known = {
            "the model's architecture, the loss, and how examples are normalised": True,
            "the global model of every round (with BatchNorm's statistics)"
            + (", and how it altered it" if self.adversary == "malicious-server" else ""): True,
            "every update as it was sent, and over how many examples it was made": reads and self.together == 1,
            "how clients train (learning rate, local steps, batch sizes)": self.knows_training,
            "the labels of the examples in the updates": self.knows_labels,
        }
        if self.together > 1:
            whose = "all clients of a round" if self.sees == "sum" else f"{self.together} clients at a time"
            known[f"the sum of the updates of {whose}, and over how many examples they were made"] = reads
        if self.records:
            known[f"{self.records} records with their labels, half of them honest clients'"] = True
            known["which of the records are clients', or anything else of the clients' data"] = False
            if self.hidden_attribute:
                known[f"the records' attribute '{self.hidden_attribute}'"] = False
        else:
            known["the clients' data, or any of them"] = False
        if self.client_property:
            known[f"which of its public examples have '{self.client_property}'"] = self.knows_public_data
            known[f"which clients have it: for {100 * self.property_share:g} % of their examples or more"] = False
        public = f"{self.public_examples} public examples" if self.public_examples else "public data"
        known[f"{public} of the same kind, or a generative model of it"] = self.knows_public_data
        return [k for k, v in known.items() if v], [k for k, v in known.items() if not v]


@dataclass(frozen=True)
class Message:
    """One exchange between the server and a client: the weights sent, and the update that came back.

    Attributes:
        round: from 0.
        client: who sent the update; of a sum, the first.
        weights: that it was sent; of a sum, the global ones.
        update: what came back.
        own_weights: of a sum, client to what it was sent where that isn't ``weights``.
    """

    round: int
    client: int
    weights: dict[str, Tensor]
    update: Update
    own_weights: dict[int, dict[str, Tensor]] = dataclasses.field(default_factory=dict)

    def __repr__(self) -> str:
        return f"Message(round {self.round}, {self.update!r})"


@dataclass(frozen=True)
class Observation:
    """A transcript cut down to what a threat model permits: the only thing that an attack ever receives.

    Attributes:
        federation: name of the federation.
        threat: whose view this is.
        task_info: what everybody knows.
        module: the architecture; load a message's weights before use.
        loss: that clients minimise, mean over a batch.
        update_kind: ``gradient`` or ``weights``: what clients send.
        weights: the global weights of every round, which every participant sees.
        messages: the exchanges that this adversary can read, in order.
        adversary_log: what malicious clients recorded, where the adversary is such a client; empty otherwise.
        records: the examples that the adversary holds, if any; whose they are isn't in them.
        canaries: what it reads of an audit's canaries, if there are any; which were in isn't told.
        vertical: of a vertical federation, what this adversary sees of it; there are no messages then.
    """

    federation: str
    threat: ThreatModel
    task_info: TaskInfo
    module: nn.Module
    loss: Loss
    update_kind: UpdateKind
    weights: tuple[dict[str, Tensor], ...]
    messages: tuple[Message, ...]
    adversary_log: dict[str, Tensor] = dataclasses.field(default_factory=dict)
    records: Records | None = None
    canaries: Canaries | None = None
    vertical: VerticalRecord | None = None

    def __repr__(self) -> str:
        seen = f"{len(self.messages)} messages ({self.update_kind}), global weights of {len(self.weights)} rounds"
        return f"Observation({reprlib.repr(self.federation)}, {self.threat.adversary}: {seen})"

    def single(self) -> Message:
        """Return the only message, for attacks on one update at a time.

        Raises:
            NotApplicable: the adversary sees no update, or several.
        """
        self.need_messages()
        if len(self.messages) > 1:
            raise NotApplicable(
                f"this attack is for one update at a time and was given {len(self.messages)}; use Observation.split()"
            )
        return self.messages[0]

    def need_messages(self) -> None:
        """Raise where the adversary sees no update.

        Raises:
            NotApplicable: it doesn't.
        """
        if self.vertical is not None:
            raise NotApplicable(
                "this federation is vertical: parties send embeddings of their features, and no updates; use an attack "
                "on vertical federations (cafe, direct-labels, norm-scoring, direction-scoring)"
            )
        if not self.messages:
            raise NotApplicable(
                f"the adversary sees no update ({self.threat.summary}); choose the adversary 'server' or 'eavesdropper'"
            )

    def need_client(self, attack: str) -> None:
        """Raise where the adversary isn't a client, who alone can run ``attack``.

        Raises:
            NotApplicable: it isn't.
        """
        if self.threat.adversary != "client":
            raise NotApplicable(
                f"{attack} is run by a client, and this adversary is the {self.threat.adversary}; "
                "set threat.adversary=client"
            )

    def split(self, scope: str = "update") -> list[Observation]:
        """Return what single runs of an attack receive: an observation an update, one a client, or this one.

        Each has the global weights of the rounds of its own messages only. Where there are no messages, the list of
        updates or clients is empty.
        """
        if scope == "federation":
            return [self]
        groups: dict[Any, list[Message]] = {}
        for i, message in enumerate(self.messages):
            groups.setdefault(message.client if scope == "client" else i, []).append(message)
        order = sorted(groups)
        return [
            dataclasses.replace(self, weights=tuple(m.weights for m in groups[key]), messages=tuple(groups[key]))
            for key in order
        ]


def observe(transcript: Transcript, threat: ThreatModel) -> Observation:
    """Return what the adversary of ``threat`` sees of ``transcript``.

    Labels are in the observation only where the threat model grants them *and* they travelled with the transcript.

    Raises:
        BadInput: the transcript contradicts itself, or isn't one of its model.
    """
    transcript.check()
    messages = []
    for record in transcript.rounds:
        for update in record.updates:
            seen = dataclasses.replace(
                update,
                training=update.training if threat.knows_training else None,
                labels=update.labels if threat.knows_labels else None,
            )
            sent = record.weights if update.members else record.sent_to(update.client)
            own = {client: record.own_weights[client] for client in update.members if client in record.own_weights}
            messages.append(Message(record.index, update.client, sent, seen, own))
    if threat.adversary == "client":
        messages = []
    records = transcript.records if threat.records or threat.client_property else None
    if records is not None and threat.client_property is None:
        records = dataclasses.replace(records, public_property=records.public_property[:0])
    if records is not None and threat.public_examples is None:
        records = dataclasses.replace(
            records,
            public_inputs=records.public_inputs[:0],
            public_labels=records.public_labels[:0],
            public_values=records.public_values[:0],
            public_property=records.public_property[:0],
        )
    return Observation(
        federation=transcript.name,
        threat=threat,
        task_info=transcript.task_info,
        module=transcript.module,
        loss=transcript.loss,
        update_kind=transcript.update_kind,
        weights=tuple(r.weights for r in transcript.rounds),
        messages=tuple(messages),
        adversary_log=dict(transcript.adversary_log) if threat.adversary == "client" else {},
        records=records,
        canaries=_readable(transcript.canaries, threat),
        vertical=None if transcript.vertical is None else transcript.vertical.seen_by(threat.adversary),
    )


def _readable(canaries: Canaries | None, threat: ThreatModel) -> Canaries | None:
    """Return the canaries with what the adversary reads: a client global models, others also updates or their sum."""
    if canaries is None or (threat.adversary != "client" and threat.together == 1):
        return canaries
    seen = ("models", "final") if threat.adversary == "client" else ("sum", "models", "final")
    own = {name: reading for name, reading in canaries.readings.items() if name in seen}
    return dataclasses.replace(canaries, readings=own)
