"""What the filters of one site share: the task that came in, and the training that was watched."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from nvflare.apis.dxo import DXO, DataKind, from_shareable
from nvflare.apis.filter import FilterChainType, FilterContextKey
from nvflare.apis.fl_constant import FLContextKey
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import ReservedHeaderKey, Shareable
from nvflare.app_common.app_constant import AppConstants
from torch import Tensor, nn

from fedaudit.adapters.nvflare.job import Filter, is_job, read_job
from fedaudit.capture.capture import Capture, current_mode
from fedaudit.capture.evaluation import Evaluation, joined
from fedaudit.pipeline.ledger import of_whole_weights
from fedaudit.transcript.files import Form
from fedaudit.utils.errors import BadInput

log = logging.getLogger("fedaudit.nvflare")

FORMS: dict[str, Form] = {DataKind.WEIGHTS: "weights", DataKind.WEIGHT_DIFF: "difference"}

_MOST_VALIDATED = 2000  # examples of what a site validates on that are kept

_Site = tuple[str, str]  # job and site: several may train in one process, one after the other or in threads
_turns: dict[int, _Site] = {}  # by thread: whose task came in there last
_watched: dict[_Site | None, Capture] = {}  # the latest training of each; None: no task came in by a filter of ours
_taken: dict[tuple[str, _Site | None], Capture] = {}  # by who has had it
_wanted: dict[_Site, dict[str, bool]] = {}  # who waits for what it validates on; False: it has had it
_validated: dict[_Site, list[tuple[Tensor, Tensor]]] = {}  # in its turns, until all who wait have it
_evaluations: dict[int, Evaluation] = {}  # by thread: what is done there between trainings
_looked: set[str] = set()  # jobs whose filters were looked at, for what they leave of whole weights


@contextmanager
def watch(module: nn.Module | None = None) -> Iterator[Capture]:
    """Watch a local training, for the filters that see its update: around it, in the training script.

    >>> with watch():  # doctest: +SKIP
    ...     train(model, batches)

    The filters must run in the same process: an Executor of your own, or the Client API in process. From the first
    training to the next update that is recorded, what the same thread validates the model on is noticed, too. Where
    several sites train at once in one process, each must do so in the thread of its Executor: of other threads nobody
    knows whose training they do.

    Args:
        module: whose training to watch; None: the one that trains.
    """
    site = _site_in(threading.get_ident())
    with no_validation(), Capture(module) as seen:
        yield seen
    if site is not None or not _turns:
        _watched[site] = seen
    _validate(seen.module)


def taken(context: FLContext, by: str) -> Capture | None:
    """Return the site's training that was watched since the last call of this caller, or None."""
    site = site_key(context)
    place = site if site in _watched else None
    seen = _watched.get(place)
    if seen is None or _taken.get((by, place)) is seen:
        return None
    _taken[by, place] = seen
    return seen


def _site_in(thread: int) -> _Site | None:
    """Return whose work a thread does: the site's whose task came in by it, else the only one's that has any."""
    return _turns.get(thread) or (next(iter(_turns.values())) if len(_turns) == 1 else None)


def want_validation(context: FLContext, by: str) -> None:
    """Have what a site validates on kept, from the end of its next training on; from now on it is this one's turn."""
    site = site_key(context)
    _wanted.setdefault(site, {}).setdefault(by, True)
    _turn_to(site)


def _waits(site: _Site) -> bool:
    return any(_wanted.get(site, {}).values())


def no_validation() -> AbstractContextManager[None]:
    """Return a block in which nothing passes for the site's validation."""
    evaluation = _evaluations.get(threading.get_ident())
    return nullcontext() if evaluation is None else evaluation.paused()


def validated(context: FLContext, by: str) -> tuple[Tensor, Tensor] | None:
    """Return what a site has validated on since its first training, to each who waits once; None: there is nothing."""
    site = site_key(context)
    _turn_to(site)
    found = joined(_validated.get(site, [])) if _wanted.get(site, {}).get(by) else None
    if found is None:
        return None
    _wanted[site][by] = False
    if not _waits(site):
        del _validated[site]
        _turn_to(site)  # nothing more of it is kept
    return found[0][:_MOST_VALIDATED], found[1][:_MOST_VALIDATED]


def _turn_to(site: _Site) -> None:
    """Give what was validated on to the site whose turn it was in this thread, and have kept what this one wants."""
    here, alive = threading.get_ident(), {thread.ident for thread in threading.enumerate()}
    for thread, evaluation in list(_evaluations.items()):
        if thread != here and thread in _turns:
            continue  # another site's own
        passes, turn = evaluation.take(_MOST_VALIDATED if _waits(site) else 0), _site_in(thread)
        if turn is not None and _waits(turn):
            own = _validated.setdefault(turn, [])
            own += passes if sum(len(x) for x, _ in own) < _MOST_VALIDATED else []
    for thread, other in list(_turns.items()):
        if other == site or thread not in alive:
            del _turns[thread]
    _turns[here] = site


