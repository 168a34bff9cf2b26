"""Positive controls, and the replay of recorded training: whether "found nothing" means anything."""

from __future__ import annotations

import copy
import dataclasses
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fedaudit
from fedaudit.attacks import ATTACKS, Attack, make_attack
from fedaudit.evaluation import FINDING_TYPES, evaluate, summarise
from fedaudit.pipeline import calibrations
from fedaudit.pipeline.control_cases import memorised, one_example, reference
from fedaudit.pipeline.controls import Conditions, Controls, _winner, judged_by_control
from fedaudit.pipeline.prepare import resolve
from fedaudit.pipeline.recordings import worst_replay
from fedaudit.pipeline.run import record, run_audit
from fedaudit.pipeline.trials import Trial, run_trials
from fedaudit.results import AttackSummary, AuditResult, ControlResult, Evidence
from fedaudit.scenario.scenario import scenario_from
from fedaudit.simulation.protocols import protocol_of
from fedaudit.simulation.protocols.base import EasyCase
from fedaudit.simulation.simulator import Recording
from fedaudit.simulation.spec import FederationSpec
from fedaudit.transcript.observation import observe
from fedaudit.transcript.truth import Truth
from fedaudit.utils.fingerprint import tensor_digest
from tests.build import only
from tests.trees.tree_cases import model, stump, transcript

FEDSGD = {"name": "a", "algorithm": "fedsgd", "clients": 2, "examples": 2, "batch_size": 1}
NOISE = {
    "name": "noise",
    "client_defence": {"name": "dp", "clip": 1.0, "noise": 1.0, "where": "local", "epsilon": None},
}


def scenario(*attacks: Any, **rest: Any) -> dict[str, Any]:
    lenet = {"name": "lenet", "initialisation": "uniform"}
    return {"data": {"name": "digits"}, "model": lenet, "federations": [FEDSGD], "attacks": list(attacks), **rest}


def invg(iterations: int = 150) -> dict[str, Any]:
    return {"name": "invg", "iterations": iterations}


def audited(*attacks: Any, **rest: Any) -> AuditResult:
    return fedaudit.audit(scenario(*attacks, **rest), progress=False).result


STEP = {**FEDSGD, "algorithm": "fedavg", "local_steps": 1, "learning_rate": 0.05}


def unrepeatable(*attacks: Any, federation: dict[str, Any] = STEP) -> AuditResult:
    """Audit noise whose training nobody can repeat with other examples: only an easier case can be the control."""
    made = scenario(*attacks, defences=NOISE, federations=[federation])
    seen = changed(fedaudit.simulate(made, progress=False), unmodelled=("gradients-changed",))
    return fedaudit.audit_transcript(seen, list(attacks), progress=False).result


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Count the runs of attacks that aren't kept: the federation of each."""
    made: list[str] = []
    whole = Trial.run

    def run(self: Trial, *args: Any) -> Any:
        made.append(self.observation.federation)
        return whole(self, *args)

    monkeypatch.setattr(Trial, "run", run)
    return made


# What a control decides ---------------------------------------------------------------------------------------------


def test_too_little_effort_is_inconclusive_and_says_so():
    summary = only(result := audited(invg(2), defences=NOISE))
    assert summary.verdict == "inconclusive"
    assert summary.advice[-1].startswith(
        "invg has no power here: of 3 held-out examples in updates made under the same"
    )
    assert "it recovered 0; raise its effort (iterations" in summary.advice[-1]
    assert any("little effort: 2 iterations" in caution for caution in summary.cautions)
    (control,) = result.controls
    assert (control.model, control.won, summary.control) == ("same", False, 0)
    assert control.power is not None
    assert (control.power.value, control.power.n) == (0, 3)
    assert result.margins == []  # with so little effort there is none


def test_too_little_effort_loses_even_the_easiest_cases():
    # so many clients that a second control is within a quarter of the time
    result = unrepeatable(invg(2), federation={**STEP, "clients": 8, "examples": 8})
    summary = only(result)
    assert summary.verdict == "inconclusive"
    assert "raise its effort (iterations" in summary.advice[0]
    assert [(c.model, c.won) for c in result.controls] == [("same", False), ("reference", False)]
    assert summary.control == 1


