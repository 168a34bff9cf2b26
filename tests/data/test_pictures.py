"""Pictures that mean harm: other formats start no program, and pixels are counted before they are decoded."""

from __future__ import annotations

import io
import os
import struct
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import EpsImagePlugin, Image

import fedaudit
from fedaudit.data import load_dataset
from fedaudit.data.images import IMAGE_SUFFIXES, read_image
from fedaudit.report.page import render_report
from fedaudit.utils.errors import BadInput
from fedaudit.utils.image_bytes import FORMATS, MAX_PIXELS, decode
from tests.data.data_cases import one_line, random_images
from tests.report.report_cases import sample

EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\n(mark) print\nshowpage\n%%EOF\n"


def encoded(format: str, pixels: np.ndarray | None = None) -> bytes:
    stream = io.BytesIO()
    Image.fromarray(random_images(1, 9, 7, 3)[0] if pixels is None else pixels).save(stream, format)
    return stream.getvalue()


def png_that_says(width: int, height: int) -> bytes:
    """Return a PNG of a few bytes whose header announces so many pixels, each chunk with its right checksum."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(bytes(99))) + chunk(b"IEND", b"")
    )


@pytest.fixture
def mark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put a Ghostscript on the path that leaves a mark when it is started, and see that Pillow would start it."""
    (tmp_path / "bin").mkdir()
    gs, left = tmp_path / "bin/gs", tmp_path / "mark"
    gs.write_text(f"#!{sys.executable}\nopen({str(left)!r}, 'w')\n")
    gs.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(EpsImagePlugin, "gs_binary", None, raising=False)  # Pillow 10.0 asks every time
    with pytest.raises((OSError, SyntaxError)):
        Image.open(io.BytesIO(EPS)).load()
    assert left.exists()
    left.unlink()
    return left


def folder_of(content: bytes, root: Path, suffix: str = ".png") -> Path:
    for split in ("train", "test"):
        for name in "ab":
            (root / split / name).mkdir(parents=True)
            (root / split / name / f"0{suffix}").write_bytes(encoded("PNG"))
    (root / f"test/b/0{suffix}").write_bytes(content)
    return root


@pytest.mark.skipif(os.name != "posix", reason="a script as a program")
@pytest.mark.parametrize("suffix", [s for s in IMAGE_SUFFIXES if s in (".png", ".jpg", ".tif")])
def test_a_picture_starts_no_program(suffix: str, mark: Path, tmp_path: Path) -> None:
    with pytest.raises(BadInput) as error:
        load_dataset("image-folder", data_dir=folder_of(EPS, tmp_path, suffix))
    one_line(error, f"0{suffix}", "none of the formats PNG, JPEG")
    assert "BytesIO" not in str(error.value)
    assert not mark.exists()


@pytest.mark.skipif(os.name != "posix", reason="a script as a program")
@pytest.mark.parametrize("cell", [EPS, encoded("GIF"), encoded("DDS"), b"", None, "text"])
def test_a_cell_of_a_table_starts_no_program(cell: object, mark: Path, tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    import pyarrow.parquet

    (tmp_path / "gtsrb").mkdir()
    good = encoded("PNG", random_images(1, 32, 32, 3)[0])
    for split, cells in (("train", [good]), ("test", [cell])):
        table = arrow.table({"png": cells, "label": [0]})
        pyarrow.parquet.write_table(table, tmp_path / f"gtsrb/{split}.parquet")
    with pytest.raises(BadInput) as error:
        load_dataset("gtsrb", data_dir=tmp_path)
    one_line(error, "test.parquet, row 0")
    table = arrow.table({"image": [good, cell], "name": ["one", None]})
    (tmp_path / "natural_photos").mkdir()
    pyarrow.parquet.write_table(table, tmp_path / "natural_photos/photos.parquet")
    with pytest.raises(BadInput) as error:
        load_dataset("natural-photos", data_dir=tmp_path)
    one_line(error, "photos.parquet, None")
    assert not mark.exists()


@pytest.mark.skipif(os.name != "posix", reason="a script as a program")
def test_a_report_starts_no_program(mark: Path, tmp_path: Path) -> None:
    result = sample(tmp_path / "a")
    victim = tmp_path / "a" / result.findings[0].images[0].true_image
    for data in (EPS + bytes(30_000), png_that_says(9000, 9000), png_that_says(9000, 9000) + bytes(30_000)):
        victim.write_bytes(data)
        with pytest.raises(BadInput, match="is no whole PNG"):
            render_report(result, tmp_path / "a")
    assert not mark.exists()


@pytest.mark.parametrize("format", FORMATS)
def test_the_formats_of_data_sets_are_read(format: str, tmp_path: Path) -> None:
    pixels = random_images(1, 9, 7, 3)[0]
    found = decode(encoded(format, pixels), "it")
    assert found.shape == (9, 7, 3)
    if format not in ("JPEG", "WEBP"):  # these two lose some
        assert np.array_equal(found, pixels)


@pytest.mark.parametrize("sides", [(8193, 8192), (13000, 13000), (2**31 - 1, 2**31 - 1)])
def test_pixels_are_counted_before_they_are_decoded(
    sides: tuple[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    def never(*_: object) -> None:
        raise AssertionError("pixels were decoded")

    assert sides[0] * sides[1] > MAX_PIXELS
    (tmp_path / "huge.png").write_bytes(png_that_says(*sides))
    monkeypatch.setattr(Image.Image, "convert", never)
    with pytest.raises(BadInput) as error:
        read_image(tmp_path / "huge.png")
    one_line(error, "huge.png", f"more than {MAX_PIXELS:,}", "make it smaller")
    assert not recwarn.list


def test_mutated_pictures_are_one_line() -> None:
    rng = np.random.default_rng(0)
    wholes = [encoded(format) for format in FORMATS]
    read = 0
    for i in range(1200):
        changed = bytearray(wholes[i % len(wholes)])
        for at in rng.integers(0, min(len(changed), 120), 3):
            changed[int(at)] = int(rng.integers(0, 256))
        try:
            read += decode(bytes(changed), "it").dtype == np.uint8
        except BadInput:  # nothing else
            continue
    assert 100 < read < 1100


def test_pillow_reads_in_one_place() -> None:
    source = Path(fedaudit.__file__).parent
    assert [p.name for p in source.rglob("*.py") if "Image.open(" in p.read_text()] == ["image_bytes.py"]
