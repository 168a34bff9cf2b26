"""Images: (channels, height, width) pixels in [0, 1]."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from fedaudit.modalities.base import ExampleKind, channel_statistics, eight_bit, in_depth, lightened, register
from fedaudit.utils.errors import BadInput

_CHANNELS = (1, 3, 4)
_DEEP = (torch.uint16, torch.int16)
_LONG = 4  # times as long as high, or the other way round: an array of three axes that may well be signals
_STEPS = (4095, 65535)  # of 12 and of 16 bits
_NEAR = 0.05  # of a step: normalising and undoing it moves a pixel by less
_MIN_STD = 1e-3  # a channel that never varies is divided by one, not by nothing


class Image(ExampleKind):
    """Images, which models see with each channel's mean and standard deviation over the train split taken out."""

    name: ClassVar[str] = "image"
    summary: ClassVar[str] = "images, (C, H, W) pixels in [0, 1]"
    plural: ClassVar[str] = "images"
    described: ClassVar[str] = "images"
    axes: ClassVar[tuple[str, ...]] = ("channels", "height", "width")
    letters: ClassVar[str] = "C, H, W"
    arrays: ClassVar[str] = "(n, C, H, W), (n, H, W) or (n, H, W, C)"
    array_axes: ClassVar[tuple[int, ...]] = (3, 4)
    element: ClassVar[str] = "pixel"
    bounds: ClassVar[tuple[float, float] | None] = (0.0, 1.0)
    resizable: ClassVar[bool] = True

    def channels(self, shape: tuple[int, ...]) -> int:
        """Return C of (C, H, W)."""
        return shape[0]

    def arrange(self, array: Tensor, where: str, channels: str | None = None) -> Tensor:
        """Return (n, H, W, C) as (n, C, H, W), and the others as they are.

        Channels are 1, 3 or 4, or another number of bands. Where the second and the last axis both have such a length,
        or neither has, the other two decide, if one order alone makes a square of them; for bands, else, the axis that
        is shorter than both others. BadInput: both orders are possible.
        """
        if array.ndim != 4 or channels == "first":
            return array
        _, a, b, c = array.shape
        last = c in _CHANNELS
        if channels is None and last and (a in _CHANNELS or b == c) and max(a, b, c) > 1:
            if (a == b) == (b == c):
                raise BadInput(_which(array, where))
            last = a == b
        elif channels is None and not last and a not in _CHANNELS:  # bands
            last = a == b if (a == b) != (b == c) else c < min(a, b)
            if (a == b == c) or ((a == b) == (b == c) and (c < min(a, b)) == (a < min(b, c))):
                raise BadInput(_which(array, where))
        return array.permute(0, 3, 1, 2) if last or channels == "last" else array

    def read(self, array: Tensor, where: str) -> Tensor:
        """Return (n, C, H, W) or (n, H, W) as (n, C, H, W): uint8, booleans and floats in [0, 1] as float32 in [0, 1].

        Whole numbers of 16 bits stay, as int32: :meth:`scaled` decides their depth by both splits.
        """
        x = array[:, None] if array.ndim == 3 else array
        if x.dtype == torch.uint8:
            return x.float().div_(255).contiguous()
        if x.dtype in _DEEP:
            return x.to(torch.int32).contiguous()
        if not x.is_floating_point() and x.dtype != torch.bool:
            raise BadInput(
                f"{where}: images of {x.dtype} cannot be used; give uint8 in 0..255, uint16 or floats in [0, 1]"
            )
        x = x.float()
        self.check_finite(x, where)
        taken = f"{where}: inputs {tuple(array.shape)} are taken for {_taken_for(tuple(x.shape[1:]))}"
        self.check_bounds(x, taken, f"{_SCALE}. {_others(array.ndim)}")
        return x.contiguous()

    def scaled(self, train: Tensor, test: Tensor, where: str) -> tuple[Tensor, Tensor, str]:
        """Return both splits in [0, 1]: whole numbers of 12 or 16 bits, if both have them, by their depth's range."""
        if train.is_floating_point() and test.is_floating_point():
            return lightened(train, test)
        if train.is_floating_point() or test.is_floating_point():
            raise BadInput(f"{where}: one split has 16 bits a pixel, and the other hasn't; give both in the same form")
        return in_depth(train, test, where, self.plural)

    def check_guess(self, array: Tensor, where: str) -> None:
        """Refuse floats of three axes that are long and low: signals, more likely."""
        if array.ndim == 3 and array.is_floating_point() and max(array.shape[1:]) > _LONG * min(array.shape[1:]):
            raise BadInput(
                f"{where}: inputs of shape {tuple(array.shape)} may be signals (n, C, T) or grey images; say which, "
                f"kind='signal' or kind='image': {_WHERE}"
            )

    def said(self, given: tuple[int, ...], read: tuple[int, ...]) -> str:
        """Return what was taken for an image, where it has no channels, or not 1, 3 or 4."""
        plain = len(given) == len(read) and read[0] in _CHANNELS
        return "" if plain else f"inputs of shape {given} are taken for {_taken_for(read)}"

    def prepare(self, train: Tensor, test: Tensor) -> tuple[Tensor, Tensor, tuple[float, ...], tuple[float, ...]]:
        """Return both splits as they are, with the mean and standard deviation of the train split's channels."""
        return (train, test, *image_statistics(train))

    def stored(self, examples: Tensor) -> Sequence[Tensor]:
        """Return the pixels of 8 bits; where they are steps of 12 or 16 bits, these steps.

        Others, as resizing makes them, are told apart by 8 bits: their last bits are the resizer's.
        """
        kept = list(eight_bit(examples))
        pixels = examples.detach().cpu().double().flatten(1)
        unknown = ~_in_steps(pixels, 255)
        for most in _STEPS:
            deep = unknown & _in_steps(pixels, most)
            for row in deep.nonzero()[:, 0].tolist():
                kept[row] = (examples[row].detach().cpu().double() * most).round().to(torch.int32)
            unknown &= ~deep
        return kept

    def draw(self, examples: Tensor) -> Tensor:
        """Return (k, C, H, W) images side by side, one pixel of grey between: white reads as a part of white shapes."""
        gap = examples.new_full((*examples.shape[1:3], 1), 0.5)
        parts = [part for image in examples for part in (image, gap)]
        return torch.cat(parts[:-1], dim=2)


