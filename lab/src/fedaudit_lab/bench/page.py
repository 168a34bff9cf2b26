"""What the benchmarks say: as tables in a terminal, on one page, or as JSON."""

from __future__ import annotations

import json
import statistics
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from fedaudit import BadInput
from fedaudit.pipeline import environment
from fedaudit.report import render
from fedaudit.utils import wide_console


@dataclass(frozen=True)
class Sheet:
    """One benchmark's table.

    Attributes:
        about: under which conditions.
        left: headings of the columns of words; ``right``, of those of numbers.
        repeated: how many of the first columns name a case; on the terminal only its first row shows them.
        notes: what the table says, in a sentence each.
        reading: what its columns mean, for the page.
    """

    title: str
    about: str
    left: list[str]
    right: list[str]
    rows: list[list[str]]
    repeated: int = 0
    notes: list[str] = field(default_factory=list)
    reading: str = ""


def show(results: dict[str, dict[str, Any]], *, json_output: bool) -> None:
    """Print ``results`` (by benchmark) as JSON or as tables."""
    if json_output:
        print(json.dumps(next(iter(results.values())) if len(results) == 1 else results, indent=2))
        return
    console = wide_console()
    for sheet in _sheets(results).values():
        _print(sheet, console)


def save(results: dict[str, dict[str, Any]], folder: Path) -> Path:
    """Write bench.json and bench.html to ``folder`` and return the page's path."""
    page = folder / "bench.html"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "bench.json").write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
        page.write_text(render_bench(results), encoding="utf-8")
    except OSError as error:
        raise BadInput(f"can't write to '{folder}': {error.strerror or error}") from None
    return page


def render_bench(results: dict[str, dict[str, Any]]) -> str:
    """Return the page of ``results`` (by benchmark): one that needs no other file and no network."""
    now = datetime.now(UTC).isoformat(timespec="minutes")
    return render("bench.html.j2", "fedaudit_lab", sheets=_sheets(results), machine=environment("cpu"), now=now)


def _sheets(results: dict[str, dict[str, Any]]) -> dict[str, Sheet]:
    return {name: _SHEETS[name](result) for name, result in results.items()}


def _print(sheet: Sheet, console: Console) -> None:
    title = f"{sheet.title}: {sheet.about}"
    table = Table(title=title, title_style="bold", title_justify="left", min_width=60)
    for column in sheet.left:
        table.add_column(column, no_wrap=True)
    for column in sheet.right:
        table.add_column(column, justify="right")
    previous: list[str] = []
    for row in sheet.rows:
        case = row[: sheet.repeated]
        if previous and case != previous:
            table.add_section()
        table.add_row(*([""] * len(case) if case == previous else case), *row[sheet.repeated :])
        previous = case
    console.print(table)
    for note in sheet.notes:
        console.print(note)
    console.print()


def _number(value: float | None, form: str = ".1f") -> str:
    return "–" if value is None else f"{value:{form}}"


def _cells(row: dict[str, Any], *words: str, **numbers: str) -> list[str]:
    """Return a row's values as texts: first words, then numbers, each in its own form."""
    return [*(str(row[key]) for key in words), *(_number(row[key], form) for key, form in numbers.items())]


def _inversion(result: dict[str, Any]) -> Sheet:
    ours, baseline = result["ours"], result["baseline"]
    return Sheet(
        title="Gradient inversion",
        about=f"one iteration on images of 32×32, 1 thread, torch {result['torch']}, "
        f"{result['repetitions']} repetitions in turn",
        left=["model", "images", "matches", "tool"],
        right=["CPU ms", "min", "max", "wall ms", f"× {baseline}", "agreement", "GFLOP/s", "of matmul", "peak MiB"],
        rows=[
            [
                *_cells(row, "model", "images", "way", "tool"),
                *_cells(row, cpu_ms=".1f", cpu_ms_min=".1f", cpu_ms_max=".1f", wall_ms=".1f"),
                *_cells(row, speedup=".2f", agreement=".5f", gflops=".0f"),
                _number(row["gflops"] and row["gflops"] / row["matmul_gflops"], ".0%"),
                _number(row["peak_mib"], ".0f"),
            ]
            for row in result["steps"]
        ],
        repeated=3,
        notes=[
            f"{ours} is {_number(result['geomean_speedup'], '.2f')} times faster than {baseline}: the geometric mean "
            "over the cases where both match the same."
        ],
        reading=f"CPU ms is the median of the repetitions; × {baseline} says how many times faster. Agreement is the "
        "cosine of the tool's gradient with the exact one: below 0.999 its time doesn't count. “Of matmul” compares "
        "GFLOP/s with those of a matrix product on the same core.",
    )


