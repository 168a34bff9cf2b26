"""How long a round takes while a malicious client generates images, how that grows, and what worker processes bring."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from fedaudit import MissingData, Scenario
from fedaudit.pipeline import resolve
from fedaudit.scenario import scenario_from
from fedaudit.simulation import simulate
from fedaudit.utils import Display, Quiet, one_thread

_EXAMPLES = {"mnist": 100, "digits": 30}  # a client holds
_ROUNDS = 3
_LONG = 30  # rounds with worker processes, enough for them to be started


def measure(
    *, quick: bool, data_dir: Path | None = None, workers: int = 2, display: Display | None = None
) -> dict[str, Any]:
    """Time rounds of FedAvg under InferGuard, a malicious client running ``gan`` in each, at several sizes.

    On MNIST where it is there (100 examples a client), otherwise on the embedded digits (30); batches of 16, one local
    epoch; seconds that pass.

    Args:
        workers: processes, beside one, for ten clients.
    """
    cases = [(4, 1, _ROUNDS)] if quick else [(10, 1, _ROUNDS), (20, 1, _ROUNDS), (40, 1, _ROUNDS)]
    if not quick:
        cases += [(10, 1, _LONG), (10, workers, _LONG)]
    report = (display or Quiet()).stage("rounds with a malicious client", len(cases))
    data = "digits" if quick else _data(data_dir)
    rows: list[dict[str, Any]] = []
    for done, (clients, processes, rounds) in enumerate(cases, start=1):
        scenario = _scenario(data, clients, rounds)
        with one_thread():
            (federation,) = resolve(scenario, data_dir=data_dir).federations
            began = time.perf_counter()
            simulate(federation, workers=processes)
        seconds = (time.perf_counter() - began) / rounds
        rows.append({"clients": clients, "workers": processes, "rounds": rounds, "seconds_a_round": seconds})
        report(done)
    speedup = rows[-2]["seconds_a_round"] / rows[-1]["seconds_a_round"] if not quick else None
    return {"data": data, "examples": _EXAMPLES[data], "rows": rows, "workers_speedup": speedup}


def _data(data_dir: Path | None) -> str:
    """Return the name of the data set: MNIST if it can be had."""
    try:
        resolve(_scenario("mnist", 10, 1), data_dir=data_dir)
    except MissingData:
        return "digits"
    return "mnist"


def _scenario(data: str, clients: int, rounds: int) -> Scenario:
    return scenario_from(
        {
            "data": {"name": data, "split": "train"},
            "model": {"name": "convnet-small", "width": 8, "initialisation": "he"},
            "federations": [
                {
                    "name": "f",
                    "algorithm": "fedavg",
                    "clients": clients,
                    "rounds": rounds,
                    "keep_rounds": [0],
                    "examples": clients * _EXAMPLES[data],
                    "batch_size": 16,
                    "local_epochs": 1,
                    "learning_rate": 0.1,
                    "malicious": {"name": "gan", "target": 3, "missing_classes": [3], "start": 0},
                }
            ],
            "defences": {"aggregator": "inferguard"},
            "threat": {"adversary": "client"},
            "attacks": ["gan"],
        }
    )
