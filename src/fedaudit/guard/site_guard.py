"""What the guards of all frameworks do: they check what comes in, play attacks on what leaves, and write it down."""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fedaudit.defences.received import check_received
from fedaudit.guard.attacks import AttackSettings
from fedaudit.guard.budget import Budget, filters_of, site_account
from fedaudit.guard.checks import LONGEST, RECEIVED, CheckResults, Checks, SiteState, unable
from fedaudit.guard.given import Examples, agreed_network, own_examples, own_loss
from fedaudit.guard.outgoing import OutgoingUpdate
from fedaudit.guard.plan import Plan
from fedaudit.guard.policy import ALARMED, Decision, Policy
from fedaudit.guard.round_log import RoundLog
from fedaudit.guard.rounds import RESULT, CheckRecord, Done, SiteRound
from fedaudit.utils.errors import BadInput, in_words
from fedaudit.utils.registry import Plugin, listed

if TYPE_CHECKING:
    from fedaudit.api import Verdict
    from fedaudit.attacks.base import Attacks
    from fedaudit.pipeline.ledger import Filter
    from fedaudit.task.training import Loss

Key = tuple[str, str]  # job and site


@dataclass(frozen=True)
class InspectedModel:
    """What was made of a model that came in: whether it may be trained on, and what its checks say."""

    let_in: bool
    check: CheckRecord


