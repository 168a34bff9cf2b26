"""A model's first layer, where it is a fully connected one of the flattened inputs, and what an update says of it."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from fedaudit.attacks.base import Attack
from fedaudit.attacks.findings import ImageFinding, RowFinding
from fedaudit.attacks.local_training import Way, treatments
from fedaudit.simulation.local_training import local_randomness
from fedaudit.task.info import TaskInfo
from fedaudit.task.training import BCE, MSE, TrainingConfig
from fedaudit.transcript.observation import Message, Observation
from fedaudit.utils.errors import NotApplicable


class Recovered(NamedTuple):
    """Different examples of an update, as the model sees them; ``certified`` (r,): vouched for without the truth."""

    inputs: Tensor
    labels: Tensor
    certified: Tensor
    notes: tuple[str, ...]


class ClosedForm(Attack):
    """What attacks in closed form share: what they work with is made ready, or refused, before any compute."""

    threat_model = "server or eavesdropper, passive"
    examples: ClassVar[tuple[str, ...]] = ("image",)
    uses: ClassVar[tuple[Way, ...]] = ("spear",)
    needs_classes = True

    def check(self, observation: Observation) -> None:
        """Raise unless the equations can be set up."""
        observation.single()
        super().check(observation)
        self._prepare(observation)

    @abstractmethod
    def _prepare(self, observation: Observation) -> Any:
        """Return what the attack works with; NotApplicable says why it can't."""

    def _returned(
        self, observation: Observation, inputs: Tensor, labels: Tensor, certified: Tensor | None, notes: tuple[str, ...]
    ) -> ImageFinding | RowFinding:
        """Return what was recovered, see :class:`Recovered`; ``certified`` is None where nothing is vouched for.

        Images are as many as the update's examples: copies, not certified again, follow where there are fewer. Rows are
        the certified ones, or all as a guess where there is none; cells are as sure as their rows.
        """
        task_info, count = observation.task_info, observation.single().update.num_examples
        if self.finds is RowFinding:
            assert certified is not None
            kept = certified if bool(certified.any()) else torch.ones_like(certified)
            return RowFinding(
                rows=task_info.denormalise(inputs[kept].nan_to_num().float()),
                labels=labels[kept],
                label_source=self.name,
                certified=certified[kept],
                notes=notes,
            )
        rows = torch.arange(count) % len(inputs)
        if certified is not None:
            certified = nn.functional.pad(certified[:count], (0, max(0, count - len(inputs))))
        pixels = task_info.denormalise(inputs.view(-1, *task_info.input_shape).nan_to_num())
        if (bounds := task_info.example_kind.bounds) is not None:
            pixels = pixels.float().clamp(*bounds)
        return ImageFinding(
            images=pixels.float()[rows],
            labels=labels[rows],
            label_source=self.name,
            certified=certified,
            notes=notes,
        )


def in_range(task_info: TaskInfo, inputs: Tensor) -> Tensor:
    """Return (r,) what an error of 1 in (r, numbers) inputs is, at most, as a share of the range of their values.

    Kinds without a range go by standard deviations, smaller inputs by their own root mean square: nobody knows whether
    they are standardised.
    """
    if (bounds := task_info.example_kind.bounds) is None:
        return 1 / inputs.square().mean(dim=1).sqrt().clamp(min=1e-300, max=1.0)
    return torch.full((len(inputs),), max(task_info.std) / (bounds[1] - bounds[0]), dtype=inputs.dtype)


_PROBES = 8
_USED = 0.05  # least share of a ReLU's active neurons through which some gradient flows
_OF_A_BATCH = (nn.modules.batchnorm._BatchNorm, nn.modules.dropout._DropoutNd)
_ELSE = "run an attack that optimises (invg, agic)"


@dataclass(frozen=True)
class FirstLayer:
    """A fully connected layer that sees the model's inputs themselves, each number once.

    Attributes:
        places: (inputs,) which of an example's flattened numbers each of the layer's inputs is.
        relu: nothing flows back through a neuron that an example doesn't activate.
    """

    name: str
    module: nn.Linear
    places: Tensor
    relu: bool


