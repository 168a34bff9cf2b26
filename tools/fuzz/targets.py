"""What is fuzzed: a strategy for inputs, and what is done with one. Whatever but a refusal comes out is a finding."""

from __future__ import annotations

import contextlib
import io
import json
import math
import shutil
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import click
import numpy as np
import typer
from hypothesis import strategies as st

from fedaudit import cli
from fedaudit.attacks import ATTACKS
from fedaudit.data import load_dataset
from fedaudit.defences.aggregation import AGGREGATORS
from fedaudit.defences.client_defences import CLIENT_DEFENCES
from fedaudit.pipeline.prepare import AuditRequest, resolve, spell_out
from fedaudit.pipeline.run import record
from fedaudit.scenario.scenario import Scenario, parse_setting, scenario_from
from fedaudit.simulation.behaviour import BEHAVIOURS
from fedaudit.simulation.server_behaviour import SERVER_BEHAVIOURS
from fedaudit.transcript.transcript import Transcript
from fedaudit.transcript.truth import FILE, FOLDER, load_truth, save_recording
from fedaudit.utils import plain_yaml
from fedaudit.utils.errors import BadInput, FedAuditError
from fedaudit.utils.validation import LARGEST, SMALLEST
from fedaudit_lab.studies.analysis import analyse
from fedaudit_lab.studies.drawing import claims_csv, markdown, table_csv, values_csv
from fedaudit_lab.studies.spec import StudySpec, expand, study_from
from fedaudit_lab.studies.store import Row
from tests.conftest import SCENARIO
from tests.lab.test_studies import TINY
from tests.transcript.integrity_cases import seal_again
from tools.fuzz.base import Finding as Finding
from tools.fuzz.base import Target as Target
from tools.fuzz.folders import of_folders
from tools.fuzz.formats import Format, formats, picture
from tools.fuzz.kinds import of_canaries, of_frame, of_task, of_text, of_tokens
from tools.fuzz.strategies import ODD, Draw, by_schema, by_settings, changed, mutated, odd

ENDS = (0, 1, 2, 3)  # exit codes that commands have


def targets(folder: Path) -> dict[str, Target]:
    """Return every target by its name; ``folder`` is for its files."""
    folder.mkdir(parents=True, exist_ok=True)
    made = {
        "scenario": Target(_scenarios(), _scenario),
        "setting": Target(st.builds("{}={}".format, _keys(), odd | st.text(max_size=30)), _setting),
        "plugin": Target(_plugins(), _plugin),
        "yaml": Target(_texts(), _yaml),
        "study": Target(changed(TINY, by_schema(StudySpec)) | by_schema(StudySpec), _study),
        "flags": Target(_flags(folder), _flag),
        "resolve": Target(changed(BASE, odd, most=2), _resolve),
        "arrays": Target(_sets(), lambda drawn: _npz_set(folder / "npz", drawn)),
        "columns": Target(st.tuples(_cells(), _cells()), lambda drawn: _parquet_set(folder / "parquet", drawn)),
        "frame": Target(st.tuples(_cells(), _cells(), _cells()), of_frame),
        **of_tokens(_arrays()),
        "task": of_task(folder / "task"),
        **_of_transcripts(folder / "recorded"),
        "text": of_text(folder / "text"),
        **_of_recordings(folder / "recording"),
        "canaries": of_canaries(folder / "canaries"),
        **of_folders(folder / "folders"),
    }
    files = folder / "formats"
    files.mkdir(exist_ok=True)
    for name, kind in formats(files).items():
        made[name] = _of_bytes(kind, folder / "read" / name)
    return made


# --- scenarios -----------------------------------------------------------------------------------------------------

PNG = picture("PNG")
BASE: dict[str, Any] = {**plain_yaml.loads(SCENARIO, "base"), "threat": {}, "defences": {"aggregator": "mean"}}
FULL: dict[str, Any] = {
    **BASE,
    "seed": 3,
    "federations": [
        {
            "name": "a",
            "clients": 4,
            "rounds": 3,
            "keep_rounds": [0, 2],
            "malicious": {"name": "gan", "missing_classes": [3], "start": 1},
        },
        {"name": "b", "algorithm": "fedavg", "local_steps": 2, "partition": {"scheme": "dirichlet", "alpha": 1.0}},
    ],
    "defences": [
        {"name": "x", "client_defence": {"name": "dp", "noise": 1.0}},
        {"aggregator": {"name": "krum", "f": 1}},
    ],
    "evaluation": {"attacked_federations": ["a"], "accuracy_every": 1},
    "threat": {"adversary": "client", "target_records": 4},
}


