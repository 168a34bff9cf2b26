"""Aggregators that clip each client's update and add noise to the mean: central differential privacy, by client."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import field, replace
from typing import Annotated, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from fedaudit.defences.aggregation import Aggregate, Aggregator, Cohort, check_matrix, uniform
from fedaudit.defences.draws import numpy_draws
from fedaudit.defences.vectors import weighted_sum
from fedaudit.epsilon.accounting import Account, TakingPart
from fedaudit.transcript.update import ClientDefenceInfo, Update
from fedaudit.utils.errors import BadInput
from fedaudit.utils.registry import register
from fedaudit.utils.validation import Count, Fraction, NonNegative, Number, Positive

Side = Literal["client", "server"]
Average = Literal["fedavg", "mean"]
Delta = Annotated[Number, Field(gt=0, lt=1)]

_BEYOND = 6  # standard deviations of a noisy count; one is further off once in a billion rounds


class Clipping(Aggregator):
    """What both share: clip to a norm, average, add Gaussian noise; settings as of :class:`FixedClipping`."""

    whole = True

    noise_multiplier: NonNegative
    num_sampled_clients: Count | None
    average: Average
    side: Side
    delta: Delta
    clipped: dict[int, bool]

    @abstractmethod
    def norm(self) -> float:
        """Return the norm to which updates are clipped in this round."""

    def in_words(self) -> str:
        """Return what happens to updates, and who sees what, as a reader of a report is told."""
        norm = f"{self.norm():.3g}" + " at first, then to one that follows a quantile" * isinstance(
            self, AdaptiveClipping
        )
        over = f"{self.num_sampled_clients} clients" if self.num_sampled_clients else "the clients of a round"
        noise = f"adds noise of {self.noise_multiplier:.3g} times that norm over {over} to their mean"
        who, reads = {"server": ("the server clips", "whole"), "client": ("clients clip", "clipped")}[self.side]
        return (
            f"{who} updates to a norm of {norm}; the server {noise}: it reads updates {reads} and without noise, "
            "clients and outsiders models with it"
        )

    @abstractmethod
    def _noise(self, clipped: Sequence[bool], draws: np.random.RandomState) -> float:
        """Return the noise's standard deviation times the clients of a round, and go on to the next round."""

    def asked(self, update: Update, weights: dict[str, Tensor]) -> Update:
        """Return the update clipped, where clients do that; BatchNorm's statistics are a part of it."""
        if self.side == "server":
            return update
        moved = {name: value - weights[name] for name, value in update.buffers.items() if value.is_floating_point()}
        length = math.sqrt(sum(float(t.double().square().sum()) for t in [*update.tensors.values(), *moved.values()]))
        shrink = min(1.0, self.norm() / length) if length else 1.0
        self.clipped[update.client] = shrink < 1
        known = update.sanitised or ClientDefenceInfo(self.name)
        return replace(
            update,
            tensors={name: shrink * tensor for name, tensor in update.tensors.items()},
            buffers=update.buffers | {name: weights[name] + shrink * tensor for name, tensor in moved.items()},
            sanitised=replace(
                known,
                # of noise that is there already as much remains beside the update as before
                clip=shrink * known.clip if known.noise and known.clip else min(self.norm(), known.clip or math.inf),
                noise=shrink * known.noise,
                bound=known.bound and shrink * known.bound,
            ),
        )

    def __call__(self, updates: Tensor, cohort: Cohort | None = None) -> Aggregate:
        """Return the noisy mean of the clipped updates."""
        n = check_matrix(updates, self.name)
        cohort = cohort or Cohort()
        weights = uniform(updates)
        if self.average == "fedavg":
            if len(cohort.examples) != n:
                raise BadInput(f"the aggregator '{self.name}' needs the number of examples of each of the {n} updates")
            weights = torch.tensor(cohort.examples, dtype=torch.float64).to(updates.dtype)
            weights = weights / weights.sum()
        lengths = [float(row.double().norm()) for row in updates]
        shrink = [min(1.0, self.norm() / length) if length else 1.0 for length in lengths]
        clipped = [one < 1 for one in shrink]
        for row, client in enumerate(cohort.clients):
            if client in self.clipped:  # by itself
                shrink[row], clipped[row] = 1.0, self.clipped[client]
        self.clipped.clear()
        scaled = weights.double() * torch.tensor(shrink, dtype=torch.float64)
        vector = weighted_sum(updates, scaled.to(updates.dtype))
        draws = numpy_draws(cohort.generator)
        sigma = self._noise(clipped, draws) / (self.num_sampled_clients or n)
        if sigma:
            noise = torch.from_numpy(draws.normal(0, sigma, len(vector)))
            vector = vector + noise.to(vector)
        return Aggregate(vector, weights)

    def _sampled(self, who: TakingPart) -> int:
        return self.num_sampled_clients or who.per_round

    def _account(self, who: TakingPart, noise: float, count: float = math.inf) -> Account | None:
        """Return the account against whoever sees the global models.

        Args:
            noise: σ of the mean, times the clients sampled, in units of the norm.
            count: σ of the count of clipped updates, in units of what one of them moves it by.
        """
        if not noise:
            return None
        among, share = who.per_round, 1 / who.per_round
        if self.average == "fedavg":
            held = sorted(who.examples)
            share = held[-1] / (held[-1] + sum(held[: among - 1]))  # its weight in the worst of rounds
        mean = noise / (self._sampled(who) * share)
        both = (mean**-2 + count**-2) ** -0.5
        clients = len(who.examples)
        if among < clients:
            return Account(both, self.delta, among / clients, 1, of=(among, clients))
        return Account(both, self.delta, 1.0, 1)


