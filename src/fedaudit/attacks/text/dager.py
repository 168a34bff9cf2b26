"""DAGER: exact sequences, because attention's gradients span the inputs that they were made from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor, nn

from fedaudit.attacks.base import Attack, Case, Progress, register
from fedaudit.attacks.findings import SequenceFinding
from fedaudit.attacks.local_training import Way
from fedaudit.attacks.text.layers import Receiver, Span, inputs_of, receivers, sees, span_of, takes
from fedaudit.attacks.text.output_rows import EXPLAINED, OutputRows, read_rows
from fedaudit.attacks.text.search import Search, extend_prefixes, whole_sequences
from fedaudit.attacks.victim import need_training, sent_model
from fedaudit.modalities import TokenInfo
from fedaudit.transcript.observation import Message, Observation
from fedaudit.utils.errors import NotApplicable

_MOST_WEIGHTS = 10_000_000  # of words at places in rows, which the output layer is explained by
_UNEXPLAINED = 0.5  # of its gradient: more says that nothing was found


@register
class Dager(Attack):
    """Span checks, layer by layer (Petrov et al. 2024).

    The gradients of the first attention's query, key and value weights span the vectors, one a token at its place, that
    it received. Every token of the vocabulary is tried at every place: those whose vector lies in the span were in the
    batch. A later layer's inputs depend on other tokens, too. Of a decoder, prefixes are extended token by token as
    long as their vectors lie in that layer's span. Of an encoder, which sees what follows, whole sequences are looked
    for, of each length at which the end token passed the first check, and checked by the widest layer up to the second
    attention.

    Of adapters of low rank (LoRA), W + B·A, the gradients of A span the inputs as those of W do, as far as their rank
    allows; where they are zero (B is zero at the start of a training), those of B span the inputs that A has projected.

    Departures from the paper: query, key and value are used together, each brought to norm 1 (the first token's query
    gets no gradient from a softmax over one key, and keys' gradients sum to zero in each sequence); the rank counts the
    singular values above rounding or, where noise hides it, ends where they fall most steeply; and where the second
    attention's span lacks directions, as in a two-layer model that is read out at one token only, a fully connected
    layer between the two takes its place. Of an encoder the paper tries all combinations of tokens, or as many at
    random as it has time for. Here all are tried up to 4,096. Of more, two steps that aren't in the paper find those to
    try: words of which least lies outside the span in random contexts are kept, and the layer is linearised at a random
    sequence, so that non-negative least squares tell which words bring the vector of one word into the span
    (:func:`~fedaudit.attacks.text.search.whole_sequences`). B's gradients aren't in the paper either.

    Where there are too many tokens for the spans, the paper ends. Here sequences of a decoder that predicts the next
    token are then read off its output layer's gradient, whose row of a word is made of the vectors of the places that
    the word follows (:mod:`fedaudit.attacks.text.output_rows`): few places must have the same next word, and tokens may
    be more than the model is wide. That takes an output layer with weights of its own and the embedding's gradient in
    the update, of one step; adapters alone have neither.

    Args:
        beam: prefixes of a decoder that are kept for each sequence of the update, those nearest to the span.
        tries: sequences of an encoder that are tried at most, in all.
    """

    name = "dager"
    summary = "exact sequences: tokens whose vectors lie in the span of attention's gradients"
    paper = "Petrov et al. 2024, DAGER (NeurIPS)"
    threat_model = "server or eavesdropper, passive"
    needs = ("a transformer", "fewer tokens in an update than the model is wide, or of a decoder somewhat more")
    examples = ("tokens",)
    recovers = "training sequences"
    finds = SequenceFinding

    beam: Annotated[int, Field(ge=1, le=1000)] = 8
    tries: Annotated[int, Field(ge=1, le=10_000_000)] = 200_000

    @classmethod
    def fits(cls, case: Case) -> bool:
        return case.updates_alone and case.kind in cls.examples and case.knows_scale

    def check(self, observation: Observation) -> None:
        """Raise where the gradients don't span what the layers received."""
        super().check(observation)
        need_training(self.name, observation)

    def ways(self, _observation: Observation, message: Message) -> Sequence[Way]:
        """Return the span check, and where an update is of several steps that of one batch."""
        training = message.update.training
        return ("span",) if training is None or training.local_steps == 1 else ("one batch", "span")

    def _run(
        self, observation: Observation, generator: torch.Generator, device: str, progress: Progress
    ) -> SequenceFinding:
        message, task_info = observation.single(), observation.task_info
        assert task_info.tokens is not None
        module, gradient, notes = sent_model(observation, device)
        blank = task_info.blank(2)[0].to(device)
        length = task_info.input_shape[0]
        layers = receivers(module, blank)
        known = [
            replace(r, weights=sent) for r in layers if (sent := tuple(name for name in r.weights if name in gradient))
        ]
        first, last = _pair(blank, task_info.tokens, 0), _pair(blank, task_info.tokens, length - 1)
        mixing = {r.name for r in layers if length > 1 and sees(module, r, first, length - 1, 0)}
        alone = [r for r in known if r.name not in mixing]
        if not alone or not any(r.attention for r in layers):
            raise NotApplicable(
                f"{self.name} needs the gradients of an attention's query, key and value, or of their adapters; this "
                "update has none"
            )
        count = message.update.num_examples
        tokens = count * length
        steps = message.update.training.local_steps if message.update.training else 1
        receiver, span = _first(alone, gradient, tokens, steps)
        rows = _output_rows(module, known, gradient, task_info.tokens, length, count) if steps == 1 else None
        if span is None or span.full:
            notes.append(_why_not(receiver, span, gradient, tokens))
            return _beyond(rows, length, notes, generator, progress)
        found = _first_check(module, receiver, span, task_info.tokens.vocabulary, length, progress)
        notes.append(
            f"first check: rank {span.rank} of width {span.width}, {sum(map(len, found))} tokens at {length} places"
        )
        after = [r for r in layers if r.name in mixing] or layers[1:]
        after = after if after and after[0].attention else after[1:]  # what attention hands on is left out
        later = [r for r in known if r.name in {a.name for a in after}]
        whole = length > 1 and bool(later) and sees(module, later[0], last, 0, length - 1)
        second = (_widest if whole else _second)(later, gradient, span, tokens, steps)
        if second is None:
            notes.append("no later layer's span shows the order of the tokens: only which ones there were is told")
            return _beyond(rows, length, notes, generator, progress)
        filler = task_info.tokens.padding or 0
        search = Search(module, second, found, length, filler, count, takes(module, blank[:, :1]))
        if not whole:
            sequences, distances = extend_prefixes(search, self.beam)
        else:
            lengths = _lengths(found, task_info.tokens)
            end = task_info.tokens.end
            sequences, distances = whole_sequences(search, lengths, end, self.tries, generator, progress)
        progress(length, length)
        return SequenceFinding(sequences=sequences.cpu(), distances=distances.cpu(), notes=tuple(notes))


def _pair(blank: Tensor, tokens: TokenInfo, place: int) -> Tensor:
    """Return (2, length) two sequences without padding that differ at one place alone."""
    words = [word for word in (0, 1, tokens.vocabulary - 1) if word != tokens.padding]
    pair = torch.full_like(blank, words[0])
    pair[1, place] = words[-1]
    return pair


def _output_rows(
    module: nn.Module,
    known: Sequence[Receiver],
    gradient: dict[str, Tensor],
    tokens: TokenInfo,
    length: int,
    count: int,
) -> OutputRows | None:
    """Return the output layer's gradient by which sequences are read where the spans are full; None: it can't be.

    It must have weights of its own and travel, beside the embedding's gradient, of which some rows are zero; noise
    fills all. Only a decoder that predicts the next token is asked for one at each place.
    """
    layer = known[-1]
    words = next(
        (
            gradient[weight]
            for name, part in module.named_modules()
            if isinstance(part, nn.Embedding)
            and part.num_embeddings == tokens.vocabulary
            and (weight := f"{name}.weight") in gradient
        ),
        None,
    )
    weights = gradient[layer.weights[0]]
    whole = tuple(weights.shape) == (tokens.vocabulary, layer.width) and not layer.transposed
    if not tokens.causal or words is None or not whole or len(layer.weights) > 1:
        return None
    used = (words != 0).any(dim=1)
    if bool(used.all()):
        return None
    if tokens.padding is not None:
        used[tokens.padding] = False
    few = used.nonzero()[:, 0]
    if not len(few) or len(few) ** 2 * length > _MOST_WEIGHTS:
        return None
    return OutputRows(module, layer, weights.to(torch.float64), few, tokens, length, count)


def _beyond(
    rows: OutputRows | None, length: int, notes: list[str], generator: torch.Generator, progress: Progress
) -> SequenceFinding:
    """Return what the output layer's rows tell where spans don't."""
    sequences = torch.zeros((0, length), dtype=torch.int64)
    if rows is not None:
        found, rest = read_rows(rows, generator, progress)
        said = f"sequences were read off the rows of the output layer's gradient, of which they leave {rest:.2g}"
        if rest < EXPLAINED:
            notes.append(f"{said}: that is rounding, they are all of the update's")
        elif rest < _UNEXPLAINED:
            notes.append(f"{said}: some are wrong")
        else:
            notes.append(
                f"{said}, so none is told: too many places have the same next word for a width of that layer's"
            )
        sequences = found.cpu() if rest < _UNEXPLAINED else sequences
    return SequenceFinding(sequences=sequences, notes=tuple(notes))


def _why_not(receiver: Receiver, span: Span | None, gradient: dict[str, Tensor], tokens: int) -> str:
    """Return why single tokens can't be checked."""
    if span is not None:
        return (
            f"the gradients span all {span.width} dimensions of the layer: every token lies in it; {tokens} tokens, "
            "padding included, are too many for that width"
        )
    rows = sum(min(gradient[name].shape) for name in receiver.weights)
    return (
        "the gradients' singular values show no end of the span: noise, or parts that weren't sent, hide it, or there "
        f"are more tokens (up to {tokens}) than the layers that were sent can span, whose gradients have {rows} rows"
    )


def _first(
    alone: Sequence[Receiver], gradient: dict[str, Tensor], tokens: int, steps: int
) -> tuple[Receiver, Span | None]:
    """Return the layer by which single tokens are checked, and its span.

    An attention's query, key and value, where their span has an end; else, of layers that receive what an adapter has
    projected, the one whose span has most dimensions.
    """
    spans = [(r, span_of(gradient, r, tokens, steps)) for r in sorted(alone, key=lambda r: not r.attention)]
    usable = [(r, span) for r, span in spans if span is not None and not span.full]
    if not usable:
        return next((pair for pair in spans if pair[1] is not None), spans[0])
    return usable[0] if usable[0][0].attention else max(usable, key=lambda pair: pair[1].rank)


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
    later: Sequence[Receiver], gradient: dict[str, Tensor], span: Span, tokens: int, steps: int
) -> tuple[Receiver, Span] | None:
    """Return the layer by which the order is checked: the second attention, or one before the third.

    The one with the most dimensions, at least as many as the first check's: a token has more vectors where it depends
    on others. The attention wins a tie. Behind it only adapters' layers count, which receive what it does. ``later``:
    those whose inputs depend on other tokens, in a pass's order.
    """
    attentions = [place for place, r in enumerate(later) if r.attention]
    at = attentions[0] if attentions else len(later)
    behind = later[at + 1 : attentions[1] if len(attentions) > 1 else None]
    width = later[at].width if attentions else 0
    best: tuple[Receiver, Span] | None = None
    for receiver in (*later[at : at + 1], *later[:at], *(r for r in behind if r.width < width)):
        own = span_of(gradient, receiver, tokens, steps)
        if own is not None and not own.full and own.rank > (best[1].rank if best else span.rank - 1):
            best = receiver, own
    return best


