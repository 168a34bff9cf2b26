"""The page of evidence says what the results' files say."""

from __future__ import annotations

import pytest
import yaml

from fedaudit_lab.studies.spec import builtin_studies, load_study
from tests import evidence

_KEYS = {"place", "claim", "theirs", "study", "says", "at", "but", "void", "against", "hours"}


def test_the_page_is_what_the_results_give():
    assert evidence.PAGE.read_text(encoding="utf-8") == evidence.page(), "run: python -m tests.evidence"


def test_every_claim_is_one_that_its_study_decides():
    papers = yaml.safe_load((evidence.DOCS / "evidence" / "claims.yaml").read_text(encoding="utf-8"))
    claims = [claim for paper in papers for claim in paper["claims"]]
    assert len(papers) == 4
    for claim in claims:
        assert set(claim) <= _KEYS, claim
        if "says" in claim:
            assert claim["says"] in [c.text for c in load_study(claim["study"]).claims], claim["study"]
            assert claim["study"] in builtin_studies()


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ("", ("holds", "undecided")),
        (", against: true", ("doesn't hold", "undecided")),
        (", but: no", ("holds", "undecided")),
        (", against: true, but: it differs", ("undecided: it differs", "undecided")),
    ],
)
def test_a_study_s_outcomes_are_told_as_the_paper_claims_them(tmp_path, monkeypatch, more, expected):
    monkeypatch.setattr(evidence, "DOCS", tmp_path)
    folder = tmp_path / "results" / "a-b"
    folder.mkdir(parents=True)
    (folder / "claims.csv").write_text(
        "claim,where,metric,difference,low,high,n,outcome,study,scale\n"
        "x beats y,batch 1,psnr,2.04,1.0,3.0,20,holds,a/b,cpu\n"
        "x beats y,batch 4,psnr,0.1,-1.0,1.2,5,undecided,a/b,cpu\n"
        "x beats y,batch 8,psnr,,,,,not measured,a/b,cpu\n"
        "y beats x,batch 1,psnr,-2.04,-3.0,-1.0,20,doesn't hold,a/b,cpu\n"
        "x beats y,batch 1,psnr,-9.0,-9.9,-8.0,20,doesn't hold,a/other,cpu\n"
    )
    paper = "- paper: P\n  claims:\n    - {place: T, claim: c, study: a/b, says: x beats y, hours: 3%s}\n"
    (tmp_path / "evidence").mkdir()
    (tmp_path / "evidence" / "claims.yaml").write_text(paper % more)
    page = evidence.page()
    (row,) = [line for line in page.splitlines() if line.startswith("| T |")]
    assert row.endswith("| " + "<br>".join(f"**{o}**" for o in expected) + " |")
    assert "batch 1: psnr +2.0 [+1.0, +3.0], n=20" in row
    assert "batch 8" not in row
    decided = "it differs" not in more
    assert f"{int(decided)} of 1 claims are decided" in page
    assert f"about {0 if decided else 3} hours" in page


def test_the_published_setting_decides_not_a_smaller_one(tmp_path, monkeypatch):
    monkeypatch.setattr(evidence, "DOCS", tmp_path)
    head = "claim,where,metric,difference,low,high,n,outcome,study,scale"
    results = {
        "cpu": ["batch 1,psnr,2.0,1.0,3.0,20,holds,a/b,cpu", "batch 4,psnr,1.5,1.0,2.0,8,holds,a/b,cpu"],
        "paper": ["batch 1,psnr,1.1,-1.0,3.2,20,undecided,a/b,paper", "batch 4,psnr,,,,,not measured,a/b,paper"],
    }
    for name, rows in results.items():
        folder = tmp_path / "results" / name
        folder.mkdir(parents=True)
        (folder / "claims.csv").write_text("\n".join([head, *(f"x beats y,{row}" for row in rows)]))
    (tmp_path / "evidence").mkdir()
    (tmp_path / "evidence" / "claims.yaml").write_text(
        "- paper: P\n  claims:\n    - {place: T, claim: c, study: a/b, says: x beats y, hours: 3}\n"
    )
    (row,) = [line for line in evidence.page().splitlines() if line.startswith("| T |")]
    assert "batch 1: psnr +1.1 [-1.0, +3.2], n=20 ([a/b](../results/paper/result.md))" in row
    assert "batch 4: psnr +1.5 [+1.0, +2.0], n=8 ([a/b](../results/cpu/result.md))" in row
    assert "+2.0 [" not in row
