"""Bad transcripts: damaged, untrue or hostile files are told in one line; exit code 2, nothing on standard output.

Here they are sealed again, as somebody who means harm can do: that changed ones are refused by the seal alone is in
test_integrity.py.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.conftest import Command, refused
from tests.transcript.integrity_cases import changed_index, changed_tensors, seal_again

UPDATE = ("messages", 0)
TRAINING = {"learning_rate": 0.01, "local_steps": 1, "batch_sizes": [1]}
ROUND = "round-00000.json"
INDEX: list[tuple[str, tuple[str | int, ...], Any, str]] = [
    ("other format", ("format",), "tar", "format is 'tar', not 'fedaudit-transcript'"),
    ("version 4", ("version",), 4, "version 4 can't be read by this fedaudit"),
    ("version 2", ("version",), 2, "convert it with 'fedaudit convert OLD NEW'"),
    ("unknown key", ("x",), 1, "unknown key 'x'"),
    ("rounds of a vertical federation", ("parts",), ["vertical"], "vertical.safetensors is missing"),
    ("no updates", ("messages",), [], "and an update in every one"),
    ("name that leaves the folder", ("name",), "../x", "the name '../x' can't be used"),
    ("unknown model", ("task", "model"), "lenett", "unknown model 'lenett'"),
    ("own model", ("task", "model"), "custom", "is of a user's own model"),
    ("own loss", ("task", "loss"), "custom", "is of a user's own loss"),
    ("loss of another task", ("task", "loss"), "mse", "the loss 'mse' doesn't fit"),
    ("huge width", ("task", "width"), 10**9, "width is 1000000000"),
    ("other width", ("task", "width"), 3, "tensor 'conv1.bias' has shape (12,), the model needs (3,)"),
    ("other kind", ("task", "kind"), "table", "table data have (columns,)"),
    ("negative size", ("task", "input_shape"), [-1, 8, 8], "input_shape is (-1, 8, 8)"),
    ("absurd size", ("task", "input_shape"), [1, 10**9, 10**9], "input_shape is"),
    ("other size", ("task", "input_shape"), [1, 8, 16], "tensor 'fc.weight' has shape"),
    ("absurd classes", ("task", "num_classes"), 10**12, "num_classes is"),
    ("std 0", ("task", "std"), [0.0], "every std above 0"),
    ("mean NaN", ("task", "mean"), [float("nan")], "must be finite"),
    ("too many means", ("task", "mean"), [0.1, 0.2], "mean has 2 values and std 1; both must have 1"),
    ("unknown key in task", ("task", "x"), 1, "unknown key 'x'"),
    ("path traversal", (*UPDATE, "file"), "../../etc/passwd", "isn't a plain one beside it"),
    ("absolute path", (*UPDATE, "file"), "/etc/passwd", "isn't a plain one beside it"),
    ("NUL in path", (*UPDATE, "file"), "a\0b", "isn't a plain one beside it"),
    ("endless path", (*UPDATE, "file"), "x" * 5000, "isn't a plain one beside it"),
    ("missing file", (*UPDATE, "file"), "nowhere.safetensors", "nowhere.safetensors is missing"),
    ("the index as tensors", (*UPDATE, "file"), "index.json", "its digest isn't the one in the index"),
    ("the truth as an update", (*UPDATE, "file"), "truth.safetensors", "the model has no tensor 'candidate_labels'"),
    ("negative client", (*UPDATE, "client"), -1, "client: -1 isn't allowed"),
    ("client twice", (*UPDATE, "client"), 1, "a client sent two updates in round 0"),
    ("client true", (*UPDATE, "client"), True, "client: True isn't allowed"),
    ("unknown form", (*UPDATE, "form"), "x", "form: 'x' isn't allowed"),
    ("two kinds", (*UPDATE, "form"), "update", "a federation has one kind"),
    ("no examples", (*UPDATE, "num_examples"), 0, "num_examples: 0 isn't allowed"),
    ("endless examples", (*UPDATE, "num_examples"), 10**12, "num_examples: 1000000000000 isn't allowed"),
    ("examples against batches", (*UPDATE, "num_examples"), 2, "2 examples, but 1 examples in its batches"),
    ("label too large", (*UPDATE, "labels"), [10], "a label is outside of 0..9"),
    ("label negative", (*UPDATE, "labels"), [-1], "a label is outside of 0..9"),
    ("label huge", (*UPDATE, "labels"), [10**30], "a label is outside of 0..9"),
    ("labels too many", (*UPDATE, "labels"), [1, 2], "2 labels for 1 examples"),
    ("training incomplete", (*UPDATE, "training"), {}, "training.learning_rate' is missing"),
    ("learning rate NaN", (*UPDATE, "training"), {**TRAINING, "learning_rate": float("nan")}, "learning rate is nan"),
    (
        "batch sizes too many",
        (*UPDATE, "training"),
        {**TRAINING, "batch_sizes": [1, 1]},
        "1 local steps lists 2 batch sizes",
    ),
    ("batch of nothing", (*UPDATE, "training"), {**TRAINING, "batch_sizes": [0]}, "one example or more"),
    ("training unknown key", (*UPDATE, "training"), {**TRAINING, "x": 1}, "unknown key 'x'"),
    ("negative round", ("index",), -1, "index: -1 isn't allowed"),
    ("another round", ("index",), 7, "is the index of round 7"),
    ("rejects a stranger", ("rejected",), {"9": "x"}, "rejects client 9, who sent nothing"),
]


@pytest.mark.parametrize(("place", "value", "fragment"), [pytest.param(*row[1:], id=row[0]) for row in INDEX])
def test_index(
    place: tuple[str | int, ...], value: Any, fragment: str, recorded: Path, tmp_path: Path, command: Command
) -> None:
    folder = Path(shutil.copytree(recorded, tmp_path / "transcript"))
    own = json.loads((folder / ROUND).read_text())
    changed_index(folder / (ROUND if place[0] in own else "index.json"), place, value)
    seal_again(folder)
    refused(command("attack", folder, "--attack", "invg", "--out", tmp_path / "out"), fragment)


FIRST, GLOBAL, CONV = (
    "round-00000-client-00000.safetensors",
    "round-00000-global.safetensors",
    "conv1.weight",
)


def tensors(name: str, change: Callable[[dict[str, Tensor]], Any]) -> Callable[[Path], None]:
    """Return what rewrites the safetensors file ``name`` of a folder with its tensors changed."""

    def rewrite(folder: Path) -> None:
        if name == TRUTH:
            changed_tensors(folder / name, change)
            return
        content = load_file(folder / name)
        change(content)
        save_file(content, folder / name)

    return rewrite


def link(folder: Path) -> None:
    (folder / FIRST).rename(folder.parent / "elsewhere")
    (folder / FIRST).symlink_to(folder.parent / "elsewhere")


def index_folder(folder: Path) -> None:
    (folder / "index.json").unlink()
    (folder / "index.json").mkdir()


TRUTH, PIXELS, LABELS = "truth.safetensors", "inputs/0/0", "labels/0/0"
Mutation = Callable[[Path], Any]
MUTATIONS: list[tuple[str, Mutation, str]] = [
    ("index of half a line", lambda f: (f / "index.json").write_text("{"), "Invalid JSON"),
    ("index is a list", lambda f: (f / "index.json").write_text("[]"), "not a transcript's index"),
    ("index is binary", lambda f: (f / "index.json").write_bytes(b"\xff\xfe"), "not a transcript's index"),
    ("index is deep", lambda f: (f / "index.json").write_text("[" * 100_000), "Invalid JSON"),
    ("index is a folder", index_folder, "no transcript in"),
    ("update missing", lambda f: (f / FIRST).unlink(), f"{FIRST} is missing"),
    ("weights missing", lambda f: (f / GLOBAL).unlink(), f"{GLOBAL} is missing"),
    ("update truncated", lambda f: os.truncate(f / FIRST, 3000), "is truncated or not a safetensors file"),
    ("update empty", lambda f: os.truncate(f / FIRST, 0), "is truncated or not a safetensors file"),
    ("update linked", link, "isn't a plain one beside it"),
    ("wrong shape", tensors(FIRST, lambda t: t.update({CONV: torch.zeros(3)})), "has shape (3,)"),
    ("NaN", tensors(FIRST, lambda t: t[CONV].fill_(float("nan"))), "has NaN or infinite values"),
    ("infinite weights", tensors(GLOBAL, lambda t: t["fc.bias"].fill_(float("inf"))), "have NaN or infinite values"),
    ("tensor missing", tensors(FIRST, lambda t: t.pop(CONV)), f"tensor '{CONV}' is missing"),
    ("tensor too many", tensors(FIRST, lambda t: t.update(x=torch.zeros(1))), "the model has no tensor 'x'"),
    ("double precision", tensors(FIRST, lambda t: t.update({CONV: t[CONV].double()})), "is torch.float64"),
    ("whole numbers", tensors(FIRST, lambda t: t.update({CONV: t[CONV].long()})), "is torch.int64"),
    ("another truth", tensors(FIRST, lambda t: t[CONV].mul_(2)), "is the ground truth of another transcript"),
    ("truth truncated", lambda f: os.truncate(f / TRUTH, 5000), "was changed or damaged after it was written"),
    ("truth misshapen", tensors(TRUTH, lambda t: t.update({PIXELS: torch.zeros(1, 3, 4, 4)})), "expected 1 of shape"),
    ("truth of two", tensors(TRUTH, lambda t: t.update({PIXELS: torch.zeros(2, 1, 8, 8)})), "expected 1 of shape"),
    ("truth missing", tensors(TRUTH, lambda t: (t.pop(PIXELS), t.pop(LABELS))), "has nothing on round 0, client 0"),
    ("truth without label", tensors(TRUTH, lambda t: t.pop(LABELS)), "not a ground truth file"),
    ("truth NaN", tensors(TRUTH, lambda t: t[PIXELS].fill_(float("nan"))), "must be finite float32"),
    ("truth too bright", tensors(TRUTH, lambda t: t[PIXELS].fill_(255)), "a pixel lies outside of [0, 1]"),
    ("truth's label", tensors(TRUTH, lambda t: t[LABELS].fill_(77)), "the labels are none of this model's"),
    ("no candidates", tensors(TRUTH, lambda t: t.update(candidates=torch.zeros(0, 1, 8, 8))), "the candidates"),
]


@pytest.mark.parametrize(("mutate", "fragment"), [pytest.param(*row[1:], id=row[0]) for row in MUTATIONS])
def test_damaged_files(mutate: Mutation, fragment: str, recorded: Path, tmp_path: Path, command: Command) -> None:
    folder = tmp_path / "transcript"
    shutil.copytree(recorded, folder)
    mutate(folder)
    with contextlib.suppress(OSError, ValueError, TypeError, RecursionError):  # where the index is none
        seal_again(folder)
    refused(command("attack", folder, "--attack", "invg", "--out", tmp_path / "out"), fragment)


def test_a_limit_needs_the_truth(recorded: Path, tmp_path: Path, command: Command) -> None:
    shutil.copytree(recorded, tmp_path / "t", ignore=shutil.ignore_patterns(TRUTH))
    outcome = command("attack", tmp_path / "t", "--attack", "invg", "--fail-above", "psnr=3", "--out", tmp_path / "out")
    refused(outcome, "need the ground truth")
