"""How fast the aggregators are and how much memory they take beside the updates: ours, ByzFL's and Flower's."""

from __future__ import annotations

import importlib
import math
import multiprocessing
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from fedaudit.defences import AGGREGATORS, Cohort
from fedaudit.utils import (
    Display,
    Quiet,
    end_with,
    import_torchvision,
    make,
    one_thread,
    own_process,
    peak_memory,
    proc_field,
    start_measuring_memory,
)
from fedaudit_lab.bench import import_peer

RULES = (
    *("mean", "fedavg", "median", "trimmed-mean", "krum", "multi-krum", "bulyan", "afa", "fltrust", "inferguard"),
    *("fixed-clipping", "adaptive-clipping"),
)
PEERS = {"byzfl": "byzfl", "flower": "flwr"}
SIZES = [(n, d) for d in (10**5, 10**6, 10**7) for n in (10, 50, 100)]
_QUICK = [(10, 10**4), (20, 10**5)]
_WITH_F = ("trimmed-mean", "krum", "multi-krum", "bulyan")
_SETTINGS = {"adaptive-clipping": {"noise_multiplier": 0.5}}  # one would need a louder count of ten clients
_COPIES = {"fedaudit": 2, "byzfl": 4, "flower": 5}  # of the matrix that must fit into memory before a tool is tried
_ENOUGH = 2.0  # seconds of repetitions


