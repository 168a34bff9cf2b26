"""SOMP: the sequences of a decoder whose gradients add up to the update, each grown token by token."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated

import numpy as np
import torch
from pydantic import Field
from scipy.optimize import nnls
from torch import Tensor, nn

from fedaudit.attacks.base import Attack, Case, Progress, register
from fedaudit.attacks.findings import SequenceFinding
from fedaudit.attacks.local_training import Way
from fedaudit.attacks.text.layers import inputs_of, receivers, takes
from fedaudit.attacks.victim import need_training, sent_model
from fedaudit.modalities import NOTHING, TokenInfo
from fedaudit.transcript.observation import Message, Observation
from fedaudit.utils.errors import NotApplicable

_LEAST = 0.1  # of the greatest singular value: directions below are weighed by their size, not evened out
_ENDS = 0.3  # of the best first pair's score: a token with less ends its sequence
_STEP = 1e-4  # of the weights' length, by which central differences move them, in float64
_COORDINATES = 2_000_000  # of the gradient, in which candidates are fitted
_NUMBERS = 2**24  # of a pass's logits at once
_FITTED = 8  # candidates of a search whose gradients are computed
_LIKELY = 8  # tokens that are tried in place of one that was found
_MOVES = 10  # changes of one sequence
_CROSSINGS = 500  # pairs of sequences whose ends are exchanged, in a pass
_FIRST = 2048  # words that are tried as the first one, when a sequence is grown
_CHANGED = 256  # of these, when it is changed
_FEW = 16  # examples in an update, up to which an audit plays this attack of itself
_ROUNDING = 1e-3  # of the update: so little left means that everything was found
_BY_CHANCE = 0.01  # probability that noise alone has a sequence, of all that there are of its length, that fits so well


@register
class Somp(Attack):
    """Orthogonal matching pursuit over sequences (Li and Li 2026).

    The update of a batch is a sum of its sequences' gradients. Sequences are looked for one after the other; each time
    the one is taken that, fitted together with those found before by least squares with weights of at least 0, leaves
    least of the update, and what is left is searched for the next. In the end each sequence is looked for again in
    what the others leave, ``passes`` times.

    A sequence is grown from its first token, ``beam`` prefixes at a time. A prefix followed by a token adds one place's
    gradient to the update; how well that fits is its inner product with the update, which is the derivative of the
    token's loss along the update: two passes through the model tell it for all prefixes and all tokens at once. Places'
    gradients resemble each other, so the update is whitened first: the singular values of each weight's gradient are
    inverted or evened out, down to where noise begins (of white noise, Marchenko and Pastur's edge), so that a token
    counts in the context alone that it had. The inverse is exact, the other bears more noise; what leaves less is told.
    The gradients of all layers count together, so there may be more tokens than one layer's span has dimensions, as
    with adapters of low rank (LoRA), and noise may hide every single span, where
    :class:`~fedaudit.attacks.text.dager.Dager` ends.

    Departures: what is known here of the paper is its outline (tokens filtered by the spans of attention's heads,
    sentences decoded from them with a language model's help, sparse fits of their gradients). Here the derivative takes
    the place of filter and language model; tokens of what was found are changed, added and left out, and the ends of
    two sequences exchanged, as long as the fit gets better. A sequence is told if its share stands further out of what
    is unexplained than the best of all sequences of its length would, in 99 of 100 cases, if that were white noise (a
    union bound).

    What it can't tell: sequences whose loss counts part of the tokens only (labels masked to an answer) are found
    badly, since what isn't asked for has no gradient of its own; and so are texts of one template in adapters with
    fewer ranks than the texts have places, which whitening doesn't tell apart. Where no noise was added, DAGER is
    sooner and surer. It costs half a minute of a core for an update of four short notes by a model of width 256, and
    grows with the square of the sequences; so an audit that chooses attacks itself takes it where clients add noise to
    updates of up to 16 examples. Elsewhere it runs where it is named.

    Args:
        beam: prefixes that are kept.
        passes: over all sequences found, each looked for again in what the others leave.
    """

    name = "somp"
    summary = "sequences whose gradients add up to the update, behind noise and beyond adapters' rank, too"
    paper = "Li and Li 2026, SOMP (arXiv 2603.16761)"
    threat_model = "server or eavesdropper, passive"
    needs = ("a model that predicts the next token",)
    examples = ("tokens",)
    recovers = "training sequences"
    finds = SequenceFinding

    beam: Annotated[int, Field(ge=1, le=1000)] = 32
    passes: Annotated[int, Field(ge=0, le=100)] = 1

    @classmethod
    def fits(cls, case: Case) -> bool:
        return case.updates_alone and case.next_token and case.knows_scale and case.noisy and case.examples <= _FEW

    def check(self, observation: Observation) -> None:
        """Raise unless the model predicts the next token."""
        super().check(observation)
        need_training(self.name, observation)
        if not observation.task_info.causal:
            asked = observation.task_info.asked
            raise NotApplicable(f"{self.name} needs a model that predicts the next token; this one predicts {asked}")

    def ways(self, _observation: Observation, _message: Message) -> Sequence[Way]:
        """Return the fit of one batch's gradient."""
        return ("one batch",)

    def _run(
        self, observation: Observation, generator: torch.Generator, device: str, progress: Progress
    ) -> SequenceFinding:
        message, task_info = observation.single(), observation.task_info
        assert task_info.tokens is not None
        module, gradient, notes = sent_model(observation, device)
        blank = task_info.blank(2)[0].to(device)
        first = _first_words(module, blank, gradient, task_info.tokens)
        pursuit = Pursuit(
            module.double(),
            gradient,
            task_info.tokens,
            first,
            blank.shape[1],
            self.beam,
            takes(module, blank[:1, :1]),
            generator,
        )
        found, rest = pursuit.run(message.update.num_examples, self.passes, progress)
        if found:
            all_of_it = ", which is rounding: it is all that there was" if rest < _ROUNDING else ""
            notes.append(f"what was found leaves {rest:.2g} of the update's gradient{all_of_it}")
        else:
            notes.append("nothing was found that fits the update better than the best of all sequences fits noise")
        return SequenceFinding(sequences=pursuit.stacked(found).cpu(), notes=tuple(notes))


@dataclass
class _Found:
    """A sequence, and its gradient in the coordinates of the fit."""

    tokens: list[int]
    gradient: Tensor


@dataclass
class Pursuit:
    """What the pursuit works with.

    Attributes:
        module: in float64 and evaluation mode.
        gradient: of the update, by parameter.
        first: (k,) the words that may begin a sequence, the likeliest first.
        short: the model takes shorter sequences than (n, length), too.
        along: direction of which derivatives are taken, by parameter; ``step``: by how much of it the weights move.
        ends: score below which a token ends its sequence.
        inverted: how updates are whitened.
    """

    module: nn.Module
    gradient: Mapping[str, Tensor]
    tokens: TokenInfo
    first: Tensor
    length: int
    beam: int
    short: bool
    generator: torch.Generator
    along: dict[str, Tensor] = field(default_factory=dict)
    step: float = 0.0
    ends: float = 0.0
    inverted: bool = True

    def __post_init__(self) -> None:
        self.weights = {name: p.detach() for name, p in self.module.named_parameters()}
        self.gradient = {name: g.double() for name, g in self.gradient.items() if name in self.weights}
        share = _COORDINATES / max(1, sum(g.numel() for g in self.gradient.values()))
        self._coordinates = {
            name: torch.randperm(g.numel(), generator=self.generator)[: max(1, int(share * g.numel()))].to(g.device)
            for name, g in self.gradient.items()
            if share < 1
        }
        self._whole = self._told(self.gradient)

    def run(self, count: int, passes: int, progress: Progress) -> tuple[list[list[int]], float]:
        """Return the sequences found, ``count`` at most, and the share of the update that they leave."""
        found, least = list[_Found](), 2.0
        for self.inverted in (True, False):
            made = self._pursued(count, passes, progress)
            rest = self._fit([f.gradient for f in made])[1]
            if rest < least:
                found, least = made, rest
            if least < _ROUNDING:
                break
        progress(1, 1)
        return [f.tokens for f in self._sure(found, least)], least

    def _sure(self, found: Sequence[_Found], rest: float) -> list[_Found]:
        """Return those whose share in the fit stands out of what is unexplained, taken for white noise."""
        if not found:
            return []
        every = torch.stack([f.gradient for f in found])
        inner = (every @ every.T).cpu()
        spread = torch.linalg.pinv(inner).diagonal().clamp(min=0).sqrt()  # of the shares, for noise of deviation 1
        deviation = rest * float(self._whole.norm()) / math.sqrt(len(self._whole))
        shares = self._fit([f.gradient for f in found])[0]
        least = [self._by_chance(len(f.tokens)) * deviation for f in found]
        return [f for f, share, wide, most in zip(found, shares, spread, least, strict=True) if share > most * wide]

    def _pursued(self, count: int, passes: int, progress: Progress) -> list[_Found]:
        """Return what is found one after the other, then looked for again."""
        found: list[_Found] = []
        turns = count * (1 + passes)
        before = 0 if self.inverted else turns
        for turn in range(count):
            progress(before + turn, 2 * turns)
            best = self._next(found)
            if best is None:
                break
            found.append(best)
            if self._fit([f.gradient for f in found])[1] < _ROUNDING:
                return found
        for turn in range(len(found) * passes):
            progress(before + count + turn, 2 * turns)
            place = turn % len(found)
            others = found[:place] + found[place + 1 :]
            found[place] = self._next(others, found[place].tokens) or found[place]
            if place == len(found) - 1:
                self._cross(found)
        return found

    def _by_chance(self, length: int) -> float:
        """Return how many deviations the best of all sequences of a length stands out of noise, in 99 of 100 cases."""
        return math.sqrt(2 * (length * math.log(self.tokens.vocabulary) - math.log(_BY_CHANCE)))

    def stacked(self, sequences: Sequence[Sequence[int]]) -> Tensor:
        """Return (n, length) the sequences, filled up."""
        filler = 0 if self.tokens.padding is None else self.tokens.padding
        rows = torch.full((len(sequences), self.length), filler)
        for row, tokens in zip(rows, sequences, strict=True):
            row[: len(tokens)] = torch.tensor(tokens)
        return rows.to(next(iter(self.weights.values())).device)

    def _targets(self, sequences: Sequence[Sequence[int]], rows: Tensor) -> Tensor:
        """Return (n, length) the token that follows each, and ``NOTHING`` behind a sequence's last."""
        targets = torch.full_like(rows, NOTHING)
        for target, row, tokens in zip(targets, rows, sequences, strict=True):
            target[: len(tokens) - 1] = row[1 : len(tokens)]
        return targets

    # --- derivatives ------------------------------------------------------------------------------------------------

    def aim(self, left: Mapping[str, Tensor]) -> None:
        """Take derivatives along what is left of the update, whitened, from now on."""
        self.along = {n: whitened(g, inverted=self.inverted) for n, g in left.items() if g.ndim == 2 and bool(g.any())}
        size = math.sqrt(sum(float(w.square().sum()) for w in self.weights.values()))
        self.step = _STEP * size / max(math.sqrt(sum(float(a.square().sum()) for a in self.along.values())), 1e-300)

    @torch.no_grad()
    def derivatives(self, rows: Tensor) -> Tensor:
        """Return (n, vocabulary, length) by how much each token's loss changes along the direction, at each place."""
        moved = []
        for sign in (1, -1):
            weights = {
                name: w + sign * self.step * self.along[name] if name in self.along else w
                for name, w in self.weights.items()
            }
            moved.append(torch.func.functional_call(self.module, weights, (rows,)).log_softmax(dim=1))
        return torch.as_tensor((moved[1] - moved[0]) / (2 * self.step))

    def _scores(self, rows: Tensor, place: int) -> Tensor:
        """Return (n, vocabulary) the scores of the tokens behind ``place`` of sequences (n, k); padding is none."""
        if not self.short:
            rows = nn.functional.pad(rows, (0, self.length - rows.shape[1]), value=self._filler)
        scores = self.derivatives(rows)[:, :, place]
        if self.tokens.padding is not None:
            scores[:, self.tokens.padding] = -torch.inf
        return scores

    @property
    def _filler(self) -> int:
        return 0 if self.tokens.padding is None else self.tokens.padding

    # --- candidates -------------------------------------------------------------------------------------------------

    def _next(self, others: Sequence[_Found], *known: list[int]) -> _Found | None:
        """Return the sequence that, beside others, leaves least, ``known`` ones included; None: none helps."""
        self.aim(self._left(others))
        return self._best(others, [*known, *self._grown()])

    def _grown(self) -> list[list[int]]:
        """Return the sequences whose tokens have the highest scores, the best first."""
        device = next(iter(self.weights.values())).device
        prefixes = self.first[:, None]
        sums = torch.zeros(len(prefixes), dtype=torch.float64, device=device)
        best: list[tuple[float, list[int]]] = []
        words = self.tokens.vocabulary
        for place in range(self.length - 1):
            sums, order = self._likeliest(prefixes, sums, place)
            kept = self._various(prefixes[order // words, 0].tolist(), self.beam)
            kept = [i for i in kept if sums[i] > -torch.inf]
            if not kept:
                break
            sums, order = sums[kept], order[kept]
            prefixes = torch.cat([prefixes[order // words], (order % words)[:, None]], dim=1)
            best += zip(sums.tolist(), prefixes.tolist(), strict=True)
            if float(sums.max()) < max(best)[0] - _MOVES * self.ends:
                break
        ranked = [tokens for _, tokens in sorted(best, key=lambda each: -each[0])]
        return [ranked[i] for i in self._various([tokens[0] for tokens in ranked], _FITTED)]

    def _likeliest(self, prefixes: Tensor, sums: Tensor, place: int) -> tuple[Tensor, Tensor]:
        """Return the highest scores of prefixes (n, k) with a token more, and which these are, by prefix and token."""
        most, chunk = 4 * self.beam, max(1, _NUMBERS // (self.length * self.tokens.vocabulary))
        tops, orders = list[Tensor](), list[Tensor]()
        for start in range(0, len(prefixes), chunk):
            part = prefixes[start : start + chunk]
            scores = self._scores(part, place)
            if self.tokens.end is not None:
                scores[part[:, -1] == self.tokens.end] = -torch.inf
            top, order = (sums[start : start + chunk, None] + scores).flatten().topk(min(most, scores.numel()))
            tops.append(top)
            orders.append(order + start * self.tokens.vocabulary)
        top, order = torch.cat(tops), torch.cat(orders)
        top, best = top.topk(min(most, len(top)))
        if place == 0:
            self.ends = _ENDS * float(top[0])
        return top - self.ends, order[best]

    @staticmethod
    def _various(first: Sequence[int], most: int) -> list[int]:
        """Return the places of those that are kept, in order: half of them, at most, begin with the same word."""
        kept: list[int] = []
        begun = Counter[int]()
        for place, word in enumerate(first):
            if begun[word] < -(-most // 2) and len(kept) < most:
                kept.append(place)
                begun[word] += 1
        return kept

    def _variants(self, tokens: Sequence[int]) -> list[list[int]]:
        """Return the likeliest sequences that differ from one by a token: another, one more, one less, or an end."""
        scores = self.derivatives(self.stacked([tokens]))[0]
        if self.tokens.padding is not None:
            scores[self.tokens.padding] = -torch.inf
        likely = [[], *scores.topk(min(_LIKELY, len(scores)), dim=0).indices.T.tolist()]
        row = [*tokens]
        made = [[*row[:at], word, *row[at + 1 :]] for at in range(1, len(row)) for word in likely[at]]
        made += [[word, *row[1:]] for word in self.first[:_CHANGED].tolist()]
        made += [row[:at] for at in range(2, len(row))] + [[*row[:at], *row[at + 1 :]] for at in range(len(row))]
        if len(row) < self.length:
            made += [[*row[:at], word, *row[at:]] for at in range(1, len(row) + 1) for word in likely[at]]
        made = [each for each in made if each != row and len(each) > 1]
        totals: list[Tensor] = []
        chunk = max(1, _NUMBERS // (self.length * self.tokens.vocabulary))
        for start in range(0, len(made), chunk):
            part = made[start : start + chunk]
            rows = self.stacked(part)
            targets = self._targets(part, rows)
            own = self.derivatives(rows).gather(1, targets.clamp(min=0)[:, None])[:, 0] - self.ends
            totals.append(own.where(targets != NOTHING, 0.0).sum(dim=1))
        every = torch.cat(totals) if totals else torch.zeros(0)
        return [made[i] for i in every.topk(min(_FITTED, len(made))).indices.tolist()]

    # --- fits -------------------------------------------------------------------------------------------------------

    def _best(self, others: Sequence[_Found], candidates: Sequence[list[int]]) -> _Found | None:
        """Return the candidate that, beside others, leaves least, changed as long as that helps; None: none helps."""
        beside = [f.gradient for f in others]
        least, best = self._fit(beside)[1], None
        for _ in range(_MOVES + 1):
            before = best
            for tokens in candidates:
                made = _Found(tokens, self._told(self._gradient_of([tokens], torch.ones(1))))
                rest = self._fit([*beside, made.gradient])[1]
                if rest < least * (1 - 1e-12):
                    least, best = rest, made
            if best is None or best is before:
                break
            candidates = self._variants(best.tokens)
        return best

    def _cross(self, found: list[_Found]) -> None:
        """Exchange the ends of two sequences where that leaves less; changes of single words don't lead there."""
        tries = [
            (i, j, cut) for i, j in itertools.combinations(range(len(found)), 2) for cut in range(1, self.length - 1)
        ]
        least = self._fit([f.gradient for f in found])[1]
        for at in torch.randperm(len(tries), generator=self.generator)[:_CROSSINGS].tolist():
            i, j, cut = tries[at]
            one, other = found[i].tokens, found[j].tokens
            if min(len(one), len(other)) <= cut or one[:cut] == other[:cut] or one[cut:] == other[cut:]:
                continue
            pair = [
                _Found(row, self._told(self._gradient_of([row], torch.ones(1))))
                for row in (one[:cut] + other[cut:], other[:cut] + one[cut:])
            ]
            made = [*found]
            made[i], made[j] = pair
            rest = self._fit([f.gradient for f in made])[1]
            if rest < least * (1 - 1e-12):
                least, found[:] = rest, made

    def _fit(self, gradients: Sequence[Tensor]) -> tuple[Tensor, float]:
        """Return (n,) the shares of gradients in the update, at least 0, and what they leave of it."""
        if not gradients:
            return torch.zeros(0), 1.0
        every = torch.stack([*gradients, self._whole])
        products = (every @ every.T).cpu().numpy()
        inner, outer = products[:-1, :-1], products[:-1, -1]
        factor = np.linalg.cholesky(inner + 1e-12 * inner.trace() * np.eye(len(inner)))
        shares = nnls(factor.T, np.linalg.solve(factor, outer))[0]
        left = self._whole - torch.from_numpy(shares).to(every) @ every[:-1]
        return torch.from_numpy(shares), float(left.norm() / self._whole.norm())

    def _gradient_of(self, sequences: Sequence[list[int]], shares: Tensor) -> dict[str, Tensor]:
        """Return the gradient of the sequences' losses, by their shares."""
        rows = self.stacked(sequences)
        weights = {name: w.requires_grad_(name in self.gradient) for name, w in self.weights.items()}
        logits = torch.func.functional_call(self.module, weights, (rows,))
        losses = nn.functional.cross_entropy(
            logits, self._targets(sequences, rows), ignore_index=NOTHING, reduction="none"
        )
        total = losses.sum(dim=1) @ shares.to(losses)
        gradients = torch.autograd.grad(total, [weights[name] for name in self.gradient], materialize_grads=True)
        for weight in weights.values():
            weight.requires_grad_(False)
        return dict(zip(self.gradient, gradients, strict=True))

    def _left(self, found: Sequence[_Found]) -> Mapping[str, Tensor]:
        """Return what sequences leave of the update, by parameter."""
        if not found:
            return self.gradient
        explained = self._gradient_of([f.tokens for f in found], self._fit([f.gradient for f in found])[0])
        return {name: g - explained[name] for name, g in self.gradient.items()}

    def _told(self, gradient: Mapping[str, Tensor]) -> Tensor:
        """Return (k,) a gradient's coordinates of the fit."""
        flat = {name: gradient[name].flatten() for name in self.gradient}
        return torch.cat([g[self._coordinates[name]] if self._coordinates else g for name, g in flat.items()])


def _first_words(module: nn.Module, blank: Tensor, gradient: Mapping[str, Tensor], tokens: TokenInfo) -> Tensor:
    """Return (k,) the words that may begin a sequence: those nearest the span of the first layer's inputs, in order."""
    words = torch.arange(tokens.vocabulary, device=blank.device)
    words = words[words != (-1 if tokens.padding is None else tokens.padding)]
    sent = ((r, [n for n in r.weights if n in gradient and bool(gradient[n].any())]) for r in receivers(module, blank))
    receiver, names = next(((r, names) for r, names in sent if names), (None, []))
    if receiver is None:
        return words[:_FIRST]
    whole = torch.cat([gradient[n].T if n in receiver.transposed else gradient[n] for n in names]).double()
    _, values, right = torch.linalg.svd(whole, full_matrices=False)
    kept = values.square() / (values.square() + _limit(values, *whole.shape) ** 2)
    rows = blank[:1].repeat(len(words), 1)
    rows[:, 0] = words
    vectors = torch.cat([inputs_of(module, receiver, part)[:, 0].double() for part in rows.split(_FIRST)])
    inside = ((nn.functional.normalize(vectors) @ right.T).square() * kept).sum(dim=1)
    return words[inside.topk(min(_FIRST, len(words))).indices]


def whitened(gradient: Tensor, *, inverted: bool) -> Tensor:
    """Return a weight's gradient (m, n) with its singular values s as 1 or, ``inverted``, as 1/s: the pseudo-inverse's.

    Those near the limit l (:func:`_limit`) are damped by s² / (s² + l²). Of a gradient Σ c_t d_t x_tᵀ, with independent
    d_t, and x_t likewise, the inner product of the pseudo-inverse with d_s x_tᵀ is 1 / c_s for s = t, else 0. It is
    exact, but makes much of what is small, so noise disturbs it. With 1 this holds only where the d_t and the x_t are
    at right angles to each other, and the product is then 1 whatever c_s is, for lengths of 1.
    """
    left, values, right = torch.linalg.svd(gradient, full_matrices=False)
    squares = values.square()
    weights = squares / (squares + _limit(values, *gradient.shape) ** 2)
    return torch.as_tensor((left * (weights / values.clamp(min=1e-300) if inverted else weights)) @ right)


def _limit(values: Tensor, rows: int, columns: int) -> float:
    """Return where singular values begin to count: a tenth of the greatest, or where noise ends.

    That is the greatest singular value of white noise that has the median of ``values`` (Marchenko and Pastur 1967).
    """
    ratio = min(rows, columns) / max(rows, columns)
    low, high = (1 - math.sqrt(ratio)) ** 2, (1 + math.sqrt(ratio)) ** 2
    squares = np.linspace(low, high, 2001)[1:-1]
    mass = np.cumsum(np.sqrt((high - squares) * (squares - low)) / squares)
    median = math.sqrt(squares[np.searchsorted(mass, mass[-1] / 2)])
    return max(float(values.median()) * math.sqrt(high) / median, _LEAST * float(values[0]))
