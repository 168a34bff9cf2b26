"""Fishing for user data (Wen et al. 2022): a last layer that leaves one example's gradient of a batch."""

from __future__ import annotations

import copy
import dataclasses
from statistics import NormalDist
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from fedaudit.attacks.base import Case, Progress, register
from fedaudit.attacks.findings import ImageFinding
from fedaudit.attacks.inversion.template import QUICK, Composed
from fedaudit.attacks.standards import ALTERED_MODELS
from fedaudit.attacks.victim import one_batch_gradient
from fedaudit.simulation.local_training import local_randomness
from fedaudit.simulation.server_behaviour import ServerBehaviour, ServerStep
from fedaudit.task.info import TaskInfo
from fedaudit.task.training import LocalPlan, TrainingConfig
from fedaudit.transcript.observation import Message, Observation
from fedaudit.transcript.update import Update
from fedaudit.utils.errors import BadInput, NotApplicable
from fedaudit.utils.validation import Count, Positive, Whole

_AT_ONCE = 64  # examples
_LEAST = 8  # public examples of the class
_WEIGHT, _BIAS = 0.5, 1000.0


@register
class FishingServer(ServerBehaviour):
    """Alters the last layer so that one class alone, or one example of it, gives a gradient (Wen et al. 2022).

    Class fishing: the class's row of the last layer stays, all others are zero and their biases ``bias``. No output but
    the class's depends on the network then, and its probability is nothing, so an example's gradient is zero unless it
    is of the class. With ``weight`` the class's row is that throughout, as in the authors' code (breaching, 0.5): all
    places of the last feature map then have the same gradient, which tells less of the image.

    Feature fishing, where several ``members`` of the class are expected in a batch: the class's probability is
    σ(m·(f − c)) of one feature f, so of its examples those below c count, and of those above the lowest one by far. f
    is the feature whose values on public examples of the class are the most like a normal variable, m is ``sharpness``
    over their standard deviation. Departures: c is the quantile 1/(4·members), not 1/members (of a normal variable, or
    of the public values where they are as many as that), for what lies above it isn't lost: the other rows are lowered
    instead of the class's raised, which is the same softmax, and so the gradient keeps in single precision what is
    nearly zero. Features are read off public examples, not off other clients' updates. Other classes' examples above c
    count, too: it is for clients that hold the class alone.

    Args:
        target: the class.
        weight: of every feature, in the class's row; None leaves it.
        bias: of the other classes.
        members: how many of the class a batch is expected to hold; above 1 one of them is fished by a feature.
        sharpness: m, over the feature's standard deviation.
    """

    name = "fishing"
    summary = "a last layer that leaves the gradient of one class, or of one example of it"
    paper = "Wen et al. 2022 (Fishing for user data)"

    target: Whole = 0
    weight: Positive | None = None
    bias: Positive = _BIAS
    members: Count = 1
    sharpness: Positive = 60.0

    def check(self, model: nn.Module, task_info: TaskInfo, plan: LocalPlan) -> None:  # noqa: ARG002
        """Refuse what has no classes, or fewer than the target says, or doesn't end in a fully connected layer."""
        classes = task_info.num_classes
        if classes is None or classes < 3 or task_info.outputs < classes or task_info.causal:
            raise BadInput("fishing is for classifiers of three or more classes; leave server out")
        if self.target >= classes:
            raise BadInput(f"server.target is {self.target}; the classes are 0 to {classes - 1}")
        if last_layer(model, task_info) is None:
            raise BadInput("fishing alters the last layer, and this model doesn't end in a torch.nn.Linear with a bias")

    def __call__(self, step: ServerStep) -> dict[str, Tensor]:
        """Return the weights with the last layer's altered, by public examples of the class that aren't all alike."""
        name = last_layer(step.model, step.task_info)
        assert name is not None  # check() saw to it
        weight, bias = torch.zeros_like(step.weights[f"{name}.weight"]), step.weights[f"{name}.bias"].clone()
        others = torch.arange(len(bias)) != self.target
        if self.members == 1:
            own = step.weights[f"{name}.weight"][self.target]
            weight[self.target] = own if self.weight is None else self.weight
            bias[others] = self.bias
        else:
            feature, cut, spread = self._feature(step, name)
            sharp = self.sharpness / spread
            weight[others, feature] = -sharp
            bias[self.target] = 0.0
            bias[others] = sharp * cut - float(others.sum().double().log())
        return step.weights | {f"{name}.weight": weight, f"{name}.bias": bias}

    def _feature(self, step: ServerStep, name: str) -> tuple[int, float, float]:
        """Return a feature, the cut and the standard deviation of it on public examples of the class."""
        held = () if step.public_targets is None else torch.nonzero(step.public_targets == self.target)[:, 0]
        if len(held) < _LEAST or step.public is None:
            raise BadInput(
                f"fishing with members: {self.members} needs {_LEAST} public examples of class {self.target}, and has "
                f"{len(held)}; set threat.knows_public_data: true and raise threat.public_examples, or set members: 1"
            )
        step.model.load_state_dict(step.weights)
        values = _features(step.model, name, step.public[held])
        spread = values.std(dim=0)
        if not float(spread.max()) > 0:
            raise BadInput(
                f"fishing with members: {self.members} needs a feature that differs between examples of class "
                f"{self.target}, and of these weights none does (a dead network?); set members: 1"
            )
        scores = ((values - values.mean(dim=0)) / spread.clamp(min=1e-30)).sort(dim=0).values
        ranks = (torch.arange(len(held), dtype=torch.float64)[:, None] + 0.5) / len(held)
        unlike = (torch.special.ndtr(scores) - ranks).abs().amax(dim=0)  # Kolmogorov and Smirnov's
        unlike[spread <= 1e-6 * spread.max()] = torch.inf
        best = int(unlike.argmin())
        own, below = values[:, best], 1 / (4 * self.members)
        normal = NormalDist(float(own.mean()), float(spread[best]))
        cut = float(own.quantile(below)) if len(held) >= 4 * self.members else normal.inv_cdf(below)
        return best, cut, normal.stdev


