"""What texts ask, line by line: met, not met, not tested, or what an audit answers; the lines are data.

Nothing is met that wasn't measured, nor because an attack that couldn't have found anything found nothing: that takes
the verdict "not demonstrated", which needs power or a control that was won.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from fedaudit.attacks.standards import ASKED, Asked
from fedaudit.report.conclusion import limit_name
from fedaudit.report.wording import count, defences_of, number, short
from fedaudit.results import (
    LEAKS,
    AttackSummary,
    AuditResult,
    FederationRecord,
    HistoryRecord,
    RequirementOutcome,
    RequirementRecord,
    Timing,
)

_SURE = 0.01  # probability at which members count as told, and a promise as broken
_NEAR = 0.6  # accuracy of guessing and a tenth: what isn't excluded above that isn't known to be guessing
_RECIPIENTS = {
    "server": ("server", "malicious-server", "eavesdropper", "aggregating-client"),
    "site": ("client", "colluding-clients", "party"),
}


class Answer(NamedTuple):
    """What a rule says of a line, with the number behind it, its interval, and how many that rests on."""

    outcome: RequirementOutcome
    answer: str
    value: float | None = None
    low: float | None = None
    high: float | None = None
    n: int | None = None
    timing: Timing | None = None


Rule = Callable[[AuditResult], Answer]


def requirements(result: AuditResult) -> list[RequirementRecord]:
    """Return what became of every line that a text asks, by the federations that are in use."""
    return [_record(line, result) for line in ASKED]


def _record(line: Asked, result: AuditResult) -> RequirementRecord:
    answer = RULES[line.by](result) if line.by else Answer("not tested", line.why)
    return RequirementRecord(text=line.text, id=line.id, asks=line.asks, source=line.source, **answer._asdict())


def _used(result: AuditResult) -> list[FederationRecord]:
    return [f for f in result.federations if f.name in result.in_use()]


def _ran(result: AuditResult) -> list[AttackSummary]:
    """Return what was played on federations in use."""
    used = result.in_use()
    return [s for s in result.summaries if s.verdict != "not applicable" and s.federation in used]


def _membership(result: AuditResult) -> Answer:
    rows = [s for s in _ran(result) if s.kind == "membership"]
    told = [(s, m.value) for s in rows for m in s.metrics if m.name == "membership_accuracy"]
    if not told:
        return Answer("not tested", "no attack on membership was played, or none could be")
    leaks = [(s, a) for s, a in told if s.verdict in LEAKS or _stands_out(s)]
    open_ = [(s, a) for s, a in told if s.verdict != "not demonstrated" or a.low > 0.5 or a.high > _NEAR]
    worst, accuracy = max(leaks or open_ or told, key=lambda one: one[1].mean)
    outcome: RequirementOutcome = "not met" if leaks else "not tested" if open_ else "met"
    text = (
        f"{worst.attack} on {worst.federation} is right about {short(accuracy.mean)} [{short(accuracy.low)}, "
        f"{short(accuracy.high)}] of {count(accuracy.n)} records, guessing about half: {worst.verdict}{_setting(worst)}"
    )
    if worst.evidence is not None and worst.evidence.p_value is not None:
        text += f", p = {worst.evidence.p_value:.2g}"
    if _stands_out(worst) and worst.worst is not None:
        text += f"; {worst.worst.text}"
    if outcome == "not tested" and worst.verdict == "not demonstrated":
        text += f"; so few records don't exclude {_NEAR}"
    if outcome == "met":
        text += f"; it is the most of {count(len(told))} that were played, and each" if len(told) > 1 else "; it"
        text += " could have found something"
    return Answer(outcome, text, accuracy.mean, accuracy.low, accuracy.high, accuracy.n)


def _stands_out(one: AttackSummary) -> bool:
    """Return whether more members than by luck score above every other record: few, but known for certain."""
    return one.worst is not None and one.worst.p_value is not None and one.worst.p_value <= _SURE


def _setting(one: AttackSummary) -> str:
    return ", in a diagnostic" if one.setting == "diagnostic" else ""


def _spent(course: HistoryRecord | None) -> float | None:
    """Return the ε of a federation after its last round; None: nothing bounds it."""
    if course is None:
        return None
    spent = course.epsilon_pld or (course.epsilon[-1] if course.epsilon else None)
    return spent if spent is not None and math.isfinite(spent) else None


def _private(result: AuditResult) -> list[tuple[FederationRecord, HistoryRecord, float]]:
    """Return the federations in use of which ε is accounted for."""
    told = [(f, f.history, _spent(f.history)) for f in _used(result)]
    return [(f, course, spent) for f, course, spent in told if course is not None and spent is not None]


def _private_training(result: AuditResult) -> Answer:
    used, private = _used(result), _private(result)
    if not used or any(f.history is None for f in used):
        return Answer("not tested", "how the clients trained isn't known of every federation")
    if broken := _broken(result):
        return broken
    without = [f.name for f in used if f.name not in {one.name for one, _, _ in private}]
    if without:
        return Answer("not met", f"no noise that counts: {', '.join(without)}")
    most = max(spent for _, _, spent in private)
    told = "; ".join(f"{f.name}: {_epsilon(course, spent)}" for f, course, spent in private)
    return Answer("answered", f"{told}. No text that we know names an ε that suffices", most)


def _epsilon(course: HistoryRecord, spent: float) -> str:
    delta = "" if course.epsilon_delta is None else f" at δ = {course.epsilon_delta:g}"
    return f"ε {math.ceil(spent * 100) / 100:.2f}{delta}"


def _of_private(say: Callable[[FederationRecord, HistoryRecord, float], str], *, spent: bool = False) -> Rule:
    """Return a rule that says the same of each federation whose ε is accounted for; its number is what is ``spent``."""

    def rule(result: AuditResult) -> Answer:
        private = _private(result)
        if not private:
            return Answer("not tested", "no ε is accounted for")
        told: dict[str, list[str]] = {}
        for one in private:
            told.setdefault(say(*one), []).append(one[0].name)
        text = "; ".join(f"{', '.join(names)}: {text}" for text, names in told.items())
        return Answer("answered", text, max(most for _, _, most in private) if spent else None)

    return rule


def _neighbours(_: FederationRecord, course: HistoryRecord, __: float) -> str:
    unit = course.epsilon_unit or "client"
    return f"one {unit} more or less" if course.epsilon_adjacency == "add-remove" else f"one {unit} in another's place"


def _trust(_: FederationRecord, course: HistoryRecord, __: float) -> str:
    if course.certificate is None:
        return "who adds the noise isn't recorded"
    return "the server adds the noise, and must be trusted" if course.certificate.central else "each client adds noise"


def _composition(one: FederationRecord, course: HistoryRecord, spent: float) -> str:
    rounds = len(course.epsilon) or one.rounds
    return f"{_epsilon(course, spent)} after {count(rounds)} of {count(one.rounds)} rounds, all counted together"


def _utility(_: FederationRecord, course: HistoryRecord, __: float) -> str:
    return f"accuracy {number(course.accuracy[-1], 2)} at the end" if course.accuracy else "accuracy wasn't measured"


def _broken(result: AuditResult) -> Answer | None:
    """Return that a promise of ε is refuted, by canaries or by an attack on membership; None: it isn't."""
    for f in (f for f in result.findings if f.federation in result.in_use()):
        found, shown = f.epsilon, f.record_epsilon
        if found and f.is_leak and found.claimed is not None and (found.demonstrated or 0.0) > found.claimed:
            text = f"{f.federation}: ε {short(found.demonstrated)} demonstrated, {short(found.claimed)} claimed"
            return Answer("not met", text, found.demonstrated, found.demonstrated, None, found.canaries)
        if shown and shown.claimed is not None and shown.p_value is not None and shown.p_value <= _SURE:
            text = f"{f.federation}: ε {short(shown.bound.epsilon)} demonstrated, {short(shown.claimed)} claimed"
            return Answer("not met", text, shown.bound.epsilon, shown.bound.epsilon, None, shown.bound.canaries)
    return None


