"""Whether an attack knew which records were trained on."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fedaudit.attacks.records.target import MembershipFinding
from fedaudit.evaluation.blind import (
    BLIND_AUC,
    CONFOUNDED,
    Units,
    client_of,
    counted,
    evaluated,
    none_used,
    told_blindly,
)
from fedaudit.evaluation.exposure import by_group, class_chart, surest
from fedaudit.evaluation.finding_types import FINDING_TYPES, Evaluation, FindingType, Metric, done, evaluate, refused
from fedaudit.evaluation.record_epsilon import broken, in_words, record_epsilon
from fedaudit.evaluation.statistics import SURE, auc, auc_interval, pooled, rank_test, roc, tpr_at
from fedaudit.evaluation.usage import USAGE_ERROR, usage
from fedaudit.evaluation.verdicts import Judgement, by_test, leaks
from fedaudit.results import Chart, Evidence, FindingResult, Line, MetricResult, RecordEpsilon
from fedaudit.results.membership import MembershipDetail
from fedaudit.transcript.observation import Observation
from fedaudit.transcript.queries import NOBODY
from fedaudit.transcript.truth import Truth

_RESAMPLES = 2000

MEMBERSHIP_ACCURACY = Metric(
    "membership_accuracy",
    "share of the records, half of them members, that are rightly called members or not",
    ends=(0, 1),
)
AUC = Metric("membership_auc", "probability that a member's score is above another record's", ends=(0, 1))
TPR = Metric(
    "membership_tpr", "share of the members that are found where 1 % of the others are taken for members", ends=(0, 1)
)
TPR_PERMILLE = Metric(
    "membership_tpr_permille",
    "share of the members that are found where 0.1 % of the others are taken for members",
    ends=(0, 1),
)
MEMBERSHIP_EPSILON = Metric(
    "membership_epsilon", "demonstrated ε: a lower bound, at 95 %, for federations in which one record replaces another"
)

LOW = {TPR: 0.01, TPR_PERMILLE: 0.001}  # false positives; of fewer others than would make one, none is told
_METHOD = "bootstrap interval over matched pairs; one-sided Mann-Whitney test"
_MEMBERS_FOUND = (
    "The share of the members that the attack finds, against the share of the others that it takes for members, at "
    "every threshold. An attack that knows nothing stays on the diagonal."
)


@evaluate.register
def evaluate_membership(finding: MembershipFinding, observation: Observation, truth: Truth, *, seed: int) -> Evaluation:
    """Compare an attack's scores and decisions with whose the records are.

    Members and others are compared in pairs, as they were drawn, so that both are alike in class. Pairs whose member no
    update used are left out; where the attack queried one client's model, so are the pairs of other clients' members.
    An attack that has scores of each client is asked about a member's own, and of the record beside it about the same.
    Guessing is excluded by the one-sided Mann-Whitney test: it asks nothing of the scores' distribution, and is exact
    for few records. Where several records are of one person, persons are counted and not records, by the mean of their
    records' scores (Kandpal et al. 2023, user inference), so that what one person's records have in common isn't taken
    for evidence many times over; then no ε of a record is demonstrated, and no class compared. The AUC's interval is a
    bootstrap over the pairs, the shares' are exact binomial ones. Where a classifier of the records alone tells members
    from others, no score shows what training did, and it is no leak, nor is there a bound on ε.
    """
    own = client_of(observation)
    rows = evaluated(truth, own)
    if finding.clients is not None:
        rows = rows[torch.isin(_asked(truth, rows), finding.clients)]
    left_out = (len(truth.owners) - len(rows)) // 2
    if not len(rows):
        return refused(finding, observation, none_used(truth, own))
    scores, said = finding.scores[rows], finding.members[rows]
    if bool(scores.isnan().any()):
        return refused(finding, observation)
    if finding.clients is not None:
        column = torch.searchsorted(finding.clients, _asked(truth, rows))[:, None]
        scores, said = scores.gather(1, column)[:, 0], said.gather(1, column)[:, 0]
    units = counted(truth, rows)
    scores, said, pairs = units.mean(scores), units.mean(said) > 0.5, units.pairs
    of_members, of_others = scores[pairs[0]], scores[pairs[1]]
    every = scores.new_zeros(len(truth.owners)).index_put((units.first,), scores)
    member = truth.owners[units.first] != NOBODY
    false, true = roc(scores[member], scores[~member])
    area = auc(scores[member], scores[~member])
    _, p_value = rank_test(scores[member], scores[~member])
    _, best = rank_test(torch.ones(int(member.sum())), torch.zeros(int((~member).sum())))
    low, high = auc_interval(of_members, of_others, resamples=_RESAMPLES, seed=seed)
    right = int((said == member).sum())
    blind, blind_p = told_blindly(observation, truth)
    notes = []
    if left_out:
        notes.append(f"{left_out} pairs of records were left out: their member is of another client, or was never used")
    if units.of == "persons":
        notes.append(
            f"{len(units.first)} persons are counted, by the mean score of their {len(rows)} records; a person is "
            "taken for a member if more than half of them are"
        )
    confounded = blind_p is not None and blind_p <= SURE
    shown = None
    groups = []
    if units.of == "records":  # a promise is about records, and a class about one
        if blind_p is not None and not confounded:
            shown = record_epsilon(of_members, of_others, observation, truth, seed)
        groups = [] if confounded else by_group(observation, rows[pairs], every, seed)
    leak = leaks(area > 0.5, p_value) and not confounded
    rows_of = units.first[pairs]
    labels = observation.records.labels if observation.records is not None else None
    labels = None if labels is None or labels.is_floating_point() or labels.ndim > 1 else labels
    result = done(
        finding,
        observation,
        notes,
        MembershipDetail(
            exposure=groups,
            most_exposed=surest(rows_of, every, _again(finding, units), truth.owners, labels) if leak else [],
            standing_out=None if confounded else int((scores[member] > scores[~member].max()).sum()),
            record_epsilon=shown,
        ),
        metrics=[
            AUC.of(area, 0.5, low=low, high=high, n=len(member), of=units.of),
            MEMBERSHIP_ACCURACY.share(right, len(member), units.of, 0.5),
            *_at_low(scores[member], scores[~member]),
            *blind,
            *([MEMBERSHIP_EPSILON.of(shown.bound.epsilon, n=pairs.shape[1], of="pairs of records")] if shown else []),
            *([] if confounded else usage(of_members, of_others, seed, units.of)),
        ],
        charts=[
            Chart(
                title="members found" if own is None else f"members found, client {own}",
                caption=_MEMBERS_FOUND,
                x_label="share of the others taken for members",
                y_label="share of the members found",
                lines=[
                    Line(name="attack", x=false.tolist(), y=true.tolist()),
                    Line(name="guessing", x=[0.0, 1.0], y=[0.0, 1.0]),
                ],
            ),
            *class_chart(groups, own),
        ],
        blind_p_value=blind_p,
        is_leak=leak,
        p_value=p_value,
        p_value_at_best=best,
    )
    return Evaluation(result)


def _again(finding: MembershipFinding, units: Units) -> Tensor:
    """Return the (b, n) scores with other shadow models, those of a person at a record of theirs."""
    if units.of == "records" or not len(finding.again):
        return finding.again
    again = torch.zeros_like(finding.again)
    again[:, units.first] = units.mean(finding.again[:, units.rows].T).T
    return again


def _asked(truth: Truth, rows: Tensor) -> Tensor:
    """Return whose (m,) the records of a pair are asked to be: the member's owner."""
    owners = truth.owners[rows]
    return owners.where(owners != NOBODY, truth.owners[truth.matched[rows]])


