"""The command ``fedaudit rank``."""

from __future__ import annotations

from typing import Annotated

import typer

from fedaudit.cli import DataDir, Json, Seed, Settings, check_data_dir, print_json


def rank(
    scenario: Annotated[
        str | None, typer.Argument(help="YAML file, or the name of a model; default: the built-in scenario.")
    ] = None,
    settings: Settings = None,
    seed: Seed = None,
    data_dir: DataDir = None,
    json_output: Json = False,
) -> None:
    """Predict without an attack whether a network's gradient reveals its input: unknowns and equations by layer."""
    check_data_dir(data_dir)
    from fedaudit_catalogue.rank import for_programs, load, rank_of, show

    analysis = rank_of(load(scenario, settings or [], seed), data_dir=data_dir)
    if json_output:
        print_json(for_programs(analysis))
    else:
        show(analysis)
