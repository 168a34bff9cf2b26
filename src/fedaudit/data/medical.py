"""Readers of one example a file, as hospitals have them: NIfTI, DICOM, WFDB, arrays, pictures.

Each is a function of a path: it returns an array, and what the file says of it.

Of a file's headers only what the array needs is read: nothing of the patient is kept.
"""

from __future__ import annotations

import gzip
import math
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from fedaudit.data.files import Numbers, read_array_file, reading, within
from fedaudit.data.images import IMAGE_SUFFIXES
from fedaudit.utils.bounds import DICOM, NIFTI, PICTURE, WFDB, check_file, opened, read_bytes
from fedaudit.utils.errors import BadInput, MissingData
from fedaudit.utils.image_bytes import decode_unit, dimensions

_SERIES = 4096  # files of a DICOM series
_ALIKE = 1e-3  # by which the directions of a series' slices may differ
_GAP = 1.5  # times the smallest distance of two slices: where a larger one is, slices are missing


@dataclass(frozen=True)
class Said:
    """What a file says of its array.

    span: the least and the largest value that it could hold, in the array's unit; None: it doesn't say.
    window: the values that viewers show as black and white (DICOM's VOI window); None: it doesn't say.
    spacing: millimetres from one voxel to the next, along the array's last axes; () if unknown.
    rate: samples of a signal in a second.
    leads, units: names and units of a signal's leads.
    """

    span: tuple[float, float] | None = None
    window: tuple[float, float] | None = None
    spacing: tuple[float, ...] = ()
    rate: float | None = None
    leads: tuple[str, ...] = ()
    units: tuple[str, ...] = ()


Read = tuple[Numbers, Said]


def read_example(path: Path) -> Read:
    """Return the array in a file of one of :data:`READERS`, or in a folder that is a DICOM series."""
    if path.is_dir():
        return read_dicom_series(path)
    suffix = suffix_of(path)
    if suffix is None:
        raise BadInput(f"{path} is of no format that is read; known: {', '.join(READERS)}, and folders of DICOM slices")
    return READERS[suffix](path)


def suffix_of(path: Path) -> str | None:
    """Return which of :data:`READERS` reads a file, by its name; None if none does."""
    name = path.name.lower()
    return next((suffix for suffix in READERS if name.endswith(suffix)), None)


def _package(name: str, path: Path) -> Any:
    """Import a package of the extra ``medical``; MissingData where it isn't installed."""
    try:
        return import_module(name)
    except ImportError as error:
        raise MissingData(f"reading {path} needs {name}; pip install 'PATH_OF_THE_CLONE[medical]'") from error


# --- NIfTI ------------------------------------------------------------------------------------------------------------


def read_nifti(path: Path) -> Read:
    """Return a NIfTI-1 or NIfTI-2 file, gzipped or not, in one orientation, with the file's scale applied.

    The axes are turned and flipped (never interpolated) as the file's affine says, to depth from feet to head, height
    from front to back, width from the patient's right to the left: as a DICOM series of axial slices is. The array is
    float32 (D, H, W), or with a last axis of time or channels (C, D, H, W). Colours and complex numbers aren't read.
    """
    nibabel = _package("nibabel", path)
    with reading(path), nibabel.imageglobals.LoggingOutputSuppressor():  # it logs whatever is odd in a header
        with opened(path, NIFTI) as file, gzip.open(file) if path.suffix.lower() == ".gz" else file as stream:
            data = stream.read((NIFTI.unpacked or 0) + 1)
        within(len(data), NIFTI.unpacked, "bytes")
        kind = nibabel.Nifti2Image if data[:4] in (b"\x1c\x02\0\0", b"\0\0\x02\x1c") else nibabel.Nifti1Image
        image = kind.from_bytes(data)
        shape, stored = image.shape, image.get_data_dtype()
        within(math.prod(shape), NIFTI.items, NIFTI.of)
        if stored.kind not in "iuf":
            raise BadInput(f"{path} holds colours or complex numbers; write it with one real number a voxel")
        others = tuple(side for side in shape[3:] if side != 1)
        if len(shape) < 2 or len(others) > 1 or 0 in shape:
            raise BadInput(f"{path} has the shape {shape}; two or three axes of space and one more are read")
        values = image.get_fdata(dtype=np.float32, caching="unchanged")
        values = values.reshape((*shape[:3], *(1,) * (3 - len(shape)), *others))
        orientations = nibabel.orientations
        ours = orientations.axcodes2ornt(("L", "P", "S"))
        turn = orientations.ornt_transform(orientations.io_orientation(image.affine), ours)
        values = np.moveaxis(orientations.apply_orientation(values, turn), (0, 1, 2), (-1, -2, -3))
        zooms = np.ones(3)
        zooms[turn[: len(shape), 0].astype(int)] = image.header.get_zooms()[:3]
    return np.ascontiguousarray(values), Said(spacing=tuple(float(zoom) for zoom in zooms[::-1]))


