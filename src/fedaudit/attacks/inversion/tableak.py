"""TabLeak: rows of tables, by many restarts that are pooled."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from fedaudit.attacks.base import Attack, Case, Progress, register, silent
from fedaudit.attacks.findings import RowFinding
from fedaudit.attacks.inversion.engines.restarts import Decode, dense, one_by_one, restarts
from fedaudit.attacks.inversion.local_epochs import spread
from fedaudit.attacks.inversion.reconstruct import reconstruct
from fedaudit.attacks.inversion.template import Prepared, Schedule, matched, prepare
from fedaudit.attacks.labels.inference import LabelMethod
from fedaudit.attacks.local_training import Way, image_way, whole_epochs
from fedaudit.attacks.victim import WITHOUT_DROPOUT, need_signal, need_training
from fedaudit.modalities.columns import Column, numbers
from fedaudit.simulation.local_training import local_randomness
from fedaudit.task.base import Task
from fedaudit.transcript.observation import Message, Observation
from fedaudit.utils.errors import NotApplicable
from fedaudit.utils.validation import Count, Fraction, Positive

# How counts of inferred labels are corrected: by descents so short, so few of them, for so many examples at most.
_SHORT, _FEW, _COUNTED = 100, 5, 64
_MOVES = 4  # labels that are moved at most
_CLEARLY = 0.7  # of the distance: a move must bring it below


@register
class TabLeak(Attack):
    """TabLeak (Vero et al. 2023): rows of a table whose gradient is the observed one.

    A category is optimised as a softmax over its values (Section 4.1), numbers as they are. Restarts from random rows
    are brought into the order of the one of least distance, and each cell is the median over them (Section 4.2); how
    far they agree, by the entropy of a cell's distribution over the restarts, is the confidence (Section 4.3). Over
    several local epochs, whose order nobody tells, each epoch's rows count as a further restart.

    Departures: all restarts are one batch, which changes no restart; the learning rate falls to zero in 500 iterations,
    which tells as much as the paper's 1,500 at a constant one (study ``tables/tableak``); numbers aren't bounded to the
    range of the data, which this adversary doesn't know; labels that aren't granted are inferred first, not optimised
    (targets of a regression are optimised), and spread evenly over the mini-batches; a number's confidence is the
    probability that a normal distribution of the restarts' spread is within the tolerance.

    Args:
        iterations: of Adam, in each restart.
        restarts: from new random rows, which are pooled.
        learning_rate: in standard deviations of a column, or units of a category's logit.
        signed: give Adam the sign of the gradient only.
        schedule: of the learning rate: ``constant``; ``steps``, ×0.1 after 3/8, 5/8 and 7/8 of the iterations;
            ``linear``, to zero; ``cosine``, to zero after a short linear start.
        average: share of the iterations, the last ones, whose mean is a restart's result; 0 for the last one.
        distance: ``cosine``, ``squared-l2``, or ``auto``: the cosine, but where targets are optimised, which change the
            gradient's length, the squared distance.
        pooling: ``median`` over the restarts, or ``best``: the one of least distance alone.
        label_inference: ``auto``, ``idlg``, ``yin``, ``geng``, ``bias-corrected`` or ``signs``; not used where labels
            are granted.
        batched: all restarts in one batch; False runs one after another, which gives the same and takes longer.
        aware: use what is known of the clients' defence.
    """

    name = "tableak"
    summary = "rows of a table: categories by softmax, many restarts at once, their median, confidence"
    paper = "Vero et al. 2023 (TabLeak)"
    threat_model = "server or eavesdropper, passive"
    needs = (
        "a table; its columns' types, without which every position is taken for a number",
        "for a FedAvg update, how the client trained (threat.knows_training)",
    )
    examples = ("table", "packed")
    recovers = "rows of a table"
    finds = RowFinding
    first_settings: ClassVar[dict[str, Any]] = {"restarts": 10}  # a third of its own

    iterations: Count = 500
    restarts: Count = 30
    learning_rate: Annotated[Positive, Field(le=1e6)] = 0.06
    signed: bool = True
    schedule: Schedule = "linear"
    average: Fraction = 0.0
    distance: Literal["auto", "cosine", "squared-l2"] = "auto"
    pooling: Literal["median", "best"] = "median"
    label_inference: LabelMethod = "auto"
    batched: bool = True
    aware: bool = True

    @classmethod
    def fits(cls, case: Case) -> bool:
        return case.searchable and case.kind in cls.examples and not case.images and case.can_simulate

    def check(self, observation: Observation) -> None:
        """Raise unless the update is of a table's rows, and what it is a multiple of is known."""
        observation.single()
        super().check(observation)
        need_training(self.name, observation)
        need_signal(observation.single().update)

    def ways(self, observation: Observation, message: Message) -> Sequence[Way]:
        """Return how rows are found, and labels, where they are inferred."""
        way = image_way("simulation", message)
        infers = message.update.labels is None and observation.task_info.num_classes is not None
        return (way, "labels") if infers else (way,)

    def _run(self, observation: Observation, generator: torch.Generator, device: str, progress: Progress) -> RowFinding:
        task_info, update = observation.task_info, observation.single().update
        count, epochs = whole_epochs(update.num_examples, update.training)
        infers = update.labels is None and task_info.num_classes is not None
        prepared = prepare(
            observation,
            self.label_inference if infers or update.labels is not None else None,
            device,
            num_examples=count if infers else None,
            aware=self.aware,
        )
        # in memory of our own: where a file's tensors lie changes the rounding, and signs make much of that
        own = {name: t.clone() for name, t in prepared.victim.parameters.items()}
        prepared = dataclasses.replace(prepared, victim=dataclasses.replace(prepared.victim, parameters=own))
        width = task_info.input_shape[0]
        table = Relaxation(task_info.columns or numbers(width), width, device)
        labels = prepared.labels
        with local_randomness(generator.initial_seed()):  # a user's module may draw from the global generator
            if infers:
                labels = self._better(prepared, table, labels, epochs, generator)
                labels = spread(labels, update.training).repeat(epochs)
            elif update.labels is None:
                labels = torch.zeros(update.num_examples, 0, device=device)  # optimised beside the rows
            variables, values = self._descended(
                prepared, table, labels, self.iterations, self.restarts, generator, progress
            )
        kept = torch.isfinite(values) & torch.isfinite(variables).flatten(1).all(dim=1).cpu()
        if not bool(kept.any()):
            raise NotApplicable(f"the optimisation diverged at learning_rate {self.learning_rate:g}; lower it")
        best = values.masked_fill(~kept, torch.inf).argsort(stable=True)[: int(kept.sum())]
        if self.pooling == "best":
            best = best[:1]
        parts = table.parts(variables[best.to(device), :, : table.width]).cpu()
        pool = torch.stack([one for restart in parts for one in restart.split(count)])
        pool = torch.stack([pool[0], *(table.in_order_of(pool[0], one) for one in pool[1:])])
        notes = [*prepared.notes, *([WITHOUT_DROPOUT] if prepared.victim.dropout else [])]
        if not task_info.columns and task_info.packed_inputs is None:
            notes.append("the table's columns aren't known: every position was taken for a number")
        if epochs > 1:
            notes.append(f"{epochs} local epochs: each one's {count} rows were pooled like a restart")
        if labels.shape[1:] == (0,):
            labels = task_info.task_kind.hard(variables[best[0]][:, table.width :])
        return RowFinding(
            rows=table.rows(table.pooled(pool).to(device)).cpu(),
            labels=labels[:count].detach().cpu(),
            label_source=prepared.label_source,
            confidence=table.confidence(pool),
            objective=float(values[best[0]]),
            iterations=self.iterations * self.restarts,
            notes=tuple(notes),
        )

    def _descended(
        self,
        prepared: Prepared,
        table: Relaxation,
        labels: Tensor,
        iterations: int,
        starts: int,
        generator: torch.Generator,
        progress: Progress = silent,
    ) -> tuple[Tensor, Tensor]:
        """Return what the restarts come to, (R, n, v), and the distance of each."""
        name = self.distance
        if name == "auto":
            name = "squared-l2" if prepared.label_source == "optimised" else "cosine"
        weights = dict.fromkeys(prepared.victim.parameters, 1.0)
        distance, training = matched(prepared, weights, name, "simulation", aware=self.aware)
        decode = _decoding(table, labels, prepared.task_info.task_kind)
        count = prepared.update.num_examples
        exact = one_by_one(prepared.victim, training, distance, decode)
        width = table.width + prepared.task_info.outputs * (labels.ndim == 2 and not labels.shape[1])
        first = (2 * torch.rand((starts, count, width), generator=generator) - 1).to(labels.device)
        objective = exact
        if self.batched:
            fast = dense(prepared.victim, training, distance, decode)
            objective = restarts(prepared.victim, training, distance, decode, first, prepared.notes, fast)
        (variables,), _ = reconstruct(
            objective,
            [first],
            (first, first),  # nothing is clamped
            generator,
            lambda done, total: progress(done * starts, total * starts),
            iterations=iterations,
            learning_rate=self.learning_rate,
            signed=self.signed,
            schedule=self.schedule,
            average=self.average,
        )
        return variables, torch.stack([exact(one[None])[0] for one in variables]).cpu()

    def _better(
        self, prepared: Prepared, table: Relaxation, labels: Tensor, epochs: int, generator: torch.Generator
    ) -> Tensor:
        """Return inferred labels (n,), corrected where one more or less of a class explains the update clearly better.

        A wrong count shows in the distance, which the adversary sees: short descents compare the counts with those of
        one label moved from a class to another, between two classes at most.
        """
        classes = prepared.task_info.num_classes or 0
        if classes != 2 or len(labels) > _COUNTED or len(labels) < 2:
            return labels
        training = prepared.update.training
        ones, start = int(labels.sum()), generator.get_state()
        known: dict[int, float] = {}

        def value(k: int) -> float:
            if k not in known:
                own = torch.zeros_like(labels)
                own[len(labels) - k :] = 1
                alike = torch.Generator(generator.device).set_state(start)
                tried = spread(own, training).repeat(epochs)
                steps = min(_SHORT, self.iterations)
                values = self._descended(prepared, table, tried, steps, min(_FEW, self.restarts), alike)[1]
                known[k] = float(values.nan_to_num(torch.inf).min())
            return known[k]

        for _ in range(_MOVES):
            best = min((k for k in (ones - 1, ones, ones + 1) if 0 <= k <= len(labels)), key=value)
            if best == ones or value(best) > _CLEARLY * value(ones):
                break
            ones = best
        if ones != int(labels.sum()):
            prepared.notes.append(
                f"labels corrected: {ones} of class 1, by the distance, where {int(labels.sum())} were inferred"
            )
        corrected = torch.zeros_like(labels)
        corrected[len(labels) - ones :] = 1
        return corrected


