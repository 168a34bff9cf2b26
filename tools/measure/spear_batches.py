"""How many batches SPEAR gets exactly, and in what time: a hidden layer's width and a batch's size are given.

    python -m tools.measure.spear_batches DATA [NAME [WIDTH [BATCH [NETWORKS [MODEL]]]]]

plays ten batches of different images, or of a table's rows, against each of NETWORKS untrained networks (one hidden
layer: mlp; two: fcn-3), and prints a line a network and the sum: batches of which every example has a mean squared
error below 1e-10, examples certified, and wrongly certified (an error above half a grey level's), CPU seconds of a
batch.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
from torch import Tensor

from fedaudit.attacks import ImageFinding, RowFinding, make_attack
from fedaudit.pipeline.prepare import resolve
from fedaudit.scenario.scenario import scenario_from
from fedaudit.simulation.simulator import simulate
from fedaudit.transcript.observation import observe

ROUNDS = 10
TABLES = ("adult", "breast-cancer", "diabetes")
EXACT, WRONG = 1e-10, (0.5 / 255) ** 2


def measure(
    data: Path, name: str, width: int, batch: int, model: str, seed: int
) -> tuple[Tensor, Tensor, Tensor, list[float]]:
    """Return (batches, examples) mean squared errors, which are certified, which wrongly, and batches' CPU seconds."""
    attack, split = ("spear-rows", "train") if name in TABLES else ("spear", "test")
    made = scenario_from(
        {
            "seed": seed,
            "data": {"name": name, "split": split, "limit": 5000},
            "model": {"name": model, "width": width, "initialisation": "default"},
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
            "attacks": [attack],
        }
    )
    (played,) = resolve(made, data_dir=data).federations
    recording = simulate(played)
    errors, certified, wrong, seconds = [], [], [], []
    for seen in observe(recording.transcript, made.threat).split():
        began = time.process_time()
        found = make_attack(attack)(seen, generator=torch.Generator().manual_seed(seed))
        seconds.append(time.process_time() - began)
        assert isinstance(found, ImageFinding | RowFinding)
        assert found.certified is not None
        true = recording.truth.inputs[seen.single().round, 0].flatten(1).double()
        examples = found.images if isinstance(found, ImageFinding) else found.rows
        rebuilt = examples.flatten(1).double()
        distances = torch.cdist(rebuilt, true).square() / true.shape[1]
        errors.append(distances.min(dim=0).values)
        certified.append(found.certified)
        wrong.append(found.certified & (distances.min(dim=1).values > WRONG))
    return torch.stack(errors), torch.cat(certified), torch.cat(wrong), seconds


def told(errors: Tensor, certified: Tensor, wrong: Tensor, seconds: list[float]) -> str:
    """Return a line on some batches."""
    exact = int((errors < EXACT).all(dim=1).sum())
    spent = torch.tensor(seconds)
    return (
        f"{exact} of {len(errors)} batches exact; {int(certified.sum())} of {errors.numel()} examples certified, "
        f"{int(wrong.sum())} wrongly; CPU seconds: median {float(spent.median()):.1f}, "
        f"most {float(spent.max()):.1f}"
    )


def main() -> None:
    """Print a line a network, and one of all."""
    given = sys.argv[2:]
    name, width, batch, networks, model = [*given, *("cifar10", "200", "20", "10", "mlp")[len(given) :]]
    torch.set_num_threads(1)
    parts = []
    for seed in range(int(networks)):
        parts.append(measure(Path(sys.argv[1]), name, int(width), int(batch), model, seed))
        print(f"{name}, {model}, width {width}, batch {batch}, network {seed}: {told(*parts[-1])}", flush=True)
    errors, certified, wrong, seconds = zip(*parts, strict=True)
    print(
        f"all: {told(torch.cat(errors), torch.cat(certified), torch.cat(wrong), [one for s in seconds for one in s])}"
    )


if __name__ == "__main__":
    main()
