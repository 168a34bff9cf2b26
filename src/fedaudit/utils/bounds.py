"""What readers of foreign bytes take at most, in one table (docs/reference/file-formats.md); files are opened here."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from fedaudit.utils.errors import BadInput

MB, GB = 2**20, 2**30


@dataclass(frozen=True)
class Bounds:
    """What a reader takes at most, checked before memory is taken for it; None: that bound isn't needed.

    ``file`` and ``unpacked`` are bytes, ``items`` are counted in ``of``, and ``depth`` is of nesting.
    """

    what: str
    file: int
    unpacked: int | None = None
    items: int | None = None
    of: str = ""
    depth: int | None = None


YAML = Bounds("scenarios, studies, policies, --set: YAML", 10**6, items=20_000, of="values", depth=50)
JSON = Bounds("results, the index of a transcript, vocabularies: JSON", 48 * MB, depth=200)
SITE = Bounds("what a site's guard wrote down: JSON lines", 48 * MB, depth=200)
PICKLE = Bounds("CIFAR's batches: pickle", 512 * MB, items=10**6, of="instructions")
IDX = Bounds("MNIST, Fashion-MNIST, EMNIST: idx, also gzipped", 256 * MB, unpacked=256 * MB, items=4, of="axes")
NPZ = Bounds("data sets: npz, each array", 512 * MB, unpacked=256 * MB, items=100, of="arrays")
MAT = Bounds("SVHN: MATLAB's .mat", 256 * MB, unpacked=256 * MB, items=1000, of="elements", depth=2)
PARQUET = Bounds("data sets: parquet", 512 * MB, unpacked=512 * MB, items=10**6, of="rows")
CSV = Bounds("data sets: comma-separated values", 32 * MB, items=10**6, of="rows")
PICTURE = Bounds("one picture: PNG, JPEG, BMP, PPM, TIFF, WebP", 256 * MB, items=2**26, of="pixels")
NIFTI = Bounds("volumes: NIfTI, also gzipped", 512 * MB, unpacked=512 * MB, items=2**27, of="voxels")
DICOM = Bounds("scans: DICOM, each file, and a series in all", 512 * MB, items=2**27, of="pixels")
WFDB = Bounds("signals: WFDB, header and signal files", 256 * MB, items=256, of="leads")
TENSORS = Bounds("checkpoints, generators, transcripts, findings, own arrays: safetensors", 8 * GB, unpacked=8 * GB)
TORCH = Bounds("checkpoints and kept simulations: .pt, .simulation", 8 * GB, unpacked=8 * GB, items=3 * 10**6,
               of="instructions", depth=100)  # fmt: skip
PROGRAM = 64 * MB  # bytes of the pickle within one of these
BOOSTER = Bounds("boosted trees: xgboost's JSON, each message", 32 * MB, items=10**6, of="nodes", depth=200)
STORE = Bounds("a study's store: SQLite", 4 * GB, items=100_000, of="rows")
GRID = Bounds("a study's grid, each scale", YAML.file, items=20_000, of="trials")

# In the order of docs/reference/file-formats.md.
TABLE = (
    *(YAML, GRID, JSON, SITE, PICKLE, IDX, NPZ, MAT, PARQUET, CSV),
    *(PICTURE, NIFTI, DICOM, WFDB, TENSORS, TORCH, BOOSTER, STORE),
)

SLOWEST = 10  # seconds of CPU in which a file within its bounds is read or refused; larger tensors take their time
NUMBER = 100  # characters of a number in YAML
PATH = 4096  # characters of a path


@contextmanager
def opened(path: Path, bounds: Bounds) -> Iterator[IO[bytes]]:
    """Open a file to read its bytes, without waiting; BadInput: it is a pipe, a device, a folder, or too large."""
    try:
        handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    except ValueError as error:  # NUL, or half of a character
        raise BadInput(f"{shown(path)!a} can't be the name of a file ({error})") from None
    try:
        found = os.fstat(handle)
        if stat.S_ISDIR(found.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if not stat.S_ISREG(found.st_mode):
            raise BadInput(f"'{shown(path)}' is a pipe or a device, not a file; write what it holds to a file")
        if found.st_size > bounds.file:
            raise BadInput(
                f"'{shown(path)}' is larger than {bounds.file:,} bytes, the most that is read of {bounds.what}"
            )
        with os.fdopen(handle, "rb", closefd=False) as file:
            yield file
    finally:
        os.close(handle)


def check_file(path: Path, bounds: Bounds) -> None:
    """Refuse what :func:`opened` refuses, where a library opens the file itself.

    Raises:
        BadInput: it is refused.
        OSError: it can't be opened.
    """
    with opened(path, bounds):
        pass


def read_bytes(path: Path, bounds: Bounds) -> bytes:
    """Return a file's bytes.

    Raises:
        BadInput: it is no ordinary file, or larger than ``bounds`` allow.
        OSError: it can't be opened.
    """
    with opened(path, bounds) as file:
        return file.read(bounds.file + 1)[: bounds.file]


def read_json(path: Path) -> Any:
    """Return what a JSON file says, see :func:`opened`; ValueError where it isn't JSON, or nested too deeply."""
    from pydantic_core import from_json  # not above: commands that need no pydantic shall be quick

    return from_json(read_bytes(path, JSON))  # which goes no deeper than JSON.depth


def shown(path: Path | str) -> str:
    """Return a path as messages show it: the end of one that is very long."""
    text = str(path)
    return text if len(text) <= 300 else f"…{text[-300:]}"