def first_layer(model: nn.Module, shape: tuple[int, ...]) -> FirstLayer:
    """Return the first layer of a model in float64, which has a bias and takes the inputs as they are.

    What it does to probes shows it, so a user's own is recognised, too. The model is in the mode of its training.
    """
    numbers = torch.Size(shape).numel()
    calls: list[tuple[str, Tensor, Tensor]] = []

    def note(name: str) -> Any:
        return lambda _module, inputs, output: calls.append((name, inputs[0].detach(), output))

    linear = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    if not linear:
        raise NotApplicable(f"the model has no fully connected layer (torch.nn.Linear) that sees its inputs; {_ELSE}")
    handles = [module.register_forward_hook(note(name)) for name, module in linear.items()]
    try:
        with local_randomness(0), torch.enable_grad():
            counting = torch.arange(_PROBES * numbers, dtype=torch.float64).view(_PROBES, *shape)
            model(counting)
            seen, calls[:] = calls[:], []
            random = torch.randn(counting.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
            outputs = model(random)
            name, inputs, before = calls[0] if calls else ("", torch.zeros(0), torch.zeros(0))
            places = _places(seen[0][1], numbers) if seen else None
            direct = places is not None and inputs.ndim == 2 and torch.equal(inputs, random.flatten(1)[:, places])
            if not direct:
                raise NotApplicable(
                    f"the model doesn't begin with a fully connected layer of its inputs, as they are; {_ELSE}"
                )
            once = sum(called == name for called, *_ in calls) == 1
            layer = linear[name]
            if not once or sum(p is layer.weight for p in model.parameters()) != 1:
                raise NotApplicable(
                    f"'{name}' is used more than once, and its gradient is the sum of its uses; {_ELSE}"
                )
            if layer.bias is None:
                raise NotApplicable(f"'{name}', the first layer, has no bias, whose gradient tells the scale; {_ELSE}")
            weights = torch.randn(outputs.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
            (flow,) = torch.autograd.grad((outputs * weights).sum(), before)
    finally:
        for handle in handles:
            handle.remove()
    assert places is not None
    used = (flow[before > 0] != 0).double().mean()
    relu = bool((flow[before < 0] == 0).all()) and float(used) > _USED
    return FirstLayer(name, layer, places, relu)


def _places(inputs: Tensor, numbers: int) -> Tensor | None:
    """Return which number of an example each input is, where examples were counted through; None: something else."""
    if inputs.ndim != 2 or len(inputs) != _PROBES:
        return None
    places = inputs[0].long()
    expected = places + numbers * torch.arange(_PROBES)[:, None]
    whole = len(places) == numbers and torch.equal(places.sort().values, torch.arange(numbers))
    return places if whole and torch.equal(inputs, expected.double()) else None


def layer_product(message: Message, layer: FirstLayer, attack: str) -> Tensor:
    """Return (outputs, inputs + 1): a multiple of the sum of the layer's gradients, with its bias' as the last column.

    After local training by SGD, whatever its steps, rates, momentum and clipping of norms, W_T = α·W_0 − Σ c_t·g_t:
    what decay and FedProx's term make of α is known and taken off, and the c_t are the same for the weight and its
    bias. So an update of several steps is a product of the same form as one gradient (float64).
    """
    update, training = message.update, message.update.training
    prefix = f"{layer.name}." if layer.name else ""
    names = [f"{prefix}weight", f"{prefix}bias"]
    for name in names:
        if name not in update.tensors:
            raise NotApplicable(f"the update lacks the first layer's '{name}', which {attack} needs")
    if update.sanitised is not None and update.sanitised.signs:
        raise NotApplicable(f"{attack} needs the sizes of an update's numbers, and only their signs were sent; {_ELSE}")
    parts = [update.tensors[name].double().cpu() for name in names]
    if update.kind == "weights" and training is not None:
        weight, bias = treatments(training, names)
        if (weight.momentum, weight.weight_decay) != (bias.momentum, bias.weight_decay):
            raise NotApplicable(
                f"the clients' optimiser has other momentum or decay for the first layer's bias than for its weight, "
                f"and {attack} needs one sum of gradients; {_ELSE}"
            )
        if not (weight.learning_rate and bias.learning_rate):
            raise NotApplicable(f"the first layer isn't trained, so its update says nothing to {attack}; {_ELSE}")
        if training.proximal_mu and training.local_steps > 1 and training.clip_norm is not None:
            raise NotApplicable(
                f"what clipping leaves of FedProx's term isn't known, which {attack} takes off; {_ELSE}"
            )
        for i, (name, group) in enumerate(zip(names, (weight, bias), strict=True)):
            kept = _kept(training, group.learning_rate, group.momentum, group.weight_decay)
            own = parts[i] - (kept - 1) * message.weights[name].double().cpu()
            parts[i] = -own / (training.learning_rate * group.learning_rate)
    product = torch.cat([parts[0], parts[1][:, None]], dim=1)
    if not bool(product.any()):
        raise NotApplicable("the first layer's update is zero throughout: it carries nothing to invert")
    if not bool(torch.isfinite(product).all()):
        raise NotApplicable("the first layer's update has numbers that aren't finite")
    return product


def rounding_of(message: Message, layer: FirstLayer) -> float:
    """Return the deviation of what rounding leaves in :func:`layer_product` where weights travelled, else 0."""
    update, training, name = message.update, message.update.training, f"{layer.name}.weight".lstrip(".")
    if update.kind != "weights":
        return 0.0
    rate = training.learning_rate * treatments(training, [name])[0].learning_rate if training else 1.0
    size = float(message.weights[name].double().square().mean().sqrt())
    return torch.finfo(update.tensors[name].dtype).eps / 4 * size / rate


def _kept(training: TrainingConfig, multiple: float, momentum: float, decay: float) -> float:
    """Return α: what local training without any gradient would leave of a weight of 1."""
    weight, velocity = 1.0, 0.0
    for step, rate in enumerate(training.rates):
        slope = decay * weight + training.proximal_mu * (weight - 1.0)
        velocity = slope if step == 0 else momentum * velocity + (1 - training.dampening) * slope
        moved = slope + momentum * velocity if training.nesterov else velocity
        weight -= rate * multiple * (moved if momentum else slope)
    return weight


def comparable(module: nn.Module, observation: Observation) -> bool:
    """Return whether an example's own gradient is what it was in the client's batch."""
    training = observation.single().update.training
    known = training is None or not (training.unmodelled or training.clip_value or training.rounds)
    return known and not any(part.training and isinstance(part, _OF_A_BATCH) for part in module.modules())


def own_labels(
    module: nn.Module, observation: Observation, layer: FirstLayer, inputs: Tensor, columns: Tensor
) -> tuple[Tensor, Tensor]:
    """Return each example's label whose gradient is most like its column, and how unlike: |difference| (r,).

    With the label, ∂ℓ/∂z at the example is known up to a number, its share in the mean. ``inputs`` are (r, inputs) of
    the layer, float64, ``columns`` (r, outputs) multiples of ∂ℓ/∂z.
    """
    columns = nn.functional.normalize(columns, dim=1)
    flows = own_gradients(module, observation, layer, inputs)
    least = (flows - columns).norm(dim=2).nan_to_num(nan=2.0).min(dim=0)
    return least.indices, least.values


def own_targets(
    module: nn.Module, observation: Observation, layer: FirstLayer, inputs: Tensor, columns: Tensor
) -> tuple[Tensor, Tensor]:
    """Return, as :func:`own_labels`, the targets (r, k) of a regression or of labels, and how unlike the columns are.

    ∂L/∂z is Σ ∂L/∂f_j·∂f_j/∂z; least squares on the column gives the k first factors. Those of the squared error are
    2(f − y)/k, of binary cross-entropy (σ(f) − y)/k. For another loss the prediction f stands for the target.
    """
    examples = torch.zeros_like(inputs)
    examples[:, layer.places] = inputs
    kept: list[Tensor] = []
    handle = layer.module.register_forward_hook(lambda _module, _inputs, output: kept.append(output))
    try:
        with local_randomness(0), torch.enable_grad():
            outputs = module(examples.view(-1, *observation.task_info.input_shape))
            flows = [torch.autograd.grad(one.sum(), kept[0], retain_graph=True)[0] for one in outputs.unbind(dim=1)]
    finally:
        handle.remove()
    outputs, loss, several = outputs.detach(), observation.task_info.loss, len(flows)
    if several == 1:
        (flow,) = flows
        factor = (flow * columns).sum(dim=1, keepdim=True) / flow.square().sum(dim=1, keepdim=True).clamp(min=1e-300)
        explained = factor * flow
    else:
        each = torch.stack(flows, dim=2)  # (r, units, k)
        factor = torch.linalg.lstsq(each.double(), columns.double().unsqueeze(2)).solution.to(columns.dtype).squeeze(2)
        explained = (each @ factor.unsqueeze(2)).squeeze(2)
    unlike = (explained - columns).norm(dim=1) / columns.norm(dim=1).clamp(min=1e-300)
    if loss == BCE:
        return (outputs.sigmoid() - several * factor).clamp(0, 1).round().float(), unlike
    answers = outputs - (several * factor / 2 if loss == MSE else 0 * factor)
    task = observation.task_info.task_kind
    return answers.float() if task.dtype.is_floating_point else task.hard(answers), unlike


def own_gradients(module: nn.Module, observation: Observation, layer: FirstLayer, inputs: Tensor) -> Tensor:
    """Return (classes, r, outputs) ∂ℓ/∂z at each example with each label, of length one; see :func:`own_labels`."""
    examples = torch.zeros_like(inputs)
    examples[:, layer.places] = inputs
    flows = flows_of(module, observation, layer, examples)
    return torch.stack([nn.functional.normalize(flow, dim=1) for flow in flows])


def flows_of(module: nn.Module, observation: Observation, layer: FirstLayer, examples: Tensor) -> list[Tensor]:
    """Return (r, outputs) ∂L/∂z for each label, were all (r, numbers) ``examples`` of it, L being their mean loss."""
    task_info = observation.task_info
    examples = examples.view(-1, *task_info.input_shape)
    assert task_info.num_classes is not None
    kept: list[Tensor] = []
    handle = layer.module.register_forward_hook(lambda _module, _inputs, output: kept.append(output))
    flows: list[Tensor] = []
    try:
        with local_randomness(0), torch.enable_grad():
            for label in range(task_info.num_classes):
                kept.clear()
                value = observation.loss(module(examples), torch.full((len(examples),), label))
                flows += torch.autograd.grad(value, kept[0])
    finally:
        handle.remove()
    return flows
