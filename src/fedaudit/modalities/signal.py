"""Signals: (channels, time) real values, such as series and ECGs."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from fedaudit.modalities.base import ExampleKind, channel_statistics, register

_FLAT = 1e-9  # of a channel's largest value: a channel that varies less is divided by one, not by nothing
_PANEL = 44  # pixels that a channel's panel is high
_WIDTH = 300  # pixels that it is wide
_IN_A_COLUMN = 6  # panels; further ones stand in a second column
_FINE = 4  # lines are drawn so many times as large, and shrunk: else they have steps
_INK, _TRUE, _RULE, _PAPER = (31, 60, 160), (245, 175, 95), (225, 225, 225), (255, 255, 255)
_THIN, _BROAD = 5, 14  # of lines, before they are shrunk


class Signal(ExampleKind):
    """Signals, which models see with each channel's mean and standard deviation over the train split taken out."""

    name: ClassVar[str] = "signal"
    summary: ClassVar[str] = "signals such as series or ECGs, (C, T) real values"
    plural: ClassVar[str] = "signals"
    described: ClassVar[str] = "signals"
    axes: ClassVar[tuple[str, ...]] = ("channels", "time")
    letters: ClassVar[str] = "C, T"
    arrays: ClassVar[str] = "(n, C, T) or (n, T)"
    array_axes: ClassVar[tuple[int, ...]] = (3, 2)
    element: ClassVar[str] = "sample"
    drawing: ClassVar[str] = (
        "A picture has a panel for each channel, in columns of up to six, with time from left to right; a panel "
        "reaches from the least to the largest value of the true curve, and a tenth beyond. In the picture of a "
        "reconstruction the true curve is broad and orange, and the reconstructed one lies over it, thin and blue."
    )

    def channels(self, shape: tuple[int, ...]) -> int:
        """Return C of (C, T)."""
        return shape[0]

    def read(self, array: Tensor, where: str) -> Tensor:
        """Return (n, C, T), or (n, T) of one channel, of any finite numbers, as float32 (n, C, T)."""
        return super().read(array[:, None] if array.ndim == 2 else array, where)

    def said(self, given: tuple[int, ...], read: tuple[int, ...]) -> str:
        """Return what was taken for a signal, where it has no channels, or more of them than points in time."""
        plain = len(given) == len(read) and read[0] <= read[1]
        return "" if plain else f"inputs of shape {given} are taken for signals of {read[0]} channels, {read[1]} points"

    def prepare(self, train: Tensor, test: Tensor) -> tuple[Tensor, Tensor, tuple[float, ...], tuple[float, ...]]:
        """Return both splits as they are, with the mean and standard deviation of the train split's channels."""
        means, stds = channel_statistics(train)
        largest = train.abs().amax(dim=(0, 2)).tolist()
        return train, test, means, tuple(s if s > _FLAT * most else 1.0 for s, most in zip(stds, largest, strict=True))

    def draw(self, examples: Tensor) -> Tensor:
        """Return (k, C, T) signals as curves, (3, height, width): a panel a channel, as high as its range."""
        return torch.cat([_curves(example, [(example, _INK, _THIN)]) for example in examples], dim=1)

    def draw_over(self, recovered: Tensor, true: Tensor) -> Tensor:
        """Return the recovered curves, thin and blue, over the true ones, broad and orange, which panels fit."""
        return _curves(true, [(true, _TRUE, _BROAD), (recovered, _INK, _THIN)])

    def drawn_up(self, shape: tuple[int, ...], count: int, mean: Tensor, std: Tensor) -> Tensor | None:
        """Return signals of a slow wave and a pulse that comes again, each channel with shares of its own of both."""
        rng = torch.Generator().manual_seed(0)
        channels, length = shape
        time = torch.linspace(0, 1, length)
        signals = torch.zeros(count, channels, length)
        for signal in signals:
            speed, width = 2 + 6 * torch.rand(1, generator=rng), 0.02 + 0.1 * torch.rand(1, generator=rng)
            begin, phase = torch.rand(2, generator=rng)
            since = torch.remainder(speed * time + begin, 1.0) - 0.5
            parts = torch.stack(
                [
                    torch.exp(-((since / width) ** 2) / 2),
                    torch.exp(-(((since - 0.25) / (3 * width)) ** 2) / 2),
                    torch.sin(2 * torch.pi * (3 * time * torch.rand(1, generator=rng) + phase)),
                ]
            )
            signal += torch.randn(channels, 3, generator=rng) @ parts
        signals -= signals.mean(dim=2, keepdim=True)
        signals /= signals.std(dim=2, correction=0, keepdim=True).clamp_min(1e-6) if length > 1 else 1.0
        return mean.view(1, -1, 1) + std.view(1, -1, 1) * signals


def _curves(frame: Tensor, curves: list[tuple[Tensor, tuple[int, int, int], int]]) -> Tensor:
    """Return curves, (C, T) each with its colour and breadth, as one picture (3, height, width) in [0, 1].

    A channel's panel is a tenth larger than the range of ``frame``; what lies further is drawn at its edge.
    """
    from PIL import Image, ImageDraw  # here: whoever only reads data shouldn't wait for it

    channels = len(frame)
    columns = -(-channels // _IN_A_COLUMN)
    rows = -(-channels // columns)
    image = Image.new("RGB", (_FINE * columns * _WIDTH, _FINE * rows * _PANEL), _PAPER)
    pen = ImageDraw.Draw(image)
    for channel in range(channels):
        left, top = _FINE * _WIDTH * (channel // rows), _FINE * _PANEL * (channel % rows)
        pen.rectangle((left, top, left + _FINE * _WIDTH - 1, top + _FINE * _PANEL - 1), outline=_RULE, width=_FINE)
        low, high = float(frame[channel].min()), float(frame[channel].max())
        room = 0.1 * (high - low) or 1.0
        for curve, colour, breadth in curves:
            values = curve[channel].detach().cpu().double()
            y = ((high + room - values) / (high - low + 2 * room)).clamp(0, 1)
            x = torch.linspace(0, 1, len(values), dtype=torch.float64)
            places = zip(
                (left + x * (_FINE * _WIDTH - 1)).tolist(), (top + y * (_FINE * _PANEL - 1)).tolist(), strict=True
            )
            pen.line(list(places), fill=colour, width=breadth, joint="curve")
    small = image.resize((image.width // _FINE, image.height // _FINE), Image.Resampling.BOX)
    pixels = torch.frombuffer(bytearray(small.tobytes()), dtype=torch.uint8).view(small.height, small.width, 3)
    return pixels.permute(2, 0, 1).float() / 255


SIGNAL = register(Signal())
