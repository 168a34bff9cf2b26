"""What an adversary may know of examples before it sees an update: a Gaussian, by examples of the same sort."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor


@dataclass(frozen=True)
class Prior:
    """A Gaussian over one example of d numbers: its covariance, shrunk towards its mean variance.

    Attributes:
        mean: (d,).
        directions: (k, d) orthonormal, in which the examples vary.
        deviations: (k,), of each of these directions.
        rest: the standard deviation in all others.
        shrinkage: the share of the mean variance in the covariance, by Ledoit and Wolf (2004).
    """

    mean: Tensor
    directions: Tensor
    deviations: Tensor
    rest: float
    shrinkage: float

    @classmethod
    def of(cls, examples: Tensor) -> Self:
        """Return the prior that examples (n, ...), at least two, give.

        ValueError: there is one, or they don't differ.
        """
        rows = examples.flatten(1).double()
        count, size = rows.shape
        if count < 2:
            raise ValueError("a covariance takes two examples at least")
        mean = rows.mean(dim=0)
        centred = rows - mean
        average = float(centred.square().sum() / (count * size))
        if average == 0:
            raise ValueError("the examples don't differ")
        gram = centred @ centred.T / count  # (n, n), of the same spectrum as the covariance
        apart = float(gram.square().sum()) - size * average**2  # ‖S − μI‖² of the covariance S
        # the mean of ‖xxᵀ − S‖²/n², by Ledoit and Wolf's Lemma 3.3
        noise = float((centred.square().sum(dim=1).square().mean() - gram.square().sum()) / count)
        shrinkage = min(1.0, max(0.0, noise / apart)) if apart > 0 else 1.0
        values, vectors = torch.linalg.eigh(gram)
        kept = values > 1e-12 * float(values.max())
        directions = vectors[:, kept].T @ centred
        directions = directions / directions.norm(dim=1, keepdim=True)
        variances = (1 - shrinkage) * values[kept] + shrinkage * average
        return cls(mean, directions, variances.sqrt(), (shrinkage * average) ** 0.5, shrinkage)

    def root(self, vector: Tensor) -> Tensor:
        """Return C^½·v for (n, d) vectors, one an example."""
        rows = vector.flatten(1).double()
        along = rows @ self.directions.T
        return (self.rest * rows + (along * (self.deviations - self.rest)) @ self.directions).to(vector.dtype)

    @property
    def variance(self) -> float:
        """Of a number, on average: the mean squared error of who guesses the mean."""
        k, d = self.directions.shape
        return float((self.deviations.square().sum() + (d - k) * self.rest**2) / d)
