"""Two audits compared: pairs of the same victims, Holm's correction, verdicts, exit codes; noise and a lost defence."""

from __future__ import annotations

import itertools
import json
import math
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import t as student

from fedaudit.report.compare import LEVEL, Row, compare_audits
from fedaudit.results import AttackSummary, AuditResult, FindingResult, Interval, MetricResult, MetricSummary, Verdict
from tests.conftest import Command, refused
from tests.report.output_cases import images_of, result
from tools.measure.compare_noise import recordings, regressions, rerun

Part = tuple[list[FindingResult], AttackSummary]


def audit(folder: Path, psnr: Sequence[Sequence[float]], verdict: Verdict = "recovered", **rest: object) -> AuditResult:
    return result(folder, [images_of(folder, "invg", psnr, verdict)], **rest)


def only(old: AuditResult, new: AuditResult, folders: tuple[Path, Path] | None = None) -> Row:
    (row,) = compare_audits(old, new, folders=folders).rows
    return row


def test_updates_are_paired_and_tested_as_student_says(tmp_path):
    old = audit(tmp_path, [[20.0, 22.0], [24.0, 26.0], [18.0, 19.0], [21.0, 25.0]])
    new = audit(tmp_path, [[23.0, 24.0], [26.0, 28.5], [22.0, 24.0], [26.0, 26.0]])
    row = only(old, new)
    d = np.array([2.5, 2.25, 4.5, 3.0])  # the mean of each update's images: they share a random start
    error = d.std(ddof=1) / math.sqrt(4)
    assert row.difference is not None
    assert row.difference.mean == pytest.approx(d.mean())
    assert (row.difference.n, row.difference.of) == (4, "updates")
    assert row.difference.low == pytest.approx(d.mean() - student.ppf(0.975, 3) * error)
    assert row.difference.p == pytest.approx(2 * student.sf(d.mean() / error, 3))
    assert row.outcome == "worse"
    assert [row.old, row.new] == pytest.approx([21.875, 24.9375])
    assert only(new, old).outcome == "better"


def test_images_of_one_update_alone_are_the_pairs(tmp_path):
    row = only(audit(tmp_path, [[20.0, 22.0, 24.0]]), audit(tmp_path, [[23.0, 25.2, 26.9]]))
    assert row.difference is not None
    assert (row.difference.n, row.difference.of) == (3, "images")
    assert row.outcome == "worse"


def test_noise_and_what_nobody_sees_are_unchanged(tmp_path):
    old = audit(tmp_path, [[20.0], [24.0], [18.0], [21.0]])
    assert only(old, old).outcome == "unchanged"
    assert only(old, audit(tmp_path, [[22.0], [22.0], [19.0], [20.0]])).outcome == "unchanged"
    row = only(old, audit(tmp_path, [[20.05], [24.05], [18.05], [21.05]]))  # certain, and too little to see
    assert row.difference is not None
    assert row.difference.p == pytest.approx(0.0, abs=1e-6)
    assert row.outcome == "unchanged"


def test_victims_are_known_by_their_files_or_else_by_label_and_baseline(tmp_path):
    folders = (tmp_path / "old", tmp_path / "new")
    old, new = (
        audit(folder, [[value], [value + 1], [value]]) for folder, value in zip(folders, (15.0, 30.0), strict=True)
    )
    assert only(old, new, folders).outcome == "worse"
    assert only(old, new).outcome == "worse"
    for client in range(3):
        (folders[1] / f"images/sgd-0-{client}-0-true.png").write_bytes(b"another victim")
    row = only(old, new, folders)
    assert (row.outcome, row.reason) == ("can't be compared", "the two attacked different images")
    changed = [i.model_copy(update={"psnr_mean_image": 3.0}) for f in new.findings for i in f.images]
    moved = [f.model_copy(update={"images": [i]}) for f, i in zip(new.findings, changed, strict=True)]
    assert only(old, new.model_copy(update={"findings": moved})).outcome == "can't be compared"


