"""Pickles that mean harm: whatever a CIFAR batch or a .pt file says, nothing is called, imported or brought down."""

from __future__ import annotations

import io
import json
import pickle
import struct
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fedaudit.data.batches import read_pickled_batch
from fedaudit.models.checkpoint import load_checkpoint
from fedaudit.utils.errors import BadInput
from tests.data.data_cases import one_line, random_images

DTYPE = b"cnumpy\ndtype\nU\x02u1K\x00K\x01\x87R(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
SHELL = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85U\x01b\x87R"


def python2_batch(x: np.ndarray[Any, Any], y: list[int]) -> bytes:
    """Return what Python 2's cPickle writes of one of CIFAR's dictionaries: protocol 2, byte strings."""

    def text(value: bytes) -> bytes:
        return b"U" + bytes([len(value)]) + value

    labels = b"".join(b"K" + bytes([label]) for label in y)
    names = b"".join(text(f"picture_{i}.png".encode()) + b"r" + struct.pack("<I", 300 + i) for i in range(len(y)))
    shape = b"J" + struct.pack("<i", len(x)) + b"M" + struct.pack("<H", 3072) + b"\x86"
    data = SHELL + b"q\x09(K\x01" + shape + DTYPE + b"\x89T" + struct.pack("<i", x.nbytes) + x.tobytes() + b"tb"
    return (
        b"\x80\x02}q\x01(" + text(b"batch_label") + b"q\x02" + text(b"training batch 1 of 5") + b"q\x03"
        + text(b"labels") + b"q\x04]q\x05(" + labels + b"e" + text(b"data") + b"q\x06" + data
        + text(b"filenames") + b"]q\x0a(" + names + b"eu."
    )  # fmt: skip


def test_a_batch_as_python_2_wrote_it(tmp_path: Path) -> None:
    x, y = random_images(4, 3072), [3, 9, 0, 3]
    whole = python2_batch(x, y)
    (tmp_path / "b").write_bytes(whole)
    found = read_pickled_batch(tmp_path / "b")
    theirs = pickle.loads(whole, encoding="latin1")  # the standard library's reader is the oracle
    assert list(found) == list(theirs) == ["batch_label", "labels", "data", "filenames"]
    assert np.array_equal(found.pop("data"), theirs.pop("data"))
    assert found == theirs


@pytest.mark.parametrize("protocol", [2, 3, 4])
@pytest.mark.parametrize("code", ["|b1", "<i2", ">i4", "<u8", ">f2", "<f4", ">f8"])
def test_arrays_of_numbers_come_back(code: str, protocol: int, tmp_path: Path) -> None:
    values = (np.arange(24) % 2 if code == "|b1" else 5 * np.arange(24) + 200).astype(code)
    for array in (values.reshape(2, 3, 4), np.asfortranarray(values.reshape(4, 6)), values[:1]):
        (tmp_path / "b").write_bytes(pickle.dumps({"a": array, "n": [1, 2.5, -(2**40)]}, protocol=protocol))
        found = read_pickled_batch(tmp_path / "b")
        assert found["a"].dtype == array.dtype
        assert np.array_equal(found["a"], array)
        assert found["n"] == [1, 2.5, -(2**40)]


POINTERS = struct.pack("<2Q", 0x4141414141414141, 8)
OBJECTS = b"cnumpy\nndarray\n(K\x01\x85cnumpy\ndtype\nU\x02O8K\x00K\x01\x87RC\x10" + POINTERS + b"tR"
STATE = b"(K\x01K\x02\x85cnumpy\ndtype\nU\x02O8K\x00K\x01\x87R\x89U\x10" + POINTERS + b"tb"
BAD_ORDER = DTYPE.replace(b"U\x01|", b"U\x01^")
FIELDS = DTYPE.replace(b"NNN", b"NU\x01aN")
SIZED = DTYPE.replace(b"J\xff\xff\xff\xffJ", b"J\x00\x10\x00\x00J", 1)


def array_of(dtype: bytes, shape: bytes, raw: bytes = b"ab") -> bytes:
    return SHELL + b"(K\x01" + shape + dtype + b"\x89U" + bytes([len(raw)]) + raw + b"tb"


