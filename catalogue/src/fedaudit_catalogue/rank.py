"""Whether a network can be inverted, before any attack: the rank analysis of a scenario's model."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from rich.table import Table
from torch import nn

from fedaudit.attacks import as_trained
from fedaudit.data import Dataset
from fedaudit.models import MODELS
from fedaudit.pipeline import resolve
from fedaudit.scenario import Scenario, load_scenario
from fedaudit.task import Loss
from fedaudit.utils import NotApplicable, generator, one_thread, wide_console
from fedaudit_catalogue.attacks.constraints import VERDICTS, RankAnalysis, rank_analysis


def load(scenario: str | None, overrides: list[str], seed: int | None) -> Scenario:
    """Return the scenario that is meant: a YAML file's, or the default one with the model of that name."""
    if scenario is not None and scenario in MODELS and not Path(scenario).exists():
        return load_scenario(None, [f"model.name={scenario}", "model.width=null", *overrides], seed)
    return load_scenario(Path(scenario) if scenario else None, overrides, seed)


@one_thread()
def rank_of(
    scenario: Scenario,
    *,
    data_dir: Path | None = None,
    dataset: Dataset | None = None,
    model: nn.Module | None = None,
    loss: Loss | None = None,
) -> RankAnalysis:
    """Return the rank analysis of the model of ``scenario``, in the state in which round 0 begins.

    It uses the scenario's model and seed, and its data's shape and classes, but no attacks.
    NotApplicable: the model is no chain of affine layers and invertible activations; the message says why.
    """
    resolved = resolve(scenario, data_dir=data_dir, dataset=dataset, model=model, loss=loss)
    federation = resolved.federations[0]
    task_info = federation.task_info
    if task_info.num_classes is None:
        raise NotApplicable("the rank analysis needs a classifier; this model predicts real values")
    module = as_trained(federation.model, task_info, federation.model.state_dict())
    start = generator(scenario.seed, "rank")
    return rank_analysis(module, task_info.input_shape, federation.loss, task_info.num_classes, generator=start)


def for_programs(analysis: RankAnalysis) -> dict[str, Any]:
    """Return the analysis, JSON-serialisable."""
    layers = [dataclasses.asdict(layer) | {"verdict": layer.verdict} for layer in analysis.layers]
    return {"verdict": analysis.verdict, "index": analysis.index, "layers": layers}


def show(analysis: RankAnalysis) -> None:
    """Print the table and the verdict."""
    table = Table()
    table.add_column("layer", overflow="fold")
    for title in ("unknowns", "weight constraints", "rank", "gradient constraints", "rank", "together", "missing"):
        table.add_column(title, justify="right")
    table.add_column("virtual", justify="right")
    table.add_column("verdict")
    for one in analysis.layers:
        counts = (one.unknowns, one.weight_constraints, one.weight_rank, one.gradient_constraints, one.gradient_rank)
        cells = [f"{n:,}" for n in (*counts, one.rank, one.missing, one.virtual)]
        table.add_row(one.layer, *cells, one.verdict)
    console = wide_console()
    console.print(table)
    console.print(
        f"[bold]{analysis.verdict}[/]: {VERDICTS[analysis.verdict]} (index {analysis.index:g})", soft_wrap=True
    )
