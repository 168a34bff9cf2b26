"""The truth of what an adversary asks that sees a part of a federation: of sums it reads, and of its records."""

from __future__ import annotations

from dataclasses import replace

import torch

from fedaudit.simulation.simulator import Recording
from fedaudit.transcript.observation import Observation
from fedaudit.transcript.queries import NOBODY, UNUSED, QuerySet
from fedaudit.transcript.secure_sum import union
from fedaudit.transcript.truth import Truth
from fedaudit.transcript.view import view
from fedaudit.utils.fingerprint import tensor_digest


def truth_for(recording: Recording, seen: Observation) -> Truth:
    """Return the truth that belongs to what the adversary sees of a recording.

    A sum that the adversary reads has what all of its clients used. Records that its own clients hold, which it knows,
    and those that were used only after the last round that it sees, are like those that nobody used: their pairs are
    left out.
    """
    transcript, truth, threat = recording.transcript, recording.truth, seen.threat
    if not threat.partial:
        return truth
    if any(m.update.members for m in seen.messages):
        sent = {(r.index, u.client): u for r in transcript.rounds for u in r.updates}
        members = {
            (m.round, m.client): [sent[m.round, client] for client in m.update.members or (m.client,)]
            for m in seen.messages
        }
        truth = replace(
            truth,
            inputs=union(truth.inputs, members),
            labels=union(truth.labels, members),
            rows={},
            seen={},
            randomness={},
        )
    if transcript.records is None or not len(truth.owners):
        return truth
    unasked = torch.isin(truth.owners, torch.tensor(threat.clients or [], dtype=torch.int64))
    last = view(transcript, threat)[0][-1].index
    if last < transcript.rounds[-1].index:
        unasked |= ~_used(transcript.records, recording.truth, last) & (truth.owners != NOBODY)
    return replace(truth, owners=torch.where(unasked, UNUSED, truth.owners))


def _used(records: QuerySet, truth: Truth, last: int) -> torch.Tensor:
    """Return a mask (n,) of the records that an update of a round up to ``last`` used, by what isn't hidden of them."""
    known = torch.ones(records.inputs.shape[1:], dtype=torch.bool)
    known[records.columns] = False
    used = {tensor_digest(x[known]) for (index, _), held in truth.inputs.items() if index <= last for x in held}
    return torch.tensor([tensor_digest(x[known]) in used for x in records.inputs])
