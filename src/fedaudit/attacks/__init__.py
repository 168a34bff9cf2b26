"""Attacks: an observation in, a finding out; nothing here knows the ground truth."""

# they all fill the registry
from fedaudit.attacks.active import fishing, imprint, loki, trap_weights  # noqa: F401
from fedaudit.attacks.analytic import cocktail, exact_linear, r_gap, spear  # noqa: F401
from fedaudit.attacks.base import ATTACKS, Attack, make_attack, register
from fedaudit.attacks.epsilon import EpsilonFinding
from fedaudit.attacks.findings import (
    Finding,
    ImageFinding,
    LocalModelFinding,
    RowFinding,
    SequenceFinding,
    TokenFinding,
    Trace,
)
from fedaudit.attacks.gan import ClassImagesFinding
from fedaudit.attacks.inversion import epochs, generative, group, methods, tableak  # noqa: F401
from fedaudit.attacks.labels import attack as _labels  # noqa: F401
from fedaudit.attacks.local_model import methods as _local_model  # noqa: F401
from fedaudit.attacks.records import agrevader, membership  # noqa: F401
from fedaudit.attacks.records.attribute import AttributeFinding
from fedaudit.attacks.records.membership_finding import MembershipFinding
from fedaudit.attacks.records.property import PropertyFinding
from fedaudit.attacks.records.source import SourceFinding
from fedaudit.attacks.text import dager, which_tokens  # noqa: F401
from fedaudit.attacks.vertical import cafe  # noqa: F401
from fedaudit.attacks.vertical.labels import ExampleLabelFinding, LabelScoreFinding

__all__ = [
    "ATTACKS",
    "Attack",
    "AttributeFinding",
    "ClassImagesFinding",
    "EpsilonFinding",
    "ExampleLabelFinding",
    "Finding",
    "ImageFinding",
    "LabelScoreFinding",
    "LocalModelFinding",
    "MembershipFinding",
    "PropertyFinding",
    "RowFinding",
    "SequenceFinding",
    "SourceFinding",
    "TokenFinding",
    "Trace",
    "make_attack",
    "register",
]
