"""Who asks whether a record was used: what each observer of a simulated federation can run, and what it lacks."""

from __future__ import annotations

import dataclasses
from functools import cache
from typing import Any

import pytest

from fedaudit.attacks import ATTACKS, Finding, make_attack
from fedaudit.pipeline.choice import choose_for
from fedaudit.transcript.observation import Observation, observe
from fedaudit.transcript.transcript import Transcript
from fedaudit.utils.errors import NotApplicable
from fedaudit.utils.seeds import generator
from tests.attacks.membership_cases import PUBLIC, run_attack, scenario
from tests.build import sent

WHO: dict[str, dict[str, Any]] = {"updates": {}, "sum": {"sees": "sum"}, "client": {"adversary": "client"}}
ONE_MODEL = ["loss-threshold", "gradient-norm", "shadow-models", "lira", "rmia"]  # whoever has one can run these


@cache
def seen_by(who: str) -> tuple[Observation, Transcript]:
    """Return what an observer sees; ``final``: who has the last global model alone."""
    if who == "final":
        seen, transcript = seen_by("client")
        return dataclasses.replace(seen, weights=seen.weights[-1:]), transcript
    made = scenario({**PUBLIC, **WHO[who]})
    transcript, _ = sent(made)
    return observe(transcript, made.threat), transcript


def few(name: str) -> dict[str, Any]:
    return {"shadows": 2, "epochs": 2} if name in ("shadow-models", "lira", "rmia") else {}


@pytest.mark.parametrize("name", ONE_MODEL)
def test_one_model_is_enough_and_nothing_else_is_used(name):
    known = run_attack(name, seen_by("final")[0], **few(name))
    for who in WHO:
        assert run_attack(name, seen_by(who)[0], **few(name)).scores.equal(known.scores)


@pytest.mark.parametrize(
    ("name", "settings", "able"),
    [
        ("loss-series", {}, "updates sum client"),
        ("loss-series", {"model": "client"}, "updates"),
        ("loss-threshold", {"model": "client"}, "updates"),
        ("projection-residual", {}, "updates sum"),
        ("fedmia", {}, "updates"),
        ("source-inference", {}, "updates"),
    ],
)
def test_what_needs_more_works_for_those_who_see_it_and_says_why_not_to_others(name, settings, able):
    for who in (*WHO, "final"):
        attack, seen = make_attack(name, settings), seen_by(who)[0]
        if attack.scope() == "client" and seen.messages:
            seen = seen.split("client")[0]
        if who in able.split():
            assert isinstance(attack(seen, generator=generator(0, "attack")), Finding)
        else:
            with pytest.raises(NotApplicable, match=r"sums? of several|sees no update|rounds or more"):
                attack(seen, generator=generator(0, "attack"))


@pytest.mark.parametrize(
    ("who", "best"),
    [
        ("updates", {"fedmia", "rmia", "lira", "projection-residual"}),
        *((one, {"rmia", "lira", "loss-threshold"}) for one in ("sum", "client", "final")),
    ],
)
def test_without_a_name_each_observer_is_offered_the_best_that_it_can_run(who, best):
    seen, transcript = seen_by(who)
    chosen = {spec.name for spec in choose_for(transcript, seen.threat)}
    of_members = {entry.name for entry in ATTACKS if entry.value.recovers == "membership"}
    assert chosen & of_members == best
    assert ("source-inference" in chosen) == (who == "updates")
