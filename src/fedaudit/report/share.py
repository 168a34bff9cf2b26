"""What a site may share of an audit: its results without examples, names, records or hashes, and their page.

Nothing is struck out: a new result is made of the fields in :data:`KEPT`, so a field that nobody thought of stays at
the site. Counts are those of the audit as a whole, and of groups of at least :data:`LEAST` members. Before anything is
written, :mod:`fedaudit.report.share_check` searches it for what must not be there.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic_core import from_json

from fedaudit.report.requirements import requirements
from fedaudit.results import (
    AdversaryRecord,
    AttackRecord,
    AttackSummary,
    AuditResult,
    CeilingChange,
    CeilingPoint,
    CeilingResult,
    CertificateRecord,
    Comparison,
    ControlResult,
    DataRecord,
    EpsilonBound,
    EpsilonResult,
    Evidence,
    FederationRecord,
    FindingResult,
    GroupExposure,
    HistoryRecord,
    HistoryTiming,
    Interval,
    MappingRecord,
    MarginResult,
    MarginStep,
    MetricSummary,
    ModelRecord,
    NamedSummary,
    ObserverEpsilon,
    ReceivedCheck,
    RecordEpsilon,
    RecordingRecord,
    RequirementRecord,
    SharedRecord,
    TestAgain,
    Threshold,
    Timing,
    Worst,
)
from fedaudit.results.record import READING, Record
from fedaudit.utils.errors import BadInput
from fedaudit.utils.folders import check_folder, inside
from fedaudit.utils.integrity import blank, check, sealed, write_whole

LEAST = 10  # members of a group whose exposure is shared: of fewer, whoever knows some of them learns of the others
ABOUT = "shared results"  # what the digest is bound to
FILES = ("results.json", "report.html")
_OWN = "a site's own data"
_STANDING_OUT = "more members than by luck score above all others"  # how many they are isn't shared

# By type the fields that are shared; "*": all of them, which are numbers and words of fedaudit's own.
KEPT: dict[type[Record], str] = {
    AuditResult: "fedaudit_version name data model adversary federations attacks findings summaries comparisons "
    "controls margins ceilings requirements test_again verdict_rules not_asked out_of_scope thresholds timing",
    DataRecord: "classes kind input_shape",
    ModelRecord: "name parameters initialisation batch_norm dropout",
    AdversaryRecord: "*",
    FederationRecord: "name algorithm update_kind clients rounds batch_size local_steps local_epochs learning_rate "
    "updates_observed summed updates_rejected fallbacks description aggregator client_defence defences replay_error "
    "recording checks history",
    RecordingRecord: "totals training seconds facts facts_text",
    ReceivedCheck: "*",
    HistoryRecord: "rounds accuracy examples bytes parameters epsilon epsilon_adjacency epsilon_delta epsilon_unit "
    "epsilon_of_clients epsilon_pld certificate stopped why_stopped honest_accepted malicious_accepted timing",
    CertificateRecord: "*",
    HistoryTiming: "*",
    AttackRecord: "name summary paper mapping",
    MappingRecord: "*",
    RequirementRecord: "*",
    FindingResult: "attack federation update_kind num_examples status kind exposure epsilon record_epsilon setting",
    GroupExposure: "label column value auc low high members p_value",
    EpsilonResult: "*",
    ObserverEpsilon: "*",
    EpsilonBound: "*",
    RecordEpsilon: "*",
    AttackSummary: "*",
    NamedSummary: "*",
    Evidence: "*",
    Worst: "value mean n p_value text",
    Interval: "*",
    MetricSummary: "*",
    Comparison: "*",
    ControlResult: "attack model federation case won text power without_defence",
    MarginResult: "attack federation steps nearest factor more text",
    MarginStep: "*",
    CeilingResult: "federation updates unit low high guess left left_at_most open open_at_most unknowns numbers lost "
    "precision why prior curve changes exact "
    "verdict text reason",
    CeilingPoint: "*",
    CeilingChange: "*",
    TestAgain: "*",
    Threshold: "*",
    Timing: "*",
}
# What stands in place of a field that isn't shared and has no default.
_INSTEAD: dict[type[Record], dict[str, Any]] = {
    AuditResult: {"scenario": {}, "lpips_missing": None, "environment": {}},
    DataRecord: {"name": _OWN, "summary": "not shared", "class_names": None},
    ModelRecord: {"trained": "not shared"},
    RecordingRecord: {"clients": []},
    AttackRecord: {"settings": {}},
    FindingResult: {"round": None, "client": None},
}
LEFT_OUT = (
    "examples, pictures, rows and texts, true or recovered, and all that was measured of a single one",
    "names of files, folders, records, clients, classes, data sets and machines, and every hash of them",
    "the records that an attack is surest of",
    f"the exposure of groups of fewer than {LEAST} members, and of those from which theirs would follow",
    "the scenario, the settings of attacks but numbers, notes, and each client's own accuracy",
)


def shareable(result: AuditResult) -> AuditResult:
    """Return what may be shared of ``result``; if that was shared already, the same."""
    cut: AuditResult = _cut(result)
    compare_defences = bool(result.scenario.get("evaluation", {}).get("compare_defences"))
    settings = {a.name: {k: v for k, v in a.settings.items() if isinstance(v, int | float)} for a in result.attacks}
    state = result.model.trained if result.model.trained == "untrained" else "trained"
    shared = cut.findings
    if result.shared is None:
        shared = _without_parts(
            [
                # what all clients have less what one of them has would tell of the others
                f.model_copy(update={"exposure": _large(f.exposure, _members(old)) if old.client is None else []})
                for f, old in zip(cut.findings, result.findings, strict=True)
            ]
        )
    clients = {name for f in result.federations if f.recording is not None for name in f.recording.clients}
    told = result.adversary.summary
    for name in sorted(clients, key=len, reverse=True):  # beside their numbers
        told = told.replace(f" ({name})", "")
    made = cut.model_copy(
        update={
            "summaries": [_without_rare(s.model_copy(update={"worst": None})) for s in cut.summaries],
            "adversary": cut.adversary.model_copy(update={"summary": told}),
            "scenario": {"evaluation": {"compare_defences": True}} if compare_defences else {},
            "model": cut.model.model_copy(update={"trained": state}),
            "attacks": [a.model_copy(update={"settings": settings[a.name]}) for a in cut.attacks],
            "findings": [f for f in shared if f.epsilon or f.record_epsilon or f.exposure],
        }
    )
    if result.shared is None:  # which model an attack asked is told of a finished model's user
        summaries = [
            s.model_copy(update={"worst": old.worst and old.worst.model_copy(update={"text": _STANDING_OUT})})
            for s, old in zip(made.summaries, result.summaries, strict=True)
        ]  # else a line would be met here that isn't at the site
        answers = requirements(made.model_copy(update={"attacks": result.attacks, "summaries": summaries}))
        made = made.model_copy(update={"requirements": answers})
    return made


def _without_rare(summary: AttackSummary) -> AttackSummary:
    """Return a summary without its numbers, where they tell how few records have another value than the usual one.

    Naming each class's most frequent value is right for all other records, so its share gives their number.
    """
    found = next((m for m in summary.metrics if m.name == "attribute_accuracy" and m.baseline is not None), None)
    if found is None or found.baseline is None or (1 - found.baseline.mean) * found.value.n >= LEAST:
        return summary
    told = f"its numbers aren't shared: fewer than {LEAST} records have another value than the usual one"
    return summary.model_copy(update={"metrics": [], "evidence": None, "verdict_text": told, "headline": ""})


def _cut(value: Any) -> Any:
    """Return a record with the fields that are shared, and what is in them alike."""
    if isinstance(value, list):
        return [_cut(one) for one in value]
    if not isinstance(value, Record):
        return value
    kind = type(value)
    kept = KEPT[kind].split() if KEPT[kind] != "*" else list(kind.model_fields)
    return kind.model_construct(
        **{
            name: _cut(getattr(value, name)) if name in kept else _INSTEAD.get(kind, {}).get(name, _default(kind, name))
            for name in kind.model_fields
        }
    )


def _default(kind: type[Record], name: str) -> Any:
    return kind.model_fields[name].get_default(call_default_factory=True)


def _members(finding: FindingResult) -> int | None:
    """Return how many members an attack on membership was asked about; every one has a matched record beside it."""
    found = next((m.n for m in finding.metrics if m.name == "membership_auc"), None)
    return None if found is None else found // 2


def _large(groups: Sequence[GroupExposure], members: int | None) -> list[GroupExposure]:
    """Return the large enough groups, less those whose subtraction tells a small one; none without ``members``."""
    kept: list[GroupExposure] = []
    if members is None:
        return kept
    for column in dict.fromkeys(group.column for group in groups):
        own = [g for g in groups if g.column == column and g.members >= LEAST]
        own.sort(key=lambda group: -group.members)
        while own and 0 < members - sum(g.members for g in own) < LEAST:
            own.pop()
        kept += own
    return [group for group in groups if group in kept]


def _without_parts(findings: Sequence[FindingResult]) -> list[FindingResult]:
    """Return the findings without what tells by subtraction from each other how many are in a small part of a group."""
    known: dict[tuple[str, int | str], set[int]] = {}
    kept = []
    for finding in findings:
        near = {
            g.column
            for g in finding.exposure
            if any(0 < abs(g.members - n) < LEAST for n in known.get((g.column, g.label), ()))
        }
        exposure = [
            g for g in finding.exposure if g.column not in near
        ]  # one group of a column follows from the others
        for g in exposure:
            known.setdefault((g.column, g.label), set()).add(g.members)
        kept.append(finding.model_copy(update={"exposure": exposure}))
    return kept


def share(folder: Path, out: Path) -> SharedRecord:
    """Write what may be shared of the audit in ``folder`` to ``out``: results.json, sealed, and report.html.

    Args:
        folder: of the audit, with its images and findings, or its results.json.

    Returns:
        What was left out, and what the files were searched for.

    Raises:
        BadInput: there is no audit, ``out`` is its folder or holds another, or what would be written holds what mustn't
            be shared; then nothing is written.
    """
    from fedaudit.report.compare import open_audit
    from fedaudit.report.page import render_report
    from fedaudit.report.share_check import LOOKED_FOR, phrases_of, refuse_traces

    result, beside = open_audit(folder)
    if result.shared is not None:
        raise BadInput(f"'{folder}' is a shared version already; share the audit that it was made from, or pass it on")
    if out.resolve() == beside.resolve():
        raise BadInput(f"'{out}' is the audit's own folder; give another one, which holds nothing but what is shared")
    if (out / FILES[0]).exists() and open_audit(out)[0].shared is None:
        raise BadInput(f"'{out}' holds an audit that isn't a shared version; give another folder")
    phrases = phrases_of(result, beside)
    names = f"{len(phrases):,} names of files, clients and this machine, rows and texts"
    about = SharedRecord(digest=blank(), left_out=list(LEFT_OUT), min_group_size=LEAST, looked_for=[*LOOKED_FOR, names])
    made = shareable(result).model_copy(update={"shared": about})
    page = render_report(made, out)
    text = made.model_dump_json(indent=2) + "\n"
    check_fields(text)
    refuse_traces({FILES[0]: text, FILES[1]: page}, phrases)
    check_folder(out)
    try:
        write_whole(inside(out, FILES[0]), sealed(text, ABOUT))
        write_whole(inside(out, FILES[1]), page.encode())
    except OSError as error:
        raise BadInput(f"can't write to '{out}': {error.strerror or error}") from None
    return about


def check_fields(text: str) -> None:
    """Refuse, by its key, what isn't meant to be shared in a results.json, whatever wrote it."""
    result = AuditResult.model_validate(from_json(text), context=READING)
    again = shareable(result).model_copy(update={"shared": result.shared}).model_dump(mode="json")
    for key, value in result.model_dump(mode="json").items():
        if value != again[key]:
            raise BadInput(f"not shared: {FILES[0]} would have something in '{key}' that isn't meant to be shared")


def check_shared(path: Path) -> str | None:
    """Check that a shared results.json is as it was written; return a note where it carries no digest."""
    return check(path, ABOUT, remedy="ask the site for it again")
