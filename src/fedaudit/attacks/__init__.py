"""Attacks: an observation in, a finding out; nothing here knows the ground truth."""

# isort: off
# They fill the registry, in the order in which attacks are listed, and run where a scenario names none.
from fedaudit.attacks.active.imprint import Imprint
from fedaudit.attacks.active.fishing import Fishing
from fedaudit.attacks.active.loki import Loki
from fedaudit.attacks.active.trap_weights import TrapWeights
from fedaudit.attacks.active.peftleak import PeftLeak
from fedaudit.attacks.active.seer import Seer
from fedaudit.attacks.active import geminio as _geminio  # noqa: F401  (it has no attack of its own)
from fedaudit.attacks.analytic.exact_linear import ExactLinear, ExactLinearRows
from fedaudit.attacks.analytic.spear import Spear, SpearRows
from fedaudit.attacks.analytic.cocktail import Cocktail
from fedaudit.attacks.analytic.sratta import Sratta
from fedaudit.attacks.analytic.r_gap import RGap
from fedaudit.attacks.inversion.methods import AGIC, CPL, DLG, IDLG, AGICPlus, DLGAdam, Geng, InvG
from fedaudit.attacks.inversion.epochs import AGICEpochs, DLGAdamEpochs, Epochs, InvGEpochs
from fedaudit.attacks.inversion.averaged import Averaged
from fedaudit.attacks.inversion.generative import GIAS
from fedaudit.attacks.inversion.group import GradInversion
from fedaudit.attacks.inversion.tableak import TabLeak
from fedaudit.attacks.text.decepticons import Decepticons
from fedaudit.attacks.text.dager import Dager
from fedaudit.attacks.text.which_tokens import WhichTokens
from fedaudit.attacks.labels.attack import AveragedLabels, LabelFinding, Labels, LabelSetFinding
from fedaudit.attacks.local_model.methods import LastReturned, LocalModel, LocalModelExact
from fedaudit.attacks.gan import GAN, ClassImagesFinding
from fedaudit.attacks.records.agrevader import AgrEvader
from fedaudit.attacks.records.likelihood import RMIA, LiRA
from fedaudit.attacks.records.membership import GradientNorm, LossThreshold
from fedaudit.attacks.records.rounds import FedMIA, LossSeries
from fedaudit.attacks.records.shadows import ShadowFinding, ShadowModels
from fedaudit.attacks.records.span import SpanMembership
from fedaudit.attacks.records.stacked import Stacked
from fedaudit.attacks.records.attribute import AttributeFeatures, AttributeFinding, AttributeLoss
from fedaudit.attacks.records.source import SourceFinding, SourceInference
from fedaudit.attacks.records.property import PropertyFinding, PropertyInference
from fedaudit.attacks.epsilon import Epsilon, EpsilonFinding
from fedaudit.attacks.timberstrike import TimberStrike
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
from fedaudit.attacks.inversion.template import GradientInversion
from fedaudit.attacks.records.target import MembershipFinding
from fedaudit.transcript.observation import Observation
from fedaudit.utils.errors import NotApplicable

__all__ = [
    "AGIC",
    "ATTACKS",
    "CAFE",
    "CPL",
    "DLG",
    "FSHA",
    "GAN",
    "GIAS",
    "IDLG",
    "RMIA",
    "AGICEpochs",
    "AGICPlus",
    "AgrEvader",
    "Attack",
    "AttributeFeatures",
    "AttributeFinding",
    "AttributeLoss",
    "Averaged",
    "AveragedLabels",
    "ClassImagesFinding",
    "Cocktail",
    "DLGAdam",
    "DLGAdamEpochs",
    "Dager",
    "Decepticons",
    "DirectLabels",
    "DirectionScoring",
    "Epochs",
    "Epsilon",
    "EpsilonFinding",
    "ExactLinear",
    "ExactLinearRows",
    "ExampleLabelFinding",
    "FedMIA",
    "Finding",
    "Fishing",
    "Geng",
    "GradInversion",
    "GradientInversion",
    "GradientNorm",
    "ImageFinding",
    "Imprint",
    "InvG",
    "InvGEpochs",
    "LabelFinding",
    "LabelScoreFinding",
    "LabelSetFinding",
    "Labels",
    "LastReturned",
    "LiRA",
    "LocalModel",
    "LocalModelExact",
    "LocalModelFinding",
    "Loki",
    "LossSeries",
    "LossThreshold",
    "MembershipFinding",
    "ModelCompletion",
    "NormScoring",
    "NotApplicable",
    "Observation",
    "PeftLeak",
    "PropertyFinding",
    "PropertyInference",
    "RGap",
    "RowFinding",
    "Seer",
    "SequenceFinding",
    "ShadowFinding",
    "ShadowModels",
    "SourceFinding",
    "SourceInference",
    "SpanMembership",
    "Spear",
    "SpearRows",
    "Sratta",
    "Stacked",
    "TabLeak",
    "TimberStrike",
    "TokenFinding",
    "Trace",
    "TrapWeights",
    "UnSplit",
    "WhichTokens",
    "make_attack",
    "register",
]
