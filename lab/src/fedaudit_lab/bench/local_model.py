"""How the cost of the exact local model reconstruction grows with the number of parameters, and how exact it stays."""

from __future__ import annotations

import math
import time
from typing import Any

import torch

from fedaudit.attacks.local_model import zero_of_affine_map
from fedaudit.utils import Display, Quiet, generator, one_thread

_SIZES = (10, 30, 100, 300, 1000)
_QUICK = (10, 30, 100)
_STEPS, _SHARE = 5, 0.3


def measure(*, quick: bool, display: Display | None = None) -> dict[str, Any]:
    """Time the reconstruction from d + 1 rounds of a least-squares client, and the slope of log seconds over log d.

    The client has 2·d examples of d independent Gaussian columns and trains for 5 full-batch steps; the models sent are
    Gaussian, too. The error is the distance to the closed form, relative to its norm.
    """
    sizes = _QUICK if quick else _SIZES
    report = (display or Quiet()).stage("local model reconstruction", len(sizes))
    rows: list[dict[str, Any]] = []
    with one_thread():
        for done, d in enumerate(sizes, start=1):
            rows.append(_row(d))
            report(done)
    last, before = rows[-1], rows[-2]
    slope = math.log(last["cpu_seconds"] / before["cpu_seconds"]) / math.log(last["d"] / before["d"])
    return {"rows": rows, "slope": slope}


def _row(d: int) -> dict[str, Any]:
    rng = generator(0, "bench", "local-model", d)
    x = torch.randn((2 * d, d), generator=rng, dtype=torch.float64)
    y = torch.randn((2 * d, 1), generator=rng, dtype=torch.float64)
    rate = _SHARE * len(x) / float(torch.linalg.matrix_norm(x, 2)) ** 2
    sent = torch.randn((d + 1, d), generator=rng, dtype=torch.float64)
    back = sent.clone()
    for _ in range(_STEPS):
        back -= 2 * rate / len(x) * ((back @ x.T - y.T) @ x)
    seconds = []
    for _ in range(3):
        began = time.process_time()
        zero = zero_of_affine_map(sent, sent - back, noise=torch.finfo(torch.float64).eps)
        seconds.append(time.process_time() - began)
    optimum = torch.linalg.lstsq(x, y).solution[:, 0]
    return {
        "d": d,
        "rounds": d + 1,
        "cpu_seconds": min(seconds),
        "condition": zero.condition,
        "relative_error": float((zero.point - optimum).norm() / optimum.norm()),
    }
