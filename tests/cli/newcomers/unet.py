"""Tissues on slices of heads: a small U-Net."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import fedaudit

loss = nn.CrossEntropyLoss()


class Net(nn.Module):
    """Slices 32 x 32 in, seven logits a pixel out."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.down = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.SiLU())
        self.bottom = nn.Sequential(nn.Conv2d(8, 16, 3, stride=2, padding=1), nn.SiLU())
        self.up = nn.ConvTranspose2d(16, 8, 2, stride=2)
        self.tissues = nn.Conv2d(16, 7, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return (n, 7, 32, 32) logits."""
        fine = self.down(x)
        logits: Tensor = self.tissues(torch.cat([fine, self.up(self.bottom(fine))], dim=1))
        return logits


def data() -> tuple[Tensor, Tensor]:
    """Return slices (n, 1, 32, 32) in [0, 1], and each pixel's tissue (n, 32, 32)."""
    split = fedaudit.load_dataset("head-tissues", limit=40).train
    return split.inputs[:, :, 8], split.targets[:, 8]
