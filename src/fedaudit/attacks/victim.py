"""The client's model as the attacker runs it, and the gradient that an update stands for."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedaudit.attacks.local_training import TABLE, invert, is_adaptive, mean_steps, treatments
from fedaudit.models import Layer, layer_groups, set_training_mode, twice_differentiable
from fedaudit.simulation.local_training import draws_at_random, local_randomness
from fedaudit.task.info import TaskInfo
from fedaudit.task.training import Loss
from fedaudit.task.transforms import transformed
from fedaudit.transcript.observation import Message, Observation
from fedaudit.transcript.threat import ThreatModel
from fedaudit.transcript.update import Update
from fedaudit.utils.errors import NotApplicable

# Whose statistics BatchNorm takes in an attack on clients that train with those of their batch: those of the dummy
# batch, or the running ones.
Statistics = Literal["batch", "running"]

WITHOUT_DROPOUT = TABLE["dropout"].answers["one step"].text


@dataclass(frozen=True)
class Victim:
    """The client's model as the attacker runs it: a function of the parameters.

    Attributes:
        module: architecture, already in the mode (BatchNorm) of the client's local training.
        loss: mean over the batch, as the client's.
        parameters: the global model's trainable parameters, by name.
        constants: all other tensors of the state (buffers, frozen parameters).
        dropout: whether the client trained with dropout, whose masks nobody else knows; here it is off.
    """

    module: nn.Module
    loss: Loss
    parameters: dict[str, Tensor]
    constants: dict[str, Tensor]
    dropout: bool = False

    def outputs(self, images: Tensor, parameters: dict[str, Tensor] | None = None) -> Tensor:
        """Return the model's outputs at ``parameters`` (or its own); BatchNorm's running statistics stay."""
        writes = any(part.training for part in self.module.modules())
        constants = {name: t.clone() for name, t in self.constants.items()} if writes else self.constants
        state = {**(self.parameters if parameters is None else parameters), **constants}
        return torch.as_tensor(functional_call(self.module, state, (images,)))

    def value(self, parameters: dict[str, Tensor], images: Tensor, labels: Tensor) -> Tensor:
        """Return the loss at ``parameters``."""
        return self.loss(self.outputs(images, parameters), labels)


def load_victim(
    observation: Observation, message: Message, device: str, *, statistics: str = "batch"
) -> tuple[Victim, list[Layer]]:
    """Return the model as the client ran it, and its layers in forward order.

    BatchNorm is in the mode that clients use, or takes ``running`` statistics; dropout is off, because the client's
    masks are unknown and without them is the expectation. The parameters are those that local training changes and that
    arrived; what its optimiser leaves as it is, at rate 0, is constant. What the client did to its examples before
    (ATS) is a part of the module: it is given the original ones.
    """
    task_info = observation.task_info
    module = copy.deepcopy(observation.module).to(device)
    twice_differentiable(module)
    state = {name: t.to(device) for name, t in message.weights.items()}
    module.load_state_dict(state)
    known = message.update.sanitised
    if known is not None and known.transform is not None:
        module.register_forward_pre_hook(_Transformed(known.transform, task_info))
    dropout = task_info.dropout and draws_at_random(module, _probe(task_info, device))
    set_training_mode(module, "eval" if statistics == "running" else task_info.batch_norm, dropout=False)
    used = _used_parameters(module, observation, device)
    names = [name for name in used if name in message.update.tensors]  # in the model's order, not a file's
    if message.update.kind == "weights" and message.update.training is not None:
        treated = treatments(message.update.training, names)
        names = [name for name, group in zip(names, treated, strict=True) if group.learning_rate]
    own = dict(module.named_parameters())  # a tensor of two names once, by the first, for whoever calls the module
    again = {name for name, _ in module.named_parameters(remove_duplicate=False)} - own.keys()
    victim = Victim(
        module,
        observation.loss,
        {name: state[name] for name in names},
        {name: t for name, t in state.items() if name not in names and name not in again},
        dropout,
    )
    return victim, layer_groups(module, task_info.blank(2)[0].to(device))


@dataclass(frozen=True)
class _Transformed:
    """A hook by which a module sees transformed images."""

    policy: str
    task_info: TaskInfo

    def __call__(self, module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:  # noqa: ARG002
        return transformed(self.policy, inputs[0], self.task_info), *inputs[1:]


def _probe(task_info: TaskInfo, device: str) -> Tensor:
    """Return a few examples on which masks would show."""
    if not task_info.example_kind.dtype.is_floating_point:
        return task_info.blank(8)[0].to(device)
    shape = (8, *task_info.input_shape)
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(device)


def as_trained(module: nn.Module, task_info: TaskInfo, weights: Mapping[str, Tensor]) -> nn.Module:
    """Return a copy of ``module`` with ``weights``, in float64 on the CPU, in the mode of the client's training."""
    own = copy.deepcopy(module).cpu()
    own.load_state_dict(dict(weights))
    set_training_mode(own, task_info.batch_norm, dropout=task_info.dropout)
    return own.double()


