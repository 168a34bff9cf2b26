"""Which layers the updates of a transcript carry, and how far the model moved there.

fedaudit simulate examples/fragments.yaml --data-dir DATA --out transcript
python examples/fragments.py transcript
"""

from __future__ import annotations

import argparse
from collections import Counter
from pathlib import Path

import fedaudit


def main() -> None:
    """Print a line a tensor: over all recorded rounds, and from the first one to the last."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("transcript", type=Path)
    rounds = fedaudit.Transcript.load(parser.parse_args().transcript).rounds
    updates = [update for record in rounds for update in record.updates]
    sent = Counter(name for update in updates for name in update.tensors)
    first, last = rounds[0].weights, rounds[-1].weights
    print(f"{'tensor':32s}  elements  in updates  moved, of its length  mean first   last")
    for name, before in first.items():
        if name in sent:
            after = last[name]
            moved = f"{(after - before).norm() / before.norm():.0%}" if before.any() else "from zero"
            print(
                f"{name:32s} {before.numel():9,d} {sent[name] / len(updates):11.0%} {moved:>21s} "
                f"{before.mean():11.2f} {after.mean():6.2f}"
            )


if __name__ == "__main__":
    main()
