"""Canaries: clients or records with a known direction, each in or out by a fair coin, by which ε is audited."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fedaudit.results.record import Adjacency, Unit
from fedaudit.utils.errors import BadInput
from fedaudit.utils.seeds import generator

# Who observes, from the one who sees most down.
OBSERVERS: dict[str, str] = {
    "updates": "the server that sees every update",
    "sum": "the server that sees only the sum of a round's updates",
    "models": "whoever sees the global model of every round",
    "final": "whoever sees the final model only",
}
_MOST_STEPS = 256  # a round; of more the number taken part in hardly varies, and the sum says as much
_LEAST = 1e-3  # noise, in units of a canary: with less the likelihood ratio is no better than the sum
_CHUNK = 7  # bits: the Hadamard matrix is applied as a product of matrices of this size


@dataclass(frozen=True)
class CanarySpec:
    """What an audit of ε asks of a simulation.

    Attributes:
        adjacency: what an absent one is replaced by: nothing (``add-remove``), or its opposite (``replace``).
        strength: length of a canary's update or gradient before it is clipped, in units of the clip.
        clip: in place of the clip, where none is declared.
        signs: a canary client sends its direction in every round (``constant``), or for two rounds its direction and
            for two its opposite (``paired``).
        joint: the noise of the canaries' sum and of what is read of each is drawn as the defence declares it, and not
            by its code, canary by canary.
        texts: they are texts of random tokens, which clients train on, and have no direction.
        temperature: at which the model draws these texts before training; None: tokens are drawn evenly.
    """

    count: int = 1000
    adjacency: Adjacency = "add-remove"
    strength: float = 10.0
    clip: float = 1.0
    signs: Literal["constant", "paired"] = "constant"
    joint: bool = False
    texts: bool = False
    temperature: float | None = None


@dataclass(frozen=True)
class Canaries:
    """What can be seen of canaries, and what is promised; which of them were in isn't told.

    A reading is the inner product of a canary's direction with what an observer sees, in units in which a canary that
    is in adds 1 each time that it takes part. It is NaN where the observer sees nothing.

    Attributes:
        unit: whom a canary stands for: a ``client``, or one of a client's ``record``s.
        readings: observer (:data:`OBSERVERS`) to (rounds, m) float64; of the final model (1, m).
        noise: observer to the standard deviation of the promised noise in a reading; 0 where none is promised.
        rates: observer to the probability, as the observer knows it, that a canary takes part in a step.
        covered: the observers against whom the promise is made.
        claimed: ε that is promised after the last round, for this adjacency; None where nothing is.
        gaussian: what is promised adds Gaussian noise to what was clipped. Only then bounds count that take this for
            granted: another mechanism as sound, such as randomised response, would be accused by them.
        texts: whether each is a text (:class:`TextCanaries`).
    """

    unit: Unit
    adjacency: Adjacency
    readings: dict[str, Tensor]
    noise: dict[str, float] = field(default_factory=dict)
    rates: dict[str, float] = field(default_factory=dict)
    steps: int = 1
    covered: tuple[str, ...] = ()
    claimed: float | None = None
    delta: float = 1e-5
    joint: bool = False
    gaussian: bool = False
    texts: ClassVar[bool] = False

    def __repr__(self) -> str:
        return f"Canaries({len(self)} {self.unit}s, seen by {len(self.readings)} observers)"

    def __len__(self) -> int:
        return max((reading.shape[1] for reading in self.readings.values()), default=0)

    def scores(self, observer: str) -> Tensor:
        """Return (m,) float64: how much each canary looks to ``observer`` as if it had been in.

        That is the sum of its readings; where it takes part by chance, of their log-likelihood ratios: k times, k
        binomial, against none, with the promised noise.
        """
        readings = self.readings[observer]
        rate, noise = self.rates.get(observer, 1.0), self.noise.get(observer, 0.0)
        if rate >= 1 or len(readings) < 2 or noise <= 0 or self.steps > _MOST_STEPS:
            return readings.nansum(dim=0)
        k = torch.arange(self.steps + 1, dtype=torch.float64)
        steps = torch.tensor(float(self.steps), dtype=torch.float64)
        chance = torch.lgamma(steps + 1) - torch.lgamma(k + 1) - torch.lgamma(steps - k + 1)
        chance = chance + k * math.log(rate) + (steps - k) * math.log1p(-rate)
        variance = max(noise, _LEAST) ** 2
        ratios = [
            (chance[:, None] + (torch.outer(k, own) - k[:, None] ** 2 / 2) / variance).logsumexp(0) for own in readings
        ]
        return torch.stack(ratios).nansum(dim=0)


class TextCanaries(Canaries):
    """Canaries that are texts, which clients train on; a reading says by how much a text's mean loss fell."""

    texts: ClassVar[bool] = True


