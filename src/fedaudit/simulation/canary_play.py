"""Canaries in a simulation: what they send, round after round, and what observers read of them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from fedaudit.defences.client_defences import ClientContext, ClientDefence, NoClientDefence
from fedaudit.defences.privacy import DifferentialPrivacy
from fedaudit.epsilon import Unit
from fedaudit.epsilon.accounting import Account
from fedaudit.epsilon.canaries import OBSERVERS, Canaries, CanaryRecords, CanarySpec, Directions
from fedaudit.simulation.budget import PrivacyBudget
from fedaudit.simulation.checkpoint import State
from fedaudit.simulation.client import Federation
from fedaudit.simulation.local_training import trainable
from fedaudit.simulation.server import CanaryUpdates
from fedaudit.transcript.update import Update
from fedaudit.utils.errors import BadInput
from fedaudit.utils.seeds import derive_seed, generator


class CanaryPlay:
    """The canaries of one simulated federation.

    At the client's level (and where there is no differential privacy) a canary is a client of its own: in every round
    in which it takes part it sends its direction, ``strength`` times the clip long, through the federation's
    client-side defence. Absent ones send zeros (adjacency ``add-remove``), or the opposite (``replace``), so that their
    number is no secret: the mean is taken over all of them. At the sample's level it is a record of one of the clients,
    which hold the same number each, and its direction is its
    gradient; see :class:`~fedaudit.epsilon.canaries.CanaryRecords`.

    Where the client-side defence is our own and draws nothing, what all canaries send is summed in one transform
    instead of one by one; what they send is the same, to rounding. With ``joint`` this holds under local noise, too, in
    distribution.
    """

    def __init__(self, federation: Federation, budget: PrivacyBudget) -> None:
        assert federation.canaries is not None
        self.federation, self.budget = federation, budget
        self.spec: CanarySpec = federation.canaries
        spec, seed, asked = federation.spec, federation.seed, self.spec
        dp = federation.defences.client_defence
        self.dp = dp if isinstance(dp, DifferentialPrivacy) else None
        self.unit: Unit = "record" if self.dp and self.dp.level == "sample" else "client"
        self.clip = self.dp.clip if self.dp else float(getattr(dp, "clipping_norm", asked.clip))
        self.shapes = {name: p.shape for name, p in trainable(federation.model).items()}
        size = sum(shape.numel() for shape in self.shapes.values())
        self.directions = Directions(derive_seed(seed, spec.name, "canaries"), asked.count, size)
        self.coins = torch.rand(asked.count, generator=generator(seed, spec.name, "canary coins")) < 0.5
        absent = 0.0 if asked.adjacency == "add-remove" else -1.0
        self.values = torch.where(self.coins, 1.0, absent)
        self.per_round = spec.clients_per_round or spec.clients
        self.share = self.per_round / spec.clients
        self.expected = round(self.share * asked.count) if self.unit == "client" else 0
        self.batch = min(spec.batch_size, *map(len, federation.client_data))
        self.sampler = generator(seed, spec.name, "canary sampling")
        self.at_once = type(dp) is NoClientDefence or (type(dp) is DifferentialPrivacy and dp.where == "central")
        self.rows = federation.aggregator.averages != "equally"
        self.joint = asked.joint and not self.at_once
        self._check_joint(dp)
        apart = self.unit == "client" and not self.at_once and not self.joint
        self.senders = [dp.anew() for _ in range(asked.count)] if apart else []
        self.generators = [generator(seed, spec.name, "canary", j) for j in range(len(self.senders))]
        self.dice = generator(seed, spec.name, "joint noise of canaries")
        self.readings: dict[str, list[Tensor]] = {name: [] for name in OBSERVERS}
        self.last = torch.zeros(self.directions.size)  # the global model, in units in which a canary adds 1
        self._total: tuple[Tensor, Tensor] | None = None

    def state_dict(self) -> State:
        """Return what changes from round to round, for a checkpoint."""
        return {
            "sampler": self.sampler.get_state(),
            "dice": self.dice.get_state(),
            "generators": [g.get_state() for g in self.generators],
            "senders": [s.state_dict() for s in self.senders],
            "rows": self.readings,
            "last": self.last,
        }

    def load_state_dict(self, state: State) -> None:
        """Go on from what :meth:`state_dict` returned."""
        self.sampler.set_state(state["sampler"])
        self.dice.set_state(state["dice"])
        for own, kept in zip(self.generators, state["generators"], strict=True):
            own.set_state(kept)
        for sender, kept in zip(self.senders, state["senders"], strict=True):
            sender.load_state_dict(kept)
        self.readings = {name: list(rows) for name, rows in state["rows"].items()}
        self.last = state["last"]

    def _check_joint(self, dp: ClientDefence) -> None:
        """Refuse joint noise where one draw can't stand for many."""
        if not self.joint:
            return
        if type(dp) is not DifferentialPrivacy or self.unit != "client" or self.rows:
            raise BadInput("epsilon's noise: joint is for dp at the client's level and the rule mean; use noise: each")
        if not self.directions.orthonormal:
            raise BadInput(
                f"epsilon's noise: joint needs a model with more parameters than canaries: {self.directions.size} for "
                f"{self.spec.count}; use noise: each"
            )

    def _noisy(self, here: Tensor) -> tuple[Tensor, Tensor]:
        """Return the noise of the sum of those who are ``here``, (d,), and of each one's reading, (m,) float64.

        k canaries with noises z_j of N(0, s²I) each, s = σ times the clip, and orthonormal directions u_j: their sum S
        is of N(0, ks²I), and given S the readings u_j·z_j are independent, of mean u_j·S/k and variance s²(1 − 1/k).
        """
        assert self.dp is not None
        k, s = int(here.sum()), self.dp.noise * self.clip
        if not k:
            return torch.zeros(self.directions.size), torch.zeros(self.spec.count, dtype=torch.float64)
        total = s * math.sqrt(k) * torch.randn(self.directions.size, generator=self.dice)
        rest = torch.randn(self.spec.count, generator=self.dice, dtype=torch.float64)
        return total, self.directions.project(total) / k + s * math.sqrt(1 - 1 / k) * rest

    def records(self) -> list[CanaryRecords | None]:
        """Return the canaries among each client's records; None of malicious ones, or where canaries are clients."""
        spec = self.federation.spec
        if self.unit == "client":
            return [None] * spec.clients
        seed, name = self.federation.seed, spec.name
        own: list[CanaryRecords | None] = [
            CanaryRecords(
                self.directions,
                list(range(number, self.spec.count, spec.honest)),
                self.spec.strength * self.clip * self.values,
                generator(seed, name, "canary records", number),
            )
            for number in range(spec.honest)
        ]
        return own + [None] * (spec.clients - spec.honest)

    def join(self, weights: dict[str, Tensor], layers: tuple[tuple[str, ...], ...]) -> CanaryUpdates | None:
        """Return what canary clients send in the next round; None where canaries are records."""
        if self.unit == "record":
            return None
        here = torch.rand(self.spec.count, generator=self.sampler) < self.share
        sent = torch.where(here, self.values, 0.0)
        nothing = torch.full_like(sent, torch.nan, dtype=torch.float64)
        if (self.at_once or self.joint) and not self.rows:
            if self._total is None or not sent.equal(self._total[0]):
                self._total = sent, self.clip * self.directions.combine(sent)
            total, own = self._sign * self._total[1], torch.where(here, sent.double(), nothing)
            if self.joint:
                noise, read = self._noisy(here)
                total, own = total + noise, own + self._sign * read / self.clip
            self.readings["updates"].append(own)
            return CanaryUpdates(self._named(total), self.expected, [])
        context = ClientContext(weights, layers, self.per_round + self.expected)
        total, own, rows = torch.zeros(self.directions.size), nothing, []
        for number in torch.nonzero(here).flatten().tolist():
            direction = self.directions.one(number)
            update = self._sent(number, direction, context)
            vector = _flat(update.tensors, self.shapes)
            own[number] = self._sign * float(vector @ direction) / self.clip
            if self.rows:
                rows.append(update)
            total += vector
        self.readings["updates"].append(own)
        return CanaryUpdates(self._named(total), len(rows) if self.rows else self.expected, rows)

    def _sent(self, number: int, direction: Tensor, context: ClientContext) -> Update:
        federation = self.federation
        strength = 1.0 if self.dp is None or self.at_once else self.spec.strength
        length = strength * self.clip * self._sign * float(self.values[number])
        held = [len(data) for data in federation.client_data]
        update = Update(
            client=federation.spec.clients + number,
            kind="gradient" if federation.spec.algorithm == "fedsgd" else "weights",
            tensors=self._named(length * direction),
            num_examples=max(1, round(sum(held) / len(held))),
            training=None,
        )
        return update if self.at_once else self.senders[number](update, context, self.generators[number])

    def _named(self, vector: Tensor) -> dict[str, Tensor]:
        pieces = vector.split([shape.numel() for shape in self.shapes.values()])
        return {name: piece.view(shape) for (name, shape), piece in zip(self.shapes.items(), pieces, strict=True)}

    def look(
        self,
        updates: Sequence[Update],
        canary_updates: CanaryUpdates | None,
        before: dict[str, Tensor],
        after: dict[str, Tensor],
    ) -> None:
        """Note what is read of the canaries in the round that is over; ``canary_updates`` where they are clients."""
        total = torch.zeros(self.directions.size)
        if canary_updates is not None:
            for sent in (canary_updates.total, *(update.tensors for update in updates)):
                total += _flat(sent, self.shapes)
        else:
            own = torch.full((self.spec.count,), torch.nan, dtype=torch.float64)
            for update in updates:
                vector = _flat(update.tensors, self.shapes)
                total += vector
                size = min(self.federation.spec.batch_size, len(self.federation.client_data[update.client]))
                honest = self.federation.spec.honest
                numbers = range(update.client, self.spec.count, honest) if update.client < honest else range(0)
                theirs = torch.tensor(numbers, dtype=torch.int64)
                own[theirs] = self._unit(size) * self.directions.project(vector)[theirs]
            self.readings["updates"].append(own)
        self.readings["sum"].append(self._sign * self._unit(self.batch) * self.directions.project(total))
        last = _flat(after, self.shapes)
        moved = last - _flat(before, self.shapes)
        taking_part = len(updates) + (canary_updates.count if canary_updates else 0)
        scale = taking_part * self._unit(self.batch) / self._step
        self.readings["models"].append(self._sign * scale * self.directions.project(moved))
        self.last = scale * last

    @property
    def _sign(self) -> int:
        """Return the sign of what canary clients send in this round."""
        paired = self.unit == "client" and self.spec.signs == "paired"
        return -1 if paired and len(self.readings["models"]) % 4 >= 2 else 1

    @property
    def _step(self) -> float:
        spec = self.federation.spec
        return -spec.learning_rate if spec.algorithm == "fedsgd" else 1.0

    def _unit(self, batch: int) -> float:
        """Return by what an inner product with a client's update is multiplied, so that a canary adds 1."""
        if self.unit == "client":
            return 1 / self.clip
        spec = self.federation.spec
        return batch / self.clip / (1.0 if spec.algorithm == "fedsgd" else -spec.learning_rate)

    def end(self) -> Canaries:
        """Return what was seen of the canaries, with what is promised."""
        dp, account = self.dp, self.budget.account
        self.readings["final"] = [self.directions.project(self.last)]
        rate, steps = 1.0, 1
        if isinstance(account, Account) and self.unit == "record":
            rate = min(1.0, self.batch / min(map(len, self.federation.client_data)))
            steps = account.steps
        sigma = account.noise if isinstance(account, Account) else 0.0
        noise: dict[str, float] = {}
        if sigma and not self.budget.central:
            one = sigma * math.sqrt(steps)
            noise = dict.fromkeys(("sum", "models"), one * math.sqrt(self.per_round + self.expected))
            noise["updates"] = one
        elif dp is not None:
            noise = {"models": sigma}
        covered = () if account is None else ("models", "final") if self.budget.central else tuple(OBSERVERS)
        return Canaries(
            unit=self.unit,
            adjacency=self.spec.adjacency,
            readings={name: torch.stack(rows) for name, rows in self.readings.items() if rows},
            noise=noise,
            rates={name: rate * (1.0 if name == "updates" else self.share) for name in OBSERVERS},
            steps=steps,
            covered=covered,
            claimed=self.budget.claimed(self.spec.adjacency),
            delta=account.delta if account else 1e-5,
            joint=self.joint,
            gaussian=isinstance(account, Account),
        )


def _flat(tensors: dict[str, Tensor], shapes: dict[str, torch.Size]) -> Tensor:
    return torch.cat(
        [tensors[name].reshape(-1) if name in tensors else torch.zeros(shape.numel()) for name, shape in shapes.items()]
    )
