"""What to do about a result: each piece of advice with the command or the change of the scenario that tries it."""

from __future__ import annotations

import itertools
import shlex
from typing import Any, NamedTuple

from fedaudit.evaluation.finding_types import known_type
from fedaudit.modalities import example_kind
from fedaudit.report.conclusion import headline
from fedaudit.results import LEAKS, AttackSummary, AuditResult
from fedaudit.simulation.protocols import protocol_by

_COMMAND = "fedaudit audit scenario.yaml --out DIR"
_ATTACK = "fedaudit attack "
_BATCH = 8
_ENOUGH = 1000  # iterations that a first audit of small images takes


class Advice(NamedTuple):
    """What to do: in a few words, why and at what cost, and the flags of ``fedaudit audit`` that try it."""

    title: str
    text: str
    change: str


def advice(result: AuditResult) -> list[Advice]:
    """Return what to do, the most useful first."""
    found = headline(result)
    if found.verdict in LEAKS:
        return [*_as_deployed(result), *_against(result)]
    kept = [_keep("inferred")] if found.verdict == "not demonstrated" else []
    return [*_to_conclude(result), *kept, *_as_deployed(result)]


def _as_deployed(result: AuditResult) -> list[Advice]:
    """Return how to ask the same of a deployment, where this was a diagnostic."""
    change = " ".join(f"--set {shlex.quote(setting)}" for setting in result.as_deployed)
    text = (
        "This was a diagnostic. Here the network is trained first, and clients take batches, as federations in use do; "
        "set the numbers to yours."
    )
    return [Advice("Ask it of a deployment.", text, change)] if change else []


def command(result: AuditResult, change: str) -> str:
    """Return what tries a change, as it is printed: a command, or a line of Python where parts are a user's own."""
    if change.startswith("fedaudit "):
        return change
    if result.repeat.startswith(_COMMAND):
        return f"fedaudit audit scenario.yaml {change} --out NEW{result.repeat.removeprefix(_COMMAND)}"
    if result.repeat.startswith(_ATTACK):  # what is set later wins
        return f"{result.repeat.removesuffix(' --out DIR').replace(' --out DIR', '')} {change} --out NEW"
    return _in_python(result, change)


def _in_python(result: AuditResult, change: str) -> str:
    """Return a change as a call with the user's own model, data and loss, whose names there stand for them."""
    words = shlex.split(change)
    settings = [value for flag, value in itertools.pairwise(words) if flag == "--set"]
    scenario = result.scenario
    parts = {"model": scenario["model"]["name"], "data": scenario["data"]["name"], "loss": scenario["model"]["loss"]}
    given = [f"fedaudit.load_scenario('scenario.yaml', {settings!r})" if settings else "'scenario.yaml'"]
    given += [f"{part}={part}" for part, name in parts.items() if name == "custom"]
    given += ["compare_defences=True"] if "--compare-defences" in words else []
    given += [f"fail_on={words[words.index('--fail-on') + 1]!r}"] if "--fail-on" in words else []
    return f"fedaudit.audit({', '.join(given)}, out='NEW')"


def _against(result: AuditResult) -> list[Advice]:
    leaks = [s for s in result.summaries if s.verdict in LEAKS]
    remedies = {remedy for s in leaks for remedy in known_type(s.kind).remedies}
    lines = []
    recorded = any(f.recording for f in result.federations) or result.repeat.startswith(_ATTACK)
    if result.adversary.adversary == "malicious-server" and not without_updates(result):
        lines.append(
            Advice(
                "Check every model before you train on it.",
                "A client can see what it was sent. Under Adversary and setting stands which checks notice this.",
                "fedaudit check-model RECEIVED --scenario scenario.yaml --client 0",
            )
        )
    if without_updates(result):
        lines += _of_protocol(result, leaks)
    elif recorded:
        lines.append(
            Advice(
                "Clip updates and add noise before they leave the client.",
                "Differential privacy bounds what any attack can learn. It costs accuracy, less with more clients. Put "
                "it in where clients don't have it yet (in Flower: ClientDefenceMod), record again, and compare.",
                "fedaudit compare OLD NEW",
            )
        )
    elif all(f.undefended for f in result.federations):
        lines.append(
            Advice(
                "Compare defences.",
                "Runs this audit again under three defences that fit what was found; shows what each leaks and costs.",
                "--compare-defences",
            )
        )
        lines.append(
            Advice(
                "Clip updates and add noise before they leave the client.",
                "Differential privacy bounds what any attack can learn. It costs accuracy, less with more clients.",
                "--set defences.client_defence=dp --set defences.client_defence.epsilon=null",
            )
        )
    things = example_kind(result.data.kind or "image").plural
    if "larger batches" in remedies and not recorded and (change := _larger_batch(result, leaks)):
        lines.append(
            Advice(
                "Send less often, about more examples.",
                f"Larger batches usually make {things} harder to reconstruct. They guarantee nothing.",
                change,
            )
        )
    if "fewer rounds" in remedies and not recorded and (change := _fewer_rounds(result, leaks)):
        lines.append(
            Advice(
                "Train for fewer rounds.",
                "A model that has learnt its examples by heart tells who they are.",
                change,
            )
        )
    lines.append(_keep(min((s.verdict for s in leaks), key=LEAKS.index)))
    return lines


