"""A statement says what audits and guards say, ends as its strictest limit, and can be checked against both."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from fedaudit.guard.rounds import SiteRound
from fedaudit.report.requirements import requirements
from fedaudit.results import AuditResult, Worst
from tests.cli.test_join import FAILED, KEPT, OPEN, site
from tests.conftest import Command, refused
from tests.guard.test_page import hundred, one


def log(folder: Path, rounds: list[SiteRound]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "guard.jsonl").write_text("".join(f"{line.model_dump_json()}\n" for line in rounds))
    return folder


def quiet(number: int, **changes: Any) -> SiteRound:
    return one(number, "quiet", epsilon=0.5 * (number + 1)).model_copy(update=changes)


@pytest.mark.parametrize(
    ("limits", "rounds", "code"),
    [
        ([KEPT], None, 0),
        ([KEPT, OPEN], None, 3),
        ([OPEN, FAILED], None, 1),
        ([], None, 3),  # a gate without a limit would let everything through
        ([KEPT], [quiet(0)], 0),
        ([KEPT], [quiet(0), quiet(1)], 3),  # one round was audited, and two were sent
        ([KEPT], [one(0, "unable")], 3),  # nothing was checked
        ([OPEN, KEPT], [one(0, "unable")], 3),
        ([KEPT], [one(0, "alarm", done="left")], 1),
        ([KEPT], [one(0, "alarm", done="refused")], 0),  # the guard did what it is for
        ([KEPT], [quiet(0, epsilon=9.0)], 1),  # above the target of 8
        ([OPEN], [one(0, "alarm", done="clipped")], 1),
    ],
)
def test_the_exit_code_is_that_of_the_strictest_limit(
    limits, rounds: list[SiteRound] | None, code: int, tmp_path, command: Command
):
    sources = [site(tmp_path / "berlin", [8.0], "not demonstrated", thresholds=limits)]
    sources += [log(tmp_path / "guard", rounds)] if rounds else []
    done = command("statement", *sources, "--out", tmp_path / "s")
    assert done.code == code, done
    made = json.loads((tmp_path / "s" / "statement.json").read_text())
    assert made["outcome"] == {0: "pass", 1: "fail", 3: "not tested"}[code]
    assert f"fedaudit_statement_kept {int(code == 0)}\n" in (tmp_path / "s" / "statement.prom").read_text()


def test_it_says_what_leaves_what_was_checked_and_what_is_left_of_epsilon(tmp_path, command: Command):
    sources = [site(tmp_path / "berlin", [30.0, 8.0]), log(tmp_path / "guard", hundred())]
    day = (datetime.now(UTC) + timedelta(days=30)).date()
    command("statement", *sources, "--out", tmp_path / "s", "--to", "<b>hub", "--valid-until", day)
    made = json.loads((tmp_path / "s" / "statement.json").read_text())
    told = made["guards"][0]
    assert (told["rounds"], told["sent"], told["held"], told["checked"], told["alarmed"]) == (100, 99, 1, 2, 2)
    assert (told["privacy"]["spent"], told["privacy"]["left"]) == (5.0, 3.0)
    assert made["audits"][0]["played"][0]["verdict"] == "recovered"
    assert any("97 of 99 updates left unchecked" in line for line in made["residual"])
    end = int(datetime(day.year, day.month, day.day, 23, 59, 59, tzinfo=UTC).timestamp())
    assert f"valid_until_timestamp_seconds {end}\n" in (tmp_path / "s" / "statement.prom").read_text()
    page = (tmp_path / "s" / "statement.html").read_text()
    assert "&lt;b&gt;hub" in page
    assert str(day) in page
    assert "images/" not in page


def test_of_uncounted_updates_nothing_is_left_of_epsilon(tmp_path, command: Command):
    sources = [log(tmp_path / "guard", [quiet(0), one(1, "quiet").model_copy(update={"target": 8.0})])]
    assert command("statement", *sources, "--out", tmp_path / "s").code == 3
    privacy = json.loads((tmp_path / "s" / "statement.json").read_text())["guards"][0]["privacy"]
    assert (privacy["spent"], privacy["left"], privacy["target"]) == (None, None, 8.0)


@pytest.fixture
def made(tmp_path: Path, command: Command) -> tuple[Path, list[Any]]:
    """A statement of an audit and a log, and how verify is told of them."""
    sources = [site(tmp_path / "berlin", [8.0], thresholds=[KEPT]), log(tmp_path / "guard", [quiet(0)])]
    assert command("statement", *sources, "--out", tmp_path / "s", "--reviewer", "A. Nother").code == 0
    return tmp_path / "s", [part for source in sources for part in ("--of", source)]


def test_it_can_be_checked_and_a_log_may_grow(made, tmp_path, command: Command):
    folder, of = made
    assert command("verify", folder).code == 0
    assert command("verify", folder, *of).code == 0
    with (tmp_path / "guard" / "guard.jsonl").open("a") as file:
        file.write(one(1, "alarm").model_dump_json() + "\n")
    assert command("verify", folder, *of).code == 0
    assert command("verify", folder, *of[:2]).code == 2  # a source is missing


@pytest.mark.parametrize("what", ["results", "log", "shorter", "statement", "page", "metrics", "key"])
def test_a_change_of_any_file_is_noticed(what: str, made, tmp_path, command: Command, monkeypatch):
    folder, of = made
    audit, guard = tmp_path / "berlin" / "results.json", tmp_path / "guard" / "guard.jsonl"
    if what == "results":
        AuditResult.load(audit).model_copy(update={"thresholds": [FAILED]}).save(audit)
    elif what == "log":
        guard.write_text(guard.read_text().replace("quiet", "alarm"))
    elif what == "shorter":
        guard.write_text(guard.read_text()[:-5])
    elif what == "statement":
        path = folder / "statement.json"
        path.write_text(path.read_text().replace("A. Nother", "A. Friend"))
    elif what == "metrics":
        (folder / "statement.prom").write_text("fedaudit_statement_kept 0\n")
    elif what == "page":
        path = folder / "statement.html"
        path.write_text(path.read_text().replace("A. Nother", "A. Friend"))
    else:
        monkeypatch.setenv("FEDAUDIT_KEY", "a secret")  # whoever may write there could have sealed it anew
    assert command("verify", folder, *of).code == 2


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["nowhere"], "there is no audit"),
        (["berlin", "berlin"], "same file"),
        (["empty"], "no round that can be read"),
        (["both"], "name results.json or guard.jsonl"),
        (["berlin", "--valid-until", "2020-01-01"], "over already"),
        (["berlin", "--to", "a\nb"], "--to is a line"),
    ],
)
def test_what_can_t_be_stated_is_refused_in_a_line(arguments, told: str, tmp_path, command: Command, monkeypatch):
    monkeypatch.chdir(tmp_path)
    site(tmp_path / "berlin", [8.0])
    log(tmp_path / "empty", [])
    log(site(tmp_path / "both", [8.0]), [quiet(0)])
    refused(command("statement", *arguments, "--out", "s"), told)
    assert not (tmp_path / "s" / "statement.json").exists()


def test_a_shared_version_says_the_same_and_names_no_example(tmp_path, command: Command):
    whole = site(tmp_path / "berlin", [30.0, 8.0], thresholds=[FAILED])
    command("share", whole, "--out", tmp_path / "shared")
    found = []
    for source in (whole, tmp_path / "shared"):
        assert command("statement", source, "--out", tmp_path / "s").code == 1
        found.append(json.loads((tmp_path / "s" / "statement.json").read_text())["audits"])
    for played in found[0][0]["played"]:
        played["worst"] = ""  # which isn't shared
    told = [one[0].pop("untested") for one in found]
    assert told[0][:-1] == told[1][:-1]
    assert [one[-1].partition(":")[0] for one in told] == ["Who is exposed most, by class or group"] * 2
    assert found[0] == found[1]


def test_the_most_exposed_record_stands_beside_the_mean_and_isn_t_shared(tmp_path, command: Command):
    folder = site(tmp_path / "berlin", [30.0, 8.0])
    result = AuditResult.load(folder / "results.json")
    worst = Worst(value=30.0, mean=19.0, n=2, text="the most exposed came out at 30.0 dB, the mean is 19.0 dB")
    found = [summary.model_copy(update={"worst": worst}) for summary in result.summaries]
    result.model_copy(update={"summaries": found}).save(folder / "results.json")
    command("share", folder, "--out", tmp_path / "shared")
    for source, told in ((folder, True), (tmp_path / "shared", False)):
        command("statement", source, "--out", tmp_path / "s")
        assert ("at 30.0 dB, the mean is 19.0 dB" in (tmp_path / "s" / "statement.html").read_text()) is told
    assert "the mean is 19.0" not in (tmp_path / "shared" / "results.json").read_text()


def test_lines_that_one_answer_answers_stand_together(tmp_path, command: Command):
    folder = site(tmp_path / "berlin", [30.0, 8.0])
    result = AuditResult.load(folder / "results.json")
    result.model_copy(update={"requirements": requirements(result)}).save(folder / "results.json")
    command("statement", folder, "--out", tmp_path / "s")
    page = " ".join((tmp_path / "s" / "statement.html").read_text().split())
    assert page.count("works: ") == 1
    assert "C11: 11.1.1–5, 11.2.1–5, 11.3.1–4, 11.4.1–3; NIST" in page
    told = page.partition("works: ")[0].rpartition("<b>Not met</b>")[2]
    for line in ("EDPB Opinion 28/2024, server", "EU AI Act, Art. 15(5)", "GDPR, Art. 5(1)(f), 32(1)(b)"):
        assert line in told


def test_what_nothing_bounds_is_named_though_something_else_is_bounded(tmp_path, command: Command):
    guard = log(tmp_path / "guard", [quiet(0)])  # whose ε is counted
    audits = [site(tmp_path / name, [8.0], thresholds=[KEPT]) for name in ("berlin", "paris")]
    values = json.loads((audits[1] / "results.json").read_text())
    (audits[1] / "results.json").write_text(json.dumps({**values, "name": "paris"}))

    def bounded(*sources: Path) -> list[str]:
        command("statement", *sources, "--out", tmp_path / "s")
        told = json.loads((tmp_path / "s" / "statement.json").read_text())["residual"]
        return [line.partition(": nothing bounds")[0] for line in told if "nothing bounds" in line]

    assert bounded(guard) == []
    assert bounded(audits[0], guard) == ["sgd"]
    assert bounded(*audits, guard) == [f"paris, sgd; {values['name']}, sgd"]
    uncounted = log(tmp_path / "other", [quiet(0).model_copy(update={"epsilon": None, "target": None})])
    assert bounded(uncounted) == ["node 7, job-1"]
    page = (tmp_path / "s" / "statement.html").read_text()
    assert "no ε is accounted for" in page


def limits_of(folder: Path) -> dict[str, str]:
    made = json.loads((folder / "statement.json").read_text())
    return {limit["text"].split(": ")[1]: limit["outcome"] for limit in made["limits"]}


def test_what_left_unchecked_isn_t_kept(tmp_path, command: Command):
    source = log(tmp_path / "guard", [quiet(0), one(1, "unable").model_copy(update={"epsilon": 1.0})])
    assert command("statement", source, "--out", tmp_path / "s").code == 3
    assert limits_of(tmp_path / "s")["no alarm on what leaves"] == "not tested"


@pytest.mark.parametrize("spent", [(9.0, 1.0), (9.0, 9.5)])
def test_epsilon_that_was_spent_stays_spent(spent: tuple[float, float], tmp_path, command: Command):
    """Neither a count that begins anew nor a target that is raised makes up for it."""
    rounds = [quiet(0, epsilon=spent[0]), quiet(1, epsilon=spent[1], target=80.0)]
    command("statement", log(tmp_path / "guard", rounds), "--out", tmp_path / "s")
    told = json.loads((tmp_path / "s" / "statement.json").read_text())["guards"][0]["privacy"]
    assert (told["spent"], told["target"]) == (max(spent), 8.0)
    assert limits_of(tmp_path / "s")["ε at most 8"] == "fail"


def test_another_audit_of_more_rounds_covers_nothing(tmp_path, command: Command):
    short = site(tmp_path / "berlin", [8.0], "not demonstrated", thresholds=[KEPT])
    long = site(tmp_path / "paris", [8.0], "not demonstrated", thresholds=[KEPT])
    result = json.loads((long / "results.json").read_text())
    result["name"] = "paris"
    for one_of in result["federations"]:
        one_of["rounds"] = 100
    (long / "results.json").write_text(json.dumps(result))
    guard = log(tmp_path / "guard", [quiet(0), quiet(1)])
    assert command("statement", short, long, guard, "--out", tmp_path / "s").code == 3
    assert limits_of(tmp_path / "s")["no more rounds than were audited"] == "not tested"


def test_a_statement_has_a_folder_of_its_own(tmp_path, command: Command):
    source = site(tmp_path / "berlin", [8.0], "not demonstrated", thresholds=[KEPT])
    refused(command("statement", source, "--out", source), "results.json")
    guard = log(tmp_path / "guard", [quiet(0)])
    refused(command("statement", guard, "--out", guard), "guard.jsonl")


def test_a_statement_in_an_audit_s_folder_doesn_t_stand_for_it(tmp_path, command: Command):
    source = site(tmp_path / "berlin", [8.0], "not demonstrated", thresholds=[KEPT])
    command("statement", source, "--out", tmp_path / "s")
    (source / "statement.json").write_bytes((tmp_path / "s" / "statement.json").read_bytes())
    (source / "statement.html").write_bytes((tmp_path / "s" / "statement.html").read_bytes())
    done = command("verify", source)
    assert "belong together" not in done.out


def test_two_logs_in_folders_of_one_name_are_told_apart(tmp_path, command: Command):
    logs = [log(tmp_path / where / "guard", [quiet(i) for i in range(n)]) for where, n in (("a", 1), ("b", 3))]
    command("statement", *logs, "--out", tmp_path / "s")
    found = command("verify", tmp_path / "s", "--of", logs[0], "--of", logs[1])
    assert found.code == 0, found


def test_no_class_or_client_is_named_in_a_sheet_for_others(tmp_path, command: Command):
    folder = site(tmp_path / "berlin", [8.0], thresholds=[KEPT])
    result = json.loads((folder / "results.json").read_text())
    result["data"]["class_names"] = ["Zzyzxitis", "none"]
    (folder / "results.json").write_text(json.dumps(result))
    assert command("statement", folder, "--out", tmp_path / "s").code == 0
    for named, classes in (("zzyzxitis of the north", None), ("hiv against others", ["hiv", "others"])):
        result["name"] = named
        result["data"]["class_names"] = classes or result["data"]["class_names"]
        (folder / "results.json").write_text(json.dumps(result))
        refused(command("statement", folder, "--out", tmp_path / "t"), "name of a class")
    assert not (tmp_path / "t").exists()


def test_the_order_in_which_sources_are_named_changes_nothing(tmp_path, command: Command):
    sources = [site(tmp_path / name, [8.0], thresholds=[KEPT]) for name in ("berlin", "paris")]
    (log(tmp_path / "guard", [quiet(0)]), log(tmp_path / "other", [quiet(0, site="other")]))
    for source in sources:
        values = json.loads((source / "results.json").read_text())
        (source / "results.json").write_text(json.dumps({**values, "name": source.name}))
    named = [*sources, tmp_path / "guard", tmp_path / "other"]
    command("statement", *named, "--out", tmp_path / "s")
    of = [part for source in reversed(named) for part in ("--of", source)]
    found = command("verify", tmp_path / "s", *of)
    assert found.code == 0, found
    command("statement", *reversed(named), "--out", tmp_path / "t")
    assert (tmp_path / "t" / "statement.json").read_bytes() == (tmp_path / "s" / "statement.json").read_bytes()


def test_an_audit_and_its_shared_version_are_one(tmp_path, command: Command):
    folder = site(tmp_path / "berlin", [30.0, 8.0], thresholds=[KEPT])
    command("share", folder, "--out", tmp_path / "shared")
    refused(command("statement", folder, tmp_path / "shared", "--out", tmp_path / "s"), "are one audit")


def test_what_a_program_reads_has_the_digest_of_the_file(tmp_path, command: Command):
    done = command("statement", site(tmp_path / "b", [8.0], thresholds=[KEPT]), "--out", tmp_path / "s", "--json")
    assert json.loads(done.out) == json.loads((tmp_path / "s" / "statement.json").read_text())
    assert set(json.loads(done.out)["digest"]) != {"0"}


def test_a_certificate_is_told_of_whom_it_protects(tmp_path, command: Command):
    folder = site(tmp_path / "berlin", [8.0], thresholds=[KEPT])
    values = json.loads((folder / "results.json").read_text())
    timing = {"training": 0.0, "client_defence": 0.0}
    course = {"accuracy": [], "bytes": 1, "parameters": 1, "examples": 1, "epsilon": [1.0], "epsilon_unit": "record"}
    course |= {"certificate": {"candidates": 168, "success": 0.03, "central": False}, "timing": timing}
    values["federations"][0]["history"] = course
    (folder / "results.json").write_text(json.dumps(values))
    assert command("statement", folder, "--out", tmp_path / "s").code == 0
    made = json.loads((tmp_path / "s" / "statement.json").read_text())
    begin = f"{values['federations'][0]['name']}, for each record: of 168 candidates"
    assert made["audits"][0]["certificates"][0].startswith(begin)


def started(folder: Path, days: int | None, **changes: Any) -> Path:
    """The site's audit, begun so many days ago; None: without a date."""
    values = json.loads((folder / "results.json").read_text())
    when = None if days is None else (datetime.now(UTC) - timedelta(days=days)).isoformat()
    values["timing"]["started"] = when
    (folder / "results.json").write_text(json.dumps({**values, **changes}))
    return folder