@pytest.mark.slow
def test_noise_that_hides_the_images_stops_an_attack_that_recovers_them_without_it():
    result = audited(invg(), defences=NOISE)
    summary = only(result)
    assert summary.verdict == "not demonstrated"
    (control,) = result.controls
    assert (control.model, control.won, control.without_defence, summary.control) == ("same", True, True, 0)
    assert "6 of 6 held-out examples without the defence, and 0 of 3 with it" in control.text
    assert min(image.psnr for image in control.images) > 20
    (margin,) = result.margins
    assert (margin.steps, margin.factor) == ([], None)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("harder", "here"),
    [
        ({}, "single examples, defended"),
        ({"batch_size": 2}, "batches of 2, defended"),
        ({"local_steps": 2, "examples": 4}, "single examples, 2 local steps an update, defended"),
    ],
)
def test_an_easier_control_shows_that_the_attack_runs_and_no_more(harder, here):
    summary = only(result := unrepeatable(invg(), federation={**STEP, "clients": 1, **harder}))
    assert summary.verdict == "inconclusive"
    assert f"one known example, undefended, one step; here: {here}" in summary.advice[-1]
    assert "not that it had a chance" in summary.advice[-1]
    (control,) = result.controls
    assert control.won
    assert control.images[0].psnr > 20
    assert not any(m.steps for m in result.margins)  # nobody can repeat the training under easier conditions, either


def named(federation: str, verdict: Any, attack: str = "invg", kind: str = "images") -> AttackSummary:
    return AttackSummary(
        attack=attack, federation=federation, update_kind="gradient", updates=1, images=1, kind=kind, verdict=verdict,
        verdict_text="",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("other", "verdict", "undefended", "serves"),
    [
        ({}, "recovered", True, True),
        ({"name": "whatever"}, "recovered", True, True),
        ({}, "recovered", False, False),
        ({}, "identifiable", True, False),  # only what comes out visibly shows that it had a chance
        ({"batch_size": 2}, "recovered", True, False),
        ({"batch_norm": "train"}, "recovered", True, False),
        ({"rounds": 3}, "recovered", True, False),
    ],
)
def test_only_the_same_federation_without_its_defences_is_a_control(other, verdict, undefended, serves):
    spec = FederationSpec(**FEDSGD)
    runs = {"a-noise": (spec, False), "b": (FederationSpec(**{**FEDSGD, **other}), undefended)}
    lost, beside = named("a-noise", "not demonstrated"), named("b", verdict)
    assert _winner(lost, [lost, beside], runs) is (beside if serves else None)
    worst = named("b", "inferred", kind="membership")  # membership can't be worse
    kind = named("a-noise", "not demonstrated", kind="membership")
    assert (_winner(kind, [kind, worst], runs) is worst) == (undefended and not other.keys() - {"name"})


def test_scores_that_tell_members_the_wrong_way_round_are_no_all_clear():
    evidence = {"what": "membership_auc", "value": 0.4, "n": 200, "of": "records", "baseline": 0.5, "method": "m"}
    spec = {**vars(named("a", "not demonstrated", "loss-threshold", "membership"))}
    won = ControlResult(attack="loss-threshold", model="same", federation=None, case="easy", won=True, text="won")
    # the last one is of equal scores, whose p-value is 1
    cases = ((0.9995, 0.45, "inconclusive"), (0.98, 0.49, "not demonstrated"), (1.0, 0.55, "not demonstrated"))
    for p, high, verdict in cases:
        told = AttackSummary(**{**spec, "evidence": Evidence(**evidence, low=0.35, high=high, p_value=p)})
        controls = Controls()
        controls.add(won, [told])
        judged = judged_by_control(
            told, controls, who="A client", things="records", wrong=None, attack=make_attack("loss-threshold"),
            conditions=Conditions(32, 5),
        )  # fmt: skip
        assert judged.verdict == verdict
        reason = "membership_auc 0.40 [0.35, 0.45] is below 0.5"
        assert any(reason in line for line in judged.advice) == (verdict == "inconclusive")


