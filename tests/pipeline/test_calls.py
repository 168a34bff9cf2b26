"""What users call from Python: objects, names or mappings, and one line where something is wrong."""

from __future__ import annotations

import inspect
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fedaudit
from fedaudit import ThreatModel
from fedaudit.attacks import InvG
from fedaudit.cli.options import in_flags, scenario_of
from fedaudit.defences import ClientDefence
from fedaudit.guard import SiteGuard
from fedaudit.pipeline import run
from fedaudit.utils import plain_yaml
from fedaudit.utils.registry import Plugin

NET = nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, 10))
DATA = torch.rand(40, 3, 8, 8, generator=torch.Generator().manual_seed(0)), torch.arange(40) % 10
TWO: dict[str, Any] = {"federations": [{"name": "a", "clients": 2, "rounds": 1, "examples": 4, "batch_size": 2}]}
WRONG: dict[str, Any] = {"iteration": 20}
QUICK = InvG(iterations=2)


@pytest.fixture(scope="module")
def recording() -> fedaudit.Recording:
    return fedaudit.simulate(TWO, model=NET, data=DATA, progress=False)


def test_a_model_and_data_suffice_for_a_simulation() -> None:
    """Nobody named the default audit's federations: the first of them it is."""
    assert fedaudit.simulate(model=NET, data=DATA, progress=False).transcript.name == "fedsgd"
    named = {**TWO["federations"][0], "name": "b"}
    with pytest.raises(fedaudit.BadInput, match="federation=…: a, b"):
        fedaudit.simulate({"federations": [*TWO["federations"], named]}, model=NET, data=DATA, progress=False)


@pytest.mark.parametrize("one", ["labels", {"name": "labels"}, fedaudit.make_attack("labels")], ids=repr)
def test_one_attack_needs_no_list(one: Any, recording: fedaudit.Recording) -> None:
    found = fedaudit.attack(recording, one, progress=False)
    assert {finding.attack for finding in found if isinstance(finding, fedaudit.Finding)} == {"labels"}
    audits = (
        fedaudit.audit_transcript(recording, one, controls=False, progress=False),
        fedaudit.audit({**TWO, "evaluation": {"controls": False}}, attacks=one, model=NET, data=DATA, progress=False),
    )
    for audit in audits:
        assert [a.name for a in audit.result.attacks] == ["labels"]
    assert [a if isinstance(a, str) else a["name"] for a in SiteGuard(attacks=one, out=None).attacks] == ["labels"]


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ([3], "attacks has 3; each is an object, a name, or a mapping of name and settings"),
        (InvG, r"attacks has the class InvG: give InvG\(\); each is"),
        (["labels", {"name": "labels"}], "attacks names 'labels' twice; give each once"),
        (["label"], "unknown attack 'label'; did you mean 'labels'"),
        ([fedaudit.ThreatModel()], "attacks has ThreatModel"),
    ],
)
def test_what_is_no_attack_is_one_line(given: Any, says: str, recording: fedaudit.Recording) -> None:
    for call in (fedaudit.attack, fedaudit.audit_transcript):
        with pytest.raises(fedaudit.BadInput, match=says):
            call(recording, given, progress=False)
    with pytest.raises(fedaudit.BadInput, match=says.replace("'labels' twice", "the same attack twice")):
        SiteGuard(attacks=given, out=None)


def test_an_attack_stays_the_object_that_it_is(monkeypatch: pytest.MonkeyPatch, recording: fedaudit.Recording) -> None:
    seen: list[Any] = []
    planned = run.plan

    def watched(observed: Any, attacks: Any, **rest: Any) -> Any:
        seen.append(attacks)
        return planned(observed, attacks, **rest)

    monkeypatch.setattr(run, "plan", watched)
    scenario = fedaudit.Scenario(
        **{**TWO, "evaluation": {"controls": False}, "data": {"name": "digits"}, "model": {"name": "logistic"}},
        attacks=[QUICK],
    )
    client_defence = scenario.defences.client_defence
    assert isinstance(client_defence, ClientDefence)
    fedaudit.audit(scenario, seed=1, progress=False)
    fedaudit.audit({**TWO, "evaluation": {"controls": False}}, attacks=[QUICK], model=NET, data=DATA, progress=False)
    assert all(attacks[0] is QUICK for attacks in seen)
    assert len(seen) == 2
    assert fedaudit.attack(recording, QUICK, progress=False).attacks[0] is QUICK


def test_the_command_that_repeats_it_has_the_settings_that_are_not_defaults(recording: fedaudit.Recording) -> None:
    audit = fedaudit.audit_transcript(recording, QUICK, controls=False, progress=False)
    assert audit.result.repeat.count("--set") == 1
    assert "--attack invg --set attacks.invg.iterations=2 " in audit.result.repeat
    assert InvG().changed() == {}
    assert QUICK.changed() == {"iterations": 2}


