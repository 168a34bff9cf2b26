"""Image files of more than 8 bits a value, images of any number of bands: nothing is clipped or taken for opacity."""

import io
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
import tifffile  # comes with scikit-image
import torch
from PIL import Image
from torch import nn

import fedaudit
from fedaudit import BadInput
from fedaudit.modalities import save_png
from fedaudit.utils.image_bytes import decode

RAMP = np.linspace(0, 1, 16 * 16).reshape(16, 16)


def folder(path: Path, values: np.ndarray, suffix: str = "png") -> Path:
    for split in ("train", "test"):
        for label in ("a", "b"):
            (path / split / label).mkdir(parents=True)
            Image.fromarray(values).save(path / split / label / f"0.{suffix}")
    return path


def loaded(path: Path, white: float | None = None) -> np.ndarray:
    inputs = fedaudit.load_dataset("image-folder", data_dir=path, white=white).train.inputs
    assert inputs.shape == (2, 3, 16, 16)
    return np.asarray(inputs[0, 1])


@pytest.mark.parametrize(
    ("values", "suffix", "white"),
    [
        ((RAMP * 65535).round().astype(np.uint16), "png", None),
        ((RAMP * 65535).round().astype(np.uint16), "tiff", None),
        ((RAMP * 4095).round().astype(np.uint16), "png", 4095.0),
        (RAMP.astype(np.float32), "tiff", None),
        ((RAMP * 1000).astype(np.float32), "tiff", 1000.0),
        ((RAMP * 4095).astype(np.int32), "tiff", 4095.0),
        ((RAMP * 255).round().astype(np.uint8), "png", None),
    ],
)
def test_a_file_s_depth_or_what_is_said_to_be_white_scales_it(values, suffix, white, tmp_path):
    np.testing.assert_allclose(loaded(folder(tmp_path, values, suffix), white), RAMP, atol=2e-3)


@pytest.mark.parametrize(
    ("values", "white", "words"),
    [
        ((RAMP * 4095).astype(np.uint16), None, "nearly black; say which value is white, data.max_pixel_value: 4095"),
        ((RAMP * 4095).astype(np.uint16), 2000.0, "between 0 and 2000"),
        ((RAMP * 300).astype(np.float32), None, "between 0 and 1"),
        ((RAMP - 0.5).astype(np.float32), None, "between 0 and 1"),
        (np.full((16, 16), np.nan, dtype=np.float32), None, "between 0 and 1"),
    ],
)
def test_what_would_be_clipped_is_refused(values, white, words, tmp_path):
    with pytest.raises(BadInput, match=words):
        loaded(folder(tmp_path, values, "tiff" if values.dtype == np.float32 else "png"), white)


def colours_of_16_bits(suffix: str, bands: int) -> bytes:
    """A ramp of 12 bits in a file of 16, written as the formats' specifications have it."""
    values = np.repeat((RAMP * 4095).astype(np.uint16)[:, :, None], bands, axis=2)
    if suffix == "ppm":
        return b"P6 16 16 65535\n" + values.astype(">u2").tobytes()
    if suffix == "tiff":
        file = io.BytesIO()
        tifffile.imwrite(file, values, photometric="rgb")
        return file.getvalue()
    kind = {2: 4, 3: 2, 4: 6}[bands]
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in values)
    chunks = (
        (b"IHDR", struct.pack(">IIBBBBB", 16, 16, 16, kind, 0, 0, 0)),
        (b"IDAT", zlib.compress(rows)),
        (b"IEND", b""),
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body)) for name, body in chunks
    )


@pytest.mark.parametrize(
    ("suffix", "bands"), [("png", 2), ("png", 3), ("png", 4), ("tiff", 3), ("tiff", 4), ("ppm", 3)]
)
def test_colours_of_16_bits_are_refused_not_read_by_half(suffix, bands, tmp_path):
    where = folder(tmp_path, (RAMP * 255).astype(np.uint8))
    (where / f"train/a/1.{suffix}").write_bytes(colours_of_16_bits(suffix, bands))
    with pytest.raises(BadInput, match=f"1.{suffix}: colours of more than 8 bits a value, .*; scale them to 8 bits"):
        fedaudit.load_dataset("image-folder", data_dir=where, white=4095.0)


