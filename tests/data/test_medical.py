"""NIfTI, DICOM, WFDB and arrays: what they say is read, against their libraries and against each other."""

from __future__ import annotations

import gzip
import os
import struct
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedaudit.data.medical import Said, read_example
from fedaudit.utils import bounds
from fedaudit.utils.errors import BadInput, MissingData
from tests.data.data_cases import one_line
from tests.data.medical_cases import AXIAL, Array, dicom, series, wfdb

RNG = np.random.default_rng(11)
VOLUME = RNG.integers(0, 4096, (5, 6, 4)).astype(np.uint16)  # (D, H, W)


def package(name: str) -> Any:
    return pytest.importorskip(name, reason=f"no {name}: pip install 'PATH_OF_THE_CLONE[medical]'")


def refused(path: Path, *parts: str) -> None:
    with pytest.raises(BadInput) as error:
        read_example(path)
    one_line(error, *parts)


# --- NIfTI ---------------------------------------------------------------------------------------------------------


def nifti(path: Path, array: Array, affine: Array | None = None, kind: str = "Nifti1Image", **header: Any) -> Path:
    image = getattr(package("nibabel"), kind)(array, np.diag([-1.0, -1, 1, 1]) if affine is None else affine)
    for name, value in header.items():
        image.header[name] = value
    image.to_filename(path)
    return path


@pytest.mark.parametrize("name", ["a.nii", "a.nii.gz"])
@pytest.mark.parametrize("kind", ["Nifti1Image", "Nifti2Image"])
def test_nifti_is_in_one_orientation(name: str, kind: str, tmp_path: Path) -> None:
    """A volume that is stored in any order of axes and directions is the same: head, back and left are at the ends."""
    lps = np.moveaxis(VOLUME, (0, 1, 2), (2, 1, 0))  # x to the left, y to the back, z to the head
    for order, signs in (((0, 1, 2), (1, 1, 1)), ((2, 0, 1), (-1, 1, -1)), ((1, 2, 0), (-1, -1, 1))):
        stored = lps.transpose(order)[tuple(slice(None, None, sign) for sign in signs)]
        affine = np.zeros((4, 4))
        for axis, (to, sign) in enumerate(zip(order, signs, strict=True)):
            affine[to, axis] = sign * (2.0 + to) * (1 if to == 2 else -1)  # nibabel's world is to the right and front
        affine[3, 3] = 1
        array, said = read_example(nifti(tmp_path / name, np.ascontiguousarray(stored), affine, kind))
        assert array.dtype == np.float32
        assert np.array_equal(array, VOLUME)
        assert said == Said(spacing=(4.0, 3.0, 2.0))


def test_nifti_of_a_scanner() -> None:
    """nibabel's own example of a scan in time, against what nibabel makes of it."""
    nibabel = package("nibabel")
    path = Path(nibabel.__file__).parent / "tests/data/example4d.nii.gz"
    if not path.exists():
        pytest.skip("this nibabel comes without its examples")
    array, said = read_example(path)
    ras = nibabel.as_closest_canonical(nibabel.load(path)).get_fdata()  # (x, y, z, time), to the right, front and head
    assert np.allclose(array, ras[::-1, ::-1].transpose(3, 2, 1, 0))
    assert said.spacing == pytest.approx((2.2, 2.0, 2.0), abs=1e-3)


def test_nifti_s_scale_and_axes(tmp_path: Path) -> None:
    image = package("nibabel").Nifti1Image(VOLUME[0].astype(np.int16), np.diag([-1.0, -1, 1, 1]))
    image.header.set_slope_inter(0.5, -10)
    raw = image.to_bytes()
    (tmp_path / "a.nii").write_bytes(raw)
    array, _ = read_example(tmp_path / "a.nii")
    scaled = np.frombuffer(raw[-48:], np.int16).reshape(VOLUME[0].T.shape)  # as it lies in the file, x first
    slope, inter = struct.unpack("<2f", raw[112:120])
    assert array.shape == (1, 4, 6)
    assert np.allclose(array[0], (scaled * slope + inter).reshape(4, 6))
    assert read_example(nifti(tmp_path / "c.nii", np.zeros((3, 4, 5, 1, 2), np.float32)))[0].shape == (2, 5, 4, 3)