@pytest.mark.parametrize(("days", "code"), [(0, 0), (30, 0), (31, 1), (None, 3)])
def test_a_limit_of_age_is_kept_to_the_day(days: int | None, code: int, tmp_path, command: Command):
    source = started(site(tmp_path / "berlin", [8.0], "not demonstrated", thresholds=[KEPT]), days)
    assert command("statement", source, "--out", tmp_path / "s", "--max-age", 30).code == code
    made = json.loads((tmp_path / "s" / "statement.json").read_text())
    day = None if days is None else str((datetime.now(UTC) + timedelta(days=30 - days)).date())
    assert made["valid_until"] == day
    assert [(one["why"], one["by"]) for one in made["again"]] == ([("age", day)] if day else [])
    assert command("verify", tmp_path / "s", "--of", source).code == (2 if code == 1 else 0)  # it is over already


def test_the_day_to_test_again_is_the_first_of_all(tmp_path, command: Command):
    """Two updates a day left, of ten rounds that were audited; ε is spent after 16, of which 3 are spent."""
    source = started(site(tmp_path / "berlin", [8.0], "not demonstrated", thresholds=[KEPT]), 1)
    values = json.loads((source / "results.json").read_text())
    values["federations"][0]["rounds"] = 10
    started(source, 1, federations=values["federations"])
    begin = datetime(2026, 3, 1, tzinfo=UTC)
    rounds = [quiet(i, time=begin + timedelta(hours=12 * i)) for i in range(3)]
    day = (datetime.now(UTC) + timedelta(days=400)).date()
    command("statement", source, log(tmp_path / "guard", rounds), "--out", tmp_path / "s", "--valid-until", day)
    made = json.loads((tmp_path / "s" / "statement.json").read_text())
    # the last left on 2 March at noon or so: the 11th would leave on the 6th, and the 16th spends the last of 8
    assert [(one["why"], one["by"]) for one in made["again"]] == [
        ("rounds", "2026-03-06"),
        ("epsilon", "2026-03-08"),
        ("given", str(day)),
    ]
    assert made["valid_until"] == str(day)
    told = (tmp_path / "s" / "statement.prom").read_text()
    end = int(datetime(2026, 3, 6, 23, 59, 59, tzinfo=UTC).timestamp())
    assert f"fedaudit_statement_test_again_timestamp_seconds {end}\n" in told
    assert 'fedaudit_statement_rounds_audited{audit="small",federation="sgd"} 10\n' in told
    assert "fedaudit_statement_updates_sent{" in told
    assert command("verify", tmp_path / "s", "--of", source, "--of", tmp_path / "guard").code == 0


