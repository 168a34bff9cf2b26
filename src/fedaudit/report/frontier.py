"""The frontier: what each federation under each defence leaks, against what the defence costs."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import matplotlib
from matplotlib.figure import Figure

from fedaudit.report import figures
from fedaudit.results import AuditResult, Interval


@dataclass(frozen=True)
class Price:
    """One federation under one set of defences.

    Attributes:
        federation: its name.
        attack: the one that recovers most, by mean PSNR; None where none could be played.
        psnr: of that attack, dB.
        identified: share of images that it identifies.
        accuracy: held-out, after the last round; None where it wasn't measured.
        worst_client: the least of the clients' accuracies then.
        bytes: of an update, mean.
        parameters: of an update, mean.
        overhead: seconds in the sanitiser, as a share of those in training.
        epsilon: spent in all (Rényi), where there is differential privacy.
    """

    federation: str
    attack: str | None
    psnr: Interval | None
    identified: float | None
    accuracy: float | None
    worst_client: float | None
    bytes: float
    parameters: float
    overhead: float
    epsilon: float | None


def worth_comparing(result: AuditResult) -> bool:
    """Whether there is something to compare: a defence, or a measured accuracy."""
    return any(
        f.course and (f.course.accuracy or f.aggregator not in ("mean", "fedavg") or f.sanitiser != "none")
        for f in result.federations
    )


# scenario.evaluation.sort_by -> what to sort by, the best being the least, and its words
ORDERS: dict[str, tuple[Callable[[Price], float | None], str]] = {
    "leakage": (lambda row: row.psnr.mean if row.psnr else -math.inf, "least leakage"),
    "accuracy": (lambda row: _least(row.accuracy), "highest accuracy"),
    "worst client": (lambda row: _least(row.worst_client), "highest accuracy of the worst client"),
    "bytes": (lambda row: row.bytes, "fewest bytes"),
    "time": (lambda row: row.overhead, "least time"),
    "epsilon": (lambda row: row.epsilon, "least ε"),
}


def _least(value: float | None) -> float | None:
    return None if value is None else -value


def order(result: AuditResult) -> str:
    """Return by what the scenario wants the rows sorted."""
    return str(result.scenario.get("evaluation", {}).get("sort_by", "leakage"))


def prices(result: AuditResult) -> list[Price]:
    """Return a row for every federation that was simulated here, sorted as the scenario says, unknown values last."""
    rows = []
    for record in result.federations:
        course = record.course
        if course is None:
            continue
        played = [s for s in result.summaries if s.federation == record.name and s.psnr]
        worst = max(played, key=lambda s: s.psnr.mean if s.psnr else -math.inf, default=None)
        rows.append(
            Price(
                federation=record.name,
                attack=worst.attack if worst else None,
                psnr=worst.psnr if worst else None,
                identified=worst.identification_rate if worst else None,
                accuracy=course.accuracy[-1] if course.accuracy else None,
                worst_client=min(course.per_client[-1]) if course.per_client else None,
                bytes=course.bytes,
                parameters=course.parameters,
                overhead=course.timing.sanitising / course.timing.training if course.timing.training else 0.0,
                epsilon=course.epsilon[-1] if course.epsilon else None,
            )
        )
    key, _ = ORDERS[order(result)]
    values = {id(row): key(row) for row in rows}
    return sorted(rows, key=lambda row: math.inf if (value := values[id(row)]) is None else value)


def draw(rows: list[Price]) -> Figure | None:
    """Return leakage (down is safer) against accuracy, or against bytes where no accuracy was measured.

    The area of a point grows with the bytes of an update; the bar is the 95 % interval. None for fewer than two points.
    """
    shown = [row for row in rows if row.psnr is not None]
    by_accuracy = all(row.accuracy is not None for row in shown)
    if len(shown) < 2:
        return None
    most = max(row.bytes for row in shown)
    with matplotlib.rc_context(figures._STYLE):
        figure = Figure(figsize=(figures._WIDTH / 72, 300 / 72), layout="constrained")
        axes = figure.subplots()
        for i, row in enumerate(shown):
            assert row.psnr is not None
            x = 100 * row.accuracy if by_accuracy and row.accuracy is not None else row.bytes / 1000
            colour = f"#fe01{i % figures._COLOURS:02x}"
            bar = [[row.psnr.mean - row.psnr.low], [row.psnr.high - row.psnr.mean]]
            axes.errorbar([x], [row.psnr.mean], yerr=bar, fmt="none", ecolor=colour, capsize=4)
            axes.scatter([x], [row.psnr.mean], s=20 + 160 * row.bytes / most, color=colour, zorder=3)
            axes.annotate(row.federation, (x, row.psnr.mean), (6, 5), textcoords="offset points", fontsize=10)
        axes.set_xlabel("held-out accuracy (%)" if by_accuracy else "kilobytes an update")
        axes.set_ylabel("PSNR of the strongest attack (dB)")
        axes.margins(0.15)
    return figure


def alt(rows: list[Price]) -> str:
    """Return the figure in words."""
    points = [
        f"{row.federation}: {row.psnr.mean:.1f} dB"
        + (f" at {row.accuracy:.1%} accuracy" if row.accuracy is not None else "")
        + f", {row.bytes / 1000:,.1f} kB an update"
        for row in rows
        if row.psnr
    ]
    return f"Leakage against price: {'; '.join(points)}."
