"""The protocols, objects that are asked: horizontal, vertical and split learning; other packages add theirs."""

from fedaudit.simulation.protocols import horizontal, vertical  # noqa: F401 (they add themselves)
from fedaudit.simulation.protocols.base import (
    PROTOCOLS,
    AsScenario,
    Change,
    EasyCase,
    MessageRecorder,
    Protocol,
    SimulationOptions,
    WrongApp,
    protocol_by,
    protocol_of,
    register,
)

__all__ = [
    "PROTOCOLS",
    "AsScenario",
    "Change",
    "EasyCase",
    "MessageRecorder",
    "Protocol",
    "SimulationOptions",
    "WrongApp",
    "protocol_by",
    "protocol_of",
    "register",
]
