"""Sentences that all outputs share."""

from __future__ import annotations

from fedaudit.report.wording import sentence, short
from fedaudit.results import AttackSummary, AuditResult, Evidence, Threshold


def message_of(result: AuditResult, summary: AttackSummary) -> str:
    """Return a verdict in a sentence, with the number behind it."""
    said = summary.headline or f"{result.adversary.who}, by {summary.attack}: {summary.verdict}."
    parts = [sentence(said)]
    parts.append(sentence(f"Evidence: {evidence_text(summary.evidence)}" if summary.evidence else summary.verdict_text))
    parts += [sentence(f"Caution: {caution}") for caution in summary.cautions]
    parts += [sentence(f"To conclude: {advice}") for advice in summary.advice if advice not in said]
    if summary.verdict == "not demonstrated":
        parts.append("This never means safe.")
    return " ".join(parts)


def evidence_text(evidence: Evidence) -> str:
    """Return the number behind a verdict: value, 95 % interval, n, what guessing gives, p."""
    text = f"{evidence.what} {short(evidence.value)}"
    if evidence.low is not None and evidence.high is not None:
        text += f" [{short(evidence.low)}, {short(evidence.high)}]"
    text += f", n = {evidence.n} {evidence.of}"
    if evidence.by_guessing is not None:
        text += f", {short(evidence.by_guessing)} by guessing"
    if evidence.p_value is not None:
        text += f", p = {evidence.p_value:.2g}"
    return text


def limit_name(threshold: Threshold) -> str:
    """Return what a limit is, without what was met: the same in every run."""
    if threshold.limit is None:
        return f"no verdict '{threshold.verdict}' or worse"
    return f"{threshold.metric} at most {threshold.limit:g}"
