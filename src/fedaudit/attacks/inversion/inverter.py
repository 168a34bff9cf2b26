"""An inverter that the adversary learns on updates of examples of its own, and descents that begin with its answer.

After Learning to Invert (Wu et al., UAI 2023) and FGLA (Xue et al., INFOCOM 2023): own examples are trained on by the
very simulation that calibration has, defences included, and a regression learns the way back. Departures, ours: it is
kernel ridge regression in place of a network, whose one number is chosen by leaving examples out, in closed form; it
answers example by example, by the row that the last layer's gradient has for its label and a sketch of all layers', so
that one inverter serves all updates made under the same facts, whatever their labels; and what it leaves open is a
Gaussian, in whose coordinates the descent goes on.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from pydantic import ConfigDict
from torch import Tensor

from fedaudit.attacks.base import Progress, silent
from fedaudit.attacks.findings import Trace
from fedaudit.attacks.inversion.objectives import Objective
from fedaudit.attacks.inversion.own_updates import distinct, own_client
from fedaudit.attacks.inversion.reconstruct import reconstruct
from fedaudit.modalities.prior import Prior
from fedaudit.task.info import TaskInfo
from fedaudit.transcript.observation import Observation
from fedaudit.transcript.update import Update
from fedaudit.utils.errors import NotApplicable
from fedaudit.utils.seeds import generator as seeded

FEWEST = 500  # own examples, below which nothing is learnt
_EXAMPLES = 5000  # that are learnt from, over all own updates, at most
_NUMBERS = 2**27  # of these examples, at most
_AGAIN = 4  # times that an example is used, at most
_BUCKETS = 4096  # of the sketch of an update, about
_SHARES = (0.0, 0.3, 1.0)  # of the sketch beside the row: the best is taken
_RIDGE = 1e-2
_WIDTH = 2.0  # of the kernel, in median distances
_COMPONENTS = 400  # principal ones of the examples that are told
_SIDED = 0.05  # share that classes' means have in examples' odd parts, from which on none is mirrored
_OF_PRIOR = 2500  # examples whose residuals give the Gaussian


@dataclass(frozen=True)
class Inverter:
    """What was learnt of updates made under the same facts: from features (f,) of an example to its numbers (d,).

    Attributes:
        layer: name of the last layer's weights.
        names: of the tensors that were sketched.
        features: (m, f) of own examples; ``width`` is the kernel's, exp(−‖a − b‖/width).
        share: of the sketch in the features.
        weights: (m, k) of the ridge regression, on the ``basis`` (k, d) around ``mean`` (d,).
        left: (j, d) directions of what stays open, ``deviations`` (j,) in them, ``rest`` in all others.
        examples: it was learnt from, and ``updates``.
        psnr: dB, of own examples that were left out.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(arbitrary_types_allowed=True)

    layer: str
    names: tuple[str, ...]
    features: Tensor
    width: float
    share: float
    weights: Tensor
    basis: Tensor
    mean: Tensor
    left: Tensor
    deviations: Tensor
    rest: float
    examples: int
    updates: int
    psnr: float

    def answer(self, update: Update, labels: Tensor, task_info: TaskInfo) -> Tensor:
        """Return (n, C, ...) examples in [0, 1] of one update, for their labels (n,)."""
        rows, sketch = told(update, labels, self.layer, self.names)
        features = joined(rows, sketch, labels, self.share, int(task_info.num_classes or 0))
        kernel = torch.exp(-torch.cdist(features, self.features) / self.width)
        found = self.mean + kernel @ self.weights @ self.basis
        return found.view(-1, *task_info.input_shape).clamp(0, 1)


