"""Cocktail party attack: large batches behind a fully connected layer, told apart as independent sources."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from fedaudit.attacks.analytic.first_layer import FirstLayer, Recovered, comparable, own_labels
from fedaudit.attacks.analytic.sparse_columns import Directions, LowRank, none_yet, refine
from fedaudit.attacks.analytic.spear import SEARCHED, FactoredUpdate, Spear
from fedaudit.attacks.base import Case, register
from fedaudit.task.info import TaskInfo
from fedaudit.utils.validation import Count

_ALIKE = 0.9  # |cosine| from which a direction of a source is the certain one beside it
_SURELY = 0.8  # share of the neurons below zero that are taken to be so: an image is known with errors
_STEP = 0.5 / 255  # half a grey level
_OUTSIDE = 0.02  # share of an image's pixels that may lie outside of their range


@register
class Cocktail(Spear):
    """Cocktail party attack (Kariyappa et al., ICML 2023): images told apart in a sum as voices are in a room.

    The gradient of a first fully connected layer holds as many independent combinations of the inputs as the batch has
    examples. Independent component analysis looks for those combinations that look like single images, whatever the
    activation is, and in batches that no search for exact zeros gets through.

    Departures. The paper maximises negentropy of the pixels, less total variation and mutual information, by Adam over
    thousands of steps; here ICA is done on the differences of neighbouring pixels, which are sparse and nearly
    independent (:func:`.unmix`): seconds on a CPU. A source's scale and sign are those that the gradient of the bias
    gives, or where that leads out of the pixels' range, the largest scale that stays in it, and the sign of which the
    model's own gradient is like the source's. Where a ReLU follows the layer, a source nearly tells which neurons its
    example doesn't activate: from there on it is SPEAR, which makes the batch exact and certifies it (:class:`.Spear`).

    Args:
        rounds: of SPEAR's search, at most, for what ICA hasn't told apart.
    """

    name = "cocktail"
    summary = "large batches, told apart as independent sources, behind a fully connected layer"
    paper = "Kariyappa et al. 2023 (Cocktail party attack)"
    needs = (
        "images, volumes or signals, and a classifier",
        "a model that begins with a fully connected layer with a bias",
        "fewer examples in an update than the layer has outputs, and than an example has numbers",
    )
    rectified = False

    rounds: Count = 40

    @classmethod
    def fits(cls, case: Case) -> bool:
        return case.solves(cls.examples) and case.examples > 1 and (case.examples > SEARCHED or not case.rectified)

    def _begin(self, factored: FactoredUpdate, generator: torch.Generator) -> tuple[Directions, Tensor | None]:
        """Return the certain directions to which the sources lead, and the directions of all sources (r, r).

        Combinations orthogonal to the certain directions mix the other examples alone. So these are told apart again
        among themselves, which works better, as long as that leads to further certain directions.
        """
        parts = factored.parts
        found, sources = none_yet(parts), None
        rest = torch.eye(parts.rank, dtype=torch.float64)
        while len(rest):
            rows = unmix(_images(factored, rest @ parts.right), generator) @ rest
            if sources is None:
                sources = nn.functional.normalize(torch.linalg.inv(rows), dim=0)
                found = refine(parts, sources if factored.layer.relu else sources[:, :0])
                new = len(found)
            else:
                before = len(found)
                found = found.and_(refine(parts, _silent(factored, rows)))
                new = len(found) - before
            if not new or len(found) >= parts.rank:
                break
            rest = torch.linalg.svd(found.values.T)[2][len(found) :]
        return found, sources

    def _guess(
        self, factored: FactoredUpdate, found: Directions, sources: Tensor | None, generator: torch.Generator
    ) -> Recovered:
        """Return the sources as they are, but for the directions that are certain."""
        if sources is None:
            return super()._guess(factored, found, sources, generator)
        module, observation, layer, parts, _ = factored
        values = _with_certain(parts, found, sources)
        rows = torch.linalg.solve(values, parts.right)
        columns = torch.zeros(len(rows), layer.module.out_features, dtype=torch.float64)
        columns[:, parts.live] = (parts.scores @ values).T
        inputs = _scaled(rows, layer, observation.task_info)
        signs = (inputs * rows[:, :-1]).sum(dim=1, keepdim=True).sign()
        labels, distance = own_labels(module, observation, layer, inputs, signs * columns)
        bounded = observation.task_info.example_kind.bounds is not None
        if bounded and comparable(
            module, observation
        ):  # an image and its negative differ in what the model makes of them
            other = _widest(rows, 1.0, layer, observation.task_info)
            other = torch.where(signs > 0, _widest(rows, -1.0, layer, observation.task_info), other)
            label, far = own_labels(module, observation, layer, other, -signs * columns)
            nearer = far < distance
            labels = torch.where(nearer, label, labels)
            inputs = torch.where(nearer[:, None], other, inputs)
        notes = ["told apart as independent sources: likely images, not exact ones"]
        if layer.relu:
            notes.append(f"certain directions of {len(found)} of {parts.rank} examples, and an exact one needs all")
        return Recovered(inputs, labels, torch.zeros(len(inputs), dtype=torch.bool), tuple(notes))


def _images(factored: FactoredUpdate, rows: Tensor) -> Tensor:
    """Return rows (k, n + 1) of the layer's inputs and a one as examples (k, ...)."""
    images = torch.zeros(len(rows), rows.shape[1] - 1, dtype=rows.dtype)
    images[:, factored.layer.places] = rows[:, :-1]
    return images.view(-1, *factored.observation.task_info.input_shape)


