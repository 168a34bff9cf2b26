"""Folders of a user's own scans, volumes and signals, one example a file: by class, by a table of targets, with masks.

    DIR/train/CLASS/FILE, DIR/test/CLASS/FILE     a folder for each class
    DIR/labels.csv                                a line for each file: its path in DIR, and one target or several
    DIR/masks/PATH                                a mask for each file DIR/PATH

An example is a file of one of ``READERS`` (``fedaudit.data.medical``), or a folder that is a DICOM series.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

import numpy as np
import torch
from torch import Tensor

from fedaudit.data.catalogue import Layout, Reader, Request, add_dataset
from fedaudit.data.cells import FEW, cell, check_classes, number_in
from fedaudit.data.dataset import Dataset, balanced, check_names, hold_out
from fedaudit.data.files import Numbers, read_csv
from fedaudit.data.images import IMAGE_SUFFIXES, MAX_BYTES, resize
from fedaudit.data.medical import Said, read_example, suffix_of
from fedaudit.modalities import ExampleKind, example_kind
from fedaudit.modalities.base import DARK
from fedaudit.utils.errors import BadInput

TABLE, MASKS = "labels.csv", "masks"
CLIENT = "client"  # the column of the table that says whose the example is
PERSONS = ("patient", "subject")  # columns that say of which person it is, one at most
TEST = ("test", "val", "validation")
_ARRAYS = (".npy", ".npz")


@dataclass(frozen=True, eq=False)
class Examples:
    """One split of a folder.

    inputs: float32 (n, ...), as their kind has them.
    targets: int64 (n,) classes; float32 (n, k) of one column of real values or of several columns; int64 (n, H, W) or
        (n, D, H, W) masks.
    groups: int64 (n,), the number of each example's client; None if the table doesn't say.
    persons: int64 (n,), the number of the person of whom each example is; None if the table doesn't say.
    """

    inputs: Tensor
    targets: Tensor
    groups: Tensor | None = None
    persons: Tensor | None = None


@dataclass(frozen=True, eq=False)
class Listed:
    """Files that are to be read, with targets (n, ...), or with files of masks, and clients and persons (n,)."""

    files: list[Path]
    targets: Tensor | list[Path]
    groups: Tensor | None = None
    persons: Tensor | None = None

    def __getitem__(self, rows: Tensor) -> Listed:
        chosen = rows.tolist()
        targets = self.targets[rows] if isinstance(self.targets, Tensor) else [self.targets[i] for i in chosen]
        groups, persons = (None if known is None else known[rows] for known in (self.groups, self.persons))
        return Listed([self.files[i] for i in chosen], targets, groups, persons)


def folder_data(folder: Path) -> str | None:
    """Return the data set as which a user's folder is read, by its layout and its first example.

    Returns:
        ``scan-folder``, ``volume-folder``, ``signal-folder`` or ``image-folder``; None if it is laid out otherwise.

    Raises:
        MissingData: a package that reads the first example isn't installed.
        BadInput: a damaged file, or an array of which the shape doesn't tell what it is.
    """
    masks = (folder / MASKS).is_dir()
    if (folder / TABLE).is_file():
        rows = read_csv(folder / TABLE)[1:]
        first = [folder / _named(rows[0][0].strip(), folder / TABLE)] if rows else []
    elif not (folder / "train").is_dir():
        return None
    else:
        parts = _examples_in(folder / "train")
        first = parts if masks else [file for part in parts if part.is_dir() for file in _examples_in(part)[:1]]
    if not first or not first[0].exists():
        return None
    path = first[0]
    array, said = read_example(path)
    if said.rate is not None:
        return "signal-folder"
    bare = path.is_file() and suffix_of(path) in _ARRAYS  # whose axes nothing tells but their number
    colours = array.ndim == 3 and len(array) in (1, 3)
    if array.ndim == 4 or (array.ndim == 3 and not colours and not bare):
        return "volume-folder"
    if colours or (array.ndim == 2 and (masks or not bare)):
        by_class = not masks and not (folder / TABLE).is_file()
        coloured = array.ndim == 3 and path.is_file() and path.suffix.lower() in IMAGE_SUFFIXES
        return "image-folder" if by_class and coloured else "scan-folder"
    raise BadInput(
        f"{path} of shape {array.shape} may be an image, a volume or a signal; "
        "say which: --data scan-folder, volume-folder or signal-folder"
    )


def read_folder(
    folder: Path, kind: str, *, limit: int | None = None, size: int | None = None, white: float | None = None
) -> tuple[Examples, Examples, tuple[str, ...] | None]:
    """Read a folder of examples with classes, with a table of targets, or with masks.

    Args:
        folder: that is laid out in one of these ways.
        kind: of the examples.
        limit: at most so many examples of each split.
        size: the side to which central squares of images are resized.
        white: the value that becomes 1 in images; default: what the file says (a DICOM window, else its depth).

    Returns:
        The train and the test split; names of classes, or of the target columns if there are several; None: no names.
        Without files in ``test/`` a table's or masks' test split is one example in five.

    Raises:
        MissingData: a package that reads a format isn't installed.
        BadInput: the folder is laid out in no such way, or its files don't fit together; the message names one.
    """
    known = example_kind(kind)
    table, masks = folder / TABLE, folder / MASKS
    if table.exists() and masks.exists():
        raise BadInput(f"{folder} has {TABLE} and {MASKS}/; a data set has one sort of targets, so keep one of them")
    names: tuple[str, ...] | None = None
    if masks.exists():
        listed = _with_masks(folder)
    elif table.exists():
        listed, names = _by_table(table)
    else:
        listed, names = _by_class(folder)
    first: tuple[Path, Numbers, Said] | None = None
    splits = []
    for part in listed:
        cut = part if limit is None else part[_first(part, limit)]
        inputs, first = _inputs(cut.files, known, size, white, first)
        targets = cut.targets if isinstance(cut.targets, Tensor) else _masks(cut, inputs, size)
        splits.append(Examples(inputs, targets, cut.groups, cut.persons))
    return splits[0], splits[1], names


def _first(part: Listed, limit: int) -> Tensor:
    classes = isinstance(part.targets, Tensor) and not part.targets.is_floating_point()
    numbers = part.targets if classes else torch.zeros(len(part.files), dtype=torch.int64)
    assert isinstance(numbers, Tensor)
    return balanced(numbers, limit)


# --- which files, and their targets -----------------------------------------------------------------------------------


def _test_folder(folder: Path) -> Path | None:
    return next((folder / name for name in TEST if (folder / name).is_dir()), None)


def _examples_in(folder: Path) -> list[Path]:
    """Return what can be an example: files with a known suffix, and folders, which are DICOM series."""
    return sorted(p for p in folder.iterdir() if p.name[0] != "." and (p.is_dir() or suffix_of(p) is not None))


def _by_class(folder: Path) -> tuple[list[Listed], tuple[str, ...]]:
    train, test = folder / "train", _test_folder(folder)
    if not train.is_dir() or test is None:
        raise BadInput(f"{folder} needs {TABLE}, or the folders train and test with a folder for each class")
    return in_class_folders((train, test), _examples_in)


def in_class_folders(
    parts: Sequence[Path], examples: Callable[[Path], list[Path]]
) -> tuple[list[Listed], tuple[str, ...]]:
    """Return what lies in the class folders of each part, the train folder first, and the names of the classes.

    ``examples``: returns those in one class folder.
    """
    train = parts[0]
    names = sorted(path.name for path in train.iterdir() if path.is_dir())
    check_names(names, str(train))
    if len(names) < 2:
        raise BadInput(f"{train} has {len(names)} class folders; put one folder per class there, at least 2")
    listed = []
    for part in parts:
        files: list[Path] = []
        classes: list[int] = []
        for sub in sorted(path for path in part.iterdir() if path.is_dir()):
            if sub.name not in names:
                raise BadInput(f"{part} has the class folder '{sub.name}', that the train folder lacks; let them agree")
            found = examples(sub)
            files += found
            classes += [names.index(sub.name)] * len(found)
        listed.append(Listed(_some(files, part), torch.tensor(classes)))
    return listed, tuple(names)


def _with_masks(folder: Path) -> list[Listed]:
    train, test = folder / "train", _test_folder(folder)
    if not train.is_dir():
        raise BadInput(f"{folder} has {MASKS}/ but no folder train; put examples there, and their masks in masks/train")
    listed = []
    for part in (train, test):
        files = [] if part is None else _some(_examples_in(part), part)
        found = [folder / MASKS / path.relative_to(folder) for path in files]
        missing = [path for path in found if not path.exists()]
        if missing:
            raise BadInput(f"{missing[0]} is missing, one of {len(missing)} masks; give every example's its name")
        listed.append(Listed(files, list(found)))
    return listed if test else _parted(listed[0], f"{folder}")


def _by_table(table: Path) -> tuple[list[Listed], tuple[str, ...] | None]:
    header, *rows = read_csv(table) or [[]]
    names = [name.strip() for name in header]
    columns = [i for i, name in enumerate(names) if i and name not in (CLIENT, *PERSONS)]
    if len(about := [name for name in names[1:] if name in PERSONS]) > 1:
        raise BadInput(f"{table} has the columns {' and '.join(about)}, which say the same; keep one")
    near = [names[i] for i in columns if re.sub(r"[ _-]?id$", "", names[i].lower()) in PERSONS]
    if near:
        raise BadInput(
            f"{table}: does '{near[0]}' say of which person an example is? Call it {PERSONS[0]}, or leave it out"
        )
    if not rows or not columns or len(set(names)) != len(names):
        raise BadInput(f"{table}: give a line of different names (file, then targets), and a line for each file")
    check_names(names, str(table))
    for row in rows:
        if len(row) != len(names) or not all(cell.strip() for cell in row):
            raise BadInput(f"{table}: the line of '{row[0][:80]}' hasn't a value in each of {len(names)} columns")
    files = [_named(cell.strip(), table) for cell, *_ in rows]
    if len(set(files)) != len(files):
        raise BadInput(f"{table} names a file twice; a line for each file")
    targets, found = _targets([[row[i].strip() for row in rows] for i in columns], table)
    if found is None and len(columns) > 1:
        found = tuple(names[i] for i in columns)
    groups, persons = (
        _numbered([row[names.index(name)].strip() for row in rows]) if name in names[1:] else None
        for name in (CLIENT, about[0] if about else PERSONS[0])
    )
    whole = Listed([table.parent / file for file in files], targets, groups, persons)
    held_out = torch.tensor([file.parts[0] in TEST for file in files])
    if not bool(held_out.any()):
        return _parted(whole, str(table)), found
    if bool(held_out.all()):
        raise BadInput(f"{table} names files of the test split only; add those of train/")
    if persons is not None and bool((both := held_out & torch.isin(persons, persons[~held_out])).any()):
        at = int(both.nonzero()[0])
        who = f"the {about[0]} '{rows[at][names.index(about[0])].strip()[:80]}'"
        raise BadInput(f"{table}: {who} has files in {files[at].parts[0]}/ and in train/; keep a person in one")
    return [whole[torch.nonzero(rows)[:, 0]] for rows in (~held_out, held_out)], found


def _numbered(names: list[str]) -> Tensor:
    """Return (n,) a number for each name, from 0 in the order of the alphabet."""
    number = {name: i for i, name in enumerate(sorted(set(names)))}
    return torch.tensor([number[name] for name in names])


def _named(cell: str, table: Path) -> PurePosixPath:
    path = PurePosixPath(cell.replace("\\", "/"))
    if path.is_absolute() or ".." in path.parts or not path.parts or "\0" in cell:
        raise BadInput(f"{table} names '{cell[:80]}'; give paths of files in its folder, as train/a.dcm")
    return path


def _targets(columns: list[list[str]], table: Path) -> tuple[Tensor, tuple[str, ...] | None]:
    """Return int64 (n,) classes of one column of whole numbers or texts, with the texts; else float32 (n, k)."""
    missing = [text for column in columns for text in column if cell(text, str(table)) is None]
    if missing:
        raise BadInput(
            f"{table}: targets are missing in {len(missing)} cells, as '{missing[0]}'; leave these files out"
        )
    try:
        values = np.array([[float(text) for text in column] for column in columns]).T
    except ValueError:
        if len(columns) > 1:
            raise BadInput(f"{table}: of several targets every one is a number: 0 or 1, or a measurement") from None
        names = sorted(set(columns[0]))
        if len(names) > FEW and 2 * sum(number_in(text) is not None for text in columns[0]) > len(columns[0]):
            odd = next(text for text in columns[0] if not text.isdigit())
            raise BadInput(
                f"{table}: targets such as '{odd}' are no plain numbers; write numbers as 12.5, or words"
            ) from None
        check_names(names, str(table))
        return torch.tensor([names.index(cell) for cell in columns[0]]), tuple(names)
    if not np.isfinite(values).all():
        raise BadInput(f"{table} has targets that are infinite or no numbers; leave these files out")
    whole = all(text.lstrip("+-").isdigit() for text in columns[0])
    if len(columns) == 1 and (
        whole or np.isin(values, (0, 1)).all()
    ):  # 0.0 and 1.0 are classes, written with others missing
        classes = torch.from_numpy(values[:, 0].astype(np.int64))
        check_classes(classes, str(table), "write numbers as 12.0, and classes as words")
        return classes, None
    return torch.from_numpy(values.astype(np.float32)), None


def _parted(whole: Listed, where: str) -> list[Listed]:
    classes = isinstance(whole.targets, Tensor) and whole.targets.ndim == 1
    targets = whole.targets if classes else torch.zeros(len(whole.files), 1)
    held_out = hold_out(targets, where, whole.persons)  # type: ignore[arg-type]
    return [whole[torch.nonzero(rows)[:, 0]] for rows in (~held_out, held_out)]


def _some(files: list[Path], folder: Path) -> list[Path]:
    if not files:
        raise BadInput(f"{folder} has no files that are read; see docs/how-to/own-data.md for the formats")
    return files


# --- their arrays -----------------------------------------------------------------------------------------------------


def _inputs(
    files: Sequence[Path],
    kind: ExampleKind,
    size: int | None,
    white: float | None,
    first: tuple[Path, Numbers, Said] | None,
) -> tuple[Tensor, tuple[Path, Numbers, Said]]:
    """Return the examples in files (n, ...), and the first file with its array, with which all must agree."""
    inputs: Tensor | None = None
    low, high, deep = math.inf, -math.inf, False
    for i, path in enumerate(files):
        array, said = read_example(path)
        values = _as_kind(array, said, kind, path)
        if kind.resizable:
            deep = deep or (said.span is not None and said.window is None and white is None)
            values = _unit(values, said, white, path)
        example = torch.from_numpy(np.ascontiguousarray(values))
        if size is not None:
            example = central_square(example, size)
        low, high = min(low, float(example.min())), max(high, float(example.max()))
        if first is None:
            first = (path, example.numpy(), said)
        _check_alike(path, example, said, first)
        if inputs is None:
            if example.numel() * len(files) > MAX_BYTES:
                many = f"{len(files)} {kind.plural} of {tuple(example.shape)}"
                raise BadInput(f"{path.parent}: {many} don't fit into memory; give a limit on the examples")
            inputs = torch.empty((len(files), *example.shape))
        inputs[i] = example
    assert inputs is not None
    assert first is not None
    if deep and high - low < DARK:
        raise BadInput(
            f"{first[0].parent}: values use {high - low:.2g} of what the files could hold, so pictures would have no "
            "contrast; say which value is white (data.max_pixel_value), or give the files a window (WindowCenter, "
            "WindowWidth)"
        )
    return inputs, first


def _as_kind(array: Numbers, said: Said, kind: ExampleKind, path: Path) -> Numbers:
    """Return an array with the axes of the kind: one channel is added where there is none."""
    timed = "time" in kind.axes
    measured = path.is_dir() or suffix_of(path) not in _ARRAYS
    values = array[None] if array.ndim == len(kind.axes) - 1 else array
    if values.ndim != len(kind.axes) or not values.size or (measured and timed != (said.rate is not None)):
        raise BadInput(f"{path} holds {'a signal' if said.rate else 'an array'} of {array.shape}, not {kind.letters}")
    if not np.isfinite(values).all():
        raise BadInput(f"{path} has values that are missing or infinite; fill them first, or leave the file out")
    return values.astype(np.float32, copy=False)


def _unit(values: Numbers, said: Said, white: float | None, path: Path) -> Numbers:
    """Return an image's values in [0, 1]: from 0 to ``white``, in its window, or of what its file could hold."""
    if white is not None:
        if values.min() < 0 or values.max() > white:
            raise BadInput(f"{path}: values from {values.min():g} to {values.max():g}, not between 0 and {white:g}")
        return values / np.float32(white)
    ends = said.window or said.span
    if ends is None:
        return values
    scaled = (values.astype(np.float64) - ends[0]) / (ends[1] - ends[0])
    return np.clip(scaled, 0, 1).astype(np.float32)


