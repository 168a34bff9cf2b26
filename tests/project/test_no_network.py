"""Nothing here reaches the network, nor wants to: no telemetry, no download, no look-up."""

from __future__ import annotations

import ast
import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests import no_network
from tests.no_network import NetworkForbidden

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src"
# What Python has for the network. urllib.parse only quotes; a study tries whether the Ray cluster named is there.
NETWORK = {"socket", "ssl", "http", "urllib", "requests", "httpx", "aiohttp", "ftplib", "smtplib", "xmlrpc", "asyncio"}
SOURCES = ("src", "catalogue/src", "lab/src", "trees/src")
ALLOWED = {("src/fedaudit/report/sarif.py", "urllib.parse"), ("lab/src/fedaudit_lab/studies/backends.py", "socket")}


@pytest.mark.parametrize("address", [("192.0.2.1", 80), ("2001:db8::1", 80)])
def test_the_network_is_forbidden_while_tests_run(address: tuple[str, int]) -> None:
    family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as datagrams, pytest.raises(NetworkForbidden):
        datagrams.sendto(b"x", address)
    with socket.socket(family) as stream, pytest.raises(NetworkForbidden):
        stream.connect(address)
    with pytest.raises(NetworkForbidden):
        socket.create_connection(address, timeout=1)


@pytest.mark.parametrize(
    "look_up",
    [
        socket.gethostbyname,
        lambda name: socket.getaddrinfo(name, 443),
        lambda name: socket.create_connection((name, 443), timeout=1),
    ],
)
def test_no_name_is_looked_up(look_up) -> None:
    with pytest.raises(NetworkForbidden):
        look_up("example.org")


def test_loopback_and_unix_sockets_are_allowed(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()):
        pass
    with socket.socket(socket.AF_UNIX) as server, socket.socket(socket.AF_UNIX) as client:
        server.bind(str(tmp_path / "s"))
        server.listen()
        client.connect(str(tmp_path / "s"))
    one, two = socket.socketpair()
    one.close()
    two.close()


def imports(path: Path) -> set[str]:
    found = set[str]()
    code = path.read_text(encoding="utf-8")
    if not re.search(rf"\b({'|'.join(NETWORK)})\b", code):  # most modules: parsing takes long
        return found
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module)
    return found


def test_no_module_of_ours_imports_what_reaches_the_network() -> None:
    files = sorted(path for folder in SOURCES for path in (ROOT / folder).rglob("*.py"))
    found = {
        (path.relative_to(ROOT).as_posix(), name)
        for path in files
        for name in imports(path)
        if name.partition(".")[0] in NETWORK
    }
    assert len(files) > 200
    assert found == ALLOWED


@pytest.mark.slow
def test_a_whole_audit_with_workers_reaches_no_network(tmp_path: Path, scenario_file: Path) -> None:
    """The command and its workers are other processes: there a hook is put by ``sitecustomize``."""
    shutil.copy(no_network.__file__, tmp_path / "sitecustomize.py")
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{SOURCE}", "OMP_NUM_THREADS": "1"}

    def run(*words: str | Path) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, *map(str, words)]
        return subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)

    probe = run("-c", "import socket; socket.create_connection(('192.0.2.1', 80), 1)")
    assert "NetworkForbidden" in probe.stderr  # so the hook is there
    done = run("-m", "fedaudit", "audit", scenario_file, "--workers", "2", "--no-controls", "--out", "out")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out/report.html").is_file()
