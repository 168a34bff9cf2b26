"""The search for sequences whose vectors lie in a layer's span: a decoder's prefixes, an encoder's whole ones."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush

import torch
from scipy.optimize import nnls
from torch import Tensor, nn

from fedaudit.attacks.text.layers import Receiver, Span, inputs_of

_CHUNK = 256  # sequences whose vectors are held at once
_SAME = 1e-5  # relative: vectors that differ by rounding alone


@dataclass(frozen=True)
class Search:
    """What the search for sequences works with.

    Attributes:
        second: the layer whose inputs depend on other tokens, and its span.
        found: of each position, the (k,) tokens that passed the first check.
        filler: a token for places that don't matter.
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
    longest are taken, and of these the nearest. Where rotations alone tell places, the first token's vector is also
    that of any number of its repetitions: these count as one place, since they tell no more. Each sequence keeps the
    ``beam`` prefixes nearest to the span.
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
    alike = _repeats(search)

    def rank(one: tuple[Tensor, float]) -> tuple[int, float]:
        places = 1 if alike and bool((one[0] == one[0][0]).all()) else len(one[0])
        return -places, one[1]

    return stacked(search, sorted((e for e in ended if len(e[0])), key=rank)[: search.count])


def _repeats(search: Search) -> bool:
    """Return whether a token that is repeated from the first place on has one vector at all of them."""
    words = next((tokens for tokens in search.found if len(tokens)), None)
    if words is None or search.length < 2:
        return False
    first, second = inputs_of(search.module, search.second[0], words[0].repeat(1, search.length))[0, :2]
    return bool((first - second).norm() <= _SAME * first.norm())


def stacked(search: Search, rows: Sequence[tuple[Tensor, float]]) -> tuple[Tensor, Tensor]:
    device = search.second[1].basis.device
    sequences = torch.full((len(rows), search.length), search.filler, dtype=torch.int64, device=device)
    for row, (tokens, _) in zip(sequences, rows, strict=True):
        row[: len(tokens)] = tokens
    return sequences, torch.tensor([mean for _, mean in rows], dtype=torch.float64)


_ALL = 4096  # so many combinations of tokens are all tried; of more, those that the linearised layer leads to
_CONTEXTS = 4  # random ones, in which each word is looked at
_COORDINATES = 256  # random ones, of what lies outside the span
_EXPLAINED = 0.5  # of what lies outside: more that is left means that no sequence has these words
_LIKELY = 0.05  # weight of a word that may stand at a place
_DEPTH = 6  # guesses one after the other
_FAILURES = 2  # random beginnings that find nothing new, one after the other
_ALIKE = 0.7  # of the places: from there on what isn't quite in the span is the same as what was found


@dataclass(frozen=True)
class Linearised:
    """A layer, linearised at a sequence of which some words are taken for right.

    Attributes:
        around: (k,) the sequence; ``fixed``: those words, by place.
        sets: of each place, the words that it may have.
        outside: (words of all sets + 1, n) what lies outside the span at the fixed places, in random coordinates: of
            the sequence itself, then with each of the words in it.
    """

    around: Tensor
    fixed: Mapping[int, int]
    sets: Sequence[Tensor]
    outside: Tensor

    def without(self, place: int, words: set[int]) -> Linearised | None:
        """Return the layer with fewer words at a place; None if there are none left."""
        kept = torch.tensor([word not in words for word in self.sets[place].tolist()])
        if not kept.any():
            return None
        rows = [*self.outside[1:].split([len(each) for each in self.sets])]
        rows[place] = rows[place][kept]
        sets = [each[kept] if at == place else each for at, each in enumerate(self.sets)]
        return replace(self, sets=sets, outside=torch.cat([self.outside[:1], *rows]))

    def weigh(self) -> tuple[list[Tensor], float]:
        """Return of each place the weights of its words, and the share of what lies outside that they leave.

        Weights are at least 0 and, at each place, 1 in all. What one sequence explains gives its words weight 1.
        """
        base, moves = self.outside[0], self.outside[1:] - self.outside[0]
        scale = float(moves.norm(dim=1).mean().clamp(min=1e-30))
        owner = torch.cat([torch.full((len(words),), place) for place, words in enumerate(self.sets)])
        one = 10 * (owner == torch.arange(len(self.sets))[:, None]).to(moves)
        left = torch.cat([moves.T / scale, one])
        right = torch.cat([-base / scale, 10 * one.new_ones(len(one))])
        weights = torch.from_numpy(nnls(left.cpu().numpy(), right.cpu().numpy(), maxiter=20 * len(owner))[0]).to(moves)
        rest = float((base + moves.T @ weights).norm() / base.norm().clamp(min=1e-30))
        return [*weights.split([len(words) for words in self.sets])], rest