def _widest(
    later: Sequence[Receiver], gradient: dict[str, Tensor], span: Span, tokens: int, steps: int
) -> tuple[Receiver, Span] | None:
    """Return the layer by which an encoder's sequences are checked: the widest up to the second attention.

    The more dimensions its span leaves out, the better they tell sequences apart. Each token has one vector in every
    layer, so the layer whose singular values show most dimensions tells how many the others' spans have.
    """
    at = next((place for place, r in enumerate(later) if r.attention), len(later))
    spans = [own for r in later[: at + 1] if (own := span_of(gradient, r, tokens, steps)) is not None and not own.full]
    rank = max((own.rank for own in spans), default=0)
    if rank < span.rank:
        return None
    known = [(r, span_of(gradient, r, tokens, steps, rank)) for r in later[: at + 1]]
    usable = [(r, own) for r, own in known if own is not None and not own.full]
    return max(usable, key=lambda pair: pair[0].width)


def _lengths(found: Sequence[Tensor], tokens: TokenInfo) -> list[int]:
    """Return an encoder's possible lengths; where padding passed the first check, sequences are of full length.

    The model then sees padding like any token.
    """
    whole = len(found)
    if tokens.padding is None or any(bool((each == tokens.padding).any()) for each in found):
        return [whole]
    if tokens.end is None:
        return [place + 1 for place in range(whole) if len(found[place])]
    ends = [place + 1 for place in range(whole) if bool((found[place] == tokens.end).any())]
    return ends if whole in ends or not len(found[-1]) else [*ends, whole]
