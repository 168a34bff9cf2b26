"""Images that were tried several times: every output counts, averages and shows the same victims."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from fedaudit.evaluation.images import best_tries
from fedaudit.evaluation.scores import compare, summarise
from fedaudit.report import compare as audits
from fedaudit.report import junit, markdown, notebook, sarif
from fedaudit.report.figures import spreads
from fedaudit.report.page import render_report
from fedaudit.report.terminal import print_summary
from fedaudit.results import AuditResult, FindingResult
from tests.report.output_cases import image
from tests.report.output_cases import result as audit_of

# The PSNR of each try by victim; what is above 15 dB came out visibly and was identified, but for those in UNLIKE.
TRIES = {"a": [19.0, 25.0, 16.0], "b": [14.0, 21.0], "c": [30.0], "d": [12.0], "e": [17.0, 26.0]}
UNLIKE = ("e", 1)  # the nearest try of its victim, and yet another candidate is nearer still
BEST = {"a": 25.0, "b": 21.0, "c": 30.0, "d": 12.0, "e": 17.0}
MEAN, MIDDLE, OVER_ALL = "21.0 dB", "21.0 dB", "20.0 dB"


def findings(folder: Path, attack: str, worse: float = 0.0) -> list[FindingResult]:
    found = []
    for number in range(3):
        images = []
        for i, (victim, tries) in enumerate(TRIES.items()):
            if number < len(tries):
                one = image(folder, "fedsgd", 0, i, attack, tries[number] - worse * (number == 0))
                values = {"victim": victim, "ssim": 0.9 if one.psnr > 15 else 0.2}
                images.append(one.model_copy(update=values | ({"rank": 2} if (victim, number) == UNLIKE else {})))
        found.append(
            FindingResult(
                attack=attack,
                federation="fedsgd",
                update_kind="gradient",
                round=number,
                client=0,
                rounds=[number],
                num_examples=len(images),
                status="done",
                kind="images",
                images=images,
            )
        )
    return found


@pytest.fixture
def result(tmp_path: Path) -> AuditResult:
    one, other = findings(tmp_path, "invg"), findings(tmp_path, "agic", worse=0.5)
    rows = summarise([*one, *other], resamples=100, seed=0, who="The server")
    parts = list(zip((one, other), rows, strict=True))
    return audit_of(tmp_path, parts, comparisons=compare([*one, *other], rows))


def test_a_victim_counts_by_the_try_that_came_out_and_not_by_the_nearest(tmp_path: Path) -> None:
    found = findings(tmp_path, "invg")
    best = best_tries([i for f in found for i in f.images])
    assert {i.victim: i.psnr for i in best} == BEST


def test_a_summary_is_over_victims_with_the_mean_of_all_tries_beside_it(result: AuditResult) -> None:
    row = result.summaries[0]
    assert row.psnr
    assert row.psnr.mean == pytest.approx(21.0)
    assert (row.psnr.median, row.psnr.n) == (21.0, 5)
    assert row.psnr_of_tries == pytest.approx(sum(sum(t) for t in TRIES.values()) / 9)
    assert row.identification_rate == 0.8
    assert row.evidence
    assert (row.evidence.value, row.evidence.n, row.evidence.of) == (0.8, 5, "images")
    assert "4 of 5 images came out visibly (in 6 of 9 tries)" in row.verdict_text
    assert result.comparisons[0].difference.mean == pytest.approx(-0.3)  # of best tries, which lost in c, d and e


def test_one_try_each_says_nothing_of_tries(tmp_path: Path) -> None:
    row = summarise(findings(tmp_path, "invg")[:1], resamples=100, seed=0)[0]
    assert row.psnr_of_tries is None
    assert "tries" not in row.verdict_text


def test_every_output_says_the_same_of_the_victims(
    result: AuditResult, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = re.sub(r"\s+", " ", re.sub("<[^>]*>", " ", render_report(result, tmp_path)))
    card = page[page.index("4 of 5 images came out visibly (in 6 of 9 tries)") :][:1200]
    assert f"{MEAN} mean PSNR of each image’s best try ({OVER_ALL} over all 9 tries)" in card
    assert "4 of 5 images identified" in card
    assert f"the middle one of its 5 images by PSNR of the best try ({MIDDLE})" in card
    assert "6. " not in page[page.index("True and reconstructed images") :][:3000]  # a row a victim
    images = [i for f in result.findings for i in f.images]
    files = {name: torch.zeros(1, 8, 8) for i in images for name in (i.true_image, i.reconstruction)}
    shown = notebook.as_html(result, files)
    assert f"{MEAN} [" in shown
    assert f"of each one&#x27;s best try, {OVER_ALL} over all tries" in shown
    assert "identified 80 % of 5 images, 9 tries" in shown
    assert [float(db) for db in re.findall(r'title="recovered, ([\d.]+) dB"', shown)[:4]] == [25.0, 21.0, 30.0, 12.0]
    print_summary(result)
    printed = capsys.readouterr().out
    assert "21.0 [" in printed
    assert "5 images, 9 tries" in printed
    assert "over all: invg on fedsgd 20.0 dB" in printed
    for text in (markdown.render(result), junit.render(result), sarif.render(result)):
        assert "n = 5 images, 9 tries" in text
        assert "came out visibly 0.8" in text
    assert sorted(spreads(result, "fedsgd")[0].psnr) == sorted(BEST.values())


def test_two_audits_are_compared_by_all_tries(result: AuditResult, tmp_path: Path) -> None:
    rows = audits.compare_audits(result, result).rows
    assert {row.attack: row.old for row in rows}["invg"] == pytest.approx(20.0)
