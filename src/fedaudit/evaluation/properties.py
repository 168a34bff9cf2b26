"""Whether an attack knew which clients have a property, beyond what their labels and sizes tell."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from scipy.stats import mannwhitneyu
from torch import Tensor

from fedaudit.attacks.records.property import PropertyFinding
from fedaudit.evaluation.finding_types import FINDING_TYPES, Evaluation, FindingType, Metric, done, evaluate, refused
from fedaudit.evaluation.statistics import SURE, proportion, roc
from fedaudit.evaluation.verdicts import Judgement, by_test, leaks
from fedaudit.modalities import NOTHING
from fedaudit.results import Chart, FindingResult, Line
from fedaudit.transcript.observation import Observation
from fedaudit.transcript.truth import Truth
from fedaudit.utils.seeds import derive_seed

AUC = Metric(
    "property_auc",
    "how well scores tell clients with the property from those without, 1 if all of the former are above all of the "
    "latter; without the attack: by the classes of their examples alone",
    ends=(0, 1),
)
PARTIAL = Metric(
    "property_partial",
    "correlation of score and property over the clients, after what classes and numbers of examples explain of either",
)
_RESAMPLES = 2000
_DEALS = 9999  # of the clients' scores, for the permutation test
_TINY = 1e-9
_LEFT = 4  # clients beyond the covariates, at least, for the test to say anything
_EXPLAINED = "luck is excluded, but not that labels and sizes of the clients explain it"
_CAPTION = (
    "The share of the clients with the property that are found, for each share of the others that are taken for such. "
    "Labels: by the classes of a client's examples alone, with what the adversary's own examples say of them."
)


@evaluate.register
def evaluate_property(finding: PropertyFinding, observation: Observation, truth: Truth, *, seed: int) -> Evaluation:
    """Compare scores with the clients' true shares of examples that have the property.

    The unit is the client, in however many rounds it sends. A client whose labels go with the property may be told by
    them, one with more examples by the size of what it sends: no leak of the property. So the p-value is that of the
    partial correlation of score and property over the clients, under permutations of the scores' residuals (Freedman
    and Lane 1983), with what differs between clients of these taken out of both: the classes' shares, the number of
    examples and its logarithm, and the log-likelihood ratio of labels with and without the property, by the adversary's
    public examples; and, as long as they are no more than half as many as the clients, the squares of the shares and of
    the ratio. Where clients are alike in all of these it is the exact permutation test. What a linear classifier says
    of gradients is linear in the classes' shares, so that all of that is taken out; for several local steps and for
    forests this is an approximation. And the AUC must be above that of the likelihood ratio: of labels alone.

    Where luck is excluded (Mann-Whitney test), but not labels and sizes, a note says so, and the verdict follows it.
    """
    clients = finding.clients.tolist()
    shares = truth.shares[finding.clients] if len(truth.shares) > max(clients) else torch.full((len(clients),), -1.0)
    has = (shares >= observation.threat.property_share).numpy()
    if has.all() or not has.any() or bool((shares < 0).any()):
        many = "all" if has.all() else "none"
        reason = (
            f"{many} of the {len(clients)} clients have the property for {100 * observation.threat.property_share:g} % "
            "of their examples: there is nothing to tell apart; change threat.property_share, or share examples out by "
            "partition: attribute"
        )
        return refused(finding, observation, reason)
    if not bool(finding.scores.isfinite().all()):
        return refused(finding, observation)
    scores = finding.scores.numpy() / (float(finding.scores.abs().max()) or 1.0)  # of any scale
    labels = [_labels(observation, truth, client) for client in clients]
    by_label = _log_ratios(observation, labels)
    alone = max(0.5, _auc(by_label, has))
    others = covariates(labels, [_examples(observation, client) for client in clients], by_label)
    area = _auc(scores, has)
    low, high = _interval(scores, has, seed)
    r, p_value = partial_test(scores, has.astype(float), others, seed=seed)
    best = partial_test(has.astype(float), has.astype(float), others, seed=seed)[1]
    counted = {"n": len(clients), "of": "clients"}
    ends = _fisher(r, len(clients) - others.shape[1])
    plain = float(mannwhitneyu(scores[has], scores[~has], alternative="greater").pvalue)
    found = leaks(area > alone and r > 0, p_value)
    notes = [
        f"{int(has.sum())} of {len(clients)} clients have the property "
        f"'{observation.threat.client_property}'; labels alone tell it with an AUC of "
        f"{alone:.3f}; labels and sizes taken out, score and property correlate by {r:.2f} (p = {p_value:.2g})"
    ]
    if plain <= SURE and not found:
        notes.append(f"{_EXPLAINED} (permutation of the clients alone: p = {plain:.2g})")
    result = done(
        finding,
        observation,
        notes,
        metrics=[
            AUC.of(area, alone, low=low, high=high, **counted),
            PARTIAL.of(r, 0.0, low=ends[0], high=ends[1], **counted),
        ],
        charts=[_chart(scores, by_label, has)],
        is_leak=found,
        p_value=p_value,
        p_value_at_best=best,
    )
    return Evaluation(result)


def partial_test(
    scores: np.ndarray, has: np.ndarray, others: np.ndarray, *, seed: int, deals: int = _DEALS
) -> tuple[float, float]:
    """Return the partial correlation of scores and property given covariates, and its one-sided p-value.

    By 9,999 permutations of the scores' residuals, with the observed one counted as one (Freedman and Lane 1983);
    without covariates it is the exact permutation test of the correlation. They are 0 and 1 where the covariates
    determine scores or property, or leave fewer than four clients to tell by.

    Args:
        scores: (k,) of clients.
        has: (k,) 1 with the property and 0 without.
        others: (k, c) covariates, with a column of ones.
        deals: how many, beside the observed one.
    """
    basis = np.linalg.qr(others)[0]

    def left(values: np.ndarray) -> np.ndarray:
        return np.asarray(values - (values @ basis) @ basis.T)

    if len(scores) - others.shape[1] < _LEFT:
        return 0.0, 1.0
    x, y = left(has[None])[0], left(scores[None])[0]
    if np.square(x).sum() <= _TINY * len(x) or np.square(y).sum() <= _TINY * max(_TINY, np.square(scores).sum()):
        return 0.0, 1.0

    def correlation(values: np.ndarray) -> np.ndarray:
        rest = left(values)
        lengths = np.sqrt(np.square(rest).sum(axis=1) * np.square(x).sum())
        return np.asarray((rest @ x) / lengths.clip(1e-300))

    rng = np.random.default_rng(derive_seed(seed, "deals of scores"))
    observed = float(correlation(y[None])[0])
    dealt = rng.permuted(np.tile(y, (deals, 1)), axis=1)
    reached = 1 + int((correlation(dealt) >= observed - 1e-9).sum())
    return observed, reached / (deals + 1)


def covariates(labels: Sequence[Tensor], sizes: Sequence[int], by_label: np.ndarray) -> np.ndarray:
    """Return (k, c): a column of ones, and what of the clients' labels and sizes differs between them.

    Args:
        labels: of each client's examples, or pixels; real-valued ones say nothing.
        sizes: how many examples each client's updates are over.
        by_label: (k,) what labels alone say of the property.
    """
    k = len(labels)
    columns = [np.ones(k)]
    counts, shares = np.array(sizes, dtype=float), _shares(labels)
    squares = np.square(np.column_stack([by_label, shares])).T  # what goes with labels in another way than linearly
    plain = len(columns) + shares.shape[1] + 3
    for i, column in enumerate((*shares.T, np.log(counts), counts, by_label, *squares)):
        if i + 1 >= plain and len(columns) >= k // 2:
            break
        basis = np.linalg.qr(np.stack(columns, axis=1))[0]
        rest = column - basis @ (basis.T @ column)
        if np.square(rest).sum() > _TINY * max(1.0, float(np.square(column).sum())):
            columns.append(column)
    return np.stack(columns, axis=1)


def _shares(labels: Sequence[Tensor]) -> np.ndarray:
    """Return (k, classes) the share of each class, or label, at each client; none where targets are neither."""
    if _several(labels):
        return torch.stack([own.double().mean(dim=0) for own in labels]).numpy()
    if any(own.is_floating_point() or own.ndim != 1 for own in labels):
        return np.zeros((len(labels), 0))
    classes = torch.cat(list(labels)).clamp_min(0).unique()
    return torch.stack([(own[:, None] == classes).double().mean(dim=0) for own in labels]).numpy()


def _several(labels: Sequence[Tensor]) -> bool:
    """Whether these are several labels an example, (n, k) of 0 and 1."""
    return all(
        own.is_floating_point() and own.ndim == 2 and own.shape[1] > 1 and bool(((own == 0) | (own == 1)).all())
        for own in labels
    )


def _labels(observation: Observation, truth: Truth, client: int) -> Tensor:
    """Return the labels of a client's examples; for masks those of all their pixels, one after the other."""
    own = torch.cat([truth.labels[m.round, m.client] for m in observation.messages if m.client == client])
    return own[own != NOTHING] if observation.task_info.task_kind.dense else own


