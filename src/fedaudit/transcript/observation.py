"""Observations: what an adversary sees of a transcript, and so what an attack receives."""

from __future__ import annotations

import dataclasses
import reprlib
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn

from fedaudit.epsilon.canaries import Canaries
from fedaudit.task.info import TaskInfo
from fedaudit.task.training import Loss
from fedaudit.transcript.queries import QuerySet
from fedaudit.transcript.sent import UPDATES, HasSent, Sent
from fedaudit.transcript.threat import ThreatModel
from fedaudit.transcript.transcript import SERVER_LOG, Transcript
from fedaudit.transcript.update import Update, UpdateKind
from fedaudit.transcript.view import view
from fedaudit.utils.errors import NotApplicable


@dataclass(frozen=True)
class Message:
    """One exchange between the server and a client: the weights sent, and the update that came back.

    Attributes:
        round: from 0.
        client: who sent the update; of a sum, the first.
        weights: that it was sent; of a sum, the global ones.
        update: what came back.
        client_weights: of a sum, client to what it was sent where that isn't ``weights``.
    """

    round: int
    client: int
    weights: dict[str, Tensor]
    update: Update
    client_weights: dict[int, dict[str, Tensor]] = dataclasses.field(default_factory=dict)

    def __repr__(self) -> str:
        return f"Message(round {self.round}, {self.update!r})"


@dataclass(frozen=True)
class Observation(HasSent):
    """A transcript cut down to what a threat model permits: the only thing that an attack ever receives.

    Attributes:
        federation: name of the federation.
        threat: whose view this is.
        task_info: what everybody knows.
        module: the architecture; load a message's weights before use.
        loss: that clients minimise, mean over a batch.
        update_kind: ``gradient`` or ``weights``: what clients send.
        weights: the global weights of every round that this adversary sees; every participant sees those of all.
        messages: the exchanges that it can read, in order; of clients who collude, what their own updates leave of how
            the global model changes.
        adversary_log: what malicious clients recorded, where the adversary is such a client, or what a malicious server
            did, where it is that; empty otherwise.
        records: the examples that the adversary holds, if any; whose they are isn't in them.
        canaries: what it reads of an audit's canaries, if there are any; which were in isn't told.
        sent: what this adversary sees of what its protocol sent beside updates: of a vertical federation, where there
            are no messages; of one of boosted trees, where a message stands for each client whose rows are asked for,
            and is empty.
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
    records: QuerySet | None = None
    canaries: Canaries | None = None
    sent: Sent = UPDATES

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
        if self.sent.no_updates:
            raise NotApplicable(self.sent.no_updates)
        if not self.messages and self.threat.reads_updates and self.threat.adversary == "client":
            raise NotApplicable(
                "how the global model changes leaves nothing of the others' updates: no two rounds in a row are known, "
                "or it doesn't move by their mean (a robust rule, noise, a server's momentum); choose the adversary "
                "'aggregating-client' or 'server', or raise federations[].rounds to 2 or more"
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
            dataclasses.replace(
                self,
                weights=tuple(m.weights for m in groups[key]),
                messages=tuple(groups[key]),
                sent=self.sent.of(groups[key][0].client),
            )
            for key in order
        ]


class Recorded(Protocol):
    """What holds a transcript, as a Recording."""

    @property
    def transcript(self) -> Transcript:
        """What travelled."""


def observe(transcript: Transcript | Recorded, threat: ThreatModel | None = None) -> Observation:
    """Return what an adversary sees of a transcript or a Recording; default: an honest-but-curious server.

    Labels are in the observation only where the threat model grants them *and* they travelled with the transcript.

    Raises:
        BadInput: the transcript contradicts itself, or isn't one of its model.
    """
    if not isinstance(transcript, Transcript):
        transcript = transcript.transcript
    threat = threat or ThreatModel()
    transcript.check()
    models, read = view(transcript, threat)
    messages = []
    for record in read:
        for update in record.updates:
            seen = dataclasses.replace(
                update,
                training=update.training if threat.knows_training else None,
                labels=update.labels if threat.knows_labels else None,
            )
            sent = record.weights if update.members else record.sent_to(update.client)
            own = {
                client: record.client_weights[client] for client in update.members if client in record.client_weights
            }
            messages.append(Message(record.index, update.client, sent, seen, own))
    beside = transcript.sent.seen_by(threat.adversary)
    if (clients := beside.by_client()) is not None:
        messages = [Message(0, c, {}, Update(c, beside.update_kind, {}, n, None)) for c, n in clients.items()]
    asked = threat.target_records or threat.client_property or threat.public_examples
    records = transcript.records if asked else None
    if records is not None and not (threat.target_records or threat.client_property):  # it has public ones alone
        records = dataclasses.replace(records, inputs=records.inputs[:0], labels=records.labels[:0])
    if records is not None and threat.client_property is None:
        records = dataclasses.replace(records, public_property=records.public_property[:0])
    if records is not None and threat.known_records is None:
        records = records.without_known()
    if records is not None and threat.public_examples is None:
        records = records.with_public(slice(0))
    return Observation(
        federation=transcript.name,
        threat=threat,
        task_info=transcript.task_info,
        module=transcript.module,
        loss=transcript.loss,
        update_kind=transcript.update_kind,
        weights=tuple(r.weights for r in models),
        messages=tuple(messages),
        adversary_log={} if threat.partial else _own_log(transcript.adversary_log, threat),
        records=records,
        canaries=None if threat.partial else _readable(transcript.canaries, threat),
        sent=beside,
    )


def _own_log(log: dict[str, Tensor], threat: ThreatModel) -> dict[str, Tensor]:
    """Return what this adversary itself recorded: no other sees anything of servers' and clients' notes."""
    server = {"malicious-server": True, "client": False}.get(threat.adversary)
    return {name: t for name, t in log.items() if name.startswith(SERVER_LOG) is server}


def _readable(canaries: Canaries | None, threat: ThreatModel) -> Canaries | None:
    """Return the canaries with what the adversary reads: a client global models, others also updates or their sum."""
    if canaries is None or (threat.adversary != "client" and threat.group_size == 1):
        return canaries
    seen = ("models", "final") if threat.adversary == "client" else ("sum", "models", "final")
    own = {name: reading for name, reading in canaries.readings.items() if name in seen}
    return dataclasses.replace(canaries, readings=own)
