"""The report's figures: series drawn from an AuditResult, plotted by matplotlib, handed over as inline SVG.

Every colour in a figure is a stand-in that ``to_svg`` turns into a CSS variable of the page, so that one drawing
serves the light scheme, the dark scheme and paper. Attacks differ by line and marker too, never by colour alone.
"""

from __future__ import annotations

import io
import math
import re
from dataclasses import dataclass
from typing import Any, Literal
from xml.etree import ElementTree

import matplotlib
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, NullFormatter

from fedaudit.evaluation.images import best_tries
from fedaudit.results import AuditResult, Chart

Quantity = Literal["objective", "psnr"]

AXIS_LABELS: dict[Quantity, str] = {"objective": "objective (no unit)", "psnr": "mean PSNR (dB)"}

LEAST_DB = 2.0  # the least span of an axis of PSNR
LEAST_SHARE = 0.1  # and of a share

_COLOURS = 6
_INK, _MUTED, _GRID, _PAPER = "#fe0001", "#fe0002", "#fe0003", "#fe0004"
_VARIABLES = {_INK: "--ink", _MUTED: "--muted", _GRID: "--rule", _PAPER: "--paper"} | {
    f"#fe01{i:02x}": f"--series-{i + 1}" for i in range(_COLOURS)
}
_DASHES: list[Any] = ["-", (0, (6, 2)), (0, (2, 1.6)), (0, (7, 2, 1.6, 2)), (0, (10, 2)), (0, (4, 1.5, 1.5, 1.5))]
_MARKERS = ["o", "s", "^", "D", "v", "P", "X"]
_WIDTH = 440  # CSS pixels; narrow enough for its letters to stay readable when a phone scales it to 320

_STYLE: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "fedaudit",
    "font.family": ["DejaVu Sans"],
    "font.size": 12,
    "axes.edgecolor": _MUTED,
    "axes.labelcolor": _INK,
    "axes.facecolor": "none",
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.unicode_minus": True,
    "figure.facecolor": "none",
    "figure.dpi": 72,
    "grid.color": _GRID,
    "grid.linewidth": 1,
    "text.color": _INK,
    "xtick.color": _MUTED,
    "ytick.color": _MUTED,
    "xtick.labelcolor": _INK,
    "ytick.labelcolor": _INK,
}


@dataclass(frozen=True)
class Series:
    """One line of a figure: an attack's progress, averaged over the updates that it ran against."""

    attack: str
    style: int
    iterations: list[int]
    mean: list[float]
    low: list[float]
    high: list[float]
    updates: int


@dataclass(frozen=True)
class Spread:
    """One row of the spread figure: every image's PSNR (dB), their mean, its 95 % interval, and the baseline."""

    attack: str
    style: int
    psnr: list[float]
    mean: float
    low: float
    high: float
    baseline: float | None


def attack_names(result: AuditResult) -> list[str]:
    """Return every attack's name once, in the order that fixes its colour, line and marker throughout the page."""
    listed = [a.name for a in result.attacks]
    ran = [s.attack for s in result.summaries] + [f.attack for f in result.findings]
    return list(dict.fromkeys(listed + ran))


def curve_series(result: AuditResult, federation: str, quantity: Quantity) -> list[Series]:
    """Return one series per attack for ``federation``, at the iterations that all of its updates have in common.

    ``low`` and ``high`` are the least and the greatest value over the updates, no interval of the mean. An iteration's
    mean is over its finite values; an iteration without any is left out.
    """
    found = []
    for style, attack in enumerate(attack_names(result)):
        curves = [
            dict(zip(f.curve.iterations, getattr(f.curve, quantity), strict=True))
            for f in result.findings
            if f.attack == attack and f.federation == federation and f.curve is not None and f.curve.iterations
        ]
        points = []
        for iteration in sorted(set.intersection(*map(set, curves))) if curves else []:
            values = [c[iteration] for c in curves if math.isfinite(c[iteration])]
            if values:
                points.append((iteration, sum(values) / len(values), min(values), max(values)))
        if points:
            iterations, mean, low, high = zip(*points, strict=True)
            found.append(Series(attack, style, list(iterations), list(mean), list(low), list(high), len(curves)))
    return found