def _used_parameters(module: nn.Module, observation: Observation, device: str) -> list[str]:
    """Return the parameters that the loss depends on; local training leaves the others as they are."""
    task_info = observation.task_info
    parameters = {name: p for name, p in module.named_parameters() if p.requires_grad}
    with local_randomness(0):
        before = {name: b.clone() for name, b in module.named_buffers()}
        inputs, targets = (part.to(device) for part in task_info.blank(2))
        value = observation.loss(module(inputs), targets)
        grads = torch.autograd.grad(value, list(parameters.values()), allow_unused=True)
        for name, buffer in module.named_buffers():
            buffer.copy_(before[name])
    return [name for name, grad in zip(parameters, grads, strict=True) if grad is not None]


def unknown_training(threat: ThreatModel) -> str:
    """Return why the adversary doesn't know how a client trained, and what to do, in words."""
    if threat.knows_training:
        return "that was not recorded in the transcript: record learning rate, local steps and batch sizes with it"
    return "this threat model doesn't know it: set threat.knows_training=true"


def sent_model(observation: Observation, device: str) -> tuple[nn.Module, dict[str, Tensor], list[str]]:
    """Return the model that one client was sent, without dropout, its update's gradient, and what is to be said of it.

    The gradient is that of :func:`one_batch_gradient`.
    """
    message, task_info = observation.single(), observation.task_info
    module = copy.deepcopy(observation.module).to(device)
    module.load_state_dict({name: t.to(device) for name, t in message.weights.items()})
    drawn = task_info.dropout and draws_at_random(module, task_info.blank(2)[0].to(device))
    set_training_mode(module, "eval", dropout=False)
    gradient = one_batch_gradient(message.update, device, message.weights)
    return module, gradient, [WITHOUT_DROPOUT] if drawn else []


def need_training(attack: str, observation: Observation) -> None:
    """Raise NotApplicable where the update came of local training of which the adversary doesn't know how it went."""
    update = observation.single().update
    if update.kind == "weights" and update.training is None:
        raise NotApplicable(
            f"{attack} needs the learning rate and the local steps, that is how the client trained, to use a FedAvg "
            f"update; {unknown_training(observation.threat)}"
        )


def need_signal(update: Update) -> None:
    """Raise NotApplicable where an update is zero throughout."""
    if not any(bool(t.any()) for t in update.tensors.values()):
        raise NotApplicable("the update is zero throughout: it carries nothing to invert")


def distinct_examples(message: Message) -> int:
    """Return how many different examples an update was made from, as far as that is known."""
    update = message.update
    held = update.training.data_size if update.training else None
    return min(update.num_examples, held or update.num_examples)


def one_batch_gradient(
    update: Update, device: str = "cpu", weights: Mapping[str, Tensor] | None = None
) -> dict[str, Tensor]:
    """Return the gradient that an update stands for: itself, or g = ΔW / (−μ·T) for T local steps.

    AGIC's one-batch approximation (Xu et al. 2022, Eq. 4), with the division by T that the paper leaves out: with it
    g is the gradient of the mean loss over all examples, where the model barely moves between the steps (the paper: at
    μ = 1e-4, not at 1e-2). What momentum, weight decay and FedProx's term add stays in g. Without the local training
    config −ΔW is returned, which has the same direction.

    Where the training isn't plain SGD, each parameter's own rates and decay and the weights of accumulated passes are
    taken off, exactly for a single step that wasn't clipped. Of Adam's single step g is what the update tells of it
    (:func:`.invert`); of several, their mean steps, between −1 and 1. Both need ``weights``, those that the client was
    sent.
    """
    training = update.training
    if training is None or training.plain_sgd or training.optimiser == "other":
        scale = 1.0
        if update.kind == "weights":
            scale = -1.0 / (training.learning_rate * training.local_steps) if training else -1.0
        return {name: scale * t.to(device) for name, t in update.tensors.items()}
    passed = [sum(one.weight for one in step) for step in training.passes] or [1.0] * training.local_steps
    if update.kind == "gradient":
        return {name: t.to(device) / (passed[0] or 1.0) for name, t in update.tensors.items()}
    assert weights is not None
    gradient = {}
    if is_adaptive(update):
        one = training.local_steps == 1
        found = invert(update, weights).values if one else mean_steps(update, weights)
        for (name, g), group in zip(found.items(), treatments(training, found), strict=True):
            decay = group.weight_decay if one and training.optimiser == "adam" else 0.0
            gradient[name] = (g - decay * weights[name]).to(update.tensors[name].dtype)
    else:
        total = sum(rate * weight for rate, weight in zip(training.rates, passed, strict=True)) or 1.0
        for (name, delta), group in zip(update.tensors.items(), treatments(training, update.tensors), strict=True):
            first = 1 + group.momentum if training.nesterov and training.local_steps == 1 else 1.0
            g = -delta / (group.learning_rate or 1.0) / (first * total)
            gradient[name] = g - group.weight_decay * sum(training.rates) / total * weights[name]
    return {name: g.to(device) for name, g in gradient.items()}
