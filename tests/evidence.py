"""Writes docs/evidence/claims.md from claims.yaml beside it and the results: python -m tests.evidence [--check]."""

from __future__ import annotations

import csv
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import yaml

DOCS = Path(__file__).parents[1] / "docs"
PAGE = DOCS / "evidence" / "claims.md"
_TURNED = {"holds": "doesn't hold", "doesn't hold": "holds"}  # where the study's claim is the contrary of the paper's
_DIGITS = {"psnr": 1, "mse": 4}
_PUBLISHED = "paper"  # the scale of the published setting: where there is a result of it, it decides


# of a claim that is compared at several places the first that occurs
_OUTCOMES = ("doesn't hold", "holds", "undecided", "not measured")


def main() -> None:
    """Write the page; with ``--check``, end with 1 where it isn't what it would be."""
    text = page()
    if "--check" in sys.argv:
        sys.exit(text != PAGE.read_text(encoding="utf-8"))
    PAGE.write_text(text, encoding="utf-8")


def page() -> str:
    """Return the page."""
    papers = yaml.safe_load((DOCS / "evidence" / "claims.yaml").read_text(encoding="utf-8"))
    tables, outcomes, hours = [], Counter[str](), 0.0
    for paper in papers:
        lines = [f"## {paper['paper']}", "", "| where | claim | theirs | ours | outcome |", "|---|---|---|---|---|"]
        for claim in paper["claims"]:
            rows = list(_rows(claim))
            found = {outcome.partition(":")[0] for _, outcome in rows}
            outcomes[next(outcome for outcome in _OUTCOMES if outcome in found)] += 1
            hours += 0 if claim.get("says") and any(o in ("holds", "doesn't hold") for _, o in rows) else _hours(claim)
            cells = claim["place"], claim["claim"], claim.get("theirs", "–"), *_joined(rows)
            lines.append("| " + " | ".join(cells) + " |")
        tables += [*lines, ""]
    decided = outcomes["holds"] + outcomes["doesn't hold"]
    counts = ", ".join(f"{outcomes[o]} {o}" for o in ("holds", "doesn't hold", "undecided", "not measured"))
    several = "where a claim is compared at several places, at one of them at least"
    head = [
        "# Evidence",
        "",
        "What the four papers claim, and what came out here. Made by `python -m tests.evidence` from",
        "[claims.yaml](claims.yaml) and [results](../results/README.md); each study's own page has the setting, how it",
        "departs from the paper's, and pictures.",
        "",
        "*Ours* is the paired difference between the two sides of the claim, with Student's 95 % interval; n counts",
        "updates, or federations where accuracy is compared. Where the published setting was measured (the scale",
        "`paper`), it decides, not a smaller one. *Undecided*: the interval holds zero. *Not measured*: not since",
        "examples are drawn by the seed and federations are trained; the results before are",
        "[withdrawn](../results/README.md#withdrawn).",
        "",
        f"{decided} of {outcomes.total()} claims are decided ({several}): {counts}.",
        f"What isn't decided takes about {hours:.0f} hours on two cores.",
        "",
    ]
    return "\n".join([*head, *tables]).rstrip() + "\n"


def _hours(claim: dict[str, Any]) -> float:
    return float(claim.get("hours", 0))


def _joined(rows: list[tuple[str, str]]) -> Iterator[str]:
    """Yield what was measured, and the outcomes: one alone where all are alike."""
    yield "<br>".join(ours for ours, _ in rows)
    found = [outcome for _, outcome in rows]
    yield f"**{found[0]}**" if len(set(found)) == 1 else "<br>".join(f"**{o}**" for o in found)


def _rows(claim: dict[str, Any]) -> Iterable[tuple[str, str]]:
    """Return what was measured and the outcome, wherever the study decides the claim."""
    if not claim.get("says"):
        return [("no study compares it", "not measured")]
    rows = [
        (row, folder)
        for row, folder in _compared()
        if row["study"] == claim["study"] and row["claim"] == claim["says"] and claim.get("at") in (None, row["where"])
    ]
    published = {row["where"] for row, _ in rows if row["scale"] == _PUBLISHED}
    rows = [(row, folder) for row, folder in rows if row["scale"] == _PUBLISHED or row["where"] not in published]
    if not rows:
        took = f", about {_hours(claim):g} hours" if _hours(claim) else ""
        return [(f"`fedaudit study run {claim['study']}`{took}", "not measured")]
    return [(_measured(row, folder), _outcome(row, claim)) for row, folder in rows]


def _compared() -> list[tuple[dict[str, str], str]]:
    """Return what the results say of their studies' claims, each with the result's folder; a study may have several."""
    found = []
    for file in sorted((DOCS / "results").glob("*/claims.csv")):
        with file.open(encoding="utf-8") as opened:
            found += [(row, file.parent.name) for row in csv.DictReader(opened) if row["n"]]
    return found


def _measured(row: dict[str, str], folder: str) -> str:
    digits = _DIGITS.get(row["metric"], 3)
    mean, low, high = (f"{float(row[name]):+.{digits}f}" for name in ("difference", "low", "high"))
    where = f"{row['where']}: " if row["where"] else ""
    span = f" [{low}, {high}]" if int(row["n"]) > 1 else ""
    page = f"[{row['study']}](../results/{folder}/result.md)"
    return f"{where}{row['metric'].replace('_', ' ')} {mean}{span}, n={row['n']} ({page})"


def _outcome(row: dict[str, str], claim: dict[str, Any]) -> str:
    """Return the claim's outcome; another setting contradicts no paper, and a failed control confirms none."""
    if claim.get("void"):
        return f"undecided: {claim['void']}"
    outcome = _TURNED.get(row["outcome"], row["outcome"]) if claim.get("against") else row["outcome"]
    return f"undecided: {claim['but']}" if outcome == "doesn't hold" and claim.get("but") else outcome


if __name__ == "__main__":
    main()
