"""Regression as loops write it: targets of shape (n,) beside outputs of shape (n, 1), in recordings and simulations."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import fedaudit
from fedaudit import BadInput

ROWS = torch.randn(60, 4, generator=torch.Generator().manual_seed(1))
VALUES = ROWS.sum(dim=1).sin()


def net(outputs: int = 1) -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, outputs))


def recorded(folder: Any, loss: Callable[[Tensor, Tensor], Tensor], targets: Tensor = VALUES, outputs: int = 1) -> Any:
    model, recorder = net(outputs), fedaudit.Recorder(folder)
    with recorder.round(model.state_dict()):
        for client in range(2):
            local, rows = copy.deepcopy(model), slice(4 * client, 4 * client + 4)
            with recorder.capture() as seen:
                optimiser = torch.optim.SGD(local.parameters(), lr=0.1)
                loss(local(ROWS[rows]), targets[rows]).backward()
                optimiser.step()
            recorder.update(client, local.state_dict(), seen, num_examples=4)
    recorder.close()
    return seen


WAYS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "squeeze(1)": lambda z, y: functional.mse_loss(z.squeeze(1), y),
    "squeeze()": lambda z, y: functional.mse_loss(z.squeeze(), y),
    "flatten()": lambda z, y: functional.mse_loss(z.flatten(), y),
    "a column": lambda z, y: functional.mse_loss(z, y[:, None]),
    "[:, 0]": lambda z, y: functional.mse_loss(z[:, 0], y),
}


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_a_recorded_regression_is_repeated_whatever_the_targets_shape(way, tmp_path):
    recorded(tmp_path / "r", WAYS[way])
    done = fedaudit.audit_transcript(
        tmp_path / "r", [{"name": "tableak", "iterations": 1, "restarts": 1}], module=net(),
        controls=False, progress=False,
    )  # fmt: skip
    assert done.result.federations[0].replay_error == pytest.approx(0, abs=1e-6)


def test_a_broadcast_by_mistake_is_named(tmp_path):
    with pytest.warns(UserWarning, match="broadcast"):
        seen = recorded(tmp_path / "r", functional.mse_loss)
    assert any("different shapes, (4, 1) and (4,)" in note for note in seen.notes)
    with pytest.raises(BadInput, match="own loss; give it"):
        fedaudit.attack(tmp_path / "r", ["tableak"], module=net(), progress=False)


FOURTEEN = torch.stack([VALUES * k for k in range(1, 15)], dim=1)
MORE: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], Tensor, str]] = {
    "numbers": (functional.mse_loss, FOURTEEN, "regression"),
    "labels": (functional.binary_cross_entropy_with_logits, (FOURTEEN > 0).float(), "multi-label"),
    "weighed labels": (nn.BCEWithLogitsLoss(pos_weight=torch.arange(1.0, 15)), (FOURTEEN > 0).float(), "multi-label"),
}


@pytest.mark.slow
@pytest.mark.parametrize("what", MORE)
def test_fourteen_numbers_or_labels_are_recorded_and_repeated(what, tmp_path):
    loss, targets, task = MORE[what]
    recorded(tmp_path / "r", loss, targets, outputs=14)
    transcript = fedaudit.Transcript.load(tmp_path / "r", net(14))
    assert (transcript.task_info.task, transcript.task_info.num_targets) == (task, 14)
    weights = transcript.task_info.class_weights
    assert weights == (tuple(range(1, 15)) if what == "weighed labels" else None)
    done = fedaudit.audit_transcript(
        tmp_path / "r", [{"name": "tableak", "iterations": 1, "restarts": 1}], module=net(14),
        controls=False, progress=False,
    )  # fmt: skip
    assert done.result.federations[0].replay_error == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize(
    ("own", "plain"),
    [
        (lambda z, y: functional.mse_loss(z.squeeze(1), y), functional.mse_loss),
        (lambda z, y: functional.l1_loss(z.squeeze(1), y), functional.l1_loss),
        (lambda z, y: (z[:, 0] - y).abs().pow(1.5).mean(), lambda z, y: (z - y).abs().pow(1.5).mean()),
        (lambda z, y: (z - y).abs().pow(1.5).sum(), lambda z, y: (z - y).abs().pow(1.5).sum()),
        (lambda z, y: functional.mse_loss(z.squeeze(1), y).sqrt(), lambda z, y: functional.mse_loss(z, y).sqrt()),
        (lambda z, y: functional.mse_loss(z, y).sqrt(), lambda z, y: functional.mse_loss(z, y).sqrt()),
        (
            lambda z, y: (y.exp() * (z.squeeze() - y) ** 2).sum() / y.exp().sum(),
            lambda z, y: (y.exp() * (z - y) ** 2).sum() / y.exp().sum(),
        ),
    ],
)
def test_a_simulated_loss_gets_targets_in_the_shape_that_it_takes(own, plain):
    federation = [{"name": "f", "clients": 1, "examples": 6, "batch_size": 6}]
    recording = fedaudit.simulate(
        {"federations": federation}, model=net(), data=(ROWS, VALUES), loss=own, progress=False
    )
    inputs, targets = recording.truth.inputs[0, 0], recording.truth.labels[0, 0]
    model = net()
    wanted = torch.autograd.grad(plain(model(inputs), targets), list(model.parameters()))
    for sent, oracle in zip(recording.transcript.rounds[0].updates[0].tensors.values(), wanted, strict=True):
        torch.testing.assert_close(sent, oracle)


def test_why_no_example_was_recorded_is_said(tmp_path):
    recorder = fedaudit.Recorder(tmp_path / "r")
    net = nn.Sequential(nn.Flatten(), nn.Linear(8, 3))
    with recorder.round(net.state_dict()):
        with recorder.capture() as seen:
            optimiser = torch.optim.SGD(net.parameters(), lr=0.1)
            functional.cross_entropy(net(torch.rand(4, 1, 2, 2, 2, 1)), torch.arange(4) % 3).backward()
            optimiser.step()
        recorder.update("a", net.state_dict(), seen, num_examples=4)
    recorder.close()
    with pytest.raises(BadInput, match=r"\(4, 1, 2, 2, 2, 1\)"):
        fedaudit.attack(tmp_path / "r", ["labels"], module=net, progress=False)


def test_whole_numbers_that_the_model_scales_are_to_be_floats_before(tmp_path):
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(64, 3)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.linear((x.float() / 255).flatten(1))
            return out

    recorder = fedaudit.Recorder(tmp_path / "r")
    net = Scaled()
    with recorder.round(net.state_dict()):
        with recorder.capture() as seen:
            optimiser = torch.optim.SGD(net.parameters(), lr=0.1)
            images = torch.arange(256, dtype=torch.uint8).reshape(4, 1, 8, 8)
            functional.cross_entropy(net(images), torch.arange(4) % 3).backward()
            optimiser.step()
        recorder.update("a", net.state_dict(), seen, num_examples=4)
    recorder.close()
    with pytest.raises(
        BadInput, match=r"whole numbers of shape \(4, 1, 8, 8\).*give the model floats: convert"
    ) as told:
        fedaudit.attack(tmp_path / "r", ["labels"], module=net, progress=False)
    assert "Unflatten" not in str(told.value)
