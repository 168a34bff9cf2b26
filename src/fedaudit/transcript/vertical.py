"""What travels in a vertical federation, what each side sees of it, and how it lies on disk."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import ConfigDict, Field, SerializerFunctionWrapHandler, model_serializer
from torch import Tensor, nn

from fedaudit.models import VerticalModel, build_split, build_vertical
from fedaudit.models.vertical import Features, Top
from fedaudit.task.info import TaskInfo
from fedaudit.transcript.rounds import Round, check_labels, check_tensors
from fedaudit.transcript.sent import Key, ProtocolSpec, Sent, SentEntry
from fedaudit.transcript.update import UpdateKind
from fedaudit.utils.errors import CorruptTranscript
from fedaudit.utils.finite import all_finite
from fedaudit.utils.validation import Count, Name, Whole

_WEIGHTS, _UPDATES, _SERVER = "weights/", "updates/", "server."
_TOGETHER = ("batches", "labels", "embeddings", "gradients")


class VerticalSpec(ProtocolSpec):
    """How features, model and messages of a vertical federation are split over its parties."""

    kind: ClassVar[str] = "vertical"
    algorithms: ClassVar[tuple[str, ...]] = ("vertical", "split")
    same_examples: ClassVar[bool] = True
    # Every party takes part in every round, in one step on the same examples.
    lacks: ClassVar[tuple[str, ...]] = (
        "clients_per_round", "local_steps", "local_epochs", "momentum", "weight_decay", "proximal_mu", "malicious",
        "keep_rounds", "batch_norm", "arithmetic", "partition",
    )  # fmt: skip
    lacks_why: ClassVar[str] = (
        "a vertical federation, whose parties all take part in one step a round on the same examples"
    )
    members: ClassVar[str] = "parties"

    features: Features = Field(
        default="strips",
        description="which of them a party holds: strips, columns of a table or an image that stand side by side; "
        "quadrants, a quarter of an image each (4 parties)",
    )
    protocol: Literal["split", "aggregated-gradients"] = Field(
        default="split",
        description="split: embeddings go up, their gradients come down; aggregated-gradients: the server reads the "
        "model, and the gradient of a whole batch for every parameter, as CAFE assumes",
    )
    embedding: Count | None = Field(
        default=None, description="numbers that a party's network puts out for an example; the model's outputs if null"
    )
    top: Top = Field(
        default="linear",
        description="the server's network on all embeddings: one linear layer; mlp, a hidden one more; sum, none: the "
        "outputs are the embeddings' sum",
    )
    observer: Whole = Field(default=0, description="which party looks, where the adversary is a client")
    cut: Count | Name | None = Field(
        default=None,
        description="split learning: the last layer of the model that the client has, by its name or its number (from "
        "1); the server has the rest",
    )
    known_labels: Whole = Field(
        default=0, description="examples of each class whose label the observing party knows (auxiliary labels)"
    )

    @model_serializer(mode="wrap")
    def _without_defaults(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out what plain vertical federations don't have, so that their transcripts keep their fingerprints."""
        return {k: v for k, v in handler(self).items() if v or k not in ("cut", "known_labels")}

    @classmethod
    def defaults(cls, algorithm: str) -> dict[str, Any]:
        """Return one party, the client, for split learning."""
        return {"clients": 1} if algorithm == "split" else {}

    def check(self, algorithm: str, clients: int, changed: Collection[str]) -> None:
        """Refuse a federation that has no parties, or split learning without a cut, beside what all refuse."""
        if algorithm == "split":
            self._check_split(clients)
        elif algorithm in self.algorithms and self.cut is not None:
            raise ValueError("vertical.cut is for split learning; set algorithm: split")
        super().check(algorithm, clients, changed)
        if clients < 2 and self.cut is None:
            raise ValueError("a vertical federation has 2 parties or more; raise clients")

    def _check_split(self, clients: int) -> None:
        if self.cut is None:
            raise ValueError(
                "split learning needs vertical.cut, the last layer that the client has; set it to 1, or a name"
            )
        usual = VerticalSpec(cut=self.cut, known_labels=self.known_labels)
        for key in ("features", "protocol", "embedding", "top", "observer"):
            if getattr(self, key) != getattr(usual, key):
                raise ValueError(
                    f"vertical.{key} isn't for split learning, where vertical.cut says it all; leave it out"
                )
        if clients != 1:
            raise ValueError(
                "split learning has one client here (several in turn send what one would); leave clients out"
            )

    def of_model(self, clients: int) -> tuple[Any, ...]:
        """Return what decides the parties' networks and the server's."""
        return clients, self.features, self.embedding, self.top, self.cut

    def case(self) -> dict[str, Any]:
        """Return the server's network, and what a party knows."""
        return {"top": self.top, "cut": self.cut is not None, "known_labels": self.known_labels > 0}


