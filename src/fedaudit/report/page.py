"""The report page: what the template needs, worked out from one AuditResult and the images beside it."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from fedaudit.modalities import ExampleKind, example_kind, fitting_kind
from fedaudit.report import epsilon, exposure, figures, frontier, recovered_text  # noqa: F401
from fedaudit.report import label_sets as _label_sets  # noqa: F401
from fedaudit.report import rows as _rows  # noqa: F401
from fedaudit.report.advice import advice, command
from fedaudit.report.conclusion import (
    SEVERITY,
    UPDATES,
    comparison_text,
    control_text,
    different_controls,
    headline,
    setting_text,
    threshold_text,
    uncontrolled,
)
from fedaudit.report.frontier import defence_tables, strongest
from fedaudit.report.images import after_move, identified, label_of, victims_of
from fedaudit.report.mapping import assessment
from fedaudit.report.panels import ImageReader, PageImage, sections
from fedaudit.report.style import render
from fedaudit.report.wording import client_of, count, number, rounds_of, shared, short
from fedaudit.results import (
    AttackSummary,
    AuditResult,
    CeilingResult,
    Chart,
    FederationRecord,
    FindingResult,
    Line,
    Threshold,
    Verdict,
    overall,
    with_images,
)
from fedaudit.results.glossary import terms
from fedaudit.utils.errors import BadInput

CHARTS = 8  # figures about single findings, a federation
_SHOWN = 3  # pairs of known examples, of a margin


class Plots(NamedTuple):
    """Figures that share their lines: title and drawing of each, then name and swatch of each line."""

    drawn: list[tuple[str, str]]
    legend: list[tuple[str, str]]


def write_report(result: AuditResult, folder: Path, path: Path) -> None:
    """Write the report of ``result`` to ``path``: one HTML page that needs no other file and no network.

    Relative paths of images begin in ``folder``; every image must be there, be a PNG and lie inside of it.
    """
    path.write_text(render_report(result, folder), encoding="utf-8")


def render_report(result: AuditResult, folder: Path) -> str:
    """Return the page that ``write_report`` writes, with the same arguments and errors."""
    images = ImageReader(folder)
    named = [s.federation for s in result.summaries] + [f.federation for f in result.findings]
    for name in named + [c.federation for c in result.comparisons]:
        if name not in {f.name for f in result.federations}:
            raise BadInput(f"results: federation '{name}' is not among the federations; repeat the audit")
    chapters = [_chapter(result, record, images, i) for i, record in enumerate(result.federations, start=1)]
    shown = sections(result, images)
    left_out = [(f.attack, f.federation, f.reason or "no reason given") for f in result.findings if f.status != "done"]
    known = {told[:2] for told in left_out}
    unrun = [s for s in result.summaries if s.verdict == "not applicable" and (s.attack, s.federation) not in known]
    left_out += [(s.attack, s.federation, s.verdict_text) for s in unrun]
    image_rows, other_rows = with_images(result.summaries)
    return render(
        "report.html.j2",
        *dict.fromkeys(section.about.package for section in shown),
        made_by=result.fedaudit_version,
        severity=SEVERITY,
        result=result,
        chapters=chapters,
        headline=headline(result),
        limits=[(t.outcome, threshold_text(t)) for t in result.thresholds],
        controls=[
            (c, control_text(c), [(images[i.true_image], images[i.reconstruction]) for i in c.images[:1]])
            for c in different_controls(result)
        ],
        uncontrolled=uncontrolled(result),
        margins=[
            (m, [(images[i.true_image], images[i.reconstruction], i.psnr) for i in m.pictures[:_SHOWN]])
            for m in result.margins
            if m.steps
        ],
        ceilings=[
            (
                c,
                _ceiling_plot(c, i),
                [
                    (e, images[e.true_image], images[e.open_image], [(o.precision, images[o.path]) for o in e.others])
                    for e in c.examples
                    if e.true_image and e.open_image
                ],
            )
            for i, c in enumerate(result.ceilings)
        ],
        kinds=UPDATES,
        update_kinds={f.name: f.update_kind for f in result.federations},
        measured=any(s.psnr for s in result.summaries),
        identified=identified,
        after_move=after_move,
        rounds_of=rounds_of,
        client_of=client_of,
        with_images=image_rows,
        others=other_rows,
        given={(f.federation, f.attack) for f in result.findings if f.label_source == "given"},
        label_of=lambda label: label_of(result, label),
        who=result.adversary.who,
        glossary=terms(),
        **_frontier(result),
        defence_tables=defence_tables(result),
        advice=[(item, command(result, item.change)) for item in advice(result)],
        refused=shared(left_out),
        notes=shared((f.attack, f.federation, note) for f in result.findings for note in f.notes),
        seed=result.scenario.get("seed"),
        repeat=_command(result.repeat, result.thresholds),
        scenario=yaml.safe_dump(result.scenario, sort_keys=False, allow_unicode=True),
        things=_kind(result).plural,
        pictured=_kind(result).plural if len(_kind(result).axes) > 1 else "images",
        drawing=_kind(result).drawing,
        sections=shown,
        assessment=assessment(result),
    )


def _frontier(result: AuditResult) -> dict[str, Any]:
    """Return the rows of the comparison of defences, if there is one, and its figure."""
    rows = frontier.prices(result) if frontier.worth_comparing(result) else []
    by = frontier.scale(result)
    drawing = frontier.draw(rows, by)
    _, first = frontier.ORDERS[frontier.order(result)]
    learning, taken = frontier.accuracy(result), frontier.taken(result)
    return {
        "prices": rows,
        "price_scale": by,
        "price_order": first,
        "certificates": epsilon.certificates(result),
        "frontier": figures.to_svg(drawing, "frontier-", frontier.alt(rows, by)) if drawing else None,
        "barred": frontier.barred(rows),
        "learning": _plots([learning], "accuracy") if learning else None,
        "taken": _plots(taken, "taken") if taken else None,
        "histories": [(f.name, f.history) for f in result.federations if f.history and f.history.accuracy],
    }


def _plots(charts: list[Chart], prefix: str) -> Plots:
    """Return ``charts`` drawn with one look a line, and the legend of these lines."""
    lines = list(dict.fromkeys(line.name for chart in charts for line in chart.lines))
    drawn = [
        (c.title, figures.to_svg(figures.draw_chart(c, lines), f"{prefix}-{i}-", _chart_alt(c)))
        for i, c in enumerate(charts)
    ]
    legend = [(n, figures.to_svg(figures.draw_swatch(i), f"{prefix}-l{i}-", None)) for i, n in enumerate(lines)]
    return Plots(drawn, legend)


def _ceiling_plot(ceiling: CeilingResult, index: int) -> str | None:
    """Return the drawing of a ceiling over precisions; None: there is none."""
    if not ceiling.curve or ceiling.guess is None:
        return None
    x = [point.precision for point in ceiling.curve]
    chart = Chart(
        title=ceiling.federation,
        caption="",
        x_label="precision to which the update is known",
        y_label=ceiling.unit,
        lines=[
            Line(name="at least", x=x, y=[point.low for point in ceiling.curve]),
            *[Line(name="at most", x=x, y=[point.high for point in ceiling.curve])]
            * any(p.high > p.low for p in ceiling.curve),
            Line(name="a guess", x=[x[0]], y=[ceiling.guess]),
        ],
    )
    return figures.to_svg(
        figures.draw_chart(chart, [line.name for line in chart.lines], decades=True),
        f"ceiling-{index}-",
        _chart_alt(chart),
    )


def _kind(result: AuditResult) -> ExampleKind:
    return example_kind(result.data.kind) if result.data.kind else fitting_kind(tuple(result.data.input_shape))


def _chapter(result: AuditResult, record: FederationRecord, images: ImageReader, index: int) -> dict[str, Any]:
    """Return everything that the page says about one federation."""
    summaries = [s for s in result.summaries if s.federation == record.name]
    findings = [f for f in result.findings if f.federation == record.name]
    best = strongest(result, summaries)
    reconstructions = [
        (v, c)
        for v in victims_of(result, record.name, images).all
        if best and (c := v.reconstructions.get(best.attack))
    ]
    reconstructions.sort(key=lambda pair: pair[1].scores.psnr)
    spread_rows = figures.spreads(result, record.name)
    charts = [c.model_copy(update={"title": f"{f.attack}, {c.title}"}) for f in findings for c in f.charts]
    plots = _plots(charts[:CHARTS], f"f{index}-c")
    curves: dict[str, str] = {}
    legend: dict[str, str] = {}
    banded = False
    for quantity in figures.AXIS_LABELS:
        series = figures.curve_series(result, record.name, quantity)
        if series:
            figure = figures.draw_curves(series, quantity)
            text = _curve_alt(series, quantity, record.name)
            curves[quantity] = figures.to_svg(figure, f"f{index}-{quantity}-", text)
        banded |= any(line.updates > 1 for line in series)
        for line in series:
            legend[line.attack] = figures.to_svg(figures.draw_swatch(line.style), f"f{index}-l{line.style}-", None)
    spread = None
    if spread_rows:
        spread = figures.to_svg(figures.draw_spread(spread_rows), f"f{index}-spread-", _spread_alt(spread_rows))
    return {
        "record": record,
        "summaries": summaries,
        "settings": list(dict.fromkeys(setting_text(result, s) for s in summaries if s.setting)),
        "strongest": best,
        "drawn": _drawn(best, findings, images),
        "others": _others(best, summaries),
        "typical": reconstructions[(len(reconstructions) - 1) // 2] if reconstructions else None,
        "comparisons": [(c, comparison_text(c)) for c in result.comparisons if c.federation == record.name],
        "candidates": max((i.candidates for f in findings for i in f.images), default=None),
        "curves": curves,
        "legend": list(legend.items()),
        "banded": banded,
        "spread": spread,
        "image_rows": [(f"{f.attack}, {s.title}", images[s.path]) for f in findings for s in f.image_rows],
        "charts": plots.drawn,
        "captions": list(dict.fromkeys(c.caption for c in charts[:CHARTS])),
        "chart_lines": plots.legend,
        "more_charts": max(0, len(charts) - CHARTS),
    }


def _drawn(
    best: AttackSummary | None, findings: list[FindingResult], images: ImageReader
) -> list[tuple[str, PageImage]]:
    """Return what a malicious client generated last, beside real images of the class, for the federation's card."""
    sheets = next((f.image_rows for f in findings if best and f.attack == best.attack and f.image_rows), [])
    return [(s.title, images[s.path]) for s in ([sheets[0], sheets[-1]] if len(sheets) > 1 else sheets)]


