"""Two audits compared: what leaks more, less, as much as before, or can't be compared.

For every attack on every federation one number decides: PSNR for images, the first metric of their kind for the rest.
Images are compared with themselves: the same victim at the same place (federation, round, client, position), known by
its true image. An update's images share the attack's random start, so their differences are averaged first where there
are several updates, and the test is over updates (Student). Rates over records come with an interval each: the interval
of their difference is that of two independent runs, which is too wide, never too narrow, where both asked about the
same records.

All tests are two-sided, corrected together (Holm): noise alone makes any attack "worse" with a probability of about
half of ``LEVEL``; ``python -m tools.measure.compare_noise`` measures it. Only what leaks by its verdict can be worse
than before, and a verdict that changed while its number didn't is what chance does. Fewer than three pairs can't be
tested: there a step from "not demonstrated" to a leak counts, where the number agrees, and the rest can't be compared.
Neither torch nor any other part of an audit is imported.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from scipy.stats import norm, ttest_1samp

from fedaudit.results import (
    LEAKS,
    AttackSummary,
    AuditResult,
    FindingResult,
    ImageResult,
    MetricResult,
    MetricSummary,
    Setting,
    Verdict,
)
from fedaudit.utils.errors import BadInput

LEVEL = 0.02  # at 0.05 an unlucky old audit had up to 8 of 100 reruns called worse, at 0.02 up to 3
Outcome = Literal["worse", "better", "unchanged", "can't be compared"]

_LEAST_DB = 0.1  # nobody sees less; other machines round otherwise
_LEAST_SHARE = 1e-3  # the same for other metrics, relative
_LEAST_PAIRS = 3  # with two, only differences of hundreds of standard errors would count
_SAME_BASELINE = 1e-3  # dB, between the same true image's baselines, where the files are not at hand
_OPEN: tuple[Verdict, ...] = ("present, not extracted", "inconclusive", "not applicable")
_SURE: tuple[Verdict, ...] = ("not demonstrated", "not applicable")
_Z95 = float(norm.ppf(0.975))


@dataclass(frozen=True)
class Difference:
    """New minus old.

    Attributes:
        low, high: the 95 % interval, not corrected; None where there is one pair only.
        n: pairs, or records of the new audit.
        of: what n counts.
        p: two-sided, of no difference; None where there is nothing to test.
    """

    mean: float
    low: float | None
    high: float | None
    n: int
    of: str
    p: float | None


@dataclass(frozen=True)
class Row:
    """One attack on one federation, in both audits.

    Attributes:
        federation, attack: by the new audit's names.
        metric, unit: what was compared; None where nothing was.
        more_leaks: whether a higher value is more leakage.
        old, new: means.
        p_corrected: p after Holm's correction over all rows.
        old_verdict, new_verdict: None where the audit doesn't have it.
        outcome: "worse" leaks more than before.
        reason: why, where the numbers alone don't say it.
        old_setting, new_setting: diagnostic or deployment; None where that isn't known.
    """

    federation: str
    attack: str
    metric: str | None
    unit: str
    more_leaks: bool
    old: float | None
    new: float | None
    difference: Difference | None
    p_corrected: float | None
    old_verdict: Verdict | None
    new_verdict: Verdict | None
    outcome: Outcome
    reason: str | None = None
    old_setting: Setting | None = None
    new_setting: Setting | None = None

    @property
    def moved(self) -> bool:
        """Whether one is a diagnostic and the other of a deployment: then conditions changed, not only what leaks."""
        return None not in (self.old_setting, self.new_setting) and self.old_setting != self.new_setting


@dataclass(frozen=True)
class AuditComparison:
    """All rows, worst first, and which settings of the scenarios differ."""

    rows: list[Row]
    settings: list[str]
    level: float = LEVEL

    @property
    def regression(self) -> bool:
        """Whether anything leaks more than before."""
        return any(row.outcome == "worse" for row in self.rows)

    @property
    def open(self) -> list[Row]:
        """The rows against "no regression": they leak, or weren't compared though the old audit tested them.

        All rows, where none could be compared.
        """
        uncompared = [row for row in self.rows if row.outcome == "can't be compared"]
        if len(uncompared) == len(self.rows):
            return self.rows
        return [r for r in uncompared if r.old_verdict not in (None, "not applicable") or r.new_verdict in LEAKS]

    @property
    def tested(self) -> bool:
        """Whether everything that the old audit tested could be compared."""
        return bool(self.rows) and not self.open

    def for_programs(self) -> dict[str, Any]:
        """Return all of it, JSON-serialisable."""
        return {"regression": self.regression, "tested": self.tested, **asdict(self)}


def open_audit(path: Path) -> tuple[AuditResult, Path]:
    """Return the result that ``path`` (a results.json, or the folder with it) holds, and its folder."""
    file = path / "results.json" if path.is_dir() else path
    if not file.exists():
        raise BadInput(f"there is no audit in '{path}'; give its folder, or its results.json")
    return AuditResult.load(file), file.parent


def compare_audits(old: AuditResult, new: AuditResult, *, folders: tuple[Path, Path] | None = None) -> AuditComparison:
    """Compare two audits, attack by attack.

    Federations pair by name, or where each audit has one only. In ``folders`` lie their images, by which a victim is
    known; else its label and its baseline tell.
    """
    renamed = {}
    if len(old.federations) == len(new.federations) == 1:
        renamed = {old.federations[0].name: new.federations[0].name}
    before = {(renamed.get(s.federation, s.federation), s.attack): s for s in old.summaries}
    after = {(s.federation, s.attack): s for s in new.summaries}
    rows = []
    for key in dict.fromkeys([*after, *before]):
        one, other = before.get(key), after.get(key)
        if one is None or other is None:
            reason = "only the new audit has it" if one is None else "the new audit doesn't have it"
            found = _Measured(None, "", None, reason)
        elif one.images and other.images:
            found = _images((old, one), (new, other), folders)
        else:
            found = _metric((old, one), (new, other))
        rows.append(_row(key, one, other, found))
    return AuditComparison(_judged(rows), _different_settings(old.scenario, new.scenario))


def _row(key: tuple[str, str], old: AttackSummary | None, new: AttackSummary | None, found: _Measured) -> Row:
    """Return what was measured; the outcome is that of the verdicts alone, until :func:`_judged` has seen all rows."""
    return Row(
        *key,
        metric=found.metric,
        unit=found.unit,
        more_leaks=found.more_leaks,
        old=_mean(old, found.metric),
        new=_mean(new, found.metric),
        difference=found.difference,
        p_corrected=None,
        old_verdict=old.verdict if old else None,
        new_verdict=new.verdict if new else None,
        outcome="can't be compared" if found.difference is None else "unchanged",
        reason=found.reason,
        old_setting=old.setting if old else None,
        new_setting=new.setting if new else None,
    )


class _Measured(NamedTuple):
    metric: str | None
    unit: str
    difference: Difference | None
    reason: str | None = None
    more_leaks: bool = True


def _images(
    old: tuple[AuditResult, AttackSummary],
    new: tuple[AuditResult, AttackSummary],
    folders: tuple[Path, Path] | None,
) -> _Measured:
    before, after = _victims(*old), _victims(*new)
    runs: dict[Any, list[float]] = {}
    for place, image in after.items():
        match = before.get(place)
        if match and _same_victim(match, image, folders):
            runs.setdefault(place[0], []).append(image.psnr - match.psnr)
    if not runs:
        return _Measured("psnr", "dB", None, "the two attacked different images")
    clusters = [float(np.mean(values)) for values in runs.values()]
    if len(clusters) > 1:
        difference = _paired(clusters, "updates")
    else:
        difference = _paired(next(iter(runs.values())), "images")
    pairs = sum(map(len, runs.values()))
    left = max(len(before), len(after)) - pairs
    return _Measured("psnr", "dB", difference, f"over the {pairs} images that both attacked" if left else None)


def _victims(result: AuditResult, summary: AttackSummary) -> dict[Any, ImageResult]:
    """Return the images by run and place."""
    return {(_place(f), i): image for f in _findings(result, summary) for i, image in enumerate(f.images)}


def _findings(result: AuditResult, summary: AttackSummary) -> list[FindingResult]:
    wanted = (summary.federation, summary.attack, "done")
    return [f for f in result.findings if (f.federation, f.attack, f.status) == wanted]


def _place(finding: FindingResult) -> tuple[Any, ...]:
    return finding.round, finding.client, tuple(finding.rounds)


def _same_victim(old: ImageResult, new: ImageResult, folders: tuple[Path, Path] | None) -> bool:
    files = [folder / i.true_image for folder, i in zip(folders, (old, new), strict=True)] if folders else []
    if files and all(file.is_file() for file in files):
        digests = {hashlib.sha256(file.read_bytes()).digest() for file in files}
        return len(digests) == 1
    near = math.isclose(old.psnr_mean_image, new.psnr_mean_image, abs_tol=_SAME_BASELINE)
    return near and old.true_label == new.true_label


def _metric(old: tuple[AuditResult, AttackSummary], new: tuple[AuditResult, AttackSummary]) -> _Measured:
    """Compare by the first metric that both have: over records where it has an interval of its own, else by runs."""
    names = [m.name for m in old[1].metrics]
    name = next((m.name for m in new[1].metrics if m.name in names), None)
    if name is None:
        return _Measured(None, "", None, "nothing that both measured")
    one, other = (next(m for m in summary.metrics if m.name == name) for _, summary in (old, new))
    results = [_by_run(result, summary, name) for result, summary in (old, new)]
    if all(m.low is not None and m.n for runs in results for m in runs.values()):
        difference = _independent(one, other, next((m.of for m in results[1].values() if m.of), "records"))
    else:
        shared = [place for place in results[1] if place in results[0]]
        if not shared:
            return _Measured(name, other.unit, None, "no run that both made")
        difference = _paired([results[1][place].value - results[0][place].value for place in shared], "runs")
    return _Measured(name, other.unit, difference, None, other.higher_is_better)


def _by_run(result: AuditResult, summary: AttackSummary, name: str) -> dict[Any, MetricResult]:
    return {_place(f): m for f in _findings(result, summary) for m in f.metrics if m.name == name}


def _paired(differences: Sequence[float], of: str) -> Difference:
    """Return mean and Student's interval and test of paired differences; they are exact where all are equal."""
    data = np.asarray(differences, dtype=float)
    mean, n = float(data.mean()), len(data)
    if not data.any():
        return Difference(0.0, 0.0, 0.0, n, of, 1.0)
    if n == 1:
        return Difference(mean, None, None, n, of, None)
    if np.ptp(data) == 0:
        return Difference(mean, mean, mean, n, of, 0.0 if n >= _LEAST_PAIRS else None)
    test = ttest_1samp(data, 0.0)
    ends = test.confidence_interval(0.95)
    return Difference(mean, float(ends.low), float(ends.high), n, of, float(test.pvalue) if n >= _LEAST_PAIRS else None)


