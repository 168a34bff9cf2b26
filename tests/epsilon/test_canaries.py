"""Canaries: their directions, what observers read of them, and the verdict on ε."""

from __future__ import annotations

import dataclasses
import math
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy.linalg import hadamard as scipy_hadamard
from scipy.stats import chi2, norm

import fedaudit
from fedaudit.defences.privacy import DifferentialPrivacy, central_noise
from fedaudit.epsilon.canaries import OBSERVERS, Canaries, CanaryRecords, Directions, hadamard
from fedaudit.evaluation import Limits
from fedaudit.pipeline.prepare import resolve
from fedaudit.results import AuditResult
from fedaudit.scenario.scenario import Scenario, scenario_from
from fedaudit.simulation import canary_play
from fedaudit.simulation.budget import PrivacyBudget
from fedaudit.simulation.history import History
from fedaudit.simulation.simulator import simulate
from fedaudit.transcript.observation import observe
from fedaudit.transcript.threat import ThreatModel
from fedaudit.transcript.transcript import Transcript
from fedaudit.transcript.truth import Truth, check_belongs, save_recording
from fedaudit.utils.errors import BadInput, CorruptTranscript
from tests.build import Scenarios
from tests.conftest import Command

SIGMA = 2.5  # over 5 rounds ε = 3.8 at δ = 1e-5
CENTRAL = {"name": "dp", "where": "central", "noise": SIGMA, "epsilon": None}
LOCAL = {**CENTRAL, "where": "local"}
SAMPLE = {**LOCAL, "level": "sample"}
MALICIOUS = {"adversary": "client", "target_records": 4}
FEDERATION = {
    "name": "f", "algorithm": "fedavg", "clients": 4, "rounds": 5, "examples": 40, "batch_size": 10, "local_steps": 1,
    "learning_rate": 0.1,
}  # fmt: skip


_CANARIES = Scenarios(data={"split": "train"}, model={"name": "mlp", "width": 64}, federation=FEDERATION)


def scenario(client_defence: Any = CENTRAL, attack: dict[str, Any] | None = None, **changes: Any) -> Scenario:
    rest = {name: changes.pop(name) for name in ("threat", "defences") if name in changes}
    parts = {"defences": {"client_defence": client_defence}, **rest}
    return _CANARIES(changes, attacks=[{"name": "dp-canaries", "canaries": 1000, **(attack or {})}], **parts)


def simulated(*args: Any, **changes: Any) -> tuple[Any, torch.Tensor]:
    (federation,) = resolve(scenario(*args, **changes)).federations
    made = simulate(federation)
    assert made.transcript.canaries is not None
    return made.transcript.canaries, made.truth.coins


def audited(*args: Any, **changes: Any) -> Any:
    return fedaudit.audit(scenario(*args, **changes)).result


def close_to(values: torch.Tensor, mean: float, sd: float) -> None:
    """Check mean and variance of normal values: each may be off by luck once in a million."""
    n = values.numel()
    assert abs(float(values.mean()) - mean) < norm.isf(5e-7) * sd / math.sqrt(n)
    low, high = chi2.ppf([5e-7, 1 - 5e-7], n - 1) / (n - 1)
    assert low < float(values.var()) / sd**2 < high


# --- directions -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [0, 1, 5, 9])
def test_the_transform_is_the_hadamard_matrix(bits):
    vector = torch.randn(2**bits, generator=torch.Generator().manual_seed(bits))
    expected = torch.from_numpy(scipy_hadamard(2**bits)).float() @ vector
    torch.testing.assert_close(hadamard(vector), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("count", "size"), [(100, 1000), (64, 64), (30, 20)])
