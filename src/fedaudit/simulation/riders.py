"""Canary records: they ride along in a client's batches as its own examples do, with a gradient that is known."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from fedaudit.epsilon.canaries import Directions


class Riders:
    """The canaries among one client's records.

    Every pass over the client's examples takes each of them along in one batch, drawn as an example's place is: so it
    takes part in a step as often as any example. They don't count in a batch's size.

    Args:
        directions: of all canaries.
        numbers: of this client's.
        lengths: (m,) of each canary's gradient before clipping; 0 of absent ones.
        generator: of their places.
    """

    def __init__(
        self, directions: Directions, numbers: Sequence[int], lengths: Tensor, generator: torch.Generator
    ) -> None:
        self.directions, self.numbers, self.lengths, self.generator = directions, numbers, lengths, generator

    def places(self, sizes: Sequence[int]) -> list[list[int]]:
        """Return for each batch of a pass, of so many examples, which canaries ride along."""
        ends = torch.tensor(sizes).cumsum(0)
        drawn = torch.randint(0, int(ends[-1]), (len(self.numbers),), generator=self.generator)
        batches = torch.searchsorted(ends, drawn, right=True).tolist()
        riding: list[list[int]] = [[] for _ in sizes]
        for number, batch in zip(self.numbers, batches, strict=True):
            riding[batch].append(number)
        return riding

    def gradients(self, numbers: Sequence[int], parameters: Sequence[Tensor]) -> Iterator[list[Tensor]]:
        """Yield the gradient of each canary in ``numbers`` that is there, as tensors like ``parameters``."""
        sizes = [p.numel() for p in parameters]
        for number in numbers:
            if length := float(self.lengths[number]):
                pieces = (length * self.directions.one(number)).split(sizes)
                yield [piece.view_as(p) for piece, p in zip(pieces, parameters, strict=True)]
