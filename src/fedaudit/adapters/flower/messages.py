"""What Flower's messages say: the model in them, the round, how many examples."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from flwr.app import ArrayRecord, Error, Message, RecordDict
from torch import Tensor

from fedaudit.utils.errors import BadInput

log = logging.getLogger("flwr.fedaudit")  # its lines appear where Flower's own do
log.setLevel(logging.INFO)

MODEL = "arrays"  # Flower's usual name of the model's ArrayRecord
_WRAPPED = "_module."  # before the names in the state of a module that Opacus has wrapped
_MOD_FAILED = 6  # Flower's code of an error for a mod's refusal
EXAMPLES = ("num-examples", "num_examples")  # of the message API, and of clients written for the older one


def is_training(message: Message) -> bool:
    """Whether the message asks for training, or answers such a one."""
    return str(message.metadata.message_type).split(".")[0] == "train"


def refusal(reason: str, message: Message) -> Message:
    """Return a mod's error in place of an answer."""
    return Message(Error(_MOD_FAILED, reason), reply_to=message)


def only_record(message: Message, what: str) -> tuple[str, ArrayRecord]:
    """Return the key of a message's one ArrayRecord, and the record; ``what`` says in errors whose message it is."""
    records: list[tuple[str, ArrayRecord]] = list(message.content.array_records.items())
    if len(records) != 1:
        raise BadInput(f"the {what} has {len(records)} ArrayRecords; it needs one, the model's state")
    return records[0]


def has_model(content: RecordDict, key: str | None = None) -> bool:
    """Whether one of the message's ArrayRecords is the model: the only one, or the one under ``key``."""
    return len(content.array_records) == 1 or key in content.array_records


def state_in(
    content: RecordDict,
    names: Sequence[str] | None = None,
    key: str | None = None,
    arranged: Callable[[list[Tensor]], dict[str, Tensor]] | None = None,
) -> dict[str, Tensor]:
    """Return the model that travels in a message.

    Args:
        names: of the module's ``state_dict()``, for arrays that travel without names, in its order.
        key: of the model's ArrayRecord, where others travel beside it (control variates, say).
        arranged: makes a state of arrays that follow another order than a module's; None: they are a module's.
    """
    records = content.array_records
    if not has_model(content, key):
        raise BadInput(f"a message with {len(records)} ArrayRecords isn't one model (secure aggregation?)")
    try:
        state = dict((records[key] if key in records else next(iter(records.values()))).to_torch_state_dict())
    except Exception as error:
        raise BadInput(f"a message's ArrayRecord doesn't hold a model's arrays: {error}") from None
    if not state:
        raise BadInput("a message's ArrayRecord is empty")
    if arranged is not None:
        return arranged([*state.values()])
    if names is not None and all(name.removeprefix(_WRAPPED) in names for name in state):
        state = {name.removeprefix(_WRAPPED): value for name, value in state.items()}
    if list(state) != [str(i) for i in range(len(state))] or (names is not None and set(state) <= set(names)):
        return state
    if names is None:
        raise BadInput("the model's arrays travel without names: give the Recorder the module")
    if len(names) != len(state):
        raise BadInput(f"{len(state)} arrays without names travel, but the module's state_dict() has {len(names)}")
    return dict(zip(names, state.values(), strict=True))


def bytes_in(content: RecordDict) -> bytes | None:
    """Return the JSON or UBJSON that travels in a message as the bytes of one array, or None: something else does."""
    arrays = [array for record in content.array_records.values() for array in record.values()]
    if len(arrays) != 1 or arrays[0].dtype not in ("uint8", ""):  # the older API gives bytes no type
        return None
    data = bytes(arrays[0].numpy().tobytes() if arrays[0].dtype else arrays[0].data)
    return data if data.startswith(b"{") else None


def check_names(state: Mapping[str, Tensor], sent: Mapping[str, Tensor]) -> None:
    """Check that a reply's model is one of those that were sent, or a part of it."""
    if other := [name for name in state if name not in sent]:
        raise BadInput(f"a reply holds '{other[0]}', which the model that was sent doesn't have")
    for name, value in state.items():
        if value.shape != sent[name].shape:
            raise BadInput(
                f"a reply's '{name}' has shape {tuple(value.shape)}, what was sent {tuple(sent[name].shape)}"
            )


def server_round(message: Message) -> int | None:
    """Return the round that the server wrote into the message, from 1; None if it wrote none."""
    if message.has_content():
        for record in message.content.config_records.values():
            value = record.get("server-round")
            if isinstance(value, int) and value > 0:
                return value
    group = str(message.metadata.group_id or "")  # where the older API has it
    return int(group) if group.isdecimal() and int(group) > 0 else None


def num_examples(content: RecordDict, key: str | None = None) -> int | None:
    """Return how many examples a reply says that the client trained on, under ``key`` or Flower's usual names."""
    keys = (*([key] if key else []), *EXAMPLES)
    for record in content.metric_records.values():
        for name in keys:
            value: Any = record.get(name)
            if isinstance(value, int | float) and value >= 1 and float(value).is_integer():
                return int(value)
    return None
