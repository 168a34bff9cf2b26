"""Rhythms of ECGs: convolutions of one axis."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import fedaudit

loss = nn.CrossEntropyLoss()
kind = "signal"


class Net(nn.Module):
    """Twelve leads of 128 samples in, five logits out."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.features = nn.Sequential(nn.Conv1d(12, 24, 5, stride=2, padding=2), nn.Sigmoid(), nn.Flatten())
        self.rhythm = nn.Linear(24 * 64, 5)

    def forward(self, x: Tensor) -> Tensor:
        """Return (n, 5) logits."""
        logits: Tensor = self.rhythm(self.features(x))
        return logits


def data() -> tuple[Tensor, Tensor]:
    """Return ECGs (n, 12, 128) in millivolts, two seconds of each, and their rhythms (n,)."""
    split = fedaudit.load_dataset("ecg-synthetic", limit=60).train
    return split.inputs[:, :, :128], split.targets