@dataclass(frozen=True)
class VerticalRecord(Sent):
    """The rounds of a vertical federation, or what one side sees of them.

    T rounds, batches of K out of N aligned examples, P parties, embeddings of E numbers.

    Attributes:
        spec: how features, model and messages are split.
        parties: P.
        examples: N, which all parties hold parts of.
        learning_rate: of SGD, everybody's.
        weights: by name, before the first round; in full, or those that this side has.
        batches: (T, K) int64, which examples were in each round's batch, from 0: both sides need it.
        labels: (N,) that the server holds; None where this side isn't the server.
        embeddings: (T, P, K, E) that went up; of one party (T, 1, K, E); empty where none travelled.
        gradients: as ``embeddings``, of the batch's mean loss with respect to them, that came down.
        updates: by parameter name (T, ...), the gradient of each round's mean loss; empty where the server isn't shown.
        held: (N, ...) that the observing party holds, as its network takes them, where it knows some labels; empty
            otherwise, and for everybody else.
        party: whose view this is; None: the server's, or the whole.
        known: (N,) int64 that party's auxiliary labels, −1 where it has none; None where it has none at all.
    """

    kind: ClassVar[str] = "vertical"
    specified: ClassVar[type[ProtocolSpec]] = VerticalSpec
    update_kind: ClassVar[UpdateKind] = "gradient"
    federations: ClassVar[str] = "vertical federations"
    not_this: ClassVar[str] = "isn't: its clients hold whole examples; set federations[].algorithm: vertical, or split"
    no_updates: ClassVar[str] = (
        "this federation is vertical: parties send embeddings of their features, and no updates; use an attack "
        "on vertical federations (cafe, direct-labels, norm-scoring, direction-scoring, model-completion, or "
        "unsplit)"
    )

    spec: VerticalSpec
    parties: int
    examples: int
    learning_rate: float
    weights: dict[str, Tensor]
    batches: Tensor
    labels: Tensor | None
    embeddings: Tensor
    gradients: Tensor
    updates: dict[str, Tensor] = field(default_factory=dict)
    held: Tensor = field(default_factory=lambda: torch.zeros(0))
    party: int | None = None
    known: Tensor | None = None

    def __repr__(self) -> str:
        shape = f"{len(self.batches)} rounds of {self.batches.shape[1]} of {self.examples} examples"
        return f"VerticalRecord({self.spec.protocol}, {self.parties} parties, {shape})"

    @property
    def settings(self) -> VerticalSpec:
        """How features, model and messages are split."""
        return self.spec

    @property
    def used(self) -> Tensor:
        """Return (m,) which examples were in a batch, in ascending order."""
        return torch.as_tensor(self.batches.unique())

    def last_embeddings(self) -> Tensor:
        """Return (m, ...) what the first party seen here sent last of each example in ``used``."""
        found = self.embeddings.new_zeros((self.examples, *self.embeddings.shape[3:]))
        for rows, sent in zip(self.batches, self.embeddings[:, 0], strict=True):
            found[rows] = sent
        return found[self.used]

    def seen_by(self, adversary: str) -> VerticalRecord:
        """Return what the ``server`` sees, an ``eavesdropper``, or the ``client`` that the spec names as observer.

        The server has the labels, its own network and all that goes up and down, and the parties' networks, too, where
        gradients are aggregated. An eavesdropper has what goes up and down. A party has its own network, embeddings and
        their gradients, and its features where it knows labels of some.
        """
        if adversary in ("server", "malicious-server"):
            whole = self.spec.protocol == "aggregated-gradients"
            own = self.weights if whole else {n: t for n, t in self.weights.items() if n.startswith(_SERVER)}
            return dataclasses.replace(self, weights=own, held=torch.zeros(0))
        if adversary == "eavesdropper":
            weights = {} if self.embeddings.numel() else self.weights
            return dataclasses.replace(self, labels=None, weights=weights, held=torch.zeros(0))
        place = self.spec.observer
        own = {n: t for n, t in self.weights.items() if n.startswith(f"parties.{place}.")}
        only = (slice(None), slice(place, place + 1)) if self.embeddings.numel() else ...
        return dataclasses.replace(
            self,
            weights=own,
            labels=None,
            embeddings=self.embeddings[only],
            gradients=self.gradients[only],
            updates={},
            party=place,
            known=self._auxiliary(),
        )

    def _auxiliary(self) -> Tensor | None:
        """Return the labels that the observing party knows: those of each class's first ``known_labels`` examples."""
        if not self.spec.known_labels or self.labels is None:
            return None
        known = torch.full((self.examples,), -1)
        for label in self.labels.unique():
            rows = torch.nonzero(self.labels == label)[: self.spec.known_labels, 0]
            known[rows] = self.labels[rows]
        return known

    def weights_of(self, index: int) -> dict[str, Tensor]:
        """Return the weights before round ``index``, which the gradients up to then give: W − rate·Σg."""
        return {
            name: value - self.learning_rate * self.updates[name][:index].sum(dim=0) if name in self.updates else value
            for name, value in self.weights.items()
        }

    def check(self, module: nn.Module, task_info: TaskInfo, where: str) -> None:
        """Refuse what contradicts itself or isn't of ``module``; it may be made in Python, or read from a file."""
        if not isinstance(module, VerticalModel) or len(module.parties) != self.parties:
            raise CorruptTranscript(f"{where}: the model isn't one of {self.parties} parties")
        check_tensors(self.weights, module.state_dict(), f"{where}, weights")
        b = self.batches
        if (
            b.ndim != 2
            or b.dtype != torch.int64
            or not b.numel()
            or not 0 <= int(b.min()) <= int(b.max()) < self.examples
        ):
            raise CorruptTranscript(f"{where}: the batches aren't of its {self.examples} examples")
        if any(len(row.unique()) < len(row) for row in b):
            raise CorruptTranscript(f"{where}: a batch holds an example twice")
        rounds, size = b.shape
        if self.labels is not None:
            check_labels(self.labels, task_info, where)
            if len(self.labels) != self.examples:
                raise CorruptTranscript(f"{where}: {len(self.labels)} labels of {self.examples} examples")
        split = self.spec.protocol == "split"
        blank = module.features(task_info.blank(1)[0])
        width: tuple[int, ...] = (self.spec.embedding or task_info.outputs,)
        if self.spec.cut is not None:
            width = copy.deepcopy(module).eval().embed(blank)[0].shape[1:]
        expected = (rounds, self.parties, size, *width) if split else (0,)
        for name in ("embeddings", "gradients"):
            tensor = getattr(self, name)
            if tuple(tensor.shape) != expected or tensor.dtype != torch.float32:
                raise CorruptTranscript(f"{where}: {name} of shape {tuple(tensor.shape)}, expected {expected}")
            if not all_finite([tensor]):
                raise CorruptTranscript(f"{where}: {name} have NaN or infinite values")
        if self.spec.observer >= self.parties:
            raise CorruptTranscript(f"{where}: party {self.spec.observer} looks, and there are {self.parties}")
        expected = (self.examples, *blank[self.spec.observer].shape[1:]) if self.spec.known_labels else (0,)
        if tuple(self.held.shape) != expected or not all_finite([self.held]):
            raise CorruptTranscript(f"{where}: features of shape {tuple(self.held.shape)}, expected {expected}")
        wanted = {} if split else dict(module.named_parameters())
        check_tensors(self.updates, {n: p.detach().expand(rounds, *p.shape) for n, p in wanted.items()}, where)

    def truth_keys(self, rounds: Sequence[Round]) -> dict[Key, int]:  # noqa: ARG002
        """Return a key for each example that was in a batch."""
        return {(i, 0): 1 for i in self.by_example()}

    def by_example(self) -> list[int]:
        """Return the examples that were in a batch: which is which everybody knows."""
        return [int(i) for i in self.used]

    def case(self, log: Mapping[str, Tensor]) -> dict[str, Any]:
        """Return its settings; who recorded anything is a server who sent gradients of its own."""
        return {**super().case(log), **({"server": "fsha"} if log else {})}

    def extent(self, rounds: Sequence[Round]) -> str:  # noqa: ARG002
        """Return how many rounds there are, of how many parties."""
        return f"{len(self.batches)} round(s) of {self.parties} parties"

    def parts(self) -> dict[str, tuple[dict[str, Tensor], SentEntry]]:
        """Return its file."""
        return {self.kind: (self.tensors(), VerticalEntry.model_validate(self))}

    def tensors(self) -> dict[str, Tensor]:
        """Return all tensors by the name that they have in its file."""
        found = {name: getattr(self, name) for name in _TOGETHER if getattr(self, name) is not None}
        found |= {"held": self.held} if self.held.numel() else {}
        found |= {f"{_WEIGHTS}{name}": value for name, value in self.weights.items()}
        return found | {f"{_UPDATES}{name}": value for name, value in self.updates.items()}


