"""What is signed before updates leave: a page of what audits and a site's guard say, checkable against both.

Of an audit no more is taken than a site may share (:mod:`fedaudit.report.share`), but for who is exposed most, told
without names: of all, and from where to where classes and categories go. What nobody measured is named, and
never counts as kept.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError

from fedaudit.report.again import Again, by_age, by_pace, day_of, soonest
from fedaudit.report.compare import open_audit
from fedaudit.report.conclusion import SEVERITY, UPDATES, evidence_text, headline, threshold_text
from fedaudit.report.epsilon import certificate_of, spread_of
from fedaudit.report.mapping import assessment
from fedaudit.report.share import check_shared, shareable
from fedaudit.report.share_check import phrases_of, refuse_traces
from fedaudit.report.style import render
from fedaudit.report.wording import count, defences_of, noun, sentence, short
from fedaudit.results import (
    LEAKS,
    AttackSummary,
    AuditResult,
    CeilingResult,
    FederationRecord,
    RequirementRecord,
    Verdict,
)
from fedaudit.results.record import READING, Record, optional
from fedaudit.simulation.protocols import protocol_by
from fedaudit.utils.bounds import read_json
from fedaudit.utils.errors import BadInput, CorruptTranscript
from fedaudit.utils.folders import check_folder, inside
from fedaudit.utils.integrity import blank, check, file_sha256, sealed, write_whole
from fedaudit.utils.version import __version__

FILE, PAGE, METRICS = "statement.json", "statement.html", "statement.prom"
ABOUT = "egress statement"  # what the digest is bound to

Outcome = Literal["pass", "fail", "not tested"]
_ORDER: tuple[Outcome, ...] = ("fail", "not tested", "pass")
_NO_LIMIT = (
    "no limit was set, so nothing was held against one: audit again into the same folder, which keeps what was found, "
    "with --fail-on recovered, or another"
)


class Limit(Record):
    """What one limit came to."""

    source: str = Field(description="name of the audit or log whose limit it is; empty: of both together")
    outcome: Outcome = Field(description="not tested: nothing measured it")
    text: str = Field(description="the limit and what was reached, in a line")


class Source(Record):
    """A file that a statement was made of."""

    kind: Literal["audit", "guard"] = Field(description="results.json of an audit, or guard.jsonl of a site's guard")
    name: str = Field(description="of the audit, or of the guard's folder")
    sha256: str = Field(description="of the file, or of its first bytes")
    bytes: int = Field(description="how many that are; a guard's log grows, and what was added later isn't covered")


class Leaving(Record):
    """Updates of one federation that was audited."""

    federation: str = Field(description="its name in the audit")
    text: str = Field(description="who sends what, in a line")
    clients: int = Field(description="how many there are")
    rounds: int = Field(description="how many were audited")
    defences: str = Field(description="their names; empty: none")


class Played(Record):
    """One attack on one federation."""

    attack: str = Field(description="its name")
    federation: str = Field(description="whose updates")
    verdict: Verdict = Field(description="what it showed")
    evidence: str = Field(description="the number behind it with its interval, or why there is none")
    worst: str = Field(default="", description="the most exposed record beside the mean; empty: not known")
    power: str = Field(description="whether it could have found something, and how that was shown")


class Privacy(Record):
    """ε of one federation that was audited, or of a site's updates that left."""

    whose: str = Field(description="federation, or job and site")
    spent: float | None = optional("ε by the accounting; null: nothing bounds it")
    target: float | None = optional("ε that must not be exceeded; null: none is set, or it isn't known")
    left: float | None = optional("until the target; null: there is none, or nothing bounds what is spent")
    delta: float | None = optional("δ; null: not recorded")
    demonstrated: float | None = optional("ε that an attack or canaries showed; null: none was looked for or shown")
    text: str = Field(description="all of it in a line")


