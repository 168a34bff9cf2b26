"""Training of the model before the audited rounds."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import nn

from fedaudit.data import Dataset
from fedaudit.models import has_batch_norm, set_training_mode
from fedaudit.scenario.scenario import Scenario
from fedaudit.simulation.history import answers
from fedaudit.simulation.local_training import local_randomness, on_device, train
from fedaudit.task.info import TaskInfo
from fedaudit.task.training import Loss
from fedaudit.utils.errors import BadInput
from fedaudit.utils.fingerprint import device_name, fingerprint
from fedaudit.utils.machine import computing_on
from fedaudit.utils.progress import Display
from fedaudit.utils.seeds import derive_seed, generator

if TYPE_CHECKING:
    from fedaudit.attacks import Finding
    from fedaudit.simulation.simulator import Recording

_MOST_KEPT = 4


@dataclass
class Trained:
    """What was trained within :func:`training_once`, each by all that it depends on.

    Attributes:
        networks: the last few, and what was done, in words.
        recordings: the last long federations.
        findings: what attacks asked for beforehand, shadow models for example, of the last audit.
    """

    networks: OrderedDict[str, tuple[nn.Module, str]] = field(default_factory=OrderedDict)
    recordings: dict[str, Recording] = field(default_factory=dict)
    findings: dict[str, Finding] = field(default_factory=dict)


_trained: ContextVar[Trained | None] = ContextVar("trained", default=None)


@contextmanager
def training_once(trained: Trained | None = None) -> Iterator[None]:
    """Let audits in this block take what an earlier one has trained in the same way.

    That is one of the last few networks (:func:`pretrain`), the last long federations
    (:func:`fedaudit.pipeline.run.record`) and the last shadow models. A process that runs one trial of a study after
    another would train the same ones for every attack on them.

    Args:
        trained: where it is kept, for the next block; default: what the block around this one keeps, else nothing
            is left at the end.
    """
    token = _trained.set(trained or _trained.get() or Trained())
    try:
        yield
    finally:
        _trained.reset(token)


def trained_before() -> Trained | None:
    """Return what was trained within this :func:`training_once`; None: it is outside of it."""
    return _trained.get()


def pretrain(
    model: nn.Module, loss: Loss, task_info: TaskInfo, dataset: Dataset, scenario: Scenario, display: Display
) -> str:
    """Train the model, in place, on the train split; say how. BadInput: BatchNorm would normalise single examples."""
    if (trained := trained_before()) is None:
        return _train(model, loss, task_info, dataset, scenario, display)
    splits = [(split.inputs, split.targets) for split in (dataset.train, dataset.test)]
    key = fingerprint(
        model, loss, task_info, splits, scenario.model.training.model_dump(), scenario.seed, scenario.device
    )
    if key not in trained.networks:
        text = _train(model, loss, task_info, dataset, scenario, display)
        trained.networks[key] = copy.deepcopy(model), text
    trained.networks.move_to_end(key)
    while len(trained.networks) > _MOST_KEPT:
        trained.networks.popitem(last=False)
    network, text = trained.networks[key]
    model.load_state_dict(network.state_dict())
    for own, other in zip(model.modules(), network.modules(), strict=True):
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
        if dataset.num_classes is not None:
            wrong, right = answers(model.eval(), task_info, dataset.test).sum(dim=1).tolist()
            text += f", test accuracy {right / (wrong + right):.3f}"
        model.cpu()
    return text if device == "cpu" else f"{text}, on {device_name(device)}"
