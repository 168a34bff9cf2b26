"""What is broken, and what of it counts."""

from __future__ import annotations

import contextlib
import hashlib
import json
import sqlite3
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

import fedaudit
from fedaudit.capture import Recorder
from fedaudit.cli import main as fedaudit_main
from fedaudit.utils import plain_yaml
from fedaudit.utils.errors import BadInput
from fedaudit_lab.studies.store import FILE

TIMES = {
    "seconds",
    "cpu_seconds",
    "memory",
    "training",
    "client_defence",
    "client_defence_share",
    "time",
    "id",
    "started",
    "digest",
    "before",
    "last",
}  # where they are numbers or texts; a digest is over the times beside it
MACHINE = {"timing", "environment", "digests"}

SCENARIO: dict[str, Any] = {
    "version": 1,
    "name": "small",
    "data": {"name": "digits"},
    "model": {"name": "lenet", "initialisation": "uniform"},
    "federations": [{"name": "sgd", "algorithm": "fedsgd", "clients": 3, "examples": 3, "batch_size": 1}],
    "attacks": [{"name": "invg", "iterations": 3}],
    "evaluation": {"controls": False},
}
LONG = {
    **SCENARIO,
    "federations": [
        {
            "name": "avg",
            "algorithm": "fedavg",
            "clients": 2,
            "examples": 4,
            "batch_size": 2,
            "rounds": 5,
            "local_steps": 2,
        }
    ],
}
STUDY: dict[str, Any] = {
    "version": 1,
    "name": "tiny",
    "title": "A tiny study",
    "paper": "none",
    "columns": "attack",
    "scenario": {**{key: value for key, value in SCENARIO.items() if key not in {"version", "name"}}},
    "axes": {
        "attack": {
            "invg": {"attacks": [{"name": "invg", "iterations": 1}]},
            "agic": {"attacks": [{"name": "agic", "iterations": 1}]},
        }
    },
    "scales": {name: {"states": "tiny.", "repetitions": 3} for name in ("smoke", "cpu")},
}
STUDY["scenario"]["attacks"] = [{"name": "invg", "iterations": 1}]


class Wrong(Exception):
    """Something was lost, doubled or different."""


@dataclass(frozen=True)
class Case:
    """Something that writes to a folder and can go on there.

    Attributes:
        name: of it.
        run: does it in this process, in the folder that it is given, and exits.
        words: of the command line that does the same; None: there is none.
        kept: what of the folder must never be lost or change again, whatever happens: name to digest.
        workers: whether it has worker processes.
    """

    name: str
    run: Callable[[Path], None]
    words: Callable[[Path], list[str]] | None
    kept: Callable[[Path], dict[str, str]]
    workers: bool = False


def _command(words: list[str]) -> None:
    sys.argv = ["fedaudit", *words]
    fedaudit_main()


def cases(inputs: Path, workers: int = 2) -> list[Case]:
    """Return what is broken; scenarios are written to ``inputs``."""
    for name, what in (("scenario", SCENARIO), ("long", LONG), ("study", STUDY)):
        (inputs / f"{name}.yaml").write_text(plain_yaml.dumps(what))

    def audit(folder: Path) -> list[str]:
        return ["audit", str(inputs / "scenario.yaml"), "--out", str(folder), "--workers", str(workers)]

    def study(folder: Path) -> list[str]:
        return ["study", "run", str(inputs / "study.yaml"), "--out", str(folder), "--workers", str(workers)]

    def simulate(folder: Path) -> list[str]:
        return ["simulate", str(inputs / "long.yaml"), "--out", str(folder), "--workers", "1"]

    return [
        Case("study", lambda folder: _command(study(folder)), study, _finished_trials, workers=True),
        Case("audit", lambda folder: _command(audit(folder)), audit, _findings, workers=True),
        Case("simulation", lambda folder: _appears_at_once(simulate(folder), folder), simulate, _nothing),
        Case("recorder", _recorder, None, _closed_rounds),
    ]


