"""File formats of data sets: small files written here and read back, and damage told in one line."""

from __future__ import annotations

import gzip
import os
import pickle
import struct
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.io
import torch
from PIL import Image

from fedaudit.data import find_dataset, load_dataset, reading_once
from fedaudit.utils.errors import BadInput, MissingData
from tests.data.data_cases import RNG, as_bytes, one_line, random_images


@pytest.fixture(autouse=True)
def _no_data_dir(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FEDAUDIT_DATA", raising=False)


def write_parquet(path: Path, **columns: Any) -> None:
    arrow = pytest.importorskip("pyarrow")
    import pyarrow.parquet

    path.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(arrow.table(columns), path)


def png(pixels: np.ndarray[Any, Any]) -> bytes:
    import io

    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, format="PNG")
    return stream.getvalue()


def test_parquet_of_png(tmp_path: Path) -> None:
    x, y = random_images(12, 32, 32, 3), (np.arange(12) % 10).astype(np.int16)
    for split, part in (("train_subset", slice(0, 10)), ("test", slice(10, 12))):
        write_parquet(tmp_path / f"cifar10/{split}.parquet", png=[png(p) for p in x[part]], label=y[part])
    data = load_dataset("cifar10", data_dir=tmp_path)
    assert np.array_equal(as_bytes(data.train.inputs), x[:10].transpose(0, 3, 1, 2))
    assert data.test.targets.tolist() == [0, 1]
    assert data.class_names is not None
    assert data.class_names[9] == "truck"
    small = load_dataset("cifar10", data_dir=tmp_path, limit=4, image_size=16)
    assert (len(small.train), small.input_shape) == (4, (3, 16, 16))
    found = find_dataset("cifar10", tmp_path)
    assert found is not None
    assert [path.name for path in found] == ["train_subset.parquet", "test.parquet"]

    write_parquet(tmp_path / "cifar10/test.parquet", png=[png(x[0]), png(x[0])[:40]], label=[0, 1])
    with pytest.raises(BadInput) as error:
        load_dataset("cifar10", data_dir=tmp_path)
    one_line(error, "row 1", "not a readable image")
    write_parquet(tmp_path / "cifar10/test.parquet", png=[png(x[0])], label=[10])
    with pytest.raises(BadInput) as error:
        load_dataset("cifar10", data_dir=tmp_path)
    one_line(error, "labels outside 0..9")
    write_parquet(tmp_path / "cifar10/test.parquet", png=[png(x[0])])
    with pytest.raises(BadInput) as error:
        load_dataset("cifar10", data_dir=tmp_path)
    one_line(error, "lacks the columns")


def test_parquet_without_pyarrow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for split in ("train", "test"):
        (tmp_path / "gtsrb").mkdir(exist_ok=True)
        (tmp_path / f"gtsrb/{split}.parquet").write_bytes(b"")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(MissingData) as error:
        load_dataset("gtsrb", data_dir=tmp_path)
    one_line(error, "pip install 'PATH_OF_THE_CLONE[parquet]'")


