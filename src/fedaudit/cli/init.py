"""``fedaudit init``: asks, or takes flags, and writes a commented scenario that runs. Heavy imports happen inside."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedaudit.cli.options import DataDir, check_data_dir
from fedaudit.cli.starter import (
    ADVERSARIES,
    ALGORITHMS,
    MOST_CLIENTS,
    Choice,
    complete,
    models_for,
    scenario_text,
    usual_model,
)
from fedaudit.utils.errors import OWN_MODEL, BadInput, unknown_name
from fedaudit.utils.progress import tell

if TYPE_CHECKING:
    from fedaudit.data import Dataset

TABLE_FILE = "table-file"
_DATA_OF_FILES = "any other data set needs --data-dir: fedaudit list datasets"


def init(
    file: Annotated[
        Path,
        typer.Argument(
            metavar="[FILE]",
            help="File to write; one that exists is never overwritten. Or your table, patients.csv: an audit of it is "
            "written to scenario.yaml.",
        ),
    ] = Path("scenario.yaml"),
    data: Annotated[
        str | None,
        typer.Option(
            help="Data set; those that don't come with fedaudit need --data-dir. Left out: what lies in --data-dir, "
            "be it images, scans, volumes or signals, by class, with a labels.csv or with masks; else photos."
        ),
    ] = None,
    data_dir: DataDir = None,
    model: Annotated[str | None, typer.Option(help="Model that clients train; see fedaudit list models.")] = None,
    algorithm: Annotated[str | None, typer.Option(help="How clients train: fedsgd, fedavg or fedprox.")] = None,
    clients: Annotated[int | None, typer.Option(min=1, max=MOST_CLIENTS, help="Number of clients.")] = None,
    adversary: Annotated[str | None, typer.Option(help=f"Who attacks: {', '.join(ADVERSARIES)}.")] = None,
    from_flower: Annotated[
        Path | None,
        typer.Option(
            "--from-flower", metavar="APP", help="Read the settings from a Flower app's files; the app isn't run."
        ),
    ] = None,
    target: Annotated[str | None, typer.Option(help="Of your table, the column that models predict.")] = None,
    client: Annotated[
        str | None, typer.Option(help="Of your table, the column that says whose a row is: each value is a client.")
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", help="Of your table, a setting: data.drop=[id], data.missing=[-999], data.empty=median."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Of your table, the file to write instead of scenario.yaml.")
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Ask nothing; use defaults where no flag is given.")] = False,
) -> None:
    """Write a commented scenario that runs within minutes; asks for what no flag gives."""
    table: dict[str, Any] = {}
    if _is_table(file):
        if not file.is_file():
            raise BadInput(f"can't read '{file}': there is no such file; the scenario that init writes ends in .yaml")
        if data is not None or data_dir is not None or from_flower is not None:
            raise BadInput(f"'{file}' is a table, which is audited; leave --data, --data-dir and --from-flower out")
        table = _table(file, target, client, overrides or [], ask=not yes and _on_terminal())
        data, file = TABLE_FILE, out or Path("scenario.yaml")
    elif target is not None or client is not None or overrides or out is not None:
        raise BadInput(
            "--target, --client, --set and --out are of a table: fedaudit init patients.csv --target outcome"
        )
    _check_file(file)
    check_data_dir(data_dir)
    own = _own(data, data_dir)
    choice = Choice(
        table=table,
        data=data or own or Choice.data,
        model=model,
        algorithm=algorithm,
        clients=clients,
        adversary=adversary or next(iter(ADVERSARIES)),
    )
    given: dict[str, Any] = {
        **{"data": data, "model": model, "algorithm": algorithm, "clients": clients, "adversary": adversary},
        **({"clients": 0} if "client" in table else {}),  # the table says it
    }
    if from_flower is not None:
        from fedaudit.cli.starter_flower import of_app

        choice, known = of_app(from_flower, choice)
        given |= known
    if model is not None and ":" in model:
        raise BadInput(
            f"--model {model}: a scenario names models that fedaudit knows, or those of plug-ins; {OWN_MODEL}"
        )
    left = [name for name, value in given.items() if value is None]
    if left and not yes and _on_terminal():
        choice, dataset = _ask(choice, left, data_dir, (own,) if own else ())
    else:
        dataset = _load(choice, data_dir)
    choice = complete(choice, dataset)
    if left and not yes and not _on_terminal():
        told = ", ".join(f"--{name} {getattr(choice, name)}" for name in left)
        tell(f"no terminal to ask on: took {told}")
    text = scenario_text(choice, dataset)
    _check(text, data_dir)
    _write(file, text)
    who = ADVERSARIES[choice.adversary].split(",")[0]
    count = f"{choice.clients} client{'' if choice.clients == 1 else 's'}"
    print(f"wrote {file}: {choice.data}, {choice.model}, {choice.algorithm}, {count}, {who}")
    words = ["fedaudit", "audit", str(file), "--out", f"{file.stem}-audit"]
    words += [] if data_dir is None else ["--data-dir", str(data_dir)]
    print(f"next: {shlex.join(words)}")


def _check_file(file: Path) -> None:
    if file.exists() or file.is_symlink():
        raise BadInput(f"'{file}' exists, and init overwrites nothing; name another file")
    if not file.parent.is_dir():
        raise BadInput(f"the folder '{file.parent}' of '{file}' doesn't exist; make it, or name another file")


def _write(file: Path, text: str) -> None:
    try:
        with file.open("x", encoding="utf-8") as written:
            written.write(text)
    except FileExistsError:
        _check_file(file)
    except OSError as error:
        raise BadInput(f"can't write '{file}': {error.strerror or error}") from None


def _on_terminal() -> bool:
    return sys.stdin is not None and sys.stdin.isatty() and sys.stderr is not None and sys.stderr.isatty()


def _load(choice: Choice, data_dir: Path | None) -> Dataset:
    if choice.table:
        from fedaudit.pipeline.parts.data import of_file
        from fedaudit.scenario.scenario import DataSpec

        return of_file(DataSpec(name=TABLE_FILE, **choice.table))
    from fedaudit.data import DATASETS, load_dataset

    DATASETS[choice.data]
    return load_dataset(choice.data, data_dir=data_dir)


def _is_table(file: Path) -> bool:
    from fedaudit.data.table_file import is_table

    return is_table(file)


def _table(
    file: Path, target: str | None, client: str | None, overrides: Sequence[str], *, ask: bool
) -> dict[str, Any]:
    """Return the settings of a table in a file; asks for the columns that matter, where it may."""
    from fedaudit.data.table_file import read_columns
    from fedaudit.scenario.yaml import apply_override

    values: dict[str, Any] = {"data": {"path": str(file)}}
    for override in overrides:
        if not override.startswith("data."):
            raise BadInput(f"--set {override}: of a table only its own settings are taken here, as data.drop=[id]")
        values = apply_override(values, override)
    table: dict[str, Any] = values["data"]
    table |= {key: name for key, name in (("target", target), ("client", client)) if name is not None}
    if "target" not in table or ("client" not in table and ask):
        names = list(map(str, read_columns(file, table.get("separator"), table.get("encoding"))))
        if not ask:
            raise BadInput(f"say which column models predict: --target NAME, one of {', '.join(names)[:300]}")
        if "target" not in table:
            table["target"] = _one_of("Column that models predict", names, names[-1], "")
        if "client" not in table:
            lines = "the column that says whose a row is, as a hospital's name; none: rows are shared out at random"
            chosen = _one_of("Column of the clients", ["none", *names], "none", lines)
            table |= {} if chosen == "none" else {"client": chosen}
    return table


def _own(data: str | None, data_dir: Path | None) -> str | None:
    """Return the data set that the user's own folder is, unless another is named; None where there is none."""
    if data is not None or data_dir is None:
        return None
    from fedaudit.data import folder_data

    return folder_data(data_dir)