def _scenarios() -> Draw:
    return by_schema(Scenario) | changed(BASE, by_schema(Scenario)) | changed(FULL)


def _scenario(values: Any) -> None:
    made = scenario_from(values)
    _no_nonsense(made.model_dump())
    again = scenario_from(plain_yaml.loads(made.to_yaml(), "again"))
    if again.to_yaml() != made.to_yaml():
        raise Finding("a scenario changes when it is written and read")
    spell_out(AuditRequest(scenario=made.model_copy(update={"attacks": made.attacks or scenario_from(BASE).attacks})))


def _no_nonsense(values: dict[str, Any]) -> None:
    """Raise where a scenario that was taken says what none may."""
    for federation in values["federations"]:
        kept = federation["keep_rounds"] or []
        if len(set(kept)) < len(kept):
            raise Finding("a round recorded twice was taken")
        for key in ("learning_rate", "momentum", "weight_decay", "proximal_mu"):
            if not math.isfinite(federation[key]) or abs(federation[key]) > LARGEST:
                raise Finding(f"{key} {federation[key]} was taken")
        if not federation["learning_rate"] >= SMALLEST:
            raise Finding("a learning rate of next to nothing was taken")
    chosen = values["evaluation"]["attacked_federations"]
    if chosen is not None and len(set(chosen)) < max(1, len(chosen)):
        raise Finding("a federation attacked twice was taken")
    if not values["name"].isprintable():
        raise Finding("a name that can't be shown was taken")


def _keys() -> Draw:
    parts = st.sampled_from(
        ["federations", "sgd", "0", "²", "-1", "attacks", "invg", "defences", "client_defence", "name", ""]
    )
    return st.lists(parts | st.text(max_size=3), min_size=1, max_size=4).map(".".join)


def _setting(text: str) -> None:
    parse_setting(text)
    from fedaudit.scenario.scenario import apply_override

    scenario_from(apply_override(BASE, text))


def _plugins() -> Draw:
    made = []
    for registry in (ATTACKS, AGGREGATORS, CLIENT_DEFENCES, BEHAVIOURS, SERVER_BEHAVIOURS):
        for entry in registry:
            made.append(st.tuples(st.just((registry, entry.name)), by_settings(entry.value)))
    return st.one_of(made)


def _plugin(drawn: Any) -> None:
    from fedaudit.utils.registry import make

    (registry, name), settings = drawn
    if isinstance(settings, dict):
        make(registry, name, {str(key): value for key, value in settings.items()}).settings()


TEXTS = [SCENARIO.encode(), plain_yaml.dumps(FULL).encode(), plain_yaml.dumps(TINY).encode()]
WORDS = [
    *(
        b"!!bool ",
        b"!!int ",
        b"!!float ",
        b"!!timestamp ",
        b"!!map ",
        b"!!python/name:os.system ",
        b"&a ",
        b"*a",
        b"<<: ",
    ),
    *(
        b"? ",
        b": ",
        b"- ",
        b"|\n",
        b">\n",
        b"%YAML 1.1\n",
        b"---\n",
        b"'",
        b'"',
        b"\\x",
        b"\xef\xbb\xbf",
        b"\x85",
        b"[" * 60,
    ),
    *(b"1:59:59", b"2024-01-01", b"0x1F", b"0o7", b"1e999", b".nan", b"~", b"\t", b"\xff", b"{", b"}", b"=", b"1_0"),
]


