"""Columns as hospitals' exports have them: what they are read as, what is said of it, and what is asked."""

from __future__ import annotations

import datetime
import logging
import re
from decimal import Decimal
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given as draws
from hypothesis import strategies as st

from fedaudit.data import Dataset, from_frame
from fedaudit.data.own import dataset_of
from fedaudit.utils.errors import BadInput

N = 60
RNG = np.random.default_rng(0)
LAB = RNG.normal(30, 5, N).round(1)
OUT = np.array(["no", "yes"])[RNG.integers(0, 2, N)]
DAYS = RNG.integers(0, 900, N)
FIRST = datetime.date(2020, 1, 1)


def made(x: Any, out: Any = OUT, **options: Any) -> Dataset:
    return from_frame({"age": RNG.normal(60, 10, len(x)), "x": x, "out": out}, "out", **options)


def numbers_of(data: Dataset) -> np.ndarray:
    """Return the column x as it was, of both splits, sorted."""
    column = next(c for c in data.columns if c.name == "x")
    assert column.kind == "numeric"
    rows = torch.cat([data.train.inputs, data.test.inputs])[:, column.positions[0]].double()
    return np.sort((rows * column.std + column.mean).numpy())


def asked(x: Any, out: Any = OUT, **options: Any) -> str:
    with pytest.raises(BadInput) as caught:
        made(x, out, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("write", "said"),
    [
        (float, "age, x: numbers"),
        (lambda v: Decimal(str(v)), "age, x: numbers"),
        (str, "x: numbers, from texts"),
        (lambda v: f" {v} ", "x: numbers, from texts"),
        (lambda v: f"{v}".replace(".", ","), "x: numbers, with decimal commas"),
        (lambda v: f"{v} mmol/l", "x: numbers, in mmol/l"),
        (lambda v: f"{v}%", "x: numbers, in %"),
        (lambda v: f"{v:.2e}", "x: numbers, from texts"),
        (lambda v: f"+{v}", "x: numbers, from texts"),
    ],
)
def test_numbers_are_numbers_however_they_are_written(write: Any, said: str) -> None:
    data = made(np.array([write(v) for v in LAB.tolist()], dtype=object))
    assert said in data.summary
    np.testing.assert_allclose(numbers_of(data), np.sort(LAB), rtol=1e-5)


