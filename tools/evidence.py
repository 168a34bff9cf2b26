"""Writes docs/evidence/claims.md from claims.yaml beside it and the results: python -m tools.evidence [--check]."""

from __future__ import annotations

import csv
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from scipy.stats import t

from fedaudit.results import Interval
from fedaudit_lab.studies.analysis import decide

DOCS = Path(__file__).parents[1] / "docs"
RESULTS = Path(__file__).parents[1] / "lab" / "docs" / "results"
PAGE = DOCS / "evidence" / "claims.md"
LEVEL = 0.05
_DIGITS = {"psnr": 1, "mse": 4, "cpu_seconds": 0}
_PUBLISHED = "paper"  # the scale of the published setting: where there is a result of it, it decides
_OUTCOMES = (
    "holds",
    "smaller than published",
    "smaller than published, or none",
    "contradicted here",
    "undecided",
    "mixed",
    "void",
    "not measured",
)
_OPEN = ("smaller than published, or none", "undecided", "mixed", "void", "not measured")
_HEAD = """# Evidence

What the four papers claim, and what came out here. Made by `python -m tools.evidence` from
[claims.yaml](claims.yaml) and [results](../../lab/docs/results/README.md); each study's own page has the setting, how
it departs from the paper's, and pictures.

*Ours* is the paired difference between the two sides of the claim, in favour of the claim, with Student's 95 %
interval. n counts what is independent: seeds, each with a network and a draw of the data, over whose updates the
differences are averaged first. Where the single values weren't kept, the row says of how many seeds its updates are;
its interval is too narrow. One rule gives every outcome, for and against the papers:

| outcome | when |
|---|---|
| **holds** | the interval lies above zero, and does not lie below the published difference |
| **smaller than published** | it lies above zero and below the published difference: the sign is there |
| **smaller than published, or none** | it holds zero, and lies below the published difference: that size isn't here |
| **contradicted here** | it lies below zero |
| **undecided** | it holds zero, and the published difference, where the paper prints one; or there is one seed |
| **mixed** | at several places, not the same at all |
| **void** | a control failed, so that nothing is decided, for or against; which one is said |
| **not measured** | with the hours that it takes on two cores |

A difference larger than the published one *holds*. A claim of "no worse" or "as good" is tested against its band: it
*holds* where the interval lies within, is *contradicted here* where it lies beyond, and is *undecided* otherwise. Where
a paper states no band, zero is the band: then a loss contradicts it, and only a gain could confirm it. Where the
published setting was measured (the scale `paper`), it decides, not a smaller one. Another setting is named in the row
and bars no outcome: *contradicted here* says what came out in that setting.
"""


@dataclass(frozen=True)
class Row:
    """A claim's comparison at one place.

    Attributes:
        claim: of claims.yaml.
        ours: the difference in favour of the claim.
        metric: that is compared.
        where: the place, in words.
        updates: of how many updates the difference is.
        seeds: of the result.
        link: to the result's page.
        setting: the study and its scale.
    """

    claim: dict[str, Any]
    ours: Interval
    metric: str
    where: str
    updates: int
    seeds: int
    link: str
    setting: str

    @property
    def independent(self) -> bool:
        """Whether n counts seeds."""
        return self.ours.n <= self.seeds

    @property
    def p_value(self) -> float:
        """Two-sided, by Student's t, of the difference from zero, or from the nearer edge of the band.

        One where n doesn't count what is independent; where all differences are alike, that of the sign test.
        """
        mean, n = self.ours.mean, self.ours.n
        band = self.claim.get("band", 0)
        beyond = abs(abs(mean) - band if self.claim.get("alike") else mean + band)
        if n < 2 or not self.independent:
            return 1.0
        if self.ours.high == self.ours.low:
            return 2 * 0.5**n if beyond else 1.0
        error = (self.ours.high - self.ours.low) / 2 / t.ppf(0.975, n - 1)
        return float(2 * t.sf(beyond / error, n - 1))


def main() -> None:
    """Write the page; with ``--check``, end with 1 where it isn't what it would be."""
    text = page()
    if "--check" in sys.argv:
        sys.exit(text != PAGE.read_text(encoding="utf-8"))
    PAGE.write_text(text, encoding="utf-8")


def page() -> str:
    """Return the page."""
    papers = yaml.safe_load((DOCS / "evidence" / "claims.yaml").read_text(encoding="utf-8"))
    results = compared()
    found = {id(claim): rows(claim, results) for paper in papers for claim in paper["claims"]}
    every = [row for some in found.values() for row in some]
    sure = {id(row) for row, survives in zip(every, holm([row.p_value for row in every]), strict=True) if survives}
    tables, outcomes, hours = [], Counter[str](), 0.0
    for paper in papers:
        lines = [f"## {paper['paper']}", "", "| where | claim | theirs | ours | setting | outcome |", "|" + "---|" * 6]
        for claim in paper["claims"]:
            there = found[id(claim)]
            told = [outcome(claim, row.ours) + (" \\*" if _starred(row, sure) else "") for row in there]
            outcomes[counted := summary(claim, there)] += 1
            hours += claim.get("hours", 0) if counted in _OPEN else 0
            settings = [s for row in there if (s := paper.get("settings", {}).get(row.setting))]
            cells = [claim["place"], claim["claim"], claim.get("theirs", "–"), _ours(claim, there)]
            cells += [_alike(settings) or "–", _alike([f"**{o}**" for o in told or [outcome(claim, None)]])]
            lines.append("| " + " | ".join(cells) + " |")
        tables += [*lines, ""]
    counts = ", ".join(f"{outcomes[o]} {o.replace(', ', ' ')}" for o in _OUTCOMES if outcomes[o])
    survivors = sum(_starred(row, sure) for row in every)
    counts = ", ".join(f"{outcomes[o]} *{o}*" for o in _OUTCOMES if outcomes[o])
    told = [
        f"{outcomes.total()} claims: {counts}.",
        f"What is open takes about {hours:.0f} hours on two cores; data that aren't to be had here are named.",
        "",
        f"The page makes {len(every)} comparisons at {100 * LEVEL:g} % each: if nothing were there,",
        f"{LEVEL * len(every):.0f} would differ from zero by luck. {survivors} decided ones, marked \\*, survive",
        "Holm's correction over all of them (of the difference from zero, or from the nearer edge of the band). Those",
        "whose n doesn't count what is independent can't.",
        "",
    ]
    return "\n".join([_HEAD, *told, *tables]).rstrip() + "\n"


