"""Long federations that a study's process has simulated are taken again for the next attack on them."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest

from fedaudit.attacks.records.shadows import ShadowModel
from fedaudit.pipeline import Trained, training_once
from fedaudit.pipeline import run as pipeline
from fedaudit.pipeline.prepare import resolve
from fedaudit.simulation.simulator import simulate
from tests.attacks.membership_cases import scenario


@pytest.fixture
def simulated(monkeypatch):
    made: list[str] = []

    def counted(federation, **options):
        made.append(federation.name)
        return simulate(federation, **options)

    monkeypatch.setattr(pipeline, "simulate", counted)
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


def test_what_was_trained_ends_with_the_block_or_is_the_callers(simulated):
    long, kept = resolve(scenario(rounds=12)), Trained()
    for block in (training_once(), training_once(kept), training_once(kept), training_once()):
        with block:
            pipeline.record(long)
            with training_once():  # a block inside another takes what that has
                pipeline.record(long)
    assert len(simulated) == 3
    assert len(kept.recordings) == 1


def test_a_recording_is_freed_when_the_block_ends():
    with training_once():
        (made,) = pipeline.record(resolve(scenario(rounds=12)))
        held = weakref.ref(made.transcript.rounds[-1].updates[0])
        del made
        gc.collect()
        assert held() is not None
    gc.collect()
    assert held() is None


def test_shadow_models_are_trained_once_for_several_federations(monkeypatch):
    trained: list[int] = []
    train = ShadowModel._trained

    def counted(self: ShadowModel, *rest: Any) -> Any:
        trained.append(self.index)
        return train(self, *rest)

    monkeypatch.setattr(ShadowModel, "_trained", counted)
    threat = {"knows_public_data": True, "public_examples": 40}
    attack = {"name": "lira", "shadows": 2, "epochs": 1}

    def areas(**federation) -> list[float]:
        made = scenario(threat, [attack], **federation)
        made = made.model_copy(update={"evaluation": made.evaluation.model_copy(update={"controls": False})})
        audit = pipeline.run_audit(made, checkpoints=False)
        return [m.value for m in audit.result.findings[0].metrics]

    alone = areas(learning_rate=0.2)
    with training_once():
        areas()
        again = areas(learning_rate=0.2)
    assert again == alone
    assert trained == [0, 1] * 2
