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
    KnownExamples,
    Metric,
    done,
    evaluate,
    refused,
    victims_of,
)
from fedaudit.evaluation.statistics import SURE
from fedaudit.evaluation.verdicts import by_fisher, by_test, by_victims, leaks
from fedaudit.results import Evidence, FindingResult
from fedaudit.transcript.observation import Observation
from fedaudit.transcript.truth import Truth
from fedaudit.utils.seeds import derive_seed, generator

_DRAWS = 20_000

ACCURACY = Metric(
    "label_accuracy", "share of the labels that were found, both sides counted with duplicates", ends=(0, 1)
)
COUNTS = Metric(
    "count_accuracy",
    "share of the model's classes whose number of examples is right, absent ones included",
    ends=(0, 1),
)
EXISTENCE = Metric(
    "existence_accuracy", "share of the model's classes of which it is right whether they occur", ends=(0, 1)
)


@evaluate.register
def evaluate_labels(finding: LabelFinding, observation: Observation, truth: Truth, *, seed: int) -> Evaluation:
    """Compare inferred labels with the true ones, as multisets; the baselines guess every class equally often.

    Luck is excluded by a Monte Carlo test against the better one of two, for each number of labels: 20,000 random draws
    of labels, every class as likely, against the true ones; and the labels found against as many draws of other
    batches, which are different candidates. So what fits any batch, as every class equally often does, is no leak.
    Where no more candidates are known than the batch itself has, the draws are independent, by how often these have
    each class. Of several updates the labels found are added up, and so are those found by luck. What was found of
    their mean is compared with the labels of all examples that they used, each as often as it counts. An example that
    is used again is drawn once, and its label counts as often as it is used.
    """
    true, uses = _true(finding, observation, truth)
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
    others = torch.bincount(truth.candidate_labels.flatten(), minlength=finding.num_classes)
    chance_level = _better(
        _found_by_luck(true, _independent(anything, uses, generator(seed, "labels by luck"))),
        _found_by_luck(finding.labels, _other_batches(finding.labels, others, uses, seed)),
    )
    p_value = _at_least(chance_level, found)
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
        is_leak=leaks(accuracy > guess, p_value),
        p_value=p_value,
        p_value_at_best=_at_least(chance_level, len(true)),
        chance_level=chance_level.tolist(),
    )
    return Evaluation(result)


def label_accuracy(inferred: Tensor, true: Tensor) -> float:
    """Return the share of the (n,) true labels that were recovered, both taken as multisets."""
    length = int(max(inferred.max(), true.max())) + 1
    overlap = torch.minimum(torch.bincount(inferred, minlength=length), torch.bincount(true, minlength=length))
    return float(overlap.sum()) / len(true)


def class_accuracies(inferred: Tensor, true: Tensor, classes: int) -> tuple[float, float]:
    """Return of how many of the ``classes``, as a share, the number of labels is right, and whether there are any.

    As in the logs and the code of iLRG's authors (Ma et al. 2023: LnAcc, LeAcc), absent classes included.
    """
    found, there = (torch.bincount(labels, minlength=classes) for labels in (inferred, true))
    return float((found == there).double().mean()), float(((found > 0) == (there > 0)).double().mean())


