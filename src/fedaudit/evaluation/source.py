"""Whether an attack knew which client a record comes from."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from scipy.stats import rankdata
from torch import Tensor

from fedaudit.attacks.records.source import SourceFinding
from fedaudit.evaluation.blind import CONFOUNDED, told_blindly
from fedaudit.evaluation.finding_types import FINDING_TYPES, Evaluation, FindingType, Metric, done, evaluate, refused
from fedaudit.evaluation.statistics import SURE, interval, sign_test
from fedaudit.evaluation.verdicts import Judgement, by_test, leaks
from fedaudit.results import Chart, Evidence, FindingResult, Line
from fedaudit.transcript.observation import Observation
from fedaudit.transcript.truth import Truth
from fedaudit.utils.seeds import derive_seed

_RESAMPLES = 2000
SOURCE_ACCURACY = Metric(
    "source_accuracy",
    "share of the clients' records whose client is named rightly; without the attack: by naming the client whose "
    "updates are over most examples; of an attack on the model alone: by the records alone, or the most frequent "
    "client",
    ends=(0, 1),
)
SOURCE_BLIND = Metric(
    "source_blind_accuracy",
    "the same share by the same classifier of the records alone, without any model",
    higher_is_better=False,
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
_TOLD_ALREADY = (
    "the records themselves tell their client, without any model, so there is nothing that a model could add: whoever "
    "holds such a record knows; ask about clients whose data are more alike"
)
_STRANGERS = "the matched records aren't of the member's own client"
_KEEP_BACK = (
    "the matched records, which nobody trained on, aren't of the member's own client, so the model may tell clients "
    "apart by what their data are like, without having seen the record; simulate it with threat.known_records, where "
    "clients keep matches back (each holds known_records, and an even number of further examples of each class, enough "
    "for target_records in all; data that name persons have none kept back)"
)
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

    Of an attack that says what the same adversary tells of the records alone (``blind``) only what it adds to that
    counts: its p-value is the largest of three, that permutation test's, so that no client is named for how often it
    occurs; that of an exact sign test over the records that only one of the two names rightly; and that of one over the
    matched pairs of which the attack gives only one to the member's client. The last is exact if a member's match is of
    the same client's own examples, of which chance said that it is not trained on (``truth.homes``): then, where
    training on a record leaves nothing, the two are one like the other, whatever clients are like. A match from anybody
    may be like another client's records, and a model that learnt other people of these clients tells the two apart;
    then nothing is called a leak, and the verdict is at most inconclusive. It is that, too, where members and others
    differ by themselves (:func:`~fedaudit.evaluation.blind.told_blindly`).
    """
    if bool(finding.scores.isnan().any()):
        return refused(finding, observation)
    rows = torch.nonzero(truth.owners >= 0)[:, 0]
    owners = truth.owners[rows]
    if len(owners.unique()) < 2:
        reason = (
            f"the clients' updates used {len(rows)} of the {len(truth.owners)} records, all of one client; raise "
            "threat.target_records"
        )
        return refused(finding, observation, reason)
    n = len(rows)
    right = (finding.sources[rows] == owners).double()
    like = (finding.sources[truth.matched[rows]] == owners).double()
    accuracy = float(right.mean())
    without = None if finding.blind is None else (finding.blind[rows] == owners).double()
    usual = float(owners.unique(return_counts=True)[1].max()) / n
    guess = _largest(observation, owners) if without is None else max(float(without.mean()), usual)
    chance = expected(finding.sources[rows], owners)
    classes = _classes(observation, rows)
    by_label = expected(finding.sources[rows], owners, classes)
    better = interval((right - like).tolist(), resamples=_RESAMPLES, seed=seed)
    worth = _worth(finding, rows)
    place = _places(finding.clients, owners)
    p_value = permutation_test(worth, place, seed=seed, strata=classes)
    best, blind_p, told = _if_all_were_right(owners, classes), None, []
    if without is not None:
        blind_p = told_blindly(observation, truth)[1]
        for other in (without, like):
            p_value = max(p_value, sign_test(int((right > other).sum()), int((right < other).sum())))
            best = max(best, sign_test(int((1 - other).sum()), 0))
        told = [SOURCE_BLIND.share(int(without.sum()), n, "records of clients", usual)]
    at_home = without is None or (len(truth.homes) > 0 and truth.homes[truth.matched[rows]].equal(owners))
    found = leaks(accuracy > guess and (blind_p or 1.0) > SURE, p_value) and at_home
    notes = [
        f"owners dealt anew: {chance:.3f} would be right; among the records of each class: {by_label:.3f}, which the "
        "labels alone explain"
    ]
    if not at_home:
        notes.append(_STRANGERS)
    if without is None and not found and accuracy > guess:
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
            *told,
        ],
        blind_p_value=blind_p,
        charts=[_clients_found(finding, rows, place)],
        is_leak=found,
        p_value=p_value,
        p_value_at_best=best,
    )
    return Evaluation(result)


