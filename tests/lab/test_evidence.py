"""The page of evidence says what the results' files say, by one rule for and against the papers."""

from __future__ import annotations

import csv
import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import scipy.stats
import yaml

from fedaudit.results import Interval
from fedaudit_lab.studies.spec import builtin_studies, load_study
from tools import evidence

_DECIDE = {"place", "claim", "study", "says", "at", "published", "band", "alike", "against", "void"}
_WORDS = {"theirs", "note", "hours"}
_HEADER = "claim,where,metric,difference,low,high,n,updates,published,outcome,study,scale"


def papers() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = yaml.safe_load((evidence.DOCS / "evidence/claims.yaml").read_text(encoding="utf-8"))
    return found


def claims() -> list[dict[str, Any]]:
    return [claim for paper in papers() for claim in paper["claims"]]


def span(low: float, high: float, n: int = 10) -> Interval:
    return Interval(mean=(low + high) / 2, median=(low + high) / 2, low=low, high=high, n=n)


@pytest.fixture
def pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Return the page of these claims and results: name of a folder -> (seeds, rows of claims.csv)."""

    def made(claims: str, **results: tuple[int, list[str]]) -> str:
        monkeypatch.setattr(evidence, "DOCS", tmp_path)
        monkeypatch.setattr(evidence, "RESULTS", tmp_path / "results")
        (tmp_path / "evidence").mkdir(exist_ok=True)
        (tmp_path / "evidence" / "claims.yaml").write_text(
            f"- paper: P\n  settings: {{a/b cpu: small}}\n  claims:\n{claims}"
        )
        for name, (seeds, rows) in results.items():
            folder = tmp_path / "results" / name
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "claims.csv").write_text("\n".join([_HEADER, *rows]))
            (folder / "result.csv").write_text(f"seeds\n{seeds}\n")
        return evidence.page()

    return made


def told(page: str, place: str = "T") -> list[str]:
    """Return the cells of the claim's row."""
    (row,) = [line for line in page.splitlines() if line.startswith(f"| {place} |")]
    return [cell.strip() for cell in row.split("|")[1:-1]]


def test_the_page_is_what_the_results_give():
    assert evidence.PAGE.read_text(encoding="utf-8") == evidence.page(), "run: python -m tools.evidence"


def test_every_claim_is_one_that_its_study_decides():
    assert len(papers()) == 4
    for claim in claims():
        assert set(claim) <= _DECIDE | _WORDS, claim
        if "says" in claim:
            assert claim["says"] in [c.text for c in load_study(claim["study"]).claims], claim["study"]
            assert claim["study"] in builtin_studies()
        else:
            assert "study" not in claim or claim.get("note"), claim
            assert "hours" in claim or claim.get("note"), claim


def test_what_decides_is_the_study_s_own():
    """Published differences are those of the paper's numbers in the study, bands those of its claim, if it has any."""
    for claim, (row, *_) in itertools.product(claims(), evidence.compared()):
        if (
            claim.get("says") == row["claim"]
            and claim["study"] == row["study"]
            and claim.get("at") in (None, row["where"])
        ):
            spec = next(c for c in load_study(row["study"]).claims if c.text == row["claim"])
            if row["published"] and not spec.margin and "band" not in claim:
                sign = -1 if claim.get("against") else 1
                assert claim["published"] == pytest.approx(sign * float(row["published"]), abs=6e-4), claim
            if spec.margin and not claim.get("against"):
                assert (claim["band"], claim.get("alike", False)) == (spec.margin, spec.either_way), claim


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0.5, 1.5, "holds"),
        (2.5, 3.0, "holds"),
        (0.5, 1.0, "smaller than published"),
        (-0.5, 1.0, "smaller than published, or none"),
        (-0.5, 2.5, "undecided"),
        (-2.5, -0.1, "contradicted here"),
    ],
)
def test_an_outcome_is_what_the_interval_says_of_zero_and_of_the_published_difference(low, high, expected):
    assert evidence.outcome({"published": 1.2 if low < 2 else 2.0}, span(low, high)) == expected
    assert evidence.outcome({"published": 1.2}, span(low, high, n=1)) == "undecided"


