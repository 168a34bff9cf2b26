"""What three clinics learn together: handwritten digits, by a small network with dropout. Plain PyTorch."""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

MEAN, STD = 0.305, 0.376  # of the pixels
CLIENTS = ("north", "south", "west")
EXAMPLES = 40  # that each of them holds


class Net(nn.Module):
    """8x8 grey images in, one logit a class out."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.ReLU()
        )
        self.dropout = nn.Dropout(0.2)
        self.head = nn.Linear(32 * 16, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Return (n, 10) logits of (n, 1, 8, 8) images."""
        logits: Tensor = self.head(self.dropout(self.features(x).flatten(1)))
        return logits


def load(name: str) -> tuple[Tensor, Tensor]:
    """Return a client's images, normalised, and labels; of any other name those for testing."""
    digits = load_digits()
    first = EXAMPLES * (CLIENTS.index(name) if name in CLIENTS else len(CLIENTS))
    rows = slice(first, first + EXAMPLES if name in CLIENTS else None)
    images = torch.tensor(digits.images[rows], dtype=torch.float32).unsqueeze(1) / 16
    return (images - MEAN) / STD, torch.tensor(digits.target[rows])


def train(model: nn.Module, images: Tensor, labels: Tensor) -> None:
    """Train in place: AdamW, two epochs in batches of 8, gradients clipped, a rate that falls."""
    model.train()
    optimiser = torch.optim.AdamW(model.parameters(), lr=5e-3, weight_decay=0.01)
    steps = 2 * len(images) // 8
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps)
    for _ in range(2):
        for rows in torch.randperm(len(images)).split(8):
            optimiser.zero_grad()
            loss = F.cross_entropy(model(images[rows]), labels[rows], label_smoothing=0.05)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimiser.step()
            schedule.step()


def accuracy(model: nn.Module) -> float:
    """Return how much of the test images the model gets right."""
    images, labels = load("test")
    model.eval()
    with torch.no_grad():
        return float((model(images).argmax(1) == labels).float().mean())
