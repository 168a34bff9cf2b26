"""The clients of a round can take their turns in worker processes: the bits stay the same."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from fedaudit.pipeline.prepare import resolve
from fedaudit.scenario.scenario import Scenario
from fedaudit.simulation import horizontal
from fedaudit.simulation import worker_pool as pool
from fedaudit.simulation.client import Client
from fedaudit.simulation.history import History
from fedaudit.simulation.simulator import simulate
from fedaudit.transcript.transcript import Transcript
from tests.simulation.federation_cases import add_counting
from tests.simulation.test_checkpoint import DEFENCES, same, scenario

pytestmark = pytest.mark.usefixtures("kept_workers")

COUNTS = "a user's own that counts"
GAN = {"name": "gan", "clients": 2, "start": 1, "steps": 2, "images": 4, "every": 1, "keep": 2, "missing_classes": [3]}


def simulated(made: Scenario, workers: int) -> tuple[Transcript, History, list[float]]:
    (federation,) = resolve(made).federations
    told = list[float]()
    recording = simulate(
        dataclasses.replace(federation, accuracy_every=2, accuracy_examples=50), report=told.append, workers=workers
    )
    assert recording.history is not None
    return recording.transcript, recording.history, told


@pytest.mark.parametrize(
    ("defences", "changes"),
    [
        pytest.param(DEFENCES[COUNTS], {}, id=COUNTS),
        *[
            pytest.param(DEFENCES[name], {}, id=name, marks=pytest.mark.slow)
            for name in ("dgc", "ffl at random", "local privacy")
        ],
        pytest.param(
            {"aggregator": {"name": "fltrust", "root_examples": 8}},
            {"malicious": GAN},
            id="malicious",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_any_number_of_workers_gives_the_same_bits(
    monkeypatch: pytest.MonkeyPatch, defences: dict[str, Any], changes: dict[str, Any]
) -> None:
    add_counting(monkeypatch)
    made = scenario(defences, rounds=3, **changes)
    alone, history, _ = simulated(made, 1)
    monkeypatch.setattr(horizontal, "_WORTH", -1.0)  # processes from the first round on
    taken: list[int] = []
    step = pool._step

    def counted(client: Client, *rest: Any) -> Any:
        taken.append(client.number)
        return step(client, *rest)

    monkeypatch.setattr(pool, "_step", counted)
    shared, other, told = simulated(made, 2)
    assert not [number for number in taken if number < made.federations[0].honest]  # of the honest none here
    assert shared.fingerprint() == alone.fingerprint()
    assert same(shared.adversary_log, alone.adversary_log)
    for field in ("accuracy", "per_client", "bytes", "parameters", "sent", "rejected", "epsilon"):
        assert getattr(history, field) == getattr(other, field), field
    assert told == sorted(told)
    assert told[-1] == 9


def test_short_rounds_stay_in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "run_tasks", lambda *_, **__: pytest.fail("processes for a simulation of a second"))
    simulated(scenario({}), 2)