def spreads(result: AuditResult, federation: str) -> list[Spread]:
    """Return one row per attack that has images in ``federation``, in the order of ``attack_names``."""
    rows, summaries = [], {s.attack: s for s in result.summaries if s.federation == federation}
    for style, attack in enumerate(attack_names(result)):
        found = [i for f in result.findings if (f.attack, f.federation) == (attack, federation) for i in f.images]
        own = summaries.get(attack)
        if found and own and (over := own.psnr):
            values = [image.psnr for image in best_tries(found)]
            rows.append(Spread(attack, style, values, over.mean, over.low, over.high, own.psnr_mean_image))
    return rows


@dataclass(frozen=True)
class EpsilonRow:
    """One row of the picture of ε: an observer, whether the claim is made against it, what it shows."""

    observer: str
    covered: bool
    demonstrated: float | None
    estimate: float | None


@dataclass(frozen=True)
class Measured:
    """One row of a picture of intervals: what was measured, the ends of its 95 % interval, whether it is a leak."""

    name: str
    value: float
    low: float | None
    high: float | None
    leak: bool


def draw_intervals(rows: list[Measured], label: str) -> Figure:
    """Draw values with their intervals, a name a row: filled where it is a leak, hollow where it isn't."""
    with matplotlib.rc_context(_STYLE):
        figure, axes = _new_figure(height=82 + 34 * len(rows))
        colour, _, _ = _look(0)
        for y, row in enumerate(rows):
            if row.low is not None and row.high is not None:
                axes.plot([row.low, row.high], [y, y], color=_INK, linewidth=2.2, solid_capstyle="butt")
            axes.plot([row.value], [y], "o", color=colour, mfc=colour if row.leak else "none", ms=9, mew=2)
        _name_rows(axes, [_short(row.name) for row in rows])
        ends = [v for r in rows for v in (r.value, r.low, r.high) if v is not None]
        whole = 1.0 if min(ends) >= 0 and max(ends) <= 1 else None
        axes.set_xlim(*(limits([*ends, 0.0, 1.0], LEAST_SHARE, whole) if whole else limits(ends, LEAST_SHARE)))
        axes.set_xlabel(label)
        axes.xaxis.set_major_locator(MaxNLocator(6))
    return figure


def draw_epsilon(rows: list[EpsilonRow], claimed: float | None) -> Figure:
    """Draw what each observer demonstrates and, hollow, what is estimated; a line at the claim, and the room to it."""
    with matplotlib.rc_context(_STYLE):
        figure, axes = _new_figure(height=82 + 44 * len(rows))
        most = max([claimed or 0.0, *(r.demonstrated or 0.0 for r in rows), 0.5])
        for y, row in enumerate(rows):
            shown = row.demonstrated or 0.0
            colour = _look(0)[0] if row.covered or claimed is None else _MUTED
            axes.plot([0, shown], [y, y], color=colour, linewidth=7, solid_capstyle="butt")
            axes.plot([shown], [y], "o", color=colour, markersize=9)
            if row.covered and claimed is not None and claimed > shown:
                axes.fill_betweenx([y - 0.22, y + 0.22], shown, claimed, color=colour, alpha=0.16, linewidth=0)
            if row.estimate is not None and row.estimate <= 1.5 * most:
                axes.plot([row.estimate], [y], "o", color=_INK, markerfacecolor="none", markersize=9)
        if claimed is not None:
            axes.axvline(claimed, color=_INK, linewidth=2.2)
        _name_rows(axes, [row.observer for row in rows])
        axes.set_xlim(left=0)
        axes.set_xlabel("ε (nats)")
        axes.xaxis.set_major_locator(MaxNLocator(6))
    return figure


