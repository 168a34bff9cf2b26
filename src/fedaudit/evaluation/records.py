"""Whether an attack knew which records were trained on, which client a record comes from, or an attribute it lacks."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from scipy.stats import rankdata
from torch import Tensor
from torch.nn.functional import one_hot

from fedaudit.attacks.records.attribute import AttributeFinding
from fedaudit.attacks.records.source import SourceFinding
from fedaudit.attacks.records.target import MembershipFinding
from fedaudit.evaluation.blind import FEWEST, MOST, blind_scores, features
from fedaudit.evaluation.exposure import by_group, class_chart, surest
from fedaudit.evaluation.finding_types import FINDING_TYPES, Evaluation, FindingType, Metric, done, evaluate, refused
from fedaudit.evaluation.record_epsilon import broken, in_words, record_epsilon
from fedaudit.evaluation.statistics import SURE, auc_interval, interval, pooled, rank_test, sign_test
from fedaudit.evaluation.verdicts import Judgement, by_test, leaks
from fedaudit.results import Chart, Evidence, FindingResult, Line, MetricResult, RecordEpsilon
from fedaudit.results.membership import MembershipDetail
from fedaudit.transcript.observation import Observation
from fedaudit.transcript.queries import NOBODY, UNUSED
from fedaudit.transcript.truth import Truth
from fedaudit.utils.fingerprint import fingerprint
from fedaudit.utils.seeds import derive_seed, generator

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
BLIND_AUC = Metric(
    "membership_blind_auc",
    "the same probability by a classifier of the records alone, without any model: what to hold it against",
    higher_is_better=False,
    ends=(0, 1),
)

MEMBERSHIP_EPSILON = Metric(
    "membership_epsilon", "demonstrated ε: a lower bound, at 95 %, for federations in which one record replaces another"
)

LOW = {TPR: 0.01, TPR_PERMILLE: 0.001}  # false positives; of fewer others than would make one, none is told
_told_blindly: dict[str, tuple[Tensor, Tensor, float]] = {}  # by the records and their pairs, the last ones
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
    for few records. The AUC's interval is a bootstrap over the pairs, the shares' are exact binomial ones. Where a
    classifier of the records alone tells members from others, no score shows what training did, and it is no leak, nor
    is there a bound on ε.
    """
    own = _client_of(observation)
    rows = evaluated(truth, own)
    if finding.clients is not None:
        rows = rows[torch.isin(_asked(truth, rows), finding.clients)]
    left_out = (len(truth.owners) - len(rows)) // 2
    if not len(rows):
        return refused(finding, observation, _none_used(truth, own))
    member = truth.owners[rows] != NOBODY
    scores, said = finding.scores[rows], finding.members[rows]
    if bool(scores.isnan().any()):
        return refused(finding, observation)
    every = finding.scores
    if finding.clients is not None:
        column = torch.searchsorted(finding.clients, _asked(truth, rows))[:, None]
        scores, said = scores.gather(1, column)[:, 0], said.gather(1, column)[:, 0]
        every = every.new_zeros(len(every)).index_put((rows,), scores)
    false, true = roc(scores[member], scores[~member])
    area = auc(scores[member], scores[~member])
    _, p_value = rank_test(scores[member], scores[~member])
    _, best = rank_test(torch.ones(int(member.sum())), torch.zeros(int((~member).sum())))
    partner = torch.searchsorted(rows, truth.matched[rows])  # rows are sorted, and hold both of every pair
    low, high = auc_interval(scores[member], scores[partner[member]], resamples=_RESAMPLES, seed=seed)
    right = int((said == member).sum())
    pairs = torch.stack([torch.nonzero(member)[:, 0], partner[member]])
    blind, blind_p = _blind(observation, truth)
    notes = []
    if left_out:
        notes.append(f"{left_out} pairs of records were left out: their member is of another client, or was never used")
    confounded = blind_p is not None and blind_p <= SURE
    shown = None
    if blind_p is not None and not confounded:
        shown = record_epsilon(scores[pairs[0]], scores[pairs[1]], observation, truth, seed)
    groups = [] if confounded else by_group(observation, rows[pairs], every, seed)
    leak = leaks(area > 0.5, p_value) and not confounded
    labels = observation.records.labels if observation.records is not None else None
    labels = None if labels is None or labels.is_floating_point() or labels.ndim > 1 else labels
    result = done(
        finding,
        observation,
        notes,
        MembershipDetail(
            exposure=groups,
            most_exposed=surest(rows[pairs], every, finding.again, truth.owners, labels) if leak else [],
            record_epsilon=shown,
        ),
        metrics=[
            AUC.of(area, 0.5, low=low, high=high, n=len(rows), of="records"),
            MEMBERSHIP_ACCURACY.share(right, len(rows), "records", 0.5),
            *_at_low(scores[member], scores[~member]),
            *blind,
            *([MEMBERSHIP_EPSILON.of(shown.bound.epsilon, n=pairs.shape[1], of="pairs of records")] if shown else []),
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
        leak=leak,
        p_value=p_value,
        p_value_at_best=best,
    )
    return Evaluation(result)


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


def _blind(observation: Observation, truth: Truth) -> tuple[list[MetricResult], float | None]:
    """Return the AUC of a classifier of the records alone, and its p-value, over all pairs, whoever's model was asked.

    How records were drawn is one question, however many clients and attacks there are.
    """
    records = observation.records
    rows = evaluated(truth, None)
    members = rows[truth.owners[rows] != NOBODY]
    pairs = torch.stack([members, truth.matched[members]])
    if records is None or pairs.shape[1] < FEWEST:
        return [], None
    if pairs.shape[1] > MOST:
        chosen = torch.randperm(pairs.shape[1], generator=generator(0, "blind", "pairs"))[:MOST]
        pairs = pairs[:, chosen.sort().values]
    key = fingerprint(records.inputs, records.labels, pairs, truth.values)
    if key not in _told_blindly:  # the same for every attack on them
        told = features(records.inputs, records.labels)
        told = torch.cat([told, one_hot(truth.values).double()], dim=1) if len(truth.values) else told
        _told_blindly.clear()
        _told_blindly[key] = blind_scores(told[pairs[0]], told[pairs[1]], 0)
    scores, others, p_value = _told_blindly[key]
    low, high = auc_interval(scores, others, resamples=_RESAMPLES, seed=0)
    return [BLIND_AUC.of(auc(scores, others), 0.5, low=low, high=high, n=pairs.numel(), of="records")], p_value


def _client_of(observation: Observation) -> int | None:
    """Return the client whose messages were received; None where there are several, in a sum, too."""
    clients = {client for m in observation.messages for client in m.update.members or (m.client,)}
    return clients.pop() if len(clients) == 1 else None


def _none_used(truth: Truth, own: int | None) -> str:
    whose = "a client that updates used" if own is None else f"client {own}"
    return f"none of the {len(truth.owners)} records is an example of {whose}; raise threat.records"


def evaluated(truth: Truth, client: int | None) -> Tensor:
    """Return the records (k,) that count: used members, of ``client`` if given, and their matched non-members."""
    counts = truth.owners > UNUSED
    counts &= truth.owners != NOBODY
    if client is not None:
        counts &= truth.owners == client
    return torch.nonzero(counts | counts[truth.matched])[:, 0]


def roc(members: Tensor, others: Tensor) -> tuple[Tensor, Tensor]:
    """Return the ROC curve of scores: shares (k,) of (m,) ``others``, (n,) ``members`` that pass, from none to all."""
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


def _membership_headline(findings: Sequence[FindingResult], evidence: Evidence) -> str:
    """Return the leak in words: decisions where these are better than guessing, else pairs."""
    decisions = pooled([m for f in findings for m in f.metrics if m.name == MEMBERSHIP_ACCURACY.name])
    start = "{who} can tell whether a record was used for training: "
    if decisions and decisions.low > 0.5:
        return f"{start}right for {100 * decisions.mean:.0f} % of {decisions.n} records, where guessing gets 50 %."
    return (
        f"{start}of one that was used and one that wasn't, it picks the right one in {100 * evidence.value:.0f} % of "
        f"such pairs of {evidence.n} records, where guessing gets 50 %."
    )


_CONFOUNDED = (
    "members differ from the other records before any training, which would pass for what training gave away; draw "
    "both from the same source (let the clients hold a random part of one split)"
)


def _membership_verdict(findings: Sequence[FindingResult]) -> Judgement:
    """Return the verdict, with what is found where few others may be taken for members: what an average hides.

    Where the records alone tell members from others, it doesn't conclude.
    """
    judged = _by_auc(findings)
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
    return judged._replace(verdict="inconclusive", text=text, headline="", advice=_CONFOUNDED)


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


_by_auc = by_test(
    AUC.name, "records", "bootstrap interval over matched pairs; one-sided Mann-Whitney test", _membership_headline
)


def _untold(findings: Sequence[FindingResult], name: str, limit: float) -> str | None:
    """Return why a limit on a rate at few false positives, or on ε, can't be tested; None where it can."""
    if name == MEMBERSHIP_EPSILON.name and findings:
        shown = [f.record_epsilon for f in findings if f.record_epsilon is not None]
        reach = max((one.attainable for one in shown), default=0.0)
        pairs = max((one.bound.canaries for one in shown), default=0)
        if reach > limit:
            return None
        return f"{name}: {pairs} pairs of records could show an ε of {reach:.3g} at most; raise threat.records"
    least = {metric.name: round(1 / share) for metric, share in LOW.items()}.get(name)
    if least is None or not findings or any(m.name == name for f in findings for m in f.metrics):
        return None
    return f"{name} needs {least:,} records that nobody trained on beside as many members; raise threat.records"


FINDING_TYPES["membership"] = FindingType(
    verdict=_membership_verdict,
    rules=(
        "Membership is 'inferred' when members score above other records, and guessing would reach that AUC with a "
        f"probability of at most {100 * SURE:g} % (one-sided Mann-Whitney test over the records). Where a classifier "
        "of the records alone, without any model, tells members from others (permutation test within the pairs, at "
        f"{100 * SURE:g} %), it is 'inconclusive'. It also is 'inferred' where the scores demonstrate a larger ε than "
        "the defence claims, with a confidence of 99 % over all runs of the attack.",
    ),
    metrics=(AUC, MEMBERSHIP_ACCURACY, TPR, TPR_PERMILLE, BLIND_AUC, MEMBERSHIP_EPSILON),
    question="tell whether a record was used for training",
    control="records",
    remedies=("fewer rounds", "more records"),
    learns=True,
    untold=_untold,
)


SOURCE_ACCURACY = Metric(
    "source_accuracy",
    "share of the clients' records whose client is named rightly; without the attack: by naming the client whose "
    "updates are over most examples",
    ends=(0, 1),
)
SOURCE_ADVANTAGE = Metric(
    "source_advantage",
    "that share, less the share of matched records nobody trained on for which the match's client is named: what "
    "training on the record itself gave away",
)
_DEALS = 9999  # of the records' owners, for the permutation test
_BLOCK = 2_000_000  # owners dealt at a time
_HOPELESS = 0.5  # p-value with every owner named, above which more records don't help: each class is of one client
_EXPLAINED = "luck is excluded, but not that the records' classes explain it"
_CLIENTS_FOUND = (
    "The share of the records whose client is among the first so many that the attack would name. Guessing names the "
    "clients in random order."
)


@evaluate.register
def evaluate_source(finding: SourceFinding, observation: Observation, truth: Truth, *, seed: int) -> Evaluation:
    """Compare the clients that are named with those that trained on the records.

    Only records count that a client's update used: whose the others are has no answer. Luck is excluded by a
    permutation test: with the records' owners dealt anew among the records of each class, 9,999 times, naming is right
    as often only by luck, however unequal the clients are, whatever client an attack prefers, and however much a class
    tells of whose a record is. Real-valued labels are of one class. Of deals with as many right names
    the better one is that whose owners stand higher in the attack's order of clients, so that the test's p-values are
    uniform where nothing leaks. An accuracy isn't above guessing unless it beats naming the client with most examples.

    Clients whose data differ are told apart by their kind of examples alone. How far that goes is measured in two ways:
    the attack is asked about the matched records, which nobody trained on, too (:data:`SOURCE_ADVANTAGE`); and a note
    says what would be right with the owners dealt among the records of each class. Where luck is excluded with the
    owners dealt among all records, but not within the classes, another note says so, and the verdict follows it.
    """
    if bool(finding.scores.isnan().any()):
        return refused(finding, observation)
    rows = torch.nonzero(truth.owners >= 0)[:, 0]
    owners = truth.owners[rows]
    if len(owners.unique()) < 2:
        reason = (
            f"the clients' updates used {len(rows)} of the {len(truth.owners)} records, all of one client; raise "
            "threat.records"
        )
        return refused(finding, observation, reason)
    n = len(rows)
    right = (finding.sources[rows] == owners).double()
    like = (finding.sources[truth.matched[rows]] == owners).double()
    accuracy = float(right.mean())
    guess = _largest(observation, owners)
    chance = expected(finding.sources[rows], owners)
    classes = _classes(observation, rows)
    by_label = expected(finding.sources[rows], owners, classes)
    better = interval((right - like).tolist(), resamples=_RESAMPLES, seed=seed)
    worth = _worth(finding, rows)
    place = _places(finding.clients, owners)
    p_value = permutation_test(worth, place, seed=seed, strata=classes)
    found = leaks(accuracy > guess, p_value)
    notes = [
        f"owners dealt anew: {chance:.3f} would be right; among the records of each class: {by_label:.3f}, which the "
        "labels alone explain"
    ]
    if not found and accuracy > guess:
        plain = permutation_test(worth, place, seed=seed)
        if plain <= SURE:
            notes.append(f"{_EXPLAINED} (owners dealt anew among all records: p = {plain:.2g})")
    result = done(
        finding,
        observation,
        notes,
        metrics=[
            SOURCE_ACCURACY.share(int(right.sum()), n, "records of clients", guess),
            SOURCE_ADVANTAGE.over(better, "matched pairs of records", 0.0),
        ],
        charts=[_clients_found(finding, rows, place)],
        leak=found,
        p_value=p_value,
        p_value_at_best=_if_all_were_right(owners, classes),
    )
    return Evaluation(result)


def expected(named: Tensor, owners: Tensor, strata: Tensor | None = None) -> float:
    """Return the share that is named rightly on average where owners are dealt anew within strata, in closed form.

    Σ_s Σ_k named_sk · owned_sk / n_s, over n: named_sk of the n_s records of stratum s are taken for client k's, and
    owned_sk are.

    All are (n,), of each record; all are of one stratum if None.
    """
    groups = torch.zeros_like(owners) if strata is None else strata
    total = 0.0
    for group in groups.unique():
        own = groups == group
        agree = sum(float((named[own] == k).sum()) * float((owners[own] == k).sum()) for k in owners[own].unique())
        total += agree / float(own.sum())
    return total / len(owners)


def permutation_test(
    worth: np.ndarray, owners: np.ndarray, *, seed: int, deals: int = _DEALS, strata: Tensor | None = None
) -> float:
    """Return the Monte Carlo p-value of Σ_i worth[i, owners[i]], one-sided, the observed deal counted as one.

    Exact in level: where owners are exchangeable within strata, P(p ≤ α) ≤ α for every α (Phipson and Smyth 2010).

    Args:
        worth: (n, k) what it is worth to give record i to owner k.
        owners: (n,) in 0 … k − 1.
        deals: how many, beside the observed one.
        strata: (n,) of each record; owners are dealt among those of one stratum; all are of one if None.
    """
    groups = [records_of.numpy() for records_of in _strata(strata, len(owners))]
    rng = np.random.default_rng(derive_seed(seed, "deals of owners"))
    records = np.arange(len(owners))
    observed = float(worth[records, owners].sum())
    reached = 1
    size = max(1, _BLOCK // len(owners))
    for start in range(0, deals, size):
        dealt = np.tile(owners, (min(size, deals - start), 1))
        for own in groups:
            dealt[:, own] = rng.permuted(dealt[:, own], axis=1)
        reached += int((worth[records, dealt].sum(axis=1) >= observed - 1e-9).sum())
    return reached / (deals + 1)


def _worth(finding: SourceFinding, rows: Tensor) -> np.ndarray:
    """Return (n, k + 1): 1 where the client is named, and less than 1/n for its place in the attack's order.

    So all places together weigh less than one record that is named rightly. The last column is for clients of whom
    no update is known.
    """
    scores = finding.scores[rows].numpy()
    named = finding.sources[rows].numpy()[:, None] == finding.clients.numpy()[None]
    below = (rankdata(scores, axis=1) - 1) / scores.shape[1]
    worth = named + below / len(scores)
    return np.concatenate([worth, np.zeros((len(worth), 1))], axis=1)


def _strata(strata: Tensor | None, n: int) -> list[Tensor]:
    """Return the records of each stratum; all of them are of one if None."""
    if strata is None:
        return [torch.arange(n)]
    return [torch.nonzero(strata == group).flatten() for group in strata.unique()]


def _if_all_were_right(owners: Tensor, strata: Tensor | None) -> float:
    """Return the p-value that one may expect where every owner is named: of all deals, only equal ones do as well."""
    equal = 0.0
    for own in _strata(strata, len(owners)):
        counts = owners[own].unique(return_counts=True)[1].tolist()
        equal += sum(math.lgamma(count + 1) for count in counts) - math.lgamma(len(own) + 1)
    return (1 + _DEALS * math.exp(equal)) / (_DEALS + 1)


def _places(clients: Tensor, owners: Tensor) -> np.ndarray:
    """Return (n,) the column of each record's owner; k where no update of it is known."""
    column = {client: place for place, client in enumerate(clients.tolist())}
    return np.array([column.get(owner, len(column)) for owner in owners.tolist()])


def _classes(observation: Observation, rows: Tensor) -> Tensor | None:
    labels = observation.records.labels if observation.records is not None else None
    return None if labels is None or labels.is_floating_point() or labels.ndim != 1 else labels[rows]


def _largest(observation: Observation, owners: Tensor) -> float:
    """Return the share that is right by always naming the client whose update is over most examples.

    Where several are, one of them is named at random, which is right as often on average.
    """
    sizes: dict[int, int] = {}
    for message in observation.messages:
        sizes[message.client] = max(sizes.get(message.client, 0), message.update.num_examples)
    largest = [client for client, size in sizes.items() if size == max(sizes.values())]
    return float(torch.isin(owners, torch.tensor(largest)).double().mean()) / len(largest)


def _clients_found(finding: SourceFinding, rows: Tensor, place: np.ndarray) -> Chart:
    k = len(finding.clients)
    scores = np.concatenate([finding.scores[rows].numpy(), np.full((len(rows), 1), -np.inf)], axis=1)
    own = scores[np.arange(len(rows)), place][:, None]
    ahead = np.where(place < k, (scores[:, :k] > own).sum(axis=1), k)
    first = list(range(1, k + 1))
    return Chart(
        title="clients found",
        caption=_CLIENTS_FOUND,
        x_label="clients named",
        y_label="share of the records found",
        lines=[
            Line(name="attack", x=[float(m) for m in first], y=[float((ahead < m).mean()) for m in first]),
            Line(name="guessing", x=[float(m) for m in first], y=[m / k for m in first]),
        ],
    )


def _source_headline(findings: Sequence[FindingResult], evidence: Evidence) -> str:
    gains = [m.value for f in findings for m in f.metrics if m.name == SOURCE_ADVANTAGE.name]
    like = evidence.value - sum(gains) / len(gains)
    return (
        f"{{who}} can tell which client a record comes from: right for {100 * evidence.value:.0f} % of "
        f"{evidence.n} records, where guessing gets {100 * (evidence.by_guessing or 0):.0f} %; of records like them "
        f"that nobody trained on, it gives {100 * like:.0f} % to the same client."
    )


_judge_source = by_test(
    SOURCE_ACCURACY.name,
    "records of clients",
    "exact binomial interval (Clopper-Pearson); permutation test of whose the records of each class are",
    _source_headline,
)


def _source_verdict(findings: Sequence[FindingResult]) -> Judgement:
    """Return the verdict; where luck is excluded, but not that classes explain it, it says so and doesn't conclude."""
    judged = _judge_source(findings)
    explained = any(note.startswith(_EXPLAINED) for finding in findings for note in finding.notes)
    best = max(f.p_value_at_best or 0.0 for f in findings)
    if judged.verdict == "inferred" or not (explained or best > _HOPELESS):
        return judged
    more = "" if best > SURE else "more records, or "
    advice = (
        "the records' classes may explain what it tells: clients have different ones, which are the leak (see the "
        f"attack 'labels'); to ask for the source itself, audit {more}clients whose classes are alike (partition: iid)"
    )
    text = f"{judged.text}; the records' classes may explain that" if explained else judged.text
    return judged._replace(verdict="inconclusive", text=text, advice=advice)


FINDING_TYPES["source"] = FindingType(
    verdict=_source_verdict,
    rules=(
        "A record's client is 'inferred' when more records are given to the client that trained on them than by naming "
        "the one with most examples, and with the owners dealt anew among the records of each class as many would be "
        f"right with a probability of at most {100 * SURE:g} % (permutation test). How much of that any record of the "
        "same kind gives away, trained on or not, is said beside it: source_advantage. Where luck is excluded, but not "
        "that the classes explain it, it is 'inconclusive'.",
    ),
    metrics=(SOURCE_ACCURACY, SOURCE_ADVANTAGE),
    question="tell which client a record comes from",
    control="sources",
    remedies=("more records",),
    learns=True,
)


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
    own = _client_of(observation)
    rows = evaluated(truth, own)
    if not len(rows) or observation.records is None:
        return refused(finding, observation, _none_used(truth, own))
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
    blind_p = _blind(observation, truth)[1]
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
        leak=leaks(over.mean > 0 and more.mean > 0 and (blind_p or 1.0) > SURE, p_value),
        p_value=p_value,
        p_value_at_best=sign_test(int((1 - usual)[member].sum()), 0),
    )
    return Evaluation(result)


def most_frequent(values: Tensor, labels: Tensor) -> Tensor:
    """Return (n,) for each record the most frequent of the (n,) values among the records of its class.

    Real-valued labels are all of one class. Of several that are as frequent, the least.
    """
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
        f"{100 * (evidence.by_guessing or 0):.0f} %."
    )


_judge_attribute = by_test(
    ATTRIBUTE_ACCURACY.name,
    "records of clients",
    "exact binomial interval (Clopper-Pearson); the larger p-value of two exact sign tests, against the most "
    "frequent value and against matched records that were not used",
    _attribute_headline,
)


def _attribute_verdict(findings: Sequence[FindingResult]) -> Judgement:
    """Return the verdict; where members differ from the others by themselves, it doesn't conclude."""
    judged = _judge_attribute(findings)
    p_value = min((f.blind_p_value for f in findings if f.blind_p_value is not None), default=1.0)
    if p_value > SURE or judged.verdict != "inferred":
        return judged
    text = f"{judged.text}; the records alone, without any model, tell members from others: p = {p_value:.2g}"
    return judged._replace(verdict="inconclusive", text=text, headline="", advice=_CONFOUNDED)


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