@pytest.mark.parametrize(
    "when", ["2099-01-01T00:00:00+00:00", "9999-12-31T23:59:59-12:00", "0001-01-01T00:00:00+14:00"]
)
def test_a_date_that_can_t_be_is_no_young_age(when: str, tmp_path, command: Command):
    source = started(site(tmp_path / "berlin", [8.0], "not demonstrated", thresholds=[KEPT]), 1)
    values = json.loads((source / "results.json").read_text())
    values["timing"]["started"] = when
    (source / "results.json").write_text(json.dumps(values))
    assert command("statement", source, "--out", tmp_path / "s", "--max-age", 30).code == 3
    made = json.loads((tmp_path / "s" / "statement.json").read_text())
    assert any("NOT TESTED: its age isn't known" in limit["text"] for limit in made["limits"])
    assert made["valid_until"] is None


def test_what_was_sent_already_has_no_day_to_come(tmp_path, command: Command):
    source = started(site(tmp_path / "berlin", [8.0], "not demonstrated", thresholds=[KEPT]), 1)
    values = json.loads((source / "results.json").read_text())
    values["federations"][0]["rounds"] = 3
    started(source, 1, federations=values["federations"])
    begin = datetime(2026, 3, 1, tzinfo=UTC)
    rounds = [quiet(i, time=begin + timedelta(days=i), epsilon=None, target=None) for i in range(8)]
    command("statement", source, log(tmp_path / "guard", rounds), "--out", tmp_path / "s")
    (again,) = json.loads((tmp_path / "s" / "statement.json").read_text())["again"]
    assert again["by"] == "2026-03-04"  # the fourth left
    assert "sent its update number 4, and 3 rounds were audited" in again["text"]


def test_a_log_of_the_end_of_days_is_read(tmp_path, command: Command):
    source = started(site(tmp_path / "berlin", [8.0], "not demonstrated", thresholds=[KEPT]), 1)
    rounds = [quiet(i, time=datetime(9999, 12, 30 + i, tzinfo=UTC), epsilon=1e-300, target=1e300) for i in range(2)]
    assert command("statement", source, log(tmp_path / "guard", rounds), "--out", tmp_path / "s").code in (0, 3)


def test_names_can_t_break_out_of_a_metric(tmp_path, command: Command):
    source = site(tmp_path / "berlin", [8.0], "not demonstrated", thresholds=[KEPT])
    started(source, 0, name='a"} 1\nfedaudit_statement_kept 1\n#\\')
    command("statement", source, "--out", tmp_path / "s")
    lines = (tmp_path / "s" / "statement.prom").read_text().splitlines()
    assert sum(line.startswith("fedaudit_statement_kept ") for line in lines) == 1
    assert any('audit="a\\"} 1\\nfedaudit_statement_kept 1\\n#\\\\"' in line for line in lines)
