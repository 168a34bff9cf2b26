"""LOKI (Zhao et al. 2024): kernels of each client's own before a layer of bins, so that sums stay apart by client."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fedaudit.attacks.active.imprint import PREFIX, Bins, alternating, edges, in_their_bins, labels_of, measured, read
from fedaudit.attacks.analytic.first_layer import ClosedForm
from fedaudit.attacks.base import Case, Progress, register
from fedaudit.attacks.findings import Finding
from fedaudit.attacks.standards import ALTERED_MODELS
from fedaudit.models.inserted_module import WithInsertedModule
from fedaudit.simulation.server_behaviour import ServerBehaviour, ServerStep
from fedaudit.task.info import InsertedModule, TaskInfo
from fedaudit.task.training import LocalPlan
from fedaudit.transcript.observation import Message, Observation
from fedaudit.utils.errors import BadInput, NotApplicable
from fedaudit.utils.validation import Count, Positive

_LIMIT = 0.01  # of what a unit passes on
_DRIFT = 1e-3  # of the strongest client's row of a bin, below which another client's is what training let through


@register
class LokiServer(ServerBehaviour):
    """Sends each client kernels of its own before a layer of bins (Zhao et al. 2024, LOKI).

    A convolution copies the image to channels of the client's own (its identity mapping set; all other sets are zero).
    So in the layer behind it, which measures mean brightness as in ``imprint``, each client's images have weights of
    their own, and the sum of all clients' updates is as readable as single ones. ``scale`` is the paper's convolutional
    scaling factor: what the kernels multiply by, the layer's weights divide by. A step then changes these so
    much that a unit, once hit, isn't hit again, whatever comes later in local training.

    Departures: the kernels take the preprocessing back, where the paper's pixels are from 0 to 1 as they are; units are
    bounded for gradients, too; the second layer adds little to the inputs, with signs in turn, so that the network
    behind goes on learning, as in ``imprint``.

    Args:
        units: bins, which all clients share; the paper takes about four times the examples of a client.
        scale: of the kernels.
        spread: standard deviation of the images' mean brightness, in those of the preprocessing; without public
            examples it is taken for normal around the preprocessing's mean.
        strength: what one unit adds to each input at most, in standard deviations of the preprocessing.
    """

    name = "loki"
    summary = "kernels of each client's own before a layer of bins: a sum stays apart by client"
    paper = "Zhao et al. 2024 (LOKI)"

    units: Count = 256
    scale: Positive = 1000.0
    spread: Positive = 0.5
    strength: Positive = 0.02

    def task_info(self, task_info: TaskInfo, plan: LocalPlan) -> TaskInfo:
        """Return the task info with the inserted module: a set of kernels for everybody who takes part in a round."""
        return dataclasses.replace(task_info, inserted=InsertedModule("loki", self.units, _LIMIT, plan.clients))

    def check(self, model: nn.Module, task_info: TaskInfo, plan: LocalPlan) -> None:  # noqa: ARG002
        """Refuse regression."""
        if task_info.num_classes is None:
            raise BadInput("loki is for classifiers, and this model predicts real values; leave server out")

    def __call__(self, step: ServerStep) -> dict[str, Tensor]:
        """Return the weights with the inserted module's set, except the kernels, which are all zero."""
        info = step.task_info
        numbers = math.prod(info.input_shape)
        black, white = _range(info)
        values = -(black / (white - black)).mean(), self.spread / (white - black).mean()
        mean, spread = map(float, values)
        if step.public is not None and len(step.public) > 1:
            pixels = info.denormalise(step.public).flatten(1).double().mean(dim=1)
            mean, spread = float(pixels.mean()), float(pixels.std()) or spread
        cut = edges(self.units, mean, spread, bounded=True)
        slope = _LIMIT / (cut[1:] - cut[:-1])
        flips = torch.sign(torch.rand(numbers, generator=step.generator, dtype=torch.float64) - 0.5)
        made = {
            f"{PREFIX}.measure.weight": (slope / (numbers * self.scale))[:, None],
            f"{PREFIX}.measure.bias": -cut[:-1] * slope,
            f"{PREFIX}.back.weight": self.strength / _LIMIT * flips[:, None] * alternating(self.units),
        }
        like = step.weights
        sent = {name: tensor.to(like[name].dtype).expand_as(like[name]) for name, tensor in made.items()}
        return like | sent | {name: torch.zeros_like(like[name]) for name in _KERNELS}

    def own(self, step: ServerStep) -> Mapping[int, Mapping[str, Tensor]]:
        """Return each client's kernels: its set copies the image, times ``scale``."""
        black, white = _range(step.task_info)
        channels, (weight, bias) = len(black), _KERNELS
        each = {}
        for place, client in enumerate(step.clients):
            own = {name: torch.zeros_like(step.weights[name]) for name in _KERNELS}
            rows = torch.arange(channels) + place * channels
            own[weight][rows, torch.arange(channels), 1, 1] = (self.scale / (white - black)).to(own[weight].dtype)
            own[bias][rows] = (-self.scale * black / (white - black)).to(own[bias].dtype)
            each[client] = own
        return each


_KERNELS = (f"{PREFIX}.spread.weight", f"{PREFIX}.spread.bias")


def _range(info: TaskInfo) -> tuple[Tensor, Tensor]:
    """Return (C,) what the model sees of black and of white (float64)."""
    black, white = info.pixel_range(torch.zeros((1, *info.input_shape), dtype=torch.float64))
    return black[0, :, 0, 0], white[0, :, 0, 0]


