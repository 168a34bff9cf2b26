"""Recording real federations: what travels, and local training as it is seen from outside."""

from fedaudit.capture.answers import AppModel
from fedaudit.capture.canaries import CanaryClients, CanaryTexts
from fedaudit.capture.capture import Capture
from fedaudit.capture.estimators import Estimator, module_of
from fedaudit.capture.recorder import Recorder

__all__ = ["AppModel", "CanaryClients", "CanaryTexts", "Capture", "Estimator", "Recorder", "module_of"]