def cifar_batch(path: Path, **content: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(pickle.dumps({key.encode(): value for key, value in content.items()}, protocol=2))


@pytest.mark.parametrize("name", ["cifar10", "cifar100"])
def test_cifar_python_batches(name: str, tmp_path: Path) -> None:
    x = random_images(12, 3, 32, 32)
    flat = x.reshape(12, -1)
    if name == "cifar10":
        y = [i % 10 for i in range(12)]
        folder = tmp_path / "cifar-10-batches-py"
        for i in range(5):
            cifar_batch(folder / f"data_batch_{i + 1}", data=flat[2 * i : 2 * i + 2], labels=y[2 * i : 2 * i + 2])
        cifar_batch(folder / "test_batch", data=flat[10:], labels=y[10:])
    else:
        y = [8 * i for i in range(12)]
        folder = tmp_path / "cifar-100-python"
        cifar_batch(folder / "train", data=flat[:10], fine_labels=y[:10], coarse_labels=[0] * 10)
        cifar_batch(folder / "test", data=flat[10:], fine_labels=y[10:], coarse_labels=[0] * 2)
        cifar_batch(folder / "meta", fine_label_names=[f"thing {i}" for i in range(100)])
    data = load_dataset(name, data_dir=tmp_path)
    assert np.array_equal(as_bytes(data.train.inputs), x[:10])
    assert np.array_equal(as_bytes(data.test.inputs), x[10:])
    assert data.train.targets.tolist() + data.test.targets.tolist() == y
    if name == "cifar100":
        assert data.class_names is not None
        assert data.class_names[99] == "thing 99"

    batch = folder / ("test_batch" if name == "cifar10" else "test")
    whole = batch.read_bytes()
    batch.write_bytes(whole[:-500])
    with pytest.raises(BadInput) as error:
        load_dataset(name, data_dir=tmp_path)
    one_line(error, str(batch), "truncated, damaged")
    cifar_batch(batch, data=flat[:2])
    with pytest.raises(BadInput) as error:
        load_dataset(name, data_dir=tmp_path)
    one_line(error, "labels")


class Malice:
    def __init__(self, call: Any, *arguments: Any) -> None:
        self.call, self.arguments = call, arguments

    def __reduce__(self) -> tuple[Any, ...]:
        return self.call, self.arguments


@pytest.mark.parametrize("call", [os.mkdir, eval, getattr, np.load, np.memmap], ids=lambda call: call.__name__)
@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_a_malicious_pickle_is_refused_and_not_run(call: Any, protocol: int, tmp_path: Path) -> None:
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    trace = tmp_path / "trace"
    evil = {"data": Malice(call, str(trace)), "labels": [0]}
    for name in (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"):
        (folder / name).write_bytes(pickle.dumps(evil, protocol=protocol))
    with pytest.raises(BadInput) as error:
        load_dataset("cifar10", data_dir=tmp_path)
    one_line(error, "refused", "data_batch_1")
    assert not trace.exists()


def idx(array: np.ndarray[Any, Any]) -> bytes:
    return b"\x00\x00\x08" + bytes([array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


@pytest.mark.parametrize(
    ("name", "folder", "stems", "zipped"),
    [
        ("mnist", "MNIST/raw", ("train", "t10k"), True),
        ("mnist", "MNIST/raw", ("train", "t10k"), False),
        ("mnist", ".", ("train", "t10k"), False),
        ("fashion-mnist", "FashionMNIST/raw", ("train", "t10k"), True),
        ("emnist-letters", "EMNIST/raw", ("emnist-letters-train", "emnist-letters-test"), True),
    ],
)
def test_idx_files(name: str, folder: str, stems: tuple[str, str], zipped: bool, tmp_path: Path) -> None:
    letters = name == "emnist-letters"
    first, classes = (1, 26) if letters else (0, 10)
    place = tmp_path / folder
    place.mkdir(parents=True, exist_ok=True)
    x = random_images(40, 28, 28)
    y = (np.arange(40) % classes + first).astype(np.uint8)

    def write(path: Path, content: bytes) -> Path:
        path = path.with_name(path.name + ".gz") if zipped else path
        path.write_bytes(gzip.compress(content) if zipped else content)
        return path

    for stem, part in zip(stems, (slice(0, 30), slice(30, 40)), strict=True):
        images = write(place / f"{stem}-images-idx3-ubyte", idx(x[part]))
        labels = write(place / f"{stem}-labels-idx1-ubyte", idx(y[part]))
    data = load_dataset(name, data_dir=tmp_path)
    expected = x.transpose(0, 2, 1) if letters else x
    assert np.array_equal(as_bytes(data.train.inputs)[:, 0], expected[:30])
    assert np.array_equal(as_bytes(data.test.inputs)[:, 0], expected[30:])
    assert data.test.targets.tolist() == [(30 + i) % classes for i in range(10)]
    assert data.num_classes == classes
    if letters:
        assert data.class_names is not None
        assert data.class_names[0] + data.class_names[25] == "AZ"

    raw = images.read_bytes()
    images.write_bytes(raw[: len(raw) // 2])
    with pytest.raises(BadInput) as error:
        load_dataset(name, data_dir=tmp_path)
    one_line(error, str(images), "truncated")
    images.write_bytes(raw)
    write(place / f"{stems[1]}-labels-idx1-ubyte", b"PK\x03\x04 not an idx file")
    with pytest.raises(BadInput) as error:
        load_dataset(name, data_dir=tmp_path)
    one_line(error, str(labels), "not an idx file")
    write(place / f"{stems[1]}-labels-idx1-ubyte", idx(np.full(10, 200, dtype=np.uint8)))
    with pytest.raises(BadInput) as error:
        load_dataset(name, data_dir=tmp_path)
    one_line(error, "is not in 0..")


def test_trials_read_a_data_set_once_until_its_files_change(tmp_path: Path) -> None:
    (tmp_path / "fashion_mnist").mkdir()
    path = tmp_path / "fashion_mnist/fashion_mnist.npz"
    x, y = random_images(20, 28, 28), (np.arange(20) % 10).astype(np.uint8)

    def write() -> None:
        np.savez(path, x_train=x[:15], y_train=y[:15], x_test=x[15:], y_test=y[15:])

    def load(**options: Any) -> Any:
        return load_dataset("fashion-mnist", data_dir=tmp_path, **options)

    write()
    with reading_once():
        first = load()
        assert load() is first
        assert len(load(limit=10).train) < len(first.train)  # asked for in another way
        x = 255 - x
        write()
        assert np.array_equal(as_bytes(load().train.inputs)[:, 0], x[:15])
    assert load() is not load()


def test_npz(tmp_path: Path) -> None:
    (tmp_path / "fashion_mnist").mkdir()
    path = tmp_path / "fashion_mnist/fashion_mnist.npz"
    x, y = random_images(20, 28, 28), (np.arange(20) % 10).astype(np.uint8)
    np.savez(path, x_train=x[:15], y_train=y[:15], x_test=x[15:], y_test=y[15:])
    data = load_dataset("fashion-mnist", data_dir=tmp_path)
    assert np.array_equal(as_bytes(data.train.inputs)[:, 0], x[:15])
    assert data.test.targets.tolist() == [5, 6, 7, 8, 9]
    whole = path.read_bytes()
    for content in (whole[:1000], b"", whole.replace(b"'shape'", b"((((((('")):
        path.write_bytes(content)
        with pytest.raises(BadInput) as error:
            load_dataset("fashion-mnist", data_dir=tmp_path)
        one_line(error, str(path), "truncated, damaged")
    np.savez(path, x_train=x)
    with pytest.raises(BadInput) as error:
        load_dataset("fashion-mnist", data_dir=tmp_path)
    one_line(error, "no array y_train")
    np.savez(path, x_train=np.array([{}], dtype=object), y_train=y, x_test=x, y_test=y)  # a pickle inside
    with pytest.raises(BadInput) as error:
        load_dataset("fashion-mnist", data_dir=tmp_path)
    one_line(error, "allow_pickle=False")


@pytest.mark.parametrize("compressed", [False, True])
def test_svhn(compressed: bool, tmp_path: Path) -> None:
    (tmp_path / "svhn").mkdir()
    x = random_images(10, 32, 32, 3)
    y = np.arange(1, 11)[:, None].astype(np.uint8)
    for split in ("train", "test"):
        content = {"note": "text is no number", "X": x.transpose(1, 2, 3, 0), "y": y.astype(float)}
        scipy.io.savemat(tmp_path / f"svhn/{split}_32x32.mat", content, do_compression=compressed)
    data = load_dataset("svhn", data_dir=tmp_path)
    assert np.array_equal(as_bytes(data.train.inputs), x.transpose(0, 3, 1, 2))
    assert data.train.targets.tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9, 0]
    path = tmp_path / "svhn/test_32x32.mat"
    whole = path.read_bytes()
    for damaged in (
        whole[:3000],
        whole[:100],
        b"",
        whole[:128] + bytes([255]) * 99,
        whole[:124] + b"HDF5" + whole[128:],
    ):
        path.write_bytes(damaged)
        with pytest.raises(BadInput) as error:
            load_dataset("svhn", data_dir=tmp_path)
        one_line(error, str(path))
    scipy.io.savemat(path, {"y": y})
    with pytest.raises(BadInput) as error:
        load_dataset("svhn", data_dir=tmp_path)
    one_line(error, "no numeric array X")


def test_image_folders(tmp_path: Path) -> None:
    x = random_images(6, 10, 14, 3)
    for split, classes in (("train", "ab"), ("val", "ab")):
        for i, name in enumerate(classes):
            folder = tmp_path / split / name
            folder.mkdir(parents=True)
            for j in range(3):
                (folder / f"{j}.png").write_bytes(png(x[3 * i + j]))
            (folder / "notes.txt").write_text("no image")
    data = load_dataset("image-folder", data_dir=tmp_path)
    assert data.class_names == ("a", "b")
    assert np.array_equal(as_bytes(data.train.inputs), x.transpose(0, 3, 1, 2))
    few = load_dataset("image-folder", data_dir=tmp_path, limit=2, image_size=10)
    assert few.train.targets.tolist() == [0, 1]
    assert np.array_equal(as_bytes(few.train.inputs), x[[0, 3], :, 2:12].transpose(0, 3, 1, 2))  # the central square

    (tmp_path / "train/a/1.png").write_bytes(png(random_images(1, 9, 9, 3)[0]))
    with pytest.raises(BadInput) as error:
        load_dataset("image-folder", data_dir=tmp_path)
    one_line(error, "differs in size", "give an image_size")
    assert load_dataset("image-folder", data_dir=tmp_path, image_size=8).input_shape == (3, 8, 8)
    (tmp_path / "train/a/1.png").write_bytes(b"\x89PNG broken")
    with pytest.raises(BadInput) as error:
        load_dataset("image-folder", data_dir=tmp_path, image_size=8)
    one_line(error, "1.png", "not a readable image")
    (tmp_path / "val/c").mkdir()
    with pytest.raises(BadInput) as error:
        load_dataset("image-folder", data_dir=tmp_path, image_size=8, limit=2)
    one_line(error, "class folder 'c'")


def test_a_file_where_a_folder_should_be(tmp_path: Path) -> None:
    for split in ("train", "test"):
        (tmp_path / split).write_bytes(b"")
    with pytest.raises(BadInput) as error:
        load_dataset("image-folder", data_dir=tmp_path)
    one_line(error, "is a file", "class folders")


def test_imagenet_is_224_by_default(tmp_path: Path) -> None:
    for split in ("train", "val"):
        for name in ("n01440764", "n01443537"):
            folder = tmp_path / "imagenet" / split / name
            folder.mkdir(parents=True)
            Image.fromarray(random_images(1, 240, 300, 3)[0]).save(folder / "one.JPEG")
    data = load_dataset("imagenet", data_dir=tmp_path)
    assert data.input_shape == (3, 224, 224)
    assert data.class_names == ("n01440764", "n01443537")


@pytest.mark.parametrize("layout", ["npz", "pgm"])
def test_faces(layout: str, tmp_path: Path) -> None:
    x = random_images(400, 112, 92)
    folder = tmp_path / "att_faces"
    folder.mkdir()
    if layout == "npz":
        subject, shot = np.repeat(np.arange(1, 41), 10), np.tile(np.arange(1, 11), 40)
        np.savez(folder / "att_faces.npz", images=x, subject=subject, shot=shot)
    else:
        for i, face in enumerate(x):
            (folder / f"s{i // 10 + 1}").mkdir(exist_ok=True)
            Image.fromarray(face).save(folder / f"s{i // 10 + 1}" / f"{i % 10 + 1}.pgm")
    data = load_dataset("att-faces", data_dir=tmp_path)
    assert data.input_shape == (1, 64, 64)
    assert data.train.targets.bincount().tolist() == [8] * 40
    assert data.test.targets.bincount().tolist() == [2] * 40
    last = np.asarray(Image.fromarray(x[399]).resize((64, 64), Image.Resampling.BILINEAR)).astype(int)
    assert np.abs(as_bytes(data.test.inputs[-1])[0].astype(int) - last).max() <= 2


ADULT = (
    "39, State-gov, 77516, Bachelors, 13, Never-married, Adm-clerical, Not-in-family, White, Male, 2174, 0, 40,"
    " United-States, <=50K",
    "50, Private, 83311, Bachelors, 13, Married-civ-spouse, Exec-managerial, Husband, White, Male, 0, 0, 13, ?, >50K",
    "38, Private, 215646, HS-grad, 9, Divorced, Handlers-cleaners, Not-in-family, Black, Female, 0, 0, 40,"
    " United-States, <=50K",
)


def test_adult(tmp_path: Path) -> None:
    folder = tmp_path / "adult"
    folder.mkdir()
    (folder / "adult.data").write_text("\n".join(ADULT) + "\n\n")
    unseen = ADULT[0].replace("State-gov", "Never-worked")
    (folder / "adult.test").write_text(
        "|1x3 Cross validator\n" + "\n".join(f"{r}." for r in (unseen, *ADULT[1:])) + "\n"
    )
    data = load_dataset("adult", data_dir=tmp_path)
    # 2 workclasses, 2 educations, 3 marital states, 3 occupations, 2 relationships, 2 races, 2 sexes, 2 countries
    assert data.input_shape == (6 + 18,)
    ages = np.array([39, 50, 38])
    assert np.allclose(data.train.inputs[:, 0], (ages - ages.mean()) / ages.std(), atol=1e-6)
    assert data.train.inputs[:, 6:].sum(dim=1).tolist() == [8, 8, 8]
    assert data.test.inputs[:, 6:].sum(dim=1).tolist() == [7, 8, 8]  # a category that train lacks is all zeros
    assert data.test.targets.tolist() == [0, 1, 0]
    # no attribute is one of which a row has no value
    assert set(data.attributes) == {"marital_status", "occupation", "relationship", "race", "sex"}
    sex = data.attributes["sex"]
    assert sex.values == ("Female", "Male")
    assert data.train.attributes["sex"].tolist() == [1, 1, 0]
    assert data.train.inputs[:, list(sex.columns)].tolist() == [[0, 1], [0, 1], [1, 0]]
    assert data.train[torch.tensor([2])].attributes["marital_status"].tolist() == [0]
    (folder / "adult.data").write_text(ADULT[0] + "\n" + ADULT[1][:30])
    with pytest.raises(BadInput) as error:
        load_dataset("adult", data_dir=tmp_path)
    one_line(error, "adult.data, row 2")


def test_adult_s_doctors_are_clients_by_age(tmp_path: Path) -> None:
    def person(age: int, education: str, years: int) -> str:
        return f"{age}, Private, 1, {education}, {years}, x, x, x, x, x, 0, 0, 40, x, {'>50K' if age % 2 else '<=50K'}"

    ages = [30, 37, 38, 45, 52, 53, 70]
    rows = [person(age, "Doctorate", 16) for age in ages] + [person(20 + i, "Masters", 14) for i in range(16)]
    (tmp_path / "adult.data").write_text("\n".join([*rows, person(40, "HS-grad", 9)]) + "\n")
    (tmp_path / "adult.test").write_text("\n".join(f"{r}." for r in [*rows, person(41, "11th", 7)]) + "\n")
    data = load_dataset("adult-phd", data_dir=tmp_path)
    assert data.train.groups is not None
    assert data.test.groups is not None
    # both files together: 4 of less than 38, 6 of 38 to 52, 4 older, 32 without a doctorate, one in eight held out
    assert [(data.train.groups == g).sum().item() for g in (0, 1, 2, -1)] == [4, 6, 4, 28]
    assert [(data.test.groups == g).sum().item() for g in (0, 1, 2, -1)] == [0, 0, 0, 4]
    order = data.train.inputs[:, 0]  # the standardised age
    old = [order[data.train.groups == g] for g in (0, 1, 2)]
    assert old[0].max() < old[1].min()
    assert old[1].max() < old[2].min()
    few = load_dataset("adult-phd", data_dir=tmp_path, limit=10)
    assert few.train.groups is not None
    assert len(few.train.groups) == len(few.train) == 10
    (tmp_path / "adult.data").write_text(person(40, "HS-grad", 9) + "\n")
    (tmp_path / "adult.test").write_text(person(40, "HS-grad", 9) + ".\n")
    with pytest.raises(BadInput, match="nobody has a bachelor's degree"):
        load_dataset("adult-phd", data_dir=tmp_path)


@pytest.mark.parametrize("layout", ["npz", "csv"])
def test_location30(layout: str, tmp_path: Path) -> None:
    x, y = RNG.integers(0, 2, (90, 446), dtype=np.uint8), np.arange(90) % 30
    (tmp_path / "location30").mkdir()
    if layout == "npz":
        np.savez(tmp_path / "location30/location30.npz", x=x, y=y.astype(np.uint8))
    else:
        rows = (",".join(f'"{v}"' for v in [label + 1, *row]) for label, row in zip(y, x, strict=True))
        (tmp_path / "location30/bangkok").write_text("\n".join(rows))
    data = load_dataset("location30", data_dir=tmp_path)
    assert (len(data.train), len(data.test), data.input_shape, data.num_classes) == (72, 18, (446,), 30)
    theirs = sorted((row.tobytes(), int(label)) for row, label in zip(x, y, strict=True))
    parts = [(s.inputs.to(torch.uint8).numpy(), s.targets) for s in (data.train, data.test)]
    assert sorted((row.tobytes(), int(label)) for a, b in parts for row, label in zip(a, b, strict=True)) == theirs


def test_own_photographs(tmp_path: Path) -> None:
    folder = tmp_path / "natural-photos"
    folder.mkdir()
    for name, shape in (("wide", (120, 260, 3)), ("high", (260, 120, 3))):
        (folder / f"{name}.png").write_bytes(png(random_images(1, *shape)[0]))
    data = load_dataset("natural-photos", data_dir=tmp_path, image_size=100)
    assert data.class_names == ("high", "wide")
    assert data.input_shape == (3, 100, 100)
    with pytest.raises(BadInput) as error:
        load_dataset("natural-photos", data_dir=tmp_path)
    one_line(error, "no 224 px square", "<= 120")
