"""A Flower federation over months in short: many rounds with guard, recorder and ledger, nodes that go, full disks."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import re
import shutil
import subprocess
import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.adapters.flower_cases import audited
from tests.adapters.test_flower_processes import GUARD, read, witness

pytest.importorskip("flwr")
pytestmark = [pytest.mark.slow, pytest.mark.peers]

from flwr.app import Message  # noqa: E402 (it needs Flower)
from flwr.serverapp.strategy import FedAvg  # noqa: E402

from fedaudit.adapters.flower.in_process import run_app  # noqa: E402
from fedaudit.guard.rounds import Written, read_site  # noqa: E402
from tests.adapters.flower_processes import BIN, Deployment, deployment, marked  # noqa: E402

ROUNDS = int(os.environ.get("FEDAUDIT_SOAK_ROUNDS", "200"))
NODES = 3
NOISE = '{"clip": 0.001, "noise": 10.0, "epsilon": None}'
WATCHED = f'Guard(attacks=["labels"], fail_on=None, target_epsilon=1000), ClientDefenceMod("dp", {NOISE})'
CLIENT = {GUARD: WATCHED, "flower import Guard": "flower import Guard, ClientDefenceMod"}
BUDGET = "the site's privacy budget doesn't allow another update"
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


@pytest.mark.long
@pytest.mark.timeout(8 * 3600)
def test_many_rounds_of_a_deployment_lose_nothing_and_stop_nothing(tmp_path: Path) -> None:
    app = audited(
        tmp_path / "app",
        server_app={
            **witness(available=2),
            'Recorder(f"recording-{context.run_id}"': f'Recorder("{tmp_path / "server" / "recording"}"',
            "        grid=grid,\n": "        grid=grid,\n        timeout=600,\n",
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
        filler = fill(guarded)  # lines go on into what is left of the file's last page
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
    assert {r for r in reasons if "budget" in r} <= {BUDGET}
    full = [n for n, of_round in answers.items() if any(error == BUDGET for _, error in of_round)]
    assert full, "updates that can't be counted left"
    assert at[2] < min(full) <= max(full) <= at[3] + 2
    # nothing lost: the sites wrote down what the server got, and it recorded all but what had no place
    sent = sum(error is None for of_round in answers.values() for _, error in of_round)
    stopped = sum(error == BUDGET for of_round in answers.values() for _, error in of_round)
    counted = sum(one.done == "left" for of_site in written for one in of_site.rounds)
    counted += sum(of_site.torn for of_site in written)
    # one that was killed, or whose answer came too late, may have counted what the server never got; nobody less
    assert sent <= counted <= NODES * ROUNDS - stopped
    kept = {r.index + 1: len(r.updates) for r in transcript.rounds}
    lost = set(answers) - set(kept)
    assert lost
    assert at[3] < min(lost) <= max(lost) <= at[4] + 2
    assert all(n == sum(error is None for _, error in answers[number]) for number, n in kept.items())
    in_the_ledger(app, written)
    assert all(text.endswith("# EOF\n") for text in metrics)
    assert all("<html" in text for text in pages)
    # memory stays flat where fedaudit works: in the server's app and the clients'
    for name in ("flwr-serverapp", "flwr-clientapp"):
        early, late = halves(memory.held[name], ROUNDS)
        assert late < 1.1 * early + 20 * MEGABYTE, f"{name} grew from {early} to {late} bytes"


# A guard of its own for each node; one is away for a while.
GUARDS = """
GUARDS = [Guard(attacks=["labels"], fail_on=None, target_epsilon=1000, out=f"SITES/site-{n}/guard") for n in range(3)]


def guarded(msg, context, call_next):
    me, now = context.node_config["partition-id"], msg.content["config"]["server-round"]
    if me == 2 and AWAY[0] < now <= AWAY[1]:
        raise RuntimeError("killed")
    return GUARDS[me](msg, context, call_next)


