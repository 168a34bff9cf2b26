"""Volumes: (channels, depth, height, width) voxels in [0, 1], as of CT and MRI."""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from torch import Tensor

from fedaudit.modalities.base import ExampleKind, channel_statistics, in_depth, lightened, register
from fedaudit.utils.errors import BadInput

_MIN_STD = 1e-3  # a channel that never varies is divided by one, not by nothing
_WIDTH = 288  # pixels that the planes of a small volume are wide together, about
_BLOBS = 12  # in a volume that is made up
_ENDS, _WIDER = 0.001, 4  # of voxels at either end, which may be outliers, and how much wider they make the range


class Volume(ExampleKind):
    """Volumes, which models see with each channel's mean and standard deviation over the train split taken out."""

    name: ClassVar[str] = "volume"
    summary: ClassVar[str] = "volumes such as CT or MRI, (C, D, H, W) voxels in [0, 1]"
    plural: ClassVar[str] = "volumes"
    described: ClassVar[str] = "volumes"
    axes: ClassVar[tuple[str, ...]] = ("channels", "depth", "height", "width")
    letters: ClassVar[str] = "C, D, H, W"
    arrays: ClassVar[str] = "(n, C, D, H, W) or (n, D, H, W)"
    array_axes: ClassVar[tuple[int, ...]] = (5, 4)
    element: ClassVar[str] = "voxel"
    bounds: ClassVar[tuple[float, float] | None] = (0.0, 1.0)
    drawing: ClassVar[str] = (
        "A picture shows three planes through a volume's middle, from left to right: axial (across the depth), coronal "
        "(across the height) and sagittal (across the width); in the latter two the depth runs upwards. Where all but "
        "the outermost thousandths of the true volume's voxels lie within less than a quarter of the range, black and "
        "white are the ends of that part, in the reconstruction's picture, too."
    )

    def channels(self, shape: tuple[int, ...]) -> int:
        """Return C of (C, D, H, W)."""
        return shape[0]

    def read(self, array: Tensor, where: str) -> Tensor:
        """Return (n, C, D, H, W) or (n, D, H, W) as (n, C, D, H, W): uint8 as float32 in [0, 1].

        What :meth:`scaled` is to scale stays as it is: other whole numbers as int32, floats as float32.
        """
        x = array[:, None] if array.ndim == 4 else array
        if x.dtype == torch.uint8:
            return x.float().div_(255).contiguous()
        if x.is_floating_point():
            x = x.float().contiguous()
            self.check_finite(x, where)
            return x
        if x.dtype not in (torch.int8, torch.int16, torch.uint16, torch.int32):
            raise BadInput(f"{where}: volumes of {x.dtype} cannot be used; give uint8, uint16, int16 or floats")
        return x.to(torch.int32).contiguous()

    def scaled(self, train: Tensor, test: Tensor, where: str) -> tuple[Tensor, Tensor, str]:
        """Return both splits in [0, 1], and in words how: a voxel's value is the scaled one times the width, plus low.

        Whole numbers are scaled by the range of their depth: 0 to 4095 where 12 bits hold them, −1024 to 3071 where
        they are Hounsfield units, else 16 bits. Floats in [0, 1] stay; others are scaled by the train split's range,
        all channels alike, and the test split's voxels beyond are clipped. Where a thousandth of the voxels at either
        end makes that range more than four times as wide (a metal artefact, a broken voxel), it ends there and the rest
        is clipped: else all contrast would lie in a part of [0, 1], and PSNR, over that whole range, would count
        visible differences as none.
        """
        if train.is_floating_point() != test.is_floating_point():
            raise BadInput(f"{where}: one split has whole numbers, and the other hasn't; give both in the same form")
        if not train.is_floating_point():
            first, second, said = in_depth(train, test, where, self.plural)
            return first, second, said + _narrow(first)
        low, high = float(train.min()), float(train.max())
        if low >= 0 and high <= 1 and float(test.min()) >= 0 and float(test.max()) <= 1:
            train, test, said = lightened(train, test)
            return train, test, (said + _narrow(train)).removeprefix("; ")
        if low == high:
            raise BadInput(f"{where}: all voxels of the train split are {low:g}; there is nothing to scale them by")
        what, whose = "the train split's range", "the test split"
        inner = _without_ends(train, _ENDS)
        if inner[0] < inner[1] and high - low > _WIDER * (inner[1] - inner[0]):
            (low, high), whose = inner, "both splits"
            what = f"the train split's range but for the outermost {_ENDS:.1%} at either end, which lie far off"
        first, second = ((x.double() - low).div_(high - low).clamp_(0, 1).float() for x in (train, test))
        beyond = sum(int(((x < low) | (x > high)).sum()) for x in (train, test))
        cut = f", {beyond:,} voxels of {whose} beyond it clipped" if beyond else ""
        return first, second, f"values {low:.6g} to {high:.6g}, {what}, are scaled to [0, 1]{cut}"

    def said(self, given: tuple[int, ...], read: tuple[int, ...]) -> str:
        """Return what was taken for a volume, where it has no channels, or more than four."""
        if len(given) == len(read) and read[0] <= 4:
            return ""
        channels, sides = _count(read[0]), " x ".join(map(str, read[1:]))
        return f"inputs of shape {given} are taken for volumes of {channels}, {sides} voxels"

    def prepare(self, train: Tensor, test: Tensor) -> tuple[Tensor, Tensor, tuple[float, ...], tuple[float, ...]]:
        """Return both splits as they are, with the mean and standard deviation of the train split's channels."""
        means, stds = channel_statistics(train)
        return train, test, means, tuple(s if s >= _MIN_STD else 1.0 for s in stds)

    def draw(self, examples: Tensor) -> Tensor:
        """Return (k, C, D, H, W) volumes side by side, of each the planes through its middle.

        From left to right: axial (H, W), coronal (D, W), sagittal (D, H); the depth of the latter two runs upwards, as
        radiologists draw them where the first slice is the lowest. One voxel of grey between, two between volumes.
        Other than 1 or 3 channels are drawn below one another. Small volumes are enlarged by a whole factor. Where all
        but the outermost thousandths of the first volume's voxels lie within a quarter of [0, 1], these are stretched.
        """
        return self._drawn(examples, examples[0])

    def draw_over(self, recovered: Tensor, true: Tensor) -> Tensor:
        """Return the planes of what was recovered, black and white as in the true volume's drawing."""
        return self._drawn(recovered[None], true)

    def _drawn(self, examples: Tensor, like: Tensor) -> Tensor:
        low, high = _without_ends(like, _ENDS)
        if low < high and _WIDER * (high - low) < 1:
            examples = ((examples - low) / (high - low)).clamp(0, 1)
        sheet = _beside([_planes(volume) for volume in examples], 2)
        larger = max(1, round(_WIDTH / _planes(examples[0]).shape[2]))
        return sheet.repeat_interleave(larger, dim=1).repeat_interleave(larger, dim=2)

    def drawn_up(self, shape: tuple[int, ...], count: int, mean: Tensor, std: Tensor) -> Tensor | None:
        """Return volumes of ellipsoids that hide each other, of the data's brightness and contrast."""
        rng = torch.Generator().manual_seed(0)
        channels, *sides = shape
        axes = [torch.linspace(-1, 1, side) if side > 1 else torch.zeros(1) for side in sides]
        grid = torch.stack(torch.meshgrid(*axes, indexing="ij"))  # (3, D, H, W)
        volumes = torch.zeros(count, *shape)
        for volume in volumes:
            for _ in range(_BLOBS):
                centre = (1.6 * torch.rand(3, generator=rng) - 0.8).view(3, 1, 1, 1)
                radius = (0.15 + 0.5 * torch.rand(3, generator=rng)).view(3, 1, 1, 1)
                inside = ((grid - centre) / radius).square().sum(dim=0) < 1
                volume[:, inside] = torch.randn(channels, 1, generator=rng)
        at = (1, channels, 1, 1, 1)
        means, stds = (torch.tensor(values).view(at) for values in channel_statistics(volumes))
        volumes = (volumes - means) / stds.clamp_min(_MIN_STD)
        return (mean.view(at) + std.view(at) * volumes).clamp_(0, 1)


