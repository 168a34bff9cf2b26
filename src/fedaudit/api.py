"""The Python face: an audit of a user's own model and data in one call."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor, nn

from fedaudit.data import Dataset
from fedaudit.evaluation import check_limits
from fedaudit.pipeline.run import Audit, run_audit
from fedaudit.scenario import Scenario, load_scenario, scenario_from
from fedaudit.update import Loss
from fedaudit.utils.errors import BadInput
from fedaudit.utils.folders import check_folder
from fedaudit.utils.progress import live_display

Array = Tensor | np.ndarray[Any, Any]


def audit(
    scenario: Scenario | str | Path | dict[str, Any] | None = None,
    *,
    model: nn.Module | None = None,
    data: Dataset | tuple[Array, Array] | Any | None = None,
    loss: Loss | None = None,
    federations: Sequence[dict[str, Any]] | None = None,
    attacks: Sequence[str | dict[str, Any]] | None = None,
    threat: dict[str, Any] | None = None,
    seed: int | None = None,
    data_dir: Path | str | None = None,
    out: Path | str | None = None,
    workers: int = 1,
    fail_above: dict[str, float] | None = None,
    progress: bool = True,
) -> Audit:
    """Audit a federation: simulate it, attack what the adversary sees, and judge what was recovered.

    Args:
        scenario: a Scenario, a YAML file or a mapping; None starts from the default audit (embedded photographs).
        model: your own module, in the state in which round 0 begins; it isn't changed. (n, C, H, W) normalised images
            or (n, d) rows to (n, classes) logits.
        data: your own examples: a Dataset, (inputs, targets) with images uint8 or float in [0, 1] of shape
            (n, C, H, W) and integer targets, or any map-style torch Dataset of such pairs. Without a scenario the
            clients hold its train split; of tensors one example in five is held out, as candidates.
        loss: your own, (outputs, targets) to the mean over the batch; default cross-entropy.
        federations: instead of the scenario's, as in YAML.
        attacks: instead of the scenario's: names, or mappings with settings.
        threat: instead of the scenario's.
        seed: instead of the scenario's.
        data_dir: where data sets that aren't embedded lie (or FEDAUDIT_DATA).
        out: folder for report.html, results.json, scenario.yaml; an interrupted audit goes on from there.
        workers: processes for the attacks.
        fail_above: metric to limit; ``Audit.exceeded`` tells.
        progress: show a progress display where standard error is a terminal.

    Returns:
        The finished audit; ``audit.result`` has every number, ``audit.save(folder)`` writes the report.

    Raises:
        BadInput: something can't be used; the message says what and what to do.
    """
    values = _values(scenario)
    for part in ("model", "data"):
        if not isinstance(values.get(part, {}), dict):
            raise BadInput(
                f"scenario: {part}: {values[part]!r} isn't allowed; it should be a mapping of keys to values"
            )
    changes: dict[str, Any] = {"federations": federations, "attacks": attacks, "threat": threat, "seed": seed}
    values |= {key: value for key, value in changes.items() if value is not None}
    if model is not None:
        given = {"initialisation": "given", "width": None, "checkpoint": None}
        values["model"] = {**values.get("model", {}), "name": "custom", **given}
    if loss is not None:
        values["model"] = {**values.get("model", {}), "loss": "custom"}
    dataset = None
    if data is not None:
        dataset = _dataset(data)
        own = {"name": "custom", "image_size": None, "limit": None}
        values["data"] = {"split": "train", **(values.get("data", {}) if scenario else {}), **own}
    check_limits(fail_above or {})
    made = scenario_from(values)
    folder = Path(out) if out else None
    if folder:
        check_folder(folder)
    with live_display(progress) as display:
        finished = run_audit(
            made,
            data_dir=Path(data_dir) if data_dir else None,
            dataset=dataset,
            model=model,
            loss=loss,
            workers=workers,
            store=folder / "findings" if folder else None,
            limits=fail_above,
            display=display,
        )
    if folder:
        finished.save(folder)
    return finished


def _values(scenario: Scenario | str | Path | dict[str, Any] | None) -> dict[str, Any]:
    if isinstance(scenario, dict):
        defaults = load_scenario(None).model_dump(mode="json")
        return {"federations": defaults["federations"], "attacks": defaults["attacks"], **scenario}
    loaded = scenario if isinstance(scenario, Scenario) else load_scenario(Path(scenario) if scenario else None)
    return loaded.model_dump(mode="json")


def _dataset(data: Any) -> Dataset:
    if isinstance(data, Dataset):
        return data
    if isinstance(data, tuple | list) and len(data) == 2:
        return Dataset.from_tensors(*data)
    if hasattr(data, "__getitem__") and hasattr(data, "__len__"):
        return Dataset.from_torch(data)
    raise BadInput(
        f"data is a {type(data).__name__}; give a fedaudit.Dataset, (inputs, targets), or a map-style torch Dataset"
    )
