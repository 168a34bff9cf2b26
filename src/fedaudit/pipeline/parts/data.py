"""The data set of a scenario, or a user's own."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from torch import nn

from fedaudit.data import Dataset, load_dataset
from fedaudit.data.catalogue import limited
from fedaudit.data.dataset import of_heads
from fedaudit.data.own import dataset_of
from fedaudit.data.table_file import TABLE_FILE, table_file
from fedaudit.models import of_one_tensor, packing_of, packings_in
from fedaudit.results import DataRecord
from fedaudit.scenario.scenario import DataSpec, Scenario
from fedaudit.task.losses import recognise
from fedaudit.task.training import BCE, Loss
from fedaudit.utils.errors import BadInput


def of_one_tensor_each(module: nn.Module, dataset: Dataset) -> tuple[nn.Module, Dataset]:
    """Return a user's module, that takes and returns one tensor where it had several, and data with targets for it.

    BadInput: it doesn't take the data set's inputs, or returns something else than tensors.
    """
    if packings_in(module) != (None, None):
        return module, dataset
    inputs, heads = packing_of(module, dataset.packed_inputs, dataset.test.inputs[:2])
    if heads is not None:
        dataset = of_heads(dataset)
    elif dataset.packed_targets is not None:
        raise BadInput(f"the targets are several, {dataset.packed_targets}, and the model returns one tensor; give one")
    return (module if inputs is heads is None else of_one_tensor(module, inputs, heads)), dataset


def own_dataset(data: Any, kind: str | None, name: str | None, loss: Loss | None) -> Dataset:
    """Return a user's own data of a ``kind``, with targets as the loss takes them: its ``name``, or a user's own."""
    meant = loss is not None and recognise(loss, 1, None) is None  # 0 and 1, counts: whoever wrote it knows
    return dataset_of(data, kind=kind, classes=name == BCE, raw_targets=meant)


def loaded(scenario: Scenario, data_dir: Path | None) -> Dataset:
    spec = scenario.data
    if spec.name == TABLE_FILE:
        found = of_file(spec)
        _check_clients(scenario, found)
        return found
    return load_dataset(
        spec.name,
        image_size=spec.image_size,
        data_dir=data_dir,
        limit=spec.limit,
        seed=scenario.seed,
        white=spec.max_pixel_value,
        kind=spec.kind,
    )


def of_file(spec: DataSpec) -> Dataset:
    """Return a table in a file; BadInput names the scenario's keys."""
    asked = {key: getattr(spec, key) for key in spec.of_file()}
    try:
        return limited(table_file(**asked), spec.limit)
    except BadInput as error:
        raise BadInput(re.sub(rf"\b({'|'.join(asked)})=", r"data.\1=", str(error))) from None


def _check_clients(scenario: Scenario, dataset: Dataset) -> None:
    """Refuse clients by a column that no federation has."""
    if scenario.data.client is None or dataset.train.groups is None:
        return
    for federation in scenario.federations:
        if federation.partition.scheme != "natural":
            at, count = f"federations.{federation.name}", int(dataset.train.groups.max()) + 1
            raise BadInput(
                f"data.client says whose a row is, and federation '{federation.name}' shares rows out by "
                f"'{federation.partition.scheme}': set {at}.partition={{scheme: natural}} and {at}.clients={count}, or "
                "leave data.client out"
            )


def data_record(dataset: Dataset) -> DataRecord:
    """Return what a result says of the data."""
    return DataRecord(
        name=dataset.name,
        summary=dataset.summary if dataset.source in dataset.summary else f"{dataset.summary}; {dataset.source}",
        classes=dataset.num_classes,
        class_names=list(dataset.class_names) if dataset.class_names else None,
        kind=dataset.kind,
        input_shape=list(dataset.input_shape),
        words=list(dataset.words) if dataset.words else None,
    )
