"""docs/reference/scenario.md: every key of a scenario, and every setting of what a scenario names."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel

from fedaudit.attacks import ATTACKS
from fedaudit.attacks.inversion.template import GradientInversion
from fedaudit.data import DATASETS
from fedaudit.data.partition import PARTITIONS
from fedaudit.defences import AGGREGATORS, SANITISERS
from fedaudit.defences.spec import DefencesSpec
from fedaudit.models import MODELS
from fedaudit.models.families import inputs_of
from fedaudit.scenario.scenario import DataSpec, EvaluationSpec, ModelSpec, Scenario, TrainingSpec
from fedaudit.simulation.behaviour import BEHAVIOURS
from fedaudit.simulation.server_behaviour import SERVER_BEHAVIOURS
from fedaudit.simulation.spec import FederationSpec, MaliciousSpec, PartitionSpec
from fedaudit.transcript.threat import ThreatModel
from fedaudit.utils.registry import Plugin, Registry
from tests.docs.settings import MADE, cell, default_of, head, markdown, row, settings, type_of, written

# The parts of a scenario, as YAML names them.
_PARTS: dict[str, type[BaseModel]] = {
    "data": DataSpec,
    "model": ModelSpec,
    "model.training": TrainingSpec,
    "federations": FederationSpec,
    "federations.partition": PartitionSpec,
    "federations.malicious": MaliciousSpec,
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
defences: {sanitiser: {name: top-k, ratio: 0.1}}
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
    lines += ["", "## Attacks", ""]
    lines += _attacks()
    for title, registry in (
        ("Aggregators: defences.aggregator", AGGREGATORS),
        ("Sanitisers: defences.sanitiser", SANITISERS),
        ("Behaviours: federations.malicious", BEHAVIOURS),
        ("Server behaviours: federations.server", SERVER_BEHAVIOURS),
    ):
        lines += ["", f"## {title}", ""]
        lines += _settings(registry)  # type: ignore[arg-type]
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
            "attacks": "list of names, or `null`",
            "aggregator": "name",
            "sanitiser": "name",
            "behaviour": "text",
        }
        defaults = {"attacks": "`null`", "aggregator": "`mean`", "sanitiser": "`none`"}
        yield row(
            "`name`" if name == "behaviour" else f"`{name}`",
            special.get(name) or type_of(field),
            defaults.get(name) or default_of(field),
            cell(field.description),
        )


def _attacks() -> Iterator[str]:
    inversions = [entry.value for entry in ATTACKS if issubclass(entry.value, GradientInversion)]
    every = [settings(attack) for attack in inversions]
    shared = [name for name in every[0] if all(name in own for own in every)]
    varied = [name for name in shared if len({own[name][1] for own in every}) > 1]
    yield from ("What each does, from which paper: [attacks and defences](attacks-and-defences.md).", "")
    yield from ("### Gradient inversion", "")
    yield ", ".join(f"`{attack.name}`" for attack in inversions) + " share these settings:"
    yield from ("", *head("setting", "takes", "default", "meaning"))
    for name in shared:
        takes, default, meaning = every[0][name]
        yield row(f"`{name}`", takes, "below" if name in varied else default, cell(meaning))
    yield from ("", "Defaults that differ from method to method:", "")
    yield from head("attack", *(f"`{name}`" for name in varied))
    for attack, own in zip(inversions, every, strict=True):
        yield row(f"`{attack.name}`", *(own[name][1] for name in varied))
    for attack, own in zip(inversions, every, strict=True):
        more = {name: setting for name, setting in own.items() if name not in shared}
        yield from _own(attack.name, more, "and those that all share")
    for entry in ATTACKS:
        method: Any = getattr(entry.value, "method", None)
        if entry.value in inversions:
            continue
        if isinstance(method, type) and issubclass(method, GradientInversion):
            yield from ("", f"### {entry.name}", "", f"The settings of `{method.name}` and of `epochs`, side by side.")
        else:
            yield from _own(entry.name, settings(entry.value))
    yield from ("", "Without settings: " + ", ".join(f"`{e.name}`" for e in ATTACKS if not settings(e.value)) + ".")


def _own(name: str, own: dict[str, tuple[str, str, str]], also: str = "") -> Iterator[str]:
    if own:
        yield from ("", f"### {name}", "", *([f"Its own settings, {also} (above):", ""] if also else []))
        yield from head("setting", "takes", "default", "meaning")
        for key, (takes, default, meaning) in own.items():
            yield row(f"`{key}`", takes, default, cell(meaning))


def _settings(registry: Registry[type[Plugin]]) -> Iterator[str]:
    for entry in registry:
        yield from _own(entry.name, settings(entry.value))
    yield from ("", "Without settings: " + ", ".join(f"`{e.name}`" for e in registry if not settings(e.value)) + ".")


def _width(width: int | None) -> str:
    return "–" if width is None else f"{width:,}"
