"""Data sets: the embedded ones, one's own, and the real files where there are any; damage told in one line."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sklearn.datasets
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from PIL import Image

from fedaudit.data import DATASETS, Dataset, Split, find_dataset, how_to_get, load_dataset
from fedaudit.data.photos import PHOTOS, load_photo, plan_crops
from fedaudit.utils.errors import BadInput, MissingData
from tests.data.data_cases import RNG, as_bytes, one_line, random_images

REAL = os.environ.get("FEDAUDIT_DATA")


@pytest.fixture(autouse=True)
def _no_data_dir(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    if "real" not in request.node.name:
        monkeypatch.delenv("FEDAUDIT_DATA", raising=False)


# ---- photos


@pytest.mark.parametrize("size", [32, 64, 224])
@pytest.mark.parametrize("photo", PHOTOS, ids=lambda photo: photo.name)
def test_train_and_test_crops_share_no_pixel(photo: Any, size: int) -> None:
    pixels = load_photo(photo)
    plan = plan_crops(photo, pixels, size)
    touched = {}
    for split, crops in plan.items():
        mask = np.zeros(pixels.shape[:2], dtype=bool)
        for crop in crops:
            assert crop.side >= size  # never upscaled
            window = mask[crop.top : crop.top + crop.side, crop.left : crop.left + crop.side]
            assert window.shape == (crop.side, crop.side)  # wholly inside the photograph
            window[:] = True
        assert len(set(crops)) == len(crops)
        touched[split] = mask
    assert touched["train"].any()
    assert touched["test"].any()
    assert not (touched["train"] & touched["test"]).any()


@pytest.mark.slow
@pytest.mark.parametrize("size", [32, 64])
def test_photos_are_enough_balanced_and_worth_looking_at(size: int) -> None:
    data = load_dataset("photos", image_size=size)
    assert data.input_shape == (3, size, size)
    assert data.num_classes == 7
    assert data.class_names == tuple(photo.name for photo in PHOTOS)
    assert data.train.targets.bincount().tolist() == [64] * 7
    assert data.test.targets.bincount().tolist() == [24] * 7
    assert data.test.targets[:7].tolist() == list(range(7))  # the first images are one of each photograph
    for split in (data.train, data.test):
        assert float(split.inputs.mean(dim=1).flatten(1).std(dim=1).min()) > 0.03
        assert len(torch.unique(split.inputs.flatten(1), dim=0)) == len(split)
    pixels = data.train.inputs.double()
    assert torch.allclose(torch.tensor(data.mean), pixels.mean(dim=(0, 2, 3)).float(), atol=1e-5)
    assert torch.allclose(torch.tensor(data.std), pixels.std(dim=(0, 2, 3), correction=0).float(), atol=1e-5)


def test_first_crop_is_the_focus_downscaled() -> None:
    photograph = np.asarray(
        Image.fromarray(load_photo(PHOTOS[0])[4:204, 124:324]).resize((32, 32), Image.Resampling.BILINEAR)
    )
    ours = load_dataset("photos", limit=7).test.inputs[0]
    assert (
        np.abs(as_bytes(ours).transpose(1, 2, 0).astype(int) - photograph.astype(int)).max() <= 2
    )  # Pillow as the oracle


def test_photos_at_224_and_their_limit() -> None:
    data = load_dataset("photos", image_size=224, limit=7)
    assert data.input_shape == (3, 224, 224)
    assert data.test.targets.tolist() == data.train.targets.tolist() == list(range(7))
    with pytest.raises(BadInput) as error:
        load_dataset("photos", image_size=225)
    one_line(error, "image_size=225", "224")


def test_limit_keeps_a_balanced_prefix() -> None:
    whole, few = load_dataset("digits"), load_dataset("digits", limit=25)
    assert len(few.train) == len(few.test) == 25
    assert sorted(few.train.targets.bincount().tolist()) == [2] * 5 + [3] * 5
    for digit in range(10):
        mine = few.train.inputs[few.train.targets == digit]
        assert torch.equal(mine, whole.train.inputs[whole.train.targets == digit][: len(mine)])


# ---- the other embedded sets


def test_digits() -> None:
    data = load_dataset("digits")
    assert data.input_shape == (1, 8, 8)
    assert len(data.train) + len(data.test) == 1797
    bunch = sklearn.datasets.load_digits()
    pixels = torch.cat([data.train.inputs, data.test.inputs]).numpy()
    targets = torch.cat([data.train.targets, data.test.targets]).tolist()
    ours = sorted((x.tobytes(), y) for x, y in zip(pixels, targets, strict=True))
    grey = (bunch.images / 16).astype(np.float32)
    theirs = sorted((x.tobytes(), int(y)) for x, y in zip(grey, bunch.target, strict=True))
    assert ours == theirs
    assert load_dataset("digits", image_size=16, limit=20).input_shape == (1, 16, 16)


@pytest.mark.parametrize(("name", "rows", "width"), [("breast-cancer", 569, 30), ("diabetes", 442, 10)])
def test_tables_are_standardised_by_the_train_split(name: str, rows: int, width: int) -> None:
    data = load_dataset(name)
    assert data.input_shape == (width,)
    assert len(data.train) + len(data.test) == rows
    assert torch.allclose(data.train.inputs.mean(0), torch.zeros(width), atol=1e-5)
    assert torch.allclose(data.train.inputs.std(0, correction=0), torch.ones(width), atol=1e-4)
    if data.task == "regression":
        assert data.num_classes is None
        assert data.train.targets.shape == (len(data.train), 1)
        assert float(data.train.targets.mean()) == pytest.approx(0, abs=1e-5)
    else:
        assert data.class_names == ("malignant", "benign")
        assert (data.train.targets.bincount() + data.test.targets.bincount()).tolist() == [212, 357]
    assert len(load_dataset(name, limit=9).train) == 9
    with pytest.raises(BadInput) as error:
        load_dataset(name, image_size=32)
    one_line(error, "holds rows of a table", "leave image_size out")


@pytest.mark.slow
def test_importing_the_room_is_light() -> None:
    heavy = "{'skimage', 'sklearn', 'scipy', 'pyarrow', 'PIL', 'matplotlib'}"
    code = f"import sys, fedaudit.data; assert not {heavy} & set(sys.modules), {heavy} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


# ---- a data set of one's own


@given(
    pixels=hnp.arrays(np.uint8, hnp.array_shapes(min_dims=4, max_dims=4, min_side=2, max_side=5)),
    seed=st.integers(0, 1000),
)
@settings(max_examples=30, deadline=None)
def test_means_and_deviations_are_the_train_split_s(pixels: np.ndarray[Any, Any], seed: int) -> None:
    targets = np.random.default_rng(seed).integers(0, 2, len(pixels))
    pixels.flat[0] = 255  # pictures that are dark throughout are scaled
    data = Dataset.from_tensors(pixels, targets, num_classes=2, channels="first")
    assert len(data.train) + len(data.test) == len(pixels)
    for channel, (mean, std) in enumerate(zip(data.mean, data.std, strict=True)):
        values = data.train.inputs[:, channel].double().numpy()
        assert mean == pytest.approx(values.mean(), abs=1e-5)
        assert std == pytest.approx(values.std() if values.std() > 1e-3 else 1, abs=1e-5)


def test_own_arrays_in_their_usual_forms() -> None:
    hwc = random_images(20, 9, 7, 3)
    y = np.arange(20) % 4
    data = Dataset.from_tensors(hwc, y, test=(hwc[:4], y[:4]), class_names=["a", "b", "c", "d"])
    assert data.input_shape == (3, 9, 7)
    assert np.array_equal(as_bytes(data.train.inputs), hwc.transpose(0, 3, 1, 2))
    same = Dataset.from_tensors(torch.from_numpy(hwc).permute(0, 3, 1, 2) / 255, torch.from_numpy(y))
    assert len(same.test) == 4  # one in five of every class
    assert same.test.targets.tolist() == [0, 1, 2, 3]
    assert Dataset.from_tensors(hwc[..., 0], y).input_shape == (1, 9, 7)
    table = Dataset.from_tensors(RNG.normal(size=(20, 3)), RNG.normal(size=20))
    assert (table.kind, table.task, table.train.targets.shape) == ("table", "regression", (16, 1))
    assert len(table.train[[2, 0]]) == 2
    assert torch.equal(table.train[[2, 0]].inputs, table.train.inputs[torch.tensor([2, 0])])


def test_from_torch() -> None:
    x, y = torch.rand(10, 3, 4, 4), torch.arange(10) % 2
    data = Dataset.from_torch(torch.utils.data.TensorDataset(x, y), name="mine")
    assert torch.equal(data.train.inputs, x[:8])
    images = [(Image.fromarray(p), i % 2) for i, p in enumerate(random_images(10, 4, 4, 3))]
    assert Dataset.from_torch(images, limit=5).input_shape == (3, 4, 4)
    for bad, message in (([], "empty"), ([1, 2], "not an (input, target) pair")):
        with pytest.raises(BadInput) as error:
            Dataset.from_torch(bad)
        one_line(error, message)
    with pytest.raises(BadInput) as error:
        Dataset.from_torch([(torch.rand(3, 4, 4), 0), (torch.rand(3, 5, 4), 1)])
    one_line(error, "item 1", "resizing")


X8 = np.full((8, 3, 4, 4), 0.5, dtype=np.float32)
Y8 = np.arange(8) % 2


@pytest.mark.parametrize(
    ("inputs", "targets", "options", "message"),
    [
        (X8 * 4, Y8, {}, "[2, 2], not in [0, 1]"),
        (X8 * np.nan, Y8, {}, "not finite"),
        (X8.astype(np.int32), Y8, {}, "give uint8"),
        (X8, Y8[:7], {}, "8 inputs but 7 targets"),
        (X8, Y8 - 1, {}, "negative"),
        (X8, Y8, {"num_classes": 1}, "at least 2"),
        (X8, Y8 + 1, {"num_classes": 2}, "not in 0..1"),
        (X8, Y8, {"class_names": ["a", "b", "c"], "num_classes": 2}, "3 class names"),
        (X8, Y8, {"test": (X8[:, :, :3], Y8)}, "different shapes"),
        (X8, Y8, {"test": (X8, Y8 * 0.5)}, "different kinds"),
        (X8, np.full(8, np.nan), {}, "targets that are not finite"),
        (X8, np.full((8, 2, 2), 0.5), {}, "regression targets of shape (8, 2, 2)"),
        (X8, np.full((8, 2), 3), {}, "class targets of shape (8, 2)"),
        (X8, np.full((8, 4, 5), 1), {}, "masks of the shape of the inputs without their channels, (n, 4, 4)"),
        (X8, np.full((8, 4, 4), -1), {}, "class target -1 is negative"),
        (X8, Y8, {"task": "segmentation"}, "masks of shape (8,)"),
        (X8, Y8, {"task": "detection"}, "task 'detection'"),
        (X8[:1], Y8[:1], {}, "fill a train and a test split"),
        (X8[:, 0, 0, 0], Y8, {}, "inputs of shape (8,)"),
        (np.array([["a", "b"]] * 8), Y8, {}, "cannot be read as numbers"),
        (np.full((8, 2), np.inf), Y8, {}, "not finite"),
    ],
)
def test_what_is_no_data_set_is_one_line(
    inputs: np.ndarray[Any, Any], targets: np.ndarray[Any, Any], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(BadInput) as error:
        Dataset.from_tensors(inputs, targets, **options)
    one_line(error, message)


def test_the_class_itself_checks() -> None:
    good = Dataset.from_tensors(X8, Y8)
    training = {name: getattr(good, name) for name in good.__dataclass_fields__}
    bad: list[tuple[dict[str, Any], str]] = [
        ({"train": Split(good.train.inputs + 1, good.train.targets)}, "scale them to [0, 1]"),
        ({"train": Split(good.train.inputs.double(), good.train.targets)}, "float32"),
        ({"test": Split(good.test.inputs, good.test.targets.int())}, "int64"),
        ({"std": (1.0, 1.0, 0.0)}, "std above 0"),
        ({"mean": (1.0,)}, "3 values"),
        ({"kind": "table"}, "(n, d)"),
        ({"task": "regression"}, "leave num_classes out"),
        ({"task": "regression", "num_classes": None}, "float32 (n, 1)"),
        ({"task": "segmentation", "num_classes": None, "num_targets": 2}, "int64 (n, 4, 4)"),
        ({"task": "multi-label", "num_classes": None, "num_targets": 3}, "float32 (n, 3)"),
    ]
    for change, message in bad:
        with pytest.raises(BadInput) as error:
            Dataset(**{**training, **change})
        one_line(error, message)


# ---- names


@pytest.mark.parametrize("entry", list(DATASETS), ids=lambda entry: entry.name)
def test_a_missing_data_set_is_one_line(entry: Any, tmp_path: Path) -> None:
    assert {"kind", "task", "embedded", "needs"} <= entry.info.keys()
    assert entry.summary
    assert how_to_get(entry.name)
    if entry.info["embedded"]:
        assert find_dataset(entry.name, tmp_path) == []
        return
    assert find_dataset(entry.name, tmp_path) is None
    assert find_dataset(entry.name) is None
    for folder in (tmp_path, tmp_path / "nowhere", None):
        with pytest.raises(MissingData) as error:
            load_dataset(entry.name, data_dir=folder)
        one_line(error, f"'{entry.name}' not found", how_to_get(entry.name))
        one_line(error, str(folder) if folder else "FEDAUDIT_DATA")


def test_bad_options_are_one_line(tmp_path: Path) -> None:
    for name, options, message in (
        ("cifar", {}, "did you mean 'cifar10'"),
        ("digits", {"limit": 0}, "limit=0"),
        ("digits", {"image_size": 2}, "image_size=2"),
        ("photos", {"image_size": 9999}, "image_size=9999"),
    ):
        with pytest.raises(BadInput) as error:
            load_dataset(name, **options)  # type: ignore[arg-type]
        one_line(error, message)


# ---- the real files, where there are any

real = pytest.mark.skipif(REAL is None, reason="FEDAUDIT_DATA is not set")
COUNTS = {
    "cifar10": (7000, 10000, (3, 32, 32), 10),
    "cifar100": (5000, 10000, (3, 32, 32), 100),
    "mnist": (60000, 10000, (1, 28, 28), 10),
    "fashion-mnist": (20000, 10000, (1, 28, 28), 10),
    "att-faces": (320, 80, (1, 64, 64), 40),
    "gtsrb": (4300, 2580, (3, 32, 32), 43),
    "adult": (32561, 16281, (108,), 2),
    "location30": (4008, 1002, (446,), 30),
}
PUBLISHED_MEANS = {  # of the test splits of CIFAR, of the train split of MNIST
    "cifar10": (0.4942, 0.4851, 0.4504),
    "cifar100": (0.5088, 0.4874, 0.4419),
    "mnist": (0.1307,),
    "fashion-mnist": (0.2860,),
}


@real
@pytest.mark.parametrize("name", COUNTS)
def test_real_files(name: str) -> None:
    if find_dataset(name) is None:
        pytest.skip(f"{name} is not in FEDAUDIT_DATA")
    data = load_dataset(name)
    if (len(data.train), len(data.test)) != COUNTS[name][:2]:
        pytest.skip(f"another edition of {name}")
    assert (data.input_shape, data.num_classes) == COUNTS[name][2:]
    assert len(data.train.targets.unique()) == data.num_classes
    if name in PUBLISHED_MEANS:
        means = data.test.inputs.mean(dim=(0, 2, 3)).tolist() if name.startswith("cifar") else list(data.mean)
        within = 6e-4 if name == "fashion-mnist" else 6e-5  # a third of Fashion-MNIST's train split is at hand
        assert means == pytest.approx(PUBLISHED_MEANS[name], abs=within)
    if name == "adult":
        assert [int(s.targets.sum()) for s in (data.train, data.test)] == [7841, 3846]
    if name == "location30":
        counts = torch.cat([data.train.targets, data.test.targets]).bincount()
        assert (int(counts.min()), int(counts.max())) == (97, 308)