def _at_low(members: Tensor, others: Tensor) -> list[MetricResult]:
    """Return the share of the members that are found at each rate of false positives that the others are enough for."""
    n = len(members)
    return [
        metric.share(round(tpr_at(members, others, share) * n), n, "members", share)
        for metric, share in LOW.items()
        if len(others) >= round(1 / share)
    ]


def _membership_headline(findings: Sequence[FindingResult], evidence: Evidence) -> str:
    """Return the leak in words: decisions where these are better than guessing, else pairs."""
    decisions = pooled([m for f in findings for m in f.metrics if m.name == MEMBERSHIP_ACCURACY.name])
    of = evidence.of
    start = "{who} can tell whether " + ("a record was" if of == "records" else "a person's records were")
    start = f"{start} used for training: "
    if decisions and decisions.low > 0.5:
        return f"{start}right for {100 * decisions.mean:.0f} % of {decisions.n} {of}, where guessing gets 50 %."
    return (
        f"{start}of one that was used and one that wasn't, it picks the right one in {100 * evidence.value:.0f} % of "
        f"such pairs of {evidence.n} {of}, where guessing gets 50 %."
    )


def _membership_verdict(findings: Sequence[FindingResult]) -> Judgement:
    """Return the verdict, with what is found where few others may be taken for members: what an average hides.

    It is inconclusive where the records alone tell members from others.
    """
    of = next(m.of or "records" for f in findings for m in f.metrics if m.name == AUC.name)
    judged = by_test(AUC.name, of, _METHOD, _membership_headline)(findings)
    for metric, low in LOW.items():
        shares = [m.value for f in findings for m in f.metrics if m.name == metric.name]
        if shares:
            found = f"{100 * sum(shares) / len(shares):.3g} % of members at {100 * low:g} % false positives"
            headline = judged.headline and f"{judged.headline.rstrip('.')}. It finds {found}."
            judged = judged._replace(text=f"{judged.text}; {found}", headline=headline)
    bounds = [f.record_epsilon for f in findings if f.record_epsilon is not None]
    if told := in_words(bounds):
        judged = judged._replace(text=f"{judged.text}; {told}")
    p_value = min((f.blind_p_value for f in findings if f.blind_p_value is not None), default=1.0)  # one of a draw
    if p_value > SURE:
        return _with_promise(judged, bounds)
    areas = [m.value for f in findings for m in f.metrics if m.name == BLIND_AUC.name]
    text = (
        f"{judged.text}; the records alone, without any model, tell members from others: AUC "
        f"{sum(areas) / len(areas):.3g}, p = {p_value:.2g}"
    )
    return judged._replace(verdict="inconclusive", text=text, headline="", advice=CONFOUNDED)