class Audited(Record):
    """What one audit says."""

    name: str = Field(description="of the audit")
    started: str | None = optional("ISO 8601, UTC")
    fedaudit_version: str = Field(description="of the audit")
    leaving: list[Leaving] = Field(description="which updates it is about")
    reader: str = Field(description="who was taken for the adversary, and what it knows")
    finding: str = Field(description="the audit's answer")
    setting: str = Field(description="whether that is of a deployment, and why")
    verdict: Verdict = Field(description="of the whole audit")
    played: list[Played] = Field(description="tests, the worst verdict first")
    ceilings: list[str] = Field(description="what any attacker could get, estimated; empty: not computed")
    certificates: list[str] = Field(description="what noise rules out of each record or client, whoever attacks")
    privacy: list[Privacy] = Field(description="ε by federation")
    untested: list[str] = Field(description="what was not tested")
    requirements: list[RequirementRecord] = Field(default=[], description="what texts ask, line by line")

    @property
    def asked(self) -> list[tuple[str, RequirementRecord]]:
        """The lines that were met or not, with what they ask; those that one answer answers together."""
        of: dict[tuple[str, str], list[RequirementRecord]] = {}
        for one in self.requirements:
            if one.outcome in ("met", "not met"):
                of.setdefault((one.outcome, one.answer), []).append(one)
        return [("; ".join(f"{one.text}, {one.id} ({one.asks})" for one in lines), lines[0]) for lines in of.values()]

    @property
    def unanswered(self) -> str:
        """The lines that were not tested, by text."""
        of: dict[str, list[str]] = {}
        for one in self.requirements:
            if one.outcome == "not tested":
                of.setdefault(one.text, []).append(one.id)
        return "; ".join(f"{text}: {', '.join(_runs(ids))}" for text, ids in of.items())


def _runs(ids: Sequence[str]) -> list[str]:
    """Return them with those whose last numbers follow each other together, as 1.1–3."""
    runs: list[list[str]] = []
    for one in ids:
        head, _, last = one.rpartition(".")
        if runs and last.isdigit() and runs[-1][-1] == f"{head}.{int(last) - 1}":
            runs[-1].append(one)
        else:
            runs.append([one])
    return [run[0] if len(run) == 1 else f"{run[0]}–{run[-1].rpartition('.')[2]}" for run in runs]


class Guarded(Record):
    """What a guard wrote down of one job at one site."""

    job: str = Field(description="the framework's name of it")
    site: str = Field(description="of the site or node")
    first: str = Field(description="time of the first round, ISO 8601")
    last: str = Field(description="of the last one")
    rounds: int = Field(description="how many")
    sent: int = Field(description="updates that left, clipped ones too")
    held: int = Field(description="updates that didn't leave: refused, stopped, or never trained")
    checked: int = Field(description="updates that left, and on which at least one check was played")
    alarmed: int = Field(description="updates that left though a check raised an alarm")
    checks: dict[str, str] = Field(description="of each check, how often it was played and raised an alarm")
    privacy: Privacy | None = optional("null: ε wasn't accounted for")


class Statement(Record):
    """All that a page says, and what it was made of."""

    schema_version: Literal[1] = 1
    digest: str = Field(description="of this file, with zeros in its place; by FEDAUDIT_KEY where that is set")
    fedaudit_version: str = Field(description="of the program that wrote it")
    made: date = Field(description="date, ISO 8601")
    recipient: str | None = optional("to whom the updates go; null: to be filled in by hand")
    reviewer: str | None = optional("who reviewed it; null: to be filled in by hand")
    valid_until: date | None = optional("last day, as given or by age; null: to be filled in by hand")
    max_age: int | None = optional("days that an audit may be old; null: no such limit")
    again: list[Again] = Field(default=[], description="days by which to test again, and why, the first first")
    outcome: Outcome = Field(description="of the strictest limit; not tested where there is none")
    limits: list[Limit] = Field(description="the strictest first")
    sources: list[Source] = Field(description="what it was made of")
    audits: list[Audited] = Field(description="one for each audit")
    guards: list[Guarded] = Field(description="one for each job and site of a guard's log")
    residual: list[str] = Field(description="risk that remains, in sentences")
    ends: list[str] = Field(description="what ends it before its date: changes that the tests don't cover")


Part = tuple[Sequence[Audited | Guarded], Source, Sequence[Limit]]


