"""Folders for results: whether they can be written is found out before hours of work."""

from __future__ import annotations

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
        probe = out / ".write-test"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise BadInput(f"can't write to '{shown(out)}': {error.strerror or error}") from None
