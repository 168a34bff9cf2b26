"""A folder of the boosters that clients of a real federation sent, read as a recording."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor

from fedaudit.data import pairs_of
from fedaudit.modalities import Column, number_columns
from fedaudit.task import LOSSES, TaskInfo
from fedaudit.transcript import Transcript, Truth, save_recording
from fedaudit.utils import BOOSTER, BadInput, WorkerDied, explain, keep_workers, read_bytes, read_yaml, run_tasks
from fedaudit_trees.growing import as_json, is_json
from fedaudit_trees.model import MODEL, OBJECTIVES, Booster, Tree, TreeEnsemble, read_booster, write_booster
from fedaudit_trees.record import HELD, TreeMessage, TreeSpec, tree_record

FACTS = f"{TreeSpec.kind}.yaml"  # beside boosters as they travelled
_MESSAGE = re.compile(r"round-(\d{1,5})-client-(.{1,200})\.(json|ubj)")
_ROWS = re.compile(r"rows-(.{1,200})\.(npz|safetensors|csv)")
_OTHERS = re.compile(r"candidates\.(npz|safetensors|csv)")
_MOST_ROWS = 10_000_000
_OFF = 0.02  # relative: how far the step that a tree's sums tell may be from the one that was given

Floats = NDArray[np.float64]
Rows = tuple[Tensor, Tensor]


class ColumnFacts(BaseModel):
    """A column as ``trees.yaml`` has it: a :class:`Column` whose positions follow from the columns before it."""

    model_config = ConfigDict(extra="forbid")
    name: str
    categories: tuple[str, ...] = ()
    codes: tuple[float, ...] = ()
    mean: float | None = None
    std: Annotated[float, Field(gt=0)] | None = None


class BoosterFacts(BaseModel):
    """What everybody in a federation knows of its trees: ``trees.yaml``.

    Attributes:
        learning_rate: η by which a client's leaves are scaled, in the end.
        trees: as in a scenario; ``observer`` counts the clients in the order of their names.
        columns: in the order in which they stand in a row; none: all are numbers.
    """

    model_config = ConfigDict(extra="forbid")
    name: str = "federation"
    learning_rate: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    trees: TreeSpec = TreeSpec()
    columns: tuple[ColumnFacts, ...] = ()


def read_boosters(folder: Path) -> tuple[Transcript, Truth | None]:
    """Read a folder of boosters as they travelled, and what they were grown on, where that lies beside them.

    A message is the file ``round-ROUND-client-NAME.json`` or ``….ubj``, as ``Booster.save_raw`` gives it (UBJSON is
    read by xgboost); with the protocol ``bagging`` it holds the client's new trees, with ``cyclic`` the whole model.
    The rows of a client, as it gave them to xgboost, are in ``rows-NAME.npz`` (``inputs`` (n, d), ``labels`` (n,)), or
    in a .csv with the target last; other people's in ``candidates.npz``. They are the truth; the observer's are also
    its knowledge. In the transcript numbers are standardised, rows and splits alike, by the columns' mean and std, or
    where these aren't given by those of all splits.
    """
    facts = _facts(folder)
    files = {path.name: path for path in sorted(folder.iterdir())}
    found = {name: (int(m[1]), m[2]) for name in files if (m := _MESSAGE.fullmatch(name))}
    names = sorted({client for _, client in found.values()})
    if not found:
        raise BadInput(f"'{folder}' holds no message: name them round-00000-client-NAME.json, or .ubj")
    if facts.trees.protocol == "histogram" or facts.trees.observer >= len(names):
        raise BadInput(
            f"{folder / FACTS}: trees are of the protocol bagging or cyclic, and the observer is one of the "
            f"{len(names)} clients that sent a message, from 0"
        )
    boosters: dict[tuple[int, int], Booster] = {}
    with keep_workers():
        for name, (index, client) in found.items():
            key = index, names.index(client)
            if key in boosters:
                raise BadInput(f"{folder}: client {client} has two messages of round {index}")
            boosters[key] = read_booster(_json(_bytes(files[name]), name), name)
    boosters = dict(sorted(boosters.items()))
    if facts.trees.protocol == "cyclic":
        if len({index for index, _ in boosters}) < len(boosters):
            raise BadInput(
                f"{folder}: several clients send the whole model in a round, each with trees of its own; read are "
                "cyclic, of one client a round, and bagging, where each sends its new trees alone"
            )
        boosters = _added(boosters)
    first = next(iter(boosters.values()))
    if any((b.objective, b.features) != (first.objective, first.features) or not b.trees for b in boosters.values()):
        raise BadInput(f"{folder}: its messages differ in objective or number of features, or have no new tree")
    for (index, client), booster in boosters.items():
        _check_step(booster, facts, f"{folder}: round {index}, client {names[client]}")
    columns, guessed = _columns(facts, boosters.values(), first.features, folder)
    notes = (f"mean and std of {len(guessed)} columns aren't given: they are those of the splits",) * bool(guessed)
    boosters = {key: _standardised(booster, columns) for key, booster in boosters.items()}
    rows = {m[1]: path for name, path in files.items() if (m := _ROWS.fullmatch(name))}
    if len(rows) < sum(bool(_ROWS.fullmatch(name)) for name in files):
        raise BadInput(f"{folder}: a client's rows are in one file, .npz, .safetensors or .csv, and here are several")
    if unknown := sorted(set(rows) - set(names)):
        raise BadInput(f"{rows[unknown[0]]} is of no client that sent a message: {', '.join(names[:5])}")
    classes = 2 if first.objective == OBJECTIVES[0] else None
    held = {names.index(name): _rows(path, columns, classes) for name, path in rows.items()}
    others = [_rows(path, columns, classes) for name, path in files.items() if _OTHERS.fullmatch(name)]
    transcript = _transcript(facts, names, boosters, columns, held, notes)
    return transcript, _truth(held, others, transcript, guessed) if held else None


def convert_boosters(folder: Path, out: Path) -> tuple[str, ...]:
    """Write what :func:`read_boosters` reads to ``out``, a new folder that ``fedaudit attack`` takes; return notes."""
    transcript, truth = read_boosters(folder)
    if truth is None:
        transcript.save(out)
        return (*transcript.notes, "no rows lie beside the boosters, so findings can't be evaluated")
    save_recording(transcript, truth, out)
    return transcript.notes


def _facts(folder: Path) -> BoosterFacts:
    where = folder / FACTS
    values = read_yaml(where, f"'{where}'")
    try:
        return BoosterFacts.model_validate(values)
    except ValidationError as error:
        raise BadInput(f"{where}: {explain(error, BoosterFacts)}") from None


def _bytes(path: Path) -> bytes:
    try:
        return read_bytes(path, BOOSTER)
    except OSError as error:
        raise BadInput(f"can't read '{path}': {error.strerror or error}") from None


def _json(data: bytes, name: str) -> bytes:
    """Return a message as JSON. UBJSON is read in a process of its own, for it comes from others, and may crash it."""
    if is_json(data):
        return data
    ((_, read),) = run_tasks(partial(as_json, where=name), [data], workers=1)
    if isinstance(read, WorkerDied):
        raise BadInput(f"{name}: xgboost can't read it, and ends while it tries") from None
    if isinstance(read, BaseException):
        raise read
    return read


def _added(boosters: dict[tuple[int, int], Booster]) -> dict[tuple[int, int], Booster]:
    """Return of each whole model the trees that came on top of the one before it."""
    known, found = 0, {}
    for key, booster in boosters.items():
        found[key] = replace(booster, trees=booster.trees[known:])
        known = len(booster.trees)
    return found


def _check_step(booster: Booster, facts: BoosterFacts, where: str) -> None:
    """Refuse a learning rate η that the trees contradict.

    A node's G is the sum of its leaves' G; leaves' weights are scaled by η, those of inner nodes aren't.
    """
    below, own, penalty = list[float](), list[float](), facts.trees.reg_lambda
    for tree in booster.trees:
        if tree.cover is None or tree.weights is None or facts.trees.noise:
            continue
        with np.errstate(all="ignore"):
            sums = tree.weights * (tree.cover + penalty)
        if not np.isfinite(sums).all():
            raise BadInput(f"{where}: a weight is infinite, or too large for a tree")
        scaled = np.where(tree.left < 0, sums, 0.0)
        for node in reversed(np.flatnonzero(tree.left >= 0)):
            scaled[node] = scaled[tree.left[node]] + scaled[tree.right[node]]
        # where gradients cancel, as at the root after a base score that xgboost estimates, rounding alone is left
        inner = (tree.left >= 0) & (np.abs(sums) > 1e-3 * np.abs(sums).max())
        below += scaled[inner].tolist()
        own += sums[inner].tolist()
    scale = float(np.dot(own, own))
    told = float(np.dot(below, own)) / scale if scale else facts.learning_rate
    if not abs(told / facts.learning_rate - 1) <= _OFF:  # nor where it is none
        raise BadInput(
            f"{where}: learning_rate {facts.learning_rate:g} contradicts the trees, whose leaves are scaled by "
            f"{told:.3g} (with reg_lambda {penalty:g}); NVFlare's bagging divides the job's by the clients"
        )


def _columns(
    facts: BoosterFacts, boosters: Iterable[Booster], features: int, folder: Path
) -> tuple[tuple[Column, ...], list[str]]:
    """Return the columns, of which numbers have a mean and std, and the names of those where these are the splits'."""
    known = facts.columns or tuple(ColumnFacts(name=c.name) for c in number_columns(features))
    trees = [tree for booster in boosters for tree in booster.trees]
    columns, place, guessed = list[Column](), 0, list[str]()
    for column in known:
        width = len(column.categories) if column.categories and not column.codes else 1
        positions = tuple(range(place, place + width))
        place += width
        if column.categories:
            columns.append(Column(column.name, "categorical", positions, column.categories, codes=column.codes))
            continue
        mean, std = column.mean, column.std
        if mean is None or std is None:
            splits = _splits(trees, positions[0])
            guessed.append(column.name)
            mean = float(splits.mean()) if len(splits) else 0.0
            std = float(splits.std()) or max(abs(mean), 1.0) if len(splits) else 1.0
        columns.append(Column(column.name, "numeric", positions, mean=mean, std=std))
    if place != features:
        raise BadInput(f"{folder / FACTS}: its columns have {place} positions, and the trees {features} features")
    return tuple(columns), guessed


