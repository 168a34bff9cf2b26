"""A guard in front of a site: audits the update that is about to leave, and warns or blocks it."""

from __future__ import annotations

import copy
from typing import ClassVar

from nvflare.apis.dxo import DataKind, from_shareable
from nvflare.apis.filter import ContentBlockedException, Filter
from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import ReservedHeaderKey, Shareable
from torch import Tensor

from fedaudit.adapters.nvflare.site import (
    FORMS,
    Memory,
    Received,
    filters_around,
    is_data,
    job_of,
    log,
    model_in,
    no_validation,
    round_of,
    site_key,
    site_of,
    state_of,
    taken,
    validated,
    want_validation,
    warn_of_whole_weights,
)
from fedaudit.capture.capture import Capture
from fedaudit.guard.outgoing import OutgoingUpdate, few_numbers
from fedaudit.guard.policy import NOT_LET_IN, Decision
from fedaudit.guard.site_guard import InspectedModel, Key, SiteGuard
from fedaudit.utils.errors import BadInput, in_words

_NO_MODEL = (DataKind.METRICS, DataKind.ANALYTIC, DataKind.STATISTICS, DataKind.PSI)

_memory = Memory()
_came: dict[Key, InspectedModel] = {}  # what was made of what came in last: the two chains are objects of their own


class GuardFilter(SiteGuard, Filter):  # type: ignore[misc]
    """Attacks each update on the site before it leaves: one filter for task data, one for task results.

    In the site's own ``local/privacy.json`` no job can leave it out; site filters run before a job's. It audits with
    the training's own data, which it has where :func:`watch` is around the training in the same process; what wasn't
    watched, or has no weights in plain sight, can't be audited. A result is changed only where ``on_fail`` is
    ``"clip"``. A blocked one becomes a failed task (``TASK_RESULT_FILTER_ERROR``); the job goes on as long as the
    workflow has its least number of clients. Weights that leave as a failure are attacked as all others are.

    Whether the site's own training examples can be told is watched with ``held_out``, or with what the site validates
    on after its first training, in the same process; on a restart of the job's process that begins anew. With
    ``target_epsilon`` the job's filters and the site's ``privacy.json`` tell what noise there is, unless ``sanitised``
    does.

    Its settings are those of :class:`~fedaudit.guard.SiteGuard`. ``fail_above`` is by default psnr 20, by
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
        return self._comes_in(shareable, fl_ctx) if is_data(self) else self._leaves(shareable, fl_ctx)

    def _comes_in(self, shareable: Shareable, context: FLContext) -> Shareable:
        """Check task data, and keep the model in it for the result."""
        try:
            _memory.keep(shareable, context)
            if self._others is None:
                want_validation(context, "guard")
        except Exception as error:
            log.warning("fedaudit guard: what came in can't be read: %s", in_words(error))
        key, index = site_key(context), _round(shareable, context)
        with no_validation():  # the model may be tried on examples
            came = self.receives(key, _who(context, index), index, lambda: _model(shareable))
        if not came.let_in:
            raise ContentBlockedException(NOT_LET_IN)
        _came[key] = came
        return shareable

    def _leaves(self, shareable: Shareable, context: FLContext) -> Shareable:
        """Audit a task result, and let it leave as it is, clipped, or not."""
        kind, failed = _kind(shareable), shareable.get_return_code() != ReturnCode.OK
        if (failed or not kind or kind in _NO_MODEL) and few_numbers(_content(shareable)):
            return shareable
        defended = not failed and _defended(shareable, kind)
        if defended:
            warn_of_whole_weights(kind, context, type(self).__name__)
        # In rounds that aren't audited, too: they aren't the next one's.
        seen, received = taken(context, "guard"), _memory.take(context)
        key = site_key(context)
        index = _round(shareable, context) if received is None or received.index is None else received.index
        site = self.state(key)
        if site.held_out is None and (found := validated(context, "guard")) is not None:
            site.held_out = found

        def leaving() -> OutgoingUpdate:
            return self._update(shareable, context, seen, received, index)

        with no_validation():  # the process trains on after the audit
            before, after = filters_around(context, type(self).__name__)
            came, through = _came.pop(key, None), [*before, *after] if defended else None
            decision = self.decide(key, _who(context, index), index, leaving, came, through)
        if decision.reason:
            raise ContentBlockedException(decision.reason)
        return _scaled(shareable, leaving(), decision) if decision.done == "clipped" else shareable

    def _update(
        self,
        shareable: Shareable,
        context: FLContext,
        seen: Capture | None,
        received: Received | None,
        index: int | None,
    ) -> OutgoingUpdate:
        """Return the update; BadInput where there are no weights, or no training was seen."""
        dxo, site = model_in(shareable), site_of(context)
        if dxo is None:
            raise BadInput(f"{_kind(shareable) or 'a result of unknown kind'}: no weights in plain sight")
        if seen is None or seen.module is None or not seen.inputs:
            raise BadInput("no training was seen: put `with watch():` around it, in the same process")
        failed = shareable.get_return_code() != ReturnCode.OK
        before, after = ([], []) if failed else filters_around(context, type(self).__name__)
        return OutgoingUpdate(
            sent=seen.start if received is None else received.state,
            state=state_of(dxo),
            seen=seen,
            form=FORMS[dxo.data_kind],
            name=site,
            folder=f"{job_of(context)}/{site}-round-{index}",
            follows=not before and self.sanitised is None,
            went_through=before,
            goes_through=after,
        )


def _model(shareable: Shareable) -> tuple[dict[str, Tensor], bool] | None:
    """Return the model that came in, and whether it is a difference; None: something else came in."""
    dxo = model_in(shareable)
    return None if dxo is None else (state_of(dxo), dxo.data_kind != DataKind.WEIGHTS)


def _scaled(shareable: Shareable, update: OutgoingUpdate, decision: Decision) -> Shareable:
    """Return the result with less of the change in it; the one that is given isn't changed."""
    dxo = model_in(shareable)
    assert dxo is not None
    own = {str(name): value for name, value in dxo.data.items()}
    dxo.data = {
        name: value if isinstance(own[name], Tensor) else value.numpy().astype(own[name].dtype)
        for name, value in update.clipped(decision.scale).items()
    }
    return dxo.update_shareable(copy.copy(shareable))


def _round(shareable: Shareable, context: FLContext) -> int | None:
    try:
        return round_of(shareable, context)
    except Exception:
        return None


def _who(context: FLContext, index: int | None) -> str:
    return f"{site_of(context)}, round {index}"


def _kind(shareable: Shareable) -> str:
    """Return the kind of data in a result, in NVFlare's word; empty: it is another sort of result."""
    try:
        return str(DataKind(from_shareable(shareable).data_kind).value)
    except ValueError:
        return ""


def _defended(shareable: Shareable, kind: str) -> bool:
    """Return whether filters of updates work on all that a result holds; on failures and other kinds none does."""
    if kind != DataKind.COLLECTION.value:
        return kind in FORMS
    parts = from_shareable(shareable).data.values()
    return all(getattr(part, "data_kind", None) in FORMS for part in parts)


def _content(shareable: Shareable) -> dict[str, object]:
    """Return what a result holds, and its headers but NVFlare's own, which are called ``__…__``."""
    content = {str(name): value for name, value in shareable.items() if name != ReservedHeaderKey.HEADERS}
    headers = shareable.get(ReservedHeaderKey.HEADERS) or {}
    own = {str(name): value for name, value in headers.items() if not str(name).startswith("__")}
    return content | ({"headers": own} if own else {})
