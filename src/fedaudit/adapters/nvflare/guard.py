"""A guard in front of a site: audits the update that is about to leave, and warns or blocks it."""

from __future__ import annotations

import copy
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nvflare.apis.dxo import DXO, DataKind, from_shareable
from nvflare.apis.filter import ContentBlockedException, Filter
from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import ReservedHeaderKey, Shareable
from torch import Tensor, nn

from fedaudit.adapters.nvflare.site import (
    FORMS,
    Memory,
    Received,
    is_data,
    job_of,
    log,
    model_in,
    round_of,
    site_of,
    state_of,
    taken,
    words,
)
from fedaudit.adapters.received import REFUSED as NOT_LET_IN
from fedaudit.adapters.received import agreed_network, check_policy, let_in, own_examples
from fedaudit.attacks import make_attack
from fedaudit.capture.capture import Capture
from fedaudit.capture.recorder import Recorder
from fedaudit.evaluation import Limits
from fedaudit.simulation.local_training import local_randomness
from fedaudit.utils.errors import BadInput
from fedaudit.utils.folders import temporary_folder

if TYPE_CHECKING:
    from fedaudit.pipeline.run import Audit
    from fedaudit.results import Verdict

REFUSED = "the site's guard didn't let this update leave"  # and not why: that would tell what was found
_HARMLESS = (DataKind.METRICS, DataKind.ANALYTIC, DataKind.STATISTICS, DataKind.PSI)  # no model in them

ATTACKS: tuple[str | dict[str, Any], ...] = ("labels", {"name": "invg", "iterations": 300})
LIMITS = {"psnr": 20.0}

_memory = Memory()


