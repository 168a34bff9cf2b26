"""From a study's rows to its table: cells with intervals, the paper's numbers beside them, a word on every claim."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from fedaudit import BadInput
from fedaudit.evaluation import Interval, interval, paired_interval
from fedaudit_lab.studies.spec import IMAGE_METRICS, OF_FEDERATIONS, ClaimSpec, Point, StudySpec, check_point, measure
from fedaudit_lab.studies.store import Row

_RESAMPLES = 2000

Outcome = Literal[
    "holds",
    "smaller than published",
    "smaller than published, or none",
    "contradicted here",
    "undecided",
    "not measured",
]
# (repetition, federation, round, client): what one run of the attack received, independent of the others
Unit = tuple[int, str, int | None, int | None]


@dataclass(frozen=True)
class Cell:
    """One combination of levels.

    Attributes:
        value: of the metric over updates (images of one update averaged), or None where there is none.
        images: how many; ``different`` of them differ, None where the rows don't tell (of an older version).
        seeds: repetitions, each with a network and a draw of the data of its own.
        units: what the intervals are of: the metrics of every update, or federation.
        missing: why there is no value, or why some trials are missing.
    """

    point: Point
    value: Interval | None
    images: int
    published: float | None
    missing: str | None
    seconds: float | None
    others: dict[str, Interval]
    others_published: dict[str, float] = field(default_factory=dict)
    different: int | None = None
    seeds: int = 0
    units: dict[Unit, dict[str, float]] = field(default_factory=dict)


@dataclass(frozen=True)
class Claim:
    """What became of a claim at one combination of the axes that it leaves open.

    Attributes:
        where: the combination, in words; empty where nothing is left open.
        difference: better minus worse, paired over updates, then averaged by repetition: n counts these, for updates of
            the same network and draw aren't independent.
        updates: how many pairs the difference is of.
        published: the same difference of the paper's numbers, where it has both.
    """

    text: str
    where: str
    difference: Interval | None
    outcome: Outcome
    metric: str
    updates: int = 0
    published: float | None = None


@dataclass(frozen=True)
class Analysis:
    """What a study says.

    Attributes:
        failures: label and reason of each failed trial.
        old: which trials were kept from another version of code, torch, data or device: combination, repetitions.
    """

    study: StudySpec
    scale: str
    cells: list[Cell]
    claims: list[Claim]
    done: int
    failed: int
    pending: int
    failures: list[tuple[str, str]]
    old: dict[str, list[int]] = field(default_factory=dict)
    overrides: Sequence[str] = ()

    @property
    def mixture(self) -> str:
        """Which trials are old, in a sentence; empty where none is."""
        if not self.old:
            return ""
        which = "; ".join(f"{name} {' '.join(f'#{i}' for i in rows)}".strip() for name, rows in self.old.items())
        return (
            f"{sum(map(len, self.old.values()))} of the {self.done} trials are of another or an unknown version of "
            f"fedaudit, torch, data or device: {which}."
        )


def analyse(study: StudySpec, scale: str, rows: Sequence[Row], overrides: Sequence[str] = ()) -> Analysis:
    """Return cells, claims and failures of ``rows``; ``overrides``, what ``--set`` changed, must be the study's."""
    points = list({tuple(sorted(row.point.items())): row.point for row in rows}.values())
    claims = [] if scale == "smoke" else study.claims  # which shows that a study runs, and nothing else
    try:
        for point in points:
            check_point(point, study.axes)
            if point.keys() != study.axes.keys():
                raise ValueError(f"a trial has the axes {', '.join(point)}")
    except ValueError as error:
        raise BadInput(f"the store's trials are none of the study {study.name}: {error}") from None
    order = {axis: list(levels) for axis, levels in study.axes.items()}
    points.sort(key=lambda point: [order[axis].index(point[axis]) for axis in order])
    return Analysis(
        study=study,
        scale=scale,
        cells=[_cell(study, point, [r for r in rows if r.point == point], scale) for point in points],
        claims=[c for claim in claims for c in _claim(study, claim, rows)],
        done=sum(row.status == "done" for row in rows),
        failed=sum(row.status == "failed" for row in rows),
        pending=sum(row.status == "pending" for row in rows),
        failures=[(row.label, row.error or "") for row in rows if row.status == "failed"],
        old=_by_combination([row for row in rows if row.old]),
        overrides=tuple(overrides),
    )