def audited(path: Path) -> Part:
    """Return what the audit in a folder says for a statement, its file, and its limits.

    BadInput: there is none, or what is signed would name one of its classes, clients or examples.
    """
    whole, folder = open_audit(path)
    file = path / "results.json" if path.is_dir() else path
    if whole.shared is not None and (note := check_shared(file)):
        raise CorruptTranscript(note)
    result = shareable(whole)
    used = [f for f in result.federations if f.name in result.in_use()]
    pairs = [
        (s, full.worst.text if full.worst else "")  # how exposed the worst record is, and not which one
        for s, full in zip(result.summaries, whole.summaries, strict=True)
        if s.federation in result.in_use()
    ]
    answer = headline(result)
    untested = [*map(sentence, result.not_asked), *_grouped([(why, test) for test, why in assessment(whole).untested])]
    part = Audited(
        name=result.name,
        started=result.timing.started,
        fedaudit_version=result.fedaudit_version,
        leaving=[_leaving(result, one) for one in used],
        reader=sentence(result.adversary.summary),
        finding=answer.title,
        setting=answer.setting,
        verdict=answer.verdict,
        played=[_played(result, s, worst) for s, worst in sorted(pairs, key=lambda p: -SEVERITY[p[0].verdict])],
        ceilings=[_ceiling(c) for c in whole.ceilings if c.federation in result.in_use()],
        certificates=_certificates(used),
        privacy=[one for f in used if (one := _privacy(result, f))],
        untested=untested,
        requirements=result.requirements,
    )
    source = Source(kind="audit", name=result.name, sha256=file_sha256(file), bytes=file.stat().st_size)
    limits = [Limit(source=result.name, outcome=t.outcome, text=threshold_text(t)) for t in result.thresholds]
    if whole.shared is None:
        told = [one.model_dump_json(indent=2) for one in (part, *limits)]
        refuse_traces({f"the statement of “{path.name}”": "\n".join(told)}, phrases_of(whole, folder))
    return [part], source, limits or [Limit(source=result.name, outcome="not tested", text=_NO_LIMIT)]


def _certificates(used: Sequence[FederationRecord]) -> list[str]:
    """Return what noise rules out, a line for each text, behind the federations that it is told of."""
    of: dict[str, list[str]] = {}
    for one in used:
        if one.history is not None and (text := certificate_of(one.history)):
            unit = f", for each {one.history.epsilon_unit or 'client'}" if one.history.certificate else ""
            of.setdefault(f"{unit}: {text}", []).append(one.name)
    return [f"{', '.join(names)}{text}." for text, names in of.items()]


def same_in_both(one: Audited) -> str:
    """Return what an audit and its shared version say alike, and no two audits do."""
    played = [(p.attack, p.federation, p.verdict, p.evidence) for p in one.played]
    return json.dumps([one.name, one.started, one.fedaudit_version, one.finding, played])


def _grouped(told: Sequence[tuple[str, str]]) -> list[str]:
    """Return a line for each text, which is told of several things, with all of them before it."""
    of: dict[str, list[str]] = {}
    for text, thing in told:
        of.setdefault(text, []).append(thing)
    return [sentence(f"{', '.join(things)}: {text}") for text, things in of.items()]


def _ceiling(one: CeilingResult) -> str:
    """Return a ceiling in words, and that of the most exposed example."""
    told = f"{one.federation}: {one.text.rstrip('.')}"
    if one.worst is not None:
        return f"{told}; {one.worst.text}."
    ends = [e.value if e.high is None else e.high for e in one.examples]
    if known := [e for e in ends if e is not None]:
        unit = "dB" if one.unit == "dB" else "of cells"
        told += f"; the most exposed example: {short(max(known))} {unit}"
    return f"{told}."


def _leaving(result: AuditResult, one: FederationRecord) -> Leaving:
    updates = protocol_by(one.algorithm).sends or UPDATES[one.update_kind]
    size = ""
    if one.history is not None:
        size = f" of {count(round(one.history.parameters))} numbers ({count(round(one.history.bytes))} bytes)"
    text = f"{updates}{size} of {result.model.name}; {one.description}"
    return Leaving(
        federation=one.name,
        text=sentence(text),
        clients=one.clients,
        rounds=one.rounds,
        defences=", ".join(defences_of(one)),
    )


def _played(result: AuditResult, summary: AttackSummary, worst: str) -> Played:
    evidence = evidence_text(summary.evidence) if summary.evidence else summary.verdict_text
    control = None if summary.control is None else result.controls[summary.control]
    if summary.verdict in LEAKS:
        power = "found something"
    elif control is None or control.won is None:
        power = "not shown" + (f": {control.text}" if control else "")
    else:
        power = f"{'shown' if control.won else 'none'}, on {control.case}: {control.text}"
    return Played(
        attack=summary.attack,
        federation=summary.federation,
        verdict=summary.verdict,
        evidence=evidence,
        worst=worst,
        power=power,
    )