def test_the_command_that_repeats_it_names_all_that_was_asked(recording: fedaudit.Recording) -> None:
    asked: dict[str, Any] = {"clients": 1, "truth": None, "progress": False}
    both = [
        fedaudit.audit_transcript(recording, "labels", controls=controls, **asked).result.repeat.partition(" DIR ")[2]
        for controls in (True, False)
    ]
    assert both == ["--clients 1 --max-minutes none", "--clients 1 --max-minutes none --no-controls"]
    own = fedaudit.simulate(TWO, model=NET, data=DATA, loss=nn.MultiMarginLoss(), progress=False)
    told = fedaudit.audit_transcript(own, "exact-linear", controls=False, progress=False).result.repeat
    assert "--model MODULE:NAME --loss MODULE:NAME --attack exact-linear " in told


def test_the_truth_in_memory_is_known_by_its_transcript(recording: fedaudit.Recording, tmp_path: Path) -> None:
    expected = fedaudit.audit_transcript(recording, "labels", controls=False, progress=False).result.findings
    found = fedaudit.attack(recording.transcript, "labels", seed=0, progress=False)
    evaluated = fedaudit.evaluate(found, recording.truth, controls=False, progress=False).result.findings
    assert [f.metrics for f in evaluated] == [f.metrics for f in expected] != []
    other = fedaudit.simulate(TWO, model=NET, data=DATA, seed=1, out=tmp_path / "t", progress=False)
    with pytest.raises(fedaudit.BadInput, match="another transcript than 'a'"):
        fedaudit.evaluate(found, other.truth, progress=False)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"transcript": 3}, "transcript is 3; give a Recording"),
        ({"threat": "server"}, "threat is 'server'; give fields such as {'adversary': 'server'}"),
        ({"threat": [("adversary", "server")]}, r"threat is \[\('adversary', 'server'\)\]; give fields"),
        ({"task": "regression"}, "task is 'regression'; give what wasn't recorded"),
        ({"rounds": 0}, r"rounds is 0; give a list of their numbers, such as \[0, 1\]"),
        ({"rounds": "0-3"}, "rounds is '0-3'; give a list"),
        ({"seed": "x"}, "seed is 'x'; give a whole number from 0"),
        ({"seed": -1}, "seed is -1; give"),
        ({"clients": "1"}, "clients is '1'; give a whole number from 1"),
        ({"clients": 0}, "clients is 0; give"),
        ({"clients": True}, "clients is True; give"),
        ({"max_minutes": "1"}, "max_minutes is '1'; give minutes above 0"),
        ({"max_minutes": 0}, "max_minutes is 0; give minutes above 0"),
    ],
    ids=str,
)
def test_what_is_of_another_kind_is_one_line(given: dict[str, Any], says: str, recording: fedaudit.Recording) -> None:
    for call in (fedaudit.attack, fedaudit.audit_transcript):
        with pytest.raises(fedaudit.BadInput, match=says):
            call(**{"transcript": recording, "attacks": "labels", "progress": False, **given})


@pytest.mark.parametrize("model", [nn.Linear, "net"])
def test_what_is_no_model_is_one_line(model: Any, recording: fedaudit.Recording, tmp_path: Path) -> None:
    recording.transcript.save(tmp_path / "t")
    says = "model is the class Linear; give a torch" if model is nn.Linear else "model is 'net'; give a torch"
    with pytest.raises(fedaudit.BadInput, match=says):
        fedaudit.attack(tmp_path / "t", "labels", model=model, progress=False)
    with pytest.raises(fedaudit.BadInput, match=says):
        fedaudit.audit(TWO, model=model, data=DATA, attacks="labels", out=tmp_path / "a", progress=False)


def test_the_name_of_a_loss_is_no_function(recording: fedaudit.Recording, tmp_path: Path) -> None:
    name: Any = "mse"
    recording.transcript.save(tmp_path / "t")
    for call in (
        lambda: fedaudit.audit(TWO, model=NET, data=DATA, loss=name, progress=False),
        lambda: fedaudit.attack(tmp_path / "t", "labels", model=NET, loss=name, progress=False),
    ):
        with pytest.raises(fedaudit.BadInput, match=r"function of \(outputs, targets\)"):
            call()


