"""Recovered sequences and words against the ones that were trained on."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from fedaudit.attacks.findings import SequenceFinding, TokenFinding
from fedaudit.evaluation.finding_types import (
    FINDING_TYPES,
    Evaluation,
    FindingType,
    Metric,
    done,
    evaluate,
    refused,
    victims_of,
)
from fedaudit.evaluation.statistics import SURE, interval
from fedaudit.evaluation.verdicts import Judgement, by_fisher, by_test, leaks, share_of
from fedaudit.modalities import TokenInfo
from fedaudit.results import FindingResult, SequenceResult
from fedaudit.transcript.observation import Observation
from fedaudit.transcript.truth import Truth
from fedaudit.utils.seeds import generator

_DRAWS = 500
_WORD_DRAWS = 2000
_TURNS = 8  # through the guesses, at most, until enough words are named
_RESAMPLES = 2000
_SHOWN = 64  # sequences of a finding that are kept for the report

EXACT = Metric("exact_sequences", "share of the sequences that were recovered word for word", ends=(0, 1))
ROUGE1 = Metric(
    "rouge1", "ROUGE-1: words that a recovered sequence and the true one share (F1), mean over all", ends=(0, 1)
)
ROUGE2 = Metric("rouge2", "ROUGE-2: likewise of pairs of neighbouring words", ends=(0, 1))
RECALL = Metric(
    "words_found", "share of the different words in the update that were named; without the attack: drawn", ends=(0, 1)
)
PRECISION = Metric("words_right", "share of the named words that occur in the update", ends=(0, 1))


def rouge(found: Sequence[int], true: Sequence[int], n: int) -> float:
    """Return ROUGE-n: the F1 of the n-grams that two sequences share, counted with repetition (Lin 2004).

    Our own, on tokens: without stemming, and 1 for two sequences that both have none.
    """
    own, theirs = (Counter(tuple(s[i : i + n]) for i in range(len(s) - n + 1)) for s in (found, true))
    total = sum(own.values()) + sum(theirs.values())
    return 2 * sum((own & theirs).values()) / total if total else 1.0


def matched(found: Sequence[Sequence[int]], true: Sequence[Sequence[int]]) -> list[int | None]:
    """Return for each true sequence which found one is its own: the pairing with the most ROUGE-1 and ROUGE-2."""
    places: list[int | None] = [None] * len(true)
    if found:
        scores = np.array([[rouge(f, t, 1) + rouge(f, t, 2) + (list(f) == list(t)) for f in found] for t in true])
        for row, column in zip(*linear_sum_assignment(-scores), strict=True):
            places[int(row)] = int(column)
    return places


@evaluate.register
def evaluate_sequences(finding: SequenceFinding, observation: Observation, truth: Truth, *, seed: int) -> Evaluation:
    """Compare recovered sequences with the true ones, each found one paired with one true one at most.

    Luck is what the better one of two guesses gets: as many sequences, at every place a word drawn as often as held-out
    sequences have it there; and as many whole sequences of others, of the same labels where those are classes. The
    p-value is the larger share of 500 such draws whose mean ROUGE-1, paired one to one, is at least the attack's.
    """
    message, tokens = observation.messages[0], observation.task_info.tokens
    assert tokens is not None
    uses = truth.inputs[message.round, message.client]
    wholes = uses.unique(dim=0) if message.update.training and message.update.training.local_steps > 1 else uses
    true = [tokens.words_of(row) for row in wholes]
    found = [tokens.words_of(row) for row in finding.sequences]
    pairs = matched(found, true)
    one, two = ([0.0 if p is None else rouge(found[p], t, n) for p, t in zip(pairs, true, strict=True)] for n in (1, 2))
    exact = sum(p is not None and found[p] == t for p, t in zip(pairs, true, strict=True))
    label = truth.labels[message.round, message.client]
    classes = label.tolist() if label.ndim == 1 and len(label) == len(true) else None
    count = max(len(true), len(found))  # as many guesses as the attack has
    public, names = truth.candidates, truth.candidate_labels
    lucky = [
        by_luck(true, public, tokens, seed, count=count),
        by_luck(true, public, tokens, seed, count=count, whole=True, labels=classes, public_labels=names),
    ]
    mean = sum(one) / len(one)
    p_value = max((1 + sum(value >= mean for value in way)) / (1 + len(way)) for way in lucky)
    best = max((1 + sum(value >= 1 for value in way)) / (1 + len(way)) for way in lucky)
    guess = max(sum(way) / len(way) for way in lucky)
    over = interval(one, resamples=_RESAMPLES, seed=seed, least=0, most=1)
    results = [
        SequenceResult(
            true=t,
            found=[] if p is None else found[p],
            rouge1=a,
            rouge2=b,
            label=None if classes is None else int(classes[i]),
        )
        for i, (t, p, a, b) in enumerate(zip(true, pairs, one, two, strict=True))
    ]
    result = done(
        finding,
        observation,
        metrics=[
            ROUGE1.of(mean, guess, low=over.low, high=over.high, n=len(true), of="sequences"),
            ROUGE2.of(sum(two) / len(two), n=len(true), of="sequences"),
            EXACT.share(exact, len(true), "sequences", 0.0),
        ],
        victims=victims_of(wholes.unique(dim=0)),
        leak=leaks(mean > guess, p_value),
        p_value=p_value,
        p_value_at_best=best,
        sequences=results[:_SHOWN],
    )
    return Evaluation(result)


def by_luck(
    true: Sequence[Sequence[int]],
    public: Tensor,
    tokens: TokenInfo,
    seed: int,
    draws: int = _DRAWS,
    *,
    count: int | None = None,
    whole: bool = False,
    labels: Sequence[int] | None = None,
    public_labels: Tensor | None = None,
) -> list[float]:
    """Return the mean ROUGE-1 of so many guesses at all true sequences, by what held-out ones (m, length) are like.

    A guess has, at every place, the word of a held-out sequence drawn for that place alone; or it is a ``whole``
    held-out sequence, where labels are known one of the same label. ``count`` guesses, by default as many as there are
    true ones, are paired with these so that they share as much as can be, which is rather too good than too bad: the
    attack's are paired by pairs of neighbouring words, too.
    """
    count = len(true) if count is None else count
    rng = generator(seed, "whole sequences by luck" if whole else "sequences by luck")
    if whole:
        others = torch.tensor([tokens.words_of(row) not in true for row in public])
        others = others if bool(others.any()) else torch.ones_like(others)
        pools = _pools(others, count, labels, public_labels)
    length = public.shape[1]
    kept = sorted({word for sequence in true for word in sequence})
    place = {word: i for i, word in enumerate(kept)}
    wanted = torch.zeros(len(true), len(kept))
    for row, sequence in zip(wanted, true, strict=True):
        for word in sequence:
            row[place[word]] += 1
    column = torch.full((tokens.vocabulary,), len(kept))
    column[kept] = torch.arange(len(kept))
    nothing = torch.zeros(tokens.vocabulary, dtype=torch.bool)
    nothing[[t for t in (tokens.padding, tokens.end) if t is not None]] = True
    scores = []
    for _ in range(draws):
        if whole:
            rows = torch.stack([pool[torch.randint(len(pool), (), generator=rng)] for pool in pools])
            words = public[rows]
        else:
            rows = torch.randint(len(public), (count, length), generator=rng)
            words = public[rows, torch.arange(length)]
        sizes = (~nothing[words]).sum(dim=1)
        counts = torch.zeros(count, len(kept) + 1).scatter_add_(1, column[words], (~nothing[words]).float())
        shared = torch.minimum(counts[:, None, :-1], wanted[None]).sum(dim=2)
        f1 = 2 * shared / (sizes[:, None] + wanted.sum(dim=1)[None]).clamp(min=1)
        scores.append(float(f1[linear_sum_assignment(-f1.numpy())].sum()) / len(true))
    return scores


def _verdict(findings: Sequence[FindingResult]) -> Judgement:
    n = sum(m.n or 0 for f in findings for m in f.metrics if m.name == EXACT.name)
    exact = round(sum((m.n or 0) * m.value for f in findings for m in f.metrics if m.name == EXACT.name))
    p, _ = by_fisher(findings)
    if not exact or p > SURE:
        return _BY_WORDS(findings)
    text = f"{exact} of {n} {'sequence' if n == 1 else 'sequences'} came out word for word; p = {p:.2g}"
    what = "sequences that came out word for word"
    test = "Monte Carlo test of ROUGE-1 against guesses by the marginal and other people's sequences"
    evidence = share_of(what, exact, n, "sequences", test=test, by_guessing=0.0, p_value=p)
    headline = f"{{who}} can read what clients wrote: {exact} of {n} training {{things}} came out word for word."
    return Judgement("recovered", text, evidence, headline)


_BY_WORDS = by_test(
    ROUGE1.name,
    "sequences",
    "bootstrap interval; Monte Carlo test against guesses by the public marginal and whole sequences of others, "
    "updates combined by Fisher's method",
    "{who} can tell words of training {things}: of each, {share} % of the words, where guessing gets {guess} %.",
)

FINDING_TYPES["sequences"] = FindingType(
    verdict=_verdict,
    rules=(
        "Sequences are 'recovered' when at least one came out word for word, and luck doesn't explain what came out: "
        f"guessing gets as much ROUGE-1 with a probability of at most {100 * SURE:g} %. A guess has, at every place, a "
        "word drawn as often as held-out sequences have it there, or is a whole held-out sequence of the same label. "
        "Padding and the token that ends every sequence don't count.",
        "Sequences are 'inferred' when none came out word for word, and the same test excludes luck.",
    ),
    metrics=(ROUGE1, ROUGE2, EXACT),
    question="read training {things}",
    control="example",
    worst="recovered",
)


@evaluate.register
def evaluate_tokens(finding: TokenFinding, observation: Observation, truth: Truth, *, seed: int) -> Evaluation:
    """Compare the words that were named with those that occur; the baseline is the better one of two that name as many.

    One draws words by how often held-out sequences have them. The other takes the words of held-out sequences, of the
    same labels where those are classes, one sequence after the other until they are enough: words of one sequence
    belong together. The p-value is the larger share of 2,000 such draws that name as many of the true ones.
    """
    message, tokens = observation.messages[0], observation.task_info.tokens
    assert tokens is not None
    known = [t for t in (tokens.padding, tokens.end) if t is not None]

    def different(values: Tensor) -> Tensor:
        values = values.unique()
        return values[~torch.isin(values, torch.tensor(known, dtype=torch.int64))]

    true, named = different(truth.inputs[message.round, message.client]), different(finding.tokens)
    if not len(true):
        return refused(finding, observation, "there is no word in the update's sequences to be named")
    right = int(torch.isin(true, named).sum())
    weights = torch.bincount(truth.candidates.flatten(), minlength=finding.vocabulary).double() + 1e-9
    weights[known] = 0
    ways = [np.zeros(_WORD_DRAWS)]
    if len(named):
        rng = generator(seed, "words by luck")
        draws = torch.multinomial(weights.expand(_WORD_DRAWS, -1), len(named), generator=rng)
        ways = [torch.isin(draws, true).sum(dim=1).numpy()]
        uses, labels = truth.inputs[message.round, message.client], truth.labels[message.round, message.client]
        classes = labels.tolist() if labels.ndim == 1 and not labels.is_floating_point() else None
        others = _others(uses, truth.candidates)
        pools = _pools(others, len(uses), classes, truth.candidate_labels)
        words, places = truth.candidates.unique(return_inverse=True)
        there = torch.zeros(len(places), len(words), dtype=torch.bool)
        there.scatter_(1, places, torch.ones_like(places, dtype=torch.bool))
        there[:, torch.isin(words, torch.tensor(known, dtype=words.dtype))] = False
        right_ones = torch.nonzero(torch.isin(words, true)).flatten()
        rng = generator(seed, "words of sequences by luck")
        ways.append(_hits_of_wholes(there, pools, right_ones, len(named), rng))
    p_value, best = (max((1 + int((hits >= k).sum())) / (1 + len(hits)) for hits in ways) for k in (right, len(true)))
    recall, guess = right / len(true), max(float(hits.mean()) for hits in ways) / len(true)
    result = done(
        finding,
        observation,
        metrics=[
            RECALL.share(right, len(true), "words", guess),
            PRECISION.of(right / max(1, len(named))),
        ],
        victims=victims_of(true),
        leak=leaks(recall > guess, p_value),
        p_value=p_value,
        p_value_at_best=best,
    )
    return Evaluation(result)


def _hits_of_wholes(
    there: Tensor, pools: Sequence[Tensor], true: Tensor, count: int, rng: torch.Generator
) -> np.ndarray:
    """Return (draws,) how many of the ``true`` words are among ``count`` different ones of sequences that are drawn.

    Args:
        there: (m, w) which words each sequence has.
        pools: of each guess in turn, the sequences that it is drawn from; they are gone through again where that isn't
            enough words, and the rest is missing where it never is.
        true: those words, by their place.
        count: of the words that are named; of the last sequence as many as are still wanted, drawn at random.
        rng: of the draws.
    """
    wanted = torch.zeros(there.shape[1])
    wanted[true] = 1
    named = torch.zeros(_WORD_DRAWS, there.shape[1], dtype=torch.bool)
    for _ in range(_TURNS):
        for pool in pools:
            left = count - named.sum(dim=1)
            if not bool((left > 0).any()):
                return np.asarray((named.float() @ wanted).numpy())
            new = there[pool[torch.randint(len(pool), (_WORD_DRAWS,), generator=rng)]] & ~named
            for row in torch.nonzero(new.sum(dim=1) > left).flatten().tolist():
                more = torch.nonzero(new[row]).flatten()
                new[row, more[torch.randperm(len(more), generator=rng)[int(left[row]) :]]] = False
            named |= new
    return np.asarray((named.float() @ wanted).numpy())


def _others(own: Tensor, public: Tensor) -> Tensor:
    """Return which (m,) public sequences are none of the update's; all where there are no others."""
    others = ~(public[:, None] == own[None].to(public)).all(dim=2).any(dim=1)
    return others if bool(others.any()) else torch.ones_like(others)


