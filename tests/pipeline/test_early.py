"""What can't work is found before anything is simulated, not when the federation or the defence has its turn."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

import fedaudit
from fedaudit.pipeline import run as auditing
from fedaudit.utils.errors import BadInput

VALUES: dict[str, Any] = {
    "data": {"name": "digits"},
    "model": {"name": "convnet-small", "width": 4},
    "federations": [
        {"name": "first", "clients": 2, "examples": 10},
        {"name": "second", "clients": 2, "examples": 10, "clients_per_round": 1, "rounds": 90},
    ],
    "defences": [{}, {"name": "other"}],
    "attacks": ["invg"],
}
BAD: list[tuple[str, str, Any, str]] = [
    ("root data", "defences.1.aggregator", {"name": "fltrust", "root_examples": 11}, "the clients hold 10 examples"),
    ("clipping with BatchNorm", "defences.1.client_defence", {"name": "dp", "level": "sample"}, "BatchNorm mixes"),
    (
        "a budget for nothing",
        "defences.1.client_defence",
        {"name": "dp", "noise": 0.01},
        "after 0 rounds the privacy budget",
    ),
    (
        "another target",
        "federations.1.malicious",
        {"name": "gan", "target": 99},
        "target is 99, but classes are 0 to 9",
    ),
    ("no records", "federations.1.malicious", {"name": "agrevader"}, "'agrevader' needs records to push"),
    ("too large", "federations.1.rounds", 10**9, "GB of memory, this machine has"),
]


def changed(place: str, value: Any, **rest: Any) -> dict[str, Any]:
    values: Any = copy.deepcopy({**VALUES, **rest})
    *path, last = [int(part) if part.isdigit() else part for part in place.split(".")]
    node = values
    for part in path:
        node = node[part]
    node[last] = value
    return dict(values)


@pytest.fixture
def nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auditing, "simulate", lambda *_, **__: pytest.fail("a simulation was begun"))


@pytest.mark.usefixtures("nothing_runs")
@pytest.mark.parametrize(("place", "value", "words"), [pytest.param(*row[1:], id=row[0]) for row in BAD])
def test_found_first(place: str, value: Any, words: str) -> None:
    model = {"name": "convnet-small", "width": 4, "batch_norm": "train" if "BatchNorm" in words else "eval"}
    with pytest.raises(BadInput, match=words) as found:
        fedaudit.audit(changed(place, value, model=model), progress=False)
    assert "\n" not in str(found.value)


@pytest.mark.usefixtures("nothing_runs")
@pytest.mark.parametrize(("record", "words"), [([4], "after 4 rounds the privacy budget was spent"), ([3], "")])
def test_whether_a_budget_lasts_to_a_recorded_round(record: list[int], words: str) -> None:
    values = changed("federations.1.record", record, defences={"client_defence": {"name": "dp", "noise": 1.0}})
    if words:
        with pytest.raises(BadInput, match=words):
            fedaudit.audit(values, progress=False)
    else:
        with pytest.raises(pytest.fail.Exception, match="a simulation was begun"):
            fedaudit.audit(values, progress=False)


@pytest.mark.usefixtures("nothing_runs")
def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(BadInput, match="can't write to"):
        fedaudit.audit(out=tmp_path / "file" / "x", progress=False)
