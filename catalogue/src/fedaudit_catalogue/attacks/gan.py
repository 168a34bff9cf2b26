"""A malicious client that generates images of a class which it doesn't have: a GAN against the global model."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fedaudit.attacks import Attack, Case, Finding, Observation, register
from fedaudit.models import Generator, GeneratorSpec
from fedaudit.simulation import Behaviour, ClientStep, local_randomness
from fedaudit.task import TaskInfo
from fedaudit.utils import BadInput, Count, NotApplicable, Positive, Whole
from fedaudit_catalogue.generators import DCGenerator

_ROUND = "gan/round-"
_TARGET = "gan/target"
_PAPER = "Hitaj et al. 2017"


@dataclass(frozen=True, kw_only=True)
class ClassImagesFinding(Finding, kind="class-images"):
    """Images of one class, generated in several rounds from the same latent codes.

    Attributes:
        images: (r, k, C, H, W) pixels in [0, 1].
        rounds: (r,) in which they were generated.
        target: the class.
    """

    images: Tensor
    rounds: tuple[int, ...]
    target: int


@register(frozen=False)
class GANClient(Behaviour):
    """Deep models under the GAN (Hitaj et al. 2017, Algorithm 1).

    From round ``start`` on, each round: a generator is trained with the global model as its discriminator, to
    generate what the model takes for ``target``; as many images as ``images`` says then join the client's own batches
    under another ``label``, so that the clients who have the class must tell it apart the better. Departures: the
    generator is DCGAN's, trained by Adam, and goes on from round to round; several malicious clients share one. What it
    draws depends on the model: against strides and LeakyReLU (``strided-cnn``) drawings become clear. Where they are
    noise (coloured signs, portraits), fewer and smaller ``steps`` draw better: 10 at DCGAN's rate of 2e-4.

    Args:
        target: the class to steal.
        label: under which the generated images are trained on; the class after the target if None. With
            ``model.extra_classes`` it may be one that no example has: 10, the eleventh of ten.
        start: first round of the attack, from 0; before, the client is honest.
        images: generated and trained on in each round.
        steps: of the generator's optimiser a round.
        batch_size: images in each of these steps.
        learning_rate: of the generator, by Adam.
        latent: elements of a latent code.
        width: channels of the generator at half the image's size; with ``nearest`` a multiple of 8.
        upsampling: how the generator doubles its maps: ``transposed`` convolutions, as DCGAN has it; or ``nearest``
            neighbours and a convolution (Odena et al. 2016), without a chessboard, in two to three times the time.
        keep: images that are kept of a round.
        every: rounds from one kept set to the next; the last is always kept.
        limit: τ of ‖w − w_global‖_∞ ≤ τ, by projection after each local step; None: no limit.
    """

    name = "gan"
    summary = "generates images of a class that it lacks, and trains on them under another label"
    paper = _PAPER
    examples = ("image",)
    trained = True

    target: Whole = 3
    label: Whole | None = None
    start: Whole = 50
    images: Count = 256
    steps: Count = 80
    batch_size: Count = 64
    learning_rate: Positive = 1e-3
    latent: Count = 100
    width: Count = 32
    upsampling: Literal["transposed", "nearest"] = "transposed"
    keep: Count = 16
    every: Count = 10
    limit: Positive | None = None

    generator: DCGenerator | Generator | None = field(default=None, init=False)
    optimiser: torch.optim.Optimizer | None = field(default=None, init=False)
    codes: Tensor = field(default_factory=lambda: torch.zeros(0), init=False)
    last: int = field(default=-1, init=False)  # round in which the generator was trained
    kept: dict[int, Tensor] = field(default_factory=dict, init=False)

    def __call__(self, step: ClientStep) -> dict[str, Tensor]:
        """Return what honest training on the poisoned batches gives."""
        if step.round < self.start:
            return step.train(step.batches, self.limit)
        self.check(step.task_info, records=step.records is not None)
        if step.round > self.last:  # colluders who come later in the round find it done
            self._train(step)
            self._keep(step.round)
            self.last = step.round
        assert self.generator is not None
        generated = step.task_info.normalise(self._draw(_codes(self.images, self.latent, step.generator)))
        label = (self.target + 1) % (step.task_info.num_classes or 1) if self.label is None else self.label
        parts = generated.tensor_split(len(step.batches))
        poisoned = [
            (torch.cat([inputs, part]), torch.cat([targets, targets.new_full((len(part),), label)]))
            for (inputs, targets), part in zip(step.batches, parts, strict=True)
        ]
        return step.train(poisoned, self.limit)

    def check(self, task_info: TaskInfo, records: bool) -> None:  # noqa: ARG002 (it needs none)
        """Refuse clients who train no image classifier, and classes that it doesn't have."""
        if task_info.kind not in self.examples or task_info.num_classes is None:
            raise BadInput("the behaviour 'gan' generates images of a class; these clients train no image classifier")
        if task_info.outputs == 1:
            raise BadInput("the behaviour 'gan' needs one logit a class; give the model two outputs, and cross-entropy")
        self._spec(task_info.input_shape)
        classes = task_info.num_classes
        if self.target >= classes:
            raise BadInput(f"the behaviour 'gan': target is {self.target}, but classes are 0 to {classes - 1}")
        if self.label is not None and self.label >= task_info.outputs:
            raise BadInput(
                f"the behaviour 'gan': label is {self.label}, but the model's outputs are 0 to "
                f"{task_info.outputs - 1}; for a label that no example has, model.extra_classes is to be "
                f"{self.label + 1 - classes}"
            )

    def _train(self, step: ClientStep) -> None:
        """Train the generator to generate what the model of the round takes for the target."""
        generator, optimiser = self._ready(step)
        modes = {part: part.training for part in step.model.modules()}
        step.model.eval()
        targets = torch.full((self.batch_size,), self.target, device=step.device)
        for _ in range(self.steps):
            generated = generator.train()(_codes(self.batch_size, self.latent, step.generator).to(step.device))
            value = nn.functional.cross_entropy(step.model(step.task_info.normalise(generated)), targets)
            parameters = list(generator.parameters())
            for parameter, grad in zip(parameters, torch.autograd.grad(value, parameters), strict=True):
                parameter.grad = grad
            optimiser.step()
        for part, mode in modes.items():
            part.training = mode

    def _ready(self, step: ClientStep) -> tuple[nn.Module, torch.optim.Optimizer]:
        rng = step.generator
        if self.generator is None or self.optimiser is None:
            self._build(step.task_info.input_shape, int(torch.randint(2**31, (1,), generator=rng)), step.device)
            self.codes = _codes(self.keep, self.latent, rng)
        assert self.generator is not None
        assert self.optimiser is not None
        return self.generator, self.optimiser

    def _build(self, shape: tuple[int, ...], seed: int, device: torch.device) -> None:
        spec = self._spec(shape)
        with local_randomness(seed):
            self.generator = (Generator(spec) if self.upsampling == "nearest" else DCGenerator(spec)).to(device)
        self.optimiser = torch.optim.Adam(self.generator.parameters(), lr=self.learning_rate, betas=(0.5, 0.999))

    def _spec(self, shape: tuple[int, ...]) -> GeneratorSpec:
        if self.upsampling == "nearest" and self.width % 8:
            raise BadInput(f"the behaviour 'gan': with upsampling nearest, width is a multiple of 8, not {self.width}")
        channels, height, width = shape
        # a Generator counts its channels at the image's own size, a DCGenerator at half of it
        own = self.width // 2 if self.upsampling == "nearest" else self.width
        return GeneratorSpec((channels, height, width), self.latent, own)

    def _keep(self, index: int) -> None:
        if (self.last - self.start) % self.every:
            self.kept.pop(self.last, None)
        self.kept[index] = self._draw(self.codes).cpu()

    def _draw(self, codes: Tensor) -> Tensor:
        """Return the images of ``codes``; none of them depends on the others."""
        assert self.generator is not None
        with torch.no_grad():
            images: Tensor = self.generator.eval()(codes.to(next(self.generator.parameters()).device))
        return images

    def adversary_log(self) -> dict[str, Tensor]:
        """Return the images that were kept, by round, and the target."""
        images = {f"{_ROUND}{index:05d}": kept for index, kept in self.kept.items()}
        return {**images, _TARGET: torch.tensor(self.target)} if images else {}

    def state_dict(self) -> dict[str, Any]:
        """Return the generator, its optimiser and the images, for a checkpoint."""
        if self.generator is None or self.optimiser is None:
            return {}
        return {
            "shape": list(self.generator.spec.input_shape),
            "device": str(next(self.generator.parameters()).device),
            "generator": self.generator.state_dict(),
            "optimiser": self.optimiser.state_dict(),
            "codes": self.codes,
            "last": self.last,
            "kept": self.kept,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what :meth:`state_dict` returned."""
        if not state:
            return
        self._build(tuple(state["shape"]), 0, torch.device(state["device"]))
        assert self.generator is not None
        assert self.optimiser is not None
        self.generator.load_state_dict(state["generator"])
        self.optimiser.load_state_dict(state["optimiser"])
        self.codes, self.last, self.kept = state["codes"], state["last"], state["kept"]


@register(frozen=False)
class AdaptiveGANClient(GANClient):
    """The GAN client that stays near the global model: ‖w − w_global‖_∞ ≤ τ, by projection after each local step.

    The adaptive attack against InferGuard, of the InferGuard paper's evaluation, which takes τ = 0.0016 on MNIST.
    """

    name = "gan-adaptive"
    summary = "as gan, but no parameter moves farther than a limit, so that the server suspects nothing"

    limit: Positive | None = 0.0016


def _codes(count: int, latent: int, generator: torch.Generator) -> Tensor:
    return torch.randn((count, latent), generator=generator)


@register
class GAN(Attack):
    """What a malicious client with a GAN has generated by the end (Hitaj et al. 2017).

    The images are generated in the federation, by clients whose behaviour is ``gan`` or ``gan-adaptive``
    (``federations[].malicious``); this attack returns what their adversary log holds.
    """

    name = "gan"
    summary = "images of a class that a malicious client generates with the global model as discriminator"
    paper = "Hitaj et al. 2017 (Deep Models Under the GAN)"
    threat_model = "client, active"
    needs = (
        "images and a classifier",
        "malicious clients with a GAN (federations[].malicious: gan or gan-adaptive)",
    )
    default_scope = "federation"
    examples = ("image",)
    recovers = "images of a class"
    finds = ClassImagesFinding
    standards = ("NISTAML.026", "AML.T0020")  # it trains on images that it made up

    @classmethod
    def fits(cls, case: Case) -> bool:
        return case.malicious == cls.name

    def check(self, observation: Observation) -> None:
        """Refuse where nobody has generated anything."""
        observation.need_client(self.name)
        super().check(observation)
        if _TARGET not in observation.adversary_log:
            raise NotApplicable(
                f"no client of this federation generates images (until its last round); set malicious: {self.name}, "
                "and its start below the number of rounds"
            )

    def _run(self, observation: Observation, *_: object) -> ClassImagesFinding:
        """Return what was drawn; BadInput where the log, as it was read from a file, holds something else."""
        names = sorted(name for name in observation.adversary_log if name.startswith(_ROUND))
        _check_log(observation, names)
        return ClassImagesFinding(
            images=torch.stack([observation.adversary_log[name] for name in names]),
            rounds=tuple(int(name.removeprefix(_ROUND)) for name in names),
            target=int(observation.adversary_log[_TARGET]),
        )


def _check_log(observation: Observation, names: list[str]) -> None:
    """Refuse a log, perhaps read from a file, that isn't of images of a class, as many in every round."""
    log, info = observation.adversary_log, observation.task_info
    drawn, target = [log[name] for name in names], log[_TARGET]
    shapes = {tuple(images.shape) for images in drawn}
    shape = next(iter(shapes), ())
    fits = len(shapes) == 1 and shape[1:] == info.input_shape and 0 not in shape
    fits = fits and all(images.dtype == torch.float32 for images in drawn)
    fits = fits and all(bool(((images >= 0) & (images <= 1)).all()) for images in drawn)
    fits = fits and all(re.fullmatch(r"\d{1,9}", name.removeprefix(_ROUND), re.ASCII) for name in names)
    if not fits or target.numel() != 1 or target.dtype != torch.int64 or not 0 <= target < (info.num_classes or 0):
        raise BadInput("what the malicious client recorded are no images of a class of this federation; simulate again")
