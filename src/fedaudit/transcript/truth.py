"""Ground truth: what the clients really trained on. Only the evaluation opens it; no attack ever sees it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from fedaudit.transcript.queries import UNUSED
from fedaudit.transcript.rounds import check_examples, check_new
from fedaudit.transcript.transcript import Transcript
from fedaudit.utils.bounds import TENSORS, check_file
from fedaudit.utils.errors import BadInput, CorruptTranscript
from fedaudit.utils.folders import temporary_folder
from fedaudit.utils.integrity import load_sealed, save_sealed

FILE = "truth.safetensors"
_ABOUT = ("scenario", "data", "model", "accuracy", "transcript")


@dataclass(frozen=True)
class Truth:
    """What the clients trained on, and the images that a recovered one could be mistaken for.

    Attributes:
        inputs: (round, client) to (n, C, H, W) pixels in [0, 1], or (n, d) rows, in the order of use. Of a vertical
            federation (i, 0) to example i, whole, alone.
        labels: (round, client) to (n,).
        candidates: (m, C, H, W) the victims and all held-out examples: identification is among these.
        candidate_labels: (m,).
        about: data, model and scenario in words, for the report; and the fingerprint of the transcript.
        rows: (round, client) to (n,) the examples' positions among the client's own, which tell one that was used twice
            from two that are equal; empty where they weren't recorded.
        owners: (n,) of each of the adversary's records the client that trained on it, or -1 for nobody, or -2 where a
            client holds it and no update used it; empty where the adversary has none.
        matched: (n,) of each record the one of the other sort that was drawn to go with it.
        values: (n,) of each record the value of the attribute that it lacks; empty where it lacks none.
        shares: (k,) float64 of each client the share of the examples in its updates that have the property which the
            adversary is after, or -1 where it sent none; empty where it is after none.
        coins: (m,) bool: which of an audit's canaries were in; empty where there were none.
        seen: of a recording, (round, client) to inputs (n, ...) and targets (n, ...) as model and loss saw them, of
            which ``inputs`` and ``labels`` are made; empty of a simulation.
        randomness: likewise, torch's state of randomness (passes, k) before each pass, where the model draws at random.
        notes: what readers should know of the file that it was read from.
    """

    inputs: dict[tuple[int, int], Tensor]
    labels: dict[tuple[int, int], Tensor]
    candidates: Tensor
    candidate_labels: Tensor
    about: dict[str, Any]
    rows: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    owners: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))
    matched: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))
    values: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))
    shares: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.float64))
    coins: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.bool))
    seen: dict[tuple[int, int], tuple[Tensor, Tensor]] = field(default_factory=dict)
    randomness: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def __repr__(self) -> str:
        examples = sum(map(len, self.inputs.values()))
        return f"Truth({len(self.inputs)} updates over {examples} examples, {len(self.candidates)} candidates)"

    def held_by(self, client: int) -> tuple[Tensor, Tensor]:
        """Return inputs and labels of every example that an update of ``client`` used, each once.

        After one pass over its data that is all that it holds.

        Raises:
            KeyError: there is no update of this client.
        """
        keys = sorted(key for key in self.inputs if key[1] == client)
        inputs = torch.cat([self.inputs[key] for key in keys])
        labels = torch.cat([self.labels[key] for key in keys])
        if not all(key in self.rows for key in keys):
            flat = torch.cat([inputs.flatten(1), labels.view(len(labels), -1).to(inputs.dtype)], dim=1)
            rows = torch.unique(flat, dim=0, return_inverse=True)[1]
        else:
            rows = torch.cat([self.rows[key] for key in keys])
        first = torch.full((int(rows.max()) + 1,), len(rows)).scatter_reduce(0, rows, torch.arange(len(rows)), "amin")
        first = first[first < len(rows)]
        return inputs[first], labels[first]

    def save(self, path: Path) -> None:
        """Write one safetensors file, sealed (see :mod:`fedaudit.utils.integrity`).

        Raises:
            BadInput: it can't be written.
        """
        tensors = {"candidates": self.candidates, "candidate_labels": self.candidate_labels}
        if len(self.owners):
            tensors |= {"owners": self.owners, "twins": self.matched, "values": self.values}
        tensors |= {name: t for name, t in (("coins", self.coins), ("shares", self.shares)) if len(t)}
        for (r, c), value in self.inputs.items():
            tensors[f"inputs/{r}/{c}"] = value
            tensors[f"labels/{r}/{c}"] = self.labels[r, c]
            if (r, c) in self.rows:
                tensors[f"rows/{r}/{c}"] = self.rows[r, c]
        try:
            save_sealed(path, tensors, self.about)
        except (OSError, SafetensorError) as error:
            raise BadInput(f"can't write the ground truth to '{path}': {error}") from None

    @classmethod
    def load(cls, path: Path) -> Truth:
        """Read what :meth:`save` wrote.

        Raises:
            CorruptTranscript: the file is missing, truncated or something else.
            BadInput: its digest doesn't fit, or can't be checked with the key that there is.
        """
        if not path.is_file():
            raise CorruptTranscript(f"no ground truth at {path}; without it findings can't be evaluated")
        try:
            check_file(path, TENSORS)
            about, tensors, note = load_sealed(path, own=_ABOUT, remedy="take it from where it was made")
            inputs, labels, rows = {}, {}, {}
            for name, value in tensors.items():
                if name.startswith("inputs/"):
                    r, c = map(int, name.split("/")[1:])
                    inputs[r, c] = value
                    labels[r, c] = tensors[f"labels/{r}/{c}"]
                    if f"rows/{r}/{c}" in tensors:
                        rows[r, c] = tensors[f"rows/{r}/{c}"]
            known: dict[str, Any] = {
                name: tensors[name] for name in ("owners", "values", "shares", "coins") if name in tensors
            }
            if note:
                known["notes"] = (note,)
            if "twins" in tensors:  # the name in files
                known["matched"] = tensors["twins"]
            return cls(inputs, labels, tensors["candidates"], tensors["candidate_labels"], about, rows, **known)
        except (SafetensorError, OSError, KeyError, ValueError, RecursionError) as error:
            raise CorruptTranscript(f"{path} is truncated or not a ground truth file ({error})") from None


def save_recording(transcript: Transcript, truth: Truth, folder: Path) -> None:
    """Write the transcript to ``folder``, and into the same folder the truth, marked as this transcript's.

    All of it appears at once: whoever is interrupted leaves ``folder`` as it was.

    Raises:
        BadInput: the folder is in use or can't be written.
    """
    check_new(folder)
    about = {**truth.about, "transcript": transcript.fingerprint()}
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with temporary_folder(folder.parent, f".{folder.name}-temporary-") as draft:
            transcript.save(draft / "whole")
            dataclasses.replace(truth, about=about).save(draft / "whole" / FILE)
            (draft / "whole").replace(folder)
    except OSError as error:
        raise BadInput(f"can't write the transcript to '{folder}': {error.strerror or error}") from None


def check_belongs(truth: Truth, transcript: Transcript, path: Path) -> None:
    """Check that ``truth``, read from ``path``, is whole and belongs to ``transcript``.

    Raises:
        CorruptTranscript: it is another transcript's, or something in it is missing, misshapen or not finite.
    """
    if truth.about.get("transcript") != transcript.fingerprint():
        raise CorruptTranscript(f"{path} is the ground truth of another transcript than '{transcript.name}'")
    task_info = transcript.task_info
    updates = {(r.index, u.client): u.num_examples for r in transcript.rounds for u in r.updates}
    if transcript.vertical is not None:
        updates = {(i, 0): 1 for i in transcript.vertical.used.tolist()}
    parts = {
        f"round {r}, client {c}": (truth.inputs.get((r, c)), truth.labels.get((r, c)), n)
        for (r, c), n in updates.items()
    }
    for key, rows in truth.rows.items():
        if rows.shape != (updates.get(key),) or rows.dtype != torch.int64 or not 0 <= int(rows.min()) < 2**31:
            raise CorruptTranscript(f"{path}: round {key[0]}, client {key[1]}: the rows are none of this update's")
    parts["the candidates"] = (truth.candidates, truth.candidate_labels, len(truth.candidates))
    for what, (inputs, labels, count) in parts.items():
        if inputs is None or labels is None:
            raise CorruptTranscript(f"{path} has nothing on {what}")
        if count < 1:
            raise CorruptTranscript(f"{path}: {what}: there are none")
        check_examples(inputs, labels, task_info, count, f"{path}: {what}")
    n = len(transcript.records) if transcript.records is not None else 0
    places = torch.arange(n)
    whole = all(known.shape == (n,) and known.dtype == torch.int64 for known in (truth.owners, truth.matched))
    if not whole or bool((truth.owners < UNUSED).any()) or not truth.matched.sort().values.equal(places):
        raise CorruptTranscript(f"{path}: what it says of the adversary's {n} records are none of theirs")
    m = len(transcript.canaries) if transcript.canaries else 0
    if truth.coins.shape != (m,) or truth.coins.dtype != torch.bool:
        raise CorruptTranscript(f"{path}: what it says of the {m} canaries are none of theirs")
    asked = transcript.records is not None and len(transcript.records.public_property)
    known = 1 + max((c for _, c in updates), default=-1) if asked else 0
    shares = truth.shares
    whole = shares.ndim == 1 and shares.dtype == torch.float64 and (len(shares) >= known if asked else not len(shares))
    if not whole or not bool((((shares >= 0) & (shares <= 1)) | (shares == -1)).all()):
        raise CorruptTranscript(f"{path}: what it says of the clients' property is none of theirs")
    kinds = len(transcript.records.codes) if transcript.records is not None else 0
    values = truth.values
    if (
        values.shape != (n if kinds else 0,)
        or values.dtype != torch.int64
        or bool(((values < 0) | (values >= kinds)).any())
    ):
        raise CorruptTranscript(f"{path}: the values of the hidden attribute are none of its {kinds}")
