"""How a federation went: what its rounds brought in accuracy, and cost in bytes, seconds and privacy."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from fedaudit.data.dataset import Split
from fedaudit.results.epsilon import CertificateRecord
from fedaudit.results.record import Adjacency, Unit
from fedaudit.task.info import TaskInfo


@dataclass
class History:
    """Filled by the simulator while it runs.

    Attributes:
        every: accuracy is measured every so many rounds and after the last; None: never.
        examples: of the held-out split, at most.
        measured_on: how many there were.
        rounds: finished rounds at each measurement.
        accuracy: share of held-out examples classified correctly, at each.
        per_client: at each, every client's accuracy on held-out examples, weighted as its own classes are.
        bytes: of each update as it was sent, statistics included.
        parameters: elements of each update that were sent: those of the tensors sent, without a sparse update's zeros.
        training_seconds: of all local training.
        client_defence_seconds: of all client-side defences.
        epsilon: after each round, where there is differential privacy (Rényi).
        epsilon_adjacency: by which ε is reckoned.
        epsilon_delta: δ, at which ε is told; None: there is no ε.
        epsilon_unit: whom ε protects.
        epsilon_of_clients: after each round, of the clients that sent least, median and most often.
        epsilon_pld: after the last, by the privacy loss distribution.
        certificate: after the last; None: no noise is accounted for.
        stopped: after how many rounds the budget ended the federation, if it did.
        why: the budget ended it.
        sent: for each round, which clients sent an update.
        rejected: for each round, whose of them the server left out.
        at_end: accuracy is measured after the last round even where ``every`` is None.
    """

    every: int | None = None
    examples: int = 1000
    measured_on: int = 0
    rounds: list[int] = field(default_factory=list)
    accuracy: list[float] = field(default_factory=list)
    per_client: list[list[float]] = field(default_factory=list)
    bytes: list[int] = field(default_factory=list)
    parameters: list[int] = field(default_factory=list)
    training_seconds: float = 0.0
    client_defence_seconds: float = 0.0
    epsilon: list[float] = field(default_factory=list)
    epsilon_adjacency: Adjacency = "add-remove"
    epsilon_delta: float | None = None
    epsilon_unit: Unit | None = None
    epsilon_of_clients: list[list[float]] = field(default_factory=list)
    epsilon_pld: float | None = None
    certificate: CertificateRecord | None = None
    stopped: int | None = None
    why: str | None = None
    sent: list[list[int]] = field(default_factory=list)
    rejected: list[list[int]] = field(default_factory=list)
    at_end: bool = False

    def add(self, step: History) -> None:
        """Add what one client's round cost, which a history of its own recorded."""
        self.bytes += step.bytes
        self.parameters += step.parameters
        self.training_seconds += step.training_seconds
        self.client_defence_seconds += step.client_defence_seconds

    def accepted(self, clients: range) -> list[float | None]:
        """Return, for each round, the share of the updates of ``clients`` that were taken; None: they sent none."""
        accepted: list[float | None] = []
        for sent, rejected in zip(self.sent, self.rejected, strict=True):
            own = [client for client in sent if client in clients]
            accepted.append(sum(c not in rejected for c in own) / len(own) if own else None)
        return accepted

    def measure(
        self,
        models: Iterable[nn.Module],
        task_info: TaskInfo,
        held_out: Split,
        client_data: Sequence[Split],
        finished: int,
        last: bool,
    ) -> None:
        """Measure the accuracy of the model, or the mean of each client's, if it is time; they stay as they were.

        It is over what no client holds, of the clients' classes alone.
        """
        due = finished % self.every == 0 or last if self.every else last and self.at_end
        if task_info.task_kind.real or not due:
            return
        self.measured_on = min(self.examples, len(held_out))
        each = [answers(model, task_info, held_out[torch.arange(self.measured_on)]) for model in models]
        right = torch.stack(each).sum(dim=0)
        total = right.sum(dim=0)
        self.rounds.append(finished)
        self.accuracy.append(float(right[1].sum() / total.sum()))
        per_client = []
        for data, (_, mine) in zip(client_data, each * (len(client_data) // len(each)), strict=True):
            by_class = mine * len(each) / total.clamp(min=1)
            held = torch.ones(len(total), dtype=torch.float64)  # of labels a client has each
            if not data.targets.is_floating_point():
                held = torch.bincount(data.targets[data.targets >= 0], minlength=len(total)).double()
            held *= total > 0
            per_client.append(float((by_class * held).sum() / held.sum().clamp(min=1)))
        self.per_client.append(per_client)


def answers(model: nn.Module, task_info: TaskInfo, data: Split) -> Tensor:
    """Return (2, classes) counts of wrong and right answers: of examples, of a mask's pixels, or of each label.

    A label counts as predicted from a probability of one half.
    """
    modes = {part: part.training for part in model.modules()}
    device = next(model.parameters()).device
    model.eval()
    counts = torch.zeros(2, task_info.target_values, dtype=torch.float64)
    with torch.no_grad():
        for inputs, targets in zip(data.inputs.split(250), data.targets.split(250), strict=True):
            outputs = model(task_info.normalise(inputs.to(device))).cpu()
            right, of = task_info.task_kind.right(outputs, targets)
            counts.index_put_((right.long(), of), torch.ones(len(of), dtype=torch.float64), accumulate=True)
    for part, mode in modes.items():
        part.training = mode
    return counts
