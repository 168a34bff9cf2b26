"""Membership over rounds: each client's update against those of the others, and how a record's loss goes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from fedaudit.attacks.base import Case, Progress, register
from fedaudit.attacks.records.membership import Score, ScoringAttack
from fedaudit.attacks.records.target import MembershipFinding, target_of
from fedaudit.transcript.observation import Message, Observation
from fedaudit.utils.errors import NotApplicable
from fedaudit.utils.validation import Count

_LEAST_VARIANCE = 1e-8  # of the others' statistics, as in the authors' code
_LEAST_LOSS = 1e-12  # whose log-odds are finite


@register
class FedMIA(ScoringAttack):
    """A record that moves one client's update as it moves no other's is taken for a member (Zhu et al. 2025, FedMIA).

    Of a record that one client holds, the others' updates of the same round show what an update looks like without it.
    In each round every client has a statistic s of the record; a Gaussian of the other clients' statistics gives the
    probability P[N(μ, σ²) ≥ s] that a client without the record has as much (their steps 1 and 2), and the mean of that
    over the client's rounds is small for a member (step 3). The statistic is the log-odds of e^-loss under the model
    that the client returned (FedMIA-I), or the cosine between the record's gradient at the model that was sent and the
    client's update, over all parameters that every client of the round sent (FedMIA-II).

    The question is the paper's, about one target client: a record has a score for each client, minus the logarithm of
    that mean. Departures: every client is the target once. A client that took part in few rounds, of three clients or
    more, counts by those. FedMIA-I's paper takes the loss as it is; its log-odds are closer to a Gaussian (Carlini et
    al. 2022). BatchNorm is in evaluation mode. Variances are at least 1e-8, as in the authors' code.

    Args:
        statistic: ``gradient``, the cosine, or ``loss``, which needs models, and so a federation of fedavg.
        rounds: as many, evenly spread over those of three clients or more, the last one among them; None: all.
    """

    name = "fedmia"
    summary = "a record that moves one client's update as it moves no other's was trained on"
    paper = "Zhu et al. 2025 (FedMIA: An effective membership inference attack exploiting the all for one principle)"
    threat_model = "server or eavesdropper, passive"
    needs = ("records (threat.target_records)", "updates of three clients or more in a round, each by itself")
    default_scope = "federation"
    on_sums = "refused: it compares single clients' updates"
    control = "sources"

    first_settings: ClassVar[dict[str, Any]] = {"rounds": 10}

    statistic: Literal["gradient", "loss"] = "gradient"
    rounds: Count | None = None

    @classmethod
    def fits(cls, case: Case) -> bool:
        return case.asks_for_members and case.reads_clients and case.clients_per_round >= 3 and case.server is None

    def check(self, observation: Observation) -> None:
        """Raise unless there are records, and a round of three clients, each of which sent what the statistic needs."""
        messages = observation.messages
        if any(message.update.members for message in messages):
            raise NotApplicable(
                f"{self.name} compares single clients' updates, and only sums of several are known (secure "
                "aggregation); audit with threat.sees=updates, or by loss-series"
            )
        super().check(observation)
        observation.need_messages()
        rounds = _rounds(observation)
        if not rounds:
            raise NotApplicable(
                f"{self.name} compares each client with two others or more of its round, and no round has the updates "
                "of three; raise clients or clients_per_round, or use loss-series"
            )
        if self.statistic == "loss":
            _need_models(observation, "statistic: gradient")
        elif not all(map(_shared, rounds)):
            raise NotApplicable(
                f"{self.name} compares the layers that all clients of a round send, and those of a round have none in "
                "common; use statistic: loss"
            )

    def scorer(
        self, observation: Observation, _generator: torch.Generator, progress: Progress
    ) -> tuple[Score, tuple[str, ...]]:
        """Return minus the logarithm of each client's mean probability (n, k), by the clients' numbers."""
        rounds = _spread(_rounds(observation), self.rounds)
        statistics = _log_odds if self.statistic == "loss" else _cosines

        def score(inputs: Tensor, labels: Tensor) -> Tensor:
            tails: dict[int, list[Tensor]] = {}
            for done, messages in enumerate(rounds):
                values = statistics(observation, messages, inputs, labels)
                for message, tail in zip(messages, log_tails(values), strict=True):
                    tails.setdefault(message.client, []).append(tail)
                progress(done + 1, len(rounds))
            means = [torch.stack(tails[key]).logsumexp(dim=0) - math.log(len(tails[key])) for key in sorted(tails)]
            return -torch.stack(means, dim=1)

        return score, ()

    def decide(self, scores: Tensor) -> Tensor:
        """Return of each client's (n, k) scores the highest: half of the records are members, of one of k clients."""
        return scores > scores.quantile(1 - 1 / (2 * scores.shape[1]), dim=0)

    def _run(
        self, observation: Observation, generator: torch.Generator, device: str, progress: Progress
    ) -> MembershipFinding:
        found = super()._run(observation, generator, device, progress)
        asked = {message.client for messages in _spread(_rounds(observation), self.rounds) for message in messages}
        return dataclasses.replace(found, clients=torch.tensor(sorted(asked)))


