"""What a protocol is to those who hold what travelled: its settings, and what it sent; asked, never compared."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

from pydantic import BaseModel
from torch import Tensor, nn

from fedaudit.task.info import TaskInfo
from fedaudit.transcript.rounds import Round
from fedaudit.transcript.update import UpdateKind
from fedaudit.utils.registry import Registry
from fedaudit.utils.validation import Spec

Key = tuple[int, int]


class ProtocolSpec(Spec):
    """The settings of a protocol. Those of a horizontal federation are the federation's own: this base has none.

    Class attributes:
        kind: the protocol's name; of its settings in a federation, and of its file in a transcript.
        algorithms: that federations of it have, the usual one first.
        same_examples: all clients hold parts of the same examples, so these aren't partitioned.
        lacks: settings that its federations can't have.
        lacks_why: the end of the sentence that refuses one.
        members: what its clients are called.
        model: the only model that its federations are of, and no others; empty: any other.
    """

    kind: ClassVar[str] = "horizontal"
    algorithms: ClassVar[tuple[str, ...]] = ("fedsgd", "fedavg", "fedprox")
    same_examples: ClassVar[bool] = False
    lacks: ClassVar[tuple[str, ...]] = ()
    lacks_why: ClassVar[str] = ""
    members: ClassVar[str] = "clients"
    model: ClassVar[str] = ""

    @classmethod
    def defaults(cls, algorithm: str) -> dict[str, Any]:  # noqa: ARG003 (split learning uses it)
        """Return what a federation of this algorithm has where a scenario doesn't say it, beside these settings."""
        return {}

    def check(self, algorithm: str, clients: int, changed: Collection[str]) -> None:
        """Raise ValueError for a federation that these settings aren't for; ``changed``: those that aren't defaults."""
        if algorithm not in self.algorithms:
            raise ValueError(
                f"{self.kind} is for algorithm: {self.algorithms[0]}, not {algorithm}; leave one of the two out"
            )
        given = [name for name in self.lacks if name in changed]
        if given:
            raise ValueError(f"{given[0]} isn't for {self.lacks_why}; leave it out")
        observer = getattr(self, "observer", 0)
        if observer >= clients:
            raise ValueError(f"{self.kind}.observer is {observer}, but {self.members} are 0 to {clients - 1}")

    def of_model(self, clients: int) -> tuple[Any, ...]:  # noqa: ARG002
        """Return the settings that decide the model of a federation of so many clients."""
        return ()

    def case(self) -> dict[str, Any]:
        """Return what a :class:`fedaudit.attacks.base.Case` says of it."""
        return {}


SENT: Registry[type[Sent]] = Registry("protocol", "fedaudit.protocols")


