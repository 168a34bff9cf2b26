"""``fedaudit init``: what it writes is valid, for all that it offers; what it asks; what it reads of a Flower app."""

from __future__ import annotations

import itertools
import json
import os
import random
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from typer.testing import CliRunner

from fedaudit.cli import app as cli
from fedaudit.cli import starter
from fedaudit.cli.starter import ADVERSARIES, ALGORITHMS, Choice, complete, models_for, scenario_text
from fedaudit.data import DATASETS, Dataset, folder_data, load_dataset
from fedaudit.pipeline.prepare import resolve
from fedaudit.scenario.scenario import Scenario, load_scenario, scenario_from
from tests.conftest import Command, refused
from tests.data.medical_cases import dicom, wfdb

RNG = np.random.default_rng(3)
EMBEDDED = tuple(entry.name for entry in DATASETS if entry.info["embedded"])
EXAMPLE = Path(__file__).parents[2] / "examples" / "flower"


class Loaded(dict[str, Dataset]):
    """Embedded data sets, each loaded when it is asked for: some are drawn, which takes long."""

    def __missing__(self, name: str) -> Dataset:
        self[name] = load_dataset(name)
        return self[name]


@pytest.fixture(scope="module")
def datasets() -> dict[str, Dataset]:
    return Loaded()


def offered() -> list[tuple[str, str, str, int | None, str]]:
    """Return every combination that the questions lead to, and other numbers of clients."""
    found = []
    for name in EMBEDDED:
        for model in models_for(load_dataset(name)):
            read = [who for who in ADVERSARIES if not name.startswith("notes") or who in ("server", "eavesdropper")]
            for algorithm, clients, adversary in itertools.product(ALGORITHMS, (None, 2, 20), read):
                found.append((name, model, algorithm, clients, adversary))
    return found


def without_clients(combination: tuple[str, str, str, int | None, str]) -> tuple[str, str, str, str]:
    data, model, algorithm, _, adversary = combination
    return data, model, algorithm, adversary


def check(written: str, data: str, model: str, algorithm: str, clients: int | None, adversary: str) -> Scenario:
    """Load a scenario and make all of its parts, as an audit does before it begins."""
    loaded = scenario_from(yaml.safe_load(written))
    made = resolve(loaded)
    (federation,) = loaded.federations
    assert (loaded.data.name, loaded.model.name, federation.algorithm) == (data, model, algorithm)
    assert clients in (None, federation.clients)
    assert loaded.threat.adversary == ("client" if adversary == starter.MALICIOUS else adversary)
    assert (federation.malicious is not None) == (adversary == starter.MALICIOUS)
    assert made.scenario.attacks
    assert written.count("#") > 12, "it is commented"
    return loaded


@pytest.mark.slow
def test_a_sample_of_what_is_offered_is_valid(datasets):
    for combination in random.Random(0).sample(offered(), 8):
        data, model, algorithm, clients, adversary = combination
        made = complete(Choice(data, model, algorithm, clients, adversary), datasets[data])
        check(scenario_text(made, datasets[data]), *combination)


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_segmentation_network_is_asked_for_members_however_it_is_trained(datasets, algorithm):
    data = datasets["slice-tissues"]
    for clients, adversary in ((2, "server"), (20, starter.MALICIOUS)):
        made = complete(Choice("slice-tissues", "unet", algorithm, clients, adversary), data)
        loaded = check(scenario_text(made, data), "slice-tissues", "unet", algorithm, clients, adversary)
        assert "loss-threshold" in [attack.name for attack in loaded.attacks]


@pytest.mark.long
@pytest.mark.slow
def test_all_that_is_offered_is_valid(datasets):
    """Every data set, model, algorithm and adversary, each with one of the numbers of clients."""
    alike = itertools.groupby(sorted(offered(), key=without_clients), without_clients)
    for row, (_, group) in enumerate(alike):
        numbers = list(group)
        combination = numbers[row % len(numbers)]
        data, model, algorithm, clients, adversary = combination
        made = complete(Choice(data, model, algorithm, clients, adversary), datasets[data])
        check(scenario_text(made, datasets[data]), *combination)


def test_the_defences_that_are_commented_out_are_valid(datasets):
    cases = [("photos", "server"), ("digits", "client"), ("diabetes", "server"), ("digits", starter.MALICIOUS)]
    for data, adversary in cases:
        text = scenario_text(complete(Choice(data, adversary=adversary), datasets[data]), datasets[data])
        open_text = re.sub(r"^# (defences:|  - )", r"\1", text, flags=re.MULTILINE)
        loaded = scenario_from(yaml.safe_load(open_text))
        assert len(loaded.runs()) == 2
        resolve(loaded)


