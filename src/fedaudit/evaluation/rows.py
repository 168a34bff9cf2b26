"""Recovered rows of tables against the ones that were trained on, cell by cell."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from scipy.optimize import linear_sum_assignment
from scipy.stats import poisson_binom
from torch import Tensor

from fedaudit.attacks.findings import RowFinding
from fedaudit.evaluation.finding_types import (
    FINDING_TYPES,
    Evaluation,
    FindingType,
    Metric,
    done,
    evaluate,
    refused,
    victims_of,
)
from fedaudit.evaluation.labels import label_accuracy
from fedaudit.evaluation.other_batches import DEALS, Batches, other_batches, paired, with_remedy
from fedaudit.evaluation.shift import SHIFTED, comparable, told_apart
from fedaudit.evaluation.statistics import SURE, interval
from fedaudit.evaluation.verdicts import Judgement, by_fisher, by_test, leaks, share_of
from fedaudit.modalities.columns import Column, cells, numbers
from fedaudit.results import Chart, FindingResult, Line, RowResult
from fedaudit.results.record import GroupWorst
from fedaudit.results.rows import RowDetail
from fedaudit.task.info import TaskInfo
from fedaudit.transcript.observation import Message, Observation
from fedaudit.transcript.truth import Truth
from fedaudit.utils.fingerprint import tensor_digest
from fedaudit.utils.seeds import derive_seed, generator

TOLERANCE = 0.319  # standard deviations within which a number counts as recovered (Vero et al. 2023)
ACCURACY = Metric(
    "cell_accuracy",
    f"share of the cells that were recovered: categories equal, numbers within {TOLERANCE} standard deviations; "
    "without the attack: by the columns' distributions, or of other people's rows",
    ends=(0, 1),
)
EXACT = Metric("exact_rows", "share of the rows of which every cell was recovered", ends=(0, 1))
NUMBERS = Metric("numeric_accuracy", "share of the cells with numbers that were recovered", ends=(0, 1))
CATEGORIES = Metric("categorical_accuracy", "share of the cells with categories that were recovered", ends=(0, 1))
SUREST = Metric(
    "surest_accuracy",
    "share that were recovered of the quarter of cells that the attack is surest of; without the attack: of all cells",
    ends=(0, 1),
)
SUREST_NUMBERS = Metric("surest_numeric", "the same of the cells with numbers alone", ends=(0, 1))
SUREST_CATEGORIES = Metric("surest_categorical", "the same of the cells with categories alone", ends=(0, 1))
CERTIFIED = Metric("certified_rows", "share of the rows that the attack proved to have, and has", ends=(0, 1))
WRONGLY = Metric("wrongly_certified", "rows that the attack proved to have, and hasn't", higher_is_better=False)

DRAWS = 799  # of what an adversary guesses who hasn't seen the update: the least p-value is 1 in 800
_DRAWN = 64  # rows whose cells are kept for the report
_BINS = 10
_RESAMPLES = 2000
_CAPTION = (
    "How many of the cells were recovered, in ten equal groups from the ones that the attack is least sure of to the "
    "surest. The level is the share of all cells: an attack that can't tell which of its cells are right stays on it."
)
_ROUNDING = 1e-5  # of a number's size: what float32 leaves of one that comes out of differences of weights
_FLAT = 0.1  # of a unit: how far off a number may be in a column that doesn't vary, which has no standard deviation
CERTIFIED_ERROR = 0.5 / 255  # of a certified row's numbers: in the model's units, or the row's own size if that is less
_AT_ONCE = 2**16  # cells that are compared at once: what a processor's cache holds


@dataclass(frozen=True)
class _Table:
    """The table that rows are of.

    Attributes:
        numeric: (c,) which columns hold numbers.
        tolerance: (c,) how far off a number may be.
        vary: (c,) which columns' numbers differ by more than rounding: the others can't tell rows apart.
    """

    columns: tuple[Column, ...]
    numeric: Tensor
    tolerance: Tensor
    vary: Tensor

    @classmethod
    def of(cls, task_info: TaskInfo, truth: Truth) -> _Table:
        """Return it; where columns' standard deviations aren't known, those of the candidates stand for them.

        A column that doesn't vary has none: it is compared absolutely, by a tenth of the usual deviation of the others
        (of 1 at most, for which models' inputs are made), or by rounding, where that is more.
        """
        names = task_info.packed_inputs.names() if task_info.packed_inputs else ()
        columns = task_info.columns or numbers(task_info.input_shape[0], names)
        guessed = truth.about.get("std_guessed")
        known = torch.tensor([bool(task_info.columns) and c.name not in (guessed or ()) for c in columns])
        every = cells(torch.cat([truth.candidates, *truth.inputs.values()]), columns)
        size, spread = every.abs().amax(dim=0), every[: len(truth.candidates)].std(dim=0, correction=0)
        numeric = torch.tensor([c.kind == "numeric" for c in columns])
        # of known columns those are at 0 that were the same in all of the train split
        vary = (TOLERANCE * spread > _ROUNDING * size) | (known & (size > _ROUNDING)) | ~numeric
        spread = torch.where(known, 1.0, spread)
        units = next((of for of in (spread[vary & numeric], size[size > 0]) if len(of)), torch.ones(1)).clamp(max=1.0)
        reach = torch.where(vary, TOLERANCE * spread, _FLAT * units.median()).maximum(_ROUNDING * size)
        return cls(columns, numeric, reach.double(), vary)

    def right(self, true: Tensor, found: Tensor) -> Tensor:
        """Return which cells are recovered; both (…, c), broadcast against each other."""
        return torch.where(self.numeric, (true - found).abs() <= self.tolerance, true == found)

    def vouched(self, true: Tensor, found: Tensor) -> Tensor:
        """Return (m,) which of m found rows are one of n true ones, as far as a certificate says and rounding allows.

        A column that doesn't vary must be as near as the certificate says.
        """
        numbers = true[:, self.numeric]
        own = CERTIFIED_ERROR * numbers.square().mean(dim=1, keepdim=True).sqrt().clamp(max=1.0)
        reach = torch.where(self.vary, self.tolerance, _ROUNDING * true.abs()).maximum(own)
        right = (true[:, None] - found).abs() <= torch.where(self.numeric, reach, 0.0)[:, None]
        return right.all(dim=2).any(dim=0)

    def cost(self, true: Tensor, found: Tensor) -> Tensor:
        """Return (n, m): how many cells of n true rows are wrong in m found, and (< 1) how far numbers are off."""
        cost = torch.zeros(len(true), len(found), dtype=torch.float64)
        at_once = max(1, _AT_ONCE // max(1, cost.numel()))
        for part in torch.nonzero(self.numeric)[:, 0].split(at_once):
            off = (true.T[part, :, None] - found.T[part, None, :]).abs()
            cost += (off > self.tolerance[part, None, None]).sum(dim=0)
            cost += off.clamp_(max=100.0).sum(dim=0).mul_(1e-6)
        for part in torch.nonzero(~self.numeric)[:, 0].split(at_once):
            cost += (true.T[part, :, None] != found.T[part, None, :]).sum(dim=0)
        return cost

    def pairs(self, true: Tensor, found: Tensor) -> Tensor:
        """Return (n,) for each of n true rows the one of m found that is paired with it, or −1 where there are fewer.

        One to one, with as few wrong cells as can be (Hungarian method; Vero et al. 2023); of such pairings, the one
        with the nearest numbers.
        """
        rows, columns = linear_sum_assignment(self.cost(true, found).numpy())
        order = torch.full((len(true),), -1)
        order[torch.as_tensor(rows)] = torch.as_tensor(columns)
        return order


def cells_within(task_info: TaskInfo, truth: Truth, true: Tensor, found: Tensor) -> float:
    """Return the share of the cells of rows (n, d), as they are encoded, that found ones (n, d) have right."""
    table = _Table.of(task_info, truth)
    columns = table.columns
    return float(table.right(cells(true.float(), columns), cells(found.float(), columns)).double().mean())


@evaluate.register
def evaluate_rows(finding: RowFinding, observation: Observation, truth: Truth, *, seed: int) -> Evaluation:
    """Compare recovered rows with what the client really trained on, and with what anybody could have guessed.

    Recovered and true rows are paired with as few wrong cells as can be, update by update; an example that was used
    several times (local epochs) counts once. The guess knows the labels that the attack used, and all candidates of
    that label. It is the best one of three: rows whose cells are drawn each by itself, paired in the same way; what
    these rows get of other batches (:mod:`fedaudit.evaluation.other_batches`); and every cell the most frequent value
    (of numbers, the one with most values within the tolerance). Luck is excluded by the largest of three Monte Carlo
    p-values: of so many draws of rows, of other batches, and of as many true rows, the share that comes out at least as
    well. Candidates are those that may stand for the clients' own rows (:func:`fedaudit.evaluation.shift.comparable`).
    """
    if not bool(finding.rows.isfinite().all()):
        return refused(finding, observation)
    table = _Table.of(observation.task_info, truth)
    parts = [(m, _own(finding, m, len(observation.messages))) for m in observation.messages]
    parts = [(m, own) for m, own in parts if len(own) or len(observation.messages) == 1]
    if not parts:  # it says for none of several updates which rows are its examples
        reason = "no row was tied to any update"
        return refused(finding, observation, reason)
    drawn: list[RowResult] = []
    right: list[Tensor] = []
    whole: list[Tensor] = []
    sure: list[Tensor] = []
    guesses: list[list[tuple[Tensor, Tensor]]] = []
    common: list[tuple[Tensor, Tensor, Tensor]] = []
    kept, shift = comparable(truth, [(m.round, m.client) for m, _ in parts], seed=seed)
    usual, pool = _Guess(table, kept), cells(finding.rows, table.columns)
    at_best: list[Tensor] = []
    vouched = torch.zeros(len(pool), dtype=torch.bool)
    for message, own in parts:
        first, uses = truth.different((message.round, message.client))
        true = cells(truth.inputs[message.round, message.client][first], table.columns)
        targets = truth.labels[message.round, message.client][first]
        found, labels = pool[own], finding.labels[own]
        order = table.pairs(true, found)
        hits = torch.zeros_like(true, dtype=torch.bool)
        if len(found):
            hits = table.right(true, found[order.clamp(min=0)]) & (order >= 0)[:, None]
        rng = generator(seed, "rows", observation.federation, message.round, message.client)
        known = usual.names(labels if len(labels) else targets)
        # as many guesses as the attack has, which may name more rows than there are
        known = [known[i % len(known)] for i in range(max(len(true), len(found)))]
        batches = other_batches(truth, kept, (message.round, message.client), seed=seed)
        guesses.append([usual.drawn(true, known, rng), _elsewhere(found, batches, table)])
        at_best.append(_elsewhere(true, batches, table)[0])
        common.append(usual.frequent(true, targets, rng))
        lucky = usual.exact_by_luck(true, usual.names(targets), known[: len(found)])
        right.append(hits)
        whole.append(true)
        if finding.certified is not None:
            vouched[own[table.vouched(true, found)]] = True
        if finding.confidence is not None and len(found):
            sure.append(finding.confidence[own][order.clamp(min=0)].masked_fill((order < 0)[:, None], 0.0))
        drawn += _results(finding, own, order, true, hits, targets, uses, lucky, table, _DRAWN - len(drawn))
    hits = torch.cat(right)
    share, exact = float(hits.double().mean()), hits.all(dim=1)
    guess, by_guess, p_value, best = _against_luck(guesses, common, at_best, share)
    spread = interval(
        hits.double().mean(dim=1).tolist(), resamples=_RESAMPLES, seed=derive_seed(seed, "rows"), least=0, most=1
    )
    metrics = [
        ACCURACY.of(share, guess, low=spread.low, high=spread.high, n=len(hits), of="rows"),
        EXACT.share(int(exact.sum()), len(exact), "rows", by_guess),
    ]
    sorts = [(NUMBERS, SUREST_NUMBERS, table.numeric), (CATEGORIES, SUREST_CATEGORIES, ~table.numeric)]
    sorts = [sort for sort in sorts if bool(sort[2].any())]
    metrics += [metric.of(float(hits[:, of].double().mean())) for metric, _, of in sorts]
    charts = []
    if sure:
        confidence = torch.cat(sure)
        ordered = _by_confidence(confidence, hits)
        metrics.append(SUREST.of(_surest(ordered), share))
        for _, metric, of in sorts:
            own = _by_confidence(confidence[:, of], hits[:, of])
            metrics.append(metric.of(_surest(own), float(own.mean())))
        charts.append(_chart(finding.attack, ordered, share))
    if finding.certified is not None:
        shown = int((finding.certified & vouched).sum())
        metrics += [CERTIFIED.of(min(1.0, shown / len(hits))), WRONGLY.of(float(int(finding.certified.sum()) - shown))]
    true_labels = torch.cat(
        [truth.labels[m.round, m.client][truth.different((m.round, m.client))[0]] for m, _ in parts]
    )
    classes = not true_labels.is_floating_point() and len(finding.labels) > 0
    result = done(
        finding,
        observation,
        [told_apart(shift)] if shift <= SHIFTED else [],
        RowDetail(
            columns=[column.name for column in table.columns],
            rows=drawn,
            row_groups=of_categories(torch.cat(whole), hits.double().mean(dim=1), table.columns),
        ),
        metrics=metrics,
        charts=charts,
        label_source=finding.label_source,
        label_accuracy=label_accuracy(finding.labels, true_labels) if classes else None,
        victims=victims_of(*(truth.inputs[m.round, m.client].unique(dim=0) for m, _ in parts)),
        is_leak=leaks(share > guess, p_value),
        p_value=p_value,
        p_value_at_best=best,
        blind_p_value=shift,
    )
    return Evaluation(result)


def of_categories(true: Tensor, shares: Tensor, columns: Sequence[Column]) -> list[GroupWorst]:
    """Return of each category that occurs among (n, k) true rows the highest and the mean of (n,) shares of cells."""
    groups = []
    for place, column in enumerate(columns):
        for label, name in enumerate(column.categories):
            if len(own := shares[true[:, place] == label]):
                told = {"n": len(own), "value": float(own.max()), "mean": float(own.mean())}
                groups.append(GroupWorst(label=label, column=column.name, group=name, **told))
    return groups


def _elsewhere(found: Tensor, batches: Batches, table: _Table) -> tuple[Tensor, Tensor]:
    """Return (draws,) shares of cells and of whole rows that the found rows have of each other batch."""
    everybody = cells(batches.inputs, table.columns)
    wrong = paired(table.cost(everybody, found), batches)[1:].floor()
    n, columns = batches.dealt.shape[1], everybody.shape[1]
    return (columns - wrong).sum(dim=1) / (n * columns), (wrong == 0).double().sum(dim=1) / n


def _against_luck(
    guesses: Sequence[Sequence[tuple[Tensor, Tensor]]],
    common: Sequence[tuple[Tensor, Tensor, Tensor]],
    at_best: Sequence[Tensor],
    share: float,
) -> tuple[float, float, float, float]:
    """Return the shares of cells and of rows that guessing gets, and p-values of ``share`` of the cells and of all."""
    counts = torch.tensor([float(len(one[2])) for one in common], dtype=torch.float64)

    def over_all(parts: Sequence[Tensor]) -> Tensor:
        return torch.stack(list(parts), dim=1) @ counts / counts.sum()

    of_cells, of_rows = ([over_all([way[i] for way in ways]) for ways in zip(*guesses, strict=True)] for i in (0, 1))
    elsewhere = over_all([one[0] for one in common])
    exact, cells_right = (torch.cat([one[i] for one in common]).double() for i in (1, 2))
    guess = max(float(way.mean()) for way in (*of_cells, cells_right))
    by_guess = max(float(way.mean()) for way in (*of_rows, exact))
    p_value, best = (max(_at_least(way, of) for way in (*of_cells, elsewhere)) for of in (share, 1.0))
    return guess, by_guess, p_value, max(best, _at_least(over_all(at_best), 1.0))


def _chart(attack: str, hits: Tensor, share: float) -> Chart:
    groups = [group for group in hits.tensor_split(_BINS) if len(group)]
    middles = [100 * (i + 0.5) / len(groups) for i in range(len(groups))]
    return Chart(
        title=f"confidence of {attack}",
        caption=_CAPTION,
        x_label="cells, from the least sure to the surest (%)",
        y_label="share recovered",
        lines=[
            Line(name="cells", x=middles, y=[float(group.mean()) for group in groups]),
            Line(name="all cells", x=[0.0, 100.0], y=[share, share]),
        ],
    )


def _results(
    finding: RowFinding,
    own: Tensor,
    order: Tensor,
    true: Tensor,
    hits: Tensor,
    targets: Tensor,
    uses: Sequence[int],
    lucky: Sequence[float],
    table: _Table,
    room: int,
) -> list[RowResult]:
    """Return the true rows of one update against the found ones; the first ``room`` have their cells in words."""
    results = []
    found = cells(finding.rows, table.columns)
    for i, place in enumerate(order.tolist()):
        at = int(own[place]) if place >= 0 else None
        words: dict[str, list[str] | list[int] | list[float]] = {}
        if i < room:
            words["true"] = [c.text(float(v)) for c, v in zip(table.columns, true[i], strict=True)]
            if at is not None:
                words["recovered"] = [c.text(float(v)) for c, v in zip(table.columns, found[at], strict=True)]
            words["wrong"] = torch.nonzero(~hits[i]).flatten().tolist()
            if at is not None and finding.confidence is not None:
                words["confidence"] = [round(float(v), 3) for v in finding.confidence[at]]
        results.append(
            RowResult(
                cells=len(table.columns),
                right=int(hits[i].sum()),
                found=at is not None,
                certified=None if at is None or finding.certified is None else bool(finding.certified[at]),
                true_label=float(targets[i]) if targets[i].numel() == 1 else None,
                label=None if at is None or finding.labels[at].numel() != 1 else float(finding.labels[at]),
                uses=uses[i],
                chance_level=lucky[i],
                victim=tensor_digest(true[i]).hex()[:12],
                **words,
            )
        )
    return results


class _Guess:
    """What an adversary says of rows who knows the candidates of each label, and hasn't seen the update."""

    def __init__(self, table: _Table, truth: Truth) -> None:
        self.table, self.whole = table, cells(truth.candidates, table.columns)
        self.labels = truth.candidate_labels
        self.classes = not self.labels.is_floating_point() and self.labels.ndim == 1
        self.modes: dict[int | None, Tensor] = {}

    def pool(self, label: int | None) -> Tensor:
        """Return the candidates of a label; all, where there is none, or it is no class."""
        own = self.whole[self.labels == label] if label is not None else self.whole
        return own if len(own) else self.whole

    def names(self, labels: Tensor) -> list[int | None]:
        """Return the labels (n,) by which the distributions are told apart; None where they aren't classes."""
        return [int(label) for label in labels] if self.classes and labels.ndim == 1 else [None] * len(labels)

    def drawn(self, true: Tensor, names: list[int | None], rng: torch.Generator) -> tuple[Tensor, Tensor]:
        """Return (draws,) shares of cells and of whole rows that rows drawn from the distributions have in common."""
        pools = [(places, self.pool(label)) for label, places in _named(names)]
        shares, whole = [], []
        for _ in range(DRAWS):
            rows = torch.empty(len(names), true.shape[1], dtype=true.dtype)
            for places, pool in pools:
                chosen = torch.randint(len(pool), (len(places), pool.shape[1]), generator=rng)
                rows[places] = pool[chosen, torch.arange(pool.shape[1])]
            right = self.table.right(true, rows[self.table.pairs(true, rows)])
            shares.append(right.double().mean())
            whole.append(right.all(dim=1).double().mean())
        return torch.stack(shares), torch.stack(whole)

    def exact_by_luck(self, true: Tensor, own: list[int | None], found: list[int | None]) -> list[float]:
        """Return for each true row, of its ``own`` label, the probability that a found one has all its cells by luck.

        Luck draws a row that really occurs from the candidates of each of the ``found`` labels; the person's own row
        doesn't count, equal rows of others do.
        """
        bounds = []
        for row, label in zip(true, own, strict=True):
            chance = 0.0
            for name, count in Counter(found).items():
                pool = self.pool(name)
                mine = int(name == label and (pool == row).all(dim=1).any())
                alike = int(self.table.right(row, pool).all(dim=1).sum()) - mine
                chance += count * ((name == label) + alike) / (1 + len(pool) - mine)
            bounds.append(min(1.0, chance))
        return bounds

    def frequent(self, true: Tensor, labels: Tensor, rng: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
        """Return what the most frequent values share with (draws,) other rows: which (n,) wholly, and how much.

        The other rows are candidates of the same labels, drawn anew each time: how well the guess does for as many rows
        that have nothing to do with the update.
        """
        names = self.names(labels)
        others = torch.zeros(DRAWS, len(true), dtype=torch.float64)
        own = torch.zeros(len(true), true.shape[1], dtype=torch.bool)
        for label in dict.fromkeys(names):
            places, pool = _places(names, label), self.pool(label)
            if label not in self.modes:
                self.modes[label] = _most_frequent(pool, self.table)
            mode = self.modes[label]
            shares = self.table.right(pool, mode).double().mean(dim=1)
            others[:, places] = shares[torch.randint(len(pool), (DRAWS, len(places)), generator=rng)]
            own[places] = self.table.right(true[places], mode)
        return others.mean(dim=1), own.all(dim=1), own.double().mean(dim=1)


def _named(names: Sequence[int | None]) -> list[tuple[int | None, Tensor]]:
    """Return each label with its places."""
    return [(label, _places(names, label)) for label in dict.fromkeys(names)]


def _places(names: Sequence[int | None], label: int | None) -> Tensor:
    return torch.tensor([i for i, name in enumerate(names) if name == label])


def _most_frequent(pool: Tensor, table: _Table) -> Tensor:
    """Return (c,) each column's most frequent value; for numbers, the one with most values within the tolerance."""
    best = torch.empty(pool.shape[1], dtype=torch.float64)
    for i in range(pool.shape[1]):
        values = pool[:, i].sort().values
        reach = table.tolerance[i] if bool(table.numeric[i]) else torch.tensor(0.0, dtype=torch.float64)
        within = torch.searchsorted(values, values + reach, right=True) - torch.searchsorted(values, values - reach)
        best[i] = values[within.argmax()]
    return best


def _own(finding: RowFinding, message: Message, received: int) -> Tensor:
    """Return which of the finding's rows belong to ``message``, one of ``received``."""
    if received == 1:
        return torch.arange(len(finding.rows))
    return torch.tensor([i for i, rounds in enumerate(finding.rounds) if message.round in rounds], dtype=torch.int64)


def _at_least(drawn: Tensor, share: float) -> float:
    """Return the Monte Carlo p-value: the share of draws, with what was found among them, that do as well."""
    return (1 + int((drawn >= share - 1e-12).sum())) / (1 + len(drawn))


def _by_confidence(confidence: Tensor, right: Tensor) -> Tensor:
    """Return whether cells (n, c) are right, flat, from the one that the attack is least sure of to the surest."""
    return right.flatten()[confidence.flatten().argsort(stable=True)].double()


def _surest(hits: Tensor) -> float:
    return float(hits[-max(1, len(hits) // 4) :].mean())


def verdict_of(findings: Sequence[FindingResult]) -> Judgement:
    """Return the judgement on all of an attack's findings on a federation; it says where vouched rows are none."""
    judged = _by_rows(findings)
    wrong = sum(int(m.value) for finding in findings for m in finding.metrics if m.name == WRONGLY.name)
    if not wrong:
        return judged
    text = f"{judged.text}; {wrong} CERTIFIED ROWS ARE WRONG: the certificate failed, please report this"
    return judged._replace(text=text, headline=f"{judged.headline} {wrong} certified rows are WRONG.".strip())


def _by_rows(findings: Sequence[FindingResult]) -> Judgement:
    judged = _BY_CELLS(findings)
    victims: dict[str | int, list[RowResult]] = {}  # of several rounds each is another try, so its chances add up
    for i, row in enumerate(row for finding in findings for row in finding.rows):
        victims.setdefault(row.victim or i, []).append(row)
    n, exact = len(victims), sum(any(row.exact for row in of) for of in victims.values())
    proved = sum(any(row.certified for row in of) for of in victims.values())
    chances = [min(1.0, sum(row.chance_level for row in of)) for of in victims.values()]
    luck = float(poisson_binom(chances).sf(exact - 1)) if exact else 1.0
    p = min(1.0, 2 * max(luck, 0.0))  # one of two tests; a sum may be below 0 by rounding
    chance_level = f" (so many rows by luck with p = {p:.2g})" if exact else ""
    certified = f", {proved} of {n} certified" if proved else ""
    text = f"{exact} of {n} {'row' if n == 1 else 'rows'} exact{certified}{chance_level}; {judged.text}"
    if not exact or (judged.verdict != "inferred" and p > SURE):
        return judged._replace(text=text)
    what, test = (
        "rows recovered with every cell",
        "exact test (Poisson binomial) against rows drawn from the candidates",
    )
    if p > SURE:
        what += " (tested by cells)"
        test = "Monte Carlo test of the cells against guesses and other batches"
        p = p if judged.evidence is None or judged.evidence.p_value is None else judged.evidence.p_value
    evidence = share_of(what, exact, n, "rows", test=test, p_value=p)
    rest = f"{100 * judged.evidence.value:.0f} % of all cells" if judged.evidence else "most cells"
    headline = f"{{who}} can reconstruct training {{things}}: {exact} of {n} with every cell, {rest}."
    return Judgement("recovered", text, evidence, headline)


def _halves(findings: Sequence[FindingResult]) -> tuple[float, float | None]:
    """Return the p-values that cells give: twice Fisher's, since whole rows are tested, too, and either decides."""
    p, best = by_fisher(findings)
    return min(1.0, 2 * p), None if best is None else min(1.0, 2 * best)


_BY_CELLS = by_test(
    ACCURACY.name,
    of="rows",
    method="95 % bootstrap interval over rows; Monte Carlo test against what the columns' distributions give and what "
    "the rows get of other batches, the findings' p-values by Fisher's method, times two, for the two tests of rows",
    headline="{who} can tell cells of training {things}: {share} % are right, where {guess} % are without the update.",
    together=_halves,
)

FINDING_TYPES["rows"] = FindingType(
    verdict=with_remedy(verdict_of),
    rules=(
        "Recovered and true rows are paired so that as few cells as can be are wrong. A category is recovered when it "
        f"is equal, a number when it is within {TOLERANCE} standard deviations of its column (Vero et al. 2023). In a "
        f"column that doesn't vary a number is when it is within {_FLAT:g}, or {_FLAT:g} of the other columns' usual "
        "deviation where that is less, or rounding where that is more. A row is exact when all of its cells are.",
        "What anybody could have guessed who knows the labels and the candidates is the best one of three: rows whose "
        "cells are drawn each by itself from the candidates of the label, what these rows get of other batches, both "
        "paired in the same way, and every column's most frequent value. Luck is excluded by Monte Carlo tests against "
        f"all three: {DRAWS} draws or {DEALS} batches. Those are dealt of candidates of the same labels and the "
        "update's own rows. Candidates are the clients' own rows alone, where held-out ones can be told from these "
        "without the update.",
        "Rows are 'recovered' when at least one is exact and luck is excluded: that so many are exact where rows are "
        f"drawn from the candidates, or that guessing gets as many cells right, at {100 * SURE / 2:g} % each. They are "
        "'inferred' when none is exact and more cells are right than guessed. A row that several rounds show counts "
        "once, and its chances are added up.",
        "Rows that an attack certifies it vouches for without the truth. With the truth this is checked, and one that "
        "is wrong is said in the verdict.",
    ),
    metrics=(ACCURACY, EXACT, NUMBERS, CATEGORIES, SUREST, SUREST_NUMBERS, SUREST_CATEGORIES, CERTIFIED, WRONGLY),
    question="reconstruct training {things}",
    control="example",
    easy_updates=4,
    ceiling=True,
    worst="recovered",
)
