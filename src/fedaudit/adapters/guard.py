"""What the guards of all frameworks do: they check the model that comes in, and attack the update before it leaves."""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fedaudit.adapters import in_words
from fedaudit.capture.capture import Capture
from fedaudit.capture.recorder import Recorder
from fedaudit.defences.received import ReceivedHistory, check_received
from fedaudit.modalities.packed import packed_alone
from fedaudit.utils.errors import BadInput
from fedaudit.utils.folders import temporary_folder
from fedaudit.utils.objects import load_object

if TYPE_CHECKING:
    from fedaudit.api import MemberWatch, Verdict
    from fedaudit.transcript.files import Form

NOT_LET_IN = "the site's guard didn't let this model in"  # and not why: that would tell what it looks for
REFUSED = "the site's guard didn't let this update leave"  # and not why: that would tell what was found


class SiteGuard:
    """The settings of a site's guard, and the attack on what is about to leave; a framework's own guard is one."""

    _log: ClassVar[logging.Logger]
    _limits: ClassVar[dict[str, float]] = {}  # where none are given
    _early: ClassVar[bool] = True  # whether attacks are checked when the guard is made

    def __init__(
        self,
        attacks: Sequence[str | dict[str, Any]] = ("labels", {"name": "invg", "iterations": 300}),
        fail_on: Verdict | None = "recovered",
        fail_above: Mapping[str, float] | None = None,
        on_fail: str = "warn",
        unaudited: str | None = None,
        every: int = 1,
        largest: int = 32,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
        loss: str | None = None,
        out: Path | str | None = None,
        on_received: str = "warn",
        agreed: nn.Module | str | None = None,
        examples: tuple[Tensor, Tensor] | str | None = None,
        held_out: tuple[Tensor, Tensor] | str | None = None,
        share: float = 0.05,
    ) -> None:
        """Keep the settings, under their names and as they stand in a job's configuration.

        Args:
            attacks: names, or mappings with settings; default: the labels, and 300 iterations of invg. None is
                calibrated, unless its ``calibrate`` says so.
            fail_on: the verdict that an update must not reach, nor a worse one.
            fail_above: metric to limit, as ``fedaudit audit --fail-above``.
            on_fail: ``"warn"`` or ``"refuse"``.
            unaudited: ``"pass"`` or ``"refuse"`` what can't be audited; default: as ``on_fail``, so that a guard that
                refuses lets nothing leave that it didn't look into.
            every: audit only every so many updates of this site in a job, the first of them first.
            largest: most examples of an update that is audited, over all its steps; a larger one can't be audited.
            mean, std: of the preprocessing, per channel; default: estimated from the inputs' range.
            loss: registered name, where the training's own isn't recognised.
            out: folder on the site for a report on every update; default: none is kept.
            on_received: ``"warn"``, ``"refuse"`` or ``"ignore"`` received models that look manipulated.
            agreed: the network that the federation agreed on, or ``package.module:name`` of what makes it; default: of
                a received model only the weights are looked at.
            examples: the site's own, as the model sees them, and their classes, or ``package.module:name`` of what
                returns them: received models are tried on them, too.
            held_out: as ``examples``, of which none is ever trained on: in every round it is watched whether updates
                and received models tell the site's own training examples from them
                (:class:`~fedaudit.pipeline.members.MemberWatch`). An alarm counts as an update that gives away more
                than allowed, whatever ``fail_on`` is. With it ``attacks`` may be empty.
            share: of the time that the site trains, most that watching members takes from the second round on.

        Raises:
            BadInput: a setting can't be used.
        """
        super().__init__()
        for name, given, (*others, last) in (
            ("on_received", on_received, ("warn", "refuse", "ignore")),
            ("on_fail", on_fail, ("warn", "refuse")),
            ("unaudited", "pass" if unaudited is None else unaudited, ("pass", "refuse")),
        ):
            if given not in (*others, last):
                raise BadInput(f"{name} is {given!r}; give {', '.join(map(repr, others))} or {last!r}")
        if every < 1 or largest < 1:
            raise BadInput(f"every is {every} and largest {largest}; both must be 1 or more")
        if not 0 < share < float("inf"):
            raise BadInput(f"share is {share}; give the share of a round's training time, above 0, for example 0.05")
        self.attacks = list(attacks)
        self.fail_on = fail_on
        self.fail_above = dict(self._limits if fail_above is None else fail_above)
        self._unset = fail_above is None
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
        self._own = agreed_network(agreed), own_examples(examples)
        self._others = own_examples(held_out, "held_out")
        self._watches: dict[tuple[str, str], MemberWatch] = {}  # by job and site
        self._updates: dict[tuple[str, str], int] = {}  # how many came, by job and site
        self._received: dict[tuple[str, str], ReceivedHistory] = {}
        self._checked = False
        if self._early:
            self._check()

    def _check(self) -> None:
        """Refuse attacks and limits that there aren't: a policy with a wrong word in it must not let all pass."""
        from fedaudit import api  # what attacks need takes seconds to import

        if not self._checked:
            api.Limits(self.fail_above, self.fail_on).check()
            for attack in self.attacks:
                spec = {"name": attack} if isinstance(attack, str) else dict(attack)
                made = api.make_attack(spec.pop("name", ""), spec)
                if made.recovers == "membership":
                    raise BadInput(
                        f"attacks has '{made.name}', which asks about records: give held_out=(inputs, "
                        "classes), yours that nobody trains on, in its place; span and loss-series then run every round"
                    )
            self._checked = True

    def _lets_in(
        self,
        state: Mapping[str, Tensor],
        who: str,
        job: tuple[str, str] = ("", ""),
        *,
        difference: bool = False,
    ) -> bool:
        """Check a model that the site received, log each alarm, and return whether the site may train on it.

        ``who`` says the site and the round, ``job`` the job and the site, whose last models that were let in are
        remembered; the difference of two models is no model to try on examples, nor to compare with the last ones.
        """
        if self.on_received == "ignore":
            return True
        agreed, examples = self._own
        history = None if difference else copy.deepcopy(self._received.get(job, ReceivedHistory()))
        own = None if difference else examples
        checks = check_received(state, agreed, loss=cross_entropy, examples=own, history=history)
        alarms = [check for check in checks if check.alarm]
        done = "it isn't trained on" if self.on_received == "refuse" else "it is trained on nevertheless"
        for check in alarms:
            text = "fedaudit guard: %s: the received model is suspicious: %s: %s; %s"
            self._log.warning(text, who, check.name, check.text, done)
        let_in = not alarms or self.on_received != "refuse"
        if let_in and history is not None:
            self._received[job] = history
        return let_in

    def _not_let_in(self, error: Exception, who: str) -> bool:
        """Log that a received model can't be checked, and return whether the site must not train on it."""
        refused = self.on_received == "refuse"
        done = "it isn't trained on" if refused else "it is trained on nevertheless"
        self._log.warning("fedaudit guard: %s: what came in can't be checked: %s; %s", who, in_words(error), done)
        return refused

    def _check_size(self, seen: Capture) -> None:
        examples = sum(map(len, seen.inputs))
        if examples > self.largest:
            raise BadInput(f"the update is over {examples} examples, and largest is {self.largest}; raise largest")

    def _plays(self, before: int) -> bool:
        """Whether the attacks are played on the update before which so many came."""
        return before % self.every == 0 and bool(self.attacks or self._others is None)

    def _watch(self) -> MemberWatch:
        from fedaudit.api import MemberWatch  # as above

        assert self._others is not None
        return MemberWatch(self._others, self.share, self.loss)

    def _tells_members(
        self, watch: MemberWatch, state: Mapping[str, Tensor], seen: Capture, who: str, *, form: Form = "weights"
    ) -> bool:
        """Watch what a round tells of the site's own training examples, log it, and return whether it tells of them.

        Arguments as of :meth:`_gives_away`.

        Raises:
            BadInput: that can't be told.
        """
        found = watch.look(state, seen, form)
        lines = [*map(str, found.told), *found.notes]
        cost = f"{found.seconds:.2g} s, {100 * found.share:.2g} % of the training's time"
        self._log.info("fedaudit guard: %s: members: %s (%s)", who, "; ".join(lines) or "not tested", cost)
        if alarms := [str(told) for told in found.told if told.alarm]:
            done = "it doesn't leave" if self.on_fail == "refuse" else "it leaves nevertheless"
            text = "fedaudit guard: %s: which examples were trained on can be told: %s; %s"
            self._log.warning(text, who, "; ".join(alarms), done)
            return True
        if found.unable is not None:
            raise BadInput(f"members aren't watched: {found.unable}")
        return False

    def _gives_away(
        self,
        sent: Mapping[str, Tensor],
        state: Mapping[str, Tensor],
        seen: Capture,
        index: int | None,
        *,
        form: Form = "weights",
        name: str,
        client: str,
        who: str,
        folder: str,
        follows: bool,
    ) -> bool:
        """Attack an update, log what is found, and return whether it gives away more than allowed.

        ``state`` is about to leave, in that ``form``; ``who`` says the site and the round, ``folder`` where in ``out``
        the report goes; ``follows``: nothing changes the update after the training that was watched.

        Raises:
            BadInput: that can't be told.
        """
        from fedaudit import api
        from fedaudit.transcript.truth import truth_beside

        began, module = time.perf_counter(), copy.deepcopy(seen.module)
        assert module is not None
        with temporary_folder() as place:
            known: dict[str, Any] = {"mean": self.mean, "std": self.std, "loss": self.loss}
            with Recorder(place / "recording", name=name, module=module.cpu(), **known) as recorder:
                recorder.begin_round(sent, index)
                recorder.update(client, state, seen, form=form)
                recorder.end_round()
            if truth_beside(place / "recording") is None:
                raise BadInput("what the site trained on couldn't be recorded")
            audit = api.audit_transcript(
                place / "recording",
                [_uncalibrated(attack) for attack in self.attacks],
                module=module,
                out=None if self.out is None else Path(self.out) / folder,
                fail_above=self.fail_above,
                fail_on=self.fail_on,
                controls=False,
                overwrite=True,
                progress=False,
            )
        seconds, result = time.perf_counter() - began, audit.result
        for row in result.summaries:
            psnr = f" ({row.psnr.mean:.1f} dB)" if row.psnr else ""
            self._log.info("fedaudit guard: %s: %s: %s%s", who, row.attack, row.verdict, psnr)
        if audit.exceeded:
            done = "it doesn't leave" if self.on_fail == "refuse" else "it leaves nevertheless"
            text = "fedaudit guard: %s: the update gives away more than allowed; %s (%.1f s)"
            self._log.warning(text, who, done, seconds)
            return True
        if all(row.verdict == "not applicable" for row in result.summaries):
            raise BadInput("none of the attacks can be run against it")
        if follows and any(f.recording is not None and f.recording.facts == "contradicted" for f in result.federations):
            raise BadInput("the update doesn't follow from the training that was watched")
        unable = [t for t in result.thresholds if t.measured_by != "what ran"]
        if self._unset and len(unable) < len(result.thresholds):  # of limits that nobody set, what nothing measures
            unable = [t for t in unable if t.measured_by != "nothing" or t.verdict is not None]
        unable.sort(key=lambda t: t.verdict is None)
        if unable:
            limit = f"the limit on {unable[0].metric}" if unable[0].verdict is None else "fail_on"
            raise BadInput(f"{limit} can't be exceeded by what ran: {unable[0].reason}")
        untested = next((f"; {t.reason}" for t in result.thresholds if t.outcome == "not tested"), "")
        self._log.info("fedaudit guard: %s: within the limits (%.1f s)%s", who, seconds, untested)
        return False


