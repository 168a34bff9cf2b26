"""Labels of single examples of a vertical federation, or scores for them, against the true ones."""

from __future__ import annotations

import math

import numpy as np
import torch
from scipy.stats import binomtest, mannwhitneyu, ttest_ind
from torch import Tensor

from fedaudit.attacks import ExampleLabelFinding, LabelScoreFinding
from fedaudit.evaluation.finding_types import FINDING_TYPES, Evaluation, FindingType, Metric, done, evaluate, refused
from fedaudit.evaluation.statistics import SURE, proportion, rank_test
from fedaudit.evaluation.verdicts import by_test, leaks
from fedaudit.results import Chart, Line
from fedaudit.transcript.observation import Observation
from fedaudit.transcript.truth import Truth

ACCURACY = Metric(
    "example_label_accuracy", "share of the examples whose label was told rightly, one by one", ends=(0, 1)
)
LEAK_AUC = Metric(
    "leak_auc",
    "probability that an example of the rarer class gets a higher score than one of the other",
    ends=(0, 1),
)
_POINTS = 101  # of a drawn curve


def true_labels(examples: Tensor, truth: Truth) -> Tensor:
    """Return (m,) the true labels of a vertical federation's ``examples``, by their numbers."""
    return torch.stack([truth.labels[i, 0].flatten()[0] for i in examples.tolist()])


@evaluate.register
def evaluate_labels(finding: ExampleLabelFinding, observation: Observation, truth: Truth, *, seed: int) -> Evaluation:  # noqa: ARG001
    """Compare labels one by one; without the attack every example would be said to be of the most frequent class.

    Or of that which the adversary can tell without what it received, where that is right more often: then the exact
    test of McNemar asks whether the attack is right where that isn't more often than the other way round, too; and of
    further runs, Student's test whether the attack's are right more often than runs without are, by how these differ.
    """
    true = true_labels(finding.examples, truth)
    n, hits = len(true), finding.labels == true
    right, guess = int(hits.sum()), int(torch.bincount(true).max()) / n
    p_value, best = _by_luck(right, n, guess), _by_luck(n, n, guess)
    if finding.without is not None:
        alone = finding.without == true
        guess = max(guess, int(alone.sum()) / n)
        p_value = max(p_value, _more_often(int((hits & ~alone).sum()), int((alone & ~hits).sum())))
        best = max(best, _more_often(int((~alone).sum()), 0))
    if finding.without is not None and finding.again is not None:
        runs = torch.cat([torch.stack([finding.labels, finding.without])[None], finding.again])
        p_value = max(p_value, _by_draws((runs == true).double().mean(dim=2).numpy()))
    result = done(
        finding,
        observation,
        metrics=[ACCURACY.share(right, n, "labels", guess)],
        label_accuracy=right / n,
        is_leak=leaks(right / n > guess, p_value),
        p_value=p_value,
        p_value_at_best=best,
    )
    return Evaluation(result.model_copy(update={"num_examples": n}))


def _more_often(one: int, other: int) -> float:
    return _by_luck(one, one + other, 0.5) if one + other else 1.0


def _by_draws(shares: np.ndarray) -> float:
    """Return the p-value of shares (runs, 2) with what was received, and without: one-sided Student's test."""
    if np.ptp(shares, axis=0).any():
        return float(ttest_ind(*shares.T, alternative="greater").pvalue)
    return 0.0 if shares[0, 0] > shares[0, 1] else 1.0


def _by_luck(right: int, n: int, share: float) -> float:
    return float(binomtest(right, n, min(share, 1.0), alternative="greater").pvalue)