def learnt(
    observation: Observation,
    examples: tuple[Tensor, Tensor],
    generator: torch.Generator,
    progress: Progress = silent,
    *,
    most: int = _EXAMPLES,
) -> Inverter:
    """Return an inverter of updates that are made as this one.

    Args:
        observation: of one update; of its numbers nothing is used but what :func:`.own_client` uses.
        examples: (m, C, ...) own ones in [0, 1] and their (m,) labels.
        generator: of which examples go together.
        progress: called with (done, total) own updates.
        most: own updates, at most.

    Raises:
        NotApplicable: there are too few examples, or ``most`` updates use too few; the model has no last fully
            connected layer; nobody can repeat such training.
    """
    inputs, labels = examples
    count = distinct(observation)
    if len(inputs) < FEWEST:
        raise NotApplicable(f"an inverter is learnt from {FEWEST} examples at least, and there are {len(inputs)}")
    check(observation)
    layer, names = _last(observation), tuple(sorted(observation.single().update.tensors))
    seen = min(_EXAMPLES, most * count, _NUMBERS // inputs[0].numel())
    if seen < FEWEST:
        raise NotApplicable(
            f"an inverter is learnt from {FEWEST} examples at least, {count} an update; let it have "
            f"{-(-FEWEST // count)} updates (iterations), not {most}"
            if most * count < FEWEST
            else f"examples of {inputs[0].numel():,} numbers are too large to learn from {FEWEST} of them"
        )
    size = min(len(inputs), seen) // count * count
    if not size:
        raise NotApplicable(
            f"an inverter is learnt from whole updates: one is over {count:,} examples, and {min(len(inputs), seen):,} "
            "can be learnt from"
        )
    again = min(_AGAIN, max(1, seen // size))
    which = torch.randperm(len(inputs), generator=generator)[:size]
    walk = torch.cat([which[torch.randperm(size, generator=generator)] for _ in range(again)])
    rows, sketches, own = list[Tensor](), list[Tensor](), list[Tensor]()
    turned = 0.0 if sided(inputs[which], labels[which]) > _SIDED else 0.5
    for done, chosen in enumerate(walk.split(count)):
        shown = inputs[chosen]
        mirrored = torch.rand(count, generator=generator) < turned
        shown = torch.where(mirrored.view(-1, *[1] * (shown.ndim - 1)), shown.flip(-1), shown)
        client = own_client(observation, (shown, labels[chosen]), generator)
        row, sketch = told(client.observation.single().update, labels[chosen], layer, names)
        rows.append(row)
        sketches.append(sketch.expand(count, -1))
        own.append(shown.flatten(1))
        progress(done + 1, len(walk) // count)
    copies = walk.argsort(stable=True).view(size, again)
    told_of = torch.cat(rows), torch.cat(sketches), labels[walk]
    return _fitted(told_of, torch.cat(own), copies, observation, layer)


def sided(inputs: Tensor, labels: Tensor) -> float:
    """Return how far classes have a left and a right, (m, C, ...) examples by their (m,) labels: from about 0 to 1.

    It is the share of the classes' means in the odd parts x − mirrored x, without what chance gives the mean of few.
    """
    odd = (inputs - inputs.flip(-1)).flatten(1)
    common = 0.0
    for label in labels.unique():
        own = odd[labels == label]
        whole = float(own.square().sum())
        common += (float(own.sum(dim=0).square().sum()) - whole) / max(1, len(own) - 1)
    return common / max(float(odd.square().sum()), 1e-12)


def check(observation: Observation) -> None:
    """Raise NotApplicable where an update doesn't tell an example's row."""
    update, info = observation.single().update, observation.task_info
    name = _last(observation)
    if info.num_classes is None or not info.task_kind.one_class or name not in update.tensors:  # e.g. a single logit
        raise NotApplicable("the way back is learnt from the last layer's rows, of a classifier's update that has them")
    if info.example_kind.bounds is None:
        raise NotApplicable("the way back is learnt of examples with bounds, as pixels have them")


def _last(observation: Observation) -> str:
    """Return the name of the weights of the last layer, which has a row for each class; empty: there is none."""
    of = observation.module.named_parameters()
    names = [name for name, p in of if p.ndim == 2 and len(p) == observation.task_info.num_classes]
    return names[-1] if names else ""


def told(update: Update, labels: Tensor, layer: str, names: Sequence[str]) -> tuple[Tensor, Tensor]:
    """Return (n, h) what the last layer's gradient tells of each example, and (1, k) a sketch of all layers'.

    The row of label y is (1/B)·Σᵢ (pᵢ − 1[y = yᵢ])·hᵢ: the features hᵢ of its own example, and what the network takes
    others for, which the mean row of absent classes stands for (FGLA). All are of length one: how sure the network is
    scales them.
    """
    matrix = update.tensors[layer].float()
    matrix = -matrix if update.kind == "weights" else matrix
    absent = [c for c in range(len(matrix)) if c not in set(labels.tolist())]
    rows = matrix[labels]
    if absent:
        rows = rows - (1 - 1 / len(labels)) * matrix[absent].mean(dim=0)
    return _long(rows), _sketch({name: update.tensors[name] for name in names})[None]


def _sketch(tensors: Mapping[str, Tensor]) -> Tensor:
    """Return a count sketch (Charikar et al. 2002) of an update's tensors, each of length one, and so are all."""
    whole = [name for name, tensor in tensors.items() if tensor.numel() > 1]
    each = max(64, _BUCKETS // max(1, len(whole)))
    parts = []
    for name in whole:
        flat = tensors[name].flatten().float()
        if len(flat) > each:
            draws = seeded(len(flat), "sketch")
            places = torch.randint(each, (len(flat),), generator=draws)
            signs = torch.randint(2, (len(flat),), generator=draws) * 2.0 - 1
            flat = torch.zeros(each).index_add_(0, places, signs * flat)
        parts.append(_long(flat))
    return _long(torch.cat(parts))


def _long(vectors: Tensor) -> Tensor:
    """Return the vectors with length one."""
    scaled: Tensor = vectors / vectors.norm(dim=-1, keepdim=True).clamp(min=1e-30)
    return scaled


def joined(rows: Tensor, sketch: Tensor, labels: Tensor, share: float, classes: int) -> Tensor:
    """Return (n, f) features: rows, labels and, as far as it counts, the sketch."""
    which = torch.nn.functional.one_hot(labels, classes).float()
    parts = [rows, which, share * sketch.expand(len(rows), -1)] if share else [rows, which]
    return torch.cat(parts, dim=1)


def _fitted(
    told_of: tuple[Tensor, Tensor, Tensor], examples: Tensor, copies: Tensor, observation: Observation, layer: str
) -> Inverter:
    """Return the regression of least error on examples, (m, d), of which all ``copies`` (m/r, r) are left out at once.

    What (K + λ)⁻¹ is tells it: the errors of copies c are its block (c, c), inverted, times the weights' rows c.
    """
    classes = int(observation.task_info.num_classes or 0)
    mean = examples.mean(dim=0)
    centred = examples - mean
    basis = torch.linalg.svd(centred[:_OF_PRIOR], full_matrices=False)[2][:_COMPONENTS]
    wanted = centred @ basis.T
    best: tuple[float, float, float, Tensor, Tensor, Tensor] | None = None
    for share in _SHARES:
        features = joined(*told_of, share, classes)
        width = _WIDTH * float(torch.cdist(features[:500], features[-500:]).median().clamp(min=1e-12))
        kernel = torch.exp(-torch.cdist(features, features) / width)
        kernel.diagonal().add_(_RIDGE)
        inverse = torch.cholesky_inverse(torch.linalg.cholesky(kernel))
        weights = inverse @ wanted
        blocks = inverse[copies[:, :, None], copies[:, None, :]]
        apart = torch.linalg.solve(blocks, weights[copies])[:, 0]
        error = float(apart.square().sum(dim=1).mean())
        if best is None or error < best[0]:
            best = error, share, width, features, weights, apart
    assert best is not None
    _, share, width, features, weights, apart = best
    some = copies[:_OF_PRIOR, 0]
    off = apart[:_OF_PRIOR] @ basis + (centred[some] - wanted[some] @ basis)
    left = Prior.of(off.view(-1, *observation.task_info.input_shape))
    many = left.deviations.argsort(descending=True)[:_COMPONENTS]
    others = left.variance * left.directions.shape[1] - float(left.deviations[many].square().sum())
    rest = math.sqrt(max(others, 1e-12) / max(1, left.directions.shape[1] - len(many)))
    return Inverter(
        layer=layer,
        names=tuple(sorted(observation.single().update.tensors)),
        features=features,
        width=width,
        share=share,
        weights=weights,
        basis=basis,
        mean=mean,
        left=left.directions[many].float(),
        deviations=left.deviations[many].float(),
        rest=rest,
        examples=len(copies),
        updates=copies.numel() // distinct(observation),
        psnr=-10 * math.log10(max(float(off.square().mean()), 1e-12)),
    )


def descend(
    objective: Objective,
    start: Tensor,
    inverter: Inverter,
    task_info: TaskInfo,
    generator: torch.Generator,
    progress: Progress = silent,
    *,
    pull: float,
    **settings: Any,
) -> tuple[list[Tensor], Trace]:
    """Return what :func:`.reconstruct` finds from an inverter's answer, where what that leaves open is round.

    x = answer + C^½z, C being the covariance of the inverter's errors on own examples, which falls with the frequency:
    so steps in z are coarse first, and fine ones need a reason.

    Args:
        objective: of images.
        start: (n, C, ...) the answer, normalised.
        pull: weight of the mean of z², which keeps the images near the answer.
        settings: of :func:`.reconstruct`.
    """
    std = torch.tensor(task_info.std, device=start.device).view(-1, *[1] * (start.ndim - 2))
    scale = std.expand(start.shape[1:]).flatten()
    left = inverter.left.to(start.device)
    deviations = (inverter.deviations - inverter.rest).to(start.device)

    def root(rows: Tensor) -> Tensor:
        return inverter.rest * rows + ((rows @ left.T) * deviations) @ left

    def images(z: Tensor) -> Tensor:
        return start + (root(z) / scale).view_as(start)

    def of_z(z: Tensor) -> tuple[Tensor, Tensor]:
        value, slope = objective(images(z))
        return value + pull * z.square().mean(), root(slope.flatten(1) / scale) + 2 * pull / z.numel() * z

    anywhere = torch.tensor(-math.inf), torch.tensor(math.inf)
    first = torch.zeros_like(start).flatten(1)
    (z,), trace = reconstruct(of_z, [first], anywhere, generator, progress, **settings)
    shown = torch.stack([images(one) for one in trace.snapshots])
    return [images(z)], replace(trace, snapshots=shown)
