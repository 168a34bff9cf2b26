"""Source inference: of a record that a client trained on, which client it was."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fedaudit.attacks.base import Attack, Case, Progress, register
from fedaudit.attacks.findings import Finding
from fedaudit.attacks.records.target import Target, whole
from fedaudit.transcript.observation import Message, Observation
from fedaudit.utils.errors import NotApplicable
from fedaudit.utils.validation import Positive


@dataclass(frozen=True, kw_only=True)
class SourceFinding(Finding, kind="source"):
    """Of each of the adversary's records, which client it comes from, if it is a client's.

    Attributes:
        clients: (k,) int64, the numbers of the clients that were compared, ascending.
        scores: (n, k) float64; the higher, the more likely that client.
        sources: (n,) int64, the number of the client that the attack names.
        blind: (n,) int64, the one that the same adversary names without any model; None: it isn't asked.
    """

    clients: Tensor
    scores: Tensor
    sources: Tensor
    blind: Tensor | None = None


@register
class SourceInference(Attack):
    """The client whose returned model has the least loss on a record is named (Hu et al. 2021, Theorem 2).

    A client's score is by how much its training lowered the record's loss: that under the model which it received,
    less that under the one which it returned, on average over its updates. Where all clients are compared in the same
    round they received one model, and the order is the paper's, by the returned models' losses. Departures: the paper
    attacks round by round and reports the best one, which only the truth can tell; ``last`` is one such round. Several
    rounds are taken together by how much the loss was lowered, because the global model gets better meanwhile and
    clients may take part in different ones. From a gradient the model returned is that of one step along it, as for
    FedSGD in the authors' later work (Hu et al. 2023, Beyond membership inference attacks in federated learning).

    Args:
        rounds: ``all``, the mean over all updates of each client; ``last``, its last one alone.
        learning_rate: of the step along a gradient; None: the one that the clients' training is known to have.
    """

    name = "source-inference"
    summary = "names the client whose training lowered a record's loss most"
    paper = "Hu et al. 2021 (Source inference attacks in federated learning)"
    threat_model = "server or eavesdropper, passive"
    needs = ("records (threat.target_records)", "updates of two clients or more, each by itself")
    default_scope = "federation"
    recovers = "whose records are"
    finds = SourceFinding
    on_sums = "refused: of a sum no client's own model is known"

    rounds: Literal["all", "last"] = "all"
    learning_rate: Positive | None = None

    @classmethod
    def fits(cls, case: Case) -> bool:
        return case.asks_for_members and case.reads_clients

    def check(self, observation: Observation) -> None:
        """Raise unless there are records, and updates of two clients at least, each by itself."""
        messages = observation.messages
        if any(message.update.members for message in messages):
            raise NotApplicable(
                f"{self.name} compares what single clients returned, and only sums of several clients' updates are "
                "known (secure aggregation); audit with threat.sees=updates"
            )
        super().check(observation)
        whole(observation)
        observation.need_messages()
        if len({message.client for message in messages}) < 2:
            raise NotApplicable(f"{self.name} names one client of several, and updates of one only are known")
        for message in messages:
            self._step(message)

    def _step(self, message: Message) -> float:
        """Return by what an update is to be multiplied to get from the model sent to the one returned."""
        update = message.update
        if update.kind == "weights":
            return 1.0
        rate = self.learning_rate or (update.training.learning_rate if update.training else None)
        if not rate:
            raise NotApplicable(
                "clients send gradients, and which step they stand for isn't known; set attacks.source-inference."
                "learning_rate, or threat.knows_training: true"
            )
        return -rate

    def _run(
        self, observation: Observation, _generator: torch.Generator, _device: str, progress: Progress
    ) -> SourceFinding:
        by_client: dict[int, list[Message]] = {}
        for message in observation.messages:
            by_client.setdefault(message.client, []).append(message)
        chosen = {
            client: by_client[client][-1:] if self.rounds == "last" else by_client[client]
            for client in sorted(by_client)
        }
        total = sum(map(len, chosen.values()))
        before: dict[int, Tensor] = {}  # by round: losses under the model that was sent
        columns = []
        done = 0
        for messages in chosen.values():
            lowered = []
            for message in messages:
                if message.round not in before:
                    before[message.round] = _losses(observation, message.weights)
                lowered.append(before[message.round] - _losses(observation, self._returned(message)))
                done += 1
                progress(done, total)
            columns.append(torch.stack(lowered).mean(dim=0))
        scores = torch.stack(columns, dim=1)
        clients = torch.tensor(list(chosen), dtype=torch.int64)
        return SourceFinding(clients=clients, scores=scores, sources=clients[scores.argmax(dim=1)])

    def _returned(self, message: Message) -> dict[str, Tensor]:
        """Return the state of the model that the client returned."""
        update, step = message.update, self._step(message)
        moved = {name: message.weights[name] + step * t for name, t in update.tensors.items()}
        return {**message.weights, **update.buffers, **moved}


def _losses(observation: Observation, state: dict[str, Tensor]) -> Tensor:
    """Return the loss (n,) of each record under a model, float64; what isn't finite counts as very large."""
    records = whole(observation)
    module = copy.deepcopy(observation.module)
    module.load_state_dict(state)
    target = Target(module.eval(), observation.task_info, observation.loss)
    return target.losses(records.inputs, records.labels).nan_to_num(nan=1e30, posinf=1e30)
