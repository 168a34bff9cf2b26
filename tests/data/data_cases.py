"""What the tests on data share: random images, pixels as bytes, and an error's only line."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

RNG = np.random.default_rng(7)


def one_line(error: pytest.ExceptionInfo[BaseException], *parts: str) -> None:
    text = str(error.value)
    assert "\n" not in text
    for part in parts:
        assert part in text


def random_images(n: int, *shape: int) -> np.ndarray[Any, Any]:
    return RNG.integers(0, 256, (n, *shape), dtype=np.uint8)


def as_bytes(x: torch.Tensor) -> np.ndarray[Any, Any]:
    return (x * 255).round().to(torch.uint8).numpy()
