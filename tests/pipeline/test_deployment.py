"""Diagnostic or deployment: every criterion decides alone, by what the federation did and not by what it is called."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fedaudit
from fedaudit.pipeline.deployment import LEAST_BATCH, LEAST_EXAMPLES
from fedaudit.results import AuditResult
from tools.docs.pages import DOCS

NORM = "BatchNorm normalises by fixed statistics while clients train (eval mode)"
FEDERATION = {
    "name": "a", "algorithm": "fedavg", "clients": 2, "examples": 32, "batch_size": 8, "local_epochs": 1,
    "learning_rate": 0.05,
}  # fmt: skip


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 10))


def audited(federation: dict[str, Any] | None = None, **changes: Any) -> AuditResult:
    """A federation that is a deployment but for the changes; its labels are read, which takes no time."""
    values: dict[str, Any] = {
        "data": {"name": "digits"},
        "model": {"name": "custom", "batch_norm": "train", "training": {"epochs": 4}},
        "federations": [FEDERATION if federation is None else federation],
        "attacks": ["labels"],
        "evaluation": {"controls": False, "bootstrap": 100},
    }
    values |= {key: values.get(key, {}) | value if isinstance(value, dict) else value for key, value in changes.items()}
    model = network() if values["model"]["name"] == "custom" else None
    return fedaudit.audit(values, model=model, progress=False).result


def reasons(result: AuditResult) -> list[str]:
    (summary,) = result.summaries
    assert summary.setting == ("diagnostic" if summary.diagnostic_because else "deployment")
    for finding in result.findings:
        assert finding.setting == ("diagnostic" if finding.diagnostic_because else "deployment")
    return summary.diagnostic_because


def test_a_trained_network_batches_and_local_training_are_a_deployment() -> None:
    result = audited()
    assert reasons(result) == []
    assert result.as_deployed == []


GRADIENT = {"name": "a", "clients": 2, "examples": 32}
RAGGED = {"examples": 42, "batch_size": 10}  # 10, 10 and 1 examples: what is left over doesn't count


@pytest.mark.parametrize(
    ("changes", "because"),
    [
        ({"model": {"batch_norm": "eval"}}, [NORM]),
        ({"federation": FEDERATION | {"batch_norm": "eval"}}, [NORM]),
        ({"federation": FEDERATION | {"batch_size": 7}}, ["batches of 7 examples, fewer than 8"]),
        ({"federation": FEDERATION | RAGGED | {"batch_norm": "eval"}}, [NORM]),
        ({"federation": GRADIENT | {"batch_size": 16}}, []),
        ({"federation": GRADIENT | {"batch_size": 15}}, ["updates over 15 examples, fewer than 16"]),
    ],
)
def test_each_criterion_decides_alone(changes: dict[str, Any], because: list[str]) -> None:
    result = audited(**changes)
    assert reasons(result) == because
    assert bool(result.as_deployed) == bool(because)


def test_a_network_is_untrained_by_its_answers_whatever_it_is_called() -> None:
    (because,) = reasons(audited(model={"training": {"epochs": 0}}))
    assert because.startswith("the network was hardly trained in round 0: accuracy 0.")
    assert because.endswith(", below 0.5")
    (because,) = reasons(audited(evaluation={"controls": False, "min_accuracy": 0.999}))
    assert because.endswith(", below 0.999")


def test_naming_the_most_frequent_class_is_nothing_learnt() -> None:
    draw = torch.Generator().manual_seed(0)
    images, labels = torch.rand(200, 1, 8, 8, generator=draw), (torch.arange(200) % 10 == 9).long()
    layer = nn.Linear(64, 2)
    nn.init.zeros_(layer.weight)
    layer.bias.data = torch.tensor([5.0, -5.0])
    always = nn.Sequential(nn.Flatten(), layer)
    values = {"federations": [FEDERATION], "attacks": ["labels"], "evaluation": {"controls": False}}
    result = fedaudit.audit(values, model=always, data=(images, labels), progress=False).result
    assert [r.split(":")[1] for r in reasons(result)] == [" accuracy 0.90, as by naming the most frequent class always"]


def test_a_federation_that_trains_its_network_is_one_from_then_on() -> None:
    rounds = {"name": "a", "clients": 1, "examples": 64, "batch_size": 16, "rounds": 60, "learning_rate": 0.3}
    named = {"name": "mlp", "batch_norm": None, "training": {"epochs": 0}}
    result = audited(rounds | {"keep_rounds": [0, 59]}, model=named)
    told = {(f.round, f.setting, *f.diagnostic_because) for f in result.findings}
    assert told == {(0, "diagnostic", "the network is untrained in round 0"), (59, "deployment")}
    assert reasons(result) == ["the network is untrained in round 0"]  # of a summary the worst


@pytest.mark.parametrize(
    ("every", "least", "told"),
    [
        (20, 0.02, []),
        (20, 0.999, ["the network was hardly trained"]),
        (None, 0.02, ["nobody measured whether the network had learnt anything"]),
    ],
)
def test_of_a_vertical_federation_accuracy_has_to_be_measured(every: int | None, least: float, told: list[str]) -> None:
    values = {
        "data": {"name": "breast-cancer"},
        "model": {"name": "mlp"},
        "federations": [{"name": "v", "algorithm": "vertical", "clients": 2, "rounds": 20, "batch_size": 32}],
        "attacks": ["norm-scoring"],
        "threat": {"adversary": "client"},
        "evaluation": {"controls": False, "accuracy_every": every, "min_accuracy": least},
    }
    because = reasons(fedaudit.audit(values, progress=False).result)
    assert [reason.split(":")[0] for reason in because] == told


@pytest.mark.parametrize(("epochs", "learnt"), [(10, True), (0, False)])
def test_regression_has_to_beat_the_mean(epochs: int, learnt: bool) -> None:
    federation = {"name": "a", "clients": 2, "examples": 64, "batch_size": 32, "rounds": 2, "keep_rounds": [1]}
    federation |= {"learning_rate": 1e-6}
    network = {"name": "mlp", "batch_norm": None, "training": {"epochs": epochs, "learning_rate": 0.01}}
    result = audited(federation, data={"name": "diabetes"}, model=network)
    told = "the network was hardly trained in round 1: it predicts no better than the mean of all targets"
    assert [f.diagnostic_because for f in result.findings] == 2 * [[] if learnt else [told]]


def test_what_was_recorded_is_a_deployment_whatever_it_is(tmp_path: Path) -> None:
    model, loss = nn.Sequential(nn.Flatten(), nn.Linear(64, 10)), nn.CrossEntropyLoss()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    images = torch.rand(1, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    with fedaudit.Recorder(tmp_path) as recorder, recorder.round(before):
        with recorder.capture(model) as captured:
            loss(model(images), torch.tensor([3])).backward()
            optimiser.step()
        recorder.update("site", model.state_dict(), captured)
    result = fedaudit.audit_transcript(tmp_path, ["labels"], model=model, loss=loss, controls=False, progress=False)
    assert reasons(result.result) == []


def test_the_settings_that_are_offered_make_a_deployment(tmp_path: Path) -> None:
    alone = {"name": "a", "clients": 4, "examples": 4, "batch_size": 1}
    steps = {"name": "b", "algorithm": "fedavg", "clients": 1, "examples": 4, "local_steps": 4, "batch_norm": "eval"}
    values: dict[str, Any] = {
        "data": {"name": "digits"},
        "model": {"name": "custom", "batch_norm": "eval"},
        "federations": [alone, steps],
        "attacks": ["labels"],
        "evaluation": {"controls": False},
    }
    first = fedaudit.audit(values, model=network(), progress=False).result
    assert {s.setting for s in first.summaries} == {"diagnostic"}
    assert all(len(s.diagnostic_because) == 4 for s in first.summaries)
    (tmp_path / "scenario.yaml").write_text(json.dumps(first.scenario))
    then = fedaudit.load_scenario(tmp_path / "scenario.yaml", first.as_deployed)
    again = fedaudit.audit(then, model=network(), progress=False).result
    assert {s.setting for s in again.summaries} == {"deployment"}
    assert again.as_deployed == []


@pytest.mark.long
def test_the_default_audit_is_a_diagnostic_and_its_offer_a_deployment() -> None:
    quick = ["attacks=[labels]", "evaluation.controls=false"]
    first = fedaudit.audit(fedaudit.load_scenario(None, quick), progress=False).result
    assert {s.setting for s in first.summaries} == {"diagnostic"}
    again = fedaudit.audit(fedaudit.load_scenario(None, [*quick, *first.as_deployed]), progress=False).result
    assert {s.setting for s in again.summaries} == {"deployment"}


def test_the_docs_say_the_same_numbers() -> None:
    page = (DOCS / "explanation" / "verdicts.md").read_text()
    assert f"{LEAST_BATCH} examples or more" in page
    assert f"{LEAST_EXAMPLES} examples or more" in page


def test_results_of_before_are_read_and_say_nothing_of_it(tmp_path: Path) -> None:
    values = json.loads(audited().model_dump_json())
    del values["as_deployed"]
    for row in [*values["findings"], *values["summaries"]]:
        del row["setting"], row["diagnostic_because"]
    (tmp_path / "results.json").write_text(json.dumps(values))
    old = AuditResult.load(tmp_path / "results.json")
    assert {s.setting for s in old.summaries} == {None}
