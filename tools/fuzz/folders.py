"""What is fuzzed of whole folders: examples with a table or masks, boosters, NVFlare jobs, several tensors."""

from __future__ import annotations

import contextlib
import copy
import csv
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor, nn

import fedaudit
from fedaudit.adapters.nvflare.job import is_job, read_job
from fedaudit.data import folder_data, load_dataset
from fedaudit.modalities.packed import Packing
from fedaudit.models import adapters_names
from fedaudit.pipeline.ledger import Question, of_filters
from fedaudit.report.ledger import answers, rows
from fedaudit.transcript.transcript import Transcript
from fedaudit.transcript.truth import FOLDER, load_truth
from fedaudit.utils import plain_yaml
from fedaudit_trees.boosters import read_boosters
from tests.transcript.integrity_cases import seal_again
from tests.trees.tree_cases import model as boosted_model
from tests.trees.tree_cases import stump
from tools.fuzz.base import Finding, Target
from tools.fuzz.strategies import Draw, changed, mutated, odd

CELLS = (
    "0",
    "1",
    "1.5",
    "",
    " ",
    "-1",
    "nan",
    "inf",
    "1e999",
    "é",
    "a,b",
    "x" * 5000,
    "../a.npy",
    "/etc/passwd",
    "\x00",
)
NAMES = ("file", "label", "client", "patient", "subject", "patient_id", "", "label ", "é")
KINDS = ("scan-folder", "volume-folder", "signal-folder", "image-folder")


def of_folders(folder: Path) -> dict[str, Target]:
    """Return the targets whose input is a folder."""
    return {
        "example-folder": _of_examples(folder / "examples"),
        "boosters": _of_boosters(folder / "boosters"),
        "job": _of_jobs(folder / "job"),
        "parts": _of_parts(folder / "parts"),
        "tensors": Target(_given(), _packed),
        "adapters": Target(
            st.lists(st.text("ab.lor_AB", max_size=12) | st.sampled_from(_ADAPTED), max_size=6), _adapted
        ),
    }


# --- examples -----------------------------------------------------------------------------------------------------


def _of_examples(folder: Path) -> Target:
    """Return the target of a folder of arrays: shapes, values, a table's cells or masks, and the kind that is said."""
    shapes = st.sampled_from([(4, 4), (4, 4), (4, 4), (1, 4, 4), (3, 4, 4), (2, 4, 4), (0, 4), (4,), (1, 2, 4, 4), ()])
    kinds = st.sampled_from(["u1", "u1", "i2", "u2", "f4", "f8", "c8", "?", "S3", "O"])
    values = st.sampled_from([0, 1, 3, 16, 255, -1, 4095, 0.5, 1e300, float("nan")])
    files = st.lists(st.tuples(shapes, kinds, values), min_size=1, max_size=4)
    cells = st.sampled_from(CELLS) | st.sampled_from(["0", "1"])
    header = st.lists(st.sampled_from(NAMES), min_size=1, max_size=4) | st.just(["file", "label"])
    table = st.tuples(header, st.lists(st.lists(cells, max_size=4), max_size=5))
    sizes = st.none() | st.sampled_from([1, 2, 8])

    def run(drawn: tuple[Any, Any, str, Any, int, int | None]) -> None:
        arrays, given, layout, kind, seed, size = drawn
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        for i, (shape, dtype, value) in enumerate(arrays * 4):
            place = {"table": "", "masks": "train", "classes": f"{('train', 'test')[i % 2]}/{i // 2 % 2}"}[layout]
            (folder / place).mkdir(parents=True, exist_ok=True)
            _save(folder / place / f"{i}.npy", _array(shape, dtype, value), seed + i)
            if layout == "masks":
                (folder / "masks/train").mkdir(parents=True, exist_ok=True)
                _save(folder / "masks/train" / f"{i}.npy", _array(shape, dtype, value), seed)
        if layout == "table":
            names, lines = given
            lines = [[f"{i}.npy", *line][: len(names) + (seed % 50 == 1)] for i, line in enumerate(lines * 4)]
            with (folder / "labels.csv").open("w", newline="", encoding="utf-8") as file:
                csv.writer(file).writerows([names, *lines])
        name = folder_data(folder) if kind is None else kind
        if name is not None:
            data = load_dataset(name, data_dir=folder, image_size=size)
            for split in (data.train, data.test):
                if not bool(torch.isfinite(split.inputs).all()) or len(split.inputs) != len(split.targets):
                    raise Finding("examples that aren't finite, or not as many as targets, were taken")

    layouts = st.sampled_from(["table", "table", "masks", "classes"])
    return Target(st.tuples(files, table, layouts, st.none() | st.sampled_from(KINDS), st.integers(0, 999), sizes), run)


