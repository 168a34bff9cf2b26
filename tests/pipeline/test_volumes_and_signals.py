"""Audits of volumes and signals, from a user's arrays to the page; recordings of them; known examples of one's own."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import fedaudit
from fedaudit.attacks import make_attack
from fedaudit.attacks.inversion.calibration import psnr_of
from fedaudit.capture import Recorder
from fedaudit.data import Dataset
from fedaudit.pipeline.calibrations import own_images
from fedaudit.pipeline.prepare import AuditRequest, spell_out
from fedaudit.scenario.scenario import scenario_from
from fedaudit.simulation.simulator import Recording
from fedaudit.transcript.observation import observe
from fedaudit.transcript.threat import ThreatModel
from fedaudit.transcript.transcript import Transcript
from fedaudit.transcript.truth import Truth, save_recording
from fedaudit.utils.seeds import generator
from tools.measure.nulls import ecgs, scans

SIDES = {"volume": (1, 6, 12, 12), "signal": (3, 96)}
WORDS = {"volume": "volumes", "signal": "signals"}


def arrays(kind: str) -> tuple[Tensor, Tensor]:
    """Return what a user has: CT-like whole numbers without an axis of channels, or ECGs in volts."""
    inputs, labels = (scans if kind == "volume" else ecgs)(60, generator(0, "arrays"))
    return ((inputs[:, 0] * 4095 - 1024).round().to(torch.int16) if kind == "volume" else inputs), labels


def net(kind: str) -> nn.Module:
    """Return a network of the user's own, with convolutions of as many axes as the examples have."""
    torch.manual_seed(0)
    if kind == "volume":
        first = nn.Conv3d(1, 8, 3, stride=2, padding=1)
        return nn.Sequential(first, nn.Sigmoid(), nn.Flatten(), nn.Linear(8 * 3 * 6 * 6, 2))
    return nn.Sequential(nn.Conv1d(3, 16, 5, stride=2, padding=2), nn.Sigmoid(), nn.Flatten(), nn.Linear(16 * 48, 2))


def recorded(kind: str) -> Recording:
    federations = [{"name": "f", "clients": 2, "examples": 2, "batch_size": 1}]
    return fedaudit.simulate(
        {"federations": federations}, data=arrays(kind), kind=kind, model=net(kind), progress=False
    )


@pytest.mark.slow
@pytest.mark.parametrize("kind", SIDES)
def test_an_audit_goes_from_a_user_s_arrays_to_the_page(kind: str, tmp_path: Path):
    finished = fedaudit.audit(
        data=arrays(kind),
        kind=kind,
        model=net(kind),
        federations=[{"name": "f", "clients": 2, "examples": 2, "batch_size": 1}],
        attacks=[{"name": "invg", "iterations": 300 if kind == "volume" else 150}],
        out=tmp_path,
        progress=False,
    )
    result = finished.result
    assert (result.data.kind, tuple(result.data.input_shape)) == (kind, SIDES[kind])
    assert result.scenario["data"]["kind"] == kind
    (summary,) = result.summaries
    assert summary.verdict == "recovered"
    assert f"2 of 2 {WORDS[kind]} came out visibly" in summary.verdict_text
    assert f"training {WORDS[kind]}" in summary.headline
    likeness = summary.ssim if kind == "volume" else summary.correlation
    assert likeness is not None
    assert likeness.mean > 0.8
    assert (summary.ssim is None) == (kind == "signal")
    for image in (i for f in result.findings for i in f.images):
        assert (tmp_path / image.true_image).is_file()
        assert (tmp_path / image.reconstruction).read_bytes() != (tmp_path / image.true_image).read_bytes()
    page = (tmp_path / "report.html").read_text()
    assert f"True and reconstructed {WORDS[kind]}" in page
    assert ("axial" in page) == (kind == "volume")
    assert ("thin and blue" in page) == (kind == "signal")
    assert ('<th scope="col" class="n">Correlation' in page) == (kind == "signal")
    assert f"Mean {kind} <small>baseline" in page
    again = fedaudit.verify(tmp_path, data=arrays(kind), model=net(kind), progress=False)
    assert again.differences == []


