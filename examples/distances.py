"""How far the updates of a transcript lie from their median, in the unit of InferGuard's rule.

fedaudit simulate examples/honest-mnist.yaml --data-dir DATA --out transcript
python examples/distances.py transcript
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

import fedaudit


def main() -> None:
    """Print a line a recorded round."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("transcript", type=Path)
    rounds = fedaudit.Transcript.load(parser.parse_args().transcript).rounds
    print("round  |median| / mean norm  longest / shortest  updates within 2, 5, 10 |median|")
    for record in rounds:
        updates = torch.stack([torch.cat([t.flatten() for t in update.tensors.values()]) for update in record.updates])
        median = updates.double().quantile(0.5, dim=0)
        norms = updates.double().norm(dim=1)
        distances = (updates - median).norm(dim=1) / median.norm()
        within = [int((distances <= limit).sum()) for limit in (2, 5, 10)]
        print(
            f"{record.index + 1:5d}  {median.norm() / norms.mean():20.2f}  {norms.max() / norms.min():18.1f}  "
            f"{', '.join(map(str, within))} of {len(updates)}"
        )


if __name__ == "__main__":
    main()
