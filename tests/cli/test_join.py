"""Several sites' audits joined: counts of sites, verdicts with their intervals, limits as exit codes; refusals."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from scipy.stats import binomtest

from fedaudit.report.join import join_audits
from fedaudit.report.share import ABOUT, shareable
from fedaudit.results import (
    AuditResult,
    CeilingResult,
    Digests,
    EpsilonBound,
    FindingResult,
    HistoryRecord,
    HistoryTiming,
    RecordEpsilon,
    RequirementRecord,
    SharedRecord,
    Threshold,
    Timing,
)
from fedaudit.utils.integrity import blank, sealed
from tests.conftest import Command, refused
from tests.guard.test_page import one
from tests.report.output_cases import images_of, result

FAILED = Threshold(metric="psnr", limit=20, worst=30, where="invg on sgd", exceeded=True, outcome="fail")
OPEN = Threshold(metric="psnr", limit=20, where=None, exceeded=False, outcome="not tested")
KEPT = Threshold(metric="psnr", limit=20, worst=3, where="invg on sgd", exceeded=False, outcome="pass")


def site(folder: Path, psnr: list[float], verdict: Any = "recovered", **rest: Any) -> Path:
    """A site's audit; its evidence has the interval [0.1, 1]."""
    told = result(folder, [images_of(folder, "invg", [psnr], verdict)], **rest)
    told.save(folder / "results.json")
    return folder


@pytest.fixture
def sites(tmp_path: Path) -> list[Path]:
    return [
        site(tmp_path / "berlin", [30.0, 28.0, 9.0, 8.0]),
        site(tmp_path / "paris", [31.0], thresholds=[KEPT]),
        site(tmp_path / "lyon", [8.0], "not demonstrated"),
        site(tmp_path / "rome", [9.0], "inconclusive"),
        site(tmp_path / "oslo", [9.5], "not demonstrated"),
    ]


def change(folder: Path, **changes: Any) -> None:
    AuditResult.load(folder / "results.json").model_copy(update=changes).save(folder / "results.json")


def test_sites_are_counted_and_keep_their_own_verdicts(sites, tmp_path, command: Command):
    done = command("join", *sites, "--out", tmp_path / "j")
    assert done.code == 0, done
    told = json.loads((tmp_path / "j" / "joined.json").read_text())
    assert told["headline"] == "In 2 of 5 sites the server can reconstruct training images; at worst: recovered."
    (count,) = told["counts"]
    assert count["verdicts"] == {"recovered": 2, "not demonstrated": 2, "inconclusive": 1}
    assert [s["site"] for s in told["sites"]] == ["berlin", "paris", "lyon", "rome", "oslo"]
    (berlin,) = told["sites"][0]["told"]
    assert [berlin[key] for key in ("verdict", "value", "low", "high", "n", "of")] == [
        "recovered",
        0.5,
        0.1,
        1.0,
        4,
        "images",
    ]
    page = (tmp_path / "j" / "joined.html").read_text()
    text = " ".join(re.sub("<[^>]*>", " ", page).split())
    assert "images came out visibly: 50 % [10 %, 100 %], n = 4 images; invg" in text
    assert "recovered in 2, not demonstrated in 2, inconclusive in 1" in text
    assert 'aria-label="By site: berlin images came out visibly: 50 %' in page
    assert "<img" not in page
    assert json.loads(command("join", *sites, "--out", tmp_path / "j", "--json").out) == told


@pytest.mark.slow
@pytest.mark.parametrize(
    ("limits", "code"), [((KEPT, OPEN), 3), ((FAILED, OPEN), 1), ((KEPT, KEPT), 0), ((KEPT, FAILED), 1)]
)
def test_limits_decide_the_exit_code(sites, tmp_path, command: Command, limits, code):
    for folder, limit in zip(sites, limits, strict=False):
        change(folder, thresholds=[limit])
    assert command("join", *sites[:3], "--out", tmp_path / "j").code == code
    page = (tmp_path / "j" / "joined.html").read_text()
    box = re.findall(r"<li>\w+: (\w+)", page.partition('aria-labelledby="alarm"')[2].partition("</div>")[0])
    told = [{"pass": "PASS", "fail": "FAIL", "not tested": "NOT"}[limit.outcome] for limit in limits]
    assert box == [word for word in told if code == 0 or word != "PASS"]  # a red box has no limit that was kept
    for folder in sites[:3]:
        command("share", folder, "--out", tmp_path / "shared" / folder.name)
    assert command("join", *(tmp_path / "shared").iterdir(), "--out", tmp_path / "k").code == code


