"""Weight, waist and pulse of twenty men by what they do in a fitness club (Tenenhaus 1998): three numbers at once."""

from __future__ import annotations

import torch
from sklearn.datasets import load_linnerud
from torch import Tensor, nn

loss = nn.MSELoss()


class Net(nn.Module):
    """Chin-ups, sit-ups and jumps in, three numbers out."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 3))

    def forward(self, x: Tensor) -> Tensor:
        """Return (n, 3) estimates, standardised."""
        estimates: Tensor = self.layers(x)
        return estimates


def data() -> tuple[Tensor, Tensor]:
    """Return what they did (20, 3), and their three measures (20, 3)."""
    known = load_linnerud()
    return torch.tensor(known.data, dtype=torch.float32), torch.tensor(known.target, dtype=torch.float32)
