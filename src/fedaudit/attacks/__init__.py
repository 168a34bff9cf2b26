"""Attacks: an observation in, a finding out; nothing here knows the ground truth."""

from fedaudit.attacks import label_inference  # noqa: F401  (they all fill the registry)
from fedaudit.attacks.attribute import AttributeFinding
from fedaudit.attacks.base import ATTACKS, Attack, make_attack, register
from fedaudit.attacks.distribution import ClassImagesFinding
from fedaudit.attacks.findings import Finding, ImageFinding, LocalModelFinding, Trace
from fedaudit.attacks.inversion import epochs, generative, group, methods, recursive  # noqa: F401
from fedaudit.attacks.local_model import methods as _local_model  # noqa: F401
from fedaudit.attacks.membership import agrevader, passive  # noqa: F401
from fedaudit.attacks.membership.finding import MembershipFinding

__all__ = [
    "ATTACKS",
    "Attack",
    "AttributeFinding",
    "ClassImagesFinding",
    "Finding",
    "ImageFinding",
    "LocalModelFinding",
    "MembershipFinding",
    "Trace",
    "make_attack",
    "register",
]
