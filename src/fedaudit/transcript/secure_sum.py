"""Secure aggregation as its server sees it: of several clients together one update, and the truth of it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from fedaudit.task.training import Pass, TrainingConfig
from fedaudit.transcript.rounds import Round
from fedaudit.transcript.update import ClientDefenceInfo, Update
from fedaudit.utils.errors import BadInput


def groups(participants: Sequence[int], size: int) -> list[list[int]]:
    """Return who is summed with whom: clients in order, ``size`` to a sum.

    The rest joins the last sum: no client is in a smaller one, unless fewer take part.
    """
    cut = [list(participants[i : i + size]) for i in range(0, len(participants), size)]
    if len(cut) > 1 and len(cut[-1]) < size:
        cut[-2:] = [cut[-2] + cut[-1]]
    return cut


def shares(updates: Sequence[Update], *, weighted: bool) -> list[float]:
    """Return what part of the mean each update is: equal ones, or by the examples that its client holds."""
    if not weighted:
        return [1 / len(updates)] * len(updates)
    held = [u.training.data_size if u.training and u.training.data_size else u.num_examples for u in updates]
    return [n / sum(held) for n in held]


def summed(updates: Sequence[Update], *, weighted: bool = False, batch_norm: bool = False) -> Update:
    """Return what the server learns of several clients by secure aggregation (Bonawitz et al. 2017): their mean.

    That is the sum, which the protocol yields, over the number of clients or of their examples, which the server knows.
    It stands as one update over all their examples. After one local step that is exact: the gradient of the mean loss
    over the union of the batches, or where the clients' shares of the mean aren't their shares of the examples, or
    BatchNorm normalises each batch by itself, one step that accumulates a pass a client. After several steps it holds
    as far as the clients' models stay alike. A sum of unlike trainings has no training recorded.

    Args:
        updates: of one round, in the order of the clients; a single one is returned as it is.
        weighted: by the clients' examples, as FedAvg's server does; otherwise all alike.
        batch_norm: whether clients normalise by their own batch.

    Raises:
        BadInput: there is none, or they differ in kind or in what was sent.
    """
    if not updates:
        raise BadInput("a sum of no updates")
    first = updates[0]
    if len(updates) == 1:
        return first
    if any(u.kind != first.kind or set(u.tensors) != set(first.tensors) for u in updates):
        raise BadInput(
            "clients sent different tensors, and secure aggregation adds what all send; use a client-side defence "
            "that sends all layers, or threat.sees=updates"
        )
    parts = shares(updates, weighted=weighted)
    trainings = [u.training for u in updates if u.training is not None]
    labels = [u.labels for u in updates if u.labels is not None]
    return Update(
        client=first.client,
        kind=first.kind,
        tensors={name: _mean([u.tensors[name] for u in updates], parts) for name in first.tensors},
        num_examples=sum(u.num_examples for u in updates),
        training=training_of_sum(trainings, parts, batch_norm) if len(trainings) == len(updates) else None,
        buffers={
            name: _mean([u.buffers[name] for u in updates], parts)
            for name in first.buffers
            if all(name in u.buffers for u in updates)
        },
        labels=torch.cat(labels)[order(updates)] if len(labels) == len(updates) else None,
        sanitised=_sanitised([u.sanitised for u in updates], parts),
        members=tuple(u.client for u in updates),
    )


def remainder(
    total: Mapping[str, Tensor],
    updates: Sequence[Update],
    own: Collection[int],
    *,
    weighted: bool = False,
    batch_norm: bool = False,
) -> Update:
    """Return what a mean of updates leaves when those of ``own`` clients are subtracted: the mean of the others'.

    Only ``total`` tells of the others' tensors, so they hold its rounding, divided by their share.

    Args:
        total: by name: the mean of all.
        updates: all whose mean it is.
        own: clients whose updates are known; not all of them.
        weighted, batch_norm: see :func:`summed`.

    Returns:
        One update over the examples of all others; where there is one other client, it is that client's.
    """
    parts = dict(zip((u.client for u in updates), shares(updates, weighted=weighted), strict=True))
    mine = [u for u in updates if u.client in own]
    rest = [u for u in updates if u.client not in own]
    left = sum(parts[u.client] for u in rest)
    known = summed(rest, weighted=weighted, batch_norm=batch_norm)

    def without(name: str, tensor: Tensor, of: Callable[[Update], Mapping[str, Tensor]]) -> Tensor:
        if not tensor.is_floating_point():  # a count of batches
            return total[name]
        taken = sum(parts[u.client] * of(u)[name].double() for u in mine)
        return ((total[name].double() - taken) / left).to(tensor.dtype)

    return replace(
        known,
        tensors={name: without(name, t, lambda u: u.tensors) for name, t in known.tensors.items()},
        buffers={
            name: without(name, t, lambda u: u.buffers)
            for name, t in known.buffers.items()
            if name in total and all(name in u.buffers for u in updates)
        },
    )


def order(updates: Sequence[Update]) -> Tensor:
    """Return (n,): the examples of all updates, one client's after the other's, in the order in which a sum uses them.

    Step by step, and in each step client by client; where steps are unlike or unknown, as they are.
    """
    sizes = [u.training.batch_sizes if u.training else (u.num_examples,) for u in updates]
    if len({len(steps) for steps in sizes}) > 1:
        sizes = [(u.num_examples,) for u in updates]
    flat = torch.arange(sum(map(sum, sizes)))
    batches = iter(flat.split([n for steps in sizes for n in steps]))
    by_client = [list(itertools.islice(batches, len(steps))) for steps in sizes]
    return torch.cat([batch for step in zip(*by_client, strict=True) for batch in step])


def sums_only(
    rounds: Sequence[Round], size: int, *, weighted: bool = False, batch_norm: bool = False
) -> tuple[list[Round], dict[tuple[int, int], list[Update]]]:
    """Return the rounds with the sums of ``size`` clients each in place of updates, and of each sum its updates.

    The second is by (round, client) of the sum, for the truth; ``weighted`` and ``batch_norm`` are :func:`summed`'s.
    """
    after, members = [], {}
    for record in rounds:
        by_client = {u.client: u for u in record.updates}
        sums = []
        for group in groups(list(by_client), size):
            own = [by_client[client] for client in group]
            sums.append(summed(own, weighted=weighted, batch_norm=batch_norm))
            members[record.index, group[0]] = own
        after.append(replace(record, updates=sums, rejected={}))
    return after, members


def union(
    values: Mapping[tuple[int, int], Tensor], members: Mapping[tuple[int, int], list[Update]]
) -> dict[tuple[int, int], Tensor]:
    """Return (round, client) to what stands for each example of a sum, of what stands for each one of a client's."""
    together = {}
    for (index, client), updates in members.items():
        keys = [(index, u.client) for u in updates]
        if all(key in values for key in keys):
            together[index, client] = torch.cat([values[key] for key in keys])[order(updates)]
    return together