@register
class LossSeries(ScoringAttack):
    """A record that the federation learns quickly is taken for a member (Chang et al. 2024; Gu et al. 2022).

    The score is the least-squares slope of a signal of the record over the rounds (Chang et al., FTA): of its
    confidence e^-loss, of the log-odds of that, or minus the slope of the loss. It needs the models alone, no shadows.
    Departures: Chang et al. set the threshold by examples that weren't trained on, which is ``false_positives``. Gu et
    al. (CS-MIA) give the series of confidences to a network that learns from the adversary's own members, and the
    slope is what needs no learning. Rounds that aren't in the recording are taken for none with the global model, which
    has no numbers; a client's models are placed at the rounds in which it returned them.

    Args:
        model: ``global``, those that every participant received, one a round; ``client``, those that one client
            returned, which a server or an eavesdropper sees.
        signal: ``confidence``, ``log-odds`` or ``loss``.
    """

    name = "loss-series"
    summary = "a record that is learnt quickly over the rounds was trained on"
    paper = "Chang et al. 2024 (Efficient privacy auditing in federated learning)"
    threat_model = "server, eavesdropper or client, passive; a client sees the global model only"
    needs = ("records (threat.target_records)", "models of two rounds or more")
    default_scope = "federation"

    @classmethod
    def fits(cls, case: Case) -> bool:
        return case.asks_for_members and case.rounds > 1

    model: Literal["global", "client"] = "global"
    signal: Literal["confidence", "log-odds", "loss"] = "confidence"

    def scope(self) -> str:
        """Return ``client`` where the models are one client's."""
        return "federation" if self.model == "global" else "client"

    def check(self, observation: Observation) -> None:
        """Raise unless there are records, and the models of two rounds."""
        super().check(observation)
        if self.model == "client":
            observation.need_messages()
            _need_models(observation, "model: global")
        if len(self._models(observation)) < 2:
            whose = "the global model" if self.model == "global" else "this client's model"
            raise NotApplicable(
                f"{self.name} needs models of two rounds or more, and {whose} is known of one only; use loss-threshold"
            )

    def _models(self, observation: Observation) -> dict[int, dict[str, Tensor]]:
        """Return the states that the attack follows, by round."""
        if self.model == "global":
            return dict(enumerate(observation.weights))
        return {message.round: _returned(message) for message in observation.messages}

    def scorer(
        self, observation: Observation, _generator: torch.Generator, progress: Progress
    ) -> tuple[Score, tuple[str, ...]]:
        """Return the slope."""
        models = self._models(observation)
        rounds = torch.tensor(list(models), dtype=torch.float64)
        weights = rounds - rounds.mean()
        weights = weights / weights.square().sum()

        def score(inputs: Tensor, labels: Tensor) -> Tensor:
            slope = torch.zeros(len(inputs), dtype=torch.float64)
            for done, (weight, state) in enumerate(zip(weights, models.values(), strict=True)):
                slope += weight * self._signal(_losses(observation, state, inputs, labels))
                progress(done + 1, len(models))
            return slope

        return score, ()

    def _signal(self, losses: Tensor) -> Tensor:
        if self.signal == "loss":
            return -losses
        return (-losses).exp() if self.signal == "confidence" else log_odds(losses)


