"""Audit your own model, loss and data from Python: `python examples/own_model.py --out my-audit` (20 CPU seconds)."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import fedaudit


class TwoLayers(nn.Module):
    """Any module will do: images in, one logit a class out."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 16, 3, padding=1)
        self.fc = nn.Linear(16 * 64, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Return (n, 10) logits of (n, 1, 8, 8) images."""
        return torch.as_tensor(self.fc(torch.relu(self.conv(x)).flatten(1)))


def main() -> None:
    """Run the audit and print what it found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("own-model-audit"))
    parser.add_argument("--iterations", type=int, default=1000)
    options = parser.parse_args()

    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16  # (n, 1, 8, 8) in [0, 1]
    labels = torch.tensor(digits.target)
    torch.manual_seed(0)

    finished = fedaudit.audit(
        model=TwoLayers(),
        data=(images, labels),
        loss=nn.CrossEntropyLoss(),
        federations=[
            {"name": "hospital", "clients": 3, "examples": 3, "batch_size": 1},
            {"name": "slow", "algorithm": "fedavg", "clients": 1, "examples": 4, "local_steps": 2, "batch_size": 2},
        ],
        attacks=[{"name": name, "iterations": options.iterations} for name in ("invg", "agic")],
        out=options.out,
        fail_on="recovered",
    )
    for row in finished.result.summaries:
        print(
            f"{row.federation:10} {row.attack:6} {row.verdict:20} {row.psnr.mean if row.psnr else float('nan'):5.1f} dB"
        )
    for limit in finished.result.thresholds:
        print(f"{limit.outcome}: nothing may be {limit.verdict} or worse")
    print("see", options.out / "report.html")


if __name__ == "__main__":
    main()
