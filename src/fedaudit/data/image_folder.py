"""Folders of images, one folder per class, as ImageNet has: train/CLASS/*.jpg and val/CLASS/*.jpg."""

from __future__ import annotations

from pathlib import Path

import torch

from fedaudit.data.catalogue import Layout, Reader, Request, add_dataset
from fedaudit.data.dataset import Dataset, balanced, check_names
from fedaudit.data.files import reading
from fedaudit.data.images import IMAGE_SUFFIXES, MAX_BYTES, image_dataset, resize
from fedaudit.modalities.base import DARK
from fedaudit.utils.bounds import PICTURE, read_bytes
from fedaudit.utils.errors import BadInput
from fedaudit.utils.image_bytes import decode_unit


def _reader(default_size: int | None, source: str) -> Reader:
    def read(paths: list[Path], request: Request) -> Dataset:
        size = request.image_size or default_size
        for path in paths:
            if not path.is_dir():
                raise BadInput(f"{path} is a file; data set '{request.name}' needs a folder of class folders there")
        names = sorted(folder.name for folder in paths[0].iterdir() if folder.is_dir())
        check_names(names, str(paths[0]))
        if len(names) < 2:
            raise BadInput(f"{paths[0]} has {len(names)} class folders; put one folder per class there, at least 2")
        splits = [_read_split(path, names, size, request) for path in paths]
        return image_dataset(request, *splits, class_names=names, num_classes=len(names), source=source)

    return read


def _read_split(
    folder: Path, names: list[str], size: int | None, request: Request
) -> tuple[torch.Tensor, torch.Tensor]:
    files: list[Path] = []
    labels: list[int] = []
    for sub in sorted(path for path in folder.iterdir() if path.is_dir()):
        if sub.name not in names:
            raise BadInput(f"{folder} has the class folder '{sub.name}', which the train folder lacks; make them agree")
        found = sorted(path for path in sub.iterdir() if path.suffix.lower() in IMAGE_SUFFIXES)
        files += found
        labels += [names.index(sub.name)] * len(found)
    if not files:
        raise BadInput(
            f"{folder} has no image files ({', '.join(IMAGE_SUFFIXES)}) in its class folders; put some there"
        )
    targets = torch.tensor(labels)
    rows = balanced(targets, request.limit)
    first, _ = _square(files[int(rows[0])], size, request.white)
    if first.numel() * len(rows) > MAX_BYTES:
        many = f"{len(rows)} images of {tuple(first.shape)}"
        raise BadInput(f"{folder}: {many} don't fit into memory; give a limit on the examples or a smaller image_size")
    images = torch.empty((len(rows), *first.shape))
    deepest = 0.0
    for i, row in enumerate(rows.tolist()):
        image, most = _square(files[row], size, request.white)
        deepest = max(deepest, most)
        if image.shape != first.shape:
            raise BadInput(f"{files[row]} differs in size from {files[int(rows[0])]}; give an image_size")
        images[i] = image
    if request.white is None and 0 < float(images.max()) < DARK:
        raise BadInput(
            f"{folder}: its images reach {float(images.max()) * deepest:g} of {deepest:g} and would be nearly black; "
            "say which value is white, data.max_pixel_value: 4095 for 12 bits, 1 for masks of 0 and 1"
        )
    return images, targets[rows]


def _square(path: Path, size: int | None, white: float | None) -> tuple[torch.Tensor, float]:
    """Return an image (3, H, W) in [0, 1], for a given size its central square, resized to that; and what was white."""
    with reading(path):
        data = read_bytes(path, PICTURE)
    values, most = decode_unit(data, str(path), white)
    pixels = torch.from_numpy(values).permute(2, 0, 1).contiguous()
    if size is None:
        return pixels, most
    height, width = pixels.shape[1:]
    side = min(height, width)
    top, left = (height - side) // 2, (width - side) // 2
    return resize(pixels[None, :, top : top + side, left : left + side], size)[0], most


add_dataset(
    "imagenet",
    "colour photographs, central squares (224 px), a thousand classes; use it with a limit",
    "https://image-net.org, as DATA_DIR/imagenet/train/CLASS/*.JPEG and DATA_DIR/imagenet/val/CLASS/*.JPEG",
    Layout(
        _reader(224, "ImageNet (Russakovsky et al., 2015); non-commercial research use"),
        ("train", "val|validation|test"),
        ("imagenet", "ImageNet", "ILSVRC2012"),
    ),
)
add_dataset(
    "image-folder",
    "your own colour images: DATA_DIR/train/CLASS/* and DATA_DIR/test/CLASS/*",
    "put images into DATA_DIR/train/CLASS/ and DATA_DIR/test/CLASS/ and give that DATA_DIR",
    Layout(_reader(None, "your own images"), ("train", "test|val|validation"), (".",)),
)
