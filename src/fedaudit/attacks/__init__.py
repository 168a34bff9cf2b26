"""Attacks: an observation in, a finding out; nothing here knows the ground truth."""

from typing import TYPE_CHECKING

# isort: off
# They fill the registry, in the order in which attacks are listed, and run where a scenario names none.
from fedaudit.attacks.active.imprint import Imprint
from fedaudit.attacks.active.fishing import Fishing
from fedaudit.attacks.active.loki import Loki
from fedaudit.attacks.active.trap_weights import TrapWeights
from fedaudit.attacks.analytic.exact_linear import ExactLinear, ExactLinearRows
from fedaudit.attacks.analytic.spear import Spear, SpearRows
from fedaudit.attacks.analytic.cocktail import Cocktail
from fedaudit.attacks.analytic.sratta import Sratta
from fedaudit.attacks.inversion.methods import AGIC, AGICPlus, InvG
from fedaudit.attacks.inversion.learned import LearnedInversion
from fedaudit.attacks.inversion.averaged import Averaged
from fedaudit.attacks.inversion.tableak import TabLeak
from fedaudit.attacks.text.decepticons import Decepticons
from fedaudit.attacks.text.dager import Dager
from fedaudit.attacks.text.somp import Somp
from fedaudit.attacks.text.lamp import Lamp
from fedaudit.attacks.text.token_presence import TokenPresence
from fedaudit.attacks.text.extraction import Extraction, ExtractionFinding
from fedaudit.attacks.labels.attack import AveragedLabels, LabelFinding, Labels, LabelSetFinding
from fedaudit.attacks.local_model.methods import LastUpdate, LocalModel, LocalModelExact
from fedaudit.attacks.records.likelihood import RMIA, LiRA
from fedaudit.attacks.records.membership import GradientNorm, LossThreshold
from fedaudit.attacks.records.rounds import FedMIA, LossSeries
from fedaudit.attacks.text.members import MinK, ReferenceLoss, ZlibRatio
from fedaudit.attacks.records.shadows import ShadowFinding, ShadowModels
from fedaudit.attacks.records.projection_residual import ProjectionResidual
from fedaudit.attacks.records.stacked import Stacked
from fedaudit.attacks.records.ranges import RangeMembership
from fedaudit.attacks.records.attribute import AttributeFeatures, AttributeFinding, AttributeLoss
from fedaudit.attacks.records.source import SourceFinding, SourceInference
from fedaudit.attacks.records.outputs import SourceOutputs
from fedaudit.attacks.records.property import PropertyFinding, PropertyInference
from fedaudit.attacks.dp_canaries import DPCanaries, EpsilonFinding
from fedaudit.attacks.vertical.cafe import CAFE
from fedaudit.attacks.vertical.labels import (
    DirectionScoring,
    DirectLabels,
    ExampleLabelFinding,
    LabelScoreFinding,
    NormScoring,
)
from fedaudit.attacks.vertical.completion import ModelCompletion
from fedaudit.attacks.vertical.unsplit import UnSplit
from fedaudit.attacks.active.fsha import FSHA

# isort: on
from fedaudit.attacks.analytic.first_layer import ClosedForm
from fedaudit.attacks.base import ATTACKS, SEARCHED, Attack, Case, Progress, make_attack, register
from fedaudit.attacks.findings import (
    Finding,
    ImageFinding,
    LocalModelFinding,
    RowFinding,
    SequenceFinding,
    TokenFinding,
    Trace,
)
from fedaudit.attacks.inversion.template import GradientInversion
from fedaudit.attacks.local_training import Way
from fedaudit.attacks.records.target import MembershipFinding, upper_half, whole
from fedaudit.attacks.standards import ALTERED_MODELS
from fedaudit.attacks.victim import as_trained, need_signal, need_training, one_batch_gradient
from fedaudit.transcript.observation import Message, Observation
from fedaudit.utils.distributions import moved
from fedaudit.utils.errors import NotApplicable

if not TYPE_CHECKING:
    __getattr__ = moved(__name__)

__all__ = [
    "AGIC",
    "ALTERED_MODELS",
    "ATTACKS",
    "CAFE",
    "FSHA",
    "RMIA",
    "SEARCHED",
    "AGICPlus",
    "Attack",
    "AttributeFeatures",
    "AttributeFinding",
    "AttributeLoss",
    "Averaged",
    "AveragedLabels",
    "Case",
    "ClosedForm",
    "Cocktail",
    "DPCanaries",
    "Dager",
    "Decepticons",
    "DirectLabels",
    "DirectionScoring",
    "EpsilonFinding",
    "ExactLinear",
    "ExactLinearRows",
    "ExampleLabelFinding",
    "Extraction",
    "ExtractionFinding",
    "FedMIA",
    "Finding",
    "Fishing",
    "GradientInversion",
    "GradientNorm",
    "ImageFinding",
    "Imprint",
    "InvG",
    "LabelFinding",
    "LabelScoreFinding",
    "LabelSetFinding",
    "Labels",
    "Lamp",
    "LastUpdate",
    "LearnedInversion",
    "LiRA",
    "LocalModel",
    "LocalModelExact",
    "LocalModelFinding",
    "Loki",
    "LossSeries",
    "LossThreshold",
    "MembershipFinding",
    "Message",
    "MinK",
    "ModelCompletion",
    "NormScoring",
    "NotApplicable",
    "Observation",
    "Progress",
    "ProjectionResidual",
    "PropertyFinding",
    "PropertyInference",
    "RangeMembership",
    "ReferenceLoss",
    "RowFinding",
    "SequenceFinding",
    "ShadowFinding",
    "ShadowModels",
    "Somp",
    "SourceFinding",
    "SourceInference",
    "SourceOutputs",
    "Spear",
    "SpearRows",
    "Sratta",
    "Stacked",
    "TabLeak",
    "TokenFinding",
    "TokenPresence",
    "Trace",
    "TrapWeights",
    "UnSplit",
    "Way",
    "ZlibRatio",
    "as_trained",
    "make_attack",
    "need_signal",
    "need_training",
    "one_batch_gradient",
    "register",
    "upper_half",
    "whole",
]