class Directions:
    """m unit directions in d dimensions, given by a seed: they take O(d) memory, and O(d log d) time for all m.

    Direction j is row j of a Hadamard matrix, with random signs, on random coordinates. Where d allows it (a power of
    two of at least m that is at most d) they are orthogonal; else their inner products are as small as random ones'.
    """

    def __init__(self, seed: int, count: int, size: int) -> None:
        if size < 1:
            raise BadInput("canaries need a model with parameters")
        self.count, self.size = count, size
        inside = 1 << (size.bit_length() - 1)
        self.order = inside if inside >= count else 1 << max(size - 1, count - 1).bit_length()
        rng = generator(seed, "canary directions")
        used = min(self.order, size)
        self.coordinates = torch.randperm(size, generator=rng)[:used]
        self.columns = torch.randperm(self.order, generator=rng)[:used]
        self.signs = (torch.randint(0, 2, (used,), generator=rng) * 2 - 1).float() / math.sqrt(used)

    @property
    def orthonormal(self) -> bool:
        """Whether the directions are orthogonal to each other."""
        return self.order <= self.size

    def project(self, vector: Tensor) -> Tensor:
        """Return (m,) float64: the inner product of every direction with ``vector`` (d,)."""
        spread = torch.zeros(self.order)
        spread[self.columns] = vector[self.coordinates] * self.signs
        return hadamard(spread)[: self.count].double()

    def combine(self, weights: Tensor) -> Tensor:
        """Return (d,): the sum of all directions, weighted by ``weights`` (m,)."""
        spread = torch.zeros(self.order)
        spread[: self.count] = weights.float()
        return self._placed(hadamard(spread))

    def one(self, number: int) -> Tensor:
        """Return (d,): direction ``number``."""
        bits = self.order.bit_length() - 1
        low = bits // 2
        rows = torch.outer(_sylvester(bits - low)[number >> low], _sylvester(low)[number & ((1 << low) - 1)])
        return self._placed(rows.flatten())

    def _placed(self, row: Tensor) -> Tensor:
        vector = torch.zeros(self.size)
        vector[self.coordinates] = row[self.columns] * self.signs
        return vector


class CanaryRecords:
    """The canaries among one client's records: they ride along in its batches with a gradient that is known.

    Every pass over the client's examples takes each of them along in one batch, drawn as an example's place is: so it
    takes part in a step as often as any example. They don't count in a batch's size.

    Args:
        lengths: (m,) of each canary's gradient before clipping; 0 of absent ones.
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
                yield [piece.view_as(p).to(p.device) for piece, p in zip(pieces, parameters, strict=True)]


def hadamard(vector: Tensor) -> Tensor:
    """Return H·``vector`` (n,), n a power of two, for Sylvester's Hadamard matrix H of ±1, by O(n log n) operations."""
    bits = len(vector).bit_length() - 1
    while bits:
        step = min(_CHUNK, bits)
        vector = (vector.view(-1, 1 << step) @ _sylvester(step)).T.reshape(-1)  # the next bits are the lowest now
        bits -= step
    return vector


@cache
def _sylvester(bits: int) -> Tensor:
    matrix = torch.ones(1, 1)
    for _ in range(bits):
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix
