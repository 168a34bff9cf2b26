"""Transcripts and kept simulations with what doesn't belong there: one line, or from the beginning."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from fedaudit.pipeline.prepare import resolve
from fedaudit.scenario.scenario import scenario_from
from fedaudit.simulation.simulator import simulate
from fedaudit.transcript.queries import QuerySet
from fedaudit.utils.errors import BadInput
from fedaudit.utils.fingerprint import fingerprint
from fedaudit.utils.integrity import digest_text
from tests.conftest import Command, refused
from tests.transcript.integrity_cases import put_part

LONG = {
    "data": {"name": "digits"},
    "model": {"name": "logistic"},
    "federations": [{"name": "f", "clients": 2, "examples": 4, "rounds": 4, "batch_size": 1}],
    "attacks": ["invg"],
}


@pytest.mark.parametrize(
    "inputs", [torch.tensor(1.0), torch.zeros(0), torch.zeros(2, 3)], ids=["scalar", "none", "flat"]
)
def test_records_of_odd_shapes(inputs: torch.Tensor, recorded: Path, tmp_path: Path, command: Command) -> None:
    shutil.copytree(recorded, tmp_path / "t")
    tensors = {field.name: inputs.clone() for field in dataclasses.fields(QuerySet)}
    put_part(tmp_path / "t", "queries", tensors)
    refused(command("attack", tmp_path / "t", "--attack", "invg", "--out", tmp_path / "out"), "queries")


PICTURES = torch.rand(2, 1, 8, 8)
LOGS = {
    "unequal pictures": {"gan/round-00000": PICTURES, "gan/round-00001": PICTURES[:1]},
    "pictures of another size": {"gan/round-00000": PICTURES[..., :4]},
    "a number": {"gan/round-00000": torch.tensor(3.0)},
    "no picture": {"gan/round-00000": PICTURES[:0]},
    "not finite": {"gan/round-00000": PICTURES / 0},
    "no round": {"gan/round-x": PICTURES},
    "nothing": {},
    "no class": {"gan/round-00000": PICTURES, "gan/target": torch.tensor(10)},
    "a class of fractions": {"gan/round-00000": PICTURES, "gan/target": torch.tensor(float("nan"))},
    "losses of nobody": {"agrevader/losses": torch.tensor(1.0)},
}


@pytest.mark.parametrize("log", LOGS.values(), ids=LOGS)
def test_logs(log: dict[str, torch.Tensor], recorded: Path, tmp_path: Path, command: Command) -> None:
    shutil.copytree(recorded, tmp_path / "t")
    (tmp_path / "t/truth.safetensors").unlink()
    log = {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in log.items()}
    put_part(tmp_path / "t", "adversary-log", {"gan/target": torch.tensor(3), **log})
    attack = "agrevader" if "agrevader/losses" in log else "gan"
    words = ["--attack", attack, "--set", "threat.adversary=client", "--out", tmp_path / "out"]
    done = command("attack", tmp_path / "t", *words)
    assert "Traceback" not in done.err
    if attack == "gan":
        refused(done, "are no images of a class")


@pytest.mark.slow
@pytest.mark.usefixtures("checkpoint_every_round")
def test_a_kept_simulation_with_flipped_bytes_is_none(tmp_path: Path) -> None:
    (federation,) = resolve(scenario_from(LONG)).federations
    whole = simulate(federation).transcript.fingerprint()
    path = tmp_path / "f.simulation"

    def stop(done: float) -> None:
        if done >= 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        simulate(federation, checkpoint=path, report=stop)
    kept = path.read_bytes()
    rng = np.random.default_rng(0)
    told: list[str] = []
    for _ in range(40):
        changed = bytearray(kept)
        changed[int(rng.integers(0, len(kept)))] ^= int(rng.integers(1, 256))
        path.write_bytes(bytes(changed))
        assert simulate(federation, checkpoint=path, say=told.append).transcript.fingerprint() == whole
    assert len(told) < 30  # some bytes are padding; of the others none was taken
    path.write_bytes(kept)
    simulate(federation, checkpoint=path, say=told.append)
    assert told[-1].startswith("resuming: 2 of 4 rounds")


@pytest.mark.usefixtures("checkpoint_every_round")
def test_a_kept_simulation_of_something_else_is_one_line(tmp_path: Path) -> None:
    (federation,) = resolve(scenario_from(LONG)).federations
    path = tmp_path / "f.simulation"
    simulate(federation, checkpoint=path)
    saved = torch.load(path, weights_only=True)
    for state in ({"finished": 1}, {**saved["state"], "rounds": 3}, {**saved["state"], "model": {}}):
        digest = digest_text(fingerprint(state), saved["key"])
        torch.save({**saved, "state": state, "digest": digest}, path)
        with pytest.raises(BadInput, match="fedaudit wrote"):
            simulate(federation, checkpoint=path)
