"""Nothing is called a leak as seldom as the verdicts say, and what is there is found: a part of tools.measure.nulls."""

from __future__ import annotations

import pytest
from scipy.stats import binom

from fedaudit.evaluation import FINDING_TYPES
from tools.measure.nulls import LEAKS, NULLS

AUDITS = 24
FEW = 8  # where one takes a second
SLOW = (
    *("local models", "label counts", "images by hijacked", "labels by model", "images, class means, five"),
    *(f"{kind} of " for kind in ("images", "signals", "volumes", "notes", "words")),
)


def test_every_kind_of_finding_has_a_null():
    assert {null.kind for null in NULLS.values()} == set(FINDING_TYPES)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in NULLS if not name.startswith("rows")])  # those: test_rows
def test_what_knows_everything_but_the_update_is_no_leak(name):
    audits = FEW if name.startswith(SLOW) else AUDITS
    called = sum(NULLS[name].audit(seed, planted=False) in LEAKS for seed in range(audits))
    assert called <= binom.ppf(1 - 1e-4, audits, 0.01)  # in one of 10,000 runs more, at a level of 1 %
    found = sum(NULLS[name].audit(seed, planted=True) in LEAKS for seed in range(audits // 3))
    assert found >= binom.ppf(0.0025, audits // 3, 0.9)  # a power of 0.9 gives fewer in one of 400 runs
