"""What travels in a federation of boosted trees, what each side sees of it, and how it lies on disk."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import numpy as np
import torch
from pydantic import ConfigDict, Field
from torch import Tensor, nn

from fedaudit.task import TaskInfo
from fedaudit.transcript import ProtocolSpec, Round, Sent, SentEntry
from fedaudit.utils import BadInput, CorruptTranscript, Count, NonNegative, Share, Whole
from fedaudit_trees.model import MODEL as TREES
from fedaudit_trees.model import Booster, Tree, TreeEnsemble, read_booster

HELD = ("held/inputs", "held/labels")  # of the observer, in the adversary's log: its own rows
_Examples = Annotated[int, Field(ge=1, le=10_000_000)]


class TreeSpec(ProtocolSpec):
    """How a federation of boosted trees trains, and what its clients send; the step η is ``learning_rate``."""

    kind: ClassVar[str] = "trees"
    algorithms: ClassVar[tuple[str, ...]] = ("trees",)
    model: ClassVar[str] = TREES
    # Clients grow trees on all of their rows, in every round or in turn.
    lacks: ClassVar[tuple[str, ...]] = (
        "clients_per_round", "local_steps", "local_epochs", "momentum", "weight_decay", "proximal_mu", "malicious",
        "server", "keep_rounds", "batch_norm", "arithmetic", "batch_size",
    )  # fmt: skip
    lacks_why: ClassVar[str] = "a federation of trees, whose clients grow trees on all their rows"

    protocol: Literal["bagging", "cyclic", "histogram"] = Field(
        default="bagging",
        description="bagging: in a round each client grows trees on its own rows, and all join the model; cyclic: one "
        "client a round, in turn; histogram: one tree a round of all rows, from the sum of the clients' histograms",
    )
    per_round: Count = Field(default=1, description="trees that a client grows in a round")
    max_depth: Annotated[Count, Field(le=16)] = Field(default=6, description="of a tree")
    min_child_weight: NonNegative = Field(default=1.0, description="least sum of hessians in a leaf")
    reg_lambda: NonNegative = Field(default=1.0, description="λ, the L2 penalty of the leaves' weights")
    max_bin: Annotated[Count, Field(ge=2, le=65_536)] = Field(default=256, description="bins of a feature's histogram")
    columns: Annotated[Share, Field(gt=0)] = Field(
        default=1.0, description="share of the columns that a tree may split by, drawn anew (colsample_bytree)"
    )
    noise: NonNegative = Field(
        default=0.0,
        description="standard deviation of the Gaussian noise that a client adds to both sums of every leaf, of "
        "gradients and of hessians, before it computes what it sends; an example's gradient is at most 1",
    )
    cover: bool = Field(
        default=True,
        description="false: clients send the leaves' values without sum_hessian, gains and the weights of inner nodes",
    )
    observer: Whole = Field(default=0, description="which client looks, where the adversary is a client")


@dataclass(frozen=True, eq=False)
class TreeMessage:
    """What one client sent in one round.

    Attributes:
        round: from 0.
        client: from 0; 0 where only the histograms' sum is seen.
        model: its trees as xgboost's JSON, as they were sent. In the protocol ``histogram`` the tree that all grew,
            with the sums of this client's histograms in its leaves.
        num_examples: that it holds, which cover tells, too.
    """

    round: int
    client: int
    model: bytes
    num_examples: int

    @cached_property
    def booster(self) -> Booster:
        """Its trees; BadInput where it holds none."""
        return read_booster(self.model, f"round {self.round}, client {self.client}")


@dataclass(frozen=True, eq=False)
class TreeRecord(Sent):
    """The rounds of a federation of trees, or what one side sees of them.

    Attributes:
        learning_rate: η.
        clients: how many there are; 1 where only sums are seen.
        messages: in the order in which their trees join the model.
        victims: clients whose rows are asked for.
    """

    kind: ClassVar[str] = "trees"
    specified: ClassVar[type[ProtocolSpec]] = TreeSpec
    federations: ClassVar[str] = "federations of boosted trees"
    others: ClassVar[str] = "federations of networks"
    not_this: ClassVar[str] = "trains a network; set federations[].algorithm: trees"
    no_updates: ClassVar[str] = (
        "this federation is of boosted trees: clients send trees, and no updates; use timberstrike, an attack on trees"
    )
    grown: ClassVar[bool] = True
    no_membership: ClassVar[str] = "no attack on boosted trees asks that"

    spec: TreeSpec
    learning_rate: float
    clients: int
    messages: tuple[TreeMessage, ...]
    victims: tuple[int, ...]

    def __repr__(self) -> str:
        return f"TreeRecord({self.spec.protocol}, {len(self.messages)} messages of {self.clients} clients)"

    @property
    def settings(self) -> TreeSpec:
        """How they are grown."""
        return self.spec

    def seen_by(self, adversary: str) -> TreeRecord:
        """Return what a ``server`` or an ``eavesdropper`` sees, which is all, or the ``client`` named as observer.

        A client receives the model of every round: its trees stand in the clients' order, so it knows which are whose.
        Of histograms it learns the sum alone, and takes its own off: its record then has one client, the others
        together.
        """
        if adversary != "client":
            return self
        if self.spec.protocol == "histogram":
            return self if self.clients == 1 else dataclasses.replace(self, victims=())
        rest = tuple(client for client in self.victims if client != self.spec.observer)
        return dataclasses.replace(self, victims=rest)

    def of(self, *clients: int) -> TreeRecord:
        """Return the same with these victims."""
        return dataclasses.replace(self, victims=clients)

    def examples_of(self, client: int) -> int:
        """Return how many examples a client holds."""
        return next(message.num_examples for message in self.messages if message.client == client)

    def before(self, message: TreeMessage) -> list[Tree]:
        """Return the trees of the model that ``message`` was grown on."""
        earlier = [
            m
            for m in self.messages
            if m.round < message.round and (self.spec.protocol != "histogram" or m.client == message.client)
        ]
        return [tree for m in earlier for tree in m.booster.trees]

    def by_client(self) -> dict[int, int]:
        """Return the victims, with how many rows they hold."""
        return {client: self.examples_of(client) for client in self.victims}

    def truth_keys(self, rounds: Sequence[Round]) -> dict[tuple[int, int], int]:  # noqa: ARG002
        """Return a key for each victim, of all of its rows."""
        return {(0, client): count for client, count in self.by_client().items()}

    def sent_by_victims(self, rounds: Sequence[Round]) -> list[tuple[int, int]]:  # noqa: ARG002
        """Return the (round, client) of the victims' messages."""
        return [(m.round, m.client) for m in self.messages if m.client in self.victims]

    def extent(self, rounds: Sequence[Round]) -> str:  # noqa: ARG002
        """Return how many messages there are, of how many clients."""
        return f"{len(self.messages)} message(s) of {self.clients} clients"

    def content(self) -> tuple[str, dict[str, Tensor]]:
        """Return its file's content, so that no version of this package changes a digest."""
        return TreeEntry.of(self).model_dump_json(), self.tensors()

    def parts(self) -> dict[str, tuple[dict[str, Tensor], SentEntry]]:
        """Return its file."""
        return {self.kind: (self.tensors(), TreeEntry.of(self))}

    def check(self, module: nn.Module, task_info: TaskInfo, where: str) -> None:  # noqa: ARG002
        """Refuse what contradicts itself, naming ``where``; it may have been made in Python, or read from a file."""
        order = [(m.round, m.client) for m in self.messages]
        if not order or order != sorted(set(order)) or any(not 0 <= c < self.clients for _, c in order):
            raise CorruptTranscript(f"{where}: its messages aren't one a round and client, in that order")
        try:
            boosters = [message.booster for message in self.messages]
        except BadInput as error:
            raise CorruptTranscript(f"{where}: {error}") from None
        for message, booster in zip(self.messages, boosters, strict=True):
            if (booster.features,) != tuple(task_info.input_shape) or not booster.trees:
                raise CorruptTranscript(
                    f"{where}: round {message.round}, client {message.client}: {len(booster.trees)} trees of "
                    f"{booster.features} features, and an example has {task_info.input_shape}"
                )
            if booster.objective != boosters[0].objective:
                raise CorruptTranscript(f"{where}: its messages have different objectives")

    def tensors(self) -> dict[str, Tensor]:
        """Return all messages by the name that they have in its file, bytes as uint8."""
        return {
            f"{m.round:05d}/{m.client:05d}": torch.from_numpy(np.frombuffer(m.model, dtype=np.uint8).copy())
            for m in self.messages
        }