def _splits(trees: Sequence[Tree], feature: int) -> Floats:
    return np.concatenate([t.value[(t.left >= 0) & (t.feature == feature)] for t in trees]).astype(np.float64)


def _scale(columns: Sequence[Column]) -> tuple[Floats, Floats]:
    """Return (d,) the mean and std of every position; 0 and 1 of categories."""
    numeric = {c.positions[0]: (c.mean, c.std) for c in columns if c.kind == "numeric"}
    pairs = [numeric.get(i, (0.0, 1.0)) for i in range(sum(len(c.positions) for c in columns))]
    mean, std = np.array(pairs, dtype=np.float64).T
    return mean, std


def _standardised(booster: Booster, columns: Sequence[Column]) -> Booster:
    """Return the booster on standardised rows: what was equal to a split is, as both are rounded alike."""
    mean, std = _scale(columns)
    trees = []
    for tree in booster.trees:
        moved = ((tree.value.astype(np.float64) - mean[tree.feature]) / std[tree.feature]).astype(np.float32)
        trees.append(replace(tree, value=np.where(tree.left < 0, tree.value, moved)))
    return replace(booster, trees=tuple(trees))


def _rows(path: Path, columns: Sequence[Column], classes: int | None) -> Rows:
    """Return rows (n, d), standardised, and labels: (n,) classes, or (n, 1) numbers."""
    inputs, labels = pairs_of(path)
    mean, std = _scale(columns)
    if inputs.ndim != 2 or inputs.shape[1] != len(mean) or labels.numel() != len(inputs):
        raise BadInput(f"{path}: inputs {tuple(inputs.shape)}, labels {tuple(labels.shape)}; rows have {len(mean)}")
    x = (inputs.float().double().numpy() - mean) / std
    if not np.isfinite(x).all():
        raise BadInput(f"{path}: a value is missing or infinite; leave these rows out, or fill them as clients did")
    y = labels.flatten()
    if classes and not bool(((y == 0) | (y == 1)).all()):
        raise BadInput(f"{path}: its labels aren't the classes 0 and 1")
    return torch.from_numpy(x).float(), y.long() if classes else y.float()[:, None]


