"""What is fuzzed of tables, text and canaries: frames, tokens, a recording's task, a vocabulary, readings."""

from __future__ import annotations

import contextlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

from fedaudit import audit_transcript
from fedaudit.data import Dataset, from_frame
from fedaudit.epsilon.canaries import OBSERVERS, Canaries
from fedaudit.pipeline.prepare import resolve
from fedaudit.pipeline.run import record
from fedaudit.scenario.scenario import scenario_from
from fedaudit.transcript.files import CanariesEntry
from fedaudit.transcript.transcript import Transcript
from fedaudit.transcript.truth import COINS, FILE, FOLDER, load_truth, save_part, save_recording
from fedaudit.utils.integrity import save_sealed
from tests.transcript.integrity_cases import seal_again
from tools.fuzz.base import Finding, Target
from tools.fuzz.strategies import Draw, changed, odd


def of_frame(drawn: tuple[list[Any], list[Any], list[Any]]) -> None:
    """Make a data set of a frame of odd cells, five times over so that classes have examples to spare."""
    first, second, target = (part * 5 for part in drawn)
    made = from_frame({"a": first, "b": second, "out": target}, "out")
    for split in (made.train, made.test):
        if not bool(torch.isfinite(split.inputs).all()):
            raise Finding("a cell that isn't finite was taken")


def of_tokens(arrays: Draw) -> dict[str, Target]:
    """Return the target of arrays that are said to be text."""
    short = st.lists(st.lists(st.integers(-1, 12), min_size=3, max_size=3), min_size=1, max_size=9).map(np.array)
    drawn = st.tuples(short | arrays, st.none() | arrays, st.integers(-1, 20), st.none() | st.integers(-2, 20))
    return {"tokens": Target(drawn, _tokens)}


def _tokens(drawn: tuple[Any, Any, int, int | None]) -> None:
    inputs, targets, vocabulary, padding = drawn
    made = Dataset.from_tokens(inputs, targets, vocabulary=vocabulary, padding=padding)
    if int(made.train.inputs.max()) >= vocabulary or int(made.train.inputs.min()) < 0:
        raise Finding("a token that isn't of the vocabulary was taken")


TASK = ("mean", "std", "input_shape", "columns", "tokens", "loss", "outputs", "kind", "x")


def _columns() -> Draw:
    numbers, words = st.integers(-1, 70), st.text(max_size=3)
    column: dict[str, Draw] = {"name": words, "kind": st.sampled_from(["numeric", "categorical", "odd"])}
    column |= {"positions": st.lists(numbers, max_size=3), "categories": st.lists(words, max_size=3)}
    optional: dict[str, Draw] = {"x": words, "mean": st.floats(), "codes": st.lists(st.floats(), max_size=3)}
    fields = {"vocabulary": numbers, "padding": numbers, "end": numbers, "causal": st.booleans()}
    return st.lists(st.fixed_dictionaries(column, optional=optional), max_size=3) | st.fixed_dictionaries(
        {}, optional=fields
    )


def of_task(folder: Path) -> Target:
    """Return the target of a recording's task that is told, as by ``fedaudit attack --task``."""
    from tests.capture import recording_cases

    def run(values: dict[str, Any]) -> None:
        if not folder.exists():
            recording_cases.federation(folder, rounds=1, clients=1)
        read = Transcript.load(folder, recording_cases.Net(), task=values)
        load_truth(folder / FOLDER, read)

    return Target(st.dictionaries(st.sampled_from(TASK), odd | _columns(), max_size=3), run)


def of_text(folder: Path) -> Target:
    """Return the target of a transcript of text: what its index says of vocabulary, padding and task."""
    small = {"data": {"name": "notes-causal"}, "model": {"name": "decoder", "width": 8}, "attacks": ["dager"]}
    small["federations"] = [{"name": "f", "clients": 1, "examples": 2, "batch_size": 2}]
    (recording,) = record(resolve(scenario_from(small)))
    if not folder.exists():
        save_recording(recording.transcript, recording.truth, folder)
    index = json.loads((folder / "index.json").read_text())

    def run(values: Any) -> None:
        (folder / "index.json").write_text(json.dumps(values))
        with contextlib.suppress(Exception):  # where it is none
            seal_again(folder)
        load_truth(folder / FILE, Transcript.load(folder))

    return Target(changed(index), run)


def of_canaries(folder: Path) -> Target:
    """Return the target of an audit of ε on a recording, with what it says of canaries changed and sealed again."""
    from tests.capture import recording_cases

    count = 8
    values = st.sampled_from([0.0, 1.0, -1.0, 0.5, 1e300, -1e300, float("nan"), float("inf")])
    rows = st.lists(st.lists(values, min_size=count, max_size=count), max_size=3)
    kinds = st.sampled_from([torch.float64] * 5 + [torch.float32, torch.int64])
    readings = st.dictionaries(st.sampled_from([*OBSERVERS] * 4 + ["x"]), st.tuples(rows, kinds), max_size=3)
    sound = Canaries("client", "add-remove", {"models": torch.rand(2, count, dtype=torch.float64)})
    sound = replace(sound, noise={"models": 1.0}, rates={"models": 0.5}, covered=("models",), claimed=8.0)
    entry = json.loads(CanariesEntry.model_validate(sound).model_dump_json())
    if not folder.exists():
        recording_cases.federation(folder, rounds=1, clients=1)
    id = Transcript.load(folder, recording_cases.Net()).recording
    assert id is not None
    entries = st.just(entry) | changed(entry, st.sampled_from([0, 1, 0.0, 1.0, 1e-300, 1e300, 257, 10**9, None, "sum"]))

    def run(drawn: tuple[Any, dict[str, Any], list[bool]]) -> None:
        about, read, coins = drawn
        tensors = sound.readings | {
            name: torch.tensor(rows, dtype=torch.float64).to(kind) for name, (rows, kind) in read.items()
        }
        save_sealed(folder / COINS, tensors, {"entry": about}, f"{id}/{COINS}")
        save_part(folder / FOLDER / COINS, id, {"coins": torch.tensor(coins)})
        audit_transcript(folder, ["dp-canaries"], module=recording_cases.Net(), progress=False)

    return Target(st.tuples(entries, readings, st.lists(st.booleans(), min_size=count, max_size=count)), run)
