"""What the command line makes of limits: one line for each, and the exit code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import fedaudit
from fedaudit.evaluation import Limits, check_limits
from fedaudit.results import AttackSummary, AuditResult
from tests.conftest import SCENARIO, Command, Outcome, refused

pytestmark = pytest.mark.usefixtures("kept_workers")

NOISE = "defences={client_defence: {name: dp, clip: 1.0, noise: 1.0, where: local, epsilon: null}}"
LEAKS = ("--set", "attacks=[{name: exact-linear}]", "--set", "model={name: mlp}")


@pytest.fixture
def run(command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Return a function that audits the small federation, attacked well enough to leak, with more words."""
    monkeypatch.chdir(tmp_path)
    Path("s.yaml").write_text(SCENARIO)

    def audit(*words: str) -> Outcome:
        return command(
            "audit",
            "s.yaml",
            "--out",
            "out",
            "--workers",
            "1",
            "--overwrite",
            *LEAKS,
            *words,
        )

    return audit


@pytest.mark.parametrize(
    ("words", "code", "line"),
    [
        (("--fail-above", "psnr=10"), 1, "FAIL: PSNR at most 10 dB: "),
        pytest.param(("--fail-above", "psnr=101"), 0, "PASS: PSNR at most 101 dB: ", marks=pytest.mark.slow),
        (
            ("--fail-above", "membership_auc=0.6"),
            3,
            "NOT TESTED: membership auc at most 0.6; sgd: nothing that was run",
        ),
        (("--fail-on", "recovered"), 1, "FAIL: no verdict “recovered” or worse (recovered: exact-linear on sgd)"),
        pytest.param(
            ("--fail-on", "inferred"),
            1,
            "FAIL: no verdict “inferred” or worse (recovered: exact-linear on sgd)",
            marks=pytest.mark.slow,
        ),
        (("--fail-on", "recovered", "--set", NOISE), 0, "PASS: no verdict “recovered” or worse"),
        (("--fail-on", "recovered", "--set", NOISE, "--no-controls"), 3, "NOT TESTED: no verdict “recovered” or worse"),
        pytest.param(
            ("--fail-above", "psnr=101", "--set", NOISE, "--no-controls"),
            3,
            "NOT TESTED: PSNR at most 101 dB",
            marks=pytest.mark.slow,
        ),
    ],
    ids=[
        "above",
        "kept",
        "nothing measured it",
        "on",
        "on a worse one",
        "not reached",
        "inconclusive",
        "kept by nothing",
    ],
)
def test_exit_codes_follow_the_limits(run, words, code, line):
    outcome = run(*words)
    assert outcome.code == code, outcome
    assert sum(text.startswith(("PASS", "FAIL", "NOT TESTED")) for text in outcome.out.splitlines()) == 1
    assert any(text.startswith(line) for text in outcome.out.splitlines()), outcome.out
    assert line in Path("out/report.html").read_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        ["data={name: notes}", "model={name: decoder, width: 16}"],
        ["data={name: breast-cancer}", "attacks=[dager]"],
        ["federations=[{name: sgd, algorithm: split, clients: 1, examples: 2, vertical: {cut: 2}}]"],
    ],
    ids=["text", "a table", "split learning"],
)
def test_where_every_attack_is_refused_no_limit_is_kept(run, changes):
    settings = [word for change in changes for word in ("--set", change)]
    assert run(*settings).code == 0
    for limit in (("--fail-on", "inferred"), ("--fail-above", "rouge1=1"), ("--fail-below", "margin=1")):
        outcome = run(*settings, *limit)
        assert outcome.code == 3, outcome
        assert "NOT TESTED: " in outcome.out
        assert "exact-linear could not be run" in outcome.out or "dager could not be run" in outcome.out
        assert not re.search("PSNR|SSIM|identified", outcome.out)


def test_a_broken_limit_outweighs_one_that_was_not_tested(run):
    outcome = run("--fail-above", "membership_auc=0.6", "--fail-above", "psnr=10", "--fail-on", "identifiable")
    assert outcome.code == 1
    starts = [text.split(":")[0] for text in outcome.out.splitlines()]
    assert [s for s in starts if s in ("PASS", "FAIL", "NOT TESTED")] == ["NOT TESTED", "FAIL", "FAIL"]


