"""Watches xgboost's training in this process, and writes what travels as the folder that ``read_boosters`` reads."""

from __future__ import annotations

import functools
import importlib.util
import inspect
import json
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from fedaudit.data import pairs_of
from fedaudit.modalities import number_columns
from fedaudit.simulation.protocols import MessageRecorder, WrongApp
from fedaudit.utils import BadInput, dump_yaml
from fedaudit_trees.boosters import FACTS
from fedaudit_trees.growing import as_json, is_json
from fedaudit_trees.model import Tree, read_booster

_DEEPEST = 16  # that a TreeSpec has
_XGBOOST = "xgboost"
_MADE_OF = "_fedaudit_made_of"  # of a QuantileDMatrix
Rows = tuple[NDArray[np.float32], NDArray[np.float32]]


class BoosterCapture:
    """While entered, it keeps what ``xgboost.Booster.update`` was last called with; ``xgboost.train`` calls that, too.

    An ``xgboost.QuantileDMatrix``, which scikit-learn's classes make, too, holds bins in place of the rows that it was
    made of: it keeps these, where it is made meanwhile. ``xgboost`` may be imported meanwhile, too.
    """

    def __init__(self) -> None:
        self.booster: Any = None
        self.rows: Rows | None = None
        self.unread = ""  # why there are no rows
        self._matrix: Any = None
        self._own: list[tuple[Any, str, Any]] = []

    def __enter__(self) -> Self:
        if _XGBOOST in sys.modules:
            self._watch(sys.modules[_XGBOOST])
        else:
            sys.meta_path.insert(0, self)
        return self

    def __exit__(self, *_: object) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        for kind, name, own in self._own:
            setattr(kind, name, own)
        matrix, self._matrix, self._own = self._matrix, None, []  # another process may be told
        try:
            self.rows = None if matrix is None else _rows_of(matrix)
        except Exception as error:  # a matrix in external memory, say
            self.unread = f"{type(matrix).__name__}: {error}"

    def find_spec(self, name: str, *_: object) -> ModuleSpec | None:
        """Find xgboost as Python does, to watch it once it is imported; of ``sys.meta_path``."""
        if name != _XGBOOST:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                run(module)
                self._watch(module)

            setattr(spec.loader, "exec_module", exec_module)  # noqa: B010 (mypy: it is a method)
        return spec

    def _watch(self, xgboost: Any) -> None:
        update, make = xgboost.Booster.update, xgboost.QuantileDMatrix.__init__
        self._own = [(xgboost.Booster, "update", update), (xgboost.QuantileDMatrix, "__init__", make)]

        @functools.wraps(update)
        def updated(booster: Any, dtrain: Any, *arguments: Any, **options: Any) -> None:
            update(booster, dtrain, *arguments, **options)
            self.booster, self._matrix = booster, dtrain

        @functools.wraps(make)
        def made(matrix: Any, *arguments: Any, **options: Any) -> None:
            make(matrix, *arguments, **options)
            given = inspect.signature(make).bind(matrix, *arguments, **options).arguments
            of_rows = {key: given[key] for key in ("data", "missing", "enable_categorical") if key in given}
            setattr(matrix, _MADE_OF, of_rows)

        xgboost.Booster.update, xgboost.QuantileDMatrix.__init__ = updated, made


