"""Foreign bytes: what is too much, damaged or of an odd type is one line, soon, and never in large memory."""

from __future__ import annotations

import dataclasses
import gzip
import os
import struct
import time
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fedaudit
from fedaudit.attacks import Finding
from fedaudit.data import load_dataset
from fedaudit.data.batches import read_pickled_batch
from fedaudit.data.files import read_csv, read_idx, read_mat, read_npz, read_parquet
from fedaudit.data.images import read_image
from fedaudit.data.medical import read_example
from fedaudit.guard.rounds import read_site
from fedaudit.models import checkpoint
from fedaudit.models.checkpoint import load_checkpoint
from fedaudit.results import AuditResult
from fedaudit.transcript.rounds import read_file
from fedaudit.transcript.truth import Truth
from fedaudit.utils import bounds, plain_yaml
from fedaudit.utils.errors import BadInput
from fedaudit.utils.image_bytes import decode
from fedaudit_catalogue.generators import TrainedGenerator
from fedaudit_lab.studies.store import FILE as STORE
from fedaudit_lab.studies.store import Store
from fedaudit_trees.model import read_booster
from tests.conftest import Command, core, refused
from tests.data.data_cases import one_line, random_images
from tests.data.test_formats import idx, png, write_parquet


def refuses(call: Callable[[], Any], *fragments: str) -> None:
    """Assert that ``call`` is refused in one line, with little CPU."""
    began = time.process_time()
    with pytest.raises(BadInput) as error:
        call()
    assert time.process_time() - began < bounds.SLOWEST
    one_line(error, *fragments)


# --- YAML ----------------------------------------------------------------------------------------------------------

