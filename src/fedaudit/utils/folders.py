"""Folders for results: whether they can be written is found out before hours of work."""

from __future__ import annotations

from pathlib import Path

from fedaudit.utils.errors import BadInput


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
        raise BadInput(f"can't write to '{out}': {error.strerror or error}") from None