def _privacy(result: AuditResult, one: FederationRecord) -> Privacy | None:
    found = [f for f in result.findings if f.federation == one.name]
    audited = [f.epsilon for f in found if f.epsilon and f.epsilon.demonstrated is not None]
    shown = [(one.demonstrated or 0.0, one.unit, one.confidence) for one in audited]
    bounds = [f.record_epsilon.bound for f in found if f.record_epsilon]
    shown += [(bound.epsilon, bound.unit, bound.confidence or 0.95) for bound in bounds]
    most = max(shown, default=None)
    course = one.history
    spent = None if course is None else course.epsilon_pld or (course.epsilon[-1] if course.epsilon else None)
    if spent is None and not shown:
        return None
    text = "nothing bounds ε" if spent is None else f"ε {up(spent)} promised"
    if spent is not None and course is not None:
        delta = "" if course.epsilon_delta is None else f" at δ = {course.epsilon_delta:g}"
        text += f"{delta} for one {course.epsilon_unit or 'client'}, by {course.epsilon_adjacency}"
        text += f" neighbours, after {count(one.rounds)} {noun(one.rounds, 'rounds')}"
        text += spread_of(course)
    if most is not None:
        text += f"; ε {short(most[0])} demonstrated for one {most[1]}, at {100 * most[2]:g} %"
        text += f", the most of {len(shown)} tests" if len(shown) > 1 else ""
    return Privacy(
        whose=one.name,
        spent=spent,
        delta=course.epsilon_delta if course else None,
        demonstrated=None if most is None else most[0],
        text=text,
    )


def up(epsilon: float) -> str:
    """Return an ε, never rounded down."""
    return f"{math.ceil(epsilon * 100) / 100:.2f}"


def statement(
    parts: Sequence[Part],
    *,
    recipient: str | None = None,
    reviewer: str | None = None,
    valid_until: date | None = None,
    max_age: int | None = None,
    made: date | None = None,
) -> Statement:
    """Return the statement of audits and guards' logs together.

    Args:
        parts: of each file what it says, itself, and its limits; :func:`audited` and the guard's.
        recipient, reviewer, valid_until: as the page says them; None: a line to be filled in by hand.
        max_age: days that an audit may be old; None: any.
        made: the day; None: today.
    """
    parts = sorted(parts, key=lambda part: (part[1].kind, part[1].name, part[1].sha256))  # however they were named
    told = [one for said, _, _ in parts for one in said]
    audits = [one for one in told if isinstance(one, Audited)]
    guards = [one for one in told if isinstance(one, Guarded)]
    limits = [limit for _, _, limits in parts for limit in limits]
    if covered := _coverage(audits, guards):
        limits.append(covered)
    made = made or datetime.now(UTC).date()
    again = _again(audits, guards, given=valid_until, max_age=max_age, made=made)
    if max_age is not None:
        limits += [_age(one, max_age, made) for one in audits]
    limits.sort(key=lambda limit: _ORDER.index(limit.outcome))
    return Statement(
        digest=blank(),
        fedaudit_version=__version__,
        made=made,
        recipient=recipient,
        reviewer=reviewer,
        valid_until=min((one.by for one in again if one.why in ("given", "age")), default=None),
        max_age=max_age,
        again=again,
        outcome=limits[0].outcome if limits else "not tested",
        limits=limits,
        sources=[source for _, source, _ in parts],
        audits=audits,
        guards=guards,
        residual=list(_residual(audits, guards)),
        ends=list(_ends(audits, guards, again)),
    )


def _coverage(audits: Sequence[Audited], guards: Sequence[Guarded]) -> Limit | None:
    """Return whether no more left than was audited; None: there aren't both, so nothing tells."""
    if not audits or not guards:
        return None
    rounds = min((one.rounds for audit in audits for one in audit.leaving), default=0)  # which is which isn't known
    most = max(guards, key=lambda one: one.sent)
    kept = most.sent <= rounds
    were = "was" if rounds == 1 else "were"
    text = (
        f"{'PASS' if kept else 'NOT TESTED'}: no more rounds than were audited: {count(rounds)} {were}, and "
        f"{most.site} sent {count(most.sent)} updates in {most.job}"
    )
    return Limit(source="", outcome="pass" if kept else "not tested", text=text)


