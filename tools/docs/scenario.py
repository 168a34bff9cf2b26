"""docs/reference/scenario.md: every key of a scenario."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import BaseModel

from fedaudit.data import DATASETS
from fedaudit.data.partition import PARTITIONS
from fedaudit.defences.spec import DefencesSpec
from fedaudit.models import MODELS
from fedaudit.models.families import inputs_of
from fedaudit.scenario.scenario import DataSpec, EvaluationSpec, ModelSpec, Scenario, TrainingSpec
from fedaudit.simulation.spec import FederationSpec, MaliciousSpec, PartitionSpec
from fedaudit.transcript.sent import SENT, settings_by_kind
from fedaudit.transcript.threat import ThreatModel
from tools.docs.settings import MADE, cell, default_of, head, markdown, row, type_of, written

# The parts of a scenario, as YAML names them.
_PARTS: dict[str, type[BaseModel]] = {
    "data": DataSpec,
    "model": ModelSpec,
    "model.training": TrainingSpec,
    "federations": FederationSpec,
    "federations.partition": PartitionSpec,
    "federations.malicious": MaliciousSpec,
    **{f"federations.{name}": kind for name, kind in settings_by_kind().items()},
    "defences": DefencesSpec,
    "threat": ThreatModel,
    "evaluation": EvaluationSpec,
}
_HEAD = """\
# Scenario

A scenario is a YAML file with everything that repeats an audit. Unknown keys are refused, and the nearest one is named.
Every key has a default but `federations` and, in each of these, `name`. `--set` changes a key without editing the file:
`--set federations.fedavg.clients=8`.

Whole numbers go up to 10⁹, other numbers from 10⁻³⁰ to 10³⁰ (and 0 where it is allowed), but where a bound is given.
Whatever stands under a name below, as `agic` under `attacks`, may be the name alone or the name and settings:

```yaml
name: two federations, one of them defended
data: {name: digits}
model: {name: mlp}
federations:
  - {name: gradients, algorithm: fedsgd, clients: 2, examples: 4, batch_size: 1}
  - {name: averaging, algorithm: fedavg, clients: 2, examples: 4, local_steps: 2}
defences: {client_defence: {name: top-k, ratio: 0.1}}
threat: {adversary: server}
attacks: [labels, {name: agic, iterations: 300}]
```
"""


def page() -> str:
    """Return the page."""
    lines = [_HEAD.replace("# Scenario\n", f"# Scenario\n\n{MADE}\n", 1), "## Keys at the top", ""]
    lines += _table("", Scenario)
    for path, part in _PARTS.items():
        lines += ["", f"## {path}", "", markdown(" ".join((part.__doc__ or "").split())), ""]
        lines += _table(path, part)
    lines += ["", "Schemes of `partition`:", "", *head("scheme", "what", "options (default)")]
    for entry in PARTITIONS:
        options = ", ".join(f"`{name}` ({written(value)})" for name, value in entry.info["options"].items())
        lines.append(row(f"`{entry.name}`", cell(entry.summary), options))
    lines += ["", "## Data sets", "", "`data.name`. They have no settings but the keys of `data` above.", ""]
    lines += head("name", "what", "task", "embedded", "needs", "package")
    for data in DATASETS:
        info = data.info
        known = "yes" if info["embedded"] else "no"
        package = f"`{DATASETS.distribution(data)}`"
        lines.append(row(f"`{data.name}`", cell(data.summary), info["task"], known, cell(info["needs"]), package))
    lines += ["", "## Models", "", "`model.name`. `width` is a model's size where it has one.", ""]
    lines += head("name", "what", "input", "width")
    for model in MODELS:
        lines.append(
            row(
                f"`{model.name}`",
                cell(model.summary),
                " or ".join(inputs_of(model)) or "any",
                _width(model.info["width"]),
            )
        )
    lines += ["", "## Settings of what is named", "", "Pages of their own: [attacks](attacks/index.md),"]
    lines += [
        "[aggregators](aggregators.md), [client-side defences](client-defences.md), [malicious "
        "clients](malicious-clients.md),"
    ]
    lines += ["[malicious servers](malicious-servers.md)."]
    return "\n".join(lines) + "\n"


def _table(path: str, part: type[BaseModel]) -> Iterator[str]:
    yield from head("key", "takes", "default", "meaning")
    for name, field in part.model_fields.items():
        inside = f"{path}.{name}".strip(".")
        if inside in _PARTS or name == "other_defences":
            link = f"see [{inside}](#{inside.replace('.', '')})" if inside in _PARTS else ""
            takes = {"federations": "list of federations", "defences": "a set of defences, or a list of them"}
            shown = takes.get(name, "keys and values")
            default = "required" if field.is_required() else "`null`" if field.default is None else "all defaults"
            if link:
                yield row(f"`{name}`", shown, default, "; ".join(filter(None, [cell(field.description or ""), link])))
            continue
        if not field.description:
            raise ValueError(f"{part.__name__}.{name} has no description: give its Field one")
        special = {
            "algorithm": ", ".join(f"`{a}`" for entry in SENT for a in entry.value.specified.algorithms),
            "attacks": "list of names, or `null`",
            "aggregator": "name",
            "client_defence": "name",
            "behaviour": "text",
        }
        defaults = {"attacks": "`null`", "aggregator": "`mean`", "client_defence": "`none`"}
        yield row(
            "`name`" if name == "behaviour" else f"`{name}`",
            special.get(name) or type_of(field),
            defaults.get(name) or default_of(field),
            cell(field.description),
        )


def _width(width: int | None) -> str:
    return "–" if width is None else f"{width:,}"