def test_a_threat_model_is_given_as_an_object_or_by_its_fields(recording: fedaudit.Recording) -> None:
    knows = ThreatModel(knows_labels=True)
    whole = {**TWO, "threat": {"knows_labels": True}}
    told = fedaudit.simulate(whole, model=NET, data=DATA, progress=False)
    for threat in (knows, {"knows_labels": True}):
        assert fedaudit.attack(told, "labels", threat=threat, progress=False).threat == knows
    audit = fedaudit.audit(TWO, model=NET, data=DATA, attacks="labels", threat=knows, progress=False)
    assert "labels" in " ".join(audit.result.adversary.knows)


def test_a_recording_is_observed_as_its_transcript_by_default_by_a_server(recording: fedaudit.Recording) -> None:
    seen = fedaudit.observe(recording)
    assert seen.threat == ThreatModel()
    assert len(seen.messages) == recording.transcript.updates == 2
    assert not fedaudit.observe(recording, ThreatModel(adversary="client")).messages
    assert len(fedaudit.observe(recording.transcript).messages) == 2


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: InvG(**WRONG), "attack 'invg': unknown key 'iteration'; did you mean 'iterations'"),
        (lambda: InvG(iterations=-1), "attack 'invg': iterations: -1 isn't allowed"),
        (lambda: InvG(*[20]), "attack 'invg': settings are given by their names"),
        (lambda: fedaudit.make_attack("invg", {"iteration": 20}), "attack 'invg': unknown key 'iteration'"),
        (lambda: ThreatModel(**{"adversary": "sever"}), "adversary: 'sever' isn't allowed; did you mean 'server'"),
        (lambda: ThreatModel(**{"adversry": "server"}), "unknown key 'adversry'; did you mean 'adversary'"),
        (lambda: ThreatModel(target_records=3), "records is 3; half of them"),
        (lambda: fedaudit.Scenario(**{**TWO, "sed": 3}), "unknown key 'sed'; did you mean 'seed'"),
        (lambda: fedaudit.Scenario(**TWO, threat={"adversary": "sever"}), "threat.adversary: 'sever' isn't allowed"),
    ],
)
def test_wrong_settings_are_one_line_with_the_nearest_name(make: Any, says: str) -> None:
    with pytest.raises(fedaudit.BadInput, match=says) as caught:
        make()
    assert "pydantic" not in str(caught.value)


@pytest.mark.parametrize("plugin", [InvG, *ClientDefence.__subclasses__()[:3]])
def test_help_shows_the_settings(plugin: type[Plugin]) -> None:
    shown = inspect.signature(plugin.__init__).parameters
    assert list(shown) == ["self", *(f.name for f in fields(plugin) if f.init)]  # type: ignore[arg-type]
    assert all(shown[name].kind is inspect.Parameter.KEYWORD_ONLY for name in list(shown)[1:])


@pytest.mark.parametrize(
    ("python", "flags"),
    [
        ("give another out=…, or overwrite=True to", "give another --out, or --overwrite to"),
        ("run it from Python: fedaudit.audit(…, loss=…)", "run it from Python: fedaudit.audit(…, loss=…)"),
        ("client=9: the federation has", "--client 9: the federation has"),
        ("max_minutes is 0.0; give minutes above 0", "--max-minutes is 0.0; give minutes above 0"),
        ("give it: loss=…", "give it: --loss package.module:function"),
        ("Recorder(records=…) or records=…", "Recorder(records=…) or --records FILE"),
    ],
)
def test_the_command_line_says_flags_where_errors_say_keywords(python: str, flags: str) -> None:
    assert in_flags(python) == flags


def test_what_the_adversary_sees_is_made_once_for_all_attacks(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []

    def watched(recording: Any, threat: ThreatModel) -> fedaudit.Observation:
        made.append(recording.transcript.name)
        return fedaudit.observe(recording, threat)

    monkeypatch.setattr(run, "observe", watched)
    wanted: dict[str, Any] = {**TWO, "attacks": ["labels", "exact-linear"], "evaluation": {"controls": False}}
    audit = fedaudit.audit(wanted, model=NET, data=DATA, progress=False)
    assert len(audit.result.attacks) == 2
    assert made == ["a"]


def test_the_command_line_reads_a_scenario_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "s.yaml").write_text("federations: [{name: a}]\n")
    read, files = plain_yaml.read, list[Path]()

    def watched(path: Path, *rest: Any) -> Any:
        files.append(path)
        return read(path, *rest)

    monkeypatch.setattr(plain_yaml, "read", watched)
    made = scenario_of(tmp_path / "s.yaml", ["federations.a.clients=3"], 5)
    assert (made.federations[0].clients, made.seed, files) == (3, 5, [tmp_path / "s.yaml"])
    with pytest.raises(fedaudit.BadInput, match=r"s\.yaml' with overrides: unknown key 'sed'"):
        scenario_of(tmp_path / "s.yaml", ["sed=3"], None)
