"""A site's page says in one sentence what was found and done; programs get OpenMetrics."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fedaudit.guard.page import headline, metrics, page, write_site
from fedaudit.guard.rounds import CheckOutcome, CheckRecord, Done, SiteRound

NOW = "2026-01-01T00:00:00+00:00"
HOSTILE = 'a"b\\c\nd</script>'


def one(
    number: int,
    invg: CheckOutcome = "not played",
    done: Done = "left",
    site: str = "node 7",
    epsilon: float | None = None,
) -> SiteRound:
    text = {"alarm": "recovered (24.1 dB)", "unable": "48 examples, and largest is 32; raise largest"}.get(invg, "")
    checks = {
        "received": CheckRecord(outcome="quiet"),
        "invg": CheckRecord(outcome=invg, text=text),
        "members": CheckRecord(outcome="not played", text="no held-out examples: give held_out"),
    }
    return SiteRound(
        time=f"2026-01-01T{number // 60:02d}:{number % 60:02d}:00+00:00",
        job="job-1",
        site=site,
        index=number,
        done=done,
        checks=checks,
        trained=2.0,
        spent=3.0 if number == 0 else 0.05,
        slope=0.5 + number / 1000,
        epsilon=epsilon,
        target=8.0 if epsilon is not None else None,
    )


def hundred() -> list[SiteRound]:
    rounds = [one(number, epsilon=0.05 * (number + 1)) for number in range(100)]
    rounds[0] = one(0, "alarm", epsilon=0.05)
    rounds[40] = one(40, "alarm", "refused")
    rounds[41] = one(41, "alarm", "clipped", epsilon=2.1)
    rounds[50] = one(50, "unable", epsilon=2.5)
    return rounds


def test_the_headline_says_what_was_found_in_how_many_rounds_and_what_was_done():
    assert headline(hundred()) == "Alarms in 3 of 100 rounds (invg): 1 left nevertheless, 1 clipped, 1 refused."
    assert headline([one(1, "quiet"), one(2, "quiet")]) == "No alarm in 2 rounds."
    assert headline([one(0), one(1, "quiet")]) == "No alarm in 2 rounds; of 1 the update was checked."
    models = "No update was checked in 2 rounds; the models that came in raised no alarm."
    assert headline([one(0), one(1, "unable")]) == models
    assert headline([one(0, done="stopped"), one(1, "quiet")]).endswith("budget is spent: 1 update not sent.")
    nothing = SiteRound(time=NOW, job="j", site="s", checks={"invg": CheckRecord(outcome="unable")})
    assert headline([nothing]) == "Nothing could be checked in 1 round."


def test_the_page_of_a_hundred_rounds_is_small_and_says_what_isn_t_watched_and_why():
    text = page(hundred())
    assert len(text) < 100_000
    assert text.count('<rect class="alarm" x') == 3
    assert len(re.findall(r'class="unable" d="M\d+\.', text)) == 1
    assert re.search(r"invg</th><td[^>]*>3 of 100</td><td[^>]*>3</td><td[^>]*>1</td>", text)
    assert re.search(r"own records</th><td[^>]*>0 of 100</td>.*no held-out examples: give held_out", text)
    assert re.search(r"took 3\.9[78] % of the time that the site trained; 2\.5 % after the first round", text)
    assert "ε 5.00 of 8 spent" in text
    assert text.index(">42</td>") < text.index(">41</td>") < text.index(">1</td><td")  # the last alarm first


def test_of_thousands_of_rounds_several_share_a_column_and_no_alarm_is_lost():
    rounds = [one(number % 1000) for number in range(3000)]
    rounds[1234] = one(234, "alarm")
    text = page(rounds)
    assert len(text) < 110_000
    assert text.count('<rect class="alarm" x') == 1
    assert "a column is 30 rounds, the worst of them" in text
    assert ">1235</td>" in text


def test_what_others_wrote_is_escaped():
    rounds = [one(0, "alarm", site=HOSTILE)]
    assert "</script>" not in page(rounds)
    assert "&lt;/script&gt;" in page(rounds)
    assert 'site="a\\"b\\\\c\\nd</script>"' in metrics(rounds)


def test_each_job_and_site_has_its_part_the_last_first(tmp_path):
    rounds = [one(0, site="a"), one(1, "alarm", site="b"), one(2, site="a")]
    write_site(rounds, tmp_path)
    text = (tmp_path / "guard.html").read_text(encoding="utf-8")
    assert text.index("job-1, a:") < text.index("job-1, b:")
    many = [one(number, site=f"s{number}") for number in range(9)]
    assert "5 more jobs and sites" in page(many)
    assert sorted(path.name for path in Path(tmp_path).iterdir()) == ["guard.html", "guard.prom"]


# --- OpenMetrics -----------------------------------------------------------------------------------------------------

SAMPLE = re.compile(r'([a-z_]+)\{((?:[a-z_]+="(?:[^"\\\n]|\\["\\n])*",?)*)\} (-?[0-9.e+-]+)')


def samples(text: str) -> dict[tuple[str, str], float]:
    """Read OpenMetrics as strictly as these files need it: families whole, in order and once, and an end."""
    *lines, end = text.splitlines()
    assert (end, text[-1]) == ("# EOF", "\n")
    found: dict[tuple[str, str], float] = {}
    seen: list[str] = []
    family, kind = "", ""
    for line in lines:
        if line.startswith("# TYPE "):
            family, kind = line.split(" ")[2:]
            assert family not in seen
            assert kind in ("counter", "gauge")
            seen.append(family)
        elif line.startswith("# UNIT "):
            assert line.split(" ")[2] == family
            assert family.endswith("_" + line.split(" ")[3])
        elif line.startswith("# HELP "):
            assert line.split(" ")[2] == family
        else:
            match = SAMPLE.fullmatch(line)
            assert match is not None, line
            assert match[1] == family + ("_total" if kind == "counter" else "")
            assert (match[1], match[2]) not in found
            assert kind == "gauge" or float(match[3]) >= 0
            found[match[1], match[2]] = float(match[3])
    return found


def test_programs_get_what_the_file_says():
    found = samples(metrics([*hundred(), one(0, site=HOSTILE)]))
    where = 'job="job-1",site="node 7"'
    assert found["fedaudit_guard_rounds_total", f'{where},done="left"'] == 98
    assert found["fedaudit_guard_rounds_total", f'{where},done="refused"'] == 1
    assert found["fedaudit_guard_checks_total", f'{where},check="invg",outcome="alarm"'] == 3
    assert found["fedaudit_guard_checks_total", f'{where},check="received",outcome="quiet"'] == 100
    assert found["fedaudit_guard_training_seconds_total", where] == 200
    assert found["fedaudit_guard_taken_seconds_total", where] == pytest.approx(3 + 99 * 0.05)
    assert found["fedaudit_guard_epsilon", where] == 5.0
    assert found["fedaudit_guard_target_epsilon", where] == 8.0
    assert found["fedaudit_guard_last_round_timestamp_seconds", where] == 1767231540  # 2026-01-01 01:39 UTC


@pytest.mark.peers
def test_prometheus_own_reader_takes_it():
    parser = pytest.importorskip("prometheus_client.openmetrics.parser")
    text = metrics([*hundred(), one(0, site=HOSTILE)])
    families = {family.name: family for family in parser.text_string_to_metric_families(text)}
    own = {
        (s.name, s.labels["site"], s.labels.get("outcome")): s.value for s in families["fedaudit_guard_checks"].samples
    }
    assert own["fedaudit_guard_checks_total", "node 7", "alarm"] == 3
    assert {s.labels["site"] for s in families["fedaudit_guard_rounds"].samples} == {"node 7", HOSTILE}
    assert families["fedaudit_guard_training_seconds"].unit == "seconds"
