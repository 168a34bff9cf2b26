"""Seven models as newcomers write them: recorded in a loop of their own, attacked from the command line, audited."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from html import unescape
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor

import fedaudit
from fedaudit.attacks.base import INSTEAD
from tests.conftest import Command, core, refused

FOLDER = Path(__file__).parent / "newcomers"
CLIENTS, KNOWN = 4, 16  # clients of one example each; examples among which these must be told


@dataclass(frozen=True)
class Case:
    """What comes of a newcomer's model.

    Attributes:
        attack: as the command line takes it.
        kind: of its finding.
        verdict: that it ends in.
        says: a part of the verdict's text.
        other: an attack that isn't for such a model.
        why: as its refusal says.
    """

    attack: str
    kind: str
    verdict: str
    says: str
    other: str
    why: str


INVG = "invg --set iterations=200"
BRIEF = "invg --set iterations=10"  # too little for these two: what is asked is that it runs, and claims nothing
CASES = {
    "multi_label": Case("labels", "label-sets", "inferred", "average precision 1,", "tableak", "these are images"),
    "unet": Case(BRIEF, "images", "inconclusive", "0 of 4 images came out", "labels", "this model predicts masks"),
    "volume": Case(INVG, "images", "recovered", "4 of 4 volumes came out", "gias", "these are volumes"),
    "ecg": Case(INVG, "images", "recovered", "signals came out visibly", "r-gap", "these are signals"),
    "regression": Case("exact-linear-rows", "rows", "recovered", "rows", "labels", "this model predicts real values"),
    "lstm": Case(BRIEF, "images", "inconclusive", "0 of 4 signals came out", "r-gap", "these are signals"),
    "two_inputs": Case(
        "exact-linear", "images", "recovered", "4 of 4 examples came out", "agic-plus", "several inputs"
    ),
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder in which a newcomer works, and whose programs can be imported."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    sys.modules.pop("model", None)
    yield tmp_path
    sys.modules.pop("model", None)


def written(name: str, folder: Path) -> Any:
    """Return the newcomer's program, as ``model.py``."""
    (folder / "model.py").write_text((FOLDER / f"{name}.py").read_text())
    importlib.invalidate_caches()
    return importlib.import_module("model")


def record(model: Any) -> None:
    """Train clients on one example each by one step of SGD, and record it, as docs/how-to/your-own-loop.md says."""
    inputs, targets = model.data()
    parts: tuple[Tensor, ...] = inputs if isinstance(inputs, tuple) else (inputs,)
    weights = model.Net().state_dict()
    with fedaudit.Recorder("recording") as recorder, recorder.round(weights):
        for client in range(CLIENTS):
            local, rows = model.Net(), slice(client, client + 1)
            with recorder.capture() as seen:
                optimiser = torch.optim.SGD(local.parameters(), lr=0.1)
                model.loss(local(*(part[rows] for part in parts)), targets[rows]).backward()
                optimiser.step()
            recorder.update(f"hospital {client}", local.state_dict(), seen, num_examples=1)
        others = tuple(part[CLIENTS:KNOWN] for part in parts)
        recorder.candidates(others if len(others) > 1 else others[0], targets[CLIENTS:KNOWN])


@pytest.mark.slow
@pytest.mark.parametrize("name", core(CASES, "regression", "lstm", "two_inputs", "volume", "ecg"))
def test_a_model_in_a_loop_of_one_s_own_gives_a_report_or_a_line(name: str, folder: Path, command: Command) -> None:
    case = CASES[name]
    record(written(name, folder))
    words = "attack recording --model model:Net --no-controls --workers 1 --attack"
    outcome = command(*f"{words} {case.attack} --out out".split())
    assert outcome.code in (0, None), outcome
    result = json.loads(Path("out/results.json").read_text())
    (federation,), (summary,) = result["federations"], result["summaries"]
    assert federation["recording"]["facts"] == "verified"
    assert (summary["kind"], summary["verdict"]) == (case.kind, case.verdict)
    assert case.says in summary["verdict_text"]
    assert summary["headline"] in " ".join(outcome.out.split())
    assert summary["headline"] in unescape(Path("out/report.html").read_text())
    assert [finding["status"] for finding in result["findings"]] == ["done"] * CLIENTS
    for picture in Path("out/images").glob("*.png"):
        assert len(Image.open(picture).convert("L").getcolors() or ()) > 1, picture  # something is drawn
    assert len(list(Path("out/images").glob("*.png"))) == (2 * CLIENTS if case.kind == "images" else 0)

    command(*f"{words} {case.other} --out no".split())
    (summary,) = json.loads(Path("no/results.json").read_text())["summaries"]
    assert summary["verdict"] == "not applicable"
    assert case.why in summary["verdict_text"]
    assert summary["verdict_text"].endswith(INSTEAD)
    assert "\n" not in summary["verdict_text"]


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_model_and_its_data_are_audited_from_python(name: str, folder: Path) -> None:
    case, model = CASES[name], written(name, folder)
    clients = 2 * CLIENTS if case.kind == "label-sets" else CLIENTS  # of updates, of which four may be luck
    attack, _, iterations = case.attack.partition(" --set iterations=")
    finished = fedaudit.audit(
        model=model.Net(),
        data=model.data(),
        kind=getattr(model, "kind", None),
        loss=model.loss,
        federations=[{"name": "hospitals", "clients": clients, "examples": clients, "batch_size": 1}],
        attacks=[{"name": attack, "iterations": int(iterations)} if iterations else attack],
        out="out",
        progress=False,
    )
    (summary,) = finished.result.summaries
    assert (summary.kind, summary.verdict) == (case.kind, case.verdict)
    assert summary.headline in unescape(Path("out/report.html").read_text())
    assert finished.result.data.summary.count("given by the caller") == 1


@pytest.mark.parametrize(
    "words",
    [
        "audit --model model.py:Net",
        "audit model.py",
        "audit --set model.name=model:Net",
        "init s.yaml -y --model model:Net",
    ],
)
def test_who_looks_for_his_module_in_the_wrong_place_is_told_where_it_goes(
    words: str, folder: Path, command: Command
) -> None:
    (folder / "model.py").write_text("class Net: ...\n")
    refused(command(*words.split()), "fedaudit attack RECORDING --model MODULE:NAME: docs/how-to/own-model.md")
