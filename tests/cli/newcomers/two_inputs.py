"""A picture and numbers beside it: handwritten digits, and how much ink there is in each quarter."""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

loss = nn.CrossEntropyLoss()


class Net(nn.Module):
    """An image 8 x 8 and four numbers in, ten logits out."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.hidden = nn.Linear(64 + 4, 48)
        self.digit = nn.Linear(48, 10)

    def forward(self, image: Tensor, ink: Tensor) -> Tensor:
        """Return (n, 10) logits."""
        logits: Tensor = self.digit(self.hidden(torch.cat([image.flatten(1), ink], dim=1)).sigmoid())
        return logits


def data() -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Return images (n, 1, 8, 8) in [0, 1] with the ink of their quarters (n, 4), and digits (n,)."""
    digits = load_digits()
    images = torch.tensor(digits.images[:100], dtype=torch.float32)[:, None] / 16
    ink = nn.functional.avg_pool2d(images, 4).flatten(1)
    return (images, ink), torch.tensor(digits.target[:100])
