"""What an ArrayRecord doesn't say: which tensors are parameters, which are statistics, and which make a layer."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, RecordDict
from torch import Tensor, nn

from fedaudit.utils.errors import BadInput

# Modules' names for statistics that training keeps and no gradient moves, where only names are at hand.
_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")

Parameters = nn.Module | Iterable[str] | None


def torch_state(record: ArrayRecord) -> dict[str, Tensor]:
    """Return the record's tensors by name, on memory of their own."""
    return {name: tensor.clone() for name, tensor in record.to_torch_state_dict().items()}


def names_of(parameters: Parameters) -> frozenset[str] | None:
    """Return the names of the parameters that the user gave, as a module or as names, or None."""
    if parameters is None:
        return None
    if isinstance(parameters, nn.Module):  # tied weights are sent under both names
        return frozenset(name for name, _ in parameters.named_parameters(remove_duplicate=False))
    names = frozenset(parameters)
    if isinstance(parameters, str) or not all(isinstance(name, str) for name in names):
        raise BadInput("parameters: give the module, or the names of its parameters")
    return names


def parameters_in(state: Mapping[str, Tensor], given: frozenset[str] | None) -> list[str]:
    """Return the names of the parameters: those ``given``, else floating-point tensors but BatchNorm's statistics."""
    floating = [name for name, tensor in state.items() if tensor.is_floating_point()]
    if given is not None and (unknown := sorted(given.difference(floating))):
        raise BadInput(f"parameters: the model that was sent has no floating-point tensor '{unknown[0]}'")
    chosen = [n for n in floating if (n.rpartition(".")[2] not in _STATISTICS if given is None else n in given)]
    if not chosen:
        raise BadInput("the model that was sent has no parameters: give parameters=, the module or their names")
    return chosen


def layers_in(state: Mapping[str, Tensor]) -> tuple[tuple[str, ...], ...]:
    """Return the names of each layer's tensors: those that share everything before the last dot."""
    layers: dict[str, list[str]] = {}
    for name in state:
        layers.setdefault(name.rpartition(".")[0], []).append(name)
    return tuple(map(tuple, layers.values()))


def save_state(records: RecordDict, key: str, state: Mapping[str, Any]) -> None:
    """Keep a plug-in's ``state_dict()`` under ``key`` as plain records: tensors as arrays, the rest as JSON."""
    tensors: list[Tensor] = []

    def plain(value: Any) -> Any:
        if isinstance(value, Tensor):
            tensors.append(value)
            return {"tensor": len(tensors) - 1}
        if isinstance(value, Mapping):
            return {"dict": [[plain(k), plain(v)] for k, v in value.items()]}
        if isinstance(value, list | tuple):
            return {type(value).__name__: [plain(v) for v in value]}
        return value

    text = json.dumps(plain(state))
    records[key] = ConfigRecord({"state": text})
    records[f"{key}.tensors"] = ArrayRecord({str(i): tensor for i, tensor in enumerate(tensors)})


def load_state(records: RecordDict, key: str) -> dict[str, Any] | None:
    """Return what :func:`save_state` kept, or None."""
    if key not in records:
        return None
    tensors = torch_state(records[f"{key}.tensors"])

    def whole(value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        ((kind, content),) = value.items()
        if kind == "tensor":
            return tensors[str(content)]
        if kind == "dict":
            return {whole(k): whole(v) for k, v in content}
        parts = [whole(v) for v in content]
        return tuple(parts) if kind == "tuple" else parts

    state: dict[str, Any] = whole(json.loads(str(records[key]["state"])))
    return state