@dataclass(frozen=True)
class Case:
    """One rule of one tool on one matrix."""

    rule: str
    tool: str
    n: int
    d: int

    @property
    def f(self) -> int:
        """How many clients the rule is to stand."""
        return max(1, self.n // 10)


def measure(
    *,
    quick: bool,
    peers: Sequence[str] = (),
    cap: float = 120.0,
    largest: int = 10**7,
    display: Display | None = None,
) -> dict[str, Any]:
    """Time every aggregator on the same Gaussian matrices, one thread, and measure by how much its process grows.

    The updates lie in memory beforehand in the form that the tool takes: for Flower its ArrayRecords (Krum, Multi-Krum)
    or plain arrays. Each time is CPU time, the least of the repetitions.

    Args:
        peers: beside these tools, where they have the rule: byzfl, flower.
        largest: leave out updates of more parameters.
        cap: seconds after which a rule is given up.
    """
    for peer in peers:
        import_peer(peer, PEERS[peer])
    cases = [
        Case(rule, tool, n, d)
        for n, d in (_QUICK if quick else SIZES)
        if d <= largest
        for tool in ("fedaudit", *peers)
        for rule in RULES
        if tool == "fedaudit" or (rule, tool) in _PEER_RULES
    ]
    report = (display or Quiet()).stage("aggregators", len(cases))
    rows: list[dict[str, Any]] = []
    while len(rows) < len(cases):
        with multiprocessing.get_context("spawn").Pool(1, end_with, (os.getpid(),)) as pool:
            results = pool.imap(_measure, cases[len(rows) :])
            for case in cases[len(rows) :]:
                try:
                    found = results.next(timeout=cap + 60)  # and a minute for the process to start and draw the matrix
                except multiprocessing.TimeoutError:
                    found = {"seconds": None, "peak_mib": None, "why": f"more than {cap:g} s"}
                rows.append({"rule": case.rule, "tool": case.tool, "n": case.n, "d": case.d, "f": case.f, **found})
                report(len(rows))
                if found["seconds"] is None and found["why"].startswith("more"):
                    break  # the process is still at it; a new one goes on
    ours = {(row["rule"], row["n"], row["d"]): row["seconds"] for row in rows if row["tool"] == "fedaudit"}
    for row in rows:
        own = ours[row["rule"], row["n"], row["d"]]
        row["speedup"] = row["seconds"] / own if row["seconds"] and own else None
    return {"rows": rows, "cap": cap, "torch": torch.__version__, "threads": 1}


def _measure(case: Case) -> dict[str, Any]:
    """Run in a child: time and memory of one rule."""
    needed = 4 * case.n * case.d * _COPIES[case.tool]
    if needed > _available():
        return {"seconds": None, "peak_mib": None, "why": f"less than {needed / 2**30:.0f} GiB of memory free"}
    own_process()
    with suppress(Exception):
        import_torchvision()
    with one_thread():
        run = _prepare(case, _matrix(case.n, case.d))
        before = start_measuring_memory()
        times: list[float] = []
        while not times or (sum(times) < _ENOUGH and len(times) < 20):
            began = time.process_time()  # one thread: the same on a busy machine
            run()
            times.append(time.process_time() - began)
        return {"seconds": min(times), "peak_mib": peak_memory(before), "why": None}


@lru_cache(maxsize=1)  # the rules of one tool follow each other on one matrix
def _matrix(n: int, d: int) -> Tensor:
    return torch.randn(n, d, generator=torch.Generator().manual_seed(0))


def _prepare(case: Case, updates: Tensor) -> Callable[[], object]:
    """Return the call to be timed."""
    if case.tool == "fedaudit":
        rule = make(AGGREGATORS, case.rule, {"f": case.f} if case.rule in _WITH_F else _SETTINGS.get(case.rule, {}))
        root = updates[0] + updates[1] if case.rule == "fltrust" else None
        cohort = Cohort(tuple(range(case.n)), (10,) * case.n, root)
        return lambda: rule.anew()(updates, cohort)
    return _PEER_RULES[case.rule, case.tool](case, updates)


def _byzfl(name: str, *, f: bool = True) -> Callable[[Case, Tensor], Callable[[], object]]:
    def prepare(case: Case, updates: Tensor) -> Callable[[], object]:
        rule = getattr(importlib.import_module("byzfl"), name)
        rule = rule(f=case.f) if f else rule()
        return lambda: rule(updates)

    return prepare


def _flower(name: str) -> Callable[[Case, Tensor], Callable[[], object]]:
    def prepare(case: Case, updates: Tensor) -> Callable[[], object]:
        rule = getattr(importlib.import_module("flwr.server.strategy.aggregate"), name)
        replies = [([row.numpy()], 10) for row in updates]
        match name:
            case "aggregate_trimmed_avg":
                return lambda: rule(replies, case.f / case.n + 1e-9)
            case "aggregate_bulyan":
                krum = importlib.import_module("flwr.server.strategy.aggregate").aggregate_krum
                return lambda: rule(list(replies), case.f, krum, to_keep=0)  # it empties its list
        return lambda: rule(replies)

    return prepare


def _flower_krum(best: Callable[[Case], int]) -> Callable[[Case, Tensor], Callable[[], object]]:
    def prepare(case: Case, updates: Tensor) -> Callable[[], object]:
        app = importlib.import_module("flwr.app")
        strategies = importlib.import_module("flwr.serverapp.strategy.multikrum")
        replies = [
            app.RecordDict(
                {"arrays": app.ArrayRecord([row.numpy()]), "metrics": app.MetricRecord({"num-examples": 10})}
            )
            for row in updates
        ]

        def run() -> object:
            chosen = strategies.select_multikrum(replies, case.f, best(case))
            return strategies.aggregate_arrayrecords(chosen, "num-examples")

        return run

    return prepare


_PEER_RULES: dict[tuple[str, str], Callable[[Case, Tensor], Callable[[], object]]] = {
    ("mean", "byzfl"): _byzfl("Average", f=False),
    ("median", "byzfl"): _byzfl("Median", f=False),
    ("trimmed-mean", "byzfl"): _byzfl("TrMean"),
    ("krum", "byzfl"): _byzfl("Krum"),
    ("multi-krum", "byzfl"): _byzfl("MultiKrum"),
    ("fedavg", "flower"): _flower("aggregate"),
    ("median", "flower"): _flower("aggregate_median"),
    ("trimmed-mean", "flower"): _flower("aggregate_trimmed_avg"),
    ("bulyan", "flower"): _flower("aggregate_bulyan"),
    ("krum", "flower"): _flower_krum(lambda _: 1),
    ("multi-krum", "flower"): _flower_krum(lambda case: case.n - case.f),
}


def _available() -> float:
    """Return the bytes of memory that are free; endless where the system doesn't tell."""
    try:
        return 1024 * proc_field("MemAvailable", "/proc/meminfo")
    except OSError:
        return math.inf
