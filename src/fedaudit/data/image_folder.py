"""Folders of images, one folder per class, as ImageNet has: train/CLASS/*.jpg and val/CLASS/*.jpg."""

from __future__ import annotations

from pathlib import Path

import torch

from fedaudit.data.catalogue import Layout, Reader, Request, add_dataset
from fedaudit.data.dataset import Dataset, balanced
from fedaudit.data.example_folder import Listed, central_square, in_class_folders
from fedaudit.data.files import reading
from fedaudit.data.images import IMAGE_SUFFIXES, MAX_BYTES, image_dataset
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
        listed, names = in_class_folders(paths, _pictures)
        splits = [_pixels(part, path, size, request) for part, path in zip(listed, paths, strict=True)]
        return image_dataset(request, *splits, class_names=names, num_classes=len(names), source=source)

    return read


def _pictures(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.suffix.lower() in IMAGE_SUFFIXES)


def _pixels(listed: Listed, folder: Path, size: int | None, request: Request) -> tuple[torch.Tensor, torch.Tensor]:
    files, targets = listed.files, listed.targets
    assert isinstance(targets, torch.Tensor)
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
    return pixels if size is None else central_square(pixels, size), most


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