def central_square(image: Tensor, size: int) -> Tensor:
    """Return the central square of an image (C, H, W), resized."""
    side = min(image.shape[-2:])
    top, left = (image.shape[-2] - side) // 2, (image.shape[-1] - side) // 2
    return resize(image[None, :, top : top + side, left : left + side], size)[0]


def _check_alike(path: Path, example: Tensor, said: Said, first: tuple[Path, Numbers, Said]) -> None:
    other, array, known = first
    if tuple(example.shape) != array.shape:
        raise BadInput(f"{path} is {tuple(example.shape)}, {other} {array.shape}; resample them, or give an image_size")
    if said.leads != known.leads or said.units != known.units:
        raise BadInput(f"{path} has the leads {', '.join(said.leads)[:100]}, in other order or units than {other} has")
    if said.rate != known.rate:
        raise BadInput(f"{path} has {said.rate} samples a second, {other} has {known.rate}; resample them first")


def _masks(listed: Listed, inputs: Tensor, size: int | None) -> Tensor:
    """Return int64 (n, H, W) or (n, D, H, W): each example's mask, of its shape without channels."""
    assert not isinstance(listed.targets, Tensor)
    wanted = tuple(inputs.shape[2:])
    masks = torch.empty((len(inputs), *wanted), dtype=torch.int64)
    for i, path in enumerate(listed.targets):
        array = read_example(path)[0]
        values = array[0] if array.ndim == len(wanted) + 1 and len(array) == 1 else array
        if not np.isfinite(values).all() or (values != np.floor(values)).any() or values.min(initial=0) < 0:
            raise BadInput(f"{path} isn't a mask: give whole numbers from 0, the number of each voxel's class")
        if values.ndim == 2 and size is not None:  # nearest: between two classes there is none
            side = min(values.shape)
            top, left = (values.shape[0] - side) // 2, (values.shape[1] - side) // 2
            rows = ((np.arange(size) + 0.5) * side / size).astype(np.int64)
            values = values[top : top + side, left : left + side][rows][:, rows]
        if values.shape != wanted:
            raise BadInput(f"{path} is a mask of {values.shape}, its example of {wanted}; give every voxel a class")
        masks[i] = torch.from_numpy(values.astype(np.int64))
    return masks


