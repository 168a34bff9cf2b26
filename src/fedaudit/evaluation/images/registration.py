"""Images after the best shift and flip, or the best turn and tone: what hides a picture from a pixel's error.

Volumes are shifted along their depth, too, and turned within their slices; signals are shifted in time, or reversed.

A network with global pooling hardly tells where a thing stands, so gradient inversion may recover a picture in another
place or mirrored; and a face that is shifted, turned, dark or a negative is a leak. Whatever is compared with a
recovered image, the true one, another candidate or a baseline, gets the same treatment.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import torch
from torch import Tensor

LEAST_GAIN_DB = 1.0  # by which a move must lower the error to count: less is noise's, too
_SHARE = 4  # of the side: the furthest shift, so that more than half of the image is compared
_NAMES = ("deep", "down", "right")  # of shifts, by axis
_ELEMENTS = 2**20  # of the images that are compared at once: transforms of large ones need gigabytes else


class Move(NamedTuple):
    """A flip from left to right first, then a shift; a signal is flipped from end to beginning, and shifted in time.

    Attributes:
        down: pixels, negative for up.
        right: pixels, negative for left; in a signal points in time, negative for earlier.
        deep: slices of a volume, negative for back.
    """

    flipped: bool = False
    down: int = 0
    right: int = 0
    deep: int = 0

    def along(self, axes: int) -> tuple[int, ...]:
        """Return the shift along each of the last ``axes`` axes."""
        return (self.deep, self.down, self.right)[-axes:]


STAY = Move()


def registered(image: Tensor, others: Tensor) -> tuple[Tensor, list[Move]]:
    """Return how far ``image`` is from each of ``others`` after the move that brings it nearest.

    Shifts are of whole pixels, up to a quarter of the side each way. The mean squared error is taken where the moved
    image covers the other. A part that is easier than the whole would be a gain for nothing: an even image of
    ``image``'s mean colour has the mean squared error E on the whole other image and E′ on the part, and the part's
    error is multiplied by E/E′ where that is above 1. So an even image gains exactly nothing. A move counts if the
    error falls by 1 dB at least.

    Args:
        image: (C, H, W) pixels in [0, 1], or (C, T) or (C, D, H, W), alike.
        others: (n, C, H, W), alike.

    Returns:
        The (n,) mean squared errors, in float64, and each one's move.
    """
    parts = [_registered(image.double(), part.double()) for part in others.split(max(1, _ELEMENTS // image.numel()))]
    return torch.cat([errors for errors, _ in parts]), [move for _, moves in parts for move in moves]


def correlations(image: Tensor, others: Tensor) -> Tensor:
    """Return the correlation of ``image``, in each of its eight turns and flips, with each of ``others``.

    Each channel's mean is taken off first. The least error that another contrast c and another brightness of each
    channel leave, c·image + b, is 1 − r² of what an even image of the other's colours has.

    Args:
        image: (C, H, W) pixels in [0, 1], or (C, T) or (C, D, H, W), alike.
        others: (n, C, H, W), alike.

    Returns:
        (8, n), in the order of :func:`turned`; (4, n) where H and W differ, which no quarter turn fits; (2, n) of
        signals, which can be reversed only.
    """
    own = without_colour(torch.stack([turned(image, way) for way in ways(image)]))
    return torch.cat([own @ without_colour(part).T for part in others.split(max(1, _ELEMENTS // image.numel()))], dim=1)


def turned(image: Tensor, way: int) -> Tensor:
    """Return (..., H, W) images flipped left to right where ``way`` is odd, then turned left ``way // 2`` times."""
    flipped = image.flip(-1) if way % 2 else image
    return flipped.rot90(way // 2, (-2, -1)) if way // 2 else flipped


def ways(image: Tensor) -> tuple[int, ...]:
    """Return which ways :func:`turned` can turn an image (C, H, W), a volume, or a signal (C, T)."""
    if image.ndim == 2:
        return 0, 1
    return tuple(range(8)) if image.shape[-1] == image.shape[-2] else (0, 1, 4, 5)


def channel_means(examples: Tensor, axes: int) -> Tensor:
    """Return the mean of each channel over the last axes, which stay with length 1."""
    return examples.mean(dim=tuple(range(-axes, 0)), keepdim=True)


def without_colour(images: Tensor) -> Tensor:
    """Return (n, C·H·W) images without each channel's mean, of length 1; nothing is left of an even one."""
    left = images.double() - channel_means(images.double(), images.ndim - 2)
    return torch.nn.functional.normalize(left.flatten(1), dim=1, eps=1e-9)


def overlapping(image: Tensor, other: Tensor, move: Move) -> tuple[Tensor, Tensor]:
    """Return the parts of the moved ``image`` and of ``other``, (C, H, W) both, that lie on each other."""
    sides = image.shape[1:]
    flipped = image.flip(-1) if move.flipped else image
    shifts = move.along(len(sides))
    for axis, (shift, side) in enumerate(zip(shifts, sides, strict=True), start=1):
        length = side - abs(shift)
        flipped = flipped.narrow(axis, max(0, -shift), length)
        other = other.narrow(axis, max(0, shift), length)
    return flipped, other


def _registered(image: Tensor, others: Tensor) -> tuple[Tensor, list[Move]]:
    channels, *sides = image.shape
    shifts = [torch.arange(-(side // _SHARE), side // _SHARE + 1) for side in sides]
    size = [side + side // _SHARE for side in sides]  # of the transform: no shift reaches around the edge
    axes = tuple(range(1, image.ndim))
    colour = image.mean(dim=axes, keepdim=True)
    own, theirs = image - colour, others - colour
    even = theirs.square().sum(dim=1)
    on_part = _sums(even, shifts)
    covered = torch.full((1,) * len(sides), channels)
    for axis, (shift, side) in enumerate(zip(shifts, sides, strict=True)):
        covered = covered * (side - shift.abs()).view([-1 if i == axis else 1 for i in range(len(sides))])
    whole = even.mean(dim=axes) / channels
    easier = (whole.view(-1, *(1,) * len(sides)) * covered / on_part).nan_to_num(nan=1.0, posinf=torch.inf).clamp_min(1)
    last = tuple(range(-len(sides), 0))
    spectra = torch.fft.rfftn(theirs, size, last)
    errors = []
    for flipped in (own, own.flip(-1)):
        product = (spectra * torch.fft.rfftn(flipped, size, last).conj()).sum(dim=1)
        both = torch.fft.irfftn(product, size, last)
        for axis, (shift, length) in enumerate(zip(shifts, size, strict=True), start=1):
            both = both.index_select(axis, shift % length)
        alone = _sums(flipped.square().sum(dim=0)[None], [-shift for shift in shifts])
        errors.append(((alone + on_part - 2 * both).clamp_min(0) / covered).mul(easier).nan_to_num(nan=torch.inf))
    found = torch.stack(errors, dim=1)
    plain = (image - others).square().flatten(1).mean(dim=1)
    least, place = found.flatten(1).min(dim=1)
    counts = least <= plain * 10 ** (-LEAST_GAIN_DB / 10)
    counts &= plain > 0
    places = list(itertools.product(*(shift.tolist() for shift in shifts)))
    moves = [
        Move(p >= len(places), **dict(zip(_NAMES[-len(sides) :], places[p % len(places)], strict=True)))
        if gains
        else STAY
        for p, gains in zip(place.tolist(), counts.tolist(), strict=True)
    ]
    return torch.where(counts, least, plain), moves


def _sums(values: Tensor, shifts: list[Tensor]) -> Tensor:
    """Return (n, shifts along each axis): the sums of (n, ...) ``values`` over what each shift covers."""
    total = values
    for axis in range(1, values.ndim):
        total = total.cumsum(dim=axis)
    total = torch.nn.functional.pad(total, (1, 0) * len(shifts))
    for axis, (shift, length) in enumerate(zip(shifts, values.shape[1:], strict=True), start=1):
        first, end = shift.clamp_min(0), length + shift.clamp_max(0)
        total = total.index_select(axis, end) - total.index_select(axis, first)
    return total