def _array(shape: tuple[int, ...], dtype: str, value: float) -> np.ndarray:
    with np.errstate(all="ignore"):
        return np.full(shape, None if dtype == "O" else np.asarray(value).astype(dtype))


def _save(path: Path, array: np.ndarray, seed: int) -> None:
    np.save(path, array, allow_pickle=True)
    if seed % 10 == 0:  # a file in ten is damaged
        path.write_bytes(mutated([path.read_bytes()], [b"'|O'", b"(99999999999,)", b"(-1,)"], seed))


# --- what travelled -----------------------------------------------------------------------------------------------


def _of_boosters(folder: Path) -> Target:
    """Return the target of a folder of boosters: its facts, its messages, the rows beside them."""
    stumps = stump(0, 0.5, (1.0, 1.5), (-2.0, 1.0)), stump(1, 0.0, (0.5, 1.0), (0.5, 2.0))
    whole = json.loads(boosted_model(*stumps))
    facts = {"learning_rate": 0.3, "name": "f", "trees": {"protocol": "bagging", "observer": 0}}
    facts["columns"] = [{"name": "a", "mean": 0.0, "std": 1.0}, {"name": "b"}]
    names = st.sampled_from(
        ["round-0-client-a.json"] * 4 + ["round-1-client-é.json", "round-0-client-a.ubj", "rows-a.csv"]
    )
    held = st.sampled_from([1.0, 0.0, float("nan"), 1e300]), st.sampled_from([(3, 2), (3, 2), (3, 1), (0, 2), (3,)])

    def run(drawn: tuple[Any, Any, str, float, tuple[int, ...]]) -> None:
        about, sent, name, value, shape = drawn
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        with contextlib.suppress(Exception):  # what YAML can't hold
            (folder / "trees.yaml").write_text(plain_yaml.dumps(about))
        (folder / name).write_text(json.dumps(sent))
        np.savez(folder / "rows-a.npz", inputs=np.full(shape, value), labels=np.zeros(shape[0]))
        read_boosters(folder)

    sent = st.just(whole) | changed(whole)
    return Target(st.tuples(st.just(facts) | changed(facts), sent, names, *held), run)


