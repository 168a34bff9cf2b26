"""PyTorch's own files, without code: a pickle within is looked through before torch reads it."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch

from fedaudit.utils.bounds import PROGRAM, TORCH, opened
from fedaudit.utils.errors import BadInput
from fedaudit.utils.pickles import check_program

_LEGACY = 5  # pickles that a file of torch before 1.6 begins with


def read_torch_file(path: Path, whole: bool = False) -> Any:
    """Return what ``torch.save`` wrote to ``path``: tensors and plain values, on the CPU (``weights_only=True``).

    Args:
        path: of the file.
        whole: it is a kept simulation, perhaps of many rounds: see whether every byte is the one that was written,
            which torch doesn't.

    Raises:
        OSError: it can't be read.
        UnpicklingError: it holds something else, or is made to exhaust the process's stack or memory.
        ValueError: it is damaged.
        BadInput: it is no file, or too large.
    """
    try:
        _look_through(path, whole)
        return torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, UnpicklingError, BadInput):
        raise
    except Exception as error:  # of a damaged file torch, zipfile and pickletools raise whatever comes
        raise ValueError((str(error).splitlines() or [""])[0] or type(error).__name__) from error


def _look_through(path: Path, whole: bool) -> None:
    """Raise where tuples are nested so deeply that the hash of one, as a key, would end the process.

    Also where the file is packed (torch's own never is): a few bytes could stand for gigabytes.
    """
    with opened(path, TORCH) as file:
        if not zipfile.is_zipfile(file):
            file.seek(0)
            head = io.BytesIO(file.read(PROGRAM))
            for _ in range(_LEGACY):
                check_program(head, TORCH.items)
            return
        with zipfile.ZipFile(file) as archive:
            for entry in archive.infolist():
                if entry.compress_type != zipfile.ZIP_STORED or entry.file_size != entry.compress_size:
                    raise UnpicklingError("a part of it is packed")
                if entry.filename.endswith(".pkl"):
                    if entry.file_size > PROGRAM:
                        raise UnpicklingError(f"a pickle of more than {PROGRAM:,} bytes")
                    check_program(io.BytesIO(archive.read(entry)), None if whole else TORCH.items)
            if whole and (damaged := archive.testzip()):
                raise ValueError(f"'{damaged}' in it isn't what was written")
