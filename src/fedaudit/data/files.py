"""Readers of file formats: parquet, npz, idx, csv and MATLAB's .mat, each within bounds. A damaged file is one line."""

from __future__ import annotations

import csv
import gzip
import io
import itertools
import math
import struct
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor

from fedaudit.utils.bounds import CSV, IDX, MAT, NPZ, PARQUET, TENSORS, check_file, opened, read_bytes, shown
from fedaudit.utils.errors import BadInput, FedAuditError, MissingData

Numbers = np.ndarray[Any, Any]

_COLUMNS = 200  # of a parquet file; Adult, which has the most, has 15
_AT_ONCE = 256  # rows of one
_CELLS = ("boolean", "integer", "floating", "string", "large_string", "binary", "large_binary", "null")
_NUMBERS = "biuf"  # numpy's letters for booleans, integers, floats


class TooMuch(ValueError):
    """What a file holds is more than its reader takes."""


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn whatever a format's reader raises on a damaged file into one line for the user (BadInput)."""
    try:
        yield
    except FedAuditError:
        raise
    except (TooMuch, MemoryError) as error:
        raise BadInput(f"cannot read {shown(path)}: {error or 'more than there is memory for'}") from error
    except Exception as error:  # of a damaged file formats' readers raise whatever comes
        why = " ".join(f"{type(error).__name__}: {error}"[:200].split()).removesuffix(":")
        raise BadInput(
            f"cannot read {shown(path)}: truncated, damaged or another format ({why}); get it again"
        ) from error


def within(count: float, most: int | None, what: str) -> None:
    """Raise TooMuch where there is more than the most that is read."""
    if most is not None and count > most:
        raise TooMuch(f"it holds {count:,} {what}, and {most:,} is the most that is read")


def read_parquet(path: Path, *columns: str) -> dict[str, list[Any]]:
    """Return columns (default: all) of a parquet file: numbers, texts, bytes, booleans.

    pyarrow reads them a few rows at a time, since few bytes can stand for many equal ones.
    """
    try:
        import pyarrow.parquet
        import pyarrow.types as kinds
    except ImportError as error:
        raise MissingData(f"reading {path} needs pyarrow; pip install 'PATH_OF_THE_CLONE[parquet]'") from error
    with reading(path):
        check_file(path, PARQUET)
        with pyarrow.parquet.ParquetFile(path) as file:
            within(file.metadata.num_rows, PARQUET.items, "rows")
            within(len(file.schema_arrow), _COLUMNS, "columns")
            known = list(map(str, file.schema_arrow.names))
            names = list(columns or known)
            absent = [name for name in names if name not in known]
            if absent:
                raise BadInput(f"{path} has no column {', '.join(absent)}, only {', '.join(known)[:200]}; get it again")
            for name in names:
                kind = file.schema_arrow.field(name).type
                kind = kind.value_type if kinds.is_dictionary(kind) else kind
                if not any(getattr(kinds, f"is_{cell}")(kind) for cell in _CELLS):
                    raise TypeError(f"column {name!r} is of {str(kind)[:80]}")
            found: dict[str, list[Any]] = {name: [] for name in names}
            size = 0
            for batch in file.iter_batches(_AT_ONCE, columns=names):
                size += batch.nbytes
                within(size, PARQUET.unpacked, "bytes")
                for name in names:
                    found[name] += _cells(batch.column(name))
            return found


def _cells(column: Any) -> list[Any]:
    """Return an arrow column as a list, in which equal cells of a dictionary are one object."""
    if not hasattr(column, "dictionary"):
        cells: list[Any] = column.to_pylist()
        return cells
    known = column.dictionary.to_pylist()
    return [None if place is None else known[place] for place in column.indices.to_pylist()]