@pytest.mark.parametrize(
    ("band", "low", "high", "expected"),
    [
        ({"band": 2}, -1, 5, "holds"),
        ({"band": 2}, -3, 5, "undecided"),
        ({"band": 2}, -5, -2.1, "contradicted here"),
        ({"band": 2, "alike": True}, -1, 1, "holds"),
        ({"band": 2, "alike": True}, -1, 3, "undecided"),
        ({"band": 2, "alike": True}, 2.1, 5, "contradicted here"),
        ({"band": 2, "alike": True}, -5, -2.1, "contradicted here"),
    ],
)
def test_no_worse_and_as_good_are_tested_against_the_band(band, low, high, expected):
    assert evidence.outcome(band, span(low, high)) == expected


def test_no_reason_given_by_hand_changes_an_outcome_in_one_direction_only():
    """Words leave every outcome, but ``void``, which leaves none: neither one for a paper nor one against it."""
    ends = [-3.0, -1.5, -0.5, 0.0, 0.5, 1.0, 1.5, 3.0]
    rules: list[dict[str, Any]] = [{}, {"published": 1.2}, {"band": 1.2}, {"band": 1.2, "alike": True}]
    spans = [span(low, high, n) for low, high in itertools.combinations(ends, 2) for n in (1, 10)]
    seen = set()
    for rule, ours in itertools.product(rules, spans):
        plain = evidence.outcome(rule, ours)
        seen.add(plain)
        for word in _WORDS | {"place", "claim", "setting", "but", "because"}:
            assert evidence.outcome({**rule, word: "a reason"}, ours) == plain
        assert evidence.outcome({**rule, "void": "a reason"}, ours) == "void: a reason"
    assert seen == {
        "holds",
        "smaller than published",
        "smaller than published, or none",
        "contradicted here",
        "undecided",
    }


def test_a_claim_s_contrary_is_told_the_other_way_round():
    """What confirms a claim contradicts its contrary, interval by interval."""
    mirrored = {"holds": "contradicted here", "contradicted here": "holds", "undecided": "undecided"}
    for low, high in itertools.combinations([-3.0, -1.5, -0.5, 0.5, 1.0, 3.0], 2):
        assert evidence.outcome({}, span(-high, -low)) == mirrored[evidence.outcome({}, span(low, high))]


def test_a_row_says_what_came_out_where_and_in_which_setting(pages):
    rows = [
        "x beats y,batch 1,psnr,2.0,1.0,3.0,20,40,,holds,a/b,cpu",
        "x beats y,batch 4,psnr,-2.0,-3.0,-1.0,12,12,,contradicted here,a/b,cpu",
        "x beats y,batch 8,psnr,,,,,,,not measured,a/b,cpu",
        "y beats x,batch 1,psnr,9.0,8.0,9.9,20,20,,holds,a/b,cpu",
        "x beats y,batch 1,psnr,-9.0,-9.9,-8.0,20,20,,contradicted here,a/other,cpu",
    ]
    claim = "    - {place: %s, claim: c, study: a/b, says: x beats y, hours: 3%s}\n"
    page = pages(claim % ("T", "") + claim % ("V", ", void: no picture shows"), x=(20, rows))
    *_, ours, setting, outcome = told(page)
    link = "[a/b](../../lab/docs/results/x/result.md)"
    assert ours.split("<br>")[0] == f"batch 1: psnr +2.0 [+1.0, +3.0], n=20 (40 updates) ({link})"
    assert (setting, outcome) == ("small", "**holds \\***<br>**contradicted here \\***")
    assert told(page, "V")[-1] == "**void: no picture shows**"
    assert "2 claims: 1 *mixed*, 1 *void*" in page
    assert "about 6 hours" in page
    assert "makes 4 comparisons" in page
    assert "2 decided ones" in page


def test_a_void_claim_helps_no_other(pages):
    """It stays among the comparisons over which Holm's correction goes."""
    rows = [f"x beats y,{place},psnr,1.0,{1 - w},{1 + w},5,5,,holds,a/b,cpu" for place, w in (("p", 0.6), ("q", 0.5))]
    claim = "    - {place: %s, claim: c, study: a/b, says: x beats y, at: %s%s}\n"
    plain = pages(claim % ("T", "p", "") + claim % ("U", "q", ""), x=(5, rows))
    void = pages(claim % ("T", "p", "") + claim % ("U", "q", ", void: none shows"), x=(5, rows))
    assert told(plain, "T") == told(void, "T")
    assert told(void, "U")[-1] == "**void: none shows**"