YAML = [
    ("no truth", "!!bool x", "'x' is no bool"),
    ("a date by its tag", "!!timestamp x", "the tag 'tag:yaml.org,2002:timestamp' isn't read"),
    ("no number at all", "!!int ''", "'' is no int"),
    ("no fraction", "!!float ''", "'' is no float"),
    ("a sign alone", "!!int '-'", "'-' is no int"),
    ("bytes", "!!binary aGk=", "isn't read"),
    ("a set", "!!set {a, b}", "isn't read"),
    ("no mapping", "!!map [1]", "expected a mapping"),
    ("5,000 digits", "9" * 5000, "a number of more than 100 characters"),
    ("50,000 digits to the base of 16", "0x" + "f" * 50_000, "a number of more than 100 characters"),
    ("sexagesimal by its tag", "!!int 1" + ":59" * 10_000, "a number of more than 100 characters"),
    ("30,000 keys", "{" + ",".join(f"k{i}: 1" for i in range(30_000)) + "}", "more than 20,000 keys and values"),
    ("300,000 items", "[" + "1," * 300_000 + "]", "more than 20,000 keys and values"),
    ("60 levels", "[" * 60 + "]" * 60, "more than 50 levels deep"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("text", "fragment"), [pytest.param(*row[1:], id=row[0]) for row in YAML])
def test_yaml(text: str, fragment: str) -> None:
    refuses(lambda: plain_yaml.loads(f"a: {text}\n", "the scenario"), "the scenario", fragment)


@pytest.mark.parametrize("text", ["2024-01-01", "12:30", "1" + ":59" * 10_000, "1" + ":59" * 400 + ".5", "<<", "="])
def test_dates_and_sexagesimal_numbers_are_texts(text: str) -> None:
    assert plain_yaml.loads(f"a: {text}", "x") == {"a": text}


@pytest.mark.parametrize("value", [1e-4, -3, 1.5, float("inf"), "1e3", "2024-01-01", "12:30", "<<", "0x1f", "~", True])
def test_what_is_written_is_read(value: Any) -> None:
    twice = [value]
    assert plain_yaml.loads(plain_yaml.dumps({"a": twice, "b": twice}), "x") == {"a": [value], "b": [value]}


def test_a_pipe_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.yaml")
    refuses(lambda: fedaudit.load_scenario(tmp_path / "pipe.yaml"), "is a pipe or a device")
    (tmp_path / "MNIST").mkdir()
    for stem in ("train", "t10k"):
        for what in ("images-idx3", "labels-idx1"):
            os.mkfifo(tmp_path / "MNIST" / f"{stem}-{what}-ubyte")
    refuses(lambda: load_dataset("mnist", data_dir=tmp_path), "is a pipe or a device")
    os.mkfifo(tmp_path / "pipe.safetensors")
    refuses(lambda: Finding.load(tmp_path / "pipe.safetensors"), "is a pipe or a device")


# --- settings that make no sense -----------------------------------------------------------------------------------

GAN = "federations.sgd.malicious={name: gan, start: 1, LACKS}"
SETTINGS = [
    ("noise of next to nothing", ["defences.client_defence={name: dp, noise: 1e-300}"], "1e-300 is too near 0"),
    ("a learning rate beyond floats", ["model.training={epochs: 1, learning_rate: 1e300}"], "1e+300 is too large"),
    ("a pull beyond floats", ["federations.sgd.proximal_mu=1e300"], "1e+300 is too large"),
    ("a path of 5,000 letters", ["model.checkpoint=" + "x" * 5000], "can't be the path of a file"),
    ("a path with NUL", ['model.checkpoint="a\\0b"'], "can't be the path of a file"),
    (
        "a generator that isn't there",
        ["attacks=[{name: gias, generator_file: no.safetensors}]"],
        "no file 'no.safetens",
    ),
    ("a digit that is none", ["federations.².clients=1"], "unknown item '²'"),
    ("a round twice", ["federations.sgd.rounds=2", "federations.sgd.keep_rounds=[0,0,1]"], "names a round twice"),
    ("attacked twice", ["evaluation.attacked_federations=[sgd, sgd]"], "each once"),
    ("attacked nowhere", ["evaluation.attacked_federations=[]"], "name one or more"),
    (
        "a GAN that has what it is after",
        [GAN.replace("LACKS", "lacks: []"), "federations.sgd.rounds=2", "federations.sgd.examples=40"],
        "which they are after; set malicious.missing_classes: [3]",
    ),
    (
        "a GAN that never starts",
        [GAN.replace("LACKS", "lacks: [3]"), "federations.sgd.examples=40"],
        "start in round 1",
    ),
]


@pytest.mark.parametrize(("settings", "fragment"), [pytest.param(*row[1:], id=row[0]) for row in SETTINGS])
def test_setting(settings: list[str], fragment: str, scenario_file: Path, tmp_path: Path, command: Command) -> None:
    words = [word for setting in settings for word in ("--set", setting)]
    refused(command("audit", scenario_file, *words, "--out", tmp_path / "out", "--workers", 1), fragment)
    assert not (tmp_path / "out" / "results.json").exists()


def test_attacks_as_a_text(scenario_file: Path, tmp_path: Path, command: Command) -> None:
    refused(command("attack", tmp_path, "--set", "attacks=x", "--out", tmp_path / "out"), "give attacks.NAME.key=value")


@pytest.mark.parametrize(
    "words", ["audit {}", "audit {s} --out {}", "audit {s} --data-dir {}", "attack {}", "compare {} {}", "study log {}"]
)
def test_paths_of_5000_letters(words: str, scenario_file: Path, tmp_path: Path, command: Command) -> None:
    line = [w.format("x" * 5000, s=scenario_file) for w in words.split()]
    refused(command(*line), "File name too long")


# --- data sets -----------------------------------------------------------------------------------------------------


def mat(*elements: bytes) -> bytes:
    return b"MATLAB 5.0".ljust(124) + b"\x00\x01IM" + b"".join(elements)


def packed(content: bytes) -> bytes:
    body = zlib.compress(content)
    return struct.pack("<II", 15, len(body)) + body


def nested(times: int) -> bytes:
    content = b""
    for _ in range(times):
        content = packed(content)
    return content


def npy(shape: str, dtype: str = "<f8", data: bytes = b"") -> bytes:
    header = f"{{'descr': {dtype!r}, 'fortran_order': False, 'shape': {shape}, }}".ljust(117).encode() + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + data


def npz(path: Path, **members: bytes) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(f"{name}.npy", content)
    return path


def test_a_gzip_that_swells(tmp_path: Path) -> None:
    path = tmp_path / "bomb.gz"
    chunk = gzip.compress(bytes(2**26), 1)
    path.write_bytes(chunk * 32)  # 2 GB in 9 MB
    refuses(lambda: read_idx(path), "the most that is read")


@pytest.mark.parametrize(
    "member",
    [
        npy("(10**10,)"),
        npy("(100000000000,)"),
        npy("(-1,)"),
        npy("(3,)", "|O"),
        npy("(3,)", "<U9999999"),
        npy("(2,)", "<f8", bytes(8)),
        npy("(True,)"),
        b"\x93NUMPY\x03\x00" + bytes(20),
        npy("(" * 9000),
        b"",
    ],
    ids=["formula", "huge", "negative", "objects", "text", "short", "truth", "version", "brackets", "empty"],
)
def test_npy_headers(member: bytes, tmp_path: Path) -> None:
    refuses(lambda: read_npz(npz(tmp_path / "a.npz", x=member), "x"), "a.npz")


@pytest.mark.parametrize(
    "labels",
    [np.array([0.5] * 4), np.array([np.nan] * 4), np.array(list("abcd")), np.ones((4, 2), int), np.array([1j] * 4),
     np.array([2**64 - 1] * 4, dtype=np.uint64), np.zeros(4, "datetime64[s]"), np.array(3), np.array([True] * 4)],
    ids=["fractions", "nan", "text", "two", "complex", "large", "dates", "scalar", "truths"],
)  # fmt: skip
def test_npz_labels_of_odd_types(labels: np.ndarray[Any, Any], tmp_path: Path) -> None:
    (tmp_path / "mnist").mkdir()
    x = random_images(4, 28, 28)
    np.savez(tmp_path / "mnist/mnist.npz", x_train=x, y_train=labels, x_test=x, y_test=np.arange(4))
    refuses(lambda: load_dataset("mnist", data_dir=tmp_path), "mnist.npz")


MATS: dict[str, Callable[[], bytes]] = {
    "3,000 deep": lambda: mat(nested(3000)),
    "2 deep": lambda: mat(nested(2)),
    "too many": lambda: mat(struct.pack("<II", 1, 0) * 100_000),
    "swollen": lambda: mat(packed(bytes(2**28 + 2**20))),
    "no parts": lambda: mat(struct.pack("<II", 14, 0)),
    "cut short": lambda: mat(packed(bytes(100))[:-3].ljust(40, b"\0")),
}


@pytest.mark.parametrize("name", core(MATS, "2 deep", "too many", "no parts", "cut short"))
def test_mat(name: str, tmp_path: Path) -> None:
    (tmp_path / "a.mat").write_bytes(MATS[name]())
    refuses(lambda: read_mat(tmp_path / "a.mat", "X"), "a.mat")


LABELS: dict[str, list[Any]] = {
    "huge": [1e300, 0.0],
    "fractions": [0.5, 1.0],
    "text": ["0", "1"],
    "missing": [None, 1],
    "not a number": [float("nan"), 1.0],
    "truths": [True, False],
    "lists": [[0], [1]],
    "mappings": [{"a": 1}, {"a": 2}],
}


@pytest.mark.parametrize("labels", LABELS.values(), ids=LABELS)
def test_parquet_labels_of_odd_types(labels: list[Any], tmp_path: Path) -> None:
    picture = png(random_images(1, 32, 32, 3)[0])
    for split in ("train", "test"):
        write_parquet(tmp_path / f"cifar10/{split}.parquet", png=[picture] * 2, label=labels)
    refuses(lambda: load_dataset("cifar10", data_dir=tmp_path), "parquet")


@pytest.mark.parametrize("cells", [[3, 4], ["text", "x"], [None, b""], [[b"x"], []], [b"%!PS-Adobe-3.0 EPSF-3.0", b""]])
def test_parquet_pictures_of_odd_types(cells: list[Any], tmp_path: Path) -> None:
    for split in ("train", "test"):
        write_parquet(tmp_path / f"cifar10/{split}.parquet", png=cells, label=[0, 1])
    refuses(lambda: load_dataset("cifar10", data_dir=tmp_path), "parquet")


@pytest.mark.slow
def test_parquet_of_many_equal_rows(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    few = arrow.array([0])
    labels = arrow.DictionaryArray.from_arrays(arrow.array(np.zeros(2_000_000, np.int8)), few)
    pictures = arrow.DictionaryArray.from_arrays(arrow.array(np.zeros(2_000_000, np.int8)), arrow.array([b"x"]))
    for split in ("train", "test"):
        write_parquet(tmp_path / f"cifar10/{split}.parquet", png=pictures, label=labels)
    refuses(lambda: load_dataset("cifar10", data_dir=tmp_path, limit=10), "2,000,000 rows")
    large = arrow.array([bytes(900_000)])
    write_parquet(tmp_path / "a.parquet", png=arrow.chunked_array([large] * 700))
    assert (tmp_path / "a.parquet").stat().st_size < 2**20
    refuses(lambda: read_parquet(tmp_path / "a.parquet"), "bytes, and 536,870,912 is the most")


def test_csv(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    for content in (b'"' + b"x" * 200_000 + b'"', b"\xff\xfe", b'a,"b\x00\r'):
        path.write_bytes(content)
        if content.endswith(b"\r"):
            assert read_csv(path)  # strange, and within bounds
        else:
            refuses(lambda: read_csv(path), "a.csv")
    (tmp_path / "bangkok").write_text("1," + "9" * 40 + "\n")
    refuses(lambda: load_dataset("location30", data_dir=tmp_path), "bangkok")


def test_pictures_too_large_or_no_pictures() -> None:
    head = b"\x89PNG\r\n\x1a\n"
    about = b"IHDR" + struct.pack(">IIBBBBB", 13_000, 13_000, 8, 2, 0, 0, 0)
    bomb = head + struct.pack(">I", 13) + about + struct.pack(">I", zlib.crc32(about))
    bomb += struct.pack(">I", 0) + b"IDAT" + struct.pack(">I", zlib.crc32(b"IDAT"))
    refuses(lambda: decode(bomb, "a.png"), "more than 67,108,864", "smaller")
    refuses(lambda: decode(b"GIF89a" + bytes(99), "a.png"), "none of the formats PNG")
    with pytest.raises(BadInput) as error:
        decode(b"nothing", "a.png")
    assert "BytesIO" not in str(error.value)


@pytest.mark.skipif(os.name != "posix", reason="names of bytes")
def test_class_folders_that_are_no_utf_8(tmp_path: Path) -> None:
    for split in ("train", "test"):
        for name in (b"a", b"\xff\xfe"):
            folder = tmp_path / split / os.fsdecode(name)
            folder.mkdir(parents=True)
            (folder / "1.png").write_bytes(png(random_images(1, 8, 8, 3)[0]))
    refuses(lambda: load_dataset("image-folder", data_dir=tmp_path), r"'\udcff\udcfe'", "rename it")


def test_idx_whole(tmp_path: Path) -> None:
    array = random_images(3, 5, 4)
    (tmp_path / "a").write_bytes(idx(array))
    assert np.array_equal(read_idx(tmp_path / "a"), array)


# --- checkpoints ---------------------------------------------------------------------------------------------------


def test_pt_files_that_are_packed_or_ask_for_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, model = tmp_path / "m.pt", nn.Linear(1000, 1000)
    torch.save(model.state_dict(), path)
    with zipfile.ZipFile(path) as source, zipfile.ZipFile(tmp_path / "packed.pt", "w", zipfile.ZIP_DEFLATED) as target:
        for name in source.namelist():
            target.writestr(name, source.read(name))
    refuses(lambda: load_checkpoint(model, tmp_path / "packed.pt"), "is refused")
    monkeypatch.setattr(checkpoint, "TORCH", dataclasses.replace(bounds.TORCH, items=100_000))
    for program in (b"\x80\x02cbuiltins\nbytearray\nJ\xff\xff\xff\x7f\x85R.", b"\x80\x02" + b"]" * 200_000 + b"."):
        path.write_bytes(program)
        refuses(lambda: load_checkpoint(model, path), "is refused")


@pytest.mark.slow
def test_a_pickle_s_program_may_be_long(tmp_path: Path) -> None:
    state = {f"layer{i}": torch.zeros(1) for i in range(5000)}
    torch.save(state, tmp_path / "m.pt")
    model = nn.ParameterDict({name: nn.Parameter(value + 1) for name, value in state.items()})
    load_checkpoint(model, tmp_path / "m.pt")
    assert not any(bool(value.any()) for value in model.values())


# --- sizes ---------------------------------------------------------------------------------------------------------

READERS: dict[str, tuple[bounds.Bounds, str, Callable[[Path], Any]]] = {
    "scenario": (bounds.YAML, "s.yaml", fedaudit.load_scenario),
    "result": (bounds.JSON, "results.json", AuditResult.load),
    "index": (bounds.JSON, "index.json", lambda path: fedaudit.Transcript.load(path.parent)),
    "pickle": (bounds.PICKLE, "data_batch_1", read_pickled_batch),
    "idx": (bounds.IDX, "a", read_idx),
    "idx.gz": (bounds.IDX, "a.gz", read_idx),
    "npz": (bounds.NPZ, "a.npz", lambda path: read_npz(path, "x")),
    "mat": (bounds.MAT, "a.mat", lambda path: read_mat(path, "X")),
    "parquet": (bounds.PARQUET, "a.parquet", read_parquet),
    "csv": (bounds.CSV, "a.csv", read_csv),
    "picture": (bounds.PICTURE, "a.png", read_image),
    "nifti": (bounds.NIFTI, "a.nii", read_example),
    "nifti.gz": (bounds.NIFTI, "a.nii.gz", read_example),
    "dicom": (bounds.DICOM, "a.dcm", read_example),
    "wfdb": (bounds.WFDB, "a.hea", read_example),
    "npy": (bounds.NPZ, "a.npy", read_example),
    "safetensors": (bounds.TENSORS, "a.safetensors", lambda path: load_checkpoint(nn.Linear(1, 1), path)),
    "finding": (bounds.TENSORS, "a.safetensors", Finding.load),
    "generator": (bounds.TENSORS, "a.safetensors", TrainedGenerator.load),
    "truth": (bounds.TENSORS, "a.safetensors", Truth.load),
    "tensors": (bounds.TENSORS, "a.safetensors", lambda path: read_file(path.parent, path.name, {})),
    "pt": (bounds.TORCH, "a.pt", lambda path: load_checkpoint(nn.Linear(1, 1), path)),
    "site": (bounds.SITE, "guard.jsonl", lambda path: read_site(path.parent)),
    "booster": (bounds.BOOSTER, "trees.json", lambda path: read_booster(path.read_bytes(), "trees.json")),
    "store": (bounds.STORE, STORE, lambda path: Store(path.parent)),
}


@pytest.mark.parametrize("name", READERS)
def test_a_file_that_is_too_large_is_not_read(name: str, tmp_path: Path) -> None:
    bound, file, read = READERS[name]
    with (tmp_path / file).open("wb") as sparse:
        sparse.truncate(bound.file + 1)
    needed = {"parquet": "pyarrow", "nifti": "nibabel", "nifti.gz": "nibabel", "dicom": "pydicom"}
    if name in needed:
        pytest.importorskip(needed[name])
    refuses(lambda: read(tmp_path / file), f"larger than {bound.file:,} bytes")


def test_every_reader_s_bounds_are_tried() -> None:
    assert {bound.what for bound, _, _ in READERS.values()} == {b.what for b in bounds.TABLE if b is not bounds.GRID}


def test_deep_json(tmp_path: Path) -> None:
    for content in ("[" * 100_000, '{"a":' * 300 + "1" + "}" * 300):
        (tmp_path / "results.json").write_text(content)
        refuses(lambda: AuditResult.load(tmp_path / "results.json"), "is truncated or not JSON")


# --- the table of bounds -------------------------------------------------------------------------------------------


def size(count: int | None) -> str:
    """Return a number of bytes in words: 64 MB, or 1,000,000 bytes."""
    if count is None:
        return "–"
    fits = [(unit, size) for unit, size in (("GB", bounds.GB), ("MB", bounds.MB)) if count % size == 0]
    return f"{count // fits[0][1]} {fits[0][0]}" if fits else f"{count:,} bytes"


def row(b: bounds.Bounds) -> str:
    """Return a reader's row of the table."""
    items = f"{b.items:,} {b.of}" if b.items else "–"
    return f"| {' | '.join([b.what, size(b.file), size(b.unpacked), items, str(b.depth or '–')])} |"


def test_the_docs_have_the_table() -> None:
    page = Path(__file__).parents[2] / "docs/reference/file-formats.md"
    table = next(block for block in page.read_text().split("\n\n") if block[:1] == "|")
    assert table.splitlines()[2:] == list(map(row, bounds.TABLE))