def compared() -> list[tuple[dict[str, str], str, int]]:
    """Return what the results say of their studies' claims, each with the result's folder and its number of seeds."""
    found = []
    for file in sorted(RESULTS.glob("*/claims.csv")):
        with file.open(encoding="utf-8") as opened, (file.parent / "result.csv").open(encoding="utf-8") as cells:
            seeds = max(int(cell["seeds"] or 0) for cell in csv.DictReader(cells))
            found += [(row, file.parent.name, seeds) for row in csv.DictReader(opened) if row["n"]]
    return found


def rows(claim: dict[str, Any], results: Sequence[tuple[dict[str, str], str, int]]) -> list[Row]:
    """Return the claim's comparisons, wherever its study makes them."""
    mine = [
        result
        for result in results
        if result[0]["study"] == claim.get("study")
        and result[0]["claim"] == claim.get("says")
        and claim.get("at") in (None, result[0]["where"])
    ]
    published = {row["where"] for row, *_ in mine if row["scale"] == _PUBLISHED}
    mine = [result for result in mine if result[0]["scale"] == _PUBLISHED or result[0]["where"] not in published]
    return [_row(claim, *result) for result in mine]


def _row(claim: dict[str, Any], row: dict[str, str], folder: str, seeds: int) -> Row:
    mean, low, high = (float(row[name]) for name in ("difference", "low", "high"))
    if claim.get("against"):
        mean, low, high = -mean, -high, -low
    ours = Interval(mean=mean, median=mean, low=low, high=high, n=int(row["n"]))
    link = f"[{row['study']}](../../lab/docs/results/{folder}/result.md)"
    setting = f"{row['study']} {row['scale']}"
    return Row(claim, ours, row["metric"], row["where"], int(row["updates"]), seeds, link, setting)


def outcome(claim: dict[str, Any], ours: Interval | None) -> str:
    """Return a claim's outcome; no word of the claim changes it but ``void``, which leaves none."""
    if ours is None:
        return "not measured"
    if claim.get("void"):
        return f"void: {claim['void']}"
    return decide(
        ours,
        published=claim.get("published"),
        margin=claim.get("band", 0.0),
        either_way=claim.get("alike", False),
    )


def summary(claim: dict[str, Any], there: Sequence[Row]) -> str:
    """Return the one outcome under which a claim is counted."""
    found = {outcome(claim, row.ours).partition(":")[0] for row in there} or {"not measured"}
    return found.pop() if len(found) == 1 else "mixed"


def holm(p_values: Sequence[float]) -> list[bool]:
    """Return which of the p-values survive Holm's correction (1979): step down until the first that doesn't."""
    survives = [False] * len(p_values)
    for rank, i in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        if p_values[i] > LEVEL / (len(p_values) - rank):
            break
        survives[i] = True
    return survives


def _starred(row: Row, sure: set[int]) -> bool:
    return id(row) in sure and outcome(row.claim, row.ours) in ("holds", "smaller than published", "contradicted here")


def _ours(claim: dict[str, Any], there: Sequence[Row]) -> str:
    """Return what was measured, at every place; what it takes where nothing was; and the claim's note."""
    told = [_measured(row) for row in there]
    if not there:
        command = f"`fedaudit study run {claim['study']}`" if claim.get("study") else ""
        hours = f"about {claim['hours']:g} h" if claim.get("hours") else ""
        told = ["; ".join(filter(None, (command, claim.get("note"), hours))) or "–"]
    return "<br>".join(told) + (f"; {claim['note']}" if there and claim.get("note") else "")


def _measured(row: Row) -> str:
    digits = _DIGITS.get(row.metric, 3)
    band, published = row.claim.get("band"), row.claim.get("published")
    text = f"{row.where}: " if row.where else ""
    text += f"{row.metric.replace('_', ' ')} {row.ours.mean:+.{digits}f}{row.ours.span(f'{{:+.{digits}f}}'.format)}"
    text += f" against {published:+.{digits}f}" if published is not None else ""
    text += f", band {'±' if row.claim.get('alike') else '−'}{band:g}" if band else ""
    text += f", n={row.ours.n}"
    if not row.independent:
        text += f" updates of {row.seeds} seeds: not independent"
    elif row.updates > row.ours.n:
        text += f" ({row.updates} updates)"
    return f"{text} ({row.link})"


def _alike(texts: Sequence[str]) -> str:
    """Return the texts, or one alone where all are alike."""
    return "<br>".join(texts if len(set(texts)) > 1 else texts[:1])


if __name__ == "__main__":
    main()
