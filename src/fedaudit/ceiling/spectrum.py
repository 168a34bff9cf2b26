"""The trace that the ceiling is, over all precisions at once: exactly by eigenvalues, or by Lanczos' quadrature."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

_ZERO = 1e-10  # of a step, beside the first: the space is exhausted


@dataclass(frozen=True)
class Spectrum:
    """Weights on eigenvalues λ of C^½JᵀJC^½, so that the error at noise σ is the sum of weight/(1 + λ/σ²).

    Attributes:
        values: (p, k) eigenvalues, by probe; one probe where they are exact.
        weights: (p, k), of each; their sum is the prior's variance a number, on average over probes.
    """

    values: Tensor
    weights: Tensor

    def errors(self, sigma: float) -> Tensor:
        """Return the mean squared error a number that each probe tells (p,), where the noise has that deviation."""
        if sigma == 0:
            return (self.weights * (self.values <= 0)).sum(dim=1)
        return (self.weights / (1 + self.values.clamp(min=0) / sigma**2)).sum(dim=1)

    def error(self, sigma: float) -> tuple[float, float]:
        """Return the mean squared error a number, and its standard error over probes; 0 where it is exact."""
        each = self.errors(sigma)
        spread = float(each.std() / len(each) ** 0.5) if len(each) > 1 else 0.0
        return float(each.mean()), spread


def exact(gram: Tensor, root: Tensor) -> Spectrum:
    """Return the spectrum of (D, D) JᵀJ and the prior's root C^½."""
    values, vectors = torch.linalg.eigh(root @ gram @ root)
    weights = (root @ vectors).square().sum(dim=0) / len(root)
    return Spectrum(values[None].clamp(min=0), weights[None])


def by_probes(
    normal: Callable[[Tensor], Tensor],
    root: Callable[[Tensor], Tensor],
    shape: tuple[int, ...],
    *,
    probes: int,
    steps: int,
    generator: torch.Generator,
) -> Spectrum:
    """Return the same by stochastic Lanczos quadrature (Ubaru, Chen and Saad 2017), reorthogonalised.

    Args:
        normal: JᵀJ·v of v, in the examples' shape.
        root: C^½·v.
        shape: of the examples.
        probes: random vectors; the error's standard error falls with the root of their number.
        steps: of Lanczos: products with J and Jᵀ, for each probe.
    """
    size = torch.Size(shape).numel()
    values, weights = torch.zeros(probes, steps, dtype=torch.float64), torch.zeros(probes, steps, dtype=torch.float64)
    for probe in range(probes):
        sign = torch.randint(2, shape, generator=generator).float() * 2 - 1
        start = root(sign)
        norm = float(start.double().norm())
        basis = [start.flatten().double() / norm]
        diagonal, beside = list[float](), list[float]()
        for step in range(steps):
            last = basis[-1]
            product = root(normal(root(last.view(shape).float()))).flatten().double()
            diagonal.append(float(product @ last))
            space = torch.stack(basis)
            for _ in range(2):  # once leaves what rounding puts back
                product = product - (space @ product) @ space
            length = float(product.norm())
            if step + 1 == steps or length <= _ZERO * max(diagonal[0], 1e-300):
                break
            beside.append(length)
            basis.append(product / length)
        k = len(diagonal)
        made = torch.diag(torch.tensor(diagonal, dtype=torch.float64))
        off = torch.tensor(beside[: k - 1], dtype=torch.float64)
        made = made + torch.diag(off, 1) + torch.diag(off, -1)
        found, vectors = torch.linalg.eigh(made)
        values[probe, :k] = found.clamp(min=0)
        weights[probe, :k] = vectors[0].square() * norm**2 / size
    return Spectrum(values, weights)
