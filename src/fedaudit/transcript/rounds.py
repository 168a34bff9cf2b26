"""Rounds of a federation: what travelled in each, and the checks of what is read from a file."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import Field
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from fedaudit.task.info import TaskInfo
from fedaudit.transcript.update import Update
from fedaudit.utils.bounds import TENSORS, check_file
from fedaudit.utils.errors import BadInput, CorruptTranscript
from fedaudit.utils.finite import all_finite
from fedaudit.utils.integrity import check_listed

REMEDY = "take it from where it was made"  # what to do about a changed file

# In an index: its own digest (see fedaudit.utils.integrity), and the SHA-256 of every file that it names.
Digest = Annotated[str, Field(pattern=r"^(hmac-)?sha256:[0-9a-f]{64}$")]
Files = dict[str, Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]]


@dataclass(frozen=True)
class Round:
    """One round: the weights that the server sent, the updates that came back, and whom the server left out.

    Attributes:
        index: from 0.
        weights: the global model's whole state (parameters and buffers), by name.
        updates: in the order of the clients.
        rejected: client to reason.
        fallback: why the aggregator couldn't do what it is meant to do, if so.
        client_weights: client to the weights that it was sent, where these aren't ``weights``.
        time: when the round ended, as ISO 8601 in UTC; None where it wasn't recorded.
    """

    index: int
    weights: dict[str, Tensor]
    updates: list[Update]
    rejected: dict[int, str] = field(default_factory=dict)
    fallback: str | None = None
    client_weights: dict[int, dict[str, Tensor]] = field(default_factory=dict)
    time: str | None = None

    def __repr__(self) -> str:
        return f"Round({self.index}: {len(self.updates)} updates, {len(self.rejected)} rejected)"

    def sent_to(self, client: int) -> dict[str, Tensor]:
        """Return the weights from which ``client`` trained."""
        return self.client_weights.get(client, self.weights)


def check_new(folder: Path) -> None:
    """Raise BadInput for a folder that something is in, or that can't be read."""
    try:
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise BadInput(f"'{folder}' exists and isn't an empty folder; choose a new one for the transcript")
    except OSError as error:
        raise BadInput(f"can't read '{folder}': {error.strerror or error}") from None


def check_order(path: Path | str, rounds: Sequence[Any]) -> None:
    """Check that rounds, in memory or in a file that ``path`` names, are in order and don't contradict themselves."""
    numbers = [r.index for r in rounds]
    if any(b <= a for a, b in itertools.pairwise(numbers)):
        raise CorruptTranscript(f"{path}: rounds {numbers} are not in order, each once")
    if len({u.kind for r in rounds for u in r.updates}) > 1:
        raise CorruptTranscript(f"{path}: some updates are gradients and some are weights; a federation has one kind")
    for entry in rounds:
        clients = [u.client for u in entry.updates]
        if len(set(clients)) < len(clients):
            raise CorruptTranscript(f"{path}: a client sent two updates in round {entry.index}; it sends one")
        absent = set(entry.rejected) - set(clients)
        if absent:
            raise CorruptTranscript(f"{path}: round {entry.index} rejects client {min(absent)}, who sent nothing")


