"""About how long a benchmark takes, said before it begins: what it took elsewhere, by the speed of this machine."""

from __future__ import annotations

import time
from collections.abc import Iterable

import torch

# About how many CPU seconds at _RATE, start included: with --quick (measured once), and in full (reckoned from
# the tables of docs/evidence/performance.md). `picture` ends at its cap.
SECONDS: dict[str, tuple[float, float]] = {
    "inversion": (13, 800),
    "picture": (60, 600),
    "simulator": (16, 20),
    "training": (12, 100),
    "aggregators": (9, 300),
    "local-model": (5, 30),
    "malicious": (15, 280),
    "recorder": (12, 200),
    "canaries": (20, 370),
}
_RATE = 88.0  # GFLOP/s of a product of matrices
_SIZE, _TIMES = 768, 20


def bench_seconds(names: Iterable[str], *, quick: bool, cap: float | None = None) -> float:
    """Return about how many seconds these benchmarks take here, peers left out.

    Args:
        names: of benchmarks, those of :data:`SECONDS`.
        quick: with ``--quick``.
        cap: of ``picture``, in CPU seconds; that of the table if None.
    """
    seconds = sum(SECONDS[name][0 if quick else 1] for name in names if cap is None or name != "picture")
    return seconds * _RATE / _rate() + (cap or 0.0)


def _rate() -> float:
    """Return the GFLOP/s of a product of matrices in one thread, by processor time."""
    matrix = torch.rand(_SIZE, _SIZE)
    matrix @ matrix
    began = time.process_time()
    for _ in range(_TIMES):
        matrix @ matrix
    return float(2e-9 * _SIZE**3 * _TIMES / max(time.process_time() - began, 1e-6))
