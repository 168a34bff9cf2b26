"""Studies: what they expand to, that nothing is lost or done twice, what their tables say."""

from __future__ import annotations

import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from fedaudit.simulation.client import Client
from fedaudit.utils import plain_yaml
from fedaudit.utils.errors import BadInput
from fedaudit.utils.processes import WorkerDied
from fedaudit.utils.progress import Quiet
from fedaudit_lab.studies.backends import processes
from fedaudit_lab.studies.running import Task, check_versions, run_study, run_trial
from fedaudit_lab.studies.spec import StudySpec, builtin_studies, expand, load_study, study_from, trial_key
from fedaudit_lab.studies.store import FILE, Row, Store
from tests.conftest import refused

TINY: dict[str, Any] = {
    "version": 1,
    "name": "tiny",
    "title": "A tiny study",
    "paper": "none",
    "columns": "attack",
    "scenario": {
        "data": {"name": "photos"},
        "model": {"name": "lenet"},
        "federations": [{"name": "f", "algorithm": "fedsgd", "clients": 1, "examples": 1, "batch_size": 1}],
        "attacks": [{"name": "invg", "iterations": 1}],
    },
    "axes": {
        "attack": {"invg": {"attacks": [{"name": "invg"}]}, "agic": {"attacks": [{"name": "agic"}]}},
        "iterations": {"1": {"attacks.0.iterations": 1}, "2": {"attacks.0.iterations": 2}},
    },
    "scales": {"smoke": {"states": "tiny.", "repetitions": 2}, "cpu": {"states": "tiny.", "repetitions": 3}},
    "published": [{"at": {"attack": "agic"}, "value": 30}],
    "claims": [{"text": "AGIC beats InvG", "better": {"attack": "agic"}, "worse": {"attack": "invg"}}],
}


RUN_IN_CI = ("exact/batches", "labels/counts", "vertical/cafe")  # of the others CI checks the plan alone


def tiny(**changes: Any) -> StudySpec:
    return study_from({**TINY, **changes}, "the study 'tiny'")


def as_file(folder: Path, **changes: Any) -> Path:
    path = folder / "tiny.yaml"
    path.write_text(plain_yaml.dumps({**TINY, **changes}))
    return path


# Expansion ----------------------------------------------------------------------------------------------------------


def test_a_grid_is_every_combination_and_repetition():
    trials = expand(tiny(), "smoke")
    assert len(trials) == 2 * 2 * 2
    assert len({trial.key for trial in trials}) == 8
    assert {trial.scenario.seed for trial in trials} == {0, 1}
    assert all(trial.scenario.attacks[0].name == trial.point["attack"] for trial in trials)
    assert all(str(trial.scenario.attacks[0].settings()["iterations"]) == trial.point["iterations"] for trial in trials)


def test_overrides_come_last_and_only_leaves_out():
    trials = expand(tiny(), "smoke", overrides=["seed=7", "model.name=mlp"], only=["attack=agic", "iterations=1"])
    point = {"attack": "agic", "iterations": "1"}
    assert [(t.scenario.seed, t.scenario.model.name, t.point) for t in trials] == [(7, "mlp", point), (8, "mlp", point)]


def test_a_scale_can_shorten_one_level_only():
    quick = {**TINY["scales"]["smoke"], "at": {"attack": {"agic": {"repetitions": 1, "changes": {"seed": 9}}}}}
    trials = expand(tiny(scales={"smoke": quick}), "smoke")
    seeds = {name: {t.scenario.seed for t in trials if t.point["attack"] == name} for name in ("invg", "agic")}
    assert seeds == {"invg": {0, 1}, "agic": {9}}


def test_the_key_is_of_the_scenario_and_of_nothing_else():
    scenario = expand(tiny(), "smoke")[0].scenario
    assert trial_key(scenario.model_copy(update={"name": "another"})) == trial_key(scenario)
    assert trial_key(scenario.model_copy(update={"seed": 5})) != trial_key(scenario)


@pytest.mark.parametrize("name", builtin_studies())
def test_built_in_studies_expand_at_smoke_scale(name):
    study = load_study(name)
    assert set(study.scales) == {"smoke", "cpu", "paper"}
    assert 1 <= len(expand(study, "smoke")) <= 20


