"""Inferred labels against the ones that were trained on."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import reduce

import numpy as np
import torch
from torch import Tensor

from fedaudit.attacks.labels.attack import LabelFinding
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
from fedaudit.evaluation.statistics import SURE
from fedaudit.evaluation.verdicts import by_fisher, by_test, by_victims, leaks
from fedaudit.results import FindingResult
from fedaudit.transcript.observation import Observation
from fedaudit.transcript.truth import Truth
from fedaudit.utils.seeds import generator

_DRAWS = 20_000

ACCURACY = Metric("label_accuracy", "share of the labels that were found, both sides counted with duplicates")
COUNTS = Metric(
    "count_accuracy", "share of the model's classes whose number of examples is right, absent ones included"
)
EXISTENCE = Metric("existence_accuracy", "share of the model's classes of which it is right whether they occur")


@evaluate.register
def evaluate_labels(finding: LabelFinding, observation: Observation, truth: Truth, *, seed: int) -> Evaluation:
    """Compare inferred labels with the true ones, as multisets; the baselines guess every class equally often.

    Luck is excluded by a Monte Carlo test against the better one of two, for each number of labels: 20,000 random draws
    of labels, every class as likely, against the true ones; and the labels found against as many draws of other
    batches, by how often the candidates have each class. So what fits any batch, as every class equally often does, is
    no leak. Of several updates the labels found are added up, and so are those found by luck. What was found of their
    mean is compared with the labels of all examples that they used, each as often as it counts. Examples that are used
    again in every epoch are drawn once.
    """
    true, times = true_labels(finding, observation, truth)
    true = true.flatten()
    if len(true) != len(finding.labels):
        return refused(
            finding,
            observation,
            f"{len(finding.labels)} labels for {len(true)} different examples: how many the client holds wasn't known; "
            "grant the training (threat.knows_training)",
        )
    accuracy = label_accuracy(finding.labels, true)
    equally = torch.arange(len(true)) % finding.num_classes
    guess = label_accuracy(equally, true)
    by_class, by_guess = (class_accuracies(labels, true, finding.num_classes) for labels in (finding.labels, equally))
    found = round(accuracy * len(true))
    anything = torch.ones(finding.num_classes, dtype=torch.float64)
    others = torch.bincount(truth.candidate_labels.flatten(), minlength=finding.num_classes).double()
    by_luck = _better(
        _found_by_luck(true, anything, len(true), times, generator(seed, "labels by luck")),
        _found_by_luck(finding.labels, others, len(true), times, generator(seed, "labels of other batches")),
    )
    p_value = _at_least(by_luck, found)
    result = done(
        finding,
        observation,
        metrics=[
            ACCURACY.share(found, len(true), "labels", guess),
            COUNTS.of(by_class[0], by_guess[0]),
            EXISTENCE.of(by_class[1], by_guess[1]),
        ],
        victims=victims_of(true.sort().values),
        label_source=finding.method,
        label_accuracy=accuracy,
        leak=leaks(accuracy > guess, p_value),
        p_value=p_value,
        p_value_at_best=_at_least(by_luck, len(true)),
        by_luck=by_luck.tolist(),
    )
    return Evaluation(result)


def label_accuracy(inferred: Tensor, true: Tensor) -> float:
    """Return the share of the (n,) true labels that were recovered, both taken as multisets."""
    length = int(max(inferred.max(), true.max())) + 1
    overlap = torch.minimum(torch.bincount(inferred, minlength=length), torch.bincount(true, minlength=length))
    return float(overlap.sum()) / len(true)


def class_accuracies(inferred: Tensor, true: Tensor, classes: int) -> tuple[float, float]:
    """Return of how many of the ``classes``, as a share, the number of labels is right, and whether there are any.

    As the logs and the code of iLRG's authors have it (Ma et al. 2023: LnAcc, LeAcc), absent classes included.
    """
    found, there = (torch.bincount(labels, minlength=classes) for labels in (inferred, true))
    return float((found == there).double().mean()), float(((found > 0) == (there > 0)).double().mean())


def true_labels(finding: LabelFinding, observation: Observation, truth: Truth) -> tuple[Tensor, int]:
    """Return the labels (n, ...) that were to be found, and how often each example is among them, if all equally often.

    Of several updates these are the client's, each once, or as often as an update over all of them uses them.
    """
    key = observation.messages[0].round, observation.messages[0].client
    if len(observation.messages) > 1:
        labels = truth.held_by(key[1])[1]
        times = max(1, len(finding.labels) // len(labels))
        return labels.repeat(times, *[1] * (labels.ndim - 1)), times
    uses = truth.rows[key].unique(return_counts=True)[1] if key in truth.rows else torch.ones(1)
    return truth.labels[key], int(uses[0]) if len(uses.unique()) == 1 else 1


def _found_by_luck(fixed: Tensor, weights: Tensor, n: int, times: int, rng: torch.Generator) -> np.ndarray:
    """Return the shares of draws of n labels that have 0 to n of the ``fixed`` ones, both as multisets.

    Each label drawn counts ``times``: it is that of an example which was used so often.
    """
    if not n or not float(weights.sum()):
        return np.array([1.0] + n * [0.0])  # none at all
    wanted = torch.bincount(fixed, minlength=len(weights))
    drawn = torch.multinomial(weights.expand(_DRAWS, -1), n // times, replacement=True, generator=rng)
    each = torch.full_like(drawn, times)
    counts = torch.zeros((_DRAWS, len(wanted)), dtype=torch.int64).scatter_add_(1, drawn, each)
    shares: np.ndarray = torch.bincount(torch.minimum(counts, wanted).sum(dim=1), minlength=n + 1).numpy() / _DRAWS
    return shares


def _better(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Return the shares of a luck that finds so many labels or more, however many, as often as the better of two."""
    tails = np.maximum(one[::-1].cumsum(), other[::-1].cumsum())
    shares: np.ndarray = np.diff(tails, prepend=0.0)[::-1].clip(0.0)
    return shares


