"""Clients that really train: torch's own optimisers on the true examples, and what is recorded of them."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import torch
from torch import Tensor, nn

from fedaudit.attacks.local_training import treatments
from fedaudit.pipeline.prepare import resolve
from fedaudit.pipeline.run import record
from fedaudit.scenario.scenario import scenario_from
from fedaudit.task.info import TaskInfo
from fedaudit.task.training import UNMODELLED, Loss, ParameterGroup, TrainingConfig, loss_function
from fedaudit.transcript.observation import Observation, observe


def optimiser_of(module: nn.Module, training: TrainingConfig) -> torch.optim.Optimizer:
    """Return torch's optimiser with the settings of ``training``, a group for every parameter that has a rate."""
    groups: list[dict[str, Any]] = []
    for (name, parameter), own in zip(
        module.named_parameters(),
        treatments(training, [name for name, _ in module.named_parameters()]),
        strict=True,
    ):
        parameter.requires_grad_(own.learning_rate > 0)
        if own.learning_rate:
            group = {"params": [parameter], "name": name, "multiple": own.learning_rate}
            groups.append(group | {"momentum": own.momentum, "weight_decay": own.weight_decay})
    if training.optimiser == "sgd":
        for group in groups:
            group["nesterov"] = training.nesterov and bool(group["momentum"])
            group["dampening"] = training.dampening
        return torch.optim.SGD(groups, lr=1.0)
    for group in groups:
        del group["momentum"]
    kind = torch.optim.Adam if training.optimiser == "adam" else torch.optim.AdamW
    return kind(groups, lr=1.0, betas=training.betas, eps=training.epsilon, amsgrad=training.amsgrad)


def trained(
    module: nn.Module, loss: Loss, inputs: Tensor, labels: Tensor, training: TrainingConfig
) -> dict[str, Tensor]:
    """Return ΔW of local training, by torch alone."""
    own = copy.deepcopy(module)
    optimiser = optimiser_of(own, training)
    parts = zip(inputs.split(training.batch_sizes), labels.split(training.batch_sizes), strict=True)
    for number, (x, y) in enumerate(parts):
        optimiser.zero_grad()
        passes = training.passes[number] if training.passes else ((len(x), 1.0),)
        sizes = [one[0] for one in passes]
        for (_, weight), images, targets in zip(passes, x.split(sizes), y.split(sizes), strict=True):
            (weight * loss(own(images), targets)).backward()
        if training.clip_norm is not None:
            nn.utils.clip_grad_norm_(own.parameters(), training.clip_norm)
        if training.clip_value is not None:
            nn.utils.clip_grad_value_(own.parameters(), training.clip_value)
        for group in optimiser.param_groups:
            group["lr"] = training.rates[number] * group["multiple"]
        optimiser.step()
    start = dict(module.named_parameters())
    return {name: p.detach() - start[name].detach() for name, p in own.named_parameters()}


def attacked(
    training: TrainingConfig, *, seed: int = 0, task: dict[str, Any] | None = None, labels: bool = False, **changes: Any
) -> tuple[Observation, Tensor, Tensor]:
    """Return the observation of a client that trained as ``training`` says, its images, and its labels.

    Args:
        training: of the client; its examples are digits, of as many as it names.
        seed: of the scenario.
        task: of the task info, what is other.
        labels: whether they are granted.
        changes: of the scenario.
    """
    count = sum(training.batch_sizes)
    values: dict[str, Any] = {
        "data": {"name": "digits"},
        "model": {"name": "lenet", "initialisation": "uniform"},
        "federations": [{"name": "one", "clients": 1, "examples": count, "sampling": "first", "batch_size": count}],
        "attacks": [{"name": "invg", "iterations": 20}],
        "seed": seed,
    }
    made = scenario_from(values | changes)
    (only,) = record(resolve(made))
    seen = observe(only.transcript, made.threat).split()[0]
    info: TaskInfo = dataclasses.replace(seen.task_info, **(task or {}))
    images, truth = only.truth.inputs[0, 0], only.truth.labels[0, 0]
    loss = loss_function(info.loss, info.label_smoothing, info.class_weights)
    module = copy.deepcopy(seen.module).eval()
    module.load_state_dict(seen.messages[0].weights)
    update = dataclasses.replace(
        seen.messages[0].update,
        kind="weights",
        tensors=trained(module, loss, info.normalise(images), truth, training),
        training=training,
        labels=truth if labels else None,
    )
    message = dataclasses.replace(seen.messages[0], update=update)
    return (
        dataclasses.replace(seen, messages=(message,), loss=loss, task_info=info, update_kind="weights"),
        images,
        truth,
    )


def psnr(found: Tensor, images: Tensor) -> float:
    """Return the mean PSNR over images in their order, in dB."""
    return float((-10 * (found - images).square().flatten(1).mean(dim=1).log10()).mean())


# A training that has each word of the table, by its settings.
HAS: dict[str, dict[str, Any]] = {
    "momentum": {"momentum": 0.9},
    "nesterov": {"momentum": 0.9, "nesterov": True},
    "dampening": {"momentum": 0.9, "dampening": 0.1},
    "weight decay": {"weight_decay": 0.1},
    "proximal term": {"proximal_mu": 0.1},
    "groups": {"groups": (ParameterGroup(("fc.bias",), 2.0),)},
    "clip_norm": {"clip_norm": 0.1},
    "clip_value": {"clip_value": 0.001},
    "adam": {"optimiser": "adam"},
    "adamw": {"optimiser": "adamw"},
    "precision": {"precision": "bfloat16"},
    **{word: {"unmodelled": (word,)} for word in UNMODELLED},
    "optimiser": {"optimiser": "other", "unmodelled": ("optimiser",)},
}
