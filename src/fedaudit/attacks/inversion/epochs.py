"""AGIC over several epochs: match the updates that saw the same examples, then reconstruct from all of them at once."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass as checked_dataclass
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components
from torch import Tensor, nn

from fedaudit.attacks.base import ATTACK_CONFIG, Progress, register
from fedaudit.attacks.findings import ImageFinding, Trace
from fedaudit.attacks.inversion.methods import AGIC, DLGAdam, InvG
from fedaudit.attacks.inversion.priors import Prior
from fedaudit.attacks.inversion.reconstruct import Objective, Reconstruction, reconstruct
from fedaudit.attacks.inversion.template import GradientInversion, Prepared, Problem
from fedaudit.federation.local_training import local_randomness
from fedaudit.threat import Message, Observation, Scope
from fedaudit.utils.errors import NotApplicable
from fedaudit.utils.validation import Count, NonNegative

_POOL = 2  # side and stride of the average pooling before pictures are compared (Section V-A)


@dataclass(frozen=True)
class EpochUpdate:
    """One observed update, made ready.

    Attributes:
        message: as it was seen.
        epoch: from 0.
        prepared: the model, the gradient, the labels.
        problem: its distance, as a function of its own batch of images.
    """

    message: Message
    epoch: int
    prepared: Prepared
    problem: Problem


@checked_dataclass(frozen=True, kw_only=True, config=ATTACK_CONFIG)
class SeveralEpochs(GradientInversion):
    """Base beside a method, after it so that its defaults hold: all updates of a client over several epochs.

    Xu et al. 2022, Section IV-B.

    Step 1 reconstructs every update on its own for a few iterations and pairs the pictures of consecutive epochs
    greedily, the most similar ones first, each picture once; more than two epochs by chaining. Step 2 minimises
    Σ_k γ_k·(1 − cos_k) plus the priors (Eq. 5), one shared image in all of its batches. Departures: images whose
    updates hang together are reconstructed at once, not one at a time, which for a batch size of 1 is the same; the
    label filter compares the labels of the two pictures, not those of their whole batches, and where no partner of the
    same label is left the most similar picture is taken. Where an epoch is a single update there is nothing to match.

    Args:
        epochs: how many complete epochs the observed updates are; each has the same number of updates.
        pre_iterations: of the reconstructions that are matched.
        pooling: average 2×2 pixels before pictures are compared.
        label_filter: pair pictures of equal label first.
        gamma_first: γ of the first epoch; 0 leaves it out.
        gamma: γ of the epochs after it; 0 leaves them out.
    """

    default_scope: ClassVar[Scope] = "client"

    epochs: Annotated[int, Field(ge=1, strict=True)] = 2
    pre_iterations: Count = 2_000
    pooling: bool = True
    label_filter: bool = True
    gamma_first: NonNegative = 1.0
    gamma: NonNegative = 0.1

    def check(self, observation: Observation) -> None:
        """Refuse what any single update makes impossible, or updates that aren't whole epochs.

        Raises:
            NotApplicable: with the reason and the remedy.
        """
        observation.need_messages()
        for single in observation.split():
            super().check(single)
        count = len(observation.messages)
        if len({message.client for message in observation.messages}) > 1:
            raise NotApplicable(f"{self.name} follows one client, and these updates are of several")
        if count % self.epochs:
            raise NotApplicable(
                f"{count} updates aren't {self.epochs} epochs of equal length; set epochs, or rounds, accordingly"
            )
        sizes = [sum(m.update.num_examples for m in epoch) for epoch in _cut(observation.messages, self.epochs)]
        if len(set(sizes)) > 1:
            raise NotApplicable(f"epochs have the same number of examples, but these have {sizes}")
        if not self.gamma_first and not self.gamma:
            raise NotApplicable("gamma_first and gamma are both 0: no epoch is left")

    def run(
        self,
        observation: Observation,
        *,
        generator: torch.Generator,
        device: str = "cpu",
        progress: Progress | None = None,
    ) -> ImageFinding:
        """Match, then reconstruct jointly.

        Raises:
            NotApplicable: as :meth:`check`, the labels can't be inferred, or the optimisation diverged.
        """
        self.check(observation)
        started = time.perf_counter()
        wanted = [e for e in range(self.epochs) if (self.gamma if e else self.gamma_first) > 0]
        epoch_updates: list[list[EpochUpdate]] = []
        for number, epoch in enumerate(_cut(observation.messages, self.epochs)):
            if number in wanted:
                known = epoch_updates[0][0].prepared.labels if epoch_updates and len(epoch) == 1 else None
                epoch_updates.append([self._sight(observation, m, number, device, known) for m in epoch])
        everything = [s for epoch in epoch_updates for s in epoch]
        first = epoch_updates[0]
        matching = len(epoch_updates) > 1 and len(first) > 1
        steps = _Steps(progress, matching * len(everything) * self.pre_iterations)
        if matching:
            pictures = [torch.cat([self._alone(s, generator, steps) for s in epoch]) for epoch in epoch_updates]
            labels = [torch.cat([s.prepared.labels for s in epoch]) for epoch in epoch_updates]
            chains = chain(
                [
                    match(a, b, x if self.label_filter else None, y if self.label_filter else None, self.pooling)
                    for a, b, x, y in zip(pictures, pictures[1:], labels, labels[1:], strict=False)
                ],
                len(pictures[0]),
            )
        else:
            chains = torch.arange(sum(len(s.prepared.labels) for s in first)).repeat(len(epoch_updates), 1)
        places = [_places(epoch, column) for epoch, column in zip(epoch_updates, chains, strict=True)]
        parts = _components(places)
        steps.total += len(parts) * self.iterations
        runs = []
        for part in parts:
            shared = [(s, rows) for place in places for s, rows in place if rows[0] in part]
            runs.append((part, self._together(shared, part, generator, steps)))
        return self._finding(observation, epoch_updates, places, runs, time.perf_counter() - started)

    def _sight(
        self, observation: Observation, message: Message, epoch: int, device: str, labels: Tensor | None
    ) -> EpochUpdate:
        """Make an update ready; ``labels``, if given, are those of its only counterpart in the first epoch."""
        prepared = self.prepare(observation, message, device)
        if labels is not None:
            prepared = dataclasses.replace(prepared, labels=labels)
        return EpochUpdate(message, epoch, prepared, self.problem(prepared, message))

    def priors(self, prepared: Prepared) -> list[tuple[float, Prior]]:  # noqa: ARG002
        """Return none: they are added once for the shared images."""
        return []

    def _alone(self, epoch_update: EpochUpdate, generator: torch.Generator, steps: _Steps) -> Tensor:
        """Return the pictures of one update on its own, normalised."""
        short = dataclasses.replace(self, iterations=self.pre_iterations)
        rows = torch.arange(len(epoch_update.prepared.labels))
        return short._together([(epoch_update, rows)], rows, generator, steps).images

    def _together(
        self, shared: Sequence[tuple[EpochUpdate, Tensor]], part: Tensor, generator: torch.Generator, steps: _Steps
    ) -> Reconstruction:
        """Reconstruct the images ``part`` from the updates that they were used in."""
        prepared = shared[0][0].prepared
        position = {int(image): i for i, image in enumerate(part)}
        terms = [
            (
                1.0 if len(shared) == 1 else (self.gamma if s.epoch else self.gamma_first),
                s.problem.single,
                torch.tensor([position[int(row)] for row in rows], device=prepared.labels.device),
            )
            for s, rows in shared
        ]
        priors = [(weight, prior) for weight, prior in super().priors(prepared) if weight]

        def objective(variables: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
            (images,) = variables
            value, gradient = images.new_zeros(()), torch.zeros_like(images)
            for gamma, distance, rows in terms:
                own, (slope,) = distance([images[rows]])
                value = value + gamma * own
                gradient.index_add_(0, rows, slope, alpha=gamma)
            for weight, prior in priors:
                own, slope = prior(images)
                value, gradient = value + weight * own, gradient.add_(slope, alpha=weight)
            return value, [gradient]

        return self._best(objective, prepared, len(part), generator, steps)

    def _best(
        self, objective: Objective, prepared: Prepared, count: int, generator: torch.Generator, steps: _Steps
    ) -> Reconstruction:
        start = dataclasses.replace(prepared, labels=prepared.labels.new_zeros(count))
        initial = [v.to(prepared.labels.device) for v in self.initial(start, generator)]
        with local_randomness(generator.initial_seed()):
            run = reconstruct(
                objective, initial, self.optimisation(), prepared.pixel_range, generator, steps.next(self.iterations)
            )
        if not bool(torch.isfinite(run.trace.snapshots).all()):
            raise NotApplicable(f"the optimisation diverged at learning_rate {self.learning_rate:g}; lower it")
        return run

    def _finding(
        self,
        observation: Observation,
        epoch_updates: list[list[EpochUpdate]],
        places: list[list[tuple[EpochUpdate, Tensor]]],
        runs: list[tuple[Tensor, Reconstruction]],
        seconds: float,
    ) -> ImageFinding:
        order = torch.cat([part for part, _ in runs]).argsort()
        labels = torch.cat([s.prepared.labels for s in epoch_updates[0]]).cpu()
        rounds: list[list[int]] = [[] for _ in order]
        for place in places:
            for epoch_update, rows in place:
                for row in rows.tolist():
                    rounds[row].append(epoch_update.message.round)
        traces = [run.trace for _, run in runs]
        pixels = torch.cat([torch.cat([run.images[None], run.trace.snapshots]) for _, run in runs], dim=1)[:, order]
        pixels = (
            observation.task_info.denormalise(pixels.flatten(0, 1)).clamp(0, 1).unflatten(0, (-1, len(order))).cpu()
        )
        objective = torch.tensor([trace.objective for trace in traces]).sum(dim=0).tolist()
        notes = [note for epoch in epoch_updates for s in epoch for note in s.problem.notes]
        seen = epoch_updates[0][0]
        return ImageFinding(
            attack=self.name,
            images=pixels[0],
            labels=labels,
            label_source=seen.prepared.label_source,
            objective=objective[-1],
            iterations=self.iterations * len(runs),
            trace=Trace(traces[0].iterations, objective, pixels[1:]),
            notes=tuple(dict.fromkeys([*self.notes(seen.prepared, seen.message.update), *notes])),
            seconds=seconds,
            rounds=tuple(map(tuple, rounds)),
        )


@dataclass
class _Steps:
    """Progress over many optimisations, one after another."""

    progress: Progress | None
    total: int
    done: int = 0

    def next(self, iterations: int) -> Progress | None:
        """Return the progress of the next one."""
        before, self.done = self.done, self.done + iterations
        if self.progress is None:
            return None
        report: Callable[[int, int], None] = self.progress
        return lambda done, _: report(before + done, max(self.total, self.done))


def match(first: Tensor, second: Tensor, labels: Tensor | None, other_labels: Tensor | None, pooling: bool) -> Tensor:
    """Pair each of ``first`` with one of ``second``, greedily, the most similar pictures first.

    Xu et al. 2022, Section IV-B, step 1: mean squared error after 2×2 average pooling, pairs of equal label before all
    others.

    Args:
        first, second: (n, C, H, W) pictures of two epochs.
        labels, other_labels: (n,) of theirs; None for no label filter.
        pooling: whether to pool.

    Returns:
        (n,) for each of ``first`` the index of its partner.
    """
    a, b = (nn.functional.avg_pool2d(x, min(_POOL, *x.shape[2:])) if pooling else x for x in (first, second))
    cost = torch.cdist(a.flatten(1).double(), b.flatten(1).double()).square() / a[0].numel()
    if labels is not None and other_labels is not None:
        cost = cost + (labels[:, None] != other_labels[None]) * (1 + cost.max())
    partner = torch.full((len(first),), -1)
    taken = torch.zeros(len(second), dtype=torch.bool)
    for pair in cost.cpu().flatten().argsort(stable=True).tolist():
        row, column = divmod(pair, len(second))
        if partner[row] < 0 and not taken[column]:
            partner[row], taken[column] = column, True
    return partner


def chain(partners: Sequence[Tensor], count: int) -> Tensor:
    """Return (epochs, count): the place of each of the first epoch's pictures in every epoch.

    Args:
        partners: from every epoch to the next, as :func:`match` returns them.
        count: pictures an epoch.
    """
    places = [torch.arange(count)]
    for partner in partners:
        places.append(partner[places[-1]])
    return torch.stack(places)


def _cut(messages: Sequence[Message], epochs: int) -> list[Sequence[Message]]:
    length = len(messages) // epochs
    return [messages[i : i + length] for i in range(0, len(messages), length)]


def _places(epoch: Sequence[EpochUpdate], column: Tensor) -> list[tuple[EpochUpdate, Tensor]]:
    """Return, for every update of an epoch, which images are its examples, in the order of its labels."""
    image_at = torch.empty_like(column)
    image_at[column] = torch.arange(len(column))
    sizes = [len(s.prepared.labels) for s in epoch]
    return list(zip(epoch, image_at.split(sizes), strict=True))


def _components(places: Sequence[Sequence[tuple[EpochUpdate, Tensor]]]) -> list[Tensor]:
    """Return the images that hang together through shared updates, group by group, each ascending."""
    pairs = [(int(rows[0]), int(row)) for place in places for _, rows in place for row in rows]
    count = 1 + max(column for _, column in pairs)
    ends = tuple(zip(*pairs, strict=True))
    graph = coo_array(([1] * len(pairs), ends), shape=(count, count))
    _, group = connected_components(graph, directed=False)
    return [torch.nonzero(torch.as_tensor(group) == g).flatten() for g in range(group.max() + 1)]


@register
@checked_dataclass(frozen=True, kw_only=True, config=ATTACK_CONFIG)
class AGICEpochs(AGIC, SeveralEpochs):
    """AGIC, complete: one batch, layer weights, and all epochs that were observed (Xu et al. 2022)."""

    name: ClassVar[str] = "agic-epochs"
    summary: ClassVar[str] = "AGIC over all updates of a client in several epochs: matched, then reconstructed jointly"
    needs: ClassVar[tuple[str, ...]] = (*AGIC.needs, "all updates of a client over two or more epochs")


@register
@checked_dataclass(frozen=True, kw_only=True, config=ATTACK_CONFIG)
class InvGEpochs(InvG, SeveralEpochs):
    """AGIC's several epochs under InvG's objective: equal layer weights, FedAvg by simulation."""

    name: ClassVar[str] = "invg-epochs"
    summary: ClassVar[str] = "InvG over all updates of a client in several epochs: matched, then reconstructed jointly"
    paper: ClassVar[str] = "Geiping et al. 2020, with Xu et al. 2022, Section IV-B"
    needs: ClassVar[tuple[str, ...]] = (*InvG.needs, "all updates of a client over two or more epochs")


@register
@checked_dataclass(frozen=True, kw_only=True, config=ATTACK_CONFIG)
class DLGAdamEpochs(DLGAdam, SeveralEpochs):
    """AGIC's several epochs under DLG-Adam's objective: squared distance, FedAvg by simulation."""

    name: ClassVar[str] = "dlg-adam-epochs"
    summary: ClassVar[str] = "DLG-Adam over a client's updates in several epochs: matched, then reconstructed jointly"
    paper: ClassVar[str] = "Zhu et al. 2019 (DLG), with Xu et al. 2022, Section IV-B"
    needs: ClassVar[tuple[str, ...]] = (*DLGAdam.needs, "all updates of a client over two or more epochs")