@pytest.mark.slow
@pytest.mark.parametrize("name", builtin_studies())
def test_built_in_studies_expand_at_the_other_scales(name):
    study = load_study(name)
    assert len(expand(study, "cpu")) <= len(expand(study, "paper"))


@pytest.mark.slow
@pytest.mark.usefixtures("kept_workers")
@pytest.mark.parametrize(
    "name", [n if n in RUN_IN_CI else pytest.param(n, marks=pytest.mark.long) for n in builtin_studies()]
)
def test_built_in_studies_run_at_smoke_scale(name, command, tmp_path):
    if name.startswith("trees/"):
        pytest.importorskip("xgboost")
    done = command("study", "run", name, "--scale", "smoke", "--out", tmp_path / "out", "--workers", 1)
    assert done.code == 0
    assert {row.status for row in Store(tmp_path / "out").rows()} == {"done"}
    for file in ("result.md", "result.csv", "values.csv", "result.html", "figure.png"):
        assert (tmp_path / "out" / file).stat().st_size > 0


# Store and resume ---------------------------------------------------------------------------------------------------


def run(study: StudySpec, folder: Path, workers: int = 2) -> list[Row]:
    store = Store(folder)
    trials = expand(study, "smoke")
    with store.exclusively():
        store.plan({"name": study.name, "scale": "smoke", "study": study.model_dump(mode="json")}, trials)
        check_versions(trials, store, data_dir=None)
        run_study(study, trials, store, backend=processes(workers), data_dir=None, display=Quiet())
    rows = store.rows()
    store.close()
    return rows


@pytest.mark.slow
def test_any_number_of_workers_gives_the_same_rows(tmp_path):
    def numbers(rows: list[Row]) -> list[Any]:
        return [(r.key, [(u["client"], u["images"]) for u in (r.outcome or {})["updates"]]) for r in rows]

    one, two = run(tiny(), tmp_path / "1", workers=1), run(tiny(), tmp_path / "2", workers=2)
    assert numbers(one) == numbers(two)
    assert all(row.attempts == 1 for row in one + two)


@pytest.mark.slow
def test_a_failed_trial_does_not_stop_the_others_and_is_tried_again(command, tmp_path):
    axes = {"examples": {"1": {}, "too many": {"federations.f.examples": 10**6}}}
    path, out = as_file(tmp_path, axes=axes, columns="examples", published=[], claims=[]), tmp_path / "out"
    done = command("study", "run", path, "--out", out, "--workers", 1)
    assert done.code == 2
    assert "2 trials failed" in done.err
    assert done.err.count("fedaudit: error: ") == 1
    rows = Store(out).rows()
    assert [row.status for row in rows] == ["done", "failed", "done", "failed"]
    assert "examples" in (rows[1].error or "")
    assert (rows[1].error or "") in (out / "result.md").read_text()
    assert rows[1].error is not None
    assert rows[1].key[:8] in command("study", "log", out).out
    assert "examples" in command("study", "log", out, rows[1].key[:8]).out
    again = command("study", "run", path, "--out", out, "--workers", 1)
    assert again.code == 2
    assert [row.attempts for row in Store(out).rows()] == [1, 2, 1, 2]


def finished(folder: Path) -> dict[str, str]:
    """Return key and time of every finished trial, as another process sees them."""
    if not (folder / FILE).exists():
        return {}
    db = sqlite3.connect(f"file:{folder / FILE}?mode=ro", uri=True, timeout=30)
    try:
        return dict(db.execute("select key, finished from trials where status = 'done'"))
    except sqlite3.OperationalError:  # killed before there was a table
        return {}
    finally:
        db.close()


