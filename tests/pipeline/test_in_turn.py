"""Within a time: question by question, the report renewed, and no attack without a chance on the clients' updates."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import fedaudit
from fedaudit.attacks import Attack
from fedaudit.evaluation.limits import NOT_YET, POWERLESS, TIME_IS_UP
from fedaudit.pipeline import controls, in_turn, offline, power
from fedaudit.pipeline.trials import Trial, run_trials
from fedaudit.results import AuditResult
from fedaudit.utils.errors import OutOfTime
from fedaudit.utils.validation import NamedSpec
from tests.pipeline.test_controls import scenario

HARD = {
    "name": "a",
    "algorithm": "fedavg",
    "local_epochs": 1,
    "clients": 2,
    "examples": 32,
    "batch_size": 16,
    "learning_rate": 0.1,
}
INVG, LABELS = {"name": "invg", "iterations": 60}, {"name": "labels"}


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """Return which attack was run on which federation, in that order."""
    found: list[tuple[str, str]] = []
    plain = Attack.__call__

    def told(self: Any, observation: Any, **rest: Any) -> Any:
        found.append((self.name, observation.federation))
        return plain(self, observation, **rest)

    monkeypatch.setattr(Attack, "__call__", told)
    return found


@pytest.fixture
def unasked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let an audit that names no attack choose two cheap ones, and look whether one has a chance by 20 iterations."""
    monkeypatch.setattr(power, "_FEWEST", 20)
    monkeypatch.setattr(offline, "choose_for", lambda *_: [NamedSpec.model_validate(a) for a in (INVG, LABELS)])


def made(federation: dict[str, Any]) -> Any:
    return fedaudit.simulate(scenario(INVG, federations=[federation]), progress=False)


def verdicts(result: AuditResult) -> dict[str, str]:
    return {summary.attack: summary.verdict for summary in result.summaries}


@pytest.mark.slow
def test_an_attack_without_a_chance_is_not_run_on_the_clients(unasked, calls, monkeypatch, tmp_path):
    monkeypatch.setitem(INVG, "iterations", 100)
    monkeypatch.setitem(HARD, "examples", 16)
    monkeypatch.setitem(HARD, "batch_size", 4)
    monkeypatch.setattr(in_turn.InTurn, "_left", lambda self: 0.0)  # none to play it after all
    result = fedaudit.audit_transcript(
        made(HARD), max_minutes=60, out=tmp_path, fail_on="recovered", progress=False
    ).result
    assert [threshold.outcome for threshold in result.thresholds] == ["not tested"]
    assert ("invg", "a") not in calls
    assert ("labels", "a") in calls
    assert calls.index(("labels", "a")) < calls.index(("invg", "a-chance-invg"))
    assert {f.reason for f in result.findings if f.attack == "invg"} == {POWERLESS}
    summary = next(s for s in result.summaries if s.attack == "invg")
    assert (summary.verdict, summary.kind) == ("inconclusive", "images")
    control = result.controls[summary.control or 0]
    assert control.won is False
    assert control.text.startswith("invg, with 20 of 100 iterations, recovered 0 of ")
    assert control.power is not None
    assert control.power.n == 8
    assert [margin.attack for margin in result.margins] == ["invg"]
    assert any(line.startswith("2 of 4 runs of attacks: at small effort") for line in result.not_asked)
    page = (tmp_path / "report.html").read_text()
    assert "with 20 of 100 iterations, recovered 0 of 8" in page


@pytest.mark.slow
def test_what_has_no_chance_is_run_after_all_where_time_is_left_and_at_once_where_it_is_named(unasked, calls):
    left = fedaudit.audit_transcript(made(HARD), max_minutes=60, progress=False).result
    assert calls.index(("invg", "a-chance-invg")) < calls.index(("invg", "a"))
    assert {f.status for f in left.findings} == {"done"}
    told = [control.text for control in left.controls if control.attack == "invg"]
    assert len(told) == 1
    assert told[0].startswith("invg recovered ")  # with all of its effort
    calls.clear()
    named = fedaudit.audit_transcript(made(HARD), [INVG, LABELS], max_minutes=60, progress=False).result
    assert ("invg", "a-chance-invg") not in calls
    assert {f.status for f in named.findings} == {"done"}


@pytest.mark.slow
def test_an_attack_with_power_is_run_on_the_clients(unasked, calls, monkeypatch):
    monkeypatch.setattr(power, "_FEWEST", 150)
    monkeypatch.setitem(INVG, "iterations", 200)
    easy = {"name": "a", "algorithm": "fedsgd", "clients": 2, "examples": 2, "batch_size": 1}
    result = fedaudit.audit_transcript(made(easy), max_minutes=60, progress=False).result
    assert verdicts(result)["invg"] == "recovered"
    assert calls.index(("invg", "a-chance-invg")) < calls.index(("invg", "a"))


@pytest.mark.slow
def test_with_a_time_and_without_the_verdicts_and_the_kept_findings_are_the_same(tmp_path: Path):
    attacks: list[Any] = [{"name": "invg", "iterations": 40}, "labels"]
    folders = tmp_path / "within", tmp_path / "without"
    within = fedaudit.audit_transcript(made(HARD), attacks, max_minutes=60, out=folders[0], progress=False).result
    without = fedaudit.audit_transcript(made(HARD), attacks, out=folders[1], progress=False).result
    kept = [{file.name for file in (out / "findings").iterdir()} for out in folders]
    assert kept[0] == kept[1]
    assert len(kept[0]) >= 4
    assert verdicts(within) == verdicts(without)
    for one, other in zip(within.findings, without.findings, strict=True):
        assert [m.value for m in one.metrics] == [m.value for m in other.metrics]
        assert [image.psnr for image in one.images] == [image.psnr for image in other.images]


