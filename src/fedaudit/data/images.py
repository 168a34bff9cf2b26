"""From arrays to a data set: choosing examples, decoding and resizing pictures. All deterministic."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from fedaudit.data.catalogue import Request
from fedaudit.data.dataset import Array, Dataset, Split, as_inputs, within_class_rank
from fedaudit.data.files import reading
from fedaudit.examples.image import IMAGE, channel_statistics
from fedaudit.utils.errors import BadInput

if TYPE_CHECKING:
    from PIL.Image import Image

Taken = TypeVar("Taken")

IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".ppm", ".pgm", ".tif", ".tiff", ".webp")
FORMATS = ("PNG", "JPEG", "BMP", "PPM", "TIFF", "WEBP")  # what files with these suffixes hold, as Pillow calls it
MAX_PIXELS = 2**26  # of one picture, checked before it is decoded: 8192 x 8192
_CHUNK = 1024  # images resized at a time, so that large sets don't need several copies in memory


def resize(images: Tensor, size: int) -> Tensor:
    """Return images (n, C, H, W) resized to (n, C, size, size), bilinear with antialiasing."""
    if images.shape[-2:] == (size, size):
        return images
    parts = [
        torch.nn.functional.interpolate(part, size=(size, size), mode="bilinear", antialias=True)
        for part in images.split(_CHUNK)
    ]
    return torch.cat(parts).clamp_(0, 1)


def decode(
    data: bytes, where: str, mode: str | None = "RGB", formats: tuple[str, ...] = FORMATS
) -> np.ndarray[Any, Any]:
    """Return the uint8 pixels of an image file's bytes.

    Args:
        data: of the file.
        where: it was found.
        mode: "RGB" for (H, W, 3), "L" for (H, W); None for "L" if the file is grey, else "RGB".
        formats: Pillow's names of those that are read.

    Raises:
        BadInput: no image of these formats, a damaged one, or one of more than MAX_PIXELS.
    """

    def pixels(image: Image) -> np.ndarray[Any, Any]:
        return np.array(image.convert(mode or ("L" if image.mode in {"1", "L"} else "RGB")))

    return _read(data, where, formats, pixels)


def dimensions(data: bytes, where: str, formats: tuple[str, ...] = FORMATS) -> tuple[int, int]:
    """Return the width and the height of an image file's bytes, without decoding it.

    Args:
        data: of the file.
        where: it was found.
        formats: Pillow's names of those that are read.

    Raises:
        BadInput: as :func:`decode`, as far as the beginning tells.
    """
    return _read(data, where, formats, lambda image: (image.width, image.height))


def _read(data: bytes, where: str, formats: tuple[str, ...], take: Callable[[Image], Taken]) -> Taken:
    """Return what ``take`` takes of an image. Nothing else in this package has Pillow read anything.

    Pillow is told the formats: of others it has readers that start programs (Ghostscript, for EPS).
    """
    from PIL import Image, UnidentifiedImageError

    if not isinstance(data, bytes):
        raise BadInput(f"{where}: a {type(data).__name__}, not the bytes of an image file; get the file again")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of its own, larger limit, and of metadata
            with Image.open(io.BytesIO(data), formats=formats) as image:
                if image.width * image.height <= MAX_PIXELS:
                    return take(image)
                why = f"{image.width} x {image.height} pixels, more than {MAX_PIXELS:,}"
    except Image.DecompressionBombError:
        why = f"more than {MAX_PIXELS:,} pixels"
    except UnidentifiedImageError:
        why = f"none of the formats {', '.join(formats)}, or damaged"
    except Exception as error:  # of a damaged file Pillow raises whatever comes
        raise BadInput(f"{where}: not a readable image ({error}); get the file again") from error
    raise BadInput(f"{where}: not a readable image ({why}); get the file again, or make it smaller")


def read_image(path: Path, mode: str = "RGB") -> np.ndarray[Any, Any]:
    """Return the uint8 pixels of an image file, as ``decode`` does.

    Raises:
        BadInput: no image, or a damaged one.
    """
    with reading(path):
        data = path.read_bytes()
    return decode(data, str(path), mode)


def balanced(targets: Tensor, limit: int | None) -> Tensor:
    """Return at most ``limit`` row numbers, in ascending order, taken in turn from every class."""
    if limit is None or limit >= len(targets):
        return torch.arange(len(targets))
    rank = within_class_rank(targets)
    order = torch.argsort(rank * (int(targets.max()) + 1) + targets, stable=True)
    return order[:limit].sort().values


def limit_table(whole: Dataset, limit: int | None) -> Dataset:
    """Return the table with both splits cut to at most ``limit`` examples, in equal parts of the classes."""
    splits = []
    for split in (whole.train, whole.test):
        groups = split.targets if split.targets.ndim == 1 else torch.zeros(len(split), dtype=torch.int64)
        splits.append(split[balanced(groups, limit)])
    return replace(whole, train=splits[0], test=splits[1])


def image_dataset(
    request: Request,
    train: tuple[Array, Array],
    test: tuple[Array, Array],
    *,
    class_names: Sequence[str] | None,
    num_classes: int,
    source: str,
    image_size: int | None = None,
) -> Dataset:
    """Make a data set of pixels and labels; ``image_size`` is the size taken where the request names none."""
    size = request.image_size if request.image_size is not None else image_size
    splits: list[Split] = []
    for pixels, labels in (train, test):
        y = torch.as_tensor(np.asarray(labels).astype(np.int64))
        if len(pixels) != len(y) or len(y) == 0:
            raise BadInput(f"data set '{request.name}': {len(pixels)} images but {len(y)} labels; get the files again")
        rows = balanced(y, request.limit)
        chosen = pixels[rows] if isinstance(pixels, Tensor) else pixels[rows.numpy()]
        _, x = as_inputs(chosen, f"data set '{request.name}'", IMAGE.name)
        splits.append(Split(x if size is None else resize(x, size), y[rows]))
    mean, std = channel_statistics(splits[0].inputs)
    return Dataset(
        name=request.name,
        summary=request.summary,
        kind=IMAGE.name,
        task="classification",
        train=splits[0],
        test=splits[1],
        num_classes=num_classes,
        class_names=None if class_names is None else tuple(class_names),
        mean=mean,
        std=std,
        source=source,
    )