# --- DICOM ------------------------------------------------------------------------------------------------------------

# Transfer syntaxes whose pixels are counted before they are unpacked: plain ones, RLE, and what Pillow unpacks.
_PLAIN = ("1.2.840.10008.1.2", "1.2.840.10008.1.2.1", "1.2.840.10008.1.2.2", "1.2.840.10008.1.2.5")
_PILLOW = ("1.2.840.10008.1.2.4.50", "1.2.840.10008.1.2.4.90", "1.2.840.10008.1.2.4.91")
_GREY, _COLOURS = ("MONOCHROME1", "MONOCHROME2"), ("RGB", "YBR_FULL", "YBR_FULL_422", "YBR_ICT", "YBR_RCT")


def read_dicom(path: Path) -> Read:
    """Return the pixels of a DICOM file in the unit that it gives them (Hounsfield units, …).

    The modality's slope and intercept (or its table) are applied, and MONOCHROME1 is inverted within the span that the
    stored bits allow, so that more is always brighter. Frames of an enhanced file are sorted by their positions. The
    array is float32 (H, W), (frames, H, W), or (3, H, W) of colours; of waveforms, as ECGs are, the first group of
    channels in physical units: (leads, time).
    """
    array, said, _ = _dicom(path)
    return array, said


def read_dicom_series(folder: Path) -> Read:
    """Return a DICOM series, a file a slice, as a volume float32 (D, H, W), sorted along the slices' normal."""
    files = sorted(path for path in folder.iterdir() if path.name[0] != "." and path.name != "DICOMDIR")
    if not files or len(files) > _SERIES or any(path.is_dir() for path in files):
        raise BadInput(f"{folder} isn't a DICOM series: give 1 to {_SERIES:,} files, one a slice, and no folders")
    slices: list[tuple[float, Numbers]] = []
    first: tuple[Numbers, Said, Any] | None = None
    for path in files:
        array, said, data = _dicom(path)
        first = first or (array, said, data)
        within_series = len(files) * array.size
        if array.ndim != 2 or array.shape != first[0].shape or within_series > (DICOM.items or 0):
            what = f"{len(files)} slices of {array.shape}, the first of {first[0].shape}"
            raise BadInput(f"{folder}: {what}; give grey slices of one size, {DICOM.items:,} pixels at most in all")
        with reading(path):
            places = [_place(found) for found in (data, first[2])]
            same = data.get("SeriesInstanceUID") == first[2].get("SeriesInstanceUID")
        if places[0] is None or places[1] is None:
            raise BadInput(f"{path} doesn't say where its slice lies (ImagePositionPatient); give a .nii.gz instead")
        normal = places[1][1]
        if not same or float(np.abs(normal - places[0][1]).max()) > _ALIKE:
            raise BadInput(f"{folder} holds more than one series or direction of slices; give each a folder of its own")
        slices.append((float(places[0][0] @ normal), array))
    slices.sort(key=lambda pair: pair[0])
    assert first is not None
    gaps = np.diff([position for position, _ in slices])
    if gaps.size and (float(gaps.min()) < 1e-3 or float(gaps.max()) > _GAP * float(gaps.min())):
        seen = f"{float(gaps.min()):.3g} to {float(gaps.max()):.3g} mm"
        raise BadInput(f"{folder}: slices lie {seen} apart, so some are missing or there twice; give every slice once")
    depth = (float(gaps.mean()),) if gaps.size else (1.0,)
    return np.stack([array for _, array in slices]), replace(first[1], spacing=depth + first[1].spacing)


