"""SRATTA: single examples out of sums of updates over rounds, and which of them are the same client's."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from scipy.optimize import nnls
from torch import Tensor, nn

from fedaudit.attacks.analytic.first_layer import FirstLayer, first_layer, layer_product, own_labels
from fedaudit.attacks.base import Attack, Case, Progress, register
from fedaudit.attacks.findings import ImageFinding
from fedaudit.attacks.victim import as_trained
from fedaudit.transcript.observation import Message, Observation
from fedaudit.utils.errors import NotApplicable
from fedaudit.utils.validation import Count

_OUTSIDE = 0.02  # by which a pixel may lie outside of its range
_EXACT = 1e-3  # of a row: what rounding may have added to it, at most
_DOUBT = 4.0  # roundings
_SAME = 4.0  # errors, within which a row is explained, and two images are one
_MOST = 20  # examples that a row is explained by, at most
_WEIGHT = 1e-2  # least share of a row's largest weight that makes an example one of the row's
_MIDDLE = 0.15  # of a step between two levels: root mean square distance from the nearest; of any values it is 0.29
_BETWEEN = 16  # pixels that are neither black nor white, from which levels tell anything
_AT_ONCE = 512  # rows


class _Rows(NamedTuple):
    """The first layer's update in a message, Σ λ·x and Σ λ (neurons, inputs + 1), and the float64 model that was sent.

    ``error`` (neurons,): by how much of itself a row may be off, rounded as it is.
    """

    module: nn.Module
    layer: FirstLayer
    product: Tensor
    error: Tensor


@register
class Sratta(Attack):
    """Examples alone in a neuron of a sum, and whose they are by what they do to each other (Marchand et al. 2023).

    The paper's steps. 1. The update of neuron h of a first fully connected layer before ReLU is Σ λ·x over the examples
    of all clients that activated it in the round, that of its bias Σ λ: their ratio is an example, where it is one
    alone. A prior of the data tells which ratios are: pixels on so many levels (``levels``). 2. Each row is written as
    a combination of the examples found, of as few as explain it (orthogonal matching pursuit); others are left out.
    3. Of a row, S3 are its examples that activate the neuron in the model as it was sent, S1 those that don't and are
    in the row all the same. What changed the neuron for S1 were examples of the same client in S3: where that is one,
    or several of whom it is known already that they are one client's, all are. 4. Repeated until nothing changes,
    this joins examples into groups, each of one client.

    Departures. Without a prior two rows of different messages that hold the same vouch for it (of one message
    alone, two of its rows: less sure, as examples whose loss pulls in one direction are weighed alike by all
    neurons), and what is a mean of others that were found is taken for several in one row. How exact a row is
    follows from its rounding, where the paper sets thresholds; a preactivation near zero leaves its row out. The
    paper's S2, examples that the model lets activate a neuron in whose row they aren't, is left out: an example
    that the model has learnt has weights too small to be seen, and would join clients wrongly. Labels, which the
    paper doesn't look for, are those whose own gradient is most like an example's weights in the rows. Rows of
    tables, which the paper attacks too (one-hot DNA), are refused.

    Args:
        levels: steps between the levels that pixels have from black to white: 255; None: unknown.
    """

    name = "sratta"
    summary = "examples that are alone in a neuron of sums over rounds, grouped by client"
    paper = "Marchand et al. 2023 (SRATTA)"
    threat_model = "server or eavesdropper, passive"
    needs = (
        "images and a classifier",
        "a model that begins with a fully connected layer with a bias, and ReLU",
        "to group examples by client: several local steps",
    )
    default_scope = "federation"
    examples = ("image",)
    uses = ("spear",)
    needs_classes = True

    levels: Count | None = None

    @classmethod
    def fits(cls, case: Case) -> bool:
        return case.sums and case.updates_alone and case.classifies(cls.examples) and case.rectified

    def check(self, observation: Observation) -> None:
        """Raise unless every message tells a first layer's update."""
        observation.need_messages()
        super().check(observation)
        self._prepare(observation)

    def _prepare(self, observation: Observation) -> list[_Rows]:
        info = observation.task_info
        every = []
        for message in observation.messages:
            module = as_trained(observation.module, info, message.weights)
            layer = first_layer(module, info.input_shape)
            if not layer.relu:
                raise NotApplicable("no ReLU follows the first layer, so every example is in every neuron's update")
            product = layer_product(message, layer, self.name)
            every.append(_Rows(module, layer, product, _error(message, layer, product)))
        return every

    def _run(
        self, observation: Observation, _generator: torch.Generator, _device: str, progress: Progress
    ) -> ImageFinding:
        every = self._prepare(observation)
        total = len(every) + 1
        found = self._alone(observation, every)
        progress(1, total)
        related, columns, explained = [], [], 0
        for i, rows in enumerate(every):
            weights, solved = _explained(rows, found)
            explained += int(solved.sum())
            related += self._relations(rows, found, weights, solved)
            columns.append(weights * solved[:, None])
            progress(i + 2, total)
        groups = _joined(len(found), related)
        shown = torch.stack([(column != 0).sum(dim=0) for column in columns])  # (messages, r)
        labels = torch.zeros(len(found), dtype=torch.int64)
        for i, rows in enumerate(every):
            own = torch.nonzero(shown.argmax(dim=0) == i)[:, 0]
            if len(own):
                flows = columns[i][:, own].T
                labels[own] = own_labels(rows.module, observation, rows.layer, found[own, :-1], flows)[0]
        strongest = shown.sum(dim=0).argsort(descending=True, stable=True)
        found, labels, groups = found[strongest], labels[strongest], groups[strongest]
        inputs = torch.zeros_like(found[:, :-1])
        inputs[:, every[0].layer.places] = found[:, :-1]
        info, count = observation.task_info, _held(observation)
        pixels = info.denormalise(inputs.view(-1, *info.input_shape)).float().clamp(0, 1)
        copies = torch.arange(max(count, len(found))) % len(found)
        sizes = groups.bincount()
        notes = (
            f"{len(found)} images stood alone in a neuron; they explain {explained} of "
            f"{sum(len(rows.product) for rows in every)} rows",
            f"{int((sizes > 1).sum())} groups of one client's images each, {int(sizes[sizes > 1].sum())} images in all",
        )
        first = torch.arange(len(copies)) < len(found)
        return ImageFinding(
            images=pixels[copies],
            labels=labels[copies],
            label_source=self.name,
            groups=torch.where(first, groups[copies], -1),
            notes=notes,
        )

    def _alone(self, observation: Observation, every: list[_Rows]) -> Tensor:
        """Return (r, inputs + 1) different examples that stood alone in a row, as the layer gets them, and a one."""
        info, places = observation.task_info, every[0].layer.places
        parts, pixels, errors, messages = [], [], [], []
        for i, rows in enumerate(every):
            active = rows.product[rows.error < _EXACT]
            ratios = active[:, :-1] / active[:, -1:]
            inputs = torch.zeros_like(ratios)
            inputs[:, places] = ratios
            seen = info.denormalise(inputs.view(-1, *info.input_shape)).flatten(1)
            inside = ((seen > -_OUTSIDE) & (seen < 1 + _OUTSIDE)).all(dim=1)
            parts.append(ratios[inside])
            pixels.append(seen[inside])
            errors.append((rows.error[rows.error < _EXACT] * ratios.norm(dim=1))[inside])
            messages.append(torch.full((len(parts[-1]),), i))
        ratios, seen, off = torch.cat(parts), torch.cat(pixels), torch.cat(errors)
        if self.levels is None:
            kept = _agreeing(ratios, off, torch.cat(messages) if len(every) > 1 else torch.arange(len(ratios)))
        else:
            kept = _on_levels(seen, self.levels)
            exact = (seen * self.levels).round().clamp(0, self.levels) / self.levels
            ratios = info.normalise(exact.view(-1, *info.input_shape)).flatten(1)[:, places]
            off = _DOUBT * torch.finfo(torch.float32).eps * ratios.norm(dim=1)
        if not bool(kept.any()):
            raise NotApplicable(
                f"of {len(ratios)} rows that could be images none is vouched for: no two agree, so several examples "
                "are in each of them; a wider first layer, more rounds or fewer examples a round tell more"
            )
        chosen: list[int] = []
        for place in torch.nonzero(kept)[:, 0][off[kept].argsort(stable=True)].tolist():
            apart = (ratios[chosen] - ratios[place]).norm(dim=1)
            if not bool((apart <= _SAME * (off[chosen] + off[place])).any()):
                chosen.append(place)
        found = torch.cat([ratios[chosen], torch.ones(len(chosen), 1, dtype=ratios.dtype)], dim=1)
        return found[~_mixed(found, off[chosen])]

    def _relations(
        self, rows: _Rows, found: Tensor, weights: Tensor, solved: Tensor
    ) -> list[tuple[list[int], list[int]]]:
        """Return for each row that says something S3 and S1: of each of S1 an example of the same client is in S3."""
        weight, bias = rows.layer.module.weight.detach(), rows.layer.module.bias.detach()
        before = found[:, :-1] @ weight.T + bias  # (r, neurons)
        unsure = before.abs() <= _EXACT * found.norm(dim=1)[:, None] * weight.norm(dim=1)
        active, inside = (before > 0).T, weights != 0
        changed = inside & ~active
        told = solved & ~(unsure.T & inside).any(dim=1) & changed.any(dim=1)
        related = []
        for row in torch.nonzero(told)[:, 0].tolist():
            stayed = torch.nonzero(inside[row] & active[row])[:, 0].tolist()
            if stayed:
                related.append((stayed, torch.nonzero(changed[row])[:, 0].tolist()))
        return related


