"""What a study is: one scenario, axes that change it, repetitions, scales, and the claims that the result decides."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import reprlib
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, ValidationError, model_validator

from fedaudit import BadInput, Scenario
from fedaudit.evaluation import FINDING_TYPES, Metric, metric
from fedaudit.results import Look
from fedaudit.scenario import EvaluationSpec, apply_override, scenario_from
from fedaudit.utils import GRID, Count, Number, Spec, Title, Whole, explain, no_boolean, read_yaml, unknown_name

# Metrics of images, each with whether a higher value is the attack's success.
IMAGE_METRICS = {
    "psnr": True,
    "ssim": True,
    "mse": False,
    "lpips": False,
    "psnr_registered": True,
    "ssim_registered": True,
    "success": True,
    "psnr_normalised": True,
    "mse_normalised": False,
}
LOOKS: tuple[Look, ...] = ("pixel", "pattern", "embedding")
CANDIDATES = (10, 40, 168)
# How often a reconstruction names the right one of so many candidates, by each way of comparing pictures.
NAMED = {f"named_{look}_{n}": (look, n) for look in LOOKS for n in CANDIDATES}
IMAGE_METRICS |= dict.fromkeys(NAMED, True)
SUCCESS_DB = 25.0  # the PSNR above which an image is a success
# What is measured beside the findings' own metrics.
MEASURES = {
    m.name: m
    for m in (
        Metric("matching", "share of images rightly tied to the updates of several rounds"),
        Metric("without_attack", "a finding's first metric without the attack: by luck, or what is known anyway"),
        Metric("seconds", "wall time of the attack", unit="s", higher_is_better=False),
        Metric("cpu_seconds", "CPU time of the whole trial, its simulation included", unit="s", higher_is_better=False),
        Metric("model_accuracy", "held-out accuracy of the global model at the end", ends=(0, 1)),
        Metric("late_accuracy", "its mean over the last fifth of the measurements, which single rounds move less"),
        Metric("parameters_sent", "elements of an update as it was sent", higher_is_better=False),
        Metric("share_sent", "share of the model's elements that an update carries", higher_is_better=False),
        Metric("bytes_sent", "bytes of an update as it was sent", unit="B", higher_is_better=False),
        Metric("training_seconds", "local training of an update", unit="s", higher_is_better=False),
        Metric("client_defence_seconds", "a client's defence, an update", unit="s", higher_is_better=False),
        Metric("client_defence_share", "a client's defence, by the seconds of its training", higher_is_better=False),
        Metric(
            "malicious_accepted", "share of malicious clients' updates that the server took, from the attack's start"
        ),
        Metric("honest_accepted", "the same share of honest clients' updates", higher_is_better=False),
        Metric(
            "alarms", "a client's checks of a received model that a malicious server's raises", higher_is_better=False
        ),
        Metric("ceiling", "PSNR that whoever attacks could have of these updates, at least", unit="dB"),
        Metric("ceiling_thousandth", "the same for whoever matches the update to 1 in 1,000", unit="dB"),
        Metric("guess", "PSNR of the mean of such images, without any update", unit="dB"),
        Metric("memory", "peak memory of the trial beyond what lay there before", unit="MiB", higher_is_better=False),
    )
}
# Of these, what is known of a whole federation, and what it is called there.
OF_FEDERATIONS = {
    "model_accuracy": "accuracy",
    "late_accuracy": "late_accuracy",
    "parameters_sent": "parameters",
    "share_sent": "share",
    "bytes_sent": "bytes",
    "training_seconds": "training",
    "client_defence_seconds": "client_defence",
    "client_defence_share": "client_defence_share",
    "malicious_accepted": "malicious_accepted",
    "honest_accepted": "honest_accepted",
    "alarms": "alarms",
    "ceiling": "ceiling",
    "ceiling_thousandth": "ceiling_thousandth",
    "guess": "guess",
}
FORMAT = 1
_BUILTIN = Path(__file__).parent / "builtin"

ScaleName = Literal["smoke", "cpu", "paper"]
# dotted.key of the scenario -> value, as --set takes it
Changes = dict[str, Any]
# axis -> level
Point = dict[str, str]


def _shown(text: str) -> str:
    """Return ``text`` if pages, pictures and terminals can show it: 1 to 2,000 characters, no control characters."""
    if not 1 <= len(text) <= 2000 or not " ".join(text.split()).isprintable():
        raise ValueError("give 1 to 2,000 characters, without control characters")
    return text


Text = Annotated[str, AfterValidator(_shown)]


class LevelSpec(Spec):
    """What a scale changes at one level of an axis only."""

    repetitions: Count | None = Field(default=None, description="at most so many; the scale's own if null")
    changes: Changes = Field(default={})


class ScaleSpec(Spec):
    """What a scale changes, and that in words."""

    states: Text = Field(description="how this scale departs from the published setting, in a sentence")
    repetitions: Count
    changes: Changes = Field(default={})
    only: dict[str, list[str]] = Field(default={}, description="axis -> the levels that are run; all if absent")
    leave_out: list[dict[str, list[str]]] = Field(
        default=[], description="combinations that aren't run: those that have one of the levels of each axis named"
    )
    at: dict[str, dict[str, LevelSpec]] = Field(
        default={}, description="axis -> level -> what changes there, after the scale's own changes"
    )


class TogetherSpec(Spec):
    """What changes only where levels of several axes meet."""

    at: Point
    changes: Changes


class PublishedSpec(Spec):
    """A number of the paper's."""

    at: Point
    value: Number
    metric: str | None = Field(default=None, description="the study's own if null; otherwise shown beside it")


