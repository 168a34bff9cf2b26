"""The commands ``fedaudit bench …``."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from fedaudit import BadInput
from fedaudit.cli import DataDir, Workers, check_folder, number_of_workers
from fedaudit.utils import unknown_name

bench = typer.Typer(no_args_is_help=True, help="Measure how fast fedaudit is on this machine.")

# What each benchmark can be compared with.
_PEERS = {
    "inversion": ["breaching"],
    "picture": ["breaching"],
    "simulator": ["flower"],
    "training": ["flower"],
    "aggregators": ["byzfl", "flower"],
}

_QUICK = Annotated[bool, typer.Option("--quick", help="Take about a minute: fewer and smaller cases.")]
_OUT = Annotated[
    Path | None,
    typer.Option(help="Also write bench.html and bench.json to this folder.", show_default=False, metavar="FOLDER"),
]
_JSON = Annotated[bool, typer.Option("--json", help="Print JSON.")]
_BREACHING = Annotated[str | None, typer.Option("--vs", help="Compare with breaching.", show_default=False)]
_FLOWER = Annotated[str | None, typer.Option("--vs", help="Compare with flower.", show_default=False)]


@bench.command("inversion")
def bench_inversion(
    quick: _QUICK = False, out: _OUT = None, json_output: _JSON = False, versus: _BREACHING = None
) -> None:
    """Time an iteration of every gradient-inversion engine; count its memory and its arithmetic."""
    _run({"inversion": {"quick": quick}}, out, [versus], json_output=json_output)


@bench.command("picture")
def bench_picture(
    images: Annotated[int, typer.Option(min=1, max=100, help="Number of images.")] = 10,
    model: Annotated[str, typer.Option(help="Model to attack.")] = "convnet-small",
    data_dir: DataDir = None,
    cap: Annotated[float, typer.Option(min=1, help="Most CPU seconds per tool.")] = 600,
    out: _OUT = None,
    json_output: _JSON = False,
    versus: _BREACHING = None,
) -> None:
    """Time to an image: seconds until the mean PSNR of several images reaches 20 and 25 dB."""
    options = {"images": images, "model": model, "data_dir": data_dir, "cap": cap}
    _run({"picture": options}, out, [versus], json_output=json_output)


@bench.command("simulator")
def bench_simulator(
    quick: _QUICK = False, out: _OUT = None, json_output: _JSON = False, versus: _FLOWER = None
) -> None:
    """Count client updates a second of the simulator, and evaluated findings a second of the evaluation."""
    _run({"simulator": {"quick": quick}}, out, [versus], json_output=json_output)


@bench.command("training")
def bench_training(
    quick: _QUICK = False,
    device: Annotated[str, typer.Option(help="Train on cpu or cuda.")] = "cpu",
    out: _OUT = None,
    json_output: _JSON = False,
    versus: _FLOWER = None,
) -> None:
    """Time the simulator's local training beside a bare PyTorch loop of the same steps, in both arithmetics."""
    _run({"training": {"quick": quick, "device": device}}, out, [versus], json_output=json_output)


@bench.command("aggregators")
def bench_aggregators(
    quick: _QUICK = False,
    out: _OUT = None,
    json_output: _JSON = False,
    cap: Annotated[float, typer.Option(min=1, help="Most seconds for one rule on one matrix.")] = 120,
    largest: Annotated[int, typer.Option(min=10**5, help="Most parameters of a matrix's rows.")] = 10**7,
    versus: Annotated[
        list[str] | None, typer.Option("--vs", help="Compare with byzfl or flower; repeatable.", show_default=False)
    ] = None,
) -> None:
    """Time every aggregator on matrices of 10 to 100 updates of up to ten million parameters; measure its memory."""
    options = {"quick": quick, "cap": cap, "largest": largest}
    _run({"aggregators": options}, out, versus or [], json_output=json_output)


@bench.command("local-model")
def bench_local_model(quick: _QUICK = False, out: _OUT = None, json_output: _JSON = False) -> None:
    """Time the exact local model reconstruction up to 1,000 parameters, and see how exact it stays."""
    _run({"local-model": {"quick": quick}}, out, json_output=json_output)


@bench.command("malicious")
def bench_malicious(
    quick: _QUICK = False,
    data_dir: DataDir = None,
    workers: Workers = None,
    out: _OUT = None,
    json_output: _JSON = False,
) -> None:
    """Time a round in which a malicious client generates images, with 10 to 40 clients, and with worker processes."""
    options = {"quick": quick, "data_dir": data_dir, "workers": number_of_workers(workers)}
    _run({"malicious": options}, out, json_output=json_output)


@bench.command("recorder")
def bench_recorder(quick: _QUICK = False, out: _OUT = None, json_output: _JSON = False) -> None:
    """Time rounds with and without a recorder; count the bytes and memory of a long recording."""
    _run({"recorder": {"quick": quick}}, out, json_output=json_output)


@bench.command("canaries")
def bench_canaries(quick: _QUICK = False, out: _OUT = None, json_output: _JSON = False) -> None:
    """Time rounds with and without 1,000 canary clients of a million parameters; measure their memory."""
    _run({"canaries": {"quick": quick}}, out, json_output=json_output)


@bench.command("guard")
def bench_guard(quick: _QUICK = False, out: _OUT = None, json_output: _JSON = False) -> None:
    """Time what a site's guard takes of the time that the site trains."""
    _run({"guard": {"quick": quick}}, out, json_output=json_output)


@bench.command("all")
def bench_all(
    out: Annotated[Path, typer.Option(help="Folder for bench.html and bench.json.")] = Path("bench"),
    quick: _QUICK = False,
    data_dir: DataDir = None,
    versus: Annotated[
        list[str] | None,
        typer.Option("--vs", help="Compare with breaching, flower or byzfl; repeatable.", show_default=False),
    ] = None,
) -> None:
    """Run all benchmarks and write one page."""
    benchmarks: dict[str, dict[str, Any]] = {
        "inversion": {"quick": quick},
        "picture": {"images": 2 if quick else 10, "data_dir": data_dir},
        "simulator": {"quick": quick},
        "training": {"quick": quick},
        "aggregators": {"quick": quick},
        "local-model": {"quick": quick},
        "malicious": {"quick": quick, "data_dir": data_dir, "workers": number_of_workers(None)},
        "recorder": {"quick": quick},
        "canaries": {"quick": quick},
        "guard": {"quick": quick},
    }
    _run(benchmarks, out, versus or [])


def _run(
    benchmarks: dict[str, dict[str, Any]],
    out: Path | None,
    versus: Sequence[str | None] = (),
    *,
    json_output: bool = False,
) -> None:
    """Run benchmarks, each with options of its own and those of the peers that it knows, and show what they measure."""
    known = list(dict.fromkeys(peer for name in benchmarks for peer in _PEERS.get(name, [])))
    peers = [peer for peer in versus if peer is not None]
    for peer in peers:
        if peer not in known:
            raise BadInput(f"--vs: {unknown_name('peer', peer, known)}")
    if out:
        check_folder(out)
    from fedaudit.utils import live_display
    from fedaudit_lab.bench.page import save, show

    results: dict[str, dict[str, Any]] = {}
    with live_display() as display:
        for name, options in benchmarks.items():
            if name in _PEERS:
                options["peers"] = [peer for peer in peers if peer in _PEERS[name]]
            module = importlib.import_module(f"fedaudit_lab.bench.{name.replace('-', '_')}")
            results[name] = module.measure(**options, display=display)
    show(results, json_output=json_output)
    if out:
        print(f"page: {save(results, out)}", file=sys.stderr if json_output else sys.stdout)
