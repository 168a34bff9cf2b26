"""The benchmarks: what they print, and that a time counts only where the gradients agree."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fedaudit.defences.aggregation import AGGREGATORS
from fedaudit.utils.machine import import_torchvision, own_process
from fedaudit_lab.bench import inversion
from fedaudit_lab.bench.cases import Case, Prepared, Tool, our_tool


@pytest.mark.slow
def test_inversion_measures_every_engine(command):
    result = json.loads(command("bench", "inversion", "--quick", "--json").out)
    steps = result["steps"]
    assert {(row["model"], row["tool"]) for row in steps} == {
        (model, tool) for model in ("lenet", "convnet-small") for tool in ("reference", "first-order")
    }
    assert {row["way"] for row in steps} == {"gradient", "simulation", "one batch"}
    for row in steps:
        assert row["cpu_ms_min"] <= row["cpu_ms"] <= row["cpu_ms_max"]
        assert row["agreement"] >= 0.999
        assert row["gflops"] > 0
        assert row["matmul_gflops"] > 0
        assert row["speedup"] > 0
    assert result["geomean_speedup"] > 0
    assert (result["baseline"], result["ours"]) == ("reference", "first-order")


def test_a_time_without_agreement_does_not_count(monkeypatch):
    def wrong(name: str, ready: Prepared) -> Tool:
        tool = our_tool("reference", ready)
        if name == "reference":
            return tool
        return Tool(tool.iterate, lambda images: (tool.engine(images)[0], torch.randn_like(images)))

    monkeypatch.setattr(inversion, "our_tool", wrong)
    monkeypatch.setattr(inversion, "QUICK", [Case("lenet", 1)])
    monkeypatch.setattr(inversion, "QUICK_FEDAVG", [])
    result = inversion.measure(quick=True)
    assert {row["tool"]: row["speedup"] for row in result["steps"]} == {"reference": 1.0, "first-order": None}
    assert result["geomean_speedup"] is None


@pytest.mark.long
@pytest.mark.slow
def test_memory_is_that_of_a_process_of_its_own(monkeypatch):
    if not Path("/proc/self/clear_refs").exists():
        pytest.skip("only Linux tells a process's peak")
    monkeypatch.setattr(inversion, "_PROCESSES", 1)  # sixteen images differ from one beyond any noise
    small, large = (inversion._peak_in_child(Case("convnet-small", n), "reference") for n in (1, 16))
    assert small is not None
    assert large is not None
    assert 0 < small < large


@pytest.mark.slow
def test_picture_tells_when_the_goals_are_reached(command):
    told = command("bench", "picture", "--images", "1", "--model", "lenet", "--cap", "1", "--json")
    result = json.loads(told.out)
    (row,) = result["tools"]
    assert row["iterations"] > 0
    assert set(row["seconds"]) == {"20.0", "25.0"}
    assert result["speedups"] == []
    assert [point[0] for point in row["curve"]] == sorted(point[0] for point in row["curve"])


@pytest.mark.slow
def test_simulator_counts_updates_and_findings(command):
    told = command("bench", "simulator", "--quick").out
    assert "updates/s" in told
    assert "8 findings of 32 images" in told


@pytest.mark.slow
def test_training_is_timed_beside_a_bare_loop(command):
    result = json.loads(command("bench", "training", "--quick", "--json").out)
    assert [row["model"] for row in result["rows"]] == ["mlp", "convnet-small"]
    for row in result["rows"]:
        assert row["bare_ms"] > 0
        assert 0.3 < row["simulator"] < 3  # other work on the machine is in it, too
        assert 0.3 < row["fast"] < 6
        assert 0 < row["share"] < 1.5


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_training_where_there_is_no_gpu_is_a_line(command):
    made = command("bench", "training", "--quick", "--device", "cuda")
    assert (made.code, made.err.count("\n")) == (2, 1)
    assert "no GPU" in made.err


@pytest.mark.slow
def test_aggregators_are_timed_and_a_peer_that_is_not_there_is_named(command):
    result = json.loads(command("bench", "aggregators", "--quick", "--json").out)
    assert {row["rule"] for row in result["rows"]} == set(AGGREGATORS.names())
    assert all(row["seconds"] > 0 and row["speedup"] == 1 for row in result["rows"])
    wrong = command("bench", "aggregators", "--vs", "bizfl")
    assert (wrong.code, "did you mean 'byzfl'" in wrong.err) == (2, True)


def test_the_exact_reconstruction_is_timed_and_its_error_measured(command):
    result = json.loads(command("bench", "local-model", "--quick", "--json").out)
    assert [row["d"] for row in result["rows"]] == [10, 30, 100]
    assert all(row["relative_error"] < 1e-6 and row["condition"] > 1 for row in result["rows"])
    assert "to the power of" in command("bench", "local-model", "--quick").out


@pytest.mark.long
@pytest.mark.slow
def test_recorder_measures_rounds_bytes_and_memory(command):
    result = json.loads(command("bench", "recorder", "--quick", "--json").out)
    for row in result["rows"]:
        assert len(row["with"]) == len(row["without"]) == len(row["cpu_with"]) == 2
        assert 0.5 < row["cpu_ratio"] < 2  # other work on the machine is in it, too
        assert min(row["without"]) > 0.5
    long = result["long"]
    assert (long["rounds"], long["clients"], long["parameters"]) == (2, 10, 11_173_962)
    floats = 11 * 11_173_962 * 4  # ten updates and the global model
    assert floats < long["bytes"] / 2 < 1.01 * floats
    assert long["bytes_of_100_rounds"] == long["bytes"] // 2 * 100
    if long["peak_mib"] is not None:
        assert long["peak_mib"] < 20 * 43  # never all ten clients' updates and gradients


@pytest.mark.slow
def test_a_round_with_a_malicious_client_is_timed(command):
    result = json.loads(command("bench", "malicious", "--quick", "--json").out)
    assert [(row["clients"], row["workers"], row["rounds"]) for row in result["rows"]] == [(4, 1, 3)]
    assert result["rows"][0]["seconds_a_round"] > 0


@pytest.mark.slow
def test_canaries_are_timed_where_the_server_adds_noise_and_where_clients_do(command):
    result = json.loads(command("bench", "canaries", "--quick", "--json").out)
    assert [(row["noise"], row["canaries"]) for row in result["rows"]] == [
        ("central", 50),
        ("local", 10),
        ("local, joint", 50),
    ]
    assert all(row["ratio"] > 0 for row in result["rows"])


@pytest.mark.long
@pytest.mark.slow
def test_a_guard_s_share_of_a_round_is_measured(command):
    result = json.loads(command("bench", "guard", "--quick", "--json").out)
    assert [(row["model"], row["steps"]) for row in result["rows"]] == [("convnet-small", 4), ("convnet-small", 1)]
    for row in result["rows"]:
        assert len(row["shares"]) == len(row["training"]) == result["rounds"] == 3
        assert min(row["shares"]) > 0


@pytest.mark.long
@pytest.mark.slow
def test_all_benches_write_one_page(command, tmp_path):
    assert command("bench", "all", "--quick", "--out", tmp_path).code == 0
    page = (tmp_path / "bench.html").read_text().lower()
    for word in ("gradient inversion", "time to an image", "simulator", "aggregators", "exact local model"):
        assert word in page
    assert set(json.loads((tmp_path / "bench.json").read_text())) == {
        "inversion",
        "picture",
        "simulator",
        "training",
        "aggregators",
        "local-model",
        "malicious",
        "recorder",
        "canaries",
        "guard",
    }


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["inversion", "--vs", "breeching"], "did you mean 'breaching'"),
        (["picture", "--vs", "flower"], "unknown peer 'flower'"),
        (["inversion", "--vs", "breaching"], "make bench-peers"),
        (["simulator", "--quick", "--vs", "flower"], "make bench-peers"),
        (["picture", "--model", "resnet99"], "resnet99"),
        (["all", "--out", "/proc/nowhere"], "/proc/nowhere"),
    ],
)
def test_bad_input_is_one_line(arguments, reason, monkeypatch, command):
    monkeypatch.setitem(sys.modules, "breaching", None)
    monkeypatch.setitem(sys.modules, "flwr.app", None)
    done = command("bench", *arguments)
    assert done.code == 2
    assert len(done.error.strip().splitlines()) == 1
    assert reason in done.error


@pytest.mark.slow
def test_a_torchvision_that_does_not_fit_torch_is_made_importable_in_processes_of_our_own(tmp_path):
    package = tmp_path / "torchvision"
    package.mkdir()
    (package / "__init__.py").write_text(
        "import torch\n"
        "if not hasattr(torch.ops.torchvision, 'nms'):\n"
        "    raise RuntimeError('operator torchvision::nms does not exist')\n"
    )
    script = (
        "from fedaudit.utils.machine import import_torchvision as make, own_process\n"
        "try: make()\nexcept RuntimeError: pass\nelse: raise SystemExit('a process that is not ours was changed')\n"
        "own_process()\nassert make() is make()\nimport torchvision\n"
    )
    paths = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", script], env={"PYTHONPATH": paths}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


# Beside other people's libraries -------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.peers
def test_breaching_has_the_same_gradient_on_every_victim(command):
    own_process()
    with contextlib.suppress(ImportError):
        import_torchvision()
    pytest.importorskip("breaching")
    result = json.loads(command("bench", "inversion", "--quick", "--vs", "breaching", "--json").out)
    agreement = {
        (row["model"], row["way"], row["images"]): row["agreement"]
        for row in result["steps"]
        if row["tool"] == "breaching"
    }
    assert {way for _, way, _ in agreement} == {"gradient", "simulation"}
    assert min(agreement.values()) > 0.9999
    assert result["baseline"] == "breaching"


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.peers
def test_flower_simulates_the_same_federation(command):
    pytest.importorskip("flwr.simulation")
    result = json.loads(command("bench", "simulator", "--quick", "--vs", "flower", "--json").out)
    assert {row["tool"]: row["updates"] for row in result["simulators"]} == {"fedaudit": 8, "flower": 8}
    assert result["speedup"] > 0


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.peers
def test_flower_trains_beside_the_bare_loop(command):
    pytest.importorskip("flwr.simulation")
    result = json.loads(command("bench", "training", "--quick", "--vs", "flower", "--json").out)
    for row in result["rows"]:
        assert 0 < row["flower"] < 1.5  # it trains by the same loop, and sends messages beside


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.peers
def test_aggregators_are_timed_beside_byzfl_and_flower(command):
    own_process()
    with contextlib.suppress(ImportError):
        import_torchvision()
    pytest.importorskip("byzfl")
    pytest.importorskip("flwr.server.strategy.aggregate")
    told = command("bench", "aggregators", "--quick", "--vs", "byzfl", "--vs", "flower", "--json")
    rows = json.loads(told.out)["rows"]
    for peer in ("byzfl", "flower"):
        theirs = [row for row in rows if row["tool"] == peer]
        assert {"median", "trimmed-mean", "multi-krum"} <= {row["rule"] for row in theirs}
        assert all(row["seconds"] > 0 and row["why"] is None for row in theirs)
