"""Examples that the adversary holds: records, of each of which it asks something, and public ones."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace

import torch
from torch import Tensor

from fedaudit.task.info import TaskInfo
from fedaudit.transcript.rounds import check_examples
from fedaudit.utils.errors import CorruptTranscript

NOBODY = -1  # owner of a record that no client holds
_LATER = {"public_property", "known_inputs", "known_labels", "known_clients"}  # of later versions
UNUSED = -2  # owner of a record that a client holds, but that none of its updates used


@dataclass(frozen=True)
class QuerySet:
    """What the adversary holds; nothing in it tells whose a record is, but of those that are known to it.

    Attributes:
        inputs: (n, ...) as in a data set: pixels in [0, 1], or rows of a table; ``columns`` of these are 0.
        labels: (n,) or (n, 1).
        public_inputs: (m, ...) further examples, which nobody trained on.
        public_labels: (m,) or (m, 1).
        codes: (k, c) what stands in the hidden attribute's columns for each of its k values; k is 0 where none is
            hidden, c where it isn't one of the inputs.
        columns: (c,) of the inputs.
        public_values: (m,) which value the public examples have; empty where none is hidden.
        public_property: (m,) bool: which public examples have the clients' property that the adversary is after; empty
            where it is after none.
        known_inputs: (k, ...) further examples of clients, of each of which the adversary knows whose it is.
        known_labels: (k,) or (k, 1).
        known_clients: (k,) int64, whose.
    """

    inputs: Tensor
    labels: Tensor
    public_inputs: Tensor
    public_labels: Tensor
    codes: Tensor = field(default_factory=lambda: torch.zeros(0, 0))
    columns: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))
    public_values: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))
    public_property: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.bool))
    known_inputs: Tensor = field(default_factory=lambda: torch.zeros(0))
    known_labels: Tensor = field(default_factory=lambda: torch.zeros(0))
    known_clients: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))

    def __repr__(self) -> str:
        return f"QuerySet({len(self)} records, {len(self.public_inputs)} public examples)"

    def __len__(self) -> int:
        return len(self.inputs)

    def with_public(self, rows: Tensor | slice) -> QuerySet:
        """Return the same with only those ``rows`` of the public examples."""
        public = {n: t[rows] if len(t) else t for n, t in vars(self).items() if n.startswith("public_")}
        return replace(self, **public)

    def without_known(self) -> QuerySet:
        """Return the same without the examples of which it is known whose they are."""
        return replace(self, **{n: t[:0] for n, t in vars(self).items() if n.startswith("known_")})

    def stored(self) -> dict[str, Tensor]:
        """Return what is written to a file; what later versions added only where there is any."""
        return {n: t for n, t in vars(self).items() if n not in _LATER or len(t)}


def read_queries(tensors: dict[str, Tensor], task_info: TaskInfo, where: str) -> QuerySet:
    """Return what :meth:`QuerySet.stored` gave, read from a file that ``where`` names; refuse another task's."""
    if set(tensors) | _LATER != {field.name for field in fields(QuerySet)}:
        raise CorruptTranscript(f"{where}: {', '.join(sorted(tensors))[:80]} are no queries")
    for part in ("", "public_", *["known_"] * ("known_inputs" in tensors)):
        inputs, labels = tensors[f"{part}inputs"], tensors.get(f"{part}labels", torch.zeros(0))
        if not inputs.ndim:
            raise CorruptTranscript(f"{where}: {part}queries: the inputs are one number")
        check_examples(inputs, labels, task_info, len(inputs), f"{where}: {part}queries")
    queries = QuerySet(**tensors)
    k, c = queries.codes.shape if queries.codes.ndim == 2 else (-1, -1)
    columns, values = queries.columns, queries.public_values
    wrong = columns.shape != (c,) or columns.dtype != torch.int64 or not torch.isfinite(queries.codes).all()
    wrong |= bool(((columns < 0) | (columns >= task_info.input_shape[0])).any())
    wrong |= values.shape != (len(queries.public_inputs) if k else 0,) or values.dtype != torch.int64
    if wrong or bool(((values < 0) | (values >= k)).any()):
        raise CorruptTranscript(f"{where}: what it says of the hidden attribute is broken")
    marks = queries.public_property
    if marks.dtype != torch.bool or marks.shape not in ((0,), (len(queries.public_inputs),)):
        raise CorruptTranscript(f"{where}: what it says of the property is broken")
    owners = queries.known_clients
    if owners.dtype != torch.int64 or owners.shape != (len(queries.known_inputs),) or bool((owners < 0).any()):
        raise CorruptTranscript(f"{where}: what it says of known records is broken")
    return queries