def _dicom(path: Path) -> tuple[Numbers, Said, Any]:
    """Return pixels, what is said of them, and the file's elements, without the pixels."""
    pydicom = _package("pydicom", path)
    pixels = import_module("pydicom.pixels")
    with reading(path), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of values that break the standard, of which there are many
        check_file(path, DICOM)
        packing = str(pydicom.filereader.read_file_meta_info(path).get("TransferSyntaxUID", _PLAIN[0]))
        if packing not in _PLAIN + _PILLOW:
            raise BadInput(f"{path} is packed as {pydicom.uid.UID(packing).name}; unpack it first (gdcmconv --raw)")
        data = pydicom.dcmread(path)
        if data.get("WaveformSequence"):
            return *_waveforms(data), data
        if "PixelData" not in data:
            raise BadInput(f"{path} is a DICOM file without an image or waveforms; leave it out")
        colours = str(data.PhotometricInterpretation)
        if colours not in _GREY + _COLOURS:
            raise BadInput(f"{path} has the colours {colours[:40]!r}; {', '.join(_GREY + _COLOURS)} are read")
        frames, samples = int(data.get("NumberOfFrames") or 1), int(data.get("SamplesPerPixel", 1))
        rows, columns = int(data.Rows), int(data.Columns)
        within(rows * columns * frames * samples, DICOM.items, DICOM.of)
        if packing in _PILLOW:
            _check_pictures(pydicom, data, frames, path)
        stored = pixels.pixel_array(data)
        if colours in _COLOURS:
            if frames > 1 or stored.dtype != np.uint8:
                raise BadInput(f"{path} holds {frames} pictures of {stored.dtype} colours; one of 8 bits is read")
            array, said = np.moveaxis(stored, -1, 0).astype(np.float32), Said(span=(0.0, 255.0))
        else:
            array, said = _measured(pixels, data, stored.reshape(frames, rows, columns))
        spacing = tuple(float(value) for value in data.get("PixelSpacing") or ())
        del data.PixelData
        data._pixel_array = None
    return array, replace(said, spacing=spacing if len(spacing) == 2 else ()), data


def _waveforms(data: Any) -> Read:
    """Return the first group of waveforms of a file."""
    group = data.WaveformSequence[0]
    channels = group.ChannelDefinitionSequence
    within(len(channels), WFDB.items, WFDB.of)
    within(int(group.NumberOfWaveformSamples) * len(channels), DICOM.items, "samples")
    names = tuple(str(channel.ChannelSourceSequence[0].CodeMeaning) for channel in channels)
    units = tuple(
        str(channel.ChannelSensitivityUnitsSequence[0].CodeValue) if "ChannelSensitivity" in channel else ""
        for channel in channels
    )
    values = np.ascontiguousarray(data.waveform_array(0).T, dtype=np.float32)
    return values, Said(rate=float(group.SamplingFrequency), leads=names, units=units)


def _check_pictures(pydicom: Any, data: Any, frames: int, path: Path) -> None:
    """Raise ValueError where a packed frame, by its own header, has another size than the file says."""
    for frame in pydicom.encaps.generate_frames(data.PixelData, number_of_frames=frames):
        size = dimensions(bytes(frame), f"{path}, a frame", ("JPEG", "JPEG2000"))
        if size != (data.Columns, data.Rows):
            raise ValueError(f"a frame of {size} pixels where {data.Columns} x {data.Rows} are announced")