app = ClientApp("""


@pytest.mark.timeout(1200)
def test_many_rounds_in_one_process_lose_nothing_and_stop_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same in one process, in which nothing that is kept from round to round ever ends."""
    rounds = 200
    away, full, unrecorded = (40, 60), (80, 110), (130, 150)
    sites = [tmp_path / f"site-{number}" for number in range(NODES)]
    guards = GUARDS.replace("SITES", str(tmp_path)).replace("AWAY", str(away))
    app = audited(
        tmp_path / "app",
        server_app={'Recorder(f"recording-{context.run_id}"': f'Recorder("{tmp_path / "server" / "recording"}"'},
        client_app={
            GUARD: f'guarded, ClientDefenceMod("dp", {NOISE})',
            "flower import Guard": "flower import Guard, ClientDefenceMod",
            "app = ClientApp(": guards.lstrip("\n"),
        },
    )
    answers: dict[int, list[tuple[int, str | None]]] = {}
    held: dict[int, int] = {}
    filled: list[Path] = []
    with contextlib.ExitStack() as disks:
        guarded = disks.enter_context(small_disk(sites[1] / "guard", 16))
        recorded = disks.enter_context(small_disk(tmp_path / "server", 128))
        aggregate = FedAvg.aggregate_train

        def noted(self: FedAvg, server_round: int, replies: Iterable[Message]) -> Any:
            replies = list(replies)
            errors = [reply.error.reason if reply.has_error() else None for reply in replies]
            answers[server_round] = [(r.metadata.src_node_id, e) for r, e in zip(replies, errors, strict=True)]
            held[server_round] = resident()
            if server_round in (full[1], unrecorded[1]):
                filled.pop().unlink()
            if server_round in (full[0], unrecorded[0]):
                filled.append(fill(guarded if server_round == full[0] else recorded))
            return aggregate(self, server_round, replies)

        monkeypatch.setattr(FedAvg, "aggregate_train", noted)
        final = tmp_path / "final.pt"
        config = {"final-model": str(final), "num-server-rounds": rounds, "fraction-evaluate": 0.0}
        run_app(app, nodes=NODES, config=config)
        written = [read_site(site / "guard") for site in sites]
        pages = [(site / "guard" / "guard.html").read_text() for site in sites]
        metrics = [(site / "guard" / "guard.prom").read_text() for site in sites]
        transcript = read(recorded / "recording")
        indices = {path.name: path.read_text() for path in (recorded / "recording").glob("round-*.json")}
        left_over = {path.name for path in (recorded / "recording").glob("round-*.safetensors")}

    assert sorted(answers) == list(range(1, rounds + 1))
    refused = [number for number, of_round in answers.items() if any(error == BUDGET for _, error in of_round)]
    assert refused == list(range(min(refused), full[1] + 1))
    assert full[0] < min(refused) <= full[0] + 15  # some lines have a place in what is left of the file's last page
    killed = [number for number, of_round in answers.items() if any("killed" in (e or "") for _, e in of_round)]
    assert killed == list(range(away[0] + 1, away[1] + 1))
    sent = {number: sum(error is None for _, error in of_round) for number, of_round in answers.items()}
    assert sum(sent.values()) == NODES * rounds - len(refused) - len(killed)
    assert sum(one.done == "left" for of_site in written for one in of_site.rounds) == sum(sent.values())
    assert not any(of_site.torn for of_site in written)
    kept = {r.index + 1: len(r.updates) for r in transcript.rounds}
    lost = sorted(set(answers) - set(kept))
    assert lost == list(range(unrecorded[0], lost[-1] + 1))
    assert unrecorded[1] - 1 <= lost[-1] <= unrecorded[1]  # in the last of them there may be room by the time it ends
    assert all(n == sent[number] for number, n in kept.items())
    named = {file for r in kept for file in json.loads(indices[f"round-{r - 1:05d}.json"])["files"]}
    assert left_over == named, "files of rounds that weren't recorded stay on the disk"
    in_the_ledger(app, written)
    assert all(text.endswith("# EOF\n") for text in metrics)
    assert all("<html" in text for text in pages)
    early, late = halves(held, rounds)
    print(f"\n{rounds} rounds in one process: {early / MEGABYTE:.0f} MiB early, {late / MEGABYTE:.0f} MiB late")
    assert late < early + 20 * MEGABYTE


def resident() -> int:
    """Return the bytes that this process holds now."""
    gc.collect()
    return os.sysconf("SC_PAGE_SIZE") * int(Path("/proc/self/statm").read_text().split()[1])


def in_the_ledger(app: Path, written: list[Written]) -> None:
    """Assert that each site counted as the ledger does that reads the app."""
    for of_site in written:
        updates = sum(one.done == "left" for one in of_site.rounds) + of_site.torn
        told = subprocess.run(
            [str(BIN / "fedaudit"), "ledger", str(app), "--rounds", str(updates), "--json"],
            capture_output=True,
            check=True,
        )
        (ledger,) = json.loads(told.stdout)
        spent = max(one.epsilon for one in of_site.rounds if one.epsilon is not None)
        assert spent == pytest.approx(ledger["clients"][0]["curve"][-1][1], rel=1e-6)


def halves(held: dict[int, int], rounds: int) -> tuple[int, int]:
    """Return the most bytes in the first fifth of the rounds, and in the last tenth."""
    early = [size for over, size in held.items() if over <= max(1, 0.2 * rounds)]
    late = [size for over, size in held.items() if over >= 0.9 * rounds - 1]
    return max(early), max(late)


def report(memory: Memory, answers: dict[int, Any]) -> None:
    """Print what was measured, for who runs this by hand."""
    print(f"\n{len(answers)} rounds, {sum(map(len, answers.values()))} answers")
    for name, held in sorted(memory.held.items()):
        early, late = min(held), max(held)
        print(
            f"{name}: {held[early] / MEGABYTE:.0f} MiB after {early} rounds, {held[late] / MEGABYTE:.0f} after {late}"
        )
