"""When to test again: changes that an audit doesn't cover, and dates by age, by pace and by what is left of ε."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from datetime import UTC, date, datetime, timedelta
from typing import Literal

from pydantic import Field

from fedaudit.report.wording import count, defences_of, noun
from fedaudit.results import AuditResult, TestAgain
from fedaudit.results.record import Record

Why = Literal["given", "age", "rounds", "epsilon"]
MOST_DAYS = 36_500  # of a limit of age, and how far ahead a pace is followed


class Again(Record):
    """A day by which to test again."""

    why: Why = Field(description="as it was given, a limit of age, rounds that aren't covered, or ε that is spent")
    by: date = Field(description="ISO 8601; of a pace it is an estimate")
    text: str = Field(description="why then, in a line")


def changes(result: AuditResult) -> list[TestAgain]:
    """Return of each federation in use the numbers which, if they change, ask for another audit."""
    return [
        TestAgain(
            federation=one.name,
            more_rounds_than=one.rounds,
            other_clients_than=one.clients,
            other_model_than=result.model.name,
            other_parameters_than=result.model.parameters,
            without=defences_of(one),
        )
        for one in result.federations
        if one.name in result.in_use()
    ]


def day_of(started: str | None) -> date | None:
    """Return the day of an ISO 8601 time, in UTC; None: there is none."""
    try:
        moment = datetime.fromisoformat(started or "")
        return (moment.astimezone(UTC) if moment.tzinfo else moment).date()
    except (ValueError, OverflowError):
        return None


def by_age(name: str, started: date, days: int) -> Again:
    """Return the last day on which an audit isn't older than so many days."""
    by = date.fromordinal(min(started.toordinal() + days, date.max.toordinal()))
    return Again(why="age", by=by, text=f"{name} is {count(days)} {noun(days, 'days')} old")


def by_pace(
    whose: str, first: str, last: str, sent: int, rounds: int | None, epsilon: tuple[float, float] | None
) -> Iterator[Again]:
    """Yield when a site that goes on at its pace sends more than was audited, and when its ε is spent.

    Args:
        whose: site and job.
        first, last: times of its first round and its last, ISO 8601.
        sent: updates that left, of which two have a pace.
        rounds: that were audited; None: not known.
        epsilon: spent, and left; None: there is no target.
    """
    begin, end = datetime.fromisoformat(first), datetime.fromisoformat(last)
    if sent < 2 or end <= begin:
        return
    each = (end - begin) / (sent - 1)
    if rounds is not None:
        more = rounds + 1 - sent
        sends = "sent" if more <= 0 else "sends"
        text = f"{whose} {sends} its update number {count(rounds + 1)}"
        text += f"{'' if more <= 0 else f', at its pace until {end.date()}'}, and {count(rounds)} "
        yield from _in(end, each, more, "rounds", f"{text}{noun(rounds, 'rounds')} were audited")
    if epsilon is not None and epsilon[0] > 0:
        more = math.floor(min(epsilon[1] / (epsilon[0] / sent), 1e18))
        yield from _in(end, each, more, "epsilon", f"{whose} has spent its ε, at its pace until {end.date()}")


def _in(end: datetime, each: timedelta, more: int, why: Why, text: str) -> Iterator[Again]:
    days = each.total_seconds() * more / 86_400
    if abs(days) > MOST_DAYS:
        return
    try:
        by = (end + timedelta(days=days)).astimezone(UTC).date()
    except OverflowError:  # beyond the calendar
        return
    yield Again(why=why, by=by, text=text)


def soonest(found: Sequence[Again]) -> list[Again]:
    """Return them, the first day first."""
    return sorted(found, key=lambda one: (one.by, one.why, one.text))