def test_no_leak_is_no_proof_of_safety(sites, tmp_path, command: Command):
    done = command("join", sites[2], sites[4], "--out", tmp_path / "j")
    assert done.out.startswith("In none of 2 sites a leak was demonstrated. This is no proof of safety.")
    done = command("join", *sites[2:], "--out", tmp_path / "j")
    assert done.out.startswith("In 1 of 3 sites it can't be told what leaks, and no leak was demonstrated.")


def test_sites_that_tried_nothing_count_for_nothing(sites, tmp_path, command: Command):
    def headline(*paths: Path) -> str:
        return str(json.loads(command("join", *paths, "--out", tmp_path / "j", "--json").out)["headline"])

    def row(folder: Path, **changes: Any) -> None:
        told = AuditResult.load(folder / "results.json")
        change(folder, summaries=[told.summaries[0].model_copy(update=changes)])

    for name in ("ulm", "bonn"):
        row(site(tmp_path / name, [7.0 if name == "ulm" else 7.5], "not demonstrated"), verdict="not applicable")
    ulm, bonn = tmp_path / "ulm", tmp_path / "bonn"
    _, paris, lyon, rome, oslo = sites
    whole = "This is no proof of safety."
    assert headline(lyon, oslo, ulm) == f"In none of the 2 sites that tried, a leak was demonstrated. {whole}"
    assert headline(ulm, oslo) == f"In the only site that tried, no leak was demonstrated. {whole}"
    assert headline(ulm, bonn) == "No attack could be run in any of 2 sites, so they give no answer."
    assert headline(paris, lyon, ulm).startswith("In 1 of the 2 sites that tried, the server can reconstruct training")
    row(oslo, kind="labels")
    assert headline(lyon, oslo) == (
        f"In none of 2 sites a leak was demonstrated. Not every attack was tried in each. {whole}"
    )
    row(oslo, kind="labels", verdict="inconclusive")
    assert headline(lyon, rome, oslo, ulm).startswith("In 2 of the 3 sites that tried, it can't be told what leaks")


def test_a_defence_that_was_only_tried_is_nobodys_answer(sites, tmp_path, command: Command):
    told = AuditResult.load(sites[0] / "results.json")
    tried = told.federations[0].model_copy(update={"name": "sgd, dp", "client_defence": "dp"})
    safer = told.summaries[0].model_copy(update={"federation": "sgd, dp", "verdict": "not demonstrated"})
    worse = told.summaries[0].model_copy(update={"verdict": "inconclusive"})
    change(
        sites[0],
        federations=[told.federations[0], tried],
        summaries=[worse, safer],
        scenario={"evaluation": {"compare_defences": True}},
    )
    command("join", *sites[:2], "--out", tmp_path / "j")
    (row, _) = json.loads((tmp_path / "j" / "joined.json").read_text())["sites"]
    assert [one["verdict"] for one in row["told"]] == ["inconclusive"]
    assert row["defences"] == []
    change(sites[0], scenario={})  # now both are in use
    command("join", *sites[:2], "--out", tmp_path / "j")
    (row, _) = json.loads((tmp_path / "j" / "joined.json").read_text())["sites"]
    assert [one["verdict"] for one in row["told"]] == ["not demonstrated"]
    assert row["defences"] == ["dp"]