class TreeEntry(SentEntry):
    """All of a :class:`TreeRecord` but its messages' bytes, as it stands in a transcript's index."""

    model_config = ConfigDict(extra="forbid")
    spec: TreeSpec
    clients: Annotated[int, Field(ge=1, le=10_000)]
    learning_rate: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    examples: list[_Examples]

    @classmethod
    def of(cls, record: TreeRecord) -> TreeEntry:
        """Return the entry of a record."""
        examples = [message.num_examples for message in record.messages]
        return cls(spec=record.spec, clients=record.clients, learning_rate=record.learning_rate, examples=examples)

    def module(self, task_info: TaskInfo) -> nn.Module:
        """Return a model without trees."""
        return TreeEnsemble(task_info.outputs)

    def record(self, tensors: dict[str, Tensor], module: nn.Module, task_info: TaskInfo, path: Path) -> TreeRecord:
        """Return the record with ``tensors``, read from ``path``, checked."""
        if len(tensors) != len(self.examples):
            raise CorruptTranscript(f"{path}: {len(tensors)} messages of {len(self.examples)}")
        messages = []
        for name, count in zip(sorted(tensors), self.examples, strict=True):
            parts = name.split("/")
            if len(parts) != 2 or not all(p.isascii() and p.isdigit() and len(p) == 5 for p in parts):
                raise CorruptTranscript(f"{path}: '{name[:40]}' is no message of a federation of trees")
            if tensors[name].dtype != torch.uint8 or tensors[name].ndim != 1:
                raise CorruptTranscript(f"{path}: '{name}' isn't bytes")
            model = tensors[name].numpy().tobytes()
            messages.append(TreeMessage(int(parts[0]), int(parts[1]), model, count))
        made = tree_record(self.spec, self.learning_rate, self.clients, messages)
        made.check(module, task_info, str(path))
        return made


TreeRecord.entry = TreeEntry


def tree_record(spec: TreeSpec, learning_rate: float, clients: int, messages: Sequence[TreeMessage]) -> TreeRecord:
    """Return the whole record: every client that sent anything is a victim."""
    return TreeRecord(spec, learning_rate, clients, tuple(messages), tuple(sorted({m.client for m in messages})))
