"""What a kind of examples is, and the registry of kinds."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar, TypeVar

import torch
from torch import Tensor

from fedaudit.utils.errors import BadInput
from fedaudit.utils.registry import Registry


class ExampleKind:
    """A kind of examples. What is not overridden holds for examples of real values, used as they are given.

    Data sets, transcripts and results name the kind; whoever needs to know more asks the kind itself, and who works on
    some kinds only declares which (an attack's ``examples``, a model's ``input``). Nobody compares names.

    Class attributes:
        name: in data sets and files.
        summary: one line.
        plural: what several examples are called in the report: ``images``.
        described: what they are, in errors.
        axes: names of the axes of one example.
        letters: their lengths, as the documentation writes them: ``C, H, W``.
        arrays: the arrays that :meth:`read` takes, in words.
        array_axes: how many axes these may have, with that of the examples.
        element: what one value of an example is called.
        dtype: of examples.
        bounds: the least and the largest value that an element can have; None: any finite one.
        resizable: whether ``data.image_size`` means something.
        drawing: how its drawings are read, in sentences, for readers of the report; empty: that is plain.
        discrete: whether its elements are tokens of a vocabulary, which data sets then describe by a ``TokenInfo``.
        packed: whether an example is several tensors, which data sets then describe by a ``Packing``.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    plural: ClassVar[str]
    described: ClassVar[str]
    axes: ClassVar[tuple[str, ...]]
    letters: ClassVar[str]
    arrays: ClassVar[str]
    array_axes: ClassVar[tuple[int, ...]]
    element: ClassVar[str] = "value"
    dtype: ClassVar[torch.dtype] = torch.float32
    bounds: ClassVar[tuple[float, float] | None] = None
    resizable: ClassVar[bool] = False
    drawing: ClassVar[str] = ""
    discrete: ClassVar[bool] = False
    packed: ClassVar[bool] = False

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Whether one example can have this shape."""
        return len(shape) == len(self.axes) and min(shape) >= 1

    def channels(self, shape: tuple[int, ...]) -> int:  # noqa: ARG002 (images use it)
        """Return how many values the mean and the standard deviation of examples of this shape have."""
        return 1

    # --- from arrays to examples ------------------------------------------------------------------------------------

    def arrange(self, array: Tensor, where: str, channels: str | None = None) -> Tensor:  # noqa: ARG002
        """Return the array with its axes in the order that :meth:`read` takes; ``channels``: where an image's stand.

        Raises:
            BadInput: the order can't be told; ``where`` names the data.
        """
        return array

    def read(self, array: Tensor, where: str) -> Tensor:
        """Return the examples (n, ...) in an array with one of ``array_axes``, which is not empty.

        Raises:
            BadInput: a value isn't finite, or out of bounds; ``where`` names the data.
        """
        examples = array.to(self.dtype)
        self.check_finite(examples, where)
        self.check_bounds(examples, where)
        return examples.contiguous()

    def said(self, given: tuple[int, ...], read: tuple[int, ...]) -> str:  # noqa: ARG002 (images use it)
        """Return what an example of the shape ``given``, ``read`` as this one, was taken for; "" if that is plain."""
        return ""

    def scaled(self, train: Tensor, test: Tensor, where: str) -> tuple[Tensor, Tensor, str]:  # noqa: ARG002
        """Return both splits as :meth:`read` left them, brought into bounds by one scale, and that scale in words.

        Raises:
            BadInput: no scale fits; ``where`` names the data.
        """
        return train, test, ""

    def prepare(self, train: Tensor, test: Tensor) -> tuple[Tensor, Tensor, tuple[float, ...], tuple[float, ...]]:
        """Return both splits (n, ...) as a data set holds them, and mean and standard deviation for the model."""
        channels = self.channels(tuple(train.shape[1:]))
        return train, test, (0.0,) * channels, (1.0,) * channels

    def check_guess(self, array: Tensor, where: str) -> None:
        """Raise where an array that has as many axes as this kind's may well be of another kind.

        Asked only where nobody says the kind.

        Raises:
            BadInput: it may; the message says how to say the kind.
        """

    def check_finite(self, examples: Tensor, where: str) -> None:
        """Raise where a value is not finite.

        Raises:
            BadInput: one is.
        """
        if not bool(torch.isfinite(examples).all()):
            raise BadInput(f"{where}: the {self.plural} have values that are not finite; fill or remove them first")

    def check_bounds(self, examples: Tensor, where: str, remedy: str | None = None) -> None:
        """Raise where a value is out of bounds.

        Raises:
            BadInput: one is; ``remedy`` says what to do.
        """
        if self.bounds is None:
            return
        low, high = float(examples.min()), float(examples.max())
        if low < self.bounds[0] or high > self.bounds[1]:
            raise BadInput(
                f"{where}: {self.name} values lie in [{low:.3g}, {high:.3g}], not in {self._interval}; "
                f"{remedy or f'scale them to {self._interval}'}"
            )

    def fault(self, examples: Tensor) -> str | None:
        """Return why examples (n, ...) read from a file can't be of this kind; None where they can."""
        if examples.dtype != self.dtype or not torch.isfinite(examples).all():
            return f"the inputs must be finite {str(self.dtype).removeprefix('torch.')} numbers"
        if self.bounds is not None and bool((examples < self.bounds[0]).any() | (examples > self.bounds[1]).any()):
            return f"a {self.element} lies outside of {self._interval}"
        return None

    @property
    def _interval(self) -> str:
        low, high = self.bounds or (-torch.inf, torch.inf)
        return f"[{low:g}, {high:g}]"

    # --- what the model sees ----------------------------------------------------------------------------------------

    def normalise(self, examples: Tensor, mean: tuple[float, ...], std: tuple[float, ...]) -> Tensor:
        """Return what the model sees of examples (n, ...): (x − mean) / std, per channel."""
        # in place: new memory costs more than the arithmetic
        return (examples - _channelwise(mean, examples)).div_(_channelwise(std, examples))

    def denormalise(self, inputs: Tensor, mean: tuple[float, ...], std: tuple[float, ...]) -> Tensor:
        """Undo :meth:`normalise`."""
        return inputs * _channelwise(std, inputs) + _channelwise(mean, inputs)

    # --- comparison -------------------------------------------------------------------------------------------------

    def vectors(self, examples: Tensor) -> Tensor:
        """Return (n, p): of two examples, the squared distance of these vectors tells how far they are apart."""
        return examples.flatten(1)

    def stored(self, examples: Tensor) -> Sequence[Tensor]:
        """Return each of examples (n, ...) as a file would keep it: those that are equal in it are the same."""
        return list(examples.detach().cpu())

    def fingerprints(self, examples: Tensor) -> Tensor:
        """Return (n,) int64: a hash of every example as it is stored, the same wherever the example came from."""
        shape = str(tuple(examples.shape[1:])).encode()
        kept = self.stored(examples)
        digests = [hashlib.sha256(shape + example.numpy().tobytes()).digest()[:8] for example in kept]
        return torch.tensor([int.from_bytes(digest, "big", signed=True) for digest in digests], dtype=torch.int64)

    # --- what readers see -------------------------------------------------------------------------------------------

    def draw(self, examples: Tensor) -> Tensor:
        """Return (k, ...) examples as one drawing, (1 or 3, height, width) in [0, 1]: a line of grey values each."""
        lines = self.vectors(examples).float()
        low, high = self.bounds or (float(lines.min()), float(lines.max()))
        return ((lines - low) / (high - low or 1.0)).clamp(0, 1)[None]

    def draw_over(self, recovered: Tensor, true: Tensor) -> Tensor:  # noqa: ARG002 (signals use it)
        """Return the drawing of what was recovered of one true example, (...) both, whose own stands beside it."""
        return self.draw(recovered[None])

    def drawn_up(self, shape: tuple[int, ...], count: int, mean: Tensor, std: Tensor) -> Tensor | None:  # noqa: ARG002
        """Return (count, *shape) made-up examples that are nobody's, the same each time; None: there are none.

        Attacks are tried on them where an adversary has no others.

        Args:
            shape: of one example.
            count: how many.
            mean, std: (channels,) of the data, which everybody in the federation knows.
        """
        return None

    def write(self, example: Tensor, path: Path) -> None:
        """Write the drawing of one example (...) as a PNG.

        Raises:
            OSError: the file can't be written.
        """
        save_png(self.draw(example[None]), path)


