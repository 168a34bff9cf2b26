"""Robbing the Fed (Fowl et al. 2022): a layer of bins in front of the network, and what the update says of each."""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar

import torch
from torch import Tensor, nn

from fedaudit.attacks.active.bins import PREFIX, alternating, edges, in_their_bins, labels_of, measured, read
from fedaudit.attacks.analytic.recovered import Recovered, as_images
from fedaudit.attacks.base import Attack, Progress, register
from fedaudit.attacks.case import Case
from fedaudit.attacks.findings import ImageFinding
from fedaudit.attacks.local_training import Way
from fedaudit.attacks.standards import ALTERED_MODELS
from fedaudit.models.inserted_module import WithInsertedModule
from fedaudit.simulation.local_training import local_randomness
from fedaudit.simulation.server_behaviour import ServerBehaviour, ServerStep
from fedaudit.task.info import InsertedModule, TaskInfo
from fedaudit.task.training import LocalPlan
from fedaudit.transcript.observation import Observation
from fedaudit.utils.errors import BadInput, NotApplicable
from fedaudit.utils.validation import Count, Positive

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
        """Refuse regression, and cumulative bins where clients take several steps: the rows don't stay alike.

        Raises:
            BadInput: as above.
        """
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
        """Return the strength at which a local step, of a gradient as on noise, moves no edge by more than ``drift``.

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
class Imprint(Attack):
    """Reads the rows of an imprint module: one example's in every bin that only one example hit (Fowl et al. 2022).

    A row's gradient is Σ δ·x of the examples in its bin and the bias' is Σ δ, so their ratio is the example that is
    alone there, and a mean of those that aren't. It can't tell which is which. Of weights after local training the
    scale is taken from the bin where that is more exact than the ratio.
    """

    name: ClassVar[str] = "imprint"
    summary: ClassVar[str] = "images from the bins of an imprint module that the server put before the network"
    paper: ClassVar[str] = "Fowl et al. 2022 (Robbing the Fed)"
    threat_model: ClassVar[str] = "malicious server, active"
    examples: ClassVar[tuple[str, ...]] = ("image",)
    needs: ClassVar[tuple[str, ...]] = (
        "images and a classifier",
        "a server that puts an imprint module before the network (federations[].server: imprint)",
    )
    standards: ClassVar[tuple[str, ...]] = (*ALTERED_MODELS, "AML.T0018")
    uses: ClassVar[tuple[Way, ...]] = ("spear",)
    needs_classes: ClassVar[bool] = True

    @classmethod
    def fits(cls, case: Case) -> bool:
        return case.server == cls.name and case.classifies(cls.examples)

    def check(self, observation: Observation) -> None:
        """Refuse an update of a model without an imprint module.

        Raises:
            NotApplicable: with the reason and the remedy.
        """
        self._product(observation)

    def _product(self, observation: Observation) -> tuple[WithInsertedModule, Tensor]:
        inserted = observation.task_info.inserted
        super().check(observation)
        if inserted is None or inserted.kind != "imprint":
            raise NotApplicable(
                "the server sent the network as it is, without an imprint module; set threat.adversary: "
                "malicious-server and federations[].server: imprint"
            )
        return measured(observation, self.name)

    def _run(
        self, observation: Observation, _generator: torch.Generator, _device: str, progress: Progress
    ) -> ImageFinding:
        module, product = self._product(observation)
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
        sure = torch.zeros(len(inputs), dtype=torch.bool)
        finding = as_images(observation, Recovered(inputs, labels, sure, notes), self.name)
        return dataclasses.replace(finding, certified=None)
