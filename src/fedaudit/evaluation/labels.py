"""Inferred labels against the ones that were trained on."""

from __future__ import annotations

import torch
from torch import Tensor

from fedaudit.attacks.labels.attack import LabelFinding
from fedaudit.evaluation.finding_types import FINDING_TYPES, Evaluation, FindingType, Metric, by_leaks, done, evaluate
from fedaudit.federation.truth import Truth
from fedaudit.threat import Observation

ACCURACY = Metric("label_accuracy", "share of the labels that were found, both sides counted with duplicates")


@evaluate.register
def evaluate_labels(finding: LabelFinding, observation: Observation, truth: Truth, *, seed: int) -> Evaluation:  # noqa: ARG001
    """Compare inferred labels with the true ones, as multisets; the baseline guesses every class equally often."""
    message = observation.messages[0]
    true = truth.labels[message.round, message.client].flatten()
    accuracy = label_accuracy(finding.labels, true)
    guess = label_accuracy(torch.arange(len(true)) % finding.num_classes, true)
    result = done(
        finding,
        observation,
        metrics=[ACCURACY.of(accuracy, guess)],
        label_source=finding.method,
        label_accuracy=accuracy,
        leak=accuracy == 1 and accuracy > guess,
    )
    return Evaluation(result)


def label_accuracy(inferred: Tensor, true: Tensor) -> float:
    """Return the share of the (n,) true labels that were recovered, both taken as multisets."""
    length = int(max(inferred.max(), true.max())) + 1
    overlap = torch.minimum(torch.bincount(inferred, minlength=length), torch.bincount(true, minlength=length))
    return float(overlap.sum()) / len(true)


FINDING_TYPES["labels"] = FindingType(
    verdict=by_leaks("all labels of {} of {} updates were found where guessing finds fewer"),
    rules=(
        "An update's labels count as found when every class is named as often as it occurred, and naming every class "
        "equally often finds fewer of them.",
    ),
    metrics=(ACCURACY,),
)
