"""Whatever ends a command, its processes end with it, and no temporary folder stays for longer than the next run."""

from __future__ import annotations

import fcntl
import os
import pty
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fedaudit.capture import Recorder
from fedaudit.utils.errors import BadInput
from fedaudit.utils.folders import temporary_folder
from tests.conftest import SCENARIO
from tests.lab.test_studies import TINY, as_file
from tests.utils.test_processes import gone, wait_until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="asks /proc for processes")


def descendants(process: int) -> set[int]:
    """Return the processes that ``process`` and its children have started."""
    found: set[int] = set()
    for tasks in Path(f"/proc/{process}/task").glob("*/children"):
        children = {int(child) for child in tasks.read_text().split()}
        found |= children.union(*map(descendants, children))
    return found


def as_in_a_terminal(terminal: int) -> Callable[[], None]:
    """Return what gives a child the signals of a fresh shell (nohup's children ignore some) and this terminal."""

    def prepare() -> None:
        for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        os.setsid()
        fcntl.ioctl(terminal, termios.TIOCSCTTY, 0)

    return prepare


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Callable[..., tuple[subprocess.Popen[bytes], int]]]:
    """Return a function that starts a command in a terminal of its own, which is returned, too."""
    started: list[tuple[subprocess.Popen[bytes], int]] = []
    (tmp_path / "temporary").mkdir()

    def start(*words: str | Path) -> tuple[subprocess.Popen[bytes], int]:
        ours, its = pty.openpty()
        line = [sys.executable, "-m", "fedaudit", *map(str, words)]
        process = subprocess.Popen(
            line,
            stdin=its,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            preexec_fn=as_in_a_terminal(its),
            env={
                **os.environ,
                "TMPDIR": str(tmp_path / "temporary"),
                "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "kept"),  # torch's, which it makes when it is imported
            },
        )
        os.close(its)
        started.append((process, ours))
        return process, ours

    yield start
    for process, _ in started:
        process.kill()
        process.wait()


@pytest.mark.slow
@pytest.mark.parametrize("how", ["SIGTERM", "SIGKILL", "SIGINT", "the terminal closes"])
@pytest.mark.parametrize("command", ["audit", pytest.param("study", marks=pytest.mark.long)])
def test_all_processes_end_with_their_command(command, how, tmp_path, running):
    out = tmp_path / "out"
    if command == "audit":
        scenario = tmp_path / "scenario.yaml"
        scenario.write_text(SCENARIO)
        words, attack = ["audit", scenario], "invg"
    else:
        axes = {"attack": TINY["axes"]["attack"]}
        scenario = as_file(tmp_path, axes=axes)
        words, attack = ["study", "run", scenario], "0"
    # Without end; by the reference engine, since a C++ compiler that is killed leaves files of its own.
    for setting in ("iterations=1000000000", "engine=reference"):
        words += ["--set", f"attacks.{attack}.{setting}"]
    process, terminal = running(*words, "--out", out, "--workers", "2")
    assert wait_until(lambda: len(descendants(process.pid)) >= 2 or process.poll() is not None, 90)
    time.sleep(4)  # the attacks are under way
    workers = descendants(process.pid)
    assert len(workers) == 2
    if how == "the terminal closes":
        os.close(terminal)
    else:
        process.send_signal(getattr(signal, how))
        os.close(terminal)
    assert wait_until(lambda: process.poll() is not None and all(map(gone, workers)), 5)
    assert list((tmp_path / "temporary").iterdir()) == []


# Temporary folders --------------------------------------------------------------------------------------------------

KILLED = """\
import os, signal, sys
from pathlib import Path
from fedaudit.capture import Recorder
from fedaudit.utils.errors import BadInput
from fedaudit.utils.folders import temporary_folder
with temporary_folder(Path(sys.argv[1])) as folder:
    (folder / "victim.png").write_bytes(b"pixels")
    if sys.argv[2] == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    print(folder, flush=True)
    sys.stdin.read()
"""


@pytest.mark.slow
def test_what_a_killed_process_left_is_removed_by_the_next(tmp_path):
    done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path), "killed"], check=False)
    assert done.returncode == -signal.SIGKILL
    (left,) = tmp_path.iterdir()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "file").touch()
    (tmp_path / "fedaudit-temporary-link").symlink_to(elsewhere)
    with temporary_folder(tmp_path) as folder:
        assert folder.stat().st_mode & 0o77 == 0  # nobody else's to read
        assert not left.exists()
        assert (elsewhere / "file").exists()
    assert not folder.exists()


@pytest.mark.slow
def test_the_folders_of_those_who_live_stay(tmp_path):
    line = [sys.executable, "-c", KILLED, str(tmp_path), "lives"]
    other = subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert other.stdout is not None
    theirs = Path(other.stdout.readline().strip())
    with temporary_folder(tmp_path) as folder, temporary_folder(tmp_path) as second:
        assert folder.exists()
        assert second.exists()
        assert (theirs / "victim.png").exists()
    other.communicate("")
    assert list(tmp_path.iterdir()) == []


def test_a_recorder_killed_before_its_first_round_can_begin_again(tmp_path):
    for name in ("index", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / f".{name}.json.draft").write_text("{")
    Recorder(tmp_path / "index").close()
    assert [path.name for path in (tmp_path / "index").iterdir()] == ["index.json"]
    with pytest.raises(BadInput, match="isn't an empty folder"):  # somebody else's
        Recorder(tmp_path / "other")


def test_seeing_whether_a_folder_can_be_written_leaves_nothing_to_a_kill(tmp_path):
    code = (
        "import os, signal, sys; from pathlib import Path; from fedaudit.utils.folders import check_folder\n"
        "def end(event, arguments):\n"
        "    if event in ('os.remove', 'os.unlink'): os.kill(os.getpid(), signal.SIGKILL)\n"
        "sys.addaudithook(end); check_folder(Path(sys.argv[1]))"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "out")], check=False)
    assert done.returncode == 0
    assert list((tmp_path / "out").iterdir()) == []