@pytest.mark.parametrize(
    ("data", "adversary", "attacks"),
    [
        ("photos", "server", ["invg", "agic"]),
        ("digits", "eavesdropper", ["invg", "agic"]),
        ("digits", "client", ["loss-threshold", "gradient-norm", "shadow-models"]),
        ("breast-cancer", "server", ["loss-threshold", "gradient-norm", "shadow-models"]),
        ("diabetes", "server", ["attribute-loss"]),
        ("notes", "server", ["dager", "token-presence"]),
        ("notes-causal", "eavesdropper", ["dager", "token-presence"]),
        ("digits", starter.MALICIOUS, ["gan"]),
        ("breast-cancer", starter.MALICIOUS, ["agrevader", "loss-threshold"]),
    ],
)
def test_attacks_suit_the_data_and_the_adversary(datasets, data, adversary, attacks):
    text = scenario_text(complete(Choice(data, adversary=adversary), datasets[data]), datasets[data])
    assert [one.name for one in scenario_from(yaml.safe_load(text)).attacks] == attacks


# The command ----------------------------------------------------------------------------------------------------------


def test_without_a_terminal_the_defaults_are_taken_and_said(command: Command, tmp_path: Path):
    file = tmp_path / "mine.yaml"
    done = command("init", file, "--data", "digits")
    assert done.code == 0
    assert (
        "no terminal to ask on: took --model convnet-small, --algorithm fedsgd, --clients 4, --adversary server"
        in done.err
    )
    assert f"next: fedaudit audit {file} --out mine-audit\n" in done.out
    assert load_scenario(file).data.name == "digits"
    before = file.read_bytes()
    refused(command("init", file), "exists, and init overwrites nothing")
    assert file.read_bytes() == before


@pytest.mark.parametrize(
    ("words", "fragment"),
    [
        (["--data", "digit"], "digits"),
        (["--data", "cifar10"], "data set 'cifar10' not found"),
        (["--model", "lenett"], "lenet"),
        (["--model", "my_package.net:Net"], "docs/how-to/own-model.md"),
        (["--algorithm", "fedavgg"], "fedavg"),
        (["--adversary", "sever"], "server"),
        (["--clients", "0"], "--clients"),
        (["--clients", "900"], "has 168 examples"),
        (["--clients", "1", "--adversary", "malicious-client"], "leave an honest one"),
        (["--data", "breast-cancer", "--model", "resnet20"], "use a model for any input"),
        (["--data", "notes", "--model", "mlp"], "models of tokens: decoder"),
        (["--data", "notes", "--adversary", "client"], "take server or eavesdropper"),
        (["--from-flower", "nowhere"], "no Flower app"),
        (["--data-dir", "nowhere"], "isn't a folder"),
    ],
)
def test_bad_input_is_one_line_and_nothing_is_written(command: Command, tmp_path: Path, words, fragment):
    refused(command("init", tmp_path / "s.yaml", "-y", *words), fragment)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_not_there(command: Command, tmp_path: Path):
    refused(command("init", tmp_path / "no" / "s.yaml", "-y"), "doesn't exist; make it")


def test_questions_are_asked_on_a_terminal_and_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys.modules["fedaudit.cli.init"], "_on_terminal", lambda: True)
    file = tmp_path / "s.yaml"
    answers = "tables\n4\nclient\n\nfedprox\n0\n3\n"  # an unknown name and a number out of range first
    done = CliRunner().invoke(cli, ["init", str(file)], input=answers)
    assert done.exit_code == 0, done.output
    loaded = load_scenario(file)
    assert loaded.data.name == "breast-cancer"
    assert (loaded.threat.adversary, loaded.model.name) == ("client", "mlp")
    assert (loaded.federations[0].algorithm, loaded.federations[0].clients) == ("fedprox", 3)


def test_own_images_from_a_folder(command: Command, tmp_path: Path):
    from PIL import Image

    for split, name, count in itertools.product(("train", "test"), ("cat", "dog"), range(8)):
        folder = tmp_path / "data" / split / name
        folder.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (16, 16), (count * 20, 40, 90 if name == "cat" else 10)).save(folder / f"{count}.png")
    file = tmp_path / "own images.yaml"
    done = command("init", file, "--data", "image-folder", "--data-dir", tmp_path / "data", "-y")
    assert done.code == 0, done
    assert f"--data-dir {tmp_path / 'data'}" in done.out
    assert f"fedaudit audit '{file}' --out 'own images-audit'" in done.out
    resolve(load_scenario(file), data_dir=tmp_path / "data")


