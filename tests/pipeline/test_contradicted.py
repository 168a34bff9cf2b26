"""Where a recorded training, repeated, gives another update: the advice says what it looks like, and what to do."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import fedaudit

INPUTS = torch.rand(8, 1, 8, 8, generator=torch.Generator().manual_seed(1))
LABELS = torch.tensor([0, 0, 0, 1, 2, 2, 3, 3])
State = dict[str, Tensor]


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 4))


def step(model: nn.Module, loss: Callable[[Tensor, Tensor], Tensor] = cross_entropy) -> None:
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    loss(model(INPUTS), LABELS).backward()
    optimiser.step()


def sharpness_aware(model: nn.Module) -> None:
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    cross_entropy(model(INPUTS), LABELS).backward()
    moves = [0.5 * p.grad for p in model.parameters() if p.grad is not None]
    with torch.no_grad():
        for p, move in zip(model.parameters(), moves, strict=True):
            p.add_(move)
    optimiser.zero_grad()
    cross_entropy(model(INPUTS), LABELS).backward()
    with torch.no_grad():
        for p, move in zip(model.parameters(), moves, strict=True):
            p.sub_(move)
    optimiser.step()


def audited(
    folder: Path,
    train: Callable[[nn.Module], None],
    change: Callable[[State], State] = lambda moved: moved,
    **known: Any,
) -> Any:
    model = net()
    with fedaudit.Recorder(folder) as recorder, recorder.round(model.state_dict()):
        local = copy.deepcopy(model)
        with recorder.capture() as seen:
            train(local)
        start = model.state_dict()
        moved = change({name: value - start[name] for name, value in local.state_dict().items()})
        recorder.update("a", {name: start[name] + moved[name] for name in start}, seen, num_examples=8)
    attacks: list[Any] = [{"name": "invg", "iterations": 1}, "labels"]
    done = fedaudit.audit_transcript(folder, attacks, module=net(), controls=False, progress=False, **known)
    return done.result


def advice(result: Any) -> str:
    return " ".join(text for summary in result.summaries for text in summary.advice)


def clipped(moved: State) -> State:
    length = math.sqrt(sum(float(t.square().sum()) for t in moved.values()))
    return {name: 0.01 * t / length for name, t in moved.items()}


def noisy(moved: State) -> State:
    dice = torch.Generator().manual_seed(3)
    return {name: t + 0.05 * torch.randn(t.shape, generator=dice) for name, t in moved.items()}


def test_clipping_is_told_by_its_norm(tmp_path):
    assert "clipping to a norm of 0.01, or another learning rate" in advice(audited(tmp_path / "r", step, clipped))


def test_noise_is_told_by_its_standard_deviation(tmp_path):
    said = advice(audited(tmp_path / "r", step, noisy))
    found = re.search(r"noise of standard deviation ([\d.]+)", said)
    assert found is not None
    assert float(found[1]) == pytest.approx(0.05, rel=0.1)
    assert "clipping" not in said
    assert "learning rate" not in said


def test_noise_after_clipping_is_told_with_the_factor(tmp_path):
    def both(moved: State) -> State:
        dice = torch.Generator().manual_seed(3)
        return {name: 0.5 * t + 1e-3 * torch.randn(t.shape, generator=dice) for name, t in moved.items()}

    said = advice(audited(tmp_path / "r", step, both))
    found = re.search(r"noise of standard deviation ([\d.]+), after clipping by a factor of ([\d.]+)", said)
    assert found is not None
    assert [float(value) for value in found.groups()] == pytest.approx([1e-3, 0.5], rel=0.1)


def test_other_wrong_facts_are_neither(tmp_path):
    def stale(moved: State) -> State:
        return {name: t if name.startswith("1.") else 3 * t for name, t in moved.items()}

    said = advice(audited(tmp_path / "r", step, stale))
    assert "learning rate, momentum, steps, BatchNorm) is wrong" in said


def test_a_step_of_several_gradients_is_told_as_such(tmp_path):
    said = advice(audited(tmp_path / "r", sharpness_aware))
    assert "SAM and L-BFGS take more than one gradient a step" in said
    assert "noise" not in said


def focal(outputs: Tensor, targets: Tensor) -> Tensor:
    each = cross_entropy(outputs, targets, reduction="none")
    return ((1 - torch.exp(-each)) ** 2 * each).mean()


def gathered(outputs: Tensor, targets: Tensor) -> Tensor:
    return -outputs.log_softmax(1).gather(1, targets[:, None]).mean()


def test_a_loss_of_ones_own_is_asked_for_and_repeated_where_it_is_given(tmp_path):
    assert "Give the loss: --loss" in advice(audited(tmp_path / "a", lambda model: step(model, focal)))
    given = audited(tmp_path / "b", lambda model: step(model, focal), loss=focal)
    assert given.federations[0].replay_error == 0
    with pytest.raises(fedaudit.BadInput, match="seen where a loss of torch's is called"):
        audited(tmp_path / "c", lambda model: step(model, gathered), loss=gathered)


@pytest.mark.parametrize("wrap", ["tied", "distributed"])
def test_tied_and_distributed_models_are_repeated(wrap, tmp_path, monkeypatch):
    def train(model: nn.Module) -> None:
        if wrap == "tied":
            step(model)
            return
        torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
        try:
            step(nn.parallel.DistributedDataParallel(model))
        finally:
            torch.distributed.destroy_process_group()

    def tied() -> nn.Module:
        torch.manual_seed(0)
        made = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.Linear(64, 4))
        made[3].weight = made[1].weight
        return made

    if wrap == "tied":
        monkeypatch.setitem(globals(), "net", tied)
    assert audited(tmp_path / "r", train).federations[0].replay_error == 0
