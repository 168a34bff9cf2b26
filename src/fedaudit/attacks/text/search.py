"""The search for sequences whose vectors lie in a layer's span: a decoder's prefixes, an encoder's whole sequences."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import combinations

import torch
from torch import Tensor, nn

from fedaudit.attacks.text.layers import Receiver, Span, inputs_of

_ALL = 4096  # so many combinations of tokens are all tried; of more, those that a descent leads to
_STARTS = 4  # descents at once
_ALIKE = 0.7  # of the places: from there on what isn't quite in the span is the same as what was found


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
        inputs = inputs_of(self.module, receiver, tokens)
        return span.distances(inputs if place is None else inputs[:, place])

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
    return _stacked(search, ended)


@dataclass
class _Whole:
    """The search for an encoder's sequences as it goes on.

    Attributes:
        search: what is known.
        generator: of random starts.
        left: sequences that may still be tried.
        inside: those found whose vectors all lie in the span, with their mean distance.
        near: the others that a descent ended at.
    """

    search: Search
    generator: torch.Generator
    left: int
    inside: dict[tuple[int, ...], float] = field(default_factory=dict)
    near: dict[tuple[int, ...], float] = field(default_factory=dict)

    def distances(self, tokens: Tensor) -> Tensor:
        """Return (n, k) the distances of sequences (n, k) at their own places."""
        self.left -= len(tokens)
        return self.search.distances(self.search.filled(tokens))[:, : tokens.shape[1]]

    def keep(self, tokens: Tensor) -> bool:
        """Sort sequences (n, k) into those inside and those near; return whether any was inside and is new."""
        new = False
        for row, distances in zip(tokens.tolist(), self.distances(tokens), strict=True):
            place, mean = tuple(row), float(distances.mean())
            if bool((distances <= 1).all()):
                new |= place not in self.inside
                self.inside[place] = mean
            else:
                self.near[place] = mean
        return new

    def starts(self, sets: Sequence[Tensor]) -> Tensor:
        """Return (n, k) random sequences, of tokens that no sequence inside explains where there are any."""
        columns = []
        for place, tokens in enumerate(sets):
            explained = {found[place] for found in self.inside if len(found) > place}
            rest = torch.tensor([token for token in tokens.tolist() if token not in explained], dtype=torch.int64)
            options = rest.to(tokens.device) if len(rest) else tokens
            drawn = torch.randint(len(options), (_STARTS,), generator=self.generator)
            columns.append(options[drawn.to(options.device)])
        return torch.as_tensor(torch.stack(columns, dim=1).unique(dim=0))

    def descend(self, rows: Tensor, sets: Sequence[Tensor]) -> Tensor:
        """Return where sequences (n, k) end if the best token is taken place by place, until none is better.

        Then the best of all exchanges of two places is tried: the two tokens may both stand in the other's place.
        """
        open_ = [place for place, tokens in enumerate(sets) if len(tokens) > 1]
        pairs = [*combinations(open_, 2)]
        while self.left > 0:
            before = rows
            for at in torch.randperm(len(open_), generator=self.generator).tolist():
                place = open_[at]
                options = sets[place]
                tried = rows.repeat_interleave(len(options), dim=0)
                tried[:, place] = options.repeat(len(rows))
                rows = self._best(tried, len(options))
            if rows.equal(before) and pairs:
                tried = rows.repeat_interleave(len(pairs) + 1, dim=0).view(len(rows), len(pairs) + 1, -1)
                for number, pair in enumerate(pairs):
                    tried[:, number, list(pair)] = tried[:, number, list(pair[::-1])]
                rows = self._best(tried.flatten(0, 1), len(pairs) + 1)
            if rows.equal(before):
                break
            rows = rows.unique(dim=0)
        return rows

    def _best(self, tried: Tensor, each: int) -> Tensor:
        """Return of every ``each`` sequences of (n · each, k) the one that is nearest to the span."""
        means = self.distances(tried).mean(dim=1).view(-1, each)
        best = tried.view(len(means), each, -1)[torch.arange(len(means), device=means.device), means.argmin(dim=1)]
        return torch.as_tensor(best)


def whole_sequences(
    search: Search,
    lengths: Sequence[int],
    end: int | None,
    tries: int,
    generator: torch.Generator,
    progress: Callable[[int, int], None],
) -> tuple[Tensor, Tensor]:
    """Return (m, length) the sequences of an encoder, and (m,) their mean distances from the span.

    Each length is searched, the shortest first, until nothing new lies in the span. What is missing then is filled up
    by the nearest that don't, if they are unlike those that were found.

    Args:
        search: what is known.
        lengths: that sequences may have.
        end: the token at the end of those that are shorter than ``search.length``, if there is one.
        tries: sequences that are tried at most, in all.
        generator: of random starts.
        progress: called with what was tried and ``tries``.
    """
    state = _Whole(search, generator, tries)
    found_more = True
    while found_more and state.left > 0 and len(state.inside) < search.count:
        found_more = False
        for length in sorted(lengths):
            sets = _options(search, length, end)
            if min(map(len, sets)) == 0:
                continue
            if math.prod(map(len, sets)) <= min(_ALL, state.left):
                every = torch.cartesian_prod(*sets).view(-1, length)
                means = state.distances(every).amax(dim=1)
                found_more |= state.keep(every[means.argsort(stable=True)[: search.count]])
                continue
            while state.left > 0 and len(state.inside) < search.count:
                progress(tries - state.left, tries)
                if not state.keep(state.descend(state.starts(sets), sets)):
                    break
                found_more = True
    chosen = sorted(state.inside.items(), key=lambda item: item[1])[: search.count]
    for row, distance in sorted(state.near.items(), key=lambda item: item[1]):
        if len(chosen) == search.count:
            break
        if all(_same(row, other) < _ALIKE for other, _ in chosen):
            chosen.append((row, distance))
    device = search.second[1].basis.device
    return _stacked(search, [(torch.tensor(row, device=device), distance) for row, distance in chosen])


def _options(search: Search, length: int, end: int | None) -> list[Tensor]:
    """Return for each place the tokens that a sequence of this length may have there."""
    sets = []
    for place in range(length):
        tokens = search.found[place]
        if end is not None and (place < length - 1 or length < search.length):
            tokens = tokens[(tokens == end) == (place == length - 1)]
        sets.append(tokens)
    return sets


def _same(one: tuple[int, ...], other: tuple[int, ...]) -> float:
    return sum(a == b for a, b in zip(one, other, strict=False)) / max(len(one), len(other))


def _stacked(search: Search, rows: Sequence[tuple[Tensor, float]]) -> tuple[Tensor, Tensor]:
    device = search.second[1].basis.device
    sequences = torch.full((len(rows), search.length), search.filler, dtype=torch.int64, device=device)
    for row, (tokens, _) in zip(sequences, rows, strict=True):
        row[: len(tokens)] = tokens
    return sequences, torch.tensor([mean for _, mean in rows], dtype=torch.float64)