class ClaimSpec(Spec):
    """Something that the table is meant to show: by the metric, ``better`` has the better value.

    Either side may be a number, a published one for example. With a margin: ``better`` falls behind ``worse`` by less
    than that; with ``either_way``, it leads by less than that, too.
    """

    text: Text
    better: Point | Number
    worse: Point | Number
    margin: Annotated[Number, Field(ge=0)] = Field(default=0.0, description="in units of the metric")
    either_way: bool = Field(default=False, description="the sides are alike: neither leads by the margin")
    metric: str | None = Field(default=None, description="the study's own if null")


class StudySpec(Spec):
    """A grid of scenarios and what it stands for.

    Every repetition of every combination of levels is one trial: a scenario with exactly one attack, whose seed is the
    scenario's (or the study's) plus the repetition's number, or is listed. Levels that change only the attack therefore
    meet the same victims.
    """

    version: Annotated[Literal[1], BeforeValidator(no_boolean)] = 1
    name: Title
    title: Text
    paper: Text = Field(description="where the table or figure is published")
    seed: Whole = 0
    seeds: list[Whole] = Field(default=[], description="of the first repetitions, in place of seed, seed + 1, …")
    scenario: dict[str, Any]
    axes: dict[Title, Annotated[dict[Title, Changes], Field(min_length=1)]] = Field(min_length=1)
    together: list[TogetherSpec] = Field(
        default=[], description="what changes where levels of several axes meet, after what each changes alone"
    )
    scales: dict[ScaleName, ScaleSpec]
    metric: str = Field(default="psnr", description="psnr, ssim, mse, lpips, success, or one of another finding type")
    also: list[str] = Field(default=[], description="other metrics, shown small in every cell")
    columns: str = Field(description="the axis that is drawn across; the others go down")
    kind: Literal["table", "figure"] = "table"
    published: list[PublishedSpec] = Field(default=[])
    claims: list[ClaimSpec] = Field(default=[])

    @model_validator(mode="after")
    def _consistent(self) -> StudySpec:
        if self.columns not in self.axes:
            raise ValueError(unknown_name("axis in columns", self.columns, self.axes))
        for name in [self.metric, *self.also, *(c.metric for c in self.claims if c.metric)]:
            check_metric(name)
        for claim in self.claims:
            if not any(isinstance(side, dict) for side in (claim.better, claim.worse)):
                raise ValueError(f"the claim '{claim.text}' compares two numbers; one side must be levels of axes")
            if claim.either_way and not claim.margin:
                raise ValueError(f"the claim '{claim.text}' says either_way and needs a margin above zero")
        points = [p.at for p in self.published] + [t.at for t in self.together]
        points += [side for c in self.claims for side in (c.better, c.worse) if isinstance(side, dict)]
        for point in [*points, *({a: v for a in s.only for v in s.only[a]} for s in self.scales.values())]:
            check_point(point, self.axes)
        for scale in self.scales.values():
            left_out = [item for combination in scale.leave_out for item in combination.items()]
            for axis, levels in [*scale.only.items(), *scale.at.items(), *left_out]:
                for level in levels:
                    check_point({axis: level}, self.axes)
        return self


