"""What the optimisation-based attacks share: from an observation to the optimiser loop and back to a finding."""

from __future__ import annotations

import copy
import dataclasses
import math
import time
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import AfterValidator, Field
from pydantic.dataclasses import dataclass as checked_dataclass
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from fedaudit.attacks.base import ATTACK_CONFIG, Attack, Progress
from fedaudit.attacks.findings import ImageFinding, Trace
from fedaudit.attacks.inversion.defended import distance_to
from fedaudit.attacks.inversion.engines import Checked, EngineName, make_engine
from fedaudit.attacks.inversion.labels import LABEL_INFERENCES, infer_labels
from fedaudit.attacks.inversion.matching import Victim, one_gradient
from fedaudit.attacks.inversion.objectives import DISTANCES
from fedaudit.attacks.inversion.reconstruct import Optimisation, Reconstruction, reconstruct
from fedaudit.errors import NotApplicable, unknown_name
from fedaudit.federation.client import local_randomness
from fedaudit.models import Layer, layer_groups, set_training_mode
from fedaudit.threat import Message, Observation
from fedaudit.update import Update
from fedaudit.validation import Count, NonNegative, Positive


def check_label_inference(name: str) -> str:
    """Return ``name`` if it is a label inference.

    Raises:
        ValueError: it isn't; the message says what is.
    """
    known = ["auto", *LABEL_INFERENCES.names()]
    if name not in known:
        raise ValueError(unknown_name("label inference", name, known))
    return name


FedAvgWay = Literal["simulation", "one-batch"]
LabelMethod = Annotated[str, AfterValidator(check_label_inference)]


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """An observation made ready for the optimiser.

    Attributes:
        victim: the model as the client ran it.
        layers: of the model, in forward order.
        gradient: the observed gradient by name; for a FedAvg update its one-batch approximation ΔW / (−μ·T).
        labels: (n,) that the attack works with.
        label_source: ``given`` or the inference's name.
    """

    victim: Victim
    layers: list[Layer]
    gradient: dict[str, Tensor]
    labels: Tensor
    label_source: str


