"""Bad input: one line on standard error that says what was wrong, exit code 2, nothing on standard output."""

from __future__ import annotations

import json
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import typer

import fedaudit
from fedaudit.cli.commands import add_commands
from fedaudit.utils.errors import BadInput
from tests.conftest import SCENARIO, Command, Outcome, refused

HEAD, _, TAIL = SCENARIO.partition("federations:")


# --- scenarios, by --set -------------------------------------------------------------------------------------------

REGRESSION = ["data.name=diabetes", "model.name=linear"]
SETTINGS = [
    ("unknown key at the top", ["modell.name=lenet"], "unknown key 'modell'; did you mean 'model'?"),
    ("unknown key in data", ["data.nmae=x"], "data: unknown key 'nmae'; did you mean 'name'?"),
    ("unknown key in training", ["model.training.epoch=1"], "model.training: unknown key 'epoch'; did you mean 'epoch"),
    ("unknown key in a federation", ["federations.sgd.client=1"], "unknown key 'client'; did you mean 'clients'?"),
    ("unknown key in a partition", ["federations.sgd.partition.alfa=1"], "did you mean 'alpha'?"),
    ("unknown key in the threat", ["threat.adversry=server"], "threat: unknown key 'adversry'; did you mean 'adversar"),
    ("unknown attack setting", ["attacks.invg.iteration=1"], "attack 'invg': unknown key 'iteration'; did you mean"),
    ("version 2", ["version=2"], "version: 2 isn't allowed; it should be 1"),
    ("version true", ["version=true"], "version: true is not a number"),
    ("empty name", ["name=''"], "name: give 1 to 200 characters"),
    ("name with control characters", ['name="a\\eb"'], "without control characters"),
    ("a number for a name", ["name=3"], "name: 3 isn't allowed; it should be a valid string"),
    ("negative seed", ["seed=-1"], "seed: -1 isn't allowed"),
    ("huge seed", ["seed=99999999999999999999999"], "seed: 99999999999999999999999 isn't allowed"),
    ("clients: true", ["federations.sgd.clients=true"], "clients: true is not a number"),
    ("clients: a list", ["federations.sgd.clients=[2]"], "clients: [2] isn't allowed; it should be a valid integer"),
    ("clients: half", ["federations.sgd.clients=1.5"], "fractional part"),
    ("clients: none", ["federations.sgd.clients=0"], "clients: 0 isn't allowed"),
    ("more clients than examples", ["federations.sgd.clients=3"], "2 examples can't be partitioned over 3 clients"),
    ("more clients than data", ["federations.sgd.examples=null", "federations.sgd.clients=400"], "355 examples can't"),
    ("more examples than data", ["federations.sgd.examples=400"], "400 examples are asked for, but the split has 355"),
    ("clients a round", ["federations.sgd.clients_per_round=3"], "but there are 2 clients"),
    ("huge batch size", ["federations.sgd.batch_size=99999999999999999999"], "less than or equal to 1000000000"),
    ("learning rate NaN", ["federations.sgd.learning_rate=.nan"], "it should be a finite number"),
    ("learning rate infinite", ["federations.sgd.learning_rate=1e999"], "it should be a finite number"),
    ("learning rate zero", ["federations.sgd.learning_rate=0"], "it should be greater than 0"),
    ("momentum one", ["federations.sgd.momentum=1"], "it should be less than 1"),
    ("endless rounds", ["federations.sgd.rounds=1000000000"], "GB of memory, this machine has"),
    ("fedsgd with steps", ["federations.sgd.local_steps=2"], "local_steps is for fedavg and fedprox"),
    ("fedsgd with momentum", ["federations.sgd.momentum=0.9"], "momentum is for fedavg and fedprox"),
    ("fedavg without steps", ["federations.sgd.algorithm=fedavg"], "fedavg needs local_steps or local_epochs"),
    ("mu without fedprox", ["federations.sgd.proximal_mu=1"], "proximal_mu is for fedprox only"),
    (
        "fedprox without mu",
        ["federations.sgd.algorithm=fedprox", "federations.sgd.local_steps=1"],
        "fedprox needs proximal_mu above 0",
    ),
    ("federation name up", ["federations.sgd.name=../x"], "the name '../x' can't be used"),
    ("federation name with slash", ["federations.sgd.name=a/b"], "the name 'a/b' can't be used"),
    ("federation name with space", ["federations.sgd.name=a b"], "the name 'a b' can't be used"),
    (
        "unknown algorithm",
        ["federations.sgd.algorithm=fedvg"],
        "unknown algorithm 'fedvg'; did you mean 'fedavg'? known: fedsgd, fedavg, fedprox, vertical, split",
    ),
    ("unknown partition", ["federations.sgd.partition.scheme=dirichelt"], "did you mean 'dirichlet'?"),
    ("option of another partition", ["federations.sgd.partition.alpha=1"], "'iid' takes no options; leave 'alpha' out"),
    (
        "more classes than there are",
        ["federations.sgd.partition.scheme=classes-per-client", "federations.sgd.partition.k=11"],
        "federation 'sgd': partition 'classes-per-client': k=11; give a whole number from 1 to 2",
    ),
    ("unknown attack", ["attacks.invg.name=invgg"], "unknown attack 'invgg'; did you mean 'invg'?"),
    ("attack twice", ["attacks=[invg, invg]"], "the name 'invg' is used twice"),
    ("no attack", ["attacks=[]"], "attacks: at least one is needed"),
    ("bad attack setting", ["attacks.invg.iterations=0"], "attack 'invg': iterations: 0 isn't allowed"),
    ("label inference", ["attacks.invg.label_inference=idgl"], "unknown label inference 'idgl'; did you mean 'idlg'?"),
    ("unknown model", ["model.name=lenett"], "unknown model 'lenett'; did you mean 'lenet'?"),
    ("unknown data set", ["data.name=digit"], "unknown data set 'digit'; did you mean 'digits'?"),
    ("unknown aggregator", ["defences.aggregator=meen"], "unknown aggregator 'meen'; did you mean 'mean'?"),
    ("setting of no aggregator", ["defences.aggregator={name: krum, g: 1}"], "'krum': unknown key 'g'; known: f"),
    ("too few for krum", ["defences.aggregator=krum"], "'krum' needs n >= 2f + 3 with f = 1: 5 updates a round"),
    (
        "unknown client-side defence",
        ["defences.client_defence=nome"],
        "unknown client-side defence 'nome'; did you mean 'none'?",
    ),
    ("unknown initialisation", ["model.initialisation=hee"], "it should be 'default', 'he', 'uniform' or 'given'"),
    ("initialisation given by none", ["model.initialisation=given"], "'given' is for a checkpoint, or for a model of"),
    (
        "unknown adversary",
        ["threat.adversary=hacker"],
        "it should be 'server', 'malicious-server', 'eavesdropper', 'client' or 'aggregating-client'",
    ),
    ("unknown device", ["device=tpu"], "device: 'tpu' isn't allowed; did you mean 'cpu'? it should be 'cpu' or 'cuda'"),
    ("width of a model without", ["model.name=logistic", "model.width=3"], "model 'logistic' has no width"),
    (
        "immense model",
        ["model.name=mlp", "data.image_size=1024", "data.limit=2", "model.width=65536"],
        "model 'mlp' needs",
    ),
    ("convolutions on a table", ["data.name=breast-cancer"], "model 'lenet' takes images"),
    ("image size of a table", ["data.name=breast-cancer", "data.image_size=32"], "which holds rows of a table"),
    ("image size 0", ["data.image_size=0"], "data.image_size: 0 isn't allowed"),
    ("image size 3", ["data.image_size=3"], "give 4 to 1024 pixels"),
    ("mse for classes", ["model.loss=mse"], "the loss 'mse' doesn't fit targets that are 10 classes"),
    ("classes for regression", [*REGRESSION, "model.loss=cross-entropy"], "use mse"),
    (
        "lacks without classes",
        [*REGRESSION, "federations.sgd.malicious={name: gan, missing_classes: [1]}"],
        "'diabetes' has none",
    ),
    (
        "diverging training",
        ["model.name=mlp", "model.training.epochs=1", "model.training.learning_rate=1e30"],
        "local training diverged at learning rate 1e+30",
    ),
    (
        "diverging federation",
        [
            "model.name=mlp",
            "federations.sgd.algorithm=fedavg",
            "federations.sgd.local_steps=3",
            "federations.sgd.learning_rate=1e30",
        ],
        "local training diverged",
    ),
    ("BatchNorm of one", ["model.name=resnet18", "model.width=2", "model.batch_norm=train"], "use a larger batch_size"),
    ("missing checkpoint", ["model.checkpoint=nowhere.safetensors"], "no checkpoint at 'nowhere.safetensors'"),
    ("checkpoint is a number", ["model.checkpoint=3"], "it should be a path"),
    (
        "BatchNorm trained on single examples",
        ["model.name=resnet18", "model.width=2", "model.training={epochs: 1, batch_size: 1}"],
        "model.training.batch_size is 1",
    ),
    (
        "signs alone as a change of weights",
        [
            "federations.sgd.algorithm=fedavg",
            "federations.sgd.local_steps=1",
            "defences.client_defence={name: sign, scale: one}",
        ],
        "the server would add 1 or -1 to every weight: use scale: mean",
    ),
    ("a user's own model", ["model.name=custom"], "run it from Python"),
    ("a missing data set", ["data.name=cifar10"], "data set 'cifar10' not found"),
    ("into a plain value", ["attacks.invg.iterations.x=1"], "'x' can't be set inside of a plain value"),
    ("no equals sign", ["seed"], "--set seed: expected key=value"),
    ("no key", ["=3"], "--set =3: expected key=value"),
    ("item that isn't there", ["federations.5.clients=1"], "unknown item '5'; known: sgd"),
    ("value that isn't YAML", ["data=[1"], "--set data=[1: the value is not YAML"),
]


