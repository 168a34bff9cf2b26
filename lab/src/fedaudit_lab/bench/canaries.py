"""What canaries add to a round: 1,000 of them in a federation whose server adds noise, and one where clients do."""

from __future__ import annotations

import dataclasses
import statistics
import time
from typing import Any

from fedaudit import Scenario
from fedaudit.pipeline import resolve
from fedaudit.scenario import scenario_from
from fedaudit.simulation import Federation, simulate
from fedaudit.utils import Display, Quiet, one_thread, peak_memory, start_measuring_memory

_WIDTH = 60  # of convnet-small: a million parameters
_ROUNDS = (1, 5)  # what a longer simulation takes more is its further rounds'


def measure(*, quick: bool, display: Display | None = None) -> dict[str, Any]:
    """Time rounds of FedAvg with and without 1,000 canary clients, in turn, one thread.

    Ten clients train convnet-small with a million parameters on photographs for four steps of eight. With local noise
    every canary's update gets noise of its own, by the code of any client's; fifty canaries there tell what one takes.
    The third case has their noise drawn jointly (``noise: joint`` of the attack). The noise is next to nothing: it
    costs as much as any, and lets the model be trained.
    """
    pairs, count, width = (1, 50, 8) if quick else (3, 1000, _WIDTH)
    report = (display or Quiet()).stage("canaries", 3 * pairs)
    rows: list[dict[str, Any]] = []
    with one_thread():
        for name in ("central", "local", "local, joint"):
            where, joint = name.partition(",")[0], "joint" in name
            canaries = max(10, count // 20) if name == "local" else count
            (federation,) = resolve(_scenario(where, canaries, width, joint=joint)).federations
            without, added = [], []
            peak: float | None = None
            for pair in range(pairs):
                plain = _round(dataclasses.replace(federation, canaries=None))
                before = start_measuring_memory()
                own = _round(federation)
                peak = peak_memory(before) if pair == 0 else peak
                without.append(plain)
                added.append(own - plain)
                report(len(rows) * pairs + pair + 1)
            base, more = statistics.median(without), statistics.median(added)
            rows.append(
                {
                    "noise": name,
                    "canaries": canaries,
                    "without": base,
                    "with": base + more,
                    "ratio": (base + more) / base,
                    "seconds_a_canary": more / canaries,
                    "peak_mib": peak,
                }
            )
    parameters = sum(p.numel() for p in federation.model.parameters())
    return {"clients": federation.spec.clients, "parameters": parameters, "rows": rows}


def _round(federation: Federation) -> float:
    """Return the CPU seconds of a round that isn't the first."""
    seconds = []
    for rounds in _ROUNDS:
        spec = federation.spec.model_copy(update={"rounds": rounds})
        began = time.process_time()
        simulate(dataclasses.replace(federation, spec=spec))
        seconds.append(time.process_time() - began)
    return (seconds[1] - seconds[0]) / (_ROUNDS[1] - _ROUNDS[0])


def _scenario(where: str, canaries: int, width: int, *, joint: bool) -> Scenario:
    return scenario_from(
        {
            "data": {"name": "photos"},
            "model": {"name": "convnet-small", "width": width},
            "federations": [
                {
                    "name": "f",
                    "algorithm": "fedavg",
                    "clients": 10,
                    "rounds": _ROUNDS[1],
                    "batch_size": 8,
                    "local_steps": 4,
                    "learning_rate": 0.001,
                }
            ],
            "defences": {"client_defence": {"name": "dp", "where": where, "noise": 1e-4, "epsilon": None}},
            "attacks": [{"name": "dp-canaries", "canaries": canaries, "noise": "joint" if joint else "each"}],
        }
    )
