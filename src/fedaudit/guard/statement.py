"""What a guard's log says for a statement: which updates left, what was checked, what ε they cost."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from fedaudit.guard.page import epsilon_spent
from fedaudit.guard.rounds import FILE, LEFT, SiteRound, in_parts, read_rounds
from fedaudit.report.statement import Guarded, Limit, Part, Privacy, Source, up
from fedaudit.report.wording import count, noun
from fedaudit.utils.bounds import SITE, opened
from fedaudit.utils.errors import BadInput


def guarded(path: Path, size: int | None = None) -> Part:
    """Return what the log in a guard's folder says, of each job and site; its file; and what its limits came to.

    Args:
        path: the folder, or ``guard.jsonl`` in it.
        size: bytes of the log that count, for it grows; None: all.

    Raises:
        BadInput: nothing is written there, or it is shorter than ``size``.
    """
    folder, data = path if path.is_dir() else path.parent, _read(path)
    if size is not None and len(data) < size:
        raise BadInput(f"'{folder / FILE}' has {len(data):,} bytes, and had {size:,}: something was taken away")
    data = data[:size]
    written = read_rounds(data)
    if not written.rounds:
        raise BadInput(f"'{folder / FILE}' holds no round that can be read")
    parts = [_part(rounds) for rounds in in_parts(written.rounds)]
    limits = [limit for part in parts for limit in _limits(part)]
    if written.torn:
        text = f"NOT TESTED: {written.torn} {noun(written.torn, 'lines')} of the log can't be read, and may be updates"
        limits.append(Limit(source=folder.resolve().name, outcome="not tested", text=text))
    source = Source(kind="guard", name=folder.resolve().name, sha256=hashlib.sha256(data).hexdigest(), bytes=len(data))
    return parts, source, limits


def covered(path: Path, known: Sequence[Source]) -> int | None:
    """Return how many bytes of a log one of the ``known`` logs had; where it is none of them, that of its name."""
    data, name = _read(path), (path if path.is_dir() else path.parent).resolve().name
    begins = [one.bytes for one in known if hashlib.sha256(data[: one.bytes]).hexdigest() == one.sha256]
    return max(begins) if begins else next((one.bytes for one in known if one.name == name), None)


def _read(path: Path) -> bytes:
    folder = path if path.is_dir() else path.parent
    try:
        with opened(folder / FILE, SITE) as file:
            return bytes(file.read(SITE.file))
    except FileNotFoundError:
        raise BadInput(f"there is no guard's log in '{path}': no {FILE}") from None


def _part(rounds: list[SiteRound]) -> Guarded:
    first = rounds[0]
    left = [one for one in rounds if one.done in LEFT]
    outcomes = Counter((name, check.outcome) for one in rounds for name, check in one.checks.items())
    checks = {}
    for name in dict.fromkeys(name for one in rounds for name in one.checks):
        alarms = outcomes[name, "alarm"]
        told = f"played in {count(outcomes[name, 'quiet'] + alarms)}, {alarms} {noun(alarms, 'alarms')}"
        unable = outcomes[name, "unable"]
        checks[name] = told + (f", unable in {unable}" if unable else "")
    return Guarded(
        job=first.job,
        site=first.site,
        first=first.time.isoformat(),
        last=rounds[-1].time.isoformat(),
        rounds=len(rounds),
        sent=len(left),
        held=len(rounds) - len(left),
        checked=sum(_checked(one) for one in left),
        alarmed=sum(bool(one.alarms) for one in left),
        checks=checks,
        privacy=_privacy(rounds),
    )


def _checked(one: SiteRound) -> bool:
    """Return whether a check was played on the update itself."""
    return any(check.outcome in ("quiet", "alarm") for name, check in one.checks.items() if name != "received")


def _privacy(rounds: list[SiteRound]) -> Privacy | None:
    cost = epsilon_spent(rounds)
    if cost is not None:  # a log that begins its count anew has spent what it had spent
        cost = max([cost, *(one.epsilon for one in rounds if one.done in LEFT and one.epsilon is not None)])
    target = min((one.target for one in rounds if one.target is not None), default=None)
    whose = f"{rounds[0].site}, {rounds[0].job}"
    if cost is None and target is None:
        return None
    of = "" if target is None else f" of {target:g}"
    if cost is None:  # nothing has left
        cost = 0.0
    if cost == math.inf:
        return Privacy(
            whose=whose, target=target, text=f"nothing bounds the ε spent{of}: not all that left was counted"
        )
    left = None if target is None else max(0.0, target - cost)
    remaining = "" if left is None else f", {math.floor(left * 100) / 100:.2f} left"
    return Privacy(whose=whose, spent=cost, target=target, left=left, text=f"ε {up(cost)}{of} spent{remaining}")


def _limits(part: Guarded) -> list[Limit]:
    source = f"{part.site}, {part.job}"
    if part.alarmed:
        told = Limit(
            source=source,
            outcome="fail",
            text=f"FAIL: no alarm on what leaves: {part.alarmed} of {part.sent} updates left after one",
        )
    elif part.checked < part.sent:
        told = Limit(
            source=source,
            outcome="not tested",
            text=f"NOT TESTED: no alarm on what leaves: {part.checked} of {part.sent} updates were checked",
        )
    else:
        text = f"PASS: no alarm on what leaves: {part.checked} of {part.sent} updates were checked"
        told = Limit(source=source, outcome="pass", text=text)
    limits = [told]
    if part.privacy and part.privacy.target is not None:
        cost, target = part.privacy.spent, part.privacy.target
        kept = cost is not None and cost <= target
        word = "PASS" if kept else "NOT TESTED" if cost is None else "FAIL"
        limits.append(
            Limit(
                source=source,
                outcome="pass" if kept else "not tested" if cost is None else "fail",
                text=f"{word}: ε at most {target:g}: {part.privacy.text}",
            )
        )
    return limits