@pytest.mark.parametrize(("settings", "fragment"), [pytest.param(*row[1:], id=row[0]) for row in SETTINGS])
def test_setting(settings: list[str], fragment: str, scenario_file: Path, tmp_path: Path, command: Command) -> None:
    words = [word for setting in settings for word in ("--set", setting)]
    refused(command("audit", scenario_file, *words, "--out", tmp_path / "out", "--workers", 1), fragment)
    assert not (tmp_path / "out" / "results.json").exists()


# --- scenario files ------------------------------------------------------------------------------------------------

BOMB = "a: &a [x,x,x,x]\n" + "".join(
    f"{b}: &{b} [*{a},*{a},*{a},*{a}]\n" for a, b in zip("abcdefgh", "bcdefghi", strict=True)
)
FILES: list[tuple[str, str | bytes, str]] = [
    ("empty", "", "expected a mapping of keys such as data"),
    ("a list", "- data\n- model\n", "expected a mapping of keys"),
    ("a word", "hello", "expected a mapping of keys"),
    ("syntax", "version: 1\ndata: {name: digits\nmodel: x\n", "is not YAML that can be used at line 3, column 6"),
    ("tab", "data:\n\tname: x\n", "at line 2, column 1"),
    ("binary", bytes(range(256)), "is not UTF-8 text"),
    ("NUL", "name: \0", "is not YAML"),
    ("too large", "#" * 2_000_000, "larger than 1,000,000 bytes"),
    ("alias bomb", BOMB, "aliases (*name) aren't allowed"),
    ("alias of itself", "&a {b: *a}", "aliases (*name) aren't allowed"),
    ("deep", "a: " + "[" * 5000 + "]" * 5000, "more than 50 levels deep"),
    (
        "a date",
        SCENARIO.replace("small", "!!timestamp 2024-12-01"),
        "at line 2, column 7: the tag 'tag:yaml.org,2002:t",
    ),
    (
        "number of 5,000 digits",
        SCENARIO.replace("version: 1", "version: " + "9" * 5000),
        "is not YAML that can be used",
    ),
    ("key twice", SCENARIO + "data: {name: photos}\n", "line 9, column 1: the key 'data' is given twice"),
    ("code", "name: !!python/object/apply:os.system ['exit']\n", "could not determine a constructor"),
    ("two documents", SCENARIO + "---\n" + SCENARIO, "found another document"),
    ("number as key", SCENARIO + "1: 2\n", "Keys should be strings"),
    ("list as key", SCENARIO + "? [a]\n: 2\n", "unhashable key"),
    ("no federations", HEAD + "attacks: [invg]\n", "'federations' is missing"),
    ("empty federations", HEAD + "federations: []\nattacks: [invg]\n", "federations: at least one is needed"),
    ("federation as text", HEAD + "federations: [x]\nattacks: [invg]\n", "federations.0: 'x' isn't allowed"),
    ("federation without name", HEAD + "federations: [{}]\nattacks: [invg]\n", "'federations.0.name' is missing"),
    (
        "federations that differ in case only",
        SCENARIO.replace("attacks:", "  - {name: SGD}\nattacks:"),
        "the name 'sgd' is used twice",
    ),
    ("attacks as text", SCENARIO.partition("attacks")[0] + "attacks: invg\n", "'invg' isn't allowed; it should be a"),
    (
        "empty data",
        SCENARIO.replace("data: {name: digits}", "data:"),
        "data: None isn't allowed; it should be a mapping",
    ),
]


