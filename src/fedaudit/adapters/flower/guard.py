"""A guard in front of a site: audits the update that is about to leave, with the client's own data in hand."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from math import prod
from typing import Any, ClassVar

from flwr.app import ArrayRecord, Context, Error, Message, RecordDict
from torch import Tensor

from fedaudit.adapters.flower.in_process import mods_behind
from fedaudit.adapters.flower.messages import (
    check_names,
    is_training,
    log,
    only_record,
    refusal,
    server_round,
    state_in,
)
from fedaudit.adapters.flower.tensors import load_state, save_state
from fedaudit.capture.capture import Capture
from fedaudit.capture.evaluation import Evaluation, joined
from fedaudit.guard.checks import SiteState
from fedaudit.guard.outgoing import FEW, OutgoingUpdate, few_numbers
from fedaudit.guard.plan import Plan
from fedaudit.guard.policy import NOT_LET_IN, SPENT, Decision
from fedaudit.guard.site_guard import Key, SiteGuard
from fedaudit.utils.errors import BadInput, in_words

STATE = "fedaudit-guard"  # what the guard keeps in the context's state: what its checks cost
MEMBERS = "fedaudit-guard.members"  # the same, of what is kept of the site's own examples
RECEIVED = "fedaudit-guard.received"  # the same, of the models that came in
HELD_OUT = "fedaudit-guard.held-out"  # the same, of examples that the client's app evaluated on

_MOST, _MOST_BYTES = 500, 32 * 2**20  # of these


class Guard(SiteGuard):
    """A mod that attacks each update before it leaves: ``ClientApp(mods=[Guard(...)])``, the first of the mods.

    Its settings are those of :class:`~fedaudit.guard.SiteGuard`. Attacks and limits are checked with the first training
    message. It watches the local training, which stays as it is. What is refused, or isn't let in, becomes an error in
    place of the reply, and the round goes on without this client. A reply of several models can't be audited.

    Whether the site's own training examples can be told is watched with ``held_out``, or with what the app's evaluation
    has used: up to 500 examples, or 32 MiB of them, which stay in ``context.state``.

    With ``target_epsilon`` the mods after this one tell what noise there is, unless ``sanitised`` does. A node's number
    doesn't outlast its SuperNode, so all updates of a run that stand in ``out`` count.
    """

    _log = log
    _early = False
    _lasting: ClassVar[bool] = False

    def __call__(self, msg: Message, context: Context, call_next: Callable[[Message, Context], Message]) -> Message:
        """Have the client train, and audit what it is about to send."""
        if not is_training(msg):
            return self._other(msg, self._evaluated(msg, context, call_next), context)
        key, told = _key(context), server_round(msg)
        site = self._restored(key, context)
        index = (told or site.plan.rounds + 1) - 1
        who = f"node {context.node_id}, round {index + 1}"
        came = self.receives(key, who, None if told is None else told - 1, lambda: (self._model_in(msg), False))
        if not came.let_in:
            return refusal(NOT_LET_IN, msg)
        self._check()  # before training, and not quietly
        mods = mods_behind(call_next)
        if self.stops(key, who, mods, _elements(msg.content)):
            return refusal(SPENT, msg)
        sent = copy.deepcopy(msg.content)  # the client may change what it is given
        with Capture() as seen:
            reply = call_next(msg, context)
        if reply.has_error():
            return self._failed(msg, reply)

        def leaving() -> OutgoingUpdate:
            weights, state = _models(sent, seen, reply)
            name, folder = f"node-{context.node_id}", f"round-{index + 1}-node-{context.node_id}"
            return OutgoingUpdate(weights, state, seen, "weights", name, folder, follows=False, went_through=mods)

        decision = self.decide(key, who, index, leaving, came, mods, _elements(reply.content))
        self._save(site, context)
        if decision.reason:
            return refusal(decision.reason, msg)
        return _scaled(reply, leaving(), decision) if decision.done == "clipped" else reply

    def _model_in(self, msg: Message) -> dict[str, Tensor]:
        records = msg.content.array_records
        count = len(next(iter(records.values()))) if len(records) == 1 else 0
        unnamed = [str(place) for place in range(count)]  # names tell these checks nothing but the architecture
        agreed, _ = self._own
        return state_in(msg.content, list(agreed.state_dict()) if agreed is not None else unnamed)

    def _failed(self, msg: Message, reply: Message) -> Message:
        """Return a failure with the beginning of its text, which is no place for an update."""
        reason = reply.error.reason or ""
        if few_numbers(reason):
            return reply
        self._log.warning("fedaudit guard: a failure's text of %d characters leaves cut to %d", len(reason), 8 * FEW)
        return Message(Error(reply.error.code, reason[: 8 * FEW]), reply_to=msg)

    def _other(self, msg: Message, reply: Message, context: Context) -> Message:
        """Return an answer to what asks for no training, if the policy lets it leave."""
        if reply.has_error():
            return self._failed(msg, reply)
        if few_numbers(reply.content):
            return reply
        key, told, kind = _key(context), server_round(msg), msg.metadata.message_type
        site = self._restored(key, context)

        def unread() -> OutgoingUpdate:
            raise BadInput(f"an answer to '{kind}' with more than {FEW} numbers")

        index = None if told is None else told - 1
        decision = self.decide(key, f"{key[1]}, {kind}", index, unread, through=None)
        self._save(site, context)
        return refusal(decision.reason, msg) if decision.reason else reply

    def _evaluated(self, msg: Message, context: Context, call_next: Callable[[Message, Context], Message]) -> Message:
        """Have the client answer; keep what it evaluates a model on, once, to tell its training examples from."""
        records = msg.content.array_records if msg.has_content() else {}
        if self._others is not None or HELD_OUT in context.state or len(records) != 1:
            return call_next(msg, context)
        shapes = [tuple(array.shape) for array in next(iter(records.values())).values()]
        with Evaluation(shapes, _MOST) as seen:
            reply = call_next(msg, context)
        found = joined(seen.passes)
        if found is not None:
            most = max(1, _MOST_BYTES // max(1, found[0][0].numel() * found[0].element_size()))
            kept = {"inputs": found[0][:most], "labels": found[1][:most]}
            _quietly(save_state, context.state, HELD_OUT, kept)
        return reply

    def _restored(self, key: Key, context: Context) -> SiteState:
        """Return what is kept of this node, which lies in its context: in deployment every message is a process."""
        if STATE not in context.state:
            site = self.state(key)
        else:
            values = _quietly(load_state, context.state, STATE) or {}
            site = self._sites[key] = SiteState(Plan(self.share, **values), self._others)
        if (came := _quietly(load_state, context.state, RECEIVED)) is not None:
            site.received.load_state_dict(came)
        if site.held_out is None and (held := _quietly(load_state, context.state, HELD_OUT)):
            site.held_out = held["inputs"], held["labels"]
        if site.held_out is not None and (watched := _quietly(load_state, context.state, MEMBERS)):
            site.watch = self._checks.watch(site.held_out)
            site.watch.load_state_dict(watched)
        return site

    def _save(self, site: SiteState, context: Context) -> None:
        values = dataclasses.asdict(site.plan)
        del values["share"]
        _quietly(save_state, context.state, STATE, values)
        _quietly(save_state, context.state, RECEIVED, site.received.state_dict())
        if site.watch is not None:
            _quietly(save_state, context.state, MEMBERS, site.watch.state_dict())


def _key(context: Context) -> Key:
    return str(context.run_id), f"node {context.node_id}"


def _elements(content: RecordDict) -> int:
    return sum(prod(array.shape) for record in content.array_records.values() for array in record.values())


def _models(sent: RecordDict, seen: Capture, reply: Message) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the model that came in and the one that is about to leave; BadInput where no training was seen."""
    if seen.module is None or not seen.inputs:
        raise BadInput("no training was seen (another thread or process?)")
    weights = state_in(sent, list(seen.module.state_dict()))
    state = state_in(reply.content, list(weights))
    check_names(state, weights)
    return weights, state


def _scaled(reply: Message, update: OutgoingUpdate, decision: Decision) -> Message:
    """Return the reply with less of the change in it, under the names that it has."""
    key, record = only_record(reply, "reply")
    states = update.clipped(decision.scale).values()
    reply.content[key] = ArrayRecord(dict(zip(record, states, strict=True)))
    return reply


def _quietly(work: Callable[..., Any], *arguments: Any) -> Any:
    """Do the guard's own work; an error in it is logged and stops nothing."""
    try:
        return work(*arguments)
    except Exception as error:
        log.warning("fedaudit guard: what it keeps from round to round isn't kept: %s", in_words(error))
        return None
