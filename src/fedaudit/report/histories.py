"""How federations went, round by round, as charts: their accuracy, and whose updates the server took."""

from __future__ import annotations

from fedaudit.results import AuditResult, Chart, FederationRecord, Line

_POINTS = 30  # of a chart of the updates that were taken; more rounds than that are averaged in groups


def accuracy(result: AuditResult) -> Chart | None:
    """Return held-out accuracy by round, a line a federation; None where it was measured less than twice."""
    lines = [
        Line(name=f.name, x=[float(r) for r in f.course.rounds], y=[100 * a for a in f.course.accuracy])
        for f in result.federations
        if f.course and len(f.course.rounds) > 1
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
    history = federation.course
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
