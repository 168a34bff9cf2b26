"""What a protocol is to those who simulate its federations, describe them and attack them; and all protocols."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, TypeVar

from torch import nn

from fedaudit.results import AdversaryRecord, FederationRecord, ModelRecord
from fedaudit.simulation.client import Federation
from fedaudit.simulation.recording import Recording
from fedaudit.simulation.spec import FederationSpec
from fedaudit.task.info import TaskInfo
from fedaudit.transcript.sent import SENT, ProtocolSpec, Sent
from fedaudit.transcript.threat import ThreatModel
from fedaudit.transcript.transcript import Transcript
from fedaudit.transcript.truth import Truth
from fedaudit.utils.errors import BadInput
from fedaudit.utils.registry import Registry


class SimulationOptions(NamedTuple):
    """What a simulation has beside the federation; see :func:`fedaudit.simulation.simulate`."""

    report: Callable[[float], None] | None = None
    checkpoint: Path | None = None
    workers: int = 1
    say: Callable[[str], None] | None = None


class EasyCase(NamedTuple):
    """Known examples under the same protocol, which every attack on it must find; and that in words."""

    recording: Recording
    text: str


class AsScenario(NamedTuple):
    """A recording as a scenario says it, its name and data apart, and its model as results describe it."""

    scenario: dict[str, Any]
    model: ModelRecord


class Change(NamedTuple):
    """What may be changed against a leak: in a few words, why and at what price, and the scenario's ``key=value``."""

    title: str
    text: str
    settings: tuple[str, ...]


class WrongApp(BadInput):
    """What was asked for doesn't fit the app that runs: no message of it can be recorded."""


class MessageRecorder(ABC):
    """Records a framework's messages that aren't a network's state, as its clients send them, and watches training.

    Attributes:
        messages: how many were recorded.
        notes: what readers should know of the recording.
    """

    messages: int = 0
    notes: list[str]

    @abstractmethod
    def watch(self) -> AbstractContextManager[Any]:
        """Return what watches a client's training while it is entered."""

    @abstractmethod
    def message(self, index: int, client: str, model: bytes | None, start: bytes | None, seen: Any) -> bool:
        """Write what a client sent in a round; False: it isn't of this protocol.

        Args:
            index: of the round, from 0.
            client: the framework's name for it.
            model: the bytes that it sent in place of arrays; None: it sent none.
            start: those that it was sent.
            seen: what :meth:`watch` gave.

        Raises:
            WrongApp: the app is to be stopped.
            BadInput: this message can't be recorded.
        """

    @abstractmethod
    def close(self, records: Any | None = None) -> None:
        """Write what :meth:`Protocol.convert` needs beside the messages; BadInput: it wasn't seen.

        ``records``: examples of other people, see :func:`fedaudit.data.pairs_of`, with which what is found is compared.
        """


