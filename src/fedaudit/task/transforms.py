"""Transformations of images by name and strength, in torch alone and differentiable: what ATS puts together.

A policy is a line such as ``translate-x:9, contrast:6``: one after the other, each with a magnitude from 0 to 9. The
ranges are AutoAugment's (Cubuk et al. 2019, Table 6), the sign is always positive, and a magnitude's formula stands
beside each. Departures from Pillow's: values are real numbers, movements are bilinear, and what has no useful
derivative (equalize, posterize) isn't here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.nn.functional import affine_grid, conv2d, grid_sample

from fedaudit.task.info import TaskInfo
from fedaudit.utils.errors import BadInput, unknown_name

STRENGTHS = 10
_GREY = 128 / 255  # what comes in from outside of the image
_LUMINANCE = (0.299, 0.587, 0.114)  # ITU-R 601

Steps = tuple[tuple[str, int], ...]


def _moved(images: Tensor, matrix: tuple[float, float, float, float, float, float]) -> Tensor:
    """Return images whose pixel at (x, y) is the old one at ``matrix``·(x, y, 1), in units of half a side."""
    theta = images.new_tensor(matrix).view(1, 2, 3).expand(len(images), 2, 3)
    grid = affine_grid(theta, list(images.shape), align_corners=False)
    return grid_sample(images - _GREY, grid, align_corners=False) + _GREY


def _rotated(images: Tensor, m: float) -> Tensor:
    angle, ratio = math.radians(30 * m), images.shape[3] / images.shape[2]
    cos, sin = math.cos(angle), math.sin(angle)
    return _moved(images, (cos, -sin / ratio, 0.0, sin * ratio, cos, 0.0))


def _grey(images: Tensor) -> Tensor:
    """Return the (n, 1, H, W) luminance; of other than three channels the mean."""
    if images.shape[1] != 3:
        return images.mean(dim=1, keepdim=True)
    return torch.einsum("nchw,c->nhw", images, images.new_tensor(_LUMINANCE)).unsqueeze(1)


def _smooth(images: Tensor) -> Tensor:
    """Return Pillow's SMOOTH: a 3x3 kernel of ones with 5 in the middle; the border stays."""
    kernel = images.new_ones(1, 1, 3, 3)
    kernel[0, 0, 1, 1] = 5
    inner = conv2d(images.flatten(0, 1).unsqueeze(1), kernel / 13).view(
        *images.shape[:2], *(n - 2 for n in images.shape[2:])
    )
    rows = torch.cat([images[:, :, :1, 1:-1], inner, images[:, :, -1:, 1:-1]], dim=2)
    return torch.cat([images[..., :1], rows, images[..., -1:]], dim=3)


def _blended(plain: Callable[[Tensor], Tensor]) -> Callable[[Tensor, float], Tensor]:
    """Return Pillow's enhancement by the factor 1 + 0.9·m: away from what ``plain`` makes of the images."""
    return lambda images, m: (plain(images) + (1 + 0.9 * m) * (images - plain(images))).clamp(0, 1)


def _stretched(images: Tensor, _: float) -> Tensor:
    low, high = images.amin(dim=(2, 3), keepdim=True), images.amax(dim=(2, 3), keepdim=True)
    return (images - low) / (high - low).clamp(min=1e-6)


# Of images (n, C, H, W) in [0, 1] and a magnitude m from 0 to 1.
TRANSFORMS: Mapping[str, Callable[[Tensor, float], Tensor]] = {
    "shear-x": lambda images, m: _moved(images, (1.0, 0.3 * m, 0.0, 0.0, 1.0, 0.0)),
    "shear-y": lambda images, m: _moved(images, (1.0, 0.0, 0.0, 0.3 * m, 1.0, 0.0)),
    "translate-x": lambda images, m: _moved(images, (1.0, 0.0, 2 * 150 / 331 * m, 0.0, 1.0, 0.0)),
    "translate-y": lambda images, m: _moved(images, (1.0, 0.0, 0.0, 0.0, 1.0, 2 * 150 / 331 * m)),
    "rotate": _rotated,
    "brightness": _blended(torch.zeros_like),
    "contrast": _blended(lambda images: _grey(images).mean(dim=(2, 3), keepdim=True).expand_as(images)),
    "color": _blended(lambda images: _grey(images).expand_as(images)),
    "sharpness": _blended(_smooth),
    "autocontrast": _stretched,
    "invert": lambda images, _: 1 - images,
    "solarize": lambda images, m: torch.where(images >= 1 - m, 1 - images, images),
}


def parsed(policy: str) -> Steps:
    """Return the transformations of a policy, each with its magnitude from 0 to 9."""
    steps = []
    for part in policy.split(","):
        name, _, magnitude = part.strip().partition(":")
        if name not in TRANSFORMS:
            raise BadInput(f"policy '{policy}': {unknown_name('transformation', name, list(TRANSFORMS))}")
        if not (magnitude.isascii() and magnitude.isdigit() and int(magnitude) < STRENGTHS):
            raise BadInput(
                f"policy '{policy}': '{part.strip()}' needs a magnitude from 0 to {STRENGTHS - 1}, as in {name}:5"
            )
        steps.append((name, int(magnitude)))
    return tuple(steps)


def transformed(policy: str, inputs: Tensor, task_info: TaskInfo) -> Tensor:
    """Return what a :func:`parsed` policy makes of normalised images (n, C, H, W), H and W above 2; differentiable."""
    if inputs.ndim != 4 or task_info.example_kind.bounds is None or min(inputs.shape[2:]) < 3:
        raise BadInput(
            f"transformations are for images of 3 pixels or more a side, not for {task_info.example_kind.described}"
        )
    images = task_info.denormalise(inputs)
    for name, magnitude in parsed(policy):
        images = TRANSFORMS[name](images, magnitude / (STRENGTHS - 1))
    return task_info.normalise(images)
