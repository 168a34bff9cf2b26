"""The commands ``fedaudit bench …``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from fedaudit import BadInput
from fedaudit.cli import DataDir, Workers, check_folder, number_of_workers
from fedaudit.utils import unknown_name

bench = typer.Typer(no_args_is_help=True, help="Measure how fast fedaudit is on this machine.")


_QUICK = Annotated[bool, typer.Option("--quick", help="Take about a minute: fewer and smaller cases.")]
_OUT = Annotated[
    Path | None,
    typer.Option(help="Also write bench.html and bench.json to this folder.", show_default=False, metavar="FOLDER"),
]
_JSON = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@bench.command("inversion")
def bench_inversion(
    quick: _QUICK = False,
    out: _OUT = None,
    json_output: _JSON = False,
    versus: Annotated[str | None, typer.Option("--vs", help="Compare with breaching.", show_default=False)] = None,
) -> None:
    """Time an iteration of every gradient-inversion engine; count its memory and its arithmetic."""
    peers = _peers([versus] if versus else [], "breaching")
    if out:
        check_folder(out)
    from fedaudit.utils import live_display
    from fedaudit_lab.bench.inversion import time_inversion

    with live_display() as display:
        result = time_inversion(quick=quick, peer=bool(peers), display=display)
    _conclude({"inversion": result}, out, json_output=json_output)


@bench.command("picture")
def bench_picture(
    images: Annotated[int, typer.Option(min=1, max=100, help="Number of images.")] = 10,
    model: Annotated[str, typer.Option(help="Model to attack.")] = "convnet-small",
    data_dir: DataDir = None,
    cap: Annotated[float, typer.Option(min=1, help="Most CPU seconds per tool.")] = 600,
    out: _OUT = None,
    json_output: _JSON = False,
    versus: Annotated[str | None, typer.Option("--vs", help="Compare with breaching.", show_default=False)] = None,
) -> None:
    """Time to an image: seconds until the mean PSNR of several images reaches 20 and 25 dB."""
    peers = _peers([versus] if versus else [], "breaching")
    if out:
        check_folder(out)
    from fedaudit.utils import live_display
    from fedaudit_lab.bench.picture import time_to_picture

    with live_display() as display:
        result = time_to_picture(
            images=images, model=model, data_dir=data_dir, cap=cap, peer=bool(peers), display=display
        )
    _conclude({"picture": result}, out, json_output=json_output)


@bench.command("simulator")
def bench_simulator(
    quick: _QUICK = False,
    out: _OUT = None,
    json_output: _JSON = False,
    versus: Annotated[str | None, typer.Option("--vs", help="Compare with flower.", show_default=False)] = None,
) -> None:
    """Count client updates a second of the simulator, and evaluated findings a second of the evaluation."""
    peers = _peers([versus] if versus else [], "flower")
    if out:
        check_folder(out)
    from fedaudit.utils import live_display
    from fedaudit_lab.bench.simulator import time_simulator

    with live_display() as display:
        result = time_simulator(quick=quick, peer=bool(peers), display=display)
    _conclude({"simulator": result}, out, json_output=json_output)


@bench.command("training")
def bench_training(
    quick: _QUICK = False,
    out: _OUT = None,
    json_output: _JSON = False,
    versus: Annotated[str | None, typer.Option("--vs", help="Compare with flower.", show_default=False)] = None,
) -> None:
    """Time the simulator's local training beside a bare PyTorch loop of the same steps, in both arithmetics."""
    peers = _peers([versus] if versus else [], "flower")
    if out:
        check_folder(out)
    from fedaudit.utils import live_display
    from fedaudit_lab.bench.training import time_training

    with live_display() as display:
        result = time_training(quick=quick, peer=bool(peers), display=display)
    _conclude({"training": result}, out, json_output=json_output)


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
    peers = _peers(versus or [], "byzfl", "flower")
    if out:
        check_folder(out)
    from fedaudit.utils import live_display
    from fedaudit_lab.bench.aggregators import time_aggregators

    with live_display() as display:
        result = time_aggregators(quick=quick, peers=peers, cap=cap, largest=largest, display=display)
    _conclude({"aggregators": result}, out, json_output=json_output)


