"""What is here and what is missing, and what to do about it."""

from __future__ import annotations

import importlib.metadata
import os
from pathlib import Path

import torch
from rich.table import Table

from fedaudit.data import DATASETS, find_dataset, how_to_get
from fedaudit.evaluation.image_metrics import lpips_missing
from fedaudit.pipeline.run import environment
from fedaudit.utils import native
from fedaudit.utils.errors import BadInput
from fedaudit.utils.progress import wide_console

_PACKAGES = ("torch", "torchmetrics", "numpy", "scipy", "scikit-learn", "scikit-image", "pydantic", "safetensors")
_OPTIONAL = {"pyarrow": "reads parquet data sets: pip install 'PATH_OF_THE_CLONE[parquet]'"}


def examine(data_dir: Path | None) -> None:
    """Print versions, threads, GPU, data sets and weights, each with what to do if it is missing."""
    if data_dir is not None and not data_dir.is_dir():
        raise BadInput(f"--data-dir {data_dir} isn't a folder")
    console = wide_console()
    training = Table(title="machine", title_justify="left", title_style="bold", show_header=False)
    for name, value in {**environment("cpu"), "native code": _native_code()}.items():
        training.add_row(name, value)
    training.add_row("torch threads", str(torch.get_num_threads()))
    training.add_row("GPU", torch.cuda.get_device_name() if torch.cuda.is_available() else "none found by torch")
    training.add_row("data folder", str(data_dir or "none: set --data-dir or FEDAUDIT_DATA"))
    console.print(training)

    packages = Table(title="packages", title_justify="left", title_style="bold")
    packages.add_column("package")
    packages.add_column("version")
    packages.add_column("what to do")
    for name in (*_PACKAGES, *_OPTIONAL):
        version = _version(name)
        packages.add_row(name, version or "missing", "" if version else _OPTIONAL.get(name, f"pip install {name}"))
    console.print(packages)

    sets = Table(title="data sets and weights", title_justify="left", title_style="bold")
    sets.add_column("name", no_wrap=True)
    sets.add_column("found")
    sets.add_column("where, or what to do")
    for entry in DATASETS:
        paths = find_dataset(entry.name, data_dir)
        if paths is None:
            sets.add_row(entry.name, "no", how_to_get(entry.name))
        else:
            sets.add_row(entry.name, "yes", os.pathsep.join(map(str, paths)) or "comes with fedaudit")
    missing = lpips_missing()
    sets.add_row("LPIPS weights", "no" if missing else "yes", missing or "")
    console.print(sets)


def build_native_code() -> None:
    """Compile the native code where it is missing, and print which one is used from now on."""
    try:
        library = native.build()
        native.kernels()
    except native.Unavailable as error:
        raise BadInput(f"native code can't be built ({error}); everything works without it, more slowly") from None
    print(f"native code: {native.native_code()}, {library}")


def _native_code() -> str:
    try:
        native.kernels()
    except native.Unavailable as error:
        return f"none, so convolutions are slower ({error})"
    return native.native_code()


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