def measure(name: str) -> Metric | None:
    """Return what a study can be about beside the metrics of images, or None."""
    return None if name in IMAGE_METRICS else MEASURES.get(name) or metric(name)


def check_metric(name: str) -> None:
    """Raise ValueError unless studies can be about the metric ``name``; it says which ones they can."""
    if name not in IMAGE_METRICS and measure(name) is None:
        others = [*MEASURES, *(m.name for kind in FINDING_TYPES.values() for m in kind.metrics)]
        raise ValueError(unknown_name("metric", name, [*IMAGE_METRICS, *others]))


def check_point(point: Point, axes: dict[str, dict[str, Changes]]) -> None:
    """Raise ValueError unless every axis and level of ``point`` exists; it says what there is."""
    for axis, level in point.items():
        if axis not in axes:
            raise ValueError(unknown_name("axis", axis, axes))
        if level not in axes[axis]:
            raise ValueError(unknown_name(f"level of {axis}", level, axes[axis]))


@dataclass(frozen=True)
class StudyTrial:
    """One scenario of the grid; ``key``, its hash, names it in the store; repetitions count from 0."""

    key: str
    point: Point
    repetition: int
    scenario: Scenario

    @cached_property
    def text(self) -> str:
        """The scenario as YAML, which takes milliseconds to write."""
        return self.scenario.to_yaml()

    @property
    def label(self) -> str:
        """The trial in words."""
        return ", ".join([*(f"{axis} {level}" for axis, level in self.point.items()), f"#{self.repetition}"])


def builtin_studies() -> list[str]:
    """Return the names of the built-in studies."""
    return sorted(str(path.relative_to(_BUILTIN).with_suffix("")) for path in _BUILTIN.rglob("*.yaml"))


def catalogue() -> list[dict[str, Any]]:
    """Return what ``fedaudit list studies`` says of each built-in study."""
    found = {name: load_study(name) for name in builtin_studies()}
    return [{"name": n, "summary": s.title, "paper": s.paper, "scales": [*s.scales]} for n, s in found.items()]


def load_study(name: str) -> StudySpec:
    """Return the built-in study ``name``, or the one in the YAML file of that name."""
    path = Path(name)
    if name in builtin_studies():
        path = _BUILTIN / f"{name}.yaml"
    elif path.suffix not in {".yaml", ".yml"}:
        raise BadInput(unknown_name("study", name, builtin_studies()) + ", or the path of a YAML file")
    return _read(path)


@cache
def _read(path: Path) -> StudySpec:
    where = f"the study '{path}'"
    return study_from(read_yaml(path, where), where)


def study_from(values: Any, where: str) -> StudySpec:
    """Validate ``values`` (as read from YAML); BadInput is one line that names the key and what is wrong with it."""
    if not isinstance(values, dict):
        raise BadInput(f"{where}: expected a mapping of keys such as name, scenario, axes, scales")
    if "version" in values and values["version"] != 1:
        raise BadInput(f"{where}: has version {reprlib.repr(values['version'])}; this fedaudit reads version 1")
    try:
        return StudySpec.model_validate(values)
    except ValidationError as error:
        raise BadInput(f"{where}: {explain(error, StudySpec)}") from None