@pytest.mark.parametrize(("content", "fragment"), [pytest.param(*row[1:], id=row[0]) for row in FILES])
def test_scenario_file(content: str | bytes, fragment: str, tmp_path: Path, command: Command) -> None:
    path = tmp_path / "scenario.yaml"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    refused(command("audit", path, "--out", tmp_path / "out"), fragment)
    with pytest.raises(BadInput):
        fedaudit.load_scenario(path)
    assert not (tmp_path / "out").exists()


# --- flags and files on the command line ---------------------------------------------------------------------------

# {s}: the scenario; {t}: a folder of this test; {r}: a recorded transcript
FLAGS = [
    ("unknown command", "audti {s}", "No such command 'audti'. Did you mean 'audit'?"),
    ("unknown flag", "audit {s} --sed 1", "--sed"),
    ("flag without value", "audit {s} --seed", "'--seed' requires an argument"),
    ("two scenarios", "audit {s} {s}", "unexpected extra argument"),
    ("missing scenario", "audit {t}/nowhere.yaml", "nowhere.yaml': No such file"),
    ("folder for a scenario", "audit {t}", "Is a directory"),
    ("negative seed", "audit {s} --seed -1", "'--seed'"),
    ("seed of text", "audit {s} --seed x", "'--seed'"),
    ("no workers", "audit {s} --workers 0", "'--workers'"),
    ("limit without number", "audit {s} --fail-above psnr", "--fail-above psnr: expected metric=number"),
    ("limit of text", "audit {s} --fail-above psnr=abc", "expected metric=number"),
    ("limit NaN", "audit {s} --fail-above psnr=nan", "expected metric=number"),
    ("limit of nothing known", "audit {s} --fail-above pnsr=3", "'pnsr'; did you mean 'psnr'?"),
    ("limit twice", "audit {s} --fail-above psnr=3 --fail-above psnr=4", "'psnr' has a limit already"),
    ("out is a file", "audit {s} --out {s}", "can't write to"),
    ("out is below a file", "audit {s} --out {s}/x", "can't write to"),
    ("out can't be made", "audit {s} --out /proc/x", "can't write to '/proc/x'"),
    ("out is empty", "audit {s} --out ''", "'--out': the name is empty"),
    ("data folder is a file", "audit {s} --data-dir {s}", "isn't a folder"),
    ("data folder is missing", "simulate {s} --data-dir {t}/nowhere", "isn't a folder"),
    ("doctor's data folder", "doctor --data-dir {t}/nowhere", "isn't a folder"),
    ("unknown kind", "list attack", "'attack' is not one of 'attacks'"),
    ("used folder", "simulate {s} --out {r}", "exists and isn't an empty folder"),
    (
        "unknown federation",
        "simulate {s} --federation sdg --out {t}/new",
        "unknown federation 'sdg'; did you mean 'sgd'?",
    ),
    ("unknown attack", "attack {r} --attack agik", "unknown attack 'agik'; did you mean 'agic'?"),
    ("attack twice", "attack {r} --attack invg --attack invg", "attacks names 'invg' twice"),
    ("rounds of a simulation", "attack {r} --attack invg --rounds 0", "--rounds is for a recording"),
    ("attack's setting", "attack {r} --attack invg --set itrations=3", "did you mean 'iterations'?"),
    ("adversary", "attack {r} --attack invg --adversary hacker", "adversary: 'hacker' isn't allowed"),
    ("labels not granted", "attack {r} --attack invg --knows-labels", "grants no labels"),
    ("device", "attack {r} --attack invg --device tpu", "device 'tpu' isn't known"),
    ("no transcript", "attack {t}/nowhere --attack invg", "no transcript in"),
    ("empty folder", "attack {t} --attack invg", "it has no index.json"),
    ("no truth", "attack {r} --attack invg --truth {t}/nowhere", "no ground truth at"),
    ("truth of text", "attack {r} --attack invg --truth {s}", "not a ground truth file"),
]


