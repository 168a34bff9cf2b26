"""Ground truth: what the clients really trained on. Only the evaluation opens it; no attack ever sees it.

It lies in one sealed file, or in a folder of such: a recorder writes one an update, so that a kill loses nothing.
Each names the transcript that it belongs to. Examples stand in it as a data set has them (``inputs/ROUND/CLIENT``), or
as model and loss saw them (``seen/ROUND/CLIENT/inputs``), where nothing else is known of them. What a client trains
from and wasn't sent stands in it, too (``seen/ROUND/CLIENT/start/NAME``).
"""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from fedaudit.modalities.columns import check_cells
from fedaudit.modalities.tokens import NOTHING, of_one_length
from fedaudit.task.info import TaskInfo
from fedaudit.transcript.queries import UNUSED
from fedaudit.transcript.rounds import REMEDY, check_examples, check_new
from fedaudit.transcript.transcript import Transcript
from fedaudit.utils.bounds import TENSORS, check_file
from fedaudit.utils.errors import BadInput, CorruptTranscript
from fedaudit.utils.fingerprint import tensor_digest
from fedaudit.utils.folders import temporary_folder
from fedaudit.utils.integrity import load_sealed, save_sealed

FILE = "truth.safetensors"  # where a simulation's lies in its transcript's folder
FOLDER = "truth"  # where a recorder's files of it lie
COINS = "canaries.safetensors"
CANDIDATES = "candidates.safetensors"
ABOUT = ("scenario", "data", "model", "accuracy", "device", "promise", "std_guessed", "transcript")
_WHOLE = (
    *("candidates", "candidate_labels", "candidate_persons"),
    *("owners", "matched", "values", "persons", "homes", "shares", "coins"),
)
_OF_UPDATE = re.compile(r"round-(\d{5})-client-(\d{5})\.safetensors")
_OF_UPDATES = ("inputs", "labels", "rows", "members", "seen/inputs", "seen/targets", "seen/randomness")
_PLACE = re.compile(
    r"(inputs|labels|rows|members|seen)/(\d{1,9})/(\d{1,9})(|/inputs|/targets|/randomness|/start)(?:(?<=/start)/(.+))?"
)
_MOST_CANDIDATES = 5000  # from which no more files are read