def _correctness(result: AuditResult) -> Answer:
    if broken := _broken(result):
        return broken
    found = [(f.federation, f.epsilon) for f in result.findings if f.federation in result.in_use() and f.epsilon]
    claimed = [(name, one) for name, one in found if one.claimed is not None]
    if not claimed:
        return Answer("not tested", "no canaries audited a promise of ε")
    blind = [name for name, one in claimed if one.detectable is None or one.joint_noise]
    if blind:
        return Answer("not tested", f"{', '.join(blind)}: too few canaries, or the code that adds noise wasn't run")
    name, one = max(claimed, key=lambda told: (told[1].demonstrated or 0.0) - (told[1].claimed or 0.0))
    shown = one.demonstrated or 0.0
    if one.claimed is not None and shown > one.claimed:
        text = f"{name}: canaries hint at more than is claimed, {short(shown)} for {short(one.claimed)}, and not surely"
        return Answer("not tested", text, shown, shown, None, one.canaries)
    text = (
        f"{name}: {count(one.canaries)} canaries demonstrate ε {short(shown)}, {short(one.claimed)} is claimed; a true "
        f"ε of {short(one.detectable)} would have shown, which proves no promise"
    )
    return Answer("answered", text, shown, shown, None, one.canaries)


def _by(who: str) -> Rule:
    """Return a rule about the means of a recipient who sees what this audit's adversary does."""

    def rule(result: AuditResult) -> Answer:
        if result.adversary.adversary not in _RECIPIENTS[who]:
            return Answer("not tested", f"this audit's adversary is another one: {result.adversary.adversary}")
        return _means(_ran(result))

    return rule