def _error(message: Message, layer: FirstLayer, product: Tensor) -> Tensor:
    """Return (neurons,) what rounding may have added to each row, at most, as a share of it."""
    update = message.update
    name = f"{layer.name}.weight" if layer.name else "weight"
    rounding = _DOUBT * torch.finfo(update.tensors[name].dtype).eps
    size = product.norm(dim=1).clamp(min=1e-300)
    noise = torch.full_like(size, rounding)
    if update.kind == "weights":  # a difference of weights is as exact as these
        rate = update.training.learning_rate if update.training else 1.0
        noise = noise + rounding * message.weights[name].double().cpu().norm(dim=1) / (rate * size)
    return noise


def _agreeing(rows: Tensor, errors: Tensor, messages: Tensor) -> Tensor:
    """Return (n,) which rows one of another message equals, up to both their errors; those near along a line count."""
    direction = torch.randn(rows.shape[1], dtype=rows.dtype, generator=torch.Generator().manual_seed(0))
    along, order = (rows @ (direction / direction.norm())).sort()
    bound, agree = errors[order], torch.zeros(len(rows), dtype=torch.bool)
    for step in range(1, len(rows)):
        near = torch.nonzero(along[step:] - along[:-step] <= bound[step:] + bound[:-step])[:, 0]
        if not len(near):
            break
        for part in near.split(_AT_ONCE):
            one, other = order[part], order[part + step]
            same = (rows[one] - rows[other]).norm(dim=1) <= errors[one] + errors[other]
            same &= messages[one] != messages[other]
            agree[one[same]] = agree[other[same]] = True
    return agree


