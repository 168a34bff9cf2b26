"""What a user reads while a command runs: what will run, how far it is, what was kept, what to do next."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.progress import Progress

import fedaudit
from fedaudit.pipeline.prepare import resolve
from fedaudit.pipeline.run import record
from fedaudit.pipeline.transcripts import simulate_all
from fedaudit.scenario.scenario import scenario_from
from fedaudit.simulation.simulator import simulate
from fedaudit.utils import progress
from fedaudit.utils.errors import BadInput
from fedaudit.utils.progress import Quiet, about, live_display
from tests.conftest import Command, refused

pytestmark = pytest.mark.usefixtures("kept_workers")

LABELS: dict[str, Any] = {
    "name": "many labels",
    "data": {"name": "digits"},
    "model": {"name": "logistic"},
    "federations": [{"name": "fedsgd", "clients": 12, "examples": 12}],
    "attacks": ["labels"],
}
TWO = {
    **LABELS,
    "federations": [
        {"name": "a", "clients": 2, "examples": 2},
        {"name": "b", "algorithm": "fedavg", "clients": 1, "examples": 2, "local_steps": 2},
    ],
}


@pytest.fixture
def scenario(tmp_path: Path) -> Path:
    return written(tmp_path / "labels.yaml", LABELS)


def written(path: Path, values: dict[str, Any]) -> Path:
    path.write_text(yaml.safe_dump(values))
    return path


# --- how far it is ---------------------------------------------------------------------------------------------------


def test_the_time_left_is_that_of_the_pace_so_far() -> None:
    now = [1000.0]
    stages = Progress(get_time=lambda: now[0], speed_estimate_period=600, disable=True)
    number = stages.add_task("10 attacks", total=200)
    (task,) = stages.tasks
    told = []
    for seconds, done in [(15, 0), (0, 100), (60, 110), (60, 120), (60, 200)]:  # 100 are kept from an earlier run
        now[0] += seconds
        stages.update(number, completed=done)
        told.append(progress.line(task))
    assert told == [
        "10 attacks: 0 % done after 15 s",
        "10 attacks: 50 % done after 15 s",
        "10 attacks: 55 % done, about 9 min left",
        "10 attacks: 60 % done, about 8 min left",
        "10 attacks: 100 % done; the next step is running",
    ]


@pytest.mark.parametrize(
    ("seconds", "text"), [(1, "5 s"), (38, "40 s"), (89, "90 s"), (100, "2 min"), (5000, "83 min"), (9000, "2.5 h")]
)
def test_estimates_are_rounded(seconds: float, text: str) -> None:
    assert about(seconds) == text


def test_a_log_has_lines_now_and_then(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(progress, "SOON", 0.05)
    monkeypatch.setattr(progress, "EVERY", 0.1)
    with live_display() as display:
        display.stage("silent work", 3)
        time.sleep(0.5)
    told = capsys.readouterr().err.splitlines()
    assert 1 <= len(told) <= 6
    assert set(told) == {"silent work: 0 % done after 5 s"}
    time.sleep(0.2)
    assert capsys.readouterr().err == ""
    with live_display(enabled=False) as display:
        assert isinstance(display, Quiet)


@pytest.mark.skipif(sys.platform == "win32", reason="pseudo-terminals")
def test_a_terminal_has_a_live_display_and_lines_that_stay() -> None:
    import pty

    code = (
        "import time\n"
        "from fedaudit.utils import progress\n"
        "progress.SOON = 0.1\n"
        "with progress.live_display() as d:\n"
        " r = d.stage('ten attacks', 4)\n d.say('resuming: [3] kept')\n time.sleep(0.2)\n r(4)\n"
        " d.stage('a moment', 4)(4)"
    )
    ours, theirs = pty.openpty()
    subprocess.run([sys.executable, "-c", code], stderr=theirs, check=True)
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", read(ours))
    assert "resuming: [3] kept" in shown
    assert re.search(r"ten attacks.*100%", shown)
    assert "a moment" not in shown


def read(descriptor: int) -> str:
    import os

    return os.read(descriptor, 100_000).decode()


# --- what was kept ---------------------------------------------------------------------------------------------------


def test_kept_findings_are_counted_aloud(command: Command, scenario: Path, tmp_path: Path) -> None:
    line = ("audit", scenario, "--out", tmp_path / "out", "--workers", "1")
    assert "resuming" not in command(*line).err
    kept = sorted((tmp_path / "out" / "findings").glob("*.safetensors"))
    for file in kept[:7]:
        file.unlink()
    assert f"resuming: 5 of 12 attacks kept in {tmp_path / 'out' / 'findings'}\n" in command(*line).err


class Killed(Exception):
    pass


@pytest.mark.usefixtures("checkpoint_every_round")
def test_a_simulation_that_goes_on_says_so(tmp_path: Path) -> None:
    made = scenario_from({**LABELS, "federations": [{"name": "f", "clients": 2, "examples": 4, "rounds": 5}]})
    (federation,) = resolve(made).federations
    checkpoint = tmp_path / "f.simulation"
    told: list[str] = []

    def killed(done: float) -> None:
        if done > 6:  # updates: in round 3
            raise Killed

    with pytest.raises(Killed):
        simulate(federation, report=killed, checkpoint=checkpoint, say=told.append)
    assert told == []
    simulate(federation, checkpoint=checkpoint, say=told.append)
    assert told == [f"resuming: 3 of 5 rounds of federation f kept in {checkpoint}"]


# --- what it came to -------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_terminal_ends_with_the_report_s_sentences_and_a_next_step_that_works(
    command: Command, scenario: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = command("audit", scenario, "--workers", "1")
    lines = done.out.splitlines()
    page = (tmp_path / "audit" / "report.html").read_text()
    assert "The server can tell which classes a client trained on" in lines[0]
    assert lines[0] in page
    assert any(line.startswith("labels on fedsgd: ") for line in lines)
    *_, where, following = lines
    assert where == "report: audit/report.html"
    found = re.fullmatch(r"next: open audit/report\.html; .*: fedaudit (audit .*)", following)
    assert found
    after = command(*shlex.split(found[1]), "--workers", "1")
    assert after.code == 0
    assert after.out.splitlines()[-1] == "next: open audit-defences/report.html"  # defences were compared


# --- a folder that holds another audit -------------------------------------------------------------------------------


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


@pytest.mark.slow
def test_a_folder_of_another_audit_is_refused_and_made_room_in_only_where_wanted(
    command: Command, tmp_path: Path
) -> None:
    values = {**TWO, "model": {"name": "mlp", "width": 8}, "attacks": [{"name": "invg", "iterations": 2}]}
    made, out = written(tmp_path / "s.yaml", values), tmp_path / "out"
    line = ("audit", made, "--out", out, "--workers", "1", "--no-controls")
    assert command(*line).code == 0
    (out / "images" / "mine.png").write_text("a stranger's")
    (out / "notes.txt").write_text("a stranger's")
    before = files(out)
    pages = [name for name in before if name.startswith("images/b-")]
    assert pages
    assert command(*line).code == 0  # the same goes on
    assert files(out) == before
    other = (*line, "--set", "evaluation.attacked_federations=[a]", "--seed", "1")
    refused(command(*other), f"'{out}' holds another audit, 'many labels'; give another --out, or --overwrite")
    with pytest.raises(BadInput, match="overwrite=True"):
        fedaudit.audit({**values, "seed": 1}, out=out, progress=False)
    assert files(out) == before
    assert command(*other, "--overwrite").code == 0
    after = files(out)
    assert not after & set(pages)
    assert {"images/mine.png", "notes.txt", "report.html", "results.json"} <= after
    assert {name for name in before if name.startswith("findings/")} <= after
    fedaudit.audit({**values, "seed": 2}, out=out, overwrite=True, progress=False)
    assert "images/mine.png" in files(out)


def test_a_list_that_names_files_elsewhere_deletes_none(command: Command, scenario: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    (out / "images").mkdir(parents=True)
    for name in ("../victim.png", "images/x.txt", "other.png", "images/old.png", "../victim.safetensors"):
        (out / name).write_text("x")
    (out / "images" / "link.png").symlink_to(tmp_path / "victim.png")
    named = ["../victim.png", "images/../../victim.png", str(tmp_path / "victim.png"), "images/x.txt", "other.png",
             "images/old.png", "images/link.png"]  # fmt: skip
    rows = [{"file": "../victim.safetensors"}, {"file": 3}, "row"]
    (out / "results.json").write_text(json.dumps({"name": "a trap", "findings": named}))
    (out / "findings.json").write_text(json.dumps(rows))
    line = ("audit", scenario, "--out", out, "--workers", "1")
    refused(command(*line), "holds another audit, 'a trap'")
    assert command(*line, "--overwrite").code == 0
    assert (tmp_path / "victim.png").exists()
    assert (tmp_path / "victim.safetensors").exists()
    assert {"images/x.txt", "other.png", "images/link.png"} <= files(out)
    assert not {"images/old.png", "findings.json"} & files(out)


def test_what_a_scenario_leaves_open_is_the_same_when_it_is_repeated(command: Command, tmp_path: Path) -> None:
    values = {key: value for key, value in LABELS.items() if key != "attacks"}
    values["threat"] = {"adversary": "client"}  # nothing fits quickly
    line = ("audit", written(tmp_path / "s.yaml", values), "--out", tmp_path / "out", "--workers", "1")
    first = command(*line)
    assert first.code == command(*line).code == 0
    refused(command(*line, "--set", "model.batch_norm=train"), "holds another audit")


@pytest.mark.parametrize("content", ["", "[]", "{", '{"scenario": 3}', "[" * 100_000])
def test_results_that_cannot_be_read_are_another_audit_s(
    content: str, command: Command, scenario: Path, tmp_path: Path
) -> None:
    (tmp_path / "results.json").write_text(content)
    refused(command("audit", scenario, "--out", tmp_path), "holds another audit")


def test_attacks_on_a_transcript_know_their_own_folder(command: Command, scenario: Path, tmp_path: Path) -> None:
    assert command("simulate", scenario, "--out", tmp_path / "t").code == 0
    line = ("attack", tmp_path / "t", "--attack", "labels", "--out", tmp_path / "out", "--workers", "1")
    assert command(*line).code == 0
    assert "resuming: 12 of 12 attacks kept" in command(*line).err
    refused(command(*line, "--seed", "3"), "holds another audit")
    refused(command(*line, "--set", "threat.knows_training=false"), "holds another audit")
    refused(command("audit", scenario, "--out", tmp_path / "out"), "holds another audit")
    (tmp_path / "t" / "truth.safetensors").unlink()
    assert command(*line, "--seed", "3", "--overwrite").code == 0
    assert "report.html" not in files(tmp_path / "out")
    assert "findings.json" in files(tmp_path / "out")
    refused(command(*line, "--seed", "4"), "holds another audit")


# --- one grammar -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def transcript(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recorded") / "t"
    values = {**TWO, "federations": TWO["federations"][:1], "model": {"name": "mlp", "width": 8}}
    fedaudit.simulate(values, out=folder, progress=False)
    return folder


@pytest.mark.slow
def test_settings_are_written_alike_in_every_command(command: Command, transcript: Path, tmp_path: Path) -> None:
    attacks = ("--attack", "invg", "--attack", "agic", "--attack", "labels", "--no-controls", "--workers", "1")
    settings = {}
    for name, line in {
        "short": ["iterations=3", "attacks.agic.iterations=2", "threat.knows_training=false"],
        "other order": ["attacks.agic.iterations=2", "iterations=3", "threat.knows_training=false"],
        "long": ["attacks.0.iterations=3", "attacks.agic.iterations=2", "threat.knows_training=false"],
    }.items():
        words = [word for text in line for word in ("--set", text)]
        done = command("attack", transcript, *attacks, *words, "--out", tmp_path / name)
        assert done.code == 0, done.err
        result = json.loads((tmp_path / name / "results.json").read_text())
        assert not any("how clients train" in known for known in result["adversary"]["knows"])
        settings[name] = [(a["name"], a["settings"].get("iterations")) for a in result["attacks"]]
    assert list(settings.values()) == [[("invg", 3), ("agic", 2), ("labels", None)]] * 3


@pytest.mark.parametrize(
    ("setting", "fragment"),
    [
        ("iteratons=3", "unknown setting 'iteratons'; did you mean 'iterations'?"),
        ("attacks.agic.iterations=3", "unknown item 'agic'; known: invg"),
        ("attacks.invg.iteratons=3", "did you mean 'iterations'?"),
        ("attacks=agic", "--attack says which"),
        ("attacks.invg.name=agic", "--attack says which"),
        ("attacks.invg=3", "--attack says which"),
        ("threat=3", "threat.key=value"),
        ("threat.knows_everything=true", "knows_everything"),
        ("federations.fedsgd.rounds=3", "set it in 'fedaudit simulate'"),
        ("seed=3", "give --seed"),
        ("iterations", "expected key=value"),
    ],
)
def test_a_setting_that_does_not_fit_a_transcript(
    setting: str, fragment: str, command: Command, transcript: Path, tmp_path: Path
) -> None:
    done = command("attack", transcript, "--attack", "invg", "--set", setting, "--out", tmp_path / "out")
    refused(done, fragment)


# --- several federations ---------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_all_federations_are_simulated_into_a_folder_each(command: Command, tmp_path: Path) -> None:
    made, out = written(tmp_path / "s.yaml", TWO), tmp_path / "t"
    assert command("simulate", made, "--out", out).code == 0
    assert {path.name for path in out.iterdir()} == {"a", "b"}
    assert not out.with_name("t.partial").exists()
    for name in ("a", "b"):
        assert command("simulate", made, "--federation", name, "--out", tmp_path / name).code == 0
        both = [fedaudit.Transcript.load(folder).fingerprint() for folder in (out / name, tmp_path / name)]
        assert both[0] == both[1]
        assert command("attack", out / name, "--attack", "labels", "--out", tmp_path / f"audit-{name}").code == 0
    refused(command("attack", out, "--attack", "labels"), f"holds 2 transcripts; attack one at a time: {out / 'a'}")
    refused(command("simulate", made, "--out", out), "isn't an empty folder")


def test_a_simulation_of_several_federations_that_was_killed_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, out = scenario_from(TWO), tmp_path / "t"
    rest: dict[str, Any] = {"data_dir": None, "workers": 1, "display": Quiet()}

    def killed(*given: Any, **options: Any) -> Any:
        (options["store"] / "a").mkdir(parents=True)
        (options["store"] / "a" / "half").touch()
        (options["store"] / "a.simulation").touch()
        raise Killed

    monkeypatch.setattr("fedaudit.pipeline.transcripts.record", killed)
    with pytest.raises(Killed):
        simulate_all(made, out, **rest)
    monkeypatch.setattr("fedaudit.pipeline.transcripts.record", record)
    simulate_all(made, out, **rest)
    assert {path.name for path in out.iterdir()} == {"a", "b"}
    assert not (out / "a" / "half").exists()
    assert not out.with_name("t.partial").exists()


# --- what there is ---------------------------------------------------------------------------------------------------


def test_the_list_fits_a_screen(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("FORCE_COLOR", "1")  # as on a terminal
    shown = json.loads(command("list", "--json").out)
    lines = re.sub(r"\x1b\[[0-9;]*m", "", command("list").out).splitlines()
    assert len(lines) <= 84  # of a tall terminal
    assert max(map(len, lines)) <= 80
    for kind, entries in shown.items():
        assert f"{kind} ({len(entries)})" in lines
        assert {entry["name"] for entry in entries} <= set(" ".join(lines).split())
    one = re.sub(r"\x1b\[[0-9;]*m", "", command("list", "attacks").out).splitlines()
    assert [line.split()[0] for line in one] == [entry["name"] for entry in shown["attacks"]]
    assert max(map(len, one)) <= 80
    assert shown["attacks"][0]["paper"] in command("list", "--long").out


def test_a_benchmark_is_written_where_it_is_wanted(command: Command, tmp_path: Path) -> None:
    done = command("bench", "local-model", "--quick", "--json", "--out", tmp_path / "b")
    written_there = json.loads((tmp_path / "b" / "bench.json").read_text())
    assert written_there == {"local-model": json.loads(done.out)}
    assert "local model" in (tmp_path / "b" / "bench.html").read_text()
    assert f"page: {tmp_path / 'b' / 'bench.html'}" in done.err
