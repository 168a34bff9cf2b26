"""Break what writes to disk, at random moments, and see that nothing is lost, doubled or different.

    python -m tools.faults --kills 300 --seed 0

Studies, audits, simulations and recorders are killed (or one of their workers is), lose their folder, fill their disk,
find it read-only, or see the clock jump. Then they go on, and what they leave must equal what an undisturbed run
leaves, but for times: every number, image and file, and no file more. docs/evidence/robustness.md says what was found.

Commands run in forks of this process, which has imported everything, so that a kill costs a second. Some kills
(--fresh) are of fresh interpreters with fresh interpreters as workers.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import importlib
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from tools.faults.cases import Case, Wrong, cases, left
from tools.faults.plans import Plan, all_end, as_in_a_shell, begin, end, processes_of


class Runner:
    """Breaks one case in every way and keeps count.

    Args:
        case: what is broken.
        root: a folder for it, whose parent takes logs.
        rng: decides on everything.
    """

    def __init__(self, case: Case, root: Path, rng: random.Random) -> None:
        self.case, self.root, self.rng = case, root, rng
        (root / "temporary").mkdir(parents=True)
        self.log, self.folder = root.with_suffix(".log"), root / "out"
        self.counts: Counter[str] = Counter()
        self.found: list[str] = []
        told = root.with_suffix(".told")
        for _ in range(2):  # the second with everything imported, as all that follow
            self.clear()
            began = time.monotonic()
            if code := self.play(told=told):
                raise SystemExit(f"{case.name}: undisturbed it ends with {code}: {self.log.read_text()}")
            self.seconds = time.monotonic() - began
            events = import_what_was(told)
        self.events = events
        self.bytes = sum(path.stat().st_size for path in self.folder.rglob("*") if path.is_file())
        self.reference = left(self.folder)
        self.reference_without_attempts = left(self.folder, attempts=False)
        self.clear()

    def disturb(self, way: Callable[[], str]) -> None:
        """Break it in one way, let it go on, and note what is wrong then."""
        what = way.__name__
        try:
            what = way()
            self.go_on()
        except Exception as error:
            text = str(error) if isinstance(error, Wrong) else f"{type(error).__name__}: {error}"
            self.found.append(f"{self.case.name}, {what}: {' '.join(text.split())}")
        self.clear()

    def play(self, **plan: Any) -> int:
        """Run it and return its exit code."""
        return end(begin(self.case, self.folder, Plan(self.root, **plan), self.log))

    def clear(self) -> None:
        """Begin anew."""
        for path in self.root.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        (self.root / "temporary").mkdir()

    def go_on(self, *, attempts: bool = True) -> None:
        """Run it to its end and compare what it leaves with what an undisturbed run left."""
        if code := self.play():
            raise Wrong(f"it doesn't go on ({code}): {self.log.read_text()[-300:]}")
        now = left(self.folder, attempts=attempts)
        wanted = self.reference if attempts else self.reference_without_attempts
        for name in sorted(now.keys() | wanted.keys()):
            if now.get(name) != wanted.get(name):
                state = "lost" if name not in now else "left over" if name not in wanted else "different"
                raise Wrong(f"{name} is {state}")
        beside = {path.name for path in [*self.root.iterdir(), *(self.root / "temporary").iterdir()]}
        if more := beside - {"out", "temporary", "died"}:
            raise Wrong(f"left beside it: {', '.join(sorted(more))}")

    # --- ways to break it -------------------------------------------------------------------------------------------

    def killed(self) -> str:
        """Kill it, or a worker of its, up to a few times in a row."""
        return self._killed(self._kill)

    def killed_fresh(self) -> str:
        """The same with fresh interpreters, by any of the signals that end a process."""
        return self._killed(self._kill_fresh)

    def _killed(self, kill: Callable[[], str]) -> str:
        whats: list[str] = []
        while not whats or self.rng.random() < 0.5:
            before = self.case.kept(self.folder)
            whats.append(kill())
            now = self.case.kept(self.folder)
            if not before.items() <= now.items():
                raise Wrong(f"{', '.join(whats)}: what was finished is lost, or was done again")
        return ", ".join(whats)

    def _kill(self) -> str:
        ways = ["event", "event", "time", "a worker's event", "a worker, by time"]
        way = self.rng.choice(ways if self.case.workers else ways[:3])
        event = self.rng.randint(1, 12 if way == "a worker's event" else self.events)
        mark = self.root / "died"
        mark.unlink(missing_ok=True)
        if way.endswith("event"):
            pid = begin(self.case, self.folder, Plan(self.root, event, by_worker=way == "a worker's event"), self.log)
        else:
            pid = begin(self.case, self.folder, Plan(self.root), self.log)
            time.sleep(self.rng.uniform(0, self.seconds))
            workers = [worker for worker in processes_of(pid) if worker != pid]
            victim = self.rng.choice(workers) if way == "a worker, by time" and workers else pid
            with contextlib.suppress(ProcessLookupError):
                os.kill(victim, signal.SIGKILL)
                if victim != pid:
                    mark.touch()
        code = end(pid)
        all_end(pid)
        self.counts["kills"] += code == -signal.SIGKILL
        self.counts["kills of a worker"] += mark.exists()
        if code not in (0, -signal.SIGKILL):
            raise Wrong(f"killed ({way} {event}), it ends with {code}: {self.log.read_text()[-300:]}")
        return f"{way} {event} of {self.events}"

    def _kill_fresh(self) -> str:
        if self.case.words is None:
            return self._kill()
        line = [sys.executable, "-m", "fedaudit", *self.case.words(self.folder)]
        number = self.rng.choice([signal.SIGKILL, signal.SIGTERM, signal.SIGHUP])
        with self.log.open("wb") as log:
            process = subprocess.Popen(
                line,
                stdout=log,
                stderr=log,
                env={
                    **os.environ,
                    "TMPDIR": str(self.root / "temporary"),
                    "TORCHINDUCTOR_CACHE_DIR": str(self.root.parent),
                },
                start_new_session=True,
                preexec_fn=as_in_a_shell,
            )
        try:
            process.wait(self.rng.uniform(1, 9))
        except subprocess.TimeoutExpired:
            process.send_signal(number)
            self.counts["kills of fresh interpreters"] += 1
        process.wait()
        all_end(process.pid)
        return f"{number.name} to a fresh interpreter"

    def lost_its_folder(self) -> str:
        """Remove its folder while it is at work."""
        event = self.rng.randint(1, self.events)
        self._is_fine_or_refused(self.play(event=event, act=lambda: shutil.rmtree(self.folder, ignore_errors=True)))
        self.counts["folders removed"] += 1
        shutil.rmtree(self.folder, ignore_errors=True)
        return f"folder removed at event {event} of {self.events}"

    def had_a_wrong_clock(self) -> str:
        """Let the clock jump, half of the time after a kill, with files of the year 2096."""
        seed = self.rng.randrange(10**6)
        if self.rng.random() < 0.5:
            self._kill()
            for path in self.folder.rglob("*"):
                os.utime(path, (4e9, 4e9))
        code = self.play(clock=seed)
        self.counts["clocks"] += 1
        if code:
            raise Wrong(f"clock {seed}: it ends with {code}: {self.log.read_text()[-300:]}")
        return f"clock {seed}"

    def filled_its_disk(self) -> str:
        """Give it a disk that is too small, then a larger one."""
        share = self.rng.uniform(0.05, 0.95)
        with _disk(self.root, int(share * self.bytes)) as mounted:
            if mounted:
                self._is_fine_or_refused(self.play())
                _mount("remount,size=1g", self.root)
            else:
                self._is_fine_or_refused(self.play(event=max(1, int(share * self.events)), act=_full))
            self.counts["full disks" if mounted else "full disks, as an error of one call: nothing can be mounted"] += 1
            self.go_on(attempts=False)  # a worker's own files may be what doesn't fit: such a trial is tried again
        return f"disk of {share:.0%} of what it takes"

    def was_read_only(self) -> str:
        """Kill it and let it find its folder read-only, then writable again."""
        with _disk(self.root, 2**30) as mounted:
            if not mounted and os.geteuid() == 0:
                self.counts["read-only folders skipped: root writes everywhere, and nothing can be mounted"] += 1
                return "nothing"
            self._kill()
            before = left(self.folder)
            try:
                _protect(self.root, mounted, "ro")
                self._is_fine_or_refused(self.play())
            finally:
                _protect(self.root, mounted, "rw")
            now = left(self.folder)
            if changed := [name for name in sorted({*before, *now}) if before.get(name) != now.get(name)]:
                raise Wrong(f"a folder that can't be written to has changed: {', '.join(changed[:5])}")
            self.counts["read-only folders"] += 1
            self.go_on()
        return "read-only"

    def _is_fine_or_refused(self, code: int) -> None:
        """Check that it did its work, or told in one line what is wrong."""
        text = self.log.read_text()
        if code not in (0, 2) or "Traceback" in text:
            raise Wrong(f"it ends with {code}: {text[-400:]}")
        if code == 2 and len(re.findall(r"^(?:fedaudit: )?error: ", text, re.MULTILINE)) != 1:
            raise Wrong(f"not one line of error: {text[-400:]}")
        self.counts["refused in one line"] += code == 2


def import_what_was(told: Path) -> int:
    """Import what a fork imported, so that the next ones needn't; return how many events it had."""
    events, *modules = told.read_text().split()
    for module in modules:
        with contextlib.suppress(Exception):
            importlib.import_module(module)
    return int(events)