def log_tails(values: Tensor) -> Tensor:
    """Return log P[N(μ, σ²) ≥ s] of (k, n) statistics s of k ≥ 3 clients, by mean μ and variance σ² of the others'."""
    tails = []
    for own in range(len(values)):
        others = torch.cat([values[:own], values[own + 1 :]])
        spread = (others.var(dim=0, correction=0) + _LEAST_VARIANCE).sqrt()
        tails.append(torch.special.log_ndtr((others.mean(dim=0) - values[own]) / spread))
    return torch.stack(tails)


def log_odds(losses: Tensor) -> Tensor:
    """Return log(p / (1 − p)) of p = e^-loss, which for cross-entropy is the probability of the right class."""
    losses = losses.clamp(min=_LEAST_LOSS)
    return -losses - torch.log(-torch.expm1(-losses))


def _log_odds(observation: Observation, messages: Sequence[Message], inputs: Tensor, labels: Tensor) -> Tensor:
    """Return (k, n) log-odds of n examples under the models that k clients returned."""
    return torch.stack([log_odds(_losses(observation, _returned(message), inputs, labels)) for message in messages])


def _cosines(observation: Observation, messages: Sequence[Message], inputs: Tensor, labels: Tensor) -> Tensor:
    """Return (k, n) cosines of the downhill directions of n examples and k clients' updates; 0 where there is none."""
    names = _shared(messages)
    cosines = torch.zeros(len(messages), len(inputs), dtype=torch.float64)
    left = list(range(len(messages)))
    while left:
        sent = messages[left[0]].weights
        rows = [row for row in left if messages[row].weights is sent]  # all, unless the server singles clients out
        left = [row for row in left if row not in rows]
        moved = torch.stack([_flat(messages[row].update.tensors, names) for row in rows])
        moved = moved / moved.norm(dim=1, keepdim=True)
        down = 1.0 if messages[rows[0]].update.kind == "gradient" else -1.0
        for column, gradient in enumerate(target_of(observation, sent).gradients(inputs, labels)):
            uphill = _flat({name: gradient.get(name, torch.zeros(sent[name].shape)) for name in names}, names)
            cosines[rows, column] = down * (moved @ (uphill / uphill.norm()))
    return cosines.nan_to_num(nan=0.0)


def _flat(tensors: dict[str, Tensor], names: Sequence[str]) -> Tensor:
    return torch.cat([tensors[name].flatten().double() for name in names])


def _rounds(observation: Observation) -> list[list[Message]]:
    """Return the messages of each round in which three clients or more sent one."""
    rounds: dict[int, list[Message]] = {}
    for message in observation.messages:
        rounds.setdefault(message.round, []).append(message)
    return [messages for messages in rounds.values() if len(messages) >= 3]


def _spread(rounds: list[list[Message]], most: int | None) -> list[list[Message]]:
    """Return at most so many of the rounds, evenly spread, the last one among them."""
    number = min(most or len(rounds), len(rounds))
    return [rounds[(i + 1) * len(rounds) // number - 1] for i in range(number)]


def _shared(messages: Sequence[Message]) -> list[str]:
    """Return the parameters that all of these messages hold."""
    first, *others = (message.update.tensors for message in messages)
    return [name for name in first if all(name in tensors for tensors in others)]


def _need_models(observation: Observation, remedy: str) -> None:
    if any(message.update.kind == "gradient" for message in observation.messages):
        raise NotApplicable(
            f"clients send gradients, and what model each would return isn't known; use {remedy}, or a federation of "
            "fedavg"
        )


def _returned(message: Message) -> dict[str, Tensor]:
    """Return the state of the model that the client returned; what it didn't send is as it was."""
    moved = {name: message.weights[name] + t for name, t in message.update.tensors.items()}
    return {**message.weights, **message.update.buffers, **moved}


def _losses(observation: Observation, state: dict[str, Tensor], inputs: Tensor, labels: Tensor) -> Tensor:
    """Return the loss (n,) of each example, float64; what isn't finite counts as very large."""
    return target_of(observation, state).losses(inputs, labels).nan_to_num(nan=1e30, posinf=1e30)
