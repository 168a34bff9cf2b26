"""SPEAR: whole batches, exactly, from the gradient of a fully connected layer before a ReLU."""

from __future__ import annotations

from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from fedaudit.attacks.analytic.first_layer import (
    ClosedForm,
    FirstLayer,
    Recovered,
    comparable,
    first_layer,
    in_range,
    layer_product,
    own_gradients,
    own_labels,
    rounding_of,
)
from fedaudit.attacks.analytic.sparse_columns import (
    Directions,
    LowRank,
    alternate,
    certify,
    chosen,
    factors,
    low_rank,
    none_yet,
    on_a_line,
    possible,
    search,
    search_beside,
)
from fedaudit.attacks.base import GRIDS, Case, Progress, register
from fedaudit.attacks.findings import Finding, RowFinding
from fedaudit.attacks.victim import as_trained, distinct_examples
from fedaudit.transcript.observation import Observation
from fedaudit.utils.errors import NotApplicable
from fedaudit.utils.validation import Count

SEARCHED = 24  # examples in one update, up to which a search for exact zeros still finds all
_STARTS, _STARTS_BESIDE = 64, 32
_CYCLE = 4  # rounds without the model's help, of which one searches among all rows
_STALE = 40  # rounds without a new direction, after which none is expected
_PATIENCE = 8  # rounds after all directions were found, if not all are certified
_CERTIFIED = 1 / 255 / 8  # of the range of values: a certified example's estimated error at most
_SLACK = 1e-4  # relative size of what may be on either side of the ReLU
_FLIPPED = 0.05  # of an example's neurons, the most that may change sides during several local steps
_OWN = 0.02  # relative distance up to which an example's own gradient is its column of L


class FactoredUpdate(NamedTuple):
    """An update as the product that it is, of the model as clients trained it; ``several``: it sums local steps."""

    module: nn.Module
    observation: Observation
    layer: FirstLayer
    parts: LowRank
    several: bool


