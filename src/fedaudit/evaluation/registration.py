"""Images after the best shift and flip, or the best turn and tone: what hides a picture from a pixel's error.

A network with global pooling hardly tells where a thing stands, so gradient inversion may recover a picture in another
place or mirrored; and a face that is shifted, turned, dark or a negative is a leak. Whatever is compared with a
recovered image, the true one, another candidate or a baseline, gets the same treatment.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

LEAST_GAIN_DB = 1.0  # by which a move must lower the error to count: less is noise's, too
_SHARE = 4  # of the side: the furthest shift, so that more than half of the image is compared
_ELEMENTS = 2**20  # of the images that are compared at once: transforms of large ones need gigabytes else


class Move(NamedTuple):
    """A flip from left to right first, then a shift.

    Attributes:
        flipped: whether there is a flip.
        down: pixels that the shift goes down, negative for up.
        right: pixels that it goes to the right, negative for left.
    """

    flipped: bool = False
    down: int = 0
    right: int = 0


STAY = Move()


def registered(image: Tensor, others: Tensor) -> tuple[Tensor, list[Move]]:
    """Return how far ``image`` is from each of ``others`` after the move that brings it nearest.

    Shifts are of whole pixels, up to a quarter of the side each way. The mean squared error is taken where the moved
    image covers the other. A part that is easier than the whole would be a gain for nothing: an even image of
    ``image``'s mean colour has the mean squared error E on the whole other image and E′ on the part, and the part's
    error is multiplied by E/E′ where that is above 1. An even image so gains exactly nothing. A move counts if the
    error falls by 1 dB at least.

    Args:
        image: (C, H, W) pixels in [0, 1].
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
        image: (C, H, W) pixels in [0, 1].
        others: (n, C, H, W), alike.

    Returns:
        (8, n), in the order of :func:`turned`; (4, n) where H and W differ, which no quarter turn fits.
    """
    own = _without_colour(torch.stack([turned(image, way) for way in _ways(image)]))
    return torch.cat(
        [own @ _without_colour(part).T for part in others.split(max(1, _ELEMENTS // image.numel()))], dim=1
    )


def turned(image: Tensor, way: int) -> Tensor:
    """Return (..., H, W) images flipped from left to right where ``way`` is odd, and after that turned left.

    ``way // 2`` is the number of quarter turns.
    """
    flipped = image.flip(-1) if way % 2 else image
    return flipped.rot90(way // 2, (-2, -1))


def _ways(image: Tensor) -> tuple[int, ...]:
    return tuple(range(8)) if image.shape[-1] == image.shape[-2] else (0, 1, 4, 5)


def _without_colour(images: Tensor) -> Tensor:
    """Return (n, C·H·W) images without each channel's mean, of length 1; nothing is left of an even one."""
    left = images.double() - images.double().mean(dim=(-2, -1), keepdim=True)
    return torch.nn.functional.normalize(left.flatten(1), dim=1, eps=1e-9)


def overlapping(image: Tensor, other: Tensor, move: Move) -> tuple[Tensor, Tensor]:
    """Return the parts of the moved ``image`` and of ``other``, (C, H, W) both, that lie on each other."""
    height, width = image.shape[-2:]
    flipped = image.flip(-1) if move.flipped else image
    return (
        flipped[..., _span(-move.down, height), _span(-move.right, width)],
        other[..., _span(move.down, height), _span(move.right, width)],
    )


def _span(shift: int, length: int) -> slice:
    return slice(max(0, shift), length + min(0, shift))


def _registered(image: Tensor, others: Tensor) -> tuple[Tensor, list[Move]]:
    channels, height, width = image.shape
    down, right = (torch.arange(-(side // _SHARE), side // _SHARE + 1) for side in (height, width))
    size = (height + height // _SHARE, width + width // _SHARE)  # of the transform: no shift reaches around the edge
    colour = image.mean(dim=(1, 2), keepdim=True)
    own, theirs = image - colour, others - colour
    even = theirs.square().sum(dim=1)
    on_part = _sums(even, down, right)
    covered = channels * (height - down.abs())[:, None] * (width - right.abs())
    whole = even.mean(dim=(1, 2)) / channels
    easier = (whole[:, None, None] * covered / on_part).nan_to_num(nan=1.0, posinf=torch.inf).clamp_min(1)
    spectra = torch.fft.rfft2(theirs, size)
    errors = []
    for flipped in (own, own.flip(-1)):
        product = (spectra * torch.fft.rfft2(flipped, size).conj()).sum(dim=1)
        both = torch.fft.irfft2(product, size)[:, down % size[0]][:, :, right % size[1]]
        alone = _sums(flipped.square().sum(dim=0)[None], -down, -right)
        errors.append(((alone + on_part - 2 * both).clamp_min(0) / covered).mul(easier).nan_to_num(nan=torch.inf))
    found = torch.stack(errors, dim=1)
    plain = (image - others).square().flatten(1).mean(dim=1)
    least, place = found.flatten(1).min(dim=1)
    counts = least <= plain * 10 ** (-LEAST_GAIN_DB / 10)
    counts &= plain > 0
    shifts = [(y, x) for y in down.tolist() for x in right.tolist()]
    moves = [
        Move(p >= len(shifts), *shifts[p % len(shifts)]) if gains else STAY
        for p, gains in zip(place.tolist(), counts.tolist(), strict=True)
    ]
    return torch.where(counts, least, plain), moves


def _sums(values: Tensor, down: Tensor, right: Tensor) -> Tensor:
    """Return (n, shifts down, shifts right): the sums of (n, H, W) ``values`` over what each shift covers."""
    height, width = values.shape[1:]
    total = torch.nn.functional.pad(values.cumsum(dim=1).cumsum(dim=2), (1, 0, 1, 0))
    top, bottom = down.clamp_min(0), height + down.clamp_max(0)
    left, end = right.clamp_min(0), width + right.clamp_max(0)
    rows = total[:, bottom] - total[:, top]
    return rows[:, :, end] - rows[:, :, left]
