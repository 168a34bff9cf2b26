"""Audit a Flower app: run it in this process, unchanged; record what travels and its truth; attack the recording."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import math
import re
import shutil
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from flwr.app import Context, Message, RecordDict
from torch import Tensor, nn

from fedaudit import api
from fedaudit.adapters.app_audit import AppAudit
from fedaudit.adapters.flower.app_file import NODES
from fedaudit.adapters.flower.in_process import Call, Enough, Mod, Run, chains_of, loaded, run_app
from fedaudit.adapters.flower.messages import MODEL, bytes_in, check_names, is_training, num_examples, state_in
from fedaudit.adapters.flower.privacy import known_of_mods, strategies
from fedaudit.adapters.flower.secure_sum import TRAINS, UNMASKS, stage_of, unmasked
from fedaudit.adapters.own_modules import sent_by_value
from fedaudit.attacks.base import Attacks
from fedaudit.capture.answers import FILE, AppModel
from fedaudit.capture.capture import Capture
from fedaudit.capture.described import watched
from fedaudit.capture.estimators import FITTED
from fedaudit.capture.evaluation import Evaluation, joined
from fedaudit.capture.recorder import Recorder
from fedaudit.models import without_opacus
from fedaudit.pipeline.ledger import server_noise
from fedaudit.simulation.protocols import PROTOCOLS, MessageRecorder, WrongApp
from fedaudit.task.training import UNMODELLED, Loss
from fedaudit.transcript.threat import ThreatModel
from fedaudit.transcript.update import ClientDefenceInfo
from fedaudit.utils.distributions import lacking
from fedaudit.utils.errors import BadInput, FedAuditError
from fedaudit.utils.machine import import_torchvision, one_thread
from fedaudit.utils.progress import Report, live_display
from fedaudit.utils.seeds import seed_all

if TYPE_CHECKING:
    from fedaudit.api import Audit, Verdict

_ALL = 200  # updates up to which all are recorded where nobody says
_LATE = 0.8  # of an app's time, after which a round that begins may be its last
_SUMS = (
    "clients mask what they send (SecAgg+): the server reads, and is asked about, the sum of a round's clients alone, "
    "of numbers that the protocol clips and rounds"
)
_TESTED, _OF_NODE = 2000, 200  # most examples that are kept of all nodes' evaluations, and of one's


def audit_flower(
    app: Path | str,
    *,
    nodes: int | None = None,
    config: Mapping[str, Any] | None = None,
    rounds: int | None = None,
    attacked: Sequence[int] | Literal["last"] | None = "last",
    records: Any | None = None,
    words: Any | None = None,
    clients: int | None = None,
    keep_rounds: Collection[int] | Literal["all"] | None = None,
    keep_clients: int | None = None,
    max_minutes: float | None = None,
    attacks: Attacks | None = None,
    threat: Mapping[str, Any] | ThreatModel | None = None,
    model: AppModel | Path | str | None = None,
    loss: str | Loss | None = None,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    seed: int = 0,
    out: Path | str = "audit",
    workers: int = 1,
    fail_above: dict[str, float] | None = None,
    fail_on: Verdict | None = None,
    fail_below: dict[str, float] | None = None,
    controls: bool = True,
    overwrite: bool = False,
    progress: bool = True,
) -> Audit:
    """Run a Flower app unchanged, record every update with its truth, replay and attack the recording.

    Args:
        app: its folder, the one with pyproject.toml.
        nodes, config, rounds: as of :func:`run_app`; where ``attacked`` names rounds, the app stops after the last.
        attacked: which rounds are attacked, from 0; default: the last, whose model has been trained, or where
            ``threat`` says which rounds the adversary sees, or which clients it is, all that it sees; None: all. Of
            boosted trees always all.
        records: examples that nobody trained on, as of :func:`fedaudit.attack`; default: what the clients' evaluation
            used, or the server's where clients have none, and no training did. Of boosted trees: other people's rows,
            with which what is found is compared, beside those of the other clients.
        words: what each token of text stands for, or "masked", as of :func:`fedaudit.attack`.
        clients: of how many clients the updates are attacked, the first ones; default: of all.
        keep_rounds: which rounds are recorded beside the ``attacked`` ones, from 0; all others cost nothing. Default:
            all of an app of up to 200 updates, else the first and the last, and those that begin when the time of an
            app that it may stop is nearly over.
        keep_clients: of how many clients updates are recorded, the first ones; default: of all.
        max_minutes: the app gets half of so long, then it is stopped; the rest is the audit's, as of
            :func:`fedaudit.audit_transcript`.
        attacks, threat, workers, fail_above, fail_on, fail_below, controls: as of
            :func:`fedaudit.audit_transcript`; without ``attacks`` those that fit.
        model: what the app's model is, where no training that fedaudit watches is seen (NumPy, JAX): a description, or
            the Python file that holds one.
        loss: that clients minimise, where it isn't recognised: a registered name, or a function of (outputs, targets).
        mean, std: of the app's preprocessing, per channel; default: estimated from the range of the inputs. Of boosted
            trees, as the adversary knows them, per column; default: those of the splits.
        seed: of the global random generators before the app begins, and of the attacks.
        out: folder for the report; the recording is in its ``recording``, for ``fedaudit attack``, and boosters as
            they travelled are in ``boosters``, for ``fedaudit convert``.
        overwrite: whether another audit's results in ``out``, and its recording, may go.
        progress: show how far it is.

    Returns:
        The finished audit, with the report in ``out``.

    Raises:
        BadInput: ``records`` can't be read (that is said before the app runs), the app can't be run, or no training
            was seen; the message says what to do.
    """
    began, own = time.time(), AppAudit.of(
        out, attacks=attacks, attacked=attacked, threat=threat, loss=loss, mean=mean, std=std, max_minutes=max_minutes,
        limits=api.limits_of(fail_above, fail_on, fail_below), controls=controls, seed=seed, records=records,
        words=words, clients=clients, workers=workers, overwrite=overwrite, progress=progress,
    )  # fmt: skip
    if own.attacked == "last" and own.threat.partial:
        own.attacked = None
    if own.attacked is not None and own.attacked != "last":
        rounds = rounds or own.attacked[-1] + 1
    if keep_rounds not in (None, "all") and (isinstance(keep_rounds, str) or not isinstance(keep_rounds, Collection)):
        raise BadInput(f"keep_rounds is {keep_rounds!r}; give a list of rounds, such as [0, 19], or 'all'")
    if keep_clients is not None and keep_clients < 1:
        raise BadInput(f"keep_clients is {keep_clients}; it must be 1 or more")
    with contextlib.suppress(Exception):
        import_torchvision()  # apps read images with it, and only here it is made to fit
    with (
        loaded(app) as found,
        contextlib.nullcontext(_described(model)) as described,
        sent_by_value(found.folder, [] if described is None else [FILE]),
    ):
        with live_display(progress) as display:
            started = time.perf_counter()
            own.make_room()
            with own.recorder(found.name) as recorder:
                planned = rounds or {**found.config, **dict(config or {})}.get("num-server-rounds")
                total = float(planned) if isinstance(planned, int) and planned > 0 else math.inf
                report = display.stage(f"the Flower app {found.name}", total)
                keeps = _Keeps.of(keep_rounds, own.attacked, total * (nodes or found.nodes or NODES), total)
                keeps.clients = keep_clients
                if keep_rounds is None and own.until is not None:
                    keeps.late = began + _LATE * (own.until - began)
                watcher = _Watcher(recorder, list(own.others.values()), report, chains_of(found), keeps, described)
                try:
                    with one_thread(), watcher.server:  # one thread as the replay, so that it can give the same bits
                        seed_all(seed)
                        run = run_app(
                            found,
                            nodes=nodes,
                            config=config,
                            rounds=rounds,
                            until=own.until,
                            watch=watcher,
                        )
                    watcher.keep_tested()
                finally:
                    if not watcher.updates:  # nothing to keep
                        shutil.rmtree(recorder.folder, ignore_errors=True)
            if watcher.refused is not None:
                raise watcher.refused
            if run.stopped:
                display.say(f"note: half of the time was spent: the app was stopped in round {run.rounds}")
            watcher.notes = _once([*watcher.notes, *run.dropped, *own.convert()])
            if watcher.sums and own.threat.group_size == 1:
                own.threat = own.threat.model_copy(update={"sees": "sum"})
            if not own.messages and keeps.rounds is not None and 0 < len(watcher.rounds) < run.rounds:
                some = f"rounds {', '.join(map(str, sorted(watcher.rounds)))} of {run.rounds}"
                watcher.notes.append(f"only {some} are recorded: keep_rounds says which, or 'all'")
            for note in watcher.notes:
                display.say(f"note: {note}")
            module = None if own.messages else recorder.without_personal(_module(watcher, run, recorder.folder))
            display.say(
                f"{own.messages or watcher.updates} updates in {run.rounds} round(s) recorded in "
                f"{recorder.folder} ({time.perf_counter() - started:.0f} s; client errors: {len(run.failures)})"
            )
        because = f" ({'; '.join(watcher.notes)})" if watcher.notes else ""
        return own.finish(module, watcher.loss, watcher.rounds, because)


@dataclasses.dataclass
class _Keeps:
    """Which updates are recorded: of these rounds (None: all), or of one that begins late; of so many clients."""

    rounds: Collection[int] | None = None
    clients: int | None = None
    late: float = math.inf  # seconds since 1970
    _rounds: dict[int, bool] = dataclasses.field(default_factory=dict)
    sent: set[int] = dataclasses.field(default_factory=set)  # nodes whose updates are recorded
    _nodes: set[int] = dataclasses.field(default_factory=set)

    @classmethod
    def of(cls, asked: Any, attacked: Sequence[int] | Literal["last"] | None, updates: float, rounds: float) -> _Keeps:
        """Return what is kept where rounds were ``asked`` for, or by default, of so many updates and rounds."""
        if asked == "all" or attacked is None or (asked is None and (updates <= _ALL or rounds == math.inf)):
            return cls()
        last = {int(rounds) - 1} if rounds < math.inf else set()
        return cls({*(attacked if attacked != "last" else {0, *last} if asked is None else ()), *(asked or ())})

    def failed(self, node: int) -> None:
        """Give the place of a node that sent nothing yet to another."""
        self._nodes -= {node} - self.sent

    def __call__(self, index: int, node: int) -> bool:
        """Whether a node's update of a round is recorded."""
        if index not in self._rounds:
            self._rounds[index] = self.rounds is None or index in self.rounds or time.time() > self.late
        if self._rounds[index] and (self.clients is None or len(self._nodes) < self.clients):
            self._nodes.add(node)
        return self._rounds[index] and node in self._nodes


