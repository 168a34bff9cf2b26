"""What attacks recover: one class for each finding type, all of them saved and loaded in the same way."""

from __future__ import annotations

import dataclasses
import reprlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from pydantic import ConfigDict, TypeAdapter
from safetensors import SafetensorError
from torch import Tensor

from fedaudit.utils.bounds import TENSORS, check_file
from fedaudit.utils.errors import BadInput
from fedaudit.utils.integrity import load_sealed, save_sealed

_REMEDY = "delete it and run again"
_TENSOR = "tensor"
_KINDS: dict[str, type[Finding]] = {}


@dataclass(frozen=True)
class Trace:
    """How an optimisation went, at the iterations at which a snapshot was kept.

    Attributes:
        iterations: (k,) counts of finished iterations.
        objective: (k,) what was minimised, as the adversary sees it.
        snapshots: (k, n, C, H, W) pixels in [0, 1].
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(arbitrary_types_allowed=True)  # where it is read from a file

    iterations: list[int]
    objective: list[float]
    snapshots: Tensor

    def __repr__(self) -> str:
        return f"Trace({len(self.iterations)} snapshots)"


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What an attack recovered from one observation. Contains no ground truth.

    A finding type is a subclass, a frozen, keyword-only dataclass: ``class X(Finding, kind="x")``. Its fields are
    tensors, plain values, and lists, tuples, mappings and dataclasses of these. A module of
    :mod:`fedaudit.evaluation` says how it is evaluated.

    Attributes:
        attack: registered name; filled in by the attack's call.
        objective: final value of what was minimised: the attack's own measure of confidence, lower is better; None
            where nothing was.
        iterations: of the optimiser, over all restarts; of an inverter, own examples that it learnt from, with
            repetitions.
        notes: what the user should know about this run.
        seconds: wall time; filled in by the attack's call.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(arbitrary_types_allowed=True)  # where it is read from a file
    kind: ClassVar[str]

    attack: str = ""
    objective: float | None = None
    iterations: int = 0
    notes: tuple[str, ...] = ()
    seconds: float = field(default=0.0, compare=False)

    def __init_subclass__(cls, *, kind: str, **rest: Any) -> None:
        super().__init_subclass__(**rest)
        cls.kind = kind
        if "__repr__" not in vars(cls):  # a dataclass's own would write all tensors out
            setattr(cls, "__repr__", Finding.__repr__)  # noqa: B010
        _KINDS[kind] = cls

    def __repr__(self) -> str:
        shapes = {
            f.name: tuple(v.shape) for f in dataclasses.fields(self) if isinstance(v := getattr(self, f.name), Tensor)
        }
        parts = [f"{name} {shape}" for name, shape in shapes.items()][:4]
        if self.objective is not None:
            parts.append(f"objective {self.objective:.3g}")
        return f"{type(self).__name__}({reprlib.repr(self.attack)}: {', '.join(parts) or self.kind})"

    def save(self, path: Path, key: str = "") -> None:
        """Write one safetensors file; whoever is interrupted leaves no half-written one.

        It is sealed under the key, see :mod:`fedaudit.utils.integrity`.

        Args:
            path: of the file.
            key: of what it is a finding about; :meth:`load` must be given the same.

        Raises:
            OSError: it can't be written.
        """
        tensors: dict[str, Tensor] = {}
        fields = _pack(self, "", tensors)
        save_sealed(path, tensors, {"kind": self.kind, "fields": fields}, key)

    @staticmethod
    def load(path: Path, key: str = "") -> Finding:
        """Read what :meth:`save` wrote, as the class that it was.

        Args:
            path: of the file.
            key: that it was saved with; without one a file of an earlier version is read, too, with a note.

        Raises:
            BadInput: the file is truncated or something else, or its digest isn't that of what it holds under this key.
        """
        try:
            check_file(path, TENSORS)
            about, tensors, note = load_sealed(path, key, own=["kind", "fields"], remedy=_REMEDY)
            if note and key:
                raise BadInput(f"{path} carries no digest: it was changed or damaged after it was kept; {_REMEDY}")
            values = _unpack(about["fields"], tensors)
            found: Finding = TypeAdapter(_KINDS[about["kind"]]).validate_python(values)
        except (SafetensorError, OSError, KeyError, TypeError, ValueError, RecursionError) as error:
            reason = (str(error).splitlines() or [""])[0]
            raise BadInput(f"{path} is truncated or not a finding ({reason}); {_REMEDY}") from None
        return dataclasses.replace(found, notes=(*found.notes, note)) if note else found


@dataclass(frozen=True, kw_only=True)
class ImageFinding(Finding, kind="images"):
    """Training images, or volumes or signals.

    Attributes:
        images: (n, C, H, W) pixels in [0, 1]; of volumes (n, C, D, H, W), of signals (n, C, T) in their own units.
        labels: (n,) the labels that the attack worked with.
        label_source: ``given``, or the name of the label inference.
        trace: of the restart that was kept; None where the attack kept none.
        rounds: for each image the rounds whose update it is an example of; empty if the attack received one update, or
            took all that it received for one.
        separate: for each of an image's rounds, the (n, C, H, W) images that this round's updates alone gave, by which
            rounds were tied, and their (n,) labels; empty where none were.
        certified: (n,) which images the attack vouches for without the truth: they are the client's own, up to half a
            grey level; None where it vouches for none.
        groups: (n,) int64, equal for images that the attack says are the same client's, -1 where it says nothing of an
            image; None where it tells no clients apart.
    """

    images: Tensor
    labels: Tensor
    label_source: str
    trace: Trace | None = None
    rounds: tuple[tuple[int, ...], ...] = ()
    separate: tuple[tuple[Tensor, Tensor], ...] = ()
    certified: Tensor | None = None
    groups: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class RowFinding(Finding, kind="rows"):
    """Rows of a table. There may be fewer of them than the update has examples: what an attack isn't sure to have.

    Attributes:
        rows: (n, d) as the model sees them: numbers standardised, categories one-hot or as their code.
        labels: (n,) the labels that the attack worked with; (n, 1) targets of a regression.
        label_source: ``given``, or the name of the label inference.
        confidence: (n, c) in [0, 1], how sure the attack is of each cell, of each of the table's columns (of each
            position, where the columns aren't known); None where it can't tell.
        certified: (n,) bool: rows that the attack proved to be training examples, without the truth; None where it
            proves nothing.
        rounds: for each row the rounds whose update it is an example of; empty if the attack received one update.
    """

    rows: Tensor
    labels: Tensor
    label_source: str
    confidence: Tensor | None = None
    certified: Tensor | None = None
    rounds: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True, kw_only=True)
class LocalModelFinding(Finding, kind="local-model"):
    """The model that a client would have trained alone.

    Attributes:
        state: its parameters by name.
        rounds_used: of how many rounds it was made.
        condition: condition number of the models sent; None where none was computed.
        directions: in how many directions of the parameters it was sought; None for all.
        mapping_error: share of the updates' variation that the learned mapping leaves unexplained; None where nothing
            is left over to tell.
    """

    state: dict[str, Tensor]
    rounds_used: int
    condition: float | None = None
    directions: int | None = None
    mapping_error: float | None = None


@dataclass(frozen=True, kw_only=True)
class SequenceFinding(Finding, kind="sequences"):
    """Sequences of tokens.

    Attributes:
        sequences: (m, length) int64, filled up with the padding token (or 0); fewer than the update was made from where
            the others weren't found.
        distances: (m,) of each, the mean distance of its vectors from the gradients' span, 1 being what noise explains;
            None where that isn't how it was found.
    """

    sequences: Tensor
    distances: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class TokenFinding(Finding, kind="tokens"):
    """Which tokens occurred, in no order.

    Attributes:
        tokens: (k,) int64, each once, in ascending order.
        vocabulary: how many there are.
    """

    tokens: Tensor
    vocabulary: int


def _pack(value: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    """Return ``value`` as JSON can hold it; its tensors go to ``tensors``, each under its path."""
    if isinstance(value, Tensor):
        tensors[path] = value.detach().cpu().contiguous().clone()  # safetensors refuses memory that two share
        return {_TENSOR: path}
    if dataclasses.is_dataclass(value):
        value = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {str(key): _pack(item, f"{path}/{key}".lstrip("/"), tensors) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_pack(item, f"{path}/{i}", tensors) for i, item in enumerate(value)]
    return value


def _unpack(value: Any, tensors: dict[str, Tensor]) -> Any:
    if isinstance(value, dict):
        if list(value) == [_TENSOR]:
            return tensors[value[_TENSOR]]
        return {key: _unpack(item, tensors) for key, item in value.items()}
    return [_unpack(item, tensors) for item in value] if isinstance(value, list) else value