def _silent(factored: FactoredUpdate, rows: Tensor) -> Tensor:
    """Return the directions (r, k) whose scores are least for the neurons that images (k, r) activate least."""
    layer, parts = factored.layer, factored.parts
    inputs = _scaled(rows @ parts.right, layer, factored.observation.task_info)
    before = (inputs @ layer.module.weight.detach().T + layer.module.bias.detach())[:, parts.live]
    scores = parts.scores / parts.noise[:, None]
    directions = []
    for values in before:
        zero = scores[values <= values[values < 0].quantile(_SURELY)] if bool((values < 0).any()) else scores[:0]
        if len(zero) >= parts.rank:
            directions.append(torch.linalg.eigh(zero.T @ zero)[1][:, 0])
    return torch.stack(directions, dim=1) if directions else parts.scores.new_zeros(parts.rank, 0)


def _with_certain(parts: LowRank, found: Directions, sources: Tensor) -> Tensor:
    """Return ``sources`` (r, r), with those that are like a certain direction replaced by it, each by one at most."""
    whitened = [nn.functional.normalize(q * parts.singular[:, None], dim=0) for q in (found.values, sources)]
    alike = (whitened[0].T @ whitened[1]).abs()
    values = sources.clone()
    for _ in range(min(alike.shape)):
        one, other = divmod(int(alike.argmax()), alike.shape[1])
        if float(alike[one, other]) < _ALIKE:
            break
        values[:, other] = found.values[:, one]
        alike[one], alike[:, other] = 0, 0
    return values


def _scaled(rows: Tensor, layer: FirstLayer, task_info: TaskInfo) -> Tensor:
    """Return the layer's inputs (r, n) of ``rows`` (r, n + 1), each a multiple of them and of one.

    The last number is the multiple, but a single, noisy one: where it leads out of the pixels' range, the largest
    multiple within it is taken, of either sign. Values without a range have no such remedy.
    """
    told = (rows / rows[:, -1:])[:, :-1]
    if task_info.example_kind.bounds is None:
        return told
    zero, one = _range(layer, task_info)
    pixels = zero + one * told
    outside = (pixels < -_STEP) | (pixels > 1 + _STEP) | ~torch.isfinite(told)
    up, down = (_widest(rows, sign, layer, task_info) for sign in (1.0, -1.0))
    widest = torch.where(up.norm(dim=1, keepdim=True) >= down.norm(dim=1, keepdim=True), up, down)
    return torch.where(outside.double().mean(dim=1, keepdim=True) <= _OUTSIDE, told, widest)


