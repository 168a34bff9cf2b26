"""Runs a round's client steps, in this process or in worker processes: the bits are the same."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor, nn

from fedaudit.simulation.checkpoint import State
from fedaudit.simulation.client import Client
from fedaudit.simulation.history import History
from fedaudit.transcript.update import Update
from fedaudit.utils.errors import FedAuditError
from fedaudit.utils.machine import one_thread
from fedaudit.utils.processes import WorkerDied, run_tasks


def run_round(
    clients: Sequence[Client],
    model: nn.Module,
    index: int,
    weights: dict[str, Tensor],
    history: History,
    report: Callable[[int], None],
    *,
    client_weights: Mapping[int, dict[str, Tensor]],
    workers: int = 1,
) -> list[tuple[Update, Tensor]]:
    """Return what each client sends in a round, as it arrives, and the rows of the examples it was made from.

    FedAuditError: a client's worker process died twice.

    Args:
        model: the architecture; its weights are undefined afterwards.
        client_weights: client to what it is sent in place of ``weights``.
        workers: processes for the honest clients; 1 means this one. Malicious clients collude, so they run here, one
            after the other.
    """
    received = {client.number: client_weights.get(client.number, weights) for client in clients}
    done: dict[int, tuple[tuple[Update, Tensor], History]] = {}
    apart = [client for client in clients if workers > 1 and client.behaviour is None]
    tasks = [(client, model, index, received[client.number]) for client in apart]
    results = run_tasks(_work, tasks, workers=workers) if tasks else iter(())
    for client in clients:
        if client not in apart:
            own = History()
            done[client.number] = _step(client, model, index, received[client.number], own), own
            report(len(done))
    for row, result in results:
        if isinstance(result, WorkerDied):
            raise FedAuditError(
                f"in the simulation: {result}, perhaps for want of memory: run again with fewer workers"
            )
        if isinstance(result, BaseException):
            raise result
        step, state, own = result
        apart[row].load_state_dict(state)
        done[apart[row].number] = step, own
        report(len(done))
    for client in clients:
        history.add(done[client.number][1])
    return [done[client.number][0] for client in clients]


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