def test_updates_that_share_a_network_are_no_independent_evidence(pages):
    claim = "    - {place: T, claim: c, study: a/b, says: x beats y}\n"
    row = "x beats y,,psnr,2.0,1.9,2.1,50,50,,holds,a/b,cpu"
    assert told(pages(claim, x=(10, [row])))[3].startswith(
        "psnr +2.0 [+1.9, +2.1], n=50 updates of 10 seeds: not independent"
    )
    assert told(pages(claim, x=(10, [row])))[-1] == "**holds**"
    assert told(pages(claim, x=(50, [row])))[-1] == "**holds \\***"


def test_the_published_setting_decides_not_a_smaller_one(pages):
    rows = {
        "cpu": ["batch 1,psnr,2.0,1.0,3.0,20,20,,holds,a/b,cpu", "batch 4,psnr,1.5,1.0,2.0,8,8,,holds,a/b,cpu"],
        "paper": ["batch 1,psnr,1.1,-1.0,3.2,20,20,,undecided,a/b,paper", "batch 4,psnr,,,,,,,not measured,a/b,paper"],
    }
    claim = "    - {place: T, claim: c, study: a/b, says: x beats y, published: 1.2}\n"
    page = pages(claim, **{name: (20, [f"x beats y,{row}" for row in some]) for name, some in rows.items()})
    second, first = told(page)[3].split("<br>")
    assert first == "batch 1: psnr +1.1 [-1.0, +3.2] against +1.2, n=20 ([a/b](../../lab/docs/results/paper/result.md))"
    assert second.endswith("([a/b](../../lab/docs/results/cpu/result.md))")
    assert told(page)[-1] == "**holds \\***<br>**undecided**"


def test_what_no_result_decides_says_what_it_takes(pages):
    page = pages(
        "    - {place: T, claim: c, note: no data, hours: 5}\n    - {place: U, claim: c, study: a/b, says: s}\n"
    )
    assert told(page)[3:] == ["no data; about 5 h", "–", "**not measured**"]
    assert told(page, "U")[3] == "`fedaudit study run a/b`"


def test_p_values_and_holm_s_correction_are_those_of_the_textbook():
    data = [0.4, 1.1, 0.9, 1.6, -0.2, 0.8]
    ends = scipy.stats.ttest_1samp(data, 0).confidence_interval(0.95)
    ours = Interval(mean=math.fsum(data) / 6, median=0, low=ends.low, high=ends.high, n=6)

    def p_value(**claim: Any) -> float:
        return evidence.Row(claim, ours, "psnr", "", 6, 6, "", "").p_value

    assert p_value() == pytest.approx(scipy.stats.ttest_1samp(data, 0).pvalue)
    assert p_value(band=0.3) == pytest.approx(scipy.stats.ttest_1samp(data, -0.3).pvalue)
    assert p_value(band=0.3, alike=True) == pytest.approx(scipy.stats.ttest_1samp(data, 0.3).pvalue)
    # Holm (1979): 0.01 < 0.05 / 4, 0.013 < 0.05 / 3, 0.03 > 0.05 / 2; so 0.04 doesn't survive, though it is below 0.05
    assert evidence.holm([0.04, 0.013, 0.01, 0.03]) == [False, True, True, False]


def test_the_studies_pages_say_the_same_as_their_files():
    """Every result.md has the outcomes of its claims.csv, none of an earlier rule."""
    for file in sorted(evidence.RESULTS.glob("*/claims.csv")):
        page = (file.parent / "result.md").read_text(encoding="utf-8")
        with file.open(encoding="utf-8") as opened:
            wanted = [row["outcome"] for row in csv.DictReader(opened)]
        lines = page[page.index("| claim | where | difference | outcome |") :].splitlines()[2:]
        assert [line.rsplit("|", 2)[1].strip(" *") for line in lines if line.startswith("|")] == wanted, file
        assert "doesn't hold" not in page.replace("doesn't hold it", ""), file