def _with_promise(judged: Judgement, bounds: Sequence[RecordEpsilon]) -> Judgement:
    """Return the judgement, with the promise of differential privacy where the bounds are above it."""
    most = max(bounds, key=lambda one: one.bound.epsilon, default=None)
    if most is None or most.claimed is None or most.bound.epsilon <= most.claimed:
        return judged
    if broken(bounds):
        headline = (
            f"The promise is broken: an ε of at least {most.bound.epsilon:.3g} is demonstrated, "
            f"and {most.claimed:.3g} is claimed."
        )
        return judged._replace(verdict="inferred", headline=headline)
    text = f"{judged.text}; the demonstrated ε is above the claimed one, but not surely enough: use more records"
    return judged._replace(text=text)


def _untold(findings: Sequence[FindingResult], name: str, limit: float) -> str | None:
    """Return why a limit on a rate at few false positives, or on ε, can't be tested; None where it can."""
    if name == MEMBERSHIP_EPSILON.name and findings:
        shown = [f.record_epsilon for f in findings if f.record_epsilon is not None]
        reach = max((one.attainable for one in shown), default=0.0)
        pairs = max((one.bound.canaries for one in shown), default=0)
        if reach > limit:
            return None
        return f"{name}: {pairs} pairs of records could show an ε of {reach:.3g} at most; raise threat.target_records"
    least = {metric.name: round(1 / share) for metric, share in LOW.items()}.get(name)
    if least is None or not findings or any(m.name == name for f in findings for m in f.metrics):
        return None
    return f"{name} needs {least:,} records that nobody trained on beside as many members; raise threat.target_records"


FINDING_TYPES["membership"] = FindingType(
    verdict=_membership_verdict,
    rules=(
        "Membership is 'inferred' when members score above other records, and guessing would reach that AUC with a "
        f"probability of at most {100 * SURE:g} % (one-sided Mann-Whitney test over the records, or over "
        "persons where several are of one). Where a classifier "
        "of the records alone, without any model, tells members from others (permutation test within the pairs, at "
        f"{100 * SURE:g} %), it is 'inconclusive'. It also is 'inferred' where the scores demonstrate a larger ε than "
        "the defence claims, with a confidence of 99 % over all runs of the attack.",
    ),
    metrics=(AUC, MEMBERSHIP_ACCURACY, TPR, TPR_PERMILLE, BLIND_AUC, MEMBERSHIP_EPSILON, USAGE_ERROR),
    question="tell whether a record was used for training",
    control="records",
    ranks=True,
    remedies=("fewer rounds", "more records"),
    learns=True,
    untold=_untold,
)