class SiteGuard:
    """A site's guard: checks what comes in, attacks what is about to leave, and writes it down; a framework's is one.

    It plays the attacks that a curious server could play on an update, as far as ``share`` pays for them. What it finds
    is logged and written down on the site; nothing is added to what leaves. What can't be audited (no training was
    seen, more than ``largest`` examples, no attack that ran measures what has a limit, an error of the guard's own)
    does what ``unaudited`` says. So does what is no update, from 100 numbers on; a budget stops it, for no defence of
    updates works on it.
    """

    _log: ClassVar[logging.Logger] = logging.getLogger("fedaudit.guard")
    _limits: ClassVar[dict[str, float]] = {}  # where none are given
    _early: ClassVar[bool] = True  # whether attacks are checked when the guard is made
    _lasting: ClassVar[bool] = True  # whether a site has the same name after a restart

    def __init__(
        self,
        attacks: Attacks = ("labels", {"name": "invg", "iterations": 300}),
        fail_on: Verdict | None = "recovered",
        fail_above: Mapping[str, float] | None = None,
        on_fail: str = "warn",
        unaudited: str | None = None,
        every: int = 1,
        largest: int = 32,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
        loss: str | Loss | None = None,
        out: Path | str | None = "fedaudit-guard",
        on_received: str = "warn",
        agreed: nn.Module | str | None = None,
        examples: Examples | str | None = None,
        held_out: Examples | str | None = None,
        share: float | None = 0.05,
        reports: bool = False,
        clip_norm: float | None = None,
        target_epsilon: float | None = None,
        delta: float | None = None,
        sanitised: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
    ) -> None:
        """Keep the settings, under their names and as they stand in a job's configuration.

        Args:
            attacks: names, mappings with settings, or objects; default: the labels, and 300 iterations of invg. Attacks
                run uncalibrated unless their ``calibrate`` says otherwise, as an object's always does.
            fail_on: the verdict that an update must not reach, nor a worse one.
            fail_above: metric to limit, as ``fedaudit audit --fail-above``. A limit on ``ceiling`` is a check of its
                own: how much an update determines of its examples, whoever attacks.
            on_fail: ``"warn"``, ``"refuse"``, or ``"clip"``: what raises an alarm leaves with its change scaled down
                to ``clip_norm``.
            unaudited: ``"pass"`` or ``"refuse"`` what can't be audited; default: ``"refuse"`` where ``on_fail`` is, so
                that a guard that refuses lets nothing leave that it couldn't look into. What isn't played because of
                ``every`` or ``share`` isn't meant.
            every: play attacks only on every so many updates of this site in a job, the first of them first.
            largest: most examples of an update that is attacked, over all its steps; a larger one can't be audited.
            mean, std: of the preprocessing, per channel; default: estimated from the inputs' range.
            loss: where the training's own isn't recognised: a registered name, a function of (outputs, targets), or
                ``package.module:function``.
            out: folder on the site: a line a round in ``guard.jsonl``, the page ``guard.html`` and ``guard.prom`` for
                programs, none of which holds examples; None: nothing is written.
            on_received: ``"warn"``, ``"refuse"`` or ``"ignore"`` received models that look manipulated.
            agreed: the network that the federation agreed on, or ``package.module:name`` of what makes it; default: of
                a received model only the weights are looked at.
            examples: the site's own, as the model sees them, and their classes, or ``package.module:name`` of what
                returns them: received models are tried on them, too.
            held_out: as ``examples``, of which none is ever trained on: it is watched whether updates and received
                models tell the site's own training examples from them
                (:class:`~fedaudit.guard.MemberWatch`). An alarm counts as an update that gives away more
                than allowed, whatever ``fail_on`` is. Default: what the client's app evaluates on.
            share: of the time that the site trains, most that all of this takes after the first round, whose debt later
                rounds pay (:class:`~fedaudit.guard.plan.Plan`); None: everything is played on every update.
            reports: write a report on every update that is attacked into ``out``, too; it holds the site's data.
            clip_norm: Euclidean norm of the change of all parameters to which ``"clip"`` scales; default: the median
                of the site's last ten quiet rounds; where there was none, the update doesn't leave.
            target_epsilon: the ε that this site's updates of a job must not exceed; the one that would isn't sent.
            delta: δ of that; default: the mechanism's.
            sanitised: the defence that updates went through before the guard sees them, ``{"name": "local-dp", …}`` or
                several; default: what can be read of the framework's mods and filters.

        Raises:
            BadInput: a setting can't be used.
        """
        super().__init__()
        for name, given, (*others, last) in (
            ("on_received", on_received, ("warn", "refuse", "ignore")),
            ("on_fail", on_fail, ("warn", "refuse", "clip")),
            ("unaudited", "pass" if unaudited is None else unaudited, ("pass", "refuse")),
        ):
            if given not in (*others, last):
                raise BadInput(f"{name} is {given!r}; give {', '.join(map(repr, others))} or {last!r}")
        if every < 1 or largest < 1:
            raise BadInput(f"every is {every} and largest {largest}; both must be 1 or more")
        for name, number, example in (
            ("share", share, "the share of the training's time, above 0, for example 0.05"),
            ("clip_norm", clip_norm, "a norm above 0"),
            ("target_epsilon", target_epsilon, "an ε above 0, for example 8"),
        ):
            if number is not None and not 0 < number < math.inf:
                raise BadInput(f"{name} is {number}; give {example}")
        if delta is not None and not 0 < delta < 1:
            raise BadInput(f"delta is {delta}; δ lies between 0 and 1")
        if out is None and (reports or target_epsilon is not None):
            what = "reports are written there" if reports else "the updates of a budget are counted in a file there"
            raise BadInput(f"out is None, and {what}: give a folder on the site")
        self.attacks = [one.written() if isinstance(one, Plugin) else one for one in listed(attacks, "attacks")]
        self.fail_on = fail_on
        self.fail_above = dict(self._limits if fail_above is None else fail_above)
        self.on_fail = on_fail
        self.unaudited = unaudited or ("refuse" if on_fail == "refuse" else "pass")
        self.every, self.largest = every, largest
        self.mean = None if mean is None else list(mean)  # JSON has no tuples
        self.std = None if std is None else list(std)
        self.loss = loss
        self.out = None if out is None else str(out)
        self.on_received = on_received
        self.agreed, self.examples = agreed, examples
        self.held_out, self.share = held_out, share
        self.reports, self.clip_norm = reports, clip_norm
        self.target_epsilon, self.delta = target_epsilon, delta
        self.sanitised = sanitised
        self._own = agreed_network(agreed), own_examples(examples)
        self._others = own_examples(held_out, "held_out")
        self._sites: dict[Key, SiteState] = {}
        self._told: set[str] = set()
        self._checked = False
        went_through = filters_of(sanitised)
        folder = None if out is None else Path(out).absolute()  # wherever a training goes
        self._round_log = RoundLog(folder, Budget(target_epsilon, delta, went_through, self._lasting))
        self._policy = Policy(on_fail, self.unaudited, clip_norm)
        attack_settings = AttackSettings(
            specs=_named(self.attacks),
            fail_on=fail_on,
            fail_above=self.fail_above,
            unset=fail_above is None,
            largest=largest,
            mean=self.mean,
            std=self.std,
            loss=own_loss(loss),
            out=folder if reports else None,
        )
        self._checks = Checks(attack_settings, every, went_through, ALARMED[on_fail], self._log)
        if went_through and target_epsilon is not None and site_account(went_through, 1, delta) is None:
            raise BadInput("sanitised adds no noise, so that nothing bounds ε: leave out target_epsilon")
        if self._early:
            self._check()

    def _check(self) -> None:
        """Refuse attacks, limits and defences that there aren't: with a wrong word in it a policy lets nothing pass."""
        from fedaudit import api  # what attacks need takes seconds to import
        from fedaudit.attacks.base import attacks_of

        if not self._checked:
            api.Limits(self.fail_above, self.fail_on).check()
            if of_records := [made.name for made in attacks_of(self.attacks) if made.recovers == "membership"]:
                raise BadInput(
                    f"attacks has '{of_records[0]}', which asks about records: give held_out=(inputs, classes), yours "
                    "that nobody trains on, in its place; projection-residual and loss-series then run every round"
                )
            self._checked = True

    # --- what comes in ----------------------------------------------------------------------------------------------

    def receives(
        self, key: Key, who: str, index: int | None, read: Callable[[], tuple[Mapping[str, Tensor], bool] | None]
    ) -> InspectedModel:
        """Check a model that the site received, log each alarm, and write down one that isn't let in.

        Args:
            key: job and site.
            who: the site and the round, in words.
            index: of the round; None: it isn't known.
            read: returns the model, and whether it is a difference, which is no model to try on examples; None where
                what came in is no model.
        """
        if self.on_received == "ignore":
            return InspectedModel(True, CheckRecord(outcome="not played", text="on_received is 'ignore'"))
        began, refuses = perf_counter(), self.on_received == "refuse"
        done = "it isn't trained on" if refuses else "it is trained on nevertheless"
        try:
            found = read()
            if found is None:
                return InspectedModel(True, CheckRecord(outcome="not played", text="no model came in"))
            agreed, examples = self._own
            state, difference = found
            site, own = self.state(key), None if difference else examples
            history = None if difference else copy.deepcopy(site.received)
            checks = check_received(state, agreed, loss=cross_entropy, examples=own, history=history, index=index)
            alarms = [f"{check.name}: {check.text}" for check in checks if check.alarm]
            for text in alarms:
                self._log.warning("fedaudit guard: %s: the received model is suspicious: %s; %s", who, text, done)
            check = CheckRecord(outcome="alarm" if alarms else "quiet", text="; ".join(alarms)[:LONGEST])
            if history is not None and not (alarms and refuses):  # what isn't let in isn't remembered
                site.received = history
        except Exception as error:
            self._log.warning("fedaudit guard: %s: what came in can't be checked: %s; %s", who, in_words(error), done)
            check = unable(in_words(error))
        check = check.model_copy(update={"seconds": perf_counter() - began})
        came = InspectedModel(check.outcome == "quiet" or not refuses, check)
        if not came.let_in:
            self._end(who, _line(key, None, "not let in", {RECEIVED: check}, spent=check.seconds))
        return came

    # --- what leaves ------------------------------------------------------------------------------------------------

    def stops(self, key: Key, who: str, through: Sequence[Filter], elements: int) -> bool:
        """Whether the budget doesn't allow another update; asked before a training, which it may save.

        Args:
            key, who: as of :meth:`receives`.
            through: all filters of the site's updates that are known.
            elements: of the model's whole state.
        """
        why = self._round_log.stops(*key, through, elements)
        if why is not None:
            self._log.warning("fedaudit guard: %s: nothing is trained or sent: %s", who, why)
            self._end(who, _line(key, None, "stopped", {}, target=self.target_epsilon))
        return why is not None

    def decide(
        self,
        key: Key,
        who: str,
        index: int | None,
        read: Callable[[], OutgoingUpdate],
        came: InspectedModel | None = None,
        through: Sequence[Filter] | None = (),
        elements: int | None = None,
    ) -> Decision:
        """Play what is due on an update that is about to leave, write it down, and return what becomes of it.

        Args:
            key, who: as of :meth:`receives`.
            index: of the round, from 0; None: nobody says.
            read: returns the update; what it raises is why that can't be audited.
            came: what was made of the model that came in.
            through, elements: as of :meth:`stops`, for an update that can't be read. None: no defence of updates works
                on what leaves, so that nothing bounds its ε; where that can't be read, either, it is no update, and
                whatever is due, it can't be audited.
        """
        began = perf_counter()
        self._check()
        site = self.state(key)
        try:
            update, problem = read(), None
        except Exception as error:
            update, problem = None, in_words(error)
        if update is None and through is None:
            results = CheckResults({RESULT: unable(problem)}, problem=problem)
        else:
            try:
                results = self._checks.play(site, who, index, update, problem)
            except Exception as error:
                results = CheckResults({}, problem=in_words(error))
        decision, line = self._policy.decide(results, site.plan.usual_norm)
        if line:
            self._log.warning("fedaudit guard: %s: %s", who, line)
        checks, spent = results.checks, site.plan.writing
        if came is not None:
            checks, spent = {RECEIVED: came.check, **checks}, spent + came.check.seconds
        one = _line(
            key,
            index,
            decision.done,
            checks,
            trained=update.seen.seconds if update is not None else 0.0,
            spent=spent + perf_counter() - began,
            norm=results.norm,
            slope=results.slope,
            target=self.target_epsilon,
        )
        if update is not None and through is not None:
            through = [*update.went_through, *update.goes_through]
            elements = sum(value.numel() for value in update.state.values())
        done = self._end(who, one, through, elements, plan=site.plan)
        site.plan.end(one, one.spent - results.seconds)
        return decision if done == decision.done else Decision(done)

    def played(self, key: Key) -> dict[str, int]:
        """Return in how many rounds of a job and site each check was played, as it was written down.

        Raises:
            BadInput: that can't be read.
        """
        checks = [item for one in self._round_log.rounds(*key) for item in one.checks.items()]
        return {name: sum(n == name and c.outcome in ("quiet", "alarm") for n, c in checks) for name, _ in checks}

    def state(self, key: Key) -> SiteState:
        """Return what is kept of a job and site; where that is nothing, what its file says."""
        if key not in self._sites:
            rounds: list[SiteRound] = []
            try:
                rounds = self._round_log.rounds(*key)
            except Exception as error:
                self._once(f"what was written down before isn't read: {in_words(error)}")
            self._sites[key] = SiteState(Plan.of(rounds, self.share), self._others)
        return self._sites[key]

    # --- what is written down ---------------------------------------------------------------------------------------

    def _end(
        self,
        who: str,
        line: SiteRound,
        through: Sequence[Filter] | None = (),
        elements: int | None = None,
        *,
        plan: Plan | None = None,
    ) -> Done:
        """Write a round down, before its update leaves; return what becomes of that. A ``plan`` pays for the page."""
        began = perf_counter()
        draw = plan is None or line.done != "left" or bool(line.alarms) or plan.draws(line.trained)
        ended = self._round_log.end(line, through, elements, draw=draw)
        if ended.why:
            self._log.warning("fedaudit guard: %s: not sent: %s", who, ended.why)
        for problem in ended.problems:
            self._once(problem)
        if plan is not None:
            plan.writing = perf_counter() - began
            plan.drawing = plan.writing if draw else plan.drawing
        return ended.done

    def _once(self, text: str) -> None:
        """Log a line that would come in every round."""
        if text not in self._told:
            self._told.add(text)
            self._log.warning("fedaudit guard: %s", text)


def _line(key: Key, index: int | None, done: Done, checks: Mapping[str, CheckRecord], **more: Any) -> SiteRound:
    now, (job, site) = datetime.now(UTC).replace(microsecond=0), key
    return SiteRound(time=now, job=job, site=site, index=index, done=done, checks=checks, **more)


def _named(attacks: Sequence[str | Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return attacks by their names; BadInput where one is named twice."""
    specs = [{"name": attack} if isinstance(attack, str) else dict(attack) for attack in attacks]
    found = {str(spec.get("name", "")): spec for spec in specs}
    if len(found) < len(specs):
        raise BadInput("attacks names the same attack twice; give each once")
    return found