@pytest.mark.long
@pytest.mark.slow
def test_a_study_killed_again_and_again_ends_with_every_trial_once(tmp_path):
    path = as_file(tmp_path, scales={"smoke": {"states": "tiny.", "repetitions": 8}})
    out = tmp_path / "out"
    words = [sys.executable, "-m", "fedaudit", "study", "run", str(path), "--out", str(out), "--workers", "2"]
    rng = random.Random(0)
    kills = 0
    seen: dict[str, str] = {}
    while kills < 10:
        before = len(seen)
        process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
        # kill in the imports, in the first trials, or between them: not always after progress
        patience = time.monotonic() + rng.uniform(0.5, 12)
        goal = before + rng.choice([0, 1, 1, 2])
        while time.monotonic() < patience and len(finished(out)) <= goal and process.poll() is None:
            time.sleep(0.02)
        time.sleep(rng.uniform(0, 0.3))
        assert process.poll() is None, "the study ended before it was killed often enough; give it more trials"
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        kills += 1
        now = finished(out)
        assert seen.items() <= now.items(), "a finished trial was lost or run again"
        seen = now
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    store = Store(out)
    rows = store.rows()
    assert len(rows) == 32
    assert {(row.status, row.attempts) for row in rows} == {("done", 1)}
    assert seen.items() <= finished(out).items()
    assert {p.name for p in (out / "trials").iterdir()} == {row.key for row in rows}


@pytest.mark.slow
@pytest.mark.usefixtures("checkpoint_every_round")
def test_a_trial_that_is_killed_goes_on_in_the_round_where_it_stood(tmp_path, monkeypatch):
    changes = {"federations.f.rounds": 5, "federations.f.examples": 4, "federations.f.record": [4]}
    trial = expand(tiny(), "smoke", overrides=[f"{name}={json.dumps(value)}" for name, value in changes.items()])[0]
    ran: list[int] = []
    one_round = Client.run_round
    killed = True

    def counted(self: Client, model: Any, index: int, *rest: Any) -> Any:
        if killed and index == 3:
            raise KeyboardInterrupt
        ran.append(index)
        return one_round(self, model, index, *rest)

    monkeypatch.setattr(Client, "run_round", counted)
    task = Task(trial.key, trial.text, None, str(tmp_path / "unfinished"))
    with pytest.raises(KeyboardInterrupt):
        run_trial(task)
    killed = False
    gone_on = run_trial(task).outcome
    assert ran == [0, 1, 2, 3, 4]
    (update,), (whole,) = gone_on["updates"], run_trial(Task(trial.key, trial.text, None)).outcome["updates"]
    assert update["images"] == whole["images"]
    assert "cpu_seconds" not in update["metrics"], "of a part of the trial"
    assert whole["metrics"]["cpu_seconds"] > 0


@pytest.mark.slow
def test_two_runs_on_one_folder_do_not_meet(tmp_path):
    store = Store(tmp_path)
    with store.exclusively():
        words = [sys.executable, "-m", "fedaudit", "study", "run", "agic/table-4", "--out", str(tmp_path)]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.strip().splitlines()[-1] == (
        f"fedaudit: error: another run is at work in '{tmp_path}'; wait for it, or choose another --out"
    )
    with store.exclusively():
        pass


# Workers ------------------------------------------------------------------------------------------------------------


def dies_once(folder: str) -> str:
    mark = Path(folder) / "mark"
    if not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return "lived"


def behaves(order: tuple[str, str]) -> str:
    what, folder = order
    if what == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "raises":
        raise BadInput("no good")
    return dies_once(folder) if what == "dies once" else what


@pytest.mark.slow
def test_a_worker_that_dies_costs_its_trial_one_retry_and_nothing_else(tmp_path):
    orders = [(what, str(tmp_path)) for what in ("a", "dies once", "raises", "dies", "b")]
    results = dict(processes(2)(behaves, orders))
    assert results[orders[0]] == "a"
    assert results[orders[1]] == "lived"
    assert results[orders[4]] == "b"
    assert isinstance(results[orders[2]], BadInput)
    assert isinstance(results[orders[3]], WorkerDied)


# Tables -------------------------------------------------------------------------------------------------------------


def row(point: dict[str, str], repetition: int, *numbers: float | None, reason: str | None = None) -> Row:
    update = {
        "federation": "f",
        "round": 0,
        "client": 0,
        "reason": reason,
        "seconds": 1.0,
        "images": [{"psnr": n, "ssim": n, "mse": n, "lpips": None} for n in numbers],
    }
    return Row(f"{point}{repetition}", point, repetition, "done", 1, {"updates": [update]}, 2.0, None)


