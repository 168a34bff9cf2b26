"""GIAS: search among the images of a generator that was trained on public data, then adapt the generator itself."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor
from torch.func import functional_call

from fedaudit.attacks import Observation, Progress, Trace, register
from fedaudit.attacks.inversion import GradientInversion, Objective, Prepared, Schedule, flatten, optimise, unflatten
from fedaudit.models import Generator
from fedaudit.simulation import local_randomness
from fedaudit.task import TaskInfo
from fedaudit.utils import Fraction, MissingData, NonNegative, NotApplicable, Positive
from fedaudit_catalogue.generators import TrainedGenerator


@register
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

    name = "gias"
    summary = "codes, then weights of a generator trained on public data; cosine of gradients"
    paper = "Jeon et al. 2021 (GIAS)"
    needs = (
        "images and a classifier",
        "labels: given, or inferable from the last fully connected layer",
        "public data of the same kind (threat.knows_public_data) and a generator of them (generator_file)",
        "local training config, for FedAvg updates",
    )
    distance = "cosine"
    fedavg = "simulation"
    only_by_labels = True
    examples = ("image",)  # of which its generators are
    only_single = "it searches what a generator makes images from"
    inverts = False

    learning_rate: Annotated[Positive, Field(le=1e36)] = 0.1
    total_variation: NonNegative = 1e-4
    schedule: Schedule = "steps"
    generator_file: str | None = None
    latent_share: Fraction = 0.3
    weights_learning_rate: Annotated[Positive, Field(le=1e36)] = 1e-3

    def check(self, observation: Observation) -> None:
        """Refuse also an adversary without public data or generator."""
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

    def effort(self) -> int:
        """Return the iterations of both searches; a restart repeats the first."""
        return self.iterations + (self.restarts - 1) * round(self.latent_share * self.iterations)

    def found(self, prepared: Prepared, generator: torch.Generator, progress: Progress) -> tuple[list[Tensor], Trace]:
        """Search the codes, then the weights; NotApplicable: the optimisation diverged."""
        task_info, device = prepared.task_info, prepared.labels.device
        network = _load(self.generator_file).network.to(device)
        objective = self.objective(prepared)
        latent = round(self.latent_share * self.iterations)
        total = self.effort()

        def search(
            decode: Callable[[Tensor], Tensor], initial: Tensor, done: int, **settings: Any
        ) -> tuple[Tensor, Trace]:
            with local_randomness(generator.initial_seed()):  # a user's module may draw from the global generator
                (found,), trace = optimise(
                    through(decode, objective),
                    [initial],
                    prepared.pixel_range,
                    generator,
                    lambda own, _: progress(done + own, total),
                    **(self.optimisation() | {"clamp": False} | settings),
                )
            if not math.isfinite(trace.objective[-1]):
                rate = settings.get("learning_rate", self.learning_rate)
                raise NotApplicable(f"the optimisation diverged at learning_rate {rate:g}; lower it")
            return found, trace

        by_codes = from_codes(network, task_info)
        runs = []
        for restart in range(self.restarts):
            noise = torch.randn((len(prepared.labels), network.spec.latent), generator=generator).to(device)
            runs.append(search(by_codes, noise, restart * latent, iterations=latent))
        codes, first = min(runs, key=lambda run: run[1].objective[-1])
        by_weights = from_weights(network, task_info, codes)
        _, second = search(
            by_weights,
            flatten(list(network.parameters())).detach().repeat(len(codes), 1),
            self.restarts * latent,
            iterations=self.iterations - latent,
            learning_rate=self.weights_learning_rate,
            signed=False,
        )
        with torch.no_grad():
            images = [by_codes(s) for s in first.snapshots[:-1]] + [by_weights(s) for s in second.snapshots]
        offset = first.iterations[-1]
        trace = Trace(
            first.iterations[:-1] + [offset + i for i in second.iterations],
            first.objective[:-1] + second.objective,
            torch.stack(images),
        )
        return [images[-1]], trace


def from_codes(network: Generator, task_info: TaskInfo) -> Callable[[Tensor], Tensor]:
    """Return codes (n, latent) to normalised images."""
    return lambda codes: task_info.normalise(network(codes))


def from_weights(network: Generator, task_info: TaskInfo, codes: Tensor) -> Callable[[Tensor], Tensor]:
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


def through(decode: Callable[[Tensor], Tensor], objective: Objective) -> Objective:
    """Return ``objective`` of the images that ``decode`` makes, as a function of what they are made from."""

    def composed(variable: Tensor) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            leaf = variable.detach().requires_grad_()
            images = decode(leaf)
        value, slope = objective(images.detach())
        return value, torch.autograd.grad(images, leaf, slope)[0]

    return composed


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