def test_advice_names_only_what_the_attack_has():
    lost = ControlResult(attack="a", model="same", federation=None, case="easy", won=False, text="lost")
    for name, says in (("loss-threshold", "fails: use another attack"), ("invg", "raise its effort (iterations, rest")):
        told = named("a", "not demonstrated", name)
        controls = Controls()
        controls.add(lost, [told])
        judged = judged_by_control(
            told, controls, who="The server", things="images", wrong=None, attack=make_attack(name),
            conditions=Conditions(1, 1),
        )  # fmt: skip
        assert says in judged.advice[-1]


def test_a_time_that_is_over_ends_attacks_and_the_report_says_so(tmp_path: Path):
    federation = {**FEDSGD, "clients": 3, "examples": 3}
    made = fedaudit.simulate(scenario(invg(), federations=[federation]), progress=False)
    attacks: list[Any] = [{"name": "invg", "iterations": 300}, "labels"]
    limited: Any = {"max_minutes": 1e-9, "clients": 2, "progress": False}
    found = fedaudit.audit_transcript(made, attacks, out=tmp_path, **limited).result
    reasons = [f.reason or "" for f in found.findings]
    assert sum("--max-minutes" in reason for reason in reasons) == 4
    assert sum("beyond the first 2 clients" in reason for reason in reasons) == 2
    assert any(line.startswith("4 of 6 runs of attacks: the time") for line in found.not_asked)
    assert (tmp_path / "report.html").is_file()
    for wrong in (0, -1, float("nan"), True):
        with pytest.raises(fedaudit.BadInput, match="give minutes above 0"):
            fedaudit.audit_transcript(made, max_minutes=wrong)


def test_within_a_time_the_shortest_attack_is_run_first_and_calibrations_leave_half_of_it(tmp_path, monkeypatch):
    federation = {**FEDSGD, "clients": 1, "examples": 3}
    made = fedaudit.simulate(scenario(invg(), federations=[federation]), progress=False)
    order: list[str] = []
    plain, began = Attack.__call__, time.time()
    ends: list[float] = []

    def told(self: Any, *args: Any, **kwargs: Any) -> Any:
        order.append(self.name)
        return plain(self, *args, **kwargs)

    def noted(trials: Any, means: Any, title: str = "") -> Any:
        ends.append(means.deadline - began)
        return run_trials(trials, means, title)

    monkeypatch.setattr(Attack, "__call__", told)
    monkeypatch.setattr(calibrations, "run_trials", noted)
    attacks: list[Any] = [
        {"name": "invg", "iterations": 30},
        {"name": "agic", "iterations": 2, "calibrate": True},
        "labels",
    ]
    fedaudit.audit_transcript(made, attacks, max_minutes=60, controls=False, progress=False)
    assert (order[0], order[-2:]) == ("labels", ["agic", "invg"])
    assert ends == [pytest.approx(1800, abs=60)]


def test_a_leak_needs_no_control(ran):
    result = audited(invg())
    assert only(result).verdict == "recovered"
    assert result.controls == []
    assert ran == ["a", "a"]


def test_without_controls_nothing_is_concluded(ran):
    summary = only(audited(invg(), defences=NOISE, evaluation={"controls": False}))
    assert summary.verdict == "inconclusive"
    assert "positive controls were turned off" in summary.advice[0]
    assert len(summary.advice) == 1
    assert ran == ["a", "a"]


@pytest.mark.slow
def test_an_undefended_federation_is_the_control_for_nothing(ran):
    plain = {"name": "plain"}  # whatever its name
    result = audited(invg(), defences=[plain, NOISE])
    by_name = {s.federation: s for s in result.summaries}
    assert by_name["a-plain"].verdict == "recovered"
    assert by_name["a-noise"].verdict == "not demonstrated"
    assert [(m.federation, m.steps) for m in result.margins] == [("a-noise", [])]  # it is the defence that stops it
    assert "from a-plain" in by_name["a-noise"].headline
    (control,) = result.controls
    assert (control.federation, control.won, control.timing) == ("a-plain", True, None)
    assert sorted(ran) == ["a-noise"] * 2 + ["a-plain"] * 2


