"""Recording real federations: what travels, and local training as it is seen from outside."""

from fedaudit.recording.canaries import CanaryClients
from fedaudit.recording.recorder import Recorder

__all__ = ["CanaryClients", "Recorder"]