class OwnedExamples(NamedTuple):
    """Examples, the strongest first, (r, numbers) as the model sees them, and their clients' numbers (r,)."""

    inputs: Tensor
    labels: Tensor
    clients: Tensor


@register
class Loki(ClosedForm):
    """Reads each client's images off its own columns of a layer of bins, in single updates and sums (Zhao et al. 2024).

    A row's gradient at a client's columns is Σ δ·x of that client's examples in the bin, whoever else is in the
    sum; the columns also tell whose an image is. The bias' is the sum over all clients, so it gives the scale where one
    client alone hit the bin. Elsewhere the paper scales to a maximum of 1; here the bin, in which the mean
    brightness lies, tells it better. Several examples of one client in one bin are found as their mean.
    """

    name = "loki"
    summary = "each client's images out of a sum, from kernels of its own that the server sent it"
    paper = "Zhao et al. 2024 (LOKI)"
    threat_model = "malicious server, active"
    needs = (
        "images and a classifier",
        "a server that sends each client kernels of its own (federations[].server: loki)",
    )
    standards = (*ALTERED_MODELS, "AML.T0018")
    takes_client_weights = True

    @classmethod
    def fits(cls, case: Case) -> bool:
        return case.server == cls.name and case.classifies(cls.examples)

    def _prepare(self, observation: Observation) -> tuple[WithInsertedModule, Tensor]:
        message, inserted = observation.single(), observation.task_info.inserted
        if inserted is None or inserted.kind != "loki" or inserted.limit != _LIMIT or not _sets(message):
            raise NotApplicable(
                "the server sent the clients no kernels of their own; set threat.adversary: malicious-server and "
                "federations[].server: loki"
            )
        return measured(observation, self.name)

    def read_out(self, observation: Observation) -> OwnedExamples:
        """Return the examples of one message, as many as it has at most.

        Raises:
            NotApplicable: there is none, or it isn't for such a message.
        """
        module, product = self._prepare(observation)
        message, info = observation.single(), observation.task_info
        sets = _sets(message)
        weight, bias = module.front.measure.weight.detach(), module.front.measure.bias.detach()
        area = math.prod(info.input_shape[1:])
        columns = {c: (one.places[:, None] * area + torch.arange(area)).flatten() for c, one in sets.items()}
        sizes = torch.stack([product[:, own].norm(dim=1) for own in columns.values()])
        theirs = sizes > _DRIFT * sizes.amax(dim=0)  # (clients, units)
        low, high = (-bias).clamp(min=0), _LIMIT - bias
        parts: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []
        for row, (client, one) in enumerate(sets.items()):
            own = columns[client]
            found = read(torch.cat([product[:, own], product[:, -1:]], dim=1), message, PREFIX, bounded=True)
            found = Bins(*(part[theirs[row][found.places]] for part in found))
            if not len(found.places):
                continue
            lowest, highest = low[found.places], high[found.places]
            brightness = (weight[found.places][:, own] * found.inputs).sum(dim=1)
            plain = brightness / found.shares
            told = (theirs[:, found.places].sum(dim=0) == 1) & (plain > lowest) & (plain < highest)
            shares = torch.where(told, found.shares, 2 * brightness / (lowest + highest))
            copied = in_their_bins(found._replace(shares=shares), weight[:, own], low, high).unflatten(1, (-1, area))
            inputs = ((copied - one.offsets[:, None]) / one.keys[:, None]).flatten(1)
            module.front.spread.load_state_dict({"weight": one.weight, "bias": one.bias})
            labels = labels_of(module, observation, inputs, shares)
            parts.append((found.inputs.norm(dim=1), inputs, labels, torch.full_like(labels, client)))
        if not parts:
            raise NotApplicable("no bin of the server's module was hit: all examples lie outside of them")
        strength, inputs, labels, clients = (torch.cat(part) for part in zip(*parts, strict=True))
        order = strength.argsort(descending=True, stable=True)[: message.update.num_examples]
        return OwnedExamples(inputs[order], labels[order], clients[order])

    def _run(self, observation: Observation, _generator: torch.Generator, _device: str, progress: Progress) -> Finding:
        found = self.read_out(observation)
        progress(1, 1)
        whose = len(found.clients.unique())
        notes = (
            f"{len(found.inputs)} bins of {whose} client{'s' * (whose > 1)} were hit, and the kernels tell whose each "
            "is; some by several examples, whose mean is in them",
        )
        return self._returned(observation, found.inputs, found.labels, None, notes)


class _Set(NamedTuple):
    """A client's kernels: which channel each channel of an image is copied to, times what, plus what."""

    places: Tensor
    keys: Tensor
    offsets: Tensor
    weight: Tensor
    bias: Tensor


def _sets(message: Message) -> dict[int, _Set]:
    """Return client to the kernels that it was sent, where there are any."""
    sent = message.client_weights or {message.client: message.weights}
    sets = {}
    for client, weights in sent.items():
        weight, bias = (weights[name].double().cpu() for name in _KERNELS)
        places = weight[:, :, 1, 1].abs().argmax(dim=0)
        keys = weight[places, torch.arange(len(places)), 1, 1]
        if bool(keys.all()):
            sets[client] = _Set(places, keys, bias[places], weight, bias)
    return sets