class BoosterRecorder(MessageRecorder):
    """Writes boosters as they travel, and what is seen of their training, for :func:`read_boosters`.

    Args:
        mean, std: (d,) of the columns, where everybody knows them.
    """

    def __init__(
        self, folder: Path, *, name: str, mean: Sequence[float] | None = None, std: Sequence[float] | None = None
    ) -> None:
        self.notes: list[str] = []
        self._folder, self._name, self._mean, self._std = folder, name, mean, std
        self._features = 0
        self._protocol: str | None = None  # until a message shows it; of one round both are the same
        self._settings: dict[str, Any] = {}
        self._names: Sequence[str] | None = None
        self._types: Sequence[str] | None = None
        self._rows: dict[str, Rows | None] = {}

    def watch(self) -> BoosterCapture:
        """Return what watches xgboost."""
        return BoosterCapture()

    def message(self, index: int, client: str, model: bytes | None, start: bytes | None, seen: BoosterCapture) -> bool:
        """Write the ``model`` (JSON or UBJSON) that a client sent, after it got ``start``."""
        if model is None:
            if seen.booster is not None:
                raise BadInput("it trains xgboost, and sends no model as save_raw('json') or save_raw('ubj') gives it")
            return False
        self._write(index, client, model, start, seen)
        return True

    def _write(self, index: int, client: str, model: bytes, start: bytes | None, seen: BoosterCapture) -> None:
        where = f"round {index}, client {client}"
        booster = read_booster(as_json(model, where), where)
        for key, values in (("mean", self._mean), ("std", self._std)):
            if values is not None and len(values) != booster.features:
                columns = f"rows have {booster.features} columns"
                raise WrongApp(f"{key}: {len(values)} values, and {columns}; give one for each")
        if self._protocol is None and start and (before := read_booster(as_json(start, where), where).trees):
            self._protocol = "cyclic" if booster.trees and _same(booster.trees[0], before[0]) else "bagging"
        if seen.booster is not None and not self._settings:
            self._take_settings(seen.booster)
        self._folder.mkdir(parents=True, exist_ok=True)
        form = "json" if is_json(model) else "ubj"
        (self._folder / f"round-{index:05d}-client-{client}.{form}").write_bytes(model)
        self.messages += 1
        self._features = booster.features
        if seen.booster is None:
            self._note("a client's training wasn't seen: it runs in a process of its own, or not by xgboost.train")
            return
        own = seen.rows
        if seen.unread:
            self._note(f"client {client}'s rows can't be had of its {seen.unread}")
        if own is not None and not np.isfinite(own[0]).all():
            self._note(f"client {client} trains on rows with missing values, which aren't evaluated")
            own = None
        known = self._rows.setdefault(client, own)
        if known is not None and (own is None or not all(map(np.array_equal, known, own))):
            self._note(f"client {client} trains on other rows in another round, so these aren't evaluated")
            self._rows[client] = None

    def close(self, records: Any | None = None) -> None:
        """Write ``trees.yaml``, clients' rows and, as of :func:`pairs_of`, others'; BadInput: no training was seen."""
        if not self._settings:
            raise BadInput(
                f"{'; '.join(self.notes)}; write learning_rate and trees into {self._folder / FACTS}, then: "
                f"fedaudit convert {self._folder} TRANSCRIPT"
            )
        facts: dict[str, Any] = {"name": self._name, **self._settings}
        facts["trees"]["protocol"] = self._protocol or "bagging"
        if self._names or self._mean or self._std:
            facts["columns"] = self._columns()
        (self._folder / FACTS).write_text(dump_yaml(facts), encoding="utf-8")
        for client, own in self._rows.items():
            if own is not None:
                np.savez(self._folder / f"rows-{client}.npz", inputs=own[0], labels=own[1])
        if records is not None:
            inputs, labels = pairs_of(records)
            np.savez(self._folder / "candidates.npz", inputs=inputs.numpy(), labels=labels.numpy())

    def _take_settings(self, booster: Any) -> None:
        """Take from a booster what everybody in a federation knows of its training, and how columns are called."""
        found = json.loads(booster.save_config())["learner"]["gradient_booster"]["tree_train_param"]
        for name in ("reg_alpha", "max_delta_step"):
            if float(found[name]):
                raise BadInput(f"not read: {name} is {float(found[name]):g}, and leaves tell no sums of gradients")
        if float(found["subsample"]) < 1:
            self._note(f"a tree grows on {float(found['subsample']):.0%} of the rows, drawn anew: it can't be repeated")
        depth = int(found["max_depth"])
        if not 1 <= depth <= _DEEPEST:
            self._note(f"trees have a max_depth of {depth}, which stands as {_DEEPEST} in the report")
            depth = _DEEPEST
        trees = {
            "max_depth": depth,
            "min_child_weight": float(found["min_child_weight"]),
            "reg_lambda": float(found["reg_lambda"]),
            "max_bin": int(found["max_bin"]),
            "columns": float(found["colsample_bytree"]),
        }
        self._settings = {"learning_rate": float(found["learning_rate"]), "trees": trees}
        self._names, self._types = booster.feature_names, booster.feature_types

    def _columns(self) -> list[dict[str, Any]]:
        names = self._names or [column.name for column in number_columns(self._features)]
        columns: list[dict[str, Any]] = [{"name": name} for name in names]
        for key, values in (("mean", self._mean), ("std", self._std)):
            if values is None:
                continue
            for column, value in zip(columns, values, strict=True):
                column[key] = float(value)
        for column, kind in zip(columns, self._types or (), strict=False):
            if kind == "i":  # xgboost's name of a column of 0 and 1
                column.update(categories=["0", "1"], codes=[0.0, 1.0])
        return columns

    def _note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)


def _same(one: Tree, other: Tree) -> bool:
    return all(np.array_equal(getattr(one, name), getattr(other, name)) for name in ("left", "feature", "value"))


def _rows_of(matrix: Any) -> Rows:
    """Return a DMatrix's rows (n, d), NaN where missing, and labels (n,); ValueError: all that is known are bins."""
    source = matrix
    if "Quantile" in type(matrix).__name__:
        made_of = getattr(matrix, _MADE_OF, {})
        if "data" not in made_of or hasattr(made_of["data"], "next"):
            raise ValueError("it holds bins; make it of an array or a table in the function that trains")
        source = sys.modules[_XGBOOST].DMatrix(**made_of)
    held = source.get_data()
    rows = np.full(held.shape, np.nan, dtype=np.float32)
    rows[np.repeat(np.arange(len(rows)), np.diff(held.indptr)), held.indices] = held.data
    return rows, np.asarray(matrix.get_label(), dtype=np.float32)
