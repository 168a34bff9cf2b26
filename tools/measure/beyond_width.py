"""How many sequences of ``notes-causal`` ``dager`` reads, and how many tokens these have for the model's width.

python -m tools.measure.beyond_width 64 8 3   # width, sequences in the update, seeds
"""

from __future__ import annotations

import sys
import time

from fedaudit.attacks import SequenceFinding
from tests.attacks.test_text import recorded, run, words


def measure(width: int, examples: int, seed: int) -> str:
    """Return a line: places with a next word, their number by the width, sequences that came out exactly, CPU time."""
    only = recorded(width=width, examples=examples, batch_size=examples, seed=seed)
    inputs = only.truth.inputs[0, 0]
    places = int((inputs > 0).sum()) - len(inputs)
    began = time.process_time()
    found = run("dager", only)
    assert isinstance(found, SequenceFinding)
    true, told = words(only, inputs), words(only, found.sequences)
    exact = sum(sequence in told for sequence in true)
    seconds = time.process_time() - began
    return (
        f"width {width}, seed {seed}: {places} places, {places / width:.2f} of the width: {exact} of {examples} exactly"
        f", {seconds:.0f} s; {found.notes[-1]}"
    )


if __name__ == "__main__":
    width, examples, seeds = map(int, sys.argv[1:])
    for seed in range(seeds):
        print(measure(width, examples, seed), flush=True)
