"""Nothing is called a leak as seldom as the verdicts say, and what is there is found: a part of tests.measure.nulls."""

from __future__ import annotations

import pytest
from scipy.stats import binom

from tests.measure.nulls import LEAKS, NULLS

AUDITS = 60
MOST = int(binom.ppf(1 - 1e-4, AUDITS, 0.01))  # in one of 10,000 runs more, at a level of 1 %


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in NULLS if not name.startswith(("rows", "notes"))])
def test_what_knows_everything_but_the_update_is_no_leak(name):
    assert sum(NULLS[name](seed, planted=False) in LEAKS for seed in range(AUDITS)) <= MOST
    found = sum(NULLS[name](seed, planted=True) in LEAKS for seed in range(20))
    assert found >= 14  # a power of 0.9 gives fewer in one of 400 runs
