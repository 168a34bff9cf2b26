"""How long a step of gradient inversion takes here: median CPU and wall milliseconds, one thread."""

from __future__ import annotations

import json
import statistics
import time
from typing import Any

import torch
from rich.table import Table

from fedaudit.attacks.inversion.frozen import frozen
from fedaudit.attacks.inversion.matching import Victim, one_gradient, reference
from fedaudit.attacks.inversion.objectives import WeightedCosine
from fedaudit.models import build_model, initialise, set_training_mode
from fedaudit.progress import wide_console
from fedaudit.seeds import generator, one_thread
from fedaudit.update import TrainingFacts, loss_function

_SHAPE = (3, 32, 32)
_QUICK = [("lenet", 1, 1), ("convnet-small", 1, 1), ("convnet-small", 4, 4)]
_FULL = [*_QUICK, ("resnet20", 1, 1), ("resnet20-4", 1, 1), ("resnet20-4", 4, 1), ("resnet20-4", 4, 4)]


def time_inversion(*, quick: bool) -> dict[str, Any]:
    """Time one step (distance and its gradient on the images) for several models and batches.

    Each case alternates the engines, so that a drift of the machine's speed meets both alike.

    Args:
        quick: fewer models and repetitions.
    """
    repetitions = 5 if quick else 15
    with one_thread():
        rows = [row for case in (_QUICK if quick else _FULL) for row in _time_case(*case, repetitions)]
    return {"threads": 1, "repetitions": repetitions, "steps": rows}


def _time_case(name: str, images: int, local_steps: int, repetitions: int) -> list[dict[str, Any]]:
    model = build_model(name, input_shape=_SHAPE, outputs=10)
    initialise(model, "default", generator(0, "bench"))
    set_training_mode(model, "eval")
    start = generator(0, "bench", "images")
    batch = torch.randn((images, *_SHAPE), generator=start)
    labels = torch.arange(images) % 10
    parameters = {n: p.detach() for n, p in model.named_parameters()}
    victim = Victim(model, loss_function("cross-entropy"), parameters, dict(model.named_buffers()))
    target = [torch.randn(p.shape, generator=start) for p in parameters.values()]
    distance = WeightedCosine(target, [1.0] * len(target))
    ways = {"one batch": one_gradient(images)}
    if local_steps > 1:
        ways[f"{local_steps} local steps"] = TrainingFacts(1e-3, local_steps, (images // local_steps,) * local_steps)
    engines = {
        f"{make.__name__}, {way}": make(victim, labels, facts, distance)
        for way, facts in ways.items()
        for make in (reference, frozen)
    }
    times: dict[str, list[tuple[float, float]]] = {engine: [] for engine in engines}
    for _ in range(repetitions + 1):
        for engine, step in engines.items():
            cpu, wall = time.process_time(), time.perf_counter()
            step(batch)
            times[engine].append((time.process_time() - cpu, time.perf_counter() - wall))
    rows = []
    for engine, taken in times.items():
        cpus, walls = zip(*taken[1:], strict=True)  # the first one warms up
        rows.append(
            {
                "model": name,
                "images": images,
                "engine": engine,
                "cpu_ms": 1e3 * statistics.median(cpus),
                "cpu_ms_min": 1e3 * min(cpus),
                "cpu_ms_max": 1e3 * max(cpus),
                "wall_ms": 1e3 * statistics.median(walls),
            }
        )
    return rows


def print_bench(result: dict[str, Any], json_output: bool) -> None:
    """Print the timings as JSON or as a table."""
    if json_output:
        print(json.dumps(result, indent=2))
        return
    table = Table(
        title=f"one step, {result['threads']} thread, {result['repetitions']} repetitions", title_style="bold"
    )
    for column in ("model", "images", "engine"):
        table.add_column(column)
    for column in ("CPU ms (median)", "min", "max", "wall ms"):
        table.add_column(column, justify="right")
    for row in result["steps"]:
        figures = [f"{row[k]:.1f}" for k in ("cpu_ms", "cpu_ms_min", "cpu_ms_max", "wall_ms")]
        table.add_row(row["model"], str(row["images"]), row["engine"], *figures)
    wide_console().print(table)
