"""A user's own arrays in files: images, volumes, signals or rows of a table, with a class for each."""

from __future__ import annotations

from pathlib import Path

from fedaudit.data.catalogue import Layout, Request, add_dataset
from fedaudit.data.dataset import Dataset
from fedaudit.data.files import read_arrays

_ENDINGS = ("npz", "safetensors")


def _read(paths: list[Path], request: Request) -> Dataset:
    """Read inputs and labels of one file, of which one example in five of every class is held out, or of two."""
    splits = [read_arrays(path, "inputs", "labels") for path in paths]
    return Dataset.from_tensors(
        *splits[0],
        test=(splits[1][0], splits[1][1]) if len(splits) > 1 else None,
        kind=request.kind,
        name=request.name,
        summary=request.summary,
        source="your own arrays",
    )


add_dataset(
    "arrays",
    "your own arrays, inputs and labels: images, volumes, signals or tables",
    "put train.npz and test.npz, or data.npz alone (or .safetensors), with the arrays inputs and labels into DATA_DIR; "
    "where the shape doesn't tell the kind, data.kind does: volume or signal",
    Layout(_read, tuple("|".join(f"{split}.{end}" for end in _ENDINGS) for split in ("train", "test"))),
    Layout(_read, ("|".join(f"data.{end}" for end in _ENDINGS),)),
    kind="any",
)