class VerticalEntry(SentEntry):
    """All of a :class:`VerticalRecord` but its tensors, as it stands in a transcript's index."""

    model_config = ConfigDict(extra="forbid", from_attributes=True)
    spec: VerticalSpec
    parties: Annotated[int, Field(ge=1, le=10_000)]
    examples: Annotated[int, Field(ge=1, le=10_000_000)]
    learning_rate: Annotated[float, Field(gt=0, allow_inf_nan=False)]

    def module(self, task_info: TaskInfo) -> nn.Module:
        """Return the parties' networks and the server's."""
        return vertical_module(self.spec, self.parties, task_info)

    def record(self, tensors: dict[str, Tensor], module: nn.Module, task_info: TaskInfo, path: Path) -> VerticalRecord:
        """Return the record with ``tensors``, read from ``path``, checked."""
        grouped: dict[str, dict[str, Tensor]] = {_WEIGHTS: {}, _UPDATES: {}}
        known: dict[str, Any] = {}
        for name, value in tensors.items():
            prefix = next((p for p in grouped if name.startswith(p)), None)
            if prefix:
                grouped[prefix][name.removeprefix(prefix)] = value
            elif name in (*_TOGETHER, "held"):
                known[name] = value
            else:
                raise CorruptTranscript(f"{path}: '{name[:40]}' is no tensor of a vertical federation")
        if missing := sorted({*_TOGETHER} - known.keys()):
            raise CorruptTranscript(f"{path}: '{missing[0]}' is missing")
        ordered = {name: grouped[_WEIGHTS][name] for name in module.state_dict() if name in grouped[_WEIGHTS]}
        made = VerticalRecord(
            self.spec,
            self.parties,
            self.examples,
            self.learning_rate,
            {**ordered, **grouped[_WEIGHTS]},
            **known,
            updates={n: grouped[_UPDATES][n] for n, _ in module.named_parameters() if n in grouped[_UPDATES]},
        )
        if len(made.updates) < len(grouped[_UPDATES]):
            raise CorruptTranscript(f"{path}: a gradient is none of the model's")
        made.check(module, task_info, str(path))
        return made


VerticalRecord.entry = VerticalEntry


def vertical_module(spec: VerticalSpec, parties: int, task_info: TaskInfo) -> VerticalModel:
    """Return the architecture of a vertical federation."""
    if spec.cut is not None:
        return build_split(
            task_info.model,
            cut=spec.cut,
            input_shape=task_info.input_shape,
            outputs=task_info.outputs,
            width=task_info.width,
        )
    return build_vertical(
        task_info.model,
        parties=parties,
        features=spec.features,
        top=spec.top,
        embedding=spec.embedding or task_info.outputs,
        input_shape=task_info.input_shape,
        outputs=task_info.outputs,
        width=task_info.width,
    )
