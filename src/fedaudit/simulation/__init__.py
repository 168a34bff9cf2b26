"""The federation: clients, server, the simulator, and the transcript of what travelled."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedaudit.utils.lazy import lazy

if TYPE_CHECKING:
    from fedaudit.simulation.behaviour import BEHAVIOURS, Behaviour, ClientStep
    from fedaudit.simulation.checkpoint import Checkpoint
    from fedaudit.simulation.client import Federation
    from fedaudit.simulation.history import History
    from fedaudit.simulation.local_training import FAILURES, local_randomness, train, trainable
    from fedaudit.simulation.server_behaviour import SERVER_BEHAVIOURS, SERVER_LOG, ServerBehaviour, ServerStep
    from fedaudit.simulation.simulator import Recording, simulate
else:
    __getattr__, __dir__ = lazy(__name__)

__all__ = [
    "BEHAVIOURS",
    "FAILURES",
    "SERVER_BEHAVIOURS",
    "SERVER_LOG",
    "Behaviour",
    "Checkpoint",
    "ClientStep",
    "Federation",
    "History",
    "Recording",
    "ServerBehaviour",
    "ServerStep",
    "local_randomness",
    "simulate",
    "train",
    "trainable",
]