def _texts() -> Draw:
    kinds = ("bool", "int", "float", "null", "str", "map", "seq", "timestamp")
    tags = st.sampled_from(["", *(f"!!{kind} " for kind in kinds)])
    values = st.sampled_from(["x", "''", "'-'", "'.'", "1:59", "1" + ":59" * 400 + ".5", "9" * 5000, "2024-13-01", "é"])
    values |= st.sampled_from(["{a: 1}", "[1]", "0x", "0x" + "f" * 9999, "1e999", ".nan", "+", "_", "0b", "~", "1_0"])
    return st.integers(0, 2**48).map(lambda seed: mutated(TEXTS, WORDS, seed)) | st.builds(
        _with_value, st.sampled_from(TEXTS), st.integers(0, 99), st.builds("{}{}".format, tags, values)
    )


def _with_value(text: bytes, place: int, value: str) -> bytes:
    """Return YAML with one of its plain values replaced."""
    lines = text.decode().splitlines()
    plain = [i for i, line in enumerate(lines) if ": " in line and "{" not in line] or [0]
    chosen = plain[place % len(plain)]
    lines[chosen] = f"{lines[chosen].partition(': ')[0]}: {value}"
    return "\n".join(lines).encode()


def _yaml(text: bytes) -> None:
    try:
        written = text.decode()
    except UnicodeDecodeError:
        return
    values = plain_yaml.loads(written, "the text")
    for read in (scenario_from, lambda v: study_from(v, "the text")):
        with contextlib.suppress(FedAuditError):
            read(values)


def _resolve(values: Any) -> None:
    made = scenario_from(values)
    sizes = [
        made.data.image_size or 8,
        made.model.width or 1,
        made.model.training.epochs,
        made.threat.target_records or 1,
    ]
    sizes += [f.clients * f.rounds * (f.local_steps or f.local_epochs or 1) for f in made.federations]
    if max(sizes) > 64 or made.model.name not in ("lenet", "logistic", "mlp", "linear"):
        return  # allowed, and long
    record(resolve(made))


# --- studies -------------------------------------------------------------------------------------------------------


def _study(values: Any) -> None:
    study = study_from(values, "the study")
    for text in (study.name, study.title, *study.axes, *(level for levels in study.axes.values() for level in levels)):
        if not " ".join(text.split()).isprintable():
            raise Finding(f"{text!r} was taken for a name")
    trials = [trial for scale in study.scales if study.scales[scale].repetitions < 50 for trial in expand(study, scale)]
    image = {"psnr": 20.0, "victim": "x"}
    update = {
        "federation": "f",
        "round": 0,
        "client": 0,
        "reason": "=x",
        "seconds": 1.0,
        "images": [image],
        "metrics": {},
    }
    rows = [Row(t.key, t.point, t.repetition, "done", 1, {"updates": [update]}, 1.0, None) for t in trials[:20]]
    analysis = analyse(study, "cpu", rows)
    for text in (markdown(analysis), table_csv(analysis), values_csv(analysis), claims_csv(analysis)):
        text.encode()


# --- the command line ----------------------------------------------------------------------------------------------


def _flags(folder: Path) -> Draw:
    """Return words for every command, of the options that it has."""
    path = folder / "scenario.yaml"
    path.write_text(SCENARIO)
    study = folder / "study.yaml"
    study.write_text(plain_yaml.dumps(TINY))
    (folder / "empty").mkdir(exist_ok=True)
    texts = st.sampled_from([str(value) for value in ODD]) | st.text(max_size=10)
    words = texts | st.sampled_from([str(path), str(study), str(folder / "empty"), "digits", "invg", "psnr=1", "smoke"])
    sets = st.builds("{}={}".format, _keys(), texts)
    lines = []
    for names, command in _commands(typer.main.get_command(cli.app), ()):
        if names[0] in ("doctor", "bench", "train-generator"):
            continue
        options = [name for p in command.params if isinstance(p, click.Option) for name in p.opts if name != "--help"]
        pairs = st.tuples(st.sampled_from(options or ["-x"]), words) | st.tuples(st.just("--set"), sets)
        given = st.lists(pairs, max_size=3).map(lambda found: [w for pair in found for w in pair])
        first = st.lists(words, max_size=2) | st.just([str(study if names[0] == "study" else path)])
        lines.append(st.builds(lambda a, b, n=names: [*n, *a, *b], first, given))
    out = ["--out", str(folder / "out")]
    return st.one_of(lines).map(lambda line: [*line, *out] if line[0] in ("audit", "simulate", "attack") else line)


