"""Which attacks are run where nobody names any, and what they say where facts are missing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor, nn

import fedaudit
from fedaudit.attacks import ATTACKS, Attack, Finding, make_attack
from fedaudit.attacks.base import Case
from fedaudit.pipeline.choice import fitting
from fedaudit.pipeline.prepare import resolve
from fedaudit.scenario.scenario import load_scenario, scenario_from
from fedaudit.transcript.observation import observe
from fedaudit.transcript.threat import ThreatModel
from fedaudit.utils.errors import BadInput, NotApplicable
from fedaudit.utils.registry import Entry

STEPS: dict[str, Any] = {"algorithm": "fedavg", "local_steps": 2}
SERVERS = ("imprint", "fishing", "loki", "trap-weights", "seer", "peftleak")
RECORDS: dict[str, Any] = {"target_records": 20}
HIDDEN: dict[str, Any] = {"target_records": 20, "hidden_attribute": "sex"}
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
        (scenario(federation=STEPS), ["spear", "invg", "agic", "agic-plus", "labels"]),
        (scenario(federation=STEPS, knows_training=False), ["spear", "agic", "agic-plus"]),
        (scenario(federation={**STEPS, "local_steps": 17}), ["agic", "agic-plus", "labels"]),
        (scenario(federation={**STEPS, "local_steps": None, "local_epochs": 1}), ["agic", "agic-plus", "labels"]),  # 20
        (
            scenario(federation={"batch_size": 150, "examples": 300}),
            ["agic-plus", "labels"],
        ),  # of which the margin is told
        (scenario("breast-cancer"), ["exact-linear-rows", "tableak", "labels"]),
        (scenario("breast-cancer", knows_labels=True), ["exact-linear-rows", "tableak"]),
        (scenario("breast-cancer", {**STEPS, "local_steps": 17}), ["labels"]),
        (scenario({"name": "breast-cancer", "split": "train"}, {"batch_size": 150, "examples": 300}), ["labels"]),
        (scenario(TRAIN), ["exact-linear-rows", "tableak"]),
        (scenario(TRAIN, {**STEPS, "rounds": 3}), ["tableak", "local-model-exact", "local-model"]),
        (scenario(**RECORDS), ["loss-threshold", "gradient-norm", "projection-residual", "source-inference"]),
        (
            scenario(federation={"clients": 3, "rounds": 2}, **RECORDS),
            ["loss-threshold", "fedmia", "loss-series", "projection-residual", "source-inference"],
        ),
        (
            scenario(federation={**STEPS, "clients": 4, "local_steps": 65, "rounds": 2}, **RECORDS, **PUBLIC),
            ["lira", "rmia", "fedmia", "source-inference"],
        ),
        (
            scenario(federation={"rounds": 2}, **RECORDS, adversary="client"),
            ["loss-threshold", "gradient-norm", "loss-series"],
        ),
        (
            scenario(federation={"clients": 4, "clients_per_round": 2, "rounds": 2}, **RECORDS),
            ["loss-threshold", "gradient-norm", "loss-series", "projection-residual", "source-inference"],
        ),
        (scenario("digits-parity", **ASKED), ["property-inference"]),
        (
            scenario("digits-parity", **RECORDS, **ASKED),
            ["loss-threshold", "lira", "rmia", "projection-residual", "source-inference", "property-inference"],
        ),
        (scenario(**RECORDS, sees="sum"), ["loss-threshold", "gradient-norm", "projection-residual"]),
        (scenario(federation={"clients": 1}, **RECORDS), ["loss-threshold", "gradient-norm", "projection-residual"]),
        (scenario(**RECORDS, adversary="client"), ["loss-threshold", "gradient-norm"]),
        (
            scenario(**RECORDS, **PUBLIC),
            ["loss-threshold", "lira", "rmia", "projection-residual", "source-inference"],
        ),
        (scenario(TRAIN, **HIDDEN), ["attribute-loss"]),
        (scenario(TRAIN, **HIDDEN, **PUBLIC), ["attribute-loss", "attribute-features"]),
        (
            scenario(federation={"malicious": {"name": "gan", "missing_classes": [3], "start": 0}}, adversary="client"),
            ["gan"],
        ),
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


SERVER, CLIENT = ThreatModel(), ThreatModel(adversary="client")
MALICIOUS = ThreatModel(adversary="malicious-server")
ALTERED = ThreatModel(adversary="malicious-server", target_records=20)
MEMBERS = ThreatModel(adversary="client", target_records=20)
IMAGE, TABLE = Case(kind="image", num_classes=10, threat=SERVER), Case(kind="table", num_classes=10, threat=SERVER)
TEXT, VERTICAL = replace(IMAGE, kind="tokens"), replace(IMAGE, protocol="vertical", top="linear")
BEGINS: dict[str, Any] = {"neurons": 200, "rectified": True}


@pytest.mark.parametrize(
    ("case", "attacks"),
    [
        (replace(IMAGE, **BEGINS, examples=24), ["spear", "invg", "agic", "agic-plus", "labels"]),
        (replace(IMAGE, **BEGINS, examples=25), ["cocktail", "invg", "agic", "agic-plus", "labels"]),
        (replace(IMAGE, neurons=200, examples=24), ["cocktail", "invg", "agic", "agic-plus", "labels"]),
        (replace(IMAGE, **BEGINS, examples=129), ["agic-plus", "labels"]),
        (replace(TABLE, **BEGINS, examples=25, steps=None), ["spear-rows"]),
        (replace(IMAGE, steps=None), ["agic", "agic-plus"]),
        (TEXT, ["dager", "token-presence", "labels"]),
        (replace(TEXT, noisy=True, examples=2), ["dager", "lamp", "token-presence", "labels"]),
        (replace(TEXT, noisy=True, examples=3), ["dager", "token-presence", "labels"]),
        (replace(TEXT, steps=None), ["token-presence"]),
        *((replace(IMAGE, server=name, threat=ALTERED), [name, "loss-threshold", "gradient-norm"]) for name in SERVERS),
        (replace(TEXT, server="imprint", threat=MEMBERS), ["loss-threshold", "gradient-norm"]),
        (replace(IMAGE, malicious="gan", threat=MEMBERS), ["gan", "loss-threshold", "gradient-norm"]),
        (replace(IMAGE, malicious="agrevader", threat=CLIENT), ["loss-threshold"]),
        (VERTICAL, ["cafe"]),
        (replace(VERTICAL, threat=CLIENT), ["norm-scoring"]),
        (replace(VERTICAL, threat=CLIENT, num_classes=2), ["norm-scoring", "direction-scoring"]),
        (replace(VERTICAL, threat=CLIENT, top="sum"), ["direct-labels"]),
        (replace(VERTICAL, cut=True), ["unsplit"]),
        (replace(VERTICAL, cut=True, threat=MALICIOUS, server="fsha"), ["fsha"]),
        (replace(VERTICAL, threat=CLIENT, known_labels=True), ["norm-scoring", "model-completion"]),
    ],
)
def test_each_attack_says_what_it_fits(case, attacks):
    assert [spec.name for spec in fitting([case])] == attacks


def test_every_federation_counts_and_first_settings_are_given():
    specs = fitting([replace(TABLE, **BEGINS), IMAGE])
    assert [spec.name for spec in specs] == ["exact-linear-rows", "invg", "agic", "agic-plus", "tableak", "labels"]
    quick = {"iterations": 1000}
    largest = {**quick, "largest": 128}
    assert [spec.settings() for spec in specs] == [{}, quick, quick, largest, {"restarts": 10}, {}]


def test_an_attack_from_elsewhere_is_run_unasked_only_where_it_says_that_it_fits(monkeypatch):
    class Silent(Attack):
        name = "from-elsewhere"

    class Fitting(Silent):
        @classmethod
        def fits(cls, case: Case) -> bool:
            return case.kind == "image"

    for made, more in ((Silent, []), (Fitting, ["from-elsewhere"])):
        monkeypatch.setitem(ATTACKS._entries, "from-elsewhere", Entry("from-elsewhere", "", made))
        assert [spec.name for spec in fitting([IMAGE])] == ["invg", "agic", "agic-plus", *more]


def test_where_nothing_fits_the_result_says_what_to_grant():
    finished = fedaudit.audit(scenario(adversary="client"), progress=False)
    (finding,) = finished.result.findings
    assert finding.status == "not applicable"
    assert "set threat.target_records" in str(finding.reason)


@pytest.mark.slow
def test_what_is_chosen_can_be_run_and_is_in_the_result(tmp_path):
    values = scenario("breast-cancer", {"examples": 4})
    finished = fedaudit.audit(values, progress=False, out=tmp_path)
    assert [a.name for a in finished.result.attacks] == ["exact-linear-rows", "tableak", "labels"]
    assert {f.status for f in finished.result.findings} == {"done"}
    again = load_scenario(tmp_path / "scenario.yaml")
    assert [a.name for a in again.attacks] == ["exact-linear-rows", "tableak", "labels"]


@pytest.mark.slow
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
