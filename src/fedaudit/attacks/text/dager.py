"""DAGER: exact sequences, because attention's gradients span the inputs that they were made from."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass as checked_dataclass
from torch import Tensor, nn

from fedaudit.attacks.base import ATTACK_CONFIG, Attack, Progress, register
from fedaudit.attacks.findings import Finding, SequenceFinding
from fedaudit.attacks.local_training import Way
from fedaudit.attacks.text.layers import Receiver, Span, inputs_of, receivers, span_of, takes
from fedaudit.attacks.victim import WITHOUT_DROPOUT, one_batch_gradient, unknown_training
from fedaudit.federation.local_training import draws_at_random
from fedaudit.models import set_training_mode
from fedaudit.threat import Message, Observation
from fedaudit.utils.errors import NotApplicable


@dataclass(frozen=True)
class _Search:
    """What the search for sequences works with.

    Attributes:
        module: with the weights of the round, in evaluation mode.
        second: the layer whose inputs depend on the order of the tokens, and its span.
        found: of each position, the (k,) tokens that passed the first check.
        length: of sequences, filled up.
        filler: a token for places that don't matter.
        count: sequences that the update was made from.
        beam: prefixes that are kept, for each sequence.
        short: the model takes shorter sequences, too: prefixes then needn't be filled up.
    """

    module: nn.Module
    second: tuple[Receiver, Span]
    found: Sequence[Tensor]
    length: int
    filler: int
    count: int
    beam: int
    short: bool

    def distances(self, tokens: Tensor, place: int | None = None) -> Tensor:
        """Return (n,) the distance at one place of sequences (n, length), or (n, length) those at all places."""
        receiver, span = self.second
        inputs = inputs_of(self.module, receiver, tokens)
        return span.distances(inputs if place is None else inputs[:, place])


@register
@checked_dataclass(frozen=True, kw_only=True, config=ATTACK_CONFIG)
class Dager(Attack):
    """Span checks, layer by layer (Petrov et al. 2024).

    The gradients of the first attention's query, key and value weights span the vectors, one a token at its place, that
    it received. Every token of the vocabulary is tried at every place: those whose vector lies in the span were in the
    batch. A later layer's inputs depend on all tokens before: of a decoder, prefixes are extended token by token as
    long as their vectors lie in that layer's span.

    Departures from the paper: query, key and value are used together, each brought to norm 1 (the first token's query
    gets no gradient from a softmax over one key, and keys' gradients sum to zero in each sequence); the rank is where
    the singular values fall most steeply; and where the second attention's span lacks directions, as in a two-layer
    model that is read out at one token only, a fully connected layer between the two takes its place.

    Args:
        beam: prefixes that are kept for each sequence of the update, those nearest to the span.
    """

    name: ClassVar[str] = "dager"
    summary: ClassVar[str] = "exact sequences: tokens whose vectors lie in the span of attention's gradients"
    paper: ClassVar[str] = "Petrov et al. 2024, DAGER (NeurIPS)"
    threat_model: ClassVar[str] = "server or eavesdropper, passive"
    needs: ClassVar[tuple[str, ...]] = ("a transformer", "fewer tokens in an update than the model is wide")
    examples: ClassVar[tuple[str, ...]] = ("tokens",)
    recovers: ClassVar[str] = "training sequences"
    finds: ClassVar[type[Finding]] = SequenceFinding

    beam: Annotated[int, Field(ge=1, le=1000)] = 8

    def check(self, observation: Observation) -> None:
        """Raise where the gradients don't span what the layers received.

        Raises:
            NotApplicable: with the reason and the remedy.
        """
        super().check(observation)
        message = observation.single()
        if message.update.kind == "weights" and message.update.training is None:
            raise NotApplicable(
                f"{self.name} needs the learning rate and the local steps to use a FedAvg update; "
                f"{unknown_training(observation.threat)}"
            )

    def ways(self, _observation: Observation, message: Message) -> Sequence[Way]:
        """Return the span check, and where an update is of several steps that of one batch."""
        training = message.update.training
        return ("span",) if training is None or training.local_steps == 1 else ("one batch", "span")

    def _run(
        self, observation: Observation, _generator: torch.Generator, device: str, progress: Progress
    ) -> SequenceFinding:
        message, task_info = observation.single(), observation.task_info
        assert task_info.tokens is not None
        module = copy.deepcopy(observation.module).to(device)
        module.load_state_dict({name: t.to(device) for name, t in message.weights.items()})
        blank = task_info.blank(2)[0].to(device)
        notes = [WITHOUT_DROPOUT] if task_info.dropout and draws_at_random(module, blank) else []
        set_training_mode(module, "eval", dropout=False)
        gradient = one_batch_gradient(message.update, device, message.weights)
        length, words = task_info.input_shape[0], task_info.tokens.vocabulary
        known = [r for r in receivers(module, blank) if all(name in gradient for name in r.weights)]
        first = next((r for r in known if r.attention), None)
        if first is None:
            raise NotApplicable(
                f"{self.name} needs the gradients of an attention's query, key and value; this update has none"
            )
        count = message.update.num_examples
        steps = message.update.training.local_steps if message.update.training else 1
        span = span_of(gradient, first, count * length, steps)
        if span is None or span.full:
            return _nothing(span, count * length, length, notes)
        found = _first_check(module, first, span, words, length, progress)
        notes.append(
            f"first check: rank {span.rank} of width {span.width}, {sum(map(len, found))} tokens at {length} places"
        )
        second = _second(known, first, gradient, span, count * length, steps)
        if second is None:
            notes.append("no later layer's span shows the order of the tokens: only which ones there were is told")
            return SequenceFinding(sequences=torch.zeros((0, length), dtype=torch.int64), notes=tuple(notes))
        if not _causal(module, second[0], blank, words):
            raise NotApplicable(
                f"{self.name} extends prefixes, and this model sees what follows (an encoder): run which-tokens"
            )
        filler = task_info.tokens.padding or 0
        search = _Search(module, second, found, length, filler, count, self.beam, takes(module, blank[:, :1]))
        tokens, distances = _decode(search)
        progress(length, length)
        return SequenceFinding(sequences=tokens.cpu(), distances=distances.cpu(), notes=tuple(notes))


def _nothing(span: Span | None, tokens: int, length: int, notes: list[str]) -> SequenceFinding:
    why = "the gradients' singular values show no end of the span: noise, or parts that weren't sent, hide it"
    if span is not None:
        why = (
            f"the gradients span all {span.width} dimensions of the layer: every token lies in it; {tokens} tokens, "
            "padding included, are too many for that width"
        )
    return SequenceFinding(sequences=torch.zeros((0, length), dtype=torch.int64), notes=(*notes, why))


def _first_check(
    module: nn.Module, first: Receiver, span: Span, words: int, length: int, progress: Progress
) -> list[Tensor]:
    """Return for each place the tokens whose vectors there lie in the span, in ascending order."""
    every = torch.arange(words, device=span.basis.device)
    passed = []
    for part in every.split(256):
        progress(int(part[0]) * length // words, 2 * length)
        inputs = inputs_of(module, first, part[:, None].expand(-1, length).contiguous())
        passed.append(span.distances(inputs) <= 1)
    inside = torch.cat(passed)
    return [every[inside[:, place]] for place in range(length)]


def _second(
    known: Sequence[Receiver], first: Receiver, gradient: dict[str, Tensor], span: Span, tokens: int, steps: int
) -> tuple[Receiver, Span] | None:
    """Return the layer by which the order is checked: the second attention, or one between the two.

    That with the most dimensions is taken, at least as many as the first's: a token has more vectors where it depends
    on others. Where they have as many, it is the attention.
    """
    later = known[known.index(first) + 1 :]
    attentions = [r for r in later if r.attention]
    between = later[: later.index(attentions[0])] if attentions else later
    best: tuple[Receiver, Span] | None = None
    for receiver in (*attentions[:1], *between[1:]):
        own = span_of(gradient, receiver, tokens, steps)
        if own is not None and not own.full and own.rank > (best[1].rank if best else span.rank - 1):
            best = receiver, own
    return best


def _causal(module: nn.Module, receiver: Receiver, blank: Tensor, words: int) -> bool:
    """Return whether what a layer receives of a token depends on those before it alone."""
    tokens = torch.ones_like(blank) % words
    tokens[1, -1] = words - 1
    inputs = inputs_of(module, receiver, tokens)
    return blank.shape[1] == 1 or torch.allclose(inputs[0, 0], inputs[1, 0], rtol=1e-6, atol=1e-6)


def _decode(search: _Search) -> tuple[Tensor, Tensor]:
    """Return (m, length) the sequences of a decoder, and (m,) their mean distances from the span.

    A prefix that no token extends is a sequence. Where the search ends with more than the update was made from, the
    longest are taken, and of these the nearest.
    """
    device = search.second[1].basis.device
    prefixes = torch.zeros((1, 0), dtype=torch.int64, device=device)
    sums = torch.zeros(1, dtype=torch.float64, device=device)
    ended: list[tuple[Tensor, float]] = []
    limit = search.beam * search.count
    for place in range(search.length):
        tokens = search.found[place]
        grown = torch.cat(
            [prefixes.repeat_interleave(len(tokens), dim=0), tokens.repeat(len(prefixes))[:, None]], dim=1
        )
        if not len(grown):
            break
        filling = 0 if search.short else search.length - place - 1
        whole = nn.functional.pad(grown, (0, filling), value=search.filler)
        distances = search.distances(whole, place)
        inside = (distances <= 1).nonzero()[:, 0]
        parent = inside // len(tokens)
        alive = torch.zeros(len(prefixes), dtype=torch.bool, device=device)
        alive[parent] = True
        ended += [(prefixes[i], float(sums[i] / max(place, 1))) for i in (~alive).nonzero()[:, 0].tolist()]
        order = inside[distances[inside].argsort(stable=True)[:limit]].sort().values
        prefixes, sums = grown[order], sums[order // len(tokens)] + distances[order]
    ended += [(row, float(total / search.length)) for row, total in zip(prefixes, sums, strict=True)]
    ended = sorted((e for e in ended if len(e[0])), key=lambda e: (-len(e[0]), e[1]))[: search.count]
    sequences = torch.full((len(ended), search.length), search.filler, dtype=torch.int64, device=device)
    for row, (tokens, _) in zip(sequences, ended, strict=True):
        row[: len(tokens)] = tokens
    return sequences, torch.tensor([mean for _, mean in ended], dtype=torch.float64)
