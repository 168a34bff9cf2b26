"""Does an audit of ε find broken implementations, and leave sound ones alone?"""

from __future__ import annotations

import pytest

from tests.conftest import core
from tools.measure.broken_dp import BROKEN, SOUND, audited

OFTEN = ["noise of half the size", "clipped after averaging", "the same seed in every round"]


def caught(name: str, seed: int) -> bool:
    found = audited(BROKEN[name], seed)
    assert found.claimed is not None
    return (found.demonstrated or 0.0) > found.claimed


@pytest.mark.slow
@pytest.mark.parametrize("name", core(OFTEN, "clipped after averaging"))
def test_a_broken_implementation_is_found(name: str) -> None:
    assert caught(name, 0)


@pytest.mark.long
@pytest.mark.slow
def test_of_twenty_broken_implementations_at_most_one_passes() -> None:
    missed = [name for name in BROKEN if not caught(name, 1)]
    assert len(BROKEN) >= 20
    assert len(missed) <= 1, missed


@pytest.mark.slow
@pytest.mark.parametrize("name", SOUND)
def test_a_sound_implementation_is_never_found_broken(name: str) -> None:
    for seed in range(5):
        found = audited(SOUND[name], seed)
        assert found.claimed is not None
        assert (found.demonstrated or 0.0) <= found.claimed
