"""What each federation under each defence leaks, what the defence costs, how its rounds went, and which one to take."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from fedaudit.evaluation import metric
from fedaudit.report import figures
from fedaudit.report.wording import number, short, words_of
from fedaudit.results import LEAKS, AttackSummary, AuditResult, Chart, FederationRecord, Interval, Line, Verdict

_FIRST: tuple[Verdict, ...] = (*LEAKS, "present, not extracted", "not demonstrated", "inconclusive", "not applicable")
_ROUNDS = 5  # below, accuracy says nothing of what training with a defence costs
_EACH = "each client changes its update before it leaves, by "
_POINTS = 30  # of a chart of the updates that were taken; more rounds than that are averaged in groups


@dataclass(frozen=True)
class Scale:
    """The metric that measures leakage in one result; where higher is better, it is so for the attack."""

    name: str
    unit: str
    higher_is_better: bool

    @property
    def is_share(self) -> bool:
        """Whether its values lie between 0 and 1."""
        known = metric(self.name)
        return known is not None and known.is_share

    @property
    def words(self) -> str:
        """The name as it is written in sentences."""
        return words_of(self.name)

    @property
    def label(self) -> str:
        """Name and unit."""
        return f"{self.words}, {self.unit}" if self.unit else self.words

    def of(self, summary: AttackSummary) -> Interval | None:
        """Return what an attack reached."""
        return next((m.value for m in summary.measured if m.name == self.name), None)

    def strength(self, value: Interval) -> float:
        """Return the mean, signed so that more is a stronger attack."""
        return value.mean if self.higher_is_better else -value.mean


PSNR = Scale("psnr", "dB", higher_is_better=True)
UNMEASURED = Scale("not measured", "", higher_is_better=True)


def scales(result: AuditResult) -> list[Scale]:
    """Return what this result's attacks are compared by: PSNR where it has any, then the first metric of each kind."""
    firsts = [m for s in result.summaries for m in s.measured[:1]]
    found = dict.fromkeys(Scale(m.name, m.unit, m.higher_is_better) for m in firsts)
    return sorted(found, key=lambda one: one != PSNR)


def scale(result: AuditResult) -> Scale:
    """Return what the leakage of this result's federations is compared by."""
    return next(iter(scales(result)), UNMEASURED)


def strength(summary: AttackSummary, by: Sequence[Scale]) -> tuple[int, float]:
    """Return what an attack reached on the first of the scales ``by`` that it is on, after how early that is."""
    for place, one in enumerate(by):
        if value := one.of(summary):
            return -place, one.strength(value)
    return -len(by), 0.0


def strongest(result: AuditResult, summaries: Sequence[AttackSummary]) -> AttackSummary | None:
    """Return the one of the worst verdict, and of several the one that reached most; None of none.

    One that won its control and found nothing comes before one that is inconclusive.
    """
    by = scales(result)
    return max(summaries, key=lambda s: (-_FIRST.index(s.verdict), *strength(s, by)), default=None)


@dataclass(frozen=True)
class Price:
    """One federation under one set of defences.

    Attributes:
        attack: the strongest on the result's scale; None where there is none.
        without: why there is none.
        leak: what it reached there.
        identified: share of images that it identifies.
        accuracy: held-out, after the last round; None where it wasn't measured.
        worst_client: the least of the clients' accuracies then.
        bytes: of an update, mean.
        parameters: of an update, mean.
        overhead: seconds in the client-side defence, as a share of those in training.
        epsilon: spent in all (Rényi), where there is differential privacy.
        replaced: whether that is by replacement.
    """

    federation: str
    attack: str | None
    without: str
    leak: Interval | None
    identified: float | None
    accuracy: float | None
    worst_client: float | None
    bytes: float
    parameters: float
    overhead: float
    epsilon: float | None
    replaced: bool

    @property
    def strongest(self) -> str:
        """The strongest attack, or why there is none."""
        return self.attack or self.without


def worth_comparing(result: AuditResult) -> bool:
    """Whether there is something to compare: a defence, or a measured accuracy."""
    return any(f.history and (f.history.accuracy or not f.undefended) for f in result.federations)


# scenario.evaluation.sort_by -> what to sort by, the best being the least, and its words
ORDERS: dict[str, tuple[Callable[[Price, Scale], float | None], str]] = {
    "leakage": (lambda row, by: by.strength(row.leak) if row.leak else None, "least leakage"),
    "accuracy": (lambda row, _: _least(row.accuracy), "highest accuracy"),
    "worst client": (lambda row, _: _least(row.worst_client), "highest accuracy of the worst client"),
    "bytes": (lambda row, _: row.bytes, "fewest bytes"),
    "time": (lambda row, _: row.overhead, "least time"),
    "epsilon": (lambda row, _: row.epsilon, "least ε"),
}


def _least(value: float | None) -> float | None:
    return None if value is None else -value


