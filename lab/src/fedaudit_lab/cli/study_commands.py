"""What the commands ``fedaudit study …`` show: a study, and what came of it."""

from __future__ import annotations

from pathlib import Path

from rich.markup import escape
from rich.table import Table

from fedaudit import BadInput
from fedaudit.utils import wide_console
from fedaudit_lab.cli.study_log import open_study, say_note
from fedaudit_lab.studies.analysis import Analysis, analyse
from fedaudit_lab.studies.drawing import cell_text, claim_text, grid, write
from fedaudit_lab.studies.pictures import write_pictures
from fedaudit_lab.studies.spec import StudySpec, check_metric, expand, load_study, study_from
from fedaudit_lab.studies.store import Store


def describe(name: str) -> None:
    """Print what a study is."""
    study = load_study(name)
    console = wide_console()
    console.print(
        f"[bold]{escape(study.name)}[/]: {escape(study.title)}\n{escape(study.paper)}; metric: {escape(study.metric)}"
    )
    table = Table.grid(padding=(0, 2))
    for axis, levels in study.axes.items():
        table.add_row(f"axis {escape(axis)}", escape(", ".join(levels)))
    for scale, setting in study.scales.items():
        trials = len(expand(study, scale))
        table.add_row(f"scale {scale}", f"{trials} trials, {setting.repetitions} repetitions: {escape(setting.states)}")
    for claim in study.claims:
        table.add_row("claim", escape(claim.text))
    console.print(table)


def report(folder: Path, metric: str | None = None) -> None:
    """Draw what ``folder`` holds, complete or not; ``metric`` replaces the study's own, and ends the files' names."""
    store = open_study(folder)
    try:
        about = store.about()
        study = study_from(about["study"], f"the study in '{folder}'")
        if metric is not None and metric != study.metric:
            try:
                check_metric(metric)
            except ValueError as error:
                raise BadInput(f"--metric: {error}") from None
            study = study.model_copy(update={"metric": metric, "published": [], "claims": []})
            conclude(study, about["scale"], store, f"-{metric}")
        else:
            conclude(study, about["scale"], store)
    finally:
        store.close()


def conclude(study: StudySpec, scale: str, store: Store, suffix: str = "") -> None:
    """Draw and print what the store holds of a study; a ``suffix`` follows the files' names."""
    analysis = analyse(study, scale, store.rows(), store.about().get("overrides", []))
    pictures = write_pictures(study, store.rows(), store.folder)
    paths = write(analysis, store.folder, suffix, pictures.read_bytes() if pictures else None)
    say_note(store)
    _print(analysis)
    if pictures:
        print(f"pictures: {pictures}")
    print(f"result: {next(path for path in paths if path.suffix == '.html')}")


def _print(analysis: Analysis) -> None:
    console = wide_console()
    study = analysis.study
    down, across, rows = grid(analysis)
    title = escape(f"{study.name}, {analysis.scale}: {study.metric}")
    table = Table(title=title, title_style="bold", title_justify="left")
    for head in [*down, *across]:
        table.add_column(escape(head))
    for left, cells in rows:
        texts = ["\n".join([main, *small]) for main, small in (cell_text(study.metric, cell) for cell in cells)]
        table.add_row(*map(escape, [*left, *texts]))
    console.print(table)
    for claim in analysis.claims:
        where = f" ({claim.where})" if claim.where else ""
        console.print(
            f"{escape(claim.text + where)}: [bold]{claim.outcome}[/], {escape(claim_text(claim))}", highlight=False
        )
    if analysis.old:
        console.print(escape(analysis.mixture), highlight=False)
    for name, why in analysis.failures:
        console.print(f"[red]failed[/] {escape(name)}: {escape(why)}", highlight=False)
