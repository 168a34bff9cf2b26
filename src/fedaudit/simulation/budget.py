"""The privacy budget of a federation: who may still send, and what has been spent."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from torch import Tensor

from fedaudit.defences.privacy import DifferentialPrivacy, central_noise
from fedaudit.epsilon import Adjacency
from fedaudit.epsilon.accounting import Account, PrivacyAccount, TakingPart
from fedaudit.results.epsilon import CertificateRecord
from fedaudit.simulation.checkpoint import State
from fedaudit.simulation.client import Federation
from fedaudit.simulation.history import History
from fedaudit.utils.fingerprint import tensor_digest


class PrivacyBudget:
    """Who may still send, where the updates have differential privacy."""

    def __init__(self, federation: Federation, history: History) -> None:
        spec, client_data, client_defence = federation.spec, federation.client_data, federation.defences.client_defence
        self.history = history
        self.central_noise = 0.0
        self.sent = [0] * spec.clients
        self.finished = 0
        fewest = min(map(len, client_data), default=0)
        batch = max(1, min(spec.batch_size, fewest))
        epoch = math.ceil(max(map(len, client_data), default=0) / batch)
        per_round = spec.clients_per_round or spec.clients
        who = TakingPart(
            examples=tuple(map(len, client_data)),
            per_round=per_round,
            steps=spec.local_steps or (spec.local_epochs or 0) * epoch or 1,
            batch=batch,
            epoch=epoch if spec.local_epochs and not spec.local_steps else None,
            elements=sum(tensor.numel() for tensor in federation.model.state_dict().values()),
        )
        # that of clients who protect themselves, if they do: it is against the server, too
        own = client_defence.account(who)
        self.account: PrivacyAccount | None = own or federation.aggregator.account(who)
        self.central = own is None
        if self.account:
            history.epsilon_adjacency, history.epsilon_delta = self.account.adjacency, self.account.delta
            sample = isinstance(client_defence, DifferentialPrivacy) and client_defence.level == "sample"
            history.epsilon_unit = "record" if sample else "client"
        if isinstance(client_defence, DifferentialPrivacy):
            self.central = client_defence.where == "central"
            guests = federation.canaries.count if federation.canaries and client_defence.level == "client" else 0
            taking_part = per_round + round(guests * per_round / spec.clients)
            # the last batch of a pass may be smaller, and an example weighs more in its mean
            smallest = min(len(data) % spec.batch_size or spec.batch_size for data in client_data)
            self.central_noise = central_noise(client_defence, taking_part, smallest)
        self.allowed = self.account.rounds(client_defence.budget()) if self.account else 0

    def state_dict(self) -> State:
        """Return what changes from round to round, for a checkpoint."""
        return {"sent": self.sent, "finished": self.finished}

    def load_state_dict(self, state: State) -> None:
        """Go on from what :meth:`state_dict` returned."""
        self.sent, self.finished = list(state["sent"]), state["finished"]

    def admit(self, order: list[int]) -> list[int]:
        """Return those of ``order`` who may send in the next round."""
        if self.account is None:
            return order
        if self.central:
            return order if self.finished < self.allowed else []
        return [number for number in order if self.sent[number] < self.allowed]

    def count(self, senders: list[int]) -> None:
        """Note that a round is over, and who sent in it."""
        self.finished += 1
        for number in senders:
            self.sent[number] += 1

    def close(self, senders: list[int]) -> None:
        """Note what has been spent when a round is over: locally, by the client that sent most often."""
        self.count(senders)
        if self.account is not None:
            self.history.epsilon.append(self.account.spent(self._counted()))
            sent = [self.finished] * len(self.sent) if self.central else sorted(self.sent)
            least, median, most = sent[0], sent[len(sent) // 2], sent[-1]
            self.history.epsilon_of_clients.append([self.account.spent(n) for n in (least, median, most)])

    def end(self, candidates: Tensor) -> None:
        """Note what was spent in all, by the tighter account, and what that rules out of naming one of (m, …)."""
        if self.account is not None:
            self.history.epsilon_pld = self.account.spent(self._counted(), "pld")
            if different := len({tensor_digest(one) for one in candidates}):
                rounds, luck, held = self._counted(), 1 / different, None
                if isinstance(self.account, Account):
                    held = replace(self.account, rate=1.0, every=1, of=None).success(rounds, luck)
                self.history.certificate = CertificateRecord(
                    candidates=different, success=self.account.success(rounds, luck), held=held, central=self.central
                )

    def claimed(self, adjacency: Adjacency) -> float | None:
        """Return ε of the rounds so far, by the tighter account and this adjacency; None where there is no account."""
        if self.account is None:
            return None
        return self.account.by(adjacency).spent(self._counted(), "pld")

    def promise(self) -> dict[str, Any]:
        """Return what is promised of one that takes another's place: ``epsilon``, ``delta``, and of the noise.

        ``central``: only those who see global models are meant. ``gaussian``: the account is that of one Gaussian
        mechanism; drawing makes a mixture.
        """
        assert self.account is not None
        return {
            "epsilon": self.claimed("replace"),
            "delta": self.account.delta,
            "central": self.central,
            "gaussian": self.account.gaussian,
        }

    def _counted(self) -> int:
        return self.finished if self.central else max(self.sent)
