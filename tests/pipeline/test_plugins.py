"""Other packages' attacks and defences, found by entry points, in lists, scenarios and reports; and broken ones."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from fedaudit.attacks import ATTACKS
from fedaudit.defences import AGGREGATORS, CLIENT_DEFENCES, Aggregate, Aggregator, Cohort
from fedaudit.defences.spec import DefencesSpec
from fedaudit.simulation.behaviour import BEHAVIOURS
from fedaudit.utils.errors import BadInput
from fedaudit.utils.registry import Plugin, Registry, make, register

ATTACK = '''
"""An attack that tells how long an update is, how that is evaluated and shown; an aggregator that halves the mean."""

from dataclasses import dataclass, field

import torch

from fedaudit.attacks import Attack, Finding, register
from fedaudit.defences import Aggregate, Aggregator, ClientDefence
from fedaudit.evaluation import FINDING_TYPES, Evaluation, FindingType, Metric, evaluate
from fedaudit.evaluation.finding_types import by_leaks, done
from fedaudit.report.panels import PANELS, Panel
from fedaudit.simulation.behaviour import Behaviour
from fedaudit.utils.validation import Positive


@dataclass(frozen=True, kw_only=True)
class LengthFinding(Finding, kind="length"):
    length: float


LENGTH = Metric("length", "norm of the update", "units")
FINDING_TYPES["length"] = FindingType(by_leaks("{} of {} were long"), ("'demonstrated': it was long.",), (LENGTH,))
PANELS["length"] = Panel(
    "Lengths",
    "length.html.j2",
    lambda result, images: [f for f in result.findings if f.kind == "length"],
    package="length_attack",
)


@evaluate.register
def _(finding: LengthFinding, observation, truth, *, seed):
    metrics = [LENGTH.of(finding.length, 0.0)]
    details = {"half": finding.length / 2}
    return Evaluation(done(finding, observation, metrics=metrics, is_leak=finding.length > 0, details=details))


@register
class Length(Attack):
    """Tells how long an update is."""

    name = "length"
    summary = "tells how long an update is"
    paper = "Nobody 2000"
    threat_model = "server or eavesdropper, passive"
    needs = ("updates",)
    recovers = "lengths"
    finds = LengthFinding

    scale: Positive = 1.0

    def check(self, observation):
        observation.single()

    def _run(self, observation, generator, device, progress, /):
        tensors = observation.single().update.tensors.values()
        length = self.scale * torch.cat([t.flatten() for t in tensors]).norm().item()
        return LengthFinding(length=length)


@register(frozen=False)
class Half(Aggregator):
    name = "half"
    summary = "half the mean, in every second round"
    paper = "Nobody 2001"

    lambda_: Positive = 0.5

    rounds: int = field(default=0, init=False)

    def __call__(self, updates, cohort=None):
        self.rounds += 1
        share = self.lambda_ if self.rounds % 2 else 1.0
        return Aggregate(share * updates.mean(dim=0), torch.full((len(updates),), 1 / len(updates)))


@register
class Twice(ClientDefence):
    name = "twice"
    summary = "sends twice the update"

    def __call__(self, update, context, generator):
        from dataclasses import replace

        return replace(update, tensors={name: 2 * tensor for name, tensor in update.tensors.items()})


@register
class Lazy(Behaviour):
    name = "lazy"
    summary = "sends zeros"

    def __call__(self, step):
        return {name: torch.zeros_like(tensor) for name, tensor in step.train(step.batches).items()}
'''

PANEL = """\
<section class="part" id="length" aria-labelledby="length-h">
<header><h2 id="length-h">How long</h2></header>
<ul>
{% for one in panel %}
<li>client {{ one.client }} of {{ "%.2f" % one.metrics[0].value }}: twice {{ "%.2f" % one.details.half }}</li>
{% endfor %}
</ul>
</section>
"""

INVERSION = '''
"""A gradient inversion with an objective of its own."""

from fedaudit.attacks import GradientInversion, register


@register
class Doubled(GradientInversion):
    name = "doubled"
    summary = "minimises twice the distance"
    paper = "Nobody 2002"
    needs = ("an image model",)
    distance = "squared-l2"
    fedavg = "simulation"

    times: float = 2.0

    def objective(self, prepared):
        plain = super().objective(prepared)

        def doubled(*variables):
            return tuple(self.times * part for part in plain(*variables))

        return doubled
'''

POINTS = """\
[fedaudit.attacks]
length = length_attack.attack
doubled = length_attack.inversion:Doubled

