"""A Flower deployment over months in short: many rounds with guard, recorder and ledger, a node killed, disks that fill."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.adapters.flower_cases import audited
from tests.adapters.test_flower_processes import GUARD, read, witness

pytest.importorskip("flwr")
pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.peers, pytest.mark.timeout(4 * 3600)]

from fedaudit.pipeline.site import read_site  # noqa: E402 (it needs Flower)
from tests.adapters.flower_processes import BIN, Deployment, deployment, marked  # noqa: E402

ROUNDS = int(os.environ.get("FEDAUDIT_SOAK_ROUNDS", "200"))
NODES = 3
NOISE = '{"clip": 0.001, "noise": 10.0, "epsilon": None}'
WATCHED = f'Guard(attacks=["labels"], fail_on=None, target_epsilon=1000), SanitiserMod("dp", {NOISE})'
CLIENT = {GUARD: WATCHED, "flower import Guard": "flower import Guard, SanitiserMod"}
MEGABYTE = 2**20


@contextlib.contextmanager
def small_disk(folder: Path, megabytes: int) -> Iterator[Path]:
    """Mount a disk of its own on ``folder``, which can be filled."""
    folder.mkdir(parents=True)
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "fedaudit-soak", str(folder)], capture_output=True
    )
    if done.returncode:
        pytest.skip(f"no disk can be mounted here: {done.stderr.decode().strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(folder: Path) -> Path:
    """Fill the disk of ``folder`` to its last byte; return the file that does."""
    filler = folder / "filler"
    with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    assert shutil.disk_usage(folder).free < 4096
    return filler


class Memory(threading.Thread):
    """Notes how many bytes each program of a deployment holds, by its name, with the rounds that were over then."""

    def __init__(self, running: Deployment, rounds: Path) -> None:
        super().__init__(daemon=True)
        self.running, self.rounds = running, rounds
        self.held: dict[str, dict[int, int]] = defaultdict(dict)
        self.ended = threading.Event()

    def run(self) -> None:
        """Look every half second."""
        while not self.ended.wait(0.5):
            over = done(self.rounds)
            for pid in marked(self.running.token):
                with contextlib.suppress(OSError, StopIteration, ValueError):
                    words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
                    name = next(Path(word).name for word in words if re.fullmatch(r"fl(wr|ower)-\w+", Path(word).name))
                    status = Path(f"/proc/{pid}/status").read_text()
                    peak = 1024 * int(re.search(r"VmHWM:\s+(\d+)", status)[1])  # type: ignore[index]
                    key = name if name != "flower-supernode" else f"{name} {pid}"
                    self.held[key][over] = max(peak, self.held[key].get(over, 0))


def done(replies: Path) -> int:
    """Return the last round that the server has replies of."""
    if not replies.exists():
        return 0
    lines = replies.read_text().splitlines()
    return int(json.loads(lines[-1])[0]) if lines else 0


def wait(replies: Path, number: int, running: Deployment) -> None:
    """Wait until a round is over."""
    end = time.monotonic() + 3600
    while done(replies) < number:
        assert time.monotonic() < end, running.log("superlink")[-3000:]
        time.sleep(0.2)


def test_many_rounds_lose_nothing_and_stop_nothing(tmp_path: Path) -> None:
    app = audited(
        tmp_path / "app",
        server_app={
            **witness(available=2),
            'Recorder(f"recording-{context.run_id}"': f'Recorder("{tmp_path / "server" / "recording"}"',
            "        grid=grid,\n": "        grid=grid,\n        timeout=120,\n",
        },
        client_app=CLIENT,
    )
    final, replies = tmp_path / "final.pt", tmp_path / "final.pt.replies"
    at = [max(1, round(share * ROUNDS)) for share in (0.15, 0.3, 0.4, 0.55, 0.65, 0.8)]
    sites = [tmp_path / f"site-{number}" for number in range(NODES)]
    with contextlib.ExitStack() as disks:
        guarded = disks.enter_context(small_disk(sites[1] / "fedaudit-guard", 16))
        recorded = disks.enter_context(small_disk(tmp_path / "server", max(32, ROUNDS)))
        running = disks.enter_context(deployment(tmp_path / "deployment", nodes=0))
        for number, site in enumerate(sites):
            site.mkdir(exist_ok=True)
            running.join(number, NODES, folder=site)
        memory = Memory(running, replies)
        memory.start()
        run = running.submit(app, f'final-model="{final}" num-server-rounds={ROUNDS} fraction-evaluate=0.0')
        wait(replies, at[0], running)
        running.kill(2)
        wait(replies, at[1], running)
        running.join(2, NODES, folder=sites[2])
        wait(replies, at[2], running)
        filler = fill(guarded)
        wait(replies, at[3], running)
        filler.unlink()
        filler = fill(recorded)
        wait(replies, at[4], running)
        filler.unlink()
        assert running.wait(run, 4 * 3600) == "finished:completed"
        memory.ended.set()
        memory.join()
        answers: dict[int, list[tuple[int, str | None]]] = defaultdict(list)
        for line in replies.read_text().splitlines():
            number, node, _, error = json.loads(line)
            answers[number].append((node, error))
        written = [read_site(site / "fedaudit-guard") for site in sites]
        pages = [(site / "fedaudit-guard" / "guard.html").read_text() for site in sites]
        metrics = [(site / "fedaudit-guard" / "guard.prom").read_text() for site in sites]
        transcript = read(recorded / "recording")
    report(memory, answers)

    # nothing stopped that shouldn't: every round had an answer, and what wasn't sent had a reason
    assert sorted(answers) == list(range(1, ROUNDS + 1))
    assert all(any(error is None for _, error in of_round) for of_round in answers.values())
    reasons = {error for of_round in answers.values() for _, error in of_round if error}
    budget = "the site's privacy budget doesn't allow another update"
    assert {r for r in reasons if "budget" in r} <= {budget}
    full = [n for n, of_round in answers.items() if any(error == budget for _, error in of_round)]
    assert full, "updates that can't be counted left"
    assert at[2] < min(full) <= max(full) <= at[3] + 2
    # nothing lost: the sites wrote down what the server got, and it recorded all but what had no place
    sent = sum(error is None for of_round in answers.values() for _, error in of_round)
    left = sum(one.done == "left" for of_site in written for one in of_site.rounds)
    torn = sum(of_site.torn for of_site in written)
    assert sent <= left + torn <= sent + 2  # the killed node may have counted what it didn't send
    kept = {r.index + 1: len(r.updates) for r in transcript.rounds}
    lost = set(answers) - set(kept)
    assert lost
    assert at[3] < min(lost) <= max(lost) <= at[4] + 2
    assert all(n == sum(error is None for _, error in answers[number]) for number, n in kept.items())
    # the ledger says what the sites counted
    for of_site in written:
        rounds = sum(one.done == "left" for one in of_site.rounds) + of_site.torn
        told = subprocess.run(
            [str(BIN / "fedaudit"), "ledger", str(app), "--rounds", str(rounds), "--json"], capture_output=True
        )
        (ledger,) = json.loads(told.stdout)
        spent = max(one.epsilon for one in of_site.rounds if one.epsilon is not None)
        assert spent == pytest.approx(ledger["clients"][0]["curve"][-1][1], rel=1e-6)
    assert all(text.endswith("# EOF\n") for text in metrics)
    assert all("<html" in text for text in pages)
    # memory stays flat where fedaudit works: in the server's app and the clients'
    for name in ("flwr-serverapp", "flwr-clientapp"):
        early, late = halves(memory.held[name])
        assert late < 1.1 * early + 20 * MEGABYTE, f"{name} grew from {early} to {late} bytes"


def halves(held: dict[int, int]) -> tuple[int, int]:
    """Return the most bytes in the second tenth of the rounds, and in the last."""
    early = [size for over, size in held.items() if over <= max(1, 0.2 * ROUNDS)]
    late = [size for over, size in held.items() if over >= 0.9 * ROUNDS - 1]
    return max(early), max(late)


def report(memory: Memory, answers: dict[int, Any]) -> None:
    """Print what was measured, for who runs this by hand."""
    print(f"\n{len(answers)} rounds, {sum(map(len, answers.values()))} answers")
    for name, held in sorted(memory.held.items()):
        early, late = min(held), max(held)
        print(f"{name}: {held[early] / MEGABYTE:.0f} MiB after {early} rounds, {held[late] / MEGABYTE:.0f} after {late}")
