"""What computes past its time is interrupted, and what has ended in time isn't."""

from __future__ import annotations

import itertools
import threading
import time
from typing import Any

import pytest

from fedaudit.attacks import InvG
from fedaudit.evaluation.limits import TIME_IS_UP
from fedaudit.pipeline.trials import Means, Trial, run_trials
from fedaudit.utils.errors import OutOfTime
from fedaudit.utils.machine import interrupted
from tests.build import Scenarios, seen


def test_what_says_nothing_is_interrupted_in_its_time() -> None:
    began = time.time()
    with pytest.raises(OutOfTime), interrupted(began + 0.2, OutOfTime):
        for _ in itertools.count():
            pass
    assert 0.1 < time.time() - began < 30


@pytest.mark.parametrize("at", [None, 0.1])
def test_what_has_ended_isnt(at: float | None) -> None:
    with interrupted(None if at is None else time.time() + at, OutOfTime):
        pass
    time.sleep(0.2)
    assert not any(isinstance(thread, threading.Timer) for thread in threading.enumerate())


def test_an_attack_that_reports_nothing_ends_with_the_time(monkeypatch: Any) -> None:
    observation, _ = seen(Scenarios(attacks="invg")())
    (one, *_) = observation.split()

    def endless(*_: Any, **__: Any) -> None:
        for _i in itertools.count():
            pass

    monkeypatch.setattr("fedaudit.pipeline.trials._GRACE", 0.1)
    monkeypatch.setattr(InvG, "_run", endless)
    (done,) = run_trials([Trial(InvG(iterations=1), one, 0, "cpu")], Means(deadline=time.time() + 0.5))
    assert isinstance(done.outcome, OutOfTime)
    assert str(done.outcome) == TIME_IS_UP