def read_npz(path: Path, *names: str, maybe: str = "") -> list[Numbers]:
    """Return the named arrays of an .npz file, and that of ``maybe`` if it is there; no pickled object is read."""
    with reading(path), opened(path, NPZ) as stream, zipfile.ZipFile(stream) as archive:
        within(len(archive.filelist), NPZ.items, "arrays")
        known = [name.removesuffix(".npy") for name in archive.namelist()]
        absent = [name for name in names if name not in known]
        if absent:
            raise BadInput(f"{path} has no array {', '.join(absent)}, only {', '.join(known)[:200]}; get it again")
        found = []
        for name in (*names, *({maybe} & set(known))):
            with archive.open(f"{name}.npy") as member:
                try:
                    found.append(_read_npy(member))
                except TypeError as error:
                    raise BadInput(f"cannot read {shown(path)}: '{name}' is {error}; give numbers") from None
        return found


def read_array_file(path: Path) -> Numbers:
    """Return the array of an .npy file, or the only one of an .npz file; no pickled object is ever read."""
    with reading(path), opened(path, NPZ) as stream:
        if path.suffix.lower() != ".npz":
            return _read_npy(stream)
        with zipfile.ZipFile(stream) as archive:
            names = archive.namelist()[: NPZ.items]
            if len(names) != 1:
                raise BadInput(f"{path} holds {len(names)} arrays ({', '.join(names)[:200]}); one an example is read")
            with archive.open(names[0]) as member:
                return _read_npy(member)


def read_arrays(path: Path, *names: str, maybe: str = "") -> list[Tensor]:
    """Return the named arrays of an .npz or .safetensors file, as they are, with that of ``maybe`` if it is there."""
    if path.suffix.lower() != ".safetensors":
        return [torch.from_numpy(array.copy()) for array in read_npz(path, *names, maybe=maybe)]
    with reading(path):
        check_file(path, TENSORS)
        with safe_open(path, "pt") as file:
            known = list(file.keys())
            absent = [name for name in names if name not in known]
            if absent:
                raise BadInput(f"{path} has no tensor {', '.join(absent)}, only {', '.join(known)[:200]}; get it again")
            return [file.get_tensor(name) for name in (*names, *({maybe} & set(known)))]


def _read_npy(stream: IO[bytes]) -> Numbers:
    version = np.lib.format.read_magic(stream)
    header = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}[version]
    shape, fortran, dtype = header(stream)
    if dtype.kind not in _NUMBERS or dtype.hasobject:
        raise TypeError(f"an array of {str(dtype)[:40]}, not of numbers (allow_pickle=False)")
    if not all(type(side) is int and side >= 0 for side in shape):
        raise ValueError(f"an array of shape {shape}")
    size = math.prod(shape) * dtype.itemsize
    within(size, NPZ.unpacked, "bytes in one array")
    data = stream.read(size)
    if len(data) != size:
        raise EOFError(f"{len(data)} bytes for an array of {size}")
    return np.frombuffer(data, dtype).reshape(shape, order="F" if fortran else "C")


def whole_numbers(values: Numbers | list[Any], path: Path, what: str) -> Numbers:
    """Return labels as int64 (n,), numbers with a point where they are whole; errors name the file and ``what``."""
    if isinstance(values, list):
        kinds = {type(value) for value in values}
        array = np.array(values) if kinds <= {int} or kinds <= {float} else np.zeros(0, dtype=object)
    else:
        array = values.reshape(-1) if values.ndim == 2 and 1 in values.shape else values
    fits = array.dtype.kind in "iu"
    if array.dtype.kind == "f":
        fits = bool((np.abs(array) < 2**53).all()) and bool((array == np.floor(array)).all())
    if not fits or array.ndim != 1 or (array.dtype.kind == "u" and array.size and int(array.max()) >= 2**63):
        raise BadInput(f"{path}: {what} aren't whole numbers, one an example; get the file again")
    return array.astype(np.int64)


