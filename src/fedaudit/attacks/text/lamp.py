"""LAMP: the texts of a classifier whose gradient matches the update's, over relaxed words, then word by word."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated

import torch
from pydantic import Field
from scipy.optimize import nnls
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel

from fedaudit.attacks.base import Attack, Case, Progress, register
from fedaudit.attacks.findings import SequenceFinding
from fedaudit.attacks.labels.inference import rounded
from fedaudit.attacks.local_training import Way
from fedaudit.attacks.victim import need_signal, need_training, sent_model
from fedaudit.modalities import TokenInfo
from fedaudit.task.training import CROSS_ENTROPY
from fedaudit.transcript.observation import Message, Observation
from fedaudit.utils.errors import NotApplicable

_RATE = 0.1  # of Adam, on logits of words, lengths and labels
_LABELLED = 3.0  # logit with which the inferred labels begin
_DRAWN = 8  # random texts a label, by which labels are counted
_LIKELY = 16  # changes of one word that are tried in a step
_SWAPS = 8  # pairs of words of a text that are
_EXCHANGES = 16  # pairs of words of two texts that are
_MOVES = 60  # changes of the texts
_SHORTEST = 3  # words in a text, at least
_ROUNDING = 1e-3  # of the update: so little left means that everything was found
_BY_CHANCE = 0.01  # probability that noise alone lets a text pass
_FEW = 2  # examples in an update, up to which an audit plays this attack of itself


@register
class Lamp(Attack):
    """Continuous and discrete search for the texts whose gradient is the update (Balunović et al. 2022).

    First, all texts are looked for at once by Adam: each place has a distribution over the vocabulary, each text one
    over lengths and one over labels, and the gradient of the mean loss is that of the mean embedding, over all lengths
    and labels by their weights. What is minimised is the share of the update that no multiple of this gradient explains
    (1 − cos²), which behind white noise is the likelihood. Then the likeliest words are taken, and changed as long as
    less is left: another word, two words of a text that change places, two words of two texts. Derivatives say which.

    Behind noise it tells texts of encoders, of which :class:`~fedaudit.attacks.text.dager.Dager` needs whole spans. All
    that these leave there is each layer's mean input (one singular value above the noise), and the gradient as a whole
    tells more. A text is told only if what is left looks like white noise, whose greatest singular value in any weight
    has a bound, and if every other word that might stand in it, and every two that might change places, leave more than
    the best of them does by noise, in 99 of 100 cases (union bounds).

    Departures: the paper optimises free embeddings, with a penalty on their lengths, lets GPT-2 judge texts, moves
    parts of them about, and knows labels and lengths. Here distributions take the embeddings' place (as in Guo et al.
    2021), there is no language model, and labels are counted by what the gradients of random texts explain (least
    squares, weights of at least 0), as where Adam begins. The tests of what is told aren't the paper's.

    It holds for classifiers by cross-entropy of few short texts: an audit that chooses attacks itself plays it where
    clients add noise to updates of up to two examples. Where no noise was added, DAGER is sooner and surer.

    Args:
        iterations: of Adam.
        restarts: from other random words, while what is left isn't noise.
    """

    name = "lamp"
    summary = "texts of classifiers behind noise: relaxed words whose gradient matches the update"
    paper = "Balunović et al. 2022, LAMP (NeurIPS)"
    threat_model = "server or eavesdropper, passive"
    needs = ("a classifier of texts, trained by cross-entropy", "few texts in an update")
    examples = ("tokens",)
    recovers = "training sequences"
    finds = SequenceFinding
    needs_classes = True

    iterations: Annotated[int, Field(ge=1, le=100_000)] = 200
    restarts: Annotated[int, Field(ge=1, le=1000)] = 4

    @classmethod
    def fits(cls, case: Case) -> bool:
        few = case.updates_alone and case.knows_scale and case.noisy and case.examples <= _FEW
        return few and case.classifies(cls.examples) and not case.next_token and case.known_loss

    def check(self, observation: Observation) -> None:
        """Raise unless the model classifies texts by cross-entropy."""
        super().check(observation)
        need_training(self.name, observation)
        task_info = observation.task_info
        if task_info.causal or task_info.loss != CROSS_ENTROPY:
            raise NotApplicable(
                f"{self.name} needs a classifier trained by {CROSS_ENTROPY}; this model predicts {task_info.asked}"
                + ("" if task_info.causal else f", by {task_info.loss}")
            )

    def ways(self, _observation: Observation, _message: Message) -> Sequence[Way]:
        """Return the match of one batch's gradient."""
        return ("one batch",)

    def _run(
        self, observation: Observation, generator: torch.Generator, device: str, progress: Progress
    ) -> SequenceFinding:
        message, task_info = observation.single(), observation.task_info
        need_signal(message.update)
        tokens, classes, count = task_info.tokens, task_info.num_classes, message.update.num_examples
        assert tokens is not None
        assert classes is not None
        module, gradient, notes = sent_model(observation, device)
        match = Match(module, gradient, tokens, task_info.input_shape[0], classes, generator)
        begun, tried = match.count_labels(count), list[tuple[float, Tensor, Tensor]]()
        for turn in range(self.restarts):
            progress(turn, self.restarts)
            texts, labels = match.refine(*match.descend(begun, self.iterations))
            tried.append((match.rest(match.texts_gradient(texts, labels)), texts, labels))
            if match.white(texts, labels):
                break
        progress(1, 1)
        rest, texts, labels = min(tried, key=lambda each: each[0])
        notes.append(f"the best texts leave {rest:.2g} of the update's gradient")
        if match.white(texts, labels):
            texts = texts[[at for at in range(count) if match.stands(texts, labels, at)]]
            said = f"that is white noise, or rounding; {len(texts)} of {count} texts are told, each word stands out"
        else:
            texts = texts[:0]
            said = "that is more than white noise: words are wrong, or the noise isn't alike everywhere; none is told"
        notes.append(said)
        return SequenceFinding(sequences=texts.cpu(), notes=tuple(notes))


