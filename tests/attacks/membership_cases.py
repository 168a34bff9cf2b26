"""What the tests on records share: a scenario, its recording, an attack's finding, a model that nobody simulated."""

from __future__ import annotations

import dataclasses
from functools import cache
from typing import Any

import torch
from torch import nn

from fedaudit.attacks import Finding, MembershipFinding, make_attack
from fedaudit.evaluation import evaluate
from fedaudit.scenario.scenario import Scenario
from fedaudit.task.info import TaskInfo
from fedaudit.transcript.observation import Message, Observation, observe
from fedaudit.transcript.queries import QuerySet
from fedaudit.transcript.threat import ThreatModel
from fedaudit.transcript.transcript import Transcript
from fedaudit.transcript.truth import Truth
from fedaudit.transcript.update import Update
from fedaudit.utils.seeds import generator
from tests.build import Scenarios, sent

_MEMBERS = Scenarios(
    data={"split": "train"},
    model={"name": "mlp", "width": 32},
    federation={
        "algorithm": "fedavg",
        "clients": 4,
        "rounds": 2,
        "examples": 120,
        "batch_size": 10,
        "local_epochs": 1,
        "learning_rate": 0.1,
    },
    threat={"target_records": 60},
)
PUBLIC = {"knows_public_data": True, "public_examples": 60}


KNOWN = {"knows_public_data": True, "public_examples": 160}


def scenario(threat: dict[str, Any] | None = None, attacks: Any = ("loss-threshold",), **federation: Any) -> Scenario:
    return _MEMBERS(federation, threat=threat or {}, attacks=list(attacks))


@cache
def overfitted() -> tuple[Observation, Transcript, Truth]:
    """Return what is seen of a model that has learnt its clients' examples by heart."""
    made = scenario({"target_records": 80, **KNOWN}, rounds=40, examples=80, local_epochs=3)
    transcript, truth = sent(made)
    return observe(transcript, made.threat), transcript, truth


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


def summed(seen: Observation) -> Observation:
    """Return what is seen where each update is one of two clients together."""
    messages = [
        dataclasses.replace(m, update=dataclasses.replace(m.update, members=(m.client, 99))) for m in seen.messages
    ]
    return dataclasses.replace(seen, messages=tuple(messages))


def result(found: Finding, seen: Observation, truth: Truth) -> Any:
    """Return a finding's result, against the truth."""
    return evaluate(found, seen, truth, seed=0).result