def order(result: AuditResult) -> str:
    """Return by what the scenario wants the rows sorted."""
    return str(result.scenario.get("evaluation", {}).get("sort_by", "leakage"))


def prices(result: AuditResult) -> list[Price]:
    """Return a row for every federation that was simulated here, sorted as the scenario says, unknown values last."""
    by, rows = scale(result), []
    for record in result.federations:
        history = record.history
        if history is None:
            continue
        own = [s for s in result.summaries if s.federation == record.name]
        worst = max((s for s in own if by.of(s)), key=lambda s: strength(s, [by]), default=None)
        rows.append(
            Price(
                federation=record.name,
                attack=worst.attack if worst else None,
                without=_without(own, by),
                leak=by.of(worst) if worst else None,
                identified=worst.identification_rate if worst else None,
                accuracy=history.accuracy[-1] if history.accuracy else None,
                worst_client=min(history.per_client[-1]) if history.per_client else None,
                bytes=history.bytes,
                parameters=history.parameters,
                overhead=history.timing.client_defence / history.timing.training if history.timing.training else 0.0,
                epsilon=history.epsilon[-1] if history.epsilon else None,
                replaced=history.epsilon_adjacency == "replace",
            )
        )
    key, _ = ORDERS[order(result)]
    values = {id(row): key(row, by) for row in rows}
    return sorted(rows, key=lambda row: math.inf if (value := values[id(row)]) is None else value)


def _without(summaries: Sequence[AttackSummary], by: Scale) -> str:
    """Return why none of a federation's attacks is on the scale."""
    if not summaries:
        return "not attacked"
    ran = any(s.verdict != "not applicable" for s in summaries)
    return f"none is measured by {by.words}" if ran else "none could be run"


def draw(rows: list[Price], by: Scale) -> Figure | None:
    """Return leakage against accuracy, or against bytes where no accuracy was measured; None of fewer than two points.

    The area of a point grows with the bytes of an update; the bar is the 95 % interval, where there is one
    (``barred``).
    """
    shown = [(row, row.leak) for row in rows if row.leak is not None]
    by_accuracy = all(row.accuracy is not None for row, _ in shown)
    if len(shown) < 2:
        return None
    most = max(row.bytes for row, _ in shown)
    places = [
        (100 * row.accuracy if by_accuracy and row.accuracy is not None else row.bytes / 1000, leak.mean)
        for row, leak in shown
    ]
    with matplotlib.rc_context(figures._STYLE):
        figure = Figure(figsize=(figures._WIDTH / 72, 300 / 72), layout="constrained")
        axes = figure.subplots()
        for i, ((row, leak), (x, y)) in enumerate(zip(shown, places, strict=True)):
            colour = f"#fe01{i % figures._COLOURS:02x}"
            if _has_bar(leak):
                axes.errorbar([x], [y], yerr=[[y - leak.low], [leak.high - y]], fmt="none", ecolor=colour, capsize=4)
            axes.scatter([x], [y], s=20 + 160 * row.bytes / most, color=colour, zorder=3)
        ends = [end for _, leak in shown for end in (leak.low, leak.mean, leak.high)]
        across = [x for x, _ in places]
        axes.set_xlim(*(figures.limits(across, 10, 100) if by_accuracy else figures.limits(across, 0.1 * max(across))))
        if by.is_share:
            axes.set_ylim(*figures.limits(ends, figures.LEAST_SHARE, 1))
        else:
            axes.set_ylim(*figures.limits(ends, figures.LEAST_DB if by.unit == "dB" else 0.1 * max(map(abs, ends))))
        _name(axes, [(row.federation, *place) for (row, _), place in zip(shown, places, strict=True)])
        axes.set_xlabel("held-out accuracy (%)" if by_accuracy else "kilobytes an update")
        axes.set_ylabel(f"{by.label}, strongest attack")
    return figure


def barred(rows: list[Price]) -> bool:
    """Return whether ``draw`` draws an interval at any point."""
    return any(row.leak is not None and _has_bar(row.leak) for row in rows)


def _has_bar(leak: Interval) -> bool:
    return leak.n > 1 and leak.low < leak.high


def _name(axes: Any, points: list[tuple[str, float, float]]) -> None:
    """Write each point's name to its right, or its left where there is no room; lower where it would meet another."""
    (left, right), (bottom, top) = axes.get_xlim(), axes.get_ylim()
    letter, line = 0.016 * (right - left), 0.055 * (top - bottom)
    taken: list[tuple[float, float, float]] = []
    for name, x, y in sorted(points, key=lambda point: -point[2]):
        before = x > left + 0.6 * (right - left)
        width, height = letter * (len(name) + 3), y
        begin, end = (x - width, x) if before else (x, x + width)
        while any(begin < e and b < end and abs(height - v) < line for b, e, v in taken):
            height -= line
        taken.append((begin, end, height))
        axes.annotate(
            name.replace("$", r"\$"), (x, height), (-9 if before else 9, 5), textcoords="offset points", fontsize=10,
            ha="right" if before else "left",
        )  # fmt: skip