def rows_of(agic: list[float], invg: list[float]) -> list[Row]:
    return [
        row({"attack": attack, "iterations": "1"}, i, value)
        for attack, numbers in (("agic", agic), ("invg", invg))
        for i, value in enumerate(numbers)
    ]


# Bad input ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"version": 2}, "has version 2; this fedaudit reads version 1"),
        ({"columns": "atack"}, "did you mean 'attack'"),
        ({"axis": {}}, "axis"),
        ({"axes": {}}, "axes"),
        ({"scales": {"huge": {"states": "x", "repetitions": 1}}}, "scales"),
        ({"scales": {"smoke": {"states": "x", "repetitions": 0}}}, "repetitions"),
        ({"metric": "pnsr"}, "did you mean 'psnr'"),
        ({"claims": [{"text": "x", "better": {"attack": "gaic"}, "worse": {}}]}, "did you mean 'agic'"),
        ({"claims": [{"text": "x", "better": 1.0, "worse": 2.0}]}, "compares two numbers"),
        ({"scales": {"smoke": {"states": "x", "repetitions": 1, "only": {"attack": ["none"]}}}}, "level of attack"),
        ({"scenario": {**TINY["scenario"], "modle": {}}}, "did you mean 'model'"),
        ({"axes": {"attack": {"a": {}, "b": {}}}, "published": [], "claims": []}, "the scenario is the same"),
        ({"axes": {"attack": {"a": {"nowhere.x": 1}}}, "published": [], "claims": []}, "nowhere"),
        ({"axes": {"attack": {"a": {"attacks": ["invg", "agic"]}}}, "published": [], "claims": []}, "one attack"),
        ({"axes": {"attack": {"a": {"attacks.0.betta": 1}}}, "published": [], "claims": []}, "betta"),
    ],
)  # fmt: skip
def test_a_wrong_study_is_one_line(changes, reason, command, tmp_path):
    path = as_file(tmp_path, **changes)
    done = command("study", "run", path, "--out", tmp_path / "out")
    refused(done, reason)
    assert not (tmp_path / "out" / FILE).exists()


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["run", "agic/table-9", "--out", "OUT"], "did you mean 'agic/table-"),
        (["run", "agic/table-4", "--scale", "huge", "--out", "OUT"], "unknown scale 'huge'"),
        (["run", "agic/table-4", "--only", "atack=agic", "--out", "OUT"], "did you mean 'attack'"),
        (["run", "agic/table-4", "--only", "attack=gaic", "--out", "OUT"], "did you mean 'agic'"),
        (["run", "agic/table-4", "--only", "attack", "--out", "OUT"], "expected axis=level"),
        (["run", "agic/table-4", "--set", "modle.name=lenet", "--out", "OUT"], "did you mean 'model'"),
        (["run", "agic/table-4", "--out", "/proc/nowhere"], "/proc/nowhere"),
        (["run", "nothing.yaml", "--out", "OUT"], "nothing.yaml"),
        (["run", "agic/table-4", "--out", "OUT", "--ray", "auto"], "--ray"),
        (["show", "agic/tabel-4"], "did you mean 'agic/table-4'"),
        (["report", "OUT"], "holds no study"),
        (["log", "OUT"], "holds no study"),
    ],
)
def test_wrong_words_are_one_line(words, reason, command, tmp_path):
    done = command("study", *[str(tmp_path / "out") if word == "OUT" else word for word in words])
    refused(done, reason)


def test_a_foreign_or_damaged_file_is_left_alone(command, tmp_path):
    path, file = as_file(tmp_path), tmp_path / FILE
    db = sqlite3.connect(file)
    db.execute("create table theirs (x)")
    db.commit()
    db.close()
    before = file.read_bytes()
    assert "not a study's" in command("study", "run", path, "--out", tmp_path).err
    assert file.read_bytes() == before
    file.write_bytes(b"no database at all" * 100)
    assert "not a database" in command("study", "run", path, "--out", tmp_path).err
    file.unlink()
    db = sqlite3.connect(file)
    db.execute("pragma application_id=1717920865")
    db.execute("pragma user_version=99")
    db.execute("create table trials (x)")
    db.close()
    assert "has format 99" in command("study", "run", path, "--out", tmp_path).err


