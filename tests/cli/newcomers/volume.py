"""Lesions in heads as of MRI: convolutions of three axes."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import fedaudit

loss = nn.CrossEntropyLoss()


class Net(nn.Module):
    """Scans 8 x 16 x 16 in, two logits out."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.features = nn.Sequential(nn.Conv3d(1, 8, 3, stride=2, padding=1), nn.Sigmoid(), nn.Flatten())
        self.lesion = nn.Linear(8 * 4 * 8 * 8, 2)

    def forward(self, x: Tensor) -> Tensor:
        """Return (n, 2) logits."""
        logits: Tensor = self.lesion(self.features(x))
        return logits


def data() -> tuple[Tensor, Tensor]:
    """Return scans (n, 1, 8, 16, 16) in [0, 1], of half the resolution, and whether there is a lesion (n,)."""
    split = fedaudit.load_dataset("head-phantoms", limit=40).train
    return nn.functional.avg_pool3d(split.inputs, 2), split.targets
