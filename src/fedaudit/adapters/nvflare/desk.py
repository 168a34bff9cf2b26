"""In the processes of a job that is audited on one's desk: keeps each training as it came in, was watched and left."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import cloudpickle
import nvflare.client
import torch
from nvflare.apis.filter import Filter
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable
from nvflare.app_common.abstract.fl_model import ParamsType
from nvflare.client import api
from torch import Tensor

from fedaudit.adapters.nvflare.site import FORMS, counted, is_data, log, model_in, round_of, site_of, state_of
from fedaudit.capture.capture import Capture
from fedaudit.capture.evaluation import Evaluation
from fedaudit.transcript.files import Form
from fedaudit.utils.errors import in_words
from fedaudit.utils.integrity import write_whole

_MOST = 2000  # examples of what a site validates on that are kept


@dataclass(frozen=True)
class Left:
    """One training of a site; ``seen`` is without its module's hooks, and knows its facts.

    Attributes:
        site, index: whose, and its round from 0.
        sent, state, form: the model that came in, and what left in which form.
        examples: over how many it says that it was.
        tested: what was validated on meanwhile.
    """

    site: str
    index: int
    sent: Mapping[str, Tensor]
    state: Mapping[str, Tensor]
    form: Form
    examples: int | None
    seen: Capture
    tested: list[tuple[Tensor, Tensor]]


class DeskFilter(Filter):  # type: ignore[misc]
    """Keeps what a site trains: in both chains of filters, the last in each.

    Args:
        folder: for what is kept, a file a training.
        script: the Client API trains, in a thread of its own: watched is from its ``receive`` to its ``send``.
    """

    def __init__(self, folder: str, script: bool) -> None:
        super().__init__()
        self.folder, self.script = folder, script
        _desk.folder = Path(folder)
        if script:
            _desk.watch_script()

    def process(self, shareable: Shareable, fl_ctx: FLContext) -> Shareable:
        """Keep, and return ``shareable`` as it is."""
        try:
            dxo = model_in(shareable)
            _desk.site = site_of(fl_ctx)
            if is_data(self):
                if not self.script and dxo is not None:
                    _desk.begin(state_of(dxo), round_of(shareable, fl_ctx))
            elif dxo is not None:
                if not self.script:
                    _desk.end(state_of(dxo), FORMS[dxo.data_kind], counted(dxo))
                else:  # other filters may have changed it
                    _desk.leaves(state_of(dxo), FORMS[dxo.data_kind])
        except Exception as error:
            log.warning("fedaudit: not recorded: %s", in_words(error))
        return shareable


class _Desk:
    """What this process's site does: one training after the other."""

    def __init__(self) -> None:
        self.folder, self.site = Path(), "site"
        self._count = 0
        self._open: tuple[dict[str, Tensor], int, Capture, Evaluation, ExitStack] | None = None
        self._last: Left | None = None
        self._watches = False

    def watch_script(self) -> None:
        """Have the Client API tell when a script receives a model and when it sends one."""
        if self._watches:
            return
        self._watches, receive, send = True, api.receive, api.send

        def received(*arguments: Any, **options: Any) -> Any:
            model = receive(*arguments, **options)
            if model is not None and model.params and nvflare.client.is_train():
                self._quietly(lambda: self.begin(_tensors(model.params), model.current_round))
            return model

        def sends(model: Any, *arguments: Any, **options: Any) -> Any:
            form: Form = "difference" if model.params_type == ParamsType.DIFF else "weights"
            self.site = nvflare.client.get_site_name()
            if model.params:
                self._quietly(lambda: self.end(_tensors(model.params), form, None))
            return send(model, *arguments, **options)

        for place in (api, nvflare.client):
            place.receive, place.send = received, sends

    def begin(self, sent: dict[str, Tensor], index: int | None) -> None:
        """Watch a training that begins with this model."""
        if self._open is not None:
            self._open[4].close()
        stack = ExitStack()
        tested = stack.enter_context(Evaluation([tuple(value.shape) for value in sent.values()], _MOST))
        kept = {name: value.clone() for name, value in sent.items()}  # whoever trains changes theirs
        self._open = (kept, self._count if index is None else index, stack.enter_context(Capture()), tested, stack)

    def end(self, state: dict[str, Tensor], form: Form, examples: int | None) -> None:
        """Keep the training that ends with this model."""
        if self._open is None:
            return
        (sent, index, seen, tested, stack), self._open = self._open, None
        stack.close()
        config = seen.training() if seen.inputs else None
        vars(seen)["training"] = functools.partial(_known, config)
        state = {name: value.clone() for name, value in state.items()}
        self._last = Left(self.site, index, sent, state, form, examples, seen, tested.passes)
        self._count += 1
        self._write()

    def leaves(self, state: dict[str, Tensor], form: Form) -> None:
        """Keep of the last training what really leaves."""
        if self._last is not None:
            self._last = replace(self._last, state=state, form=form)
            self._write()

    def _write(self) -> None:
        write_whole(self.folder / f"{self.site}-{self._count:05d}.pickle", cloudpickle.dumps(self._last))

    def _quietly(self, work: Any) -> None:
        try:
            work()
        except Exception as error:
            log.warning("fedaudit: not recorded: %s", in_words(error))


_desk = _Desk()


def _tensors(params: Mapping[str, Any]) -> dict[str, Tensor]:
    return {str(name): torch.as_tensor(value).detach().cpu() for name, value in params.items()}


def _known(config: Any) -> Any:
    return config