def _mixed(found: Tensor, errors: Tensor) -> Tensor:
    """Return (r,) which images are means of others, with whatever weights: what several in a row look like."""
    short = torch.linalg.qr(found.T).R.numpy()  # (k, r), of the same products
    mixed = torch.zeros(len(found), dtype=torch.bool)
    for i in range(len(found) if len(found) > 2 else 0):
        others = np.delete(short, i, axis=1)
        mixed[i] = bool(nnls(others, short[:, i])[1] <= _SAME * float(errors[i] + errors.median()))
    return mixed


def _on_levels(pixels: Tensor, levels: int) -> Tensor:
    """Return (n,) whether images lie on so many levels, by their pixels between black and white."""
    steps = pixels * levels
    between = (pixels > 1 / levels) & (pixels < 1 - 1 / levels)
    off = ((steps - steps.round()).square() * between).sum(dim=1) / between.sum(dim=1).clamp(min=1)
    return (off.sqrt() < _MIDDLE) & (between.sum(dim=1) >= _BETWEEN)


def _explained(every: _Rows, found: Tensor) -> tuple[Tensor, Tensor]:
    """Return (neurons, r) what each row weighs each example with, and (neurons,) whether that explains it.

    Orthogonal matching pursuit on the examples' products: the example most like what is left is added, and all weights
    are fitted again, until only the row's error is left.
    """
    product = every.product
    scale = found.norm(dim=1)
    unit = found / scale[:, None]
    gram = unit @ unit.T
    size = product.norm(dim=1)
    weights = torch.zeros(len(product), len(found), dtype=product.dtype)
    solved = torch.zeros(len(product), dtype=torch.bool)
    for rows in torch.nonzero(every.error < _EXACT)[:, 0].split(_AT_ONCE):
        error = _SAME * every.error[rows]
        target, chosen = product[rows] / size[rows, None], torch.zeros(len(rows), 0, dtype=torch.int64)
        like = target @ unit.T
        left, fitted = torch.ones(len(rows), dtype=product.dtype), torch.zeros_like(like)
        for _ in range(min(_MOST, len(found))):
            rest = (like - fitted @ gram).abs().scatter(1, chosen, -1.0)
            open_ = left > error
            if not bool(open_.any()):
                break
            chosen = torch.cat([chosen, rest.argmax(dim=1, keepdim=True)], dim=1)
            inner = gram[chosen[:, :, None], chosen[:, None, :]]
            own = torch.linalg.lstsq(inner, like.gather(1, chosen)[:, :, None]).solution[:, :, 0]
            new = torch.zeros_like(fitted).scatter(1, chosen, own)
            fitted = torch.where(open_[:, None], new, fitted)
            left = (target - fitted @ unit).norm(dim=1)
        fitted = fitted * (fitted.abs() > _WEIGHT * fitted.abs().amax(dim=1, keepdim=True))
        weights[rows] = fitted * size[rows, None] / scale
        solved[rows] = (target - fitted @ unit).norm(dim=1) <= 2 * error
    return weights, solved


def _joined(count: int, related: list[tuple[list[int], list[int]]]) -> Tensor:
    """Return (count,) the group of each example, counted from 0: those that relations join are of one."""
    groups = torch.arange(count)
    changed = True
    while changed:
        changed = False
        for stayed, others in related:
            if len(groups[stayed].unique()) == 1:
                own = groups[stayed + others].unique()
                changed |= len(own) > 1
                groups[torch.isin(groups, own)] = own[0]
    _, numbers = groups.unique(return_inverse=True)
    return torch.as_tensor(numbers)


def _held(observation: Observation) -> int:
    """Return how many images are asked for: an image a use of one update, else a different example of them all."""
    if len(observation.messages) == 1:
        return observation.messages[0].update.num_examples
    held: dict[tuple[int, ...], int] = {}
    for message in observation.messages:
        update = message.update
        members = update.members or (message.client,)
        known = update.training.data_size if update.training else None
        held[members] = known or held.get(members, 0) + update.num_examples
    return sum(held.values())
