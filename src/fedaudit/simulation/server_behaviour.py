"""What a server sends, where it isn't honest: a part of the simulator that can be replaced."""

from __future__ import annotations

from abc import ABC
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from fedaudit.task.info import TaskInfo
from fedaudit.task.training import LocalPlan, Loss
from fedaudit.transcript.transcript import SERVER_LOG as SERVER_LOG
from fedaudit.utils.errors import BadInput
from fedaudit.utils.finite import all_finite
from fedaudit.utils.registry import Plugin, Registry
from fedaudit.utils.registry import register as register


@dataclass(frozen=True)
class ServerStep:
    """All that a malicious server has in its hands before a round, and nothing of a client's.

    Attributes:
        round: from 0.
        clients: who takes part.
        plan: how they train.
        model: the architecture that is sent, as clients run it; a copy, to do with as one likes.
        weights: its state, as an honest server would send it.
        task_info: what everybody knows, the altered architecture included.
        loss: mean over a batch.
        generator: of all that it draws.
        public: (n, ...) public examples of the clients' kind as the model sees them; None: it has none.
        public_targets: theirs.
    """

    round: int
    clients: tuple[int, ...]
    plan: LocalPlan
    model: nn.Module
    weights: dict[str, Tensor]
    task_info: TaskInfo
    loss: Loss
    generator: torch.Generator
    public: Tensor | None = None
    public_targets: Tensor | None = None


@dataclass(frozen=True)
class SplitStep:
    """All that a malicious server of split learning has in its hands in a round.

    Attributes:
        round: from 0.
        embeddings: (K, ...) what the client sent, on the device on which it trains.
        gradients: (K, ...) of the batch's mean loss with respect to them, that an honest server would send back.
        client: the architecture of the client's part; all of its weights are zero.
        generator: of all that it draws.
        public: (n, ...) public examples of the client's kind, as the model sees them.
    """

    round: int
    embeddings: Tensor
    gradients: Tensor
    client: nn.Module
    task_info: TaskInfo
    generator: torch.Generator
    public: Tensor


SERVER_BEHAVIOURS: Registry[type[ServerBehaviour]] = Registry("server behaviour", "fedaudit.server_behaviours")


class ServerBehaviour(Plugin, ABC):
    """What a malicious server does to the model before it sends it, or in split learning to the gradients.

    The server keeps the model that an honest one would have: clients' updates are added to that, and what was altered
    is altered anew in every round. What clients are sent is in the transcript.

    Class attributes:
        answers: it is for split learning, where it answers embeddings, and for nothing else.
    """

    registry = SERVER_BEHAVIOURS
    answers: ClassVar[bool] = False

    def task_info(self, task_info: TaskInfo, plan: LocalPlan) -> TaskInfo:  # noqa: ARG002
        """Return what everybody knows once the architecture is altered; as it is, where only weights are."""
        return task_info

    def check(self, model: nn.Module, task_info: TaskInfo, plan: LocalPlan) -> None:
        """Refuse, before anything is simulated, a federation in which it can't do what it is for.

        Args:
            model: the altered architecture.
            task_info: what everybody knows of it.
            plan: how clients train.

        Raises:
            BadInput: it can't; the message gives the reason and the remedy.
        """

    def __call__(self, step: ServerStep) -> dict[str, Tensor]:
        """Return what clients are sent: the names, shapes and types of ``step.weights``; these, by default."""
        return step.weights

    def own(self, step: ServerStep) -> Mapping[int, Mapping[str, Tensor]]:  # noqa: ARG002
        """Return what single clients are sent otherwise: client to the tensors that differ. None, by default."""
        return {}

    def answer(self, step: SplitStep) -> Tensor:
        """Return the gradients (K, ...) that the client of split learning is sent; the loss' own, by default."""
        return step.gradients

    def adversary_log(self) -> dict[str, Tensor]:
        """Return what it has recorded so far, on the CPU, under names that begin with :data:`SERVER_LOG`."""
        return {}


def sent(behaviour: ServerBehaviour, step: ServerStep) -> tuple[dict[str, Tensor], dict[int, dict[str, Tensor]]]:
    """Return what the server sends in a round, checked: to all, and the whole state of clients who are sent another.

    BadInput: it isn't a state of the model, isn't finite, or is for somebody who doesn't take part.
    """
    altered, own = dict(behaviour(step)), behaviour.own(step)
    states = [altered, *(altered | dict(tensors) for tensors in own.values())]
    wanted = {name: (tensor.shape, tensor.dtype) for name, tensor in step.weights.items()}
    fits = all({name: (t.shape, t.dtype) for name, t in state.items()} == wanted for state in states)
    finite = all_finite(t for part in (altered, *own.values()) for t in part.values())
    if not fits or not finite or not set(own) <= set(step.clients):
        raise BadInput(
            f"what the server sends by '{behaviour.name}' is no finite state of the model in round {step.round}"
        )
    common = {name: altered[name].detach().clone() for name in step.weights}
    return common, {
        client: {name: tensors[name].detach().clone() if name in tensors else common[name] for name in common}
        for client, tensors in own.items()
    }
