"""For an impact assessment: what standards call each attack, its verdicts, what texts ask, and what wasn't tested."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fedaudit.attacks.standards import (
    ABOUT,
    AI_ACT,
    ALTERED_MODELS,
    EDPB,
    EDPB_TESTS,
    EVIDENCE_FOR,
    IDENTIFIERS,
    NIST,
    READING,
)
from fedaudit.report.requirements import requirements
from fedaudit.results import AttackRecord, AuditResult, MappingRecord, RequirementRecord, Verdict

NO_ATTACK = "no attack of this audit makes this test"


@dataclass(frozen=True)
class Covered:
    """An attack of the audit.

    Attributes:
        attack: that was named.
        verdicts: each with the federations that it was reached on, empty where nothing was attacked.
        called: what each standard of :class:`Assessment` calls the attack.
    """

    attack: AttackRecord
    verdicts: list[tuple[Verdict, list[str]]]
    called: list[list[MappingRecord]]


@dataclass(frozen=True)
class Assessment:
    """The table, and what is missing from it.

    Attributes:
        standards: title and what it is.
        untested: the opinion's tests, and a malicious server, if no attack here answered for them, each with why.
        asked: what texts ask, line by line, and got an answer.
        unanswered: why lines got none, and which lines these are.
        evidence: what the audit gives evidence for: article, whom it is about, the evidence.
        reading: what else to read.
    """

    standards: list[tuple[str, str]]
    rows: list[Covered]
    untested: list[tuple[str, str]]
    asked: list[RequirementRecord]
    unanswered: list[tuple[str, str]]
    evidence: list[tuple[str, str, str]]
    reading: tuple[str, ...]


def assessment(result: AuditResult) -> Assessment:
    """Return what the audit tested in the words of standards, and which tests of the EDPB's opinion it didn't make."""
    named = [record.standard for attack in result.attacks for record in attack.mapping]
    titles = list(dict.fromkeys([*ABOUT, *named]))
    rows = []
    for attack in result.attacks:
        verdicts: dict[Verdict, list[str]] = {}
        for summary in result.summaries:
            if summary.attack == attack.name:
                verdicts.setdefault(summary.verdict, []).append(summary.federation)
        called = [[record for record in attack.mapping if record.standard == title] for title in titles]
        rows.append(Covered(attack, list(verdicts.items()), called))
    tests = [
        (
            IDENTIFIERS[test].name,
            [row for row in rows if (EDPB, test) in {(r.standard, r.id) for r in row.attack.mapping}],
        )
        for test in EDPB_TESTS
    ]
    active = rows if result.adversary.adversary == "malicious-server" else []
    tests.append((f"a server that alters the model it sends ({NIST}: {' and '.join(ALTERED_MODELS)})", active))
    untested = [(test, why) for test, own in tests if (why := _why_untested(own))]
    if why := _without_groups(result):
        untested.append(("who is exposed most, by class or group", why))
    evidence = [(f"{AI_ACT}, {article}", *said) for article, said in EVIDENCE_FOR.items()]
    asked = result.requirements or requirements(result)
    standards = [(title, ABOUT.get(title, "")) for title in titles]
    return Assessment(standards, rows, untested, *told_apart(asked), evidence, READING)


def told_apart(asked: Sequence[RequirementRecord]) -> tuple[list[RequirementRecord], list[tuple[str, str]]]:
    """Return the lines that got an answer, and why the others got none, each reason with its lines."""
    why: dict[str, dict[str, list[str]]] = {}
    for one in asked:
        if one.outcome == "not tested":
            why.setdefault(one.answer, {}).setdefault(one.text, []).append(one.id)
    lines = [(reason, "; ".join(f"{text}: {', '.join(ids)}" for text, ids in of.items())) for reason, of in why.items()]
    return [one for one in asked if one.outcome != "not tested"], lines


def _why_untested(own: list[Covered]) -> str:
    """Return why a test was not made by its ``own`` attacks; empty where it was, with an answer."""
    if not own:
        return NO_ATTACK
    reached = {verdict for row in own for verdict, _ in row.verdicts}
    if reached - {"not applicable", "inconclusive"}:
        return ""
    names = ", ".join(row.attack.name for row in own)
    return f"{'inconclusive' if 'inconclusive' in reached else 'could not be run'} ({names})"


def _without_groups(result: AuditResult) -> str:
    """Return why no class or group is told of; empty where one is."""
    used = result.in_use()
    worst = [s.worst for s in result.summaries if s.worst and s.federation in used]
    worst += [c.worst for c in result.ceilings if c.worst and c.federation in used]
    if any(one.by_group for one in worst):
        return ""
    if result.shared is not None:
        return "a shared version doesn't say"
    if not worst:
        return "no test tells how exposed single records are"
    return (
        "too few attacked records of one class or category, or there are none: attack more (evaluation.max_updates, "
        "threat.target_records), or let a table's columns be categorical"
    )
