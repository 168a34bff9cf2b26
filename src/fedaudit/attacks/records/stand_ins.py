"""Stand-ins: clients that an adversary makes of its own examples, with a property or without it, alike in all else."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from fedaudit.models import set_training_mode
from fedaudit.simulation.local_training import gradient, local_randomness, train, trainable
from fedaudit.task.info import TaskInfo
from fedaudit.transcript.observation import Message, Observation
from fedaudit.transcript.queries import Records
from fedaudit.utils.errors import BadInput, NotApplicable


@dataclass(frozen=True)
class Stock:
    """The adversary's examples, sorted by class and by whether they have the property.

    Attributes:
        inputs: (m, ...) as the model sees them.
        labels: (m,) or (m, 1).
        cells: for each class that has both sorts, the rows without the property and those with it.
        frequencies: (classes,) of these classes.
    """

    inputs: Tensor
    labels: Tensor
    cells: tuple[tuple[Tensor, Tensor], ...]
    frequencies: Tensor

    def pair(self, size: int, share: float, otherwise: float, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Return the rows (size,) of a stand-in with the property and of one without: the same classes, as often.

        Nothing is drawn twice as long as there are enough examples of a class and sort.

        Args:
            size: examples of each.
            share, otherwise: how many of them have the property, with and without.
            generator: of the draws.
        """
        counts = torch.bincount(
            torch.multinomial(self.frequencies, size, replacement=True, generator=generator), minlength=len(self.cells)
        )
        chosen: list[list[Tensor]] = [[], []]
        for cell, count in zip(self.cells, counts.tolist(), strict=True):
            for rows, part in zip(chosen, (otherwise, share), strict=True):
                marked = round(part * count)
                rows += [_draw(cell[0], count - marked, generator), _draw(cell[1], marked, generator)]
        return torch.cat(chosen[1]), torch.cat(chosen[0])


def stock(records: Records | None, info: TaskInfo) -> Stock:
    """Return the adversary's examples of which it knows the property, sorted.

    Args:
        records: of which these are the public ones.
        info: how examples are normalised.

    Raises:
        NotApplicable: it has none, or no class has examples of both sorts.
    """
    if records is None or not len(records.public_property):
        raise NotApplicable(
            "the adversary knows no examples with and without a property; set threat.client_property, to 'sex=Female' "
            "for example, threat.knows_public_data: true and threat.public_examples"
        )
    labels, marks = records.public_labels, records.public_property
    classes = labels if labels.ndim == 1 and not labels.is_floating_point() else torch.zeros(len(labels))
    cells = []
    for label in classes.unique():
        own = classes == label
        pair = torch.nonzero(own & ~marks)[:, 0], torch.nonzero(own & marks)[:, 0]
        if all(map(len, pair)):
            cells.append(pair)
    if not cells:
        raise NotApplicable(
            f"of the {len(marks)} public examples no class has some with the property and some without; raise "
            "threat.public_examples"
        )
    frequencies = torch.tensor([float(len(without) + len(with_it)) for without, with_it in cells])
    inputs = info.normalise(records.public_inputs)
    return Stock(inputs, labels, tuple(cells), frequencies / frequencies.sum())


def size_of(message: Message) -> int:
    """Return how many different examples a client used for an update, as far as that is known."""
    update = message.update
    held = update.training.data_size if update.training else None
    return min(update.num_examples, held or update.num_examples)


def send(observation: Observation, message: Message, held: Stock, rows: Tensor, generator: torch.Generator) -> Tensor:
    """Return what a stand-in sends in place of ``message``'s client, (d,), as :func:`flat` has it.

    It receives the same weights, and trains in as many steps on batches as large, at the same rate.

    Args:
        observation: whose model it trains.
        message: whose client it stands for.
        held: the adversary's examples.
        rows: those that the stand-in holds.
        generator: of the order in which it goes through them, and of dropout.

    Raises:
        NotApplicable: its training fails.
    """
    info, update = observation.task_info, message.update
    module = copy.deepcopy(observation.module)
    module.load_state_dict(message.weights)
    set_training_mode(module, info.batch_norm, dropout=info.dropout)
    training = update.training
    sizes = training.batch_sizes if training else (update.num_examples,)
    order = rows[torch.randperm(len(rows), generator=generator)]
    seed = int(torch.randint(2**31, (1,), generator=generator))
    batches = [(held.inputs[own], held.labels[own]) for own in _batches(order, sizes, generator)]
    try:
        with local_randomness(seed):
            if update.kind == "gradient":
                return flat(gradient(module, observation.loss, batches[0]), message)
            assert training is not None  # the attack saw to it
            train(
                module,
                observation.loss,
                batches,
                learning_rate=training.learning_rate,
                momentum=training.momentum,
                weight_decay=training.weight_decay,
                proximal_mu=training.proximal_mu,
            )
    except BadInput as error:
        raise NotApplicable(f"a stand-in's training fails: {error}") from None
    return flat({name: p.detach() - message.weights[name] for name, p in trainable(module).items()}, message)


def flat(tensors: dict[str, Tensor], message: Message) -> Tensor:
    """Return (d,) what of an update was sent in ``message``, tensor after tensor, sorted by name."""
    return torch.cat([tensors[name].flatten() for name in sorted(message.update.tensors)])


def _batches(order: Tensor, sizes: tuple[int, ...], generator: torch.Generator) -> Iterator[Tensor]:
    """Yield batches of the given sizes, pass after pass, each pass after the first in an order of its own."""
    pending = order
    for size in sizes:
        while len(pending) < size:
            pending = torch.cat([pending, order[torch.randperm(len(order), generator=generator)]])
        yield pending[:size]
        pending = pending[size:]


def _draw(rows: Tensor, count: int, generator: torch.Generator) -> Tensor:
    whole = [torch.randperm(len(rows), generator=generator) for _ in range(-(-count // len(rows)))]
    return rows[torch.cat(whole)[:count]] if whole else rows[:0]
