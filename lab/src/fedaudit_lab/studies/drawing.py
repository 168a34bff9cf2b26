"""A study's result as Markdown, CSV, a figure and one page."""

from __future__ import annotations

import base64
import csv
import io
import itertools
import re
import shlex
import textwrap
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np

from fedaudit import BadInput
from fedaudit.evaluation import Interval
from fedaudit.report import LEAST_DB, limits, render
from fedaudit_lab.studies.analysis import Analysis, Cell, Claim, Outcome
from fedaudit_lab.studies.spec import IMAGE_METRICS, NAMED, builtin_studies, expand, measure

_UNITS = {"psnr": "PSNR, dB", "ssim": "SSIM", "mse": "MSE", "lpips": "LPIPS"} | {
    "psnr_registered": "PSNR after shift and flip, dB",
    "ssim_registered": "SSIM after shift and flip",
    "success": "share above 25 dB",
    "psnr_normalised": "PSNR of normalised pixels, dB",
    "mse_normalised": "MSE of normalised pixels",
    **{name: f"share named of {n}, by {look}" for name, (look, n) in NAMED.items()},
}
_DIGITS = {"psnr": 1, "ssim": 2, "mse": 4, "lpips": 3, "seconds": 1, "cpu_seconds": 0, "memory": 0} | {
    "psnr_normalised": 1,
    "mse_normalised": 3,
    "parameters_sent": 0,
    "share_sent": 3,
    "bytes_sent": 0,
    "psnr_registered": 1,
    "ssim_registered": 2,
    "success": 2,
    **dict.fromkeys(NAMED, 2),
    **dict.fromkeys(("epsilon", "epsilon_claimed", "epsilon_estimate"), 2),
}
_ROW = {1: 70, 2: 38}  # panels side by side -> characters that fit under one of them
_BESIDE = 35  # characters of the longest name in a legend that stands beside its plot
_LINES = 12  # more in one picture can't be told apart
_PRICE = {"model_accuracy", "bytes_sent"}  # of a defence
_LEAKS = ("label_accuracy", "membership_auc")  # that the frontier shows beside images
_Row = tuple[list[str], list[Cell | None]]  # levels on the left, and a row's cells
_LEVEL: dict[Outcome, int] = {  # colours of the page
    "holds": 1,
    "smaller than published": 2,
    "smaller than published, or none": 2,
    "contradicted here": 3,
    "undecided": 2,
    "not measured": 0,
}
OUTCOMES = (
    "Paired over updates, averaged by seed (a network and a draw of the data); Student's 95 % interval over seeds, "
    "which n counts. *Smaller than published*: the interval lies below the difference of the paper's numbers (*or "
    "none*: it holds zero, too). *Contradicted here*: it lies on the other side of zero, or of the stated margin. "
    "*Undecided*: it can't tell."
)


def write(analysis: Analysis, folder: Path, suffix: str = "", shown: bytes | None = None) -> list[Path]:
    """Write result.md, result.csv, values.csv, claims.csv, figure.png, result.html, a ``suffix`` before the endings."""
    with plain_text():
        drawn = figure(analysis)
        points = frontier(analysis)
    contents = {
        f"result{suffix}.md": markdown(analysis).encode(),
        f"result{suffix}.csv": table_csv(analysis).encode(),
        f"values{suffix}.csv": values_csv(analysis).encode(),
        f"result{suffix}.html": page(analysis, drawn, points, suffix, shown).encode(),
    }
    if analysis.claims:
        contents[f"claims{suffix}.csv"] = claims_csv(analysis).encode()
    if drawn:
        contents[f"figure{suffix}.png"] = drawn
    if points:
        contents[f"frontier{suffix}.png"] = points
    return write_files(folder, contents)


