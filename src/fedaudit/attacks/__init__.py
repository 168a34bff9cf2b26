"""Attacks: an observation in, a finding out; nothing here knows the ground truth."""

from fedaudit.attacks.base import ATTACKS, Attack, Finding, Trace, make_attack
from fedaudit.attacks.inversion import methods  # noqa: F401  (it fills the registry)

__all__ = ["ATTACKS", "Attack", "Finding", "Trace", "make_attack"]
