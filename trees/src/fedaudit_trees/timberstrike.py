"""Rows of a client from the boosted trees that it sends (TimberStrike)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import Bounds, LinearConstraint, linear_sum_assignment, linprog, milp
from scipy.sparse import coo_array, csr_array
from scipy.stats import norm

from fedaudit.attacks import Attack, Case, NotApplicable, Observation, Progress, RowFinding, register
from fedaudit.modalities import Column, number_columns
from fedaudit.task import TaskInfo
from fedaudit.utils import Count
from fedaudit_trees.model import OBJECTIVES, Tree
from fedaudit_trees.record import HELD, TreeRecord

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]

_MOST_ROWS = 20_000
_TOLERANCE = 0.319  # standard deviations: how near counts in the confidence of a number, as in the evaluation
_NODES = 200  # of the branch and bound over the few rows that the relaxation splits
_NEAR = 2e-6  # relative: how near a leaf's value, a float32, is to the one that counts give
_EDGE = 1e-9
_TINY = 1e-12


@dataclass
class _Rows:
    """The rows that are rebuilt: row i has low ≤ x < high, and this label and margin."""

    low: Floats
    high: Floats
    labels: Floats
    margins: Floats

    def allowed(self, low: Floats, high: Floats, discrete: Flags) -> Flags:
        """Return (n, J) whether a row can be in each of J boxes (J, d); of 0-1 positions the box must hold one."""
        fits = np.ones((len(self.low), len(low)), dtype=bool)
        for f in np.flatnonzero((np.isfinite(low) | np.isfinite(high)).any(axis=0)):
            a, b = (
                np.maximum(self.low[:, f, None], low[None, :, f]),
                np.minimum(self.high[:, f, None], high[None, :, f]),
            )
            fits &= (((a <= 0) & (b > 0)) | ((a <= 1) & (b > 1))) if discrete[f] else a < b
        return fits

    def enter(self, low: Floats, high: Floats, one_hot: list[list[int]]) -> None:
        """Narrow every row (n, d) to a box of its own; where a category is certain, the column's others aren't."""
        self.low, self.high = np.maximum(self.low, low), np.minimum(self.high, high)
        for places in one_hot:
            sure: Flags = np.asarray(self.low[:, places] > 0)
            others = np.any(sure, axis=1, keepdims=True) & ~sure
            self.high[:, places] = np.where(others, np.minimum(self.high[:, places], 0.5), self.high[:, places])


@register
class TimberStrike(Attack):
    """Rows of each client from its trees, by TimberStrike (Di Gennaro et al. 2025, arXiv 2506.07605).

    First-tree probing: before the first tree every example has the same probability p, so a leaf with H, the sum of
    hessians (xgboost's cover), and the value v = −ηG/(H + λ) holds n = H/(p(1 − p)) examples, of which n·p − G are of
    class 1, and each lies in the box of the splits above the leaf. In a regression by squares H = n, and G gives the
    mean label. Every later tree of the client: each row goes into one leaf that its box meets, so that
    Σ_j |Σ_i x_ij g_i − G_j| + |Σ_i x_ij h_i − H_j| is least, with g_i = p_i − y_i and h_i = p_i(1 − p_i) of its own
    margin; its box is cut with the leaf's, its margin moved by the leaf's value. Trees that others added in between
    move a margin by the mean of the leaves that the box meets, weighted by cover.

    Departures. The paper gives the integer programme to Gurobi for minutes; here rows of which the same is known are
    counted together, and branch and bound (HiGHS) ends after a number of nodes, not seconds: the same bits twice. What
    a box leaves open, the paper fills with its middle, between the ends of the adversary's own rows, and categories by
    a random forest of these. Here a client fills rows with those that it holds, of the same label and as little
    outside of the boxes as can be, each as often as the next, cut to the boxes; who holds none spreads values over
    the box by the standard normal (data are standardised), and takes the category that the trees' covers make most
    frequent, else the first. Without cover, which the paper doesn't treat, the counts of a leaf are the fewest that
    give its value, a float32, and later trees are matched by Σ_i x_ij (g_i + v_j h_i/η) + λ v_j/η = 0, in which cover
    doesn't occur. Masked cover (NVFlare sends 1 for all) isn't missing: gains and weights tell it
    (:meth:`fedaudit_trees.model.Tree.with_cover`). Where a client's first tree was grown on others' trees (cyclic),
    p is that of the mean over the leaves of these that the box meets, and counts are approximate. In a regression rows
    of one leaf have one label, moved by the mean residual that every later leaf tells.

    What bounds it is measured (lab/docs/results/trees-timberstrike): on breast cancers and Adult the true leaves of the
    client's own trees give no more cells than guessing; on diabetes they give some more than those found. There, and in
    bagging, true assignments have larger residuals than found ones, as labels are means and others' leaves are unknown.

    Args:
        trees: of each client, from its first, at most.
    """

    name = "timberstrike"
    summary = "rows and labels of a client from the boosted trees that it sends: counts of leaves, boxes of splits"
    paper = "Di Gennaro et al. 2025 (TimberStrike)"
    threat_model = "server, eavesdropper or client, passive"
    needs = ("a federation of boosted trees (algorithm: trees)", "the step and λ of training")
    default_scope = "client"
    examples = ("table",)
    recovers = "rows of tables"
    finds = RowFinding
    reads = TreeRecord
    on_sums = "works: on sums of histograms, of the rows of all clients together"

    trees: Count = 100

    @classmethod
    def fits(cls, case: Case) -> bool:
        return case.protocol == cls.reads.kind

    def check(self, observation: Observation) -> None:
        """Raise where there are no trees, or what they were made with isn't known."""
        super().check(observation)
        record = observation.sent
        assert isinstance(record, TreeRecord)
        if not observation.threat.knows_training:
            raise NotApplicable(
                "timberstrike needs the learning rate and λ, by which a leaf's value is divided; set "
                "threat.knows_training=true"
            )
        if len(record.victims) != 1:
            raise NotApplicable("timberstrike is for one client at a time; use Observation.split('client')")
        if record.spec.noise == 0 and self._most_rows(observation) > _MOST_ROWS:
            raise NotApplicable(f"timberstrike is for clients of {_MOST_ROWS:,} examples at most")

    def _most_rows(self, observation: Observation) -> float:
        record = observation.sent
        assert isinstance(record, TreeRecord)
        first = next((m for m in record.messages if m.client == record.victims[0]), None)
        if first is None:
            raise NotApplicable("timberstrike: the adversary sees no tree of this client")
        tree = first.booster.trees[0]
        cover = tree.cover
        if cover is not None and len(cover) == 1 and not tree.value[0] and cover[0] < record.spec.min_child_weight:
            raise NotApplicable(
                "timberstrike: the client's rows weigh less than min_child_weight, so xgboost gave its tree no value: "
                "it tells their number alone"
            )
        return 0.0 if cover is None else float(cover[0]) * (4 if first.booster.objective == OBJECTIVES[0] else 1)

    def _run(self, observation: Observation, generator: torch.Generator, _: str, progress: Progress) -> RowFinding:
        record, info = observation.sent, observation.task_info
        assert isinstance(record, TreeRecord)
        (client,) = record.victims
        own = [m for m in record.messages if m.client == client]
        logistic, d = own[0].booster.objective == OBJECTIVES[0], own[0].booster.features
        rate, penalty = record.learning_rate, record.spec.reg_lambda
        discrete, one_hot = _layout(info)
        rows: _Rows | None = None
        notes, known, base = list[str](), 0, own[0].booster.base
        done, total = 0, min(self.trees, sum(len(m.booster.trees) for m in own))
        mine = {id(tree) for m in own for tree in m.booster.trees}
        whole = {id(tree): tree.with_cover(rate, penalty) for m in record.messages for tree in m.booster.trees}
        for message in own:
            earlier = record.before(message)
            since = [whole[id(tree)] for tree in earlier[known:] if id(tree) not in mine]
            known = len(earlier)
            if rows is not None:
                rows.margins += message.booster.base - base
                for tree in since:
                    rows.margins += _expected(rows, tree, discrete)
            base = message.booster.base
            for sent in message.booster.trees:
                tree = whole[id(sent)]
                if done == total:
                    break
                low, high = tree.boxes(d)
                value = tree.value[tree.leaves].astype(np.float64)
                if rows is None:
                    rows = _first(tree, message.booster.base, since, logistic, rate, penalty, d, one_hot, discrete)
                    if since:
                        notes.append(
                            "its first tree was grown on trees of others: the counts of leaves are approximate"
                        )
                else:
                    chosen = _assigned(rows, tree, low, high, logistic, rate, penalty, discrete)
                    if not logistic and tree.cover is not None:
                        _relabel(rows, tree, chosen, rate, penalty)
                    rows.enter(low[chosen], high[chosen], one_hot)
                    rows.margins += value[chosen]
                done += 1
                progress(done, total)
        assert rows is not None
        first = own[0].booster.trees[0]
        if whole[id(first)].cover is None:
            notes.append("no cover was sent: the counts of leaves are the fewest that give their values")
        elif first.cover is None:
            notes.append("cover was masked, and follows from what splits gain and the nodes' weights")
        rng = np.random.default_rng(int(torch.randint(2**31, (1,), generator=generator)))
        grown = [whole[id(tree)] for m in own for tree in m.booster.trees][:total]
        found, confidence = _values(rows, info, grown, _held(observation), rng)
        labels = torch.from_numpy(rows.labels)
        return RowFinding(
            rows=info.denormalise(torch.from_numpy(found).float()),
            labels=labels.long() if logistic else labels.float()[:, None],
            label_source=self.name,
            confidence=torch.from_numpy(confidence),
            notes=tuple(notes),
        )


def _held(observation: Observation) -> tuple[Floats, Floats] | None:
    """Return rows (m, d) and labels (m,) that an adversary who is a client holds itself; None: it has none."""
    log = observation.adversary_log
    if HELD[0] not in log:
        return None
    return (
        observation.task_info.normalise(log[HELD[0]]).double().numpy(),
        log[HELD[1]].flatten().double().numpy(),
    )


def sums(tree: Tree, rate: float, penalty: float) -> tuple[Floats, Floats]:
    """Return (J,) G and H of each leaf: G = −v(H + λ)/η; NotApplicable where cover or weights weren't sent."""
    if tree.cover is None or tree.weights is None:
        raise NotApplicable("the tree has no cover")
    h = tree.cover[tree.leaves]
    return -tree.weights[tree.leaves] / rate * (h + penalty), h


def fewest(value: float, p: float, rate: float, penalty: float, most: int) -> tuple[int, int] | None:
    """Return the fewest examples n, up to ``most``, and how many of class 1, that give a leaf its value v.

    With G = n·p − k and H = n·p(1 − p), v = −ηG/(H + λ) is k = n·p + v(H + λ)/η, which must be whole.
    """
    n = np.arange(1, most + 1)
    h = n * p * (1 - p) + penalty
    k = np.rint(n * p + value / rate * h)
    given = rate * (k - n * p) / h
    fits = (np.abs(given - value) <= _NEAR * np.maximum(np.abs(value), 1e-3)) & (k >= 0) & (k <= n)
    return (int(n[fits][0]), int(k[fits][0])) if fits.any() else None


def _first(
    tree: Tree,
    base: float,
    before: list[Tree],
    logistic: bool,
    rate: float,
    penalty: float,
    d: int,
    one_hot: list[list[int]],
    discrete: Flags,
) -> _Rows:
    """Return the rows that the client's first tree tells of, one leaf after the other."""
    low, high = tree.boxes(d)
    leaves = _Rows(low, high, np.zeros(len(low)), np.full(len(low), base))
    for other in before:
        leaves.margins += _expected(leaves, other, discrete)
    value, counts, labels = tree.value[tree.leaves].astype(np.float64), list[int](), list[Floats]()
    for j, margin in enumerate(leaves.margins):
        p = 1 / (1 + math.exp(-margin)) if logistic else margin
        if tree.cover is None:
            pair = fewest(float(value[j]), p, rate, penalty, 2_000) if logistic else None
            n, ones = pair or (1, int(value[j] > 0))
        else:
            g, h = (float(part[j]) for part in sums(tree, rate, penalty))
            n = round(h / (p * (1 - p))) if logistic else round(h)
            ones = min(max(round(n * p - g), 0), n) if logistic else 0
        n = max(0, min(n, _MOST_ROWS))
        counts.append(n)
        if logistic:
            labels.append(np.repeat([1.0, 0.0], [ones, n - ones]))
        else:  # G = n·margin − Σy; without cover the leaf's value itself, of which λ took a little
            mean = margin + value[j] / rate if tree.cover is None else margin - g / max(n, 1)
            labels.append(np.full(n, mean))
    at = np.repeat(np.arange(len(low)), counts)
    if not len(at):
        raise NotApplicable("timberstrike: the first tree tells of no example (its sums are noise)")
    rows = _Rows(
        np.full((len(at), d), -np.inf), np.full((len(at), d), np.inf), np.concatenate(labels), leaves.margins[at]
    )
    rows.enter(low[at], high[at], one_hot)
    rows.margins = rows.margins + value[at]
    return rows


def _assigned(
    rows: _Rows,
    tree: Tree,
    low: Floats,
    high: Floats,
    logistic: bool,
    rate: float,
    penalty: float,
    discrete: Flags,
) -> NDArray[np.int64]:
    """Return (n,) the leaf of each row: the programme of the class's docstring."""
    p = 1 / (1 + np.exp(-rows.margins)) if logistic else rows.margins
    g, h = p - rows.labels, p * (1 - p) if logistic else np.ones(len(p))
    allowed = rows.allowed(low, high, discrete)
    allowed[~allowed.any(axis=1)] = True  # an earlier choice was wrong: anything is better than nothing
    value = tree.value[tree.leaves].astype(np.float64)
    if tree.cover is None:
        wanted = [(-penalty * value / rate, g[:, None] + h[:, None] * value[None, :] / rate)]
    else:
        of_g, of_h = sums(tree, rate, penalty)
        wanted = [(of_g, np.repeat(g[:, None], len(value), axis=1)), (of_h, np.repeat(h[:, None], len(value), axis=1))]
    # Rows of which the same is known are interchangeable: how many of them go where is all that counts.
    told = np.column_stack([rows.low, rows.high, rows.labels, rows.margins])
    _, first, group = np.unique(told, axis=0, return_index=True, return_inverse=True)
    group = group.reshape(-1)
    counts = np.bincount(group).astype(np.float64)
    numbers_of = _shared_out(allowed[first], counts, [(sought, each[first]) for sought, each in wanted])
    chosen = np.empty(len(g), dtype=np.int64)
    for k, own in enumerate(numbers_of):
        chosen[group == k] = np.repeat(np.arange(len(own)), own)
    return chosen


def _shared_out(allowed: Flags, counts: Floats, wanted: list[tuple[Floats, Floats]]) -> NDArray[np.int64]:
    """Return (K, J) how many of each group's rows go into each leaf: by branch and bound, else of a vertex rounded."""
    i, j, cost, matrix, right = _programme(allowed, counts, wanted)
    pairs = len(i)
    upper = np.concatenate([counts[i], np.full(len(cost) - pairs, np.inf)])
    integral = np.concatenate([np.ones(pairs), np.zeros(len(cost) - pairs)])
    solved = milp(
        cost,
        constraints=LinearConstraint(matrix, right, right),
        integrality=integral,
        bounds=Bounds(0, upper),
        options={"node_limit": _NODES, "mip_rel_gap": 0.0},
    )
    if solved.x is None:
        solved = linprog(cost, A_eq=matrix, b_eq=right, bounds=(0, None), method="highs-ds")
    share = np.zeros(allowed.shape)
    share[i, j] = solved.x[:pairs] if solved.x is not None else counts[i] / allowed.sum(axis=1)[i]
    whole = np.floor(share + 1e-6)
    for k in np.flatnonzero(whole.sum(axis=1) < counts):  # the largest remainders
        short = int(counts[k] - whole[k].sum())
        whole[k, np.argsort(whole[k] - share[k], kind="stable")[:short]] += 1
    return whole.astype(np.int64)


def _programme(
    allowed: Flags, counts: Floats, wanted: list[tuple[Floats, Floats]]
) -> tuple[NDArray[np.int64], NDArray[np.int64], Floats, csr_array, Floats]:
    """Return the pairs (i, j), costs, and equalities (left, right) of least Σ|Σ x·a − b|, Σ_j x_ij = n_i."""
    (i, j), (n, leaves) = np.nonzero(allowed), allowed.shape
    pairs, slacks = len(i), leaves * len(wanted)
    cost = np.concatenate([np.zeros(pairs), np.ones(2 * slacks)])
    # Each row is in some leaf; each sum is what is sought, but for a surplus and a deficit, of which the sum is least.
    at, to, what = [i], [np.arange(pairs)], [np.ones(pairs)]
    for k, (_, each) in enumerate(wanted):
        at.append(n + k * leaves + j)
        to.append(np.arange(pairs))
        what.append(each[i, j])
    for sign, first in ((-1.0, pairs), (1.0, pairs + slacks)):
        at.append(n + np.arange(slacks))
        to.append(first + np.arange(slacks))
        what.append(np.full(slacks, sign))
    shape = (n + slacks, pairs + 2 * slacks)
    matrix = csr_array(coo_array((np.concatenate(what), (np.concatenate(at), np.concatenate(to))), shape=shape))
    right = np.concatenate([counts, *(sought for sought, _ in wanted)])
    return i, j, cost, matrix, right


def _expected(rows: _Rows, tree: Tree, discrete: Flags) -> Floats:
    """Return (n,) what a tree that isn't the client's adds to each margin, as far as its box tells."""
    allowed = rows.allowed(*tree.boxes(rows.low.shape[1]), discrete).astype(np.float64)
    cover = np.ones(len(tree.leaves)) if tree.cover is None else tree.cover[tree.leaves]
    weight = allowed * (cover + _EDGE)
    total = np.maximum(weight.sum(axis=1), _EDGE)
    return np.asarray(weight @ tree.value[tree.leaves].astype(np.float64) / total)


def _relabel(rows: _Rows, tree: Tree, chosen: NDArray[np.int64], rate: float, penalty: float) -> None:
    """Move the labels of a regression by the mean residual of each leaf: Σ(margin − y) = G."""
    of_g, _ = sums(tree, rate, penalty)
    for leaf in np.unique(chosen):
        own = chosen == leaf
        rows.labels[own] += (rows.margins[own].sum() - rows.labels[own].sum() - of_g[leaf]) / own.sum()


def _layout(info: TaskInfo) -> tuple[Flags, list[list[int]]]:
    """Return (d,) which positions are 0 or 1, and the positions of each one-hot column."""
    one_hot = [list(c.positions) for c in info.columns if c.one_hot]
    discrete = np.zeros(info.input_shape[0], dtype=bool)
    for places in one_hot:
        discrete[places] = True
    return discrete, one_hot


def _values(
    rows: _Rows, info: TaskInfo, trees: Sequence[Tree], held: tuple[Floats, Floats] | None, rng: np.random.Generator
) -> tuple[Floats, Floats]:
    """Return rows (n, d) within their boxes, and how sure each of their cells (n, c) is."""
    columns = info.columns or number_columns(info.input_shape[0])
    found, sure = np.zeros_like(rows.low), np.zeros((len(rows.low), len(columns)))
    like = None if held is None else _donors(rows, *held)
    for place, column in enumerate(columns):
        own = list(column.positions)
        low, high = rows.low[:, own], rows.high[:, own]
        if column.kind == "numeric":
            a, b = norm.cdf(low[:, 0]), norm.cdf(high[:, 0])
            mass = np.maximum(b - a, _TINY)
            if like is None:  # evenly over what the box leaves, in any order
                u = (rng.permutation(len(a)) + 0.5) / len(a)
                value = norm.ppf(np.clip(a + u * (b - a), _TINY, 1 - 1e-9))
            else:
                value = like[:, own[0]]
            found[:, own[0]] = value = np.clip(value, low[:, 0], np.nextafter(high[:, 0], -np.inf))
            near = np.minimum(b, norm.cdf(value + _TOLERANCE)) - np.maximum(a, norm.cdf(value - _TOLERANCE))
            sure[:, place] = np.clip(near / mass, 0.0, 1.0)
            continue
        codes = column.values().numpy().astype(np.float64)  # (k, p)
        fits: Flags = np.asarray(np.all((low[:, None] <= codes) & (codes < high[:, None]), axis=2))
        fits[~fits.any(axis=1)] = True
        weight = fits * _frequencies(column, codes, trees)[None, :]
        sure[:, place] = weight.max(axis=1) / weight.sum(axis=1)
        if like is not None:
            weight = fits * (1e-3 - np.square(like[:, own][:, None] - codes).sum(axis=2) + np.square(codes).max() * 8)
        found[:, own] = codes[weight.argmax(axis=1)]
    return found, sure


def _donors(rows: _Rows, held: Floats, labels: Floats) -> Floats:
    """Return (n, d) for each row a held one of its label, least outside its box, used equally often (Hungarian)."""
    inside = np.clip(held[None], rows.low[:, None], rows.high[:, None])
    cost = np.square(held[None] - inside).sum(axis=2) + 1e3 * np.square(rows.labels[:, None] - labels[None])
    times = -(-len(rows.low) // len(held))
    _, place = linear_sum_assignment(np.tile(cost, (1, times)))
    return np.asarray(held[place % len(held)])


def _frequencies(column: Column, codes: Floats, trees: Sequence[Tree]) -> Floats:
    """Return (k,) how frequent each category is, as far as a root that splits by it tells; else all alike."""
    shares = np.ones(len(codes))
    if column.one_hot:
        for tree in trees:
            if tree.cover is not None and tree.left[0] >= 0 and int(tree.feature[0]) in column.positions:
                right = tree.cover[tree.right[0]] / max(tree.cover[0], _EDGE)
                shares[column.positions.index(int(tree.feature[0]))] = right * len(codes)
    return np.maximum(shares, 1e-6)
