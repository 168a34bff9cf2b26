"""Whether an attack knew which records were trained on."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from scipy.stats import mannwhitneyu
from torch import Tensor

from fedaudit.attacks.records.target import MembershipFinding
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
from fedaudit.evaluation.statistics import SURE, auc_interval, pooled, proportion
from fedaudit.results import Chart, Evidence, FindingResult, Line
from fedaudit.transcript.observation import Observation
from fedaudit.transcript.queries import NOBODY, UNUSED
from fedaudit.transcript.truth import Truth

ACCURACY = Metric("membership_accuracy", "share of the records that are rightly called members or not")
AUC = Metric("membership_auc", "probability that a member's score is above another record's")
TPR = Metric("membership_tpr", "share of the members that are found where 1 % of the others are taken for members")

LOW = 0.01  # false positives, for TPR
_RESAMPLES = 2000
_CAPTION = (
    "The share of the members that the attack finds, against the share of the others that it takes for members, at "
    "every threshold. An attack that knows nothing stays on the diagonal."
)


@evaluate.register
def evaluate_membership(finding: MembershipFinding, observation: Observation, truth: Truth, *, seed: int) -> Evaluation:
    """Compare an attack's scores and decisions with whose the records are.

    Members and others are compared in pairs, as they were drawn, so that both are alike in class. Pairs whose member no
    update used are left out; where the attack queried one client's model, so are the pairs of other clients' members.
    Guessing is excluded by the one-sided Mann-Whitney test: it asks nothing of the scores' distribution, and is exact
    for few records. The AUC's interval is a bootstrap over the pairs, the accuracy's the exact binomial one.
    """
    clients = {m.client for m in observation.messages}
    own = clients.pop() if len(clients) == 1 else None
    rows = evaluated(truth, own)
    left_out = (len(truth.owners) - len(rows)) // 2
    if not len(rows):
        whose = "a client that updates used" if own is None else f"client {own}"
        reason = f"none of the {len(truth.owners)} records is an example of {whose}; raise threat.records"
        return Evaluation(entry(finding.attack, observation, status="not applicable", reason=reason))
    member = truth.owners[rows] != NOBODY
    scores, said = finding.scores[rows], finding.members[rows]
    false, true = roc(scores[member], scores[~member])
    area = auc(scores[member], scores[~member])
    p_value = _rank_test(scores[member], scores[~member])
    best = _rank_test(torch.ones(int(member.sum())), torch.zeros(int((~member).sum())))
    partner = torch.searchsorted(rows, truth.matched[rows])  # rows are sorted, and hold both of every pair
    low, high = auc_interval(scores[member], scores[partner[member]], resamples=_RESAMPLES, seed=seed)
    right = int((said == member).sum())
    ends = proportion(right, len(rows))
    found = tpr_at(scores[member], scores[~member], LOW)
    sure = proportion(round(found * int(member.sum())), int(member.sum()))
    counted = {"n": len(rows), "of": "records"}
    notes = []
    if left_out:
        notes.append(f"{left_out} pairs of records were left out: their member is of another client, or was never used")
    if len(rows) < 2 / LOW:
        notes.append(f"with {int((~member).sum())} others, 1 % of them is none: no false positive is allowed")
    result = done(
        finding,
        observation,
        metrics=[
            AUC.of(area, 0.5, low=low, high=high, **counted),
            ACCURACY.of(right / len(rows), 0.5, low=ends[0], high=ends[1], **counted),
            TPR.of(found, LOW, low=sure[0], high=sure[1], n=int(member.sum()), of="members"),
        ],
        charts=[
            Chart(
                title="members found" if own is None else f"members found, client {own}",
                caption=_CAPTION,
                x_label="share of the others taken for members",
                y_label="share of the members found",
                lines=[
                    Line(name="attack", x=false.tolist(), y=true.tolist()),
                    Line(name="guessing", x=[0.0, 1.0], y=[0.0, 1.0]),
                ],
            )
        ],
        leak=leaks(area > 0.5, p_value),
        p_value=p_value,
        p_value_at_best=best,
    )
    return Evaluation(result.model_copy(update={"notes": [*result.notes, *notes]}))


def _rank_test(members: Tensor, others: Tensor) -> float:
    return float(mannwhitneyu(members, others, alternative="greater").pvalue)


def evaluated(truth: Truth, client: int | None) -> Tensor:
    """Return the records (k,) that count: used members, of ``client`` if given, and their matched non-members."""
    counts = truth.owners > UNUSED
    counts &= truth.owners != NOBODY
    if client is not None:
        counts &= truth.owners == client
    return torch.nonzero(counts | counts[truth.matched])[:, 0]


def roc(members: Tensor, others: Tensor) -> tuple[Tensor, Tensor]:
    """Return the ROC curve: shares (k,) of ``others`` and of ``members`` that pass, from no threshold passed to all.

    Args:
        members: (n,) scores.
        others: (m,) scores.
    """
    from sklearn.metrics import roc_curve  # takes a second

    ranks = torch.cat([members, others]).unique(return_inverse=True)[1]  # infinite scores have a rank, too
    truth = torch.arange(len(ranks)) < len(members)
    false, true, _ = roc_curve(truth.numpy(), ranks.numpy(), drop_intermediate=False)
    return torch.from_numpy(false), torch.from_numpy(true)


def auc(members: Tensor, others: Tensor) -> float:
    """Return the area under the ROC curve: the probability that a member's score is higher, ties counted half."""
    false, true = roc(members, others)
    return float(torch.trapezoid(true, false))


def tpr_at(members: Tensor, others: Tensor, share: float) -> float:
    """Return the largest share of ``members`` that pass a threshold which at most ``share`` of ``others`` pass."""
    false, true = roc(members, others)
    return float(true[false <= share].max())


def _headline(findings: Sequence[FindingResult], evidence: Evidence) -> str:
    """Return the leak in words: decisions where these are better than guessing, else pairs."""
    decisions = pooled([m for f in findings for m in f.metrics if m.name == ACCURACY.name])
    start = "{who} can tell whether a record was used for training: "
    if decisions and decisions.low > 0.5:
        return f"{start}right for {100 * decisions.mean:.0f} of 100, where guessing gets 50."
    return (
        f"{start}shown one that was used and one that wasn't, it picks the right one {100 * evidence.value:.0f} times "
        "of 100, where guessing gets 50."
    )


FINDING_TYPES["membership"] = FindingType(
    verdict=by_test(
        AUC.name, "records", "bootstrap interval over matched pairs; one-sided Mann-Whitney test", _headline
    ),
    rules=(
        "Membership is 'inferred' when members score above other records, and guessing would reach that AUC with a "
        f"probability of at most {100 * SURE:g} % (one-sided Mann-Whitney test over the records).",
    ),
    metrics=(AUC, ACCURACY, TPR),
    question="tell whether a record was used for training",
    control="records",
)