@pytest.mark.slow
def test_federations_share_an_easy_case_but_not_their_power(ran):
    table = {**RECORDS, "federations": [{**RECORDS["federations"][0], "name": name} for name in ("f", "g")]}
    result = audited("loss-threshold", **table)
    assert [s.control for s in result.summaries] == [0, 0]
    assert ran.count("control-same") == len(result.controls) == 1
    more = {**NOISE, "name": "more", "client_defence": {**NOISE["client_defence"], "noise": 2.0}}  # type: ignore[dict-item]
    result = audited(invg(5), defences=[NOISE, more])
    assert [s.control for s in result.summaries] == [0, 1]
    assert [ran.count(f"a-{name}-power-invg") for name in ("noise", "more")] == [3, 3]


def test_controls_take_a_quarter_of_the_attacks_time(ran):
    """Two examples and three attacks: six runs' worth, of which one control is within a quarter, and two aren't."""
    attacks = [{"name": name, "iterations": 2} for name in ("invg", "dlg-adam", "agic")]
    result = unrepeatable(*attacks)
    assert [name for name in ran if name != "a"] == ["control-same"]
    refused = [c for c in result.controls if c.won is None]
    assert {c.attack for c in refused} == {"dlg-adam", "agic"}
    assert all("a quarter of the attacks' time" in c.text for c in refused)
    assert [s.verdict for s in result.summaries] == ["inconclusive"] * 3


@pytest.mark.slow
def test_controls_are_kept_and_written(tmp_path: Path, ran):
    made = scenario_from(scenario(invg(20), defences=NOISE))
    first = run_audit(made, store=tmp_path / "findings")
    assert ran == ["a", "a", *["a-power-invg"] * 3, *["a-power-undefended-invg"] * 3]
    again = run_audit(made, store=tmp_path / "findings")
    assert len(ran) == 8
    assert [c.model_dump(exclude={"timing"}) for c in first.result.controls] == [
        c.model_dump(exclude={"timing"}) for c in again.result.controls
    ]
    again.save(tmp_path)
    image, *_ = AuditResult.load(tmp_path / "results.json").controls[0].images
    assert (tmp_path / image.true_image).is_file()
    assert (tmp_path / image.reconstruction).is_file()
    assert "positive control" in (tmp_path / "report.html").read_text()


# The cases ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def recording() -> Recording:
    return fedaudit.simulate(scenario(invg()), progress=False)


def test_no_victim_is_in_a_control(recording):
    victims = {tensor_digest(x) for batch in recording.truth.inputs.values() for x in batch}
    case = one_example(recording, "gradient", 8)
    examples = [x for batch in case.recording.truth.inputs.values() for x in batch]
    assert len({tensor_digest(x) for x in examples}) == 8
    assert not victims & {tensor_digest(x) for x in examples}


@pytest.mark.parametrize("kind", ["gradient", "weights"])
def test_a_control_is_one_plain_step_of_the_audited_model(recording, kind):
    case = one_example(recording, kind)
    (only_round,) = case.recording.transcript.rounds
    (update,) = only_round.updates
    model = recording.transcript.module
    model.load_state_dict(recording.transcript.rounds[0].weights)
    truth, info = case.recording.truth, recording.transcript.task_info
    loss = nn.functional.cross_entropy(model(info.normalise(truth.inputs[0, 0])), truth.labels[0, 0])
    grads = torch.autograd.grad(loss, list(model.parameters()))
    assert update.training is not None
    scale = 1.0 if kind == "gradient" else -update.training.learning_rate
    for (name, _), g in zip(model.named_parameters(), grads, strict=True):
        torch.testing.assert_close(update.tensors[name], scale * g, rtol=1e-4, atol=1e-7)
    assert case.model == "same"
    assert reference(kind).model == "reference"


