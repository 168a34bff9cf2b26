"""How fast the simulator and the evaluation are: client updates and evaluated findings a second, one thread."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import Any

import fedaudit
from fedaudit import Scenario
from fedaudit.pipeline import resolve
from fedaudit.simulation import simulate
from fedaudit.utils import Display, Quiet, one_thread
from fedaudit_lab.bench.flower import import_flower, time_flower

_MODEL = "convnet-small"


def measure(*, quick: bool, peers: Sequence[str] = (), display: Display | None = None) -> dict[str, Any]:
    """Count client updates a second of FedAvg on embedded photographs, beside Flower's, and evaluated findings."""
    if peers:
        import_flower()
    clients, rounds = (4, 2) if quick else (10, 5)
    scenario = Scenario.model_validate(
        {
            "data": {"name": "photos"},
            "model": {"name": _MODEL},
            "federations": [
                {
                    "name": "fedavg",
                    "algorithm": "fedavg",
                    "clients": clients,
                    "rounds": rounds,
                    "batch_size": 8,
                    "local_steps": 4,
                    "learning_rate": 1e-3,
                }
            ],
            "threat": {"knows_labels": True},
            "attacks": [{"name": "agic", "iterations": 1}],
        }
    )
    spec = scenario.federations[0]
    report = (display or Quiet()).stage("simulators and evaluation", 3)
    with one_thread():
        (federation,) = resolve(scenario).federations
        warm = spec.model_copy(update={"rounds": 1})  # Flower's first round doesn't count either
        simulate(dataclasses.replace(federation, spec=warm))
        began = time.perf_counter()
        simulate(federation)
        seconds = time.perf_counter() - began
        report(1)
        updates = clients * rounds
        rows: list[dict[str, Any]] = [
            {"tool": "fedaudit", "updates": updates, "seconds": seconds, "start_seconds": 0.0}
        ]
        if peers:
            running, starting = time_flower(federation)
            rows.append({"tool": "flower", "updates": updates, "seconds": running, "start_seconds": starting})
    report(2)
    evaluation = _time_evaluation(scenario)
    report(3)
    for row in rows:
        row["updates_per_second"] = row["updates"] / row["seconds"]
    return {
        "model": _MODEL,
        "clients": clients,
        "rounds": rounds,
        "simulators": rows,
        "speedup": rows[-1]["seconds"] / rows[0]["seconds"] if peers else None,
        "evaluation": evaluation,
    }


def _time_evaluation(scenario: Scenario) -> dict[str, Any]:
    """Time the evaluation of findings of 32 images each: metrics, assignment, identification, report's data."""
    recording = fedaudit.simulate(scenario, progress=False)
    found = fedaudit.attack(recording, scenario.attacks, threat=scenario.threat.model_dump(), progress=False)
    began = time.perf_counter()
    with one_thread():
        fedaudit.evaluate(found, progress=False)
    seconds = time.perf_counter() - began
    return {"findings": len(found), "images": 32, "seconds": seconds, "findings_per_second": len(found) / seconds}
