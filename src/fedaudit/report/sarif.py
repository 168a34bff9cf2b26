"""SARIF 2.1.0, which code scanning shows: a result for each attack on each federation, and one for each limit.

Rules are named by what was recovered and by the verdict (``fedaudit/images/recovered``). A fingerprint depends on who
attacked what, not on the numbers, the time, the folder or fedaudit's version, so that a later run's same finding is
known again.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any
from urllib.parse import quote

from fedaudit.attacks.standards import ABOUT, BY_KIND
from fedaudit.evaluation.finding_types import FINDING_TYPES
from fedaudit.report.conclusion import headline, limit_name, message_of, tested, threshold_text
from fedaudit.results import LEAKS, VERDICTS, AttackSummary, AuditResult, MappingRecord, Threshold, Verdict

SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"

# Of a verdict: level, and a score from 0 to 10 as GitHub reads it. Inconclusive is a warning: it must not look green.
_LEVELS: dict[str, tuple[str, float]] = {
    "recovered": ("error", 8.5),
    "identifiable": ("error", 7.0),
    "inferred": ("warning", 6.0),
    "present, not extracted": ("warning", 4.5),
    "inconclusive": ("warning", 4.0),
    "not demonstrated": ("note", 0.0),
    "not applicable": ("none", 0.0),
}
_LIMITS = {"fail": ("error", "fail"), "not tested": ("warning", "fail"), "pass": ("none", "pass")}
_LIMIT_RULES = {
    "fail": "A limit that the user set was exceeded.",
    "not tested": "A limit that the user set could not be tested: nothing measured it, or what did is inconclusive.",
    "pass": "A limit that the user set was kept.",
}


def render(result: AuditResult, scenario: str = "scenario.yaml") -> str:
    """Return ``result`` as a SARIF log; each result's place is the file ``scenario``, a path from the sources' root."""
    used: dict[str, dict[str, MappingRecord]] = {}
    for attack in result.attacks:
        for record in attack.mapping:
            used.setdefault(record.standard, {})[record.id] = record
    rules: dict[str, dict[str, Any]] = {}
    results = [
        *(_of_limit(result, t, rules) for t in result.thresholds),
        *(_of_summary(result, s, rules) for s in result.summaries),
    ]
    place = {"physicalLocation": {"artifactLocation": {"uri": quote(scenario)}, "region": {"startLine": 1}}}
    for one in results:
        one["ruleIndex"] = list(rules).index(one["ruleId"])
        one["locations"] = [place]
    driver = {"name": "fedaudit", "version": result.fedaudit_version, "rules": list(rules.values())}
    run: dict[str, Any] = {
        "tool": {"driver": driver},
        "automationDetails": {"id": f"fedaudit/{quote(result.name, safe='')}/"},
        "invocations": [{"executionSuccessful": True, **_started(result)}],
        "artifacts": [{"location": {"uri": quote(scenario)}, "roles": ["analysisTarget"]}],
        "results": results,
        "properties": {"headline": headline(result).title, "repeat": result.repeat},
    }
    if used:
        driver["supportedTaxonomies"] = [{"name": title} for title in used]
        run["taxonomies"] = [_taxonomy(title, list(records.values())) for title, records in used.items()]
    return json.dumps({"$schema": SCHEMA, "version": "2.1.0", "runs": [run]}, indent=2, ensure_ascii=False) + "\n"


def rule_id(kind: str | None, verdict: str) -> str:
    """Return the stable name of a rule: what was recovered, then the verdict."""
    return f"fedaudit/{kind or 'none'}/{verdict.replace(',', '').replace(' ', '-')}"


def _of_summary(result: AuditResult, summary: AttackSummary, rules: dict[str, dict[str, Any]]) -> dict[str, Any]:
    attack = next((a for a in result.attacks if a.name == summary.attack), None)
    kind, verdict = summary.kind, summary.verdict
    level, severity = _LEVELS[verdict]
    name = rule_id(kind, verdict)
    if name not in rules:
        rules[name] = _rule(name, kind, verdict, level, severity)
    text = f"{message_of(result, summary)} {tested(result, summary)}"
    properties: dict[str, Any] = {
        "verdict": verdict,
        "attack": summary.attack,
        "federation": summary.federation,
        "setting": summary.setting,
        "diagnostic_because": summary.diagnostic_because,
        "cautions": summary.cautions,
        "advice": summary.advice,
    }
    if summary.evidence:
        properties["evidence"] = summary.evidence.model_dump(exclude_none=True)
    return {
        "ruleId": name,
        "kind": "notApplicable" if verdict == "not applicable" else "fail",
        "level": level,
        "message": {"text": _literal(text)},
        "partialFingerprints": _fingerprints(result, summary.federation, summary.attack),
        "taxa": [{"id": r.id, "toolComponent": {"name": r.standard}} for r in attack.mapping] if attack else [],
        "properties": properties,
    }


def _of_limit(result: AuditResult, threshold: Threshold, rules: dict[str, dict[str, Any]]) -> dict[str, Any]:
    level, kind = _LIMITS[threshold.outcome]
    name = rule_id("limit", threshold.outcome)
    if name not in rules:
        severity = {"error": 8.0, "warning": 5.0}.get(level, 0.0)
        said = _LIMIT_RULES[threshold.outcome]
        rules[name] = {
            "id": name,
            "name": "Limit",
            "shortDescription": {"text": said},
            "fullDescription": {"text": f"{said} Limits are set by --fail-above, --fail-on or a policy file."},
            "help": {"text": "report.html says what the limit was compared with. A limit is a team's own policy."},
            "defaultConfiguration": {"level": level},
            "properties": {"tags": ["security", "privacy", "policy"], "security-severity": f"{severity:.1f}"},
        }
    return {
        "ruleId": name,
        "kind": kind,
        "level": level,
        "message": {"text": _literal(threshold_text(threshold))},
        "partialFingerprints": _fingerprints(result, "limit", limit_name(threshold)),
        "properties": {"outcome": threshold.outcome, "metric": threshold.metric},
    }


def _rule(name: str, kind: str | None, verdict: Verdict, level: str, severity: float) -> dict[str, Any]:
    known = FINDING_TYPES.get(kind or "")
    what = (known.question if known else "learn what the attack is after").replace("{things}", "examples")
    rules = " ".join(known.rules) if known else ""
    return {
        "id": name,
        "name": "".join(
            word.capitalize() for word in f"{kind or 'attack'} {verdict}".replace("-", " ").replace(",", "").split()
        ),
        "shortDescription": {"text": f"{verdict.capitalize()}: can the adversary {what}?"},
        "fullDescription": {"text": f"{VERDICTS[verdict]} {rules}".strip()},
        "help": {"text": f"{VERDICTS[verdict]} What can be done, and what was not tested, is in report.html."},
        "defaultConfiguration": {"level": level},
        "properties": {
            "tags": ["security", "privacy", "federated-learning", *BY_KIND.get(kind or "", ())],
            "precision": "high" if verdict in LEAKS else "medium",
            "security-severity": f"{severity:.1f}",
        },
    }


def _taxonomy(title: str, records: list[MappingRecord]) -> dict[str, Any]:
    about = ABOUT.get(title)
    return {
        "name": title,
        "taxa": [{"id": r.id, "name": r.name, "shortDescription": {"text": r.name}} for r in records],
        **({"shortDescription": {"text": about}} if about else {}),
    }


def _fingerprints(result: AuditResult, *what: str) -> dict[str, str]:
    """Return what a finding is known again by; GitHub reads it under its own name only."""
    parts = [result.name, result.data.name, result.model.name, result.adversary.adversary, *what]
    digest = hashlib.sha256(json.dumps(parts).encode()).hexdigest()
    return {"fedaudit/v1": digest, "primaryLocationLineHash": digest[:16]}


def _literal(text: str) -> str:
    """Return ``text`` as SARIF wants it: braces stand for arguments and brackets for links, unless escaped."""
    return text.replace("\\", "\\\\").replace("[", "\\[").replace("]", "\\]").replace("{", "{{").replace("}", "}}")


def _started(result: AuditResult) -> dict[str, str]:
    started = result.timing.started
    return {"startTimeUtc": started.replace("+00:00", "Z")} if started and started.endswith("+00:00") else {}
