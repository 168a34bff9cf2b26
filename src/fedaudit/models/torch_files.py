"""PyTorch's own files, without code: a pickle within is looked through before torch reads it."""

from __future__ import annotations

import io
import pickletools
import zipfile
from pathlib import Path
from pickle import UnpicklingError
from typing import IO, Any

import torch

_DEEPEST = 100  # tuples in tuples; a state has 3
_LEGACY = 5  # pickles that a file of torch before 1.6 begins with
_MARK = -1


def read_torch_file(path: Path) -> Any:
    """Return what ``torch.save`` wrote to ``path``: tensors and plain values, on the CPU (``weights_only=True``).

    Raises:
        OSError: it can't be read.
        UnpicklingError: it holds something else, or is made to exhaust the process's stack.
        ValueError: it is damaged.
    """
    try:
        _look_through(path)
        return torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, UnpicklingError):
        raise
    except Exception as error:  # of a damaged file torch, zipfile and pickletools raise whatever comes
        raise ValueError((str(error).splitlines() or [""])[0] or type(error).__name__) from error


def _look_through(path: Path) -> None:
    """Raise where tuples are nested so deeply that the hash of one, as a key, would end the process."""
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            for name in archive.namelist():
                if name.endswith(".pkl"):
                    _check_depth(io.BytesIO(archive.read(name)))
        return
    with path.open("rb") as file:
        for _ in range(_LEGACY):
            _check_depth(file)


def _check_depth(program: IO[bytes]) -> None:
    stack: list[int] = []  # of every value, how deeply tuples are nested in it
    memo: dict[Any, int] = {}
    for code, argument, _ in pickletools.genops(program):
        if code.name in ("PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"):
            memo[len(memo) if argument is None else argument] = stack[-1]
            continue
        if code.name in ("GET", "BINGET", "LONG_BINGET"):
            stack.append(memo[argument])
            continue
        taken = 0
        before = code.stack_before
        if pickletools.markobject in before:
            while (depth := stack.pop()) != _MARK:
                taken = max(taken, depth)
            before = before[: before.index(pickletools.markobject)]
        taken = max([taken, *(stack.pop() for _ in before)])
        depth = taken + 1 if code.name.startswith("TUPLE") else taken if code.name == "DUP" else 0
        if depth > _DEEPEST:
            raise UnpicklingError(f"tuples nested more than {_DEEPEST} deep")
        stack += [_MARK] if code.name == "MARK" else [depth] * len(code.stack_after)
