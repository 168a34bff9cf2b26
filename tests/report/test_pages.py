"""Every page that we write, in a browser: accessible in light, dark and narrow, no number hidden, two pages to file."""

from __future__ import annotations

import functools
import io
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import fedaudit
from fedaudit.data.structure import structure_of
from fedaudit.guard.page import write_site
from fedaudit.guard.statement import guarded as guarded_part
from fedaudit.report import figures
from fedaudit.report.join import join_audits, write_joined
from fedaudit.report.page import write_report
from fedaudit.report.share import share
from fedaudit.report.statement import audited as audited_part
from fedaudit.report.statement import statement, write_statement
from fedaudit.report.structure import write_structure
from fedaudit.report.style import _labelled
from fedaudit_lab.bench.page import render_bench
from fedaudit_lab.studies.analysis import analyse
from fedaudit_lab.studies.drawing import write
from tests.guard.test_page import hundred
from tests.lab.test_studies import rows_of, tiny
from tests.report.report_cases import CASES, sample

# ---------------------------------------------------------------- one page of each kind, after little work

DIGITS = {"data": {"name": "digits", "split": "train"}, "model": {"name": "mlp", "width": 16}}
FEDAVG = {"algorithm": "fedavg", "clients": 3, "rounds": 4, "examples": 60, "batch_size": 10, "local_epochs": 1}
DP = [{"name": "plain"}, {"name": "dp", "client_defence": {"name": "dp", "clip": 1.0, "noise": 1.0, "epsilon": None}}]
AUDITS: dict[str, dict[str, Any]] = {
    "membership": DIGITS
    | {
        "federations": [FEDAVG | {"name": "f", "learning_rate": 0.1}],
        "defences": DP,
        "threat": {"target_records": 40},
        "attacks": ["loss-threshold", "gradient-norm"],
        "evaluation": {"accuracy_every": 2},
    },
    "local model": {
        "data": {"name": "diabetes", "split": "train"},
        "model": {"name": "linear"},
        "federations": [FEDAVG | {"name": "f", "rounds": 40, "clients_per_round": 1, "learning_rate": 0.05}],
        "threat": {"adversary": "eavesdropper"},
        "attacks": ["local-model-exact", "last-update"],
    },
    "rows of a table": {
        "data": {"name": "diabetes"},
        "model": {"name": "mlp", "width": 16},
        "federations": [{"name": "f", "clients": 2, "examples": 4, "batch_size": 2}],
        "attacks": [{"name": "tableak", "iterations": 60, "restarts": 3}],
    },
    "malicious client": {
        "data": {"name": "digits", "split": "train"},
        "model": {"name": "convnet-small", "width": 4, "initialisation": "he"},
        "federations": [
            {
                **FEDAVG,
                "name": "f",
                "clients": 10,
                "learning_rate": 0.1,
                "examples": 100,
                "partition": {"scheme": "label-to-clients", "m": 5},
                "malicious": {"name": "gan", "target": 3, "missing_classes": [3], "start": 1, "every": 2},
            }
        ],
        "defences": [{"aggregator": "fedavg"}, {"aggregator": "inferguard"}],
        "threat": {"adversary": "client"},
        "attacks": ["gan"],
        "evaluation": {"accuracy_every": 2},
    },
    "defences": {
        "data": {"name": "photos", "image_size": 16},
        "model": {"name": "convnet-small", "width": 4},
        "federations": [{"name": "f", "clients": 3, "rounds": 2, "batch_size": 1, "learning_rate": 0.05}],
        "defences": [*DP, {"name": "ffl", "client_defence": {"name": "ffl", "ratio": 0.4}}],
        "attacks": [{"name": "invg", "iterations": 4}, {"name": "agic", "iterations": 4}],
        "evaluation": {"max_updates": 2, "accuracy_every": 1},
    },
}
STEP = {"model": "lenet", "images": 1, "way": "gradient", "cpu_ms": 4.4, "cpu_ms_min": 4.3, "cpu_ms_max": 4.5}
STEP |= {"wall_ms": 4.4, "agreement": 1.0, "gflops": 2.3, "matmul_gflops": 93.0, "peak_mib": None}
TIMES = {"threads": 1, "torch": "2.13.0"}
GOALS: dict[str, Any] = {"model": "lenet", "images": 2, "data": "photos"}
GOALS |= {"speedups": [{"goal": "20.0", "peer": "breaching", "ratio": 3.1, "reached": False}]}
GOALS |= {
    "tools": [{"tool": "fedaudit", "seconds": {"20.0": 1.6}, "iterations": 340, "cpu_seconds": 3.5, "psnr": 25.2}]
}
RECORDED = {"model": "lenet", "parameters": 9, "clients": 1, "steps": 3, "ratio": 1.02, "cpu_ratio": 1.01}
RECORDED |= {"without": [2.0], "with": [2.04], "interval": (0.99, 1.05)}
LONG = {
    "model": "resnet18",
    "parameters": 11,
    "rounds": 2,
    "clients": 10,
    "bytes": 10**9,
    "bytes_of_100_rounds": 10**11,
}
LONG |= {"seconds": 4.2, "peak_mib": 390.0, "peak_mib_first_round": None}
BENCH: dict[str, dict[str, Any]] = {
    "inversion": TIMES
    | {"repetitions": 5, "baseline": "reference", "ours": "first-order", "geomean_speedup": 2.2}
    | {"steps": [STEP | {"tool": "reference", "speedup": 1.0}, STEP | {"tool": "first-order", "speedup": 2.5}]},
    "picture": GOALS,
    "simulator": {"model": "lenet", "clients": 4, "rounds": 2}
    | {"evaluation": {"findings": 8, "images": 32, "seconds": 0.96}}
    | {"simulators": [{"tool": "us", "updates": 8, "seconds": 0.3, "updates_per_second": 24.7, "start_seconds": 0.0}]},
    "aggregators": TIMES
    | {
        "rows": [
            {
                "n": n,
                "d": 10_000,
                "rule": "krum",
                "tool": "us",
                "why": None,
                "seconds": 2e-5,
                "speedup": 1,
                "peak_mib": 3,
            }
            for n in (10, 20)
        ]
    },
    "local-model": {"slope": 1.3}
    | {"rows": [{"d": 10, "rounds": 11, "cpu_seconds": 0.0003, "condition": 26.5, "relative_error": 7e-15}]},
    "malicious": {"data": "digits", "examples": 30, "workers_speedup": 1.4}
    | {"rows": [{"clients": 4, "workers": 1, "rounds": 3, "seconds_a_round": 0.4}]},
    "recorder": {"pairs": 1, "batch": 32, "rows": [RECORDED]} | {"long": LONG},
}


