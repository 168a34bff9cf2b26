"""Image sets from local files: as parquet or npz, or as their authors publish them."""

from __future__ import annotations

import string
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from fedaudit.data.batches import read_pickled_batch
from fedaudit.data.catalogue import Layout, Reader, Request, add_dataset
from fedaudit.data.dataset import Dataset, balanced
from fedaudit.data.files import Numbers, read_idx, read_mat, read_npz, read_parquet, reading, whole_numbers
from fedaudit.data.images import image_dataset, in_memory, read_image
from fedaudit.utils.errors import BadInput
from fedaudit.utils.image_bytes import decode

_CIFAR = "A. Krizhevsky, Learning Multiple Layers of Features from Tiny Images, 2009; no formal licence"
_CIFAR10_NAMES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
_FASHION_NAMES = (
    *("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"),
)
_DIGIT_NAMES = tuple(string.digits)
_IDX_FILES = (
    *("train-images-idx3-ubyte|train-images.idx3-ubyte", "train-labels-idx1-ubyte|train-labels.idx1-ubyte"),
    *("t10k-images-idx3-ubyte|t10k-images.idx3-ubyte", "t10k-labels-idx1-ubyte|t10k-labels.idx1-ubyte"),
)

Pair = tuple[Numbers, Numbers]


def _checked(path: Path, pixels: Numbers, labels: Numbers, num_classes: int, sides: tuple[int, ...] = ()) -> Pair:
    """Return pixels and labels if they are what the data set's files hold; otherwise say what is wrong with them."""
    if pixels.dtype != np.uint8 or pixels.ndim not in (3, 4) or (sides and pixels.shape[1:] != sides):
        wanted = f"(n, {', '.join(map(str, sides))})" if sides else "(n, height, width)"
        raise BadInput(f"{path}: images are {pixels.dtype} {pixels.shape}, not uint8 {wanted}; get the file again")
    if labels.ndim != 1 or len(labels) != len(pixels) or len(labels) == 0:
        raise BadInput(f"{path}: {len(pixels)} images but labels of shape {labels.shape}; get the file again")
    numbers = whole_numbers(labels, path, "labels")
    if int(numbers.min()) < 0 or int(numbers.max()) >= num_classes:
        raise BadInput(f"{path}: label {numbers.max()} is not in 0..{num_classes - 1}; get the file again")
    return pixels, numbers


def _png_parquet(num_classes: int, source: str, class_names: Sequence[str] | None = None) -> Reader:
    """Return a reader of two parquet files with the columns png (bytes of an image file), label, maybe class_name."""

    def read(paths: list[Path], request: Request) -> Dataset:
        splits: list[Pair] = []
        names = dict(enumerate(class_names or ()))
        for path in paths:
            columns = read_parquet(path)
            if not {"png", "label"} <= columns.keys():
                raise BadInput(f"{path} lacks the columns png and label; it has {', '.join(columns)}")
            labels = whole_numbers(columns["label"], path, "labels")
            if not labels.size or not 0 <= labels.min() <= labels.max() < num_classes:
                raise BadInput(f"{path}: no labels, or labels outside 0..{num_classes - 1}; get the file again")
            if "class_name" in columns:
                names.update(zip(labels.tolist(), map(str, columns["class_name"]), strict=True))
            rows = balanced(torch.from_numpy(labels), request.limit).tolist()
            pixels = in_memory((decode(columns["png"][row], f"{path}, row {row}") for row in rows), path)
            with reading(path):
                splits.append((np.stack(pixels), labels[rows]))
        known = [names[i] for i in range(num_classes)] if len(names) == num_classes else None
        return image_dataset(request, *splits, class_names=known, num_classes=num_classes, source=source)

    return read


def _npz(class_names: tuple[str, ...], source: str) -> Reader:
    """Return a reader of one npz with x_train, y_train, x_test, y_test."""

    def read(paths: list[Path], request: Request) -> Dataset:
        x, y, x_test, y_test = read_npz(paths[0], "x_train", "y_train", "x_test", "y_test")
        count = len(class_names)
        train, test = (_checked(paths[0], *pair, count) for pair in ((x, y), (x_test, y_test)))
        return image_dataset(request, train, test, class_names=class_names, num_classes=count, source=source)

    return read


def _idx(class_names: tuple[str, ...], source: str, *, first_label: int = 0, transposed: bool = False) -> Reader:
    """Return a reader of four idx files: train images and labels, test images and labels."""

    def read(paths: list[Path], request: Request) -> Dataset:
        splits = []
        for images, labels in (paths[:2], paths[2:]):
            pixels, numbers = read_idx(images), whole_numbers(read_idx(labels), labels, "labels") - first_label
            pixels = np.swapaxes(pixels, 1, 2) if transposed and pixels.ndim == 3 else pixels
            splits.append(_checked(images, pixels, numbers, len(class_names)))
        return image_dataset(request, *splits, class_names=class_names, num_classes=len(class_names), source=source)

    return read


