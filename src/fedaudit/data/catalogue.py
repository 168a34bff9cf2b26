"""The catalogue of data sets by name: where each may lie, who reads it, and how to get it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import torch

from fedaudit.data.dataset import Dataset, Split, balanced
from fedaudit.modalities import example_kind
from fedaudit.task.targets import CLASSIFICATION
from fedaudit.utils.errors import BadInput, MissingData
from fedaudit.utils.registry import Registry

DATA_DIR_VARIABLE = "FEDAUDIT_DATA"


@dataclass(frozen=True)
class Request:
    """What the caller asked for.

    Attributes:
        limit: examples a split, for readers of much, as ``balanced``; :func:`load_dataset` cuts all the others.
        white: the value that becomes 1 in image files.
    """

    name: str
    summary: str
    image_size: int | None = None
    limit: int | None = None
    seed: int = 0
    white: float | None = None
    kind: str | None = None


Reader = Callable[[list[Path], Request], Dataset]


@dataclass(frozen=True)
class Layout:
    """One way in which a data set lies on disk: these files (or folders) in one of these folders of the data dir.

    A file may be gzipped (``.gz``); of names parted by ``|``, the first that exists is taken. Embedded sets have none.
    """

    read: Reader
    files: tuple[str, ...] = ()
    folders: tuple[str, ...] = (".",)

    def find(self, data_dir: Path | None) -> list[Path] | None:
        """Return the paths to read, in the order of ``files``, or None where one of them is missing."""
        if not self.files:
            return []
        if data_dir is None:
            return None
        for folder in self.folders:
            found = [_first_existing(data_dir / folder, file) for file in self.files]
            if None not in found:
                return [path for path in found if path is not None]
        return None

    def describe(self) -> str:
        """Return in a few words what is looked for."""
        folders = " or ".join("the folder itself" if folder == "." else f"{folder}/" for folder in self.folders)
        return f"{' + '.join(self.files).replace('|', ' or ')} in {folders}"


@dataclass(frozen=True)
class Recipe:
    """Everything about one named data set: its layouts in the order in which they are tried, and how to get it."""

    layouts: tuple[Layout, ...]
    get: str


_again: ContextVar[bool] = ContextVar("again", default=False)

DATASETS: Registry[Recipe] = Registry("data set", "fedaudit.datasets")


def add_dataset(
    name: str,
    summary: str,
    get: str,
    *layouts: Layout,
    kind: str = "image",
    task: str = CLASSIFICATION.name,
    needs: str = "files",
) -> None:
    """Add a data set to ``DATASETS``; one of which no layout has files is embedded.

    Args:
        get: how to get its files.
        kind: of its examples; ``any``: the user says it, or the shape of the arrays.
        needs: what must be there to read it, in words.
    """
    embedded = not any(layout.files for layout in layouts)
    declared = {"kind": kind, "task": task, "embedded": embedded, "needs": needs}
    DATASETS.register(name, summary, module=layouts[0].read.__module__, **declared)(Recipe(layouts, get))


def load_dataset(
    name: str,
    *,
    image_size: int | None = None,
    data_dir: Path | None = None,
    limit: int | None = None,
    seed: int = 0,
    white: float | None = None,
    kind: str | None = None,
) -> Dataset:
    """Load a data set by name.

    Args:
        name: one of ``DATASETS``.
        image_size: side in pixels to which images are resized (antialiased); ``photos`` are cut for that size.
        data_dir: the folder that holds the data sets' files; by default the environment variable FEDAUDIT_DATA.
        limit: keep at most so many examples per split, the first ones of every class in equal parts.
        seed: of data sets that are drawn and not read.
        white: of folders of images, the value that becomes 1 in their files; default: the largest
            that their depth allows, and of floats 1.
        kind: of the examples of ``arrays``; default: what their shape suggests. Other data sets have one of their own.

    Raises:
        BadInput: unknown name, an option that doesn't fit, or a file that is damaged.
        MissingData: the files (or the package that reads them) are not there; the message says how to get them.
    """
    entry = DATASETS[name]
    own = None if entry.info["kind"] == "any" else example_kind(entry.info["kind"])
    if own is not None and kind not in (None, own.name):
        raise BadInput(f"data set '{name}' holds {own.described}, and kind is '{kind}'; leave kind out")
    if image_size is not None and (own is None or not own.resizable):
        what = "arrays as they are" if own is None else own.described
        raise BadInput(f"image_size={image_size} given for data set '{name}', which holds {what}; leave image_size out")
    if image_size is not None and not 4 <= image_size <= 1024:
        raise BadInput(f"image_size={image_size} for data set '{name}'; give 4 to 1024 pixels")
    if limit is not None and limit < 1:
        raise BadInput(f"limit={limit} for data set '{name}'; give at least 1 example per split, or no limit")
    directory = _data_dir(data_dir)
    request = Request(name, entry.summary, image_size, limit, seed, white, kind)
    for layout in entry.value.layouts:
        paths = layout.find(directory)
        if paths is not None:
            found = _read_again(layout, paths, request) if _again.get() else layout.read(paths, request)
            return limited(found, limit)
    wanted = "; or ".join(layout.describe() for layout in entry.value.layouts)
    if directory is None:
        looked = f"no data folder given (data_dir=… or {DATA_DIR_VARIABLE}) to look in for {wanted}"
    elif not directory.is_dir():
        looked = f"the data folder {directory} does not exist"
    else:
        looked = f"looked in {directory} for {wanted}"
    raise MissingData(f"data set '{name}' not found: {looked}. To get it: {entry.value.get}")


def limited(whole: Dataset, limit: int | None) -> Dataset:
    """Return a data set with at most ``limit`` examples a split, the first ones of every class in equal parts."""
    if limit is None or max(len(whole.train), len(whole.test)) <= limit:
        return whole
    return replace(whole, train=_first(whole.train, limit), test=_first(whole.test, limit))


def _first(split: Split, limit: int) -> Split:
    classes = split.targets if split.targets.ndim == 1 else torch.zeros(len(split), dtype=torch.int64)
    return split[balanced(classes, limit)]


@contextmanager
def reading_once() -> Iterator[None]:
    """Let :func:`load_dataset` return the last data set again while its files are the same; nobody may change it.

    A process that runs one trial of a study after another would decode the same thousands of images for each.
    """
    token = _again.set(True)
    try:
        yield
    finally:
        _again.reset(token)


def _read_again(layout: Layout, paths: list[Path], request: Request) -> Dataset:
    stamps = []
    for path in paths:
        known = path.stat()
        if not path.is_file():  # a folder doesn't tell whether what is in it has changed
            return layout.read(paths, request)
        stamps.append((path, known.st_size, known.st_mtime_ns))
    return _kept(layout, tuple(stamps), request)


@lru_cache(maxsize=1)
def _kept(layout: Layout, stamps: tuple[tuple[Path, int, int], ...], request: Request) -> Dataset:
    return layout.read([path for path, *_ in stamps], request)


def find_dataset(name: str, data_dir: Path | None = None) -> list[Path] | None:
    """Return the files that ``load_dataset`` would read ([] for embedded data), or None where they are missing.

    Raises:
        BadInput: unknown name.
    """
    directory = _data_dir(data_dir)
    for layout in DATASETS[name].value.layouts:
        paths = layout.find(directory)
        if paths is not None:
            return paths
    return None


def how_to_get(name: str) -> str:
    """Return one line on how to get a data set.

    Raises:
        BadInput: unknown name.
    """
    return DATASETS[name].value.get


def _data_dir(given: Path | None) -> Path | None:
    if given is not None:
        return Path(given).expanduser()
    variable = os.environ.get(DATA_DIR_VARIABLE)
    return Path(variable).expanduser() if variable else None


def _first_existing(folder: Path, names: str) -> Path | None:
    for name in names.split("|"):
        for path in (folder / name, folder / f"{name}.gz"):
            if path.exists():
                return path
    return None