@pytest.mark.parametrize(("line", "fragment"), [pytest.param(*row[1:], id=row[0]) for row in FLAGS])
def test_flag(
    line: str,
    fragment: str,
    scenario_file: Path,
    recorded: Path,
    tmp_path: Path,
    command: Command,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    words = [w.format(s=scenario_file, t=tmp_path, r=recorded).replace("''", "") for w in line.split()]
    refused(command(*words), fragment)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_cuda_without_a_gpu(scenario_file: Path, recorded: Path, tmp_path: Path, command: Command) -> None:
    refused(command("audit", scenario_file, "--set", "device=cuda", "--out", tmp_path / "o"), "torch finds no GPU")
    refused(
        command("attack", recorded, "--attack", "invg", "--device", "cuda", "--out", tmp_path / "o"), "finds no GPU"
    )


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="root reads everything")
def test_unreadable_scenario(scenario_file: Path, tmp_path: Path, command: Command) -> None:
    scenario_file.chmod(0)
    refused(command("audit", scenario_file, "--out", tmp_path / "out"), "Permission denied")


@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
@pytest.mark.parametrize("content", [b"", b"garbage", pickle.dumps(print)], ids=["empty", "garbage", "pickle"])
def test_checkpoint(content: bytes, suffix: str, scenario_file: Path, tmp_path: Path, command: Command) -> None:
    path = (tmp_path / "weights").with_suffix(suffix)
    path.write_bytes(content)
    words = ("--set", f"model.checkpoint={path}", "--out", tmp_path / "out")
    refused(command("audit", scenario_file, *words), f"checkpoint '{path}'")


