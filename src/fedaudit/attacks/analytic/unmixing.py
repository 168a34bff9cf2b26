"""Independent component analysis of mixed images: which combinations of them look like single images."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

_FAST, _STILL = 200, 1e-4  # steps of FastICA, and the change that ends it
_STEPS = 60  # of L-BFGS with each density
_LEAST = 1e-12  # relative variance of a combination without any edge


def unmix(images: Tensor, generator: torch.Generator) -> Tensor:
    """Return (r, r): rows of coefficients, each of a combination of ``images`` that is like one of those mixed.

    Neighbouring pixels of an image differ little nearly everywhere and much at edges, and edges of different images are
    in different places: the differences are sparse and independent, which pixels themselves are not. FastICA
    (symmetric, log cosh; Hyvärinen 1999) on the differences finds where to begin. It holds the components uncorrelated,
    which a few thousand differences of single images never are quite; so maximum likelihood follows, without that
    constraint, with densities of heavy tails.

    Args:
        images: (r, c, h, w), float64, linearly independent.
        generator: of the start.
    """
    edges = torch.cat([images.diff(dim=-1).flatten(1), images.diff(dim=-2).flatten(1)], dim=1)
    if not edges.shape[1]:  # of one pixel
        return torch.eye(len(images), dtype=images.dtype)
    spectrum, vectors = torch.linalg.eigh(edges @ edges.T / edges.shape[1])
    spectrum = spectrum.clamp(min=max(_LEAST * float(spectrum[-1]), 1e-300))
    whiten: Tensor = (vectors / spectrum.sqrt()) @ vectors.T
    white = whiten @ edges
    found = _fast_ica(white, generator)
    for cost in (_student, _sparse):
        found = _likeliest(white, found, cost)
    return found @ whiten


def _fast_ica(white: Tensor, generator: torch.Generator) -> Tensor:
    r, n = white.shape
    found: Tensor = torch.linalg.qr(torch.randn(r, r, dtype=white.dtype, generator=generator))[0]
    for _ in range(_FAST):
        slope = torch.tanh(found @ white)
        left, _, right = torch.linalg.svd(slope @ white.T / n - (1 - slope.square()).mean(dim=1)[:, None] * found)
        before, found = found, left @ right
        if float(((found * before).sum(dim=1).abs() - 1).abs().max()) < _STILL:
            break
    return found


def _student(y: Tensor) -> Tensor:
    return 1.2 * torch.log1p(y.square() / 0.3)


def _sparse(y: Tensor) -> Tensor:
    return 2.0 * (y.square() + 0.01).pow(0.25)


def _likeliest(white: Tensor, start: Tensor, cost: Callable[[Tensor], Tensor]) -> Tensor:
    """Return the unmixing matrix of least ``cost``, minus the log-density of a component up to a constant."""
    data, found = white.float(), start.float().requires_grad_()
    optimiser = torch.optim.LBFGS([found], max_iter=_STEPS, history_size=20, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimiser.zero_grad()
        value: Tensor = cost(found @ data).mean(dim=1).sum() - torch.linalg.slogdet(found)[1]
        value.backward()
        return value

    with torch.enable_grad():
        optimiser.step(closure)
    after: Tensor = found.detach().double()
    return after if bool(torch.isfinite(after).all()) else start
