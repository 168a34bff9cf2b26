"""A malicious server: what it sends, what is recorded of it, and what it reads in the answer."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import fedaudit
from fedaudit.attacks import ImageFinding, make_attack
from fedaudit.attacks.active.imprint import edges
from fedaudit.report.advice import advice, command
from fedaudit.scenario.scenario import Scenario
from fedaudit.simulation.simulator import Recording
from fedaudit.transcript.observation import observe
from fedaudit.transcript.transcript import Transcript
from tests.attacks.server_cases import SERVERS, best_psnr
from tests.build import recorded

scenario = SERVERS["imprint"]
AVG: dict[str, Any] = {"algorithm": "fedavg", "batch_size": 8, "local_epochs": 2}
GOAL = 47.0  # dB, of Fowl et al.


def alone(pixels: Tensor, transcript: Transcript, units: int) -> Tensor:
    """Return which images are alone in their bin: the definition, from the truth and the biases that were sent."""
    weights = transcript.rounds[0].weights
    slope = weights["front.measure.weight"][:, 0].double() * math.prod(pixels.shape[1:])
    low = -weights["front.measure.bias"].double() / slope
    values = transcript.task_info.normalise(pixels).double().flatten(1).mean(dim=1)
    front = transcript.task_info.inserted
    assert front is not None
    width = torch.zeros(()) if front.limit is None else front.limit / slope
    top = torch.cat([low[1:], torch.full((1,), torch.inf)]) if front.limit is None else low + width
    inside = (values[:, None] > low) & (values[:, None] < top)
    assert inside.shape == (len(pixels), units)
    return inside.any(dim=1) & (inside[:, inside.sum(dim=0) == 1].any(dim=1))


def found_by(made: Scenario) -> tuple[Recording, Tensor, Tensor, Tensor]:
    recording = recorded(made)
    (seen,) = observe(recording.transcript, made.threat).split()
    finding = make_attack("imprint")(seen, generator=torch.Generator().manual_seed(0))
    assert isinstance(finding, ImageFinding)
    (true,) = recording.truth.inputs.values()
    (labels,) = recording.truth.labels.values()
    assert len(finding.images) == len(true)
    return recording, true, labels, finding.images


CUMULATIVE = {"name": "imprint", "units": 96, "spread": 0.15, "sparse": False}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "fedsgd, bounded units": ({}, {}),
    "fedsgd, cumulative units": ({"server": CUMULATIVE}, {}),
    "fedsgd, a sum of clients": ({"clients": 4, "batch_size": 12}, {"sees": "sum"}),
    "fedavg, two epochs": (AVG, {}),
    "fedavg, a sum of clients": ({**AVG, "clients": 4, "batch_size": 6}, {"sees": "sum"}),
}


@pytest.mark.parametrize("case", CASES)
def test_every_image_that_is_alone_in_its_bin_is_recovered(case):
    spec, threat = CASES[case]
    recording, true, _, images = found_by(scenario(spec, threat=threat))
    first = true.unique(dim=0) if "algorithm" in spec else true
    single = alone(first, recording.transcript, 96)
    psnr = best_psnr(first, images)
    assert len(first) == 48
    assert single.sum() > 10
    assert (psnr[single] >= GOAL).all(), psnr[single]
    mixed = ~single
    assert (psnr[mixed] < GOAL).float().mean() > 0.8, psnr[mixed]


def test_labels_come_with_the_images():
    made = scenario()
    recording = recorded(made)
    (seen,) = observe(recording.transcript, made.threat).split()
    finding = make_attack("imprint")(seen, generator=torch.Generator().manual_seed(0))
    assert isinstance(finding, ImageFinding)
    true, labels = recording.truth.inputs[0, 0], recording.truth.labels[0, 0]
    nearest = torch.cdist(finding.images.flatten(1), true.flatten(1)).argmin(dim=1)
    good = best_psnr(finding.images, true) >= GOAL
    assert (finding.labels[good] == labels[nearest[good]]).float().mean() > 0.95


@given(st.integers(2, 400), st.floats(-2, 2), st.floats(0.01, 3), st.booleans())
def test_bins_are_hit_equally_often(units, mean, spread, bounded):
    cut = edges(units, mean, spread, bounded=bounded)
    share = torch.special.ndtr((cut - mean) / spread).diff()
    assert len(share) == units
    expected = 1 / (units + 1) if bounded else 1 / units
    assert torch.allclose(share, torch.full_like(share, expected), rtol=1e-6, atol=1e-12)


def test_what_was_sent_is_recorded_and_survives_the_disk(tmp_path: Path):
    made = scenario({**AVG, "rounds": 2})
    recording = recorded(made)
    transcript = recording.transcript
    front = transcript.task_info.inserted
    assert front is not None
    assert front.units == 96
    first, second = (r.weights for r in transcript.rounds)
    for name in first:
        altered = name.startswith("front.measure")
        # the server goes on with its own model, and alters that anew
        assert first[name].equal(second[name]) == altered or "bn" in name or "front.back" in name, name
    moved = transcript.rounds[0].updates[0].tensors
    after = {n: first[n] + moved[n] for n in moved if n.startswith("body.")}
    assert all(torch.allclose(second[n], after[n]) for n in after)
    transcript.save(tmp_path / "kept")
    read = Transcript.load(tmp_path / "kept")
    assert read.task_info == transcript.task_info
    assert read.fingerprint() == transcript.fingerprint()
    assert read.digest() == transcript.digest()


def test_a_transcript_of_an_altered_model_is_attacked_as_it_lies_on_disk(tmp_path: Path):
    fedaudit.simulate(scenario({"examples": 16, "batch_size": 16}), out=tmp_path / "seen")
    audit = fedaudit.audit_transcript(
        tmp_path / "seen", ["imprint"], out=tmp_path / "out", progress=False, controls=False
    )
    assert audit.result.adversary.adversary == "malicious-server"
    assert advice(audit.result)[0].change.startswith("fedaudit check-model")
    assert command(audit.result, advice(audit.result)[0].change) == advice(audit.result)[0].change
    assert audit.result.adversary.acts
    assert [summary.attack for summary in audit.result.summaries] == ["imprint"]
    assert audit.result.summaries[0].verdict == "recovered"
    assert fedaudit.load_scenario(tmp_path / "out" / "scenario.yaml").threat.adversary == "malicious-server"
