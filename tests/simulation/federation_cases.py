"""What the tests on simulations share: a scenario of one federation, its run, and whether two are the same."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from pydantic.dataclasses import dataclass as checked_dataclass

from fedaudit.defences.client_defences import CLIENT_DEFENCES, ClientContext, ClientDefence
from fedaudit.pipeline.prepare import resolve
from fedaudit.scenario.scenario import Scenario
from fedaudit.simulation.client import Federation
from fedaudit.simulation.simulator import simulate
from fedaudit.transcript.transcript import Transcript
from fedaudit.transcript.truth import Truth
from fedaudit.transcript.update import Update
from fedaudit.utils.registry import SETTINGS, register
from tests.build import Scenarios


@checked_dataclass(kw_only=True, eq=False, config=SETTINGS)  # registered below: workers import it, too
class Counting(ClientDefence):
    """Remembers how often its client has sent, under a name like any other."""

    name = "counting"
    summary = "multiplies by how often this client has sent"

    rounds: int = dataclasses.field(default=0, init=False)

    def __call__(self, update: Update, context: ClientContext, generator: torch.Generator) -> Update:
        self.rounds += 1
        return dataclasses.replace(update, tensors={n: self.rounds * t for n, t in update.tensors.items()})


def add_counting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make it a defence that scenarios can name, until the test is over."""
    monkeypatch.setattr(CLIENT_DEFENCES, "_entries", dict(CLIENT_DEFENCES._entries))
    register(Counting)


MLP = {"name": "mlp", "width": 8}


def scenario(spec: dict[str, Any], **rest: Any) -> Scenario:
    return Scenarios(model=MLP, federation={"name": "fed"}, attacks="invg")(spec, **rest)


def run(
    spec: dict[str, Any], *, own: dict[str, Any] | None = None, **rest: Any
) -> tuple[Federation, Transcript, Truth]:
    made = scenario(spec, **rest)
    (federation,) = resolve(made, **(own or {})).federations
    recording = simulate(federation)
    return federation, recording.transcript, recording.truth


def same(a: Transcript, b: Transcript) -> bool:
    pairs = zip(a.rounds, b.rounds, strict=True)
    weights = all(x.weights[n].equal(y.weights[n]) for x, y in pairs for n in x.weights)
    return weights and a.fingerprint() == b.fingerprint()
