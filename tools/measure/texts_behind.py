"""How many notes ``dager`` and ``somp``, of encoders ``lamp``, read word for word behind a defence or in adapters.

python -m tools.measure.texts_behind 4 2 256          # notes in the update, seeds, width; a minute or two a line
python -m tools.measure.texts_behind 2 2 128 encoder  # how the lines begin that are wanted
"""

from __future__ import annotations

import sys
import time
from typing import Any

from fedaudit.attacks import make_attack
from fedaudit.transcript.observation import observe
from fedaudit.transcript.threat import ThreatModel
from fedaudit.utils.seeds import generator
from tests import build
from tests.attacks.test_text import words
from tests.build import Scenarios

SECOND = {"rounds": 2, "keep_rounds": [1], "learning_rate": 0.3}  # adapters' second half is zero in the first
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "adapters of rank 16": ("decoder-lora", SECOND, {}),
    "adapters, noise 0.001": ("decoder-lora", SECOND, {"name": "dp", "clip": 1.0, "noise": 0.001, "epsilon": None}),
    "noise 0.001": ("decoder", {}, {"name": "dp", "clip": 1.0, "noise": 0.001, "epsilon": None}),
    "noise 0.01": ("decoder", {}, {"name": "dp", "clip": 1.0, "noise": 0.01, "epsilon": None}),
    "noise 0.1": ("decoder", {}, {"name": "dp", "clip": 1.0, "noise": 0.1, "epsilon": None}),
    "top-k 0.1": ("decoder", {}, {"name": "top-k", "ratio": 0.1}),
    "signs": ("decoder", {}, {"name": "sign"}),
    "encoder": ("encoder", {}, {}),
    "encoder, noise 0.001": ("encoder", {}, {"name": "dp", "clip": 1.0, "noise": 0.001, "epsilon": None}),
    "encoder, noise 0.01": ("encoder", {}, {"name": "dp", "clip": 1.0, "noise": 0.01, "epsilon": None}),
}


def measure(case: str, examples: int, seed: int, width: int) -> str:
    """Return a line: of each attack, notes that came out exactly, those told, and CPU seconds."""
    model, more, defence = CASES[case]
    federation = {"name": "f", "clients": 1, "examples": examples, "batch_size": examples, **more}
    data, attacks = ("notes", ("dager", "lamp")) if model == "encoder" else ("notes-causal", ("dager", "somp"))
    made = Scenarios(data=data, model={"name": model, "width": width}, federation=federation, attacks="dager")
    only = build.recorded(made({}, seed=seed, **({"defences": {"client_defence": defence}} if defence else {})))
    seen = observe(only.transcript, ThreatModel()).split()[-1]
    true = words(only, list(only.truth.inputs.values())[-1])
    said = []
    for name in attacks:
        began = time.process_time()
        finding: Any = make_attack(name)(seen, generator=generator(0, "attack"))
        told = words(only, finding.sequences)
        exact = sum(row in told for row in true)
        said.append(f"{name} {exact} of {examples} ({len(told)} told, {time.process_time() - began:.0f} s)")
    return f"{case}, seed {seed}: {'; '.join(said)}"


if __name__ == "__main__":
    examples, seeds, width = map(int, sys.argv[1:4])
    begins = "".join(sys.argv[4:5])
    for case in (case for case in CASES if case.startswith(begins)):
        for seed in range(seeds):
            print(measure(case, examples, seed, width), flush=True)
