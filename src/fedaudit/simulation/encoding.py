"""An update as bytes: exact, each tensor in the shortest of three forms. What a client sends is what this writes."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from fedaudit.utils.errors import CorruptTranscript

_DENSE, _SPARSE, _BITMAP, _SIGNS = range(4)
_HEADER = struct.Struct("<HB")  # position in the list of names that both sides know; form
_COUNT = struct.Struct("<I")
_FIRST = 64  # elements, of which few are all of one magnitude unless all are


def encode(tensors: Mapping[str, Tensor], names: Sequence[str]) -> bytes:
    """Return ``tensors`` as bytes, without loss; both sides know the model, so names and shapes needn't travel.

    A tensor is written in the shortest way: as it is; or as the positions (4 bytes each, or a bitmap) and values of
    what isn't zero; or, where all its elements are ±a, as a and one bit each. ``names`` are of all tensors of the
    model, in its order.
    """
    parts = []
    for name, tensor in tensors.items():
        array = np.ascontiguousarray(tensor.detach().cpu().reshape(-1).numpy())
        form = _shortest(array)
        parts += [_HEADER.pack(names.index(name), form), *_written(array, form)]
    return b"".join(parts)


def decode(message: bytes, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return what :func:`encode` wrote with the names of ``like``, all tensors of the model, in this order.

    CorruptTranscript: the message isn't one, or is truncated.
    """
    names, found, at = list(like), {}, 0
    try:
        while at < len(message):
            position, form = _HEADER.unpack_from(message, at)
            at += _HEADER.size
            tensor = like[names[position]]
            array, length = _read(message, at, form, tensor)
            found[names[position]] = torch.from_numpy(array).view(tensor.shape)
            at += length
    except (struct.error, ValueError, IndexError) as error:
        raise CorruptTranscript(f"the message is truncated or not an update ({error})") from None
    return found


def _shortest(array: np.ndarray) -> int:
    if array.dtype != np.float32 or not array.size:
        return _DENSE
    size, bitmap, width = array.size, (array.size + 7) // 8, array.itemsize
    written = int(np.count_nonzero(array.view(np.uint32)))  # a negative zero is, too
    lengths = {_DENSE: width * size}
    if written < size:
        lengths |= {_SPARSE: _COUNT.size + 2 * width * written, _BITMAP: bitmap + width * written}
    if _one_magnitude(array[:_FIRST]) and _one_magnitude(array):
        lengths[_SIGNS] = width + bitmap
    return min(lengths, key=lengths.__getitem__)


def _one_magnitude(array: np.ndarray) -> bool:
    return bool((np.abs(array) == np.abs(array[0])).all())


def _written(array: np.ndarray, form: int) -> list[bytes | memoryview]:
    """Return ``array`` in a form, in parts; without a copy where it is written as it is."""
    if form == _DENSE:
        return [array.data]
    if form == _SIGNS:
        return [np.abs(array[0]).tobytes(), np.packbits(np.signbit(array)).data]
    there = array.view(np.uint32) != 0
    if form == _BITMAP:
        return [np.packbits(there).data, array[there].data]
    positions = np.flatnonzero(there)
    return [_COUNT.pack(len(positions)), positions.astype(np.uint32).data, array[positions].data]


def _read(message: bytes, at: int, form: int, like: Tensor) -> tuple[np.ndarray, int]:
    size = like.numel()
    kind = np.dtype(str(like.dtype).removeprefix("torch."))
    bitmap = (size + 7) // 8
    if form == _DENSE:
        return np.frombuffer(message, kind, size, at).copy(), size * kind.itemsize
    if form == _SIGNS:
        magnitude = np.frombuffer(message, kind, 1, at)[0]
        signs = np.unpackbits(np.frombuffer(message, np.uint8, bitmap, at + 4), count=size).astype(bool)
        return np.where(signs, -magnitude, magnitude).astype(kind), 4 + bitmap
    array = np.zeros(size, kind)
    if form == _SPARSE:
        (count,) = _COUNT.unpack_from(message, at)
        array[np.frombuffer(message, np.uint32, count, at + 4)] = np.frombuffer(
            message, kind, count, at + 4 + 4 * count
        )
        return array, 4 + 8 * count
    if form == _BITMAP:
        there = np.unpackbits(np.frombuffer(message, np.uint8, bitmap, at), count=size).astype(bool)
        count = int(there.sum())
        array[there] = np.frombuffer(message, kind, count, at + bitmap)
        return array, bitmap + 4 * count
    raise ValueError(f"form {form}")
