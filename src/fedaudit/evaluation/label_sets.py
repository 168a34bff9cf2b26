"""Inferred label sets of a multi-label task against those that were trained on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from fedaudit.attacks.labels.attack import LabelSetFinding
from fedaudit.evaluation.finding_types import (
    FINDING_TYPES,
    Evaluation,
    FindingType,
    KnownExamples,
    Metric,
    done,
    evaluate,
    refused,
    victims_of,
)
from fedaudit.evaluation.labels import COUNTS
from fedaudit.evaluation.statistics import SURE
from fedaudit.evaluation.verdicts import by_test, leaks
from fedaudit.results import Evidence, FindingResult
from fedaudit.transcript.observation import Observation
from fedaudit.transcript.truth import Truth
from fedaudit.utils.seeds import derive_seed

_DRAWS = 10_000
_FEWEST = 1_000  # draws, of large batches
_WORK = 5_000_000  # entries of distances, by which draws are fewer
_HELD = 4_000_000  # numbers of other batches that are held at once
_ASSIGNED = 200  # examples, beyond which labels are matched one by one

SETS = Metric(
    "label_average_precision",
    "average precision of all examples' labels, each example matched with a label set found",
    ends=(0, 1),
)
PRESENCE = Metric(
    "presence_average_precision",
    "average precision of which labels occur in the batch, by how often each was estimated to",
    ends=(0, 1),
)
WHOLE = Metric("whole_label_sets", "share of the examples whose label set was found without a fault", ends=(0, 1))
_SHOWN = 64  # examples of a batch, whose label sets are kept for the report
_TOGETHER = ("sign", "span")  # methods that tell which labels occur together


@evaluate.register
def evaluate_label_sets(finding: LabelSetFinding, observation: Observation, truth: Truth, *, seed: int) -> Evaluation:
    """Compare inferred label sets with the true ones, in the order that fits best (least Hamming distance in all).

    The average precision is the micro-average over examples and labels. Without the attack it is what the label sets
    found get of other batches, of examples drawn from the candidates with all of their labels, so that what often
    occurs together does so there, too. Luck is excluded by a Monte Carlo test: how many of these (10,000; of large
    batches fewer, 1,000 at least) the label sets found fit as well as the true ones. Beyond 200 examples labels are
    matched one by one, as if each example could have any: only their counts matter.
    """
    true, uses = _true(finding, observation, truth)
    found = finding.labels
    if found.shape != true.shape:
        return refused(
            finding,
            observation,
            f"{len(found)} label sets for {len(true)} different examples: how many the client holds wasn't known; "
            "grant the training (threat.knows_training)",
        )
    draws = max(_FEWEST, min(_DRAWS, _WORK // len(true) ** 2))
    others = _other_batches(truth.candidate_labels, uses, draws, seed)
    hits, whole, order = matched(found, true)
    value = average_precision(found, true, hits)
    chance_level, best = np.hstack([[_precisions(own, batches) for own in (found, true)] for batches in others])
    p_value, at_best = (
        (1 + int((luck >= top - 1e-9).sum())) / (1 + draws) for luck, top in ((chance_level, value), (best, 1.0))
    )
    guess = float(chance_level.mean())
    counted, there = found.sum(dim=0), true.sum(dim=0)
    metrics = [
        SETS.of(value, guess, n=1, of="updates"),
        WHOLE.share(whole, len(true), "examples"),
        COUNTS.of(float((counted == there).double().mean())),
    ]
    if bool((there > 0).any()):
        metrics.append(PRESENCE.of(_ranked(finding.counts, there > 0), float((there > 0).double().mean())))
    result = done(
        finding,
        observation,
        metrics=metrics,
        victims=victims_of(true[np.lexsort(true.T.numpy())]),
        label_source=finding.method,
        is_leak=leaks(value > guess, p_value),
        p_value=p_value,
        p_value_at_best=at_best,
        details={"label_sets": _as_numbers(found[order], true)} if finding.method in _TOGETHER else {},
    )
    return Evaluation(result)


def _as_numbers(found: Tensor, true: Tensor) -> list[dict[str, list[int]]]:
    """Return the numbers of each example's labels (n, k), true and found, of the first examples."""
    return [
        {"true": there.nonzero()[:, 0].tolist(), "found": named.nonzero()[:, 0].tolist()}
        for named, there in zip(found[:_SHOWN], true[:_SHOWN], strict=True)
    ]