def without_updates(result: AuditResult) -> bool:
    """Return whether clients of its federations send no updates, so that defences of these have no place."""
    return any(not protocol_by(f.algorithm).updates for f in result.federations)


def _of_protocol(result: AuditResult, leaks: list[AttackSummary]) -> list[Advice]:
    """Return what changes the leak of a federation without updates: settings of its protocol."""
    changes = (protocol_by(spec["algorithm"]).changes(spec) for spec in _leaking(result, leaks))
    first = next(filter(None, changes), ())
    return [Advice(one.title, one.text, " ".join(f"--set {setting}" for setting in one.settings)) for one in first]


def _keep(level: str) -> Advice:
    return Advice(
        "Hold the next version to it.",
        "With this limit the audit fails (exit code 1) when the verdict is reached, and says so (exit code 3) when it "
        "could not be tested.",
        f"--fail-on {level}",
    )


def _to_conclude(result: AuditResult) -> list[Advice]:
    """Return what makes an open audit conclude: more effort, more records, other attacks."""
    lines = []
    attacks = {a.name: a.settings for a in result.attacks}
    for name, settings in attacks.items():
        own = [s for s in result.summaries if s.attack == name and s.verdict not in (*LEAKS, "not applicable")]
        iterations = settings.get("iterations")
        short = next((c for s in own for c in s.cautions if "iterations" in c), None)
        if own and short and isinstance(iterations, int):
            text = f"{short[0].upper()}{short[1:]}."
            change = f"--set attacks.{name}.iterations={max(_ENOUGH, 10 * iterations)}"
            lines.append(Advice(f"Give {name} more effort.", text, change))
    records = result.scenario.get("threat", {}).get("target_records")
    held = min((f["examples"] for f in result.scenario.get("federations", []) if f.get("examples")), default=None)
    more = min(2 * (records or 0), 2 * held if held else 2 * (records or 0))
    undecided = [s for s in result.summaries if s.verdict == "inconclusive"]
    if records and more > records and any("more records" in known_type(s.kind).remedies for s in undecided):
        text = "More records decide what fewer leave to luck."
        lines.append(Advice("Ask about more records.", text, f"--set threat.target_records={more}"))
    if any("other attacks" in known_type(s.kind).remedies for s in result.summaries) and not without_updates(result):
        others = [name for name in ("invg", "agic", "agic-plus") if name not in attacks][:2]
        if others:
            listed = ", ".join([*attacks, *others])
            text = "Another attack may find what these did not."
            change = f"--set {shlex.quote(f'attacks=[{listed}]')}"
            if result.repeat.startswith(_ATTACK):
                change = " ".join(f"--attack {name}" for name in others)
            lines.append(Advice("Run other attacks, too.", text, change))
    if not lines and result.summaries and headline(result).verdict != "not demonstrated":
        text = "What is open above says why. Each attack says what it needs; one of them may decide it."
        lines.append(Advice("Look for an attack that can decide it.", text, "fedaudit list attacks --long"))
    return lines


def _larger_batch(result: AuditResult, leaks: list[AttackSummary]) -> str:
    """Return the flags that make a leaking federation's batches larger, if there are examples enough."""
    known = max((i.candidates for f in result.findings for i in f.images), default=0)
    for spec in _leaking(result, leaks):
        needed = _BATCH * spec["clients"]
        if spec["batch_size"] < _BATCH and needed <= known and spec["algorithm"] == "fedsgd":
            name = spec["name"]
            more = f" --set federations.{name}.examples={needed}" if spec.get("examples") else ""
            return f"--set federations.{name}.batch_size={_BATCH}{more}"
    return ""


def _fewer_rounds(result: AuditResult, leaks: list[AttackSummary]) -> str:
    for spec in _leaking(result, leaks):
        if spec["rounds"] > 3 and not spec.get("keep_rounds"):
            return f"--set federations.{spec['name']}.rounds={spec['rounds'] // 2}"
    return ""


def _leaking(result: AuditResult, leaks: list[AttackSummary]) -> list[dict[str, Any]]:
    names = {s.federation for s in leaks}
    specs: list[dict[str, Any]] = result.scenario.get("federations", [])
    return [s for s in specs if any(n == s["name"] or n.startswith(f"{s['name']}-") for n in names)]
