"""GIAS: search among the images of a generator that was trained on public data, then adapt the generator itself."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor
from torch.func import functional_call

from fedaudit.attacks.base import ATTACK_CONFIG, Progress, register
from fedaudit.attacks.findings import ImageFinding, Trace
from fedaudit.attacks.inversion.objectives import flatten, unflatten
from fedaudit.attacks.inversion.reconstruct import Objective, Optimisation, Reconstruction, Schedule, reconstruct
from fedaudit.attacks.inversion.template import FedAvgWay, GradientInversion
from fedaudit.federation.local_training import local_randomness
from fedaudit.models.generator import Generator, TrainedGenerator
from fedaudit.threat import Observation
from fedaudit.update import TaskInfo
from fedaudit.utils.errors import MissingData, NotApplicable
from fedaudit.utils.validation import Fraction, NonNegative, Positive

Decode = Callable[[Tensor], Tensor]


@register
@dataclass(frozen=True, kw_only=True, config=ATTACK_CONFIG)
class GIAS(GradientInversion):
    """Gradient Inversion with Generative Image Prior (Jeon et al., NeurIPS 2021, Section 3 and Algorithm 1).

    1 − cosine over the whole gradient plus total variation, minimised first over the codes of a generator and then, the
    codes held, over the generator's weights, a set for each example. Adam with InvG's schedule in both searches. Layer
    weights (``beta``, ``relu_modifier``) can be set. Departures: the generator is a small one ('fedaudit
    train-generator') instead of StyleGAN2; codes have no penalty of their own; of several restarts of the first search
    the one of least objective goes on to the second. FedAvg by simulation, which the paper doesn't treat.

    Args:
        iterations: of both searches together; a restart repeats the first.
        learning_rate: of the codes.
        generator_file: written by 'fedaudit train-generator'.
        latent_share: of the iterations that go to the codes.
        weights_learning_rate: of the generator's weights.
    """

    name: ClassVar[str] = "gias"
    summary: ClassVar[str] = "codes, then weights of a generator trained on public data; cosine of gradients"
    paper: ClassVar[str] = "Jeon et al. 2021 (GIAS)"
    needs: ClassVar[tuple[str, ...]] = (
        "images and a classifier",
        "labels: given, or inferable from the last fully connected layer",
        "public data of the same kind (threat.knows_public_data) and a generator of them (generator_file)",
        "training facts, for FedAvg updates",
    )
    distance: ClassVar[str] = "cosine"
    fedavg: ClassVar[FedAvgWay] = "simulation"

    learning_rate: Annotated[Positive, Field(le=1e36)] = 0.1
    total_variation: NonNegative = 1e-4
    schedule: Schedule = "steps"
    generator_file: str | None = None
    latent_share: Fraction = 0.3
    weights_learning_rate: Annotated[Positive, Field(le=1e36)] = 1e-3

    def check(self, observation: Observation) -> None:
        """Refuse an adversary without public data or generator, too."""
        super().check(observation)
        if not observation.threat.knows_public_data:
            raise NotApplicable(
                f"{self.name} needs public data of the same kind, which this adversary doesn't have; "
                "set threat.knows_public_data=true"
            )
        self._trained(observation.task_info)

    def files(self) -> list[Path]:
        """Return the generator's file."""
        return [Path(self.generator_file)] if self.generator_file else []

    def public_examples(self) -> Tensor | None:
        """Return the fingerprints of what the generator was trained on."""
        try:
            return _load(self.generator_file).examples if self.generator_file else None
        except MissingData:
            return None  # check() says so

    def _trained(self, task_info: TaskInfo) -> TrainedGenerator:
        command = "fedaudit train-generator --data NAME --out generator.safetensors"
        if self.generator_file is None:
            raise NotApplicable(
                f"{self.name} needs a generator of public images: make one with '{command}' and set generator_file"
            )
        try:
            trained = _load(self.generator_file)
        except MissingData as error:
            raise NotApplicable(f"{error}; make one with '{command}'") from None
        if trained.network.spec.input_shape != tuple(task_info.input_shape):
            shapes = f"{trained.network.spec.input_shape}, the victims' are {tuple(task_info.input_shape)}"
            raise NotApplicable(
                f"the generator '{self.generator_file}' makes images of {shapes}; make one with "
                f"'{command} --image-size {task_info.input_shape[1]}'"
            )
        return trained

    def run(
        self,
        observation: Observation,
        *,
        generator: torch.Generator,
        device: str = "cpu",
        progress: Progress | None = None,
    ) -> ImageFinding:
        """Search the codes, ``restarts`` times, then the weights from the best.

        Raises:
            NotApplicable: as :meth:`check`, the labels can't be inferred, or the optimisation diverged.
        """
        self.check(observation)
        started = time.perf_counter()
        message, task_info = observation.single(), observation.task_info
        network = _load(self.generator_file).network.to(device)
        prepared = self.prepare(observation, message, device)
        problem = self.problem(prepared, message)
        count = len(prepared.labels)
        first, second = self._searches()
        total = self.restarts * first.iterations + second.iterations

        def search(decode: Decode, initial: Tensor, settings: Optimisation, done: int) -> tuple[Reconstruction, Decode]:
            report = None if progress is None else lambda own, _: progress(done + own, total)
            with local_randomness(generator.initial_seed()):  # a user's module may draw from the global generator
                objective = through(decode, problem.objective)
                run = reconstruct(objective, [initial], settings, prepared.pixel_range, generator, report)
            if not math.isfinite(run.objective):
                raise NotApplicable(f"the optimisation diverged at learning_rate {settings.learning_rate:g}; lower it")
            return run, decode

        runs = [
            search(
                from_codes(network, task_info),
                torch.randn((count, network.spec.latent), generator=generator).to(device),
                first,
                restart * first.iterations,
            )
            for restart in range(self.restarts)
        ]
        codes = min(runs, key=lambda run: run[0].objective)
        weights = flatten(list(network.parameters())).detach().repeat(count, 1)
        adapted = search(
            from_weights(network, task_info, codes[0].images), weights, second, self.restarts * first.iterations
        )
        trace, images = _joined(codes, adapted, task_info)
        return ImageFinding(
            attack=self.name,
            images=images,
            labels=prepared.labels.cpu(),
            label_source=prepared.label_source,
            objective=adapted[0].objective,
            iterations=total,
            trace=trace,
            notes=(*self.notes(prepared, message.update), *problem.notes),
            seconds=time.perf_counter() - started,
        )

    def _searches(self) -> tuple[Optimisation, Optimisation]:
        """Return how the codes and how the weights are optimised."""
        latent = round(self.latent_share * self.iterations)
        base = dataclasses.replace(self.optimisation(), clamp=False)
        return (
            dataclasses.replace(base, iterations=latent),
            dataclasses.replace(
                base, iterations=self.iterations - latent, learning_rate=self.weights_learning_rate, signed=False
            ),
        )


def from_codes(network: Generator, task_info: TaskInfo) -> Decode:
    """Return codes (n, latent) to normalised images."""
    return lambda codes: task_info.normalise(network(codes))


def from_weights(network: Generator, task_info: TaskInfo, codes: Tensor) -> Decode:
    """Return weights (n, parameters), a row for each of ``codes``, to normalised images."""
    names = [name for name, _ in network.named_parameters()]
    shapes = [p.shape for p in network.parameters()]

    def decode(weights: Tensor) -> Tensor:
        images = [
            functional_call(network, dict(zip(names, unflatten(row, shapes), strict=True)), (code[None],))
            for row, code in zip(weights, codes, strict=True)
        ]
        return task_info.normalise(torch.cat(images))

    return decode


def through(decode: Decode, objective: Objective) -> Objective:
    """Return ``objective`` of the images that ``decode`` makes, as a function of what they are made from."""

    def composed(variables: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        with torch.enable_grad():
            (leaf,) = (v.detach().requires_grad_() for v in variables)
            images = decode(leaf)
        value, (slope,) = objective([images.detach()])
        return value, list(torch.autograd.grad(images, leaf, slope))

    return composed


def _joined(
    codes: tuple[Reconstruction, Decode], adapted: tuple[Reconstruction, Decode], task_info: TaskInfo
) -> tuple[Trace, Tensor]:
    """Return the trace of both searches, one after the other, and the last images, all as pixels."""
    (one, decode), (two, decode_two) = codes, adapted
    with torch.no_grad():
        pictures = [decode(s) for s in one.trace.snapshots[:-1]] + [decode_two(s) for s in two.trace.snapshots]
    pixels = task_info.denormalise(torch.cat(pictures)).clamp(0, 1).unflatten(0, (len(pictures), -1)).cpu()
    offset = one.trace.iterations[-1]
    iterations = one.trace.iterations[:-1] + [offset + i for i in two.trace.iterations]
    return Trace(iterations, one.trace.objective[:-1] + two.trace.objective, pixels), pixels[-1]


def _load(path: str | None) -> TrainedGenerator:
    """Return the generator in the file, which is read once for each of its versions."""
    assert path is not None  # check() saw to it
    file = Path(path)
    return _read(file, file.stat().st_mtime_ns) if file.is_file() else TrainedGenerator.load(file)


@lru_cache(maxsize=4)
def _read(path: Path, _version: int) -> TrainedGenerator:
    trained = TrainedGenerator.load(path)
    trained.network.requires_grad_(False)
    return trained
