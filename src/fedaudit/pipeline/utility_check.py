"""What an attack made of a federation that has hardly learnt anything: no evidence, for it or against it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fedaudit.evaluation import FINDING_TYPES
from fedaudit.results import AttackSummary, FindingResult

_UNKNOWN = "how well the federation's model was trained isn't recorded"


def without_leaks(
    findings: Sequence[FindingResult], accuracy: Mapping[str, float], least: float
) -> list[FindingResult]:
    """Return the findings; those that need a trained federation and had none are no leaks, and say so.

    Args:
        findings: of an audit.
        accuracy: federation to its global model's held-out accuracy at the end, where it is known.
        least: ``evaluation.least_accuracy``.
    """
    return [
        f.model_copy(update={"leak": False, "notes": [*f.notes, _said(accuracy[f.federation])]})
        if f.status == "done" and _hardly(f.kind, f.federation, accuracy, least)
        else f
        for f in findings
    ]


def without_verdicts(
    summaries: Sequence[AttackSummary], accuracy: Mapping[str, float], least: float
) -> list[AttackSummary]:
    """Return the summaries; where a federation had to be trained and hardly was, the verdict is inconclusive."""
    return [_judged(s, accuracy, least) for s in summaries]


def _judged(summary: AttackSummary, accuracy: Mapping[str, float], least: float) -> AttackSummary:
    if summary.kind is None or not FINDING_TYPES[summary.kind].trained:
        return summary
    if summary.federation not in accuracy:
        return summary.model_copy(update={"cautions": [*summary.cautions, _UNKNOWN]})
    if not _hardly(summary.kind, summary.federation, accuracy, least):
        return summary
    reached = accuracy[summary.federation]
    advice = f"{_said(reached)}; train it to {least:g} or more: more rounds, more examples a client, another rate"
    text = f"{_said(reached)}, below {least:g} (evaluation.least_accuracy); {summary.verdict_text}"
    changes = {"verdict": "inconclusive", "verdict_text": text, "advice": [advice], "hardly_trained": reached}
    return summary.model_copy(update=changes)


def _hardly(kind: str | None, federation: str, accuracy: Mapping[str, float], least: float) -> bool:
    return kind is not None and FINDING_TYPES[kind].trained and accuracy.get(federation, 1.0) < least


def _said(accuracy: float) -> str:
    return f"the federation was hardly trained: accuracy {accuracy:.2f}"
