"""A finding of images and the truth in one form, in which all that follows compares them.

Images and volumes have pixels in [0, 1]; signals and examples of several inputs are brought into units of their range.
The examples become parts: of one update, of several rounds, of all updates together, or of a vertical federation.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from fedaudit.attacks import ImageFinding
from fedaudit.evaluation.finding_types import NOT_FINITE
from fedaudit.modalities import ExampleKind
from fedaudit.modalities.packed import Packing
from fedaudit.task.info import TaskInfo
from fedaudit.transcript.observation import Message, Observation
from fedaudit.transcript.truth import Truth
from fedaudit.utils.fingerprint import tensor_digest

ROUNDING = 1e-5  # of a number's size: what float32 leaves of one, and by how much a channel that varies does


class Part(NamedTuple):
    """The true examples of ``key``, round and client, and ``rows``, (n,): which of the finding's images are of them."""

    key: tuple[int, int]
    rows: Tensor


@dataclass(frozen=True)
class Case:
    """What is compared.

    Attributes:
        finding: its images in the space of the truth, its labels classes.
        truth: in [0, 1], or in units of range.
        given: finding and truth in the examples' own values, for what is drawn and what was vouched for.
        parts: those of which images were recovered.
        classes: whether each example has one; if not, all are of class 0.
    """

    finding: ImageFinding
    truth: Truth
    given: tuple[ImageFinding, Truth]
    parts: tuple[Part, ...]
    federation: str
    info: TaskInfo
    classes: bool

    @property
    def kind(self) -> ExampleKind:
        """The examples' kind."""
        return self.info.example_kind

    @cached_property
    def true(self) -> Tensor:
        """The (k, ...) true examples of all parts, one after another."""
        return torch.cat([self.truth.inputs[part.key] for part in self.parts])

    @cached_property
    def given_true(self) -> Tensor:
        """The same in the examples' own values."""
        return torch.cat([self.given[1].inputs[part.key] for part in self.parts])

    @cached_property
    def labels(self) -> Tensor:
        """The true examples' (k,) classes."""
        return torch.cat([self.truth.labels[part.key] for part in self.parts])

    @cached_property
    def places(self) -> list[tuple[tuple[int, int], int]]:
        """The key of each example's part, and its position there."""
        return [(part.key, i) for part in self.parts for i in range(len(self.truth.inputs[part.key]))]

    @cached_property
    def uses(self) -> dict[int, int]:
        """How often each distinct true example was used, by its first position."""
        return _distinct(self.true)

    @property
    def pictures(self) -> bool:
        """Whether examples have axes along which they may be moved."""
        return self.true.ndim > 2


def in_one_space(finding: ImageFinding, observation: Observation, truth: Truth) -> Case | str:
    """Return what is to be compared, or why it can't be."""
    if not bool(finding.images.isfinite().all()):
        return NOT_FINITE
    info, kind = observation.task_info, observation.task_info.example_kind
    messages, by_example = observation.messages, observation.sent.by_example()
    classes = info.num_classes is not None or by_example is not None
    if not classes:
        finding, truth = _of_one_class(finding, truth)
    if by_example is not None:  # which image is of which example everybody there knows
        parts = [Part((number, 0), torch.tensor([i])) for i, number in enumerate(by_example)]
    elif finding.rounds and len(messages) > 1:
        parts = [Part((m.round, m.client), _of_round(finding, m)) for m in messages]
    else:
        truth = truth if len(messages) == 1 else _as_one(messages, truth)
        parts = [Part((messages[0].round, messages[0].client), torch.arange(len(finding.images)))]
        held = len(truth.inputs[parts[0].key])
        if len(messages) > 1 and len(finding.images) < held:
            return (
                f"{len(finding.images)} {kind.plural} for {held} different examples: how many the client holds wasn't "
                "known; grant the training (threat.knows_training)"
            )
    given = finding, truth
    if kind.bounds is None:
        finding, truth = _in_units_of_range(finding, truth, info.packed_inputs)
    covered = tuple(part for part in parts if len(part.rows))
    return Case(finding, truth, given, covered, observation.federation, info, classes)


