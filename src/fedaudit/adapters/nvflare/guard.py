"""A guard in front of a site: audits the update that is about to leave, and warns or blocks it."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from nvflare.apis.dxo import DXO, DataKind, from_shareable
from nvflare.apis.filter import ContentBlockedException, Filter
from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import ReservedHeaderKey, Shareable

from fedaudit.adapters import in_words
from fedaudit.adapters.guard import NOT_LET_IN, REFUSED, SiteGuard
from fedaudit.adapters.nvflare.site import (
    FORMS,
    Memory,
    Received,
    is_data,
    job_of,
    log,
    model_in,
    no_validation,
    round_of,
    site_of,
    state_of,
    taken,
)
from fedaudit.capture.capture import Capture
from fedaudit.simulation.local_training import local_randomness
from fedaudit.utils.errors import BadInput

_HARMLESS = (DataKind.METRICS, DataKind.ANALYTIC, DataKind.STATISTICS, DataKind.PSI)  # no model in them

_memory = Memory()


class GuardFilter(SiteGuard, Filter):  # type: ignore[misc]
    """Attacks each update on the site before it leaves: one filter for task data, one for task results.

    In the site's own ``local/privacy.json`` no job can leave it out; site filters run before a job's. It audits with
    the training's own data, which it has where :func:`watch` is around the training in the same process, and plays the
    attacks that a curious server could play. What it finds is logged on the site; a result is never changed. A blocked
    result becomes a failed task (``TASK_RESULT_FILTER_ERROR``); the job goes on as long as the workflow has its least
    number of clients.

    Where an update can't be audited (nothing was watched, another training was, more than ``largest`` examples, no
    weights in plain sight, no attack that ran measures what has a limit, an error of the guard's own) it does what
    ``unaudited`` says: by default such an update leaves where ``on_fail`` is ``"warn"``, and is blocked where that is
    ``"refuse"``. Metrics and statistics always leave.

    It also inspects every model that comes in, as ``fedaudit check-model`` does, and logs what looks manipulated;
    where ``on_received`` is ``"refuse"`` such a model, or one that can't be checked, is blocked before anything is
    trained on it.

    With ``held_out`` it also watches, in every round, whether the site's own training examples can be told; on a
    restart of the job's process that begins anew.

    Its settings are those of :class:`~fedaudit.adapters.guard.SiteGuard`. ``fail_above`` is by default psnr 20, by
    which a single image counts, too: among one candidate nothing is singled out. On data that no attack measures it on
    (tables, text) that default is dropped, where ``fail_on`` was tested.
    """

    _log = log
    _limits: ClassVar[dict[str, float]] = {"psnr": 20.0}

    def process(self, shareable: Shareable, fl_ctx: FLContext) -> Shareable:
        """Return ``shareable`` as it is.

        Raises:
            ContentBlockedException: it mustn't leave, or mustn't come in.
        """
        if is_data(self):
            try:
                _memory.keep(shareable, fl_ctx)
            except Exception as error:
                log.warning("fedaudit guard: what came in can't be read: %s", in_words(error))
            if not self._let_in(shareable, fl_ctx):
                raise ContentBlockedException(NOT_LET_IN)
            return shareable
        if shareable.get_return_code() != ReturnCode.OK or _harmless(shareable):
            return shareable
        seen, received = taken("guard"), _memory.take(fl_ctx)  # in rounds that aren't audited, too: not for the next
        plays = self._plays(self._count(fl_ctx))
        work = [self._look] * (self._others is not None) + [self._audit] * plays
        with no_validation(), local_randomness(0):  # the process trains on after the audit
            refused = [self._refuses(one, shareable, fl_ctx, seen, received) for one in work]
        if any(refused):
            raise ContentBlockedException(REFUSED)
        return shareable

    def _refuses(
        self,
        work: Callable[..., bool],
        shareable: Shareable,
        context: FLContext,
        seen: Capture | None,
        received: Received | None,
    ) -> bool:
        """Do a part of the guard's work; return whether the update mustn't leave."""
        try:
            return work(shareable, context, seen, received) and self.on_fail == "refuse"
        except Exception as error:
            refused = self.unaudited == "refuse"
            done = "doesn't leave" if refused else "leaves"
            log.warning("fedaudit guard: %s: not audited, and %s: %s", site_of(context), done, in_words(error))
            return refused

    def _let_in(self, shareable: Shareable, context: FLContext) -> bool:
        try:
            dxo = model_in(shareable)
            who = f"{site_of(context)}, round {round_of(shareable, context)}"
            if dxo is None:
                return True
            with no_validation():  # the model may be tried on examples
                job, difference = (job_of(context), site_of(context)), dxo.data_kind != DataKind.WEIGHTS
                return self._lets_in(state_of(dxo), who, job, difference=difference)
        except Exception as error:
            return not self._not_let_in(error, site_of(context))

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
        dxo, seen, index, who = _known(shareable, context, seen, received)
        site = site_of(context)
        self._check_size(seen)
        return self._gives_away(
            seen.start if received is None else received.state,
            state_of(dxo),
            seen,
            index,
            form=FORMS[dxo.data_kind],
            name=site,
            client=site,
            who=who,
            folder=f"{job_of(context)}/{site}-round-{index}",
            follows=True,
        )

    def _look(self, shareable: Shareable, context: FLContext, seen: Capture | None, received: Received | None) -> bool:
        """Watch members; return whether they are told.

        Raises:
            BadInput: that can't be told.
        """
        dxo, seen, _, who = _known(shareable, context, seen, received)
        watch = self._watches.setdefault((job_of(context), site_of(context)), self._watch())
        return self._tells_members(watch, state_of(dxo), seen, who, form=FORMS[dxo.data_kind])


def _known(
    shareable: Shareable, context: FLContext, seen: Capture | None, received: Received | None
) -> tuple[DXO, Capture, int | None, str]:
    """Return the weights, the training, the round, and site and round in words.

    Raises:
        BadInput: no weights, or no training was seen.
    """
    dxo = model_in(shareable)
    if dxo is None:
        raise BadInput("no weights in plain sight")
    if seen is None or seen.module is None or not seen.inputs:
        raise BadInput("no training was seen: put `with watch():` around it, in the same process")
    index = round_of(shareable, context) if received is None or received.index is None else received.index
    return dxo, seen, index, f"{site_of(context)}, round {index}"


def _harmless(shareable: Shareable) -> bool:
    if shareable.get_header(ReservedHeaderKey.CONTENT_TYPE) != "DXO":
        return False
    return from_shareable(shareable).data_kind in _HARMLESS