def _commands(command: Any, names: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    if not hasattr(command, "commands"):
        yield names, command
        return
    for name, inner in command.commands.items():
        yield from _commands(inner, (*names, name))


def _flag(line: list[str]) -> None:
    """Run the command as far as the work begins."""
    line = [word.replace("\0", "").encode(errors="replace").decode() for word in line]  # as command lines can be
    stops = [".api.run_audit", ".pipeline.run.record", ".pipeline.trials.run_trials", ".api.simulate"]
    stops += [".pipeline.transcripts.simulate_all", "_lab.studies.running.run_study"]
    with contextlib.ExitStack() as stack:
        for stop in stops:
            stack.enter_context(mock.patch(f"fedaudit{stop}", side_effect=BadInput("far enough")))
        stack.enter_context(mock.patch.object(sys, "argv", ["fedaudit", *line]))
        stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
        told = stack.enter_context(contextlib.redirect_stderr(io.StringIO()))
        stack.enter_context(warnings.catch_warnings())
        try:
            cli.main()
        except SystemExit as ended:
            if ended.code not in ENDS:
                raise Finding(f"exit code {ended.code}") from None
            if ended.code == 2 and "fedaudit: error: " not in told.getvalue() and "Usage" not in told.getvalue():
                raise Finding("exit code 2 without a word") from None
            if "Traceback" in told.getvalue():
                raise Finding("a traceback was printed") from None


# --- files ---------------------------------------------------------------------------------------------------------


def _of_transcripts(folder: Path) -> dict[str, Target]:
    """Return the targets of a transcript's folder: its index, and the bytes of each of its files."""
    small = {**BASE, "model": {"name": "logistic"}, "threat": {"target_records": 2, "knows_labels": True}}
    small["federations"] = [{"name": "sgd", "clients": 2, "examples": 8, "batch_size": 1, "rounds": 2}]
    (recording,) = record(resolve(scenario_from(small)))
    if not folder.exists():
        save_recording(recording.transcript, recording.truth, folder)
    index = [json.loads((folder / name).read_text()) for name in ("index.json", "round-00000.json")]
    names = sorted(path.name for path in folder.iterdir())
    contents = {name: (folder / name).read_bytes() for name in names}
    words = [b"null", b"-1", b"1e999", b"[" * 300, b'"\\ud800"', b"{}", b'"F64"', b"[0,1]", b"99999999999"]

    def read(place: Path) -> None:
        transcript = Transcript.load(place)
        if (place / FILE).is_file():
            load_truth(place / FILE, transcript)

    def with_index(values: Any) -> None:
        place = folder.with_name("transcript-index")
        place.mkdir(exist_ok=True)
        for name in names:
            (place / name).write_bytes(contents[name])
        given = values if isinstance(values, list) else []
        for name, value in zip(("index.json", "round-00000.json"), given, strict=False):
            (place / name).write_text(json.dumps(value))
        with contextlib.suppress(Exception):  # where it is none
            seal_again(place)
        read(place)

    def with_bytes(drawn: tuple[str, int]) -> None:
        place = folder.with_name("transcript-bytes")
        place.mkdir(exist_ok=True)
        for name in names:
            (place / name).write_bytes(contents[name])
        (place / drawn[0]).write_bytes(mutated([contents[drawn[0]]], words, drawn[1]))
        read(place)

    return {
        "index": Target(changed(index), with_index),
        "transcript": Target(st.tuples(st.sampled_from(names), st.integers(0, 2**48)), with_bytes),
    }


def _of_recordings(folder: Path) -> dict[str, Target]:
    """Return the target of a real federation's recording: every one of its files."""
    from tests.capture import recording_cases

    if not folder.exists():
        recording_cases.federation(folder, rounds=1, clients=2)
    names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    contents = {name: (folder / name).read_bytes() for name in names}
    words = [b"null", b"-1", b"1e999", b'"\\ud800"', b"{}", b"[]", b'"BF16"', b"true", b"99999999999"]

    def run(drawn: tuple[str, int]) -> None:
        place = folder.with_name("recording-bytes")
        for name in names:
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            (place / name).write_bytes(contents[name])
        (place / drawn[0]).write_bytes(mutated([contents[drawn[0]]], words, drawn[1]))
        read = Transcript.load(place, recording_cases.Net())
        load_truth(place / FOLDER, read)

    return {"recording": Target(st.tuples(st.sampled_from(names), st.integers(0, 2**48)), run)}


def _arrays() -> Draw:
    kinds = ["u1", "i8", "u8", "f4", "f8", "f2", "c8", "?", "S3", "U3", "M8[s]"]
    shapes = [(4, 28, 28), (4,), (4, 1), (4, 3, 28, 28), (0,), (), (4, 28, 28, 1), (2,), (3,), (1, 4)]
    values = st.sampled_from([0, 1, 3, 9, 10, 255, -1, 0.5, 1e300, float("nan")])

    def made(kind: str, shape: tuple[int, ...], value: float) -> Any:
        with np.errstate(all="ignore"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return np.full(shape, np.asarray(value).astype(kind))

    return st.builds(made, st.sampled_from(kinds), st.sampled_from(shapes), values) | st.builds(
        made, st.sampled_from(["u1", "i8", "f8"]), st.sampled_from(shapes[:2]), st.sampled_from([0, 1, 3])
    )


def _sets() -> Draw:
    """Return a strategy for MNIST's four arrays, most of which fit."""
    images, labels = np.zeros((4, 28, 28), np.uint8), np.arange(4)

    def made(place: int, odd: Any, kind: str, shift: float) -> Any:
        whole = [images, labels, images, labels]
        whole[place] = odd
        if place % 2 and shift:
            with np.errstate(all="ignore"), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                whole[place] = (labels + shift).astype(kind)
        return tuple(whole)

    kinds, shifts = (
        st.sampled_from(["f2", "f4", "f8", "i8", "u8", "S3", "c8"]),
        st.sampled_from([0, 0.5, 1, -1, 1e300, 9]),
    )
    return st.builds(made, st.integers(0, 3), _arrays(), kinds, shifts)


def _npz_set(folder: Path, drawn: tuple[Any, Any, Any, Any]) -> None:
    (folder / "mnist").mkdir(parents=True, exist_ok=True)
    np.savez(folder / "mnist/mnist.npz", x_train=drawn[0], y_train=drawn[1], x_test=drawn[2], y_test=drawn[3])
    made = load_dataset("mnist", data_dir=folder)
    for labels, split in ((drawn[1], made.train), (drawn[3], made.test)):
        if not (np.asarray(labels, dtype=float).reshape(-1) == split.targets.numpy()).all():
            raise Finding("labels became others")


def _cells() -> Draw:
    cell = st.integers(-1, 10) | st.floats() | st.booleans() | st.text(max_size=3) | st.binary(max_size=9) | st.none()
    return st.one_of(
        st.lists(cell, min_size=2, max_size=2),
        st.lists(st.integers(0, 9), min_size=2, max_size=2),
        st.sampled_from([[PNG, PNG], [PNG, b""], [[1], [2]], [{"a": 1}, {}], [1e300, 2.0], ["0", "1"], [0.5, 1.0]]),
    )


def _parquet_set(folder: Path, drawn: tuple[list[Any], list[Any]]) -> None:
    import pyarrow
    import pyarrow.parquet

    (folder / "cifar10").mkdir(parents=True, exist_ok=True)
    try:
        table = pyarrow.table({"png": drawn[0], "label": drawn[1]})
    except (pyarrow.ArrowInvalid, pyarrow.ArrowTypeError, OverflowError):
        return  # of two types: no such column can be written
    for split in ("train", "test"):
        pyarrow.parquet.write_table(table, folder / f"cifar10/{split}.parquet")
    made = load_dataset("cifar10", data_dir=folder)
    if not set(made.train.targets.tolist()) == set(drawn[1]) or any(type(label) is bool for label in drawn[1]):
        raise Finding(f"labels {drawn[1]} were taken")


def _of_bytes(kind: Format, folder: Path) -> Target:
    def run(seed: int) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        path = folder / kind.name
        path.write_bytes(mutated(kind.seeds, list(kind.words), seed))
        kind.read(path)

    return Target(st.integers(0, 2**48), run)
