"""Flower's SecAgg+: what a client's masked vector is below its masks, for the truth of the server's sum."""

from __future__ import annotations

import importlib
from io import BytesIO
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, Context, Message, RecordDict
from numpy.typing import NDArray

from fedaudit.adapters.flower.messages import MODEL
from fedaudit.transcript.update import ClientDefenceInfo
from fedaudit.utils.errors import BadInput, in_words

_ROUNDED = 6**-0.5  # standard deviation, in steps, of rounding up or down at random; places between steps are all alike
TRAINS, UNMASKS = "collect_masked_vectors", "unmask"  # the stages in which clients train, and the sum is read
_CONFIGS, _STATE = "secaggplus_configs", "secaggplus_state"
_MOD = "flwr.client.mod.secure_aggregation.secaggplus_mod"


def stage_of(message: Message) -> str | None:
    """Return the stage of SecAgg+ that a message asks for; None: it is of no such protocol."""
    stage = message.content.config_records.get(_CONFIGS, {}).get("stage")
    return stage if isinstance(stage, str) else None


def unmasked(asked: RecordDict, reply: RecordDict, context: Context) -> tuple[RecordDict, ClientDefenceInfo]:
    """Return a client's reply with its part of the sum, its model as it was rounded for that; and what that means.

    Only the client knows its masks, whose seeds are in its context's state.

    Raises:
        BadInput: the reply isn't as Flower's mod makes it.
    """
    try:
        (sent,) = asked.array_records.values()
        mod: Any = importlib.import_module(_MOD)
        state = mod.SecAggPlusState(**context.state.config_records[_STATE])
        numbers = [np.load(BytesIO(one)) for one in reply.config_records[_CONFIGS]["masked_params"]]
        shapes, own = [one.shape for one in numbers], mod.bytes_to_private_key(state.sk1)
        masks = [(1, state.rd_seed)]
        for node in asked.config_records[_CONFIGS]["srcs"]:
            shared = mod.generate_shared_key(own, mod.bytes_to_public_key(state.public_keys_dict[node][0]))
            masks.append((1 if state.nid > node else -1, shared))
        for sign, seed in masks:
            mask = mod.pseudo_rand_gen(seed, state.mod_range, shapes)
            numbers = [one - sign * of_it for one, of_it in zip(numbers, mask, strict=True)]
        ratio, *rest = mod.parameters_mod(numbers, state.mod_range)
        share = float(ratio[0]) / state.target_range  # by which the client multiplied its weights
        step = 2 * state.clipping_range / state.target_range
        arrays = {
            name: Array(_like((one * step - state.clipping_range) / share, array.numpy()))
            for (name, array), one in zip(sent.items(), rest, strict=True)
        }
    except Exception as error:
        raise BadInput(f"a client's part of the secure sum can't be read: {in_words(error)}") from error
    rounding = ClientDefenceInfo("secagg-rounding", noise=_ROUNDED * step / share, unclipped=True)
    return RecordDict({MODEL: ArrayRecord(arrays), **reply.metric_records}), rounding


def _like(value: NDArray[Any], array: NDArray[Any]) -> NDArray[Any]:
    return (value.round() if array.dtype.kind in "iu" else value).astype(array.dtype)
