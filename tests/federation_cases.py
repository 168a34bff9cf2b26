"""What the tests on simulations share: a scenario of one federation, its run, and whether two are the same."""

from __future__ import annotations

from typing import Any

from fedaudit.federation.participant import Federation
from fedaudit.federation.simulator import simulate
from fedaudit.federation.transcript import Transcript
from fedaudit.federation.truth import Truth
from fedaudit.preparation import prepare_federation, resolve
from fedaudit.scenario import Scenario, scenario_from

MLP = {"name": "mlp", "width": 8}


def scenario(spec: dict[str, Any], **rest: Any) -> Scenario:
    values = {"data": {"name": "digits"}, "model": MLP, "attacks": ["invg"], **rest}
    return resolve(scenario_from({**values, "federations": [{"name": "fed", **spec}]}))


def run(
    spec: dict[str, Any], *, own: dict[str, Any] | None = None, **rest: Any
) -> tuple[Federation, Transcript, Truth]:
    made = scenario(spec, **rest)
    federation, _, _ = prepare_federation(made, **(own or {}))
    return federation, *simulate(federation, made.federations[0], made.defences, seed=made.seed)


def same(a: Transcript, b: Transcript) -> bool:
    pairs = zip(a.rounds, b.rounds, strict=True)
    weights = all(x.weights[n].equal(y.weights[n]) for x, y in pairs for n in x.weights)
    return weights and a.fingerprint() == b.fingerprint()
