"""Trap weights (Boenisch et al. 2023): a first layer whose neurons few examples activate; what its gradient holds."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from fedaudit.attacks.analytic.first_layer import ClosedForm, FirstLayer, first_layer, flows_of, layer_product
from fedaudit.attacks.base import Case, Progress, register
from fedaudit.attacks.findings import Finding
from fedaudit.attacks.victim import as_trained
from fedaudit.simulation.server_behaviour import ServerBehaviour, ServerStep
from fedaudit.task.info import TaskInfo
from fedaudit.task.training import LocalPlan
from fedaudit.transcript.observation import Observation
from fedaudit.utils.errors import BadInput, NotApplicable
from fedaudit.utils.validation import Fraction, Positive

_ACTIVE = 1e-5  # of the strongest neuron's gradient
_OUTSIDE = 0.02  # by which a pixel may lie outside of its range
_SAME = 1e-3  # root mean square of pixels up to which two images are one


@register
class TrapWeightsServer(ServerBehaviour):
    """Draws the first fully connected layer so that an example activates few of its neurons (Boenisch et al. 2023).

    Half of a row's weights, at random places, are negative, normally distributed by size; the others are positive and
    smaller by ``scale``. On pixels from 0 to 1 most neurons are silent then. Departure: the preprocessing is taken
    back in weights and bias, where the paper's pixels are from 0 to 1 as they are.

    Args:
        scale: of the positive weights: the smaller, the fewer examples activate a neuron.
        spread: standard deviation of the weights.
    """

    name = "trap-weights"
    summary = "a first fully connected layer whose neurons few examples activate"
    paper = "Boenisch et al. 2023 (When the curious abandon honesty)"

    scale: Fraction = 0.95
    spread: Positive = 0.5

    def check(self, model: nn.Module, task_info: TaskInfo, plan: LocalPlan) -> None:  # noqa: ARG002
        """Refuse what isn't of images, or doesn't begin with a fully connected layer and ReLU."""
        if task_info.example_kind.bounds is None or task_info.num_classes is None:
            raise BadInput("trap-weights is for images and classifiers; leave server out")
        try:
            layer = first_layer(copy.deepcopy(model).cpu().double(), task_info.input_shape)
        except NotApplicable as error:
            raise BadInput(f"trap-weights alters a first fully connected layer: {error}") from None
        if not layer.relu:
            raise BadInput(f"trap-weights needs a ReLU behind the first layer ('{layer.name}'), and there is none")

    def __call__(self, step: ServerStep) -> dict[str, Tensor]:
        """Return the weights with the first layer's drawn anew, the same in every round."""
        info = step.task_info
        layer = first_layer(copy.deepcopy(step.model).cpu().double(), info.input_shape)
        rows, columns = layer.module.weight.shape
        draws = torch.Generator().manual_seed(0)
        size = torch.randn((rows, columns), generator=draws, dtype=torch.float64).abs() * self.spread
        order = torch.rand((rows, columns), generator=draws).argsort(dim=1)
        weight = torch.where(order < columns // 2, -size, self.scale * size)
        zeros = torch.zeros((1, *info.input_shape), dtype=torch.float64)
        black = info.normalise(zeros).flatten()[layer.places]
        white = info.normalise(zeros + 1).flatten()[layer.places]
        weight = weight / (white - black)
        made = {f"{layer.name}.weight": weight, f"{layer.name}.bias": -weight @ black}
        return step.weights | {name: tensor.to(step.weights[name].dtype) for name, tensor in made.items()}


@register
class TrapWeights(ClosedForm):
    """Reads examples off the neurons of a first layer that one example alone activated (Boenisch et al. 2023).

    A neuron's gradient is Σ δ·x of the examples that activate it and its bias' is Σ δ: their ratio is an example, where
    it is one alone. Kept are ratios that are images, each once. The paper leaves open which of them are examples: here
    those come first whose own gradient, with the label that fits best, is the one that was found in the neuron's bias;
    of several local steps that can't be told, and the stronger come first. Any network that begins with a fully
    connected layer and ReLU has such neurons; trap weights make them many.
    """

    name = "trap-weights"
    summary = "images from neurons of the first layer that one example alone activated"
    paper = "Boenisch et al. 2023 (When the curious abandon honesty)"
    threat_model = "malicious server, active; or server or eavesdropper, passive"
    needs = (
        "images and a classifier",
        "a model that begins with a fully connected layer with a bias, and ReLU",
        "better: a server that draws that layer for it (federations[].server: trap-weights)",
    )

    @classmethod
    def fits(cls, case: Case) -> bool:
        return case.server == cls.name and case.classifies(cls.examples)

    def _prepare(self, observation: Observation) -> tuple[nn.Module, FirstLayer, Tensor]:
        message, info = observation.single(), observation.task_info
        module = as_trained(observation.module, info, message.weights)
        layer = first_layer(module, info.input_shape)
        if not layer.relu and not _rectified(module, layer, info.input_shape):
            raise NotApplicable("no ReLU follows the first layer, so every example is in every neuron's gradient")
        return module, layer, layer_product(message, layer, self.name)

    def _run(self, observation: Observation, _generator: torch.Generator, _device: str, progress: Progress) -> Finding:
        module, layer, product = self._prepare(observation)
        info, update = observation.task_info, observation.single().update
        size = product[:, -1].abs()
        active = torch.nonzero(size > _ACTIVE * size.max())[:, 0]
        ratios = product[active, :-1] / product[active, -1:]
        inputs = torch.zeros_like(ratios)
        inputs[:, layer.places] = ratios
        pixels = info.denormalise(inputs.view(-1, *info.input_shape)).flatten(1)
        images = ((pixels > -_OUTSIDE) & (pixels < 1 + _OUTSIDE)).all(dim=1)
        if not bool(images.any()):
            raise NotApplicable("no neuron of the first layer holds an image: several examples are in each of them")
        kept, inputs, pixels = active[images], inputs[images], pixels[images]
        found, rows = product[kept, -1], torch.arange(len(kept))
        distances = []
        for flow in flows_of(module, observation, layer, inputs):
            own = flow[rows, kept] * len(inputs) / update.num_examples
            distances.append(((own - found) / found).abs())
        unlike, labels = torch.stack(distances).nan_to_num(nan=torch.inf).min(dim=0)
        told = update.training is None or update.training.local_steps == 1
        order = (unlike if told else -size[kept]).argsort(stable=True)
        chosen: list[int] = []
        for place in order.tolist():
            if len(chosen) == update.num_examples:
                break
            apart = (pixels[chosen] - pixels[place]).square().mean(dim=1).sqrt()
            if not bool((apart < _SAME).any()):
                chosen.append(place)
        progress(1, 1)
        notes = (f"{len(active)} of {len(product)} neurons were active, and {len(kept)} hold an image",)
        return self._returned(observation, inputs[chosen], labels[chosen], None, notes)


def _rectified(module: nn.Module, layer: FirstLayer, shape: tuple[int, ...]) -> bool:
    """Return whether a ReLU follows the layer, by weights that activate it: what was sent may leave it silent."""
    probe = copy.deepcopy(module)
    own = probe.get_submodule(layer.name)
    assert isinstance(own, nn.Linear)
    with torch.no_grad():
        own.weight.copy_(torch.randn(own.weight.shape, generator=torch.Generator().manual_seed(0)))
        own.bias.zero_()
    return first_layer(probe, shape).relu
