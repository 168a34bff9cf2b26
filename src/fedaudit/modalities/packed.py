"""Examples of several tensors, packed into one vector: how, and the kind of such examples."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from pydantic import ConfigDict
from torch import Tensor

from fedaudit.modalities.base import ExampleKind, register
from fedaudit.utils.errors import BadInput
from fedaudit.utils.plain_tensors import of_plain_class

_GAP, _SIDE, _SQUARE = 4, 96, 12  # pixels: between two parts, about a picture's side, a number's square
_MOST = 64  # numbers of a part that are drawn
_EXACT = 2**24  # below, float32 holds every whole number


@dataclass(frozen=True)
class Part:
    """One tensor of several.

    Attributes:
        name: its key or keyword; of tensors by position their number, from 0; "" where it is the only one, by itself.
        shape: of one example.
        whole: its values are whole numbers, which are int64 when it is unpacked.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")  # where it is read from a file

    name: str
    shape: tuple[int, ...]
    whole: bool = False

    @property
    def label(self) -> str:
        """Its name, or by position its number in brackets."""
        return f"[{self.name}]" if _by_position(self.name) else self.name

    @property
    def in_words(self) -> str:
        """Its shape."""
        if len(self.shape) > 1:
            return " x ".join(map(str, self.shape))
        return "1 number" if self.size == 1 else f"{self.size} numbers"

    @property
    def size(self) -> int:
        """How many values it has."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Packing:
    """How the tensors of one example stand in one vector, one after another, each in the order of its memory.

    Attributes:
        parts: those by position in their order, then those by name, in the order of the names.
        single: a model takes them as one argument, a tuple or a dictionary, and not as an argument each.

    Raises:
        BadInput: there are no parts, two have one name, or a shape is none.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    parts: tuple[Part, ...]
    single: bool = False

    def __post_init__(self) -> None:
        names = [part.name for part in self.parts]
        if not names or len(set(names)) != len(names) or any(min(p.shape, default=1) < 1 for p in self.parts):
            raise BadInput(f"parts {', '.join(names) or 'none'}: each needs a name of its own, and lengths from 1")

    def __str__(self) -> str:
        return ", ".join(f"{part.label} {part.in_words}".strip() for part in self.parts)

    @property
    def size(self) -> int:
        """How many values an example has."""
        return sum(part.size for part in self.parts)

    @classmethod
    def of_call(cls, args: tuple[Any, ...], kwargs: Mapping[str, Any], where: str) -> tuple[Packing, Tensor]:
        """Return the packing of what a model is called with, and it packed, on the CPU.

        Arguments that are None and given by name are as if they weren't given.

        Raises:
            BadInput: these aren't tensors of real values (n, ...), or one tuple or mapping of such.
        """
        named = {name: value for name, value in kwargs.items() if value is not None}
        single = len(args) == 1 and not named and isinstance(args[0], Mapping | tuple | list)
        given, extra = (args[0], {}) if single else (args, named)
        made = cls(cls.of(given, where, extra=extra).parts, single)
        return made, made.pack(given, where, extra).detach().to("cpu", copy=True)

    @classmethod
    def of(cls, given: Any, where: str, *, whole: bool = False, extra: Mapping[str, Any] | None = None) -> Packing:
        """Return the packing of the tensors or arrays (n, ...) of n examples.

        Args:
            given: a tuple or list, a mapping by name, or one tensor alone.
            where: whose they are, for errors.
            whole: whether tensors of whole numbers are allowed.
            extra: by name, beside those by position.

        Raises:
            BadInput: one isn't an array of so many examples, or of a type that isn't allowed; names that can't be used.
        """
        parts = []
        for name, value in _named(given, extra, where):
            if not hasattr(value, "shape") or not hasattr(value, "dtype") or not len(value.shape):
                raise BadInput(f"{where} '{name}' is a {type(value).__name__}; give a tensor (n, ...) of all examples")
            tensor = torch.as_tensor(value)
            if not tensor.is_floating_point() and (not whole or tensor.dtype.is_complex):
                raise BadInput(
                    f"{where} '{name}' has whole numbers ({str(tensor.dtype).removeprefix('torch.')}), and several "
                    "inputs go into the model as they are given: give images as floats (x / 255), categories as one "
                    "0/1 column each, and audit what stands behind an embedding with its outputs as the input"
                )
            parts.append(Part(name, tuple(tensor.shape[1:]), not tensor.is_floating_point()))
        return cls(tuple(parts))

    def pack(self, given: Any, where: str, extra: Mapping[str, Any] | None = None) -> Tensor:
        """Return tensors (n, ...), as of :meth:`of`, as float32 (n, size).

        Raises:
            BadInput: they are others than these, or not of equally many examples.
        """
        named = _named(given, extra, where)
        if [name for name, _ in named] != [part.name for part in self.parts]:
            raise BadInput(f"{where} are {', '.join(n for n, _ in named) or 'none'}; there should be {self}")
        tensors = [of_plain_class(torch.as_tensor(value)) for _, value in named]
        if len({len(t) for t in tensors}) > 1:
            raise BadInput(f"{where}: {', '.join(str(len(t)) for t in tensors)} examples; give as many of each")
        for part, tensor in zip(self.parts, tensors, strict=True):
            if tuple(tensor.shape[1:]) != part.shape:
                raise BadInput(f"{where} '{part.label}' has the shape {tuple(tensor.shape[1:])}, others' {part.shape}")
            if part.whole and tensor.numel() and int(tensor.abs().max()) >= _EXACT:
                raise BadInput(f"{where} '{part.label}' has whole numbers of {_EXACT:,} or more, which aren't kept")
        return torch.cat([t.reshape(len(t), math.prod(t.shape[1:])).to(torch.float32) for t in tensors], dim=1)

    def in_order(self, given: Any) -> list[Any]:
        """Return tensors in the order of their parts, as they are."""
        return [value for _, value in _named(given, None, "tensors")]

    def pieces(self, packed: Tensor) -> list[Tensor]:
        """Return the parts (n, ...) of (n, size), in their order; those of whole numbers as int64."""
        found = []
        for part, piece in zip(self.parts, packed.split([p.size for p in self.parts], dim=1), strict=True):
            tensor = piece.contiguous().reshape(len(piece), *part.shape)  # in memory as the user's own: the same bits
            found.append(tensor.round().long() if part.whole else tensor)
        return found

    def unpack(self, packed: Tensor) -> Any:
        """Return what was packed: a tuple, a dictionary by name, or the tensor alone."""
        pieces = self.pieces(packed)
        if not self.parts[0].name:
            return pieces[0]
        if _by_position(self.parts[0].name):
            return tuple(pieces)
        return {part.name: piece for part, piece in zip(self.parts, pieces, strict=True)}

    def arguments(self, packed: Tensor) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return what the model is called with, by position and by name."""
        if self.single:
            return (self.unpack(packed),), {}
        named = list(zip(self.parts, self.pieces(packed), strict=True))
        return (
            tuple(piece for part, piece in named if _by_position(part.name)),
            {part.name: piece for part, piece in named if not _by_position(part.name)},
        )

    def names(self) -> tuple[str, ...]:
        """Return the (size,) names of the values: their part's, and their place in it, from 0."""
        found = []
        for part in self.parts:
            places = [",".join(map(str, place)) for place in itertools.product(*map(range, part.shape))]
            found += [f"{part.label} {place}".strip() for place in places]
        return tuple(found)

    def groups(self) -> Tensor:
        """Return (size,) which values are measured alike: each entry of the first axis of each part by itself.

        So these are the channels of an image (C, H, W), and the single numbers of (d,).
        """
        found, at = [], 0
        for part in self.parts:
            count = part.shape[0] if part.shape else 1
            found.append(at + torch.arange(count).repeat_interleave(part.size // count))
            at += count
        return torch.cat(found)


def packed_alone(given: Any, where: str, *, whole: bool = False) -> Any:
    """Return several tensors, in a tuple, a list or a mapping, packed, and all else as it is."""
    if not isinstance(given, Mapping | tuple | list) or not all(
        getattr(part, "ndim", 0) for part in (given.values() if isinstance(given, Mapping) else given)
    ):
        return given
    return Packing.of(given, where, whole=whole).pack(given, where)


def several(given: Any, count: int | None = None) -> bool:
    """Whether these are several tensors, each with a value of every example, and not a list of ``count`` examples."""
    if isinstance(given, Mapping):
        return len(given) > 0
    if not isinstance(given, tuple | list) or not given or not all(hasattr(part, "shape") for part in given):
        return False
    shapes = [tuple(part.shape) for part in given]
    if len(given) == count and len(set(shapes)) == 1:  # a list of examples
        return False
    if all(shape[:1] == (count,) for shape in shapes) and len(given) != count:
        return True
    return len(set(shapes)) > 1 or any(len(shape) > 3 for shape in shapes)


def _by_position(name: str) -> bool:
    return name.isdigit()


def _named(given: Any, extra: Mapping[str, Any] | None, where: str) -> list[tuple[str, Any]]:
    """Return tensors with their names, in the order in which they are packed."""
    by_name = dict(extra or {})
    found: list[tuple[str, Any]] = []
    if isinstance(given, Mapping):
        by_name |= given
    elif isinstance(given, tuple | list):
        found = [(str(i), value) for i, value in enumerate(given)]
    else:
        found = [("", given)]
    for name in by_name:
        if not isinstance(name, str) or not name or _by_position(name) or not name.isprintable():
            raise BadInput(f"{where}: {str(name)[:80]!r} can't be a part's name; give texts that aren't numbers")
    return found + sorted(by_name.items())


class Packed(ExampleKind):
    """Examples of several tensors, which models see as they are given; a :class:`Packing` says what stands where."""

    name: ClassVar[str] = "packed"
    summary: ClassVar[str] = "several tensors an example (two inputs, a dictionary), packed into (p,) real values"
    plural: ClassVar[str] = "examples"
    described: ClassVar[str] = "examples of several inputs"
    axes: ClassVar[tuple[str, ...]] = ("values",)
    letters: ClassVar[str] = "p"
    arrays: ClassVar[str] = "(n, p)"
    array_axes: ClassVar[tuple[int, ...]] = (2,)
    packed: ClassVar[bool] = True
    drawing: ClassVar[str] = (
        "A picture shows an example's inputs from left to right, in the order in which the data set's summary lists "
        "them: one of two or more axes as a picture from its least value, black, to its largest, white; numbers as a "
        "column of squares, of which grey is zero. A reconstruction is drawn by the scale of the true example."
    )


def draw_parts(example: Tensor, like: Tensor, packing: Packing) -> Tensor:
    """Return one example (p,) as a drawing (1, height, width) in [0, 1], its inputs side by side, scaled as ``like``.

    One of two or more axes is a picture of its last two, those before below one another; of numbers the first 64 are a
    column of squares, each by the largest absolute value.
    """
    drawn = []
    for piece, other in zip(packing.pieces(example[None]), packing.pieces(like[None]), strict=True):
        one, scale = piece[0].float(), other[0].float()
        if one.ndim > 1:
            low, high = float(scale.min()), float(scale.max())
            picture = ((one - low) / (high - low or 1.0)).flatten(0, -2)
        else:
            picture = 0.5 + one.reshape(-1, 1)[:_MOST] / (2 * (float(scale.abs().max()) or 1.0))
        larger = max(1, round(_SIDE / max(picture.shape))) if one.ndim > 1 else _SQUARE
        drawn.append(picture.clamp(0, 1).repeat_interleave(larger, 0).repeat_interleave(larger, 1))
    width = sum(p.shape[1] for p in drawn) + _GAP * (len(drawn) - 1)
    sheet = torch.full((1, max(p.shape[0] for p in drawn), width), 0.5)
    left = 0
    for picture in drawn:
        sheet[0, : picture.shape[0], left : left + picture.shape[1]] = picture
        left += picture.shape[1] + _GAP
    return sheet


PACKED = register(Packed())
