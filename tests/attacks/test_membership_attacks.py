"""What every attack on membership keeps to, by one table: who is given away, who isn't, and what each refuses."""

from __future__ import annotations

import dataclasses
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from sklearn.metrics import roc_auc_score

from fedaudit.attacks import ATTACKS, MembershipFinding, make_attack
from fedaudit.evaluation import evaluate
from fedaudit.pipeline.run import run_audit
from fedaudit.results import FindingResult
from fedaudit.scenario.scenario import scenario_from
from fedaudit.transcript.observation import Observation, observe
from fedaudit.transcript.queries import NOBODY
from fedaudit.transcript.threat import ThreatModel
from fedaudit.transcript.truth import Truth
from fedaudit.utils.errors import BadInput, NotApplicable
from tests.attacks.membership_cases import KNOWN, PUBLIC, overfitted, run_attack, scenario
from tests.build import seen, sent
from tests.conftest import Command, refused

ONE_MODEL: list[tuple[str, dict[str, Any]]] = [
    ("loss-threshold", {}),
    ("gradient-norm", {}),
    ("shadow-models", {}),
    ("lira", {}),
    ("lira", {"online": True}),
    ("rmia", {}),
    ("rmia", {"online": True}),
    ("stacked", {}),
]
SHADOWS = ("shadow-models", "lira", "rmia", "stacked")
CLIENT: dict[str, Any] = {"adversary": "client"}


def shadows(name: str, count: int, epochs: int) -> dict[str, int]:
    return {"shadows": count, "epochs": epochs} if name in SHADOWS else {}


def judged(found: MembershipFinding, observed: Observation, truth: Truth) -> tuple[FindingResult, float]:
    """Return the result, and the area under the curve."""
    result = evaluate(found, observed, truth, seed=0).result
    return result, next(m.value for m in result.metrics if m.name == "membership_auc")


@pytest.mark.slow
@pytest.mark.parametrize(("name", "settings"), ONE_MODEL)
def test_an_overfitted_model_gives_its_members_away(name, settings):
    observed, _, truth = overfitted()
    found = run_attack(name, observed, **settings, **shadows(name, 8, 30))
    result, area = judged(found, observed, truth)
    assert area > (0.7 if settings else 0.64)
    accuracy = next(m.value for m in result.metrics if m.name == "membership_accuracy")
    assert accuracy > (0.55 if name == "rmia" else 0.6)
    assert result.is_leak
    assert area == pytest.approx(roc_auc_score((truth.owners >= 0).numpy(), found.scores.numpy()))


@cache
def untrained() -> tuple[Observation, Truth]:
    """Return what is seen of a model that never saw the records: the only global one is the first."""
    known = {"target_records": 400, "knows_public_data": True, "public_examples": 100}
    return seen(scenario(known, rounds=1, examples=400))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "settings"), ONE_MODEL)
def test_a_model_that_never_saw_the_records_gives_nobody_away(name, settings):
    observed, truth = untrained()
    result, area = judged(run_attack(name, observed, **settings, **shadows(name, 6, 5)), observed, truth)
    assert abs(area - 0.5) < 0.1
    assert not result.is_leak


@pytest.mark.parametrize("name", dict(ONE_MODEL))
def test_a_finding_is_judged_by_the_truth_that_its_attack_was_not_told(name):
    observed, truth = seen(scenario(PUBLIC))
    found = run_attack(name, observed, **shadows(name, 6, 3))
    assert observed.records is not None
    assert not any(truth.owners.equal(t) or (truth.owners >= 0).equal(t) for t in vars(observed.records).values())
    lies = dataclasses.replace(truth, owners=torch.where(truth.owners == NOBODY, 0, NOBODY))
    right, wrong = (judged(found, observed, told)[1] for told in (truth, lies))
    assert right == pytest.approx(1 - wrong)