def test_the_images_that_both_attacked_are_compared(tmp_path):
    row = only(audit(tmp_path, [[20.0], [24.0], [18.0]]), audit(tmp_path, [[25.0], [29.1], [23.2], [9.0]]))
    assert (row.outcome, row.reason) == ("worse", "over the 3 images that both attacked")


def test_p_values_are_corrected_over_all_attacks(tmp_path):
    def several(n: int, shift: Sequence[float]) -> AuditResult:
        values = [[[20.0 + i + s] for i, s in enumerate(shift)]] + [[[20.0 + i] for i in range(4)]] * (n - 1)
        return result(tmp_path, [images_of(tmp_path, f"a{i}", v, "recovered") for i, v in enumerate(values)])

    shift = [1.0, 2.0, 1.1, 2.2]
    p = compare_audits(several(1, [0] * 4), several(1, shift)).rows[0].p_corrected
    assert p is not None
    assert LEVEL / 2 < p < LEVEL
    alone = compare_audits(several(1, [0] * 4), several(1, shift))
    beside = compare_audits(several(2, [0] * 4), several(2, shift))
    assert (alone.regression, beside.regression) == (True, False)
    assert max(r.p_corrected or 0 for r in beside.rows if r.attack == "a0") == pytest.approx(2 * p)


SURELY = [[30.0], [31.0], [30.5]]
PERHAPS = [[18.0], [24.0], [21.0]]  # p = 0.04


@pytest.mark.parametrize(
    ("old", "new", "psnr", "outcome"),
    [
        ("not demonstrated", "recovered", SURELY, "worse"),
        ("identifiable", "identifiable", SURELY, "worse"),
        ("inconclusive", "recovered", SURELY, "worse"),
        ("not demonstrated", "recovered", PERHAPS, "unchanged"),  # chance can do it
        ("recovered", "not demonstrated", PERHAPS, "unchanged"),
        ("not demonstrated", "not demonstrated", SURELY, "unchanged"),  # nothing leaks
        ("recovered", "inconclusive", PERHAPS, "can't be compared"),
        ("inconclusive", "inconclusive", SURELY, "can't be compared"),
        ("not demonstrated", "recovered", SURELY[:2], "worse"),  # too few to test: the verdict alone
        ("not demonstrated", "recovered", [[9.0], [8.0]], "can't be compared"),
        ("identifiable", "recovered", SURELY[:2], "can't be compared"),
        ("inconclusive", "recovered", SURELY[:1], "can't be compared"),
        ("recovered", "not demonstrated", [[9.0]], "better"),
        ("recovered", "recovered", [[12.05]], "unchanged"),
    ],
)
def test_verdicts_count_where_the_numbers_agree(old, new, psnr, outcome, tmp_path):
    before = audit(tmp_path, [[12.0]] * len(psnr), old)
    assert only(before, audit(tmp_path, psnr, new)).outcome == outcome


def test_an_attack_that_became_applicable_and_leaks_is_worse(tmp_path):
    before, after = (images_of(tmp_path, "invg", [[30.0]], v) for v in ("not applicable", "recovered"))
    none: Part = ([], before[1].model_copy(update={"images": 0, "psnr": None, "evidence": None}))
    row = only(result(tmp_path, [none]), result(tmp_path, [after]))
    assert (row.outcome, row.reason) == ("worse", "not applicable before, recovered now")


def membership(
    value: float, half: float, n: int = 200, verdict: Verdict = "inferred", sign: bool = True
) -> AuditResult:
    metric = MetricResult(
        name="auc", value=value, higher_is_better=sign, low=value - half, high=value + half, n=n, of="pairs of records"
    )
    interval = Interval(mean=value, median=value, low=value - half, high=value + half, n=n)
    common = {"attack": "shadow", "federation": "sgd", "update_kind": "gradient", "kind": "membership"}
    finding = {**common, "round": None, "client": None, "num_examples": 9, "status": "done", "metrics": [metric]}
    summary = {
        **common,
        "updates": 1,
        "images": 0,
        "verdict": "inferred",
        "verdict_text": "",
        "metrics": [MetricSummary(name="auc", summary="", higher_is_better=sign, value=interval)],
    }
    part = ([FindingResult.model_validate(finding)], AttackSummary.model_validate(summary))
    return result(Path("unused"), [part])