def test_directions_are_unit_vectors_that_dont_disturb_each_other(count, size):
    directions = Directions(3, count, size)
    rows = torch.stack([directions.one(j) for j in range(count)])
    products = rows @ rows.T
    torch.testing.assert_close(products.diagonal(), torch.ones(count))
    off = products - torch.eye(count)
    assert float(off.abs().max()) < (1e-6 if count <= size else 1)
    vector, weights = torch.randn(size), torch.randn(count)
    torch.testing.assert_close(directions.project(vector), (rows @ vector).double(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(directions.combine(weights), weights @ rows, rtol=1e-4, atol=1e-5)
    assert not Directions(4, count, size).one(0).equal(rows[0])


# --- what observers read --------------------------------------------------------------------------------------------


def test_central_noise_hides_canaries_from_those_who_see_the_models_alone():
    canaries, coins = simulated()
    assert canaries.readings["updates"].equal(coins.double().expand(5, -1))
    # the honest updates' part in a sum of 4 of norm 1 at most, and none of the other canaries'
    total = canaries.readings["sum"] - coins.double()
    assert float(total.std()) < 4 / math.sqrt(4096)
    close_to((canaries.readings["models"] - coins.double())[:, :800], 0.0, SIGMA)
    assert canaries.covered == ("models", "final")
    mu = math.sqrt(5) / SIGMA
    delta = norm.cdf(mu / 2 - canaries.claimed / mu) - math.exp(canaries.claimed) * norm.cdf(
        -mu / 2 - canaries.claimed / mu
    )
    assert delta == pytest.approx(1e-5, rel=0.05)  # the account is that of the Gaussian mechanism


def test_local_noise_hides_a_canary_from_everybody_each_with_noise_of_its_own():
    canaries, coins = simulated(LOCAL, {"canaries": 200})
    close_to(canaries.readings["updates"] - coins.double(), 0.0, SIGMA)
    close_to(canaries.readings["models"] - coins.double(), 0.0, SIGMA * math.sqrt(4 + 200))
    assert canaries.noise["models"] == pytest.approx(SIGMA * math.sqrt(204))
    assert canaries.covered == tuple(OBSERVERS)


def test_records_ride_along_as_often_as_examples_do():
    # 10 examples a client in batches of 5: each record takes part in one of two steps
    canaries, coins = simulated(SAMPLE, {"canaries": 400}, batch_size=5, rounds=6)
    readings = canaries.readings["updates"]
    assert canaries.unit == "record"
    assert canaries.rates["updates"] == 0.5
    pairs = readings.view(3, 2, -1).sum(dim=1)  # both steps of a pass
    close_to(pairs[:, coins], 1.0, SIGMA * math.sqrt(2))
    close_to(pairs[:, ~coins], 0.0, SIGMA * math.sqrt(2))
    # one of the two steps has it: beside the noise there is the variance of a fair coin
    assert float((readings[0] - readings[1])[coins].var()) > 2 * SIGMA**2


def test_a_pass_takes_every_record_along_once():
    records = CanaryRecords(Directions(0, 9, 50), [0, 3, 6], torch.ones(9), torch.Generator().manual_seed(0))
    drawn = [records.places([4, 4, 2]) for _ in range(300)]
    assert all(sorted(number for riding in places for number in riding) == [0, 3, 6] for places in drawn)
    last = sum(6 in places[2] for places in drawn)
    assert 30 < last < 90  # a fifth of 300: the last batch is half as large


def test_what_canaries_send_at_once_is_what_they_send_one_by_one(monkeypatch):
    (federation,) = resolve(scenario(attack={"canaries": 30})).federations
    made: list[Any] = [simulate(federation)]

    class Single(canary_play.CanaryPlay):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self.at_once = False
            self.senders = [self.federation.defences.client_defence.anew() for _ in range(30)]
            self.generators = [torch.Generator() for _ in range(30)]

    monkeypatch.setattr("fedaudit.simulation.horizontal.CanaryPlay", Single)
    made.append(simulate(federation))
    for name in OBSERVERS:
        a, b = (one.transcript.canaries.readings[name] for one in made if one.transcript.canaries)
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)


def test_joint_noise_is_distributed_as_noise_of_each():
    joint = {"canaries": 3, "noise": "joint"}
    (federation,) = resolve(scenario(LOCAL, joint)).federations
    play = canary_play.CanaryPlay(federation, PrivacyBudget(federation, History()))
    here, n = torch.tensor([True, False, True]), 3000
    drawn = [play._noisy(here) for _ in range(n)]
    rows = torch.stack([play.directions.one(j) for j in range(3)])
    seen = torch.stack([torch.cat([(rows @ total).double(), own[here]]) for total, own in drawn])
    # of two updates z_0 and z_2: their sum along each direction, and what is read of each
    expected = torch.tensor([[2, 0, 0, 1, 0], [0, 2, 0, 0, 0], [0, 0, 2, 0, 1], [1, 0, 0, 1, 0], [0, 0, 1, 0, 1]])
    covariance = (seen / SIGMA).T @ (seen / SIGMA) / n
    torch.testing.assert_close(covariance, expected.double(), rtol=0, atol=5 * 2 * math.sqrt(2 / n))
    assert play._noisy(torch.zeros(3, dtype=torch.bool))[0].norm() == 0


def test_joint_noise_is_said_and_shows_what_noise_of_each_does():
    result = audited(LOCAL, {"canaries": 400, "noise": "joint", "observer": "updates"})
    found = result.findings[0].epsilon
    assert found.joint_noise
    assert "wasn't audited" in result.summaries[0].verdict_text
    assert 1 < found.demonstrated < found.claimed  # of noise of each: 1.7 to 3.4, by the seed
    canaries, coins = simulated(LOCAL, {"canaries": 400, "noise": "joint"})
    close_to(canaries.readings["updates"] - coins.double(), 0.0, SIGMA)
    close_to(canaries.readings["models"] - coins.double(), 0.0, SIGMA * math.sqrt(404))
    sampled, _ = simulated(LOCAL, {"canaries": 400, "noise": "joint"}, clients_per_round=2)
    assert bool(sampled.readings["updates"].isnan().any())


@pytest.mark.parametrize(
    ("client_defence", "changes"),
    [(SAMPLE, {}), (LOCAL, {"defences": {"aggregator": "median", "client_defence": LOCAL}}), ({"name": "sign"}, {})],
)
def test_joint_noise_is_refused_where_one_draw_cant_stand_for_many(client_defence, changes):
    with pytest.raises(BadInput, match="noise: each"):
        simulated(client_defence, {"canaries": 20, "noise": "joint"}, **changes)


def test_malicious_clients_have_no_canaries():
    canaries, coins = simulated(SAMPLE, {"canaries": 90}, malicious={"name": "agrevader", "start": 1}, threat=MALICIOUS)
    assert set(canaries.readings) == set(OBSERVERS)
    assert not bool(canaries.readings["updates"].isnan().any())
    close_to(canaries.readings["updates"][:, ~coins], 0.0, SIGMA)


def test_there_may_be_fewer_canaries_than_clients():
    canaries, _ = simulated(SAMPLE, {"canaries": 2})
    assert canaries.readings["updates"].shape == (5, 2)


def test_any_rule_may_aggregate_canaries():
    canaries, coins = simulated(LOCAL, {"canaries": 20}, defences={"aggregator": "median", "client_defence": LOCAL})
    close_to(canaries.readings["updates"] - coins.double(), 0.0, SIGMA)
    assert canaries.readings["models"].shape == (5, 20)


def test_an_absent_canary_that_is_replaced_sends_the_opposite():
    canaries, coins = simulated(CENTRAL, {"adjacency": "replace", "canaries": 50})
    assert canaries.readings["updates"][0].equal(torch.where(coins, 1.0, -1.0).double())
    added, _ = simulated({**CENTRAL, "noise": SIGMA / 2}, {"canaries": 50})
    assert canaries.claimed == added.claimed  # twice the sensitivity is half the noise


def test_a_client_reads_global_models_alone():
    (federation,) = resolve(scenario(attack={"canaries": 20})).federations
    transcript: Any = simulate(federation).transcript
    seen: list[Any] = [observe(transcript, ThreatModel(adversary=who)).canaries for who in ("client", "eavesdropper")]
    assert [set(canaries.readings) for canaries in seen] == [{"models", "final"}, set(OBSERVERS)]


def test_by_chance_the_score_is_the_likelihood_ratio():
    # one round in which a canary is there with probability 1/4, and one in which nothing was seen
    readings = torch.tensor([[0.3, 2.0], [-1.0, torch.nan]], dtype=torch.float64)
    canaries = Canaries("client", "add-remove", {"models": readings}, noise={"models": 0.5}, rates={"models": 0.25})
    density = torch.distributions.Normal(
        torch.tensor([0.0, 1.0], dtype=torch.float64), 0.5, validate_args=False
    ).log_prob(readings[:, :, None])
    there = density[..., 1].exp()
    expected = ((0.75 * density[..., 0].exp() + 0.25 * there) / density[..., 0].exp()).log().nansum(dim=0)
    torch.testing.assert_close(canaries.scores("models"), expected)


# --- the verdict ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sound() -> fedaudit.Audit:
    return fedaudit.audit(scenario())


def test_a_sound_federation_keeps_its_promise(sound):
    result = sound.result
    (summary,) = result.summaries
    found = result.findings[0].epsilon
    assert found is not None
    assert summary.verdict == "not demonstrated"
    assert found.claimed is not None
    assert 1 < found.demonstrated < found.claimed < found.attainable
    assert result.controls[0].won
    by = {one.observer: one for one in found.observers}
    assert [by[name].covered for name in OBSERVERS] == [False, False, True, True]
    assert by["updates"].demonstrated > 8 > by["models"].demonstrated  # the server sees all before its noise
    assert found.demonstrated == by["models"].demonstrated
    assert {bound.confidence for bound in by["models"].bounds} == {0.975}  # two observers share the 5 %
    beyond = max(one.demonstrated for one in found.observers if not one.covered)
    assert f"the claim doesn't cover the server that sees every update, to whom {beyond:.3g}" in summary.verdict_text


def test_noise_divided_once_too_often_breaks_the_promise(monkeypatch):
    def divided(dp: DifferentialPrivacy, clients: int, batch: int) -> float:
        return central_noise(dp, clients, batch) / 4

    monkeypatch.setattr("fedaudit.simulation.budget.central_noise", divided)
    result = audited()
    assert result.summaries[0].verdict == "inferred"
    assert "promise is broken" in result.summaries[0].headline


@pytest.mark.slow
def test_clipping_that_isnt_done_breaks_the_promise(monkeypatch):
    def unclipped(self, update, context, generator):
        noisy = {
            n: t + self.noise * self.clip * torch.randn(t.shape, generator=generator) for n, t in update.tensors.items()
        }
        return dataclasses.replace(update, tensors=noisy)

    monkeypatch.setattr(DifferentialPrivacy, "__call__", unclipped)
    result = audited(LOCAL, {"canaries": 300})
    assert result.summaries[0].verdict == "inferred"


def test_canaries_that_are_too_few_conclude_nothing():
    summary = audited(attack={"canaries": 30}).summaries[0]
    assert summary.verdict == "inconclusive"
    assert "use more canaries" in summary.advice[0]


def test_a_framework_s_own_noise_is_a_promise_against_everybody():
    mod = {"name": "local-dp", "clipping_norm": 0.5, "sensitivity": 1.0, "epsilon": 2.0, "delta": 1e-5}
    canaries, coins = simulated(mod, {"canaries": 300}, rounds=2)
    sigma = math.sqrt(2 * math.log(1.25e5)) / 2 / 0.5  # Dwork & Roth's, in clips
    assert canaries.covered == ("updates", "sum", "models", "final")
    assert canaries.noise["updates"] == pytest.approx(sigma)
    close_to(canaries.readings["updates"] - coins.double(), 0.0, sigma)
    mu = math.sqrt(2) / sigma  # present or absent: a clip apart
    e = canaries.claimed
    assert norm.cdf(mu / 2 - e / mu) - math.exp(e) * norm.cdf(-mu / 2 - e / mu) == pytest.approx(1e-5, rel=0.05)


def test_canaries_that_are_too_few_conclude_nothing_without_a_promise_either():
    summary = audited("none", {"canaries": 4}).summaries[0]
    assert summary.verdict == "inconclusive"
    assert summary.advice == ["use more canaries: 4 canaries could show an ε of 0 at most"]


@pytest.mark.slow
def test_without_a_promise_anything_shown_is_a_leak():
    result = audited("none", {"canaries": 200})
    assert result.findings[0].epsilon.claimed is None
    assert result.summaries[0].verdict == "inferred"


@pytest.mark.parametrize(("limit", "outcome"), [(1.0, "fail"), (2.5, "pass"), (99.0, "not tested")])
def test_a_limit_is_held_to_what_is_demonstrated(limit, outcome, sound):
    made = sound.held_to(Limits({"epsilon": limit}))
    assert [row.outcome for row in made.result.thresholds] == [outcome]


def test_other_attacks_would_see_another_federation():
    values = scenario().model_dump(mode="json")
    with pytest.raises(BadInput, match="a scenario of its own"):
        resolve(scenario_from({**values, "attacks": ["dp-canaries", "invg"]}))


# --- on disk --------------------------------------------------------------------------------------------------------


def test_canaries_survive_the_disk_and_their_coins_stay_with_the_truth(tmp_path: Path):
    (federation,) = resolve(scenario(attack={"canaries": 20})).federations
    made: Any = simulate(federation)
    save_recording(made.transcript, made.truth, tmp_path / "t")
    read, truth = Transcript.load(tmp_path / "t"), Truth.load(tmp_path / "t" / "truth.safetensors")
    check_belongs(truth, read, tmp_path)
    assert truth.coins.equal(made.truth.coins)
    assert read.canaries is not None
    assert {k: v for k, v in vars(read.canaries).items() if k != "readings"} == {
        k: v for k, v in vars(made.transcript.canaries).items() if k != "readings"
    }
    assert all(read.canaries.readings[n].equal(v) for n, v in made.transcript.canaries.readings.items())
    assert read.digest() == made.transcript.digest()
    with pytest.raises(CorruptTranscript, match="20 canaries"):
        check_belongs(dataclasses.replace(truth, coins=truth.coins[:-1]), read, tmp_path)


def test_a_simulation_with_canaries_goes_on_where_it_was_killed(tmp_path: Path):
    for client_defence in (LOCAL, SAMPLE):
        made = scenario(client_defence, {"canaries": 20}, clients_per_round=2, batch_size=3)
        (federation,) = resolve(made).federations
        whole: Any = simulate(federation).transcript

        def stop(done: float) -> None:
            if done >= 6:
                raise KeyboardInterrupt

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("fedaudit.simulation.checkpoint.EVERY", 0.0)
            with pytest.raises(KeyboardInterrupt):
                simulate(federation, checkpoint=tmp_path / "kept", report=stop)
            again: Any = simulate(federation, checkpoint=tmp_path / "kept").transcript
        (tmp_path / "kept").unlink()
        for name, readings in whole.canaries.readings.items():
            torch.testing.assert_close(again.canaries.readings[name], readings, rtol=0, atol=0, equal_nan=True)


@pytest.mark.slow
def test_the_example_keeps_to_its_limit_within_two_minutes(command: Command, tmp_path: Path):
    began = time.monotonic()
    example = Path(__file__).parents[2] / "examples" / "epsilon.yaml"
    done = command("audit", example, "--out", tmp_path, "--workers", "1", "--fail-above", "epsilon=4")
    assert (done.code, "PASS: epsilon at most 4" in done.out) == (0, True)
    assert time.monotonic() - began < 120
    page = (tmp_path / "report.html").read_text()
    assert "Which ε is real" in page
    assert "whoever guesses from the outcome" in page
    assert "nobody who sees global models alone can pick the right one" in page
    found = AuditResult.load(tmp_path / "results.json").findings[0].epsilon
    assert found is not None
    assert found.claimed == pytest.approx(4, abs=0.01)
    assert command("audit", example, "--out", tmp_path, "--workers", "1", "--fail-above", "epsilon=99").code == 3
