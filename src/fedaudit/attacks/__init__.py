"""Attacks: an observation in, a finding out; nothing here knows the ground truth."""

# isort: off
# They fill the registry, in the order in which attacks are listed, and run where a scenario names none.
from fedaudit.attacks.active import imprint, fishing, loki, trap_weights  # noqa: F401
from fedaudit.attacks.analytic import exact_linear, spear, cocktail, r_gap  # noqa: F401
from fedaudit.attacks.inversion import methods, epochs, generative, group, tableak  # noqa: F401
from fedaudit.attacks.text import dager, which_tokens  # noqa: F401
from fedaudit.attacks.labels import attack as _labels  # noqa: F401
from fedaudit.attacks.local_model import methods as _local_model  # noqa: F401
from fedaudit.attacks.gan import ClassImagesFinding
from fedaudit.attacks.records import agrevader, membership  # noqa: F401
from fedaudit.attacks.records.attribute import AttributeFinding
from fedaudit.attacks.records.source import SourceFinding
from fedaudit.attacks.records.property import PropertyFinding
from fedaudit.attacks.epsilon import EpsilonFinding
from fedaudit.attacks.vertical import cafe  # noqa: F401
from fedaudit.attacks.vertical.labels import ExampleLabelFinding, LabelScoreFinding

# isort: on
from fedaudit.attacks.base import ATTACKS, Attack, make_attack, register
from fedaudit.attacks.findings import (
    Finding,
    ImageFinding,
    LocalModelFinding,
    RowFinding,
    SequenceFinding,
    TokenFinding,
    Trace,
)
from fedaudit.attacks.records.membership_finding import MembershipFinding

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