[fedaudit.aggregators]
half = length_attack.attack:Half

[fedaudit.client_defences]
twice = length_attack.attack:Twice

[fedaudit.behaviours]
lazy = length_attack.attack:Lazy
"""

SCENARIO = """\
version: 1
name: plug-ins
data: {name: digits}
model: {name: logistic}
federations:
  - {name: f, algorithm: fedavg, clients: 3, rounds: 3, examples: 30, local_steps: 2, malicious: {name: lazy}}
defences: {aggregator: {name: half, lambda: 0.25}, client_defence: twice}
attacks: [{name: length, scale: 2.0}]
evaluation: {accuracy_every: 1}
"""


DRAW = """
import sys
from pathlib import Path
from fedaudit.report.page import render_report
from fedaudit.results import AuditResult

folder = Path(sys.argv[1])
sys.stdout.write(render_report(AuditResult.load(folder / "results.json"), folder))
"""


@pytest.mark.parametrize("registry", [ATTACKS, AGGREGATORS, CLIENT_DEFENCES, BEHAVIOURS], ids=lambda r: r.kind)
def test_settings_are_one_thing_and_state_another(registry: Registry[Any]) -> None:
    for name in registry.names():
        made = make(registry, name)
        settings, state = made.settings(), made.state_dict()
        assert not settings.keys() & state.keys()
        assert make(registry, name, settings).settings() == settings
        for key in state:
            with pytest.raises(BadInput, match=f"{registry.kind} '{name}'.*'{key}'"):
                make(registry, name, {key: None})


def test_what_goes_on_from_a_state_shares_nothing_with_it() -> None:
    one, other = make(AGGREGATORS, "afa"), make(AGGREGATORS, "afa")
    cohort = Cohort((0, 1, 2), (5, 5, 5))
    one(torch.eye(3), cohort)
    other.load_state_dict(one.state_dict())
    one(torch.eye(3), cohort)
    counted = [sum(kept.values()) + sum(dropped.values()) for kept, dropped in (s.values() for s in states(one, other))]
    assert counted == [6, 3]
    assert states(one.anew()) == [{"kept": {}, "dropped": {}}]


def states(*plugins: Plugin) -> list[dict[str, Any]]:
    return [plugin.state_dict() for plugin in plugins]


@pytest.mark.parametrize(
    ("cls", "error", "words"),
    [
        (type("Loose", (), {"name": "loose", "summary": "s"}), TypeError, "Loose is neither an Attack"),
        (type("Nameless", (Aggregator,), {"summary": "s"}), ValueError, "Nameless has no name"),
        (type("Silent", (Aggregator,), {"name": "silent"}), ValueError, "Silent has no summary"),
        (type("Climbing", (Aggregator,), {"name": "../x", "summary": "s"}), ValueError, "'../x' can't be used"),
        (type("Again", (Aggregator,), {"name": "krum", "summary": "s"}), ValueError, "'krum' is registered twice"),
    ],
)
def test_what_cannot_be_registered_is_refused(cls: type, error: type[Exception], words: str) -> None:
    before = AGGREGATORS.names()
    with pytest.raises(error, match=words):
        register(cls)
    assert AGGREGATORS.names() == before


def install(folder: Path, package: str, points: str, panel: str = "", **modules: str) -> None:
    """Put a package and what an installer would write of it into ``folder``; a panel is a template."""
    home = folder / package.replace("-", "_")
    home.mkdir(parents=True)
    for name, text in {"__init__": "", **modules}.items():
        (home / f"{name}.py").write_text(text)
    if panel:
        (home / "templates").mkdir()
        (home / "templates/length.html.j2").write_text(panel)
    info = folder / f"{home.name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(points)


def python(site: Path, *words: str | Path) -> subprocess.CompletedProcess[str]:
    """Run Python in a process of its own, beside what is installed in ``site``."""
    paths = [str(site), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    line = [sys.executable, *map(str, words)]
    return subprocess.run(line, capture_output=True, text=True, check=False, env=environment)


def command(site: Path, *words: str | Path) -> subprocess.CompletedProcess[str]:
    return python(site, "-m", "fedaudit", *words)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    install(folder, "length-attack", POINTS, PANEL, attack=ATTACK, inversion=INVERSION)
    return folder


@pytest.mark.slow
def test_what_a_package_adds_is_listed(site: Path) -> None:
    told = command(site, "list", "--json")
    assert (told.returncode, told.stderr) == (0, "")
    shown = {kind: {entry["name"]: entry for entry in entries} for kind, entries in json.loads(told.stdout).items()}
    assert shown["attacks"]["length"] == {
        "name": "length",
        "summary": "tells how long an update is",
        "paper": "Nobody 2000",
        "threat_model": "server or eavesdropper, passive",
        "on_sums": "works: the examples of all clients in the sum are those of one update",
        "needs": ["updates"],
        "scope": "update",
        "looks_at": "update",
        "mapping": [],
        "package": "length-attack",
    }
    half = {"name": "half", "summary": "half the mean, in every second round", "side": "server", "paper": "Nobody 2001"}
    assert shown["defences"]["half"] == {**half, "package": "length-attack"}
    assert shown["defences"]["twice"]["side"] == "client"
    assert shown["behaviours"]["lazy"]["summary"] == "sends zeros"
    assert {"agic", "krum", "dp", "gan"} <= {name for entries in shown.values() for name in entries}


@pytest.mark.slow
def test_it_goes_through_an_audit_into_the_report_with_findings_of_its_own(site: Path, tmp_path: Path) -> None:
    path = tmp_path / "scenario.yaml"
    path.write_text(SCENARIO)
    told = command(site, "audit", path, "--out", tmp_path / "out", "--workers", "2", "--fail-above", "length=1e9")
    assert told.returncode == 0, told.stderr
    assert "were long" in told.stdout
    result = json.loads((tmp_path / "out/results.json").read_text())
    assert [a["settings"] for a in result["attacks"]] == [{"scale": 2.0}]
    lengths = {(f["round"], f["client"]): f["metrics"][0]["value"] for f in result["findings"]}
    assert len(lengths) == 9
    assert all((length == 0) == (client == 2) for (_, client), length in lengths.items())  # who was lazy
    assert result["summaries"][0]["verdict"] == "inferred"
    assert result["scenario"]["defences"]["aggregator"] == {"name": "half", "lambda": 0.25}
    page = (tmp_path / "out/report.html").read_text()
    for words in ("length", "Nobody 2000", "norm of the update", "half (half the mean", "lambda=0.25"):
        assert words in page, words
    for update in result["findings"]:  # its own panel
        length, half = update["metrics"][0]["value"], update["details"]["half"]
        assert f"<li>client {update['client']} of {length:.2f}: twice {half:.2f}</li>" in page
    assert '<a href="#length">Lengths</a>' in page
    again = python(site, "-c", DRAW, tmp_path / "out")  # where no attack is loaded yet
    assert again.stdout == page, again.stderr


AS_OBJECTS = """
import sys
import fedaudit
from length_attack.attack import Twice
from length_attack.inversion import Doubled

