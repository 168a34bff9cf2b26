"""Random numbers as the frameworks draw them: by NumPy's ``RandomState``, which is what ``numpy.random`` is."""

from __future__ import annotations

import os

import numpy as np
import torch


def numpy_draws(generator: torch.Generator | None) -> np.random.RandomState:
    """Return a generator like ``numpy.random``; without a seed from ours, all its state is the operating system's.

    It is no cryptographic generator, as the frameworks' own isn't.
    """
    if generator is None:
        return np.random.RandomState(np.frombuffer(os.urandom(4 * 624), np.uint32))
    return np.random.RandomState(int(torch.randint(2**32, (), generator=generator)))