@dataclass(frozen=True, order=True)
class _Guess:
    """Where the linearised layer leads to; the least ``rest``, the share outside the span, is followed first."""

    rest: float
    number: int
    layer: Linearised = field(compare=False)
    weights: Sequence[Tensor] = field(compare=False)
    depth: int = field(compare=False)


@dataclass
class _Whole:
    """The search for an encoder's sequences as it goes on.

    Attributes:
        coordinates: (width, n) by which what lies outside the span is compared.
        inside: those found whose vectors all lie in the span, with their mean distance; ``near``: the others.
        roots: layers with no word fixed but the first.
        guesses: that weren't followed yet, a heap.
        seen: sequences at which the layer was linearised, and which of their places were fixed.
    """

    search: Search
    coordinates: Tensor
    left: int
    inside: dict[tuple[int, ...], float] = field(default_factory=dict)
    near: dict[tuple[int, ...], float] = field(default_factory=dict)
    roots: list[Linearised] = field(default_factory=list)
    guesses: list[_Guess] = field(default_factory=list)
    made: int = 0
    seen: set[tuple[tuple[int, ...], frozenset[int]]] = field(default_factory=set)

    @property
    def open(self) -> bool:
        """Whether sequences are missing and may still be tried."""
        return self.left > 0 and len(self.inside) < self.search.count

    def keep(self, tokens: Tensor) -> None:
        """Sort sequences (n, k) into those inside and those near."""
        self.left -= len(tokens)
        distances = self.search.distances(self.search.filled(tokens))[:, : tokens.shape[1]]
        for row, own in zip(tokens.tolist(), distances, strict=True):
            (self.inside if bool((own <= 1).all()) else self.near)[tuple(row)] = float(own.mean())

    def linearised(self, around: Tensor, fixed: Mapping[int, int], sets: Sequence[Tensor]) -> Linearised:
        """Return the layer linearised at a sequence (k,) that is given the fixed words."""
        around = around.clone()
        for place, word in fixed.items():
            around[place] = word
        sets = [words.new_tensor([fixed[place]]) if place in fixed else words for place, words in enumerate(sets)]
        place_of = torch.cat([torch.full_like(words, place) for place, words in enumerate(sets)])
        tried = around.repeat(len(place_of) + 1, 1)
        tried[torch.arange(1, len(tried)), place_of] = torch.cat(sets)
        self.left -= len(tried)
        outside = self.search.outside(self.search.filled(tried), [*fixed]) @ self.coordinates
        return Linearised(around, fixed, sets, outside.flatten(1))

    def add(self, layer: Linearised, depth: int) -> None:
        """Note where a layer leads to, if any words explain what lies outside the span."""
        weights, rest = layer.weigh()
        if rest <= _EXPLAINED:
            heappush(self.guesses, _Guess(rest, self.made, layer, weights, depth))
            self.made += 1

    def begin(self, sets: Sequence[Tensor], generator: torch.Generator) -> None:
        """Linearise the layer at random sequences, new ones, with each word fixed at the place that has fewest."""
        place = min(range(len(sets)), key=lambda at: len(sets[at]))
        for word in sets[place].tolist():
            if not self.open:
                return
            drawn = [words[int(torch.randint(len(words), (1,), generator=generator))] for words in sets]
            root = self.linearised(torch.stack(drawn), {place: word}, sets)
            self.roots.append(root)
            known = [row for row in self.inside if len(row) == len(sets) and row[place] == word]
            if not known:
                self.add(root, 0)
            for at in range(len(sets)):
                less = root.without(at, {row[at] for row in known}) if known and at != place else None
                if less is not None:
                    self.add(less, 0)

    def follow(self) -> None:
        """Try the sequence that the best guess leads to; then what is less certain of it is guessed."""
        guess = heappop(self.guesses)
        layer = guess.layer
        best = torch.stack([words[each.argmax()] for words, each in zip(layer.sets, guess.weights, strict=True)])
        row, before = tuple(best.tolist()), dict(self.inside)
        if row not in self.inside:
            self.keep(best[None])
        if row in self.inside and row not in before:
            self._unlike(row, before)
        second = [float(each.sort().values[-2]) if len(each) > 1 else 0.0 for each in guess.weights]
        place = max(range(len(second)), key=lambda at: second[at])
        if guess.depth + 1 == _DEPTH:
            return
        if second[place] > _LIKELY:
            for word in layer.sets[place][guess.weights[place] > _LIKELY].tolist():
                self._again(best, {**layer.fixed, place: word}, guess)
        elif row not in self.inside:
            self._again(best, layer.fixed, guess)

    def _again(self, around: Tensor, fixed: Mapping[int, int], guess: _Guess) -> None:
        """Linearise the layer where a guess led to, if it wasn't there, and add what comes of it."""
        key = tuple(fixed.get(place, word) for place, word in enumerate(around.tolist())), frozenset(fixed)
        if self.open and key not in self.seen:
            self.seen.add(key)
            self.add(self.linearised(around, fixed, guess.layer.sets), guess.depth + 1)

    def _unlike(self, row: tuple[int, ...], before: Mapping[tuple[int, ...], float]) -> None:
        """Guess what else there is of a new sequence's length, with other words than those found have at a place."""
        for root in self.roots:
            if len(root.sets) != len(row) or any(row[place] != word for place, word in root.fixed.items()):
                continue
            for place in range(len(row)):
                known = {other[place] for other in before if len(other) == len(row)}
                if place not in root.fixed and row[place] not in known:
                    less = root.without(place, known | {row[place]})
                    if less is not None:
                        self.add(less, 0)