def _examples(observation: Observation, client: int) -> int:
    own = [m.update.num_examples for m in observation.messages if m.client == client]
    return round(sum(own) / len(own))


def _log_ratios(observation: Observation, labels: Sequence[Tensor]) -> np.ndarray:
    """Return (k,) the mean log-likelihood ratio of each client's labels, with and without the property.

    The public examples with and without it give each class's count, plus one. Several labels of an example count as
    independent, and each by whether it is there.
    """
    records = observation.records
    if records is None:
        return np.zeros(len(labels))
    public, marks = records.public_labels, records.public_property
    if _several([public, *labels]):
        there = [(public[own].double().sum(dim=0) + 1) / (int(own.sum()) + 2) for own in (marks, ~marks)]
        with_it, without = there[0].log() - there[1].log(), (1 - there[0]).log() - (1 - there[1]).log()
        return np.array([float((own.double() @ with_it + (1 - own.double()) @ without).mean()) for own in labels])
    if observation.task_info.task_kind.dense:
        asked = public != NOTHING
        public, marks = public[asked], marks.view(-1, *[1] * (public.ndim - 1)).expand_as(public)[asked]
    if public.ndim != 1 or public.is_floating_point():
        return np.zeros(len(labels))
    k = 1 + int(max(int(own.max()) for own in [public, *labels]))
    counts = [torch.bincount(public[own], minlength=k).double() + 1 for own in (marks, ~marks)]
    ratio = (counts[0] / counts[0].sum()).log() - (counts[1] / counts[1].sum()).log()
    return np.array([float(ratio[own].mean()) for own in labels])


