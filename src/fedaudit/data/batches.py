"""CIFAR's python batches: a pickle is a program, and here it can only build numbers, texts and lists of them."""

from __future__ import annotations

import io
import math
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from fedaudit.data.files import Numbers, reading
from fedaudit.utils.bounds import PICKLE, read_bytes
from fedaudit.utils.pickles import check_program

_MAX_AXES = 8
_SIZES = {"b": (1,), "i": (1, 2, 4, 8), "u": (1, 2, 4, 8), "f": (2, 4, 8)}  # bytes of the numbers of each kind
_ADMITTED = (
    *("PROTO", "FRAME", "STOP", "MARK", "NONE", "NEWTRUE", "NEWFALSE"),
    *("BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT"),
    *("SHORT_BINSTRING", "BINSTRING", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"),
    *("SHORT_BINBYTES", "BINBYTES", "BINBYTES8"),
    *("EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3"),
    *("EMPTY_LIST", "APPEND", "APPENDS", "EMPTY_DICT", "SETITEM", "SETITEMS"),
    *("BINPUT", "LONG_BINPUT", "MEMOIZE", "BINGET", "LONG_BINGET"),
    *("GLOBAL", "STACK_GLOBAL", "REDUCE", "BUILD"),
)
_NDARRAY = object()  # where a program names numpy's class


@dataclass(eq=False)
class _Kind:
    """A dtype; its state, which tells the byte order, comes later."""

    dtype: np.dtype[Any]


@dataclass(eq=False)
class _Array:
    """An array; its state, which is all of it, comes later."""

    values: Numbers | None = None


def read_pickled_batch(path: Path) -> dict[str, Any]:
    """Return the dictionary in one of CIFAR's python batches, without running anything that the pickle asks for.

    The files (protocol 2, by Python 2) hold one dictionary of texts, numbers, lists of these, and an array of uint8
    that ``numpy.core.multiarray._reconstruct`` and ``numpy.dtype`` rebuild. Only instructions that such dictionaries
    need are carried out, arrays of booleans, integers and floats of whole size are made from the file's own bytes, and
    whatever else a file says is refused. Nothing is imported, and nothing called that isn't in this module.
    """
    with reading(path):
        data = read_bytes(path, PICKLE)
        check_program(data, PICKLE.items, _ADMITTED)
        content = _Reader(data).load()
        if not isinstance(content, dict):
            raise ValueError(f"holds a {type(content).__name__}, not a dictionary")
        return {_text(key): _value(_text(key), value) for key, value in content.items()}


class _Reader(pickle._Unpickler):
    """Runs a pickle's instructions, as far as they build a batch."""

    stack: list[Any]
    dispatch: ClassVar[dict[int, Callable[..., None]]] = {
        code[0]: pickle._Unpickler.dispatch[code[0]] for code in (getattr(pickle, name) for name in _ADMITTED)
    }

    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data), encoding="latin1")
        self._left = len(data)

    def find_class(self, module: str, name: str) -> Any:
        """Return what stands for one of the names that rebuild numpy's arrays."""
        match module, name:
            case "numpy.core.multiarray" | "numpy._core.multiarray", "_reconstruct":
                return _reconstruct
            case "numpy", "ndarray":
                return _NDARRAY
            case "numpy", "dtype":
                return _dtype
            case "_codecs", "encode":
                return self._encode
        raise ValueError(f"it asks for {f'{module}.{name}'[:80]!r}, which is refused")

    def _build(self) -> None:
        state = self.stack.pop()
        match self.stack[-1], state:
            case _Kind() as kind, (3, str() | bytes() as order, None, None, None, -1, -1, 0):
                if _text(order) not in ("|", "<", ">", "="):
                    raise ValueError("a byte order that is refused")
                kind.dtype = kind.dtype.newbyteorder(_text(order))  # type: ignore[arg-type]
            case _Array(values=None) as array, (1, tuple() as shape, _Kind() as kind, 0 | 1 as fortran, raw):
                array.values = self._array(shape, kind.dtype, "F" if fortran else "C", raw)
            case _:
                raise ValueError("a state that is refused: only plain arrays of numbers are rebuilt")

    dispatch[pickle.BUILD[0]] = _build

    def _array(self, shape: tuple[Any, ...], dtype: np.dtype[Any], order: Any, raw: Any) -> Numbers:
        if len(shape) > _MAX_AXES or not all(type(side) is int and side >= 0 for side in shape):
            raise ValueError("an array of a shape that is refused")
        held = raw if isinstance(raw, bytes) else self._encode(raw)
        if len(held) != dtype.itemsize * math.prod(shape):
            raise ValueError(f"{len(held)} bytes for an array of shape {shape}")
        return np.frombuffer(held, dtype).reshape(shape, order=order)

    def _encode(self, text: str, encoding: str = "latin1") -> bytes:
        """Return an array's bytes, which were written as text; all of them together aren't more than the file has."""
        if not isinstance(text, str) or encoding != "latin1":
            raise ValueError("a call that is refused: only texts in Latin-1 are an array's bytes")
        self._left -= len(text)
        if self._left < 0:
            raise ValueError("more bytes of arrays than the file has")
        return text.encode("latin1")


def _reconstruct(*given: Any) -> _Array:
    if given not in ((_NDARRAY, (0,), "b"), (_NDARRAY, (0,), b"b")):
        raise ValueError("a call that is refused: only plain arrays are rebuilt")
    return _Array()


def _dtype(code: str | bytes, align: Any = None, copy: Any = None) -> _Kind:
    kind, size = _text(code)[:1], _text(code)[1:]
    if (align, copy) != (0, 1) or size not in map(str, _SIZES.get(kind, ())):
        raise ValueError("a dtype that is refused: only booleans, integers and floats are read")
    return _Kind(np.dtype(f"{kind}{size}"))


def _value(key: str, value: Any) -> Any:
    if isinstance(value, _Array) and value.values is not None:
        return value.values
    if all(isinstance(one, int | float | str | bytes) for one in (value if isinstance(value, list) else [value])):
        return value
    raise ValueError(f"{key!r} is no array, number or text, nor a list of these")


def _text(value: Any) -> str:
    if not isinstance(value, str | bytes) or len(value) > 255:
        raise ValueError(f"a {type(value).__name__} stands where a short text must")
    text = value.decode("latin1") if isinstance(value, bytes) else value
    if not text.isprintable():
        raise ValueError(f"a text that can't be shown: {ascii(text)[:40]}")
    return text