@pytest.mark.parametrize("kind", SIDES)
def test_a_transcript_and_its_truth_are_written_and_read(kind: str, tmp_path: Path):
    made = recorded(kind)
    save_recording(made.transcript, made.truth, tmp_path / "t")
    info = Transcript.load(tmp_path / "t", net(kind)).task_info
    assert (info.kind, info.input_shape) == (kind, SIDES[kind])
    known = Truth.load(tmp_path / "t/truth.safetensors")
    for key, inputs in made.truth.inputs.items():
        assert torch.equal(known.inputs[key], inputs)


@pytest.mark.parametrize("kind", SIDES)
def test_a_federation_that_runs_is_recorded_and_audited(kind: str, tmp_path: Path):
    inputs, labels = arrays(kind)
    data = Dataset.from_tensors(inputs, labels, kind=kind)
    model = net(kind)
    start = copy.deepcopy(model.state_dict())
    with Recorder(tmp_path / "r") as recorder, recorder.round(start):
        for client in range(2):
            model.load_state_dict(start)
            optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
            with recorder.capture() as seen:
                outputs = model(data.train.inputs[client, None])
                nn.functional.cross_entropy(outputs, data.train.targets[client, None]).backward()
                optimiser.step()
                optimiser.zero_grad()
            recorder.update(f"site-{client}", model.state_dict(), seen)
    finished = fedaudit.audit_transcript(
        tmp_path / "r", module=net(kind), attacks=[{"name": "invg", "iterations": 2}], progress=False
    )
    assert finished.result.data.kind == kind
    (record,) = finished.result.federations
    assert record.recording is not None
    assert [replay.error for replay in record.recording.replays] == [0.0, 0.0]
    assert [len(f.images) for f in finished.result.findings] == [1, 1]
    assert {f.example_noun for f in finished.result.findings} == {WORDS[kind]}


@pytest.mark.parametrize("kind", SIDES)
def test_an_audit_that_names_no_attack_searches_for_the_examples(kind: str):
    federations = [{"name": "f", "clients": 2, "examples": 4, "batch_size": 4}]
    data = Dataset.from_tensors(*arrays(kind), kind=kind)
    spec = {"data": {"name": "custom", "split": "train"}, "model": {"name": "custom", "initialisation": "given"}}
    made = scenario_from({**spec, "federations": federations})
    found = spell_out(AuditRequest(scenario=made, dataset=data, model=net(kind))).scenario
    assert {attack.name for attack in found.attacks} & {"invg", "agic", "agic-plus"}


@pytest.mark.parametrize("kind", SIDES)
def test_known_examples_of_one_s_own_are_made_up(kind: str):
    seen = observe(recorded(kind).transcript, ThreatModel()).split()[0]
    tried, held_out = (own_images(seen, held_out=part) for part in (False, True))
    assert tried.source == f"made-up {WORDS[kind]}"
    assert tried.inputs.shape[1:] == SIDES[kind]
    assert not any(torch.equal(a, b) for a in tried.inputs for b in held_out.inputs)
    assert seen.task_info.example_kind.fault(tried.inputs) is None
    assert len(tried.labels_for(seen)) == len(tried.inputs)


def test_an_attack_is_calibrated_on_signals_whatever_their_unit():
    """In volts all errors of an ECG are so small that a PSNR of the values themselves would tell nothing apart."""
    seen = observe(recorded("signal").transcript, ThreatModel()).split()[0]
    own = own_images(seen).inputs
    assert min(psnr_of(torch.zeros_like(own[:4]), own[:4])) == 60
    attack = make_attack("invg", {"iterations": 40})
    fitted = attack.calibrated(seen, own, updates=6)  # type: ignore[attr-defined]
    assert not fitted.calibrate


@pytest.mark.parametrize(
    ("name", "settings"),
    [("cpl", {"iterations": 3}), ("dlg", {"iterations": 2}), ("invg", {"iterations": 3, "clamp": True})],
)
@pytest.mark.parametrize("kind", SIDES)
def test_starts_and_bounds_are_of_any_number_of_axes(kind: str, name: str, settings: dict[str, int]):
    seen = observe(recorded(kind).transcript, ThreatModel()).split()[0]
    found = make_attack(name, settings)(seen)
    assert found.images.shape == (1, *SIDES[kind])  # type: ignore[attr-defined]
    assert seen.task_info.example_kind.fault(found.images) is None  # type: ignore[attr-defined]
