"""Robbing the Fed (Fowl et al. 2022): a layer of bins in front of the network, and what the update says of each."""

from __future__ import annotations

import dataclasses
import math
from statistics import NormalDist
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fedaudit.attacks.analytic.first_layer import ClosedForm, FirstLayer, layer_product
from fedaudit.attacks.base import Case, Progress, register
from fedaudit.attacks.findings import Finding
from fedaudit.attacks.standards import ALTERED_MODELS
from fedaudit.attacks.victim import as_trained
from fedaudit.models.inserted_module import WithInsertedModule
from fedaudit.simulation.local_training import local_randomness
from fedaudit.simulation.server_behaviour import ServerBehaviour, ServerStep
from fedaudit.task.info import InsertedModule, TaskInfo
from fedaudit.task.training import LocalPlan
from fedaudit.transcript.observation import Message, Observation
from fedaudit.utils.errors import BadInput, NotApplicable
from fedaudit.utils.validation import Count, Positive

PREFIX = "front"  # of the names of an inserted module's weights
_ROUNDING = 2.0**-24  # of single precision
_DOUBT = 16.0  # roundings: less than so many are no example
_TAIL = 8.0  # standard deviations: beyond all examples
_STEP = 1e-4  # of inputs, by which a derivative along a direction is taken
_AT_ONCE = 32  # examples


class Bins(NamedTuple):
    """What was found in bins, the strongest first.

    Attributes:
        places: (r,) which bins.
        inputs: (r, inputs) Σ δ·x of the examples in each.
        shares: (r,) Σ δ, where δ is the loss' derivative by what the bin's unit passes on.
    """

    places: Tensor
    inputs: Tensor
    shares: Tensor


def measured(observation: Observation, attack: str) -> tuple[WithInsertedModule, Tensor]:
    """Return the network with its inserted module, as it was sent, and what the message says of the measuring layer."""
    message = observation.single()
    module = as_trained(observation.module, observation.task_info, message.weights)
    assert isinstance(module, WithInsertedModule)
    layer = module.front.measure
    first = FirstLayer(f"{PREFIX}.measure", layer, torch.arange(layer.in_features), relu=True)
    return module, layer_product(message, first, attack)


def edges(units: int, mean: float, spread: float, *, bounded: bool) -> Tensor:
    """Return (units + 1,) ascending edges (float64) of bins that a normal measurement hits equally often.

    If ``bounded``, the outermost bins end, too, half a bin's share of the examples beyond them on each side, since
    units pass nothing on above their bin. Otherwise the first begins below all examples.
    """
    normal = NormalDist(mean, spread)
    if bounded:
        return torch.tensor([normal.inv_cdf((i + 0.5) / (units + 1)) for i in range(units + 1)], dtype=torch.float64)
    inner = [normal.inv_cdf(i / units) for i in range(1, units)]
    return torch.tensor([mean - _TAIL * spread, *inner, mean + _TAIL * spread], dtype=torch.float64)


def alternating(units: int) -> Tensor:
    """Return (units,) of 1 and −1 in turn (float64): what neighbouring units pass on hardly adds up."""
    return 1.0 - 2.0 * (torch.arange(units) % 2).double()


def read(product: Tensor, message: Message, prefix: str, *, bounded: bool) -> Bins:
    """Return what each bin that was hit holds, by a multiple of the gradient (units, inputs + 1), the bias' last.

    Without an upper bound (Fowl et al. 2022) a unit's row holds every example above its bin's lower edge, so the
    difference of two successive rows is what the first one's bin alone holds. Bounded units hold that by themselves.
    What is within rounding of nothing is left out.
    """
    back = message.weights[f"{prefix}.back.weight"].double().cpu()
    rows = product * torch.sign(back.T @ back[:, 0])[:, None]
    size = rows[:, :-1].norm(dim=1)
    noise = torch.zeros_like(size) if bounded else size
    training = message.update.training
    if message.update.kind == "weights":  # differences of weights, as exact as these
        rate = training.learning_rate if training else 1.0
        noise = noise + message.weights[f"{prefix}.measure.weight"].double().cpu().norm(dim=1) / rate
    if not bounded:
        rows = torch.cat([rows[:-1] - rows[1:], rows[-1:]])
        noise = torch.cat([noise[:-1] + noise[1:], noise[-1:]])
    strength = rows[:, :-1].norm(dim=1)
    hit = torch.nonzero((strength > _DOUBT * _ROUNDING * noise) & torch.isfinite(rows).all(dim=1))[:, 0]
    places = hit[strength[hit].argsort(descending=True)]
    return Bins(places, rows[places, :-1], rows[places, -1])


