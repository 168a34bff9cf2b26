"""Training of the model before the audited rounds."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import nn

from fedaudit.data import Dataset
from fedaudit.models import has_batch_norm, set_training_mode
from fedaudit.scenario.scenario import Scenario
from fedaudit.simulation.local_training import local_randomness, on_device, train
from fedaudit.task.info import TaskInfo
from fedaudit.task.training import Loss, class_logits
from fedaudit.utils.errors import BadInput
from fedaudit.utils.fingerprint import device_name, fingerprint
from fedaudit.utils.machine import computing_on
from fedaudit.utils.progress import Display
from fedaudit.utils.seeds import derive_seed, generator

_MOST_KEPT = 4
_once: ContextVar[bool] = ContextVar("once", default=False)
_kept: OrderedDict[str, tuple[nn.Module, str]] = OrderedDict()  # by all that a training depends on


@contextmanager
def training_once() -> Iterator[None]:
    """Let :func:`pretrain` take a network that it has trained before in the same way: one of the last few.

    Long federations are taken again, too (:func:`fedaudit.pipeline.run.record`). A process that runs one trial of a
    study after another would train the same ones for every attack on them.
    """
    token = _once.set(True)
    try:
        yield
    finally:
        _once.reset(token)


def trains_once() -> bool:
    """Return whether it is within :func:`training_once`."""
    return _once.get()


def pretrain(
    model: nn.Module, loss: Loss, task_info: TaskInfo, dataset: Dataset, scenario: Scenario, display: Display
) -> str:
    """Train the model, in place, on the train split, and return what was done, in words.

    Raises:
        BadInput: BatchNorm would have to normalise over single examples.
    """
    if not trains_once():
        return _train(model, loss, task_info, dataset, scenario, display)
    splits = [(split.inputs, split.targets) for split in (dataset.train, dataset.test)]
    key = fingerprint(
        model, loss, task_info, splits, scenario.model.training.model_dump(), scenario.seed, scenario.device
    )
    if key not in _kept:
        text = _train(model, loss, task_info, dataset, scenario, display)
        _kept[key] = copy.deepcopy(model), text
    _kept.move_to_end(key)
    while len(_kept) > _MOST_KEPT:
        _kept.popitem(last=False)
    trained, text = _kept[key]
    model.load_state_dict(trained.state_dict())
    for own, other in zip(model.modules(), trained.modules(), strict=True):
        own.training = other.training
    return text


def _train(
    model: nn.Module, loss: Loss, task_info: TaskInfo, dataset: Dataset, scenario: Scenario, display: Display
) -> str:
    spec = scenario.model.training
    data = dataset.train
    least = 2 if has_batch_norm(model) else 1  # BatchNorm can't normalise over a single example
    if min(spec.batch_size, len(data)) < least:
        raise BadInput(
            f"model.training.batch_size is {spec.batch_size}, and there are {len(data)} examples: BatchNorm can't be "
            "trained on single examples; use batches of 2 or more"
        )
    report = display.stage("training the model", spec.epochs)
    shuffle, device = generator(scenario.seed, "pretraining"), scenario.device
    text = f"{spec.epochs} epoch{'s' if spec.epochs > 1 else ''} on {len(data)} examples"
    with computing_on(device):
        model.to(device)
        inputs, targets, loss = data.inputs.to(device), data.targets.to(device), on_device(loss, device)
        for epoch in range(spec.epochs):
            set_training_mode(model, "train")
            order = torch.randperm(len(data), generator=shuffle).to(device).split(spec.batch_size)
            batches = ((task_info.normalise(inputs[rows]), targets[rows]) for rows in order if len(rows) >= least)
            with local_randomness(derive_seed(scenario.seed, "pretraining", epoch)):
                train(model, loss, batches, learning_rate=spec.learning_rate, momentum=spec.momentum)
            report(epoch + 1)
        if dataset.task == "classification":
            text += f", test accuracy {accuracy(model, task_info, dataset):.3f}"
        model.cpu()
    return text if device == "cpu" else f"{text}, on {device_name(device)}"


def accuracy(model: nn.Module, task_info: TaskInfo, dataset: Dataset) -> float:
    """Return the share of the test split that the model classifies correctly."""
    test, device = dataset.test, next(model.parameters()).device
    model.eval()
    right = 0
    with torch.no_grad():
        for inputs, targets in zip(test.inputs.split(500), test.targets.split(500), strict=True):
            predicted = class_logits(model(task_info.normalise(inputs.to(device)))).argmax(dim=1)
            right += int((predicted == targets.to(device)).sum())
    return right / int((test.targets >= 0).sum())