@checked_dataclass(frozen=True, kw_only=True, config=ATTACK_CONFIG)
class GradientInversion(Attack):
    """Template of the attacks that optimise dummy images until their gradient is the observed one.

    A method is a subclass that sets defaults; the hyper-parameters here are common to all.

    Args:
        iterations: of the optimiser, in each restart.
        learning_rate: of Adam, in normalised pixels.
        total_variation: weight of the prior.
        signed: give Adam the sign of the gradient only.
        decay: learning rate ×0.1 after 3/8, 5/8 and 7/8 of the iterations.
        clamp: keep pixels in their valid range.
        restarts: from new noise; the one of least objective is kept.
        label_inference: ``auto``, ``idlg`` or ``yin``; not used where the labels are granted.
        engine: ``auto``, ``reference``, ``frozen`` or ``compiled``.
        aware: use what is known of the clients' defence; False takes the update for an undefended one, whose layers
            that didn't arrive are zero.
    """

    threat_model: ClassVar[str] = "server or eavesdropper, passive"
    distance: ClassVar[str]
    fedavg: ClassVar[FedAvgWay]

    iterations: Count = 10_000
    learning_rate: Annotated[Positive, Field(le=1e36)] = 0.1  # above, float32 overflows inside of Adam
    total_variation: NonNegative = 0.0
    signed: bool = False
    decay: bool = False
    clamp: bool = False
    restarts: Count = 1
    label_inference: LabelMethod = "auto"
    engine: EngineName = "auto"
    aware: bool = True

    def check(self, observation: Observation) -> None:
        """Raise unless the update is of images and everything that is needed is known.

        Raises:
            NotApplicable: with the reason and the remedy.
        """
        message = observation.single()
        setup = observation.setup
        if setup.kind != "image":
            raise NotApplicable(f"{self.name} recovers images; these examples are rows of a table, {setup.input_shape}")
        if setup.num_classes is None:
            raise NotApplicable(f"{self.name} needs a classifier; this model predicts real values")
        if min(setup.input_shape[1:]) < 2:
            raise NotApplicable(f"{self.name} needs images of at least 2 by 2 pixels")
        facts = message.update.facts
        if message.update.kind == "weights" and facts is None and self.needs_training_facts(message.update):
            raise NotApplicable(
                f"{self.name} needs to know how the client trained to use a FedAvg update; "
                "set threat.knows_training=true"
            )
        if not any(bool(t.any()) for t in message.update.tensors.values()):
            raise NotApplicable("the update is zero throughout: it carries nothing to invert")

    def needs_training_facts(self, update: Update) -> bool:  # noqa: ARG002 (subclasses look at it)
        """Whether a FedAvg update can't be used without learning rate and local steps."""
        return True

    def weights(self, prepared: Prepared) -> dict[str, float]:
        """Return the weight of every tensor in the distance; equal ones unless a method says otherwise."""
        return dict.fromkeys(prepared.gradient, 1.0)

    def notes(self, prepared: Prepared, update: Update) -> list[str]:  # noqa: ARG002 (subclasses look at them)
        """Return what the user should know about this run."""
        return []

    def run(
        self,
        observation: Observation,
        *,
        generator: torch.Generator,
        device: str = "cpu",
        progress: Progress | None = None,
    ) -> ImageFinding:
        """Optimise from Gaussian noise, ``restarts`` times, and keep the run of least objective.

        Raises:
            NotApplicable: as :meth:`check`, the labels can't be inferred, or the optimisation diverged.
        """
        self.check(observation)
        started = time.perf_counter()
        message = observation.single()
        if not self.aware:
            message = _undefended(message)
        prepared = prepare(observation, message, self.label_inference, device)
        engine = self.make_engine(prepared, message)
        setup = observation.setup
        best: Reconstruction | None = None
        for restart in range(self.restarts):
            noise = torch.randn((message.update.num_examples, *setup.input_shape), generator=generator).to(device)
            with local_randomness(generator.initial_seed()):  # a user's module may draw from the global generator
                run = reconstruct(
                    engine,
                    noise,
                    self.optimisation(),
                    setup.pixel_range(noise),
                    _shifted(progress, restart, self.restarts),
                )
            if math.isfinite(run.objective) and (best is None or run.objective < best.objective):
                best = run
        if best is None or not bool(torch.isfinite(best.trace.snapshots).all()):
            raise NotApplicable(f"the optimisation diverged at learning_rate {self.learning_rate:g}; lower it")
        pixels = setup.denormalise(torch.cat([best.images[None], best.trace.snapshots]).flatten(0, 1)).clamp(0, 1)
        pixels = pixels.unflatten(0, (-1, len(best.images))).cpu()
        return ImageFinding(
            attack=self.name,
            images=pixels[0],
            labels=prepared.labels.cpu(),
            label_source=prepared.label_source,
            objective=best.objective,
            iterations=self.iterations * self.restarts,
            trace=Trace(best.trace.iterations, best.trace.objective, pixels[1:]),
            notes=(*_common_notes(prepared), *self.notes(prepared, message.update), *engine.notes),
            seconds=time.perf_counter() - started,
        )

    def optimisation(self) -> Optimisation:
        """Return how the dummy images are optimised."""
        return Optimisation(
            iterations=self.iterations,
            learning_rate=self.learning_rate,
            signed=self.signed,
            decay=self.decay,
            total_variation=self.total_variation,
            clamp=self.clamp,
        )

    def make_engine(self, prepared: Prepared, message: Message) -> Checked:
        """Return the step: one batch for gradients, and for FedAvg whichever of the two ways the method takes."""
        update = message.update
        weights = self.weights(prepared)
        names = list(prepared.victim.parameters)
        target, facts = prepared.gradient, one_gradient(update.num_examples)
        if update.kind == "weights" and self.fedavg == "simulation":
            assert update.facts is not None  # check() saw to it
            target = {name: -t.to(prepared.labels.device) for name, t in update.tensors.items()}
            facts = update.facts
            if (
                self.distance == "squared-l2"
            ):  # of gradients, not of descents: else it shrinks with the learning rate squared
                scale = (facts.learning_rate * facts.local_steps) ** -2
                weights = {name: scale * weight for name, weight in weights.items()}
        if self.aware:
            distance = distance_to(self.distance, update, names, target, weights)
        else:
            distance = DISTANCES[self.distance]([target[n] for n in names], [weights[n] for n in names])
        steps = self.iterations * self.restarts
        return make_engine(self.engine, prepared.victim, prepared.labels, facts, distance, steps)


