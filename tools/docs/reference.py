"""The pages that are made from the code: which they are, and what makes each."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tools.docs import api, commands, glossary, plugins, results, scenario, training
from tools.docs.pages import DOCS

PAGES: dict[Path, Callable[[], str]] = {
    DOCS / "reference" / "scenario.md": scenario.page,
    **plugins.pages(),
    DOCS / "reference" / "training.md": training.page,
    DOCS / "reference" / "cli.md": commands.page,
    DOCS / "reference" / "python.md": api.page,
    results.PAGE: results.page,
    DOCS / "reference" / "results.schema.json": results.schema,
    DOCS / "reference" / "glossary.md": glossary.page,
}