HARM = {
    "object array over chosen pointers": OBJECTS,
    "state of an object array": SHELL + STATE,
    "ndarray called": b"cnumpy\nndarray\nK\x02\x85\x85R",
    "no such byte order": array_of(BAD_ORDER, b"K\x02\x85"),
    "structured dtype": array_of(FIELDS, b"K\x02\x85"),
    "crafted item size": array_of(SIZED, b"K\x02\x85"),
    "subarray dtype": array_of(DTYPE.replace(b"U\x02u1", b"U\x0a(1000,1)u1"), b"K\x02\x85"),
    "more than there is": array_of(DTYPE, b"J\xff\xff\xff\x7f\x85"),
    "negative side": array_of(DTYPE, b"J\xff\xff\xff\xffJ\xfe\xff\xff\xff\x86"),
    "too many axes": array_of(DTYPE, b"(" + b"K\x01" * 40 + b"K\x02t"),
    "dtype of texts": array_of(DTYPE.replace(b"u1", b"S1"), b"K\x02\x85"),
    "complex numbers": array_of(DTYPE.replace(b"u1", b"c8"), b"K\x01\x85", b"abcdefgh"),
    "array left hollow": SHELL,
    "state on a function": b"cnumpy.core.multiarray\n_reconstruct\n}b",
    "state on a class": b"cnumpy\nndarray\nN}U\x05shapeK\x01s\x86b",
    "deep tuple as a key": b"}" + b")" + b"\x85" * 50_000 + b"K\x01s",
    "deep list": b"]" * 50_000 + b"a" * 49_999,
    "endless list": b"](" + b"\x88" * 2_000_000 + b"e",
    "doubled lists": b"]" + b"".join(b"q\x00](h\x00h\x00e" for _ in range(60)),
    "memo at the end of the world": b"Nr\xff\xff\xff\xff" + b"q\x00" * 3 + b"j\xfe\xff\xff\xff",
    "text of 4 GB": b"X\xff\xff\xff\xff",
    "bytes of 2^63": b"\x8e\xff\xff\xff\xff\xff\xff\xff\x7f",
    "integer of 2 GB": b"\x8b\xff\xff\xff\x7f",
    "extension registry": b"\x82\x01",
    "persistent object": b"N\x51",
    "new object": b"cnumpy\nndarray\n)\x81",
    "set of all": b"\x8f(K\x01\x90",
}


# Read every batch of a list in one process, and see what that does to it.
READ_ALL = """
import json, resource, sys
from pathlib import Path
from fedaudit.data import load_dataset
from fedaudit.data.batches import read_pickled_batch
from fedaudit.utils.errors import BadInput

folder, told = Path(sys.argv[1]), {}
paths = sorted(folder.glob("batches/*"))
read_pickled_batch(folder / "whole")
load_dataset("cifar10", data_dir=folder)
modules, before = set(sys.modules), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
def refusal(call):
    try:
        call()
    except BadInput as error:
        return str(error)
for path in paths:
    print(path.name, file=sys.stderr)  # the last line tells which one ended the process
    told[path.name] = refusal(lambda: read_pickled_batch(path))
    if path.name.startswith("data-"):
        (folder / "cifar-10-batches-py/test_batch").write_bytes(path.read_bytes())
        refusal(lambda: load_dataset("cifar10", data_dir=folder))
grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / (1 << 10)
print(json.dumps({"told": told, "grown": grown, "modules": sorted(set(sys.modules) - modules)}))
"""


def read_all(folder: Path, batches: dict[str, bytes]) -> dict[str, str | None]:
    """Read all of ``batches`` in one process of its own; return what each was refused with, if it was."""
    x, y = random_images(2, 3072), [0, 1]
    for name, content in batches.items():
        (folder / "batches").mkdir(exist_ok=True)
        (folder / "batches" / name).write_bytes(content)
    (folder / "cifar-10-batches-py").mkdir()
    for name in (
        "whole",
        *(f"cifar-10-batches-py/{n}" for n in ("test_batch", *(f"data_batch_{i}" for i in range(1, 6)))),
    ):
        (folder / name).write_bytes(python2_batch(x, y))
    command = [sys.executable, "-c", READ_ALL, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=200)
    assert done.returncode == 0, (done.returncode, done.stderr[-2000:])
    found = json.loads(done.stdout)
    assert found["modules"] == []
    assert found["grown"] < 300  # MiB
    told: dict[str, str | None] = found["told"]
    assert list(told) == sorted(batches)
    for name, refused in told.items():
        assert refused is None or refused.startswith(f"cannot read {folder / 'batches' / name}: "), refused
        assert refused is None or ("\n" not in refused and len(refused) < 400), refused
    return told


