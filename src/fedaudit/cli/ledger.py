"""``fedaudit ledger``: what a deployment's messages cost in privacy. Heavy imports happen inside the command."""

from __future__ import annotations

from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedaudit.cli import options
from fedaudit.utils.errors import BadInput

if TYPE_CHECKING:
    from fedaudit.pipeline.ledger import Question
    from fedaudit.results.ledger import Ledger


_OPACUS = (
    "the app uses Opacus, whose noise isn't a setting that can be read: run fedaudit audit --flower APP --out OUT, "
    "then fedaudit ledger OUT/recording"
)


class Neighbours(StrEnum):
    """What neighbouring federations differ by."""

    another = "replace"
    nothing = "add-remove"


def ledger(
    source: Annotated[
        Path,
        typer.Argument(
            help="A scenario's YAML file, a recording's folder, an NVFlare job's folder or a site's privacy.json, "
            "or a Flower app's folder."
        ),
    ],
    settings: options.Settings = None,
    data_dir: options.DataDir = None,
    target: Annotated[float | None, typer.Option(min=0, help="An ε: what would stay below it?")] = None,
    rounds: Annotated[
        int | None, typer.Option(min=1, max=10**6, help="Rounds in which every client sends; default: as planned.")
    ] = None,
    delta: Annotated[float | None, typer.Option(help="δ; default: the settings', or 1e-5.")] = None,
    adjacency: Annotated[
        Neighbours | None,
        typer.Option(
            help="What neighbours differ by; default: replace, and add-remove where the server adds noise or clients "
            "train by DP-SGD."
        ),
    ] = None,
    parameters: Annotated[
        int | None, typer.Option(min=1, help="Numbers in the model's state, where a filter's ε depends on it.")
    ] = None,
    candidates: Annotated[
        int | None,
        typer.Option(min=2, max=10**9, help="Of so many, how often can the right one be picked? Default: 100."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(parser=options.folder, metavar="FOLDER", help="Folder for ledger.html, ledger.json.")
    ] = None,
    json_output: options.Json = False,
) -> None:
    """Add up the ε of every client over rounds; exit 1 if it is above the target, 3 if nothing bounds it."""
    if delta is not None and not 0 < delta < 1:
        raise BadInput(f"--delta {delta:g}: δ lies between 0 and 1")
    options.check_data_dir(data_dir)
    from fedaudit.pipeline.ledger import Question

    question = Question(target, rounds, delta, adjacency.value if adjacency else None, candidates)
    found = _ledgers(source, settings, data_dir, parameters, question)
    if out is not None:
        from fedaudit.report.ledger import write_ledger

        write_ledger(found, out)
    if json_output:
        options.print_json([one.for_programs() for one in found])
    else:
        _show(found)
    spent = [one.epsilon for one in found]
    if target is not None and any(epsilon is not None and epsilon > target for epsilon in spent):
        raise typer.Exit(options.EXCEEDED)
    if target is not None and None in spent:
        raise typer.Exit(options.NOT_TESTED)


def _ledgers(
    source: Path, settings: list[str] | None, data_dir: Path | None, parameters: int | None, question: Question
) -> list[Ledger]:
    """Return the ledgers of what ``source`` is."""
    from fedaudit.adapters.nvflare.job import is_job, read_job
    from fedaudit.pipeline import ledger as pipeline

    if not source.exists():
        raise BadInput(f"'{source}' doesn't exist; give a scenario, a recording, an NVFlare job or a Flower app")
    if source.is_file() and source.suffix in {".yaml", ".yml"}:
        from fedaudit.pipeline.prepare import resolve
        from fedaudit.scenario.scenario import load_scenario

        resolved = resolve(load_scenario(source, settings), data_dir=data_dir)
        return [pipeline.of_federation(federation, question) for federation in resolved.federations]
    if settings:
        raise BadInput("--set changes a scenario; what else there is a ledger of has its own settings")
    if is_job(source):
        job = read_job(source)
        planned = question.rounds or job.rounds
        if planned is None:
            raise BadInput(f"'{source}' doesn't say how many rounds there are; give --rounds")
        return pipeline.of_filters(job.name, job.sites, planned, parameters, question, job.whole)
    if (source / "pyproject.toml").is_file():
        from fedaudit.adapters.flower.app_file import NODES
        from fedaudit.adapters.flower.in_process import loaded, mods_of
        from fedaudit.adapters.flower.privacy import strategies_of

        with loaded(source) as app:
            name, mods, planned = mods_of(app)
            noise, nodes = pipeline.server_noise(strategies_of(app)), app.nodes or NODES
        planned = question.rounds or planned
        if planned is None:
            raise BadInput("the app's config has no num-server-rounds; give --rounds")
        found = pipeline.of_filters(name, mods, planned, parameters, question)
        if noise is not None and noise[1]:
            everybody = dict.fromkeys(map(str, range(nodes)))
            at_server = pipeline.of_server(
                name, noise[0], everybody, noise[0].num_sampled_clients or nodes, planned, question
            )
            promises = any(one.epsilon is not None for one in found)
            found = [*(found if promises else []), at_server]
        private = any(b"opacus" in path.read_bytes() for path in source.rglob("*.py"))
        return [replace(one, notes=(*one.notes, _OPACUS)) for one in found] if private else found
    return [pipeline.of_recording(source, question)]


def _show(found: list[Ledger]) -> None:
    from rich.markup import escape
    from rich.table import Table

    from fedaudit.report.ledger import answers, conditions, rows
    from fedaudit.utils.progress import wide_console

    console = wide_console()
    for one in found:
        console.print(f"[bold]{escape(one.federation)}[/]: {escape(one.mechanism)}", highlight=False)
        console.print(f"  {escape(conditions(one))}", highlight=False)
        table = Table(box=None, padding=(0, 2, 0, 0))
        table.add_column("client", no_wrap=True)
        for name in ("rounds", "ε"):
            table.add_column(name, justify="right", no_wrap=True)
        table.add_column("")
        for client, rounds, epsilon, why in rows(one):
            table.add_row(escape(client), str(rounds), epsilon, escape(why))
        console.print(table, highlight=False)
        for line in answers(one):
            console.print(f"  {escape(line)}", highlight=False)
        console.print()