def _read_cifar_batches(train: list[Path], test: Path, key: str, num_classes: int) -> list[Pair]:
    splits = []
    for paths in (train, [test]):
        pairs = []
        for path in paths:
            batch = read_pickled_batch(path)
            if not {"data", key} <= batch.keys():
                raise BadInput(f"{path} has no '{key}' beside 'data', only {', '.join(batch)}; get the file again")
            with reading(path):
                pixels, labels = batch["data"], batch[key]
                if not isinstance(pixels, np.ndarray) or not isinstance(labels, np.ndarray | list):
                    raise ValueError(f"'data' isn't an array, or '{key}' no list")
                numbers = whole_numbers(labels, path, key)
                pairs.append(_checked(path, pixels.reshape(-1, 3, 32, 32), numbers, num_classes, (3, 32, 32)))
        splits.append((np.concatenate([p for p, _ in pairs]), np.concatenate([y for _, y in pairs])))
    return splits


def _cifar10_batches(paths: list[Path], request: Request) -> Dataset:
    splits = _read_cifar_batches(paths[:-1], paths[-1], "labels", 10)
    return image_dataset(request, *splits, class_names=_CIFAR10_NAMES, num_classes=10, source=_CIFAR)


def _cifar100_batches(paths: list[Path], request: Request) -> Dataset:
    splits = _read_cifar_batches(paths[:1], paths[1], "fine_labels", 100)
    names = read_pickled_batch(paths[2]).get("fine_label_names")
    if not isinstance(names, list) or len(names) != 100 or not all(isinstance(name, str) for name in names):
        raise BadInput(f"{paths[2]} has no list of 100 'fine_label_names'; get the file again")
    return image_dataset(request, *splits, class_names=names, num_classes=100, source=_CIFAR)


def _svhn(paths: list[Path], request: Request) -> Dataset:
    splits = []
    for path in paths:
        pixels, labels = read_mat(path, "X", "y")
        if pixels.ndim != 4 or pixels.shape[:3] != (32, 32, 3):
            raise BadInput(f"{path}: X is {pixels.shape}, not (32, 32, 3, n); get the file again")
        digits = whole_numbers(labels, path, "labels") % 10  # the files write 10 for the digit 0
        splits.append(_checked(path, pixels.transpose(3, 2, 0, 1), digits, 10, (3, 32, 32)))
    source = "Street View House Numbers (Netzer et al., 2011); for non-commercial use only"
    return image_dataset(request, *splits, class_names=_DIGIT_NAMES, num_classes=10, source=source)


def _faces_npz(paths: list[Path], request: Request) -> Dataset:
    pixels, subject, shot = read_npz(paths[0], "images", "subject", "shot")
    people, shots = whole_numbers(subject, paths[0], "subjects"), whole_numbers(shot, paths[0], "shots")
    return _faces(pixels, people - 1, shots, request, paths[0])


def _faces_pgm(paths: list[Path], request: Request) -> Dataset:
    folder = paths[0].parent.parent
    places = [(subject, shot) for subject in range(1, 41) for shot in range(1, 11)]
    files = [folder / f"s{subject}" / f"{shot}.pgm" for subject, shot in places]
    absent = [file for file in files if not file.is_file()]
    if absent:
        raise BadInput(f"{absent[0]} is missing, one of {len(absent)} of 400 faces; get the data set again")
    with reading(folder):
        pixels = np.stack(in_memory((read_image(file, "L") for file in files), folder))
    return _faces(pixels, np.array([s - 1 for s, _ in places]), np.array([s for _, s in places]), request, folder)


def _faces(pixels: Numbers, subject: Numbers, shot: Numbers, request: Request, path: Path) -> Dataset:
    """Shots 9 and 10 of every person are the test split. The whole face is kept: 112x92 becomes square."""
    pixels, subject = _checked(path, pixels, subject, 40)
    if shot.shape != subject.shape or not {True, False} <= set((shot >= 9).tolist()):
        raise BadInput(f"{path}: shots of shape {shot.shape} don't split into 1..8 and 9..10; get the file again")
    held_out = shot >= 9
    return image_dataset(
        request,
        (pixels[~held_out], subject[~held_out]),
        (pixels[held_out], subject[held_out]),
        class_names=[f"person {i + 1}" for i in range(40)],
        num_classes=40,
        source="AT&T/ORL Database of Faces (Samaria and Harter, 1994), credit to Olivetti Research Laboratory",
        image_size=64,
    )