def in_their_bins(found: Bins, weight: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """Return (r, inputs) the examples: Σ δ·x over Σ δ, of the size at which the measurement lies in the bin.

    In differences of weights the bias' is the least exact, as biases are large: it tells no more than the bin does.
    ``low`` and ``high`` (units,) are the bounds of weight · x in each bin.
    """
    measured = (weight[found.places].double() * found.inputs).sum(dim=1)
    least, most = low[found.places], high[found.places]
    plain = measured / found.shares
    kept = plain.nan_to_num(nan=0.0, posinf=torch.inf, neginf=-torch.inf).clamp(least, most)
    scale = torch.where((measured != 0) & (kept != 0), kept / measured, 1 / found.shares)
    return found.inputs * scale[:, None]


def labels_of(module: WithInsertedModule, observation: Observation, inputs: Tensor, shares: Tensor) -> Tensor:
    """Return (r,) the labels with which examples (r, numbers) themselves give the δ (r,) by which their bins hold them.

    After several local steps it is compared with what the step that used the example would have given at the weights
    that were sent.
    """
    info, update = observation.task_info, observation.single().update
    stepped = update.training is not None and update.kind == "weights"
    batch = update.training.batch_sizes[0] if update.training and stepped else update.num_examples
    assert info.num_classes is not None
    column = module.front.back.weight.detach()[:, 0]
    with local_randomness(0), torch.no_grad():
        near = module.front(inputs.view(-1, *info.input_shape))
        step = (_STEP / column.norm() * column).view(info.input_shape)
        ahead, behind = (
            torch.cat([module.body(part + side * step) for part in near.split(_AT_ONCE)]) for side in (1, -1)
        )
    moved = (ahead - behind) * column.norm() / (2 * _STEP)  # of the outputs, along the column
    outputs = ((ahead + behind) / 2).requires_grad_()
    distances = []
    for label in range(info.num_classes):
        value = observation.loss(outputs, torch.full((len(outputs),), label))
        (flow,) = torch.autograd.grad(value, outputs)
        own = len(outputs) * (flow * moved).sum(dim=1)
        distances.append((own / batch - shares).abs())
    return torch.stack(distances).nan_to_num(nan=torch.inf).argmin(dim=0)


_LIMIT = 0.01  # of what a bounded unit passes on
_PROBES = 16


@register
class ImprintServer(ServerBehaviour):
    """Puts an imprint module before the network: a fully connected layer whose units are bins (Fowl et al. 2022).

    Every row of the layer measures the same, an example's mean brightness; the biases are the quantiles of what the
    measurement is expected to be. A second layer brings the units back to the inputs. Here it adds
    little to them, with signs in turn, so that the network behind goes on learning; in the paper it replaces them.

    Args:
        units: bins: the more there are, the more examples are alone in theirs.
        sparse: units are bounded above (the paper's variant for FedAvg), so that each holds what is in its
            own bin; otherwise every unit holds all that lies above its bin's edge.
        spread: standard deviation of the measurement, in those of the preprocessing; without public examples it is
            taken for normal around 0.
        strength: what one unit adds to each input at most, in standard deviations of the preprocessing. Of local
            training less than that, if a step would move a unit's edges by more than ``drift``.
        drift: share of a bin's width, by the size of gradients on noise. Less of it shows less of an update against
            the rounding of the weights.
    """

    name = "imprint"
    summary = "a layer of bins in front of the network: each example's gradient in a row of its own"
    paper = "Fowl et al. 2022 (Robbing the Fed)"

    units: Count = 512
    sparse: bool = True
    spread: Positive = 0.5
    strength: Positive = 0.1
    drift: Positive = 0.3

    def task_info(self, task_info: TaskInfo, plan: LocalPlan) -> TaskInfo:  # noqa: ARG002
        """Return the task info with the inserted module."""
        return dataclasses.replace(
            task_info, inserted=InsertedModule("imprint", self.units, _LIMIT if self.sparse else None)
        )

    def check(self, model: nn.Module, task_info: TaskInfo, plan: LocalPlan) -> None:  # noqa: ARG002
        """Refuse regression, and cumulative bins where clients take several steps: the rows don't stay alike."""
        if task_info.num_classes is None:
            raise BadInput("imprint is for classifiers, and this model predicts real values; leave server out")
        if not self.sparse and not plan.one_step:
            raise BadInput(
                "imprint without sparse: true is for one gradient or one local step; set server.sparse: true"
            )

    def __call__(self, step: ServerStep) -> dict[str, Tensor]:
        """Return the weights, the inserted module's set: rows of means, biases of quantiles, columns of equal size."""
        numbers = math.prod(step.task_info.input_shape)
        mean, spread = 0.0, self.spread
        if step.public is not None and len(step.public) > 1:
            values = step.public.flatten(1).double().mean(dim=1)
            mean, spread = float(values.mean()), float(values.std()) or self.spread
        cut = edges(self.units, mean, spread, bounded=self.sparse)
        slope = torch.ones(self.units, dtype=torch.float64)
        if self.sparse:
            slope = _LIMIT / (cut[1:] - cut[:-1])
        flips = torch.sign(torch.rand(numbers, generator=step.generator, dtype=torch.float64) - 0.5)
        most = _LIMIT if self.sparse else float(cut[-1] - cut[0]) / 2
        made = {
            f"{PREFIX}.measure.weight": (slope / numbers)[:, None].expand(-1, numbers),
            f"{PREFIX}.measure.bias": -cut[:-1] * slope,
            f"{PREFIX}.back.weight": self._strength(step, flips) / most * flips[:, None] * alternating(self.units),
        }
        return step.weights | {name: tensor.to(step.weights[name].dtype) for name, tensor in made.items()}

    def _strength(self, step: ServerStep, flips: Tensor) -> float:
        """Return the strength at which a local step, by a gradient as on noise, moves no edge by more than ``drift``.

        A step at rate η on a batch of b changes the row of the bin that x hit by η·δ·x/b, and so what it passes on by
        η·δ·(|x|² + 1)/b, where δ = (strength/limit)·flipsᵀ·∂ℓ/∂x.
        """
        plan, info = step.plan, step.task_info
        if plan.sends_gradient or not self.sparse:
            return self.strength
        assert isinstance(step.model, WithInsertedModule)
        assert info.num_classes is not None
        step.model.load_state_dict(step.weights)
        noise = torch.randn((_PROBES, *info.input_shape), generator=step.generator).requires_grad_()
        labels = torch.randint(info.num_classes, (_PROBES,), generator=step.generator)
        with local_randomness(step.round), torch.enable_grad():
            value = _PROBES * step.loss(step.model.body(noise), labels)
            (flow,) = torch.autograd.grad(value, noise)
        size = float((flow.flatten(1).double() @ flips).square().mean().sqrt())
        most = self.drift * _LIMIT**2 * plan.batch_size / (plan.learning_rate * (flips.numel() + 1) * max(size, 1e-30))
        return min(self.strength, most)


@register
class Imprint(ClosedForm):
    """Reads the rows of an imprint module: one example's in every bin that only one example hit (Fowl et al. 2022).

    A row's gradient is Σ δ·x of the examples in its bin and the bias' is Σ δ, so their ratio is the example that is
    alone there, and a mean of those that aren't. It can't tell which is which. Of weights after local training the
    scale is taken from the bin where that is more exact than the ratio.
    """

    name = "imprint"
    summary = "images from the bins of an imprint module that the server put before the network"
    paper = "Fowl et al. 2022 (Robbing the Fed)"
    threat_model = "malicious server, active"
    needs = (
        "images and a classifier",
        "a server that puts an imprint module before the network (federations[].server: imprint)",
    )
    standards = (*ALTERED_MODELS, "AML.T0018")

    @classmethod
    def fits(cls, case: Case) -> bool:
        return case.server == cls.name and case.classifies(cls.examples)

    def _prepare(self, observation: Observation) -> tuple[WithInsertedModule, Tensor]:
        inserted = observation.task_info.inserted
        if inserted is None or inserted.kind != "imprint":
            raise NotApplicable(
                "the server sent the network as it is, without an imprint module; set threat.adversary: "
                "malicious-server and federations[].server: imprint"
            )
        return measured(observation, self.name)

    def _run(self, observation: Observation, _generator: torch.Generator, _device: str, progress: Progress) -> Finding:
        module, product = self._prepare(observation)
        message, limit = observation.single(), module.front.limit
        found = read(product, message, PREFIX, bounded=limit is not None)
        count = message.update.num_examples
        found = type(found)(*(part[:count] for part in found))
        if not len(found.places):
            raise NotApplicable("no bin of the imprint module was hit: all examples lie outside of them")
        weight, bias = module.front.measure.weight.detach(), module.front.measure.bias.detach()
        above = torch.cat([-bias[1:], torch.full_like(bias[:1], torch.inf)])
        low, high = -bias, above if limit is None else limit - bias
        inputs = in_their_bins(found, weight, low, high)
        training = message.update.training
        uses = count / training.data_size if training and training.data_size and not message.update.members else 1.0
        shares = (found.inputs * inputs).sum(dim=1) / inputs.square().sum(dim=1).clamp(min=1e-300)
        labels = labels_of(module, observation, inputs, shares / uses)
        progress(1, 1)
        notes = (
            f"{len(found.places)} of {len(product)} bins were hit; some by several examples, whose mean is in them",
        )
        return self._returned(observation, inputs, labels, None, notes)