@pytest.mark.slow
def test_what_means_harm_is_refused_in_one_line(tmp_path: Path) -> None:
    told = read_all(tmp_path, {name: b"\x80\x02}U\x04data" + program + b"s." for name, program in HARM.items()})
    assert [name for name, refused in told.items() if refused is None] == []


@pytest.mark.slow
def test_mutated_batches_bring_nothing_down(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    x, y = random_images(1, 3072), [7]
    seeds = [python2_batch(x, y)]
    seeds += [pickle.dumps({b"data": x[:, :9], b"labels": y, "n": ["a", 1.5]}, protocol=p) for p in (2, 3, 4)]
    snippets = [b"(", b"t", b"R", b"b", b"}", b"]", b"e", b"u", b"s", b"h\x09", b"\x85", SHELL, DTYPE, OBJECTS, STATE]
    mutated = {}
    for i in range(400):
        whole = bytearray(seeds[i % 4])
        head = 180 if i % 4 == 0 else len(whole)  # before the pixels, and behind them, stands what steers
        for _ in range(int(rng.integers(1, 5))):
            at = int(rng.integers(0, min(head, len(whole)))) if rng.random() < 0.8 else int(rng.integers(0, len(whole)))
            match int(rng.integers(0, 5)):
                case 0:
                    whole[at] = int(rng.integers(0, 256))
                case 1:
                    whole[at] ^= 1 << int(rng.integers(0, 8))
                case 2:
                    del whole[at : at + int(rng.integers(1, 20))]
                case 3:
                    whole[at:at] = snippets[int(rng.integers(0, len(snippets)))]
                case _:
                    other = seeds[int(rng.integers(0, 4))]
                    start = int(rng.integers(0, len(other)))
                    whole[at:at] = other[start : start + int(rng.integers(1, 60))]
        mutated[f"{'data' if i % 10 == 0 else 'some'}-{i:04d}"] = bytes(whole)
    refused = [name for name, why in read_all(tmp_path, mutated).items() if why is not None]
    assert 200 < len(refused) < 400  # most, and some still are batches


def pt_with(program: bytes) -> bytes:
    """Return a .pt file whose pickle is ``program``."""
    whole, changed = io.BytesIO(), io.BytesIO()
    torch.save({"weight": torch.ones(1)}, whole)
    with zipfile.ZipFile(whole) as source, zipfile.ZipFile(changed, "w") as target:
        for name in source.namelist():
            target.writestr(name, program if name.endswith("data.pkl") else source.read(name))
    return changed.getvalue()


DEEP = b"\x80\x02})" + b"\x85" * 50_000 + b"K\x01s."  # a tuple as a key, whose hash exhausts the stack


@pytest.mark.parametrize("content", [pt_with(DEEP), DEEP, pt_with(b"\x80\x02}" + b"0" * 9)], ids=["zip", "old", "pop"])
def test_a_pt_file_cannot_end_the_process(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "m.pt").write_bytes(content)
    with pytest.raises(BadInput) as error:
        load_checkpoint(nn.Linear(1, 1), tmp_path / "m.pt")
    one_line(error, "m.pt")


def test_a_damaged_pt_file_is_one_line(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    torch.save(nn.Linear(3, 2).state_dict(), tmp_path / "m.pt")
    whole = (tmp_path / "m.pt").read_bytes()
    refused = 0
    for _ in range(300):
        changed = bytearray(whole)
        for at in rng.integers(0, len(whole), 8):
            changed[int(at)] ^= int(rng.integers(1, 256))
        (tmp_path / "m.pt").write_bytes(bytes(changed))
        try:
            load_checkpoint(nn.Linear(3, 2), tmp_path / "m.pt")
        except BadInput:  # nothing else
            refused += 1
    assert refused > 100
