"""What attacks recovered in a study's trials, beside the true images, all of it in one picture: a row a cell."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, product
from typing import Any

import numpy as np

from fedaudit.utils import decode
from fedaudit_lab.studies.spec import StudySpec
from fedaudit_lab.studies.store import Row

Pixels = np.ndarray[Any, Any]
Read = Callable[[Row, str], bytes]  # a file of a trial

_ACROSS = 20  # images of a cell that are shown
_ROWS = 60  # of images, at most; a grid of more cells has no picture
_SMALL, _LARGE, _GAP = 64, 224, 4  # pixels: of an image as it is drawn, at least and at most, and between two of them
_INCH = 100  # pixels of images an inch
_TEXT, _LETTER = 0.17, 0.075  # inches: what stands above a row, and a letter left of it, at most


@dataclass(frozen=True)
class _Shown:
    """The images of a row and what stands above each: true ones, or those that a cell's attack recovered."""

    name: str
    images: list[Pixels]
    captions: list[str]


def recovered(study: StudySpec, rows: Sequence[Row], read: Read) -> bytes | None:
    """Return a picture of what was recovered as a PNG; None where the trials are about no images, or too many cells.

    Nothing is chosen: a cell shows its images in the order of repetitions, updates and places in the batch, the first
    20 where there are more. The true ones stand above all cells that are about the same ones.

    Args:
        study: that was run.
        rows: of its store.
        read: returns what is in a file of a row's trial.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    shown = list(islice(_shown(study, rows, read), _ROWS + 1))
    if not shown or len(shown) > _ROWS:
        return None
    strips = [_strip(row.images) for row in shown]
    sides = [row.images[0].shape[0] for row in shown]
    widest = max(strip.shape[1] for strip in strips) / _INCH
    label = 0.2 + _LETTER * max(len(line) for row in shown for line in row.name.split("\n"))
    heights = [strip.shape[0] / _INCH + _TEXT for strip in strips]
    drawing = plt.figure(figsize=(label + widest + 0.1, sum(heights) + 0.1))
    wide, high = (float(side) for side in drawing.get_size_inches())
    top = high - 0.05
    for row, strip, side, height in zip(shown, strips, sides, heights, strict=True):
        own = strip.shape[1] / _INCH
        place = drawing.add_axes((label / wide, (top - height) / high, own / wide, (height - _TEXT) / high))
        place.imshow(strip, interpolation="nearest")
        place.set_axis_off()
        place.text(-8, strip.shape[0] / 2, row.name, ha="right", va="center", fontsize=8)
        for i, caption in enumerate(row.captions):
            place.text(i * (side + _GAP) + side / 2, -2, caption, ha="center", va="bottom", fontsize=6)
        top -= height
    out = io.BytesIO()
    drawing.savefig(out, format="png", dpi=_INCH, metadata={"Software": None})
    plt.close(drawing)
    return out.getvalue()


def _shown(study: StudySpec, rows: Sequence[Row], read: Read) -> Iterator[_Shown]:
    """Yield the rows of the picture: a cell's, with the true images before it where they aren't those before."""
    order = [axis for axis in study.axes if axis != study.columns] + [study.columns]
    before: list[bytes] = []
    for point in product(*(study.axes[axis] for axis in order)):
        own = [row for row in rows if tuple(row.point[axis] for axis in order) == point]
        found = [pair for row in sorted(own, key=lambda r: r.repetition) for pair in _pairs(row, read)]
        if not found:
            continue
        count, found = len(found), found[:_ACROSS]
        true = [pair[0] for pair in found]
        if true != before:
            yield _Shown("true\n(PSNR in dB above the others)", [_pixels(data) for data in true], ["" for _ in true])
            before = true
        name = "\n".join(point) + (f"\n(the first {len(found)} of {count})" if count > len(found) else "")
        yield _Shown(name, [_pixels(pair[1]) for pair in found], [f"{pair[2]:.1f}" for pair in found])


def _pairs(row: Row, read: Read) -> list[tuple[bytes, bytes, float]]:
    """Return a trial's true images, what was recovered of each, and its PSNR in dB; none where its files are gone."""
    try:
        result: Mapping[str, Any] = json.loads(read(row, "results.json"))
        return [
            (read(row, image["true_image"]), read(row, image["reconstruction"]), image["psnr"])
            for finding in result["findings"]
            if finding.get("kind") == "images"
            for image in finding["images"]
        ]
    except FileNotFoundError:
        return []


def _pixels(data: bytes) -> Pixels:
    """Return a PNG as (side, side, 3) bytes: enlarged by a whole number, or every so many pixels of a large one."""
    image = decode(data, "an image of a trial", formats=("PNG",))
    larger = max(1, _SMALL // max(image.shape[:2]))
    image = image.repeat(larger, axis=0).repeat(larger, axis=1)
    side = min(max(_SMALL, *image.shape[:2]), _LARGE)
    canvas = np.full((side, side, 3), 255, np.uint8)
    rows, columns = (np.linspace(0, n - 1, min(n, side)).round().astype(int) for n in image.shape[:2])
    canvas[: len(rows), : len(columns)] = image[np.ix_(rows, columns)]
    return canvas


def _strip(images: Sequence[Pixels]) -> Pixels:
    gap = np.full((len(images[0]), _GAP, 3), 255, np.uint8)
    return np.concatenate([part for image in images for part in (image, gap)][:-1], axis=1)
