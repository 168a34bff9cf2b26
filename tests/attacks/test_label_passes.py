"""Label inference where it is known that an update is of whole passes over so many examples."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import fedaudit
from fedaudit.attacks import LabelSetFinding, make_attack
from fedaudit.attacks.labels.attack import LabelFinding
from fedaudit.data import Dataset
from fedaudit.simulation.simulator import Recording
from fedaudit.transcript.observation import observe
from fedaudit.transcript.threat import ThreatModel
from fedaudit.utils.seeds import generator

DIGITS = load_digits()
IMAGES, CLASSES = torch.tensor(DIGITS.images / 16).float()[:, None], torch.tensor(DIGITS.target)


def net(outputs: int = 10) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 6, 3, padding=1), nn.Sigmoid(), nn.Flatten(), nn.Linear(384, outputs))


def simulated(data: Any, model: nn.Module, **federation: Any) -> Recording:
    plan = {"name": "g", "algorithm": "fedavg", "clients": 10, "batch_size": 1, "learning_rate": 0.01, **federation}
    return fedaudit.simulate({"federations": [plan]}, model=model, data=data, progress=False)


def found_in(recording: Recording, threat: ThreatModel | None = None, **settings: Any) -> list[tuple[Any, Tensor]]:
    """Return each update's finding, and the labels that it was made from."""
    pairs = []
    for seen in observe(recording.transcript, threat or ThreatModel()).split():
        found = make_attack("labels", settings)(seen, generator=generator(0, "labels"))
        assert isinstance(found, LabelFinding)
        pairs.append((found, recording.truth.labels[0, seen.messages[0].client]))
    return pairs


def right(pairs: list[tuple[Any, Tensor]]) -> float:
    counted = [(torch.bincount(f.labels, minlength=10), torch.bincount(true, minlength=10)) for f, true in pairs]
    return sum(float(torch.minimum(a, b).sum() / b.sum()) for a, b in counted) / len(counted)


@pytest.mark.parametrize("rate", [0.01, 0.1])
@pytest.mark.parametrize("local", [{"local_epochs": 10}, {"local_steps": 10}])
def test_ten_passes_over_one_image_are_ten_times_one_label(rate, local):
    recording = simulated((IMAGES, CLASSES), net(), examples=10, learning_rate=rate, **local)
    pairs = found_in(recording)
    assert all(len(found.labels) == 10 and len(found.labels.unique()) == 1 for found, _ in pairs)
    assert right(pairs) == 1
    assert (
        right(found_in(recording, method="yin")) == 1
    )  # it names no class twice, and so took no more uses than classes
    assert "10 passes over 1 example:" in " ".join(pairs[0][0].notes)


@pytest.mark.parametrize("batch", [1, 2, 3])
def test_of_few_images_each_label_counts_a_multiple_of_the_passes(batch):
    recording = simulated((IMAGES, CLASSES), net(), examples=30, batch_size=batch, local_epochs=5)
    pairs = found_in(recording)
    for found, _ in pairs:
        assert len(found.labels) == 15
        assert set((torch.bincount(found.labels) % 5).tolist()) == {0}
    assert right(pairs) >= 0.9


def test_nothing_is_supposed_of_passes_that_are_not_known_to_be_whole():
    """Ten uses of four examples; and training that nobody tells of: labels are counted as they come."""
    recording = simulated((IMAGES, CLASSES), net(), clients=5, examples=20, local_steps=10)
    assert all(len(found.labels) == 10 and "passes" not in str(found.notes) for found, _ in found_in(recording))
    assert any((torch.bincount(found.labels) == 1).any() for found, _ in found_in(recording))


def test_label_sets_of_several_passes_are_those_of_one():
    labels = torch.stack([(CLASSES // 2**i) % 2 for i in range(4)], dim=1).float()
    data = Dataset.from_tensors(IMAGES, labels, task="multi-label")
    recording = simulated(data, net(4), examples=10, local_epochs=10)
    for found, true in found_in(recording):
        assert isinstance(found, LabelSetFinding)
        assert found.method == "sign"
        assert found.labels.equal(true)
        assert found.counts.equal(true.sum(dim=0).double())


@pytest.mark.slow
def test_a_recorded_client_says_how_many_examples_it_holds(tmp_path: Path):
    model, loss = net(), nn.CrossEntropyLoss()
    with fedaudit.Recorder(tmp_path) as recorder, recorder.round(model.state_dict()):
        for client in range(4):
            local = copy.deepcopy(model)
            optimiser = torch.optim.SGD(local.parameters(), lr=0.05)
            rows = torch.arange(2 * client, 2 * client + 2)
            with recorder.capture() as seen:
                for _ in range(8):
                    for row in rows[torch.randperm(2)]:
                        optimiser.zero_grad()
                        loss(local(IMAGES[row][None]), CLASSES[row][None]).backward()
                        optimiser.step()
            recorder.update(f"c{client}", local.state_dict(), seen, num_examples=2)
    done = fedaudit.audit_transcript(tmp_path, ["labels"], module=net(), controls=False, progress=False)
    assert [f.label_accuracy for f in done.result.findings] == [1.0] * 4
