"""Bins of a measurement: where an inserted module's units begin to pass something on; what an update says of each."""

from __future__ import annotations

from statistics import NormalDist
from typing import NamedTuple

import torch
from torch import Tensor

from fedaudit.attacks.analytic.first_layer import FirstLayer, layer_product
from fedaudit.attacks.analytic.r_gap import as_trained
from fedaudit.models.inserted_module import WithInsertedModule
from fedaudit.simulation.local_training import local_randomness
from fedaudit.transcript.observation import Message, Observation

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
    """Return the network with its inserted module, as it was sent, and what the message says of the measuring layer.

    Args:
        observation: of one message of a network with an inserted module.
        attack: by whose name a message that can't be read is refused.

    Raises:
        NotApplicable: the message doesn't tell the layer's gradient.
    """
    message = observation.single()
    module = as_trained(observation.module, observation.task_info, message.weights)
    assert isinstance(module, WithInsertedModule)
    layer = module.front.measure
    first = FirstLayer(f"{PREFIX}.measure", layer, torch.arange(layer.in_features), relu=True)
    return module, layer_product(message, first, attack)


def edges(units: int, mean: float, spread: float, *, bounded: bool) -> Tensor:
    """Return (units + 1,) ascending edges (float64) of bins that a normal measurement hits equally often.

    Args:
        units: how many bins.
        mean, spread: of the measurement.
        bounded: the outermost bins end, too, since units pass nothing on above their bin: half a bin's share of the
            examples lies beyond them on each side. Otherwise the first begins below all examples.
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
    """Return what each bin that was hit holds.

    Of units without an upper bound (Fowl et al. 2022) every example above a bin's lower edge is in its row, so
    the difference of two rows that follow each other is what is in the first one's bin alone. Bounded units hold that
    by themselves. What is within rounding of nothing is left out.

    Args:
        product: (units, inputs + 1) a multiple of the layer's gradient, the bias' last.
        message: whose update it is.
        prefix: of the inserted module's names in it.
        bounded: whether units pass nothing more on above their bin.
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
    """Return (r, inputs) the examples: Σ δ·x over Σ δ, at the size at which the measurement lies in the bin.

    Of differences of weights the bias' is the least exact, as the biases are large: it tells no more than the bin does.

    Args:
        found: of the bins.
        weight: (units, inputs) of the layer.
        low, high: (units,) between which weight · x lies in each bin.
    """
    measured = (weight[found.places].double() * found.inputs).sum(dim=1)
    least, most = low[found.places], high[found.places]
    plain = measured / found.shares
    kept = plain.nan_to_num(nan=0.0, posinf=torch.inf, neginf=-torch.inf).clamp(least, most)
    scale = torch.where((measured != 0) & (kept != 0), kept / measured, 1 / found.shares)
    return found.inputs * scale[:, None]


def labels_of(module: WithInsertedModule, observation: Observation, inputs: Tensor, shares: Tensor) -> Tensor:
    """Return (r,) the label of each example, with which its own δ is the one by which its bin holds it.

    Of several local steps it is compared with what the step that used the example would have given at the weights that
    were sent.

    Args:
        module: that the client was sent, in float64.
        observation: for the loss, the classes and the size of a batch.
        inputs: (r, numbers) the examples, as the model sees them.
        shares: (r,) δ over the batch.
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