def _of_jobs(folder: Path) -> Target:
    """Return the target of the ledger of an NVFlare job, or of a site's privacy.json."""
    chain = {"tasks": ["train"], "direction": "out", "filters": []}
    kept: list[Any] = chain["filters"]  # type: ignore[assignment]
    kept.append({"path": "nvflare.app_common.filters.SVTPrivacy", "args": {"fraction": 0.1, "epsilon": 0.1}})
    kept.append({"name": "PercentilePrivacy", "args": {"percentile": 10, "gamma": "{gamma}"}})
    client = {"gamma": 0.01, "task_result_filters": [chain], "executors": [{"tasks": ["train"], "executor": {}}]}
    server = {"workflows": [{"name": "x", "args": {"num_rounds": 3}}]}
    meta = {"name": "j", "deploy_map": {"app": ["@ALL"]}}
    scopes = {"scopes": [{"name": "a", "task_result_filters": kept}], "default_scope": "a"}

    def run(drawn: tuple[Any, int | None, int | None]) -> None:
        written, rounds, elements = drawn
        shutil.rmtree(folder, ignore_errors=True)
        (folder / "app/config").mkdir(parents=True)
        places = ("meta.json", "app/config/config_fed_client.json", "app/config/config_fed_server.json", "privacy.json")
        for place, value in zip(places, written if isinstance(written, list) else [], strict=False):
            (folder / place).write_text(json.dumps(value))
        for path in (folder, folder / "privacy.json"):
            if path.exists() and is_job(path):
                with contextlib.suppress(fedaudit.BadInput):  # the other file is read, too
                    job = read_job(path)
                    found = of_filters(
                        job.name, job.sites, rounds or job.rounds or 1, elements, Question(target=8.0), job.whole
                    )
                    for one in found:
                        json.dumps(one.for_programs(), allow_nan=False)
                        _ = list(rows(one)), list(answers(one))

    files = changed([meta, client, server, scopes])
    return Target(st.tuples(files, st.none() | st.integers(1, 9), st.none() | st.integers(1, 10**6)), run)


# --- inputs of several tensors ------------------------------------------------------------------------------------


class _Two(nn.Module):
    """A picture and two numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(18, 3)

    def forward(self, x: Tensor, *, age: Tensor) -> Tensor:
        made: Tensor = self.head(torch.cat([x.flatten(1), age], dim=1))
        return made


def _of_parts(folder: Path) -> Target:
    """Return the target of a recording of a model of several inputs: what its files say, sealed again."""
    model = _Two()
    if not folder.exists():
        recorder = fedaudit.Recorder(folder)
        with recorder.round(model.state_dict()):
            local = copy.deepcopy(model)
            with recorder.capture() as seen:
                optimiser = torch.optim.SGD(local.parameters(), lr=0.1)
                made = local(torch.rand(4, 1, 4, 4), age=torch.rand(4, 2))
                nn.functional.cross_entropy(made, torch.tensor([0, 1, 2, 0])).backward()
                optimiser.step()
            recorder.update("a", local.state_dict(), seen)
        recorder.close()
    names = sorted(path.name for path in folder.glob("*.json"))
    contents = [json.loads((folder / name).read_text()) for name in names]

    def run(values: Any) -> None:
        for name, value in zip(names, values if isinstance(values, list) else [], strict=False):
            (folder / name).write_text(json.dumps(value))
        with contextlib.suppress(Exception):  # where it is none
            seal_again(folder)
        load_truth(folder / FOLDER, Transcript.load(folder, _Two()))

    return Target(changed(contents), run)


def _given() -> Draw:
    shapes = st.sampled_from([(3,), (3, 2), (3, 1, 4, 4), (2, 2), (0, 2), (), (3, 0)])
    kinds = st.sampled_from([torch.float32, torch.float32, torch.int64, torch.bool, torch.float16, torch.complex64])
    tensors = st.builds(lambda shape, kind: torch.ones(shape, dtype=kind), shapes, kinds) | odd
    return st.tuples(
        st.lists(tensors, max_size=3).map(tuple), st.dictionaries(st.text(max_size=3), tensors, max_size=3)
    )


def _packed(drawn: tuple[tuple[Any, ...], dict[str, Any]]) -> None:
    packing, packed = Packing.of_call(*drawn, "the model")
    if packed.shape != (len(packed), packing.size):
        raise Finding(f"{packing} was packed into {tuple(packed.shape)}")


_ADAPTED = ("a.lora_A.default.weight", "a.modules_to_save.default.b", "a.lora_A.weight", "default", ".default.")


class _Adapted(nn.Module):
    active_adapter, peft_config = "default", {"default": None}


def _adapted(names: list[str]) -> None:
    found = adapters_names(_Adapted(), names)
    if not set(found.values()) <= set(names) or set(found) & set(names):
        raise Finding(f"{found} of {names}")