def test_the_largest_epsilon_stands_beside_its_claim(sites, tmp_path, command: Command):
    def finding(epsilon: float, claimed: float | None) -> FindingResult:
        values = {"method": "one_run", "kind": "bound", "epsilon": epsilon, "delta": 1e-5, "confidence": 0.95}
        values |= {"unit": "record", "adjacency": "replace", "canaries": 80, "guesses": 40, "correct": 38}
        bound = EpsilonBound.model_validate({**values, "correction": "none", "assumes": ""})
        shown = RecordEpsilon(bound=bound, claimed=claimed, p_value=None, attainable=5.0)
        first = AuditResult.load(sites[0] / "results.json").findings[0]
        return first.model_copy(update={"kind": "membership", "images": [], "record_epsilon": shown})

    findings = [finding(0.5, 2.0), finding(3.25, 2.0), finding(1.0, None)]
    rows = AuditResult.load(sites[0] / "results.json").model_copy(update={"findings": findings})
    other = AuditResult.load(sites[1] / "results.json")
    first, second = join_audits({"a": (rows, True), "b": (other, True)}).sites
    assert (first.demonstrated, first.claimed, first.delta, first.unit) == (3.25, 2.0, 1e-5, "record")
    assert (second.demonstrated, second.claimed, second.delta, second.unit) == (None, None, None, "")
    told = findings[0].record_epsilon
    assert told is not None
    shown = told.model_copy(update={"bound": told.bound.model_copy(update={"delta": 1e-3})})
    another = rows.model_copy(update={"findings": [findings[0].model_copy(update={"record_epsilon": shown})]})
    said = "of one record by replacement at δ = 1e-05 in a, c; of one record by replacement at δ = 0.001 in b"
    cautions = join_audits({"a": (rows, True), "b": (another, True), "c": (rows, True)}).cautions
    assert [one for one in cautions if "ε" in one] == [f"sites' ε can't be compared: {said}"]
    assert not any("ε" in one for one in join_audits({"a": (rows, True), "c": (rows, True)}).cautions)


def test_what_is_only_promised_is_compared_at_one_delta(sites, tmp_path, command: Command):
    timing = HistoryTiming(training=1.0, client_defence=0.0)

    def promise(folder: Path, *promised: dict[str, Any]) -> None:
        record = AuditResult.load(folder / "results.json").federations[0]
        courses = [HistoryRecord(bytes=1, parameters=1, timing=timing, **one) for one in promised]
        named = [record, *(record.model_copy(update={"name": f"other-{i}"}) for i in range(1, len(courses)))]
        change(folder, federations=[f.model_copy(update={"history": c}) for f, c in zip(named, courses, strict=True)])

    one = {"epsilon_pld": 2.0, "epsilon_delta": 1e-5, "epsilon_unit": "client"}
    promise(sites[0], one, {"epsilon_pld": 3.0, "epsilon_delta": 1e-6, "epsilon_unit": "client"}, {})
    promise(sites[1], one)
    promise(sites[2], {**one, "epsilon_adjacency": "replace"})
    promise(sites[3], {"epsilon_pld": 4.0})  # as older results have it
    assert command("share", sites[0], "--out", tmp_path / "shared" / "berlin").code == 0
    done = command("join", tmp_path / "shared" / "berlin", *sites[1:], "--out", tmp_path / "j")
    told = json.loads((tmp_path / "j" / "joined.json").read_text())["sites"]
    assert [[row[key] for key in ("claimed", "delta", "unit", "adjacency")] for row in told] == [
        [3.0, 1e-6, "client", "add-remove"],
        [2.0, 1e-5, "client", "add-remove"],
        [2.0, 1e-5, "client", "replace"],
        [4.0, None, "", "add-remove"],
        [None, None, "", ""],
    ]
    assert (
        "sites' ε can't be compared: of one client by add/remove at δ = 1e-06 in berlin; of one client by add/remove "
        "at δ = 1e-05 in paris; of one client by replacement at δ = 1e-05 in lyon; by add/remove at a δ that isn't "
        "told in rome"
    ) in " ".join(done.err.split())
    promise(sites[0], one)
    assert "ε" not in command("join", *sites[:2], "--out", tmp_path / "j").err
    assert "δ = 1e-05" in (tmp_path / "j" / "joined.html").read_text()