def test_a_bmp_of_16_bits_a_pixel_is_read(tmp_path):
    red, green, blue = 31, 63, 31  # of R5G6B5
    values = np.array([[red << 11, green << 5], [blue, 0]], dtype="<u2")
    masks = struct.pack("<III", 0xF800, 0x07E0, 0x001F)
    header = struct.pack("<IiiHHIIiiII", 40, 2, 2, 1, 16, 3, 8, 2835, 2835, 0, 0) + masks
    body = values[::-1].tobytes()  # rows from the bottom, each of four bytes
    file = b"BM" + struct.pack("<IHHI", 14 + len(header) + len(body), 0, 0, 14 + len(header)) + header + body
    read = decode(file, "a.bmp")
    assert read.tolist() == [[[255, 0, 0], [0, 255, 0]], [[0, 0, 255], [0, 0, 0]]]


def test_a_scenario_says_which_value_is_white(tmp_path):
    folder(tmp_path, (RAMP * 4095).astype(np.uint16))
    scenario = {
        "data": {"name": "image-folder", "white": 4095},
        "model": {"name": "mlp"},
        "federations": [{"name": "f", "clients": 1, "examples": 1, "batch_size": 1}],
        "attacks": ["labels"],
    }
    recording = fedaudit.simulate(scenario, data_dir=tmp_path, progress=False)
    assert float(recording.truth.inputs[0, 0].max()) == pytest.approx(1, abs=1e-3)


def test_a_palette_s_numbers_are_no_grey_values():
    colours = Image.fromarray((RAMP[:, :, None] * np.array([255, 0, 100])).astype(np.uint8)).quantize(64)
    pairs = [(colours, i % 2) for i in range(6)]
    inputs = fedaudit.Dataset.from_torch(pairs).train.inputs
    np.testing.assert_allclose(inputs[0].permute(1, 2, 0), np.array(colours.convert("RGB")) / 255, atol=1e-6)


@pytest.mark.parametrize(("bands", "size"), [(2, (17, 8)), (4, (35, 8)), (6, (35, 17)), (13, (35, 35))])
def test_a_picture_shows_every_band_in_grey(bands, size, tmp_path):
    pixels = torch.rand(bands, 8, 8, generator=torch.Generator().manual_seed(0))
    save_png(pixels, tmp_path / "p.png")
    with Image.open(tmp_path / "p.png") as picture:
        assert (picture.mode, picture.size) == ("L", size)
        shown = np.asarray(picture)
    for band in range(bands):
        top, left = band // 4 * 9, band % 4 * 9
        np.testing.assert_allclose(shown[top : top + 8, left : left + 8] / 255, pixels[band], atol=0.5 / 255 + 1e-6)


@pytest.mark.parametrize(
    ("shape", "found"),
    [((9, 9, 13), (13, 9, 9)), ((13, 9, 9), (13, 9, 9)), ((6, 20, 30), (6, 20, 30)), ((20, 30, 6), (6, 20, 30))],
)
def test_bands_stand_first_or_last(shape, found):
    made = fedaudit.Dataset.from_tensors(torch.rand(10, *shape), torch.arange(10) % 2)
    assert made.input_shape == found


def test_bands_that_could_stand_anywhere_are_asked_for():
    with pytest.raises(BadInput, match="channels='first'"):
        fedaudit.Dataset.from_tensors(torch.rand(10, 7, 7, 7), torch.arange(10) % 2)


def test_a_report_says_which_bands_its_pictures_show(tmp_path):
    fedaudit.audit(
        model=nn.Sequential(nn.Conv2d(2, 2, 3), nn.Sigmoid(), nn.Flatten(), nn.Linear(72, 3)),
        data=(torch.rand(20, 2, 8, 8), torch.arange(20) % 3),
        attacks=[{"name": "invg", "iterations": 2}],
        federations=[{"name": "f", "clients": 1, "examples": 1, "batch_size": 1}],
        out=tmp_path / "out",
        progress=False,
    )
    assert "shows all 2 bands" in (tmp_path / "out" / "report.html").read_text(encoding="utf-8")


DARK = (RAMP * 16).round().astype(np.uint8)


