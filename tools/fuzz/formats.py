"""File formats: whole files that are small, and who reads them."""

from __future__ import annotations

import contextlib
import gzip
import io
import pickle
import sqlite3
import struct
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import nn

from fedaudit.attacks import ImageFinding
from fedaudit.attacks.findings import Finding
from fedaudit.data.batches import read_pickled_batch
from fedaudit.data.files import read_arrays, read_csv, read_idx, read_mat, read_npz, read_parquet
from fedaudit.data.medical import read_example
from fedaudit.guard.page import page
from fedaudit.guard.rounds import CheckRecord, SiteRound, read_site
from fedaudit.models import Generator, GeneratorSpec
from fedaudit.models.checkpoint import load_checkpoint, read_torch_file, save_checkpoint
from fedaudit.report.statement import read_statement, statement, write_statement
from fedaudit.results import AuditResult
from fedaudit.utils.image_bytes import decode, dimensions
from fedaudit_catalogue.generators import TrainedGenerator
from fedaudit_lab.studies.analysis import analyse
from fedaudit_lab.studies.spec import expand, study_from
from fedaudit_lab.studies.store import FILE, Store
from fedaudit_trees.model import read_booster
from tests.data.medical_cases import dicom, wfdb
from tests.trees.tree_cases import model as boosted_model
from tests.trees.tree_cases import stump

PIXELS = np.arange(2 * 3 * 16 * 16, dtype=np.uint8).reshape(2, 16, 16, 3)

SITE_LINES = b"".join(
    SiteRound(
        time="2026-01-01T00:00:00+00:00",
        job="j",
        site="s",
        done=done,
        checks={"invg": CheckRecord(outcome="alarm", text="recovered")},
        trained=1.0,
        spent=0.1,
        slope=0.5,
        epsilon=1.0,
        target=8.0,
    )
    .model_dump_json()
    .encode()
    + b"\n"
    for done in ("left", "refused")
)


@dataclass(frozen=True)
class Format:
    """Whole files, words that mean something in them, the name of such a file, and its reader."""

    seeds: list[bytes]
    name: str
    read: Callable[[Path], Any]
    words: tuple[bytes, ...] = ()


def picture(kind: str, mode: str = "RGB", **options: Any) -> bytes:
    out = io.BytesIO()
    Image.fromarray(PIXELS[0]).convert(mode).save(out, kind, **options)
    return out.getvalue()


def _npz(**arrays: Any) -> bytes:
    out = io.BytesIO()
    np.savez(out, **arrays)
    packed = io.BytesIO()
    np.savez_compressed(packed, **arrays)
    return out.getvalue() if len(arrays) > 1 else packed.getvalue()


def _npy(array: Any, stored: int = zipfile.ZIP_STORED, header: bytes | None = None) -> bytes:
    """Return an npz whose npy's checksum is right, whatever its header says."""
    body = io.BytesIO()
    np.save(body, array)
    content = body.getvalue() if header is None else header + body.getvalue()[128:]
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", stored) as archive:
        archive.writestr("x.npy", content)
    return out.getvalue()


def _parquet(**columns: Any) -> bytes:
    import pyarrow
    import pyarrow.parquet

    out = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table(columns), out)
    return out.getvalue()


def _mat(**arrays: Any) -> list[bytes]:
    import scipy.io

    made = []
    for packed in (False, True):
        out = io.BytesIO()
        scipy.io.savemat(out, arrays, do_compression=packed)
        made.append(out.getvalue())
    return made


def _written(folder: Path, name: str, write: Callable[[Path], Any]) -> bytes:
    write(folder / name)
    return (folder / name).read_bytes()


def _store(folder: Path) -> bytes:
    from tests.lab.test_studies import TINY

    study = study_from(TINY, "tiny")
    store = Store(folder)
    about = {"name": study.name, "scale": "smoke", "study": study.model_dump(mode="json"), "overrides": []}
    trials = expand(study, "smoke")
    store.plan(about, trials)
    update = {"federation": "f", "round": 0, "client": 0, "reason": None, "seconds": 1.0, "images": [{"psnr": 20.0}]}
    store.finish(trials[0].key, {"updates": [update], "courses": []}, 1.0, {}, "now")
    store.close()
    database = sqlite3.connect(folder / FILE)
    database.execute("pragma journal_mode=delete")
    database.close()
    return (folder / FILE).read_bytes()