def write_files(folder: Path, contents: Mapping[str, bytes]) -> list[Path]:
    """Write files to ``folder`` by name, and return their paths."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in contents.items():
            (folder / name).write_bytes(content)
    except OSError as error:
        raise BadInput(f"can't write to '{folder}': {error.strerror or error}") from None
    return [folder / name for name in contents]


def pyplot() -> Any:
    """Return matplotlib's pyplot, which draws into files only."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    return plt


def plain_text() -> AbstractContextManager[None]:
    """Draw texts as they are: a study's own words may have dollars."""
    settings: AbstractContextManager[None] = pyplot().rc_context({"text.parse_math": False})
    return settings


def png(drawing: Any, dpi: int) -> bytes:
    """Return a figure of pyplot's as a PNG, and forget it."""
    out = io.BytesIO()
    drawing.savefig(out, format="png", dpi=dpi, metadata={"Software": None})
    pyplot().close(drawing)
    return out.getvalue()


def _words(text: str) -> str:
    """Return a study's own words so that Markdown shows them as they are: no HTML, links, pictures or new cells."""
    return re.sub(r"([\\`<\[\]|])", r"\\\1", " ".join(text.split()))


def _plain(text: Any) -> Any:
    """Return what stands in a CSV so that no spreadsheet takes a study's own words for a formula."""
    if not isinstance(text, str) or not text.startswith(("=", "+", "-", "@", "\t", "\r")):
        return text
    try:
        float(text)
    except ValueError:
        return f"'{text}"
    return text


def markdown(analysis: Analysis) -> str:
    """Return the table and the claims as Markdown."""
    study = analysis.study
    down, across, rows = grid(analysis)
    lines = [
        f"# {_words(study.title)}",
        "",
        f"{_words(study.paper)}. Study `{study.name.replace('`', '')}`, scale `{analysis.scale}`: "
        f"{_words(_states(analysis))} {_draws(analysis)} "
        f"{analysis.done} trials done, {analysis.failed} failed, {analysis.pending} to do.",
        "",
        f"{unit_of(study.metric)}: mean over updates [95 % interval], n updates and what they are made of (a seed is a "
        "network and a draw of the data); the paper's number in its own setting.",
        "",
        "| " + " | ".join(map(_words, [*down, *across])) + " |",
        "|" + "---|" * (len(down) + len(across)),
    ]
    for left, cells in rows:
        shown = (cell_text(study.metric, cell) for cell in cells)
        texts = ["; ".join([main, *map(_words, small)]) for main, small in shown]
        lines.append("| " + " | ".join([*map(_words, left), *texts]) + " |")
    if analysis.claims:
        lines += ["", "| claim | where | difference | outcome |", "|---|---|---|---|"]
        for claim in analysis.claims:
            lines.append(
                f"| {_words(claim.text)} | {_words(claim.where)} | {claim_text(claim)} | **{claim.outcome}** |"
            )
        lines += ["", OUTCOMES]
    if analysis.old:
        lines += ["", _words(analysis.mixture)]
    if analysis.failures:
        lines += ["", "Failed:", "", *(f"- {_words(name)}: {_words(why)}" for name, why in analysis.failures)]
    return "\n".join(lines) + "\n"


def table_csv(analysis: Analysis) -> str:
    """Return one row per cell: levels, mean, median, interval, what n counts, the paper's, seconds, what's missing."""
    axes = list(analysis.study.axes)
    counts = ("median", "low", "high", "n", "images", "different", "seeds", "published", "seconds", "missing")
    rows: list[list[Any]] = [[*axes, analysis.study.metric, *counts, *analysis.study.also]]
    for cell in analysis.cells:
        v = cell.value
        numbers = [v.mean, v.median, v.low, v.high, v.n] if v else [""] * 5
        rows.append(
            [
                *(cell.point[a] for a in axes),
                *numbers,
                *(cell.images, cell.different, cell.seeds, cell.published, cell.seconds, cell.missing or ""),
                *(cell.others[name].mean if name in cell.others else "" for name in analysis.study.also),
            ]
        )
    return _csv(rows)


