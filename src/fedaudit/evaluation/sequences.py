"""Recovered sequences and words against the ones that were trained on."""

from __future__ import annotations

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
from fedaudit.evaluation.other_batches import Batches, other_batches, p_value, paired, with_remedy
from fedaudit.evaluation.shift import SHIFTED, comparable, told_apart
from fedaudit.evaluation.statistics import SURE, interval
from fedaudit.evaluation.verdicts import Judgement, by_fisher, by_test, by_victims, leaks, share_of
from fedaudit.modalities import TokenInfo
from fedaudit.results import FindingResult, SequenceResult
from fedaudit.results.rows import SequenceDetail
from fedaudit.transcript.observation import Observation
from fedaudit.transcript.truth import Truth

_RESAMPLES = 2000
_SHOWN = 64  # sequences of a finding that are kept for the report

EXACT = Metric("exact_sequences", "share of the sequences that were recovered word for word", ends=(0, 1))
ROUGE1 = Metric(
    "rouge1", "ROUGE-1: words that a recovered sequence and the true one share (F1), mean over all", ends=(0, 1)
)
ROUGE2 = Metric("rouge2", "ROUGE-2: likewise of pairs of neighbouring words", ends=(0, 1))
RECALL = Metric(
    "words_found",
    "share of the different words in the update that were named; without the attack: of other batches",
    ends=(0, 1),
)
PRECISION = Metric("words_right", "share of the named words that occur in the update", ends=(0, 1))


def rouge(found: Sequence[int], true: Sequence[int], n: int) -> float:
    """Return ROUGE-n (Lin 2004), the F1 of shared n-grams, on tokens and without stemming; 1 where neither has any."""
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

    Luck is what the same sequences get of other batches, of held-out sequences and the update's own, of the same labels
    where those are classes (:mod:`fedaudit.evaluation.other_batches`). The p-value is the share of 1,000 batches, its
    own among them, that they fit as well: by the mean ROUGE-1, paired one to one, and one more for each sequence with
    all words right. A sequence that anybody else has word for word, such as a form that nobody filled in, counts for
    nothing.
    """
    message, tokens = observation.messages[0], observation.task_info.tokens
    assert tokens is not None
    key = message.round, message.client
    first = truth.different(key)[0]
    wholes, label = truth.inputs[key][first], truth.labels[key][first]
    true = [tokens.words_of(row) for row in wholes]
    found = [tokens.words_of(row) for row in finding.sequences]
    pairs = matched(found, true)
    results = [
        SequenceResult(
            true=t,
            found=[] if p is None else found[p],
            rouge1=0.0 if p is None else rouge(found[p], t, 1),
            rouge2=0.0 if p is None else rouge(found[p], t, 2),
            label=int(label[i]) if label.ndim == 1 and not label.is_floating_point() else None,
        )
        for i, (t, p) in enumerate(zip(true, pairs, strict=True))
    ]
    kept, shift = comparable(truth, [key], seed=seed)
    batches = other_batches(truth, kept, key, seed=seed, once=True)
    fits, elsewhere = _fits(finding.sequences, batches, tokens)
    alone = [one for one, counts in zip(results, batches.counted.tolist(), strict=True) if counts]
    judged = alone or results  # where others have them all, guessing gets them all
    over = interval([r.rouge1 for r in judged], resamples=_RESAMPLES, seed=seed, least=0, most=1)
    guess, p = (elsewhere, p_value(fits)) if alone else (1.0, 1.0)
    exact = sum(r.found == r.true for r in alone)
    result = done(
        finding,
        observation,
        _notes(batches, shift),
        SequenceDetail(sequences=results[:_SHOWN]),
        metrics=[
            ROUGE1.of(over.mean, guess, low=over.low, high=over.high, n=len(judged), of="sequences"),
            ROUGE2.of(sum(r.rouge2 for r in judged) / len(judged), n=len(judged), of="sequences"),
            EXACT.share(exact, len(judged), "sequences", 0.0),
        ],
        victims=victims_of(wholes.unique(dim=0)),
        is_leak=leaks(over.mean > guess, p),
        p_value=p,
        p_value_at_best=batches.best,
        blind_p_value=shift,
    )
    return Evaluation(result)


def _notes(batches: Batches, shift: float) -> list[str]:
    """Return what is to be said of sequences that don't count, and of held-out ones that may not serve."""
    common, n = int((~batches.counted).sum()), len(batches.counted)
    notes = [f"{common} of {n} sequences are others' as well, word for word, and count for nothing"] if common else []
    return [*notes, told_apart(shift)] if shift <= SHIFTED else notes


def _fits(found: Tensor, batches: Batches, tokens: TokenInfo) -> tuple[Tensor, float]:
    """Return (1 + d,) how well (k, length) sequences fit each batch, paired one to one, and their mean ROUGE-1.

    A fit is the mean ROUGE-1, plus one for each sequence with all words right.
    """
    nothing = torch.tensor([t for t in (tokens.padding, tokens.end) if t is not None])
    sizes = (~torch.isin(batches.inputs, nothing)).sum(dim=1)
    f1 = torch.zeros(len(found), len(batches.inputs), dtype=torch.float64)
    column = torch.full((tokens.vocabulary,), -1)
    for scores, sequence in zip(f1, found, strict=True):
        words, counts = sequence[~torch.isin(sequence, nothing)].unique(return_counts=True)
        column[words] = torch.arange(len(words))
        places = column[batches.inputs]
        column[words] = -1
        theirs = torch.zeros(len(places), len(words) + 1, dtype=torch.int64)
        theirs.scatter_add_(1, places.where(places >= 0, torch.tensor(len(words))), torch.ones_like(places))
        shared = torch.minimum(theirs[:, :-1], counts).sum(dim=1)
        scores[:] = 2 * shared / (sizes + counts.sum()).clamp(min=1)
    fits = -paired(-f1.T - (f1.T >= 1).double(), batches)
    n = max(1, batches.dealt.shape[1])
    return fits.sum(dim=1) / n, float(fits.clamp(max=1).sum(dim=1).mean()) / n