def test_labels_have_a_control_that_luck_does_not_win():
    """Eight updates of one label each, on photographs of seven classes: together they are beyond luck."""
    made = scenario("labels", data={"name": "photos"}, model={"name": "convnet-small", "width": 16})
    case = one_example(fedaudit.simulate(made, progress=False), "gradient", 8)
    attack, threat = fedaudit.make_attack("labels", {}), fedaudit.ThreatModel()
    findings = [
        evaluate(attack(seen, generator=torch.Generator().manual_seed(0)), seen, case.recording.truth, seed=0).result
        for seen in fedaudit.observe(case.recording.transcript, threat).split("update")
    ]
    (summary,) = summarise(findings, resamples=100, seed=0)
    assert (len(findings), summary.verdict) == (8, "inferred")


RECORDS: dict[str, Any] = {
    "data": {"name": "digits", "split": "train"},
    "model": {"name": "mlp", "width": 32},
    "threat": {"target_records": 60},
    "federations": [
        {"name": "f", "algorithm": "fedavg", "clients": 2, "rounds": 1, "examples": 200, "batch_size": 50,
         "local_epochs": 1, "learning_rate": 1e-4},
    ],
}  # fmt: skip


def test_membership_has_a_control_that_learns_by_heart():
    result = audited("loss-threshold", **RECORDS)
    summary = only(result)
    assert summary.verdict == "not demonstrated"  # nobody learnt anything
    (control,) = result.controls
    assert control.won
    assert "learnt the members by heart" in control.case
    assert control.metrics[0].value > 0.75


@pytest.mark.peers
@pytest.mark.parametrize(("data", "adversary"), [("breast-cancer", "server"), ("diabetes", "client")])
def test_trees_have_a_control_whose_rows_come_out(data: str, adversary: str):
    pytest.importorskip("xgboost")
    trees = {"name": "f", "algorithm": "trees", "clients": 2, "examples": 40, "rounds": 2, "learning_rate": 0.3}
    made = scenario_from(
        {
            "data": {"name": data, "split": "train"},
            "threat": {"adversary": adversary},
            "federations": [trees],
            "attacks": ["timberstrike"],
        }
    )
    (recording,) = record(resolve(made))
    case = protocol_of(recording.transcript).easy_case(recording, None, images=False)
    assert isinstance(case, EasyCase)
    looked = observe(case.recording.transcript, made.threat).split("client")
    assert len(looked) == (2 if adversary == "server" else 1)  # the observer isn't asked for
    found = [evaluate(make_attack("timberstrike")(one), one, case.recording.truth, seed=0).result for one in looked]
    assert FINDING_TYPES["rows"].verdict(found).verdict == "recovered"


def test_without_xgboost_trees_have_no_control(monkeypatch):
    monkeypatch.setitem(sys.modules, "xgboost", None)
    sent = transcript((0, 0, model(stump(0, 0.0, (1.0, 1.5), (-2.0, 1.0))), 10))
    recording = Recording(sent, Truth({}, {}, torch.zeros(0, 2), torch.zeros(0).long(), {}))
    assert "xgboost isn't installed" in str(protocol_of(sent).easy_case(recording, None, images=False))


def test_an_attribute_has_a_control_that_learns_it_by_heart():
    """The model has learnt nothing, so nothing is inferred; the same attack wins where members were learnt by heart."""
    table: dict[str, Any] = {
        "data": {"name": "diabetes", "split": "train"},
        "model": {"name": "mlp", "width": 64},
        "threat": {"target_records": 60, "hidden_attribute": "sex"},
        "federations": [{**RECORDS["federations"][0], "examples": 120, "learning_rate": 1e-6}],
    }
    result = audited("attribute-loss", **table)
    assert only(result).verdict == "not demonstrated"
    (control,) = result.controls
    assert control.won
    accuracy, advantage = control.metrics
    assert (accuracy.name, advantage.name) == ("attribute_accuracy", "attribute_advantage")
    assert accuracy.value > 0.9
    assert advantage.value > 0.3
    seen = fedaudit.simulate(scenario("attribute-loss", **table), progress=False)
    case = memorised(seen)
    assert case is not None
    learnt, known = case.recording.truth.inputs[0, 0][:, 1], seen.transcript.records
    assert known is not None
    assert not known.inputs[:, 1].any()  # the attribute is hidden from the adversary, and not from the model
    assert learnt.equal(known.codes[seen.truth.values][seen.truth.owners >= 0][:, 0])


