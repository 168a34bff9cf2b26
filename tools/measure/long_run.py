"""A day's worth of trials in minutes: does anything grow, and is a study of 20,000 trials still quick to look at?

    python -m tools.measure.long_run --trials 20000 --real 1000 --out FOLDER

A study of so many trials runs with its store, its files, its scheduler and two worker processes, but each trial only
returns what one real trial returned: what is measured is everything around the attacks. Then --real trials of one
iteration run in one process, as a worker would run them. Printed are memory, open handles and times at every quarter.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from fedaudit.utils.machine import proc_field
from fedaudit.utils.progress import Quiet
from fedaudit_lab.studies.backends import processes
from fedaudit_lab.studies.running import Task, TrialOutput, check_versions, run_study, run_trial
from fedaudit_lab.studies.spec import StudySpec, expand, study_from
from fedaudit_lab.studies.store import FILE, Store

_LEVELS = 50


def study(trials: int) -> StudySpec:
    """Return a study of ``trials`` trials of one iteration each, in 50 cells."""
    levels = {f"{i / 1000:.3f}": {"federations.0.learning_rate": i / 1000} for i in range(1, _LEVELS + 1)}
    return study_from(
        {
            "version": 1,
            "name": "long",
            "title": "Many short trials",
            "paper": "none",
            "columns": "rate",
            "scenario": {
                "data": {"name": "digits"},
                "model": {"name": "lenet"},
                "federations": [
                    {"name": "f", "algorithm": "fedavg", "local_steps": 1, "clients": 1, "examples": 1, "batch_size": 1}
                ],
                "attacks": [{"name": "invg", "iterations": 1}],
            },
            "axes": {"rate": levels},
            "scales": {
                "smoke": {"states": "short.", "repetitions": -(-trials // _LEVELS)},
                "cpu": {"states": "short.", "repetitions": 1},
            },
        },
        "the long run",
    )


def handles(process: int | str = "self") -> int:
    """Return how many file handles a process has open."""
    return len(list(Path(f"/proc/{process}/fd").iterdir()))


def state(process: int | str = "self") -> str:
    """Return memory and handles of a process, in words."""
    memory = proc_field("VmRSS", f"/proc/{process}/status") / 1024
    return f"{memory:.0f} MB, {handles(process)} handles"


def short(task: tuple[Task, TrialOutput]) -> TrialOutput:
    """Return what a real trial returned."""
    return task[1]


def around(trials: int, out: Path) -> None:
    """Run the study with trials that take no time, and say what everything else takes."""
    spec = study(trials)
    began = time.perf_counter()
    expanded = expand(spec, "smoke")
    print(f"{len(expanded)} trials expanded in {time.perf_counter() - began:.1f} s", flush=True)
    store = Store(out)
    began = time.perf_counter()
    store.plan({"name": spec.name, "scale": "smoke", "study": spec.model_dump(mode="json")}, expanded)
    print(f"planned in {time.perf_counter() - began:.1f} s", flush=True)
    began = time.perf_counter()
    check_versions(expanded, store, data_dir=None)
    print(f"versions checked in {time.perf_counter() - began:.1f} s", flush=True)
    one = run_trial(Task(expanded[0].key, expanded[0].scenario.to_yaml(), None))
    quarter = max(1, len(expanded) // 4)

    def backend(_: Any, tasks: Sequence[Task], _beat: Any = None) -> Iterator[tuple[Task, Any]]:
        print(f"begin: {state()}", flush=True)
        began = time.perf_counter()
        for done, ((task, _played), result) in enumerate(processes(2)(short, [(task, one) for task in tasks]), 1):
            yield task, result
            if done % quarter == 0:
                pace = (time.perf_counter() - began) / done
                children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()
                workers = "; ".join(state(child) for child in children)
                size = sum(path.stat().st_size for path in out.glob(f"{FILE}*")) / 2**20
                print(
                    f"after {done}: {state()}; workers: {workers}; store {size:.1f} MB; {pace * 1000:.1f} ms a trial",
                    flush=True,
                )

    failed = run_study(spec, expanded, store, backend=backend, data_dir=None, display=Quiet())
    store.close()
    size = (out / FILE).stat().st_size
    print(f"{failed} failed; store {size / 2**20:.1f} MB, {size / len(expanded):.0f} bytes a trial", flush=True)
    files = [path.stat().st_size for path in (out / "trials").rglob("*") if path.is_file()]
    print(f"beside it {len(files)} files of {sum(files) / 2**20:.0f} MB", flush=True)
    began = time.perf_counter()
    store = Store(out)
    store.rows()
    print(f"all rows read in {time.perf_counter() - began:.2f} s", flush=True)
    began = time.perf_counter()
    run_study(spec, expanded, store, backend=backend, data_dir=None, display=Quiet())
    print(f"nothing left to do, found out in {time.perf_counter() - began:.2f} s", flush=True)
    store.close()
    log(out)


def log(out: Path) -> None:
    """Time ``fedaudit study log`` three times, with the start of its interpreter."""
    for words in (["study", "log", str(out)], ["--version"]):
        times = []
        for _ in range(3):
            began = time.perf_counter()
            line = [sys.executable, "-m", "fedaudit", *words]
            done = subprocess.run(line, stdout=subprocess.PIPE, check=True)
            times.append(time.perf_counter() - began)
        said = done.stdout.count(b"\n")
        print(
            f"fedaudit {words[0]} {words[1] if len(words) > 1 else ''}: {min(times):.2f} s ({said} lines)", flush=True
        )


def alone(trials: int) -> None:
    """Run real trials in this process, as a worker would."""
    tasks = [Task(t.key, t.scenario.to_yaml(), None) for t in expand(study(trials), "smoke")[:trials]]
    quarter = max(1, trials // 4)
    began = time.perf_counter()
    for done, task in enumerate(tasks, 1):
        run_trial(task)
        if done % quarter == 0 or done in (1, 10, 100):
            pace = (time.perf_counter() - began) / done
            print(f"after {done} real trials: {state()}; {pace * 1000:.0f} ms a trial", flush=True)


def main() -> None:
    """Run what was asked for."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.measure.long_run", description="Does anything grow in a long run?"
    )
    parser.add_argument("--trials", type=int, default=20000)
    parser.add_argument("--real", type=int, default=1000)
    parser.add_argument("--out", type=Path, required=True, help="a new folder")
    options = parser.parse_args()
    if options.trials:
        around(options.trials, options.out)
    if options.real:
        alone(options.real)


if __name__ == "__main__":
    main()
