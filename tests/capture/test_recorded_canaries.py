"""Canary clients in a federation that really runs: what the recording holds, and what an audit of it says."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch

import fedaudit
from fedaudit import CanaryClients, Recorder, Transcript
from fedaudit.transcript.truth import truth_beside
from fedaudit.utils.errors import BadInput, CorruptTranscript
from tests.capture.recording_cases import Net, held, train

ROUNDS, COUNT, CLIP, SIGMA = 4, 400, 0.5, 3.0  # ε = 2.75 at δ = 1e-5
CLAIMED = 2.76


def clipped(moved: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    length = math.sqrt(sum(float(t.square().sum()) for t in moved.values()))
    return {name: t * min(1.0, CLIP / length) if length else t for name, t in moved.items()}


def run(folder: Path, noise: float = SIGMA, **options: Any) -> CanaryClients:
    """A federation with a trusted server: clip, sum, Gaussian noise, mean; as somebody may write it."""
    torch.manual_seed(0)
    model, dice = Net(), torch.Generator().manual_seed(1)
    canaries = CanaryClients(model, COUNT, clip=CLIP, claimed=CLAIMED, seed=7, **{"gaussian": True, **options})
    with Recorder(folder, module=model, canaries=canaries) as recorder:
        for _ in range(ROUNDS):
            start = copy.deepcopy(model.state_dict())
            total = {name: noise * CLIP * torch.randn(t.shape, generator=dice) for name, t in start.items()}
            with recorder.round(start):
                for number in range(2 + COUNT):
                    if number < 2:
                        model.load_state_dict(start)
                        train(model, held(number))
                        answer = model.state_dict()
                    else:
                        answer = canaries.update(number - 2, start)
                    moved = clipped({name: answer[name] - start[name] for name in start})
                    recorder.update(
                        f"site-{number}",
                        {name: start[name] + moved[name] for name in start},
                        canary=number - 2 if number > 1 else None,
                    )
                    total = {name: total[name] + moved[name] for name in total}
            model.load_state_dict({name: start[name] + total[name] / (2 + COUNT) for name in start})
        recorder.close(model.state_dict())
    return canaries


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("canaries") / "r"
    run(folder)
    return folder


def task() -> dict[str, Any]:
    return {"input_shape": (1, 8, 8), "mean": (0.5,), "std": (0.25,), "loss": "cross-entropy", "batch_norm": "eval"}


def test_a_canarys_update_is_read_and_not_kept(recorded: Path) -> None:
    transcript: Any = Transcript.load(recorded, Net(), task=task())
    assert transcript.updates == 2 * ROUNDS
    readings = transcript.canaries.readings
    coins = CanaryClients(Net(), COUNT, clip=CLIP, seed=7).coins
    torch.testing.assert_close(readings["updates"], coins.double().expand(ROUNDS, -1), rtol=0, atol=2e-4)
    assert {name: tuple(t.shape) for name, t in readings.items()} == {
        **dict.fromkeys(("updates", "sum", "models"), (ROUNDS, COUNT)),
        "final": (1, COUNT),
    }
    shown = (2 + COUNT) * readings["models"]  # the mean is over all of them
    assert float(shown[:, coins].mean() - shown[:, ~coins].mean()) == pytest.approx(1, abs=5 * SIGMA / 20 / 2)
    assert float(shown[:, ~coins].std()) == pytest.approx(SIGMA, rel=0.15)


def test_coins_stay_with_the_truth(recorded: Path, tmp_path: Path) -> None:
    assert truth_beside(recorded) == recorded / "truth"
    (recorded / "canaries.safetensors").rename(tmp_path / "away")
    changed = bytearray((tmp_path / "away").read_bytes())
    changed[-1] ^= 1
    (recorded / "canaries.safetensors").write_bytes(changed)
    try:
        with pytest.raises(CorruptTranscript, match="canaries"):
            Transcript.load(recorded, Net(), task=task())
    finally:
        (tmp_path / "away").rename(recorded / "canaries.safetensors")


def audited(folder: Path) -> Any:
    made: Any = fedaudit.audit_transcript(folder, attacks=["dp-canaries"], module=Net(), task=task(), seed=0)
    return made.result


@pytest.mark.slow
def test_a_sound_server_keeps_its_promise(recorded: Path) -> None:
    result = audited(recorded)
    found = result.findings[0].epsilon
    assert result.summaries[0].verdict == "not demonstrated"
    assert 0.1 < found.demonstrated < found.claimed == CLAIMED
    assert [one.covered for one in found.observers] == [False, False, True, True]
    assert not any("Gaussian" in note for note in result.findings[0].notes)


@pytest.mark.slow
def test_bounds_left_out_as_nobody_said_that_noise_is_gaussian_are_named(recorded: Path, tmp_path: Path) -> None:
    run(tmp_path / "r", gaussian=False)
    finding, known = audited(tmp_path / "r").findings[0], audited(recorded).findings[0]
    assert any("noise is Gaussian" in note for note in finding.notes)
    assert finding.epsilon.demonstrated < known.epsilon.demonstrated


@pytest.mark.slow
def test_a_server_that_forgets_its_noise_is_found(tmp_path: Path) -> None:
    run(tmp_path / "r", noise=0.0)
    summary = audited(tmp_path / "r").summaries[0]
    assert (summary.verdict, "promise is broken" in summary.headline) == ("inferred", True)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"count": 1}, "count from 2"),
        ({"count": 10.5}, "count is 10.5; give a whole number"),
        ({"clip": 0.0}, "clip above 0"),
        ({"where": "elsewhere"}, "local or central"),
        ({"claimed": float("inf")}, "claimed is inf"),
    ],
)
def test_settings_that_cant_work_are_refused(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(BadInput, match=reason):
        CanaryClients(Net(), **{"clip": 1.0, **options})


def test_a_canary_that_isnt_there_is_refused() -> None:
    canaries = CanaryClients(Net(), 3, clip=1.0)
    with pytest.raises(BadInput, match="from 0 to 2"):
        canaries.update(3, Net().state_dict())
    assert CanaryClients(Net(), 3, clip=1.0).seed != canaries.seed
