"""Canary clients in NVFlare: sites that send a known direction in place of a trained model, for an audit of ε."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from nvflare.apis.dxo import DXO, DataKind, MetaKey
from nvflare.apis.event_type import EventType
from nvflare.apis.executor import Executor
from nvflare.apis.fl_component import FLComponent
from nvflare.apis.fl_constant import ReservedKey, ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable, make_reply
from nvflare.apis.signal import Signal
from nvflare.app_common.abstract.model import ModelLearnableKey
from nvflare.app_common.app_constant import AppConstants
from nvflare.app_common.app_event_type import AppEventType
from torch import Tensor

from fedaudit.adapters.nvflare.site import FORMS, counted, job_of, log, model_in, round_of, site_of, state_of
from fedaudit.capture.canaries import CanaryClients
from fedaudit.capture.recorder import Recorder
from fedaudit.utils.errors import BadInput, in_words


class CanaryExecutor(Executor):  # type: ignore[misc]
    """Answers training tasks as a canary, on the sites that are canaries; it trains nothing, and does no other task.

    >>> canaries = CanaryClients(Net(), 40, clip=1.0, claimed=4.0)  # doctest: +SKIP
    >>> for site in sites:  # doctest: +SKIP
    ...     job.to(CanaryExecutor(canaries, sites), site, tasks=["train"])
    >>> job.to_server(CanaryRecorder("/data/audit", canaries, sites))  # doctest: +SKIP

    Its result goes through the filters of task results that any site's goes through, those which clip and add noise,
    too. The job's configuration holds the seed, which tells who is in: whoever runs the job is the auditor, or trusted.

    Args:
        canaries: the auditor's; every process makes them from the same seed.
        sites: names of the sites that are canaries: the first is number 0.
        form: in which this job's sites answer: ``weights``, or their ``difference`` to those that were sent.
        steps: that a canary says it trained for: NVFlare weighs updates by it, so give what the promise supposes.

    Raises:
        BadInput: a setting can't be used.
    """

    def __init__(self, canaries: CanaryClients, sites: Sequence[str], form: str = "weights", steps: int = 1) -> None:
        super().__init__()
        if form not in FORMS.values() or steps < 1:
            raise BadInput(f"form is {form!r} and steps {steps}; give 'weights' or 'difference', and 1 or more")
        self.canaries, self.sites, self.form, self.steps = canaries, _checked(canaries, sites), form, steps

    def execute(self, task_name: str, shareable: Shareable, fl_ctx: FLContext, abort_signal: Signal) -> Shareable:  # noqa: ARG002
        """Return the model that this site's canary answers with, or why there is none, as a return code."""
        if task_name != AppConstants.TASK_TRAIN:
            return make_reply(ReturnCode.TASK_UNKNOWN)
        try:
            if (dxo := model_in(shareable)) is None:
                raise BadInput("the task holds no weights")
            if (site := site_of(fl_ctx)) not in self.sites:
                raise BadInput(f"'{site}' isn't among the sites that are canaries")
            sent = state_of(dxo)
            answer: dict[str, Tensor] = self.canaries.update(self.sites.index(site), sent)
        except BadInput as error:
            log.error("fedaudit canary: %s", in_words(error))
            return make_reply(ReturnCode.BAD_TASK_DATA)
        if self.form == "difference":
            answer = {name: tensor - sent[name] for name, tensor in answer.items()}
        arrays = {
            name: tensor.numpy() if isinstance(dxo.data[name], np.ndarray) else tensor
            for name, tensor in answer.items()
        }
        kind = DataKind.WEIGHTS if self.form == "weights" else DataKind.WEIGHT_DIFF
        reply: Shareable = DXO(kind, arrays, {MetaKey.NUM_STEPS_CURRENT_ROUND: self.steps}).to_shareable()
        return reply


class CanaryRecorder(FLComponent):  # type: ignore[misc]
    """Records, on the server, what observers of the canaries see: all updates as they arrive, and every global model.

    For the workflows FedAvg and ScatterAndGather, and those made of them. A recording lies under ``folder/job``, on the
    server; ``fedaudit attack RECORDING --attack dp-canaries`` has the rest. It changes nothing, and an error of its own
    is logged, once, and stops nothing.

    Args:
        folder: on the server; the auditor's alone, for it holds who was in.
        canaries: the same as of :class:`CanaryExecutor`.
        sites: likewise.

    Raises:
        BadInput: a setting can't be used.
    """

    def __init__(self, folder: str, canaries: CanaryClients, sites: Sequence[str]) -> None:
        super().__init__()
        self.folder, self.canaries, self.sites = str(folder), canaries, _checked(canaries, sites)
        self._recorder: Recorder | None = None
        self._lock = threading.Lock()
        self._told: set[str] = set()

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        """Record the model that a round begins with, each result, and the last model."""
        does = {
            AppEventType.ROUND_STARTED: self._begin,
            AppEventType.AFTER_CONTRIBUTION_ACCEPT: self._read,
            EventType.END_RUN: self._end,
        }.get(event_type)
        if does is None:
            return
        try:
            with self._lock:  # results come in several threads
                does(fl_ctx)
        except Exception as error:  # recording must never stop a federation
            if (line := f"fedaudit canaries: not recorded: {in_words(error)}") not in self._told:
                self._told.add(line)
                log.warning(line)

    def _begin(self, context: FLContext) -> None:
        if self._recorder is None:
            path = Path(self.folder) / job_of(context)
            self._recorder = Recorder(path, name=path.name, module=self.canaries.module, canaries=self.canaries)
        else:
            self._recorder.end_round()
        self._recorder.begin_round(_global(context), round_of(Shareable(), context))

    def _read(self, context: FLContext) -> None:
        result = context.get_prop(AppConstants.TRAINING_RESULT)
        if self._recorder is None or not isinstance(result, Shareable) or (dxo := model_in(result)) is None:
            return
        if context.get_prop(AppConstants.AGGREGATION_ACCEPTED) is False:  # the sum goes without it
            return
        site = str(result.get_peer_prop(ReservedKey.IDENTITY_NAME, ""))
        number = self.sites.index(site) if site in self.sites else None
        examples = counted(dxo)
        self._recorder.update(site, state_of(dxo), form=FORMS[dxo.data_kind], num_examples=examples, canary=number)

    def _end(self, context: FLContext) -> None:
        if self._recorder is not None:
            self._recorder.end_round()
            self._recorder.close(_global(context))


def _checked(canaries: CanaryClients, sites: Sequence[str]) -> list[str]:
    """Return the names as a list, as JSON has them: as many as canaries, and none twice."""
    names = [str(site) for site in sites]
    if len(set(names)) != canaries.count or len(names) != canaries.count:
        raise BadInput(
            f"there are {canaries.count} canaries and {len(set(names))} sites for them; name a site for each"
        )
    return names


def _global(context: FLContext) -> dict[str, Tensor]:
    model = context.get_prop(AppConstants.GLOBAL_MODEL)
    if not isinstance(model, Mapping) or not model.get(ModelLearnableKey.WEIGHTS):
        raise BadInput("the workflow doesn't say what the global model is")
    weights: Any = model[ModelLearnableKey.WEIGHTS]
    return state_of(DXO(DataKind.WEIGHTS, dict(weights)))
