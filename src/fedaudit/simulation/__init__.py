"""The federation: clients, server, the simulator, and the transcript of what travelled."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedaudit.utils.lazy import lazy

if TYPE_CHECKING:
    from fedaudit.simulation.behaviour import BEHAVIOURS, Behaviour
    from fedaudit.simulation.client import Federation
    from fedaudit.simulation.local_training import train
    from fedaudit.simulation.server_behaviour import SERVER_BEHAVIOURS, ServerBehaviour
    from fedaudit.simulation.simulator import Recording, simulate
else:
    __getattr__, __dir__ = lazy(__name__)

__all__ = [
    "BEHAVIOURS",
    "SERVER_BEHAVIOURS",
    "Behaviour",
    "Federation",
    "Recording",
    "ServerBehaviour",
    "simulate",
    "train",
]