def _again(
    audits: Sequence[Audited], guards: Sequence[Guarded], *, given: date | None, max_age: int | None, made: date
) -> list[Again]:
    found = [] if given is None else [Again(why="given", by=given, text="as was given")]
    for one in audits:
        if max_age is not None and (day := day_of(one.started)) and not _to_come(day, made):
            found.append(by_age(one.name, day, max_age))
    rounds = min((one.rounds for audit in audits for one in audit.leaving), default=None)
    for site in guards:
        spent, left = (site.privacy.spent, site.privacy.left) if site.privacy else (None, None)
        epsilon = None if spent is None or left is None else (spent, left)
        found += by_pace(f"{site.site}, {site.job}", site.first, site.last, site.sent, rounds, epsilon)
    return soonest(found)


def _to_come(day: date, made: date) -> bool:
    return (day - made).days > 1  # a clock in another time zone may be a day ahead


def _age(one: Audited, most: int, made: date) -> Limit:
    """Return what came of a limit of age."""
    day = day_of(one.started)
    if day is None:
        return Limit(source=one.name, outcome="not tested", text="NOT TESTED: its age isn't known: it has no date")
    days = (made - day).days
    if _to_come(day, made):
        return Limit(source=one.name, outcome="not tested", text="NOT TESTED: its age isn't known: its date is to come")
    kept = days <= most
    text = f"{'PASS' if kept else 'FAIL'}: at most {count(most)} {noun(most, 'days')} old: {count(max(0, days))}"
    return Limit(source=one.name, outcome="pass" if kept else "fail", text=text)


def _residual(audits: Sequence[Audited], guards: Sequence[Guarded]) -> Iterator[str]:
    for audit in audits:
        of = f"{audit.name}: " if len(audits) > 1 else ""
        for verdict in (*LEAKS, "present, not extracted", "inconclusive"):
            found = [f"{one.attack} on {one.federation}" for one in audit.played if one.verdict == verdict]
            if found:
                yield of + sentence(f"{verdict}: {', '.join(found)}")
        if not any(one.verdict in LEAKS for one in audit.played):
            yield f"{of}No attack that was played showed a leak. Others might: this is no proof of safety."
        if audit.untested:
            yield f"{of}All that stands under “Not tested”."
    if not audits:
        yield "No audit stands behind this: the guard’s checks are short, and what they don’t find may be there."
    for one in guards:
        if one.alarmed:
            yield f"{one.site}, {one.job}: {one.alarmed} of {one.sent} updates left though a check raised an alarm."
        if one.checked < one.sent:
            yield f"{one.site}, {one.job}: {one.sent - one.checked} of {one.sent} updates left unchecked."
    open_ = [
        f"{audit.name}, {one.federation}" if len(audits) > 1 else one.federation
        for audit in audits
        for one in audit.leaving
        if one.federation not in {p.whose for p in audit.privacy if p.spent is not None}
    ]
    open_ += [f"{one.site}, {one.job}" for one in guards if one.privacy is None or one.privacy.spent is None]
    if open_:
        yield (
            f"{'; '.join(open_)}: nothing bounds what an attack that nobody knows yet could get, for no noise is "
            "accounted for."
        )


def _all_privacy(audits: Sequence[Audited], guards: Sequence[Guarded]) -> list[Privacy]:
    return [p for audit in audits for p in audit.privacy] + [one.privacy for one in guards if one.privacy]


def _ends(audits: Sequence[Audited], guards: Sequence[Guarded], again: Sequence[Again]) -> Iterator[str]:
    for audit, one in ((a, one) for a in audits for one in a.leaving):
        told = f"{audit.name}: " if len(audits) > 1 else ""
        told += f"“{one.federation}” runs more than {count(one.rounds)} {noun(one.rounds, 'rounds')}"
        told += f" or has other than {count(one.clients)} {noun(one.clients, 'clients')}"
        yield sentence(told + (f", or works without {one.defences}" if one.defences else ""))
    if audits:
        yield "The model, what of it is trained, the batches, the local training or the kind of data change."
        yield "An attack becomes known that wasn’t played, or fedaudit’s next version has one."
    if any(p.target is not None for p in _all_privacy(audits, guards)) and not any(a.why == "epsilon" for a in again):
        yield "The ε that is left is spent."
    if guards:
        yield "The guard raises an alarm, can’t check what leaves, or is set otherwise."