def expected(named: Tensor, owners: Tensor, strata: Tensor | None = None) -> float:
    """Return the share that is named rightly on average where owners are dealt anew within strata, in closed form.

    Σ_s Σ_k named_sk · owned_sk / n_s, over n: of the n_s records of stratum s, named_sk are taken for client k's, and
    owned_sk are. All arguments are (n,); None: one stratum.
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
    """Return the Monte Carlo p-value of Σ_i worth[i, owners[i]], one-sided, with the observed deal counted as one.

    Exact in level: where owners are exchangeable within strata, P(p ≤ α) ≤ α for every α (Phipson and Smyth 2010).

    Args:
        worth: (n, k) what it is worth to give record i to owner k.
        owners: (n,) in 0 … k − 1.
        deals: how many, beside the observed one.
        strata: (n,); owners are dealt among the records of one stratum. None: one stratum.
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
    """Return (n, k + 1): 1 for the named client, and less than 1/n for each by its place in the attack's order.

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
    """Return the share that is right by naming always the client with most examples, of several one at random."""
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
        f"{evidence.n} records, where guessing gets {100 * (evidence.baseline or 0):.0f} %; of records like them "
        f"that nobody trained on, it gives {100 * like:.0f} % to the same client."
    )


def _outputs_headline(findings: Sequence[FindingResult], evidence: Evidence) -> str:
    gains = [m.value for f in findings for m in f.metrics if m.name == SOURCE_ADVANTAGE.name]
    like = evidence.value - sum(gains) / len(gains)
    return (
        f"{{who}} can tell by the model alone which client a record comes from: right for {100 * evidence.value:.0f} % "
        f"of {evidence.n} records, where {100 * (evidence.baseline or 0):.0f} % are without the model; of records like "
        f"them that nobody trained on, it gives {100 * like:.0f} % to the same client."
    )


_judge_source = by_test(
    SOURCE_ACCURACY.name,
    "records of clients",
    "exact binomial interval (Clopper-Pearson); permutation test of whose the records of each class are",
    _source_headline,
)
_judge_outputs = by_test(
    SOURCE_ACCURACY.name,
    "records of clients",
    "exact binomial interval (Clopper-Pearson); the largest p-value of a permutation test of whose the records of each "
    "class are and of two exact sign tests, against the records alone and against matched records that were not used",
    _outputs_headline,
)


def _outputs_verdict(findings: Sequence[FindingResult]) -> Judgement:
    """Return the verdict, which is inconclusive where nothing is left to tell, or members differ by themselves."""
    judged = _judge_outputs(findings)
    p_value = min((f.blind_p_value for f in findings if f.blind_p_value is not None), default=1.0)
    if p_value <= SURE:
        text = f"{judged.text}; the records alone, without any model, tell members from others: p = {p_value:.2g}"
        return judged._replace(verdict="inconclusive", text=text, headline="", advice=CONFOUNDED)
    if judged.verdict == "inferred" and any(_STRANGERS in f.notes for f in findings):
        return judged._replace(
            verdict="inconclusive", text=f"{judged.text}; {_STRANGERS}", headline="", advice=_KEEP_BACK
        )
    if judged.verdict != "inferred" and max(f.p_value_at_best or 0.0 for f in findings) > _HOPELESS:
        return judged._replace(verdict="inconclusive", advice=_TOLD_ALREADY)
    return judged


def _source_verdict(findings: Sequence[FindingResult]) -> Judgement:
    """Return the verdict; it says where luck is excluded, but not that classes explain it, and then is inconclusive."""
    if any(m.name == SOURCE_BLIND.name for f in findings for m in f.metrics):
        return _outputs_verdict(findings)
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
        "that the classes explain it, it is 'inconclusive'. Of an attack on the model alone more records must be named "
        "rightly than by the same classifier of the records alone, and than matched records that nobody trained on are "
        f"given to the same client; luck does as well with a probability of at most {100 * SURE:g} %, by each of the "
        "permutation test and two exact sign tests. Where members differ from matched records by themselves, or the "
        "matched ones aren't examples that the member's own client kept from training, it is at most 'inconclusive'.",
    ),
    metrics=(SOURCE_ACCURACY, SOURCE_ADVANTAGE, SOURCE_BLIND),
    question="tell which client a record comes from",
    control="sources",
    remedies=("more records",),
    learns=True,
)