def _narrow(voxels: Tensor) -> str:
    """Return what is to be said of voxels in [0, 1] of which nearly all lie in a small part of it; "" of others."""
    low, high = _without_ends(voxels, _ENDS)
    if not low < high or _WIDER * (high - low) >= 1:
        return ""
    return (
        f"; all voxels but the outermost {_ENDS:.1%} at either end lie in {low:.3g} to {high:.3g}: PSNR is of [0, 1] "
        "and flatters them, so clip the others and scale these to [0, 1]"
    )


def _without_ends(voxels: Tensor, share: float) -> tuple[float, float]:
    """Return the least and the largest value of voxels, a ``share`` of them (at least one) left out at either end."""
    values = voxels.detach().flatten()
    left = min(math.ceil(share * len(values)), (len(values) - 1) // 2)
    # twice kthvalue: quantile takes 16 million values at most
    return float(values.kthvalue(left + 1).values), float(values.kthvalue(len(values) - left).values)


def _count(channels: int) -> str:
    return "1 channel" if channels == 1 else f"{channels} channels"


def _planes(volume: Tensor) -> Tensor:
    """Return the three planes of (C, D, H, W) as one drawing, (1 or 3, height, width)."""
    _, depth, height, width = volume.shape
    planes = [volume[:, depth // 2], volume[:, :, height // 2].flip(1), volume[..., width // 2].flip(1)]
    if volume.shape[0] in (1, 3):
        return _beside(planes, 1)
    rows = [_beside([plane[band, None] for plane in planes], 1) for band in range(volume.shape[0])]
    return _beside([row.transpose(1, 2) for row in rows], 1).transpose(1, 2)


def _beside(pictures: list[Tensor], gap: int) -> Tensor:
    """Return pictures (C, H, W) of any sizes side by side, centred, on grey with ``gap`` columns of it between."""
    height = max(picture.shape[1] for picture in pictures)
    width = sum(picture.shape[2] for picture in pictures) + gap * (len(pictures) - 1)
    sheet = pictures[0].new_full((pictures[0].shape[0], height, width), 0.5)
    left = 0
    for picture in pictures:
        top = (height - picture.shape[1]) // 2
        sheet[:, top : top + picture.shape[1], left : left + picture.shape[2]] = picture
        left += picture.shape[2] + gap
    return sheet


VOLUME = register(Volume())