def test_rates_over_records_are_compared_by_the_intervals_of_both_runs():
    row = only(membership(0.60, 0.06), membership(0.70, 0.05))
    assert row.difference is not None
    half = math.hypot(0.06, 0.05)
    assert [row.difference.low, row.difference.high] == pytest.approx([0.1 - half, 0.1 + half])
    assert (row.outcome, row.difference.of) == ("worse", "pairs of records")
    assert row.difference.p == pytest.approx(2 * (1 - 0.5 * (1 + math.erf(0.1 / (half / 1.959964) / math.sqrt(2)))))
    assert only(membership(0.60, 0.06), membership(0.70, 0.09)).outcome == "unchanged"
    assert only(membership(0.70, 0.05), membership(0.60, 0.06)).outcome == "better"


def test_where_less_is_more_leakage_the_signs_turn():
    assert only(membership(0.60, 0.01, sign=False), membership(0.70, 0.01, sign=False)).outcome == "better"
    assert only(membership(0.70, 0.01, sign=False), membership(0.60, 0.01, sign=False)).outcome == "worse"


def test_what_one_audit_lacks_cannot_be_compared(tmp_path):
    both = [images_of(tmp_path, name, [[20.0], [21.0]], "recovered") for name in ("invg", "dlg")]
    rows = compare_audits(result(tmp_path, both[:1]), result(tmp_path, both[1:])).rows
    assert {(r.attack, r.outcome, r.reason) for r in rows} == {
        ("dlg", "can't be compared", "only the new audit has it"),
        ("invg", "can't be compared", "the new audit doesn't have it"),
    }


def test_single_federations_are_compared_whatever_their_names(tmp_path):
    old = result(tmp_path, [images_of(tmp_path, "invg", [[12.0], [13.0]], "not demonstrated", federation="sgd-dp")])
    row = only(old, audit(tmp_path, [[30.0], [31.2]]))
    assert (row.federation, row.outcome) == ("sgd", "worse")


def test_the_command_tells_and_exits(command: Command, tmp_path: Path):
    old, new = tmp_path / "old", tmp_path / "new"
    scenario = {"seed": 0, "defences": {"client_defence": {"name": "dp", "noise": 1.0}}}
    audit(old, [[12.0], [13.0]], "not demonstrated", scenario=scenario).save(old / "results.json")
    scenario = {"seed": 0, "defences": {"client_defence": {"name": "none", "noise": 1.0}}}
    audit(new, [[30.0], [31.2]], scenario=scenario).save(new / "results.json")
    worse = command("compare", old, new)
    assert worse.code == 1
    assert worse.out.startswith("regression: something leaks more than before (1 worse)\n")
    assert "not demonstrated → recovered" in worse.out
    assert worse.out.endswith("the scenarios differ in defences.client_defence.name\n")
    better = command("compare", new / "results.json", old)
    assert (better.code, better.out.split("\n")[0]) == (0, "no regression (1 better)")
    told = json.loads(command("compare", old, new, "--json").out)
    assert (told["regression"], told["rows"][0]["outcome"]) == (True, "worse")
    assert told["rows"][0]["difference"]["mean"] == pytest.approx(18.1)
    refused(command("compare", old, tmp_path / "nowhere"), "there is no audit in")
    (old / "results.json").write_text("{")
    refused(command("compare", old, new), "truncated or not JSON")


