"""Folders for results: whether they can be written is found out before hours of work; and temporary ones."""

from __future__ import annotations

import glob
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from fedaudit.utils.bounds import shown
from fedaudit.utils.errors import BadInput


def inside(folder: Path, name: str) -> Path:
    """Return the path of the file ``name`` in ``folder``; links are followed.

    Raises:
        BadInput: it lies elsewhere.
    """
    try:
        if (folder / name).resolve().is_relative_to(folder.resolve()):
            return folder / name
    except (OSError, RuntimeError, ValueError):  # a loop of links, a name that no disk takes
        pass
    raise BadInput(f"{name[:200]!r} lies outside {folder}; make it a file within, or take another folder")


def check_folder(out: Path) -> None:
    """Make the folder, if it isn't there, and see whether something can be written to it.

    Raises:
        BadInput: it can't.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):  # without a name, where the system can: a kill leaves nothing
            pass
    except OSError as error:
        raise BadInput(f"can't write to '{shown(out)}': {error.strerror or error}") from None


@contextmanager
def temporary_folder(parent: Path | None = None, prefix: str = "fedaudit-temporary-") -> Iterator[Path]:
    """Make a folder that is gone when the block ends; what a killed process left of that name is removed, too.

    Each is locked by its process as long as that lives: the system lets go of the lock, whatever ended the process.

    Args:
        parent: where; None: where the system has such folders.
        prefix: of the name; this user's folders in ``parent`` whose names begin so must all be made here.

    Raises:
        OSError: it can't be made.
    """
    base = Path(tempfile.gettempdir()) if parent is None else parent
    if sys.platform == "win32":  # no such locks
        with tempfile.TemporaryDirectory(dir=base, prefix=prefix) as name:
            yield Path(name)
        return
    for left in base.glob(f"{glob.escape(prefix)}*"):
        lock = _locked(left)
        if lock is not None:
            shutil.rmtree(left, ignore_errors=True)
            os.close(lock)
    folder = Path(tempfile.mkdtemp(dir=base, prefix=prefix))
    while (lock := _locked(folder, wait=True)) is None and not folder.exists():  # another process was quicker
        folder = Path(tempfile.mkdtemp(dir=base, prefix=prefix))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if lock is not None:
            os.close(lock)


def _locked(folder: Path, *, wait: bool = False) -> int | None:
    """Return the handle that holds the lock of ``folder``; None: another's, gone, or locks don't work there."""
    import fcntl

    try:
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return None
    with suppress(OSError):
        fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        there, ours = folder.stat(), os.fstat(handle)  # still that folder, and this user's
        if (there.st_dev, there.st_ino, ours.st_uid) == (ours.st_dev, ours.st_ino, os.geteuid()):
            return handle
    os.close(handle)
    return None
