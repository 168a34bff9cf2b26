"""Generators of images: the network, its file, and the fingerprints of the examples that it was trained on."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from math import ceil, floor, log2, prod
from pathlib import Path
from typing import ClassVar

import torch
from pydantic import ConfigDict, TypeAdapter, ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from fedaudit.utils.bounds import TENSORS, check_file
from fedaudit.utils.errors import BadInput, MissingData
from fedaudit.utils.finite import all_finite

_FORMAT = 1
_EXAMPLES = "examples"  # the fingerprints' name in the file
_SLOPE = 0.2


@dataclass(frozen=True)
class GeneratorSpec:
    """What a generator is like; ``width`` counts channels at the image's own size, doubled at every halving of it."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")  # where it is read from a file

    input_shape: tuple[int, int, int]
    latent: int = 128
    width: int = 16

    def __post_init__(self) -> None:
        if min(self.input_shape) < 1 or min(self.input_shape[1:]) < 4 or max(self.input_shape) > 1024:
            raise BadInput(f"a generator makes images of 4 to 1024 pixels, not of shape {self.input_shape}")
        if not 1 <= self.latent <= 4096 or not 4 <= self.width <= 512 or self.width % 4:
            raise BadInput(f"latent is {self.latent} (1 to 4096), width {self.width} (4 to 512, a multiple of 4)")

    @property
    def halvings(self) -> int:
        """How often the image is halved down to the smallest map, of 4 to 7 pixels."""
        return max(1, floor(log2(min(self.input_shape[1:]) / 4))) if min(self.input_shape[1:]) >= 8 else 0


class _Network(nn.Module):
    """Codes (n, latent) to a small map, and that to pixels (n, C, H, W) in [0, 1]."""

    spec: GeneratorSpec
    smallest: tuple[int, ...]
    start: nn.Linear
    grow: nn.Sequential

    def forward(self, codes: Tensor) -> Tensor:
        """Return the images of ``codes``."""
        height, width = self.spec.input_shape[1:]
        images: Tensor = self.grow(self.start(codes).view(len(codes), *self.smallest))
        top, left = (images.shape[2] - height) // 2, (images.shape[3] - width) // 2
        return images[..., top : top + height, left : left + width]


class Generator(_Network):
    """Codes (n, latent) to pixels (n, C, H, W) in [0, 1].

    After DCGAN (Radford et al. 2016). Departures: doubling by repetition and a convolution instead of transposed
    convolutions, which leave a chessboard; normalisation over groups of channels instead of the batch, so that an image
    doesn't depend on the others; a sigmoid at the end.
    """

    def __init__(self, spec: GeneratorSpec) -> None:
        super().__init__()
        self.spec = spec
        channels, *sides = spec.input_shape
        self.smallest = (spec.width << spec.halvings, *(ceil(side / (1 << spec.halvings)) for side in sides))
        self.start = nn.Linear(spec.latent, prod(self.smallest))
        layers: list[nn.Module] = [nn.GroupNorm(4, self.smallest[0]), nn.LeakyReLU(_SLOPE)]
        for i in reversed(range(spec.halvings)):
            inputs, outputs = spec.width << (i + 1), spec.width << i
            layers += [nn.Upsample(scale_factor=2), nn.Conv2d(inputs, outputs, 3, padding=1)]
            layers += [nn.GroupNorm(4, outputs), nn.LeakyReLU(_SLOPE)]
        self.grow = nn.Sequential(*layers, nn.Conv2d(spec.width, channels, 3, padding=1), nn.Sigmoid())