def _validate(module: nn.Module | None) -> None:
    """Begin to watch what this thread validates on after a training; end it where nobody wants it any more."""
    here, alive = threading.get_ident(), {thread.ident for thread in threading.enumerate()}
    for thread, evaluation in list(_evaluations.items()):
        if thread not in alive or (thread == here and not (any(map(_waits, _wanted)) and current_mode() is evaluation)):
            _evaluations.pop(thread).stop()
    # A mode that somebody entered before would be left in place of ours.
    turn = _site_in(here)
    if turn is not None and _waits(turn) and here not in _evaluations and module is not None and current_mode() is None:
        _evaluations[here] = Evaluation(module, _MOST_VALIDATED)
        _evaluations[here].__enter__()


@dataclass
class Received:
    """A model that a site was sent; ``index``: the round, from 0; None: the server doesn't say."""

    index: int | None
    state: dict[str, Tensor]


class Memory:
    """What a site was sent last, by job and site: the filters of the two chains are objects of their own."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._received: dict[_Site, Received] = {}

    def keep(self, shareable: Shareable, context: FLContext) -> None:
        """Keep the model that comes in, if it is one; it replaces the one before."""
        _turn_to(site_key(context))
        dxo = model_in(shareable)
        if dxo is None:
            return
        state = {name: tensor.clone() for name, tensor in state_of(dxo).items()}  # whoever trains changes theirs
        with self._lock:
            self._received[site_key(context)] = Received(round_of(shareable, context), state)

    def take(self, context: FLContext) -> Received | None:
        """Return what came in, and forget it."""
        with self._lock:
            return self._received.pop(site_key(context), None)


def is_data(component: Any) -> bool:
    """Whether the filter is in the chain of what comes in, rather than of what leaves."""
    return bool(component.get_prop(FilterContextKey.CHAIN_TYPE) == FilterChainType.TASK_DATA_CHAIN)


def job_of(context: FLContext) -> str:
    """Return the job's id."""
    return str(context.get_job_id() or "job")


def site_of(context: FLContext) -> str:
    """Return the site's name."""
    return str(context.get_identity_name() or "site")


def site_key(context: FLContext) -> tuple[str, str]:
    """Return job and site."""
    return job_of(context), site_of(context)


def filters_around(context: FLContext, own: str) -> tuple[list[Filter], list[Filter]]:
    """Return the known filters that a site's results go through before and after the one whose class is called ``own``.

    They are those of the site's ``privacy.json``, which come first, and of the job.
    """
    try:
        workspace = context.get_workspace()
        scope = context.get_prop(FLContextKey.SCOPE_OBJECT)
        policy = Path(workspace.get_site_config_dir()) / "privacy.json"
        app = Path(workspace.get_app_dir(job_of(context)))
        name = getattr(scope, "name", None)
        found = read_job(policy).sites if name and policy.is_file() else {}
        chain = [f for label, filters in found.items() if label.split(",")[0] == f"scope {name}" for f in filters]
        chain += [f for filters in read_job(app).sites.values() for f in filters] if is_job(app) else []
    except Exception:
        return [], []
    place = next((place for place, (kind, _) in enumerate(chain) if kind.rpartition(".")[2] == own), 0)
    return chain[:place], [one for one in chain[place:] if one[0].rpartition(".")[2] != own]


def warn_of_whole_weights(kind: str, context: FLContext, own: str) -> None:
    """Warn once a job where a result holds whole weights, and filters around ``own`` leave no model of these."""
    if kind != DataKind.WEIGHTS or (job := job_of(context)) in _looked:
        return
    _looked.add(job)
    before, after = filters_around(context, own)
    try:
        line = of_whole_weights([*before, *after])
    except BadInput:
        return
    if line:
        log.warning("fedaudit: %s: %s", job, line)


def round_of(shareable: Shareable, context: FLContext) -> int | None:
    """Return the round, from 0, that the header, a cookie or the context tells."""
    for value in (
        shareable.get_header(AppConstants.CURRENT_ROUND),
        shareable.get_cookie(AppConstants.CONTRIBUTION_ROUND),
        context.get_prop(AppConstants.CURRENT_ROUND),
    ):
        if isinstance(value, int) and value >= 0:
            return value
    return None


def model_in(shareable: Shareable) -> DXO | None:
    """Return the weights, or their difference, in a shareable, whatever its return code; None: it has none.

    BadInput: it is a collection of models, which can't be recorded as one.
    """
    if shareable.get_header(ReservedHeaderKey.CONTENT_TYPE) != "DXO":
        return None
    dxo = from_shareable(shareable)
    if dxo.data_kind == DataKind.COLLECTION:
        raise BadInput("a collection of several models isn't recorded")
    return dxo if dxo.data_kind in FORMS and dxo.data else None


def state_of(dxo: DXO) -> dict[str, Tensor]:
    """Return the tensors by name, on the memory that they have; BadInput where one is encrypted, or sent apart."""
    return {str(name): _tensor(str(name), value) for name, value in dxo.data.items()}


def _tensor(name: str, value: Any) -> Tensor:
    try:
        return torch.as_tensor(value).detach().cpu()
    except (TypeError, ValueError, RuntimeError) as error:
        raise BadInput(f"'{name}' is {type(value).__name__}, no array (encrypted, or sent apart?)") from error


def counted(dxo: DXO) -> int | None:
    """Return how many examples the update was made from, where a client says so in its meta data."""
    for name in ("num_examples", "num-examples", "NUM_EXAMPLES"):
        value = dxo.get_meta_prop(name)
        if isinstance(value, int) and value > 0:
            return value
    return None
