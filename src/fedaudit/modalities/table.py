"""Rows of a table: (columns,) real values, standardised in the data set."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from fedaudit.modalities.base import ExampleKind, register


class Table(ExampleKind):
    """Rows of a table, which models see as the data set holds them: standardised, column by column."""

    name: ClassVar[str] = "table"
    summary: ClassVar[str] = "rows of a table, (d,) values standardised by the train split"
    plural: ClassVar[str] = "records"
    described: ClassVar[str] = "rows of a table"
    axes: ClassVar[tuple[str, ...]] = ("columns",)
    letters: ClassVar[str] = "d"
    arrays: ClassVar[str] = "(n, d)"
    array_axes: ClassVar[tuple[int, ...]] = (2,)

    def read(self, array: Tensor, where: str) -> Tensor:
        """Return finite numbers as float64 (n, d), which :meth:`prepare` standardises."""
        rows = array.to(torch.float64)
        self.check_finite(rows, where)
        return rows

    def prepare(self, train: Tensor, test: Tensor) -> tuple[Tensor, Tensor, tuple[float, ...], tuple[float, ...]]:
        """Return both splits standardised by the train split; nothing is left for the model to take out."""
        return (*standardise(train, test), (0.0,), (1.0,))

    def normalise(self, examples: Tensor, mean: tuple[float, ...], std: tuple[float, ...]) -> Tensor:  # noqa: ARG002
        """Return the rows as they are."""
        return examples

    def denormalise(self, inputs: Tensor, mean: tuple[float, ...], std: tuple[float, ...]) -> Tensor:  # noqa: ARG002
        """Return the rows as they are."""
        return inputs


def standardise(train: Tensor, test: Tensor) -> tuple[Tensor, Tensor]:
    """Return both (n, d) with the mean and standard deviation of ``train`` taken out, as float32."""
    wide = train.to(torch.float64)
    mean, std = wide.mean(dim=0), wide.std(dim=0, correction=0)
    std = torch.where(std > 1e-12 * mean.abs(), std, torch.ones_like(std))
    return ((wide - mean) / std).float(), ((test.to(torch.float64) - mean) / std).float()


TABLE = register(Table())
