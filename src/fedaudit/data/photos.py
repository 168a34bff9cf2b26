"""Square crops of real photographs, the label being the photograph: data that is embedded and worth attacking.

Every photograph is parted by one straight line. Test crops come from one side and train crops from the other, so no
pixel is ever in both. Within a side the crops may overlap. Nothing is drawn at random.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from fedaudit.data.catalogue import Layout, Request, add_dataset
from fedaudit.data.dataset import Dataset
from fedaudit.data.files import read_parquet
from fedaudit.data.images import IMAGE_SUFFIXES, image_dataset, in_memory, read_image, resize
from fedaudit.utils.errors import BadInput, MissingData
from fedaudit.utils.image_bytes import decode

Pixels = np.ndarray[Any, Any]

SIDES = (96, 128, 160, 192, 224, 256, 320)  # pixels of the photograph, before the downscaling
LARGEST = 224  # every photograph has space for such a square on both sides of its line, so nothing is ever upscaled
COUNTS = {"train": 64, "test": 24}
_OWN_COUNTS = {"train": 8, "test": 4}  # of the user's photographs, of which there are more
_MIN_CONTRAST = 0.07  # standard deviation of the grey levels in [0, 1]; below it there is nothing to see
_MAX_OVERLAP = 0.8  # intersection over union; above it a further crop is the same image again


@dataclass(frozen=True)
class Photo:
    """A photograph and how it is parted.

    axis, line, test_side: the line runs at pixel ``line`` of the x or y axis; the test side lies below or above it.
    focus: (row, column, side) of the centre of interest: the first test crop. None: the middle of the test side.
    """

    name: str
    package: str
    file: str
    axis: Literal["x", "y"]
    line: int
    test_side: Literal["below", "above"]
    focus: tuple[int, int, int] | None = None


@dataclass(frozen=True)
class Crop:
    """A square of a photograph, in its pixels: rows top .. top+side, columns left .. left+side (excluded)."""

    top: int
    left: int
    side: int


_SKIMAGE, _SKLEARN = "skimage/data", "sklearn/datasets/images"
# The colour photographs of scenes that the wheels (scikit-image from 0.24) carry. Left out: the right image of the
# motorcycle (the same scene again), hubble_deep_field (black but for specks), retina and ihc (one texture all over).
PHOTOS = (
    Photo("astronaut", _SKIMAGE, "astronaut.png", "y", 256, "below", (104, 224, 200)),
    Photo("cat", _SKIMAGE, "chelsea.png", "x", 226, "above", (150, 338, 224)),
    Photo("coffee", _SKIMAGE, "coffee.png", "x", 376, "below", (130, 264, 224)),
    Photo("rocket", _SKIMAGE, "rocket.jpg", "x", 224, "above", (240, 324, 224)),
    Photo("motorcycle", _SKIMAGE, "motorcycle_left.png", "x", 330, "above", (270, 560, 340)),
    Photo("pagoda", _SKLEARN, "china.jpg", "x", 376, "below", (215, 205, 330)),
    Photo("flower", _SKLEARN, "flower.jpg", "x", 224, "above", (222, 344, 240)),
)


def plan_crops(
    photo: Photo, pixels: Pixels, image_size: int, counts: Mapping[str, int] = COUNTS
) -> dict[str, list[Crop]]:
    """Plan the train and test crops of ``pixels``, uint8 (H, W, 3), at least ``image_size`` large, so none is upscaled.

    The first test crop is the photo's focus. Each further one, of all squares on a grid with enough contrast, is the
    one that overlaps least with those before it (farthest first), until there are enough or the rest would repeat.
    Enough contrast is a fixed floor and, where there are squares in plenty, that of the better half of them.
    """
    height, width = pixels.shape[:2]
    low = (0, 0, photo.line, width) if photo.axis == "y" else (0, 0, height, photo.line)
    high = (photo.line, 0, height, width) if photo.axis == "y" else (0, photo.line, height, width)
    below = photo.test_side == "below"
    regions = {"train": high if below else low, "test": low if below else high}
    grey = pixels.mean(axis=2) / 255
    plan = {}
    for split, (top, left, bottom, right) in regions.items():
        largest = min(bottom - top, right - left)
        if image_size > largest:
            raise BadInput(f"photograph '{photo.name}' has no {image_size} px square on each side; use <= {largest}")
        squares = _grid(top, left, bottom, right, image_size)
        contrast = np.array([_contrast(grey, square) for square in squares])
        plenty = len(squares) >= 4 * counts[split]
        worth = np.flatnonzero(contrast >= max(_MIN_CONTRAST, float(np.median(contrast)) if plenty else 0.0))
        crops = [squares[i] for i in worth]
        row, column, side = photo.focus or ((top + bottom) // 2, (left + right) // 2, largest)
        side = min(max(side, image_size), largest)
        first = Crop(_clip(row - side // 2, top, bottom - side), _clip(column - side // 2, left, right - side), side)
        if split == "train":
            first = squares[int(contrast.argmax())]
        plan[split] = _spread(first, crops, counts[split])
    return plan


def load_photo(photo: Photo) -> Pixels:
    """Return the uint8 pixels (H, W, 3) of an embedded photograph; MissingData where the package lacks the file."""
    package, _, folder = photo.package.partition("/")
    spec = find_spec(package)
    places = (spec.submodule_search_locations if spec else None) or []
    path = next((p for p in (Path(place) / folder / photo.file for place in places) if p.is_file()), None)
    if path is None:
        distribution = {"skimage": "scikit-image>=0.24", "sklearn": "scikit-learn>=1.5"}[package]
        raise MissingData(f"photograph {photo.file} is not in the installed {package}; pip install '{distribution}'")
    return read_image(path)


def _grid(top: int, left: int, bottom: int, right: int, smallest: int) -> list[Crop]:
    largest = min(bottom - top, right - left)
    sides = [s for s in SIDES if smallest <= s <= largest] or [largest]
    return [
        Crop(row, column, side)
        for side in sides
        for row in _steps(top, bottom - side, side // 6)
        for column in _steps(left, right - side, side // 6)
    ]


def _steps(first: int, last: int, step: int) -> list[int]:
    return [round(v) for v in np.linspace(first, last, (last - first) // step + 1 if last > first else 1)]


def _clip(value: int, low: int, high: int) -> int:
    return max(low, min(value, high))


def _contrast(grey: Pixels, crop: Crop) -> float:
    return float(grey[crop.top : crop.top + crop.side : 4, crop.left : crop.left + crop.side : 4].std())


def _spread(first: Crop, candidates: list[Crop], count: int) -> list[Crop]:
    boxes = np.array([(c.top, c.left, c.side) for c in candidates]).reshape(-1, 3)
    chosen, worst, last = [first], np.zeros(len(boxes)), first
    while len(chosen) < count and len(boxes):
        worst = np.maximum(worst, _overlap(boxes, last))
        best = int(worst.argmin())
        if worst[best] > _MAX_OVERLAP:
            break
        last = candidates[best]
        chosen.append(last)
    return chosen


def _overlap(boxes: Pixels, crop: Crop) -> Pixels:
    top, left, side = boxes.T
    rows = np.minimum(top + side, crop.top + crop.side) - np.maximum(top, crop.top)
    columns = np.minimum(left + side, crop.left + crop.side) - np.maximum(left, crop.left)
    shared = np.clip(rows, 0, None) * np.clip(columns, 0, None)
    return np.asarray(shared / (side**2 + crop.side**2 - shared))


def _cut(
    photos: list[tuple[Photo, Pixels]],
    request: Request,
    default_size: int,
    source: str,
    counts: Mapping[str, int] = COUNTS,
) -> Dataset:
    size = request.image_size or default_size
    if size > LARGEST:
        raise BadInput(f"image_size={size} for data set '{request.name}'; its photographs can be cut at 4 to {LARGEST}")
    splits = {}
    plans = [plan_crops(photo, pixels, size, counts) for photo, pixels in photos]
    for split in ("train", "test"):
        found = sorted(
            ((rank, label, crop) for label, plan in enumerate(plans) for rank, crop in enumerate(plan[split])),
            key=lambda f: f[:2],
        )
        images, labels = [], []
        for _, label, crop in found[: request.limit]:
            square = photos[label][1][crop.top : crop.top + crop.side, crop.left : crop.left + crop.side]
            tensor = torch.from_numpy(np.ascontiguousarray(square)).permute(2, 0, 1).float().div_(255)
            images.append(resize(tensor[None], size))
            labels.append(label)
        splits[split] = (torch.cat(images), np.array(labels))
    names = [photo.name for photo, _ in photos]
    return image_dataset(
        request, splits["train"], splits["test"], class_names=names, num_classes=len(names), source=source
    )


def _read_embedded(_: list[Path], request: Request) -> Dataset:
    source = (
        "photographs in the scikit-image and scikit-learn packages: astronaut (NASA), rocket (SpaceX) public domain; "
        "cat (Stefan van der Walt) and coffee (Rachel Michetti) CC0; motorcycle from the Middlebury 2014 stereo data; "
        "pagoda (danielbuechele) and flower (vultilion) CC BY 2.0"
    )
    return _cut([(photo, load_photo(photo)) for photo in PHOTOS], request, 32, source, COUNTS)


add_dataset(
    "photos",
    "square crops of seven real colour photographs, the label is the photograph (32 px; up to 224)",
    "embedded in the scikit-image and scikit-learn packages",
    Layout(_read_embedded),
    needs="nothing",
)


def _halves(name: str, pixels: Pixels) -> Photo:
    """Part a photograph across the middle of its longer axis; the focus is the middle of the first half."""
    height, width = pixels.shape[:2]
    axis: Literal["x", "y"] = "x" if width >= height else "y"
    return Photo(name, "", "", axis, max(height, width) // 2, "below")


def _read_parquet(paths: list[Path], request: Request) -> Dataset:
    columns = read_parquet(paths[0], "image", "name")
    named = zip(columns["name"], columns["image"], strict=True)
    pixels = in_memory((decode(data, f"{paths[0]}, {n}") for n, data in named), paths[0])
    stems = [Path(str(n)[:200]).stem for n in columns["name"]]
    return _cut_halves(list(zip(stems, pixels, strict=True)), request)


def _read_folder(paths: list[Path], request: Request) -> Dataset:
    files = sorted(path for path in paths[0].iterdir() if path.suffix.lower() in IMAGE_SUFFIXES)
    if len(files) < 2:
        raise BadInput(f"{paths[0]} has {len(files)} image files; put at least 2 photographs (PNG, JPEG) there")
    pixels = in_memory(map(read_image, files), paths[0])
    return _cut_halves(list(zip([file.stem for file in files], pixels, strict=True)), request)


def _cut_halves(files: list[tuple[str, Pixels]], request: Request) -> Dataset:
    photos = [(_halves(name, pixels), pixels) for name, pixels in files]
    return _cut(
        photos, request, LARGEST, "the photographs in your data folder; see there for their licences", _OWN_COUNTS
    )


add_dataset(
    "natural-photos",
    "square crops of your own photographs, the label is the photograph (224 px); test and train from opposite halves",
    "put photographs (PNG or JPEG, such as the 24 of the Kodak suite) into DATA_DIR/natural-photos/",
    Layout(_read_parquet, ("photos.parquet",), ("natural_photos", "natural-photos")),
    Layout(_read_folder, (".",), ("natural_photos", "natural-photos")),
    needs="photographs of at least 448 x 224 px; parquet files need pyarrow",
)