class _Watcher:
    """Watches clients' training and records it."""

    def __init__(
        self,
        recorder: Recorder,
        others: Sequence[MessageRecorder],
        report: Report,
        mods: Mapping[str, Sequence[Mod]],
        keeps: _Keeps | None = None,
        described: AppModel | None = None,
    ) -> None:
        self.module: nn.Module | None = None
        self.loss: nn.Module | None = None  # of the app's own
        self.updates = 0
        self.rounds: set[int] = set()  # of which there are updates
        self.notes: list[str] = []
        self.refused: BadInput | None = None  # what was asked for, or the app, doesn't fit: it was stopped
        self._recorder, self._others, self._report, self._model = recorder, others, report, described
        self._keeps = keeps or _Keeps()
        self._mods, self._thread = mods, threading.get_ident()
        self._looked = False  # whether the server adds noise was looked at
        self._round: int | None = None
        self.sums = False  # secure aggregation: the server reads sums
        self._masked: dict[int, Callable[[], None]] = {}  # by node: record its part of a sum that isn't read yet
        self._tested: dict[int, list[tuple[Tensor, Tensor]]] = {}  # by node, what its first evaluation used
        self.server = Evaluation(None, _TESTED)  # the ServerApp's own, between the clients' answers

    def __call__(self, index: int, message: Message, context: Context, call: Call) -> Message:
        with self.server.paused():
            return self._answered(index, message, context, call)

    def _answered(self, index: int, message: Message, context: Context, call: Call) -> Message:
        if not is_training(message):
            return self._evaluated(message, context, call)
        if (stage := stage_of(message)) not in (None, TRAINS):
            if stage == UNMASKS and (record := self._masked.pop(context.node_id, None)):  # what it sent is in the sum
                self._tried(context, record)
            return call(message, context)
        self._report(index)
        if not self._keeps(index, context.node_id) and not any(other.messages for other in self._others):
            return call(message, context)
        sent = copy.deepcopy(message.content)  # the client may change what it is given
        with Capture() as seen, contextlib.ExitStack() as stack:
            others = [(other, stack.enter_context(other.watch())) for other in self._others]
            try:
                reply = call(message, context)
            except Exception:
                self._keeps.failed(context.node_id)
                raise
        if not reply.has_error():
            if self._model is not None:
                seen = self._changed(self._model, context, sent, reply.content, seen)
            chosen = f"every node's {message.metadata.message_type}"
            mods = self._mods.get(chosen) or next(iter(self._mods.values()))

            def record() -> None:
                node, model, start = str(context.node_id), bytes_in(reply.content), bytes_in(sent)
                if any(other.message(index, node, model, start, known) for other, known in others):
                    return
                content, rounded = unmasked(sent, reply.content, context) if stage else (reply.content, None)
                self._check(content, seen)
                self._look_for_noise()
                self._record(index, context.node_id, sent, seen, content, mods, rounded)

            if stage:
                self.sums = True
                self._masked[context.node_id] = record
            else:
                self._tried(context, record)
        return reply

    def _tried(self, context: Context, record: Callable[[], None]) -> None:
        try:
            record()
        except WrongApp as error:
            self.refused = error
            raise Enough from None
        except FedAuditError as error:
            self._note(f"an update of node {context.node_id} isn't recorded: {error}")

    def _changed(
        self, model: AppModel, context: Context, sent: RecordDict, content: RecordDict, by_itself: Capture
    ) -> Capture:
        """Return what is seen of a change of the weights that the app's description makes sense of.

        Enough: a training is seen without it, or the file fails; ``refused`` says so.
        """
        if by_itself.inputs:
            self.refused = BadInput("the app's training is seen as it is: leave model='FILE' out")
            raise Enough
        try:
            return self._as_described(model, context, sent, content)
        except FedAuditError as error:
            self.refused = BadInput(str(error))
        except Exception as error:
            self.refused = BadInput(f"model='FILE': {type(error).__name__}: {error}")
        raise Enough

    def _as_described(self, model: AppModel, context: Context, sent: RecordDict, content: RecordDict) -> Capture:
        before, after = (list(state_in(one, [], MODEL, _in_turn).values()) for one in (sent, content))
        partition, partitions = (int(context.node_config[name]) for name in ("partition-id", "num-partitions"))
        own, others = model.examples_of(partition, partitions)
        if others is not None:
            self._tested.setdefault(context.node_id, [model.as_seen(others)])
        return watched(model, before, after, own)

    def keep_tested(self) -> None:
        """Write what clients, or else the server, evaluated on; what training used, too, is left out by the reader."""
        parts = [part for node in self._tested.values() for part in node]
        found = joined(parts or self.server.passes)
        if found is not None:
            try:
                self._recorder.candidates(found[0][:_TESTED], found[1][:_TESTED])
            except FedAuditError as error:
                self._note(f"what was evaluated on isn't recorded: {error}")

    def _evaluated(self, message: Message, context: Context, call: Call) -> Message:
        node, most = context.node_id, _OF_NODE
        if self.module is None or node in self._tested or len(self._tested) * most >= _TESTED:
            return call(message, context)
        with Evaluation(self.module, most) as seen:
            reply = call(message, context)
        self._tested[node] = seen.passes
        return reply

    def _check(self, content: RecordDict, seen: Capture) -> None:
        """Stop an app of which no update can be recorded, whatever else it does."""
        if not content.array_records and any("secagg" in key for key in content):
            self.refused = BadInput(
                "the app's clients send masked shares of a secure aggregation that isn't Flower's SecAgg+, which no "
                "audit reads: audit it without that, and let the server see sums alone: threat={'sees': 'sum'}"
            )
        nameless = [[*record] == [str(i) for i in range(len(record))] for record in content.array_records.values()]
        if self.module is seen.module is None and nameless and all(nameless):
            self.refused = BadInput(
                "the app trains nothing that fedaudit can watch (but NumPy, JAX or TensorFlow, or in another process): "
                "say in a Python file what its model answers (model='FILE'), and who was in can be asked; apps of "
                "torch, Lightning, transformers, scikit-learn and xgboost need none"
            )
        if bytes_in(content) is not None:
            self.refused = BadInput(
                "the app's clients send a model as bytes, as those of boosted trees do; what reads these "
                f"{lacking(PROTOCOLS.group, 'trees')}"
            )
        if self.refused is not None:
            raise Enough

    def _look_for_noise(self) -> None:
        """Record which noise the server adds to what it averages, once."""
        if not self._looked and (found := server_noise(strategies(self._thread))) is not None:
            self._note(self._recorder.noise_at_server(found[0], mean=found[1]))
        self._looked = True

    def _record(
        self,
        index: int,
        node: int,
        sent: RecordDict,
        seen: Capture,
        content: RecordDict,
        mods: Sequence[Mod],
        rounded: ClientDefenceInfo | None,
    ) -> None:
        module = self.module or seen.module
        names = None if module is None else list(module.state_dict())
        arranged: Callable[[list[Tensor]], dict[str, Tensor]] | None = None
        if self._model is not None and module is not None:
            arranged = self._model.arranged(module)
        elif isinstance(module, FITTED):
            arranged = module.state
        weights, state = (state_in(part, names, MODEL, arranged) for part in (sent, content))
        seen.choose(state)
        if self.module is None and seen.module is not None:
            self.module = self.server.module = without_opacus(copy.deepcopy(seen.module)).cpu()
            for name, parameter in self.module.named_parameters():  # some freeze the head, and then the body
                parameter.requires_grad_(parameter.requires_grad or name in seen.trained)
            self.loss = copy.deepcopy(seen.criterion)
        if index != self._round:
            self._recorder.begin_round(weights, index)
            self._round = index
        if len(content.array_records) > 1:
            self._note(f"clients send {len(content.array_records)} ArrayRecords; only '{MODEL}' is recorded")
        check_names(state, weights)
        done = None if seen.private else known_of_mods(mods, sent, weights, state, self.module)
        if rounded is not None:
            seen.notes.append(_SUMS)
            clip = done.clip if done else None
            done = dataclasses.replace(rounded, clip=clip, unclipped=clip is None)
        examples = num_examples(content)
        self._recorder.update(node, state, seen, num_examples=examples, sent=weights, sanitised=done)
        self.updates += 1
        self.rounds.add(index)
        self._keeps.sent.add(node)
        for note in seen.notes if seen.inputs or seen.private else [UNMODELLED["nothing-seen"]]:
            self._note(note)

    def _note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)


