"""What the decoder of ``seer`` reads out of single updates, by how many of the batch's examples it counts.

    python -m tests.measure.seer_share [PICTURE.png]

trains three servers on 900 public digits, plays 44 batches of 8 on each (half a minute of a core a server), and prints
the PSNR of the image that is nearest to what was decoded. The picture has true images above, decoded ones below.
"""

from __future__ import annotations

import re
import sys

import torch
from PIL import Image

from fedaudit.attacks import ImageFinding, make_attack
from fedaudit.scenario.scenario import scenario_from
from fedaudit.utils.machine import one_thread
from tests.attacks.server_cases import best_psnr, played, seen_in

_SHOWN, _SCALE = 16, 6


def measure(seed: int) -> list[tuple[float, float, bool, torch.Tensor, torch.Tensor]]:
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
    recording, rows = played(made), []
    for seen in seen_in(made, recording):
        found = make_attack("seer")(seen)
        assert isinstance(found, ImageFinding)
        inputs = recording.truth.inputs[seen.single().round, seen.single().client]
        psnr = best_psnr(inputs, found.images[:1])
        best = int(psnr.argmax())
        brightest = best == int(inputs.flatten(1).mean(dim=1).argmax())
        count = float(re.findall(r"count (\S+) of", found.notes[0])[0])
        rows.append((count, float(psnr.max()), brightest, inputs[best], found.images[0]))
    return rows


def main() -> None:
    """Print the table, and draw the picture."""
    rows = []
    with one_thread():
        for seed in range(3):
            rows += measure(seed)
            alone = torch.tensor([psnr for count, psnr, *_ in rows[-44:] if 0.8 < count < 1.2])
            print(f"seed {seed}: {len(alone)} of 44 batches counted as one, median {alone.median():.1f} dB", flush=True)
    for low, high in ((-9, 0.5), (0.5, 0.8), (0.8, 1.2), (1.2, 99)):
        of = [row for row in rows if low < row[0] <= high]
        psnr = torch.tensor([row[1] for row in of])
        share = sum(row[2] for row in of) / max(1, len(of))
        median, over = psnr.median(), (psnr > 20).double().mean()
        print(
            f"count {low} to {high}: {len(of)}, median {median:.1f} dB, above 20 dB {over:.2f}, brightest {share:.2f}"
        )
    if len(sys.argv) > 1:
        shown = [row for row in rows if 0.8 < row[0] < 1.2][:_SHOWN]
        true, decoded = (torch.cat(part, dim=1) for part in ([r[3][0] for r in shown], [r[4][0] for r in shown]))
        pixels = (torch.cat([true, decoded]) * 255).round().to(torch.uint8).numpy()
        drawn = Image.fromarray(pixels)
        drawn.resize((drawn.width * _SCALE, drawn.height * _SCALE), Image.Resampling.NEAREST).save(sys.argv[1])


if __name__ == "__main__":
    main()