@dataclass(frozen=True)
class Truth:
    """What the clients trained on, and the images that a recovered one could be mistaken for.

    Attributes:
        inputs: (round, client) to (n, C, H, W) pixels in [0, 1], or (n, d) rows, in the order of use. Of a vertical
            federation (i, 0) to example i, whole, alone.
        labels: (round, client) to (n,).
        candidates: (m, C, H, W) the victims and all held-out examples: identification is among these.
        candidate_labels: (m,).
        about: data, model and scenario in words, for the report; the fingerprint of the transcript; and where there are
            records and differential privacy, what is promised (``promise``); of recorded trees the names of the columns
            whose standard deviation in the transcript is a guess (``std_guessed``).
        rows: (round, client) to (n,) the examples' positions among the client's own, which tell one that was used twice
            from two that are equal; empty where they weren't recorded.
        owners: (n,) of each of the adversary's records the client that trained on it, or -1 for nobody, or -2 where a
            client holds it and no update used it; empty where the adversary has none.
        matched: (n,) of each record the one of the other sort that was drawn to go with it.
        values: (n,) of each record the value of the attribute that it lacks; empty where it lacks none.
        persons: (n,) of which person each record is, where some are of one; empty where each is another's, or that
            isn't known. Those matched to a person's are of one person, too.
        homes: (n,) of each record the client of whose own examples it is, where those that nobody trained on were kept
            back by clients; empty where they are no client's, or it isn't known whose.
        shares: (k,) float64 of each client the share of the examples in its updates that have the property which the
            adversary is after, or -1 where it sent none; empty where it is after none.
        coins: (m,) bool: which of an audit's canaries were in; empty where there were none.
        members: of a sum, (round, client) to (n,) int64, which client each example is of; empty where there are none.
        seen: of a recording, (round, client) to inputs (n, ...) and targets (n, ...) as model and loss saw them, of
            which ``inputs`` and ``labels`` are made; of texts shorter than the longest with ``NOTHING`` behind them;
            empty of a simulation.
        randomness: likewise, torch's state of randomness (passes, k) before each pass, where the model draws at random.
        starts: likewise, by name what local training began with and the client wasn't sent: layers that stay with it.
        candidate_persons: (m,) of which person each candidate is; empty where that isn't known.
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
    members: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    seen: dict[tuple[int, int], tuple[Tensor, Tensor]] = field(default_factory=dict)
    randomness: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    starts: dict[tuple[int, int], dict[str, Tensor]] = field(default_factory=dict)
    candidate_persons: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))
    persons: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))
    homes: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))

    def __repr__(self) -> str:
        examples = sum(map(len, self.inputs.values()))
        return f"Truth({len(self.inputs)} updates over {examples} examples, {len(self.candidates)} candidates)"

    def of(self, transcript: Transcript) -> Truth:
        """Return it marked as the truth of ``transcript``, which it must be."""
        return dataclasses.replace(self, about={**self.about, "transcript": transcript.fingerprint()})

    def held_out(self) -> list[int]:
        """Return which candidates aren't victims: those that no update of a recorded round was made from."""
        victims = {tensor_digest(example) for batch in self.inputs.values() for example in batch}
        return [i for i, example in enumerate(self.candidates) if tensor_digest(example) not in victims]

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

    def different(self, key: tuple[int, int]) -> tuple[list[int], list[int]]:
        """Return the first place of every example of an update, and how often it was used.

        Where the examples' own positions weren't recorded, inputs that are equal are one.

        Args:
            key: the update's round and client.

        Raises:
            KeyError: there is no such update.
        """
        names = self.rows[key].tolist() if key in self.rows else [tensor_digest(one) for one in self.inputs[key]]
        first: dict[int | bytes, int] = {}
        for i, name in enumerate(names):
            first.setdefault(name, i)
        uses = Counter(names)
        return list(first.values()), [uses[name] for name in first]

    def save(self, path: Path) -> None:
        """Write one safetensors file, sealed (see :mod:`fedaudit.utils.integrity`).

        Raises:
            BadInput: it can't be written.
        """
        tensors = {"candidates": self.candidates, "candidate_labels": self.candidate_labels}
        whole = {"owners": self.owners, "matched": self.matched, "values": self.values}
        tensors |= whole if len(self.owners) else {}
        own = {name: getattr(self, name) for name in ("coins", "shares", "persons", "homes", "candidate_persons")}
        tensors |= {name: t for name, t in own.items() if len(t)}
        for what, known in (
            ("inputs", self.inputs),
            ("labels", self.labels),
            ("rows", self.rows),
            ("members", self.members),
        ):
            tensors |= {f"{what}/{r}/{c}": value for (r, c), value in known.items()}
        for (r, c), (inputs, targets) in self.seen.items():
            tensors |= seen_tensors(r, c, inputs, targets, self.randomness.get((r, c)), self.starts.get((r, c), {}))
        try:
            save_sealed(path, tensors, self.about)
        except (OSError, SafetensorError, ValueError) as error:
            raise BadInput(f"can't write the ground truth to '{path}': {error}") from None

    @classmethod
    def load(cls, path: Path) -> Truth:
        """Read what :meth:`save` wrote.

        Raises:
            CorruptTranscript: the file is missing, truncated or something else.
            BadInput: its digest doesn't fit, or can't be checked with the key that there is.
        """
        about, tensors = _read(path)
        return truth_from(about, tensors, path)


def seen_tensors(
    index: int,
    client: int,
    inputs: Tensor,
    targets: Tensor,
    randomness: Tensor | None,
    start: Mapping[str, Tensor],
) -> dict[str, Tensor]:
    """Return by their names in a file what ``client`` used in round ``index``, as model and loss saw it."""
    known = {"inputs": inputs, "targets": targets, "randomness": randomness}
    known |= {f"start/{name}": value for name, value in start.items()}
    return {f"seen/{index}/{client}/{what}": value for what, value in known.items() if value is not None}


def truth_file(index: int, client: int) -> str:
    """Return the name of the file, in a folder of them, with what ``client`` used in round ``index``."""
    return f"round-{index:05d}-client-{client:05d}.safetensors"


def save_part(path: Path, identifier: str, tensors: Mapping[str, Tensor]) -> None:
    """Write one file of a folder of them, sealed, marked as belonging to the transcript of that identifier."""
    path.parent.mkdir(parents=True, exist_ok=True)
    save_sealed(path, tensors, {"transcript": identifier})