@register(frozen=False)
class FixedClipping(Clipping):
    """Clips each update to a norm C, and adds N(0, z²C²/n²) to the mean (McMahan et al. 2018; Flower's fixed clipping).

    As Flower's ``DifferentialPrivacy{Server,Client}SideFixedClipping``: clipped is the change of the whole state,
    BatchNorm's statistics included, which get noise, too. Draws are NumPy's. Departure: BatchNorm's number of batches
    isn't a part of the update here, where Flower counts it in the length.

    *What is promised*, to those who see global models: z is the noise multiplier of n clients of equal weight.
    ``fedavg`` weighs by examples, so that a client of more than 1/n of a round's moves the mean by more than C/n, of
    which Flower's z knows nothing (its accountant refuses unequal weights): the account here takes the largest weight
    that a client can have. Numbers of examples are taken for public. A server sees each update without noise: whole
    where it clips itself, else at most C long.

    Args:
        noise_multiplier: z.
        clipping_norm: C.
        num_sampled_clients: n, by which the noise is divided; null: as many as send.
        average: ``fedavg``, weighted by examples, or the plain ``mean``.
        side: who clips: the ``server``, or the ``client``, which is told C.
        delta: δ of the account.
    """

    name = "fixed-clipping"
    summary = "Flower's fixed clipping: clipped updates, noise on their mean; central privacy"
    paper = "McMahan et al. 2018; Flower"

    noise_multiplier: NonNegative = 1.0
    clipping_norm: Positive = 1.0
    num_sampled_clients: Count | None = None
    average: Average = "fedavg"
    side: Side = "server"
    delta: Delta = 1e-5

    clipped: dict[int, bool] = field(default_factory=dict, init=False)  # of a round, by client, who clipped itself

    def norm(self) -> float:
        """Return C."""
        return self.clipping_norm

    def _noise(self, clipped: Sequence[bool], draws: np.random.RandomState) -> float:  # noqa: ARG002
        return self.noise_multiplier * self.clipping_norm

    def account(self, who: TakingPart) -> Account | None:
        """Return the account against whoever sees the global models; None without noise."""
        return self._account(who, self.noise_multiplier)