class Sent:
    """What travelled in a federation, beside rounds of updates, or what one side sees of it.

    A subclass with a ``kind`` adds itself to ``SENT``, by which settings, files and objects of a protocol are found.

    Class attributes:
        kind: of its :class:`ProtocolSpec`.
        specified: that :class:`ProtocolSpec`.
        entry: how it lies on disk, in a file of the name ``kind``; None: rounds of updates are all.
        update_kind: of its updates; where it has none, what it counts as.
        federations: such federations, in words.
        others: all other federations, in words; empty: they are told one by one.
        not_this: how another federation differs, and how to have one of these: ends "…, and this one".
        no_updates: why there are no updates, and what to do; empty: there are.
        grown: its model begins with nothing, so none may be untrained.
        no_membership: why nobody asks whether a record was used; empty: somebody may.
    """

    kind: ClassVar[str]
    specified: ClassVar[type[ProtocolSpec]] = ProtocolSpec
    entry: ClassVar[type[SentEntry] | None] = None
    update_kind: ClassVar[UpdateKind] = "weights"
    federations: ClassVar[str]
    others: ClassVar[str] = ""
    not_this: ClassVar[str] = ""
    no_updates: ClassVar[str] = ""
    grown: ClassVar[bool] = False
    no_membership: ClassVar[str] = ""

    def __init_subclass__(cls, **rest: Any) -> None:
        super().__init_subclass__(**rest)
        if "kind" in vars(cls):
            SENT.register(cls.kind, cls.federations)(cls)

    @property
    def settings(self) -> ProtocolSpec:
        """The protocol's."""
        return ProtocolSpec()

    def check(self, module: nn.Module, task_info: TaskInfo, where: str) -> None:
        """Raise CorruptTranscript, naming ``where``, for what contradicts itself or isn't of ``module``."""

    def seen_by(self, adversary: str) -> Self:  # noqa: ARG002
        """Return what an adversary sees of it."""
        return self

    def of(self, *clients: int) -> Self:  # noqa: ARG002
        """Return it for the question about these clients."""
        return self

    def by_client(self) -> dict[int, int] | None:
        """Return the clients whose examples are asked for, with how many they hold; None: messages say it."""
        return None

    def truth_keys(self, rounds: Sequence[Round]) -> dict[Key, int]:
        """Return the keys of a truth that belongs to it, and of how many examples each is."""
        return {(r.index, u.client): u.num_examples for r in rounds for u in r.updates}

    def sent_by_victims(self, rounds: Sequence[Round]) -> list[Key]:
        """Return the (round, client) of all that was sent by those whose examples are asked for."""
        return [(r.index, u.client) for r in rounds for u in r.updates]

    def by_example(self) -> list[int] | None:
        """Return the examples that are asked for, where a truth has each by itself; None: it has those of updates."""
        return None

    def case(self, log: Mapping[str, Tensor]) -> dict[str, Any]:  # noqa: ARG002
        """Return what a :class:`fedaudit.attacks.base.Case` says of it, and of what a malicious server recorded."""
        return {"protocol": self.kind, **self.settings.case()}

    def extent(self, rounds: Sequence[Round]) -> str:
        """Return how much there is of it, in words."""
        return f"{sum(len(r.updates) for r in rounds)} updates in {len(rounds)} round(s)"

    def content(self) -> Any:
        """Return what a transcript's digest is made of; of another package's class, plain values and tensors."""
        return self

    def parts(self) -> dict[str, tuple[dict[str, Tensor], SentEntry]]:
        """Return what of it lies in a file of its own, by its name: the tensors, and the rest."""
        return {}


class Updates(Sent):
    """What a horizontal federation sends: updates, and nothing beside them."""

    kind = "horizontal"
    federations = "horizontal federations"


UPDATES = Updates()


class SentEntry(BaseModel, ABC):
    """All of a :class:`Sent` but its tensors, as it stands in its file."""

    @abstractmethod
    def module(self, task_info: TaskInfo) -> nn.Module:
        """Return the architecture of such a federation; BadInput: there is none."""

    @abstractmethod
    def record(self, tensors: dict[str, Tensor], module: nn.Module, task_info: TaskInfo, path: Path) -> Sent:
        """Return it with ``tensors``, read from ``path``; CorruptTranscript: one is missing, or contradicts another."""


def settings_by_kind() -> dict[str, type[ProtocolSpec]]:
    """Return the settings that protocols have beside a federation's own, by the field that they are in."""
    return {e.name: e.value.specified for e in SENT if e.value.specified is not ProtocolSpec}


def entries_by_kind() -> dict[str, type[SentEntry]]:
    """Return how what protocols sent lies on disk, by the file that it is in."""
    return {e.name: entry for e in SENT if (entry := e.value.entry)}


class HasSent:
    """What holds ``sent``, which it also gives under the names that it had of single protocols."""

    sent: Sent

    @property
    def vertical(self) -> Any:
        """``sent``, if the federation is vertical or split learning; else None."""
        return self._of("vertical")

    @property
    def trees(self) -> Any:
        """``sent``, if the federation is of boosted trees; else None."""
        return self._of("trees")

    def _of(self, kind: str) -> Sent | None:
        return self.sent if self.sent.kind == kind else None