def _widest(rows: Tensor, sign: float, layer: FirstLayer, task_info: TaskInfo) -> Tensor:
    """Return the largest multiples (r, n) of ``rows`` (r, n + 1), of one sign, that stay within the pixels' range."""
    zero, one = _range(layer, task_info)
    steps = sign * one * rows[:, :-1]
    room = torch.where(steps > 0, 1 - zero, zero) / steps.abs().clamp(min=1e-300)
    return sign * room.quantile(_OUTSIDE, dim=1, keepdim=True) * rows[:, :-1]


def _range(layer: FirstLayer, task_info: TaskInfo) -> tuple[Tensor, Tensor]:
    """Return the pixel (1, n), between 0 and 1, that an input of 0 stands for, and how much brighter that of 1 is."""
    low, high = task_info.example_kind.bounds or (0.0, 1.0)
    black, white = (
        (task_info.denormalise(torch.full((1, *task_info.input_shape), value, dtype=torch.float64)).flatten(1) - low)
        / (high - low)
        for value in (0.0, 1.0)
    )
    return black[:, layer.places], (white - black)[:, layer.places]


_FAST, _STILL = 200, 1e-4  # steps of FastICA, and the change that ends it
_STEPS = 60  # of L-BFGS with each density
_LEAST = 1e-12  # relative variance of a combination without any edge


def unmix(images: Tensor, generator: torch.Generator) -> Tensor:
    """Return (r, r): rows of coefficients, each of a combination of ``images`` that is like one of those mixed.

    Neighbouring pixels of an image differ little nearly everywhere and much at edges, and edges of different images are
    in different places: the differences are sparse and independent, which pixels themselves are not. FastICA
    (symmetric, log cosh; Hyvärinen 1999) on the differences finds a start. It holds the components uncorrelated, which
    a few thousand differences of single images never quite are; so maximum likelihood follows, without that constraint,
    with heavy-tailed densities. ``images``: (r, c, h, w) or (r, c, ...), float64, linearly independent.
    """
    edges = torch.cat([images.diff(dim=axis).flatten(1) for axis in range(images.ndim - 1, 1, -1)], dim=1)
    if not edges.shape[1]:  # of one pixel
        return torch.eye(len(images), dtype=images.dtype)
    spectrum, vectors = torch.linalg.eigh(edges @ edges.T / edges.shape[1])
    spectrum = spectrum.clamp(min=max(_LEAST * float(spectrum[-1]), 1e-300))
    whiten: Tensor = (vectors / spectrum.sqrt()) @ vectors.T
    white = whiten @ edges
    found = _fast_ica(white, generator)
    for cost in (_student, _sparse):
        found = _likeliest(white, found, cost)
    return found @ whiten


def _fast_ica(white: Tensor, generator: torch.Generator) -> Tensor:
    r, n = white.shape
    found: Tensor = torch.linalg.qr(torch.randn(r, r, dtype=white.dtype, generator=generator))[0]
    for _ in range(_FAST):
        slope = torch.tanh(found @ white)
        left, _, right = torch.linalg.svd(slope @ white.T / n - (1 - slope.square()).mean(dim=1)[:, None] * found)
        before, found = found, left @ right
        if float(((found * before).sum(dim=1).abs() - 1).abs().max()) < _STILL:
            break
    return found


def _student(y: Tensor) -> Tensor:
    return 1.2 * torch.log1p(y.square() / 0.3)


def _sparse(y: Tensor) -> Tensor:
    return 2.0 * (y.square() + 0.01).pow(0.25)


def _likeliest(white: Tensor, start: Tensor, cost: Callable[[Tensor], Tensor]) -> Tensor:
    """Return the unmixing matrix of least ``cost``, minus the log-density of a component up to a constant."""
    data, found = white.float(), start.float().requires_grad_()
    optimiser = torch.optim.LBFGS([found], max_iter=_STEPS, history_size=20, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimiser.zero_grad()
        value: Tensor = cost(found @ data).mean(dim=1).sum() - torch.linalg.slogdet(found)[1]
        value.backward()
        return value

    with torch.enable_grad():
        optimiser.step(closure)
    after: Tensor = found.detach().double()
    return after if bool(torch.isfinite(after).all()) else start