def values_csv(analysis: Analysis) -> str:
    """Return one row per update of a cell (or federation): levels, repetition, which it is, and its metrics."""
    metrics = [analysis.study.metric, *analysis.study.also]
    axes = list(analysis.study.axes)
    rows: list[list[Any]] = [[*axes, "repetition", "federation", "round", "client", *metrics]]
    for cell in analysis.cells:
        levels = [cell.point[a] for a in axes]
        for (repetition, federation, number, client), found in cell.units.items():
            which = ["" if value in (None, -1) else value for value in (number, client)]
            numbers = [found.get(name, "") for name in metrics]
            rows.append([*levels, repetition, federation, *which, *numbers])
    return _csv(rows)


def claims_csv(analysis: Analysis) -> str:
    """Return one row per claim and place: the paired difference, its interval over repetitions, and the outcome."""
    rows: list[list[Any]] = []
    counts = ("n", "updates", "published")
    rows.append(["claim", "where", "metric", "difference", "low", "high", *counts, "outcome", "study", "scale"])
    for claim in analysis.claims:
        d = claim.difference
        numbers = [d.mean, d.low, d.high, d.n, claim.updates, claim.published] if d else [""] * 6
        named = [analysis.study.name, analysis.scale]
        rows.append([claim.text, claim.where, claim.metric, *numbers, claim.outcome, *named])
    return _csv(rows)


def _csv(rows: Iterable[list[Any]]) -> str:
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows([_plain(cell) for cell in row] for row in rows)
    return out.getvalue()


