"""The comparison of defences: what each still leaks, what it costs, and which one to take."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from fedaudit.report import frontier
from fedaudit.report.frontier import Price, strongest
from fedaudit.report.wording import number, short
from fedaudit.results import LEAKS, AuditResult, FederationRecord, Verdict

_ROUNDS = 5  # below, accuracy says nothing of what training with a defence costs
_EACH = "each client changes its update before it leaves, by "
UNDEFENDED = ("mean", "fedavg")  # aggregators that are no defence


@dataclass(frozen=True)
class Defended:
    """One federation under one set of defences, beside the same one without.

    Attributes:
        federation: its name.
        defences: in words; empty for none.
        verdict: on what it leaks.
        leak: the number behind it, with its interval.
        accuracy: held-out, in percent.
        lost: percentage points of accuracy, against the undefended one; empty where that isn't known.
        bytes: of an update, against the undefended one's.
        guarantee: ε in words.
        undefended: whether it has no defence.
    """

    federation: str
    defences: str
    verdict: Verdict
    leak: str
    accuracy: str
    lost: str
    bytes: str
    guarantee: str
    undefended: bool
    points: float | None = None


@dataclass(frozen=True)
class DefenceTable:
    """The defences of one federation, the undefended one first, and what follows from them."""

    federation: str
    rows: tuple[Defended, ...]
    recommendation: str


def defence_tables(result: AuditResult) -> list[DefenceTable]:
    """Return a table for every federation that was simulated under several sets of defences."""
    if not result.scenario.get("other_defences"):
        return []
    by_name = {price.federation: price for price in frontier.prices(result)}
    tables = []
    for spec in result.scenario.get("federations", []):
        own = [f for f in result.federations if f.name.startswith(f"{spec['name']}-") and f.name in by_name]
        if len(own) > 1:
            tables.append(_table(result, spec["name"], own, by_name))
    return tables


def _table(
    result: AuditResult, name: str, records: Sequence[FederationRecord], prices: dict[str, Price]
) -> DefenceTable:
    plain = next((r for r in records if _undefended(r)), None)
    base = prices[plain.name] if plain else None
    rows = [_row(result, r, prices[r.name], base) for r in records]
    rows.sort(key=lambda row: (not row.undefended, row.verdict in LEAKS, row.points or 0.0))
    return DefenceTable(name, tuple(rows), _recommendation(rows))


def _row(result: AuditResult, record: FederationRecord, price: Price, base: Price | None) -> Defended:
    summaries = [s for s in result.summaries if s.federation == record.name]
    best = strongest(result, summaries)
    leak = "not attacked"
    if best:
        leak = best.verdict_text
        for first in best.measured[:1]:
            by = frontier.Scale(first.name, first.unit, first.higher_is_better)
            unit = " dB" if by == frontier.PSNR else ""
            leak = f"{by.words} {short(first.value.mean)}{unit}{first.value.span(short)} by {best.attack}"
    points, lost = None, "not measured"
    if record.rounds < _ROUNDS and price.accuracy is not None:
        lost = f"too few rounds to tell ({record.rounds})"
    elif base is not None and base.accuracy is not None and price.accuracy is not None and record.course:
        points = 100 * (base.accuracy - price.accuracy)
        n = max(1, record.course.examples)
        spread = 196 * math.sqrt(sum(a * (1 - a) / n for a in (base.accuracy, price.accuracy)))
        lost = "–" if price is base else f"{number(points, 1)} points"
        if price is not base and abs(points) <= spread:
            lost += " (undecided)"
    ratio = f"{number(price.bytes / 1000, 1)} kB"
    if base is not None and price is not base and base.bytes:
        ratio += f" ({number(100 * price.bytes / base.bytes, 0)} %)"
    return Defended(
        federation=record.name,
        defences=(record.defences or "").replace(_EACH, ""),
        verdict=best.verdict if best else "not applicable",
        leak=leak,
        accuracy="not measured" if price.accuracy is None else f"{number(100 * price.accuracy, 1)} %",
        lost=lost,
        bytes=ratio,
        guarantee=_guarantee(price.epsilon),
        undefended=_undefended(record),
        points=points,
    )


def _undefended(record: FederationRecord) -> bool:
    return record.aggregator in UNDEFENDED and record.sanitiser == "none"


def _guarantee(epsilon: float | None) -> str:
    """Return ε in words: by what factor it lets the odds change that a client took part."""
    if epsilon is None:
        return "none"
    if epsilon >= 20:
        return f"ε = {epsilon:,.0f}: it bounds nothing in practice"
    factor = math.exp(epsilon)
    shown = f"{factor:,.0f}" if factor >= 100 else f"{factor:.3g}"
    return f"ε = {epsilon:.3g}: the odds that one took part change at most {shown}-fold"


def _recommendation(rows: Sequence[Defended]) -> str:
    """Return which defence to take, or that this comparison can't tell."""
    plain = next((row for row in rows if row.undefended), None)
    if plain is None:
        return "Inconclusive: there is no undefended federation to compare with; add one (defences: [none, …])."
    if plain.verdict not in LEAKS:
        return (
            f"Meaningless here: without a defence the verdict is “{plain.verdict}”, too. The attack must first find "
            "something from the undefended federation; raise its effort."
        )
    kept = [row for row in rows if not row.undefended and row.verdict == "not demonstrated"]
    if not kept:
        unsure = [row.federation for row in rows if row.verdict == "inconclusive"]
        if unsure:
            return f"Inconclusive: whether {', '.join(unsure)} would hold is open; no other defence stops the leak."
        return "None of these defences stops the leak."
    known = [row for row in kept if row.points is not None]
    best = min(known or kept, key=lambda row: row.points or 0.0)
    also = [row.federation for row in kept if row is not best]
    price = ", at a higher price" if known else ""
    more = f" So {'does' if len(also) == 1 else 'do'} {', '.join(also)}{price}." if also else ""
    return (
        f"{best.federation} stops what was found without a defence (accuracy lost: {best.lost}).{more} Not "
        "demonstrated isn't safe: it holds for these attacks only."
    )