# --- data sets --------------------------------------------------------------------------------------------------------


def _reader(kind: str) -> Reader:
    def read(paths: list[Path], request: Request) -> Dataset:
        train, test, names = read_folder(
            paths[0].parent, kind, limit=request.limit, size=request.image_size, white=request.white
        )
        found = Dataset.from_tensors(
            train.inputs,
            train.targets,
            test=(test.inputs, test.targets),
            kind=kind,
            channels="first",
            name=request.name,
            summary=request.summary,
            class_names=names or None,
            source=f"your own {example_kind(kind).plural}",
        )
        if train.persons is not None and test.persons is not None:
            many = len(torch.cat([train.persons, test.persons]).unique())
            found = replace(
                found,
                summary=f"{found.summary}; of {many} persons, whose examples are shared out and held out together",
            )
        return replace(
            found,
            train=replace(found.train, groups=train.groups, persons=train.persons),
            test=replace(found.test, groups=test.groups, persons=test.persons),
        )

    return read


def _add(name: str, kind: str, formats: str) -> None:
    read = _reader(kind)
    add_dataset(
        name,
        f"your own {example_kind(kind).plural}: {formats}, in DATA_DIR/train/CLASS/, or with DATA_DIR/labels.csv",
        "put files into DATA_DIR/train/CLASS/ and DATA_DIR/test/CLASS/, or DATA_DIR/labels.csv beside them, and give "
        "that DATA_DIR",
        Layout(read, (TABLE,)),
        Layout(read, (MASKS,)),
        Layout(read, ("train", "|".join(TEST))),
        kind=kind,
        needs="files; NIfTI needs nibabel, DICOM pydicom",
    )


_add("scan-folder", "image", "DICOM, pictures, arrays (.npy)")
_add("volume-folder", "volume", "NIfTI, DICOM series, arrays (.npy)")
_add("signal-folder", "signal", "WFDB records, DICOM waveforms, arrays (.npy)")
