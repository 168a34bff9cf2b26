"""What the laboratory's tests share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from fedaudit.utils.errors import BadInput
from fedaudit_lab.studies import backends


@pytest.fixture
def trials_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let trials run in this process, where they would start worker processes."""

    def here(_: int) -> Callable[..., Iterator[Any]]:
        def run(function: Callable[[Any], Any], tasks: Sequence[Any], _beat: Any = None) -> Iterator[Any]:
            for task in tasks:
                try:
                    yield task, function(task)
                except BadInput as error:
                    yield task, error

        return run

    monkeypatch.setattr(backends, "processes", here)