@register
class Spear(ClosedForm):
    """SPEAR (Dimitrov et al., NeurIPS 2024) and SPEAR++ (Bakarsky et al. 2025): exact batches through Linear and ReLU.

    The layer's gradient is L·X: its rank is the batch size, and a column of L = ∂ℓ/∂z is zero wherever an example
    doesn't activate a neuron. The directions in which the gradient's singular vectors have so many zeros are the
    columns, and the gradient of the bias tells each one's scale.

    Departures. SPEAR samples submatrices; here a column's zeros and its example are found in turn, since the model's
    weights tell which neurons an example doesn't activate (:func:`.alternate`). Where several local steps blur that,
    directions are found by a subgradient of the ℓ1 norm on the sphere from many starts at once, and once more among the
    rows in which a known column is zero; the last one follows from the others, and of the last two all zeros that they
    may have are tried. With two classes, differences of columns may have more zeros than columns; a direction counts
    only if an example can have its zeros (:func:`.possible`).

    A direction is taken only if its zeros define it: they have the rank of all but one example, by a margin over the
    noise, and not by one row alone (so no threshold on the sparsity is needed). An example is *certified*, without the
    truth, if besides the model's own activations at it fit its column's zeros, its own gradient is its column (where
    that can be computed), and its estimated error is below an eighth of a grey level (of 1/255 of a standard deviation,
    where values have no range, as of signals). Noise is what a row of the
    gradient has outside of the others' span, be it float32's rounding or a defence's; the one tolerance that is set, a
    hundred-thousandth of a column's mean size, is for rounding that equal pixels share. Updates of several local steps
    are such products, too, as far as neurons stay inactive (:func:`.layer_product`).

    Args:
        rounds: of search, at most; it ends with the last direction, or when 40 rounds have found none.
    """

    name = "spear"
    examples: ClassVar[tuple[str, ...]] = GRIDS
    summary = "whole batches, exactly, where the model begins with a fully connected layer and ReLU"
    paper = "Dimitrov et al. 2024 (SPEAR); Bakarsky et al. 2025 (SPEAR++)"
    needs = (
        "images, volumes or signals, and a classifier",
        "a model that begins with a fully connected layer with a bias, then ReLU",
        "fewer examples in an update than the layer has outputs, and than an example has numbers",
    )

    rectified: ClassVar[bool] = True  # whether a ReLU must follow

    rounds: Count = 400

    @classmethod
    def fits(cls, case: Case) -> bool:
        return case.solves(cls.examples) and case.rectified and 1 < case.examples <= SEARCHED

    def _prepare(self, observation: Observation) -> tuple[nn.Module, FirstLayer, Tensor, int]:
        message, task_info = observation.single(), observation.task_info
        module = as_trained(observation.module, task_info, message.weights)
        layer = first_layer(module, task_info.input_shape)
        if self.rectified and not layer.relu:
            raise NotApplicable(
                f"{self.name} needs a ReLU right after '{layer.name}', the first layer: its zeros tell examples apart; "
                "run an attack that optimises (invg, agic)"
            )
        product = layer_product(message, layer, self.name)
        most = distinct_examples(message)
        size = min(int((product != 0).any(dim=1).sum()), product.shape[1])
        if most >= size:
            raise NotApplicable(
                f"{self.name} needs fewer examples in an update than the first layer's live neurons and an example's "
                f"numbers: {most} of {size}; run an attack that optimises (invg, agic), or audit a smaller batch"
            )
        return module, layer, product, most

    def _run(self, observation: Observation, generator: torch.Generator, _device: str, progress: Progress) -> Finding:
        module, layer, product, most = self._prepare(observation)
        message = observation.single()
        parts = low_rank(product, most, generator)
        several = message.update.training is not None and message.update.training.local_steps > 1
        factored = FactoredUpdate(module, observation, layer, parts, several)
        found, sources = self._begin(factored, generator) if parts.rank else (none_yet(parts), None)
        known = sure = chosen(parts, found)
        best: Recovered | None = None
        before = whole = last = 0
        for done in range(self.rounds if parts.rank and layer.relu else 0):
            found = _more(factored, found, known, done, generator)
            new, before = len(found) > before, len(found)
            own = chosen(parts, found)
            known = own if best is None else sure
            progress(min(len(found), parts.rank), parts.rank)
            last = done if new else last
            if done - last >= _STALE or (best is not None and done - whole >= _PATIENCE):
                break
            if not new or len(own) < parts.rank:
                continue
            result = _judged(factored, own)
            if best is None or int(result.certified.sum()) > int(best.certified.sum()):
                best, whole, sure = result, done, own.of(result.certified)
            if bool(result.certified.all()) or len(found) > 3 * parts.rank:
                break
        if best is None:
            best = self._guess(factored, found, sources, generator)
        return self._returned(observation, *_placed(layer, parts.rank, best, most))

    def _begin(self, factored: FactoredUpdate, generator: torch.Generator) -> tuple[Directions, Tensor | None]:  # noqa: ARG002
        """Return what is known before the search: certain directions, and likely ones of all examples, if any."""
        return none_yet(factored.parts), None

    def _guess(
        self,
        factored: FactoredUpdate,
        found: Directions,
        sources: Tensor | None,  # noqa: ARG002
        generator: torch.Generator,
    ) -> Recovered:
        """Return what is returned where not all directions are certain: those that are, and random ones."""
        parts = factored.parts
        why = (
            f"only {len(found)} of {parts.rank} examples' directions were found, and an example needs all of them"
            if parts.rank
            else "no example's part was found in the update"
        )
        note = f"{why}: nothing is certified, and what is returned is a guess"
        if parts.rank:
            fill = torch.randn(parts.rank, parts.rank, dtype=torch.float64, generator=generator)
            values = torch.cat([found.values, fill], dim=1)[:, : parts.rank]
            rows = torch.linalg.solve(values, parts.right)
            inputs = torch.as_tensor((rows / rows[:, -1:])[:, :-1].nan_to_num().clamp(-10, 10))
        else:
            inputs = parts.right.new_zeros(1, parts.right.shape[1] - 1)
        none = torch.zeros(len(inputs), dtype=torch.int64)
        return Recovered(inputs, none, none.bool(), (note,))


def _more(
    factored: FactoredUpdate, found: Directions, known: Directions, done: int, generator: torch.Generator
) -> Directions:
    """Return ``found`` and certain directions of the next way that leads to new ones, by independent ``known`` ones."""
    parts, layer = factored.parts, factored.layer
    parallel = factored.observation.task_info.num_classes == 2  # columns may be
    parallel = parallel and not factored.several and comparable(factored.module, factored.observation)

    def with_(new: Directions) -> Directions:
        return found.and_(possible(parts, layer, new) if parallel else new)

    more = found
    if len(known) == parts.rank - 1:
        more = with_(_last(factored, known))
    if len(more) == len(found):
        more = with_(alternate(parts, layer, known, _STARTS, generator))
    if len(more) == len(found) and len(known) and done % _CYCLE:
        more = with_(search_beside(parts, known, done % len(known), _STARTS_BESIDE, generator))
    elif len(more) == len(found):
        more = with_(search(parts, known, _STARTS, generator))
    if len(more) == len(found) and len(known) == parts.rank - 2 and not done % _CYCLE:
        more = with_(on_a_line(parts, layer, known))
    return more


