"""Defences: aggregators on the server's side, sanitisers on the client's."""

from fedaudit.defences.aggregation import AGGREGATORS, Aggregate, Aggregator, Cohort
from fedaudit.defences.averaging import AFA, FedAvg, FLTrust, Mean
from fedaudit.defences.clipping import AdaptiveClipping, FixedClipping
from fedaudit.defences.compressing import DeepGradientCompression, Fragmented, FragmentedAtRandom, Sign, TopK
from fedaudit.defences.filters import ExcludeVars, LocalDp, PercentilePrivacy, SVTPrivacy
from fedaudit.defences.privacy import DifferentialPrivacy
from fedaudit.defences.sanitising import SANITISERS, ClientContext, NoSanitiser, Sanitiser, changed
from fedaudit.defences.selection import Bulyan, InferGuard, Krum, Median, MultiKrum, TrimmedMean
from fedaudit.transcript.update import SanitiserInfo, Update
from fedaudit.utils.registry import register

__all__ = [
    "AFA",
    "AGGREGATORS",
    "SANITISERS",
    "AdaptiveClipping",
    "Aggregate",
    "Aggregator",
    "Bulyan",
    "ClientContext",
    "Cohort",
    "DeepGradientCompression",
    "DifferentialPrivacy",
    "ExcludeVars",
    "FLTrust",
    "FedAvg",
    "FixedClipping",
    "Fragmented",
    "FragmentedAtRandom",
    "InferGuard",
    "Krum",
    "LocalDp",
    "Mean",
    "Median",
    "MultiKrum",
    "NoSanitiser",
    "PercentilePrivacy",
    "SVTPrivacy",
    "Sanitiser",
    "SanitiserInfo",
    "Sign",
    "TopK",
    "TrimmedMean",
    "Update",
    "changed",
    "register",
]
