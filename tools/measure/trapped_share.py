"""How many images trap weights (Boenisch et al. 2023) yield from one gradient over CIFAR-10 images.

    python -m tools.measure.trapped_share DATA

prints, of each number of examples and scale, the images of which a copy of at least 40 dB came out of a network of two
fully connected layers with 1,000 neurons, and how many there are where the server is honest.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

from fedaudit.attacks import ImageFinding, make_attack
from fedaudit.pipeline.prepare import resolve
from fedaudit.scenario.scenario import scenario_from
from fedaudit.simulation.simulator import simulate
from fedaudit.transcript.observation import observe
from fedaudit.utils.errors import NotApplicable

RECOVERED = 40.0  # dB
NEURONS = 1000


def measure(data: Path, examples: int, server: dict[str, Any] | None, seed: int) -> int:
    """Return how many of the images came out."""
    spec: dict[str, Any] = {"name": "f", "clients": 1, "examples": examples, "batch_size": examples}
    made = scenario_from(
        {
            "seed": seed,
            "data": {"name": "cifar10", "split": "test", "limit": 1000},
            "model": {"name": "mlp", "width": NEURONS},
            "federations": [spec | ({} if server is None else {"server": server})],
            "threat": {"adversary": "server" if server is None else "malicious-server"},
            "attacks": ["trap-weights"],
        }
    )
    (federation,) = resolve(made, data_dir=data).federations
    recording = simulate(federation)
    (seen,) = observe(recording.transcript, made.threat).split()
    try:
        found = make_attack("trap-weights")(seen, generator=torch.Generator().manual_seed(seed))
    except NotApplicable:
        return 0
    (true,) = recording.truth.inputs.values()
    assert isinstance(found, ImageFinding)
    errors = torch.cdist(true.flatten(1).double(), found.images.flatten(1).double()).square() / true[0].numel()
    return int((-10 * errors.min(dim=1).values.clamp(min=1e-10).log10() >= RECOVERED).sum())


def main() -> None:
    """Print a line a case: the images that came out, of two draws."""
    data = Path(sys.argv[1])
    for examples in (20, 100):
        cases: list[tuple[str, dict[str, Any] | None]] = [("an honest server", None)]
        cases += [(f"scale {s}", {"name": "trap-weights", "scale": s}) for s in (0.93, 0.95, 0.97)]
        for name, server in cases:
            out = [measure(data, examples, server, seed) for seed in range(2)]
            print(f"{examples} examples, {name}: {out[0]} and {out[1]} came out", flush=True)


if __name__ == "__main__":
    main()
