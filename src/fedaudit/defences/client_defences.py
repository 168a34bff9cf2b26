"""What every client-side defence is: it changes a client's update before the update leaves."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fedaudit.defences.aggregation import Aggregator
from fedaudit.epsilon.accounting import PrivacyAccount, TakingPart
from fedaudit.task.info import TaskInfo
from fedaudit.task.training import LocalPlan, Loss
from fedaudit.transcript.update import ClientDefenceInfo, Update
from fedaudit.utils.errors import BadInput
from fedaudit.utils.registry import Plugin, Registry, register


@dataclass(frozen=True, eq=False)
class OwnExamples:
    """What a client trained on in a round, and the model that it received, in the mode of its training.

    Attributes:
        model: of the client's own, with the received weights; a client-side defence may change it.
        loss: mean over a batch.
        batches: (inputs, targets) of each local step, as the model saw them, on the model's device.
    """

    model: nn.Module
    loss: Loss
    batches: Sequence[tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class ClientContext:
    """What a client has at hand beside its own update.

    Attributes:
        weights: the global model's state that it received this round.
        layers: names of the parameters and buffers of each layer, in forward order.
        clients: that take part in a round.
        own: its examples; None where the client-side defence doesn't ask for them (``needs_examples``).
    """

    weights: dict[str, Tensor]
    layers: tuple[tuple[str, ...], ...]
    clients: int
    own: OwnExamples | None = None

    def examples(self, name: str) -> OwnExamples:
        """Return the client's examples.

        Args:
            name: of the client-side defence that asks.

        Raises:
            BadInput: there are none.
        """
        if self.own is None:
            raise BadInput(f"{name} looks at the client's examples, which aren't here; use it in a simulation")
        return self.own


CLIENT_DEFENCES: Registry[type[ClientDefence]] = Registry("client-side defence", "fedaudit.client_defences")


class ClientDefence(Plugin, ABC):
    """Changes an update before it leaves the client; one instance per client, so it may keep state between rounds.

    What everybody knows of the change, the attacker included, is the ``sanitised`` of the update that it returns: a
    :class:`~fedaudit.transcript.update.ClientDefenceInfo`.

    Class attributes beside a plug-in's:
        protects: False where it changes nothing.
        secret: without a generator it draws from the operating system, which nobody can repeat.
        unsent: how much it counts that an element which wasn't sent should be zero, from 0 (it may be anything) to 1
            (it is smaller than those that were); measured in docs/reference/defences.md.
        needs_examples: it looks at the client's examples, its loss and the model (``ClientContext.own``), which only a
            simulation hands to it.
        augments: it changes what clients train on (:meth:`augment`).
    """

    registry = CLIENT_DEFENCES

    protects: ClassVar[bool] = True
    secret: ClassVar[bool] = False
    unsent: ClassVar[float] = 0.0
    needs_examples: ClassVar[bool] = False
    augments: ClassVar[bool] = False

    def at_home(self, names: Collection[str]) -> set[str]:  # noqa: ARG002
        """Return which tensors of a model's state stay with the client from round to round; as it stands, none."""
        return set()

    def check(self, plan: LocalPlan, aggregator: Aggregator) -> None:
        """Refuse, before anything is simulated, a federation that it isn't made for.

        Args:
            plan: how clients train.
            aggregator: how the server merges what they send.

        Raises:
            BadInput: it isn't; the message gives the reason and the remedy.
        """

    def check_alone(self, given: Collection[str], clients: int | None) -> int | None:  # noqa: ARG002
        """Return in how many rounds a client may use it that knows nothing of the others; None: in any number.

        Args:
            given: names of the settings that were chosen rather than left as they are.
            clients: that take part in a round; None: it isn't known.

        Raises:
            BadInput: it can't work there, or would end the training; the message gives the reason and the remedy.
        """
        if self.needs_examples:
            raise BadInput(
                f"{self.name} looks at the client's examples, and whoever sees an update alone hasn't got them; use it "
                "in a simulation"
            )
        return None

    def account(self, who: TakingPart) -> PrivacyAccount | None:  # noqa: ARG002
        """Return what a federation's rounds cost in privacy; None: it promises none.

        Args:
            who: takes part, and how often.
        """
        return None

    def budget(self) -> float | None:
        """Return the ε after which nobody sends any more; None: it stops nobody."""
        return None

    def adds_noise(self) -> bool:
        """Return whether every update gets noise of its own, which averages out over rounds."""
        return False

    def augment(
        self,
        own: OwnExamples,
        task_info: TaskInfo,  # noqa: ARG002
        generator: torch.Generator,  # noqa: ARG002
    ) -> list[tuple[Tensor, Tensor]]:
        """Return the batches that the client trains on in a round in place of its own; asked where ``augments``.

        Args:
            own: its batches, and the model that it received, which must stay as it is.
            task_info: what everybody knows.
            generator: of all that is drawn.
        """
        return list(own.batches)

    @abstractmethod
    def __call__(self, update: Update, context: ClientContext, generator: torch.Generator) -> Update:
        """Return the update that is sent; the given one isn't changed.

        Args:
            update: as the client made it.
            context: what else the client has at hand.
            generator: of all that is drawn.
        """

    @classmethod
    def info(cls) -> dict[str, Any]:
        """Return what ``fedaudit list --json`` says beside name and summary."""
        return {"side": "client", "paper": cls.paper}


@register
class NoClientDefence(ClientDefence):
    """Sends the update as it is."""

    name = "none"
    summary = "the update leaves as it is: no defence"
    paper = "-"
    protects = False

    def __call__(self, update: Update, context: ClientContext, generator: torch.Generator) -> Update:  # noqa: ARG002
        """Return ``update``."""
        return update


def changed(update: Update, tensors: dict[str, Tensor], how: ClientDefenceInfo) -> Update:
    """Return ``update`` with other tensors, and what everybody knows of how they came about."""
    return replace(update, tensors=tensors, sanitised=how)


def flat(tensors: Mapping[str, Tensor]) -> Tensor:
    """Return all elements as one (d,) vector, in the order of the names."""
    return torch.cat([tensor.reshape(-1) for tensor in tensors.values()])


def unflat(vector: Tensor, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Undo :func:`flat`."""
    pieces = vector.split([tensor.numel() for tensor in like.values()])
    return {name: piece.view_as(tensor) for (name, tensor), piece in zip(like.items(), pieces, strict=True)}


def norm(tensors: Iterable[Tensor]) -> float:
    """Return the Euclidean norm over all tensors, in float64."""
    return math.sqrt(sum(float(tensor.double().square().sum()) for tensor in tensors))