@pytest.mark.parametrize("write", ["{:,.2f}", "{:,.0f}"])
@pytest.mark.parametrize(("group", "point"), [(",", "."), (".", ","), (" ", "."), ("\u202f", ","), ("'", ".")])
def test_thousands_and_decimals_are_told_apart_or_asked_about(write: str, group: str, point: str) -> None:
    values = [v * 10.0**e for v, e in zip(LAB.tolist(), [0, 1, 2, 3, 3] * (N // 5), strict=True)]
    texts = [write.format(v).replace(",", "_").replace(".", point).replace("_", group) for v in values]
    wanted = np.sort([float(write.format(v).replace(",", "")) for v in values])
    if write == "{:,.0f}" and group == ".":  # as three decimals, beside whole numbers without any
        assert "say which: decimal='.' or decimal=','" in asked(texts)
    else:
        np.testing.assert_allclose(numbers_of(made(texts)), wanted, atol=0.01)
    np.testing.assert_allclose(numbers_of(made(texts, decimal=point)), wanted, atol=0.01)


def test_a_comma_before_three_digits_is_asked_about() -> None:
    """1,234 is 1234 or 1.234: nothing else in the column tells."""
    texts = [f"{v / 10:.3f}".replace(".", ",") for v in LAB]
    assert re.search(r"column 'x': in \d\d numbers, as '\d,\d\d\d', .* decimal='.' or decimal=','", asked(texts))
    np.testing.assert_allclose(numbers_of(made(texts, decimal=",")), np.sort(LAB / 10), rtol=1e-4)
    np.testing.assert_allclose(numbers_of(made(texts, decimal=".")), np.sort((LAB * 100).round()), rtol=1e-4)
    assert "with decimal commas" in made(["0,123", *texts[1:]]).summary
    assert "not written as its others" in asked(["1,5", "1.5", *texts[2:]])


def test_dates_are_days_since_the_first_one() -> None:
    dates = [FIRST + datetime.timedelta(days=int(day)) for day in DAYS]
    forms: list[Any] = [
        dates,
        [date.isoformat() for date in dates],
        [f"{date:%Y/%m/%d}" for date in dates],
        [f"{date.isoformat()}T00:00:00Z" for date in dates],
        np.array(dates, dtype="datetime64[ns]"),
        [datetime.datetime.combine(date, datetime.time()) for date in dates],
    ]
    for form in forms:
        data = made(form)
        assert f"x: dates, as days since {min(dates).isoformat()}" in data.summary
        np.testing.assert_allclose(numbers_of(data), np.sort(DAYS - DAYS.min()), atol=1e-3)
    half = made([datetime.datetime.combine(date, datetime.time(12)) for date in dates])
    np.testing.assert_allclose(numbers_of(half), np.sort(DAYS - DAYS.min()) + 0.5, atol=1e-3)
    hours = np.array([36] * N, dtype="timedelta64[h]")
    hours[0] = np.timedelta64(12, "h")
    assert numbers_of(made(hours))[[0, -1]].tolist() == pytest.approx([0.5, 1.5])


@pytest.mark.parametrize(
    ("x", "words"),
    [
        ([f"<{v}" if v < 30 else str(v) for v in LAB], "are limits and not values: types={'x': 'numeric'} takes the"),
        ([f"P{i:05d}" for i in range(N)], "has 60 different texts in 60 of 60 cells, as 'P00000'"),
        ([f"patient {i} coughs" for i in range(N)], "numbers of patients, names, free text"),
        ([f"{i % 40:05d}" for i in range(N)], "60 of 60 cells, as '00000', begin with 0, as codes do"),
        (list(range(1000, 1000 + N)), "another number in each row, as 1000"),
        ([7 * i + 3 for i in range(N)], "another number in each row, as 3"),
        ([20200101 + int(day) % 28 for day in DAYS], "is of dates, as 202001"),
        ([f"{1 + int(day) % 28}/{1 + int(day) % 12}/2020" for day in DAYS], "is of dates, 60 of 60 cells"),
        ([f"{1 + int(day) % 28:02d}.{1 + int(day) % 12:02d}.2020" for day in DAYS], "write them as 2020-12-31"),
        (["2020-02-31"] * N, "'2020-02-31' is no date"),
        ([-999.0, *LAB[1:]], "-999, in 1 of 60 cells, is far from all others"),
        ([9999, 9999, *range(20, 98), *range(20, 98)][:N], "9999, in 2 of 60 cells"),
        (["unknown", *LAB[1:].astype(str)], "is of numbers, but for 1 of 60 cells, as 'unknown'"),
        ([None, *LAB[1:]], "has 1 of 60 numbers that are missing or not finite, the first in row 1"),
        (["n/a", *LAB[1:].astype(str)], "has 1 of 60 numbers that are missing"),
        (["NA", "", *LAB[2:].astype(str)], "has 2 of 60 numbers that are missing"),
        ([np.nan] * N, "is empty in every row"),
        (["Male", "male", "female"] * 20, "'Male' in 20 cells and 'male' in 20: spell them alike"),
        ([f"{v} {'mg' if v > 30 else 'g'}" for v in LAB], "different texts in"),
        ([f"({v})" for v in np.tile(LAB[:30], 2)], "numbers with marks"),
        ([{"a": 1}] * N, "holds a dict"),
    ],
)
def test_what_can_be_meant_in_several_ways_is_a_question_that_names_the_column(x: Any, words: str) -> None:
    said = asked(np.array([*x, None], dtype=object)[:-1])
    assert said.startswith("data set 'custom', column 'x'")
    assert words in said
    assert "drop=['x']" in said or "drop=[…]" in said
    assert from_frame({"age": LAB, "x": np.array([*x, None], dtype=object)[:-1], "out": OUT}, "out", drop=["x"])


def test_an_answer_is_taken() -> None:
    limits = [f"<{v}" if v < 30 else str(v) for v in LAB]
    data = made(limits, types={"x": "numeric"})
    np.testing.assert_allclose(numbers_of(data), np.sort(LAB), rtol=1e-5)
    assert "x: numbers, a limit taken for the value" in data.summary
    assert made([-999, *LAB[1:]], types={"x": "numeric"}).columns[1].kind == "numeric"
    column = made([f"P{i:05d}" for i in range(N)], types={"x": "categorical"}).columns[1]
    assert column.kind == "categorical"
    assert "x: 2 categories" in made(["Male", "male"] * 30, types={"x": "categorical"}).summary
    assert "x: left out, as asked" in made([f"P{i:05d}" for i in range(N)], drop=["x"]).summary
    assert "isn't numeric: 60 of 60 cells, as 'a'" in asked(["a"] * N, types={"x": "numeric"})


@pytest.mark.parametrize(
    ("x", "said"),
    [
        (["a", "b", "c"] * 20, "x: 3 categories;"),
        ([True, False] * 30, "x: 2 categories;"),
        (["yes", "no", "yes "] * 20, "x: 2 categories;"),
        (["1", "2", "other"] * 20, "x: 3 categories;"),
        (["<18", "18-64", ">64"] * 20, "x: 3 categories;"),
        (["a", None, "NA", "b"] * 15, "x: 3 categories, 30 cells empty ('?');"),
        (["Ko\u0308ln", "K\u00f6ln", "東京"] * 20, "x: 2 categories;"),
        ([b"a", b"b"] * 30, "x: 2 categories;"),
        (["a"] * N, "x: the same in every row ('a');"),
        ([2020] * N, "x: numbers, the same in every row (2020);"),
        ([f"ward {i % 25}" for i in range(N)], "x: 25 categories;"),
    ],
)
def test_the_summary_says_what_became_of_each_column(x: Any, said: str) -> None:
    assert said in made(x).summary


def test_ordinary_columns_are_no_questions() -> None:
    """Numbers of no pattern, also whole ones, years, counts with a tail, and numbers around nines."""
    for x in (
        RNG.permutation(N * 3)[:N],
        RNG.integers(1990, 2021, N),
        RNG.poisson(2, N),
        RNG.exponential(10, N),
        [*LAB[1:], 99.0],
        RNG.integers(0, 100, N),
        RNG.choice([0, 9], N),
        RNG.normal(0, 1e-3, N),
    ):
        assert made(x).columns[1].kind == "numeric"


def test_two_columns_of_one_name_are_named() -> None:
    with pytest.raises(BadInput, match="2 columns are called '1'"):
        from_frame({"1": LAB, 1: LAB, "out": OUT}, "out")


def test_what_is_out_of_the_ordinary_is_printed(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        made(LAB)
    assert not caplog.messages
    made([str(v) for v in LAB])
    assert caplog.messages[0].startswith(
        "data set 'custom': age: numbers; x: numbers, from texts; classes of 'out': no ("
    )


# The outcome --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nothing", [None, float("nan"), "", "NA", "n/a", "?"])
def test_rows_without_an_outcome_are_left_out_and_counted(nothing: Any) -> None:
    out = np.array([nothing] * 3 + OUT[3:].tolist(), dtype=object)
    data = made([-999, 1, 2, *LAB[3:]], out, types={"x": "numeric"})
    assert data.class_names == ("no", "yes")
    assert len(data.train) + len(data.test) == N - 3
    assert "rows without 'out', left out: 3" in data.summary
    assert len(numbers_of(data)) == N - 3
    assert numbers_of(data)[0] > 3  # those of the rows that stay
    assert "empty in every row" in asked(LAB, [nothing] * N)


def test_an_outcome_that_is_missing_at_times_makes_numbers_floats_and_classes_all_the_same() -> None:
    out = np.where(OUT == "yes", 1.0, 0.0)
    for given in (out, np.where(np.arange(N) < 2, np.nan, out), out.astype(int), out.astype(int).astype(str)):
        data = made(LAB, given)
        assert data.task == "classification"
        assert data.class_names == ("0", "1")
    assert made(LAB, out.astype(bool)).class_names == ("False", "True")
    assert made(LAB, out, types={"out": "numeric"}).task == "regression"
    assert made(LAB, np.where(out == 1, "yes ", "no")).class_names == ("no", "yes")
    assert "'YES' in" in asked(LAB, np.where(np.arange(N) == 0, "YES", np.where(out == 1, "yes", "no")))


def test_a_regression_s_numbers_are_numbers() -> None:
    for given in (LAB, [str(v) for v in LAB], [f"{v}".replace(".", ",") for v in LAB], [Decimal(str(v)) for v in LAB]):
        data = made(LAB, given)
        assert data.task == "regression"
        assert f"mean {data.train.targets.mean():.4g}" not in data.summary  # it is that of the numbers as they were
    missing = made(LAB, [None, *LAB[1:]])
    assert len(missing.train) + len(missing.test) == N - 1
    assert "rows without 'out', left out: 1" in missing.summary
    grades = RNG.integers(1, 5, N).astype(float)
    assert "types={'out': 'numeric'} predicts a number" in asked(LAB, grades)
    assert made(LAB, grades, types={"out": "categorical"}).num_classes == 4
    stays = RNG.permutation(200)[:N]
    assert "60 different whole numbers" in asked(LAB, stays)
    assert made(LAB, stays, types={"out": "numeric"}).task == "regression"


def test_an_outcome_that_is_always_the_same_is_refused() -> None:
    for out in (["yes"] * N, [1] * N, [1.5] * N):
        assert "nothing to predict" in asked(LAB, out)
    assert "9, in 1 of 60 cells" not in made(LAB, ["9", *OUT[1:]]).summary
    assert "stand for what is missing" in asked(LAB, [99, *np.where(OUT[1:] == "yes", 1, 0)])


def test_a_frame_given_with_its_target_s_name_is_read_so_too() -> None:
    pyarrow = pytest.importorskip("pyarrow")
    table = pyarrow.table({
        "seen": pyarrow.array([FIRST] * 30 + [FIRST + datetime.timedelta(days=10)] * 30),
        "dose": pyarrow.array([Decimal(str(v)) for v in LAB]),
        "out": [None, *OUT[1:]],
    })  # fmt: skip
    data = dataset_of((table, "out"))
    assert [c.kind for c in data.columns] == ["numeric", "numeric"]
    assert "seen: dates, as days since 2020-01-01; dose: numbers; rows without 'out', left out: 1" in data.summary


def test_a_test_split_is_read_as_the_train_split_is() -> None:
    train = {
        "x": [f"{v}".replace(".", ",") for v in LAB],
        "seen": [f"2020-01-{1 + i % 28:02d}" for i in range(N)],
        "out": OUT,
    }
    test = {"x": ["1", "2"], "seen": ["2019-12-31", "2020-01-01"], "out": ["no", "yes"]}
    data = from_frame(train, "out", test=test)
    x, seen = data.columns
    rows = data.test.inputs.double() * torch.tensor([x.std, seen.std]) + torch.tensor([x.mean, seen.mean])
    torch.testing.assert_close(rows, torch.tensor([[1.0, 0.0], [2.0, 1.0]]).double(), atol=1e-3, rtol=1e-3)
    assert "as days since 2019-12-31" in data.summary


@draws(st.lists(st.floats(-1e6, 1e6).map(lambda v: round(v, 3)), min_size=5, max_size=12, unique=True))
def test_what_python_writes_is_read_back(values: list[float]) -> None:
    frame = {"x": [repr(value) for value in values], "y": values, "out": [*"ababa", *["a"] * (len(values) - 5)]}
    data = from_frame(frame, "out", types={"x": "numeric", "y": "numeric"})
    assert data.train.inputs[:, 0].equal(data.train.inputs[:, 1])
