"""Ground truth: what the clients really trained on. Only the evaluation opens it; no attack ever sees it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from fedaudit.errors import BadInput, CorruptTranscript

FILE = "truth.safetensors"


@dataclass(frozen=True)
class Truth:
    """What the clients trained on, and the pictures that a recovered one could be mistaken for.

    Attributes:
        inputs: (round, client) to (n, C, H, W) pixels in [0, 1], or (n, d) rows, in the order of use.
        labels: (round, client) to (n,).
        candidates: (m, C, H, W) the victims and all held-out examples: identification is among these.
        candidate_labels: (m,).
        about: data, model and scenario in words, for the report.
    """

    inputs: dict[tuple[int, int], Tensor]
    labels: dict[tuple[int, int], Tensor]
    candidates: Tensor
    candidate_labels: Tensor
    about: dict[str, Any]

    def save(self, path: Path) -> None:
        """Write one safetensors file.

        Raises:
            BadInput: it can't be written.
        """
        tensors = {"candidates": self.candidates, "candidate_labels": self.candidate_labels}
        for (r, c), value in self.inputs.items():
            tensors[f"inputs/{r}/{c}"] = value
            tensors[f"labels/{r}/{c}"] = self.labels[r, c]
        try:
            save_file(
                {k: v.cpu().contiguous() for k, v in tensors.items()}, path, metadata={"about": json.dumps(self.about)}
            )
        except (OSError, SafetensorError) as error:
            raise BadInput(f"can't write the ground truth to '{path}': {error}") from None

    @classmethod
    def load(cls, path: Path) -> Truth:
        """Read what :meth:`save` wrote.

        Raises:
            CorruptTranscript: the file is missing, truncated or something else.
        """
        if not path.is_file():
            raise CorruptTranscript(f"no ground truth at {path}; without it findings can't be evaluated")
        try:
            with safe_open(path, framework="pt") as file:
                metadata = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
            about = json.loads(metadata["about"])
            inputs, labels = {}, {}
            for name, value in tensors.items():
                if name.startswith("inputs/"):
                    r, c = map(int, name.split("/")[1:])
                    inputs[r, c] = value
                    labels[r, c] = tensors[f"labels/{r}/{c}"]
            return cls(inputs, labels, tensors["candidates"], tensors["candidate_labels"], about)
        except (SafetensorError, OSError, KeyError, ValueError) as error:
            raise CorruptTranscript(f"{path} is truncated or not a ground truth file ({error})") from None


def matches(truth: Truth, keys: list[tuple[int, int]], input_shape: tuple[int, ...]) -> None:
    """Check that ``truth`` belongs to a transcript with updates ``keys``.

    Raises:
        CorruptTranscript: an update has no truth, or the shapes differ.
    """
    for key in keys:
        if key not in truth.inputs:
            raise CorruptTranscript(f"the ground truth has nothing on round {key[0]}, client {key[1]}: wrong file?")
        if tuple(truth.inputs[key].shape[1:]) != input_shape or not torch.isfinite(truth.inputs[key]).all():
            raise CorruptTranscript(f"the ground truth of round {key[0]}, client {key[1]} doesn't fit the transcript")