class Protocol(ABC):
    """How the clients and the server of a federation work together. Whoever needs to know asks it, by nobody's name.

    What is not overridden is a horizontal federation's, whose rounds of updates everybody can read.

    Class attributes:
        sent: what travels beside updates; with it, what a scenario says of it.
        described: one of its federations, in words: ``a vertical federation``.
        own_model: why a user's own model is refused; empty: it isn't.
        instead: what may be changed of one that has no updates, in place of defences.
        contradicts: what may explain that a replay gives other messages than those recorded; empty: updates say it.
        sends: what clients send of all of their examples; empty: it is of batches.
        deployed: what an audit of a deployment is over, in words.
        deployment: of a diagnostic, how to ask a deployment, in a sentence; empty: settings of updates say it.
    """

    sent: ClassVar[type[Sent]]
    described: ClassVar[str]
    own_model: ClassVar[str] = ""
    instead: ClassVar[str] = ""
    contradicts: ClassVar[str] = ""
    sends: ClassVar[str] = ""
    deployed: ClassVar[str] = "a trained network, and updates such as federations in use send"
    deployment: ClassVar[str] = ""

    @property
    def updates(self) -> bool:
        """Whether clients send updates, which defences change and sums add up."""
        return not self.sent.no_updates

    # --- a federation -----------------------------------------------------------------------------------------------

    @abstractmethod
    def model(self, spec: FederationSpec, name: str, width: int | None, task_info: TaskInfo) -> nn.Module:
        """Return the architecture that a federation trains; BadInput: there is none for this task."""

    @abstractmethod
    def check(self, federation: Federation) -> None:
        """Refuse what can't work, before anything is simulated: BadInput, with the reason and the remedy."""

    @abstractmethod
    def simulate(self, federation: Federation, options: SimulationOptions) -> Recording:
        """Run the rounds of a checked federation; BadInput: training fails on what the rounds bring."""

    # --- in words ---------------------------------------------------------------------------------------------------

    def adversary(self, threat: ThreatModel, spec: FederationSpec) -> AdversaryRecord | None:  # noqa: ARG002
        """Return who the adversary is, and what it knows; None: what it sees of rounds of updates says it."""
        return None

    def federation(self, transcript: Transcript, spec: FederationSpec) -> FederationRecord | None:  # noqa: ARG002
        """Return how the federation was, its course and its recording apart; None: its updates say it."""
        return None

    def changes(self, spec: Mapping[str, Any]) -> Sequence[Change]:  # noqa: ARG002
        """Return what to change of a federation that leaks, as its scenario says it; where it has no updates."""
        return ()

    # --- known examples, and what was recorded ----------------------------------------------------------------------

    def easy_case(self, recording: Recording, spec: FederationSpec | None, images: bool) -> EasyCase | str | None:  # noqa: ARG002
        """Return what a control of every attack on it attacks, or why there is none; None: each kind has its own.

        ``recording`` is the audited one, whose truth has the examples; ``images``: the attack rebuilds whole examples.
        """
        return None

    def recorded(self, transcript: Transcript) -> AsScenario | None:  # noqa: ARG002
        """Return a recording as a scenario says it; None: its updates say it."""
        return None

    def convert(self, folder: Path, out: Path) -> Sequence[str]:  # noqa: ARG002
        """Write what lies in ``folder`` as it travelled to ``out``, a new folder, as a recording; return notes.

        The facts that everybody knows are in ``PROTOCOL.yaml``. BadInput: it can't be read.
        """
        raise BadInput(f"'{folder}' can't be converted: of {self.described} only recordings are read, not messages")

    def recorder(self, folder: Path, name: str, **columns: Sequence[float] | None) -> MessageRecorder | None:  # noqa: ARG002
        """Return what records an app's messages in ``folder``, a new one; None: they are a network's state.

        ``columns``: ``mean`` and ``std``, as everybody knows them.
        """
        return None

    def replay_errors(self, transcript: Transcript, truth: Truth) -> dict[tuple[int, int], float] | None:  # noqa: ARG002
        """Return by (round, client) the relative error of what known examples give; None: updates are trained."""
        return None


PROTOCOLS: Registry[Protocol] = Registry("protocol", SENT.group)

P = TypeVar("P", bound=type[Protocol])


def register(protocol: P) -> P:
    """Add an object of the class to ``PROTOCOLS``, under the name of what it sends."""
    PROTOCOLS.register(protocol.sent.kind, protocol.described)(protocol())
    return protocol


def protocol_of(of: Transcript | FederationSpec) -> Protocol:
    """Return the protocol of a transcript or of a federation."""
    return PROTOCOLS[of.sent.kind if isinstance(of, Transcript) else of.settings.kind].value


def protocol_by(algorithm: str) -> Protocol:
    """Return the protocol of federations whose ``algorithm`` is this; if nobody names it, the usual one."""
    named = (p.value for p in PROTOCOLS if algorithm in p.value.sent.specified.algorithms)
    return next(named, PROTOCOLS[ProtocolSpec.kind].value)