def _warm_up(inputs: Path) -> None:
    """Import what workers do: an audit without any."""
    (audit,) = (case for case in cases(inputs, workers=1) if case.name == "audit")
    (inputs / "warm-up" / "temporary").mkdir(parents=True)
    if end(begin(audit, inputs / "warm-up" / "out", Plan(inputs / "warm-up", told=inputs / "told"), inputs / "log")):
        raise SystemExit((inputs / "log").read_text())
    import_what_was(inputs / "told")


def _full() -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _mount(options: str, where: Path) -> bool:
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", where], capture_output=True, check=False)
    return done.returncode == 0


@contextlib.contextmanager
def _disk(where: Path, size: int) -> Iterator[bool]:
    """Mount a disk of ``size`` bytes in the block; yield False where that isn't allowed."""
    pages = max(2, size // 4096)
    mounted = os.geteuid() == 0 and shutil.which("mount") is not None and _mount(f"size={pages * 4096}", where)
    (where / "temporary").mkdir(exist_ok=True)
    try:
        yield mounted
    finally:
        if mounted:
            subprocess.run(["umount", "-l", where], check=True)


def _protect(where: Path, mounted: bool, how: str) -> None:
    if mounted:
        until = time.monotonic() + 5
        while not _mount(f"remount,{how}", where):  # refused as long as a file there is open for writing
            if time.monotonic() > until:
                raise Wrong("a file is open for writing 5 s after its command")
            time.sleep(0.1)
    else:
        for path in [where, *where.rglob("*")]:
            path.chmod((0o500 if path.is_dir() else 0o400) if how == "ro" else 0o700)


def main() -> int:
    """Break everything, say what was found, and return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.faults", description="Kill, fill disks, break clocks: what then?"
    )
    parser.add_argument("--kills", type=int, default=300, help="how many")
    parser.add_argument(
        "--fresh", type=int, default=15, help="how many of them are of fresh interpreters (seconds each)"
    )
    parser.add_argument("--others", type=int, default=10, help="how often a case meets each of the other faults")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="*", default=[], metavar="CASE", help="study, audit, simulation, recorder")
    options = parser.parse_args()
    torch.set_num_threads(1)
    began, cpu = time.monotonic(), _cpu_seconds()
    counts: Counter[str] = Counter()
    found: list[str] = []
    with tempfile.TemporaryDirectory(prefix="faults-") as name:
        chosen = [case for case in cases(Path(name)) if not options.only or case.name in options.only]
        if any(case.workers for case in chosen):
            _warm_up(Path(name))
        runners = [
            Runner(case, Path(name) / case.name, random.Random(f"{options.seed} {case.name}")) for case in chosen
        ]
        for runner in runners:
            for way in (runner.lost_its_folder, runner.had_a_wrong_clock, runner.filled_its_disk, runner.was_read_only):
                for _ in range(options.others):
                    runner.disturb(way)
            while runner.case.words and runner.counts["kills of fresh interpreters"] < options.fresh / len(runners):
                runner.disturb(runner.killed_fresh)
            while _kills(runner.counts) < options.kills / len(runners):
                runner.disturb(runner.killed)
            kills, findings = _kills(runner.counts), len(runner.found)
            print(f"{runner.case.name} ({runner.seconds:.1f} s): {kills} kills, {findings} findings", flush=True)
            counts += runner.counts
            found += runner.found
    for what, count in sorted(counts.items()):
        print(f"{count:5} {what}")
    spent = f"{time.monotonic() - began:.0f} s ({_cpu_seconds() - cpu:.0f} s of CPU time)"
    print(f"{_kills(counts)} kills in {spent}, seed {options.seed}")
    print(*(found or ["nothing lost, doubled or different"]), sep="\n")
    return bool(found)


def _kills(counts: Counter[str]) -> int:
    return sum(count for what, count in counts.items() if what.startswith("kills"))


def _cpu_seconds() -> float:
    usage = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in usage)


if __name__ == "__main__":
    sys.exit(main())