def _described(model: AppModel | Path | str | None) -> AppModel | None:
    return AppModel.read(model) if isinstance(model, Path | str) else model


def _in_turn(arrays: list[Tensor]) -> dict[str, Tensor]:
    return {str(i): array for i, array in enumerate(arrays)}


def _once(notes: Sequence[str]) -> list[str]:
    """Return the notes, those that differ by the number of a node or a round alone once, with how many there are."""
    alike: dict[str, list[str]] = {}
    for note in notes:
        alike.setdefault(re.sub(r"\b(node|client|round) \d+", r"\1", note), []).append(note)
    return [of[0] + f" ({len(of)} such notes)" * (len(of) > 1) for of in alike.values()]


def _module(watcher: _Watcher, run: Run, recording: Path) -> nn.Module:
    """Return the module that the clients trained; BadInput where none was seen."""
    if watcher.module is not None and watcher.updates:
        return watcher.module
    if not run.rounds:
        over = " before the time was over (max_minutes=…): what does its ServerApp wait for?" if run.stopped else ""
        few = f": nothing to audit (does it want more than {run.nodes} nodes?)"
        raise BadInput(f"the app asked no client to train{over or few}")
    if not run.replies:
        why = f": {run.failures[0]}" if run.failures else ""
        over = " before the time was over: give more (max_minutes=…), or fewer examples" if run.stopped else ""
        raise BadInput(f"no client sent an update{over}{why}")
    if not watcher.updates and not watcher.notes:
        raise BadInput(f"none of the {run.rounds} rounds that were run is to be kept: keep_rounds=…, from 0")
    if not watcher.updates:
        halted = (
            "the app's secure aggregation (SecAgg+) ended before the server could read a sum: too few clients or shares"
        )
        first, *more = watcher.notes or [halted]
        raise BadInput(f"no update could be recorded: {first}" + f" (and {len(more)} notes more)" * bool(more))
    raise BadInput(
        "no client's training was seen: it runs in a thread or process of its own, or without torch; what travelled "
        f"is in {recording}, for fedaudit attack --model"
    )
