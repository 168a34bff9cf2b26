"""``fedaudit check-model``: is a received model manipulated? Heavy imports happen inside the command."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedaudit.cli.options import DataDir, Json, Seed, Settings, check_data_dir, print_json

ALARM = 1  # as where an audit's limit is exceeded


def check_model(
    received: Annotated[Path, typer.Argument(help="The weights that the server sent: .safetensors, .pt or .pth.")],
    scenario: Annotated[
        Path | None,
        typer.Option(help="YAML file that says which model and data were agreed on; default: the built-in scenario."),
    ] = None,
    settings: Settings = None,
    seed: Seed = None,
    data_dir: DataDir = None,
    client: Annotated[
        int | None,
        typer.Option(help="Also check on this client's examples, from 0; default: the weights alone."),
    ] = None,
    earlier: Annotated[
        list[Path] | None,
        typer.Option(help="The weights of a round before, again for each, in order: does this model go on from them?"),
    ] = None,
    json_output: Json = False,
) -> None:
    """Inspect a received model for manipulations before training on it; exit code 1 where a check raises an alarm."""
    check_data_dir(data_dir)
    from fedaudit.pipeline.received import check_file, values_of
    from fedaudit.scenario.scenario import load_scenario

    made = load_scenario(scenario, settings or [], seed)
    checks = check_file(received, made, data_dir=data_dir, client=client, earlier=earlier or [])
    if json_output:
        print_json([values_of(check) | {"alarm": check.alarm} for check in checks])
    else:
        for check in checks:
            print(f"{'ALARM' if check.alarm else 'ok':<6}{check.name}: {check.text}")
    if any(check.alarm for check in checks):
        raise typer.Exit(ALARM)