def _channelwise(values: tuple[float, ...], like: Tensor) -> Tensor:
    shape = (1, -1, *([1] * (like.ndim - 2)))
    return torch.tensor(values, dtype=like.dtype, device=like.device).view(shape)


def channel_statistics(examples: Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return the mean and standard deviation per channel of examples (n, C, ...), as two tuples of C."""
    values = examples.transpose(0, 1).flatten(1)
    means = [float(channel.mean(dtype=torch.float64)) for channel in values]
    stds = [
        float(((channel - mean) ** 2).mean(dtype=torch.float64).sqrt())
        for channel, mean in zip(values, means, strict=True)
    ]
    return tuple(means), tuple(stds)


# The ranges that whole numbers are taken for, the first that holds them all: unsigned of 12 and 16 bits, Hounsfield
# units of 12 bits, signed of 16 bits.
_DEPTHS = ((0, 4095), (-1024, 3071), (0, 65535), (-32768, 32767))
DARK = 0.25  # of the range from black to white: values that stay below use a part of their depth only


def lightened(train: Tensor, test: Tensor) -> tuple[Tensor, Tensor, str]:
    """Return splits in [0, 1], scaled by their largest value where all would be nearly black, and that in words.

    So bytes of 0 to 16, or of 0 and 1, divided by 255: a model that normalises sees the same.
    """
    most = max(float(train.max()), float(test.max()))
    if not 0 < most < DARK:
        return train, test, ""
    said = f"values 0 to {most:.3g} ({255 * most:.3g} of 255), nearly black, are scaled to [0, 1]"
    return train / most, test / most, said


def in_depth(train: Tensor, test: Tensor, where: str, plural: str) -> tuple[Tensor, Tensor, str]:
    """Return both splits of whole numbers in [0, 1], scaled by the range of their depth, and that in words.

    The depth is 12 bits where all values of both splits lie in 0..4095, or, in Hounsfield units, in -1024..3071; else
    16 bits. So a value is the scaled one times the range's width, plus its lower end.
    """
    least, most = int(min(train.min(), test.min())), int(max(train.max(), test.max()))
    depth = next((d for d in _DEPTHS if d[0] <= least and most <= d[1]), None)
    remedy = "give floats in [0, 1], scaled by what is black and white in your data"
    if depth is None:
        raise BadInput(f"{where}: {plural} of whole numbers from {least} to {most} have more than 16 bits; {remedy}")
    low, high = depth
    if (least >= 0 and most < DARK * high) or (least < 0 and most - least < DARK * (high - low)):
        raise BadInput(
            f"{where}: {plural} of values {least} to {most} use a small part of {low} to {high} and would be nearly "
            f"black, or all grey; {remedy}"
        )
    first, second = (x.float().sub_(low).div_(high - low) for x in (train, test))
    return first, second, f"values {low} to {high} are scaled to [0, 1]"


def save_png(pixels: Tensor, path: Path) -> None:
    """Write pixels (C, H, W) in [0, 1] as an 8-bit PNG: grey, colours, or other numbers of bands as :func:`in_bands`.

    Raises:
        OSError: the file can't be written.
    """
    from PIL import Image  # here: whoever only reads data shouldn't wait for it

    array = eight_bit(in_bands(pixels)).permute(1, 2, 0).numpy()
    Image.fromarray(array[:, :, 0] if array.shape[2] == 1 else array).save(path)


def in_bands(pixels: Tensor) -> Tensor:
    """Return pixels (C, H, W) as they can be drawn: of other than 1 or 3 bands each in grey, four a row.

    A file format would take the second or fourth for opacity.
    """
    bands, height, width = pixels.shape
    if bands in (1, 3):
        return pixels
    columns = min(bands, BANDS_IN_A_ROW)
    rows = -(-bands // columns)
    sheet = pixels.new_full((1, rows * (height + 1) - 1, columns * (width + 1) - 1), 0.5)
    for band, picture in enumerate(pixels):
        top, left = band // columns * (height + 1), band % columns * (width + 1)
        sheet[0, top : top + height, left : left + width] = picture
    return sheet


def eight_bit(pixels: Tensor) -> Tensor:
    """Return pixels in [0, 1] as uint8, on the CPU."""
    return (pixels.detach().cpu().clamp(0, 1) * 255).round().to(torch.uint8)


BANDS_IN_A_ROW = 4
EXAMPLE_KINDS: Registry[ExampleKind] = Registry("kind of examples")

Kind = TypeVar("Kind", bound=ExampleKind)


def register(kind: Kind) -> Kind:
    """Add a kind to ``EXAMPLE_KINDS`` under its own name, and return it.

    Raises:
        ValueError: the name is taken.
    """
    return EXAMPLE_KINDS.register(kind.name, kind.summary)(kind)


def example_kind(name: str) -> ExampleKind:
    """Return the kind ``name``.

    Raises:
        BadInput: no such kind.
    """
    return EXAMPLE_KINDS[name].value


def kind_of(array: Tensor, where: str) -> ExampleKind:
    """Return the first kind that reads arrays with as many axes as this one.

    Raises:
        BadInput: there is none, or the array is empty, or may be of another kind; ``where`` names the data.
    """
    for entry in EXAMPLE_KINDS:
        if array.ndim in entry.value.array_axes and array.numel():
            entry.value.check_guess(array, where)
            return entry.value
    wanted = ", or ".join(f"{entry.value.described} {entry.value.arrays}" for entry in EXAMPLE_KINDS)
    raise BadInput(f"{where}: inputs of shape {tuple(array.shape)} cannot be used; give {wanted}, none of them empty")


def fitting_kind(shape: tuple[int, ...], *, discrete: bool | None = None) -> ExampleKind:
    """Return the first kind whose examples have such a shape: for what was written or watched without naming it.

    Args:
        shape: of one example.
        discrete: whether these are whole numbers of a vocabulary; None: unknown.

    Raises:
        BadInput: there is none.
    """
    for entry in EXAMPLE_KINDS:
        if entry.value.fits(shape) and discrete in (None, entry.value.discrete):
            return entry.value
    raise BadInput(f"no kind of examples has the shape {shape}; known: {', '.join(EXAMPLE_KINDS.names())}")