def _in_steps(pixels: Tensor, most: int) -> Tensor:
    """Return (n,) whether all pixels (n, p) are multiples of 1 / most, but for float32's rounding."""
    steps = pixels * most
    return (steps - steps.round()).abs().amax(dim=1) < _NEAR


def _others(axes: int) -> str:
    """Return what an array of so many axes may be if it isn't of images, and how to say so."""
    if axes == 3:
        return f"if these are signals (n, C, T), such as series or ECGs, say kind='signal': {_WHERE}."
    return (
        f"if these are volumes (n, D, H, W), such as CT or MRI, say kind='volume': {_WHERE}; of images with "
        "other channels than 1, 3 or 4 channels='first' or 'last' says where they stand."
    )


_WHERE = "Dataset.from_tensors(…, kind=…), audit(…, kind=…), or data.kind in a scenario"
_SCALE = "give uint8, or scale them first: normalisation is done here, so undo any that was done before"


def _which(array: Tensor, where: str) -> str:
    return (
        f"{where}: the channels of images {tuple(array.shape)} may stand first or last; say which: "
        "Dataset.from_tensors(…, channels='first') or 'last'; if these are volumes (n, D, H, W), kind='volume'"
    )


def _taken_for(shape: tuple[int, ...]) -> str:
    """Return in words what images of shape (C, H, W) are."""
    channels, height, width = shape
    return f"{'grey images' if channels == 1 else f'images of {channels} channels'}, {height} x {width} pixels"


def image_statistics(images: Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return the mean and standard deviation per channel of images (n, C, H, W), as two tuples of C."""
    means, stds = channel_statistics(images)
    return means, tuple(s if s >= _MIN_STD else 1.0 for s in stds)


IMAGE = register(Image())