@pytest.mark.parametrize(
    ("pixels", "said"),
    [
        (DARK, "values 0 to 0.0627 (16 of 255), nearly black, are scaled to [0, 1]"),
        ((DARK > 8).astype(np.uint8), "values 0 to 0.00392 (1 of 255), nearly black, are scaled to [0, 1]"),
        ((DARK / 255).astype(np.float32), "values 0 to 0.0627 (16 of 255), nearly black, are scaled to [0, 1]"),
        (DARK.astype(np.int16), "values 0 to 16 use a small part of 0 to 4095"),
        (DARK.astype(np.float32), "lie in [0, 16]"),
        ((RAMP * 255).astype(np.float64), "lie in [0, 255]"),
        (RAMP * 2 - 1, "lie in [-1, 1]"),
    ],
)
@pytest.mark.parametrize("kind", ["image", "volume"])
def test_arrays_that_use_a_part_of_their_range_are_asked_about_or_scaled_with_a_word(pixels, said, kind):
    shape = (8, 1, 16, 16) if kind == "image" else (8, 4, 16, 16)
    inputs, targets = torch.from_numpy(np.broadcast_to(pixels, shape).copy()), torch.arange(8) % 2
    beyond = pixels.min() < 0 or (pixels.dtype.kind == "f" and pixels.max() > 1)
    if "nearly black" in said or (kind == "volume" and beyond):
        made = fedaudit.Dataset.from_tensors(inputs, targets, kind=kind)
        assert ("are scaled to [0, 1]" if beyond else said) in made.summary
        low, high = float(pixels.min()), float(pixels.max())
        shown = made.train.inputs[0].reshape(-1, 16, 16)[0]
        np.testing.assert_allclose(shown, (pixels - low) / (high - low), atol=1e-6)
        return
    with pytest.raises(BadInput) as caught:
        fedaudit.Dataset.from_tensors(inputs, targets, kind=kind)
    assert said in str(caught.value)


def test_values_of_their_whole_range_are_scaled_as_ever():
    targets = torch.arange(8) % 2
    deep, dim = (RAMP * 4095).astype(np.int16), (RAMP * 70).astype(np.uint8)
    for values, most in ((DARK > 8, 1.0), (deep, 1.0), (dim, 70 / 255)):
        made = fedaudit.Dataset.from_tensors(np.broadcast_to(values, (8, 16, 16)), targets, kind="image")
        assert float(made.train.inputs.max()) == pytest.approx(most)
    assert not fedaudit.Dataset.from_tensors(np.zeros((8, 16, 16), np.uint8), targets).train.inputs.any()


@pytest.mark.parametrize("kind", ["image-folder", "scan-folder"])
@pytest.mark.parametrize(("values", "white"), [(DARK, 16.0), ((DARK > 8).astype(np.uint8), 1.0)])
def test_files_of_8_bits_that_are_dark_ask_for_white_too(kind, values, white, tmp_path):
    where = folder(tmp_path, values)
    with pytest.raises(BadInput, match=r"data\.max_pixel_value"):
        fedaudit.load_dataset(kind, data_dir=where)
    inputs = fedaudit.load_dataset(kind, data_dir=where, white=white).train.inputs
    np.testing.assert_allclose(inputs[0, 0], values / white, atol=1e-6)
    with pytest.raises(BadInput, match=r"n.t .*between 0 and"):
        fedaudit.load_dataset(kind, data_dir=where, white=white / 2)


@pytest.mark.parametrize("most", [16 / 255, 1.0])
def test_a_recording_of_dark_inputs_is_read_in_their_own_range(most, tmp_path):
    net = nn.Sequential(nn.Flatten(), nn.Linear(256, 2))
    inputs = torch.rand(4, 1, 16, 16, generator=torch.Generator().manual_seed(0)) * most
    inputs[0, 0, 0, :2] = torch.tensor([0.0, most])
    with fedaudit.Recorder(tmp_path) as recorder, recorder.round(net.state_dict()):
        optimiser = torch.optim.SGD(net.parameters(), lr=0.1)
        with recorder.capture() as seen:
            nn.functional.cross_entropy(net(inputs), torch.tensor([0, 1, 0, 1])).backward()
            optimiser.step()
        recorder.update("a", net.state_dict(), seen)
    transcript = fedaudit.Transcript.load(tmp_path, net)
    black, white = (bound.flatten()[0] for bound in transcript.task_info.pixel_range(inputs))
    assert (float(black), float(white)) == pytest.approx((0, most), abs=1e-6)
    assert ("estimated from their range" in " ".join(transcript.notes)) is (most < 1)
