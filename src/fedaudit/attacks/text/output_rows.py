"""Sequences of a decoder read off its output layer's gradient, word by word: more of them than the model is wide."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from scipy.optimize import nnls
from torch import Tensor, nn

from fedaudit.attacks.text.layers import Receiver, inputs_of
from fedaudit.modalities import NOTHING, TokenInfo

EXPLAINED = 1e-4  # of the gradient: what exact sequences leave is rounding
_PASSES = 10
_CONTEXTS = 4  # in which a word at a place is looked at
_STANDS_OUT = 1.5  # times the median: how long the row of a word is that only follows
_SURE = 0.5  # of one occurrence
_LEAST_COUNT, _MOST_COUNT = 0.75, 1.33  # of the first estimate of how many words follow others


@dataclass(frozen=True)
class OutputRows:
    """An output layer's gradient and what is known beside it.

    With the logits W·x of the vector x_t at each place t, whose next word is y_t, the rows of the gradient of W are
    N·g_v = Σ_t p_t(v) x_t − Σ_{t: y_t = v} x_t, where p_t are the model's probabilities and N is how many places have a
    next word. A place's vector depends on the words before it alone, so what the gradient is made of are known vectors,
    one for each prefix: of each row few, since few places have the same next word. So it isn't their number in all that
    must be less than the width, but the number in a row.

    Attributes:
        gradient: (vocabulary, width) of its weights, float64.
        words: (k,) tokens that others follow: those whose rows of the embedding's gradient aren't zero.
        tokens: what everybody knows of them.
    """

    module: nn.Module
    layer: Receiver
    gradient: Tensor
    words: Tensor
    tokens: TokenInfo
    length: int
    count: int

    def vectors(self, sequences: Tensor) -> Tensor:
        """Return (n, k, width) what the output layer receives of sequences (n, k), float64."""
        filled = nn.functional.pad(sequences, (0, self.length - sequences.shape[1]), value=int(self.words[0]))
        return inputs_of(self.module, self.layer, filled)[:, : sequences.shape[1]].to(torch.float64)

    def probabilities(self, vectors: Tensor) -> Tensor:
        """Return (n, vocabulary) those that the model gives after vectors (n, width)."""
        layer = self.module.get_submodule(self.layer.name)
        with torch.no_grad():
            return torch.as_tensor(layer(vectors.to(torch.float32))).to(torch.float64).softmax(dim=1)

    def following(self) -> Tensor:
        """Return (r,) the tokens that may follow others: those that others follow, the end, and rows that stand out."""
        norms = self.gradient.norm(dim=1)
        may = torch.zeros(len(norms), dtype=torch.bool, device=norms.device)
        may[self.words] = True
        if not bool(may.all()):
            may |= norms > _STANDS_OUT * norms[~may].median()
        if self.tokens.end is not None:
            may[self.tokens.end] = True
        if self.tokens.padding is not None:
            may[self.tokens.padding] = False
        return may.nonzero()[:, 0]

    def atoms(self, found: Tensor | None, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Return (m, width) vectors that the gradient may be made of, and (m,) their places, from 0.

        Each word at each place, in the mean of a few contexts; these are of the sequences found before, if there are
        any, whose own vectors are there, too. At the first place there is no context: these are exact.
        """
        drawn = torch.randint(len(self.words), (_CONTEXTS, self.length), generator=generator)
        contexts = self.words[drawn.to(self.words.device)]
        if found is not None:
            rows = found[torch.randint(len(found), (_CONTEXTS,), generator=generator).to(found.device)]
            contexts = rows.where(torch.isin(rows, self.words), contexts)
        parts, places = [], []
        for place in range(self.length - 1):
            tried = contexts[:, None, : place + 1].repeat(1, len(self.words), 1)
            tried[:, :, place] = self.words
            seen = self.vectors(tried.flatten(0, 1))[:, place]
            parts.append(seen.view(_CONTEXTS, len(self.words), -1).mean(dim=0))
            places.append(torch.full((len(self.words),), place))
        for place in range(1, self.length - 1) if found is not None else ():
            assert found is not None
            rows = found[:, : place + 1].unique(dim=0)
            rows = rows[torch.isin(rows, self.words).all(dim=1)]
            if len(rows):
                parts.append(self.vectors(rows)[:, place])
                places.append(torch.full((len(rows),), place))
        return torch.cat(parts), torch.cat(places)

    def rest(self, sequences: Tensor) -> float:
        """Return the share of the gradient that sequences (n, length) leave: 0 where they are all those it is of."""
        targets = self.tokens.following(sequences)
        asked = targets != NOTHING
        vectors, words = self.vectors(sequences)[asked], targets[asked]
        weights = self.probabilities(vectors)
        weights[torch.arange(len(words)), words] -= 1
        made = weights.T @ vectors / max(len(words), 1)
        return float((made - self.gradient).norm() / self.gradient.norm().clamp(min=1e-30))