def audited(scenario: dict[str, Any], folder: Path) -> Path:
    fedaudit.audit({"name": "page", **scenario}, out=folder, workers=1, progress=False)
    return folder / "report.html"


def reported(case: str, folder: Path) -> Path:
    write_report(CASES[case](folder), folder, folder / "report.html")
    return folder / "report.html"


def benched(folder: Path) -> Path:
    (folder / "bench.html").write_text(render_bench(BENCH), encoding="utf-8")
    return folder / "bench.html"


def studied(folder: Path) -> Path:
    write(analyse(tiny(), "cpu", rows_of([20, 21, 22], [10, 11, 13])), folder)
    return folder / "result.html"


def shared(folder: Path) -> Path:
    reported("default", folder / "audit")
    CASES["default"](folder / "audit").save(folder / "audit" / "results.json")
    share(folder / "audit", folder / "lyon")
    return folder / "lyon" / "report.html"


def joined(folder: Path) -> Path:
    sites = {}
    for name in ("default", "exceeded"):
        sites[f"clinic-of-{name}"] = (CASES[name](folder / name), False)
    write_joined(join_audits(sites), folder)
    return folder / "joined.html"


def guarded(folder: Path) -> Path:
    write_site(hundred(), folder)
    return folder / "guard.html"


def stated(folder: Path) -> Path:
    guarded(folder)
    (folder / "guard.jsonl").write_text("".join(f"{one.model_dump_json()}\n" for one in hundred()))
    CASES["exceeded"](folder / "audit").save(folder / "audit" / "results.json")
    parts = [audited_part(folder / "audit"), guarded_part(folder)]
    write_statement(statement(parts, recipient="the server"), folder)
    return folder / "statement.html"


