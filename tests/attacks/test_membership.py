"""Membership inference: what attacks make of records, and how that is judged."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from fedaudit.attacks import Finding, MembershipFinding, make_attack
from fedaudit.evaluation import evaluate, summarise
from fedaudit.evaluation.statistics import auc, roc, tpr_at
from fedaudit.pipeline.run import run_audit
from fedaudit.pipeline.trials import Trial
from fedaudit.scenario.scenario import scenario_from
from fedaudit.transcript.observation import Observation, observe
from fedaudit.transcript.queries import QuerySet
from fedaudit.transcript.threat import ThreatModel
from fedaudit.transcript.truth import Truth
from fedaudit.utils.seeds import generator
from tests.attacks.membership_cases import PUBLIC, logistic, run_attack, scenario
from tests.build import sent
from tests.conftest import Command


def metrics(found: Finding, seen: Observation, truth: Truth) -> dict[str, float]:
    return {m.name: m.value for m in evaluate(found, seen, truth, seed=0).result.metrics}


# Attacks -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("which", ["global", "client"])
def test_scores_are_the_loss_and_the_gradient_s_norm(which):
    seen = logistic()
    assert seen.records is not None
    state = seen.weights[0]
    if which == "client":
        state = {name: t + seen.messages[0].update.tensors[name] for name, t in state.items()}
    x, y = seen.records.inputs.double(), seen.records.labels
    p = (x @ state["weight"].double().T + state["bias"].double()).softmax(dim=1)
    losses = -p[torch.arange(len(x)), y].log()
    error = p - nn.functional.one_hot(y, 3)
    norms = error.norm(dim=1) * (x.square().sum(dim=1) + 1).sqrt()  # of the outer product of error and (x, 1)
    by_loss, by_norm = run_attack("loss-threshold", seen, model=which), run_attack("gradient-norm", seen, model=which)
    assert torch.allclose(by_loss.scores, -losses, atol=1e-5)
    assert torch.allclose(by_norm.scores, -norms, atol=1e-5)
    assert by_loss.members.equal(losses < losses.quantile(0.5))
    assert int(by_loss.members.sum()) == 6


def test_public_examples_can_set_the_threshold():
    seen = logistic()
    assert seen.records is not None
    x, y = seen.records.inputs, seen.records.labels
    seen = dataclasses.replace(seen, records=QuerySet(x, y, x[:8] + 1, y[:8]))
    found = run_attack("loss-threshold", seen, false_positives=0.25)
    non_members = run_attack(
        "loss-threshold", dataclasses.replace(seen, records=QuerySet(x[:8] + 1, y[:8], x[:0], y[:0]))
    )
    assert found.members.equal(found.scores > non_members.scores.quantile(0.75))
    assert int((non_members.scores > non_members.scores.quantile(0.75)).sum()) == 2


def test_the_rebuilt_model_is_the_one_that_local_model_rebuilds():
    transcript, _ = sent(scenario(rounds=6, clients_per_round=2))
    rebuild = {"name": "local-model", "mapping": "linear"}
    (seen, *_) = observe(transcript, ThreatModel(target_records=60)).split("client")
    found = run_attack("loss-threshold", seen, model="rebuilt", rebuild=rebuild)
    state: Any = make_attack("local-model", {"mapping": "linear"})(seen, generator=generator(0, "x"))
    shown = dataclasses.replace(seen, weights=({**seen.weights[-1], **state.state},))
    assert found.scores.equal(run_attack("loss-threshold", shown).scores)
    assert found.notes == state.notes


def test_one_client_s_model_is_judged_by_that_client_s_records():
    finished = run_audit(scenario(attacks=[{"name": "loss-threshold", "model": "client"}], rounds=20, examples=60))
    findings = finished.result.findings
    assert [f.client for f in findings] == [0, 1, 2, 3]
    counted = [(f.metrics[0].n or 0) // 2 for f in findings]
    assert sum(counted) == 30
    assert all(f"{30 - n} pairs of records were left out" in f.notes[0] for f, n in zip(findings, counted, strict=True))


def test_a_client_without_a_record_says_so():
    transcript, truth = sent(scenario())
    truth = dataclasses.replace(truth, owners=torch.where(truth.owners >= 0, 1, truth.owners))
    seen = observe(transcript, ThreatModel(target_records=60)).split("client")[0]
    result = evaluate(run_attack("loss-threshold", seen, model="client"), seen, truth, seed=0).result
    assert result.status == "not applicable"
    assert "none of the 60 records" in (result.reason or "")


def test_a_trial_is_keyed_by_its_records_and_adversary_log():
    transcript, _ = sent(scenario())
    seen = observe(transcript, ThreatModel(target_records=60))
    assert seen.records is not None
    other = dataclasses.replace(seen, records=dataclasses.replace(seen.records, inputs=seen.records.inputs + 1))
    noted = dataclasses.replace(seen, adversary_log={"x": torch.zeros(1)})
    keys = {Trial(make_attack("loss-threshold"), s, 0, "cpu").key() for s in (seen, other, noted)}
    assert len(keys) == 3


def test_who_reads_sums_is_asked_about_all_clients_in_them():
    values = scenario({"sees": "sum"}, rounds=3).model_dump(mode="json")
    summed, each = (
        run_audit(scenario_from({**values, "threat": {**values["threat"], "sees": sees}})).result.findings[0]
        for sees in ("sum", "updates")
    )
    counts = [{m.name: (m.value, m.n) for m in finding.metrics} for finding in (summed, each)]
    assert counts[0] == counts[1]
    assert counts[0]["membership_auc"][1] == 60


def test_what_a_model_can_t_be_trained_anew_from_is_said():
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(1))
            self.fc = nn.Linear(64, 10)

        def forward(self, x: Tensor) -> Tensor:
            return torch.as_tensor(self.fc(x.flatten(1)) * self.scale)

    values = scenario(PUBLIC, ["shadow-models"]).model_dump(mode="json")
    values["model"] = {"name": "custom", "initialisation": "given"}
    (only,) = run_audit(scenario_from(values), model=Own()).result.findings
    assert "does not know the layer" in (only.reason or "")


# Judgement -----------------------------------------------------------------------------------------------------------

SCORES = st.lists(st.integers(-4, 4), min_size=1, max_size=40)


@given(members=SCORES, others=SCORES, share=st.sampled_from([0.0, 0.01, 0.1, 0.3, 1.0]))
def test_the_curve_is_the_obvious_one(members, others, share):
    members = [math.inf if x == 4 else x for x in members]
    a, b = torch.tensor(members).double(), torch.tensor(others).double()
    scores = members + others
    false, true = roc(a, b)
    levels = [math.nan, *sorted(set(scores), reverse=True)]  # nothing passes the first
    wanted = [[sum(x >= level for x in part) / len(part) for level in levels] for part in (others, members)]
    assert [false.tolist(), true.tolist()] == wanted
    pairs = [(x > y) + 0.5 * (x == y) for x in members for y in others]
    assert auc(a, b) == pytest.approx(sum(pairs) / len(pairs))
    best = 0.0
    for level in levels:
        if sum(y >= level for y in others) <= share * len(others) + 1e-12:
            best = max(best, sum(x >= level for x in members) / len(members))
    assert tpr_at(a, b, share) == pytest.approx(best)


def test_accuracy_counts_right_decisions():
    transcript, truth = sent(scenario())
    seen = observe(transcript, ThreatModel(target_records=60))
    member = truth.owners >= 0
    said = member.clone()
    said[:15] = ~said[:15]
    found = MembershipFinding(attack="loss-threshold", scores=member.double(), members=said)
    score = metrics(found, seen, truth)
    blind = score.pop("membership_blind_auc")  # 30 others are too few for a TPR
    assert 0.3 < blind < 0.7
    right = 0.04 ** (1 / 30)  # all 30 pairs: a smaller share would be so lucky with 80 % of 5 %
    assert score.pop("membership_epsilon") == pytest.approx(math.log(right / (1 - right)), abs=0.01)
    assert score.pop("usage_error") < 0.01  # the scores tell members without a fault
    assert score == {"membership_auc": 1.0, "membership_accuracy": 0.75}


@pytest.mark.slow
def test_guessing_is_seldom_called_a_leak():
    transcript, truth = sent(scenario())
    seen = observe(transcript, ThreatModel(target_records=60))
    rng = generator(0, "guess")
    leaks = 0
    for _ in range(300):
        scores = torch.rand(60, generator=rng).double()
        found = MembershipFinding(attack="loss-threshold", scores=scores, members=scores > 0.5)
        result = evaluate(found, seen, truth, seed=0).result
        leaks += summarise([result], resamples=100, seed=0)[0].verdict == "inferred"
    assert leaks <= 12  # 1 % of 300, and more only with a chance below 1e-4


def test_the_report_draws_the_curve_and_limits_hold(command: Command, tmp_path: Path):
    path = tmp_path / "s.yaml"
    path.write_text(scenario({"adversary": "client"}, rounds=30, examples=60).to_yaml())
    limit = ["--fail-above", "membership_auc=0.55"]
    outcome = command("audit", path, "--out", tmp_path / "out", "--workers", "1", *limit)
    assert outcome.code == 1, outcome
    page = (tmp_path / "out" / "report.html").read_text()
    assert "taken for members" in page
    assert "60 records with their labels" in page


@pytest.mark.slow
def test_a_recorded_transcript_can_be_attacked(command: Command, tmp_path: Path):
    path = tmp_path / "s.yaml"
    path.write_text(scenario(PUBLIC, rounds=30, examples=60).to_yaml())
    assert command("simulate", path, "--out", tmp_path / "t").code == 0
    words = ["attack", tmp_path / "t", "--attack", "loss-threshold", "--workers", "1"]
    outcome = command(*words, "--out", tmp_path / "a")
    assert outcome.code == 0, outcome
    assert "membership_auc" in outcome.out
    refused = command("attack", tmp_path / "t", "--attack", "shadow-models", "--workers", "1", "--out", tmp_path / "b")
    assert "threat.public_examples" in refused.out + refused.err
    more = ["--attack", "shadow-models", "--knows-public-data", "--set", "shadows=2"]
    known = command("attack", tmp_path / "t", *more, "--workers", "1", "--out", tmp_path / "c")
    assert "membership_auc" in known.out