def test_the_members_learnt_by_heart_are_the_adversary_s_own():
    seen = fedaudit.simulate(scenario("loss-threshold", **RECORDS), progress=False)
    case = memorised(seen)
    assert case is not None
    records = seen.transcript.records
    assert records is not None
    member = seen.truth.owners >= 0
    assert case.recording.truth.inputs[0, 0].equal(records.inputs[member])
    assert memorised(fedaudit.simulate(scenario(invg()), progress=False)) is None


# Replay -------------------------------------------------------------------------------------------------------------

FEDAVG = {"name": "a", "algorithm": "fedavg", "clients": 1, "examples": 3, "batch_size": 1, "local_epochs": 1}


@pytest.fixture(scope="module")
def trained() -> Recording:
    model = nn.Sequential(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 10))
    torch.manual_seed(0)
    data = (torch.rand(60, 1, 8, 8), torch.arange(60) % 10)
    federation = {**FEDAVG, "learning_rate": 0.1, "momentum": 0.9, "local_epochs": 2}
    made = {"federations": [federation], "model": {"batch_norm": "eval"}}
    return fedaudit.simulate(made, model=model, data=data, progress=False)


def changed(recording: Recording, batch_norm: Any = None, **facts: Any) -> Recording:
    transcript = recording.transcript
    rounds = [
        dataclasses.replace(
            r,
            updates=[
                dataclasses.replace(u, training=dataclasses.replace(u.training, **facts))
                for u in r.updates
                if u.training is not None
            ],
        )
        for r in transcript.rounds
    ]
    info = transcript.task_info
    info = dataclasses.replace(info, batch_norm=batch_norm or info.batch_norm)
    return with_parts(recording, rounds=rounds, task_info=info)


def with_parts(recording: Recording, **parts: Any) -> Recording:
    transcript = copy.copy(recording.transcript)
    for name, part in parts.items():
        setattr(transcript, name, part)
    return Recording(transcript, recording.truth)


def test_the_right_facts_replay_the_updates(trained):
    replay = worst_replay(trained)
    assert replay is not None
    assert replay.error < 1e-5


@pytest.mark.parametrize(
    "wrong",
    [{"learning_rate": 1.0}, {"momentum": 0.0}, {"weight_decay": 0.5}, {"batch_norm": "train"}],
    ids=lambda wrong: next(iter(wrong)),
)
def test_wrong_facts_are_contradicted(trained, wrong):
    replay = worst_replay(changed(trained, **wrong))
    assert replay is not None
    assert replay.contradicts
    assert replay.rounding < 1e-3


def test_what_cannot_be_repeated_is_not_replayed(trained):
    assert worst_replay(with_parts(trained, rounds=[])) is None
    module = nn.Sequential(trained.transcript.module, nn.Dropout(0.5))
    assert worst_replay(with_parts(trained, module=module)) is None


@pytest.mark.slow
@pytest.mark.parametrize("wrong", [{}, {"learning_rate": 1.0}], ids=["right", "wrong"])
def test_contradicted_facts_make_an_audit_inconclusive(wrong):
    federation = {**FEDAVG, "learning_rate": 0.1, "momentum": 0.5}
    seen = fedaudit.simulate(scenario(invg(), federations=[federation]), progress=False)
    audit = fedaudit.audit_transcript(changed(seen, **wrong), [invg(3)], progress=False)
    summary, record = only(audit.result), audit.result.federations[0]
    assert record.replay_error is not None
    assert (record.replay_error > 0.05) is bool(wrong)
    assert summary.verdict == "inconclusive"
    assert any("gives other updates" in text for text in summary.advice) is bool(wrong)
    assert any("learning rate, momentum" in text for text in summary.advice) is bool(wrong)


def test_every_finding_type_says_what_its_control_is():
    ATTACKS.names()
    controls = {"example", "records", "sources", "property", "client", "canaries", "vertical", None}
    assert {t.control for t in FINDING_TYPES.values()} <= controls
    assert FINDING_TYPES["images"].control == FINDING_TYPES["labels"].control == "example"
