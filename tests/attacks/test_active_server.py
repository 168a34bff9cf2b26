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
from fedaudit.pipeline.prepare import resolve
from fedaudit.report.advice import advice, command
from fedaudit.scenario.scenario import Scenario, scenario_from
from fedaudit.simulation.simulator import Recording, simulate
from fedaudit.transcript.observation import observe
from fedaudit.transcript.threat import ThreatModel
from fedaudit.transcript.transcript import Transcript
from fedaudit.utils.errors import BadInput, NotApplicable
from tests.attacks.server_cases import best_psnr, played

SERVER: dict[str, Any] = {"name": "imprint", "units": 96, "spread": 0.15}
SGD: dict[str, Any] = {"algorithm": "fedsgd", "clients": 1, "examples": 48, "batch_size": 48}
AVG: dict[str, Any] = {"algorithm": "fedavg", "clients": 1, "examples": 48, "batch_size": 8, "local_epochs": 2}
GOAL = 47.0  # dB, of Fowl et al.


def scenario(spec: dict[str, Any], server: Any = SERVER, **rest: Any) -> Scenario:
    threat = {"adversary": "malicious-server"} | rest.pop("threat", {})
    values = {"data": {"name": "digits"}, "model": {"name": "convnet-small", "width": 4}, "attacks": ["imprint"]}
    return scenario_from({**values, "federations": [{"name": "f", "server": server, **spec}], "threat": threat, **rest})


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
    recording = played(made)
    (seen,) = observe(recording.transcript, made.threat).split()
    finding = make_attack("imprint")(seen, generator=torch.Generator().manual_seed(0))
    assert isinstance(finding, ImageFinding)
    (true,) = recording.truth.inputs.values()
    (labels,) = recording.truth.labels.values()
    assert len(finding.images) == len(true)
    return recording, true, labels, finding.images


CASES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "fedsgd, bounded units": (SGD, SERVER, {}),
    "fedsgd, cumulative units": (SGD, {**SERVER, "sparse": False}, {}),
    "fedsgd, a sum of clients": ({**SGD, "clients": 4, "batch_size": 12}, SERVER, {"sees": "sum"}),
    "fedavg, two epochs": (AVG, SERVER, {}),
    "fedavg, a sum of clients": ({**AVG, "clients": 4, "batch_size": 6}, SERVER, {"sees": "sum"}),
}


@pytest.mark.parametrize("case", CASES)
def test_every_image_that_is_alone_in_its_bin_is_recovered(case):
    spec, server, threat = CASES[case]
    recording, true, _, images = found_by(scenario(spec, server, threat=threat))
    first = true.unique(dim=0) if spec["algorithm"] == "fedavg" else true
    single = alone(first, recording.transcript, server["units"])
    psnr = best_psnr(first, images)
    assert len(first) == 48
    assert single.sum() > 10
    assert (psnr[single] >= GOAL).all(), psnr[single]
    mixed = ~single
    assert (psnr[mixed] < GOAL).float().mean() > 0.8, psnr[mixed]


def test_labels_come_with_the_images():
    made = scenario(SGD)
    recording = played(made)
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


def test_public_examples_tell_where_the_bins_are():
    made = scenario(SGD, {**SERVER, "spread": 5.0}, threat={"knows_public_data": True, "public_examples": 200})
    recording, true, _, images = found_by(made)
    blind = found_by(scenario(SGD, {**SERVER, "spread": 5.0}))[3]
    assert (best_psnr(true, images) >= GOAL).sum() > (best_psnr(true, blind) >= GOAL).sum() + 5
    held = made.federations[0].examples
    assert held == 48
    assert recording.transcript.records is None


def test_what_was_sent_is_recorded_and_survives_the_disk(tmp_path: Path):
    made = scenario({**AVG, "rounds": 2})
    recording = played(made)
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


def test_an_honest_server_sends_what_it_has():
    honest = played(scenario_from({**scenario(SGD).model_dump(), "federations": [{"name": "f", **SGD}], "threat": {}}))
    assert honest.transcript.task_info.inserted is None
    assert not any(name.startswith("front.") for name in honest.transcript.rounds[0].weights)
    (seen,) = observe(honest.transcript, ThreatModel()).split()
    with pytest.raises(NotApplicable, match="server: imprint"):
        make_attack("imprint").check(seen)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"threat": {"adversary": "server"}}, "set threat.adversary: malicious-server"),
        ({"server": None}, "no federation says what it does"),
        ({"server": {"name": "imprimt"}}, "imprint"),
        ({"server": {"name": "imprint", "units": 1}}, "2 to"),
        ({"server": {"name": "imprint", "unit": 3}}, "units"),
        ({"spec": AVG, "server": {"name": "imprint", "sparse": False}}, "sparse: true"),
        ({"data": {"name": "notes"}, "model": {"name": "decoder"}}, "real values"),
        ({"threat": {"knows_public_data": True, "public_examples": 10**6}}, "nobody's"),
    ],
)
def test_what_can_not_be_is_refused(changes, says):
    spec, server = changes.pop("spec", SGD), changes.pop("server", SERVER)
    with pytest.raises(BadInput, match=says):
        resolve(scenario({**spec, "examples": 8}, server, **changes))


def test_attacks_are_chosen_and_the_same_bits_come_twice():
    made = resolve(scenario(SGD, attacks=None))
    assert "imprint" in [attack.name for attack in made.scenario.attacks]
    assert simulate(made.federations[0]).transcript.digest() == simulate(made.federations[0]).transcript.digest()


def test_a_transcript_of_an_altered_model_is_attacked_as_it_lies_on_disk(tmp_path: Path):
    fedaudit.simulate(scenario({**SGD, "examples": 16, "batch_size": 16}), out=tmp_path / "seen")
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
