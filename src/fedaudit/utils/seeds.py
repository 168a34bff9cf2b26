"""What makes a run repeat: generators derived from one seed and a path of labels."""

from __future__ import annotations

import hashlib
import random

import numpy as np
import torch


def derive_seed(seed: int, *labels: str | int) -> int:
    """Return a 63-bit seed that depends on ``seed`` and on every label, and on nothing else."""
    text = "/".join([str(seed), *map(str, labels)])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def generator(seed: int, *labels: str | int, device: torch.device | str = "cpu") -> torch.Generator:
    """Return a generator for the purpose that ``labels`` names, e.g. ``generator(0, "attack", "fedsgd", 3)``."""
    return torch.Generator(device=device).manual_seed(derive_seed(seed, *labels))


def seed_all(seed: int) -> None:
    """Seed the global generators, from which other people's code draws."""
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002 (what apps draw from)
    torch.manual_seed(seed)