def _at_least(by_luck: np.ndarray, found: int) -> float:
    """Return the Monte Carlo p-value of ``found``, which is counted as one of the draws."""
    return float((by_luck[found:].sum() * _DRAWS + 1) / (_DRAWS + 1))


def _together(findings: Sequence[FindingResult]) -> tuple[float, float | None]:
    """Return the p-value of all labels that were found, and the one if all had been.

    Of several updates of a client with the same labels the mean counts as one.
    """
    if not all(f.by_luck for f in findings):
        return by_fisher(findings)
    found, total, by_luck = 0, 0, []
    for of in by_victims(findings):
        metrics = [m for f in of for m in f.metrics if m.name == ACCURACY.name]
        found += math.floor(sum(m.value * (m.n or 0) for m in metrics) / len(of) + 1e-6)
        total += max(m.n or 0 for m in metrics)
        chances = np.zeros(max(len(f.by_luck) for f in of))
        for f in of:
            chances[: len(f.by_luck)] += np.array(f.by_luck) / len(of)
        by_luck.append(chances)
    together = reduce(np.convolve, by_luck)
    return _at_least(together, found), _at_least(together, total)


FINDING_TYPES["labels"] = FindingType(
    verdict=by_test(
        ACCURACY.name,
        "labels",
        "exact binomial interval (Clopper-Pearson); Monte Carlo test",
        "{who} can tell which classes a client trained on: {share} % of {n} labels, where guessing gets {guess} % "
        "(in {updates}).",
        _together,
    ),
    rules=(
        "Labels are 'inferred' when more of them are found than by naming every class equally often, and luck does as "
        f"well with a probability of at most {100 * SURE:g} % (Monte Carlo test over the labels of all updates). Luck "
        "is the better one of two: random labels against the true ones, and the labels found against other batches of "
        "the candidates.",
    ),
    metrics=(ACCURACY, COUNTS, EXISTENCE),
    question="tell which classes a client trained on",
    control="example",
)