def _others(best: AttackSummary | None, summaries: list[AttackSummary]) -> list[tuple[str, Verdict]]:
    """Return what else was attacked in the federation, with its verdict."""
    kinds = dict.fromkeys(s.kind for s in summaries if s.kind and best and s.kind != best.kind)
    return [(kind.replace("-", " "), overall([s for s in summaries if s.kind == kind])) for kind in kinds if kind]


def _chart_alt(chart: Chart) -> str:
    parts = [
        f"{line.name} {short(line.y[0])} at {chart.x_label} {line.x[0]:g} and {short(line.y[-1])} at {line.x[-1]:g}"
        for line in chart.lines
        if line.x
    ]
    return f"{chart.title}: {chart.y_label}: {'; '.join(parts)}."


def _curve_alt(series: list[figures.Series], quantity: figures.Quantity, federation: str) -> str:
    name, digits = ("PSNR in dB", 1) if quantity == "psnr" else ("Objective", 4)
    lines = [
        f"{s.attack} from {number(s.mean[0], digits)} at iteration {count(s.iterations[0])} "
        f"to {number(s.mean[-1], digits)} at iteration {count(s.iterations[-1])}"
        for s in series
    ]
    return f"{name} against iterations on {federation}: {'; '.join(lines)}."


def _spread_alt(rows: list[figures.Spread]) -> str:
    lines = [
        f"{r.attack} from {number(min(r.psnr), 1)} to {number(max(r.psnr), 1)} dB, mean {number(r.mean, 1)}"
        for r in rows
    ]
    return f"PSNR of every image by attack: {'; '.join(lines)}."


def _command(repeat: str, thresholds: list[Threshold]) -> str:
    limits = [
        f" --fail-on {t.verdict}"
        if t.limit is None
        else f" {'--fail-below' if t.below else '--fail-above'} {shlex.quote(f'{t.metric}={t.limit:g}')}"
        for t in thresholds
    ]
    return repeat + "".join(limits)
