"""Updates of the adversary's own examples, made under the very facts of an observed one."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fedaudit.defences import CLIENT_DEFENCES
from fedaudit.defences.censor import orthogonal_to
from fedaudit.models import has_batch_norm, set_training_mode
from fedaudit.simulation.local_training import gradient, local_randomness
from fedaudit.simulation.replay import replay
from fedaudit.task.training import class_logits
from fedaudit.task.transforms import transformed
from fedaudit.transcript.observation import Message, Observation
from fedaudit.transcript.update import Update
from fedaudit.utils.errors import BadInput, NotApplicable


@dataclass(frozen=True)
class Own:
    """A client of the adversary's own examples, (n, ...), images in [0, 1], and what it would see of it.

    ``orders``: of each of its updates, which examples it used, (num_examples,) in the order of use.
    """

    observation: Observation
    inputs: Tensor
    labels: Tensor
    orders: tuple[Tensor, ...]

    @property
    def used(self) -> Tensor:
        """Those of the inputs that an update used, each once."""
        return self.inputs[torch.cat(self.orders).unique()]


def distinct(observation: Observation) -> int:
    """Return over how many different examples a client's updates are: over epochs, the same ones are used again.

    Where nobody says how many the client holds, each update is over others of its own; rounds over the same.
    """
    updates = [message.update for message in observation.messages]
    told = max((update.training.data_size or 0 for update in updates if update.training), default=0)
    if told:
        return min(told, sum(update.num_examples for update in updates))
    return max(update.num_examples for update in updates)


def check_repeatable(observation: Observation) -> None:
    """Raise NotApplicable unless one update can be made of own examples as the observed one was made."""
    message = observation.single()
    update, training = message.update, message.update.training
    if update.members and update.kind == "weights":
        raise NotApplicable("a sum of several clients' local training can't be repeated with examples of one's own")
    if message.client_weights:
        raise NotApplicable("the clients of this sum were sent different weights")
    if update.kind == "weights" and training is None:
        raise NotApplicable("how the clients train isn't known, so it can't be repeated with examples of one's own")
    known = update.sanitised
    whole = {name for name, p in observation.module.named_parameters() if p.requires_grad} <= update.tensors.keys()
    told = known is not None and (
        known.sparse or known.signs or known.noise or known.clip or known.orthogonal or known.transform
    )
    if known is not None and whole and not told:
        raise NotApplicable(f"what the defence '{known.name}' does to an update isn't known, so it can't be repeated")
    if known is not None and known.noise and known.clip is None and not known.unclipped:
        raise NotApplicable("how long an update is without its noise isn't known (its clip), so it can't be repeated")
    if update.members and observation.task_info.batch_norm == "train" and has_batch_norm(observation.module):
        raise NotApplicable("clients of a sum normalise their own batches each, and which is whose isn't known")
    if training is not None and training.unmodelled:
        raise NotApplicable("the clients' training can't be repeated: it has parts that nothing here models")


def own_update(
    observation: Observation, inputs: Tensor, labels: Tensor, order: Tensor, generator: torch.Generator
) -> Observation:
    """Return an update of own examples, (m, ...), images in [0, 1], made as the one of ``observation`` was.

    The same model, mode of BatchNorm and dropout, batches, steps, epochs, rates and optimiser; then the defence, as far
    as everybody knows it: the parameters that arrived, as many numbers of each, signs, the same clip, noise as strong.
    ``order`` (num_examples,): which examples it uses, in the order of use.
    """
    check_repeatable(observation)
    message, task_info = observation.single(), observation.task_info
    update, training = message.update, message.update.training
    seen = task_info.normalise(inputs)
    if update.sanitised is not None and update.sanitised.transform is not None:
        seen = transformed(update.sanitised.transform, seen, task_info)
    if update.kind == "gradient":
        module = model_of(observation)
        try:
            with local_randomness(0):
                tensors = gradient(module, observation.loss, (seen[order], labels[order]))
        except BadInput as error:
            raise NotApplicable(str(error)) from error
        after = module.state_dict()
    else:
        assert training is not None  # check_repeatable saw to it
        sizes = [one.examples for step in training.passes for one in step] or list(training.batch_sizes)
        clipped = update.sanitised.private if update.sanitised is not None else None
        if clipped is not None:  # noise comes afterwards, all at once
            clipped = dataclasses.replace(clipped, noise=0.0, empty=())
        try:
            after = replay(
                observation.module,
                observation.loss,
                message.weights,
                [(seen[rows], labels[rows]) for rows in order.split(sizes)],
                training,
                batch_norm=task_info.batch_norm,
                dropout=task_info.dropout,
                private=clipped,
            )
        except BadInput as error:
            raise NotApplicable(str(error)) from error
        trained = [name for name, p in observation.module.named_parameters() if p.requires_grad]
        tensors = {name: after[name] - message.weights[name] for name in trained}
    if not all(bool(tensor.isfinite().all()) for tensor in tensors.values()):
        raise NotApplicable("training like the clients' diverges on own examples")
    made = dataclasses.replace(
        update,
        tensors=_defended(tensors, update, generator),
        labels=None if update.labels is None else labels[order].view_as(update.labels),
        buffers={name: after[name].detach().clone() for name in update.buffers},
    )
    return dataclasses.replace(observation, messages=(dataclasses.replace(message, update=made),))


def own_client(observation: Observation, examples: tuple[Tensor, Tensor], generator: torch.Generator) -> Own:
    """Return a client of the first own examples, with as many updates as ``observation``'s, made in the same way.

    As clients do, it goes through them, (m, ...) with labels (m,), again and again, in new orders.
    """
    count, total = distinct(observation), sum(message.update.num_examples for message in observation.messages)
    if len(examples[0]) < count:
        raise NotApplicable(f"a client like this one used {count} examples, and there are {len(examples[0])} own ones")
    inputs, labels = (part[:count] for part in examples)
    walk = torch.cat([torch.randperm(count, generator=generator) for _ in range(math.ceil(total / count))])
    orders = walk[:total].split([message.update.num_examples for message in observation.messages])
    messages: list[Message] = []
    for single, order in zip(observation.split(), orders, strict=True):
        messages += own_update(single, inputs, labels, order, generator).messages
    return Own(dataclasses.replace(observation, messages=tuple(messages)), inputs, labels, orders)


def own_updates(
    observation: Observation, examples: tuple[Tensor, Tensor], count: int, generator: torch.Generator
) -> list[Own]:
    """Return ``count`` own clients, each with other examples while there are enough."""
    inputs, labels = examples
    shuffled = torch.randperm(len(inputs), generator=generator)
    size = distinct(observation)
    rows = [shuffled.roll(-i * size)[:size] for i in range(count)]
    return [own_client(observation, (inputs[own], labels[own]), generator) for own in rows]


def likely_labels(observation: Observation, inputs: Tensor, generator: torch.Generator) -> Tensor:
    """Return (m, ...) targets, as a data set has them, for examples (m, C, ...) that have none.

    Classes and labels are drawn from what the model takes the examples for: a trained network is sure of its clients'
    labels, an untrained one isn't, and gradients depend on that. Real values are drawn from a standard normal
    distribution, as data sets have them. A mask is its example's brightness, cut so that every class has as many
    pixels: its borders are the example's.
    """
    info = observation.task_info
    task = info.task_kind
    if task.real:
        return torch.randn(len(inputs), info.num_targets, generator=generator)
    if task.dense:
        ranks = inputs.mean(dim=1).flatten(1).argsort(dim=1, stable=True).argsort(dim=1)
        return (ranks * info.target_values // ranks.shape[1]).view(len(inputs), *info.target_shape)
    module = model_of(observation, "eval")
    with torch.no_grad():
        outputs = torch.cat([module(part) for part in info.normalise(inputs).split(256)])
    if not bool(outputs.isfinite().all()):
        raise NotApplicable("the model's outputs aren't finite")
    if task.label_sets:
        return torch.bernoulli(outputs.sigmoid(), generator=generator)
    if not task.one_class:
        return task.hard(outputs)
    chances = class_logits(outputs).softmax(dim=1)
    return torch.multinomial(chances.double(), 1, generator=generator)[:, 0]


def model_of(observation: Observation, batch_norm: Literal["eval"] | None = None) -> torch.nn.Module:
    """Return the model that was sent, as the client ran it, or with BatchNorm in another mode and without dropout."""
    module = copy.deepcopy(observation.module).cpu()
    module.load_state_dict(observation.single().weights)
    info = observation.task_info
    set_training_mode(module, batch_norm or info.batch_norm, dropout=info.dropout and batch_norm is None)
    return module


def _defended(tensors: Mapping[str, Tensor], update: Update, generator: torch.Generator) -> dict[str, Tensor]:
    """Return what a defence leaves of an own update, as far as the victim's update and its description tell."""
    known = update.sanitised
    found = {name: tensors[name] for name in update.tensors}
    if known is None:
        return found
    if known.sparse and not known.noise and _anywhere(known.name):
        found = {name: value.where(update.tensors[name] != 0, 0) for name, value in found.items()}
    elif known.sparse:
        found = {name: _largest(value, int(update.tensors[name].count_nonzero())) for name, value in found.items()}
    if known.orthogonal:
        drawn = {name: torch.randn(value.shape, generator=generator) for name, value in found.items()}
        found = {name: orthogonal_to(value, drawn[name]) for name, value in found.items()}
    if known.signs:
        return {name: value.sign() for name, value in found.items()}
    if known.clip is not None:  # where there is noise, too: check_repeatable saw to it
        own = math.sqrt(sum(float(value.double().square().sum()) for value in found.values()))
        shrink = min(1.0, known.clip / own) if own else 1.0
        found = {name: shrink * value for name, value in found.items()}
    if known.noise:
        noise = {name: torch.randn(value.shape, generator=generator) for name, value in found.items()}
        each = dict(known.noises)
        found = {name: value + each.get(name, known.noise) * noise[name] for name, value in found.items()}
    return found


def _anywhere(name: str) -> bool:
    """Whether what a defence holds back isn't simply what is smallest, so that its own places tell more."""
    return name in CLIENT_DEFENCES and CLIENT_DEFENCES[name].value.unsent == 0


def _largest(tensor: Tensor, count: int) -> Tensor:
    """Return the tensor with all but its ``count`` largest numbers zero."""
    flat = tensor.flatten()
    kept = torch.zeros_like(flat)
    rows = flat.abs().topk(count).indices
    kept[rows] = flat[rows]
    return kept.view_as(tensor)