def _mean(tensors: Sequence[Tensor], parts: Sequence[float]) -> Tensor:
    if not tensors[0].is_floating_point():  # a count of batches
        return torch.stack(list(tensors)).amax(dim=0)
    wide = sum(part * tensor.double() for part, tensor in zip(parts, tensors, strict=True))
    return torch.as_tensor(wide).to(tensors[0].dtype)


def training_of_sum(
    trainings: Sequence[TrainingConfig], parts: Sequence[float], batch_norm: bool
) -> TrainingConfig | None:
    """Return how one client would have trained whose update this were; None where the clients didn't train alike.

    ``parts``: what part of the mean each client's update is. With ``batch_norm`` clients normalise by their own batch.
    """
    first = trainings[0]
    if first.passes or any(t.local_steps != first.local_steps for t in trainings):
        return None
    if any(replace(t, batch_sizes=first.batch_sizes, data_size=first.data_size) != first for t in trainings):
        return None
    sizes = list(zip(*(t.batch_sizes for t in trainings), strict=True))
    by_examples = all(
        math.isclose(part * sum(step), n, rel_tol=1e-9) for step in sizes for part, n in zip(parts, step, strict=True)
    )
    passes: tuple[tuple[Pass, ...], ...] = ()
    if batch_norm or not by_examples:
        passes = tuple(tuple(Pass(n, part) for n, part in zip(step, parts, strict=True)) for step in sizes)
    held = [t.data_size for t in trainings if t.data_size is not None]
    return replace(
        first,
        batch_sizes=tuple(map(sum, sizes)),
        data_size=sum(held) if len(held) == len(trainings) else None,
        passes=passes,
    )


def _sanitised(each: Sequence[ClientDefenceInfo | None], parts: Sequence[float]) -> ClientDefenceInfo | None:
    """Return what is known of the sum: zeros are where nobody sent anything, signs are lost, independent noise adds."""
    known, pairs = [one for one in each if one is not None], list(zip(parts, each, strict=True))
    if not known:
        return None
    noise = math.sqrt(sum((part * (one.noise if one else 0.0)) ** 2 for part, one in pairs))
    clips = [one.clip if one else None for one in each]
    clip = None if None in clips else sum(part * c for part, c in zip(parts, clips, strict=True) if c is not None)
    noises = tuple(
        (name, math.sqrt(sum((part * dict(one.noises if one else ()).get(name, 0.0)) ** 2 for part, one in pairs)))
        for name in dict(known[0].noises)
    )
    sparse = all(one.sparse for one in known)
    return ClientDefenceInfo(known[0].name, sparse=sparse, noise=noise, clip=clip, noises=noises)
