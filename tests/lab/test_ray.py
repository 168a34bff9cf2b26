"""Studies on a Ray cluster of two nodes on this machine; skipped where Ray isn't installed (extra [ray])."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fedaudit.utils.errors import BadInput
from fedaudit.utils.progress import Quiet
from fedaudit_lab.studies.backends import ray as on_ray
from fedaudit_lab.studies.running import run_study
from fedaudit_lab.studies.spec import expand
from fedaudit_lab.studies.store import Store
from tests.lab.test_studies import run, tiny

ray = pytest.importorskip("ray")
pytestmark = [pytest.mark.slow, pytest.mark.peers]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    cluster.add_node(num_cpus=1)
    cluster.wait_for_nodes()
    yield cluster
    ray.shutdown()
    cluster.shutdown()


@pytest.fixture(scope="module")
def address(cluster: Any) -> str:
    return str(cluster.address)


def where(_: int) -> tuple[int, str]:
    import time

    time.sleep(1)
    return 0, str(ray.get_runtime_context().get_node_id())


def raises(_: int) -> None:
    raise BadInput("no good")


def test_both_nodes_work_and_errors_come_back(address: str) -> None:
    backend = on_ray(address)
    nodes = {result[1] for _, result in backend(where, range(4))}
    assert len(nodes) == 2
    ((_, error),) = backend(raises, [0])
    assert isinstance(error, BadInput)


def test_a_study_gives_the_same_rows_as_in_processes(address: str, tmp_path: Path) -> None:
    def numbers(rows: Any) -> list[Any]:
        return [(r.key, r.status, [u["images"] for u in (r.outcome or {})["updates"]]) for r in rows]

    study, store = tiny(), Store(tmp_path / "ray")
    trials = expand(study, "smoke")
    with store.exclusively():
        store.plan({"name": study.name, "scale": "smoke", "study": study.model_dump(mode="json")}, trials)
        failed = run_study(study, trials, store, backend=on_ray(address), data_dir=None, display=Quiet())
    assert failed == 0
    assert numbers(store.rows()) == numbers(run(study, tmp_path / "local", workers=1))


def short(number: int) -> int:
    import time

    time.sleep(0.5)
    return number * number


def test_a_node_that_is_killed_costs_no_trial(cluster: Any, address: str) -> None:
    """Twelve trials on three nodes, of which one dies in the middle: all come back, each once."""
    node = cluster.add_node(num_cpus=1)
    came: list[tuple[int, Any]] = []
    for number, result in on_ray(address)(short, range(12)):
        came.append((number, result))
        if len(came) == 2:
            cluster.remove_node(node, allow_graceful=False)
    assert sorted(came) == [(n, n * n) for n in range(12)]


def test_no_cluster_is_one_line() -> None:
    with pytest.raises(BadInput, match="no cluster there"):
        on_ray("127.0.0.1:1")
