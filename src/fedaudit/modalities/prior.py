"""What an adversary may know of examples before it sees an update: a Gaussian, by examples of the same sort."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from fedaudit.modalities.base import ExampleKind

LEAST = 20  # examples of the same sort, below which nothing but a number's range is taken to be known
_MOST = 1000


@dataclass(frozen=True)
class Prior:
    """A Gaussian over one example of d numbers: its covariance, shrunk towards its mean variance.

    Attributes:
        mean: (d,).
        directions: (k, d) orthonormal, in which the examples vary.
        deviations: (k,), of each of these directions.
        rest: the standard deviation in all others.
        words: whose examples it is of.
    """

    mean: Tensor
    directions: Tensor
    deviations: Tensor
    rest: float
    words: str = ""

    @classmethod
    def of(cls, examples: Tensor, words: str = "") -> Self:
        """Return the prior that examples (n, ...), at least two, give; shrunk as by Ledoit and Wolf (2004).

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
        return cls(mean, directions, variances.sqrt(), (shrinkage * average) ** 0.5, words)

    @classmethod
    def even(cls, mean: Tensor, deviation: float, words: str) -> Self:
        """Return a prior of numbers that vary alike and by themselves, about ``mean`` (...)."""
        flat = mean.flatten().double()
        return cls(
            flat, torch.zeros(0, len(flat), dtype=flat.dtype), torch.zeros(0, dtype=flat.dtype), deviation, words
        )

    def root(self, vector: Tensor) -> Tensor:
        """Return C^½·v for (n, ...) vectors, one an example, in their shape."""
        rows = vector.flatten(1)
        along = rows @ self.directions.T
        return (self.rest * rows + (along * (self.deviations - self.rest)) @ self.directions).view_as(vector)

    @property
    def variance(self) -> float:
        """Of a number, on average: the mean squared error of who guesses the mean."""
        k, d = self.directions.shape
        return float((self.deviations.square().sum() + (d - k) * self.rest**2) / d)


def prior_of(kind: ExampleKind, held_out: Tensor, victims: Tensor) -> Prior:
    """Return what may be known of such examples: by held-out ones (n, ...), or where they are few, by the range.

    Held-out examples that are a victim's, (m, ...), don't count: nobody knows them before.
    """
    own = kind.fingerprints(held_out) if len(held_out) else torch.zeros(0, dtype=torch.int64)
    other = held_out[~torch.isin(own, kind.fingerprints(victims))][:_MOST]
    if len(other) >= LEAST and bool((other - other[0]).any()):
        return Prior.of(other, f"{len(other)} other {kind.plural}")
    low, high = kind.bounds or (-2.0, 2.0)
    mean = torch.full_like(victims[0], (low + high) / 2)
    return Prior.even(mean, (high - low) / 4, "the range of the numbers alone, for fewer than 20 others are at hand")
