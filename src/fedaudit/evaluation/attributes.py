"""Whether an attack knew an attribute that the adversary's records lack."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fedaudit.attacks.records.attribute import AttributeFinding
from fedaudit.evaluation.finding_types import (
    FINDING_TYPES,
    Evaluation,
    FindingType,
    Metric,
    by_test,
    done,
    entry,
    evaluate,
    leaks,
)
from fedaudit.evaluation.membership import evaluated
from fedaudit.evaluation.statistics import SURE, interval, proportion, sign_test
from fedaudit.federation.records import NOBODY
from fedaudit.federation.truth import Truth
from fedaudit.results import Evidence, FindingResult
from fedaudit.threat import Observation

ACCURACY = Metric(
    "attribute_accuracy",
    "share of the clients' records whose attribute is named rightly; without the attack: by naming the value that is "
    "most frequent among all records of the class",
)
ADVANTAGE = Metric(
    "attribute_advantage", "that share, less the same share of records that nobody trained on: what training gave away"
)
_RESAMPLES = 2000


@evaluate.register
def evaluate_attribute(finding: AttributeFinding, observation: Observation, truth: Truth, *, seed: int) -> Evaluation:
    """Compare named with true values, for clients' records; the baseline knows every class's most frequent value.

    The baseline takes these values from the records themselves, so it is rather too good than too bad. Records count
    as for membership. Luck is excluded by the exact sign test over the records that only one of the two names rightly.
    """
    clients = {m.client for m in observation.messages}
    own = clients.pop() if len(clients) == 1 else None
    rows = evaluated(truth, own)
    if not len(rows) or observation.records is None:
        whose = "a client that updates used" if own is None else f"client {own}"
        reason = f"none of the {len(truth.owners)} records is an example of {whose}; raise threat.records"
        return Evaluation(entry(finding.attack, observation, status="not applicable", reason=reason))
    right = (finding.values == truth.values).double()[rows]
    usual = (most_frequent(truth.values, observation.records.labels) == truth.values).double()[rows]
    member = truth.owners[rows] != NOBODY
    rate = float(right[member].mean())
    over = interval((right - usual)[member].tolist(), resamples=_RESAMPLES, seed=seed)
    note = (
        f"{over.mean:+.3f} [{over.low:+.3f}, {over.high:+.3f}] beyond the most frequent value, "
        f"over {over.n} records of clients"
    )
    partner = torch.searchsorted(rows, truth.matched[rows])  # rows are sorted, and hold both of every pair
    more = interval((right[member] - right[partner[member]]).tolist(), resamples=_RESAMPLES, seed=seed)
    better, worse = int((right > usual)[member].sum()), int((right < usual)[member].sum())
    p_value = sign_test(better, worse)
    low, high = proportion(int(right[member].sum()), over.n)
    result = done(
        finding,
        observation,
        metrics=[
            ACCURACY.of(rate, float(usual[member].mean()), low=low, high=high, n=over.n, of="records of clients"),
            ADVANTAGE.of(more.mean, 0.0, low=more.low, high=more.high, n=more.n, of="matched pairs of records"),
        ],
        leak=leaks(over.mean > 0, p_value),
        p_value=p_value,
        p_value_at_best=sign_test(int((1 - usual)[member].sum()), 0),
    )
    return Evaluation(result.model_copy(update={"notes": [*result.notes, note]}))


def most_frequent(values: Tensor, labels: Tensor) -> Tensor:
    """Return (n,) for each record the most frequent of the (n,) values among the records of its class.

    Real-valued labels are all of one class. Of several that are as frequent, the least.
    """
    classes = torch.zeros_like(values) if labels.is_floating_point() else labels
    found = torch.zeros_like(values)
    for label in classes.unique():
        found[classes == label] = torch.bincount(values[classes == label]).argmax()
    return found


def _headline(_: Sequence[FindingResult], evidence: Evidence) -> str:
    return (
        "{who} can tell a hidden attribute of the clients' records: right for "
        f"{100 * evidence.value:.0f} of 100, where the most frequent value gets "
        f"{100 * (evidence.by_guessing or 0):.0f}."
    )


FINDING_TYPES["attribute"] = FindingType(
    verdict=by_test(
        ACCURACY.name,
        "records of clients",
        "exact binomial interval (Clopper-Pearson); exact sign test against naming the most frequent value",
        _headline,
    ),
    rules=(
        "An attribute is 'inferred' when more of the clients' records are named rightly than by naming the most "
        f"frequent value of their class, and luck would do as well with a probability of at most {100 * SURE:g} % "
        "(one-sided exact sign test over the records that only one of the two names rightly).",
    ),
    metrics=(ACCURACY, ADVANTAGE),
    question="tell a hidden attribute of the clients' records",
    control="records",
)
