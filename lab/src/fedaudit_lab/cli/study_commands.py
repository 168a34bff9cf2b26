"""What the commands ``fedaudit study …`` do: describe, run, report."""

from __future__ import annotations

from pathlib import Path

from rich.markup import escape
from rich.table import Table

from fedaudit import BadInput
from fedaudit.utils import live_display, wide_console
from fedaudit_lab.cli.study_log import open_study, say_note
from fedaudit_lab.studies.analysis import Analysis, analyse
from fedaudit_lab.studies.backends import processes, ray
from fedaudit_lab.studies.drawing import cell_text, difference_text, grid, write
from fedaudit_lab.studies.pictures import write_pictures
from fedaudit_lab.studies.running import check_versions, run_study
from fedaudit_lab.studies.spec import ScaleName, StudySpec, check_metric, expand, load_study, study_from
from fedaudit_lab.studies.store import Store


def describe(name: str) -> None:
    """Print what a study is.

    Raises:
        BadInput: there is no such study.
    """
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


def run(
    name: str,
    out: Path,
    *,
    scale: str,
    overrides: list[str],
    only: list[str],
    workers: int,
    data_dir: Path | None,
    again: bool = False,
    keep_old: bool = False,
    ray_address: str | None = None,
    ray_resources: tuple[float, float] = (1, 0),
) -> int:
    """Run a study, write its result, print its table, and return how many trials failed.

    Raises:
        BadInput: the study, the folder, the data or the cluster can't be used.
    """
    study = load_study(name)
    if scale not in study.scales:
        expand(study, scale)  # type: ignore[arg-type]  # raises, with what there is
    chosen: ScaleName = scale  # type: ignore[assignment]
    trials = expand(study, chosen, overrides=overrides, only=only)
    store = Store(out)
    try:
        with store.exclusively():
            about = {"name": study.name, "scale": scale, "study": study.model_dump(mode="json"), "overrides": overrides}
            store.plan(about, trials, replace=again)
            check_versions(trials, store, data_dir=data_dir, again=again, keep_old=keep_old)
            backend = (
                processes(workers)
                if ray_address is None
                else ray(ray_address, cpus=ray_resources[0], gpus=ray_resources[1])
            )
            with live_display() as display:
                here = ray_address is None
                failed = run_study(study, trials, store, backend=backend, data_dir=data_dir, display=display, here=here)
        _conclude(study, scale, store)
    finally:
        store.close()
    return failed


def report(folder: Path, metric: str | None = None) -> None:
    """Draw what ``folder`` holds, complete or not.

    Args:
        folder: of the study.
        metric: instead of the study's own; the files' names then end in it.

    Raises:
        BadInput: it holds no study; studies can't be about that metric.
    """
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
            _conclude(study, about["scale"], store, f"-{metric}")
        else:
            _conclude(study, about["scale"], store)
    finally:
        store.close()


def _conclude(study: StudySpec, scale: str, store: Store, suffix: str = "") -> None:
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
        difference = difference_text(claim.metric, claim.difference)
        console.print(f"{escape(claim.text + where)}: [bold]{claim.outcome}[/], {escape(difference)}", highlight=False)
    if analysis.old:
        console.print(escape(analysis.mixture), highlight=False)
    for name, why in analysis.failures:
        console.print(f"[red]failed[/] {escape(name)}: {escape(why)}", highlight=False)
