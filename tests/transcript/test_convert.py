"""Folders that really were written before there was one format (tests/data/older), converted and read."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from fedaudit import Transcript
from fedaudit.transcript.truth import load_truth, truth_beside
from tests.conftest import Command, refused

OLDER = Path(__file__).parents[1] / "data" / "older"
SIMULATED = ("queries", "canaries", "vertical-split")
FIRST = "round-00000-client-00000.safetensors"


class Tiny(nn.Sequential):
    """What the recorded loops trained."""

    def __init__(self) -> None:
        super().__init__(nn.AvgPool2d(4), nn.Flatten(), nn.Linear(4, 10))


def read(folder: Path) -> tuple[Transcript, Any]:
    own: dict[str, Any] = {}
    if not folder.name.startswith(SIMULATED):
        own = {"module": Tiny(), "task": {"input_shape": (1, 8, 8)}}
    transcript, truth = Transcript.load(folder, **own), truth_beside(folder)
    assert truth is not None
    return transcript, load_truth(truth, transcript)


def unsealed(folder: Path) -> Path:
    """Take the digests out of a folder, as the first of its version had none."""
    for path in folder.rglob("*.json"):
        values = json.loads(path.read_text())
        path.write_text(json.dumps({k: v for k, v in values.items() if k not in ("files", "digest", "before", "last")}))
    for path in folder.rglob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            metadata = dict(file.metadata() or {})
        values = json.loads(metadata.get("about", "{}"))
        if values.pop("digest", None):
            tensors = load_file(path)
            save_file(tensors, path, metadata={"about": json.dumps(values)})
    return folder


@pytest.mark.parametrize("name", sorted(path.name for path in OLDER.iterdir()))
def test_an_older_folder_is_refused_until_it_is_converted(name: str, tmp_path: Path, command: Command) -> None:
    refused(command("attack", OLDER / name, "--out", tmp_path / "out"), "convert it with 'fedaudit convert OLD NEW'")
    done = command("convert", OLDER / name, tmp_path / name)
    assert (done.code, done.out) == (0, f"converted: {tmp_path / name}\n")
    read(tmp_path / name)
    refused(command("convert", OLDER / name, tmp_path / name), "isn't an empty folder")
    refused(command("convert", tmp_path / name, tmp_path / "again"), "nothing is to be done")


def test_a_simulations_bits_come_back(tmp_path: Path, command: Command) -> None:
    command("convert", OLDER / "queries", tmp_path / "queries")
    transcript, truth = read(tmp_path / "queries")
    old, (first,) = load_file(OLDER / "queries" / FIRST), transcript.rounds
    for name, value in first.updates[0].tensors.items():
        assert value.equal(old[f"parameters/{name}"])
    sent = load_file(OLDER / "queries" / "round-00000-client-00001-sent.safetensors")
    for name, value in first.client_weights[1].items():
        assert value.equal(sent.get(name, first.weights[name]))
    assert first.rejected == {1: "an outlier"}
    assert transcript.adversary_log["seen"].tolist() == [0.0, 1.0, 2.0]
    assert transcript.records is not None
    assert transcript.records.inputs.equal(load_file(OLDER / "queries/records.safetensors")["inputs"])
    known = load_file(OLDER / "queries/truth.safetensors")
    assert truth.matched.equal(known["twins"])
    assert truth.inputs[0, 1].equal(known["inputs/0/1"])
    assert first.updates[0].labels is not None
    assert first.updates[0].labels.equal(truth.labels[0, 0])


def test_a_recordings_bits_come_back(tmp_path: Path, command: Command) -> None:
    command("convert", OLDER / "loop", tmp_path / "loop")
    transcript, truth = read(tmp_path / "loop")
    assert transcript.clients == {0: "site-0", 1: "site-1"}
    assert not transcript.replays  # contradictions of an older version, which asked no rounding
    after, before = (load_file(OLDER / "loop" / name) for name in (FIRST, "round-00000-global.safetensors"))
    for name, value in transcript.rounds[0].updates[0].tensors.items():
        assert value.equal(after[name] - before[name])
    seen = load_file(OLDER / "loop/truth" / FIRST)
    assert truth.seen[0, 0][0].equal(seen["inputs"])
    assert len(truth.candidates) == 2 + 2 * 2  # those given, and what two clients have
    command("convert", OLDER / "loop-canaries", tmp_path / "loop-canaries")
    transcript, truth = read(tmp_path / "loop-canaries")
    assert transcript.canaries is not None
    readings = load_file(OLDER / "loop-canaries/canaries.safetensors")
    assert all(transcript.canaries.readings[name].equal(value) for name, value in readings.items())
    assert truth.coins.equal(load_file(OLDER / "loop-canaries/truth/canaries.safetensors")["coins"])


@pytest.mark.parametrize("name", ["queries", "loop"])
def test_what_carried_no_digest_is_noted(name: str, tmp_path: Path, command: Command) -> None:
    unsealed(Path(shutil.copytree(OLDER / name, tmp_path / "old")))
    done = command("convert", tmp_path / "old", tmp_path / name)
    assert (done.code, "carries no digest" in done.out) == (0, True)
    assert any("carries no digest" in note for note in read(tmp_path / name)[0].notes)


@pytest.mark.parametrize("name", ["queries", "canaries", "vertical-split", "loop", "loop-canaries"])
def test_what_was_changed_is_refused(name: str, tmp_path: Path, command: Command) -> None:
    for path in sorted((OLDER / name).rglob("*")):
        if path.is_dir():
            continue
        folder = Path(shutil.copytree(OLDER / name, tmp_path / "old"))
        changed = folder / path.relative_to(OLDER / name)
        data = bytearray(changed.read_bytes())
        data[-3] ^= 1
        changed.write_bytes(data)
        outcome = command("convert", folder, tmp_path / "new")
        assert outcome.code == 2, path
        assert outcome.err.startswith("fedaudit: error: ")
        assert not (tmp_path / "new").exists()
        shutil.rmtree(folder)


@pytest.mark.parametrize("name", ["canaries", "vertical-split", "queries"])
def test_another_transcripts_truth_is_refused(name: str, tmp_path: Path, command: Command) -> None:
    folder = unsealed(Path(shutil.copytree(OLDER / name, tmp_path / "old")))
    file = {"canaries": "canaries.safetensors", "vertical-split": "vertical.safetensors", "queries": FIRST}[name]
    tensors = load_file(folder / file)
    largest = max((value for value in tensors.values() if value.is_floating_point()), key=torch.Tensor.numel)
    largest.view(-1)[0] += 1
    save_file(tensors, folder / file)
    refused(command("convert", folder, tmp_path / "new"), "is the ground truth of another transcript")
