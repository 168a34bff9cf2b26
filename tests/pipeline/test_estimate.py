"""How long an audit takes is said beforehand: from a pace that is known, and on a clock that the test turns."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fedaudit.attacks import ATTACKS
from fedaudit.pipeline import estimate, train_generator
from fedaudit.pipeline.estimate import Enough, Pace, _together, audit_seconds, simulation_seconds
from fedaudit.pipeline.prepare import resolve
from fedaudit.scenario.scenario import scenario_from
from tests.conftest import Command

SCENARIO: dict[str, Any] = {
    "data": {"name": "digits"},
    "model": {"name": "lenet", "initialisation": "uniform"},
    "federations": [{"name": "f", "clients": 6, "examples": 6}],
    "attacks": [{"name": "invg", "iterations": 1000}],
    "evaluation": {"controls": False},
}


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def paced(reports: list[tuple[float, float]], limit: float = 0.3) -> tuple[Pace, bool]:
    """Return a pace that saw (done, seconds) and whether it was enough before the last of them."""
    clock = Clock()
    pace = Pace(clock, limit)
    for done, seconds in reports:
        clock.now = 100 + seconds
        try:
            pace(done)
        except Enough:
            return pace, True
    return pace, False


def test_what_is_done_once_only_isn_t_multiplied():
    # 5 s until the first 10, then 10 every 0.1 s: 1000 take 5 s + 99 times 0.1 s
    pace, enough = paced([(10, 5.0), (20, 5.1), (30, 5.2), (40, 5.3), (50, 5.4), (60, 5.5)])
    assert enough
    assert pace.seen[-1][0] < 60
    assert pace.seconds(1000) == pytest.approx(5 + 99 * 0.1)


def test_a_single_report_is_taken_as_it_is():
    pace, enough = paced([(10, 0.2)])
    assert not enough
    assert pace.seconds(50) == pytest.approx(1.0)
    late, enough = paced([(10, 4.5), (20, 9.0)])
    assert enough, "nobody waits for a third one"
    assert late.seconds(40) == pytest.approx(18.0)


def test_processes_share_the_work_but_not_one_trial(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(estimate, "_busy", lambda *_: 1.0)
    start = estimate._WORKERS
    assert _together([3.0, 4.0], 1) == 7
    assert _together([8.0], 4) == 8
    assert _together([8.0, 8.0, 8.0, 8.0], 2) == 16 + start
    assert _together([20.0, 1.0, 1.0], 2) == 20 + start
    assert _together([], 2) == 0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """A clock that only the attack of :func:`ticking` turns: everything else takes no time."""
    turned = Clock()
    monkeypatch.setattr(estimate, "time", SimpleNamespace(perf_counter=turned, process_time=turned))
    monkeypatch.setattr(estimate, "_busy", lambda *_: 1.0)
    return turned


def ticking(monkeypatch: pytest.MonkeyPatch, clock: Clock, seconds: float) -> None:
    """Let every iteration of ``invg`` take so many seconds, and its preparation half a second."""

    def run(self: Any, _observation: Any, _generator: Any, _device: str, progress: Any) -> Any:
        clock.now += 0.5
        for done in range(1, self.iterations + 1):
            clock.now += seconds
            progress(done, self.iterations)
        raise AssertionError("it should have been stopped")

    monkeypatch.setattr(ATTACKS["invg"].value, "_run", run)


def test_an_audit_s_time_is_that_of_its_attacks_times_their_runs(monkeypatch: pytest.MonkeyPatch, clock: Clock):
    ticking(monkeypatch, clock, 0.02)
    one = 0.5 + 1000 * 0.02
    for changes, runs in (({}, 6), ({"evaluation": {"controls": False, "updates": 2}}, 2)):
        around = estimate._AROUND + runs * estimate._FINDING
        assert audit_seconds(resolve(scenario_from({**SCENARIO, **changes}))) == pytest.approx(runs * one + around)
    around = estimate._WORKERS + estimate._AROUND + 6 * estimate._FINDING
    assert audit_seconds(resolve(scenario_from(SCENARIO)), workers=3) == pytest.approx(2 * one + around)


def test_a_simulation_s_time_grows_with_its_rounds():
    spec = {"name": "f", "algorithm": "fedavg", "clients": 4, "examples": 200, "local_epochs": 4}
    few, many = (
        simulation_seconds(resolve(scenario_from({**SCENARIO, "federations": [{**spec, "rounds": rounds}]})))
        for rounds in (100, 10_000)
    )
    assert many / few > 5, "a hundred times as many; a busy machine may stall in one of them"


def test_nothing_is_drawn_from_the_global_generator_and_the_numbers_stay(command: Command, tmp_path):
    state = torch.get_rng_state()
    resolved = resolve(scenario_from({**SCENARIO, "attacks": [{"name": "invg", "iterations": 3}]}))
    before = [p.clone() for p in resolved.federations[0].model.parameters()]
    audit_seconds(resolved)
    assert torch.get_rng_state().equal(state)
    assert all(a.equal(b) for a, b in zip(before, resolved.federations[0].model.parameters(), strict=True))


def test_it_is_said_before_the_first_long_step(command: Command, tmp_path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(estimate, "_AROUND", 60 * 7)
    monkeypatch.setattr(estimate, "_busy", lambda *_: 1.0)
    small = ["--set", "attacks=[{name: invg, iterations: 2}]", "--set", "evaluation.updates=1", "--workers", "1"]
    small += ["--set", "data.name=digits", "--set", "model.name=lenet", "--no-controls"]
    done = command("audit", *small, "--set", "model.width=12", "--out", tmp_path / "a")
    assert done.err.splitlines()[1] == "this will take about 7 min, judging by a short try of each part …"
    again = command("audit", *small, "--set", "model.width=12", "--out", tmp_path / "a")
    assert again.err.splitlines()[1].startswith("this will take at most about 7 min")


def test_a_generator_s_time_is_that_of_its_steps(monkeypatch: pytest.MonkeyPatch):
    turned = Clock()

    class Run:
        done, plan = 0, SimpleNamespace(steps=1000)

        def step(self) -> None:
            self.done += 1
            turned.now += 0.25

    monkeypatch.setattr("time.process_time", turned)
    run: Any = Run()
    assert train_generator._seconds(run) == pytest.approx(250)
    assert run.done < 10
