"""A study's images, all of them in one picture: what malicious clients drew, or what attacks recovered."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, product
from pathlib import Path
from typing import Any

import numpy as np

from fedaudit.utils import check_listed, decode, inside
from fedaudit_lab.studies.drawing import plain_text, png, pyplot, write_files
from fedaudit_lab.studies.spec import StudySpec
from fedaudit_lab.studies.store import Row

Pixels = np.ndarray[Any, Any]

_WIDTH, _CAPTION = 4.2, 0.2  # inches: of a strip of images, and of the line above it
_MOST = 16  # columns
_PICTURES = "pictures.png"
_ACROSS = 20  # images of a cell that are shown
_ROWS = 60  # of images, at most; a grid of more cells has no picture
_SMALL, _LARGE, _GAP = 64, 224, 4  # pixels: of an image as it is drawn, at least and at most, and between two of them
_INCH = 100  # pixels of images an inch
_TEXT, _LETTER = 0.17, 0.075  # inches: what stands above a row, and a letter left of it, at most


def write_pictures(study: StudySpec, rows: Sequence[Row], folder: Path) -> Path | None:
    """Write ``pictures.png`` to the study's folder and return its path; None where its trials have no images.

    :func:`recovered` draws what attacks recovered; the following is about what malicious clients drew. Nothing is
    chosen: every finished trial shows all images that its last round kept, from the same codes in each round; above
    them stand real images of the class. Rows are the levels of all axes but the one that tables have across (if there
    are several axes), columns this one's levels, each with all of its seeds.
    """
    with plain_text():
        drawn = pictures(study, rows, folder) or recovered(study, rows, folder)
    if drawn is None:
        return None
    (path,) = write_files(folder, {_PICTURES: drawn})
    return path


def pictures(study: StudySpec, rows: Sequence[Row], folder: Path) -> bytes | None:
    """Return that picture as a PNG; see :func:`write_pictures`."""
    shown = {row.key: found for row in rows if (found := _sheets(folder / "trials" / row.key, row.files))}
    rows = [row for row in rows if row.key in shown]
    if not rows:
        return None
    down = [axis for axis in study.axes if axis != study.columns or len(study.axes) == 1]
    left = list(dict.fromkeys(tuple(row.point[a] for a in down) for row in rows))
    across = sorted(
        {(_across(study, row, down), row.repetition) for row in rows},
        key=lambda column: (list(study.axes[study.columns]).index(column[0]) if column[0] else 0, column[1]),
    )[:_MOST]
    strip = shown[rows[0].key][0]
    high = _WIDTH * strip.shape[0] / strip.shape[1] + _CAPTION
    size = (1.2 + _WIDTH * len(across), 0.2 + high * (len(left) + 1))
    drawing, axes = pyplot().subplots(len(left) + 1, len(across), figsize=size, squeeze=False, layout="constrained")
    for place in axes.flat:
        place.set_xticks([])
        place.set_yticks([])
        for side in place.spines.values():
            side.set_visible(False)
    for row in rows:
        column = (_across(study, row, down), row.repetition)
        if column not in across:
            continue
        i, j = left.index(tuple(row.point[a] for a in down)) + 1, across.index(column)
        real, last, caption = shown[row.key]
        axes[0, j].imshow(real, cmap="gray", vmin=0, vmax=255, interpolation="nearest")
        axes[0, j].set_title(f"{column[0]} seed {row.repetition}".strip(), fontsize=8)
        axes[i, j].imshow(last, cmap="gray", vmin=0, vmax=255, interpolation="nearest")
        axes[i, j].set_title(caption, fontsize=6, pad=2)
    for i, name in enumerate(["real", *map(", ".join, left)]):
        axes[i, 0].set_ylabel(name, rotation=0, ha="right", va="center", fontsize=8)
    return png(drawing, dpi=150)


def _across(study: StudySpec, row: Row, down: Sequence[str]) -> str:
    return "" if study.columns in down else row.point[study.columns]


def _sheets(trial: Path, files: Mapping[str, str]) -> tuple[Pixels, Pixels, str] | None:
    """Return a trial's real images, those of its attack's last round, and what they come from, in words."""
    if not (trial / "results.json").is_file():
        return None
    result: dict[str, Any] = json.loads(_read(trial, "results.json", files))
    finding = next((f for f in result["findings"] if f.get("kind") == "class-images"), None)
    if finding is None or len(finding["image_rows"]) < 2:
        return None
    real, last = (finding["image_rows"][i] for i in (0, -1))
    course = next((f["history"] for f in result["federations"] if f["name"] == finding["federation"]), None) or {}
    caption = last["title"].rpartition(", ")[0]  # without its PSNR
    if course.get("accuracy"):
        caption += f"; accuracy {course['accuracy'][-1]:.2f}"
    first, second = (decode(_read(trial, s["path"], files), s["path"], None, ("PNG",)) for s in (real, last))
    return first, second, caption


def _read(trial: Path, name: str, files: Mapping[str, str]) -> bytes:
    """Return what is in a trial's file, which must be what the store says of it."""
    path = inside(trial, name)
    check_listed(path, name, files, remedy="delete the folder and run the study again")
    return path.read_bytes()