# --- from Python ---------------------------------------------------------------------------------------------------

IMAGES, ANSWERS = torch.rand(10, 1, 8, 8, generator=torch.Generator().manual_seed(0)), torch.arange(10) % 2
FLAT = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 2))
TEN = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
CALLS: list[tuple[str, dict[str, Any], str]] = [
    ("unknown attack", {"attacks": ["agik"]}, "did you mean 'agic'?"),
    ("unknown key", {"scenario": {"dta": {}}}, "did you mean 'data'?"),
    ("missing file", {"scenario": "nowhere.yaml"}, "No such file"),
    ("negative seed", {"seed": -1}, "seed: -1 isn't allowed"),
    ("unknown adversary", {"threat": {"adversary": "hacker"}}, "'hacker' isn't allowed"),
    ("unknown limit", {"fail_above": {"pnsr": 1.0}}, "unknown metric of a limit 'pnsr'; did you mean 'psnr'?"),
    ("limit of text", {"fail_above": {"psnr": "20"}}, "the limit for 'psnr' is '20'; give a number"),
    ("limits in a list", {"fail_above": ["psnr"]}, "limits are a mapping of metrics to numbers"),
    ("data of text", {"data": "digits"}, "data"),
    ("short form of a model", {"scenario": {"model": "lenet"}, "model": FLAT}, "model: 'lenet' isn't allowed; it"),
    ("short form of data", {"scenario": {"data": "digits"}, "data": (IMAGES, ANSWERS)}, "data: 'digits' isn't allowed"),
    ("model by name", {"model": "resnet20"}, "model is 'resnet20'; give a torch.nn.Module"),
    ("model that isn't made", {"model": torch.nn.Linear}, "model is the class Linear; give a torch.nn.Module"),
    ("labels that end early", {"data": (IMAGES, ANSWERS), "model": TEN}, "Dataset.from_tensors(…, num_classes=10)"),
    ("out can't be made", {"out": "/proc/x"}, "can't write to '/proc/x'"),
    ("targets too few", {"data": (IMAGES, ANSWERS[:3])}, "10 inputs but 3 targets"),
    ("pixels to 255", {"data": (IMAGES * 255, ANSWERS)}, "not in [0, 1]"),
    ("model without parameters", {"data": (IMAGES, ANSWERS), "model": torch.nn.Flatten()}, "the model"),
]