def draw_curves(series: list[Series], quantity: Quantity) -> Figure:
    """Draw ``series`` against iterations: a line per attack, and a band from its lowest to its highest update."""
    with matplotlib.rc_context(_STYLE):
        figure, axes = _new_figure(height=270)
        for line in series:
            colour, dash, marker = _look(line.style)
            if line.updates > 1:
                axes.fill_between(line.iterations, line.low, line.high, color=colour, alpha=0.16, linewidth=0)
            axes.plot(
                line.iterations,
                line.mean,
                color=colour,
                linestyle=dash,
                marker=marker,
                markevery=max(1, math.ceil(len(line.iterations) / 8)),
                markersize=6,
                linewidth=2,
                label=line.attack,
            )
        values = [v for line in series for v in line.low + line.high]
        # A cosine distance falls through decades: on a linear axis its second half would lie on the floor.
        if quantity == "objective" and values and min(values) > 0 and max(values) > 20 * min(values):
            axes.set_yscale("log")
            axes.yaxis.set_major_formatter("{x:g}")
            axes.yaxis.set_minor_formatter(NullFormatter())
        if quantity == "psnr":
            axes.set_ylim(*limits(values, LEAST_DB))
        axes.set_xlabel("iterations")
        axes.set_ylabel(AXIS_LABELS[quantity])
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
        axes.xaxis.set_major_formatter("{x:,.0f}")
    return figure


def draw_spread(rows: list[Spread]) -> Figure:
    """Draw every image's PSNR as a dot, an attack a row, with mean, 95 % interval, and the mean-image baseline."""
    with matplotlib.rc_context(_STYLE):
        figure, axes = _new_figure(height=82 + 44 * len(rows))
        for y, row in enumerate(rows):
            colour, _, marker = _look(row.style)
            axes.plot(row.psnr, [y - 0.17] * len(row.psnr), marker, color=colour, alpha=0.6, markersize=7.5, mew=0)
            axes.plot([row.low, row.high], [y + 0.17] * 2, color=_INK, linewidth=2.2, solid_capstyle="butt")
            axes.plot([row.mean], [y + 0.17], "|", color=_INK, markersize=13, mew=2.6)
            if row.baseline is not None:
                axes.plot([row.baseline] * 2, [y - 0.4, y + 0.4], color=_MUTED, linestyle=(0, (3, 2)), linewidth=1.6)
        _name_rows(axes, [_short(row.attack) for row in rows])
        values = [v for r in rows for v in [*r.psnr, r.low, r.high, r.baseline] if v is not None]
        axes.set_xlim(*limits(values, LEAST_DB))
        axes.set_xlabel("PSNR (dB)")
        axes.xaxis.set_major_locator(MaxNLocator(6))
    return figure


