"""What a report concludes about findings that aren't images, and about federations that nobody attacked."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from fedaudit.pipeline import run_audit
from fedaudit.report import frontier
from fedaudit.report.conclusion import headline
from fedaudit.report.frontier import Defended, _guarantee, _recommendation, strongest
from fedaudit.report.images import after_move
from fedaudit.report.page import render_report
from fedaudit.report.terminal import print_summary
from fedaudit.report.wording import noun
from fedaudit.results import (
    AttackSummary,
    AuditResult,
    Comparison,
    ControlResult,
    FederationRecord,
    HistoryRecord,
    HistoryTiming,
    Interval,
    MetricSummary,
    Verdict,
)
from fedaudit.results.images import RegisteredResult
from fedaudit_lab.studies.analysis import Cell
from fedaudit_lab.studies.drawing import cell_text, difference_text
from tests.attacks.membership_cases import scenario
from tests.report.report_cases import sample


def interval(mean: float, n: int = 3) -> Interval:
    return Interval(mean=mean, median=mean, low=mean - 0.1, high=mean + 0.1, n=n)


def summary(
    attack: str,
    metric: str,
    value: float,
    *,
    verdict: Verdict = "inferred",
    higher: bool = True,
    n: int = 3,
) -> AttackSummary:
    told = {"attack": attack, "federation": "fedsgd", "update_kind": "gradient", "updates": 3, "images": 0}
    if metric == "psnr":
        verdict = "recovered" if verdict == "inferred" else verdict
        return AttackSummary.model_validate(
            {**told, "verdict": verdict, "verdict_text": "t", "psnr": interval(value, n)}
        )
    measured = MetricSummary(name=metric, summary="what it is", higher_is_better=higher, value=interval(value, n))
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
    ids=["more is stronger", "less is stronger", "the verdict comes first", "images come first", "kinds in order"],
)
def test_the_strongest_attack_is_the_one_that_reached_most(tmp_path, summaries, wanted):
    result = result_with(tmp_path, *summaries)
    best = strongest(result, result.summaries)
    assert best is not None
    assert best.attack == wanted
    assert headline(result).title.startswith(f"The server, by {wanted}: {best.verdict}.")
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


OF_IMAGES = [
    "Attacks that reconstruct images mostly fail with BatchNorm in train mode",
    "Two attacks are compared on the same images, one by one",
    "how near the average image",
]


def test_what_is_true_of_images_is_said_of_images_only(tmp_path):
    image_files = render_report(sample(tmp_path, curve=False), tmp_path)
    assert [text for text in OF_IMAGES if text not in image_files] == []
    assert "SSIM <small>up to 1</small>" in image_files
    result = result_with(tmp_path, summary("a", "membership_auc", 0.6), summary("b", "membership_auc", 0.9))
    compared = {"federation": "fedsgd", "metric": "membership_auc", "a": "b", "b": "a", "unit": ""}
    comparison = Comparison.model_validate({**compared, "difference": interval(0.3), "outcome": "a is better"})
    others = render_report(result.model_copy(update={"comparisons": [comparison]}), tmp_path)
    assert [text for text in OF_IMAGES if text in others] == []
    assert "on the same updates, clients or records" in others


def test_what_could_not_be_run_is_no_table_of_images(tmp_path, capsys):
    told = {"federation": "fedsgd", "update_kind": "gradient", "updates": 3, "images": 0, "verdict": "not applicable"}
    refused = AttackSummary.model_validate({**told, "attack": "dlg", "verdict_text": "dlg is for images"})
    nothing, beside = result_with(tmp_path, refused), result_with(tmp_path, refused, summary("a", "rouge1", 0.6))
    for result in (nothing, beside):
        page = render_report(result, tmp_path)
        print_summary(result)
        said = capsys.readouterr().out
        assert not re.search(r"PSNR|SSIM", said)
        assert not re.search(r"<th[^>]*>(PSNR|SSIM|LPIPS)", page)
        assert not [text for text in OF_IMAGES if text in page]
        assert "not applicable" in said
        assert "dlg on fedsgd: dlg is for images" in said
        assert "dlg on fedsgd: dlg is for images" in page
        assert ("value [95 %]" in said) == (result is beside)
    assert frontier.scale(nothing).label == "not measured"
    print_summary(result_with(tmp_path, refused, refused.model_copy(update={"federation": "fedavg-4"})))
    assert "dlg on fedsgd, fedavg-4: dlg is for images" in capsys.readouterr().out


@pytest.mark.parametrize(("n", "bracket"), [(1, False), (2, True)])
def test_one_value_has_no_interval(tmp_path, capsys, n, bracket):
    one = summary("a", "membership_auc", 0.772, n=n)
    two = summary("b", "psnr", 20.0, n=n)
    result = result_with(tmp_path, one, two)
    history = HistoryRecord(
        bytes=8, parameters=2, epsilon=[1.0], timing=HistoryTiming(training=1.0, client_defence=0.1)
    )
    defended = result.federations[0].model_copy(update={"client_defence": "dp", "history": history})
    difference = Comparison(
        federation="fedsgd", metric="psnr", a="b", b="c", difference=interval(1.0, n), outcome="undecided"
    )
    result = result.model_copy(update={"federations": [defended], "comparisons": [difference]})
    print_summary(result)
    told = capsys.readouterr().out
    page = render_report(result, tmp_path)
    for shown in ("0.772 [0.672, 0.872]", "20.0 [19.9, 20.1]", "+1.0 dB [+0.9, +1.1]"):
        assert (shown in told) is bracket
        assert shown.partition(" ")[0] in told
    for shown in ("[0.672, 0.872]", "[19.9, 20.1]", "20 [19.9, 20.1]", "[+0.9, +1.1]"):
        assert (shown in page) is bracket
    cell = Cell({}, interval(0.5, n), images=n, published=None, missing=None, seconds=None, others={})
    assert cell_text("psnr", cell)[0] == ("0.5 [0.4, 0.6]" if bracket else "0.5")
    assert difference_text("psnr", interval(0.5, n)) == ("+0.5 [+0.4, +0.6], n=2" if bracket else "+0.5, n=1")


def test_what_noise_rules_out_stands_beside_epsilon(tmp_path, capsys):
    timing = HistoryTiming(training=1.0, client_defence=0.1)
    result = result_with(tmp_path, summary("b", "psnr", 20.0, n=2))

    def course(name: str, **said: Any) -> FederationRecord:
        history = HistoryRecord(bytes=8, parameters=2, timing=timing, accuracy=[0.5], **said)
        return result.federations[0].model_copy(update={"name": name, "history": history})

    certificate = {"candidates": 168, "success": 0.0213}
    federations = [
        course("local", epsilon=[2.0], certificate={**certificate, "central": False}),
        course("central", epsilon=[2.0], certificate={**certificate, "central": True}),
        course("older", epsilon=[2.0]),
        course("fedsgd"),
    ]
    result = result.model_copy(update={"federations": federations})
    lines = [
        "local: of 168 candidates that seem equally likely without the messages nobody can pick the right one with "
        "more than 2.2 % (by luck 0.6 %)",
        "central: of 168 candidates that seem equally likely without the messages nobody who sees global models alone "
        "can pick the right one with more than 2.2 % (by luck 0.6 %)",
        "fedsgd: no noise that counts, and so no certificate: no attack is ruled out",
    ]
    print_summary(result)
    assert [line for line in capsys.readouterr().out.splitlines() if "candidates" in line or "certif" in line] == lines
    page = render_report(result, tmp_path)
    assert all(f"{line}." in page for line in lines)


@pytest.mark.parametrize(
    ("epsilon", "words"),
    [
        (None, "none"),
        (1.0, "ε = 1: the odds that one took part change at most 2.72-fold"),
        (8.0, "ε = 8: the odds that one took part change at most 2,981-fold"),
        (530010.1, "ε = 530,010: it bounds nothing in practice"),
    ],
)
def test_what_an_epsilon_means_in_words(epsilon: float | None, words: str) -> None:
    assert _guarantee(epsilon) == words


@pytest.mark.parametrize(
    ("verdicts", "words"),
    [
        (["recovered", "identifiable"], "None of these defences stops the leak"),
        (["recovered", "inconclusive"], "whether b would hold is open; no other defence"),
        (["not applicable", "recovered"], "whether a would hold is open; no other defence"),  # it could not be run
        (["not applicable", "not demonstrated"], "b stops what was found"),
    ],
)
def test_what_stops_a_leak_and_what_is_open(verdicts: list[Verdict], words: str) -> None:
    told: dict[str, Any] = {"leak": "", "accuracy": "", "lost": "", "bytes": "", "guarantee": "", "defences": ""}
    rows = [Defended("none", verdict="recovered", undefended=True, **told)]
    rows += [Defended(n, verdict=v, undefended=False, **told) for n, v in zip("ab", verdicts, strict=True)]
    assert words in _recommendation(rows)


def test_a_turned_negative_in_words() -> None:
    turned = RegisteredResult(
        psnr=30.0, ssim=0.9, flipped=False, right=0, down=0, turns=1, contrast=-1.0, rank=1, psnr_nearest_other=None,
        psnr_mean_image=5.0,
    )  # fmt: skip
    assert after_move(turned) == "turned left and in negative: 30.0 dB when put back, identified"


@pytest.mark.parametrize(
    ("flipped", "right", "down", "words"),
    [
        (False, -2, 0, "shifted 2 px sideways: 7.5 dB when put back"),
        (True, 0, 3, "mirrored and shifted 3 px up or down: 7.5 dB when put back"),
        (True, 1, 1, "mirrored and shifted 1 px sideways and 1 px up or down: 7.5 dB when put back"),
        (True, 0, 0, "mirrored: 7.5 dB when put back"),
    ],
)
def test_a_move_in_words(flipped: bool, right: int, down: int, words: str) -> None:
    moved = RegisteredResult(
        psnr=7.5, ssim=0.5, flipped=flipped, right=right, down=down, rank=None, psnr_nearest_other=None,
        psnr_mean_image=5.0,
    )  # fmt: skip
    assert after_move(moved) == words


def test_n_says_what_it_counts_in_the_singular_and_the_plural(tmp_path, capsys):
    made = scenario(rounds=1)
    made = made.model_copy(update={"evaluation": made.evaluation.model_copy(update={"controls": False})})
    audit = run_audit(made, checkpoints=False).result
    pairs = next(m.n for f in audit.findings for m in f.metrics if m.name == "membership_epsilon")
    assert pairs
    first = "membership_accuracy"
    alone = audit.model_copy(update={"summaries": [], "findings": [without_counts(f, first) for f in audit.findings]})
    shorter = [m for m in audit.summaries[0].metrics if m.name == first]
    one = shorter[0].model_copy(update={"value": interval(0.5, 1), "of": "runs"})
    alone = alone.model_copy(update={"summaries": [audit.summaries[0].model_copy(update={"metrics": [one]})]})
    for result, name, counted in ((audit, "membership_epsilon", f"{pairs} pairs of records"), (alone, first, "1 run")):
        print_summary(result)
        (row,) = [line for line in capsys.readouterr().out.splitlines() if f" {name} " in line]
        assert row.rstrip().endswith(f" {counted}")
        page = re.sub(r"\s+", " ", render_report(result, tmp_path))
        n, of = counted.split(" ", 1)
        cells = page.split(f'<td data-label="Measured">{name.replace("_", " ")}')[1].split("</tr>")[0]
        assert f"{n}<small>{of}</small>" in cells


def test_of_trees_no_network_is_told(tmp_path):
    told = {"setting": "deployment", "diagnostic_because": []}
    result = result_with(tmp_path, summary("timberstrike", "cell_accuracy", 0.6).model_copy(update=told))
    grown = {"algorithm": "trees", "rounds": 10, "batch_size": 60}
    federations = [f.model_copy(update=grown) for f in result.federations]
    said = headline(result.model_copy(update={"federations": federations}))
    assert said.setting == "Deployment: trees over as many examples as federations in use have."
    assert f"{result.model.name} (10 rounds" in said.tested
    assert "trees over 60 examples a client" in said.tested


@pytest.mark.parametrize("how", ["", " after the best turn, contrast and brightness"])
def test_a_card_says_which_images_were_identified(tmp_path, how):
    seen = {"verdict_text": f"3 of 3 images came out visibly{how}; 3 of 3 identified", "images": 3}
    made = summary("a", "psnr", 8.0).model_copy(update={**seen, "identification_rate": 0.0})
    page = render_report(result_with(tmp_path, made), tmp_path)
    assert f"<b>0 of 3</b> images identified{' as they came out' if how else ''}</span>" in page


@pytest.mark.parametrize(("algorithm", "told"), [("fedsgd", True), ("vertical", False), ("split", False)])
def test_sums_are_proposed_where_updates_are_sent(tmp_path, algorithm, told):
    result = result_with(tmp_path, summary("a", "psnr", 30.0))
    federations = [f.model_copy(update={"algorithm": algorithm}) for f in result.federations]
    page = render_report(result.model_copy(update={"federations": federations}), tmp_path)
    assert ("--set threat.sees=sum" in page) is told


def test_a_control_of_several_defences_is_told_once(tmp_path, capsys):
    result = result_with(tmp_path, summary("invg", "psnr", 9.0, verdict="not demonstrated"))
    text = "invg found something from f-none, which has no defence"
    same = ControlResult(attack="invg", model="same", federation="f-none", case="without", won=True, text=text)
    other = same.model_copy(update={"federation": "g-none", "text": text.replace("f-", "g-")})
    result = result.model_copy(update={"controls": [same, same, other]})
    print_summary(result)
    controls = [line for line in capsys.readouterr().out.splitlines() if line.startswith("control: ")]
    assert controls == [f"control: invg, on without: {c.text}" for c in (same, other)]
    page = render_report(result, tmp_path)
    assert (page.count(same.text), page.count(other.text)) == (1, 1)


def without_counts(finding, name):
    """Return the finding, of which one metric has no interval and doesn't say what it was measured on."""
    nothing = {"low": None, "high": None, "n": None, "of": None}
    metrics = [m.model_copy(update=nothing) if m.name == name else m for m in finding.metrics]
    return finding.model_copy(update={"metrics": metrics})


@pytest.mark.parametrize(
    ("things", "thing"),
    [
        ("pairs of records", "pair of records"),
        ("runs of the attack", "run of the attack"),
        ("generated images", "generated image"),
        ("canaries", "canary"),
        ("", ""),
    ],
)
def test_one_is_no_plural(things, thing):
    assert noun(1, things) == thing
    assert noun(0, things) == noun(2, things) == things
