"""The small real sets inside the scikit-learn package: digits, breast-cancer, diabetes. No download."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedaudit.data.catalogue import Layout, Request, add_dataset
from fedaudit.data.dataset import Attribute, Dataset, Split, with_column, within_class_rank
from fedaudit.data.images import image_dataset
from fedaudit.modalities.columns import Column

_GET = "embedded in the scikit-learn package"


def _digits(_: list[Path], request: Request) -> Dataset:
    from sklearn.datasets import load_digits

    bunch = load_digits()
    pixels = (bunch.images / 16).astype(np.float32)[:, None]  # grey levels 0..16
    held_out = (within_class_rank(torch.from_numpy(bunch.target)) % 5 == 4).numpy()
    return image_dataset(
        request,
        (pixels[~held_out], bunch.target[~held_out]),
        (pixels[held_out], bunch.target[held_out]),
        class_names=[str(digit) for digit in range(10)],
        num_classes=10,
        source="scikit-learn, test part of UCI Optical Recognition of Handwritten Digits (CC BY 4.0)",
    )


def _table(
    request: Request,
    bunch: Any,
    targets: np.ndarray[Any, Any],
    source: str,
    names: list[str] | None,
    categories: Mapping[str, tuple[str, ...]],
) -> Dataset:
    columns = [
        Column(str(name), "categorical" if name in categories else "numeric", (i,), categories.get(str(name), ()))
        for i, name in enumerate(bunch.feature_names)
    ]
    return Dataset.from_tensors(
        bunch.data,
        targets,
        name=request.name,
        summary=request.summary,
        class_names=names,
        source=source,
        columns=columns,
    )


def _breast_cancer(_: list[Path], request: Request) -> Dataset:
    from sklearn.datasets import load_breast_cancer

    bunch = load_breast_cancer()
    source = "scikit-learn, UCI Breast Cancer Wisconsin (Diagnostic), CC BY 4.0"
    return _table(request, bunch, bunch.target, source, [str(name) for name in bunch.target_names], {})


def _diabetes(_: list[Path], request: Request) -> Dataset:
    from sklearn.datasets import load_diabetes

    bunch = load_diabetes(scaled=False)
    source = "scikit-learn, diabetes data of Efron, Hastie, Johnstone and Tibshirani, Least Angle Regression, 2004"
    sexes = ("1", "2")  # the source doesn't name them
    whole = _table(request, bunch, bunch.target.astype(np.float64), source, None, {"sex": sexes})
    return with_column(whole, "sex", [bunch.feature_names.index("sex")], sexes)


def _parity(paths: list[Path], request: Request) -> Dataset:
    whole = _digits(paths, request)
    parts = [
        Split(split.inputs, split.targets % 2, attributes={"large": (split.targets >= 5).long()})
        for split in (whole.train, whole.test)
    ]
    return replace(
        whole,
        train=parts[0],
        test=parts[1],
        num_classes=2,
        class_names=("even", "odd"),
        attributes={"large": Attribute(("0 to 4", "5 to 9"))},
    )


add_dataset(
    "digits", "1,797 handwritten digits of 8x8 grey pixels, ten classes", _GET, Layout(_digits), needs="nothing"
)
add_dataset(
    "digits-parity",
    "the same digits, odd or even; attribute: large, whether the digit is at least five",
    _GET,
    Layout(_parity),
    needs="nothing",
)
add_dataset(
    "breast-cancer",
    "569 tumours, 30 measurements each, malignant or benign",
    _GET,
    Layout(_breast_cancer),
    kind="table",
    needs="nothing",
)
add_dataset(
    "diabetes",
    "442 patients, 10 measurements each, disease progression after a year (regression); attribute: sex",
    _GET,
    Layout(_diabetes),
    kind="table",
    task="regression",
    needs="nothing",
)