def _verdict(findings: Sequence[FindingResult]) -> Judgement:
    shown = [[m for f in of for m in f.metrics if m.name == EXACT.name] for of in by_victims(findings)]
    best = [max(of, key=lambda m: m.value) for of in shown]  # of rounds that show the same, the one that shows most
    n, exact = sum(m.n or 0 for m in best), round(sum((m.n or 0) * m.value for m in best))
    p, _ = by_fisher(findings)
    if not exact or p > SURE:
        return _BY_WORDS(findings)
    text = f"{exact} of {n} {'sequence' if n == 1 else 'sequences'} came out word for word; p = {p:.2g}"
    what = "sequences that came out word for word"
    test = "Monte Carlo test of ROUGE-1 against other batches"
    evidence = share_of(what, exact, n, "sequences", test=test, baseline=0.0, p_value=p)
    headline = f"{{who}} can read what clients wrote: {exact} of {n} training {{things}} came out word for word."
    return Judgement("recovered", text, evidence, headline)


_BY_WORDS = by_test(
    ROUGE1.name,
    "sequences",
    "bootstrap interval; Monte Carlo test against other batches, updates combined by Fisher's method",
    "{who} can tell words of training {things}: of each, {share} % of the words, and {guess} % of other people's.",
)

FINDING_TYPES["sequences"] = FindingType(
    verdict=with_remedy(_verdict),
    rules=(
        "Sequences are 'recovered' when at least one came out word for word, and luck doesn't explain what came out: "
        f"they have as much ROUGE-1 of at most {100 * SURE:g} % of other batches. Other batches are dealt of held-out "
        "sequences of the same labels and the update's own; of those of the same client alone, where held-out ones can "
        "be told from these without the update. Padding, the token that ends every sequence, and sequences that "
        "others have as well, word for word, don't count.",
        "Sequences are 'inferred' when none came out word for word, and the same test excludes luck.",
    ),
    metrics=(ROUGE1, ROUGE2, EXACT),
    question="read training {things}",
    control="example",
    worst="recovered",
)


@evaluate.register
def evaluate_tokens(finding: TokenFinding, observation: Observation, truth: Truth, *, seed: int) -> Evaluation:
    """Compare the words that were named with those that occur; the baseline is what they get of other batches.

    These are dealt as for sequences: of held-out ones and the update's own, of the same labels where those are classes,
    without what anybody else has word for word. The p-value is the share of 1,000 batches, its own among them, of whose
    different words as large a part was named.
    """
    message, tokens = observation.messages[0], observation.task_info.tokens
    assert tokens is not None
    nothing = torch.tensor([t for t in (tokens.padding, tokens.end) if t is not None], dtype=torch.int64)

    def different(values: Tensor) -> Tensor:
        values = values.unique()
        return values[~torch.isin(values, nothing)]

    key = message.round, message.client
    kept, shift = comparable(truth, [key], seed=seed)
    batches, named = other_batches(truth, kept, key, seed=seed, once=True), different(finding.tokens)
    alone = bool(batches.counted.any())
    true = different(batches.inputs[batches.dealt[0]] if alone else truth.inputs[key])
    if not len(true):
        return refused(finding, observation, "there is no word in the update's sequences to be named")
    right = int(torch.isin(true, named).sum())
    guess = p = 1.0  # where others have all that there is
    if alone:
        found = _named(named, batches, nothing)
        guess, p = float(found.mean()), p_value(found)
    result = done(
        finding,
        observation,
        _notes(batches, shift),
        metrics=[
            RECALL.share(right, len(true), "words", guess),
            PRECISION.of(int(torch.isin(named, truth.inputs[key]).sum()) / max(1, len(named))),
        ],
        victims=victims_of(true),
        is_leak=leaks(right / len(true) > guess, p),
        p_value=p,
        p_value_at_best=p_value(_named(true, batches, nothing)) if alone else 1.0,
        blind_p_value=shift,
    )
    return Evaluation(result)


def _named(named: Tensor, batches: Batches, nothing: Tensor) -> Tensor:
    """Return (1 + d,) the share of each batch's different words that are among those that were named."""
    words, places = batches.inputs.unique(return_inverse=True)
    there = torch.zeros(len(places), len(words), dtype=torch.bool)
    there.scatter_(1, places, torch.ones_like(places, dtype=torch.bool))
    there[:, torch.isin(words, nothing)] = False
    hits = torch.isin(words, named)
    own = torch.zeros(len(batches.dealt), len(words), dtype=torch.bool)
    for one in batches.dealt.T:
        own |= there[one]
    return own[:, hits].sum(dim=1).double() / own.sum(dim=1).clamp(min=1)


FINDING_TYPES["tokens"] = FindingType(
    verdict=with_remedy(
        by_test(
            RECALL.name,
            "words",
            "exact binomial interval (Clopper-Pearson); Monte Carlo test against other batches",
            "{who} can tell which words training {things} have: {share} % of {n} words were named, and {guess} % of "
            "those of other people's.",
        )
    ),
    rules=(
        "Words are 'inferred' when those that were named are as large a part of the words of at most "
        f"{100 * SURE:g} % of other batches, which are dealt as for sequences.",
    ),
    metrics=(RECALL, PRECISION),
    question="tell which words training {things} have",
    control="example",
)