class Match:
    """The match between an update's gradient and that of texts.

    Texts are (n, length) int64, filled up with padding; labels (n,).

    Args:
        module: in evaluation mode.
        gradient: of the update, by parameter.
    """

    def __init__(
        self,
        module: nn.Module,
        gradient: dict[str, Tensor],
        tokens: TokenInfo,
        length: int,
        classes: int,
        generator: torch.Generator,
    ) -> None:
        self.module, self.tokens, self.length, self.classes, self.generator = module, tokens, length, classes, generator
        self.weights = {name: p.detach() for name, p in module.named_parameters()}
        self.shapes = {name: g.shape for name, g in gradient.items() if name in self.weights}
        self.update = torch.cat([gradient[name].flatten().double() for name in self.shapes])
        self.device = self.update.device
        looked_up = (
            p for p in module.modules() if isinstance(p, nn.Embedding) and p.num_embeddings >= tokens.vocabulary
        )
        embedding = next(looked_up, None)
        if embedding is None:
            raise NotApplicable("lamp needs a model that looks its tokens up in an embedding (nn.Embedding)")
        self.embedding = embedding
        self.filler = 0 if tokens.padding is None else tokens.padding
        shortest = length if tokens.padding is None else min(_SHORTEST, length)
        ends = torch.arange(shortest, length + 1, device=self.device)
        real = torch.arange(length, device=self.device) < ends[:, None]
        self.masks = torch.where(real, 1 if self.filler == 0 else 0, self.filler)  # (lengths, length)

    # --- gradients --------------------------------------------------------------------------------------------------

    def gradient(self, words: Tensor, masks: Tensor, targets: Tensor, *, again: bool = False) -> Tensor:
        """Return the gradient of a sum of losses, in one row.

        Args:
            words: (n, length, vocabulary) weights, that take the place of what ``masks`` doesn't fill.
            masks: (m, length) tokens, m a multiple of n: as many of each text.
            targets: (m, classes) weights.
            again: it is to be derived, too.
        """

        def relaxed(part: nn.Embedding, _: object, out: Tensor) -> Tensor:
            mixed = (words @ part.weight[: words.shape[2]]).repeat_interleave(len(masks) // len(words), dim=0)
            return torch.where((masks == self.filler)[..., None] & (self.tokens.padding is not None), out, mixed)

        weights = {name: w.clone().requires_grad_(name in self.shapes) for name, w in self.weights.items()}
        handle = self.embedding.register_forward_hook(relaxed)
        try:
            with sdpa_kernel(SDPBackend.MATH):
                logits = functional_call(self.module, weights, (masks,))
        finally:
            handle.remove()
        loss = -(targets * logits.log_softmax(dim=1)).sum()
        own = [weights[name] for name in self.shapes]
        return torch.cat(
            [g.flatten() for g in torch.autograd.grad(loss, own, create_graph=again, materialize_grads=True)]
        ).double()

    def texts_gradient(self, texts: Tensor, labels: Tensor) -> Tensor:
        """Return the gradient of texts' losses, in one row."""
        return self.gradient(self._one_hot(texts), texts, self._targets(labels))

    def rest(self, gradient: Tensor) -> float:
        """Return the share of the update's square that no multiple of a gradient explains."""
        return float(self._left(gradient).detach())

    def _left(self, gradient: Tensor) -> Tensor:
        squares = gradient.square().sum().clamp(min=1e-300) * self.update.square().sum()
        return 1 - (gradient @ self.update).square() / squares

    def _one_hot(self, texts: Tensor) -> Tensor:
        return nn.functional.one_hot(texts, self.tokens.vocabulary).to(next(iter(self.weights.values())))

    def _targets(self, labels: Tensor) -> Tensor:
        return nn.functional.one_hot(labels, self.classes).to(next(iter(self.weights.values())))

    # --- search -----------------------------------------------------------------------------------------------------

    def count_labels(self, count: int) -> Tensor:
        """Return the labels of ``count`` texts, by what random texts of each label explain of the update."""
        drawn = torch.randint(self.tokens.vocabulary, (_DRAWN, self.length), generator=self.generator).to(self.device)
        drawn = torch.where(drawn == self.filler, self.masks[-1, 0], drawn)
        each = [
            self.texts_gradient(drawn, torch.full((_DRAWN,), label, device=self.device))
            for label in range(self.classes)
        ]
        every = torch.stack([*each, self.update]).cpu()
        shares = torch.from_numpy(nnls(every[:-1].T.numpy(), every[-1].numpy())[0])
        return rounded(shares + 1e-12, count).to(self.device)

    def descend(self, labels: Tensor, iterations: int) -> tuple[Tensor, Tensor]:
        """Return texts and labels that Adam comes to, from random words."""
        shape = len(labels), self.length, self.tokens.vocabulary
        words = 0.3 * torch.randn(shape, generator=self.generator).to(self.device)
        if self.tokens.padding is not None:
            words[:, :, self.filler] = -torch.inf
        ends = torch.zeros(len(labels), len(self.masks), device=self.device)
        marks = _LABELLED * nn.functional.one_hot(labels, self.classes).float()
        sought = [part.requires_grad_() for part in (words, ends, marks)]
        adam = torch.optim.Adam(sought, lr=_RATE)
        masks = self.masks.repeat(len(labels), 1)
        for _ in range(iterations):
            targets = (ends.softmax(dim=1)[:, :, None] * marks.softmax(dim=1)[:, None]).flatten(0, 1)
            loss = self._left(self.gradient(words.softmax(dim=2), masks, targets, again=True))
            adam.zero_grad()
            loss.backward()
            adam.step()
        mask = self.masks[ends.argmax(dim=1)]
        padded = (mask == self.filler) & (self.tokens.padding is not None)
        return torch.where(padded, self.filler, words.detach().argmax(dim=2)), marks.detach().argmax(dim=1)

    def refine(self, texts: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Return texts, changed as long as they leave less, and their labels."""
        own = torch.stack([self.texts_gradient(texts[[i]], labels[[i]]) for i in range(len(texts))])
        least = self.rest(own.sum(dim=0))
        for _ in range(_MOVES):
            total, best = own.sum(dim=0), dict[int, tuple[Tensor, Tensor]]()
            for changed in self._changes(texts, self._slopes(texts, labels)):
                made = {i: self.texts_gradient(row[None], labels[[i]]) for i, row in changed.items()}
                left = self.rest(total + sum((g - own[i] for i, g in made.items()), torch.zeros_like(total)))
                if left < least * (1 - 1e-9):
                    least, best = left, {i: (row, made[i]) for i, row in changed.items()}
            if not best:
                break
            for i, (row, made_of) in best.items():
                texts[i], own[i] = row, made_of
        return texts, labels

    def _slopes(self, texts: Tensor, labels: Tensor) -> Tensor:
        """Return (n, length, vocabulary) by how much less is left with a word in place of a text's, to first order."""
        words = self._one_hot(texts).requires_grad_()
        left = self._left(self.gradient(words, texts, self._targets(labels), again=True))
        slopes = torch.autograd.grad(left, words)[0]
        gains = slopes.gather(2, texts[..., None]) - slopes
        if self.tokens.padding is not None:
            gains[:, :, self.filler] = -torch.inf
            gains[texts == self.filler] = -torch.inf
        return gains.scatter(2, texts[..., None], -torch.inf)

    def _changes(self, texts: Tensor, gains: Tensor) -> list[dict[int, Tensor]]:
        """Return the likeliest changes: of each the texts that it makes, by number."""
        made = [{i: _with(texts[i], {p: w})} for i, p, w in _best(gains, _LIKELY)]
        swaps, exchanges = list[tuple[float, dict[int, Tensor]]](), list[tuple[float, dict[int, Tensor]]]()
        for i, row in enumerate(texts.tolist()):
            places = [p for p in range(self.length) if float(gains[i, p].max()) > -math.inf]
            for p in places:
                for q in (q for q in places if q > p and row[q] != row[p]):
                    gain = float(gains[i, p, row[q]] + gains[i, q, row[p]])
                    swaps.append((gain, {i: _with(texts[i], {p: row[q], q: row[p]})}))
                for j in range(i + 1, len(texts)):
                    word = int(texts[j, p])
                    if word != row[p] and (gain := float(gains[i, p, word] + gains[j, p, row[p]])) > -math.inf:
                        exchanges.append((gain, {i: _with(texts[i], {p: word}), j: _with(texts[j], {p: row[p]})}))
        for moves, most in ((swaps, _SWAPS * len(texts)), (exchanges, _EXCHANGES)):
            made += [change for _, change in sorted(moves, key=lambda move: -move[0])[:most]]
        return made

    # --- what is told -----------------------------------------------------------------------------------------------

    def white(self, texts: Tensor, labels: Tensor) -> bool:
        """Return whether what texts leave may be white noise, or is but rounding.

        Of m × n numbers of deviation σ the root of the sum of squares is within σ (√(m n) ± t), and the greatest
        singular value at most σ (√m + √n + t), but for exp(−t²/2) each. The quietest weight tells σ.
        """
        own = self.texts_gradient(texts, labels)
        if self.rest(own) < _ROUNDING:
            return True
        left = self.update - (own @ self.update) / own.square().sum().clamp(min=1e-300) * own
        split = left.split([shape.numel() for shape in self.shapes.values()])
        parts = [
            part.view(len(part), 1) if len(s) == 1 else part.view(s)
            for s, part in zip(self.shapes.values(), split, strict=True)
        ]
        more = math.sqrt(2 * math.log(3 * len(parts) / _BY_CHANCE))
        roots = [(float(part.norm()), math.sqrt(part.numel())) for part in parts]
        deviation = min((size / (root - more) for size, root in roots if root > 2 * more), default=math.inf)
        return all(size <= deviation * (root + more) for size, root in roots) and all(
            float(torch.linalg.matrix_norm(part, 2)) <= deviation * (sum(math.sqrt(n) for n in part.shape) + more)
            for part in parts
        )

    def stands(self, texts: Tensor, labels: Tensor, at: int) -> bool:
        """Return whether any change of a word of one text, or of two words' places, leaves more than noise explains."""
        gains = self._slopes(texts, labels)[at]
        row = texts[at].tolist()
        places = [p for p in range(self.length) if float(gains[p].max()) > -math.inf]
        changed = [_with(texts[at], {p: int(gains[p].argmax())}) for p in places]
        for p in places:
            others = [q for q in places if row[q] != row[p]]
            if others:
                q = max(others, key=lambda q: float(gains[p, row[q]] + gains[q, row[p]]))
                changed.append(_with(texts[at], {p: row[q], q: row[p]}))
        own = self.texts_gradient(texts, labels)
        beside = own - self.texts_gradient(texts[[at]], labels[[at]])
        least = min(self.rest(beside + self.texts_gradient(other[None], labels[[at]])) for other in changed)
        more = len(self.update) * (least / max(self.rest(own), 1e-12) - 1)
        return more > 2 * math.log(len(places) * (self.tokens.vocabulary + len(places)) / _BY_CHANCE)


def _with(row: Tensor, words: dict[int, int]) -> Tensor:
    """Return a text with other words at some places."""
    row = row.clone()
    for place, word in words.items():
        row[place] = word
    return row


def _best(gains: Tensor, most: int) -> list[tuple[int, int, int]]:
    """Return text, place and word of the greatest gains, in order."""
    top = gains.flatten().topk(min(most, gains.numel()))
    width, words = gains.shape[1] * gains.shape[2], gains.shape[2]
    return [
        (i // width, i % width // words, i % words)
        for i, gain in zip(top.indices.tolist(), top.values.tolist(), strict=True)
        if gain > -math.inf
    ]