def _auc(scores: np.ndarray, has: np.ndarray) -> float:
    above = np.sign(np.round(scores[has][:, None] - scores[~has][None], 12))
    return float((above.mean() + 1) / 2)


def _interval(scores: np.ndarray, has: np.ndarray, seed: int) -> tuple[float, float]:
    """Return the 95 % percentile bootstrap interval of the AUC over clients, drawn anew with and without the property.

    Where the AUC is 0 or 1, the open end is that of the exact interval of as many coin tosses as the rarer sort has
    clients.
    """
    rng = np.random.default_rng(derive_seed(seed, "bootstrap"))
    above = (np.sign(np.round(scores[has][:, None] - scores[~has][None], 12)) + 1) / 2
    a, b = above.shape
    rows, columns = rng.integers(0, a, (_RESAMPLES, a)), rng.integers(0, b, (_RESAMPLES, b))
    areas = [above[own][:, other].mean() for own, other in zip(rows, columns, strict=True)]
    low, high = (float(end) for end in np.percentile(areas, [2.5, 97.5]))
    if low == high:
        n = min(a, b)
        ends = proportion(round(low * n), n)
        return min(low, ends[0]), max(high, ends[1])
    return low, high


def _fisher(r: float, free: int) -> tuple[float, float]:
    """Return the 95 % interval of a partial correlation by Fisher's z; ``free``: clients less covariates."""
    if free <= 2:
        return -1.0, 1.0
    z = math.atanh(max(-1 + 1e-12, min(1 - 1e-12, r)))
    half = 1.959964 / math.sqrt(free - 2)
    return math.tanh(z - half), math.tanh(z + half)


def _chart(scores: np.ndarray, by_label: np.ndarray, has: np.ndarray) -> Chart:
    lines = []
    for name, values in (("attack", scores), ("labels alone", by_label)):
        rounded = torch.from_numpy(np.round(values, 12))
        false, true = roc(rounded[has], rounded[~has])
        lines.append(Line(name=name, x=false.tolist(), y=true.tolist()))
    return Chart(
        title="clients with the property found",
        caption=_CAPTION,
        x_label="share of the other clients taken for such",
        y_label="share of the clients with it found",
        lines=[*lines, Line(name="guessing", x=[0.0, 1.0], y=[0.0, 1.0])],
    )


_judge = by_test(
    AUC.name,
    "clients",
    "percentile bootstrap interval over clients; permutation test (Freedman and Lane) of the partial correlation of "
    "score and property, labels and sizes taken out",
    "{who} can tell which clients' data have a property: of a client with it and one without, the former is named in "
    "{share} % of such pairs of {n} clients, where their labels alone would name it in {guess} %.",
)


def _verdict(findings: Sequence[FindingResult]) -> Judgement:
    """Return the verdict; it says where luck is excluded, but not labels and sizes, and then is inconclusive."""
    judged = _judge(findings)
    explained = any(note.startswith(_EXPLAINED) for finding in findings for note in finding.notes)
    if judged.verdict == "inferred" or not explained:
        return judged
    advice = (
        "labels and sizes of the clients explain what it tells: they are the leak (see the attack 'labels'); to ask "
        "for the property itself, audit more clients, or clients whose labels don't go with it (partition: attribute, "
        "labels: alike)"
    )
    text = f"{judged.text}; labels and sizes of the clients explain that"
    return judged._replace(verdict="inconclusive", text=text, advice=advice)


FINDING_TYPES["property"] = FindingType(
    verdict=_verdict,
    rules=(
        "A property is 'inferred' when scores tell clients with it from those without better than their labels alone "
        "would, and, with what labels and numbers of examples explain taken out of score and property, luck correlates "
        f"them as much with a probability of at most {100 * SURE:g} % (permutation test over clients). Where luck is "
        "excluded, but not labels and sizes, it is 'inconclusive'.",
    ),
    metrics=(AUC, PARTIAL),
    question="tell which clients' data have a property",
    control="property",
)