def whole_sequences(
    search: Search,
    lengths: Sequence[int],
    end: int | None,
    tries: int,
    generator: torch.Generator,
    progress: Callable[[int, int], None],
) -> tuple[Tensor, Tensor]:
    """Return (m, length) the sequences of an encoder, and (m,) their mean distances from the span.

    Of a length, all combinations are tried where they are few. Else the words are looked for that, together, bring the
    vector of one word into the span: each changes what lies outside by an amount of its own, nearly, so their weights
    come from non-negative least squares, in which each place has a weight of 1. Where several words of a place have
    weight, there are several such sequences, and each of the words is tried. The result is checked by the layer itself.
    What is missing in the end is filled up by the nearest that aren't inside, if they are unlike those that are.
    ``end`` is the token at the end of shorter ones.
    """
    _, span = search.second
    coordinates = torch.randn(span.width, _COORDINATES, generator=generator, dtype=torch.float64).to(span.basis.device)
    state = _Whole(search, coordinates, tries)
    state.search = replace(search, found=_likely(state, generator))
    open_ = []
    for length in sorted(lengths):
        sets = _options(state.search, length, end)
        if min(map(len, sets)) > 0 and math.prod(map(len, sets)) <= min(_ALL, state.left):
            state.keep(torch.cartesian_prod(*sets).view(-1, length))
        elif min(map(len, sets)) > 0:
            open_.append(sets)
    failed = 0
    while open_ and state.open and failed < _FAILURES:
        before = len(state.inside)
        for sets in open_:
            state.begin(sets, generator)
        while state.guesses and state.open:
            progress(tries - state.left, tries)
            state.follow()
        failed = failed + 1 if len(state.inside) == before else 0
    chosen = sorted(state.inside.items(), key=lambda item: item[1])[: search.count]
    for row, distance in sorted(state.near.items(), key=lambda item: item[1]):
        if len(chosen) == search.count:
            break
        if all(_same(row, other) < _ALIKE for other, _ in chosen):
            chosen.append((row, distance))
    device = span.basis.device
    return stacked(search, [(torch.tensor(row, device=device), distance) for row, distance in chosen])


def _likely(state: _Whole, generator: torch.Generator) -> list[Tensor]:
    """Return for each place the words that lie nearest to the span whatever stands around them.

    What a word's own part leaves outside is there in any context, so words that weren't in the batch leave more
    outside, on average. All places together keep twice as many words as the span has dimensions: each word of the batch
    has one, at least.
    """
    found = state.search.found
    most = max(map(len, found))
    filled = [words if len(words) else words.new_tensor([state.search.filler]) for words in found]
    sizes = [torch.zeros(_CONTEXTS, len(words), dtype=torch.float64) for words in filled]
    for context in range(_CONTEXTS):
        orders = [torch.randperm(len(words), generator=generator).repeat(most)[:most] for words in filled]
        rows = torch.stack([words[order.to(words.device)] for words, order in zip(filled, orders, strict=True)], dim=1)
        state.left -= most
        outside = state.search.outside(rows, range(len(found))).norm(dim=2).cpu()
        for place, order in enumerate(orders):
            sizes[place][context, order] = outside[:, place]
    means = [size.mean(dim=0)[: len(words)] for size, words in zip(sizes, found, strict=True)]
    every = torch.cat(means).sort().values
    limit = every[min(2 * state.search.second[1].rank, len(every)) - 1] if len(every) else math.inf
    return [words[(mean <= limit).to(words.device)] for words, mean in zip(found, means, strict=True)]


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