def _time_to_image(result: dict[str, Any]) -> Sheet:
    goals = list(result["tools"][0]["seconds"])
    return Sheet(
        title="Time to an image",
        about=f"CPU seconds until the mean PSNR of {result['images']} images reaches the goal ({result['data']}, "
        f"{result['model']}, the gradient of one image each)",
        left=["tool"],
        right=[*(f"{float(goal):g} dB" for goal in goals), "iterations", "s in all", "PSNR then"],
        rows=[
            [
                row["tool"],
                *(_number(row["seconds"][goal]) for goal in goals),
                *_cells(row, "iterations", cpu_seconds=".1f", psnr=".1f"),
            ]
            for row in result["tools"]
        ],
        notes=[
            f"fedaudit reaches {float(one['goal']):g} dB {'' if one['reached'] else 'at least '}{one['ratio']:.1f} "
            f"times sooner than {one['peer']}."
            for one in result["speedups"]
        ],
    )


def _simulator(result: dict[str, Any]) -> Sheet:
    evaluation = result["evaluation"]
    return Sheet(
        title="Simulator",
        about=f"{result['clients']} clients of FedAvg, {result['rounds']} rounds, {result['model']}",
        left=["tool"],
        right=["client updates", "seconds", "updates/s", "seconds to start"],
        rows=[
            _cells(row, "tool", "updates", seconds=".2f", updates_per_second=".1f", start_seconds=".1f")
            for row in result["simulators"]
        ],
        notes=[
            f"To evaluate {evaluation['findings']} findings of {evaluation['images']} images each takes "
            f"{evaluation['seconds']:.2f} s."
        ],
    )


def _training(result: dict[str, Any]) -> Sheet:
    return Sheet(
        title="Local training",
        about=f"{result['clients']} clients beside a bare PyTorch loop of the same steps, one thread; "
        f"on {result['device']}; native code: {result['native_code']}",
        left=["model"],
        right=[
            *("width", "pixels", "batch", "steps", "rounds", "bare: ms a step", "GFLOP/s", "of matrix rate"),
            *("simulator ×", "fast ×", "flower ×"),
        ],
        rows=[
            [
                *_cells(row, "model", width="d", pixels="d", batch="d", steps="d", rounds="d"),
                *_cells(row, bare_ms=".2f", gflops=".0f", share=".0%", simulator=".2f", fast=".2f", flower=".2f"),
            ]
            for row in result["rows"]
        ],
        reading="“×” is the bare loop's time by the simulator's (CPU time; on a GPU seconds that pass), above 1 where "
        "the simulator is faster; fast: with `arithmetic: fast`; flower: seconds that pass on Flower's simulation "
        "engine, from the second round on. The share is of the rate of a product of matrices of 1,024 × 1,024.",
    )


def _aggregators(result: dict[str, Any]) -> Sheet:
    return Sheet(
        title="Aggregators",
        about="each rule merges n updates of d elements and holds a tenth of them malicious, 1 thread, "
        f"torch {result['torch']}",
        left=["n", "d", "rule", "tool"],
        right=["CPU s", "× ours", "MiB beside the updates"],
        rows=[
            [
                *(str(row["n"]), f"{row['d']:,}", row["rule"], row["tool"]),
                row["why"] or _number(row["seconds"], ".2g"),
                *_cells(row, speedup=".1f", peak_mib=".0f"),
            ]
            for row in sorted(result["rows"], key=lambda row: (row["d"], row["n"]))
        ],
        repeated=2,
        reading="“× ours” says how many times our time the tool takes; the last column how much memory a rule needs "
        "beside the updates themselves.",
    )


def _local_model(result: dict[str, Any]) -> Sheet:
    return Sheet(
        title="Exact local model reconstruction",
        about="least squares, 5 full-batch steps, d + 1 rounds, one thread",
        left=[],
        right=["d", "rounds", "CPU s", "condition", "relative error"],
        rows=[
            _cells(row, "d", "rounds", cpu_seconds=".4f", condition=".1e", relative_error=".1e")
            for row in result["rows"]
        ],
        notes=[f"Between the two largest d the time grows as d to the power of {result['slope']:.2f}."],
        reading="d is the number of parameters; the condition is that of the linear system that the attack solves.",
    )