def _appears_at_once(words: list[str], folder: Path) -> None:
    """Simulate; where the folder is there all of it is, and it may be refused."""
    whole = (folder / "index.json").is_file()
    try:
        _command(words)
    except SystemExit:
        if not whole:
            raise


def _record(folder: Path) -> None:
    """Train three clients for five rounds and record it; go on after the last round that was recorded."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 3))
    with patch("secrets.token_hex", return_value="ab" * 16):  # the recording's id
        recorder = Recorder(folder, module=model, append=True)
    first = recorder._next
    for index in range(5):
        start = {name: value + index for name, value in model.state_dict().items()}
        if index < first:
            continue
        with recorder.round(start, index):
            for client in range(3):
                draw = torch.Generator().manual_seed(10 * index + client)
                local = nn.Sequential(nn.Flatten(), nn.Linear(64, 3))
                local.load_state_dict(start)
                optimiser = torch.optim.SGD(local.parameters(), lr=0.1)
                with recorder.capture(local) as seen:
                    x, y = torch.rand(2, 1, 8, 8, generator=draw), torch.tensor([client, 0])
                    optimiser.zero_grad()
                    nn.functional.cross_entropy(local(x), y).backward()
                    optimiser.step()
                recorder.update(f"client {client}", local.state_dict(), seen)
    recorder.close()


def _recorder(folder: Path) -> None:
    try:
        _record(folder)
    except BadInput as error:
        sys.exit(f"error: {error}")


def _finished_trials(folder: Path) -> dict[str, str]:
    if not (folder / FILE).is_file():
        return {}
    db = sqlite3.connect(f"file:{folder / FILE}?mode=ro", uri=True, timeout=30)
    with contextlib.closing(db), contextlib.suppress(sqlite3.OperationalError):  # before there was a table
        rows = db.execute("select key, finished, attempts, outcome, seconds from trials where status = 'done'")
        return {row[0]: repr(row) for row in rows}
    return {}


def _findings(folder: Path) -> dict[str, str]:
    return {path.name: _digest(path.read_bytes()) for path in (folder / "findings").glob("*.safetensors")}


def _closed_rounds(folder: Path) -> dict[str, str]:
    """Return the digest of every closed round, which must be readable."""
    closed = {path.name: _digest(path.read_bytes()) for path in folder.glob("round-*.json")}
    if closed:
        read = fedaudit.Transcript.load(folder, module=nn.Sequential(nn.Flatten(), nn.Linear(64, 3)))
        if len(read.rounds) != len(closed):
            raise Wrong(f"{len(closed)} rounds are closed, {len(read.rounds)} are read")
    return closed


def _nothing(_: Path) -> dict[str, str]:
    return {}


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def left(folder: Path, *, attempts: bool = True) -> dict[str, str]:
    """Return what a run left: the digest of every file, of JSON and the store without times."""
    found = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.is_dir() or name.endswith(("-wal", "-shm")):  # SQLite's own, made by whoever reads, too
            continue
        if path.suffix == ".json":
            found[name] = _digest(json.dumps(_timeless(json.loads(path.read_bytes())), sort_keys=True).encode())
        elif path.name == FILE:
            db = sqlite3.connect(f"file:{path}?mode=ro", uri=True)
            with contextlib.closing(db):
                tried = "attempts" if attempts else "0"
                rows = db.execute(f"select key, position, status, {tried}, error, outcome from trials order by key")
                for *values, outcome in rows:
                    found[f"trial {values[0]}"] = repr((values, _timeless(json.loads(outcome or "null"))))
            found[name] = ""
        elif name.startswith("findings/") or path.suffix in {".html", ".csv", ".md"} or path.name == "error.txt":
            found[name] = ""  # these hold times
        else:
            found[name] = _digest(path.read_bytes())
    return found


def _timeless(value: Any) -> Any:
    if isinstance(value, dict):
        return {
            key: _timeless(item)
            for key, item in value.items()
            if key not in MACHINE and not (key in TIMES and not isinstance(item, dict | list))
        }
    return [_timeless(item) for item in value] if isinstance(value, list) else value
