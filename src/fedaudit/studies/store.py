"""One SQLite file per study: a row per trial; what is finished is never lost and never done twice."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from fedaudit.utils.errors import BadInput

if TYPE_CHECKING:  # importing it takes seconds, which `fedaudit study log` needn't wait for
    from fedaudit.studies.spec import Point, StudyTrial

FILE = "study.sqlite"
_VERSION = 2  # of the tables; 1 had no computations
_LOCK = "running.lock"
_APPLICATION = 0x66656461  # "feda", in SQLite's header: a foreign file is told apart before it is touched

Status = Literal["pending", "done", "failed"]

_SCHEMA = """
create table if not exists about (key text primary key, value text not null);
create table if not exists trials (
    key text primary key, position integer not null, point text not null, repetition integer not null,
    scenario text not null, status text not null default 'pending', attempts integer not null default 0,
    outcome text, seconds real, versions text, error text, finished text, computation text, expected text
);
"""


@dataclass(frozen=True)
class Row:
    """A trial as the store holds it.

    Attributes:
        key, point, repetition: of the trial.
        status: pending, done or failed.
        attempts: how often it was run.
        outcome: per image ``psnr``, ``ssim``, ``mse``, ``lpips``, ``rank``, and ``victim``, a hash of the true one;
            None where it wasn't asked for, too.
        seconds: of the last attempt.
        error: why it failed.
        old: whether it was done by another, or an unknown, version of code, torch, data or device than is now expected.
    """

    key: str
    point: Point
    repetition: int
    status: Status
    attempts: int
    outcome: dict[str, Any] | None
    seconds: float | None
    error: str | None
    old: bool = False

    @property
    def label(self) -> str:
        """Its combination and repetition in words."""
        return ", ".join([*(f"{axis} {level}" for axis, level in self.point.items()), f"#{self.repetition}"])


class Store:
    """The only writer of a study's SQLite file (WAL).

    Raises:
        BadInput: the folder can't be written, or the file is something else's, or damaged.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path = folder / FILE
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._db = sqlite3.connect(self.path, isolation_level=None, timeout=30)
            self._check_owner()
            self._db.execute("pragma journal_mode=wal")
            self._db.execute("pragma synchronous=normal")  # with WAL: safe against a killed process
            self._db.executescript(_SCHEMA)
        except (OSError, sqlite3.Error) as error:
            raise BadInput(f"can't use '{self.path}' as a study's store: {_reason(error)}") from None

    def _check_owner(self) -> None:
        owner = self._db.execute("pragma application_id").fetchone()[0]
        version = self._db.execute("pragma user_version").fetchone()[0]
        tables = self._db.execute("select count(*) from sqlite_master").fetchone()[0]
        if owner == _APPLICATION:
            if version not in (1, _VERSION):
                raise BadInput(f"'{self.path}' has format {version}; this fedaudit reads format {_VERSION}")
            if version == 1:
                self._migrate()
        elif owner or version or tables:
            raise BadInput(f"'{self.path}' is a database, but not a study's: choose another --out")
        else:
            self._db.execute(f"pragma application_id={_APPLICATION}")
            self._db.execute(f"pragma user_version={_VERSION}")

    def _migrate(self) -> None:
        """Turn tables of version 1 into today's: what is done there is of an unknown version."""
        self._db.execute("begin immediate")
        there = {column[1] for column in self._db.execute("pragma table_info(trials)")}
        for column in {"computation", "expected"} - there if there else ():  # nobody was quicker, or killed before
            self._db.execute(f"alter table trials add column {column} text")
        self._db.execute(f"pragma user_version={_VERSION}")
        self._db.execute("commit")

    def close(self) -> None:
        """Close the file."""
        self._db.close()

    @contextmanager
    def exclusively(self) -> Iterator[None]:
        """Keep other runs away from the folder while the block runs; the system lets go of a killed one's hold.

        Raises:
            BadInput: another run is at work.
        """
        lock = sqlite3.connect(self.folder / _LOCK, isolation_level=None, timeout=0)
        try:
            try:
                lock.execute("begin exclusive")
            except sqlite3.OperationalError:
                raise BadInput(
                    f"another run is at work in '{self.folder}'; wait for it, or choose another --out"
                ) from None
            yield
        finally:
            lock.close()

    def about(self) -> dict[str, Any]:
        """Return what :meth:`plan` was told of the study."""
        return {key: json.loads(value) for key, value in self._db.execute("select key, value from about")}

    def plan(self, about: dict[str, Any], trials: list[StudyTrial]) -> None:
        """Add the trials that aren't there yet; what there is of them stays.

        Raises:
            BadInput: the folder belongs to another study or scale; the disk is full.
        """
        before = self.about()
        for key in ("name", "scale"):
            if key in before and before[key] != about[key]:
                raise BadInput(
                    f"'{self.folder}' holds {before['name']} at scale {before['scale']}; choose another --out"
                )
        with self._writing():
            self._db.executemany(
                "insert or replace into about values (?, ?)", [(k, json.dumps(v)) for k, v in about.items()]
            )
            there = {key for (key,) in self._db.execute("select key from trials")}
            self._db.executemany(
                "update trials set position = ? where key = ?",
                [(i, t.key) for i, t in enumerate(trials) if t.key in there],
            )
            self._db.executemany(
                "insert into trials (key, position, point, repetition, scenario) values (?, ?, ?, ?, ?)",
                [
                    (t.key, i, json.dumps(t.point), t.repetition, t.text)
                    for i, t in enumerate(trials)
                    if t.key not in there
                ],
            )

    def scenarios(self) -> dict[str, str]:
        """Return every trial's scenario, as YAML, by its key."""
        return dict(self._db.execute("select key, scenario from trials"))

    def expect(self, computations: dict[str, str | None]) -> None:
        """Note which computation each trial would be now; those that were finished as another one are old.

        Args:
            computations: by key, the fingerprint, or None where there can be none.
        """
        with self._writing():
            self._db.executemany(
                "update trials set expected = ? where key = ?", [(c, key) for key, c in computations.items()]
            )

    def forget(self, keys: Iterable[str]) -> None:
        """Let trials be run again as if they never had been."""
        with self._writing():
            self._db.executemany(
                "update trials set status = 'pending', outcome = null, computation = null where key = ?",
                [(key,) for key in keys],
            )

    def finish(self, key: str, outcome: dict[str, Any], seconds: float, versions: dict[str, str], when: str) -> None:
        """Note that a trial is done, as the computation that was expected of it."""
        with self._writing():
            self._db.execute(
                "update trials set status = 'done', attempts = attempts + 1, outcome = ?, seconds = ?, versions = ?, "
                "error = null, finished = ?, computation = expected where key = ?",
                (json.dumps(outcome), seconds, json.dumps(versions), when, key),
            )

    def fail(self, key: str, error: str, when: str) -> None:
        """Note that a trial failed, and why."""
        with self._writing():
            self._db.execute(
                "update trials set status = 'failed', attempts = attempts + 1, error = ?, finished = ? where key = ?",
                (error, when, key),
            )

    def rows(self, *, outcomes: bool = True) -> list[Row]:
        """Return all trials in the study's order.

        Args:
            outcomes: with what came of them, nearly all of what there is to read.
        """
        found = self._db.execute(
            f"select key, point, repetition, status, attempts, {'outcome' if outcomes else 'null'}, seconds, error, "
            "status = 'done' and (computation is null or computation is not expected) from trials "
            "order by position, key"
        )
        return [
            Row(
                key, json.loads(point), repetition, status, tries, outcome and json.loads(outcome), time, why, bool(old)
            )
            for key, point, repetition, status, tries, outcome, time, why, old in found
        ]

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            self._db.execute("begin immediate")
            try:
                yield
            except BaseException:
                self._db.execute("rollback")
                raise
            self._db.execute("commit")
        except sqlite3.Error as error:
            raise BadInput(f"can't write '{self.path}': {_reason(error)}; what was finished before is kept") from None


def _reason(error: Exception) -> str:
    return str(getattr(error, "strerror", None) or error)
