"""What the inversion benchmark measures: victims, and the tools that attack them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fedaudit.attacks.inversion import (
    Objective,
    Victim,
    make_engine,
    make_step,
    one_gradient,
    smoothness,
    weighted_cosine,
    with_priors,
)
from fedaudit.models import build_model, initialise, set_training_mode
from fedaudit.task import TrainingConfig, loss_function
from fedaudit.utils import generator

SHAPE = (3, 32, 32)
TOTAL_VARIATION = 1e-4
LEARNING_RATE = 1e-4  # of the FedAvg client

Way = Literal["gradient", "one batch", "simulation"]


@dataclass(frozen=True)
class Case:
    """A victim and what is matched.

    Attributes:
        images: attacked together.
        way: ``gradient`` of one batch; or of a FedAvg update with one image a local step, AGIC's ``one batch`` or the
            ``simulation`` of the local training.
    """

    model: str
    images: int
    way: Way = "gradient"

    @property
    def training(self) -> TrainingConfig:
        """The local training that is matched."""
        if self.way == "simulation":
            return TrainingConfig(LEARNING_RATE, self.images, (1,) * self.images)
        return one_gradient(self.images)


@dataclass(frozen=True)
class Prepared:
    """A case made ready, the same for every tool: labels (n,), dummy images (n, 3, 32, 32), what is matched."""

    victim: Victim
    labels: Tensor
    target: list[Tensor]
    start: Tensor
    pixel_range: tuple[Tensor, Tensor]
    training: TrainingConfig


@dataclass(frozen=True)
class Tool:
    """One way of attacking a prepared case: a whole iteration, and the engine, distance and gradient, alone."""

    iterate: Callable[[], object]
    engine: Objective


def prepare(case: Case) -> Prepared:
    """Return ``case`` made ready: default initialisation, eval-mode BatchNorm, the gradient of random images."""
    model = build_model(case.model, input_shape=SHAPE, outputs=10)
    initialise(model, "default", generator(0, "bench"))
    set_training_mode(model, "eval")
    noise = generator(0, "bench", "images")
    true, start = (torch.randn((case.images, *SHAPE), generator=noise) for _ in range(2))
    labels = torch.arange(case.images) % 10
    parameters = {n: p.detach() for n, p in model.named_parameters()}
    victim = Victim(model, loss_function("cross-entropy"), parameters, dict(model.named_buffers()))
    leaves = [p.clone().requires_grad_() for p in parameters.values()]
    value = victim.value(dict(zip(parameters, leaves, strict=True)), true, labels)
    scale = LEARNING_RATE * case.images if case.way == "simulation" else 1.0
    target = [scale * g for g in torch.autograd.grad(value, leaves)]
    edge = torch.full((1, *SHAPE), 2.0)
    return Prepared(victim, labels, target, start, (-edge, edge), case.training)


def our_tool(name: str, ready: Prepared) -> Tool:
    """Return our engine ``name`` in our loop."""
    distance = weighted_cosine(ready.target, [1.0] * len(ready.target))
    engine = make_engine(name, ready.victim, ready.labels, ready.training, distance, steps=1000, notes=[])
    step = make_step(
        with_priors(engine, [(TOTAL_VARIATION, smoothness)]),
        [ready.start.clone()],
        ready.pixel_range,
        torch.Generator(),
        iterations=1000,
        learning_rate=0.1,
        signed=True,
        schedule="steps",
        clamp=True,
    )
    return Tool(step, engine)


QUICK = [Case("lenet", 1), Case("convnet-small", 1), Case("convnet-small", 4)]
FULL = [
    *QUICK,
    Case("resnet20", 1),
    Case("resnet20", 4),
    *(Case("resnet20-4", n) for n in (1, 4, 8)),
]
QUICK_FEDAVG = [("convnet-small", 4)]
FULL_FEDAVG = [("convnet-small", 8), ("resnet20", 8), ("resnet20-4", 8)]
