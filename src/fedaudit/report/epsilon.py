"""The report's part on ε: what is claimed, what canaries demonstrate, and the room between, as a picture."""

from __future__ import annotations

from typing import Any

from fedaudit.epsilon.certificate import in_words
from fedaudit.report import figures
from fedaudit.report.panels import PANELS, Panel
from fedaudit.report.wording import number, short
from fedaudit.results import AuditResult, Chart, EpsilonResult, HistoryRecord, Line

METHODS = {
    "clopper_pearson": "Clopper–Pearson",
    "clopper_pearson_fdp": "Clopper–Pearson, f-DP",
    "one_run": "one run",
    "one_run_fdp": "one run, f-DP",
    "gaussian_estimate": "Gaussian fit",
}
_LINES = ("whoever sent least often", "the median client", "whoever sent most often")


def epsilon_chapters(result: AuditResult) -> list[dict[str, Any]]:
    """Return a chapter for every federation in which ε was audited."""
    courses = {federation.name: federation.history for federation in result.federations}
    return [
        _chapter(finding.federation, finding.epsilon, courses.get(finding.federation), i)
        for i, finding in enumerate(result.findings)
        if finding.epsilon is not None
    ]


def certificates(result: AuditResult) -> list[str]:
    """Return what the noise of each federation rules out, a line each; of those without noise one together."""
    told: dict[str, list[str]] = {}
    for one in result.federations:
        if one.history is not None:
            told.setdefault(certificate_of(one.history), []).append(one.name)
    return [f"{', '.join(names)}: {text}" for text, names in told.items() if text]


def certificate_of(course: HistoryRecord) -> str:
    """Return what a federation's noise rules out, in words; empty where an older version didn't say."""
    if course.certificate is None:
        return "" if course.epsilon else in_words(0, None)
    who = "nobody who sees global models alone" if course.certificate.central else "nobody"
    return in_words(course.certificate.candidates, course.certificate.success, who)


def spread_of(course: HistoryRecord) -> str:
    """Return the ε of the most exposed client beside the median one's, by Rényi; empty where all have spent the same.

    The certificate holds for every record, so the worst is what it says, and there is no mean beside it.
    """
    if not course.epsilon_of_clients:
        return ""
    _, median, most = course.epsilon_of_clients[-1]
    return "" if most == median else f"; whoever sent most often {short(most)}, the median client {short(median)}"


def _chapter(federation: str, found: EpsilonResult, course: HistoryRecord | None, index: int) -> dict[str, Any]:
    """Return the numbers, their picture, a row a method, and how ε adds up over rounds, where that is known."""
    prefix = f"e{index}-"
    chart = composition(course) if course else None
    names = [line.name for line in chart.lines] if chart else []
    drawn = figures.to_svg(figures.draw_chart(chart, names), f"{prefix}c-", _composed(chart)) if chart else None
    return {
        "federation": federation,
        "found": found,
        "certificate": certificate_of(course) if course else "",
        "picture": figures.to_svg(
            figures.draw_epsilon(epsilon_rows(found), found.claimed), f"{prefix}r-", alt(federation, found)
        ),
        "rows": [
            (o.observer, o.covered, b, METHODS[b.method]) for o in found.observers for b in (*o.bounds, *o.estimates)
        ],
        "composition": (chart.title, drawn) if chart and drawn else None,
        "legend": [(n, figures.to_svg(figures.draw_swatch(i), f"{prefix}l{i}-", None)) for i, n in enumerate(names)],
    }


def epsilon_rows(found: EpsilonResult) -> list[figures.EpsilonRow]:
    """Return the picture's rows: what is demonstrated and estimated by each observer."""
    rows = []
    for one in found.observers:
        estimate = max((e.epsilon for e in one.estimates), default=None)
        rows.append(figures.EpsilonRow(one.observer, one.covered, one.demonstrated, estimate))
    return rows


def alt(federation: str, found: EpsilonResult) -> str:
    """Return the picture in words."""
    claim = "nothing is claimed" if found.claimed is None else f"ε {number(found.claimed, 2)} is claimed"
    parts = [
        f"{one.who}: {'none' if one.demonstrated is None else number(one.demonstrated, 2)} demonstrated"
        + ("" if one.covered or found.claimed is None else ", not covered by the claim")
        for one in found.observers
    ]
    return f"ε of {federation}: {claim}; {'; '.join(parts)}."


def composition(course: HistoryRecord) -> Chart | None:
    """Return how ε adds up over rounds, for the clients that sent least, typically and most often; None: not known."""
    if len(course.epsilon) < 2:
        return None
    spread = course.epsilon_of_clients
    x = [float(i + 1) for i in range(len(course.epsilon))]
    if not spread or all(row[0] == row[2] for row in spread):
        lines = [Line(name="every client", x=x, y=course.epsilon)]
    else:
        lines = [Line(name=name, x=x, y=[row[i] for row in spread]) for i, name in enumerate(_LINES)]
    by = "add/remove" if course.epsilon_adjacency == "add-remove" else "replacement"
    at = "" if course.epsilon_delta is None else f", δ = {course.epsilon_delta:g}"
    return Chart(title=f"ε spent (Rényi, {by}{at})", caption="", x_label="rounds", y_label="ε", lines=lines)


def _composed(chart: Chart) -> str:
    parts = [
        f"{line.name} {number(line.y[0], 2)} after one round, {number(line.y[-1], 2)} at the end"
        for line in chart.lines
    ]
    return f"{chart.title}: {'; '.join(parts)}."


PANELS["epsilon"] = Panel(
    "Which ε is real",
    "parts/epsilon.html.j2",
    lambda result, images: epsilon_chapters(result),  # noqa: ARG005
    after_results=True,
)