@pytest.mark.slow
def test_nifti_refusals(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    colours = np.zeros((2, 2, 2), [("R", "u1"), ("G", "u1"), ("B", "u1")])
    refused(nifti(tmp_path / "a.nii", colours), "a.nii holds colours or complex numbers")
    refused(nifti(tmp_path / "b.nii", np.zeros((2, 2, 2), np.complex64)), "complex")
    refused(nifti(tmp_path / "c.nii", np.zeros((2, 2, 2, 2, 2), np.float32)), "has the shape (2, 2, 2, 2, 2)")
    whole = nifti(tmp_path / "d.nii", VOLUME).read_bytes()
    for name, data in {
        "short": whole[:-20],
        "head": whole[:100],
        "none": b"",
        "huge": whole[:42] + struct.pack("<3h", 32767, 32767, 32767) + whole[48:],
        "negative": whole[:42] + struct.pack("<h", -3) + whole[44:],
        "far": whole[:108] + struct.pack("<f", 1e30) + whole[112:],
    }.items():
        (tmp_path / f"{name}.nii").write_bytes(data)
        refused(tmp_path / f"{name}.nii", f"{name}.nii")
    bomb = gzip.compress(whole + bytes(2**24), 9)
    (tmp_path / "bomb.nii.gz").write_bytes(bomb + gzip.compress(bytes(2**26), 9) * 9)
    refused(tmp_path / "bomb.nii.gz", f"{bounds.NIFTI.unpacked:,} is the most that is read")
    assert capfd.readouterr() == ("", "")


# --- DICOM ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("bits", "kind"), [(8, "u1"), (12, "u2"), (12, "i2"), (16, "u2"), (16, "i2")])
def test_dicom_depths_and_units(bits: int, kind: str, tmp_path: Path) -> None:
    package("pydicom")
    low, high = (-(2 ** (bits - 1)), 2 ** (bits - 1)) if kind[0] == "i" else (0, 2**bits)
    values = RNG.integers(low, high, (7, 5)).astype(kind)
    values[0, :2] = low, high - 1
    stored = values.copy()
    if bits == 12:
        stored = ((values.view("u2") & 0x0FFF) | 0x5000).view(kind)  # an overlay in the bits above
    options = {"BitsStored": bits, "HighBit": bits - 1, "RescaleSlope": "0.5", "RescaleIntercept": "-1024"}
    array, said = read_example(dicom(tmp_path / "a.dcm", stored, **options))
    assert array.dtype == np.float32
    assert np.array_equal(array, values * 0.5 - 1024)
    assert said.span == (low * 0.5 - 1024, (high - 1) * 0.5 - 1024)
    inverse, _ = read_example(dicom(tmp_path / "b.dcm", stored, PhotometricInterpretation="MONOCHROME1", **options))
    assert np.array_equal(inverse, said.span[0] + said.span[1] - array)


def test_dicom_window(tmp_path: Path) -> None:
    """The ends of the window are the values that pydicom's viewer shows as black and white."""
    pixels = package("pydicom.pixels")
    values = np.arange(4096, dtype=np.uint16).reshape(64, 64)
    path = dicom(
        tmp_path / "a.dcm", values, BitsStored=12, HighBit=11, WindowCenter=["1000", "9"], WindowWidth=["500", "9"]
    )
    said = read_example(path)[1]
    assert said.window is not None
    shown = pixels.apply_windowing(values, package("pydicom").dcmread(path)).reshape(-1)
    unit = np.clip((values.reshape(-1) - said.window[0]) / (said.window[1] - said.window[0]), 0, 1)
    assert np.allclose(unit, (shown - shown.min()) / (shown.max() - shown.min()))
    options = {"WindowCenter": "1000", "WindowWidth": "500", "PhotometricInterpretation": "MONOCHROME1"}
    inverse = read_example(dicom(tmp_path / "b.dcm", values, BitsStored=12, HighBit=11, **options))[1]
    assert inverse.window == (4095 - said.window[1], 4095 - said.window[0])


def scanned(name: str) -> Path:
    path = Path(package("pydicom").__file__).parent / "data/test_files" / name
    if not path.exists():
        pytest.skip("this pydicom comes without its examples")
    return path


def test_dicom_of_scanners() -> None:
    """pydicom's own examples: one scan in five packings, Hounsfield units, colours."""
    pydicom = package("pydicom")
    whole = read_example(scanned("MR_small.dcm"))[0]
    assert np.array_equal(whole, pydicom.dcmread(scanned("MR_small.dcm")).pixel_array)
    for packing in ("RLE", "bigendian", "implicit", "expb", "jp2klossless"):
        assert np.array_equal(read_example(scanned(f"MR_small_{packing}.dcm"))[0], whole)
    ct = pydicom.dcmread(scanned("CT_small.dcm"))
    assert np.array_equal(read_example(scanned("CT_small.dcm"))[0], ct.pixel_array.astype(np.float32) - 1024)
    colours = read_example(scanned("SC_rgb_rle.dcm"))[0]
    assert np.array_equal(colours, pydicom.dcmread(scanned("SC_rgb_rle.dcm")).pixel_array.transpose(2, 0, 1))
    for name, why in {
        "MR_small_jpeg_ls_lossless.dcm": "is packed as JPEG-LS",
        "image_dfl.dcm": "is packed as Deflated",
        "examples_palette.dcm": "PALETTE COLOR",
        "rtplan.dcm": "without an image",
        "MR_truncated.dcm": "truncated",
        "examples_ybr_color.dcm": "holds 30 pictures",
    }.items():
        refused(scanned(name), why)


def test_dicom_waveforms() -> None:
    """pydicom's example of an ECG, against pydicom."""
    pydicom = package("pydicom")
    array, said = read_example(scanned("waveform_ecg.dcm"))
    assert np.allclose(array, pydicom.dcmread(scanned("waveform_ecg.dcm")).waveform_array(0).T)
    assert array.shape == (12, 10000)
    assert said.rate == 1000
    assert said.leads[:3] == ("Lead I (Einthoven)", "Lead II", "Lead III")
    assert np.abs(array[0] + array[2] - array[1]).max() <= 10  # Einthoven: I + III = II, in microvolts, rounded
    assert set(said.units) == {"uV"}


def test_dicom_series(tmp_path: Path) -> None:
    package("pydicom")
    scale: dict[str, Any] = {"RescaleSlope": "2", "RescaleIntercept": "-1", "PixelSpacing": ["0.5", "0.25"]}
    array, said = read_example(series(tmp_path / "s", VOLUME, **scale))
    assert np.array_equal(array, 2.0 * VOLUME - 1)
    assert said.spacing == (2.0, 0.5, 0.25)
    upside_down = series(tmp_path / "r", VOLUME, ImageOrientationPatient=[0.0, 1, 0, 1, 0, 0])
    assert np.array_equal(read_example(upside_down)[0], VOLUME[::-1])  # the normal of these looks to the feet
    x = np.diag([-0.25, -0.5, 2.0, 1.0])
    same = read_example(nifti(tmp_path / "s.nii.gz", np.moveaxis(VOLUME, (0, 1, 2), (2, 1, 0)), x))
    assert np.array_equal(same[0] * 2 - 1, array)  # the same scan as NIfTI
    assert same[1].spacing == said.spacing


def test_enhanced_dicom(tmp_path: Path) -> None:
    """Frames of one file have positions and scales of their own."""
    pydicom = package("pydicom")
    groups = []
    for depth in (3, 0, 4, 1, 2):
        place, unit, group = (pydicom.Dataset() for _ in range(3))
        place.ImagePositionPatient = [0.0, 0.0, float(depth)]
        unit.RescaleSlope, unit.RescaleIntercept, unit.RescaleType = "1", str(depth), "US"
        group.PlanePositionSequence, group.PixelValueTransformationSequence = [place], [unit]
        groups.append(group)
    direction, shared = pydicom.Dataset(), pydicom.Dataset()
    direction.ImageOrientationPatient = list(AXIAL)
    shared.PlaneOrientationSequence = [direction]
    options = {"SharedFunctionalGroupsSequence": [shared], "PerFrameFunctionalGroupsSequence": groups}
    array, _ = read_example(dicom(tmp_path / "a.dcm", VOLUME, **options))
    assert np.array_equal(array, VOLUME[[1, 3, 4, 0, 2]] + np.arange(5)[:, None, None])


def test_dicom_refusals(tmp_path: Path) -> None:
    package("pydicom")
    series(tmp_path / "two", VOLUME)
    dicom(tmp_path / "two/99.dcm", VOLUME[0], SeriesInstanceUID="1.2.4", ImagePositionPatient=[0.0, 0, 9],
          ImageOrientationPatient=list(AXIAL))  # fmt: skip
    refused(tmp_path / "two", "more than one series")
    (series(tmp_path / "gap", VOLUME) / "03.dcm").unlink()  # the fourth
    refused(tmp_path / "gap", "slices lie 2 to 4 mm apart")
    dicom(tmp_path / "nowhere/a.dcm", VOLUME[0])
    refused(tmp_path / "nowhere", "doesn't say where its slice lies")
    series(tmp_path / "sizes", VOLUME)
    dicom(tmp_path / "sizes/99.dcm", VOLUME[0, :3])
    refused(tmp_path / "sizes", "grey slices of one size")
    (tmp_path / "empty").mkdir()
    refused(tmp_path / "empty", "isn't a DICOM series")
    refused(dicom(tmp_path / "a.dcm", VOLUME[0], Rows=60000, Columns=60000), "3,600,000,000 pixels")
    refused(dicom(tmp_path / "b.dcm", VOLUME[0], Rows=60), "b.dcm")
    refused(dicom(tmp_path / "c.dcm", VOLUME[0], RescaleSlope="0", RescaleIntercept="0"), "c.dcm")
    refused(dicom(tmp_path / "d.dcm", VOLUME[0], BitsStored=0), "d.dcm")
    os.mkfifo(tmp_path / "pipe.dcm")
    refused(tmp_path / "pipe.dcm", "is a pipe or a device")


def test_a_packed_frame_that_swells(tmp_path: Path) -> None:
    """A JPEG 2000 frame that announces another size than its file is refused before it is unpacked."""
    package("pydicom")
    data = scanned("MR_small_jp2klossless.dcm").read_bytes()
    at = data.index(b"\xff\x4f\xff\x51") + 8  # SIZ: after its length and capabilities stand width and height
    (tmp_path / "a.dcm").write_bytes(data[:at] + struct.pack(">2I", 50000, 50000) + data[at + 8 :])
    refused(tmp_path / "a.dcm", "a.dcm")


# --- WFDB ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", [16, 24, 32, 61, 80, 160, 212])
@pytest.mark.parametrize("length", [40, 41])
def test_wfdb_formats(code: int, length: int, tmp_path: Path) -> None:
    most = {80: 127, 212: 2047}.get(code, 32767)
    digital = RNG.integers(-most, most + 1, (3, length))
    array, said = read_example(wfdb(tmp_path, digital, code, gain="400(-12)/uV"))
    assert array.dtype == np.float32
    assert np.allclose(array, (digital + 12) / 400)
    assert said == Said(rate=100.0, leads=("lead 0", "lead 1", "lead 2"), units=("uV",) * 3)


@pytest.mark.peers
@pytest.mark.parametrize("code", [16, 24, 32, 80, 212])
def test_wfdb_against_the_package(code: int, tmp_path: Path) -> None:
    """The package wfdb writes a record and reads it; so do we."""
    package_of_wfdb = pytest.importorskip("wfdb", reason="no wfdb: pip install wfdb")
    physical = np.cumsum(RNG.normal(size=(500, 12)), axis=0)
    names = [f"V{i}" for i in range(12)]
    package_of_wfdb.wrsamp("r", fs=250, units=["mV"] * 12, sig_name=names, p_signal=physical, fmt=[str(code)] * 12,
                           write_dir=str(tmp_path))  # fmt: skip
    theirs = package_of_wfdb.rdrecord(str(tmp_path / "r"))
    array, said = read_example(tmp_path / "r.hea")
    assert np.allclose(array, theirs.p_signal.T, atol=1e-5)
    assert said == Said(rate=250.0, leads=tuple(names), units=("mV",) * 12)


def test_wfdb_headers(tmp_path: Path) -> None:
    """Defaults of the format: 250 samples a second, a gain of 200, a baseline of the converter's zero, all samples."""
    digital = RNG.integers(-900, 900, (2, 30)).astype("<i2")
    (tmp_path / "a.dat").write_bytes(b"header!!" + digital[0].tobytes())
    (tmp_path / "b.dat").write_bytes(digital[1].tobytes())
    (tmp_path / "r.hea").write_text("# made\nr 2\na.dat 16+8 0/mV 12 100\nb.dat 16\n")
    array, said = read_example(tmp_path / "r.hea")
    assert np.allclose(array, [(digital[0] - 100) / 200, digital[1] / 200])
    assert said == Said(rate=250.0, leads=("signal 1", "signal 2"), units=("mV", "mV"))
    missing = wfdb(tmp_path / "m", np.array([[1, -2048, 5]]), 212)
    assert np.isnan(read_example(missing)[0]).tolist() == [[False, True, False]]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("r 1 100 5\n../secret.dat 16 200\n", "only a file in its own folder"),
        ("r 1 100 5\n/etc/passwd 16 200\n", "only a file in its own folder"),
        ("r 1 100 5\nr.dat 516 200\n", "format 516 aren't read"),
        ("r 1 100 5\nr.dat 16x4 200\n", "several rates"),
        ("r 1 100 5\nr.dat 16:3 200\n", "shifted"),
        ("r/3 1 100 5\n", "several segments"),
        ("r 1 100 500000\nr.dat 16 200\n", "truncated"),
        ("r 1 100 99999999999\nr.dat 16 200\n", "bytes of signals"),
        ("r 9 100 5\nr.dat 16 200\n", "not 9 lines"),
        ("r 99999 100 5\nr.dat 16 200\n", "99,999 leads"),
        ("r 1 0 5\nr.dat 16 200\n", "0.0 samples a second"),
        ("", "truncated, damaged"),
        ("\x00" * 9, "truncated, damaged"),
    ],
)
def test_wfdb_refusals(text: str, why: str, tmp_path: Path) -> None:
    wfdb(tmp_path, np.arange(5)[None]).write_text(text)
    refused(tmp_path / "r.hea", why)