def draw_chart(chart: Chart, names: list[str], *, decades: bool = False) -> Figure:
    """Draw a finding's chart; a line's look is its name's place in ``names``; a single point is a level across.

    ``decades``: x is drawn by its logarithm.
    """
    with matplotlib.rc_context(_STYLE):
        figure, axes = _new_figure(height=250)
        for line in chart.lines:
            style = names.index(line.name)
            colour, dash, marker = _look(style)
            look: dict[str, Any] = {"color": colour, "linestyle": dash, "linewidth": 2, "label": line.name}
            if len(line.x) == 1:
                axes.axhline(line.y[0], **look)
            else:
                every = max(1, math.ceil(len(line.x) / 8))
                axes.plot(line.x, line.y, marker=marker, markevery=(style * every // 3, every), markersize=6, **look)
        if min((y for line in chart.lines for y in line.y), default=0.0) >= 0:
            axes.set_ylim(bottom=0)
        for label, limit in ((chart.x_label, axes.set_xlim), (chart.y_label, axes.set_ylim)):
            if whole := 100 if label.endswith("(%)") else 1 if label.startswith("share ") else None:
                limit(-0.04 * whole, 1.04 * whole)
        axes.set_xlabel(chart.x_label)
        axes.set_ylabel(chart.y_label)
        if decades:
            axes.set_xscale("log")
        else:
            whole_numbers = any(max(line.x, default=0) > 1 for line in chart.lines)
            axes.xaxis.set_major_locator(MaxNLocator(5, integer=whole_numbers))
    return figure


def limits(values: list[float], least: float, whole: float | None = None) -> tuple[float, float]:
    """Return an axis' ends around ``values``: never nearer than ``least``, so that a small difference looks small.

    With a ``whole`` the values are shares of it, and the axis leaves 0 to ``whole`` by a marker's width only.
    """
    finite = [v for v in values if math.isfinite(v)] or [0.0]
    low, high = min(finite), max(finite)
    margin = max(0.1 * (high - low), (least - (high - low)) / 2)
    low, high = low - margin, high + margin
    if whole is not None:
        low, high = (0.0, max(high, least)) if low < 0 else (low, high)
        low, high = (min(low, whole - least), whole) if high > whole else (low, high)
        beyond = 0.04 * (high - low)
        low, high = (-beyond if low == 0 else low), (whole + beyond if high == whole else high)
    return low, high


def draw_swatch(style: int) -> Figure:
    """Draw the legend's sample of one attack's line and marker."""
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(46 / 72, 16 / 72))
        axes = figure.add_axes((0, 0, 1, 1))
        axes.axis("off")
        colour, dash, marker = _look(style)
        axes.plot([0, 1, 2], [0, 0, 0], color=colour, linestyle=dash, marker=marker, markevery=[1], ms=6, lw=2)
    return figure


def to_svg(figure: Figure, prefix: str, description: str | None) -> str:
    """Return ``figure`` as SVG for an HTML page, with ids under ``prefix``; without a description it is decoration."""
    buffer = io.StringIO()
    with matplotlib.rc_context(_STYLE):
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    root = ElementTree.fromstring(buffer.getvalue())
    for parent in list(root.iter()):
        for child in list(parent):
            # The style sheet would reach every element of the page, and the metadata name a host on the network.
            if _local(child.tag) in {"metadata", "style"}:
                parent.remove(child)
    for element in root.iter():
        element.tag = _local(element.tag)
        attributes = {_local(key): value for key, value in element.attrib.items()}
        if "id" in attributes:
            attributes["id"] = prefix + attributes["id"]
        if attributes.get("href", "").startswith("#"):
            attributes["href"] = f"#{prefix}{attributes['href'][1:]}"
        element.attrib = {key: value.replace("url(#", f"url(#{prefix}") for key, value in attributes.items()}
    for name in ("width", "height", "version"):
        root.attrib.pop(name, None)
    root.attrib |= {"class": "plot", "focusable": "false"}
    root.attrib |= {"role": "img", "aria-label": description} if description else {"aria-hidden": "true"}
    text = ElementTree.tostring(root, encoding="unicode", short_empty_elements=False)
    text = re.sub(r"font: ([^;\"]*?)px [^;\"]+", r"font: \1px var(--sans)", text)
    for stand_in, variable in _VARIABLES.items():
        text = text.replace(stand_in, f"var({variable})")
    return text


def _new_figure(height: int) -> tuple[Figure, Any]:
    figure = Figure(figsize=(_WIDTH / 72, height / 72), layout="constrained")
    return figure, figure.add_subplot()


def _name_rows(axes: Any, names: list[str]) -> None:
    """Make the vertical axis one of rows, the first on top."""
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=False, axis="y")
    axes.spines["left"].set_visible(False)


def _look(style: int) -> tuple[str, Any, str]:
    # The three cycles have different lengths, so that two attacks look alike only after 42.
    return f"#fe01{style % _COLOURS:02x}", _DASHES[style % len(_DASHES)], _MARKERS[style % len(_MARKERS)]


def _short(name: str) -> str:
    # matplotlib reads $...$ as mathematics; a name is never that.
    return (name if len(name) <= 18 else name[:17] + "…").replace("$", r"\$")


def _local(tag: str) -> str:
    return tag.rpartition("}")[2]