scenario = {
    "name": "inversion",
    "data": {"name": "digits"},
    "model": {"name": "logistic"},
    "federations": [{"name": "f", "clients": 2, "examples": 2}],
    "defences": {"client_defence": Twice()},
    "evaluation": {"max_updates": 1, "bootstrap": 100},
}
fedaudit.audit(scenario, attacks=[Doubled(iterations=5)], out=sys.argv[1], progress=False)
"""


@pytest.mark.slow
def test_an_objective_of_its_own_is_audited_from_python_and_from_yaml_alike(site: Path, tmp_path: Path) -> None:
    told = python(site, "-c", AS_OBJECTS, tmp_path / "python")
    assert told.returncode == 0, told.stderr
    told = command(site, "audit", tmp_path / "python/scenario.yaml", "--out", tmp_path / "yaml", "--workers", "1")
    assert told.returncode == 0, told.stderr
    one, other = (json.loads((tmp_path / way / "results.json").read_text()) for way in ("python", "yaml"))
    for same in ("scenario", "attacks"):
        assert one[same] == other[same]
    assert one["findings"][0]["images"] == other["findings"][0]["images"]
    assert one["attacks"][0]["settings"]["times"] == 2.0
    assert one["scenario"]["defences"]["client_defence"] == {"name": "twice"}
    assert "Nobody 2002" in (tmp_path / "python/report.html").read_text()
    told = command(site, "verify", tmp_path / "python", "--workers", "1")
    assert told.returncode == 0, told.stderr + told.stdout


@pytest.mark.slow
def test_its_settings_are_checked_as_ours_are(site: Path, tmp_path: Path) -> None:
    path = tmp_path / "scenario.yaml"
    path.write_text(SCENARIO.replace("scale: 2.0", "skale: 1"))
    told = command(site, "audit", path, "--out", tmp_path / "out")
    assert (told.returncode, told.stdout) == (2, "")
    error = "fedaudit: error: attack 'length': unknown key 'skale'; did you mean 'scale'? known: scale"
    assert told.stderr.splitlines()[-1] == error


@pytest.mark.slow
def test_its_author_can_check_it(site: Path) -> None:
    code = "import fedaudit.pipeline.contract as t; t.check_attack(t.make(t.ATTACKS, 'length'))"
    told = python(site, "-c", code)
    assert (told.returncode, told.stderr) == (0, "")


BROKEN = {
    "missing": ("nothing_here.attack", "", "ModuleNotFoundError: No module named 'nothing_here'"),
    "raising": ("raising.attack", "raise RuntimeError('one\\ntwo')", "RuntimeError: one two"),
    "exiting": ("exiting.attack", "raise SystemExit(3)", "SystemExit: 3"),
    "nameless": ("nameless.attack:Missing", "", "AttributeError: module 'nameless.attack' has no attribute 'Missing'"),
    "greedy": (
        "greedy.attack",
        "from fedaudit.attacks import ATTACKS, register\nregister(type('X', (ATTACKS['agic'].value,), {}))",
        "ValueError: attack 'agic' is registered twice",
    ),
}


@pytest.mark.slow
def test_broken_packages_are_named_in_a_line_each_and_stop_nothing(tmp_path: Path) -> None:
    for package, (point, text, _) in BROKEN.items():
        install(tmp_path, package, f"[fedaudit.attacks]\nbad = {point}\n", attack=text)
    install(tmp_path, "length-attack", POINTS, attack=ATTACK, inversion=INVERSION)
    told = command(tmp_path, "list", "attacks", "--json")
    assert told.returncode == 0
    assert sorted(told.stderr.splitlines()) == sorted(
        f"fedaudit: warning: the package '{package}' can't add its attack 'bad': {reason}"
        for package, (_, _, reason) in BROKEN.items()
    )
    names = [entry["name"] for entry in json.loads(told.stdout)["attacks"]]
    assert names.count("agic") == names.count("length") == 1


MISUSED = """
from fedaudit.attacks import InvG
from fedaudit.defences import Krum

InvG(iterations=300, total_variation=1e-4)
InvG(iterations="x")
InvG(nonsense=3)
Krum(f="many")
"""


@pytest.mark.slow
def test_type_checkers_know_the_settings(tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    (tmp_path / "misused.py").write_text(MISUSED)
    told = python(tmp_path, "-m", "mypy", "--strict", "--cache-dir", tmp_path / "cache", tmp_path / "misused.py")
    assert [line.split(":")[1] for line in told.stdout.splitlines() if "misused.py" in line] == ["6", "7", "8"]


def test_what_is_not_registered_cannot_be_in_a_scenario() -> None:
    class Unknown(Aggregator):
        def __call__(self, updates: torch.Tensor, cohort: Cohort | None = None) -> Aggregate:
            raise NotImplementedError

    with pytest.raises(BadInput, match="Unknown isn't registered"):
        DefencesSpec(aggregator=Unknown())


def test_help_looks_for_no_packages(tmp_path: Path) -> None:
    install(tmp_path, "broken-one", "[fedaudit.attacks]\nbad = broken_one\n", attack="")
    (tmp_path / "broken_one/__init__.py").write_text("raise RuntimeError")
    told = command(tmp_path, "audit", "--help")
    assert (told.returncode, told.stderr) == (0, "")
