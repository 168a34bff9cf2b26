"""Whether an attack knew an attribute that the adversary's records lack."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fedaudit.attacks.records.attribute import AttributeFinding
from fedaudit.evaluation.blind import CONFOUNDED, client_of, evaluated, none_used, told_blindly
from fedaudit.evaluation.finding_types import FINDING_TYPES, Evaluation, FindingType, Metric, done, evaluate, refused
from fedaudit.evaluation.statistics import SURE, interval, sign_test
from fedaudit.evaluation.verdicts import Judgement, by_test, leaks
from fedaudit.results import Evidence, FindingResult
from fedaudit.transcript.observation import Observation
from fedaudit.transcript.queries import NOBODY
from fedaudit.transcript.truth import Truth

_RESAMPLES = 2000
ATTRIBUTE_ACCURACY = Metric(
    "attribute_accuracy",
    "share of the clients' records whose attribute is named rightly; without the attack: by naming the value that is "
    "most frequent among all records of the class",
    ends=(0, 1),
)
ATTRIBUTE_ADVANTAGE = Metric(
    "attribute_advantage", "that share, less the same share of records that nobody trained on: what training gave away"
)


@evaluate.register
def evaluate_attribute(finding: AttributeFinding, observation: Observation, truth: Truth, *, seed: int) -> Evaluation:
    """Compare named with true values, for clients' records, with what anybody could tell of records that were not used.

    That is twofold: every class's most frequent value, taken from the records themselves, so it is rather too good than
    too bad; and what the attack says of the matched non-members, so that imputation, which tells an attribute from the
    others of any record, is no leak of training (Jayaraman and Evans 2022). Records count as for membership. The
    p-value is the larger one of two exact sign tests: over the records that only one of attack and most frequent value
    names rightly, and over the matched pairs of which the attack names only one rightly.
    """
    own = client_of(observation)
    rows = evaluated(truth, own)
    if not len(rows) or observation.records is None:
        return refused(finding, observation, none_used(truth, own))
    right = (finding.values == truth.values).double()[rows]
    usual = (most_frequent(truth.values, observation.records.labels) == truth.values).double()[rows]
    member = truth.owners[rows] != NOBODY
    over = interval((right - usual)[member].tolist(), resamples=_RESAMPLES, seed=seed)
    note = (
        f"{over.mean:+.3f} [{over.low:+.3f}, {over.high:+.3f}] beyond the most frequent value, "
        f"over {over.n} records of clients"
    )
    partner = torch.searchsorted(rows, truth.matched[rows])  # rows are sorted, and hold both of every pair
    more = interval((right[member] - right[partner[member]]).tolist(), resamples=_RESAMPLES, seed=seed)
    gained = int((right[member] > right[partner[member]]).sum())
    lost = int((right[member] < right[partner[member]]).sum())
    better, worse = int((right > usual)[member].sum()), int((right < usual)[member].sum())
    p_value = max(sign_test(better, worse), sign_test(gained, lost))
    blind_p = told_blindly(observation, truth)[1]
    named, usually = int(right[member].sum()), float(usual[member].mean())
    result = done(
        finding,
        observation,
        [note],
        metrics=[
            ATTRIBUTE_ACCURACY.share(named, over.n, "records of clients", usually),
            ATTRIBUTE_ADVANTAGE.over(more, "matched pairs of records", 0.0),
        ],
        blind_p_value=blind_p,
        is_leak=leaks(over.mean > 0 and more.mean > 0 and (blind_p or 1.0) > SURE, p_value),
        p_value=p_value,
        p_value_at_best=sign_test(int((1 - usual)[member].sum()), 0),
    )
    return Evaluation(result)


def most_frequent(values: Tensor, labels: Tensor) -> Tensor:
    """Return (n,) each record's most frequent value in its class, of ties the least; real-valued labels are one."""
    classes = torch.zeros_like(values) if labels.is_floating_point() else labels
    found = torch.zeros_like(values)
    for label in classes.unique():
        found[classes == label] = torch.bincount(values[classes == label]).argmax()
    return found


def _attribute_headline(findings: Sequence[FindingResult], evidence: Evidence) -> str:
    gains = [m.value for f in findings for m in f.metrics if m.name == ATTRIBUTE_ADVANTAGE.name]
    unused = evidence.value - sum(gains) / len(gains)
    return (
        "{who} can tell a hidden attribute of the clients' records, beyond what anybody could infer about records that "
        f"were not used: right for {100 * evidence.value:.0f} % of {evidence.n} records, where the same attack gets "
        f"{100 * unused:.0f} % of records that were not used, and the most frequent value "
        f"{100 * (evidence.baseline or 0):.0f} %."
    )


_judge_attribute = by_test(
    ATTRIBUTE_ACCURACY.name,
    "records of clients",
    "exact binomial interval (Clopper-Pearson); the larger p-value of two exact sign tests, against the most "
    "frequent value and against matched records that were not used",
    _attribute_headline,
)


def _attribute_verdict(findings: Sequence[FindingResult]) -> Judgement:
    """Return the verdict, which is inconclusive where members differ from the others by themselves."""
    judged = _judge_attribute(findings)
    p_value = min((f.blind_p_value for f in findings if f.blind_p_value is not None), default=1.0)
    if p_value > SURE or judged.verdict != "inferred":
        return judged
    text = f"{judged.text}; the records alone, without any model, tell members from others: p = {p_value:.2g}"
    return judged._replace(verdict="inconclusive", text=text, headline="", advice=CONFOUNDED)


FINDING_TYPES["attribute"] = FindingType(
    verdict=_attribute_verdict,
    rules=(
        "An attribute is 'inferred' when more of the clients' records are named rightly than by naming the most "
        "frequent value of their class, and more than of matched records that were not used, so that what follows from "
        "a record's other attributes is no leak of training. Luck would do as well with a probability of at most "
        f"{100 * SURE:g} %, by either of two one-sided exact sign tests: over the records that only one of attack and "
        "most frequent value names rightly, and over the pairs of which the attack names one rightly. Where the "
        "records alone, attributes and all, tell members from others, as for membership, it is 'inconclusive'.",
    ),
    metrics=(ATTRIBUTE_ACCURACY, ATTRIBUTE_ADVANTAGE),
    question="tell a hidden attribute of the clients' records",
    control="records",
    remedies=("fewer rounds", "more records"),
    learns=True,
)
