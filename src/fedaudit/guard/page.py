"""What a site's guard saw, for people on one page and for monitoring programs as OpenMetrics."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import UTC
from pathlib import Path
from typing import Any

from fedaudit.guard.rounds import LEFT, RESULT, CheckOutcome, CheckRecord, SiteRound, in_parts
from fedaudit.report.statement import up
from fedaudit.report.style import render
from fedaudit.report.wording import count, noun, percent
from fedaudit.utils.integrity import write_whole

PAGE, METRICS = "guard.html", "guard.prom"

_PARTS = 4  # jobs and sites that have a picture, those that were written to last
_COLUMNS = 100  # of the picture; of more rounds several share one
_ALARMS = 5  # that are listed, the last ones
_WORST: tuple[CheckOutcome, ...] = ("alarm", "unable", "quiet", "not played")
_NAMES = {"received": "model that came in", "members": "own records", RESULT: "result without an update"}
_LEFT, _WIDTH, _ROW, _PLOT = 190, 1136, 19, 58  # of the picture, in CSS pixels
_EDGE = 12  # at the right, for the last number


def write_site(rounds: Sequence[SiteRound], folder: Path) -> None:
    """Write ``guard.html`` and ``guard.prom`` into ``folder``, which exists, each at once, in place of those there."""
    write_whole(folder / PAGE, page(rounds).encode())
    write_whole(folder / METRICS, metrics(rounds).encode())


def page(rounds: Sequence[SiteRound]) -> str:
    """Return the page: a sentence, a picture by round, the alarms and what isn't watched, of each job and site."""
    parts = in_parts(rounds)
    chapters = [_chapter(part) for part in parts[:_PARTS]]
    return render(
        "guard.html.j2", "fedaudit.guard", chapters=chapters, more=len(parts) - len(chapters), at=_when(rounds[-1])
    )


def headline(rounds: Sequence[SiteRound]) -> str:
    """Return in a sentence what was found, in how many rounds, and what was done."""
    total = f"{count(len(rounds))} {noun(len(rounds), 'rounds')}"
    alarms = [one for one in rounds if one.alarms]
    stopped = sum(one.done == "stopped" for one in rounds)
    spent = f" The privacy budget is spent: {count(stopped)} {noun(stopped, 'updates')} not sent." if stopped else ""
    unseen = sum(RESULT in one.checks and one.done in LEFT for one in rounds)
    if unseen:
        spent += f" {count(unseen)} {noun(unseen, 'results')} left that nobody can look into."
    if not alarms:
        played = [{name for name, check in one.checks.items() if check.outcome == "quiet"} for one in rounds]
        of_updates = sum(bool(names - {"received"}) for names in played)
        if of_updates == len(rounds):
            return f"No alarm in {total}.{spent}"
        if of_updates:
            return f"No alarm in {total}; of {count(of_updates)} the update was checked.{spent}"
        if any(played):
            return f"No update was checked in {total}; the models that came in raised no alarm.{spent}"
        return f"Nothing could be checked in {total}.{spent}"
    by = Counter(name for one in alarms for name in one.alarms)
    names = ", ".join(_NAMES.get(name, name) for name, _ in by.most_common())
    became: Counter[str] = Counter(one.done for one in alarms)
    done = [
        f"{count(became[key])} {words}"
        for key, words in (
            ("left", "left nevertheless"),
            ("clipped", "clipped"),
            ("refused", "refused"),
            ("not let in", "not trained on"),
            ("stopped", "stopped by the budget"),
        )
        if became[key]
    ]
    return f"Alarms in {count(len(alarms))} of {total} ({names}): {', '.join(done)}.{spent}"