def _independent(old: MetricSummary, new: MetricSummary, of: str) -> Difference:
    """Return the difference of two means with an interval each, as of two independent runs."""
    a, b = old.value, new.value
    mean = b.mean - a.mean
    below = math.hypot(b.mean - b.low, a.high - a.mean)
    above = math.hypot(b.high - b.mean, a.mean - a.low)
    error = (below if mean > 0 else above) / _Z95
    if mean == 0:
        p: float | None = 1.0
    elif min(a.n, b.n) < 2 or error == 0:
        p = None
    else:
        p = float(2 * norm.sf(abs(mean) / error))
    return Difference(mean, mean - below, mean + above, b.n, of, p)


def _mean(summary: AttackSummary | None, metric: str | None) -> float | None:
    """Return a summary's mean of the metric; for images over all tries, which are what is compared."""
    if summary and metric == "psnr" and summary.psnr_of_tries is not None:
        return summary.psnr_of_tries
    return next((m.value.mean for m in summary.measured if m.name == metric), None) if summary else None


def _judged(rows: Sequence[Row]) -> list[Row]:
    """Return the rows with their outcomes, the worst first; p-values are corrected over all of them (Holm 1979)."""
    tested = sorted((i for i, r in enumerate(rows) if _p(r) is not None), key=lambda i: _p(rows[i]) or 0.0)
    corrected: dict[int, float] = {}
    last = 0.0
    for k, i in enumerate(tested):
        last = max(last, min(1.0, (len(tested) - k) * (_p(rows[i]) or 0.0)))
        corrected[i] = last
    judged = [_outcome(row, corrected.get(i)) for i, row in enumerate(rows)]
    order: list[Outcome] = ["worse", "better", "unchanged", "can't be compared"]
    return sorted(judged, key=lambda r: order.index(r.outcome))


