"""What every aggregator is: settings in the constructor, an (n, d) matrix of updates in the call."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from fedaudit.epsilon.accounting import PrivacyAccount, TakingPart
from fedaudit.transcript.update import Update
from fedaudit.utils.errors import BadInput
from fedaudit.utils.registry import Plugin, Registry


@dataclass(frozen=True)
class Cohort:
    """Who sent the rows of the matrix, and what the server knows besides.

    Attributes:
        clients: (n,) who sent each row.
        examples: (n,) how many each client holds, or else how many its update was made from.
        root: (d,) the server's own update, made on its root data.
        generator: of what the rule draws; None takes it from the operating system.
    """

    clients: tuple[int, ...] = ()
    examples: tuple[int, ...] = ()
    root: Tensor | None = None
    generator: torch.Generator | None = None


@dataclass(frozen=True)
class Aggregate:
    """What an aggregator returns.

    Attributes:
        vector: (d,) the aggregated update.
        weights: (n,) each client's share in it; they sum to 1, or to 0 where nobody has one.
        rejected: row index of every client that was left out, with the reason.
        fallback: why the rule couldn't do what it is meant to do and did something else, if so.
    """

    vector: Tensor
    weights: Tensor
    rejected: dict[int, str] = field(default_factory=dict)
    fallback: str | None = None


AGGREGATORS: Registry[type[Aggregator]] = Registry("aggregator", "fedaudit.aggregators")


class Aggregator(Plugin, ABC):
    """What the server does with the (n, d) updates of a round. One instance a federation, so it may keep state.

    Class attributes beside a plug-in's:
        coordinatewise: the rule treats every coordinate on its own, and so is applied to BatchNorm's statistics as
            well, where the others use their weights.
        root: it needs the server's own update on root data, and has a setting ``root_examples``.
        whole: it takes the change of the whole state, BatchNorm's statistics included; clients hold nothing back.
        averages: how it weighs the updates where it is nothing but their mean, and so no defence; all it needs is
            their sum then, as secure aggregation yields it.
    """

    registry = AGGREGATORS

    coordinatewise: ClassVar[bool] = False
    root: ClassVar[bool] = False
    whole: ClassVar[bool] = False
    averages: ClassVar[Literal["equally", "by examples"] | None] = None
    root_examples: int = 0

    @abstractmethod
    def __call__(self, updates: Tensor, cohort: Cohort | None = None) -> Aggregate:
        """Return the aggregate of the rows of ``updates``; they aren't changed.

        Args:
            updates: (n, d).
            cohort: who sent them, and what the server knows besides.

        Raises:
            BadInput: there are too few updates for the rule, or it needs what the cohort hasn't.
        """

    def asked(self, update: Update, weights: dict[str, Tensor]) -> Update:  # noqa: ARG002
        """Return what a client sends of its update where the server tells it what to do with it; the update itself.

        Args:
            update: as its client-side defence made it.
            weights: that the client received.
        """
        return update

    def account(self, who: TakingPart) -> PrivacyAccount | None:  # noqa: ARG002
        """Return what a federation's rounds cost in privacy, against those who see global models; None: no promise.

        Args:
            who: takes part, and how often.
        """
        return None

    @classmethod
    def info(cls) -> dict[str, Any]:
        """Return what ``fedaudit list --json`` says beside name and summary."""
        declared = {"coordinatewise": cls.coordinatewise, "root": cls.root}
        return {"side": "server", "paper": cls.paper} | {name: True for name, value in declared.items() if value}

    def dry_run(self, clients: int) -> None:
        """Raise now what the first round would raise: so that too few clients are found before any training.

        Raises:
            BadInput: the rule can't work with so many clients.
        """
        root = torch.ones(2)
        self.anew()(torch.ones(clients, 2), Cohort(tuple(range(clients)), (1,) * clients, root))


def check_matrix(updates: Tensor, name: str, least: int = 1, why: str = "") -> int:
    """Return n if ``updates`` is (n, d) with ``least`` rows (by the formula ``why``) or more; else BadInput."""
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
