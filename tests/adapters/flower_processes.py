"""A real Flower deployment on this machine: a SuperLink, SuperNodes and what they start, each a process."""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

BIN = Path(sys.executable).parent
MARK = "FEDAUDIT_TEST_DEPLOYMENT"  # in the environment of every process of a deployment, whoever started it


class Deployment:
    """A SuperLink and its SuperNodes, in ``folder``; :func:`deployment` ends all of it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.token = secrets.token_hex(16)
        self.port = _free_port()
        self.nodes: dict[int, subprocess.Popen[bytes]] = {}
        home = folder / "home"
        home.mkdir()
        (home / "config.toml").write_text(
            f'[superlink]\ndefault = "test"\n\n[superlink.test]\naddress = "127.0.0.1:{self.port}"\ninsecure = true\n'
        )
        quiet = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1", "OMP_NUM_THREADS": "1"}
        self.environment = {
            **os.environ,
            **quiet,
            MARK: self.token,
            "FLWR_HOME": str(home),
            "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
        }
        self._start("superlink", "flower-superlink", "--insecure", "--disable-runtime-dependency-installation",
                    "--port", str(self.port))  # fmt: skip
        _wait(lambda: _answers(self.port), 60, "the SuperLink doesn't listen", self)

    def _start(self, log: str, program: str, *arguments: str, folder: Path | None = None) -> subprocess.Popen[bytes]:
        with (self.folder / f"{log}.log").open("ab") as file:
            return subprocess.Popen(
                [str(BIN / program), *arguments],
                cwd=folder or self.folder,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def join(self, partition: int, partitions: int, folder: Path | None = None) -> None:
        """Start the SuperNode of a partition; ``folder``: in which it works, where that isn't the deployment's."""
        self.nodes[partition] = self._start(
            f"node-{partition}", "flower-supernode", "--insecure", "--superlink", f"127.0.0.1:{self.port}",
            "--port", str(_free_port()), "--node-config", f"partition-id={partition} num-partitions={partitions}",
            folder=folder,
        )  # fmt: skip

    def kill(self, partition: int) -> None:
        """Kill a SuperNode and all that it started, without a goodbye."""
        os.killpg(self.nodes[partition].pid, signal.SIGKILL)
        self.nodes[partition].wait(10)

    def flwr(self, *arguments: str) -> str:
        """Run Flower's own command, and return what it says."""
        done = subprocess.run(
            [str(BIN / "flwr"), *arguments], cwd=self.folder, env=self.environment, capture_output=True, timeout=60
        )
        text = done.stdout.decode() + done.stderr.decode()
        assert done.returncode == 0, text
        return text

    def submit(self, app: Path, config: str) -> str:
        """Start a run of an app, and return its id."""
        text = self.flwr("run", str(app), "test", "--run-config", config, "--format", "json")
        return str(json.loads(text[text.index("{") :])["run-id"])

    def wait(self, run: str, seconds: float = 120) -> str:
        """Wait until a run has ended; return its status."""
        ends = re.compile(rf"Finished task \d+ of run {run}\b")
        _wait(lambda: bool(ends.search(self.log("superlink"))), seconds, f"run {run} doesn't end", self)
        text = self.flwr("ls", "test", "--run-id", run, "--format", "json")
        return str(json.loads(text[text.index("{") :])["runs"][0]["status"])

    def log(self, name: str) -> str:
        """Return what ``superlink`` or ``node-0`` has written."""
        return (self.folder / f"{name}.log").read_text(errors="replace")

    def end(self) -> None:
        """Kill every process of this deployment, and wait until they are gone."""
        for _ in range(100):
            pids = list(marked(self.token))
            if not pids:
                break
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            for node in self.nodes.values():
                node.poll()
            time.sleep(0.05)


@contextlib.contextmanager
def deployment(folder: Path, nodes: int = 2) -> Iterator[Deployment]:
    """A SuperLink with ``nodes`` SuperNodes; whatever happens, all its processes are gone at the end."""
    folder.mkdir(parents=True, exist_ok=True)
    made = Deployment.__new__(Deployment)
    try:
        made.__init__(folder)  # type: ignore[misc]
        for partition in range(nodes):
            made.join(partition, nodes)
        yield made
    finally:
        made.end()


def marked(token: str) -> Iterator[int]:
    """Yield the processes, but zombies, that have the token in their environment."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with contextlib.suppress(OSError):
                if f"{MARK}={token}".encode() in (entry / "environ").read_bytes():
                    yield int(entry.name)


def _wait(done: Callable[[], bool], seconds: float, complaint: str, where: Deployment) -> None:
    end = time.monotonic() + seconds
    while not done():
        if time.monotonic() > end:
            logs = "\n".join(
                f"--- {p.name}\n{p.read_text(errors='replace')[-3000:]}" for p in where.folder.glob("*.log")
            )
            raise AssertionError(f"{complaint}\n{logs}")
        time.sleep(0.2)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _answers(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