@register(frozen=False)
class AdaptiveClipping(Clipping):
    """Clips each update to a norm that follows a quantile of the updates' norms (Andrew et al. 2021, Algorithm 1).

    The norm C begins at ``initial_clipping_norm``; after each round C ← C·exp(−η(b̃ − γ)), b̃ being the share of
    updates not longer than C, with noise of σ_b/n. The mean gets noise z_Δ·C/n, with z_Δ = (z⁻² − (2σ_b)⁻²)^−½
    (Theorem 1), so that count and mean together have the noise multiplier z.

    ``rule: flower`` is what Flower's ``DifferentialPrivacy{Server,Client}SideAdaptiveClipping`` (1.42) do, by the same
    draws. They count the updates that *are* clipped, with the sign of the paper, which counts the others: where too
    many are clipped, the norm falls further, and where too few are, it rises; it leaves the quantile instead of
    following it, for ever. And they take the noise of the mean from the norm of the *next* round: where that has
    fallen, there is less of it than the updates' norm asks for.

    The rest is as of :class:`FixedClipping`. The account is of z, of the largest weight, and for ``rule: flower`` of
    the smallest norm that one round's fall can lead to (a count off by six standard deviations, once in a billion
    rounds, isn't reckoned with). One who is absent counts as half an update that isn't clipped.

    Args:
        noise_multiplier: z, of count and mean together.
        initial_clipping_norm: C of the first round.
        target_clipped_quantile: γ: the share of updates that shall not be clipped.
        clip_norm_lr: η.
        clipped_count_stddev: σ_b; null: n/20, or 0 without noise.
        num_sampled_clients: n, by which the noise is divided; null: as many as send.
        average: ``fedavg``, weighted by examples, or the plain ``mean``.
        side: who clips: the ``server``, or the ``client``, which is told C and says whether it clipped.
        rule: ``andrew``, or ``flower``.
        delta: δ of the account.

    Raises:
        BadInput: z isn't below 2σ_b: the count alone would cost more.
    """

    name = "adaptive-clipping"
    summary = "clips updates to a norm that follows a quantile of theirs, noise on their mean; central privacy"
    paper = "Andrew et al. 2021; Flower"

    noise_multiplier: NonNegative = 1.0
    initial_clipping_norm: Positive = 0.1
    target_clipped_quantile: Fraction = 0.5
    clip_norm_lr: Positive = 0.2
    clipped_count_stddev: NonNegative | None = None
    num_sampled_clients: Count | None = None
    average: Average = "fedavg"
    side: Side = "server"
    rule: Literal["andrew", "flower"] = "andrew"
    delta: Delta = 1e-5

    clipped: dict[int, bool] = field(default_factory=dict, init=False)  # of a round, by client, who clipped itself
    current: float | None = field(default=None, init=False)  # C

    def norm(self) -> float:
        """Return C of this round."""
        return self.initial_clipping_norm if self.current is None else self.current

    def _noises(self, sampled: int) -> tuple[float, float]:
        """Return z_Δ and σ_b."""
        z, count = self.noise_multiplier, self.clipped_count_stddev
        if not z:
            return 0.0, count or 0.0
        count = sampled / 20 if count is None else count
        if z >= 2 * count:
            raise BadInput(
                f"adaptive-clipping: noise_multiplier {z:g} needs a clipped_count_stddev above {z / 2:g}, and it is "
                f"{count:g} (a 20th of the clients, unless given): raise it, or lower noise_multiplier"
            )
        return float((z**-2 - (2 * count) ** -2) ** -0.5), count

    def _noise(self, clipped: Sequence[bool], draws: np.random.RandomState) -> float:
        n, now = len(clipped), self.norm()
        mean, count = self._noises(self.num_sampled_clients or n)
        counted = sum(clipped) if self.rule == "flower" else n - sum(clipped)
        share = float(draws.normal(counted, count)) / n
        self.current = now * math.exp(-self.clip_norm_lr * (share - self.target_clipped_quantile))
        return mean * (self.current if self.rule == "flower" else now)

    def account(self, who: TakingPart) -> Account | None:
        """Return the account against whoever sees the global models; None without noise."""
        mean, count = self._noises(self._sampled(who))
        if not mean:
            return None
        if self.rule == "flower":
            most = 1 - self.target_clipped_quantile + _BEYOND * count / who.per_round
            mean *= math.exp(-self.clip_norm_lr * most)
        return self._account(who, mean, 2 * count)
