"""A small federated loop, written as a user would, and its recording."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import fedaudit
from fedaudit import Recorder

MEAN, STD = (0.5,), (0.25,)


class Net(nn.Module):
    """A small convolutional network with dropout."""

    def __init__(self, drop: float = 0.0) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(1, 8, 3, stride=2, padding=1), nn.ReLU())
        self.drop = nn.Dropout(drop)
        self.classifier = nn.Linear(8 * 4 * 4, 10)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.classifier(self.drop(self.features(x).flatten(1)))
        return logits


def held(client: int, n: int = 4) -> tuple[Tensor, Tensor]:
    data = fedaudit.load_dataset("digits").train
    rows = slice(client * n, (client + 1) * n)
    mean, std = torch.tensor(MEAN), torch.tensor(STD)
    return (data.inputs[rows] - mean) / std, data.targets[rows]


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def train(
    model: nn.Module,
    data: tuple[Tensor, Tensor],
    optimiser: Callable[[nn.Module], torch.optim.Optimizer] = sgd,
    batch: int = 2,
) -> None:
    """As a user would write it: nothing of it knows of a recorder."""
    model.train()
    chosen = optimiser(model)
    for x, y in zip(*(part.split(batch) for part in data), strict=True):
        chosen.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        chosen.step()


def federation(
    folder: Path,
    *,
    make: Callable[[], nn.Module] = Net,
    optimiser: Callable[[nn.Module], torch.optim.Optimizer] = sgd,
    rounds: int = 2,
    clients: int = 2,
    examples: int = 4,
    **options: Any,
) -> nn.Module:
    """Run a federated loop with a recorder, and return the global model at the end."""
    torch.manual_seed(0)
    model = make()
    with Recorder(folder, name="loop", **options) as recorder:
        for _ in range(rounds):
            start = copy.deepcopy(model.state_dict())
            states = []
            with recorder.round(start):
                for client in range(clients):
                    model.load_state_dict(start)
                    with recorder.capture() as captured:
                        train(model, held(client, examples), optimiser)
                    recorder.update(f"site-{client}", model.state_dict(), captured, num_examples=examples)
                    states.append(copy.deepcopy(model.state_dict()))
            model.load_state_dict({k: torch.stack([s[k] for s in states]).mean(0) for k in start})
    return model


def audited(folder: Path, out: Path | None = None, **options: Any) -> fedaudit.AuditResult:
    finished = fedaudit.audit_transcript(
        folder, [{"name": "invg", "iterations": 20}], out=out, progress=False, **options
    )
    return finished.result
