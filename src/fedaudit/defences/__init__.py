"""Defences: aggregators on the server's side, sanitisers on the client's."""

# they fill the registries
from fedaudit.defences import averaging, compressing, coordinatewise, fragmenting, privacy, selection  # noqa: F401
from fedaudit.defences.aggregation import AGGREGATORS, Aggregate, Aggregator, Cohort
from fedaudit.defences.sanitising import SANITISERS, ClientContext, Sanitiser
from fedaudit.utils.registry import register

__all__ = [
    "AGGREGATORS",
    "SANITISERS",
    "Aggregate",
    "Aggregator",
    "ClientContext",
    "Cohort",
    "Sanitiser",
    "register",
]