def told_of(folder: Path, share: float, n: int) -> None:
    """The audit's one summary, whose evidence is so large a share of so many images."""
    summary = AuditResult.load(folder / "results.json").summaries[0]
    assert summary.evidence is not None
    evidence = summary.evidence.model_copy(update={"value": share, "n": n})
    change(folder, summaries=[summary.model_copy(update={"evidence": evidence})])


def test_what_came_out_is_added_up_and_the_worst_site_is_named(sites, tmp_path, command: Command):
    told_of(sites[0], 0.75, 4)
    told_of(sites[1], 0.9, 10)
    told_of(sites[2], 0.0, 26)
    command("join", *sites[:3], "--out", tmp_path / "j")
    told = json.loads((tmp_path / "j" / "joined.json").read_text())
    (count,) = told["counts"]
    interval = binomtest(12, 40).proportion_ci(0.95, method="exact")
    assert [count[key] for key in ("worst", "found", "n")] == ["paris", 12, 40]
    assert (count["low"], count["high"]) == (pytest.approx(interval.low), pytest.approx(interval.high))
    line = f"over all sites 12 of 40 images came out, 30 % [{100 * interval.low:.3g} %, {100 * interval.high:.3g} %]"
    assert told["together"][0].startswith("to reconstruct training images: worst at paris, recovered (images came out")
    assert told["together"][0].endswith(line)
    assert line in (tmp_path / "j" / "joined.html").read_text()


def test_a_number_of_another_sort_isn_t_added_up(sites, tmp_path, command: Command):
    """The sites' worst verdict comes first, whatever the number; another number has another unit."""
    summary = AuditResult.load(sites[2] / "results.json").summaries[0]
    assert summary.evidence is not None
    other = summary.evidence.model_copy(update={"what": "another share", "value": 1.0})
    change(sites[2], summaries=[summary.model_copy(update={"evidence": other})])
    (count,) = json.loads(command("join", sites[0], sites[2], "--out", tmp_path / "j", "--json").out)["counts"]
    assert (count["worst"], count["found"], count["low"]) == ("berlin", None, None)


def test_the_highest_ceiling_and_the_largest_epsilon_are_named(sites, tmp_path, command: Command):
    for folder, high in zip(sites[:2], (21.5, 33.25), strict=True):
        change(folder, ceilings=[CeilingResult(federation="sgd", low=1.0, high=high, text="t")])
    timing = HistoryTiming(training=1.0, client_defence=0.0)
    for folder, epsilon in zip(sites[1:3], (2.0, 5.0), strict=True):
        record = AuditResult.load(folder / "results.json").federations[0]
        course = HistoryRecord(bytes=1, parameters=1, timing=timing, epsilon_pld=epsilon, epsilon_delta=1e-5,
                               epsilon_unit="client")  # fmt: skip
        change(folder, federations=[record.model_copy(update={"history": course})])
    told = json.loads(command("join", *sites[:3], "--out", tmp_path / "j", "--json").out)
    assert told["together"][1:] == [
        "the ceiling is highest at paris: 33.2 dB; not computed at lyon",
        "largest ε claimed: 5 at lyon (2 of 3 sites say one)",
    ]
    told = json.loads(command("join", *sites[:2], "--out", tmp_path / "j", "--json").out)
    assert told["together"][-1] == "largest ε claimed: 2 at paris (1 of 2 sites says one)"
    course = HistoryRecord(bytes=1, parameters=1, timing=timing, epsilon_pld=1.0, epsilon_delta=1e-3,
                           epsilon_unit="client")  # fmt: skip
    change(sites[2], federations=[record.model_copy(update={"history": course})])
    told = json.loads(command("join", *sites[:3], "--out", tmp_path / "j", "--json").out)
    assert not any("largest ε" in line for line in told["together"])  # at another δ, which is no comparison


def test_shared_files_are_joined_like_whole_ones(sites, tmp_path, command: Command):
    shared = [tmp_path / "shared" / folder.name for folder in sites]
    for folder, to in zip(sites, shared, strict=True):
        assert command("share", folder, "--out", to).code == 0
    command("join", *sites, "--out", tmp_path / "whole")
    loose = tmp_path / "oslo.json"
    shutil.copy(shared[-1] / "results.json", loose)
    done = command("join", *shared[:-1], loose, "--out", tmp_path / "cut")
    whole, cut = (json.loads((tmp_path / f / "joined.json").read_text()) for f in ("whole", "cut"))
    assert "no digest tells" not in done.err
    assert any("no digest" in caution for caution in whole["cautions"])
    for told in (whole, cut):
        del told["cautions"]
        assert {s.pop("sealed") for s in told["sites"]} == {told is cut}
    assert whole == cut


