"""Attacks: an observation in, a finding out; nothing here knows the ground truth."""

# they all fill the registry
from fedaudit.attacks.analytic import r_gap  # noqa: F401
from fedaudit.attacks.base import ATTACKS, Attack, make_attack, register
from fedaudit.attacks.findings import Finding, ImageFinding, LocalModelFinding, Trace
from fedaudit.attacks.gan import ClassImagesFinding
from fedaudit.attacks.inversion import epochs, generative, group, methods  # noqa: F401
from fedaudit.attacks.labels import attack as _labels  # noqa: F401
from fedaudit.attacks.local_model import methods as _local_model  # noqa: F401
from fedaudit.attacks.records import agrevader, membership  # noqa: F401
from fedaudit.attacks.records.attribute import AttributeFinding
from fedaudit.attacks.records.membership_finding import MembershipFinding

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