def read_file(folder: Path, file: str, files: Mapping[str, str]) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file beside the index of ``folder``.

    ``files``: SHA-256 of every file that the index lists; empty where an earlier version wrote it. CorruptTranscript:
    the name leads elsewhere, or the file is missing, damaged or not the listed one.
    """
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}", file) or (folder / file).is_symlink():
        raise CorruptTranscript(f"the index of '{folder}' names a file that isn't a plain one beside it: {file[:80]!r}")
    path = folder / file
    if not path.is_file():
        raise CorruptTranscript(f"{path} is missing; the transcript is incomplete")
    try:
        check_file(path, TENSORS)
        check_listed(path, file, files, remedy=REMEDY)
        return load_file(path)
    except (SafetensorError, OSError, TypeError, KeyError, ValueError) as error:
        raise CorruptTranscript(f"{path} is truncated or not a safetensors file ({error})") from None


def expected(module: nn.Module) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
    """Return the whole state of ``module``, its trainable parameters, and the buffers that travel."""
    state = module.state_dict()
    parameters = {name: p.detach() for name, p in module.named_parameters() if p.requires_grad}
    return state, parameters, {name: b for name, b in module.named_buffers() if name in state}


def check_tensors(tensors: dict[str, Tensor], wanted: dict[str, Tensor], path: Path | str) -> None:
    """Check that ``tensors``, read from ``path``, have the names, shapes and dtypes of ``wanted``, and are finite."""
    for name, own in wanted.items():
        if name not in tensors:
            raise CorruptTranscript(f"{path}: tensor '{name}' is missing")
        given = tensors[name]
        if given.shape != own.shape:
            shapes = f"shape {tuple(given.shape)}, the model needs {tuple(own.shape)}"
            raise CorruptTranscript(f"{path}: tensor '{name}' has {shapes}")
        if given.dtype != own.dtype:
            raise CorruptTranscript(f"{path}: tensor '{name}' is {given.dtype}, the model needs {own.dtype}")
    for name, tensor in tensors.items():
        if name not in wanted:
            raise CorruptTranscript(f"{path}: the model has no tensor '{name}'")
        if not all_finite([tensor]):
            raise CorruptTranscript(f"{path}: tensor '{name}' has NaN or infinite values")


def check_update(
    own: dict[str, Tensor],
    moved: dict[str, Tensor],
    parameters: dict[str, Tensor],
    buffers: dict[str, Tensor],
    path: Path | str,
    *,
    whole: bool,
) -> None:
    """Check that ``own``, of ``parameters``, and ``moved``, of ``buffers``, are as the model has them.

    A client-side defence may hold tensors back, but then says so; without one the update must be ``whole``.
    """
    sent = {k: v for k, v in parameters.items() if whole or k in own}
    if not sent:
        raise CorruptTranscript(f"{path}: there is no parameter of the model in it")
    check_tensors(own, sent, path)
    check_tensors(moved, {k: v for k, v in buffers.items() if k in moved}, path)


def check_examples(inputs: Tensor, labels: Tensor, task_info: TaskInfo, count: int, what: str) -> None:
    """Check that ``inputs`` and ``labels``, which ``what`` names, are ``count`` examples of the task's kind."""
    if inputs.shape != (count, *task_info.input_shape) or labels.ndim < 1 or len(labels) != count:
        shapes = f"{tuple(inputs.shape)} inputs, {tuple(labels.shape)} labels"
        raise CorruptTranscript(f"{what}: {shapes}; expected {count} of shape {task_info.input_shape}")
    if fault := task_info.example_kind.fault(inputs):
        raise CorruptTranscript(f"{what}: {fault}")
    if task_info.tokens is not None and (fault := task_info.tokens.fault(inputs)):
        raise CorruptTranscript(f"{what}: {fault}")
    check_labels(labels, task_info, what)


def check_labels(labels: Tensor, task_info: TaskInfo, where: str) -> None:
    """Check that ``labels``, which ``where`` names, fit the task."""
    real = labels.float() if labels.is_floating_point() else labels  # a recording's may be of another precision
    if fault := task_info.task_kind.fault(real, task_info.target_values, task_info.target_shape):
        raise CorruptTranscript(f"{where}: the labels are none of this model's: {fault}")


def labels_of(values: list[int] | list[float], task_info: TaskInfo) -> Tensor:
    """Return labels that stand in an index, one after the other, as a tensor of the task's targets (n, ...)."""
    kind, classes = task_info.task_kind, task_info.target_values
    labels = torch.tensor(values)
    if kind.dtype == torch.int64 and (labels.is_floating_point() or bool((labels >= classes).any())):
        raise BadInput(f"a label is outside of 0..{classes - 1}")
    size = math.prod(task_info.target_shape)
    if len(labels) % size:
        raise BadInput(f"{len(labels)} labels aren't those of whole examples, which have {size} each")
    return labels.to(kind.dtype).view(-1, *task_info.target_shape)
