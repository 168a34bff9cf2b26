"""Attacks, and behaviours of malicious clients and servers: an observation in, a finding out."""

# They add themselves, in the order in which they are listed.
from fedaudit_catalogue.attacks.classics import CPL, DLG, IDLG, DLGAdam, Geng
from fedaudit_catalogue.attacks.epochs import AGICEpochs, DLGAdamEpochs, Epochs, InvGEpochs
from fedaudit_catalogue.attacks.geminio import GeminioServer
from fedaudit_catalogue.attacks.generative import GIAS
from fedaudit_catalogue.attacks.gradinversion import GradInversion
from fedaudit_catalogue.attacks.peftleak import PeftLeak
from fedaudit_catalogue.attacks.r_gap import RGap
from fedaudit_catalogue.attacks.seer import Seer

from fedaudit_catalogue.attacks.agrevader import AgrEvader  # isort: skip
from fedaudit_catalogue.attacks.gan import GAN, ClassImagesFinding  # isort: skip

__all__ = [
    "CPL",
    "DLG",
    "GAN",
    "GIAS",
    "IDLG",
    "AGICEpochs",
    "AgrEvader",
    "ClassImagesFinding",
    "DLGAdam",
    "DLGAdamEpochs",
    "Epochs",
    "GeminioServer",
    "Geng",
    "GradInversion",
    "InvGEpochs",
    "PeftLeak",
    "RGap",
    "Seer",
]