def _uncalibrated(attack: str | dict[str, Any]) -> dict[str, Any]:
    """Return an attack that isn't calibrated unless it is asked for: in every round that would cost as much again."""
    from fedaudit import api

    spec: dict[str, Any] = {"name": attack} if isinstance(attack, str) else dict(attack)
    settings = {key: value for key, value in spec.items() if key != "name"}
    known = api.make_attack(spec["name"], settings).settings()
    if "attack" in known:  # a method of another one's
        spec["attack"] = _uncalibrated(spec.get("attack", known["attack"]))
    return {"calibrate": False, **spec} if "calibrate" in known else spec


def agreed_network(given: nn.Module | str | None) -> nn.Module | None:
    """Return the network that the federation agreed on: a module, or ``package.module:name`` of one or what makes it.

    Raises:
        BadInput: there is none.
    """
    made = _made(given, "agreed")
    if made is not None and not isinstance(made, nn.Module):
        raise BadInput(f"agreed is {type(made).__name__}; give a torch module, or package.module:name of what makes it")
    return made


def own_examples(given: tuple[Tensor, Tensor] | str | None, what: str = "examples") -> tuple[Tensor, Tensor] | None:
    """Return a site's own examples and their classes: tensors, or ``package.module:name`` of them or what makes them.

    Several inputs of an example, in a tuple or by name, are packed.

    Raises:
        BadInput: there are none, or they don't fit together.
    """
    made = _made(given, what)
    if made is None:
        return None
    if isinstance(made, tuple | list) and len(made) == 2:  # of a model of several inputs
        made = packed_alone(made[0], f"{what}: input"), packed_alone(made[1], f"{what}: target", whole=True)
    pair = isinstance(made, tuple | list) and len(made) == 2 and all(isinstance(part, Tensor) for part in made)
    if not pair or not len(made[0]) or len(made[0]) != len(made[1]):
        raise BadInput(f"{what} must be two tensors of the same length, inputs and classes, or what returns them")
    return made[0], made[1]


def _made(given: Any, what: str) -> Any:
    if not isinstance(given, str):
        return given
    found = load_object(given, what)
    if isinstance(found, nn.Module | tuple | list) or not callable(found):
        return found
    try:
        return found()
    except Exception as error:
        raise BadInput(f"{what} '{given}' can't be called without arguments: {type(error).__name__}: {error}") from None
