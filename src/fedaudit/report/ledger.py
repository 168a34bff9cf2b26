"""A ledger in words, as a page and as JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from fedaudit.epsilon.certificate import in_words
from fedaudit.report import figures
from fedaudit.report.style import render
from fedaudit.results import Chart, Line
from fedaudit.results.ledger import ClientLedger, Ledger
from fedaudit.utils.folders import check_folder

_ROWS = 20  # more clients are told together
_RATHER = 1000  # an ε above which no decimals are told


class Row(NamedTuple):
    """How often a client, or some that are alike, send, and what that costs, in words."""

    who: str
    rounds: int
    epsilon: str
    why: str


def write_ledger(ledgers: Sequence[Ledger], folder: Path) -> None:
    """Write ``ledger.html`` and ``ledger.json`` into ``folder``, in place of those that are there."""
    check_folder(folder)
    folder.mkdir(parents=True, exist_ok=True)
    chapters = [
        {
            "ledger": one,
            "conditions": conditions(one),
            "rows": rows(one),
            "answers": answers(one),
            "open": any(client.why for client in one.clients),
            **_picture(one, f"l{i}-"),
        }
        for i, one in enumerate(ledgers)
    ]
    (folder / "ledger.html").write_text(render("ledger.html.j2", chapters=chapters), encoding="utf-8")
    values = [one.for_programs() for one in ledgers]
    (folder / "ledger.json").write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def conditions(one: Ledger) -> str:
    """Return what the ε are about."""
    whose = "one client's whole update" if one.protects == "client" else "one example"
    neighbours = "another" if one.adjacency == "replace" else "nothing"
    return f"protected is {whose}, with {neighbours} in its place, at δ = {one.delta:g}; {one.sampling}"


def rows(one: Ledger) -> list[Row]:
    """Return a row for each client, or for all that are alike, who sent most first."""
    alike: dict[tuple[int, str, str], list[str]] = {}
    for client in one.clients:
        alike.setdefault((client.rounds, epsilon_of(client), client.why), []).append(client.client)
    listed = [Row(_together(names), *key) for key, names in alike.items()]
    listed.sort(key=lambda row: -row.rounds)
    if len(listed) <= _ROWS:
        return listed
    rest = listed[_ROWS - 1 :]
    return [*listed[: _ROWS - 1], rest[0]._replace(who=f"{len(rest)} more, at most")]


def epsilon_of(client: ClientLedger) -> str:
    """Return a client's ε, as it is told."""
    return "no bound" if client.epsilon is None else short(client.epsilon)


def answers(one: Ledger) -> list[str]:
    """Return what the noise rules out, what the target takes, and the notes."""
    told = [in_words(one.candidates, one.success)]
    if one.target is not None:
        t = one.target
        often = "no round" if not t.allowed else "1 round" if t.allowed == 1 else f"{t.allowed:,} rounds"
        line = f"below ε = {t.epsilon:g}: {often} of a client, as it is set"
        if t.allowed >= t.rounds:
            line = f"ε stays below {t.epsilon:g} in all {t.rounds:,} rounds; {t.allowed:,} would be allowed"
        elif t.noise is not None:
            line += f"; or all {t.rounds:,} with noise of {short(t.noise)} clips"
        told.append(line)
    return [*told, *one.notes]


def short(value: float) -> str:
    """Return an ε or a number of clips with three significant digits, never rounded down."""
    if value >= _RATHER:
        return f"{math.ceil(value):,}"
    digits = max(0, 2 - math.floor(math.log10(value))) if value > 0 else 2
    return f"{math.ceil(value * 10**digits) / 10**digits:.{digits}f}"


def _together(names: list[str]) -> str:
    if len(names) <= 4:
        return ", ".join(names)
    return f"{names[0]}, {names[1]}, … {names[-1]} ({len(names)} clients)"


def _picture(one: Ledger, prefix: str) -> dict[str, object]:
    """Return ε over rounds, of the clients that sent most often, typically and least, with its legend."""
    bounded = sorted((c for c in one.clients if len(c.curve) > 1), key=lambda c: (-c.rounds, c.client))
    if not bounded:
        return {"picture": None, "legend": []}
    different = {c.curve: c for c in (bounded[0], bounded[len(bounded) // 2], bounded[-1])}.values()
    alike = len(bounded) > 1 and len({c.curve for c in bounded}) == 1
    lines = [
        Line(
            name="every client" if alike else f"client {c.client}",
            x=[float(r) for r, _ in c.curve],
            y=[e for _, e in c.curve],
        )
        for c in different
    ]
    chart = Chart(title="ε over rounds (Rényi)", caption="", x_label="rounds", y_label="ε", lines=lines)
    names = [line.name for line in lines]
    words = "; ".join(
        f"{line.name} {short(line.y[0])} after its first round, {short(line.y[-1])} at the end" for line in lines
    )
    return {
        "picture": figures.to_svg(figures.draw_chart(chart, names), prefix, f"{chart.title}: {words}."),
        "legend": [(n, figures.to_svg(figures.draw_swatch(i), f"{prefix}s{i}-", None)) for i, n in enumerate(names)],
    }
