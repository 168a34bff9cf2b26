"""The search for sequences whose vectors lie in a layer's span: what it works with, and a decoder's prefixes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedaudit.attacks.text.layers import Receiver, Span, inputs_of

_CHUNK = 256  # sequences whose vectors are held at once


@dataclass(frozen=True)
class Search:
    """What the search for sequences works with.

    Attributes:
        module: with the weights of the round, in evaluation mode.
        second: the layer whose inputs depend on other tokens, and its span.
        found: of each position, the (k,) tokens that passed the first check.
        length: of sequences, filled up.
        filler: a token for places that don't matter.
        count: sequences that the update was made from.
        short: the model takes shorter sequences, too: prefixes then needn't be filled up.
    """

    module: nn.Module
    second: tuple[Receiver, Span]
    found: Sequence[Tensor]
    length: int
    filler: int
    count: int
    short: bool

    def distances(self, tokens: Tensor, place: int | None = None) -> Tensor:
        """Return (n,) the distance at one place of sequences (n, length), or (n, length) those at all places."""
        receiver, span = self.second
        parts = (inputs_of(self.module, receiver, part) for part in tokens.split(_CHUNK))
        return torch.cat([span.distances(part if place is None else part[:, place]) for part in parts])

    def outside(self, tokens: Tensor, places: Sequence[int]) -> Tensor:
        """Return (n, places, width) what of the vectors of sequences (n, length) at some places is out of the span."""
        receiver, span = self.second
        parts = (inputs_of(self.module, receiver, part)[:, list(places)] for part in tokens.split(_CHUNK))
        return torch.cat([span.outside(part) for part in parts])

    def filled(self, tokens: Tensor) -> Tensor:
        """Return sequences (n, k) at their full length (n, length)."""
        return nn.functional.pad(tokens, (0, self.length - tokens.shape[1]), value=self.filler)


def extend_prefixes(search: Search, beam: int) -> tuple[Tensor, Tensor]:
    """Return (m, length) the sequences of a decoder, and (m,) their mean distances from the span.

    A prefix that no token extends is a sequence. Where the search ends with more than the update was made from, the
    longest are taken, and of these the nearest.

    Args:
        search: what is known.
        beam: prefixes that are kept for each sequence, those nearest to the span.
    """
    device = search.second[1].basis.device
    prefixes = torch.zeros((1, 0), dtype=torch.int64, device=device)
    sums = torch.zeros(1, dtype=torch.float64, device=device)
    ended: list[tuple[Tensor, float]] = []
    limit = beam * search.count
    for place in range(search.length):
        tokens = search.found[place]
        grown = torch.cat(
            [prefixes.repeat_interleave(len(tokens), dim=0), tokens.repeat(len(prefixes))[:, None]], dim=1
        )
        if not len(grown):
            break
        distances = search.distances(grown if search.short else search.filled(grown), place)
        inside = (distances <= 1).nonzero()[:, 0]
        parent = inside // len(tokens)
        alive = torch.zeros(len(prefixes), dtype=torch.bool, device=device)
        alive[parent] = True
        ended += [(prefixes[i], float(sums[i] / max(place, 1))) for i in (~alive).nonzero()[:, 0].tolist()]
        order = inside[distances[inside].argsort(stable=True)[:limit]].sort().values
        prefixes, sums = grown[order], sums[order // len(tokens)] + distances[order]
    ended += [(row, float(total / search.length)) for row, total in zip(prefixes, sums, strict=True)]
    ended = sorted((e for e in ended if len(e[0])), key=lambda e: (-len(e[0]), e[1]))[: search.count]
    return stacked(search, ended)


def stacked(search: Search, rows: Sequence[tuple[Tensor, float]]) -> tuple[Tensor, Tensor]:
    device = search.second[1].basis.device
    sequences = torch.full((len(rows), search.length), search.filler, dtype=torch.int64, device=device)
    for row, (tokens, _) in zip(sequences, rows, strict=True):
        row[: len(tokens)] = tokens
    return sequences, torch.tensor([mean for _, mean in rows], dtype=torch.float64)