class GuardFilter(Filter):  # type: ignore[misc]
    """Attacks each update on the site before it leaves: one filter for task data, one for task results.

    In the site's own ``local/privacy.json`` no job can leave it out; site filters run before a job's. It audits with
    the training's own data, which it has where :func:`watch` is around the training in the same process, and plays the
    attacks that a curious server could play. What it finds is logged on the site; a result is never changed. A blocked
    result becomes a failed task (``TASK_RESULT_FILTER_ERROR``); the job goes on as long as the workflow has its least
    number of clients.

    Where an update can't be audited (nothing was watched, another training was, no weights in plain sight, no attack
    fits, an error of the guard's own) it leaves, unless ``unaudited`` is ``"refuse"``, for a site that wants to be
    sure. Metrics and statistics always leave, and so does an update over more than ``largest`` examples.

    It also inspects every model that comes in, as ``fedaudit check-model`` does, and logs what looks manipulated;
    where ``on_received`` is ``"refuse"`` such a model is blocked before anything is trained on it.

    Args:
        attacks: names, or mappings with settings; default: the labels, and 300 iterations of invg.
        fail_on: the verdict that an update must not reach, nor a worse one.
        fail_above: metric to limit, as ``fedaudit audit --fail-above``; default: psnr 20, by which a single image
            counts, too: among one candidate nothing is singled out.
        on_fail: ``"warn"`` or ``"refuse"``.
        unaudited: ``"pass"`` or ``"refuse"`` what can't be audited.
        every: audit only every so many updates of a site in a job, the first of them first.
        largest: most examples of an update that is audited, over all its steps.
        mean, std: of the preprocessing, per channel.
        loss: registered name, where the training's own isn't recognised.
        out: folder on the site for a report on every update; None: none is kept.
        on_received: ``"warn"``, ``"refuse"`` or ``"ignore"`` received models that look manipulated.
        agreed: the network that the federation agreed on, or ``package.module:name`` of what makes it; default: of a
            received model only the weights are looked at.
        examples: the site's own, as the model sees them, and their classes, or ``package.module:name`` of what returns
            them: received models are tried on them, too.

    Raises:
        BadInput: a setting can't be used.
    """

    def __init__(
        self,
        attacks: Sequence[str | dict[str, Any]] = ATTACKS,
        fail_on: Verdict | None = "recovered",
        fail_above: Mapping[str, float] | None = None,
        on_fail: str = "warn",
        unaudited: str = "pass",
        every: int = 1,
        largest: int = 32,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
        loss: str | None = None,
        out: str | None = None,
        on_received: str = "warn",
        agreed: nn.Module | str | None = None,
        examples: tuple[Tensor, Tensor] | str | None = None,
    ) -> None:
        super().__init__()
        check_policy(on_received)
        if on_fail not in ("warn", "refuse"):
            raise BadInput(f"on_fail is {on_fail!r}; give 'warn' or 'refuse'")
        if unaudited not in ("pass", "refuse"):
            raise BadInput(f"unaudited is {unaudited!r}; give 'pass' or 'refuse'")
        if every < 1 or largest < 1:
            raise BadInput(f"every is {every} and largest {largest}; both must be 1 or more")
        Limits(dict(fail_above or {}), fail_on).check()
        for attack in attacks:  # now: a policy with a wrong word in it must not let all pass
            spec = {"name": attack} if isinstance(attack, str) else dict(attack)
            make_attack(spec.pop("name", ""), spec)
        self.attacks = list(attacks)
        self.fail_on = fail_on
        self.fail_above = dict(LIMITS if fail_above is None else fail_above)
        self.on_fail = on_fail
        self.unaudited = unaudited
        self.every = every
        self.largest = largest
        self.mean = None if mean is None else list(mean)  # JSON, in which a config is written, has no tuples
        self.std = None if std is None else list(std)
        self.loss = loss
        self.out = None if out is None else str(out)
        self.on_received = on_received
        self.agreed, self.examples = agreed, examples  # as they stand in a job's configuration
        self._own = agreed_network(agreed), own_examples(examples)
        self._updates: dict[tuple[str, str], int] = {}

    def process(self, shareable: Shareable, fl_ctx: FLContext) -> Shareable:
        """Return ``shareable`` as it is.

        Raises:
            ContentBlockedException: it mustn't leave, or mustn't come in.
        """
        if is_data(self):
            try:
                _memory.keep(shareable, fl_ctx)
            except Exception as error:
                log.warning("fedaudit guard: what came in can't be read: %s", words(error))
            if not self._let_in(shareable, fl_ctx):
                raise ContentBlockedException(NOT_LET_IN)
            return shareable
        if shareable.get_return_code() != ReturnCode.OK or _harmless(shareable):
            return shareable
        seen, received = taken("guard"), _memory.take(fl_ctx)  # in rounds that aren't audited, too: not for the next
        if self._count(fl_ctx) % self.every:
            return shareable
        try:
            with local_randomness(0):  # the process trains on after the audit
                refused = self._audit(shareable, fl_ctx, seen, received) and self.on_fail == "refuse"
        except Exception as error:
            refused = self.unaudited == "refuse"
            done = "doesn't leave" if refused else "leaves"
            log.warning("fedaudit guard: %s: not audited, and %s: %s", site_of(fl_ctx), done, words(error))
        if refused:
            raise ContentBlockedException(REFUSED)
        return shareable

    def _let_in(self, shareable: Shareable, context: FLContext) -> bool:
        try:
            dxo = model_in(shareable)
            who = f"{site_of(context)}, round {round_of(shareable, context)}"
            if dxo is None:
                return True
            agreed, examples = self._own
            if dxo.data_kind != DataKind.WEIGHTS:  # a difference of weights is no model to try
                examples = None
            return let_in(state_of(dxo), self.on_received, log, who, agreed=agreed, examples=examples)
        except Exception as error:
            log.warning("fedaudit guard: what came in isn't checked: %s", words(error))
            return True

    def _count(self, context: FLContext) -> int:
        """Return how many updates of the job came before this one: what a server says its round is proves nothing."""
        key = (job_of(context), site_of(context))
        before = self._updates.get(key, 0)
        self._updates[key] = before + 1
        return before

    def _audit(self, shareable: Shareable, context: FLContext, seen: Capture | None, received: Received | None) -> bool:
        """Attack the update; return whether it gives away more than allowed.

        Raises:
            BadInput: it can't be audited.
        """
        dxo = model_in(shareable)
        if dxo is None:
            raise BadInput("no weights in plain sight")
        if seen is None or seen.module is None or not seen.inputs:
            raise BadInput("no training was seen: put `with watch():` around it, in the same process")
        index = round_of(shareable, context) if received is None or received.index is None else received.index
        who, examples = f"{site_of(context)}, round {index}", sum(map(len, seen.inputs))
        if examples > self.largest:
            log.info("fedaudit guard: %s: not audited: %d examples, largest is %d", who, examples, self.largest)
            return False
        began = time.perf_counter()
        sent = seen.start if received is None else received.state
        with temporary_folder() as folder:
            audit = self._attack(folder / "recording", context, (sent, dxo, seen), index)
        for row in audit.result.summaries:
            psnr = f" ({row.psnr.mean:.1f} dB)" if row.psnr else ""
            log.info("fedaudit guard: %s: %s: %s%s", who, row.attack, row.verdict, psnr)
        seconds = time.perf_counter() - began
        if audit.exceeded:
            done = "it doesn't leave" if self.on_fail == "refuse" else "it leaves nevertheless"
            log.warning("fedaudit guard: %s: the update gives away more than allowed; %s (%.1f s)", who, done, seconds)
            return True
        if all(row.verdict == "not applicable" for row in audit.result.summaries):
            raise BadInput("none of the attacks can be run against it")
        if any(f.recording is not None and f.recording.facts == "contradicted" for f in audit.result.federations):
            raise BadInput("the update doesn't follow from the training that was watched")
        untested = next((f"; {t.reason}" for t in audit.result.thresholds if t.outcome == "not tested"), "")
        log.info("fedaudit guard: %s: within the limits (%.1f s)%s", who, seconds, untested)
        return False

    def _attack(
        self, folder: Path, context: FLContext, what: tuple[dict[str, Tensor], DXO, Capture], index: int | None
    ) -> Audit:
        from fedaudit import api
        from fedaudit.pipeline.offline import truth_beside

        sent, dxo, seen = what
        module = copy.deepcopy(seen.module)
        assert module is not None
        given: dict[str, Any] = {"mean": self.mean, "std": self.std, "loss": self.loss}
        with Recorder(folder, name=site_of(context), module=module.cpu(), **given) as recorder:
            recorder.begin_round(sent, index)
            recorder.update(site_of(context), state_of(dxo), seen, form=FORMS[dxo.data_kind])
            recorder.end_round()
        report = None if self.out is None else Path(self.out) / job_of(context) / f"{site_of(context)}-round-{index}"
        if truth_beside(folder) is None:
            raise BadInput("what the site trained on couldn't be recorded")
        return api.audit_transcript(
            folder,
            self.attacks,
            module=module,
            out=report,
            fail_above=self.fail_above,
            fail_on=self.fail_on,
            controls=False,
            overwrite=True,
            progress=False,
        )


def _harmless(shareable: Shareable) -> bool:
    if shareable.get_header(ReservedHeaderKey.CONTENT_TYPE) != "DXO":
        return False
    return from_shareable(shareable).data_kind in _HARMLESS
