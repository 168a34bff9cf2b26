"""What the tests on records share: a scenario, its recording, an attack's finding, a model that nobody simulated."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fedaudit.attacks import MembershipFinding, make_attack
from fedaudit.pipeline.prepare import resolve
from fedaudit.pipeline.run import record
from fedaudit.scenario.scenario import Scenario, scenario_from
from fedaudit.task.info import TaskInfo
from fedaudit.transcript.observation import Message, Observation
from fedaudit.transcript.queries import QuerySet
from fedaudit.transcript.threat import ThreatModel
from fedaudit.transcript.transcript import Transcript
from fedaudit.transcript.truth import Truth
from fedaudit.transcript.update import Update
from fedaudit.utils.seeds import generator

FEDERATION = {
    "name": "f",
    "algorithm": "fedavg",
    "clients": 4,
    "rounds": 2,
    "examples": 120,
    "batch_size": 10,
    "local_epochs": 1,
    "learning_rate": 0.1,
}
PUBLIC = {"knows_public_data": True, "public_examples": 60}


def scenario(threat: dict[str, Any] | None = None, attacks: Any = ("loss-threshold",), **federation: Any) -> Scenario:
    values = {
        "data": {"name": "digits", "split": "train"},
        "model": {"name": "mlp", "width": 32},
        "federations": [{**FEDERATION, **federation}],
        "threat": {"target_records": 60, **(threat or {})},
        "attacks": list(attacks),
    }
    return scenario_from(values)


def recorded(made: Scenario) -> tuple[Transcript, Truth]:
    (only,) = record(resolve(made))
    return only.transcript, only.truth


def run_attack(name: str, seen: Observation, **settings: Any) -> MembershipFinding:
    found = make_attack(name, settings)(seen, generator=generator(0, "attack"))
    assert isinstance(found, MembershipFinding)
    return found


def logistic(n: int = 12, d: int = 5, classes: int = 3) -> Observation:
    """A model and records that nobody simulated."""
    rng = generator(3, "logistic")
    model = nn.Linear(d, classes)
    state = {"weight": torch.randn(classes, d, generator=rng), "bias": torch.randn(classes, generator=rng)}
    model.load_state_dict(state)
    task_info = TaskInfo("custom", None, "eval", "cross-entropy", "table", (d,), classes, (0.0,), (1.0,))
    x = torch.randn(n, d, generator=rng)
    y = torch.randint(classes, (n,), generator=rng)
    records = QuerySet(x, y, x[:0], y[:0])
    threat = ThreatModel(target_records=n)
    moved = {name: torch.randn(t.shape, generator=rng) for name, t in state.items()}
    message = Message(0, 4, state, Update(4, "weights", moved, 5, None))
    loss = nn.functional.cross_entropy
    return Observation("f", threat, task_info, model, loss, "weights", (state,), (message,), {}, records)
