"""Trainings that nothing watches, made visible by what an app's file says of its model."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from fedaudit.capture.answers import AppModel, Examples
from fedaudit.capture.capture import Capture
from fedaudit.capture.estimators import replay_change

_HOW = "clients train in a way that isn't seen: an update is one change of the weights"


def watched(about: AppModel, before: Sequence[Tensor], after: Sequence[Tensor], own: Examples) -> Capture:
    """Return what a Capture sees where torch makes a client's change of the weights, or trains as the file says."""
    module = about.made(before, own)
    state = about.arranged(module)
    module.load_state_dict(state(before), strict=False)
    inputs, targets = about.as_seen(own)
    inputs = inputs.to(before[0].dtype)
    with Capture(module) as seen:
        seen.how = _HOW, "optimiser" if about.model is not None else "no-gradient"
        if about.training is not None:
            _train(about, module, inputs, targets)
        else:
            replay_change(module, about.loss_of(targets), inputs, targets, state(after))
    return seen


def _train(about: AppModel, module: nn.Module, inputs: Tensor, targets: Tensor) -> None:
    """Train as the file says; a replay is held against what travelled, so what is wrong shows."""
    assert about.training is not None
    optimiser, loss = torch.optim.SGD(module.parameters(), about.training["learning_rate"]), about.loss_of(targets)
    size = int(about.training.get("batch_size", len(inputs)))
    for _ in range(int(about.training.get("epochs", 1))):
        for given, asked in zip(inputs.split(size), targets.split(size), strict=True):
            optimiser.zero_grad()
            loss(module(given), asked).backward()
            optimiser.step()