def looked_at(folder: Path) -> Path:
    table = folder / "people.csv"
    table.write_text("age,sex\n" + "".join(f"{20 + i % 7},{'fm'[i % 2]}\n" for i in range(30)) + "99,f\n")
    write_structure(structure_of([table]), folder)
    return folder / "check-data.html"


# Pages of one part each, which needn't be filed.
SINGLE: dict[str, Callable[[Path], Path]] = {"joined": joined, "guard": guarded, "statement": stated, "data": looked_at}
PAGES: dict[str, Callable[[Path], Path]] = {
    **{name: functools.partial(audited, scenario) for name, scenario in AUDITS.items()},
    **{name: functools.partial(reported, name) for name in ("default", "exceeded", "refused", "empty")},
    "shared": shared,
    "bench": benched,
    "study": studied,
}

# ---------------------------------------------------------------- in the browser

# Texts with a digit that no reader sees: without a box, beyond the window, or cut by an element around them.
# A guard's picture of rounds may be scrolled.
HIDDEN = """() => {
  const width = document.documentElement.clientWidth, found = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const node = walker.currentNode, range = document.createRange();
    if (!/\\d/.test(node.data) || node.parentElement.closest("thead, .hidden, .skip, style, .rounds")) continue;
    range.selectNodeContents(node);
    const boxes = [...range.getClientRects()];
    let right = width;
    for (let e = node.parentElement; e; e = e.parentElement) {
      if (getComputedStyle(e).overflowX !== "visible") right = Math.min(right, e.getBoundingClientRect().right);
    }
    if (!boxes.length || boxes.some(box => box.right > right + 1 || box.left < -1)) found.push(node.data.trim());
  }
  return found;
}"""
LOOKS = {"light": ("light", 1280), "dark": ("dark", 1280), "narrow": ("light", 390)}


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    driver = pytest.importorskip("playwright.sync_api", reason="no playwright: pip install 'PATH_OF_THE_CLONE[pages]'")
    pytest.importorskip("axe_playwright_python", reason="no axe: pip install 'PATH_OF_THE_CLONE[pages]'")
    program = shutil.which("chromium") or shutil.which("chromium-browser")
    if program is None:
        pytest.skip("no Chromium here: make chromium (Debian's, as root)")
    with driver.sync_playwright() as playwright:
        # Chromium refuses its sandbox to root, which CI is; the pages are our own.
        sandbox = [] if os.getuid() else ["--no-sandbox"]
        launched = playwright.chromium.launch(executable_path=program, args=sandbox)
        yield launched
        launched.close()


def opened(browser: Any, page: Path, look: str) -> Any:
    scheme, width = LOOKS[look]
    tab = browser.new_page(color_scheme=scheme, viewport={"width": width, "height": 900})
    tab.goto(page.as_uri())
    tab.evaluate("document.querySelectorAll('details').forEach(e => e.open = true)")
    return tab