def _user(result: AuditResult) -> Answer:
    asking = {a.name for a in result.attacks if a.settings.get("model") == "global"}
    return _means([s for s in _ran(result) if s.attack in asking or s.kind == "extraction"])


def _means(rows: Sequence[AttackSummary]) -> Answer:
    """Return which means worked, and their cost; where none did, that nothing was found, which meets nothing."""
    rows = [s for s in rows if s.kind != "epsilon"]  # who plants canaries is the auditor
    if not rows:
        return Answer("not tested", "no attack with these means was played, or none could be")
    leaks = [s for s in rows if s.verdict in LEAKS]
    if not leaks:
        verdicts = ", ".join(f"{s.attack} on {s.federation}: {s.verdict}" for s in rows)
        if all(s.verdict == "inconclusive" for s in rows):
            return Answer("not tested", "every attack with these means was inconclusive")
        return Answer("answered", f"no means that was tried worked, which is no proof: {verdicts}")
    worst = min(leaks, key=lambda s: (LEAKS.index(s.verdict), -(s.evidence.value if s.evidence else 0.0)))
    found = worst.evidence
    told = f": {worst.verdict_text.rstrip('.')}" if worst.verdict_text else ""
    text = f"{worst.attack} on {worst.federation} works{told}{_setting(worst)}"
    if found is None:
        return Answer("not met", text, timing=worst.timing)
    if found.low is not None and found.high is not None and f"[{short(found.low)}, {short(found.high)}]" not in told:
        text += f"; {found.what} {short(found.value)} [{short(found.low)}, {short(found.high)}]"
    return Answer("not met", text, found.value, found.low, found.high, found.n, worst.timing)


def _limits(result: AuditResult) -> Answer:
    if not result.thresholds:
        return Answer("not tested", "no limit was set")
    told = "; ".join(f"{limit_name(one)}: {one.outcome}" for one in result.thresholds)
    if all(one.outcome == "not tested" for one in result.thresholds):
        return Answer("not tested", told)
    return Answer("answered", f"{told}. When the limits were set isn't known")


def _dated(result: AuditResult) -> Answer:
    if not _ran(result):
        return Answer("not tested", "no attack was played, or none could be")
    return Answer(
        "answered",
        "this audit is one test, with its date; whether tests are regular isn't known; what asks for the next stands "
        "in results.json (test_again)",
    )


def _accuracy(result: AuditResult) -> Answer:
    told = [(f.name, f.history.accuracy[-1]) for f in _used(result) if f.history is not None and f.history.accuracy]
    if not told:
        return Answer("not tested", "accuracy wasn't measured")
    return Answer("answered", "; ".join(f"{name}: {number(value, 2)} at the end" for name, value in told))


def _measures(result: AuditResult) -> Answer:
    used = _used(result)
    if not used:
        return Answer("not tested", "no federation is known")
    none = {True: "no defence", False: "no defence that is known"}
    told = [f"{f.name}: {', '.join(defences_of(f)) or none[f.recording is None]}" for f in used]
    return Answer("answered", f"{'; '.join(told)}. Whether that is enough is no test's to say")


RULES: dict[str, Rule] = {
    "membership": _membership,
    "private training": _private_training,
    "parameters": _of_private(lambda _, course, most: _epsilon(course, most), spent=True),
    "unit": _of_private(lambda _, course, __: f"one {course.epsilon_unit or 'client'}"),
    "neighbours": _of_private(_neighbours),
    "composition": _of_private(_composition),
    "trust": _of_private(_trust),
    "utility": _of_private(_utility),
    "correctness": _correctness,
    "server": _by("server"),
    "site": _by("site"),
    "user": _user,
    "confidentiality": lambda result: _means(_ran(result)),
    "limits": _limits,
    "dated": _dated,
    "accuracy": _accuracy,
    "measures": _measures,
}
