"""A deterministic federation in this process: a server, its clients, and the transcript of what travelled."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from fedaudit.data import Dataset
from fedaudit.data.dataset import Split, property_of
from fedaudit.data.partition import partition
from fedaudit.simulation.client import Federation
from fedaudit.simulation.protocols import SimulationOptions, protocol_of
from fedaudit.simulation.recording import Recording as Recording
from fedaudit.simulation.spec import FederationSpec
from fedaudit.utils.errors import BadInput
from fedaudit.utils.machine import computing_on
from fedaudit.utils.processes import keep_workers
from fedaudit.utils.seeds import generator


@keep_workers()
def simulate(
    federation: Federation,
    *,
    report: Callable[[float], None] | None = None,
    checkpoint: Path | None = None,
    workers: int = 1,
    say: Callable[[str], None] | None = None,
) -> Recording:
    """Run the federation's rounds and return what travelled, the truth that belongs to it, and how it went.

    Where a privacy budget is spent earlier, fewer rounds. With ``spec.keep_rounds`` only those rounds are returned.

    Args:
        federation: with all of its parts, see :func:`check`.
        report: called with the updates made so far.
        checkpoint: file from which a simulation that is killed goes on.
        workers: processes for the clients of a round, where rounds are so long that it pays; on a GPU there is one.
        say: called with a line if it goes on from a checkpoint.

    Raises:
        BadInput: a client's training or a rule fails on what the rounds bring.
    """
    with computing_on(federation.device):
        return protocol_of(federation.spec).simulate(federation, SimulationOptions(report, checkpoint, workers, say))


def check(federation: Federation) -> None:
    """Refuse what can't work (defences, behaviours, the budget, the memory it needs) before anything is simulated."""
    try:
        protocol_of(federation.spec).check(federation)
    except BadInput as error:
        raise BadInput(f"federation '{federation.spec.name}': {error}") from None


def partition_clients(dataset: Dataset, split: str, spec: FederationSpec, *, seed: int) -> list[Split]:
    """Return what each client of ``spec`` holds; quick, so that what doesn't fit is found before any training.

    The parties of a vertical federation hold the same examples: these are returned once, with all features.
    """
    pool = dataset.train if split == "train" else dataset.test
    try:
        held = pool[_held_examples(pool, spec, seed)]
        if spec.settings.same_examples:
            return [held]
        if len(held) < spec.clients:
            raise BadInput(f"{len(held)} examples can't be partitioned over {spec.clients} clients")
        rng = generator(seed, spec.name, "partition")
        options = spec.partition.model_dump(exclude={"scheme", "attribute"}, exclude_none=True)
        if spec.partition.attribute is not None:
            name, value = property_of(dataset, spec.partition.attribute)
            options["marks"] = held.attributes[name] == value
        if spec.malicious:
            options["lacking"] = dict.fromkeys(range(spec.honest, spec.clients), spec.malicious.missing_classes)
        rows = partition(
            spec.partition.scheme,
            held.targets,
            spec.clients,
            rng,
            groups=held.groups,
            persons=held.persons,
            **options,
        )
    except BadInput as error:
        raise BadInput(f"federation '{spec.name}': {error}") from None
    client_data = [held[own] for own in rows]
    if spec.malicious and spec.malicious.missing_classes:
        if dataset.num_classes is None:
            raise BadInput(
                f"federation '{spec.name}': malicious.missing_classes names classes, and '{dataset.name}' has none; "
                "leave it out"
            )
        without = torch.tensor(spec.malicious.missing_classes)
        client_data[spec.honest :] = [data[~torch.isin(data.targets, without)] for data in client_data[spec.honest :]]
        if not all(map(len, client_data)):
            raise BadInput(
                f"federation '{spec.name}': without the classes that they lack a malicious client has nothing left"
            )
    return client_data


def _held_examples(pool: Split, spec: FederationSpec, seed: int) -> Tensor:
    """Return the rows of ``pool`` that clients hold: all, or some of every class in turn, or of any class.

    Each class (or all examples) is gone through in shuffled order, pass after pass, and seed s takes the s-th portion:
    seeds that follow each other have different examples as long as there are any. All federations of a scenario have
    the same. Where the first are wanted, they are the first of each class.
    """
    examples, shuffle = spec.examples, spec.sampling != "first"
    if examples is None:
        return torch.arange(len(pool))
    if examples > len(pool):
        raise BadInput(f"{examples} examples are asked for, but the split has {len(pool)}; lower 'examples'")
    any_class = spec.sampling == "uniform" or pool.targets.ndim != 1
    labels = torch.zeros(len(pool), dtype=torch.int64) if any_class else pool.targets
    classes = [torch.nonzero(labels == label)[:, 0] for label in labels.unique()]
    turn = seed * examples if shuffle else 0
    if shuffle:
        classes = [classes[i] for i in torch.randperm(len(classes), generator=generator(0, "classes")).tolist()]

    @cache
    def shuffled(place: int, again: int) -> list[int]:
        rows = classes[place]
        if shuffle:
            rows = rows[torch.randperm(len(rows), generator=generator(again, "examples", place))]
        return rows.tolist()

    chosen: dict[int, None] = {}
    while len(chosen) < examples:
        place, number = turn % len(classes), turn // len(classes)
        again, position = divmod(number, len(classes[place]))
        chosen.setdefault(shuffled(place, again)[position])  # one that a small class has given already is passed over
        turn += 1
    return torch.tensor(list(chosen))