@pytest.mark.parametrize(
    ("before", "now", "said"),
    [("diagnostic", "deployment", True), ("deployment", "deployment", False), (None, "deployment", False)],
)
def test_a_diagnostic_beside_a_deployment_is_told(
    command: Command, tmp_path: Path, before: str | None, now: str, said: bool
):
    for name, setting in (("old", before), ("new", now)):
        found = audit(tmp_path / name, [[12.0], [13.0]])
        summaries = [found.summaries[0].model_copy(update={"setting": setting})]
        found.model_copy(update={"summaries": summaries}).save(tmp_path / name / "results.json")
    line = "invg on sgd: a diagnostic before, of a deployment now; what differs may be the conditions\n"
    out = command("compare", tmp_path / "old", tmp_path / "new").out
    assert (line in out) is said
    (row,) = json.loads(command("compare", tmp_path / "old", tmp_path / "new", "--json").out)["rows"]
    assert (row["old_setting"], row["new_setting"]) == (before, now)


def test_what_is_said_of_several_attacks_is_said_once(command: Command, tmp_path: Path):
    for name, attacks in (("old", ("invg", "agic", "dlg")), ("new", ("geng",))):
        parts = [images_of(tmp_path / name, attack, [[20.0], [22.0]], "recovered") for attack in attacks]
        result(tmp_path / name, parts).save(tmp_path / name / "results.json")
    out = command("compare", tmp_path / "old", tmp_path / "new").out
    assert "invg, agic, dlg on sgd" in out
    assert out.count("the new audit doesn't have it") == 1


def test_what_cant_be_compared_is_no_all_clear(command: Command, tmp_path: Path):
    def saved(name: str, *attacks: tuple[str, float, Verdict]) -> Path:
        folder = tmp_path / name
        parts = [images_of(folder, a, [[20.0 + x], [22.0 + x], [25.0 + x]], verdict) for a, x, verdict in attacks]
        result(folder, parts).save(folder / "results.json")
        return folder

    both = saved("both", ("invg", 0, "recovered"), ("dlg", 0, "not demonstrated"))
    without = saved("without", ("invg", 0, "recovered"))
    other = saved("other", ("geng", 0, "recovered"))
    opened = saved("opened", ("invg", 0, "recovered"), ("dlg", 0, "not applicable"))
    worse = saved("worse", ("invg", 9, "recovered"))
    more = saved("more", ("invg", 0, "recovered"), ("dlg", 0, "inconclusive"))
    leaking = saved("leaking", ("invg", 0, "recovered"), ("dlg", 0, "recovered"))
    for old, new, code in [
        (both, both, 0),
        (both, without, 3),  # an attack is gone
        (without, other, 3),  # nothing compares
        (without, more, 0),  # what was never tested before was added, and found nothing
        (without, leaking, 3),  # the same, and it leaks
        (both, opened, 3),
        (both, worse, 1),
    ]:
        told = command("compare", old, new)
        assert told.code == code, told.out
        assert told.out.startswith({0: "no regression", 1: "regression", 3: "not tested: no"}[code])
        assert json.loads(command("compare", old, new, "--json").out)["tested"] is (code == 0)


def test_compare_imports_no_torch(tmp_path):
    audit(tmp_path, [[30.0]]).save(tmp_path / "results.json")
    code = (
        "import sys; from fedaudit.cli import main; sys.argv[1:] = ['compare', sys.argv[1], sys.argv[1]]\n"
        "try: main()\nexcept SystemExit as end: print(end.code, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "0 False"


@pytest.mark.slow
def test_noise_is_no_regression_and_a_removed_defence_is():
    """``python -m tools.measure.compare_noise 100 --power`` is the whole of it."""
    recorded = recordings()
    results = [rerun(recorded, seed) for seed in range(5)]
    every = regressions(itertools.permutations(results, 2))
    assert sum(map(bool, every)) <= 1  # of 20
    defended = recordings(defences={"client_defence": {"name": "dp", "epsilon": None}})
    assert regressions([(rerun(defended, 0), results[0])])[0]
