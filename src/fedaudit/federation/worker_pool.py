"""Runs a round's client steps in this process, or in worker processes where that is quicker. The bits are the same."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from torch import Tensor, nn

from fedaudit.federation.checkpoint import State
from fedaudit.federation.client import Client
from fedaudit.federation.history import History
from fedaudit.update import Update
from fedaudit.utils.errors import FedAuditError
from fedaudit.utils.machine import one_thread
from fedaudit.utils.processes import WorkerDied, run_tasks

_WORTH = 10.0  # seconds that are left, below which starting processes doesn't pay


class WorkerPool:
    """Runs the clients of a round.

    The first round runs in this process and is timed; if more than ten seconds are left, worker processes run the
    honest clients from then on. Malicious clients collude, so they run here, one after the other.
    """

    def __init__(self, clients: Sequence[Client], workers: int, rounds: int) -> None:
        self.clients = clients
        self.workers = workers
        self.left = rounds
        self.seconds = 0.0  # of the last round that ran here

    def run_round(
        self,
        model: nn.Module,
        index: int,
        weights: dict[str, Tensor],
        chosen: Sequence[int],
        history: History,
        report: Callable[[int], None],
    ) -> list[tuple[Update, Tensor]]:
        """Return what each chosen client sends, as it arrives, and the rows of the examples it was made from.

        Args:
            model: the architecture; its weights are undefined afterwards.
            index: of the round.
            weights: of the round.
            chosen: numbers of the clients.
            history: is told what it cost.
            report: called with the clients of this round that are done.

        Raises:
            FedAuditError: a client's worker process died twice.
        """
        self.left -= 1
        if self.workers > 1 and len(chosen) > 1 and self.seconds * (self.left + 1) > _WORTH:
            return self._apart(model, index, weights, chosen, history, report)
        return self._here(model, index, weights, chosen, history, report)

    def _here(
        self,
        model: nn.Module,
        index: int,
        weights: dict[str, Tensor],
        chosen: Sequence[int],
        history: History,
        report: Callable[[int], None],
    ) -> list[tuple[Update, Tensor]]:
        began = time.perf_counter()
        steps = []
        for number in chosen:
            steps.append(_step(self.clients[number], model, index, weights, history))
            report(len(steps))
        self.seconds = time.perf_counter() - began
        return steps

    def _apart(
        self,
        model: nn.Module,
        index: int,
        weights: dict[str, Tensor],
        chosen: Sequence[int],
        history: History,
        report: Callable[[int], None],
    ) -> list[tuple[Update, Tensor]]:
        honest = [number for number in chosen if self.clients[number].behaviour is None]
        tasks = [(self.clients[number], model, index, weights) for number in honest]
        done: dict[int, tuple[tuple[Update, Tensor], History]] = {}
        results = run_tasks(_work, tasks, workers=self.workers)
        for number in sorted(set(chosen) - set(honest)):
            own = History()
            done[number] = _step(self.clients[number], model, index, weights, own), own
            report(len(done))
        for row, result in results:
            if isinstance(result, WorkerDied):
                raise FedAuditError(
                    f"in the simulation: {result}, perhaps for want of memory: run again with fewer --workers"
                )
            if isinstance(result, BaseException):
                raise result
            step, state, own = result
            self.clients[honest[row]].load_state_dict(state)
            done[honest[row]] = step, own
            report(len(done))
        for number in chosen:
            history.add(done[number][1])
        return [done[number][0] for number in chosen]


def _step(
    client: Client, model: nn.Module, index: int, weights: dict[str, Tensor], history: History
) -> tuple[Update, Tensor]:
    model.load_state_dict(weights)
    return client.run_round(model, index, weights, history)


def _work(task: tuple[Client, nn.Module, int, dict[str, Tensor]]) -> tuple[tuple[Update, Tensor], State, History]:
    """Run in a worker: one client step, the state of the client after it, and what it cost."""
    history = History()
    client = task[0]
    with one_thread():
        step = _step(*task, history)
    return step, client.state_dict(), history
