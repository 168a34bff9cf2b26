"""A filter that records what enters and what leaves a site, and changes none of it."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nvflare.apis.dxo import DXO
from nvflare.apis.filter import Filter
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable

from fedaudit.adapters.nvflare.site import (
    FORMS,
    Memory,
    Received,
    counted,
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
from fedaudit.recording.recorder import Recorder
from fedaudit.utils.errors import BadInput

_memory = Memory()
_lock = threading.Lock()
_recorders: dict[tuple[str, str, str], Recorder] = {}


class RecorderFilter(Filter):  # type: ignore[misc]
    """Records a site's updates: one filter for task data, one for task results, each with the same arguments.

    >>> recipe.add_client_input_filter(RecorderFilter("/data/audit"), tasks=["train"])  # doctest: +SKIP
    >>> recipe.add_client_output_filter(RecorderFilter("/data/audit"), tasks=["train"])  # doctest: +SKIP

    A recording lies under ``folder/job/site`` (``site-2``, … where the process was started again), on the site. Weights
    and their differences are recorded; whatever else passes, passes. Last among the result filters it sees what really
    leaves, but for filters on the server. Nothing is ever changed, and an error of its own is logged, once, and stops
    nothing. With :func:`watch` around the training the truth is recorded, too.

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
            dxo = model_in(shareable)
            if dxo is not None and is_data(self):
                _memory.keep(fl_ctx, Received(round_of(shareable, fl_ctx), state_of(dxo)))
            elif dxo is not None:
                self._record(dxo, shareable, fl_ctx)
        except Exception as error:  # recording must never stop a federation
            self._tell(f"fedaudit recorder: not recorded: {words(error)}")
        return shareable

    def _record(self, dxo: DXO, shareable: Shareable, context: FLContext) -> None:
        began, site, seen = time.perf_counter(), site_of(context), taken("recorder")
        received = _memory.take(context)
        if received is None:
            raise BadInput(f"{site}: an update without the model that was sent: add the filter to the task data, too")
        index = round_of(shareable, context) if received.index is None else received.index
        if index is not None and index % self.every:
            return
        recorder = self._recorder(context, seen.module if seen else None)
        recorder.begin_round(received.state, index)
        try:
            recorder.update(site, state_of(dxo), seen, form=FORMS[dxo.data_kind], num_examples=counted(dxo))
        finally:
            recorder.end_round()
        log.info("fedaudit recorder: %s, round %s: %.0f ms", site, index, 1000 * (time.perf_counter() - began))

    def _recorder(self, context: FLContext, module: Any) -> Recorder:
        job, site = job_of(context), site_of(context)
        key = (self.folder, job, site)
        with _lock:
            if key not in _recorders:
                _recorders[key] = Recorder(
                    _free(Path(self.folder) / job, site),
                    name=site,
                    module=module,
                    mean=None if self.mean is None else tuple(self.mean),
                    std=None if self.std is None else tuple(self.std),
                    loss=self.loss,
                )
            return _recorders[key]

    def _tell(self, line: str) -> None:
        if line not in self._told:
            self._told.add(line)
            log.warning(line)


def _free(folder: Path, site: str) -> Path:
    """Return the first folder for ``site`` that no recording has taken."""
    number, path = 1, folder / site
    while path.exists():
        number += 1
        path = folder / f"{site}-{number}"
    return path
