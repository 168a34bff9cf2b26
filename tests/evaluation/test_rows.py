"""Recovered rows of tables: pairing, tolerance, baseline, luck and verdict, against hand-made cases."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path

import pytest
import torch
from scipy import stats

import fedaudit
from fedaudit.attacks import Finding, RowFinding
from fedaudit.evaluation import FINDING_TYPES, evaluate
from fedaudit.evaluation.rows import DRAWS, TOLERANCE, verdict_of
from fedaudit.evaluation.scores import summarise
from fedaudit.evaluation.shift import REMEDY
from fedaudit.modalities.columns import Column
from fedaudit.report.rows import drawn_tables
from fedaudit.results import FindingResult
from fedaudit.task.info import TaskInfo
from fedaudit.transcript.observation import Message, Observation
from fedaudit.transcript.threat import ThreatModel
from fedaudit.transcript.truth import Truth
from fedaudit.transcript.update import Update
from fedaudit.utils.seeds import generator

COLUMNS = (
    Column("age", "numeric", (0,), mean=40.0, std=10.0),
    Column("income", "numeric", (1,)),
    Column("colour", "categorical", (2, 3, 4), ("blue", "green", "red")),
    Column("sex", "categorical", (5,), ("f", "m"), codes=(-1.0, 1.0)),
)


def table(n: int, seed: int = 0) -> torch.Tensor:
    """n rows of independent columns: two normal ones, one of three categories, one of two codes."""
    rng = generator(seed, "table")
    colours = torch.nn.functional.one_hot(torch.randint(3, (n,), generator=rng), 3).float()
    sexes = torch.randint(2, (n, 1), generator=rng).float() * 2 - 1
    return torch.cat([torch.randn((n, 2), generator=rng), colours, sexes], dim=1)


def scene(
    rows: torch.Tensor,
    true: torch.Tensor,
    candidates: torch.Tensor | None = None,
    columns: tuple[Column, ...] = COLUMNS,
    positions: torch.Tensor | None = None,
    later: torch.Tensor | None = None,
    labels: torch.Tensor | None = None,
    **fields: object,
) -> FindingResult:
    task = TaskInfo("custom", None, "eval", "cross-entropy", "table", (true.shape[1],), 2, (0.0,), (1.0,))
    task = dataclasses.replace(task, columns=columns)
    update = Update(0, "gradient", {}, len(true), None)
    seen = Observation(
        "f", ThreatModel(), task, torch.nn.Identity(), torch.nn.functional.cross_entropy, "gradient", (),
        (Message(0, 0, {}, update),),
    )  # fmt: skip
    candidates = table(400, seed=9) if candidates is None else candidates
    own, labels = torch.zeros(len(true)).long(), torch.zeros(len(candidates)).long() if labels is None else labels
    used = {} if positions is None else {(0, 0): positions}
    inputs, targets = {(0, 0): true}, {(0, 0): own}
    if later is not None:  # the same client's, in another round
        inputs[1, 0], targets[1, 0] = later, torch.zeros(len(later)).long()
    truth = Truth(inputs, targets, candidates, labels, {}, used)
    found = RowFinding(
        attack="a", rows=rows, labels=torch.zeros(len(rows)).long(), label_source="given", **fields,  # type: ignore[arg-type]
    )  # fmt: skip
    return evaluate(found, seen, truth, seed=0).result


def metric(result: FindingResult, name: str) -> float:
    return next(m.value for m in result.metrics if m.name == name)


def test_rows_are_paired_in_any_order() -> None:
    true = table(6)
    result = scene(true[torch.tensor([3, 1, 5, 0, 2, 4])], true)
    assert metric(result, "cell_accuracy") == 1
    assert metric(result, "exact_rows") == 1
    assert all(row.exact for row in result.rows)
    assert result.columns == ["age", "income", "colour", "sex"]


def test_the_pairing_has_as_few_wrong_cells_as_any() -> None:
    true, found = table(5, seed=1), table(5, seed=2)
    right = torch.zeros(5, 5)
    for i, j in itertools.product(range(5), range(5)):
        right[i, j] += int(((true[i, :2] - found[j, :2]).abs() <= TOLERANCE).sum())
        right[i, j] += int(true[i, 2:5].equal(found[j, 2:5])) + int(true[i, 5] == found[j, 5])
    best = max(sum(float(right[i, p[i]]) for i in range(5)) for p in itertools.permutations(range(5)))
    assert metric(scene(found, true), "cell_accuracy") == pytest.approx(best / 20)


@pytest.mark.parametrize(
    ("off", "right"), [(0.99 * TOLERANCE, 1.0), (1.01 * TOLERANCE, 0.75), (-1.01 * TOLERANCE, 0.75)]
)
def test_a_number_may_be_off_by_the_tolerance(off: float, right: float) -> None:
    true = table(4)
    found = true.clone()
    found[:, 0] += off
    result = scene(found[:1], true[:1])
    assert metric(result, "cell_accuracy") == right
    assert result.rows[0].wrong == ([] if right == 1 else [0])


def test_without_columns_every_position_is_a_number_in_units_of_its_own_spread() -> None:
    candidates = torch.tensor([[0.0, 0.0], [200.0, 2.0]])  # standard deviations 100 and 1
    true = torch.tensor([[50.0, 1.0]])
    found = true + torch.tensor([[30.0, 0.33]])
    result = scene(found, true, candidates, columns=())
    assert result.rows[0].wrong == [1]
    assert result.columns == ["column 1", "column 2"]


def test_cells_are_told_in_the_tables_own_words() -> None:
    true = torch.tensor([[1.5, 0.0, 0.0, 1.0, 0.0, -1.0]])
    found = torch.tensor([[-1.0, 0.0, 0.1, 0.2, 0.7, 0.4]])
    row = scene(found, true).rows[0]
    assert row.true == ["55", "0", "green", "f"]
    assert row.recovered == ["30", "0", "red", "m"]
    assert row.wrong == [0, 2, 3]
    assert row.right == 1
    assert not row.exact


def test_rows_that_were_not_returned_are_not_recovered() -> None:
    true = table(4)
    result = scene(true[:3], true, certified=torch.tensor([True, True, False]))
    assert metric(result, "cell_accuracy") == 0.75
    assert metric(result, "exact_rows") == 0.75
    assert [row.found for row in result.rows] == [True, True, True, False]
    assert metric(result, "certified_rows") == 0.5
    assert metric(result, "wrongly_certified") == 0
    nothing = scene(true[:0], true)
    assert metric(nothing, "cell_accuracy") == 0
    assert not nothing.is_leak


def test_a_wrong_certificate_is_counted() -> None:
    true = table(3)
    found = true.clone()
    found[0] = -found[0].abs() - 3
    result = scene(found, true, certified=torch.ones(3, dtype=torch.bool))
    assert metric(result, "wrongly_certified") == 1
    judged, right = verdict_of([result]), verdict_of([scene(true, true, certified=torch.ones(3, dtype=torch.bool))])
    assert "1 CERTIFIED ROWS ARE WRONG" in judged.text
    assert judged.headline.endswith("1 certified rows are WRONG.")
    assert "WRONG" not in right.text + right.headline


def test_an_example_used_twice_counts_once() -> None:
    true = table(3)
    result = scene(true, torch.cat([true, true]), positions=torch.tensor([4, 7, 9, 4, 7, 9]))
    assert len(result.rows) == 3
    assert {row.uses for row in result.rows} == {2}
    twins = scene(true[[0, 0]], true[[0, 0]], positions=torch.tensor([4, 7]))  # two people who are alike are two
    assert len(twins.rows) == 2


@pytest.mark.slow
def test_random_rows_are_no_leak_and_the_baseline_is_what_they_get() -> None:
    """Rows of the same distributions that have nothing to do with the update."""
    leaks, shares, guesses = 0, [], []
    for seed in range(20):
        result = scene(table(8, seed=100 + seed), table(8, seed=seed))
        leaks += bool(result.is_leak)
        shares.append(metric(result, "cell_accuracy"))
        guesses.append(result.metrics[0].baseline or 0.0)
    assert leaks <= 1
    assert sum(shares) / 20 == pytest.approx(sum(guesses) / 20, abs=0.06)


KINDS = tuple(Column(f"c{i}", "categorical", tuple(range(3 * i, 3 * i + 3)), ("a", "b", "c")) for i in range(8))


def people(n: int, seed: int) -> torch.Tensor:
    """n rows of one of three sorts of people, whose eight columns go together."""
    rng = generator(seed, "people")
    sort = torch.randint(3, (n, 1), generator=rng)
    values = torch.where(torch.rand((n, 8), generator=rng) < 0.8, sort, torch.randint(3, (n, 8), generator=rng))
    return torch.nn.functional.one_hot(values, 3).flatten(1).float()


@pytest.mark.slow
@pytest.mark.parametrize("size", [4, 16])
def test_rows_of_other_people_are_no_leak_and_most_of_the_own_ones_are(size: int) -> None:
    null, planted = list[str](), list[str]()
    for seed in range(30):
        everybody, others = people(400, 1000 + seed), people(size, 5000 + seed)
        true = everybody[:size]
        mixed = torch.cat([true[: size - 2], others[size - 2 :]])
        for rows, verdicts in ((others, null), (mixed, planted)):
            verdicts.append(FINDING_TYPES["rows"].verdict([scene(rows, true, everybody, columns=KINDS)]).verdict)
    assert sum(v in ("recovered", "inferred") for v in null) <= stats.binom.ppf(0.999, 30, 0.01)
    if size == 16:
        assert sum(v in ("recovered", "inferred") for v in planted) >= stats.binom.ppf(0.0025, 30, 0.9)


def test_the_most_frequent_values_are_no_leak() -> None:
    """Nearly all rows are alike: naming what all are alike in is right in most cells, and tells nothing."""
    candidates = table(300, seed=3)
    candidates[:, :2] *= 0.05
    candidates[:, 2:] = torch.tensor([1.0, 0.0, 0.0, -1.0])
    result = scene(torch.tensor([[0.0, 0.0, 1.0, 0.0, 0.0, -1.0]] * 6), candidates[:6], candidates)
    assert metric(result, "cell_accuracy") == 1
    assert not result.is_leak


def test_the_truth_is_a_leak_and_one_row_of_four_cells_decides_nothing() -> None:
    true = table(8)
    result = scene(true, true)
    assert result.is_leak
    assert result.p_value == pytest.approx(1 / (1 + DRAWS))
    judged = FINDING_TYPES["rows"].verdict([result])
    assert judged.verdict == "recovered"
    assert "8 of 8 rows exact" in judged.text
    alone = FINDING_TYPES["rows"].verdict([scene(true[:1], true[:1])])
    assert alone.verdict in ("inconclusive", "recovered")
    off = true.clone()
    off[:, 0] += 1.0
    assert FINDING_TYPES["rows"].verdict([scene(off, true)]).verdict == "inferred"
    noise = scene(table(8, seed=77), true)
    assert FINDING_TYPES["rows"].verdict([noise]).verdict == "not demonstrated"


def test_confidence_is_compared_with_what_is_right() -> None:
    true = table(8)
    found = true.clone()
    found[:, 0] += 2.0
    sure = torch.ones(8, 4)
    sure[:, 0] = 0.1
    result = scene(found, true, confidence=sure)
    assert metric(result, "surest_accuracy") == 1
    assert metric(result, "cell_accuracy") == 0.75
    assert metric(result, "surest_numeric") == 1
    line = result.charts[0].lines[0]
    assert line.y[0] == 0
    assert line.y[-1] == 1
    against = scene(found, true, confidence=1 - sure)
    assert metric(against, "surest_accuracy") == 0
    assert metric(against, "surest_numeric") == 0
    assert metric(against, "surest_categorical") == 1


def test_a_finding_survives_the_disk(tmp_path: Path) -> None:
    found = RowFinding(rows=table(3), labels=torch.arange(3), label_source="given", certified=torch.ones(3).bool())
    found.save(tmp_path / "f.safetensors", "key")
    read = Finding.load(tmp_path / "f.safetensors", "key")
    assert isinstance(read, RowFinding)
    assert read.rows.equal(found.rows)
    assert read.certified is not None


def test_the_report_draws_rows_and_marks_wrong_cells(tmp_path: Path) -> None:
    values = {
        "data": {"name": "diabetes"},
        "model": {"name": "mlp", "width": 16},
        "federations": [{"name": "f", "clients": 1, "examples": 2, "batch_size": 2}],
        "attacks": [{"name": "tableak", "iterations": 20, "restarts": 2}],
        "evaluation": {"controls": False},
    }
    audit = fedaudit.audit(values, progress=False, out=tmp_path)
    (found,) = audit.result.findings
    page = (tmp_path / "report.html").read_text()
    assert 'id="rows"' in page
    wrong = sum(len(row.wrong) for row in found.rows)
    assert wrong > 0
    assert page.count('<li class="wrong">') == wrong
    assert all(f'<span class="column">{name}</span>' in page for name in found.columns)
    (table,) = drawn_tables(audit.result)
    assert [[cell.wrong for cell in row.cells].count(True) for row in table.rows] == [len(r.wrong) for r in found.rows]


def wide(n: int, seed: int) -> torch.Tensor:
    return torch.randn((n, 12), generator=generator(seed, "wide"))


@pytest.mark.slow
def test_whole_rows_count_even_where_other_updates_bring_noise() -> None:
    candidates = wide(300, seed=9)
    true = [wide(4, seed=s) for s in range(6)]
    noise = [wide(4, seed=50 + s) * 3 for s in range(5)]  # worse than guessing
    results = [scene(true[0], true[0], candidates, columns=())]
    results += [scene(n, t, candidates, columns=()) for n, t in zip(noise, true[1:], strict=True)]
    judged = FINDING_TYPES["rows"].verdict(results)
    assert judged.verdict == "recovered"
    assert judged.evidence is not None
    assert (judged.evidence.value, judged.evidence.n) == (4 / 24, 24)
    assert FINDING_TYPES["rows"].verdict(results[1:]).verdict != "recovered"


@pytest.mark.slow
@pytest.mark.parametrize("column", [0, 1, 3])
def test_rows_of_a_site_of_its_own_are_held_against_others_of_the_same_site(column: int) -> None:
    """Its patients are older, or have another unit; elsewhere nobody is like them."""
    site = wide(92, seed=1)
    site[:, column] = 0.5 * site[:, column] + 3
    true, others, later = site[:16], site[16:32], site[32:]
    for more, of_own, of_others in ((later, "recovered", "not demonstrated"), (None, "inconclusive", "inconclusive")):
        everybody = torch.cat([true, *([] if more is None else [more]), wide(300, seed=9)])
        for rows, expected in ((true, of_own), (others, of_others)):
            judged = FINDING_TYPES["rows"].verdict([scene(rows, true, everybody, columns=(), later=more)])
            assert judged.verdict == expected
            assert (judged.advice == REMEDY) is (expected == "inconclusive")


def test_luck_draws_of_a_rows_own_label() -> None:
    """Whoever knows a label draws among its candidates: of five that are equal to the row in 20, and 380 others."""
    true, labels = wide(1, seed=1), torch.tensor([0] * 20 + [1] * 380)
    candidates = torch.cat([true.repeat(5, 1), wide(395, seed=9)])
    result = scene(true, true, torch.cat([candidates, true]), columns=(), labels=torch.cat([labels, labels[:1]]))
    assert result.rows[0].chance_level == pytest.approx(6 / 21)


def test_a_row_that_several_rounds_show_is_no_more_than_one() -> None:
    """It is exact once by luck, of 60 candidates, and then in each round: somebody who is sure of it says it again."""
    true = wide(1, seed=1)
    once = scene(true, true, torch.cat([true, wide(60, seed=9)]), columns=())
    other = scene(wide(1, seed=2), wide(1, seed=2), torch.cat([wide(1, seed=2), wide(60, seed=9)]), columns=())
    for findings, n, chance in (([once], 1, 1 / 61), ([once] * 5, 1, 5 / 61), ([once, other], 2, 1 / 61**2)):
        judged = FINDING_TYPES["rows"].verdict(findings)
        assert judged.text.startswith(f"{n} of {n} row{'s' * (n > 1)} exact")
        assert f"by luck with p = {2 * chance:.2g})" in judged.text
        assert (judged.verdict == "recovered") is (2 * chance <= 0.01)


def test_rows_that_many_people_share_are_exact_by_luck() -> None:
    common = torch.zeros(1, 12)
    candidates = torch.cat([wide(50, seed=9), common.repeat(50, 1) + 0.01 * wide(50, seed=3)])
    result = scene(common, common, candidates, columns=())
    assert result.rows[0].exact
    assert result.rows[0].chance_level == pytest.approx(51 / 101, abs=0.01)
    assert FINDING_TYPES["rows"].verdict([result]).verdict != "recovered"


def test_the_worst_row_stands_beside_the_mean_category_by_category() -> None:
    """The oracle reads the drawn rows' own words; a category of one row alone is told of nobody."""
    results = []
    for seed, n in ((1, 7), (2, 6)):
        true = table(n, seed=seed)
        found = true.clone()
        found[::2, 0] += 1.0  # every second age is wrong, and of each third one the income
        found[::3, 1] += 1.0
        results.append(scene(found, true))
    shares: dict[tuple[str, str], list[float]] = {}
    for row in (row for result in results for row in result.rows):
        for place, name in ((2, "colour"), (3, "sex")):
            shares.setdefault((name, row.true[place]), []).append(row.right / row.cells)
    (told,) = summarise(results, resamples=200, seed=0)
    assert told.worst is not None
    assert {(g.column, g.group): (g.n, g.value, pytest.approx(g.mean)) for g in told.worst.by_group} == {
        key: (len(own), max(own), pytest.approx(sum(own) / len(own))) for key, own in shares.items() if len(own) > 1
    }
    assert len(told.worst.by_group) == 5
    (few,) = summarise([scene(table(1), table(1))], resamples=200, seed=0)
    assert few.worst is not None
    assert few.worst.by_group == []
