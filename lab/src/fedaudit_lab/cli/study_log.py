"""What ``fedaudit study log`` does: read the store, and nothing that takes long to import."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

from fedaudit import BadInput
from fedaudit_lab.studies.store import FILE, Row, Store


def log(folder: Path, trial: str | None) -> None:
    """Print all trials' states, or everything about one."""
    store = open_study(folder)
    try:
        rows = store.rows(outcomes=False)
    finally:
        store.close()
    say_note(store)
    if trial is None:
        _print_all(rows)
        return
    found = [row for row in rows if row.key.startswith(trial)]
    if len(found) != 1:
        raise BadInput(
            f"{len(found)} trials of '{folder}' begin with '{trial}'; fedaudit study log {folder} lists them"
        )
    (row,) = found
    print(_plain(f"{row.key}  {row.label}: {row.status}, {row.attempts} attempts"))
    for file in sorted((folder / "trials" / row.key).rglob("*")):
        if file.is_file():
            print(_plain(f"  {file}"))
            if file.name in {"error.txt", "scenario.yaml"}:
                print("\n".join(map(_plain, file.read_text(encoding="utf-8").splitlines())))


def open_study(folder: Path) -> Store:
    """Return the store of a study that was planned."""
    if not (folder / FILE).is_file():
        raise BadInput(f"'{folder}' holds no study: there is no {FILE} in it")
    store = Store(folder)
    if "study" not in store.about():
        store.close()
        raise BadInput(f"'{folder}' holds a study that has never run; run it")
    return store


def say_note(store: Store) -> None:
    """Say what readers of the store should know."""
    if store.note:
        print(f"note: {store.note}", file=sys.stderr)


def _print_all(rows: list[Row]) -> None:
    """Print a line a trial, in columns; rich's tables take a second for a thousand rows."""
    lines = [("trial", "what", "state", "attempts", "seconds", "error")]
    lines += [
        (
            row.key[:8],
            _plain(row.label),
            "done, old" if row.old else row.status,
            str(row.attempts),
            "" if row.seconds is None else f"{row.seconds:.1f}",
            _plain(row.error or ""),
        )
        for row in rows
    ]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        sys.stdout.write("  ".join(map(str.ljust, line, widths)).rstrip() + "\n")
    states = Counter(line[2] for line in lines[1:])
    sys.stdout.write(f"{len(rows)} trials: {', '.join(f'{count} {state}' for state, count in states.items())}\n")


def _plain(text: str) -> str:
    """Return ``text`` without what a terminal would obey."""
    return text if text.isprintable() else "".join(c if c.isprintable() else "?" for c in text)
