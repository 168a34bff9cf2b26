"""What of a federation reaches an adversary that sees a part of it: some of the rounds, or what certain clients see."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from fedaudit.models import has_batch_norm
from fedaudit.transcript.rounds import Round
from fedaudit.transcript.secure_sum import groups, remainder, shares, summed
from fedaudit.transcript.threat import ThreatModel
from fedaudit.transcript.transcript import Transcript
from fedaudit.transcript.update import Update
from fedaudit.utils.errors import BadInput

_AGREES = 1e-4  # relative error up to which the global model moved by the mean of the updates, beside its rounding
_DIGITS = 6  # of the server's step


def view(transcript: Transcript, threat: ThreatModel) -> tuple[list[Round], list[Round]]:
    """Return the rounds whose global models an adversary sees, and those with the updates that it reads.

    The latter hold nothing but these updates: for an aggregating client all but its own, one by one or as what secure
    aggregation leaves of their sum; for clients who collude one a round, the mean of the others'. They get that from
    how the global model changes, so only in rounds whose next one is in the transcript, too, and where the server's
    rule is the mean, plain or by examples, times a step. The clients know which of these it is; here it is the one by
    which the model moved. By any other rule (a robust one, a server's momentum, noise) they can't subtract anything.

    BadInput: the adversary sees no part of it, see :meth:`ThreatModel.seen_of`.
    """
    rounds, own = transcript.rounds, threat.clients or []
    if not threat.partial:
        return rounds, rounds if threat.reads_updates else []
    if transcript.sent.no_updates:
        raise BadInput("threat.clients and threat.rounds are for horizontal federations of networks; leave them out")
    if own and any(u.members for r in rounds for u in r.updates):
        raise BadInput(
            "the transcript has sums in place of updates, of which clients' own can't be subtracted any more; simulate "
            "it with threat.clients, or leave that out"
        )
    took_part = [{c for u in r.updates for c in (u.members or (u.client,))} for r in rounds]
    clients = sorted(set().union(*took_part, transcript.clients))
    everybody = all(part == set(clients) for part in took_part)
    indices = threat.seen_of([r.index for r in rounds], clients, everybody=everybody)
    seen = [r for r in rounds if r.index in indices]
    alone = transcript.task_info.batch_norm == "train" and has_batch_norm(transcript.module)
    if threat.adversary == "aggregating-client":
        return rounds, [_received(r, own, threat.group_size, alone) for r in seen]
    if threat.adversary != "client":
        return seen, seen
    following = {r.index: r for r in seen}
    left = [_left(r, following.get(r.index + 1), own, alone) for r in seen] if own else []
    return seen, [r for r in left if r.updates]


def _received(record: Round, own: Collection[int], group_size: int, alone: bool) -> Round:
    """Return the round with what a client that aggregates it receives of the others."""
    updates = [u for u in record.updates if u.client not in own]
    if group_size > 1:
        by_client, updates = {u.client: u for u in record.updates}, []
        for group in groups(list(by_client), group_size):
            members = [by_client[client] for client in group]
            if not set(group) <= set(own):
                total = summed(members, weighted=True, batch_norm=alone)
                whole = {**total.buffers, **total.tensors}
                updates.append(
                    remainder(whole, members, own, weighted=True, batch_norm=alone) if set(group) & set(own) else total
                )
    return replace(record, updates=updates, rejected={})


def _left(record: Round, following: Round | None, own: Collection[int], alone: bool) -> Round:
    """Return the round with what the change of the global model leaves beside the ``own`` updates, if anything."""
    nothing, updates = replace(record, updates=[], rejected={}), record.updates
    if following is None or all(u.client in own for u in updates):
        return nothing
    names = list(updates[0].tensors)
    if any(list(u.tensors) != names for u in updates) or record.client_weights:
        return nothing
    change = {name: following.weights[name].double() - record.weights[name].double() for name in names}
    eps = max(torch.finfo(record.weights[name].dtype).eps for name in names)
    rounding = eps * _norm(record.weights[name].double() for name in names)
    for weighted in (False, True):
        step = _step(change, updates, shares(updates, weighted=weighted), rounding)
        if step is not None:
            moved = {name: t / step for name, t in change.items()}
            rest = remainder({**following.weights, **moved}, updates, own, weighted=weighted, batch_norm=alone)
            return replace(nothing, updates=[rest])
    return nothing


def _step(
    change: dict[str, Tensor], updates: Sequence[Update], parts: Sequence[float], rounding: float
) -> float | None:
    """Return the server's step where the global model moved by that times the mean of the updates, else None."""
    mean = {
        name: torch.as_tensor(sum(part * u.tensors[name].double() for part, u in zip(parts, updates, strict=True)))
        for name in change
    }
    length = _norm(mean.values())
    if length == 0:
        return None
    along = sum(float((change[name] * mean[name]).sum()) for name in change)
    step = float(f"{along / length**2:.{_DIGITS}g}")
    apart = _norm(change[name] - step * mean[name] for name in change)
    return step if step and apart <= _AGREES * _norm(change.values()) + rounding else None


def _norm(tensors: Iterable[Tensor]) -> float:
    return float(torch.stack([t.square().sum() for t in tensors]).sum().sqrt())
