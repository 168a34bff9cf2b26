"""What users bring from torchvision, MONAI, timm and segmentation-models-pytorch: audited, or refused in a line."""

from __future__ import annotations

import math
import time
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional

import fedaudit
from fedaudit.utils.machine import import_torchvision, own_process, peak_memory, start_measuring_memory
from tests.models.architectures import HEADER, PAGE, TABLE, Architecture, Outcome, played, row

REFUSED = {  # the way forward that a refusal names, by architecture and way
    "googlenet": {"simulated": "model.eval()", "recorded": "wrap it"},
    "lraspp_mobilenet_v3_large": {"simulated": "wrap it", "recorded": "wrap it"},
}
MOST_SECONDS, MOST_MEMORY = 60, 3 * 1024  # of this process's own work; MiB


@pytest.fixture(scope="module")
def _libraries() -> None:
    if any(find_spec(name) is None for name in ("torchvision", "monai", "timm", "segmentation_models_pytorch")):
        pytest.skip("the libraries aren't installed: pip install 'PATH_OF_THE_CLONE[bench]'")
    own_process()
    import_torchvision()


def rows_of_the_page() -> list[str]:
    lines = PAGE.read_text().splitlines()
    first = lines.index(HEADER[0])
    assert lines[first + 1] == HEADER[1]
    return lines[first + 2 : first + 2 + len(TABLE)]


def test_the_page_has_a_line_for_each() -> None:
    rows = rows_of_the_page()
    assert [line.split(" | ")[:2] for line in rows] == [[f"| {one.title}", one.examples] for one in TABLE]
    assert len(TABLE) == 20


def gradient(one: Architecture, recording: fedaudit.Recording) -> dict[str, torch.Tensor]:
    """Return what torch alone says of the one client's update: BatchNorm as in training, no dropout."""
    model = one.make().eval()
    for part in model.modules():
        part.train(isinstance(part, nn.modules.batchnorm._BatchNorm))
    info = recording.transcript.task_info
    outputs = model(info.normalise(recording.truth.inputs[0, 0]))
    functional.cross_entropy(outputs, recording.truth.labels[0, 0]).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def check_simulated(one: Architecture, recording: fedaudit.Recording) -> None:
    (update,) = recording.transcript.rounds[0].updates
    wanted = gradient(one, recording)
    assert wanted.keys() <= update.tensors.keys()
    length = math.sqrt(sum(float(g.square().sum()) for g in wanted.values()))
    assert length > 1e-3
    for name, sent in update.tensors.items():
        assert float((sent - wanted.get(name, 0)).norm()) <= 1e-4 * length, name


def check_audits(one: Architecture, outcome: Outcome) -> None:
    for way, audit in outcome.audits.items():
        (summary,), (finding,) = audit.result.summaries, audit.result.findings
        assert finding.status == "done", finding.reason
        assert len(finding.images) == (2 if way == "simulated" else 4)
        assert summary.verdict not in ("recovered", "not applicable"), summary  # of noise, by two iterations
        assert all(math.isfinite(image.psnr) for image in finding.images if image.psnr is not None)
    if "recorded" in outcome.audits:
        (federation,) = outcome.audits["recorded"].result.federations
        assert federation.recording is not None
        assert federation.recording.facts == "verified"
        assert [r.error is not None and r.error < 1e-6 for r in federation.recording.replays] == [True]


@pytest.mark.peers
@pytest.mark.usefixtures("_libraries")
@pytest.mark.parametrize("number", range(len(TABLE)), ids=[one.title.replace("`", "") for one in TABLE])
def test_an_architecture_is_audited_or_refused(number: int, tmp_path: Path) -> None:
    one = TABLE[number]
    started, before = time.process_time(), start_measuring_memory()
    outcome = played(one, tmp_path / "recording")
    assert time.process_time() - started < MOST_SECONDS
    assert (peak_memory(before) or 0) < MOST_MEMORY
    ways = REFUSED.get(one.name, {})
    assert outcome.refusals.keys() == ways.keys(), outcome.refusals
    for way, remedy in ways.items():
        assert remedy in outcome.refusals[way]
    if outcome.simulated is not None:
        check_simulated(one, outcome.simulated)
    check_audits(one, outcome)
    assert row(one, outcome) == rows_of_the_page()[number]
