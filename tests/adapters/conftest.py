"""Guards write into the working directory; here that is each test's own. What NVFlare's filters keep, likewise."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(autouse=True)
def _somewhere_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "site"
    place.mkdir()
    monkeypatch.chdir(place)


@pytest.fixture(autouse=True)
def _a_process_of_its_own() -> Iterator[None]:
    yield
    of_site: Any = sys.modules.get("fedaudit.adapters.nvflare.site")
    if of_site is None:
        return
    for evaluation in of_site._evaluations.values():
        evaluation.stop()
    for name in ("evaluations", "wanted", "validated", "looked", "turns", "watched", "taken"):
        getattr(of_site, f"_{name}").clear()
