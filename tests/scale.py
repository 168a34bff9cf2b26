"""What scale costs: python -m tests.scale federation|ray (Ray: in the peers' environment). Prints a row a size."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import yaml

_TRIALS = 300
_SCENARIO: dict[str, Any] = {
    "version": 1,
    "name": "scale",
    "data": {"name": "mnist", "split": "train"},
    "model": {"name": "lenet"},
    "federations": [
        {
            "name": "f",
            "algorithm": "fedavg",
            "clients": 100,
            "clients_per_round": 100,
            "rounds": 50,
            "batch_size": 6,
            "local_steps": 1,
            "learning_rate": 0.05,
        }
    ],
    "threat": {"adversary": "server"},
    "attacks": [{"name": "labels"}, {"name": "invg", "iterations": 50}],
    "evaluation": {"updates": 2},
}


def federation(data_dir: str) -> None:
    """Audit federations of 100 to 10,000 clients, 100 a round, 50 rounds, with the transcript; peak memory and time."""
    with tempfile.TemporaryDirectory() as folder:
        scenario = Path(folder) / "scenario.yaml"
        scenario.write_text(yaml.safe_dump(_SCENARIO), encoding="utf-8")
        for clients in (100, 1000, 10_000):
            command = [sys.executable, "-m", "fedaudit", "audit", str(scenario), "--workers", "1"]
            command += ["--set", f"federations.f.clients={clients}", "--data-dir", data_dir]
            command += ["--out", str(Path(folder) / str(clients))]
            process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            _, status, used = os.wait4(process.pid, 0)
            mib, seconds = used.ru_maxrss / 1024, used.ru_utime + used.ru_stime
            print(f"{clients:6,} clients: peak {mib:,.0f} MiB, {seconds:.0f} CPU seconds, status {status}", flush=True)


def nothing(number: int) -> int:
    """A trial without work: what is left is the backend's own time."""
    return number


def ray() -> None:
    """Run trials without work on processes here and on Ray clusters of one to three nodes; trials a second."""
    import ray as engine
    from ray.cluster_utils import Cluster

    from fedaudit.studies.backends import Backend, processes
    from fedaudit.studies.backends import ray as on_ray

    def rate(name: str, backend: Backend) -> None:
        list(backend(nothing, range(20)))  # starts the workers
        began = time.perf_counter()
        done = len(list(backend(nothing, range(_TRIALS))))
        print(f"{name}: {done / (time.perf_counter() - began):,.0f} trials a second", flush=True)

    rate("2 processes", processes(2))
    for nodes in (1, 2, 3):
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
        for _ in range(nodes - 1):
            cluster.add_node(num_cpus=1)
        cluster.wait_for_nodes()
        try:
            rate(f"Ray, {nodes} node{'s' * (nodes > 1)} of one core", on_ray(str(cluster.address)))
        finally:
            engine.shutdown()
            cluster.shutdown()


if __name__ == "__main__":
    if sys.argv[1:2] == ["ray"]:
        ray()
    else:
        federation(sys.argv[2] if len(sys.argv) > 2 else os.environ.get("FEDAUDIT_DATA", "."))
