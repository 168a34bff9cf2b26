"""What every sanitiser is: it changes a client's update before the update leaves."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from fedaudit.defences.aggregation import Aggregator
from fedaudit.epsilon.accounting import PrivacyAccount, TakingPart
from fedaudit.task.training import LocalPlan
from fedaudit.transcript.update import SanitiserInfo, Update
from fedaudit.utils.registry import Plugin, Registry, register


@dataclass(frozen=True)
class ClientContext:
    """What a client has at hand beside its own update.

    Attributes:
        weights: the global model's state that it received this round.
        layers: names of the parameters and buffers of each layer, in forward order.
        clients: that take part in a round.
    """

    weights: dict[str, Tensor]
    layers: tuple[tuple[str, ...], ...]
    clients: int


SANITISERS: Registry[type[Sanitiser]] = Registry("sanitiser", "fedaudit.sanitisers")


class Sanitiser(Plugin, ABC):
    """Changes an update before it leaves the client; one instance per client, so it may keep state between rounds.

    What everybody knows of the change, the attacker included, is the ``sanitised`` of the update that it returns: a
    :class:`~fedaudit.transcript.update.SanitiserInfo`.

    Class attributes beside a plug-in's:
        protects: False where it changes nothing.
        secret: without a generator it draws from the operating system, which nobody can repeat.
        unsent: how much it counts that an element which wasn't sent should be zero, from 0 (it may be anything) to 1
            (it is smaller than those that were); measured in docs/reference/defences.md.
    """

    registry = SANITISERS

    protects: ClassVar[bool] = True
    secret: ClassVar[bool] = False
    unsent: ClassVar[float] = 0.0

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
class NoSanitiser(Sanitiser):
    """Sends the update as it is."""

    name = "none"
    summary = "the update leaves as it is: no defence"
    paper = "-"
    protects = False

    def __call__(self, update: Update, context: ClientContext, generator: torch.Generator) -> Update:  # noqa: ARG002
        """Return ``update``."""
        return update


def changed(update: Update, tensors: dict[str, Tensor], how: SanitiserInfo) -> Update:
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
