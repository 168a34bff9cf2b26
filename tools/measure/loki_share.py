"""How many images LOKI's kernels yield from a sum over ten clients with 32 CIFAR-10 images each, and imprint's bins.

    python -m tools.measure.loki_share DATA [MODEL]

prints, of FedSGD and of FedAvg (four local steps of 8), of each server and number of bins, the images of which a copy
of at least 40 dB came out of the sum, their mean PSNR (cut at 100 dB), and the parameters that the server adds; and the
same of ``updates``, which the server reads one by one.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import torch

from fedaudit.attacks import ImageFinding, make_attack
from fedaudit.pipeline.prepare import resolve
from fedaudit.scenario.scenario import scenario_from
from fedaudit.simulation.simulator import simulate
from fedaudit.transcript.observation import observe

CLIENTS, HELD = 10, 32
RECOVERED = 40.0  # dB
FEDERATIONS: dict[str, dict[str, Any]] = {
    "fedsgd": {"algorithm": "fedsgd", "batch_size": HELD},
    "fedavg": {"algorithm": "fedavg", "batch_size": 8, "local_epochs": 1, "learning_rate": 0.05},
}


def measure(
    data: Path, model: str, federation: str, server: dict[str, Any], sees: str, seed: int
) -> tuple[torch.Tensor, int]:
    """Return (images,) each image's PSNR in dB of the nearest that came out, and the parameters that were added."""
    spec = {"name": "f", "clients": CLIENTS, "examples": CLIENTS * HELD, **FEDERATIONS[federation], "server": server}
    made = scenario_from(
        {
            "seed": seed,
            "data": {"name": "cifar10", "split": "test", "limit": 2000},
            "model": {"name": model},
            "federations": [spec],
            "threat": {"adversary": "malicious-server", "sees": sees},
            "attacks": [server["name"]],
        }
    )
    (played,) = resolve(made, data_dir=data).federations
    recording = simulate(played)
    psnr = []
    for seen in observe(recording.transcript, made.threat).split():
        found = make_attack(server["name"])(seen, generator=torch.Generator().manual_seed(seed))
        assert isinstance(found, ImageFinding)
        true = recording.truth.inputs[0, seen.single().client]
        errors = torch.cdist(true.flatten(1).double(), found.images.flatten(1).double()).square() / true[0].numel()
        psnr.append(-10 * errors.min(dim=1).values.clamp(min=1e-10).log10())
    added = sum(p.numel() for name, p in recording.transcript.module.named_parameters() if name.startswith("front."))
    return torch.cat(psnr), added


def main() -> None:
    """Print a line a case."""
    data, model = Path(sys.argv[1]), (sys.argv[2:] or ["convnet-small"])[0]
    cases: list[tuple[dict[str, Any], str]] = [({"name": "loki", "units": k}, "sum") for k in (128, 256)]
    cases += [({"name": "loki", "units": 128}, "updates")]
    cases += [({"name": "imprint", "units": k}, "sum") for k in (128, 1280)]
    for federation in FEDERATIONS:
        for server, sees in cases:
            for seed in range(2):
                began = time.perf_counter()
                psnr, added = measure(data, model, federation, server, sees, seed)
                out = psnr >= RECOVERED
                print(
                    f"{federation}, {server['name']} of {server['units']}, {sees}, seed {seed}: {int(out.sum())} of "
                    f"{len(out)}, mean {float(psnr[out].mean()):.1f} dB, least {float(psnr[out].min()):.1f}; "
                    f"{added / 1e6:.1f}m parameters, {time.perf_counter() - began:.0f} s",
                    flush=True,
                )


if __name__ == "__main__":
    main()
