"""Attacks: an observation in, a finding out; nothing here knows the ground truth."""

from fedaudit.attacks import label_inference  # noqa: F401  (it fills the registry)
from fedaudit.attacks.base import ATTACKS, Attack, make_attack, register
from fedaudit.attacks.findings import Finding, ImageFinding, Trace
from fedaudit.attacks.inversion import epochs, group, methods, recursive  # noqa: F401  (they fill the registry)

__all__ = ["ATTACKS", "Attack", "Finding", "ImageFinding", "Trace", "make_attack", "register"]
