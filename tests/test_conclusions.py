"""What a report concludes about findings that aren't pictures, and about federations that nobody attacked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fedaudit.report import frontier
from fedaudit.report.page import headline, render_report, strongest
from fedaudit.results import AttackSummary, AuditResult, Interval, MetricSummary, Verdict
from tests.report_cases import sample


def interval(mean: float, n: int = 3) -> Interval:
    return Interval(mean=mean, median=mean, low=mean - 0.1, high=mean + 0.1, n=n)


def summary(attack: str, metric: str, value: float, *, verdict: Verdict = "demonstrated", **rest: Any) -> AttackSummary:
    told = {"attack": attack, "federation": "fedsgd", "update_kind": "gradient", "updates": 3, "images": 0}
    if metric == "psnr":
        verdict = "recognisable" if verdict == "demonstrated" else verdict
        return AttackSummary.model_validate({**told, "verdict": verdict, "verdict_text": "t", "psnr": interval(value)})
    higher = rest.get("higher", True)
    measured = MetricSummary(name=metric, summary="what it is", higher_is_better=higher, value=interval(value))
    return AttackSummary.model_validate({**told, "verdict": verdict, "verdict_text": "t", "metrics": [measured]})


def result_with(folder: Path, *summaries: AttackSummary) -> AuditResult:
    result = sample(folder, curve=False)
    return result.model_copy(update={"findings": [], "comparisons": [], "summaries": list(summaries)})


@pytest.mark.parametrize(
    ("summaries", "wanted"),
    [
        ([summary("a", "membership_auc", 0.6), summary("b", "membership_auc", 0.9)], "b"),
        ([summary("a", "distance", 0.6, higher=False), summary("b", "distance", 0.9, higher=False)], "a"),
        (
            [
                summary("a", "membership_auc", 0.6),
                summary("b", "membership_auc", 0.9, verdict="not demonstrated"),
            ],
            "a",
        ),
        ([summary("a", "gap_closed", 0.6), summary("b", "psnr", 20.0), summary("c", "psnr", 30.0)], "c"),
        (
            [
                summary("p", "psnr", 9.0, verdict="not demonstrated"),
                summary("a", "gap_closed", 0.6),
                summary("b", "gap_closed", 0.7),
                summary("c", "membership_auc", 0.9),
            ],
            "b",
        ),
    ],
    ids=["more is stronger", "less is stronger", "the verdict comes first", "pictures come first", "kinds in order"],
)
def test_the_strongest_attack_is_the_one_that_reached_most(tmp_path, summaries, wanted):
    result = result_with(tmp_path, *summaries)
    best = strongest(result, result.summaries)
    assert best is not None
    assert best.attack == wanted
    assert f"The strongest attack, {wanted} on" in headline(result).detail
    assert f"strongest attack: <b>{wanted}</b>" in render_report(result, tmp_path)


def test_the_comparison_names_the_same_attack(tmp_path):
    result = result_with(tmp_path, summary("a", "membership_auc", 0.6), summary("b", "membership_auc", 0.9))
    assert frontier.scale(result).name == "membership_auc"
    assert max(result.summaries, key=lambda s: frontier.strength(s, frontier.scales(result))).attack == "b"


def test_a_federation_that_nobody_attacked_is_no_verdict(tmp_path):
    result = result_with(tmp_path, summary("a", "membership_auc", 0.6))
    page = render_report(result, tmp_path)
    assert "not attacked</span>" in page
    assert "not applicable</span>" not in page
    assert "whether it leaks is not known" in page
