"""What a site's guard watches in every round: whether updates and global models tell which examples it trained on."""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from scipy.stats import mannwhitneyu
from torch import Tensor

from fedaudit.attacks.records.projection_residual import ProjectionResidual
from fedaudit.attacks.records.target import MembershipFinding
from fedaudit.capture.capture import Capture
from fedaudit.evaluation.blind import FEWEST, blind_scores, features
from fedaudit.evaluation.statistics import SURE
from fedaudit.guard.given import Examples
from fedaudit.guard.watched import WatchedRound, mark
from fedaudit.task.training import Loss
from fedaudit.transcript.files import Form
from fedaudit.transcript.update import ClientDefenceInfo
from fedaudit.utils.errors import BadInput, NotApplicable, in_words
from fedaudit.utils.renamed import of_plugin

RESIDUAL = ProjectionResidual.name
_TESTS = 2  # of a round: projection-residual and loss-series
_MOST = 32  # pairs of records that are followed over rounds
_MOST_BYTES = 32 * 2**20  # of these records
_FIRST = 16  # pairs that are followed from the first round on, in which nobody knows yet what they cost
_UNKNOWN = 1000  # records of an update at most, as long as that isn't known
_BESIDE = 20  # records whose time projection-residual takes for everything else
_AT_ONCE = 4  # pairs of these, after which the time is looked at
_AGAIN = 0.9  # times what something costs, after a round that couldn't pay for it
_EVER = 1e9  # seconds, where there is no bound
_SPARE = 1.5  # times what something took in the round before, where it can't be stopped: machines are uneven


def level(number: int) -> float:
    """Return the level of a test, the ``number``-th of its kind (from 1), so that all of a job's share ``SURE``.

    α/2 for each kind, of which the t-th test has 1/(t(t + 1)): these sum up to one over any number of rounds, so by the
    union bound a job of any length has a false alarm with a probability of at most α = 1 %, however the rounds depend
    on each other.
    """
    return SURE / _TESTS / (number * (number + 1))


def exact_test(members: Tensor, others: Tensor) -> float:
    """Return the exact one-sided p-value of the Mann-Whitney test that members' scores are above others'.

    A member's score counts as below equal ones of others, so that ties never make it smaller.
    """
    order = sorted([(float(score), 0) for score in members] + [(float(score), 1) for score in others])
    ranks = [[rank for rank, (_, whose) in enumerate(order) if whose == group] for group in (0, 1)]
    return float(mannwhitneyu(*ranks, alternative="greater", method="exact").pvalue)


@dataclass(frozen=True)
class MembershipTest:
    """What an attack's scores of so many members, and of others, say.

    Attributes:
        auc: probability that a member's score is above another's.
        p_value: that chance would do as well (Mann and Whitney, one-sided, exact).
        level: at or below which that is an alarm, as :func:`level` says.
    """

    by: str
    auc: float
    p_value: float
    level: float
    members: int
    others: int

    @property
    def alarm(self) -> bool:
        """Whether the test tells members."""
        return self.p_value <= self.level

    def __str__(self) -> str:
        against = f"{self.members} own examples and {self.others} held-out ones"
        return f"{self.by} has AUC {self.auc:.2f} on {against}, p = {self.p_value:.2g} (alarm at {self.level:.2g})"


@dataclass(frozen=True)
class MembershipCheck:
    """What one round was found to tell.

    Attributes:
        notes: why tests couldn't be made, where that is no fault of the guard's.
        unable: why the round counts as one that wasn't watched; None: it was.
        needs: seconds that it takes to test something, where there were fewer; else 0.
    """

    tests: tuple[MembershipTest, ...]
    notes: tuple[str, ...]
    unable: str | None
    seconds: float
    share: float
    needs: float = 0.0


