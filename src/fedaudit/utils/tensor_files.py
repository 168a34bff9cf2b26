"""Safetensors files in pieces, so that a sealed one is hashed while it is written: the library gives nothing to hash.

Later versions of the library write without a copy, too; the lowest that is allowed here, 0.5, copies every tensor.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import IO, Any

import torch
from torch import Tensor

_TYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


_CHUNK = 1 << 18  # a write of many megabytes at once takes several times as long


def write(file: IO[bytes], memory: Iterable[bytes | memoryview], digest: Any = None) -> None:
    """Write :func:`pieces` and update a digest of :mod:`hashlib`, if one is given, beside it: that takes as long."""
    with ThreadPoolExecutor(1) as beside:
        for piece in memory:
            if digest is not None:
                beside.submit(digest.update, piece)
            for place in range(0, len(piece), _CHUNK):
                file.write(piece[place : place + _CHUNK])


def pieces(tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> list[bytes | memoryview]:
    """Return a safetensors file in pieces: its header and every tensor's memory, not copied, so it mustn't change.

    The format is Hugging Face's: the header's length in eight bytes, the header in JSON, the tensors, the widest type
    first. They are on the CPU, contiguous and share no memory; ValueError: the format lacks a type.
    """
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    found: list[bytes | memoryview] = []
    place = 0
    for name in sorted(tensors, key=lambda name: (-tensors[name].element_size(), name)):
        tensor = tensors[name].detach()
        if tensor.dtype not in _TYPES:
            raise ValueError(f"'{name}' holds {tensor.dtype}, which can't be written")
        end = place + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": _TYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [place, end]}
        found.append(tensor.reshape(-1).view(torch.uint8).numpy().data)
        place = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return [len(text).to_bytes(8, "little") + text, *found]