def test_a_stop_leaves_the_report_of_what_was_answered(unasked, monkeypatch, tmp_path: Path, capsys):
    plain = Attack.__call__

    def stopped(self: Any, *args: Any, **rest: Any) -> Any:
        if self.name == "invg":
            raise KeyboardInterrupt
        return plain(self, *args, **rest)

    monkeypatch.setattr(Attack, "__call__", stopped)
    with pytest.raises(KeyboardInterrupt):
        fedaudit.audit_transcript(made(HARD), max_minutes=60, out=tmp_path, fail_on="recovered")
    result = AuditResult.load(tmp_path / "results.json")
    assert verdicts(result)["labels"] != "not applicable"
    assert {f.reason for f in result.findings if f.attack == "invg"} == {NOT_YET}
    assert [threshold.outcome for threshold in result.thresholds] == ["not tested"]
    assert (tmp_path / "report.html").is_file()
    said = capsys.readouterr().err.splitlines()
    assert said[0] == "next: labels, by labels"
    assert said[1].startswith("labels: ")
    assert said[-1] == "stopped: the report says what was answered so far"


@pytest.mark.slow
def test_what_no_control_could_be_run_for_is_no_answer(unasked, monkeypatch):
    """Without a control "found nothing" says nothing: it is told as not run, and tried again while time is left."""
    late: list[str] = []

    def slow(trials: list[Trial], *rest: Any) -> list[Trial]:
        late.append(trials[0].observation.federation)
        return [Trial(t.attack, t.observation, t.seed, t.device, OutOfTime(TIME_IS_UP)) for t in trials]

    within: Any = {"max_minutes": 60, "progress": False}
    recording = fedaudit.simulate(scenario(INVG, federations=[HARD], threat={"target_records": 20}), progress=False)
    assert verdicts(fedaudit.audit_transcript(recording, "loss-threshold", **within).result) == {
        "loss-threshold": "not demonstrated"
    }
    monkeypatch.setattr(controls, "run_trials", slow)
    result = fedaudit.audit_transcript(recording, "loss-threshold", **within).result
    assert len(late) == 2
    assert verdicts(result) == {"loss-threshold": "not applicable"}
    assert result.controls == []
    assert not any("no positive control" in line for s in result.summaries for line in s.advice)
    assert any("the time that this audit was given" in line for line in result.not_asked)


@pytest.mark.slow
def test_a_control_is_for_all_that_was_run(unasked, monkeypatch):
    """What an update that comes later is judged by is of its conditions, too, and not of the first ones' alone."""
    runs: list[int] = []

    def late(trials: list[Trial], *rest: Any) -> list[Trial]:
        runs.append(len(trials))
        done = run_trials(trials, *rest)
        if len(runs) > 1:
            return done
        return [done[0], *(replace(trial, outcome=OutOfTime(TIME_IS_UP)) for trial in done[1:])]

    monkeypatch.setattr(in_turn, "run_trials", late)
    known, plain = list[int](), controls.by_known

    def told(kind: Any, tried: Any, *rest: Any) -> Any:
        known.append(len(tried))
        return plain(kind, tried, *rest)

    monkeypatch.setattr(controls, "by_known", told)
    silent = {"name": "invg", "iterations": 2}
    result = fedaudit.audit_transcript(made(HARD), silent, max_minutes=60, progress=False).result
    assert runs == [2, 1]
    assert {f.status for f in result.findings} == {"done"}
    assert known == [1, 2]
    assert len(result.controls) == 1


@pytest.mark.slow
def test_without_controls_nothing_is_tried_on_known_examples(unasked, calls):
    result = fedaudit.audit_transcript(made(HARD), max_minutes=60, controls=False, progress=False).result
    assert {federation for _, federation in calls} == {"a"}
    assert {f.status for f in result.findings} == {"done"}


@pytest.mark.slow
def test_results_that_are_renewed_stay_readable(unasked, tmp_path: Path):
    fedaudit.audit_transcript(made(HARD), max_minutes=60, out=tmp_path, progress=False)
    written = json.loads((tmp_path / "results.json").read_text())
    assert {row["attack"] for row in written["summaries"]} == {"invg", "labels"}


@pytest.mark.slow
def test_what_was_found_within_a_time_is_derived_again(unasked, monkeypatch, tmp_path: Path):
    monkeypatch.setattr(in_turn.InTurn, "_left", lambda self: 0.0)
    seen, out = tmp_path / "t", tmp_path / "out"
    fedaudit.simulate(scenario(INVG, federations=[HARD]), out=seen, progress=False)
    result = fedaudit.audit_transcript(seen, max_minutes=60, out=out, progress=False).result
    assert {f.reason for f in result.findings if f.attack == "invg"} == {POWERLESS}
    found = fedaudit.verify(out, transcript=seen, progress=False)
    assert found.differences == []
    assert found.findings == 2  # of labels
    assert any("within a time" in note for note in found.notes)
    wrong = json.loads((out / "results.json").read_text())
    next(f for f in wrong["findings"] if f["attack"] == "labels")["metrics"][0]["value"] = 0.25
    (out / "results.json").write_text(json.dumps(wrong))
    assert fedaudit.verify(out, transcript=seen, progress=False).differences


def test_with_more_time_it_is_the_same_audit(unasked, tmp_path: Path):
    recording = made(HARD)
    fedaudit.audit_transcript(recording, "labels", max_minutes=1e-9, out=tmp_path, progress=False)
    again = fedaudit.audit_transcript(recording, "labels", out=tmp_path, progress=False).result  # isn't refused
    assert {f.status for f in again.findings} == {"done"}
