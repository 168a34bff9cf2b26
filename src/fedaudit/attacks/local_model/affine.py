"""The linear algebra of the exact reconstruction: where an affine map vanishes, of which some values are known."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_GOOD = 1e-6  # of the known values: a zero at which no more is left needs no directions left out


@dataclass(frozen=True)
class Zero:
    """Where an affine map was found to vanish, and how far that can be trusted.

    Attributes:
        spanned: how many of the p directions the known points span, as far as their precision tells.
        used: in how many of these the zero was sought: those with most spread first.
        condition: of the known points, centred: greatest to least singular value within ``spanned``.
        misfit: what no affine map explains, relative to the spread of the values; None where no value is left over to
            tell.
        asymmetry: ‖W − Wᵀ‖/(2‖W‖) of the map's matrix; None unless all directions are spanned.
        remaining: the value that the map still has at ``point``, with what the noise of the values adds, relative to
            the root mean square of the known values: 0 is a perfect zero.
    """

    point: Tensor
    spanned: int
    used: int
    condition: float
    singular: bool
    misfit: float | None
    asymmetry: float | None
    remaining: float


def zero_of_affine_map(points: Tensor, values: Tensor, *, noise: float, truncate: bool = True) -> Zero:
    """Find θ̂ with Wθ̂ − v = 0, W and v being fitted to ``values`` = W·``points`` − v by least squares.

    The points are centred and their singular value decomposition gives the map's value along each direction in which
    they spread. With n = p + 1 points in general position that is the paper's solution of d systems of d + 1 equations
    (Xu & Neglia 2021, Observation 1), in O(p³); more points are fitted by least squares. Directions in which the points
    hardly spread would multiply the values' noise: with ``truncate``, as many of them are left out as make the
    remaining value, the noise included, least.

    Args:
        points: (n, p) float64.
        values: (n, p) float64.
        noise: standard deviation of the values' errors, as far as it is known: their rounding, or a defence's noise.
            Where n > p + 1, larger noise is seen by what no affine map explains.
        truncate: leave out directions of which the points say too little.

    Returns:
        The zero. For n = 1, or points that are all equal, the point of least value that is known.
    """
    n, p = points.shape
    centre, mean = points.mean(dim=0), values.mean(dim=0)
    u, s, vt = torch.linalg.svd(points - centre, full_matrices=False)
    floor = max(n, p) * torch.finfo(points.dtype).eps * float(points.abs().max())
    k = min(int((s > floor).sum()), n - 1)
    scale = float(values.square().sum(dim=1).mean().sqrt())
    if k == 0:
        least = values.norm(dim=1)
        left = float(least.min()) / scale if scale else 0.0
        return Zero(points[int(least.argmin())].clone(), 0, 0, 1.0, True, None, None, left)
    u, s, vt = u[:, :k], s[:k], vt[:k]
    along = u.T @ (values - mean)  # (k, p): row i is σᵢ·W·vᵢ
    residual = values - mean - u @ along
    surplus = n - 1 - k
    spread = float((values - mean).norm())
    if surplus:
        noise = max(noise, float(residual.norm()) / (p * surplus) ** 0.5)
    columns = (along / s[:, None]).T  # (p, k): W·vᵢ
    q, r = torch.linalg.qr(columns)
    towards = -(q.T @ mean)  # (k,)

    def solved(used: int) -> Tensor:
        found: Tensor = torch.linalg.solve_triangular(r[:used, :used], towards[:used, None], upper=True)
        return found[:, 0]

    def expected(steps: Tensor, left: Tensor | None = None) -> float:
        """Return the norm of the value at the zero: what is left, and the values' noise, combined as the zero does."""
        if left is None:
            left = (mean + columns[:, : len(steps)] @ steps).square().sum()
        shares = 1 / n + float((steps / s[: len(steps)]).square().sum())
        return float((float(left) + p * noise**2 * shares) ** 0.5)

    used, steps = k, solved(k)
    remaining = expected(steps)
    if truncate and not remaining <= _GOOD * scale:
        left = (mean.square().sum() - towards.square().cumsum(0)).clamp_min(0)
        used, least = 1, float("inf")
        for some in range(1, k + 1):  # how many directions give the least expected value
            steps = solved(some)
            value = expected(steps, left[some - 1])
            if value < least and bool(torch.isfinite(steps).all()):
                used, least = some, value
        steps = solved(used)
        remaining = expected(steps)
    matrix = columns @ vt if k == p else None
    diagonal = r.diagonal().abs()
    return Zero(
        point=centre + vt[:used].T @ steps,
        spanned=k,
        used=used,
        condition=float(s[0] / s[-1]),
        singular=bool(diagonal.min() <= 1e-12 * diagonal.max()),
        misfit=float(residual.norm()) / spread if surplus and spread else None,
        asymmetry=None if matrix is None else float((matrix - matrix.T).norm() / (2 * matrix.norm()).clamp_min(1e-300)),
        remaining=remaining / scale if scale else 0.0,
    )