def scans_of_findings(folder: Path) -> None:
    """DICOM X-rays, with two findings each in a table."""
    rows = ["file,oedema,nodule"]
    for i in range(24):
        dicom(folder / f"train/{i:02}.dcm", RNG.integers(0, 4096, (20, 24), dtype=np.uint16), BitsStored=12, HighBit=11)
        rows.append(f"train/{i:02}.dcm,{i % 2},{i // 2 % 2}")
    (folder / "labels.csv").write_text("\n".join(rows))


def scans_with_masks(folder: Path) -> None:
    """PNGs, and for each a mask of three classes."""
    from PIL import Image

    for i in range(40):
        for part, most in (("train", 255), ("masks/train", 3)):
            path = folder / part / f"{i:02}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(RNG.integers(0, most, (16, 16), dtype=np.uint8)).save(path)


def volumes_by_class(folder: Path) -> None:
    """Arrays (C, D, H, W)."""
    for split, name, i in itertools.product(("train", "test"), ("ill", "well"), range(6)):
        path = folder / split / name / f"{i}.npy"
        path.parent.mkdir(parents=True, exist_ok=True)
        np.save(path, RNG.random((1, 8, 8, 8)).astype(np.float32))


def ecgs_by_class(folder: Path) -> None:
    """WFDB records of two leads."""
    for split, name, i in itertools.product(("train", "test"), ("sinus", "flutter"), range(6)):
        wfdb(folder / split / name, RNG.integers(-900, 900, (2, 48)), name=f"r{i}", rate=250)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fill", "data", "model", "attacks"),
    [
        (scans_of_findings, "scan-folder", "convnet-small", ["labels", "invg", "agic"]),
        (scans_with_masks, "scan-folder", "unet", ["loss-threshold", "gradient-norm"]),
        (volumes_by_class, "volume-folder", "cnn-3d", ["invg", "agic"]),
        (ecgs_by_class, "signal-folder", "cnn-1d", ["invg", "agic"]),
    ],
)
def test_a_folder_of_ones_own_gives_a_scenario_that_runs(
    command: Command, tmp_path: Path, fill: Callable[[Path], None], data: str, model: str, attacks: list[str]
):
    if fill is scans_of_findings:
        pytest.importorskip("pydicom", reason="DICOM is written by pydicom")
    folder, file = tmp_path / "mine", tmp_path / "s.yaml"
    fill(folder)
    done = command("init", file, "--data-dir", folder, "-y", "--clients", "2")
    assert done.code == 0, done
    loaded = load_scenario(file)
    assert (loaded.data.name, loaded.model.name) == (data, model)
    assert [attack.name for attack in loaded.attacks] == attacks
    quick = [f"attacks.{i}.iterations=2" for i, name in enumerate(attacks) if name in ("invg", "agic")]
    quick += ["federations.0.rounds=1", "evaluation.controls=false", "evaluation.accuracy_every=1"]
    words = [word for setting in quick for word in ("--set", setting)]
    ran = command("audit", file, "--data-dir", folder, "--out", tmp_path / "out", "--workers", "1", *words)
    assert ran.code == 0, ran
    result = json.loads((tmp_path / "out" / "results.json").read_text())
    assert {finding["status"] for finding in result["findings"]} == {"done"}


@pytest.mark.slow
def test_large_images_are_cut_and_large_volumes_get_fewer_iterations(datasets):
    large = Dataset.from_tensors(torch.rand(40, 1, 100, 90), torch.arange(40) % 2, kind="image", name="scans")
    scenario = yaml.safe_load(scenario_text(complete(Choice("scan-folder"), large), large))
    assert scenario["data"]["image_size"] == 64
    assert (
        "image_size"
        not in yaml.safe_load(scenario_text(complete(Choice(), datasets["photos"]), datasets["photos"]))["data"]
    )
    effort = []
    for side in (16, 64):
        volumes = Dataset.from_tensors(
            torch.rand(40, 1, side, side, side), torch.arange(40) % 2, kind="volume", name="v"
        )
        made = complete(Choice("volume-folder", model="mlp"), volumes)
        effort.append(yaml.safe_load(scenario_text(made, volumes))["attacks"][0]["iterations"])
    assert effort == [600, 50]


@pytest.mark.parametrize(
    ("shape", "data"), [((3, 16, 16), "scan-folder"), ((1, 8, 8, 8), "volume-folder"), ((12, 80), None)]
)
def test_what_lies_in_a_folder_is_told_or_asked(
    command: Command, tmp_path: Path, shape: tuple[int, ...], data: str | None
):
    (tmp_path / "train").mkdir()
    for i in range(10):
        np.save(tmp_path / f"train/{i}.npy", RNG.random(shape).astype(np.float32))
    (tmp_path / "labels.csv").write_text("file,ill\n" + "\n".join(f"train/{i}.npy,{i % 2}" for i in range(10)))
    words = ["init", tmp_path / "s.yaml", "-y", "--data-dir", tmp_path, "--clients", "2"]
    if data is None:
        refused(command(*words), "of shape (12, 80) may be an image, a volume or a signal; say which")
        words += ["--data", "signal-folder"]
    assert command(*words).code == 0
    assert load_scenario(tmp_path / "s.yaml").data.name == (data or "signal-folder")


