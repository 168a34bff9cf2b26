"""Defences: aggregators on the server's side, client-side defences on the client's."""

from typing import TYPE_CHECKING

from fedaudit.defences.aggregation import AGGREGATORS, Aggregate, Aggregator, Cohort
from fedaudit.defences.ats import ATS
from fedaudit.defences.averaging import AFA, FedAvg, FLTrust, Mean
from fedaudit.defences.censor import Censor
from fedaudit.defences.client_defences import (
    CLIENT_DEFENCES,
    ClientContext,
    ClientDefence,
    NoClientDefence,
    OwnExamples,
    changed,
)
from fedaudit.defences.clipping import AdaptiveClipping, FixedClipping
from fedaudit.defences.compressing import DeepGradientCompression, Fragmented, FragmentedAtRandom, Sign, TopK
from fedaudit.defences.filters import ExcludeVars, LocalDp, PercentilePrivacy, SVTPrivacy
from fedaudit.defences.perturbing import GradientClipping, GradientNoise, Outpost
from fedaudit.defences.privacy import DifferentialPrivacy
from fedaudit.defences.pruning import DualGradientPruning
from fedaudit.defences.selection import Bulyan, InferGuard, Krum, Median, MultiKrum, TrimmedMean
from fedaudit.defences.soteria import Soteria
from fedaudit.transcript.update import ClientDefenceInfo, Update
from fedaudit.utils.distributions import moved
from fedaudit.utils.registry import register

if not TYPE_CHECKING:
    __getattr__ = moved(__name__)

__all__ = [
    "AFA",
    "AGGREGATORS",
    "ATS",
    "CLIENT_DEFENCES",
    "AdaptiveClipping",
    "Aggregate",
    "Aggregator",
    "Bulyan",
    "Censor",
    "ClientContext",
    "ClientDefence",
    "ClientDefenceInfo",
    "Cohort",
    "DeepGradientCompression",
    "DifferentialPrivacy",
    "DualGradientPruning",
    "ExcludeVars",
    "FLTrust",
    "FedAvg",
    "FixedClipping",
    "Fragmented",
    "FragmentedAtRandom",
    "GradientClipping",
    "GradientNoise",
    "InferGuard",
    "Krum",
    "LocalDp",
    "Mean",
    "Median",
    "MultiKrum",
    "NoClientDefence",
    "Outpost",
    "OwnExamples",
    "PercentilePrivacy",
    "SVTPrivacy",
    "Sign",
    "Soteria",
    "TopK",
    "TrimmedMean",
    "Update",
    "changed",
    "register",
]
