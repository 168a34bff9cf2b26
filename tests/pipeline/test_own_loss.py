"""A user's own loss is read once, in one way, wherever it comes from: what it computes counts."""

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import fedaudit
from fedaudit import BadInput
from fedaudit.attacks.labels.attack import LabelFinding
from fedaudit.task.losses import recognise

WEIGHTS = torch.tensor([1.0, 1.0, 1.0, 20.0, 20.0])
SOURCE = torch.Generator().manual_seed(0)
INPUTS = torch.rand(120, 1, 6, 6, generator=SOURCE)
LABELS = torch.randint(5, (120,), generator=SOURCE)
FEDERATION = [{"name": "f", "clients": 3, "examples": 24, "batch_size": 12}]


class Focal(nn.Module):
    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        each = functional.cross_entropy(outputs, targets, reduction="none")
        return ((1 - (-each).exp()) ** 2 * each).mean()


def net() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 5))


def weighted(outputs: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(outputs, targets, weight=WEIGHTS)


PLAIN: tuple[Any, ...] = ("cross-entropy", 0.0, None, False)
WEIGHTED: tuple[Any, ...] = ("cross-entropy", 0.0, tuple(WEIGHTS.tolist()), False)
FORMS: dict[str, tuple[Any, tuple[Any, ...] | None]] = {
    "module": (nn.CrossEntropyLoss(), PLAIN),
    "weights": (nn.CrossEntropyLoss(weight=WEIGHTS), WEIGHTED),
    "a function": (weighted, WEIGHTED),
    "partial": (partial(functional.cross_entropy, weight=WEIGHTS), WEIGHTED),
    "smoothing": (nn.CrossEntropyLoss(label_smoothing=0.3), ("cross-entropy", 0.3, None, False)),
    "sum": (nn.CrossEntropyLoss(reduction="sum"), ("cross-entropy", 0.0, None, True)),
    "sum by hand": (lambda z, y: functional.cross_entropy(z, y) * len(y), ("cross-entropy", 0.0, None, True)),
    "weighted sum": (nn.CrossEntropyLoss(weight=WEIGHTS, reduction="sum"), (*WEIGHTED[:3], True)),
    "log-probabilities": (lambda z, y: functional.nll_loss(z.log_softmax(1), y), PLAIN),
    "focal": (Focal(), None),
    "twice": (lambda z, y: 2 * functional.cross_entropy(z, y), None),
    "ignored class": (nn.CrossEntropyLoss(ignore_index=3), None),
    "of something else": (lambda z, y: functional.cross_entropy(z / 2, y), None),
    "no number": (nn.CrossEntropyLoss(reduction="none"), None),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_loss_is_what_it_computes(form):
    loss, wanted = FORMS[form]
    found = recognise(loss, 5, 5)
    assert (None if found is None else tuple(found)) == wanted


@pytest.mark.parametrize("loss", [nn.MSELoss(), functional.mse_loss, lambda z, y: functional.mse_loss(z, y)])
def test_squares_are_named(loss):
    assert recognise(loss, 1, None) == ("mse", 0.0, None, False)


@pytest.mark.parametrize("form", ["weights", "a function", "smoothing", "sum", "weighted sum"])
def test_simulated_clients_minimise_it_and_their_labels_are_told(form):
    loss, wanted = FORMS[form]
    recording = fedaudit.simulate(
        {"federations": FEDERATION}, model=net(), data=(INPUTS, LABELS), loss=loss, progress=False
    )
    info = recording.transcript.task_info
    assert (info.loss, info.label_smoothing, info.class_weights, info.summed) == wanted
    for update in recording.transcript.rounds[0].updates:
        key = (0, update.client)
        inputs, labels = info.normalise(recording.truth.inputs[key]), recording.truth.labels[key]
        model = net()
        own = torch.autograd.grad(loss(model(inputs), labels), list(model.parameters()))
        for sent, oracle in zip(update.tensors.values(), own, strict=True):
            torch.testing.assert_close(sent, oracle)
    found = fedaudit.attack(recording, ["labels"], progress=False)
    for run, labels in zip(found, recording.truth.labels.values(), strict=True):
        assert isinstance(run, LabelFinding)
        wrong = torch.bincount(run.labels, minlength=5) - torch.bincount(labels, minlength=5)
        assert int(wrong.abs().sum()) <= 2  # one of twelve may be taken for another class


def test_a_loss_of_ones_own_is_said_to_be_taken_for_another():
    recording = fedaudit.simulate(
        {"federations": FEDERATION}, model=net(), data=(INPUTS, LABELS), loss=Focal(), progress=False
    )
    assert recording.transcript.task_info.loss == "custom"
    (run, *_) = fedaudit.attack(recording, ["labels"], progress=False)
    assert isinstance(run, LabelFinding)
    assert any("as if it were the mean cross-entropy" in note for note in run.notes)


def test_a_recorded_loss_that_is_given_again_keeps_its_options(tmp_path):
    loss = nn.CrossEntropyLoss(weight=WEIGHTS)
    model, recorder = net(), fedaudit.Recorder(tmp_path / "r")
    with recorder.round(model.state_dict()):
        local = copy.deepcopy(model)
        with recorder.capture() as seen:
            optimiser = torch.optim.SGD(local.parameters(), lr=0.1)
            loss(local(INPUTS[:8]), LABELS[:8]).backward()
            optimiser.step()
        recorder.update("a", local.state_dict(), seen, num_examples=8)
    recorder.close()
    for given in (None, loss, weighted):
        info = fedaudit.Transcript.load(tmp_path / "r", net(), given).task_info
        assert (info.loss, info.label_smoothing, info.class_weights, info.summed) == WEIGHTED


def test_a_simulation_is_read_with_its_loss_or_without_and_with_no_other(tmp_path):
    loss = nn.CrossEntropyLoss(weight=WEIGHTS)
    fedaudit.simulate(
        {"federations": FEDERATION}, model=net(), data=(INPUTS, LABELS), loss=loss, out=tmp_path / "t", progress=False
    )
    for given in (None, loss, weighted):
        assert fedaudit.Transcript.load(tmp_path / "t", net(), given).task_info.class_weights == WEIGHTED[2]
    with pytest.raises(BadInput, match=r"loss that was given is .*; leave it out"):
        fedaudit.Transcript.load(tmp_path / "t", net(), Focal())
