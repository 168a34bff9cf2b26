"""What scale costs, a row a size: python -m tools.measure.scale federation|ray (Ray: in the peers' environment)."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from fedaudit.utils.progress import Quiet
from fedaudit_lab.studies.backends import Backend, processes
from fedaudit_lab.studies.backends import ray as on_ray
from fedaudit_lab.studies.running import Task, TrialOutput, run_study, run_trial
from fedaudit_lab.studies.spec import expand
from fedaudit_lab.studies.store import Store
from tools.measure.long_run import study

_TRIALS = 1000
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
    "evaluation": {"max_updates": 2},
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


def copied(task: tuple[Task, TrialOutput]) -> TrialOutput:
    """A trial without an attack: it returns what a real one returned."""
    return task[1]


def ray() -> None:
    """Run a study without attacks on processes here and on Ray clusters of one to three nodes; trials a second."""
    import ray as engine
    from ray.cluster_utils import Cluster

    spec = study(_TRIALS)
    trials = expand(spec, "smoke")
    one = run_trial(Task(trials[0].key, trials[0].scenario.to_yaml(), None))

    def rate(name: str, backend: Backend) -> None:
        list(backend(copied, [(None, one)] * 20))  # starts the workers

        def without_attacks(_: Any, tasks: Sequence[Task], _beat: Any = None) -> Iterator[tuple[Task, Any]]:
            for (task, _played), result in backend(copied, [(task, one) for task in tasks]):
                yield task, result

        rates = []
        for _ in range(3):
            with tempfile.TemporaryDirectory() as folder:
                store = Store(Path(folder))
                store.plan({"name": spec.name, "scale": "smoke", "study": spec.model_dump(mode="json")}, trials)
                began, busy = time.perf_counter(), time.process_time()
                run_study(spec, trials, store, backend=without_attacks, data_dir=None, display=Quiet())
                rates.append((time.perf_counter() - began, time.process_time() - busy))
                store.close()
        seconds, cpu = sorted(rates)[1]
        print(
            f"{name}: {_TRIALS / seconds:,.0f} trials a second, {1000 * cpu / _TRIALS:.1f} ms of the command's "
            "processor time a trial",
            flush=True,
        )

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