class MemberWatch:
    """Tests in every round whether a site's own training examples can be told from examples that it holds out.

    ``projection-residual`` asks the update that is about to leave about examples of this round's training,
    ``loss-series`` the models that the site was sent about up to 32 that it trained on since the first rounds. Each has
    held-out ones of its class beside it. Both are tested exactly (:func:`exact_test`), at levels that all rounds of a
    job share (:func:`level`). Of an update over few examples more held-out ones are taken for each.

    Both together take at most ``share`` of the time that the site trained: what records cost is measured, and from the
    second round on so many are taken as that pays for. What an alarm rests on is tested by a classifier of the records
    alone, too, at the price of that round: where the records differ without any model, it isn't the update that tells.

    In memory, and in ``state_dict()``, are the records that are followed (64, or 32 MiB of them) and five sums of each.

    Args:
        held_out: the site's own that nobody trains on, as the model sees them.
        share: of the training's time.
        loss: where the training's own isn't recognised: a registered name, or a function of (outputs, targets).
    """

    def __init__(self, held_out: Examples, share: float, loss: str | Loss | None = None) -> None:
        self.held_out, self.share, self._loss = held_out, share, loss
        self._rounds = 0
        self._tests = {RESIDUAL: 0, "loss-series": 0}
        self._costs: dict[str, float] = {}  # seconds a record, by test
        self._nobody: int | None = None  # examples of an update of which projection-residual told nobody
        self._followed: dict[str, Tensor] = {}  # own and held-out inputs and labels
        self._asking = 0.0  # seconds of this round that records cost; the rest is called preparing
        self._needs = 0.0  # seconds of this round that weren't there
        self._sums = torch.zeros(5, 0, dtype=torch.float64)  # n, Σt, Σt², Σy, Σty of each; own ones first

    def state_dict(self) -> dict[str, Any]:
        """Return what is kept from round to round, plain values and tensors."""
        return {
            "rounds": self._rounds,
            "tests": dict(self._tests),
            "costs": dict(self._costs),
            "nobody": self._nobody,
            "followed": dict(self._followed),
            "sums": self._sums,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what :meth:`state_dict` returned."""
        self._rounds, self._nobody = state["rounds"], state["nobody"]
        self._tests, self._costs = (
            {of_plugin("fedaudit.attacks", name, tell=False): value for name, value in state[key].items()}
            for key in ("tests", "costs")
        )
        self._followed, self._sums = dict(state["followed"]), state["sums"]

    def look(
        self,
        state: Mapping[str, Tensor],
        seen: Capture,
        form: Form = "weights",
        *,
        seconds: float | None = None,
        sanitised: ClientDefenceInfo | None = None,
    ) -> MembershipCheck:
        """Look at a round.

        Args:
            state: what is about to leave, in that ``form``.
            seen: the training that was watched.
            seconds: that it may take, in place of ``share`` of this round's training.
            sanitised: what everybody knows of the defence that the update went through.
        """
        began, number = time.perf_counter(), self._rounds
        self._rounds += 1
        self._asking = self._needs = 0.0
        tests: list[MembershipTest] = []
        notes: list[str] = []
        unable: list[str] = []
        try:
            budget = min(self.share * seen.seconds if seconds is None else seconds, _EVER)
            if (cost := self._costs.get("preparing", 0.0)) > budget:
                raise BadInput(self._unpaid("preparing", cost, budget, seen.seconds))
            case = WatchedRound(state, seen, form, self._loss, self.held_out, sanitised)
            left = budget - max(cost, time.perf_counter() - began)
            source = torch.Generator().manual_seed(number)
            for part in (self._series, self._residuals):
                try:
                    tests += part(case, left - self._asking, source)
                except NotApplicable as error:
                    notes.append(str(error))
                except Exception as error:  # what the other test says must not be lost with it
                    unable.append(in_words(error))
            self._costs["preparing"] = _SPARE * (time.perf_counter() - began - self._asking)
        except BadInput as error:
            unable.append(str(error))
        took = time.perf_counter() - began
        needs = self._needs and self._needs + self._costs.get("preparing", 0.0)
        why = unable[0] if unable else None
        return MembershipCheck(tuple(tests), tuple(notes), why, took, took / (seen.seconds or 1e-9), needs)

    # --- the models that came in ------------------------------------------------------------------------------------

    def _series(self, case: WatchedRound, budget: float, source: torch.Generator) -> list[MembershipTest]:
        """Follow the records' confidence e^-loss over the models that came in, and test its slope."""
        self._follow(case, budget, source)
        pairs, cost = self._sums.shape[1] // 2, self._costs.get("loss-series", 0.0)
        if not pairs:
            raise BadInput("no example that the site trained on has a held-out one of its class; give more held_out")
        limit = level(self._tests["loss-series"] + 1)
        asked = min(pairs, max(0, int(budget / (2 * cost)))) if cost else pairs
        if asked < pairs and _rarest(asked, asked) > limit:
            raise BadInput(self._unpaid("loss-series", 2 * cost * pairs, budget, case.seconds))
        inputs, labels = (torch.cat([self._followed[f"{whose}_{what}"] for whose in _OWNERS]) for what in _PARTS)
        if not cost:
            case.target.losses(inputs[:1], labels[:1])  # the first call is slower
        began = time.perf_counter()
        found: list[Tensor] = []
        for part in torch.arange(asked).split(_AT_ONCE):
            both = torch.cat([part, pairs + part])
            found.append(case.target.losses(inputs[both], labels[both]).view(2, -1))
            if cost and time.perf_counter() - began > budget:  # something else keeps the machine busy
                break
        confidence = torch.cat(found, dim=1).nan_to_num(nan=1e30, posinf=1e30).neg().exp().flatten()
        self._costs["loss-series"] = self._took(began) / len(confidence)
        asked = len(confidence) // 2
        rows = torch.cat([torch.arange(asked), pairs + torch.arange(asked)])
        t = torch.full_like(confidence, self._rounds)
        self._sums[:, rows] += torch.stack([torch.ones_like(t), t, t * t, confidence, t * confidence])
        n, t, tt, y, ty = self._sums[:, rows]
        twice = n > 1
        own = int(twice[:asked].sum())  # a pair comes and is asked about together
        if _rarest(own, own) > limit and asked < pairs:
            raise BadInput(self._unpaid("loss-series", 2 * cost * pairs, budget, case.seconds))
        if _rarest(own, own) > limit:
            raise NotApplicable(f"loss-series: {own} examples are known under two models yet, too few to be sure")
        slopes = (n * ty - t * y)[twice] / (n * tt - t * t)[twice]
        return [self._tested("loss-series", slopes[:own], slopes[own:], (inputs[rows][twice], labels[rows][twice]))]

    def _follow(self, case: WatchedRound, budget: float, source: torch.Generator) -> None:
        """Take further pairs among those that are followed, where they are few and the time is there."""
        pairs = self._sums.shape[1] // 2
        size = 2 * case.inputs[0].numel() * case.inputs.element_size()
        cost = self._costs.get("loss-series")
        afford = _FIRST if cost is None else int(0.5 * budget / (2 * cost))
        room = min(_MOST, _MOST_BYTES // size, afford) - pairs
        if room <= 0:
            return
        known = set(map(mark, [*self._followed.get("own_inputs", []), *self._followed.get("held_inputs", [])]))
        own, held = case.drawn(room, 1, source, known)
        for whose, (inputs, labels) in zip(_OWNERS, (own, held), strict=True):
            for what, new in zip(_PARTS, (inputs, labels), strict=True):
                name = f"{whose}_{what}"
                self._followed[name] = torch.cat([self._followed[name], new]) if pairs else new
        new_sums = torch.zeros(5, 2, len(own[0]), dtype=torch.float64)
        self._sums = torch.cat([self._sums.view(5, 2, -1), new_sums], dim=2).view(5, -1)

    # --- the update that leaves -------------------------------------------------------------------------------------

    def _residuals(self, case: WatchedRound, budget: float, source: torch.Generator) -> list[MembershipTest]:
        """Test the residuals of records outside the span of the update's rows."""
        if case.distinct > case.widest:
            raise NotApplicable(
                f"{RESIDUAL}: an update over {case.distinct} examples, and a layer has room for {case.widest} at most"
            )
        cost = self._costs.get(RESIDUAL)
        afford = _UNKNOWN if cost is None else max(0, int(budget / cost) - _BESIDE)
        limit = level(self._tests[RESIDUAL] + 1)
        sizes = _sizes(case.distinct, afford, limit)
        if sizes is None:
            needs = _sizes(case.distinct, 10**6, limit)
            if cost is not None and self._nobody is not None and case.distinct >= self._nobody:
                raise NotApplicable(
                    f"{RESIDUAL}: of {self._nobody} examples an update told nobody, in an earlier round"
                )
            if needs is None or cost is None:
                raise BadInput(
                    f"no test is sure of an update over {case.distinct} examples ({RESIDUAL}, level {limit:.2g})"
                )
            most = (needs[0] * (1 + needs[1]) + _BESIDE) * cost
            raise BadInput(self._unpaid(RESIDUAL, most, budget, case.seconds))
        own, held = case.drawn(*sizes, source)
        if _rarest(len(own[0]), len(held[0])) > limit:
            raise BadInput(
                f"{RESIDUAL}: {len(own[0])} of the site's examples have {sizes[1]} held-out ones of their class each, "
                f"and a test at level {limit:.2g} takes more; give more held_out"
            )
        inputs, labels = torch.cat([own[0], held[0]]), torch.cat([own[1], held[1]])
        began = time.perf_counter()
        try:
            found = ProjectionResidual()(case.observation(inputs, labels))
            self._nobody = None
        except NotApplicable:
            self._nobody = case.distinct
            raise
        finally:
            self._costs[RESIDUAL] = _SPARE * self._took(began) / (len(inputs) + _BESIDE)
        assert isinstance(found, MembershipFinding)
        scores, many = found.scores, len(own[0])
        return [self._tested(RESIDUAL, scores[:many], scores[many:], (inputs, labels))]

    def _tested(self, by: str, own: Tensor, others: Tensor, records: Examples) -> MembershipTest:
        """Test, and spend a level; BadInput where members show, but the records alone tell them as well."""
        self._tests[by] += 1
        auc = float(((own[:, None] > others) + 0.5 * (own[:, None] == others)).mean())
        test = MembershipTest(by, auc, exact_test(own, others), level(self._tests[by]), len(own), len(others))
        if test.alarm and len(own) >= FEWEST:
            began = time.perf_counter()
            try:
                rows = features(*records)
                _, _, p_value = blind_scores(rows[: len(own)], rows[len(own) : 2 * len(own)], self._tests[by])
            except Exception:  # an alarm stands where this can't be told
                p_value = 1.0
            self._took(began)
            if p_value <= SURE:
                raise BadInput(
                    f"{test}; but they differ without any model (p = {p_value:.2g}): held_out must be prepared as what "
                    "is trained on, and be of the same source"
                )
        return test

    def _took(self, began: float) -> float:
        """Return the seconds since then, and note that they were for records."""
        seconds = time.perf_counter() - began
        self._asking += seconds
        return seconds

    def _unpaid(self, what: str, seconds: float, budget: float, trained: float) -> str:
        """Return why something isn't done; one slow round mustn't be its end, so it is taken for cheaper next time."""
        self._costs[what] *= _AGAIN
        self._needs = max(self._needs, seconds)
        paid = f"the {max(budget, 0.0):.2g} s that there are after {trained:.3g} s of training"
        return f"{what} would take {seconds:.2g} s, more than {paid}: raise share, or train longer in a round"


_OWNERS, _PARTS = ("own", "held"), ("inputs", "labels")


def _rarest(members: int, others: int) -> float:
    """Return the least p-value that so many records can have: all members above all others."""
    return 1 / math.comb(members + others, members)


def _sizes(members: int, afford: int, limit: float) -> tuple[int, int] | None:
    """Return how many members are tested, and how many others for each; None where no order of them is rare enough."""
    many = min(members, afford // 2, _MOST)
    if _rarest(many, many) <= limit:
        return many, 1
    many = min(members, _MOST)
    most = afford // max(many, 1) - 1
    if most < 2 or _rarest(many, many * most) > limit:
        return None
    return many, bisect_left(range(2, most), True, key=lambda r: _rarest(many, many * r) <= limit) + 2
