"""Generators of images: codes to pixels."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, floor, log2, prod
from typing import ClassVar

from pydantic import ConfigDict
from torch import Tensor, nn

from fedaudit.utils.errors import BadInput

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


class GeneratorNetwork(nn.Module):
    """What generators share: codes (n, latent) to a small map, and that to pixels (n, C, H, W) in [0, 1]."""

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


class Generator(GeneratorNetwork):
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