def _ask(choice: Choice, left: Sequence[str], data_dir: Path | None, own: tuple[str, ...]) -> tuple[Choice, Dataset]:
    """Ask for what is left open, in an order in which each answer decides what may follow."""
    if "data" in left:
        from fedaudit.data import DATASETS

        offered = (*own, *(entry.name for entry in DATASETS if entry.info["embedded"]))
        free = data_dir is not None
        choice = replace(choice, data=_one_of("Data", offered, choice.data, _DATA_OF_FILES, free=free))
    dataset = _load(choice, data_dir)
    if "adversary" in left:
        lines = "\n".join(f"  {name}: {meaning}" for name, meaning in ADVERSARIES.items())
        choice = replace(choice, adversary=_one_of("Adversary", tuple(ADVERSARIES), choice.adversary, lines))
    if "model" in left:
        offered = models_for(dataset)
        usual = usual_model(choice.adversary, dataset) if choice.adversary in ADVERSARIES else offered[0]
        choice = replace(choice, model=_one_of("Model", offered, usual, "any other: fedaudit list models", free=True))
    suggested = complete(choice, dataset)
    if "algorithm" in left:
        words = "fedsgd sends gradients, fedavg and fedprox send weights"
        choice = replace(choice, algorithm=_one_of("Algorithm", ALGORITHMS, suggested.algorithm or "", words))
    if "clients" in left:
        choice = replace(choice, clients=_number("Clients", suggested.clients or 1))
    return choice, dataset


def _one_of(title: str, offered: Sequence[str], usual: str, words: str, *, free: bool = False) -> str:
    """Ask until one of what is offered is named, by its name or its number."""
    tell("\n".join([f"{title}: {', '.join(f'{i} {name}' for i, name in enumerate(offered, 1))}", words]))
    while True:
        answer = str(typer.prompt(title, default=usual, err=True)).strip()
        if answer.isdigit() and 1 <= int(answer) <= len(offered):
            return offered[int(answer) - 1]
        if answer in offered or free:
            return answer
        tell(unknown_name(title.lower(), answer, list(offered)))


def _number(title: str, usual: int) -> int:
    while True:
        answer = str(typer.prompt(title, default=str(usual), err=True)).strip()
        if answer.isdigit() and 1 <= int(answer) <= MOST_CLIENTS:
            return int(answer)
        tell(f"give a number from 1 to {MOST_CLIENTS}")


def _check(text: str, data_dir: Path | None) -> None:
    """Raise BadInput where the choice doesn't fit together: all of its parts are made, as before an audit."""
    from fedaudit.pipeline.prepare import resolve
    from fedaudit.scenario.scenario import scenario_from
    from fedaudit.utils import plain_yaml

    resolve(scenario_from(plain_yaml.loads(text, "the scenario"), where="the scenario"), data_dir=data_dir)
