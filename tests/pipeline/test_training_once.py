"""Long federations that a study's process has simulated are taken again for the next attack on them."""

from __future__ import annotations

import pytest

from fedaudit.pipeline import run as pipeline
from fedaudit.pipeline import training_once
from fedaudit.pipeline.prepare import resolve
from tests.attacks.membership_cases import scenario


@pytest.fixture
def simulated(monkeypatch):
    made: list[str] = []
    simulate = pipeline.simulate

    def counted(federation, **options):
        made.append(federation.name)
        return simulate(federation, **options)

    monkeypatch.setattr(pipeline, "simulate", counted)
    monkeypatch.setattr(pipeline, "_last", {})
    return made


def test_another_attack_takes_the_same_federation_again(simulated):
    first, second = (resolve(scenario(attacks=[name], rounds=12)) for name in ("loss-threshold", "gradient-norm"))
    (alone,) = pipeline.record(second)
    with training_once():
        pipeline.record(first)
        (again,) = pipeline.record(second)
    assert len(simulated) == 2
    assert again.truth.about == alone.truth.about
    pairs = zip(again.transcript.rounds[-1].updates, alone.transcript.rounds[-1].updates, strict=True)
    assert all(t.equal(other.tensors[name]) for one, other in pairs for name, t in one.tensors.items())


def test_another_federation_or_a_short_one_is_simulated(simulated):
    with training_once():
        for rounds, rate in ((12, 0.1), (12, 0.2), (12, 0.1), (2, 0.1), (2, 0.1)):
            pipeline.record(resolve(scenario(rounds=rounds, learning_rate=rate)))
    assert len(simulated) == 5
