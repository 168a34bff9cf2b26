"""The mean of a client's updates over rounds as one update, in which each round's own noise averages out."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from fedaudit.attacks.victim import one_batch_gradient
from fedaudit.transcript.observation import Message, Observation
from fedaudit.utils.errors import NotApplicable


def mean_of(observation: Observation) -> tuple[Observation, list[str]]:
    """Return the mean of one client's updates as one update, and what the user should know about it."""
    messages = observation.messages
    if len({message.client for message in messages}) > 1:
        raise NotApplicable("a mean over rounds is of one client's updates, and these are of several")
    first = messages[0].update
    if any(m.update.sanitised is not None and m.update.sanitised.signs for m in messages):
        raise NotApplicable("signs alone have no mean that is a gradient; attack each update by itself")
    held = first.training.data_size if first.training and first.training.data_size else first.num_examples
    whole = all(m.update.num_examples == first.num_examples and m.update.training == first.training for m in messages)
    if whole and first.num_examples % held == 0:
        tensors = [m.update.tensors for m in messages]
        update = dataclasses.replace(first, buffers={})
    else:
        if any(m.update.training is not None and m.update.training.local_steps > 1 for m in messages):
            raise NotApplicable(
                "updates over different examples, of several local steps each, have no mean that is one; attack each "
                "by itself"
            )
        messages = _whole_epochs(messages, held)
        tensors = [one_batch_gradient(m.update, "cpu", m.weights) for m in messages]
        count = min(held, sum(m.update.num_examples for m in messages))
        labels = [m.update.labels for m in messages if m.update.labels is not None]
        update = dataclasses.replace(
            first,
            kind="gradient",
            num_examples=count,
            training=None,
            buffers={},
            labels=torch.cat(labels)[:count] if len(labels) == len(messages) else None,
        )
    known = first.sanitised
    parts = [m.update.num_examples for m in messages]
    if known is not None and known.noise:
        scale = math.sqrt(sum(part**2 for part in parts)) / sum(parts)
        if update.kind != first.kind and first.training is not None:
            scale /= first.training.learning_rate
            known = dataclasses.replace(known, clip=known.clip and known.clip / first.training.learning_rate)
        known = dataclasses.replace(known, noise=known.noise * scale)
    if known is not None and known.bound and update.kind != first.kind and first.training is not None:
        known = dataclasses.replace(known, bound=known.bound / first.training.learning_rate)
    sparse = known is not None and known.sparse
    update = dataclasses.replace(update, tensors=_means(tensors, parts, sparse=sparse), sanitised=known)
    weights = _means([m.weights for m in messages], parts, sparse=False)
    message = Message(messages[0].round, messages[0].client, weights, update)
    single = dataclasses.replace(observation, update_kind=update.kind, weights=(weights,), messages=(message,))
    note = (
        f"the mean of {len(messages)} updates, taken for one; the models that they began with lie "
        f"{_apart([m.weights for m in messages], weights):.2g} of their length from their mean"
    )
    return single, [note] if len(messages) > 1 else []


def _whole_epochs(messages: Sequence[Message], held: int) -> tuple[Message, ...]:
    """Return the first messages, as many as make whole epochs over so many examples; all, if there isn't one."""
    seen, last = 0, len(messages)
    for i, message in enumerate(messages):
        seen += message.update.num_examples
        if seen % held == 0:
            last = i + 1
    return tuple(messages[:last])


def _means(each: Sequence[Mapping[str, Tensor]], parts: Sequence[int], *, sparse: bool) -> dict[str, Tensor]:
    """Return the means of tensors by name, over those that have them, and of sparse ones over what isn't zero."""
    found = {}
    for name in dict.fromkeys(name for one in each for name in one):
        own = [(part, one[name]) for part, one in zip(parts, each, strict=True) if name in one]
        first = own[0][1]
        if not first.is_floating_point():  # a count of batches
            found[name] = first
            continue
        total = sum((part * tensor.double() for part, tensor in own), torch.zeros_like(first, dtype=torch.float64))
        there = [part * ((tensor != 0).double() if sparse else torch.ones_like(total)) for part, tensor in own]
        found[name] = (total / torch.stack(there).sum(dim=0).clamp(min=1)).to(first.dtype)
    return found


def _apart(each: Sequence[Mapping[str, Tensor]], mean: Mapping[str, Tensor]) -> float:
    """Return the largest distance of states to their mean, relative to its norm."""
    names = [name for name, tensor in mean.items() if tensor.is_floating_point()]
    norm = math.sqrt(sum(float(mean[name].double().square().sum()) for name in names))
    far = max(sum(float((one[name] - mean[name]).double().square().sum()) for name in names) for one in each)
    return math.sqrt(far) / norm if norm else 0.0