def alt(rows: list[Price], by: Scale) -> str:
    """Return the figure in words."""
    points = [
        f"{row.federation}: {by.label} {row.leak.mean:.3g}"
        + (f" at {row.accuracy:.1%} accuracy" if row.accuracy is not None else "")
        + f", {row.bytes / 1000:,.1f} kB an update"
        for row in rows
        if row.leak
    ]
    return f"Leakage against price: {'; '.join(points)}."


def accuracy(result: AuditResult) -> Chart | None:
    """Return held-out accuracy by round, a line a federation; None where it was measured less than twice."""
    lines = [
        Line(name=f.name, x=[float(r) for r in f.history.rounds], y=[100 * a for a in f.history.accuracy])
        for f in result.federations
        if f.history and len(f.history.rounds) > 1
    ]
    if not lines:
        return None
    return Chart(title="held-out accuracy", caption="", x_label="rounds", y_label="accuracy (%)", lines=lines)


def taken(result: AuditResult) -> list[Chart]:
    """Return a chart for each federation whose server had to do with malicious clients, or left updates out."""
    charts = []
    for federation in result.federations:
        if lines := _taken(federation):
            charts.append(
                Chart(title=federation.name, caption="", x_label="round", y_label="updates taken (%)", lines=lines)
            )
    return charts


def _taken(federation: FederationRecord) -> list[Line]:
    history = federation.history
    if history is None:
        return []
    both = {"honest clients": history.honest_accepted, "malicious clients": history.malicious_accepted}
    malicious = any(share is not None for share in history.malicious_accepted)
    if not malicious and all(share in (None, 1.0) for share in history.honest_accepted):
        return []
    return [line for name, shares in both.items() if (line := _averaged(name, shares)).x]


def _averaged(name: str, shares: list[float | None]) -> Line:
    """Return the mean of each group of rounds, at the group's middle; rounds without an update don't count."""
    size = -(-len(shares) // _POINTS)
    line = Line(name=name, x=[], y=[])
    for start in range(0, len(shares), size or 1):
        group = [share for share in shares[start : start + size] if share is not None]
        if group:
            line.x.append(start + (min(size, len(shares) - start) - 1) / 2)
            line.y.append(100 * sum(group) / len(group))
    return line


@dataclass(frozen=True)
class Defended:
    """One federation under one set of defences, beside the same one without.

    Attributes:
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
    by_name = {price.federation: price for price in prices(result)}
    tables = []
    for spec in result.scenario.get("federations", []):
        own = [f for f in result.federations if f.name.startswith(f"{spec['name']}-") and f.name in by_name]
        if len(own) > 1:
            tables.append(_table(result, spec["name"], own, by_name))
    return tables


def _table(
    result: AuditResult, name: str, records: Sequence[FederationRecord], prices: dict[str, Price]
) -> DefenceTable:
    plain = next((r for r in records if r.undefended), None)
    base = prices[plain.name] if plain else None
    rows = [_row(result, r, prices[r.name], base) for r in records]
    rows.sort(key=lambda row: (not row.undefended, row.verdict in LEAKS, row.points or 0.0))
    return DefenceTable(name, tuple(rows), _recommendation(rows))


def _row(result: AuditResult, record: FederationRecord, price: Price, base: Price | None) -> Defended:
    summaries = [s for s in result.summaries if s.federation == record.name]
    best = strongest(result, summaries)
    leak = "not attacked"
    if best:
        leak = best.verdict_text if best.verdict != "not applicable" else "no attack could be run"
        for first in best.measured[:1]:
            by = Scale(first.name, first.unit, first.higher_is_better)
            unit = f" {by.unit}".rstrip()
            leak = f"{by.words} {short(first.value.mean)}{unit}{first.value.span(short)} by {best.attack}"
    points, lost = None, "not measured"
    if record.rounds < _ROUNDS and price.accuracy is not None:
        lost = f"too few rounds to tell ({record.rounds})"
    elif base is not None and base.accuracy is not None and price.accuracy is not None and record.history:
        points = 100 * (base.accuracy - price.accuracy)
        n = max(1, record.history.examples)
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
        undefended=record.undefended,
        points=points,
    )


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
    if plain.verdict == "not applicable":
        return "Meaningless here: no attack could be run on the undefended federation."
    if plain.verdict not in LEAKS:
        return (
            f"Meaningless here: without a defence the verdict is “{plain.verdict}”, too. The attack must first find "
            "something from the undefended federation; raise its effort."
        )
    kept = [row for row in rows if not row.undefended and row.verdict == "not demonstrated"]
    if not kept:
        unsure = [row.federation for row in rows if row.verdict in ("inconclusive", "not applicable")]
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
