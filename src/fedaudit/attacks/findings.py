"""What attacks recover: one class for each kind of thing, all of them saved and loaded in the same way."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from pydantic import ConfigDict, TypeAdapter, ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from fedaudit.utils.errors import BadInput

_TENSOR = "tensor"
_KINDS: dict[str, type[Finding]] = {}


@dataclass(frozen=True)
class Trace:
    """How an optimisation went, at the iterations at which a snapshot was kept.

    Attributes:
        iterations: (k,) numbers of finished iterations.
        objective: (k,) what was minimised, as the adversary sees it.
        snapshots: (k, n, C, H, W) pixels in [0, 1].
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(arbitrary_types_allowed=True)  # where it is read from a file

    iterations: list[int]
    objective: list[float]
    snapshots: Tensor


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What an attack recovered from one observation. Contains no ground truth.

    A kind of finding is a subclass, a frozen, keyword-only dataclass: ``class X(Finding, kind="x")``. Its fields are
    tensors, plain values, and lists, tuples, mappings and dataclasses of these. How it is judged stands in a module of
    :mod:`fedaudit.evaluation`.

    Attributes:
        attack: registered name.
        objective: final value of what was minimised: the attack's own measure of confidence, lower is better; None
            where nothing was.
        iterations: of the optimiser, over all restarts.
        notes: what the user should know about this run.
        seconds: wall time.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(arbitrary_types_allowed=True)  # where it is read from a file
    kind: ClassVar[str]

    attack: str
    objective: float | None = None
    iterations: int = 0
    notes: tuple[str, ...] = ()
    seconds: float = field(default=0.0, compare=False)

    def __init_subclass__(cls, *, kind: str, **rest: Any) -> None:
        super().__init_subclass__(**rest)
        cls.kind = kind
        _KINDS[kind] = cls

    def save(self, path: Path) -> None:
        """Write one safetensors file; whoever is interrupted leaves no half-written one.

        Raises:
            OSError: it can't be written.
        """
        tensors: dict[str, Tensor] = {}
        about = {"kind": self.kind, "fields": _pack(self, "", tensors)}
        draft = path.with_suffix(".part")
        save_file(tensors, draft, metadata={"about": json.dumps(about)})
        draft.replace(path)

    @staticmethod
    def load(path: Path) -> Finding:
        """Read what :meth:`save` wrote, as the class that it was.

        Raises:
            BadInput: the file is truncated or something else.
        """
        try:
            with safe_open(path, framework="pt") as file:
                about = json.loads((file.metadata() or {})["about"])
                values = _unpack(about["fields"], file)
            found: Finding = TypeAdapter(_KINDS[about["kind"]]).validate_python(values)
        except (SafetensorError, OSError, KeyError, TypeError, ValueError, ValidationError) as error:
            reason = (str(error).splitlines() or [""])[0]
            raise BadInput(f"{path} is truncated or not a finding ({reason}); delete it and run again") from None
        return found


@dataclass(frozen=True, kw_only=True)
class ImageFinding(Finding, kind="images"):
    """Training images.

    Attributes:
        images: (n, C, H, W) pixels in [0, 1].
        labels: (n,) the labels that the attack worked with.
        label_source: ``given``, or the name of the label inference.
        trace: of the restart that was kept; None where the attack kept none.
        rounds: for each image the rounds whose update it is an example of; empty if only one update was looked at.
    """

    images: Tensor
    labels: Tensor
    label_source: str
    trace: Trace | None = None
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


def _unpack(value: Any, file: Any) -> Any:
    if isinstance(value, dict):
        if list(value) == [_TENSOR]:
            return file.get_tensor(value[_TENSOR])
        return {key: _unpack(item, file) for key, item in value.items()}
    return [_unpack(item, file) for item in value] if isinstance(value, list) else value