def _true(finding: LabelSetFinding, observation: Observation, truth: Truth) -> tuple[Tensor, Tensor]:
    """Return (n, k) the labels that were to be found, and how often each different example's are among them.

    Those of several updates are the client's, each once, or as often as an update over all of them uses them.
    """
    key = observation.messages[0].round, observation.messages[0].client
    if len(observation.messages) > 1:
        labels = truth.held_by(key[1])[1]
        times = max(1, len(finding.labels) // len(labels))
        return labels.repeat(times, 1), torch.full((len(labels),), times)
    return truth.labels[key], torch.tensor(truth.different(key)[1])


def _other_batches(candidates: Tensor, uses: Tensor, draws: int, seed: int) -> Iterator[np.ndarray]:
    """Yield label sets (b, n, k) of other batches: of different candidates, while there are enough, used as often."""
    rng = np.random.default_rng(derive_seed(seed, "label sets of other batches"))
    scarce = len(candidates) <= len(uses)
    sets, times = candidates.numpy(), uses.numpy()
    at_once = max(1, min(draws, _HELD // max(1, int(times.sum()) * max(int(times.sum()), sets.shape[1]))))
    for start in range(0, draws, at_once):
        count = min(at_once, draws - start)
        rows = [rng.choice(len(sets), len(times), replace=scarce).repeat(times) for _ in range(count)]
        yield sets[np.stack(rows)]


def _precisions(found: Tensor, batches: np.ndarray) -> np.ndarray:
    """Return (b,) the average precision of label sets (n, k) in each batch (b, n, k), as ``matched`` fits them."""
    ours, (_, many, labels) = found.numpy(), batches.shape
    there = batches.sum(axis=(1, 2), dtype=float)
    if many > _ASSIGNED:
        hits = np.minimum(ours.sum(axis=0), batches.sum(axis=1)).sum(axis=1, dtype=float)
    else:
        both = ours @ batches.swapaxes(1, 2)
        apart = ours.sum(axis=1)[:, None] + batches.sum(axis=2)[:, None] - 2 * both
        hits = np.array([b[linear_sum_assignment(a)].sum() for a, b in zip(apart, both, strict=True)], dtype=float)
    named = float(ours.sum())
    recall = hits / np.maximum(there, 1)
    precision = hits / named if named else np.zeros_like(hits)
    area = recall * precision + (1 - recall) * there / (many * labels)
    return np.where(there > 0, area, float(not named))


def matched(found: Tensor, true: Tensor) -> tuple[int, int, Tensor]:
    """Return how many labels (n, k) are right in the best order, how many rows, and (n,) the row found for each."""
    if len(true) > _ASSIGNED:
        return int(torch.minimum(found.sum(dim=0), true.sum(dim=0)).sum()), 0, torch.arange(len(true))
    ours, theirs = found.numpy(), true.numpy()
    both = ours @ theirs.T
    apart = ours.sum(axis=1)[:, None] + theirs.sum(axis=1) - 2 * both
    rows, columns = linear_sum_assignment(apart)
    order = torch.from_numpy(rows[columns.argsort()])
    return int(both[rows, columns].sum()), int((apart[rows, columns] == 0).sum()), order


def average_precision(found: Tensor, true: Tensor, hits: int) -> float:
    """Return (n, k) labels' area under the recall's two steps; without true ones 1 if none was found, else 0."""
    named, there = float(found.sum()), float(true.sum())
    if not there:
        return float(not named)
    recall, precision = hits / there, hits / named if named else 0.0
    return recall * precision + (1 - recall) * there / true.numel()


def _ranked(scores: Tensor, there: Tensor) -> float:
    """Return the average precision of (k,) scores of what is ``there``, ties as one step."""
    area, seen, right = 0.0, 0, 0
    for value in scores.unique().flip(0):
        tied = scores == value
        seen, more = seen + int(tied.sum()), int((tied & there).sum())
        right += more
        area += more / int(there.sum()) * right / seen
    return area


def _headline(findings: Sequence[FindingResult], evidence: Evidence) -> str:
    """Return the leak in words: of label sets, or of counts where no update told which labels occur together."""
    updates = f"{len(findings)} {'update' if len(findings) == 1 else 'updates'}"
    if all(f.label_source in ("counts", "signs") for f in findings):
        there = [m for f in findings for m in f.metrics if m.name == PRESENCE.name]
        value, guess = (
            sum(values) / max(1, len(there))
            for values in ([m.value for m in there], [m.baseline or 0.0 for m in there])
        )
        return (
            "{who} can tell which labels occur among a client's examples, but not which of them together: an "
            f"average precision of {100 * value:.0f} %, where guessing gets {100 * guess:.0f} % (in {updates})."
        )
    value, guess = evidence.value, evidence.baseline or 0.0
    return (
        "{who} can tell which labels a client's examples have: an average precision of "
        f"{100 * value:.0f} %, where what was found gets {100 * guess:.0f} % of other batches (in {updates})."
    )


def _precise(precision: Evidence) -> str:
    """Return an average precision, with that of other batches in brackets."""
    other = precision.baseline
    return f"{precision.value:.2f}" + ("" if other is None else f" ({other:.2f} in other batches)")


FINDING_TYPES["label-sets"] = FindingType(
    verdict=by_test(SETS.name, "updates", "Monte Carlo test", _headline),
    rules=(
        "Label sets of a multi-label task are 'inferred' when their average precision is above what they get of other "
        f"batches, and they fit at most {100 * SURE:g} % of such batches as well as their own (Monte Carlo test). "
        "Other batches are drawn from the candidates, each example with all its labels; several updates count together "
        "by Fisher's method.",
    ),
    metrics=(SETS, WHOLE, COUNTS, PRESENCE),
    question="tell which labels a client's examples have",
    control="example",
    easy_updates=2,
    known=KnownExamples(
        lambda known, case: f"in {known.n} {case} its average precision is {_precise(known)}",
        lambda own: f"in the clients' {_precise(own)}",
        clients=8,
    ),
    averaged="averaged-labels",
)
