"""Folders of scans, volumes and signals: by class, by a table, with masks; what doesn't fit together is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from fedaudit.data import load_dataset
from fedaudit.data.example_folder import read_folder
from fedaudit.pipeline.prepare import resolve
from fedaudit.scenario.scenario import scenario_from
from fedaudit.transcript.queries import NOBODY
from fedaudit.utils.errors import BadInput
from tests.data.data_cases import one_line
from tests.data.medical_cases import dicom, series, wfdb
from tests.data.test_medical import nifti, package

RNG = np.random.default_rng(5)


def save(path: Path, array: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    np.save(path, array)
    return path


def refused(folder: Path, kind: str, *parts: str, **options: Any) -> None:
    with pytest.raises(BadInput) as error:
        read_folder(folder, kind, **options)
    one_line(error, *parts)


def test_signals_by_class(tmp_path: Path) -> None:
    drawn = {}
    for split, names in (("train", ("sick", "well")), ("test", ("well",))):
        for name in names:
            for i in range(3):
                digital = drawn[split, name, i] = RNG.integers(-900, 900, (2, 50))
                wfdb(tmp_path / split / name, digital, name=f"r{i}", rate=250)
    data = load_dataset("signal-folder", data_dir=tmp_path)
    assert (data.kind, data.class_names, data.source) == ("signal", ("sick", "well"), "your own signals")
    assert data.train.targets.tolist() == [0, 0, 0, 1, 1, 1]
    assert data.test.targets.tolist() == [1, 1, 1]
    assert torch.allclose(data.train.inputs[4], torch.from_numpy(drawn["train", "well", 1] / 200).float())
    assert len(load_dataset("signal-folder", data_dir=tmp_path, limit=2).train) == 2
    wfdb(tmp_path / "train/well", np.zeros((2, 50), int), name="r9", rate=500)
    refused(tmp_path, "signal", "r9.hea has 500.0 samples a second", "r0.hea has 250.0")
    wfdb(tmp_path / "train/well", np.zeros((2, 49), int), name="r9", rate=250)
    refused(tmp_path, "signal", "r9.hea is (2, 49)", "(2, 50)")
    header = wfdb(tmp_path / "train/well", np.zeros((2, 50), int), name="r9", rate=250)
    header.write_text(header.read_text().replace("lead 0", "lead 3"))
    refused(tmp_path, "signal", "has the leads lead 3, lead 1, in other order")
    wfdb(tmp_path / "train/well", np.full((2, 50), -(2**15)), name="r9", rate=250)
    refused(tmp_path, "signal", "r9.hea has values that are missing")


def test_volumes_of_nifti_and_dicom_series(tmp_path: Path) -> None:
    package("pydicom")
    volumes = RNG.integers(0, 4096, (4, 3, 6, 5)).astype(np.uint16)
    series(tmp_path / "train/a/patient-1", volumes[0])
    nifti(tmp_path / "train" / "a" / "x.nii.gz", volumes[1].transpose(2, 1, 0))
    save(tmp_path / "train/b/y.npy", volumes[2])
    save(tmp_path / "test/b/z.npy", volumes[3][None])
    (train, test, names) = read_folder(tmp_path, "volume")
    assert names == ("a", "b")
    assert torch.equal(train.inputs[:, 0], torch.from_numpy(volumes[:3].astype(np.float32)))
    assert torch.equal(test.inputs[:, 0], torch.from_numpy(volumes[3:].astype(np.float32)))
    data = load_dataset("volume-folder", data_dir=tmp_path)
    low, high = float(volumes[:3].min()), float(volumes[:3].max())
    assert torch.allclose(data.train.inputs, (train.inputs - low) / (high - low), atol=1e-6)
    dicom(tmp_path / "train/b/flat.dcm", volumes[0][0])
    refused(tmp_path, "volume", "flat.dcm holds an array of (6, 5), not C, D, H, W")
    refused(tmp_path, "signal", "not C, T")


def test_scans_are_as_a_viewer_shows_them(tmp_path: Path) -> None:
    package("pydicom")
    ramp = np.linspace(0, 4095, 64 * 48).astype(np.uint16).reshape(64, 48)
    depth = {"BitsStored": 12, "HighBit": 11}
    for split in ("train", "test"):
        for name in ("a", "b"):
            dicom(tmp_path / split / name / "x.dcm", ramp, **depth)
            dicom(tmp_path / split / name / "y.dcm", ramp, WindowCenter="1000.5", WindowWidth="1001", **depth)
            dicom(tmp_path / split / name / "z.dcm", ramp, PhotometricInterpretation="MONOCHROME1", **depth)
    train, _, _ = read_folder(tmp_path, "image")
    true = ramp.astype(np.float64)
    assert np.allclose(train.inputs[0, 0], true / 4095, atol=1e-6)
    assert np.allclose(train.inputs[1, 0], ((true - 500) / 1000).clip(0, 1), atol=1e-6)
    assert np.allclose(train.inputs[2, 0], 1 - true / 4095, atol=1e-6)
    data = load_dataset("scan-folder", data_dir=tmp_path, image_size=16)
    assert data.input_shape == (1, 16, 16)
    square = torch.from_numpy(true[8:56] / 4095).reshape(16, 3, 16, 3)
    assert float(data.train.inputs[0, 0].mean()) == pytest.approx(float(square.mean()), abs=1e-3)
    assert np.allclose(read_folder(tmp_path, "image", white=8190)[0].inputs[1, 0], true / 8190, atol=1e-6)
    refused(tmp_path, "image", "not between 0 and 100", white=100)


def test_scans_without_contrast_are_refused(tmp_path: Path) -> None:
    package("pydicom")
    for split in ("train", "test"):
        for name in ("a", "b"):
            dicom(tmp_path / split / name / "x.dcm", RNG.integers(0, 2000, (8, 8)).astype(np.int16))
    refused(tmp_path, "image", "would have no contrast", "data.max_pixel_value")
    assert float(read_folder(tmp_path, "image", white=2000)[0].inputs.max()) > 0.8


def table(folder: Path, *lines: str) -> None:
    (folder / "labels.csv").write_text("\n".join(lines) + "\n")


@pytest.fixture
def signals(tmp_path: Path) -> Path:
    for i in range(10):
        save(tmp_path / f"s{i}.npy", np.full((2, 4), i, dtype=np.float32))
    return tmp_path


def test_a_table_of_findings(signals: Path) -> None:
    """Several columns are several targets; without a test folder one example in five is held out."""
    table(signals, "file,oedema,nodule,age", *(f"s{i}.npy,{i % 2},{i // 5},{30 + i}.5" for i in range(10)))
    train, test, names = read_folder(signals, "signal")
    assert names == ("oedema", "nodule", "age")
    numbers = train.inputs[:, 0, 0]
    assert train.targets.dtype == torch.float32
    assert torch.equal(train.targets, torch.stack([numbers % 2, (numbers / 5).floor(), 30.5 + numbers], dim=1))
    assert sorted(torch.cat([numbers, test.inputs[:, 0, 0]]).tolist()) == list(range(10))
    assert len(test.targets) == 2


@pytest.mark.parametrize(
    ("targets", "words"),
    [
        (["0", "1", "NA"], "missing in 3 cells, as 'NA'"),
        (["yes", "no", "?"], "missing in 3 cells, as '?'"),
        (["0", "1", "99"], "99, in 3 of 10 cells, is far from all others"),
        ([f"{i},5" for i in range(10)], "hasn't a value in each of 2 columns"),
        ([f'"1{i},5"' for i in range(12)], "targets such as '10,5' are no plain numbers"),
        (["<0.5", *(f"{i}.7" for i in range(12))], "targets such as '<0.5' are no plain numbers"),
    ],
)
def test_targets_of_a_table_that_can_be_meant_otherwise_are_asked_about(signals: Path, targets, words) -> None:
    for i in range(10, 13):
        save(signals / f"s{i}.npy", np.full((2, 4), i, dtype=np.float32))
    count = len(targets) if len(targets) > 9 else 10
    table(signals, "file,outcome", *(f"s{i}.npy,{targets[i % len(targets)]}" for i in range(count)))
    refused(signals, "signal", words)


def test_a_table_of_many_whole_numbers_says_whether_they_are_measured(tmp_path: Path) -> None:
    for i in range(60):
        save(tmp_path / f"s{i}.npy", np.full((2, 4), i, dtype=np.float32))
    table(tmp_path, "file,months", *(f"s{i}.npy,{3 * i}" for i in range(60)))
    refused(tmp_path, "signal", "are the 60 different whole numbers", "write numbers as 12.0")
    table(tmp_path, "file,months", *(f"s{i}.npy,{3 * i}.0" for i in range(60)))
    assert read_folder(tmp_path, "signal")[0].targets.dtype == torch.float32
    table(tmp_path, "file,died", *(f"s{i}.npy,{i % 2}.0" for i in range(60)))
    assert read_folder(tmp_path, "signal")[0].targets.dtype == torch.int64


def test_a_table_of_classes_and_clients(signals: Path) -> None:
    (signals / "test").mkdir()
    for i in (3, 7):
        (signals / f"s{i}.npy").rename(signals / f"test/s{i}.npy")
    paths = [f"{'test/' if i in (3, 7) else ''}s{i}.npy" for i in range(10)]
    table(
        signals,
        "file,client,finding",
        *(f"{path},ward {i % 3},{'yes' if i > 4 else 'no'}" for i, path in enumerate(paths)),
    )
    data = load_dataset("signal-folder", data_dir=signals)
    assert data.class_names == ("no", "yes")
    assert data.test.inputs[:, 0, 0].tolist() == [3, 7]
    assert data.test.targets.tolist() == [0, 1]
    assert data.train.groups is not None
    assert data.train.groups.tolist() == [0, 1, 2, 1, 2, 0, 2, 0]
    table(signals, "file,age", *(f"{path},{i / 4}" for i, path in enumerate(paths)))
    assert load_dataset("signal-folder", data_dir=signals).task == "regression"


@pytest.mark.parametrize(
    ("lines", "why"),
    [
        (["file,a", "../s1.npy,1"], "give paths of files in its folder"),
        (["file,a", "/etc/passwd,1"], "give paths of files in its folder"),
        (["file,a", "s1.npy,"], "hasn't a value in each of 2 columns"),
        (["file,a", "s1.npy"], "hasn't a value in each of 2 columns"),
        (["file,a", "s1.npy,1", "s1.npy,0"], "names a file twice"),
        (["file,a,a", "s1.npy,1,1"], "different names"),
        (["file", "s1.npy"], "different names"),
        (["file,a,b", "s1.npy,yes,1", "s2.npy,no,1"], "every one is a number"),
        (["file,a", "s1.npy,nan", "s2.npy,1"], "targets are missing in 1 cells, as 'nan'"),
        (["file,a", "s1.npy,1", "lost.npy,1"], "lost.npy"),
        (["file,a", "s1.npy,1", "s2.doc,1"], "of no format that is read"),
        (["file,a", "test/s1.npy,1"], "test split only"),
    ],
)
def test_tables_that_are_refused(lines: list[str], why: str, signals: Path) -> None:
    table(signals, *lines)
    refused(signals, "signal", why)


def test_masks(tmp_path: Path) -> None:
    """A mask for each example, of the same name, as whole numbers; resized without new classes."""
    images = RNG.integers(0, 256, (5, 12, 8), dtype=np.uint8)
    masks = RNG.integers(0, 4, (5, 12, 8), dtype=np.uint8)
    for i, split in enumerate(("train", "train", "train", "test", "test")):
        for folder, pixels in ((tmp_path / split, images[i]), (tmp_path / "masks" / split, masks[i])):
            folder.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels).save(folder / f"{i}.png")
    train, test, names = read_folder(tmp_path, "image")
    assert names is None
    assert np.array_equal(train.inputs[:, 0], (images[:3] / 255).astype(np.float32))
    assert train.targets.dtype == torch.int64
    assert np.array_equal(train.targets, masks[:3])
    assert np.array_equal(test.targets, masks[3:])
    small = read_folder(tmp_path, "image", size=4)[0]
    assert np.array_equal(small.targets, masks[:3, 3:10:2, 1::2])
    (tmp_path / "masks/test/4.png").unlink()
    refused(tmp_path, "image", "masks/test/4.png is missing, one of 1 masks")


def test_masks_of_volumes(tmp_path: Path) -> None:
    for i in range(5):
        save(tmp_path / f"train/{i}.npy", np.full((2, 3, 4), i / 10, np.float32))
        save(tmp_path / f"masks/train/{i}.npy", np.full((2, 3, 4), i, np.int16))
    train, test, _ = read_folder(tmp_path, "volume", limit=3)
    assert train.targets.shape == (3, 2, 3, 4)
    assert [int(mask[0, 0, 0]) for mask in (*train.targets, *test.targets)] == [0, 1, 2, 4]
    save(tmp_path / "masks/train/1.npy", np.full((2, 3, 4), 0.5))
    refused(tmp_path, "volume", "isn't a mask: give whole numbers")
    save(tmp_path / "masks/train/1.npy", np.zeros((2, 3, 5)))
    refused(tmp_path, "volume", "a mask of (2, 3, 5), its example of (2, 3, 4)")
    table(tmp_path, "file,a", "train/1.npy,1")
    refused(tmp_path, "volume", "keep one of them")


def test_folders_that_are_refused(tmp_path: Path) -> None:
    refused(tmp_path, "volume", "needs labels.csv, or the folders train and test")
    for name in ("train/a", "train/b", "test/c"):
        save(tmp_path / name / "x.npy", np.zeros((2, 3, 4), np.float32))
    refused(tmp_path, "volume", "the class folder 'c', that the train folder lacks")
    (tmp_path / "test/c").rename(tmp_path / "test/a")
    save(tmp_path / "test/a/x.npy", np.full((2, 3, 4), np.inf, np.float32))
    refused(tmp_path, "volume", "missing or infinite")
    save(tmp_path / "test/a/x.npy", np.zeros((2, 3, 5), np.float32))
    refused(tmp_path, "volume", "x.npy is (1, 2, 3, 5)", "(1, 2, 3, 4)")
    (tmp_path / "test/a/x.npy").rename(tmp_path / "test/a/x.doc")
    refused(tmp_path, "volume", "has no files that are read")


def people(folder: Path, targets: str, *, scans: int = 3, count: int = 40) -> dict[bytes, int]:
    """Write scans of each person, and return whose each is, by its pixels."""
    lines, whose = [f"file,patient,{targets}"], {}
    for person in range(count):
        for scan in range(scans):
            image = RNG.random((1, 6, 6)).astype(np.float32)
            save(folder / f"scans/{person}-{scan}.npy", image)
            values = ",".join(str((person + i) % 2) for i in range(targets.count(",") + 1))
            lines.append(f"scans/{person}-{scan}.npy,P{person},{values}")
            whose[image.tobytes()] = person
    (folder / "labels.csv").write_text("\n".join(lines))
    return whose


@pytest.mark.parametrize("targets", ["kind", "a,b,c"])
def test_a_person_is_in_one_split_and_in_one_client_and_never_both_in_and_out(tmp_path: Path, targets: str) -> None:
    whose = people(tmp_path, targets)

    def persons(examples: torch.Tensor) -> set[int]:
        return {whose[one.numpy().tobytes()] for one in examples}

    data = load_dataset("scan-folder", data_dir=tmp_path)
    train, test = persons(data.train.inputs), persons(data.test.inputs)
    assert train.isdisjoint(test)
    assert 4 <= len(test) <= 12
    assert "of 40 persons" in data.summary
    for scheme in ("iid", "dirichlet", "classes-per-client")[: 3 if targets == "kind" else 1]:
        federation: dict[str, Any] = {"name": "f", "clients": 3, "partition": {"scheme": scheme}, "examples": 50}
        scenario = {
            "federations": [federation],
            "data": {"name": "scan-folder", "split": "train"},
            "model": {"name": "mlp"},
            "threat": {"target_records": 10},
        }
        federation["partition"] |= {"k": 1} if scheme == "classes-per-client" else {}
        parts = resolve(scenario_from(scenario), data_dir=tmp_path).federations[0]
        held = [persons(own.inputs) for own in parts.client_data]
        everybody = {person for own in held for person in own}
        assert sum(map(len, held)) == len(everybody)
        records, owners = parts.drawn.records, parts.drawn.owners
        assert records is not None
        assert persons(records.inputs[owners == NOBODY]).isdisjoint(everybody)
        assert persons(records.inputs[owners != NOBODY]) <= everybody
        assert persons(parts.drawn.held_out.inputs).isdisjoint(everybody)


def test_a_person_on_both_sides_is_refused(tmp_path: Path) -> None:
    people(tmp_path, "kind", count=4)
    table = tmp_path / "labels.csv"
    plain = table.read_text()
    (tmp_path / "test").mkdir()
    (tmp_path / "scans/0-1.npy").rename(tmp_path / "test/0-1.npy")
    table.write_text(plain.replace("scans/0-1", "test/0-1"))
    refused(tmp_path, "image", "the patient 'P0' has files in test/", "keep a person in one")
    table.write_text(plain.replace("patient", "patient,subject").replace(",P", ",P,P"))
    refused(tmp_path, "image", "patient and subject, which say the same")
