"""Ordinary things that may explain why repeated training gives another update than was sent.

Each but noise predicts every number that was sent of the repeated training, so that a wrong fact doesn't pass for it;
noise shows by how it is spread.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from scipy.optimize import nnls
from torch import Tensor

from fedaudit.transcript.update import CONTRADICTED

_KINDS = (torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)  # in which messages may travel
_FITS = 0.02  # relative error up to which a prediction is what was sent
_LEAST = 16  # numbers that a prediction must get right
_EVEN = 0.25  # by how much the standard deviations of a noise's tensors may differ
_SURE = 4  # standard errors
_SURER = 6  # of each of many
_ENOUGH = 200  # elements, to tell how a rest is spread
_LONG = 32  # elements of a row, likewise

# In words, whether it rounds weights, and what it makes of an update.
_Way = tuple[str, bool, Callable[[Tensor], Tensor]]


class Explanation(NamedTuple):
    """What explains a difference, in words, and the relative error that it leaves; infinity: nobody can tell."""

    words: str
    left: float


class Difference:
    """An update that was sent beside the one that repeated training gives.

    Args:
        sent, made: by name; sent, and made by repeated training.
        start: weights that the client was sent.
        weights: clients send weights, or their difference; else gradients.
    """

    def __init__(
        self, sent: Mapping[str, Tensor], made: Mapping[str, Tensor], start: Mapping[str, Tensor], *, weights: bool
    ) -> None:
        self.names = [name for name, value in sent.items() if value.is_floating_point()]
        self.shapes = [sent[name].shape for name in self.names]
        self.sent, self.made, self.start = (self.flat(of) for of in (sent, made, start))
        self.weights = weights
        finite = all(bool(torch.isfinite(of).all()) for of in (self.sent, self.made, self.start))
        self.usable = finite and bool(self.made.any())

    def flat(self, of: Mapping[str, Tensor]) -> Tensor:
        """Return what is sent of a state as one vector, in float64."""
        return torch.cat([torch.zeros(0).double(), *(of[name].double().flatten() for name in self.names)])

    def parts(self, vector: Tensor) -> list[Tensor]:
        """Return a vector's tensors."""
        pieces = vector.split([shape.numel() for shape in self.shapes])
        return [piece.view(shape) for piece, shape in zip(pieces, self.shapes, strict=True)]

    def left(self, predicted: Tensor, without: Tensor | None = None) -> float:
        """Return the relative error of a prediction, ``without`` some of the elements."""
        counts = slice(None) if without is None else ~without
        length = float(self.sent[counts].norm())
        apart = float((self.sent - predicted)[counts].norm())
        return 0.0 if apart == 0 else math.inf if length == 0 else apart / length

    # --- precision ----------------------------------------------------------------------------------------------------

    @functools.cached_property
    def precisions(self) -> list[_Way]:
        """In which fewer digits the numbers that were sent can travel, as weights or as differences."""
        found: list[_Way] = []
        for base in [self.start, torch.zeros_like(self.start)] if self.weights else [torch.zeros_like(self.start)]:
            value, of_weights = base + self.sent, base is self.start
            slack = 4 * torch.finfo(torch.float32).eps * (base.abs() + self.sent.abs())
            for kind in _KINDS:
                if bool(((_as(value, kind) - value).abs() <= slack).all()):
                    words = f"messages travel in {str(kind).removeprefix('torch.')}"
                    found.append((words, of_weights, functools.partial(_rounded, base=base, kind=kind)))
            for digits in (2, 3, 4, 5, 6):
                step = 10.0**-digits
                if float(slack.max()) < step / 10 and bool(
                    ((value / step).round() * step - value).abs().le(slack).all()
                ):
                    way = functools.partial(self._snapped, base=base, grids=[(0.0, step)] * len(self.shapes))
                    found.append((f"messages are rounded to {digits} decimal places", of_weights, way))
            for bits in (8, 4):
                parts = zip(self.parts(value), self.parts(slack), strict=True)
                grids = [grid for one in parts if (grid := _grid(*one, bits)) is not None]
                if len(grids) == len(self.shapes) and sum(shape.numel() - 2 for shape in self.shapes) >= _LEAST:
                    way = functools.partial(self._snapped, base=base, grids=grids)
                    found.append((f"messages travel as integers of {bits} bits", of_weights, way))
        return found

    def _snapped(self, made: Tensor, base: Tensor, grids: Sequence[tuple[float, float]]) -> Tensor:
        """Return an update whose every number is the nearest on its tensor's grid."""
        parts = zip(self.parts(base + made), grids, strict=True)
        return (
            torch.cat([(((p - low) / step).round() * step + low if step else p).flatten() for p, (low, step) in parts])
            - base
        )

    def by_precision(self, error: float) -> Explanation | None:
        """Return how the precision of messages explains a difference of relative size ``error``, if it does."""
        tried = [Explanation(words, self.left(way(self.made))) for words, _, way in self.precisions if self.usable]
        best = min(tried, key=lambda one: one.left, default=None)
        if best is None or best.left > min(CONTRADICTED, error / 2):
            return None
        nothing = Explanation(f"{best.words}, which leaves nothing of the update", math.inf)
        return best if bool(self.sent.any()) else nothing

    # --- what is made of an update before it is sent ------------------------------------------------------------------

    def by_change(
        self, points: Sequence[Mapping[str, Tensor]], lengths: Sequence[float], *, seen: bool
    ) -> Explanation | None:
        """Return what clients make of their update before they send it, if that explains the difference.

        Args:
            points: parameters after each step; empty: not known.
            lengths: norms of the other updates.
            seen: the facts were seen, so that an update that is too short isn't one of a smaller rate.
        """
        if not self.usable or not bool(self.sent.any()):
            return None
        raw: list[_Way] = [("", False, lambda made: made)]
        raw += [("", False, functools.partial(_rounded, base=self.start, kind=torch.float32))] * self.weights
        for what, made, without in self._changes(points, lengths, seen=seen):
            kept = without is not None and bool(
                (without & (self.sent == 0)).any()
            )  # as rounding of weights leaves much
            tried = [
                Explanation("; ".join([what] + [words] * bool(words)), self.left(way(made), without))
                for words, of_weights, way in [*raw, *self.precisions]
                if not (kept and of_weights)
            ]
            best = min(tried, key=lambda one: one.left)
            if best.left <= _FITS:
                return best
        return None

    def _changes(
        self, points: Sequence[Mapping[str, Tensor]], lengths: Sequence[float], *, seen: bool
    ) -> Iterator[tuple[str, Tensor, Tensor | None]]:
        """Yield what may have been made of the update: in words, the update, and what says nothing of it."""
        gone = (self.start + self.sent == 0) & (self.start + self.made != 0) & (self.sent != 0) & self.weights
        kept, words = (self.sent == 0) & (self.made != 0), list[str]()
        tensors = list(zip(self.names, self.parts(self.sent), self.parts(kept), strict=True))
        held = {name: int(moved.sum()) for name, sent, moved in tensors if not sent.any() and moved.any()}
        if bool(gone.any()):
            words.append(f"{float(gone.double().mean()):.0%} of the weights are set to zero before they are sent")
            yield words[0], self.made, gone
        if bool(kept.any()) and int((~(gone | kept) & (self.made != 0)).sum()) >= max(_LEAST, 0.01 * len(kept)):
            whole = held and sum(held.values()) == int(kept.sum())
            what = named([*held]) if whole else f"{float(kept.double().mean()):.0%} of the numbers"
            yield " and ".join([*words, f"{what} stay as received in what is sent"]), self.made, gone | kept
        bound = float(self.sent.abs().max())
        if int((self.sent.abs() >= bound * (1 - 1e-6)).sum()) > 1:
            yield f"updates are clipped to ±{bound:.3g} in each element", self.made.clamp(-bound, bound), None
        yield from self._between(points, lengths, seen=seen)

    def _between(
        self, points: Sequence[Mapping[str, Tensor]], lengths: Sequence[float], *, seen: bool
    ) -> Iterator[tuple[str, Tensor, None]]:
        """Yield the nearest point between what was received and what was trained, and averages along the training."""
        factor, length = float(self.sent @ self.made / (self.made @ self.made)), float(self.sent.norm())
        short = 0 < factor < 1 - CONTRADICTED / 2
        written = abs(float(f"{length:.2g}") / length - 1) < 5e-5  # as a person writes a bound; by luck in 1 of 300
        if short and (written or any(abs(other / length - 1) < 1e-3 for other in lengths)):
            yield f"updates are clipped to a norm of {length:.3g}", factor * self.made, None
        elif short and seen:
            yield (
                f"what is sent lies {factor:.0%} of the way from the received model to the trained one",
                factor * self.made,
                None,
            )
        if not seen or len(points) < 2:
            return
        way = torch.stack([self.flat(point) - self.start for point in points])
        basis, triangle = torch.linalg.qr(way.T)
        heavy = 1e3 * float(self.sent.norm())  # weights of the average, of the received model first, sum up to 1
        columns = torch.cat([torch.zeros(len(triangle), 1).double(), triangle], dim=1)
        columns = torch.cat([columns, torch.full((1, columns.shape[1]), heavy).double()])
        wanted = torch.cat([basis.T @ self.sent, torch.tensor([heavy]).double()])
        try:
            shares = torch.from_numpy(nnls(columns.numpy(), wanted.numpy())[0])[1:]
        except RuntimeError:  # it doesn't converge
            return
        if bool((shares > 0.99).any()):
            step = int(shares.argmax()) + 1
            yield f"the weights after step {step} of {len(points)} are sent", way[step - 1], None
        else:
            yield "an average of the weights along the training is sent (EMA)", shares @ way, None

    # --- noise --------------------------------------------------------------------------------------------------------

    def by_noise(self, *, seen: bool) -> Explanation | None:
        """Return the Gaussian noise, of one standard deviation, that explains the difference, if one does.

        Noise knows nothing of the weights that training starts from, nor of rows and columns: a rest that does is a
        wrong fact, such as weight decay or other examples. A shorter update below it is clipped, where facts were seen.
        """
        if not self.usable or not bool(self.sent.any()):
            return None
        sent, made, begun = self.sent, self.made, self.start
        factor = float(sent @ made / (made @ made))
        rest = sent - factor * made
        deviation, count = float(rest.std()), len(rest)
        rounding = torch.finfo(torch.float32).eps * float(sent.norm() + begun.norm())
        if not deviation * math.sqrt(count) > _SURE * rounding:
            return None
        if abs(float(rest.mean())) > _SURE * deviation / math.sqrt(count):
            return None
        kurtosis = float(((rest - rest.mean()) / deviation).pow(4).mean())
        if abs(kurtosis - 3) > _SURE * math.sqrt(24 / count):
            return None
        besides = (
            begun - float(begun @ made / (made @ made)) * made
        )  # what training's direction doesn't explain of them
        length = float(rest.norm() * besides.norm())
        if length and abs(float(rest @ besides)) / length > _SURE / math.sqrt(count):
            return None
        parts = [part / deviation for part in self.parts(rest)]
        if not any(part.numel() >= _ENOUGH for part in parts) or not all(map(_even, parts)):
            return None
        unsure = _SURE * deviation / float(made.norm())
        for part, own in zip(parts, self.parts(made), strict=True):  # no tensor by a rate of its own
            if abs(float((part * own).sum())) > _SURER * float(own.norm()):
                return None
        if factor > 1 + unsure or (factor < 1 - unsure and (factor <= 0 or not seen)):
            return None
        clipped = f", after clipping by a factor of {factor:.2g}," if factor < 1 - unsure else ""
        words = f"noise of standard deviation {deviation:.2g}{clipped} is added to what is sent"
        return Explanation(words, unsure)

    def looks_like(self) -> str:
        """Return what one factor makes of the update what was sent, if it does; else nothing."""
        if not self.usable or not bool(self.sent.any()):
            return ""
        factor = float(self.sent @ self.made / (self.made @ self.made))
        if self.left(factor * self.made) >= CONTRADICTED or factor <= 0 or abs(factor - 1) < CONTRADICTED:
            return ""
        clipped = f"clipping to a norm of {float(self.sent.norm()):.3g}, or " if factor < 1 else ""
        return f"they are {factor:.3g} times as large: that looks like {clipped}another learning rate than is recorded"