def _p(row: Row) -> float | None:
    return row.difference.p if row.difference else None


def _outcome(row: Row, p_corrected: float | None) -> Row:
    row = replace(row, p_corrected=p_corrected)
    old, new = row.old_verdict, row.new_verdict
    if old is None or new is None:
        return row
    p, direction, step = _p(row), _direction(row), _severity(new) - _severity(old)
    leaks = new in LEAKS if direction > 0 else old in LEAKS
    significant = direction != 0 and p_corrected is not None and p_corrected <= LEVEL
    if significant and leaks:
        return replace(row, outcome="worse" if direction > 0 else "better")
    if new in _OPEN and (significant or old != new):
        return replace(row, outcome="can't be compared", reason=f"{old} before, {new} now")
    if significant:
        return replace(row, reason="the number changed, but nothing leaks by its verdict")
    if p is None:
        return _by_verdict(row, direction, step)
    return replace(row, reason="the verdict changed, which chance can do") if step else row


def _by_verdict(row: Row, direction: int, step: int) -> Row:
    """Return the outcome where there is too little to test: a sure verdict that became a leak is worse."""
    told = f"{row.old_verdict} before, {row.new_verdict} now"
    agrees = row.difference is None or direction * step > 0
    if agrees and step > 0 and row.old_verdict in _SURE:
        return replace(row, outcome="worse", reason=told)
    if agrees and step < 0 and row.new_verdict in _SURE:
        return replace(row, outcome="better", reason=told)
    if step or direction:
        return replace(row, outcome="can't be compared", reason="too few pairs to tell a change from chance")
    return row


