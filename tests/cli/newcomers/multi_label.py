"""Findings on chest X-rays: several at once."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import fedaudit

loss = nn.BCEWithLogitsLoss()


class Net(nn.Module):
    """Grey images 32 x 32 in, one logit a finding out."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.features = nn.Sequential(nn.Conv2d(1, 8, 5, stride=2, padding=2), nn.Sigmoid(), nn.Flatten())
        self.findings = nn.Linear(8 * 16 * 16, 14)

    def forward(self, x: Tensor) -> Tensor:
        """Return (n, 14) logits."""
        logits: Tensor = self.findings(self.features(x))
        return logits


def data() -> tuple[Tensor, Tensor]:
    """Return images (n, 1, 32, 32) in [0, 1], and 0 and 1 of each finding (n, 14)."""
    split = fedaudit.load_dataset("xray-phantoms", image_size=32, limit=40).train
    return split.inputs, split.targets
