"""Every attack on every kind of model and update either runs or says why not and what to do."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedaudit.attacks import ATTACKS, Finding, make_attack
from fedaudit.pipeline.prepare import resolve
from fedaudit.pipeline.run import plan, record
from fedaudit.scenario.scenario import scenario_from
from fedaudit.transcript.observation import observe
from fedaudit.transcript.threat import ThreatModel
from fedaudit.transcript.transcript import Transcript

LONG = {"dlg", "idlg", "cpl", "geng"}  # their loop is that of others, which are quicker
UPDATES: dict[str, dict[str, Any]] = {
    "one gradient": {"clients": 1, "examples": 1},
    "a batch": {"clients": 1, "examples": 2, "batch_size": 2},
    "two rounds": {"clients": 1, "examples": 2, "rounds": 2},
    "fedavg": {"algorithm": "fedavg", "clients": 1, "examples": 2, "local_steps": 2, "learning_rate": 1e-3},
}


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)
        self.fc = nn.Linear(4 * 36, 10, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.as_tensor(self.fc(nn.functional.dropout(self.conv(x).relu(), 0.1, self.training).flatten(1)))


class NoClassifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 10, 3)

    def forward(self, x: Tensor) -> Tensor:
        return torch.as_tensor(self.conv(x).mean(dim=(2, 3)))


MODELS: dict[str, tuple[dict[str, Any], type[nn.Module] | None]] = {
    "sigmoids": ({"name": "lenet"}, None),
    "leaky": ({"name": "leaky-cnn"}, None),
    "relu": ({"name": "convnet-small", "width": 4}, None),
    "batch norm, eval": ({"name": "resnet20", "width": 4}, None),
    "batch norm, train": ({"name": "resnet20", "width": 4, "batch_norm": "train"}, None),
    "linear": ({"name": "logistic"}, None),
    "dropout without bias": ({"name": "custom", "initialisation": "given"}, Dropping),
    "no classifier": ({"name": "custom", "initialisation": "given"}, NoClassifier),
}
QUICK = {"iterations": 1, "pre_iterations": 2, "group": 2, "attack": {"name": "agic", "iterations": 1}}


@cache
def transcript_of(model: str, update: str) -> Transcript:
    spec, own = MODELS[model]
    values = {
        "data": {"name": "digits"},
        "model": spec,
        "federations": [{"name": "f", **UPDATES[update]}],
        "attacks": [{"name": "labels"}],
    }
    (only,) = record(resolve(scenario_from(values), model=own() if own else None))
    return only.transcript


def outcome_of(model: str, update: str, attack: str) -> str:
    known = make_attack(attack).settings()
    settings = {name: value for name, value in QUICK.items() if name in known}
    trial, *_ = plan([observe(transcript_of(model, update), ThreatModel())], [make_attack(attack, settings)])
    reason = trial.outcome or trial.run()
    if isinstance(reason, Finding):
        return "runs"
    assert "\n" not in str(reason)
    assert len(str(reason)) > 30, reason
    return str(reason)


@pytest.mark.slow
@pytest.mark.parametrize(
    "attack", [n if n not in LONG else pytest.param(n, marks=pytest.mark.long) for n in ATTACKS.names()]
)
def test_every_attack_runs_or_says_why_not(attack):
    outcomes = {(model, update): outcome_of(model, update, attack) for model in MODELS for update in UPDATES}
    assert len(outcomes) == len(MODELS) * len(UPDATES)
    print(attack, {k: v for k, v in outcomes.items() if v != "runs"})