def prepare(observation: Observation, message: Message, label_inference: str, device: str) -> Prepared:
    """Make ``message`` ready: the model as the client ran it, the gradient, the labels.

    Raises:
        NotApplicable: the labels are neither granted nor inferable.
        BadInput: no such label inference.
    """
    setup = observation.setup
    update = message.update
    module = copy.deepcopy(observation.module).to(device)
    set_training_mode(module, setup.batch_norm)
    for part in module.modules():
        if isinstance(part, _DropoutNd):
            part.eval()  # the client's masks are unknown; without them is the expectation
    state = {name: t.to(device) for name, t in message.weights.items()}
    module.load_state_dict(state)
    used = _used_parameters(module, observation, device)
    names = [name for name in used if name in update.tensors]  # in the model's order, not a file's
    victim = Victim(
        module,
        observation.loss,
        {name: state[name] for name in names},
        {name: t for name, t in state.items() if name not in names},
    )
    layers = layer_groups(module, torch.zeros(2, *setup.input_shape, device=device))
    gradient = one_batch_gradient(update, device)
    if update.labels is not None:
        return Prepared(
            victim=victim,
            layers=layers,
            gradient=gradient,
            labels=update.labels.to(device),
            label_source="given",
        )
    assert setup.num_classes is not None  # check() saw to it
    labels, source = infer_labels(label_inference, layers, gradient, setup.num_classes, update.num_examples)
    return Prepared(victim=victim, layers=layers, gradient=gradient, labels=labels, label_source=source)


def _used_parameters(module: nn.Module, observation: Observation, device: str) -> list[str]:
    """Return the parameters that the loss depends on; local training leaves the others as they are."""
    setup = observation.setup
    parameters = {name: p for name, p in module.named_parameters() if p.requires_grad}
    with local_randomness(0):
        before = {name: b.clone() for name, b in module.named_buffers()}
        inputs = torch.zeros((2, *setup.input_shape), device=device)
        value = observation.loss(module(inputs), torch.zeros(2, dtype=torch.int64, device=device))
        grads = torch.autograd.grad(value, list(parameters.values()), allow_unused=True)
        for name, buffer in module.named_buffers():
            buffer.copy_(before[name])
    return [name for name, grad in zip(parameters, grads, strict=True) if grad is not None]


def _undefended(message: Message) -> Message:
    """Return the message with zeros in place of every parameter that it hasn't."""
    update = message.update
    sent = {name: update.tensors.get(name, torch.zeros_like(t)) for name, t in message.weights.items()}
    return dataclasses.replace(message, update=dataclasses.replace(update, tensors=sent))


def one_batch_gradient(update: Update, device: str = "cpu") -> dict[str, Tensor]:
    """Return the gradient that an update stands for: itself, or g = ΔW / (−μ·T) for T local steps.

    AGIC's one-batch approximation (Xu et al. 2022, Eq. 4), with the division by T that the paper leaves out: with it
    g is the gradient of the mean loss over all examples, where the model barely moves between the steps (the paper: at
    μ = 1e-4, not at 1e-2). What momentum, weight decay and FedProx's term add stays in g. Without the training facts
    −ΔW is returned, which has the same direction.
    """
    scale = 1.0
    if update.kind == "weights":
        facts = update.facts
        scale = -1.0 / (facts.learning_rate * facts.local_steps) if facts else -1.0
    return {name: scale * t.to(device) for name, t in update.tensors.items()}


def _common_notes(prepared: Prepared) -> list[str]:
    if any(isinstance(part, _DropoutNd) and part.p > 0 for part in prepared.victim.module.modules()):
        return ["the client trained with dropout, whose masks the adversary doesn't know: attacked without dropout"]
    return []


def _shifted(progress: Progress | None, restart: int, restarts: int) -> Progress | None:
    if progress is None:
        return None
    return lambda done, total: progress(restart * total + done, restarts * total)
