"""How many batches SPEAR gets exactly, and in what time: a hidden layer's width and a batch's size are given.

    python -m tests.spear_batches DATA [NAME [WIDTH [BATCH [NETWORKS]]]]

plays ten batches of different test images against each of NETWORKS untrained networks with one hidden layer, and prints
a line a network and the sum: batches of which every image has a mean squared error below 1e-10, images certified, and
wrongly certified (off by more than half a grey level), CPU seconds of a batch.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
from torch import Tensor

from fedaudit.attacks import ImageFinding, make_attack
from fedaudit.federation.simulator import simulate
from fedaudit.pipeline.prepare import resolve
from fedaudit.scenario import scenario_from
from fedaudit.threat import observe

ROUNDS = 10
EXACT, WRONG = 1e-10, (0.5 / 255) ** 2


def measure(data: Path, name: str, width: int, batch: int, seed: int) -> tuple[Tensor, Tensor, Tensor, list[float]]:
    """Return (batches, images) mean squared errors, which are certified, which wrongly, and batches' CPU seconds."""
    made = scenario_from(
        {
            "seed": seed,
            "data": {"name": name, "split": "test", "limit": 5000},
            "model": {"name": "mlp", "width": width, "initialisation": "default"},
            "federations": [
                {
                    "name": "f",
                    "algorithm": "fedsgd",
                    "clients": 1,
                    "batch_size": batch,
                    "rounds": ROUNDS,
                    "learning_rate": 1e-6,
                }
            ],
            "attacks": ["spear"],
        }
    )
    (played,) = resolve(made, data_dir=data).federations
    recording = simulate(played)
    errors, certified, wrong, seconds = [], [], [], []
    for seen in observe(recording.transcript, made.threat).split():
        began = time.process_time()
        found = make_attack("spear")(seen, generator=torch.Generator().manual_seed(seed))
        seconds.append(time.process_time() - began)
        assert isinstance(found, ImageFinding)
        assert found.certified is not None
        true = recording.truth.inputs[seen.single().round, 0].flatten(1).double()
        rebuilt = found.images.flatten(1).double()
        distances = torch.cdist(rebuilt, true).square() / true.shape[1]
        errors.append(distances.min(dim=0).values)
        certified.append(found.certified)
        wrong.append(found.certified & (distances.min(dim=1).values > WRONG))
    return torch.stack(errors), torch.stack(certified), torch.stack(wrong), seconds


def told(errors: Tensor, certified: Tensor, wrong: Tensor, seconds: list[float]) -> str:
    """Return a line on some batches."""
    exact = int((errors < EXACT).all(dim=1).sum())
    spent = torch.tensor(seconds)
    return (
        f"{exact} of {len(errors)} batches exact; {int(certified.sum())} of {certified.numel()} images certified, "
        f"{int(wrong.sum())} wrongly; CPU seconds: median {float(spent.median()):.1f}, "
        f"most {float(spent.max()):.1f}"
    )


def main() -> None:
    """Print a line a network, and one of all."""
    given = sys.argv[2:]
    name, width, batch, networks = [*given, *("cifar10", "200", "20", "10")[len(given) :]]
    torch.set_num_threads(1)
    parts = []
    for seed in range(int(networks)):
        parts.append(measure(Path(sys.argv[1]), name, int(width), int(batch), seed))
        print(f"{name}, width {width}, batch {batch}, network {seed}: {told(*parts[-1])}", flush=True)
    errors, certified, wrong, seconds = zip(*parts, strict=True)
    print(
        f"all: {told(torch.cat(errors), torch.cat(certified), torch.cat(wrong), [one for s in seconds for one in s])}"
    )


if __name__ == "__main__":
    main()
