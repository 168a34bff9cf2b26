"""Draws the adversary's records from what clients hold and from what nobody trained on."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from fedaudit.data.dataset import Attribute, Split
from fedaudit.federation.records import NOBODY, UNUSED, Records, RecordsSpec
from fedaudit.utils.errors import BadInput
from fedaudit.utils.fingerprint import tensor_digest


@dataclass(frozen=True)
class RecordDraw:
    """Records, and what only the simulator knows of them.

    Attributes:
        records: what the adversary gets.
        owners: (n,) the client that holds the record, or :data:`~fedaudit.federation.records.NOBODY`.
        positions: (n,) its row among that client's examples, or -1.
        matched: (n,) for each record the one that was drawn to go with it, of the other sort and like it in class.
        held_out: the examples on which accuracy is measured: none of those that were drawn.
        values: (n,) which value of the hidden attribute each record has; empty where none is hidden.
    """

    records: Records | None
    owners: Tensor
    positions: Tensor
    matched: Tensor
    held_out: Split
    values: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))

    def owned(self, used: Sequence[Tensor]) -> Tensor:
        """Return ``owners`` with ``UNUSED`` for what no update used; ``used`` has a mask for every client."""
        known = [
            owner if owner == NOBODY or used[owner][position] else UNUSED
            for owner, position in zip(self.owners.tolist(), self.positions.tolist(), strict=True)
        ]
        return torch.tensor(known, dtype=torch.int64)


def draw(
    wanted: RecordsSpec,
    client_data: Sequence[Split],
    honest: int,
    rest: Split,
    held_out: Split,
    *,
    generator: torch.Generator,
    hidden: Attribute | None = None,
) -> RecordDraw:
    """Draw the adversary's records: half from what honest clients hold, half from what nobody trains on, shuffled.

    Every member has a matched non-member: of its class and of its group (whose data it is like, where the data set
    knows) as far as there is one, so that a record isn't given away by what it is of. Equal examples are drawn once,
    nothing that a malicious client holds is drawn, and nothing that any client holds passes for an example that nobody
    trained on. These come from ``rest`` first, which is of the clients' own split, and then from ``held_out``. Accuracy
    is measured on what is left of ``held_out``, or where that is empty, on what is left of ``rest``.

    Args:
        wanted: how many.
        client_data: what each client holds; the honest ones first.
        honest: how many of them there are.
        rest: examples of the split that the clients hold, held or not; they may be theirs.
        held_out: the other split.
        generator: of all draws.
        hidden: the attribute of that name in ``wanted``: it is taken out of the records, not out of public examples.

    Raises:
        BadInput: there are too few examples.
    """
    nothing = torch.zeros(0, dtype=torch.int64)
    if not wanted.records:
        return RecordDraw(
            None, nothing, nothing, nothing, held_out if len(held_out) else _unheld(rest, client_data, set())
        )
    half = wanted.records // 2
    theirs = _joined(client_data[:honest])
    marks = [_digests(data) for data in client_data]
    malicious = {mark for share in marks[honest:] for mark in share}
    own = [mark for share in marks[:honest] for mark in share]
    members = _distinct(torch.randperm(len(theirs), generator=generator).tolist(), own, malicious)[:half]
    if len(members) < half:
        raise BadInput(
            f"threat.records asks for {half} examples of honest clients, and they hold {len(members)} that differ"
        )
    free = _joined([rest, held_out])
    order = [
        *torch.randperm(len(rest), generator=generator).tolist(),
        *(len(rest) + torch.randperm(len(held_out), generator=generator)).tolist(),
    ]
    non_members = _distinct(order, [*_digests(rest), *_digests(held_out)], malicious | set(own))
    if len(non_members) < half + wanted.public + 1:  # one, at least, for accuracy
        raise BadInput(
            f"threat.records and public_examples ask for {half + wanted.public} examples that nobody trains on, and "
            f"there are {max(0, len(non_members) - 1)}; lower them, or let the clients hold less "
            "(federations.*.examples)"
        )
    others = _matched(_strata(theirs, members), non_members, _strata(free, non_members))
    gone = set(others)
    public = [row for row in non_members if row not in gone][: wanted.public]
    taken = {row - len(rest) for row in [*others, *public]}
    left = held_out[[row for row in range(len(held_out)) if row not in taken]]
    if not len(held_out):
        left = _unheld(rest, client_data, {*others, *public})
    elif not len(left):
        raise BadInput("threat.records and public_examples leave nothing to measure accuracy on; lower them")
    shuffle = torch.randperm(2 * half, generator=generator)
    place = torch.argsort(shuffle)
    lengths = torch.tensor([len(data) for data in client_data[:honest]])
    owners = torch.repeat_interleave(torch.arange(honest), lengths)[members]
    positions = torch.tensor(members) - (lengths.cumsum(0) - lengths)[owners]
    none = torch.full((half,), NOBODY)
    pairs = torch.arange(2 * half).roll(half)  # the i-th member goes with the i-th of the others
    records = Records(
        torch.cat([theirs.inputs[members], free.inputs[others]])[shuffle],
        torch.cat([theirs.targets[members], free.targets[others]])[shuffle],
        free.inputs[public],
        free.targets[public],
    )
    values = nothing
    if hidden is not None and wanted.hidden is not None:
        held, known = theirs.attributes[wanted.hidden], free.attributes[wanted.hidden]
        values = torch.cat([held[members], known[others]])[shuffle]
        columns = torch.tensor(hidden.columns, dtype=torch.int64)
        records.inputs[:, columns] = 0.0
        codes = hidden.codes if len(columns) else torch.zeros(len(hidden.values), 0)
        records = replace(records, codes=codes, columns=columns, public_values=known[public])
    return RecordDraw(
        records=records,
        owners=torch.cat([owners, none])[shuffle],
        positions=torch.cat([positions, none])[shuffle],
        matched=place[pairs[shuffle]],
        held_out=left,
        values=values,
    )


def _unheld(rest: Split, client_data: Sequence[Split], taken: set[int]) -> Split:
    """Return the examples of ``rest`` that no client holds, without the rows in ``taken``."""
    held = {mark for data in client_data for mark in _digests(data)}
    return rest[[row for row, mark in enumerate(_digests(rest)) if mark not in held and row not in taken]]


def _joined(parts: Sequence[Split]) -> Split:
    groups = [torch.full((len(p),), -1) if p.groups is None else p.groups for p in parts]
    attributes = {name: torch.cat([p.attributes[name] for p in parts]) for name in parts[0].attributes}
    inputs, targets = torch.cat([p.inputs for p in parts]), torch.cat([p.targets for p in parts])
    return Split(inputs, targets, torch.cat(groups), attributes)


def _digests(split: Split) -> list[bytes]:
    return [tensor_digest(example) for example in split.inputs]


def _distinct(order: Sequence[int], marks: Sequence[bytes], excluded: set[bytes]) -> list[int]:
    """Return the rows in ``order``, without those that equal an earlier one or an excluded one."""
    first: dict[bytes, int] = {}
    for row in order:
        if marks[row] not in excluded:
            first.setdefault(marks[row], row)
    return list(first.values())


def _strata(split: Split, rows: Sequence[int]) -> list[tuple[int, int]]:
    """Return group and class of each row; real-valued targets are all of one class."""
    assert split.groups is not None
    classes = torch.zeros(len(split)) if split.targets.is_floating_point() else split.targets
    return [(int(split.groups[row]), int(classes[row])) for row in rows]


def _matched(wanted: Sequence[tuple[int, int]], rows: Sequence[int], kinds: Sequence[tuple[int, int]]) -> list[int]:
    """Return for each wanted (group, class) a row of its own: of both, or else of the class, or else any."""
    found: dict[int, int] = {}
    for first in range(3):  # what is compared: group and class, class, nothing
        heap: dict[tuple[int, ...], deque[int]] = {}
        taken = set(found.values())
        for row, kind in zip(rows, kinds, strict=True):
            if row not in taken:
                heap.setdefault(kind[first:], deque()).append(row)
        for i, kind in enumerate(wanted):
            if i not in found and (left := heap.get(kind[first:])):
                found[i] = left.popleft()
    return [found[i] for i in range(len(wanted))]
