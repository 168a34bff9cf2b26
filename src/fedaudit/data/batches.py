"""CIFAR's python batches, read by a machine of our own: a pickle is a program, and this one can only build numbers."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np

from fedaudit.data.files import Numbers, reading
from fedaudit.utils.bounds import PICKLE, read_bytes

_MAX_STEPS = PICKLE.items or 0  # of its program; CIFAR-100's train, the largest there is, takes 0.25e6
_MAX_AXES = 8
_SIZES = {"b": (1,), "i": (1, 2, 4, 8), "u": (1, 2, 4, 8), "f": (2, 4, 8)}  # bytes of the numbers of each kind


class _Global(Enum):
    """What a program may name: the five that rebuild numpy's arrays, here nothing but words."""

    RECONSTRUCT = "_reconstruct"
    NDARRAY = "ndarray"
    DTYPE = "dtype"
    ENCODE = "encode"


_ADMITTED = {
    ("numpy.core.multiarray", "_reconstruct"): _Global.RECONSTRUCT,
    ("numpy._core.multiarray", "_reconstruct"): _Global.RECONSTRUCT,
    ("numpy", "ndarray"): _Global.NDARRAY,
    ("numpy", "dtype"): _Global.DTYPE,
    ("_codecs", "encode"): _Global.ENCODE,
}


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
    that ``numpy.core.multiarray._reconstruct`` and ``numpy.dtype`` rebuild. The machine here takes the instructions of
    protocols 2 to 4 that such dictionaries need, makes arrays of booleans, integers and floats of whole size from the
    file's own bytes, and refuses whatever else a file says. Nothing is imported or called.

    Raises:
        BadInput: damaged, not such a dictionary, too large, or it asks for anything else.
    """
    with reading(path):
        content = _Machine(read_bytes(path, PICKLE)).run()
        if not isinstance(content, dict):
            raise ValueError(f"holds a {type(content).__name__}, not a dictionary")
        return {key: _value(key, value) for key, value in content.items()}


def _value(key: str, value: Any) -> Any:
    if isinstance(value, _Array) and value.values is not None:
        return value.values
    if all(isinstance(one, int | float | str | bytes) for one in (value if isinstance(value, list) else [value])):
        return value
    raise ValueError(f"{key[:40]!r} is no array, number or text, nor a list of these")


class _Machine:
    """Runs a pickle's instructions, as far as they build a batch.

    Raises:
        ValueError, LookupError, EOFError, TypeError, struct.error: it isn't such a program, or cut short.
    """

    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}
        self.encoded = 0

    def run(self) -> Any:
        """Return what the program leaves when it stops."""
        for _ in range(_MAX_STEPS):
            code = self.take(1)
            if code == b".":
                return self.stack.pop()
            self.step(code)
        raise ValueError(f"a program of more than {_MAX_STEPS} steps")

    def take(self, count: int) -> bytes:
        if not 0 <= count <= len(self.data) - self.at:
            raise EOFError(f"{count} bytes are announced, {len(self.data) - self.at} are left")
        self.at += count
        return self.data[self.at - count : self.at]

    def number(self, form: str) -> Any:
        return struct.unpack(form, self.take(struct.calcsize(form)))[0]

    def line(self) -> str:
        return self.take(self.data.index(b"\n", self.at) + 1 - self.at)[:-1].decode("latin1")

    def since_mark(self) -> list[Any]:
        start = self.marks.pop()
        taken = self.stack[start:]
        del self.stack[start:]
        return taken

    def step(self, code: bytes) -> None:
        stack = self.stack
        match code:
            case b"\x80":  # protocol
                if self.number("<B") not in (2, 3, 4):
                    raise ValueError("a protocol that is refused: only 2 to 4 are read")
            case b"\x95":  # a frame's length, which only a reader of streams needs
                self.number("<Q")
            case b"N" | b"\x88" | b"\x89":
                stack.append({b"N": None, b"\x88": True, b"\x89": False}[code])
            case b"K" | b"M" | b"J" | b"G":
                stack.append(self.number({b"K": "<B", b"M": "<H", b"J": "<i", b"G": ">d"}[code]))
            case b"\x8a":  # a longer integer
                size = self.number("<B")
                if size > 8:
                    raise ValueError(f"an integer of {size} bytes is refused")
                stack.append(int.from_bytes(self.take(size), "little", signed=True))
            case b"U":  # Python 2's short strings are texts; its long ones are an array's bytes
                stack.append(self.take(self.number("<B")).decode("latin1"))
            case b"X" | b"\x8c" | b"\x8d":
                stack.append(self.take(self.number({b"X": "<I", b"\x8c": "<B", b"\x8d": "<Q"}[code])).decode())
            case b"T" | b"C" | b"B" | b"\x8e":
                stack.append(self.take(self.number({b"T": "<i", b"C": "<B", b"B": "<I", b"\x8e": "<Q"}[code])))
            case b"(":
                self.marks.append(len(stack))
            case b")" | b"]" | b"}":
                stack.append({b")": tuple, b"]": list, b"}": dict}[code]())
            case b"t":
                stack.append(tuple(self.since_mark()))
            case b"\x85" | b"\x86" | b"\x87":
                count = code[0] - 0x84
                stack.append(tuple(reversed([stack.pop() for _ in range(count)])))
            case b"a" | b"e":
                items = [stack.pop()] if code == b"a" else self.since_mark()
                _made(list, stack[-1]).extend(items)
            case b"s" | b"u":
                items = [stack.pop(), stack.pop()][::-1] if code == b"s" else self.since_mark()
                keys = [_text(key) for key in items[::2]]  # never a tuple: the hash of a deep one ends the process
                _made(dict, stack[-1]).update(zip(keys, items[1::2], strict=True))
            case b"q" | b"r":
                self.memo[self.number("<B" if code == b"q" else "<I")] = stack[-1]
            case b"\x94":
                self.memo[len(self.memo)] = stack[-1]
            case b"h" | b"j":
                stack.append(self.memo[self.number("<B" if code == b"h" else "<I")])
            case b"c":
                stack.append(_admitted(self.line(), self.line()))
            case b"\x93":
                name, module = stack.pop(), stack.pop()
                stack.append(_admitted(_text(module), _text(name)))
            case b"R":
                arguments = stack.pop()
                stack.append(self.call(stack.pop(), _made(tuple, arguments)))
            case b"b":
                state = stack.pop()
                self.build(stack[-1], _made(tuple, state))
            case _:
                raise ValueError(f"the instruction {code!r} is refused")

    def call(self, what: Any, given: tuple[Any, ...]) -> Any:
        match what, given:
            case _Global.RECONSTRUCT, (_Global.NDARRAY, (0,), "b" | b"b"):
                return _Array()
            case _Global.DTYPE, (str() | bytes() as code, 0, 1):
                kind, size = _text(code)[:1], _text(code)[1:]
                if size not in map(str, _SIZES.get(kind, ())):
                    raise ValueError("a dtype that is refused: only booleans, integers and floats are read")
                return _Kind(np.dtype(f"{kind}{size}"))
            case _Global.ENCODE, (str() as text, "latin1"):
                return self.encode(text)
        raise ValueError("a call that is refused: only plain arrays are rebuilt")

    def build(self, what: Any, state: tuple[Any, ...]) -> None:
        match what, state:
            case _Kind(), (3, str() | bytes() as order, None, None, None, -1, -1, 0) if _text(order) in tuple("|<>="):
                what.dtype = what.dtype.newbyteorder(_text(order))  # type: ignore[arg-type]
                return
            case _Array(values=None), (1, tuple() as shape, _Kind() as kind, 0 | 1 as fortran, str() | bytes() as raw):
                if len(shape) > _MAX_AXES or not all(type(side) is int and side >= 0 for side in shape):
                    raise ValueError("an array of a shape that is refused")
                held = self.encode(raw) if isinstance(raw, str) else raw
                if len(held) != kind.dtype.itemsize * math.prod(shape):
                    raise ValueError(f"{len(held)} bytes for an array of shape {shape}")
                what.values = np.frombuffer(held, kind.dtype).reshape(shape, order="F" if fortran else "C")
                return
        raise ValueError("a state that is refused: only plain arrays of numbers are rebuilt")

    def encode(self, text: str) -> bytes:
        """Return an array's bytes, which were written as text; all of them together aren't more than the file has."""
        self.encoded += len(text)
        if self.encoded > len(self.data):
            raise ValueError("more bytes of arrays than the file has")
        return text.encode("latin1")


def _admitted(module: str, name: str) -> _Global:
    try:
        return _ADMITTED[module, name]
    except KeyError:
        raise ValueError(f"it asks for {f'{module}.{name}'[:80]!r}, which is refused") from None


def _made(kind: type[Any], value: Any) -> Any:
    if type(value) is not kind:
        raise ValueError(f"a {type(value).__name__} stands where a {kind.__name__} must")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str | bytes) or len(value) > 255:
        raise ValueError(f"a {type(value).__name__} stands where a short text must")
    return value.decode("latin1") if isinstance(value, bytes) else value
