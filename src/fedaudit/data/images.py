"""From arrays to a data set: choosing examples, decoding and resizing pictures. All deterministic."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedaudit.data.catalogue import Request
from fedaudit.data.dataset import Array, Dataset, Split, as_inputs, balanced
from fedaudit.data.files import reading
from fedaudit.modalities.image import IMAGE, image_statistics
from fedaudit.utils.bounds import PICTURE, read_bytes
from fedaudit.utils.errors import BadInput
from fedaudit.utils.image_bytes import decode

IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".ppm", ".pgm", ".tif", ".tiff", ".webp")
MAX_BYTES = 2**31  # of decoded pixels held in memory, a byte a channel
_CHUNK = 1024  # images resized at a time, so that large sets don't need several copies in memory

Pixels = np.ndarray[Any, Any]


def resize(images: Tensor, size: int) -> Tensor:
    """Return images (n, C, H, W) resized to (n, C, size, size), bilinear with antialiasing."""
    if images.shape[-2:] == (size, size):
        return images
    parts = [
        torch.nn.functional.interpolate(part, size=(size, size), mode="bilinear", antialias=True)
        for part in images.split(_CHUNK)
    ]
    return torch.cat(parts).clamp_(0, 1)


def read_image(path: Path, mode: str = "RGB") -> Pixels:
    """Return the uint8 pixels of an image file, as ``decode`` does."""
    with reading(path):
        data = read_bytes(path, PICTURE)
    return decode(data, str(path), mode)


def in_memory(pictures: Iterable[Pixels], path: Path) -> list[Pixels]:
    """Return pictures, decoded one after the other, as a list, as long as all have no more than ``MAX_BYTES``."""
    found, size = [], 0
    for picture in pictures:
        size += picture.nbytes
        if size > MAX_BYTES:
            raise BadInput(f"{path}: its pictures have more than {MAX_BYTES:,} bytes; give a limit on the examples")
        found.append(picture)
    return found


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
        splits.append(Split(x, y[rows]))
    pixels, held_out, _ = IMAGE.scaled(splits[0].inputs, splits[1].inputs, f"data set '{request.name}'")
    splits = [
        Split(x if size is None else resize(x, size), split.targets)
        for x, split in zip((pixels, held_out), splits, strict=True)
    ]
    mean, std = image_statistics(splits[0].inputs)
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


def table_dataset(
    request: Request, train: Split, test: Split, source: str, *, num_classes: int, class_names: Sequence[str] | None
) -> Dataset:
    """Make a data set of the rows of a table, standardised already, and their classes."""
    return Dataset(
        name=request.name,
        summary=request.summary,
        kind="table",
        task="classification",
        train=train,
        test=test,
        num_classes=num_classes,
        class_names=None if class_names is None else tuple(class_names),
        mean=(0.0,),
        std=(1.0,),
        source=source,
    )
