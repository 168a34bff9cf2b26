"""Trains the denoiser of agic-plus on dead leaves, and writes its weights: python -m tools.measure.train_denoiser."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional

from fedaudit.attacks.inversion.priors import WEIGHTS, Denoiser

_IMAGES = 4000
_SIDE = 32
_FINER = 2  # pixels a side that are drawn for one: their mean has no stairs
_STEPS = 3500
_STRONGEST = 0.255  # standard deviation of the noise
Array = np.ndarray[Any, Any]


def main() -> None:
    """Draw, train for some six minutes of a core, and write."""
    torch.manual_seed(0)
    network = train(dead_leaves(np.random.default_rng(0), _IMAGES))
    save_file({name: tensor.half().contiguous() for name, tensor in network.state_dict().items()}, WEIGHTS)


def dead_leaves(rng: np.random.Generator, count: int) -> Tensor:
    """Return (count, 3, 32, 32) images of discs and rectangles that hide each other (Lee, Mumford and Huang 2001).

    Their sizes follow a cube law, so that what is seen doesn't depend on scale; colours of an image are near each
    other, as in photographs; leaves are shaded and some striped; images are blurred more or less.
    """
    return torch.stack([_picture(rng) for _ in range(count)])


def _picture(rng: np.random.Generator) -> Tensor:
    side = _SIDE * _FINER
    down, right = np.mgrid[0:side, 0:side].astype(np.float32) / side
    chroma = abs(rng.normal()) * 0.12 * (3 if rng.random() < 0.12 else 1)
    base = rng.random() + chroma * rng.normal(size=3)
    contrast, tint = rng.uniform(0.1, 0.7), rng.uniform(0.05, 0.35)
    image = np.full((side, side, 3), np.clip(base + contrast * rng.normal() * 0.5, 0, 1), np.float32)
    least, most = rng.choice([0.03, 0.06, 0.12, 0.2]), 0.8
    leaves = int(rng.choice([12, 30, 80, 160]))
    for radius in (least**-2 + (most**-2 - least**-2) * rng.random(leaves)) ** -0.5:
        _draw(image, down, right, radius, base + contrast * (rng.normal() * 0.6 + rng.normal(size=3) * tint), rng)
    return functional.avg_pool2d(_blurred(torch.from_numpy(image).permute(2, 0, 1), rng.uniform(0, 1.9)), _FINER)


def _draw(image: Array, down: Array, right: Array, radius: float, colour: Array, rng: np.random.Generator) -> None:
    """Draw an ellipse or a rectangle anywhere, turned anyhow."""
    x, y = rng.uniform(-0.2, 1.2, 2)
    angle, flat = rng.uniform(0, math.pi), rng.uniform(0.4, 1)
    along = (right - x) * math.cos(angle) + (down - y) * math.sin(angle)
    across = ((down - y) * math.cos(angle) - (right - x) * math.sin(angle)) / flat
    ellipse = rng.random() < 0.6
    inside = along**2 + across**2 < radius**2 if ellipse else np.maximum(abs(along), abs(across)) < radius
    if not inside.any():
        return
    p, q = along[inside], across[inside]
    shade = 0.5 * (p * rng.normal() + q * rng.normal())[:, None] * rng.normal(size=3) * 0.12
    shade = shade + (0.6 * p * rng.normal())[:, None]
    if rng.random() < 0.4:
        waves = np.sin(rng.uniform(10, 60) * p + rng.uniform(0, 6))
        shade = shade + rng.uniform(0.02, 0.12) * waves[:, None]
    image[inside] = np.clip(colour + shade, 0, 1)


def _blurred(image: Tensor, width: float) -> Tensor:
    if width < 0.3:
        return image
    kernel = torch.exp(-(torch.arange(-6, 7) ** 2) / (2 * width**2))
    kernel /= kernel.sum()
    wide = functional.pad(image[:, None], (6, 6, 6, 6), mode="reflect")
    return functional.conv2d(functional.conv2d(wide, kernel.view(1, 1, 1, -1)), kernel.view(1, 1, -1, 1))[:, 0]


def train(images: Tensor) -> Denoiser:
    """Return a denoiser trained on ``images``: squared errors, those of weak noise weighing more."""
    network = Denoiser()
    network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    optimiser = torch.optim.Adam(network.parameters())
    rates = torch.optim.lr_scheduler.OneCycleLR(optimiser, 3e-3, total_steps=_STEPS)
    for step in range(_STEPS):
        batch = images[torch.randint(len(images), (32,))]
        batch = batch.flip(-1) if step % 2 else batch
        batch = batch.transpose(-1, -2) if step % 4 > 1 else batch
        strength = 0.005 + torch.rand(len(batch)) * (_STRONGEST - 0.005)
        noise = torch.randn_like(batch) * strength.view(-1, 1, 1, 1)
        errors = (network(batch + noise, strength) - batch).square().mean(dim=(1, 2, 3))
        optimiser.zero_grad()
        (errors / (strength.square() + 1e-3)).mean().backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimiser.step()
        rates.step()
    return network


if __name__ == "__main__":
    main()
