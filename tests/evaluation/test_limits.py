"""Limits that a user sets: which there are, what each is compared with, and what is said where nothing measures it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from fedaudit.evaluation import Limits, check_limits, summarise
from fedaudit.evaluation.limits import limitable
from fedaudit.report.conclusion import threshold_text
from fedaudit.results import FindingResult, ImageResult, MetricResult
from tests.conftest import Command

DOCS = Path(__file__).parents[2] / "docs" / "reference" / "results.md"


def finding(attack: str, federation: str = "f", **rest: Any) -> FindingResult:
    training = {"update_kind": "gradient", "round": 0, "client": 0, "num_examples": 1, "status": "done"}
    return FindingResult.model_validate({"attack": attack, "federation": federation, **training, **rest})


def image(**rest: Any) -> ImageResult:
    values = {"true_label": 0, "label": 0, "mse": 0.01, "psnr": 20.0, "ssim": 0.6, "rank": 1, "candidates": 100}
    names = {"true_image": "t.png", "reconstruction": "r.png", "psnr_mean_image": 12.0, "psnr_same_class": None}
    return ImageResult.model_validate({**values, **names, **rest})


def labels(attack: str, value: float, **rest: Any) -> FindingResult:
    metric = MetricResult(name="label_accuracy", value=value, higher_is_better=True, baseline=0.5)
    return finding(attack, kind="labels", metrics=[metric], label_accuracy=value, **rest)


def inverted(attack: str, value: float, source: str, **rest: Any) -> FindingResult:
    return finding(attack, kind="images", images=[image()], label_accuracy=value, label_source=source, **rest)


@pytest.mark.parametrize(
    ("findings", "worst", "where"),
    [
        ([labels("labels", 0.75), labels("labels", 0.25)], 0.75, "labels on f"),
        ([inverted("invg", 1.0, "idlg"), inverted("invg", 0.5, "idlg"), labels("labels", 0.25)], 0.75, "invg on f"),
        ([inverted("invg", 1.0, "given")], None, None),
        ([inverted("invg", 1.0, "given"), inverted("invg", 0.5, "idlg", federation="g")], 0.5, "invg on g"),
    ],
    ids=["an attack on labels", "images' labels are a mean", "labels that were given", "given to some"],
)
def test_labels_are_limited_by_whichever_attack_recovers_them(findings, worst, where):
    summaries = summarise(findings, resamples=100, seed=0)
    (limit,) = check_limits(Limits({"label_accuracy": 0.6}), findings, summaries)
    assert (limit.worst, limit.where, limit.exceeded) == (worst, where, worst is not None and worst > 0.6)
    assert limit.outcome == ("fail" if limit.exceeded else "not tested")
    assert ("nothing that was run measures it" in threshold_text(limit)) == (limit.outcome == "not tested")


def test_every_limit_is_named_once_and_documented():
    assert len(set(limitable())) == len(limitable())
    table = DOCS.read_text().partition("**Limits**")[2].partition("**A transcript**")[0]
    named = {name for row in re.findall(r"^\| (`.*?) \|", table, re.MULTILINE) for name in re.findall(r"`(\w+)`", row)}
    assert named == set(limitable())


def test_limits_on_labels_fire_from_the_command_line(scenario_file: Path, tmp_path: Path, command: Command) -> None:
    limit = ["--workers", "1", "--fail-above", "label_accuracy=0.5"]
    outcome = command("audit", scenario_file, "--set", "attacks=[labels]", "--out", tmp_path / "a", *limit)
    assert outcome.code == 1
    line = "FAIL: label accuracy at most 0.5: labels on sgd reached 1.00"
    assert line in outcome.out
    assert line in (tmp_path / "a" / "report.html").read_text()
    granted = command("audit", scenario_file, "--set", "threat.knows_labels=true", "--out", tmp_path / "b", *limit)
    assert granted.code == 3
    assert "NOT TESTED: label accuracy at most 0.5" in granted.out
    page = (tmp_path / "b" / "report.html").read_text()
    assert re.search(r"<td[^>]*>given</td>", page)
