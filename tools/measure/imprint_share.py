"""How many images an imprint module yields from one gradient over 256 CIFAR-10 images, and how exactly.

    python -m tools.measure.imprint_share DATA [MODEL]

prints, of each variant and number of bins, the images of which a copy of at least 40 dB came out, how many were to be
expected of as many equally likely bins, n(1 - 1/k)^(n - 1), and their mean PSNR. PSNR is cut at 100 dB.
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

N = 256
RECOVERED = 40.0  # dB


def measure(data: Path, model: str, server: dict[str, Any], threat: dict[str, Any], seed: int) -> torch.Tensor:
    """Return (256,) each image's PSNR in dB of the nearest that came out."""
    made = scenario_from(
        {
            "seed": seed,
            "data": {"name": "cifar10", "split": "test"},
            "model": {"name": model},
            "federations": [{"name": "f", "clients": 1, "examples": N, "batch_size": N, "server": server}],
            "threat": {"adversary": "malicious-server", **threat},
            "attacks": ["imprint"],
        }
    )
    (federation,) = resolve(made, data_dir=data).federations
    recording = simulate(federation)
    (seen,) = observe(recording.transcript, made.threat).split()
    found = make_attack("imprint")(seen, generator=torch.Generator().manual_seed(seed))
    (true,) = recording.truth.inputs.values()
    assert isinstance(found, ImageFinding)
    errors = torch.cdist(true.flatten(1).double(), found.images.flatten(1).double()).square() / true[0].numel()
    return -10 * errors.min(dim=1).values.clamp(min=1e-10).log10()


def main() -> None:
    """Print a line a case."""
    data, model = Path(sys.argv[1]), (sys.argv[2:] or ["convnet-small"])[0]
    public = {"knows_public_data": True, "public_examples": 1000}
    cases: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
        ("bounded", {}, {}),
        ("bounded, public examples", {}, public),
        ("cumulative", {"sparse": False}, {}),
    ]
    for units in (256, 1024):
        for name, more, threat in cases:
            for seed in range(2):
                psnr = measure(data, model, {"name": "imprint", "units": units, **more}, threat, seed)
                out = psnr >= RECOVERED
                expected = N * (1 - 1 / units) ** (N - 1)
                print(
                    f"{model}, {units} bins, {name}, seed {seed}: {int(out.sum())} of {N} ({expected:.0f} expected), "
                    f"mean {float(psnr[out].mean()):.1f} dB, least {float(psnr[out].min()):.1f}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
