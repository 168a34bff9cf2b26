"""Readers of file formats: parquet, npz, idx and MATLAB's .mat. A damaged file is one line."""

from __future__ import annotations

import gzip
import struct
import tokenize
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from fedaudit.utils.errors import BadInput, MissingData

Numbers = np.ndarray[Any, Any]

_MAX_PIXELS = 2**31  # bytes of one idx file; EMNIST, the largest there is, has 0.55e9


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn whatever a format's reader raises on a damaged file into one line for the user.

    Raises:
        BadInput: the file cannot be read.
    """
    damaged = (
        OSError,
        EOFError,
        ValueError,
        TypeError,
        LookupError,
        AttributeError,
        NotImplementedError,
        MemoryError,
        ImportError,
        SyntaxError,  # these two: numpy, of a mangled array header
        tokenize.TokenError,
        struct.error,
        zlib.error,
        zipfile.BadZipFile,
    )
    try:
        yield
    except damaged as error:
        why = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        raise BadInput(f"cannot read {path}: truncated, damaged or another format ({why}); get it again") from error


def read_parquet(path: Path, *columns: str) -> dict[str, list[Any]]:
    """Return the columns of a parquet file as Python lists; all columns where none is named.

    Raises:
        MissingData: pyarrow is not installed.
        BadInput: the file is damaged or lacks a column.
    """
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise MissingData(f"reading {path} needs pyarrow; pip install 'fedaudit[parquet]'") from error
    with reading(path):
        table = pyarrow.parquet.read_table(path)
        names = columns or tuple(table.column_names)
    absent = [name for name in names if name not in table.column_names]
    if absent:
        raise BadInput(f"{path} has no column {', '.join(absent)}, only {', '.join(table.column_names)}; get it again")
    with reading(path):
        return {name: table.column(name).to_pylist() for name in names}


def read_npz(path: Path, *names: str) -> list[Numbers]:
    """Return the named arrays of an .npz file; no pickled object is ever read.

    Raises:
        BadInput: the file is damaged, or lacks an array.
    """
    with reading(path), np.load(path, allow_pickle=False) as archive:
        absent = [name for name in names if name not in archive.files]
        if absent:
            raise BadInput(f"{path} has no array {', '.join(absent)}, only {', '.join(archive.files)}; get it again")
        return [archive[name] for name in names]


def read_idx(path: Path) -> Numbers:
    """Return the uint8 array of an idx file (as MNIST's), gzipped or not.

    Raises:
        BadInput: another format, or fewer bytes than its header announces.
    """
    with reading(path):
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    if len(data) < 4 or data[:3] != b"\x00\x00\x08" or not 1 <= data[3] <= 4 or len(data) < 4 + 4 * data[3]:
        raise BadInput(f"{path} is not an idx file of bytes (it begins with {data[:4].hex()}); get it again")
    shape = struct.unpack(f">{data[3]}I", data[4 : 4 + 4 * data[3]])
    body = len(data) - 4 - 4 * len(shape)
    expected = 1
    for side in shape:
        expected *= side
    if expected != body or expected > _MAX_PIXELS:
        raise BadInput(f"{path} is truncated or damaged: {body} bytes where {shape} needs {expected}; get it again")
    return np.frombuffer(data, dtype=np.uint8, offset=len(data) - body).reshape(shape)


def read_mat(path: Path, *names: str) -> list[Numbers]:
    """Return the named numeric arrays of a MATLAB file (level 5: versions 5 to 7.2).

    Read here by the published format, because scipy's reader crashes the whole process on damaged files.

    Raises:
        BadInput: the file is damaged, or lacks an array.
    """
    with reading(path):
        data = path.read_bytes()
        if len(data) < 128 or data[124:128] != b"\x00\x01IM":
            raise ValueError("not a little-endian MATLAB level 5 file")
        arrays = dict(_mat_arrays(memoryview(data)[128:]))
    absent = [name for name in names if name not in arrays]
    if absent:
        raise BadInput(f"{path} has no numeric array {', '.join(absent)}; get it again")
    return [arrays[name] for name in names]


# The codes of MATLAB's level 5 format for how numbers are stored, and for what an array is of.
_MAT_STORED = {1: "i1", 2: "u1", 3: "<i2", 4: "<u2", 5: "<i4", 6: "<u4", 7: "<f4", 9: "<f8", 12: "<i8", 13: "<u8"}
_MAT_CLASSES = {6: "f8", 7: "f4", 8: "i1", 9: "u1", 10: "i2", 11: "u2", 12: "i4", 13: "u4", 14: "i8", 15: "u8"}
_MAT_MATRIX, _MAT_COMPRESSED = 14, 15


def _mat_elements(data: memoryview) -> Iterator[tuple[int, memoryview]]:
    offset = 0
    while offset < len(data):
        kind, size = struct.unpack_from("<II", data, offset)
        if kind >> 16:  # a small element: its size and up to four bytes lie within the tag
            kind, size, start, step = kind & 0xFFFF, kind >> 16, offset + 4, 8
        else:
            start = offset + 8
            step = 8 + (size if kind == _MAT_COMPRESSED else -(-size // 8) * 8)
        if start + size > len(data):
            raise ValueError(f"an element of {size} bytes is cut short")
        yield kind, data[start : start + size]
        offset += step


def _mat_arrays(data: memoryview) -> Iterator[tuple[str, Numbers]]:
    for kind, body in _mat_elements(data):
        if kind == _MAT_COMPRESSED:
            yield from _mat_arrays(memoryview(zlib.decompress(body)))
        elif kind == _MAT_MATRIX:
            flags, shape, name, values = list(_mat_elements(body))[:4]
            of = _MAT_CLASSES.get(flags[1][0])
            if of is None or flags[1][1] & 0x08:  # text, structures, complex numbers: nothing that we read
                continue
            sides = tuple(np.frombuffer(shape[1], "<i4").tolist())
            if min(sides) < 0:
                raise ValueError(f"an array of shape {sides}")
            stored = np.frombuffer(values[1], _MAT_STORED[values[0]])
            yield bytes(name[1]).decode("ascii"), stored.astype(of).reshape(sides, order="F")
