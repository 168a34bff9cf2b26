"""Whom an attack on membership exposes: members by class and by subgroup, and the records that it is surest of."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fedaudit.evaluation.statistics import auc_interval, holm, rank_test
from fedaudit.modalities.columns import cells
from fedaudit.results import Chart, GroupExposure, Line, RecordExposure
from fedaudit.transcript.observation import Observation
from fedaudit.transcript.queries import QuerySet
from fedaudit.utils.seeds import derive_seed

RESAMPLES = 2000
MOST = 50  # records, of a finding
_FEW = 7  # members or others of a group: of fewer, even perfect scores could be luck
_BY_CLASS = (
    "The probability that a member's score is above another record's, class by class, and the lower end of its 95 % "
    "interval. Guessing has 0.5."
)


class _Group(NamedTuple):
    label: int
    column: str
    value: str
    members: Tensor
    others: Tensor


def by_group(observation: Observation, pairs: Tensor, scores: Tensor, seed: int) -> list[GroupExposure]:
    """Return how exposed the members of each class, and of each category of each column, are; p-values by Holm.

    Members of a class are compared with their matched non-members, those of a category with the non-members of it.
    ``pairs`` are (2, k) places of members and of their matched non-members in the (n,) ``scores`` of all records.
    """
    records = observation.records
    if records is None:
        return []
    found, bar = [], scores[pairs[1]].max()
    for group in (*_classes(records, pairs, scores), *_categories(observation, records, pairs, scores)):
        area, p_value = rank_test(group.members, group.others)
        own = derive_seed(seed, "class", group.label, group.column)
        low, high = auc_interval(group.members, group.others, resamples=RESAMPLES, seed=own, paired=not group.column)
        found.append(
            GroupExposure(
                label=group.label,
                column=group.column,
                value=group.value,
                auc=area,
                low=low,
                high=high,
                members=len(group.members),
                p_value=p_value,
                standing_out=int((group.members > bar).sum()),
            )
        )
    corrected = holm([one.p_value for one in found])
    return [one.model_copy(update={"p_value": p}) for one, p in zip(found, corrected, strict=True)]


def _classes(records: QuerySet, pairs: Tensor, scores: Tensor) -> Iterator[_Group]:
    labels = records.labels[pairs[0]].flatten()
    if records.labels.is_floating_point() or len(labels) != pairs.shape[1]:  # several labels a record
        return
    for label, number in zip(*labels.unique(return_counts=True), strict=True):
        if number >= _FEW:
            yield _Group(int(label), "", "", *scores[pairs[:, labels == label]])


def _categories(observation: Observation, records: QuerySet, pairs: Tensor, scores: Tensor) -> Iterator[_Group]:
    columns = observation.task_info.columns
    values = cells(records.inputs, columns) if columns else scores[:, None]
    for i, column in enumerate(columns):
        for place, category in enumerate(column.categories):
            members, others = (part[values[part, i] == place] for part in pairs)
            if min(len(members), len(others)) >= _FEW and len(members) < pairs.shape[1]:
                yield _Group(place, column.name, category, scores[members], scores[others])


def surest(pairs: Tensor, scores: Tensor, again: Tensor, owners: Tensor, labels: Tensor | None) -> list[RecordExposure]:
    """Return the members that the fewest non-members score as high as, the most exposed first.

    Args:
        pairs: (2, k) members among the n records, and their matched non-members.
        again: (b, n) scores with halves of the shadow models; b is 0 where there are none.
        owners: (n,) the client of each.
    """
    members, others = pairs
    above = _nonmembers_above(scores, pairs)
    over = torch.stack([_nonmembers_above(one, pairs) for one in again]) if len(again) else None
    order = sorted(range(len(members)), key=lambda i: (int(above[i]), -float(scores[members[i]])))
    return [
        RecordExposure(
            record=int(members[i]),
            client=int(owners[members[i]]),
            label=None if labels is None else int(labels[members[i]]),
            nonmembers_above=int(above[i]),
            others=len(others),
            nonmembers_above_min=None if over is None else int(over[:, i].min()),
            nonmembers_above_max=None if over is None else int(over[:, i].max()),
        )
        for i in order[:MOST]
    ]


def _nonmembers_above(scores: Tensor, pairs: Tensor) -> Tensor:
    """Return (k,) how many non-members score as high as each member."""
    theirs = scores[pairs[1]].sort().values
    return len(theirs) - torch.searchsorted(theirs, scores[pairs[0]])


def class_chart(groups: Sequence[GroupExposure], own: int | None) -> list[Chart]:
    """Return the chart of at least two classes; ``own`` is the client whose members they are, if it is one's."""
    classes = [one for one in groups if not one.column]
    if len(classes) < 2:
        return []
    labels = [float(one.label) for one in classes]
    return [
        Chart(
            title="exposure by class" if own is None else f"exposure by class, client {own}",
            caption=_BY_CLASS,
            x_label="class",
            y_label="AUC",
            lines=[
                Line(name="attack", x=labels, y=[one.auc for one in classes]),
                Line(name="lower end", x=labels, y=[one.low for one in classes]),
                Line(name="guessing", x=[labels[0], labels[-1]], y=[0.5, 0.5]),
            ],
        )
    ]
