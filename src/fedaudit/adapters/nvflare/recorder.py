"""A filter that records what enters and what leaves a site, and changes none of it."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from nvflare.apis.dxo import DXO
from nvflare.apis.filter import Filter
from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable
from torch import Tensor

from fedaudit.adapters.nvflare.site import (
    FORMS,
    Memory,
    counted,
    is_data,
    job_of,
    log,
    model_in,
    round_of,
    site_of,
    state_of,
    taken,
    validated,
    want_validation,
    warn_of_whole_weights,
)
from fedaudit.capture.recorder import Recorder
from fedaudit.utils.errors import BadInput, in_words

_memory = Memory()
_lock = threading.Lock()
_recorders: dict[tuple[str, str, str], Recorder] = {}


class RecorderFilter(Filter):  # type: ignore[misc]
    """Records a site's updates: one filter for task data, one for task results, each with the same arguments.

    >>> recipe.add_client_input_filter(RecorderFilter("/data/audit"), tasks=["train"])  # doctest: +SKIP
    >>> recipe.add_client_output_filter(RecorderFilter("/data/audit"), tasks=["train"])  # doctest: +SKIP

    A recording lies under ``folder/job/site``, on the site (a job that runs anew under the same id: ``site-2``, …).
    Weights and their differences are recorded; whatever else passes, passes. Last among the result filters it sees what
    really leaves, but for filters on the server. Nothing is ever changed, and an error of its own is logged, once, and
    stops nothing. With :func:`watch` around the training the truth is recorded, too, and what the site validates on, by
    a loss of torch's, as the recorder's candidates: the first 2,000 examples.

    Args:
        folder: on the site.
        mean, std: of the preprocessing, per channel.
        loss: registered name, where the training's own isn't recognised.
        every: record only every so many rounds.
    """

    def __init__(
        self,
        folder: str,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
        loss: str | None = None,
        every: int = 1,
    ) -> None:
        super().__init__()
        self.folder = str(folder)
        self.mean = None if mean is None else list(mean)  # JSON, in which a job's config is written, has no tuples
        self.std = None if std is None else list(std)
        self.loss = loss
        self.every = every
        self._told: set[str] = set()

    def process(self, shareable: Shareable, fl_ctx: FLContext) -> Shareable:
        """Record, and return ``shareable`` as it is."""
        try:
            if is_data(self):
                _memory.keep(shareable, fl_ctx)
                want_validation(fl_ctx, "recorder")
            elif shareable.get_return_code() == ReturnCode.OK and (dxo := model_in(shareable)) is not None:
                warn_of_whole_weights(dxo.data_kind, fl_ctx, type(self).__name__)
                self._record(dxo, shareable, fl_ctx)
        except Exception as error:  # recording must never stop a federation
            if (line := f"fedaudit recorder: not recorded: {in_words(error)}") not in self._told:
                self._told.add(line)
                log.warning(line)
        return shareable

    def _record(self, dxo: DXO, shareable: Shareable, context: FLContext) -> None:
        began, site, seen = time.perf_counter(), site_of(context), taken(context, "recorder")
        received = _memory.take(context)
        if received is None:
            raise BadInput(f"{site}: an update without the model that was sent: add the filter to the task data, too")
        index = round_of(shareable, context) if received.index is None else received.index
        if index is not None and index % self.every:
            return
        recorder = self._begin(context, received.state, index)
        try:
            form, examples = FORMS[dxo.data_kind], counted(dxo)
            recorder.update(site, state_of(dxo), seen, form=form, num_examples=examples, sent=received.state)
            if (tested := validated(context, "recorder")) is not None:
                recorder.candidates(*tested)
        finally:
            recorder.end_round()
        log.info("fedaudit recorder: %s, round %s: %.0f ms", site, index, 1000 * (time.perf_counter() - began))

    def _begin(self, context: FLContext, sent: dict[str, Tensor], index: int | None) -> Recorder:
        """Begin a round, in the site's recording of the job or, where that has got further already, in a new one."""
        job, site = job_of(context), site_of(context)
        key = (self.folder, job, site)
        with _lock:
            if key in _recorders:
                _recorders[key].begin_round(sent, index)
                return _recorders[key]
            for number in itertools.count(1):
                path = Path(self.folder) / job / (site if number == 1 else f"{site}-{number}")
                known = path.exists()
                recorder = Recorder(path, name=site, mean=self.mean, std=self.std, loss=self.loss, append=True)
                try:
                    recorder.begin_round(sent, index)
                except BadInput:
                    if not known:
                        raise
                    continue
                _recorders[key] = recorder
                break
            return _recorders[key]
