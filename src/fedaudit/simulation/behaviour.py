"""What a client does in its round, where it isn't honest: a part of the simulator that can be replaced."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor, nn

from fedaudit.task.info import TaskInfo
from fedaudit.task.training import Loss
from fedaudit.utils.registry import Plugin, Registry
from fedaudit.utils.registry import register as register


class HonestTraining(Protocol):
    """Trains as the protocol says, on whatever batches it is given."""

    def __call__(self, batches: Sequence[tuple[Tensor, Tensor]], limit: float | None = None) -> dict[str, Tensor]:
        """Return what the client would send: the gradient, or ΔW.

        Args:
            batches: normalised inputs, and targets; a gradient is taken on the first.
            limit: after every step no parameter lies farther than this from the global one; None: no limit.
        """
        ...


@dataclass(frozen=True)
class ClientStep:
    """All that a client holds in one round: what every client has, and nothing of another's.

    Its tensors lie where the federation trains (:attr:`device`), what the generator draws on the CPU.

    Attributes:
        round: from 0.
        client: its own number.
        model: the architecture, with the weights of the round; ``train`` changes it.
        weights: the global model's state that was received.
        batches: of the client's own data, as it would train on them honestly.
        train: honest local training.
        task_info: what everybody knows.
        loss: mean over a batch.
        generator: of all that it draws.
        records: the adversary's, normalised inputs and targets, where the adversary is such a client and has any.
    """

    round: int
    client: int
    model: nn.Module
    weights: dict[str, Tensor]
    batches: list[tuple[Tensor, Tensor]]
    train: HonestTraining
    task_info: TaskInfo
    loss: Loss
    generator: torch.Generator
    records: tuple[Tensor, Tensor] | None = None

    @property
    def device(self) -> torch.device:
        """Where the federation trains."""
        return next(self.model.parameters()).device


BEHAVIOURS: Registry[type[Behaviour]] = Registry("behaviour", "fedaudit.behaviours")


class Behaviour(Plugin, ABC):
    """What malicious clients do. One instance for all malicious clients of a federation: they collude.

    Attributes that a subclass may make settings:
        start: the round in which they begin; before, they are honest.
        target: the class that they are after, of which they hold no example; None: they are after none.
    """

    registry = BEHAVIOURS
    start: int = 0
    target: int | None = None
    # Whether what it does says something of a trained federation only; then accuracy is measured at the end.
    trained: ClassVar[bool] = False

    @abstractmethod
    def __call__(self, step: ClientStep) -> dict[str, Tensor]:
        """Return what the client sends: a tensor for each of the model's trainable parameters."""

    def check(self, task_info: TaskInfo, records: bool) -> None:
        """Refuse, before anything is simulated, a federation in which it can't do what it is for.

        Args:
            task_info: what everybody knows.
            records: whether its steps will have the adversary's records.

        Raises:
            BadInput: it can't; the message gives the reason and the remedy.
        """

    def adversary_log(self) -> dict[str, Tensor]:
        """Return the adversary log so far: what it has recorded, by name, on the CPU."""
        return {}