def test_a_folder_without_ones_own_examples_says_nothing(tmp_path: Path):
    assert folder_data(tmp_path) is None
    (tmp_path / "train").mkdir()
    assert folder_data(tmp_path) is None


# A Flower app ---------------------------------------------------------------------------------------------------------


def test_a_flower_app_is_read_and_not_run(command: Command, tmp_path: Path):
    app = tmp_path / "app"
    (app / "net").mkdir(parents=True)
    (app / "pyproject.toml").write_text(
        '[project]\nname = "mine"\n[tool.flwr.app.components]\nserverapp = "net.s:app"\nclientapp = "net.c:app"\n'
        "[tool.flwr.app.config]\nnum-server-rounds = 7\nlocal-epochs = 2\nbatch_size = 8\nlr = 0.03\n"
        "fraction-fit = 0.5\nproximal-mu = 0.2\n"
        '[tool.flwr.federations]\ndefault = "x"\n[tool.flwr.federations.x]\noptions.num-supernodes = 6\n'
    )
    (app / "net" / "s.py").write_text("raise SystemExit('it was run')\nstrategy = FedProx()\n")
    (app / "net" / "c.py").write_text("o = torch.optim.Adam([])\nd = FederatedDataset(dataset='uoft-cs/cifar10')\n")
    (app / "net" / "broken.py").write_text("def (")
    file = tmp_path / "s.yaml"
    done = command("init", file, "-y", "--from-flower", app, "--data", "digits", "--adversary", "client")
    assert done.code == 0, done
    (federation,) = load_scenario(file).federations
    assert (federation.algorithm, federation.clients, federation.clients_per_round) == ("fedprox", 6, 3)
    assert (federation.local_epochs, federation.batch_size, federation.rounds) == (2, 8, 7)
    assert (federation.learning_rate, federation.proximal_mu) == (0.03, 0.2)
    head = file.read_text()
    assert f"# The app itself is audited by: fedaudit audit --flower {app} --nodes 6 --out app-audit" in head
    for unknown in ("the data (uoft-cs/cifar10)", "the model, its loss", "the optimiser (Adam)"):
        assert f"#   - {unknown}" in head
    assert "how many clients" not in head


def test_an_app_that_does_not_say_how_many_clients_it_has(command: Command, tmp_path: Path):
    file = tmp_path / "s.yaml"
    assert command("init", file, "-y", "--from-flower", EXAMPLE).code == 0
    assert load_scenario(file).federations[0].clients == 10
    assert "how many clients there are: 10, as Flower simulates" in file.read_text()


# A real process -------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(os.name != "posix", reason="pseudo-terminals")
@pytest.mark.slow
def test_a_real_terminal(tmp_path: Path):
    import pty

    ours, theirs = pty.openpty()
    line = [sys.executable, "-m", "fedaudit", "init", "s.yaml"]
    with subprocess.Popen(
        line, stdin=theirs, stderr=theirs, stdout=subprocess.PIPE, text=True, cwd=tmp_path
    ) as running:
        os.write(ours, b"diabetes\n\n\n\n\n")
        out, _ = running.communicate(timeout=120)
    os.close(theirs)
    os.close(ours)
    assert running.returncode == 0
    assert out.lstrip().startswith("wrote s.yaml: diabetes, linear, fedavg, 5 clients, an honest-but-curious server\n")


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        pytest.param(["--data", "digits"], marks=pytest.mark.long),
        ["--data", "diabetes"],
        pytest.param(["--data", "notes"], marks=pytest.mark.long),
        pytest.param(["--adversary", "client"], marks=pytest.mark.long),
    ],
    ids=str,
)
def test_what_is_written_runs_within_two_minutes(tmp_path: Path, words: list[str]):
    own = [sys.executable, "-m", "fedaudit"]
    subprocess.run([*own, "init", "s.yaml", "-y", *words], cwd=tmp_path, check=True, timeout=120)
    done = subprocess.run([*own, "audit", "s.yaml", "--out", "out"], cwd=tmp_path, timeout=240, check=True)
    assert done.returncode == 0
    result = json.loads((tmp_path / "out" / "results.json").read_text())
    assert {finding["status"] for finding in result["findings"]} == {"done"}
