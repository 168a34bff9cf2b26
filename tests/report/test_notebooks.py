"""What a notebook shows of an audit, and the two notebooks: every cell runs."""

from __future__ import annotations

import ast
import base64
import html.parser
import io
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import fedaudit
from fedaudit.pipeline.run import Audit
from fedaudit.report.notebook import as_html

NOTEBOOKS = sorted((Path(__file__).parents[2] / "examples" / "notebooks").glob("*.ipynb"))


class Fragment(html.parser.HTMLParser):
    """Elements, what is left open, and texts."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.names: list[str] = []
        self.open: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.texts: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.append(tag)
        self.attributes += attrs
        if tag not in {"img", "br"}:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


@pytest.fixture(scope="module")
def finished() -> Audit:
    return fedaudit.audit(
        {
            "name": "<script>alert(1)</script>",
            "data": {"name": "digits"},
            "model": {"name": "mlp"},
            "federations": [{"name": "f", "clients": 6, "examples": 6}],
            "attacks": [{"name": "dlg-adam", "iterations": 3}, "labels"],
            "evaluation": {"controls": False},
        },
        fail_on="recovered",
        progress=False,
    )


def test_a_notebook_shows_verdicts_numbers_images_and_limits(finished: Audit) -> None:
    page = finished._repr_html_()
    read = Fragment(page)
    assert not read.open
    said = " ".join(read.texts)
    result = finished.result
    for summary in result.summaries:
        assert summary.verdict in said
        assert summary.attack in said
    inverted = result.summaries[0]
    assert inverted.psnr is not None
    assert f"PSNR {inverted.psnr.mean:.1f} dB".replace("-", "−") in said
    assert any(line in said for line in ("PASS", "FAIL", "NOT TESTED"))


def test_its_images_are_the_audit_s_the_true_one_first_and_four_at_most(finished: Audit) -> None:
    shown = [
        np.asarray(Image.open(io.BytesIO(base64.b64decode(code))))
        for code in re.findall(r"data:image/png;base64,([^\"]+)", finished._repr_html_())
    ]
    of_images = [f.images[0] for f in finished.result.findings if f.attack == "dlg-adam"]
    assert len(of_images) == 6
    expected = [finished.image_files[name] for one in of_images[:4] for name in (one.true_image, one.reconstruction)]
    assert len(shown) == len(expected)
    for pixels, tensor in zip(shown, expected, strict=True):
        assert np.abs(pixels / 255 - tensor[0].numpy()).max() <= 0.5 / 255 + 1e-6


def test_it_needs_nothing_from_outside_and_escapes_what_is_the_user_s(finished: Audit) -> None:
    hostile = '<img src="http://x/y.png" onerror=alert(1)>'
    summaries = [s.model_copy(update={"attack": hostile, "headline": hostile}) for s in finished.result.summaries]
    read = Fragment(as_html(finished.result.model_copy(update={"summaries": summaries}), finished.image_files))
    assert hostile in read.texts
    assert not {"script", "link", "iframe", "style"} & set(read.names)
    sources = [value or "" for name, value in read.attributes if name in {"src", "href"}]
    assert all(source.startswith("data:image/png;base64,") for source in sources)
    assert not [name for name, _ in read.attributes if name.startswith("on")]


def test_without_image_files_the_table_stays(finished: Audit) -> None:
    read = Fragment(as_html(finished.result, {}))
    assert "img" not in read.names
    assert read.names.count("tr") == 1 + len(finished.result.summaries)


def test_an_audit_whose_attacks_were_refused_is_shown() -> None:
    refused = fedaudit.audit(
        {
            "name": "rows",
            "data": {"name": "breast-cancer"},
            "model": {"name": "mlp"},
            "federations": [{"name": "f", "clients": 2, "examples": 4}],
            "attacks": ["invg"],
        },
        progress=False,
    )
    assert "not applicable" in " ".join(Fragment(refused._repr_html_()).texts)


def test_there_are_two_notebooks_small_and_without_outputs() -> None:
    assert len(NOTEBOOKS) == 2
    for path in NOTEBOOKS:
        assert path.stat().st_size < 20_000
        held = json.loads(path.read_text())
        assert (held["nbformat"], held["nbformat_minor"]) == (4, 5)
        assert not [cell for cell in held["cells"] if cell.get("outputs") or cell.get("execution_count")]
        assert len({cell["id"] for cell in held["cells"]}) == len(held["cells"])


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_every_cell_of_a_notebook_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a kernel runs them: one namespace, and the value of a cell's last expression is what it shows."""
    monkeypatch.chdir(tmp_path)
    space: dict[str, Any] = {"__name__": "__main__"}
    shown = []
    for cell in json.loads(path.read_text())["cells"]:
        if cell["cell_type"] != "code":
            continue
        source = re.sub(r"ITERATIONS = \d+", "ITERATIONS = 5", "".join(cell["source"]))
        tree = ast.parse(source)
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, path.name, "exec"), space)
        if isinstance(last, ast.Expr):
            shown.append(eval(compile(ast.Expression(last.value), path.name, "eval"), space))
    audits = [one for one in shown if isinstance(one, Audit)]
    assert audits
    assert all("<table>" in one._repr_html_() for one in audits)
    assert torch.is_grad_enabled()
