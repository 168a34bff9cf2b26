"""Rhythms of ECGs once more, by an LSTM that reads one sample after another."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import fedaudit

loss = nn.CrossEntropyLoss()
kind = "signal"


class Net(nn.Module):
    """Twelve leads of 32 samples in, five logits out."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.lstm = nn.LSTM(12, 32, batch_first=True)
        self.rhythm = nn.Linear(32, 5)

    def forward(self, x: Tensor) -> Tensor:
        """Return (n, 5) logits."""
        _, (last, _) = self.lstm(x.transpose(1, 2))
        logits: Tensor = self.rhythm(last[0])
        return logits


def data() -> tuple[Tensor, Tensor]:
    """Return ECGs (n, 12, 32), every fourth sample of two seconds, and their rhythms (n,)."""
    split = fedaudit.load_dataset("ecg-synthetic", limit=60).train
    return split.inputs[:, :, :128:4], split.targets
