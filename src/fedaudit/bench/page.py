"""What the benchmarks say: as tables in a terminal, on one page, or as JSON."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from fedaudit.utils.errors import BadInput
from fedaudit.utils.progress import wide_console

_WIDTH = 150


def show(results: dict[str, dict[str, Any]], *, json_output: bool) -> None:
    """Print ``results`` (by benchmark) as JSON or as tables."""
    if json_output:
        print(json.dumps(next(iter(results.values())) if len(results) == 1 else results, indent=2))
        return
    _print(results, wide_console())


def save(results: dict[str, dict[str, Any]], folder: Path) -> Path:
    """Write bench.json and bench.html to ``folder`` and return the page's path.

    Raises:
        BadInput: the folder can't be written.
    """
    console = Console(record=True, width=_WIDTH, file=io.StringIO())
    _print(results, console)
    page = folder / "bench.html"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "bench.json").write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
        console.save_html(str(page))
    except OSError as error:
        raise BadInput(f"can't write to '{folder}': {error.strerror or error}") from None
    return page


def _print(results: dict[str, dict[str, Any]], console: Console) -> None:
    for name, result in results.items():
        for part in _RENDERERS[name](result):
            console.print(part)
        console.print()


def _table(title: str, left: list[str], right: list[str]) -> Table:
    table = Table(title=title, title_style="bold", title_justify="left", min_width=60)
    for column in left:
        table.add_column(column, no_wrap=True)
    for column in right:
        table.add_column(column, justify="right")
    return table


def _number(value: float | None, form: str = ".1f") -> str:
    return "–" if value is None else f"{value:{form}}"


def _inversion(result: dict[str, Any]) -> Iterator[Table | str]:
    table = _table(
        f"one iteration of gradient inversion at 32×32: {result['threads']} thread, torch {result['torch']}, "
        f"{result['repetitions']} repetitions in turn",
        ["model", "images", "matches", "tool"],
        ["CPU ms", "min", "max", "wall ms", f"× {result['baseline']}", "agreement", "GFLOP/s", "of matmul", "peak MiB"],
    )
    previous = None
    for row in result["steps"]:
        case = (row["model"], str(row["images"]), row["way"])
        if previous not in (None, case):
            table.add_section()
        table.add_row(
            *(case if case != previous else ("", "", "")),
            row["tool"],
            *(_number(row[key]) for key in ("cpu_ms", "cpu_ms_min", "cpu_ms_max", "wall_ms")),
            _number(row["speedup"], ".2f"),
            _number(row["agreement"], ".5f"),
            _number(row["gflops"], ".0f"),
            _number(row["gflops"] and row["gflops"] / row["matmul_gflops"], ".0%"),
            _number(row["peak_mib"], ".0f"),
        )
        previous = case
    yield table
    yield (
        f"{result['ours']} beside {result['baseline']}, geometric mean where both match the same: "
        f"{_number(result['geomean_speedup'], '.2f')} times faster"
    )


def _time_to_image(result: dict[str, Any]) -> Iterator[Table | str]:
    goals = list(result["tools"][0]["seconds"])
    table = _table(
        f"time to an image: CPU seconds until the mean PSNR of {result['images']} images ({result['data']}, "
        f"{result['model']}, a gradient of one image each) reaches",
        ["tool"],
        [*(f"{float(goal):g} dB" for goal in goals), "iterations", "s in all", "PSNR then"],
    )
    for row in result["tools"]:
        cells = [_number(row["seconds"][goal]) for goal in goals]
        table.add_row(row["tool"], *cells, str(row["iterations"]), _number(row["cpu_seconds"]), _number(row["psnr"]))
    yield table
    for speedup in result["speedups"]:
        least = "" if speedup["reached"] else "at least "
        yield f"{float(speedup['goal']):g} dB: {least}{speedup['ratio']:.1f} times sooner than {speedup['peer']}"


def _simulator(result: dict[str, Any]) -> Iterator[Table | str]:
    table = _table(
        f"simulator: {result['clients']} clients of FedAvg, {result['rounds']} rounds, {result['model']}",
        ["tool"],
        ["client updates", "seconds", "updates/s", "seconds to start"],
    )
    for row in result["simulators"]:
        table.add_row(
            row["tool"],
            str(row["updates"]),
            _number(row["seconds"], ".2f"),
            _number(row["updates_per_second"]),
            _number(row["start_seconds"]),
        )
    yield table
    evaluation = result["evaluation"]
    yield (
        f"evaluation: {evaluation['findings']} findings of {evaluation['images']} images each evaluated in "
        f"{evaluation['seconds']:.2f} s"
    )


def _aggregators(result: dict[str, Any]) -> Iterator[Table | str]:
    table = _table(
        f"aggregators: {result['threads']} thread, torch {result['torch']}, f = n / 10",
        ["n", "d", "rule", "tool"],
        ["CPU s", "× ours", "MiB beside the updates"],
    )
    previous = None
    for row in sorted(result["rows"], key=lambda row: (row["d"], row["n"])):
        size = (str(row["n"]), f"{row['d']:,}")
        if previous not in (None, size):
            table.add_section()
        cells = [_number(row["seconds"], ".4f"), _number(row["speedup"], ".1f"), _number(row["peak_mib"], ".0f")]
        if row["why"]:
            cells[0] = row["why"]
        table.add_row(*(size if size != previous else ("", "")), row["rule"], row["tool"], *cells)
        previous = size
    yield table


def _local_model(result: dict[str, Any]) -> Iterator[Table | str]:
    table = _table(
        "exact local model reconstruction: least squares, 5 full-batch steps, d + 1 rounds, one thread",
        [],
        ["d", "rounds", "CPU s", "condition", "relative error"],
    )
    for row in result["rows"]:
        cells = (_number(row["cpu_seconds"], ".4f"), _number(row["condition"], ".1e"))
        table.add_row(str(row["d"]), str(row["rounds"]), *cells, _number(row["relative_error"], ".1e"))
    yield table
    yield f"between the two largest d the time grows as d to the power of {result['slope']:.2f}"


def _malicious(result: dict[str, Any]) -> Iterator[Table | str]:
    table = _table(
        f"a round with a client that generates images: {result['data']}, {result['examples']} examples a client",
        [],
        ["clients", "processes", "rounds", "seconds a round"],
    )
    for row in result["rows"]:
        seconds = _number(row["seconds_a_round"], ".2f")
        table.add_row(str(row["clients"]), str(row["workers"]), str(row["rounds"]), seconds)
    yield table
    if result["workers_speedup"]:
        yield f"worker processes: {result['workers_speedup']:.2f} times faster"


_RENDERERS = {
    "inversion": _inversion,
    "picture": _time_to_image,
    "simulator": _simulator,
    "aggregators": _aggregators,
    "local-model": _local_model,
    "malicious": _malicious,
}