def truth_beside(folder: Path) -> Path | None:
    """Return where the truth of the transcript in ``folder`` lies, if it is there: a file, or a folder of them."""
    if (folder / FILE).exists():
        return folder / FILE
    files = [p.name for p in (folder / FOLDER).iterdir()] if (folder / FOLDER).is_dir() else []
    return folder / FOLDER if any(name == COINS or _OF_UPDATE.fullmatch(name) for name in files) else None


def load_truth(path: Path, transcript: Transcript) -> Truth:
    """Read the truth of a transcript, from a file or a folder of them, and check that it belongs to it.

    From a folder only what concerns the transcript's updates is kept. Examples as the model saw them are looked for
    among those that the recorder was given and all that it saw; in a large folder some thousands.
    """
    about: dict[str, Any] = {}
    tensors: dict[str, Tensor] = {}
    updates = {(r.index, u.client) for r in transcript.rounds for u in r.updates}
    needed, others = _files(path, updates)
    for file in (*needed, *others):
        if file in others and sum(len(t) for n, t in tensors.items() if n.endswith("/inputs")) > _MOST_CANDIDATES:
            break
        known, read = _read(file)
        if known.get("transcript") != transcript.id:
            raise CorruptTranscript(f"{file} is the ground truth of another transcript than '{transcript.name}'")
        about |= known
        tensors |= read
    given = tensors.pop("seen/candidates/inputs", None), tensors.pop("seen/candidates/targets", None)
    truth = truth_from({**about, "transcript": transcript.fingerprint()}, tensors, path)
    if not truth.inputs:
        truth = _decoded(truth, given, updates, transcript.task_info, path)
    if not truth.inputs and not len(truth.coins):
        raise BadInput(
            f"'{path}' has the truth of no update: none was captured while clients trained, so nothing can be checked"
        )
    check_belongs(truth, transcript, path)
    return truth


def _files(path: Path, updates: Collection[tuple[int, int]]) -> tuple[list[Path], list[Path]]:
    """Return the files of a truth that are read, and others that candidates are taken from."""
    if not path.is_dir():
        return [path], []
    own = [path / truth_file(*key) for key in sorted(updates)]
    needed = [p for p in (*own, path / COINS, path / CANDIDATES) if p.is_file()]
    return needed, sorted(p for p in path.iterdir() if _OF_UPDATE.fullmatch(p.name) and p not in own)


