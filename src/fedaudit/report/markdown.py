"""A summary in Markdown (GitHub's), for a CI job's page: the answer, a table of attacks, limits, what to do."""

from __future__ import annotations

import re

from fedaudit.report.conclusion import evidence_text, headline, threshold_text
from fedaudit.report.wording import sentence, shared
from fedaudit.results import LEAKS, AttackSummary, AuditResult

_OUTCOMES = {"pass": "✅", "fail": "❌", "not tested": "⚠️"}
_VERDICTS = {
    "recovered": "🔴",
    "identifiable": "🟠",
    "inferred": "🟠",
    "not demonstrated": "⚪",
    "inconclusive": "⚠️",
    "present, not extracted": "⚠️",
}


def render(result: AuditResult) -> str:
    """Return the summary of ``result``; the files that it names lie beside it."""
    said = headline(result)
    blocks = [f"## {escape(said.title)}", escape(said.setting), escape(said.tested), escape(said.detail)]
    blocks += [f"**Caution:** {escape(sentence(caution))}" for caution in said.cautions]
    if result.thresholds:
        blocks.append("### Limits")
        blocks.append("\n".join(f"- {_OUTCOMES[t.outcome]} {escape(threshold_text(t))}" for t in result.thresholds))
    if result.summaries:
        blocks.append("### Attacks")
        blocks.append(_table(result.summaries))
        refused = [(s.attack, s.federation, s.verdict_text) for s in result.summaries if s.evidence is None]
        blocks.append("\n".join(f"- {escape(f'{whom}: {sentence(text)}')}" for whom, text, _ in shared(refused)))
    todo = _what_to_do(result)
    if todo:
        blocks.append("### What to do")
        blocks.append("\n".join(f"- {line}" for line in todo))
    blocks.append(
        f"`report.html` has the evidence and what was not tested, `results.json` every number. "
        f"{escape(result.name)}, fedaudit {escape(result.fedaudit_version)}; repeat it: {_code(result.repeat)}"
    )
    return "\n\n".join(block for block in blocks if block) + "\n"


def _table(summaries: list[AttackSummary]) -> str:
    rows = ["| attack | federation | verdict | evidence | n |", "|---|---|---|---|--:|"]
    for s in summaries:
        evidence = evidence_text(s.evidence) if s.evidence else "–"
        verdict = f"{_VERDICTS.get(s.verdict, '')} {escape(s.verdict)}".strip()
        verdict += f" ({s.setting})" if s.setting else ""
        cells = [escape(s.attack), escape(s.federation), verdict, escape(evidence)]
        rows.append(f"| {' | '.join([*cells, str(s.evidence.n) if s.evidence else '–'])} |")
    return "\n".join(rows)


def _what_to_do(result: AuditResult) -> list[str]:
    advised = [(s.attack, s.federation, f"{s.verdict}; {advice}") for s in result.summaries for advice in s.advice]
    lines = [escape(f"{whom}: {sentence(text)}") for whom, text, _ in shared(advised)]
    if any(s.verdict in LEAKS for s in result.summaries):
        lines.append("See “What to do” in `report.html`.")
    return lines


def escape(text: str) -> str:
    """Return ``text`` so that Markdown shows it as it is: no markup, links, HTML or breaks of lines."""
    text = " ".join(text.split())
    text = re.sub(r"([\\`*_\[\]<>|~&!#{}])", r"\\\1", text)
    return re.sub(r"(?i)\b(https?|ftp|mailto)(:)|(www)(\.)", lambda m: "\\".join(g for g in m.groups() if g), text)


def _code(text: str) -> str:
    """Return ``text`` as code, between more backticks than it holds."""
    text = " ".join(text.split())
    ticks = "`" * (1 + max((len(run) for run in re.findall("`+", text)), default=0))
    return f"{ticks} {text} {ticks}" if "`" in text else f"{ticks}{text}{ticks}"
