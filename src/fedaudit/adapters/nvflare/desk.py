"""In the processes of a job that is audited on one's desk: keeps each training as it came in, was watched and left."""

from __future__ import annotations

import functools
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import nvflare.client
import torch
from nvflare.apis.filter import Filter
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable
from nvflare.app_common.abstract.fl_model import ParamsType
from nvflare.client import api
from torch import Tensor

from fedaudit.adapters.nvflare.site import FORMS, counted, is_data, log, model_in, round_of, site_of
from fedaudit.capture.capture import Capture
from fedaudit.capture.estimators import FITTED
from fedaudit.capture.evaluation import Evaluation
from fedaudit.simulation.protocols import PROTOCOLS
from fedaudit.transcript.files import Form
from fedaudit.utils.errors import in_words
from fedaudit.utils.integrity import write_whole
from fedaudit.utils.seeds import derive_seed, seed_all

_MOST = 2000  # examples of what a site validates on that are kept


@dataclass(frozen=True)
class Left:
    """One training of a site; ``seen`` is without its module's hooks, and knows its facts.

    Attributes:
        site, index: whose, and its round from 0.
        sent, state, form: the model that came in, and what left in which form.
        examples: over how many it says that it was.
        model, start: the bytes that left and came in in place of arrays, as those of boosted trees do.
        others: what was seen of the training, by what sends such bytes.
        at: when it left, in seconds since 1970.
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
    model: bytes | None
    start: bytes | None
    others: Mapping[str, Any]
    at: float = 0.0


class DeskFilter(Filter):  # type: ignore[misc]
    """Keeps what a site trains: in both chains of filters, the last in each.

    Args:
        folder: for what is kept, a file a training.
        script: the Client API trains, in a thread of its own: watched is from its ``receive`` to its ``send``.
        seed: of the process, until its site is known, and of the site's training then.
    """

    def __init__(self, folder: str, script: bool, seed: int = 0) -> None:
        super().__init__()
        self.script = script
        _desk.folder, _desk.seed = Path(folder), seed
        seed_all(seed)
        if script:
            _desk.watch_script()

    def process(self, shareable: Shareable, fl_ctx: FLContext) -> Shareable:
        """Keep, and return ``shareable`` as it is."""
        try:
            dxo = model_in(shareable)
            _desk.site = site_of(fl_ctx)
            if is_data(self):
                if not self.script:
                    _desk.begin({} if dxo is None else dxo.data, round_of(shareable, fl_ctx))
            elif dxo is not None:
                if not self.script:
                    _desk.end(dxo.data, FORMS[dxo.data_kind], counted(dxo))
                else:  # other filters may have changed it
                    _desk.leaves(dxo.data, FORMS[dxo.data_kind])
        except Exception as error:
            log.warning("fedaudit: not recorded: %s", in_words(error))
        return shareable


class _Desk:
    """What this process's site does: one training after the other."""

    def __init__(self) -> None:
        self.folder, self.site = Path(), "site"
        self._count = 0
        self.seed: int | None = None
        self._open: tuple[Left, ExitStack] | None = None
        self._last: Left | None = None
        self._watches = False

    def watch_script(self) -> None:
        """Have the Client API tell when a script receives a model and when it sends one."""
        if self._watches:
            return
        self._watches, receive, send = True, api.receive, api.send

        def received(*arguments: Any, **options: Any) -> Any:
            model = receive(*arguments, **options)
            if model is not None and nvflare.client.is_train():
                self.site = nvflare.client.get_site_name()
                self._quietly(lambda: self.begin(model.params or {}, model.current_round))
            return model

        def sends(model: Any, *arguments: Any, **options: Any) -> Any:
            form: Form = "difference" if model.params_type == ParamsType.DIFF else "weights"
            if model.params:
                self._quietly(lambda: self.end(model.params, form, None))
            return send(model, *arguments, **options)

        for place in (api, nvflare.client):
            place.receive, place.send = received, sends

    def begin(self, sent: Mapping[str, Any], index: int | None) -> None:
        """Watch a training that begins with this model."""
        if self._open is not None:
            self._open[1].close()
        if self.seed is not None:  # no two sites draw the same noise
            seed_all(derive_seed(self.seed, self.site))
            self.seed = None
        stack, kept = ExitStack(), _arrays(sent)
        own = None if self._last is None else self._last.seen.module
        shapes = [tuple(value.shape) for value in kept.values()]
        tested = stack.enter_context(Evaluation(own if isinstance(own, FITTED) else shapes, _MOST))
        recorders = {one.name: other for one in PROTOCOLS if (other := one.value.recorder(self.folder, "")) is not None}
        others = {name: stack.enter_context(other.watch()) for name, other in recorders.items()}
        index = self._count if index is None else index
        left = Left(self.site, index, kept, {}, "weights", None, Capture(), tested.passes, None, _bytes(sent), others)
        stack.enter_context(left.seen)
        self._open = left, stack

    def end(self, params: Mapping[str, Any], form: Form, examples: int | None) -> None:
        """Keep the training that ends with this model."""
        if self._open is None:
            return
        (left, stack), self._open = self._open, None
        stack.close()
        config = left.seen.training() if left.seen.inputs else None
        vars(left.seen)["training"] = functools.partial(_known, config)
        self._last = replace(
            left, state=_arrays(params), model=_bytes(params), form=form, examples=examples, at=time.time()
        )
        self._count += 1
        self._write()

    def leaves(self, params: Mapping[str, Any], form: Form) -> None:
        """Keep of the last training what really leaves."""
        if self._last is not None:
            self._last = replace(self._last, state=_arrays(params), model=_bytes(params), form=form)
            self._write()

    def _write(self) -> None:
        write_whole(self.folder / f"{self.site}-{self._count:05d}.pickle", cloudpickle.dumps(self._last))

    def _quietly(self, work: Any) -> None:
        try:
            work()
        except Exception as error:
            log.warning("fedaudit: not recorded: %s", in_words(error))


_desk = _Desk()


def _arrays(params: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return copies of the arrays, for whoever trains changes theirs; scikit-learn's settings travel beside them."""
    kept = {str(name): value for name, value in params.items() if isinstance(value, Tensor | np.ndarray | np.generic)}
    return {name: torch.as_tensor(value).detach().cpu().clone() for name, value in kept.items()}


def _bytes(params: Mapping[str, Any]) -> bytes | None:
    """Return a model that travels as bytes, the first one of several; None: there is none."""
    values = [value[0] if isinstance(value, list) and value else value for value in params.values()]
    return next((bytes(value) for value in values if isinstance(value, bytes | bytearray)), None)


def _known(config: Any) -> Any:
    return config