def test_a_folder_holds_one_study_at_one_scale(command, tmp_path):
    store = Store(tmp_path)
    store.plan({"name": "another", "scale": "cpu"}, [])
    store.close()
    done = command("study", "run", as_file(tmp_path), "--out", tmp_path)
    assert done.code == 2
    assert "holds another at scale cpu" in done.err


@pytest.mark.slow
@pytest.mark.usefixtures("trials_here")
def test_what_set_changed_stands_in_the_result_and_is_not_mixed(command, tmp_path):
    run = ("study", "run", as_file(tmp_path), "--scale", "smoke", "--out", tmp_path / "out", "--workers", 1)
    only = ("--only", "attack=invg", "--only", "iterations=1")
    changed = (*only, "--set", "attacks.0.learning_rate=0.05")
    assert command(*run, *changed).code == 0
    for name in ("result.md", "result.html"):
        assert "Changed by --set: attacks.0.learning_rate=0.05." in (tmp_path / "out" / name).read_text()
    assert "--set attacks.0.learning_rate=0.05 --out DIR" in (tmp_path / "out/result.html").read_text()
    refused = command(*run, "--only", "attack=agic")
    assert (refused.code, "holds finished trials with --set attacks.0.learning_rate=0.05" in refused.err) == (2, True)
    assert command(*run, *only, "--again").code == 0
    assert "Changed by --set" not in (tmp_path / "out/result.md").read_text()
    assert command(*run, "--only", "attack=agic").code == 0


@pytest.mark.slow
@pytest.mark.usefixtures("trials_here")
def test_trials_of_axes_that_a_study_has_no_more_are_refused_before_anything_runs(command, tmp_path):
    axes = {"attack": {"invg": {"attacks.0.iterations": 3}}, "model": {"lenet": {"model.name": "lenet"}}}
    (tmp_path / "changed").mkdir()
    changed = as_file(tmp_path / "changed", published=[], claims=[], axes=axes)
    rest = ("--scale", "smoke", "--only", "attack=invg", "--workers", 1, "--out")
    assert command("study", "run", as_file(tmp_path), "--only", "iterations=1", *rest, tmp_path / "out").code == 0
    refused = command("study", "run", changed, *rest, tmp_path / "out")
    assert refused.code == 2
    assert "2 finished trials" in refused.err
    assert "of the same cells with other settings" in refused.err
    assert command("study", "run", changed, *rest, tmp_path / "out", "--again").code == 0
    store = Store(tmp_path / "planned")
    store.plan({"name": "tiny", "scale": "smoke", "study": {}}, expand(tiny(), "smoke"))
    store.close()
    assert command("study", "run", changed, *rest, tmp_path / "planned").code == 0, "nothing of the others was finished"


def test_a_full_disk_is_one_line_and_loses_nothing(tmp_path):
    script = f"""
import resource, signal, sys
from pathlib import Path
from fedaudit_lab.studies.store import Store
store = Store(Path({str(tmp_path)!r}))
store.plan({{"name": "x", "scale": "smoke"}}, [])
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (65536, 65536))
store.plan({{"name": "x", "scale": "smoke", "study": {{"title": "y" * 10**6}}}}, [])
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "BadInput: can't write" in done.stderr.strip().splitlines()[-1]
    assert "finished before is kept" in done.stderr
    store = Store(tmp_path)
    assert store.about() == {"name": "x", "scale": "smoke"}


def test_studies_are_listed_for_programs(command):
    listed = json.loads(command("study", "list", "--json").out)["studies"]
    assert {"agic/table-1", "agic/table-4", "agic/figure-8"} <= {entry["name"] for entry in listed}
    assert all(entry["summary"] and entry["paper"] for entry in listed)
    assert "2,000 iterations" in command("study", "show", "agic/table-4").out