def _read(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    if not path.is_file():
        raise CorruptTranscript(f"no ground truth at {path}; without it findings can't be evaluated")
    try:
        check_file(path, TENSORS)
        about, tensors, _ = load_sealed(path, own=ABOUT, remedy=REMEDY, needed="a ground truth file")
    except (SafetensorError, OSError, TypeError, KeyError, ValueError, RecursionError) as error:
        raise CorruptTranscript(f"{path} is truncated or not a ground truth file ({error})") from None
    return about, tensors


def truth_from(about: dict[str, Any], tensors: Mapping[str, Tensor], path: Path) -> Truth:
    """Return the truth that stands in the tensors of a file, or of several."""
    kept: dict[str, dict[tuple[int, int], Tensor]] = {what: {} for what in _OF_UPDATES}
    known: dict[str, Any] = {}
    starts: dict[tuple[int, int], dict[str, Tensor]] = {}
    for name, value in tensors.items():
        place = _PLACE.fullmatch(name)
        if place and place[1] + place[4] == "seen/start" and place[5]:
            starts.setdefault((int(place[2]), int(place[3])), {})[place[5]] = value
        elif place and place[1] + place[4] in kept:
            kept[place[1] + place[4]][int(place[2]), int(place[3])] = value
        elif name in _WHOLE:
            known[name] = value
        else:
            raise CorruptTranscript(f"{path} is not a ground truth file ({name[:40]!r})")
    inputs, labels, rows, members, seen, targets, randomness = (kept[what] for what in _OF_UPDATES)
    if inputs.keys() != labels.keys() or seen.keys() != targets.keys():
        raise CorruptTranscript(f"{path} is not a ground truth file: there are inputs without labels")
    # Copied: arithmetic gives other bits where memory isn't aligned as it was in training, as in a file it may not be.
    both = {key: (value.clone(), targets[key].clone()) for key, value in seen.items()}
    nothing = {"candidates": torch.zeros(0), "candidate_labels": torch.zeros(0, dtype=torch.int64)}
    of_updates = {"rows": rows, "members": members, "seen": both, "randomness": randomness, "starts": starts}
    return Truth(inputs, labels, about=about, **{**nothing, **known, **of_updates})


def _decoded(
    truth: Truth,
    given: tuple[Tensor | None, Tensor | None],
    updates: Collection[tuple[int, int]],
    task_info: TaskInfo,
    path: Path,
) -> Truth:
    """Return the truth with examples as a data set has them, made of what model and loss saw."""
    own, others = {}, []
    for key, seen in truth.seen.items():
        where = f"{path}: round {key[0]}, client {key[1]}"
        examples = examples_of(*seen, task_info, where)
        if key in updates:
            check_cells(examples[0], task_info.columns, where)
            own[key] = examples
        else:
            others.append(examples)
    if not own:
        nothing = torch.zeros(0, *task_info.input_shape, dtype=task_info.example_kind.dtype)
        return dataclasses.replace(truth, candidates=nothing, seen={}, randomness={}, starts={})
    inputs, labels = (torch.cat([pair[i] for pair in (*own.values(), *others)]) for i in (0, 1))
    prints = task_info.example_kind.fingerprints(inputs)
    first = _first_of_each(prints)
    if given[0] is not None and given[1] is not None:
        known = examples_of(given[0], given[1], task_info, f"{path}: the candidates")
        again = task_info.example_kind.fingerprints(known[0])
        # of each that was used one is itself; what many have, such as a form that nobody filled in, stays as frequent
        itself = torch.isin(again, prints)
        itself[itself.clone()] = torch.isin(torch.nonzero(itself).flatten(), _first_of_each(again))
        first = torch.cat([first, len(inputs) + torch.nonzero(~itself).flatten()])
        inputs, labels = (torch.cat([a, b]) for a, b in zip((inputs, labels), known, strict=True))
    return dataclasses.replace(
        truth,
        inputs={key: pair[0] for key, pair in own.items()},
        labels={key: pair[1] for key, pair in own.items()},
        candidates=inputs[first],
        candidate_labels=labels[first],
        seen={key: truth.seen[key] for key in own},
        randomness={key: value for key, value in truth.randomness.items() if key in own},
        starts={key: value for key, value in truth.starts.items() if key in own},
    )


def examples_of(seen: Tensor, targets: Tensor, task_info: TaskInfo, where: str) -> tuple[Tensor, Tensor]:
    """Return examples and labels as a data set has them, of what model and loss see; ``where`` is for errors.

    A text's own tokens as its labels, as models of transformers take them, are those that follow.
    """
    if task_info.causal and seen.shape == targets.shape and bool(((targets == seen) | (targets == NOTHING)).all()):
        targets = nn.functional.pad(targets[:, 1:], (0, 1), value=NOTHING)
    inputs, labels = _examples(seen, task_info), _targets(targets, task_info)
    check_examples(inputs, labels, task_info, len(inputs) if inputs.ndim else 0, where)
    return inputs, labels


def unused_candidates(path: Path, transcript: Transcript) -> tuple[Tensor, Tensor] | None:
    """Return the candidates that a recorder was given, with labels, without those that any update of it used.

    None where none were given. ``path`` is the folder of the recording's truth.
    """
    if not (path / CANDIDATES).is_file():
        return None
    info = transcript.task_info
    given = _read(path / CANDIDATES)[1]
    inputs, labels = examples_of(
        given["seen/candidates/inputs"], given["seen/candidates/targets"], info, f"{path / CANDIDATES}"
    )
    used = used_in(path, info)
    free = torch.tensor([mark not in used for mark in info.example_kind.fingerprints(inputs).tolist()])
    return inputs[free], labels[free]


def used_in(path: Path, info: TaskInfo) -> set[int]:
    """Return the fingerprints of all that any recorded update used, also in rounds that aren't read."""
    used = set[int]()
    for file in sorted(p for p in path.iterdir() if _OF_UPDATE.fullmatch(p.name)):
        for name, seen in _read(file)[1].items():
            if name.startswith("seen/") and name.endswith("/inputs"):
                used |= set(info.example_kind.fingerprints(_examples(seen, info)).tolist())
    return used


def _first_of_each(hashes: Tensor) -> Tensor:
    """Return the positions at which each of (n,) hashes stands first."""
    known: dict[int, int] = {}
    for place, value in enumerate(hashes.tolist()):
        known.setdefault(value, place)
    return torch.tensor(list(known.values()))


def _examples(seen: Tensor, task_info: TaskInfo) -> Tensor:
    """Return examples as a data set holds them, of inputs as the model saw them; of texts all equally long."""
    if task_info.tokens is not None and seen.ndim == 2:
        texts, padding = of_one_length([seen.long()], task_info.input_shape[0]), task_info.tokens.padding
        seen = texts if padding is None else texts.where(texts != NOTHING, padding)
    examples = task_info.denormalise(seen.to(task_info.example_kind.dtype))
    low, high = task_info.example_kind.bounds or (None, None)
    return examples if low is None else examples.clamp(low, high)


def _targets(targets: Tensor, task_info: TaskInfo) -> Tensor:
    """Return targets as the transcript has labels: int64 (n,), labels or real values (n, k), or masks (n, *spatial)."""
    if task_info.causal:
        return of_one_length([targets.long()], task_info.input_shape[0])
    return task_info.task_kind.as_given(targets, task_info.target_shape)


def typical(truth: Truth, count: int, label: int | None = None) -> tuple[Tensor, Tensor]:
    """Return the ``count`` candidates of middling distance to the mean of all, victims apart, and their labels.

    Only those of the class ``label`` count, where one is given and has that many.
    """
    rows = truth.held_out()
    rows = rows if len(rows) >= count else list(range(len(truth.candidates)))
    own = [i for i in rows if label is not None and int(truth.candidate_labels[i]) == label]
    rows = own if len(own) >= count else rows
    others = truth.candidates[rows].flatten(1).double()
    order = (others - others.mean(dim=0)).square().sum(dim=1).argsort().tolist()
    middle = max(0, len(order) // 2 - count // 2)
    chosen = [rows[order[(middle + i) % len(order)]] for i in range(count)]
    return truth.candidates[chosen], truth.candidate_labels[chosen]


def save_recording(transcript: Transcript, truth: Truth, folder: Path) -> None:
    """Write the transcript to ``folder``, and its truth, marked as its own; all appears at once, or nothing changes.

    Raises:
        BadInput: the folder is in use or can't be written.
    """
    check_new(folder)
    about = {**truth.about, "transcript": transcript.id}
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with temporary_folder(folder.parent, f".{folder.name}-temporary-") as draft:
            transcript.save(draft / "whole")
            dataclasses.replace(truth, about=about).save(draft / "whole" / FILE)
            (draft / "whole").replace(folder)
    except OSError as error:
        raise BadInput(f"can't write the transcript to '{folder}': {error.strerror or error}") from None


def check_belongs(truth: Truth, transcript: Transcript, path: Path) -> None:
    """Check that ``truth``, read from ``path``, is whole, finite, of the right shapes, and of ``transcript``."""
    if truth.about.get("transcript") != transcript.fingerprint():
        raise CorruptTranscript(f"{path} is the ground truth of another transcript than '{transcript.name}'")
    task_info = transcript.task_info
    updates = transcript.sent.truth_keys(transcript.rounds)
    parts = {
        f"round {r}, client {c}": (truth.inputs.get((r, c)), truth.labels.get((r, c)), n)
        for (r, c), n in updates.items()
    }
    for key, rows in truth.rows.items():
        if rows.shape != (updates.get(key),) or rows.dtype != torch.int64 or not 0 <= int(rows.min()) < 2**31:
            raise CorruptTranscript(f"{path}: round {key[0]}, client {key[1]}: the rows are none of this update's")
    for key, members in truth.members.items():
        if members.shape != (updates.get(key),) or members.dtype != torch.int64 or int(members.min()) < 0:
            raise CorruptTranscript(f"{path}: round {key[0]}, client {key[1]}: the members are none of this sum's")
    parts["the candidates"] = (truth.candidates, truth.candidate_labels, len(truth.candidates))
    if transcript.recording:  # of which perhaps not every client's training was captured
        parts = {what: part for what, part in parts.items() if part[0] is not None and len(part[0])}
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
    for name in ("persons", "homes"):
        known_of = getattr(truth, name)
        if len(known_of) and (known_of.shape != (n,) or known_of.dtype != torch.int64):
            raise CorruptTranscript(f"{path}: what it says of the {name} of {n} records are none of theirs")
    m = len(transcript.canaries) if transcript.canaries else 0
    unknown = transcript.recording and not len(truth.coins)
    if (truth.coins.shape != (m,) and not unknown) or truth.coins.dtype != torch.bool:
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