def _true(finding: LabelFinding, observation: Observation, truth: Truth) -> tuple[Tensor, Tensor]:
    """Return (n,) the labels that were to be found, and how often each different example's is among them.

    Those of several updates are the client's, each once, or as often as an update over all of them uses them.
    """
    key = observation.messages[0].round, observation.messages[0].client
    if len(observation.messages) > 1:
        labels = truth.held_by(key[1])[1].flatten()
        times = max(1, len(finding.labels) // len(labels))
        return labels.repeat(times), torch.full_like(labels, times, dtype=torch.int64)
    labels = truth.labels[key]
    uses = torch.tensor(truth.different(key)[1])
    return labels.flatten(), uses.repeat_interleave(labels.numel() // max(1, len(labels)))


def _independent(weights: Tensor, uses: Tensor, rng: torch.Generator) -> Tensor:
    """Return (draws, classes) how often each label is among independent ones, one for each of the ``uses``."""
    counts = torch.zeros((_DRAWS, len(weights)), dtype=torch.int64)
    if not len(uses) or not float(weights.sum()):
        return counts  # none at all
    drawn = torch.multinomial(weights.double().expand(_DRAWS, -1), len(uses), replacement=True, generator=rng)
    return counts.scatter_add_(1, drawn, uses.expand(_DRAWS, -1))


def _other_batches(found: Tensor, candidates: Tensor, uses: Tensor, seed: int) -> Tensor:
    """Return (draws, classes) how often each found label is in other batches, which use no candidate twice.

    ``candidates``, (classes,): how many have each label; ``uses``: how often each of a batch's examples is used.
    """
    if len(uses) >= int(candidates.sum()):
        return _independent(candidates, uses, generator(seed, "labels of other batches"))
    rng = np.random.default_rng(derive_seed(seed, "labels of other batches"))
    counts = torch.zeros((_DRAWS, len(candidates)), dtype=torch.int64)
    kinds = [int(kind) for kind in found.unique() if kind < len(candidates)]  # of others nobody asks
    left = {kind: np.full(_DRAWS, int(candidates[kind])) for kind in kinds}
    total = int(candidates.sum())
    for times, size in zip(*(part.tolist() for part in uses.unique(return_counts=True)), strict=True):
        wanted, rest = np.full(_DRAWS, size), np.full(_DRAWS, total)
        for kind in kinds:  # multivariate hypergeometric, by its marginals
            rest -= left[kind]
            drawn = rng.hypergeometric(left[kind], rest, wanted)
            counts[:, kind] += times * torch.from_numpy(drawn)
            left[kind] -= drawn
            wanted -= drawn
        total -= size
    return counts


def _found_by_luck(fixed: Tensor, drawn: Tensor) -> np.ndarray:
    """Return the shares of draws (draws, classes) that have 0 to n of the (n,) ``fixed`` labels, both as multisets."""
    wanted = torch.bincount(fixed, minlength=drawn.shape[1])[: drawn.shape[1]]
    found = torch.minimum(drawn, wanted).sum(dim=1)
    shares: np.ndarray = torch.bincount(found, minlength=len(fixed) + 1).numpy() / _DRAWS
    return shares


def _better(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Return the shares of a luck that finds so many labels or more, however many, as often as the better of two."""
    tails = np.maximum(one[::-1].cumsum(), other[::-1].cumsum())
    shares: np.ndarray = np.diff(tails, prepend=0.0)[::-1].clip(0.0)
    return shares


def _at_least(chance_level: np.ndarray, found: int) -> float:
    """Return the Monte Carlo p-value of ``found``, which is counted as one of the draws."""
    return float((chance_level[found:].sum() * _DRAWS + 1) / (_DRAWS + 1))


def _together(findings: Sequence[FindingResult]) -> tuple[float, float | None]:
    """Return the p-value of all labels found, and if all had been; a client's updates with equal labels are one."""
    if not all(f.chance_level for f in findings):
        return by_fisher(findings)
    found, total, chance_level = 0, 0, []
    for of in by_victims(findings):
        metrics = [m for f in of for m in f.metrics if m.name == ACCURACY.name]
        found += math.floor(sum(m.value * (m.n or 0) for m in metrics) / len(of) + 1e-6)
        total += max(m.n or 0 for m in metrics)
        chances = np.zeros(max(len(f.chance_level) for f in of))
        for f in of:
            chances[: len(f.chance_level)] += np.array(f.chance_level) / len(of)
        chance_level.append(chances)
    together = reduce(np.convolve, chance_level)
    return _at_least(together, found), _at_least(together, total)


def _counted(share: Evidence) -> str:
    """Return how many were told, and in brackets how many there would be by guessing."""
    guessed = "" if share.baseline is None else f" (by guessing {round(share.baseline * share.n)})"
    return f"{round(share.value * share.n)}{guessed}"


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
    easy_updates=8,
    known=KnownExamples(
        lambda known, case: f"of {known.n} labels of {case} it told {_counted(known)}",
        lambda own: f"of the clients' {own.n}, {_counted(own)}",
        clients=8,
    ),
    averaged="averaged-labels",
)
