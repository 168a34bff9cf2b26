"""What the tests on formats of medicine share: small files, written by the formats' own libraries or by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

AXIAL = (1.0, 0.0, 0.0, 0.0, 1.0, 0.0)


def dicom(path: Path, pixels: Array, **elements: Any) -> Path:
    """Write a grey DICOM file of (H, W) or (frames, H, W) whole numbers; ``elements`` by keyword."""
    import pydicom
    from pydicom.dataset import FileDataset, FileMetaDataset
    from pydicom.uid import ExplicitVRLittleEndian, MRImageStorage, generate_uid

    meta = FileMetaDataset()
    meta.MediaStorageSOPClassUID = MRImageStorage
    meta.MediaStorageSOPInstanceUID = generate_uid()
    meta.TransferSyntaxUID = ExplicitVRLittleEndian
    data = FileDataset(str(path), {}, file_meta=meta, preamble=b"\0" * 128)
    data.SOPClassUID, data.SOPInstanceUID = MRImageStorage, meta.MediaStorageSOPInstanceUID
    data.PatientName = "Nobody"
    data.Rows, data.Columns = pixels.shape[-2:]
    if pixels.ndim == 3:
        data.NumberOfFrames = len(pixels)
    data.SamplesPerPixel, data.PhotometricInterpretation = 1, "MONOCHROME2"
    data.BitsAllocated = data.BitsStored = 8 * pixels.dtype.itemsize
    data.HighBit, data.PixelRepresentation = data.BitsStored - 1, int(pixels.dtype.kind == "i")
    data.PixelData = pixels.tobytes()
    for name, value in elements.items():
        setattr(data, name, value)
    data["PixelData"].VR = "OW"
    path.parent.mkdir(parents=True, exist_ok=True)
    pydicom.dcmwrite(path, data, enforce_file_format=True)
    return path


def series(folder: Path, volume: Array, *, uid: str = "1.2.3", step: float = 2.0, **elements: Any) -> Path:
    """Write a volume (D, H, W) as axial slices, whose names aren't in the order of their positions."""
    for depth, pixels in enumerate(volume):
        place = [0.0, 0.0, -10 + step * depth]
        options = {"ImagePositionPatient": place, "ImageOrientationPatient": list(AXIAL), **elements}
        dicom(folder / f"{(depth * 7) % 11:02d}.dcm", pixels, SeriesInstanceUID=uid, **options)
    return folder


def packed_12(values: Array) -> bytes:
    """Return whole numbers as WFDB's format 212, by the bits of its description."""
    bits = [f"{int(value) & 0xFFF:012b}" for value in values]
    out = bytearray()
    for first, second in zip(bits[::2], [*bits[1::2], "0" * 12][: len(bits[::2])], strict=True):
        out += bytes(int(part, 2) for part in (first[4:], second[:4] + first[:4], second[4:]))
    return bytes(out if len(bits) % 2 == 0 else out[:-1])


def wfdb(
    folder: Path, signals: Array, code: int = 16, *, gain: str = "200", name: str = "r", rate: float = 100
) -> Path:
    """Write whole numbers (leads, time) as a WFDB record; return its header."""
    folder.mkdir(parents=True, exist_ok=True)
    frames = signals.T.reshape(-1)
    data = {
        16: lambda: frames.astype("<i2").tobytes(),
        24: lambda: b"".join(int(v).to_bytes(3, "little", signed=True) for v in frames),
        32: lambda: frames.astype("<i4").tobytes(),
        61: lambda: frames.astype(">i2").tobytes(),
        80: lambda: (frames + 128).astype("u1").tobytes(),
        160: lambda: (frames + 32768).astype("<u2").tobytes(),
        212: lambda: packed_12(frames),
    }[code]()
    (folder / f"{name}.dat").write_bytes(data)
    lines = [f"{name} {len(signals)} {rate:g} {signals.shape[1]}"]
    lines += [f"{name}.dat {code} {gain} 12 0 0 0 0 lead {i}" for i in range(len(signals))]
    (folder / f"{name}.hea").write_text("\n".join([*lines, "# Age: 55", ""]))
    return folder / f"{name}.hea"
