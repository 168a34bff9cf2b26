"""Training a generator on public data: the prior of attacks that search among plausible images (GIAS)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

from fedaudit.data import Dataset
from fedaudit.modalities import example_kind, save_png
from fedaudit.models import Generator, GeneratorSpec
from fedaudit.simulation import Checkpoint
from fedaudit.utils import (
    BadInput,
    Display,
    Quiet,
    all_finite,
    computation,
    derive_seed,
    generator,
    one_thread,
    unknown_name,
)
from fedaudit_catalogue.generators import TrainedGenerator, trunk

_OBJECTIVES = ("gan", "autoencoder")
_AVERAGE = 0.995  # of the generator's weights over the steps of adversarial training
_CODE_NOISE = 0.3  # standard deviation, of codes of standard deviation 1: neighbouring codes give similar images
_MADE = ("image",)  # kinds of examples


@dataclass(frozen=True)
class TrainingPlan:
    """How a generator is trained.

    BadInput: no such objective, or a number that isn't allowed.

    Attributes:
        objective: ``gan``: non-saturating adversarial loss, with a discriminator under spectral normalisation
            (Goodfellow et al. 2014, Miyato et al. 2018), and the running mean of the generator's weights as the result.
            ``autoencoder``: an encoder's standardised codes, with noise, and the squared error of what is decoded.
        learning_rate: of Adam, with β = (0.5, 0.99) for ``gan``.
        seed: of everything that is drawn.
    """

    objective: str = "autoencoder"
    steps: int = 3000
    batch_size: int = 32
    learning_rate: float = 1e-3
    seed: int = 0

    def __post_init__(self) -> None:
        if self.objective not in _OBJECTIVES:
            raise BadInput(unknown_name("objective", self.objective, _OBJECTIVES))
        if self.steps < 1 or self.batch_size < 2 or not 0 < self.learning_rate < 1:
            raise BadInput("steps must be 1 or more, the batch size 2 or more, the learning rate between 0 and 1")


def public_examples(dataset: Dataset) -> Tensor:
    """Return the train split's images without those that are in the test split, too, (n, C, H, W).

    A scenario's clients hold the test split (or the audit refuses the generator), so the adversary's public data and
    the victims have no image in common.
    """
    kind = example_kind(dataset.kind)
    if kind.name not in _MADE:
        raise BadInput(f"a generator makes images; data set '{dataset.name}' holds {kind.described}")
    victims = kind.fingerprints(dataset.test.inputs)
    images = dataset.train.inputs[~torch.isin(kind.fingerprints(dataset.train.inputs), victims)]
    if len(images) < 2:
        raise BadInput(f"data set '{dataset.name}' has fewer than 2 train examples that aren't in its test split, too")
    return images


@one_thread()
def train_generator(
    dataset: Dataset,
    out: Path,
    *,
    latent: int = 128,
    width: int = 16,
    plan: TrainingPlan | None = None,
    again: bool = False,
    display: Display | None = None,
) -> TrainedGenerator:
    """Train a generator on the train split of ``dataset`` and write it to ``out``, a .safetensors file.

    Progress is kept beside ``out`` now and then: an interrupted training goes on from there with the same arguments, to
    the same bits. Where ``out`` holds the generator of this very training, it is returned as it is.

    Args:
        dataset: of the victims' domain.
        latent: elements of a latent code.
        width: channels at the image's own size.
        again: train in any case, and write over what ``out`` holds.
    """
    plan = plan or TrainingPlan()
    if out.suffix != ".safetensors":
        raise BadInput(f"a generator is written as .safetensors, not '{out.name}'; change the name")
    images = public_examples(dataset)
    channels, height, breadth = dataset.input_shape
    spec = GeneratorSpec((channels, height, breadth), latent, width)
    key = computation("generator", _Run, spec, plan, images)
    if out.exists() and not again:
        return _same(out, key)
    run = _Run(spec, plan, images)
    resume = out.with_name(f"{out.name}.resume")
    on_disk = Checkpoint(resume)
    if state := on_disk.load(lambda: key):
        run.load_state_dict(state)
    display = display or Quiet()
    if run.done:
        display.say(f"resuming: {run.done} of {plan.steps} steps kept in {resume}")
    report = display.stage(f"training a generator ({plan.objective})", plan.steps)
    while run.done < plan.steps:
        run.step()
        report(run.done)
        if run.done < plan.steps:
            on_disk.save(lambda: key, run.state_dict, last=False)
    trained = TrainedGenerator(
        run.result.eval(),
        dataset.name,
        f"{plan.objective}, {plan.steps} steps of {plan.batch_size} on {len(images)} train examples, seed {plan.seed}",
        example_kind(dataset.kind).fingerprints(images).sort().values,
        key,
    )
    if not all_finite(run.result.state_dict().values()):
        raise BadInput(f"the training diverged at learning rate {plan.learning_rate:g}; lower it")
    out.parent.mkdir(parents=True, exist_ok=True)
    trained.save(out)
    resume.unlink(missing_ok=True)
    return trained


def _same(out: Path, key: str) -> TrainedGenerator:
    """Return the generator that ``out`` holds, if it is of the training with this fingerprint."""
    remedy = "give again=True to train it anew and write over it, or another out=…"
    try:
        trained = TrainedGenerator.load(out)
    except BadInput:
        raise BadInput(f"'{out}' exists and isn't a generator; {remedy}") from None
    if trained.computation != key:
        why = "other data, settings or code" if trained.computation else "an unknown version of fedaudit"
        raise BadInput(f"'{out}' holds a generator that {why} made ({trained.data}; {trained.training}); {remedy}")
    return trained


class _Run:
    """A training, with all of its state."""

    def __init__(self, spec: GeneratorSpec, plan: TrainingPlan, images: Tensor) -> None:
        with torch.random.fork_rng(devices=[]):  # torch's layers draw from the global generator
            torch.manual_seed(derive_seed(plan.seed, "generator", "weights"))
            self.generator, self.average = Generator(spec), Generator(spec)
            self.other = trunk(spec, 1 if plan.objective == "gan" else spec.latent)
            if plan.objective == "gan":
                for layer in self.other:
                    if isinstance(layer, nn.Conv2d | nn.Linear):
                        spectral_norm(layer)
        for part in (self.generator, self.other):
            part.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # torch's stubs lack it
        self.average.load_state_dict(self.generator.state_dict())
        self.spec, self.plan = spec, plan
        self.images = images.contiguous(memory_format=torch.channels_last)
        self.draw = generator(plan.seed, "generator", "training")
        betas = (0.5, 0.99) if plan.objective == "gan" else (0.9, 0.999)
        parts = [self.generator, self.other]
        self.optimisers = [torch.optim.Adam(p.parameters(), lr=plan.learning_rate, betas=betas) for p in parts]
        self.done = 0

    @property
    def result(self) -> Generator:
        """The generator that the training is for."""
        return self.average if self.plan.objective == "gan" else self.generator

    def step(self) -> None:
        """Take one step of the optimisers."""
        rate = self.plan.learning_rate * 0.5 * (1 + math.cos(math.pi * self.done / self.plan.steps))
        if self.plan.objective == "autoencoder":
            for optimiser in self.optimisers:
                optimiser.param_groups[0]["lr"] = rate
        rows = torch.randint(len(self.images), (self.plan.batch_size,), generator=self.draw)
        real = self.images[rows]
        {"gan": self._adversarial, "autoencoder": self._decoding}[self.plan.objective](real)
        self.done += 1

    def _codes(self) -> Tensor:
        return torch.randn((self.plan.batch_size, self.spec.latent), generator=self.draw)

    def _adversarial(self, real: Tensor) -> None:
        made, critic = self.generator, self.other
        with torch.no_grad():
            fake = made(self._codes())
        _descend(self.optimisers[1], F.softplus(-critic(real)).mean() + F.softplus(critic(fake)).mean())
        _descend(self.optimisers[0], F.softplus(-critic(made(self._codes()))).mean())
        with torch.no_grad():
            for mean, now in zip(self.average.parameters(), made.parameters(), strict=True):
                mean.lerp_(now, 1 - min(_AVERAGE, (self.done + 1) / (self.done + 10)))

    def _decoding(self, real: Tensor) -> None:
        codes = F.batch_norm(self.other(real), None, None, training=True)
        codes = codes + _CODE_NOISE * self._codes()
        loss = F.mse_loss(self.generator(codes), real)
        for optimiser in self.optimisers:
            optimiser.zero_grad(set_to_none=True)
        loss.backward()
        for optimiser in self.optimisers:
            optimiser.step()

    def state_dict(self) -> dict[str, Any]:
        """Return what changes from step to step, for a checkpoint."""
        return {
            "networks": [part.state_dict() for part in self._networks],
            "optimisers": [optimiser.state_dict() for optimiser in self.optimisers],
            "draw": self.draw.get_state(),
            "done": self.done,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what :meth:`state_dict` returned."""
        for part, kept in zip(self._networks, state["networks"], strict=True):
            part.load_state_dict(kept)
        for optimiser, kept in zip(self.optimisers, state["optimisers"], strict=True):
            optimiser.load_state_dict(kept)
        self.draw.set_state(state["draw"])
        self.done = state["done"]

    @property
    def _networks(self) -> tuple[nn.Module, ...]:
        return self.generator, self.other, self.average


def _descend(optimiser: torch.optim.Optimizer, loss: Tensor) -> None:
    optimiser.zero_grad(set_to_none=True)
    loss.backward()
    optimiser.step()


def save_samples(trained: TrainedGenerator, path: Path) -> None:
    """Write 64 of its images as one PNG."""
    save_png(sample_sheet(trained), path)


def sample_sheet(trained: TrainedGenerator, *, count: int = 64, seed: int = 0) -> Tensor:
    """Return ``count`` images of random codes as one image, (C, H', W') in [0, 1], eight in a row."""
    codes = torch.randn((count, trained.network.spec.latent), generator=generator(seed, "generator", "samples"))
    with torch.no_grad():
        images = trained.network(codes)
    images = F.pad(images, (1, 1, 1, 1), value=1.0)
    rows = [torch.cat(row.unbind(), dim=2) for row in images.split(8) if len(row) == 8]
    return torch.cat(rows, dim=1)