class DCGenerator(_Network):
    """DCGAN's generator (Radford et al. 2016): codes (n, latent) to pixels (n, C, H, W) in [0, 1].

    Transposed convolutions of stride 2, batch normalisation and ReLU. Departures: ``spec.width`` channels at half the
    image's size; a sigmoid at the end instead of tanh, whose range is another. Where the image's sides can't be halved
    often enough, larger images are made and cut.
    """

    def __init__(self, spec: GeneratorSpec) -> None:
        super().__init__()
        self.spec = spec
        channels, *sides = spec.input_shape
        halvings = max(1, spec.halvings)
        self.smallest = (spec.width << (halvings - 1), *(ceil(side / (1 << halvings)) for side in sides))
        self.start = nn.Linear(spec.latent, prod(self.smallest))
        layers: list[nn.Module] = [nn.BatchNorm2d(self.smallest[0]), nn.ReLU()]
        for i in reversed(range(1, halvings)):
            inputs, outputs = spec.width << i, spec.width << (i - 1)
            layers += [nn.ConvTranspose2d(inputs, outputs, 4, 2, 1), nn.BatchNorm2d(outputs), nn.ReLU()]
        self.grow = nn.Sequential(*layers, nn.ConvTranspose2d(spec.width, channels, 4, 2, 1), nn.Sigmoid())


def trunk(spec: GeneratorSpec, outputs: int) -> nn.Sequential:
    """Return the mirror image of a generator: pixels (n, C, H, W) to (n, outputs), by convolutions of stride 2."""
    channels, *sides = spec.input_shape
    layers: list[nn.Module] = [nn.Conv2d(channels, spec.width, 3, padding=1), nn.LeakyReLU(_SLOPE)]
    for i in range(spec.halvings):
        layers += [nn.Conv2d(spec.width << i, spec.width << (i + 1), 4, stride=2, padding=1), nn.LeakyReLU(_SLOPE)]
    pixels = prod(side >> spec.halvings for side in sides)
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear((spec.width << spec.halvings) * pixels, outputs))


@dataclass(frozen=True, eq=False)
class TrainedGenerator:
    """A generator in evaluation mode, and where it comes from.

    Attributes:
        examples: (n,) int64 sorted fingerprints of what it was trained on.
        computation: fingerprint of plan, examples and code of its training; None where the file is older than that.
    """

    network: Generator
    data: str
    training: str
    examples: Tensor
    computation: str | None = None

    def save(self, path: Path) -> None:
        """Write one safetensors file."""
        about = {
            "format": _FORMAT,
            "data": self.data,
            "training": self.training,
            "spec": asdict(self.network.spec),
            "computation": self.computation,
        }
        tensors = {name: t.detach().cpu().contiguous() for name, t in self.network.state_dict().items()}
        draft = path.with_name(f"{path.name}.part")
        try:
            draft.write_bytes(save({**tensors, _EXAMPLES: self.examples}, metadata={"about": json.dumps(about)}))
            draft.replace(path)
        except (OSError, SafetensorError) as error:
            raise BadInput(f"can't write the generator to '{path}': {error}") from None

    @classmethod
    def load(cls, path: Path) -> TrainedGenerator:
        """Read what :meth:`save` wrote; MissingData without such a file, BadInput where it is something else."""
        if not path.is_file():
            raise MissingData(f"no generator at '{path}'")
        try:
            check_file(path, TENSORS)
            with safe_open(path, framework="pt") as file:
                about = json.loads((file.metadata() or {})["about"])
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
            if about["format"] != _FORMAT:
                raise ValueError(f"format {about['format']}, this version reads {_FORMAT}")
            spec = TypeAdapter(GeneratorSpec).validate_python(about["spec"])
            examples = tensors.pop(_EXAMPLES)
            if examples.dtype != torch.int64 or not all_finite(tensors.values()):
                raise ValueError("a value isn't finite, or the examples are no fingerprints")
            with torch.device("meta"):  # no weights are drawn that are replaced at once
                network = Generator(spec)
            network.load_state_dict(tensors, assign=True)
            computed = about.get("computation")
            return cls(network.eval(), str(about["data"]), str(about["training"]), examples, computed and str(computed))
        except (SafetensorError, OSError, KeyError, TypeError, ValueError, RuntimeError, ValidationError) as error:
            reason = (str(error).splitlines() or [""])[0]
            raise BadInput(f"'{path}' is truncated or not a generator ({reason}); train it again") from None