def read_rows(
    rows: OutputRows, generator: torch.Generator, progress: Callable[[int, int], None]
) -> tuple[Tensor, float]:
    """Return (count, length) sequences, filled up, and the share of the gradient that they leave.

    First each row is explained by vectors of words at places in any context, by non-negative least squares. Then
    sequences grow from the left: what a prefix is followed by are the rows that need its vector, which is exact, and
    what is right of it is still explained in any context. The result is looked at again in its own contexts, until
    nothing of the gradient is left, or a few times.
    """
    best: tuple[Tensor, float] | None = None
    found: Tensor | None = None
    for turn in range(_PASSES):
        progress(turn, _PASSES)
        found = _grown(rows, *rows.atoms(found, generator))
        rest = rows.rest(found)
        if best is None or rest < best[1]:
            best = found, rest
        if rest < EXPLAINED:
            break
    assert best is not None
    return best


def _grown(rows: OutputRows, atoms: Tensor, places: Tensor) -> Tensor:
    """Return (count, length) sequences, grown word by word from the first."""
    words = rows.following()
    weights, needed, total = _explained(rows, atoms, places, words)
    first = places[: len(rows.words)] == 0
    often = weights[:, : len(rows.words)].sum(dim=0) * total
    assert bool(first.all())
    prefixes = _shared((), often, rows.words, rows.count)
    explained, ended = torch.zeros_like(needed), list[tuple[int, ...]]()
    for place in range(1, rows.length):
        if not prefixes:
            break
        every = [*prefixes]
        own = rows.vectors(torch.tensor(every, device=rows.words.device))[:, -1]
        later = places >= place
        shares = torch.stack(
            [
                _nonnegative(torch.cat([own, atoms[later & (row > 0)]]), wanted)[: len(own)]
                for row, wanted in zip(weights, needed - explained, strict=True)
            ],
            dim=1,
        )
        grown: dict[tuple[int, ...], int] = {}
        for prefix, vector, share in zip(every, own, shares, strict=True):
            stops = rows.tokens.end is None and rows.tokens.padding is not None
            for longer, times in _shared(prefix, share, words, prefixes[prefix], _SURE if stops else 0).items():
                if longer == prefix:
                    ended += [prefix] * times
                    continue
                explained[words == longer[-1]] += times * vector
                if longer[-1] == rows.tokens.end or len(longer) == rows.length:
                    ended += [longer] * times
                else:
                    grown[longer] = grown.get(longer, 0) + times
        prefixes = grown
    ended += [prefix for prefix, times in prefixes.items() for _ in range(times)]
    filled = torch.full((len(ended), rows.length), rows.tokens.padding or 0, dtype=torch.int64)
    for row, sequence in zip(filled, ended, strict=True):
        row[: len(sequence)] = torch.tensor(sequence)
    return filled.to(rows.words.device)


def _explained(rows: OutputRows, atoms: Tensor, places: Tensor, words: Tensor) -> tuple[Tensor, Tensor, int]:
    """Return (r, m) how much of each vector each row holds, (r, width) what is to be explained, and N.

    What is to be explained is N·(−g_v) + Σ_t p_t(v) x_t, the sum being taken from the vectors that explain the rows.
    How many places have a next word, N, is told by the first places, of which each sequence has one, and by the rows,
    each of which holds whole vectors.
    """
    likely = rows.probabilities(atoms)
    others = torch.ones(len(rows.gradient), dtype=torch.bool, device=words.device)
    others[words] = False
    mean = likely.mean(dim=0)
    expected = torch.zeros_like(rows.gradient[words])
    if bool(others.any()):  # rows of what follows nothing are such sums alone, nearly of one direction
        expected = mean[words][:, None] * (rows.gradient[others] / mean[others][:, None]).mean(dim=0)
    for _ in range(2):
        wanted = expected - rows.gradient[words]
        weights = torch.stack([_nonnegative(atoms, one) for one in wanted])
        often = weights.sum(dim=0)
        expected = (likely[:, words] * often[:, None]).T @ atoms
    total = rows.count / max(float(often[places == 0].sum()), 1e-30)
    held = weights.sum(dim=1)
    counts = range(max(int(_LEAST_COUNT * total), rows.count), int(_MOST_COUNT * total) + 2)
    best = min(counts, key=lambda n: float((n * held - (n * held).round().clamp(min=1)).abs().mean()))
    return weights, best * (expected - rows.gradient[words]), best


def _nonnegative(atoms: Tensor, wanted: Tensor) -> Tensor:
    """Return (m,) the weights, at least 0, by which atoms (m, width) make a vector (width,), as nearly as they can."""
    found, _ = nnls(atoms.T.cpu().numpy(), wanted.cpu().numpy(), maxiter=20 * len(atoms))
    return torch.from_numpy(found).to(wanted)


def _shared(
    prefix: tuple[int, ...], often: Tensor, words: Tensor, times: int, least: float = 0
) -> dict[tuple[int, ...], int]:
    """Return prefixes with one of the words (k,) behind, and how often each, ``times`` in all, by weights (k,).

    The prefix itself, where the largest weight that is left is below ``least``.
    """
    left, found = often.clone(), dict[tuple[int, ...], int]()
    for _ in range(times):
        at = int(left.argmax())
        longer = prefix if float(left[at]) < least else (*prefix, int(words[at]))
        left[at] -= 1
        found[longer] = found.get(longer, 0) + 1
    return found