GRADIENTS: dict[str, Any] = {"algorithm": "fedsgd", "local_epochs": None}
PUSHING: dict[str, Any] = {"malicious": {"name": "agrevader", "start": 2}, "rounds": 3}
RECORDS: dict[str, Any] = {"target_records": 60}
REFUSED: list[tuple[str, dict[str, Any], dict[str, Any], dict[str, Any], str]] = [
    *(
        (name, {}, {}, {"target_records": None}, r"threat\.target_records")
        for name in ("loss-threshold", "gradient-norm", *SHADOWS)
    ),
    *((name, {}, {}, RECORDS, r"threat\.public_examples") for name in ("shadow-models", "rmia", "stacked")),
    ("loss-threshold", {"false_positives": 0.1}, {}, RECORDS, r"threat\.public_examples"),
    ("loss-threshold", {"model": "client"}, {}, RECORDS | CLIENT, "sees no update"),
    ("loss-threshold", {"model": "client"}, GRADIENTS, RECORDS, "fedavg"),
    ("loss-threshold", {"model": "rebuilt"}, {}, RECORDS, "3 rounds"),
    ("projection-residual", {}, {}, RECORDS | CLIENT, "sees no update"),
    ("lira", {"online": True, "shadows": 2}, {}, RECORDS | KNOWN, "shadows to 4"),
    ("agrevader", {}, {}, RECORDS | CLIENT, "malicious: agrevader"),
    ("agrevader", {}, PUSHING, RECORDS | CLIENT, "at least two below"),
    ("agrevader", {}, {}, RECORDS, r"threat\.adversary=client"),
]


@pytest.mark.parametrize(("name", "settings", "federation", "threat", "reason"), REFUSED)
def test_attacks_say_in_one_line_why_not(name, settings, federation, threat, reason):
    transcript, _ = sent(scenario({**threat, **RECORDS}, **federation))
    attack = make_attack(name, settings)
    whole = observe(transcript, ThreatModel.model_validate(threat))
    with pytest.raises(NotApplicable, match=reason) as error:
        attack.check((whole.split(attack.scope()) or [whole])[0])
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"model": "locl"}, "model"),
        ({"rebuild": {"name": "invg"}}, "'invg' reconstructs no model"),
        ({"rebuild": {"name": "local-model", "hiden": 3}}, "hiden"),
        ({"rebuild": {}}, "give the name"),
        ({"false_positives": 0}, "false_positives"),
    ],
)
def test_wrong_settings_are_refused_in_one_line(settings, reason):
    with pytest.raises(BadInput, match=reason) as error:
        make_attack("loss-threshold", settings)
    assert "\n" not in str(error.value)


def test_all_attacks_on_membership_are_tested():
    """Here, or with what is theirs: rounds, spans, pushed records, texts, ranges."""
    elsewhere = {"agrevader", "fedmia", "loss-series", "projection-residual", "min-k", "zlib-ratio", "reference-loss"}
    elsewhere.add("range-membership")
    assert {e.name for e in ATTACKS if e.value.recovers == "membership"} == {*dict(ONE_MODEL), *elsewhere}


@pytest.mark.parametrize(
    ("attacks", "federation"),
    [
        pytest.param(
            ["loss-threshold", "gradient-norm", "shadow-models"], {"rounds": 20, "learning_rate": 0.02},
            marks=pytest.mark.slow,
        ),
        (["agrevader"], {**PUSHING, "rounds": 6, "learning_rate": 0.02}),
    ],
)  # fmt: skip
def test_a_regression_has_losses_too(attacks, federation):
    values = scenario(CLIENT if attacks == ["agrevader"] else PUBLIC, attacks, examples=100, **federation).model_dump()
    values |= {"data": {"name": "diabetes", "split": "train"}, "model": {"name": "mlp", "width": 32, "loss": "mse"}}
    findings = run_audit(scenario_from(values)).result.findings
    assert [finding.status for finding in findings] == ["done"] * len(attacks)


WRONG = [
    ("digits", "threat.target_records=61", "give an even number"),
    ("digits", "threat.target_records=600", "asks for 300 examples"),
    ("digits", "threat.public_examples=5", "needs knows_public_data: true"),
    ("digits", "threat.target_record=5", "did you mean 'target_records'?"),
    ("diabetes", "threat.hidden_attribute=sexx", "no attribute 'sexx' to hide; it has: sex"),
    ("diabetes", "threat.target_records=null", "hidden_attribute needs records"),
]


@pytest.mark.parametrize(("data", "setting", "reason"), WRONG)
def test_wrong_words_are_one_line(data, setting, reason, command: Command, tmp_path: Path):
    threat = {**PUBLIC, "hidden_attribute": "sex"} if data == "diabetes" else {}
    values = scenario(threat, ["attribute-loss" if threat else "loss-threshold"]).model_dump(mode="json")
    path = tmp_path / "s.yaml"
    path.write_text(scenario_from({**values, "data": {"name": data, "split": "train"}}).to_yaml())
    refused(command("audit", path, "--out", tmp_path / "out", "--set", setting), reason)