# --- arrays, and all -----------------------------------------------------------------------------------------------


def test_arrays(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", VOLUME)
    np.savez_compressed(tmp_path / "b.npz", whatever=VOLUME.astype(np.float64) / 3)
    array, said = read_example(tmp_path / "a.npy")
    assert np.array_equal(array, VOLUME)
    assert said == Said(span=(0.0, 65535.0))
    assert np.allclose(read_example(tmp_path / "b.npz")[0], VOLUME / 3)
    np.savez(tmp_path / "c.npz", a=VOLUME, b=VOLUME)
    refused(tmp_path / "c.npz", "holds 2 arrays (a.npy, b.npy)")
    np.save(tmp_path / "d.npy", np.array([{"a": 1}], dtype=object))
    refused(tmp_path / "d.npy", "not of numbers")
    (tmp_path / "e.txt").write_text("1")
    refused(tmp_path / "e.txt", "of no format that is read")


@pytest.mark.parametrize(("name", "needed"), [("a.nii.gz", "nibabel"), ("a.dcm", "pydicom")])
def test_without_the_packages(name: str, needed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, needed, None)
    (tmp_path / name).write_bytes(b"x")
    with pytest.raises(MissingData) as error:
        read_example(tmp_path / name)
    one_line(error, f"needs {needed}", "[medical]")