@pytest.mark.parametrize(("arguments", "fragment"), [pytest.param(*row[1:], id=row[0]) for row in CALLS])
def test_python(arguments: dict[str, Any], fragment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(BadInput, match=re.escape(fragment)) as stopped:
        fedaudit.audit(**arguments, progress=False)
    assert "\n" not in str(stopped.value)


@pytest.mark.parametrize(
    ("loss", "fragment"),
    [
        (lambda out, _: out, "must return one number"),
        (lambda out, _: float(out.detach().sum()), "must return one number"),
        (
            lambda out, _: out.sum() * float("no number"),
            "the model or the loss can't take inputs of shape .*: ValueErr",
        ),
    ],
    ids=["not reduced", "not a tensor", "raises"],
)
def test_own_loss_must_be_a_number(loss: Any, fragment: str) -> None:
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 2))
    federations = [{"name": "sgd", "clients": 1, "examples": 1}]
    with pytest.raises(BadInput, match=fragment):
        fedaudit.audit(
            data=(IMAGES, ANSWERS), model=model, loss=loss, federations=federations, attacks=["invg"], progress=False
        )


def test_a_full_disk_is_one_line(recorded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fedaudit.transcript import files

    def full(*_args: object, **_options: object) -> None:
        raise OSError(28, "No space left on device")

    loaded = fedaudit.Transcript.load(recorded)
    monkeypatch.setattr(files, "write", full)
    with pytest.raises(BadInput, match=r"can't write the transcript .* No space left on device"):
        loaded.save(tmp_path / "new")


# --- in a process of its own ---------------------------------------------------------------------------------------


def process(*words: str | Path, **options: Any) -> subprocess.Popen[str]:
    line = [sys.executable, "-m", "fedaudit", *map(str, words)]
    # Where the tests run in the background, interrupts are ignored by all that they start.
    options["preexec_fn"] = lambda: signal.signal(signal.SIGINT, signal.default_int_handler)
    return subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)


def test_real_process_refuses(tmp_path: Path) -> None:
    running = process("audit", tmp_path / "nöwhere.yaml")
    out, err = running.communicate(timeout=60)
    refused(Outcome(running.returncode, out, err), "nöwhere.yaml': No such file or directory")


@pytest.mark.slow
def test_reader_that_goes_away() -> None:
    running = process("list")
    assert running.stdout is not None
    running.stdout.close()
    assert running.stderr is not None
    assert running.stderr.read() == ""
    assert running.wait(timeout=60) not in (0, 1, 2)


@pytest.mark.skipif(os.name != "posix", reason="signals")
@pytest.mark.slow
def test_interrupt(scenario_file: Path, tmp_path: Path) -> None:
    endless = ("--set", "attacks.invg.iterations=1000000000")
    running = process("audit", scenario_file, *endless, "--out", tmp_path / "out", "--workers", "1")
    while not (tmp_path / "out" / "findings").exists():  # made just before the first attack begins
        assert running.poll() is None
        time.sleep(0.05)
    running.send_signal(signal.SIGINT)
    out, err = running.communicate(timeout=60)
    assert running.returncode == 130
    assert out == ""
    assert err.splitlines()[-1].startswith("fedaudit: error: interrupted")
    assert err.count("fedaudit: error") == 1