def last_layer(module: nn.Module, task_info: TaskInfo) -> str | None:
    """Return the name of the fully connected layer, with a bias, whose output is the model's; None: there is none."""
    own = copy.deepcopy(module).cpu().eval()
    outputs: dict[str, Tensor] = {}
    for name, part in own.named_modules():
        if isinstance(part, nn.Linear) and part.bias is not None:
            part.register_forward_hook(lambda _m, _i, output, name=name: outputs.update({name: output}))
    with local_randomness(0), torch.no_grad():
        answer = own(task_info.blank(2)[0])
    return next((name for name, output in outputs.items() if output is answer and name), None)


def _features(module: nn.Module, name: str, inputs: Tensor) -> Tensor:
    """Return (n, features) float64, what the layer ``name`` takes."""
    own = copy.deepcopy(module).cpu()
    kept: list[Tensor] = []
    own.get_submodule(name).register_forward_pre_hook(lambda _m, given: kept.append(given[0].detach().double()))
    with local_randomness(0), torch.no_grad():
        for part in inputs.split(_AT_ONCE):
            own(part)
    return torch.cat(kept)


class Altered(NamedTuple):
    """A last layer altered to fish for a class: its output rises above the others' by ``slope`` (features,)."""

    name: str
    target: int
    slope: Tensor

    @property
    def by_feature(self) -> bool:
        """Whether one feature alone counts."""
        return int((self.slope != 0).sum()) == 1


def altered(message: Message, name: str) -> Altered | None:
    """Return how the layer ``name`` was altered: all its rows but the target's are one; None where they aren't."""
    rows = torch.cat([message.weights[f"{name}.weight"], message.weights[f"{name}.bias"][:, None]], dim=1).cpu()
    alike = (rows[:, None] == rows[None]).all(dim=2).sum(dim=1)
    if len(rows) < 3 or int((alike == 1).sum()) != 1 or int((alike == len(rows) - 1).sum()) != len(rows) - 1:
        return None
    target = int(alike.argmin())
    slope = rows[target, :-1] - rows[(target + 1) % len(rows), :-1]
    return Altered(name, target, slope) if bool(slope.any()) else None