def _decoding(table: Relaxation, labels: Tensor, task: Task) -> Decode:
    """Return how variables (…, n, v) become rows and labels; where these are (n, 0), the last stand for targets."""

    def decode(variables: Tensor) -> tuple[Tensor, Tensor]:
        rows = table.rows(table.parts(variables[..., : table.width]))
        if labels.shape[1:] != (0,):
            return rows, labels
        return rows, task.soft(variables[..., table.width :])

    return decode


_NEAR = 0.319  # of a column's standard deviation: so near, a number counts as recovered
_APART = 40  # categorical columns; of more, one padded softmax is faster than one each


class Relaxation:
    """From variables (…, v), one a numeric column and one a category, to rows (…, d) as models see them, and back."""

    def __init__(self, columns: Sequence[Column], d: int, device: str = "cpu") -> None:
        self.columns = tuple(columns)
        self.numeric = [column for column in columns if column.kind == "numeric"]
        self.categorical = [column for column in columns if column.kind == "categorical"]
        self.sizes = [len(column.categories) for column in self.categorical]
        self.width = len(self.numeric) + sum(self.sizes)
        places = [i for c in self.numeric for i in c.positions]
        # what stands where in (numbers, probabilities of all categories) @ mix
        self.mix = torch.zeros(self.width, d)
        for i, place in enumerate(places):
            self.mix[i, place] = 1.0
        row = len(places)
        for column in self.categorical:
            k = len(column.categories)
            self.mix[row : row + k, list(column.positions)] = column.values()
            row += k
        self.plain = torch.equal(self.mix, torch.eye(d))  # the table's own order, categories one-hot: nothing to mix
        # the table as blocks padded to the widest column, so that one softmax serves all
        self.padded = max(self.sizes, default=1)
        self.block = torch.zeros(sum(self.sizes), dtype=torch.int64)
        at = 0
        for i, k in enumerate(self.sizes):
            self.block[at : at + k] = i * self.padded + torch.arange(k)
            at += k
        whole = torch.arange(len(self.sizes) * self.padded)
        self.absent = ~torch.isin(whole, self.block)
        inverse = torch.zeros(len(whole), dtype=torch.int64)
        inverse[self.block] = torch.arange(len(self.block))
        self.mix, self.block = self.mix.to(device), self.block.to(device)
        self.absent, self.source = self.absent.to(device), inverse.to(device)

    def parts(self, variables: Tensor) -> Tensor:
        """Return (…, v): numbers as they are, and the probability of each category."""
        numbers, logits = variables.tensor_split([len(self.numeric)], dim=-1)
        if not self.sizes:
            return numbers
        if len(self.sizes) <= _APART:
            return torch.cat([numbers, *(own.softmax(dim=-1) for own in logits.split(self.sizes, dim=-1))], dim=-1)
        padded = logits[..., self.source].masked_fill(self.absent, -torch.inf)
        shares = padded.unflatten(-1, (len(self.sizes), self.padded)).softmax(dim=-1).flatten(-2)
        return torch.cat([numbers, shares[..., self.block]], dim=-1)

    def rows(self, parts: Tensor) -> Tensor:
        """Return (…, d) what the model sees of numbers and probabilities (…, v)."""
        return parts if self.plain else parts @ self.mix

    def split(self, parts: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Return the numbers (…, m), and the probabilities (…, k) of each categorical column."""
        numbers, shares = parts.tensor_split([len(self.numeric)], dim=-1)
        return numbers, list(shares.split(self.sizes, dim=-1)) if self.sizes else []

    def hardened(self, parts: Tensor) -> Tensor:
        """Return parts (…, v) with the likeliest category of each column at 1 and the others at 0."""
        numbers, shares = self.split(parts)
        hard = [torch.nn.functional.one_hot(s.argmax(dim=-1), s.shape[-1]).to(s.dtype) for s in shares]
        return torch.cat([numbers, *hard], dim=-1)

    def in_order_of(self, model: Tensor, parts: Tensor) -> Tensor:
        """Return one restart's parts (n, v) in the order of ``model``'s, so that as few cells as can be differ."""
        cost = torch.zeros(len(model), len(parts), dtype=torch.float64)
        mine, theirs = self.split(model)[0].double(), self.split(parts)[0].double()
        for i in range(mine.shape[1]):
            off = (mine[:, None, i] - theirs[None, :, i]).abs()
            cost += (off > _NEAR).double() + 1e-6 * off.clamp(max=100.0)
        if self.sizes:
            first, second = (self.hardened(p)[:, len(self.numeric) :].double() for p in (model, parts))
            cost += len(self.sizes) - first @ second.T
        return parts[torch.as_tensor(linear_sum_assignment(cost.numpy())[1])]

    def confidence(self, pool: Tensor) -> Tensor:
        """Return (n, c) in [0, 1], how far restarts (R, n, v), which are in one order, agree on each cell.

        For a category one minus the entropy of the mean probabilities, in units of the largest entropy; for a number
        the probability that a normal distribution of the restarts' standard deviation is within the tolerance of its
        mean, which falls as its entropy rises.
        """
        numbers, shares = self.split(pool.double())
        found = torch.ones(pool.shape[1], len(self.columns), dtype=torch.float64)
        of_numbers = torch.special.erf(_NEAR / math.sqrt(2) / numbers.std(dim=0, correction=0).clamp(min=1e-9))
        own_numbers, own_shares = iter(of_numbers.T), iter(shares)
        for i, column in enumerate(self.columns):
            if column.kind == "numeric":
                found[:, i] = next(own_numbers)
                continue
            mean = next(own_shares).mean(dim=0)
            entropy = -(mean * mean.clamp(min=1e-30).log()).sum(dim=1)
            found[:, i] = 1 - entropy / math.log(len(column.categories)) if len(column.categories) > 1 else 1.0
        return found.clamp(0, 1).float()

    def pooled(self, pool: Tensor) -> Tensor:
        """Return (n, v) the median of restarts (R, n, v), which are in one order, with categories hardened."""
        return self.hardened(pool.median(dim=0).values)