def _last(factored: FactoredUpdate, found: Directions) -> Directions:
    """Return the last direction, where all others are known; none where it isn't certain.

    A row of P⁻¹ is orthogonal to all other columns of P. So the last example is known before its direction is, whose
    zeros are the neurons that it doesn't activate. Where these are too few, the direction is the one whose column is
    the example's own gradient, with the one label that fits.
    """
    layer, parts = factored.layer, factored.parts
    row = torch.linalg.svd(found.values.T)[2][-1] @ parts.right
    inputs, weight, bias = row[:-1] / row[-1], layer.module.weight.detach(), layer.module.bias.detach()
    slack = _SLACK * (weight.norm(dim=1) * inputs.norm() + bias.abs())
    zero = (weight @ inputs + bias < -slack)[parts.live]
    own = (parts.scores / parts.noise[:, None])[zero]
    if len(own) >= parts.rank:
        last = certify(parts, torch.linalg.eigh(own.T @ own)[1][:, :1])
        if bool(last.certain.all()):
            return last
    if (
        factored.several
        or not comparable(factored.module, factored.observation)
        or not bool(torch.isfinite(inputs).all())
    ):
        return none_yet(parts)
    columns = own_gradients(factored.module, factored.observation, layer, inputs[None])[:, 0, parts.live].T
    directions = torch.linalg.lstsq(parts.scores, columns).solution
    unlike = (parts.scores @ directions - columns).norm(dim=0)
    best = int(unlike.argmin())
    if float(unlike[best]) > _OWN:
        return none_yet(parts)
    direction = directions[:, best : best + 1]
    return Directions(direction / direction.norm(), (columns[:, best : best + 1] == 0), torch.ones(1, dtype=torch.bool))


def _judged(factored: FactoredUpdate, found: Directions) -> Recovered:
    """Return the examples that r independent directions give, each certified or not."""
    module, observation, layer, parts, several = factored
    result = factors(parts, found)
    inputs, weight = result.right[:, :-1], layer.module.weight.detach()
    assert layer.module.bias is not None
    before = inputs @ weight.T + layer.module.bias.detach()
    slack = _SLACK * (weight.norm(dim=1) * inputs.norm(dim=1, keepdim=True) + layer.module.bias.detach().abs())
    active = torch.zeros(before.shape, dtype=torch.bool)
    active[:, parts.live] = ~found.zeros.T
    wrong = ((before < -slack) & active).sum(dim=1)
    allowed = _FLIPPED * active.sum(dim=1) if several else torch.zeros(len(active))
    sure = (wrong <= allowed) & (before < -slack).any(dim=1) & torch.isfinite(inputs).all(dim=1)
    least = rounding_of(observation.single(), layer) / result.left.norm(dim=0)  # of what rounding took all away, too
    error = result.error.maximum(least) * in_range(observation.task_info, inputs)
    sure &= error <= _CERTIFIED
    columns = torch.zeros(before.shape, dtype=torch.float64)
    columns[:, parts.live] = result.left.T
    labels, distance = own_labels(module, observation, layer, inputs, columns)
    if not several and comparable(module, observation):
        sure &= distance <= _OWN
    count = f"{int(sure.sum())} of {len(inputs)} examples"
    note = f"certified without the truth: {count}; estimated error {float(error.median()):.1g}"
    return Recovered(inputs, labels, sure, (note,))


def _placed(layer: FirstLayer, rank: int, found: Recovered, most: int) -> Recovered:
    """Return what was found in the order of the data's numbers, and what the rank says of the update."""
    notes = found.notes
    if rank < most:
        notes += (
            f"the update's rank is {rank}, of {most} examples: some are equal, activate nothing or drown in noise",
        )
    examples = torch.zeros_like(found.inputs)
    examples[:, layer.places] = found.inputs
    return found._replace(inputs=examples, notes=notes)


@register
class SpearRows(Spear):
    """SPEAR (Dimitrov et al., NeurIPS 2024) on rows of a table; see :class:`Spear`.

    Only certified rows are returned, where there are any. A certified row's estimated error is below an eighth of 1/255
    of a standard deviation.

    Args:
        rounds: of search, at most; it ends with the last direction, or when 40 rounds have found none.
    """

    name = "spear-rows"
    summary = "batches of rows, exactly, where the model begins with a fully connected layer and ReLU"
    examples = ("table",)
    finds = RowFinding
    recovers = "rows of a table"
    needs = (
        "rows and a classifier",
        "a model that begins with a fully connected layer with a bias, then ReLU",
        "fewer examples in an update than the layer has outputs, and than a row has numbers",
    )

    @classmethod
    def fits(cls, case: Case) -> bool:
        return case.solves(cls.examples) and case.rectified and case.examples > 1
