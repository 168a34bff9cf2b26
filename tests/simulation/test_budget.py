"""A privacy budget: who may still send, and what happens when few or none may."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import dp_accounting
import pytest
from dp_accounting import pld, rdp

from fedaudit.epsilon.accounting import Account
from fedaudit.pipeline.prepare import resolve
from fedaudit.pipeline.run import run_audit
from fedaudit.simulation.budget import PrivacyBudget
from fedaudit.simulation.history import History
from fedaudit.simulation.simulator import simulate
from tests.build import with_history
from tests.simulation.federation_cases import same, scenario

DP = {"name": "dp", "noise": 1.0, "epsilon": 8.0}
ALLOWED = Account(1.0, 1e-5, 1.0, 1).rounds(8.0)
ONE = [{"name": "invg", "iterations": 1}]
SAMPLED = {"clients": 10, "clients_per_round": 1, "examples": 20, "rounds": 30}


@pytest.mark.parametrize(("per_round", "rounds"), [(1, 30), (3, 30), (10, 30), (3, 6)])
def test_the_federation_goes_on_while_any_client_may_send(per_round: int, rounds: int) -> None:
    made = scenario({**SAMPLED, "clients_per_round": per_round, "rounds": rounds}, defences={"client_defence": DP})
    _, history = with_history(made)
    sent = [client for round_ in history.sent for client in round_]
    counts = {client: sent.count(client) for client in range(10)}
    assert ALLOWED >= 1
    assert max(counts.values()) <= ALLOWED
    most = rdp.RdpAccountant().compose(dp_accounting.GaussianDpEvent(1.0), max(counts.values()))
    assert history.epsilon[-1] == pytest.approx(most.get_epsilon(1e-5), rel=0.02)
    if history.stopped is None:
        assert len(history.sent) == rounds
    else:
        assert set(counts.values()) == {ALLOWED}
        assert history.why == "the privacy budget was spent"
    assert len(history.sent) >= min(rounds, math.ceil(10 * ALLOWED / per_round))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("local", "steps"), [({"local_steps": 2}, 2), ({"local_epochs": 1}, 3)], ids=["2 steps", "a pass over 7 by 3"]
)
@pytest.mark.parametrize("sampling", ["drawn", pytest.param("poisson", marks=pytest.mark.slow)])
def test_the_account_is_that_of_whoever_is_drawn_most_often(local: dict[str, int], steps: int, sampling: str) -> None:
    """Of 13 examples one client has 7 and the other 6: two batches of 3, or a rate of 1/2. Oracle: dp-accounting."""
    spec = {"clients": 2, "examples": 13, "batch_size": 3, "rounds": 4, "algorithm": "fedavg", **local}
    dp = {**DP, "level": "sample", "noise": 2.0, "epsilon": None, "sampling": sampling}
    made = scenario(spec, defences={"client_defence": dp})
    _, history = with_history(made)
    event, times = dp_accounting.GaussianDpEvent(2.0), 4  # passes: 8 steps of two a pass, or one a round
    if sampling == "poisson":
        event, times = dp_accounting.PoissonSampledDpEvent(1 / 2, event), 4 * steps
    tight, renyi = (one.compose(event, times).get_epsilon(1e-5) for one in (pld.PLDAccountant(), rdp.RdpAccountant()))
    assert history.epsilon_pld == pytest.approx(tight, rel=1e-3)
    assert history.epsilon[-1] == pytest.approx(renyi, rel=0.02)


@pytest.mark.slow
def test_the_account_s_passes_are_those_that_are_made() -> None:
    """No example is used more often than the account reckons with, and one is as often."""
    for local, rounds in (({"local_steps": 2}, 5), ({"local_epochs": 2}, 2)):
        spec = {"clients": 2, "examples": 13, "batch_size": 3, "rounds": rounds, "algorithm": "fedavg", **local}
        dp = {**DP, "level": "sample", "epsilon": None}
        (federation,) = resolve(scenario(spec, defences={"client_defence": dp})).federations
        recording = simulate(federation)
        assert recording.truth is not None
        used = Counter((key[1], int(row)) for key, rows in recording.truth.rows.items() for row in rows)
        kept = PrivacyBudget(federation, History(None, 0)).account
        assert isinstance(kept, Account)
        assert max(used.values()) == math.ceil(kept.steps * rounds / kept.every)


def test_who_is_drawn_is_the_same_as_without_a_budget_until_somebody_is_stopped() -> None:
    spec = {**SAMPLED, "clients_per_round": 4, "rounds": ALLOWED}
    _, limited = with_history(scenario(spec, defences={"client_defence": DP}))
    free, unlimited = with_history(scenario(spec, defences={"client_defence": {**DP, "epsilon": None}}))
    assert limited.sent == unlimited.sent
    assert same(with_history(scenario(spec, defences={"client_defence": DP}))[0], free)


@pytest.mark.slow
def test_where_too_few_are_left_for_the_rule_the_federation_ends_and_is_kept() -> None:
    defences: dict[str, Any] = {"client_defence": DP, "aggregator": "krum"}
    made = scenario({**SAMPLED, "clients": 6, "clients_per_round": 5}, defences=defences, attacks=ONE)
    federation = run_audit(made).result.federations[0]
    history = federation.history
    assert history is not None
    assert history.stopped is not None
    assert history.stopped >= ALLOWED
    assert history.why_stopped is not None
    assert "'krum' needs n >= 2f + 3 with f = 1: 5 updates a round" in history.why_stopped
    assert f"rounds (then {history.why_stopped}" in federation.description


def test_next_to_no_noise_ends_in_a_number() -> None:
    """Its losses are beyond what exp() can hold: then Rényi's bound stands."""
    account = Account(1e-4, 1e-5, 1.0, 1)
    assert account.spent(1, "pld") == account.spent(1, "rdp") > 1e7