def _malicious(result: dict[str, Any]) -> Sheet:
    return Sheet(
        title="Malicious client",
        about=f"rounds in which one client generates images: {result['data']}, {result['examples']} examples a client",
        left=[],
        right=["clients", "processes", "rounds", "seconds a round"],
        rows=[_cells(row, "clients", "workers", "rounds", seconds_a_round=".2f") for row in result["rows"]],
        notes=[f"Worker processes make it {result['workers_speedup']:.2f} times faster."]
        if result["workers_speedup"]
        else [],
    )


def _recorder(result: dict[str, Any]) -> Sheet:
    long = result["long"]
    whole = "" if long["rounds"] == 100 else f" (100 rounds: {long['bytes_of_100_rounds'] / 1e9:.1f} GB)"
    seconds = long["seconds"] / long["rounds"]
    return Sheet(
        title="Recorder",
        about=f"rounds with and without in turn, {result['pairs']} pairs; batches of {result['batch']}",
        left=["model"],
        right=["parameters", "clients", "steps", "s without", "s with", "ratio", "CPU ratio"],
        rows=[
            [
                *_cells(row, "model", parameters=",", clients="d", steps="d"),
                *(_number(statistics.median(row[key]), ".2f") for key in ("without", "with")),
                _number(row["ratio"], ".3f") + _between(row["interval"]),
                _number(row["cpu_ratio"], ".3f"),
            ]
            for row in result["rows"]
        ],
        notes=[
            f"{long['rounds']} rounds of {long['clients']} clients of {long['model']} with {long['parameters']:,} "
            f"parameters: {long['bytes'] / 1e9:.1f} GB on disk{whole}, {seconds:.1f} s a round; "
            f"at most {_number(long['peak_mib'], '.0f')} MiB of memory beside the models "
            f"({_number(long['peak_mib_first_round'], '.0f')} in the first round)."
        ],
        reading="Seconds are medians; a ratio is the median over the pairs, of wall time (in brackets its 95 % "
        "interval, by the sign test) and of CPU time.",
    )


def _between(interval: tuple[float, float] | None) -> str:
    return "" if interval is None else f" [{interval[0]:.3f}, {interval[1]:.3f}]"


def _canaries(result: dict[str, Any]) -> Sheet:
    return Sheet(
        title="Canaries",
        about=f"rounds of FedAvg with {result['clients']} clients, {result['parameters']:,} parameters, one thread",
        left=["noise"],
        right=["canaries", "CPU s without", "CPU s with", "ratio", "ms a canary", "MiB"],
        rows=[
            [
                *_cells(row, "noise", canaries=",", without=".2f", **{"with": ".2f"}, ratio=".3f"),
                _number(1000 * row["seconds_a_canary"], ".2f"),
                _number(row["peak_mib"], ".0f"),
            ]
            for row in result["rows"]
        ],
        reading="Of a round that isn't the first, medians. Under local noise every canary's update has noise of its "
        "own, as a client's has. The memory is that of the whole simulation of five rounds with them.",
    )


def _guard(result: dict[str, Any]) -> Sheet:
    return Sheet(
        title="Guard",
        about=f"a site that trains {result['examples']} images of 32×32 in batches of {result['batch']}, or "
        f"{result['few']} of them in a single step; {result['rounds']} rounds, of which the guard may take "
        f"{100 * result['share']:g} % after the first",
        left=["model", "a round"],
        right=["s of training", "s of the guard, first", "ms later", "% later", "played"],
        rows=[
            [
                row["model"],
                f"{row['steps']} steps",
                _number(statistics.median(row["training"]), ".2f"),
                _number(row["watching"][0], ".2f"),
                _number(1000 * statistics.median(row["watching"][1:]), ".0f"),
                _number(100 * row["later"], ".1f"),
                " ".join(f"{name}: {many}" for name, many in row["played"].items()) or "–",
            ]
            for row in result["rows"]
        ],
        reading="Wall time. The first round plays everything and measures; training pays for that before anything is "
        "played again. Medians of a round, and the share of all later rounds together; in how many rounds each check "
        "was played.",
    )


_SHEETS = {
    "inversion": _inversion,
    "picture": _time_to_image,
    "simulator": _simulator,
    "training": _training,
    "aggregators": _aggregators,
    "local-model": _local_model,
    "malicious": _malicious,
    "recorder": _recorder,
    "canaries": _canaries,
    "guard": _guard,
}
