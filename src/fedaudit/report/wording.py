"""Numbers, times and sentences as a reader of the report expects them."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from datetime import UTC, datetime

from fedaudit.evaluation.finding_types import known_type, metric
from fedaudit.results import AttackSummary, AuditResult, FederationRecord, FindingResult, Interval, MetricSummary

_NONE = ("none", "mean", "fedavg")  # what federations without a defence are under


def number(value: float | None, digits: int) -> str:
    """Return ``value`` with ``digits`` decimals and a true minus sign; a dash where there is none."""
    return "–" if value is None or not math.isfinite(value) else f"{value:,.{digits}f}".replace("-", "−")


def short(value: float | None) -> str:
    """Return ``value`` with three significant digits and a true minus sign; a dash where there is none."""
    return "–" if value is None or not math.isfinite(value) else f"{value:.3g}".replace("-", "−")


def span(interval: Interval, digits: int | None = None) -> str:
    """Return an interval in brackets, with ``digits`` decimals or three significant digits; nothing for n = 1."""
    return interval.span(short if digits is None else lambda end: number(end, digits)).strip()


def count(value: int) -> str:
    """Return a whole number with its thousands parted."""
    return f"{value:,}"


def words_of(name: str) -> str:
    """Return what a metric is called in sentences, one of a package that isn't installed by its name."""
    known = metric(name)
    return known.words if known else name.replace("_", " ")


def defences_of(federation: FederationRecord) -> list[str]:
    """Return the names of the defences that a federation is under."""
    return [name for name in (federation.client_defence, federation.aggregator) if name not in _NONE]


def counted(summary: AttackSummary) -> str:
    """Return how many images an attack was tried on, and where it was tried several times on one, how often."""
    evidence = summary.evidence if known_type(summary.kind).counts else None
    victims, things = (evidence.n, evidence.of) if evidence else (summary.images, "images")
    found = f"{count(victims)} {noun(victims, things)}"
    return found if victims == summary.images else f"{found}, {count(summary.images)} tries"


def noun(n: int, things: str) -> str:
    """Return what n of ``things`` are called; their first word that ends in s is a plural."""
    if n == 1:
        return re.sub(r"(ie)?s\b", lambda ending: "y" if ending[1] else "", things, count=1)
    return things


def rests_on(metric: MetricSummary, summary: AttackSummary, result: AuditResult) -> tuple[int, str]:
    """Return on how many of what a metric's value rests: what its interval is over, else what a single run counts."""
    runs = [f for f in result.findings if (f.attack, f.federation) == (summary.attack, summary.federation)]
    found = [m for f in runs for m in f.metrics if m.name == metric.name]
    n, of = metric.value.n, metric.of or ""
    if len(found) == 1:
        n, of = found[0].n or n, found[0].of or of
    return n, noun(n, of)


def percent(share: float | None) -> str:
    """Return a share from 0 to 1 in percent; a dash where there is none."""
    return "–" if share is None or not math.isfinite(share) else f"{100 * share:.3g} %"


def duration(seconds: float) -> str:
    """Return seconds as a reader says them: '0.4 s', '52 s', '3 min 20 s', '2 h 5 min'."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if not minutes:
        return f"{rest} s"
    hours, minutes_left = divmod(minutes, 60)
    return f"{hours} h {minutes_left} min" if hours else f"{minutes} min {rest} s"


def when(started: str | None) -> str:
    """Return an ISO 8601 time as a date and a time; whatever is not one stays as it is."""
    if started is None:
        return "date not recorded"
    try:
        moment = datetime.fromisoformat(started)
        moment = moment.astimezone(UTC) if moment.tzinfo else moment
    except (ValueError, OverflowError):
        return started
    return f"{moment.day} {moment:%B %Y, %H:%M} UTC"


def sentence(text: str) -> str:
    """Return ``text`` with a capital at its beginning and a full stop at its end, if it has none."""
    text = text.strip()
    return text[:1].upper() + text[1:] + ("" if text.endswith((".", "!", "?")) or not text else ".")


def client_of(finding: FindingResult, result: AuditResult) -> str | None:
    """Return the client whose update an attack received, as the framework names it; None where there were several."""
    if finding.client is None:
        return None
    if finding.clients:
        first, last = min(finding.clients), max(finding.clients)
        whole = last - first + 1 == len(finding.clients)
        return f"{first} to {last}, summed" if whole else f"{len(finding.clients)}, summed"
    return named(finding.client, finding.federation, result)


def named(client: int, federation: str, result: AuditResult) -> str:
    """Return a client as the framework names it, else by its number."""
    for record in result.federations:
        if record.name == federation and record.recording and client < len(record.recording.clients):
            return record.recording.clients[client]
    return str(client)


def rounds_of(finding: FindingResult) -> str:
    """Return the rounds that an attack received: "3", "0 to 9", or a dash for none."""
    rounds = finding.rounds or ([] if finding.round is None else [finding.round])
    if len(rounds) < 2:
        return str(rounds[0]) if rounds else "–"
    return f"{min(rounds)} to {max(rounds)}"


def place_of(finding: FindingResult, result: AuditResult) -> str:
    """Return whose update an attack received, and in which rounds; empty where it received none."""
    whose, rounds = client_of(finding, result), rounds_of(finding)
    return ", ".join([f"client {whose}"] * (whose is not None) + [f"round {rounds}"] * (rounds != "–"))


def shared(told: Iterable[tuple[str, str, str]]) -> list[tuple[str, str, int]]:
    """Return of which attacks, and on which federations (empty: none), each text is told, the text, and how often.

    What is told of several attacks has "each" in place of the attack's name.
    """
    groups: dict[str, list[tuple[str, str]]] = {}
    for attack, federation, text in told:
        anonymous = re.sub(rf"(?<![\w-]){re.escape(attack)}(?![\w-])", "\0", text)
        groups.setdefault(anonymous, []).append((attack, federation))
    found = []
    for text, of in groups.items():
        attacks, federations = (list(dict.fromkeys(filter(None, names))) for names in zip(*of, strict=True))
        whom = " on ".join(", ".join(names) for names in (attacks, federations) if names)
        found.append((whom, text.replace("\0", attacks[0] if len(attacks) == 1 else "each"), len(of)))
    return found