@evaluate.register
def evaluate_scores(finding: LabelScoreFinding, observation: Observation, truth: Truth, *, seed: int) -> Evaluation:  # noqa: ARG001
    """Evaluate scores by the area under the ROC curve (the paper's leak AUC), 0.5 without the attack.

    Where both classes are as frequent, that which fits better stands for the rarer one, and the p-value is doubled.
    """
    if bool(finding.scores.isnan().any()):
        return refused(finding, observation)
    true = true_labels(finding.examples, truth)
    rare = int(torch.bincount(true, minlength=2).argmin())
    own, others = (finding.scores[(true == rare) == wanted].numpy() for wanted in (True, False))
    n = len(true)
    if not len(own) or not len(others):
        metrics = [LEAK_AUC.of(0.5, 0.5, low=0.0, high=1.0, n=n, of="examples")]
        result = done(finding, observation, metrics=metrics, is_leak=False, p_value=1.0, p_value_at_best=1.0)
        return Evaluation(result.model_copy(update={"num_examples": n}))
    ways = 2 if len(own) == len(others) else 1  # where neither class is the rarer one, either may be meant
    if ways == 2 and area(own, others) < 0.5:
        own, others = others, own
    auc, p_value = rank_test(torch.from_numpy(own), torch.from_numpy(others))
    low, high = area_interval(own, others)
    _, best = rank_test(torch.ones(len(own)), torch.zeros(len(others)))
    p_value, best = (min(1.0, ways * p) for p in (p_value, best))
    result = done(
        finding,
        observation,
        metrics=[LEAK_AUC.of(auc, 0.5, low=low, high=high, n=n, of="examples")],
        is_leak=leaks(auc > 0.5, p_value),
        p_value=p_value,
        p_value_at_best=best,
        charts=[_roc(own, others, finding.attack)],
    )
    return Evaluation(result.model_copy(update={"num_examples": n}))


def area(own: np.ndarray, others: np.ndarray) -> float:
    """Return the AUC: how often a score of ``own`` is above one of ``others``, ties counted half."""
    return float(mannwhitneyu(own, others).statistic) / (len(own) * len(others))


def area_interval(own: np.ndarray, others: np.ndarray) -> tuple[float, float]:
    """Return the AUC's 95 % interval (DeLong et al. 1988).

    Without a spread it is that of as many coin tosses as the smaller class has examples.
    """
    auc = area(own, others)
    above = (own[:, None] > others[None]) + 0.5 * (own[:, None] == others[None])
    spread = sum(
        float(np.var(mean, ddof=1)) / len(mean) if len(mean) > 1 else 0.25 for mean in (above.mean(1), above.mean(0))
    )
    if spread == 0:
        count = min(len(own), len(others))
        ends = proportion(round(auc * count), count)
        return min(auc, ends[0]), max(auc, ends[1])
    half = 1.959964 * math.sqrt(spread)
    return max(0.0, auc - half), min(1.0, auc + half)


def _roc(own: np.ndarray, others: np.ndarray, attack: str) -> Chart:
    limits = np.unique(np.concatenate([own, others]))[::-1]
    limits = limits[np.linspace(0, len(limits) - 1, min(_POINTS, len(limits))).round().astype(int)]
    x, y = ([0.0, *(float((side >= limit).mean()) for limit in limits)] for side in (others, own))
    return Chart(
        title=f"Who is of the rarer class, by {attack}",
        caption="Every point is a limit on the score: how many examples of the rarer class lie above it, and how many "
        "of the other. Without a leak the line follows the diagonal.",
        x_label="others above the limit (share)",
        y_label="rarer class above the limit (share)",
        lines=[Line(name=attack, x=x, y=y), Line(name="no leak", x=[0.0, 1.0], y=[0.0, 1.0])],
    )


FINDING_TYPES["example-labels"] = FindingType(
    verdict=by_test(
        ACCURACY.name,
        "labels",
        "exact binomial interval (Clopper-Pearson); one-sided exact binomial test",
        "{who} can tell the labels, which the server keeps to itself: {share} % of {n} labels, where naming the most "
        "frequent class, or what it knows anyway, gets {guess} %.",
    ),
    rules=(
        "Labels of single examples are 'inferred' when more of them are right than by naming the most frequent class, "
        f"and luck would do as well with a probability of at most {100 * SURE:g} % (one-sided exact binomial test). "
        "Where the adversary knows some labels, more must be right, too, than those and its own features tell without "
        "what it received (one-sided exact McNemar test); where that is trained from random draws, in several runs of "
        "both (one-sided Student's test over runs).",
    ),
    metrics=(ACCURACY,),
    question="tell the examples' labels",
    control="vertical",
)

FINDING_TYPES["label-scores"] = FindingType(
    verdict=by_test(
        LEAK_AUC.name,
        "examples",
        "DeLong's interval; one-sided Mann-Whitney test",
        "{who} can tell which examples are of the rarer class: leak AUC {value}, where 0.5 is none ({n} examples).",
    ),
    rules=(
        "The class of single examples is 'inferred' when the leak AUC is above 0.5, and scores without meaning would "
        f"do as well with a probability of at most {100 * SURE:g} % (one-sided Mann-Whitney test). The positive class "
        "is the rarer one; where neither is, the one that fits better, and the probability is doubled.",
    ),
    metrics=(LEAK_AUC,),
    question="tell which examples are of the rarer class",
    control="vertical",
)