def _by_combination(rows: Sequence[Row]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for row in rows:
        found.setdefault(", ".join(f"{axis} {level}" for axis, level in row.point.items()), []).append(row.repetition)
    return found


def values(metric: str, rows: Sequence[Row]) -> dict[Unit, float]:
    """Return ``metric`` of every update: of images the mean over them, of other findings their own.

    What belongs to a federation is that of those that aren't attacked but only train, if there are such.
    """
    found: dict[Unit, float] = {}
    for row in rows:
        if key := OF_FEDERATIONS.get(metric):
            histories = (row.outcome or {}).get("courses", [])
            for history in [h for h in histories if not h["attacked"]] or histories:
                if history.get(key) is not None:
                    found[row.repetition, history["federation"], -1, -1] = history[key]
            continue
        for update in (row.outcome or {}).get("updates", []):
            numbers = [image[metric] for image in update["images"] if image.get(metric) is not None]
            numbers += [value for name, value in update.get("metrics", {}).items() if name == metric]
            if numbers:
                unit = (row.repetition, update["federation"], update["round"], update["client"])
                found[unit] = sum(numbers) / len(numbers)
    return found


def _cell(study: StudySpec, point: Point, rows: Sequence[Row], scale: str) -> Cell:
    measured = {name: values(name, rows) for name in (study.metric, *study.also)}
    numbers = list(measured[study.metric].values())
    updates = [u for row in rows for u in (row.outcome or {}).get("updates", [])]
    reasons = [u["reason"] for u in updates if u["reason"]]
    failed = sum(row.status == "failed" for row in rows)
    missing = reasons[0] if reasons else f"{failed} of {len(rows)} trials failed" if failed else None
    hardly = sum(_hardly_trained(row) for row in rows)
    if not missing and hardly:
        missing = f"no evidence: hardly trained in {hardly} of {len(rows)} trials"
    if not missing and updates and not numbers:
        missing = f"{study.metric} isn't available here"
    seconds = [u["seconds"] for u in updates if u["seconds"] is not None]
    victims = [image.get("victim") for u in updates for image in u["images"]]
    there = [p for p in study.published if _at(point, p.at) and scale != "smoke"]
    published = [p.value for p in there if p.metric in (None, study.metric)]
    return Cell(
        point=point,
        value=_interval(study.metric, numbers, study.seed) if numbers else None,
        images=0 if study.metric in OF_FEDERATIONS else sum(len(u["images"]) for u in updates),
        published=published[0] if published else None,
        missing=missing,
        seconds=sum(seconds) / len(seconds) if seconds else None,
        others={
            name: _interval(name, found, study.seed) for name in study.also if (found := list(measured[name].values()))
        },
        others_published={p.metric: p.value for p in there if p.metric and p.metric in study.also},
        different=len(set(victims)) if victims and all(victims) else None,
        seeds=len({row.repetition for row in rows if row.outcome}),
        units={
            unit: {name: found[unit] for name, found in measured.items() if unit in found}
            for unit in dict.fromkeys(unit for found in measured.values() for unit in found)
        },
    )


def _claim(study: StudySpec, claim: ClaimSpec, rows: Sequence[Row]) -> list[Claim]:
    """Decide a claim at every combination of the axes that neither side fixes, as far as it was run."""
    text, better, worse = claim.text, claim.better, claim.worse
    name = claim.metric or study.metric
    metric = measure(name)
    sign = 1 if (metric.higher_is_better if metric else IMAGE_METRICS[name]) else -1
    points = [side for side in (better, worse) if isinstance(side, dict)]
    open_axes = [axis for axis in study.axes if all(axis not in point for point in points)]
    if name not in OF_FEDERATIONS:  # these may be about how well it was trained
        rows = [row for row in rows if not _hardly_trained(row)]
    claims = []
    for levels in itertools.product(*(study.axes[axis] for axis in open_axes)):
        fixed = dict(zip(open_axes, levels, strict=True))
        there = [values(name, [r for r in rows if _at(r.point, fixed | point)]) for point in points]
        sides = [
            there[points.index(side)] if isinstance(side, dict) else dict.fromkeys(there[0], side)
            for side in (better, worse)
        ]
        if not sides[0].keys() & sides[1].keys():  # one update on one side, several together on the other
            sides = [_by_repetition(side) for side in sides]
        shared = [unit for unit in sides[0] if unit in sides[1]]
        where = ", ".join(f"{axis} {level}" for axis, level in fixed.items())
        if not shared:
            if any(_at(r.point, fixed) for r in rows):
                claims.append(Claim(text, where, None, "not measured", name))
            continue
        by_repetition: dict[int, list[float]] = {}
        for unit in shared:
            by_repetition.setdefault(unit[0], []).append(sign * (sides[0][unit] - sides[1][unit]))
        difference = paired_interval([sum(found) / len(found) for found in by_repetition.values()])
        theirs = [value for point in points if (value := _published(study, name, fixed | point)) is not None]
        effect = sign * (theirs[0] - theirs[1]) if len(theirs) == 2 else None
        outcome = decide(difference, published=effect, margin=claim.margin, either_way=claim.either_way)
        claims.append(Claim(text, where, difference, outcome, name, len(shared), effect))
    return claims


def _published(study: StudySpec, metric: str, point: Point) -> float | None:
    """Return the paper's number at ``point``, or None."""
    there = [p.value for p in study.published if _at(point, p.at) and (p.metric or study.metric) == metric]
    return there[0] if there else None


def _hardly_trained(row: Row) -> bool:
    """Whether a federation of this trial was trained so little that its attack shows nothing."""
    return any(history.get("hardly_trained") for history in (row.outcome or {}).get("courses", []))


def _by_repetition(found: dict[Unit, float]) -> dict[Unit, float]:
    """Return the mean over all that was attacked in the same federation of the same repetition."""
    groups: dict[Unit, list[float]] = {}
    for (repetition, federation, *_), value in found.items():
        groups.setdefault((repetition, federation, -1, -1), []).append(value)
    return {unit: sum(numbers) / len(numbers) for unit, numbers in groups.items()}


def _interval(name: str, numbers: list[float], seed: int) -> Interval:
    """Return a cell's interval, which ends at what the metric can be."""
    metric = measure(name)
    least, most = metric.ends if metric else (0.0, 1.0) if name == "success" else (-math.inf, math.inf)
    return interval(numbers, resamples=_RESAMPLES, seed=seed, least=least, most=most)


def _at(point: Point, wanted: Point) -> bool:
    return all(point.get(axis) == level for axis, level in wanted.items())


def decide(
    difference: Interval, *, published: float | None = None, margin: float = 0.0, either_way: bool = False
) -> Outcome:
    """Return what an interval of better minus worse, of n independent ones, says of the claim that one side is better.

    With a margin the claim is that it is no worse by that much, whatever was published; with ``either_way``, nor
    better.
    """
    low, high = difference.low, difference.high
    if difference.n < 2:
        return "undecided"
    if high < -margin or (either_way and low > margin):
        return "contradicted here"
    if margin:
        return "holds" if low > -margin and not (either_way and high >= margin) else "undecided"
    excluded = published is not None and high < published
    if low > 0:
        return "smaller than published" if excluded else "holds"
    return "smaller than published, or none" if excluded else "undecided"
