"""``python -m tools.fuzz --minutes 60``: every target in turn, in worker processes; goes on where it was stopped."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import selectors
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

BLOCK = 200  # cases of one worker
CPU = 10.0  # seconds of one case
WAIT = 90.0  # seconds without a word, after which a worker is ended unless it waits for a processor
START = 600.0  # the same until the first case: imports take long on a busy machine
MEMORY = 2 * 2**20  # KiB that one case may take
CEILING = 6 * 2**30  # bytes of address space beyond what a worker starts with: no case takes the machine with it


def work(name: str, block: int, cases: int) -> None:
    """Run one block of a target's cases in this process: a line of JSON before and after each."""
    from hypothesis import HealthCheck, Phase, given, seed, settings

    from fedaudit.utils.machine import peak_memory, start_measuring_memory
    from tools.fuzz.targets import Finding, targets

    said = sys.stdout
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        target = targets(Path(folder))[name]
        size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (size + CEILING, resource.getrlimit(resource.RLIMIT_AS)[1]))

        @seed(block)
        @settings(
            max_examples=cases,
            database=None,
            deadline=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(target.inputs)
        def case(drawn: Any) -> None:
            print(json.dumps({"case": ascii(drawn)[:2000]}), file=said, flush=True)
            before, began, found = start_measuring_memory(), time.process_time(), None
            try:
                target.run(drawn)
            except target.refusals as error:
                if "\n" in str(error) or len(str(error)) > 3000:
                    found = f"a refusal of many lines: {str(error)[:200]}"
            except Finding as error:
                found = f"taken: {error}"
            except BaseException as error:
                lines = traceback.format_exception(error)
                found = f"traceback: {' '.join(' '.join(lines[-2:]).split())[-500:]}"
            seconds, memory = time.process_time() - began, (peak_memory(before) or 0) * 1024
            if seconds > CPU:
                found = f"{seconds:.0f} s of CPU"
            if memory > MEMORY:
                found = f"{memory / 2**20:.1f} GB of memory"
            print(json.dumps({"found": found}), file=said, flush=True)

        case()


def run_block(name: str, block: int, cases: int) -> tuple[int, list[dict[str, Any]]]:
    """Run one block in a worker; return how many cases it ran, and what it found. One that ends early is a finding."""
    command = [sys.executable, "-m", "tools.fuzz", "--worker", name, "--block", str(block), "--cases", str(cases)]
    ran, findings, last, used = 0, [], "", 0.0
    with tempfile.TemporaryFile() as errors, subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors) as worker:
        assert worker.stdout is not None
        waiting = selectors.DefaultSelector()
        waiting.register(worker.stdout, selectors.EVENT_READ)
        while (ready := waiting.select(timeout=WAIT if ran else START)) or starved(worker.pid, used):
            if not ready:
                continue
            line = worker.stdout.readline()
            used = seconds_used(worker.pid)
            if not line:
                break
            told = json.loads(line)
            if "case" in told:
                last = told["case"]
            else:
                ran += 1
                if told["found"]:
                    findings.append({"target": name, "block": block, "case": last, "found": told["found"]})
        else:
            worker.kill()
            findings.append({"target": name, "block": block, "case": last, "found": f"silent for {WAIT:.0f} s"})
        if worker.wait() not in (0, -9):
            errors.seek(0)
            said = errors.read()[-400:].decode(errors="replace")
            findings.append(
                {"target": name, "block": block, "case": last, "found": f"ended by {worker.returncode}: {said}"}
            )
    return ran, findings


def seconds_used(pid: int) -> float:
    """Return the processor time of a process so far."""
    with contextlib.suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return 0.0


def starved(pid: int, before: float) -> bool:
    """Return whether a silent worker works, but has had less than a case's time from a machine that others use, too."""
    with contextlib.suppress(OSError):
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        return state == "R" and seconds_used(pid) - before < CPU
    return False


def main() -> int:
    """Fuzz for some minutes; exit 1 if anything was found."""
    parser = argparse.ArgumentParser(prog="python -m tools.fuzz", description=__doc__)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--only", nargs="*", help="names of targets; default: all in turn")
    parser.add_argument("--state", type=Path, default=Path(".fuzz.json"), help="where it goes on from")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--block", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--cases", type=int, default=BLOCK, help="of one worker process")
    given = parser.parse_args()
    if given.worker:
        work(given.worker, given.block, given.cases)
        return 0
    from tools.fuzz.names import NAMES

    state: dict[str, Any] = {"blocks": {}, "cases": {}, "findings": []}
    if given.state.exists():
        state = json.loads(given.state.read_text())
    until = time.monotonic() + 60 * given.minutes
    names = given.only or NAMES
    while time.monotonic() < until:
        name = min(names, key=lambda n: state["blocks"].get(n, 0))
        block = state["blocks"].get(name, 0)
        ran, findings = run_block(name, block, given.cases)
        state["blocks"][name] = block + 1
        state["cases"][name] = state["cases"].get(name, 0) + ran
        state["findings"] += findings
        given.state.write_text(json.dumps(state, indent=1))
        for finding in findings:
            print(f"{finding['target']}: {finding['found']}\n    {finding['case'][:300]}", flush=True)
    different = {(f["target"], f["found"][-120:]) for f in state["findings"]}
    total = f"{sum(state['cases'].values()):,} cases, {len(state['findings'])} findings, {len(different)} different"
    each = ", ".join(f"{name} {count}" for name, count in sorted(state["cases"].items()))
    print(f"{total}; {each}")
    return 1 if state["findings"] else 0


if __name__ == "__main__":
    sys.exit(main())
