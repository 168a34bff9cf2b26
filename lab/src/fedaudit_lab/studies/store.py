"""One SQLite file per study: a row per trial; what is finished is never lost and never done twice."""

from __future__ import annotations

import hashlib
import json
import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic_core import from_json

from fedaudit import BadInput
from fedaudit.utils import STORE, check_file, check_text, digest_text, explain

if TYPE_CHECKING:  # importing it takes seconds, which `fedaudit study log` needn't wait for
    from fedaudit_lab.studies.spec import StudyTrial

FILE = "study.sqlite"
_VERSION = 3  # of the tables; 1 had no computations, 2 no digests
_LOCK = "running.lock"
_DIGEST = "digest"  # of the table about, in itself
_APPLICATION = 0x66656461  # "feda", in SQLite's header: a foreign file is told apart before it is touched

Status = Literal["pending", "done", "failed"]

_SCHEMA = """
create table if not exists about (key text primary key, value text not null);
create table if not exists trials (
    key text primary key, position integer not null, point text not null, repetition integer not null,
    scenario text not null, status text not null default 'pending', attempts integer not null default 0,
    outcome text, seconds real, versions text, error text, finished text, computation text, expected text,
    files text, digest text
);
"""
_ADDED = {"computation", "expected", "files", "digest"}  # columns that version 1 lacks
# All that a row holds, as its digest is over it.
_SEALED = (
    "key, position, point, repetition, scenario, status, attempts, outcome, seconds, versions, error, finished, "
    "computation, expected, files"
)
_REMEDY = "delete the folder and run the study again, or take it from where it was made"


class _Attacked(BaseModel):
    """What one run of the attack gave, as far as tables read it; there is more in it."""

    federation: str
    round: int | None
    client: int | None
    reason: str | None
    seconds: float | None
    images: list[dict[str, float | str | None]]
    metrics: dict[str, float | None] = {}


class _Trained(BaseModel):
    """How one federation went, likewise."""

    federation: str
    attacked: bool


class _Outcome(BaseModel):
    """What came out of a trial, likewise."""

    updates: list[_Attacked] = []
    courses: list[_Trained] = []


@dataclass(frozen=True)
class Row:
    """A trial as the store holds it.

    Attributes:
        outcome: per image ``psnr``, ``ssim``, ``mse``, ``lpips``, ``rank``, and ``victim``, a hash of the true one;
            None where it wasn't asked for, too.
        old: whether it was done by another, or an unknown, version of code, torch, data or device than is now expected.
        files: of the trial's folder, each with its SHA-256; empty where an earlier version wrote it.
    """

    key: str
    point: dict[str, str]
    repetition: int
    status: Status
    attempts: int
    outcome: dict[str, Any] | None
    seconds: float | None
    error: str | None
    old: bool = False
    files: dict[str, str] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """Its combination and repetition in words."""
        return ", ".join([*(f"{axis} {level}" for axis, level in self.point.items()), f"#{self.repetition}"])


_ROW = TypeAdapter(Row)