def named(names: Sequence[str], most: int = 4) -> str:
    """Return names in a sentence."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return f"{', '.join(names[:most])}{more}"


def _as(value: Tensor, kind: torch.dtype) -> Tensor:
    return value.float().to(kind).double()


def _rounded(made: Tensor, base: Tensor, kind: torch.dtype) -> Tensor:
    return _as(base + made, kind) - base


def _grid(value: Tensor, slack: Tensor, bits: int) -> tuple[float, float] | None:
    """Return the start and step of a grid of ``bits`` on which all numbers lie, around zero or from least to largest.

    A step of 0: all numbers are the same.
    """
    low, high, most = float(value.min()), float(value.max()), 2.0**bits - 1
    if low == high:
        return low, 0.0
    wide = high - low
    for begin, step in ((0.0, 2 * max(high, -low) / (most - 1)), (low, wide / most), (low, wide / (most - 1))):
        place = (value - begin) / step
        if bool(((place - place.round()).abs() <= 1e-3 + slack / step).all()):
            return begin, step
    return None


def _even(part: Tensor) -> bool:
    """Whether numbers of standard deviation 1 are so in the whole tensor, in each of its rows and columns."""
    if part.numel() >= _ENOUGH:
        allowed = min(_EVEN, 0.02 + _SURE / math.sqrt(2 * part.numel()))
        if abs(float(part.std()) - 1) > allowed:
            return False
    if part.ndim < 2:
        return True
    sides = (part.flatten(1), part.transpose(0, 1).flatten(1))
    return all(
        bool((side.square().mean(1) - 1).abs().max() <= _SURER * math.sqrt(2 / side.shape[1]))
        for side in sides
        if side.shape[1] >= _LONG
    )