def test_a_team_s_policy_holds_where_nothing_is_given(run):
    Path("fedaudit.yaml").write_text("fail_above: {psnr: 10}\n")
    assert run().code == 1
    assert run("--fail-above", "psnr=101").code == 0  # what is given wins
    Path("other.yaml").write_text("fail_on: recovered\n")
    outcome = run("--policy", "other.yaml")
    assert outcome.code == 1
    assert "PSNR at most" not in outcome.out  # the named policy stands for the one that lies there


@pytest.mark.parametrize(
    ("text", "fragment"),
    [
        ("fail_abov: {psnr: 10}\n", "did you mean 'fail_above'?"),
        ("fail_above: {psnr: high}\n", "the limit for 'psnr' is 'high'; give a number"),
        ("fail_above: {pnsr: 10}\n", "unknown metric of a limit 'pnsr'; did you mean 'psnr'?"),
        ("fail_above: [psnr]\n", "limits are a mapping"),
        ("fail_on: recovred\n", "did you mean 'recovered'?"),
        ("fail_on: inconclusive\n", "unknown verdict 'inconclusive'"),
        ("", "expected fail_above"),
        ("[1]\n", "expected fail_above"),
        ("fail_above: {", "policy"),
        ("fail_above:", "sets no limit"),
    ],
)
def test_bad_policies_are_one_line(run, text, fragment):
    Path("p.yaml").write_text(text)
    refused(run("--policy", "p.yaml"), fragment)
    refused(run("--policy", "nowhere.yaml"), "nowhere.yaml")


@pytest.mark.slow
def test_attacks_on_transcripts_have_the_same_gate(command: Command, recorded: Path, tmp_path: Path):
    words = ["attack", recorded, "--attack", "invg", "--set", "iterations=150", "--out", tmp_path / "out"]
    assert command(*words, "--fail-on", "recovered").code == 1
    assert command(*words, "--fail-above", "membership_auc=0.5").code == 3
    assert command(*words).code == 0


def summary(verdict: str, federation: str = "f", attack: str = "a", kind: str = "images") -> AttackSummary:
    told = {"update_kind": "gradient", "updates": 1, "images": 1, "verdict_text": "t", "kind": kind}
    return AttackSummary.model_validate({**told, "verdict": verdict, "federation": federation, "attack": attack})


@pytest.mark.parametrize(
    ("level", "summaries", "outcome"),
    [
        ("recovered", [summary("identifiable")], "pass"),
        ("identifiable", [summary("identifiable")], "fail"),
        ("inferred", [summary("inferred", kind="labels")], "fail"),
        ("identifiable", [summary("inferred", kind="labels")], "not tested"),  # labels say nothing about images
        ("recovered", [summary("not demonstrated", kind="rows")], "pass"),  # rows come out visibly, too
        ("recovered", [summary("recovered", kind="sequences")], "fail"),
        ("recovered", [summary("not demonstrated"), summary("inconclusive", attack="b")], "pass"),
        ("recovered", [summary("not demonstrated"), summary("inconclusive", federation="g")], "not tested"),
        ("recovered", [summary("not demonstrated"), summary("recovered", federation="g")], "fail"),
        ("recovered", [summary("not applicable")], "not tested"),
        ("inferred", [summary("not demonstrated"), summary("inconclusive", kind="labels", attack="b")], "not tested"),
        ("recovered", [], "not tested"),
    ],
)
def test_verdicts_are_limited_on_every_federation(level, summaries, outcome):
    (limit,) = check_limits(Limits({}, level), [], summaries)
    assert limit.outcome == outcome
    assert limit.exceeded == (outcome == "fail")


def test_results_of_schema_1_are_read_with_verdicts_of_today(tmp_path: Path):
    sample = Path(__file__).parents[1] / "data" / "results-1.json"
    result = AuditResult.load(sample)
    assert [s.verdict for s in result.summaries] == ["inconclusive", "inconclusive"]  # there were no controls then
    (limit,) = result.thresholds
    assert (limit.exceeded, limit.outcome) == (False, "not tested")
    text = sample.read_text().replace('"not demonstrated"', '"demonstrated"')
    (tmp_path / "leak.json").write_text(text)
    found = AuditResult.load(tmp_path / "leak.json")
    assert {s.verdict for s in found.summaries} == {"inferred"}
    assert found.thresholds[0].outcome == "pass"
    from fedaudit.report.conclusion import headline

    assert headline(found).verdict == "inferred"
    assert headline(found).title.startswith("The server, by ")
    assert "control" not in headline(found).title


def test_limits_from_python():
    with pytest.raises(fedaudit.utils.errors.BadInput, match="unknown verdict"):
        fedaudit.audit(fail_on="inconclusive", progress=False)