def _measured(pixels: Any, data: Any, stored: Numbers) -> Read:
    """Return grey frames (n, H, W), as they are stored, in their unit, brighter for more, sorted: (H, W) of one."""
    bits, signed = int(data.BitsStored), int(data.get("PixelRepresentation", 0)) == 1
    if not 1 <= bits <= 8 * stored.dtype.itemsize or stored.dtype.kind not in "iu":
        raise ValueError(f"{bits} bits of {stored.dtype}")
    spare = 8 * stored.dtype.itemsize - bits
    stored = (stored << spare) >> spare  # other bits are overlays; of signed numbers the sign is spread
    ends = np.array([-(2 ** (bits - 1)), 2 ** (bits - 1) - 1] if signed else [0, 2**bits - 1])
    shared, own = data.get("SharedFunctionalGroupsSequence"), data.get("PerFrameFunctionalGroupsSequence")
    frames, spans, places = [], [], []
    for i, frame in enumerate(stored):
        groups = [part for part in (own and own[i], shared and shared[0]) if part]
        unit = next((group.PixelValueTransformationSequence[0] for group in groups
                     if "PixelValueTransformationSequence" in group), data)  # fmt: skip
        if unit.get("ModalityLUTSequence"):
            span = (0.0, 2.0 ** int(unit.ModalityLUTSequence[0].LUTDescriptor[2]) - 1)
        else:
            scaled = [float(end) for end in pixels.apply_modality_lut(ends, unit)]
            span = (min(scaled), max(scaled))
        frames.append(np.asarray(pixels.apply_modality_lut(frame, unit), dtype=np.float32))
        spans.append(span)
        places.append(_frame_place(groups))
    low, high = min(span[0] for span in spans), max(span[1] for span in spans)
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        raise ValueError(f"values from {low} to {high}")
    window = _window(data)
    if str(data.PhotometricInterpretation) == "MONOCHROME1":
        frames = [np.float32(low + high) - frame for frame in frames]
        window = window and (low + high - window[1], low + high - window[0])
    if len(frames) > 1 and all(place is not None for place in places):
        depths = [float(place[0] @ places[0][1]) for place in places if place and places[0]]
        frames = [frames[i] for i in np.argsort(depths, kind="stable")]
    return frames[0] if len(frames) == 1 else np.stack(frames), Said(span=(low, high), window=window)


def _window(data: Any) -> tuple[float, float] | None:
    """Return the ends of the first window: c − 0.5 ∓ (w − 1)/2 (DICOM PS3.3 C.11.2.1.2)."""
    found = []
    for name in ("WindowCenter", "WindowWidth"):
        value = data.get(name)
        if value is None or value == "":
            return None
        found.append(float(value if isinstance(value, int | float | str) else value[0]))
    centre, width = found
    return (centre - 0.5 - (width - 1) / 2, centre - 0.5 + (width - 1) / 2) if 1 < width < math.inf else None


def _place(data: Any) -> tuple[Numbers, Numbers] | None:
    """Return where a slice lies, and its normal; None if it doesn't say."""
    position, directions = data.get("ImagePositionPatient"), data.get("ImageOrientationPatient")
    if not position or not directions or len(position) != 3 or len(directions) != 6:
        return None
    axes = np.array([float(value) for value in directions]).reshape(2, 3)
    return np.array([float(value) for value in position]), np.cross(axes[0], axes[1])


def _frame_place(groups: list[Any]) -> tuple[Numbers, Numbers] | None:
    """Return the same of a frame of an enhanced file, which says it in groups of its own and shared ones."""
    found = {}
    for group in reversed(groups):
        for name in ("PlanePositionSequence", "PlaneOrientationSequence"):
            for item in group.get(name) or ():
                found.update({element.keyword: element.value for element in item})
    return _place(found)


