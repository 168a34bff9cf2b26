"""How often the checks of a received model cry wolf: 200 ordinary rounds, and how well they tell a manipulated one.

    python -m tools.measure.false_alarms [SEED]

runs minutes of one core, and prints, of each check, the alarms on ordinary rounds and the area under the ROC curve
against each manipulation.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from typing import Any

import torch

from fedaudit.defences.received import LIMITS, Check, check_received
from fedaudit.models.inserted_module import WithInsertedModule
from fedaudit.pipeline.prepare import resolve
from fedaudit.scenario.scenario import scenario_from
from fedaudit.simulation.simulator import simulate

ROUNDS = 8
MODELS: dict[str, dict[str, Any]] = {
    "mlp": {"name": "mlp", "width": 64},
    "fcn-3": {"name": "fcn-3"},
    "convnet-small": {"name": "convnet-small", "width": 8},
    "lenet": {"name": "lenet"},
    "strided-cnn": {"name": "strided-cnn"},
}
WAYS: dict[str, dict[str, Any]] = {
    "even": {"learning_rate": 0.05, "local_epochs": 1},
    "uneven": {"learning_rate": 0.05, "local_epochs": 2, "partition": {"scheme": "dirichlet", "alpha": 0.3}},
    "momentum": {"learning_rate": 0.05, "local_epochs": 2, "momentum": 0.9},
    "two classes": {"learning_rate": 0.05, "local_epochs": 2, "partition": {"scheme": "classes-per-client", "k": 2}},
    "pretrained": {"learning_rate": 0.02, "local_epochs": 1, "partition": {"scheme": "dirichlet", "alpha": 0.3}},
}
MANIPULATED: dict[str, Any] = {
    "imprint, bounded": {"name": "imprint", "units": 128, "spread": 0.15},
    "imprint, cumulative": {"name": "imprint", "units": 128, "spread": 0.15, "sparse": False},
    "loki": {"name": "loki", "units": 128, "spread": 0.15},
}
TRAPPED: dict[str, Any] = {"trap weights": {"name": "trap-weights", "scale": 0.5}}
MALICIOUS = {"adversary": "malicious-server", "knows_public_data": True, "public_examples": 200}
FISHED: dict[str, Any] = {
    "fishing for a class": {"name": "fishing", "target": 3},
    "fishing by a feature": {"name": "fishing", "target": 3, "members": 20},
}


def rounds(model: str, way: str, server: Any = None, count: int = ROUNDS, seed: int = 0) -> Iterator[list[Check]]:
    """Yield what a client finds in the model that it receives, round by round, another client each time.

    Args:
        model, way: of the federation.
        server: a malicious server's behaviour; None: it is honest.
        count: rounds.
        seed: of the scenario.
    """
    trained = {"epochs": 5} if way == "pretrained" else {}
    spec = {
        "name": "f",
        "algorithm": "fedavg",
        "clients": 5,
        "examples": 600,
        "rounds": count,
        "batch_size": 16,
        **WAYS[way],
    }
    if server is not None:
        spec |= {"server": server, "local_epochs": None, "local_steps": 1}
    made = scenario_from(
        {
            "seed": seed,
            "data": {"name": "digits", "split": "train"},
            "model": {**MODELS[model], "training": trained},
            "federations": [spec],
            "threat": {"adversary": "server"} if server is None else dict(MALICIOUS),
            "attacks": ["labels"],
        }
    )
    (federation,) = resolve(made).federations
    transcript = simulate(federation).transcript
    module = transcript.module
    agreed = module.body if isinstance(module, WithInsertedModule) else module
    for record in transcript.rounds:
        client = record.index % len(federation.client_data)
        data, state = federation.client_data[client], record.sent_to(client)
        inputs = transcript.task_info.normalise(data.inputs[:32])
        examples = (inputs, data.targets[:32])
        yield check_received(state, agreed, module=module, loss=transcript.loss, examples=examples)


def area(ordinary: list[float], altered: list[float]) -> float:
    """Return the area under the ROC curve: the chance that a manipulated model has the larger value, ties by half."""
    a, b = torch.tensor(altered)[:, None], torch.tensor(ordinary)[None]
    return float(((a > b).double() + 0.5 * (a == b).double()).mean())


def measure(seed: int = 0) -> tuple[list[list[Check]], dict[str, list[list[Check]]]]:
    """Return the checks of all ordinary rounds, and of two rounds of every model under each manipulation."""
    ordinary: list[list[Check]] = []
    for model, way in itertools.product(MODELS, WAYS):
        own = list(rounds(model, way, seed=seed))
        ordinary += own
        largest = {name: max(c.value for checks in own for c in checks if c.name == name) for name in _names(own)}
        print(model, way, {name: round(value, 3) for name, value in largest.items()}, flush=True)
    played = MANIPULATED | FISHED
    altered = {name: [c for m in MODELS for c in rounds(m, "even", s, 2, seed)] for name, s in played.items()}
    for name, s in TRAPPED.items():
        altered[name] = [c for m in ("mlp", "fcn-3") for c in rounds(m, "even", s, 2, seed)]
    return ordinary, altered


def _values(rounds: list[list[Check]], check: str) -> list[float]:
    return [c.value for checks in rounds for c in checks if c.name == check]


def _names(rounds: list[list[Check]]) -> list[str]:
    return list(dict.fromkeys(c.name for checks in rounds for c in checks))


def main() -> None:
    """Print the table."""
    ordinary, altered = measure(int(sys.argv[1]) if len(sys.argv) > 1 else 0)
    wolf = sum(any(c.alarm for c in checks) for checks in ordinary)
    print(f"false alarms: {wolf} of {len(ordinary)} ordinary rounds")
    for name, of in altered.items():
        print(f"{name}: {sum(any(c.alarm for c in checks) for checks in of)} of {len(of)} noticed")
    for check in LIMITS:
        values = _values(ordinary, check)
        areas = {name: round(area(values, _values(of, check)), 3) for name, of in altered.items() if _values(of, check)}
        top = sorted(values)[-3:]
        cried = sum(c.alarm for checks in ordinary for c in checks if c.name == check)
        print(f"{check}: alarms {cried}, largest {[round(v, 3) for v in top]}, area {areas}")


if __name__ == "__main__":
    main()
