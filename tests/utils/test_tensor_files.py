"""Safetensors files that are written in pieces: the library itself reads them."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load

from fedaudit.utils.tensor_files import _TYPES, pieces

SHAPES = st.lists(st.integers(0, 4), max_size=3).map(tuple)
TENSORS = st.dictionaries(
    st.text(min_size=1, max_size=8).filter(lambda name: name != "__metadata__"),
    st.tuples(st.sampled_from(sorted(_TYPES, key=str)), SHAPES),
    max_size=6,
)


@given(TENSORS, st.dictionaries(st.text(max_size=5), st.text(max_size=20), max_size=3))
def test_the_library_reads_what_is_written(
    wanted: dict[str, tuple[torch.dtype, tuple[int, ...]]], metadata: dict[str, str]
) -> None:
    tensors = {name: (torch.rand(shape) * 100).to(dtype) for name, (dtype, shape) in wanted.items()}
    parts = pieces(tensors, metadata)
    read = load(b"".join(parts))
    assert read.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert read[name].dtype == tensor.dtype
        assert read[name].shape == tensor.shape
        assert torch.equal(read[name], tensor)
    assert len(parts[0]) % 8 == 0