class Store:
    """The only writer of a study's SQLite file (WAL). Every row is sealed (see :mod:`fedaudit.utils.integrity`)."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path = folder / FILE
        self.note: str | None = None
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for file in (self.path, folder / _LOCK):
                if file.exists():
                    check_file(file, STORE)
            self._db = sqlite3.connect(self.path, isolation_level=None, timeout=30)
            try:
                self._check_owner()
                self._db.execute("pragma journal_mode=wal")
                self._db.execute("pragma synchronous=normal")  # with WAL: safe against a killed process
                self._db.executescript(_SCHEMA)
            except BaseException:
                self._db.close()
                raise
        except (OSError, sqlite3.Error, ValueError) as error:  # ValueError: texts in it that aren't UTF-8
            where = getattr(error, "filename", None) or self.path
            raise BadInput(f"can't use '{where}' as a study's store: {_reason(error)}") from None

    def _check_owner(self) -> None:
        owner = self._db.execute("pragma application_id").fetchone()[0]
        version = self._db.execute("pragma user_version").fetchone()[0]
        tables = self._db.execute("select count(*) from sqlite_master").fetchone()[0]
        others = self._db.execute("select name from sqlite_master where type in ('view', 'trigger')").fetchall()
        if owner == _APPLICATION and others:
            raise BadInput(
                f"'{self.path}' has more than tables ({others[0][0][:60]!r}): it is none that fedaudit wrote"
            )
        if owner == _APPLICATION:
            if version not in range(1, _VERSION + 1):
                raise BadInput(f"'{self.path}' has format {version}; this fedaudit reads format {_VERSION}")
            if version < _VERSION:
                self._migrate()
        elif owner or version or tables:
            raise BadInput(f"'{self.path}' is a database, but not a study's: choose another --out")
        else:
            self._db.execute(f"pragma application_id={_APPLICATION}")
            self._db.execute(f"pragma user_version={_VERSION}")

    def _migrate(self) -> None:
        """Turn tables of earlier versions into today's: what was done in version 1 is of an unknown version."""
        self._db.execute("begin immediate")
        there = {column[1] for column in self._db.execute("pragma table_info(trials)")}
        for column in _ADDED - there if there else ():  # nobody was quicker, or killed before
            self._db.execute(f"alter table trials add column {column} text")
        self._db.execute(f"pragma user_version={_VERSION}")
        self._db.execute("commit")

    def close(self) -> None:
        """Close the file."""
        self._db.close()

    @contextmanager
    def exclusively(self) -> Iterator[None]:
        """Keep other runs away from the folder while the block runs; the system lets go of a killed one's hold."""
        path = self.folder / _LOCK
        try:
            lock = sqlite3.connect(path, isolation_level=None, timeout=0)
        except sqlite3.Error as error:
            raise BadInput(f"can't use '{path}' as a lock: {error}") from None
        try:
            try:
                lock.execute("begin exclusive")
            except sqlite3.Error as error:
                if getattr(error, "sqlite_errorcode", 0) & 0xFF not in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
                    raise BadInput(f"can't use '{path}' as a lock: {error}; is the disk full?") from None
                raise BadInput(
                    f"another run is at work in '{self.folder}'; wait for it, or choose another --out"
                ) from None
            yield
        finally:
            lock.close()

    def about(self) -> dict[str, Any]:
        """Return what :meth:`plan` was told of the study; nothing where it never was."""
        with self._reading():
            found = dict(self._db.execute("select key, value from about order by key"))
            digest = found.pop(_DIGEST, None)
            if digest or found:
                self._check(json.dumps(found), digest, _DIGEST, "what the study is")
            about = {key: from_json(value) for key, value in found.items()}
            words = [about["name"], about["scale"], *about.get("overrides", [])] if about else []
            if not all(isinstance(word, str) for word in words):
                raise ValueError("the study's name, scale or --set is no text")
            return about

    def plan(self, about: dict[str, Any], trials: list[StudyTrial], *, replace: bool = False) -> None:
        """Add the trials that aren't there yet; what there is of them stays.

        Finished trials of the same cells with another scenario, or of cells that the study hasn't any more, are
        refused, as one table can't mix them; with ``replace`` they make room, but their files stay. Unfinished ones
        always do.
        """
        before = self.about()
        for key in ("name", "scale"):
            if key in before and before[key] != about[key]:
                raise BadInput(
                    f"'{self.folder}' holds {before['name']} at scale {before['scale']}; choose another --out"
                )
        for _ in self._whole():  # before they are sealed again
            pass
        others = self._others(trials, about.get("study", {}).get("axes"))
        if any(others.values()) and not replace:
            raise BadInput(
                f"{sum(others.values())} finished trials in '{self.folder}' are of the same cells with other settings, "
                "or of other axes or levels: the study or --set has changed; --again runs them anew, another --out "
                "keeps them"
            )
        if before and set(before.get("overrides", [])) != set(about.get("overrides", [])):
            staying = {key for (key,) in self._db.execute("select key from trials where status = 'done'")}
            if staying - {t.key for t in trials} - others.keys():
                earlier = " ".join(f"--set {text}" for text in before.get("overrides", [])) or "no --set"
                raise BadInput(f"'{self.folder}' holds finished trials with {earlier}; choose another --out")
        with self._writing():
            self._db.executemany("delete from trials where key = ?", [(key,) for key in others])
            self._db.executemany(
                "insert or replace into about values (?, ?)", [(k, json.dumps(v)) for k, v in about.items()]
            )
            told = dict(self._db.execute("select key, value from about where key != ? order by key", (_DIGEST,)))
            digest = digest_text(json.dumps(told), _DIGEST)
            self._db.execute("insert or replace into about values (?, ?)", (_DIGEST, digest))
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
            self._seal()

    def _others(self, trials: Sequence[StudyTrial], axes: Mapping[str, Any] | None) -> dict[str, bool]:
        """Return which trials there is no place for beside these, and if they are done.

        They are of the same cell and repetition as one of these, but not it, or of other axes or levels than ``axes``.
        """
        keys = {trial.key for trial in trials}
        cells = {(tuple(sorted(trial.point.items())), trial.repetition) for trial in trials}

        def is_other(point: Mapping[str, str], repetition: int) -> bool:
            if axes is not None and (point.keys() != axes.keys() or any(point[a] not in axes[a] for a in axes)):
                return True
            return (tuple(sorted(point.items())), repetition) in cells

        found = self._db.execute("select key, point, repetition, status from trials").fetchall()
        return {
            key: status == "done"
            for key, point, repetition, status in found
            if key not in keys and is_other(json.loads(point), repetition)
        }

    def scenarios(self) -> dict[str, str]:
        """Return every trial's scenario, as YAML, by its key."""
        with self._reading():
            return {str(key): str(text) for key, text in self._db.execute("select key, scenario from trials")}

    def expect(self, computations: dict[str, str | None]) -> None:
        """Note, by key, which computation (or None) each trial would be now; those finished as another one are old."""
        changed = [(computation, key) for key, computation in computations.items()]
        self._change("update trials set expected = ? where key = ?", changed)

    def forget(self, keys: Iterable[str]) -> None:
        """Let trials be run again as if they never had been."""
        self._change(
            "update trials set status = 'pending', outcome = null, computation = null where key = ?",
            [(key,) for key in keys],
        )

    def finish(
        self,
        key: str,
        outcome: dict[str, Any],
        seconds: float,
        versions: dict[str, str],
        when: str,
        files: Mapping[str, bytes] | None = None,
    ) -> None:
        """Note that a trial is done, as the computation that was expected of it, and what its files hold."""
        digests = {name: hashlib.sha256(content).hexdigest() for name, content in (files or {}).items()}
        self._change(
            "update trials set status = 'done', attempts = attempts + 1, outcome = ?, seconds = ?, versions = ?, "
            "error = null, finished = ?, computation = expected, files = ? where key = ?",
            [(json.dumps(outcome), seconds, json.dumps(versions), when, json.dumps(digests), key)],
        )

    def fail(self, key: str, error: str, when: str) -> None:
        """Note that a trial failed, and why."""
        self._change(
            "update trials set status = 'failed', attempts = attempts + 1, error = ?, finished = ? where key = ?",
            [(error, when, key)],
        )

    def _change(self, statement: str, values: Sequence[tuple[Any, ...]]) -> None:
        """Change a row for each of ``values``, of which the last is its key, and seal it."""
        with self._writing():
            self._db.executemany(statement, values)
            self._seal([key for *_, key in values])

    def rows(self, *, outcomes: bool = True) -> list[Row]:
        """Return all trials in the study's order; ``outcomes``, what came of them, are nearly all of what is read."""
        with self._reading():
            (count,) = self._db.execute("select count(*) from trials").fetchone()
            if count > (STORE.items or 0):
                raise ValueError(f"{count:,} rows, and {STORE.items:,} are the most that are read")
            return [
                _ROW.validate_python(
                    {
                        **row,
                        "point": from_json(row["point"]),
                        "outcome": _outcome(row["outcome"]) if outcomes else None,
                        "old": row["status"] == "done"
                        and (row["computation"] is None or row["computation"] != row["expected"]),
                        "files": from_json(row["files"] or "{}"),
                    }
                )
                for row in self._whole()
            ]

    def _whole(self) -> Iterator[dict[str, Any]]:
        """Yield what every row holds, in the study's order, once its digest was checked."""
        names = _SEALED.split(", ")
        for *values, digest in self._db.execute(f"select {_SEALED}, digest from trials order by position, key"):
            text, key = _text(values), str(values[0])
            if digest_text(text, key) != digest:  # then it is slower to say why
                self._check(text, digest, key, f"trial {key:.8}")
            yield dict(zip(names, values, strict=True))

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """Turn what a damaged file raises into one line."""
        try:
            yield
        except (sqlite3.Error, ValueError, TypeError, KeyError) as error:  # ValidationError is a ValueError
            why = explain(error) if isinstance(error, ValidationError) else " ".join(str(error).split())[:200]
            raise BadInput(
                f"'{self.path}' is damaged, or no study's: {why}; restore it, or choose another --out"
            ) from None

    def _check(self, text: str, digest: str | None, about: str, what: str) -> None:
        note = check_text(text, digest, about, where=f"{what} in '{self.path}'", remedy=_REMEDY)
        self.note = self.note or note

    def _seal(self, keys: Iterable[str] | None = None) -> None:
        """Seal the rows of those keys, or all."""
        wanted = f"select {_SEALED} from trials" + ("" if keys is None else " where key = ?")
        each: list[tuple[str, ...]] = [()] if keys is None else [(key,) for key in keys]
        rows = [row for one in each for row in self._db.execute(wanted, one).fetchall()]
        self._db.executemany(
            "update trials set digest = ? where key = ?", [(digest_text(_text(r), r[0]), r[0]) for r in rows]
        )

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
        except (sqlite3.Error, ValueError) as error:
            raise BadInput(f"can't write '{self.path}': {_reason(error)}; what was finished before is kept") from None


def _outcome(text: str | None) -> Any:
    if text is None:
        return None
    values = from_json(text)
    _Outcome.model_validate(values)
    return values


def _text(values: Sequence[Any]) -> str:
    """Return a row as one text, for its digest: the lengths, then the values (a damaged file may hold any)."""
    texts = ["" if value is None else str(value) for value in values]
    lengths = ",".join("-" if value is None else str(len(text)) for value, text in zip(values, texts, strict=True))
    return "".join((lengths, ":", *texts))


def _reason(error: Exception) -> str:
    return " ".join(str(getattr(error, "strerror", None) or error).split())