# --- WFDB -------------------------------------------------------------------------------------------------------------

# Formats of WFDB's signal files whose samples are whole numbers, by numpy's letters; the value that means "no sample".
_WFDB: dict[int, tuple[str, int]] = {16: ("<i2", -(2**15)), 61: (">i2", -(2**15)), 32: ("<i4", -(2**31))}
_OFFSET = {80: ("u1", 2**7), 160: ("<u2", 2**15)}  # these count from the middle of their range
_PACKED = (24, 212)
_LEAD = re.compile(
    r"(?P<file>\S+)\s+(?P<format>\d+)(?:x(?P<frame>\d+))?(?::(?P<skew>\d+))?(?:\+(?P<offset>\d+))?"
    r"(?:\s+(?P<gain>[-+.\deE]+)(?:\((?P<baseline>-?\d+)\))?(?:/(?P<unit>\S+))?"
    r"(?:\s+\d+(?:\s+(?P<zero>-?\d+)(?:\s+-?\d+(?:\s+-?\d+(?:\s+\d+(?:\s+(?P<name>.*))?)?)?)?)?)?)?\s*"
)


def read_wfdb(path: Path) -> Read:
    """Return a WFDB record's signals, (sample − baseline) / gain, float32 (leads, time); ``path`` is its header (.hea).

    It is read by the published format (header(5), signal(5) of the WFDB Applications Guide), because the package wfdb
    brings readers of networks and sounds along. It reads formats 16, 24, 32, 61, 80, 160 and 212, of one segment, in
    the header's folder. A sample that is marked as missing becomes NaN.
    """
    with reading(path):
        text = read_bytes(path, WFDB).decode("utf-8", errors="replace")
        lines = [line.strip() for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
        name, count, *rest = lines[0].split()
        if "/" in name:
            raise BadInput(f"{path} is a record of several segments; write its signals as one record")
        within(int(count), WFDB.items, WFDB.of)
        rate = float(re.split(r"[/(]", rest[0])[0]) if rest else 250.0
        length = int(rest[1]) if len(rest) > 1 else 0
        found = [_LEAD.fullmatch(line) for line in lines[1 : 1 + int(count)]]
        leads = [lead.groupdict() for lead in found if lead is not None]
        if len(leads) != int(count) or not leads or not 0 < rate < math.inf or length < 0:
            raise ValueError(f"not {count} lines of signals, or {rate} samples a second")
        for lead in leads:
            if lead["frame"] not in (None, "1") or lead["skew"] not in (None, "0"):
                raise BadInput(f"{path} has signals of several rates, or that are shifted; resample it first")
        signals: list[Numbers] = []
        while len(signals) < len(leads):
            group = [lead for lead in leads[len(signals) :] if lead["file"] == leads[len(signals)]["file"]]
            signals += _samples(path, group, length)
        if len({len(signal) for signal in signals}) != 1:
            raise ValueError("signals of different lengths")
    names = tuple(lead["name"] or f"signal {i + 1}" for i, lead in enumerate(leads))
    return np.stack(signals), Said(rate=rate, leads=names, units=tuple(lead["unit"] or "mV" for lead in leads))


def _samples(header: Path, group: list[dict[str, Any]], length: int) -> list[Numbers]:
    """Return each signal of one file, in which they take turns; a length of 0: as many as there are."""
    name, code, offset = group[0]["file"], int(group[0]["format"]), int(group[0]["offset"] or 0)
    if Path(name).name != name or "\\" in name or name in ("-", "~", "..", "."):
        raise BadInput(f"{header} has its signals in '{name[:80]}'; only a file in its own folder is read")
    if any(int(lead["format"]) != code for lead in group) or code not in (*_WFDB, *_OFFSET, *_PACKED):
        known = ", ".join(map(str, sorted((*_WFDB, *_OFFSET, *_PACKED))))
        raise BadInput(f"{header}: signals of format {code} aren't read, only {known}; write them so (xform)")
    data = read_bytes(header.parent / name, WFDB)[offset:]
    if length:
        wanted = length * len(group)
        within(wanted * 4, WFDB.file, "bytes of signals")
        data = data[: math.ceil(wanted * _width(code))]
    values, missing = _whole_numbers(data, code)
    usable = length * len(group) if length else len(values) // len(group) * len(group)
    if not usable or len(values) < usable:
        raise EOFError(f"{len(values)} samples where {usable} are announced")
    rows = values[:usable].reshape(-1, len(group)).T
    signals = []
    for lead, row in zip(group, rows, strict=True):
        gain = float(lead["gain"] or 0) or 200.0  # 0 says that it isn't calibrated; 200 is the format's default
        baseline = int(lead["baseline"] or lead["zero"] or 0)
        physical = (row.astype(np.float64) - baseline) / gain
        signals.append(np.where(row == missing, np.nan, physical).astype(np.float32))
    return signals


def _width(code: int) -> float:
    """Return the bytes of one sample."""
    return {24: 3.0, 212: 1.5}.get(code) or float(np.dtype({**_WFDB, **_OFFSET}[code][0]).itemsize)


def _whole_numbers(data: bytes, code: int) -> tuple[Numbers, int]:
    """Return all samples in the bytes of a signal file, int64, and the one that means that there is none."""
    if (
        code == 212
    ):  # two samples of 12 bits in three bytes: low bytes first and last, the four high bits of each between
        full = np.frombuffer(data + bytes(-len(data) % 3), np.uint8).astype(np.int64).reshape(-1, 3)
        pairs = np.stack([full[:, 0] | (full[:, 1] & 0x0F) << 8, full[:, 2] | (full[:, 1] & 0xF0) << 4], axis=1)
        values = pairs.reshape(-1)[: len(data) * 2 // 3]
        return values - (values >= 2**11) * 2**12, -(2**11)
    if code == 24:
        full = np.frombuffer(data[: len(data) // 3 * 3], np.uint8).astype(np.int64).reshape(-1, 3)
        values = full[:, 0] | full[:, 1] << 8 | full[:, 2] << 16
        return values - (values >= 2**23) * 2**24, -(2**23)
    letters, special = {**_WFDB, **_OFFSET}[code]
    width = np.dtype(letters).itemsize
    values = np.frombuffer(data[: len(data) // width * width], letters).astype(np.int64)
    return (values - special, -special) if code in _OFFSET else (values, special)


# --- arrays -----------------------------------------------------------------------------------------------------------


def read_array(path: Path) -> Read:
    """Return the array in an .npy file, or the only one in an .npz file, as float32."""
    values = read_array_file(path)
    whole = values.dtype.kind in "u" and values.dtype.itemsize <= 2
    span = (0.0, float(np.iinfo(values.dtype).max)) if whole else None
    return values.astype(np.float32), Said(span=span)


def read_picture(path: Path) -> Read:
    """Return a PNG, JPEG, BMP, PPM, TIFF or WebP file: float32 (H, W) if it is grey, (3, H, W) if it has colours."""
    with reading(path):
        data = read_bytes(path, PICTURE)
    unit, most = decode_unit(data, str(path))
    most = most or 255.0
    pixels = np.ascontiguousarray(np.moveaxis(unit * np.float32(most), -1, 0))
    grey = bool((pixels[0] == pixels[1]).all() and (pixels[0] == pixels[2]).all())
    return pixels[0] if grey else pixels, Said(span=(0.0, most))


# By how the file's name ends.
READERS: dict[str, Callable[[Path], Read]] = {
    ".nii": read_nifti,
    ".nii.gz": read_nifti,
    ".dcm": read_dicom,
    ".dicom": read_dicom,
    ".ima": read_dicom,
    ".hea": read_wfdb,
    ".npy": read_array,
    ".npz": read_array,
    **dict.fromkeys(IMAGE_SUFFIXES, read_picture),
}