@pytest.mark.parametrize("what", ["verdict", "digest", "digest's name", "number"])
def test_a_shared_file_that_was_changed_is_refused(sites, tmp_path, command: Command, what):
    command("share", sites[0], "--out", tmp_path / "to" / "berlin")
    file = tmp_path / "to" / "berlin" / "results.json"
    text = file.read_text()
    changed = {
        "verdict": text.replace('"verdict": "recovered"', '"verdict": "not demonstrated"'),
        "digest": re.sub(r"(sha256:)[0-9a-f]{8}", r"\g<1>00000000", text),
        "digest's name": text.replace('"digest": "sha256:', '"digest": "md5:'),
        "number": text.replace('"n": 4', '"n": 40', 1),
    }[what]
    assert changed != text
    file.write_text(changed)
    refused(command("join", file.parent, sites[1], "--out", tmp_path / "j"), "ask the site for it again")
    assert not (tmp_path / "j").exists()


def test_a_key_keeps_out_who_lacks_it(sites, tmp_path, command: Command, monkeypatch):
    monkeypatch.setenv("FEDAUDIT_KEY", "between us")
    command("share", sites[0], "--out", tmp_path / "to" / "berlin")
    monkeypatch.setenv("FEDAUDIT_KEY", "another")
    refused(command("join", tmp_path / "to" / "berlin", sites[1], "--out", tmp_path / "j"), "its digest doesn't fit")


def test_a_scenario_that_is_another_is_refused(sites, tmp_path, command: Command):
    (sites[0] / "scenario.yaml").write_text("version: 1\n")
    digest = hashlib.sha256(b"version: 1\n").hexdigest()
    change(sites[0], digests=Digests(scenario=digest, transcripts={}, code="c"))
    assert command("join", *sites[:2], "--out", tmp_path / "j").code == 0
    (sites[0] / "scenario.yaml").write_text("version: 1\nseed: 1\n")
    refused(command("join", *sites[:2], "--out", tmp_path / "j"), "don't belong together")


def test_duplicates_and_what_is_no_audit_are_refused(sites, tmp_path, command: Command):
    refused(command("join", sites[0], "--out", tmp_path / "j"), "two sites' audits or more")
    refused(command("join", sites[0], tmp_path, "--out", tmp_path / "j"), "there is no audit in")
    copy = tmp_path / "copies" / "berlin"
    shutil.copytree(sites[0], copy)
    refused(command("join", sites[0], copy, "--out", tmp_path / "j"), "two of the audits are of the site 'berlin'")
    refused(command("join", sites[0], copy.rename(tmp_path / "bonn"), "--out", tmp_path / "j"), "are the same audit")
    change(tmp_path / "bonn", timing=Timing(seconds=99.0, started="2026-01-01T00:00:00"))  # was run again
    refused(command("join", sites[0], tmp_path / "bonn", "--out", tmp_path / "j"), "are the same audit")
    command("share", sites[0], "--out", tmp_path / "ulm")
    refused(
        command("join", sites[0], tmp_path / "ulm", "--out", tmp_path / "j"), "'berlin' and 'ulm' are the same audit"
    )


def test_sites_of_another_federation_are_told_and_not_refused(sites, tmp_path, command: Command):
    told = AuditResult.load(sites[1] / "results.json")
    change(sites[1], model=told.model.model_copy(update={"parameters": 12345}))
    done = command("join", *sites[:2], "--out", tmp_path / "j")
    assert done.code == 0
    assert "sites differ in the model" in done.err
    assert "lenet (12,345 parameters) in paris" in done.err
    assert "algorithm" not in done.err
    assert "rounds" not in done.err
    told = AuditResult.load(sites[2] / "results.json")
    change(sites[2], federations=[told.federations[0].model_copy(update={"rounds": 77})])
    assert "number of rounds" in command("join", *sites[1:3], "--out", tmp_path / "j").err


