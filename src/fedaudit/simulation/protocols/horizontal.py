"""Horizontal federations: clients hold examples of their own, and send updates, round by round."""

from __future__ import annotations

from torch import nn

from fedaudit.models import build_model
from fedaudit.simulation.client import Federation
from fedaudit.simulation.horizontal import check_rounds, play
from fedaudit.simulation.protocols.base import Protocol, SimulationOptions, register
from fedaudit.simulation.recording import Recording
from fedaudit.simulation.spec import FederationSpec
from fedaudit.task.info import TaskInfo
from fedaudit.transcript.sent import Updates


@register
class Horizontal(Protocol):
    """FedSGD, FedAvg and FedProx."""

    sent = Updates
    described = "a horizontal federation"

    def model(self, spec: FederationSpec, name: str, width: int | None, task_info: TaskInfo) -> nn.Module:  # noqa: ARG002
        """Return the model of that name."""
        return build_model(
            name,
            input_shape=task_info.input_shape,
            outputs=task_info.outputs,
            width=width,
            tokens=task_info.tokens,
        )

    def check(self, federation: Federation) -> None:
        """Refuse what can't work in rounds of updates."""
        check_rounds(federation)

    def simulate(self, federation: Federation, options: SimulationOptions) -> Recording:
        """Run the rounds."""
        return play(federation, *options)
