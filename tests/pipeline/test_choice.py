"""Which attacks are run where nobody names any, and what they say where facts are missing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor, nn

import fedaudit
from fedaudit.attacks import Finding, make_attack
from fedaudit.pipeline.prepare import resolve
from fedaudit.scenario.scenario import load_scenario, scenario_from
from fedaudit.transcript.observation import observe
from fedaudit.transcript.threat import ThreatModel
from fedaudit.utils.errors import BadInput, NotApplicable

STEPS: dict[str, Any] = {"algorithm": "fedavg", "local_steps": 2}
RECORDS: dict[str, Any] = {"records": 20}
HIDDEN: dict[str, Any] = {"records": 20, "hidden_attribute": "sex"}
PUBLIC: dict[str, Any] = {"knows_public_data": True, "public_examples": 20}
ASKED: dict[str, Any] = {"client_property": "large=5 to 9", **PUBLIC}
TRAIN = {"name": "diabetes", "split": "train"}


def scenario(
    data: dict[str, Any] | str = "digits", federation: dict[str, Any] | None = None, **threat: Any
) -> dict[str, Any]:
    data = {"name": data} if isinstance(data, str) else data
    return {
        "data": data,
        "model": {"name": "mlp", "width": 4},
        "federations": [{"name": "f", "clients": 2, "examples": 40, **(federation or {})}],
        "threat": threat,
    }


def chosen(values: dict[str, Any]) -> list[str]:
    return [attack.name for attack in resolve(scenario_from(values)).scenario.attacks]


@pytest.mark.parametrize(
    ("values", "attacks"),
    [
        (scenario(), ["exact-linear", "invg", "agic", "agic-plus"]),
        (scenario(adversary="eavesdropper"), ["exact-linear", "invg", "agic", "agic-plus"]),
        (scenario(federation={"batch_size": 4}), ["invg", "agic", "agic-plus", "labels"]),
        (scenario(federation={"batch_size": 4}, knows_labels=True), ["invg", "agic", "agic-plus"]),
        (scenario(federation=STEPS), ["spear", "invg", "agic", "labels"]),
        (scenario(federation=STEPS, knows_training=False), ["spear", "agic"]),
        (scenario(federation={**STEPS, "local_steps": 17}), ["agic", "labels"]),
        (scenario(federation={**STEPS, "local_steps": None, "local_epochs": 1}), ["agic", "labels"]),  # 20 steps
        (scenario(federation={"batch_size": 150, "examples": 300}), ["labels"]),
        (scenario("breast-cancer"), ["exact-linear-rows", "tableak", "labels"]),
        (scenario("breast-cancer", knows_labels=True), ["exact-linear-rows", "tableak"]),
        (scenario("breast-cancer", {**STEPS, "local_steps": 17}), ["labels"]),
        (scenario({"name": "breast-cancer", "split": "train"}, {"batch_size": 150, "examples": 300}), ["labels"]),
        (scenario(TRAIN), ["tableak"]),
        (scenario(TRAIN, {**STEPS, "rounds": 3}), ["tableak", "local-model-exact", "local-model"]),
        (scenario(**RECORDS), ["loss-threshold", "gradient-norm", "source-inference"]),
        (scenario("digits-parity", **ASKED), ["property-inference"]),
        (
            scenario("digits-parity", **RECORDS, **ASKED),
            ["loss-threshold", "gradient-norm", "shadow-models", "source-inference", "property-inference"],
        ),
        (scenario(**RECORDS, sees="sum"), ["loss-threshold", "gradient-norm"]),
        (scenario(federation={"clients": 1}, **RECORDS), ["loss-threshold", "gradient-norm"]),
        (scenario(**RECORDS, adversary="client"), ["loss-threshold", "gradient-norm"]),
        (scenario(**RECORDS, **PUBLIC), ["loss-threshold", "gradient-norm", "shadow-models", "source-inference"]),
        (scenario(TRAIN, **HIDDEN), ["attribute-loss"]),
        (scenario(TRAIN, **HIDDEN, **PUBLIC), ["attribute-loss", "attribute-features"]),
        (scenario(federation={"malicious": {"name": "gan", "lacks": [3], "start": 0}}, adversary="client"), ["gan"]),
        (
            scenario(federation={"malicious": {"name": "agrevader", "start": 0}}, adversary="client", **RECORDS),
            ["agrevader", "loss-threshold", "gradient-norm"],
        ),
    ],
)
def test_the_attacks_fit_the_data_the_updates_and_the_threat(values, attacks):
    assert chosen(values) == attacks
    assert chosen({**values, "attacks": None}) == attacks
    assert chosen({**values, "attacks": ["labels"]}) == ["labels"]


def test_where_nothing_fits_the_result_says_what_to_grant():
    finished = fedaudit.audit(scenario(adversary="client"), progress=False)
    (finding,) = finished.result.findings
    assert finding.status == "not applicable"
    assert "set threat.records" in str(finding.reason)


def test_what_is_chosen_can_be_run_and_is_in_the_result(tmp_path):
    values = scenario("breast-cancer", {"examples": 4})
    finished = fedaudit.audit(values, progress=False, out=tmp_path)
    assert [a.name for a in finished.result.attacks] == ["exact-linear-rows", "tableak", "labels"]
    assert {f.status for f in finished.result.findings} == {"done"}
    again = load_scenario(tmp_path / "scenario.yaml")
    assert [a.name for a in again.attacks] == ["exact-linear-rows", "tableak", "labels"]


def test_your_own_model_and_data_get_attacks_that_fit_and_the_default_audit_keeps_its_own():
    inputs, labels = torch.randn((40, 5), generator=torch.Generator().manual_seed(0)), torch.arange(40) % 3
    federations = [{"name": "f", "clients": 1, "examples": 2}]
    result = fedaudit.audit(
        model=nn.Linear(5, 3), data=(inputs, labels), federations=federations, progress=False
    ).result
    assert [a.name for a in result.attacks] == ["exact-linear-rows", "tableak", "labels"]
    assert [a.settings()["iterations"] for a in load_scenario(None).attacks] == [600, 600]


def test_a_scenario_file_need_not_name_attacks(tmp_path):
    path = tmp_path / "open.yaml"
    path.write_text(yaml.safe_dump(scenario("breast-cancer")))
    left_open = load_scenario(path)
    assert left_open.attacks == []
    assert scenario_from(yaml.safe_load(left_open.to_yaml())) == left_open
    assert [a.name for a in resolve(left_open).scenario.attacks] == ["exact-linear-rows", "tableak", "labels"]
    with pytest.raises(BadInput, match="at least one is needed"):
        scenario_from({**scenario(), "attacks": []})


# Facts that are missing ---------------------------------------------------------------------------------------------


def seen(*, recorded: bool, knows: bool) -> fedaudit.Observation:
    values = {**scenario(federation={"clients": 1, **STEPS}), "model": {"name": "convnet-small", "width": 4}}
    transcript = fedaudit.simulate(values, progress=False).transcript
    if not recorded:
        for record in transcript.rounds:
            record.updates[:] = [replace(update, training=None) for update in record.updates]
    return observe(transcript, ThreatModel(knows_training=knows))


def outcome(attack: str, observation: fedaudit.Observation) -> Finding | str:
    settings = {} if attack in ("labels", "r-gap") else {"iterations": 2}
    try:
        return make_attack(attack, settings)(observation, generator=torch.Generator().manual_seed(0))
    except NotApplicable as reason:
        return str(reason)


@pytest.mark.parametrize("attack", ["invg", "labels", "r-gap"])
def test_what_was_not_recorded_isn_t_put_down_to_the_threat_model(attack):
    missing = outcome(attack, seen(recorded=False, knows=True))
    unknown = outcome(attack, seen(recorded=True, knows=False))
    assert isinstance(missing, str)
    assert "not recorded in the transcript" in missing
    assert "threat.knows_training" not in missing
    assert isinstance(unknown, str)
    assert "set threat.knows_training=true" in unknown


@pytest.mark.parametrize(("recorded", "knows", "told"), [(True, True, False), (False, True, True), (True, False, True)])
def test_agic_says_that_it_ran_without_knowing_how_the_client_trained(recorded, knows, told):
    found = outcome("agic", seen(recorded=recorded, knows=knows))
    assert isinstance(found, Finding)
    assert any("unknown length" in note for note in found.notes) is told


def test_the_direction_alone_counts_where_the_scale_is_unknown():
    observation = seen(recorded=False, knows=True)
    (message,) = observation.messages
    longer: dict[str, Tensor] = {name: 7 * t for name, t in message.update.tensors.items()}
    scaled = replace(observation, messages=(replace(message, update=replace(message.update, tensors=longer)),))
    one, other = outcome("agic", observation), outcome("agic", scaled)
    assert isinstance(one, Finding)
    assert isinstance(other, Finding)
    assert one.objective == pytest.approx(other.objective, rel=1e-3)
