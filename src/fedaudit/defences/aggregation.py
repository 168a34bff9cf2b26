"""What every aggregator is: a pure function of an (n, d) matrix of updates, its settings keyword-only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor

from fedaudit.defences.settings import arguments, check_settings
from fedaudit.utils.errors import BadInput
from fedaudit.utils.registry import Registry

State = Mapping[str, Any]


@dataclass(frozen=True)
class Cohort:
    """Who sent the rows of the matrix, and what the server knows besides.

    Attributes:
        clients: (n,) who sent each row.
        examples: (n,) over how many examples each update was made.
        root: (d,) the server's own update, made on its root data.
        state: what the same aggregator returned in the round before; empty in the first.
    """

    clients: tuple[int, ...] = ()
    examples: tuple[int, ...] = ()
    root: Tensor | None = None
    state: State = field(default_factory=dict)


@dataclass(frozen=True)
class Aggregate:
    """What an aggregator returns.

    Attributes:
        vector: (d,) the aggregated update.
        weights: (n,) each client's share in it; they sum to 1, or to 0 where nobody has one.
        rejected: row index of every client that was left out, with the reason.
        fallback: why the rule couldn't do what it is meant to do and did something else, if so.
        state: what the aggregator wants to be given in the next round.
    """

    vector: Tensor
    weights: Tensor
    rejected: dict[int, str] = field(default_factory=dict)
    fallback: str | None = None
    state: State = field(default_factory=dict)


class Aggregator(Protocol):
    """A pure function of (n, d) updates; whatever it needs besides comes with the cohort."""

    def __call__(self, updates: Tensor, cohort: Cohort | None = None, **settings: Any) -> Aggregate:
        """Return the aggregate of the rows of ``updates``."""
        ...


AGGREGATORS: Registry[Aggregator] = Registry("aggregator")
"""Functions ``(updates, cohort=None, *, settings) -> Aggregate``.

``info`` holds ``side`` and ``paper``; ``coordinatewise``: the rule looks at every coordinate on its own, and so is
applied to BatchNorm's statistics as well, where the others use their weights; ``root``: it needs root data.
"""


@dataclass(frozen=True)
class BoundAggregator:
    """An aggregator with its settings.

    Attributes:
        name: registered.
        settings: all of them, as in a scenario.
    """

    name: str
    settings: dict[str, Any]

    @property
    def info(self) -> dict[str, Any]:
        """What the aggregator declares of itself."""
        return AGGREGATORS[self.name].info

    @cached_property
    def _arguments(self) -> dict[str, Any]:
        return arguments(AGGREGATORS[self.name], self.settings)

    def __call__(self, updates: Tensor, cohort: Cohort | None = None) -> Aggregate:
        """Return the aggregate of (n, d) ``updates``.

        Raises:
            BadInput: there are too few updates for the rule, or it needs what the cohort hasn't.
        """
        return AGGREGATORS[self.name].value(updates, cohort, **self._arguments)

    def dry_run(self, clients: int) -> None:
        """Raise now what the first round would raise: so that too few clients are found before any training.

        Raises:
            BadInput: the rule can't work with so many clients.
        """
        root = torch.ones(2)
        self(torch.ones(clients, 2), Cohort(tuple(range(clients)), (1,) * clients, root))


def make_aggregator(name: str, settings: Mapping[str, Any] | None = None) -> BoundAggregator:
    """Return the aggregator ``name`` with ``settings``, checked.

    Raises:
        BadInput: no such aggregator or setting, or a value that isn't allowed.
    """
    return BoundAggregator(name, check_settings(AGGREGATORS, name, settings or {}))


def check_matrix(updates: Tensor, name: str, least: int = 1, why: str = "") -> int:
    """Return n if ``updates`` is an (n, d) matrix with ``least`` rows or more.

    Args:
        updates: to check.
        name: of the rule.
        least: how few rows it can do with.
        why: the formula behind ``least``.

    Raises:
        BadInput: it isn't; the message says what to do.
    """
    if updates.ndim != 2 or not updates.numel():
        raise BadInput(f"an aggregator needs an (n, d) matrix with n >= 1, not {tuple(updates.shape)}")
    n = len(updates)
    if n < least:
        raise BadInput(
            f"the aggregator '{name}' needs {why}: {least} updates a round or more, and there are {n}; "
            "let more clients take part (clients, clients_per_round) or lower the setting"
        )
    return n


def uniform(updates: Tensor, rows: list[int] | None = None) -> Tensor:
    """Return (n,) equal weights of ``rows`` (of all if None), zero for the others."""
    if rows is None:
        return updates.new_full((len(updates),), 1 / len(updates))
    weights = updates.new_zeros(len(updates))
    weights[rows] = 1 / len(rows)
    return weights