def _pools(others: Tensor, count: int, labels: Sequence[int] | None, public_labels: Tensor | None) -> list[Tensor]:
    """Return of each of ``count`` guesses the public sequences that it is drawn from: of its label, where known."""
    everybody = torch.nonzero(others).flatten()
    if labels is None or public_labels is None or public_labels.ndim != 1:
        return [everybody] * count
    own = {label: torch.nonzero(others & (public_labels == label)).flatten() for label in set(labels)}
    alike = itertools.islice(itertools.cycle(labels), count)
    return [own[label] if len(own[label]) else everybody for label in alike]


FINDING_TYPES["tokens"] = FindingType(
    verdict=by_test(
        RECALL.name,
        "words",
        "exact binomial interval (Clopper-Pearson); Monte Carlo test against naming as many words by their frequency, "
        "and those of other people's sequences",
        "{who} can tell which words training {things} have: {share} % of {n} words were named, where guessing as "
        "many finds {guess} %.",
    ),
    rules=(
        "Words are 'inferred' when more of those that occur in an update were named than by naming as many at random, "
        "as often as held-out sequences have them, and than by naming as many of whole held-out sequences of the same "
        f"labels: 2,000 draws do as well with a probability of at most {100 * SURE:g} %.",
    ),
    metrics=(RECALL, PRECISION),
    question="tell which words training {things} have",
    control="example",
)