def write_statement(made: Statement, folder: Path) -> Statement:
    """Write ``statement.json``, sealed, ``statement.html`` and ``statement.prom``; return it with its digest.

    BadInput: they can't be written.
    """
    check_folder(folder)
    try:
        data = sealed(made.model_dump_json(indent=2) + "\n", ABOUT)
        made = _parsed(json.loads(data))
        write_whole(inside(folder, FILE), data)
        write_whole(inside(folder, PAGE), page(made).encode())
        write_whole(inside(folder, METRICS), metrics(made).encode())
    except OSError as error:
        raise BadInput(f"can't write to '{folder}': {error.strerror or error}") from None
    return made


def read_statement(folder: Path) -> Statement:
    """Return the statement in a folder. CorruptTranscript: its digest doesn't fit; BadInput: it is none."""
    file = folder / FILE
    try:
        values = read_json(file)
    except ValueError as error:
        raise BadInput(f"'{file}' isn't JSON: {error}") from None
    check(file, ABOUT, remedy="make it again with fedaudit statement", needed="what fedaudit statement wrote")
    return _parsed(values)


def _parsed(values: Any) -> Statement:
    try:
        return Statement.model_validate(values, context=READING)
    except ValidationError as error:
        where = ".".join(map(str, error.errors()[0]["loc"]))
        raise BadInput(f"statement.json isn't what fedaudit statement writes: {where}") from None


def page(made: Statement) -> str:
    """Return the page: a sheet of paper for most audits with a log."""
    return render("statement.html.j2", statement=made, severity=SEVERITY)


def metrics(made: Statement) -> str:
    """Return the outcome, and until when it is valid, as OpenMetrics text for monitoring."""
    lines = ["# TYPE fedaudit_statement_kept gauge", "# HELP fedaudit_statement_kept 1: every limit was kept."]
    lines.append(f"fedaudit_statement_kept {int(made.outcome == 'pass')}")
    days = [("valid_until", made.valid_until, "Until when it is valid.")]
    days += [("test_again", made.again[0].by if made.again else None, "When to test again, by age or at this pace.")]
    for what, day, told in days:
        if day is not None:
            end = datetime(day.year, day.month, day.day, 23, 59, 59, tzinfo=UTC)
            name = f"fedaudit_statement_{what}_timestamp_seconds"
            lines += [f"# TYPE {name} gauge", f"# UNIT {name} seconds", f"# HELP {name} {told}"]
            lines.append(f"{name} {end.timestamp():.0f}")
    covered = [(_labels(audit=a.name, federation=f.federation), f) for a in made.audits for f in a.leaving]
    for what, values in (
        ("rounds_audited", [(labels, one.rounds) for labels, one in covered]),
        ("clients_audited", [(labels, one.clients) for labels, one in covered]),
        ("updates_sent", [(_labels(job=one.job, site=one.site), one.sent) for one in made.guards]),
    ):
        name = f"fedaudit_statement_{what}"
        lines += [f"# TYPE {name} gauge"] * bool(values) + [f"{name}{labels} {value}" for labels, value in values]
    return "\n".join([*lines, "# EOF", ""])


def _labels(**values: str) -> str:
    escaped = {k: v.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") for k, v in values.items()}
    return "{" + ",".join(f'{key}="{value}"' for key, value in escaped.items()) + "}"


def differences(stored: Statement, again: Statement, folder: Path) -> list[str]:
    """Return in a line each what of a statement doesn't follow from its sources; empty: all of it does."""
    found = []
    for key, value in stored.model_dump(mode="json").items():
        other = again.model_dump(mode="json")[key]
        if key not in ("digest", "fedaudit_version") and value != other:
            found.append(f"{key}: the statement says {_short(value)}, its sources {_short(other)}")
    drawn = inside(folder, PAGE)
    if not drawn.is_file() or drawn.read_bytes() != page(stored).encode():
        found.append(f"{PAGE}: it isn't the page of {FILE}")
    told = inside(folder, METRICS)
    if not told.is_file() or told.read_bytes() != metrics(stored).encode():
        found.append(f"{METRICS}: it isn't that of {FILE}")
    if stored.valid_until and stored.valid_until < datetime.now(UTC).date():
        found.append(f"valid_until: it ended on {stored.valid_until}; test again")
    return found


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 80 else f"{text[:77]}…"