def figure(analysis: Analysis) -> bytes | None:
    """Return a PNG: the metric over the column axis with error bars, a line a row; None where nothing is measured.

    Many rows of several axes get a panel for each combination of all axes but the last.
    """
    plt = pyplot()
    _, across, rows = grid(analysis)
    if not any(cell and cell.value for _, cells in rows for cell in cells):
        return None
    panels: dict[str, list[_Row]] = {}
    for left, cells in rows:
        apart = len(rows) > _LINES and len(left) > 1
        panels.setdefault(", ".join(left[:-1]) if apart else "", []).append((left[-1:] if apart else left, cells))
    wide = 1 if len(panels) == 1 else 2
    size = (7, max(4, 0.2 * len(rows) + 0.4)) if wide == 1 else (9, 2.6 * -(-len(panels) // wide) + 0.4)
    across = [textwrap.fill(name, max(20, _ROW[wide] // len(across))) for name in across]
    drawing, all_axes = plt.subplots(
        -(-len(panels) // wide), wide, figsize=size, layout="constrained", squeeze=False, sharey=True
    )
    for axes, (title, some) in zip(all_axes.flat, panels.items(), strict=False):
        if len(some) > 10:  # as many colours as the usual cycle has
            axes.set_prop_cycle(color=[plt.colormaps["tab20"](i) for i in range(20)])
        _lines(axes, analysis, across, some)
        if _collide(across, _ROW[wide]):
            axes.tick_params(axis="x", rotation=40)
            plt.setp(axes.get_xticklabels(), ha="right", rotation_mode="anchor")
        axes.set_title(title, fontsize="medium")
        axes.set_ylabel(unit_of(analysis.study.metric) if axes in all_axes[:, 0] else "")
        axes.label_outer()
    for axes in all_axes.flat[len(panels) :]:
        axes.set_visible(False)
    marked = {
        name: line for axes in all_axes.flat for line, name in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    if len(marked) > 1:
        beneath = max(map(len, marked)) > _BESIDE  # long names would leave the plot no width
        if beneath:
            drawing.set_figheight(size[1] + 0.2 * len(marked))
        place = "outside lower center" if beneath else "outside right center"
        drawing.legend(list(marked.values()), list(marked), fontsize="small", loc=place)
    return png(drawing, dpi=110)


def _collide(labels: list[str], room: int) -> bool:
    """Return whether two labels, evenly spaced in ``room`` characters, would touch."""
    space, lengths = room / len(labels), [max(map(len, label.splitlines()), default=0) for label in labels]
    return any((a + b) / 2 + 1 > space for a, b in itertools.pairwise(lengths))


def _lines(axes: Any, analysis: Analysis, across: list[str], rows: list[_Row]) -> None:
    """Draw a line a row, crosses where the paper has a number, and dashes where one is claimed."""
    metric, width = analysis.study.metric, 0.7 / max(1, len(rows))
    for i, (left, cells) in enumerate(rows):
        places = [x + (i - (len(rows) - 1) / 2) * width for x in range(len(across))]
        shown = [(x, c.value) for x, c in zip(places, cells, strict=True) if c and c.value]
        if shown:
            axes.errorbar(
                [x for x, _ in shown],
                [v.mean for _, v in shown],
                yerr=[[v.mean - v.low for _, v in shown], [v.high - v.mean for _, v in shown]],
                fmt="o-" if analysis.study.kind == "figure" else "o",
                capsize=4,
                label=", ".join(left) or analysis.study.columns,
            )
        there = [(x, c) for x, c in zip(places, cells, strict=True) if c]
        claimed = [(x, c.others[f"{metric}_claimed"].mean) for x, c in there if f"{metric}_claimed" in c.others]
        for marks, look, name in (
            ([(x, c.published) for x, c in there if c.published is not None], "kx", "paper"),
            (claimed, "k_", "claimed"),
        ):
            if marks:
                axes.plot(*zip(*marks, strict=True), look, label=name)
    axes.set_xticks(range(len(across)), across)
    axes.set_xlim(-0.5, len(across) - 0.5)  # the same in every panel, whatever is missing: only the lowest have labels
    axes.set_xlabel(analysis.study.columns)
    _widen(axes, metric)
    axes.grid(axis="y", alpha=0.3)


def frontier(analysis: Analysis) -> bytes | None:
    """Return a PNG: leakage against accuracy, a point a cell; the area grows with the bytes of an update.

    A cell without an accuracy of its own takes that of the first one that differs in the study's columns alone; then
    each column and each sort of leakage has a panel. None unless the study measures leakage of images and, in the same
    cells or beside them, accuracy and bytes.
    """
    columns, metric = analysis.study.columns, analysis.study.metric
    beside: dict[str, dict[str, Interval]] = {}
    for cell in analysis.cells:
        if set(cell.others) >= _PRICE:
            beside.setdefault(_row(cell, columns), cell.others)
    panels: dict[tuple[str, str], list[tuple[str, Interval, Interval, float]]] = {}
    for cell in analysis.cells:
        own = set(cell.others) >= _PRICE and bool(cell.value)
        paid = cell.others if own else beside.get(_row(cell, columns))
        leaks = {metric: cell.value} | ({} if own else {name: cell.others.get(name) for name in _LEAKS})
        for name, leak in leaks.items():
            if leak and paid:
                where = (name, "") if own else (name, cell.point[columns])
                label = " ".join(cell.point.values()) if own else _row(cell, columns)
                panels.setdefault(where, []).append((label, leak, paid["model_accuracy"], paid["bytes_sent"].mean))
    # where all are alike, as with labels that are granted, there is nothing to see
    panels = {where: points for where, points in panels.items() if len({leak.mean for _, leak, *_ in points}) > 1}
    if not panels or metric not in IMAGE_METRICS:
        return None
    plt = pyplot()
    wide = 1 if len(panels) == 1 else 2
    high = -(-len(panels) // wide)
    drawing, all_axes = plt.subplots(
        high,
        wide,
        figsize=(8 if wide == 1 else 11, 4.5 if high == 1 else 3.2 * high),
        layout="constrained",
        squeeze=False,
        sharex=True,
    )
    names = list(dict.fromkeys(label for points in panels.values() for label, *_ in points))
    colours = plt.colormaps["tab10" if len(names) <= 10 else "tab20"]
    most = max(size for points in panels.values() for *_, size in points)
    for axes, ((name, column), points) in zip(all_axes.flat, panels.items(), strict=False):
        for label, leak, accuracy, size in points:
            x, y, colour = 100 * accuracy.mean, leak.mean, colours(names.index(label) % colours.N)
            across = [[x - 100 * accuracy.low], [100 * accuracy.high - x]]
            up = [[y - leak.low], [leak.high - y]]
            axes.errorbar([x], [y], xerr=across, yerr=up, fmt="none", ecolor=colour, capsize=3, alpha=0.6)
            axes.scatter([x], [y], s=15 + 150 * size / most, color=colour, zorder=3)
        axes.set_title(column, fontsize="medium")
        axes.set_ylabel(unit_of(name))
        axes.tick_params(labelbottom=True)  # under every panel, as the lowest may be missing
        axes.margins(0.15)
        _widen(axes, name)
        axes.grid(alpha=0.3)
    for axes in all_axes.flat[len(panels) :]:
        axes.set_visible(False)
    shown = [100 * accuracy.mean for points in panels.values() for _, _, accuracy, _ in points]
    if np.ptp(all_axes.flat[0].get_xlim()) < 10:
        all_axes.flat[0].set_xlim(*limits(shown, 10, 100))
    drawing.supxlabel("held-out accuracy, %; the area of a point grows with the bytes of an update", fontsize="medium")
    dots = [plt.Line2D([], [], marker="o", ls="", color=colours(i % colours.N)) for i in range(len(names))]
    drawing.legend(dots, names, fontsize="small", loc="outside right center")
    return png(drawing, dpi=110)


def _row(cell: Cell, columns: str) -> str:
    """Return a cell's levels but the column's."""
    return " ".join(level for axis, level in cell.point.items() if axis != columns)


def _widen(axes: Any, metric: str) -> None:
    """Show no less than 2 dB on an axis of PSNR: a difference of a hundredth mustn't look like one."""
    if metric == "psnr" and np.ptp(axes.get_ylim()) < LEAST_DB:
        axes.set_ylim(*limits(list(axes.get_ylim()), LEAST_DB))


def page(
    analysis: Analysis,
    drawn: bytes | None,
    points: bytes | None = None,
    suffix: str = "",
    shown: bytes | None = None,
) -> str:
    """Return one self-contained HTML page, in the style of the audits' reports; pictures are PNGs."""
    study = analysis.study
    down, across, rows = grid(analysis)
    if not down:  # one row: its levels read better one below the other
        down, across, rows = [study.columns], [""], [([x], [cell]) for x, cell in zip(across, rows[0][1], strict=True)]
    outcomes = Counter(claim.outcome for claim in analysis.claims)
    pictures = [(drawn, f"{study.title}: {unit_of(study.metric)} by {study.columns}, with 95 % intervals.")]
    pictures += [(points, f"{study.title}: leakage against held-out accuracy.")]
    pictures += [(shown, "What attacks recovered or drew, a row a combination of levels, true images above.")]
    return render(
        "study.html.j2",
        "fedaudit_lab",
        a=analysis,
        severity=_LEVEL,
        outcomes=[(outcome, outcomes[outcome]) for outcome in _LEVEL if outcomes[outcome]],
        states=f"{_states(analysis)} {_draws(analysis)}",
        unit=unit_of(study.metric),
        down=down,
        across=[level or unit_of(study.metric) for level in across],
        body=[(left, [cell_text(study.metric, cell) for cell in cells]) for left, cells in rows],
        pictures=[(base64.b64encode(data).decode(), alt) for data, alt in pictures if data],
        difference=claim_text,
        command=f"fedaudit study run {study.name if study.name in builtin_studies() else 'STUDY.yaml'} "
        f"--scale {analysis.scale} {''.join(f'--set {shlex.quote(o)} ' for o in analysis.overrides)}--out DIR",
        suffix=suffix,
    )


def _states(analysis: Analysis) -> str:
    """Return what the scale changes, and what ``--set`` changed after it: the scale's words don't know of that."""
    states = next((s.states for name, s in analysis.study.scales.items() if name == analysis.scale), "")
    return f"{states} Changed by --set: {', '.join(analysis.overrides)}." if analysis.overrides else states


def _draws(analysis: Analysis) -> str:
    """Return how the examples of the scale's trials are drawn, in a sentence."""
    study, scale = analysis.study, analysis.scale
    once = {name: s.model_copy(update={"repetitions": 1}) for name, s in study.scales.items() if name == scale}
    trials = expand(study.model_copy(update={"scales": once}), scale, overrides=list(analysis.overrides))
    ways = {federation.drawn: None for trial in trials for federation in trial.scenario.federations}
    return f"Clients' examples: {'; or '.join(ways)}."


def grid(analysis: Analysis) -> tuple[list[str], list[str], list[_Row]]:
    """Return the axes that go down, the levels across, and the rows: levels on the left, cells or None."""
    study = analysis.study
    down = [axis for axis in study.axes if axis != study.columns]
    across = [
        level for level in study.axes[study.columns] if any(c.point[study.columns] == level for c in analysis.cells)
    ]
    rows: dict[tuple[str, ...], list[Cell | None]] = {}
    for cell in analysis.cells:
        row = rows.setdefault(tuple(cell.point[a] for a in down), [None] * len(across))
        row[across.index(cell.point[study.columns])] = cell
    return down, across, [(list(left), cells) for left, cells in rows.items()]


def unit_of(name: str) -> str:
    """Return a metric's name as a table's heading or an axis has it."""
    metric = measure(name)
    words = name.replace("_", " ")
    return _UNITS.get(name) or (f"{words}, {metric.unit}" if metric and metric.unit else words)


def counted(cell: Cell) -> str:
    """Return what a cell's n counts: different images (or all, where the rows don't tell) and seeds."""
    seeds = f"{cell.seeds} seed{'s' * (cell.seeds != 1)}"
    if not cell.images:
        return seeds
    images = cell.images if cell.different is None else cell.different
    return f"{images}{' different' * (cell.different is not None)} image{'s' * (images != 1)}, {seeds}"


def cell_text(name: str, cell: Cell | None) -> tuple[str, list[str]]:
    if cell is None:
        return "–", []
    digits = _DIGITS.get(name, 3)
    small = []
    if cell.value:
        v = cell.value
        main = f"{v.mean:.{digits}f}{v.span(f'{{:.{digits}f}}'.format)}"
        small.append(f"n={v.n} ({counted(cell)})")
    else:
        main = "–"
    if cell.published is not None:
        small.append(f"paper {cell.published:g}")
    for other, value in cell.others.items():
        paper = f" (paper {cell.others_published[other]:g})" if other in cell.others_published else ""
        small.append(f"{unit_of(other)}: {value.mean:.{_DIGITS.get(other, 3)}f}{paper}")
    if cell.missing:
        small.append(cell.missing)
    return main, small


def difference_text(name: str, difference: Interval | None) -> str:
    if difference is None:
        return "–"
    d = _DIGITS.get(name, 3)
    return f"{difference.mean:+.{d}f}{difference.span(f'{{:+.{d}f}}'.format)}, n={difference.n}"


def claim_text(claim: Claim) -> str:
    """Return a claim's difference, its interval, of how many updates where n counts fewer, and the paper's."""
    text = difference_text(claim.metric, claim.difference)
    if claim.difference and claim.updates > claim.difference.n:
        text += f" ({claim.updates} updates)"
    if claim.published is not None:
        text += f"; paper {claim.published:+.{_DIGITS.get(claim.metric, 3)}f}"
    return text
