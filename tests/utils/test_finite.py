"""Numbers are told from what isn't one, however large they are."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedaudit.utils.finite import all_finite

LARGEST = torch.finfo(torch.float32).max
VALUES = [0.0, -0.0, 1.5, LARGEST, -LARGEST, 1e-45, float("inf"), float("-inf"), float("nan")]


@given(
    rows=st.lists(st.lists(st.sampled_from(VALUES), max_size=40), max_size=3),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_it_is_what_isfinite_says(rows, dtype):
    tensors = [torch.tensor(row, dtype=dtype) for row in rows]
    assert all_finite(tensors) == all(bool(t.isfinite().all()) for t in tensors)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.int64, torch.bool, torch.uint8])
def test_other_types(dtype):
    assert all_finite([torch.full((1000,), 1000.0).to(dtype)])  # whose sum in float16 overflows