def _read_store(path: Path) -> None:
    store = Store(path.parent)
    try:
        about = store.about()
        if "study" in about:
            analyse(study_from(about["study"], "the store"), about["scale"], store.rows())
        store.scenarios()
    finally:
        store.close()


def _read_pictures(path: Path) -> None:
    data = path.read_bytes()
    for mode in ("RGB", "L", None):
        decode(data, str(path), mode)
    dimensions(data, str(path))


def _result(folder: Path) -> bytes:
    from tests.report.report_cases import empty

    return empty(folder).model_dump_json().encode()


def _statement(folder: Path) -> bytes:
    write_statement(statement([]), folder)
    return (folder / "statement.json").read_bytes()


def formats(folder: Path) -> dict[str, Format]:
    """Return every format by its name; ``folder`` is for what must be written to files."""
    model = nn.Linear(3, 2)
    tensors = io.BytesIO()
    torch.save({"state_dict": model.state_dict(), "n": [1, (2.5, "a")]}, tensors)
    old = io.BytesIO()
    torch.save(model.state_dict(), old, _use_new_zipfile_serialization=False)
    batch = {b"data": np.zeros((2, 9), np.uint8), b"labels": [3, 4], b"n": ["a", 1.5]}
    idx = b"\x00\x00\x08\x03" + struct.pack(">3I", 2, 3, 4) + bytes(24)
    finding = ImageFinding(attack="invg", images=torch.rand(1, 1, 4, 4), labels=torch.tensor([1]), label_source="given")
    generator = TrainedGenerator(Generator(GeneratorSpec((1, 8, 8), 4, 4)), "digits", "x", torch.arange(3))
    made = {
        "pickle": Format(
            [pickle.dumps(batch, protocol=p) for p in (2, 3, 4)],
            "data_batch_1",
            read_pickled_batch,
            (
                b"(",
                b"t",
                b"R",
                b"b",
                b"}",
                b"]",
                b"e",
                b"u",
                b"s",
                b"h\x01",
                b"\x85",
                b"cos\nsystem\n",
                b"c__builtin__\neval\n",
            ),
        ),
        "idx": Format([idx], "a", read_idx),
        "idx.gz": Format([gzip.compress(idx)], "a.gz", read_idx),
        "npz": Format(
            [_npy(np.arange(6.0)), _npy(np.arange(6.0), zipfile.ZIP_DEFLATED), _npz(x=PIXELS[0, :2], y=np.arange(3))],
            "a.npz",
            lambda path: read_npz(path, "x"),
            (b"'|O'", b"(99999999999,)", b"(-1,)", b"True", b"'<U9'", b"((((("),
        ),
        "mat": Format(_mat(X=PIXELS, y=np.arange(2.0)), "a.mat", lambda path: read_mat(path, "X", "y")),
        "csv": Format([b'1,"2",3\n4,5,6\n'], "a.csv", read_csv, (b'"', b",", b"\n", b"\r", b"\x00", b"9" * 5000)),
        "picture": Format(
            [
                picture("PNG"),
                picture("PNG", "P"),
                picture("PNG", "LA"),
                picture("JPEG"),
                picture("BMP"),
                picture("PPM"),
                picture("TIFF"),
                picture("TIFF", compression="tiff_lzw"),
                picture("WEBP"),
                picture("WEBP", lossless=True),
            ],
            "a.png",
            _read_pictures,
            (b"IHDR", b"IDAT", b"zTXt", b"iCCP", b"acTL", b"EXIF", b"\xff\xda", b"\xff\xc0", b"II*\x00", b"%!PS-Adobe"),
        ),
        "wfdb": Format(
            [wfdb(folder, np.arange(40).reshape(2, 20), code).read_bytes() for code in (16, 212, 24)],
            "r.hea",
            _read_record,
            (b"r.dat", b"../x", b"/", b"212", b"0", b"-1", b"1e999", b"nan", b"99999999999", b"x2", b":3", b"+9", b"#"),
        ),
        "own-arrays": Format(
            [_written(folder, "d.safetensors", lambda path: save_file({"x": torch.arange(6.0)}, path))],
            "d.safetensors",
            lambda path: read_arrays(path, "x"),
            (b'"dtype"', b'"shape"', b'"data_offsets"', b"[6]", b"[0,24]", b"F32"),
        ),
        "safetensors": Format(
            [_written(folder, "m.safetensors", lambda path: save_checkpoint(model, path))],
            "m.safetensors",
            lambda path: load_checkpoint(nn.Linear(3, 2), path),
            (b'"F64"', b'"BOOL"', b'"F8_E4M3"', b"[0,99999999]", b"__metadata__", b"-1", b"{", b"}"),
        ),
        "pt": Format(
            [tensors.getvalue(), old.getvalue()],
            "m.pt",
            lambda path: load_checkpoint(nn.Linear(3, 2), path),
            (b"cos\nsystem\n", b"\x85", b"(", b"t", b"R", b"h\x00", b"cbuiltins\nbytearray\n", b"J\xff\xff\xff\x7f"),
        ),
        "kept": Format([tensors.getvalue()], "f.simulation", _read_kept),
        "finding": Format(
            [_written(folder, "f.safetensors", lambda path: finding.save(path, "k"))],
            "f.safetensors",
            lambda path: Finding.load(path, "k"),
        ),
        "generator": Format(
            [_written(folder, "g.safetensors", generator.save)],
            "g.safetensors",
            TrainedGenerator.load,
            (b"-1", b"999999", b"null"),
        ),
        "booster": Format(
            [boosted_model(stump(0, 0.5, (1.0, 1.5), (-2.0, 1.0)), stump(1, 0.0, (0.5, 1.0), (0.5, 2.0)))],
            "trees.json",
            lambda path: read_booster(path.read_bytes(), "trees"),
            (b"-1", b"0", b"1e999", b"null", b"[" * 300, b"99999999999999999999", b'"base_score"', b"NaN", b"{}"),
        ),
        "store": Format([_store(folder / "store")], FILE, _read_store),
        "site": Format(
            [SITE_LINES],
            "guard.jsonl",
            lambda path: page(rounds) if (rounds := read_site(path.parent).rounds) else None,
            (b"null", b"\n", b"1e999", b"-1", b"{}", b"NaN", b'"\\ud800"', b'"time":""', b"[" * 300),
        ),
        "statement": Format(
            [_statement(folder)],
            "statement.json",
            lambda path: read_statement(path.parent),
            (b"null", b"[" * 300, b"1e999", b"-1", b"{}", b'"digest":""'),
        ),
        "result": Format(
            [_result(folder)],
            "results.json",
            AuditResult.load,
            (b"null", b"[" * 300, b"1e999", b'"\\ud800"', b"-1", b"{}", b"NaN"),
        ),
    }
    with contextlib.suppress(ImportError):
        made["parquet"] = Format(
            [_parquet(png=[b"a", b"b"], label=[1, 2]), _parquet(label=[1.5, None], name=["a", "b"])],
            "a.parquet",
            read_parquet,
        )
    with contextlib.suppress(ImportError):
        whole = [_nifti("Nifti1Image"), _nifti("Nifti2Image")]
        words = (b"n+1\x00", b"\x7f\x7f", b"\xff\xff", b"\x00\x00\x80\x7f", b"\x00\x01", b"\x20")
        made["nifti"] = Format(whole, "a.nii", read_example, words)
        made["nifti.gz"] = Format([gzip.compress(data) for data in whole], "a.nii.gz", read_example)
    with contextlib.suppress(ImportError):
        options: dict[str, Any] = {
            "RescaleSlope": "2",
            "RescaleIntercept": "-5",
            "WindowCenter": "9",
            "WindowWidth": "4",
        }
        scans = [dicom(folder / "a.dcm", PIXELS[0, ..., 0], **options), dicom(folder / "b.dcm", PIXELS[..., 0])]
        made["dicom"] = Format(
            [path.read_bytes() for path in scans],
            "a.dcm",
            read_example,
            (
                *(b"MONOCHROME1", b"RGB", b"1.2.840.10008.1.2.5", b"1.2.840.10008.1.2.4.90", b"SQ", b"OB", b"1e999"),
                *(b"nan", b"\xff\xff\xff\xff", b"\xfe\xff\x00\xe0", b"\x28\x00\x02\x01"),
            ),
        )
    return made


def _nifti(kind: str) -> bytes:
    import nibabel

    return bytes(getattr(nibabel, kind)(PIXELS[..., 0].astype(np.int16), np.eye(4)).to_bytes())


def _read_record(path: Path) -> None:
    """Read a header beside signals that are whole."""
    (path.parent / "r.dat").write_bytes(bytes(range(240)))
    read_example(path)


def _read_kept(path: Path) -> None:
    with contextlib.suppress(OSError, ValueError, UnpicklingError):  # what its one caller takes for "none"
        read_torch_file(path, whole=True)
