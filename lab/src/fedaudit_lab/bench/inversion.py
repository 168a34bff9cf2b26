"""How long an iteration of gradient inversion takes, beside a peer's: one thread, in turn, the same victims."""

from __future__ import annotations

import multiprocessing
import os
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from fedaudit.attacks.inversion import AGREEMENT
from fedaudit.utils import (
    Display,
    Quiet,
    end_with,
    flop_counters,
    one_thread,
    own_process,
    peak_memory,
    start_measuring_memory,
)
from fedaudit_lab.bench import import_peer
from fedaudit_lab.bench.cases import (
    FULL,
    FULL_FEDAVG,
    QUICK,
    QUICK_FEDAVG,
    TOTAL_VARIATION,
    Case,
    Prepared,
    Tool,
    our_tool,
    prepare,
)

ToolName = Literal["reference", "first-order", "compiled", "breaching"]
_MATRIX = 1024
_PROCESSES = 3


def measure(*, quick: bool, peers: Sequence[str] = (), display: Display | None = None) -> dict[str, Any]:
    """Time whole iterations (distance, prior, gradient, Adam, clamping) and count their memory and arithmetic.

    Every repetition takes one iteration of each tool in turn, so that a drift of the machine's speed meets all alike. A
    time counts only if the tool's gradient on the images agrees with double backward's (cosine ≥ 0.999).
    """
    if peers:
        import_peer("breaching", "breaching")
    repetitions = 5 if quick else 15
    tools: list[ToolName] = ["reference", "first-order"]
    tools += [] if quick else ["compiled"]
    tools += ["breaching"] if peers else []
    baseline: ToolName = "breaching" if peers else "reference"
    ours: ToolName = "first-order" if quick else "compiled"
    cases = list(QUICK if quick else FULL)
    for model, images in QUICK_FEDAVG if quick else FULL_FEDAVG:
        cases += [Case(model, images, "simulation"), Case(model, images, "one batch")]
    rows: list[dict[str, Any]] = []
    report = (display or Quiet()).stage(f"{len(cases)} victims", len(cases))
    with one_thread():
        for done, case in enumerate(cases):
            # small networks weigh less than the libraries that a process loads meanwhile
            heavy = case.model == "resnet20-4"
            rows += _measure(case, tools, repetitions, baseline, memory=heavy and not quick)
            report(done + 1)
    best = [r["speedup"] for r in rows if r["tool"] == ours and r["way"] != "one batch" and r["speedup"]]
    return {
        "threads": 1,
        "repetitions": repetitions,
        "torch": torch.__version__,
        "baseline": baseline,
        "ours": ours,
        "geomean_speedup": statistics.geometric_mean(best) if best else None,
        "steps": rows,
    }


def _measure(
    case: Case, names: list[ToolName], repetitions: int, baseline: ToolName, *, memory: bool
) -> list[dict[str, Any]]:
    if case.way == "one batch":  # a peer has no such thing; what it is compared with is the peer's simulation
        names = [name for name in names if name != "breaching"]
    ready = prepare(case)
    tools = {name: _tool(name, ready) for name in names}
    if case.way == "one batch" and baseline == "breaching":
        tools["breaching"] = _tool("breaching", prepare(Case(case.model, case.images, "simulation")))
    exact = tools["reference"].engine(ready.start)[1]
    cosines = {n: _cosine(t.engine(ready.start)[1], exact) for n, t in tools.items()}
    flops = {name: _flops(ready, name) for name in names}
    cpu: dict[str, list[float]] = {name: [] for name in tools}
    wall: dict[str, list[float]] = {name: [] for name in tools}
    rates: list[float] = []
    matrix = torch.randn(_MATRIX, _MATRIX)
    for _ in range(repetitions + 1):
        for name, each in tools.items():
            before, began = time.process_time(), time.perf_counter()
            each.iterate()
            cpu[name].append(1e3 * (time.process_time() - before))
            wall[name].append(1e3 * (time.perf_counter() - began))
        began = time.perf_counter()
        matrix @ matrix
        rates.append(2e-9 * _MATRIX**3 / (time.perf_counter() - began))
    agreed = {n: (case.way == "one batch" and n == "breaching") or c >= AGREEMENT for n, c in cosines.items()}
    medians = {name: statistics.median(times[1:]) for name, times in cpu.items()}  # the first one warms up
    return [
        {
            "model": case.model,
            "images": case.images,
            "way": case.way,
            "tool": name,
            "cpu_ms": medians[name],
            "cpu_ms_min": min(cpu[name][1:]),
            "cpu_ms_max": max(cpu[name][1:]),
            "wall_ms": statistics.median(wall[name][1:]),
            "agreement": cosines[name],
            "speedup": medians[baseline] / medians[name] if agreed[name] and agreed[baseline] else None,
            "gflops": count / medians[name] / 1e6 if (count := flops[name]) else None,
            "matmul_gflops": statistics.median(rates[1:]),
            "peak_mib": _peak_in_child(case, name) if memory else None,
        }
        for name in names
    ]


def _tool(name: ToolName, ready: Prepared) -> Tool:
    if name != "breaching":
        return our_tool(name, ready)
    from fedaudit_lab.bench.breaching import peer_tool

    return peer_tool(ready, TOTAL_VARIATION)


def _cosine(a: Tensor, b: Tensor) -> float:
    a, b = a.flatten().double(), b.flatten().double()
    return float(torch.dot(a, b) / (a.norm() * b.norm()))


def _flops(ready: Prepared, name: ToolName) -> int | None:
    """Return the floating-point operations of a step's convolutions and matrix products; None if not countable."""
    # the compiled engine does what the traced one does; torch's counter sees into the latter only
    engine = _tool("first-order" if name == "compiled" else name, ready).engine
    engine(ready.start)
    try:
        with FlopCounterMode(display=False, custom_mapping=flop_counters()) as counter:
            engine(ready.start)
    except RuntimeError:  # the counter's hooks don't bear breaching's unrolled training
        return None
    return int(counter.get_total_flops())


def _peak_in_child(case: Case, name: ToolName) -> float | None:
    """Return by how many MiB a process of its own grows in three iterations; None where Linux doesn't tell.

    The median of three: what a heap can use again differs from one process to the next.
    """
    if not Path("/proc/self/clear_refs").exists():
        return None
    context = multiprocessing.get_context("spawn")
    with context.Pool(1, end_with, (os.getpid(),), maxtasksperchild=1) as pool:
        return float(statistics.median(pool.apply(_peak, (case, name)) for _ in range(_PROCESSES)))


def _peak(case: Case, name: ToolName) -> float:
    with one_thread():
        own_process()
        ready = prepare(case)
        each = _tool(name, ready)
        before = start_measuring_memory()
        for _ in range(3):
            each.iterate()
        return peak_memory(before) or 0.0