def _transcript(
    facts: BoosterFacts,
    names: Sequence[str],
    boosters: dict[tuple[int, int], Booster],
    columns: tuple[Column, ...],
    held: dict[int, Rows],
    notes: tuple[str, ...],
) -> Transcript:
    classes = 2 if next(iter(boosters.values())).objective == OBJECTIVES[0] else None
    d, loss = sum(len(c.positions) for c in columns), "cross-entropy" if classes else "mse"
    info = TaskInfo(
        model=MODEL, width=None, batch_norm="eval", loss=loss, kind="table", input_shape=(d,), num_classes=classes,
        mean=(0.0,), std=(1.0,), columns=columns,
    )  # fmt: skip
    counts = {client: len(own[0]) for client, own in held.items()}
    messages, cover = [], False
    for (index, client), booster in boosters.items():
        tree = booster.trees[0].with_cover(facts.learning_rate, facts.trees.reg_lambda)
        cover |= tree.cover is not None
        if client not in counts:
            p = 1 / (1 + np.exp(-booster.base)) if classes else 0.0
            each = p * (1 - p) if classes else 1.0
            total = 1.0 if tree.cover is None else float(tree.cover[0]) / each if each else math.inf
            if not total <= _MOST_ROWS:
                raise BadInput(f"client {names[client]}: its trees have cover for more than {_MOST_ROWS:,} rows")
            counts[client] = max(1, round(total))
        messages.append(TreeMessage(index, client, write_booster(booster), counts[client]))
    seen = {"cover": cover, "per_round": max(len(booster.trees) for booster in boosters.values())}
    record = tree_record(facts.trees.model_copy(update=seen), facts.learning_rate, len(names), messages)
    observer = held.get(facts.trees.observer)
    log = {} if observer is None else dict(zip(HELD, observer, strict=True))
    digest = hashlib.sha256(b"\n".join(m.model for m in messages)).hexdigest()[:32]
    made = Transcript(
        facts.name, info, TreeEnsemble(info.outputs), LOSSES[loss], [], log, clients=dict(enumerate(names)),
        notes=notes, recording=digest, sent=record,
    )  # fmt: skip
    made.check()
    return made


def _truth(held: dict[int, Rows], others: Sequence[Rows], transcript: Transcript, guessed: list[str]) -> Truth:
    """Return the truth: client c's rows under (0, c), all rows as candidates, and columns whose std is ``guessed``."""
    everybody = [*held.values(), *others]
    candidates, targets = (torch.cat([pair[i] for pair in everybody]) for i in (0, 1))
    inputs, labels = ({(0, client): own[i] for client, own in sorted(held.items())} for i in (0, 1))
    about = {"transcript": transcript.fingerprint(), "std_guessed": guessed}
    return Truth(inputs, labels, candidates, targets, about, {key: torch.arange(len(x)) for key, x in inputs.items()})
