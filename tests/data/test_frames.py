"""Frames of mixed columns, and declared columns: what the model sees of them, by hand and by scikit-learn."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.preprocessing import OneHotEncoder, StandardScaler

import fedaudit
from fedaudit.data import Dataset, from_frame, load_dataset
from fedaudit.data.own import dataset_of
from fedaudit.modalities.columns import Column, cells, check_columns
from fedaudit.task.info import TaskInfo
from fedaudit.transcript.transcript import Transcript
from fedaudit.utils.errors import BadInput

AGES = [30.0, 40.0, 50.0, 60.0, 35.0, 45.0, 55.0, 65.0, 70.0, 20.0]
WARDS = ["b", "a", "c", "a", "b", "c", "a", "b", "a", "c"]
OUT = ["no", "yes"] * 5


class Series:
    """As much of pandas' Series as is used."""

    def __init__(self, values: list[Any], dtype: str) -> None:
        self.values, self.dtype = values, dtype

    def tolist(self) -> list[Any]:
        return self.values


def pandas_like(**changes: Series) -> Any:
    class NoMapping:
        iloc = None

        def __init__(self, columns: dict[str, Series]) -> None:
            self._columns = columns

        columns = property(lambda self: list(self._columns))
        dtypes = property(lambda self: [c.dtype for c in self._columns.values()])

        def __getitem__(self, name: str) -> Series:
            return self._columns[name]

    columns = {"age": Series(AGES, "float64"), "ward": Series(WARDS, "category"), "out": Series(OUT, "object")}
    return NoMapping({**columns, **changes})


def test_frames_of_pandas_say_what_their_columns_are() -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({
        "age": AGES,
        "visits": pandas.array([1, 2, None, 4, 5, 6, 7, 8, 9, 10], dtype="Int64").fillna(0),
        "ward": pandas.Categorical(WARDS, categories=["a", "b", "c", "never"]),
        "text": pandas.Series(WARDS, dtype="string"),
        "smoker": [True, False] * 5,
        "out": OUT,
    })  # fmt: skip
    data = from_frame(frame, "out")
    kinds = {column.name: column.kind for column in data.columns}
    assert kinds == {
        "age": "numeric", "visits": "numeric", "ward": "categorical", "text": "categorical", "smoker": "categorical",
    }  # fmt: skip
    plain = from_frame({name: frame[name].tolist() for name in ("age", "ward", "out")}, "out")
    assert plain.train.inputs.equal(from_frame(frame[["age", "ward", "out"]], "out").train.inputs)
    missing = frame.assign(text=pandas.Series([None, *WARDS[1:]], dtype="string"))
    assert "?" in next(c for c in from_frame(missing, "out").columns if c.name == "text").categories
    with pytest.raises(BadInput, match="missing or not finite"):
        from_frame(frame.assign(age=pandas.array([None, *AGES[1:]], dtype="Float64")), "out")


def test_a_frame_is_standardised_and_one_hot_as_scikit_learn_does_it() -> None:
    data = from_frame(pandas_like(), "out")
    kept = torch.tensor([i for i in range(10) if i not in (8, 9)])  # one in five of each class is held out
    ages = StandardScaler().fit_transform(np.array(AGES)[kept.numpy(), None])
    wards = OneHotEncoder(sparse_output=False).fit_transform(np.array(WARDS)[kept.numpy(), None])
    assert torch.allclose(data.train.inputs, torch.from_numpy(np.hstack([ages, wards])).float(), atol=1e-6)
    assert data.class_names == ("no", "yes")
    assert [(c.name, c.kind, c.positions, c.categories) for c in data.columns] == [
        ("age", "numeric", (0,), ()),
        ("ward", "categorical", (1, 2, 3), ("a", "b", "c")),
    ]
    words = [
        [c.text(float(v)) for c, v in zip(data.columns, row, strict=True)]
        for row in cells(data.train.inputs, data.columns)
    ]
    assert words == [[f"{AGES[i]:g}", WARDS[i]] for i in kept.tolist()]


def test_pyarrow_says_the_same_and_so_does_a_mapping() -> None:
    pyarrow = pytest.importorskip("pyarrow")
    table = pyarrow.table({"age": AGES, "ward": pyarrow.array(WARDS).dictionary_encode(), "out": OUT})
    wanted = from_frame(pandas_like(), "out")
    for frame in (table, {"age": AGES, "ward": WARDS, "out": OUT}):
        made = from_frame(frame, "out")
        assert made.train.inputs.equal(wanted.train.inputs)
        assert made.columns == wanted.columns
    assert dataset_of((table, "out")).columns == wanted.columns