@bench.command("local-model")
def bench_local_model(quick: _QUICK = False, out: _OUT = None, json_output: _JSON = False) -> None:
    """Time the exact local model reconstruction up to 1,000 parameters, and see how exact it stays."""
    if out:
        check_folder(out)
    from fedaudit.utils import live_display
    from fedaudit_lab.bench.local_model import time_local_model

    with live_display() as display:
        result = time_local_model(quick=quick, display=display)
    _conclude({"local-model": result}, out, json_output=json_output)


@bench.command("malicious")
def bench_malicious(
    quick: _QUICK = False,
    data_dir: DataDir = None,
    workers: Workers = None,
    out: _OUT = None,
    json_output: _JSON = False,
) -> None:
    """Time a round in which a malicious client generates images, with 10 to 40 clients, and with worker processes."""
    if out:
        check_folder(out)
    from fedaudit.utils import live_display
    from fedaudit_lab.bench.malicious import time_malicious

    with live_display() as display:
        result = time_malicious(quick=quick, data_dir=data_dir, workers=number_of_workers(workers), display=display)
    _conclude({"malicious": result}, out, json_output=json_output)


@bench.command("recorder")
def bench_recorder(quick: _QUICK = False, out: _OUT = None, json_output: _JSON = False) -> None:
    """Time rounds with and without a recorder; count the bytes and memory of a long recording."""
    if out:
        check_folder(out)
    from fedaudit.utils import live_display
    from fedaudit_lab.bench.recorder import time_recorder

    with live_display() as display:
        result = time_recorder(quick=quick, display=display)
    _conclude({"recorder": result}, out, json_output=json_output)


@bench.command("canaries")
def bench_canaries(quick: _QUICK = False, out: _OUT = None, json_output: _JSON = False) -> None:
    """Time rounds with and without 1,000 canary clients of a million parameters; measure their memory."""
    if out:
        check_folder(out)
    from fedaudit.utils import live_display
    from fedaudit_lab.bench.canaries import time_canaries

    with live_display() as display:
        result = time_canaries(quick=quick, display=display)
    _conclude({"canaries": result}, out, json_output=json_output)


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
    peers = _peers(versus or [], "breaching", "flower", "byzfl")
    if out:
        check_folder(out)
    from fedaudit.utils import live_display
    from fedaudit_lab.bench.aggregators import time_aggregators
    from fedaudit_lab.bench.canaries import time_canaries
    from fedaudit_lab.bench.inversion import time_inversion
    from fedaudit_lab.bench.local_model import time_local_model
    from fedaudit_lab.bench.malicious import time_malicious
    from fedaudit_lab.bench.picture import time_to_picture
    from fedaudit_lab.bench.recorder import time_recorder
    from fedaudit_lab.bench.simulator import time_simulator
    from fedaudit_lab.bench.training import time_training

    breaching = "breaching" in peers
    with live_display() as display:
        results = {
            "inversion": time_inversion(quick=quick, peer=breaching, display=display),
            "picture": time_to_picture(images=2 if quick else 10, data_dir=data_dir, peer=breaching, display=display),
            "simulator": time_simulator(quick=quick, peer="flower" in peers, display=display),
            "training": time_training(quick=quick, peer="flower" in peers, display=display),
            "aggregators": time_aggregators(
                quick=quick, peers=[p for p in peers if p in ("byzfl", "flower")], display=display
            ),
            "local-model": time_local_model(quick=quick, display=display),
            "malicious": time_malicious(
                quick=quick, data_dir=data_dir, workers=number_of_workers(None), display=display
            ),
            "recorder": time_recorder(quick=quick, display=display),
            "canaries": time_canaries(quick=quick, display=display),
        }
    _conclude(results, out, json_output=False)


def _conclude(results: dict[str, dict[str, Any]], out: Path | None, *, json_output: bool) -> None:
    from fedaudit_lab.bench.page import save, show

    show(results, json_output=json_output)
    if out:
        print(f"page: {save(results, out)}", file=sys.stderr if json_output else sys.stdout)


def _peers(names: list[str], *known: str) -> list[str]:
    for name in names:
        if name not in known:
            raise BadInput(f"--vs: {unknown_name('peer', name, list(known))}")
    return names