def read_idx(path: Path) -> Numbers:
    """Return the uint8 array of an idx file (as MNIST's), gzipped or not."""
    with reading(path), opened(path, IDX) as file, gzip.open(file) if path.suffix == ".gz" else file as stream:
        data = stream.read((IDX.unpacked or 0) + 1)
        within(len(data), IDX.unpacked, "bytes")
    if len(data) < 4 or data[:3] != b"\x00\x00\x08" or not 1 <= data[3] <= 4 or len(data) < 4 + 4 * data[3]:
        raise BadInput(f"{path} is not an idx file of bytes (it begins with {data[:4].hex()}); get it again")
    shape = struct.unpack(f">{data[3]}I", data[4 : 4 + 4 * data[3]])
    body = len(data) - 4 - 4 * len(shape)
    expected = math.prod(shape)
    if expected != body:
        raise BadInput(f"{path} is truncated or damaged: {body} bytes where {shape} needs {expected}; get it again")
    return np.frombuffer(data, dtype=np.uint8, offset=len(data) - body).reshape(shape)


def read_csv(path: Path, **options: Any) -> list[list[str]]:
    """Return the rows of a file of comma-separated values, without empty ones; options are :func:`csv.reader`'s."""
    with reading(path):
        rows = []
        for row in csv.reader(io.StringIO(read_bytes(path, CSV).decode("utf-8"), newline=""), **options):
            if row:
                rows.append(row)
                within(len(rows), CSV.items, "rows")
        return rows


def read_mat(path: Path, *names: str) -> list[Numbers]:
    """Return the named numeric arrays of a MATLAB file (level 5: versions 5 to 7.2).

    It is read by the published format, because scipy's reader crashes the whole process on damaged files.
    """
    with reading(path):
        data = read_bytes(path, MAT)
        if len(data) < 128 or data[124:128] != b"\x00\x01IM":
            raise ValueError("not a little-endian MATLAB level 5 file")
        arrays = dict(_mat_arrays(memoryview(data)[128:], names))
    absent = [name for name in names if name not in arrays]
    if absent:
        raise BadInput(f"{path} has no numeric array {', '.join(absent)}; get it again")
    return [arrays[name] for name in names]


# The codes of MATLAB's level 5 format for how numbers are stored, and for what an array is of.
_MAT_STORED = {1: "i1", 2: "u1", 3: "<i2", 4: "<u2", 5: "<i4", 6: "<u4", 7: "<f4", 9: "<f8", 12: "<i8", 13: "<u8"}
_MAT_CLASSES = {6: "f8", 7: "f4", 8: "i1", 9: "u1", 10: "i2", 11: "u2", 12: "i4", 13: "u4", 14: "i8", 15: "u8"}
_MAT_MATRIX, _MAT_COMPRESSED = 14, 15


def _mat_elements(data: memoryview) -> Iterator[tuple[int, memoryview]]:
    offset, count = 0, 0
    while offset < len(data):
        count += 1
        within(count, MAT.items, "elements")
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


def _mat_arrays(data: memoryview, names: tuple[str, ...], packed: bool = False) -> Iterator[tuple[str, Numbers]]:
    for kind, body in _mat_elements(data):
        if kind == _MAT_COMPRESSED:
            if packed:
                raise ValueError("a compressed element within a compressed one")
            yield from _mat_arrays(memoryview(_inflated(body)), names, packed=True)
        elif kind == _MAT_MATRIX:
            flags, shape, name, values = itertools.islice(_mat_elements(body), 4)
            of = _MAT_CLASSES.get(flags[1][0])
            title = bytes(name[1]).decode("ascii")
            if of is None or flags[1][1] & 0x08 or title not in names:  # text, structures, complex numbers: not read
                continue
            sides = tuple(np.frombuffer(shape[1], "<i4").tolist())
            if not sides or min(sides) < 0:
                raise ValueError(f"an array of shape {sides[:10]}")
            stored = np.frombuffer(values[1], _MAT_STORED[values[0]])
            within(math.prod(sides) * np.dtype(of).itemsize, MAT.unpacked, "bytes in one array")
            if stored.size != math.prod(sides):
                raise ValueError(f"{stored.size} numbers for an array of shape {sides[:10]}")
            yield title, stored.astype(of, copy=False).reshape(sides, order="F")


def _inflated(body: memoryview) -> bytes:
    packed = zlib.decompressobj()
    data = packed.decompress(body, (MAT.unpacked or 0) + 1)
    within(len(data), MAT.unpacked, "bytes")
    if not packed.eof:
        raise EOFError("a compressed element is cut short")
    return data