@dataclass(frozen=True)
class _Shown:
    """The images of a row and what stands above each: true ones, or those that a cell's attack recovered."""

    name: str
    images: list[Pixels]
    captions: list[str]


def recovered(study: StudySpec, rows: Sequence[Row], folder: Path) -> bytes | None:
    """Return a picture of what was recovered as a PNG; None where the trials are about no images, or too many cells.

    Nothing is chosen: a cell shows its images in the order of repetitions, updates and places in the batch, the first
    20 where there are more. The true ones stand above all cells that are about the same ones: the axis that tables have
    across comes last, or first if that takes fewer rows.
    """
    others = [axis for axis in study.axes if axis != study.columns]
    orders = [*others, study.columns], [study.columns, *others]
    shown = min((list(islice(_shown(study, rows, folder, order), _ROWS + 1)) for order in orders), key=len)
    if not shown or len(shown) > _ROWS:
        return None
    strips = [_strip(row.images) for row in shown]
    sides = [row.images[0].shape[0] for row in shown]
    widest = max(strip.shape[1] for strip in strips) / _INCH
    label = 0.2 + _LETTER * max(len(line) for row in shown for line in row.name.split("\n"))
    heights = [strip.shape[0] / _INCH + _TEXT for strip in strips]
    drawing = pyplot().figure(figsize=(label + widest + 0.1, sum(heights) + 0.1))
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
    return png(drawing, dpi=_INCH)


def _shown(study: StudySpec, rows: Sequence[Row], folder: Path, order: Sequence[str]) -> Iterator[_Shown]:
    """Yield the rows of the picture: a cell's, with the true images before it where they aren't those before."""
    before: list[bytes] = []
    for point in product(*(study.axes[axis] for axis in order)):
        own = [row for row in rows if tuple(row.point[axis] for axis in order) == point]
        found = [
            pair for row in sorted(own, key=lambda r: r.repetition) for pair in _pairs(row, folder / "trials" / row.key)
        ]
        if not found:
            continue
        count, found = len(found), found[:_ACROSS]
        true = [pair[0] for pair in found]
        if true != before:
            yield _Shown("true\n(PSNR in dB above the others)", [_pixels(data) for data in true], ["" for _ in true])
            before = true
        name = "\n".join(point) + (f"\n(the first {len(found)} of {count})" if count > len(found) else "")
        yield _Shown(name, [_pixels(pair[1]) for pair in found], [f"{pair[2]:.1f}" for pair in found])


def _pairs(row: Row, trial: Path) -> list[tuple[bytes, bytes, float]]:
    """Return a trial's true images, what was recovered of each, and its PSNR in dB; none where its files are gone."""
    try:
        result: Mapping[str, Any] = json.loads(_read(trial, "results.json", row.files))
        return [
            (*(_read(trial, image[which], row.files) for which in ("true_image", "reconstruction")), image["psnr"])
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
