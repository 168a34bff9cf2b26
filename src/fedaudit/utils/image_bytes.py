"""The bytes of image files that nobody vouches for: told formats only, counted before they are decoded."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from fedaudit.utils.bounds import PICTURE
from fedaudit.utils.errors import BadInput

if TYPE_CHECKING:
    from PIL.Image import Image

Taken = TypeVar("Taken")

FORMATS = ("PNG", "JPEG", "BMP", "PPM", "TIFF", "WEBP")  # what data sets hold, as Pillow calls it
_DEEP = ("I;16", "I;16L", "I;16B", "I;16N", "I", "F")  # Pillow's modes of 16 and 32 bits
MAX_PIXELS = PICTURE.items or 0  # of one image, checked before it is decoded: 8192 x 8192


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
        BadInput: no image of these formats, a damaged one, one of more than MAX_PIXELS, or of more than 8 bits a value.
    """

    def pixels(image: Image) -> np.ndarray[Any, Any]:
        if image.mode in _DEEP:
            raise BadInput(
                f"{where}: an image of more than 8 bits a value, which this data set doesn't have; convert it"
            )
        return np.array(image.convert(mode or ("L" if image.mode in {"1", "L"} else "RGB")))

    return _read(data, where, formats, pixels)


def decode_unit(data: bytes, where: str, white: float | None = None) -> tuple[np.ndarray[Any, Any], float]:
    """Return an image file's colours, float32 (H, W, 3) in [0, 1], and the value that became 1.

    That is ``white``, where it is given: above 255 it suits only grey images of more than 8 bits. Otherwise it is the
    largest that whole numbers of that depth can be, and of floats 1.
    """

    def pixels(image: Image) -> tuple[np.ndarray[Any, Any], float]:
        deep = image.mode in _DEEP
        values = np.array(image if deep else image.convert("RGB")).astype(np.float64 if deep else np.float32)
        most = white or (1.0 if image.mode == "F" else 65535.0)
        most = most if deep else min(white or 255.0, 255.0)
        if not np.isfinite(values).all() or values.min() < 0 or values.max() > most:
            seen = f"{np.nanmin(values):g} to {np.nanmax(values):g}"
            raise BadInput(
                f"{where}: values from {seen}, which aren't numbers between 0 and {most:g}; say which value is white "
                "(data.max_pixel_value), or shift them first"
            )
        scaled = np.asarray(values / np.array(most, values.dtype), dtype=np.float32)
        return np.repeat(scaled[:, :, None], 3, axis=2) if deep else scaled, most

    return _read(data, where, FORMATS, pixels)


def dimensions(data: bytes, where: str, formats: tuple[str, ...] = FORMATS) -> tuple[int, int]:
    """Return the width and the height of an image file's bytes, without decoding it; ``formats`` are Pillow's names."""
    return _read(data, where, formats, lambda image: (image.width, image.height))


def _check_colours(image: Image, where: str) -> None:
    """Refuse colours of more than 8 bits a value, of which Pillow keeps the upper 8: what 12 bits hold gets black."""
    tiles = getattr(image, "tile", [])  # of an image that isn't decoded yet
    read_as = tiles[0][3] if image.mode not in _DEEP and tiles else ""
    sixteen = ";16" in str(read_as) and image.format != "BMP"  # whose 16 bits hold all three colours
    deep = isinstance(read_as, tuple) and image.format == "PPM" and read_as[1] > 255
    if deep or sixteen:
        raise BadInput(
            f"{where}: colours of more than 8 bits a value, of which only 8 would be read; scale them to 8 bits, "
            "or give the images as arrays of values in [0, 1] (fedaudit.Dataset.from_tensors)"
        )


def _read(data: bytes, where: str, formats: tuple[str, ...], take: Callable[[Image], Taken]) -> Taken:
    """Return what ``take`` takes of an image; Pillow reads nothing elsewhere in this package.

    Pillow is told the formats, since for others it has readers that start programs (Ghostscript, for EPS).
    """
    from PIL import Image, UnidentifiedImageError

    if not isinstance(data, bytes):
        raise BadInput(f"{where}: a {type(data).__name__}, not the bytes of an image file; get the file again")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of its own, larger limit, and of metadata
            with Image.open(io.BytesIO(data), formats=formats) as image:
                if image.width * image.height <= MAX_PIXELS:
                    _check_colours(image, where)
                    return take(image)
                why = f"{image.width} x {image.height} pixels, more than {MAX_PIXELS:,}"
    except Image.DecompressionBombError:
        why = f"more than {MAX_PIXELS:,} pixels"
    except UnidentifiedImageError:
        why = f"none of the formats {', '.join(formats)}, or damaged"
    except BadInput:
        raise
    except Exception as error:  # of a damaged file Pillow raises whatever comes
        raise BadInput(f"{where}: not a readable image ({error}); get the file again") from error
    raise BadInput(f"{where}: not a readable image ({why}); get the file again, or make it smaller")