_PARQUET_NEEDS = "files; parquet files need pyarrow"
_PNG_FILES = ("train.parquet|train_subset.parquet", "test.parquet|test_subset.parquet")

_MNIST = "MNIST (LeCun, Cortes, Burges)"
_FASHION = "Fashion-MNIST (Xiao, Rasul, Vollgraf, 2017), MIT, Zalando SE"
_GTSRB = "German Traffic Sign Recognition Benchmark (Stallkamp et al., 2012)"
_EMNIST = "EMNIST letters (Cohen et al., 2017), NIST Special Database 19"
_EMNIST_FILES = tuple(
    f"emnist-letters-{split}-{what}"
    for split in ("train", "test")
    for what in ("images-idx3-ubyte", "labels-idx1-ubyte")
)

add_dataset(
    "cifar10",
    "32x32 colour photographs, ten classes",
    "https://www.cs.toronto.edu/~kriz/cifar.html, unpack cifar-10-python.tar.gz into DATA_DIR",
    Layout(_png_parquet(10, _CIFAR, _CIFAR10_NAMES), _PNG_FILES, ("cifar10",)),
    Layout(
        _cifar10_batches,
        (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"),
        ("cifar-10-batches-py", "cifar10/cifar-10-batches-py"),
    ),
    needs=_PARQUET_NEEDS,
)
add_dataset(
    "cifar100",
    "32x32 colour photographs, a hundred classes",
    "https://www.cs.toronto.edu/~kriz/cifar.html, unpack cifar-100-python.tar.gz into DATA_DIR",
    Layout(_png_parquet(100, _CIFAR), _PNG_FILES, ("cifar100",)),
    Layout(_cifar100_batches, ("train", "test", "meta"), ("cifar-100-python", "cifar100/cifar-100-python")),
    needs=_PARQUET_NEEDS,
)
add_dataset(
    "mnist",
    "28x28 grey handwritten digits, ten classes",
    "the four files train-images-idx3-ubyte.gz ... t10k-labels-idx1-ubyte.gz of MNIST into DATA_DIR/MNIST/raw/",
    Layout(_npz(_DIGIT_NAMES, _MNIST), ("mnist.npz",), ("mnist", ".")),
    Layout(_idx(_DIGIT_NAMES, _MNIST), _IDX_FILES, ("MNIST/raw", "MNIST", "mnist", ".")),
)
add_dataset(
    "fashion-mnist",
    "28x28 grey images of clothes, ten classes",
    "https://github.com/zalandoresearch/fashion-mnist, its four data/fashion/*.gz into DATA_DIR/FashionMNIST/raw/",
    Layout(_npz(_FASHION_NAMES, _FASHION), ("fashion_mnist.npz",), ("fashion_mnist", ".")),
    Layout(
        _idx(_FASHION_NAMES, _FASHION),
        _IDX_FILES,
        ("FashionMNIST/raw", "FashionMNIST", "fashion-mnist", "fashion_mnist"),
    ),
)
add_dataset(
    "emnist-letters",
    "28x28 grey handwritten letters, 26 classes",
    "https://www.nist.gov/itl/products-and-services/emnist-dataset, its emnist-letters files into DATA_DIR/EMNIST/",
    Layout(
        _idx(tuple(string.ascii_uppercase), _EMNIST, first_label=1, transposed=True),
        _EMNIST_FILES,
        ("EMNIST/raw", "EMNIST", "emnist-letters", "emnist", "gzip", "."),
    ),
)
add_dataset(
    "svhn",
    "32x32 colour house numbers, ten classes",
    "http://ufldl.stanford.edu/housenumbers, train_32x32.mat and test_32x32.mat into DATA_DIR/svhn/",
    Layout(_svhn, ("train_32x32.mat", "test_32x32.mat"), ("svhn", "SVHN", ".")),
)
add_dataset(
    "gtsrb",
    "32x32 colour German traffic signs, 43 classes",
    "https://benchmark.ini.rub.de, as DATA_DIR/gtsrb/train.parquet and test.parquet with the columns png (bytes of a "
    "32x32 image file) and label; or use image-folder",
    Layout(_png_parquet(43, _GTSRB), _PNG_FILES, ("gtsrb",)),
    needs=_PARQUET_NEEDS,
)
add_dataset(
    "att-faces",
    "grey portraits of 40 people, ten each (64 px); the last two of each are the test split",
    "the AT&T (ORL) Database of Faces, its folders s1 ... s40 of .pgm files into DATA_DIR/att_faces/",
    Layout(_faces_npz, ("att_faces.npz",), ("att_faces", "att-faces", ".")),
    Layout(_faces_pgm, ("s1/1.pgm",), ("att_faces", "att-faces", "orl_faces", ".")),
)