def _chapter(rounds: list[SiteRound]) -> dict[str, Any]:
    names = list(dict.fromkeys(name for one in rounds for name in one.checks))
    size = math.ceil(len(rounds) / _COLUMNS)
    columns = [rounds[at : at + size] for at in range(0, len(rounds), size)]
    step = (_WIDTH - _LEFT - _EDGE) / max(len(columns), 25)
    rows = [_row(name, rounds, columns, step, 8 + place * _ROW) for place, name in enumerate(names)]
    y = 8 + len(rows) * _ROW
    done = [(_LEFT + place * step, kind) for place, column in enumerate(columns) if (kind := _done(column))]
    y += _ROW + 12
    plots = _plots(rounds, columns, step, y)
    y += len(plots) * _PLOT
    trained, spent = sum(one.trained for one in rounds), sum(one.spent for one in rounds)
    later = sum(one.trained for one in rounds[1:]), sum(one.spent for one in rounds[1:])
    facts = [f"{rounds[0].job}, {rounds[0].site}: {_span(rounds)}"]
    if trained:
        first = f"; {percent(later[1] / later[0])} after the first round" if later[0] else ""
        facts.append(f"the guard took {percent(spent / trained)} of the time that the site trained{first}")
    so_far = epsilon_spent(rounds)
    if so_far is not None:
        target = next((one.target for one in reversed(rounds) if one.epsilon is not None), None)
        of = "" if target is None else f" of {target:g}"
        unbounded = "nothing bounds the ε spent: what left wasn't all counted"
        facts.append(unbounded if so_far == math.inf else f"ε {up(so_far)}{of} spent")
    return {
        "headline": headline(rounds),
        "alarmed": any(one.alarms or one.done == "stopped" for one in rounds),
        "facts": "; ".join(facts),
        "rows": rows,
        "done": done,
        "done_y": 8 + len(rows) * _ROW,
        "plots": plots,
        "ticks": [(_LEFT + ((n - 1) // size + 0.5) * step, n) for n in _ticks(len(rounds))],
        "height": y + 18,
        "width": _WIDTH,
        "left": _LEFT,
        "cell": max(2.0, step - 1.5),
        "each": size,
        "plot_height": _PLOT - 22,
        "alarms": _alarms(rounds),
        "alarms_in_all": sum(len(one.alarms) for one in rounds),
        "total": len(rounds),
    }


def _row(name: str, rounds: list[SiteRound], columns: list[list[SiteRound]], step: float, y: int) -> dict[str, Any]:
    """Return a check over all rounds."""
    checks = [one.checks.get(name, CheckRecord(outcome="not played")) for one in rounds]
    outcomes = Counter(check.outcome for check in checks)
    told = [check.text for check in checks if check.text]
    cells = []
    for place, column in enumerate(columns):
        found = {one.checks[name].outcome for one in column if name in one.checks}
        worst = next((outcome for outcome in _WORST if outcome in found), "not played")
        cells.append((_LEFT + place * step, worst.replace(" ", "-")))
    return {
        "name": _NAMES.get(name, name),
        "played": outcomes["quiet"] + outcomes["alarm"],
        "alarms": outcomes["alarm"],
        "unable": outcomes["unable"],
        "last": told[-1] if told else "",
        "cells": cells,
        "y": y,
    }


def _done(column: list[SiteRound]) -> str:
    """Return what became of updates that didn't leave as they were, the worst in a column; empty: all left."""
    found = {one.done for one in column}
    return next((kind for kind in ("stopped", "refused", "not let in", "clipped") if kind in found), "")


def _plots(rounds: list[SiteRound], columns: list[list[SiteRound]], step: float, y: int) -> list[dict[str, Any]]:
    """Return what is known of the membership's slope, and of ε, as plots one below the other."""
    plots = []
    slopes = [(at, one.slope) for at, column in enumerate(columns) for one in column if one.slope is not None]
    if slopes:
        plots.append(_plot("membership slope: AUC, 0.5 tells nothing", slopes, step, y, 1.0, 0.5))
        y += _PLOT
    spent = [(at, one.epsilon) for at, column in enumerate(columns) for one in column if one.epsilon is not None]
    if spent:
        target = next((one.target for one in reversed(rounds) if one.target is not None), None)
        high = max([target or 0.0, *(value for _, value in spent)])
        title = "ε spent" + (", against the budget" if target else "")
        plots.append(_plot(title, spent, step, y, high, target))
    return plots


def _plot(
    title: str, values: Sequence[tuple[int, float]], step: float, y: int, high: float, line: float | None
) -> dict[str, Any]:
    """Return numbers from 0 to ``high`` over rounds, as SVG takes them, and a ``line`` that they are held against."""

    def place(value: float) -> float:
        return round(y + (_PLOT - 22) * (1 - value / high), 1)

    points = " ".join(f"{_LEFT + (at + 0.5) * step:.1f},{place(value)}" for at, value in values)
    held = None if line is None else place(line)
    return {"title": title, "points": points, "y": y, "line": held, "high": f"{high:.3g}"}


def _alarms(rounds: list[SiteRound]) -> list[dict[str, Any]]:
    """Return the last alarms, the last one first."""
    found = [
        {"round": number, "check": _NAMES.get(name, name), "text": one.checks[name].text, "done": done}
        for number, one in enumerate(rounds, 1)
        for name in one.alarms
        for done in ["left nevertheless" if one.done == "left" else one.done]
    ]
    return found[::-1][:_ALARMS]


def _ticks(total: int) -> list[int]:
    every = max(1, 10 ** math.floor(math.log10(max(total, 1))) // (1 if total < 20 else 2))
    every = 1 if total <= 10 else max(every, math.ceil(total / 20))
    return sorted({1, *range(every, total + 1, every)})


def _span(rounds: list[SiteRound]) -> str:
    first, last = _when(rounds[0]), _when(rounds[-1])
    return f"{first} UTC" if first == last else f"{first} to {last} UTC"


def epsilon_spent(rounds: Sequence[SiteRound]) -> float | None:
    """Return the ε of all that left, infinite where some of it wasn't counted; None: nothing is accounted for."""
    costs = [one.epsilon for one in rounds if one.done in LEFT]
    known = [cost for cost in costs if cost is not None]
    return None if not known else known[-1] if len(known) == len(costs) else math.inf


def _when(one: SiteRound) -> str:
    return one.time.astimezone(UTC).strftime("%Y-%m-%d %H:%M")


# --- for programs ---------------------------------------------------------------------------------------------------


def metrics(rounds: Sequence[SiteRound]) -> str:
    """Return OpenMetrics text: https://github.com/prometheus/OpenMetrics/blob/main/specification/OpenMetrics.md."""
    parts = in_parts(rounds)

    def lines() -> Iterator[str]:
        yield from _family("rounds", "counter", "Rounds of the site, by what became of the update.")
        for part in parts:
            for done, number in sorted(Counter(one.done for one in part).items()):
                yield _sample("rounds_total", part[0], number, done=done)
        yield from _family("checks", "counter", "Checks of the guard, by name and outcome.")
        for part in parts:
            outcomes = Counter((name, check.outcome) for one in part for name, check in one.checks.items())
            for (name, outcome), number in sorted(outcomes.items()):
                yield _sample("checks_total", part[0], number, check=name, outcome=outcome)
        yield from _family("training_seconds", "counter", "Time that the site trained.", unit="seconds")
        yield from (_sample("training_seconds_total", p[0], sum(one.trained for one in p)) for p in parts)
        yield from _family("taken_seconds", "counter", "Time that the guard took.", unit="seconds")
        yield from (_sample("taken_seconds_total", p[0], sum(one.spent for one in p)) for p in parts)
        yield from _family("last_round_timestamp_seconds", "gauge", "When the last round was.", unit="seconds")
        for part in parts:
            yield _sample("last_round_timestamp_seconds", part[0], part[-1].time.timestamp())
        yield from _family("epsilon", "gauge", "Epsilon that the site's updates of the job have cost.")
        yield from _last("epsilon", [(p[0], [epsilon_spent(p)]) for p in parts])
        yield from _family("target_epsilon", "gauge", "Epsilon that they must not exceed.")
        yield from _last("target_epsilon", [(p[0], [one.target for one in p]) for p in parts])
        yield "# EOF"

    return "".join(f"{line}\n" for line in lines())


def _last(name: str, values: Sequence[tuple[SiteRound, list[float | None]]]) -> Iterator[str]:
    for one, found in values:
        known = [value for value in found if value is not None]
        if known:
            yield _sample(name, one, known[-1])


def _family(name: str, kind: str, text: str, unit: str | None = None) -> Iterator[str]:
    yield f"# TYPE fedaudit_guard_{name} {kind}"
    if unit:
        yield f"# UNIT fedaudit_guard_{name} {unit}"
    yield f"# HELP fedaudit_guard_{name} {text}"


def _sample(name: str, one: SiteRound, value: float, **labels: str) -> str:
    named = {"job": one.job, "site": one.site, **labels}
    told = ",".join(f'{key}="{_escaped(text)}"' for key, text in named.items())
    return f"fedaudit_guard_{name}{{{told}}} {'+Inf' if value == math.inf else format(value, '.10g')}"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