def test_types_can_be_declared_and_columns_left_out() -> None:
    codes = Series([1, 2, 3, 1, 2, 3, 1, 2, 3, 1], "int64")
    made = from_frame(pandas_like(code=codes), "out", types={"code": "categorical"}, drop=["age"])
    assert [(c.name, c.kind) for c in made.columns] == [("ward", "categorical"), ("code", "categorical")]
    assert made.columns[1].categories == ("1", "2", "3")
    plain = from_frame(pandas_like(code=codes), "age")
    assert plain.task == "regression"
    assert [c.kind for c in plain.columns] == ["categorical", "categorical", "numeric"]
    assert float(plain.train.targets.mean()) == pytest.approx(0, abs=1e-6)


def test_what_is_missing_is_a_category_of_texts_and_refused_of_numbers() -> None:
    holes = Series([None, "a", float("nan"), "a", "b", "b", "a", "b", "a", "b"], "object")
    assert from_frame(pandas_like(ward=holes), "out").columns[1].categories == ("?", "a", "b")
    with pytest.raises(BadInput, match="'age' has 1 of 10 numbers"):
        from_frame(pandas_like(age=Series([None, *AGES[1:]], "float64")), "out")


@pytest.mark.parametrize(
    ("changes", "options", "message"),
    [
        ({"age": Series([[age] for age in AGES], "object")}, {}, "column 'age' holds a list"),
        (
            {"ward": Series([str(i) for i in range(10)], "object")},
            {"types": {"ward": "whole"}},
            "numeric or categorical",
        ),
        ({}, {"types": {"ward": "numeric"}}, "isn't numeric"),
        ({}, {"drop": ["wrd"]}, "no column 'wrd'"),
        ({"age": Series(AGES[:4], "float64")}, {}, "different lengths"),
    ],
)
def test_what_a_frame_is_refused_for(changes: dict[str, Series], options: dict[str, Any], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        from_frame(pandas_like(**changes), "out", **options)


def test_too_many_categories_are_refused() -> None:
    frame = {"id": [f"p{i}" for i in range(3000)], "out": ["no", "yes"] * 1500}
    with pytest.raises(BadInput, match="1,000 categories"):
        from_frame(frame, "out", types={"id": "categorical"})


def test_declared_columns_of_an_array() -> None:
    rows = torch.tensor([[1.0, 0, 10], [0, 1, 20], [0, 1, 30], [1, 0, 40], [1, 0, 50], [0, 1, 60]])
    columns = [Column("sex", "categorical", (0, 1), ("f", "m")), Column("age", "numeric", (2,))]
    made = Dataset.from_tensors(rows, torch.tensor([0, 1, 0, 1, 0, 1]), columns=columns)
    assert set(made.train.inputs[:, :2].flatten().tolist()) == {0.0, 1.0}
    assert made.columns[1].mean == pytest.approx(float(rows[:, 2].mean()), abs=10)
    with pytest.raises(BadInput, match="0 to 2"):
        Dataset.from_tensors(rows, torch.tensor([0, 1] * 3), columns=columns[:1])
    with pytest.raises(BadInput, match="is one-hot"):
        Dataset.from_tensors(rows * 2, torch.tensor([0, 1] * 3), columns=columns)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kind": "numeric", "positions": (0, 1)}, "one position"),
        ({"kind": "categorical", "positions": (0,)}, "0 categories"),
        ({"kind": "categorical", "positions": (0, 1), "categories": ("a",)}, "2 positions for 1"),
        ({"kind": "numeric", "positions": (0,), "std": 0.0}, "std above 0"),
        ({"kind": "numeric", "positions": (0,), "mean": float("nan")}, "must be finite"),
        ({"kind": "categorical", "positions": (0,), "categories": ("a", "b"), "codes": (1.0, 1.0)}, "2 codes"),
        ({"kind": "categorical", "positions": (0,), "categories": ("a", "b", "c"), "codes": (1.0, 2.0)}, "2 codes"),
    ],
)
def test_a_column_that_contradicts_itself_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        Column("x", **fields)


def test_columns_travel_with_a_transcript_and_older_ones_have_none(tmp_path: Path) -> None:
    values = {"data": {"name": "diabetes"}, "model": {"name": "linear"}, "attacks": ["labels"],
              "federations": [{"name": "f", "clients": 1, "examples": 2}]}  # fmt: skip
    made = fedaudit.simulate(values, progress=False).transcript
    made.save(tmp_path / "t")
    assert Transcript.load(tmp_path / "t").task_info.columns == load_dataset("diabetes").columns
    older = TaskInfo("linear", None, "eval", "mse", "table", (10,), None, (0.0,), (1.0,))
    assert older.columns == ()
    with pytest.raises(BadInput, match="positions"):
        TaskInfo("linear", None, "eval", "mse", "table", (9,), None, (0.0,), (1.0,), columns=made.task_info.columns)
    with pytest.raises(BadInput, match="only tables have columns"):
        check_columns(made.task_info.columns, (1, 8, 8), "images")
