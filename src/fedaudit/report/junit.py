"""JUnit XML, which CI systems list as tests: a test case for each limit, and one for each attack on each federation.

Only limits fail. One that could not be tested is an error, never green. An attack whose verdict stands passes, whatever
it found, with the verdict as its output: limits say what is acceptable. An attack that is inconclusive, or could not be
run, is skipped.
"""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET

from fedaudit.report.conclusion import limit_name, message_of, tested, threshold_text
from fedaudit.results import AttackSummary, AuditResult, Threshold

# What XML 1.0 has no way to write.
_FORBIDDEN = re.compile("[^\t\n\r -\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def render(result: AuditResult) -> str:
    """Return ``result`` as JUnit XML."""
    root = ET.Element("testsuites", name=_clean(f"fedaudit: {result.name}"))
    suites = [
        ("limits", [_of_limit(t) for t in result.thresholds]),
        ("attacks", [_of_summary(result, s) for s in result.summaries]),
    ]
    for name, cases in suites:
        if cases:
            suite = ET.SubElement(root, "testsuite", {"name": f"fedaudit {name}", **_counts(cases)})
            if result.timing.started:
                suite.set("timestamp", result.timing.started.removesuffix("+00:00"))
            suite.extend(cases)
    for key, value in _counts([case for _, cases in suites for case in cases]).items():
        if key != "skipped":  # the schemas have it of suites only
            root.set(key, value)
    ET.indent(root)
    return f'<?xml version="1.0" encoding="utf-8"?>\n{ET.tostring(root, encoding="unicode")}\n'


def _counts(cases: list[ET.Element]) -> dict[str, str]:
    def having(tag: str) -> str:
        return str(sum(case.find(tag) is not None for case in cases))

    seconds = sum(float(case.get("time", "0")) for case in cases)
    return {
        "tests": str(len(cases)),
        "failures": having("failure"),
        "errors": having("error"),
        "skipped": having("skipped"),
        "time": f"{seconds:.3f}",
    }


def _of_limit(threshold: Threshold) -> ET.Element:
    case = ET.Element("testcase", classname="fedaudit.limits", name=_clean(limit_name(threshold)), time="0.000")
    said = _clean(threshold_text(threshold))
    if threshold.outcome == "fail":
        ET.SubElement(case, "failure", message=said, type="exceeded").text = said
    elif threshold.outcome == "not tested":
        ET.SubElement(case, "error", message=said, type="not tested").text = said
    else:
        ET.SubElement(case, "system-out").text = said
    return case


def _of_summary(result: AuditResult, summary: AttackSummary) -> ET.Element:
    seconds = summary.timing.seconds if summary.timing else 0.0
    case = ET.Element(
        "testcase",
        classname=_clean(f"fedaudit.{summary.federation}"),
        name=_clean(summary.attack),
        time=f"{seconds:.3f}",
    )
    said = _clean(message_of(result, summary))
    if summary.verdict in ("inconclusive", "not applicable"):
        ET.SubElement(case, "skipped", message=said)
    where = "" if summary.verdict == "not applicable" else f"\n{_clean(tested(result, summary))}"
    ET.SubElement(case, "system-out").text = f"{summary.verdict}: {said}{where}"
    return case


def _clean(text: str) -> str:
    return _FORBIDDEN.sub("\ufffd", text)