def _direction(row: Row) -> int:
    """Return 1 where the difference is more leakage than nothing, -1 where less, 0 where it is too small to count."""
    if row.difference is None:
        return 0
    mean = row.difference.mean
    least = _LEAST_DB if row.unit == "dB" else _LEAST_SHARE * max(abs(row.old or 0.0), abs(row.new or 0.0))
    return 0 if abs(mean) <= least else 1 if (mean > 0) == row.more_leaks else -1


def _severity(verdict: Verdict) -> int:
    return len(LEAKS) - LEAKS.index(verdict) if verdict in LEAKS else 0


def _different_settings(old: Any, new: Any, path: str = "") -> list[str]:
    """Return the keys of two scenarios whose values differ, as ``--set`` names them."""
    if isinstance(old, dict) and isinstance(new, dict):
        keys = [*new, *(key for key in old if key not in new)]
        nested = [_different_settings(old.get(k), new.get(k), f"{path}.{k}".lstrip(".")) for k in keys]
        return [line for lines in nested for line in lines]
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        pairs = enumerate(zip(old, new, strict=True))
        nested = [_different_settings(a, b, f"{path}.{_label(b, i)}") for i, (a, b) in pairs]
        return [line for lines in nested for line in lines]
    return [] if old == new else [path]


def _label(item: Any, index: int) -> str:
    return str(item.get("name", index)) if isinstance(item, dict) else str(index)
