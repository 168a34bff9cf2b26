"""What the decoder of ``seer`` reads out of single updates, by how many of the batch's examples it counts.

    python -m tools.measure.seer_share [PICTURE.png]

trains three servers on 900 public digits, plays 44 batches of 8 on each (half a minute of a core a server), and prints
for each server, and for all together, the PSNR of the image that is nearest to what was decoded. The picture has true
images above, decoded ones below.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Sequence
from itertools import pairwise
from statistics import median
from typing import NamedTuple

import torch
from PIL import Image

from fedaudit.attacks import ImageFinding, make_attack
from fedaudit.scenario.scenario import scenario_from
from fedaudit.utils.machine import one_thread
from tests.attacks.server_cases import best_psnr
from tests.build import recorded, seen_in

_SHOWN, _SCALE = 16, 6
_RANGES = [(-math.inf, ""), (0.5, "up to 0.5"), (0.8, "0.5 to 0.8"), (1.2, "0.8 to 1.2"), (math.inf, "above 1.2")]


class Batch(NamedTuple):
    """A batch: how many examples the decoder counts; PSNR of the nearest image, whether it is the brightest; both."""

    counted: float
    psnr: float
    brightest: bool
    true: torch.Tensor
    decoded: torch.Tensor


def measure(seed: int) -> list[Batch]:
    """Return of every batch the count, the nearest image's PSNR, whether it is the brightest, and both images."""
    made = scenario_from(
        {
            "seed": seed,
            "data": {"name": "digits", "split": "test"},
            "model": {"name": "mlp", "width": 64},
            "federations": [
                {"name": "f", "algorithm": "fedsgd", "clients": 44, "examples": 352, "batch_size": 8, "server": "seer"}
            ],
            "threat": {"adversary": "malicious-server", "knows_public_data": True, "public_examples": 900},
            "attacks": ["seer"],
        }
    )
    recording, rows = recorded(made), []
    for seen in seen_in(made, recording):
        found = make_attack("seer")(seen)
        assert isinstance(found, ImageFinding)
        inputs = recording.truth.inputs[seen.single().round, seen.single().client]
        psnr = best_psnr(inputs, found.images[:1])
        best = int(psnr.argmax())
        brightest = best == int(inputs.flatten(1).mean(dim=1).argmax())
        count = float(re.findall(r"count (\S+) of", found.notes[0])[0])
        rows.append(Batch(count, float(psnr.max()), brightest, inputs[best], found.images[0]))
    return rows


def table(batches: Sequence[Batch]) -> list[str]:
    """Return a line for each range of counts, an empty one too."""
    lines = []
    for (low, _), (high, name) in pairwise(_RANGES):
        of = [batch for batch in batches if low < batch.counted <= high]
        if not of:
            lines.append(f"count {name}: none")
            continue
        psnr = [batch.psnr for batch in of]
        over, share = (sum(what) / len(of) for what in ((p > 20 for p in psnr), (batch.brightest for batch in of)))
        told = f"median {median(psnr):.1f} dB, above 20 dB {over:.2f}, brightest {share:.2f}"
        lines.append(f"count {name}: {len(of)}, {told}")
    return lines


def main() -> None:
    """Print the table, and draw the picture."""
    rows: list[Batch] = []
    with one_thread():
        for seed in range(3):
            own = measure(seed)
            print("\n".join([f"seed {seed}", *table(own)]), flush=True)
            rows += own
    print("\n".join(["all", *table(rows)]))
    if len(sys.argv) > 1:
        shown = [row for row in rows if 0.8 < row.counted <= 1.2][:_SHOWN]
        true, decoded = (torch.cat(p, dim=1) for p in ([r.true[0] for r in shown], [r.decoded[0] for r in shown]))
        pixels = (torch.cat([true, decoded]) * 255).round().to(torch.uint8).numpy()
        drawn = Image.fromarray(pixels)
        drawn.resize((drawn.width * _SCALE, drawn.height * _SCALE), Image.Resampling.NEAREST).save(sys.argv[1])


if __name__ == "__main__":
    main()