def test_interrupt_within_generated_code(tmp_path: Path) -> None:
    """As dataclasses and namedtuples make it while libraries are imported; Python remembers such interrupts."""
    code = "import fedaudit.cli as cli; cli.app = lambda *_, **__: exec('raise KeyboardInterrupt'); cli.main()"
    (tmp_path / "interrupted.py").write_text(code)
    line = [sys.executable, "-m", "interrupted"]
    done = subprocess.run(line, capture_output=True, text=True, timeout=60, check=False, cwd=tmp_path)
    assert done.returncode == 130
    assert done.stderr.startswith("fedaudit: error: interrupted")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_output_that_cannot_be_written() -> None:
    with Path("/dev/full").open("w") as full:
        line = [sys.executable, "-m", "fedaudit", "explain"]
        done = subprocess.run(line, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    refused(Outcome(done.returncode, "", done.stderr), "can't write the output: No space left on device")


# --- what must work ------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_spaces_and_letters_in_paths(recorded: Path, tmp_path: Path, command: Command) -> None:
    folder = tmp_path / "dossier d'été [b] 1"
    folder.mkdir()
    scenario = folder / "scénario 1.yaml"
    scenario.write_text(SCENARIO.replace("small", '"[/red] größe"'), encoding="utf-8")
    assert command("audit", scenario, "--out", folder / "öut 1", "--workers", 1).code == 0
    assert (folder / "öut 1" / "report.html").exists()
    shutil.copytree(recorded, folder / "t 1")
    assert (
        command("attack", folder / "t 1", "--attack", "invg", "--set", "iterations=1", "--out", folder / "o 2").code
        == 0
    )


@pytest.mark.slow
def test_a_batch_larger_than_the_data_is_all_of_it(scenario_file: Path, tmp_path: Path, command: Command) -> None:
    words = ("--set", "federations.sgd.batch_size=1000", "--no-controls", "--out", tmp_path / "out", "--workers", 1)
    assert command("audit", scenario_file, *words).code == 0
    result = json.loads((tmp_path / "out" / "results.json").read_text())
    assert "one batch of 1 example" in result["federations"][0]["description"]


def test_what_nobody_foresaw_is_one_line(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise ZeroDivisionError("by nought")

    monkeypatch.setattr("fedaudit.cli.catalogue.catalogue", fail)
    refused(command("list"), "unforeseen ZeroDivisionError: by nought; FEDAUDIT_DEBUG=1 shows where")
    monkeypatch.setenv("FEDAUDIT_DEBUG", "1")
    shown = command("list")
    assert shown.code == 2
    assert "Traceback (most recent call last)" in shown.err


def test_the_help_shows_what_everyday_work_needs_first(command: Command) -> None:
    shown = command("--help").out
    first, rest = shown.index("Commands for every day"), shown.index("Parts of an audit")
    assert first < rest < shown.index("What there is")
    assert all(first < shown.index(f" {name} ") < rest for name in ("init", "audit", "attack", "compare", "explain"))


class Unprintable(BaseException):
    """What a native library's panic may be: no ``Exception``, and without a text."""

    def __str__(self) -> str:
        raise RuntimeError


@pytest.mark.parametrize(
    ("raised", "says"),
    [
        (Unprintable(), "unforeseen Unprintable; FEDAUDIT_DEBUG=1 shows where"),
        (OSError(5, "broken", 7), "unforeseen"),  # a file by its number
        (RecursionError("deep"), "unforeseen RecursionError: deep"),
        (SystemExit(0), "a program that was loaded for this ended itself (sys.exit, code 0); nothing was tested"),
        (SystemExit("bye"), "ended itself (sys.exit, code 'bye')"),
    ],
)
def test_nothing_unforeseen_ends_like_a_limit_or_like_a_success(
    raised: BaseException, says: str, command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise raised

    monkeypatch.setattr("fedaudit.pipeline.transcripts.check_single", fail)
    refused(command("attack", tmp_path), says)


def test_a_package_whose_commands_cant_be_loaded_stops_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        name = "broken"
        dist = None

        def load(self) -> None:
            raise ImportError("no such thing")

    monkeypatch.setattr("fedaudit.cli.commands.entry_points", lambda **_: [Broken()])
    app = typer.Typer()
    app.command("fine")(lambda: None)
    add_commands(app)
    assert app(["fine"], standalone_mode=False) is None
    with pytest.raises(BadInput, match="'fedaudit broken …' can't be loaded: ImportError: no such thing"):
        app(["broken"], standalone_mode=False)


def test_a_setting_that_is_too_deep(command: Command) -> None:
    refused(command("audit", "--set", "data" + ".x" * 5000 + "=1"), "levels deep")