def _distinct(examples: Tensor) -> dict[int, int]:
    """Return how often every distinct example occurs, by its first position."""
    uses: dict[int, int] = {}
    seen: dict[bytes, int] = {}
    for i, example in enumerate(examples):
        first = seen.setdefault(tensor_digest(example), i)
        uses[first] = uses.get(first, 0) + 1
    return uses


def _of_one_class(finding: ImageFinding, truth: Truth) -> tuple[ImageFinding, Truth]:
    """Return both with class 0 in place of all targets."""

    def alike(targets: Tensor) -> Tensor:
        return torch.zeros(len(targets), dtype=torch.int64)

    separate = tuple((images, alike(labels)) for images, labels in finding.separate)
    labels = {key: alike(own) for key, own in truth.labels.items()}
    return (
        replace(finding, labels=alike(finding.labels), separate=separate),
        replace(truth, labels=labels, candidate_labels=alike(truth.candidate_labels)),
    )


def _of_round(finding: ImageFinding, message: Message) -> Tensor:
    """Return which of the finding's images are of the message's round; ValueError: some, but not one an example."""
    rows = [i for i, rounds in enumerate(finding.rounds) if message.round in rounds]
    if rows and len(rows) != message.update.num_examples:
        raise ValueError(f"{len(rows)} images for the {message.update.num_examples} examples of round {message.round}")
    return torch.tensor(rows, dtype=torch.int64)


def _as_one(messages: tuple[Message, ...], truth: Truth) -> Truth:
    """Return the truth with the distinct examples of all messages under the first one's key, and nothing else."""
    keys = [(message.round, message.client) for message in messages]
    inputs, labels = (torch.cat([of[key] for key in keys]) for of in (truth.inputs, truth.labels))
    rows = list(_distinct(inputs))
    members = {}
    if all(key in truth.members for key in keys):
        members = {keys[0]: torch.cat([truth.members[key] for key in keys])[rows]}
    return replace(truth, inputs={keys[0]: inputs[rows]}, labels={keys[0]: labels[rows]}, members=members)


def _in_units_of_range(finding: ImageFinding, truth: Truth, packing: Packing | None) -> tuple[ImageFinding, Truth]:
    """Return both with each channel's least and largest value over the candidates at 0 and 1, where these differ."""
    if packing is None:
        shape = (-1, *(1,) * (truth.candidates.ndim - 2))
        values = truth.candidates.transpose(0, 1).flatten(1)
        low, high = values.min(dim=1).values.view(shape), values.max(dim=1).values.view(shape)
    else:
        groups, least, most = packing.groups(), truth.candidates.amin(dim=0), truth.candidates.amax(dim=0)
        none = torch.zeros(int(groups.max()) + 1)
        low = none.scatter_reduce(0, groups, least, "amin", include_self=False)[groups]
        high = none.scatter_reduce(0, groups, most, "amax", include_self=False)[groups]
    width, size = high - low, torch.maximum(high.abs(), low.abs())
    vary = width > ROUNDING * size
    # a channel that doesn't vary has no range: its own size stands for it, or the usual range of the others
    usual = width[vary].median() if bool(vary.any()) else torch.ones(())
    width = torch.where(vary, width, torch.where(size > 0, size.maximum(usual), usual))

    def scaled(examples: Tensor) -> Tensor:
        return (examples - low) / width

    trace = finding.trace and replace(finding.trace, snapshots=scaled(finding.trace.snapshots))
    separate = tuple((scaled(images), labels) for images, labels in finding.separate)
    inputs = {key: scaled(examples) for key, examples in truth.inputs.items()}
    return (
        replace(finding, images=scaled(finding.images), trace=trace, separate=separate),
        replace(truth, inputs=inputs, candidates=scaled(truth.candidates)),
    )