@pytest.mark.slow
@pytest.mark.parametrize("kind", PAGES)
def test_a_page_is_accessible_hides_no_number_and_can_be_filed(kind: str, browser: Any, tmp_path: Path) -> None:
    page = PAGES[kind](tmp_path)
    check_looks(browser, page)
    tab = browser.new_page()
    tab.goto(page.as_uri())
    sheets = printed(tab.pdf(prefer_css_page_size=True))
    tab.close()
    assert titles(page)[-1] in "".join(sheets), "the last part isn't printed"
    filed, rest = "".join(sheets[:2]), "".join(sheets[2:])
    assert all(title in filed for title in titles(page, "answer", "results", "setting"))
    assert not [title for title in titles(page, "setting") if title in rest.splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize("kind", SINGLE)
def test_a_page_of_sites_or_rounds_is_accessible_and_hides_no_number(kind: str, browser: Any, tmp_path: Path) -> None:
    page = SINGLE[kind](tmp_path)
    check_looks(browser, page)
    if kind == "statement":  # one sheet
        tab = browser.new_page()
        tab.goto(page.as_uri())
        assert len(printed(tab.pdf(prefer_css_page_size=True))) == 1
        tab.close()


def check_looks(browser: Any, page: Path) -> None:
    from axe_playwright_python.sync_playwright import Axe

    for look in LOOKS:
        tab = opened(browser, page, look)
        violations = {v["id"]: [n["html"][:200] for n in v["nodes"]] for v in Axe().run(tab).response["violations"]}
        assert violations == {}, look
        assert tab.evaluate(HIDDEN) == [], look
        assert tab.evaluate("document.documentElement.scrollWidth") <= LOOKS[look][1], look
        tab.close()


@pytest.mark.slow
def test_paper_has_every_limit_and_the_rules_of_verdicts(browser: Any, tmp_path: Path) -> None:
    result = sample(tmp_path).model_copy(update={"out_of_scope": [f"question {i}" for i in range(9)]})
    write_report(result, tmp_path, tmp_path / "report.html")
    tab = browser.new_page()
    tab.goto((tmp_path / "report.html").as_uri())
    words = " ".join(" ".join(printed(tab.pdf(prefer_css_page_size=True))).split())
    tab.close()
    assert [i for i in range(9) if f"Question {i}" not in words] == []
    assert [rule for rule in result.verdict_rules if " ".join(rule[1:].split()[-3:]) not in words] == []


def printed(pdf: bytes) -> list[str]:
    reader = pytest.importorskip("pypdf", reason="no pypdf: pip install 'PATH_OF_THE_CLONE[pages]'").PdfReader(
        io.BytesIO(pdf)
    )
    return [sheet.extract_text() for sheet in reader.pages]


def titles(page: Path, *parts: str) -> list[str]:
    """Return the headings of the parts with these ids, or all parts' headings; first words only, for lines break."""
    html = page.read_text(encoding="utf-8")
    found = [piece.partition("</h2>")[0] for piece in html.split("<h2 id=")[1:]]
    named = [(text.partition("-h")[0].strip('"'), text.partition(">")[2].split("<")[0]) for text in found]
    return [text for name, text in named if name in parts or not parts]


@pytest.mark.slow
def test_a_hidden_number_is_noticed(browser: Any) -> None:
    tab = browser.new_page(viewport={"width": 390, "height": 900})
    wide = "<table style='width: 900px'><tr><td>1<td style='text-align: right'>23.4</table>"
    tab.set_content(f"<div style='overflow-x: auto'>{wide}</div><p>5</p><p style='display: none'>6</p>")
    assert tab.evaluate(HIDDEN) == ["23.4", "6"]
    tab.close()


# ---------------------------------------------------------------- without one


def test_every_cell_carries_the_heading_of_its_column() -> None:
    table = (
        "<table><thead><tr><th>Attack</th><th>PSNR <small>dB</small></th><th>n &lt; 9</th></tr></thead><tbody>"
        '<tr><th colspan="3">all</th></tr><tr><th rowspan="2">a</th><td class="n">1</td><td>2</td></tr>'
        "<tr><td>3</td><td>4</td></tr><tr><th>b</th><td>5</td><td>6</td></tr></tbody></table>"
    )
    told = _labelled(table)
    for digit, label in zip("123456", ["PSNR, dB", "n &lt; 9"] * 3, strict=True):
        assert f'data-label="{label}">{digit}</td>' in told
    assert '<th colspan="3">all</th>' in told
    assert '<th rowspan="2" data-label="Attack">a</th>' in told


@pytest.mark.parametrize(
    ("values", "least", "whole", "ends"),
    [
        ([14.3, 14.5], 10, 100, (9.4, 19.4)),
        ([0.0], 0.1, 1, (-0.004, 0.1)),
        ([1.0, 0.98], 0.1, 1, (0.9, 1.004)),
        ([0.0, 1.0], 0.1, 1, (-0.04, 1.04)),
        ([10.0, 20.0], 2, None, (9.0, 21.0)),
        ([5.0, 5.0], 2, None, (4.0, 6.0)),
        ([], 2, None, (-1.0, 1.0)),
    ],
)
def test_an_axis_is_never_a_sliver(values: list[float], least: float, whole: float | None, ends: tuple[float, float]):
    assert figures.limits(values, least, whole) == pytest.approx(ends)