@register
class Fishing(Composed):
    """Inverts what a last layer altered by ``fishing`` left of a batch: the gradient of a class's examples.

    The class is read off the layer that was sent, and how many of its examples are in the batch off the gradient of
    the class's bias. In the last layer the other rows hold all examples, so they are put together from the class's row,
    as they are of its examples alone. Then any method that optimises images takes it for a small batch of that class.
    Where a feature was fished by, it takes it for one example, and the model for one that has this feature alone: the
    direction of the gradient is the same (breaching likewise resets the layer before it optimises).

    Args:
        attack: the method: its name and settings.
    """

    name = "fishing"
    summary = "one class's images, or one of them, from a large batch through an altered last layer"
    paper = "Wen et al. 2022 (Fishing for user data)"
    threat_model = "malicious server, active"
    over = "what was fished"
    inverts = False  # it is calibrated on the batch, and fishes single examples out of it
    needs = (
        "what the method needs (attack), but for labels",
        "a server that alters the last layer (federations[].server: fishing)",
    )
    standards = (*ALTERED_MODELS, "AML.T0018")
    first_settings: ClassVar[dict[str, Any]] = {"attack": {"name": "agic", **QUICK}}
    uses = ("one batch",)

    @classmethod
    def fits(cls, case: Case) -> bool:
        return case.server == cls.name and case.classifies(cls.examples)

    def check(self, observation: Observation) -> None:
        """Refuse an update of a model that wasn't altered, or of a batch without the class."""
        self.method.check(self.fished(observation)[0])

    def only_class(self, observation: Observation) -> int | None:
        """Return the class that the server fishes for."""
        name = last_layer(observation.module, observation.task_info)
        found = None if name is None or not observation.messages else altered(observation.messages[0], name)
        return None if found is None else found.target

    def fished(self, observation: Observation) -> tuple[Observation, str]:
        """Return the observation of an update over the fished examples alone, and how many they are, in words.

        Raises:
            NotApplicable: nothing was fished, or that can't be told.
        """
        message, info = observation.single(), observation.task_info
        super().check(observation)
        name = None if info.num_classes is None else last_layer(observation.module, info)
        found = None if name is None else altered(message, name)
        if found is None or info.loss != "cross-entropy":
            raise NotApplicable(
                "the server didn't alter the last layer to fish for a class; set threat.adversary: malicious-server "
                "and federations[].server: fishing"
            )
        update = message.update
        if update.kind == "weights" and update.training is None:
            raise NotApplicable("fishing needs to know how the client trained; set threat.knows_training: true")
        if update.sanitised is not None and update.sanitised.signs:
            raise NotApplicable("fishing needs the sizes of an update's numbers, and only their signs were sent")
        names = [f"{found.name}.weight", f"{found.name}.bias"]
        for one in names:
            if one not in update.tensors:
                raise NotApplicable(f"the update lacks the last layer's '{one}', which tells what was fished")
        gradient = one_batch_gradient(update, "cpu", message.weights)
        held = update.training.data_size if update.training and not update.members else None
        different = min(update.num_examples, held or update.num_examples)  # of several epochs, each example once
        share = -float(gradient[names[1]][found.target]) * different
        count = 1 if found.by_feature else round(share)
        if count < 1 or not share > 0:
            raise NotApplicable(f"no example of class {found.target}, for which the server fished, is in this update")
        slope = found.slope
        reset = _WEIGHT / float(slope.abs().max()) if found.by_feature else 1.0
        head = different / share  # so it is the mean over the fished examples
        body = head * reset
        tensors = {n: body * g.cpu() for n, g in gradient.items() if n not in names}
        others = torch.full((len(gradient[names[1]]),), -1.0 / (len(gradient[names[1]]) - 1))
        others[found.target] = 1.0
        for one in names:
            tensors[one] = head * others.view(-1, *[1] * (gradient[one].ndim - 1)) * gradient[one].cpu()[found.target]
        weights = dict(message.weights)
        weights[names[0]] = torch.zeros_like(weights[names[0]])
        weights[names[0]][found.target] = (reset * slope).to(weights[names[0]])
        weights[names[1]] = torch.full_like(weights[names[1]], _BIAS)
        weights[names[1]][found.target] = 0.0
        labels = torch.full((count,), found.target)
        training = TrainingConfig(1.0, 1, (count,))
        alone = Update(update.client, "gradient", tensors, count, training, labels=labels, sanitised=update.sanitised)
        virtual = Message(message.round, message.client, weights, alone)
        how = "by a feature" if found.by_feature else "by its class"
        text = f"{count} of {different} examples fished {how}, class {found.target}"
        return dataclasses.replace(observation, weights=(weights,), messages=(virtual,)), text

    def _run(
        self, observation: Observation, generator: torch.Generator, device: str, progress: Progress
    ) -> ImageFinding:
        fished, text = self.fished(observation)
        found = self.method(fished, generator=generator, device=device, progress=progress)
        assert isinstance(found, ImageFinding)
        count = observation.single().update.num_examples
        rows = torch.arange(count) % len(found.images)
        trace = found.trace and dataclasses.replace(found.trace, snapshots=found.trace.snapshots[:, rows])
        return dataclasses.replace(
            found,
            images=found.images[rows],
            labels=found.labels[rows],
            label_source=self.name,
            trace=trace,
            notes=(f"{text}; the images repeat", *found.notes),
        )
