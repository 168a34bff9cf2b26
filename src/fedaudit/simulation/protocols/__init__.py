"""The protocols: horizontal federations, vertical ones and split learning, boosted trees; objects that are asked."""

from fedaudit.simulation.protocols.base import PROTOCOLS, Protocol, SimulationOptions, protocol_by, protocol_of
from fedaudit.simulation.protocols.horizontal import Horizontal
from fedaudit.simulation.protocols.trees import Trees
from fedaudit.simulation.protocols.vertical import Vertical

__all__ = [
    "PROTOCOLS",
    "Horizontal",
    "Protocol",
    "SimulationOptions",
    "Trees",
    "Vertical",
    "protocol_by",
    "protocol_of",
]
