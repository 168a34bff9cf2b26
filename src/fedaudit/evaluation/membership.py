"""Whether an attack knew which records were trained on."""

from __future__ import annotations

import torch
from scipy.stats import mannwhitneyu
from torch import Tensor

from fedaudit.attacks.records.membership_finding import MembershipFinding
from fedaudit.evaluation.finding_types import (
    FINDING_TYPES,
    Evaluation,
    FindingType,
    Metric,
    by_leaks,
    done,
    entry,
    evaluate,
)
from fedaudit.federation.records import NOBODY, UNUSED
from fedaudit.federation.truth import Truth
from fedaudit.results import Chart, Line
from fedaudit.threat import Observation

ACCURACY = Metric("membership_accuracy", "share of the records that are rightly called members or not")
AUC = Metric("membership_auc", "probability that a member's score is above another record's")
TPR = Metric("membership_tpr", "share of the members that are found where 1 % of the others are taken for members")

LOW = 0.01  # false positives, for TPR
_SURE = 0.01  # greatest p-value that counts as a leak
_CAPTION = (
    "The share of the members that the attack finds, against the share of the others that it takes for members, at "
    "every threshold. An attack that knows nothing stays on the diagonal."
)


@evaluate.register
def evaluate_membership(finding: MembershipFinding, observation: Observation, truth: Truth, *, seed: int) -> Evaluation:  # noqa: ARG001
    """Compare an attack's scores and decisions with whose the records are.

    Members and others are compared in pairs, as they were drawn, so that both are alike in class. Pairs whose member no
    update used are left out; where the attack queried one client's model, so are the pairs of other clients' members.
    An attack counts as a leak where guessing would reach its AUC with a probability of 1 % at most, by the one-sided
    Mann-Whitney test: it asks nothing of the scores' distribution, and is exact for few records.
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
    p_value = float(mannwhitneyu(scores[member], scores[~member], alternative="greater").pvalue)
    notes = [f"AUC {area:.3f} over {int(member.sum())} members and as many others; by guessing with p = {p_value:.2g}"]
    if left_out:
        notes.append(f"{left_out} pairs of records were left out: their member is of another client, or was never used")
    if len(rows) < 2 / LOW:
        notes.append(f"with {int((~member).sum())} others, 1 % of them is none: no false positive is allowed")
    result = done(
        finding,
        observation,
        metrics=[
            AUC.of(area, 0.5),
            ACCURACY.of(float((said == member).double().mean()), 0.5),
            TPR.of(tpr_at(scores[member], scores[~member], LOW), LOW),
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
        leak=p_value <= _SURE,
    )
    return Evaluation(result.model_copy(update={"notes": [*result.notes, *notes]}))


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


FINDING_TYPES["membership"] = FindingType(
    verdict=by_leaks("in {} of {} runs the attack told members from other records better than guessing"),
    rules=(
        "Membership counts as leaked when members score above other records, and guessing would reach that AUC with a "
        "probability of at most 1 % (one-sided Mann-Whitney test).",
    ),
    metrics=(AUC, ACCURACY, TPR),
)