def expand(
    study: StudySpec, scale: str, *, overrides: list[str] | None = None, only: list[str] | None = None
) -> list[StudyTrial]:
    """Return the trials of ``study`` at ``scale``: repetitions outermost, so that every cell fills evenly.

    Args:
        overrides: ``key=value`` on every scenario, after everything else; a seed is that of the first repetition.
        only: ``axis=level``: leave out the others of that axis.
    """
    setting = next((setting for name, setting in study.scales.items() if name == scale), None)
    if setting is None:
        raise BadInput(f"the study {study.name} has {unknown_name('scale', scale, study.scales)}")
    levels = {axis: list(setting.only.get(axis, values)) for axis, values in study.axes.items()}
    for axis, chosen in _parse_only(only or [], study).items():
        levels[axis] = [level for level in levels[axis] if level in chosen]
        if not levels[axis]:
            raise BadInput(f"--only {axis}={','.join(chosen)}: the scale {scale} doesn't run it")
    wanted = setting.repetitions * math.prod(map(len, levels.values()))
    if wanted > (GRID.items or 0):
        raise BadInput(
            f"the study {study.name} at scale {scale} is of {wanted:,} trials, and {GRID.items:,} are the most; "
            "lower its repetitions, or leave levels out"
        )
    trials: dict[str, StudyTrial] = {}
    made: dict[tuple[str, ...], Scenario] = {}  # at each combination, in its first repetition
    for repetition in range(setting.repetitions):
        for combination in itertools.product(*levels.values()):
            point = dict(zip(levels, combination, strict=True))
            if any(all(point[axis] in out[axis] for axis in out) for out in setting.leave_out):
                continue
            where = f"the study {study.name} at {point}"
            special = [setting.at.get(axis, {}).get(level, LevelSpec()) for axis, level in point.items()]
            if any(s.repetitions is not None and repetition >= s.repetitions for s in special):
                continue
            if combination not in made:
                changes = [study.axes[axis][level] for axis, level in point.items()]
                changes += [together.changes for together in study.together if together.at.items() <= point.items()]
                changes += [setting.changes, *(s.changes for s in special)]
                made[combination] = _scenario_at(study, changes, overrides or [], where)
            scenario = made[combination]
            listed = scenario.seed == study.seed and repetition < len(study.seeds)
            seed = study.seeds[repetition] if listed else scenario.seed + repetition
            scenario = scenario.model_copy(update={"seed": seed})
            key = trial_key(scenario)
            if key in trials:
                raise BadInput(f"{where}: the scenario is the same as at {trials[key].point}; leave one of them out")
            trials[key] = StudyTrial(key, point, repetition, scenario)
    if not trials:
        raise BadInput(f"the study {study.name} has no trial at scale {scale}: leave less out")
    return list(trials.values())


def _scenario_at(study: StudySpec, changes: list[Changes], overrides: list[str], where: str) -> Scenario:
    values: dict[str, Any] = {"version": 1, "seed": study.seed, **study.scenario}
    for change in changes:
        values = _change(values, change)
    for override in overrides:
        values = apply_override(values, override)
    scenario = scenario_from(values, where=where)
    if len(scenario.attacks) != 1:
        raise BadInput(f"{where}: a trial runs exactly one attack, not {len(scenario.attacks)}")
    return scenario


def trial_key(scenario: Scenario) -> str:
    """Return a hash of everything in ``scenario`` but its name."""
    values = scenario.model_dump(mode="json", exclude={"name"})
    model = values["model"]  # what was added later is left out where it is left open: kept trials have these keys
    model["batch_norm"] = model["batch_norm"] or "eval"
    if model["dropout"] is None:
        del model["dropout"]
    if not model["extra_classes"]:
        del model["extra_classes"]
    for federation in values["federations"]:
        if federation["batch_norm"] is None:
            del federation["batch_norm"]
        if federation["arithmetic"] == "torch":
            del federation["arithmetic"]
    del values["evaluation"]["controls"]  # studies run none
    if values["evaluation"]["min_accuracy"] == EvaluationSpec().min_accuracy:
        del values["evaluation"]["min_accuracy"]
    return hashlib.sha256(json.dumps([FORMAT, values], sort_keys=True).encode()).hexdigest()[:32]


def _change(values: dict[str, Any], changes: Changes) -> dict[str, Any]:
    for key, value in changes.items():
        values = apply_override(values, f"{key}={json.dumps(value)}")
    return values


def _parse_only(texts: list[str], study: StudySpec) -> dict[str, list[str]]:
    chosen: dict[str, list[str]] = {}
    for text in texts:
        axis, equals, level = text.partition("=")
        if not equals:
            raise BadInput(f"--only {text}: expected axis=level, for example attack=agic")
        try:
            check_point({axis: level}, study.axes)
        except ValueError as error:
            raise BadInput(f"--only {text}: {error}") from None
        chosen.setdefault(axis, []).append(level)
    return chosen