def line(outcome: Any) -> RequirementRecord:
    return RequirementRecord(text="OWASP", id="11.2.5", asks="no better", outcome=outcome, answer="", source="there")


@pytest.mark.parametrize(
    ("outcomes", "together"),
    [
        (["met"] * 5, "met"),
        (["met"] * 4 + ["not tested"], "not tested"),
        (["met", "not met", "not tested", "met", "met"], "not met"),
        (["not tested"] * 5, None),
    ],
)
def test_a_line_is_met_by_the_federation_if_every_site_meets_it(outcomes, together, sites, tmp_path, command: Command):
    for folder, outcome in zip(sites, outcomes, strict=True):
        made = shareable(AuditResult.load(folder / "results.json"))
        about = SharedRecord(digest=blank(), left_out=[], min_group_size=10, looked_for=[])
        made = made.model_copy(update={"requirements": [line(outcome)], "shared": about})
        (folder / "results.json").write_bytes(sealed(made.model_dump_json(), ABOUT))
    done = command("join", *sites, "--out", tmp_path / "j")
    assert done.code in (0, 1, 3), done
    asked = json.loads((tmp_path / "j" / "joined.json").read_text())["asked"]
    assert [one["outcome"] for one in asked] == ([together] if together else [])
    if together:
        told = {name: outcome for outcome, names in asked[0]["sites"].items() for name in names}
        assert told == {folder.name: outcome for folder, outcome in zip(sites, outcomes, strict=True)}
        assert f"11.2.5: {together}" in (tmp_path / "j" / "joined.html").read_text()


def test_guards_are_joined_by_their_logs_or_by_statements(sites, tmp_path, command: Command):
    kinds: list[tuple[str, Any]] = [("north", "quiet"), ("south", "alarm")]
    for name, kind in kinds:
        (tmp_path / name).mkdir()
        told = one(0, kind, done="left").model_copy(update={"site": name})
        (tmp_path / name / "guard.jsonl").write_text(told.model_dump_json() + "\n")
    kept = [sites[0], sites[2]]
    assert command("join", *kept, "--guard", tmp_path / "north", "--out", tmp_path / "j").code == 0
    assert command("statement", tmp_path / "south", "--out", tmp_path / "s").code == 1
    done = command("join", *kept, "--guard", tmp_path / "north", "--guard", tmp_path / "s", "--out", tmp_path / "j")
    assert done.code == 1, done
    page = (tmp_path / "j" / "joined.html").read_text()
    assert "1 left, 0 didn&#39;t, 1 of those that left were checked; 1 left after an alarm" in page
    assert "FAIL: no alarm on what leaves" in page
    refused(command("join", *kept, "--guard", tmp_path / "berlin", "--out", tmp_path / "j"), "no guard's log")


@pytest.mark.parametrize("as_statement", [False, True])
@pytest.mark.parametrize("why", ["torn", "more rounds"])
def test_what_a_statement_could_not_test_a_join_cannot_either(sites, tmp_path, command: Command, why, as_statement):
    kept, log = [sites[0], sites[2]], tmp_path / "north" / "guard.jsonl"
    log.parent.mkdir()
    rounds = [one(at, "quiet", done="left").model_dump_json() + "\n" for at in range(2 if why == "torn" else 1000)]
    log.write_text("".join(rounds) + ("{torn\n" if why == "torn" else ""))
    guard = log.parent
    if as_statement:
        command("statement", *kept, log.parent, "--out", tmp_path / "s")
        guard = tmp_path / "s"
    done = command("join", *kept, "--guard", guard, "--out", tmp_path / "j")
    assert done.code == 3, done
    wanted = "can&#39;t be read" if why == "torn" else "no more rounds than were audited"
    assert wanted in (tmp_path / "j" / "joined.html").read_text()
    refused(command("join", *kept, "--guard", guard, "--guard", guard, "--out", tmp_path / "j"), "is there twice")
