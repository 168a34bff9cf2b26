"""Guards write into the working directory; here that is each test's own."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _somewhere_else(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path_factory.mktemp("site"))
